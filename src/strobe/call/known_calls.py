"""A table of what was prepared for calls, found again by how a call looks.

As in `prepared_calls`, the latest calls are recognised by PyTorch's guards, which ask all questions in one call, and all others
by a key.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.nn import Parameter

from strobe.call.prepared_calls import likeness
from strobe.call.tables import ClockCache
from strobe.call.torch_internals import current_device, dispatch_state, guard_of, is_transformed

Prepared = TypeVar("Prepared")

_PLAIN = (torch.Tensor, Parameter)
_LATEST = 4


class _Known(NamedTuple):
    """alike(*given): whether the tensors of another call look like those of these calls. prepared: what was made for them."""

    alike: Callable[..., bool]
    prepared: object


class KnownCalls(Generic[Prepared]):
    """A table: what was prepared for calls of one kind, at most 1024 of them."""

    def __init__(self):
        self._known: ClockCache[_Known] = ClockCache(1024)
        self._latest: ClockCache[tuple[_Known, ...]] = ClockCache(1024)
        """What a call has beside its tensors' looks -> the most recently used entries, newest first."""

    def find(
        self, tensors: tuple[torch.Tensor | None, ...], numbers: tuple, prepare: Callable[[], Prepared]
    ) -> tuple[Prepared, list[int]] | None:
        """What was prepared for calls whose tensors look like these and whose numbers are equal, and the addresses of the
        tensors that are not None; None if the operator must run the call: one of subclasses, of a compiler or a transform, on a
        CPU or on a GPU that is not the current one.

        tensors: the first one is there. prepare(): checks a call and prepares what those like it need."""
        first = tensors[0]
        if first is None or type(first) not in _PLAIN or not may_be_prepared(first):
            return None
        if torch.compiler.is_compiling() or is_transformed():
            return None
        given = [x for x in tensors if x is not None]
        try:
            addresses = [x.data_ptr() for x in given]
            if any([x.is_nested for x in given]):  # PyTorch's guards crash the process on one
                return None
        except (AttributeError, RuntimeError):  # no tensor; a tensor that has no address
            return None
        misaligned = functools.reduce(operator.or_, addresses) % 16 and tuple([address % 16 for address in addresses])
        rest = tuple(map(type, tensors)), numbers, misaligned, torch.is_grad_enabled()
        try:
            latest = self._latest.get(rest) or ()
        except TypeError:  # a number that has no hash, such as a list
            return None
        for known in latest:
            if known.alike(*given):
                break
        else:
            likenesses = tuple([None if x is None else likeness(x) for x in tensors])
            if False in likenesses:
                return None
            key = rest, likenesses, dispatch_state()
            found = self._known.get(key)
            known = found or _Known(guard_of(*given), prepare())
            if found is None:
                self._known.put(key, known)
            others = [other for other in latest if other is not known]
            self._latest.put(rest, (known, *others[: _LATEST - 1]))
        return known.prepared, addresses  # type: ignore[return-value]

    def forget(self) -> None:
        """Drop everything that was prepared."""
        self._known.clear()
        self._latest.clear()


def may_be_prepared(x: torch.Tensor) -> bool:
    """Whether calls on a tensor's device are prepared: on the current GPU."""
    return x.is_cuda and x.get_device() == current_device()
