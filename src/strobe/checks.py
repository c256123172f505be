"""What every tensor that a user gives must be, and when two are the same."""

from __future__ import annotations

import torch


def check_tensor(name: str, x) -> None:
    """TypeError if x is no plain, dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(
            f"{name} must be a plain tensor, got a nested one: make q, k and v with layout=torch.jagged, "
            "or pack their sequences and pass cu_seqlens"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one with layout {x.layout}")


def check_device(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """ValueError if x is not where q is."""
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether both are None, or have one dtype, device and shape and equal elements."""
    if a is None or b is None or a is b:
        return a is b
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
