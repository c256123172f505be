"""The backend for e4m3 inputs on a CPU: attention, in float64, of the values that inputs and descales stand for."""

from __future__ import annotations

from dataclasses import replace

import torch

from strobe.cpu import tiled
from strobe.device import Arch
from strobe.problem import AttentionProblem, Operands

DESCALE_ROWS = 128
"""Rows of q or k that share a descale, where a head has several descales."""


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if arch.name != "CPU":
        return "runs on a CPU only"
    if problem.dtype != torch.float8_e4m3fn:
        return f"takes float8_e4m3fn, not {str(problem.dtype).removeprefix('torch.')}"
    return "has no backward" if problem.phase == "backward" else None


def config(problem: AttentionProblem, arch: Arch) -> tiled.Config:
    return tiled.config(problem, arch)


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    values = operands._replace(
        q=_value(operands.q, operands.q_descale, operands.cu_seqlens_q),
        k=_value(operands.k, operands.k_descale, operands.cu_seqlens_kv),
        v=_value(operands.v, operands.v_descale, operands.cu_seqlens_kv),
    )
    out, lse = tiled.forward(replace(problem, dtype=torch.float64), values)
    return out.to(problem.out_dtype), lse.float()


def _value(x: torch.Tensor, descale: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The values that x stands for: x times its descale, in float64."""
    value = x.double()
    if descale is None:
        return value
    if descale.dim() == 3:
        by_row = descale.transpose(1, 2).repeat_interleave(DESCALE_ROWS, 1)[:, : x.shape[1]]
    else:
        by_row = descale.repeat_interleave(x.shape[-2] // descale.shape[1], 1)
        by_row = by_row[:, None] if cu_seqlens is None else by_row.repeat_interleave(cu_seqlens.diff(), 0)
    if cu_seqlens is None:
        return value * by_row[..., None]
    value[: len(by_row)] *= by_row[..., None]  # rows of no sequence have no descale
    return value
