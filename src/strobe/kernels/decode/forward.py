"""Attention of a few queries over a cache, in Gluon, for Ampere and later: cp.async, ldmatrix, mma.sync.

The grid is persistent, and finds its own work from the lengths (`schedule`). All warps of a CTA do the same:

    warps       rows / 16 of them share the rows of a tile, and all others the keys of a step: a warp has 16 rows and
                tokens / token_warps keys, and a state of the softmax (maximum, sum, O) of its own, so that a step needs no
                exchange between warps
    a tile      up to `rows` rows that share a key head: queries times the query heads of its group

    shared memory   shape                       holds
    k_ring          [stages, tokens, head_dim]  steps i ... i + stages - 1 of K, those beyond i still being copied;
                                                at the end of a piece what the warps found, to be added up
    v_ring          [stages, tokens, dim_v]     the same of V, if it is not the first columns of K
    narrow ring     [stages, tokens, narrow]    the columns of K beyond those of V, where V is the others
    stats           2 x [token_warps, rows]     the maxima and the sums of each warp's rows

A step is two groups of cp.async, of K and of V. After the wait for a group a barrier says that everybody's copies are there,
and that everybody has read what is copied over next. Where pages are looked up, the page numbers of a step are loaded one step
before its copies begin.

Keys that are none (beyond a length, of a page that is not there) are copied as zeros and masked: whatever lies there, NaN too,
stays there.

A job whose keys are all in one piece is written at once. Otherwise each part is written to global memory, and whoever comes
last merges them, in their order, in the same launch, together with those who are done and wait; counters are set back to 0.
"""

import math

from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.gluon_math import tanh
from strobe.kernels.common.prefetch import prefetch
from strobe.kernels.common.scores import LN2
from strobe.kernels.decode.notes import NOTED, NOTED_ROWS, Notes, forget, is_left
from strobe.kernels.decode.schedule import (
    Requests,
    all_units,
    jobs_of,
    keys_of,
    parts_of,
    place_of,
    queries_of,
    quotient,
    request_at,
    start_of,
    stretch_of,
    units_of,
)
from strobe.kernels.gluon import aggregate, cp_async, gl, gluon, partition_barrier, reinterpret, tensor_descriptor

LOG2E = gl.constexpr(1.4426950408889634)
CHUNK = gl.constexpr(64)
"""Columns of Q that are loaded at a time where it has many: the width of a swizzle."""
PATIENCE = gl.constexpr(64)
"""How often a CTA whose work is done looks whether the other parts of its last job are there, to help to merge them."""
GAVE_UP = gl.constexpr(1 << 16)
MMA_ROWS = gl.constexpr(16)
"""Rows of a product of mma.sync."""
FEW_PARTS = gl.constexpr(8)
"""Parts of a job that are so few that more rows are merged at once."""


@aggregate
class Cached:
    """Where keys and values are: pointers to k, v (or descriptors for TMA) and, or None, to the page table; their strides, and
    the number of pages. PAGE: keys of a page, or 0."""

    k: (gl.tensor, tensor_descriptor)
    v: (gl.tensor, tensor_descriptor)
    table: (gl.tensor, gl.constexpr)
    k_page: gl.tensor
    k_row: gl.tensor
    k_head: gl.tensor
    v_page: gl.tensor
    v_row: gl.tensor
    v_head: gl.tensor
    table_row: gl.tensor
    pages: gl.tensor
    PAGE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, table, k_page, k_row, k_head, v_page, v_row, v_head, table_row, pages, PAGE):
        self.k, self.v = k, v
        self.table = gl.constexpr(None) if table is None else table
        self.k_page, self.k_row, self.k_head = k_page, k_row, k_head
        self.v_page, self.v_row, self.v_head = v_page, v_row, v_head
        self.table_row = table_row
        self.pages = pages
        self.PAGE = gl.constexpr(PAGE)


@aggregate
class Terms:
    """What changes scores, or None: pointers to a tree mask, slopes, sinks, scales of K and of V, each with its strides; the
    scale, a softcap and the bounds of a band. BY_ROW: whether the rows of a tile see different keys. BY_TOKEN: whether K and V
    have a scale for each key."""

    tree: (gl.tensor, gl.constexpr)
    tree_batch: gl.tensor
    tree_row: gl.tensor
    tree_column: gl.tensor
    alibi: (gl.tensor, gl.constexpr)
    alibi_batch: gl.tensor
    sinks: (gl.tensor, gl.constexpr)
    k_scale: (gl.tensor, gl.constexpr)
    v_scale: (gl.tensor, gl.constexpr)
    k_scale_page: gl.tensor
    k_scale_row: gl.tensor
    v_scale_page: gl.tensor
    v_scale_row: gl.tensor
    scale: gl.tensor
    softcap: (gl.tensor, gl.constexpr)
    left: (gl.tensor, gl.constexpr)
    right: (gl.tensor, gl.constexpr)
    BY_ROW: gl.constexpr
    K_BY_TOKEN: gl.constexpr
    V_BY_TOKEN: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tree, tree_batch, tree_row, tree_column, alibi, alibi_batch, sinks, k_scale, v_scale, k_scale_page,
                 k_scale_row, v_scale_page, v_scale_row, scale, softcap, left, right, BY_ROW, K_BY_TOKEN,
                 V_BY_TOKEN):  # fmt: skip
        nothing = gl.constexpr(None)
        self.tree = nothing if tree is None else tree
        self.tree_batch, self.tree_row, self.tree_column = tree_batch, tree_row, tree_column
        self.alibi = nothing if alibi is None else alibi
        self.alibi_batch = alibi_batch
        self.sinks = nothing if sinks is None else sinks
        self.k_scale = nothing if k_scale is None else k_scale
        self.v_scale = nothing if v_scale is None else v_scale
        self.k_scale_page, self.k_scale_row = k_scale_page, k_scale_row
        self.v_scale_page, self.v_scale_row = v_scale_page, v_scale_row
        self.scale = scale
        self.softcap = nothing if softcap is None else softcap
        self.left = nothing if left is None else left
        self.right = nothing if right is None else right
        self.BY_ROW = gl.constexpr(BY_ROW)
        self.K_BY_TOKEN = gl.constexpr(K_BY_TOKEN)
        self.V_BY_TOKEN = gl.constexpr(V_BY_TOKEN)


@aggregate
class Outputs:
    """q, out and lse (or None) with their strides of a batch entry, a row and a head; parts float32 [places, rows, dim_v], sums
    float32 [places, 2, rows]; arrivals int32 [2 * batch * key heads * tiles], 0 between launches (see `merge_together`)."""

    q: gl.tensor
    q_batch: gl.tensor
    q_row: gl.tensor
    q_head: gl.tensor
    out: gl.tensor
    out_batch: gl.tensor
    out_row: gl.tensor
    out_head: gl.tensor
    lse: (gl.tensor, gl.constexpr)
    lse_batch: gl.tensor
    lse_head: gl.tensor
    parts: gl.tensor
    sums: gl.tensor
    arrivals: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, q_batch, q_row, q_head, out, out_batch, out_row, out_head, lse, lse_batch, lse_head, parts, sums,
                 arrivals):  # fmt: skip
        self.q, self.q_batch, self.q_row, self.q_head = q, q_batch, q_row, q_head
        self.out, self.out_batch, self.out_row, self.out_head = out, out_batch, out_row, out_head
        self.lse = gl.constexpr(None) if lse is None else lse
        self.lse_batch, self.lse_head = lse_batch, lse_head
        self.parts, self.sums, self.arrivals = parts, sums, arrivals


@aggregate
class Piece:
    """A part of a job's keys: its request, the entry of the cache, its key head, its first row (of all that share the head);
    the request's first query, its number of queries and its length; the keys [begin, end) of the piece."""

    batch: gl.tensor
    entry: gl.tensor
    head: gl.tensor
    first_row: gl.tensor
    first_query: gl.tensor
    queries: gl.tensor
    length: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@aggregate
class Job:
    """What a piece is a part of: its number among all jobs, how many parts it has, the CTA (or split) of the first one, where
    its units begin in the line, the stretch of a CTA; where this part's result goes, and how often its CTA may look whether
    the others are there."""

    number: gl.tensor
    parts: gl.tensor
    first: gl.tensor
    begins: gl.tensor
    stretch: gl.tensor
    place: gl.tensor
    patience: gl.tensor


@aggregate
class Kernel:
    """What all roles of a kernel take. heads_kv, tiles: key heads, and tiles of the rows of one in the longest request. GROUP:
    query heads of a key head. DIM, DIM_V: columns of K and V. ROWS: rows of a result that may be in use."""

    requests: Requests
    outputs: Outputs
    terms: Terms
    cached: Cached
    heads_kv: gl.tensor
    tiles: gl.tensor
    C: gl.constexpr
    GROUP: gl.constexpr
    DIM: gl.constexpr
    DIM_V: gl.constexpr
    ROWS: gl.constexpr


# ---- layouts. Tensors of a step are [token_warps, rows or keys of a warp, keys or columns].


@gluon.constexpr_function
def product_layout(C):
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[C.token_warps, C.row_warps, C.column_warps], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def copy_layout(C, columns, width):
    """A thread copies 16 bytes, neighbours the next ones; a warp's keys are copied by it and those that share them."""
    across = min(32, columns // width)
    return gl.BlockedLayout(
        [1, 1, width], [1, 32 // across, across], [C.token_warps, C.row_warps * C.column_warps, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def ring_layout(columns, width):
    """16-byte units of a row are swizzled, so that the rows which ldmatrix reads together lie in different banks."""
    return gl.SwizzledSharedLayout(vec=width, per_phase=1, max_phase=min(8, columns // width), order=[2, 1, 0])


@gluon.constexpr_function
def meet_shape(C, ROWS):
    """The ring of K as a place for what all warps found: chunks of columns, so wide that whole ones fill the ring. (Triton 3.8
    sees memory as another type only if that is equally large.)"""
    rows = ROWS if C.rows == 2 * ROWS == 16 else C.rows
    room = C.ring_bytes(C.head_dim) // (4 * C.token_warps * rows)
    columns = math.gcd(C.head_dim_v, room)
    return [room // columns, C.token_warps, rows, columns]


@gluon.constexpr_function
def parts_at_once(C, rows):
    return C.parts_at_once(rows)


@gluon.constexpr_function
def rows_of_group(C, rows):
    """Rows that one group of warps may have, of `rows` of a result that may be in use."""
    return min(rows, C.rows)


@gluon.constexpr_function
def most_alone(C, rows):
    return C.most_alone(rows)


@gluon.constexpr_function
def result_layout(C, columns):
    """The layout of [parts or warps, rows, columns] when results are added up along the first dim, within a thread."""
    across = min(32, columns // 4)
    return gl.BlockedLayout([1, 1, 4], [1, 32 // across, across], [1, C.warps, 1], [2, 1, 0])


@gluon.constexpr_function
def merge_layout(C, rows):
    """The layout in which so many rows of parts are read: as they lie."""
    if not C.parts_in_squares:
        if rows < C.warps:
            return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, rows, C.warps // rows], [2, 1, 0])
        return result_layout(C, C.head_dim_v)
    down = min(8, rows)
    high = min(C.warps, rows // down)
    return gl.BlockedLayout([1, 1, 4], [1, down, 32 // down], [1, high, C.warps // high], [2, 1, 0])


@gluon.jit
def place_in_part(row, column, C: gl.constexpr):
    """Where a number of O lies in a part: in its row, or in a square of 8 rows and 8 columns, as a warp has it of wgmma."""
    if C.parts_in_squares:
        return row // 8 * (8 * C.head_dim_v) + column // 8 * 64 + row % 8 * 8 + column % 8
    else:
        return row * C.head_dim_v + column


@gluon.jit
def along(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 ... n - 1 along an axis of a layout of rank 3."""
    if axis == 0:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    elif axis == 1:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    else:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)


@gluon.constexpr_function
def keys_of_warp(C):
    return C.tokens // C.token_warps


@gluon.constexpr_function
def on_one_page(C, PAGE):
    """Whether the keys that a warp has in a step are on one page, which is looked up once for all of them."""
    return PAGE > 0 and PAGE % keys_of_warp(C) == 0


@gluon.constexpr_function
def on_few_pages(C, PAGE):
    """Whether the keys that a warp has in a step are on two to four whole pages."""
    return PAGE > 0 and keys_of_warp(C) % PAGE == 0 and keys_of_warp(C) // PAGE in (2, 4)


@gluon.jit
def first_keys_in(C: gl.constexpr, layout: gl.constexpr):
    """The number of the first key of each warp in a step, [token_warps, 1] in a layout of rank 2."""
    return gl.expand_dims(gl.arange(0, C.token_warps, gl.SliceLayout(1, layout)), 1) * keys_of_warp(C)


@gluon.jit
def keys_in(C: gl.constexpr, layout: gl.constexpr):
    """The numbers of a step's keys, [token_warps, keys of a warp] in a layout of rank 2."""
    return first_keys_in(C, layout) + gl.expand_dims(gl.arange(0, keys_of_warp(C), gl.SliceLayout(0, layout)), 0)


# ---- keys and values


@gluon.jit
def look_up(cached, piece, first, C: gl.constexpr, layout: gl.constexpr):
    """The pages of a step's keys from key `first` on, -1 for those that are none: [token_warps, keys of a warp or, on one page,
    1]; 0 for a contiguous cache."""
    if cached.PAGE == 0:
        return piece.begin * 0
    elif on_few_pages(C, cached.PAGE):
        return look_up_few(cached, piece, first, C, layout)
    else:
        if on_one_page(C, cached.PAGE):
            keys = first + first_keys_in(C, layout)
            there = (keys + keys_of_warp(C) > piece.begin) & (keys < piece.end)
        else:
            keys = first + keys_in(C, layout)
            there = (keys >= piece.begin) & (keys < piece.end)
        return gl.load(cached.table + piece.batch.to(gl.int64) * cached.table_row + keys // cached.PAGE, mask=there, other=-1)


@gluon.jit
def look_up_few(cached, piece, first, C: gl.constexpr, layout: gl.constexpr):
    """What `look_up` gives where the keys that a warp has in a step are on a few whole pages: each is looked up once."""
    PAGE: gl.constexpr = cached.PAGE
    row = cached.table + piece.batch.to(gl.int64) * cached.table_row
    own = gl.expand_dims(gl.arange(0, keys_of_warp(C), gl.SliceLayout(0, layout)), 0)
    pages = own * 0 - 1
    for n in gl.static_range(keys_of_warp(C) // PAGE):
        keys = first + n * PAGE + first_keys_in(C, layout)
        page = gl.load(row + keys // PAGE, mask=(keys + PAGE > piece.begin) & (keys < piece.end), other=-1)
        pages = gl.where(own // PAGE == n, page, pages)
    return pages


@gluon.jit
def is_page(cached, pages):
    """Whether pages are there."""
    return (pages >= 0) & (pages < cached.pages)


@gluon.jit
def is_key(cached, piece, first, pages, C: gl.constexpr, layout: gl.constexpr):
    """Whether a step's keys from key `first` on belong to a piece and are there."""
    keys = first + keys_in(C, layout)
    inside = (keys >= piece.begin) & (keys < piece.end)
    if cached.PAGE:
        inside = inside & is_page(cached, pages)
    return inside


@gluon.jit
def rows_at(cached, first, pages, entry, page_stride, row_stride, C: gl.constexpr, layout: gl.constexpr):
    """The offsets in the cache of a step's keys (or values) from key `first` on."""
    if cached.PAGE == 0:
        return entry.to(gl.int64) * page_stride + (first + keys_in(C, layout)).to(gl.int64) * row_stride
    else:
        row = rows_of_pages(first, cached.PAGE, C, layout)
        return pages.to(gl.int64) * page_stride + row.to(gl.int64) * row_stride


@gluon.jit
def rows_of_pages(first, PAGE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Which rows of their pages a step's keys from key `first` on are."""
    if on_one_page(C, PAGE):
        beyond = gl.expand_dims(gl.arange(0, keys_of_warp(C), gl.SliceLayout(0, layout)), 0)
        return (first + first_keys_in(C, layout)) % PAGE + beyond
    else:
        return (first + keys_in(C, layout)) % PAGE


@gluon.jit
def same_or_looked_up(cached, piece, pages, first, C: gl.constexpr, layout: gl.constexpr):
    """The pages of a step as V is copied: those as K is copied, if both have the same layout."""
    if C.head_dim == C.head_dim_v:
        return pages
    else:
        return look_up(cached, piece, first, C, layout)


@gluon.jit
def wide(a, b):
    """The product, in 64 bits, of numbers that are not negative: one instruction, as those without a sign have one."""
    if b.dtype == gl.int32:
        return a.to(gl.uint32).to(gl.int64) * b.to(gl.uint32).to(gl.int64)
    else:
        return a.to(gl.int64) * b


@gluon.jit
def copy_step(buffer, base, cached, piece, first, pages, page_stride, row_stride, layout: gl.constexpr, COLUMNS: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """Start copying a step's keys (or values) from key `first` on into a buffer, zeros where there is no key, and beyond
    COLUMNS. Where there is no key the address is that of another row: none lies outside of the cache, though it would not be
    read. What the rows of a page share is computed once."""
    KEYS: gl.constexpr = gl.SliceLayout(2, layout)
    columns = along(buffer.shape[2], 2, layout)
    inside = is_key(cached, piece, first, pages, C, KEYS)
    if cached.PAGE == 0:
        pages, rows = piece.entry, gl.where(inside, first + keys_in(C, KEYS), 0)
        at = base + wide(gl.where(is_page(cached, pages), pages, 0), page_stride) + columns
    else:
        rows = rows_of_pages(first, cached.PAGE, C, KEYS)
        at = base + gl.expand_dims(wide(gl.where(is_page(cached, pages), pages, 0), page_stride), 2) + columns
    width: gl.constexpr = layout.size_per_thread[2]
    mask = gl.max_constancy(gl.expand_dims(inside, 2) & (columns < COLUMNS), [1, 1, width])
    if cached.PAGE != 1:  # or 0 would be added, which folds, and with it what is said of the sum
        at += gl.expand_dims(wide(rows, row_stride), 2)
    cp_async(buffer, gl.multiple_of(at, [1, 1, 16]), mask=mask)  # bytes


@gluon.jit
def load_queries(outputs, piece, FIRST: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr, C: gl.constexpr,
                 GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr = 2):  # fmt: skip
    """COLUMNS of Q from FIRST on as the first operand of a product, the same for all warps that share its rows; zeros beyond
    the last row. WIDTH: elements that are loaded together."""
    row = piece.first_row + along(C.rows, 1, layout) + 0 * along(C.token_warps, 0, layout)
    column = FIRST + along(COLUMNS, 2, layout)
    query, head = row // GROUP, piece.head * GROUP + row % GROUP
    at = outputs.q + piece.batch.to(gl.int64) * outputs.q_batch
    at += (piece.first_query + query).to(gl.int64) * outputs.q_row + head.to(gl.int64) * outputs.q_head
    mask = gl.max_constancy((row < piece.queries * GROUP) & (column < DIM), [1, 1, WIDTH])
    return gl.load(gl.multiple_of(at + column, [1, 1, 2 * WIDTH]), mask=mask, other=0.0)  # bytes


# ---- scores


@gluon.jit
def scores_of(s, terms, cached, piece, entry, first, k_scale, C: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores, times log2(e), of products s from key `first` on: -inf where nobody sees a key. In most steps every row sees all
    keys, but for those of pages that are not there."""
    KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    pages = look_up(cached, piece, first, C, KEYS)
    if terms.K_BY_TOKEN:
        at = rows_at(cached, first, pages, entry, terms.k_scale_page, terms.k_scale_row, C, KEYS) + piece.head
        scales = gl.load(terms.k_scale + at, mask=is_key(cached, piece, first, pages, C, KEYS), other=0.0)
        s = s * gl.expand_dims(scales, 1)
    s = changed(s, terms, piece, first, k_scale, C, GROUP, LAYOUT)
    if cached.PAGE:
        s = gl.where(gl.expand_dims(is_page(cached, pages), 1), s, -float("inf"))
    if some_are_hidden(terms, piece, first, C):
        s = gl.where(is_seen(terms, piece, first, C, GROUP, LAYOUT), s, -float("inf"))
    return s


@gluon.jit
def changed(s, terms, piece, first, k_scale, C: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores, times log2(e), of products s from key `first` on, as if every row saw every key."""
    KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if terms.softcap is not None:
        s = terms.softcap * LOG2E * tanh(s * (terms.scale * k_scale / terms.softcap))
    else:
        s = s * (terms.scale * k_scale * LOG2E)
    if terms.alibi is not None:
        row = piece.first_row + along(C.rows, 1, LAYOUT)
        query, head = row // GROUP, piece.head * GROUP + row % GROUP
        slope = gl.load(terms.alibi + piece.batch * terms.alibi_batch + head, mask=query < piece.queries, other=0.0)
        away = piece.length - piece.queries + query - gl.expand_dims(first + keys_in(C, KEYS), 1)
        s = s - (slope * LOG2E) * gl.abs(away.to(gl.float32))
    return s


@gluon.jit
def some_are_hidden(terms, piece, first, C: gl.constexpr):
    """Whether some row of a tile may not see some key of the step from key `first` on."""
    hidden = (first < piece.begin) | (first + C.tokens > piece.end)
    if terms.BY_ROW:
        own = piece.length - piece.queries  # the key on which the first query stands
        if terms.right is not None:
            hidden = hidden | (first + C.tokens > own + terms.right + 1)
        if terms.left is not None:
            hidden = hidden | (first < piece.length - 1 - terms.left)
        if terms.tree is not None:
            hidden = hidden | (first + C.tokens > own)
    return hidden


@gluon.jit
def is_seen(terms, piece, first, C: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Whether each row of a tile sees each key of the step from key `first` on."""
    keys = gl.expand_dims(first + keys_in(C, gl.SliceLayout(1, LAYOUT)), 1)
    seen = (keys >= piece.begin) & (keys < piece.end)
    if terms.BY_ROW:
        query = (piece.first_row + along(C.rows, 1, LAYOUT)) // GROUP
        position = piece.length - piece.queries + query
        if terms.right is not None:
            seen = seen & (keys <= position + terms.right)
        if terms.left is not None:
            seen = seen & (keys >= position - terms.left)
        if terms.tree is not None:
            drafted = keys - (piece.length - piece.queries)
            at = terms.tree + piece.batch.to(gl.int64) * terms.tree_batch + query * terms.tree_row
            asked = (drafted >= 0) & (drafted < piece.queries) & (query < piece.queries)
            seen = seen & gl.load(at + drafted * terms.tree_column, mask=asked, other=1).to(gl.int1)
    return seen


@gluon.jit
def finite(x):
    """x, or 0 for -inf: what maxima are subtracted as, since -inf - -inf would be NaN."""
    return gl.where(x == -float("inf"), 0.0, x)


@gluon.jit
def is_copied(first, piece, C: gl.constexpr):
    """Whether a step from key `first` on is copied. Where many rows keep the tensor cores busy, even if it lies beyond the
    piece, as zeros: a branch in the loop would keep copies and products apart."""
    if C.rows > MMA_ROWS:
        return gl.to_tensor(True)
    else:
        return first < piece.end


@gluon.jit
def copy_keys(rings, slot, cached, piece, first, pages, layout: gl.constexpr, C: gl.constexpr, DIM: gl.constexpr):
    """Start copying a step of K from key `first` on, in one group, which is empty beyond the piece."""
    if is_copied(first, piece, C):
        base = cached.k + piece.head.to(gl.int64) * cached.k_head
        copy_step(rings[0].index(slot), base, cached, piece, first, pages, cached.k_page, cached.k_row, layout,
                  min(DIM, C.head_dim), C)  # fmt: skip
        if C.narrow > 0:
            N: gl.constexpr = copy_layout(C, C.narrow, 16 // C.kv_bytes)
            S: gl.constexpr = gl.SliceLayout(2, N)
            own_pages = pages
            if cached.PAGE:
                own_pages = gl.convert_layout(pages, S)
            copy_step(rings[2].index(slot), base + C.head_dim, cached, piece, first, own_pages, cached.k_page, cached.k_row, N,
                      DIM - C.head_dim, C)  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def copy_values(rings, slot, cached, piece, first, pages, layout: gl.constexpr, C: gl.constexpr, DIM_V: gl.constexpr):
    """Start copying a step of V from value `first` on, in one group; nothing where V is columns of K."""
    if C.narrow == 0:
        if is_copied(first, piece, C):
            base = cached.v + piece.head.to(gl.int64) * cached.v_head
            copy_step(rings[1].index(slot), base, cached, piece, first, pages, cached.v_page, cached.v_row, layout, DIM_V, C)
        async_copy.commit_group()


@gluon.jit
def products_of(rings, slot, q, outputs, piece, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Q K^T of a step. Where registers do not hold Q beside O, it comes from the L1 cache: whole, or 64 columns at a time."""
    L: gl.constexpr = product_layout(C)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    s = gl.full([C.token_warps, C.rows, C.tokens // C.token_warps], 0.0, gl.float32, L)
    k = rings[0].index(slot)
    if C.head_dim <= 128:
        s = mma_v2(q, k.permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    elif C.head_dim <= 256:
        q = load_queries(outputs, piece, 0, C.head_dim, LEFT, C, GROUP, DIM)
        s = mma_v2(q, k.permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    else:
        CHUNKS: gl.constexpr = C.head_dim // CHUNK
        for chunk in gl.static_range(CHUNKS):
            q = load_queries(outputs, piece, chunk * CHUNK, CHUNK, LEFT, C, GROUP, DIM)
            s = mma_v2(q, k.slice(chunk * CHUNK, CHUNK, 2).permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    if C.narrow > 0:
        q = load_queries(outputs, piece, C.head_dim, C.narrow, LEFT, C, GROUP, DIM)
        s = mma_v2(q, rings[2].index(slot).permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    return s


@gluon.jit
def as_half(q):
    """Q in float16, each row divided by a power of two that makes its largest number about 1024, and these powers. (float8
    becomes float16 in one instruction for two numbers, bfloat16 in several for each.)"""
    wide = q.to(gl.float32)
    top = gl.expand_dims(gl.max(gl.abs(wide), 2), 2)
    power = gl.exp2(gl.ceil(gl.log2(gl.maximum(top, 1e-30))) - 10.0)
    return (wide * (1.0 / power)).to(gl.float16), power


@gluon.jit
def walk(rings, outputs, terms, cached, piece, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
         DIM_V: gl.constexpr):  # fmt: skip
    """Walk along the keys of a piece: each warp's O, maxima and sums."""
    entry = piece.entry
    L: gl.constexpr = product_layout(C)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    width: gl.constexpr = 16 // C.kv_bytes
    K_COPY: gl.constexpr = copy_layout(C, C.head_dim, width)
    V_COPY: gl.constexpr = copy_layout(C, C.head_dim_v, width)
    k_scale = 1.0
    if terms.k_scale is not None:
        if not terms.K_BY_TOKEN:
            k_scale = gl.load(terms.k_scale + piece.batch * terms.k_scale_page + piece.head * terms.k_scale_row)

    K_KEYS: gl.constexpr = gl.SliceLayout(2, K_COPY)
    V_KEYS: gl.constexpr = gl.SliceLayout(2, V_COPY)
    begin = piece.begin // C.tokens * C.tokens
    STAGES: gl.constexpr = C.stages
    k_pages = ()
    for i in gl.static_range(STAGES):  # all are under way before the first copy waits for its own
        k_pages += (look_up(cached, piece, begin + i * C.tokens, C, K_KEYS),)
    for i in gl.static_range(C.stages - 1):
        first = begin + i * C.tokens
        copy_keys(rings, i, cached, piece, first, k_pages[i], K_COPY, C, DIM)
        pages = same_or_looked_up(cached, piece, k_pages[i], first, C, V_KEYS)
        copy_values(rings, i, cached, piece, first, pages, V_COPY, C, DIM_V)
    ahead: gl.constexpr = (C.stages - 1) * C.tokens
    k_pages = k_pages[C.stages - 1]
    v_pages = same_or_looked_up(cached, piece, k_pages, begin + ahead, C, V_KEYS)
    q = load_queries(outputs, piece, 0, CHUNK if C.head_dim > 128 else C.head_dim, LEFT, C, GROUP, DIM)
    OF_P: gl.constexpr = gl.bfloat16 if terms.V_BY_TOKEN else gl.float16 if C.kv_bytes == 1 else q.dtype
    if C.kv_bytes == 1 and C.head_dim <= 128 and q.dtype == gl.bfloat16:
        q, power = as_half(q)
        k_scale = k_scale * gl.convert_layout(power, L)
    acc = gl.full([C.token_warps, C.rows, C.head_dim_v], 0.0, gl.float32, L)
    row_max = gl.full([C.token_warps, C.rows], -float("inf"), gl.float32, gl.SliceLayout(2, L))
    row_sum = gl.full([C.token_warps, C.rows], 0.0, gl.float32, gl.SliceLayout(2, L))
    under_way: gl.constexpr = (C.stages - 1) * (1 if C.narrow > 0 else 2) - 1
    steps = (piece.end - begin + C.tokens - 1) // C.tokens
    for i in range(steps):
        first = begin + i * C.tokens
        now, next = i % C.stages, (i + C.stages - 1) % C.stages
        async_copy.wait_group(under_way)
        partition_barrier()
        copy_keys(rings, next, cached, piece, first + ahead, k_pages, K_COPY, C, DIM)
        k_pages = look_up(cached, piece, first + ahead + C.tokens, C, K_KEYS)
        s = products_of(rings, now, q, outputs, piece, C, GROUP, DIM)
        s = scores_of(s, terms, cached, piece, entry, first, k_scale, C, GROUP, L)
        new_max = gl.maximum(row_max, gl.max(s, 2))
        shift = finite(new_max)
        p = gl.exp2(s - gl.expand_dims(shift, 2))
        rescale = gl.exp2(row_max - shift)
        row_sum = row_sum * rescale + gl.sum(p, 2)
        row_max = new_max
        acc = acc * gl.expand_dims(rescale, 2)
        if terms.V_BY_TOKEN:  # they may leave the range of float16
            p = p * gl.expand_dims(scale_of_values(terms, cached, piece, entry, first, C, gl.SliceLayout(1, L)), 1)
        if C.narrow == 0:
            async_copy.wait_group(under_way)
            partition_barrier()
            copy_values(rings, next, cached, piece, first + ahead, v_pages, V_COPY, C, DIM_V)
            v_pages = same_or_looked_up(cached, piece, k_pages, first + ahead + C.tokens, C, V_KEYS)
        v = rings[1].index(now).load(RIGHT).to(OF_P)
        acc = mma_v2(gl.convert_layout(p.to(OF_P), LEFT), v, acc)
    async_copy.wait_group(0)
    return acc, row_max, row_sum


@gluon.jit
def scale_of_values(terms, cached, piece, entry, first, C: gl.constexpr, layout: gl.constexpr):
    """The scales of the values of the step from key `first` on, 0 for those that are none."""
    pages = look_up(cached, piece, first, C, layout)
    at = rows_at(cached, first, pages, entry, terms.v_scale_page, terms.v_scale_row, C, layout) + piece.head
    return gl.load(terms.v_scale + at, mask=is_key(cached, piece, first, pages, C, layout), other=0.0)


@gluon.jit
def take(memory, K, piece, job, state):
    """What all warps find along the keys of a piece is added up and delivered."""
    rings, stats = memory
    acc, row_max, row_sum = walk(rings, K.outputs, K.terms, K.cached, piece, K.C, K.GROUP, K.DIM, K.DIM_V)
    o, top, total = gather_warps(rings[0], stats, acc, row_max, row_sum, K.C, K.ROWS)
    deliver(K, piece, job, o, top, total)
    partition_barrier()  # everybody has read what the warps found, where K goes next
    return state


# ---- results. Of a tile's rows only ROWS may be in use.


@gluon.jit
def in_chunks(x, COLUMNS: gl.constexpr):
    """x [.., .., columns] in chunks of COLUMNS, which each thread has a part of."""
    if x.shape[2] == COLUMNS:
        return (x,)
    else:
        halves = gl.reshape(x, [x.shape[0], x.shape[1], 2, x.shape[2] // 2])
        first, second = gl.split(gl.permute(halves, (0, 1, 3, 2)))
        return in_chunks(first, COLUMNS) + in_chunks(second, COLUMNS)


@gluon.jit
def rows_in_use(x, C: gl.constexpr, ROWS: gl.constexpr):
    """x [.., rows, columns] without rows that are not in use: half of 16, of which each thread has some."""
    if C.rows == 2 * ROWS and C.rows == 16:
        halves = gl.reshape(x, [x.shape[0], 2, ROWS, x.shape[2]])
        return gl.split(gl.permute(halves, (0, 2, 3, 1)))[0]
    else:
        return x


@gluon.jit
def gather_warps(k_ring, stats, acc, row_max, row_sum, C: gl.constexpr, ROWS: gl.constexpr):
    """What all warps of a CTA found together: O in chunks of columns, [ROWS, columns] each, not divided yet, the maximum and
    the sum of each row. A thread weighs what it adds up, so the warps meet once."""
    SHAPE: gl.constexpr = meet_shape(C, ROWS)
    R: gl.constexpr = result_layout(C, SHAPE[3])
    W: gl.constexpr = gl.SliceLayout(2, R)
    M: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, R))
    UNIT: gl.constexpr = 8 if C.rows == 16 else 4  # by 8 a warp's 8 rows hit all banks; for more rows a register is missing
    meet = reinterpret(k_ring, gl.float32, SHAPE, ring_layout(SHAPE[3], UNIT))
    partition_barrier()  # everybody has read the last step of K
    chunks = in_chunks(rows_in_use(acc, C, ROWS), SHAPE[3])
    for c in gl.static_range(len(chunks)):
        meet.index(c).store(chunks[c])
    stats[0].store(row_max)
    stats[1].store(row_sum)
    partition_barrier()
    tops = stats[0].slice(0, ROWS, 1).load(W)
    top = gl.max(tops, 0)
    weights = gl.exp2(tops - gl.expand_dims(finite(top), 0))
    total = gl.sum(stats[1].slice(0, ROWS, 1).load(W) * weights, 0)
    o = ()
    for c in gl.static_range(len(chunks)):
        o += (gl.sum(meet.index(c).slice(0, ROWS, 1).load(R) * gl.expand_dims(weights, 2), 0),)
    return o, gl.convert_layout(top, M), gl.convert_layout(total, M)


@gluon.jit
def merge(K, job, row, rows, MERGED: gl.constexpr, AT_ONCE: gl.constexpr):
    """The parts of a job added up in their order, AT_ONCE of them at a time, MERGED rows from row `row` on, of `rows` in use:
    see `gather_warps`. Every thread loads the maxima and sums by which it weighs O, so none waits for another."""
    C: gl.constexpr = K.C
    R: gl.constexpr = merge_layout(C, MERGED)
    STRIDE: gl.constexpr = K.ROWS * C.head_dim_v
    H: gl.constexpr = gl.SliceLayout(2, R)
    M: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, R))
    number = gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(1, H)), 1)
    row_2 = row + gl.expand_dims(gl.arange(0, MERGED, gl.SliceLayout(0, H)), 0)
    number_3, row_3, column = along(AT_ONCE, 0, R), row + along(MERGED, 1, R), along(C.head_dim_v, 2, R)
    o = gl.full([MERGED, C.head_dim_v], 0.0, gl.float32, gl.SliceLayout(0, R))
    top = gl.full([MERGED], -float("inf"), gl.float32, gl.SliceLayout(0, H))
    total = gl.full([MERGED], 0.0, gl.float32, gl.SliceLayout(0, H))
    SPACE: gl.constexpr = 1 if C.split else 2 * C.abreast  # places from one part to the next, but for the first one
    start = place_of(1, job.first, job.begins, job.stretch, C) - SPACE
    own = place_of(0, job.first, job.begins, job.stretch, C) - start
    sums = K.outputs.sums + start * (2 * K.ROWS) + row_2
    parts = K.outputs.parts + start.to(gl.int64) * STRIDE + place_in_part(row_3, column, C)
    for i in range(0, job.parts, AT_ONCE):
        at = sums + number * (SPACE * 2 * K.ROWS) + gl.where(i + number == 0, own * (2 * K.ROWS), i * (SPACE * 2 * K.ROWS))
        there = (i + number < job.parts) & (row_2 < rows)
        tops = gl.load(at, mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = gl.load(at + K.ROWS, mask=there, other=0.0, cache_modifier=".cg")
        at = parts + number_3 * (SPACE * STRIDE) + gl.where(i + number_3 == 0, own * STRIDE, i * (SPACE * STRIDE))
        there = (i + number_3 < job.parts) & (row_3 < rows) & (column < C.head_dim_v)
        os = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, gl.max(tops, 0))
        shift = finite(new_top)
        weights, rescale = gl.exp2(tops - gl.expand_dims(shift, 0)), gl.exp2(top - shift)
        total = total * rescale + gl.sum(totals * weights, 0)
        o = o * gl.expand_dims(gl.convert_layout(rescale, M), 1)
        o += gl.sum(os * gl.expand_dims(weights, 2), 0)
        top = new_top
    return o, gl.convert_layout(top, M), gl.convert_layout(total, M)


@gluon.jit
def write(K, piece, row, o, top, total, COLUMN: gl.constexpr):
    """Write out and the LSE of rows of a piece's tile, from row `row` on; o: columns from COLUMN on."""
    outputs, terms = K.outputs, K.terms
    L: gl.constexpr = o.type.layout
    row = piece.first_row + row + gl.arange(0, o.shape[0], gl.SliceLayout(1, L))
    there = row < piece.queries * K.GROUP
    query, head = piece.first_query + row // K.GROUP, piece.head * K.GROUP + row % K.GROUP
    if terms.sinks is not None:
        sink = gl.load(terms.sinks + head, mask=there, other=0.0).to(gl.float32) * LOG2E
        new_top = gl.maximum(top, sink)
        rescale = gl.exp2(top - finite(new_top))
        total = total * rescale + gl.exp2(sink - finite(new_top))
        o = o * gl.expand_dims(rescale, 1)
        top = new_top
    nothing = total == 0.0
    factor = 1.0 / gl.where(nothing, 1.0, total)
    if terms.v_scale is not None:
        if not terms.V_BY_TOKEN:
            factor *= gl.load(terms.v_scale + piece.batch * terms.v_scale_page + piece.head * terms.v_scale_row)
    if outputs.lse is not None:
        if COLUMN == 0:
            lse = gl.where(nothing, -float("inf"), (top + gl.log2(total)) * LN2)
            at = outputs.lse + piece.batch.to(gl.int64) * outputs.lse_batch + head.to(gl.int64) * outputs.lse_head + query
            gl.store(at, lse, mask=there)
    column = COLUMN + gl.expand_dims(gl.arange(0, o.shape[1], gl.SliceLayout(0, L)), 0)
    at = outputs.out + piece.batch.to(gl.int64) * outputs.out_batch
    at += gl.expand_dims(query.to(gl.int64) * outputs.out_row + head.to(gl.int64) * outputs.out_head, 1) + column
    o = (o * gl.expand_dims(factor, 1)).to(outputs.out.dtype.element_ty)
    mask = gl.max_constancy(gl.expand_dims(there, 1) & (column < K.DIM_V), [1, 4])
    gl.store(gl.multiple_of(at, [1, 8]), o, mask=mask)  # bytes


@gluon.jit
def leave_part(K, job, rows, o, top, total, COLUMN: gl.constexpr):
    """Write `rows` of a part of a result to where whoever merges it looks for it; o: columns from COLUMN on."""
    L: gl.constexpr = o.type.layout
    row = gl.arange(0, o.shape[0], gl.SliceLayout(1, L))
    if COLUMN == 0:
        at = K.outputs.sums + job.place * (2 * K.ROWS) + row
        gl.store(at, top, mask=row < rows)
        gl.store(at + K.ROWS, total, mask=row < rows)
    row, column = gl.expand_dims(row, 1), COLUMN + gl.expand_dims(gl.arange(0, o.shape[1], gl.SliceLayout(0, L)), 0)
    at = K.outputs.parts + job.place.to(gl.int64) * (K.ROWS * K.C.head_dim_v) + place_in_part(row, column, K.C)
    gl.store(at, o, mask=(row < rows) & (column < K.C.head_dim_v))


@gluon.jit
def hand_in(K, piece, job, rows):
    """A part of a job is written: the last to arrive merges all parts, `rows` of each, at once if they are few; else all who
    wait for that do it together."""
    ROWS: gl.constexpr = rows_of_group(K.C, K.ROWS)
    arrivals = K.outputs.arrivals + 2 * job.number
    partition_barrier()  # so the arrival tells of what all threads wrote
    there = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
    if job.parts > most_alone(K.C, ROWS):
        merge_together(K, piece, job, rows, arrivals, there)
    elif there == job.parts:
        gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
        merge_alone(K, piece, job, rows, parts_at_once(K.C, ROWS))


@gluon.jit
def merge_alone(K, piece, job, rows, AT_ONCE: gl.constexpr):
    """Merge all parts of a job, AT_ONCE of them at a time or, if they are few, 8, as code for more takes longer though most of
    it loads nothing."""
    ROWS: gl.constexpr = rows_of_group(K.C, K.ROWS)
    if AT_ONCE > 8:
        if job.parts <= 8:
            merge_alone(K, piece, job, rows, 8)
        else:
            o, top, total = merge(K, job, 0, rows, ROWS, AT_ONCE)
            write(K, piece, 0, o, top, total, 0)
    else:
        o, top, total = merge(K, job, 0, rows, ROWS, AT_ONCE)
        write(K, piece, 0, o, top, total, 0)


@gluon.jit
def merge_together(K, piece, job, rows, arrivals, there):
    """Merge many parts with whoever waits for them. there: how many have arrived.

    Nobody relies on a helper: one may give up until all parts are there, and a launch needs no CTA to run beside another. Of
    the two counters the first one counts parts, and GAVE_UP times those who did not wait. Once all are there nobody gives up,
    so all who waited see how many are absent: if nobody is, or all others are, each knows its share of the rows; else each
    takes the next few, by the second counter, until none are left. Everybody counts there: so the last one knows that he is,
    and sets both back to 0."""
    size = rows_at_once(K.C, job.parts)
    there, number = wait_for_parts(job, arrivals, there)
    absent = there // GAVE_UP
    if there % GAVE_UP == job.parts:
        answer = ask(arrivals + 1, K.C)
        alone = absent == job.parts - 1
        known = (absent == 0) | alone
        turn, turns = gl.where(alone, 0, number), (rows + size - 1) // size
        if not known:
            turn = heard(answer, K.C)
        while turn < turns:
            if K.C.merged_of_few > 0:
                if job.parts <= FEW_PARTS:
                    merge_rows(K, piece, job, turn * size, rows, K.C.merged_of_few)
                else:
                    merge_rows(K, piece, job, turn * size, rows, K.C.merged_rows)
            else:
                merge_rows(K, piece, job, turn * size, rows, K.C.merged_rows)
            if known:
                turn += job.parts - absent
            else:
                turn = gl.atomic_add(arrivals + 1, 1, sem="relaxed", scope="gpu")
        left = turn - turns
        if known:
            left = heard(answer, K.C)
        if left == job.parts - absent - 1:
            gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
            gl.atomic_xchg(arrivals + 1, 0, sem="relaxed", scope="gpu")


@gluon.jit
def rows_at_once(C: gl.constexpr, parts):
    """Rows of a job of so many parts that are merged at once."""
    rows = 0 * parts + C.merged_rows
    if C.merged_of_few > 0:
        rows = gl.where(parts <= FEW_PARTS, C.merged_of_few, rows)
    return rows


@gluon.jit
def merge_rows(K, piece, job, row, rows, MERGED: gl.constexpr):
    """Merge MERGED rows of a job from row `row` on, of `rows` in use, and write them."""
    o, top, total = merge(K, job, row, rows, MERGED, parts_at_once(K.C, MERGED))
    write(K, piece, row, o, top, total, 0)


@gluon.constexpr_function
def lanes(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def ask(counter, C: gl.constexpr):
    """Add 1 to a counter; what it was, see `heard`, need not be there yet where one thread alone waits for it."""
    if C.specialised:
        lane = gl.arange(0, 32 * gl.num_warps(), lanes(gl.num_warps()))
        return gl.atomic_add(counter + 0 * lane, 1 + 0 * lane, mask=lane == 0, sem="relaxed", scope="gpu")
    else:  # mma.sync's kernel has no register for it
        return gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@gluon.jit
def heard(answer, C: gl.constexpr):
    """What a counter was when `ask` did."""
    if C.specialised:
        lane = gl.arange(0, 32 * gl.num_warps(), lanes(gl.num_warps()))
        return gl.max(gl.where(lane == 0, answer, 0), 0)
    else:
        return answer


@gluon.jit
def wait_for_parts(job, arrivals, there):
    """Wait until all parts of a job are there, or give up, which the counter of arrivals then says: its value, which others do
    not change any more once all are there, and as the how-manieth part this one came. there: how many have arrived."""
    number, looks = there % GAVE_UP - 1, job.patience
    while (there % GAVE_UP < job.parts) & (looks > 0):
        there = gl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
        looks -= 1
    stays = looks >= 0
    while (there % GAVE_UP < job.parts) & stays:
        seen = gl.atomic_cas(arrivals, there, there + GAVE_UP, sem="acquire", scope="gpu")
        stays = seen != there
        there = seen
    return there, number


@gluon.jit
def deliver(K, piece, job, acc, top, total):
    """Write what was found of a piece, O in chunks of columns: the result, or a part of it, which whoever comes last merges."""
    M: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    WIDE: gl.constexpr = acc[0].shape[1]
    top, total = gl.convert_layout(top, M), gl.convert_layout(total, M)
    rows = piece.queries * K.GROUP - piece.first_row
    if job.parts == 1:
        for c in gl.static_range(len(acc)):
            write(K, piece, 0, acc[c], top, total, c * WIDE)
    elif rows > 0:
        for c in gl.static_range(len(acc)):
            leave_part(K, job, rows, acc[c], top, total, c * WIDE)
        hand_in(K, piece, job, gl.minimum(rows, rows_of_group(K.C, K.ROWS)))


# ---- the work of a CTA


@gluon.jit
def ask_ahead(K):
    """Ask for page numbers and queries while the lengths are on their way."""
    requests, cached, outputs = K.requests, K.cached, K.outputs
    if cached.PAGE:
        columns = (requests.capacity + cached.PAGE - 1) // cached.PAGE
        prefetch(cached.table, ((requests.batch - 1).to(gl.int64) * cached.table_row + columns) * 4)
    if requests.cu_q is None:
        last = (requests.batch - 1).to(gl.int64) * outputs.q_batch + (requests.n_q - 1).to(gl.int64) * outputs.q_row
        last += (K.heads_kv * K.GROUP - 1).to(gl.int64) * outputs.q_head
        prefetch(outputs.q, (last + K.DIM) * 2)


@gluon.jit
def tile_in_turn(i, tiles):
    """The i-th tile of a key head: first and last ones in turn, so that a CTA with several has as many keys as others where
    the last rows see the most."""
    return gl.where(i % 2 == 0, i // 2, tiles - 1 - i // 2)


@gluon.jit
def keys_of_tile(terms, first_row, queries, begin, end, length, C: gl.constexpr, GROUP: gl.constexpr):
    """[begin, end) of the keys that some row of a tile may see, of those that some query of its request may."""
    own = length - queries
    if terms.BY_ROW:
        if terms.right is not None:
            last = gl.minimum(first_row + C.rows, queries * GROUP) - 1
            end = gl.minimum(end, gl.maximum(own + last // GROUP + terms.right + 1, begin))
        if terms.left is not None:
            begin = gl.minimum(gl.maximum(begin, own + first_row // GROUP - terms.left), end)
    return begin, end


@gluon.jit
def take_pieces(TAKE: gl.constexpr, memory, K, state):
    """All pieces of a CTA's stretch, one after the other. TAKE: what a role does with a piece, as `take` does, in a kernel's
    own memory; `state` is what it remembers from piece to piece."""
    C: gl.constexpr = K.C
    GROUP: gl.constexpr = K.GROUP
    requests, heads_kv, tiles = K.requests, K.heads_kv, K.tiles
    total, most, units = all_units(requests, heads_kv, C, GROUP)
    alike = most.to(gl.int64) * requests.batch == total
    stretch = stretch_of(total, alike, units, C)
    team, member = gl.program_id(0) // C.abreast, gl.program_id(0) % C.abreast
    x, last = start_of(team, stretch, total), start_of(team + 1, stretch, total)
    b, begins = request_at(requests, x, alike, most, heads_kv, C, GROUP)
    while x < last:
        first_query, queries = queries_of(requests, b, b < requests.batch)
        begin, end, length = keys_of(requests, b, b < requests.batch, queries)
        jobs, units = jobs_of(queries, heads_kv, C, GROUP), units_of(begin, end, C)
        if x == begins + jobs * units:
            b += 1
            begins = x
        else:
            job = quotient(x - begins, units)
            job_begins = begins + job * units
            unit = x - job_begins
            count = gl.minimum(units - unit, last - x)
            if C.split:
                count = 1 + 0 * count
            head, tile = job, 0 * job
            some_begin, some_end = begin, end
            if tiles > 1:
                head = job // (jobs // heads_kv)
                tile = tile_in_turn(job - head * (jobs // heads_kv), jobs // heads_kv) * C.abreast + member
                some_begin, some_end = keys_of_tile(K.terms, tile * C.rows, queries, begin, end, length, C, GROUP)
            entry = b
            if requests.index is not None:
                entry = gl.load(requests.index + b)
            origin = (begin // C.unit + unit) * C.unit
            piece = Piece(b, entry, head, tile * C.rows, first_query, queries, length, gl.maximum(some_begin, origin),
                          gl.minimum(some_end, origin + count * C.unit))  # fmt: skip
            ours = True
            if C.abreast > 1:
                ours = piece.first_row < queries * GROUP
            if requests.notes is not None:
                ours = is_left(requests.notes, b, heads_kv, head, piece.first_row, queries, requests.n_q, C, GROUP)
            if ours:
                parts, first = parts_of(job_begins, units, stretch, C)
                part = team - first
                if C.split:
                    part = unit
                place = place_of(part, first, job_begins, stretch, C)
                patience = gl.where(x + count < last, 0, PATIENCE)
                number = (b * heads_kv + head) * tiles + tile
                state = TAKE(memory, K, piece, Job(number, parts, first, job_begins, stretch, place, patience), state)
            x += count
    if requests.notes is not None:
        blocks = (requests.n_q + NOTED_ROWS - 1) // NOTED_ROWS
        forget(requests.notes, requests.batch * heads_kv * GROUP * blocks, C.warps)
    return state


NUMBERS = (
    "q_batch", "q_row", "q_head", "k_page", "k_row", "k_head", "v_page", "v_row", "v_head", "out_batch", "out_row", "out_head",
    "lse_batch", "lse_head", "table_row", "tree_batch", "tree_row", "tree_column", "alibi_batch", "k_scale_page",
    "k_scale_row", "v_scale_page", "v_scale_row", "batch", "heads_kv", "n_q",
    "capacity", "total_q", "pages", "tiles",
)  # fmt: skip
"""Arguments for whose values nothing is compiled anew."""


@gluon.jit(do_not_specialize=NUMBERS)
def decode_kernel(
    q, k, v, out, lse, lengths, page_table, index, leftpad, cu_q, tree, alibi, sinks, k_scale, v_scale, parts, sums, arrivals,
    q_batch, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_batch, out_row, out_head, lse_batch, lse_head,
    table_row, tree_batch, tree_row, tree_column, alibi_batch, k_scale_page, k_scale_row, v_scale_page, v_scale_row, batch,
    heads_kv, n_q, capacity, total_q, pages, tiles, scale, softcap, left, right,
    C: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, ROWS: gl.constexpr,
    BY_ROW: gl.constexpr, K_BY_TOKEN: gl.constexpr, V_BY_TOKEN: gl.constexpr, IN_TURN: gl.constexpr,
    notes=None, counters=None, MANY: gl.constexpr = 0,
):  # fmt: skip
    if IN_TURN:
        take_turn()
    noted = None
    if notes is not None:
        noted = Notes(notes, counters, gl.load(counters + NOTED) != 0, MANY)
    requests = Requests(lengths, leftpad, index, cu_q, batch, n_q, capacity, total_q, pages, left, noted)
    cached = Cached(k, v, page_table, k_page, k_row, k_head, v_page, v_row, v_head, table_row, pages, PAGE)
    terms = Terms(tree, tree_batch, tree_row, tree_column, alibi, alibi_batch, sinks, k_scale, v_scale, k_scale_page,
                  k_scale_row, v_scale_page, v_scale_row, scale, softcap, left, right, BY_ROW, K_BY_TOKEN,
                  V_BY_TOKEN)  # fmt: skip
    outputs = Outputs(q, q_batch, q_row, q_head, out, out_batch, out_row, out_head, lse, lse_batch, lse_head, parts, sums,
                      arrivals)  # fmt: skip
    K = Kernel(requests, outputs, terms, cached, heads_kv, tiles, C, GROUP, DIM, DIM_V, ROWS)
    ask_ahead(K)
    each: gl.constexpr = C.tokens // C.token_warps
    width: gl.constexpr = 16 // C.kv_bytes
    k_ring = gl.allocate_shared_memory(k.dtype.element_ty, [C.stages, C.token_warps, each, C.head_dim],
                                       ring_layout(C.head_dim, width))  # fmt: skip
    if C.narrow > 0:  # V is the first columns of K
        rings = (k_ring, k_ring, gl.allocate_shared_memory(
            k.dtype.element_ty, [C.stages, C.token_warps, each, C.narrow], ring_layout(C.narrow, width)))  # fmt: skip
    else:
        rings = (k_ring, gl.allocate_shared_memory(
            k.dtype.element_ty, [C.stages, C.token_warps, each, C.head_dim_v], ring_layout(C.head_dim_v, width)))  # fmt: skip
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    stats = (gl.allocate_shared_memory(gl.float32, [C.token_warps, C.rows], PLAIN),
             gl.allocate_shared_memory(gl.float32, [C.token_warps, C.rows], PLAIN))  # fmt: skip

    if notes is None or cu_q is not None or noted.any:
        take_pieces(take, (rings, stats), K, gl.to_tensor(0))
