"""A packed (varlen) problem, one sequence at a time: how the plain-torch backends read cu_seqlens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from strobe.problem import AttentionProblem, Operands, Varlen
from strobe.scores import Score


class Sequence(NamedTuple):
    """Sequence `number` of a packed problem: its rows of q and of k, v."""

    number: int
    q: slice
    kv: slice


def sequences(problem: AttentionProblem, operands: Operands) -> Iterator[Sequence]:
    """The sequences of a packed problem; reads cu_seqlens on the host."""
    assert isinstance(problem.lengths, Varlen) and operands.cu_seqlens_q is not None and operands.cu_seqlens_kv is not None
    bounds_q, bounds_kv = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_kv.tolist()
    for b in range(problem.lengths.batch):
        yield Sequence(b, slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_kv[b], bounds_kv[b + 1]))


def score_of(score: Score, index: int) -> Score:
    """The score for one sequence: its row of ALiBi slopes, where they differ by sequence."""
    if score.alibi is None or score.alibi.dim() == 1:
        return score
    return replace(score, alibi=score.alibi[index])
