"""The specification of attention over a cache, and of what is appended to one: their formulas, in float64.

Nothing that is optimised imports this file.
"""

from __future__ import annotations

import torch

from strobe.masks import visible
from strobe.problem import lse_shape_of
from strobe.serving.problem import DecodeOperands, DecodeProblem, queries_of, tokens_of


def decode(
    problem: DecodeProblem, operands: DecodeOperands, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a problem in `dtype`. A key whose page is not there is seen by nobody; a row that sees no key gives 0 and
    an LSE of -inf, or of its sink."""
    q = operands.q.to(dtype)
    out = q.new_zeros(problem.out_shape)
    lse = q.new_full(lse_shape_of(problem.lengths, problem.heads_q), -torch.inf)
    for b in range(problem.batch):
        rows, _ = queries_of(problem, operands, b)
        places, at, there = tokens_of(problem, operands, b)
        k, v = (_values(x, scale, b, places, at, there, dtype) for x, scale in _sides(operands))
        mine = (rows,) if problem.ragged else (b, rows)
        one, lse_one = _attend(problem, operands, b, q[mine], k, v[..., : problem.head_dim_v], there)
        out[mine] = one
        lse[(slice(None), rows) if problem.ragged else (b, slice(None), rows)] = lse_one
    return out, lse


def _sides(operands: DecodeOperands):
    return (operands.k, operands.k_scale), (operands.v, operands.v_scale)


def _values(x, scale, b: int, places, at, there, dtype) -> torch.Tensor:
    """The keys or values of a request, [n, heads_kv, dim]; 0 where none is there."""
    values = x[places, at].to(dtype)
    if scale is not None:
        values = values * (scale[b] if scale.dim() == 2 else scale[places, at]).to(dtype)[..., None]
    return torch.where(there[:, None, None], values, 0.0)


def _attend(problem: DecodeProblem, operands: DecodeOperands, b: int, q, k, v, there) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n_q, heads_q, dim_v] and lse [heads_q, n_q] of one request: q [n_q, heads_q, dim], k and v [n_kv, heads_kv, dim]."""
    n_q, n_kv = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
    s = problem.scale * torch.einsum("ihd,jhd->hij", q, k)
    if problem.score.softcap:
        s = problem.score.softcap * torch.tanh(s / problem.score.softcap)
    p = torch.arange(n_kv - n_q, n_kv, device=q.device)[:, None]
    j = torch.arange(n_kv, device=q.device)[None, :]
    if operands.alibi is not None:
        slopes = operands.alibi if operands.alibi.dim() == 1 else operands.alibi[b]
        s = s - slopes.to(s.dtype)[:, None, None] * (p - j).abs()
    seen = visible(p, j, n_kv, *problem.mask.band) & there
    if operands.tree is not None:
        drafted = j - (n_kv - n_q)
        by_tree = operands.tree[b][:n_q, :n_q][:, drafted[0].clamp(0, max(n_q - 1, 0))] if n_q else seen
        seen = seen & ((drafted < 0) | by_tree)
    s = torch.where(seen, s, -torch.inf)
    lse = torch.logsumexp(s, -1) if n_kv else s.new_full(s.shape[:-1], -torch.inf)
    if operands.sinks is not None:
        lse = torch.logaddexp(lse, operands.sinks.to(s.dtype)[:, None])
    weights = torch.where(seen, torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None]), 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def rotated(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, dtype=torch.float64
) -> torch.Tensor:
    """x [n, heads, dim] turned by the angles of its positions [n]: pairs of neighbours if interleaved, else a half and the
    other; of the first 2 * cos.shape[1] columns."""
    x = x.to(dtype)
    half = cos.shape[-1]
    c, s = cos[positions].to(dtype)[:, None], sin[positions].to(dtype)[:, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    new_a, new_b = a * c - b * s, a * s + b * c
    both = torch.stack((new_a, new_b), -1).flatten(-2) if interleaved else torch.cat((new_a, new_b), -1)
    return torch.cat((both, rest), -1)


def merged(outs: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all keys from that over parts of them: outs [parts, ..., heads, dim], lses [parts, ..., heads]."""
    outs, lses = outs.to(dtype), lses.to(dtype)
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse == -torch.inf, 0.0, lse))[..., None]
    return torch.where(weights == 0.0, 0.0, weights * outs).sum(0), lse
