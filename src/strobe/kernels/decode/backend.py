"""The decode backend: attention over a cache on tensor cores, for Ampere and later."""

from __future__ import annotations

import functools

import torch

from strobe.device import Arch
from strobe.kernels import has_triton
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.kernels.decode.choice import DTYPES, choose
from strobe.kernels.decode.config import MOST_COLUMNS, Config
from strobe.kernels.decode.sizes import is_latent, jobs, padded, room_of
from strobe.masks import MAX_BOUND
from strobe.serving.problem import DecodeProblem


def refuses(problem: DecodeProblem, arch: Arch) -> str | None:
    if not arch.is_gpu:
        return f"needs an NVIDIA GPU, not {arch}" if arch.is_untried else "needs a GPU"
    if arch.capability < 80:
        return f"needs compute capability 8.0 or newer, not {arch.capability / 10:.1f}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if problem.dtype not in DTYPES:
        return f"takes queries in float16 and bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.kv_dtype == torch.float8_e4m3fn and arch.capability < 89:
        return f"needs compute capability 8.9 or newer for a cache of float8_e4m3fn, not {arch.capability / 10:.1f}"
    if max(padded(problem.head_dim), padded(problem.head_dim_v)) > MOST_COLUMNS and not is_latent(problem):
        return (
            f"takes head dims up to {MOST_COLUMNS}, or 576 whose first 512 are v, not {problem.head_dim}, {problem.head_dim_v}"
        )
    chosen = config(problem, arch)
    if chosen.smem > arch.smem_per_block:
        dims = f"head dims {problem.head_dim}, {problem.head_dim_v}"
        return f"needs {chosen.smem} bytes of shared memory for {dims}, and a block has {arch.smem_per_block}"
    if problem.unaligned:
        return f"needs bases and strides in multiples of 16 bytes (for cp.async), which {', '.join(problem.unaligned)} lacks"
    units = jobs(problem, chosen) * -(-problem.capacity // 16)
    if max(problem.capacity, units) >= MAX_BOUND:
        return f"counts steps of keys in int32, and takes fewer than 2^30 of them, not {max(problem.capacity, units)}"
    return None


@functools.lru_cache(256)  # asked four times for a call that looks like none before
def config(problem: DecodeProblem, arch: Arch) -> Config:
    return choose(problem, arch)


def origin(problem: DecodeProblem, arch: Arch) -> str | None:
    """What bits depend on, where they must not depend on the batch."""
    if not problem.deterministic:
        return None
    room = room_of(problem.capacity)
    return f"splits at fixed keys: a request has the same bits in all calls with room for {room // 2 + 1} to {room} keys"


def buffers(problem: DecodeProblem, arch: Arch) -> Buffers:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.decode import launch

    return launch.buffers(problem, arch, config(problem, arch))


def calls(problem: DecodeProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.decode import launch

    return launch.calls(problem, tensors, arch, config(problem, arch))
