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
from strobe.kernels.sm90.backward_config import Config
from strobe.sim import Deadlock, Race

FP16, BF16 = torch.float16, torch.bfloat16
D64 = Config(64, 64, 128, turns=True, folded=True)
D96 = Config(96, 96, 64, turns=True, held_k=64, held_v=64)
D96_MASKED = Config(96, 96, 64, turns=True, held_k=96)
D128 = Config(128, 128, 64, turns=True, held_k=64, folded=True)
D128_PLAIN = Config(128, 128, 64, turns=False)
D160 = Config(160, 160, 64, turns=False)
D192 = Config(192, 128, 64, turns=False)
ORDERS = (("in_order", 0), ("random", 1), ("late", 0), ("early", 0), *(("uneven", number) for number in range(8)))


def case(n_q, n_kv, head_dim, heads=(1, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, head_dim, **more)


def up(config: Config) -> Config:
    return replace(config, order=1)


def down(config: Config) -> Config:
    return replace(config, order=-1)


def back(config: Config) -> Config:
    return replace(config, order=-1, turns_back=True)


CASES = [
    # All begin at the first tile; blocks of one tile.
    (case(300, 300, 64, heads=(4, 2)), FP16, up(D64)),
    (case(140, 300, 128, heads=(2, 1)), BF16, up(D128)),
    (case(100, 700, 64), BF16, up(D64)),
    (case(90, 600, 96, heads=(2, 1)), BF16, up(D96)),
    (case(140, 300, 192, head_dim_v=128), BF16, up(D192)),
    # The last keys first; the last bundle from the first on.
    (case(200, 300, 64, heads=(2, 1), batch=2, mask="causal"), BF16, down(D64)),
    (case(150, 400, 64, heads=(3, 3), mask="causal"), BF16, back(D64)),
    (case(250, 300, 128, heads=(3, 3), mask="causal"), BF16, back(D128)),
    (case(250, 300, 192, heads=(3, 3), head_dim_v=128, mask="causal"), FP16, back(D192)),
    (case(150, 170, 144, heads=(2, 1), mask="causal"), FP16, down(D160)),
    # Rows that see nothing, blocks that nobody sees, a window, a prefix.
    (case(300, 130, 64, mask="causal"), FP16, back(D64)),
    (case(100, 600, 64, mask="window"), FP16, down(D64)),
    (case(150, 170, 96, heads=(2, 1), mask="window"), FP16, down(D96_MASKED)),
    (case(150, 300, 64, mask="prefix"), FP16, back(D64)),
    # Sequences packed, one of them empty; less is used.
    (case(200, 170, 64, heads=(2, 1), batch=4, packed=True, mask="causal"), FP16, down(D64)),
    (case(140, 300, 128, batch=4, packed=True), FP16, up(D128)),
    (case(150, 170, 64, batch=4, seqused=True, mask="causal"), FP16, back(D64)),
    (case(100, 140, 192, head_dim_v=128, batch=4, packed=True, seqused=True), FP16, up(D192)),
    # What changes scores.
    (case(140, 300, 128, heads=(2, 1), softcap=3.0, alibi=True, mask="causal"), FP16, down(D128_PLAIN)),
    (case(150, 170, 160, dropout=0.2), BF16, up(D160)),
]


def short(value) -> str:
    if isinstance(value, Config):
        return {1: "up", -1: "down"}[value.order] + " and back" * value.turns_back
    return str(value).removeprefix("torch.")


SAMPLE = (2, 6, 11)
SOME = [pytest.param(*of, marks=() if number in SAMPLE else pytest.mark.exhaustive) for number, of in enumerate(CASES)]


@pytest.fixture
def small_bundles():
    """Of one head each, but for the last one, which has two."""
    with mock.patch.multiple(arguments, MOST_HEADS=1, MOST_LAST=2):
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
    t = tensors(case(64, 600, 64, heads=(1, 1)), BF16)
    backward = Backward(t, D64, 5, resident=5)
    found = [backward.simulate("random", seed).tensors.accumulator for seed in range(4)]
    assert not all(torch.equal(found[0], one) for one in found)


# ---- mistakes

BACKWARD = "strobe.kernels.sm90.backward"
ORDER, STORES, TILES = (f"{BACKWARD}_{name}" for name in ("order", "stores", "tiles"))
CAUSAL = case(300, 300, 64, heads=(2, 1), mask="causal")


def start(kernels, bug, t, config):
    return Backward(t, config, bug.ctas, kernels, bug.resident).run


KERNEL = Kernel(BACKWARD, 90, CAUSAL, down(D64), start)
kernel, order, stores = (partial(one_edit, KERNEL, module, ctas=3, resident=3) for module in (BACKWARD, ORDER, STORES))
SERIAL = {
    "case": replace(CAUSAL, head_dim=192, head_dim_v=128),
    "config": {"head_dim": 192, "head_dim_v": 128, "tile_q": 64, "turns": False, "folded": False},
}
RAISED = "            raise_flag(flag_of(turn.place + (2 - w) * 64, K), turn.third)\n"
DQ_READY = "    dq = warpgroup_mma_wait(K.C.products_v"
HANDED_ON = "    order = hand_on(w, K, order)\n" + DQ_READY
STORED = "    put_ds(w, stage, ds, K)\n    dk = start_sum(dk, ds, q)\n    if K.C.turns:\n"
ADDED = "        order = added(place, False, order, K.C)\n"

BUGS = [
    stores("a flag is not waited for", "        await_flag(flag_of(place, K), turn.before)\n", "", (Race,)),
    stores("what others added is not seen by the TMA", "        fence_async()\n", "        fence_async_shared()\n", (Race,)),
    kernel(
        "what was added is handed on when it has but left",
        "        await_stores()\n",
        "        tma_store_wait(0)\n",
        (Race,),
    ),
    stores(
        "the last of a block is handed on when it has but left",
        "        await_stores()\n",
        "        tma_store_wait(0)\n",
        (Race,),
        case=replace(CAUSAL, head_dim=128),
        config={"head_dim": 128, "head_dim_v": 128, "tile_q": 64, "held_k": 64},
    ),
    order("nobody raises a flag", "        raise_flag(flag_of(turn.place, K), turn.added)\n", "", (Deadlock,)),
    order("nobody raises the third share's", RAISED, "", (Deadlock,), **SERIAL),
    order("both groups have the flags of the first", " + place // UNITS", " + place // (2 * UNITS)", (Race, Deadlock)),
    one_edit(
        KERNEL, ORDER, "the block on the other side is waited for", "step = C.order", "step = -C.order", (Deadlock,), ctas=3
    ),
    order("every tile waits", "gl.where(waits, neighbour.before, 0)", "neighbour.before", (Deadlock,)),
    order("no tile waits", "gl.where(waits, neighbour.before, 0)", "0 * neighbour.before", (Race, Deadlock)),
    order("a block waits for its own number", "number, number - step)", "number, number)", (Deadlock,)),
    Bug(
        "what was added is handed on before it is waited for",
        KERNEL,
        BACKWARD,
        ((HANDED_ON, DQ_READY), (STORED, "    order = hand_on(w, K, order)\n" + STORED)),
        (Race,),
        ctas=3,
        resident=3,
    ),
    kernel("what was added is forgotten", ADDED, "", (Deadlock,)),
    Bug(
        "the first blocks are the CTAs' own",
        KERNEL,
        BACKWARD,
        (
            ("gl.program_id(0) if K.C.order == 0 else next_number(K)", "gl.program_id(0)"),
            ("    if K.C.order == 0:\n        return gl.atomic_add", "    if K.C.order != 2:\n        return gl.atomic_add"),
        ),
        (Deadlock,),
        ctas=2,
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    """But where one CTA takes all blocks."""
    assert_found(bug, tmp_path, [order for order in BUG_ORDERS if order[0] != "early"])
