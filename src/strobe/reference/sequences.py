"""Cuts a problem into the parts that the plain-torch backends compute at once: all of a dense problem, or one sequence (or
batch entry) after the other where their lengths differ. Reads cu_seqlens and seqused on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from strobe.masks import Mask
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


def parts(problem: AttentionProblem, operands: Operands) -> Iterator[Part]:
    """Yield the parts of a problem, one after the other."""
    mask, score = with_tensors(problem, operands)
    if not problem.varlen and not problem.seqused:
        yield Part((), (), (), 0, problem, mask, score)
        return
    bounds_q = _bounds(problem, operands.cu_seqlens_q, operands.seqused_q, problem.lengths.seqlen_q)
    bounds_kv = _bounds(problem, operands.cu_seqlens_kv, operands.seqused_kv, problem.lengths.seqlen_kv)
    for b, (rows, keys) in enumerate(zip(bounds_q, bounds_kv, strict=True)):
        entry = None if problem.varlen else slice(b, b + 1)
        one = mask.of_batch(b), score.of_batch(b)
        yield Part((entry, rows), (entry, keys), (entry, slice(None), rows), b, problem, *one)


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
