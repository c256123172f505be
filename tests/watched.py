"""Memory that is watched: what kernels in Triton's interpreter reach, and what any kernel writes beside its results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


class OutOfBounds(AssertionError):
    """A kernel reached what is in none of its arguments."""


@contextlib.contextmanager
def interpreted_launches() -> Iterator[None]:
    """Within it a launch in Triton's interpreter raises OutOfBounds as it reads or writes beside its own arguments."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    ranges: np.ndarray = np.zeros((0, 2), np.uint64)
    call, load = GridExecutor.__call__, InterpreterBuilder.create_masked_load
    store, atomic = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_atomic_rmw

    def watched_call(self, *args, **kwargs):
        nonlocal ranges
        ranges = np.array(sorted(_ranges((*args, *kwargs.values()))), np.uint64).reshape(-1, 2)
        return call(self, *args, **kwargs)

    def look(what: str, pointers, mask) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.uint64)
        inside = ((addresses[:, None] >= ranges[:, 0]) & (addresses[:, None] < ranges[:, 1])).any(1)
        if not inside.all():
            raise OutOfBounds(f"{what} of {int((~inside).sum())} elements that lie in no argument")

    def watched_load(self, pointers, mask, *others):
        look("a load", pointers, mask)
        return load(self, pointers, mask, *others)

    def watched_store(self, pointers, value, mask, *others):
        look("a store", pointers, mask)
        return store(self, pointers, value, mask, *others)

    def watched_atomic(self, kind, pointers, value, mask, *others):
        look("an atomic operation", pointers, mask)
        return atomic(self, kind, pointers, value, mask, *others)

    with (
        mock.patch.object(GridExecutor, "__call__", watched_call),
        mock.patch.object(InterpreterBuilder, "create_masked_load", watched_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", watched_store),
        mock.patch.object(InterpreterBuilder, "create_atomic_rmw", watched_atomic),
    ):
        yield


def _ranges(arguments) -> Iterator[tuple[int, int]]:
    """First and last byte of each tensor among the arguments, also in tuples."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from _ranges(x)
        elif isinstance(x, torch.Tensor) and x.numel():
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            yield x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


GUARD = 4096
"""Elements before and after a tensor that is guarded."""


class Guarded(TorchFunctionMode):
    """Within it, tensors that are made on a device have guards around them; `check` says whether they are as they were."""

    _MAKERS = (
        *(torch.empty, torch.zeros, torch.full, torch.empty_like, torch.zeros_like, torch.full_like),
        *(torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_full),
    )

    def __init__(self) -> None:
        self._whole: list[torch.Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function not in self._MAKERS or made.device.type == "meta" or not made.numel() or not made.is_contiguous():
            return made
        return self.guard(made)

    def guard(self, x: torch.Tensor) -> torch.Tensor:
        """A copy with guards around it, NaN or, of integers, a large number."""
        with torch._C.DisableTorchFunction():
            value = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
            bits = x.dtype if x.element_size() > 1 else torch.uint8
            whole = torch.full((x.numel() + 2 * GUARD,), value if bits is x.dtype else 255, dtype=bits, device=x.device)
            self._whole.append(whole)
            inside = whole.view(x.dtype)[GUARD:-GUARD].view(x.shape)
            return inside.copy_(x)

    def check(self) -> None:
        for whole in self._whole:
            guards = torch.cat([whole[:GUARD], whole[-GUARD:]]).cpu()
            poison = guards.isnan() if guards.is_floating_point() else guards == torch.iinfo(guards.dtype).max
            assert bool(poison.all()), f"a guard of {whole.numel() - 2 * GUARD} {whole.dtype} was written"
