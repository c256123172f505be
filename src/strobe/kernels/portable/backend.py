"""The portable backend: plain Triton, for any GPU that Triton supports, and for its interpreter on a CPU.

Nothing here imports Triton before a kernel runs, so that `refuses` answers on a machine without it.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from strobe.device import Arch
from strobe.kernels import has_triton
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.kernels.portable.config import config
from strobe.masks import MAX_BOUND
from strobe.problem import AttentionProblem, Varlen, without_gradient

__all__ = ["buffers", "calls", "config", "refuses"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed"
    if problem.dtype not in _DTYPES:
        return f"takes float16, bfloat16 and float32, not {str(problem.dtype).removeprefix('torch.')}"
    if arch.is_untried:
        return f"needs an NVIDIA GPU, not {arch}"
    if not arch.is_gpu and not (arch.name == "CPU" and _interpreting()):
        return "needs a GPU; on a CPU it runs in Triton's interpreter only, with TRITON_INTERPRET=1 set before Triton's import"
    if arch.is_gpu and arch.capability < 75:
        return f"needs compute capability 7.5 or newer, not {arch.capability / 10:.1f}"
    if problem.dtype == torch.bfloat16 and arch.capability == 75:
        return "needs compute capability 8.0 or newer for bfloat16"
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    if wide and problem.dtype == torch.float32 and problem.phase == "backward" and arch.capability == 75:
        return "has too little shared memory for the backward of float32 at head dims over 128"
    if max(_rows(problem)) >= MAX_BOUND:
        return f"counts rows in int32 and takes fewer than 2^30 of them, not {max(_rows(problem))}"
    return without_gradient(problem)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def _rows(problem: AttentionProblem) -> tuple[int, ...]:
    lengths = problem.lengths
    packed = (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else ()
    return (lengths.seqlen_q, lengths.seqlen_kv, *packed)


def buffers(problem: AttentionProblem, arch: Arch) -> Buffers:
    """See `strobe.kernels.common.call`."""
    return _kernels(problem).buffers(problem)


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """See `strobe.kernels.common.call`."""
    return _kernels(problem).calls(problem, tensors, arch)


def _kernels(problem: AttentionProblem) -> ModuleType:
    return importlib.import_module(f"strobe.kernels.portable.{problem.phase}")
