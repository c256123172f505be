"""A table of what was prepared for calls, found again by how a call looks.

As in `prepared_calls`, the latest calls are recognised by PyTorch's guards, which ask all questions in one call, and all others
by a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.nn import Parameter

from strobe.call.tables import ClockCache
from strobe.call.torch_internals import current_device, dispatch_state, guard_of, is_transformed

Prepared = TypeVar("Prepared")

PLAIN = (torch.Tensor, Parameter)
_LATEST = 4


class _Known(NamedTuple):
    """alike(*given): whether the tensors of another call look like those of these calls. prepared: what was made for them."""

    alike: Callable[..., bool]
    prepared: object


class KnownCalls(Generic[Prepared]):
    """A table: what was prepared for calls of one kind, at most `size` of them."""

    def __init__(self, size: int = 1024):
        self._known: ClockCache[_Known] = ClockCache(size)
        self._latest: ClockCache[tuple[_Known, ...]] = ClockCache(size)
        """What a call has beside its tensors' looks -> the most recently used entries, newest first."""
        self._prepared: ClockCache[tuple[Prepared]] = ClockCache(size)
        """The likeness of a call -> what was prepared, for every state of PyTorch's dispatcher. A guard is of one state, and
        that of compiled code's first call, say, is not that of its second."""

    def find(
        self, tensors: tuple[torch.Tensor | None, ...], numbers: tuple, prepare: Callable[..., Prepared], arguments: tuple
    ) -> tuple[Prepared, list[int]] | None:
        """What was prepared for calls whose tensors look like these and whose numbers are equal, and the addresses of the
        tensors that are not None; None if the operator must run the call: one of subclasses, of a compiler or a transform, on a
        CPU or on a GPU that is not the current one.

        tensors: the first one is there. prepare(*arguments): checks a call and prepares what those like it need. (To make a
        function of no arguments takes half a microsecond, in every call.)"""
        if type(tensors[0]) not in PLAIN or torch.compiler.is_compiling() or is_transformed():
            return None
        return self.look_up(tensors, numbers, prepare, arguments)

    def look_up(
        self, tensors: tuple[torch.Tensor | None, ...], numbers: tuple, prepare: Callable[..., Prepared], arguments: tuple
    ) -> tuple[Prepared, list[int]] | None:
        """What `find` finds, for a call that no compiler, mode or transform can be around: PyTorch brought it to an operator's
        kernel, say."""
        if not may_be_prepared(tensors[0]):
            return None
        given, addresses, bits = [], [], 0
        try:
            for x in tensors:
                if x is not None:
                    if x.is_nested:  # PyTorch's guards crash the process on one
                        return None
                    address = x.data_ptr()
                    given.append(x)
                    addresses.append(address)
                    bits |= address
        except (AttributeError, RuntimeError):  # no tensor; a tensor that has no address
            return None
        misaligned = bits % 16 and tuple([address % 16 for address in addresses])
        rest: tuple = tuple(map(type, tensors)), prepare, numbers, misaligned, torch.is_grad_enabled()
        try:
            latest = self._latest.get(rest) or ()
        except TypeError:  # a number that has no hash, such as a list
            return None
        for known in latest:
            if known.alike(*given):
                return known.prepared, addresses  # type: ignore[return-value]
        if len({*map(id, given)}) < len(given):  # guards refuse what comes twice
            given, twice = each_once(given)
            rest = *rest, twice
            latest = self._latest.get(rest) or ()
            for known in latest:
                if known.alike(*given):
                    return known.prepared, addresses  # type: ignore[return-value]
        likenesses = tuple([None if x is None else likeness(x) for x in tensors])
        if False in likenesses or any([isinstance(number, torch.Tensor) for number in numbers]):  # whose value is not known
            return None
        key = rest, likenesses
        in_state = key, dispatch_state()
        found = self._known.get(in_state)
        known = found or _Known(guard_of(*given), self._prepared_for(key, prepare, arguments))
        if found is None:
            self._known.put(in_state, known)
        others = [other for other in latest if other is not known]
        self._latest.put(rest, (known, *others[: _LATEST - 1]))
        return known.prepared, addresses  # type: ignore[return-value]

    def _prepared_for(self, key: tuple, prepare: Callable[..., Prepared], arguments: tuple) -> Prepared:
        found = self._prepared.get(key)
        if found is None:
            found = (prepare(*arguments),)
            self._prepared.put(key, found)
        return found[0]

    def forget(self) -> None:
        """Drop everything that was prepared."""
        self._prepared.clear()
        self._known.clear()
        self._latest.clear()


def each_once(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """The tensors without those that came before, and for each of them the place where it came first. PyTorch's guards refuse
    every call in which an object comes twice."""
    ids = list(map(id, tensors))
    return list(dict(zip(ids, tensors, strict=True)).values()), tuple(map(ids.index, ids))


def may_be_prepared(x) -> bool:
    """Whether calls on a tensor's device are prepared: on the current GPU."""
    return x.is_cuda and x.get_device() == current_device()


def likeness(x) -> tuple | bool:
    """What checks and launches depend on in a tensor; False if x is no plain tensor, or is sparse or nested, or holds its
    values with the other sign (`is_neg`)."""
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or x.is_neg():
        return False
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, x.requires_grad
