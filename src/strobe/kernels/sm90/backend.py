"""The Hopper backend, for problems that its TMA descriptors and tiles can take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from strobe.device import Arch, arch_of
from strobe.kernels import has_triton
from strobe.kernels.common.refusals import gluon_refuses
from strobe.kernels.sm90.backward_config import choose as choose_backward
from strobe.kernels.sm90.config import choose
from strobe.kernels.sm90.config import origin as origin_of_choice
from strobe.problem import (
    AttentionProblem,
    Gradients,
    Operands,
    Varlen,
    addressable,
    lse_shape,
    summed_bias,
    without_gradient,
    zero_bias,
)
from strobe.scores import sinks_gradient

if TYPE_CHECKING:
    from strobe.eager import BackwardPlan, Plan

MOST_ROWS = 2**29

_optimistic = True


def use_optimistic_softmax(use: bool) -> None:
    """Whether Hopper's forward may take the optimistic softmax (it does by default): False for the safe one, with a running
    maximum, from the next call on. The results agree within the precision of the dtype (docs/optimistic_softmax.md)."""
    global _optimistic
    if not isinstance(use, bool):
        raise TypeError(f"use_optimistic_softmax takes True or False, got {use!r}")
    _optimistic = use
    from strobe import eager

    eager.forget()


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if arch.capability != 90:
        return f"needs a Hopper GPU (sm_90), not {arch}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if not problem.scale > 0 and not problem.score.softcap:
        return f"takes a positive scale (it takes maxima before it scales), not {problem.scale:g}"
    if problem.phase == "backward":
        return gluon_refuses(problem) or backward_refuses(problem) or without_gradient(problem)
    return gluon_refuses(problem)


def backward_refuses(problem: AttentionProblem) -> str | None:
    lengths = problem.lengths
    rows = problem.heads_q * (lengths.total_q if isinstance(lengths, Varlen) else lengths.batch * lengths.seqlen_q)
    if rows >= MOST_ROWS:
        return f"counts the query rows of all heads in int32 and takes fewer than 2^29 of them in its backward, not {rows}"
    return None


def config(problem: AttentionProblem, arch: Arch):
    if problem.phase == "backward":
        return choose_backward(problem)
    return replace(choose(problem), optimistic=_optimistic and may_be_optimistic(problem))


def origin(problem: AttentionProblem, arch: Arch) -> str:
    """Where the config comes from, in words."""
    return "measured, for each head dim" if problem.phase == "backward" else origin_of_choice(problem)


def may_be_optimistic(problem: AttentionProblem) -> bool:
    """Whether a tile's first block is likely to say how large its scores are. Functions and biases may put what counts
    anywhere; slopes favour near keys, which lead under a causal mask alone."""
    score, mask = problem.score, problem.mask
    near = score.alibi is None or mask.right == 0
    return near and score.bias is None and score.function is None and mask.function is None


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    q = operands.q
    if 0 in q.shape or operands.k.shape[0] == 0 or problem.lengths.seqlen_kv == 0:
        return _without_keys(problem, operands)
    from strobe.kernels.portable import forward as portable
    from strobe.kernels.sm90.launch import launch
    from strobe.kernels.workspace import lock, workspace

    with lock(q.device):
        out, lse, notes, spans = launch(problem, operands, config(problem, arch_of(q.device)))
        redone = workspace(q.device, 0).counters[2:3]
        portable.redo(problem, operands, out, lse, notes, redone, spans)  # exits at once where there is no note
    return out, lse


def backward(
    problem: AttentionProblem, operands: Operands, out, lse, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Beside the gradients it takes, for each query row and head, 8 bytes, with folded statistics 32, under a mask 4 more, and
    in one pass 4 for each column of the padded head dim."""
    if _no_pairs(operands):
        from strobe.kernels.portable import backend as portable

        return portable.backward(problem, operands, out, lse, dout, dlse)
    from strobe.kernels.sm90 import backward_launch
    from strobe.kernels.workspace import lock, workspace

    empty, bias, sinks = _gradient_maker(problem), problem.score.bias, problem.score.sinks
    grads = Gradients(*(empty(x) for x in operands[:3]))
    if bias is not None and "bias" in problem.learned:
        grads = grads._replace(bias=zero_bias(problem, bias))
    dout = dout if addressable(dout) else dout.contiguous()
    with torch.cuda.device_of(dout), lock(dout.device):
        config, notes = choose_backward(problem), sum(backward_launch.number_of_notes(problem))
        space = backward_launch.buffers(problem, config, dout.device, workspace(dout.device, notes))
        backward_launch.launch(problem, operands, out, lse, dout, dlse, grads, space, config)
    if bias is not None and grads.bias is not None:
        grads = grads._replace(bias=summed_bias(grads.bias, bias))
    if sinks is not None and space.delta is not None and "sinks" in problem.learned:
        grads = grads._replace(sinks=sinks_gradient(sinks, lse, space.delta))
    return grads


def backward_plan(problem: AttentionProblem, operands: Operands, tensors: tuple[Any, ...]) -> BackwardPlan | None:
    """See `strobe.eager`."""
    dout = tensors[5]
    if _no_pairs(operands) or not addressable(dout):
        return None
    from strobe.kernels.sm90.backward_plan import BackwardPlan

    return BackwardPlan(problem, operands, tensors, choose_backward(problem), _gradient_maker(problem)).run


def _no_pairs(operands: Operands) -> bool:
    return 0 in operands.q.shape or 0 in operands.k.shape


def _gradient_maker(problem: AttentionProblem) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of a tensor it makes another, contiguous one, of zeros where not all of it is written."""
    make = torch.zeros_like if problem.varlen or problem.seqused else torch.empty_like
    return functools.partial(make, memory_format=torch.contiguous_format)


def plan(problem: AttentionProblem, operands: Operands, tensors: tuple[torch.Tensor | None, ...]) -> Plan | None:
    """See `strobe.eager`."""
    if 0 in operands.q.shape or operands.k.shape[0] == 0 or problem.lengths.seqlen_kv == 0:
        return None
    from strobe.kernels.sm90.plan import ForwardPlan

    return ForwardPlan(problem, operands, tensors, config(problem, arch_of(operands.q.device))).run


def _without_keys(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing to attend to, or nobody who does."""
    from strobe.kernels.sm90.launch import fill_blind

    q = operands.q
    out = torch.empty(*q.shape[:-1], problem.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(lse_shape(problem), dtype=torch.float32, device=q.device)
    fill_blind(out, lse, problem.score.sinks, operands.cu_seqlens_q, operands.seqused_q)
    return out, lse
