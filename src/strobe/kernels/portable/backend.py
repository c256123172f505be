"""The portable backend: plain Triton, for any GPU that Triton supports, and for its interpreter on a CPU.

Nothing here imports Triton before a kernel runs, so that `refuses` answers on a machine without it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from strobe.device import Arch
from strobe.kernels import has_triton
from strobe.kernels.portable.config import config
from strobe.masks import MAX_BOUND
from strobe.problem import AttentionProblem, Gradients, Operands, Varlen, lse_shape, summed_bias, without_gradient, zero_bias
from strobe.scores import sinks_gradient

if TYPE_CHECKING:
    from strobe.eager import BackwardPlan, Plan

__all__ = ["backward", "backward_plan", "config", "forward", "plan", "refuses"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if not has_triton():
        return "needs Triton, which is not installed"
    if problem.dtype not in _DTYPES:
        return f"takes float16, bfloat16 and float32, not {str(problem.dtype).removeprefix('torch.')}"
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


def _is_empty(problem: AttentionProblem) -> bool:
    """Whether there is no pair of a query and a key."""
    return 0 in (problem.lengths.batch, *_rows(problem))


def _allocate(problem: AttentionProblem, x: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of x's dtype that hold 0 where no kernel writes: in rows of no sequence or not used, or everywhere."""
    make = x.new_zeros if problem.varlen or problem.seqused or _is_empty(problem) else x.new_empty
    return [make(shape) for shape in shapes]


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = operands.q, operands.v
    (out,) = _allocate(problem, q, (*q.shape[:-1], v.shape[-1]))
    lse = torch.full(lse_shape(problem), -torch.inf, dtype=torch.float32, device=q.device)
    if q.numel() and (problem.score.sinks is not None or not _is_empty(problem)):  # without keys a row still has its sink
        from strobe.kernels.portable.forward import launch

        launch(problem, operands, out, lse)
    return out, lse


def backward(problem: AttentionProblem, operands: Operands, out, lse, dout, dlse) -> Gradients:
    bias, sinks = problem.score.bias, problem.score.sinks
    grads = Gradients(*_allocate(problem, operands.q, *(x.shape for x in operands[:3])))
    if bias is not None and "bias" in problem.learned:
        grads = grads._replace(bias=zero_bias(problem, bias))
    delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
    if out.numel():
        from strobe.kernels.portable import backward as kernels

        kernels.launch_delta(problem, out, dout, dlse, delta)
        if not _is_empty(problem):
            kernels.launch(problem, operands, lse, dout, delta, grads)
    if bias is not None and grads.bias is not None:
        grads = grads._replace(bias=summed_bias(grads.bias, bias))
    if sinks is not None and "sinks" in problem.learned:
        grads = grads._replace(sinks=sinks_gradient(sinks, lse, delta))
    return grads


def plan(problem: AttentionProblem, operands: Operands, tensors: tuple[torch.Tensor | None, ...]) -> Plan | None:
    """See `strobe.eager`."""
    if not _may_be_prepared(problem, operands):
        return None
    from strobe.kernels.portable.plan import ForwardPlan

    return ForwardPlan(problem, operands, tensors).run


def backward_plan(problem: AttentionProblem, operands: Operands, tensors: tuple[Any, ...]) -> BackwardPlan | None:
    """See `strobe.eager`."""
    dout = tensors[5]
    if not _may_be_prepared(problem, operands) or dout.stride(-1) != 1:
        return None
    from strobe.kernels.portable.plan import BackwardPlan

    return BackwardPlan(problem, operands, tensors).run


def _may_be_prepared(problem: AttentionProblem, operands: Operands) -> bool:
    """Whether there is something to launch, by CUDA's driver."""
    return _has_driver(operands.q) and operands.q.numel() > 0 and not _is_empty(problem)


def _has_driver(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None
