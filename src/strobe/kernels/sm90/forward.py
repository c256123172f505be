"""Attention forward for Hopper in Gluon: TMA, wgmma, warp specialisation, an optimistic softmax.

The grid is persistent: a CTA takes tiles of `tile_q` query rows of one head, one after the other; or of two heads or three that
share keys, the same rows of one for each group of consumers (`Config.tile_heads`). Its warps have roles:

    role       warps          work
    producer   1              takes tiles from a counter, tells the consumers; copies Q and blocks of K and V in (TMA); over a
                              cache a second warp copies V, as pages have to be looked up
    consumer   4 a group      64 query rows: S = Q K^T and O += P V on the tensor cores (wgmma), softmax in between

    shared memory     shape                                  filled by    read by
    q                 [q_stages * groups, 64, head_dim]      producer     group w its own 64 rows
    k, v (Channel)    [num_stages, tile_kv, head_dim]        producer     all groups
    tiles             [slots, fields]                            producer     all groups: where the tile is, its key blocks
    o                 [o_buffers * groups, 64, o_columns]    consumers    the TMA, which writes it to global memory

    barrier              arrivals             says
    q_full[stage, w]     TMA bytes            group w's rows of Q are there
    q_empty[stage, w]    group w              its last product with them is done
    k.full, v.full       TMA bytes            a block is there
    k.empty, v.empty     one a group          every group has read the block
    tile_full[slot]      producer             the next tile is known
    tile_empty[slot]     one a group          every group has read it (and the producer of V, if there is one)

The work of a consumer is one stream of key blocks g = 0, 1, 2 ... across its tiles. Step g issues S = Q K(g)^T and
O += P(g - 1) V(g - 1) together, and turns S into P(g) while the second still runs. At a tile's end Q and K(g) are those
of the next tile: the tensor cores see no boundary. With one Q stage they do, as Q comes when the last product with the one
before is done; K is there by then.

The softmax is optimistic (docs/optimistic_softmax.md). Any reference m gives the same quotient, sum 2^(s - m) v over
sum 2^(s - m): m is the row maximum of the tile's first block, and stays. There is no running maximum, no rescaling of O,
and nothing to wait for before the first exponential. A sum that leaves its range is seen at the tile's end and noted;
another kernel computes those rows again. The first block is the leftmost that all rows see whole: it has enough keys to
judge by, and often the ones that all rows like. The others follow from left to right: CTAs that began together read the same
blocks together. (From right to left causal problems from 4k on took up to 6% longer, and 2% less at best.)

Only blocks outside [full_begin, full_end) are masked, by a branch that all threads take together; there documents are compared
pair by pair, those of the keys loaded while S is computed. A user's mask is asked about every pair.

The accumulator layout gives a row to the four lanes of a quad. Row sums stay within the lane until the end.
"""

import triton.language as tl

from strobe.kernels import workspace
from strobe.kernels.common.channel import Channel, at, make_barriers, make_channel, make_chunks
from strobe.kernels.common.dependent_launch import let_next_begin, take_turn
from strobe.kernels.common.descriptors import coordinates, one_or_two
from strobe.kernels.common.groups import block_of, make_groups
from strobe.kernels.common.optimistic import BOUNDS
from strobe.kernels.common.scores import LN2
from strobe.kernels.common.stamp import stamp
from strobe.kernels.common.tile_scheduler import Heads, Lengths
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tensor_descriptor,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90.descriptors import copy_in
from strobe.kernels.sm90.layouts import ROWS, accumulator, rows_of
from strobe.kernels.sm90.pages import CACHE_NUMBERS, Pages, copy_pages, note_missing, producer_of_v
from strobe.kernels.sm90.scores import (
    SCORE_NUMBERS,
    Score,
    apply_mask,
    ask_function,
    compare_documents,
    documents_of_block,
    is_whole,
    kept_weights,
    score_of,
    scores_of,
    seen_by,
    sink_of,
)
from strobe.kernels.sm90.tile_queue import (
    FIELDS,
    fetch,
    first_block,
    first_tile,
    head_of_group,
    later_block,
    lead_of,
    next_tile,
    place_of,
    position_and_note_of,
    publish,
    row_of_head,
    with_keys,
)

NOTED, SHARES = gl.constexpr(workspace.NOTED), gl.constexpr(workspace.SHARES)


@gluon.constexpr_function
def bounds_of(dtype):
    return BOUNDS["bfloat16" if dtype == gl.bfloat16 else "float16"]


# ---- what the roles share


@aggregate
class Outputs:
    """descriptor: of O, in pieces of o_columns. lse: float32 as `lse_shape` says. notes: int32, one for 64 rows. rows: query
    rows in all (packed)."""

    descriptor: tensor_descriptor
    lse: gl.tensor
    notes: gl.tensor
    rows: gl.tensor


@aggregate
class Memory:
    """The shared memory of a CTA: see the table above. q is a tuple of chunks."""

    q: gl.tuple
    o: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor


@gluon.jit
def make_memory(dtype: gl.constexpr, o_dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    Q_BUFFERS: gl.constexpr = C.q_stages * C.groups
    O_BUFFERS: gl.constexpr = C.o_buffers * C.groups
    return Memory(
        make_chunks(dtype, Q_BUFFERS, ROWS, C.wide, C.narrow),
        make_chunks(o_dtype, O_BUFFERS, ROWS, C.o_columns, 0)[0],
        gl.allocate_shared_memory(gl.int32, [C.slots * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        make_barriers(Q_BUFFERS, 1),
        make_barriers(Q_BUFFERS, 1),
        make_barriers(C.slots, 1),
        make_barriers(C.slots, C.groups + C.producers - 1),
    )


@gluon.jit
def make_ring(dtype: gl.constexpr, wide: gl.constexpr, narrow: gl.constexpr, C: gl.constexpr):
    """The channel of K or of V. The caller fences."""
    if C.grouped:
        blocks = (make_groups(dtype, C.num_stages, C.tile_kv, wide),)
        return Channel(blocks, make_barriers(C.num_stages, 1), make_barriers(C.num_stages, C.groups), C.num_stages)
    else:
        return make_channel(dtype, C.num_stages, C.tile_kv, wide, narrow, C.groups)


@aggregate
class Kernel:
    """What every role takes. inputs: the descriptors of q, k and v, a tuple of chunks each. counters: int32, of tiles and of
    CTAs that have ended. memory, k, v: see the tables above. pages: of a cache, or None. trace: where stamps go, or None.
    listed: the tiles of packed sequences (see `tile_list`), or None. MASKED: whether a block may have keys that a row does not
    see."""

    inputs: gl.tuple
    outputs: Outputs
    counters: gl.tensor
    lengths: Lengths
    heads: Heads
    score: Score
    memory: Memory
    k: Channel
    v: Channel
    pages: (Pages, gl.constexpr)
    trace: (gl.tensor, gl.constexpr)
    listed: (gl.tensor, gl.constexpr)
    MASKED: gl.constexpr
    C: gl.constexpr


# ---- producer


@gluon.jit
def copy_k(K, g, work, kv_head, i):
    """Start the copy of block i of K to position g."""
    if K.C.box == 0:
        copy_in(K.inputs[1], K.k.block(g), K.k.acquire(g), work.start_kv, work.n_kv, work.batch, kv_head, i * K.C.tile_kv)
    else:
        note_missing(K, work, copy_pages(K.pages, K.inputs[1], K.k, g, K.pages.k_page, work.n_kv, work.batch, kv_head, i, K.C))


@gluon.jit
def copy_v(K, g, start, n, batch, kv_head, i):
    """Start the copy of block i of V to position g. (Over a cache `producer_of_v` does.)"""
    if K.C.box == 0:
        copy_in(K.inputs[2], K.v.block(g), K.v.acquire(g), start, n, batch, kv_head, i * K.C.tile_kv)


@gluon.jit
def producer(K):
    GROUPS: gl.constexpr = K.C.groups
    turn = 0
    g = gl.to_tensor(0)
    if K.listed is None:
        # For all roles, which begin meanwhile: the others touch no memory before they know a tile. On an H100 16 x 256, 8 heads
        # of 160 took 20.5 us, with the turn ahead of the roles 21.6; others were level.
        take_turn()
    if gl.program_id(0) == 0:
        gl.store(K.counters + SHARES, 0)  # of the notes, which nobody looks at now
    tile, work = with_keys(K, first_tile(K))
    publish(K, turn, tile, work)
    while tile < K.heads.tiles:
        kv_head = work.head // K.heads.group
        lead = first_block(work.begin, work.end, work.full_begin, work.full_end, K.lengths, K.score)
        i = lead
        copy_k(K, g, work, kv_head, i)
        stamp(K.trace, GROUPS, "k_issued", g)
        for w in gl.static_range(GROUPS):
            slot = (turn % K.C.q_stages) * GROUPS + w
            mbarrier.wait(K.memory.q_empty.index(slot), ((turn // K.C.q_stages) & 1) ^ 1)
            copy_in(K.inputs[0], at(K.memory.q, slot), K.memory.q_full.index(slot), work.start_q, work.n_q, work.batch,
                    head_of_group(w, work.head, K.C), row_of_head(w, work.row, work.head, K))  # fmt: skip
        for j in tl.range(1, work.blocks()):
            g += 1
            next = later_block(j, work.begin, lead)
            copy_k(K, g, work, kv_head, next)
            stamp(K.trace, GROUPS, "k_issued", g)
            copy_v(K, g - 1, work.start_kv, work.n_kv, work.batch, kv_head, i)
            stamp(K.trace, GROUPS, "v_issued", g - 1)
            i = next
        # The next tile is asked for as late as may be, or the CTAs would not end together.
        turn += 1
        n_kv = work.n_kv
        start_kv = work.start_kv
        batch = work.batch
        tile, work = with_keys(K, next_tile(K, tile))
        publish(K, turn, tile, work)
        copy_v(K, g, start_kv, n_kv, batch, kv_head, i)
        stamp(K.trace, GROUPS, "v_issued", g)
        g += 1
    if not K.C.static:
        # The last CTA to end leaves the counters as it found them, for the next launch.
        if gl.atomic_add(K.counters + 1, 1) == gl.num_programs(0) - 1:
            gl.atomic_xchg(K.counters, 0, sem="relaxed")
            gl.atomic_xchg(K.counters + 1, 0, sem="relaxed")


# ---- consumer


@gluon.jit
def pass_over(channel, begin, end):
    """Release the positions begin..end, which only other groups look at. (They have to be full first: a release would count for
    the block before.)"""
    for position in tl.range(begin, end, disable_licm=True):
        channel.wait(position)
        channel.release(position)


@gluon.jit
def start_scores(q, k, C: gl.constexpr):
    """S = Q K^T."""
    s = gl.full([ROWS, C.tile_kv], 0.0, gl.float32, accumulator(C.tile_kv))
    for c in gl.static_range(len(q)):
        s = warpgroup_mma(q[c], k[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def start_output(acc, p, v):
    """O += P V."""
    new = ()
    for c in gl.static_range(len(v)):
        new += (warpgroup_mma(operand(p, v[c].shape[1], v[c].dtype), v[c], acc[c], is_async=True),)
    return new


@gluon.jit
def operand(p, columns: gl.constexpr, dtype: gl.constexpr):
    """P as the register operand of a product: the accumulator's registers are already in its order."""
    return gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=accumulator(columns), k_width=2))


@gluon.jit
def wait_output(acc):
    done = ()
    for c in gl.static_range(len(acc)):
        done += (warpgroup_mma_wait(0, deps=[acc[c]]),)
    return done


@gluon.jit
def no_output(C: gl.constexpr):
    acc = (gl.full([ROWS, C.wide_v], 0.0, gl.float32, accumulator(C.wide_v)),)
    if C.narrow_v > 0:
        acc += (gl.full([ROWS, C.narrow_v], 0.0, gl.float32, accumulator(C.narrow_v)),)
    return acc


@gluon.jit
def lane_sums(p):
    """Row sums within each lane: [rows, columns] -> [rows, 4], a column for each lane of the quad that has the row."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def row_max(s):
    """gl.max(s, 1) in eight chains a thread instead of two: a maximum waits for the one before it."""
    x = gl.reshape(s, [s.shape[0], 4, s.shape[1] // 32, 4, 2])
    return gl.convert_layout(gl.max(gl.max(gl.max(gl.max(x, 2), 3), 1), 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def shift_of(m, GUARDED: gl.constexpr):
    """What to count exponents from, given a maximum: not from that of a row which has seen nothing, as -inf - -inf is NaN."""
    if GUARDED:
        return gl.where(m == float("-inf"), 0.0, m)
    else:
        return m


@gluon.jit
def weights(s, m, scale):
    """P = 2^(scale S - m)."""
    return gl.exp2(s * scale - m[:, None])


@gluon.jit
def masked_scores(K, s, i, documents, tile):
    """q.k of block i -> (scores, by what they have yet to be multiplied); -inf where a row does not see a key."""
    s, scale = scores_of(K, s, i, tile)
    if K.MASKED:
        if not is_whole(i, tile):
            s = apply_mask(s, i, tile, K.lengths, K.C)
            s = compare_documents(s, documents, tile, K.score)
    s = ask_function(K, s, i, tile)
    return s, scale


@gluon.jit
def first_weights(K, s, documents, tile, dtype: gl.constexpr):
    """(m, row sums) and P of a tile's first block. m: what exponents are counted from, or with the safe softmax the maximum."""
    GUARDED: gl.constexpr = K.MASKED or K.score.CHANGED
    s, scale = masked_scores(K, s, lead_of(tile), documents, tile)
    m = row_max(s) * scale
    shift = shift_of(m, GUARDED)
    p = weights(s, shift, scale)
    kept = kept_weights(K, p, lead_of(tile), tile).to(dtype)
    if K.C.optimistic:
        return (shift, lane_sums(p)), kept
    else:
        return (m, lane_sums(p)), kept


@gluon.jit
def later_weights(K, state, s, i, documents, tile):
    """The state with a later block, its P, and the factor of what was summed before (with the safe softmax)."""
    m, row_sum = state
    s, scale = masked_scores(K, s, i, documents, tile)
    if K.C.optimistic:
        p = weights(s, m, scale)
        return (m, row_sum + lane_sums(p)), kept_weights(K, p, i, tile), m
    else:
        GUARDED: gl.constexpr = K.MASKED or K.score.CHANGED
        new_m = gl.maximum(m, row_max(s) * scale)
        shift = shift_of(new_m, GUARDED)
        factor = gl.exp2(m - shift)
        p = weights(s, shift, scale)
        factors = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        return (new_m, row_sum * factors + lane_sums(p)), kept_weights(K, p, i, tile), factor


@gluon.jit
def step(w: gl.constexpr, K, before, g, i, acc, state, p, q, tile, last):
    """The scores of block i, which is at position g, and beside them P V of the last position `before`."""
    dtype: gl.constexpr = q[0].dtype
    stamp(K.trace, w, "begin", g)
    if K.MASKED and tile.between is not None:
        pass_over(K.k, before + 1, g)
    K.k.wait(g)
    stamp(K.trace, w, "k_ready", g)
    s = start_scores(q, block_of(K.k, g, K.C), K.C)
    documents = documents_of_block(K, i, tile)
    K.v.wait(before)  # beside the scores, as waiting takes time even if V is there
    acc = start_output(acc, p, block_of(K.v, before, K.C))
    s = warpgroup_mma_wait(K.C.products_v, deps=[s])
    stamp(K.trace, w, "s_ready", g)
    K.k.release(g)
    if K.C.q_stages == 1:  # the next Q may come as soon as the last product with this one is done
        mbarrier.arrive(K.memory.q_empty.index(w), count=1, pred=last)
    state, new_p, factor = later_weights(K, state, s, i, documents, tile)
    p = new_p.to(dtype)
    # Complete already, so it costs little; but ptxas moves no later wait above it, and P V stays hidden under exp2.
    K.v.wait(before)
    stamp(K.trace, w, "p_ready", g)
    acc = wait_output(acc)
    stamp(K.trace, w, "o_ready", before)
    K.v.release(before)
    if K.MASKED and tile.between is not None:
        pass_over(K.v, before + 1, g)
    if not K.C.optimistic:
        acc = rescaled(acc, factor)
    return acc, state, p


@gluon.jit
def rescaled(acc, factor):
    new = ()
    for c in gl.static_range(len(acc)):
        new += (acc[c] * gl.convert_layout(factor, rows_of(acc[c].shape[1]))[:, None],)
    return new


@gluon.jit
def first_scores(w: gl.constexpr, K, turn, g, tile):
    """The scores of a tile's first block when nothing runs beside. If there is no tile they are computed of leftovers and
    nobody uses them: that is cheaper than a branch around a product."""
    slot = (turn % K.C.q_stages) * K.C.groups + w
    mbarrier.wait(K.memory.q_full.index(slot), (turn // K.C.q_stages) & 1, pred=tile.go)
    K.k.wait(g, tile.go)
    s = start_scores(at(K.memory.q, slot), block_of(K.k, g, K.C), K.C)
    s = warpgroup_mma_wait(0, deps=[s])
    K.k.release(g, tile.go)
    if K.C.q_stages == 1:
        mbarrier.arrive(K.memory.q_empty.index(w), count=1, pred=tile.go & (tile.blocks == 1))
    return s


@gluon.jit
def consumer(w: gl.constexpr, K):
    tile = fetch(w, K, 0)
    if tile.go:
        consume(w, K, tile)


@gluon.jit
def consume(w: gl.constexpr, K, tile):
    """This CTA's tiles, of which there is one at least."""
    gl.static_assert((K.lengths.left is None) or (tile.lead is not None))
    dtype: gl.constexpr = K.memory.q[0].dtype
    # Three groups have 160 registers a thread: too few for the next tile's P beside the last one's, so it is late. Never late,
    # head dim 64 spills 0 bytes, with a mask 140 (Triton 3.6), or 172 and 428 (3.9); late none, in as much time.
    LATE: gl.constexpr = K.C.q_stages == 1 or K.C.groups == 3
    turn = 0
    g = gl.to_tensor(0)
    stamp(K.trace, w, "begin", g)
    K.k.wait(g)
    stamp(K.trace, w, "k_ready", g)
    first_documents = documents_of_block(K, lead_of(tile), tile)
    s = first_scores(w, K, turn, g, tile)
    stamp(K.trace, w, "s_ready", g)
    state, p = first_weights(K, s, first_documents, tile, dtype)
    stamp(K.trace, w, "p_ready", g)
    acc = no_output(K.C)
    while tile.go:
        # state and p are those of the tile's first block, at position g; acc is 0
        slot = (turn % K.C.q_stages) * K.C.groups + w
        q = at(K.memory.q, slot)
        skip = tile.between if K.MASKED and tile.between is not None else 0
        for j in tl.range(1, tile.blocks, disable_licm=True):
            before = g
            g += 1 + skip
            skip = 0
            i = later_block(j, tile.begin, tile.lead)
            acc, state, p = step(w, K, before, g, i, acc, state, p, q, tile, tile.blocks - j == 1)
        # The boundary: the last P V of this tile, beside the first scores of the next.
        if K.C.q_stages > 1:
            mbarrier.arrive(K.memory.q_empty.index(slot), count=1)
        turn += 1
        before = g
        after = tile.after if K.MASKED else 0
        old_state = state
        tile = fetch(w, K, turn)
        documents = documents_of_block(K, lead_of(tile), tile)
        g += 1 + skip + after
        if K.MASKED:
            pass_over(K.k, before + 1, g)
        K.v.wait(before)
        if K.C.q_stages > 1:
            slot = (turn % K.C.q_stages) * K.C.groups + w
            mbarrier.wait(K.memory.q_full.index(slot), (turn // K.C.q_stages) & 1, pred=tile.go)
            K.k.wait(g, tile.go)
            s = start_scores(at(K.memory.q, slot), block_of(K.k, g, K.C), K.C)
            acc = start_output(acc, p, block_of(K.v, before, K.C))
            s = warpgroup_mma_wait(K.C.products_v, deps=[s])
            K.k.release(g, tile.go)
            if not LATE:
                state, p = first_weights(K, s, documents, tile, dtype)
        else:
            acc = start_output(acc, p, block_of(K.v, before, K.C))
        acc = wait_output(acc)
        stamp(K.trace, w, "o_ready", before)
        K.v.release(before)
        if K.MASKED:
            pass_over(K.v, before + 1, g)
        stamp(K.trace, w, "epilogue", 0)
        epilogue(w, K, acc, old_state, (turn - 1) % K.C.slots)
        if K.C.q_stages == 1:
            s = first_scores(w, K, turn, g, tile)
        if LATE:
            state, p = first_weights(K, s, documents, tile, dtype)
        acc = no_output(K.C)
    tma_store_wait(0)
    stamp(K.trace, w, "end", 0)


@gluon.jit
def epilogue(w: gl.constexpr, K, acc, state, slot):
    """Normalise; write the LSE, a note where the optimism went wrong, and O by way of shared memory."""
    m, row_sum = state
    LAYOUT: gl.constexpr = rows_of(K.C.tile_kv)
    place = place_of(w, slot, K)
    p, note = position_and_note_of(w, slot, K)
    mbarrier.arrive(K.memory.tile_empty.index(slot), count=1)
    _batch, head, row, n_q, n_kv, _start = place
    rows = row + gl.arange(0, ROWS, LAYOUT)
    exists = rows < n_q

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), LAYOUT)
    BOUNDS: gl.constexpr = bounds_of(K.memory.q[0].dtype)
    broken = not_finite(acc, K.C)
    if K.C.optimistic:
        broken = broken | is_too_small(row_sum, m, p + gl.arange(0, ROWS, LAYOUT), n_kv, K.lengths, BOUNDS)
    else:  # an FMA of huge scores misses even the weight of the largest one
        broken = broken | ((row_sum == 0.0) & (m > float("-inf")))
    if K.score.sinks is not None:
        sink = sink_of(head, K.score)
        m = gl.where(row_sum == 0.0, gl.where(sink == float("-inf"), 0.0, sink), m)
        row_sum += gl.exp2(sink - m)
    m = gl.where(row_sum == 0.0, 0.0, m)
    gl.store(K.outputs.lse + lse_row(K, place) + rows, (m + gl.log2(row_sum)) * LN2, mask=exists)
    share = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if K.score.seed is not None:
        share *= K.score.kept_scale
    o = rescaled(acc, share)
    broken = broken | (row_sum >= BOUNDS.most) | (row_sum != row_sum)
    gl.store(K.outputs.notes + note + gl.full([ROWS], 0, gl.int32, LAYOUT), 1, mask=broken & exists)
    gl.store(K.counters + NOTED + gl.full([ROWS], 0, gl.int32, LAYOUT), 1, mask=broken & exists)
    for c in gl.static_range(len(o)):
        if K.lengths.used_q is not None:  # rows that exist and are not used
            used = gl.convert_layout(exists, rows_of(o[c].shape[1]))[:, None]
            copy_out(w, K, gl.where(used, o[c], 0.0), place, c * K.C.wide_v)
        else:
            copy_out(w, K, o[c], place, c * K.C.wide_v)


@gluon.jit
def is_too_small(row_sum, m, p, n_kv, lengths, BOUNDS: gl.constexpr):
    """Whether a row sum is less than docs/optimistic_softmax.md proves to be enough. m is 0 of rows that the first block could
    not judge."""
    begin, end = seen_by(p, n_kv, lengths)
    least = gl.where(m == 0.0, gl.maximum(end - begin, 0) * BOUNDS.least_by_key, BOUNDS.least)
    return row_sum < least


@gluon.jit
def lse_row(K, place):
    """Where the LSE of the sequence's first row is. (None of its factors is negative; signs would be kept in registers.)"""
    batch, head, _row, _n_q, _n_kv, start_q = place
    if K.lengths.cu_q is None:
        return (batch * head_of_group(0, K.heads.heads, K.C) + head).to(gl.uint32).to(gl.int64) * K.lengths.n_q.to(gl.uint32)
    else:
        return head.to(gl.uint32).to(gl.int64) * K.outputs.rows.to(gl.uint32) + start_q


@gluon.jit
def not_finite(o, C: gl.constexpr):
    """Whether a row of O has a NaN or an infinity."""
    check = gl.full([ROWS], 0.0, gl.float32, rows_of(C.tile_kv))
    for c in gl.static_range(len(o)):
        check += gl.convert_layout(gl.sum(o[c] * 0.0, 1), rows_of(C.tile_kv))
    return check != 0.0


@gluon.jit
def copy_out(w: gl.constexpr, K, o, place, column: gl.constexpr):
    """Some columns of O to global memory, from `column` on, by pieces of o_columns."""
    descriptor = K.outputs.descriptor
    if o.shape[1] > K.C.o_columns:
        HALF: gl.constexpr = o.shape[1] // 2
        left, right = o.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()
        copy_out(w, K, gl.convert_layout(left, accumulator(HALF)), place, column)
        copy_out(w, K, gl.convert_layout(right, accumulator(HALF)), place, column + HALF)
    else:
        BUFFER: gl.constexpr = (column // K.C.o_columns) % K.C.o_buffers
        o_s = K.memory.o.index(w * K.C.o_buffers + BUFFER)
        tma_store_wait(K.C.o_buffers - 1)  # what was in the buffer has left
        partition_barrier()
        o_s.store(o.to(descriptor.dtype))
        fence_async_shared()
        partition_barrier()
        batch, head, row, n_q, _n_kv, start_q = place
        corner = coordinates(descriptor, start_q, n_q, batch, head, row, column)
        tma_store(descriptor, corner, o_s.reshape(descriptor.block_type.shape))


# ---- entry


NUMBERS = (
    *("heads", "group", "at_once", "rest", "tiles", "rows", "n_q", "n_kv", "left", "right", "prefix"),
    *SCORE_NUMBERS,
    "total_kv",
    *CACHE_NUMBERS,
)
"""Arguments that no kernel is specialised for: other lengths, bounds and strides do not recompile."""


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, o_desc, lse, notes, counters, trace, listed,
    cu_q, cu_kv, used_q, used_kv, heads, group, at_once, rest, tiles, rows, n_q, n_kv, left, right, prefix,
    terms, threshold, slope_batch, slope_head, bias_batch, bias_head, bias_row, bias_key,
    document_q_batch, document_q_row, document_kv_batch, sink_stride, document_kv_row, spans, total_kv,
    page_table, entries, table_row, k_page, v_page, number_of_pages,
    MASKED: gl.constexpr, C: gl.constexpr, PAGE: gl.constexpr = 0,
):  # fmt: skip
    # Numbers are parameters one by one: Triton 3.6 to 3.9 specialises a kernel for those of a tuple, `do_not_specialize` or not
    # (see `scores.SCORE_NUMBERS`).
    dtype: gl.constexpr = q_wide.dtype
    memory = make_memory(dtype, o_desc.dtype, C)
    k = make_ring(dtype, C.wide, C.narrow, C)
    v = make_ring(dtype, C.wide_v, C.narrow_v, C)
    fence_async_shared()
    inputs = (one_or_two(q_wide, q_narrow), one_or_two(k_wide, k_narrow), one_or_two(v_wide, v_narrow))
    outputs = Outputs(o_desc, lse, notes, rows)
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans, rows, total_kv)
    if C.beside:  # the launch ahead has taken its turn, so what the list's launch wrote is there
        let_next_begin()
    elif listed is not None:
        take_turn()
    if listed is not None:
        tiles = gl.load(listed) * heads
    heads = Heads(heads, group, at_once, rest, tiles)
    score = score_of(terms, (slope_batch, slope_head), (bias_batch, bias_head, bias_row, bias_key), sink_stride,
                     (document_q_batch, document_q_row, document_kv_batch, document_kv_row), threshold)  # fmt: skip
    pages = None
    if C.box:
        pages = Pages(page_table, entries, table_row, k_page, v_page, number_of_pages, PAGE)
    K = Kernel(inputs, outputs, counters, lengths, heads, score, memory, k, v, pages, trace, listed, MASKED, C)
    if C.groups == 2 and C.producers == 1:
        gl.warp_specialize([(consumer, (0, K)), (consumer, (1, K)), (producer, (K,))],
                           [4, 1], [C.consumer_registers, C.producer_registers])  # fmt: skip
    elif C.groups == 2:
        gl.warp_specialize([(consumer, (0, K)), (consumer, (1, K)), (producer, (K,)), (producer_of_v, (K,))],
                           [4, 1, 1], [C.consumer_registers, C.producer_registers, C.producer_registers])  # fmt: skip
    elif C.producers == 1:
        gl.warp_specialize([(consumer, (0, K)), (consumer, (1, K)), (consumer, (2, K)), (producer, (K,))],
                           [4, 4, 1], [C.consumer_registers, C.consumer_registers, C.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([(consumer, (0, K)), (consumer, (1, K)), (consumer, (2, K)), (producer, (K,)),
                            (producer_of_v, (K,))], [4, 4, 1, 1], [C.consumer_registers, C.consumer_registers,
                                                                   C.producer_registers, C.producer_registers])  # fmt: skip
    if C.beside:
        take_turn()  # who waits for this launch relies on the one ahead, too
