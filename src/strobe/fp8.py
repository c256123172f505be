"""Attention of e4m3 inputs, each with its descale: on a Hopper GPU by its own kernel, on a CPU by what they stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from strobe import api, ops
from strobe.device import Arch, arch_of
from strobe.kernels import has_triton
from strobe.masks import MAX_BOUND, Mask
from strobe.problem import AttentionProblem, Operands, Varlen, lse_shape

E4M3 = torch.float8_e4m3fn

DESCALE_ROWS = 128
"""Rows of q or k that share a descale, where a head has many."""


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`strobe.attention` of q * q_descale, k * k_descale and v * v_descale, given in e4m3. It has no gradient.

    Args:
        q, k, v: float8_e4m3fn, shaped as `strobe.attention` takes them. On a GPU head_dim is 64, 128 or 256, also of v.
        q_descale, k_descale, v_descale: float32 on q's device, positive for q and k; None is 1.
            Per head, as in FlashAttention-3: [batch, heads_kv], also of q, whose heads share that of their key head.
            By blocks of 128 rows, of q and k if they are not packed: [batch, heads_q, ceil(seqlen_q / 128)],
            [batch, heads_kv, ceil(seqlen_kv / 128)].
        mask, scale, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, return_lse: as `strobe.attention` takes them.
            On a GPU no documents and no mask function.

    Returns:
        out, bfloat16; or (out, lse), lse float32. On a GPU the weights of the values are rounded to e4m3 (docs/fp8.md).

    Raises:
        ValueError, TypeError: naming the argument, before any launch. NotImplementedError: no kernel takes the problem.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype != E4M3:
            raise TypeError(f"{name} must be float8_e4m3fn, got {x.dtype}")
        if x.dim() and x.stride(-1) != 1:  # the tensors below have no strides of their own
            raise ValueError(f"{name} must be contiguous in its last dim (stride 1), got stride {x.stride(-1)}")
    # `attention` checks the rest, on tensors of the same shapes that take no memory
    shapes = [x.new_empty(x.shape[-1:], dtype=torch.bfloat16).expand(x.shape) for x in (q, k, v)]
    keywords = {
        "mask": mask, "scale": scale, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv,
    }  # fmt: skip
    options = api._options_of(*shapes, **keywords)
    problem = ops.describe(q, k, v, options)
    descales = Descales(
        _checked("q_descale", q_descale, q, problem, problem.heads_q, problem.lengths.seqlen_q),
        _checked("k_descale", k_descale, q, problem, problem.heads_kv, problem.lengths.seqlen_kv),
        _checked("v_descale", v_descale, q, problem),
    )
    operands = ops.operands_of(q, k, v, options)
    if q.device.type == "cpu":
        out, lse = _by_value(operands, descales, keywords)
    else:
        out, lse = _by_kernel(problem, operands, descales)
    return (out, lse) if return_lse else out


class Descales(NamedTuple):
    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None


def _checked(name: str, x, q: torch.Tensor, problem: AttentionProblem, heads=0, rows=0) -> torch.Tensor | None:
    """A descale, contiguous. heads, rows: of what may have a descale for each block of rows."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
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
    return x.contiguous()


# ---- on a CPU


def _by_value(operands: Operands, descales: Descales, keywords: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, of the values that the inputs stand for."""
    cu_q, cu_kv = operands.cu_seqlens_q, operands.cu_seqlens_kv
    q, k, v = (
        _value(x, descale, cu)
        for x, descale, cu in zip(operands[:3], descales, (cu_q, cu_kv, cu_kv), strict=True)
    )  # fmt: skip
    out, lse = api.attention(q, k, v, return_lse=True, **keywords)
    return out.to(torch.bfloat16), lse.float()


def _value(x: torch.Tensor, descale: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """x times its descale, float64."""
    value = x.double()
    if descale is None:
        return value
    if descale.dim() == 3:
        by_row = descale.transpose(1, 2).repeat_interleave(DESCALE_ROWS, 1)[:, : x.shape[1]]
    else:
        by_row = descale.repeat_interleave(x.shape[-2] // descale.shape[1], 1)
        by_row = by_row[:, None] if cu_seqlens is None else by_row.repeat_interleave(cu_seqlens.diff(), 0)
    if cu_seqlens is None:
        return value * by_row[..., None]
    value[: len(by_row)] *= by_row[..., None]  # rows of no sequence have no descale
    return value


# ---- on a GPU


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    """Why the kernel does not take a problem; or None."""
    if arch.capability != 90:
        return f"needs a Hopper GPU (sm_90), not {arch}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if problem.head_dim not in (64, 128, 256) or problem.head_dim_v != problem.head_dim:
        return f"takes head dim 64, 128 or 256, the same for q, k and v, not {problem.head_dim} and {problem.head_dim_v}"
    if problem.mask.documents is not None or problem.mask.function is not None:
        return "takes no documents and no mask function"
    if not problem.scale > 0:
        return f"takes a positive scale (it takes maxima before it scales), not {problem.scale:g}"
    lengths = problem.lengths
    packed = (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else ()
    if max(lengths.seqlen_q, lengths.seqlen_kv, *packed) >= MAX_BOUND:
        return "counts rows in int32 and takes fewer than 2^30 of them"
    unaligned = [name for name in problem.unaligned if name != "v"]  # v is copied without TMA
    if unaligned:
        return (
            f"needs bases and strides in multiples of 16 bytes and no dim expanded with stride 0 (for TMA), "
            f"which {', '.join(unaligned)} lacks"
        )
    return None


def _by_kernel(problem: AttentionProblem, operands: Operands, descales: Descales) -> tuple[torch.Tensor, torch.Tensor]:
    q = operands.q
    reason = refuses(problem, arch_of(q.device))
    if reason is not None:
        raise NotImplementedError(f"attention_fp8 {reason}")
    if 0 in q.shape or 0 in operands.k.shape or problem.lengths.seqlen_kv == 0:
        out = torch.zeros(q.shape, dtype=torch.bfloat16, device=q.device)
        return out, torch.full(lse_shape(problem), -torch.inf, dtype=torch.float32, device=q.device)
    from strobe.kernels.sm90 import fp8

    return fp8.launch(problem, operands, descales)
