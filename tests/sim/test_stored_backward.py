"""Hopper's backward where dS is stored, and dQ is a product, in the simulator; and mistakes made in it, one at a time."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from backward import Backward, SplitBackward
from broken import Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case, tensors

from strobe.device import KNOWN
from strobe.kernels.sm90 import backward_launch
from strobe.kernels.sm90.backward_config import Config, DqConfig, SplitConfig
from strobe.sim import BarrierMisuse, Deadlock, DoubleWrite, Race, Unfinished, Uninitialised

FP16, BF16 = torch.float16, torch.bfloat16
D64 = Config(64, 64, 128, turns=True, folded=True, stored=True)
D96 = Config(96, 96, 64, turns=False, stored=True)
D192 = Config(192, 128, 64, turns=False, stored=True)
SPLIT64, SPLIT256 = (SplitConfig(dim, dim, stored=True) for dim in (64, 256))
HELD = replace(SPLIT256, held=128)


def case(n_q, n_kv, head_dim, heads=(1, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, head_dim, **more)


CASES = [
    (case(1, 1, 64), FP16, D64),
    (case(140, 300, 64, heads=(2, 1)), BF16, D64),
    (case(300, 200, 64, mask="causal"), FP16, D64),
    (case(260, 260, 64, mask="window"), FP16, D64),
    (case(150, 170, 96, heads=(2, 1), mask="prefix"), BF16, D96),
    (case(90, 130, 96, batch=4, packed=True, seqused=True), FP16, D96),
    (case(90, 150, 96, bias=True, dropout=0.2, mask="causal"), BF16, D96),
    (case(90, 150, 192, head_dim_v=128, mask="causal"), BF16, D192),
    (case(90, 260, 64, heads=(2, 1)), FP16, SPLIT64),
    (case(260, 260, 64, mask="window"), FP16, SPLIT64),
    (case(100, 140, 64, batch=4, packed=True, mask="causal"), BF16, SPLIT64),
    (case(90, 150, 256, heads=(2, 1), mask="causal"), BF16, SPLIT256),
    (case(200, 150, 256, heads=(2, 1), mask="causal"), BF16, HELD),
    (case(70, 100, 256, batch=3, packed=True, mask="window"), FP16, HELD),
]


def backward(t, config, **more) -> Backward:
    return (Backward if isinstance(config, Config) else SplitBackward)(t, config, **more)


def short(value) -> str:
    return "one pass" if isinstance(value, Config) else "two" if isinstance(value, SplitConfig) else str(value)


@pytest.mark.parametrize("case, dtype, config", CASES, ids=short)
def test_in_every_order(case, dtype, config):
    simulated = backward(tensors(case, dtype), config)
    for order, seed in (("in_order", 0), ("random", 1), ("late", 0), ("early", 0)):
        assert simulated.run(order, seed).smem_bytes == config.smem_bytes()


@pytest.mark.parametrize("config", [D96, SPLIT64], ids=short)
def test_nobody_waits_for_keys_without_queries(config):
    """Under a window 64 rows beyond the last one would see later keys than its tile: they were once waited for, for ever."""
    t = tensors(case(90, 200, config.head_dim, batch=4, packed=True, mask="behind"), BF16)
    lengths = [t.keywords[f"cu_seqlens_{name}"].diff() for name in ("q", "kv")]
    assert bool(((lengths[0] == 0) & (lengths[1] > 64)).any())
    backward(t, config).run("random", 1)


@pytest.mark.parametrize("config", [D64, SPLIT64], ids=short)
def test_heads_take_turns(config):
    """Of six key heads four and two, whose bundles have no others."""
    t = tensors(case(70, 140, 64, heads=(6, 3), batch=2, mask="causal"), FP16)
    with mock.patch.object(backward_launch, "stored_heads", lambda problem: 4):
        simulated = backward(t, config)
        simulated.run("random", 1)
        made = backward_launch.main_calls(simulated.problem, simulated.tensors(), KNOWN["H200"], config)
    assert [call.kernel.__name__ for call in made[1::2]] == ["dq_kernel"] * 2


def test_notes_tell_who_met_a_nan():
    """A NaN in dO of row 10: the 64 rows around it, and of the keys those of its tile."""
    for config, keys in ((D64, [1, 1, 0, 0, 0]), (SPLIT64, [1, 0, 0, 0, 0])):
        simulated = backward(tensors(case(300, 300, 64, mask="causal"), FP16), config)
        simulated.given.dout[:, 10] = torch.nan
        left = simulated.simulate("in_order", 0).tensors
        assert left.key_notes.tolist() == keys
        assert left.row_notes.tolist() == [1, 0, 0, 0, 0]


def test_the_shared_memory_of_the_product():
    config = DqConfig(256, 256)
    assert config.smem_bytes() == 4 * (2 * 8192 + 32768) + 64


# ---- mistakes

CAUSAL = case(200, 330, 64, heads=(2, 1), mask="causal")


def kernel_of(name: str, config, module: str) -> Kernel:
    """A kernel of a file, given to a backward as its `module`."""
    return Kernel(
        f"strobe.kernels.sm90.{name}",
        90,
        CAUSAL,
        config,
        lambda kernels, bug, t, config: backward(t, config, **{module: kernels}).run,
    )


DQ = kernel_of("backward_dq", SPLIT64, "dq_kernels")
KEYS = kernel_of("backward_split", SPLIT64, "kernels")
ONE_PASS = kernel_of("backward", D64, "kernels")
TOO_EARLY = (Race, Uninitialised, BarrierMisuse)
WRONG = (AssertionError, Race)

ADD = "        dq = add_product(dq, ds_of(w, g, K)"
DONE = "        dq = finished(dq, K.C.behind)\n"
GIVEN = "        channel.release(g - K.C.behind, g - K.C.behind >= begin)\n"
GIVEN_EARLY = "        channel.release(g)\n" + DONE
PASSED = "    let_pass(end, work.blocks(), channel)\n"
SEEN = "    begin, end = blocks_seen(first, work, K.lengths)\n"
PUT = "        K.memory.ds[0].index(g % 2).store(ds)\n"
LEFT = "        tma_store_wait(0)\n        partition_barrier()\n        row, head"
PLACE = "        K.memory.ds.index(2 * w + parity).store(ds)"
LEFT_AT_ONCE = "    tma_store_wait(0)\n    partition_barrier()\n    place = K.outputs.ds"

dq, keys, one_pass = (partial(one_edit, kernel, kernel.module) for kernel in (DQ, KEYS, ONE_PASS))
BUGS = [
    dq("a block is not waited for", "        channel.wait(g)\n" + ADD, ADD, TOO_EARLY),
    dq("a block is given back before its product is done", DONE + GIVEN, GIVEN_EARLY, (Race, BarrierMisuse)),
    dq("nobody gives blocks back", GIVEN, "", (Deadlock,)),
    dq("a group does not wait for a block that it does not see", PASSED, "", (Race,)),
    dq("what was not written is multiplied", SEEN, "    begin, end = 0, work.blocks()\n", ()),
    dq("the other group's dS is taken", ADD, ADD.replace("(w,", "(1 - w,"), WRONG),
    dq("dQ leaves before it is done", "    dq = finished(dq, 0)\n", "", (Unfinished,)),
    dq("it does not take its turn", "    take_turn()\n", "    pass\n", (Race, Unfinished)),
    keys("dS overwrites what has not left", LEFT, LEFT.replace("        tma_store_wait(0)\n", ""), (Race,)),
    keys("one place of dS", PUT, PUT.replace("g % 2", "g * 0"), TOO_EARLY),
    one_pass("dS overwrites what has not left", LEFT_AT_ONCE, LEFT_AT_ONCE.replace("    tma_store_wait(0)\n", ""), (Race,)),
    one_pass("one place of dS", PLACE, PLACE.replace(" + parity", ""), TOO_EARLY),
    one_pass("groups share the places of dS", PLACE, PLACE.replace("2 * w + ", ""), (*TOO_EARLY, DoubleWrite)),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", [DQ, KEYS, ONE_PASS], ids=lambda kernel: kernel.module.rpartition(".")[2])
@pytest.mark.parametrize("changes", [{}, {"n_q": 100, "n_kv": 600, "mask": "window"}], ids=["causal", "blind"])
def test_no_false_alarm(kernel, changes, tmp_path):
    assert_right_unless_broken(replace(kernel, case=replace(CAUSAL, **changes)), tmp_path)
