"""`strobe bench check`: the points of a report at which Strobe is not as far ahead of the best peer as it should be."""

from __future__ import annotations

from pathlib import Path

from strobe.lab.plan import Point
from strobe.lab.report import best_peer, busy, load

FP8_OVER_BF16 = 1.5
"""The floor of fp8 where no peer runs it: so many times as fast as our own bf16."""


def floor(point: Point) -> float:
    """The ratio to the best peer that the Hopper kernels are built for."""
    if point.backward:
        return 1.05 if point.length >= 4096 else 1.0
    if point.dtype == "fp8":
        return 1.0
    if point.head_dim == point.head_dim_v and point.head_dim in (64, 128):
        return 1.10 if point.length >= 4096 else 1.05
    return 1.03


def shortfalls(report: dict, at_least: float | None = None) -> list[str]:
    """A line for each point whose ratio is under `at_least`, or under its own floor (None)."""
    ours = {Point.of(facts): facts["results"].get("strobe", {}).get("tflops") for facts in report["points"]}
    lines = []
    for facts in report["points"]:
        point, results = Point.of(facts), facts["results"]
        mine, best, least = ours[point], best_peer(results), at_least or floor(point)
        if point.dtype == "fp8" and best is None:
            bf16 = ours.get(Point.of(facts | {"dtype": "bf16"}))
            best, least = ("strobe in bf16", bf16) if bf16 else None, FP8_OVER_BF16
        if mine is None:
            lines.append(f"{point}: no number, {results.get('strobe', {}).get('refused', 'not measured')}")
        elif best is not None and not mine / best[1] >= least:
            lines.append(
                f"{point}: {mine / best[1]:.3f} of {best[0]}, under {least:.2f} ({mine:.0f} and {best[1]:.0f} TFLOP/s)"
                + _cycles(report, facts, best[0])
            )
    return lines


def _cycles(report: dict, facts: dict, best: str) -> str:
    """How much of the difference is the clock's: what the tensor cores did in a cycle, and how fast the power let them."""
    shares = [(busy(report, facts, name), facts["results"].get(name, {}).get("sm_clock_mhz")) for name in ("strobe", best)]
    if any(share is None for share, _ in shares):
        return ""
    return "; tensor cores busy " + " and ".join(f"{share:.0%} at {mhz} MHz" for share, mhz in shares)


def check(path: Path, at_least: float | None = None) -> int:
    """Prints the shortfalls of a report. Exit status: 0, or 1 if there are any or the report is incomplete."""
    report = load(path)
    lines = shortfalls(report, at_least)
    if report["stopped"]:
        lines.append(f"the report is incomplete: {report['stopped']}")
    for line in lines:
        print(line)
    count = len(report["points"])
    print(f"{count} points, " + (f"{len(lines)} shortfalls" if lines else "none falls short"))
    return 1 if lines else 0
