"""Nested tensors of PyTorch with layout=torch.jagged: the sequences of a batch packed one after the other, with their bounds
beside them. To attention they are packed sequences, so the kernels and derivatives are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strobe.call.torch_internals import jagged_dim, longest_sequence
from strobe.checks import check_tensor

_OWN = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "seqused_q", "seqused_kv")
"""Keywords of attention that a nested tensor says itself."""


def is_jagged(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_nested and x.layout is torch.jagged


def any_jagged(*tensors: Any) -> bool:
    """Whether one of them is jagged. Plain tensors, which most are, are told by their type."""
    return any(type(x) is not torch.Tensor and is_jagged(x) for x in tensors)


def attention(of_packed: Callable[..., Any], q, k, v, return_lse: bool, **keywords) -> Any:
    """Attention of q, k, v, each [batch, jagged, heads, head_dim], by a function of packed sequences.

    Returns out, [batch, jagged, heads_q, head_dim of v], with q's bounds; or (out, lse), where lse is [batch, heads_q, jagged].
    """
    *rows, keywords = packed(q, k, v, **keywords)
    out, lse = of_packed(*rows, return_lse=True, **keywords)
    out = _with_bounds(out, q, 1)
    return (out, _with_bounds(lse, q, 2)) if return_lse else out


def packed(q, k, v, **keywords) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The rows of q, k and v, each [total, heads, head_dim], and `keywords` with the bounds of their sequences."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_jagged(x):
            check_tensor(name, x)
            raise TypeError(f"q, k and v must be all nested tensors or none, got a plain {name}")
        if x.dim() != 4 or jagged_dim(x) != 1:
            raise ValueError(f"{name} must have shape [batch, jagged, heads, head_dim], got {list(x.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's batch {q.shape[0]}, got {k.shape[0]}")
    for name in _OWN:
        if keywords.get(name) is not None:
            raise ValueError(f"{name} must be left out with nested tensors, which have bounds of their own")
    if not same_bounds(k, v):
        raise ValueError("v must have as many rows as k in each sequence")
    ahead = 0 if q.lengths() is None and k.lengths() is None else 1
    for name, x in (("q", q), ("kv", k)):
        keywords |= {f"cu_seqlens_{name}": _bounds(x, ahead), f"max_seqlen_{name}": None if ahead else longest_sequence(x)}
        if x.lengths() is not None:
            keywords[f"seqused_{name}"] = _bounds(x, ahead, x.lengths())
    return q.values(), k.values(), v.values(), keywords


def _bounds(x, ahead: int, of: torch.Tensor | None = None) -> torch.Tensor:
    """The bounds of the sequences, or another number of each, with zeros ahead.

    Where some rows belong to no sequence, the first of these may come before all, as a sequence of which nothing is used."""
    return torch.nn.functional.pad((x.offsets() if of is None else of).to(torch.int32), (ahead, 0))


def same_bounds(x, y) -> bool:
    """Whether the sequences of two nested tensors are equally long. This waits for the device if neither was made of the
    other."""
    if x.offsets() is y.offsets() and x.lengths() is y.lengths():
        return True
    if x.lengths() is not None or y.lengths() is not None:
        return False
    return x.offsets().shape == y.offsets().shape and torch.equal(x.offsets(), y.offsets())


def _with_bounds(rows: torch.Tensor, like, dim: int) -> torch.Tensor:
    """Rows as a nested tensor, whose jagged dim is `dim` and which has the sequences of another."""
    return torch.nested.nested_tensor_from_jagged(
        rows, like.offsets(), like.lengths(), jagged_dim=dim, max_seqlen=longest_sequence(like)
    )
