"""Attention backward for mma.sync in Gluon: dQ, dK, dV in one pass over the scores.

A CTA takes a block of `tile_kv` keys of one key head, and goes over the tiles of `tile_q` query rows that see them, of every
query head that shares them. dK and dV stay in registers; what a tile adds to dQ goes to an accumulator in global memory, by
atomic additions in float32.

    P  = exp(S - LSE),  S = score(Q K^T)         computed again
    dV = P^T dO
    dP = dO V^T
    dS = P * (dP - delta),   delta = rowsum(O * dO) - dLSE
    dK = dS^T Q,  dQ = dS K                      times the scale

    shared memory   shape                        holds
    k, v            [tile_kv, dim]               the block; at the end dK and dV, on their way out
    q, do           [stages, tile_q, dim]        tiles of Q and dO
    statistics      [stages, 2 * tile_q]         of their rows: the LSE in powers of two, then delta
    ds              [parts, tile_kv, rows]       dS^T, for dQ
    p               [tile_kv, tile_q]            P^T, where two warps share rows of dK and dV

    tile by tile: wait for its copies, barrier; start to copy the next one (two stages)
                  S^T = K Q^T, dP^T = V dO^T; P^T and dS^T, to shared memory
                  barrier
                  dV += P^T dO, dK += dS^T Q, dQ = dS K, added to the accumulator
                  with one stage: barrier; start to copy the next tile

S and dP are computed transposed, keys by rows. If each warp has 16 keys of a block to itself, P^T and dS^T are the left
operands of dV and dK as they are, in registers, and only dS passes through shared memory, for dQ, which sums over the keys of
all warps. If two warps share 32 keys (`across`), each has half of the columns of dK and dV and both need all of P^T: fewer
reads of Q and dO for a write and a read of P. Or a warp has 32 keys to itself, and a tile's rows come in `parts` (see
`backward_parts`).

A backward that must be deterministic, or finds the gradient of a bias, leaves dQ to the portable kernel, which has an order.

What a tile adds to dQ lies in the accumulator in the order of registers and lanes, so that a warp's 32 additions are neighbours
(`backward_dq.put_dq`); `backward_ends.convert` puts it in order.
"""

import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from strobe.kernels.common.tile_scheduler import Lengths
from strobe.kernels.gluon import aggregate, cp_async, gl, gluon, partition_barrier
from strobe.kernels.sm80.backward_dq import add_dq
from strobe.kernels.sm80.backward_parts import add_parts
from strobe.kernels.sm80.backward_scores import (
    apply_mask_transposed,
    gradients_transposed,
    kept_weights_transposed,
    scores_transposed,
)
from strobe.kernels.sm80.layouts import in_rows, left, product_layout, swizzled, unit_of
from strobe.kernels.sm80.products import add_products, rows_by_rows
from strobe.kernels.sm80.tiles import Matrix, allocate, at, copy_tile, first_of, zeros
from strobe.kernels.sm90.backward_tiles import KeyHeads, locate_keys
from strobe.kernels.sm90.scores import SCORE_NUMBERS, Score, score_of, slope_of


@aggregate
class Memory:
    """The shared memory of a CTA: see the table above. k, v, q, do: tuples of chunks, q and do of all stages (see `tiles.at`),
    as statistics are. ds: a tuple of parts. p: None where nobody needs it."""

    k: gl.tuple
    v: gl.tuple
    q: gl.tuple
    do: gl.tuple
    statistics: gl.tuple
    ds: gl.tuple
    p: (gl.shared_memory_descriptor, gl.constexpr)


@aggregate
class Kernel:
    """What a kernel knows before it has a block. q, do, dk, dv: in global memory. statistics, accumulator: see
    `backward_ends`. notes: int32, one for 64 keys. scale: of dK. MASKED: whether a tile may have rows that do not see a key.
    NOTED: whether 64 keys are noted whose gradients are not finite."""

    q: Matrix
    do: Matrix
    dk: Matrix
    dv: Matrix
    statistics: gl.tensor
    accumulator: (gl.tensor, gl.constexpr)
    notes: (gl.tensor, gl.constexpr)
    scale: gl.tensor
    lengths: Lengths
    heads: KeyHeads
    score: Score
    memory: Memory
    dtype: gl.constexpr
    MASKED: gl.constexpr
    NOTED: gl.constexpr
    DIM: gl.constexpr
    DIM_V: gl.constexpr
    C: gl.constexpr


@gluon.jit
def make_memory(dtype: gl.constexpr, C: gl.constexpr):
    IN_A_ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    statistics = (gl.allocate_shared_memory(gl.float32, [2 * C.tile_q], IN_A_ROW),)
    if C.stages == 2:
        statistics += (gl.allocate_shared_memory(gl.float32, [2 * C.tile_q], IN_A_ROW),)
    PARTS: gl.constexpr = C.parts
    ds = ()
    for _ in gl.static_range(PARTS):
        ds += (gl.allocate_shared_memory(dtype, [C.tile_kv, C.rows], swizzled(C.rows, dtype)),)
    p = None
    if C.across > 1:
        p = gl.allocate_shared_memory(dtype, [C.tile_kv, C.tile_q], swizzled(C.tile_q, dtype))
    return Memory(
        allocate(dtype, 1, C.tile_kv, C, False), allocate(dtype, 1, C.tile_kv, C, True),
        allocate(dtype, C.stages, C.tile_q, C, False), allocate(dtype, C.stages, C.tile_q, C, True),
        statistics, ds, p,
    )  # fmt: skip


# ---- copies


@gluon.jit
def copy_rows_of(K, work, tile, member, STAGE: gl.constexpr):
    """Start to copy a tile of the member-th query head of the block's key head: Q, dO and their statistics."""
    row = tile * K.C.tile_q
    head = work.head_kv * work.group + member
    q = K.q.rows_of(work.batch, head, work.start_q)
    do = K.do.rows_of(work.batch, head, work.start_q)
    copy_tile(at(K.memory.q, STAGE, K.C.stages), K.q, q, row, work.n_q, K.C, False, K.DIM, True)
    copy_tile(at(K.memory.do, STAGE, K.C.stages), K.do, do, row, work.n_q, K.C, True, K.DIM_V, True)
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [K.C.warps], [0])
    place = (work.row + member * K.heads.padded + row).to(gl.int64) * 2
    numbers = K.statistics + place + gl.arange(0, 2 * K.C.tile_q, LAYOUT)
    cp_async(K.memory.statistics[STAGE], gl.multiple_of(numbers, [16]))


# ---- products


@gluon.jit
def operand(x, buffer, C: gl.constexpr, LAYOUT: gl.constexpr):
    """P^T or dS^T as a left operand: in registers already, or from shared memory."""
    if C.across > 1:
        return buffer.load(left(LAYOUT))
    else:
        return gl.convert_layout(x, left(LAYOUT))


# ---- a block of keys


@gluon.jit
def tile_after(work, tile, member):
    """The tile that comes after a tile, of the same query head or the next."""
    last = tile + 1 == work.end
    return gl.where(last, work.begin, tile + 1), gl.where(last, member + 1, member)


@gluon.jit
def step(K, work, number, tile, member, dk, dv, S: gl.constexpr, Q: gl.constexpr):
    """The number-th tile of rows of a block, one of the member-th query head: its parts of dK and dV added, and what it gives
    to dQ. S, Q: layouts of results by key and by row."""
    if K.C.stages == 1:
        dk, dv = step_masked(K, work, tile, member, dk, dv, S, Q, 0)
    else:
        if number % 2 == 0:
            dk, dv = step_masked(K, work, tile, member, dk, dv, S, Q, 0)
        else:
            dk, dv = step_masked(K, work, tile, member, dk, dv, S, Q, 1)
    return dk, dv


@gluon.jit
def step_masked(K, work, tile, member, dk, dv, S: gl.constexpr, Q: gl.constexpr, STAGE: gl.constexpr):
    """A tile of rows that is in a stage, masked where it needs to be: by a step with a mask or one without (`apart`), or by a
    branch within a step, which keeps what comes before it from passing under what comes after."""
    if K.MASKED:
        cut = (tile < work.full_begin) | (tile >= work.full_end) | (tile * K.C.tile_q + K.C.tile_q > work.n_q)
        if K.C.apart:
            if cut:
                dk, dv = step_at(K, work, tile, member, dk, dv, S, Q, STAGE, True)
            else:
                dk, dv = step_at(K, work, tile, member, dk, dv, S, Q, STAGE, False)
        else:
            dk, dv = step_at(K, work, tile, member, dk, dv, S, Q, STAGE, cut)
    else:
        dk, dv = step_at(K, work, tile, member, dk, dv, S, Q, STAGE, False)
    return dk, dv


@gluon.jit
def step_at(K, work, tile, member, dk, dv, S: gl.constexpr, Q: gl.constexpr, STAGE: gl.constexpr, cut):
    """A tile of rows that is in a stage. cut: whether a row of it may not see a key."""
    after, member_after = tile_after(work, tile, member)
    row = tile * K.C.tile_q
    head = work.head_kv * work.group + member
    async_copy.wait_group(0)
    partition_barrier()
    if K.C.stages == 2:
        if member_after < work.group:
            copy_rows_of(K, work, after, member_after, 1 - STAGE)
        async_copy.commit_group()
    if K.C.parts == 1:
        dk, dv = add_tile(K, work, row, head, dk, dv, S, STAGE, cut)
    else:
        dk, dv = add_parts(K, work, row, head, dk, dv, S, STAGE, cut)
    if K.C.with_dq:
        place = (work.row + member * K.heads.padded + row).to(gl.int64) * K.C.head_dim
        add_dq(K, place, Q)
    if K.C.stages == 1:
        partition_barrier()
        if member_after < work.group:
            copy_rows_of(K, work, after, member_after, 0)
        async_copy.commit_group()
    return dk, dv


@gluon.jit
def add_tile(K, work, row, head, dk, dv, S: gl.constexpr, STAGE: gl.constexpr, cut):
    """dK and dV with what a tile, from `row` on, gives; its dS in shared memory, where all warps see it."""
    M = K.memory
    q = at(M.q, STAGE, K.C.stages)
    do = at(M.do, STAGE, K.C.stages)
    statistics = M.statistics[STAGE]
    # Both products come before P goes to shared memory: no later load passes that store, and exponentials pass under products.
    # In either stage another one is first, here and below: of two stages with the same code the compiler makes one, in which it
    # does not know what is copied and what is read, and puts a barrier between.
    if STAGE == 0:
        s = rows_by_rows(M.k, q, K.C.tile_kv, K.C.tile_q, S)
        dp = rows_by_rows(M.v, do, K.C.tile_kv, K.C.tile_q, S)
    else:
        dp = rows_by_rows(M.v, do, K.C.tile_kv, K.C.tile_q, S)
        s = rows_by_rows(M.k, q, K.C.tile_kv, K.C.tile_q, S)
    x, factor, of_function = scores_transposed(K, s, row, head, slope_of(work.batch, head, K.score), work)
    x = x - statistics.slice(0, K.C.tile_q).load(gl.SliceLayout(0, S))[None, :]
    if cut:
        x = apply_mask_transposed(K, x, row, head, work)
    p = gl.exp2(x)
    kept = kept_weights_transposed(K, p, row, head, work)
    kept_p = kept.to(K.dtype)
    if K.C.across > 1:
        M.p.store(kept_p)
    delta = statistics.slice(K.C.tile_q, K.C.tile_q).load(gl.SliceLayout(0, S))[None, :]
    ds = gradients_transposed(K, p, kept, dp, delta, factor, of_function).to(K.dtype)
    M.ds[0].store(ds)
    partition_barrier()
    if STAGE == 0:
        dv = add_products(dv, operand(kept_p, M.p, K.C, S), do, S)
        dk = add_products(dk, operand(ds, M.ds[0], K.C, S), q, S)
    else:
        dk = add_products(dk, operand(ds, M.ds[0], K.C, S), q, S)
        dv = add_products(dv, operand(kept_p, M.p, K.C, S), do, S)
    return dk, dv


@gluon.jit
def leave(K, matrix, chunks, gradient, work, factor, OF_V: gl.constexpr, DIM: gl.constexpr):
    """A block's dK or dV to global memory, by way of the shared memory of K or V, whose shape it has."""
    base = matrix.rows_of(work.batch, work.head_kv, work.start_kv) + work.first.to(gl.int64) * matrix.row
    for c in gl.static_range(len(gradient)):
        leave_chunk(K, matrix, chunks[c], (gradient[c] * factor).to(K.dtype), base, work, first_of(K.C, OF_V, c), DIM)


@gluon.jit
def leave_chunk(K, matrix, chunk, x, base, work, FIRST: gl.constexpr, DIM: gl.constexpr):
    """A chunk of columns from FIRST on."""
    LAYOUT: gl.constexpr = in_rows(x.shape[1], K.C.warps, K.dtype)
    chunk.store(x)
    partition_barrier()
    key = gl.arange(0, K.C.tile_kv, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    exists = (work.first + key < work.n_kv)[:, None] & (column < DIM)[None, :]
    pointers = base + (key.to(gl.int64) * matrix.row)[:, None] + column[None, :]
    gl.store(gl.multiple_of(pointers, [1, 16]), chunk.load(LAYOUT), mask=gl.max_constancy(exists, [1, unit_of(K.dtype)]))


@gluon.jit
def note(K, gradient, work, LAYOUT: gl.constexpr):
    """Note 64 keys of which a gradient holds a NaN or an infinity."""
    broken = gl.full([K.C.tile_kv], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for c in gl.static_range(len(gradient)):
        broken += gl.sum(gradient[c] * 0.0, 1)
    key = work.first + gl.arange(0, K.C.tile_kv, gl.SliceLayout(1, LAYOUT))
    blocks = (K.lengths.n_kv + 63) // 64
    place = (work.batch * K.heads.heads_kv + work.head_kv) * blocks + key // 64
    gl.store(K.notes + place, 0 * key + 1, mask=(broken != 0.0) & (key < work.n_kv))


# ---- entry


NUMBERS = (
    *(f"{name}_{by}" for name in ("q", "k", "v", "do", "dk", "dv") for by in ("batch", "row", "head")),
    *("heads", "heads_kv", "at_once", "rest", "all_heads", "blocks", "padded", "n_q", "n_kv", "left", "right", "prefix"),
    *SCORE_NUMBERS,
    *("total_q", "total_kv"),
)
"""Arguments that no kernel is specialised for: other lengths, bounds and strides do not recompile."""


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    q, k, v, do, dk, dv, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
    dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, statistics, accumulator, notes, cu_q, cu_kv, used_q, used_kv,
    heads, heads_kv, at_once, rest, all_heads, blocks, padded, n_q, n_kv, left, right, prefix,
    terms, threshold, slope_batch, slope_head, bias_batch, bias_head, bias_row, bias_key,
    document_q_batch, document_q_row, document_kv_batch, sink_stride, document_kv_row, spans, scale, total_q, total_kv,
    MASKED: gl.constexpr, NOTED: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    # Numbers are parameters one by one: see `forward.forward_kernel`.
    S: gl.constexpr = product_layout(C.warps, C.across)
    Q: gl.constexpr = product_layout(C.warps, C.across_q)
    dtype: gl.constexpr = q.dtype.element_ty
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans, total_q, total_kv)
    score = score_of(terms, (slope_batch, slope_head), (bias_batch, bias_head, bias_row, bias_key), sink_stride,
                     (document_q_batch, document_q_row, document_kv_batch, document_kv_row), threshold)  # fmt: skip
    K = Kernel(
        Matrix(q, q_batch, q_row, q_head), Matrix(do, do_batch, do_row, do_head), Matrix(dk, dk_batch, dk_row, dk_head),
        Matrix(dv, dv_batch, dv_row, dv_head), statistics, accumulator, notes, scale, lengths,
        KeyHeads(heads, heads_kv, at_once, rest, all_heads, blocks, padded), score, make_memory(dtype, C), dtype, MASKED,
        NOTED, DIM, DIM_V, C,
    )  # fmt: skip
    work = locate_keys(K, gl.program_id(0), C.tile_kv, C.tile_q)
    if work.first < work.n_kv:
        count = (work.end - work.begin) * work.group
        dk_sum = zeros(C.tile_kv, C, False, S)
        dv_sum = zeros(C.tile_kv, C, True, S)
        if count > 0:
            keys, values = Matrix(k, k_batch, k_row, k_head), Matrix(v, v_batch, v_row, v_head)
            of_keys = keys.rows_of(work.batch, work.head_kv, work.start_kv)
            of_values = values.rows_of(work.batch, work.head_kv, work.start_kv)
            copy_tile(K.memory.k, keys, of_keys, work.first, work.n_kv, C, False, DIM, True)
            copy_tile(K.memory.v, values, of_values, work.first, work.n_kv, C, True, DIM_V, True)
            copy_rows_of(K, work, work.begin, gl.to_tensor(0), 0)
            async_copy.commit_group()
        tile = work.begin
        member = gl.to_tensor(0)
        for number in tl.range(0, count, disable_licm=True):
            dk_sum, dv_sum = step(K, work, number, tile, member, dk_sum, dv_sum, S, Q)
            tile, member = tile_after(work, tile, member)
        async_copy.wait_group(0)
        if NOTED:
            note(K, dk_sum, work, S)
            note(K, dv_sum, work, S)
        partition_barrier()
        leave(K, K.dk, K.memory.k, dk_sum, work, scale, False, DIM)
        leave(K, K.dv, K.memory.v, dv_sum, work, 1.0, True, DIM_V)
