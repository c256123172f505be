"""Attention over a cache on a CPU: one request after the other, some rows at a time, exact.

Query heads that share a key head are stacked along the rows of one product, so that keys and values are read once. PyTorch's
C++ flash kernel computes what it knows (`torch_cpu` says how far it is trusted), plain torch in float32 the rest: softcaps,
values of another width than keys, and requests of which an input is a NaN or an infinity. Lengths and tables are read on the
host, where they were checked: each key is there.

Keys in pages, and those of 8 bits, are copied block by block, and what was found of each block is merged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from strobe.cpu.torch_cpu import is_lost
from strobe.device import Arch
from strobe.masks import kv_full, kv_range, visible
from strobe.problem import lse_shape_of
from strobe.reference.precision import without_autocast
from strobe.serving.problem import DecodeOperands, DecodeProblem, queries_of, tokens_of

SCORES = 1 << 22
"""Scores that are computed by hand at once, about: more do not stay in a cache."""
SCORES_OF_FLASH = 1 << 24
"""Scores of a call of PyTorch's kernel, about, for which it gets a mask of every pair. Two threads of a Xeon, 512 queries of 32
heads on 8 of 64 over 4096 keys: 68 ms, with a quarter of it 106, with four times as many 95."""
COPIED = 1 << 21
"""Numbers of K, and of V, that are copied at once, about, where they lie in pages or have 8 bits. One thread of a Xeon, 8192
keys of 8 heads of 128, float32: 18.5 ms, and 49.6 all at once, as each call takes new memory from the system."""

Part = tuple[torch.Tensor, torch.Tensor]
"""out [rows, heads_q, dim_v] and lse [heads_q, rows] of some queries of a request."""


def refuses(problem: DecodeProblem, arch: Arch) -> str | None:
    if arch.name != "CPU":
        return "reads lengths and page tables on the host, so it runs on a CPU only"
    return None


def config(problem: DecodeProblem, arch: Arch) -> None:
    return None


class Rows(NamedTuple):
    """Queries `first` to `last` of the n_q of request `number`, which has n_kv keys."""

    number: int
    n_q: int
    n_kv: int
    first: int
    last: int

    @property
    def positions(self) -> tuple[int, int]:
        """The keys on which the first and the last of them stand."""
        return self.n_kv - self.n_q + self.first, self.n_kv - self.n_q + self.last


@without_autocast
def forward(problem: DecodeProblem, operands: DecodeOperands) -> tuple[torch.Tensor, torch.Tensor]:
    q, knows = operands.q, _flash_knows(problem)
    most = SCORES_OF_FLASH if knows else SCORES
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(problem.out_shape) if operands.out is None else operands.out
    lse = torch.full(lse_shape_of(problem.lengths, problem.heads_q), -torch.inf, dtype=wide, device=q.device)
    for b in range(problem.batch):
        mine, n_q = queries_of(problem, operands, b)
        of_out, of_lse = ((mine,), (slice(None), mine)) if problem.ragged else ((b, mine), (b, slice(None), mine))
        n_kv, gathered = int(operands.lengths[b]) - _first(operands, b), None
        step = 1 if problem.deterministic else max(1, most // max(1, problem.heads_q * n_kv))  # sums depend on the rows
        for first in range(0, n_q, step):
            rows = Rows(b, n_q, n_kv, first, min(first + step, n_q) - 1)
            some = q[of_out][first : rows.last + 1]
            found = _by_flash(problem, operands, rows, some) if knows else None
            if found is None:
                gathered = gathered or _gathered(problem, operands, b, wide)
                found = _by_hand(problem, operands, rows, some.to(wide), *gathered)
            out[of_out][first : rows.last + 1], lse[of_lse][:, first : rows.last + 1] = found
    return out, lse


def _first(operands: DecodeOperands, b: int) -> int:
    """The first key that counts of a request."""
    return 0 if operands.leftpad is None else int(operands.leftpad[b])


def _reach(problem: DecodeProblem, rows: Rows) -> tuple[int, int]:
    """[begin, end) of the keys in reach of the mask's band from some of these rows."""
    begin, end = kv_range(*rows.positions, rows.n_kv, *problem.mask.band)
    begin = min(max(begin, 0), rows.n_kv)
    return begin, max(begin, end)


def _seen(problem: DecodeProblem, operands: DecodeOperands, rows: Rows, begin: int, end: int) -> torch.Tensor:
    """Which of the keys begin ... end - 1 each row sees, bool [rows, keys]."""
    first, last = rows.positions
    p, j = torch.arange(first, last + 1)[:, None], torch.arange(begin, end)[None, :]
    seen = visible(p, j, rows.n_kv, *problem.mask.band).expand(len(p), end - begin)
    if operands.tree is not None:
        own = j - (rows.n_kv - rows.n_q)  # the query of which a key is, of those that there are
        by_tree = operands.tree[rows.number, rows.first : rows.last + 1][:, own[0].clamp(min=0)]
        seen = seen & (by_tree | (own < 0))
    return seen


def _distances(operands: DecodeOperands, rows: Rows, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """What ALiBi subtracts from the scores of keys begin ... end - 1, [heads_q, rows, keys]."""
    assert operands.alibi is not None
    slopes = operands.alibi if operands.alibi.dim() == 1 else operands.alibi[rows.number]
    first, last = rows.positions
    p, j = torch.arange(first, last + 1)[:, None], torch.arange(begin, end)[None, :]
    return slopes.to(dtype)[:, None, None] * (p - j).abs()


def _stacked(problem: DecodeProblem, q: torch.Tensor) -> torch.Tensor:
    """[rows, heads_q, dim] -> [heads_kv, group * rows, dim]."""
    return q.reshape(len(q), problem.heads_kv, problem.group, -1).permute(1, 2, 0, 3).flatten(1, 2)


# ---- by PyTorch's flash kernel


def _flash_knows(problem: DecodeProblem) -> bool:
    return (problem.shared or problem.head_dim == problem.head_dim_v) and not problem.score.softcap and problem.scale > 0


def _by_flash(problem: DecodeProblem, operands: DecodeOperands, rows: Rows, q) -> Part | None:
    """None where no key is in reach of the mask's band, or a result may be wrong."""
    begin, end = _reach(problem, rows)
    copies = problem.page_size is not None or problem.kv_dtype != problem.dtype
    block = max(1, COPIED // (problem.heads_kv * problem.head_dim)) if copies else max(1, end - begin)
    parts = []
    for first in range(begin, end, block):
        part = _of_block(problem, operands, rows, q, first, min(first + block, end))
        if part is None:
            return None
        parts.append(part)
    if not parts:
        return None
    out, lse = parts[0] if len(parts) == 1 else merged(*(torch.stack(each) for each in zip(*parts, strict=True)))
    if operands.sinks is not None:
        alone = lse
        lse = torch.logaddexp(lse, operands.sinks.to(lse.dtype)[:, None])
        out = out * torch.where(lse == -torch.inf, 0.0, torch.exp(alone - lse)).transpose(0, 1)[..., None]
    return out.to(q.dtype), lse


def _of_block(problem: DecodeProblem, operands: DecodeOperands, rows: Rows, q, begin: int, end: int) -> Part | None:
    """What the keys begin ... end - 1 give, without sinks."""
    k, v = _keys(problem, operands, rows.number, begin, end)
    all_begin, all_end = kv_full(*rows.positions, rows.n_kv, *problem.mask.band)
    all_seen = operands.tree is None and all_begin <= begin and end <= all_end
    seen = None if all_seen else _seen(problem, operands, rows, begin, end)
    bias = _bias(problem, operands, rows, begin, end, seen, torch.promote_types(q.dtype, torch.float32))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _stacked(problem, q.to(k.dtype))[None], *(x.transpose(0, 1)[None] for x in (k, v)), 0.0, False, attn_mask=bias,
        scale=problem.scale,
    )  # fmt: skip
    out, lse = (x.reshape(problem.heads_q, len(q), *x.shape[3:]) for x in (out, lse))
    blind = None if seen is None else ~seen.any(-1)
    if is_lost(out, lse, blind):
        return None
    return out[..., : problem.head_dim_v].transpose(0, 1), lse if blind is None else torch.where(blind, -torch.inf, lse)


def _keys(problem: DecodeProblem, operands: DecodeOperands, b: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys begin ... end - 1 of a request, counted from the first that counts, and their values, [n, heads_kv, dim], views
    where they lie in one place; in q's dtype, or in float32 if the cache has 8 bits."""
    size, first = problem.page_size, _first(operands, b)
    begin, end = first + begin, first + end
    if operands.page_table is not None and size is not None:
        pages, ahead = operands.page_table[b, begin // size : -(-end // size)], begin // size * size
    else:
        pages, ahead = torch.tensor([b]) if operands.entries is None else operands.entries[b : b + 1], 0

    def rows_of(x: torch.Tensor) -> torch.Tensor:
        found = x[int(pages)] if len(pages) == 1 else x.index_select(0, pages).flatten(0, 1)
        return found[begin - ahead : end - ahead]

    def values(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        found = rows_of(x)
        if problem.kv_dtype == problem.dtype:
            return found
        found = found.to(torch.promote_types(problem.dtype, torch.float32))
        if scale is None:
            return found
        return found * (scale[b] if scale.dim() == 2 else rows_of(scale)).to(found.dtype)[..., None]

    k = values(operands.k, operands.k_scale)
    return k, k if problem.shared else values(operands.v, operands.v_scale)


def _bias(
    problem: DecodeProblem, operands: DecodeOperands, rows: Rows, begin: int, end: int, seen: torch.Tensor | None, dtype
) -> torch.Tensor | None:
    """What is added to the scores of these keys, [1, heads_kv or 1, group * rows, keys]; None if that is nothing."""
    if operands.alibi is None:
        return None if seen is None else torch.where(seen, 0.0, -torch.inf).to(dtype).repeat(problem.group, 1)[None, None]
    bias = -_distances(operands, rows, begin, end, dtype)
    if seen is not None:
        bias = bias.masked_fill_(~seen, -torch.inf)
    return bias.view(1, problem.heads_kv, -1, end - begin)


# ---- by hand


def _gathered(problem: DecodeProblem, operands: DecodeOperands, b: int, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values of a request, [n, heads_kv, dim]."""
    places, at, _ = tokens_of(problem, operands, b)

    def values(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        found = x[places, at].to(wide)
        if scale is not None:
            found *= (scale[b] if scale.dim() == 2 else scale[places, at]).to(wide)[..., None]
        return found

    return values(operands.k, operands.k_scale), values(operands.v, operands.v_scale)[..., : problem.head_dim_v]


def _by_hand(problem: DecodeProblem, operands: DecodeOperands, rows: Rows, q, k, v) -> Part:
    begin, end, count = *_reach(problem, rows), len(q)
    k, v, n_kv = k[begin:end], v[begin:end], end - begin
    s = problem.scale * (_stacked(problem, q) @ k.permute(1, 2, 0))
    s = s.view(problem.heads_q, count, n_kv)
    if problem.score.softcap:
        s = problem.score.softcap * torch.tanh(s / problem.score.softcap)
    if operands.alibi is not None:
        s = s - _distances(operands, rows, begin, end, s.dtype)
    seen = _seen(problem, operands, rows, begin, end)
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
    v = torch.where(seen.any(0)[:, None, None], v, 0.0)
    out = weights.view(problem.heads_kv, problem.group * count, n_kv) @ v.transpose(0, 1)
    out = out.view(problem.heads_q, count, problem.head_dim_v) / torch.where(total == 0.0, 1.0, total)[..., None]
    return out.transpose(0, 1).to(operands.q.dtype), lse


def merged(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over all keys, from those of parts: outs [parts, ..., n, heads, dim], lses [parts, ..., heads, n]."""
    wide = lses.dtype
    top = lses.amax(0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(0)
    shares = (weights / torch.where(total == 0.0, 1.0, total)).transpose(-1, -2)[..., None]
    out = torch.where(shares == 0.0, 0.0, shares * outs.to(wide)).sum(0)  # what an empty part holds may be anything
    return out.to(outs.dtype), torch.where(total == 0.0, -torch.inf, top + torch.log(total))
