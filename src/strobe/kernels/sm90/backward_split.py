"""Attention backward for Hopper in Gluon, in two passes over the scores: one for dK and dV, one for dQ.

No sum leaves a CTA, so the results have the same bits in every run; and no CTA holds more than 64 rows of dK or dV, or 128 of
dQ, so that head dims go up to 256. It costs seven products where `backward` has five, as both passes compute S and dP. Where
there is memory for it, the keys pass stores dS, and a plain product (`backward_dq`) takes the place of the rows pass.

    keys pass     a CTA has 64 keys of a key head and walks over the tiles of 64 query rows that see them

    role        warps    work
    producer    1        copies K, V, and per tile Q with the statistics, and dO in (TMA)
    dv_role     4        S^T = K Q^T, beside dV += P^T dO of the tile before, P^T
    dk_role     4        dK += dS^T Q of the tile before, dP^T = V dO^T, dS^T = P^T * (dP^T - delta)

    P^T goes from dV's group to dK's, through shared memory, in the precision of the inputs. (A group could not hold
    both dK and dV at head dim 256: 128 registers a thread each.) dS^T, where it is stored, leaves through two more places, as
    the TMA writes what a product reads. The first columns of K and of V may be held in registers. They come by way of the
    places of P^T and dS^T, and what they would take of shared memory is a third place of Q, of which a tile needs its own for
    longest: from S to dK of two tiles later, and the time of a copy.

    rows pass     a CTA has 128 query rows of a head and walks over the blocks of 64 keys that they see

    role        warps        work
    producer    1            copies Q, dO, and per block K and V in
    dq_role     4 a group    64 of the rows: S = Q K^T, dP = dO V^T, dQ += dS K, of which the last is a block behind

In both a tile's first products run beside the last one of the tile before, as in the forward. The channels (`common.channel`)
are released by both groups.
"""

import triton.language as tl

from strobe.kernels.common.channel import Channel, at, make_barriers, make_channel, make_chunks, swizzled
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.descriptors import coordinates, one_or_two
from strobe.kernels.common.named_barrier import FIRST, announce, meet, rendezvous
from strobe.kernels.common.tile_scheduler import Heads, Lengths, locate
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90 import backward_config as sizes
from strobe.kernels.sm90.backward import NUMBERS
from strobe.kernels.sm90.backward_products import finished, hold_part, no_result, start_products, start_sum
from strobe.kernels.sm90.backward_scores import apply_mask_transposed, kept_weights_transposed, scores_transposed
from strobe.kernels.sm90.backward_stores import flat, note_of_keys
from strobe.kernels.sm90.backward_tiles import ROWS_PADDED, STAGES, KeyHeads, StoredTiles, locate_keys
from strobe.kernels.sm90.descriptors import copy_in
from strobe.kernels.sm90.layouts import accumulator, columns_of, rows_of
from strobe.kernels.sm90.scores import (
    SCORE_NUMBERS,
    BiasGradient,
    Score,
    add_to_bias,
    apply_mask,
    ask_function,
    compare_documents,
    documents_of_block,
    documents_of_rows,
    is_whole,
    kept_weights,
    score_and_factors,
    score_of,
    slope_of,
    weighed,
)

TILE = gl.constexpr(sizes.SPLIT_TILE)

P_READY = gl.constexpr(FIRST.value)
"""The first of two named barriers: P_READY + parity says that P^T is there."""
P_READ = gl.constexpr(FIRST.value + 2)
"""The first of two named barriers: P_READ + parity says that P^T may be written again."""
ENDED = gl.constexpr(FIRST.value + 4)
"""The first of two named barriers at which the groups meet when they have read K and V for the last time."""


@gluon.constexpr_function
def by_register():
    """A 64 x 64 result of 16 bits, 16 bytes a thread at a time: element, lane and warp bits, as [row, column]."""
    elements, lanes = [[0, 1], [8, 0], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.SharedLinearLayout(elements + lanes + [[16, 0], [32, 0], [0, 16], [0, 32]])


# ---- the keys pass


@aggregate
class KeysMemory:
    """k, v: chunks of [1, 64, columns], without the columns that are held. q, do: channels of tiles. statistics: [stages of q,
    2 * 64], with the barriers of q. p: [2, 64 keys, 64 rows]. ds: the same, in a tuple that is empty if dS is not stored."""

    k: gl.tuple
    v: gl.tuple
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q: Channel
    do: Channel
    statistics: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.tuple


@gluon.jit
def make_keys_memory(dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    return KeysMemory(
        make_chunks(dtype, 1, TILE, C.wide - C.held, C.narrow),
        make_chunks(dtype, 1, TILE, C.wide_v - C.held, C.narrow_v),
        make_barriers(1, 1),
        make_barriers(1, 1),
        make_channel(dtype, C.q_stages, TILE, C.wide, C.narrow, 1),
        make_channel(dtype, STAGES, TILE, C.wide_v, C.narrow_v, 2),
        gl.allocate_shared_memory(gl.float32, [C.q_stages, 2 * TILE], flat(1)),
        gl.allocate_shared_memory(dtype, [2, TILE, TILE], by_register()),
        make_ds(dtype, C),
    )


@gluon.jit
def make_ds(dtype: gl.constexpr, C: gl.constexpr):
    if C.stored:
        return (gl.allocate_shared_memory(dtype, [2, TILE, TILE], swizzled(dtype, TILE)),)
    else:
        return ()


@aggregate
class KeysOutputs:
    """dk, dv: TMA descriptors of chunks. ds: where dS goes, if it is stored. notes: int32, one for 64 keys. scale: of dK."""

    dk: gl.tuple
    dv: gl.tuple
    ds: StoredTiles
    notes: gl.tensor
    scale: gl.tensor


@aggregate
class KeysKernel:
    """What every role of the keys pass takes: as `backward.Kernel`, without counters. number: of the CTA's block."""

    number: gl.tensor
    inputs: gl.tuple
    outputs: KeysOutputs
    lengths: Lengths
    heads: KeyHeads
    score: Score
    memory: KeysMemory
    MASKED: gl.constexpr
    NOTED: gl.constexpr
    C: gl.constexpr


@gluon.jit
def keys_producer(K):
    q_desc, k_desc, v_desc, do_desc, statistics_desc = K.inputs
    work = locate_keys(K, K.number, TILE, TILE)
    if work.first < work.n_kv:
        copy_keys(k_desc, K.memory.k, K.memory.k_full, (K.memory.p,), work, K.C)
        tiles = work.end - work.begin
        for g in tl.range(0, tiles * work.group):
            member = g // tiles
            row = (work.begin + g % tiles) * TILE
            head = work.head_kv * work.group + member
            full = K.memory.q.acquire(g)
            place = (work.row + member * K.heads.padded + row) * 2
            copy_in(q_desc, K.memory.q.block(g), full, work.start_q, work.n_q, work.batch, head, row, 2 * TILE * 4)
            tma_load(statistics_desc, [place], full, statistics_of(g, K))
            if g == 0:
                copy_keys(v_desc, K.memory.v, K.memory.v_full, K.memory.ds, work, K.C)
            copy_in(do_desc, K.memory.do.block(g), K.memory.do.acquire(g), work.start_q, work.n_q, work.batch, head, row)


@gluon.jit
def copy_keys(descriptors, chunks, full, places, work, C: gl.constexpr):
    """Start the copy of a block's K or V; of the columns that are held to where `hold_keys` finds them."""
    if C.held == 0:
        copy_in(descriptors, at(chunks, 0), full.index(0), work.start_kv, work.n_kv, work.batch, work.head_kv, work.first)
    else:
        first, rest = held_place(places, C), chunks[0].index(0)
        mbarrier.expect(full.index(0), 2 * descriptors[0].block_type.nbytes)
        for c in gl.static_range(2):
            place = coordinates(descriptors[0], work.start_kv, work.n_kv, work.batch, work.head_kv, work.first, c * C.held)
            part = first if c == 0 else rest
            tma_load(descriptors[0], place, full.index(0), part.reshape(descriptors[0].block_type.shape))


@gluon.jit
def held_place(places, C: gl.constexpr):
    COLUMNS: gl.constexpr = C.held
    dtype: gl.constexpr = places[0].dtype
    return reinterpret(places[0], dtype, [1, TILE, COLUMNS], swizzled(dtype, COLUMNS)).index(0)


@gluon.jit
def hold_keys(places, C: gl.constexpr):
    """Load the columns of K or V that the group holds, of a block that has come."""
    if C.held == 0:
        return ()
    else:
        held = hold_part(held_place(places, C), C.held, TILE)
        partition_barrier()  # before the group writes there
        return held


@gluon.jit
def start_scores(a, held, b, C: gl.constexpr):
    """Start a b^T, of which the first columns of a are held."""
    if C.held == 0:
        return start_products(a, b)
    else:
        REST: gl.constexpr = b[0].shape[1] - C.held
        s = gl.full([TILE, TILE], 0.0, gl.float32, accumulator(TILE))
        s = warpgroup_mma(held[0], b[0].slice(0, C.held, dim=1).permute((1, 0)), s, use_acc=False, is_async=True)
        return warpgroup_mma(a[0], b[0].slice(C.held, REST, dim=1).permute((1, 0)), s, is_async=True)


@gluon.jit
def statistics_of(g, K):
    """LSE and delta of the g-th tile's rows."""
    return K.memory.statistics.index(K.memory.q.slot(g))


@gluon.jit
def weights_of(K, s, g, slope, work):
    """P^T of the g-th tile after dropout, from its scores, and what dP - delta is multiplied by: P^T times the factors of the
    scores' gradient."""
    row, head = place_of(g, work)
    x, factor, of_function = scores_transposed(s, 0, row, head, slope, work, K.score)
    x = x - statistics_of(g, K).slice(0, TILE).load(columns_of(TILE))[None, :]
    if K.MASKED:
        tile = row // TILE
        if (tile < work.full_begin) | (tile >= work.full_end):
            x = apply_mask_transposed(0, K, x, float("-inf"), row, head, work)
    p = gl.exp2(x)
    kept = kept_weights_transposed(p, 0, row, head, work, K.score)
    if K.score.CHANGED:
        return kept, weighed(p, of_function, K.score) * factor
    else:
        return kept, p


@gluon.jit
def place_of(g, work):
    """First row, and head, of the g-th tile."""
    tiles = work.end - work.begin
    return (work.begin + g % tiles) * TILE, work.head_kv * work.group + g // tiles


@gluon.jit
def slope_of_tile(g, work, score):
    """The slope of the g-th tile's head."""
    _row, head = place_of(g, work)
    return slope_of(work.batch, head, score)


@gluon.jit
def send(p, g, K):
    """Send P^T of the g-th tile to dK's group."""
    if g >= 2:
        meet(P_READ + g % 2)
    K.memory.p.index(g % 2).store(p.to(K.memory.p.dtype))
    announce(P_READY + g % 2)


@gluon.jit
def receive(g, count, K):
    meet(P_READY + g % 2)
    p = K.memory.p.index(g % 2).load(accumulator(TILE))
    if g + 2 < count:
        announce(P_READ + g % 2)
    return p


@gluon.jit
def dv_role(K):
    dtype: gl.constexpr = K.memory.p.dtype
    work = locate_keys(K, K.number, TILE, TILE)
    if work.first < work.n_kv:
        count = (work.end - work.begin) * work.group
        dv = no_result(K.C.wide_v, K.C.narrow_v)
        mbarrier.wait(K.memory.k_full.index(0), 0)
        held = hold_keys((K.memory.p,), K.C)
        start = gl.to_tensor(0)
        if count > 0:
            K.memory.q.wait(start)
            s = start_scores(at(K.memory.k, 0), held, K.memory.q.block(start), K.C)
            slope = slope_of_tile(start, work, K.score)
            s = warpgroup_mma_wait(0, deps=[s])
            weight, sent = weights_of(K, s, start, slope, work)
            send(sent, start, K)
            p = weight.to(dtype)
            for g in tl.range(1, count, disable_licm=True):
                K.memory.q.wait(g)
                s = start_scores(at(K.memory.k, g >> 30), held, K.memory.q.block(g), K.C)
                K.memory.do.wait(g - 1)
                dv = start_sum(dv, p, K.memory.do.block(g - 1))
                slope = slope_of_tile(g, work, K.score)  # beside the products
                s = warpgroup_mma_wait(K.C.products_v, deps=[s])
                weight, sent = weights_of(K, s, g, slope, work)
                K.memory.do.wait(g - 1)  # complete already; but ptxas moves no later wait above it, and dV stays hidden
                # Rounded earlier, P would be written to registers that dV still reads, and ptxas makes all products serial.
                dv = finished(dv, 0)
                K.memory.do.release(g - 1)
                p = weight.to(dtype)
                send(sent, g, K)
            K.memory.do.wait(count - 1)
            dv = start_sum(dv, p, K.memory.do.block(count - 1))
            dv = finished(dv, 0)
            K.memory.do.release(count - 1)
        rendezvous(ENDED, 0)
        if K.NOTED:
            note_of_keys(0, K, dv, work)
        store_keys(dv, 1.0, K.memory.do.chunks, K.outputs.dv, work, K.lengths)


@gluon.jit
def dk_role(K):
    work = locate_keys(K, K.number, TILE, TILE)
    if work.first < work.n_kv:
        count = (work.end - work.begin) * work.group
        dk = no_result(K.C.wide, K.C.narrow)
        start = gl.to_tensor(0)
        if count > 0:
            mbarrier.wait(K.memory.v_full.index(0), 0)
            held = hold_keys(K.memory.ds, K.C)
            K.memory.do.wait(start)
            dp = start_scores(at(K.memory.v, 0), held, K.memory.do.block(start), K.C)
            dp = warpgroup_mma_wait(0, deps=[dp])
            K.memory.do.release(start)
            ds = gradients(dp, start, count, work, K)
            for g in tl.range(1, count, disable_licm=True):
                dk = start_sum(dk, ds, K.memory.q.block(g - 1))
                K.memory.do.wait(g)
                dp = start_scores(at(K.memory.v, g >> 30), held, K.memory.do.block(g), K.C)
                put_ds(ds, g - 1, K)
                send_ds(g - 1, work, K)
                dk = finished(dk, K.C.products_dp)
                K.memory.q.release(g - 1)
                dp = warpgroup_mma_wait(0, deps=[dp])
                K.memory.do.release(g)
                ds = gradients(dp, g, count, work, K)
            dk = start_sum(dk, ds, K.memory.q.block(count - 1))
            put_ds(ds, count - 1, K)
            send_ds(count - 1, work, K)
            dk = finished(dk, 0)
        rendezvous(ENDED, 1)
        if K.NOTED:
            note_of_keys(0, K, dk, work)
        store_keys(dk, K.outputs.scale, K.memory.q.chunks, K.outputs.dk, work, K.lengths)


@gluon.jit
def gradients(dp, g, count, work, K):
    """dS^T of the g-th tile, rounded."""
    row, head = place_of(g, work)
    dp = kept_weights_transposed(dp, 0, row, head, work, K.score)
    K.memory.q.wait(g)
    dp = dp - statistics_of(g, K).slice(TILE, TILE).load(columns_of(TILE))[None, :]
    return (receive(g, count, K).to(gl.float32) * dp).to(K.memory.p.dtype)


@gluon.jit
def put_ds(ds, g, K):
    """Put dS^T of the g-th tile, if it is stored, where the TMA takes it from: a place that `send_ds` of the tile before has
    found empty. Beside a product, as the fence takes its time."""
    if K.C.stored:
        K.memory.ds[0].index(g % 2).store(ds)
        fence_async_shared()


@gluon.jit
def send_ds(g, work, K):
    """Start the copy of the g-th tile's dS^T to global memory; what was in the other place has left."""
    if K.C.stored:
        tma_store_wait(0)
        partition_barrier()
        row, head = place_of(g, work)
        place = K.outputs.ds.place(work.batch * K.heads.heads + head, work.first, row, work, K.lengths)
        tma_store(K.outputs.ds.descriptor[0], place, K.memory.ds[0].index(g % 2))


@gluon.jit
def store_keys(x, scale, buffers, descriptors, work, lengths):
    """dK or dV to global memory, by way of a place where tiles of Q or dO were."""
    for c in gl.static_range(len(x)):
        result = x[c] * scale
        if lengths.used_kv is not None:  # keys that exist and are not used
            key = work.first + gl.arange(0, TILE, rows_of(x[c].shape[1]))
            result = gl.where((key < work.n_kv)[:, None], result, 0.0)
        buffers[c].index(0).store(result.to(descriptors[c].dtype))
    fence_async_shared()
    partition_barrier()
    for c in gl.static_range(len(x)):
        place = coordinates(descriptors[c], work.start_kv, work.n_kv, work.batch, work.head_kv, work.first, c * x[0].shape[1])
        tma_store(descriptors[c], place, buffers[c].index(0).reshape(descriptors[c].block_type.shape))
    tma_store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS)
def keys_kernel(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, do_wide, do_narrow, statistics_desc,
    dk_wide, dk_narrow, dv_wide, dv_narrow, ds, stored_heads, stored_pairs, notes, first, cu_q, cu_kv, used_q, used_kv,
    heads, heads_kv, at_once, rest, all_heads, blocks, padded, n_q, n_kv, left, right, prefix,
    terms, threshold, slope_batch, slope_head, bias_batch, bias_head, bias_row, bias_key,
    document_q_batch, document_q_row, document_kv_batch, sink_stride, document_kv_row, spans,
    scale, total_q, total_kv,
    MASKED: gl.constexpr, NOTED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    # Numbers are parameters one by one: Triton 3.6 to 3.9 specialises a kernel for those of a tuple, `do_not_specialize` or not
    # (see `scores.SCORE_NUMBERS`).
    memory = make_keys_memory(q_wide.dtype, C)
    fence_async_shared()
    take_turn()
    inputs = (one_or_two(q_wide, q_narrow), one_or_two(k_wide, k_narrow), one_or_two(v_wide, v_narrow),
              one_or_two(do_wide, do_narrow), statistics_desc)  # fmt: skip
    stored = StoredTiles(one_or_two(ds, None), stored_heads, stored_pairs)
    outputs = KeysOutputs(one_or_two(dk_wide, dk_narrow), one_or_two(dv_wide, dv_narrow), stored, notes, scale)
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans, total_q, total_kv)
    heads = KeyHeads(heads, heads_kv, at_once, rest, all_heads, blocks, padded)
    score = score_of(terms, (slope_batch, slope_head), (bias_batch, bias_head, bias_row, bias_key), sink_stride,
                     (document_q_batch, document_q_row, document_kv_batch, document_kv_row), threshold)  # fmt: skip
    K = KeysKernel(gl.program_id(0) + first, inputs, outputs, lengths, heads, score, memory, MASKED, NOTED, C)
    gl.warp_specialize([(dv_role, (K,)), (dk_role, (K,)), (keys_producer, (K,))], [4, 1], [240, 24])


# ---- the rows pass


@aggregate
class RowsMemory:
    """q, do: chunks of [2 groups, 64, columns], and barriers of each group. k, v: channels of blocks."""

    q: gl.tuple
    do: gl.tuple
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    k: Channel
    v: Channel


@gluon.jit
def make_rows_memory(dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    return RowsMemory(
        make_chunks(dtype, 2, TILE, C.wide, C.narrow),
        make_chunks(dtype, 2, TILE, C.wide_v, C.narrow_v),
        make_barriers(2, 1),
        make_barriers(2, 1),
        make_channel(dtype, STAGES, TILE, C.wide, C.narrow, 2),
        make_channel(dtype, C.v_stages, TILE, C.wide_v, C.narrow_v, 2),
    )


@aggregate
class Rows:
    """What `scores` asks of a tile: p, the position of its first row among the keys; [full_begin, full_end), the blocks that
    are whole; the slope of its head and the documents of its rows, None where there are none; numbers of queries and keys."""

    p: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    slope: (gl.tensor, gl.constexpr)
    documents: (gl.tensor, gl.constexpr)
    n_q: gl.tensor
    n_kv: gl.tensor


@aggregate
class RowsOutputs:
    """dq: TMA descriptors of chunks. notes: int32, one for 64 rows. dbias: see `BiasGradient`. scale: of dQ."""

    dq: gl.tuple
    notes: gl.tensor
    dbias: BiasGradient
    scale: gl.tensor


@aggregate
class RowsKernel:
    """What every role of the rows pass takes: as `KeysKernel`. The statistics are no part of the inputs: they are loaded from a
    pointer. padded: rows that a head has there."""

    inputs: gl.tuple
    statistics: gl.tensor
    padded: gl.tensor
    outputs: RowsOutputs
    lengths: Lengths
    heads: Heads
    score: Score
    memory: RowsMemory
    MASKED: gl.constexpr
    NOTED: gl.constexpr
    C: gl.constexpr


@gluon.jit
def rows_producer(K):
    q_desc, k_desc, v_desc, do_desc = K.inputs
    work = locate(gl.program_id(0), K.lengths, K.heads, K.C, EMPTY=True)
    head_kv = work.head // K.heads.group
    if work.blocks() > 0:
        for w in gl.static_range(2):
            row = work.row + w * TILE
            copy_in(q_desc, at(K.memory.q, w), K.memory.q_full.index(w), work.start_q, work.n_q, work.batch, work.head, row)
            copy_in(do_desc, at(K.memory.do, w), K.memory.do_full.index(w), work.start_q, work.n_q, work.batch, work.head, row)
        for g in tl.range(0, work.blocks()):
            key = (work.begin + g) * TILE
            copy_in(k_desc, K.memory.k.block(g), K.memory.k.acquire(g), work.start_kv, work.n_kv, work.batch, head_kv, key)
            copy_in(v_desc, K.memory.v.block(g), K.memory.v.acquire(g), work.start_kv, work.n_kv, work.batch, head_kv, key)


@gluon.jit
def row_indices(i, rows):
    """Indices in their sequence: of a tile's rows, and of the keys of block i."""
    row = rows.p - (rows.n_kv - rows.n_q) + gl.arange(0, TILE, rows_of(TILE))
    return row, i * TILE + gl.arange(0, TILE, columns_of(TILE))


@gluon.jit
def row_scores(s, i, rows, score):
    """q.k of block i -> (score in powers of two, the factors of its gradient: see `scores.score_and_factors`)."""
    if not score.CHANGED:
        return s * score.inner, 1.0, 1.0
    else:
        row, key = row_indices(i, rows)
        return score_and_factors(s, row[:, None], key[None, :], rows.batch, rows.head, rows.slope, rows.n_q, rows.n_kv, score)


@gluon.jit
def row_gradients(K, p, dp, delta, factor, of_function, i, rows):
    """dS of block i, also to where a bias's gradient goes."""
    if K.score.seed is not None:
        dp = kept_weights(K, dp, i, rows) * K.score.kept_scale
    ds = weighed(p, of_function, K.score) * (dp - delta)
    if K.outputs.dbias.pointer is not None:
        row, key = row_indices(i, rows)
        add_to_bias(K.outputs.dbias, ds, p, row, key, rows.batch, rows.head, rows.n_q, rows.n_kv, TRANSPOSED=False)
    if K.score.CHANGED:
        ds = ds * factor
    return ds


@gluon.jit
def dq_role(w: gl.constexpr, K):
    dtype: gl.constexpr = K.memory.q[0].dtype
    work = locate(gl.program_id(0), K.lengths, K.heads, K.C, EMPTY=True)
    exists = work.row < work.n_q
    dq = no_result(K.C.wide, K.C.narrow)
    first = work.row + w * TILE
    if work.blocks() > 0:
        slope = None
        documents = None
        if K.score.slopes is not None:
            slope = slope_of(work.batch, work.head, K.score)
        if K.score.document_q is not None:
            documents = documents_of_rows(work.batch, first + gl.arange(0, TILE, rows_of(TILE)), work.n_q, K.score)
        position = first + (work.n_kv - work.n_q)
        tile = Rows(position, work.full_begin, work.full_end, work.batch, work.head, slope, documents, work.n_q, work.n_kv)
        if K.lengths.cu_q is None:
            row = (work.batch * K.heads.heads + work.head) * K.padded + first
        else:
            row = work.head * K.padded + (work.start_q + work.batch * ROWS_PADDED) // ROWS_PADDED * ROWS_PADDED + first
        here = K.statistics + row.to(gl.int64) * 2 + gl.arange(0, TILE, rows_of(TILE))
        lse = gl.load(here)
        delta = gl.load(here + TILE)
        count = work.blocks()
        mbarrier.wait(K.memory.q_full.index(w), 0)
        mbarrier.wait(K.memory.do_full.index(w), 0)
        ds = gl.full([TILE, TILE], 0.0, dtype, accumulator(TILE))
        for g in tl.range(0, count, disable_licm=True):
            fixed = g >> 30
            K.memory.k.wait(g)
            s = start_products(at(K.memory.q, fixed + w), K.memory.k.block(g))
            K.memory.v.wait(g)
            dp = start_products(at(K.memory.do, fixed + w), K.memory.v.block(g))
            before = gl.maximum(g - 1, 0)  # the first time dS is 0
            dq = start_sum(dq, ds, K.memory.k.block(before))
            i = work.begin + g
            of_keys = documents_of_block(K, i, tile)
            s = warpgroup_mma_wait(K.C.products_v + K.C.products, deps=[s])
            x, factor, of_function = row_scores(s, i, tile, K.score)
            x = x - lse[:, None]
            if K.MASKED:
                if not is_whole(i, tile):
                    x = apply_mask(x, i, tile, K.lengths, K.C)
                    x = compare_documents(x, of_keys, tile, K.score)
            x = ask_function(K, x, i, tile)
            p = gl.exp2(x)
            dp, p = warpgroup_mma_wait(K.C.products, deps=[dp, p])
            K.memory.v.release(g)
            new_ds = row_gradients(K, p, dp, delta[:, None], factor, of_function, i, tile)
            dq = finished(dq, 0)
            K.memory.k.release(g - 1, g > 0)
            ds = new_ds.to(dtype)
        dq = start_sum(dq, ds, K.memory.k.block(count - 1))
        dq = finished(dq, 0)
    if exists:
        if K.NOTED:
            note_of_rows(w, K, dq, work)
        store_rows(at(K.memory.q, w), K, dq, work, first)


@gluon.jit
def note_of_rows(w: gl.constexpr, K, dq, work):
    """Write 1 to the note of 64 rows if a NaN or an infinity came out, which a key may have caused that they do not see."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, dq[0].type.layout)
    check = gl.full([TILE], 0.0, gl.float32, LAYOUT)
    for c in gl.static_range(len(dq)):
        check += gl.convert_layout(gl.sum(dq[c] * 0.0, 1), LAYOUT)
    place = (work.batch * K.heads.heads + work.head) * ((K.lengths.n_q + TILE - 1) // TILE) + work.row // TILE + w
    exists = work.row + w * TILE + gl.arange(0, TILE, LAYOUT) < work.n_q
    gl.store(K.outputs.notes + place + gl.full([TILE], 0, gl.int32, LAYOUT), 1, mask=(check != 0.0) & exists)


@gluon.jit
def store_rows(buffers, K, dq, work, first):
    """A group's dQ, of the rows from `first` on, to global memory, by way of shared memory that nobody else reads any more."""
    descriptors = K.outputs.dq
    for c in gl.static_range(len(dq)):
        result = dq[c] * K.outputs.scale
        if K.lengths.used_q is not None:  # rows that exist and are not used
            row = first + gl.arange(0, TILE, rows_of(dq[c].shape[1]))
            result = gl.where((row < work.n_q)[:, None], result, 0.0)
        buffers[c].store(result.to(descriptors[c].dtype))
    fence_async_shared()
    partition_barrier()
    for c in gl.static_range(len(dq)):
        place = coordinates(descriptors[c], work.start_q, work.n_q, work.batch, work.head, first, c * dq[0].shape[1])
        tma_store(descriptors[c], place, buffers[c].reshape(descriptors[c].block_type.shape))
    tma_store_wait(0)


ROWS_NUMBERS = (
    *("padded", "heads", "group", "at_once", "rest", "tiles", "n_q", "n_kv", "left", "right", "prefix"),
    *SCORE_NUMBERS,
    *("dbias_batch", "dbias_head", "dbias_row", "dbias_key"),
    *("total_q", "total_kv"),
)


@gluon.jit(do_not_specialize=ROWS_NUMBERS)
def rows_kernel(
    q_wide, q_narrow, k_wide, k_narrow, v_wide, v_narrow, do_wide, do_narrow, statistics, dq_wide, dq_narrow, notes,
    cu_q, cu_kv, used_q, used_kv, padded, heads, group, at_once, rest, tiles, n_q, n_kv, left, right, prefix,
    terms, threshold, slope_batch, slope_head, bias_batch, bias_head, bias_row, bias_key,
    document_q_batch, document_q_row, document_kv_batch, sink_stride, document_kv_row, spans,
    dbias, dbias_batch, dbias_head, dbias_row, dbias_key, scale, total_q, total_kv,
    MASKED: gl.constexpr, NOTED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    # Numbers are parameters one by one: Triton 3.6 to 3.9 specialises a kernel for those of a tuple, `do_not_specialize` or not
    # (see `scores.SCORE_NUMBERS`).
    memory = make_rows_memory(q_wide.dtype, C)
    fence_async_shared()
    inputs = (one_or_two(q_wide, q_narrow), one_or_two(k_wide, k_narrow), one_or_two(v_wide, v_narrow),
              one_or_two(do_wide, do_narrow))  # fmt: skip
    dbias = BiasGradient(dbias, dbias_batch, dbias_head, dbias_row, dbias_key)
    outputs = RowsOutputs(one_or_two(dq_wide, dq_narrow), notes, dbias, scale)
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, spans, total_q, total_kv)
    heads = Heads(heads, group, at_once, rest, tiles)
    score = score_of(terms, (slope_batch, slope_head), (bias_batch, bias_head, bias_row, bias_key), sink_stride,
                     (document_q_batch, document_q_row, document_kv_batch, document_kv_row), threshold)  # fmt: skip
    K = RowsKernel(inputs, statistics, padded, outputs, lengths, heads, score, memory, MASKED, NOTED, C)
    gl.warp_specialize([(dq_role, (0, K)), (dq_role, (1, K)), (rows_producer, (K,))], [4, 1], [240, 24])
    take_turn()  # at the end: it needs nothing of the keys pass, which began when all before it had ended
