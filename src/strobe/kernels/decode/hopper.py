"""Attention of many rows over a cache, in Gluon, for Hopper: TMA, and wgmma, which takes 64 rows at a time.

The schedule, the terms, the results and their merging are those of `forward`: the way along the keys of a piece differs. All
warps of a CTA do the same, and each four of them have 64 rows of a tile.

    shared memory   shape                                     holds
    k_ring          [stages * chunks * boxes, box, chunk]     steps of K: columns in chunks, keys in boxes, which TMA copies, so
                                                              that a chunk of a step is one [tokens, chunk] to the tensor cores;
                                                              at the end of a piece its result
    v_ring          the same of V                             at the end of a piece the maximum and the sum of each row
    q               [chunks, rows, chunk]                     the rows of Q

    barrier         arrivals      says
    k_full, v_full  TMA bytes     a step of K (V) is there

A barrier of the CTA, one for each step, says that a step has been read; then K's place is filled with the step that comes
`stages` later, and V's with one two before.

Step i issues S(i + 1) = Q K(i + 1)^T and O += P(i - 1) V(i - 1) together, and turns S(i) into P(i) while both run.

A box lies in one page. TMA copies zeros for a page that is not there, and for keys beyond a contiguous cache. Keys beyond a
length may be anything, NaN too: their scores are masked, and their values are set to zero where they lie, in the first and the
last step of a piece alone.
"""

import triton.language as tl

from strobe.kernels.common.channel import make_barriers, swizzled
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.decode.forward import (
    NUMBERS,
    Cached,
    Outputs,
    Terms,
    changed,
    finite,
    is_page,
    is_seen,
    load_queries,
    look_up,
    result_layout,
    ring_layout,
    some_are_hidden,
    take_pieces,
)
from strobe.kernels.decode.schedule import Requests
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tensor_descriptor,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class Memory:
    """The descriptors of K and V, and the shared memory of a CTA: see the tables above. k, v: the rings as the tensor cores see
    them, [stages * chunks, tokens, chunk]."""

    k_desc: tensor_descriptor
    v_desc: tensor_descriptor
    q: gl.shared_memory_descriptor
    k_ring: gl.shared_memory_descriptor
    v_ring: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor


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
def rows_layout(C, columns):
    """The layout of [1, rows or keys, columns] when a thread has 16 bytes of a row."""
    across = columns // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [1, C.warps, 1], [2, 1, 0])


@gluon.constexpr_function
def steps_shape(C, columns):
    """A ring as the tensor cores see it."""
    return [C.stages * (columns // C.chunk), C.tokens, C.chunk]


@gluon.constexpr_function
def boxes_shape(C, columns):
    """A ring as TMA sees it."""
    return [C.stages * (columns // C.chunk) * (C.tokens // C.box), C.box, C.chunk]


@gluon.constexpr_function
def stats_shape(C):
    return [2, C.rows]


@gluon.constexpr_function
def result_shape(C):
    return [1, C.rows, C.head_dim_v]


@gluon.jit
def make_memory(k_desc, v_desc, C: gl.constexpr):
    """The caller fences."""
    dtype: gl.constexpr = k_desc.dtype
    W: gl.constexpr = C.chunk
    L: gl.constexpr = swizzled(dtype, W)
    k_ring = gl.allocate_shared_memory(dtype, boxes_shape(C, C.head_dim), L)
    v_ring = gl.allocate_shared_memory(dtype, boxes_shape(C, C.head_dim_v), L)
    return Memory(
        k_desc,
        v_desc,
        gl.allocate_shared_memory(dtype, [C.head_dim // W, C.rows, W], L),
        k_ring,
        v_ring,
        reinterpret(k_ring, dtype, steps_shape(C, C.head_dim), L),
        reinterpret(v_ring, dtype, steps_shape(C, C.head_dim_v), L),
        make_barriers(C.stages, 1),
        make_barriers(C.stages, 1),
        stats_in(v_ring, C),
    )


@gluon.jit
def stats_in(ring, C: gl.constexpr):
    """Two numbers of each row, in a ring's memory."""
    return reinterpret(ring, gl.float32, stats_shape(C), gl.SwizzledSharedLayout(1, 1, 1, [0]))


# ---- copies


@gluon.jit
def pages_of_boxes(cached, piece, entry, first, C: gl.constexpr):
    """The page (or entry) of each box of the step from key `first` on; -1 for one that has no key of the piece."""
    pages = ()
    for b in gl.static_range(C.tokens // C.box):
        if cached.PAGE == 0:
            pages += (entry,)
        else:
            at = cached.table + piece.batch.to(gl.int64) * cached.table_row + (first + b * C.box) // cached.PAGE
            pages += (gl.load(at, mask=has_keys(piece, first + b * C.box, C), other=-1),)
    return pages


@gluon.jit
def has_keys(piece, first, C: gl.constexpr):
    """Whether a box has keys of a piece."""
    return (first + C.box > piece.begin) & (first < piece.end)


@gluon.jit
def has_hole(cached, piece, first, pages, C: gl.constexpr):
    """Whether a box has keys whose page is not there."""
    hole = first < first
    if cached.PAGE:
        for b in gl.static_range(C.tokens // C.box):
            hole = hole | (has_keys(piece, first + b * C.box, C) & ~is_page(cached, pages[b]))
    return hole


@gluon.jit
def expect_step(barriers, turn, go, C: gl.constexpr, COLUMNS: gl.constexpr):
    """Tell a step's barrier of the bytes that `copy_step` copies. Between the two the compiler puts a barrier of the CTA: what
    is copied together is best told together."""
    mbarrier.expect(barriers.index(turn % C.stages), C.tokens * COLUMNS * 2, pred=go)


@gluon.jit
def copy_step(descriptor, ring, barriers, turn, cached, pages, head, first, go, C: gl.constexpr, COLUMNS: gl.constexpr):
    """Start copying the step from key `first` on to its place in a ring, if `go`; turn: how many steps the CTA copied before
    it."""
    slot = turn % C.stages
    W: gl.constexpr = C.chunk
    CHUNKS: gl.constexpr = COLUMNS // W
    BOXES: gl.constexpr = C.tokens // C.box
    barrier = barriers.index(slot)
    for b in gl.static_range(BOXES):
        page, row = place_of_box(cached, pages[b], first + b * C.box)
        for c in gl.static_range(CHUNKS):
            box = ring.index((slot * CHUNKS + c) * BOXES + b).reshape(descriptor.block_type.shape)
            tma_load(descriptor, [page, head, row, c * W], barrier, box, pred=go)


@gluon.jit
def place_of_box(cached, page, first):
    """Where TMA finds the box from key `first` on: its page, the one behind the last for one that is not there, and its row."""
    row = first
    if cached.PAGE:
        row = row % cached.PAGE
    return gl.where(is_page(cached, page), page, cached.pages), row


@gluon.jit
def copy_queries(memory, outputs, piece, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """The rows of a tile of Q to shared memory, zeros beyond the last one."""
    W: gl.constexpr = C.chunk
    WIDTH: gl.constexpr = 8 if DIM % 8 == 0 else 2
    for c in gl.static_range(C.head_dim // W):
        q = load_queries(outputs, piece, c * W, W, rows_layout(C, W), C, GROUP, DIM, WIDTH)
        memory.q.index(c).store(gl.reshape(q, [C.rows, W]))
    if C.narrow > 0:
        q = load_queries(outputs, piece, C.head_dim, C.narrow, rows_layout(C, C.narrow), C, GROUP, DIM, WIDTH)
        memory.q_narrow.store(gl.reshape(q, [C.rows, C.narrow]))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def clear_values(values, turn, piece, first, C: gl.constexpr):
    """Set the values of a step to zero that are not of a piece: 0 * NaN would be NaN."""
    slot = turn % C.stages
    W: gl.constexpr = C.chunk
    CHUNKS: gl.constexpr = C.head_dim_v // W
    L: gl.constexpr = gl.SliceLayout(0, rows_layout(C, W))
    keys = gl.expand_dims(first + gl.arange(0, C.tokens, gl.SliceLayout(1, L)), 1)
    inside = (keys >= piece.begin) & (keys < piece.end)
    for c in gl.static_range(CHUNKS):
        v = values.index(slot * CHUNKS + c)
        v.store(gl.where(inside, v.load(L), 0.0))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def has_others(piece, first, C: gl.constexpr):
    """Whether a step has keys that are not of a piece."""
    return (first < piece.begin) | (first + C.tokens > piece.end)


# ---- products


@gluon.jit
def wait_for(barriers, turn, C: gl.constexpr, pred=True):
    """Wait until a step is there; not if `pred` is false."""
    mbarrier.wait(barriers.index(turn % C.stages), (turn // C.stages) & 1, pred=pred)


@gluon.jit
def start_scores(memory, turn, C: gl.constexpr):
    """S = Q K^T."""
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    s = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    for c in gl.static_range(CHUNKS):
        k = memory.k.index(turn % C.stages * CHUNKS + c)
        s = warpgroup_mma(memory.q.index(c), k.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def start_output(memory, acc, p, turn, C: gl.constexpr):
    """O += P V."""
    CHUNKS: gl.constexpr = C.head_dim_v // C.chunk
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.chunk), k_width=2)
    new = ()
    for c in gl.static_range(CHUNKS):
        v = memory.v.index(turn % C.stages * CHUNKS + c)
        new += (warpgroup_mma(gl.convert_layout(p, P), v, acc[c], is_async=True),)
    return new


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
def weights(s, row_max, row_sum):
    """The maximum and the sum of each row with the scores of a step, its P, and the factor of what was summed before."""
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = finite(new_max)
    p = gl.exp2(s - gl.expand_dims(shift, 1))
    factor = gl.exp2(row_max - shift)
    return new_max, row_sum * factor + gl.sum(p, 1), p, factor


@gluon.jit
def walk(memory, outputs, terms, cached, piece, entry, turn, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Walk along the keys of a piece, one step at least: O in chunks, the maximum and the sum of each row, and how many steps
    the CTA has copied."""
    STAGES: gl.constexpr = C.stages
    ahead: gl.constexpr = STAGES * C.tokens
    S: gl.constexpr = rows_of(C, C.tokens)
    dtype: gl.constexpr = memory.q.dtype
    first = piece.begin // C.tokens * C.tokens
    steps = gl.maximum((piece.end - first + C.tokens - 1) // C.tokens, 1)
    holes = first < first
    for i in gl.static_range(STAGES):
        expect_step(memory.k_full, turn + i, i < steps, C, C.head_dim)
        expect_step(memory.v_full, turn + i, i < steps, C, C.head_dim_v)
    for i in tl.range(0, gl.minimum(steps, STAGES), disable_licm=True):
        at = first + i * C.tokens
        pages = pages_of_boxes(cached, piece, entry, at, C)
        holes = holes | has_hole(cached, piece, at, pages, C)
        copy_step(memory.k_desc, memory.k_ring, memory.k_full, turn + i, cached, pages, piece.head, at, True, C, C.head_dim)
        copy_step(memory.v_desc, memory.v_ring, memory.v_full, turn + i, cached, pages, piece.head, at, True, C, C.head_dim_v)
    copy_queries(memory, outputs, piece, C, GROUP, DIM)
    k_scale = 1.0
    if terms.k_scale is not None:
        k_scale = gl.load(terms.k_scale + piece.batch * terms.k_scale_page + piece.head * terms.k_scale_row)

    acc = no_output(C)
    row_max = gl.full([C.rows], -float("inf"), gl.float32, S)
    row_sum = gl.full([C.rows], 0.0, gl.float32, S)
    wait_for(memory.k_full, turn, C)
    s = warpgroup_mma_wait(0, deps=[start_scores(memory, turn, C)])
    wait_for(memory.k_full, turn + 1, C, steps > 1)
    next_s = start_scores(memory, turn + 1, C)
    s = seen_scores(s, terms, cached, piece, first, k_scale, holes, C, GROUP)
    row_max, row_sum, wide, _ = weights(s, row_max, row_sum)
    p = wide.to(dtype)
    s = warpgroup_mma_wait(0, deps=[next_s])
    partition_barrier()  # everybody has read the first two steps of K
    for i in gl.static_range(2):
        expect_step(memory.k_full, turn + i + STAGES, i + STAGES < steps, C, C.head_dim)
    for i in gl.static_range(2):
        at = first + i * C.tokens + ahead
        pages = pages_of_boxes(cached, piece, entry, at, C)
        holes = holes | has_hole(cached, piece, at, pages, C)
        copy_step(memory.k_desc, memory.k_ring, memory.k_full, turn + i + STAGES, cached, pages, piece.head, at,
                  i + STAGES < steps, C, C.head_dim)  # fmt: skip
    if (steps > 1) & (first < piece.begin):
        wait_for(memory.v_full, turn, C)
        clear_values(memory.v, turn, piece, first, C)
    for i in tl.range(1, steps, disable_licm=True):
        now = turn + i
        at = first + i * C.tokens
        k_pages = pages_of_boxes(cached, piece, entry, at + C.tokens + ahead, C)
        wait_for(memory.k_full, now + 1, C, i + 1 < steps)
        next_s = start_scores(memory, now + 1, C)  # of leftovers in the last step, and nobody uses them
        wait_for(memory.v_full, now - 1, C)
        acc = start_output(memory, acc, p, now - 1, C)
        s = seen_scores(s, terms, cached, piece, at, k_scale, holes, C, GROUP)
        row_max, row_sum, wide, factor = weights(s, row_max, row_sum)
        acc = wait_output(acc)
        s = warpgroup_mma_wait(0, deps=[next_s])
        partition_barrier()  # everybody has read K of the next step, and V of the one before
        expect_step(memory.v_full, now - 1 + STAGES, i - 1 + STAGES < steps, C, C.head_dim_v)
        expect_step(memory.k_full, now + 1 + STAGES, i + 1 + STAGES < steps, C, C.head_dim)
        v_pages = pages_of_boxes(cached, piece, entry, at - C.tokens + ahead, C)
        copy_step(memory.v_desc, memory.v_ring, memory.v_full, now - 1 + STAGES, cached, v_pages, piece.head,
                  at - C.tokens + ahead, i - 1 + STAGES < steps, C, C.head_dim_v)  # fmt: skip
        copy_step(memory.k_desc, memory.k_ring, memory.k_full, now + 1 + STAGES, cached, k_pages, piece.head,
                  at + C.tokens + ahead, i + 1 + STAGES < steps, C, C.head_dim)  # fmt: skip
        holes = holes | has_hole(cached, piece, at + C.tokens + ahead, k_pages, C)
        p = wide.to(dtype)
        acc = rescaled(acc, factor, C)
    last = first + (steps - 1) * C.tokens
    turn += steps
    wait_for(memory.v_full, turn - 1, C)
    if has_others(piece, last, C):
        clear_values(memory.v, turn - 1, piece, last, C)
    acc = wait_output(start_output(memory, acc, p, turn - 1, C))
    return acc, row_max, row_sum, turn


@gluon.jit
def rescaled(acc, factor, C: gl.constexpr):
    new = ()
    for c in gl.static_range(len(acc)):
        new += (acc[c] * gl.expand_dims(gl.convert_layout(factor, rows_of(C, acc[c].shape[1])), 1),)
    return new


@gluon.jit
def gather(memory, acc, top, total, C: gl.constexpr, ROWS: gl.constexpr):
    """What the warps of a CTA found, [ROWS, dim_v], as `forward.gather_warps` gives it: by way of the ring of K."""
    R: gl.constexpr = result_layout(C)
    M: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, R))
    W: gl.constexpr = C.chunk
    meet = reinterpret(memory.k_ring, gl.float32, result_shape(C), ring_layout(C.head_dim_v, 4))
    partition_barrier()  # everybody has read the last step of K
    for c in gl.static_range(len(acc)):
        meet.slice(c * W, W, 2).store(gl.reshape(acc[c], [1, C.rows, W]))
    memory.stats.index(0).store(top)
    memory.stats.index(1).store(total)
    partition_barrier()
    o = gl.sum(meet.slice(0, ROWS, 1).load(R), 0)
    top, total = memory.stats.index(0).slice(0, ROWS).load(M), memory.stats.index(1).slice(0, ROWS).load(M)
    fence_async_shared()  # K comes there next
    return o, top, total


@gluon.jit
def find(memory, outputs, terms, cached, piece, entry, turn, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
         DIM_V: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """What is found along the keys of a piece, as `gather` gives it, and how many steps the CTA has copied."""
    acc, row_max, row_sum, turn = walk(memory, outputs, terms, cached, piece, entry, turn, C, GROUP, DIM)
    o, top, total = gather(memory, acc, row_max, row_sum, C, ROWS)
    return o, top, total, turn


# ---- values that are columns of keys


@aggregate
class LatentMemory:
    """What `Memory` is where V is the first columns of K: those are k_ring, in chunks, the others k_narrow. p: the weights of
    a step, [rows, tokens]."""

    k_desc: tensor_descriptor
    narrow_desc: tensor_descriptor
    q: gl.shared_memory_descriptor
    q_narrow: gl.shared_memory_descriptor
    k_ring: gl.shared_memory_descriptor
    k_narrow: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor


@gluon.jit
def make_latent_memory(k_desc, narrow_desc, C: gl.constexpr):
    """The caller fences."""
    dtype: gl.constexpr = k_desc.dtype
    L: gl.constexpr = swizzled(dtype, C.chunk)
    N: gl.constexpr = swizzled(dtype, C.narrow)
    k_narrow = gl.allocate_shared_memory(dtype, [C.stages, C.tokens, C.narrow], N)
    return LatentMemory(
        k_desc,
        narrow_desc,
        gl.allocate_shared_memory(dtype, [C.head_dim // C.chunk, C.rows, C.chunk], L),
        gl.allocate_shared_memory(dtype, [C.rows, C.narrow], N),
        gl.allocate_shared_memory(dtype, steps_shape(C, C.head_dim), L),
        k_narrow,
        gl.allocate_shared_memory(dtype, [C.rows, C.tokens], swizzled(dtype, C.tokens)),
        make_barriers(C.stages, 1),
        stats_in(k_narrow, C),
    )


@gluon.jit
def copy_latent(memory, turn, cached, page, head, first, go, C: gl.constexpr):
    """Start copying the step from key `first` on, if `go`: see `copy_step`. A step is one box."""
    slot = turn % C.stages
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    barrier = memory.full.index(slot)
    mbarrier.expect(barrier, C.tokens * (C.head_dim + C.narrow) * 2, pred=go)
    page, row = place_of_box(cached, page, first)
    for c in gl.static_range(CHUNKS):
        box = memory.k_ring.index(slot * CHUNKS + c).reshape(memory.k_desc.block_type.shape)
        tma_load(memory.k_desc, [page, head, row, c * C.chunk], barrier, box, pred=go)
    box = memory.k_narrow.index(slot).reshape(memory.narrow_desc.block_type.shape)
    tma_load(memory.narrow_desc, [page, head, row, C.head_dim], barrier, box, pred=go)


@gluon.jit
def latent_scores(memory, turn, C: gl.constexpr):
    """S = Q K^T."""
    slot = turn % C.stages
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    s = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    for c in gl.static_range(CHUNKS):
        k = memory.k_ring.index(slot * CHUNKS + c)
        s = warpgroup_mma(memory.q.index(c), k.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    s = warpgroup_mma(memory.q_narrow, memory.k_narrow.index(slot).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def latent_output(memory, acc, turn, C: gl.constexpr):
    """O += P V."""
    CHUNKS: gl.constexpr = C.head_dim_v // C.chunk
    new = ()
    for c in gl.static_range(CHUNKS):
        v = memory.k_ring.index(turn % C.stages * CHUNKS + c)
        new += (warpgroup_mma(memory.p, v, acc[c], is_async=True),)
    return wait_output(new)


@gluon.jit
def walk_latent(memory, outputs, terms, cached, piece, entry, turn, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """What `walk` does, where V is columns of K. Eight warps have 64 rows, four each half of a step's keys and half of the
    columns of O, so the weights meet in shared memory. There is room for two steps alone: products of one step do not overlap
    with those of the next, whose copy would come too late."""
    STAGES: gl.constexpr = C.stages
    ahead: gl.constexpr = STAGES * C.tokens
    S: gl.constexpr = rows_of(C, C.tokens)
    first = piece.begin // C.tokens * C.tokens
    steps = gl.maximum((piece.end - first + C.tokens - 1) // C.tokens, 1)
    holes = first < first
    for i in tl.range(0, gl.minimum(steps, STAGES), disable_licm=True):
        at = first + i * C.tokens
        pages = pages_of_boxes(cached, piece, entry, at, C)
        holes = holes | has_hole(cached, piece, at, pages, C)
        copy_latent(memory, turn + i, cached, pages[0], piece.head, at, True, C)
    copy_queries(memory, outputs, piece, C, GROUP, DIM)
    k_scale = 1.0
    if terms.k_scale is not None:
        k_scale = gl.load(terms.k_scale + piece.batch * terms.k_scale_page + piece.head * terms.k_scale_row)
    acc = no_output(C)
    row_max = gl.full([C.rows], -float("inf"), gl.float32, S)
    sums = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    for i in tl.range(0, steps, disable_licm=True):
        now = turn + i
        at = first + i * C.tokens
        pages = pages_of_boxes(cached, piece, entry, at + ahead, C)
        wait_for(memory.full, now, C)
        s = seen_scores(latent_scores(memory, now, C), terms, cached, piece, at, k_scale, holes, C, GROUP)
        new_max = gl.maximum(row_max, gl.max(s, 1))
        shift = finite(new_max)
        p = gl.exp2(s - gl.expand_dims(shift, 1))
        factor = gl.exp2(row_max - shift)
        row_max = new_max
        sums = sums * gl.expand_dims(factor, 1) + p
        acc = rescaled(acc, factor, C)
        memory.p.store(p.to(memory.p.dtype))
        if has_others(piece, at, C):
            clear_values(memory.k_ring, now, piece, at, C)
        else:
            fence_async_shared()
            partition_barrier()
        acc = latent_output(memory, acc, now, C)
        partition_barrier()  # everybody has read this step, and P
        copy_latent(memory, now + STAGES, cached, pages[0], piece.head, at + ahead, i + STAGES < steps, C)
        holes = holes | has_hole(cached, piece, at + ahead, pages, C)
    return acc, row_max, gl.sum(sums, 1), turn + steps


@gluon.jit
def find_latent(memory, outputs, terms, cached, piece, entry, turn, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
                DIM_V: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """What `find` does, where V is columns of K."""
    acc, row_max, row_sum, turn = walk_latent(memory, outputs, terms, cached, piece, entry, turn, C, GROUP, DIM)
    o, top, total = gather(memory, acc, row_max, row_sum, C, ROWS)
    return o, top, total, turn


# ---- entry


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_kernel(
    q, k, v, out, lse, lengths, page_table, index, leftpad, cu_q, tree, alibi, sinks, k_scale, v_scale, parts, sums, arrivals,
    q_batch, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_batch, out_row, out_head, lse_batch, lse_head,
    table_row, tree_batch, tree_row, tree_column, alibi_batch, k_scale_page, k_scale_row, v_scale_page, v_scale_row, batch,
    heads_kv, n_q, capacity, total_q, pages, tiles, scale, softcap, left, right,
    C: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, ROWS: gl.constexpr,
    BY_ROW: gl.constexpr, K_BY_TOKEN: gl.constexpr, V_BY_TOKEN: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    memory = make_latent_memory(k, v, C) if C.narrow > 0 else make_memory(k, v, C)
    fence_async_shared()
    partition_barrier()
    take_turn()
    requests = Requests(lengths, leftpad, index, cu_q, batch, n_q, capacity, total_q, pages, left)
    cached = Cached(k, v, page_table, k_page, k_row, k_head, v_page, v_row, v_head, table_row, pages, PAGE)
    terms = Terms(tree, tree_batch, tree_row, tree_column, alibi, alibi_batch, sinks, k_scale, v_scale, k_scale_page,
                  k_scale_row, v_scale_page, v_scale_row, scale, softcap, left, right, BY_ROW, K_BY_TOKEN,
                  V_BY_TOKEN)  # fmt: skip
    outputs = Outputs(q, q_batch, q_row, q_head, out, out_batch, out_row, out_head, lse, lse_batch, lse_head, parts, sums,
                      arrivals)  # fmt: skip
    FIND: gl.constexpr = find_latent if C.narrow > 0 else find
    take_pieces(FIND, memory, requests, outputs, terms, cached, heads_kv, tiles, C, GROUP, DIM, DIM_V, ROWS)
