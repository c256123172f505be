"""`strobe bench decode`: a decode step over a cache, beside the attentions that are installed, in bytes of keys and values a
second.

On a GPU each contender is captured in a CUDA graph of many launches, over copies of the cache that together are larger than the
L2 cache, so that no launch finds its keys there. Rounds are interleaved, every contender once a round, and the median counts.
Before it is timed, a contender is compared with float64 attention; who is wrong is not timed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

import strobe
from strobe.device import Arch, arch_of
from strobe.kernels.decode.choice import choose
from strobe.kernels.decode.config import Config
from strobe.lab.bench.bench import Clock, CpuClock, CudaClock, balanced_order
from strobe.lab.bench.decode_peers import OURS, Contender, Inputs, Plan, Point, described, peers_for
from strobe.lab.bench.failures import compact
from strobe.lab.bench.machine import provenance, snapshot
from strobe.lab.bench.plot import CEILING, PEERS, STROBE, draw_speeds, over_lengths, plt
from strobe.lab.bench.plot import save as save_picture
from strobe.lab.bench.report import arch_of as arch_named
from strobe.lab.bench.report import closest, default_path, verdicts
from strobe.reference import cached
from strobe.serving.arguments import checked
from strobe.serving.problem import describe

SCHEMA = 1
LAUNCHES = 20
"""Launches of a graph, of a cache up to GRAPH_BYTES / 20."""
GRAPH_BYTES = 16 * 2**30
"""What the launches of a graph read together, where that is much; LEAST_LAUNCHES at least."""
LEAST_LAUNCHES = 4
COLD_BYTES = 200 * 2**20
"""What is read of the copies of a cache together at least, on a GPU: more than three times an H200's L2."""
BOUNDS = {"bf16": 0.03, "fp16": 0.01, "e4m3": 0.03, "fp32": 1e-4}
"""The largest error, over the largest result, by the dtype of the cache."""


@dataclass
class Ready:
    """A contender at a point: run() makes `launches` launches."""

    run: Callable[[], object]
    launches: int
    error: float
    kept: list = field(default_factory=list)
    """What must live as long: its calls, which own what they prepared."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a launch in each round."""


def right(inputs: Inputs) -> dict[int, torch.Tensor]:
    """What the first and the last request should give, in float64, by their numbers."""
    found = {}
    for b in {0, inputs.point.batch - 1}:
        one = slice(b, b + 1)
        k, v, table = inputs.k, inputs.v, inputs.table
        if table is None:
            k, v = k[one], v[one]
        cache = strobe.Cache(k, v, inputs.lengths[one], None if table is None else table[one])
        operands, options = checked(inputs.q[one], cache, inputs.point.mask)
        found[b] = cached.decode(describe(operands, options), operands, torch.float64)[0][0]
    return found


def error_of(inputs: Inputs, call: Callable[[], torch.Tensor], wanted: dict[int, torch.Tensor]) -> float:
    """The largest error of a call, over the largest result. wanted: see `right`."""
    inputs.out.fill_(torch.nan)
    found = call()
    return max(float((found[b].double() - x).abs().max() / x.abs().max()) for b, x in wanted.items())


def launches_of(point: Point) -> int:
    """Launches of a graph: enough that one of them takes about as long as in a longer graph."""
    return max(LEAST_LAUNCHES, min(LAUNCHES, GRAPH_BYTES // point.read))


def enter(contender: Contender, sets: Sequence[Inputs], wanted: dict[int, torch.Tensor], clock: Clock) -> Ready:
    """Prepare, check and capture a contender. Raises what it raises, or ValueError if it is wrong. wanted: see `right`, of the
    first set."""
    calls = [contender.prepare(inputs) for inputs in sets]
    error, bound = error_of(sets[0], calls[0], wanted), BOUNDS[sets[0].point.cache]
    if not error <= bound:
        raise ValueError(f"wrong: its largest error is {error:.1e} of the largest result, allowed {bound:.0e}")
    many = [calls[i % len(calls)] for i in range(launches_of(sets[0].point) if isinstance(clock, CudaClock) else len(calls))]
    if not isinstance(clock, CudaClock):
        return Ready(lambda: [call() for call in many], len(many), error, calls)
    for call in calls:
        call()
    run, results = clock.captured(many, 1)
    run()
    clock.synchronize()
    return Ready(run, len(many), error, [calls, results])


def measure(point: Point, contenders: Sequence[Contender], clock: Clock, device: torch.device, rounds: int) -> dict:
    """What every contender takes at a point. RuntimeError if one of them broke the GPU's context."""
    copies = min(LAUNCHES, -(-COLD_BYTES // point.read)) if device.type == "cuda" else 1
    sets = [Inputs(point, device, seed) for seed in range(copies)]
    wanted = right(sets[0])
    ready: dict[str, Ready] = {}
    results: dict[str, dict] = {}
    for contender in contenders:
        try:
            ready[contender.name] = enter(contender, sets, wanted, clock)
        except Exception as error:
            results[contender.name] = {"refused": compact(error)}
            try:
                clock.synchronize()
            except Exception as broken:
                raise RuntimeError(f"{contender.name} broke the GPU's context at {point}: {compact(error)}") from broken
    names = list(ready)
    for one in ready.values():
        clock.seconds(one.run, 1)
    for order in balanced_order(len(names), rounds):
        for name in (names[i] for i in order):
            ready[name].seconds.append(clock.seconds(ready[name].run, 1) / ready[name].launches)
    read = point.read
    for name, one in ready.items():
        rates, middle = [read / seconds / 1e9 for seconds in one.seconds], median(one.seconds)
        results[name] = {"us": 1e6 * middle, "gb_s": read / middle / 1e9, "rounds": rates, "error": one.error}
    return {**asdict(point), "bytes": read, "copies": copies, "results": results}


def host_us(contenders: Sequence[Contender], clock: Clock, device: torch.device) -> dict[str, float]:
    """Microseconds of the host's time that a call of a tiny step takes, by name."""
    found, inputs = {}, Inputs(Point(1, 64, 8, 1), device, 0)
    for contender in contenders:
        times = []
        try:
            call = contender.prepare(inputs)
            for _ in range(30):
                clock.synchronize()
                begin = time.perf_counter()
                for _ in range(10):
                    call()
                times.append((time.perf_counter() - begin) * 1e5)
        except Exception:  # it does not take the step; the points say why
            continue
        found[contender.name] = median(times)
    return found


def read_rate(clock: Clock, device: torch.device) -> float | None:
    """GB/s at which a sum over 2 GiB reads them; None on a CPU."""
    if device.type != "cuda":
        return None
    x = torch.zeros(2**29, device=device)
    clock.seconds(x.sum, 3)
    return x.nbytes / clock.seconds(x.sum, 10) / 1e9


# ---- kernels are compiled ahead, in many processes


def compile_ahead(points: Sequence[Point], arch: Arch, deterministic: bool, part: tuple[int, int] = (1, 1)) -> None:
    """Compile Strobe's kernels of all points, each in a process of its own; they stay in Triton's cache on disk. deterministic:
    those of `deterministic=True`, too. part: of `Plan`; parts that are measured side by side need much the same kernels, so
    each begins elsewhere, and finds in the cache what others have compiled. BrokenProcessPool if the processes cannot start, as
    those of a program that runs itself when it is imported."""
    hows = (False, True) if deterministic else (False,)
    kernels = list({(point.kind, config_of(point, arch, how)): (point, arch, how) for point in points for how in hows}.values())
    first = (part[0] - 1) * len(kernels) // part[1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), context) as pool:
        jobs = [pool.submit(compile_one, *kernel) for kernel in kernels[first:] + kernels[:first]]
        for job in jobs:
            # What does not compile raises again where that is reported.
            if isinstance(error := job.exception(), BrokenProcessPool):
                raise error


def config_of(point: Point, arch: Arch, deterministic: bool) -> Config:
    """The config of a point's kernel."""
    return choose(described(point, deterministic)[0], arch)


def compile_one(point: Point, arch: Arch, deterministic: bool) -> None:
    """Compile the kernel of a point for a GPU that need not be there."""
    from strobe.lab.binary import offline

    offline.decode(*described(point, deterministic), arch)


# ---- a run


def bench(plan: Plan, device: torch.device, command: str, path: Path | None = None, picture: Path | None = None) -> int:
    """Measure a plan, print a table, write JSON (as it goes) and a picture. Returns the exit status: 0, or 1 if Strobe failed
    somewhere.

    path: of the JSON; None: benchmarks/results/decode-<device>-<date>.json here. picture: PNG or SVG by its suffix; None: a PNG
    beside the JSON."""
    begin, console = time.monotonic(), Console(stderr=True)
    known = peers_for(device)
    asked = known if plan.peers is None else {name: known[name] for name in plan.peers}
    ours = OURS if plan.deterministic else OURS[:1]
    contenders = [*ours, *(peer for peer in asked.values() if peer.installed)]
    points = plan.points()
    clock: Clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    report: dict = {"schema": SCHEMA, "what": "decode", **provenance(device, command)}
    report |= {
        "contenders": [one.name for one in contenders],
        "not installed": [name for name, peer in asked.items() if not peer.installed],
        "not asked": [name for name in known if name not in asked],
        "random": plan.random, "part": list(plan.part), "rounds": plan.rounds, "launches": LAUNCHES, "points": [],
        "stopped": None,
    }  # fmt: skip
    target = path or default_path(report)
    target.parent.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        console.print(f"{len(points)} points; compiling", markup=False, highlight=False)
        compile_ahead(points, arch_of(device), plan.deterministic, plan.part)
    with torch.no_grad(), clock.running():
        report |= {"read_gb_s": read_rate(clock, device), "before": snapshot(device)}
        report["host_us"] = host_us(contenders, clock, device) if device.type == "cuda" else {}
        for number, point in enumerate(points):
            if time.monotonic() - begin > plan.max_seconds:
                report["stopped"] = f"out of time after {number} of {len(points)} points"
                break
            try:
                report["points"].append(measure(point, contenders, clock, device, plan.rounds))
            except RuntimeError as error:
                report["stopped"] = str(error)
                break
            target.write_text(json.dumps(report, indent=1) + "\n")
            console.print(line_of(report["points"][-1]), markup=False, highlight=False)
        else:
            report["after"] = snapshot(device)
    target.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    console.print(f"written: {target}", markup=False)
    if report["points"]:
        console.print(f"written: {draw(report, picture or target.with_suffix('.png'))}", markup=False)
    failed = any("refused" in facts["results"]["strobe"] for facts in report["points"])
    return 1 if failed or (report["stopped"] and "broke" in report["stopped"]) else 0


# ---- what is shown


def load(path: Path) -> dict:
    """Read a report of `strobe bench decode`. ValueError if the file is anything else."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a result of strobe bench decode must be a JSON file, got {path}: {error}") from None
    if not isinstance(report, dict) or (report.get("what"), report.get("schema")) != ("decode", SCHEMA):
        raise ValueError(f"a result of strobe bench decode must say that it is one, of schema {SCHEMA}, got {path}")
    return report


def timed(report: dict) -> list[str]:
    """The contenders that have a number at some point."""
    names = {name for facts in report["points"] for name, result in facts["results"].items() if "us" in result}
    return [name for name in report["contenders"] if name in names]


def line_of(facts: dict) -> str:
    """A point in a line."""
    results = facts["results"]
    parts = [f"{name} {result['us']:.1f}" for name, result in results.items() if "us" in result]
    return f"{Point.of(facts)}: {', '.join(parts)} us"


def show(report: dict) -> None:
    """Print the table of a report, then everything that did not run, with the reason."""
    console, names = Console(), timed(report)
    table = Table(title=f"decode, {report['device']['name']}, us (GB/s of keys and values), median of the rounds")
    table.add_column("point")
    for name in (*names, "strobe / best peer", ""):
        table.add_column(name, justify="right")
    for facts in report["points"]:
        results = facts["results"]
        cells = [f"{r['us']:.1f} ({r['gb_s']:.0f})" if "us" in (r := results.get(name, {})) else "-" for name in names]
        compared = closest(results)
        words = ("-", "") if compared is None else (str(compared[1]), compared[1].verdict)
        table.add_row(str(Point.of(facts)), *cells, *words, style={"behind": "red"}.get(words[1]))
    console.print(table)
    if counted := verdicts(report["points"]):
        console.print(f"strobe over the best peer (95%): {counted}", markup=False, highlight=False)
    if report["read_gb_s"]:
        console.print(f"a sum over 2 GiB reads {report['read_gb_s']:.0f} GB/s", markup=False, highlight=False)
    if host := ", ".join(f"{name} {us:.0f}" for name, us in report["host_us"].items()):
        console.print(f"CPU time of a call, us: {host}", markup=False, highlight=False)
    if report["not installed"]:
        console.print(f"not installed: {', '.join(report['not installed'])}", markup=False, highlight=False)
    for name in report["contenders"]:
        refused = {facts["results"].get(name, {}).get("refused") for facts in report["points"]} - {None}
        for reason in sorted(refused):
            console.print(f"{name}: {reason}", markup=False, highlight=False)
    if report["stopped"]:
        console.print(f"incomplete: {report['stopped']}", markup=False, style="bold red")


def draw(report: dict, path: Path) -> Path:
    """Draw a report; of steps at random Strobe's speed over the best peer's, against the bytes of keys and values, else rates.
    Returns the path."""
    if not report.get("random"):
        return draw_rates(report, path)
    found = [(facts["bytes"], found[1].value) for facts in report["points"] if (found := closest(facts["results"]))]
    return draw_speeds(found, report, path, "bytes of keys and values", "steps")


def draw_rates(report: dict, path: Path) -> Path:
    """Draw GB/s of keys and values against their number, a panel for each batch (columns) and shape (rows), with the rates of a
    sum over memory and of the data sheet as ceilings."""
    entries, roofs = report["points"], ceilings(report)
    columns = sorted({facts["batch"] for facts in entries})
    rows = list(dict.fromkeys(Point.of(facts).heading for facts in entries))
    size = (1.0 + 3.2 * len(columns), 1.3 + 2.6 * len(rows))
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for row, heading in enumerate(rows):
        for column, batch in enumerate(columns):
            panel = axes[row][column]
            mine = [facts for facts in entries if facts["batch"] == batch and Point.of(facts).heading == heading]
            panel.set_title(f"batch {batch}, {heading}", fontsize=8)
            _panel(panel, sorted(mine, key=lambda facts: facts["length"]), timed(report), roofs)
        axes[row][0].set_ylabel("GB/s")
    for panel in axes[-1]:
        panel.set_xlabel("keys of a request")
    rates = [result["gb_s"] for facts in entries for result in facts["results"].values() if "us" in result]
    axes[0][0].set_ylim(0, 1.05 * max([*rates, *roofs.values()], default=1.0))
    roof = "; dashed: " + ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in roofs.items()) if roofs else ""
    figure.suptitle(f"decode, {report['device']['name']}, {report['date'][:10]}{roof}", fontsize=10)
    lines = axes[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=max(1, len(lines[0])), fontsize=8, frameon=False)
    return save_picture(figure, path, dpi=130)


def _panel(panel: Axes, entries: list[dict], names: list[str], roofs: dict[str, float]) -> None:
    """Draw a panel: entries of one shape and batch, in the order of length."""
    colors = dict(zip((name for name in names if name != "strobe"), cycle(PEERS), strict=False))
    for name in names:
        found = [
            (facts["length"], facts["results"][name]["gb_s"]) for facts in entries if "us" in facts["results"].get(name, {})
        ]
        panel.plot(
            [x for x, _ in found], [y for _, y in found], label=name, color=colors.get(name, STROBE), marker="o", markersize=3,
            linewidth=1.2 if name in colors else 3.0, zorder=2 if name in colors else 3,
        )  # fmt: skip
    for rate in roofs.values():
        panel.axhline(rate, color=CEILING, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    over_lengths(panel, [facts["length"] for facts in entries])


def ceilings(report: dict) -> dict[str, float]:
    """GB/s that memory gives, by name: what a sum reads, and the data sheet's rate where it is known."""
    found = {"a sum": report["read_gb_s"]} if report["read_gb_s"] else {}
    arch = arch_named(report)
    return found | ({"data sheet": arch.dram_bandwidth / 1e9} if arch and arch.dram_bandwidth else {})
