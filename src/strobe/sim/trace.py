"""Timelines as data: what each role of a CTA did when. Measured stamps and simulated runs give the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

Stamps = Mapping[str, Mapping[str, Sequence[int]]]
"""Stamps of one CTA: role -> event (see `kernels.common.stamp.EVENTS`) -> clock by key block, 0 if the role did not pass it."""


@dataclass(frozen=True)
class Span:
    """A time from `start` to `end` in which a track (a role, or a unit that works for it) was busy with `name`, or waited for
    it."""

    track: str
    name: str
    start: float
    end: float
    kind: Literal["work", "wait"] = "work"


@dataclass(frozen=True)
class Event:
    """An act of `track` at `time`."""

    track: str
    name: str
    time: float


@dataclass(frozen=True)
class Timeline:
    """Spans and events of one CTA, times in `unit` from its start."""

    title: str
    spans: tuple[Span, ...]
    events: tuple[Event, ...] = ()
    unit: str = "cycles"

    def tracks(self) -> list[str]:
        """Names of the tracks, in order of their first span or event."""
        return list(dict.fromkeys([event.track for event in self.events] + [span.track for span in self.spans]))

    def cut(self, start: float, end: float) -> Timeline:
        """The part between two times; spans that cross them are clipped. Times keep their origin."""
        inside = (span for span in self.spans if span.end > start and span.start < end)
        spans = tuple(Span(span.track, span.name, max(span.start, start), min(span.end, end), span.kind) for span in inside)
        return Timeline(self.title, spans, tuple(e for e in self.events if start <= e.time <= end), self.unit)


def timeline_of(stamps: Stamps, title: str) -> Timeline:
    """The Timeline of a kernel whose consumers keep S of one block and O of the block before in flight (`kernels.sm90`).

    A product is seen from outside: its span ends when its consumer has waited for it, and O starts where S of the next
    block ends, as the tensor core takes the products of a consumer in order.
    """
    consumers = [role for role, events in stamps.items() if any(events["p_ready"])]
    producers = [role for role, events in stamps.items() if any(events["k_issued"])]
    origin = min(clock for events in stamps.values() for clocks in events.values() for clock in clocks if clock)
    events = [event for role in producers for event in _copies(role, stamps[role], origin)]
    spans = [span for role in consumers for span in _products(role, stamps[role], origin)]
    spans += [span for role in consumers for span in _softmax(role, stamps[role], origin)]
    return Timeline(title, tuple(spans), tuple(events))


def _worked_on(events: Mapping[str, Sequence[int]]) -> tuple[list[int], dict[str, list[int]]]:
    """The key blocks that a consumer works on, by their numbers, and the stamps of these alone: it passes over others."""
    numbers = [g for g, clock in enumerate(events["p_ready"]) if clock]
    return numbers, {event: [clocks[g] for g in numbers] for event, clocks in events.items()}


def _copies(role: str, events: Mapping[str, Sequence[int]], origin: int) -> Iterator[Event]:
    """Yield the events of a producer: the copies of K and V are issued."""
    for tensor in ("K", "V"):
        for g, clock in enumerate(events[f"{tensor.lower()}_issued"]):
            if clock:
                yield Event(role, f"{tensor}{g}", clock - origin)


def _products(role: str, events: Mapping[str, Sequence[int]], origin: int) -> Iterator[Span]:
    """Yield the spans of S and O of a consumer on the tensor core."""
    track, (numbers, events) = f"{role}: products", _worked_on(events)
    for g, number in enumerate(numbers):
        yield Span(track, f"S{number}", events["k_ready"][g] - origin, events["s_ready"][g] - origin)
        yield Span(track, f"O{number}", _o_begins(events, g, len(numbers)) - origin, events["o_ready"][g] - origin)


def _o_begins(events: Mapping[str, Sequence[int]], g: int, n: int) -> int:
    """The clock at which O of the g-th of n blocks begins. The last has no S before it: it waits for P and for the O before
    it."""
    if g + 1 < n:
        return events["s_ready"][g + 1]
    return events["o_ready"][g - 1] if g else events["p_ready"][g]


def _softmax(role: str, events: Mapping[str, Sequence[int]], origin: int) -> Iterator[Span]:
    """Yield the spans of a consumer's own warps: softmax and the rescaling of O, and their waits for K, S and O."""
    numbers, events = _worked_on(events)
    n = len(numbers)
    for g, number in enumerate(numbers):
        k, s, p = (events[event][g] - origin for event in ("k_ready", "s_ready", "p_ready"))
        yield Span(role, f"K{number}", events["begin"][g] - origin, k, "wait")
        yield Span(role, f"S{number}", k, s, "wait")
        yield Span(role, f"P{number}", s, p)
        if g:
            o, end = events["o_ready"][g - 1] - origin, events["begin"][g + 1] - origin if g + 1 < n else None
            yield Span(role, f"O{numbers[g - 1]}", p, o, "wait")
            if end is not None:
                yield Span(role, "correct", o, end)
    yield Span(role, f"O{numbers[-1]}", _o_begins(events, n - 1, n) - origin, events["o_ready"][n - 1] - origin, "wait")
    yield Span(role, "epilogue", events["epilogue"][0] - origin, events["end"][0] - origin)


PHASES = ("wait for K", "S", "softmax", "wait for O", "correct")
"""Phases of a consumer's period. S runs beside the other consumers' products, so it includes its queueing."""


def phases(events: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """A consumer's steady state: medians, over the blocks between its first two and its last, of the cycles that a block
    takes ("period") and of the PHASES of it. ValueError if there are fewer than five blocks."""
    numbers, events = _worked_on(events)
    n = len(numbers)
    if n < 5:
        raise ValueError(f"a steady state needs five key blocks or more, got {n}")
    marks = [
        (events["begin"][g], events["k_ready"][g], events["s_ready"][g], events["p_ready"][g], events["o_ready"][g - 1],
         events["begin"][g + 1])
        for g in range(2, n - 1)
    ]  # fmt: skip
    lengths = [[b - a for a, b in pairwise(mark)] for mark in marks]
    result = {"period": float(median(mark[-1] - mark[0] for mark in marks))}
    return result | {phase: float(median(column)) for phase, column in zip(PHASES, zip(*lengths, strict=True), strict=True)}
