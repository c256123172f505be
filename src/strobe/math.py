"""Elementwise mathematics for score and mask functions: what such a function may call besides Python's operators.

    import strobe

    def nearer_is_better(score, batch, head, q_index, kv_index):
        return score - 0.1 * strobe.math.log(1.0 + strobe.math.abs(q_index - kv_index))

Here the names are PyTorch's; in a kernel the same function is compiled with Triton's and Gluon's
(`kernels/common/triton_math.py`, `gluon_math.py`).
"""

from __future__ import annotations

import torch

__all__ = ["abs", "exp", "exp2", "log", "log2", "maximum", "minimum", "sqrt", "tanh", "where"]

abs, exp, exp2, log, log2, sqrt, tanh, where = (
    torch.abs, torch.exp, torch.exp2, torch.log, torch.log2, torch.sqrt, torch.tanh, torch.where,
)  # fmt: skip


def minimum(a, b):
    """The lesser of two tensors, or of a tensor and a Python number."""
    return torch.minimum(*_both(a, b))


def maximum(a, b):
    """The greater of two tensors, or of a tensor and a Python number."""
    return torch.maximum(*_both(a, b))


def _both(a, b) -> tuple[torch.Tensor, torch.Tensor]:
    like = a if isinstance(a, torch.Tensor) else b
    a, b = (x if isinstance(x, torch.Tensor) else torch.tensor(x, device=like.device) for x in (a, b))
    dtype = torch.result_type(a, b)
    return a.to(dtype), b.to(dtype)
