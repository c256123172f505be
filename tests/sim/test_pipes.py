"""The pipes of a timed run: nothing is done twice at once, and no time is lost while there is work."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.sim.costs import SM90, Cost
from strobe.sim.pipes import Pipe, Pipes

requests = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=30)


@given(requests)
def test_work_conserving(requests):
    pipe, busy = Pipe(), set()
    for earliest, cycles in requests:
        begin, end = pipe.reserve(earliest, cycles)
        expected = [t for t in range(earliest, earliest + 1000) if t not in busy][:cycles]  # the earliest free cycles
        assert (begin, end) == (expected[0], expected[-1] + 1)
        busy.update(expected)


def test_nothing_takes_no_time():
    assert Pipe().reserve(3.0, 0.0) == (3.0, 3.0)


@given(requests)
def test_fractions(requests):
    """Cycles need not be whole: the work of a pipe adds up to its busy time."""
    pipe = Pipe()
    for earliest, cycles in requests:
        pipe.reserve(earliest / 3, cycles / 7)
    busy = sum(end - begin for begin, end in zip(pipe._begins, pipe._ends, strict=True))
    assert busy == pytest.approx(sum(cycles / 7 for _, cycles in requests))
    assert all(end <= begin for end, begin in zip(pipe._ends, pipe._begins[1:], strict=False))


@pytest.mark.parametrize(("interleaving", "moves_on_at"), [(0.0, 128), (0.5, 64), (1.0, 16)])
def test_interleaved_operations_leave_their_warps_free(interleaving, moves_on_at):
    """2048 exponentials keep their unit for 128 cycles, four warps need 16 to issue them; the result comes no sooner."""
    costs = replace(SM90, interleaving=Cost(interleaving, "a test"))
    partition = SimpleNamespace(time=0.0, warps=4)
    pipes = Pipes(costs)
    assert pipes.issue(partition, "mufu", 2048, []).end == 128 + costs.register_latency
    assert partition.time == moves_on_at and pipes.busy() == {"mufu": 128}
