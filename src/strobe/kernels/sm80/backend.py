"""The backend for mma.sync: problems in float16, bfloat16 and float32, on GPUs from Ampere on."""

from __future__ import annotations

import torch

from strobe.device import Arch
from strobe.kernels import has_triton
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.kernels.common.refusals import gluon_refuses
from strobe.kernels.sm80.config import LARGEST, BackwardConfig, Config, backward_candidates, choose, choose_backward
from strobe.kernels.sm80.config import origin as origin_of_choice
from strobe.problem import AttentionProblem, Varlen, without_gradient

DTYPES = torch.float16, torch.bfloat16, torch.float32

MOST_ROWS = 2**29


def unproven(problem: AttentionProblem, arch: Arch) -> str | None:
    """See `strobe.call.dispatch`. The kernels were run on Hopper, whose warps have the same instructions."""
    if arch.capability // 10 in (10, 11):
        return "not yet timed beside the portable kernels where these use tcgen05"
    return None


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if not arch.is_gpu or arch.capability < 80:
        return f"needs a GPU with mma.sync for 16 bits and cp.async (sm_80 or newer), not {arch}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if not problem.scale > 0 and not problem.score.softcap:
        return f"takes a positive scale (it takes maxima before it scales), not {problem.scale:g}"
    if problem.partial:
        return "gives no partial results yet, which are kept in float32"
    dims = problem.head_dim, problem.head_dim_v
    if max(dims) > LARGEST or any(dim % 8 for dim in dims):
        return f"takes head dims up to {LARGEST} in multiples of 8 (it copies 16 bytes at a time), not {dims[0]} and {dims[1]}"
    refused = gluon_refuses(problem, DTYPES)
    if problem.phase == "backward":
        return refused or backward_refuses(problem, arch) or without_gradient(problem)
    return refused


def backward_refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    """Why the backward alone does not take a problem; or None."""
    lengths = problem.lengths
    rows = problem.heads_q * (lengths.total_q if isinstance(lengths, Varlen) else lengths.batch * lengths.seqlen_q)
    if rows >= MOST_ROWS:
        return f"counts the query rows of all heads in int32 and takes fewer than 2^29 of them in its backward, not {rows}"
    if not backward_candidates(problem, arch):
        dims = problem.head_dim, problem.head_dim_v
        return f"needs more shared memory for the backward of float32 at head dims {dims[0]} and {dims[1]} than {arch} has"
    return None


def config(problem: AttentionProblem, arch: Arch) -> Config | BackwardConfig:
    return choose_backward(problem, arch) if problem.phase == "backward" else choose(problem, arch)


def origin(problem: AttentionProblem, arch: Arch) -> str:
    """Where the config comes from, in words."""
    return origin_of_choice(problem)


def buffers(problem: AttentionProblem, arch: Arch) -> Buffers:
    """See `strobe.kernels.common.call`."""
    if problem.phase == "backward":
        from strobe.kernels.sm80 import backward_launch

        return backward_launch.buffers(problem, choose_backward(problem, arch))
    from strobe.kernels.sm80 import launch

    return launch.buffers(problem)


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """See `strobe.kernels.common.call`."""
    if problem.phase == "backward":
        from strobe.kernels.sm80 import backward_launch

        return backward_launch.calls(problem, tensors, arch, choose_backward(problem, arch))
    from strobe.kernels.sm80 import launch

    return launch.calls(problem, tensors, arch, choose(problem, arch))
