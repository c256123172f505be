"""What Hopper's kernels for a cache share: boxes of keys that TMA copies, rows of Q, scores by wgmma, 64 rows at a time."""

import triton.language as tl

from strobe.kernels.common.channel import swizzled
from strobe.kernels.common.groups import GROUP, PANEL, in_squares
from strobe.kernels.common.scores import LOG2E
from strobe.kernels.decode.keys import is_page, load_queries, look_up, wide
from strobe.kernels.decode.layouts import lanes
from strobe.kernels.decode.scores import changed, finite, is_seen, some_are_hidden
from strobe.kernels.gluon import cp_async, gl, gluon, reinterpret, tma_load, warpgroup_mma_wait


@gluon.constexpr_function
def accumulator(C, columns):
    """A result of wgmma, [rows, columns]: four warps have 64 rows, and with column_warps a part of the columns."""
    across = C.column_warps
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C.warps // across, across], instr_shape=[16, columns // across, 16]
    )


@gluon.constexpr_function
def rows_of(C, columns):
    return gl.SliceLayout(1, accumulator(C, columns))


@gluon.constexpr_function
def rows_layout(columns, warps):
    """The layout of [1, rows or keys, columns] when a thread has 16 bytes of a row."""
    across = columns // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def boxes_shape(C, shape):
    """A chunk of a ring, [stages, tokens, columns], as TMA sees it."""
    return [shape[0] * (C.tokens // C.box), C.box, shape[2]]


# ---- copies


@gluon.jit
def pages_of_boxes(cached, piece, first, C: gl.constexpr):
    """The page (or entry) of each box of the step from key `first` on; -1 for one that has no key of the piece."""
    pages = ()
    for b in gl.static_range(C.tokens // C.box):
        if cached.PAGE == 0:
            pages += (piece.entry,)
        else:
            at = cached.table + wide(piece.batch, cached.table_row) + (first + b * C.box) // cached.PAGE
            pages += (gl.load(at, mask=has_keys(piece, first + b * C.box, C), other=-1),)
    return pages


@gluon.constexpr_function
def window_of(C):
    """Steps whose pages are looked up together, one by each lane."""
    return 32 // (C.tokens // C.box)


@gluon.jit
def pages_of_window(cached, piece, first, C: gl.constexpr):
    """The pages of the boxes from key `first` on, one in each lane; -1 for one that has no key of the piece. For one warp."""
    first += gl.arange(0, 32, lanes(1)) * C.box
    if cached.PAGE == 0:
        return first
    else:
        at = cached.table + wide(piece.batch, cached.table_row) + first // cached.PAGE
        return gl.load(at, mask=has_keys(piece, first, C), other=-1)


@gluon.jit
def pages_of_step(cached, piece, window, i, C: gl.constexpr):
    """The page (or entry) of each box of the i-th step of a window."""
    BOXES: gl.constexpr = C.tokens // C.box
    pages = ()
    for b in gl.static_range(BOXES):
        if cached.PAGE == 0:
            pages += (piece.entry,)
        else:
            lane = gl.arange(0, 32, lanes(1))
            pages += (gl.max(gl.where(lane == i * BOXES + b, window, -(2**31)), 0),)
    return pages


@gluon.jit
def has_keys(piece, first, C: gl.constexpr):
    """Whether a box has keys of a piece."""
    return (first + C.box > piece.begin) & (first < piece.end)


@gluon.jit
def copy_boxes(descriptor, chunk, slot, barrier, cached, pages, head, first, COLUMN: gl.constexpr, C: gl.constexpr):
    """Start copying columns from COLUMN on of the step from key `first` on to a place in a ring. chunk: [stages, tokens,
    columns]. TMA copies zeros for a page that is not there, and for keys beyond a contiguous cache."""
    BOXES: gl.constexpr = C.tokens // C.box
    ring = reinterpret(chunk, chunk.dtype, boxes_shape(C, chunk.shape), swizzled(chunk.dtype, chunk.shape[2]))
    for b in gl.static_range(BOXES):
        page, row = place_of_box(cached, pages[b], first + b * C.box)
        box = ring.index(slot * BOXES + b).reshape(descriptor.block_type.shape)
        tma_load(descriptor, [page, head, row, COLUMN], barrier, box)


@gluon.jit
def copy_groups(descriptor, block, barrier, cached, pages, page_stride, row_stride, head, first, C: gl.constexpr):
    """The same where keys lie in groups, all columns of them, to a block of groups."""
    GROUPS: gl.constexpr = C.box // GROUP
    of_page = (page_stride // (GROUP * row_stride)).to(gl.int32)
    for b in gl.static_range(C.tokens // C.box):
        page, row = place_of_box(cached, pages[b], first + b * C.box)
        group = page * of_page + row // GROUP
        tma_load(descriptor, [group, head, 0, 0, 0], barrier, block.slice(b * GROUPS, GROUPS, 0))


@gluon.jit
def place_of_box(cached, page, first):
    """Where TMA finds the box from key `first` on: its page, the one behind the last for one that is not there, and its row."""
    row = first
    if cached.PAGE:
        row = row % cached.PAGE
    return gl.where(is_page(cached, page), page, cached.pages), row


@gluon.jit
def rows_of_queries(outputs, piece, FIRST: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
                    DIM: gl.constexpr):  # fmt: skip
    """Columns of the rows of a tile of Q from FIRST on, zeros beyond the last one."""
    WIDTH: gl.constexpr = 8 if DIM % 8 == 0 else 2
    q = load_queries(outputs, piece, FIRST, COLUMNS, rows_layout(COLUMNS, C.warps), C, GROUP, DIM, WIDTH)
    return gl.reshape(q, [C.rows, COLUMNS])


@gluon.jit
def copy_queries(place, outputs, piece, FIRST: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    """Start copying columns from FIRST on of the rows of a tile of Q to a place in shared memory; zeros beyond the last row."""
    COLUMNS: gl.constexpr = place.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, C.rows, gl.SliceLayout(1, L))
    at = outputs.q + piece.batch.to(gl.int64) * outputs.q_batch + FIRST
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, L)), 0)
    if GROUP % C.rows == 0:  # all rows are there, and of one query: so addresses take fewer instructions
        query, head = piece.first_query + piece.first_row // GROUP, piece.head * GROUP + piece.first_row % GROUP
        at += wide(query, outputs.q_row) + wide(head, outputs.q_head)
        at += gl.expand_dims(wide(row, outputs.q_head), 1) + column
        cp_async(place, gl.multiple_of(at, [1, 16]))  # bytes
    else:
        row += piece.first_row
        query, head = piece.first_query + row // GROUP, piece.head * GROUP + row % GROUP
        at += gl.expand_dims(wide(query, outputs.q_row) + wide(head, outputs.q_head), 1) + column
        mask = gl.max_constancy(gl.expand_dims(row < piece.queries * GROUP, 1) & (column >= 0), [1, 8])
        cp_async(place, gl.multiple_of(at, [1, 16]), mask=mask)  # bytes


@gluon.jit
def ask_for_queries(descriptor, place, barrier, requests, piece, C: gl.constexpr, GROUP: gl.constexpr):
    """Start copying the rows of a tile of Q to `place`, [groups of warps * chunks, rows of a group, chunk], by TMA; zeros
    beyond the last query, or those of the next request. Rows of absent heads hold anything."""
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    GROUPS: gl.constexpr = C.groups
    QUERIES: gl.constexpr = C.rows // GROUPS // GROUP
    query, head = piece.first_query + piece.first_row // GROUP, piece.head * (GROUP - C.absent)
    batch = piece.batch
    if requests.cu_q is not None:
        batch = 0 * batch
    for w in gl.static_range(GROUPS):
        for c in gl.static_range(CHUNKS):
            box = place.index(w * CHUNKS + c).reshape(descriptor.block_type.shape)
            tma_load(descriptor, [batch, query + w * QUERIES, head, c * C.chunk], barrier, box)


@gluon.jit
def clear_values(values, piece, first, C: gl.constexpr):
    """Set the values of a step to zero that are not of a piece: 0 * NaN would be NaN. values: a chunk of their columns. The
    caller fences."""
    AT_ONCE: gl.constexpr = 16
    L: gl.constexpr = gl.SliceLayout(0, rows_layout(C.chunk, gl.num_warps()))
    for i in gl.static_range(C.tokens // AT_ONCE):
        keys = first + i * AT_ONCE + gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(1, L)), 1)
        clear_some(values.slice(i * AT_ONCE, AT_ONCE, 0), keys, piece, L)


@gluon.jit
def clear_groups(values, piece, first, C: gl.constexpr):
    """The same of a block of groups."""
    L: gl.constexpr = gl.SliceLayout(0, rows_layout(PANEL, gl.num_warps()))
    PANELS: gl.constexpr = values.shape[2]
    SQUARES: gl.constexpr = values.shape[0] * PANELS
    squares = in_squares(values)
    for i in range(SQUARES):
        keys = first + i // PANELS * GROUP + gl.expand_dims(gl.arange(0, GROUP, gl.SliceLayout(1, L)), 1)
        clear_some(squares.index(i), keys, piece, L)


@gluon.jit
def clear_some(values, keys, piece, L: gl.constexpr):
    values.store(gl.where((keys >= piece.begin) & (keys < piece.end), values.load(L), 0.0))


@gluon.jit
def has_others(piece, first, C: gl.constexpr):
    """Whether a step has keys that are not of a piece."""
    return (first < piece.begin) | (first + C.tokens > piece.end)


@gluon.jit
def first_step(piece, C: gl.constexpr):
    """The first key of a piece's first step, and how many steps it has, one at least."""
    first = piece.begin // C.tokens * C.tokens
    return first, gl.maximum((piece.end - first + C.tokens - 1) // C.tokens, 1)


@gluon.jit
def copy_steps(COPY: gl.constexpr, memory, K, piece, state):
    """Copy the steps of a piece, each by COPY, which is told its first key and its pages. They are looked up a window of steps
    ahead."""
    C: gl.constexpr = K.C
    first, steps = first_step(piece, C)
    window = pages_of_window(K.cached, piece, first, C)
    for begin in tl.range(0, steps, window_of(C)):
        next_window = pages_of_window(K.cached, piece, first + (begin + window_of(C)) * C.tokens, C)
        for i in tl.range(begin, gl.minimum(begin + window_of(C), steps)):
            pages = pages_of_step(K.cached, piece, window, i - begin, C)
            state = COPY(memory, K, piece, first + i * C.tokens, pages, state)
        window = next_window
    return state


# ---- scores and products


LOOKED_AT = gl.constexpr(512)
"""Pages that are looked at together."""


@gluon.jit
def misses_a_page(cached, piece):
    """Whether a page of a piece is not there."""
    missing = piece.begin < piece.begin
    if cached.PAGE:
        L: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 32 // gl.num_warps()], [32], [gl.num_warps()], [0])
        end = (piece.end + cached.PAGE - 1) // cached.PAGE
        for first in range(piece.begin // cached.PAGE, end, LOOKED_AT):
            number = first + gl.arange(0, LOOKED_AT, L)
            at = cached.table + wide(piece.batch, cached.table_row) + number
            pages = gl.load(at, mask=number < end, other=-1)
            missing = missing | (gl.max(((number < end) & ~is_page(cached, pages)).to(gl.int32), 0) > 0)
    return missing


@gluon.jit
def scale_of_keys(terms, piece):
    scale = 1.0
    if terms.k_scale is not None:
        scale = gl.load(terms.k_scale + piece.batch * terms.k_scale_page + piece.head * terms.k_scale_row)
    return scale


@gluon.jit
def seen_scores(s, terms, cached, piece, first, k_scale, holes, C: gl.constexpr, GROUP: gl.constexpr):
    """Scores, times log2(e), of products s [rows, tokens] from key `first` on; -inf where nobody sees a key. holes: whether a
    page may not be there."""
    s = gl.reshape(s, [1, C.rows, C.tokens])
    L: gl.constexpr = s.type.layout
    s = changed(s, terms, piece, first, k_scale, C, GROUP, L)
    if holes | some_are_hidden(terms, piece, first, C):
        if cached.PAGE:
            pages = look_up(cached, piece, first, C, gl.SliceLayout(1, L))
            s = gl.where(gl.expand_dims(is_page(cached, pages), 1), s, -float("inf"))
        s = gl.where(is_seen(terms, piece, first, C, GROUP, L), s, -float("inf"))
    return gl.convert_layout(gl.reshape(s, [C.rows, C.tokens]), accumulator(C, C.tokens))


@gluon.jit
def weights(s, top):
    """The maximum of each row with the scores of a step, its P, and the factor of what was summed before."""
    new_top = gl.maximum(top, gl.max(s, 1))
    shift = finite(new_top)
    return new_top, gl.exp2(s - gl.expand_dims(shift, 1)), gl.exp2(top - shift)


@gluon.jit
def wait_output(acc):
    done = ()
    for c in gl.static_range(len(acc)):
        done += (warpgroup_mma_wait(0, deps=[acc[c]]),)
    return done


@gluon.jit
def no_output(C: gl.constexpr):
    acc = ()
    for _ in gl.static_range(C.head_dim_v // C.chunk):
        acc += (gl.full([C.rows, C.chunk], 0.0, gl.float32, accumulator(C, C.chunk)),)
    return acc


@gluon.jit
def rescaled(acc, factor, C: gl.constexpr):
    new = ()
    for c in gl.static_range(len(acc)):
        new += (acc[c] * gl.expand_dims(gl.convert_layout(factor, rows_of(C, acc[c].shape[1])), 1),)
    return new


@gluon.jit
def scale_of_scores(terms, piece):
    """By what products are multiplied to become scores, times log2(e), a positive number, and by what Q is for that: 1, -1 or
    0, as the scale is. Scores that change otherwise are changed one by one."""
    scale = terms.scale * scale_of_keys(terms, piece) * LOG2E
    if (terms.softcap is not None) | (terms.alibi is not None):
        return 0.0 * scale + 1.0, 0.0 * scale + 1.0
    else:
        sign = gl.where(scale > 0.0, 1.0, gl.where(scale < 0.0, -1.0, 0.0))
        return gl.where(scale == 0.0, 1.0, gl.abs(scale)), sign


@gluon.jit
def masked(s, K, piece, first, holes, C: gl.constexpr, MASKED: gl.constexpr, power=1.0):
    """Products s [rows, tokens] from key `first` on, changed as terms ask; -inf where nobody sees a key. power: by what they
    are multiplied first, if terms ask for any change."""
    cached, terms = K.cached, K.terms
    if (terms.softcap is not None) | (terms.alibi is not None):
        s = s * power
    s = gl.reshape(s, [1, C.rows, C.tokens])
    L: gl.constexpr = s.type.layout
    if (terms.softcap is not None) | (terms.alibi is not None):
        s = changed(s, terms, piece, first, scale_of_keys(terms, piece), C, K.GROUP, L)
    if MASKED:
        if cached.PAGE:
            if holes:  # to look pages up takes long behind the copies of all CTAs
                pages = look_up(cached, piece, first, C, gl.SliceLayout(1, L))
                s = gl.where(gl.expand_dims(is_page(cached, pages), 1), s, -float("inf"))
        if some_are_hidden(terms, piece, first, C):
            s = gl.where(is_seen(terms, piece, first, C, K.GROUP, L), s, -float("inf"))
    return gl.convert_layout(gl.reshape(s, [C.rows, C.tokens]), accumulator(C, C.tokens))


@gluon.jit
def weights_of(s, scale, top):
    """The maximum of each row with the scores of a step, its P, and the factor of what was summed before."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    shift = finite(new_top)
    return new_top, gl.exp2(gl.fma(s, beside(scale), gl.expand_dims(-shift, 1))), gl.exp2(top - shift)


@gluon.jit
def beside(scale):
    """A number for all rows, or one for each, as it meets scores."""
    if len(scale.shape) > 0:
        return gl.expand_dims(scale, 1)
    else:
        return scale


@gluon.jit
def lane_sums(p):
    """Row sums within each lane: [rows, columns] -> [rows, 4], a column for each lane of the quad that has the row."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
