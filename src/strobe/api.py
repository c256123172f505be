"""What users call. Every argument is checked here, before anything is launched: one sentence, what was given, what is
allowed. flash-attn's functions keep flash-attn's signatures, layouts and returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from strobe import dispatch, eager, ops
from strobe.device import arch_of
from strobe.dropout import check_probability, new_seed
from strobe.functions import Function
from strobe.masks import Causal, Mask, Window
from strobe.scores import Score

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; packed: [total_q, heads_q, head_dim]. float16, bfloat16, float32 (float64
            on a CPU). Any strides with a contiguous last dim; head_dim a multiple of 8 up to 256.
        k: as q, with seqlen_kv and heads_kv, which divides heads_q (GQA, MQA).
        v: as k; its head dim may differ.
        mask: Full() (the default), Causal(), Window(...), Prefix(...), Document(...), Visible(function), or several
            joined by `&`. Aligned bottom-right: the last query stands on the last key.
        score: Score(softcap=..., alibi=..., bias=..., sinks=..., function=..., function_gradient=...). The bias and the sinks
            have gradients too.
        scale: default 1 / sqrt(head_dim).
        cu_seqlens_q, cu_seqlens_kv: int32 [batch + 1] on q's device: the bounds of packed sequences.
        max_seqlen_q, max_seqlen_kv: the longest sequences; default: the totals, which is safe and launches more.
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
        out, shaped as q with v's head dim; or (out, lse). A row that sees no key gives 0, LSE -inf (with sinks: its sink) and
        zero gradients. A gradient through a score function needs its derivative, and is refused without when it is asked for.

    Raises:
        ValueError, TypeError: naming the argument, before any launch.
    """
    call = (
        q, k, v, mask, score, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv,
        deterministic, backend,
    )  # fmt: skip
    result = eager.attention(_options, call, dropout_p, return_lse)
    if result is None:
        options = _options(*call, dropout_p)
        if options.dropout:
            options = replace(options, seed=new_seed(q.device))
        result = torch.ops.strobe.forward(q, k, v, *options.arguments())
    out, lse = result
    return (out, lse) if return_lse else out


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str | None = None, **keywords
) -> dispatch.Explanation:
    """Print, and return, which kernel runs `attention(q, k, v, **keywords)`, with what config, and why the others do not.

    With inputs that require gradients, the choice for the backward is printed and returned as `.backward`.
    """
    options = _options_of(q, k, v, backend=backend, **keywords)
    explanation = dispatch.explain_problem(ops.describe(q, k, v, options), arch_of(q.device), backend)
    if _wants_gradient(q, k, v, options.bias, options.sinks):
        problem = ops.describe(q, k, v, options, "backward", ops.learned_of(options))
        backward = dispatch.explain_problem(problem, arch_of(q.device), backend)
        explanation = replace(explanation, backward=backward)
    print(explanation)
    return explanation


def supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str | None = None, **keywords
) -> tuple[bool, list[str]]:
    """Whether `attention(q, k, v, **keywords)` runs here (or on `backend`), and each backend's reason if it does not.

    Bad arguments are a reason too; this never raises for them.
    """
    try:
        options = _options_of(q, k, v, backend=backend, **keywords)
    except (TypeError, ValueError) as error:
        return False, [str(error)]
    explanation = dispatch.explain_problem(ops.describe(q, k, v, options), arch_of(q.device), backend)
    return explanation.chosen is not None, [f"{name}: {reason}" for name, reason in explanation.refusals]


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, *, learnable_sink=None,
):  # fmt: skip
    """flash-attn's function of this name. q [batch, seqlen_q, heads_q, D], k and v [batch, seqlen_k, heads_kv, D].

    causal=True forces the window's right side to 0, as flash-attn does. deterministic: see `attention`.
    learnable_sink: FlashAttention-4's argument, [heads_q], the sinks of `strobe.Score`.
    Returns out, or (out, softmax_lse, S_dmask) with return_attn_probs, where S_dmask is empty: `strobe.dropout_mask` says what
    was dropped.
    """
    mask = _flash_mask(causal, window_size)
    score = _score(softcap, alibi_slopes, learnable_sink)
    result = attention(
        q, k, v, mask=mask, score=score, scale=softmax_scale, dropout_p=dropout_p, return_lse=return_attn_probs,
        deterministic=bool(deterministic),
    )  # fmt: skip
    return _flash_result(result, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn's function of this name. qkv [batch, seqlen, 3, heads, D]; nothing is copied."""
    _check_packed("qkv", qkv, 3)
    return flash_attn_func(
        qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn's function of this name. q [batch, seqlen_q, heads_q, D], kv [batch, seqlen_k, 2, heads_kv, D]."""
    _check_packed("kv", kv, 2)
    return flash_attn_func(
        q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    *, seqused_q=None, seqused_k=None, learnable_sink=None,
):  # fmt: skip
    """flash-attn's function of this name. q [total_q, heads_q, D], k and v [total_k, heads_kv, D], packed sequences.

    seqused_q, seqused_k: FlashAttention-3's arguments, int32 [batch], the rows and keys of each sequence that are used.
    learnable_sink: FlashAttention-4's, [heads_q], the sinks of `strobe.Score`.
    softmax_lse is [heads_q, total_q]. Rows of q that belong to no sequence, or are not used, give 0.
    """
    if block_table is not None:
        raise ValueError("block_table must be None: paged keys are not supported yet")
    for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if value is None:
            raise TypeError(f"{name} must be an int32 tensor, got None")
    result = attention(
        q, k, v, mask=_flash_mask(causal, window_size), score=_score(softcap, alibi_slopes, learnable_sink),
        scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k, seqused_q=seqused_q, seqused_kv=seqused_k, dropout_p=dropout_p,
        return_lse=return_attn_probs, deterministic=bool(deterministic),
    )  # fmt: skip
    return _flash_result(result, return_attn_probs)


# ---- flash-attn's arguments in Strobe's terms


def _flash_mask(causal: bool, window_size: Sequence[int]) -> Mask | None:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}") from None
    for side in (left, right):
        if not isinstance(side, int) or isinstance(side, bool):
            raise TypeError(f"window_size must hold two ints, got {window_size!r}")
        if side < -1:
            raise ValueError(f"window_size must hold -1 (no bound) or sizes >= 0, got {window_size!r}")
    if causal:
        right = 0
    if left < 0 and right <= 0:
        return Causal() if right == 0 else None
    return Window(left if left >= 0 else None, right if right >= 0 else None)


def _score(softcap: float, alibi_slopes: torch.Tensor | None, learnable_sink: torch.Tensor | None) -> Score | None:
    if not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number, got {type(softcap).__name__}")
    if softcap == 0 and alibi_slopes is None and learnable_sink is None:
        return None
    return Score(softcap=float(softcap), alibi=alibi_slopes, sinks=learnable_sink)


def _flash_result(result, return_attn_probs: bool):
    if not return_attn_probs:
        return result
    out, lse = result
    return out, lse, out.new_empty(0)


def _check_packed(name: str, x: torch.Tensor, parts: int) -> None:
    _check_tensor(name, x)
    if x.dim() != 5 or x.shape[2] != parts:
        raise ValueError(f"{name} must have shape [batch, seqlen, {parts}, heads, head_dim], got {list(x.shape)}")


# ---- checks


def _options_of(
    q, k, v, *, mask=None, score=None, scale=None, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None,
    max_seqlen_kv=None, seqused_q=None, seqused_kv=None, dropout_p=0.0, return_lse=False, deterministic=False, backend=None,
) -> ops.Options:  # fmt: skip
    """`_options` from `attention`'s keywords, for `explain` and `supports`."""
    return _options(
        q, k, v, mask, score, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv,
        deterministic, backend, dropout_p,
    )  # fmt: skip


def _options(
    q, k, v, mask, score, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv, deterministic,
    backend, dropout_p=0.0,
) -> ops.Options:  # fmt: skip
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
    batch = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    _check_seqused("seqused_q", seqused_q, batch, q)
    _check_seqused("seqused_k", seqused_kv, batch, q)
    _check_alibi(score.alibi, batch, q)
    _check_bias(score.bias, q, k, packed)
    _check_sinks(score.sinks, q)
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False, got {type(deterministic).__name__}")
    check_probability("dropout_p", dropout_p)
    if backend is not None:
        _check_backend(backend, q, k, v, score.bias, score.sinks)
    return ops.Options(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_q=max_seqlen_q or 0,
        max_kv=max_seqlen_kv or 0,
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
        scale=_check_scale(scale, q.shape[-1]),
        left=mask.left,
        right=mask.right,
        prefix=mask.prefix,
        document_q=documents.q if documents else None,
        document_kv=documents.kv if documents else None,
        mask_function=_key(mask.function),
        softcap=score.softcap,
        alibi=score.alibi,
        bias=score.bias,
        sinks=score.sinks,
        score_function=_key(score.function),
        score_gradient=_key(score.function_gradient),
        dropout=float(dropout_p),
        deterministic=deterministic,
        backend=backend,
    )


def _key(function: Function | Callable | None) -> str | None:
    """How the operator takes a function, which a Mask or a Score made a Function."""
    return function.key if isinstance(function, Function) else None


def _check_tensor(name: str, x) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _check_qkv(q, k, v, packed: bool) -> None:
    rank, layout = (3, "[total, heads, head_dim]") if packed else (4, "[batch, seqlen, heads, head_dim]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
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
        _check_tensor(name, cu)
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
    if isinstance(value, (bool, float, torch.Tensor)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
    return value


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


def _check_alibi(alibi: torch.Tensor | None, batch: int, q) -> None:
    if alibi is None:
        return
    _check_tensor("alibi_slopes", alibi)
    if alibi.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {alibi.dtype}")
    heads = q.shape[-2]
    by_sequence = alibi.dim() == 2 and alibi.shape[0] == batch
    if not (alibi.dim() == 1 or by_sequence) or alibi.shape[-1] != heads:
        raise ValueError(f"alibi_slopes must have shape [{heads}] or [{batch}, {heads}], got {list(alibi.shape)}")
    if alibi.device != q.device:
        raise ValueError(f"alibi_slopes must be on q's device {q.device}, got {alibi.device}")
    if alibi.requires_grad:
        raise ValueError("alibi_slopes must not require a gradient: Strobe has none for them; pass alibi_slopes.detach()")


def _check_bias(bias: torch.Tensor | None, q, k, packed: bool) -> None:
    if bias is None:
        return
    _check_tensor("bias", bias)
    if packed:
        raise ValueError("bias goes with dense q, k, v, got packed sequences: a score function may compute it instead")
    if bias.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"bias must be float32 or have q's dtype {q.dtype}, got {bias.dtype}")
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias.dim() != 4 or any(n != 1 and n != full for n, full in zip(bias.shape, shape, strict=True)):
        raise ValueError(f"bias must have shape {list(shape)}, any of which may be 1, got {list(bias.shape)}")
    _check_parameter("bias", bias, q)


def _check_sinks(sinks: torch.Tensor | None, q) -> None:
    if sinks is None:
        return
    _check_tensor("sinks", sinks)
    if sinks.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"sinks must be float32, bfloat16 or float16, got {sinks.dtype}")
    if tuple(sinks.shape) != (q.shape[-2],):
        raise ValueError(f"sinks must have shape [{q.shape[-2]}], got {list(sinks.shape)}")
    _check_parameter("sinks", sinks, q)


def _check_parameter(name: str, x: torch.Tensor, q) -> None:
    """A tensor that a model may have learned."""
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def _check_seqused(name: str, used: torch.Tensor | None, batch: int, q) -> None:
    if used is None:
        return
    _check_tensor(name, used)
    if used.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {used.dtype}")
    if tuple(used.shape) != (batch,) or not used.is_contiguous():
        raise ValueError(f"{name} must be contiguous with shape [{batch}], got {list(used.shape)}")
    if used.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {used.device}")


def _check_scale(scale, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"softmax_scale must be a number or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite, got {scale}")
    return float(scale)


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _check_backend(backend: str, *tensors: torch.Tensor | None) -> None:
    if backend not in dispatch.BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(dispatch.BACKENDS)} or None, got {backend!r}")
    if backend in dispatch.FORWARD_ONLY and _wants_gradient(*tensors):
        raise ValueError(
            f"backend {backend!r} has no backward, and q, k or v (or a bias or sinks) require gradients: call it under "
            "torch.no_grad(), "
            "or leave backend=None and the best backward is chosen"
        )
