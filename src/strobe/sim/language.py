"""The table of Gluon's language: which function simulates which name.

Keys are names, or "module.name" where modules of Gluon use a name for different things; names of old and new Triton stand
side by side. Triton's own functions in Triton (gl.sort, tl.softmax, ...) that have no entry run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon import language as gl

from strobe.sim import global_memory, program, reductions, registers
from strobe.sim.tensor import Value


class _Constexpr(type):
    def __instancecheck__(cls, value) -> bool:
        return not isinstance(value, Value)

    def __call__(cls, value):
        return unwrap(value)


class Constexpr(metaclass=_Constexpr):
    """Stands for gl.constexpr in a simulated kernel: makes the value itself."""


def unwrap(value):
    """The value of a constexpr; anything else as it is."""
    while isinstance(value, gl.constexpr):
        value = value.value
    return value


def _entries(module, names: str) -> dict[str, Callable]:
    return {name: getattr(module, name) for name in names.split()}


REGISTERS: dict[str, Callable] = {
    **_entries(
        registers,
        "add add2 arange broadcast broadcast_to cast cat cdiv ceil clamp convert_layout cos dot_fma erf exp exp2 fdiv flip "
        "floor fma fma2 full full_like fp4_to_fp gather histogram interleave join log log2 logical_and "
        "logical_or max2 maximum min2 minimum mma_v2 mul mul2 permute "
        "ravel reshape rsqrt set_auto_layout sigmoid sin split sqrt sub sub2 to_tensor trans umulhi zeros zeros_like",
    ),
    **_entries(reductions, "argmax argmin associative_scan cumprod cumsum map_elementwise reduce reduce_or xor_sum"),
    **_entries(
        global_memory,
        "atomic_add atomic_and atomic_cas atomic_load atomic_max atomic_min atomic_or atomic_store atomic_xchg atomic_xor load "
        "store",
    ),
    **_entries(
        program,
        "aggregate_replace assume device_assert device_print expect_zero inline_asm multiple_of num_ctas num_programs "
        "num_warps program_id static_assert static_print static_range",
    ),
    "abs": registers.absolute,
    "div_rn": registers.fdiv,
    "expand_dims": registers.expand_dims_,
    "inline_asm_elementwise": program.inline_asm,
    "max": reductions.max_,
    "max_constancy": program.promised,
    "max_contiguous": program.promised,
    "min": reductions.min_,
    "range": program.steps,
    "sqrt_rn": registers.sqrt,
    "sum": reductions.sum_,
    "view": registers.reshape,
    "where": registers.where_,
}

MACHINE: dict[str, Callable] = {}
"""Functions that act on the machine; `launch` fills it with those of `units`."""

TYPES: dict[Any, Any] = {gl.tensor: Value, gl.constexpr: Constexpr, gl.tuple: tuple}
"""Classes of Gluon that kernels name (`isinstance(x, gl.tensor)`), and what stands for them."""


NAMESPACES = ("async_copy", "clc", "cluster", "float2", "mbarrier", "tma")
"""Modules of Gluon whose names mean something else than the same names outside, such as `cluster.barrier`."""


def simulated(module: str, name: str) -> Callable | None:
    """The function that simulates `name` of a module of Triton; None if there is none."""
    module = module.rpartition(".")[2]
    key = f"{module}.{name}"
    for table in (MACHINE, REGISTERS):
        if key in table:
            return table[key]
    return None if module in NAMESPACES else MACHINE.get(name) or REGISTERS.get(name)
