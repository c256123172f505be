"""The host half of the Blackwell forward: tensors, arguments, and the launches of `forward_kernel` and of what follows."""

from __future__ import annotations

from typing import Any

import torch
import triton

from strobe.device import Arch
from strobe.kernels.combine import combine_call
from strobe.kernels.common.arguments import bundles_of_heads, totals
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, results, unfilled
from strobe.kernels.portable import forward as portable
from strobe.kernels.sm100.config import HALF_L2, Config
from strobe.kernels.sm100.descriptors import descriptors
from strobe.kernels.sm100.forward import forward_kernel
from strobe.problem import AttentionProblem, lse_shape
from strobe.scores import LOG2E


def buffers(problem: AttentionProblem, config: Config) -> Buffers:
    """The tensors of a forward. Packed rows that belong to no sequence get 0 and -inf.

    out_parts, lse_parts: results of each split, float32, the splits in front.
    notes: int32 [batch * heads_q * ceil(seqlen_q / 64)], non-zero where 64 rows of a masked problem hold a NaN or an infinity,
        which a masked-out value may have caused.
    """
    lengths = problem.lengths
    made = results(problem, fill=problem.varlen)
    if config.splits > 1:
        made["out_parts"] = Buffer((config.splits, *problem.out_shape), torch.float32, 0.0 if problem.varlen else None)
        lse = (config.splits, *lse_shape(problem))
        made["lse_parts"] = Buffer(lse, torch.float32, -torch.inf if problem.varlen else None)
    if problem.mask.band != (None, None, None):  # TMA reads nothing of a packed sequence's neighbours
        notes = lengths.batch * problem.heads_q * triton.cdiv(lengths.seqlen_q, 64)
        made["notes"] = Buffer((notes,), torch.int32, 0)
    return Buffers(made)


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The launches of a forward, in order. The last one exits at once where there is no note."""
    found = [forward_call(problem, tensors, arch, config)]
    if config.splits > 1:
        found.append(combine_call(tensors.out_parts, tensors.lse_parts, tensors.out, tensors.lse))
    return found if tensors.notes is None else [*found, portable.redo_call(problem, tensors, arch)]


def forward_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> Call:
    """The launch of the kernel: with one split it writes out and lse, with more the parts of them that `combine` merges."""
    lengths, split = problem.lengths, config.splits > 1
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q * config.splits
    arguments = (
        *descriptors(tensors.q, config.rows, config.chunks, 0, config),
        *descriptors(tensors.k, config.tile_kv, config.chunks, 0, config),
        *descriptors(tensors.v, config.tile_kv, config.chunks_v, 1, config),
        *((None, None) if split else descriptors(tensors.out, config.rows, config.chunks_v, 0, config)),
        tensors.out_parts if split else None,
        tensors.lse_parts if split else tensors.lse,
        tensors.notes,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_kv,
        problem.heads_q,
        problem.group,
        *bundles_of_heads(problem, HALF_L2),
        tiles,
        tensors.q.shape[:-2].numel(),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        *problem.mask.device_band,
        problem.scale * LOG2E,
        totals(problem)[1],
    )
    cut = problem.mask.band != (None, None, None) or lengths.seqlen_kv % config.tile_kv != 0
    constants = {
        "MASKED": cut or split or problem.varlen,  # a split may be left with a block that it does not see
        "C": config,
        "num_warps": 4,
        "num_ctas": config.ctas,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
    }
    clusters = arch.sms // config.ctas
    return Call(forward_kernel, (min(tiles, clusters) if config.persistent and clusters else tiles,), arguments, constants)


def compile_only(problem: AttentionProblem, arch: Arch, config: Config) -> Any:
    """The compiled kernel of a forward, from shapes alone (see strobe.lab.binary.offline)."""
    return forward_call(problem, unfilled(problem, buffers(problem, config)), arch, config).compile()
