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

A row maximum that grows by less than 2^8 is left alone: P is then at most 2^8, which 16 bits hold as well as 1, and O
needs no rescaling (FlashAttention-4's idea, as are the roles, the polynomial exp2 and the early start on P).
"""

import functools

import torch
import triton

from strobe.device import arch_of
from strobe.kernels.common.channel import make_barriers
from strobe.kernels.common.exp2 import exp2_mixed
from strobe.kernels.common.gluon_masks import visible
from strobe.kernels.common.work import Heads, Lengths, locate
from strobe.kernels.gluon import (
    TensorDescriptor,
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    fence_async_shared,
    fma2,
    gl,
    gluon,
    mbarrier,
    mul2,
    reinterpret,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tensor_memory_descriptor_type,
    tma_load,
    tma_store,
    tma_store_wait,
)
from strobe.kernels.sm100.config import ROWS_PER_STAGE, Config
from strobe.problem import AttentionProblem, Dense, Operands, lse_shape

LOG2_E = 1.4426950408889634
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(ROWS_PER_STAGE)
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

# ---- layouts


@gluon.constexpr_function
def columns_layout(columns):
    """ROWS x columns of tensor memory: a row is a lane."""
    return TensorMemoryLayout((ROWS_PER_STAGE, min(columns, 128)), col_stride=1)


@gluon.constexpr_function
def thread_rows(columns):
    """ROWS x columns in the registers of a warpgroup, a row a thread: how it reads tensor memory."""
    shape = [ROWS_PER_STAGE, columns]
    return tensor_memory_descriptor_type(gl.float32, shape, columns_layout(columns), shape).get_reg_layout(num_warps=4)


@gluon.constexpr_function
def rows_of(columns):
    """One value a row of these."""
    return gl.SliceLayout(1, thread_rows(columns))


@gluon.constexpr_function
def swizzled(columns):
    """A block of 16-bit rows in shared memory, as TMA writes and the tensor core reads it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=2)


# ---- the memory of a CTA


@aggregate
class Ring:
    """Blocks of K and V in turn: position 2g is K of the g-th block that the CTA works on, 2g + 1 its V. A block is a
    wide chunk and perhaps a narrow one; if only K has one, those have a ring of `narrow_stages` of their own, whose slots
    are empty whenever the wide chunk's is."""

    wide: gl.shared_memory_descriptor
    narrow: (gl.shared_memory_descriptor, gl.constexpr)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    narrow_stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, wide, narrow, full, empty, stages, narrow_stages):
        self.wide = wide
        self.narrow = gl.constexpr(None) if narrow is None else narrow
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.narrow_stages = gl.constexpr(narrow_stages)

    @gluon.jit
    def block(self, position, CHUNKS: gl.constexpr):
        """The block's chunks, [tile_kv, columns] each."""
        wide = self.wide.index(position % self.stages)
        if CHUNKS == 1:
            return (wide,)
        elif self.narrow_stages == self.stages:
            return (wide, self.narrow.index(position % self.stages))
        else:
            return (wide, self.narrow.index(position // 2 % self.narrow_stages))

    @gluon.jit
    def fill(self, position, descriptors, batch, head, row):
        """Load warp: wait until the position is empty, then start the copy of a block into it."""
        slot = position % self.stages
        mbarrier.wait(self.empty.index(slot), ((position // self.stages) & 1) ^ 1)
        copy_in(descriptors, self.block(position, len(descriptors)), self.full.index(slot), batch, head, row)

    @gluon.jit
    def wait(self, position):
        mbarrier.wait(self.full.index(position % self.stages), (position // self.stages) & 1)

    @gluon.jit
    def release(self, position):
        """MMA warp: the position is empty once all products so far are done."""
        tcgen05_commit(self.empty.index(position % self.stages))


@aggregate
class Stage:
    """What one Q stage owns; q, o and out are tuples of chunks."""

    q: gl.tuple
    s: tensor_memory_descriptor
    p: tensor_memory_descriptor
    o: gl.tuple
    out: gl.tuple
    sums: gl.shared_memory_descriptor
    maxima: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    s_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_last: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor
    stats_full: gl.shared_memory_descriptor
    stats_empty: gl.shared_memory_descriptor
    out_full: gl.shared_memory_descriptor
    out_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, s, p, o, out, sums, maxima, q_full, q_empty, s_full, p_full, p_last, o_full, stats_full, stats_empty,
                 out_full, out_empty):  # fmt: skip
        self.q = q
        self.s = s
        self.p = p
        self.o = o
        self.out = out
        self.sums = sums
        self.maxima = maxima
        self.q_full = q_full
        self.q_empty = q_empty
        self.s_full = s_full
        self.p_full = p_full
        self.p_last = p_last
        self.o_full = o_full
        self.stats_full = stats_full
        self.stats_empty = stats_empty
        self.out_full = out_full
        self.out_empty = out_empty


@gluon.jit
def shared_chunks(dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, chunks: gl.constexpr):
    """[stages, rows, columns] of shared memory for each chunk of columns."""
    buffers = ()
    for c in gl.static_range(len(chunks)):
        buffers += (gl.allocate_shared_memory(dtype, [stages, rows, chunks[c]], swizzled(chunks[c])),)
    return buffers


@gluon.jit
def at(buffers, index):
    """The index-th of each chunk's buffers."""
    chosen = ()
    for c in gl.static_range(len(buffers)):
        chosen += (buffers[c].index(index),)
    return chosen


@gluon.jit
def columns(tmem, dtype: gl.constexpr, first: gl.constexpr, number: gl.constexpr):
    """Elements of tensor memory from 32-bit column `first` on, `number` a row. (Triton 3.8 reinterprets no slices.)"""
    PACKED: gl.constexpr = 32 // dtype.primitive_bitwidth
    whole = reinterpret(tmem, dtype, [ROWS, PACKED * tmem.shape[1]], columns_layout(number))
    return whole.slice(PACKED * first, number)


@gluon.jit
def make_stage(index: gl.constexpr, q, out, stats, tmem, dtype: gl.constexpr, C: gl.constexpr):
    S_FIRST: gl.constexpr = index * C.tile_kv
    O_FIRST: gl.constexpr = C.o_first(index)
    s = columns(tmem, gl.float32, S_FIRST, C.tile_kv)
    p = columns(tmem, dtype, S_FIRST + C.tile_kv // 2, C.tile_kv)
    o = (columns(tmem, gl.float32, O_FIRST, C.chunks_v[0]),)
    if len(C.chunks_v) == 2:
        o = (o[0], columns(tmem, gl.float32, O_FIRST + C.chunks_v[0], C.chunks_v[1]))
    b = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(10):
        mbarrier.init(b.index(i), count=2 if i == 3 and C.correction else 1)
    return Stage(at(q, index), s, p, o, at(out, index), stats.index(2 * index), stats.index(2 * index + 1),
                 b.index(0), b.index(1), b.index(2), b.index(3), b.index(4), b.index(5), b.index(6), b.index(7),
                 b.index(8), b.index(9))  # fmt: skip


@aggregate
class Outputs:
    """lse: [batch, heads, n_q] or packed [heads, rows]; notes as in `launch`, or None. partial: float32 O in the layout of
    the output, [splits, rows, heads, head_dim_v], or None if there is one split, which goes through `descriptors`.
    heads: of queries."""

    descriptors: gl.tuple
    lse: gl.tensor
    notes: (gl.tensor, gl.constexpr)
    partial: (gl.tensor, gl.constexpr)
    heads: gl.tensor

    @gluon.constexpr_function
    def __init__(self, descriptors, lse, notes, partial, heads):
        self.descriptors = descriptors
        self.lse = lse
        self.notes = gl.constexpr(None) if notes is None else notes
        self.partial = gl.constexpr(None) if partial is None else partial
        self.heads = heads


# ---- load


@gluon.jit
def copy_in(descriptors, chunks, barrier, batch, head, row):
    """Start the copy of rows of one head; the barrier expects their bytes."""
    if len(descriptors) == 1:
        mbarrier.expect(barrier, descriptors[0].block_type.nbytes)
    else:
        mbarrier.expect(barrier, descriptors[0].block_type.nbytes + descriptors[1].block_type.nbytes)
    for c in gl.static_range(len(descriptors)):
        tma_load(descriptors[c], [batch, head, row, c * descriptors[0].block_type.shape[3]], barrier,
                 chunks[c].reshape(descriptors[c].block_type.shape))  # fmt: skip


@gluon.jit
def load(stages, kv, q_descriptors, k_descriptors, v_descriptors, lengths, heads, C: gl.constexpr):
    done = 0
    turn = 0
    for tile in range(gl.program_id(0), heads.tiles, gl.num_programs(0)):
        work = locate(tile, lengths, heads, C)
        kv_head = work.head // heads.group
        for k in range(work.blocks()):
            row = (work.end - 1 - k) * C.tile_kv
            kv.fill(2 * (done + k), k_descriptors, work.batch, kv_head, row)
            if k == 0:
                for w in gl.static_range(len(stages)):
                    mbarrier.wait(stages[w].q_empty, (turn & 1) ^ 1)
                    copy_in(q_descriptors, stages[w].q, stages[w].q_full, work.batch, work.head, work.row + w * ROWS)
            kv.fill(2 * (done + k) + 1, v_descriptors, work.batch, kv_head, row)
        done += work.blocks()
        turn += gl.minimum(work.blocks(), 1)


# ---- mma


@gluon.jit
def start_scores(stage, k):
    """S = Q K^T."""
    for c in gl.static_range(len(stage.q)):
        if c + 1 < len(stage.q):
            tcgen05_mma(stage.q[c], k[c].permute((1, 0)), stage.s, use_acc=c > 0, mbarriers=[])
        else:
            tcgen05_mma(stage.q[c], k[c].permute((1, 0)), stage.s, use_acc=c > 0, mbarriers=[stage.s_full])


@gluon.jit
def start_output(stage, v, use_acc, phase, C: gl.constexpr):
    """O += P V (O = P V without use_acc), by quarters of the keys."""
    SIZE: gl.constexpr = C.tile_kv // 4
    mbarrier.wait(stage.p_full, phase)
    for part in gl.static_range(4):
        if part == 3 and C.split_p:
            mbarrier.wait(stage.p_last, phase)
        for c in gl.static_range(len(stage.o)):
            tcgen05_mma(stage.p.slice(part * SIZE, SIZE), v[c].slice(part * SIZE, SIZE), stage.o[c],
                        use_acc=use_acc | (part > 0), mbarriers=[])  # fmt: skip


@gluon.jit
def mma(stages, kv, lengths, heads, C: gl.constexpr):
    done = 0
    turn = 0
    for tile in range(gl.program_id(0), heads.tiles, gl.num_programs(0)):
        blocks = locate(tile, lengths, heads, C).blocks()
        if blocks > 0:
            mma_tile(stages, kv, blocks, done, turn, C)
            done += blocks
            turn += 1


@gluon.jit
def mma_tile(stages, kv, blocks, done, turn, C: gl.constexpr):
    CHUNKS: gl.constexpr = len(stages[0].q)
    CHUNKS_V: gl.constexpr = len(stages[0].o)
    kv.wait(2 * done)
    for w in gl.static_range(len(stages)):
        mbarrier.wait(stages[w].q_full, turn & 1)
        start_scores(stages[w], kv.block(2 * done, CHUNKS))
    kv.release(2 * done)
    for g in range(done, done + blocks - 1):
        v = 2 * g + 1
        k = 2 * g + 2
        kv.wait(v)
        for w in gl.static_range(len(stages)):
            start_output(stages[w], kv.block(v, CHUNKS_V), g > done, g & 1, C)
            if w + 1 == len(stages):
                kv.release(v)
            if w == 0:
                kv.wait(k)
            start_scores(stages[w], kv.block(k, CHUNKS))
        kv.release(k)
    last = done + blocks - 1
    if not C.o_in_q:
        for w in gl.static_range(len(stages)):
            tcgen05_commit(stages[w].q_empty)
    kv.wait(2 * last + 1)
    for w in gl.static_range(len(stages)):
        start_output(stages[w], kv.block(2 * last + 1, CHUNKS_V), blocks > 1, last & 1, C)
        tcgen05_commit(stages[w].o_full)
    kv.release(2 * last + 1)


# ---- softmax


@gluon.jit
def load_scores(s, C: gl.constexpr):
    """S in quarters of its columns."""
    SIZE: gl.constexpr = C.tile_kv // 4
    layout: gl.constexpr = thread_rows(SIZE)
    return (s.slice(0, SIZE).load(layout), s.slice(SIZE, SIZE).load(layout), s.slice(2 * SIZE, SIZE).load(layout),
            s.slice(3 * SIZE, SIZE).load(layout))  # fmt: skip


@gluon.jit
def apply_mask(s, w: gl.constexpr, i, work, lengths, C: gl.constexpr):
    """-inf where a row does not see a key of block i."""
    SIZE: gl.constexpr = C.tile_kv // 4
    rows = work.row + w * ROWS + gl.arange(0, ROWS, rows_of(SIZE)) + (work.n_kv - work.n_q)
    keys = i * C.tile_kv + gl.arange(0, SIZE, gl.SliceLayout(0, thread_rows(SIZE)))
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
    """P = 2^(scale S - shift) to tensor memory, three quarters first; the row sums of P."""
    SIZE: gl.constexpr = C.tile_kv // 4
    block_sum = gl.full([ROWS], 0.0, gl.float32, rows_of(SIZE))
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
def send(stage, message, first, second):
    """To the correction warps: numbers of each row, one or two."""
    mbarrier.wait(stage.stats_empty, (message & 1) ^ 1)
    stage.sums.store(first)
    if second is not None:
        stage.maxima.store(second)
    mbarrier.arrive(stage.stats_full, count=1)


@gluon.jit
def softmax_tile(w: gl.constexpr, stage, work, lengths, scale, outputs, done, turn, MASKED: gl.constexpr, C: gl.constexpr):
    LAYOUT: gl.constexpr = rows_of(C.tile_kv // 4)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)
    row_sum = gl.full([ROWS], 0.0, gl.float32, LAYOUT)
    for g in range(done, done + work.blocks()):
        mbarrier.wait(stage.s_full, g & 1)
        s = load_scores(stage.s, C)
        if MASKED:
            i = work.end - 1 - (g - done)
            if (i >= work.full_end) | (i < work.full_begin):
                s = apply_mask(s, w, i, work, lengths, C)
        row_max, shift, factor = update_max(row_max, row_maxima(s) * scale, MASKED, C)
        if g > done:
            if C.correction:
                send(stage, g - 1, factor, None)
            else:
                rescale(stage, factor)
        row_sum = row_sum * factor + store_weights(stage, s, shift, scale, C)
    if C.correction:
        send(stage, done + work.blocks() - 1, row_sum, row_max)
    else:
        finish(w, stage, work, row_sum, row_max, outputs, turn, C)


@gluon.jit
def softmax(w: gl.constexpr, stages, lengths, heads, scale, outputs, MASKED: gl.constexpr, C: gl.constexpr):
    done = 0
    turn = 0
    for tile in range(gl.program_id(0), heads.tiles, gl.num_programs(0)):
        work = locate(tile, lengths, heads, C)
        if work.blocks() > 0:
            softmax_tile(w, stages[w], work, lengths, scale, outputs, done, turn, MASKED, C)
            done += work.blocks()
            turn += 1


# ---- correction


@gluon.jit
def rescale(stage, factor):
    """O times a factor a row, unless all are 1."""
    if gl.min(factor, 0) < 1.0:
        for c in gl.static_range(len(stage.o)):
            for j in gl.static_range(stage.o[c].shape[1] // 16):
                o = stage.o[c].slice(j * 16, 16)
                old = o.load(thread_rows(16))
                o.store(mul2(old, gl.convert_layout(factor, rows_of(16))[:, None]))


@gluon.jit
def normalise(o, out, factor):
    """O times a factor a row, to shared memory. Per row: 0, or a NaN if there is a NaN or an infinity."""
    SIZE: gl.constexpr = min(o.shape[1], 64)  # slices of shared memory are whole swizzles
    zero = gl.full([ROWS], 0.0, gl.float32, rows_of(SIZE))
    for j in gl.static_range(o.shape[1] // SIZE):
        old = o.slice(j * SIZE, SIZE).load(thread_rows(SIZE))
        new = mul2(old, gl.convert_layout(factor, rows_of(SIZE))[:, None])
        zero += gl.sum(new * 0.0, 1)
        out.slice(j * SIZE, SIZE, dim=1).store(new.to(out.dtype))
    return gl.convert_layout(zero, rows_of(32))


@gluon.jit
def finish(w: gl.constexpr, stage, work, row_sum, row_max, outputs, turn, C: gl.constexpr):
    """Normalise O and hand it to the epilogue; write the LSE, and a note if a masked tile has a NaN or an infinity."""
    row_sum = gl.convert_layout(row_sum, rows_of(32))
    row_max = gl.convert_layout(row_max, rows_of(32))
    factor = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    mbarrier.wait(stage.o_full, turn & 1)
    mbarrier.wait(stage.out_empty, (turn & 1) ^ 1)
    zero = gl.full([ROWS], 0.0, gl.float32, rows_of(32))
    for c in gl.static_range(len(stage.o)):
        zero += normalise(stage.o[c], stage.out[c], factor)
    fence_async_shared()
    mbarrier.arrive(stage.out_full, count=1)

    rows = work.row + w * ROWS + gl.arange(0, ROWS, rows_of(32))
    batch_head = work.batch * outputs.heads + work.head
    lse = (gl.where(row_sum == 0.0, 0.0, row_max) + gl.log2(row_sum)) * LN_2
    gl.store(outputs.lse + batch_head.to(gl.int64) * work.n_q + rows, lse, mask=rows < work.n_q)
    if outputs.notes is not None:
        note = batch_head * ((work.n_q + ROWS - 1) // ROWS) + (work.row // ROWS + w)
        gl.store(outputs.notes + note + gl.full([ROWS], 0, gl.int32, rows_of(32)), 1, mask=zero != 0.0)


@gluon.jit
def correct_tile(stages, work, outputs, done, turn, C: gl.constexpr):
    LAYOUT: gl.constexpr = rows_of(32)
    for w in gl.static_range(len(stages)):
        mbarrier.arrive(stages[w].p_full, count=1)  # the first P V overwrites O
    for message in range(done, done + work.blocks() - 1):
        for w in gl.static_range(len(stages)):
            mbarrier.wait(stages[w].stats_full, message & 1)
            factor = stages[w].sums.load(LAYOUT)
            mbarrier.arrive(stages[w].stats_empty, count=1)
            rescale(stages[w], factor)
            mbarrier.arrive(stages[w].p_full, count=1)
    for w in gl.static_range(len(stages)):
        mbarrier.wait(stages[w].stats_full, (done + work.blocks() - 1) & 1)
        row_sum = stages[w].sums.load(LAYOUT)
        row_max = stages[w].maxima.load(LAYOUT)
        mbarrier.arrive(stages[w].stats_empty, count=1)
        finish(w, stages[w], work, row_sum, row_max, outputs, turn, C)


@gluon.jit
def correction(stages, lengths, heads, outputs, C: gl.constexpr):
    done = 0
    turn = 0
    for tile in range(gl.program_id(0), heads.tiles, gl.num_programs(0)):
        work = locate(tile, lengths, heads, C)
        if work.blocks() > 0:
            correct_tile(stages, work, outputs, done, turn, C)
            done += work.blocks()
            turn += 1


# ---- epilogue


@gluon.jit
def epilogue(stages, lengths, heads, outputs, C: gl.constexpr):
    turn = 0
    for tile in range(gl.program_id(0), heads.tiles, gl.num_programs(0)):
        work = locate(tile, lengths, heads, C)
        if work.blocks() > 0:
            for w in gl.static_range(len(stages)):
                mbarrier.wait(stages[w].out_full, turn & 1)
                copy_out(outputs.descriptors, stages[w].out, work.batch, work.head, work.row + w * ROWS)
            for w in gl.static_range(len(stages)):
                tma_store_wait((len(stages) - 1 - w) * len(stages[0].o))
                mbarrier.arrive(stages[w].out_empty, count=1)
                if C.o_in_q:
                    mbarrier.arrive(stages[w].q_empty, count=1)
            turn += 1


@gluon.jit
def copy_out(descriptors, chunks, batch, head, row):
    for c in gl.static_range(len(descriptors)):
        tma_store(descriptors[c], [batch, head, row, c * descriptors[0].block_type.shape[3]],
                  chunks[c].reshape(descriptors[c].block_type.shape))  # fmt: skip


# ---- entry and launcher


@gluon.jit(do_not_specialize=["heads", "group", "at_once", "tiles", "n_q", "n_kv", "left", "right", "prefix"])
def forward_kernel(q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, o_wide, o_narrow, lse_ptr, notes_ptr,
                   heads, group, at_once, tiles, n_q, n_kv, left, right, prefix, scale,
                   MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = q_wide.dtype
    q_s = shared_chunks(dtype, C.q_stages, ROWS, C.chunks)
    if C.o_in_q:
        out_s = (q_s[0],)
    else:
        out_s = shared_chunks(dtype, C.q_stages, ROWS, C.chunks_v)
    stats = gl.allocate_shared_memory(gl.float32, [2 * C.q_stages, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tmem = allocate_tensor_memory(gl.float32, [ROWS, C.tmem_allocation], columns_layout(128))
    stage0 = make_stage(0, q_s, out_s, stats, tmem, dtype, C)
    if C.q_stages == 1:
        stages = (stage0,)
    else:
        stages = (stage0, make_stage(1, q_s, out_s, stats, tmem, dtype, C))
    kv = make_ring(dtype, C)
    fence_async_shared()

    lengths = Lengths(n_q, n_kv, None, None, left, right, prefix)
    outputs = Outputs(one_or_two(o_wide, o_narrow), lse_ptr, notes_ptr, None, heads)
    heads = Heads(heads, group, at_once, tiles)
    q_descriptors = one_or_two(q_wide, q_narrow)
    k_descriptors = one_or_two(k_wide, k_narrow)
    v_descriptors = one_or_two(v_wide, v_narrow)
    gl.warp_specialize([
        (softmax, (0, stages, lengths, heads, scale, outputs, MASKED, C)),
        (softmax, (1, stages, lengths, heads, scale, outputs, MASKED, C)),
        (correction, (stages, lengths, heads, outputs, C)),
        (mma, (stages, kv, lengths, heads, C)),
        (epilogue, (stages, lengths, heads, outputs, C)),
        (load, (stages, kv, q_descriptors, k_descriptors, v_descriptors, lengths, heads, C)),
    ], [4, 4, 1, 1, 1], [C.softmax_registers, C.correction_registers] + [C.other_registers] * 3)  # fmt: skip


@gluon.jit
def one_or_two(first, second):
    if second is None:
        return (first,)
    else:
        return (first, second)


@gluon.jit
def make_ring(dtype: gl.constexpr, C: gl.constexpr):
    wide = gl.allocate_shared_memory(dtype, [C.kv_stages, C.tile_kv, C.chunks[0]], swizzled(C.chunks[0]))
    narrow = None
    if len(C.chunks) == 2:
        narrow = gl.allocate_shared_memory(dtype, [C.narrow_stages, C.tile_kv, C.chunks[1]], swizzled(C.chunks[1]))
    return Ring(wide, narrow, make_barriers(C.kv_stages, 1), make_barriers(C.kv_stages, 1), C.kv_stages, C.narrow_stages)


def launch(
    problem: AttentionProblem, operands: Operands, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out, lse and the notes: None, or int32 [batch * heads_q * ceil(seqlen_q / 128)], non-zero where 128 rows of a
    masked problem hold a NaN or an infinity, which a masked-out value may have caused."""
    q = operands.q
    out = torch.empty(*q.shape[:-1], problem.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(lse_shape(problem), dtype=torch.float32, device=q.device)
    notes = None
    if problem.mask.band != (None, None, None):
        tiles = triton.cdiv(problem.lengths.seqlen_q, ROWS_PER_STAGE)
        notes = torch.zeros(lse.shape[0] * lse.shape[1] * tiles, dtype=torch.int32, device=q.device)
    grid, arguments, constants = kernel_arguments(problem, operands, out, lse, notes, config)
    with torch.cuda.device_of(q):  # Triton launches on the current device, which need not be q's
        forward_kernel[grid](*arguments, **constants)
    return out, lse, notes


def compile_only(problem: AttentionProblem, config: Config):
    """The compiled kernel that `launch` would run, from shapes alone (see strobe.lab.offline)."""
    lengths = problem.lengths
    assert isinstance(lengths, Dense)

    def empty(n: int, heads: int, dim: int) -> torch.Tensor:
        return torch.empty(lengths.batch, n, heads, dim, dtype=problem.dtype, device="meta")

    q = empty(lengths.seqlen_q, problem.heads_q, problem.head_dim)
    k = empty(lengths.seqlen_kv, problem.heads_kv, problem.head_dim)
    v = empty(lengths.seqlen_kv, problem.heads_kv, problem.head_dim_v)
    out = empty(lengths.seqlen_q, problem.heads_q, problem.head_dim_v)
    lse = torch.empty(lse_shape(problem), dtype=torch.float32, device="meta")
    notes = None if problem.mask.band == (None, None, None) else torch.empty(1, dtype=torch.int32, device="meta")
    grid, arguments, constants = kernel_arguments(problem, Operands(q, k, v), out, lse, notes, config)
    return forward_kernel.warmup(*arguments, grid=grid, **constants)


def kernel_arguments(problem: AttentionProblem, operands: Operands, out, lse, notes, config: Config):
    """The kernel's grid, arguments and compile-time constants."""
    lengths = problem.lengths
    assert isinstance(lengths, Dense)
    left, right, prefix = problem.mask.device_band
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q
    arguments = (
        *_descriptors(operands.q, ROWS_PER_STAGE, config.chunks),
        *_descriptors(operands.k, config.tile_kv, config.chunks),
        *_descriptors(operands.v, config.tile_kv, config.chunks_v),
        *_descriptors(out, ROWS_PER_STAGE, config.chunks_v),
        lse,
        notes,
        problem.heads_q,
        problem.group,
        _heads_at_once(problem, lengths),
        tiles,
        lengths.seqlen_q,
        lengths.seqlen_kv,
        left,
        right,
        prefix,
        problem.scale * LOG2_E,
    )
    masked = problem.mask.band != (None, None, None) or lengths.seqlen_kv % config.tile_kv != 0
    # Fusion is asked for because Triton 3.10 turns it off.
    constants = {"MASKED": masked, "C": config, "num_warps": 4, "enable_fp_fusion": True}
    sms = arch_of(operands.q.device).sms
    grid = (min(tiles, sms) if config.persistent and sms else tiles,)
    return grid, arguments, constants


def _heads_at_once(problem: AttentionProblem, lengths: Dense) -> int:
    """How many query heads' K and V fit in half the L2 together (see `locate`)."""
    kv_bytes = lengths.seqlen_kv * (problem.head_dim + problem.head_dim_v) * 2
    return max(1, min(lengths.batch * problem.heads_q, problem.group * int(60e6) // kv_bytes))


def _descriptors(x: torch.Tensor, rows: int, chunks: tuple[int, ...]) -> list[TensorDescriptor | None]:
    """TMA descriptors of [batch, n, heads, dim] in blocks of `rows` rows of one head, for each chunk of columns; two, the
    second None if there is one chunk."""
    batch, n, heads, _ = x.stride()
    # A dim of size 1 is never stepped along, but its stride must be a legal one.
    shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
    strides = [s if size > 1 else x.shape[3] for s, size in zip((batch, heads, n), shape[:3], strict=True)]
    made: list[TensorDescriptor | None] = [
        TensorDescriptor(x, shape, [*strides, 1], [1, 1, rows, chunk], _layout(rows, chunk, x.dtype)) for chunk in chunks
    ]
    return made if len(made) == 2 else [*made, None]


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The swizzle of a block; finding it takes as long as the rest of a descriptor."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], GLUON_DTYPES[dtype])
