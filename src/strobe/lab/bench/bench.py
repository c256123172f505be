"""Times Strobe beside its peers: in one process, on the same inputs, correctness first, in interleaved rounds, by medians.

Protocol.
0. Compilers first. Contenders that compile their kernels do so beforehand, in other processes (`strobe.lab.bench.precompile`).
1. Gate. What a contender computes is compared with float64 before it is timed (all rows of the first and of the last key
   head for gradients, a sample of rows for outputs); one that is further off than `BOUNDS` is rejected, and its error printed.
2. Launches alone. On a GPU a contender is tried as a CUDA graph of many launches and as calls in a row, and timed as calls
   if they are clearly faster, so that neither Python's time counts nor what capture adds to a kernel. `timed` says which;
   `host_us` tells what Python costs. Where one launch fills a timing there is no graph.
3. Cold L2. The inputs of successive launches differ (`sets` of them) until together they exceed the L2 cache twice.
4. Rounds. Contenders run in turn for a while, untimed, until the card's power settles. Then in each round every contender
   runs once, for `seconds` after a lead as long; rounds come in blocks in which each contender follows each other equally often
   (`balanced_order`), since a card that ran hot slows whoever comes next. The median over the rounds is quoted; all of them are
   kept. A contender that takes 1.5 times as long as the fastest is timed once, before the rounds: it decides nothing, cools the
   card, and would take most of the time (but Strobe and the fastest peer have all rounds).
   After all points, while `max_seconds` allows, some get more blocks: those whose 95 % interval is so wide that it leaves open
   whether Strobe is ahead, level or behind (`strobe.lab.bench.intervals`).
5. Memory. What PyTorch's allocator holds at most in a backward beside inputs and gradients, in one call outside of a graph.
6. Call by call. With the protocol "single" a round is 32 calls and 128 that are timed one by one
   (`strobe.lab.bench.single_call`).
7. A ceiling. cuBLAS multiplies square matrices in the same run, before and after.
A contender that failed, refused or is missing is in the result with the reason.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

import strobe
from strobe.call.dispatch import explain_problem
from strobe.device import arch_of
from strobe.lab.bench.accuracy import BOUNDS, Gate
from strobe.lab.bench.failures import compact, reasons
from strobe.lab.bench.inputs import input_sets
from strobe.lab.bench.intervals import SMALLEST
from strobe.lab.bench.machine import Telemetry, Watchdog, describe, provenance, snapshot
from strobe.lab.bench.peers import Call, Peer, bind, peers_for, standard, strobe_peer
from strobe.lab.bench.plan import DTYPES, Inputs, Plan, Point, mask_of
from strobe.lab.bench.precompile import Unusable, warm
from strobe.lab.bench.report import SCHEMA, by_shape, default_path, load, ratios, show
from strobe.lab.bench.single_call import CALLS, WARMUPS, call_times, statistics

FIRST_CALL_SECONDS, HANG_SECONDS = 180.0, 60.0
"""How long a first call, which may compile, and any other step may take. After that the run counts as hung."""

ALSO_RAN = 1.5
"""A contender that takes this many times as long as the fastest is timed in one round only."""

GRAPH_LOSES = 0.97
"""Calls in a row are timed instead of a graph if they take less than this part of its time."""

LONG_SECONDS = 1.0
"""Where one timing is longer than planned, there are as many rounds as fit into this time, but at least a balanced block."""

SETTLE_SECONDS = 0.3
"""How long contenders run in turn, untimed, before the first round. A power limit answers to the last tenths of a second, so
without this the first contender would have a rested card."""

PRODUCT = {"cuda": (8192, "bf16"), "cpu": (2048, "fp32")}
"""Rows of the square matrices whose product is timed before and after all points, and their dtype."""

MOST_ROUNDS = 48
"""The most rounds, all in all, of a point that is measured again."""

SETTLE_SHARE = 0.2
"""The most of a point's share of the time that goes to settling, where the time is shared out evenly."""

GRAPH_SECONDS = 0.002
"""How many seconds of launches a CUDA graph holds, about. They must be many, as the GPU idles for microseconds between
replays."""

ENTER_SECONDS, RACING, RATE = 0.2, 3, 5e14
"""Assumptions of the estimated duration: seconds until a contender is ready at a point, how many contenders have all rounds,
and their FLOP/s."""


# ---- statistics


def block_of(n: int) -> int:
    """How many rounds n contenders need until each has followed each other one equally often."""
    return max(1, n if n % 2 == 0 else 2 * n if n > 1 else 1)


def balanced_order(n: int, rounds: int) -> list[list[int]]:
    """Orders of n contenders in which each follows each other equally often, after `block_of(n)` rounds.

    The order is a zigzag 0, 1, n-1, 2, n-2, ... shifted by one each round, and for odd n then reversed (Williams 1949,
    "Experimental designs balanced for the estimation of residual effects of treatments")."""
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    orders = []
    for r in range(rounds):
        order = [(place + r) % n for place in zigzag]
        orders.append(order[::-1] if n % 2 and (r // n) % 2 else order)
    return orders


def summary(flops: float, seconds: list[float]) -> dict:
    """TFLOP/s over the rounds: median, smallest, largest, and that of each round in order."""
    rates = [flops / s / 1e12 for s in seconds]
    return {"tflops": median(rates), "min": min(rates), "max": max(rates), "rounds": rates}


# ---- clocks

_BYTES = "requested_bytes.all"
"""The allocator's count of the bytes that tensors asked for. What it gives them is rounded up, by as much as a megabyte."""


class CudaClock:
    """Times launches by CUDA events. All work runs on one stream that is not the default one: graph capture and autograd need
    that."""

    def __init__(self, device: torch.device):
        from strobe.lab.bench.sm_clock import SmClock  # here, as it needs Triton, which not every system has

        self.stream = torch.cuda.Stream(device)
        self._sm_clock = SmClock(device)

    def running(self):
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """Mean seconds of one `run`, over `count` of them in a row."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._sm_clock.begin()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        self._sm_clock.end()
        self.synchronize()
        return begin.elapsed_time(end) / 1e3 / count

    def seconds_of_each(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of each call by itself; the calls are queued one after the other."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        self._sm_clock.begin()
        for call, (begin, end) in zip(calls, events, strict=True):
            begin.record()
            call()
            end.record()
        self._sm_clock.end()
        self.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    def spin(self, seconds: float) -> None:
        """Keeps the GPU busy with an empty loop, for about so many seconds (exactly at 2 GHz), while the host goes on."""
        torch.cuda._sleep(int(2e9 * seconds))

    def mhz(self) -> float | None:
        """The mean clock of the SMs in the last timing, in MHz."""
        return self._sm_clock.mhz()

    def extra_bytes(self, call: Call) -> int:
        """The most bytes that the allocator held in a call, less what it held before and the tensors that the call returns."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()[f"{_BYTES}.current"]
        returned = call()
        self.synchronize()
        peak = torch.cuda.memory_stats()[f"{_BYTES}.peak"]
        return max(0, peak - before - sum(x.nbytes for x in returned))

    def captured(self, calls: list[Call], times: int) -> tuple[Callable[[], object], list]:
        """Captures all calls, repeated `times` times, as one CUDA graph. Returns what replays it, and the results of the last
        repetition, which each replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(times):
                results = [call() for call in calls]
        return graph.replay, results


class CpuClock:
    """Times calls by the wall clock."""

    def running(self):
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def seconds(self, run: Callable[[], object], count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - begin) / count

    def seconds_of_each(self, calls: Sequence[Call]) -> list[float]:
        return [self.seconds(call, 1) for call in calls]

    def spin(self, seconds: float) -> None:
        pass

    def mhz(self) -> float | None:
        return None

    def extra_bytes(self, call: Call) -> None:
        """None: on a CPU nobody counts them."""


Clock = CudaClock | CpuClock


# ---- one contender at one point


@dataclass
class Way:
    """A way to launch. run() does `launches` launches, and `results` holds one result for each set of inputs."""

    name: str
    run: Callable[[], object]
    launches: int
    results: list


@dataclass
class Contender:
    """A peer that is ready to be timed at a point, and its timings."""

    peer: Peer
    ways: list[Way]
    """How it can be launched: as calls in a row and perhaps, second, as a CUDA graph."""
    way: Way
    """The way that is timed."""
    calls: list[Call] = field(default_factory=list)
    """One call for each set of inputs."""
    note: str | None = None
    error: float = math.inf
    extra_bytes: int | None = None
    """Bytes that a backward takes at most, beside inputs and gradients."""
    count: int = 1
    """How many times `way.run` is called in one timing."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of one launch in each round."""
    each: list[float] = field(default_factory=list)
    """Seconds of each timed call of all rounds, where calls are timed one by one."""
    mhz: list[float] = field(default_factory=list)
    """Mean clock of the SMs in each round."""

    def take_up(self, result: dict, flops: float) -> None:
        """Continues from the rounds of an earlier result. Of its clocks only the median is known, so each round gets that."""
        self.seconds = [flops / 1e12 / rate for rate in result["rounds"]]
        self.mhz = [result["sm_clock_mhz"]] * len(self.seconds) if "sm_clock_mhz" in result else []


def enter(peer: Peer, point: Point, sets: list[Inputs], gate: Gate, clock: Clock, seconds: float) -> Contender:
    """Prepare, run, capture (unless a launch alone fills `seconds`; 0: never) and check a contender.

    Raises what the peer raises, or ValueError if it is wrong.
    """
    with peer.context():
        calls = [bind(peer, point, inputs) for inputs in sets]
        plain = Way("calls", lambda: [call() for call in calls], len(calls), [call() for call in calls])
        clock.synchronize()
        contender = Contender(peer, [plain], plain, calls)
        if point.backward:
            contender.extra_bytes = clock.extra_bytes(calls[-1])
        if isinstance(clock, CudaClock):
            launch = clock.seconds(plain.run, 1) / len(calls)
            if launch < seconds:
                _capture(contender, clock, calls, launch)
    bound = BOUNDS[point.dtype]
    contender.error = max(_error(way, gate, peer) for way in contender.ways)
    if not contender.error <= bound:
        raise ValueError(f"wrong: relative error {contender.error:.1e} against float64, allowed {bound:.0e}")
    return contender


def _capture(contender: Contender, clock: CudaClock, calls: list[Call], launch: float) -> None:
    """Adds a CUDA graph to the contender's ways, or a note that says why there is none."""
    times = max(1, min(32, round(GRAPH_SECONDS / (launch * len(calls)))))
    try:
        run, results = clock.captured(calls, times)
        run()
        clock.synchronize()
        contender.ways.append(Way("CUDA graph", run, times * len(calls), results))
    except Exception as error:
        clock.synchronize()
        # Leaving a broken capture raises, too. The first error is the one that says why.
        contender.note = f"no CUDA graph: {compact(error.__context__ or error)}"


def _error(way: Way, gate: Gate, peer: Peer) -> float:
    """The error of the results that the last set of inputs gave."""
    last = way.results[-1]
    return gate.error(standard(last, peer) if isinstance(last, torch.Tensor) else tuple(standard(x, peer) for x in last))


def measure(contender: Contender, clock: Clock) -> float:
    """Seconds of one launch, from one timing. As many runs go before it, untimed, because the card's clock answers to its power
    of the last tens of milliseconds, in which another contender may have run. A single long run needs no such lead."""
    with contender.peer.context():
        for _ in range(contender.count if contender.count > 1 else 0):
            contender.way.run()
        return clock.seconds(contender.way.run, contender.count) / contender.way.launches


def warm_up(contender: Contender, clock: Clock, seconds: float) -> float:
    """Chooses the contender's way and how many runs of it fill `seconds`. Returns the seconds of one launch."""

    def runs(way: Way, launch: float, seconds: float) -> int:
        return max(1, round(seconds / max(launch * way.launches, 1e-7)))

    found = []
    for way in contender.ways:
        contender.way, contender.count = way, 1
        launch = measure(contender, clock)
        contender.count = runs(way, launch, seconds / 3)
        if contender.count > 1:  # the first run was cold
            launch = measure(contender, clock)
        found.append((launch, way))
    launch, contender.way = found[-1]
    if found[0][0] < GRAPH_LOSES * launch:
        launch, contender.way = found[0]
    contender.count = runs(contender.way, launch, seconds)
    return launch


# ---- the run


class Run:
    """A measurement under way. `report` is valid JSON at every moment, so that it can be saved when a contender hangs.

    on_step(points done, what comes) is called before each step; on_point(report) after each point; on_hang(report) from
    another thread, when a contender hung. done: points of an earlier report, which are kept and not measured again.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        command: str,
        on_step: Callable[[int, str], None] = lambda done, what: None,
        on_point: Callable[[dict], object] = lambda report: None,
        on_hang: Callable[[dict], None] = lambda report: None,
        done: Sequence[dict] = (),
    ):
        self.plan, self.device, self.single = plan, device, plan.protocol == "single"
        self._on_step, self._on_point, self._on_hang = on_step, on_point, on_hang
        self.clock: Clock = CudaClock(device) if device.type == "cuda" else CpuClock()
        self.started = time.monotonic()
        self.watchdog, self.telemetry = Watchdog(self._hung), Telemetry(device)
        self.peers = contenders_of(plan, device)
        names = [peer.name for peer in self.peers]
        known = {Point.of(facts) for facts in done}
        self.points = [point for point in plan.points() if point not in known]
        self.unusable: Unusable = {}
        self.report: dict = {
            "schema": SCHEMA,
            "what": plan.what,
            **provenance(device, command),
            "stopped": "not finished",
            "protocol": {
                "name": plan.protocol,
                "rounds": plan.rounds,
                **({"warm-ups": WARMUPS, "calls": CALLS} if self.single else {"seconds": plan.seconds}),
                "clock": "CUDA events" if device.type == "cuda" else "wall clock",
                "flops": "2 (D + Dv) a visible pair, causal half of all; backward 2 (3 D + 2 Dv)",
                "gate": BOUNDS,
                "also ran": ALSO_RAN,
                "settling": 0.0 if self.single or device.type == "cpu" else SETTLE_SECONDS,
            },
            "inputs": plan.inputs,
            "contenders": names,
            "not installed": [peer.name for peer in peers_for(device).values() if not peer.installed],
            "not asked": [peer.name for peer in peers_for(device).values() if peer.installed and peer.name not in names],
            "part": list(plan.part),
            "host_us": {},
            "ceiling": {},
            "telemetry": {},
            "points": list(done),
        }

    def run(self) -> dict:
        """Measures everything and returns the report, whose "stopped" is None if nothing is missing from the plan."""
        stopped: str | None
        self.unusable = warm(self.points, self.peers, self.device, lambda what: self._on_step(0, what))
        with self.clock.running(), self.watchdog, self.telemetry:
            try:
                self._around("before")
                self._host_times()
                stopped = self._points()
                self._again()
                self._around("after")
            except _Poisoned as error:
                stopped = f"the GPU failed: {error}"
            except KeyboardInterrupt:
                stopped = "interrupted"
        part, parts = self.plan.part
        self.report["stopped"] = stopped or (f"part {part} of {parts} alone" if parts > 1 else None)
        self.report["points"] = by_shape(self.report["points"])
        return self.report

    def _step(self, what: str, seconds: float) -> None:
        """Says that a step begins. On a GPU it counts as hung if it takes longer than `seconds`; a CPU is slow, but never
        hangs."""
        self._on_step(sum(facts["finished"] for facts in self.report["points"]), what)
        if self.device.type == "cuda":
            self.watchdog.expect(what, seconds)

    def _hung(self, what: str) -> None:
        self.report["stopped"] = f"hung: {what}"
        self._on_hang(self.report)

    def _out_of_time(self) -> bool:
        return time.monotonic() - self.started > self.plan.max_seconds

    def _points(self) -> str | None:
        """Measures the points. Returns the reason if it stopped before the last of them, else None."""
        for number, point in enumerate(self.points):
            if self._out_of_time():
                return f"out of time after {number} of {len(self.points)} points"
            whole = self._point(point)
            self._on_point(self.report)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if not whole:
                return f"out of time in point {number + 1} of {len(self.points)}"
        return None

    def _share(self, point: Point) -> float:
        """Seconds that a point may take of the time that is left, where that is shared out evenly to the points that are left;
        else infinite."""
        if not self.plan.even:
            return math.inf
        left = len(self.points) - self.points.index(point)
        return max(0.0, self.plan.max_seconds - (time.monotonic() - self.started)) / left

    def _point(self, point: Point) -> bool:
        """Measures a point and writes it into the report. Returns False if time ran out before its last round."""
        share = self._share(point)
        until = time.monotonic() + share
        sets = input_sets(point, self.device, self.plan.inputs)
        facts = point.facts | {"flops": point.flops, "sets": len(sets), "telemetry": {}, "results": {}, "finished": False}
        self.report["points"].append(facts)
        entered, launches = self._entered(point, sets, facts, [peer.name for peer in self.peers])
        racing, others = _split(entered, launches)
        start = time.monotonic()
        for contender in others:
            self._time(contender, point, facts)
        wanted = rounds_of(max((launches[c.peer.name] for c in racing), default=0.0), len(racing), self.plan)
        facts["redone"] = self._redone(point, entered)
        settling = min(self.report["protocol"]["settling"], SETTLE_SHARE * share)
        wanted = self._fit(racing, wanted, until - time.monotonic() - settling)
        facts["finished"] = self._race(racing, point, facts, lambda rounds: rounds >= wanted, settling)
        facts["telemetry"] = self.telemetry.since(start)
        return facts["finished"]

    def _fit(self, racing: list[Contender], wanted: int, seconds: float) -> int:
        """How many rounds fit into so many seconds, at least one balanced block; its timings are made shorter if it does not
        fit."""
        round_seconds = 2 * self.plan.seconds * len(racing)
        if not racing or self.single or wanted * round_seconds <= seconds:
            return wanted
        block = block_of(len(racing))
        for contender in racing:
            contender.count = max(1, int(contender.count * min(1.0, max(0.0, seconds) / (block * round_seconds))))
        return max(block, int(seconds / round_seconds) // block * block)

    def _redone(self, point: Point, entered: list[Contender]) -> float | None:
        """The share of blocks of 64 rows that Strobe's optimistic softmax computes twice; None where it does not run."""
        ours = next((contender for contender in entered if contender.peer.name == "strobe"), None)
        if ours is None or point.backward or self.device.type != "cuda" or _backend(point, self.device) != "sm90":
            return None
        before = strobe.redone_blocks(self.device)
        with self._guard("strobe", {}):
            ours.calls[-1]()
        each = point.packed or [point.length] * point.batch
        blocks = point.heads * sum(-(-length // 64) for length in each)
        return (strobe.redone_blocks(self.device) - before) / blocks

    def _entered(
        self, point: Point, sets: list[Inputs], facts: dict, names: list[str]
    ) -> tuple[list[Contender], dict[str, float]]:
        """Makes contenders ready at a point: those of these names that can be, and name -> seconds of one launch."""
        gate = Gate(sets[-1], mask_of(point.mask))
        entered, launches = [], {}
        for peer in (peer for peer in self.peers if peer.name in names):
            if (peer.name, point) in self.unusable:
                facts["results"][peer.name] = {"refused": self.unusable[peer.name, point]}
                continue
            self._step(f"{point}: {peer.name}, first call", FIRST_CALL_SECONDS)
            with self._guard(peer.name, facts["results"]):
                contender = enter(peer, point, sets, gate, self.clock, 0.0 if self.single else self.plan.seconds)
                launches[peer.name] = warm_up(contender, self.clock, self.plan.seconds)
                entered.append(contender)
        return entered, launches

    def _race(self, racing: list[Contender], point: Point, facts: dict, enough: Callable[[int], bool], settling: float) -> bool:
        """Times balanced blocks until there are enough rounds, after `settling` seconds. Returns False if time ran out in the
        first block.

        A block in which a contender fails is repeated without it. A block that time cuts short is dropped, but the first one is
        kept."""
        self._settle(racing, point, facts, settling)
        while racing and not enough(rounds := len(racing[0].seconds)):
            for number, order in enumerate(balanced_order(len(racing), block_of(len(racing)))):
                if (rounds or number) and self._out_of_time():
                    if rounds:
                        self._forget(racing, rounds, point, facts)
                    return bool(rounds)
                for place in order:
                    self._time(racing[place], point, facts)
            left = [c for c in racing if "refused" not in facts["results"][c.peer.name]]
            if len(left) < len(racing):
                racing = left
                self._forget(racing, rounds, point, facts)
        return True

    def _settle(self, racing: list[Contender], point: Point, facts: dict, seconds: float) -> None:
        """Runs the contenders in turn, untimed, for so many seconds: until the card's power has settled."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and racing:
            for contender in racing:
                if "refused" not in facts["results"].get(contender.peer.name, {}):
                    self._step(f"{point}: {contender.peer.name}, settling", HANG_SECONDS)
                    with self._guard(contender.peer.name, facts["results"]):
                        measure(contender, self.clock)

    def _forget(self, racing: list[Contender], rounds: int, point: Point, facts: dict) -> None:
        """Drops all rounds of each contender but the first `rounds`."""
        for contender in racing:
            del contender.seconds[rounds:], contender.mhz[rounds:]
            del facts["results"][contender.peer.name]
            if rounds:
                facts["results"][contender.peer.name] = self._result(contender, point, facts["flops"])

    def _again(self) -> None:
        """Measures more rounds at the points whose verdict is open, as time allows. Their earlier rounds are kept."""
        by_point = {Point.of(facts): facts for facts in self.report["points"] if facts["finished"]}
        for point in (point for point in self.plan.points() if point in by_point):
            facts = by_point[point]
            names = sorted(name for name, ratio in ratios(facts["results"]).items() if ratio.open)
            racing_names = [name for name, result in facts["results"].items() if len(result.get("rounds", ())) > 1]
            if not names or self._out_of_time() or len(facts["results"]["strobe"]["rounds"]) >= MOST_ROUNDS:
                continue
            sets = input_sets(point, self.device, self.plan.inputs)
            racing, _ = self._entered(point, sets, facts, racing_names)
            for contender in racing:
                contender.take_up(facts["results"][contender.peer.name], facts["flops"])
            settling = self.report["protocol"]["settling"]
            self._race(racing, point, facts, partial(_decided, facts, names), settling)
            self._on_point(self.report)

    def _time(self, contender: Contender, point: Point, facts: dict) -> None:
        """Times one contender in one round. Its result is in the report from its first round on."""
        name = contender.peer.name
        if "refused" in facts["results"].get(name, {}):
            return
        self._step(f"{point}: {name}, round {len(contender.seconds) + 1}", HANG_SECONDS)
        with self._guard(name, facts["results"]):
            contender.seconds.append(self._seconds(contender))
            if (mhz := self.clock.mhz()) is not None:
                contender.mhz.append(mhz)
            facts["results"][name] = self._result(contender, point, facts["flops"])

    def _seconds(self, contender: Contender) -> float:
        """Seconds that one launch takes, measured in one round."""
        if not self.single:
            return measure(contender, self.clock)
        with contender.peer.context():
            each = call_times(contender.calls, self.clock)
        contender.each += each
        return median(each)

    def _result(self, contender: Contender, point: Point, flops: float) -> dict:
        result = summary(flops, contender.seconds) | {"error": contender.error, "timed": contender.way.name}
        if contender.mhz:
            result["sm_clock_mhz"] = round(median(contender.mhz))
        if contender.each:
            result["calls_us"] = statistics(contender.each)
        if contender.extra_bytes is not None:
            result["extra_bytes_per_row"] = round(contender.extra_bytes / (_rows(point) * point.heads), 2)
        if contender.note:
            result["note"] = contender.note
        if contender.peer.name == "strobe":
            result["backend"] = _backend(point, self.device)
        return result

    @contextmanager
    def _guard(self, name: str, results: dict[str, dict]) -> Iterator[None]:
        """A context in which an exception becomes the contender's result. Only an error that leaves the GPU unusable is raised
        on."""
        failed = None
        with reasons() as found:
            try:
                yield
            except Exception as error:
                failed = compact(error)
        if failed:
            results[name] = {"refused": "; ".join([failed, *found[:4]])}
            try:
                self.clock.synchronize()
            except Exception as error:
                raise _Poisoned(f"{name}: {failed}") from error

    def _host_times(self) -> None:
        """Measures the CPU time of a call on a tiny problem, in microseconds. Only on a GPU, where calls return before they
        finish."""
        if self.device.type != "cuda" or not self.points:
            return
        tiny = replace(self.points[0], batch=1, length=128, heads=1, heads_kv=1, length_kv=None, packed=None)
        inputs = input_sets(tiny, self.device)[0]
        for peer in self.peers:
            if (peer.name, self.points[0]) in self.unusable:
                continue
            self._step(f"host time of {peer.name}", FIRST_CALL_SECONDS)
            with self._guard(peer.name, self.report["host_us"]), peer.context():
                self.report["host_us"][peer.name] = {"us": host_us(bind(peer, tiny, inputs), self.clock)}

    def _around(self, when: str) -> None:
        """Measures clocks, temperature and a large square matrix product; `when` is "before" or "after" all points."""
        self._step("matrix product", HANG_SECONDS)
        size, dtype = PRODUCT[self.device.type]
        a, b = (torch.randn(size, size, device=self.device).to(DTYPES[dtype]) for _ in range(2))
        once = [self.clock.seconds(lambda: a @ b, 1) for _ in range(2)][-1]
        seconds = self.clock.seconds(lambda: a @ b, max(1, round(self.plan.seconds / once)))
        self.report["telemetry"][when] = snapshot(self.device)
        self.report["ceiling"][when] = 2 * size**3 / seconds / 1e12
        self.report["ceiling"]["matmul"] = f"{size} x {size} x {size}, {dtype}"


class _Poisoned(Exception):
    """Raised when the GPU answers every call with an error from now on."""


def _split(entered: list[Contender], launches: dict[str, float]) -> tuple[list[Contender], list[Contender]]:
    """The contenders that race, with all rounds, and those that are timed once. Strobe and the fastest peer always race, so
    that their ratio has an interval."""
    if not entered:
        return [], []
    fast = ALSO_RAN * min(launches.values())
    peers = {name: seconds for name, seconds in launches.items() if not name.startswith("strobe")}
    always = {"strobe", min(peers, key=peers.__getitem__, default="")}
    racing = [c for c in entered if launches[c.peer.name] <= fast or c.peer.name in always]
    return racing, [c for c in entered if c not in racing]


def _decided(facts: dict, names: list[str], rounds: int) -> bool:
    """Whether more rounds are of no use: Strobe's ratios to these peers are known to within `SMALLEST`, or there are too many
    already."""
    found = ratios(facts["results"])
    known = [found[name].half for name in names if name in found]
    return rounds >= MOST_ROUNDS or all(half is not None and half <= SMALLEST for half in known)


def _rows(point: Point) -> int:
    """Query rows of a head, over all sequences."""
    return sum(point.packed) if point.packed is not None else point.batch * point.length


def _backend(point: Point, device: torch.device) -> str | None:
    """The name of Strobe's backend that computes a point. fp8 has one kernel on a GPU, and is computed in float32 on a CPU."""
    problem = point.problem()
    if point.dtype == "fp8":
        if device.type == "cuda":
            return "sm90"
        problem = replace(problem, dtype=torch.float32)
    return explain_problem(problem, arch_of(device)).chosen


def rounds_of(launch: float, contenders: int, plan: Plan) -> int:
    """How many rounds a point gets whose launches take `launch` seconds: whole balanced blocks, and fewer where a timing is
    long."""
    timing = launch * (WARMUPS + CALLS) if plan.protocol == "single" else launch
    wanted = plan.rounds if timing <= plan.seconds else min(plan.rounds, max(1, round(LONG_SECONDS / timing)))
    block = block_of(contenders)
    return -(-wanted // block) * block


def expected_seconds(points: Sequence[Point], contenders: int, plan: Plan) -> float:
    """Roughly how many seconds a plan takes on an H200, without the time of compilers."""
    total = 0.0
    for point in points:
        launch, racing = point.flops / RATE, min(contenders, RACING)
        timing = launch if launch > plan.seconds else 2 * plan.seconds
        timing = launch * (WARMUPS + CALLS) if plan.protocol == "single" else timing
        settling = 0.0 if plan.protocol == "single" else SETTLE_SECONDS
        total += contenders * (ENTER_SECONDS + 2 * timing) + settling + racing * rounds_of(launch, racing, plan) * timing
    return total


def host_us(call: Call, clock: Clock, count: int = 100) -> float:
    """Microseconds until a call returns: the median over five batches of calls, each begun with an empty queue."""
    batches = []
    for _ in range(6):
        clock.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        batches.append((time.perf_counter() - begin) / count * 1e6)
    clock.synchronize()
    return median(batches[1:])


def contenders_of(plan: Plan, device: torch.device) -> list[Peer]:
    """The contenders of a plan: Strobe, then its backends by name, then peers. ValueError for a name that is no peer here."""
    known = peers_for(device)
    names = [name for name in known if known[name].installed] if plan.peers is None else list(plan.peers)
    for name in names:
        if name not in known:
            raise ValueError(f"peers must be some of {', '.join(known)}, got {name!r}")
    strobes = [strobe_peer(), *(strobe_peer(backend) for backend in plan.backends)]
    return strobes + [known[name] for name in names]


# ---- what a user sees


def bench(
    plan: Plan, device: torch.device, command: str, path: Path | None = None, resume: bool = False, picture: Path | None = None
) -> int:
    """Measures a plan, writes JSON as it goes and then pictures, and prints a table. Returns the exit status: 0, or 1 if Strobe
    failed somewhere.

    path: of the JSON; None: benchmarks/results/<what>-<device>-<date>.json here. picture: PNG or SVG by its suffix; None: a PNG
    beside the JSON. resume: keep the finished points of the JSON that is there; ValueError if it is of another device or
    commit. If the GPU hangs, what was measured is saved and the process ends with status 3.
    """
    console = Console(stderr=True)

    def save(report: dict) -> Path:
        target = path or default_path(report)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(report, indent=1) + "\n")
        return target

    def on_hang(report: dict) -> None:
        console.print(f"{report['stopped']}; what was measured is in {save(report)}", markup=False)
        os._exit(3)

    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, refresh_per_second=4) as progress:
        task = progress.add_task("", total=len(plan.points()))

        def on_step(done: int, what: str) -> None:
            progress.update(task, completed=done, description=what)

        done = finished(path, device) if resume and path else ()
        run = Run(plan, device, command, on_step, save, on_hang, done)
        console.print(_announcement(run), markup=False, highlight=False)
        report = run.run()
        progress.update(task, completed=len(report["points"]), description="measured")
    target = save(report)
    show(report)
    console.print(f"written: {target}", markup=False)
    if report["points"]:
        from strobe.lab.bench.plot import draw, draw_random, draw_zoo

        draws = {"zoo": draw_zoo, "random": draw_random}.get(plan.what, draw)
        for drawn in draws(report, picture or target.with_suffix(".png")):
            console.print(f"written: {drawn}", markup=False)
    failed = any("refused" in point["results"].get("strobe", {}) for point in report["points"])
    return 1 if failed or (report["stopped"] or "").startswith("the GPU failed") else 0


def _announcement(run: Run) -> str:
    names = ", ".join(run.report["contenders"])
    seconds = min(expected_seconds(run.points, len(run.peers), run.plan), run.plan.max_seconds)
    time_needed = f", about {seconds / 60:.0f} minutes and the compilers' time" if run.device.type == "cuda" else ""
    return f"{len(run.points)} points, {names}{time_needed}"


def finished(path: Path, device: torch.device) -> list[dict]:
    """The finished points of a report. ValueError if it was not made by this commit on such a device."""
    report, here = load(path), describe(device)
    for what in ("name", "commit"):
        if report["device"].get(what) != here.get(what):
            raise ValueError(f"resume needs the same {what} as in {path}, {report['device'].get(what)}, got {here.get(what)}")
    return [facts for facts in report["points"] if facts["finished"]]
