"""Models mbarriers, as the PTX ISA describes them, and named barriers.

An mbarrier counts pending arrivals and bytes of copies. When both are used up its phase is over: the next begins with
the full count. A wait names the parity of a phase and goes on if that phase is over: on a fresh barrier, parity 1 is. With
a phase goes the knowledge of all who arrived in it.
"""

from __future__ import annotations

from strobe.sim.clocks import Knowledge
from strobe.sim.context import machine
from strobe.sim.errors import BarrierMisuse, Race
from strobe.sim.kernel_source import where


class Arrivals:
    """Arrivals at a barrier in this phase, and in the one before. An arrival counts for the phase that is open when it
    comes: if nothing orders it after all arrivals of the phase before, it may count for that phase."""

    def __init__(self) -> None:
        self._now: list[tuple[int, int, str]] = []
        self._before: list[tuple[int, int, str]] = []

    def note(self, agent: int, knows: Knowledge, what: str, barrier: str) -> None:
        """Note an arrival, with what its agent knows. Race if it may count for the phase before."""
        for other, tick, before in self._before:
            if knows.seen[other] < tick:
                raise Race(
                    f"{what} arrives at {barrier}; nothing orders it after the arrival by {before} in the phase before, for "
                    f"which it may count"
                )
        self._now.append((agent, int(knows.seen[agent]), what))

    def next_phase(self) -> None:
        self._before, self._now = self._now, []


class Barrier:
    """An mbarrier of `count` arrivals a phase."""

    def __init__(self, name: str, count: int):
        self.name, self.count = name, count
        self.pending, self.bytes, self.phase = count, 0, 0
        self.knows, self.handed_on = Knowledge(), Knowledge()
        self.arrivals = Arrivals()
        self.time = self.completed = 0.0

    def __str__(self) -> str:
        return self.name

    def state(self) -> str:
        bytes_ = f", {self.bytes} bytes to come" if self.bytes else ""
        return f"phase {self.phase} has {self.count - self.pending} of {self.count} arrivals{bytes_}"

    @property
    def in_use(self) -> bool:
        return self.pending != self.count or self.bytes != 0

    def over(self, parity: int) -> bool:
        """Whether the latest phase of this parity is over."""
        return self.phase & 1 != parity

    def arrive(
        self, count: int, knows: Knowledge, what: str, bytes_: int = 0, time: float = 0.0, agent: int | None = None
    ) -> None:
        """Arrive `count` times, as `agent`, and wait for `bytes_` more (negative: so many have been copied)."""
        if count > self.pending:
            raise BarrierMisuse(f"{what} arrives {count} times at {self}, of which {self.state()}")
        if agent is not None:
            self.arrivals.note(agent, knows, what, self.name)
        self.pending -= count
        self.bytes += bytes_
        self.time = max(self.time, time)
        self.knows.join(knows)
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.arrivals.next_phase()
            self.pending = self.count
            self.handed_on, self.knows = self.knows, self.knows.copy()
            self.completed = self.time


def at(view, rank: int | None = None) -> Barrier:
    """The Barrier that lives in a view of shared memory, in the CTA of `rank`, by default the one that runs."""
    barrier = machine().cta.barriers.get(_key(view, rank))
    if barrier is None:
        raise BarrierMisuse(f"{where()} uses the mbarrier {view.name}, which is not initialised")
    return barrier


def _key(view, rank: int | None = None) -> tuple[int, int]:
    running = machine()
    places = view.data.reshape(-1)
    chosen = (running.rank if rank is None else rank) if running.num_ctas > 1 and not _of_both(view) else 0
    return id(view.buffer), int(places[chosen].storage_offset())


def _of_both(view) -> bool:
    """Whether the CTAs of a cluster share one barrier, which then lives in the first of them."""
    return machine().num_ctas > 1 and view.numel == 1


# ---- what kernels call


def allocate(batch=None, two_ctas=False):
    """Allocate one barrier, or `batch` of them (mbarrier.allocate_mbarrier)."""
    from triton.experimental.gluon import language as gl

    from strobe.sim.units.shared import allocate as allocate_shared

    ctas = machine().num_ctas // (2 if two_ctas else 1)
    return allocate_shared(gl.int64, [ctas] if batch is None else [int(batch), ctas])


def init(mbarrier, count) -> None:
    """Initialise a barrier. One that two CTAs share counts the arrivals of both, and the first of them initialises it."""
    running, both = machine(), _of_both(mbarrier)
    running.partition.initialises = running.num_ctas > 1
    if both and running.rank:
        return
    barriers, key = running.cta.barriers, _key(mbarrier)
    if key in barriers:
        raise BarrierMisuse(f"{where()} initialises the mbarrier {mbarrier.name} again")
    if int(count) < 1:
        raise BarrierMisuse(f"{where()} initialises the mbarrier {mbarrier.name} with a count of {int(count)}")
    name = mbarrier.name if running.num_ctas == 1 or both else f"{mbarrier.name} of CTA {running.rank}"
    barriers[key] = Barrier(name, int(count) * (running.num_ctas if both else 1))


def meet_after_initialising() -> None:
    """Let the CTAs of a cluster meet between the initialisation of barriers and their first use, as the compiler does."""
    if machine().partition.initialises:
        cluster_sync()


def invalidate(mbarrier) -> None:
    """Invalidate a barrier. One that two CTAs share the first of them invalidates."""
    if _of_both(mbarrier) and machine().rank:
        return
    barrier = at(mbarrier)
    if barrier.in_use:
        raise BarrierMisuse(f"{where()} invalidates {barrier} in use: {barrier.state()}")
    del machine().cta.barriers[_key(mbarrier)]


def arrive(mbarrier, count=1, pred=True, **_) -> None:
    """Arrive `count` times."""
    meet_after_initialising()
    running = machine()
    running.spend(running.costs.arrive)
    running.count_barrier_use("arrive")
    running.pause()
    if pred:
        partition = running.partition
        what = f"{partition.name} at {where()}"
        at(mbarrier).arrive(int(count), partition.knows, what, time=partition.time, agent=partition.agent)
        partition.arrive()


def expect(mbarrier, bytes_per_cta=None, pred=True, bytes=None, **_) -> None:
    """Arrive once, and announce bytes of copies."""
    meet_after_initialising()
    running = machine()
    running.spend(running.costs.arrive)
    running.count_barrier_use("arrive")
    running.pause()
    if pred:
        partition, number = running.partition, int(bytes if bytes_per_cta is None else bytes_per_cta)
        what = f"{partition.name} at {where()}"
        at(mbarrier).arrive(1, partition.knows, what, number, partition.time, partition.agent)
        partition.arrive()


def wait(mbarrier, phase, pred=True, deps=()) -> None:
    """Wait until the phase of a parity is over. At a barrier that two CTAs share only the first of them waits."""
    meet_after_initialising()
    if not pred or (_of_both(mbarrier) and machine().rank):
        return
    running, barrier, parity, place = machine(), at(mbarrier), int(phase) & 1, where()
    running.count_barrier_use("wait")
    running.wait(
        lambda: barrier.over(parity),
        lambda: f"parity {parity} of {barrier} at {place} ({barrier.state()})",
        lambda: barrier.completed + running.costs.wait,
        running.costs.passing_wait,
    )
    running.partition.knows.join(barrier.handed_on)


# ---- named barriers (bar.sync, bar.arrive)


class NamedBarrier:
    """A named barrier: `number` of its CTA, for `threads` threads."""

    def __init__(self, number: int, threads: int):
        self.number, self.threads = number, threads
        self.arrived, self.round = 0, 0
        self.arrivals = Arrivals()
        self.here: set = set()  # partitions
        self.knows, self.handed_on = Knowledge(), Knowledge()
        self.time = self.completed = 0.0

    @property
    def in_use(self) -> bool:
        return self.arrived != 0

    def __str__(self) -> str:
        return f"named barrier {self.number}"

    def state(self) -> str:
        return f"{self.arrived} of {self.threads} threads are there"

    def arrive(self, threads: int) -> int:
        """Arrive with so many threads; returns the round that this arrival belongs to."""
        partition, mine = machine().partition, self.round
        if partition in self.here:
            raise BarrierMisuse(f"{partition.name} at {where()} arrives at {self} again, for which others have yet to arrive")
        self.here.add(partition)
        self.arrived += threads
        if self.arrived > self.threads:
            raise BarrierMisuse(f"{partition.name} at {where()} brings {threads} threads to {self}: more than {self.threads}")
        self.arrivals.note(partition.agent, partition.knows, f"{partition.name} at {where()}", str(self))
        self.knows.join(partition.knows)
        self.time = max(self.time, partition.time)
        partition.arrive()
        if self.arrived == self.threads:
            self.arrivals.next_phase()
            self.arrived, self.round, self.completed = 0, self.round + 1, self.time
            self.handed_on, self.knows, self.here = self.knows, Knowledge(), set()
        return mine


def _named(number, threads) -> NamedBarrier:
    running, number, threads = machine(), int(number), int(threads)
    barriers, key = running.cta.named_barriers, (running.rank, number)
    if not 0 <= number < 16 or threads % 32:
        raise BarrierMisuse(f"{where()}: named barriers are 0 to 15 and take whole warps, got {number} and {threads} threads")
    barrier = barriers.setdefault(key, NamedBarrier(number, threads))
    if barrier.threads != threads and barrier.in_use:
        raise BarrierMisuse(f"{where()} uses {barrier} for {threads} threads while {barrier.state()}")
    barrier.threads = threads
    return barrier


def named_arrive(number, threads) -> None:
    """Arrive with this partition's threads, and go on (bar.arrive). number: 0 to 15; threads: how many meet in all, whole
    warps. With specialised warps the compiler takes the lowest numbers itself."""
    running = machine()
    running.spend(running.costs.arrive)
    running.pause()
    _named(number, threads).arrive(32 * running.partition.warps)


def named_sync(number, threads) -> None:
    """Arrive with this partition's threads, and wait until all are there (bar.sync). number: 0 to 15; threads: how many meet in
    all."""
    running, place = machine(), where()
    running.pause()
    barrier = _named(number, threads)
    mine = barrier.arrive(32 * running.partition.warps)
    running.wait(
        lambda: barrier.round > mine,
        lambda: f"{barrier} at {place} ({barrier.state()})",
        lambda: barrier.completed + running.costs.named_barrier,
    )
    running.partition.knows.join(barrier.handed_on)


def cluster_sync() -> None:
    """Let all CTAs of a cluster meet, outside specialised warps."""
    running, place = machine(), where()
    running.partition.initialises = False
    threads = 32 * running.partition.warps
    barrier = running.cta.named_barriers.setdefault("cluster", NamedBarrier(0, threads * running.num_ctas))
    mine = barrier.arrive(threads)
    running.wait(
        lambda: barrier.round > mine,
        lambda: f"the other CTA of its cluster at {place}",
        lambda: barrier.completed + running.costs.named_barrier,
    )
    running.partition.knows.join(barrier.handed_on)
