"""The order in which blocks of keys add to dQ, where it must have the same bits in every run (`Config.order`).

A warp for each group, the writer, adds the group's shares. The group puts one in its place in shared memory, and goes on;
before it puts the next one there, the writer has started to add this one, and the TMA has read it:

    barrier             arrivals     says
    dq_full[w]          group w      a share is in its place
    dq_empty[w]         writer w     it has been read

The writers are told of blocks with tiles alone, apart from the groups: these may be past many without any when the last share
of a block comes.

Each block of keys has a flag for each writer, an int32 in global memory, 0 before the launch: how many of the block's tiles
that writer has added its shares of. Of the blocks that a tile's rows see, which are neighbours of each other, each waits until
the one before it has added this tile:

    order    masks                        a block waits for           rows from    why
     1       none on the right            the block of earlier keys   the first    all begin there, one after the other
    -1       others                       the block of later keys     the first    it begins at a later tile: it is ahead
     2       causal, with groups of       the block of earlier keys   the last     all begin there; the longest blocks come
             heads; packed sequences                                               first, not when all others end

A block walks over its tiles in the order in which its neighbour does: of one head of a group after the other, or, from the last
rows on, of all heads at each tile, as blocks of other lengths could not follow each other else. So what the flag said once may
do for many tiles. One thread starts an addition, waits until it is over, not only read from shared memory, and raises the flag.

Nobody waits for ever, however few CTAs the GPU runs at a time. Blocks have numbers in that order, and a CTA takes the next
number when it runs, and has none of its own: so every block with a smaller number is done, or a running CTA has it. A CTA does
its blocks and their tiles in order, its writers raise flags without waiting for anything but what they have started, and wait
for blocks with smaller numbers alone. So of all additions that are still to come, the first, by number and tile, waits for
nobody: its groups wait for its writers alone, and what these added before is added, and said.
"""

import triton.language as tl

from strobe.kernels.common.flags import await_flag, fence_async, raise_when_added
from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier, partition_barrier, tma_store_wait
from strobe.kernels.sm90.backward_stores import first_share, place_of_share, start_addition
from strobe.kernels.sm90.backward_tiles import HALF, KEYS, fetch, tiles_that_see, work_of


@gluon.jit
def writer(w: gl.constexpr, K):
    """Add all shares of group w."""
    block = 0
    g = gl.to_tensor(0)
    number = fetch(block, K.memory.writers_numbers, 1)
    while number < K.heads.blocks:
        work = work_of(K, number)
        add_block(w, K, g, work)
        g += (work.end - work.begin) * work.group
        block += 1
        number = fetch(block, K.memory.writers_numbers, 1)


@gluon.jit
def add_block(w: gl.constexpr, K, before, work):
    """Add group w's shares of a block, with `before` of the CTA's tiles before its first."""
    neighbour = neighbour_of(work, K)
    flag = flags_of(work, K) + w
    tile = work.end - 1 if K.C.order == 2 else work.begin
    member = gl.to_tensor(0)
    known = gl.to_tensor(0)
    for i in tl.range((work.end - work.begin) * work.group):
        known = await_neighbour(neighbour.flags + w, number_of(tile, member, neighbour, work, K), known)
        row = work.row + member * K.heads.padded + tile * K.C.tile_q
        add_share(w, K, before + i, row // HALF * K.C.head_dim + first_share(w, K.C))
        raise_when_added(flag, i + 1)
        tile, member = following(tile, member, work, K)


@gluon.jit
def following(tile, member, work, K):
    """The tile, and the member of the group of heads, that come after these."""
    if K.C.order == 2:
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
    if K.C.order == 2:
        number = (neighbour.end - 1 - tile) * work.group + member + 1
    else:
        number = (neighbour.end - neighbour.begin) * member + tile - neighbour.begin + 1
    return gl.where((tile >= neighbour.begin) & (tile < neighbour.end), number, 0)


@gluon.jit
def add_share(w: gl.constexpr, K, g, place):
    """Add group w's share of the CTA's g-th tile to the accumulator, from number 64 * place on."""
    mbarrier.wait(K.memory.dq_full.index(w), g & 1)
    start_addition(K, place, place_of_share(w, K, K.C.share_columns[w]))
    tma_store_wait(0)
    partition_barrier()  # the thread that arrives may be another than that which waited
    mbarrier.arrive(K.memory.dq_empty.index(w), count=1)


@gluon.jit
def await_neighbour(flag, number, known):
    """Wait until a flag is a number at least, and let the TMA see what was added; what the flag is then. Nothing is done where
    it is `known` to be. (A fence for every tile was slower under a causal mask.)"""
    found = await_flag(flag, number, known)
    if found > known:
        fence_async()
    return found


@aggregate
class Neighbour:
    """The block that adds before this one: its tiles [begin, end), none if there is no such block, and where its flags are."""

    begin: gl.tensor
    end: gl.tensor
    flags: gl.tensor


@gluon.jit
def neighbour_of(work, K):
    """Which block adds before this one."""
    STEP: gl.constexpr = -1 if K.C.order == -1 else 1
    first = work.first - STEP * KEYS
    last = gl.minimum(first + KEYS, work.n_kv) - 1
    begin, end = tiles_that_see(first, last, work.n_q, work.n_kv, K.lengths, K.C.tile_q)
    return Neighbour(begin, gl.where(first >= 0, end, begin), flags_of(work, K) - 2 * STEP)


@gluon.jit
def flags_of(work, K):
    """Where the flags of a block are."""
    blocks = (K.lengths.n_kv + KEYS - 1) // KEYS
    return K.outputs.flags + ((work.batch * K.heads.heads_kv + work.head_kv) * blocks + work.first // KEYS) * 2
