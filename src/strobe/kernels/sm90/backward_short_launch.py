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


def buffers(problem: AttentionProblem, arch: Arch, config: ShortBackwardConfig) -> Buffers:
    """The tensors of a backward: the gradients; shares of dK and dV, where CTAs share a key head, and a counter for each."""
    heads, tiles = problem.lengths.batch * problem.heads_kv, _tiles(problem)
    ctas = heads * triton.cdiv(tiles, tiles_of_a_cta(config, tiles, heads, arch.sms or SMS))
    shares = Buffer((ctas if ctas > heads else 0, config.share_numbers), torch.float32)
    return Buffers(gradients(problem), {"shares": shares, "arrivals": Buffer((heads,), torch.int32, 0.0)})


def _tiles(problem: AttentionProblem) -> int:
    """Tiles of all query heads that share a key head."""
    return problem.group * triton.cdiv(problem.lengths.seqlen_q, ROWS_PER_GROUP)


def backward_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: ShortBackwardConfig) -> Call:
    """The launch of the kernel."""
    lengths, t = problem.lengths, tensors
    heads, tiles = lengths.batch * problem.heads_kv, _tiles(problem)
    share = tiles_of_a_cta(config, tiles, heads, arch.sms or SMS)
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
        tiles // problem.group,
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
    return Call(short_backward_kernel, (heads * triton.cdiv(tiles, share),), arguments, constants)


def _parts(x: torch.Tensor, config: ShortBackwardConfig, columns: int) -> list[TensorDescriptor]:
    """TMA descriptors of the first part of the keys and of the last one."""
    return [descriptor(x, keys, columns) for keys in (config.parts[0], config.parts[-1])]


def compile_only(problem: AttentionProblem, arch: Arch, config: ShortBackwardConfig) -> Any:
    """The compiled kernel of a backward, from shapes alone (see strobe.lab.binary.offline)."""
    return backward_call(problem, unfilled(problem, buffers(problem, arch, config)), arch, config).compile()
