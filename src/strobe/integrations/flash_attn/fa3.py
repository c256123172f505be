"""flash_attn_interface, FlashAttention-3's module, and flash_attn.cute, FlashAttention-4's: their functions in Strobe's terms.

They differ from FlashAttention-2's in the order of their arguments and in what they add. num_splits, pack_gqa, sm_margin and
scheduler_metadata choose among ways to the same result, which Strobe does itself: they are taken and say nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from strobe import api, fp8
from strobe.arguments import integer
from strobe.integrations.flex.api import read_functions
from strobe.masks import Document, Mask, Window
from strobe.scores import Score
from strobe.serving import flash

_NO_WINDOW = (-1, -1)


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=_NO_WINDOW,
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """FlashAttention-3's function of this name: out, or (out, softmax_lse) with return_attn_probs."""
    _check_unused(qv=qv)
    descales = q_descale, k_descale, v_descale
    return _attention(
        q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, descales, chunk=attention_chunk
    )


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=_NO_WINDOW, attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """FlashAttention-3's function of this name, of packed sequences."""
    _check_unused(qv=qv, attention_chunk=attention_chunk)
    lengths = dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
        seqused_q=seqused_q, seqused_kv=seqused_k,
    )  # fmt: skip
    descales = q_descale, k_descale, v_descale
    return _attention(
        q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, descales, **lengths
    )


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=_NO_WINDOW,
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """FlashAttention-3's function of this name: qkv [batch, seqlen, 3, heads, D], or with num_heads_q
    [batch, seqlen, heads_q + 2 heads_kv, D]."""
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(f"qkv must have shape [batch, seqlen, 3, heads, head_dim], got {list(qkv.shape)}")
        q, k, v = qkv.unbind(2)
    else:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_kv, heads_kv), 2)
    descales = q_descale, k_descale, v_descale
    return _attention(
        q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, descales, chunk=attention_chunk
    )


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=_NO_WINDOW, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False, sinks=None,
):  # fmt: skip
    """FlashAttention-3's function of this name: `strobe.flash_attn_with_kvcache` with the arguments in its order."""
    return flash.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, return_softmax_lse, qv=qv,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, sinks=sinks,
    )  # fmt: skip


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=_NO_WINDOW, attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention-3's function of this name: an empty tensor, as work is dealt out on the device, where lengths may change
    after this call."""
    return cache_seqlens.new_empty(0)


def flash_attn_combine(
    out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, virtual_batch_idx=None, return_lse=True
):  # fmt: skip
    """One attention from several over parts of the keys: out_partial [parts, batch, seqlen, heads, D], lse_partial
    [parts, batch, seqlen, heads], or [parts, total, heads, D] and [parts, total, heads]. Returns (out, lse), out in out_dtype
    (default: that of the parts), lse None without return_lse. Rows that cu_seqlens and seqused leave out are merged like
    others."""
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse.masked_fill(lse.isneginf(), 0.0)).exp().unsqueeze(-1)
    result = (out_partial.to(lse.dtype) * weights).sum(0).to(out_dtype or out_partial.dtype)
    return (result if out is None else out.copy_(result)), lse if return_lse else None


def _check_unused(**arguments) -> None:
    reasons = {
        "qv": "a second product with the values is not computed",
        "attention_chunk": "chunks of packed sequences are a mask function, strobe.Visible",
        "block_sparse_tensors": "tables of blocks are not read: a mask finds its blocks itself",
        "block_sparse_tensors_bwd": "tables of blocks are not read: a mask finds its blocks itself",
        "gather_kv_indices": "keys are not chosen one by one",
        "gather_bwd_recompute_p": "keys are not chosen one by one",
        "gather_bwd_token_chunk": "keys are not chosen one by one",
    }
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise ValueError(f"{name} must be left out: {reasons[name]}")


def _window(window_size, causal: bool) -> Mask:
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return Window(left, 0 if causal else right)


def _chunks(chunk, q, k) -> Mask:
    """FlashAttention-3's attention_chunk: keys are cut into chunks of so many, and a query sees those of the chunk in which it
    stands."""
    if integer("attention_chunk must be an int", chunk) < 1:
        raise ValueError(f"attention_chunk must be 0 (no chunks) or more, got {chunk}")
    n_q, n_kv = q.shape[1], k.shape[1]
    positions = (torch.arange(first, n_kv, dtype=torch.int32, device=q.device) for first in (n_kv - n_q, 0))
    return Document(*(torch.div(x, chunk, rounding_mode="floor").expand(q.shape[0], -1) for x in positions))


def _attention(
    q, k, v, scale, causal, window_size, softcap, deterministic, return_lse, descales=(None, None, None), sink=None, chunk=0,
    **lengths,
):  # fmt: skip
    mask = _window(window_size, causal)
    if chunk:
        mask &= _chunks(chunk, q, k)
    named = {"mask": mask, "score": Score(softcap, sinks=sink), "scale": scale}
    if q.dtype.itemsize == 1:  # descales of 16 bits change nothing, as in FlashAttention-3
        named |= zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)
        return fp8.attention_fp8(q, k, v, return_lse=return_lse, **named, **lengths)
    return api.attention(q, k, v, return_lse=return_lse, deterministic=bool(deterministic), **named, **lengths)


# ---- FlashAttention-4


def _fa4_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
    aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    """FlashAttention-4's flash_attn_func: (out, lse), lse None unless return_lse.

    score_mod(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) and mask_mod(batch, head, q_idx, kv_idx, seqlen_info,
    aux_tensors) are functions in PyTorch's operators, as `strobe.flex_attention` reads them, not in the CuTe DSL; with
    aux_scalars they get these last. A mask_mod says all: causal and window_size are not looked at beside it, as in
    FlashAttention-4. score_mod_bwd is not needed: Strobe finds the derivative.
    """
    _check_unused(
        qv=qv, gather_kv_indices=gather_kv_indices, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    if score_mod is not None or mask_mod is not None:
        if score_mod is not None and softcap:
            raise ValueError(f"softcap must be left out beside score_mod, got {softcap}")
        beside = _beside_pairs(q.shape[1], k.shape[1], aux_tensors, aux_scalars)
        mask, n_kv, score, factor = read_functions(q, k, _score_of(score_mod, beside), _mask_of(mask_mod, beside))
        if mask_mod is None:
            mask = _window(window_size, causal)
        scale = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) * factor
        score = replace(score, softcap=score.softcap or softcap, sinks=learnable_sink)
        result = api.attention(
            q, k[:, :n_kv], v[:, :n_kv], mask=mask, score=score, scale=scale, return_lse=return_lse,
            deterministic=bool(deterministic),
        )  # fmt: skip
    else:
        result = _attention(
            q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_lse, sink=learnable_sink
        )
    return result if return_lse else (result, None)


def _beside_pairs(seqlen_q: int, seqlen_k: int, aux_tensors, aux_scalars) -> dict[str, Any]:
    """What FlashAttention-4 gives a function beside the pair, by the names under which a score_mod has it."""
    found = {"seqlen_info": SimpleNamespace(seqlen_q=seqlen_q, seqlen_k=seqlen_k), "aux_tensors": tuple(aux_tensors or ())}
    return found if aux_scalars is None else found | {"aux_scalars": tuple(aux_scalars)}


def _score_of(score_mod: Callable | None, beside: dict[str, Any]) -> Callable | None:
    """A score_mod as a function of the score and the pair alone."""
    if score_mod is None:
        return None
    return lambda score, batch, head, q_idx, kv_idx: score_mod(score, batch, head, q_idx=q_idx, kv_idx=kv_idx, **beside)


def _mask_of(mask_mod: Callable | None, beside: dict[str, Any]) -> Callable | None:
    """A mask_mod as a function of the pair alone."""
    if mask_mod is None:
        return None
    return lambda batch, head, q_idx, kv_idx: mask_mod(batch, head, q_idx, kv_idx, *beside.values())


def _fa4_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    """FlashAttention-4's flash_attn_varlen_func, of packed sequences: (out, lse), lse None unless return_lse. With a page_table
    k and v are pages, of which seqused_k are used, and there is no gradient. min_seqlen_k, scheduler_metadata and
    seqlen_k_per_split say nothing here: work is dealt out on the device."""
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            raise ValueError(f"{name} must be left out of packed sequences: pass a strobe.Score or a mask to strobe.attention")
    _check_unused(
        qv=qv, gather_kv_indices=gather_kv_indices, block_sparse_tensors=block_sparse_tensors,
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    if page_table is not None:
        result = flash.varlen_over_pages(
            q, k, v, cu_seqlens_q, page_table, seqused_k, max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, learnable_sink=learnable_sink, deterministic=deterministic,
            return_softmax_lse=return_lse, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
        )  # fmt: skip
    else:
        result = _attention(
            q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_lse, sink=learnable_sink,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
            seqused_q=seqused_q, seqused_kv=seqused_k,
        )  # fmt: skip
    return result if return_lse else (result, None)


fa4 = SimpleNamespace(flash_attn_func=_fa4_func, flash_attn_varlen_func=_fa4_varlen_func, flash_attn_combine=flash_attn_combine)
"""FlashAttention-4's functions, by their names."""
