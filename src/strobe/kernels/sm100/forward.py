"""Attention forward for Blackwell in Gluon: TMA, tcgen05 with tensor memory, sixteen specialised warps.

A CTA takes tiles of `q_stages` times 128 query rows of one head, one after the other. Its warps have roles:

    role        warps   work
    softmax0/1  4 each  row maxima, P = exp2(S - row_max), row sums of one Q stage; a thread has a row
    correction  4       rescales O when a row maximum has grown much; at the end normalises O and writes it to sO
    mma         1       starts S = Q K^T and O += P V (tcgen05), whose operands and results never see registers
    epilogue    1       copies O from sO to global memory (TMA)
    load        1       copies Q and the blocks of K and V from global to shared memory (TMA)
    (padding)   1       nothing: warpgroups have four warps

    memory                        shape                          filled by    read by
    sQ      shared                [q_stages, 128, head_dim]      load         mma
    sK/sV   shared, one ring      [kv_stages, tile_kv, head_dim] load         mma
    S       tensor, a stage       128 x tile_kv float32          mma          its softmax
    P       in S's second half    128 x tile_kv 16-bit           softmax      mma
    O       tensor, a stage       128 x head_dim_v float32       mma          correction, which rescales it in place
    sScale  shared, a stage       [2, 128] float32               softmax      correction
    sO      shared                [q_stages, 128, head_dim_v]    correction   epilogue

    barrier (a stage)   arrivals               says
    q_full, q_empty     TMA bytes; commit      Q is there; the tile's last S has read it (if O leaves through sQ: it has left)
    kv.full, kv.empty   TMA bytes; commit      a block is there; both stages' products have read it
    s_full              commit                 S is there, and all products before it are done
    p_full              softmax + correction   three quarters of P are there (all, without split_p), O is rescaled
    p_last              softmax                the last quarter of P is there
    o_full              commit                 O is final
    stats_full, _empty  softmax; correction    sScale holds the factor of a block, or the tile's row sums and maxima
    out_full, _empty    correction; epilogue   O is in sO; it has left

Tensor cores execute what the mma warp starts in that order, so a product may overwrite what an earlier one reads: S of
a block is started right after the P V whose P lies in the same columns.

Blocks of keys run from right to left, so that the blocks which a causal mask cuts come first. Only blocks outside
[full_begin, full_end) are masked. Two Q stages give the tensor core work on one while the other is in its softmax.

Two CTAs (`two_ctas`) work as one on tiles of twice the rows: a product spans both, each keeps its rows of Q, S, P and O,
half the keys of K and half the columns of V. Every tensor here has the rows of both; the mma warp of the first alone
starts products, on barriers that count the arrivals of both, and commits arrive in both.

With `splits`, a tile attends to one part of its keys, and the correction warps write float32 O to global memory.

A row maximum that grows by less than 2^8 is left alone: P is then at most 2^8, which 16 bits hold as well as 1, and O
needs no rescaling (FlashAttention-4's idea, as are the roles, the polynomial exp2 and the early start on P).

Loops disable LICM, the hoisting of what does not change: the addresses of a whole tile, computed before its loop, would
take more registers than a role has, and spill.
"""

import triton.language as tl

from strobe.kernels.common.descriptors import one_or_two
from strobe.kernels.common.exp2 import exp2_mixed
from strobe.kernels.common.gluon_masks import visible
from strobe.kernels.common.scores import LN2
from strobe.kernels.common.tile_scheduler import Heads, Lengths, locate
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    fma2,
    gl,
    gluon,
    mbarrier,
    mul2,
    partition_barrier,
    tcgen05_mma,
    tma_store_wait,
)
from strobe.kernels.sm100.descriptors import copy_in, copy_out
from strobe.kernels.sm100.memory import Ring, commit, make_ring, make_stages, rows_of, thread_rows


@aggregate
class Outputs:
    """What the kernel writes. lse: [batch, heads, n_q] or packed [heads, rows]; notes: see `launch`, or None. partial: float32
    O in the layout of the output, [splits, rows, heads, head_dim_v], or None if there is one split, whose O goes through
    `descriptors`. rows: query rows in all."""

    descriptors: gl.tuple
    partial: (gl.tensor, gl.constexpr)
    lse: gl.tensor
    notes: (gl.tensor, gl.constexpr)
    rows: gl.tensor


@aggregate
class Kernel:
    """What every role takes. inputs: the descriptors of q, k and v, a tuple of chunks each."""

    stages: gl.tuple
    kv: Ring
    inputs: gl.tuple
    outputs: Outputs
    lengths: Lengths
    heads: Heads
    scale: gl.tensor
    MASKED: gl.constexpr
    C: gl.constexpr

    @gluon.jit
    def locate(self, tile):
        return locate(tile, self.lengths, self.heads, self.C)


# ---- load


@gluon.jit
def load(K):
    done = 0
    turn = 0
    for tile in tl.range(gl.program_id(0), K.heads.tiles, gl.num_programs(0), disable_licm=True):
        work = K.locate(tile)
        if work.blocks() > 0:
            load_tile(K, work, done, turn)
            done += work.blocks()
            turn += 1


@gluon.jit
def load_tile(K, work, done, turn):
    q, k, v = K.inputs
    head = work.head // K.heads.group
    for g in tl.range(done, done + work.blocks(), disable_licm=True):
        row = (work.end - 1 - (g - done)) * K.C.tile_kv
        copy_in(k, K.kv.k(2 * g), K.kv.acquire(2 * g), work.start_kv, work.n_kv, work.batch, head, row)
        if g == done:
            for w in gl.static_range(len(K.stages)):
                mbarrier.wait(K.stages[w].q_empty, (turn & 1) ^ 1)
                copy_in(q, K.stages[w].q, K.stages[w].q_full, work.start_q, work.n_q, work.batch, work.head,
                        work.row + w * K.C.rows)  # fmt: skip
        copy_in(v, K.kv.v(2 * g + 1), K.kv.acquire(2 * g + 1), work.start_kv, work.n_kv, work.batch, head, row)


# ---- mma


@gluon.jit
def start_scores(stage, k, C: gl.constexpr):
    """Start S = Q K^T, by chunks between barriers of this one warp, or the compiler would prepare all descriptors at once, more
    than there are uniform registers."""
    for c in gl.static_range(len(stage.q)):
        if c > 0:
            partition_barrier()
        tcgen05_mma(stage.q[c], k[c].permute((1, 0)), stage.s, use_acc=c > 0, mbarriers=[])
    commit(stage.s_full, stage.q, C)


@gluon.jit
def start_output(stage, v, use_acc, phase, C: gl.constexpr):
    """Start O += P V (O = P V without use_acc), by quarters of the keys."""
    SIZE: gl.constexpr = C.tile_kv // 4
    mbarrier.wait(stage.p_full, phase)
    for part in gl.static_range(4):
        if part == 3 and C.split_p:
            mbarrier.wait(stage.p_last, phase)
        for c in gl.static_range(len(stage.o)):
            tcgen05_mma(stage.p.slice(part * SIZE, SIZE), v[c].slice(part * SIZE, SIZE), stage.o[c],
                        use_acc=use_acc | (part > 0), mbarriers=[])  # fmt: skip


@gluon.jit
def mma(K):
    done = 0
    turn = 0
    for tile in tl.range(gl.program_id(0), K.heads.tiles, gl.num_programs(0), disable_licm=True):
        blocks = K.locate(tile).blocks()
        if blocks > 0:
            mma_tile(K.stages, K.kv, done, done + blocks - 1, turn, K.C)
            done += blocks
            turn += 1


@gluon.jit
def mma_tile(stages, kv, first, last, turn, C: gl.constexpr):
    """Start the products of the key blocks first..last, counted over all tiles of this CTA."""
    kv.wait(2 * first)
    for w in gl.static_range(len(stages)):
        mbarrier.wait(stages[w].q_full, turn & 1)
        start_scores(stages[w], kv.k(2 * first), C)
    kv.release(2 * first)
    for g in tl.range(first, last, disable_licm=True):
        v = 2 * g + 1
        k = 2 * g + 2
        kv.wait(v)
        for w in gl.static_range(len(stages)):
            start_output(stages[w], kv.v(v), g > first, g & 1, C)
            if w == C.q_stages - 1:
                kv.release(v)
            if w == 0:
                kv.wait(k)
            start_scores(stages[w], kv.k(k), C)
        kv.release(k)
    if not C.o_in_q:
        for w in gl.static_range(len(stages)):
            commit(stages[w].q_empty, stages[w].q, C)
    kv.wait(2 * last + 1)
    for w in gl.static_range(len(stages)):
        start_output(stages[w], kv.v(2 * last + 1), last > first, last & 1, C)
        commit(stages[w].o_full, stages[w].q, C)
    kv.release(2 * last + 1)


# ---- softmax


@gluon.jit
def load_scores(s, C: gl.constexpr):
    """Load S, in quarters of its columns."""
    SIZE: gl.constexpr = C.tile_kv // 4
    quarters = ()
    for part in gl.static_range(4):
        quarters += (s.slice(part * SIZE, SIZE).load(thread_rows(SIZE, C)),)
    return quarters


@gluon.jit
def apply_mask(s, w: gl.constexpr, i, work, lengths, C: gl.constexpr):
    """S with -inf where a row does not see a key of block i."""
    SIZE: gl.constexpr = C.tile_kv // 4
    rows = work.row + w * C.rows + gl.arange(0, C.rows, rows_of(SIZE, C)) + (work.n_kv - work.n_q)
    keys = i * C.tile_kv + gl.arange(0, SIZE, gl.SliceLayout(0, thread_rows(SIZE, C)))
    masked = ()
    for part in gl.static_range(4):
        seen = visible(rows[:, None], (keys + part * SIZE)[None, :], work.n_kv, lengths.left, lengths.right, lengths.prefix)
        masked += (gl.where(seen, s[part], float("-inf")),)
    return masked


@gluon.jit
def row_maxima(s):
    return gl.maximum(gl.maximum(gl.max(s[0], 1), gl.max(s[1], 1)), gl.maximum(gl.max(s[2], 1), gl.max(s[3], 1)))


@gluon.jit
def update_max(row_max, block_max, MASKED: gl.constexpr, C: gl.constexpr):
    """The new row maximum, what to subtract from scores, and the factor for what was summed before."""
    new_max = gl.maximum(row_max, block_max)
    new_max = gl.where(new_max - row_max > C.rescale_threshold, new_max, row_max)
    shift = new_max
    if MASKED:  # a row that has seen no key yet: 2^(-inf - 0) = 0, where -inf - -inf would be NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, shift, gl.exp2(row_max - shift)


@gluon.jit
def store_weights(stage, s, shift, scale, C: gl.constexpr):
    """Store P = 2^(scale S - shift) to tensor memory, three quarters first; returns the row sums of P."""
    SIZE: gl.constexpr = C.tile_kv // 4
    block_sum = gl.full([C.rows], 0.0, gl.float32, rows_of(SIZE, C))
    for part in gl.static_range(4):
        x = fma2(s[part], scale, -shift[:, None])
        p = exp2_mixed(x, C.emulated if part == 1 or part == 2 else 0)
        stage.p.slice(part * SIZE, SIZE).store(p.to(stage.p.dtype))
        if part == 2 and C.split_p:
            mbarrier.arrive(stage.p_full, count=1)
        block_sum += gl.sum(p, 1)
    if C.split_p:
        mbarrier.arrive(stage.p_last, count=1)
    else:
        mbarrier.arrive(stage.p_full, count=1)
    return block_sum


@gluon.jit
def softmax(w: gl.constexpr, K):
    done = 0
    turn = 0
    for tile in tl.range(gl.program_id(0), K.heads.tiles, gl.num_programs(0), disable_licm=True):
        work = K.locate(tile)
        if work.blocks() > 0:
            softmax_tile(w, K, work, done, turn)
            done += work.blocks()
            turn += 1


@gluon.jit
def softmax_tile(w: gl.constexpr, K, work, done, turn):
    LAYOUT: gl.constexpr = rows_of(K.C.tile_kv // 4, K.C)
    stage = K.stages[w]
    last = done + work.blocks() - 1
    row_max = gl.full([K.C.rows], float("-inf"), gl.float32, LAYOUT)
    row_sum = gl.full([K.C.rows], 0.0, gl.float32, LAYOUT)
    for g in tl.range(done, last + 1, disable_licm=True):
        mbarrier.wait(stage.s_full, g & 1)
        s = load_scores(stage.s, K.C)
        if K.MASKED:
            i = work.end - 1 - (g - done)
            if (i >= work.full_end) | (i < work.full_begin):
                s = apply_mask(s, w, i, work, K.lengths, K.C)
        row_max, shift, factor = update_max(row_max, row_maxima(s) * K.scale, K.MASKED, K.C)
        if g > done:
            if K.C.correction:
                send(stage, g - 1, factor, None)
            else:
                rescale(stage, factor, K.C)
        row_sum = row_sum * factor + store_weights(stage, s, shift, K.scale, K.C)
    if K.C.correction:
        send(stage, last, row_sum, row_max)
    else:
        finish(w, K, work, row_sum, row_max, turn)


@gluon.jit
def send(stage, message, first, second):
    """Send one or two numbers of each row to the correction warps."""
    mbarrier.wait(stage.stats_empty, (message & 1) ^ 1)
    stage.sums.store(first)
    if second is not None:
        stage.maxima.store(second)
    mbarrier.arrive(stage.stats_full, count=1)


# ---- correction


@gluon.jit
def correction(K):
    done = 0
    turn = 0
    for tile in tl.range(gl.program_id(0), K.heads.tiles, gl.num_programs(0), disable_licm=True):
        work = K.locate(tile)
        if work.blocks() > 0:
            correct_tile(K, work, done, turn)
            done += work.blocks()
            turn += 1


@gluon.jit
def correct_tile(K, work, done, turn):
    LAYOUT: gl.constexpr = rows_of(32, K.C)
    last = done + work.blocks() - 1
    for w in gl.static_range(len(K.stages)):
        mbarrier.arrive(K.stages[w].p_full, count=1)  # the first P V overwrites O
    for message in tl.range(done, last, disable_licm=True):
        for w in gl.static_range(len(K.stages)):
            stage = K.stages[w]
            mbarrier.wait(stage.stats_full, message & 1)
            factor = stage.sums.load(LAYOUT)
            mbarrier.arrive(stage.stats_empty, count=1)
            rescale(stage, factor, K.C)
            mbarrier.arrive(stage.p_full, count=1)
    for w in gl.static_range(len(K.stages)):
        stage = K.stages[w]
        mbarrier.wait(stage.stats_full, last & 1)
        row_sum = stage.sums.load(LAYOUT)
        row_max = stage.maxima.load(LAYOUT)
        mbarrier.arrive(stage.stats_empty, count=1)
        finish(w, K, work, row_sum, row_max, turn)


@gluon.jit
def rescale(stage, factor, C: gl.constexpr):
    """Multiply each row of O by its factor, unless all are 1. Two CTAs do not ask: they would have to agree, across the
    cluster."""
    if C.two_ctas:
        scale_rows(stage, factor, C)
    else:
        if gl.min(factor, 0) < 1.0:
            scale_rows(stage, factor, C)


@gluon.jit
def scale_rows(stage, factor, C: gl.constexpr):
    for c in gl.static_range(len(stage.o)):
        for j in gl.static_range(stage.o[c].shape[1] // 16):
            o = stage.o[c].slice(j * 16, 16)
            old = o.load(thread_rows(16, C))
            o.store(mul2(old, gl.convert_layout(factor, rows_of(16, C))[:, None]))


@gluon.jit
def finish(w: gl.constexpr, K, work, row_sum, row_max, turn):
    """Normalise and write O, the LSE, and a note if a masked tile came out with a NaN or an infinity."""
    LAYOUT: gl.constexpr = rows_of(32, K.C)
    stage = K.stages[w]
    row_sum = gl.convert_layout(row_sum, LAYOUT)
    row_max = gl.convert_layout(row_max, LAYOUT)
    rows = work.row + w * K.C.rows + gl.arange(0, K.C.rows, LAYOUT)
    exists = rows < work.n_q
    row_zero, lse_zero = origin(K, work)
    lse = (gl.where(row_sum == 0.0, 0.0, row_max) + gl.log2(row_sum)) * LN2
    gl.store(K.outputs.lse + lse_zero + rows, lse, mask=exists)

    factor = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    mbarrier.wait(stage.o_full, turn & 1)
    if K.C.splits == 1:
        mbarrier.wait(stage.out_empty, (turn & 1) ^ 1)
        zero = normalise(stage, factor, K.C)
        fence_async_shared()
        mbarrier.arrive(stage.out_full, count=1)
    else:
        place = ((row_zero + rows) * K.heads.heads + work.head) * K.C.head_dim_v
        zero = write_part(stage, factor, K.outputs.partial, place, exists, K.C)
    if K.outputs.notes is not None:
        notes = (K.lengths.n_q + 63) // 64
        note = (work.batch * K.heads.heads + work.head) * notes + rows // 64
        gl.store(K.outputs.notes + note, 1, mask=exists & (zero != 0.0))


@gluon.jit
def origin(K, work):
    """The beginning of this split of the sequence: its row among all rows of all splits, and its place in the LSE of the
    head."""
    split = work.split.to(gl.int64) * K.outputs.rows
    if K.lengths.cu_q is None:
        row = split + work.batch * K.lengths.n_q
        return row, row * K.heads.heads + work.head * K.lengths.n_q
    else:
        return split + work.start_q, (split * K.heads.heads + work.head.to(gl.int64) * K.outputs.rows) + work.start_q


@gluon.jit
def normalised(o, j: gl.constexpr, factor, C: gl.constexpr):
    """32 columns of O, each row times its factor; and for each row 0, or NaN if there is a NaN or an infinity. (The barrier
    keeps the compiler from loading more of O, before this is stored, than there are registers.)"""
    partition_barrier()
    old = o.slice(j * 32, 32).load(thread_rows(32, C))
    new = mul2(old, factor[:, None])
    return new, gl.sum(new * 0.0, 1)


@gluon.jit
def normalise(stage, factor, C: gl.constexpr):
    """Store O, normalised, to shared memory; returns for each row 0, or NaN."""
    zero = gl.full([C.rows], 0.0, gl.float32, rows_of(32, C))
    for c in gl.static_range(len(stage.o)):
        for j in gl.static_range(stage.o[c].shape[1] // 32):
            new, check = normalised(stage.o[c], j, factor, C)
            stage.out[c].slice(j * 32, 32, dim=1).store(new.to(stage.out[c].dtype))
            zero += check
    return zero


@gluon.jit
def write_part(stage, factor, partial, place, exists, C: gl.constexpr):
    """Store O of one split, normalised, to global memory in float32; returns for each row 0, or NaN."""
    zero = gl.full([C.rows], 0.0, gl.float32, rows_of(32, C))
    for c in gl.static_range(len(stage.o)):
        for j in gl.static_range(stage.o[c].shape[1] // 32):
            new, check = normalised(stage.o[c], j, factor, C)
            columns = c * C.chunks_v[0] + j * 32 + gl.arange(0, 32, gl.SliceLayout(0, thread_rows(32, C)))
            gl.store(partial + place[:, None] + columns[None, :], new, mask=exists[:, None])
            zero += check
    return zero


# ---- epilogue


@gluon.jit
def epilogue(K):
    turn = 0
    for tile in tl.range(gl.program_id(0), K.heads.tiles, gl.num_programs(0), disable_licm=True):
        if K.C.splits == 1:
            work = K.locate(tile)
            if work.blocks() > 0:
                epilogue_tile(K, work, turn)
                turn += 1


@gluon.jit
def epilogue_tile(K, work, turn):
    for w in gl.static_range(len(K.stages)):
        mbarrier.wait(K.stages[w].out_full, turn & 1)
        copy_out(K.outputs.descriptors, K.stages[w].out, work, work.row + w * K.C.rows)
    for w in gl.static_range(len(K.stages)):
        tma_store_wait((K.C.q_stages - 1 - w) * len(K.outputs.descriptors))
        mbarrier.arrive(K.stages[w].out_empty, count=1)
        if K.C.o_in_q:
            mbarrier.arrive(K.stages[w].q_empty, count=1)


# ---- entry and launcher


@gluon.jit(do_not_specialize=["heads", "group", "at_once", "rest", "tiles", "rows", "n_q", "n_kv", "left", "right", "prefix",
                            "total_kv"])  # fmt: skip
def forward_kernel(q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, o_wide, o_narrow, partial, lse, notes, cu_q, cu_kv,
                   heads, group, at_once, rest, tiles, rows, n_q, n_kv, left, right, prefix, scale, total_kv,
                   MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    stages = make_stages(q_wide.dtype, C)
    kv = make_ring(q_wide.dtype, C)
    fence_async_shared()
    inputs = (one_or_two(q_wide, q_narrow), one_or_two(k_wide, k_narrow), one_or_two(v_wide, v_narrow))
    outputs = Outputs(one_or_two(o_wide, o_narrow), partial, lse, notes, rows)
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, None, None, None, rows, total_kv)
    K = Kernel(stages, kv, inputs, outputs, lengths, Heads(heads, group, at_once, rest, tiles), scale, MASKED, C)
    if C.q_stages == 2 and C.correction:
        gl.warp_specialize([(softmax, (0, K)), (softmax, (1, K)), (correction, (K,)), (mma, (K,)), (epilogue, (K,)),
                            (load, (K,))], C.worker_warps, C.worker_registers)  # fmt: skip
    elif C.q_stages == 2:
        gl.warp_specialize([(softmax, (0, K)), (softmax, (1, K)), (mma, (K,)), (epilogue, (K,)), (load, (K,))],
                           C.worker_warps, C.worker_registers)  # fmt: skip
    elif C.correction:
        gl.warp_specialize([(softmax, (0, K)), (correction, (K,)), (mma, (K,)), (epilogue, (K,)), (load, (K,))],
                           C.worker_warps, C.worker_registers)  # fmt: skip
    else:
        gl.warp_specialize([(softmax, (0, K)), (mma, (K,)), (epilogue, (K,)), (load, (K,))],
                           C.worker_warps, C.worker_registers)  # fmt: skip
