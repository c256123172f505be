"""Gluon's functions that compute nothing: program ids, loops, promises, assertions, inline assembly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from strobe.sim.context import machine
from strobe.sim.errors import IllegalOperation, SimulationError, Unsupported
from strobe.sim.kernel_source import where
from strobe.sim.tensor import Scalar, Tensor, kind_of, scalar


def program_id(axis) -> Scalar:
    return Scalar(machine().program_id(int(axis)), torch.int32)


def num_programs(axis) -> Scalar:
    return Scalar(machine().num_programs(int(axis)), torch.int32)


def num_warps() -> int:
    return machine().partition.warps


def num_ctas() -> int:
    return machine().num_ctas


def _holds(condition) -> bool:
    return bool(condition.data.all()) if isinstance(condition, Tensor) else bool(condition)


def static_assert(cond, msg="") -> None:
    if not cond:
        raise IllegalOperation(f"{where()}: static_assert failed: {msg}")


def device_assert(cond, msg="", mask=None) -> None:
    if mask is not None:
        cond = cond | ~scalar(mask)
    if not _holds(cond):
        raise SimulationError(f"{where()}: device_assert failed: {msg}")


def assume(cond) -> None:
    if not _holds(cond):
        raise SimulationError(f"{where()}: assume is given what does not hold")


def expect_zero(x, mask):
    if not _holds((x == 0.0) | ~scalar(mask)):
        raise SimulationError(f"{where()}: expect_zero is given what is not zero")
    return x


def multiple_of(input, values):
    factor = values[0] if isinstance(values, (list, tuple)) else values
    if isinstance(input, Scalar) and int(input) % int(factor):
        raise SimulationError(f"{where()}: {input} is no multiple of {factor}")
    return input


def promised(input, values):
    """The input: what max_contiguous and max_constancy promise only the compiler uses."""
    return input


def static_print(*values, sep=" ", end="\n", file=None, flush=False) -> None:
    print(*values, sep=sep, end=end)


def device_print(prefix, *args, hex=False) -> None:
    print(prefix, *(x.data if isinstance(x, Tensor) else x for x in args))


def steps(*bounds, **_hints):
    """Yield what range in a kernel does: Scalars, int32 or as wide as the bounds."""
    numbers = [int(bound) for bound in bounds]
    kind = torch.int64 if any(kind_of(bound) is torch.int64 for bound in bounds) else torch.int32
    for i in range(*numbers):
        yield Scalar(i, kind)


def static_range(*bounds) -> range:
    return range(*(int(bound) for bound in bounds))


assembly: dict[str, Callable] = {}
"""Text of PTX, with single spaces -> what simulates it, given to `register`."""


def inline_asm(asm, constraints, args, *_, **__):
    asm = " ".join(asm.split())
    if asm in assembly:
        return assembly[asm](*args)
    raise Unsupported(
        f"{where()}: the simulator runs no PTX, such as {asm!r}; strobe.sim.register(function, implementation) gives it Python "
        f"for the function that holds it, or for this text"
    )


def aggregate_replace(instance, **changes):
    copy = object.__new__(type(instance))
    copy.__dict__.update(instance.__dict__)
    for name, value in changes.items():
        if name not in copy.__dict__:
            raise IllegalOperation(f"{where()}: {type(instance).__name__} has no field {name}")
        copy.__dict__[name] = value
    return copy
