"""Reads a benchmark's report: makes the table on the terminal, and the facts that the README takes from it."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from strobe.device import CPU, KNOWN, Arch
from strobe.lab.bench.intervals import VERDICTS, Ratio
from strobe.lab.bench.plan import Point
from strobe.lab.pages.sources import changed

SCHEMA = 2

PARTS = {"what", "date", "command", "device", "protocol", "contenders", "ceiling", "points", "stopped"}
POINT = {field.name for field in fields(Point) if field.default is MISSING} | {"results"}
"""The keys that a report has (`PARTS`) and that each of its points has (`POINT`)."""


def load(path: Path) -> dict:
    """Reads a report of `strobe bench`. ValueError if the file is anything else."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a result of strobe bench must be a JSON file, got {path}: {error}") from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or "points" not in report:
        raise ValueError(f"a result of strobe bench must hold schema {SCHEMA} and points, got {path} without them")
    if not report.keys() >= PARTS or not all(set(facts) >= POINT for facts in report["points"]):
        raise ValueError(f"a result of strobe bench must be whole, got {path}, in which something is missing")
    return report


def default_path(report: dict) -> Path:
    """Where a report goes unless told otherwise, such as benchmarks/results/forward-h200-2026-11-21.json in the current
    folder."""
    name = report["device"]["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    return Path("benchmarks/results") / f"{report['what']}-{name}-{report['date'][:10]}.json"


def by_shape(points: list[dict]) -> list[dict]:
    """The points of a report sorted: those of one shape and mask stand together, in the order of length."""
    families = {family: number for number, family in enumerate(dict.fromkeys(Point.of(facts).family for facts in points))}
    return sorted(points, key=lambda facts: (families[Point.of(facts).family], facts["length"]))


def best_peer(results: dict[str, dict]) -> tuple[str, float] | None:
    """Name and TFLOP/s of the fastest contender at one point that is not Strobe; None if there is none."""
    rates = [(r["tflops"], name) for name, r in results.items() if not name.startswith("strobe") and "tflops" in r]
    if not rates:
        return None
    rate, name = max(rates)
    return name, rate


def ratios(results: dict[str, dict]) -> dict[str, Ratio]:
    """Name of a peer -> Strobe's speed over its speed at one point."""
    ours = _rounds(results.get("strobe", {}))
    peers = {name: _rounds(result) for name, result in results.items() if not name.startswith("strobe")}
    return {name: Ratio.of(ours, theirs) for name, theirs in peers.items() if ours and theirs}


def _rounds(result: dict) -> list[float]:
    return result.get("rounds") or ([result["tflops"]] if "tflops" in result else [])


def closest(results: dict[str, dict]) -> tuple[str, Ratio] | None:
    """The peer that does best against Strobe at one point, and Strobe's speed over its; None if there is none."""
    return min(ratios(results).items(), key=lambda found: found[1].value, default=None)


def verdicts(points: list[dict]) -> str:
    """How often Strobe is ahead of the best peer of a point: "ahead at 10 points, level at 2, behind at 1, of 13"; "" if no
    point has a peer."""
    found = [compared[1].verdict for facts in points if (compared := closest(facts["results"]))]
    counts = [f"{verdict} at {found.count(verdict)}" for verdict in VERDICTS if verdict in found or verdict != "unknown"]
    if not found:
        return ""
    return f"{counts[0]} points, {', '.join(counts[1:])}, of {len(found)}"


def missing(report: dict) -> list[str]:
    """The contenders without any number, and why: "xFormers (not installed)", "FA3 (takes no backward)"."""
    absent = [f"{name} (not installed)" for name in report["not installed"]]
    with_numbers = {"strobe", *timed(report)}
    for name in (name for name in report["contenders"] if name not in (*with_numbers, *report["not installed"])):
        reasons = [facts["results"].get(name, {}).get("refused") for facts in report["points"]]
        absent.append(f"{name} ({next(filter(None, reasons), 'not measured')})")
    return absent + [f"{name} (not asked)" for name in report.get("not asked", [])]


def outdated(report: dict) -> list[str]:
    """The kernels whose source changed since a Hopper report measured them; [] if the report has no hashes to compare."""
    if not is_hopper(report) or "kernels" not in report:
        return []
    return [f"the kernel `{kernel}`" for kernel in kernels_of(report) if changed(report["kernels"], kernel)]


def kernels_of(report: dict) -> list[str]:
    """The kernels that a Hopper report is about, as `strobe.lab.pages.sources` names them."""
    backwards = {facts["backward"] for facts in report["points"]}
    fp8 = {facts["dtype"] == "fp8" for facts in report["points"] if not facts["backward"]}
    kernels = [kernel for kernel, of_fp8 in (("sm90 forward", False), ("sm90 fp8", True)) if of_fp8 in fp8]
    return kernels + ["sm90 backward"] * (True in backwards)


FLOPS_PER_CLOCK = {"bf16": 4096, "fp16": 4096, "fp8": 8192}
"""FLOPs that the tensor cores of one Hopper multiprocessor do in a cycle, by dtype."""


def arch_of(report: dict) -> Arch | None:
    """The Arch of a report's device, found by its name; None if the device is not known."""
    name = report["device"]["name"]
    if name == "CPU":
        return CPU
    return next((KNOWN[known] for known in sorted(KNOWN, key=len, reverse=True) if known in name), None)


def is_hopper(report: dict) -> bool:
    arch = arch_of(report)
    return arch is not None and arch.capability == 90


def busy(report: dict, facts: dict, name: str) -> float | None:
    """The share of its cycles at one point in which a contender's tensor cores did work that counts."""
    result, rate = facts["results"].get(name, {}), FLOPS_PER_CLOCK.get(facts["dtype"])
    if "tflops" not in result or "sm_clock_mhz" not in result or rate is None or not is_hopper(report):
        return None
    return result["tflops"] * 1e6 / (rate * report["device"]["sms"] * result["sm_clock_mhz"])


def number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def timed(report: dict) -> list[str]:
    """The contenders that have a number at some point."""
    names = {name for point in report["points"] for name, result in point["results"].items() if "tflops" in result}
    return [name for name in report["contenders"] if name in names]


def show(report: dict) -> None:
    """Prints the table of a report, then everything that did not run, with the reason."""
    device, ceiling = report["device"], report["ceiling"]
    console = Console()
    table = Table(title=f"{report['what']}, {device['name']}, TFLOP/s, median of the rounds")
    names = timed(report)
    zoo = any(facts.get("model") for facts in report["points"])
    for title in ("point", *["shape"] * zoo):
        table.add_column(title)
    for name in (*names, "strobe / best peer", ""):
        table.add_column(name, justify="right")
    for facts in report["points"]:
        results = facts["results"]
        cells = [number(results.get(name, {}).get("tflops")) for name in names]
        compared = closest(results)
        words = ("-", "") if compared is None else (str(compared[1]), compared[1].verdict)
        shape = [Point.of(facts).shape] * zoo
        table.add_row(str(Point.of(facts)), *shape, *cells, *words, style={"behind": "red"}.get(words[1]))
    console.print(table)
    if counted := verdicts(report["points"]):
        console.print(f"strobe over the best peer (95%): {counted}", markup=False, highlight=False)
    rates = ", ".join(f"{ceiling[when]:.4g} {when}" for when in ("before", "after") if when in ceiling)
    console.print(f"matrix product {ceiling.get('matmul', '')}: {rates} TFLOP/s", markup=False, highlight=False)
    if calls := call_spreads(report):
        console.print(f"calls at the worst point, tenth to ninetieth percentile: {calls}", markup=False, highlight=False)
    host = [f"{name} {result['us']:.0f}" for name, result in report["host_us"].items() if "us" in result]
    if host:
        console.print(f"CPU time of a call, us: {', '.join(host)}", markup=False, highlight=False)
    if extra := extra_memory(report):
        console.print(f"peak extra memory, bytes for each query of each head: {extra}", markup=False, highlight=False)
    if report["not installed"]:
        console.print(f"not installed: {', '.join(report['not installed'])}", markup=False, highlight=False)
    for line in refusals(report):
        console.print(line, markup=False, highlight=False)
    if report["stopped"]:
        console.print(f"incomplete: {report['stopped']}", markup=False, style="bold red")


def extra_memory(report: dict) -> str:
    """Bytes a row that a backward takes beside inputs and gradients, the least and the most of all points, for each contender:
    "strobe 4 to 516, FA4 260"."""
    parts = []
    for name in timed(report):
        results = [facts["results"].get(name, {}) for facts in report["points"]]
        found = [round(result["extra_bytes_per_row"]) for result in results if "extra_bytes_per_row" in result]
        if found:
            least, most = min(found), max(found)
            parts.append(f"{name} {least}" + (f" to {most}" if most > least else ""))
    return ", ".join(parts)


def call_spreads(report: dict) -> str:
    """How far the calls of each contender spread at its worst point: "strobe 98% to 104% of the median"; "" unless calls were
    timed one by one."""
    parts = []
    for name in timed(report):
        found = [facts["results"].get(name, {}).get("calls_us") for facts in report["points"]]
        shares = [(us["p10"] / us["median"], us["p90"] / us["median"]) for us in found if us]
        if shares:
            low, high = max(shares, key=lambda share: share[1] - share[0])
            parts.append(f"{name} {low:.0%} to {high:.0%}")
    return f"{', '.join(parts)} of the median" if parts else ""


def refusals(report: dict) -> list[str]:
    """Why contenders did not run: a line for each contender and reason, with the points where it holds (if not at all of
    them)."""
    where: dict[tuple[str, str], list[str]] = {}
    for facts in report["points"]:
        for name, result in facts["results"].items():
            for kind in ("refused", "note"):
                if kind in result:
                    where.setdefault((name, result[kind]), []).append(str(Point.of(facts)))
    return [f"{name}: {reason}" + _of(shapes, len(report["points"])) for (name, reason), shapes in where.items()]


def _of(shapes: list[str], everywhere: int) -> str:
    if len(shapes) == everywhere:
        return ""
    more = f"; and {len(shapes) - 4} more" if len(shapes) > 5 else ""
    return f" [{'; '.join(shapes[: 4 if more else 5])}{more}]"
