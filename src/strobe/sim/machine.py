"""The machine: partitions of warps that take turns, and asynchronous units that finish when the order of the run says so.

Every warp partition of a CTA is a coroutine. It runs until it meets something that another one could observe (a barrier, a
copy, a memory access); there the scheduler decides who goes on, and which asynchronous work (TMA copies, tensor core) finishes:

    in_order   partitions take turns; work finishes in the order in which it was issued
    random     any of them, drawn with the seed
    late       work finishes only when no partition can go on, the newest first
    early      work finishes at once
    uneven     the partition whose number the seed is goes on only when nothing else can; work finishes when the others need it
    timed      whichever comes first on the clock of `costs`

A CTA runs to its end before the next begins, unless several are to be resident: what CTAs may share is global memory, and
`memory.GlobalArray` needs no interleaving to see that nothing orders them. A kernel whose CTAs wait for each
other must end however many are resident.
"""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from greenlet import getcurrent, greenlet

from strobe.sim.clocks import AHEAD, CAPACITY, Knowledge
from strobe.sim.errors import BarrierMisuse, Deadlock, IllegalOperation, SimulationError, Unfinished
from strobe.sim.kernel_source import where
from strobe.sim.memory import Access, Buffer, GlobalArray, Load, Touched
from strobe.sim.pipes import Pipes, Ready
from strobe.sim.trace import Span

ORDERS = ("in_order", "random", "late", "early", "uneven", "timed")


@dataclass(eq=False)
class AsyncWork:
    """Work that is issued and not yet finished. time: when it finishes, in cycles, in a timed run."""

    what: str
    finish: Callable[[], None]
    time: float
    number: int


class Partition:
    """Some warps of a CTA that run one function together."""

    def __init__(self, cta: Cta, name: str, body: Callable[[], Any], warps: int, knows: Knowledge, time: float, rank: int):
        self.cta, self.name, self.warps, self.rank = cta, name, warps, rank
        self.agent = cta.new_agent()
        self.knows = knows
        self.tick()
        self.born = self.time = time
        self.ready: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.result: Any = None
        self.done = False
        self.units: dict[str, Any] = {}
        """Units that work asynchronously for this partition: its wgmma groups, its tcgen05 queue, its bulk stores, its
        cp.async."""
        self.initialises = False
        """Whether it has initialised barriers, and its cluster has not met since."""
        self.acquired: dict[int, Knowledge] = {}
        """What it knows of other CTAs, by their numbers, from atomics that acquire."""
        self.fenced: dict[int, Knowledge] = {}
        """What of that its copies know, too, from fences of the async proxy."""
        self.loads: list[Load] = []
        """The partition's loads from shared memory since its last arrival or fence."""
        self.routine = greenlet(self._run, cta.machine.scheduler)  # where control goes when it ends
        self._body = body

    def _run(self) -> None:
        self.result = self._body()
        for unit in self.units.values():
            unit.at_exit()
        self.done = True

    def tick(self) -> None:
        """Begin a new tick: knowledge that was handed out before does not cover what comes."""
        self.knows.seen[self.agent] += 1

    def arrive(self) -> None:
        """Note that it has arrived at a barrier: loads whose results nothing has used yet are left behind."""
        for load in self.loads:
            load.left_behind = not load.used
        self.loads.clear()
        self.tick()

    def take_turn(self) -> None:
        """Learn that what the launch ahead did is over."""
        self.knows.learn(AHEAD, 1)

    def fence(self) -> None:
        """Make what it wrote so far visible to the async proxy; what it writes from now on is not."""
        self.knows.fence()
        self.loads.clear()
        self.tick()

    def access(self, generic: bool = True, what: str = "", load: Load | None = None) -> Access:
        """An access by this partition at the line of the kernel that runs now."""
        # What it knows may be kept by reference: this tick's knowledge only grows, and is compared at once.
        tick = int(self.knows.seen[self.agent])
        if load is not None:
            self.loads.append(load)
        what = f"{what}{self.name} at {where()}"
        return Access(self.agent, tick, self.knows, what, generic, load=load, acquired=self.acquired)


class Cta:
    """One program of the grid while it runs: a CTA, or a cluster of two, whose CTAs have a rank (see `clusters`)."""

    def __init__(self, machine: Machine, index: int, program: tuple[int, int, int]):
        self.machine, self.index, self.program = machine, index, program
        self.partitions: list[Partition] = []
        self.mains: list[Partition] = []
        self.queues: dict[Any, deque[AsyncWork]] = {}
        self.barriers: dict[Any, Any] = {}
        self.named_barriers: dict[Any, Any] = {}
        self.must_know: dict[int, tuple[int, str, tuple[int, ...]]] = {}
        """For each agent the tick and description of its latest work, and which CTAs must have waited for it at exit."""
        self.allocations: list[Any] = []
        self._allocated = [0] * machine.num_ctas
        self._names: dict[tuple[str, Any], str] = {}
        self.smem_bytes = self.tmem_columns = 0
        self._shared: dict[weakref.ref, int] = {}
        self._pipes = [Pipes(machine.costs) for _ in range(machine.num_ctas)]
        self._agents = itertools.count(AHEAD + 1)
        self._slots: list[tuple[int, int]] = []

    @property
    def pipes(self) -> Pipes:
        """The pipes of the multiprocessor of the CTA that runs now."""
        return self._pipes[self.machine.rank]

    def allocated(self, make: Callable[[], Any]) -> Any:
        """What `make()` allocates. The CTAs of a cluster make the same allocations in the same order: each is made once."""
        if self.machine.num_ctas == 1:
            return make()
        rank = self.machine.rank
        if self._allocated[rank] == len(self.allocations):
            self.allocations.append(make())
        self._allocated[rank] += 1
        return self.allocations[self._allocated[rank] - 1]

    def take_shared(self, buffer: Buffer, size: int, replaced: Buffer | None) -> int:
        """Bytes of shared memory in use once a buffer of `size` bytes has its place. Buffers that the kernel no longer holds,
        and the one that the new one replaces, do not count; `smem_bytes` is the most that was in use."""
        live = {reference: taken for reference, taken in self._shared.items() if reference() not in (None, replaced)}
        live[weakref.ref(buffer)] = size
        self._shared = live
        self.smem_bytes = max(self.smem_bytes, sum(live.values()))
        return sum(live.values())

    def unique_name(self, name: str, thing: Any) -> str:
        """The name of a thing: "stages.q_full", or "stages.q_full 1" if another one is called so."""
        if (name, thing) not in self._names:
            number = sum(taken == name for taken, _ in self._names)
            self._names[name, thing] = f"{name} {number}" if number else name
        return self._names[name, thing]

    def new_agent(self) -> int:
        agent = next(self._agents)
        if agent >= CAPACITY:
            raise IllegalOperation(f"more than {CAPACITY} operations in flight that nobody is known to wait for")
        return agent

    def new_slot(self, knows: Knowledge) -> tuple[int, int]:
        """An agent, and its tick, for a single operation: an agent whose last operation is known to be over, or a new one."""
        for i, (agent, tick) in enumerate(self._slots):
            if knows.seen[agent] >= tick:
                self._slots[i] = (agent, tick + 1)
                return agent, tick + 1
        self._slots.append((self.new_agent(), 1))
        return self._slots[-1]

    @property
    def over(self) -> bool:
        """Whether all its partitions have ended, and nothing is under way."""
        return all(p.done for p in self.partitions) and not any(self.queues.values())

    def stop(self) -> None:
        """End coroutines that an error left in the middle."""
        for partition in self.partitions:
            if not partition.done and partition.routine:
                partition.routine.throw()

    def post(self, queue: Any, what: str, finish: Callable[[], None], time: float = 0.0) -> AsyncWork:
        """Post work that finishes later; the work of one queue finishes in order."""
        work = AsyncWork(what, finish, time, self.machine.next_number())
        self.queues.setdefault(queue, deque()).append(work)
        return work


@dataclass
class Report:
    """What a simulation saw.

    Of the first CTA, in cycles, in timed runs: spans: who did what, or waited, when; lives: from when to when each partition
    ran; busy: how long each unit worked. Of all CTAs: barrier_uses: (partition, "wait", "arrive" or "commit") -> how often;
    touched: what they wrote and read of global memory.
    """

    ctas: int = 0
    steps: int = 0
    smem_bytes: int = 0
    tmem_columns: int = 0
    cycles: float = 0.0
    spans: list[Span] = field(default_factory=list)
    lives: dict[str, tuple[float, float]] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    barrier_uses: Counter[tuple[str, str]] = field(default_factory=Counter)
    touched: dict[int, Touched] = field(default_factory=dict)


class Machine:
    """A GPU, which runs the programs of a launch one after the other, or so many at a time."""

    def __init__(
        self, order: str, seed: int, arch: int, num_warps: int, num_ctas: int, grid: Sequence[int], costs,
        dependent: bool = False, after: Report | None = None, triton: tuple[int, int] = (3, 6),
    ):  # fmt: skip
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
        self.order, self.arch, self.num_warps, self.num_ctas = order, arch, num_warps, num_ctas
        self.grid = (*grid, 1, 1, 1)[:3]
        self.costs, self.timed = costs, order == "timed"
        self.seed, self.random = seed, random.Random(seed)
        self.triton = triton
        """The release of Triton whose compiler may be relied on."""
        self.dependent = dependent
        """Whether the launch may begin before the one ahead has ended."""
        self._after = {} if after is None else after.touched
        self.arrays: dict[int, GlobalArray] = {}
        self.report = Report()
        self.max_steps = 20_000_000
        self._numbers = itertools.count()
        self._turn = 0
        self._residents: list[Cta] = []
        self.meetings: dict[tuple[int, int], Any] = {}
        """Meetings of the clusters whose CTAs are programs of their own, by their numbers (see `clusters`)."""

    # ---- what simulated calls use

    @property
    def partition(self) -> Partition:
        return self._current

    @property
    def rank(self) -> int:
        """The rank in its cluster of the CTA that runs now."""
        return self._current.rank

    def next_number(self) -> int:
        return next(self._numbers)

    def pause(self) -> None:
        """Let others go on."""
        self.scheduler.switch()

    def wait(
        self, ready: Callable[[], bool], waits_for: Callable[[], str], since: Callable[[], float], least: float = 0.0
    ) -> None:
        """Wait until `ready()`. since(): the time at which a waiter knows of it; least: cycles that a wait takes even if what
        it waits for is over."""
        partition = self._current
        begin, description = partition.time, waits_for() if self.timed else ""
        partition.ready, partition.waits_for = ready, waits_for
        self.scheduler.switch()
        if self.timed:
            partition.time = max(partition.time + least, since())
            if partition.time > begin:
                self.span(partition.name, description.split(" at ")[0], begin, partition.time, "wait")

    def spend(self, cycles: float) -> None:
        """Keep the current partition busy for some cycles."""
        self._current.time += cycles

    def count_barrier_use(self, what: str) -> None:
        self.report.barrier_uses[self._current.name, what] += 1

    def span(self, track: str, name: str, start: float, end: float, kind: Literal["work", "wait"] = "work") -> None:
        if self.timed and self._cta.index == 0:
            self.report.spans.append(Span(track, name, start, end, kind))

    def issue(self, pipe: str, elements: int, operands: Sequence[Ready | None]) -> Ready | None:
        """Issue a register operation; returns when its result is there, None outside of timed runs."""
        if not self.timed:
            return None
        if self._ahead():
            self.pause()
        return self._cta.pipes.issue(self._current, pipe, elements, [ready for ready in operands if ready is not None])

    def _ahead(self) -> bool:
        """Whether another partition that could go on is behind the current one: pipes serve who comes first."""
        now = self._current.time
        return any(p.time < now and not p.done and p.ready is None for p in self._cta.partitions)

    def needs(self, *operands: Any) -> None:
        """Let the current partition go on only when these register tensors are there."""
        if self.timed:
            ends = [tensor.ready.end for tensor in operands if getattr(tensor, "ready", None) is not None]
            self._current.time = max([self._current.time, *ends])

    def program_id(self, axis: int) -> int:
        return self._cta.program[axis]

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    @property
    def cta(self) -> Cta:
        return self._cta

    # ---- global memory

    def array_of(self, tensor: torch.Tensor, name: str, rewritable: bool = False) -> GlobalArray:
        key = tensor.untyped_storage().data_ptr()
        if key not in self.arrays:
            self.arrays[key] = GlobalArray(name, tensor, rewritable, self._after.get(key))
        array = self.arrays[key]
        if array.flat.dtype.itemsize != tensor.dtype.itemsize:
            raise IllegalOperation(f"{name} and {array.name} share memory but not the size of their elements")
        return array

    def read_global(self, array: GlobalArray, offsets: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        self.pause()
        chosen = _chosen(offsets, mask)
        array.read(chosen, self._cta.index, self._current.access(what=f"load of {array.name} by "))
        safe = offsets if mask is None else torch.where(mask, offsets, int(chosen[0]) if chosen.size else 0)
        return array.flat[safe]

    def write_global(self, array: GlobalArray, offsets: torch.Tensor, values: torch.Tensor, mask) -> None:
        self.pause()
        chosen = _chosen(offsets, mask)
        array.write(chosen, self._cta.index, self._current.access(what=f"store to {array.name} by "))
        values = values.expand(offsets.shape) if mask is None else values.expand(offsets.shape)[mask.expand(offsets.shape)]
        array.flat[torch.from_numpy(chosen)] = values.reshape(-1).to(array.flat.dtype)

    def atomic_global(
        self, array: GlobalArray, offsets, values, mask, operation, sem: str = "acq_rel", least: float = math.inf
    ):
        """Update elements one by one, in the order of the lanes; returns what they held. Atomics race with plain accesses
        alone. One that acquires learns what was known to those who updated the element by one that releases, of the launch
        ahead until it held `least`."""
        self.pause()
        old = torch.zeros(offsets.shape, dtype=array.flat.dtype)
        lanes = torch.ones(offsets.shape, dtype=torch.bool) if mask is None else mask.expand(offsets.shape)
        values = values.expand(offsets.shape)
        chosen, partition = _chosen(offsets, mask), self._current
        verb = "updates" if least == math.inf else "awaits"
        array.update(chosen, self._cta.index, partition.access(what=f"atomic on {array.name} by "), verb)
        if sem in ("acquire", "acq_rel"):
            array.acquire(chosen, partition.acquired, least)
        for lane in lanes.nonzero():
            at = tuple(lane.tolist())
            place = int(offsets[at])
            old[at] = array.flat[place]
            array.flat[place] = operation(array.flat[place], values[at])
        if sem in ("release", "acq_rel"):
            array.release(chosen, {**partition.acquired, self._cta.index: partition.knows})
            partition.tick()
        return old

    # ---- running

    def run(self, programs: Iterable[tuple[int, int, int]], name: str, body: Callable[[], Any], resident: int = 1) -> None:
        """Run a CTA for each program, so many at a time: one begins when one has ended."""
        self.scheduler = getcurrent()
        left = iter(programs)
        try:
            while True:
                while len(self._residents) < resident and (program := next(left, None)) is not None:
                    self._residents.append(self._begun(program, name, body))
                if not self._residents:
                    return
                self._schedule()
                for cta in [cta for cta in self._residents if cta.over]:
                    self._cta = cta
                    self._end(cta)
                    self._residents.remove(cta)
        finally:
            for cta in self._residents:
                cta.stop()
            self._residents.clear()

    def _begun(self, program: tuple[int, int, int], name: str, body: Callable[[], Any]) -> Cta:
        self._cta = cta = Cta(self, self.report.ctas, program)
        self.report.ctas += 1
        cta.mains = [self.spawn(name, body, self.num_warps, Knowledge(), 0.0, rank) for rank in range(self.num_ctas)]
        if not self.dependent:
            for main in cta.mains:
                main.take_turn()
        return cta

    def _end(self, cta: Cta) -> None:
        self._check_exit(cta.mains)
        report = self.report
        report.smem_bytes = max(report.smem_bytes, cta.smem_bytes)
        report.tmem_columns = max(report.tmem_columns, cta.tmem_columns)
        report.cycles = max([report.cycles, *(main.time for main in cta.mains)])
        if cta.index == 0:
            report.lives = {partition.name: (partition.born, partition.time) for partition in cta.partitions}
            report.busy = cta._pipes[0].busy()

    def spawn(self, name: str, body: Callable[[], Any], warps: int, knows: Knowledge, time: float, rank: int) -> Partition:
        partition = Partition(self._cta, name, body, warps, knows, time, rank)
        self._cta.partitions.append(partition)
        return partition

    def _schedule(self) -> None:
        """Run the CTAs that are resident until one of them has ended."""
        while not any(cta.over for cta in self._residents):
            live = [p for cta in self._residents for p in cta.partitions if not p.done]
            able = [p for p in live if p.ready is None or p.ready()]
            work = [queue for cta in self._residents for queue in cta.queues.values() if queue]
            if not able and not work:
                several = len(self._residents) > 1
                raise Deadlock("; ".join(f"{f'CTA {p.cta.index} ' * several}{p.name} waits for {p.waits_for()}" for p in live))
            self.report.steps += 1
            if self.report.steps > self.max_steps:
                raise Deadlock(f"no end after {self.max_steps} steps")
            chosen = self._choose(able, work)
            if isinstance(chosen, Partition):
                self._resume(chosen)
            else:
                chosen.popleft().finish()

    def _resume(self, partition: Partition) -> None:
        self._current, self._cta = partition, partition.cta
        partition.ready = None
        try:
            partition.routine.switch()
        except SimulationError as error:
            if not error.args or "[" not in str(error.args[0])[:1]:
                error.args = (f"[cta {self._cta.index}] {error}",)
            raise

    def _choose(self, able: list[Partition], work: list[deque[AsyncWork]]) -> Any:
        """The Partition to go on, or the queue whose first work finishes."""
        if self.order == "timed":
            soonest = min(work, key=lambda queue: queue[0].time, default=None)
            partition = min(able, key=lambda p: p.time, default=None)
            if soonest is None or (partition is not None and partition.time <= soonest[0].time):
                return partition
            return soonest
        if self.order == "random":
            return self.random.choice([*able, *work])
        if self.order == "early":
            return min(work, key=lambda queue: queue[0].number) if work else able[0]
        if self.order == "late":
            return self.random.choice(able) if able else max(work, key=lambda queue: queue[0].number)
        self._turn += 1
        if self.order == "uneven":
            everybody = [partition for cta in self._residents for partition in cta.partitions]
            last = everybody[self.seed % len(everybody)]
            others = [partition for partition in able if partition is not last]
            if others:
                return others[self._turn % len(others)]
            return min(work, key=lambda queue: queue[0].number) if work else last
        if work and (not able or self._turn % (len(able) + 1) == 0):
            return min(work, key=lambda queue: queue[0].number)
        return able[self._turn % len(able)]

    def _check_exit(self, mains: list[Partition]) -> None:
        cta = self._cta
        if any(main.knows.seen[AHEAD] == 0 for main in mains):
            raise Unfinished(
                "the CTA exits and has not waited for the launch ahead, which launches after it rely on (launch_pdl): "
                "griddepcontrol.wait"
            )
        for agent, (tick, what, ranks) in cta.must_know.items():
            for rank in ranks:
                if mains[rank].knows.seen[agent] < tick:
                    who = (
                        "the CTA exits and nobody"
                        if self.num_ctas == 1
                        else f"CTA {rank} of the cluster exits and nobody in it"
                    )
                    raise Unfinished(f"{who} has waited for {what}")
        for barrier in (*cta.barriers.values(), *cta.named_barriers.values()):
            if barrier.in_use:
                raise BarrierMisuse(f"{barrier} is left in use at exit: {barrier.state()}")


def _chosen(offsets: torch.Tensor, mask: torch.Tensor | None) -> np.ndarray:
    flat = offsets if mask is None else offsets[mask.expand(offsets.shape)]
    return flat.reshape(-1).numpy()
