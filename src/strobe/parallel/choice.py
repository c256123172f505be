"""Which method is fastest, by a model of computation and links: what `method="auto"` takes, and `explain` prints.

A rank computes at a share of its GPU's peak, sends and receives at a share of its link's rate, and waits for the part of an
exchange that takes longer than what it computes beside it:

    usp          trades, which nothing hides; then a hop of keys beside the computation with the keys before
    allgather    the first group of heads, which nothing hides; then the next group's keys beside each group's computation

In the backward gradients of keys, in float32, travel too. `strobe roofline --context-parallel` asks the same model about GPUs
that are not there, and a simulation of the schedule itself checks it (`strobe.lab.model.schedule`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from strobe.device import Arch, arch_of
from strobe.masks import Mask
from strobe.parallel.schedules import Method, divides
from strobe.parallel.sharding import Sharding
from strobe.parallel.work import Job


class Link(NamedTuple):
    """What connects a GPU to others: bytes a second in each direction, and seconds until a message begins to arrive."""

    name: str
    rate: float
    latency: float
    source: str


NVLINK = Link("NVLink", 450e9, 10e-6, "NVLink 4: 900 GB/s both ways (H100 data sheet); latency assumed")
INFINIBAND = Link("InfiniBand", 50e9, 20e-6, "NDR: 400 Gb/s for each GPU's adapter (DGX H100 data sheet); latency assumed")

KERNEL_SHARE = 0.7
"""The share of the tensor cores' peak that kernels reach. Assumed; near what README's tables show from 8k tokens on."""
LINK_SHARE = 0.8
"""The share of a link's rate that exchanges reach. Assumed."""
_CPU_FLOPS, _CPU_LINK = 1e11, Link("memory", 5e9, 1e-4, "assumed, for a CPU of which nothing is known")


@dataclass(frozen=True)
class Machine:
    """GPUs, `node` of them joined by one link, nodes by another."""

    arch: Arch
    node: int
    within: Link
    between: Link

    def flops(self, itemsize: int) -> float:
        """FLOPs a second of attention in elements of this size."""
        peak = self.arch.fp32_flops if itemsize >= 4 else self.arch.tensor_flops
        return KERNEL_SHARE * (peak or self.arch.tensor_flops or _CPU_FLOPS)

    def link(self, ranks: int) -> Link:
        """The slowest link among so many ranks that stand next to each other."""
        return self.within if ranks <= self.node else self.between

    def seconds(self, ranks: int, size: float) -> float:
        """How long a rank needs to receive bytes that come from among so many ranks."""
        link = self.link(ranks)
        return link.latency + size / (LINK_SHARE * link.rate) if ranks > 1 else 0.0


@dataclass(frozen=True)
class Workload:
    """An attention as the model sees it. rows, keys: of a rank, over the batch. pairs: visible pairs of a head, over the batch,
    of the rank that has most. reach: the share of the sequence that keys travel (1, or less by a window)."""

    ranks: int
    rows: int
    keys: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    itemsize: int
    pairs: float
    reach: float = 1.0
    training: bool = True

    @property
    def key_bytes(self) -> int:
        """Bytes of a rank's keys and values."""
        return self.keys * self.heads_kv * (self.head_dim + self.head_dim_v) * self.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of a rank's queries."""
        return self.rows * self.heads_q * self.head_dim * self.itemsize

    @property
    def result_bytes(self) -> int:
        """Bytes of a rank's results, with their LSE."""
        return self.rows * self.heads_q * (self.head_dim_v * self.itemsize + 4)

    def flops(self, backward: bool) -> float:
        """FLOPs of the rank that has most pairs."""
        d, dv = self.head_dim, self.head_dim_v
        return self.heads_q * self.pairs * 2 * (3 * d + 2 * dv if backward else d + dv)


class Prediction(NamedTuple):
    """What the model says of a method: seconds of computation, of all exchanges, and of those that nothing hides; bytes of
    memory for others' keys."""

    method: Method
    compute: float
    communication: float
    exposed: float
    memory: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    def __add__(self, other) -> Prediction:
        compute, communication, exposed = (a + b for a, b in zip(self[1:4], other[1:4], strict=True))
        return Prediction(self.method, compute, communication, exposed, max(self.memory, other.memory))


def predict(work: Workload, method: Method, machine: Machine) -> Prediction:
    """The seconds of a forward and, in training, of its backward."""
    step = _allgather if method.name == "allgather" else _usp
    forward = step(work, method, machine, False)
    return forward + step(work, method, machine, True) if work.training else forward


def _usp(work: Workload, method: Method, machine: Machine, backward: bool) -> Prediction:
    size, ring = method.size, work.ranks // method.size
    compute = work.flops(backward) / machine.flops(work.itemsize)
    copies = max(1.0, size / work.heads_kv)  # of key heads that several ranks of a team have
    away, keys, wide = (size - 1) / size, copies * work.key_bytes, 4 / work.itemsize
    there, back = away * (work.query_bytes + keys), away * work.result_bytes
    if backward:
        there, back = there + 2 * away * work.result_bytes, away * wide * (work.query_bytes + keys)
    trades = machine.seconds(size, there) + machine.seconds(size, back)
    hops = min(ring - 1, _ceil(work.reach * ring)) if ring > 1 else 0
    travel = keys * (1 + wide if backward else 1)
    a_hop = machine.seconds(work.ranks, travel) if hops else 0.0
    waits = hops * max(0.0, a_hop - compute / (hops + 1))
    if backward and hops:
        waits += machine.seconds(work.ranks, keys * wide)  # on their way home
    memory = (2 * travel if hops else 0.0) + there + back
    return Prediction(method, compute, trades + hops * a_hop, trades + waits, memory)


def _ceil(x: float) -> int:
    return int(-(-x // 1))


def _allgather(work: Workload, method: Method, machine: Machine, backward: bool) -> Prediction:
    groups = method.size
    compute = work.flops(backward) / machine.flops(work.itemsize)
    others = (work.ranks - 1) * work.key_bytes / groups
    gather = machine.seconds(work.ranks, others)
    give_back = machine.seconds(work.ranks, others * 4 / work.itemsize) if backward else 0.0
    beside = gather + give_back
    exposed = gather + give_back + (groups - 1) * max(0.0, beside - compute / groups)
    memory = 2 * work.ranks * work.key_bytes / groups * (1 + 4 / work.itemsize if backward else 1)
    return Prediction(method, compute, groups * beside, exposed, memory)


def head_groups(heads_kv: int) -> int:
    """In how many groups of heads "allgather" gets keys: four, or the next fewer that divides them."""
    return next(number for number in (4, 3, 2, 1) if heads_kv % number == 0)


def methods(name: str, ranks: int, heads_q: int, heads_kv: int) -> Iterator[Method]:
    """The methods that a name may mean: "auto" all; "usp" every size of a team, rings and one team among them."""
    if name in ("auto", "allgather"):
        yield Method("allgather", head_groups(heads_kv))
    if name in ("auto", "usp"):
        for size in range(1, ranks + 1):
            if ranks % size == 0 and divides(heads_q, heads_kv, size):
                yield Method("usp", size)


def name_of(method: Method, ranks: int) -> str:
    """A method as users know it."""
    if method.name == "allgather":
        return f"allgather, {method.size} groups of heads"
    if method.size == 1:
        return "ring"
    return "ulysses" if method.size == ranks else f"usp, teams of {method.size}"


@dataclass(frozen=True)
class Choice:
    """What the model says of each method, the chosen one first."""

    work: Workload
    machine: Machine
    found: tuple[Prediction, ...]

    @property
    def method(self) -> Method:
        """The chosen one."""
        return self.found[0].method

    def __str__(self) -> str:
        work, machine, best = self.work, self.machine, self.found[0]
        links = f"{machine.within.name} within {machine.node}, {machine.between.name} between them"
        phase = "forward and backward" if work.training else "forward"
        lines = [
            f"model     {work.ranks} ranks of {machine.arch}, {links}; {phase}",
            f"chosen    {name_of(best.method, work.ranks)}",
        ]
        for one in self.found:
            lines.append(
                f"          {name_of(one.method, work.ranks):32} {1e3 * one.seconds:10.3f} ms, of which waiting "
                f"{1e3 * one.exposed:.3f}; {one.memory / 2**20:.0f} MiB for others' keys"
            )
        return "\n".join(lines)


_LEVEL = 1.02
"""Methods whose times are within this factor are level: the one that takes less memory is chosen."""


def choose(work: Workload, machine: Machine, name: str) -> Choice:
    """The choice among the methods that a name may mean. ValueError if there is none."""
    found = [predict(work, method, machine) for method in methods(name, work.ranks, work.heads_q, work.heads_kv)]
    if not found:
        heads = f"{work.heads_q} query heads and {work.heads_kv} key heads"
        raise ValueError(f"no team of method {name!r} fits {heads} on {work.ranks} ranks")
    least = min(one.seconds for one in found)
    best = min((one for one in found if one.seconds <= _LEVEL * least), key=lambda one: (one.memory, one.seconds))
    others = sorted((one for one in found if one is not best), key=lambda one: one.seconds)
    return Choice(work, machine, (best, *others))


def workload(job: Job, q: torch.Tensor, v: torch.Tensor, training: bool) -> Workload:
    """A call's workload."""
    batch = 1 if job.packed else q.shape[0]
    pairs, reach = _pairs(job.band, job.q, job.kv)
    return Workload(
        job.q.ranks, batch * -(-job.q.total // job.q.ranks), batch * -(-job.kv.total // job.kv.ranks), job.heads_q,
        job.heads_kv, q.shape[-1], v.shape[-1], q.dtype.itemsize, batch * pairs, reach, training,
    )  # fmt: skip


_COUNTED = 4096
"""Rows up to which pairs are counted; of longer sequences the share that is seen is that of a shorter one like it."""


def _pairs(band: Mask, q: Sharding, kv: Sharding) -> tuple[float, float]:
    """The visible pairs of the rank that has most, and how far keys travel, as a share of the longest sequence."""
    pairs = reach = 0.0
    for n_q, n_kv in zip(q.lengths, kv.lengths, strict=True):
        if n_q and n_kv:
            share, far = seen_share(band, n_q, n_kv, q.layout == "contiguous")
            pairs += share * n_q * n_kv / q.ranks
            reach = max(reach, far if q.layout == "contiguous" else 1.0)
    return pairs, reach


def seen_share(band: Mask, n_q: int, n_kv: int, most: bool = False) -> tuple[float, float]:
    """The share of pairs that a band leaves (most: of those of the last rows, which see most where it is causal), and how far
    back rows see, as a share of the keys."""
    shrink = max(1, -(-max(n_q, n_kv) // _COUNTED))
    left, right, prefix = (None if bound is None else -(-bound // shrink) for bound in band.band)
    scaled = Mask(left, right, prefix)
    rows, keys = max(1, n_q // shrink), max(1, n_kv // shrink)
    share = scaled.count(rows, keys) / (rows * keys)
    causal = band.right is not None and band.left is None
    far = 1.0 if band.left is None or band.right is None else min(1.0, (band.left + band.right) / n_kv)
    return min(1.0, 2 * share) if most and causal else share, far


def machine_of(device: torch.device, ranks: int) -> Machine:
    """The machine that a device is in: GPUs of a node by the launcher's LOCAL_WORLD_SIZE, or as many as there are here."""
    arch = arch_of(device)
    if not arch.is_gpu:
        return Machine(arch, ranks, _CPU_LINK, _CPU_LINK)
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.cuda.device_count()
    return Machine(arch, node, NVLINK, INFINIBAND)
