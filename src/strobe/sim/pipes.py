"""Times register operations: the execution pipes of a multiprocessor, which all its warps share (timed runs).

An operation on n elements takes n / rate cycles of its pipe. It may begin when the first elements of its operands are there
and ends a latency after their last ones, as in a chain of vector operations; a reduction gives nothing before it has all. Warps
issue in order: the partition moves on when the pipe has taken the last instruction, or, as far as the costs say that the
compiler interleaves operations, before.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Ready(NamedTuple):
    """Times, in cycles, at which the first and the last element of a tensor are there."""

    start: float
    end: float


class Pipe:
    """A unit that does one thing at a time; work fills the earliest gaps."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def reserve(self, earliest: float, cycles: float) -> tuple[float, float]:
        """First and last moment of `cycles` of work, none of it before `earliest`."""
        if cycles <= 0:
            return earliest, earliest
        i = bisect_right(self._ends, earliest)
        now, first, first_gap = earliest, None, i
        while cycles > 0:
            gap_end = self._begins[i] if i < len(self._begins) else float("inf")
            now = max(now, self._ends[i - 1] if i else 0.0)
            used = min(cycles, gap_end - now)
            if used > 0:
                first = now if first is None else first
                cycles -= used
                now += used
            i += 1
        assert first is not None
        self._fill(first_gap, i - 1, first, now)
        return first, now

    def busy(self) -> float:
        return sum(self._ends) - sum(self._begins)

    def _fill(self, low: int, high: int, first: float, last: float) -> None:
        """Note that [first, last) is busy: all gaps between were filled, so busy stretches low .. high - 1 merge with it."""
        if low < high:
            first = min(first, self._begins[low])
        if low and self._ends[low - 1] >= first:
            low -= 1
            first = self._begins[low]
        if high < len(self._begins) and self._begins[high] <= last:
            last = self._ends[high]
            high += 1
        self._begins[low:high] = [first]
        self._ends[low:high] = [last]


class Pipes:
    """The pipes of one multiprocessor."""

    def __init__(self, costs) -> None:
        self.costs = costs
        self._pipes: dict[str, Pipe] = {}

    def __getitem__(self, name: str) -> Pipe:
        return self._pipes.setdefault(name, Pipe())

    def busy(self) -> dict[str, float]:
        """Cycles that each unit has worked."""
        return {name: pipe.busy() for name, pipe in self._pipes.items()}

    def issue(self, partition, pipe: str, elements: int, operands: list[Ready]) -> Ready:
        """Issue an operation of a partition to a pipe; returns when its result is there."""
        start = max([partition.time, *(ready.start for ready in operands)])
        end = max([partition.time, *(ready.end for ready in operands)])
        if pipe == "free":
            return Ready(start, end)
        reduces = pipe.startswith("reduce ")
        pipe = pipe.removeprefix("reduce ")
        cycles, latency = elements / self.costs.rate(pipe), self.costs.register_latency
        issue = elements / (32 * min(4, partition.warps)) / self.costs.per_instruction(pipe)
        begin, done = self[self.costs.unit(pipe)].reserve(start, cycles)
        stall = max(0.0, done - partition.time) * (1 - self.costs.interleaving)
        partition.time += max(issue, stall)
        if reduces:  # nothing is there before all is
            latency = self.costs.reduction_latency
            begin = max(done, end)
        return Ready(begin + latency, max(done, end) + latency)
