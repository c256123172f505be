"""The host half of the Hopper forward to few keys: tensors, arguments and the launch of `short.short_kernel`."""

from typing import Any

import triton

from strobe.device import Arch
from strobe.kernels.common.call import Buffers, Call, Tensors, results, unfilled
from strobe.kernels.common.scores import LOG2E
from strobe.kernels.sm90.config import ROWS_PER_GROUP
from strobe.kernels.sm90.descriptors import descriptors
from strobe.kernels.sm90.short import short_kernel
from strobe.kernels.sm90.short_config import ShortConfig, tiles_of_a_cta
from strobe.problem import AttentionProblem


def buffers(problem: AttentionProblem) -> Buffers:
    """The tensors of a forward: its results."""
    return Buffers(results(problem, fill=False))


def forward_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: ShortConfig) -> Call:
    """The launch of the kernel."""
    lengths = problem.lengths
    heads = lengths.batch * problem.heads_q
    tiles = triton.cdiv(lengths.seqlen_q, ROWS_PER_GROUP)
    share = tiles_of_a_cta(config, tiles, heads, arch.sms)
    of_qk, of_v = (config.wide, config.narrow), (config.wide_v, config.narrow_v)
    arguments = (
        *descriptors(tensors.q, ROWS_PER_GROUP, of_qk),
        *descriptors(tensors.k, config.box(config.wide), of_qk),
        *descriptors(tensors.k, config.rest(config.wide), of_qk),
        *descriptors(tensors.v, config.box(config.wide_v), of_v),
        *descriptors(tensors.v, config.rest(config.wide_v), of_v),
        *descriptors(tensors.out, ROWS_PER_GROUP, of_v),
        tensors.lse,
        problem.heads_q,
        problem.group,
        tiles,
        share,
        lengths.seqlen_q,
        lengths.seqlen_kv,
        problem.scale * LOG2E.value,
    )
    constants = {"C": config, "num_warps": 4, "maxnreg": config.registers, "enable_fp_fusion": True, "launch_pdl": True}
    return Call(short_kernel, (heads * triton.cdiv(tiles, share),), arguments, constants)


def compile_only(problem: AttentionProblem, arch: Arch, config: ShortConfig) -> Any:
    """The compiled kernel of a forward, from shapes alone (see strobe.lab.binary.offline)."""
    return forward_call(problem, unfilled(problem, buffers(problem)), arch, config).compile()
