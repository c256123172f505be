"""What users call. Every argument is checked before anything is launched (`strobe.arguments`). flash-attn's functions keep
flash-attn's signatures, layouts and returns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch

from strobe import fp8, jagged
from strobe.arguments import checked_options, options_of, wants_gradient
from strobe.call import derivatives as derivatives  # which defines the operators
from strobe.call import dispatch, prepared_calls
from strobe.call.operators import call_forward
from strobe.call.options import Options, describe, learned_of, operands_of
from strobe.call.torch_internals import any_autocast, has_autocast
from strobe.checks import check_tensor
from strobe.device import arch_of
from strobe.dropout import new_seed
from strobe.flash_arguments import NO_WINDOW, flash_mask, flash_score
from strobe.kernels.sm90 import backend as sm90
from strobe.masks import Mask
from strobe.scores import Score
from strobe.serving import flash as serving
from strobe.serving.arguments import check_out
from strobe.serving.arguments import checked as checked_decode
from strobe.serving.cache import Cache
from strobe.serving.flash_terms import one_of, sink_without_pages
from strobe.serving.problem import DecodeProblem
from strobe.serving.problem import describe as describe_decode

_AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None = None, score: Score | None = None,
    scale: float | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None, dropout_p: float = 0.0, return_lse: Literal[False] = False,
    deterministic: bool = False, backend: str | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None = None, score: Score | None = None,
    scale: float | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None, dropout_p: float = 0.0, return_lse: Literal[True],
    deterministic: bool = False, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None = None, score: Score | None = None,
    scale: float | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None, dropout_p: float = 0.0, return_lse: bool,
    deterministic: bool = False, backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(score(scale * q k^T), mask) v, differentiable in q, k, v, with its LSE if asked.

    Under torch.func's transforms and forward-mode AD it is as PyTorch's own functions are, but has no second derivative
    (NotImplementedError). The forward-mode derivative is computed in plain PyTorch, tile by tile, in O(length) memory; on a GPU
    that of packed sequences or used lengths waits for the device.

    Under torch.autocast, q, k, v and a bias of 16 bits are cast to its dtype first, as scaled_dot_product_attention casts them.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; packed: [total_q, heads_q, head_dim]. float16, bfloat16, float32 (float64
            on a CPU). Any strides with a contiguous last dim; head_dim a multiple of 8 up to 256. Or a nested tensor with
            layout=torch.jagged, [batch, jagged, heads_q, head_dim], as k and v are then: packed sequences that bring their
            bounds, which cu_seqlens, max_seqlen and seqused are left out for.
        k: as q, with seqlen_kv and heads_kv, which divides heads_q (GQA, MQA).
        v: as k; its head dim may differ.
        mask: Full() (the default), Causal(), Window(...), Prefix(...), Document(...), Visible(function), or several
            joined by `&`. Aligned bottom-right: the last query stands on the last key.
        score: Score(softcap=..., alibi=..., bias=..., sinks=..., function=..., function_gradient=...). The bias and the sinks
            have gradients too.
        scale: default 1 / sqrt(head_dim); at most 2^127 in size.
        cu_seqlens_q, cu_seqlens_kv: int32 [batch + 1] on q's device: the bounds of packed sequences.
        max_seqlen_q, max_seqlen_kv: the longest sequences; default: the totals, which is safe and launches more. Ints, or what
            stands for one, as a tensor of one element does (for one on a GPU the call waits). Of a longer sequence a GPU
            looks at so many rows.
        seqused_q, seqused_kv: int32 [batch] on q's device: how many rows of q, and keys, of each batch entry (or packed
            sequence) are used. Masks are aligned to these; rows of q beyond give 0 and LSE -inf, keys beyond are not read.
        dropout_p: the share of the weights that is dropped, from 0 to below 1, the others being divided by what is left
            (the LSE is that of all). What is dropped follows from a seed that torch's default generator of q's device draws,
            and is the same in every backend (`strobe.dropout_mask`).
        return_lse: also return log(sum(exp(scores))), float32, [batch, heads_q, seqlen_q] or [heads_q, total_q];
            it has a gradient.
        deterministic: gradients that are the same bits in every run, as also under torch.use_deterministic_algorithms(True).
            The portable backend and those for a CPU give that always, but for a bias with a dim of 1 on a GPU, whose gradient
            takes memory for every pair then, [batch, heads_q, seqlen_q, seqlen_kv] in float32, until it is summed.
        backend: a name from `strobe.BACKENDS` to run that one or fail; None lets Strobe choose (see `explain`).

    Returns:
        out, shaped (and nested) as q with v's head dim; or (out, lse). A row that sees no key gives 0, LSE -inf (with sinks:
        its sink) and zero gradients. A gradient through a score function needs its derivative, and is refused without when it
        is asked for.

    Raises:
        ValueError, TypeError: naming the argument, before any launch.
    """
    if any_autocast() and not _is_cast(q, k, v, score):
        q, k, v, score = autocast(q, k, v, score)
    call = (
        q, k, v, mask, score, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv,
        deterministic, backend,
    )  # fmt: skip
    result = prepared_calls.attention(checked_options, call, dropout_p, return_lse)
    if result is None:
        if jagged.any_jagged(q, k, v):
            return jagged.attention(
                attention, q, k, v, return_lse, mask=mask, score=score, scale=scale, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, seqused_q=seqused_q,
                seqused_kv=seqused_kv, dropout_p=dropout_p, deterministic=deterministic, backend=backend,
            )  # fmt: skip
        options = checked_options(*call, dropout_p)
        if options.dropout:
            options = replace(options, seed=new_seed(q.device))
        result = call_forward(q, k, v, options)
    out, lse = result
    return (out, lse) if return_lse else out


def _is_cast(q, k, v, score: Score | None) -> bool:
    """Whether autocast leaves a call as it is, since the layers before gave q, k and v its dtype: on a GPU, where a microsecond
    of the seven that `autocast` takes is enough to see it."""
    try:
        return score is None and q.is_cuda and q.dtype == k.dtype == v.dtype == torch.get_autocast_dtype("cuda")
    except AttributeError:  # no tensor
        return False


def autocast(q, k, v, score: Score | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Score | None]:
    """What torch.autocast makes of a call: q, k, v and a bias of 16 bits in its dtype, as it does for PyTorch's attention.
    float64 stays; so do a bias and sinks in float32, which are added in float32."""
    kind = q.device.type if isinstance(q, torch.Tensor) else ""
    if not (kind and any_autocast() and has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return q, k, v, score
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if getattr(x, "dtype", None) in _AUTOCAST else x for x in (q, k, v))
    bias = score.bias if isinstance(score, Score) else None
    if isinstance(score, Score) and isinstance(bias, torch.Tensor) and bias.dtype in (torch.float16, torch.bfloat16):
        score = replace(score, bias=bias.to(dtype))
    return q, k, v, score


def use_optimistic_softmax(use: bool) -> None:
    """Whether Hopper's forward may take the optimistic softmax (it does by default): False for the safe one, with a running
    maximum, from the next call on. The results agree within the precision of the dtype (docs/optimistic_softmax.md)."""
    if not isinstance(use, bool):
        raise TypeError(f"use_optimistic_softmax takes True or False, got {use!r}")
    sm90.use_optimistic_softmax(use)
    prepared_calls.forget()


def explain(
    q: torch.Tensor, k: torch.Tensor | Cache, v: torch.Tensor | None = None, *, backend: str | None = None, **keywords
) -> dispatch.Explanation:
    """Print, and return, which kernel runs `attention(q, k, v, **keywords)`, with what config, and why the others do not; of
    e4m3 inputs, which runs `attention_fp8`; of `explain(q, cache, ...)`, which runs `decode`.

    With inputs that require gradients, the choice for the backward is printed and returned as `.backward`.
    """
    explanation = explained(q, k, v, backend=backend, **keywords)
    print(explanation)
    return explanation


def explained(
    q: torch.Tensor, k: torch.Tensor | Cache, v: torch.Tensor | None = None, *, backend: str | None = None, **keywords
) -> dispatch.Explanation:
    """What `explain` prints."""
    if isinstance(k, Cache):
        return dispatch.explain_problem(_decode_problem(q, k, v, backend, keywords), arch_of(q.device), backend)
    assert v is not None
    q, k, v, options = _asked(q, k, v, backend, keywords)
    operands, arch = operands_of(q, k, v, options), arch_of(q.device)
    explanation = dispatch.explain_problem(describe(operands, options), arch, backend)
    if wants_gradient(q, k, v, options.bias, options.sinks):
        problem = describe(operands, options, "backward", learned_of(options))
        explanation = replace(explanation, backward=dispatch.explain_problem(problem, arch, backend))
    return explanation


def supports(
    q: torch.Tensor, k: torch.Tensor | Cache, v: torch.Tensor | None = None, *, backend: str | None = None, **keywords
) -> tuple[bool, list[str]]:
    """Whether `attention(q, k, v, **keywords)` runs here (or on `backend`), and each backend's reason if it does not; of e4m3
    inputs, whether `attention_fp8` does; of `supports(q, cache, ...)`, whether `decode` does.

    Bad arguments are a reason too; this never raises for them.
    """
    try:
        if isinstance(k, Cache):
            problem = _decode_problem(q, k, v, backend, keywords)
            explanation = dispatch.explain_problem(problem, arch_of(q.device), backend)
            return explanation.chosen is not None, [f"{name}: {reason}" for name, reason in explanation.refusals]
        q, k, v, options = _asked(q, k, v, backend, keywords)
    except (TypeError, ValueError) as error:
        return False, [str(error)]
    explanation = dispatch.explain_problem(describe(operands_of(q, k, v, options), options), arch_of(q.device), backend)
    return explanation.chosen is not None, [f"{name}: {reason}" for name, reason in explanation.refusals]


def _decode_problem(q, cache: Cache, v, backend: str | None, keywords: dict) -> DecodeProblem:
    """What `decode` makes of its arguments."""
    if v is not None:
        raise TypeError("v must be left out: the cache holds the values")
    return describe_decode(*checked_decode(q, cache, backend=backend, **keywords))


def _asked(q, k, v, backend: str | None, keywords: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Options]:
    """What `attention`, or of e4m3 inputs `attention_fp8`, makes of its arguments."""
    if getattr(q, "dtype", None) == torch.float8_e4m3fn:
        return q, k, v, fp8.checked(q, k, v, backend=backend, **keywords)
    q, k, v, score = autocast(q, k, v, keywords.get("score"))
    keywords = {**keywords, "score": score}
    if jagged.any_jagged(q, k, v):
        q, k, v, keywords = jagged.packed(q, k, v, **keywords)
    return q, k, v, options_of(q, k, v, backend=backend, **keywords)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=NO_WINDOW, softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, *, learnable_sink=None,
) -> Any:  # fmt: skip
    """flash-attn's function of this name. q [batch, seqlen_q, heads_q, D], k and v [batch, seqlen_k, heads_kv, D].

    causal=True forces the window's right side to 0, as flash-attn does. deterministic: see `attention`.
    learnable_sink: FlashAttention-4's argument, [heads_q], the sinks of `strobe.Score`.
    Returns out, or (out, softmax_lse, S_dmask) with return_attn_probs, where S_dmask is empty: `strobe.dropout_mask` says what
    was dropped.
    """
    mask = flash_mask(causal, window_size)
    score = flash_score(softcap, alibi_slopes, learnable_sink)
    result = attention(
        q, k, v, mask=mask, score=score, scale=softmax_scale, dropout_p=dropout_p, return_lse=return_attn_probs,
        deterministic=bool(deterministic),
    )  # fmt: skip
    return _flash_result(result, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=NO_WINDOW, softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
) -> Any:  # fmt: skip
    """flash-attn's function of this name. qkv [batch, seqlen, 3, heads, D]; nothing is copied."""
    _check_packed("qkv", qkv, 3)
    return flash_attn_func(
        qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=NO_WINDOW, softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
) -> Any:  # fmt: skip
    """flash-attn's function of this name. q [batch, seqlen_q, heads_q, D], kv [batch, seqlen_k, 2, heads_kv, D]."""
    _check_packed("kv", kv, 2)
    return flash_attn_func(
        q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=NO_WINDOW, softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None, *, page_table=None, seqused_q=None, seqused_k=None, learnable_sink=None, out=None,
    return_softmax_lse=False, **paged,
) -> Any:  # fmt: skip
    """flash-attn's function of this name. q [total_q, heads_q, D], k and v [total_k, heads_kv, D], packed sequences.

    seqused_q, seqused_k: FlashAttention-3's arguments, int32 [batch], the rows and keys of each sequence that are used.
    learnable_sink: FlashAttention-4's, [heads_q], the sinks of `strobe.Score`.
    softmax_lse is [heads_q, total_q]. Rows of q that belong to no sequence, or are not used, give 0.

    block_table: int32 [batch, pages of a sequence]: k and v are pages [pages, page_size, heads_kv, D] then, of which seqused_k
        or the differences of cu_seqlens_k say how many keys are used. It has vLLM's keywords out, s_aux, k_descale, v_descale,
        num_splits and more (see `strobe.serving.flash.varlen_over_pages`), and no gradient. page_table is the same.
    out: where to write the result, without a gradient; without a block_table it is copied there. return_softmax_lse: return
        (out, softmax_lse). Without a block_table s_aux is learnable_sink; fa_version, num_splits and the like change nothing,
        nor do descales of what has 16 bits; all else of vLLM's is refused.
    """
    if page_table is not None:
        block_table = one_of("block_table", block_table, "page_table", page_table)
    if block_table is not None:
        return serving.varlen_over_pages(
            q, k, v, cu_seqlens_q, block_table, seqused_k, max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, out=out,
            deterministic=deterministic, return_softmax_lse=return_softmax_lse or return_attn_probs, dropout_p=dropout_p,
            seqused_q=seqused_q, cu_seqlens_k=cu_seqlens_k, **paged,
        )  # fmt: skip
    learnable_sink = sink_without_pages(q, learnable_sink, **paged)
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if value is None:
            raise TypeError(f"{name} must be an int32 tensor, got None")
    if out is not None:
        for name, x in (("q", q), ("v", v)):
            check_tensor(name, x)
        check_out(out, q, v.shape[-1])
        if wants_gradient(q, k, v, learnable_sink):
            raise ValueError("out must be left out where a gradient is asked for: call it under torch.no_grad()")
    result = attention(
        q, k, v, mask=flash_mask(causal, window_size), score=flash_score(softcap, alibi_slopes, learnable_sink),
        scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k, seqused_q=seqused_q, seqused_kv=seqused_k, dropout_p=dropout_p,
        return_lse=return_attn_probs or return_softmax_lse, deterministic=bool(deterministic),
    )  # fmt: skip
    if out is not None:
        result = out.copy_(result) if isinstance(result, torch.Tensor) else (out.copy_(result[0]), result[1])
    return result if return_softmax_lse else _flash_result(result, return_attn_probs)


# ---- flash-attn's results and packed inputs


def _flash_result(result, return_attn_probs: bool):
    if not return_attn_probs:
        return result
    out, lse = result
    return out, lse, out.new_empty(0)


def _check_packed(name: str, x: torch.Tensor, parts: int) -> None:
    check_tensor(name, x)
    if x.dim() != 5 or x.shape[2] != parts:
        raise ValueError(f"{name} must have shape [batch, seqlen, {parts}, heads, head_dim], got {list(x.shape)}")
