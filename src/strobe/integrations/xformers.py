"""xFormers' memory-efficient attention on Strobe: its function with its arguments, and its classes of biases.

The classes are known by their names, so nothing of xFormers is imported. Those of packed sequences (BlockDiagonal...) become
`cu_seqlens`, those of padded or gappy keys used lengths beside: none of them takes memory for pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from strobe.api import attention
from strobe.integrations.sdpa import causal_upper_left, with_whole_head_dim
from strobe.masks import Causal, Full, Mask, Visible, Window
from strobe.scores import Score


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """xFormers' function of this name: softmax(scale * query key^T + attn_bias) value, differentiable in all four.

    Args:
        query: [batch, Mq, heads, K]; [batch, Mq, K] is one head; [batch, Mq, groups, heads of a group, K] is GQA, where key and
            value are repeated (expanded) over the heads of a group, and read once.
        key: [batch, Mkv, heads, K], likewise.
        value: [batch, Mkv, heads, Kv], likewise.
        attn_bias: None; a tensor that broadcasts to [batch, heads, Mq, Mkv] ([batch, groups, heads, Mq, Mkv]), which has a
            gradient; or one of xFormers' classes: of bands (LowerTriangularMask, ...) and of packed sequences
            (BlockDiagonalMask, ...), with padded or gappy keys, but for the paged ones.
        p: the share of the weights that is dropped, from 0 to below 1; what is dropped is not what xFormers would drop.
        scale: default 1 / sqrt(K).
        op: taken, and not looked at: it chooses among ways to the same result.
        output_dtype: None or query's dtype.

    Returns:
        [batch, Mq, heads, Kv], of query's rank. A row that sees no key gives 0.

    Raises:
        ValueError, TypeError: naming the argument, before any launch.
    """
    _check(query, key, value, output_dtype)
    q, k, v = _with_heads(query, key, value)
    means = _means(attn_bias, q, k, query.shape)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (with_whole_head_dim(x) for x in (q, k, v))
    if means.keys is not None:
        k, v = k[:, : means.keys], v[:, : means.keys]
    score = None if means.bias is None else Score(bias=means.bias[..., : k.shape[1]])
    if means.packed:
        q, k, v = q[0], k[0], v[0]
    out = attention(q, k, v, mask=means.mask, score=score, scale=scale, dropout_p=p, **means.packed)
    return out[..., : value.shape[-1]].reshape(*query.shape[:-1], value.shape[-1])


@dataclass(frozen=True)
class _Means:
    """What a bias is in Strobe's terms."""

    mask: Mask
    bias: torch.Tensor | None = None
    keys: int | None = None
    """How many of the keys the mask is among, if it does not reach them all."""
    packed: dict[str, Any] = field(default_factory=dict)
    """The arguments of `attention` that say how sequences are packed."""


def _check(query, key, value, output_dtype) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            raise ValueError(f"{name} must have 3, 4 or 5 dims as query, got shape {list(x.shape)}")
    if query.dim() == 5 and not query.shape[2:4] == key.shape[2:4] == value.shape[2:4]:
        of = ", ".join(str(list(x.shape[2:4])) for x in (query, key, value))
        raise ValueError(f"query, key and value must have the same groups and heads of a group, got {of}: expand key and value")
    if output_dtype not in (None, query.dtype):
        raise ValueError(f"output_dtype must be None or query's dtype {query.dtype}, got {output_dtype}")


def _with_heads(query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[batch, length, heads, head_dim] of each; of keys that are repeated over the heads of a group, one head a group."""
    if query.dim() == 3:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if query.dim() == 4:
        return query, key, value
    if all(x.stride(3) == 0 or x.shape[3] == 1 for x in (key, value)):
        key, value = key[:, :, :, :1], value[:, :, :, :1]
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


# ---- biases


def _means(bias: Any, q: torch.Tensor, k: torch.Tensor, of_query: torch.Size) -> _Means:
    if bias is None:
        return _Means(Full())
    if isinstance(bias, torch.Tensor):
        return _Means(Full(), bias=_bias(bias, q, k, of_query))
    name = type(bias).__name__
    if name in _BANDS:
        return _BANDS[name](bias, q.shape[1], k.shape[1])
    if name == "LowerTriangularMaskWithTensorBias":
        causal = _upper_left(bias, q.shape[1], k.shape[1])
        return replace(causal, bias=_bias(bias._bias, q, k, of_query))
    if name in _PACKED:
        if q.shape[0] != 1:
            raise ValueError(f"attn_bias {name} goes with packed sequences, a batch of 1, got a batch of {q.shape[0]}")
        return _packed(bias, _PACKED[name](bias), q, k)
    if name.startswith("Paged"):
        raise TypeError(
            f"attn_bias {name} is not taken: use strobe.flash_attn_with_kvcache with its block_table, or strobe.decode"
        )
    known = ", ".join([*_BANDS, *_PACKED])
    raise TypeError(f"attn_bias must be None, a tensor or one of {known}, got {name}")


def _bias(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, of_query: torch.Size) -> torch.Tensor:
    """A tensor as a bias [batch or 1, heads or 1, Mq or 1, Mkv or 1]."""
    if bias.dim() == 5 and len(of_query) == 5:
        groups = (-1, -1) if bias.shape[1:3] == (1, 1) else of_query[2:4]
        bias = bias.expand(-1, *groups, -1, -1).flatten(1, 2)
    if len(of_query) == 3 and bias.dim() == 3:
        bias = bias[:, None]
    shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    wanted = bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias
    if wanted.dim() != 4 or any(n not in (1, of) for n, of in zip(wanted.shape, shape, strict=True)):
        raise ValueError(f"attn_bias must broadcast to {list(shape)}, got {list(bias.shape)}")
    return wanted


def _upper_left(bias, n_q: int, n_kv: int) -> _Means:
    mask, keys = causal_upper_left(n_q, n_kv)
    return _Means(mask, keys=keys)


def _local(window_size: int) -> Mask:
    """A query sees its own key and those before it, window_size in all."""
    return Window(left=window_size - 1, right=0)


_BANDS = {
    "LowerTriangularMask": _upper_left,
    "LowerTriangularFromBottomRightMask": lambda bias, n_q, n_kv: _Means(Causal()),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda bias, n_q, n_kv: _Means(_local(bias._window_size)),
    "LocalAttentionFromBottomRightMask": lambda bias, n_q, n_kv: _Means(Window(bias.window_left, bias.window_right)),
}
"""A class's name -> what it means for so many queries and keys."""


@dataclass(frozen=True)
class _Blocks:
    """What a query sees of its own sequence."""

    mask: Mask
    upper_left: bool = False
    """Whether the first query of each sequence stands on its first key, instead of the last one on the last."""


_PACKED = {
    "BlockDiagonalMask": lambda bias: _Blocks(Full()),
    "BlockDiagonalCausalMask": lambda bias: _Blocks(Causal(), upper_left=True),
    "BlockDiagonalCausalFromBottomRightMask": lambda bias: _Blocks(Causal()),
    "BlockDiagonalCausalLocalAttentionMask": lambda bias: _Blocks(_local(bias._window_size), upper_left=True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda bias: _Blocks(_local(bias._window_size)),
    "BlockDiagonalPaddedKeysMask": lambda bias: _Blocks(Full()),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda bias: _Blocks(Causal()),
    "BlockDiagonalLocalAttentionPaddedKeysMask": lambda bias: _Blocks(Window(bias.window_left, bias.window_right)),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": lambda bias: _Blocks(_local(bias._window_size)),
    "BlockDiagonalGappyKeysMask": lambda bias: _Blocks(Full()),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": lambda bias: _Blocks(Causal()),
}


def _packed(bias, blocks: _Blocks, q: torch.Tensor, k: torch.Tensor) -> _Means:
    of_q, of_k = bias.q_seqinfo, bias.k_seqinfo
    name = type(bias).__name__
    for what, info, x in (("query", of_q, q), ("key", of_k, k)):
        if info.seqstart_py[-1] != x.shape[1]:
            raise ValueError(f"attn_bias {name} must be of {what}'s {x.shape[1]} rows, got one of {info.seqstart_py[-1]}")
    room_q, room_k = _lengths(of_q.seqstart_py), _lengths(of_k.seqstart_py)
    mask = blocks.mask
    used = getattr(of_k, "seqlen", None)
    if used is not None and any(n > room for n, room in zip(of_k.seqlen_py, room_k, strict=True)):
        raise ValueError(f"attn_bias {name} must have sequences of keys one behind the other, got some that overlap")
    if blocks.upper_left and room_q != room_k:
        if all(keys >= queries for queries, keys in zip(room_q, room_k, strict=True)):
            used = torch.tensor(room_q)  # later keys are seen by no query, and what is left is aligned both ways
        else:
            mask = Visible(_up_to_itself(mask.left))
    return _Means(mask, packed=dict(
        cu_seqlens_q=_int32(of_q.seqstart, q.device),
        cu_seqlens_kv=_int32(of_k.seqstart, q.device),
        max_seqlen_q=max(room_q),
        max_seqlen_kv=max(room_k),
        seqused_kv=None if used is None else _int32(used, q.device),
    ))  # fmt: skip


def _lengths(starts) -> list[int]:
    return [end - start for start, end in pairwise(starts)]


def _int32(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.to(device, torch.int32).contiguous()


def _up_to_itself(left: int | None):
    """The mask function of a query that sees keys up to its own number, `left` of them before it (None: all)."""

    def up_to_itself(batch, head, q_index, kv_index):
        return kv_index <= q_index

    def up_to_itself_from(batch, head, q_index, kv_index):
        return (kv_index <= q_index) & (kv_index >= q_index - left)

    return up_to_itself if left is None else up_to_itself_from
