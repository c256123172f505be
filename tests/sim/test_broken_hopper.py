"""Mistakes made in Hopper's forward, its tiles and its channel, one at a time: the simulator finds each in every order."""

from dataclasses import replace
from functools import partial

import pytest
from broken import Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case

from strobe.kernels.sm90.config import Config
from strobe.sim import (
    BarrierMisuse,
    Deadlock,
    DoubleWrite,
    MissingFence,
    OutOfBounds,
    Race,
    Unfinished,
    Uninitialised,
)

FORWARD, TILES, TMA = (f"strobe.kernels.sm90.{name}" for name in ("forward", "tile_queue", "descriptors"))
CHANNEL = "strobe.kernels.common.channel"
# Three tiles, of five, four and two blocks, through a ring of two; the last block of each is the second group's alone.
CAUSAL = Case(300, 300, batch=1, heads_q=1, heads_kv=1, head_dim=64, mask="causal")
KERNEL = Kernel(FORWARD, 90, CAUSAL, Config(64, 64, 2, 64, 2))
# Blocks at both ends that are one group's alone.
WINDOW = replace(CAUSAL, mask="window")
# Six tiles of one block.
SHORT = replace(CAUSAL, n_q=700, n_kv=50, mask="full")
# Two heads a tile.
TOGETHER = {"case": replace(CAUSAL, batch=2, heads_q=4, heads_kv=2), "config": {"tile_heads": 2}}
# Three heads that share keys: two are in the first tile, one is in the last.
UNEVEN_GROUP = {
    "case": replace(CAUSAL, heads_q=3, sinks=True), "config": {"tile_heads": 2, "uneven_group": 3},
}  # fmt: skip
# Tiles that see nothing.
BLIND = replace(CAUSAL, n_kv=100)
TOO_EARLY = (Race, Uninitialised)
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse)
LOST = (*WRONG_PHASE, DoubleWrite, OutOfBounds, AssertionError)
"""Of wrong tiles: whatever comes of it, the numbers at the latest."""

FILL_WAIT = "mbarrier.wait(self.empty.index(slot), self.phase(position) ^ 1)"
FULL_WAIT = "mbarrier.wait(self.full.index(self.slot(position)), self.phase(position), pred=pred)"
FULL = "return self.full.index(slot)"
RELEASE = "mbarrier.arrive(self.empty.index(self.slot(position)), count=1, pred=pred)"
BLOCK = "return at(self.chunks, self.slot(position))"
RING = "make_barriers(stages, 1), make_barriers(stages, consumers)"

EXPECT = "mbarrier.expect(barrier, BYTES + MORE)"
Q_EMPTY_WAIT = "mbarrier.wait(K.memory.q_empty.index(slot), ((turn // K.C.q_stages) & 1) ^ 1)"
Q_FULL_WAIT = "mbarrier.wait(K.memory.q_full.index(slot), (turn // K.C.q_stages) & 1, pred=tile.go)\n"
Q_RELEASE = "        if K.C.q_stages > 1:\n            mbarrier.arrive(K.memory.q_empty.index(slot), count=1)\n"
Q_RELEASE_IN_STEP = "mbarrier.arrive(K.memory.q_empty.index(w), count=1, pred=last)"
Q_RELEASE_OF_ONE = "mbarrier.arrive(K.memory.q_empty.index(w), count=1, pred=tile.go & (tile.blocks == 1))"
Q_BARRIERS = "make_barriers(Q_BUFFERS, 1),\n        make_barriers(Q_BUFFERS, 1),\n"
PUBLISH_NEXT = "next_tile(K, tile))\n        publish(K, turn, tile, work)\n"
LAST_V = "        copy_v(K, g, start_kv, n_kv, batch, kv_head, i)\n"
K_WAIT = '    K.k.wait(g)\n    stamp(K.trace, w, "k_ready", g)\n    s = start'
V_WAIT = "    K.v.wait(before)  # beside the scores"
S_READY = '    s = warpgroup_mma_wait(K.C.products_v, deps=[s])\n    stamp(K.trace, w, "s_ready", g)\n'
RELEASE_K = "    K.k.release(g)\n    if K.C.q_stages == 1:"
ACC_READY = '    acc = wait_output(acc)\n    stamp(K.trace, w, "o_ready", before)\n'
PASS_IN_STEP = "    if K.MASKED and tile.between is not None:\n        pass_over(K.{}, before + 1, g)\n"
RELEASE_V = "    K.v.release(before)\n" + PASS_IN_STEP.format("v") + "    if not"
FIRST_S_READY = "    s = warpgroup_mma_wait(0, deps=[s])\n"
NEXT_S_READY = "            s = warpgroup_mma_wait(K.C.products_v, deps=[s])\n            K.k.release(g, tile.go)\n"
NEXT_K_WAIT = "            K.k.wait(g, tile.go)\n"
LAST_V_WAIT = "        K.v.wait(before)\n        if K.C.q_stages > 1:\n"
LAST_ACC_READY = '        acc = wait_output(acc)\n        stamp(K.trace, w, "o_ready", before)\n        K.v.release(before)\n'
PASS_WAIT = "        channel.wait(position)\n"
PASS_RELEASE = "        channel.release(position)\n"
O_WAIT = "        tma_store_wait(K.C.o_buffers - 1)  # what was in the buffer has left\n        partition_barrier()\n"
O_FENCE = "        fence_async_shared()\n        partition_barrier()\n        batch, head"

TILE_EMPTY_WAIT = "    mbarrier.wait(K.memory.tile_empty.index(slot), ((turn // K.C.slots) & 1) ^ 1)\n"
TILE_FULL = "    mbarrier.arrive(K.memory.tile_full.index(slot), count=1)\n"
TILE_FULL_WAIT = "    mbarrier.wait(K.memory.tile_full.index(slot), (turn // K.C.slots) & 1)\n"
TILE_READ = "    place = place_of(w, slot, K)\n    p, note = position_and_note_of(w, slot, K)\n"
TILE_EMPTY = "    mbarrier.arrive(K.memory.tile_empty.index(slot), count=1)\n"
COUNTED = 'gl.atomic_add(K.counters, 1, sem="relaxed")'
NEXT_TILE = COUNTED + " + gl.num_programs(0)"


channel = partial(one_edit, KERNEL, CHANNEL)
tiles = partial(one_edit, KERNEL, TILES)
tma = partial(one_edit, KERNEL, TMA)
kernel = partial(one_edit, KERNEL, FORWARD)
ONE_Q = {"q_stages": 1}
BUGS = [
    # The channel.
    channel("a block is copied before its buffer is empty", FILL_WAIT, "pass", (Race, BarrierMisuse)),
    channel(
        "the first fill waits for a release",
        FILL_WAIT,
        FILL_WAIT.replace(" ^ 1", ""),
        (Deadlock,),
        says=("producer waits for parity 0 of k.empty[0] at", "phase 0 has 0 of 2 arrivals"),
    ),
    channel("the phase of empty never flips", FILL_WAIT, "mbarrier.wait(self.empty.index(slot), 1)", WRONG_PHASE),
    channel("a block is not waited for", FULL_WAIT, "pass", WRONG_PHASE),
    channel("the other phase of full is waited for", FULL_WAIT, FULL_WAIT.replace(", pred", " ^ 1, pred"), WRONG_PHASE),
    channel(
        "the phase of full never flips",
        FULL_WAIT,
        FULL_WAIT.replace("self.phase(position)", "0"),
        WRONG_PHASE,
    ),
    channel("a phase flips a buffer too late", FULL_WAIT, FULL_WAIT.replace("e(position)", "e(position - 1)"), WRONG_PHASE),
    channel("a wait without a tile", FULL_WAIT, FULL_WAIT.replace(", pred=pred", ""), (Deadlock,)),
    channel("all blocks in the first buffer", BLOCK, "return at(self.chunks, 0)", TOO_EARLY),
    channel(
        "a buffer beyond the ring",
        BLOCK,
        "return at(self.chunks, position % (self.stages + 1))",
        (OutOfBounds,),
        says=("index 2 of", "which has 2"),
    ),
    channel("the copy signals another buffer's barrier", FULL, "return self.full.index((slot + 1) % self.stages)", WRONG_PHASE),
    channel("a consumer gives back a buffer twice", RELEASE, RELEASE.replace("count=1", "count=2"), WRONG_PHASE),
    channel("a consumer gives back another buffer", RELEASE, RELEASE.replace("(position)", "(position + 1)"), WRONG_PHASE),
    channel(
        "a buffer is never given back", RELEASE, "pass", (Deadlock,), says=("producer waits for parity 0 of k.empty[0] at",)
    ),
    channel("one consumer is enough", RING, RING.replace("consumers", "1"), WRONG_PHASE),
    channel(
        "one consumer more than there are",
        RING,
        RING.replace("consumers", "consumers + 1"),
        (Deadlock,),
        says=("2 of 3 arrivals",),
    ),
    channel("full takes two arrivals", RING, RING.replace("stages, 1", "stages, 2"), (Deadlock,)),
    channel(
        "a barrier is not initialised",
        "for i in gl.static_range(number):",
        "for i in gl.static_range(number - 1):",
        (BarrierMisuse,),
        says=("not initialised",),
    ),
    channel(
        "a barrier is initialised again",
        "mbarrier.init(barriers.index(i)",
        "mbarrier.init(barriers.index(0)",
        (BarrierMisuse,),
        says=("again",),
    ),
    # Copies.
    tma("half of the bytes are expected", EXPECT, EXPECT.replace("BYTES", "BYTES // 2"), WRONG_PHASE),
    tma(
        "more bytes are expected than come",
        EXPECT,
        EXPECT.replace("BYTES", "BYTES + 16"),
        (Deadlock,),
        says=("16 bytes to come",),
    ),
    tma("no bytes are expected", EXPECT, "pass", (Deadlock, BarrierMisuse)),
    tma("an arrival in place of the bytes", EXPECT, "mbarrier.arrive(barrier, count=1)", WRONG_PHASE),
    tma(
        "the bytes of the first chunk alone",
        " + (descriptors[1].block_type.nbytes if NUMBER == 2 else 0)",
        "",
        WRONG_PHASE,
        case=replace(CAUSAL, head_dim=96),
        config={"head_dim": 96, "head_dim_v": 96},
    ),
    # Q.
    kernel("Q is copied before its buffer is empty", Q_EMPTY_WAIT, "pass", WRONG_PHASE, config=ONE_Q),
    kernel("the first Q waits for a release", Q_EMPTY_WAIT, Q_EMPTY_WAIT.replace(" ^ 1", ""), (Deadlock,)),
    kernel(
        "the phase of q_empty never flips",
        Q_EMPTY_WAIT,
        "mbarrier.wait(K.memory.q_empty.index(slot), 1)",
        WRONG_PHASE,
        case=SHORT,
    ),
    kernel(
        "the phase of q_empty flips at each tile",
        Q_EMPTY_WAIT,
        "mbarrier.wait(K.memory.q_empty.index(slot), (turn & 1) ^ 1)",
        WRONG_PHASE,
    ),
    kernel("both groups have one buffer of Q", "* GROUPS + w", "* GROUPS", WRONG_PHASE),
    kernel("a group beyond the last", "* GROUPS + w", "* GROUPS + w + 1", WRONG_PHASE),
    kernel("the first Q is not waited for", "\n    " + Q_FULL_WAIT, "\n", TOO_EARLY),
    kernel("the next Q is not waited for", "            " + Q_FULL_WAIT, "", TOO_EARLY),
    kernel(
        "the other phase of Q is waited for",
        "\n    " + Q_FULL_WAIT,
        "\n    " + Q_FULL_WAIT.replace("& 1,", "& 1 ^ 1,"),
        WRONG_PHASE,
    ),
    kernel(
        "the next Q is in the first buffer",
        "            " + Q_FULL_WAIT,
        "            slot = w\n            " + Q_FULL_WAIT,
        WRONG_PHASE,
    ),
    kernel("Q is never given back", Q_RELEASE, "", (Deadlock,), says=("producer waits for parity 0 of memory.q_empty[0] at",)),
    kernel("Q is given back twice", Q_RELEASE, Q_RELEASE + Q_RELEASE, WRONG_PHASE, case=SHORT),
    kernel(
        "Q is given back before its last product",
        "        q = at(K.memory.q, slot)\n",
        "        q = at(K.memory.q, slot)\n        mbarrier.arrive(K.memory.q_empty.index(slot), count=1)\n",
        WRONG_PHASE,
    ),
    kernel("the only Q is never given back", Q_RELEASE_IN_STEP, "pass", (Deadlock,), config=ONE_Q),
    kernel(
        "the only Q is given back after every block",
        Q_RELEASE_IN_STEP,
        Q_RELEASE_IN_STEP.replace("last", "True"),
        WRONG_PHASE,
        config=ONE_Q,
    ),
    kernel(
        "the only Q of a tile of one block is never given back", Q_RELEASE_OF_ONE, "pass", (Deadlock,), case=SHORT, config=ONE_Q
    ),
    kernel(
        "the only Q is given back after the first block",
        Q_RELEASE_OF_ONE,
        Q_RELEASE_OF_ONE.replace(" & (tile.blocks == 1)", ""),
        WRONG_PHASE,
        config=ONE_Q,
    ),
    kernel(
        "q_empty takes two arrivals",
        Q_BARRIERS,
        "make_barriers(Q_BUFFERS, 1),\n        make_barriers(Q_BUFFERS, 2),\n",
        (Deadlock,),
    ),
    kernel(
        "q_full takes two arrivals",
        Q_BARRIERS,
        "make_barriers(Q_BUFFERS, 2),\n        make_barriers(Q_BUFFERS, 1),\n",
        (Deadlock,),
    ),
    # K and V.
    kernel("K is not waited for", K_WAIT, "    s = start", TOO_EARLY),
    kernel("the next tile's K is not waited for", NEXT_K_WAIT, "", WRONG_PHASE),
    kernel("the next tile's K is not waited for with one Q", "\n    K.k.wait(g, tile.go)\n", "\n", WRONG_PHASE, config=ONE_Q),
    kernel("V is waited for too late", V_WAIT, "    #", TOO_EARLY),
    kernel("the last V is not waited for", LAST_V_WAIT, "        if K.C.q_stages > 1:\n", TOO_EARLY),
    kernel("the last V is not copied", LAST_V, "", (Deadlock,), says=("v.full",)),
    kernel(
        "the next tile's blocks take the last one's positions",
        "        g += 1\n    if not K.C.static",
        "    if not K.C.static",
        WRONG_PHASE,
    ),
    kernel(
        "V is given back before its product is done",
        ACC_READY + RELEASE_V,
        RELEASE_V.removesuffix("    if not") + ACC_READY + "    if not",
        (Race,),
    ),
    kernel(
        "the last V is given back before its product is done",
        LAST_ACC_READY,
        "        K.v.release(before)\n        acc = wait_output(acc)\n",
        (Race,),
    ),
    kernel(
        "K is given back before its product is done",
        S_READY + RELEASE_K,
        "    K.k.release(g)\n" + S_READY + "    if K.C.q_stages == 1:",
        (Race,),
    ),
    kernel(
        "the next tile's K is given back before its product is done",
        NEXT_S_READY,
        "            K.k.release(g, tile.go)\n            s = warpgroup_mma_wait(K.C.products_v, deps=[s])\n",
        (Race,),
    ),
    kernel(
        "K is never given back",
        RELEASE_K,
        "    if K.C.q_stages == 1:",
        (Deadlock,),
        says=("producer waits for parity 0 of k.empty[1] at",),
    ),
    kernel(
        "V is never given back",
        RELEASE_V,
        RELEASE_V.replace("    K.v.release(before)\n", ""),
        (Deadlock,),
        says=("producer waits for parity 0 of v.empty[0] at",),
    ),
    kernel("the next tile's K is never given back", NEXT_S_READY, NEXT_S_READY.splitlines(True)[0], (Deadlock,)),
    kernel("the last V is never given back", LAST_ACC_READY, LAST_ACC_READY.splitlines(True)[0], (Deadlock,)),
    kernel("K is given back twice", RELEASE_K, "    K.k.release(g)\n" + RELEASE_K, WRONG_PHASE),
    # Blocks that only other groups see.
    kernel("a block is passed over and not given back", PASS_RELEASE, "", (Deadlock,)),
    kernel(
        "K is not passed over",
        PASS_IN_STEP.format("k"),
        "",
        WRONG_PHASE,
        case=WINDOW,
    ),
    kernel("V is not passed over", RELEASE_V, "    K.v.release(before)\n    if not", WRONG_PHASE, case=WINDOW),
    kernel(
        "K is not passed over at a tile's end",
        "            pass_over(K.k, before + 1, g)\n",
        "            pass\n",
        WRONG_PHASE,
    ),
    kernel(
        "V is not passed over at a tile's end",
        "            pass_over(K.v, before + 1, g)\n",
        "            pass\n",
        WRONG_PHASE,
    ),
    kernel(
        "positions after the lead are not counted", "            g += 1 + skip\n", "            g += 1\n", LOST, case=WINDOW
    ),
    kernel("positions after the lead are counted at every block", "            skip = 0\n", "", LOST, case=WINDOW),
    kernel("positions at the end are not counted", "        g += 1 + skip + after\n", "        g += 1 + skip\n", LOST),
    # Products.
    kernel("the scores are used before they are done", S_READY, S_READY.replace("_v,", "_v + 1,"), (Unfinished,)),
    kernel("the scores are not waited for", S_READY, "", (Unfinished, Race)),
    kernel("the first scores are not waited for", FIRST_S_READY, "", (Unfinished, Race)),
    kernel(
        "the next tile's first scores are not waited for", NEXT_S_READY, NEXT_S_READY.splitlines(True)[1], (Unfinished, Race)
    ),
    kernel(
        "O is used before it is done",
        "warpgroup_mma_wait(0, deps=[acc[c]])",
        "warpgroup_mma_wait(1, deps=[acc[c]])",
        (Unfinished, Race),
    ),
    kernel("O is not waited for", ACC_READY, "", (Unfinished, Race)),
    kernel("the last product is not waited for", LAST_ACC_READY, LAST_ACC_READY.splitlines(True)[2], (Unfinished, Race)),
    # Tiles.
    tiles("a tile is published over one that is not read", TILE_EMPTY_WAIT, "", (Race, BarrierMisuse), case=SHORT),
    tiles("the first tile waits for a reader", TILE_EMPTY_WAIT, TILE_EMPTY_WAIT.replace(" ^ 1", ""), (Deadlock,)),
    tiles(
        "the phase of tile_empty flips too early",
        TILE_EMPTY_WAIT,
        TILE_EMPTY_WAIT.replace("turn //", "(turn + 1) //"),
        WRONG_PHASE,
        case=SHORT,
    ),
    tiles("nobody says that a tile is known", TILE_FULL, "", (Deadlock,), says=("tile_full",)),
    tiles(
        "a tile is said to be known too early",
        "    put(tiles, slot, END, work.end)\n",
        TILE_FULL.rstrip() + "\n    put(tiles, slot, END, work.end)\n",
        WRONG_PHASE,
    ),
    tiles("a tile is not waited for", TILE_FULL_WAIT, "", TOO_EARLY),
    tiles(
        "the phase of tile_full never flips",
        TILE_FULL_WAIT,
        "    mbarrier.wait(K.memory.tile_full.index(slot), 0)\n",
        WRONG_PHASE,
    ),
    tiles(
        "all tiles are published in one slot",
        "slot = turn % K.C.slots\n" + TILE_EMPTY_WAIT,
        "slot = 0 * turn\n" + TILE_EMPTY_WAIT,
        WRONG_PHASE,
    ),
    tiles(
        "all tiles are read in one slot",
        "slot = turn % K.C.slots\n" + TILE_FULL_WAIT,
        "slot = 0 * turn\n" + TILE_FULL_WAIT,
        WRONG_PHASE,
    ),
    tiles("nobody says that there is no tile", "(tile < K.heads.tiles).to(gl.int32)", "1", (Deadlock,)),
    tiles("the first tiles are taken twice", NEXT_TILE, COUNTED, (DoubleWrite,)),
    tiles("the counter is not counted up", NEXT_TILE, "gl.load(K.counters) + gl.num_programs(0)", (DoubleWrite,)),
    tiles("the next tile is the next number", NEXT_TILE, COUNTED + " + 1", (DoubleWrite,), ctas=2),
    tiles(
        "both groups have the same rows",
        "row = row_of_head(w, get(tiles, slot, ROW), head, K)\n",
        "row = get(tiles, slot, ROW)\n",
        (DoubleWrite,),
    ),
    kernel("the next tile is not published", PUBLISH_NEXT, PUBLISH_NEXT.splitlines(True)[0], (Deadlock,), says=("tile_full",)),
    kernel("no group says that it has read a tile", TILE_READ + TILE_EMPTY, TILE_READ, (Deadlock,), says=("tile_empty",)),
    kernel(
        "a tile is given back before it is read",
        TILE_READ + TILE_EMPTY,
        TILE_EMPTY + TILE_READ,
        (Race,),
        case=SHORT,
    ),
    kernel(
        "one reader of a tile is enough",
        "make_barriers(C.slots, C.groups + C.producers - 1)",
        "make_barriers(C.slots, 1)",
        WRONG_PHASE,
        case=SHORT,
    ),
    kernel("a tile is known after two arrivals", "make_barriers(C.slots, 1)", "make_barriers(C.slots, 2)", (Deadlock,)),
    kernel("a tile goes where the next one belongs", "(turn - 1) % K.C.slots", "turn % K.C.slots", LOST),
    kernel("the counter of tiles is not set back", 'gl.atomic_xchg(K.counters, 0, sem="relaxed")', "pass", (), launches=2),
    kernel("the counter of CTAs is not set back", 'gl.atomic_xchg(K.counters + 1, 0, sem="relaxed")', "pass", (), launches=3),
    kernel("the first CTA to end sets the counters back", "gl.num_programs(0) - 1:", "0:", (DoubleWrite,), ctas=2),
    # Out.
    kernel("O overwrites what has not left", O_WAIT, "", (Race,)),
    kernel(
        "a piece of O overwrites what has not left",
        O_WAIT,
        O_WAIT.replace("- 1", ""),
        (Race,),
        case=replace(CAUSAL, head_dim=128),
        config={"head_dim": 128, "head_dim_v": 128, "o_buffers": 2},
    ),
    kernel("both groups have one buffer of O", "w * K.C.o_buffers + BUFFER", "BUFFER", (Race, MissingFence)),
    kernel(
        "no fence before the store of O",
        O_FENCE,
        "        partition_barrier()\n        batch, head",
        (MissingFence,),
        says=("no fence_async_shared",),
    ),
    kernel("the store of O is not waited for", "    tma_store_wait(0)\n", "", (Unfinished,)),
    kernel("one store of O may be under way at the end", "tma_store_wait(0)", "tma_store_wait(1)", (Unfinished,)),
    kernel("rows beyond the last have an LSE", "exists = rows < n_q", "exists = rows < n_q + 1", (OutOfBounds,)),
    # An arrival that counts for the block before does no harm where every other group has arrived already.
    kernel("a block is given back before it is full", PASS_WAIT, "", WRONG_PHASE, case=WINDOW, config={"groups": 3}),
    kernel(
        "the launch does not take its turn",
        "level.\n        take_turn()\n",
        "level.\n        pass\n",
        (Unfinished,),
        says=("launch_pdl",),
    ),
]

WRONG_NUMBERS = [
    kernel("both groups have the first head's Q", "head_of_group(w, work.head", "head_of_group(0, work.head", (), **TOGETHER),
    tiles("a group without a head has rows", "gl.where(is_last, K.lengths.n_q, row)", "row", LOST, **UNEVEN_GROUP),
    tiles("the first tile lacks a head", "== K.C.tiles_abreast - 1", "== 0", LOST, **UNEVEN_GROUP),
    tiles(
        "a head that is not there",
        "gl.minimum(of_key, C.uneven_group - 1)",
        "of_key",
        (OutOfBounds,),
        **UNEVEN_GROUP,
    ),
    tiles(
        "key heads fill their tiles",
        "* C.uneven_group + gl",
        "* C.tiles_abreast * C.tile_heads + gl",
        LOST,
        case=replace(CAUSAL, heads_q=6, heads_kv=2),
        config=UNEVEN_GROUP["config"],
    ),
    kernel("heads of LSE for tiles, not for heads", "head_of_group(0, K.heads.heads, K.C)", "K.heads.heads", LOST, **TOGETHER),
    kernel("V lags a block behind", "            i = next\n", "", ()),
    tma(
        "both chunks of columns are the first",
        "c * chunks[0].shape[1])",
        "0)",
        (),
        case=replace(CAUSAL, head_dim=96),
        config={"head_dim": 96, "head_dim_v": 96},
    ),
    kernel("no block is masked", "if not is_whole(i, tile):", "if i < 0:", ()),
    kernel(
        "all heads have the first one's keys",
        "kv_head = work.head // K.heads.group",
        "kv_head = work.head * 0",
        (),
        case=replace(CAUSAL, heads_q=4, heads_kv=2),
    ),
    kernel("O is not rescaled", "        acc = rescaled(acc, factor)\n", "        pass\n", (), config={"optimistic": False}),
    kernel(
        "O is not normalised",
        "share = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)",
        "share = gl.where(row_sum == 0.0, 0.0, 1.0)",
        (),
    ),
    kernel("O grows from tile to tile", "        acc = no_output(K.C)\n", "", ()),
    tiles(
        "the lead may be beyond the last block",
        "gl.minimum(gl.maximum(full_end, begin), end - 1)",
        "gl.minimum(gl.maximum(full_end, begin), end)",
        LOST,
        case=replace(CAUSAL, n_q=128, n_kv=128, mask="ahead"),
    ),
    tiles("the first block comes again", "return i + (i >= lead).to(gl.int32)", "return i", (), case=WINDOW),
]


@pytest.mark.parametrize("bug", BUGS + WRONG_NUMBERS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


@pytest.mark.parametrize("case", [CAUSAL, WINDOW, SHORT, BLIND], ids=str)
@pytest.mark.parametrize("q_stages", [1, 2])
def test_no_false_alarm(case, q_stages, tmp_path):
    assert_right_unless_broken(replace(KERNEL, case=case, config=replace(KERNEL.config, q_stages=q_stages)), tmp_path)
