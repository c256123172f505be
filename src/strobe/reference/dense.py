"""The specification: attention as its formula, in float64, gradients by autograd.

Nothing that is optimised imports this file, and every kernel is tested against it.
"""

from __future__ import annotations

import torch

from strobe.dropout import kept
from strobe.masks import Mask
from strobe.problem import AttentionProblem, Operands, lse_shape
from strobe.reference.precision import without_autocast
from strobe.reference.sequences import parts
from strobe.scores import Score


@without_autocast
def attend(q, k, v, scale: float, mask: Mask, score: Score, first_batch: int = 0, dropout: float = 0.0, seed=None):
    """Attend: q [B, n_q, Hq, D], k [B, n_kv, Hkv, D], v [B, n_kv, Hkv, Dv] -> out [B, n_q, Hq, Dv], lse [B, Hq, n_q].

    A row that sees no key, or only keys whose score is -inf, gives 0 and an LSE of -inf, or of its sink.
    first_batch: the number that functions, and dropout, are given for the first batch entry.
    """
    n_q, n_kv, heads, group = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    batches = range(first_batch, first_batch + q.shape[0])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    i, j = torch.arange(n_q, device=q.device)[:, None], torch.arange(n_kv, device=q.device)[None, :]
    seen = mask.tile(i, j, n_q, n_kv, batches, range(heads))
    seen = seen[:, None] if seen.dim() == 3 else seen

    s = score.apply(scale * (q @ k.transpose(-1, -2)), i, j, n_q, n_kv, first_batch)
    seen = seen & (s != -torch.inf)
    logits = torch.where(seen, s, -torch.inf)
    if score.sinks is not None:
        sinks = score.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)
        logits = torch.cat([logits, sinks], -1)
    some = (logits != -torch.inf).any(-1)
    logits = torch.where(some[..., None], logits, 0.0)
    lse = torch.where(some, torch.logsumexp(logits, -1), -torch.inf)
    # Not exp(s - lse): huge scores swallow the logarithm of the sum, so that the weights of equal ones would not add up to 1.
    p = torch.where(seen, torch.softmax(logits, -1)[..., :n_kv], 0.0)
    if seed is not None:
        batch, head = torch.arange(batches.start, batches.stop, device=q.device), torch.arange(heads, device=q.device)
        p = p * kept(seed, dropout, batch[:, None, None, None], head[:, None, None], i, j) / (1.0 - dropout)
    return (p @ v).transpose(1, 2), lse


def attention(
    problem: AttentionProblem, operands: Operands, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a problem, differentiable with respect to operands.q, k and v.

    In float64 this is the specification; in another dtype it is what the plain formula costs in precision there.
    """
    q, k, v = (x.to(dtype) for x in operands[:3])
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(lse_shape(problem), -torch.inf)
    for part in parts(problem, operands):
        tensors = q[part.rows], k[part.keys], v[part.keys]
        one = attend(*tensors, problem.scale, part.mask, part.score, part.batch, problem.dropout, operands.seed)
        out[part.rows], lse[part.lse] = one
    return out, lse
