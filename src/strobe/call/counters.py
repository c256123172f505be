"""Zeroed counters that launches leave as they found them, so that nobody has to zero them again.

A launch that is captured gets counters that nobody else gets, from a reserve that an earlier call has zeroed: a graph may be
replayed beside anything, and a replay costs no memset. Without an earlier call, or where the reserve is used up, the graph
zeroes its own. Launches that a graph runs one after the other may share them (`of_capture`): a graph of many calls takes little
of the reserve.
"""

from __future__ import annotations

import threading

import torch

RESERVE = 1 << 20
"""Counters of a device that are kept ready for what is captured: 4 MB."""

_reserves: dict[int, list] = {}
"""Device -> [its reserve, how many of these counters are taken]."""
_lock = threading.Lock()


def zeros(device: torch.device, number: int) -> torch.Tensor:
    """So many counters, int32 zeros, for the launches of one stream."""
    if device.type != "cuda":
        return torch.zeros(number, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        taken = reserved(device, number)
        return torch.zeros(number, dtype=torch.int32, device=device) if taken is None else taken
    make_reserve(device)
    return torch.zeros(number, dtype=torch.int32, device=device)


def make_reserve(device: torch.device) -> None:
    """Make the reserve of a GPU, if it has none. Not during a capture."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _reserves:
        _reserves[index] = [torch.zeros(RESERVE, dtype=torch.int32, device=device), 0]
        torch.cuda.current_stream(device).synchronize()  # once: what is captured may run on any stream


def reserved(device: torch.device, number: int) -> torch.Tensor | None:
    """So many counters of the reserve, or None where there are not as many."""
    index = torch.cuda.current_device() if device.index is None else device.index
    reserve = _reserves.get(index)
    with _lock:  # two threads may capture
        if reserve is None or reserve[1] + number > RESERVE:
            return None
        begin, reserve[1] = reserve[1], reserve[1] + -(-number // 4) * 4  # addresses stay multiples of 16
    return reserve[0][begin : begin + number]


_of_captures: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
"""Device and stream -> the latest capture there, and the counters that its launches share."""


def of_capture(device: torch.device, number: int) -> torch.Tensor:
    """At least so many counters for the launches that are being captured on the current stream, which share them, as the graph
    runs them one after the other. A stream of another capture has others."""
    from strobe.call.launcher import capture_of

    stream = torch.cuda.current_stream(device)
    capture, key = capture_of(stream.cuda_stream), (stream.device_index, stream.cuda_stream)
    if capture is None:
        return zeros(device, number)
    latest, shared = _of_captures.get(key, (None, None))
    if latest != capture or shared is None or shared.numel() < number:
        shared = reserved(device, number)
        if shared is None:  # memory of the graph's own, which another launch may be given when this one's call is over
            return torch.zeros(number, dtype=torch.int32, device=device)
        _of_captures[key] = capture, shared
    return shared
