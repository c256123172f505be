"""What a kernel asks of its launch, its loops, and what it promises or asserts."""

from __future__ import annotations

import torch

from strobe.sim.context import machine, where
from strobe.sim.errors import IllegalOperation, SimulationError, Unsupported
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
    """max_contiguous, max_constancy: what only the compiler uses."""
    return input


def static_print(*values, sep=" ", end="\n", file=None, flush=False) -> None:
    print(*values, sep=sep, end=end)


def device_print(prefix, *args, hex=False) -> None:
    print(prefix, *(x.data if isinstance(x, Tensor) else x for x in args))


def steps(*bounds, **_hints):
    """range in a kernel: its variable is a Scalar, int32 or as wide as the bounds."""
    numbers = [int(bound) for bound in bounds]
    kind = torch.int64 if any(kind_of(bound) is torch.int64 for bound in bounds) else torch.int32
    for i in range(*numbers):
        yield Scalar(i, kind)


def static_range(*bounds) -> range:
    return range(*(int(bound) for bound in bounds))


def inline_asm(*_, **__):
    raise Unsupported(
        f"{where()}: the simulator runs no PTX; strobe.sim.register(function, implementation) gives it Python for the function "
        f"that holds this assembly"
    )


def aggregate_replace(instance, **changes):
    copy = object.__new__(type(instance))
    copy.__dict__.update(instance.__dict__)
    for name, value in changes.items():
        if name not in copy.__dict__:
            raise IllegalOperation(f"{where()}: {type(instance).__name__} has no field {name}")
        copy.__dict__[name] = value
    return copy
