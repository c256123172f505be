"""Attention forward for Hopper in Gluon: TMA, wgmma, warp specialisation, an optimistic softmax.

The grid is persistent: a CTA takes tiles of `tile_q` query rows of one head, one after the other. Its warps have roles:

    role       warps          work
    producer   1              takes tiles from a counter, tells the consumers; copies Q and blocks of K and V in (TMA)
    consumer   4 a group      64 query rows: S = Q K^T and O += P V on the tensor cores (wgmma), softmax in between

    shared memory     shape                                  filled by    read by
    q                 [q_stages * groups, 64, head_dim]      producer     group w its own 64 rows
    k, v (Channel)    [num_stages, tile_kv, head_dim]        producer     all groups
    tiles             [2, fields]                            producer     all groups: where the tile is, its key blocks
    o                 [o_buffers * groups, 64, o_columns]    consumers    the TMA, which writes it to global memory

    barrier              arrivals             says
    q_full[stage, w]     TMA bytes            group w's rows of Q are there
    q_empty[stage, w]    group w              its last product with them is done
    k.full, v.full       TMA bytes            a block is there
    k.empty, v.empty     one a group          every group has read the block
    tile_full[slot]      producer             the next tile is known
    tile_empty[slot]     one a group          every group has read it

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

from strobe.kernels.common.channel import at, make_barriers, make_channel, make_chunks
from strobe.kernels.common.descriptors import coordinates, one_or_two
from strobe.kernels.common.optimistic import BOUNDS
from strobe.kernels.common.stamp import stamp
from strobe.kernels.common.turn import take_turn
from strobe.kernels.common.work import Heads, Lengths
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
from strobe.kernels.sm90.scores import (
    SCORE_NUMBERS,
    Score,
    apply_mask,
    ask_function,
    compare_documents,
    documents_of_block,
    is_whole,
    kept_weights,
    scores_of,
    seen_by,
    sink_of,
)
from strobe.kernels.sm90.tiles import (
    FIELDS,
    SLOTS,
    fetch,
    first_block,
    later_block,
    lead_of,
    next_tile,
    place_of,
    position_and_note_of,
    publish,
    with_keys,
)

LN_2 = gl.constexpr(0.6931471805599453)


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

    @gluon.constexpr_function
    def __init__(self, descriptor, lse, notes, rows):
        self.descriptor = descriptor
        self.lse = lse
        self.notes = notes
        self.rows = rows


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

    @gluon.constexpr_function
    def __init__(self, q, o, tiles, q_full, q_empty, tile_full, tile_empty):
        self.q = q
        self.o = o
        self.tiles = tiles
        self.q_full = q_full
        self.q_empty = q_empty
        self.tile_full = tile_full
        self.tile_empty = tile_empty


@gluon.jit
def make_memory(dtype: gl.constexpr, o_dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    Q_BUFFERS: gl.constexpr = C.q_stages * C.groups
    O_BUFFERS: gl.constexpr = C.o_buffers * C.groups
    return Memory(
        make_chunks(dtype, Q_BUFFERS, ROWS, C.wide, C.narrow),
        make_chunks(o_dtype, O_BUFFERS, ROWS, C.o_columns, 0)[0],
        gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        make_barriers(Q_BUFFERS, 1),
        make_barriers(Q_BUFFERS, 1),
        make_barriers(SLOTS, 1),
        make_barriers(SLOTS, C.groups),
    )


# ---- producer


@gluon.jit
def producer(inputs, counters, lengths, heads, score, memory, k, v, trace, C: gl.constexpr):
    q_desc, k_desc, v_desc = inputs
    GROUPS: gl.constexpr = C.groups
    turn = 0
    g = gl.to_tensor(0)
    tile, work = with_keys(gl.program_id(0), counters, lengths, heads, C)
    publish(turn, tile, work, lengths, heads, memory)
    while tile < heads.tiles:
        kv_head = work.head // heads.group
        lead = first_block(work.begin, work.end, work.full_begin, work.full_end, lengths, score)
        i = lead
        copy_in(k_desc, k.block(g), k.acquire(g), work.start_kv, work.n_kv, work.batch, kv_head, i * C.tile_kv)
        stamp(trace, GROUPS, "k_issued", g)
        for w in gl.static_range(GROUPS):
            slot = (turn % C.q_stages) * GROUPS + w
            mbarrier.wait(memory.q_empty.index(slot), ((turn // C.q_stages) & 1) ^ 1)
            copy_in(q_desc, at(memory.q, slot), memory.q_full.index(slot), work.start_q, work.n_q, work.batch, work.head,
                    work.row + w * ROWS)  # fmt: skip
        for j in tl.range(1, work.blocks()):
            g += 1
            next = later_block(j, work.begin, lead)
            copy_in(k_desc, k.block(g), k.acquire(g), work.start_kv, work.n_kv, work.batch, kv_head, next * C.tile_kv)
            stamp(trace, GROUPS, "k_issued", g)
            copy_in(v_desc, v.block(g - 1), v.acquire(g - 1), work.start_kv, work.n_kv, work.batch, kv_head, i * C.tile_kv)
            stamp(trace, GROUPS, "v_issued", g - 1)
            i = next
        # The next tile is asked for as late as may be, or the CTAs would not end together.
        turn += 1
        n_kv = work.n_kv
        start_kv = work.start_kv
        batch = work.batch
        tile, work = with_keys(next_tile(counters), counters, lengths, heads, C)
        publish(turn, tile, work, lengths, heads, memory)
        copy_in(v_desc, v.block(g), v.acquire(g), start_kv, n_kv, batch, kv_head, i * C.tile_kv)
        stamp(trace, GROUPS, "v_issued", g)
        g += 1
    # The last CTA to end leaves the counters as it found them, for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.atomic_xchg(counters, 0)
        gl.atomic_xchg(counters + 1, 0)


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
def masked_scores(s, i, documents, tile, lengths, score, MASKED: gl.constexpr, C: gl.constexpr):
    """q.k of block i -> (scores, by what they have yet to be multiplied); -inf where a row does not see a key."""
    s, scale = scores_of(s, i, tile, lengths, score, C)
    if MASKED:
        if not is_whole(i, tile):
            s = apply_mask(s, i, tile, lengths, C)
            s = compare_documents(s, documents, tile, score)
    s = ask_function(s, i, tile, lengths, score, C)
    return s, scale


@gluon.jit
def first_weights(s, documents, tile, lengths, score, dtype: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Of a tile's first block: (m, row sums), P. m is what exponents are counted from, or with the safe softmax the maximum."""
    GUARDED: gl.constexpr = MASKED or score.CHANGED
    s, scale = masked_scores(s, lead_of(tile), documents, tile, lengths, score, MASKED, C)
    m = row_max(s) * scale
    shift = shift_of(m, GUARDED)
    p = weights(s, shift, scale)
    kept = kept_weights(p, lead_of(tile), tile, lengths, score, C).to(dtype)
    if C.optimistic:
        return (shift, lane_sums(p)), kept
    else:
        return (m, lane_sums(p)), kept


@gluon.jit
def later_weights(state, s, i, documents, tile, lengths, score, MASKED: gl.constexpr, C: gl.constexpr):
    """Of a later block: the state with it, P, and the factor of what was summed before (with the safe softmax)."""
    m, row_sum = state
    s, scale = masked_scores(s, i, documents, tile, lengths, score, MASKED, C)
    if C.optimistic:
        p = weights(s, m, scale)
        return (m, row_sum + lane_sums(p)), kept_weights(p, i, tile, lengths, score, C), m
    else:
        GUARDED: gl.constexpr = MASKED or score.CHANGED
        new_m = gl.maximum(m, row_max(s) * scale)
        shift = shift_of(new_m, GUARDED)
        factor = gl.exp2(m - shift)
        p = weights(s, shift, scale)
        factors = gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        return (new_m, row_sum * factors + lane_sums(p)), kept_weights(p, i, tile, lengths, score, C), factor


@gluon.jit
def step(w: gl.constexpr, before, g, i, acc, state, p, q, k, v, tile, memory, lengths, score, trace, last,
         MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """The scores of block i, which is at position g, and beside them P V of the last position `before`."""
    dtype: gl.constexpr = q[0].dtype
    stamp(trace, w, "begin", g)
    if MASKED and tile.between is not None:
        pass_over(k, before + 1, g)
    k.wait(g)
    stamp(trace, w, "k_ready", g)
    s = start_scores(q, k.block(g), C)
    documents = documents_of_block(i, tile, lengths, score, C)
    v.wait(before)  # beside the scores, as waiting takes time even if V is there
    acc = start_output(acc, p, v.block(before))
    s = warpgroup_mma_wait(C.products_v, deps=[s])
    stamp(trace, w, "s_ready", g)
    k.release(g)
    if C.q_stages == 1:  # the next Q may come as soon as the last product with this one is done
        mbarrier.arrive(memory.q_empty.index(w), count=1, pred=last)
    state, new_p, factor = later_weights(state, s, i, documents, tile, lengths, score, MASKED, C)
    p = new_p.to(dtype)
    # Complete already, so it costs little; but ptxas moves no later wait above it, and P V stays hidden under exp2.
    v.wait(before)
    stamp(trace, w, "p_ready", g)
    acc = wait_output(acc)
    stamp(trace, w, "o_ready", before)
    v.release(before)
    if MASKED and tile.between is not None:
        pass_over(v, before + 1, g)
    if not C.optimistic:
        acc = rescaled(acc, factor)
    return acc, state, p


@gluon.jit
def rescaled(acc, factor):
    new = ()
    for c in gl.static_range(len(acc)):
        new += (acc[c] * gl.convert_layout(factor, rows_of(acc[c].shape[1]))[:, None],)
    return new


@gluon.jit
def first_scores(w: gl.constexpr, turn, g, tile, k, memory, C: gl.constexpr):
    """The scores of a tile's first block when nothing runs beside; if there is no tile, of leftovers, to be dropped (cheaper
    than a branch around a product)."""
    slot = (turn % C.q_stages) * C.groups + w
    mbarrier.wait(memory.q_full.index(slot), (turn // C.q_stages) & 1, pred=tile.go)
    k.wait(g, tile.go)
    s = start_scores(at(memory.q, slot), k.block(g), C)
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(g, tile.go)
    if C.q_stages == 1:
        mbarrier.arrive(memory.q_empty.index(w), count=1, pred=tile.go & (tile.blocks == 1))
    return s


@gluon.jit
def consumer(w: gl.constexpr, outputs, lengths, heads, score, memory, k, v, trace, MASKED: gl.constexpr, C: gl.constexpr):
    tile = fetch(w, 0, memory, lengths, score, MASKED, C)
    if tile.go:
        consume(w, tile, outputs, lengths, heads, score, memory, k, v, trace, MASKED, C)


@gluon.jit
def consume(w: gl.constexpr, tile, outputs, lengths, heads, score, memory, k, v, trace, MASKED: gl.constexpr,
            C: gl.constexpr):  # fmt: skip
    """This CTA's tiles, of which there is one at least."""
    gl.static_assert((lengths.left is None) or (tile.lead is not None))
    dtype: gl.constexpr = outputs.descriptor.dtype
    # Three groups have 160 registers a thread: too few for the next tile's P beside the last one's, so it is late. Never late,
    # head dim 64 spills 0 bytes, with a mask 140 (Triton 3.6), or 172 and 428 (3.9); late none, in as much time.
    LATE: gl.constexpr = C.q_stages == 1 or C.groups == 3
    turn = 0
    g = gl.to_tensor(0)
    stamp(trace, w, "begin", g)
    k.wait(g)
    stamp(trace, w, "k_ready", g)
    first_documents = documents_of_block(lead_of(tile), tile, lengths, score, C)
    s = first_scores(w, turn, g, tile, k, memory, C)
    stamp(trace, w, "s_ready", g)
    state, p = first_weights(s, first_documents, tile, lengths, score, dtype, MASKED, C)
    stamp(trace, w, "p_ready", g)
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
            acc, state, p = step(w, before, g, i, acc, state, p, q, k, v, tile, memory, lengths, score, trace,
                                 tile.blocks - j == 1, MASKED, C)  # fmt: skip
        # The boundary: the last P V of this tile, beside the first scores of the next.
        if C.q_stages > 1:
            mbarrier.arrive(memory.q_empty.index(slot), count=1)
        turn += 1
        before = g
        after = tile.after if MASKED else 0
        old_state = state
        tile = fetch(w, turn, memory, lengths, score, MASKED, C)
        documents = documents_of_block(lead_of(tile), tile, lengths, score, C)
        g += 1 + skip + after
        if MASKED:
            pass_over(k, before + 1, g)
        v.wait(before)
        if C.q_stages > 1:
            slot = (turn % C.q_stages) * C.groups + w
            mbarrier.wait(memory.q_full.index(slot), (turn // C.q_stages) & 1, pred=tile.go)
            k.wait(g, tile.go)
            s = start_scores(at(memory.q, slot), k.block(g), C)
            acc = start_output(acc, p, v.block(before))
            s = warpgroup_mma_wait(C.products_v, deps=[s])
            k.release(g, tile.go)
            if not LATE:
                state, p = first_weights(s, documents, tile, lengths, score, dtype, MASKED, C)
        else:
            acc = start_output(acc, p, v.block(before))
        acc = wait_output(acc)
        stamp(trace, w, "o_ready", before)
        v.release(before)
        if MASKED:
            pass_over(v, before + 1, g)
        stamp(trace, w, "epilogue", 0)
        epilogue(w, acc, old_state, (turn - 1) % SLOTS, lengths, heads, score, memory, outputs, C)
        if C.q_stages == 1:
            s = first_scores(w, turn, g, tile, k, memory, C)
        if LATE:
            state, p = first_weights(s, documents, tile, lengths, score, dtype, MASKED, C)
        acc = no_output(C)
    tma_store_wait(0)
    stamp(trace, w, "end", 0)


@gluon.jit
def epilogue(w: gl.constexpr, acc, state, slot, lengths, heads, score, memory, outputs, C: gl.constexpr):
    """Normalise; write the LSE, a note where the optimism went wrong, and O by way of shared memory."""
    m, row_sum = state
    LAYOUT: gl.constexpr = rows_of(C.tile_kv)
    place = place_of(w, slot, lengths, memory)
    p, note = position_and_note_of(w, slot, memory)
    mbarrier.arrive(memory.tile_empty.index(slot), count=1)
    _batch, head, row, n_q, n_kv, _start = place
    rows = row + gl.arange(0, ROWS, LAYOUT)
    exists = rows < n_q

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), LAYOUT)
    BOUNDS: gl.constexpr = bounds_of(outputs.descriptor.dtype)
    broken = not_finite(acc, C)
    if C.optimistic:
        broken = broken | is_too_small(row_sum, m, p + gl.arange(0, ROWS, LAYOUT), n_kv, lengths, BOUNDS)
    if score.sinks is not None:
        sink = sink_of(head, score)
        m = gl.where(row_sum == 0.0, gl.where(sink == float("-inf"), 0.0, sink), m)
        row_sum += gl.exp2(sink - m)
    m = gl.where(row_sum == 0.0, 0.0, m)
    gl.store(outputs.lse + lse_row(place, lengths, heads, outputs) + rows, (m + gl.log2(row_sum)) * LN_2, mask=exists)
    share = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if score.seed is not None:
        share *= score.kept_scale
    o = rescaled(acc, share)
    broken = broken | (row_sum >= BOUNDS.most) | (row_sum != row_sum)
    gl.store(outputs.notes + note + gl.full([ROWS], 0, gl.int32, LAYOUT), 1, mask=broken & exists)
    for c in gl.static_range(len(o)):
        if lengths.used_q is not None:  # rows that exist and are not used
            used = gl.convert_layout(exists, rows_of(o[c].shape[1]))[:, None]
            copy_out(w, gl.where(used, o[c], 0.0), place, memory, outputs.descriptor, c * C.wide_v, C)
        else:
            copy_out(w, o[c], place, memory, outputs.descriptor, c * C.wide_v, C)


@gluon.jit
def is_too_small(row_sum, m, p, n_kv, lengths, BOUNDS: gl.constexpr):
    """Whether a row sum is less than docs/optimistic_softmax.md proves to be enough. m is 0 of rows that the first block could
    not judge."""
    begin, end = seen_by(p, n_kv, lengths)
    least = gl.where(m == 0.0, gl.maximum(end - begin, 0) * BOUNDS.least_by_key, BOUNDS.least)
    return row_sum < least


@gluon.jit
def lse_row(place, lengths, heads, outputs):
    """Where the LSE of the sequence's first row is. (None of its factors is negative; signs would be kept in registers.)"""
    batch, head, _row, _n_q, _n_kv, start_q = place
    if lengths.cu_q is None:
        return (batch * heads.heads + head).to(gl.uint32).to(gl.int64) * lengths.n_q.to(gl.uint32)
    else:
        return head.to(gl.uint32).to(gl.int64) * outputs.rows.to(gl.uint32) + start_q


@gluon.jit
def not_finite(o, C: gl.constexpr):
    """Whether a row of O has a NaN or an infinity."""
    check = gl.full([ROWS], 0.0, gl.float32, rows_of(C.tile_kv))
    for c in gl.static_range(len(o)):
        check += gl.convert_layout(gl.sum(o[c] * 0.0, 1), rows_of(C.tile_kv))
    return check != 0.0


@gluon.jit
def copy_out(w: gl.constexpr, o, place, memory, descriptor, column: gl.constexpr, C: gl.constexpr):
    """Some columns of O to global memory, from `column` on, by pieces of o_columns."""
    if o.shape[1] > C.o_columns:
        HALF: gl.constexpr = o.shape[1] // 2
        left, right = o.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()
        copy_out(w, gl.convert_layout(left, accumulator(HALF)), place, memory, descriptor, column, C)
        copy_out(w, gl.convert_layout(right, accumulator(HALF)), place, memory, descriptor, column + HALF, C)
    else:
        BUFFER: gl.constexpr = (column // C.o_columns) % C.o_buffers
        o_s = memory.o.index(w * C.o_buffers + BUFFER)
        tma_store_wait(C.o_buffers - 1)  # what was in the buffer has left
        partition_barrier()
        o_s.store(o.to(descriptor.dtype))
        fence_async_shared()
        partition_barrier()
        batch, head, row, n_q, _n_kv, start_q = place
        corner = coordinates(descriptor, start_q, n_q, batch, head, row, column)
        tma_store(descriptor, corner, o_s.reshape(descriptor.block_type.shape))


# ---- entry


NUMBERS = ("heads", "group", "at_once", "rest", "tiles", "rows", "n_q", "n_kv", "left", "right", "prefix", *SCORE_NUMBERS)
"""Arguments that no kernel is specialised for: other lengths, bounds and strides do not recompile."""


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, o_desc, lse, notes, counters, trace,
    cu_q, cu_kv, used_q, used_kv, heads, group, at_once, rest, tiles, rows, n_q, n_kv, left, right, prefix,
    inner, outer, slopes, slope_batch, slope_head, bias, bias_batch, bias_head, bias_row, bias_key,
    sinks, sink_stride, function, gradient, visible, document_q, document_q_batch, document_q_row, document_kv,
    document_kv_batch, document_kv_row, seed, threshold, kept_scale, spans,
    MASKED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_wide.dtype
    memory = make_memory(dtype, o_desc.dtype, C)
    k = make_channel(dtype, C.num_stages, C.tile_kv, C.wide, C.narrow, C.groups)
    v = make_channel(dtype, C.num_stages, C.tile_kv, C.wide_v, C.narrow_v, C.groups)
    fence_async_shared()
    take_turn()
    inputs = (one_or_two(q_wide, q_narrow), one_or_two(k_wide, k_narrow), one_or_two(v_wide, v_narrow))
    outputs = Outputs(o_desc, lse, notes, rows)
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans)
    heads = Heads(heads, group, at_once, rest, tiles)
    score = Score(inner, outer, slopes, (slope_batch, slope_head), bias, (bias_batch, bias_head, bias_row, bias_key), sinks,
                  sink_stride, function, gradient, visible, document_q, document_kv,
                  (document_q_batch, document_q_row, document_kv_batch, document_kv_row), seed, threshold,
                  kept_scale)  # fmt: skip
    if C.groups == 2:
        gl.warp_specialize([
            (consumer, (0, outputs, lengths, heads, score, memory, k, v, trace, MASKED, C)),
            (consumer, (1, outputs, lengths, heads, score, memory, k, v, trace, MASKED, C)),
            (producer, (inputs, counters, lengths, heads, score, memory, k, v, trace, C)),
        ], [4, 1], [C.consumer_registers, C.producer_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, outputs, lengths, heads, score, memory, k, v, trace, MASKED, C)),
            (consumer, (1, outputs, lengths, heads, score, memory, k, v, trace, MASKED, C)),
            (consumer, (2, outputs, lengths, heads, score, memory, k, v, trace, MASKED, C)),
            (producer, (inputs, counters, lengths, heads, score, memory, k, v, trace, C)),
        ], [4, 4, 1], [C.consumer_registers, C.consumer_registers, C.producer_registers])  # fmt: skip
