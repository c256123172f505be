"""Zeroed counters that launches leave as they found them, so that nobody has to zero them again.

What is captured gets counters that no other graph gets, from a reserve that an earlier call has zeroed: a graph may be
replayed beside anything, and a replay costs no memset. Without an earlier call, or where the reserve is used up, the graph
zeroes its own, which takes two microseconds a launch. Launches that a graph runs one after the other share theirs
(`of_capture`): a graph of many calls takes little of the reserve.
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
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return of_capture(device, number, "arrivals")
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


_of_captures: dict[tuple[int, int, str], tuple[int, torch.Tensor]] = {}
"""Device, stream and kind -> the latest capture there, and the counters of that kind that its launches share."""


def of_capture(device: torch.device, number: int, kind: str) -> torch.Tensor:
    """At least so many counters for the launches that are being captured on the current stream, which share those of a kind, as
    the graph runs them one after the other. A stream of another capture has others."""
    from strobe.call.launcher import capture_of

    stream = torch.cuda.current_stream(device)
    capture, key = capture_of(stream.cuda_stream), (stream.device_index, stream.cuda_stream, kind)
    latest, shared = _of_captures.get(key, (None, None))
    if capture is not None and latest == capture and shared is not None and shared.numel() >= number:
        return shared
    taken = reserved(device, number)
    if taken is None:  # memory of the graph's own, which another launch may be given when this one's call is over
        return torch.zeros(number, dtype=torch.int32, device=device)
    if capture is not None:
        _of_captures[key] = capture, taken
    return taken
