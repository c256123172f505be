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
from strobe.sim.errors import Race, Unsupported
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


# ---- CTAs that are programs of their own (`kernels.common.cluster`)


class Meeting:
    """What the CTAs of a cluster have posted to each other, by the rank of who did; who has begun; when the last one posted."""

    def __init__(self) -> None:
        self.begun: set[int] = set()
        self.posted: dict[int, tuple[torch.Tensor, ...]] = {}
        self.time = 0.0


def _meeting(ctas: int) -> tuple[Meeting, int]:
    """The meeting of the running program's cluster of so many, and its rank there."""
    cluster, rank = divmod(machine().program_id(0), ctas)
    return machine().meetings.setdefault((cluster, machine().program_id(1)), Meeting()), rank


def begin(ctas: int) -> None:
    """Say that the running program has begun."""
    meeting, rank = _meeting(ctas)
    meeting.begun.add(rank)


def all_to_all(ctas: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Post the i-th of equal shares of each tensor to program i of a cluster; what is posted to this one, [ctas, numbers of a
    share] of each. Race if this one has not said that it may be posted to."""
    running, line = machine(), where()
    meeting, rank = _meeting(ctas)
    if rank not in meeting.begun:
        raise Race(f"{line}: others post to a CTA of their cluster that has not said that it has begun")
    meeting.posted[rank] = tensors
    meeting.time = max(meeting.time, running.partition.time)
    running.wait(
        lambda: len(meeting.posted) == ctas,
        lambda: f"all CTAs of its cluster at {line}",
        lambda: meeting.time + running.costs.named_barrier,
    )
    return [torch.stack([meeting.posted[i][n].reshape(ctas, -1)[rank] for i in range(ctas)]) for n in range(len(tensors))]
