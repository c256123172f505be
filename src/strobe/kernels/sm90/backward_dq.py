"""dQ = dS K for Hopper in Gluon, where the keys pass of `backward_split` has left dS in memory: a plain matrix product.

A CTA has 128 query rows of a head and walks over the blocks of 64 keys that they see. Nothing is added across CTAs, so dQ has
the same bits in every run; with the four products of the keys pass that makes five.

    role        warps        work
    producer    1            copies, for each block, K and both groups' dS^T in (TMA)
    dq_role     4 a group    64 of the rows: dQ += dS K

dS^T lies in memory as the keys pass has it, 64 keys x 64 rows a tile: the tensor cores read it transposed. A group whose rows
do not see a block lets it pass, since the tile was never written. dQ leaves through the places of the group's own dS.
"""

import triton.language as tl

from strobe.kernels.common.channel import Channel, make_barriers, make_chunks, swizzled
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.descriptors import one_or_two
from strobe.kernels.common.gluon_masks import kv_range
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
    warpgroup_mma,
)
from strobe.kernels.sm90.backward_products import finished, no_result
from strobe.kernels.sm90.backward_split import TILE, note_of_rows, store_rows
from strobe.kernels.sm90.backward_tiles import STORED_NUMBERS, StoredTiles
from strobe.kernels.sm90.descriptors import copy_in


@aggregate
class DqMemory:
    """ds: [2 groups * stages, 64 keys, 64 rows]. k: a channel of blocks, whose barriers are those of dS too."""

    ds: gl.shared_memory_descriptor
    k: Channel


@gluon.jit
def make_dq_memory(dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    chunks = make_chunks(dtype, C.stages, TILE, C.wide, C.narrow)
    return DqMemory(
        gl.allocate_shared_memory(dtype, [2 * C.stages, TILE, TILE], swizzled(dtype, TILE)),
        Channel(chunks, make_barriers(C.stages, 2), make_barriers(C.stages, 2), C.stages),
    )


@aggregate
class DqOutputs:
    """dq: TMA descriptors of chunks. notes: int32, one for 64 rows. scale: of dQ."""

    dq: gl.tuple
    notes: gl.tensor
    scale: gl.tensor


@aggregate
class DqKernel:
    """What every role takes. number: of the CTA's tile of rows. k: the descriptors of its chunks. ds: where dS is. NOTED:
    whether 64 rows are noted whose gradients are not finite."""

    number: gl.tensor
    k: gl.tuple
    ds: StoredTiles
    outputs: DqOutputs
    lengths: Lengths
    heads: Heads
    memory: DqMemory
    NOTED: gl.constexpr
    C: gl.constexpr


@gluon.jit
def dq_producer(K):
    work = locate(K.number, K.lengths, K.heads, K.C, EMPTY=True)
    channel = K.memory.k
    for g in tl.range(0, work.blocks()):
        block = work.begin + g
        full = channel.acquire(g)
        place = K.ds.place(work.batch * K.heads.heads + work.head, block * TILE, work.row, work, K.lengths)
        mbarrier.expect(full, 2 * TILE * TILE * 2)
        for w in gl.static_range(2):
            tma_load(K.ds.descriptor[0], [place[0], w * TILE], full, ds_of(w, g, K))
        copy_in(K.k, channel.block(g), full, work.start_kv, work.n_kv, work.batch, work.head // K.heads.group, block * TILE)


@gluon.jit
def blocks_seen(first, work, lengths):
    """[begin, end) of the blocks that the 64 rows from `first` on see, counted from the tile's first one."""
    shift = work.n_kv - work.n_q
    last = gl.minimum(first + TILE, work.n_q) - 1
    begin, end = kv_range(first + shift, last + shift, work.n_kv, lengths.left, lengths.right, lengths.prefix)
    begin = gl.minimum(gl.maximum(begin // TILE, work.begin), work.end)
    end = gl.where(first < work.n_q, gl.minimum((end + TILE - 1) // TILE, work.end), begin)
    return begin - work.begin, gl.maximum(end, begin) - work.begin


@gluon.jit
def let_pass(begin, end, channel):
    """Give back blocks that a group does not read."""
    for g in tl.range(begin, end):
        channel.wait(g)
        channel.release(g)


@gluon.jit
def dq_role(w: gl.constexpr, K):
    channel = K.memory.k
    work = locate(K.number, K.lengths, K.heads, K.C, EMPTY=True)
    first = work.row + w * TILE
    begin, end = blocks_seen(first, work, K.lengths)
    dq = no_result(K.C.wide, K.C.narrow)
    let_pass(0, begin, channel)
    for g in tl.range(begin, end, disable_licm=True):
        channel.wait(g)
        dq = add_product(dq, ds_of(w, g, K), channel.block(g))
        dq = finished(dq, K.C.behind)
        channel.release(g - K.C.behind, g - K.C.behind >= begin)
    dq = finished(dq, 0)
    if K.C.behind > 0:
        channel.release(end - 1, end > begin)
    let_pass(end, work.blocks(), channel)
    if work.row < work.n_q:
        if K.NOTED:
            note_of_rows(w, K, dq, work)
        partition_barrier()
        store_rows(places(w, dq, K), K, dq, work, first)


@gluon.jit
def add_product(dq, ds, k):
    """Start dQ += dS K, by chunks, of dS^T."""
    new = ()
    for c in gl.static_range(len(k)):
        new += (warpgroup_mma(ds.permute((1, 0)), k[c], dq[c], is_async=True),)
    return new


@gluon.jit
def ds_of(w: gl.constexpr, g, K):
    """Group w's place of dS of the g-th block."""
    return K.memory.ds.index(w * K.C.stages + K.memory.k.slot(g))


@gluon.jit
def places(w: gl.constexpr, dq, K):
    """Group w's places of dS, seen as places for the chunks of its dQ, one after the other."""
    chunks = ()
    for c in gl.static_range(len(dq)):
        chunks += (place(K.memory.ds, dq[c].shape[1], w * K.C.stages * TILE + c * dq[0].shape[1]),)
    return chunks


@gluon.jit
def place(buffer, columns: gl.constexpr, first: gl.constexpr):
    number: gl.constexpr = buffer.shape[0] * TILE // columns
    return reinterpret(buffer, buffer.dtype, [number, TILE, columns], swizzled(buffer.dtype, columns)).index(first // columns)


DQ_NUMBERS = (
    *STORED_NUMBERS,
    *("first", "heads", "group", "at_once", "rest", "tiles", "n_q", "n_kv", "left", "right", "prefix", "total_q", "total_kv"),
)


@gluon.jit(do_not_specialize=DQ_NUMBERS)
def dq_kernel(
    k_wide, k_narrow, ds, stored_heads, stored_pairs, first, dq_wide, dq_narrow, notes, cu_q, cu_kv, used_q, used_kv,
    heads, group, at_once, rest, tiles, n_q, n_kv, left, right, prefix, scale, total_q, total_kv,
    NOTED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    memory = make_dq_memory(k_wide.dtype, C)
    fence_async_shared()
    take_turn()
    outputs = DqOutputs(one_or_two(dq_wide, dq_narrow), notes, scale)
    lengths = Lengths(n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q, used_kv, None, total_q, total_kv)
    heads = Heads(heads, group, at_once, rest, tiles)
    stored = StoredTiles((ds,), stored_heads, stored_pairs)
    K = DqKernel(gl.program_id(0) + first, one_or_two(k_wide, k_narrow), stored, outputs, lengths, heads, memory, NOTED, C)
    gl.warp_specialize([(dq_role, (0, K)), (dq_role, (1, K)), (dq_producer, (K,))], [4, 1], [240, 24])
