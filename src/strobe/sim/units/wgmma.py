"""Models wgmma (sm_90): a warpgroup's matrix products, asynchronous and in order; the accumulator is in registers.

The operands in shared memory are read through the async proxy until the product is done, which only `warpgroup_mma_wait` tells;
until then the accumulator holds nothing that may be used, except by the next product. A product of memory that nobody has
written, or that is written at the same time, is a mistake as soon as anything comes to depend on it: a kernel may drop it.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import torch

from strobe.sim.clocks import Knowledge
from strobe.sim.context import machine
from strobe.sim.errors import IllegalOperation, MissingFence, Race, Unfinished, Uninitialised
from strobe.sim.kernel_source import where
from strobe.sim.machine import Partition
from strobe.sim.memory import Access, Outcome
from strobe.sim.pipes import Ready
from strobe.sim.tensor import Tensor


class Products:
    """The wgmma groups of one partition: an agent whose ticks count products."""

    def __init__(self, partition: Partition):
        self.agent = partition.cta.new_agent()
        self.knows = Knowledge()
        self.issued = self.finished = 0
        self.open: deque[SimpleNamespace] = deque()

    def at_exit(self) -> None:
        if self.open:
            raise Unfinished(f"{machine().partition.name} ends and has not waited for the {self.open[0].description}")


def _products() -> Products:
    partition = machine().partition
    if "wgmma" not in partition.units:
        partition.units["wgmma"] = Products(partition)
    return partition.units["wgmma"]


def mma(a, b, acc: Tensor, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False) -> Tensor:
    """Issue a product; returns its result, which is not there before `wait` if it is asynchronous."""
    running, place = machine(), where()
    running.pause()
    _check(a, b, acc, place)
    products, partition = _products(), running.partition
    products.issued += 1
    number, keep = products.issued, bool(use_acc)
    products.knows.join(partition.knows)
    products.knows.learn(products.agent, number)
    outcome = Outcome(x.outcome for x in (a, acc if keep else None) if isinstance(x, Tensor) and x.outcome is not None)
    what = f"wgmma of {partition.name} at {place}"
    access = Access(products.agent, number, products.knows.copy(), what, False, outcome)
    for operand in (a, b):
        if isinstance(operand, Tensor):
            operand.check_finished()
            running.needs(operand)
        else:
            try:
                operand.touch(access, write=False)
            except (MissingFence, Race, Uninitialised) as error:
                outcome.spoil(error)
    partition.tick()
    result = torch.full(acc.data.shape, torch.nan, dtype=acc.data.dtype)
    work = SimpleNamespace(finished=False, description=f"wgmma at {place}", time=0.0)
    begin, work.time = _time(a, b, partition)
    left = a.data.clone() if isinstance(a, Tensor) else a

    def finish() -> None:
        product = (left if left is not a else a.values()).float() @ b.values().float()
        result.copy_(product + acc.data if keep else product)
        products.finished = number

    running.cta.post(("wgmma", products.agent), what, finish, work.time)
    running.span("tensor core", f"{partition.name} {place.split(' ')[-1]}", begin, work.time)
    products.open.append(work)
    tensor = Tensor(result, acc.layout, Ready(work.time, work.time) if running.timed else None, work, outcome)
    return tensor if is_async else wait(0, [tensor])


def init(value: Tensor) -> Tensor:
    """The tensor itself, as the accumulator of asynchronous products (warpgroup_mma_init)."""
    return value


def wait(num_outstanding=0, deps=None):
    """Wait until at most the newest `num_outstanding` products run; returns `deps`, of which the others are complete."""
    if deps is None:
        raise IllegalOperation(f"{where()} gives warpgroup_mma_wait no deps")
    running, products, place = machine(), _products(), where()
    target = products.issued - int(num_outstanding)
    done = [products.open[i] for i in range(max(0, len(products.open) - int(num_outstanding)))]
    running.wait(
        lambda: products.finished >= target,
        lambda: f"its wgmma at {place}",
        lambda: max((work.time for work in done), default=0.0),
    )
    for work in done:
        work.finished = True
        products.open.popleft()
    running.partition.knows.learn(products.agent, target)
    waited = [
        Tensor(t.data, t.layout, t.ready, None if t.pending is None or t.pending.finished else t.pending, t.outcome)
        for t in deps
    ]
    return waited[0] if len(waited) == 1 else tuple(waited)


def _check(a, b, acc: Tensor, place: str) -> None:
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b or list(acc.data.shape) != [m, n]:
        raise IllegalOperation(f"{place} multiplies [{m}, {k}] by [{k_b}, {n}] into {list(acc.data.shape)}")
    if isinstance(b, Tensor):
        raise IllegalOperation(f"{place}: the second operand of a wgmma is in shared memory, not in registers")
    if machine().arch // 10 != 9:
        raise IllegalOperation(f"{place} uses wgmma, which sm_{machine().arch} does not have")
    if machine().partition.warps % 4:
        raise IllegalOperation(f"{place}: a wgmma takes 4 warps, {machine().partition.name} has {machine().partition.warps}")


def _time(a, b, partition: Partition) -> tuple[float, float]:
    running = machine()
    if not running.timed:
        return 0.0, 0.0
    (m, k), n = a.shape, b.shape[1]
    cycles = running.costs.mma_cycles(m, n, k, b.data.element_size(), isinstance(a, Tensor))
    begin, end = running.cta.pipes["tensor core"].reserve(partition.time + running.costs.mma_issue, cycles)
    return begin, end + running.costs.mma_latency
