"""Workspace: the few integers that launches on one stream share.

A launch leaves them as it found them: the counters are set back by the last CTA, a note by the launch that redoes its
rows. So they are zeroed once in the life of a stream, and a launch costs no memset. A CUDA graph may be replayed beside
anything, so what is captured on a stream has counters of its own (`call.counters`).

Threads may share a stream: who leaves notes and who redoes their rows are two launches, which `lock` keeps together.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

COUNTERS = 16
"""Integers before the notes: 0, 1 the counters of tiles and of CTAs that have ended; 2, 3 whether there is a note, and how many
CTAs have looked (`kernels.decode.notes`, `kernels.portable.forward`); 4 the running total of blocks redone; 8 how many shares
of the notes are taken."""

NOTED, ENDED, SHARES = 2, 3, 8
"""The counters that say whether there is a note, and how many of those who look at the notes have done so; the last of these
sets both back. And how many shares of the notes are taken, which a forward sets back."""

ALIGNED = 4
"""Integers of 16 bytes. What a launch is given of a workspace begins at a multiple of them: Triton compiles a kernel of its own
for an address that is no multiple of 16 bytes."""


class Workspace(NamedTuple):
    """counters: int32 [16]. notes: int32, one for 64 rows."""

    counters: torch.Tensor
    notes: torch.Tensor


_Stream = tuple[int, int]
"""A device's number and the handle of its stream."""

_spaces: dict[_Stream, list[torch.Tensor]] = {}
"""Larger ones come last. The others stay valid: a plan may hold them."""
_scratch: dict[_Stream, torch.Tensor] = {}
_locks: dict[_Stream | None, threading.Lock] = {}


def workspace(device: torch.device, notes: int) -> Workspace:
    """The workspace of the device's current stream, with room for so many notes."""
    stream = _current(device)
    if stream is None:
        return cut(torch.zeros(COUNTERS + notes, dtype=torch.int32, device=device), notes)
    spaces = _spaces.setdefault(stream, [])
    if not spaces or spaces[-1].numel() < COUNTERS + notes:
        spaces.append(torch.zeros(COUNTERS + 2 * notes, dtype=torch.int32, device=device))
    return cut(spaces[-1], notes)


def scratch(device: torch.device, numel: int) -> torch.Tensor:
    """float32 that a call's launches on the device's current stream write, and nobody reads when the next call's begin. Those
    that are outgrown stay valid: calls that found them hold them, so each is at least twice as large as the one before."""
    stream = _current(device)
    if stream is None:
        return torch.empty(numel, device=device)
    found = _scratch.get(stream)
    if found is None or found.numel() < numel:
        more = numel if found is None else max(numel, 2 * found.numel())
        found = _scratch[stream] = torch.empty(more, device=device)
    return found


def lock(device: torch.device) -> threading.Lock:
    """To be held from a launch that may leave notes in the workspace of the device's current stream until that which redoes
    their rows: another thread's notes, left between the two, would be taken for the first one's, and its rows stay undone."""
    return _locks.setdefault(_current(device), threading.Lock())


def _current(device: torch.device) -> _Stream | None:
    """The device's current stream; None if what runs there shares nothing."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch.cuda.current_stream(device).cuda_stream


def cut(space: torch.Tensor, notes: int) -> Workspace:
    return Workspace(space[:COUNTERS], space[COUNTERS : COUNTERS + notes])


def redone_blocks(device: torch.device | str | int | None = None) -> int:
    """How many blocks of 64 rows have been computed again on a GPU since the process began, by launches outside of CUDA graphs.
    Waits for the GPU."""
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"device must be a GPU, got {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(int(space[ALIGNED]) for (of, _), spaces in list(_spaces.items()) if of == index for space in spaces)
