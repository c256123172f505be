"""The host half of the Hopper forward in e4m3: tensors, arguments, and the launches of `fp8_transpose` and `fp8`."""

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
from strobe.kernels.sm90.fp8 import DESCALE_ROWS, fp8_kernel, is_from_diagonal
from strobe.kernels.sm90.fp8_transpose import COLUMNS, WARPS, beside_kernel, transpose_kernel
from strobe.kernels.sm90.launch import results_of_tiles
from strobe.kernels.sm90.scores import inner_and_outer
from strobe.kernels.sm90.tile_list import list_buffers, list_calls
from strobe.problem import AttentionProblem, Varlen

TRANSPOSERS = {64: 16, 128: 16, 256: 24}
"""By head dim, how many multiprocessors write V^T while the others begin with the forward; more, if it leaves more idle. On an
H100, 1k keys: at head dim 64 16 gained 6 %, 32 5 %; at 256 16 lost up to 4 %, and 24 gained 7 % with small bundles."""

SMALL_BUNDLE, SMALL_KEYS = 4_000_000, 1024
"""At head dim 256, bytes of K and V of heads that come at once, up to so many keys: the fewer, the sooner is their V^T there.
On an H100, 16 x 1024, 8 heads: 158 us instead of 168, causal 114 instead of 117."""


def buffers(problem: AttentionProblem, config: Config) -> Buffers:
    """The tensors of a forward. v_t: V^T, [heads_kv, blocks * head_dim, tile_kv]; the blocks of a sequence follow each other. A
    packed sequence that starts at row s is given the blocks from s // tile_kv on, and one more for each sequence before it,
    which is enough for all. transposed: how many blocks of each key head there are."""
    lengths, tile = problem.lengths, config.tile_kv
    if isinstance(lengths, Varlen):
        blocks = lengths.total_kv // tile + lengths.batch
    else:
        blocks = lengths.batch * triton.cdiv(lengths.seqlen_kv, tile)
    v_t = Buffer((problem.heads_kv, blocks * config.head_dim_v, tile), problem.dtype)
    made, fill = results_of_tiles(problem)
    return Buffers({**made, "v_t": v_t}, list_buffers(problem), {"transposed": lengths.batch * problem.heads_kv}, fill)


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The launches of a forward, in order."""
    return [
        *list_calls(problem, tensors, config.tile_q),
        transpose_call(problem, tensors, arch, config),
        forward_call(problem, tensors, arch, config),
    ]


def is_beside(problem: AttentionProblem) -> bool:
    """Whether V^T is written beside the forward: where TMA can read V, and not with many keys at head dim 256."""
    # An H200, head dim 256: 3 % faster at 1k, 5 % slower at 4k, where the launch counts for little.
    has_gain = problem.head_dim_v <= 128 or problem.lengths.seqlen_kv <= SMALL_KEYS
    return has_gain and "v" not in problem.unaligned


def transpose_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> Call:
    """The launch that writes V^T."""
    lengths, v, tile, columns = problem.lengths, tensors.v, config.tile_kv, config.head_dim_v
    sequences = tensors.cu_seqlens_kv, tensors.seqused_kv, lengths.seqlen_kv, totals(problem)[1]
    blocks = tensors.v_t.shape[1] // columns
    if not is_beside(problem):
        strides = 0 if problem.varlen else v.stride(0), v.stride(-3), v.stride(-2)
        arguments = (v, tensors.v_t, *sequences, blocks, *strides, tile, problem.head_dim_v, columns)
        grid = (triton.cdiv(lengths.seqlen_kv, tile), problem.heads_kv, lengths.batch)
        return Call(transpose_kernel, grid, arguments, {"enable_fp_fusion": True, "launch_pdl": True})
    chunks = triton.cdiv(lengths.seqlen_kv * columns, tile * COLUMNS.value)
    of_all = chunks * lengths.batch * problem.heads_kv
    programs = max(TRANSPOSERS[columns], arch.sms - number_of_tiles(problem, config))
    of_v = descriptors(v, tile, (columns,))
    arguments = (*of_v, tensors.v_t, tensors.transposed, *sequences, blocks, problem.heads_kv, chunks, of_all, tile, columns)
    constants = {"num_warps": WARPS.value, "enable_fp_fusion": True, "launch_pdl": True}
    return Call(beside_kernel, (min(of_all, programs),), arguments, constants)


def number_of_tiles(problem: AttentionProblem, config: Config) -> int:
    """Tiles of queries, at most."""
    return triton.cdiv(problem.lengths.seqlen_q, config.tile_q) * problem.lengths.batch * problem.heads_q


def forward_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> Call:
    """The launch of the kernel, given V^T."""
    lengths, v_t = problem.lengths, tensors.v_t
    tiles = number_of_tiles(problem, config)
    is_small = config.head_dim_v == 256 and lengths.seqlen_kv <= SMALL_KEYS
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
        *bundles_of_heads(problem, SMALL_BUNDLE if is_small else HALF_L2),
        tiles,
        tensors.q.shape[:-2].numel(),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        *problem.mask.device_band,
        inner,
        totals(problem)[1],
        *((tensors.transposed, lengths.batch * problem.heads_kv) if is_beside(problem) else (None, None)),
    )
    cut = problem.mask.band != (None, None, None) or lengths.seqlen_kv % config.tile_kv != 0
    constants = {
        "MASKED": cut or problem.varlen or problem.seqused,
        "DIAGONAL": is_from_diagonal(problem, config),
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
