"""The optimistic softmax in plain torch: what a kernel with a fixed reference computes, and which blocks it cannot trust.

Any reference m gives the same quotient, sum 2^(x - m) v over sum 2^(x - m). The online softmax (see tiled.py) moves m with
the maximum; here m is fixed by the first block of keys that a tile visits, and a row whose numbers leave their range is
noted, to be computed again with a running maximum. docs/optimistic_softmax.md proves that every other row is right.

Nothing runs this for its result: it is the oracle for the notes of the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from strobe.kernels.common.optimistic import BOUNDS, Bounds
from strobe.masks import kv_full
from strobe.problem import AttentionProblem, Operands, lse_shape
from strobe.reference.sequences import Part, parts
from strobe.scores import LN2, LOG2E

NOTED_ROWS = 64
"""Rows that one note stands for."""


class Optimistic(NamedTuple):
    """Results of the optimistic forward: out and lse, right where nothing is noted.

    noted: bool [batch * heads_q * ceil(seqlen_q / 64)]; block r of 64 rows of head h of batch entry (or sequence) b is at
    (b * heads_q + h) * ceil(seqlen_q / 64) + r.
    """

    out: torch.Tensor
    lse: torch.Tensor
    noted: torch.Tensor


def forward(
    problem: AttentionProblem, operands: Operands, tile_q: int = 128, tile_kv: int = 128, bounds: Bounds | None = None
) -> Optimistic:
    """Compute the forward in tiles of tile_q rows (a multiple of 64) and blocks of tile_kv keys, in float16 or bfloat16.

    bounds: None means those of the dtype. What is noted depends on the tiles, as these say which block is the first.
    """
    tiles = _Tiles(tile_q, tile_kv, bounds or BOUNDS[str(problem.dtype).removeprefix("torch.")])
    q, k, v = operands[:3]
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(lse_shape(problem), -torch.inf, dtype=torch.float32)
    blocks = -(-problem.lengths.seqlen_q // NOTED_ROWS)
    noted = torch.zeros(problem.lengths.batch, problem.heads_q, blocks, dtype=torch.bool, device=q.device)
    for part in parts(problem, operands):
        entries = q[part.rows].shape[0]
        here = noted[part.batch : part.batch + entries]
        _forward(part, tiles, q[part.rows], k[part.keys], v[part.keys], out[part.rows], lse[part.lse], here)
    return Optimistic(out, lse, noted.flatten())


class _Tiles(NamedTuple):
    q: int
    kv: int
    bounds: Bounds


def key_blocks(problem: AttentionProblem, rows: range, n_q: int, n_kv: int, tile_kv: int) -> list[range]:
    """The blocks of keys that some of the rows see, in the order of the visit; the first fixes the reference.

    The leftmost block that every row sees whole leads: each row has tile_kv keys to be judged by, and under a causal mask the
    attention sinks are among them. If there is no such block, the one leads in which the keys that all rows see end: unless a
    window is narrower than the tile, every row sees some of it. Under ALiBi, which favours near keys, the rightmost leads. The
    others follow from left to right. (The kernel leads with a block of the tile's document, if it has one; here documents
    change nothing.)
    """
    begin, end = problem.mask.kv_range(rows[0], rows[-1], n_q, n_kv)
    first, last = begin // tile_kv, -(-end // tile_kv) - 1
    shift = n_kv - n_q
    full_begin, full_end = kv_full(rows[0] + shift, rows[-1] + shift, n_kv, *problem.mask.band)
    lead = max(first, -(-full_begin // tile_kv))
    if problem.score.alibi is not None:
        lead = last
    elif (lead + 1) * tile_kv > full_end:
        lead = min(max(first, full_end // tile_kv), last)
    visit = [lead, *(block for block in range(first, last + 1) if block != lead)] if end > begin else []
    return [range(block * tile_kv, min((block + 1) * tile_kv, n_kv)) for block in visit]


def _forward(part: Part, tiles: _Tiles, q, k, v, out, lse, noted) -> None:
    """Write the results of one dense part into out [B, n_q, heads_q, Dv], lse [B, heads_q, n_q], noted [B, heads_q, blocks]."""
    k, v = (x.repeat_interleave(part.problem.group, dim=2) for x in (k, v))
    for first in range(0, q.shape[1], tiles.q):
        rows = range(first, min(first + tiles.q, q.shape[1]))
        here = slice(rows.start, rows.stop)
        o, lse[:, :, here], broken = _rows(part, tiles, rows, q, k, v)
        out[:, here] = o.transpose(1, 2).to(out.dtype)
        for block, of_block in enumerate(broken.split(NOTED_ROWS, dim=-1), first // NOTED_ROWS):
            noted[:, :, block] = of_block.any(-1)


def _rows(part: Part, tiles: _Tiles, rows: range, q, k, v):
    """O [B, heads, rows, Dv], LSE [B, heads, rows] of one tile, and which of its rows cannot be trusted."""
    bounds, problem = tiles.bounds, part.problem
    acc = torch.zeros(q.shape[0], q.shape[2], len(rows), v.shape[3], device=q.device)
    row_sum, keys_seen, m = (torch.zeros_like(acc[..., :1]) for _ in range(3))
    for number, keys in enumerate(key_blocks(problem, rows, q.shape[1], k.shape[1], tiles.kv)):
        x, seen = _exponents(part, q, k, rows, keys)
        if number == 0:
            first_max = x.amax(-1, keepdim=True).float()
            m = torch.where(first_max == -torch.inf, 0.0, first_max)
        p = torch.exp2((x - m).float())
        row_sum += p.sum(-1, keepdim=True)
        acc += p.to(q.dtype).float() @ v[:, keys.start : keys.stop].transpose(1, 2).float()
        keys_seen += seen.expand_as(p).sum(-1, keepdim=True)

    trusted = row_sum >= torch.where(m == 0.0, keys_seen * bounds.least_by_key, bounds.least)
    if part.score.sinks is not None:
        sink = LOG2E * part.score.sinks.float()[:, None, None]
        m = torch.where(row_sum == 0.0, sink, m)
        row_sum += torch.exp2(sink - m)
    nothing = row_sum == 0.0
    o = acc * torch.where(nothing, 0.0, 1.0 / row_sum)
    lse = torch.where(nothing, -torch.inf, (m + torch.log2(row_sum)) * LN2)
    trusted &= torch.isfinite(o).all(-1, keepdim=True) & (row_sum < bounds.most)
    return o, lse.squeeze(-1), ~trusted.squeeze(-1)


def _exponents(part: Part, q, k, rows: range, keys: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in units of log2, [B, heads, rows, keys], -inf where not seen; and which are seen.

    They are float64, so that x - m is rounded once: a kernel fuses the product with the scale and the difference.
    """
    problem, n_q, n_kv = part.problem, q.shape[1], k.shape[1]
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
    products = q[:, i[:, 0]].transpose(1, 2).float() @ k[:, j[0]].permute(0, 2, 3, 1).float()
    x = part.score.apply(problem.scale * products.double(), i, j, n_q, n_kv, part.batch) * LOG2E
    batches, heads = range(part.batch, part.batch + q.shape[0]), range(problem.heads_q)
    seen = part.mask.tile(i, j, n_q, n_kv, batches, heads)
    seen = seen[:, None] if seen.dim() == 3 else seen
    return torch.where(seen, x, -torch.inf), seen
