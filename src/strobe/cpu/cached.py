"""Attention over a cache on a CPU, in plain torch: one request after the other, some rows at a time, exact.

Query heads that share a key head are stacked along the rows of one product. Lengths and tables are read on the host.
"""

from __future__ import annotations

import torch

from strobe.device import Arch
from strobe.masks import visible
from strobe.problem import lse_shape_of
from strobe.reference.precision import without_autocast
from strobe.serving.problem import DecodeOperands, DecodeProblem, queries_of, tokens_of

SCORES = 1 << 22
"""Scores that are computed at once, about: more do not stay in a cache."""


def refuses(problem: DecodeProblem, arch: Arch) -> str | None:
    if arch.name != "CPU":
        return "reads lengths and page tables on the host, so it runs on a CPU only"
    return None


def config(problem: DecodeProblem, arch: Arch) -> None:
    return None


@without_autocast
def forward(problem: DecodeProblem, operands: DecodeOperands) -> tuple[torch.Tensor, torch.Tensor]:
    q = operands.q
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(problem.out_shape) if operands.out is None else operands.out
    lse = torch.full(lse_shape_of(problem.lengths, problem.heads_q), -torch.inf, dtype=wide, device=q.device)
    for b in range(problem.batch):
        rows, n_q = queries_of(problem, operands, b)
        places, at, there = tokens_of(problem, operands, b)
        k = _values(operands.k, operands.k_scale, b, places, at, there, wide)
        v = _values(operands.v, operands.v_scale, b, places, at, there, wide)[..., : problem.head_dim_v]
        mine, of_lse = ((rows,), (slice(None), rows)) if problem.ragged else ((b, rows), (b, slice(None), rows))
        step = max(1, SCORES // max(1, problem.heads_q * len(there)))
        for first in range(0, n_q, step):
            some = slice(first, min(first + step, n_q))
            one, lse_one = _attend(problem, operands, b, n_q, some, q[mine][some].to(wide), k, v, there)
            out[mine][some], lse[of_lse][:, some] = one.to(q.dtype), lse_one
    return out, lse


def _values(x, scale, b: int, places, at, there, wide: torch.dtype) -> torch.Tensor:
    """The keys or values of a request, [heads_kv, n, dim]; 0 where none is there."""
    values = x[places, at].to(wide)
    if scale is not None:
        values *= (scale[b] if scale.dim() == 2 else scale[places, at]).to(wide)[..., None]
    if not bool(there.all()):
        values[~there] = 0.0
    return values.transpose(0, 1)


def _attend(problem: DecodeProblem, operands: DecodeOperands, b: int, n_q: int, some: slice, q, k, v, there):
    """out [rows, heads_q, dim_v] and lse [heads_q, rows] of the queries `some` of a request that has n_q of them."""
    heads_kv, n_kv, _ = k.shape
    count, group = q.shape[0], problem.group
    stacked = q.reshape(count, heads_kv, group, -1).permute(1, 2, 0, 3).reshape(heads_kv, group * count, -1)
    s = (problem.scale * (stacked @ k.transpose(1, 2))).view(heads_kv * group, count, n_kv)
    if problem.score.softcap:
        s = problem.score.softcap * torch.tanh(s / problem.score.softcap)
    p = torch.arange(some.start, some.stop, device=q.device)[:, None] + (n_kv - n_q)
    j = torch.arange(n_kv, device=q.device)[None, :]
    if operands.alibi is not None:
        slopes = operands.alibi if operands.alibi.dim() == 1 else operands.alibi[b]
        s = s - slopes.to(s.dtype)[:, None, None] * (p - j).abs()
    seen = (visible(p, j, n_kv, *problem.mask.band) & there).expand(count, n_kv)
    if operands.tree is not None:
        drafts = min(n_q, n_kv)
        seen = seen.clone()
        seen[:, n_kv - drafts :] &= operands.tree[b][some, n_q - drafts : n_q]
    s = s.masked_fill(~seen, -torch.inf)
    top = s.amax(-1) if n_kv else s.new_full(s.shape[:-1], -torch.inf)
    if operands.sinks is not None:
        top = top.maximum(operands.sinks.to(s.dtype)[:, None])
    shift = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(s - shift[..., None])
    total = weights.sum(-1)
    if operands.sinks is not None:
        total = total + torch.exp(operands.sinks.to(s.dtype)[:, None] - shift)
    lse = torch.where(total == 0.0, -torch.inf, shift + torch.log(total))
    # A value of a key that nobody here sees may be anything, and 0 * NaN is NaN.
    v = torch.where(seen.any(0)[:, None], v, 0.0)
    out = weights.view(heads_kv, group * count, n_kv) @ v
    out = out.view(heads_kv * group, count, -1) / torch.where(total == 0.0, 1.0, total)[..., None]
    return out.transpose(0, 1), lse


def merged(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over all keys, from those of parts: outs [parts, ..., n, heads, dim], lses [parts, ..., heads, n]."""
    wide = lses.dtype
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(0)
    shares = (weights / torch.where(total == 0.0, 1.0, total)).transpose(-1, -2)[..., None]
    out = torch.where(shares == 0.0, 0.0, shares * outs.to(wide)).sum(0)  # what an empty part holds may be anything
    return out.to(outs.dtype), torch.where(total == 0.0, -torch.inf, top + torch.log(total))
