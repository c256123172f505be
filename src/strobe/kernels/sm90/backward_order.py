"""The order in which blocks of keys add to dQ, where it must have the same bits in every run (`Config.order`).

A warp, the writer, adds the shares of both groups, and another, the teller, says so. A group puts a share in its place in
shared memory, and goes on; before it puts the next one there, the writer has started to add this one, and the TMA has read it:

    barrier             arrivals     says
    dq_full[w]          group w      a share is in its place
    dq_empty[w]         writer       it has been read
    dq_added            writer       both shares of a tile are added
    dq_told             teller       that has been said

Both are told of blocks with tiles alone, apart from the groups: these may be past many without any when the last share of a
block comes.

Each block of keys has a flag, an int32 in global memory, 0 before the launch: how many of the block's tiles are added. Of the
blocks that a tile's rows see, which are neighbours of each other, each waits until the one before it has added this tile. The
first of them has none before it: it stores its shares, whatever lies there.

    order    masks                        a block waits for           rows from    why
     1       none on the right            the block of earlier keys   the first    all begin there, one after the other
    -1       others                       the block of later keys     the first    it begins at a later tile: it is ahead
     1       causal, with groups of       the block of earlier keys   the last     all begin there; the longest blocks come
             heads; packed sequences                                               first, not when all others end

A block walks over its tiles in the order in which its neighbour does: of one head of a group after the other, or, from the last
rows on, of all heads at each tile, as blocks of other lengths could not follow each other else. So what the flag said once may
do for many tiles. One thread starts the additions of a tile and waits until they are over, not only read from shared memory.
The flag is raised by the teller, as that takes long: it waits for what the multiprocessor has under way (MEMBAR.GPU), while the
writer goes on to the next tile.

Nobody waits for ever, however few CTAs the GPU runs at a time. Blocks have numbers in that order, and a CTA takes the next
number when it runs, and has none of its own: so every block with a smaller number is done, or a running CTA has it. A CTA does
its blocks and their tiles in order, its flags are raised without a wait for anything but what its writer has started, and the
writer waits for blocks with smaller numbers alone. So of all additions that are still to come, the first, by number and tile,
waits for nobody: its groups wait for its writer alone, and what that added before is added, and said.
"""

import triton.language as tl

from strobe.kernels.common.flags import await_additions, await_flag, fence_async_global, raise_flag
from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier, partition_barrier, tma_store_wait
from strobe.kernels.sm90 import backward_config as sizes
from strobe.kernels.sm90.backward_stores import first_share, place_of_share, start_addition, start_store
from strobe.kernels.sm90.backward_tiles import HALF, KEYS, fetch, tiles_that_see, work_of

FLAG_STRIDE = gl.constexpr(sizes.FLAG_STRIDE)


@gluon.jit
def writer(K):
    """Add all shares."""
    take_blocks(K, add_block)


@gluon.jit
def teller(K):
    """Say of all tiles that they are added."""
    take_blocks(K, tell_block)


@gluon.jit
def take_blocks(K, do: gl.constexpr):
    """Do something with each of the CTA's blocks, `do(K, before, work)`: `before` of its tiles are before the block's first."""
    block = 0
    g = gl.to_tensor(0)
    number = fetch(block, K.memory.writers_numbers, 1)
    while number < K.heads.blocks:
        work = work_of(K, number)
        do(K, g, work)
        g += (work.end - work.begin) * work.group
        block += 1
        number = fetch(block, K.memory.writers_numbers, 1)


@gluon.jit
def add_block(K, before, work):
    """Add the shares of a block."""
    neighbour = neighbour_of(work, K)
    tile = work.end - 1 if K.C.downwards else work.begin
    member = gl.to_tensor(0)
    known = gl.to_tensor(0)
    for i in tl.range((work.end - work.begin) * work.group):
        number = number_of(tile, member, neighbour, work, K)
        known = await_neighbour(neighbour.flag, number, known)
        row = work.row + member * K.heads.padded + tile * K.C.tile_q
        add_tile(K, before + i, row // HALF * K.C.head_dim, number == 0)
        tile, member = following(tile, member, work, K)


@gluon.jit
def tell_block(K, before, work):
    """Say of a block's tiles that they are added."""
    flag = flag_of(work, K)
    for i in tl.range((work.end - work.begin) * work.group):
        mbarrier.wait(K.memory.dq_added.index(0), (before + i) & 1)
        raise_flag(flag, i + 1)
        mbarrier.arrive(K.memory.dq_told.index(0), count=1)


@gluon.jit
def following(tile, member, work, K):
    """The tile, and the member of the group of heads, that come after these."""
    if K.C.downwards:
        member += 1
        last = member == work.group
        return gl.where(last, tile - 1, tile), gl.where(last, 0, member)
    else:
        tile += 1
        last = tile == work.end
        return gl.where(last, work.begin, tile), gl.where(last, member + 1, member)


@gluon.jit
def number_of(tile, member, neighbour, work, K):
    """What a neighbour's flag has to be before this tile of a member of the group may be added."""
    if K.C.downwards:
        number = (neighbour.end - 1 - tile) * work.group + member + 1
    else:
        number = (neighbour.end - neighbour.begin) * member + tile - neighbour.begin + 1
    return gl.where((tile >= neighbour.begin) & (tile < neighbour.end), number, 0)


@gluon.jit
def add_tile(K, g, place, first):
    """Add the shares of the CTA's g-th tile to the accumulator, from number 64 * place on; or store them there, if they are the
    first of all blocks'."""
    for w in gl.static_range(2):
        mbarrier.wait(K.memory.dq_full.index(w), g & 1)
        share = place_of_share(w, K, K.C.share_columns[w])
        to = place + first_share(w, K.C)
        if first:
            start_store(K, to, share)
        else:
            start_addition(K, to, share)
        tma_store_wait(0)
        partition_barrier()  # the thread that arrives may be another than that which waited
        mbarrier.arrive(K.memory.dq_empty.index(w), count=1)
    await_additions()
    partition_barrier()
    mbarrier.wait(K.memory.dq_told.index(0), (g & 1) ^ 1)
    mbarrier.arrive(K.memory.dq_added.index(0), count=1)


@gluon.jit
def await_neighbour(flag, number, known):
    """Wait until a flag is a number at least, and let the TMA see what was added; what the flag is then. Nothing is done where
    it is `known` to be. (A fence for every tile was slower under a causal mask.)"""
    found = await_flag(flag, number, known)
    if found > known:
        fence_async_global()
    return found


@aggregate
class Neighbour:
    """The block that adds before this one: its tiles [begin, end), none if there is no such block, and where its flag is."""

    begin: gl.tensor
    end: gl.tensor
    flag: gl.tensor


@gluon.jit
def neighbour_of(work, K):
    """Which block adds before this one."""
    STEP: gl.constexpr = -1 if K.C.order == -1 else 1
    first = work.first - STEP * KEYS
    last = gl.minimum(first + KEYS, work.n_kv) - 1
    begin, end = tiles_that_see(first, last, work.n_q, work.n_kv, K.lengths, K.C.tile_q)
    return Neighbour(begin, gl.where(first >= 0, end, begin), flag_of(work, K) - STEP * FLAG_STRIDE)


@gluon.jit
def flag_of(work, K):
    """Where the flag of a block is."""
    blocks = (K.lengths.n_kv + KEYS - 1) // KEYS
    number = (work.batch * K.heads.heads_kv + work.head_kv) * blocks + work.first // KEYS
    return K.outputs.flags + number * FLAG_STRIDE
