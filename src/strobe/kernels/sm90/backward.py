"""Attention backward for Hopper in Gluon: dQ, dK, dV in one pass over the scores, for head dims up to 192 (of v up to 128).

The grid is persistent: a CTA takes blocks of 128 keys of one key head, one after the other, and walks over the tiles of
`tile_q` query rows that see them, of every query head that shares them. dK and dV stay in registers; what a tile adds to dQ
goes to an accumulator in global memory.

In packed sequences it walks from the last rows on, through all heads of a group at each: under a causal mask the CTAs of a head
all see those, read them together, and find them in the L2 cache (1099 -> 1006 us, H100, `tile_list`). Where all sequences have
one length that was slower: 0.92 to 1.01 of the speed (H100, head dims 64 and 128, 1k to 16k, with a group of four least). There
the heads come one after the other, each from its first rows on.

    P  = exp(S - LSE),  S = score(Q K^T)         computed again
    dV = P^T dO
    dP = dO V^T
    dS = P * (dP - delta),   delta = rowsum(O * dO) - dLSE
    dK = dS^T Q,  dQ = dS K                      times the scale

    role       warps          work
    producer   1              takes blocks from a counter, tells the consumers; copies K, V, and per tile Q, dO and the
                              statistics (LSE and delta) in (TMA)
    consumer   4 a group      64 of the keys: all five products on the tensor cores (wgmma)
    writer     1              where additions to dQ have an order: starts them (see `backward_order`)
    teller     1              likewise: says that they are done

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
and dO the parts whose sum is what is to be subtracted (`backward_pre_post`).

dQ of a tile is computed one tile later, when both halves of its dS have long been written. So the groups have no point at which
both must be at the same time: each announces its dS, and waits for the other's a tile later. One computes exponentials while
the other keeps the tensor cores busy. Where there are two places for K, that goes on from block to block: the last dQ of one is
computed beside the first tile of the next, whose K is there already. Else it ends a block, and the next K comes after it. The
first tile, of the CTA or the block, has no tile before it: its product multiplies leftovers, which may change meanwhile, and
nobody uses the result. (A branch around a product costs more. A tool that looks for races may report it.)

At head dim 192 that is too much for the registers: there S, dP and dQ come one after the other (`serial_step`), and the two
groups overlap each other alone.

dQ is added by the TMA, in float32. Nobody but `backward_pre_post.convert` reads the sums, so they are kept in the order in
which the registers of a group hold a result: a thread stores 16 bytes at a time to shared memory, without bank conflicts.
(Added from registers instead, by vector atomics, head dim 128 was 1-4 % slower, 64 1-9 %.)

The steps of a consumer stand in files of their own: `backward_tiles`, which tiles there are; `backward_products`;
`backward_scores`, from the products to dS; `backward_stores`, how the results leave.
"""

import triton.language as tl

from strobe.kernels.common.channel import at, make_barriers, make_chunks, swizzled
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.descriptors import one_or_two
from strobe.kernels.common.named_barrier import FIRST, announce, meet
from strobe.kernels.common.packed_halves import rounded, widened
from strobe.kernels.common.tile_scheduler import Lengths
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90 import backward_config as sizes
from strobe.kernels.sm90.backward_order import teller, writer
from strobe.kernels.sm90.backward_products import (
    finished,
    half_of,
    hold,
    no_result,
    start_dq,
    start_products,
    start_products_held,
    start_sum,
    subtract,
    to_subtract,
)
from strobe.kernels.sm90.backward_scores import (
    apply_mask_transposed,
    gradients_transposed,
    kept_weights_transposed,
    scores_transposed,
)
from strobe.kernels.sm90.backward_stores import add_to_dq, first_share, flat, leave, note_of_keys
from strobe.kernels.sm90.backward_tiles import (
    HALF,
    KEYS,
    STAGES,
    STORED_NUMBERS,
    KeyHeads,
    Numbers,
    StoredTiles,
    fetch,
    make_numbers,
    phase_of,
    publish,
    stage_of,
    work_of,
)
from strobe.kernels.sm90.descriptors import copy_in
from strobe.kernels.sm90.scores import SCORE_NUMBERS, BiasGradient, Score, score_of, slope_of

PRODUCT = gl.constexpr(sizes.PRODUCT)

DS_READY = gl.constexpr(FIRST.value)
"""The first of four named barriers: DS_READY + 2 * reader + parity (see `announce_ds`)."""
TURN = gl.constexpr(FIRST.value + 4)
"""The first of two named barriers: TURN + w says that group w may issue its products."""


# ---- what the roles share


@aggregate
class Block:
    """Shared memory of K, chunks of [k_stages, 128, columns], or V, chunks of [2, 64, columns], with its barriers."""

    chunks: gl.tuple
    full: gl.shared_memory_descriptor
    empty: (gl.shared_memory_descriptor, gl.constexpr)

    @gluon.jit
    def part(self, index):
        return at(self.chunks, index)


@aggregate
class Memory:
    """The shared memory of a CTA: see the table above. q, do are tuples of chunks."""

    numbers: Numbers
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
    dq_full: (gl.shared_memory_descriptor, gl.constexpr)
    dq_empty: (gl.shared_memory_descriptor, gl.constexpr)
    dq_added: (gl.shared_memory_descriptor, gl.constexpr)
    dq_told: (gl.shared_memory_descriptor, gl.constexpr)
    writers_numbers: (Numbers, gl.constexpr)


@gluon.jit
def make_memory(dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    k_empty = make_barriers(1, 2) if C.k_stages == 1 else None
    return Memory(
        make_numbers(2),
        Block(make_chunks(dtype, C.k_stages, KEYS, C.wide, C.narrow), make_barriers(C.k_stages, 1), k_empty),
        Block(make_chunks(dtype, 2, HALF, C.wide_v, C.narrow_v), make_barriers(2, 1), make_barriers(2, 1)),
        make_chunks(dtype, STAGES, C.tile_q, C.wide, C.narrow),
        make_chunks(dtype, STAGES, C.tile_q, C.wide_v, C.narrow_v),
        make_statistics(C),
        make_ones(C),
        make_barriers(STAGES, 3),
        make_barriers(STAGES, 2),
        make_ds(dtype, 2 * KEYS // C.ds_keys, C.ds_keys, C.tile_q),
        gl.allocate_shared_memory(gl.float32, [2, 16, 256], flat(2)),
        make_barriers(2, 1) if C.order != 0 else None,
        make_barriers(2, 1) if C.order != 0 else None,
        make_barriers(1, 1) if C.order != 0 else None,
        make_barriers(1, 1) if C.order != 0 else None,
        make_numbers(2) if C.order != 0 else None,
    )


@gluon.jit
def make_ds(dtype: gl.constexpr, number: gl.constexpr, keys: gl.constexpr, rows: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([keys, rows], dtype)
    return gl.allocate_shared_memory(dtype, [number, keys, rows], LAYOUT)


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


@aggregate
class Outputs:
    """dq, dk, dv: TMA descriptors, of the shares of dQ's accumulator that each group adds, and of chunks. ds: where dS goes, if
    it is stored. flags: int32, of dQ's order, if it has one (see `backward_order`). notes: int32, one for 64 keys. dbias: see
    `BiasGradient`. scale: of dK."""

    dq: gl.tuple
    ds: StoredTiles
    dk: gl.tuple
    dv: gl.tuple
    flags: (gl.tensor, gl.constexpr)
    notes: gl.tensor
    dbias: BiasGradient
    scale: gl.tensor


@aggregate
class Kernel:
    """What every role takes. inputs: the descriptors of q, k, v and do, a tuple of chunks each, and that of the statistics.
    counters: int32, of blocks and of CTAs that have ended. first: number of the launch's first block. memory: see the table
    above. listed: the blocks of packed sequences (see `tile_list`), or None. MASKED: whether a tile may have rows that do not
    see a key. NOTED: whether 64 keys are noted whose gradients are not finite."""

    inputs: gl.tuple
    outputs: Outputs
    counters: gl.tensor
    first: gl.tensor
    lengths: Lengths
    heads: KeyHeads
    score: Score
    memory: Memory
    listed: (gl.tensor, gl.constexpr)
    MASKED: gl.constexpr
    NOTED: gl.constexpr
    C: gl.constexpr


# ---- producer


@gluon.jit
def producer(K):
    turn = 0
    block = 0
    first = gl.to_tensor(0)  # the first tile of the block before
    g = gl.to_tensor(0)
    number = K.first + gl.program_id(0) if K.C.order == 0 else next_number(K)
    while number < K.heads.blocks:
        publish(turn, number, K.memory.numbers)
        work = work_of(K, number)
        if work.begin < work.end:
            copy_tile(K, 0, g, work)
            if K.C.k_stages == 2:
                # The K in its place has been read when both groups are done with the first tile of the block before.
                if g - first == 1:
                    mbarrier.wait(K.memory.empty.index(stage_of(first)), phase_of(first))
            else:
                mbarrier.wait(K.memory.k.empty.index(0), (block & 1) ^ 1)
            copy_k(K, block, work)
            if K.C.order != 0:
                publish(block, number, K.memory.writers_numbers)
            copy_v(K, block, work)
            count = (work.end - work.begin) * work.group
            for i in tl.range(1, count):
                copy_tile(K, i, g + i, work)
            first = g
            g += count
            block += 1
        turn += 1
        number = next_number(K)
    publish(turn, number, K.memory.numbers)
    if K.C.order != 0:
        publish(block, number, K.memory.writers_numbers)
    # The last CTA to end leaves the counters as it found them, for the next launch.
    if gl.atomic_add(K.counters + 1, 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(K.counters, 0)
        gl.atomic_xchg(K.counters + 1, 0)


@gluon.jit
def next_number(K):
    """The next block that nobody has taken. The first ones are the CTAs' own, unless some wait for others, as the GPU may not
    yet run them. Relaxed, as it says nothing of memory: else the producer waits for all that the multiprocessor has under way
    (MEMBAR.GPU). Of the time before, H200, head dim 128, 1k, 4k, 16k: 0.994, 0.998, 0.987, causal 0.997, 0.996, 0.984."""
    number = gl.atomic_add(K.counters, 1, sem="relaxed") + K.first
    return number + gl.num_programs(0) if K.C.order == 0 else number


@gluon.jit
def copy_k(K, block, work):
    """Start the copies of the CTA's block-th K, whose place must be free."""
    stage = block % K.C.k_stages
    copy_in(K.inputs[1], K.memory.k.part(stage), K.memory.k.full.index(stage), work.start_kv, work.n_kv, work.batch,
            work.head_kv, work.first)  # fmt: skip


@gluon.jit
def copy_v(K, block, work):
    """Start the copies of the CTA's block-th V: each half when its group has read the one before."""
    for half in gl.static_range(2):
        mbarrier.wait(K.memory.v.empty.index(half), (block & 1) ^ 1)
        copy_in(K.inputs[2], K.memory.v.part(half), K.memory.v.full.index(half), work.start_kv, work.n_kv, work.batch,
                work.head_kv, work.first + half * HALF)  # fmt: skip


@gluon.jit
def copy_tile(K, i, g, work):
    """Start the copies of the i-th tile of a block, which is the CTA's g-th."""
    q_desc, _k_desc, _v_desc, do_desc, statistics_desc = K.inputs
    if K.listed is None and not K.C.downwards:
        tiles = work.end - work.begin
        member = i // tiles
        row = (work.begin + i % tiles) * K.C.tile_q
    else:
        member = i % work.group
        row = (work.end - 1 - i // work.group) * K.C.tile_q
    head = work.head_kv * work.group + member
    stage = stage_of(g)
    full = K.memory.full.index(stage)
    mbarrier.wait(K.memory.empty.index(stage), phase_of(g) ^ 1)
    copy_in(q_desc, at(K.memory.q, stage), full, work.start_q, work.n_q, work.batch, head, row)
    mbarrier.expect(full, K.C.statistics_bytes)
    place = (work.row + member * K.heads.padded + row) * 2
    tma_load(statistics_desc, [place, 0] if K.C.folded else [place], full, K.memory.statistics.index(stage))
    copy_in(do_desc, at(K.memory.do, stage), full, work.start_q, work.n_q, work.batch, head, row)


# ---- consumer


@gluon.jit
def consumer(w: gl.constexpr, K):
    turn = 0
    block = 0
    g = gl.to_tensor(0)
    place = gl.to_tensor(0)
    if K.C.turns and w == 1:
        announce(TURN)
    number = fetch(turn, K.memory.numbers)
    while number < K.heads.blocks:
        work = work_of(K, number)
        if work.begin < work.end:
            place = consume(w, K, block, g, place, work)
            g += (work.end - work.begin) * work.group
            block += 1
        elif work.first < work.n_kv:
            leave(w, K, no_result(K.C.wide, K.C.narrow), no_result(K.C.wide_v, K.C.narrow_v), g, work)
        turn += 1
        number = fetch(turn, K.memory.numbers)
    if K.C.turns and w == 0:
        meet(TURN)
    if K.C.k_stages == 2 and not K.C.stored:
        if g > 0:
            give_last_dq(w, K, g - 1, (block - 1) & 1, place)
    tma_store_wait(0)


@gluon.jit
def consume(w: gl.constexpr, K, block, before, place, work):
    """The CTA's block-th block that has tiles, with `before` of them before its first. place: where dQ of the tile before goes;
    returned is that of the last one."""
    count = (work.end - work.begin) * work.group
    dk = no_result(K.C.wide, K.C.narrow)
    dv = no_result(K.C.wide_v, K.C.narrow_v)
    k_stage = block % K.C.k_stages
    mbarrier.wait(K.memory.k.full.index(k_stage), (block // K.C.k_stages) & 1)
    mbarrier.wait(K.memory.v.full.index(w), block & 1)
    if K.C.dq_waits_once:
        tma_store_wait(0)  # dK has left memory.dq
        partition_barrier()
    held_k = hold(half_of(K.memory.k.part(k_stage), w), K.C.held_k, K.C.tile_q)
    held_v = hold(K.memory.v.part(w), K.C.held_v, K.C.tile_q)
    UPWARDS: gl.constexpr = K.listed is None and not K.C.downwards
    tile = work.begin if UPWARDS else work.end - 1
    row = work.row
    head = work.head_kv * work.group
    member = gl.to_tensor(0)
    # The first tile without one before it, and the place of the K that the tile before had.
    if K.C.k_stages == 1:
        first = before
        at_k_before = k_stage
    else:
        first = gl.to_tensor(0)
        at_k_before = k_stage ^ (before > 0).to(gl.int32)
    for g in tl.range(before, before + count, disable_licm=True):
        if K.C.serial:
            dk, dv = serial_step(w, K, g, first, tile, head, place, dk, dv, work)
        else:
            at_k = k_stage | (g >> 30)  # see `step`
            dk, dv = step(w, K, g, first, at_k, at_k_before, tile, head, place, held_k, held_v, dk, dv, work)
            at_k_before = at_k
        mbarrier.arrive(K.memory.empty.index(stage_of(g)), count=1)
        place = (row + tile * K.C.tile_q) // 64 * K.C.head_dim + first_share(w, K.C)
        if UPWARDS:
            tile += 1
            if tile == work.end:  # on to the next head of the group
                tile = work.begin
                row += K.heads.padded
                head += 1
        else:
            member += 1
            if member == work.group:  # on to the rows before
                member = member * 0
                tile -= 1
            row = work.row + member * K.heads.padded
            head = work.head_kv * work.group + member
    mbarrier.arrive(K.memory.v.empty.index(w), count=1)
    if K.C.k_stages == 1:
        if not K.C.stored:
            give_last_dq(w, K, before + count - 1, before >> 30, place)
        mbarrier.arrive(K.memory.k.empty.index(0), count=1)
    if K.NOTED:
        note_of_keys(w, K, dv, work)
        note_of_keys(w, K, dk, work)
    leave(w, K, dk, dv, before + count, work)
    return place


@gluon.jit
def step(w: gl.constexpr, K, g, first, at_k, at_k_before, tile, head, place, held_k, held_v, dk, dv, work):
    """Tile g, with the K of a place: its parts of dK and dV added, and, unless it is the first one, dQ of the tile before, to
    `place`."""
    dtype: gl.constexpr = K.memory.q[0].dtype
    stage = stage_of(g)
    # V lies at a fixed place. If the compiler knew, it would keep the descriptors of all its parts in registers.
    fixed = g >> 30
    q = at(K.memory.q, stage)
    do = at(K.memory.do, stage)
    mbarrier.wait(K.memory.full.index(stage), phase_of(g))
    s = start_products_held(half_of(K.memory.k.part(at_k), w), held_k, q)
    s = subtract(s, 0, stage, K.memory, K.C)
    dp = start_products_held(K.memory.v.part(fixed + w), held_v, do)
    dp = subtract(dp, K.C.tile_q, stage, K.memory, K.C)
    s = warpgroup_mma_wait(K.C.products_dp, deps=[s])
    lse = to_subtract(0, stage, K.memory, K.C)
    row = tile * K.C.tile_q
    slope = slope_of(work.batch, head, K.score)
    x, factor, of_function = scores_transposed(s, w, row, head, slope, work, K.score)
    x = x - lse
    if K.MASKED:
        if (tile < work.full_begin) | (tile >= work.full_end):
            x = apply_mask_transposed(w, K, x, float("-inf"), row, head, work)
    p = gl.exp2(x)
    kept = kept_weights_transposed(p, w, row, head, work, K.score)
    dp, p = warpgroup_mma_wait(0, deps=[dp, p])
    delta = to_subtract(K.C.tile_q, stage, K.memory, K.C)  # as late as that, for the registers
    ds = gradients_transposed(w, K, p, kept, dp, delta, factor, of_function, row, head, work).to(dtype)
    p = p.to(dtype) if K.score.seed is None else kept.to(dtype)

    if K.C.turns:
        meet(TURN + w)
    if not K.C.stored:
        await_ds(w, stage ^ 1, g > first)
        dq = start_dq(w, K, stage ^ 1, at_k_before)  # before the first tile there is none: of leftovers
    dv = start_sum(dv, p, do)
    put_ds(w, stage, ds, K)
    dk = start_sum(dk, ds, q)
    if K.C.turns:
        announce(TURN + 1 - w)
    if K.C.stored:
        send_ds(w, K, stage, row, head, work)
    else:
        dq = warpgroup_mma_wait(K.C.products_v + K.C.products, deps=[dq])
        announce_ds(w, stage)
        if g > first:
            add_to_dq(w, dq, place, g - 1, K)
    dv = finished(dv, 0)
    dk = finished(dk, 0)
    return dk, dv


@gluon.jit
def serial_step(w: gl.constexpr, K, g, first, tile, head, place, dk, dv, work):
    """Tile g as in `step`, where the registers have room for one of S, dP and dQ beside dK and dV: one after the other. P is
    rounded before dP is computed, and dS is made of the rounded P.

    The mask comes after the exponentials, and whether a tile needs one is asked whatever the mask: the compiler moves no
    product to before a branch, so that S is gone when dP is computed."""
    dtype: gl.constexpr = K.memory.q[0].dtype
    stage = stage_of(g)
    fixed = g >> 30  # see `step`
    q = at(K.memory.q, stage)
    do = at(K.memory.do, stage)
    mbarrier.wait(K.memory.full.index(stage), phase_of(g))
    s = start_products(half_of(K.memory.k.part(fixed), w), q)
    s = warpgroup_mma_wait(0, deps=[s])
    lse = to_subtract(0, stage, K.memory, K.C)
    row = tile * K.C.tile_q
    slope = slope_of(work.batch, head, K.score)
    x, factor, of_function = scores_transposed(s, w, row, head, slope, work, K.score)
    x = x - lse
    p = gl.exp2(x)
    if (tile < work.full_begin) | (tile >= work.full_end):
        p = apply_mask_transposed(w, K, p, 0.0, row, head, work)
    kept = rounded(kept_weights_transposed(p, w, row, head, work, K.score), dtype)
    p = kept if K.score.seed is None else rounded(p, dtype)
    dp = start_products(K.memory.v.part(fixed + w), do)
    delta = to_subtract(K.C.tile_q, stage, K.memory, K.C)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = gradients_transposed(w, K, widened(p), widened(kept), dp, delta, factor, of_function, row, head, work).to(dtype)
    dv = start_sum(dv, kept, do)
    if not K.C.stored:
        await_ds(w, stage ^ 1, g > first)
    put_ds(w, stage, ds, K)
    dk = start_sum(dk, ds, q)
    if K.C.stored:
        send_ds(w, K, stage, row, head, work)
    dv = finished(dv, K.C.products)
    dk = finished(dk, 0)
    if not K.C.stored:
        if g > first:
            give_dq(w, K, g - 1, fixed, stage ^ 1, place)
        announce_ds(w, stage)
    return dk, dv


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
def put_ds(w: gl.constexpr, parity, ds, K):
    if K.C.stored:
        K.memory.ds.index(2 * w + parity).store(ds)  # `send_ds` of the tile before has found it empty
    else:
        if not K.C.dq_waits_once:
            tma_store_wait(0)  # what was in memory.dq has left
            partition_barrier()
        K.memory.ds.index(parity).slice(w * HALF, HALF).store(ds)
    fence_async_shared()


@gluon.jit
def send_ds(w: gl.constexpr, K, parity, row, head, work):
    """Start the copy of this group's dS to global memory. What was in its other place has left."""
    tma_store_wait(0)
    partition_barrier()
    place = K.outputs.ds.place(work.batch * K.heads.heads + head, work.first + w * HALF, row, work, K.lengths)
    tma_store(K.outputs.ds.descriptor[0], place, K.memory.ds.index(2 * w + parity))


@gluon.jit
def give_dq(w: gl.constexpr, K, g, at_k, parity, place):
    """Group w's share of tile g's dQ, and if there is a third, that in turn. Its buffer in shared memory must be free."""
    dq = start_dq(w, K, parity, at_k)
    dq = warpgroup_mma_wait(0, deps=[dq])
    add_to_dq(w, dq, place, g, K)
    if len(K.C.share_columns) == 3:
        if (g & 1) == w:
            third = start_dq(2, K, parity, at_k)
            third = warpgroup_mma_wait(0, deps=[third])
            tma_store_wait(0)
            partition_barrier()
            add_to_dq(w, third, place + (2 - w) * 64, g, K)


@gluon.jit
def give_last_dq(w: gl.constexpr, K, g, at_k, place):
    """Give group w's share of the dQ of a tile that none follows, when the other group has written its dS."""
    await_ds(w, stage_of(g), True)
    tma_store_wait(0)
    partition_barrier()
    give_dq(w, K, g, at_k, stage_of(g), place)


# ---- entry


NUMBERS = (
    *("heads", "heads_kv", "at_once", "rest", "all_heads", "blocks", "padded", "n_q", "n_kv", "left", "right", "prefix"),
    *SCORE_NUMBERS,
    *("dbias_batch", "dbias_head", "dbias_row", "dbias_key"),
    *("total_q", "total_kv", "first", *STORED_NUMBERS),
)
"""Arguments that no kernel is specialised for: other lengths, bounds and strides do not recompile."""


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, do_wide, do_narrow, statistics_desc, dq_wide, dq_narrow,
    dk_wide, dk_narrow, dv_wide, dv_narrow, ds, stored_heads, stored_pairs, flags, notes, first, counters, listed,
    cu_q, cu_kv, used_q, used_kv,
    heads, heads_kv, at_once, rest, all_heads, blocks, padded, n_q, n_kv, left, right, prefix,
    terms, threshold, slope_batch, slope_head, bias_batch, bias_head, bias_row, bias_key,
    document_q_batch, document_q_row, document_kv_batch, sink_stride, document_kv_row, spans,
    dbias, dbias_batch, dbias_head, dbias_row, dbias_key, scale, total_q, total_kv,
    MASKED: gl.constexpr, NOTED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    # Numbers are parameters one by one: Triton 3.6 to 3.9 specialises a kernel for those of a tuple, `do_not_specialize` or not
    # (see `scores.SCORE_NUMBERS`).
    memory = make_memory(q_wide.dtype, C)
    fence_async_shared()
    take_turn()
    inputs = (one_or_two(q_wide, q_narrow), one_or_two(k_wide, k_narrow), one_or_two(v_wide, v_narrow),
              one_or_two(do_wide, do_narrow), statistics_desc)  # fmt: skip
    outputs = Outputs(one_or_two(dq_wide, dq_narrow), StoredTiles(one_or_two(ds, None), stored_heads, stored_pairs),
                      one_or_two(dk_wide, dk_narrow), one_or_two(dv_wide, dv_narrow), flags, notes,
                      BiasGradient(dbias, dbias_batch, dbias_head, dbias_row, dbias_key), scale)  # fmt: skip
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans, total_q, total_kv)
    if listed is not None:
        blocks = gl.load(listed) * heads_kv
    heads = KeyHeads(heads, heads_kv, at_once, rest, all_heads, blocks, padded)
    score = score_of(terms, (slope_batch, slope_head), (bias_batch, bias_head, bias_row, bias_key), sink_stride,
                     (document_q_batch, document_q_row, document_kv_batch, document_kv_row), threshold)  # fmt: skip
    K = Kernel(inputs, outputs, counters, first, lengths, heads, score, memory, listed, MASKED, NOTED, C)
    if C.order == 0:
        gl.warp_specialize([(consumer, (0, K)), (consumer, (1, K)), (producer, (K,))], [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(consumer, (0, K)), (consumer, (1, K)), (producer, (K,)), (writer, (K,)), (teller, (K,))],
            [4, 1, 1, 1], [240, 24, 24, 24],
        )  # fmt: skip
