"""Strobe beside its peers: one process, the same inputs, correctness first, interleaved rounds, medians.

Protocol.
0. Compilers first. What compiles its kernels does so before, in other processes (`strobe.lab.warm`).
1. Gate. What a contender computes is compared with float64 before it is timed (all rows of the first and of the last key
   head for gradients, a sample of rows for outputs); one that is further off than `BOUNDS` is rejected, and its error printed.
2. Launches alone. On a GPU a contender is tried as a CUDA graph of many launches and as calls in a row, and timed as calls
   if they are clearly faster: neither Python nor what a kernel needs to be captured counts. `timed` says which;
   `host_us` tells what Python costs. Where one launch fills a timing there is no graph.
3. Cold L2. The inputs of successive launches differ (`sets` of them) until together they exceed the L2 cache twice.
4. Rounds. In each round every contender runs once, for `seconds` after a lead as long; the order is a balanced one
   (`balanced_order`), since a card that ran hot slows whoever comes next. The median over the rounds is quoted; all of
   them are kept. Who takes 1.5 times as long as the fastest is timed in the first round only: it decides nothing, cools the
   card, and would take most of the time.
5. Memory. Of a backward, what PyTorch's allocator held at most beside inputs and gradients, in one call outside of a graph.
6. Call by call. With the protocol "single" a round is 32 calls and 128 that are timed one by one (`strobe.lab.single`).
7. A ceiling. cuBLAS multiplies square matrices in the same run, before and after.
Everything that failed, refused or was missing is in the result with its reason.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from strobe.device import arch_of
from strobe.dispatch import explain_problem
from strobe.lab.failures import compact, reasons
from strobe.lab.gate import BOUNDS, Gate
from strobe.lab.machine import Telemetry, Watchdog, describe, snapshot
from strobe.lab.peers import Call, Peer, bind, peers_for, standard, strobe_peer
from strobe.lab.plan import DTYPES, MASKS, Inputs, Plan, Point, input_sets
from strobe.lab.report import SCHEMA, default_path, load, show
from strobe.lab.single import CALLS, WARMUPS, call_times, statistics
from strobe.lab.warm import Unusable, warm

FIRST_CALL_SECONDS, HANG_SECONDS = 180.0, 60.0
"""How long a first call (which may compile) and any other step may take before the run is called hung."""

ALSO_RAN = 1.5
"""Who takes this many times as long as the fastest is timed in one round only."""

GRAPH_LOSES = 0.97
"""Calls in a row are timed instead of a graph if they take less than this part of its time."""

LONG_SECONDS = 1.0
"""A contender whose launches are long has so many rounds of them, but three at least."""

GRAPH_SECONDS = 0.002
"""A CUDA graph holds about so many seconds of launches: between two replays the GPU idles for microseconds."""

ENTER_SECONDS, RACING, RATE = 0.2, 3, 5e14
"""For the estimate alone: seconds until a contender is ready at a point, how many race, and FLOP/s while they do."""


# ---- statistics


def balanced_order(n: int, rounds: int) -> list[list[int]]:
    """Orders of n contenders in which each follows each other equally often, after n rounds (2n if n is odd).

    A zigzag 0, 1, n-1, 2, n-2, ... shifted by one each round, and for odd n then reversed (Williams 1949, "Experimental
    designs balanced for the estimation of residual effects of treatments").
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    orders = []
    for r in range(rounds):
        order = [(place + r) % n for place in zigzag]
        orders.append(order[::-1] if n % 2 and (r // n) % 2 else order)
    return orders


def summary(flops: float, seconds: list[float]) -> dict:
    """TFLOP/s of the rounds: median, extremes and all of them in order."""
    rates = [flops / s / 1e12 for s in seconds]
    return {"tflops": median(rates), "min": min(rates), "max": max(rates), "rounds": rates}


# ---- clocks

_BYTES = "requested_bytes.all"
"""As tensors asked for them: what the allocator gives is rounded up, by as much as a megabyte."""


class CudaClock:
    """Times launches by CUDA events. All work runs on one side stream, as graph capture and autograd demand."""

    def __init__(self, device: torch.device):
        from strobe.lab.sm_clock import SmClock  # it takes Triton, which not every system has

        self.stream = torch.cuda.Stream(device)
        self._sm_clock = SmClock(device)

    def running(self):
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], count: int) -> float:
        """Of one `run`, the mean over `count` in a row."""
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
        """Of each call by itself, queued one after the other."""
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
        """Keeps the GPU busy with nothing, at 2 GHz for so long, while the host goes on."""
        torch.cuda._sleep(int(2e9 * seconds))

    def mhz(self) -> float | None:
        """The SMs' mean clock in the last timing."""
        return self._sm_clock.mhz()

    def extra_bytes(self, call: Call) -> int:
        """What the allocator held at most in a call, beyond what it held before and what the call returns (tensors)."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()[f"{_BYTES}.current"]
        returned = call()
        self.synchronize()
        peak = torch.cuda.memory_stats()[f"{_BYTES}.peak"]
        return max(0, peak - before - sum(x.nbytes for x in returned))

    def captured(self, calls: list[Call], times: int) -> tuple[Callable[[], object], list]:
        """All calls, so many times, as one CUDA graph, and what they return at last, which each replay overwrites."""
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
        """Nobody counts them."""


Clock = CudaClock | CpuClock


# ---- one contender at one point


@dataclass
class Way:
    """A way to launch: `run` does so many launches, and leaves one of `results` for each set of inputs."""

    name: str
    run: Callable[[], object]
    launches: int
    results: list


@dataclass
class Contender:
    """A peer made ready for a point."""

    peer: Peer
    ways: list[Way]
    """Calls in a row, then perhaps a CUDA graph."""
    way: Way
    """The one that is timed."""
    calls: list[Call] = field(default_factory=list)
    """One for each set of inputs."""
    note: str | None = None
    error: float = math.inf
    extra_bytes: int | None = None
    """Of a backward, beside inputs and gradients."""
    count: int = 1
    """Runs in one timing."""
    seconds: list[float] = field(default_factory=list)
    """Of one launch, by round."""
    each: list[float] = field(default_factory=list)
    """Of each timed call of all rounds, where calls are timed one by one."""
    mhz: list[float] = field(default_factory=list)
    """The SMs' clock, by round."""


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
    """Adds a CUDA graph to the ways."""
    times = max(1, min(32, round(GRAPH_SECONDS / (launch * len(calls)))))
    try:
        run, results = clock.captured(calls, times)
        run()
        clock.synchronize()
        contender.ways.append(Way("CUDA graph", run, times * len(calls), results))
    except Exception as error:
        clock.synchronize()
        # Leaving a broken capture raises too; the first error is the one that says why.
        contender.note = f"no CUDA graph: {compact(error.__context__ or error)}"


def _error(way: Way, gate: Gate, peer: Peer) -> float:
    """Of what the last set of inputs gave."""
    last = way.results[-1]
    return gate.error(standard(last, peer) if isinstance(last, torch.Tensor) else tuple(standard(x, peer) for x in last))


def measure(contender: Contender, clock: Clock) -> float:
    """Seconds of one launch in one timing. As many runs go before, untimed: the card's clock answers to its power of the last
    tens of milliseconds, which would else be that of whoever ran before. A single long run needs no such lead."""
    with contender.peer.context():
        for _ in range(contender.count if contender.count > 1 else 0):
            contender.way.run()
        return clock.seconds(contender.way.run, contender.count) / contender.way.launches


def warm_up(contender: Contender, clock: Clock, seconds: float) -> float:
    """Chooses the way and how many runs of it fill `seconds`; returns the seconds of one launch."""

    def runs(way: Way, launch: float, seconds: float) -> int:
        return max(1, round(seconds / max(launch * way.launches, 1e-7)))

    found = []
    for way in contender.ways:
        contender.way, contender.count = way, 1
        launch = measure(contender, clock)
        contender.count = runs(way, launch, seconds / 3)
        if contender.count > 1:  # the first one was cold
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
        known = {Point.of(facts) for facts in done}
        self.points = [point for point in plan.points() if point not in known]
        self.unusable: Unusable = {}
        self.report: dict = {
            "schema": SCHEMA,
            "what": "backward" if plan.backward else "forward",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": command,
            "stopped": "not finished",
            "device": describe(device),
            "protocol": {
                "name": plan.protocol,
                "rounds": plan.rounds,
                **({"warm-ups": WARMUPS, "calls": CALLS} if self.single else {"seconds": plan.seconds}),
                "clock": "CUDA events" if device.type == "cuda" else "wall clock",
                "flops": "2 (D + Dv) a visible pair, causal half of all; backward 2 (3 D + 2 Dv)",
                "gate": BOUNDS,
                "also ran": ALSO_RAN,
            },
            "contenders": [peer.name for peer in self.peers],
            "not installed": [peer.name for peer in peers_for(device).values() if not peer.installed],
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
                self._around("after")
            except _Poisoned as error:
                stopped = f"the GPU failed: {error}"
            except KeyboardInterrupt:
                stopped = "interrupted"
        self.report["stopped"] = stopped
        return self.report

    def _step(self, what: str, seconds: float) -> None:
        """A step begins; on a GPU it is hung if it takes longer than `seconds` (a CPU is slow, and never hangs)."""
        self._on_step(sum(facts["finished"] for facts in self.report["points"]), what)
        if self.device.type == "cuda":
            self.watchdog.expect(what, seconds)

    def _hung(self, what: str) -> None:
        self.report["stopped"] = f"hung: {what}"
        self._on_hang(self.report)

    def _out_of_time(self) -> bool:
        return time.monotonic() - self.started > self.plan.max_seconds

    def _points(self) -> str | None:
        """Measures the points; the reason if it stopped before the last of them."""
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

    def _point(self, point: Point) -> bool:
        """Measures a point into the report; False if time ran out before its last round."""
        sets = input_sets(point, self.device)
        gate = Gate(sets[-1], MASKS[point.mask])
        facts = asdict(point) | {"flops": point.flops, "sets": len(sets), "telemetry": {}, "results": {}, "finished": False}
        self.report["points"].append(facts)
        launches: dict[str, float] = {}
        entered = []
        for peer in self.peers:
            if (peer.name, point) in self.unusable:
                facts["results"][peer.name] = {"refused": self.unusable[peer.name, point]}
                continue
            self._step(f"{point}: {peer.name}, first call", FIRST_CALL_SECONDS)
            with self._guard(peer.name, facts["results"]):
                contender = enter(peer, point, sets, gate, self.clock, 0.0 if self.single else self.plan.seconds)
                launches[peer.name] = warm_up(contender, self.clock, self.plan.seconds)
                entered.append(contender)
        if not entered:
            facts["finished"] = True
            return True
        fast = ALSO_RAN * min(launches.values())
        racing = [c for c in entered if launches[c.peer.name] <= fast or c.peer.name == "strobe"]
        others = [c for c in entered if c not in racing]
        rounds = rounds_of(max(launches[c.peer.name] for c in racing), len(racing), self.plan)
        start = time.monotonic()
        for number, order in enumerate(balanced_order(len(racing), rounds)):
            if number > 0 and self._out_of_time():
                break
            for contender in [racing[place] for place in order] + (others if number == 0 else []):
                self._time(contender, point, number, facts)
        else:
            facts["finished"] = True
        facts["telemetry"] = self.telemetry.since(start)
        return facts["finished"]

    def _time(self, contender: Contender, point: Point, number: int, facts: dict) -> None:
        """One contender in one round; its result stands in the report from the first round on."""
        name = contender.peer.name
        if "refused" in facts["results"].get(name, {}):
            return
        self._step(f"{point}: {name}, round {number + 1}", HANG_SECONDS)
        with self._guard(name, facts["results"]):
            contender.seconds.append(self._seconds(contender))
            if (mhz := self.clock.mhz()) is not None:
                contender.mhz.append(mhz)
            facts["results"][name] = self._result(contender, point, facts["flops"])

    def _seconds(self, contender: Contender) -> float:
        """Of one launch in one round."""
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
            result["extra_bytes_per_row"] = round(contender.extra_bytes / (point.batch * point.length * point.heads), 2)
        if contender.note:
            result["note"] = contender.note
        if contender.peer.name == "strobe":
            result["backend"] = explain_problem(point.problem(), arch_of(self.device)).chosen
        return result

    @contextmanager
    def _guard(self, name: str, results: dict[str, dict]) -> Iterator[None]:
        """A contender's failure becomes its result; only an error that poisons the GPU goes on."""
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
        """CPU time of a call on a tiny problem, microseconds: GPU only, where launches return before they finish."""
        if self.device.type != "cuda" or not self.points:
            return
        tiny = replace(self.points[0], batch=1, length=128, heads=1, heads_kv=1)
        inputs = input_sets(tiny, self.device)[0]
        for peer in self.peers:
            if (peer.name, self.points[0]) in self.unusable:
                continue
            self._step(f"host time of {peer.name}", FIRST_CALL_SECONDS)
            with self._guard(peer.name, self.report["host_us"]), peer.context():
                self.report["host_us"][peer.name] = {"us": host_us(bind(peer, tiny, inputs), self.clock)}

    def _around(self, when: str) -> None:
        """Before and after all points: clocks and temperature, and a large square matrix product."""
        self._step("matrix product", HANG_SECONDS)
        size, dtype = (8192, "bf16") if self.device.type == "cuda" else (2048, "fp32")
        a, b = (torch.randn(size, size, device=self.device).to(DTYPES[dtype]) for _ in range(2))
        once = [self.clock.seconds(lambda: a @ b, 1) for _ in range(2)][-1]
        seconds = self.clock.seconds(lambda: a @ b, max(1, round(self.plan.seconds / once)))
        self.report["telemetry"][when] = snapshot(self.device)
        self.report["ceiling"][when] = 2 * size**3 / seconds / 1e12
        self.report["ceiling"]["matmul"] = f"{size} x {size} x {size}, {dtype}"


class _Poisoned(Exception):
    """The GPU answers every call with an error from now on."""


def rounds_of(launch: float, contenders: int, plan: Plan) -> int:
    """How many rounds of launches that take so many seconds: as many as a balanced order needs, fewer of long timings."""
    timing = launch * (WARMUPS + CALLS) if plan.protocol == "single" else launch
    if timing > plan.seconds:
        return min(plan.rounds, max(3, round(LONG_SECONDS / timing)))
    cycle = contenders if contenders % 2 == 0 else 2 * contenders
    return plan.rounds if plan.rounds < cycle else -(-plan.rounds // cycle) * cycle


def expected_seconds(points: Sequence[Point], contenders: int, plan: Plan) -> float:
    """Of an H200, roughly, without the compilers."""
    total = 0.0
    for point in points:
        launch, racing = point.flops / RATE, min(contenders, RACING)
        timing = launch if launch > plan.seconds else 2 * plan.seconds
        timing = launch * (WARMUPS + CALLS) if plan.protocol == "single" else timing
        total += contenders * (ENTER_SECONDS + 2 * timing) + racing * rounds_of(launch, racing, plan) * timing
    return total


def host_us(call: Call, clock: Clock, count: int = 100) -> float:
    """Microseconds until a call returns; median of five batches, the queue empty before each."""
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
    """Strobe first, then its named backends, then the peers asked for. ValueError for a name that is no peer here."""
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
    """Measures, writes JSON as it goes and then pictures, prints a table. Exit status: 0, or 1 if Strobe failed somewhere.

    path: of the JSON; None: benchmarks/results/<what>-<device>-<date>.json here. picture: PNG or SVG by its suffix; None: PNG
    beside the JSON. resume: keep the finished points of the
    JSON that is there; ValueError if it is of another device or commit. A hang saves what there is and ends the process
    with status 3.
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
        from strobe.lab.plot import draw

        for drawn in draw(report, picture or target.with_suffix(".png")):
            console.print(f"written: {drawn}", markup=False)
    failed = any("refused" in point["results"].get("strobe", {}) for point in report["points"])
    return 1 if failed or (report["stopped"] or "").startswith("the GPU failed") else 0


def _announcement(run: Run) -> str:
    names = ", ".join(run.report["contenders"])
    seconds = expected_seconds(run.points, len(run.peers), run.plan)
    time_needed = f", about {seconds / 60:.0f} minutes and the compilers' time" if run.device.type == "cuda" else ""
    return f"{len(run.points)} points, {names}{time_needed}"


def finished(path: Path, device: torch.device) -> list[dict]:
    """The finished points of a report. ValueError if it was not made by this commit on such a device."""
    report, here = load(path), describe(device)
    for what in ("name", "commit"):
        if report["device"].get(what) != here.get(what):
            raise ValueError(f"resume needs the same {what} as in {path}, {report['device'].get(what)}, got {here.get(what)}")
    return [facts for facts in report["points"] if facts["finished"]]
