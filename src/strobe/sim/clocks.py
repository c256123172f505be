"""Vector clocks: who knows what has happened.

Everything that touches memory is an *agent*: a warp partition, the tensor core working for one, a single TMA copy. An agent
counts its *ticks*; an access is stamped with the tick at which it was made. `Knowledge` says, for every agent, up to which
tick its accesses are known to be over. Barriers and waits carry knowledge from one agent to another; what no
chain of them carries is unordered, whatever happened to come first in this run.

Source of the idea: Lamport's and Mattern's clocks, as data race detectors use them (Flanagan and Freund, "FastTrack:
efficient and precise dynamic race detection", PLDI 2009).
"""

from __future__ import annotations

import numpy as np

CAPACITY = 512
"""The most agents that a CTA may have. Copies in flight are agents of their own; their numbers are used again once they are
known to be over."""

AHEAD = 0
"""The agent that stands for the launch ahead; its only tick is 1."""


class Knowledge:
    """What somebody knows of all agents. seen[agent]: the tick up to which its accesses are over. fenced[agent]: the tick up to
    which its writes through the generic proxy are visible to the async proxy too (see `memory`)."""

    __slots__ = ("fenced", "seen")

    def __init__(self, seen: np.ndarray | None = None, fenced: np.ndarray | None = None):
        self.seen = np.zeros(CAPACITY, np.int64) if seen is None else seen
        self.fenced = np.zeros(CAPACITY, np.int64) if fenced is None else fenced

    def copy(self) -> Knowledge:
        return Knowledge(self.seen.copy(), self.fenced.copy())

    def join(self, other: Knowledge) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def learn(self, agent: int, tick: int) -> None:
        self.seen[agent] = max(self.seen[agent], tick)

    def fence(self) -> None:
        np.maximum(self.fenced, self.seen, out=self.fenced)
