"""What the plain-torch backends compute at once: the whole of a dense problem, or one sequence (or batch entry) after the
other where their lengths differ. Reads cu_seqlens and seqused on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from strobe.problem import AttentionProblem, Operands, Varlen


class Part(NamedTuple):
    """A dense part of a problem: what to index tensors by for views of it, which have a batch dim; its first batch entry;
    its problem, whose mask and score hold the tensors of its own entries only. Only the lengths are those of the whole."""

    rows: tuple
    """Of q, out, dout."""
    keys: tuple
    lse: tuple
    batch: int
    problem: AttentionProblem


def parts(problem: AttentionProblem, operands: Operands) -> Iterator[Part]:
    """The parts of a problem."""
    if not problem.varlen and not problem.seqused:
        yield Part((), (), (), 0, problem)
        return
    bounds_q = _bounds(problem, operands.cu_seqlens_q, operands.seqused_q, problem.lengths.seqlen_q)
    bounds_kv = _bounds(problem, operands.cu_seqlens_kv, operands.seqused_kv, problem.lengths.seqlen_kv)
    for b, (rows, keys) in enumerate(zip(bounds_q, bounds_kv, strict=True)):
        one = replace(problem, mask=problem.mask.of_batch(b), score=problem.score.of_batch(b))
        if problem.varlen:
            yield Part((None, rows), (None, keys), (None, slice(None), rows), b, one)
        else:
            entry = slice(b, b + 1)
            yield Part((entry, rows), (entry, keys), (entry, slice(None), rows), b, one)


def _bounds(problem: AttentionProblem, cu: torch.Tensor | None, used: torch.Tensor | None, length: int) -> list[slice]:
    """First and last of the rows, or keys, that each batch entry (or sequence) uses."""
    batch = problem.lengths.batch
    ends = [length] * batch
    starts = [0] * batch
    if isinstance(problem.lengths, Varlen):
        assert cu is not None
        starts, ends = cu[:-1].tolist(), cu[1:].tolist()
    if used is not None:
        ends = [start + n for start, n in zip(starts, used.tolist(), strict=True)]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]
