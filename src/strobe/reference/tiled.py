"""Flash attention in plain torch: the algorithm, readable, and the backend that runs on any device.

Forward. The keys come in tiles. A row keeps the maximum m of the scores seen so far, the sum l of exp(s - m) and the
unnormalised output O. A new tile with maximum m' moves the reference from m to m_new = max(m, m'):

    rescale = exp(m - m_new)      l <- l * rescale + rowsum(exp(s - m_new))      O <- O * rescale + exp(s - m_new) V

and one division O / l at the end gives softmax(s) V exactly, whatever the tiles. LSE = m + log(l) is all that the
backward needs to know of the softmax: P = exp(s - LSE), recomputed tile by tile, so memory is O(length).

Backward. With delta = rowsum(dO * O) - dLSE:

    dV += P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ += scale * dS K      dK += scale * dS^T Q

(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention".)

Query heads that share a key head (GQA) are stacked along the rows of one product, so nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from strobe.device import Arch
from strobe.masks import Mask, TileClass
from strobe.problem import AttentionProblem, Operands, lse_shape
from strobe.reference.sequences import score_of, sequences


@dataclass(frozen=True)
class Config:
    """Rows and keys of a tile. 256 x 256 was the fastest over all lengths of docs/cpu.md: less is many small products,
    more does not stay in the cache and, with a causal mask, computes more that is thrown away."""

    tile_q: int = 256
    tile_kv: int = 256


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if problem.varlen and arch.name != "CPU":
        return "reads cu_seqlens on the host, so packed sequences run on a CPU only"
    return None


def config(problem: AttentionProblem, arch: Arch) -> Config:
    return Config()


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = operands[:3]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(lse_shape(problem), -torch.inf, dtype=_wide(q.dtype))
    if not problem.varlen:
        _forward(problem, q, k, v, out, lse)
        return out, lse
    for index, rows, keys in sequences(problem, operands):
        one = replace(problem, score=score_of(problem.score, index))
        _forward(one, q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows])
    return out, lse


def backward(problem: AttentionProblem, operands: Operands, out, lse, dout, dlse):
    q, k, v = operands[:3]
    dq, dk, dv = (torch.zeros(x.shape, dtype=_wide(x.dtype), device=x.device) for x in (q, k, v))
    delta = _delta(problem, out, dout, dlse)
    if not problem.varlen:
        _backward(problem, _Saved(q, k, v, lse, dout, delta), dq, dk, dv)
    else:
        for index, rows, keys in sequences(problem, operands):
            one = replace(problem, score=score_of(problem.score, index))
            saved = _Saved(
                q[None, rows], k[None, keys], v[None, keys], lse[None, :, rows], dout[None, rows], delta[None, :, rows]
            )
            _backward(one, saved, dq[None, rows], dk[None, keys], dv[None, keys])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type that products and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Tile(NamedTuple):
    """One tile of scores: its rows and keys, and which of its pairs are visible (None: all)."""

    rows: slice
    keys: slice
    seen: torch.Tensor | None
    i: torch.Tensor
    j: torch.Tensor


def _kv_tiles(mask: Mask, rows: slice, n_q: int, n_kv: int, tile_kv: int, device) -> Iterator[_Tile]:
    """The tiles of keys that some of these rows may see; empty ones are not visited."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    begin, end = mask.kv_range(rows.start, rows.stop - 1, n_q, n_kv)
    for first in range(begin - begin % tile_kv, end, tile_kv):
        keys = slice(first, min(first + tile_kv, n_kv))
        j = torch.arange(keys.start, keys.stop, device=device)[None, :]
        seen = None
        if mask.tile_class(rows.start, rows.stop - 1, keys.start, keys.stop - 1, n_q, n_kv) is not TileClass.FULL:
            seen = mask.tile(i, j, n_q, n_kv)
            # [rows, keys] or [batch, rows, keys] -> broadcasts against [batch, heads_kv, group, rows, keys]
            seen = seen[:, None, None] if seen.dim() == 3 else seen
        yield _Tile(rows, keys, seen, i, j)


def _q_tiles(n_q: int, tile_q: int) -> Iterator[slice]:
    for first in range(0, n_q, tile_q):
        yield slice(first, min(first + tile_q, n_q))


def _heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """[B, n, heads, D] -> [B, heads_kv, group, n, D] in the wide type."""
    return x.to(_wide(x.dtype)).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)


def _by_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """[B, heads, n] -> [B, heads_kv, group, n, 1]."""
    return x.unflatten(1, (-1, group))[..., None]


def _product(a: torch.Tensor, b: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """a @ b where a is 0 at pairs not seen, and stays so: 0 * NaN must not reach a row that does not see the NaN.

    a [B, Hkv, group, m, n], b [B, Hkv, 1 or group, n, D]. The product is taken again only where b is not finite.
    """
    full = a @ b
    if seen is None or bool(torch.isfinite(b).all()):
        return full
    broken = ~torch.isfinite(b)
    touched = seen.to(a.dtype).expand(a.shape) @ broken.to(a.dtype) > 0
    return torch.where(touched, full, a @ torch.where(broken, 0.0, b))


def _forward(problem: AttentionProblem, q, k, v, out, lse) -> None:
    """One dense batch, written into out [B, n_q, heads_q, Dv] and lse [B, heads_q, n_q]."""
    cfg, group = Config(), problem.group
    n_q, n_kv = q.shape[1], k.shape[1]
    for rows in _q_tiles(n_q, cfg.tile_q):
        q_tile = _heads(q[:, rows], group) * problem.scale
        row_max = q_tile.new_full((*q_tile.shape[:-1], 1), -torch.inf)
        row_sum = torch.zeros_like(row_max)
        acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        for tile in _kv_tiles(problem.mask, rows, n_q, n_kv, cfg.tile_kv, q.device):
            s = _scores(problem, q_tile, k, tile, n_q, n_kv)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is no number: shift by 0 instead.
            shift = torch.where(new_max == -torch.inf, 0.0, new_max)
            p, rescale = s.sub_(shift).exp_(), torch.exp(row_max - shift)
            row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
            acc = acc * rescale + _product(p, _heads(v[:, tile.keys], 1), tile.seen)
            row_max = new_max
        empty = row_max == -torch.inf
        result = torch.where(empty, 0.0, acc / torch.where(empty, 1.0, row_sum))
        out[:, rows] = result.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)
        log_sum = torch.where(empty, -torch.inf, row_max + torch.log(torch.where(empty, 1.0, row_sum)))
        lse[:, :, rows] = log_sum.squeeze(-1).flatten(1, 2)


def _scores(problem: AttentionProblem, q_tile, k, tile: _Tile, n_q: int, n_kv: int) -> torch.Tensor:
    """Scores [B, heads_kv, group, rows, keys] of a tile from scaled queries; -inf where not seen."""
    s = q_tile @ _heads(k[:, tile.keys], 1).transpose(-1, -2)
    s = _apply_score(problem, s, tile, n_q, n_kv)
    return s if tile.seen is None else torch.where(tile.seen, s, -torch.inf)


def _apply_score(problem: AttentionProblem, s, tile: _Tile, n_q: int, n_kv: int) -> torch.Tensor:
    """The score works on [B, heads_q, rows, keys]."""
    by_head = problem.score.apply(s.flatten(1, 2), tile.i, tile.j, n_q, n_kv)
    return by_head.unflatten(1, s.shape[1:3])


class _Saved(NamedTuple):
    """What the backward of one dense batch reads; lse and delta are [B, heads_q, n_q]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    delta: torch.Tensor


def _delta(problem: AttentionProblem, out, dout, dlse) -> torch.Tensor:
    """rowsum(dO * O) - dLSE, laid out as the LSE."""
    wide = _wide(out.dtype)
    delta = (out.to(wide) * dout.to(wide)).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse.to(wide)


def _backward(problem: AttentionProblem, saved: _Saved, dq, dk, dv) -> None:
    """One dense batch, added into dq, dk, dv (in the wide type)."""
    cfg, group = Config(), problem.group
    n_q, n_kv = saved.q.shape[1], saved.k.shape[1]
    for rows in _q_tiles(n_q, cfg.tile_q):
        q_tile, dout = _heads(saved.q[:, rows], group), _heads(saved.dout[:, rows], group)
        lse, delta = _by_rows(saved.lse[:, :, rows], group), _by_rows(saved.delta[:, :, rows], group)
        shift = torch.where(lse == -torch.inf, 0.0, lse)
        for tile in _kv_tiles(problem.mask, rows, n_q, n_kv, cfg.tile_kv, dq.device):
            k_tile, v_tile = _heads(saved.k[:, tile.keys], 1), _heads(saved.v[:, tile.keys], 1)
            raw = (q_tile * problem.scale) @ k_tile.transpose(-1, -2)
            p = torch.exp(_apply_score(problem, raw, tile, n_q, n_kv) - shift)
            dp = dout @ v_tile.transpose(-1, -2)
            ds = problem.score.gradient(p * (dp - delta), raw) * problem.scale
            seen_t = None
            if tile.seen is not None:
                p, ds = (torch.where(tile.seen, x, 0.0) for x in (p, ds))
                seen_t = tile.seen.transpose(-1, -2)
            dq[:, rows] += _to_rows(_product(ds, k_tile, tile.seen))
            dk[:, tile.keys] += _to_keys(_product(ds.transpose(-1, -2), q_tile, seen_t))
            dv[:, tile.keys] += _to_keys(_product(p.transpose(-1, -2), dout, seen_t))


def _to_rows(x: torch.Tensor) -> torch.Tensor:
    """[B, heads_kv, group, n, D] -> [B, n, heads_q, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _to_keys(x: torch.Tensor) -> torch.Tensor:
    """[B, heads_kv, group, n, D] -> [B, n, heads_kv, D]: query heads of a group add up."""
    return x.sum(2).transpose(1, 2)
