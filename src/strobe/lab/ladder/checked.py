"""Whether a rung's numbers are right: against float64, on any device, and in the simulator."""

from __future__ import annotations

from typing import Any

import torch

from strobe.lab.bench.accuracy import BOUNDS
from strobe.lab.bench.plan import DTYPES
from strobe.ladder import Rung

SIMULATED = 1, 512, 64
"""Heads, length and head dim of the problem that the simulator is given."""


def name_of(dtype: torch.dtype) -> str:
    return next(name for name, kind in DTYPES.items() if kind == dtype)


def relative_error(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The largest relative error of a row of the first or last head against float64. NaN counts as infinite."""
    worst = 0.0
    for head in {0, q.shape[0] - 1}:
        rows = torch.linspace(0, q.shape[1] - 1, min(256, q.shape[1]), device=q.device).round().long()
        p = torch.softmax(q[head, rows].double() @ k[head].double().T * q.shape[-1] ** -0.5, -1)
        want = p @ v[head].double()
        size = want.norm(dim=-1)
        error = ((out[head, rows].double() - want).norm(dim=-1) / size.clamp(min=size.square().mean().sqrt())).max().item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def checked(error: float, dtype: str) -> dict[str, str]:
    """What is wrong with a result of that relative error, if anything; dtype: such as "bf16"."""
    if error <= BOUNDS[dtype]:
        return {}
    return {"wrong": f"relative error {error:.1e} against float64, allowed {BOUNDS[dtype]:.0e}"}


def simulated(rung: Rung, dtype: torch.dtype, order: str = "random", seed: int = 0) -> dict[str, Any]:
    """A rung's error on a small problem in the simulator, or what the simulator finds wrong. ImportError where what the
    simulator needs (greenlet) is not installed."""
    from strobe.sim import SimulationError, simulate

    if not rung.simulated_as:
        return {"refused": f"rung {rung.number} has no kernel of its own to simulate"}
    kind = torch.float32 if rung.takes_fp32 else dtype
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*SIMULATED, generator=generator).to(kind) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    try:
        for launch in rung.launches(q, k, v, out):
            options: dict[str, Any] = {"order": order, "seed": seed, "arch": rung.simulated_as}
            simulate(launch.kernel, launch.grid, *launch.arguments, **options, **launch.constants)
    except SimulationError as mistake:
        return {"wrong": f"{type(mistake).__name__}: {mistake}"}
    error = relative_error(out, q, k, v)
    return {"error": error, **checked(error, name_of(kind)), "simulated": list(SIMULATED)}
