"""Attention backward for Hopper in Gluon: dQ, dK, dV in one pass over the scores, for head dims up to 192 (of v up to 128).

The grid is persistent: a CTA takes blocks of 128 keys of one key head, one after the other, and walks over the tiles of
`tile_q` query rows that see them, of every query head that shares them. dK and dV stay in registers; what a tile adds to dQ
goes to an accumulator in global memory.

    P  = exp(S - LSE),  S = score(Q K^T)         computed again
    dV = P^T dO
    dP = dO V^T
    dS = P * (dP - delta),   delta = rowsum(O * dO) - dLSE
    dK = dS^T Q,  dQ = dS K                      times the scale

    role       warps          work
    producer   1              takes blocks from a counter, tells the consumers; copies K, V, and per tile Q, dO and the
                              statistics (LSE and delta) in (TMA)
    consumer   4 a group      64 of the keys: all five products on the tensor cores (wgmma)

    shared memory      shape                              filled by    read by
    number             [SLOTS]                            producer     both groups: which block
    k                  [k_stages, 128 keys, dim]          producer     both groups
    v                  [2 groups, 64 keys, dim]           producer     each group its half
    q, do              [STAGES, tile_q, dim]              producer     both groups
    statistics         [STAGES, 2, tile_q] or, folded, 16 producer     both groups
                       numbers for each
    ones               [64, 16], if they are folded       at entry     both groups
    ds                 [2, 128 keys, tile_q]              consumers    both groups
    dq                 [2 groups, 64 * 64]                consumers    the TMA, which adds it to global memory; at a block's end
                                                                       dV and dK leave through it, too

    barrier                   arrivals        says
    number_full[slot]         producer        the next block is known
    number_empty[slot]        one a group     both groups have read it
    k.full[stage]             TMA bytes       a K is there
    k.empty                   one a group     both groups have read it, where there is one place for K
    v.full[w], v.empty[w]     TMA, group w    group w's half of V is there, has been read
    full[stage]               TMA bytes       a tile's Q, dO and statistics are there
    empty[stage]              one a group     both groups have read them
    DS_READY                  both groups     (named) one's dS is written, the other one needs it now
    TURN                      both groups     (named) see there

S and dP are computed transposed, keys by rows: P^T and dS^T come out of the accumulators as wgmma wants its operand for dV and
dK in registers, and only dS passes through shared memory, for dQ, which sums over the keys of both groups.

K and V stay while the tiles pass, so each group holds some of their columns in registers, as many as there is room for: S and
dP read that much less of shared memory, which is what a tile takes most of.

Transposed, LSE and delta are numbers of columns, and every thread would load those of a fourth of the rows. Where the scores
are as they come and registers allow, they are folded into the products, as 16 more columns: ones beside K and V, and beside Q
and dO the parts whose sum is what is to be subtracted (`backward_ends`).

dQ of a tile is computed one tile later, when both halves of its dS have long been written. So the groups have no point at which
both must be at the same time: each announces its dS, and waits for the other's a tile later. One computes exponentials while
the other keeps the tensor cores busy. Where there are two places for K, that goes on from block to block: the last dQ of one is
computed beside the first tile of the next, whose K is there already. Else it ends a block, and the next K comes after it. The
first tile, of the CTA or the block, has no tile before it: its product multiplies leftovers, which may change meanwhile, and
nobody uses the result. (A branch around a product costs more. A tool that looks for races may report it.)

At head dim 192 that is too much for the registers: there S, dP and dQ come one after the other (`serial_step`), and the two
groups overlap each other alone.

dQ is added by the TMA, in float32. Nobody but `backward_ends.convert` reads the sums, so they are kept in the order in which
the registers of a group hold a result: a thread stores 16 bytes at a time to shared memory, without bank conflicts. (Added from
registers instead, by vector atomics, head dim 128 was 1-4 % slower, 64 1-9 %.)
"""

import triton.language as tl

from strobe.kernels.common.channel import at, make_barriers, make_chunks, swizzled
from strobe.kernels.common.descriptors import coordinates, one_or_two
from strobe.kernels.common.gluon_masks import q_full, q_range
from strobe.kernels.common.gluon_philox import dropped
from strobe.kernels.common.named_barrier import FIRST, announce, meet
from strobe.kernels.common.pairs import rounded, widened
from strobe.kernels.common.turn import take_turn
from strobe.kernels.common.work import Lengths, sequence, within_spans
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90 import backward_config as sizes
from strobe.kernels.sm90.descriptors import copy_in
from strobe.kernels.sm90.layouts import accumulator, columns_of, one, rows_of
from strobe.kernels.sm90.scores import (
    SCORE_NUMBERS,
    BiasGradient,
    Score,
    add_to_bias,
    documents_of_keys,
    documents_of_rows,
    score_and_factors,
    slope_of,
    weighed,
)

KEYS = gl.constexpr(sizes.KEYS)
HALF = gl.constexpr(sizes.KEYS // 2)
STAGES = gl.constexpr(sizes.STAGES)
SLOTS = gl.constexpr(sizes.SLOTS)
PRODUCT = gl.constexpr(sizes.PRODUCT)
ROWS_PADDED = gl.constexpr(sizes.ROWS_PADDED)

DS_READY = gl.constexpr(FIRST.value)
"""Of a reader and a parity: DS_READY + 2 * reader + parity (see `announce_ds`)."""
TURN = gl.constexpr(FIRST.value + 4)
"""Of a group: it may issue its products."""

UNIT = gl.constexpr([[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]])
"""The elements [row, column] of a 64 x 64 result in the order of registers, lanes and warps: of the number of an element in
dQ's accumulator, each bit's row and column. Bits 0 and 1 number four registers of a thread."""


# ---- what the roles share


@aggregate
class Block:
    """Shared memory of K, chunks of [k_stages, 128, columns], or V, chunks of [2, 64, columns], with its barriers."""

    chunks: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, chunks, full, empty):
        self.chunks = chunks
        self.full = full
        self.empty = empty

    @gluon.jit
    def part(self, index):
        return at(self.chunks, index)


@aggregate
class Memory:
    """The shared memory of a CTA: see the table above. q, do are tuples of chunks."""

    number: gl.shared_memory_descriptor
    number_full: gl.shared_memory_descriptor
    number_empty: gl.shared_memory_descriptor
    k: Block
    v: Block
    q: gl.tuple
    do: gl.tuple
    statistics: gl.shared_memory_descriptor
    ones: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, number, number_full, number_empty, k, v, q, do, statistics, ones, full, empty, ds, dq):
        self.number = number
        self.number_full = number_full
        self.number_empty = number_empty
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.statistics = statistics
        self.ones = ones
        self.full = full
        self.empty = empty
        self.ds = ds
        self.dq = dq


@gluon.jit
def make_memory(dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, C.tile_q], dtype)
    return Memory(
        gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        make_barriers(SLOTS, 1),
        make_barriers(SLOTS, 2),
        Block(make_chunks(dtype, C.k_stages, KEYS, C.wide, C.narrow), make_barriers(C.k_stages, 1), make_barriers(1, 2)),
        Block(make_chunks(dtype, 2, HALF, C.wide_v, C.narrow_v), make_barriers(2, 1), make_barriers(2, 1)),
        make_chunks(dtype, STAGES, C.tile_q, C.wide, C.narrow),
        make_chunks(dtype, STAGES, C.tile_q, C.wide_v, C.narrow_v),
        make_statistics(C),
        make_ones(C),
        make_barriers(STAGES, 3),
        make_barriers(STAGES, 2),
        gl.allocate_shared_memory(dtype, [2, KEYS, C.tile_q], DS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [2, 16, 256], flat(2)),
    )


@gluon.jit
def make_statistics(C: gl.constexpr):
    if C.folded:
        return gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C.tile_q, PRODUCT], swizzled(gl.bfloat16, PRODUCT))
    else:
        return gl.allocate_shared_memory(gl.float32, [STAGES, 2 * C.tile_q], flat(1))


@gluon.jit
def make_ones(C: gl.constexpr):
    """([1, 64, 16],): what a product takes to sum up the parts of a statistic."""
    if C.folded:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        ones = gl.allocate_shared_memory(gl.bfloat16, [1, HALF, PRODUCT], swizzled(gl.bfloat16, PRODUCT))
        ones.index(0).store(gl.full([HALF, PRODUCT], 1.0, gl.bfloat16, LAYOUT))
        return (ones,)
    else:
        return ()


@gluon.constexpr_function
def flat(rank):
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


@aggregate
class Outputs:
    """dq, dk, dv: TMA descriptors, of the shares of dQ's accumulator that each group adds, and of chunks. notes: int32, one for
    64 keys. dbias: see `BiasGradient`. scale: of dK."""

    dq: gl.tuple
    dk: gl.tuple
    dv: gl.tuple
    notes: gl.tensor
    dbias: BiasGradient
    scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, dq, dk, dv, notes, dbias, scale):
        self.dq = dq
        self.dk = dk
        self.dv = dv
        self.notes = notes
        self.dbias = dbias
        self.scale = scale


@aggregate
class Heads:
    """heads, heads_kv: of queries and of keys. at_once: key heads whose blocks come together, in a bundle, so that their Q, dO
    and dQ stay in the L2 cache. rest: the key head from which on all are one bundle, a multiple of at_once. all: key heads of
    the whole batch. blocks: of all of them. padded: rows that a query head has in what the backward's kernels share, all
    sequences together if they are packed."""

    heads: gl.tensor
    heads_kv: gl.tensor
    at_once: gl.tensor
    rest: gl.tensor
    all: gl.tensor
    blocks: gl.tensor
    padded: gl.tensor

    @gluon.constexpr_function
    def __init__(self, heads, heads_kv, at_once, rest, all, blocks, padded):
        self.heads = heads
        self.heads_kv = heads_kv
        self.at_once = at_once
        self.rest = rest
        self.all = all
        self.blocks = blocks
        self.padded = padded


@aggregate
class Work:
    """A block of keys of one key head: `first` is its first key. Of its sequence, as `common.work.Work`: n_q, n_kv, start_q,
    start_kv. The rows that see it are the tiles [begin, end), those of [full_begin, full_end) without a mask. group: query
    heads that share it. row: of the first of them and this sequence, the first row in what the backward's kernels share."""

    batch: gl.tensor
    head_kv: gl.tensor
    first: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    start_q: (gl.tensor, gl.constexpr)
    start_kv: (gl.tensor, gl.constexpr)
    begin: gl.tensor
    end: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    group: gl.tensor
    row: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head_kv, first, n_q, n_kv, start_q, start_kv, begin, end, full_begin, full_end, group, row):
        self.batch = batch
        self.head_kv = head_kv
        self.first = first
        self.n_q = n_q
        self.n_kv = n_kv
        self.start_q = start_q
        self.start_kv = start_kv
        self.begin = begin
        self.end = end
        self.full_begin = full_begin
        self.full_end = full_end
        self.group = group
        self.row = row


@gluon.jit
def locate(number, lengths, heads, score, KEYS: gl.constexpr, TILE_Q: gl.constexpr):
    """The number-th block of so many keys. Under a causal mask those that most rows see come first, within bundles of heads."""
    blocks = (lengths.n_kv + KEYS - 1) // KEYS
    bundle = gl.minimum(number // (heads.at_once * blocks) * heads.at_once, heads.rest)  # the first of its heads
    width = gl.where(bundle < heads.rest, heads.at_once, heads.all - bundle)
    within = number - bundle * blocks
    first = within // width * KEYS
    batch_head = bundle + within % width
    batch = batch_head // heads.heads_kv
    head_kv = batch_head % heads.heads_kv
    group = heads.heads // heads.heads_kv

    start_q, n_q = sequence(lengths.cu_q, lengths.used_q, batch, lengths.n_q)
    start_kv, n_kv = sequence(lengths.cu_kv, lengths.used_kv, batch, lengths.n_kv)
    shift = n_kv - n_q
    last = gl.minimum(first + KEYS, n_kv) - 1
    begin, end = q_range(first, last, shift, n_kv, lengths.left, lengths.right, lengths.prefix)
    begin = (gl.maximum(begin, shift) - shift) // TILE_Q
    end = gl.where(first < n_kv, gl.maximum((end - shift + TILE_Q - 1) // TILE_Q, begin), begin)
    full_begin, full_end = q_full(first, last, shift, n_kv, lengths.left, lengths.right, lengths.prefix)
    full_begin = (gl.maximum(full_begin, shift) - shift + TILE_Q - 1) // TILE_Q
    # The last tile may have fewer rows: those beyond weigh nothing, masked or not.
    full_end = gl.where(full_end >= n_kv, end, (full_end - shift) // TILE_Q)
    full_end = gl.where(first + KEYS <= n_kv, full_end, full_begin)
    if lengths.spans is not None:
        begin, end, span_begin, span_end = within_spans(begin, end, first, batch, lengths.n_kv, lengths, KEYS, TILE_Q)
        full_begin = gl.maximum(full_begin, (span_begin + TILE_Q - 1) // TILE_Q)
        full_end = gl.minimum(full_end, span_end // TILE_Q)
    if score.visible is not None:
        full_begin = end
    if lengths.cu_q is None:
        row = (batch * heads.heads + head_kv * group) * heads.padded
    else:
        row = head_kv * group * heads.padded + (start_q + batch * ROWS_PADDED) // ROWS_PADDED * ROWS_PADDED
    return Work(batch, head_kv, first, n_q, n_kv, start_q, start_kv, begin, end, full_begin, full_end, group, row)


@gluon.jit
def stage_of(g):
    """Of the CTA's g-th tile. Unsigned, what a product waits for takes fewer instructions."""
    return (g.to(gl.uint32) % STAGES).to(gl.int32)


@gluon.jit
def phase_of(g):
    """Of the barriers of its stage."""
    return ((g.to(gl.uint32) // STAGES) & 1).to(gl.int32)


# ---- producer


@gluon.jit
def producer(inputs, counters, lengths, heads, score, memory, C: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc, statistics_desc = inputs
    turn = 0
    block = 0
    first = gl.to_tensor(0)  # the first tile of the block before
    g = gl.to_tensor(0)
    number = gl.program_id(0)
    while number < heads.blocks:
        publish(turn, number, memory)
        work = locate(number, lengths, heads, score, KEYS, C.tile_q)
        if work.begin < work.end:
            copy_tile(0, g, q_desc, do_desc, statistics_desc, work, heads, memory, C)
            if C.k_stages == 2:
                # The K in its place has been read when both groups are done with the first tile of the block before.
                if g - first == 1:
                    mbarrier.wait(memory.empty.index(stage_of(first)), phase_of(first))
            else:
                mbarrier.wait(memory.k.empty.index(0), (block & 1) ^ 1)
            copy_k(k_desc, block, work, memory, C)
            copy_v(v_desc, block, work, memory)
            count = (work.end - work.begin) * work.group
            for i in tl.range(1, count):
                copy_tile(i, g + i, q_desc, do_desc, statistics_desc, work, heads, memory, C)
            first = g
            g += count
            block += 1
        turn += 1
        number = gl.atomic_add(counters, 1) + gl.num_programs(0)
    publish(turn, number, memory)
    # The last CTA to end leaves the counters as it found them, for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(counters, 0)
        gl.atomic_xchg(counters + 1, 0)


@gluon.jit
def publish(turn, number, memory):
    """The turn-th block of this CTA, or that there is none, to the consumers."""
    slot = turn % SLOTS
    mbarrier.wait(memory.number_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
    memory.number.index(slot).store(gl.full([1], 0, gl.int32, one(1)) + number)
    mbarrier.arrive(memory.number_full.index(slot), count=1)


@gluon.jit
def copy_k(descriptors, block, work, memory, C: gl.constexpr):
    """Start the copies of the CTA's block-th K, whose place must be free."""
    stage = block % C.k_stages
    copy_in(descriptors, memory.k.part(stage), memory.k.full.index(stage), work.start_kv, work.n_kv, work.batch,
            work.head_kv, work.first)  # fmt: skip


@gluon.jit
def copy_v(descriptors, block, work, memory):
    """Likewise V: each half when its group has read the one before."""
    for half in gl.static_range(2):
        mbarrier.wait(memory.v.empty.index(half), (block & 1) ^ 1)
        copy_in(descriptors, memory.v.part(half), memory.v.full.index(half), work.start_kv, work.n_kv, work.batch,
                work.head_kv, work.first + half * HALF)  # fmt: skip


@gluon.jit
def copy_tile(i, g, q_desc, do_desc, statistics_desc, work, heads, memory, C: gl.constexpr):
    """Start the copies of the i-th tile of a block, which is the CTA's g-th."""
    tiles = work.end - work.begin
    member = i // tiles
    row = (work.begin + i % tiles) * C.tile_q
    head = work.head_kv * work.group + member
    stage = stage_of(g)
    full = memory.full.index(stage)
    mbarrier.wait(memory.empty.index(stage), phase_of(g) ^ 1)
    copy_in(q_desc, at(memory.q, stage), full, work.start_q, work.n_q, work.batch, head, row)
    mbarrier.expect(full, C.statistics_bytes)
    place = (work.row + member * heads.padded + row) * 2
    tma_load(statistics_desc, [place, 0] if C.folded else [place], full, memory.statistics.index(stage))
    copy_in(do_desc, at(memory.do, stage), full, work.start_q, work.n_q, work.batch, head, row)


# ---- consumer


@gluon.jit
def no_result(wide: gl.constexpr, narrow: gl.constexpr):
    """Chunks of dK or dV of 64 keys."""
    zeros = (gl.full([HALF, wide], 0.0, gl.float32, accumulator(wide)),)
    if narrow > 0:
        zeros += (gl.full([HALF, narrow], 0.0, gl.float32, accumulator(narrow)),)
    return zeros


@gluon.jit
def hold(chunks, COLUMNS: gl.constexpr, TILE_Q: gl.constexpr):
    """So many of the first columns of chunks of 64 rows in registers, by chunks."""
    held = ()
    for c in gl.static_range(len(chunks)):
        held += hold_part(chunks[c], columns_within(chunks[c].shape[1], COLUMNS - c * chunks[0].shape[1]), TILE_Q)
    return held


@gluon.jit
def half_of(chunks, w: gl.constexpr):
    """Group w's rows of chunks of 128."""
    halves = ()
    for c in gl.static_range(len(chunks)):
        halves += (chunks[c].slice(w * HALF, HALF),)
    return halves


@gluon.constexpr_function
def columns_within(width, columns):
    return max(0, min(width, columns))


@gluon.jit
def hold_part(chunk, COLUMNS: gl.constexpr, TILE_Q: gl.constexpr):
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(TILE_Q), k_width=2)
    if COLUMNS == 0:
        return ()
    else:
        return (chunk.slice(0, COLUMNS, dim=1).load(LAYOUT),)


@gluon.jit
def start_products(a, b):
    """a b^T of chunks of 64 rows each, and of some, [64, rows of b]: scores and dP, or their transposes."""
    return start_products_held(a, (), b)


@gluon.jit
def start_products_held(a, held, b):
    """Likewise, where `held` of a is in registers: it is not read from shared memory."""
    COLUMNS: gl.constexpr = b[0].shape[0]
    s = gl.full([64, COLUMNS], 0.0, gl.float32, accumulator(COLUMNS))
    for c in gl.static_range(len(a)):
        if c < len(held):
            s = add_held(s, held[c], a[c], b[c], c > 0)
        else:
            s = warpgroup_mma(a[c], b[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def add_held(s, held, a, b, ADD: gl.constexpr):
    """s, if ADD, + a b^T, of which the first columns of a are held, or all."""
    HELD: gl.constexpr = held.shape[1]
    s = warpgroup_mma(held, b.slice(0, HELD, dim=1).permute((1, 0)), s, use_acc=ADD, is_async=True)
    if a.shape[1] > HELD:
        a = a.slice(HELD, a.shape[1] - HELD, dim=1)
        s = warpgroup_mma(a, b.slice(HELD, b.shape[1] - HELD, dim=1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def subtract(s, FIRST: gl.constexpr, stage, memory, C: gl.constexpr):
    """From scores or dP the statistics of their rows, which are in rows of `memory.statistics` from FIRST on, by a product, if
    they are folded."""
    if C.folded:
        parts = memory.statistics.index(stage).slice(FIRST, C.tile_q)
        return warpgroup_mma(memory.ones[0].index(0), parts.permute((1, 0)), s, is_async=True)
    else:
        return s


@gluon.jit
def to_subtract(FIRST: gl.constexpr, stage, memory, C: gl.constexpr):
    """What is left to subtract of the same."""
    if C.folded:
        return 0.0
    else:
        return memory.statistics.index(stage).slice(FIRST, C.tile_q).load(columns_of(C.tile_q))[None, :]


@gluon.jit
def start_sum(acc, weights, rows):
    """acc += weights [64 keys, tile_q] rows, of which the weights are in registers, in the order of an accumulator's."""
    new = ()
    for c in gl.static_range(len(rows)):
        new += (warpgroup_mma(operand(weights, rows[c].shape[1]), rows[c], acc[c], is_async=True),)
    return new


@gluon.jit
def operand(weights, columns: gl.constexpr):
    """The weights as a product's operand in registers: they are already in its order."""
    return gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=accumulator(columns), k_width=2))


@gluon.jit
def start_dq(i: gl.constexpr, ds, parity, k, at_k, C: gl.constexpr):
    """The i-th share of a tile's dQ = dS K: of 128 rows 64, of 64 rows some of the columns."""
    COLUMNS: gl.constexpr = C.share_columns[i]
    dq = gl.full([64, COLUMNS], 0.0, gl.float32, accumulator(COLUMNS))
    rows = ds.index(parity)
    if C.tile_q > HALF:
        rows = rows.slice(i * 64, 64, dim=1)
    share = k.part(at_k)
    share = share[0].slice(i * 64, 64, dim=1) if C.wide > 64 and i < 2 else share[min(i, len(share) - 1)]
    return warpgroup_mma(rows.permute((1, 0)), share, dq, use_acc=False, is_async=True)


@gluon.jit
def finished(results, pending: gl.constexpr):
    """Wait until no more than `pending` products are under way, and with it for these."""
    done = ()
    for c in gl.static_range(len(results)):
        done += (warpgroup_mma_wait(pending, deps=[results[c]]),)
    return done


@gluon.constexpr_function
def in_order(columns):
    """Of 64 x columns results: each next number belongs to the next register, lane, warp."""
    return gl.SharedLinearLayout(UNIT.value[: 6 + columns.bit_length() - 1])


@gluon.jit
def add_to_dq(w: gl.constexpr, dq, place, outputs, memory):
    """Add a share of 64 rows to the accumulator, from number 64 * place on. Group w's buffer in shared memory must be free."""
    COLUMNS: gl.constexpr = dq.shape[1]
    DESCRIPTOR: gl.constexpr = 0 if COLUMNS == 64 else 1
    buffer = memory.dq.index(w)
    if COLUMNS < 64:
        buffer = reinterpret(buffer, gl.float32, [64 // COLUMNS, COLUMNS // 4, 256], flat(2)).index(0)
    reinterpret(buffer, gl.float32, [64, COLUMNS], in_order(COLUMNS)).store(dq)
    fence_async_shared()
    tma_add(outputs.dq[DESCRIPTOR], [place // 4, 0], buffer)


@gluon.jit
def apply_mask(x, other, w: gl.constexpr, row, head, work, lengths, score):
    """`other` where a row of the tile that begins at `row` does not see a key, x [64 keys, tile_q].

    Row 8 a + 2 b + e of a tile lies in lane b of a quad. Seen in these dims a lane compares a number of its own with numbers
    that the compiler knows: no registers for rows."""
    TILE_Q: gl.constexpr = x.shape[1]
    y = gl.reshape(x, [HALF, TILE_Q // 8, 4, 2])
    L: gl.constexpr = y.type.layout
    key = work.first + w * HALF + gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    a = gl.arange(0, TILE_Q // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    within = 8 * a[None, :, None, None] + e[None, None, None, :]
    p = row + (work.n_kv - work.n_q) + 2 * b[None, None, :, None]
    key = key[:, None, None, None]
    y = gl.where(key < work.n_kv, y, other)
    if lengths.right is not None:
        y = gl.where(within >= key - lengths.right - p, y, other)
    if lengths.left is not None:
        y = gl.where(within <= key + lengths.left - p, y, other)
    if lengths.prefix is not None:
        y = gl.where(within >= gl.where(key < lengths.prefix, 0, key - p), y, other)
    x = gl.convert_layout(gl.reshape(y, [HALF, TILE_Q]), accumulator(TILE_Q))
    rows, keys = indices(w, row, work, TILE_Q)
    if score.document_q is not None:
        of_rows = documents_of_rows(work.batch, rows, work.n_q, score)
        of_keys = documents_of_keys(work.batch, keys, work.n_kv, score)
        x = gl.where(of_rows[None, :] == of_keys[:, None], x, other)
    if score.visible is not None:
        x = gl.where(score.visible(work.batch, head, rows[None, :], keys[:, None]), x, other)
    return x


@gluon.jit
def indices(w: gl.constexpr, row, work, TILE_Q: gl.constexpr):
    """Of the rows of the tile that begins at `row`, and of group w's keys, in their sequence."""
    rows = row + gl.arange(0, TILE_Q, columns_of(TILE_Q))
    return rows, work.first + w * HALF + gl.arange(0, HALF, rows_of(TILE_Q))


@gluon.jit
def scores_of(s, w: gl.constexpr, row, head, slope, work, score):
    """q.k -> (score in powers of two, the factors of its gradient: see `scores.score_and_factors`)."""
    if not score.CHANGED:
        return s * score.inner, 1.0, 1.0
    else:
        rows, keys = indices(w, row, work, s.shape[1])
        return score_and_factors(s, rows[None, :], keys[:, None], work.batch, head, slope, work.n_q, work.n_kv, score)


@gluon.jit
def kept_weights(p, w: gl.constexpr, row, head, work, score):
    """P with 0 for what dropout drops, and what is kept multiplied."""
    if score.seed is None:
        return p
    else:
        first = work.first + w * HALF
        return dropped(p, first, row, score.seed, score.threshold, work.batch, head, TRANSPOSED=True) * score.kept_scale


@gluon.jit
def gradients(p, kept, dp, delta, factor, of_function, w: gl.constexpr, row, head, work, outputs, score):
    """dS, also to where a bias's gradient goes: P (dP - delta) and what comes of changed scores. kept: P after dropout."""
    if score.seed is None:
        ds = weighed(p, of_function, score) * (dp - delta)
    else:
        ds = weighed(kept, of_function, score) * dp - weighed(p, of_function, score) * delta
    if outputs.dbias.pointer is not None:
        rows, keys = indices(w, row, work, p.shape[1])
        add_to_bias(outputs.dbias, ds, p, rows, keys, work.batch, head, work.n_q, work.n_kv, TRANSPOSED=True)
    if score.CHANGED:
        ds = ds * factor
    return ds


@gluon.jit
def fetch(turn, memory):
    """The number of the turn-th block of this CTA."""
    slot = turn % SLOTS
    mbarrier.wait(memory.number_full.index(slot), (turn // SLOTS) & 1)
    number = gl.max(memory.number.index(slot).load(one(4)), 0)
    mbarrier.arrive(memory.number_empty.index(slot), count=1)
    return number


@gluon.jit
def consumer(w: gl.constexpr, outputs, lengths, heads, score, memory, MASKED: gl.constexpr, NOTED: gl.constexpr,
             C: gl.constexpr):  # fmt: skip
    turn = 0
    block = 0
    g = gl.to_tensor(0)
    place = gl.to_tensor(0)
    if C.turns and w == 1:
        announce(TURN)
    number = fetch(turn, memory)
    while number < heads.blocks:
        work = locate(number, lengths, heads, score, KEYS, C.tile_q)
        if work.begin < work.end:
            place = consume(w, block, g, place, work, outputs, lengths, heads, score, memory, MASKED, NOTED, C)
            g += (work.end - work.begin) * work.group
            block += 1
        elif work.first < work.n_kv:
            leave(w, no_result(C.wide, C.narrow), no_result(C.wide_v, C.narrow_v), work, outputs, lengths, memory, C)
        turn += 1
        number = fetch(turn, memory)
    if C.turns and w == 0:
        meet(TURN)
    if C.k_stages == 2:
        if g > 0:
            give_last_dq(w, g - 1, (block - 1) & 1, place, outputs, memory, C)
    tma_store_wait(0)


@gluon.jit
def await_ds(w: gl.constexpr, parity, expected):
    """Wait, if it is expected, for the other group's half of a dS; it has read this group's of the tile before."""
    if expected:
        meet(DS_READY + 2 * w + parity)


@gluon.jit
def announce_ds(w: gl.constexpr, parity):
    """This group's half of a dS is there, and it has read the other one's of the tile before."""
    announce(DS_READY + 2 * (1 - w) + parity)


@gluon.jit
def put_ds(w: gl.constexpr, parity, ds, memory):
    tma_store_wait(0)  # what was in memory.dq has left
    partition_barrier()
    memory.ds.index(parity).slice(w * HALF, HALF).store(ds)
    fence_async_shared()


@gluon.jit
def step(w: gl.constexpr, g, first, at_k, at_k_before, tile, head, place, held_k, held_v, dk, dv, work, outputs, lengths, score,
         memory, MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Tile g, with the K of a place: its parts of dK and dV added, and, unless it is the first one, dQ of the tile before, to
    `place`."""
    dtype: gl.constexpr = memory.q[0].dtype
    stage = stage_of(g)
    # V lies at a fixed place. If the compiler knew, it would keep the descriptors of all its parts in registers.
    fixed = g >> 30
    q = at(memory.q, stage)
    do = at(memory.do, stage)
    mbarrier.wait(memory.full.index(stage), phase_of(g))
    s = start_products_held(half_of(memory.k.part(at_k), w), held_k, q)
    s = subtract(s, 0, stage, memory, C)
    dp = start_products_held(memory.v.part(fixed + w), held_v, do)
    dp = subtract(dp, C.tile_q, stage, memory, C)
    s = warpgroup_mma_wait(C.products_dp, deps=[s])
    lse = to_subtract(0, stage, memory, C)
    row = tile * C.tile_q
    slope = slope_of(work.batch, head, score)
    x, factor, of_function = scores_of(s, w, row, head, slope, work, score)
    x = x - lse
    if MASKED:
        if (tile < work.full_begin) | (tile >= work.full_end):
            x = apply_mask(x, float("-inf"), w, row, head, work, lengths, score)
    p = gl.exp2(x)
    kept = kept_weights(p, w, row, head, work, score)
    dp, p = warpgroup_mma_wait(0, deps=[dp, p])
    delta = to_subtract(C.tile_q, stage, memory, C)  # as late as that, for the registers
    ds = gradients(p, kept, dp, delta, factor, of_function, w, row, head, work, outputs, score).to(dtype)
    p = p.to(dtype) if score.seed is None else kept.to(dtype)

    if C.turns:
        meet(TURN + w)
    await_ds(w, stage ^ 1, g > first)
    dq = start_dq(w, memory.ds, stage ^ 1, memory.k, at_k_before, C)  # before the first tile there is none: of leftovers
    dv = start_sum(dv, p, do)
    put_ds(w, stage, ds, memory)
    dk = start_sum(dk, ds, q)
    if C.turns:
        announce(TURN + 1 - w)
    dq = warpgroup_mma_wait(C.products_v + C.products, deps=[dq])
    announce_ds(w, stage)
    if g > first:
        add_to_dq(w, dq, place, outputs, memory)
    dv = finished(dv, 0)
    dk = finished(dk, 0)
    return dk, dv


@gluon.jit
def serial_step(w: gl.constexpr, g, first, tile, head, place, dk, dv, work, outputs, lengths, score, memory, C: gl.constexpr):
    """As `step`, where the registers have room for one of S, dP and dQ beside dK and dV: one after the other. P is rounded
    before dP is computed, and dS is made of the rounded P.

    The mask comes after the exponentials, and whether a tile needs one is asked whatever the mask: the compiler moves no
    product to before a branch, so that S is gone when dP is computed."""
    dtype: gl.constexpr = memory.q[0].dtype
    stage = stage_of(g)
    fixed = g >> 30  # see `step`
    q = at(memory.q, stage)
    do = at(memory.do, stage)
    mbarrier.wait(memory.full.index(stage), phase_of(g))
    s = start_products(half_of(memory.k.part(fixed), w), q)
    s = warpgroup_mma_wait(0, deps=[s])
    lse = to_subtract(0, stage, memory, C)
    row = tile * C.tile_q
    slope = slope_of(work.batch, head, score)
    x, factor, of_function = scores_of(s, w, row, head, slope, work, score)
    x = x - lse
    p = gl.exp2(x)
    if (tile < work.full_begin) | (tile >= work.full_end):
        p = apply_mask(p, 0.0, w, row, head, work, lengths, score)
    kept = rounded(kept_weights(p, w, row, head, work, score), dtype)
    p = kept if score.seed is None else rounded(p, dtype)
    dp = start_products(memory.v.part(fixed + w), do)
    delta = to_subtract(C.tile_q, stage, memory, C)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = gradients(widened(p), widened(kept), dp, delta, factor, of_function, w, row, head, work, outputs, score).to(dtype)
    dv = start_sum(dv, kept, do)
    await_ds(w, stage ^ 1, g > first)
    put_ds(w, stage, ds, memory)
    dk = start_sum(dk, ds, q)
    dv = finished(dv, C.products)
    dk = finished(dk, 0)
    if g > first:
        give_dq(w, g - 1, fixed, stage ^ 1, place, outputs, memory, C)
    announce_ds(w, stage)
    return dk, dv


@gluon.jit
def give_dq(w: gl.constexpr, g, at_k, parity, place, outputs, memory, C: gl.constexpr):
    """Group w's share of tile g's dQ, and if there is a third, that in turn. Its buffer in shared memory must be free."""
    dq = start_dq(w, memory.ds, parity, memory.k, at_k, C)
    dq = warpgroup_mma_wait(0, deps=[dq])
    add_to_dq(w, dq, place, outputs, memory)
    if len(C.share_columns) == 3:
        if (g & 1) == w:
            third = start_dq(2, memory.ds, parity, memory.k, at_k, C)
            third = warpgroup_mma_wait(0, deps=[third])
            tma_store_wait(0)
            partition_barrier()
            add_to_dq(w, third, place + (2 - w) * 64, outputs, memory)


@gluon.jit
def give_last_dq(w: gl.constexpr, g, at_k, place, outputs, memory, C: gl.constexpr):
    """Likewise of a tile that none follows, when the other group has written its dS."""
    await_ds(w, stage_of(g), True)
    tma_store_wait(0)
    partition_barrier()
    give_dq(w, g, at_k, stage_of(g), place, outputs, memory, C)


@gluon.jit
def consume(w: gl.constexpr, block, before, place, work, outputs, lengths, heads, score, memory, MASKED: gl.constexpr,
            NOTED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """The CTA's block-th block that has tiles, with `before` of them before its first. place: where dQ of the tile before goes;
    returned is that of the last one."""
    # Group w's share of dQ: where it begins, in units of 64 numbers, of which 64 rows have `dim`.
    FIRST_SHARE: gl.constexpr = w * (C.head_dim if C.tile_q > HALF else C.share_columns[0])
    count = (work.end - work.begin) * work.group
    dk = no_result(C.wide, C.narrow)
    dv = no_result(C.wide_v, C.narrow_v)
    k_stage = block % C.k_stages
    mbarrier.wait(memory.k.full.index(k_stage), (block // C.k_stages) & 1)
    mbarrier.wait(memory.v.full.index(w), block & 1)
    held_k = hold(half_of(memory.k.part(k_stage), w), C.held_k, C.tile_q)
    held_v = hold(memory.v.part(w), C.held_v, C.tile_q)
    tile = work.begin
    row = work.row
    head = work.head_kv * work.group
    # The first tile without one before it, and the place of the K that the tile before had.
    if C.k_stages == 1:
        first = before
        at_k_before = k_stage
    else:
        first = gl.to_tensor(0)
        at_k_before = k_stage ^ (before > 0).to(gl.int32)
    for g in tl.range(before, before + count, disable_licm=True):
        if C.serial:
            dk, dv = serial_step(w, g, first, tile, head, place, dk, dv, work, outputs, lengths, score, memory, C)
        else:
            at_k = k_stage | (g >> 30)  # see `step`
            dk, dv = step(w, g, first, at_k, at_k_before, tile, head, place, held_k, held_v, dk, dv, work, outputs,
                          lengths, score, memory, MASKED, C)  # fmt: skip
            at_k_before = at_k
        mbarrier.arrive(memory.empty.index(stage_of(g)), count=1)
        place = (row + tile * C.tile_q) // 64 * C.head_dim + FIRST_SHARE
        tile += 1
        if tile == work.end:  # on to the next head of the group
            tile = work.begin
            row += heads.padded
            head += 1
    mbarrier.arrive(memory.v.empty.index(w), count=1)
    if C.k_stages == 1:
        give_last_dq(w, before + count - 1, before >> 30, place, outputs, memory, C)
        mbarrier.arrive(memory.k.empty.index(0), count=1)
    if NOTED:
        note_of_keys(w, dv, outputs.notes, work, lengths, heads)
        note_of_keys(w, dk, outputs.notes, work, lengths, heads)
    leave(w, dk, dv, work, outputs, lengths, memory, C)
    return place


@gluon.jit
def note_of_keys(w: gl.constexpr, result, notes, work, lengths, heads):
    """Write 1 to the note of 64 keys if their dK or dV has a NaN or an infinity, which a row may have caused that does not see
    them."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, result[0].type.layout)
    check = gl.full([HALF], 0.0, gl.float32, LAYOUT)
    for c in gl.static_range(len(result)):
        check += gl.convert_layout(gl.sum(result[c] * 0.0, 1), LAYOUT)
    blocks = (lengths.n_kv + HALF - 1) // HALF
    place = (work.batch * heads.heads_kv + work.head_kv) * blocks + work.first // HALF + w
    exists = work.first + w * HALF + gl.arange(0, HALF, LAYOUT) < work.n_kv
    gl.store(notes + place + gl.full([HALF], 0, gl.int32, LAYOUT), 1, mask=(check != 0.0) & exists)


@gluon.jit
def leave(w: gl.constexpr, dk, dv, work, outputs, lengths, memory, C: gl.constexpr):
    """Group w's dK and dV to global memory, by way of its place of dQ, one after the other."""
    tma_store_wait(0)
    copy_out(w, dv, 0, 1.0, memory.dq.index(w), outputs.dv, work, lengths)
    tma_store_wait(0)
    if C.head_dim <= 128:
        copy_out(w, dk, 0, outputs.scale, memory.dq.index(w), outputs.dk, work, lengths)
    else:  # more than the buffer holds
        copy_out(w, (dk[0],), 0, outputs.scale, memory.dq.index(w), outputs.dk, work, lengths)
        tma_store_wait(0)
        copy_out(w, (dk[1],), C.wide, outputs.scale, memory.dq.index(w), (outputs.dk[1],), work, lengths)


@gluon.jit
def copy_out(w: gl.constexpr, x, column: gl.constexpr, scale, buffer, descriptors, work, lengths):
    """Group w's dK or dV to global memory, chunks from a column on, by way of a share's buffer, which this thread knows to be
    free."""
    partition_barrier()
    staged = staged_chunks(x, buffer, descriptors[0].dtype)
    for c in gl.static_range(len(x)):
        result = x[c] * scale
        if lengths.used_kv is not None:  # keys that exist and are not used
            key = work.first + w * HALF + gl.arange(0, HALF, rows_of(x[c].shape[1]))
            result = gl.where((key < work.n_kv)[:, None], result, 0.0)
        staged[c].store(result.to(descriptors[c].dtype))
    fence_async_shared()
    partition_barrier()
    for c in gl.static_range(len(x)):
        place = coordinates(descriptors[c], work.start_kv, work.n_kv, work.batch, work.head_kv, work.first + w * HALF,
                            column + c * x[0].shape[1])  # fmt: skip
        tma_store(descriptors[c], place, staged[c].reshape(descriptors[c].block_type.shape))


@gluon.jit
def staged_chunks(x, buffer, dtype: gl.constexpr):
    """A share's buffer as one for the chunks, one after the other."""
    chunks = ()
    for c in gl.static_range(len(x)):
        chunks += (part_of(buffer, dtype, x[c].shape[1], c * x[0].shape[1] // x[c].shape[1]),)
    return chunks


@gluon.jit
def part_of(buffer, dtype: gl.constexpr, columns: gl.constexpr, index: gl.constexpr):
    return reinterpret(buffer, dtype, [128 // columns, HALF, columns], swizzled(dtype, columns)).index(index)


# ---- entry


NUMBERS = (
    *("heads", "heads_kv", "at_once", "rest", "all_heads", "blocks", "padded", "n_q", "n_kv", "left", "right", "prefix"),
    *SCORE_NUMBERS,
    *("dbias_batch", "dbias_head", "dbias_row", "dbias_key"),
)
"""Arguments that no kernel is specialised for: other lengths, bounds and strides do not recompile."""


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, do_wide, do_narrow, statistics_desc, dq_wide, dq_narrow,
    dk_wide, dk_narrow, dv_wide, dv_narrow, notes, counters, cu_q, cu_kv, used_q, used_kv,
    heads, heads_kv, at_once, rest, all_heads, blocks, padded, n_q, n_kv, left, right, prefix,
    inner, outer, slopes, slope_batch, slope_head, bias, bias_batch, bias_head, bias_row, bias_key,
    sinks, sink_stride, function, gradient, visible, document_q, document_q_batch, document_q_row, document_kv,
    document_kv_batch, document_kv_row, seed, threshold, kept_scale, spans,
    dbias, dbias_batch, dbias_head, dbias_row, dbias_key, scale,
    MASKED: gl.constexpr, NOTED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    memory = make_memory(q_wide.dtype, C)
    fence_async_shared()
    take_turn()
    inputs = (one_or_two(q_wide, q_narrow), one_or_two(k_wide, k_narrow), one_or_two(v_wide, v_narrow),
              one_or_two(do_wide, do_narrow), statistics_desc)  # fmt: skip
    outputs = Outputs(one_or_two(dq_wide, dq_narrow), one_or_two(dk_wide, dk_narrow), one_or_two(dv_wide, dv_narrow), notes,
                      BiasGradient(dbias, dbias_batch, dbias_head, dbias_row, dbias_key), scale)  # fmt: skip
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans)
    heads = Heads(heads, heads_kv, at_once, rest, all_heads, blocks, padded)
    score = Score(inner, outer, slopes, (slope_batch, slope_head), bias, (bias_batch, bias_head, bias_row, bias_key), sinks,
                  sink_stride, function, gradient, visible, document_q, document_kv,
                  (document_q_batch, document_q_row, document_kv_batch, document_kv_row), seed, threshold,
                  kept_scale)  # fmt: skip
    gl.warp_specialize([
        (consumer, (0, outputs, lengths, heads, score, memory, MASKED, NOTED, C)),
        (consumer, (1, outputs, lengths, heads, score, memory, MASKED, NOTED, C)),
        (producer, (inputs, counters, lengths, heads, score, memory, C)),
    ], [4, 1], [240, 24])  # fmt: skip
