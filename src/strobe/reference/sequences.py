"""Cuts a problem into the parts that the plain-torch backends compute at once: all of a dense problem, or one sequence (or
batch entry) after the other where their lengths, or the places of their rows, may differ. Reads cu_seqlens, seqused and places
on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from strobe.masks import Mask
from strobe.places import Places, places_of
from strobe.problem import AttentionProblem, Operands, Varlen, with_tensors
from strobe.scores import Score


class Part(NamedTuple):
    """A dense part of a problem: indices that make views of it from tensors, each with a batch dim, its own mask and score."""

    rows: tuple
    """Index of q, out and dout."""
    keys: tuple
    """Index of k and v."""
    lse: tuple
    """Index of the LSE."""
    batch: int
    """Number of its first batch entry (or sequence)."""
    problem: AttentionProblem
    """The whole problem."""
    mask: Mask
    score: Score
    """They hold the tensors of the part's own entries."""
    places: Places | None = None
    """Where its rows and keys stand in a longer sequence; None: the part is the sequence."""

    def lengths(self, n_q: int, n_kv: int) -> tuple[int, int]:
        """The lengths of the whole sequence, queries and keys, to which masks and slopes look; n_q, n_kv: those of the part."""
        return (n_q, n_kv) if self.places is None else (self.places.q.whole, self.places.kv.whole)

    def row(self, i):
        """Where row i (an int, or a tensor) of the part stands."""
        return i if self.places is None else self.places.q.position(i)

    def key(self, j):
        """Where key j (an int, or a tensor) of the part stands."""
        return j if self.places is None else self.places.kv.position(j)

    def kv_range(self, row_first: int, row_last: int, n_q: int, n_kv: int) -> tuple[int, int]:
        """`Mask.kv_range` of some of the part's rows, as a range of the part's keys."""
        begin, end = self.mask.kv_range(self.row(row_first), self.row(row_last), *self.lengths(n_q, n_kv))
        if self.places is not None:
            begin, end = self.places.kv.before(begin, n_kv), self.places.kv.before(end, n_kv)
        return begin, max(begin, end)

    @property
    def first_head(self) -> int:
        """What functions and dropout are told of the part's first query head."""
        return 0 if self.places is None else self.places.first_head


def parts(problem: AttentionProblem, operands: Operands) -> Iterator[Part]:
    """Yield the parts of a problem, one after the other."""
    mask, score = with_tensors(problem, operands)
    if not problem.varlen and not problem.seqused and not problem.placed:
        yield Part((), (), (), 0, problem, mask, score)
        return
    bounds_q = _bounds(problem, operands.cu_seqlens_q, operands.seqused_q, problem.lengths.seqlen_q)
    bounds_kv = _bounds(problem, operands.cu_seqlens_kv, operands.seqused_kv, problem.lengths.seqlen_kv)
    for b, (rows, keys) in enumerate(zip(bounds_q, bounds_kv, strict=True)):
        entry = None if problem.varlen else slice(b, b + 1)
        one = mask.of_batch(b), score.of_batch(b)
        places = None if operands.places is None else places_of(operands.places[b].tolist())
        yield Part((entry, rows), (entry, keys), (entry, slice(None), rows), b, problem, *one, places)


def _bounds(problem: AttentionProblem, cu: torch.Tensor | None, used: torch.Tensor | None, length: int) -> list[slice]:
    """The rows, or keys, that each batch entry (or sequence) uses."""
    batch = problem.lengths.batch
    ends = [length] * batch
    starts = [0] * batch
    if isinstance(problem.lengths, Varlen):
        assert cu is not None
        starts, ends = cu[:-1].tolist(), cu[1:].tolist()
    if used is not None:
        ends = [start + n for start, n in zip(starts, used.tolist(), strict=True)]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]
