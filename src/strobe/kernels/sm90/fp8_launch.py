"""The host half of the Hopper forward in e4m3: tensors, arguments, and the launches of both kernels of `fp8`."""

from __future__ import annotations

from typing import Any

import torch
import triton

from strobe.device import Arch
from strobe.kernels.common.arguments import bundles_of_heads, totals
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, unfilled
from strobe.kernels.gluon import TensorDescriptor, gl
from strobe.kernels.sm90.config import HALF_L2, ROWS_PER_GROUP, Config
from strobe.kernels.sm90.descriptors import descriptors
from strobe.kernels.sm90.fp8 import DESCALE_ROWS, fp8_kernel, transpose_kernel
from strobe.kernels.sm90.launch import results_of_tiles
from strobe.kernels.sm90.scores import inner_and_outer
from strobe.kernels.sm90.tile_list import list_buffers, list_calls
from strobe.problem import AttentionProblem, Varlen


def buffers(problem: AttentionProblem, config: Config) -> Buffers:
    """The tensors of a forward. v_t: V^T, [heads_kv, blocks * head_dim, tile_kv]; the blocks of a sequence follow each other. A
    packed sequence that starts at row s is given the blocks from s // tile_kv on, and one more for each sequence before it,
    which is enough for all."""
    lengths, tile = problem.lengths, config.tile_kv
    if isinstance(lengths, Varlen):
        blocks = lengths.total_kv // tile + lengths.batch
    else:
        blocks = lengths.batch * triton.cdiv(lengths.seqlen_kv, tile)
    v_t = Buffer((problem.heads_kv, blocks * config.head_dim_v, tile), problem.dtype)
    made, fill = results_of_tiles(problem)
    return Buffers({**made, "v_t": v_t}, list_buffers(problem), {}, fill)


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The launches of a forward, in order."""
    return [
        transpose_call(problem, tensors, config),
        *list_calls(problem, tensors, config.tile_q),
        forward_call(problem, tensors, arch, config),
    ]


def transpose_call(problem: AttentionProblem, tensors: Tensors, config: Config) -> Call:
    """The launch that writes V^T."""
    lengths, v, tile = problem.lengths, tensors.v, config.tile_kv
    by_batch = 0 if problem.varlen else v.stride(0)
    arguments = (
        v, tensors.v_t, tensors.cu_seqlens_kv, tensors.seqused_kv, lengths.seqlen_kv, totals(problem)[1],
        tensors.v_t.shape[1] // config.head_dim_v, by_batch, v.stride(-3), v.stride(-2), tile, problem.head_dim_v,
        config.head_dim_v,
    )  # fmt: skip
    constants = {"enable_fp_fusion": True, "launch_pdl": True}
    return Call(transpose_kernel, (triton.cdiv(lengths.seqlen_kv, tile), problem.heads_kv, lengths.batch), arguments, constants)


def forward_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> Call:
    """The launch of the kernel, given V^T."""
    lengths, v_t = problem.lengths, tensors.v_t
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q
    block = [1, config.head_dim_v, config.tile_kv]
    inner, outer = inner_and_outer(problem)
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    arguments = (
        *descriptors(tensors.q, ROWS_PER_GROUP, (config.head_dim,)),
        *descriptors(tensors.k, config.tile_kv, (config.head_dim,)),
        TensorDescriptor(v_t, list(v_t.shape), [v_t.shape[1] * v_t.shape[2], v_t.shape[2], 1], block, layout),
        *descriptors(tensors.out, ROWS_PER_GROUP, (config.o_columns,)),
        tensors.lse,
        tensors.counters,
        tensors.tiles_listed if problem.varlen else None,
        tensors.q_descale,
        tensors.k_descale,
        tensors.v_descale,
        *(None if x is None or x.dim() == 2 else x.shape[2] for x in (tensors.q_descale, tensors.k_descale)),
        tensors.sinks,
        None if tensors.sinks is None else tensors.sinks.stride(0),
        outer,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_kv,
        tensors.seqused_q,
        tensors.seqused_kv,
        problem.heads_q,
        problem.group,
        *bundles_of_heads(problem, HALF_L2),
        tiles,
        tensors.q.shape[:-2].numel(),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        *problem.mask.device_band,
        inner,
        totals(problem)[1],
    )
    cut = problem.mask.band != (None, None, None) or lengths.seqlen_kv % config.tile_kv != 0
    constants = {
        "MASKED": cut or problem.varlen or problem.seqused,
        "C": config,
        "num_warps": 4,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
        "launch_pdl": True,
    }
    return Call(fp8_kernel, (min(tiles, arch.sms) if arch.sms else tiles,), arguments, constants)


def compile_only(problem: AttentionProblem, arch: Arch, config: Config, by_block: bool = False) -> Any:
    """The compiled kernel of a problem with all descales (by_block: q's and k's by blocks), from shapes alone (see
    strobe.lab.binary.offline)."""
    tensors, lengths = unfilled(problem, buffers(problem, config)), problem.lengths
    descale = torch.empty(lengths.batch, problem.heads_kv, device="meta")
    by_rows = descale[..., None].expand(-1, -1, triton.cdiv(lengths.seqlen_q, DESCALE_ROWS.value))
    tensors.q_descale = tensors.k_descale = by_rows if by_block else descale
    tensors.v_descale = descale
    return forward_call(problem, tensors, arch, config).compile()
