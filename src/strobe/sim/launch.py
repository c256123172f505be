"""Launches Gluon kernels in the simulator instead of on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from strobe.sim import context
from strobe.sim.costs import Costs, costs_of
from strobe.sim.errors import Unsupported
from strobe.sim.language import MACHINE
from strobe.sim.lift import lift
from strobe.sim.machine import Machine, Report
from strobe.sim.tensor import Pointer, argument
from strobe.sim.units import MODELS
from strobe.sim.units.tma import descriptor_of

MACHINE.update(MODELS)

OLDEST_TRITON = (3, 6)
"""The oldest release that the kernels are made for."""


@dataclass
class Launch:
    """A launch `kernel[grid](*args, **kwargs)` to be simulated, and how to check its results: `check()` raises AssertionError.

    arch: 80, 90 or 100. rewritable: names of arguments whose elements may be written more than once. triton, resident, ordered:
    see `simulate`.
    """

    kernel: Any
    grid: Sequence[int]
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    arch: int = 90
    rewritable: Sequence[str] = ()
    check: Callable[[], None] = lambda: None
    triton: tuple[int, int] = OLDEST_TRITON
    resident: int = 1
    ordered: Sequence[str] = ()

    def simulate(
        self, order: str = "in_order", seed: int = 0, costs: Costs | None = None, after: Report | None = None
    ) -> Report:
        """Run the launch; order, seed, costs and after: see `simulate`."""
        options: dict[str, Any] = {
            "order": order, "seed": seed, "arch": self.arch, "rewritable": self.rewritable, "costs": costs, "after": after,
            "triton": self.triton, "resident": self.resident, "ordered": self.ordered,
        }  # fmt: skip
        return simulate(self.kernel, self.grid, *self.args, **options, **self.kwargs)


def simulate(
    kernel, grid: Sequence[int], *args, order: str = "in_order", seed: int = 0, arch: int = 90, rewritable: Sequence[str] = (),
    num_warps: int = 4, num_ctas: int = 1, costs: Costs | None = None, launch_pdl: bool = False, after: Report | None = None,
    triton: tuple[int, int] = OLDEST_TRITON, resident: int = 1, ordered: Sequence[str] = (), **kwargs,
) -> Report:  # fmt: skip
    """Run a Gluon kernel, its source unchanged, over `grid` on tensors of the CPU, which it changes as on a GPU.

    args, kwargs: as for `kernel[grid](*args, **kwargs)`; options of the compiler are ignored. order, seed: in what order
    asynchronous work finishes and partitions take turns (see `machine`). arch: 80, 90 or 100. costs: the costs of a timed run;
    None: the arch's own. num_ctas: 1, or 2 for a cluster. after: the Report of the launch ahead in the stream, which a launch
    with launch_pdl may not have waited for (programmatic dependent launch). triton: the release whose compiler may be relied
    on: from (3, 8) on it fences before a TMA store. resident: how many CTAs run at a time. ordered: names of arguments to whose
    elements CTAs must add one after the other, so that sums have the same bits in every run. Raises a SimulationError for the
    first mistake that it finds; ValueError or TypeError for arguments that no launch takes.
    """
    if num_ctas not in (1, 2):
        raise Unsupported(f"the simulator runs clusters of 1 or 2 CTAs, got num_ctas={num_ctas}")
    bound = _bind(kernel, args, {"num_warps": num_warps, "num_ctas": num_ctas, **kwargs})
    sizes = [int(n) for n in grid]
    machine = Machine(order, seed, arch, num_warps, num_ctas, sizes, costs or costs_of(arch), launch_pdl, after, triton)
    context.running.append(machine)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiles are small: handing them to threads took up to ten times as long
    try:
        function = lift(kernel)
        arguments = {name: _argument(machine, name, value, name in rewritable) for name, value in bound.items()}
        for name in ordered:
            arguments[name].array.ordered = True
        machine.run(_programs(machine.grid), function.__name__, lambda: function(**arguments), resident)
    finally:
        torch.set_num_threads(threads)
        context.running.pop()
    machine.report.touched = {key: array.touched() for key, array in machine.arrays.items()}
    return machine.report


def _programs(grid):
    return ((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0]))


@dataclass(frozen=True)
class _Constant:
    """An argument that is known when the kernel is compiled."""

    value: Any


def _bind(kernel, args, kwargs) -> dict[str, Any]:
    """The kernel's parameters by name; options of the compiler, which are no parameters, are left out."""
    signature = inspect.signature(kernel.fn)
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind(*args, **known)
    bound.apply_defaults()
    constexpr = {name for name, parameter in signature.parameters.items() if "constexpr" in str(parameter.annotation)}
    return {name: _Constant(value) if name in constexpr else value for name, value in bound.arguments.items()}


def _argument(machine: Machine, name: str, value: Any, rewritable: bool) -> Any:
    """The value that a kernel sees of an argument."""
    if isinstance(value, _Constant):
        return lift(value.value)
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return Pointer(machine.array_of(value, name, rewritable), int(value.storage_offset()))
    if hasattr(value, "block_shape"):
        return descriptor_of(value, name, rewritable)
    if isinstance(value, bool | int | float):
        return argument(value)
    if isinstance(value, JITFunction):
        return lift(value)
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None) or [f"{name}[{i}]" for i in range(len(value))]
        items = [_argument(machine, name, item, rewritable) for name, item in zip(names, value, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    raise TypeError(
        f"argument {name} must be a tensor, a TensorDescriptor, a jitted function, a number, None or a tuple of them, "
        f"got {type(value)}"
    )
