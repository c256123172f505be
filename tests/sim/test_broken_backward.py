"""Mistakes made in Hopper's backward, one at a time: the simulator finds each in every order."""

from dataclasses import replace
from functools import partial

import pytest
from backward import Backward
from broken import Bug, Kernel, assert_found, assert_found_in_some_order, assert_right_unless_broken, one_edit
from problems import Case

from strobe.kernels.sm90.backward_config import Config
from strobe.sim import BarrierMisuse, Deadlock, DoubleWrite, MissingFence, Race, Unfinished, Uninitialised

BACKWARD = "strobe.kernels.sm90.backward"
TILES, SCORES, STORES = (f"{BACKWARD}_{name}" for name in ("tiles", "scores", "stores"))
# Three blocks, which three, two and one tile of two heads see.
CAUSAL = Case(300, 300, batch=1, heads_q=2, heads_kv=1, head_dim=64, mask="causal")
KERNEL = Kernel(
    BACKWARD,
    90,
    CAUSAL,
    Config(64, 64, 128, turns=True, folded=True),
    lambda kernels, bug, t, config: Backward(t, config, bug.ctas, kernels).run,
)
# An odd number of tiles.
ODD = replace(CAUSAL, heads_q=1)
# Three blocks that no row sees, and two more.
BLIND = replace(CAUSAL, n_q=100, n_kv=600, mask="window")
# Blocks that are listed, of two heads.
PACKED = replace(CAUSAL, batch=4, packed=True, heads_kv=2)
# Rows and keys that exist and are not used.
USED = replace(CAUSAL, n_q=150, n_kv=170, batch=3, seqused=True)
TOO_EARLY = (Race, Uninitialised)
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse)
LOST = (*WRONG_PHASE, MissingFence, DoubleWrite, AssertionError)
"""Of wrong tiles: whatever comes of it, the numbers at the latest."""

NUMBER_EMPTY_WAIT = "    mbarrier.wait(memory.number_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)\n"
NUMBER = "    memory.number.index(slot).store(gl.full([1], 0, gl.int32, scalar_layout(1)) + number)\n"
NUMBER_FULL = "    mbarrier.arrive(memory.number_full.index(slot), count=1)\n"
NUMBER_FULL_WAIT = "    mbarrier.wait(memory.number_full.index(slot), (turn // SLOTS) & 1)\n"
NUMBER_READ = "    number = gl.max(memory.number.index(slot).load(scalar_layout(WARPS)), 0)\n"
NUMBER_EMPTY = "    mbarrier.arrive(memory.number_empty.index(slot), count=1)\n"
NEXT_NUMBER = "number + gl.num_programs(0) if K.C.order == 0 else number"
K_EMPTY_WAIT = "                mbarrier.wait(K.memory.k.empty.index(0), (block & 1) ^ 1)\n"
V_EMPTY_WAIT = "        mbarrier.wait(K.memory.v.empty.index(half), (block & 1) ^ 1)\n"
TILE_EMPTY_WAIT = "    mbarrier.wait(K.memory.empty.index(stage), phase_of(g) ^ 1)\n"
FIRST_TILE_COPY = "            copy_tile(K, 0, g, work)\n"
K_COPY = "            copy_k(K, block, work)\n"
STATISTICS_BYTES = "    mbarrier.expect(full, K.C.statistics_bytes)\n"
TILE_BARRIERS = "make_barriers(STAGES, 3),\n        make_barriers(STAGES, 2),\n"

K_WAIT = "    mbarrier.wait(K.memory.k.full.index(k_stage), (block // K.C.k_stages) & 1)\n"
V_WAIT = "    mbarrier.wait(K.memory.v.full.index(w), block & 1)\n"
FIRST_PRODUCTS = "    s = start_products_held(half_of(K.memory.k.part(at_k), w), held_k, q)\n    s = subtract("
TILE_WAIT = "    mbarrier.wait(K.memory.full.index(stage), phase_of(g))\n" + FIRST_PRODUCTS
DP_READY = "    dp, p = warpgroup_mma_wait(0,"
DS_WAIT = "        await_ds(w, stage ^ 1, g > first)\n        dq = start_dq("
LAST_DS_WAIT = "    await_ds(w, stage_of(g), True)\n"
DS_STORE = "        K.memory.ds.index(parity).slice(w * HALF, HALF).store(ds)\n"
DS_FENCE = DS_STORE + "    fence_async_shared()\n"
DQ_READY = "        dq = warpgroup_mma_wait(K.C.products_v + K.C.products, deps=[dq])\n"
ANNOUNCEMENT = "    announce(DS_READY + 2 * (1 - w) + parity)\n"
DS_ANNOUNCED = "        announce_ds(w, stage)\n"
DQ_LEFT = "            tma_store_wait(0)  # what was in memory.dq has left\n"
LAST_DQ_READY = "    dq = warpgroup_mma_wait(0, deps=[dq])\n"
LAST_DQ_LEFT = "    tma_store_wait(0)\n    partition_barrier()\n    give_dq"
LAST_DQ = "            give_last_dq(w, K, g - 1, (block - 1) & 1, place)\n"
SERIAL_S_READY = "    s = warpgroup_mma_wait(0, deps=[s])\n"
SERIAL_MASK = "    p = gl.exp2(x)\n    if (tile < "
GIVEN = "        if g > first:\n            give_dq(w, K, g - 1, fixed, stage ^ 1, place)\n"
THIRD_LEFT = "            tma_store_wait(0)\n            partition_barrier()\n            add_to_dq(w, third"
PRODUCTS_READY = "    dv = finished(dv, 0)\n    dk = finished(dk, 0)\n"
TILE_RELEASE = "        mbarrier.arrive(K.memory.empty.index(stage_of(g)), count=1)\n"
V_RELEASE = "    mbarrier.arrive(K.memory.v.empty.index(w), count=1)\n"
K_RELEASE = "        mbarrier.arrive(K.memory.k.empty.index(0), count=1)\n"
FIRST_TURN = "    if K.C.turns and w == 1:\n        announce(TURN)\n"
LAST_TURN = "    if K.C.turns and w == 0:\n        meet(TURN)\n"


ENTRY_END = (
    "(producer, (K,))], [4, 1], [240, 24])\n",
    "(producer, (K,))], [4, 1], [240, 24])\n        take_turn()\n",
)


kernel = partial(one_edit, KERNEL, BACKWARD)
tiles = partial(one_edit, KERNEL, TILES)
scores = partial(one_edit, KERNEL, SCORES)
stores = partial(one_edit, KERNEL, STORES)


def moved(module, what, text, after, errors, **more) -> Bug:
    """In `module`, `text` stands behind another one instead."""
    return Bug(what, KERNEL, module, ((text, ""), (after, after + text)), errors, **more)


WITHOUT_TURNS = {
    "case": replace(CAUSAL, head_dim=96, mask="full"),
    "config": {"head_dim": 96, "head_dim_v": 96, "tile_q": 64, "turns": False, "folded": False},
}
SERIAL = {
    "case": replace(CAUSAL, head_dim=192, head_dim_v=128),
    "config": {"head_dim": 192, "head_dim_v": 128, "tile_q": 64, "turns": False, "folded": False},
}
ONE_K = {
    "case": replace(CAUSAL, head_dim=128),
    "config": {"head_dim": 128, "head_dim_v": 128, "tile_q": 64},
}
BUGS = [
    # Which block.
    tiles("a block is announced over one that is not read", NUMBER_EMPTY_WAIT, "", WRONG_PHASE, case=PACKED),
    tiles("the first block waits for a reader", NUMBER_EMPTY_WAIT, NUMBER_EMPTY_WAIT.replace(" ^ 1", ""), (Deadlock,)),
    moved(TILES, "a block is announced before it is written", NUMBER, NUMBER_FULL, TOO_EARLY),
    tiles("nobody says that a block is known", NUMBER_FULL, "", (Deadlock,), says=("number_full",)),
    tiles("a block is not waited for", NUMBER_FULL_WAIT, "", TOO_EARLY),
    tiles("nobody says that a block was read", NUMBER_EMPTY, "", (Deadlock,), says=("number_empty",)),
    moved(TILES, "a block is given back before it is read", NUMBER_READ, NUMBER_EMPTY, (Race,), case=PACKED),
    kernel("the first blocks are taken twice", NEXT_NUMBER, "number", (DoubleWrite,)),
    kernel(
        "one block of each head is not listed",
        "gl.load(listed) * heads_kv",
        "(gl.load(listed) - 1) * heads_kv",
        (),
        case=PACKED,
    ),
    tiles(
        "a listed block is the first head's",
        "(at), bundle + within % width",
        "(at), bundle + within % 1",
        (DoubleWrite,),
        case=PACKED,
    ),
    tiles(
        "listed blocks are counted from the wrong one",
        "blocks - 1 - gl.load(at + 1) // KEYS",
        "blocks - 1",
        (DoubleWrite,),
        case=PACKED,
    ),
    kernel("the counter of blocks is not set back", "        gl.atomic_xchg(K.counters, 0)\n", "", ()),
    # Copies.
    kernel("K is copied before its buffer is empty", K_EMPTY_WAIT, "                pass\n", WRONG_PHASE, **ONE_K),
    kernel("the phase of K never flips", K_EMPTY_WAIT, K_EMPTY_WAIT.replace("(block & 1) ^ 1", "1"), WRONG_PHASE, **ONE_K),
    kernel("K is copied before the last dQ with the one in its place", FIRST_TILE_COPY, K_COPY + FIRST_TILE_COPY, WRONG_PHASE),
    kernel("V is copied before its buffer is empty", V_EMPTY_WAIT, "", WRONG_PHASE),
    kernel("the phase of V never flips", V_EMPTY_WAIT, V_EMPTY_WAIT.replace("(block & 1) ^ 1", "1"), WRONG_PHASE),
    kernel("a tile is copied before its buffer is empty", TILE_EMPTY_WAIT, "", WRONG_PHASE),
    kernel("the phase of tiles flips at each", TILE_EMPTY_WAIT, TILE_EMPTY_WAIT.replace("phase_of(g)", "(g & 1)"), WRONG_PHASE),
    kernel("the next block's tiles take this one's positions", "            g += count\n", "", WRONG_PHASE),
    kernel("the bytes of the statistics are not expected", STATISTICS_BYTES, "", WRONG_PHASE),
    kernel(
        "half of the statistics are expected", STATISTICS_BYTES, STATISTICS_BYTES.replace("bytes", "bytes // 2"), WRONG_PHASE
    ),
    kernel("a tile is full after two arrivals", TILE_BARRIERS, TILE_BARRIERS.replace("3", "2"), WRONG_PHASE),
    kernel("one reader of a tile is enough", TILE_BARRIERS, TILE_BARRIERS.replace("2", "1"), WRONG_PHASE),
    kernel("K is not waited for", K_WAIT, "", WRONG_PHASE),
    kernel("V is not waited for", V_WAIT, "", WRONG_PHASE),
    kernel("the other phase of V is waited for", V_WAIT, V_WAIT.replace("block & 1", "(block & 1) ^ 1"), WRONG_PHASE),
    kernel("a tile is not waited for", TILE_WAIT, FIRST_PRODUCTS, WRONG_PHASE),
    kernel("a tile is never given back", TILE_RELEASE, "", (Deadlock,), says=("memory.empty",)),
    kernel("a tile is given back twice", TILE_RELEASE, TILE_RELEASE + TILE_RELEASE, WRONG_PHASE),
    Bug(
        "a tile is given back before its products are done",
        KERNEL,
        BACKWARD,
        ((TILE_RELEASE, ""), (PRODUCTS_READY, TILE_RELEASE[4:] + PRODUCTS_READY)),
        (Race,),
    ),
    kernel("V is never given back", V_RELEASE, "", (Deadlock,)),
    kernel("K is never given back", K_RELEASE, "", (Deadlock,), **ONE_K),
    moved(BACKWARD, "V is given back before its first product", V_RELEASE, V_WAIT, (Race,)),
    Bug(
        "K is given back before its last product",
        KERNEL,
        BACKWARD,
        ((K_RELEASE, ""), (V_RELEASE, V_RELEASE + K_RELEASE[4:])),
        (Race,),
        **ONE_K,
    ),
    # Products.
    kernel(
        "the scores are used before they are done",
        "_wait(K.C.products_dp, deps=[s])",
        "_wait(K.C.products_dp + 1, deps=[s])",
        (Unfinished,),
    ),
    kernel("dP is used before it is done", DP_READY, DP_READY.replace("0,", "1,"), (Unfinished,)),
    kernel("dQ is used before it is done", DQ_READY, DQ_READY.replace("products,", "products + 1,"), (Unfinished,)),
    kernel("the last dQ is used before it is done", LAST_DQ_READY, "", (Unfinished, Race)),
    kernel(
        "dK is not among what a wait returns",
        PRODUCTS_READY + "    return",
        PRODUCTS_READY.partition("\n")[0] + "\n    return",
        (Unfinished,),
        says=("not among the deps",),
    ),
    kernel("dK is not waited for", PRODUCTS_READY, "    dv = finished(dv, K.C.products)\n", (Unfinished, Race)),
    kernel(
        "leftovers are added to dQ",
        "        if g > first:\n            add_to_dq",
        "        if g >= first:\n            add_to_dq",
        LOST,
    ),
    # dS.
    kernel("the other half of dS is not waited for", DS_WAIT, "        dq = start_dq(", WRONG_PHASE),
    kernel("the first tile waits for a dS", DS_WAIT, DS_WAIT.replace("g > first", "True"), (Deadlock,)),
    kernel("the other dS is waited for", DS_WAIT, DS_WAIT.replace("stage ^ 1", "stage"), WRONG_PHASE),
    kernel("the last dS is not waited for", LAST_DS_WAIT, "", WRONG_PHASE),
    kernel("the last dQ is forgotten", LAST_DQ, "            pass\n", (BarrierMisuse, AssertionError)),
    kernel("nobody says that its dS is there", ANNOUNCEMENT, "    pass\n", (Deadlock,), says=("named barrier",)),
    kernel(
        "dS is announced before it is written", DS_STORE, "    " + ANNOUNCEMENT + DS_STORE, (Race, MissingFence, *WRONG_PHASE)
    ),
    kernel("dS is announced before the other one is read", DQ_READY + DS_ANNOUNCED, DS_ANNOUNCED + DQ_READY, (Race,)),
    kernel("a group announces its dS to itself", ANNOUNCEMENT, ANNOUNCEMENT.replace("(1 - w)", "w"), WRONG_PHASE),
    kernel("one buffer of dS", DS_STORE, DS_STORE.replace("parity", "0 * parity"), (Race, Uninitialised, MissingFence)),
    kernel("no fence before dS is read", DS_FENCE, DS_STORE, (MissingFence,)),
    # Statistics.
    kernel("ones are not written", "        ones.index(0).store(", "        (", (Uninitialised,)),
    kernel(
        "no fence before ones are read", "    fence_async_shared()\n    take_turn()\n", "    take_turn()\n", (MissingFence,)
    ),
    kernel(
        "the fence comes before the ones",
        "    memory = make_memory(q_wide.dtype, C)\n    fence_async_shared()\n",
        "    fence_async_shared()\n    memory = make_memory(q_wide.dtype, C)\n",
        (MissingFence,),
    ),
    # The turn of the launch.
    kernel("the launch does not take its turn", "    take_turn()\n", "", (Race, Unfinished)),
    Bug(
        "the launch takes its turn too late",
        KERNEL,
        BACKWARD,
        (("    take_turn()\n", ""), ENTRY_END),
        (Race,),
        says=("nothing orders it after the write by the launch ahead",),
    ),
    # Turns.
    kernel("nobody has the first turn", FIRST_TURN, "", (Deadlock,)),
    kernel("the turn is not handed on", "        announce(TURN + 1 - w)\n", "        pass\n", (Deadlock,)),
    kernel("the last turn is not taken", LAST_TURN, "", (BarrierMisuse,), says=("left in use",)),
    # Out.
    kernel("dQ overwrites what has not left", DQ_LEFT, "", (Race,)),
    kernel("the last dQ overwrites what has not left", LAST_DQ_LEFT, "    give_dq", (Race,)),
    stores(
        "no fence before dQ is added",
        "    fence_async_shared()\n    if K.C.order == 0:",
        "    if K.C.order == 0:",
        (MissingFence,),
    ),
    stores("dV overwrites a dQ that has not left", "    tma_store_wait(0)\n    if K.outputs", "    if K.outputs", (Race,)),
    stores("dV overwrites the dK before", "    tma_store_wait(0)\n    if K.outputs", "    if K.outputs", (Race,), case=BLIND),
    stores(
        "dK overwrites a dV that has not left",
        "    tma_store_wait(0)\n    leave_chunks(w, K, dk,",
        "    leave_chunks(w, K, dk,",
        (Race,),
    ),
    stores(
        "no fence before the stores",
        "    fence_async_shared()\n    partition_barrier()\n    for c",
        "    partition_barrier()\n    for c",
        (MissingFence,),
    ),
    kernel("the last store is not waited for", LAST_DQ + "    tma_store_wait(0)\n", LAST_DQ, (Unfinished,)),
]

SERIAL_BUGS = [
    kernel("P is made before S is done", SERIAL_S_READY + "    lse", "    lse", (Unfinished,), **SERIAL),
    kernel("dS is used before dP is done", "    dp = warpgroup_mma_wait(0, deps=[dp])\n", "", (Unfinished,), **SERIAL),
    kernel(
        "the other half of dS is not waited for, serially",
        "        await_ds(w, stage ^ 1, g > first)\n    put_ds",
        "        pass\n    put_ds",
        WRONG_PHASE,
        **SERIAL,
    ),
    kernel("dS is announced before dQ is made of the other", GIVEN + DS_ANNOUNCED, DS_ANNOUNCED + GIVEN, (Race,), **SERIAL),
    kernel(
        "the third share is used before it is done",
        "            third = warpgroup_mma_wait(0, deps=[third])\n",
        "",
        (Unfinished, Race),
        **SERIAL,
    ),
    kernel("the third share overwrites what has not left", THIRD_LEFT, "            add_to_dq(w, third", (Race,), **SERIAL),
    stores(
        "dK's end overwrites its begin", "        tma_store_wait(0)\n        copy_out(", "        copy_out(", (Race,), **SERIAL
    ),
]

K_OVER_K = kernel(
    "K is copied before the only tile of the block before has read the one in its place",
    "                if g - first == 1:\n",
    "                if g < 0:\n",
    (Race,),
    case=replace(CAUSAL, n_q=100, n_kv=900, heads_q=1, mask="full"),
)

WRONG_NUMBERS = [
    kernel("both groups add the third share", "        if (g & 1) == w:\n", "        if g >= 0:\n", (), **SERIAL),
    kernel("the third share goes to the second's place", "place + (2 - w) * 64", "place + (1 - w) * 64", (), **SERIAL),
    kernel("no tile is masked, serially", SERIAL_MASK, SERIAL_MASK.replace("if", "if (g < 0) &"), (), **SERIAL),
    tiles(
        "a user's mask is asked of cut tiles alone, serially",
        "        full_begin = end\n",
        "        pass\n",
        (),
        case=replace(SERIAL["case"], n_q=150, n_kv=170, mask="function"),
        config=SERIAL["config"],
    ),
    tiles("rows that are not used count", "lengths.used_q, batch", "None, batch", (), case=USED),
    tiles("keys that are not used count", "lengths.used_kv, batch", "None, batch", (), case=USED),
    kernel("every tile has the first one's statistics", "K.heads.padded + row) * 2", "K.heads.padded) * 2", ()),
    kernel("the LSE is not folded", "    s = subtract(s, 0, stage, K.memory, K.C)\n", "", ()),
    kernel("dP's statistics are those of S", "dp = subtract(dp, K.C.tile_q,", "dp = subtract(dp, 0,", ()),
    kernel("both groups add the same share of dQ", " // 64 * K.C.head_dim + first_share(w, K.C)", " // 64 * K.C.head_dim", ()),
    kernel("every head of a group adds to the first one's dQ", "                row += K.heads.padded\n", "", ()),
    kernel("no tile is masked", "    if K.MASKED:\n", "    if K.MASKED and g < 0:\n", ()),
    kernel(
        "a block's last dQ is made of the next one's K",
        "        at_k_before = k_stage ^ (before > 0).to(gl.int32)\n",
        "        at_k_before = k_stage\n",
        (),
    ),
    kernel(
        "a block's last dQ goes astray",
        "place = consume(w, K, block, g, place,",
        "place = consume(w, K, block, g, 0 * place,",
        (),
    ),
    stores("dK is not scaled", "leave_chunks(w, K, dk, K.outputs.scale,", "leave_chunks(w, K, dk, 1.0,", ()),
    stores("registers are in another order", "[8, 0], [0, 2], [0, 4]", "[0, 2], [8, 0], [0, 4]", ()),
    scores(
        "delta is not subtracted",
        "ds = weighed(p, of_function, K.score) * (dp - delta)",
        "ds = weighed(p, of_function, K.score) * dp",
        (),
        config={"folded": False},
    ),
]


@pytest.mark.parametrize("bug", BUGS + SERIAL_BUGS + WRONG_NUMBERS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"case": ODD}, {"case": BLIND}, {"case": PACKED}, {"config": {"folded": False}}, WITHOUT_TURNS, ONE_K, SERIAL],
    ids=["causal", "odd", "blind", "packed", "not folded", "without turns", "one K", "serial"],
)
def test_no_false_alarm(changes, tmp_path):
    case, config = changes.get("case", CAUSAL), replace(KERNEL.config, **changes.get("config", {}))
    assert_right_unless_broken(replace(KERNEL, case=case, config=config), tmp_path)


def test_it_is_found_in_some_orders(tmp_path):
    """Nothing but the speed of the roles decides."""
    assert_found_in_some_order(K_OVER_K, tmp_path)
