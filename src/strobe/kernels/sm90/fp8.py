# mypy: ignore-errors
# (Device code is a language of its own: Triton's compiler checks it.)
"""Attention forward for Hopper in e4m3: the roles, rings and barriers of `forward.py`, with four differences.

**V is transposed.** An fp8 wgmma takes both operands with the dim that it sums over contiguous: V as [head_dim, keys]. Another
launch writes it so, once, by key blocks, on some of the multiprocessors; this one begins beside it, on the others, and its
producer waits for a head's V^T before it copies any (`fp8_transpose`).

**P stays in its registers.** A lane of the accumulator has keys 8j + 2b + {0, 1} of a row, b its place in the quad; of the fp8
operand it has 4b + {0, 1, 2, 3} of each 16 keys. A sum over keys does not mind their order: V^T is written in the order in
which the lanes have them (`fp8_transpose.words_of`), and P needs no exchange.

**The reference moves if it must.** P ends at 448 in e4m3, where conversion saturates and says nothing, so a fixed reference is
not enough. But the sum of a lane's weights is at hand before they are rounded, and while it is below 448, so is each weight.
Otherwise the reference of the row rises by a power of two, and its weights, its sum and its part of O are multiplied by the
inverse. A warp in which no row needs that jumps over the multiplications (FlashAttention-4 skips rescaling in the same way).

**Weights are divided by their own sum**, that of what they are rounded to: of values that are all the same nothing is lost by
rounding. A block's is found by a product with ones, beside the others. The LSE is made of the sum of the weights before that.

Weights of the first block reach 2^HEADROOM: what the others may exceed it by before anything moves is 448 / 2^HEADROOM, and
less than 2^-10 / 2^HEADROOM of the first block's largest is rounded to 0.
"""

from dataclasses import replace

import triton.language as tl

from strobe.kernels.common.channel import Channel, at, make_channel
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.gluon_scores import score_and_factor
from strobe.kernels.common.scores import LN2
from strobe.kernels.common.tile_scheduler import Heads, Lengths
from strobe.kernels.gluon import (
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
from strobe.kernels.sm90.descriptors import copy_in
from strobe.kernels.sm90.forward import Memory, Outputs, copy_out, lane_sums, lse_row, make_memory, pass_over, row_max
from strobe.kernels.sm90.fp8_transpose import await_values
from strobe.kernels.sm90.layouts import ROWS, scalar_layout
from strobe.kernels.sm90.scores import Score, apply_mask, is_whole, simple_score, sink_of
from strobe.kernels.sm90.tile_queue import (
    fetch,
    first_block,
    later_block,
    lead_of,
    next_tile,
    place_of,
    publish,
    with_keys,
)
from strobe.problem import AttentionProblem
from strobe.tuning.table import Shape

HEADROOM = gl.constexpr(4)
"""The largest weight of a first block, as a power of two."""

ONES = gl.constexpr(8)
"""Columns of a product that finds row sums: the fewest that there may be."""

LARGEST = gl.constexpr(448.0)
"""The largest number of e4m3."""

DESCALE_ROWS = gl.constexpr(128)
"""Rows of q or k that share a descale, where a head has many."""

_CONFIGS = {64: Config(64, 64, 3, 128, 4), 128: Config(128, 128, 2, 128, 4), 256: Config(256, 256, 2, 128, 2)}
"""By head dim; others are padded with zeros, by TMA and in V^T. Measured on an H200 (docs/fp8.md): with 64 keys a block, length
16384 loses 23% at head dim 128, 15% at 256."""

MANY_KEYS = 2048
"""Keys that a row of head dim 64 sees, on average, from which on tiles of three groups are faster than those of two. The latter
have fewer rows beyond the last one, and less code, which stays in the instruction cache from tile to tile. On an H100: causal,
1024 keys, 202 us instead of 263; 2048, 315 and 333; 4096, 535 and 528; 8192, 981 and 937; full, 2048, 487 and 477."""


def config(problem: AttentionProblem) -> Config:
    found = next(found for head_dim, found in _CONFIGS.items() if head_dim >= problem.head_dim)
    shape = Shape.of(problem.lengths, problem.heads_q, problem.mask.band)
    seen = shape.keys // 2 if shape.mask == "causal" else shape.keys
    return replace(found, groups=2) if seen < MANY_KEYS else found


def is_from_diagonal(problem: AttentionProblem, config: Config) -> bool:
    """Whether tiles begin with the blocks that the mask cuts, and leave its code out of the loop over the others: a causal one,
    where each group of rows has its diagonal in one block. On an H100, head dim 64, 4 x 4096, 32 heads: 516 us instead of 531.
    (At head dims 128 and 256 it was level.)"""
    lengths, mask = problem.lengths, problem.mask
    if problem.varlen or problem.seqused or not mask.is_causal or config.head_dim > 64 or config.groups < 3:
        return False
    shift = lengths.seqlen_kv - lengths.seqlen_q
    return shift >= 0 and shift % ROWS_PER_GROUP == 0


# ---- layouts


@gluon.constexpr_function
def accumulator(columns):
    """A 64 x columns result of an fp8 wgmma, over the four warps of a group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.constexpr_function
def rows_of(columns):
    """A vector of one value a row of such a result."""
    return gl.SliceLayout(1, accumulator(columns))


# ---- what the roles share


@aggregate
class Descales:
    """What q, k and v are to be multiplied by, float32, or None: by batch and key head. With q_blocks, the number of blocks of
    DESCALE_ROWS that a head has, q's are by batch, query head and block; with k_blocks, k's by batch, key head and block."""

    q: (gl.tensor, gl.constexpr)
    k: (gl.tensor, gl.constexpr)
    v: (gl.tensor, gl.constexpr)
    q_blocks: (gl.tensor, gl.constexpr)
    k_blocks: (gl.tensor, gl.constexpr)


@aggregate
class Kernel:
    """What every role takes: as `forward.Kernel`, with descales and without stamps. transposed: of each of so many pairs of a
    batch entry and a key head, how many blocks of V^T are there; None: all are before this launch begins. DIAGONAL: whether a
    tile begins with the blocks that its mask cuts, which is causal (`is_from_diagonal`)."""

    inputs: gl.tuple
    outputs: Outputs
    counters: gl.tensor
    lengths: Lengths
    heads: Heads
    score: Score
    descales: Descales
    memory: Memory
    k: Channel
    v: Channel
    ones: (gl.shared_memory_descriptor, gl.constexpr)
    listed: (gl.tensor, gl.constexpr)
    transposed: (gl.tensor, gl.constexpr)
    pairs: (gl.tensor, gl.constexpr)
    MASKED: gl.constexpr
    DIAGONAL: gl.constexpr
    C: gl.constexpr


# ---- producer


@gluon.jit
def copy_v(K, g, first, i, kv_head):
    """Start the copy of block i of a sequence, whose V^T begins with block `first`, to position g."""
    v_desc = K.inputs[2]
    chunk = K.v.block(g)[0]
    full = K.v.acquire(g)
    block = first + i
    mbarrier.expect(full, v_desc.block_type.nbytes)
    tma_load(v_desc, [kv_head, block * K.C.head_dim_v, 0], full, chunk.reshape(v_desc.block_type.shape))


@gluon.jit
def from_diagonal(j, end):
    """The j-th block of a causal tile: the last two first, as the mask cuts one of them, for each group another; then the
    others, from left to right."""
    return gl.where(j < 2, end - 1 - j, j - 2)


@gluon.jit
def first_of_v(work, lengths, C: gl.constexpr):
    """The block of V^T where a sequence begins."""
    if lengths.cu_kv is None:
        return work.batch * ((lengths.n_kv + C.tile_kv - 1) // C.tile_kv)
    else:
        return work.start_kv // C.tile_kv + work.batch


@gluon.jit
def producer(K):
    q_desc, k_desc, _v_desc = K.inputs
    GROUPS: gl.constexpr = K.C.groups
    turn = 0
    g = gl.to_tensor(0)
    tile, work = with_keys(K, gl.program_id(0))
    publish(K, turn, tile, work)
    while tile < K.heads.tiles:
        kv_head = work.head // K.heads.group
        for w in gl.static_range(GROUPS):
            slot = (turn % K.C.q_stages) * GROUPS + w
            mbarrier.wait(K.memory.q_empty.index(slot), ((turn // K.C.q_stages) & 1) ^ 1)
            copy_in((q_desc,), at(K.memory.q, slot), K.memory.q_full.index(slot), work.start_q, work.n_q, work.batch, work.head,
                    work.row + w * ROWS)  # fmt: skip
        if K.DIAGONAL:
            lead = from_diagonal(0, work.end)
        else:
            lead = first_block(work.begin, work.end, work.full_begin, work.full_end, K.lengths, K.score)
        first = first_of_v(work, K.lengths, K.C)
        i = lead
        copy_in((k_desc,), K.k.block(g), K.k.acquire(g), work.start_kv, work.n_kv, work.batch, kv_head, i * K.C.tile_kv)
        if K.transposed is not None:
            pair = work.batch * (K.heads.heads // K.heads.group) + kv_head
            await_values(K.transposed, pair, work.n_kv, K.C.tile_kv)
        for j in tl.range(1, work.blocks()):
            g += 1
            next = from_diagonal(j, work.end) if K.DIAGONAL else later_block(j, work.begin, lead)
            copy_in((k_desc,), K.k.block(g), K.k.acquire(g), work.start_kv, work.n_kv, work.batch, kv_head, next * K.C.tile_kv)
            copy_v(K, g - 1, first, i, kv_head)
            i = next
        # The next tile is asked for as late as may be, or the CTAs would not end together.
        turn += 1
        tile, work = with_keys(K, next_tile(K, tile))
        publish(K, turn, tile, work)
        copy_v(K, g, first, i, kv_head)
        g += 1
    if K.transposed is not None:
        take_turn()
    # The last CTA to end leaves the counters as it found them, for the next launch.
    if gl.atomic_add(K.counters + 1, 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(K.counters, 0, sem="relaxed")
        gl.atomic_xchg(K.counters + 1, 0, sem="relaxed")
        if K.transposed is not None:
            for first in tl.range(0, K.pairs, 32):
                pair = first + gl.arange(0, 32, scalar_layout(1))
                gl.store(K.transposed + pair, 0, mask=pair < K.pairs)


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
def make_ones(dtype: gl.constexpr, C: gl.constexpr):
    """[ONES, tile_kv] ones, by which a product finds row sums. The caller fences."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ONES, C.tile_kv], dtype)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(dtype, [ONES, C.tile_kv], SHARED)
    ones.store(gl.full([ONES, C.tile_kv], 0x38, gl.int8, LAYOUT).to(dtype, bitcast=True))
    return ones


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
def operand(p, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Packed P as the register operand of a product with so many columns. No instruction comes of it: the bytes stay where they
    are."""
    x = gl.join(gl.join(p, p >> 16), gl.join(p >> 8, p >> 24))
    x = x.to(gl.int8).to(gl.float8e4nv, bitcast=True).reshape([ROWS, C.tile_kv])
    return gl.convert_layout(x, gl.DotOperandLayout(operand_index=0, parent=accumulator(COLUMNS), k_width=4))


@gluon.constexpr_function
def by_product(C):
    """Whether a product with ones finds the sums of rounded weights: 3 to 8 % faster at head dims 64 and 128 (H100, 4k, 16k).
    At 256 there is no register left for it."""
    return C.head_dim_v <= 128


@gluon.constexpr_function
def sum_packed(n):
    """PTX: the sum of n times four numbers of e4m3, added two at a time in float16, whose 65504 is out of reach."""
    lines = ["{ .reg .b16 low, high; .reg .b32 sum, x, y; .reg .f32 a, b; mov.b32 sum, 0;"]
    for e in range(1, n + 1):  # one after the other: few registers, of which there are not many
        lines += [f"mov.b32 {{low, high}}, ${e}; cvt.rn.f16x2.e4m3x2 x, low; cvt.rn.f16x2.e4m3x2 y, high;"]
        lines += ["add.f16x2 x, x, y; add.f16x2 sum, sum, x;"]
    return " ".join([*lines, "mov.b32 {low, high}, sum; cvt.f32.f16 a, low; cvt.f32.f16 b, high; add.f32 $0, a, b; }"])


@gluon.constexpr_function
def one_of(n):
    """The constraints of an output that is made of n inputs."""
    return ",".join(["=f"] + ["r"] * n)


@gluon.jit
def slices(x):
    """[rows, n, 4] in n parts [rows, 4]."""
    if x.shape[1] == 1:
        return (x.reshape([x.shape[0], 4]),)
    else:
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2, 4]).permute(0, 2, 3, 1).split()
        return slices(left) + slices(right)


@gluon.jit
def add_rounded(sums, p):
    """To row sums within each lane those of packed P, of what its weights are rounded to, two at a time."""
    parts = slices(p)
    N: gl.constexpr = len(parts)
    of_p = gl.inline_asm_elementwise(sum_packed(N), one_of(N), parts, dtype=gl.float32, is_pure=True, pack=1)
    return sums + gl.convert_layout(of_p, sums.type.layout)


@gluon.jit
def start_sums(p, K):
    """Row sums of packed P, of what its weights are rounded to, from 0 for each block: a product of e4m3 adds in fewer bits
    than float32 has, too few for all keys. Each column is the sum."""
    none = gl.full([ROWS, ONES], 0.0, gl.float32, accumulator(ONES))
    return warpgroup_mma(operand(p, ONES, K.C), K.ones.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def beside_output(K, s, p, before, acc, rounded_sum):
    """Start P V of position `before` beside scores that are under way: the scores, complete, O, which is not, and row sums with
    those of what P is rounded to, of which each lane of a quad has its own."""
    if by_product(K.C):
        of_block = start_sums(p, K)
        K.v.wait(before)
        acc = start_output(acc, operand(p, K.C.head_dim_v, K.C), K.v.block(before))
        s, of_block = warpgroup_mma_wait(1, deps=[s, of_block])
        of_lane, _ = of_block.reshape([ROWS, ONES // 2, 2]).split()
        return s, acc, rounded_sum + gl.convert_layout(of_lane, rounded_sum.type.layout)
    else:
        K.v.wait(before)
        acc = start_output(acc, operand(p, K.C.head_dim_v, K.C), K.v.block(before))
        rounded_sum = add_rounded(rounded_sum, p)
        return warpgroup_mma_wait(1, deps=[s]), acc, rounded_sum


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
def tile_scale(w: gl.constexpr, K, turn):
    """(the scale of a tile's scores, but for k's descale; batch and key head in one number)."""
    batch, head, row, _n_q, _n_kv, _start = place_of(w, turn % K.C.slots, K)
    kv_head = batch * (K.heads.heads // K.heads.group) + head // K.heads.group
    if K.descales.q_blocks is None:
        scale = descaled(K.score.inner, K.descales.q, kv_head)
    else:
        block = gl.minimum(row // DESCALE_ROWS, K.descales.q_blocks - 1)  # the tile's last groups may lie beyond the last row
        scale = descaled(K.score.inner, K.descales.q, (batch * K.heads.heads + head) * K.descales.q_blocks + block)
    return scale, kv_head


@gluon.jit
def block_scale(K, scale, kv_head, i):
    """The scale of the scores of block i."""
    if K.descales.k_blocks is None:
        return descaled(scale, K.descales.k, kv_head)
    else:
        return descaled(scale, K.descales.k, kv_head * K.descales.k_blocks + i * K.C.tile_kv // DESCALE_ROWS)


@gluon.jit
def seen_scores(K, s, i, tile, scale, FIRST: gl.constexpr):
    """q.k of block i -> (scores, -inf where a row does not see a key; by what they have yet to be multiplied). FIRST: whether
    the block is the group's first."""
    if K.score.outer is not None:
        s, _ = score_and_factor(s, None, None, scale, K.score.outer, None)
        scale = 1.0
    if K.DIAGONAL:
        if FIRST:
            s = gl.convert_layout(apply_mask(s, i, tile, K.lengths, K.C), accumulator(K.C.tile_kv))
    elif K.MASKED:
        if not is_whole(i, tile):
            s = gl.convert_layout(apply_mask(s, i, tile, K.lengths, K.C), accumulator(K.C.tile_kv))
    return s, scale


@gluon.jit
def weights(s, m, scale, MASKED: gl.constexpr):
    """P = 2^(scale S - m). Of a row that has seen nothing, whose reference is -inf, 0."""
    if MASKED:
        m = gl.where(m == float("-inf"), 0.0, m)
    return gl.exp2(s * scale - m[:, None])


@gluon.jit
def block_of(K, tile, j):
    """The number of a group's j-th block."""
    if K.DIAGONAL:  # whoever passes over the tile's last block begins with the second one
        return from_diagonal(j + tile.after, tile.blocks + tile.after)
    else:
        return later_block(j, tile.begin, tile.lead)


@gluon.jit
def own_lead(K, tile):
    """The number of a group's first block."""
    if K.DIAGONAL:
        return block_of(K, tile, 0)
    else:
        return lead_of(tile)


@gluon.jit
def first_weights(K, s, tile, scale):
    """(reference, row sums) and P of a tile's first block."""
    s, scale = seen_scores(K, s, own_lead(K, tile), tile, scale, True)
    m = row_max(s) * scale - HEADROOM
    p = weights(s, m, scale, K.MASKED and not K.DIAGONAL)
    return (m, lane_sums(p)), packed(p, K.C)


@gluon.jit
def later_weights(K, state, s, i, tile, scale, second):
    """The state with a later block, its P, and the factor of what was summed before. second: whether it is the group's second
    block."""
    m, row_sum = state
    s, scale = seen_scores(K, s, i, tile, scale, False)
    lowered = gl.zeros_like(m) + 1.0
    if K.DIAGONAL:
        if second:  # in the first some rows see a single key: a reference is the largest of one block more
            higher = gl.maximum(gl.ceil(row_max(s) * scale - HEADROOM - m), 0.0)
            m += higher
            lowered = gl.exp2(-higher)
    elif K.MASKED:
        # Without a left side whoever sees a key sees the first one.
        if K.lengths.left is not None and not is_whole(lead_of(tile), tile):  # some rows may see the first of their keys here
            m = gl.where(m == float("-inf"), row_max(s) * scale - HEADROOM, m)
    p = weights(s, m, scale, K.MASKED and not K.DIAGONAL)
    sums = lane_sums(p)
    largest = gl.convert_layout(gl.max(sums, 1), rows_of(K.C.tile_kv))
    rise = gl.where(largest < LARGEST, 0, (largest.to(gl.int32, bitcast=True) >> 23) - 127 - HEADROOM)
    factor = ((127 - rise) << 23).to(gl.float32, bitcast=True)
    BY_LANE: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    if K.DIAGONAL:
        row_sum *= gl.convert_layout(lowered, BY_LANE)[:, None]
    row_sum = (row_sum + sums) * gl.convert_layout(factor, BY_LANE)[:, None]
    p = packed(scaled(p, factor), K.C)
    if K.DIAGONAL:
        factor *= gl.convert_layout(lowered, rows_of(K.C.tile_kv))
    return (m + rise.to(gl.float32), row_sum), p, factor


# ---- consumer


@gluon.jit
def step(K, before, g, i, acc, rounded_sum, state, p, q, tile, scale, second):
    """The scores of block i, which is at position g, and beside them P V of the last position `before`."""
    if K.MASKED and tile.between is not None:
        pass_over(K.k, before + 1, g)
    K.k.wait(g)
    s = start_scores(q, K.k.block(g), K.C)
    s, acc, rounded_sum = beside_output(K, s, p, before, acc, rounded_sum)
    K.k.release(g)
    state, p, factor = later_weights(K, state, s, i, tile, scale, second)
    K.v.wait(before)  # see `forward.step`
    acc = warpgroup_mma_wait(0, deps=[acc])
    p = from_now(p)
    K.v.release(before)
    if K.MASKED and tile.between is not None:
        pass_over(K.v, before + 1, g)
    factors = gl.convert_layout(factor, gl.SliceLayout(1, rounded_sum.type.layout))[:, None]
    return scaled(acc, factor), rounded_sum * factors, state, p


@gluon.jit
def consumer(w: gl.constexpr, K):
    tile = fetch(w, K, 0)
    if tile.go:
        consume(w, K, tile)


@gluon.jit
def consume(w: gl.constexpr, K, tile):
    """This CTA's tiles, of which there is one at least."""
    turn = 0
    g = gl.to_tensor(0)
    scale, kv_head = tile_scale(w, K, turn)
    mbarrier.wait(K.memory.q_full.index(w), 0)
    if K.DIAGONAL:
        g += tile.after
        pass_over(K.k, 0, g)
    K.k.wait(g)
    s = start_scores(at(K.memory.q, w), K.k.block(g), K.C)
    s = warpgroup_mma_wait(0, deps=[s])
    K.k.release(g)
    if K.DIAGONAL:
        pass_over(K.v, 0, g)
    while tile.go:
        # s are the scores of the tile's first block, at position g
        state, p = first_weights(K, s, tile, block_scale(K, scale, kv_head, own_lead(K, tile)))
        acc = no_output(K.C)
        rounded_sum = gl.zeros_like(state[1])
        slot = (turn % K.C.q_stages) * K.C.groups + w
        q = at(K.memory.q, slot)
        skip = tile.between if K.MASKED and tile.between is not None else 0
        for j in tl.range(1, tile.blocks, disable_licm=True):
            before = g
            g += 1 + skip
            skip = 0
            i = block_of(K, tile, j)
            acc, rounded_sum, state, p = step(K, before, g, i, acc, rounded_sum, state, p, q, tile,
                                              block_scale(K, scale, kv_head, i), j == 1)  # fmt: skip
        # The boundary: the last P V of this tile, beside the first scores of the next.
        mbarrier.arrive(K.memory.q_empty.index(slot), count=1)
        before = g
        g += 1 + skip + (tile.after if K.MASKED and not K.DIAGONAL else 0)
        o_scale = descaled(1.0, K.descales.v, kv_head)
        turn += 1
        tile = fetch(w, K, turn)
        if K.DIAGONAL:
            g += tile.after
        if tile.go:
            scale, kv_head = tile_scale(w, K, turn)
        if K.MASKED:
            pass_over(K.k, before + 1, g)
        slot = (turn % K.C.q_stages) * K.C.groups + w
        mbarrier.wait(K.memory.q_full.index(slot), (turn // K.C.q_stages) & 1, pred=tile.go)
        K.k.wait(g, tile.go)
        s = start_scores(at(K.memory.q, slot), K.k.block(g), K.C)
        s, acc, rounded_sum = beside_output(K, s, p, before, acc, rounded_sum)
        K.k.release(g, tile.go)
        acc = warpgroup_mma_wait(0, deps=[acc])
        K.v.release(before)
        if K.MASKED:
            pass_over(K.v, before + 1, g)
        epilogue(w, K, acc, rounded_sum, state, (turn - 1) % K.C.slots, o_scale)
    tma_store_wait(0)


@gluon.jit
def epilogue(w: gl.constexpr, K, acc, rounded_sum, state, slot, scale):
    """Normalise; write the LSE, and O times `scale` by way of shared memory."""
    m, row_sum = state
    LAYOUT: gl.constexpr = rows_of(K.C.tile_kv)
    place = place_of(w, slot, K)
    mbarrier.arrive(K.memory.tile_empty.index(slot), count=1)
    _batch, head, row, n_q, _n_kv, _start = place
    rows = row + gl.arange(0, ROWS, LAYOUT)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), LAYOUT)
    rounded_sum = gl.convert_layout(gl.max(rounded_sum, 1) if by_product(K.C) else gl.sum(rounded_sum, 1), LAYOUT)
    # A sum that overflowed (scores that exceed the first block's by 2^124) must not look like a result.
    lost = row_sum == float("inf")
    nothing = row_sum == 0.0
    if K.score.sinks is not None:
        sink = sink_of(head, K.score)
        rounded_sum += gl.exp2(sink - m)  # it may be far above all scores: then O is 0
        m, row_sum = joined(gl.where(nothing, float("-inf"), m), row_sum, sink)
    inverse = gl.where(nothing, 0.0, gl.where(lost, float("nan"), scale / rounded_sum))
    m = gl.where(row_sum == 0.0, 0.0, m)
    gl.store(K.outputs.lse + lse_row(K, place) + rows, (m + gl.log2(row_sum)) * LN2, mask=rows < n_q)
    o = acc * gl.convert_layout(inverse, rows_of(K.C.head_dim_v))[:, None]
    if K.lengths.used_q is not None:  # rows that exist and are not used
        o = gl.where(gl.convert_layout(rows < n_q, rows_of(K.C.head_dim_v))[:, None], o, 0.0)
    copy_out(w, K, o, place, 0)


@gluon.jit
def joined(m, row_sum, sink):
    """(reference, sum) of weights with that of a sink."""
    top = gl.maximum(m, sink)
    top = gl.where(top == float("-inf"), 0.0, top)
    return top, row_sum * gl.exp2(m - top) + gl.exp2(sink - top)


# ---- entry


NUMBERS = (
    "q_blocks", "k_blocks", "sink_stride", "heads", "group", "at_once", "rest", "tiles", "rows", "n_q", "n_kv", "left", "right",
    "prefix", "total_kv", "pairs",
)  # fmt: skip
"""Arguments that the kernel is not specialised for."""


@gluon.jit(do_not_specialize=NUMBERS)
def fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, counters, listed, q_descale, k_descale, v_descale, q_blocks, k_blocks, sinks,
    sink_stride, outer, cu_q, cu_kv, used_q, used_kv, heads, group, at_once, rest, tiles, rows, n_q, n_kv, left, right, prefix,
    scale, total_kv, transposed, pairs, MASKED: gl.constexpr, DIAGONAL: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    # Numbers are parameters one by one: Triton 3.6 to 3.9 specialises a kernel for those of a tuple, `do_not_specialize` or not
    # (see `scores.SCORE_NUMBERS`).
    dtype: gl.constexpr = q_desc.dtype
    memory = make_memory(dtype, o_desc.dtype, C)
    k = make_channel(dtype, C.num_stages, C.tile_kv, C.head_dim, 0, C.groups)
    v = make_channel(dtype, C.num_stages, C.head_dim_v, C.tile_kv, 0, C.groups)
    ones = make_ones(dtype, C) if by_product(C) else None
    fence_async_shared()
    if transposed is None:
        take_turn()
    inputs = (q_desc, k_desc, v_desc)
    outputs = Outputs(o_desc, lse, counters, rows)  # it writes no notes
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, None, rows, total_kv)
    if listed is not None:
        tiles = gl.load(listed) * heads
    heads = Heads(heads, group, at_once, rest, tiles)
    score = simple_score(scale, outer, sinks, sink_stride)
    descales = Descales(q_descale, k_descale, v_descale, q_blocks, k_blocks)
    K = Kernel(
        inputs,
        outputs,
        counters,
        lengths,
        heads,
        score,
        descales,
        memory,
        k,
        v,
        ones,
        listed,
        transposed,
        pairs,
        MASKED,
        DIAGONAL,
        C,
    )
    if C.groups == 2:
        gl.warp_specialize([(consumer, (0, K)), (consumer, (1, K)), (producer, (K,))],
                           [4, 1], [C.consumer_registers, C.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([(consumer, (0, K)), (consumer, (1, K)), (consumer, (2, K)), (producer, (K,))],
                           [4, 4, 1], [C.consumer_registers, C.consumer_registers, C.producer_registers])  # fmt: skip
