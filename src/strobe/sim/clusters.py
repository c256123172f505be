"""Models clusters: two CTAs that run one program together.

A Gluon program for two CTAs is written once, over tensors that they share: `cga_layout` of a layout says which dimension
they halve. Here each CTA runs all roles itself, as coroutines of its own, over tensors of the full shape of which only its
own half means anything: memory is touched there alone, and what it loads has NaN elsewhere. So the two may drift apart as on
a GPU, and what one reads of the other's without a barrier is a race.

Layout conversions that would cross CTAs are not looked for: the compiler refuses them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.experimental.gluon import language as gl

from strobe.sim.context import machine
from strobe.sim.errors import Unsupported
from strobe.sim.kernel_source import where


def halved_dim(layout, rank: int) -> int | None:
    """The one of `rank` dimensions that two CTAs halve; None if each has all of it. Layouts speak of the last dimensions."""
    basis = _basis(layout)
    if basis is None or not any(basis):
        return None
    return rank - len(basis) + next(i for i, step in enumerate(basis) if step)


def _basis(layout) -> list[int] | None:
    if isinstance(layout, gl.SliceLayout):
        parent = _basis(layout.parent)
        return None if parent is None else parent[: layout.dim] + parent[layout.dim + 1 :]
    bases = getattr(layout, "block_bases", None) or getattr(layout, "cga_layout", None)
    return list(bases[0]) if bases else None


def transposed(layout, order: list[int]):
    """The layout of a transposed view, as far as it says what two CTAs halve."""
    basis = _basis(layout)
    if machine().num_ctas == 1 or basis is None or len(basis) != len(order):
        return layout
    return replace(layout, cga_layout=[[basis[dim] for dim in order]])


def own(layout, data: torch.Tensor) -> torch.Tensor:
    """This CTA's part of a tensor: all of it where there is no cluster."""
    running = machine()
    if running.num_ctas == 1:
        return data
    dim = halved_dim(layout, data.dim())
    if dim is None:
        raise Unsupported(f"{where()}: memory of {list(data.shape)} of which each CTA of a cluster has a copy of its own")
    half = data.shape[dim] // 2
    return data.narrow(dim, running.rank * half, half)


def only_own(layout, data: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with NaN (or -1) where it is not this CTA's."""
    if machine().num_ctas == 1:
        return data.clone()
    copy = torch.full_like(data, torch.nan if data.dtype.is_floating_point else -1)
    own(layout, copy).copy_(own(layout, data))
    return copy


def own_lanes(layout, shape: torch.Size) -> torch.Tensor | None:
    """The elements of a register tensor that are this CTA's, bool; None: all."""
    running = machine()
    dim = None if running.num_ctas == 1 else halved_dim(layout, len(shape))
    if dim is None:
        return None
    half = shape[dim] // 2
    lanes = torch.zeros(shape, dtype=torch.bool)
    lanes.narrow(dim, running.rank * half, half).fill_(True)
    return lanes
