"""`strobe bench check`: the points of a report at which Strobe is not as far ahead of the best peer as it should be.

A ratio is quoted with its 95 % interval (`strobe.lab.bench.intervals`). Its value decides whether it falls short; where the
interval holds the floor too, the line says so, because another run might not fall short.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from strobe.lab.bench.intervals import Ratio
from strobe.lab.bench.plan import Point
from strobe.lab.bench.report import best_peer, busy, closest, load, verdicts

FP8_OVER_BF16 = 1.5
"""The floor of fp8 where no peer runs it: how many times as fast as our own bf16 it must be."""


def floor(point: Point) -> float:
    """The least ratio to the best peer that a point should have, for the Hopper kernels."""
    if point.backward:
        return 1.05 if point.length >= 4096 else 1.0
    if point.dtype == "fp8":
        return 1.0
    if point.head_dim == point.head_dim_v and point.head_dim in (64, 128):
        return 1.10 if point.length >= 4096 else 1.05
    return 1.03


def shortfalls(report: dict, at_least: float | None = None) -> list[str]:
    """A line for each point whose ratio is too small: under `at_least` or, where that is None, under the point's own floor."""
    ours = {Point.of(facts): facts["results"].get("strobe", {}).get("tflops") for facts in report["points"]}
    lines = []
    for facts in report["points"]:
        point, results = Point.of(facts), facts["results"]
        bf16 = ours.get(replace(point, dtype="bf16")) if point.dtype == "fp8" and best_peer(results) is None else None
        mine, found, least = ours[point], closest(results), at_least or floor(point)
        if mine is None:
            lines.append(f"{point}: no number, {results.get('strobe', {}).get('refused', 'not measured')}")
        elif found is not None and not found[1].value >= least:
            theirs = results[found[0]]["tflops"]
            lines.append(
                f"{point}: {_under(*found, least)} ({mine:.0f} and {theirs:.0f} TFLOP/s)" + _cycles(report, facts, found[0])
            )
        elif bf16 is not None and not mine / bf16 >= FP8_OVER_BF16:
            over = _under("strobe in bf16", Ratio(mine / bf16, None), FP8_OVER_BF16)
            lines.append(f"{point}: {over} ({mine:.0f} and {bf16:.0f} TFLOP/s)")
    return lines


def _under(name: str, ratio: Ratio, least: float) -> str:
    """How far a ratio falls short, in words: "1.080 ±0.010 of FA4 (ahead), under 1.10"."""
    if ratio.half is None:
        return f"{ratio.value:.3f} of {name}, under {least:.2f}"
    reaches = ", which its interval reaches" if ratio.high >= least else ""
    spread = ratio.value * math.expm1(ratio.half)
    return f"{ratio.value:.3f} ±{spread:.3f} of {name} ({ratio.verdict}), under {least:.2f}{reaches}"


def _cycles(report: dict, facts: dict, best: str) -> str:
    """Words that tell how much of a difference comes from the clock: how busy the tensor cores were, and at which clock, for
    Strobe and the best peer; "" where that is not known."""
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
    if counted := verdicts(report["points"]):
        print(f"over the best peer: {counted}")
    count = len(report["points"])
    print(f"{count} points, " + (f"{len(lines)} shortfalls" if lines else "none falls short"))
    return 1 if lines else 0
