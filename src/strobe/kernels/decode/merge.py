"""Merges attention over parts of the keys that a caller has: by `kernels.combine`, whose law it is."""

from __future__ import annotations

import torch

from strobe.kernels.combine import combine


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over all keys, from those of parts: outs [parts, ..., n, heads, dim], lses [parts, ..., heads, n]."""
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device)
    combine(outs.contiguous(), lses.float().contiguous(), out, lse)
    return out, lse
