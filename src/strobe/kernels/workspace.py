"""Workspace: the few integers that launches on one stream share.

A launch leaves them as it found them: the counters are set back by the last CTA, a note by the launch that redoes its
rows. So they are zeroed once in the life of a stream, and a launch costs no memset. A CUDA graph may be replayed beside
anything, so what is captured gets a workspace of its own, zeroed at the beginning of each replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_COUNTERS = 16
"""Integers before the notes: 0, 1 the counters of tiles and of CTAs that have ended; 2 the running total of blocks redone."""


class Workspace(NamedTuple):
    """counters: int32 [16]. notes: int32, one for 64 rows."""

    counters: torch.Tensor
    notes: torch.Tensor


_spaces: dict[tuple[int, int], torch.Tensor] = {}


def workspace(device: torch.device, notes: int) -> Workspace:
    """The workspace of the device's current stream, with room for so many notes."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _cut(torch.zeros(_COUNTERS + notes, dtype=torch.int32, device=device), notes)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    space = _spaces.get(key)
    if space is None or space.numel() < _COUNTERS + notes:
        larger = torch.zeros(_COUNTERS + 2 * notes, dtype=torch.int32, device=device)
        if space is not None:
            larger[2] = space[2]
        space = _spaces[key] = larger
    return _cut(space, notes)


def _cut(space: torch.Tensor, notes: int) -> Workspace:
    return Workspace(space[:_COUNTERS], space[_COUNTERS : _COUNTERS + notes])


def redone_blocks(device: torch.device | str | int | None = None) -> int:
    """How many blocks of 64 rows have been computed again on a GPU since the process began, by launches outside of CUDA graphs.
    Waits for the GPU."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    return sum(int(space[2]) for (of, _), space in _spaces.items() if of == index)
