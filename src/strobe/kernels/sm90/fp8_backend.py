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
    dims = problem.head_dim, problem.head_dim_v
    if problem.head_dim > 256 or problem.head_dim % 16 or dims[0] != dims[1]:
        return f"takes head dims up to 256 in multiples of 16, the same for q, k and v, not {dims[0]} and {dims[1]}"
    if problem.mask.by_pair:
        return "takes no documents, no mask function and no blocks"
    score = problem.score
    if problem.dropout or score.alibi is not None or score.bias is not None or score.function is not None:
        return "takes no dropout, and of scores softcap and sinks alone"
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
