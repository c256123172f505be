"""The table: what simulates which name of Gluon's language.

Keys are names, or "module.name" where modules of Gluon use a name for different things; names of old and new Triton stand
side by side. Triton's own functions in Triton (gl.sort, tl.softmax, ...) that have no entry run as they are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language.core as tl
import triton.language.standard
from triton.experimental.gluon import language as gl

from strobe.sim import registers
from strobe.sim.tensor import Value


class _Constexpr(type):
    def __instancecheck__(cls, value) -> bool:
        return not isinstance(value, Value)

    def __call__(cls, value):
        return unwrap(value)


class Constexpr(metaclass=_Constexpr):
    """gl.constexpr in a simulated kernel: the value itself."""


def unwrap(value):
    """The value of a constexpr; anything else is itself."""
    while isinstance(value, gl.constexpr):
        value = value.value
    return value


REGISTERS: dict[str, Callable] = {
    **{name: getattr(registers, name) for name in (
        "add", "add2", "aggregate_replace", "arange", "argmax", "argmin", "associative_scan", "assume", "atomic_add",
        "atomic_and", "atomic_cas", "atomic_load", "atomic_max", "atomic_min", "atomic_or", "atomic_store", "atomic_xchg",
        "atomic_xor", "broadcast", "broadcast_to", "cast", "cat", "cdiv", "ceil", "clamp", "convert_layout", "cos", "cumprod",
        "cumsum", "device_assert", "device_print", "dot_fma", "erf", "exp", "exp2", "expect_zero", "fdiv", "flip", "floor",
        "fma", "fma2", "full", "full_like", "gather", "histogram", "inline_asm", "interleave", "join", "load", "log", "log2",
        "map_elementwise", "max2", "maximum", "min2", "minimum", "mma_v2", "mul", "mul2", "multiple_of", "num_ctas",
        "num_programs", "num_warps", "permute", "program_id", "ravel", "reduce", "reduce_or", "reshape", "rsqrt",
        "set_auto_layout", "sigmoid", "sin", "split", "sqrt", "static_assert", "static_print", "static_range", "store", "sub",
        "sub2", "to_tensor", "trans", "umulhi", "xor_sum", "zeros", "zeros_like",
    )},
    "abs": registers.absolute,
    "div_rn": registers.fdiv,
    "expand_dims": registers.expand_dims_,
    "inline_asm_elementwise": registers.inline_asm,
    "max": registers.max_,
    "max_constancy": registers.promised,
    "max_contiguous": registers.promised,
    "min": registers.min_,
    "range": registers.steps,
    "sqrt_rn": registers.sqrt,
    "sum": registers.sum_,
    "view": registers.reshape,
    "where": registers.where_,
}  # fmt: skip

MACHINE: dict[str, Callable] = {}
"""What acts on the machine: filled by strobe.sim.units."""

TYPES: dict[Any, Any] = {gl.tensor: Value, tl.tensor: Value, gl.constexpr: Constexpr, gl.tuple: tuple, tl.tuple: tuple}
"""Classes of Gluon's that kernels name (`isinstance(x, gl.tensor)`)."""


def simulated(module: str, name: str) -> Callable | None:
    """What simulates `name` of a module of Triton's, if anything does."""
    key = f"{module.rpartition('.')[2]}.{name}"
    for table in (MACHINE, REGISTERS):
        if key in table:
            return table[key]
    return MACHINE.get(name) or REGISTERS.get(name)


@functools.cache
def method(name: str) -> Callable | None:
    """The function that is the method `name` of a tensor, as in x.sum(0)."""
    if not hasattr(tl.tensor, name):
        return None
    if name in REGISTERS:
        return REGISTERS[name]
    from strobe.sim.lift import lift

    function = getattr(triton.language.standard, name, None)
    return None if function is None else lift(function)
