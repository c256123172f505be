"""Which rows of a sequence each rank has: layouts, shards, positions.

A sequence of n tokens is cut into chunks as equal as may be: one a rank (`contiguous`), or two a rank (`zigzag`), of which rank
r of R has chunk r and chunk 2R - 1 - r. Under a causal mask late rows see more keys than early ones, and an early and a late
chunk together see the same number on every rank. Of packed sequences each is cut by itself, so that every rank has its share
of each; the tokens that are left over go to the chunks in turn, across sequences, so that shards differ by a token or two.

A shard has the sequence's rows in order. Ranks that stand next to each other have, together, at most two pieces of it as well,
so that a group of ranks is as good a member of a ring as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from strobe.places import Place

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Sharding:
    """Sequences of these lengths, cut for so many ranks. A dense tensor is one sequence, whatever its batch."""

    lengths: tuple[int, ...]
    ranks: int
    layout: str
    """One of `LAYOUTS`."""

    @cached_property
    def _bounds(self) -> list[list[int]]:
        """The bounds of the chunks of each sequence."""
        chunks, turn, bounds = self.ranks * (2 if self.layout == "zigzag" else 1), 0, []
        for n in self.lengths:
            least, more = divmod(n, chunks)
            ends = [0]
            for chunk in range(chunks):
                ends.append(ends[-1] + least + ((chunk - turn) % chunks < more))
            turn = (turn + more) % chunks
            bounds.append(ends)
        return bounds

    @property
    def total(self) -> int:
        """Rows of all sequences, on all ranks."""
        return sum(self.lengths)

    def pieces(self, first: int, last: int) -> list[tuple[range, range]]:
        """The two pieces of each sequence, of which any may be empty, that the ranks first..last have together."""
        found = []
        for ends in self._bounds:
            near = range(ends[first], ends[last + 1])
            far = range(near.stop, near.stop)
            if self.layout == "zigzag":
                far = range(ends[2 * self.ranks - 1 - last], ends[2 * self.ranks - first])
            found.append((near, far))
        return found

    def rows(self, first: int, last: int) -> list[int]:
        """Rows of each sequence that the ranks first..last have together."""
        return [len(near) + len(far) for near, far in self.pieces(first, last)]

    def places(self, first: int, last: int) -> list[Place]:
        """Where the rows of the ranks first..last stand, in each sequence."""
        return [
            Place(len(near), near.start, far.start - len(near), n)
            for n, (near, far) in zip(self.lengths, self.pieces(first, last), strict=True)
        ]

    def whole(self) -> list[Place]:
        """Where all rows of each sequence stand, in order."""
        return [Place(n, 0, 0, n) for n in self.lengths]

    def bounds(self, first: int, last: int) -> list[int]:
        """The cu_seqlens of the rows that the ranks first..last have together."""
        return cumulative(self.rows(first, last))

    def index(self, first: int, last: int, device: torch.device | None = None) -> torch.Tensor:
        """Which rows of the packed whole the ranks first..last have together, in their order: int64."""
        return _index(self, first, last, torch.device("cpu") if device is None else device)

    def order(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """How to bring the rows of the ranks' shards, one behind the other, into the order that they have together."""
        return _order(self, first, last, device)

    def back(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """How to bring rows in the order that the ranks have together into that of their shards, one behind the other."""
        return _back(self, first, last, device)


def cumulative(lengths: list[int]) -> list[int]:
    """[0, and the sums of the first so many lengths]."""
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    return bounds


@lru_cache(maxsize=64)
def _index(sharding: Sharding, first: int, last: int, device: torch.device) -> torch.Tensor:
    starts = cumulative(list(sharding.lengths))
    pieces = [
        torch.arange(start + piece.start, start + piece.stop)
        for start, both in zip(starts, sharding.pieces(first, last), strict=False)
        for piece in both
    ]
    return torch.cat(pieces or [torch.arange(0)]).to(device)


@lru_cache(maxsize=64)
def _order(sharding: Sharding, first: int, last: int, device: torch.device) -> torch.Tensor:
    return (
        torch.cat([_index(sharding, rank, rank, torch.device("cpu")) for rank in range(first, last + 1)]).argsort().to(device)
    )


@lru_cache(maxsize=64)
def _back(sharding: Sharding, first: int, last: int, device: torch.device) -> torch.Tensor:
    return _order(sharding, first, last, torch.device("cpu")).argsort().to(device)


def checked(lengths: Sequence[int], ranks: int, layout: str) -> Sharding:
    """The Sharding of sequences of these lengths. ValueError for a layout that is none."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return _sharding(tuple(lengths), ranks, layout)


_sharding = lru_cache(maxsize=64)(Sharding)  # which keeps what it has computed


def lengths_of(name: str, cu_seqlens: torch.Tensor) -> list[int]:
    """The lengths of packed sequences, read on the host: for a tensor on a GPU the host waits."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype.is_floating_point:
        got = list(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"{name} must be an integer tensor of shape [sequences + 1], got {got}")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"{name} must start at 0 and never decrease, got {bounds}")
    return [b - a for a, b in itertools.pairwise(bounds)]
