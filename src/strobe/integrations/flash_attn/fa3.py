"""flash_attn_interface, FlashAttention-3's module, and flash_attn.cute, FlashAttention-4's: their functions in Strobe's terms.

They differ from FlashAttention-2's in the order of their arguments and in what they add. num_splits, pack_gqa, sm_margin and
scheduler_metadata choose among ways to the same result, which Strobe does itself: they are taken and say nothing here.
"""

from __future__ import annotations

from types import SimpleNamespace

from strobe import api, fp8
from strobe.masks import Window
from strobe.scores import Score

_NO_WINDOW = (-1, -1)


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=_NO_WINDOW,
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """FlashAttention-3's function of this name: out, or (out, softmax_lse) with return_attn_probs."""
    _check_unused(qv=qv, attention_chunk=attention_chunk)
    return _attention(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        (q_descale, k_descale, v_descale),
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
    _check_unused(attention_chunk=attention_chunk)
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(f"qkv must have shape [batch, seqlen, 3, heads, head_dim], got {list(qkv.shape)}")
        q, k, v = qkv.unbind(2)
    else:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads_kv, heads_kv), 2)
    return _attention(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        (q_descale, k_descale, v_descale),
    )


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """One attention from several over parts of the keys: out_partial [parts, batch, seqlen, heads, D], lse_partial
    [parts, batch, seqlen, heads]. Returns (out, lse), out in out_dtype (default: that of the parts)."""
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse.masked_fill(lse.isneginf(), 0.0)).exp().unsqueeze(-1)
    result = (out_partial.to(lse.dtype) * weights).sum(0).to(out_dtype or out_partial.dtype)
    return (result if out is None else out.copy_(result)), lse


def _check_unused(**arguments) -> None:
    reasons = {
        "qv": "a second product with the values is not computed",
        "attention_chunk": "chunks are document numbers, strobe.Document",
        "score_mod": "a function of the CuTe DSL is not read: pass a Python function as strobe.Score(function=...)",
        "mask_mod": "a function of the CuTe DSL is not read: pass a Python function as strobe.Visible(...)",
        "block_sparse_tensors": "tables of blocks are not read: a strobe.Mask finds its blocks itself",
        "aux_tensors": "they are for functions of the CuTe DSL, which are not read",
        "page_table": "paged keys are not read by this function",
    }
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise ValueError(f"{name} must be left out: {reasons[name]}")


def _attention(
    q, k, v, scale, causal, window_size, softcap, deterministic, return_lse, descales=(None, None, None), sink=None, **lengths
):  # fmt: skip
    left, right = (None if side is None or side < 0 else side for side in window_size)
    mask = Window(left, 0 if causal else right)
    if any(x is not None for x in descales) or q.dtype.itemsize == 1:
        used = [lengths.pop(name, None) for name in ("seqused_q", "seqused_kv")]
        if softcap or sink is not None or any(x is not None for x in used):
            raise ValueError("e4m3 goes without softcap, sinks and used lengths")
        named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        return fp8.attention_fp8(q, k, v, **named, mask=mask, scale=scale, return_lse=return_lse, **lengths)
    return api.attention(
        q, k, v, mask=mask, score=Score(softcap, sinks=sink), scale=scale, return_lse=return_lse,
        deterministic=bool(deterministic), **lengths,
    )  # fmt: skip


# ---- FlashAttention-4


def _fa4_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, score_mod=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None,
    return_lse=False,
):  # fmt: skip
    """FlashAttention-4's flash_attn_func: (out, lse), lse None unless return_lse."""
    _check_unused(
        score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors or None
    )
    result = _attention(q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_lse, sink=learnable_sink)
    return result if return_lse else (result, None)


def _fa4_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
    page_table=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, mask_mod=None, block_sparse_tensors=None,
    cu_total_m_blocks=None, cu_total_n_blocks=None, aux_tensors=None, return_lse=False,
):  # fmt: skip
    """FlashAttention-4's flash_attn_varlen_func, of packed sequences: (out, lse), lse None unless return_lse."""
    _check_unused(
        score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors or None,
        page_table=page_table,
    )  # fmt: skip
    result = _attention(
        q, k, v, softmax_scale, causal, window_size, softcap, deterministic, return_lse, sink=learnable_sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
        seqused_q=seqused_q, seqused_kv=seqused_k,
    )  # fmt: skip
    return result if return_lse else (result, None)


fa4 = SimpleNamespace(flash_attn_func=_fa4_func, flash_attn_varlen_func=_fa4_varlen_func, flash_attn_combine=flash_attn_combine)
"""FlashAttention-4's functions, by their names."""
