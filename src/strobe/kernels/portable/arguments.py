"""How the host hands tensors and a problem to the kernels: tuples of pointers and strides, and numbers."""

from __future__ import annotations

import torch

from strobe.dropout import threshold
from strobe.kernels.common import triton_math
from strobe.kernels.portable.config import Config
from strobe.kernels.portable.tiles import LOG2E, Bias, BiasGradient, Dropout, Matrix, Score
from strobe.problem import AttentionProblem, Operands, Varlen, bias_shape


def matrix(x: torch.Tensor) -> Matrix:
    """[batch, n, heads, D], or packed [total, heads, D] (whose sequences the kernels find by cu_seqlens)."""
    return Matrix(x, *((0,) if x.dim() == 3 else ()), *x.stride()[:-1])


def vector(x: torch.Tensor) -> Matrix:
    """One number per row, laid out as the LSE: [batch, heads, n], or packed [heads, total]."""
    batch, head, row = (0, *x.stride()) if x.dim() == 2 else x.stride()
    return Matrix(x, batch, row, head)


def ids(x: torch.Tensor) -> Matrix:
    """Document numbers [batch, n]."""
    return Matrix(x, x.stride(0), x.stride(1), 0)


def score(problem: AttentionProblem, seed: torch.Tensor | None) -> Score:
    """The problem's score with log2(e) folded into its factors."""
    softcap, slopes, bias, sinks = problem.score.softcap, problem.score.alibi, problem.score.bias, problem.score.sinks
    inner, outer = problem.scale * LOG2E.value, None
    if softcap:
        inner, outer = problem.scale / softcap, softcap * LOG2E.value
    return Score(
        inner,
        outer,
        None if slopes is None else Matrix(slopes, slopes.stride(0) if slopes.dim() == 2 else 0, 0, slopes.stride(-1)),
        None if bias is None else _bias(bias),
        None if sinks is None else Matrix(sinks, 0, 0, sinks.stride(0)),
        triton_math.of_user(problem.score.function),
        triton_math.of_user(problem.score.function_gradient) if problem.phase == "backward" else None,
        triton_math.of_user(problem.mask.function),
        None if seed is None else Dropout(seed, threshold(problem.dropout), 1.0 / (1.0 - problem.dropout)),
    )


def _bias(x: torch.Tensor) -> Bias:
    """[batch or 1, heads or 1, rows or 1, keys or 1]: what there is one of is repeated by a stride of 0."""
    return Bias(x, *(stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)))


def bias_gradient(problem: AttentionProblem, dbias: torch.Tensor | None) -> BiasGradient:
    """Where dbias (see `zero_bias`) is written; None: nowhere."""
    if dbias is None:
        return BiasGradient(None, None, None, None, None)
    dims = zip(dbias.shape, bias_shape(problem), dbias.stride(), strict=True)
    return BiasGradient(dbias, *(stride if size == whole else None for size, whole, stride in dims))


def of_problem(problem: AttentionProblem, operands: Operands) -> dict:
    """The arguments, by name, that all kernels over tiles of scores take."""
    lengths, mask = problem.lengths, problem.mask
    left, right, prefix = mask.device_band
    total_q, total_kv = (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else (0, 0)
    return dict(
        q=matrix(operands.q),
        k=matrix(operands.k),
        v=matrix(operands.v),
        cu_seqlens_q=operands.cu_seqlens_q,
        cu_seqlens_kv=operands.cu_seqlens_kv,
        seqused_q=operands.seqused_q,
        seqused_kv=operands.seqused_kv,
        n_q=lengths.seqlen_q,
        n_kv=lengths.seqlen_kv,
        total_q=total_q,
        total_kv=total_kv,
        left=left,
        right=right,
        prefix=prefix,
        document_q=None if mask.documents is None else ids(mask.documents.q),
        document_kv=None if mask.documents is None else ids(mask.documents.kv),
        score=score(problem, operands.seed),
        group=problem.group,
        DIM=problem.head_dim,
        DIM_V=problem.head_dim_v,
    )


def of_config(config: Config) -> dict:
    """The arguments, by name, that a Config decides."""
    # Without a bound ptxas was seen to settle for 32 registers and spill thousands of bytes. AMD has no such option.
    registers = {} if torch.version.hip else dict(maxnreg=255)
    return dict(
        TILE_Q=config.tile_q,
        TILE_KV=config.tile_kv,
        PADDED=config.head_dim,
        PADDED_V=config.head_dim_v,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,  # Triton 3.10 turns it off
        **registers,
    )
