"""Attention forward for mma.sync in Gluon: Ampere, Ada, and every later GPU too. cp.async, ldmatrix, an optimistic softmax.

A CTA computes `tile_q` query rows of one head; all its warps do the same, each for 16 or 32 of the rows. It goes over blocks of
`tile_kv` keys: S = Q K^T, P = softmax(S), O += P V, in registers from S to O: the registers of a result are those of the next
product's left operand. Or two warps share 32 rows (`across`): each has half of the keys of S and half of the columns of O, and
P passes through shared memory. That is a write, a barrier and a read of P for half of the reads of K and V, of which shared
memory has to give so many at head dim 256 that the tensor cores wait.

    shared memory   shape                        holds
    q               [tile_q, head_dim]           the rows of Q; at the end those of O, on their way out
    k               [stages, tile_kv, head_dim]  blocks of K
    v               [stages, tile_kv, dim_v]     blocks of V
    p               [tile_q, tile_kv]            P, where two warps share rows

    with one stage, block by block               with two
    wait for K(i), barrier                       wait for K(i), V(i), barrier
    start to copy V(i)                           start to copy K(i + 1), V(i + 1)
    S = Q K(i)^T                                 S = Q K(i)^T
    wait for V(i), barrier                       softmax
    start to copy K(i + 1)                       O += P V(i)
    softmax
    O += P V(i)

A thread can wait for its own copies only, so a barrier follows each wait. The same barrier says that everybody has read what
the next copy replaces.

The blocks that all rows see whole come first, without a mask, then the others. The softmax is optimistic
(docs/optimistic_softmax.md): exponents are counted from the row maximum of the first block, so there is no running maximum
and O is never rescaled, which with mma.sync would take more instructions than the exponentials. Where a sum leaves its range,
or a NaN or an infinity comes out that a masked-out value may have caused, the CTA computes its tile again, with care (`redo`).
"""

import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from strobe.kernels.common.optimistic import BOUNDS
from strobe.kernels.common.scores import LN2
from strobe.kernels.common.tile_scheduler import Heads, Lengths, locate
from strobe.kernels.gluon import aggregate, gl, gluon, partition_barrier
from strobe.kernels.sm80.layouts import in_rows, left, product_layout, right, swizzled, unit_of
from strobe.kernels.sm80.products import add_product, add_products, rows_by_rows
from strobe.kernels.sm80.scores import apply_mask, ask_function, documents_of_block, kept_weights, scores_of
from strobe.kernels.sm80.tiles import Matrix, allocate, at, copy_tile, first_of, zeros
from strobe.kernels.sm90.scores import SCORE_NUMBERS, Score, documents_of_rows, score_of, seen_by, sink_of, slope_of

NATURAL, COUNTED, FINITE = (gl.constexpr(i) for i in range(3))
"""Passes of `redo`: the result as it comes; how many values that are not finite each row sees, by column; the result of the
finite values."""


@gluon.constexpr_function
def bounds_of(dtype):
    return BOUNDS["float16" if dtype == gl.float16 else "bfloat16"]


@gluon.jit
def allocate_weights(dtype: gl.constexpr, C: gl.constexpr):
    """Shared memory for P, where two warps share rows."""
    buffers = ()
    if C.across > 1:
        buffers += (gl.allocate_shared_memory(dtype, [C.tile_q, C.tile_kv], swizzled(C.tile_kv, dtype)),)
    return buffers


# ---- what a tile is


@aggregate
class Kernel:
    """What a kernel knows before it has a tile. k, v, out: in global memory. lse: float32 as `lse_shape` says. rows: query rows
    in all. q_s, k_s, v_s: shared memory, a tuple of chunks each; p_s: of one, or of none. MASKED: whether a block may have
    keys that a row does not see. CUT: whether a row may meet, in a tile, what it does not see."""

    k: Matrix
    v: Matrix
    out: Matrix
    lse: gl.tensor
    rows: gl.tensor
    lengths: Lengths
    heads: Heads
    score: Score
    q_s: gl.tuple
    k_s: gl.tuple
    v_s: gl.tuple
    p_s: gl.tuple
    dtype: gl.constexpr
    MASKED: gl.constexpr
    CUT: gl.constexpr
    DIM: gl.constexpr
    DIM_V: gl.constexpr
    C: gl.constexpr


@aggregate
class Tile:
    """A tile of rows of one head, as in `tile_scheduler.Work`. p: the position of its first row among the keys. whole: how many
    blocks all rows see whole; they come first. keys, values: pointers to K and V of its head. slope: of the head. documents: of
    the rows."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    p: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    start_q: (gl.tensor, gl.constexpr)
    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    keys: gl.tensor
    values: gl.tensor
    slope: (gl.tensor, gl.constexpr)
    documents: (gl.tensor, gl.constexpr)


@gluon.jit
def tile_of(K, work, S: gl.constexpr):
    """The Tile of a Work. S: the layout of scores."""
    full_end = work.full_end
    if K.score.visible is not None:  # a user's function is asked about every pair
        full_end = work.full_begin
    documents = 0
    if K.score.document_q is not None:
        row = work.row + gl.arange(0, K.C.tile_q, gl.SliceLayout(1, S))
        documents = documents_of_rows(work.batch, row, work.n_q, K.score)
    head_kv = work.head // K.heads.group
    return Tile(
        work.batch, work.head, work.row, work.row + (work.n_kv - work.n_q), work.n_q, work.n_kv, work.start_q, work.begin,
        work.full_begin, full_end, work.end, K.k.rows_of(work.batch, head_kv, work.start_kv),
        K.v.rows_of(work.batch, head_kv, work.start_kv), slope_of(work.batch, work.head, K.score), documents,
    )  # fmt: skip


@gluon.jit
def block_at(K, tile, position):
    """The block that comes at a position: those that are seen whole, then those after them, then those before, from right to
    left. So the first one is whole or, where none is, has the last keys that all rows see."""
    ASCENDING: gl.constexpr = K.lengths.left is None and K.lengths.spans is None
    if ASCENDING:
        return tile.begin + position
    else:
        later = tile.end - tile.full_begin
        return gl.where(position < later, tile.full_begin + position, tile.full_begin - 1 - (position - later))


# ---- copies


@gluon.jit
def copy_keys(K, tile, position, STAGE: gl.constexpr):
    first = block_at(K, tile, position) * K.C.tile_kv
    copy_tile(at(K.k_s, STAGE, K.C.stages), K.k, tile.keys, first, tile.n_kv, K.C, False, K.DIM, K.MASKED)


@gluon.jit
def copy_values(K, tile, position, STAGE: gl.constexpr):
    first = block_at(K, tile, position) * K.C.tile_kv
    copy_tile(at(K.v_s, STAGE, K.C.stages), K.v, tile.values, first, tile.n_kv, K.C, True, K.DIM_V, K.MASKED)


@gluon.jit
def start_copies(K, tile):
    """The copies of the first block: of K alone or, with two stages, of both."""
    copy_keys(K, tile, gl.to_tensor(0), 0)
    if K.C.stages == 2:
        copy_values(K, tile, gl.to_tensor(0), 0)
    async_copy.commit_group()


@gluon.jit
def await_keys(K, tile, position, STAGE: gl.constexpr):
    """Wait for the K of a position, and start the copies for which there is room then."""
    async_copy.wait_group(0)
    partition_barrier()
    if K.C.stages == 1:
        copy_values(K, tile, position, 0)
    elif position + 1 < tile.end - tile.begin:
        copy_keys(K, tile, position + 1, 1 - STAGE)
        copy_values(K, tile, position + 1, 1 - STAGE)
    async_copy.commit_group()


@gluon.jit
def await_values(K, tile, position):
    """Wait for the V of a position; with one stage everybody has read its K, so start to copy the next."""
    if K.C.stages == 1:
        async_copy.wait_group(0)
        partition_barrier()
        if position + 1 < tile.end - tile.begin:
            copy_keys(K, tile, position + 1, 0)
        async_copy.commit_group()


# ---- products


@gluon.jit
def load_q(K, S: gl.constexpr):
    """Q as left operands, a chunk each; None where it is read from shared memory for each block."""
    if K.C.q_in_registers:
        held = ()
        for c in gl.static_range(len(K.q_s)):
            held += (K.q_s[c].load(left(S)),)
        return held
    else:
        return None


@gluon.jit
def products(K, q, k, S: gl.constexpr, CAREFUL: gl.constexpr = False):
    """S = Q K^T."""
    return rows_by_rows(K.q_s if q is None else q, k, K.C.tile_q, K.C.tile_kv, S, CAREFUL)


@gluon.jit
def to_left(K, p, S: gl.constexpr):
    """P as a left operand."""
    if K.C.across > 1:
        K.p_s[0].store(p)
        partition_barrier()
        return K.p_s[0].load(left(S))
    else:
        return gl.convert_layout(p, left(S))  # costs nothing: registers are in this order


@gluon.jit
def times(acc, factor):
    """O times a factor of each row."""
    new = ()
    for c in gl.static_range(len(acc)):
        new += (acc[c] * factor[:, None],)
    return new


# ---- the softmax


@gluon.jit
def lane_sums(p, ACROSS: gl.constexpr):
    """Row sums within each lane: [rows, columns] -> [rows, 4 ACROSS], a column for each lane with part of the row, in ACROSS
    warps."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // (8 * ACROSS), 4 * ACROSS, 2]), 3), 1)


@gluon.jit
def all_lanes(sums, S: gl.constexpr):
    """The row sums of `lane_sums`."""
    return gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, S))


@gluon.jit
def shift_of(m):
    """What to count exponents from, given a maximum: not from that of a row which has seen nothing, as -inf - -inf is NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def weights(s, m, scale):
    """P = 2^(scale S - m)."""
    return gl.exp2(s * scale - m[:, None])


@gluon.jit
def rescale_lanes(sums, factor):
    return sums * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def step(K, tile, q, position, acc, m, row_sum, S: gl.constexpr, FIRST: gl.constexpr, WHOLE: gl.constexpr):
    """The block at a position: (O, m, row sums) with it. m: what exponents are counted from or, with the safe softmax, the
    maximum. FIRST: it is the tile's first. WHOLE: no row of the tile is masked."""
    if FIRST or K.C.stages == 1:
        acc, m, row_sum = step_at(K, tile, q, position, acc, m, row_sum, S, FIRST, WHOLE, 0)
    else:
        if position % 2 == 0:
            acc, m, row_sum = step_at(K, tile, q, position, acc, m, row_sum, S, FIRST, WHOLE, 0)
        else:
            acc, m, row_sum = step_at(K, tile, q, position, acc, m, row_sum, S, FIRST, WHOLE, 1)
    return acc, m, row_sum


@gluon.jit
def step_at(
    K, tile, q, position, acc, m, row_sum, S: gl.constexpr, FIRST: gl.constexpr, WHOLE: gl.constexpr, STAGE: gl.constexpr
):
    """The block at a position, whose K and V are in a stage."""
    GUARDED: gl.constexpr = K.MASKED or K.score.CHANGED
    i = block_at(K, tile, position)
    await_keys(K, tile, position, STAGE)
    documents = 0 if WHOLE else documents_of_block(K, S, i, tile)
    s = products(K, q, at(K.k_s, STAGE, K.C.stages), S)
    s, scale = scores_of(K, s, i, tile)
    if not WHOLE:
        s = apply_mask(K, s, i, documents, tile)
    s = ask_function(K, s, i, tile)
    await_values(K, tile, position)
    if FIRST or not K.C.optimistic:
        new_m = gl.max(s, 1) * scale
        if not FIRST:
            new_m = gl.maximum(m, new_m)
        shift = shift_of(new_m) if GUARDED else new_m
        if not FIRST:
            factor = gl.exp2(m - shift)
            acc = times(acc, factor)
            row_sum = rescale_lanes(row_sum, factor)
        m = shift if K.C.optimistic else new_m
    else:
        shift = m
    p = weights(s, shift, scale)
    sums = lane_sums(p, K.C.across)
    row_sum = sums if FIRST else row_sum + sums
    p = kept_weights(K, p, i, tile).to(K.dtype)
    acc = add_products(acc, to_left(K, p, S), at(K.v_s, STAGE, K.C.stages), S)
    return acc, m, row_sum


@gluon.jit
def attend(K, tile, S: gl.constexpr):
    """(O, m, row sums) of a tile, O not yet divided."""
    blocks = tile.end - tile.begin
    q = None
    zero = gl.to_tensor(0)
    start_copies(K, tile)
    if K.C.q_in_registers:
        # Q came first, and is waited for with the first block.
        async_copy.wait_group(0)
        partition_barrier()
        q = load_q(K, S)
    acc = zeros(K.C.tile_q, K.C, True, S)
    if K.MASKED:
        whole = tile.full_end - tile.full_begin
        acc, m, row_sum = step(K, tile, q, zero, acc, None, None, S, True, False)
        for position in tl.range(1, whole, disable_licm=True):
            acc, m, row_sum = step(K, tile, q, position, acc, m, row_sum, S, False, True)
        for position in tl.range(gl.maximum(whole, 1), blocks, disable_licm=True):
            acc, m, row_sum = step(K, tile, q, position, acc, m, row_sum, S, False, False)
    else:
        acc, m, row_sum = step(K, tile, q, zero, acc, None, None, S, True, True)
        for position in tl.range(1, blocks, disable_licm=True):
            acc, m, row_sum = step(K, tile, q, position, acc, m, row_sum, S, False, True)
    async_copy.wait_group(0)
    return acc, m, all_lanes(row_sum, S)


# ---- the way out


@gluon.jit
def shares_and_lse(K, tile, m, row_sum):
    """What a row of O has to be multiplied by, and its LSE."""
    rescale = 1.0
    if K.score.sinks is not None:
        sink = sink_of(tile.head, K.score)
        top = gl.maximum(gl.where(row_sum == 0.0, float("-inf"), m), sink)
        top = gl.where(top == float("-inf"), 0.0, top)
        rescale = gl.where(row_sum == 0.0, 0.0, gl.exp2(m - top))  # a sink may be far above all scores
        row_sum = row_sum * rescale + gl.exp2(sink - top)
        m = top
    m = gl.where(row_sum == 0.0, 0.0, m)
    share = gl.where(row_sum == 0.0, 0.0, rescale / row_sum)
    if K.score.seed is not None:
        share *= K.score.kept_scale
    return share, (m + gl.log2(row_sum)) * LN2


@gluon.jit
def store_lse(K, tile, lse, S: gl.constexpr):
    rows = tile.row + gl.arange(0, K.C.tile_q, gl.SliceLayout(1, S))
    if K.lengths.cu_q is None:
        first = (tile.batch * K.heads.heads + tile.head).to(gl.int64) * K.lengths.n_q
    else:
        first = tile.head.to(gl.int64) * K.rows + tile.start_q
    gl.store(K.lse + first + rows, lse, mask=rows < tile.n_q)


@gluon.jit
def pointers_of(K, tile, column: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, UNIT: gl.constexpr = 1):
    """Where a tile's columns of O from `column` on go, and which of them exist. UNIT: neighbours in a row that a lane stores as
    one. It is promised here, as Triton 3.6 forgets what is promised of a call's result."""
    row = gl.arange(0, K.C.tile_q, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    base = K.out.rows_of(tile.batch, tile.head, tile.start_q) + tile.row.to(gl.int64) * K.out.row
    pointers = base + (row.to(gl.int64) * K.out.row)[:, None] + columns[None, :]
    exists = (tile.row + row < tile.n_q)[:, None] & (columns < K.DIM_V)[None, :]
    BYTES: gl.constexpr = UNIT * K.dtype.primitive_bitwidth // 8
    return gl.multiple_of(pointers, [1, BYTES]), gl.max_constancy(exists, [1, UNIT])


@gluon.jit
def store_output(K, tile, o):
    """O to global memory: rows of 16 bytes a thread by way of Q's shared memory, or as it is."""
    if K.C.leaves_by_q:
        for c in gl.static_range(len(o)):
            K.q_s[c].store(o[c].to(K.dtype))
        partition_barrier()
    for c in gl.static_range(len(o)):
        store_chunk(K, tile, o[c], c)


@gluon.jit
def store_chunk(K, tile, o, c: gl.constexpr):
    """A chunk of O to global memory, from where it is by now."""
    FIRST: gl.constexpr = first_of(K.C, True, c)
    COLUMNS: gl.constexpr = o.shape[1]
    if K.C.leaves_by_q:
        LAYOUT: gl.constexpr = in_rows(COLUMNS, K.C.warps, K.dtype)
        pointers, exists = pointers_of(K, tile, FIRST, COLUMNS, LAYOUT, unit_of(K.dtype))
        gl.store(pointers, K.q_s[c].load(LAYOUT), mask=exists)
    else:
        LAYOUT: gl.constexpr = o.type.layout
        pointers, exists = pointers_of(K, tile, FIRST, COLUMNS, LAYOUT)
        gl.store(pointers, o.to(K.dtype), mask=exists)


@gluon.jit
def not_finite(o, ACROSS: gl.constexpr, S: gl.constexpr):
    """NaN for each row that has a NaN or an infinity, else 0. Chunks are added up within lanes first: between two warps that
    share rows a sum takes barriers."""
    sums = lane_sums(o[0] * 0.0, ACROSS)
    for c in gl.static_range(1, len(o)):
        sums += gl.convert_layout(lane_sums(o[c] * 0.0, ACROSS), sums.type.layout)  # moves nothing
    return all_lanes(sums, S)


@gluon.jit
def is_broken(K, tile, o, m, row_sum, S: gl.constexpr):
    """Which rows have to be computed again: a NaN or an infinity came out, or optimism went wrong."""
    broken = (not_finite(o, K.C.across, S) != 0.0) | (row_sum != row_sum)
    if K.C.optimistic:
        BOUNDS_OF: gl.constexpr = bounds_of(K.dtype)
        p = tile.p + gl.arange(0, K.C.tile_q, gl.SliceLayout(1, S))
        begin, end = seen_by(p, tile.n_kv, K.lengths)
        # m is 0 of rows that the first block could not judge.
        least = gl.where(m == 0.0, gl.maximum(end - begin, 0) * BOUNDS_OF.least_by_key, BOUNDS_OF.least)
        broken = broken | (row_sum >= BOUNDS_OF.most) | (row_sum < least)
    return broken & (p_exists(K, tile, S))


@gluon.jit
def p_exists(K, tile, S: gl.constexpr):
    """Which rows of the tile exist."""
    return tile.row + gl.arange(0, K.C.tile_q, gl.SliceLayout(1, S)) < tile.n_q


# ---- once more, with care


@gluon.jit
def redo(K, tile, S: gl.constexpr):
    """Compute a tile again, with a running maximum.

    A masked-out value weighs 0, but 0 * NaN = NaN. So where a NaN comes out, and a row may meet values that it does not see,
    those that are not finite are counted, and rows that see none get the result of the finite values. Between the passes what
    is known of O is in global memory: of entries to be replaced a 0, of the others something that is not finite.
    """
    passes = gl.to_tensor(1)
    number = gl.to_tensor(0)
    while number < passes:
        acc, m, row_sum = attend_with_care(K, tile, number, S)
        share, lse = shares_and_lse(K, tile, m, row_sum)
        broken = not_finite(acc, K.C.across, S)
        for c in gl.static_range(len(acc)):
            put_pass(K, tile, number, acc[c], share, first_of(K.C, True, c))
        if number == NATURAL:
            store_lse(K, tile, lse, S)
            if K.CUT:
                if gl.max((broken != 0.0).to(gl.int32), 0) != 0:
                    passes += 2
        number += 1


@gluon.jit
def put_pass(K, tile, number, acc, share, FIRST: gl.constexpr):
    """What a pass of `redo` says of the columns of O from FIRST on, to global memory."""
    o = acc * share[:, None]
    LAYOUT: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = acc.shape[1]
    pointers, exists = pointers_of(K, tile, FIRST, COLUMNS, LAYOUT)
    if K.CUT:
        known = gl.load(pointers, mask=exists & (number != NATURAL), other=0.0).to(gl.float32)
        if number == COUNTED:
            o = gl.where(acc > 0.0, known, 0.0)
        else:
            o = gl.where((number == FINITE) & (known * 0.0 != 0.0), known, o)
    gl.store(pointers, o.to(K.dtype), mask=exists)


@gluon.jit
def attend_with_care(K, tile, number, S: gl.constexpr):
    """(O, m, row sums) of a pass of `redo`, block by block, every one of them masked."""
    acc = zeros(K.C.tile_q, K.C, True, S)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, S)
    m = gl.full([K.C.tile_q], float("-inf"), gl.float32, LAYOUT)
    row_sum = gl.full([K.C.tile_q], 0.0, gl.float32, LAYOUT)
    for i in tl.range(tile.begin, tile.end):
        first = i * K.C.tile_kv
        partition_barrier()
        copy_tile(at(K.k_s, 0, K.C.stages), K.k, tile.keys, first, tile.n_kv, K.C, False, K.DIM, True)
        copy_tile(at(K.v_s, 0, K.C.stages), K.v, tile.values, first, tile.n_kv, K.C, True, K.DIM_V, True)
        async_copy.commit_group()
        async_copy.wait_group(0)
        partition_barrier()
        hidden = gl.full([K.C.tile_q, K.C.tile_kv], 0.0, gl.float32, S)
        hidden = ask_function(K, apply_mask(K, hidden, i, documents_of_block(K, S, i, tile), tile), i, tile)
        s, scale = scores_of(K, products(K, None, at(K.k_s, 0, K.C.stages), S, True), i, tile)
        s = gl.where(hidden == 0.0, s * scale, float("-inf"))
        new_m = gl.maximum(m, gl.max(s, 1))
        shift = shift_of(new_m)
        factor = gl.exp2(m - shift)
        p = gl.exp2(s - shift[:, None])
        row_sum = row_sum * factor + gl.sum(p, 1)
        p = kept_weights(K, p, i, tile)
        if K.CUT:
            factor = gl.where(number == COUNTED, 1.0, factor)
            p = gl.where(number == COUNTED, gl.where(hidden == 0.0, 1.0, 0.0), p)
        a = to_left(K, p.to(K.dtype), S)
        acc = times(acc, factor)
        new = ()
        for c in gl.static_range(len(acc)):
            v = K.v_s[c].load(right(S))
            if K.CUT:
                v = values_of_pass(v, number)
            new += (add_product(acc[c], a, v, S, True),)
        acc = new
        m = new_m
    partition_barrier()
    return acc, m, row_sum


@gluon.jit
def values_of_pass(v, number):
    """Values as they are, or where they are not finite 1 and else 0, or 0 where they are not finite."""
    finite = gl.abs(v.to(gl.float32)) < float("inf")
    if number == COUNTED:
        v = gl.where(finite, 0.0, 1.0).to(v.dtype)
    elif number == FINITE:
        v = gl.where(finite, v, 0.0)
    return v


# ---- entry


NUMBERS = (
    *(f"{name}_{by}" for name in ("q", "k", "v", "out") for by in ("batch", "row", "head")),
    *("heads", "group", "at_once", "rest", "tiles", "rows", "n_q", "n_kv", "left", "right", "prefix"),
    *SCORE_NUMBERS,
    "total_kv",
)
"""Arguments that no kernel is specialised for: other lengths, bounds and strides do not recompile."""


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q, k, v, out, lse, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    cu_q, cu_kv, used_q, used_kv, heads, group, at_once, rest, tiles, rows, n_q, n_kv, left, right, prefix,
    terms, threshold, slope_batch, slope_head, bias_batch, bias_head, bias_row, bias_key,
    document_q_batch, document_q_row, document_kv_batch, sink_stride, document_kv_row, spans, total_kv,
    MASKED: gl.constexpr, CUT: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    # Numbers are parameters one by one: Triton 3.6 to 3.9 specialises a kernel for those of a tuple, `do_not_specialize` or not
    # (see `sm90.scores.SCORE_NUMBERS`).
    S: gl.constexpr = product_layout(C.warps, C.across)
    dtype: gl.constexpr = q.dtype.element_ty
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans, rows, total_kv)
    heads = Heads(heads, group, at_once, rest, tiles)
    score = score_of(terms, (slope_batch, slope_head), (bias_batch, bias_head, bias_row, bias_key), sink_stride,
                     (document_q_batch, document_q_row, document_kv_batch, document_kv_row), threshold)  # fmt: skip
    work = locate(gl.program_id(0), lengths, heads, C)
    if work.begin < work.end:  # rows that are not used have none
        K = Kernel(
            Matrix(k, k_batch, k_row, k_head), Matrix(v, v_batch, v_row, v_head), Matrix(out, out_batch, out_row, out_head),
            lse, rows, lengths, heads, score, allocate(dtype, 1, C.tile_q, C, False),
            allocate(dtype, C.stages, C.tile_kv, C, False), allocate(dtype, C.stages, C.tile_kv, C, True),
            allocate_weights(dtype, C), dtype, MASKED, CUT, DIM, DIM_V, C,
        )  # fmt: skip
        tile = tile_of(K, work, S)
        queries = Matrix(q, q_batch, q_row, q_head)
        copy_tile(K.q_s, queries, queries.rows_of(tile.batch, tile.head, tile.start_q), tile.row, tile.n_q, C,
                  False, DIM, True)  # fmt: skip
        acc, m, row_sum = attend(K, tile, S)
        share, lse_of_rows = shares_and_lse(K, tile, m, row_sum)
        o = times(acc, share)
        if C.optimistic or CUT:
            if gl.max(is_broken(K, tile, o, m, row_sum, S).to(gl.int32), 0) != 0:
                redo(K, tile, S)
            else:
                store_lse(K, tile, lse_of_rows, S)
                store_output(K, tile, o)
        else:
            store_lse(K, tile, lse_of_rows, S)
            store_output(K, tile, o)
