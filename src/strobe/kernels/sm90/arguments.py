"""What the Hopper kernels are told of a problem's scores, in the order of their arguments from `inner` on."""

from __future__ import annotations

import torch

from strobe.dropout import threshold
from strobe.kernels.common import gluon_math
from strobe.kernels.common.arguments import LOG2_E
from strobe.problem import AttentionProblem


def score_arguments(problem: AttentionProblem, seed: torch.Tensor | None) -> tuple:
    """With log2(e) folded into the factors. seed: of dropout. A backward is told of no sinks: they are in the LSE."""
    score, documents, backward = problem.score, problem.mask.documents, problem.phase == "backward"
    inner, outer = problem.scale * LOG2_E, None
    if score.softcap:
        inner, outer = problem.scale / score.softcap, score.softcap * LOG2_E
    slopes, bias, sinks = score.alibi, score.bias, None if backward else score.sinks
    return (
        inner,
        outer,
        *((None, 0, 0) if slopes is None else (slopes, slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))),
        *((None, 0, 0, 0, 0) if bias is None else (bias, *_repeated(bias))),
        *((None, 0) if sinks is None else (sinks, sinks.stride(0))),
        gluon_math.of_user(score.function),
        gluon_math.of_user(score.function_gradient) if backward else None,
        gluon_math.of_user(problem.mask.function),
        *((None, 0, 0) if documents is None else (documents.q, *documents.q.stride())),
        *((None, 0, 0) if documents is None else (documents.kv, *documents.kv.stride())),
        *((None, 0, 0.0) if seed is None else (seed, threshold(problem.dropout), 1.0 / (1.0 - problem.dropout))),
    )


def _repeated(bias: torch.Tensor) -> list[int]:
    """Strides of a bias: 0 where its one number stands for all."""
    return [stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)]
