"""What a benchmark's report says: the table on the terminal, and the pieces that the README takes from it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from strobe.device import CPU, KNOWN, Arch
from strobe.lab.plan import Point

SCHEMA = 2

PARTS = {"what", "date", "command", "device", "protocol", "contenders", "ceiling", "points", "stopped"}
POINT = {field.name for field in fields(Point)} | {"results"}
"""What a report has, and each of its points."""


def load(path: Path) -> dict:
    """A report of `strobe bench`. ValueError for anything else."""
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
    """benchmarks/results/forward-h200-2026-11-21.json in the current folder."""
    name = report["device"]["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    return Path("benchmarks/results") / f"{report['what']}-{name}-{report['date'][:10]}.json"


def best_peer(results: dict[str, dict]) -> tuple[str, float] | None:
    """Name and TFLOP/s of the fastest contender that is not Strobe."""
    rates = [(r["tflops"], name) for name, r in results.items() if not name.startswith("strobe") and "tflops" in r]
    if not rates:
        return None
    rate, name = max(rates)
    return name, rate


def ratio(results: dict[str, dict]) -> float | None:
    """Strobe's speed over that of the best peer at one point."""
    ours, best = results.get("strobe", {}).get("tflops"), best_peer(results)
    return ours / best[1] if ours and best else None


FLOPS_PER_CLOCK = {"bf16": 4096, "fp16": 4096, "fp8": 8192}
"""Of the tensor cores of a Hopper multiprocessor."""


def arch_of(report: dict) -> Arch | None:
    """The device of a report, by its name; None if its facts are not known."""
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
    """The contenders with a number somewhere."""
    names = {name for point in report["points"] for name, result in point["results"].items() if "tflops" in result}
    return [name for name in report["contenders"] if name in names]


def show(report: dict) -> None:
    """The table of a report, then everything that did not run, with its reason."""
    device, ceiling = report["device"], report["ceiling"]
    console = Console()
    table = Table(title=f"{report['what']}, {device['name']}, TFLOP/s, median of {report['protocol']['rounds']} rounds")
    names = timed(report)
    table.add_column("point")
    for name in (*names, "strobe / best peer"):
        table.add_column(name, justify="right")
    for facts in report["points"]:
        results = facts["results"]
        cells = [number(results.get(name, {}).get("tflops")) for name in names]
        table.add_row(str(Point.of(facts)), *cells, number(ratio(results), ".2f"))
    console.print(table)
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
    """Of a backward, beside inputs and gradients, the least and the most of all points: "strobe 4 to 516, FA4 260"."""
    parts = []
    for name in timed(report):
        results = [facts["results"].get(name, {}) for facts in report["points"]]
        found = [round(result["extra_bytes_per_row"]) for result in results if "extra_bytes_per_row" in result]
        if found:
            least, most = min(found), max(found)
            parts.append(f"{name} {least}" + (f" to {most}" if most > least else ""))
    return ", ".join(parts)


def call_spreads(report: dict) -> str:
    """Where calls were timed one by one, how far they spread at the worst point: "strobe 98% to 104% of the median"."""
    parts = []
    for name in timed(report):
        found = [facts["results"].get(name, {}).get("calls_us") for facts in report["points"]]
        shares = [(us["p10"] / us["median"], us["p90"] / us["median"]) for us in found if us]
        if shares:
            low, high = max(shares, key=lambda share: share[1] - share[0])
            parts.append(f"{name} {low:.0%} to {high:.0%}")
    return f"{', '.join(parts)} of the median" if parts else ""


def refusals(report: dict) -> list[str]:
    """One line for each contender and reason, with the points that it holds for (if not all of them)."""
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
