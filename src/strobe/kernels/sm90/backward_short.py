"""Attention backward for Hopper to few keys, in Gluon: cross attention to a prompt, say. Keys of a head are one block.

Here bytes bind, not products: each row of Q and dO is read and each row of dQ written once, for little work. All keys are
here, so dQ of a row is one product: nothing is added up, it leaves rounded. And delta = rowsum(dO * O) is rowsum(P * dP), too,
of what a CTA has at hand: O is not read. A CTA does everything, one after the other, for 64 query rows at a time, and several
CTAs share a multiprocessor: while one waits, others compute.

    S = Q K^T     dP = dO V^T     dV^T = dO^T P     dK^T = Q^T dS     dQ = dS K,     dS = P * (dP - rowsum(P * dP) + dLSE)

A CTA holds K and V of its head, and goes through a part of the rows of all query heads that share it, with the sums dK and dV
in registers. Where several CTAs have parts of a head, each writes its own sums, and who comes last adds all up, in their order:
the bits are the same in every run.

    shared memory   shape                          holds
    k, v            [1, keys, head_dim], in parts  all keys: a power of two of them, and a smaller one; then their gradients
    rows            [stages, 64, head_dim]         Q and dO of this tile and of the next ones
    p, ds           [1, 64, keys], in parts        P and dS of this tile
    dq              [1, 64, head_dim]              rows on their way out

    barrier         arrivals      says
    kv_full         TMA bytes     K and V of a head are there
    full[stage]     TMA bytes     the rows of a tile are there
"""

import triton.language as tl

from strobe.kernels.common.channel import invalidate, make_barriers, make_chunks
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.exp2 import exp2_flushed
from strobe.kernels.common.packed_halves import rounded
from strobe.kernels.common.scores import LOG2E
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90.layouts import ROWS


@gluon.constexpr_function
def layout_of(columns, warps):
    """A result of so many columns: each warpgroup has an equal share of them."""
    groups = warps // 4
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, groups], instr_shape=[16, columns // groups, 16])


@aggregate
class Memory:
    """The shared memory of a CTA: see the table above. rows: Q and dO; k, v, p and ds: parts of the keys."""

    rows: gl.tuple
    k: gl.tuple
    v: gl.tuple
    p: gl.tuple
    ds: gl.tuple
    dq: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def make_memory(dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    k = ()
    v = ()
    p = ()
    ds = ()
    for i in gl.static_range(len(C.parts)):
        k += make_chunks(dtype, 1, C.parts[i], C.head_dim, 0)
        v += make_chunks(dtype, 1, C.parts[i], C.head_dim_v, 0)
        p += make_chunks(dtype, 1, ROWS, C.parts[i], 0)
        ds += make_chunks(dtype, 1, ROWS, C.parts[i], 0)
    rows = make_chunks(dtype, C.stages, ROWS, C.head_dim, 0) + make_chunks(dtype, C.stages, ROWS, C.head_dim_v, 0)
    dq = make_chunks(dtype, 1, ROWS, C.head_dim, 0)[0].index(0)
    return Memory(rows, k, v, p, ds, dq, make_barriers(1, 1), make_barriers(C.stages, 1))


@aggregate
class Tiles:
    """The tiles of 64 rows that a CTA goes through, [begin, end) of those of all query heads that share a key head. Each of the
    query heads, from `first_head` on of a batch entry, has `of_head` tiles."""

    batch: gl.tensor
    first_head: gl.tensor
    of_head: gl.tensor
    begin: gl.tensor
    end: gl.tensor

    @gluon.jit
    def place(self, tile):
        """(query head, first row) of a tile."""
        return self.first_head + tile // self.of_head, tile % self.of_head * ROWS

    @gluon.jit
    def after(self, place):
        """The place of the next tile: without a division."""
        head, row = place
        row += ROWS
        last = row == self.of_head * ROWS
        return head + last.to(gl.int32), gl.where(last, 0, row)


@aggregate
class Kernel:
    """What every step takes. rows: TMA descriptors of Q and dO; dq: of dQ. dlse: the LSE's gradient, if it has one. heads: of
    queries, of a batch entry. scale: of scores, without log2(e)."""

    rows: gl.tuple
    dq: gl.tuple
    lse: gl.tensor
    dlse: (gl.tensor, gl.constexpr)
    dlse_strides: gl.tuple
    tiles: Tiles
    heads: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    scale: gl.tensor
    memory: Memory
    C: gl.constexpr


# ---- copies


@gluon.jit
def copy_rows(K, tile, place):
    """Start the copy of a tile of Q and dO, if the CTA has it. Rows beyond a head's last come as 0."""
    head, row = place
    stage = (tile - K.tiles.begin) % K.C.stages
    for i in gl.static_range(2):
        to = K.memory.rows[i].index(stage).reshape(K.rows[i].block_type.shape)
        tma_load(K.rows[i], [K.tiles.batch, head, row, 0], K.memory.full.index(stage), to, pred=tile < K.tiles.end)


@gluon.jit
def expect_rows(K, tile):
    """Tell the barrier of a tile's rows of their copy, if the CTA has it."""
    stage = (tile - K.tiles.begin) % K.C.stages
    mbarrier.expect(K.memory.full.index(stage), K.C.tile_bytes, pred=tile < K.tiles.end)


@gluon.jit
def copy_keys(descriptors, parts, barrier, batch, head):
    """Start the copy of all keys of a head, or of their values, of which the barrier was told."""
    for i in gl.static_range(len(parts)):
        to = parts[i].index(0).reshape(descriptors[i].block_type.shape)
        tma_load(descriptors[i], [batch, head, i * parts[0].shape[1], 0], barrier, to)


@gluon.jit
def load_statistics(K, tile, place):
    """(LSE in powers of two, its gradient) of the rows of a tile. Rows that do not exist have an LSE of +inf: they weigh
    nothing."""
    head, first = place
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout_of(K.C.parts[0], K.C.warps)))
    exists = (row < K.n_q) & (tile < K.tiles.end)
    first_row = (K.tiles.batch * K.heads + head).to(gl.int64) * K.n_q
    m = gl.load(K.lse + first_row + row, mask=exists, other=float("inf"))
    m = gl.where(m == float("-inf"), 0.0, m) * LOG2E
    if K.dlse is None:
        return m, 0.0
    else:
        by_batch, by_head, by_row = K.dlse_strides
        place = K.tiles.batch.to(gl.int64) * by_batch + head.to(gl.int64) * by_head + row.to(gl.int64) * by_row
        return m, gl.load(K.dlse + place, mask=exists, other=0.0)


# ---- products


@gluon.jit
def start_scores(rows, parts, C: gl.constexpr):
    """Start S = Q K^T, or dP = dO V^T, by parts of the keys."""
    started = ()
    for i in gl.static_range(len(parts)):
        s = gl.full([ROWS, C.parts[i]], 0.0, gl.float32, layout_of(C.parts[i], C.warps))
        started += (warpgroup_mma(rows, parts[i].index(0).permute((1, 0)), s, use_acc=False, is_async=True),)
    return started


@gluon.jit
def start_sums(sums, rows, weights):
    """Start dV^T += dO^T P, or dK^T += Q^T dS, by parts of the keys."""
    started = ()
    for i in gl.static_range(len(weights)):
        started += (warpgroup_mma(rows.permute((1, 0)), weights[i].index(0), sums[i], is_async=True),)
    return started


@gluon.jit
def start_dq(ds, k, C: gl.constexpr):
    """Start dQ = dS K."""
    dq = gl.full([ROWS, C.head_dim], 0.0, gl.float32, layout_of(C.head_dim, C.warps))
    for i in gl.static_range(len(ds)):
        dq = warpgroup_mma(ds[i].index(0), k[i].index(0), dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def finished(results, pending: gl.constexpr = 0):
    """Wait until no more than `pending` products are under way, and return these results, which are then done."""
    done = ()
    for i in gl.static_range(len(results)):
        done += (warpgroup_mma_wait(pending, deps=[results[i]]),)
    return done


@gluon.jit
def no_sums(dim: gl.constexpr, C: gl.constexpr):
    """Zeros, with which the transpose of dK or dV begins."""
    zeros = ()
    for i in gl.static_range(len(C.parts)):
        zeros += (gl.full([dim, C.parts[i]], 0.0, gl.float32, layout_of(C.parts[i], C.warps)),)
    return zeros


# ---- a tile


@gluon.jit
def rows_like(x, part):
    """A number of each row, beside the scores of a part."""
    return gl.convert_layout(x, gl.SliceLayout(1, part.type.layout))[:, None]


@gluon.jit
def weights(s, m, first: gl.constexpr, K):
    """P of the keys from `first` on. Those beyond the last, which only the last part has, weigh nothing."""
    p = exp2_flushed(s * (K.scale * LOG2E) - rows_like(m, s))
    if first + s.shape[1] == K.C.keys:
        key = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        p = gl.where((key < K.n_kv)[None, :], p, 0.0)
    return p


@gluon.jit
def step(K, tile, place, ahead, sum_k, sum_v, m, dm):
    """One tile: its dQ, and what its rows add to the sums. place: where it is; ahead: where the tile is whose rows come in its
    place; m, dm: its statistics. Returned are those of the next one."""
    memory = K.memory
    dtype: gl.constexpr = K.rows[0].dtype
    PARTS: gl.constexpr = len(K.C.parts)
    turn = tile - K.tiles.begin
    stage = turn % K.C.stages
    q, do = memory.rows[0].index(stage), memory.rows[1].index(stage)
    mbarrier.wait(memory.full.index(stage), (turn // K.C.stages) & 1)
    s = start_scores(q, memory.k, K.C)
    dp = start_scores(do, memory.v, K.C)
    s = finished(s, PARTS)
    p = ()
    for i in gl.static_range(PARTS):
        p += (weights(s[i], m, i * K.C.parts[0], K),)
        memory.p[i].index(0).store(rounded(p[i], dtype))
    dp = finished(dp)
    delta = -dm + gl.sum(p[0] * dp[0], 1)
    for i in gl.static_range(1, PARTS):
        delta += gl.convert_layout(gl.sum(p[i] * dp[i], 1), delta.type.layout)
    for i in gl.static_range(PARTS):
        memory.ds[i].index(0).store(rounded(p[i] * (dp[i] - rows_like(delta, dp[i])), dtype))
    tma_store_wait(0)  # the dQ of the tile before has left
    fence_async_shared()
    partition_barrier()

    dq = start_dq(memory.ds, memory.k, K.C)
    sum_v = start_sums(sum_v, do, memory.p)
    sum_k = start_sums(sum_k, q, memory.ds)
    following = K.tiles.after(place)
    m, dm = load_statistics(K, tile + 1, following)
    dq = warpgroup_mma_wait(2 * PARTS, deps=[dq])
    memory.dq.store((dq * K.scale).to(dtype))
    fence_async_shared()
    sum_v, sum_k = finished(sum_v), finished(sum_k)
    expect_rows(K, tile + K.C.stages)
    partition_barrier()  # dQ is there, and all warps have read this tile
    copy_rows(K, tile + K.C.stages, ahead)
    head, row = place
    tma_store(K.dq[0], [K.tiles.batch, head, row, 0], memory.dq.reshape(K.dq[0].block_type.shape))
    return following, K.tiles.after(ahead), sum_k, sum_v, m, dm


# ---- sums


@gluon.jit
def numbers_of(x):
    """Where the numbers of a part are in a share: those that a warp's threads hold in the same registers are neighbours."""
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    register = (row // 64 * (x.shape[1] // 8) + column // 8) * 2 + row // 8 % 2
    thread = row // 16 % 4 * 32 + row % 8 * 4 + column % 8 // 2
    return gl.max_contiguous(gl.multiple_of((register * 128 + thread) * 2 + column % 2, [1, 2]), [1, 2])


@gluon.jit
def leave(share, sums):
    """Write sums to a share; where it goes on."""
    for i in gl.static_range(len(sums)):
        gl.store(share + numbers_of(sums[i]), sums[i])
        share += sums[i].shape[0] * sums[i].shape[1]
    return share


@gluon.jit
def total(share, shares, dim: gl.constexpr, C: gl.constexpr):
    """What so many shares have, one after the other, of sums of `dim` columns. The first one is at `share`. Some are loaded at
    a time."""
    AT_ONCE: gl.constexpr = C.at_once
    sums = no_sums(dim, C)
    for first in tl.range(0, shares, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            sums = add(share + (first + i).to(gl.int64) * C.share_numbers, sums, first + i < shares)
    return sums


@gluon.jit
def add(share, sums, pred):
    """The sums and, if pred, what a share has of them."""
    added = ()
    for i in gl.static_range(len(sums)):
        numbers = numbers_of(sums[i])
        added += (sums[i] + gl.load(share + numbers, mask=(numbers >= 0) & pred, other=0.0),)
        share += sums[i].shape[0] * sums[i].shape[1]
    return added


@gluon.jit
def put(sums, parts, factor):
    """Put dK where K was, or dV where V was."""
    for i in gl.static_range(len(sums)):
        parts[i].index(0).permute((1, 0)).store((sums[i] * factor).to(parts[i].dtype))


@gluon.jit
def send(descriptors, parts, batch, head):
    """Copy dK or dV of a head out, from where K or V was."""
    for i in gl.static_range(len(parts)):
        place = parts[i].index(0).reshape(descriptors[i].block_type.shape)
        tma_store(descriptors[i], [batch, head, i * parts[0].shape[1], 0], place)


# ---- entry


@gluon.jit
def parts_of(first, last, C: gl.constexpr):
    """The descriptors of all parts of the keys."""
    if len(C.parts) == 1:
        return (first,)
    else:
        return (first, last)


NUMBERS = ("heads_kv", "group", "of_head", "share", "n_q", "n_kv", "dlse_batch", "dlse_head", "dlse_row")
"""Arguments that the kernel is not specialised for."""


@gluon.jit(do_not_specialize=NUMBERS)
def short_backward_kernel(
    q, do, k, k_last, v, v_last, lse, dlse, dlse_batch, dlse_head, dlse_row, dq, dk, dk_last, dv, dv_last, shares, arrivals,
    heads_kv, group, of_head, share, n_q, n_kv, scale, C: gl.constexpr,
):  # fmt: skip
    """of_head: tiles of a query head; share: how many of a key head's tiles a CTA goes through. The grid: key heads of all
    entries, times parts of their tiles. shares: float32, room for the sums of every CTA; arrivals: a counter for each key head,
    left at 0."""
    STAGES: gl.constexpr = C.stages
    memory = make_memory(q.dtype, C)
    fence_async_shared()
    number = gl.program_id(0)
    ctas = (group * of_head + share - 1) // share  # that have a part of a head
    head = number // ctas
    batch = head // heads_kv
    head_kv = head % heads_kv
    begin = number % ctas * share
    tiles = Tiles(batch, head_kv * group, of_head, begin, gl.minimum(begin + share, group * of_head))
    dlse_strides = (dlse_batch, dlse_head, dlse_row)
    K = Kernel((q, do), (dq,), lse, dlse, dlse_strides, tiles, heads_kv * group, n_q, n_kv, scale, memory, C)
    partition_barrier()
    take_turn()

    kv_full = memory.kv_full.index(0)
    mbarrier.expect(kv_full, C.kv_bytes)
    copy_keys(parts_of(k, k_last, C), memory.k, kv_full, batch, head_kv)
    copy_keys(parts_of(v, v_last, C), memory.v, kv_full, batch, head_kv)
    place = tiles.place(begin)
    ahead = place
    for i in gl.static_range(STAGES):
        expect_rows(K, begin + i)
        copy_rows(K, begin + i, ahead)
        ahead = tiles.after(ahead)
    m, dm = load_statistics(K, begin, place)
    sum_k, sum_v = no_sums(C.head_dim, C), no_sums(C.head_dim_v, C)
    mbarrier.wait(kv_full, 0)
    for tile in tl.range(begin, tiles.end, disable_licm=True):
        place, ahead, sum_k, sum_v, m, dm = step(K, tile, place, ahead, sum_k, sum_v, m, dm)

    before = 0
    if ctas > 1:
        leave(leave(shares + number.to(gl.int64) * C.share_numbers, sum_k), sum_v)
        partition_barrier()  # so the count tells of what all threads wrote
        before = gl.atomic_add(arrivals + head, 1, sem="acq_rel", scope="gpu")
        if before == ctas - 1:
            gl.atomic_xchg(arrivals + head, 0, sem="relaxed", scope="gpu")
            first = shares + (head * ctas).to(gl.int64) * C.share_numbers
            sum_k = total(first, ctas, C.head_dim, C)
            sum_v = total(first + C.keys * C.head_dim, ctas, C.head_dim_v, C)
    if before == ctas - 1:
        put(sum_k, memory.k, scale)
        put(sum_v, memory.v, 1.0)
        fence_async_shared()
        partition_barrier()
        send(parts_of(dk, dk_last, C), memory.k, batch, head_kv)
        send(parts_of(dv, dv_last, C), memory.v, batch, head_kv)
    tma_store_wait(0)
    invalidate(memory.kv_full)
    invalidate(memory.full)
