"""Models cp.async (sm_80 on): threads' copies from global to shared memory, in groups that finish in order.

They write through the generic proxy. `wait_group(n)` waits until at most the n newest groups are open.
"""

from __future__ import annotations

import torch

from strobe.sim import barriers
from strobe.sim.clocks import Knowledge
from strobe.sim.context import machine
from strobe.sim.errors import IllegalOperation, Unfinished
from strobe.sim.kernel_source import where
from strobe.sim.machine import Partition
from strobe.sim.memory import Access
from strobe.sim.tensor import Pointer, Tensor


class Groups:
    """The copy groups of one partition: an agent whose ticks count groups."""

    def __init__(self, partition: Partition):
        self.agent = partition.cta.new_agent()
        self.knows = Knowledge()
        self.current, self.finished, self.waited = 1, 0, 0
        self.filled = False
        self.times = {0: 0.0}

    def at_exit(self) -> None:
        if self.waited < self.current - 1 or self.filled:
            raise Unfinished(f"{machine().partition.name} ends and has not waited for all of its cp.async copies")


def _groups() -> Groups:
    partition = machine().partition
    if "cp.async" not in partition.units:
        partition.units["cp.async"] = Groups(partition)
    return partition.units["cp.async"]


def copy(smem, pointer: Pointer, mask: Tensor | None = None, **_) -> None:
    """Copy from global to shared memory (async_copy.async_load); masked elements become zero."""
    running, groups, place = machine(), _groups(), where()
    running.pause()
    if list(pointer.shape) != smem.shape:
        raise IllegalOperation(f"{place} copies {list(pointer.shape)} pointers to {smem.name} of shape {smem.shape}")
    partition, number = running.partition, groups.current
    groups.knows.join(partition.knows)
    groups.knows.learn(groups.agent, number)
    access = Access(groups.agent, number, groups.knows.copy(), f"cp.async by {partition.name} at {place}")
    offsets = pointer.offsets()
    lanes = torch.ones(offsets.shape, dtype=torch.bool) if mask is None else mask.data.expand(offsets.shape)
    pointer.array.read(offsets[lanes].numpy(), running.cta.index, access)
    smem.touch(access, write=True)
    groups.filled = True
    partition.tick()
    bytes_ = smem.numel * smem.data.element_size()
    running.issue("cp_async", smem.numel, [])
    end = 0.0
    if running.timed:
        begin, end = running.cta.pipes["TMA"].reserve(partition.time, bytes_ / running.costs.tma_bytes)
        end += running.costs.cp_async_latency
        running.span("cp.async", f"copy {smem.name}", begin, end)

    def finish() -> None:
        smem.data.copy_(torch.where(lanes, pointer.array.flat[torch.where(lanes, offsets, 0)], 0))
        groups.times[number] = max(groups.times.get(number, 0.0), end)

    running.cta.post(("cp.async", groups.agent), access.what, finish, end)


def commit_group() -> None:
    """Close the group of the copies issued so far."""
    running, groups = machine(), _groups()
    running.pause()
    number = groups.current
    groups.current += 1
    groups.filled = False

    def finish() -> None:
        groups.finished = number
        groups.times[number] = max(groups.times.get(number, 0.0), groups.times[number - 1])

    running.cta.post(("cp.async", groups.agent), "commit", finish, running.partition.time)


def wait_group(num_outstanding=0) -> None:
    """Wait until at most the newest `num_outstanding` groups are open."""
    running, groups, place = machine(), _groups(), where()
    target = groups.current - 1 - int(num_outstanding)
    running.wait(
        lambda: groups.finished >= target,
        lambda: f"cp.async group {target} at {place}",
        lambda: groups.times.get(max(target, 0), 0.0),
    )
    groups.waited = max(groups.waited, target)
    if target > 0:
        running.partition.knows.learn(groups.agent, target)


def mbarrier_arrive(mbarrier, increment_count=True) -> None:
    """Arrive with each thread when the copies that it issued so far are done: one arrival more to wait for, or, without
    increment_count, one of those that the barrier counts."""
    running, groups, barrier = machine(), _groups(), barriers.at(mbarrier)
    running.pause()
    partition, what = running.partition, f"cp.async of {running.partition.name} at {where()}"
    knows = groups.knows.copy()
    knows.join(partition.knows)
    partition.tick()
    groups.current += 1
    groups.waited = groups.current - 1
    groups.filled = False
    number, threads = groups.current - 1, 32 * partition.warps
    if increment_count:
        barrier.pending += threads

    def finish() -> None:
        groups.finished = number
        barrier.arrive(threads, knows, what, time=groups.times.get(number, 0.0), agent=groups.agent)

    running.cta.post(("cp.async", groups.agent), what, finish, partition.time)
