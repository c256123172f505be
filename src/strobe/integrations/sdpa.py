"""PyTorch's attention on Strobe: `scaled_dot_product_attention` with PyTorch's signature, and an implementation of PyTorch's
flash backend, so that PyTorch's own function runs on Strobe.

`import strobe` registers it where PyTorch takes implementations (2.11 and later); nothing changes until a program asks for it:

    torch.nn.attention.activate_flash_attention_impl("strobe")

From then on PyTorch's flash operators for CUDA are the functions at the end of this file. PyTorch still decides by its own
rules which calls its flash backend takes, and its compiler sees the operators that it knows.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from strobe.api import attention
from strobe.arguments import checked_options
from strobe.call.operators import call_forward
from strobe.call.options import Options, gradients
from strobe.call.torch_internals import jagged_dim
from strobe.dropout import new_seed
from strobe.jagged import any_jagged, is_jagged, same_bounds
from strobe.masks import Causal, Full, Mask, Window
from strobe.scores import Score
from strobe.serving.api import decode
from strobe.serving.cache import Cache


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """PyTorch's function of this name: softmax(scale * query key^T + attn_mask) value, differentiable in all four.

    Args:
        query: [..., heads_q, L, E]. Any head dim up to 256: one that is not a multiple of 8 is filled up with zeros. Or a
            nested tensor with layout=torch.jagged, [batch, heads_q, jagged, E], as key and value too; E is a multiple of 8.
        key: [..., heads_kv, S, E]. Its dims ahead of the last two broadcast with query's.
        value: [..., heads_kv, S, Ev].
        attn_mask: broadcasts to [..., heads_q, L, S]: bool, True where a query sees a key, or floating point, added to the
            scores. A bias of torch.nn.attention.bias (causal_upper_left, causal_lower_right) takes no memory for pairs.
        dropout_p: the share of the weights that is dropped, from 0 to 1; what is dropped is not what PyTorch would drop.
        is_causal: query i sees the keys up to key i ("top-left"): unlike `Causal()`, the first query stands on the first key.
            With an attn_mask, a pair must be seen by both.
        scale: default 1 / sqrt(E).
        enable_gqa: whether heads_kv may be less than heads_q, which it divides.

    Returns:
        [..., heads_q, L, Ev], in memory [..., L, heads_q, Ev]. A row that sees no key gives 0, as in PyTorch.

    Raises:
        RuntimeError, IndexError: where PyTorch raises it.
        ValueError, TypeError: where Strobe cannot: head dims above 256, dtypes and devices that no backend takes.
    """
    if any_jagged(query, key, value):
        return _of_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    _check_as_torch(query, key, value, attn_mask, dropout_p)
    query, key, value = _same_heads(query, key, value, enable_gqa)
    *leading, n_q, _ = query.shape
    n_kv, head_dim_v = key.shape[-2], value.shape[-1]
    out_shape = (*leading, n_q, head_dim_v)
    if 0 in query.shape[:-1] or n_kv == 0:
        return empty_result(query, key, value, out_shape)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask, first_keys = _mask_of(attn_mask, is_causal, n_q, n_kv)
    bias = None
    if attn_mask is not None and not _is_causal_bias(attn_mask):
        bias = _bias_of(attn_mask, query, (*leading, n_q, n_kv))
        bias = bias if bias.shape[-1] == 1 else bias[..., :first_keys]
    key, value = key[..., :first_keys, :], value[..., :first_keys, :]
    q, k, v = (rows_ahead_of_heads(x) for x in (query, key, value))
    share = 0.0 if dropout_p == 1.0 else dropout_p
    score = None if bias is None else Score(bias=bias)
    out: Any = attention(q, k, v, mask=mask, score=score, scale=scale, dropout_p=share)
    out = out[..., :head_dim_v] if out.shape[-1] != head_dim_v else out
    if dropout_p == 1.0:
        out = out * 0.0
    return out.transpose(1, 2).reshape(out_shape) if len(leading) != 2 else out.transpose(1, 2)


def _of_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> torch.Tensor:
    """The result of nested tensors, [batch, heads, jagged, head_dim], of which attention takes [batch, jagged, heads,
    head_dim]."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not is_jagged(x):
            raise ValueError(f"query, key and value must be nested with layout=torch.jagged all or none, got another {name}")
        if x.dim() != 4 or jagged_dim(x) != 2:
            raise ValueError(f"{name} must have shape [batch, heads, jagged, head_dim], got {list(x.shape)}")
    if attn_mask is not None:
        raise ValueError("attn_mask must be None with nested tensors, as for PyTorch")
    _check_dropout(dropout_p)
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise RuntimeError(f"key must have query's {query.shape[1]} heads without enable_gqa, got {key.shape[1]}")
    if is_causal and not same_bounds(query, key):
        raise ValueError("is_causal takes nested tensors with as many keys as queries in each sequence: see strobe.Causal")
    q, k, v = (x.transpose(1, 2) for x in named.values())
    share = 0.0 if dropout_p == 1.0 else dropout_p
    out: Any = attention(q, k, v, mask=Causal() if is_causal else None, scale=scale, dropout_p=share)
    out = out.transpose(1, 2)
    return out * 0.0 if dropout_p == 1.0 else out


# ---- PyTorch's rules


def _check_dropout(dropout_p: float) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout_p must be from 0 to 1, got {dropout_p}")


def _check_as_torch(query, key, value, attn_mask, dropout_p) -> None:
    """Raise what PyTorch raises for arguments that it does not take."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested:
            raise ValueError(f"{name} must be a dense tensor, or all three nested with layout=torch.jagged, got a nested one")
    for x in tensors.values():
        if x.dim() < 2:
            raise RuntimeError(
                f"query, key and value must have at least 2 dims, got {', '.join(str(x.dim()) for x in tensors.values())}"
            )
        if x.dtype != query.dtype:
            raise RuntimeError(
                f"query, key and value must have one dtype, got {', '.join(str(x.dtype) for x in tensors.values())}"
            )
        if x.device != query.device:
            raise RuntimeError(
                f"query, key and value must be on one device, got {', '.join(str(x.device) for x in tensors.values())}"
            )
        if not x.dtype.is_floating_point:
            raise RuntimeError(f"query, key and value must be floating point, got {x.dtype}")
    _check_dropout(dropout_p)
    if key.shape[-1] != query.shape[-1]:
        raise RuntimeError(f"key must have query's last dim {query.shape[-1]}, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise RuntimeError(f"value must have as many rows as key, {key.shape[-2]}, got {value.shape[-2]}")
    if attn_mask is None or _is_causal_bias(attn_mask):
        return
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"attn_mask must be bool, float32 or of query's dtype {query.dtype}, got {attn_mask.dtype}")
    if attn_mask.dim() < 2:
        raise IndexError(f"attn_mask must have at least 2 dims, got {attn_mask.dim()}")


def _is_causal_bias(attn_mask) -> bool:
    """Whether attn_mask is torch.nn.attention.bias.CausalBias, asked by name: importing that module imports Triton."""
    return type(attn_mask).__name__ == "CausalBias"


def _same_heads(query, key, value, enable_gqa: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, key and value with the same dims ahead of the last two, but for the heads with enable_gqa, of which query has a
    multiple."""
    if enable_gqa:
        ranks = {x.dim() for x in (query, key, value)}
        heads_q, heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 0 for x in (query, key, value))
        if min(ranks) < 3 or 0 in (heads_k, heads_v) or heads_q % heads_k or heads_q % heads_v:
            raise RuntimeError(
                f"with enable_gqa query's heads must be a multiple of key's and value's, got {heads_q}, {heads_k} and {heads_v}"
            )
        if heads_k != heads_v:
            key, value = (x.repeat_interleave(heads_q // x.shape[-3], -3) for x in (key, value))
        before = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        return tuple(x.expand(*before, *x.shape[-3:]) for x in (query, key, value))  # type: ignore[return-value]
    before = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    return tuple(x.expand(*before, *x.shape[-2:]) for x in (query, key, value))  # type: ignore[return-value]


def empty_result(query, key, value, shape: tuple[int, ...]) -> torch.Tensor:
    """The result where there is no pair of a query and a key: zeros, with gradients of 0."""
    nothing = reduce(operator.add, (x.sum() for x in (query, key, value))) * 0.0
    return query.new_zeros(shape) + nothing.to(query.dtype)


def _mask_of(attn_mask, is_causal: bool, n_q: int, n_kv: int) -> tuple[Mask, int]:
    """The mask that is_causal or a causal bias means, and how many of the keys it is among: no row sees a later one.

    Strobe aligns the last query with the last key. The first with the first means: of more keys than queries the first n_q
    alone, and for fewer keys a diagonal that lies n_q - n_kv further to the right."""
    lower_right = False
    if _is_causal_bias(attn_mask):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (n_q, n_kv):
            of = f"{attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys"
            raise RuntimeError(f"attn_mask must be of {n_q} queries and {n_kv} keys, got one of {of}")
        lower_right = attn_mask.variant.name == "LOWER_RIGHT"
        is_causal = is_causal or not lower_right
    mask: Mask = Causal() if lower_right else Full()
    if not is_causal:
        return mask, n_kv
    if lower_right and n_kv > n_q:  # the upper left one hides more
        mask = Full()
    causal, first_keys = causal_upper_left(n_q, n_kv)
    return mask & causal, first_keys


def causal_upper_left(n_q: int, n_kv: int) -> tuple[Mask, int]:
    """The mask that shows query i the keys up to key i, and how many of the keys it is among."""
    return Window(right=n_q - n_kv) if n_q > n_kv else Causal(), min(n_q, n_kv)


def _bias_of(attn_mask: torch.Tensor, query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The mask as a bias [batch or 1, heads or 1, L or 1, S or 1]: True becomes 0 and False -inf."""
    wanted = list(attn_mask.shape)
    if len(wanted) > len(shape) or any(n not in (1, full) for n, full in zip(reversed(wanted), reversed(shape), strict=False)):
        raise RuntimeError(f"attn_mask must broadcast to {list(shape)}, got {wanted}")
    bias = attn_mask
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    bias = bias[(None,) * (len(shape) - bias.dim())]
    if len(shape) <= 4:
        return bias[(None,) * (4 - len(shape))]
    before = bias.shape[:-3]
    bias = bias if all(n == 1 for n in before) else bias.expand(*shape[:-3], *bias.shape[-3:])
    return bias.flatten(0, -4)


def rows_ahead_of_heads(x: torch.Tensor) -> torch.Tensor:
    """[..., heads, rows, D] -> [batch, rows, heads, D], with D filled up with zeros to a multiple of 8."""
    x = with_whole_head_dim(x)
    return (x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)).transpose(1, 2)


def with_whole_head_dim(x: torch.Tensor) -> torch.Tensor:
    """x with its last dim contiguous and filled up with zeros to a multiple of 8, as kernels take it."""
    if x.shape[-1] % 8 or x.shape[-1] == 0:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8 or 8))
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- PyTorch's flash operators


def register() -> None:
    """Offer Strobe to `torch.nn.attention.activate_flash_attention_impl("strobe")`, if this PyTorch has it (2.11 and later).

    Nothing runs on Strobe before a program calls that; `torch.nn.attention.restore_flash_attention_impl()` ends it."""
    offer = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if offer is not None:
        offer("strobe", register_fn=Implementation)


class Implementation:
    """Strobe as the kernel of PyTorch's flash operators on one kind of device, until `remove`."""

    def __init__(self, key: str = "CUDA"):
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        for name, function in _OPERATORS.items():
            self._library.impl(name, function, key)

    def remove(self) -> None:
        """Give the operators their own kernels back."""
        self._library = None


def _sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, state, unused, no_mask = _forward(q, k, v, None, None, 0, 0, dropout_p, is_causal, return_debug_mask, scale=scale)
    return _laid_out_as(query, out.transpose(1, 2)), lse, None, None, q.shape[1], k.shape[1], state, unused, no_mask


def _sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
    philox_offset, *, scale=None,
):  # fmt: skip
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = _gradients(dout, q, k, v, o, logsumexp, None, None, 0, 0, dropout_p, is_causal, philox_seed, scale=scale)
    return tuple(_laid_out_as(x, grad.transpose(1, 2)) for x, grad in zip((query, key, value), grads, strict=True))


def _forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    if return_debug_mask:
        raise ValueError("return_debug_mask must be False: strobe.dropout_mask says what is dropped")
    if block_table is not None:
        return _over_pages(
            query, Cache(key, value, seqused_k, block_table), cum_seq_q, max_q, dropout_p,
            _mask(is_causal, window_size_left, window_size_right), alibi_slopes, scale, num_splits == 1,
        )  # fmt: skip
    if num_splits is not None:
        raise ValueError(
            f"num_splits must be None without a block_table: Strobe decides itself how keys are split, got {num_splits}"
        )
    options = _options(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_size_left,
        window_size_right, seqused_k, alibi_slopes,
    )  # fmt: skip
    state = query.new_empty(2, dtype=torch.int64)
    if options.dropout:
        seed = new_seed(query.device)
        options, state = replace(options, seed=seed), seed.repeat(2)
    out, lse = call_forward(query, key, value, options)
    unused = query.new_empty((), dtype=torch.int64)
    return _laid_out_as(query, out), lse, state.view(torch.uint64), unused.view(torch.uint64), out.new_empty(0)


def _over_pages(query, cache: Cache, cum_seq_q, max_q, dropout_p, mask: Mask, alibi_slopes, scale, invariant: bool):
    """The results of PyTorch's operator over a cache's pages, of which there is no backward. invariant: whether a request's
    bits must not depend on the others, which num_splits=1 asks for."""
    if cache.lengths is None:
        raise ValueError("seqused_k must be int32 [batch] with a block_table, got None")
    if dropout_p:
        raise ValueError(f"dropout_p must be 0 with a block_table, got {dropout_p}")
    score = None if alibi_slopes is None else Score(alibi=alibi_slopes)
    out, lse = decode(
        query, cache, mask=mask, score=score, scale=scale, cu_seqlens_q=cum_seq_q, max_seqlen_q=int(max_q), return_lse=True,
        deterministic=invariant,
    )  # fmt: skip
    state, unused = query.new_empty(2, dtype=torch.int64), query.new_empty((), dtype=torch.int64)
    return _laid_out_as(query, out), lse, state.view(torch.uint64), unused.view(torch.uint64), out.new_empty(0)


def _forward_into(out, *arguments, **keywords):
    result, lse, *_ = _forward(*arguments, **keywords)
    out.copy_(result)
    return lse


def _backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    grads = _gradients(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
        scale=scale, window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    return tuple(_laid_out_as(x, grad) for x, grad in zip((query, key, value), grads, strict=True))


def _gradients(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, state, *, scale,
    window_size_left=None, window_size_right=None,
) -> list[torch.Tensor]:  # fmt: skip
    options = _options(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_size_left, window_size_right,
    )  # fmt: skip
    if options.dropout:
        options = replace(options, seed=state.view(torch.int64)[:1])
    tensors = query, key, value, out, logsumexp
    return list(gradients((*tensors, *options.tensors()), options, (), grad_out, None)[:3])


def _options(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_left, window_right,
    seqused_k=None, alibi_slopes=None,
) -> Options:  # fmt: skip
    """PyTorch's arguments in Strobe's terms: its flash operators align the last query with the last key, as Strobe does."""
    mask = _mask(is_causal, window_left, window_right)
    score = None if alibi_slopes is None else Score(alibi=alibi_slopes)
    packed = cum_seq_q is not None
    return checked_options(
        query, key, value, mask, score, scale, cum_seq_q, cum_seq_k, max_q if packed else None, max_k if packed else None, None,
        seqused_k, False, None, dropout_p,
    )  # fmt: skip


def _mask(is_causal: bool, window_left, window_right) -> Mask:
    left, right = (None if side is None or side < 0 else int(side) for side in (window_left, window_right))
    return Window(left, 0 if is_causal else right)


def _laid_out_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x with the strides that `torch.empty_like(like)` has, which PyTorch's compiler expects of these operators."""
    if x.shape != like.shape:
        return x
    strides = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == strides else torch.empty_like(like).copy_(x)


_OPERATORS = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_into,
    "_flash_attention_backward": _backward,
}
"""PyTorch's names of its flash operators, and what they run on Strobe."""
