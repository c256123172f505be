"""Loads, stores and atomics of global memory by threads."""

from __future__ import annotations

import math

import torch

from strobe.sim.clusters import own_lanes
from strobe.sim.context import machine
from strobe.sim.dtypes import constant, round_to
from strobe.sim.errors import IllegalOperation
from strobe.sim.kernel_source import where
from strobe.sim.registers import broadcast_to, only
from strobe.sim.tensor import Pointer, Scalar, Tensor


def _lanes(mask, pointer: Pointer) -> torch.Tensor | None:
    """The lanes of an access: those of the mask, and in a cluster those that are this CTA's; None: all."""
    shape = pointer.offsets().shape
    mine = own_lanes(pointer.layout, shape)
    if mask is None or mask is True:
        return mine
    chosen = broadcast_to(mask, shape).data.bool() if isinstance(mask, Tensor) else torch.full(shape, bool(mask))
    return chosen if mine is None else chosen & mine


def _ready(pointer: Pointer, *others) -> list:
    tensors = [x for x in (pointer.offset, *others) if isinstance(x, Tensor)]
    for x in tensors:
        x.check_ready()
    return [x.ready for x in tensors]


def _addresses(pointer, verb: str) -> Pointer:
    if not isinstance(pointer, Pointer):
        raise IllegalOperation(f"{where()} {verb} {pointer!r}, which is no pointer")
    return pointer


def _like(value, pointer: Pointer) -> torch.Tensor:
    """A value converted to the type of the pointer's array and to the pointer's shape."""
    kind, shape = pointer.array.flat.dtype, pointer.offsets().shape
    if isinstance(value, Tensor):
        return round_to(broadcast_to(value, shape).data, kind)
    number = value.value if isinstance(value, Scalar) else value
    return constant(number if kind.is_floating_point or kind is torch.bool else int(number), kind).expand(shape)


def _loaded(values: torch.Tensor, pointer: Pointer, ready):
    tensor = Tensor(values, pointer.layout, ready)
    return tensor if pointer.shape else only(tensor)


def _poison(kind: torch.dtype):
    return math.nan if kind.is_floating_point else 1 if kind is torch.bool else torch.iinfo(kind).max - 4


def load(pointer, mask=None, other=None, **_cache):
    """Load from global memory; lanes that the mask leaves out hold `other`, or NaN (for integers: a large odd number)."""
    pointer = _addresses(pointer, "loads from")
    lanes, array = _lanes(mask, pointer), pointer.array
    ready = machine().issue("global", pointer.offsets().numel(), _ready(pointer, mask, other))
    values = machine().read_global(array, pointer.offsets(), lanes)
    if lanes is not None:
        values = torch.where(lanes, values, _like(_poison(values.dtype) if other is None else other, pointer))
    return _loaded(values, pointer, ready)


def store(pointer, value, mask=None, **_cache) -> None:
    pointer = _addresses(pointer, "stores to")
    machine().issue("global", pointer.offsets().numel(), _ready(pointer, value, mask))
    machine().write_global(pointer.array, pointer.offsets(), _like(value, pointer), _lanes(mask, pointer))


def _atomic(operation):
    def atomic(pointer, val, mask=None, sem=None, scope=None):
        pointer = _addresses(pointer, "updates")
        ready = machine().issue("global", pointer.offsets().numel(), _ready(pointer, val, mask))
        lanes, values = _lanes(mask, pointer), _like(val, pointer)
        old = machine().atomic_global(pointer.array, pointer.offsets(), values, lanes, operation, sem or "acq_rel")
        return _loaded(old, pointer, ready)

    return atomic


def await_flag(flag: Pointer, number, known):
    """Wait until an element is a number at least, by loads that acquire: what was known to those who released it is known then.
    Returned is what it is; nothing is waited for where that is known."""
    least, place, flat = int(number), int(flag.offset), flag.array.flat
    if int(known) >= least:
        return known
    line = where()
    machine().wait(
        lambda: int(flat[place]) >= least,
        lambda: f"{flag.array.name}[{place}], which is {int(flat[place])}, to be {least}, at {line}",
        lambda: 0.0,
    )
    old = machine().atomic_global(flag.array, flag.offsets(), torch.zeros(1), None, lambda old, _: old, "acquire", least)
    return _loaded(old, flag, None)


atomic_add = _atomic(lambda old, new: old + new)
atomic_max = _atomic(torch.maximum)
atomic_min = _atomic(torch.minimum)
atomic_and = _atomic(lambda old, new: old & new)
atomic_or = _atomic(lambda old, new: old | new)
atomic_xor = _atomic(lambda old, new: old ^ new)
atomic_xchg = _atomic(lambda old, new: new)


def atomic_load(pointer, mask=None, sem=None, scope=None):
    return _atomic(lambda old, new: old)(pointer, 0, mask)


def atomic_store(pointer, value, mask=None, sem=None, scope=None) -> None:
    atomic_xchg(pointer, value, mask)


def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    expected, new = (_like(v, pointer).reshape(-1) for v in (cmp, val))
    number = torch.arange(expected.numel()).reshape(pointer.offsets().shape)
    ready = machine().issue("global", pointer.offsets().numel(), _ready(pointer, cmp, val))

    def exchange(old, i):
        return new[int(i)] if bool(old == expected[int(i)]) else old

    old = machine().atomic_global(pointer.array, pointer.offsets(), number, None, exchange, sem or "acq_rel")
    return _loaded(old, pointer, ready)
