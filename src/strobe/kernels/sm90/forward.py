"""Attention forward for Hopper in Gluon: TMA, wgmma, warp specialisation.

One CTA computes `tile_q` query rows of one head. Its warps have roles:

    role       warps          work
    producer   1              copies Q once, then the blocks of K and V, from global to shared memory (TMA)
    consumer   4 a group      64 query rows: S = Q K^T and O += P V on the tensor cores (wgmma), softmax in between

    shared memory    shape                           filled by    read by
    q                [groups, 64, head_dim]          producer     group w its own 64 rows; O leaves through it
    k, v (Channel)   [num_stages, tile_kv, head_dim] producer     all groups

    barrier              arrivals             says
    q_full[w]            TMA bytes            group w's rows of Q are there
    k.full, v.full       TMA bytes            a block is there
    k.empty, v.empty     one a group          every group has read the block

Blocks of keys run from right to left, so that the blocks which a causal mask cuts come first. Block i has position
g = end - 1 - i in the rings. Only blocks outside [full_begin, full_end) are masked, by a branch that all threads take
together; loops of their own for masked blocks were tried and cost registers (head dim 64, causal, S = 16384: 422
TFLOP/s with three loops, 502 with one, which leaves room for a third group).

A consumer keeps two products in flight: step g issues S(g) = Q K(g)^T and then O += P(g - 1) V(g - 1), and turns S(g)
into P(g) while the second still runs. The softmax is the online one (see reference/tiled.py), in powers of two.

The accumulator layout gives a row to the four lanes of a quad. Row sums stay within the lane until the end; row maxima
cross it in every block.
"""

import functools
import math

import torch
import triton

from strobe.kernels.common.channel import make_barriers, make_channel
from strobe.kernels.common.gluon_masks import kv_full, kv_range, visible
from strobe.kernels.common.stamp import COUNT, ROLES, stamp
from strobe.kernels.gluon import (
    TensorDescriptor,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.problem import AttentionProblem, Dense, Operands, lse_shape

LOG2_E = 1.4426950408889634
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(ROWS_PER_GROUP)
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

# ---- layouts


@gluon.constexpr_function
def accumulator(columns):
    """A 64 x columns result of a wgmma, over the four warps of a group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def rows_of(columns):
    """A vector of one value a row of such a result."""
    return gl.SliceLayout(1, accumulator(columns))


# ---- the work of a CTA


@aggregate
class Band:
    """The lengths and the bounds of `strobe.masks`, of which those that the mask does not have are None."""

    n_q: gl.tensor
    n_kv: gl.tensor
    left: (gl.tensor, gl.constexpr)
    right: (gl.tensor, gl.constexpr)
    prefix: (gl.tensor, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, n_q, n_kv, left, right, prefix):
        self.n_q = n_q
        self.n_kv = n_kv
        self.left = gl.constexpr(None) if left is None else left
        self.right = gl.constexpr(None) if right is None else right
        self.prefix = gl.constexpr(None) if prefix is None else prefix


@aggregate
class Work:
    """One tile of queries: its place, and the key blocks [begin, end) that it sees, [full_begin, full_end) without a mask.
    trace: where its stamps go, or None (see `common.stamp`)."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    trace: (gl.tensor, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, batch, head, row, begin, full_begin, full_end, end, trace):
        self.batch = batch
        self.head = head
        self.row = row
        self.begin = begin
        self.full_begin = full_begin
        self.full_end = full_end
        self.end = end
        self.trace = gl.constexpr(None) if trace is None else trace

    @gluon.jit
    def position(self, i):
        """The place of key block i in the rings."""
        return self.end - 1 - i


@gluon.jit
def locate(band, heads, heads_at_once, trace, C: gl.constexpr):
    """This CTA's Work. CTAs start in the order of their number: under a causal mask the tiles with the most keys come
    first, so that short ones fill the end, within bundles of heads whose K and V fit the L2 cache together."""
    tiles = (band.n_q + C.tile_q - 1) // C.tile_q
    pid = gl.program_id(0)
    bundle = pid // (heads_at_once * tiles)
    within = pid - bundle * heads_at_once * tiles
    width = gl.minimum(heads_at_once, gl.num_programs(0) // tiles - bundle * heads_at_once)
    row = (tiles - 1 - within // width) * C.tile_q
    batch_head = bundle * heads_at_once + within % width

    shift = band.n_kv - band.n_q
    first, last = row + shift, gl.minimum(row + C.tile_q, band.n_q) - 1 + shift
    key_begin, key_end = kv_range(first, last, band.n_kv, band.left, band.right, band.prefix)
    begin = key_begin // C.tile_kv
    end = gl.maximum((key_end + C.tile_kv - 1) // C.tile_kv, begin + 1)  # a tile that sees nothing masks one block
    key_begin, key_end = kv_full(first, last, band.n_kv, band.left, band.right, band.prefix)
    full_end = gl.minimum(gl.maximum(key_end // C.tile_kv, begin), end)
    full_begin = gl.minimum((key_begin + C.tile_kv - 1) // C.tile_kv, full_end)
    return Work(batch_head // heads, batch_head % heads, row, begin, full_begin, full_end, end, trace)


# ---- producer


@gluon.jit
def producer(work, descriptors, group_size, q_s, q_full, k, v, C: gl.constexpr):
    q_desc, k_desc, v_desc = descriptors
    kv_head = work.head // group_size
    GROUPS: gl.constexpr = C.groups
    for w in gl.static_range(GROUPS):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        tma_load(q_desc, [work.batch, work.head, work.row + w * ROWS, 0], q_full.index(w),
                 q_s.index(w).reshape(q_desc.block_type.shape))  # fmt: skip
    for i in range(work.end - 1, work.begin - 1, -1):
        g = work.position(i)
        k.fill(g, k_desc, [work.batch, kv_head, i * C.tile_kv, 0])
        stamp(work.trace, GROUPS, "k_issued", g)
        v.fill(g, v_desc, [work.batch, kv_head, i * C.tile_kv, 0])
        stamp(work.trace, GROUPS, "v_issued", g)


# ---- consumer


@gluon.jit
def scores_of(q, k, C: gl.constexpr):
    """S = Q K^T, started."""
    zero = gl.full([ROWS, C.tile_kv], 0.0, gl.float32, accumulator(C.tile_kv))
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def apply_mask(s, w: gl.constexpr, i, work, band, C: gl.constexpr):
    """-inf where a row does not see a key of block i."""
    rows = work.row + w * ROWS + gl.arange(0, ROWS, rows_of(C.tile_kv))
    keys = i * C.tile_kv + gl.arange(0, C.tile_kv, gl.SliceLayout(0, accumulator(C.tile_kv)))
    seen = visible((rows + (band.n_kv - band.n_q))[:, None], keys[None, :], band.n_kv, band.left, band.right, band.prefix)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def lane_sums(p):
    """Row sums within each lane: [rows, columns] -> [rows, 4], a column for each lane of the quad that has the row."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax(s, row_max, scale, MASKED: gl.constexpr, C: gl.constexpr):
    """Scores -> the new maxima (in powers of two, scaled), the factor for older sums, P."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    shift = new_max
    if MASKED:  # a row that has seen no key yet: 2^(-inf - 0) = 0, where -inf - -inf would be NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, gl.exp2(row_max - shift), gl.exp2(s * scale - shift[:, None])


@gluon.jit
def operand(p, dtype: gl.constexpr, C: gl.constexpr):
    """P as the register operand of the next product: the accumulator's registers are already in its order."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(operand_index=0, parent=accumulator(C.head_dim), k_width=2))


@gluon.jit
def step(w: gl.constexpr, i, state, q, k, v, work, band, scale, MASKED: gl.constexpr, C: gl.constexpr):
    """The scores of block i and, beside them, P V of the block before."""
    acc, row_max, row_sum, p = state
    g = work.position(i)
    stamp(work.trace, w, "begin", g)
    k.wait(g)
    stamp(work.trace, w, "k_ready", g)
    s = scores_of(q, k.buffer(g), C)
    v.wait(g - 1)
    acc = warpgroup_mma(p, v.buffer(g - 1), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    stamp(work.trace, w, "s_ready", g)
    k.release(g)
    if MASKED:
        if (i >= work.full_end) | (i < work.full_begin):
            s = apply_mask(s, w, i, work, band, C)
    row_max, rescale, new_p = softmax(s, row_max, scale, MASKED, C)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + lane_sums(new_p)
    p = operand(new_p, v.buffers.dtype, C)
    # Complete already, so it costs nothing; but ptxas moves no later wait above it, and P V stays hidden under exp2.
    v.wait(g - 1)
    stamp(work.trace, w, "p_ready", g)
    acc = warpgroup_mma_wait(0, deps=[acc])
    stamp(work.trace, w, "o_ready", g - 1)
    v.release(g - 1)
    acc = acc * gl.convert_layout(rescale, rows_of(C.head_dim))[:, None]
    return acc, row_max, row_sum, p


@gluon.jit
def consumer(w: gl.constexpr, work, band, q_s, q_full, k, v, outputs, scale, TAIL: gl.constexpr, C: gl.constexpr):
    BAND: gl.constexpr = band.left is not None or band.right is not None or band.prefix is not None
    q = q_s.index(w)
    stamp(work.trace, w, "begin", 0)
    mbarrier.wait(q_full.index(w), 0)
    k.wait(0)
    stamp(work.trace, w, "k_ready", 0)
    s = scores_of(q, k.buffer(0), C)
    s = warpgroup_mma_wait(0, deps=[s])
    stamp(work.trace, w, "s_ready", 0)
    k.release(0)
    MASKED: gl.constexpr = BAND or TAIL
    if MASKED:
        s = apply_mask(s, w, work.end - 1, work, band, C)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, rows_of(C.tile_kv))
    row_max, _rescale, p = softmax(s, row_max, scale, MASKED, C)
    acc = gl.full([ROWS, C.head_dim], 0.0, gl.float32, accumulator(C.head_dim))
    state = (acc, row_max, lane_sums(p), operand(p, v.buffers.dtype, C))
    stamp(work.trace, w, "p_ready", 0)

    for i in range(work.end - 2, work.begin - 1, -1):
        state = step(w, i, state, q, k, v, work, band, scale, BAND, C)

    acc, row_max, row_sum, p = state
    last = work.position(work.begin)
    v.wait(last)
    acc = warpgroup_mma(p, v.buffer(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    stamp(work.trace, w, "o_ready", last)
    stamp(work.trace, w, "epilogue", 0)
    epilogue(w, acc, row_max, row_sum, work, band, q, outputs, C)


@gluon.jit
def epilogue(w: gl.constexpr, acc, row_max, row_sum, work, band, o_s, outputs, C: gl.constexpr):
    """Normalise; write O through Q's buffer, the LSE, and a note if a masked tile came out with a NaN or an infinity."""
    o_desc, lse_ptr, notes_ptr, heads = outputs
    row = work.row + w * ROWS
    rows = row + gl.arange(0, ROWS, rows_of(C.tile_kv))
    batch_head = work.batch * heads + work.head
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), rows_of(C.tile_kv))
    lse = (gl.where(row_sum == 0.0, 0.0, row_max) + gl.log2(row_sum)) * LN_2
    gl.store(lse_ptr + batch_head.to(gl.int64) * band.n_q + rows, lse, mask=rows < band.n_q)
    o = acc * gl.convert_layout(gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum), rows_of(C.head_dim))[:, None]
    if notes_ptr is not None:
        exists = row + gl.arange(0, ROWS, rows_of(C.head_dim)) < band.n_q  # the rows beyond may have no note
        broken = exists & (gl.sum(o * 0.0, 1) != 0.0)
        note = batch_head * ((band.n_q + 63) // 64) + row // 64
        gl.store(notes_ptr + note + gl.full([ROWS], 0, gl.int32, rows_of(C.head_dim)), 1, mask=broken)
    o_s.store(o.to(o_desc.dtype))
    fence_async_shared()
    partition_barrier()
    tma_store(o_desc, [work.batch, work.head, row, 0], o_s.reshape(o_desc.block_type.shape))
    tma_store_wait(0)
    stamp(work.trace, w, "end", 0)


# ---- entry and launcher


@gluon.jit(do_not_specialize=["heads", "group_size", "heads_at_once", "n_q", "n_kv", "left", "right", "prefix"])
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, notes_ptr, trace, heads, group_size, heads_at_once, n_q,
                   n_kv, left, right, prefix, scale, TAIL: gl.constexpr, C: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_s = gl.allocate_shared_memory(dtype, [C.groups, ROWS, C.head_dim], layout)
    q_full = make_barriers(C.groups, 1)
    k = make_channel(dtype, layout, C.num_stages, C.tile_kv, C.head_dim, C.groups)
    v = make_channel(dtype, layout, C.num_stages, C.tile_kv, C.head_dim, C.groups)
    fence_async_shared()

    band = Band(n_q, n_kv, left, right, prefix)
    work = locate(band, heads, heads_at_once, trace, C)
    outputs = (o_desc, lse_ptr, notes_ptr, heads)
    inputs = (q_desc, k_desc, v_desc)
    if C.groups == 2:
        gl.warp_specialize([
            (consumer, (0, work, band, q_s, q_full, k, v, outputs, scale, TAIL, C)),
            (consumer, (1, work, band, q_s, q_full, k, v, outputs, scale, TAIL, C)),
            (producer, (work, inputs, group_size, q_s, q_full, k, v, C)),
        ], [4, 1], [C.consumer_registers, C.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, work, band, q_s, q_full, k, v, outputs, scale, TAIL, C)),
            (consumer, (1, work, band, q_s, q_full, k, v, outputs, scale, TAIL, C)),
            (consumer, (2, work, band, q_s, q_full, k, v, outputs, scale, TAIL, C)),
            (producer, (work, inputs, group_size, q_s, q_full, k, v, C)),
        ], [4, 4, 1], [C.consumer_registers, C.consumer_registers, C.producer_registers])  # fmt: skip


def launch(
    problem: AttentionProblem, operands: Operands, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out, lse and the notes: None, or int32 [batch * heads_q * ceil(seqlen_q / 64)], non-zero where 64 rows of a
    masked problem hold a NaN or an infinity, which a masked-out value may have caused."""
    return _run(problem, operands, config, None)


def launch_traced(problem: AttentionProblem, operands: Operands, config: Config) -> torch.Tensor:
    """A launch that stamps: int64 [CTAs, roles, events, key blocks] (see `common.stamp`; the roles are the consumers and
    then the producer), 0 where a role does not pass an event. It computes the same as `launch`, a little slower.

    ValueError if the stamps are 2^31 or more: the kernel counts them in int32."""
    _, heads, rows = lse_shape(problem)
    blocks = triton.cdiv(problem.lengths.seqlen_kv, config.tile_kv)
    shape = (blocks, problem.lengths.batch * heads * triton.cdiv(rows, config.tile_q), ROLES.value, COUNT.value)
    if math.prod(shape) >= 2**31:
        raise ValueError(f"a traced launch takes fewer than 2^31 stamps, got {shape[0]} key blocks in {shape[1]} CTAs")
    trace = torch.zeros(shape, dtype=torch.int64, device=operands.q.device)
    _run(problem, operands, config, trace)
    return trace.permute(1, 2, 3, 0)


def _run(problem: AttentionProblem, operands: Operands, config: Config, trace: torch.Tensor | None):
    q = operands.q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(lse_shape(problem), dtype=torch.float32, device=q.device)
    notes = None
    if problem.mask.band != (None, None, None):
        tiles = triton.cdiv(problem.lengths.seqlen_q, 64)
        notes = torch.zeros(lse.shape[0] * lse.shape[1] * tiles, dtype=torch.int32, device=q.device)
    grid, arguments, constants = kernel_arguments(problem, operands, out, lse, notes, config, trace)
    with torch.cuda.device_of(q):  # Triton launches on the current device, which need not be q's
        forward_kernel[grid](*arguments, **constants)
    return out, lse, notes


def compile_only(problem: AttentionProblem, config: Config, traced: bool = False):
    """The compiled kernel that `launch` (or `launch_traced`) would run, from shapes alone (see strobe.lab.offline)."""
    lengths = problem.lengths
    assert isinstance(lengths, Dense)
    q = torch.empty(lengths.batch, lengths.seqlen_q, problem.heads_q, problem.head_dim, dtype=problem.dtype, device="meta")
    k = torch.empty(lengths.batch, lengths.seqlen_kv, problem.heads_kv, problem.head_dim, dtype=problem.dtype, device="meta")
    lse = torch.empty(lse_shape(problem), dtype=torch.float32, device="meta")
    notes = None if problem.mask.band == (None, None, None) else torch.empty(1, dtype=torch.int32, device="meta")
    trace = torch.empty(1, dtype=torch.int64, device="meta") if traced else None
    grid, arguments, constants = kernel_arguments(problem, Operands(q, k, k), q, lse, notes, config, trace)
    return forward_kernel.warmup(*arguments, grid=grid, **constants)


def kernel_arguments(problem: AttentionProblem, operands: Operands, out, lse, notes, config: Config, trace=None):
    """The kernel's grid, arguments and compile-time constants."""
    lengths = problem.lengths
    assert isinstance(lengths, Dense)
    left, right, prefix = problem.mask.device_band
    grid = (triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q,)
    arguments = (
        _descriptor(operands.q, ROWS_PER_GROUP),
        _descriptor(operands.k, config.tile_kv),
        _descriptor(operands.v, config.tile_kv),
        _descriptor(out, ROWS_PER_GROUP),
        lse,
        notes,
        trace,
        problem.heads_q,
        problem.group,
        _heads_at_once(problem, lengths),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        left,
        right,
        prefix,
        problem.scale * LOG2_E,
    )
    # Fusion is asked for because Triton 3.10 turns it off: the exponent of every score is one multiply-add.
    constants = {"TAIL": lengths.seqlen_kv % config.tile_kv != 0, "C": config, "num_warps": 4, "enable_fp_fusion": True}
    return grid, arguments, constants


def _heads_at_once(problem: AttentionProblem, lengths: Dense) -> int:
    """How many query heads' K and V fit in half the L2 together (see `locate`)."""
    kv_bytes = 2 * lengths.seqlen_kv * problem.head_dim * 2
    return max(1, min(lengths.batch * problem.heads_q, problem.group * int(30e6) // kv_bytes))


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor of [batch, n, heads, head_dim] in blocks of `rows` rows of one head."""
    block = [1, 1, rows, x.shape[3]]
    batch, n, heads, _ = x.stride()
    # A dim of size 1 is never stepped along, but its stride must be a legal one.
    shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
    strides = [s if size > 1 else x.shape[3] for s, size in zip((batch, heads, n), shape[:3], strict=True)]
    return TensorDescriptor(x, shape, [*strides, 1], block, _layout(rows, x.shape[3], x.dtype))


@functools.cache
def _layout(rows: int, head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The swizzle of a block; finding it takes as long as the rest of a descriptor."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], GLUON_DTYPES[dtype])
