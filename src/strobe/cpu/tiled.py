"""Flash attention in plain torch: the algorithm, readable, and the backend that runs on any device.

Forward. The keys come in tiles. A row keeps the maximum m of the scores seen so far, the sum l of exp(s - m) and the
unnormalised output O. A new tile with maximum m' moves the reference from m to m_new = max(m, m'):

    rescale = exp(m - m_new)      l <- l * rescale + rowsum(exp(s - m_new))      O <- O * rescale + exp(s - m_new) V

and one division O / l at the end gives softmax(s) V exactly, whatever the tiles. LSE = m + log(l) is all that the
backward needs to know of the softmax: P = exp(s - LSE), recomputed tile by tile, so memory is O(length). A sink is a score
without a value: a row begins with m = sink and l = 1.

Backward. With delta = rowsum(dO * O) - dLSE:

    dV += P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ += scale * dS K      dK += scale * dS^T Q

Dropout. O = (P * D) V, where D is 0 or 1 / (1 - p), and the sums l and the LSE are those of P: dV += (P * D)^T dO, and dP = D *
(dO V^T); delta is rowsum(dO * O) still.

Forward mode. With tangents of q, k, v: dS = scale * (dq K^T + q dK^T), through the score's derivative, and

    dLSE = rowsum(P * dS)      dO = P dV + (P * dS) V - dLSE * O

The sums need no maximum, as the LSE is known. A sink adds P_sink * dsink to dLSE; dropout multiplies P by D in both products.

(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention".)

Query heads that share a key head (GQA) are stacked along the rows of one product, so nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from strobe.device import Arch
from strobe.dropout import kept
from strobe.masks import BlockFacts, Blocks, TileClass
from strobe.problem import AttentionProblem, Gradients, Operands, Tangents, Upstream, lse_shape, without_gradient
from strobe.reference.precision import without_autocast
from strobe.reference.sequences import Part, parts
from strobe.scores import sinks_gradient


@dataclass(frozen=True)
class Config:
    """The rows and keys of a tile. 256 x 256 was the fastest over all lengths of docs/cpu.md: smaller tiles make many small
    products; larger ones do not stay in the cache and, with a causal mask, compute more that is thrown away."""

    tile_q: int = 256
    tile_kv: int = 256


def unproven(problem: AttentionProblem, arch: Arch) -> str | None:
    """See `strobe.call.dispatch`."""
    return f"plain PyTorch, never yet run on {arch}" if arch.is_untried else None


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if (problem.varlen or problem.seqused) and arch.name != "CPU":
        return "reads cu_seqlens and seqused on the host, so sequences of different lengths run on a CPU only"
    if problem.placed and arch.name != "CPU":
        return "reads on the host where rows and keys stand, so shards run on a CPU only"
    if problem.placed and problem.score.bias is not None:
        return "takes no bias of a shard's rows and keys"
    if problem.dtype.itemsize == 1:
        return f"takes no inputs of 8 bits, such as {str(problem.dtype).removeprefix('torch.')}"
    return without_gradient(problem)


def config(problem: AttentionProblem, arch: Arch) -> Config:
    return _tiles(problem)


def _tiles(problem: AttentionProblem) -> Config:
    """The tiles of a problem: of a mask with blocks about one block, so that hidden blocks are left out."""
    blocks = problem.mask.blocks
    if not isinstance(blocks, BlockFacts):
        return Config()
    return Config(*(min(256, n * max(1, 64 // n)) for n in blocks))


@without_autocast
def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = operands[:3]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=problem.out_dtype)
    lse = q.new_full(lse_shape(problem), -torch.inf, dtype=_wide(q.dtype))
    for part in parts(problem, operands):
        _forward(part, q[part.rows], k[part.keys], v[part.keys], operands.seed, out[part.rows], lse[part.lse])
    return out, lse


@without_autocast
def backward(problem: AttentionProblem, operands: Operands, upstream: Upstream) -> Gradients:
    q, k, v, bias, sinks = operands.q, operands.k, operands.v, operands.bias, operands.sinks
    out, lse, dout, dlse = upstream
    dq, dk, dv = (torch.zeros(x.shape, dtype=_wide(x.dtype), device=x.device) for x in (q, k, v))
    delta, dbias, dsinks = _delta(problem, out, dout, dlse), None, None
    if bias is not None and "bias" in problem.learned:
        dbias = torch.zeros(bias.shape, dtype=_wide(q.dtype), device=q.device)
    for part in parts(problem, operands):
        tensors = q[part.rows], k[part.keys], v[part.keys], operands.seed
        saved = _Saved(*tensors, lse[part.lse], dout[part.rows], delta[part.lse])
        _backward(part, saved, dq[part.rows], dk[part.keys], dv[part.keys], None if dbias is None else _of_part(dbias, part))
    if bias is not None and dbias is not None:
        dbias = dbias.to(bias.dtype)
    if sinks is not None and "sinks" in problem.learned:
        dsinks = sinks_gradient(sinks, lse, delta)
    dq, dk, dv = (x.to(problem.grad_dtype) for x in (dq, dk, dv))
    return Gradients(dq, dk, dv, dbias, dsinks)


@without_autocast
def jvp(problem: AttentionProblem, operands: Operands, out, lse, tangents: Tangents) -> tuple[torch.Tensor, torch.Tensor]:
    """The tangents of out and lse, the forward's results, on any device."""
    q, k, v, sinks = operands.q, operands.k, operands.v, operands.sinks
    wide = _wide(q.dtype)
    dout = torch.zeros(out.shape, dtype=wide, device=out.device)
    dlse = torch.zeros(lse.shape, dtype=wide, device=out.device)
    for part in parts(problem, operands):
        places = part.rows, part.keys, part.keys
        dq, dk, dv = (None if x is None else x[place] for x, place in zip(tangents[:3], places, strict=True))
        of_part = Tangents(dq, dk, dv, None if tangents.bias is None else _of_part(tangents.bias, part))
        tensors = q[part.rows], k[part.keys], v[part.keys], operands.seed, lse[part.lse]
        _jvp(part, *tensors, of_part, dout[part.rows], dlse[part.lse])
    if sinks is not None and tangents.sinks is not None:
        weights = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.to(wide)[:, None] - lse))
        dlse += torch.where(weights == 0.0, 0.0, weights * tangents.sinks.to(wide)[:, None])
    dout -= dlse.transpose(-1, -2)[..., None] * out.to(wide)
    return dout.to(out.dtype), dlse.to(lse.dtype)


def _of_part(dbias: torch.Tensor, part: Part) -> torch.Tensor:
    """The slice of a bias that belongs to a part, which is one batch entry or all of a dense problem."""
    return dbias[part.batch : part.batch + 1] if part.rows and dbias.shape[0] > 1 else dbias


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products and sums are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Tile(NamedTuple):
    """One tile of scores: its rows and keys, which of its pairs are visible (None: all), and where they stand in the sequence,
    i and j, which broadcast to it."""

    rows: slice
    keys: slice
    seen: torch.Tensor | None
    i: torch.Tensor
    j: torch.Tensor


def _kv_tiles(part: Part, batch: int, rows: slice, n_q: int, n_kv: int, tile_kv: int, device) -> Iterator[_Tile]:
    """The tiles of keys that some of these rows may see; empty ones are not visited."""
    mask, first_head = part.mask, part.first_head
    batches, heads = range(part.batch, part.batch + batch), range(first_head, first_head + part.problem.heads_q)
    lengths = part.lengths(n_q, n_kv)
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    i = part.row(row)
    begin, end = part.kv_range(rows.start, rows.stop - 1, n_q, n_kv)
    for first in range(begin - begin % tile_kv, end, tile_kv):
        keys = slice(first, min(first + tile_kv, n_kv))
        key = torch.arange(keys.start, keys.stop, device=device)[None, :]
        j = part.key(key)
        seen = None
        if isinstance(mask.blocks, Blocks) and mask.blocks.hide(rows.start, rows.stop - 1, keys.start, keys.stop - 1):
            continue
        bounds = part.row(rows.start), part.row(rows.stop - 1), part.key(keys.start), part.key(keys.stop - 1)
        if mask.tile_class(*bounds, *lengths) is not TileClass.FULL:
            seen = mask.tile(i, j, *lengths, batches, heads, (row, key))
            # [rows, keys], [batch, rows, keys] or [batch, heads_q, rows, keys] -> broadcasts against
            # [batch, heads_kv, group, rows, keys]
            seen = seen[:, None, None] if seen.dim() == 3 else seen
            seen = seen.unflatten(1, (-1, part.problem.group)) if seen.dim() == 4 else seen
        yield _Tile(rows, keys, seen, i, j)


def _q_tiles(n_q: int, tile_q: int) -> Iterator[slice]:
    for first in range(0, n_q, tile_q):
        yield slice(first, min(first + tile_q, n_q))


def _heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [B, n, heads, D] as [B, heads_kv, group, n, D], in the wide dtype."""
    return x.to(_wide(x.dtype)).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)


def _by_rows(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [B, heads, n] as [B, heads_kv, group, n, 1]."""
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


def _forward(part: Part, q, k, v, seed, out, lse) -> None:
    """Compute the forward of one dense batch into out [B, n_q, heads_q, Dv] and lse [B, heads_q, n_q]."""
    cfg, problem, group = _tiles(part.problem), part.problem, part.problem.group
    n_q, n_kv = q.shape[1], k.shape[1]
    for rows in _q_tiles(n_q, cfg.tile_q):
        q_tile = _heads(q[:, rows], group) * problem.scale
        row_max = _sinks(part, q_tile)
        row_sum = torch.where(row_max == -torch.inf, 0.0, 1.0).to(row_max.dtype)
        acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        for tile in _kv_tiles(part, q.shape[0], rows, n_q, n_kv, cfg.tile_kv, q.device):
            s = _scores(part, q_tile, k, tile, n_q, n_kv)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is no number: shift by 0 instead.
            shift = torch.where(new_max == -torch.inf, 0.0, new_max)
            p, rescale = s.sub_(shift).exp_(), torch.exp(row_max - shift)
            row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
            p = p if seed is None else p * _dropout(part, seed, tile, q.shape[0])
            acc = acc * rescale + _product(p, _heads(v[:, tile.keys], 1), tile.seen)
            row_max = new_max
        empty = row_max == -torch.inf
        result = torch.where(empty, 0.0, acc / torch.where(empty, 1.0, row_sum))
        out[:, rows] = result.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)
        log_sum = torch.where(empty, -torch.inf, row_max + torch.log(torch.where(empty, 1.0, row_sum)))
        lse[:, :, rows] = log_sum.squeeze(-1).flatten(1, 2)


def _dropout(part: Part, seed: torch.Tensor, tile: _Tile, batch: int) -> torch.Tensor:
    """The factors, 0 or 1 / (1 - p), by which dropout multiplies the weights of a tile, [B, heads_kv, group, rows, keys]."""
    problem = part.problem
    entry = torch.arange(part.batch, part.batch + batch, device=seed.device)[:, None, None, None]
    head = torch.arange(part.first_head, part.first_head + problem.heads_q, device=seed.device)[:, None, None]
    keep = kept(seed, problem.dropout, entry, head, tile.i, tile.j)
    return keep.unflatten(1, (-1, problem.group)).to(_wide(problem.dtype)) / (1.0 - problem.dropout)


def _sinks(part: Part, q_tile: torch.Tensor) -> torch.Tensor:
    """The score that each row begins with, [B, heads_kv, group, rows, 1]: its head's sink, or -inf."""
    start = q_tile.new_full((*q_tile.shape[:-1], 1), -torch.inf)
    if part.score.sinks is not None:
        start[:] = part.score.sinks.to(start.dtype).unflatten(0, (-1, part.problem.group))[..., None, None]
    return start


def _scores(part: Part, q_tile, k, tile: _Tile, n_q: int, n_kv: int) -> torch.Tensor:
    """Scores [B, heads_kv, group, rows, keys] of a tile from scaled queries; -inf where not seen."""
    s = q_tile @ _heads(k[:, tile.keys], 1).transpose(-1, -2)
    s = _apply_score(part, s, tile, n_q, n_kv)
    return s if tile.seen is None else torch.where(tile.seen, s, -torch.inf)


def _apply_score(part: Part, s, tile: _Tile, n_q: int, n_kv: int) -> torch.Tensor:
    """The scores s of a tile through `Score.apply`, which takes [B, heads_q, rows, keys]; shaped as s."""
    by_head = part.score.apply(s.flatten(1, 2), tile.i, tile.j, *part.lengths(n_q, n_kv), part.batch, part.first_head)
    return by_head.unflatten(1, s.shape[1:3])


def _apply_gradient(part: Part, ds, raw, tile: _Tile, n_q: int, n_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a tile's products and of its bias, by `Score.gradient`, which takes [B, heads_q, rows, keys]; shaped as
    ds."""
    lengths = part.lengths(n_q, n_kv)
    by_head = part.score.gradient(
        ds.flatten(1, 2), raw.flatten(1, 2), tile.i, tile.j, *lengths, part.batch, part.first_head
    )  # fmt: skip
    of_product, of_bias = (x.unflatten(1, ds.shape[1:3]) for x in by_head)
    return of_product, of_bias


def _apply_tangent(part: Part, ds, raw, dbias, tile: _Tile, n_q: int, n_kv: int) -> torch.Tensor:
    """The tangent of a tile's scores by `Score.tangent`, which takes [B, heads_q, rows, keys]; shaped as ds."""
    by_head = ds.flatten(1, 2), raw.flatten(1, 2)
    return part.score.tangent(*by_head, tile.i, tile.j, n_q, n_kv, part.batch, dbias).unflatten(1, ds.shape[1:3])


def _add_to_bias(dbias: torch.Tensor, ds: torch.Tensor, tile: _Tile) -> None:
    """Add ds [B, heads_q, rows, keys] to the gradient of a bias, of which any dim may be 1."""
    repeated = [dim for dim in range(4) if dbias.shape[dim] == 1]
    rows, keys = (slice(None) if dim in repeated else part for dim, part in ((2, tile.rows), (3, tile.keys)))
    dbias[:, :, rows, keys] += ds.sum(repeated, keepdim=True) if repeated else ds


class _Saved(NamedTuple):
    """What the backward of one dense batch reads; lse and delta are [B, heads_q, n_q]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seed: torch.Tensor | None
    lse: torch.Tensor
    dout: torch.Tensor
    delta: torch.Tensor


def _delta(problem: AttentionProblem, out, dout, dlse) -> torch.Tensor:
    """delta = rowsum(dO * O) - dLSE, shaped as the LSE."""
    wide = _wide(out.dtype)
    delta = (out.to(wide) * dout.to(wide)).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse.to(wide)


def _backward(part: Part, saved: _Saved, dq, dk, dv, dbias) -> None:
    """Add the gradients of one dense batch to dq, dk, dv and, if it is not None, dbias, which are in the wide dtype."""
    cfg, problem, group = _tiles(part.problem), part.problem, part.problem.group
    n_q, n_kv = saved.q.shape[1], saved.k.shape[1]
    for rows in _q_tiles(n_q, cfg.tile_q):
        q_tile, dout = _heads(saved.q[:, rows], group), _heads(saved.dout[:, rows], group)
        lse, delta = _by_rows(saved.lse[:, :, rows], group), _by_rows(saved.delta[:, :, rows], group)
        shift = torch.where(lse == -torch.inf, 0.0, lse)
        for tile in _kv_tiles(part, dq.shape[0], rows, n_q, n_kv, cfg.tile_kv, dq.device):
            k_tile, v_tile = _heads(saved.k[:, tile.keys], 1), _heads(saved.v[:, tile.keys], 1)
            raw = (q_tile * problem.scale) @ k_tile.transpose(-1, -2)
            p = torch.exp(_apply_score(part, raw, tile, n_q, n_kv) - shift)
            dp, kept_p = dout @ v_tile.transpose(-1, -2), p
            if saved.seed is not None:
                factor = _dropout(part, saved.seed, tile, dq.shape[0])
                dp, kept_p = dp * factor, p * factor
            ds, of_bias = _apply_gradient(part, p * (dp - delta), raw, tile, n_q, n_kv)
            ds = ds * problem.scale
            seen_t = None
            if tile.seen is not None:
                kept_p, ds, of_bias = (torch.where(tile.seen, x, 0.0) for x in (kept_p, ds, of_bias))
                seen_t = tile.seen.transpose(-1, -2)
            if dbias is not None:
                _add_to_bias(dbias, of_bias.flatten(1, 2), tile)
            dq[:, rows] += _to_rows(_product(ds, k_tile, tile.seen))
            dk[:, tile.keys] += _to_keys(_product(ds.transpose(-1, -2), q_tile, seen_t))
            dv[:, tile.keys] += _to_keys(_product(kept_p.transpose(-1, -2), dout, seen_t))


def _jvp(part: Part, q, k, v, seed, lse, tangents: Tangents, dout, dlse) -> None:
    """Add, for one dense batch, P dV + (P * dS) V to dout and rowsum(P * dS) to dlse, which are in the wide dtype."""
    cfg, problem, group = _tiles(part.problem), part.problem, part.problem.group
    n_q, n_kv = q.shape[1], k.shape[1]
    for rows in _q_tiles(n_q, cfg.tile_q):
        q_tile = _heads(q[:, rows], group) * problem.scale
        dq_tile = None if tangents.q is None else _heads(tangents.q[:, rows], group) * problem.scale
        row_lse = _by_rows(lse[:, :, rows], group)
        shift = torch.where(row_lse == -torch.inf, 0.0, row_lse)
        for tile in _kv_tiles(part, q.shape[0], rows, n_q, n_kv, cfg.tile_kv, q.device):
            k_tile, v_tile = _heads(k[:, tile.keys], 1), _heads(v[:, tile.keys], 1)
            raw = q_tile @ k_tile.transpose(-1, -2)
            p = torch.exp(_apply_score(part, raw, tile, n_q, n_kv) - shift)
            p = p if tile.seen is None else torch.where(tile.seen, p, 0.0)
            ds = torch.zeros_like(raw) if dq_tile is None else dq_tile @ k_tile.transpose(-1, -2)
            if tangents.k is not None:
                ds += q_tile @ _heads(tangents.k[:, tile.keys], 1).transpose(-1, -2)
            dp = torch.where(p == 0.0, 0.0, p * _apply_tangent(part, ds, raw, tangents.bias, tile, n_q, n_kv))
            dlse[:, :, rows] += dp.sum(-1).flatten(1, 2)
            if seed is not None:
                factor = _dropout(part, seed, tile, q.shape[0])
                p, dp = p * factor, dp * factor
            dout[:, rows] += _to_rows(_product(dp, v_tile, tile.seen))
            if tangents.v is not None:
                dout[:, rows] += _to_rows(_product(p, _heads(tangents.v[:, tile.keys], 1), tile.seen))


def _to_rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, heads_kv, group, n, D] as [B, n, heads_q, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _to_keys(x: torch.Tensor) -> torch.Tensor:
    """x [B, heads_kv, group, n, D], summed over the query heads of each group, as [B, n, heads_kv, D]."""
    return x.sum(2).transpose(1, 2)
