"""Checks of what users give: before anything is launched, one sentence that says what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from strobe.call import dispatch
from strobe.call.options import Options
from strobe.checks import check_tensor
from strobe.dropout import check_probability
from strobe.functions import Function
from strobe.masks import Blocks, Mask
from strobe.scores import SCORE_TENSORS, Score

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_SCALE = 2.0**127
"""float32's range, but for what kernels multiply it by."""


def options_of(
    q, k, v, *, mask=None, score=None, scale=None, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None,
    max_seqlen_kv=None, seqused_q=None, seqused_kv=None, dropout_p=0.0, return_lse=False, deterministic=False, backend=None,
) -> Options:  # fmt: skip
    """`checked_options` from `attention`'s keywords, for `explain` and `supports`."""
    return checked_options(
        q, k, v, mask, score, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv,
        deterministic, backend, dropout_p,
    )  # fmt: skip


def checked_options(
    q, k, v, mask, score, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv, deterministic,
    backend, dropout_p=0.0,
) -> Options:  # fmt: skip
    """Checked arguments of the operator, without the seed of dropout."""
    mask = Mask() if mask is None else mask
    score = Score() if score is None else score
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a strobe mask such as Causal(), got {type(mask).__name__}")
    if not isinstance(score, Score):
        raise TypeError(f"score must be a strobe.Score, got {type(score).__name__}")
    packed = cu_seqlens_q is not None or cu_seqlens_kv is not None
    _check_qkv(q, k, v, packed)
    if packed:
        _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_kv)
        max_seqlen_q = _max_seqlen("max_seqlen_q", max_seqlen_q, q.shape[0])
        max_seqlen_kv = _max_seqlen("max_seqlen_k", max_seqlen_kv, k.shape[0])
    elif max_seqlen_q is not None or max_seqlen_kv is not None:
        raise ValueError("max_seqlen_q and max_seqlen_kv go with cu_seqlens; for dense q, k, v leave them None")
    documents = _check_documents(mask, q, k, packed)
    blocks = _check_blocks(mask, q, k, packed or seqused_q is not None or seqused_kv is not None)
    batch = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    _check_seqused("seqused_q", seqused_q, batch, q)
    _check_seqused("seqused_k", seqused_kv, batch, q)
    score.check(q, k, batch, packed)
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False, got {type(deterministic).__name__}")
    check_probability("dropout_p", dropout_p)
    if backend is not None:
        _check_backend(backend, q, k, v, score.bias, score.sinks)
    return Options(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_q=max_seqlen_q or 0,
        max_kv=max_seqlen_kv or 0,
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
        scale=check_scale(scale, q.shape[-1]),
        left=mask.left,
        right=mask.right,
        prefix=mask.prefix,
        document_q=documents.q if documents else None,
        document_kv=documents.kv if documents else None,
        block_kinds=blocks.kinds if blocks else None,
        block_pairs=blocks.pairs if blocks else None,
        mask_function=_key(mask.function),
        softcap=score.softcap,
        **dict(zip(SCORE_TENSORS, score.tensors, strict=True)),
        score_function=_key(score.function),
        score_gradient=_key(score.function_gradient),
        dropout=float(dropout_p),
        deterministic=deterministic,
        backend=backend,
    )


def _key(function: Function | Callable | None) -> str | None:
    """How the operator takes a function, which a Mask or a Score made a Function."""
    return function.key if isinstance(function, Function) else None


def _check_qkv(q, k, v, packed: bool) -> None:
    rank, layout = (3, "[total, heads, head_dim]") if packed else (4, "[batch, seqlen, heads, head_dim]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != rank:
            raise ValueError(f"{name} must have shape {layout}, got {list(x.shape)}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.shape[-1] % 8 or not 8 <= x.shape[-1] <= 256:
            raise ValueError(f"{name}: head dim must be a multiple of 8 from 8 to 256, got {x.shape[-1]}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dim (stride 1), got stride {x.stride(-1)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head dim {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have k's shape but for the head dim, got {list(v.shape)} for k {list(k.shape)}")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's batch {q.shape[0]}, got {k.shape[0]}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_q < 1 or heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(f"q's heads must be a multiple of k's, got {heads_q} and {heads_kv}")


def _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_kv) -> None:
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_kv)):
        check_tensor(name, cu)
        if cu.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {cu.dtype}")
        if cu.dim() != 1 or cu.shape[0] < 1 or not cu.is_contiguous():
            raise ValueError(f"{name} must be contiguous with shape [batch + 1], got {list(cu.shape)}")
        if cu.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {cu.device}")
    if cu_seqlens_q.shape != cu_seqlens_kv.shape:
        raise ValueError(
            f"cu_seqlens_k must have cu_seqlens_q's shape {list(cu_seqlens_q.shape)}, got {list(cu_seqlens_kv.shape)}"
        )


def _max_seqlen(name: str, value, total: int) -> int:
    if value is None:
        return total
    value = integer(f"{name} must be an int", value)
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
    if isinstance(value, int) and value >= 2**31:
        raise ValueError(f"{name} must be at most {2**31 - 1}, got {value}")
    return value


def integer(rule: str, value: Any) -> Any:
    """An int from what stands for one: numpy's, say, or a tensor of one element. TypeError with the rule otherwise."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{rule}, got {type(value).__name__}") from None


def _check_documents(mask: Mask, q, k, packed: bool):
    documents = mask.documents
    if documents is None:
        return None
    if packed:
        raise ValueError("mask: Document goes with dense q, k, v; packed sequences are separate documents already")
    for name, ids, like in (("q", documents.q, q), ("kv", documents.kv, k)):
        if tuple(ids.shape) != tuple(like.shape[:2]):
            raise ValueError(f"mask: Document's {name} must have shape {list(like.shape[:2])}, got {list(ids.shape)}")
        if ids.device != q.device:
            raise ValueError(f"mask: Document's {name} must be on q's device {q.device}, got {ids.device}")
    return documents


def _check_blocks(mask: Mask, q, k, of_parts: bool) -> Blocks | None:
    blocks = mask.blocks
    if not isinstance(blocks, Blocks):
        return None
    if of_parts:
        raise ValueError("mask: blocks go with dense q, k, v that are used whole, got packed sequences or used lengths")
    rows, keys = blocks.facts()
    if rows % 16 or keys % 16 or not rows or not keys:
        raise ValueError(f"mask: blocks must have multiples of 16 rows and keys, got {rows} and {keys}")
    whole = (q.shape[0], q.shape[2], -(-q.shape[1] // rows), -(-k.shape[1] // keys))
    fits = len(blocks.kinds.shape) == 4 and all(n == of for n, of in zip(blocks.kinds.shape[2:], whole[2:], strict=True))
    if not fits or any(n not in (1, of) for n, of in zip(blocks.kinds.shape[:2], whole[:2], strict=True)):
        raise ValueError(f"mask: kinds of blocks must have shape {list(whole)}, got {list(blocks.kinds.shape)}")
    for name, x, dtype in (("kinds", blocks.kinds, torch.int32), ("pairs", blocks.pairs, torch.uint8)):
        if x.dtype != dtype or x.device != q.device or not x.is_contiguous():
            raise ValueError(f"mask: {name} of blocks must be contiguous {dtype} on {q.device}, got {x.dtype} on {x.device}")
    return blocks


def _check_seqused(name: str, used: torch.Tensor | None, batch: int, q) -> None:
    if used is None:
        return
    check_tensor(name, used)
    if used.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {used.dtype}")
    if tuple(used.shape) != (batch,) or not used.is_contiguous():
        raise ValueError(f"{name} must be contiguous with shape [{batch}], got {list(used.shape)}")
    if used.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {used.device}")


def check_scale(scale: Any, head_dim: int) -> float:
    """The scale of scores, by default 1 / sqrt(head_dim). TypeError or ValueError if it is none."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"softmax_scale must be a number or None, got {type(scale).__name__}")
    if not -_MAX_SCALE <= scale <= _MAX_SCALE:
        raise ValueError(f"softmax_scale must be finite, at most 2^127 in size, got {_short(scale)}")
    return float(scale)


def _short(number) -> str:
    """A number in a message, whatever its size."""
    return f"{number}" if isinstance(number, float) or abs(number) < 10**20 else f"an int of {number.bit_length()} bits"


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _check_backend(backend: str, *tensors: torch.Tensor | None) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name from strobe.BACKENDS or None, got {type(backend).__name__}")
    if backend not in dispatch.BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(dispatch.BACKENDS)} or None, got {backend!r}")
    if backend in dispatch.FORWARD_ONLY and wants_gradient(*tensors):
        raise ValueError(
            f"backend {backend!r} has no backward, and q, k or v (or a bias or sinks) require gradients: call it under "
            "torch.no_grad(), "
            "or leave backend=None and the best backward is chosen"
        )
