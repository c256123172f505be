"""Hopper's backward in two passes, its source unchanged, in the simulator; and mistakes made in it, one at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from backward import SplitBackward
from broken import UNEVEN, Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case, tensors

from strobe.kernels.sm90.backward_config import SplitConfig
from strobe.sim import BarrierMisuse, Deadlock, Race, Unfinished, Uninitialised

FP16, BF16 = torch.float16, torch.bfloat16
ORDERS = (("in_order", 0), ("random", 1), ("late", 0), ("early", 0), ("timed", 0), *UNEVEN)


def case(n_q, n_kv, head_dim, heads=(1, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, head_dim, **more)


CASES = [
    (case(64, 64, 64), FP16, SplitConfig(64, 64)),
    (case(1, 1, 64), BF16, SplitConfig(64, 64)),
    (case(140, 300, 64, heads=(2, 1)), BF16, SplitConfig(64, 64)),
    (case(140, 150, 256, heads=(2, 1), mask="causal"), FP16, SplitConfig(256, 256)),
    (case(140, 150, 192, head_dim_v=128), BF16, SplitConfig(192, 128)),
    (case(90, 150, 64, head_dim_v=256, mask="causal"), FP16, SplitConfig(64, 256)),
    (case(150, 170, 80, heads=(2, 1), mask="window"), FP16, SplitConfig(96, 96)),
    (case(150, 170, 128, mask="prefix"), BF16, SplitConfig(128, 128)),
    # No row sees a block far behind a window, and the first rows see no key.
    (case(100, 400, 64, mask="window"), FP16, SplitConfig(64, 64)),
    (case(300, 130, 64, mask="causal"), BF16, SplitConfig(64, 64)),
    # Sequences packed, one of them empty.
    (case(150, 170, 64, heads=(2, 1), batch=4, packed=True, mask="causal"), FP16, SplitConfig(64, 64)),
    (case(100, 140, 64, batch=4, seqused=True, mask="causal"), BF16, SplitConfig(64, 64)),
    (case(100, 140, 96, batch=5, packed=True, seqused=True), FP16, SplitConfig(96, 96)),
    (case(90, 150, 96, heads=(2, 1), softcap=3.0, alibi=True), BF16, SplitConfig(96, 96)),
    (case(90, 150, 64, heads=(2, 1), bias=True, function=True, mask="functions"), BF16, SplitConfig(64, 64)),
    (case(150, 170, 96, heads=(2, 1), batch=2, mask="all", bias=True, softcap=3.0), FP16, SplitConfig(96, 96)),
    (case(150, 170, 64, heads=(2, 1), batch=2, dropout=0.3, function=True, mask="causal"), FP16, SplitConfig(64, 64)),
]


def short(value) -> str:
    return "" if isinstance(value, SplitConfig) else str(value).removeprefix("torch.")


@pytest.mark.parametrize("case, dtype, config", CASES, ids=short)
def test_in_every_order(case, dtype, config):
    backward = SplitBackward(tensors(case, dtype), config)
    for order, seed in ORDERS:
        assert backward.run(order, seed).smem_bytes == sum(buffer.bytes for buffer in config.keys_map())


def test_notes_tell_who_met_a_nan():
    """A NaN in dO of row 10: the first 64 keys, which it sees, the other keys of its tiles, and its 64 rows."""
    backward = SplitBackward(tensors(case(300, 300, 64, mask="causal"), FP16), SplitConfig(64, 64))
    backward.given.dout[:, 10] = torch.nan
    left = backward.simulate("in_order", 0).tensors
    assert left.key_notes.tolist() == [1, 0, 0, 0, 0]
    assert left.row_notes.tolist() == [1, 0, 0, 0, 0]


# ---- mistakes

SPLIT = "strobe.kernels.sm90.backward_split"
CAUSAL = Case(200, 200, batch=1, heads_q=2, heads_kv=1, head_dim=64, mask="causal")
KERNEL = Kernel(SPLIT, 90, CAUSAL, SplitConfig(64, 64), lambda kernels, bug, t, config: SplitBackward(t, config, kernels).run)
TOO_EARLY = (Race, Uninitialised, BarrierMisuse)
FENCE = "    fence_async_shared()\n"
P_STORE = "    K.memory.p.index(g % 2).store(p.to(K.memory.p.dtype))\n"
Q_WAIT = "    K.memory.q.wait(g)\n"
DELTA = "    dp = dp - statistics_of(g, K)"
DP_DONE = "                dp = warpgroup_mma_wait(0, deps=[dp])\n"
DO_GIVEN = "                K.memory.do.release(g)\n"
P_ANNOUNCED = "    announce(P_READY + g % 2)\n"
P_WAIT = "    meet(P_READY + g % 2)\n    p = "
P_READ = "        announce(P_READ + g % 2)\n"
P_READ_WAIT = "    if g >= 2:\n        meet(P_READ + g % 2)\n"


kernel = partial(one_edit, KERNEL, SPLIT)
BUGS = [
    kernel("K is not waited for", "        mbarrier.wait(K.memory.k_full.index(0), 0)\n", "", TOO_EARLY),
    kernel(
        "the keys pass does not take its turn", FENCE + "    take_turn()\n    inputs", FENCE + "    inputs", (Race, Unfinished)
    ),
    kernel("the rows pass does not take its turn", "    take_turn()  # at", "    pass  # at", (Unfinished,)),
    kernel("V is not waited for", "            mbarrier.wait(K.memory.v_full.index(0), 0)\n", "", TOO_EARLY),
    kernel("Q is not waited for", "                K.memory.q.wait(g)\n", "", TOO_EARLY),
    kernel("delta is not waited for", Q_WAIT + DELTA, DELTA, TOO_EARLY),
    kernel("P is not waited for", P_WAIT, "    p = ", TOO_EARLY),
    kernel("nobody says that P is there", P_ANNOUNCED, "    pass\n", (Deadlock,)),
    kernel("P is announced before it is written", P_STORE + P_ANNOUNCED, P_ANNOUNCED + P_STORE, (Race, Uninitialised)),
    kernel("P overwrites what is not read", P_READ_WAIT, "", TOO_EARLY),
    kernel("nobody says that P is read", P_READ, "        pass\n", (Deadlock,)),
    kernel("P is read twice as often as it is waited for", "    if g + 2 < count:\n", "    if g < count:\n", (BarrierMisuse,)),
    kernel("one buffer of P", P_STORE, P_STORE.replace("g % 2", "g * 0"), (Race, Uninitialised)),
    kernel("dV overwrites a V that is read", "        rendezvous(ENDED, 0)\n", "        announce(ENDED + 1)\n", (Race,)),
    kernel(
        "dK overwrites a K that is read", "        rendezvous(ENDED, 1)\n", "        announce(ENDED)\n", (Race, BarrierMisuse)
    ),
    kernel("dO is given back while dP reads it", DP_DONE + DO_GIVEN, DO_GIVEN + DP_DONE, (Race,)),
    kernel(
        "a tile of Q is given back before its product is done",
        "                dk = finished(dk, K.C.products_dp)\n                K.memory.q.release(g - 1)\n",
        "                K.memory.q.release(g - 1)\n                dk = finished(dk, K.C.products_dp)\n",
        (Race,),
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


@pytest.mark.parametrize(
    "changes", [{}, {"heads_q": 1}, {"n_q": 100, "n_kv": 600, "mask": "window"}], ids=["causal", "odd", "blind"]
)
def test_no_false_alarm(changes, tmp_path):
    assert_right_unless_broken(replace(KERNEL, case=replace(CAUSAL, **changes)), tmp_path)
