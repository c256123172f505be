"""The optimistic softmax in plain torch: what a kernel with a fixed reference computes, and which blocks it cannot trust.

Any reference m gives the same quotient, sum 2^(x - m) v over sum 2^(x - m). The online softmax (see tiled.py) moves m with
the maximum; here m is fixed by the first block of keys that a tile visits, and a row whose numbers leave their range is
noted, to be computed again with a running maximum. docs/optimistic_softmax.md proves that every other row is right.

Nothing runs this for its result: it is the oracle for the notes of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from strobe.masks import kv_full
from strobe.problem import AttentionProblem, Operands, lse_shape
from strobe.reference.sequences import score_of, sequences

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
NOTED_ROWS = 64
"""Rows that one note stands for."""


@dataclass(frozen=True)
class Bounds:
    """What a row must keep for its numbers to be trusted, given what P is rounded to.

    headroom: m lies so far above the first block's maximum, in powers of two.
    most: a row sum is below.
    least: the row sum of a row that its first block judged is at least this much.
    least_by_key: that of any other is at least this much times the number of keys that the row sees.
    """

    headroom: float
    most: float
    least: float
    least_by_key: float


BOUNDS = {
    torch.bfloat16: Bounds(headroom=0.0, most=2.0**120, least=0.5, least_by_key=2.0**-100),
    torch.float16: Bounds(headroom=0.0, most=2.0**120, least=0.5, least_by_key=2.0**-14),
}


class Optimistic(NamedTuple):
    """out and lse as the forward's, right where nothing is noted. noted: bool [batch * heads_q * ceil(seqlen_q / 64)], where
    block r of 64 rows of head h of batch entry (or sequence) b is at (b * heads_q + h) * ceil(seqlen_q / 64) + r."""

    out: torch.Tensor
    lse: torch.Tensor
    noted: torch.Tensor


def forward(
    problem: AttentionProblem, operands: Operands, tile_q: int = 128, tile_kv: int = 128, bounds: Bounds | None = None
) -> Optimistic:
    """The forward in tiles of tile_q rows (a multiple of 64) and blocks of tile_kv keys, in float16 or bfloat16.

    bounds: None means those of the dtype. The decisions depend on the tiles, as these say what the first block is.
    """
    tiles = _Tiles(tile_q, tile_kv, bounds or BOUNDS[problem.dtype])
    q, k, v = operands[:3]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(lse_shape(problem), -torch.inf, dtype=torch.float32)
    blocks = -(-problem.lengths.seqlen_q // NOTED_ROWS)
    noted = torch.zeros(problem.lengths.batch, problem.heads_q, blocks, dtype=torch.bool, device=q.device)
    if not problem.varlen:
        _dense(problem, tiles, q, k, v, out, lse, noted)
    else:
        for b, rows, keys in sequences(problem, operands):
            one = replace(problem, score=score_of(problem.score, b))
            _dense(one, tiles, q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows], noted[b, None])
    return Optimistic(out, lse, noted.flatten())


class _Tiles(NamedTuple):
    q: int
    kv: int
    bounds: Bounds


def key_blocks(problem: AttentionProblem, rows: range, n_q: int, n_kv: int, tile_kv: int) -> list[range]:
    """The blocks of keys that some of the rows see, in the order of the visit; the first fixes the reference.

    The leftmost block that every row sees whole leads: each row has tile_kv keys to be judged by, and under a causal mask the
    attention sinks are among them. Where there is none, the block with the last key of the first row leads, of which every
    row sees some, unless a window is narrower than the tile. Under ALiBi, which favours near keys, the rightmost leads. The
    others follow from right to left.
    """
    begin, end = problem.mask.kv_range(rows[0], rows[-1], n_q, n_kv)
    first, last = begin // tile_kv, -(-end // tile_kv) - 1
    shift = n_kv - n_q
    full_begin, full_end = kv_full(rows[0] + shift, rows[-1] + shift, n_kv, *problem.mask.band)
    lead = max(first, -(-full_begin // tile_kv))
    if problem.score.alibi is not None:
        lead = last
    elif (lead + 1) * tile_kv > full_end:
        lead = min(max(first, (full_end - 1) // tile_kv), last)
    visit = [lead, *(block for block in range(last, first - 1, -1) if block != lead)] if end > begin else []
    return [range(block * tile_kv, min((block + 1) * tile_kv, n_kv)) for block in visit]


def _dense(problem: AttentionProblem, tiles: _Tiles, q, k, v, out, lse, noted) -> None:
    """One dense batch, written into out [B, n_q, heads_q, Dv], lse [B, heads_q, n_q] and noted [B, heads_q, blocks]."""
    n_q = q.shape[1]
    k, v = (x.repeat_interleave(problem.group, dim=2) for x in (k, v))
    for first in range(0, n_q, tiles.q):
        rows = range(first, min(first + tiles.q, n_q))
        o, row_lse, broken = _rows(problem, tiles, rows, q, k, v)
        here = slice(rows.start, rows.stop)
        out[:, here] = o.transpose(1, 2).to(out.dtype)
        lse[:, :, here] = row_lse
        for block in range(rows.start, rows.stop, NOTED_ROWS):
            noted[:, :, block // NOTED_ROWS] = broken[:, :, block - first : block - first + NOTED_ROWS].any(-1)


def _rows(problem: AttentionProblem, tiles: _Tiles, rows: range, q, k, v):
    """O [B, heads, rows, Dv], LSE [B, heads, rows] of one tile, and which of its rows cannot be trusted."""
    bounds, n_q, n_kv = tiles.bounds, q.shape[1], k.shape[1]
    acc = torch.zeros(*(q.shape[0], q.shape[2], len(rows), v.shape[3]), device=q.device)
    row_sum = torch.zeros_like(acc[..., :1])
    keys_seen = torch.zeros_like(row_sum)
    m = None
    for keys in key_blocks(problem, rows, n_q, n_kv, tiles.kv):
        x, seen = _exponents(problem, q, k, rows, keys)
        if m is None:
            first_max = x.amax(-1, keepdim=True).float()
            m = torch.where(first_max == -torch.inf, 0.0, first_max + bounds.headroom)
        p = torch.exp2((x - m).float())
        row_sum += p.sum(-1, keepdim=True)
        acc += p.to(q.dtype).float() @ v[:, keys.start : keys.stop].transpose(1, 2).float()
        keys_seen += seen.expand_as(p).sum(-1, keepdim=True)
    if m is None:
        m = torch.zeros_like(row_sum)

    nothing = row_sum == 0.0
    o = torch.where(nothing, acc * 0.0, acc / row_sum)
    lse = torch.where(nothing, -torch.inf, (m + torch.log2(row_sum)) * LN_2)
    least = torch.where(m == 0.0, keys_seen * bounds.least_by_key, bounds.least)
    trusted = torch.isfinite(o).all(-1, keepdim=True) & (row_sum < bounds.most) & (row_sum >= least)
    return o, lse.squeeze(-1), ~trusted.squeeze(-1)


def _exponents(problem: AttentionProblem, q, k, rows: range, keys: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in powers of two, [B, heads, rows, keys], -inf where not seen; and which are seen.

    In float64, so that x - m is rounded once: a kernel fuses the product with the scale and the difference.
    """
    n_q, n_kv = q.shape[1], k.shape[1]
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
    products = q[:, i[:, 0]].transpose(1, 2).float() @ k[:, j[0]].permute(0, 2, 3, 1).float()
    x = problem.score.apply(problem.scale * products.double(), i, j, n_q, n_kv) * LOG2_E
    seen = problem.mask.tile(i, j, n_q, n_kv)
    seen = seen[:, None] if seen.dim() == 3 else seen
    return torch.where(seen, x, -torch.inf), seen
