"""Runs the schedules of `strobe.parallel` on paper: the same programs, on tensors without numbers, by a clock.

Each rank computes one thing at a time. A message begins when both ends have asked for it and their links are free; a link
carries one message at a time in each direction. A computation takes its visible pairs' FLOPs at the rate of
`strobe.parallel.choice.Machine`, so what differs from that module's formulas is when things happen, not how long they take.

Lengths are scaled: a rank has ROWS rows and keys here, each of which stands for many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strobe.call.options import Options
from strobe.lab.bench.plot import PEERS, STROBE, plt, save
from strobe.masks import Mask
from strobe.parallel.choice import LINK_SHARE, Link, Machine
from strobe.parallel.links import Program, Start, Wait
from strobe.parallel.schedules import Compute, Method, backward, forward
from strobe.parallel.sharding import Sharding
from strobe.parallel.work import Inputs, Job, Rows
from strobe.problem import Upstream

ROWS = 32
"""Rows of a rank in the simulation."""


class Span(NamedTuple):
    """What a rank's stream or link did, in seconds. kind: "compute", "receive" or "wait"."""

    rank: int
    kind: str
    what: str
    start: float
    end: float


@dataclass
class Run:
    """What a simulated call did."""

    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """When the last rank ended."""
        return max((span.end for span in self.spans), default=0.0)

    def of(self, kind: str, rank: int) -> float:
        """Seconds that a rank spent on a kind of span."""
        return sum(span.end - span.start for span in self.spans if span.kind == kind and span.rank == rank)

    @property
    def exposed(self) -> float:
        """Seconds beyond what the rank with most to compute computed."""
        ranks = {span.rank for span in self.spans}
        return self.seconds - max(self.of("compute", rank) for rank in ranks)


class Setting(NamedTuple):
    """A call to simulate: `tokens` rows and as many keys on each rank, elements of itemsize bytes."""

    ranks: int
    tokens: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    mask: Mask = Mask(right=0)
    layout: str = "zigzag"
    dtype: torch.dtype = torch.bfloat16

    def job(self) -> tuple[Job, float]:
        """The scaled call, and how many rows each of its rows stands for."""
        scale = self.tokens / ROWS
        left, right, prefix = (None if bound is None else int(-(-bound // scale)) for bound in self.mask.band)
        sharding = Sharding((ROWS * self.ranks,), self.ranks, self.layout)
        options = Options(left=left, right=right, prefix=prefix)
        return Job(options, sharding, sharding, False, self.heads_q, self.heads_kv), scale

    def inputs(self) -> Inputs:
        """A rank's tensors, without numbers."""
        q, k, v = (
            torch.empty(1, ROWS, heads, self.head_dim, dtype=self.dtype, device="meta")
            for heads in (self.heads_q, self.heads_kv, self.heads_kv)
        )
        return Inputs(q, k, v)


def simulate(setting: Setting, method: Method, machine: Machine, back: bool = False) -> Run:
    """The forward, or the backward, of all ranks, by the clock."""
    job, scale = setting.job()
    x = setting.inputs()
    programs: list[Program] = []
    for rank in range(setting.ranks):
        if back:
            lse = torch.empty(1, setting.heads_q, ROWS, device="meta")
            programs.append(backward(job, method, rank, x, Upstream(x.q, lse, x.q, None)))
        else:
            programs.append(forward(job, method, rank, x))

    def seconds(request: Compute) -> float:
        d = setting.head_dim
        flops = len(request.heads.q) * 2 * (5 * d if request.backward else 2 * d)
        return flops * scale**2 * _pairs(job.band, request.q, request.kv) / machine.flops(setting.dtype.itemsize)

    return _Clock(programs, machine, seconds, scale).run()


@lru_cache(maxsize=65536)
def _pairs(band: Mask, q: Rows, kv: Rows) -> int:
    """The visible pairs between rows and keys."""
    (rows,), (keys,) = q.places, kv.places
    i = rows.position(torch.arange(q.total))[:, None]
    j = keys.position(torch.arange(kv.total))[None, :]
    seen = band.tile(i, j, rows.whole, keys.whole)
    # A pair on the edge of a causal band stands for a square that is seen by half.
    edge = int((j == i + band.right).sum()) / 2 if band.right is not None else 0
    return int(seen.sum()) - edge  # type: ignore[return-value]


@dataclass
class _Message:
    """A message on its way: when its ends asked for it, and when it is there."""

    what: str
    bytes: float
    sender: int
    to: int
    turn: int = 0
    """The place of a message among what its sender began together."""
    sent: float | None = None
    awaited: float | None = None
    arrival: float | None = None


class _Clock:
    """All ranks, each with its time, and messages that wait for their links; what can go on first goes on."""

    def __init__(self, programs: Sequence[Program], machine: Machine, seconds: Callable[[Any], float], scale: float):
        self.programs, self.machine, self.seconds, self.scale = programs, machine, seconds, scale
        self.now = [0.0] * len(programs)
        self.answers: list[Any] = [None] * len(programs)
        self.waiting: dict[int, list[_Message]] = {}
        self.messages: dict[tuple[int, int, int], _Message] = {}
        self.numbers: dict[tuple[str, int, int], int] = {}
        self.free: dict[tuple[str, int, str], float] = {}
        self.pending: list[_Message] = []
        self.result = Run()

    def run(self) -> Run:
        alive = set(range(len(self.programs)))
        while alive:
            ready = [rank for rank in alive if all(m.arrival is not None for m in self.waiting.get(rank, []))]
            rank = min(ready, key=self._resumes, default=None)
            message = min(self.pending, key=lambda one: (self._earliest(one), one.turn, one.sender), default=None)
            if message is not None and (rank is None or self._earliest(message) < self._resumes(rank)):
                self._travel(message)
                continue
            if rank is None:
                raise RuntimeError(f"ranks {sorted(alive)} wait for each other")
            self._end_wait(rank)
            try:
                request = self.programs[rank].send(self.answers[rank])
            except StopIteration:
                alive.discard(rank)
                continue
            self.answers[rank] = self._take(rank, request)
        return self.result

    def _resumes(self, rank: int) -> float:
        """When a rank whose messages have arrived goes on."""
        return max([self.now[rank], *(m.arrival for m in self.waiting.get(rank, []) if m.arrival is not None)])

    def _end_wait(self, rank: int) -> None:
        end, messages = self._resumes(rank), self.waiting.pop(rank, [])
        if end > self.now[rank]:
            self.result.spans.append(Span(rank, "wait", messages[0].what, self.now[rank], end))
        self.now[rank] = end

    def _take(self, rank: int, request: Any) -> Any:
        if isinstance(request, Start):
            sends = [m for m in request.sends if m.buffer.numel()]
            sent = [self._message("sent", rank, m.rank, request.what, m.buffer, turn) for turn, m in enumerate(sends)]
            receives = [m for m in request.receives if m.buffer.numel()]
            return [*sent, *(self._message("awaited", m.rank, rank, request.what, m.buffer, 0) for m in receives)]
        if isinstance(request, Wait):
            self.waiting[rank] = request.ticket
            return None
        took = self.seconds(request)
        self.result.spans.append(Span(rank, "compute", request.what, self.now[rank], self.now[rank] + took))
        self.now[rank] += took
        return None if request.dry is None else request.dry()

    def _message(self, end: str, sender: int, to: int, what: str, buffer: torch.Tensor, turn: int) -> _Message:
        """One end of a message; with the other it waits for its links."""
        key = end, sender, to
        self.numbers[key] = self.numbers.get(key, 0) + 1
        message = self.messages.setdefault(
            (sender, to, self.numbers[key]), _Message(what, buffer.numel() * buffer.element_size() * self.scale, sender, to)
        )
        message.turn = max(turn, message.turn)
        setattr(message, end, self.now[sender if end == "sent" else to])
        if message.sent is not None and message.awaited is not None:
            self.pending.append(message)
        return message

    def _link(self, message: _Message) -> Link:
        same_node = message.sender // self.machine.node == message.to // self.machine.node
        return self.machine.within if same_node else self.machine.between

    def _ends(self, message: _Message) -> tuple[tuple[str, int, str], tuple[str, int, str]]:
        """The two halves of links that a message takes."""
        name = self._link(message).name
        return ("out", message.sender, name), ("in", message.to, name)

    def _earliest(self, message: _Message) -> float:
        """When a message may begin to travel."""
        assert message.sent is not None and message.awaited is not None
        return max(message.sent, message.awaited, *(self.free.get(end, 0.0) for end in self._ends(message)))

    def _travel(self, message: _Message) -> None:
        link, start = self._link(message), self._earliest(message)
        end = start + message.bytes / (LINK_SHARE * link.rate)
        for one in self._ends(message):
            self.free[one] = end
        message.arrival = end + link.latency
        self.pending.remove(message)
        self.result.spans.append(Span(message.to, "receive", message.what, start, message.arrival))


COLORS = {"compute": PEERS[0], "receive": PEERS[4], "wait": "#DDDDDD"}


def draw(runs: dict[str, Run], path: Path, most: int = 4) -> Path:
    """Draw what the first ranks of each run did when: computation above, what they receive below; grey where they wait."""
    figure, panels = plt.subplots(len(runs), 1, figsize=(12, 2.4 * len(runs) + 0.4), squeeze=False, layout="constrained")
    for panel, (name, run) in zip(panels[:, 0], runs.items(), strict=True):
        timeline(panel, name, run, most)
    return save(figure, path, dpi=110)


def timeline(panel, name: str, run: Run, most: int = 4) -> None:
    """Draw a run in a panel."""
    labels = {}
    for span in run.spans:
        if span.rank >= most:
            continue
        y = 2 * span.rank + (1 if span.kind == "receive" else 0)
        labels[y] = f"rank {span.rank} {'link' if span.kind == 'receive' else ''}".strip()
        left, width = 1e3 * span.start, 1e3 * (span.end - span.start)
        panel.barh(y, width, left=left, height=0.8, color=COLORS[span.kind], edgecolor="white", linewidth=0.5)
    panel.set_yticks(sorted(labels), [labels[y] for y in sorted(labels)], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("milliseconds", fontsize=8)
    panel.set_title(name, fontsize=9, loc="left", color=STROBE if "ring" in name else "black")
    panel.spines[["top", "right"]].set_visible(False)
