"""Results of rows that see nothing, or that no sequence has, which kernels leave alone. Plain torch, on any device."""

from __future__ import annotations

import torch


def fill_blind(
    out: torch.Tensor, lse: torch.Tensor, longest: int, sinks: torch.Tensor | None, cu_q: torch.Tensor | None,
    used_q: torch.Tensor | None,
) -> None:  # fmt: skip
    """Write what rows have that see nothing: 0, and what `fill_blind_lse` writes."""
    out.zero_()
    fill_blind_lse(lse, longest, sinks, cu_q, used_q)


def fill_blind_lse(
    lse: torch.Tensor, longest: int, sinks: torch.Tensor | None, cu_q: torch.Tensor | None, used_q: torch.Tensor | None
) -> None:
    """Write the LSE of rows that see nothing: -inf or, in a sequence, what its sink alone gives. longest: the most rows of a
    sequence."""
    if sinks is None:
        lse.fill_(-torch.inf)
        return
    lse.copy_(sinks[:, None].expand(lse.shape))
    if cu_q is not None or used_q is not None:
        lse.masked_fill_(~_used_rows(lse.shape[-1], longest, cu_q, used_q), -torch.inf)


def _used_rows(rows: int, longest: int, cu_q: torch.Tensor | None, used_q: torch.Tensor | None) -> torch.Tensor:
    """Which rows a sequence has and uses, as a bool to be broadcast against an LSE. Lengths are clamped as
    `tile_scheduler.sequence` does."""
    if cu_q is None:
        assert used_q is not None
        return torch.arange(rows, device=used_q.device) < used_q[:, None, None]
    bounds = cu_q.long().clamp(0, rows)
    starts, lengths = bounds[:-1], bounds.diff().clamp(0, longest)
    if used_q is not None:
        lengths = lengths.minimum(used_q.clamp(min=0))
    changes = torch.zeros(rows + 1, dtype=torch.int64, device=cu_q.device)  # of the number of sequences that have a row
    one = torch.ones_like(starts)
    changes.scatter_add_(0, starts, one).scatter_add_(0, starts + lengths, -one)
    return changes[:-1].cumsum(0) > 0
