"""The fuzzer's cases in the simulator: nothing is found today, and what was broken on purpose is."""

from collections import Counter
from random import SystemRandom
from unittest import mock

import pytest
from broken import altered
from commands import run as command

from strobe.kernels.sm90 import backward_launch
from strobe.lab.fuzz import fuzz
from strobe.lab.fuzz.cases import Case, drawn
from strobe.lab.fuzz.run import Outcome
from strobe.lab.fuzz.simulated import simulated
from strobe.sim import attention

OF_THE_SIMULATOR = "device='simulator',dtype='bf16'"
FOUND = f"{OF_THE_SIMULATOR},backend='deterministic',batch=3,n_kv=127,left=16,packed=True,gradients='both',seed=42"
"""What a campaign found, made smaller: a packed sequence with keys and no queries, under a window."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [0, None], ids=["the same cases", "new cases"])
def test_a_campaign_finds_nothing(first):
    start = SystemRandom().randrange(10**9) if first is None else first
    found = fuzz.campaign("simulator", 500.0, first=start, most=8)
    assert not found.failures, "\n".join(f"{one.outcome}\n{one.command()}" for one in found.failures)
    assert found.cases == 8 and found.refusals.total() < 5


def test_cases_are_small_and_of_all_ways():
    counted: Counter = Counter()
    for number in range(400):
        case = drawn(number, "simulator")
        assert drawn(number, "simulator") == case == fuzz.told(str(case))
        assert max(case.n_q, case.n_kv) <= 300 and all(one != case for one in case.simpler())
        counted.update({case.backend: 1, case.way: 1, case.gradients != "": 1})
    kinds = None, "deterministic", "two passes", "once", "random", "late", "uneven", True, False
    assert min(counted[kind] for kind in kinds) > 40


@pytest.mark.parametrize("gradients, way", [("", "random"), ("both", "once"), ("lse", "late"), ("out", "uneven")])
@pytest.mark.parametrize("backend", [None, "deterministic", "two passes"])
def test_each_way_is_right(backend, gradients, way):
    facts = dict(n_q=70, n_kv=100, group=2, head_dim=64, head_dim_v=64, right=0, sinks="fp32", bias="bhqk")
    case = Case("simulator", dtype="fp16", backend=backend, gradients=gradients, way=way, **facts)
    assert simulated(case) == Outcome("right")


def a_row_too_many(problem):
    n_q, n_kv, left, right, prefix = ORIGINAL_BOUNDS(problem)
    return n_q, n_kv, left, right + 1, prefix


ORIGINAL_BOUNDS = backward_launch._bounds


def test_a_wrong_mask_is_found():
    """Of a backward, by its numbers."""
    case = Case("simulator", dtype="bf16", n_q=40, n_kv=50, head_dim=64, head_dim_v=64, right=0, gradients="both")
    with mock.patch.object(backward_launch, "_bounds", a_row_too_many):
        found = simulated(case)
    assert found.kind == "wrong" and found.words.startswith("d"), found
    assert simulated(case) == Outcome("right")


def test_a_deadlock_is_found(tmp_path):
    """One that was there once."""
    clamped, begin = "gl.minimum(gl.maximum(begin // TILE, work.begin), work.end)", "gl.maximum(begin // TILE, work.begin)"
    edits = (clamped, begin), ("return begin - work.begin", "return gl.minimum(begin, work.end) - work.begin")
    with mock.patch.object(attention, "backward_dq", altered("strobe.kernels.sm90.backward_dq", edits, tmp_path)):
        found = simulated(Case.told(FOUND))
    assert found.kind == "error" and found.words.startswith("Deadlock: "), found
    assert simulated(Case.told(FOUND)) == Outcome("right")


def test_the_command():
    result = command("fuzz", "--case", f"{OF_THE_SIMULATOR},n_q=5,n_kv=7,gradients='both'")
    assert result.exit_code == 0 and "outcome   right" in result.output
    result = command("fuzz", "--device", "simulator", "--case", "3")
    assert result.exit_code == 0 and f"case      {drawn(3, 'simulator')}" in result.output.replace("\n", "")


def test_a_failure_tells_its_command():
    found = fuzz.Found()
    found.add(5, drawn(5, "simulator"), Outcome("error", "Deadlock"))
    assert found.failures[0].command() == "strobe fuzz --device simulator --case 5"
