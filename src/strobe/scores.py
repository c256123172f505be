"""Scores: what happens to q.k between the product and the softmax.

s = scale * q.k
s = softcap * tanh(s / softcap)      where softcap > 0    (Gemma 2; flash-attn's order: before the slopes)
s = s - slope[h] * |p - j|           where ALiBi slopes are given; p is the row's position among the keys
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Score:
    """softcap: a positive bound, or 0 for none. alibi: float32 slopes, [heads_q] or [batch, heads_q], or None."""

    softcap: float = 0.0
    alibi: torch.Tensor | None = None

    def __post_init__(self):
        if not self.softcap >= 0.0:
            raise ValueError(f"score: softcap must be 0 (none) or positive, got {self.softcap}")

    def __str__(self) -> str:
        parts = [f"softcap({self.softcap:g})"] if self.softcap else []
        parts += ["alibi"] if self.alibi is not None else []
        return " + ".join(parts) or "plain"

    def apply(self, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int) -> torch.Tensor:
        """Scaled products s [batch, heads_q, rows, keys] -> scores, for rows i [rows, 1] and keys j [1, keys]."""
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.alibi is not None:
            slopes = self.alibi.to(s.dtype)
            slopes = (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None]
            s = s - slopes * (i + (n_kv - n_q) - j).abs()
        return s

    def gradient(self, ds: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """d loss / d (scaled product) from ds = d loss / d score, given the scaled product s."""
        if self.softcap:
            ds = ds * (1.0 - torch.tanh(s / self.softcap) ** 2)
        return ds
