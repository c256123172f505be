"""Attention of e4m3 inputs, each with its descale: on a Hopper GPU by its own kernel, on a CPU by what they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch
from torch.autograd import forward_ad

from strobe.arguments import options_of
from strobe.call import prepared_calls
from strobe.call.options import Options, describe, operands_of
from strobe.call.torch_internals import is_batched
from strobe.checks import check_tensor
from strobe.cpu.by_value import DESCALE_ROWS
from strobe.masks import Mask
from strobe.problem import AttentionProblem
from strobe.scores import Score

E4M3 = torch.float8_e4m3fn


@overload
def attention_fp8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, mask: Mask | None = None,
    score: Score | None = None, scale: float | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
    seqused_q: torch.Tensor | None = None, seqused_kv: torch.Tensor | None = None, backend: str | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention_fp8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, mask: Mask | None = None,
    score: Score | None = None, scale: float | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
    seqused_q: torch.Tensor | None = None, seqused_kv: torch.Tensor | None = None, backend: str | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def attention_fp8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, mask: Mask | None = None,
    score: Score | None = None, scale: float | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
    seqused_q: torch.Tensor | None = None, seqused_kv: torch.Tensor | None = None, backend: str | None = None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_kv: torch.Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`strobe.attention` of q * q_descale, k * k_descale and v * v_descale, given in e4m3. It has no
    gradient: what requires one is refused.

    Args:
        q, k, v: float8_e4m3fn, shaped as `strobe.attention` takes them. On a GPU head_dim is 64, 128 or 256, also of v; by
            name any multiple of 16 up to 256.
        q_descale, k_descale, v_descale: float32 on q's device, positive for q and k; None is 1.
            Per head, as in FlashAttention-3: [batch, heads_kv], also of q, whose heads share that of their key head.
            By blocks of 128 rows, of q and k if they are not packed: [batch, heads_q, ceil(seqlen_q / 128)],
            [batch, heads_kv, ceil(seqlen_kv / 128)].
        mask, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, return_lse: as `strobe.attention` takes them.
            On a GPU no documents and no mask function.
        score, seqused_q, seqused_kv: as `strobe.attention` takes them; on a GPU softcap and sinks.
        backend: "sm90_fp8" or "by_value", to run that one or fail; None lets Strobe choose.

    Returns:
        out, bfloat16; or (out, lse), lse float32. On a GPU the weights of the values are rounded to e4m3 (docs/fp8.md).

    Raises:
        ValueError, TypeError: naming the argument, before any launch, or the reason why the kernel does not take the problem.
    """
    call = (
        q, k, v, mask, score, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv, False,
        backend,
    )  # fmt: skip
    descales = _contiguous(q_descale), _contiguous(k_descale), _contiguous(v_descale)

    def check(q, k, v, mask, score, scale, cu_q, cu_kv, max_q, max_kv, used_q, used_kv, _same, backend, *_dropout) -> Options:
        keywords = {"mask": mask, "score": score, "scale": scale, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
        keywords |= {"max_seqlen_q": max_q, "max_seqlen_kv": max_kv, "seqused_q": used_q, "seqused_kv": used_kv}
        return checked(q, k, v, *descales, backend=backend, **keywords)

    found = prepared_calls.attention(check, call, 0.0, return_lse, descales)
    if found is None:
        found = torch.ops.strobe.forward(q, k, v, *check(*call).arguments())
    out, lse = found
    return (out, lse) if return_lse else out


def checked(q, k, v, q_descale=None, k_descale=None, v_descale=None, *, backend=None, **keywords) -> Options:
    """The operator's checked options. keywords: those of `strobe.attention` that `attention_fp8` has too."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype != E4M3:
            raise TypeError(f"{name} must be float8_e4m3fn, got {x.dtype}")
        _check_plain(name, x)
        if x.dim() and x.stride(-1) != 1:  # the tensors below have no strides of their own
            raise ValueError(f"{name} must be contiguous in its last dim (stride 1), got stride {x.stride(-1)}")
    for name in ("alibi", "bias", "sinks"):
        x = getattr(keywords.get("score"), name, None)
        if isinstance(x, torch.Tensor):
            _check_plain(f"score: {name}", x)
    # `attention` checks the rest, on tensors of the same shapes that take no memory
    shapes = [x.new_empty(x.shape[-1:], dtype=torch.bfloat16).expand(x.shape) for x in (q, k, v)]
    options = options_of(*shapes, backend=backend, **keywords)
    problem = describe(operands_of(q, k, v, options), options)
    return replace(
        options,
        q_descale=_checked("q_descale", q_descale, q, problem, problem.heads_q, problem.lengths.seqlen_q),
        k_descale=_checked("k_descale", k_descale, q, problem, problem.heads_kv, problem.lengths.seqlen_kv),
        v_descale=_checked("v_descale", v_descale, q, problem),
    )


def _check_plain(name: str, x: torch.Tensor) -> None:
    """A result without a gradient, of what requires one, would train nothing without a word."""
    if is_batched(x):
        raise ValueError(f"{name} must not be batched by vmap, which attention_fp8 does not know: make it part of the batch")
    if (torch.is_grad_enabled() and x.requires_grad) or forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(
            f"{name} must not require a gradient: attention_fp8 has none; detach it, or call under torch.no_grad()"
        )


def _checked(name: str, x, q: torch.Tensor, problem: AttentionProblem, heads=0, rows=0) -> torch.Tensor | None:
    """A descale, contiguous. heads, rows: of what may have a descale for each block of rows."""
    if x is None:
        return None
    check_tensor(name, x)
    _check_plain(name, x)
    if x.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    batch = problem.lengths.batch
    allowed = [[batch, problem.heads_kv]]
    if heads and not problem.varlen:
        allowed.append([batch, heads, -(-rows // DESCALE_ROWS)])
    if list(x.shape) not in allowed:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, allowed))}, got {list(x.shape)}")
    return _contiguous(x)


def _contiguous(x):
    """A descale as kernels take it; what is none is refused later, by `_checked`."""
    plain = isinstance(x, torch.Tensor) and not x.is_nested and x.layout is torch.strided
    return x.contiguous() if plain else x
