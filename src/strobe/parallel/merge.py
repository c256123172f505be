"""Merges what rows get from some keys into what they got from others, in place, by the law of `strobe.kernels.combine`."""

from __future__ import annotations

import torch


def merge_into(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a part into out and lse: [batch, n, heads, D] and [batch, heads, n], or packed [n, heads, D] and [heads, n], of any
    strides; in float32 (float64 on a CPU). out of a row whose LSE is -inf may hold anything but NaN."""
    if not out.numel():
        return
    if out.is_cuda:
        from strobe.kernels.combine import merge_call

        with torch.cuda.device_of(out):
            merge_call(out, lse, part, part_lse).launch()
        return
    total = torch.logaddexp(lse, part_lse)
    shift = torch.where(total == -torch.inf, 0.0, total)
    mine, others = (torch.exp(x - shift).transpose(-1, -2)[..., None] for x in (lse, part_lse))
    part = torch.where(others == 0.0, 0.0, others * part)
    out.copy_(torch.where(mine == 0.0, 0.0, mine * out) + part)
    lse.copy_(total)
