# mypy: ignore-errors
# (Device code is a language of its own: Triton's compiler checks it.)
"""Attention forward for Hopper in e4m3: the roles, rings and barriers of `forward.py`, with three differences.

**V is transposed.** An fp8 wgmma takes both operands with the dim that it sums over contiguous: V as [head_dim, keys]. A small
kernel writes it so, once, by key blocks.

**P stays in its registers.** A lane of the accumulator has keys 8j + 2b + {0, 1} of a row, b its place in the quad; of the fp8
operand it has 4b + {0, 1, 2, 3} of each 16 keys. A sum over keys does not mind their order: V^T is written in the order in
which the lanes have them (`key_at`), and P needs no exchange.

**The reference moves if it must.** P ends at 448 in e4m3, where conversion saturates and says nothing, so a fixed reference is
not enough. But the sum of a lane's weights is at hand before they are rounded, and while it is below 448, so is each weight.
Otherwise the reference of the row rises by a power of two, and its weights, its sum and its part of O are multiplied by the
inverse. A warp in which no row needs that jumps over the multiplications (FlashAttention-4 skips rescaling in the same way).

Weights of the first block reach 2^HEADROOM: what the others may exceed it by before anything moves is 448 / 2^HEADROOM, and
less than 2^-10 / 2^HEADROOM of the first block's largest is rounded to 0.
"""

import torch
import triton
import triton.language as tl

from strobe.device import arch_of
from strobe.kernels.common.arguments import LOG2_E, bundles_of_heads, meta, meta_operands
from strobe.kernels.common.channel import at, make_channel
from strobe.kernels.common.turn import take_program_turn, take_turn
from strobe.kernels.common.work import Heads, Lengths
from strobe.kernels.gluon import (
    TensorDescriptor,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.kernels.sm90.descriptors import copy_in, descriptors
from strobe.kernels.sm90.forward import LN_2, Outputs, copy_out, lane_sums, lse_row, make_memory, pass_over, row_max
from strobe.kernels.sm90.launch import HALF_L2
from strobe.kernels.sm90.layouts import ROWS
from strobe.kernels.sm90.scores import Score, apply_mask, is_whole
from strobe.kernels.sm90.tiles import (
    SLOTS,
    fetch,
    first_block,
    later_block,
    lead_of,
    next_tile,
    place_of,
    publish,
    with_keys,
)
from strobe.kernels.workspace import Workspace, workspace
from strobe.problem import AttentionProblem, Operands, Varlen, lse_shape

HEADROOM = gl.constexpr(4)
"""The largest weight of a first block, as a power of two."""

LARGEST = gl.constexpr(448.0)
"""Of e4m3."""

DESCALE_ROWS = gl.constexpr(128)
"""Rows of q or k that share a descale, where a head has many."""

_CONFIGS = {64: Config(64, 64, 3, 128, 4), 128: Config(128, 128, 2, 128, 4), 256: Config(256, 256, 2, 128, 2)}
"""By head dim. Measured on an H200 (docs/fp8.md): with 64 keys a block, length 16384 loses 23% at head dim 128, 15% at 256."""


def config(problem: AttentionProblem) -> Config:
    return _CONFIGS[problem.head_dim]


# ---- V^T


@triton.jit
def key_at(place):
    """Which key of a block stands at a place in V^T: bits b1 b0 j c of the place are bits j b1 b0 c of the key."""
    return (place & -16) | ((place & 2) << 2) | ((place & 12) >> 1) | (place & 1)


@triton.jit(do_not_specialize=["n", "blocks"])
def transpose_kernel(v, v_t, cu_kv, n, blocks, by_batch, by_row, by_head, TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One block of keys: bytes [TILE, HEAD_DIM] of v to [HEAD_DIM, TILE] of v_t. Beyond the last key it writes 0."""
    take_program_turn()
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = 0
    target = batch * ((n + TILE - 1) // TILE) + block
    if cu_kv is not None:
        start = tl.load(cu_kv + batch)
        n = tl.load(cu_kv + batch + 1) - start
        target = start // TILE + batch + block
    if block * TILE < n:
        place = tl.arange(0, TILE)
        key = block * TILE + key_at(place)
        d = tl.arange(0, HEAD_DIM)
        rows = v + batch.to(tl.int64) * by_batch + head.to(tl.int64) * by_head + (start + key).to(tl.int64) * by_row
        x = tl.load(rows[:, None] + d[None, :], mask=(key < n)[:, None], other=0)
        to = v_t + (head.to(tl.int64) * blocks + target) * (HEAD_DIM * TILE)
        tl.store(to + d[:, None] * TILE + place[None, :], tl.trans(x))


# ---- layouts


@gluon.constexpr_function
def accumulator(columns):
    """A 64 x columns result of an fp8 wgmma, over the four warps of a group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.constexpr_function
def rows_of(columns):
    """A vector of one value a row of such a result."""
    return gl.SliceLayout(1, accumulator(columns))


# ---- producer


@aggregate
class Descales:
    """What q, k and v are to be multiplied by, float32, or None: by batch and key head. With q_blocks, the number of blocks of
    DESCALE_ROWS that a head has, q's are by batch, query head and block; with k_blocks, k's by batch, key head and block."""

    q: (gl.tensor, gl.constexpr)
    k: (gl.tensor, gl.constexpr)
    v: (gl.tensor, gl.constexpr)
    q_blocks: (gl.tensor, gl.constexpr)
    k_blocks: (gl.tensor, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_blocks, k_blocks):
        self.q = gl.constexpr(None) if q is None else q
        self.k = gl.constexpr(None) if k is None else k
        self.v = gl.constexpr(None) if v is None else v
        self.q_blocks = gl.constexpr(None) if q_blocks is None else q_blocks
        self.k_blocks = gl.constexpr(None) if k_blocks is None else k_blocks


@gluon.jit
def copy_v(v_desc, chunks, barrier, block, kv_head, C: gl.constexpr):
    mbarrier.expect(barrier, v_desc.block_type.nbytes)
    tma_load(v_desc, [kv_head, block * C.head_dim_v, 0], barrier, chunks[0].reshape(v_desc.block_type.shape))


@gluon.jit
def first_of_v(work, lengths, C: gl.constexpr):
    """The block of V^T where a sequence begins."""
    if lengths.cu_kv is None:
        return work.batch * ((lengths.n_kv + C.tile_kv - 1) // C.tile_kv)
    else:
        return work.start_kv // C.tile_kv + work.batch


@gluon.jit
def producer(inputs, counters, lengths, heads, score, memory, k, v, C: gl.constexpr):
    q_desc, k_desc, v_desc = inputs
    GROUPS: gl.constexpr = C.groups
    turn = 0
    g = gl.to_tensor(0)
    tile, work = with_keys(gl.program_id(0), counters, lengths, heads, C)
    publish(turn, tile, work, lengths, heads, memory)
    while tile < heads.tiles:
        kv_head = work.head // heads.group
        for w in gl.static_range(GROUPS):
            slot = (turn % C.q_stages) * GROUPS + w
            mbarrier.wait(memory.q_empty.index(slot), ((turn // C.q_stages) & 1) ^ 1)
            copy_in((q_desc,), at(memory.q, slot), memory.q_full.index(slot), work.start_q, work.n_q, work.batch, work.head,
                    work.row + w * ROWS)  # fmt: skip
        lead = first_block(work.begin, work.end, work.full_begin, work.full_end, lengths, score)
        first = first_of_v(work, lengths, C)
        i = lead
        copy_in((k_desc,), k.block(g), k.acquire(g), work.start_kv, work.n_kv, work.batch, kv_head, i * C.tile_kv)
        for j in tl.range(1, work.blocks()):
            g += 1
            next = later_block(j, work.begin, lead)
            copy_in((k_desc,), k.block(g), k.acquire(g), work.start_kv, work.n_kv, work.batch, kv_head, next * C.tile_kv)
            copy_v(v_desc, v.block(g - 1), v.acquire(g - 1), first + i, kv_head, C)
            i = next
        # The next tile is asked for as late as may be, or the CTAs would not end together.
        turn += 1
        tile, work = with_keys(next_tile(counters), counters, lengths, heads, C)
        publish(turn, tile, work, lengths, heads, memory)
        copy_v(v_desc, v.block(g), v.acquire(g), first + i, kv_head, C)
        g += 1
    # The last CTA to end leaves the counters as it found them, for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(counters, 0)
        gl.atomic_xchg(counters + 1, 0)


# ---- consumer: products


@gluon.jit
def start_scores(q, k, C: gl.constexpr):
    """S = Q K^T."""
    s = gl.full([ROWS, C.tile_kv], 0.0, gl.float32, accumulator(C.tile_kv))
    return warpgroup_mma(q[0], k[0].permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def start_output(acc, p, v):
    """O += P V."""
    return warpgroup_mma(p, v[0].permute((1, 0)), acc, is_async=True)


@gluon.jit
def no_output(C: gl.constexpr):
    return gl.full([ROWS, C.head_dim_v], 0.0, gl.float32, accumulator(C.head_dim_v))


PACK = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)


@gluon.jit
def packed(p, C: gl.constexpr):
    """P in e4m3, four neighbours of the operand in an int32: [rows, tile_kv / 16, 4]. (A loop would carry bytes in a register
    each, and put them together for every product.)"""
    x = p.reshape([ROWS, C.tile_kv // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4)
    even, odd = x.split()
    first, third = even.split()
    second, fourth = odd.split()
    return gl.inline_asm_elementwise(PACK, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def operand(p, C: gl.constexpr):
    """Packed P as the register operand of a product. No instruction comes of it: the bytes stay where they are."""
    x = gl.join(gl.join(p, p >> 16), gl.join(p >> 8, p >> 24))
    x = x.to(gl.int8).to(gl.float8e4nv, bitcast=True).reshape([ROWS, C.tile_kv])
    return gl.convert_layout(x, gl.DotOperandLayout(operand_index=0, parent=accumulator(C.head_dim_v), k_width=4))


@gluon.jit
def from_now(p):
    """p in the registers that the next product reads. Written before the last one is done, they would make ptxas wait for each
    product (its C7513, with Triton 3.6)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def scale_unless_one(n):
    """PTX: n values of two rows (value e is of the first if e % 4 < 2) times their rows' factors, if a lane of the warp has a
    factor other than 1."""
    lines = [
        "{ .reg .pred p, q;",
        f"setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;",
        "vote.sync.any.pred q, p, -1; @!q bra DONE;",
        *(f"mul.f32 ${e}, ${e}, ${2 * n + e % 4};" for e in range(n)),
        "DONE: }",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def tied(n):
    """n outputs in the registers of n inputs, and n inputs more."""
    return ",".join(["=f"] * n + [str(e) for e in range(n)] + ["f"] * n)


@gluon.jit
def scaled(x, factor):
    """x times the factors of its rows, which are normally 1."""
    N: gl.constexpr = x.shape[1] // 2
    factors = gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None] + gl.zeros_like(x)
    return gl.inline_asm_elementwise(scale_unless_one(N), tied(N), [x, factors], dtype=gl.float32, is_pure=True, pack=N)


# ---- consumer: softmax


@gluon.jit
def descaled(x, descale, index):
    """x times a descale, if there are any."""
    if descale is None:
        return x
    else:
        return x * gl.load(descale + index)


@gluon.jit
def tile_scale(w: gl.constexpr, turn, lengths, heads, memory, score, descales):
    """(the scale of a tile's scores, but for k's descale; batch and key head in one number)."""
    batch, head, row, _n_q, _n_kv, _start = place_of(w, turn % SLOTS, lengths, memory)
    kv_head = batch * (heads.heads // heads.group) + head // heads.group
    if descales.q_blocks is None:
        scale = descaled(score.inner, descales.q, kv_head)
    else:
        scale = descaled(score.inner, descales.q, (batch * heads.heads + head) * descales.q_blocks + row // DESCALE_ROWS)
    return scale, kv_head


@gluon.jit
def block_scale(scale, kv_head, i, descales, C: gl.constexpr):
    """The scale of the scores of block i."""
    if descales.k_blocks is None:
        return descaled(scale, descales.k, kv_head)
    else:
        return descaled(scale, descales.k, kv_head * descales.k_blocks + i * C.tile_kv // DESCALE_ROWS)


@gluon.jit
def masked_scores(s, i, tile, lengths, score, MASKED: gl.constexpr, C: gl.constexpr):
    """-inf where a row does not see a key of block i."""
    if MASKED:
        if not is_whole(i, tile):
            s = gl.convert_layout(apply_mask(s, i, tile, lengths, C), accumulator(C.tile_kv))
    return s


@gluon.jit
def weights(s, m, scale, MASKED: gl.constexpr):
    """P = 2^(scale S - m). Of a row that has seen nothing, whose reference is -inf, 0."""
    if MASKED:
        m = gl.where(m == float("-inf"), 0.0, m)
    return gl.exp2(s * scale - m[:, None])


@gluon.jit
def first_weights(s, tile, lengths, score, scale, MASKED: gl.constexpr, C: gl.constexpr):
    """Of a tile's first block: (reference, row sums), P."""
    s = masked_scores(s, lead_of(tile), tile, lengths, score, MASKED, C)
    m = row_max(s) * scale - HEADROOM
    p = weights(s, m, scale, MASKED)
    return (m, lane_sums(p)), packed(p, C)


@gluon.jit
def later_weights(state, s, i, tile, lengths, score, scale, MASKED: gl.constexpr, C: gl.constexpr):
    """Of a later block: the state with it, P, and the factor of what was summed before."""
    m, row_sum = state
    s = masked_scores(s, i, tile, lengths, score, MASKED, C)
    if MASKED:
        if not is_whole(lead_of(tile), tile):  # some rows may see the first of their keys here
            m = gl.where(m == float("-inf"), row_max(s) * scale - HEADROOM, m)
    p = weights(s, m, scale, MASKED)
    sums = lane_sums(p)
    largest = gl.convert_layout(gl.max(sums, 1), rows_of(C.tile_kv))
    rise = gl.where(largest < LARGEST, 0, (largest.to(gl.int32, bitcast=True) >> 23) - 127 - HEADROOM)
    factor = ((127 - rise) << 23).to(gl.float32, bitcast=True)
    factors = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return (m + rise.to(gl.float32), (row_sum + sums) * factors), packed(scaled(p, factor), C), factor


# ---- consumer


@gluon.jit
def step(before, g, i, acc, state, p, q, k, v, tile, lengths, score, scale, MASKED: gl.constexpr, C: gl.constexpr):
    """The scores of block i, which is at position g, and beside them P V of the last position `before`."""
    if MASKED and tile.between is not None:
        pass_over(k, before + 1, g)
    k.wait(g)
    p = operand(p, C)
    s = start_scores(q, k.block(g), C)
    v.wait(before)
    acc = start_output(acc, p, v.block(before))
    s = warpgroup_mma_wait(1, deps=[s])
    k.release(g)
    state, p, factor = later_weights(state, s, i, tile, lengths, score, scale, MASKED, C)
    v.wait(before)  # see `forward.step`
    acc = warpgroup_mma_wait(0, deps=[acc])
    p = from_now(p)
    v.release(before)
    if MASKED and tile.between is not None:
        pass_over(v, before + 1, g)
    return scaled(acc, factor), state, p


@gluon.jit
def consumer(w: gl.constexpr, outputs, lengths, heads, score, descales, memory, k, v, MASKED: gl.constexpr, C: gl.constexpr):
    tile = fetch(w, 0, memory, lengths, score, MASKED, C)
    if tile.go:
        consume(w, tile, outputs, lengths, heads, score, descales, memory, k, v, MASKED, C)


@gluon.jit
def consume(w: gl.constexpr, tile, outputs, lengths, heads, score, descales, memory, k, v, MASKED: gl.constexpr,
            C: gl.constexpr):  # fmt: skip
    """This CTA's tiles, of which there is one at least."""
    turn = 0
    g = gl.to_tensor(0)
    scale, kv_head = tile_scale(w, turn, lengths, heads, memory, score, descales)
    mbarrier.wait(memory.q_full.index(w), 0)
    k.wait(g)
    s = start_scores(at(memory.q, w), k.block(g), C)
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(g)
    state, p = first_weights(s, tile, lengths, score, block_scale(scale, kv_head, lead_of(tile), descales, C), MASKED, C)
    acc = no_output(C)
    while tile.go:
        # state and p are those of the tile's first block, at position g; acc is 0
        slot = (turn % C.q_stages) * C.groups + w
        q = at(memory.q, slot)
        skip = tile.between if MASKED and tile.between is not None else 0
        for j in tl.range(1, tile.blocks, disable_licm=True):
            before = g
            g += 1 + skip
            skip = 0
            i = later_block(j, tile.begin, tile.lead)
            acc, state, p = step(before, g, i, acc, state, p, q, k, v, tile, lengths, score,
                                 block_scale(scale, kv_head, i, descales, C), MASKED, C)  # fmt: skip
        # The boundary: the last P V of this tile, beside the first scores of the next.
        mbarrier.arrive(memory.q_empty.index(slot), count=1)
        before = g
        g += 1 + skip + (tile.after if MASKED else 0)
        old_state = state
        o_scale = descaled(1.0, descales.v, kv_head)
        turn += 1
        tile = fetch(w, turn, memory, lengths, score, MASKED, C)
        if tile.go:
            scale, kv_head = tile_scale(w, turn, lengths, heads, memory, score, descales)
        if MASKED:
            pass_over(k, before + 1, g)
        v.wait(before)
        slot = (turn % C.q_stages) * C.groups + w
        mbarrier.wait(memory.q_full.index(slot), (turn // C.q_stages) & 1, pred=tile.go)
        k.wait(g, tile.go)
        p = operand(p, C)
        s = start_scores(at(memory.q, slot), k.block(g), C)
        acc = start_output(acc, p, v.block(before))
        s = warpgroup_mma_wait(1, deps=[s])
        k.release(g, tile.go)
        lead_scale = scale
        if tile.go:
            lead_scale = block_scale(scale, kv_head, lead_of(tile), descales, C)
        state, p = first_weights(s, tile, lengths, score, lead_scale, MASKED, C)
        acc = warpgroup_mma_wait(0, deps=[acc])
        p = from_now(p)
        v.release(before)
        if MASKED:
            pass_over(v, before + 1, g)
        epilogue(w, acc, old_state, (turn - 1) % SLOTS, o_scale, lengths, heads, memory, outputs, C)
        acc = no_output(C)
    tma_store_wait(0)


@gluon.jit
def epilogue(w: gl.constexpr, acc, state, slot, scale, lengths, heads, memory, outputs, C: gl.constexpr):
    """Normalise; write the LSE, and O times `scale` by way of shared memory."""
    m, row_sum = state
    LAYOUT: gl.constexpr = rows_of(C.tile_kv)
    place = place_of(w, slot, lengths, memory)
    mbarrier.arrive(memory.tile_empty.index(slot), count=1)
    _batch, _head, row, n_q, _n_kv, _start = place
    rows = row + gl.arange(0, ROWS, LAYOUT)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), LAYOUT)
    # A sum that overflowed (scores that exceed the first block's by 2^124) must not look like a result.
    inverse = gl.where(row_sum == 0.0, 0.0, gl.where(row_sum == float("inf"), float("nan"), scale / row_sum))
    m = gl.where(row_sum == 0.0, 0.0, m)
    gl.store(outputs.lse + lse_row(place, lengths, heads, outputs) + rows, (m + gl.log2(row_sum)) * LN_2, mask=rows < n_q)
    o = acc * gl.convert_layout(inverse, rows_of(C.head_dim_v))[:, None]
    copy_out(w, o, place, memory, outputs.descriptor, 0, C)


# ---- entry


@gluon.jit(do_not_specialize=["q_blocks", "k_blocks", "heads", "group", "at_once", "rest", "tiles", "rows", "n_q", "n_kv",
                              "left", "right", "prefix"])  # fmt: skip
def fp8_kernel(q_desc, k_desc, v_desc, o_desc, lse, counters, q_descale, k_descale, v_descale, q_blocks, k_blocks, cu_q, cu_kv,
               heads, group, at_once, rest, tiles, rows, n_q, n_kv, left, right, prefix, scale,
               MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    memory = make_memory(dtype, o_desc.dtype, C)
    k = make_channel(dtype, C.num_stages, C.tile_kv, C.head_dim, 0, C.groups)
    v = make_channel(dtype, C.num_stages, C.head_dim_v, C.tile_kv, 0, C.groups)
    fence_async_shared()
    take_turn()
    inputs = (q_desc, k_desc, v_desc)
    outputs = Outputs(o_desc, lse, counters, rows)  # it writes no notes
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix)
    heads = Heads(heads, group, at_once, rest, tiles)
    zero = gl.to_tensor(0)  # the strides of what there is not
    score = Score(scale, None, None, (zero, zero), None, (zero, zero, zero, zero), None, zero, None, None, None, None, None,
                  (zero, zero, zero, zero), None, zero, zero)  # fmt: skip
    descales = Descales(q_descale, k_descale, v_descale, q_blocks, k_blocks)
    if C.groups == 2:
        gl.warp_specialize([
            (consumer, (0, outputs, lengths, heads, score, descales, memory, k, v, MASKED, C)),
            (consumer, (1, outputs, lengths, heads, score, descales, memory, k, v, MASKED, C)),
            (producer, (inputs, counters, lengths, heads, score, memory, k, v, C)),
        ], [4, 1], [C.consumer_registers, C.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, outputs, lengths, heads, score, descales, memory, k, v, MASKED, C)),
            (consumer, (1, outputs, lengths, heads, score, descales, memory, k, v, MASKED, C)),
            (consumer, (2, outputs, lengths, heads, score, descales, memory, k, v, MASKED, C)),
            (producer, (inputs, counters, lengths, heads, score, memory, k, v, C)),
        ], [4, 4, 1], [C.consumer_registers, C.consumer_registers, C.producer_registers])  # fmt: skip


# ---- launcher

Descale = torch.Tensor | None


def launch(
    problem: AttentionProblem, operands: Operands, descales: tuple[Descale, Descale, Descale]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (bfloat16) and lse. descales of q, k and v: float32 and contiguous, see `Descales`."""
    q = operands.q
    out = torch.empty(*q.shape[:-1], problem.head_dim_v, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(lse_shape(problem), dtype=torch.float32, device=q.device)
    if problem.varlen or problem.lengths.seqlen_q > problem.lengths.seqlen_kv:  # rows that see nothing have no tile
        out.zero_()
        lse.fill_(-torch.inf)
    with torch.cuda.device_of(q):
        v_t = transposed(problem, operands)
        space = workspace(q.device, 0)
        grid, arguments, constants = kernel_arguments(problem, operands, v_t, descales, out, lse, space)
        fp8_kernel[grid](*arguments, **constants)
    return out, lse


def transposed(problem: AttentionProblem, operands: Operands) -> torch.Tensor:
    """V^T, [heads_kv, blocks * head_dim, tile_kv]: the blocks of a sequence follow each other. A packed sequence that starts at
    row s is given the blocks from s // tile_kv on, and one more for each sequence before it, which is enough for all."""
    v, tile = operands.v, config(problem).tile_kv
    v_t = _empty_transposed(problem, v, tile)
    lengths = problem.lengths
    by_batch = 0 if problem.varlen else v.stride(0)
    transpose_kernel[(triton.cdiv(lengths.seqlen_kv, tile), problem.heads_kv, lengths.batch)](
        v.view(torch.uint8), v_t.view(torch.uint8), operands.cu_seqlens_kv, lengths.seqlen_kv,
        v_t.shape[1] // problem.head_dim_v, by_batch, v.stride(-3), v.stride(-2), tile, problem.head_dim_v,
        enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip
    return v_t


def _empty_transposed(problem: AttentionProblem, v: torch.Tensor, tile: int) -> torch.Tensor:
    lengths = problem.lengths
    if isinstance(lengths, Varlen):
        blocks = lengths.total_kv // tile + lengths.batch
    else:
        blocks = lengths.batch * triton.cdiv(lengths.seqlen_kv, tile)
    return torch.empty(problem.heads_kv, blocks * problem.head_dim_v, tile, dtype=v.dtype, device=v.device)


def compile_only(problem: AttentionProblem, by_block: bool = False):
    """The compiled kernel that `launch` would run on a dense problem with all descales (by_block: q's and k's by blocks), from
    shapes alone (see strobe.lab.offline)."""
    lengths, operands = problem.lengths, meta_operands(problem)
    out = meta(*operands.q.shape, dtype=torch.bfloat16)
    lse = meta(*lse_shape(problem), dtype=torch.float32)
    v_descale = meta(lengths.batch, problem.heads_kv, dtype=torch.float32)
    qk_descale = (
        v_descale[..., None].expand(-1, -1, triton.cdiv(lengths.seqlen_q, DESCALE_ROWS.value)) if by_block else v_descale
    )
    space = Workspace(meta(16, dtype=torch.int32), meta(1, dtype=torch.int32))
    v_t = _empty_transposed(problem, operands.v, config(problem).tile_kv)
    descales = (qk_descale, qk_descale, v_descale)
    grid, arguments, constants = kernel_arguments(problem, operands, v_t, descales, out, lse, space)
    return fp8_kernel.warmup(*arguments, grid=grid, **constants)


def kernel_arguments(problem: AttentionProblem, operands: Operands, v_t, descales, out, lse, space: Workspace):
    """The kernel's grid, arguments and compile-time constants."""
    lengths, chosen = problem.lengths, config(problem)
    left, right, prefix = problem.mask.device_band
    tiles = triton.cdiv(lengths.seqlen_q, chosen.tile_q) * lengths.batch * problem.heads_q
    block = [1, problem.head_dim_v, chosen.tile_kv]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    arguments = (
        *descriptors(operands.q, ROWS_PER_GROUP, (chosen.head_dim,)),
        *descriptors(operands.k, chosen.tile_kv, (chosen.head_dim,)),
        TensorDescriptor(v_t, list(v_t.shape), [v_t.shape[1] * v_t.shape[2], v_t.shape[2], 1], block, layout),
        *descriptors(out, ROWS_PER_GROUP, (chosen.o_columns,)),
        lse,
        space.counters,
        *descales,
        *(None if x is None or x.dim() == 2 else x.shape[2] for x in descales[:2]),
        operands.cu_seqlens_q,
        operands.cu_seqlens_kv,
        problem.heads_q,
        problem.group,
        *bundles_of_heads(problem, HALF_L2),
        tiles,
        operands.q.shape[:-2].numel(),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        left,
        right,
        prefix,
        problem.scale * LOG2_E,
    )
    cut = problem.mask.band != (None, None, None) or lengths.seqlen_kv % chosen.tile_kv != 0
    constants = {
        "MASKED": cut or problem.varlen,
        "C": chosen,
        "num_warps": 4,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
        "launch_pdl": True,
    }
    ctas = arch_of(operands.q.device).sms
    return (min(tiles, ctas) if ctas else tiles,), arguments, constants
