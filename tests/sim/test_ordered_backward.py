"""Hopper's backward with an order of what is added to dQ: the same bits in every order, however few CTAs run at a time; and
mistakes made in it, which the simulator finds."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from backward import Backward
from broken import ORDERS as BUG_ORDERS
from broken import Bug, Kernel, assert_found, one_edit
from problems import Case, tensors

from strobe.kernels.common import arguments
from strobe.kernels.sm90 import backward_launch
from strobe.kernels.sm90.backward_config import Config
from strobe.sim import Deadlock, DoubleWrite, Race, Uninitialised

FP16, BF16 = torch.float16, torch.bfloat16
AS_THEY_COME = Config(64, 64, 128, turns=True, folded=True)
WAYS = {"order": 1}, {"order": -1}, {"order": 1, "downwards": True}
UP, DOWN, LAST_ROWS = (replace(AS_THEY_COME, **way) for way in WAYS)
UP96, DOWN96, LAST_ROWS96 = (Config(96, 96, 64, turns=True, held_k=64, held_v=64, **way) for way in WAYS)
UP128, DOWN128, LAST_ROWS128 = (Config(128, 128, 64, turns=True, held_k=64, folded=True, **way) for way in WAYS)
ORDERS = (("in_order", 0), ("random", 1), ("late", 0), ("early", 0), *(("uneven", number) for number in range(8)))


def case(n_q, n_kv, heads=(1, 1), batch=1, head_dim=64, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, head_dim, **more)


CASES = [
    # All begin at the first tile; blocks of one tile; other head dims.
    (case(300, 300, heads=(4, 2)), FP16, UP),
    (case(100, 700), BF16, UP),
    (Case(300, 300, 1, 2, 1, 48), BF16, UP),
    # Statistics that are not folded.
    (case(300, 300, heads=(2, 1)), BF16, replace(UP, folded=False)),
    # The last keys first.
    (case(200, 300, heads=(2, 1), batch=2, mask="causal"), BF16, DOWN),
    (case(150, 400, heads=(3, 3), mask="causal"), BF16, DOWN),
    # Rows that see nothing, blocks that nobody sees, a window, a prefix.
    (case(300, 130, mask="causal"), FP16, DOWN),
    (case(100, 600, mask="window"), FP16, DOWN),
    (case(300, 500, heads=(2, 1), mask="window"), BF16, DOWN),
    (case(150, 300, mask="prefix"), FP16, DOWN),
    # Less is used.
    (case(150, 170, batch=4, seqused=True, mask="causal"), FP16, DOWN),
    (case(100, 140, batch=4, seqused=True), FP16, UP),
    # Smaller tiles, shares that differ, one place for K.
    (case(300, 300, heads=(2, 1), head_dim=96), BF16, UP96),
    (case(200, 300, heads=(2, 1), mask="causal", head_dim=96), BF16, DOWN96),
    (case(200, 300, heads=(2, 1), head_dim=128), BF16, UP128),
    (case(200, 200, heads=(2, 1), mask="causal", head_dim=128), BF16, DOWN128),
    # The last rows first.
    (case(300, 300, heads=(4, 2), mask="causal"), FP16, LAST_ROWS),
    (case(200, 300, heads=(3, 1), mask="causal", head_dim=96), BF16, LAST_ROWS96),
    (case(150, 200, heads=(2, 1), mask="causal", head_dim=128), BF16, LAST_ROWS128),
    # Packed sequences.
    (case(400, 400, heads=(4, 2), batch=3, packed=True, mask="causal"), BF16, LAST_ROWS),
    (case(400, 300, heads=(2, 2), batch=3, packed=True), FP16, LAST_ROWS),
    (case(200, 500, heads=(2, 1), batch=4, packed=True, mask="window", head_dim=128), BF16, LAST_ROWS128),
    (case(300, 300, heads=(2, 1), batch=3, packed=True, mask="prefix", head_dim=96), BF16, LAST_ROWS96),
    (case(300, 300, heads=(2, 1), batch=3, packed=True, seqused=True, mask="causal"), BF16, LAST_ROWS),
]


def short(value) -> str:
    if isinstance(value, Config):
        return "last rows" if value.downwards else {1: "up", -1: "down"}[value.order]
    return str(value).removeprefix("torch.")


SAMPLE = (0, 5, 7, 15, 16)
SOME = [pytest.param(*of, marks=() if number in SAMPLE else pytest.mark.exhaustive) for number, of in enumerate(CASES)]


@pytest.fixture
def small_bundles():
    """Of one head each."""
    with mock.patch.object(arguments, "MOST_LAST", 1), mock.patch.object(backward_launch, "LAST_BLOCKS", 1):
        yield


@pytest.mark.parametrize("case, dtype, config", SOME, ids=short)
def test_the_same_bits(case, dtype, config, small_bundles):
    """Whether three CTAs run at a time, or two of three, or one."""
    t, first = tensors(case, dtype), None
    orders = iter(ORDERS)
    for ctas, resident, number in ((3, 3, 3), (3, 2, 2), (3, 1, 1)):
        backward = Backward(t, config, ctas, resident=resident)
        for order, seed in [next(orders) for _ in range(number)]:
            left = backward.simulate(order, seed)
            first = first or left
            assert all(torch.equal(got, want) for got, want in zip(left.grads[:3], first.grads[:3], strict=True))
            assert not left.tensors.counters.any()
    Backward(t, config, 2, resident=2).run("random", 2)


def test_without_an_order_bits_differ():
    """Of a simulation in which CTAs add as they come."""
    backward = Backward(tensors(case(64, 600), BF16), AS_THEY_COME, 5, resident=5)
    found = [backward.simulate("random", seed).tensors.accumulator for seed in range(4)]
    assert not all(torch.equal(found[0], one) for one in found)


# ---- mistakes

BACKWARD = "strobe.kernels.sm90.backward"
ORDER, STORES = (f"{BACKWARD}_{name}" for name in ("order", "stores"))
CAUSAL = case(300, 300, heads=(2, 1), mask="causal")


def start(kernels, bug, t, config):
    return Backward(t, config, bug.ctas, kernels, resident=bug.resident).run


KERNEL = Kernel(BACKWARD, 90, CAUSAL, DOWN, start)
kernel, order, stores = (partial(one_edit, KERNEL, module, ctas=3, resident=3) for module in (BACKWARD, ORDER, STORES))
last_rows = partial(one_edit, replace(KERNEL, config=LAST_ROWS), ORDER, ctas=3, resident=3)
WINDOW = case(300, 500, heads=(2, 1), mask="window")
FULL128 = case(130, 200, head_dim=128)
ONE_PLACE = {"head_dim": 128, "head_dim_v": 128, "tile_q": 64, "held_k": 64, "order": 1}
WAITED = "        known = await_neighbour(neighbour.flag, number, known)\n"
RAISED = "        raise_flag(flag, i + 1)\n"
ADDED = "    await_additions()\n"
INSIDE = "(tile >= neighbour.begin) & (tile < neighbour.end)"
FULL = "        mbarrier.wait(K.memory.dq_full.index(w), g & 1)\n"
READ = "        tma_store_wait(0)\n        partition_barrier()"
EMPTY = "    if K.C.order != 0:\n        await_writer(w, g, K)\n"

BUGS = [
    order("a flag is not waited for", WAITED, "", (Race,)),
    order("what others added is not seen by the TMA", "    if found > known:\n        fence_async_global()\n", "", (Race,)),
    order("a flag is raised when what is added has but left", ADDED, "", (Race,)),
    order("a flag is raised and says nothing", RAISED, '        gl.atomic_xchg(flag, i + 1, sem="relaxed")\n', (Race,)),
    order("nobody raises a flag", RAISED, "        pass\n", (Deadlock,)),
    order(
        "what is added is told before it is",
        "    mbarrier.wait(K.memory.dq_added.index(0), (before + i) & 1)\n",
        "    pass\n",
        (Race, Deadlock),
    ),
    order("nobody is told", "    mbarrier.arrive(K.memory.dq_added.index(0), count=1)\n", "", (Deadlock,)),
    order("a flag is raised a tile too early", "raise_flag(flag, i + 1)", "raise_flag(flag, i + 2)", (Race,)),
    Bug(
        "the block on the other side is waited for",
        KERNEL,
        ORDER,
        (("work.first - STEP * KEYS", "work.first + STEP * KEYS"), ("K) - STEP", "K) + STEP")),
        (Deadlock,),
        ctas=3,
    ),
    order("no tile waits", INSIDE, "tile < 0", (Race, DoubleWrite)),
    order("heads are not told apart", "(neighbour.end - neighbour.begin) * member + tile", "tile", (Race,)),
    order("one tile less is waited for", "tile - neighbour.begin + 1", "tile - neighbour.begin", (Race, DoubleWrite)),
    last_rows("heads of a tile are not told apart", "* work.group + member + 1", "* work.group + 1", (Race,)),
    last_rows("one head less is waited for", "* work.group + member + 1", "* work.group + member", (Race, DoubleWrite)),
    last_rows(
        "tiles are counted from the own last one",
        "(neighbour.end - 1 - tile)",
        "(work.end - 1 - tile)",
        (Race, Deadlock),
        case=WINDOW,
    ),
    order("what is not yet there is added", FULL, "", (Race, Uninitialised)),
    order(
        "the first share is added to what lies there",
        "        if first:\n",
        "        if g < 0:\n",
        (Uninitialised, AssertionError),
    ),
    order("every share is stored", "        if first:\n", "        if g >= 0:\n", (DoubleWrite,)),
    order("a second block stores its share, too", "number == 0)", "number <= 1)", (DoubleWrite,)),
    order("a place is given back before it is read", READ, "        partition_barrier()", (Race,)),
    order("a place is not given back", "        mbarrier.arrive(K.memory.dq_empty.index(w), count=1)\n", "", (Deadlock,)),
    stores("a share overwrites the one before", EMPTY, "", (Race,)),
    stores(
        "dV overwrites a share",
        "        await_writer(w, gl.maximum(tiles - (K.C.k_stages - 1), 0), K)",
        "        pass",
        (Race,),
    ),
    stores("dV overwrites the last share", "tiles - (K.C.k_stages - 1)", "tiles - 1", (Race,), case=FULL128, config=ONE_PLACE),
    kernel(
        "dQ overwrites dK",
        "    if K.C.dq_waits_once:\n        tma_store_wait(0)  # dK has left memory.dq\n        partition_barrier()\n",
        "",
        (Race,),
        config=ONE_PLACE,
        case=FULL128,
        ctas=1,
        resident=1,
    ),
    order(
        "a share goes to the other group's columns",
        "start_addition(K, to, share)",
        "start_addition(K, place + first_share(1 - w, K.C), share)",
        (),
        config=ONE_PLACE,
        case=FULL128,
    ),
    Bug(
        "the first blocks are the CTAs' own",
        KERNEL,
        BACKWARD,
        (
            ("gl.program_id(0) if K.C.order == 0 else next_number(K)", "gl.program_id(0)"),
            ("gl.num_programs(0) if K.C.order == 0 else number", "gl.num_programs(0)"),
        ),
        (Deadlock,),
        ctas=2,
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    """But where one CTA takes all blocks."""
    assert_found(bug, tmp_path, [order for order in BUG_ORDERS if order[0] != "early"])
