"""What every rung hands over: its launches. The harness runs, simulates or compiles the same list."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LOG2_E = 1.4426950408889634
"""exp(x) is exp2(x * LOG2_E)."""


class Launch(NamedTuple):
    """A launch `kernel[grid](*arguments, **constants)`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]


def tensor_descriptor(x: torch.Tensor, rows: int) -> Any:
    """A TMA descriptor of x [heads, S, D] as [heads x S, D], in blocks of so many rows, swizzled as tensor cores read them."""
    from strobe.kernels.gluon import TensorDescriptor, gl

    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    block = [rows, x.shape[-1]]
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), block, gl.NVMMASharedLayout.get_default_for(block, dtype))
