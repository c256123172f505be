"""The Hopper backend for e4m3 inputs: the forward alone."""

from __future__ import annotations

import torch

from strobe.device import Arch
from strobe.kernels import has_triton
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.masks import MAX_BOUND
from strobe.problem import AttentionProblem, Varlen


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if arch.capability != 90:
        return f"needs a Hopper GPU (sm_90), not {arch}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if problem.dtype != torch.float8_e4m3fn:
        return f"takes float8_e4m3fn, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.phase == "backward":
        return "has no backward"
    if problem.head_dim not in (64, 128, 256) or problem.head_dim_v != problem.head_dim:
        return f"takes head dim 64, 128 or 256, the same for q, k and v, not {problem.head_dim} and {problem.head_dim_v}"
    if problem.mask.by_pair:
        return "takes no documents, no mask function and no blocks"
    if problem.seqused or problem.dropout or str(problem.score) != "plain":
        return "takes no seqused, no dropout and no score but the plain one"
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


def config(problem: AttentionProblem, arch: Arch):
    from strobe.kernels.sm90 import fp8

    return fp8.config(problem)


def origin(problem: AttentionProblem, arch: Arch) -> str:
    """Where the config comes from, in words."""
    return "measured, for each head dim"


def buffers(problem: AttentionProblem, arch: Arch) -> Buffers:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.sm90 import fp8_launch

    return fp8_launch.buffers(problem, config(problem, arch))


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.sm90 import fp8_launch

    return fp8_launch.calls(problem, tensors, arch, config(problem, arch))
