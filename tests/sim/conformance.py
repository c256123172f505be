"""Small kernels that ask the machine one question each. A GPU and the simulator must give the same, stated answer.

The cases stand in conformance_registers.py (what a thread computes) and conformance_machine.py (memory, barriers, copies,
products, partitions). All take 4 warps and end by themselves; but on a GPU that answers a question about barriers otherwise
than stated here, a kernel waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """question: what the kernel asks.
    arguments(device) -> the kernel's arguments, and which tensor holds the answer.
    expected: that tensor after the launch. tolerance: relative and absolute; 0 means equal, where a NaN equals a NaN.
    arch: the oldest that can run it. constants: what the kernel takes at compile time."""

    question: str
    kernel: Any
    arguments: Callable[[str], tuple[tuple, torch.Tensor]]
    expected: torch.Tensor
    arch: int = 90
    tolerance: float = 0.0
    grid: tuple[int, ...] = (1,)
    constants: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.question

    def options(self) -> dict[str, Any]:
        """What a launch takes beside the arguments."""
        return {"num_warps": 4, "enable_fp_fusion": True, **dict(self.constants)}


def check(case: Case, launch: Callable[..., Any], device: str) -> None:
    """Run a case by launch(kernel, grid, *arguments, **options). AssertionError if the answer is another."""
    arguments, answer = case.arguments(device)
    launch(case.kernel, case.grid, *arguments, **case.options())
    torch.testing.assert_close(answer.cpu(), case.expected, rtol=case.tolerance, atol=case.tolerance, equal_nan=True)


def plain(*inputs: torch.Tensor, out: torch.Tensor) -> Callable[[str], tuple[tuple, torch.Tensor]]:
    """Arguments that are tensors: copies of the inputs, and last one of `out`, which holds the answer."""

    def arguments(device: str) -> tuple[tuple, torch.Tensor]:
        answer = out.clone().to(device)
        return (*(x.clone().to(device) for x in inputs), answer), answer

    return arguments


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Room for an answer, filled with what no case answers."""
    return torch.full(shape, -777, dtype=dtype)


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random integers from -4 to 4: their products and sums are exact in float32, in whatever order they are added."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
