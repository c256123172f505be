"""The host half of the Hopper backward to few keys: tensors, arguments and the launch of its one kernel."""

from typing import Any

import torch
import triton

from strobe.device import Arch
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, gradients, unfilled
from strobe.kernels.common.descriptors import descriptor
from strobe.kernels.gluon import TensorDescriptor
from strobe.kernels.sm90.backward_short import short_backward_kernel
from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig, tiles_of_a_cta
from strobe.kernels.sm90.config import ROWS_PER_GROUP, SMS
from strobe.problem import AttentionProblem


def _work(problem: AttentionProblem, arch: Arch, config: ShortBackwardConfig) -> tuple[int, int, int, int]:
    """Key heads of the whole batch, tiles of a query head, all tiles, and how many of these a CTA goes through."""
    heads = problem.lengths.batch * problem.heads_kv
    tiles = triton.cdiv(problem.lengths.seqlen_q, ROWS_PER_GROUP)
    all_tiles = heads * problem.group * tiles
    return heads, tiles, all_tiles, tiles_of_a_cta(config, all_tiles, arch.sms or SMS)


def buffers(problem: AttentionProblem, arch: Arch, config: ShortBackwardConfig) -> Buffers:
    """The tensors of a backward: the gradients; shares of dK and dV, and a counter of arrivals for each key head."""
    heads, _, all_tiles, share = _work(problem, arch, config)
    shares = Buffer((triton.cdiv(all_tiles, share) + heads - 1, config.share_numbers), torch.float32)
    return Buffers(gradients(problem), {"shares": shares, "arrivals": Buffer((heads,), torch.int32, 0.0)})


def backward_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: ShortBackwardConfig) -> Call:
    """The launch of the kernel."""
    lengths, t = problem.lengths, tensors
    _, tiles, all_tiles, share = _work(problem, arch, config)
    arguments = (
        descriptor(t.q, ROWS_PER_GROUP, config.head_dim),
        descriptor(t.dout, ROWS_PER_GROUP, config.head_dim_v),
        *_parts(t.k, config, config.head_dim),
        *_parts(t.v, config, config.head_dim_v),
        t.lse,
        t.dlse,
        *((0, 0, 0) if t.dlse is None else t.dlse.stride()),
        descriptor(t.dq, ROWS_PER_GROUP, config.head_dim),
        *_parts(t.dk, config, config.head_dim),
        *_parts(t.dv, config, config.head_dim_v),
        t.shares,
        t.arrivals,
        problem.heads_kv,
        problem.group,
        tiles,
        all_tiles,
        share,
        lengths.seqlen_q,
        lengths.seqlen_kv,
        problem.scale,
    )
    constants = {
        "C": config,
        "num_warps": config.warps,
        "maxnreg": config.registers,
        "enable_fp_fusion": True,
        "launch_pdl": True,
    }
    return Call(short_backward_kernel, (triton.cdiv(all_tiles, share),), arguments, constants)


def _parts(x: torch.Tensor, config: ShortBackwardConfig, columns: int) -> list[TensorDescriptor]:
    """TMA descriptors of the first part of the keys and of the last one."""
    return [descriptor(x, keys, columns) for keys in (config.parts[0], config.parts[-1])]


def compile_only(problem: AttentionProblem, arch: Arch, config: ShortBackwardConfig) -> Any:
    """The compiled kernel of a backward, from shapes alone (see strobe.lab.binary.offline)."""
    return backward_call(problem, unfilled(problem, buffers(problem, arch, config)), arch, config).compile()
