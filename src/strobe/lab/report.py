"""What a benchmark's report says: the table on the terminal, and the pieces that the README takes from it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table


def default_path(report: dict) -> Path:
    """benchmarks/results/forward-h200-2026-11-21.json in the current folder."""
    name = report["device"]["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    return Path("benchmarks/results") / f"{report['what']}-{name}-{report['date'][:10]}.json"


def best_peer(results: dict[str, dict]) -> float | None:
    """TFLOP/s of the fastest contender that is not Strobe."""
    rates = [r["tflops"] for name, r in results.items() if not name.startswith("strobe") and "tflops" in r]
    return max(rates, default=None)


def ratio(results: dict[str, dict]) -> float | None:
    """Strobe's speed over that of the best peer at one point."""
    ours, best = results.get("strobe", {}).get("tflops"), best_peer(results)
    return ours / best if ours and best else None


def number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def show(report: dict) -> None:
    """The table of a report, then everything that did not run, with its reason."""
    device, ceiling = report["device"], report["ceiling"]
    console = Console()
    table = Table(title=f"{report['what']}, {device['name']}, TFLOP/s, median of {report['protocol']['rounds']} rounds")
    for heading in ("dtype", "D", "mask", "S"):
        table.add_column(heading)
    for name in (*report["contenders"], "strobe / best peer"):
        table.add_column(name, justify="right")
    for point in report["points"]:
        mask, results = "causal" if point["causal"] else "full", point["results"]
        cells = [number(results.get(name, {}).get("tflops")) for name in report["contenders"]]
        cells.append(number(ratio(results), ".2f"))
        table.add_row(point["dtype"], str(point["head_dim"]), mask, str(point["length"]), *cells)
    console.print(table)
    rates = ", ".join(f"{ceiling[when]:.4g} {when}" for when in ("before", "after") if when in ceiling)
    console.print(f"matrix product {ceiling.get('matmul', '')}: {rates} TFLOP/s", markup=False, highlight=False)
    host = [f"{name} {result['us']:.0f}" for name, result in report["host_us"].items() if "us" in result]
    if host:
        console.print(f"CPU time of a call, us: {', '.join(host)}", markup=False, highlight=False)
    for line in refusals(report):
        console.print(line, markup=False, highlight=False)
    if report["stopped"]:
        console.print(f"incomplete: {report['stopped']}", markup=False, style="bold red")


def refusals(report: dict) -> list[str]:
    """One line for each contender and reason, with the points that it holds for (if not all of them)."""
    where: dict[tuple[str, str], list[str]] = {}
    for point in report["points"]:
        shape = f"{point['dtype']} D={point['head_dim']} {'causal' if point['causal'] else 'full'} S={point['length']}"
        for name, result in point["results"].items():
            for kind in ("refused", "note"):
                if kind in result:
                    where.setdefault((name, result[kind]), []).append(shape)
    everywhere = len(report["points"])
    return [
        f"{name}: {reason}" + ("" if len(shapes) == everywhere else f" [{'; '.join(shapes)}]")
        for (name, reason), shapes in where.items()
    ]
