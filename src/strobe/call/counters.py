"""Zeroed counters that launches leave as they found them, so that nobody has to zero them again.

A launch that is captured gets counters that nobody else gets, from a reserve that an earlier call has zeroed: a graph may be
replayed beside anything, and a replay costs no memset. Without an earlier call, or where the reserve is used up, the graph
zeroes its own.
"""

from __future__ import annotations

import torch

RESERVE = 1 << 20
"""Counters of a device that are kept ready for what is captured: 4 MB."""

_reserves: dict[int, list] = {}
"""Device -> [its reserve, how many of these counters are taken]."""


def zeros(device: torch.device, number: int) -> torch.Tensor:
    """So many counters, int32 zeros, for the launches of one stream."""
    if device.type != "cuda":
        return torch.zeros(number, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    reserve = _reserves.get(index)
    if torch.cuda.is_current_stream_capturing():
        if reserve is None or reserve[1] + number > RESERVE:
            return torch.zeros(number, dtype=torch.int32, device=device)
        begin, reserve[1] = reserve[1], reserve[1] + -(-number // 4) * 4  # addresses stay multiples of 16
        return reserve[0][begin : begin + number]
    if reserve is None:
        _reserves[index] = [torch.zeros(RESERVE, dtype=torch.int32, device=device), 0]
        torch.cuda.current_stream(device).synchronize()  # once: what is captured may run on any stream
    return torch.zeros(number, dtype=torch.int32, device=device)
