"""The host half of the forward for mma.sync: tensors, arguments and the launch of `forward.forward_kernel`."""

from typing import Any

import torch
import triton

from strobe.device import Arch
from strobe.kernels.common.arguments import bundles_of_heads, totals
from strobe.kernels.common.call import Buffers, Call, Tensors, results, unfilled
from strobe.kernels.common.documents import span_buffers, span_calls
from strobe.kernels.sm80.config import Config
from strobe.kernels.sm80.forward import forward_kernel
from strobe.kernels.sm90.scores import score_arguments
from strobe.problem import AttentionProblem

LEAST_L2 = 6 << 20
"""Bytes of L2 cache that a GPU has if nobody knows better: those of an A10 or RTX 3090."""


def buffers(problem: AttentionProblem) -> Buffers:
    """The tensors of a forward; rows of no sequence, or not used, are written by no kernel."""
    return Buffers(results(problem, fill=problem.varlen or problem.seqused), span_buffers(problem, "row_spans"))


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The launches of a forward, in order."""
    return [*span_calls(tensors, in_turn=False), forward_call(problem, tensors, arch, config)]


def forward_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> Call:
    """The launch of the kernel: a CTA for each tile."""
    lengths, mask = problem.lengths, problem.mask
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q
    arguments = (
        tensors.q,
        tensors.k,
        tensors.v,
        tensors.out,
        tensors.lse,
        *(stride for x in (tensors.q, tensors.k, tensors.v, tensors.out) for stride in strides_of(x)),
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_kv,
        tensors.seqused_q,
        tensors.seqused_kv,
        problem.heads_q,
        problem.group,
        *bundles_of_heads(problem, half_l2(arch)),
        tiles,
        tensors.q.shape[:-2].numel(),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        *mask.device_band,
        *score_arguments(problem, tensors),
        tensors.row_spans,
        totals(problem)[1],
    )
    constants = {
        "MASKED": is_cut(problem) or problem.varlen or lengths.seqlen_kv % config.tile_kv != 0,
        "CUT": is_cut(problem),
        "DIM": problem.head_dim,
        "DIM_V": problem.head_dim_v,
        "C": config,
        "num_warps": config.warps,
        "maxnreg": 255,  # without a bound ptxas was seen to settle for 32 registers and spill thousands of bytes
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
    }
    return Call(forward_kernel, (tiles,), arguments, constants)


def is_cut(problem: AttentionProblem) -> bool:
    """Whether a row may meet, in a tile, what it does not see."""
    return problem.mask.band != (None, None, None) or problem.mask.by_pair or problem.seqused


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """By batch (0: packed), row and head."""
    batch, row, head, _ = x.stride() if x.dim() == 4 else (0, *x.stride())
    return batch, row, head


def half_l2(arch: Arch) -> int:
    """Bytes of K and V that a bundle of heads may take: about half of the L2 cache."""
    return (arch.l2_bytes or LEAST_L2) // 2


def compile_only(problem: AttentionProblem, arch: Arch, config: Config) -> Any:
    """The compiled kernel of a forward, from shapes alone (see strobe.lab.binary.offline)."""
    return forward_call(problem, unfilled(problem, buffers(problem)), arch, config).compile()
