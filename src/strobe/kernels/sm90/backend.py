"""The Hopper backend: forward only, for problems that its TMA descriptors and tiles can take."""

from __future__ import annotations

import torch

from strobe.device import Arch
from strobe.kernels import has_triton
from strobe.kernels.common.refusals import gluon_forward_refuses
from strobe.kernels.sm90.config import Config, choose
from strobe.problem import AttentionProblem, Operands, Varlen, lse_shape

HEAD_DIMS = (64, 128, 256)


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if arch.capability != 90:
        return f"needs a Hopper GPU (sm_90), not {arch}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim:
        return f"takes head dims 64, 128 and 256, the same for k and v, not {problem.head_dim} and {problem.head_dim_v}"
    if isinstance(problem.lengths, Varlen):
        return "takes no packed sequences yet"
    return gluon_forward_refuses(problem)


def config(problem: AttentionProblem, arch: Arch) -> Config:
    return choose(problem)


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    q = operands.q
    if 0 in q.shape or operands.k.shape[1] == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), torch.full(
            lse_shape(problem), -torch.inf, dtype=torch.float32, device=q.device
        )
    from strobe.kernels.portable import forward as portable
    from strobe.kernels.sm90.forward import launch

    out, lse, notes = launch(problem, operands, choose(problem))
    if notes is not None:
        portable.redo(problem, operands, out, lse, notes)  # exits at once where there is no note
    return out, lse
