"""How the host hands tensors and a problem to the kernels: tuples of pointers and strides, and numbers."""

from __future__ import annotations

import torch

from strobe.kernels.common.call import Tensors
from strobe.kernels.portable.config import Config
from strobe.kernels.portable.primitives import Matrix
from strobe.kernels.portable.scores import score
from strobe.problem import AttentionProblem, Varlen


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


def of_problem(problem: AttentionProblem, tensors: Tensors) -> dict:
    """The arguments, by name, that all kernels over tiles of scores take."""
    lengths, mask = problem.lengths, problem.mask
    left, right, prefix = mask.device_band
    total_q, total_kv = (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else (0, 0)
    return dict(
        q=matrix(tensors.q),
        k=matrix(tensors.k),
        v=matrix(tensors.v),
        cu_seqlens_q=tensors.cu_seqlens_q,
        cu_seqlens_kv=tensors.cu_seqlens_kv,
        seqused_q=tensors.seqused_q,
        seqused_kv=tensors.seqused_kv,
        n_q=lengths.seqlen_q,
        n_kv=lengths.seqlen_kv,
        total_q=total_q,
        total_kv=total_kv,
        left=left,
        right=right,
        prefix=prefix,
        document_q=None if tensors.document_q is None else ids(tensors.document_q),
        document_kv=None if tensors.document_kv is None else ids(tensors.document_kv),
        score=score(problem, tensors),
        places=tensors.places,
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
