"""The specification: attention as its formula, in float64, gradients by autograd.

Nothing that is optimised imports this file, and every kernel is tested against it.
"""

from __future__ import annotations

import torch

from strobe.masks import Mask
from strobe.problem import AttentionProblem, Operands, lse_shape
from strobe.reference.sequences import score_of, sequences
from strobe.scores import Score


def attend(q, k, v, scale: float, mask: Mask, score: Score):
    """q [B, n_q, Hq, D], k [B, n_kv, Hkv, D], v [B, n_kv, Hkv, Dv] -> out [B, n_q, Hq, Dv], lse [B, Hq, n_q].

    A row that sees no key gives 0 and an LSE of -inf.
    """
    n_q, n_kv, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    i, j = torch.arange(n_q, device=q.device)[:, None], torch.arange(n_kv, device=q.device)[None, :]
    seen = mask.dense(n_q, n_kv, device=q.device)
    seen = seen[:, None] if seen.dim() == 3 else seen[None, None]
    some = seen.any(-1)

    s = score.apply(scale * (q @ k.transpose(-1, -2)), i, j, n_q, n_kv)
    s = torch.where(seen, s, -torch.inf)
    lse = torch.where(some, torch.logsumexp(torch.where(some[..., None], s, 0.0), -1), -torch.inf)
    p = torch.where(seen, torch.exp(s - torch.where(some, lse, 0.0)[..., None]), 0.0)
    return (p @ v).transpose(1, 2), lse


def attention(
    problem: AttentionProblem, operands: Operands, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, differentiable with respect to operands.q, k and v.

    In float64 this is the specification; in another dtype it is what the plain formula costs in precision there.
    """
    q, k, v = (x.to(dtype) for x in operands[:3])
    if not problem.varlen:
        return attend(q, k, v, problem.scale, problem.mask, problem.score)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(lse_shape(problem), -torch.inf)
    for index, rows, keys in sequences(problem, operands):
        score = score_of(problem.score, index)
        one, one_lse = attend(q[None, rows], k[None, keys], v[None, keys], problem.scale, problem.mask, score)
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse
