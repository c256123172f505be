"""Models tcgen05 (sm_100): matrix products that one thread issues, from shared or tensor memory into tensor memory.

The products of one thread run in order. `commit` lets an mbarrier know when all that it issued so far are done; nothing else
tells. Operands in shared memory are read through the async proxy.
"""

from __future__ import annotations

import torch

from strobe.sim import barriers
from strobe.sim.clocks import Knowledge
from strobe.sim.clusters import halved_dim
from strobe.sim.context import machine
from strobe.sim.errors import IllegalOperation, Unsupported
from strobe.sim.kernel_source import where
from strobe.sim.machine import Partition
from strobe.sim.memory import Access
from strobe.sim.units.tensor_memory import TensorMemoryView


class Queue:
    """The products of one partition: an agent whose ticks count them."""

    def __init__(self, partition: Partition):
        self.agent = partition.cta.new_agent()
        self.knows = Knowledge()
        self.issued = 0
        self.time = 0.0

    def at_exit(self) -> None:
        """Do nothing: whether its last product has been waited for shows when the CTA ends."""


def _queue() -> Queue:
    partition = machine().partition
    if "tcgen05" not in partition.units:
        partition.units["tcgen05"] = Queue(partition)
    return partition.units["tcgen05"]


def mma(a, b, acc, use_acc=True, pred=True, multicast=False, mbarriers=None, mbarrier_preds=None) -> None:
    """Issue a product. In a cluster the CTA of rank 0 issues it for both, and the barriers of both are told."""
    barriers.meet_after_initialising()
    running, place = machine(), where()
    if multicast and running.num_ctas > 1:
        raise Unsupported(f"{place}: the simulator has no model of products whose operands are multicast")
    running.spend(running.costs.mma_issue)
    running.pause()
    if not pred or running.rank:
        return
    _product(a, b, acc, bool(use_acc), place)
    for i, barrier in enumerate(mbarriers or ()):
        if mbarrier_preds is None or mbarrier_preds[i]:
            _commit(barrier, range(running.num_ctas))


def _product(a, b, acc, use_acc: bool, place: str) -> None:
    running = machine()
    _check(a, b, acc, place)
    queue, partition = _queue(), running.partition
    queue.issued += 1
    queue.knows.join(partition.knows)
    queue.knows.learn(queue.agent, queue.issued)
    what = f"tcgen05.mma of {partition.name} at {place}"
    access = Access(queue.agent, queue.issued, queue.knows.copy(), what, generic=False)
    everywhere = tuple(range(running.num_ctas))
    _touch(a, access, False, everywhere)
    _touch(b, access, False, everywhere)
    if use_acc:
        _touch(acc, access, False, everywhere)
    _touch(acc, access, True, everywhere)
    partition.tick()
    running.cta.must_know[queue.agent] = (queue.issued, what, everywhere)
    begin, queue.time = _time(a, b, partition, queue)

    def finish() -> None:
        product = a.data.float() @ b.data.float()
        acc.data.copy_(product + acc.data if use_acc else product)

    running.cta.post(("tcgen05", queue.agent), what, finish, queue.time)
    running.span("tensor core", f"{acc.name} from {a.name}, {b.name}", begin, queue.time)


def copy(src, dst) -> None:
    """Copy from shared memory to tensor memory, in order with the products (tcgen05_copy)."""
    running, place = machine(), where()
    running.spend(running.costs.mma_issue)
    running.pause()
    if running.num_ctas > 1 or not isinstance(dst, TensorMemoryView) or src.shape != dst.shape or src.dtype != dst.dtype:
        raise Unsupported(
            f"{place}: the simulator copies shared to tensor memory of one CTA, of the same shape and type, not "
            f"{src.shape} {src.dtype} to {dst.shape} {dst.dtype}"
        )
    queue, partition = _queue(), running.partition
    queue.issued += 1
    queue.knows.join(partition.knows)
    queue.knows.learn(queue.agent, queue.issued)
    what = f"tcgen05.cp of {partition.name} at {place}"
    access = Access(queue.agent, queue.issued, queue.knows.copy(), what, generic=False)
    _touch(src, access, False, (0,))
    _touch(dst, access, True, (0,))
    partition.tick()
    running.cta.must_know[queue.agent] = (queue.issued, what, (0,))
    queue.time = max(queue.time, partition.time) + src.data.numel() * src.data.element_size() / running.costs.operand_bytes

    def finish() -> None:
        dst.data.copy_(src.data)

    running.cta.post(("tcgen05", queue.agent), what, finish, queue.time)


def commit(barrier, pred=True, descs=()) -> None:
    """Arrive once when all products issued so far are done, in both CTAs of a cluster if `descs` are given (tcgen05_commit)."""
    barriers.meet_after_initialising()
    running = machine()
    running.pause()
    if pred and running.rank == 0:
        _commit(barrier, range(running.num_ctas if len(descs) else 1))


def _commit(barrier, ranks) -> None:
    running, place = machine(), where()
    running.count_barrier_use("commit")
    queue, partition = _queue(), running.partition
    told = dict.fromkeys(barriers.at(barrier, rank) for rank in ranks)  # both have one barrier, or each its own
    knows = queue.knows.copy()
    knows.join(partition.knows)
    partition.tick()
    time = max(queue.time, partition.time) + running.costs.commit_latency
    what = f"tcgen05.commit of {partition.name} at {place}"

    def finish() -> None:
        for at in told:
            at.arrive(1, knows, what, time=time, agent=queue.agent)

    running.cta.post(("tcgen05", queue.agent), what, finish, time)


def _touch(operand, access: Access, write: bool, ranks: tuple[int, ...]) -> None:
    if isinstance(operand, TensorMemoryView):
        operand.touch(access, write, ranks)
    else:
        operand.touch(access, write)


def _check(a, b, acc, place: str) -> None:
    running = machine()
    if running.arch // 10 not in (10, 11):
        raise IllegalOperation(f"{place} uses tcgen05, which sm_{running.arch} does not have")
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b or acc.shape != [m, n] or acc.data.dtype != torch.float32:
        raise IllegalOperation(f"{place} multiplies [{m}, {k}] by [{k_b}, {n}] into {acc.shape} of {acc.dtype}")
    if isinstance(b, TensorMemoryView):
        raise IllegalOperation(f"{place}: the second operand of tcgen05.mma is in shared memory, {b.name} is in tensor memory")
    if running.num_ctas > 1:
        for operand, dim, of in ((a, 0, "rows"), (b, 1, "columns"), (acc, 0, "rows")):
            if halved_dim(operand.layout, 2) != dim:
                raise IllegalOperation(f"{place}: of a product of two CTAs each takes half the {of} of {operand.name}")
    if not isinstance(acc, TensorMemoryView):
        raise IllegalOperation(f"{place}: tcgen05.mma accumulates in tensor memory, {acc.name} is not there")


def _time(a, b, partition: Partition, queue: Queue) -> tuple[float, float]:
    running = machine()
    if not running.timed:
        return 0.0, 0.0
    (m, k), n = a.shape, b.shape[1]
    m //= running.num_ctas  # each CTA's tensor core computes its own rows
    cycles = running.costs.mma_cycles(m, n, k, b.data.element_size(), isinstance(a, TensorMemoryView))
    steps = k * b.data.element_size() / 32  # instructions, each of 32 bytes along k, which wait for each other's accumulator
    earliest = max(partition.time, queue.time)
    return running.cta.pipes["tensor core"].reserve(earliest, cycles + steps * running.costs.mma_latency)
