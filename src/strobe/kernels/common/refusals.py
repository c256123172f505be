"""Reasons to refuse a problem that several of our Gluon kernels share."""

from __future__ import annotations

import torch

from strobe.masks import MAX_BOUND
from strobe.problem import AttentionProblem, Varlen

HALVES = torch.float16, torch.bfloat16


def gluon_refuses(problem: AttentionProblem, dtypes: tuple[torch.dtype, ...] = HALVES) -> str | None:
    """The reason for which a kernel in Gluon that takes some dtypes does not run a problem, whatever its head dims and lengths;
    or None."""
    if problem.placed:
        return "takes no rows and keys that stand elsewhere in a longer sequence yet"
    if problem.mask.blocks is not None:
        return f"takes no {problem.mask} yet"
    if problem.dtype not in dtypes:
        *names, last = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, problem.dtype))
        return f"takes {' and '.join(names)}, not {last}"
    if max(_rows(problem)) >= MAX_BOUND:
        return "counts rows in int32 and takes fewer than 2^30 of them"
    if problem.unaligned:
        return (
            f"needs bases and strides in multiples of 16 bytes and no dim expanded with stride 0 (for TMA), "
            f"which {', '.join(problem.unaligned)} lacks"
        )
    return None


def changed_scores_refused(problem: AttentionProblem) -> str | None:
    """The reason for which a kernel of plain scores and bands alone does not run a problem; or None."""
    if problem.mask.documents is not None:
        return "takes no documents yet"
    if problem.mask.function is not None:
        return "takes no mask function yet"
    if problem.seqused:
        return "takes no seqused yet"
    if problem.dropout:
        return "takes no dropout yet"
    if problem.partial:
        return "gives no partial results yet, which are kept in float32"
    if str(problem.score) != "plain":
        return f"takes no score but the plain one yet, not {problem.score}"
    if not problem.scale > 0:
        return f"takes a positive scale (it takes maxima before it scales), not {problem.scale:g}"
    return None


def _rows(problem: AttentionProblem) -> tuple[int, ...]:
    lengths = problem.lengths
    packed = (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else ()
    return (lengths.seqlen_q, lengths.seqlen_kv, *packed)
