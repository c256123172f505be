"""`strobe bench compare`: is Strobe faster than it was? Two reports, point by point, with the noise taken into account.

The noise of a ratio comes from the rounds, which every report holds. The logarithms of a contender's rounds have a standard
deviation in each report; of two medians the ratio is uncertain by

    T99 * 1.25 * sqrt(s_old^2 / n_old + s_new^2 / n_new)

with Student's t of n_old + n_new - 2 degrees of freedom (two-sided, 99%: of a hundred points that did not change, one may
still be called faster or slower), and 1.25 because a median of normal numbers scatters so much more than a mean. A contender
with a single round at a point (it was far behind there) is given the median deviation of its other points in that report, and
the result is marked "assumed".

The rounds of one run do not show what changes between runs, such as another card or a warmer room. The peers show it: their
code did not change, so their ratio should be 1, and the last lines say how far from it they are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median, stdev

from rich.console import Console
from rich.table import Table

from strobe.lab.bench.plan import Point
from strobe.lab.bench.report import load, timed, verdicts

MEDIAN = math.sqrt(math.pi / 2)
T99 = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95)
"""Student's t, two-sided 99 %, for 1, 2, ... degrees of freedom. For more of them the last one is used, which is a little too
careful."""


@dataclass(frozen=True)
class Change:
    """A contender at a point in two reports: its TFLOP/s in each, and the noise of their ratio, relative; None if a report
    nowhere has two rounds of it. assumed: whether some of the noise is taken from other points."""

    contender: str
    point: Point
    old: float
    new: float
    noise: float | None
    assumed: bool = False
    clocks: float | None = None
    """The ratio of the SMs' clocks, new over old."""

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def verdict(self) -> str:
        if self.noise is None:
            return "noise unknown"
        if abs(math.log(self.ratio)) <= self.noise:
            return "within noise"
        return "faster" if self.ratio > 1 else "slower"


def changes(old: dict, new: dict) -> list[Change]:
    """One Change for every contender at every point for which both reports have a number; those of Strobe come first.

    ValueError if the reports are of different devices, phases or protocols, or have nothing in common."""
    _same("GPU", old["device"]["name"], new["device"]["name"])
    _same("phase", old["what"], new["what"])
    _same("protocol", *(report["protocol"].get("name", "sustained") for report in (old, new)))
    before = {Point.of(facts): facts["results"] for facts in old["points"]}
    names = sorted(set(timed(old)) & set(timed(new)), key=lambda name: (name != "strobe", name))
    found = []
    for name in names:
        usual = _usual(old, name), _usual(new, name)
        for facts in new["points"]:
            results = before.get(Point.of(facts), {}).get(name, {}), facts["results"].get(name, {})
            if all("tflops" in result for result in results):
                found.append(_change(name, Point.of(facts), results, usual))
    if not found:
        raise ValueError("compare needs reports with a point and a contender in common, got two without")
    return found


def _same(what: str, old: str, new: str) -> None:
    if old != new:
        raise ValueError(f"compare needs two reports of the same {what}, got {old} and {new}")


def _change(name: str, point: Point, results: tuple[dict, dict], usual: tuple[float | None, float | None]) -> Change:
    spreads = [_spread(result["rounds"]) for result in results]
    assumed = None in spreads
    filled = [other if spread is None else spread for spread, other in zip(spreads, usual, strict=True)]
    before, after = (result.get("sm_clock_mhz") for result in results)
    return Change(
        name,
        point,
        results[0]["tflops"],
        results[1]["tflops"],
        _noise(filled, [len(result["rounds"]) for result in results]),
        assumed,
        after / before if before and after else None,
    )


def _noise(spreads: list[float | None], rounds: list[int]) -> float | None:
    """How far the logarithm of a ratio may be off by noise alone; None if one of the spreads is unknown."""
    known = [spread for spread in spreads if spread is not None]
    if len(known) < 2:
        return None
    degrees = max(1, sum(rounds) - 2)
    variance = sum(spread**2 / n for spread, n in zip(known, rounds, strict=True))
    return T99[min(degrees, len(T99)) - 1] * MEDIAN * math.sqrt(variance)


def _spread(rounds: list[float]) -> float | None:
    """The standard deviation of the rounds' logarithms; None for a single round."""
    return stdev(math.log(rate) for rate in rounds) if len(rounds) > 1 else None


def _usual(report: dict, name: str) -> float | None:
    """The median of a contender's spreads at the points of a report; None if it has two rounds nowhere."""
    rounds = (facts["results"].get(name, {}).get("rounds", []) for facts in report["points"])
    spreads = [spread for spread in map(_spread, rounds) if spread is not None]
    return median(spreads) if spreads else None


# ---- what a user sees


def compare(
    old: Path, new: Path, fail_slower: float | None = None, path: Path | None = None, picture: Path | None = None
) -> int:
    """Prints the comparison, draws it to `picture`, and writes it to `path` as JSON. Exit status: 1 if a point of Strobe's is
    slower by more than its noise and under `fail_slower` times its old speed, else 0."""
    reports = load(old), load(new)
    found = changes(*reports)
    ours = [change for change in found if change.contender == "strobe"]
    show(reports, found, (old.name, new.name))
    if picture is not None:
        print(f"written: {draw(facts(reports, found), picture)}")
    if path is not None:
        path.write_text(json.dumps(facts(reports, found), indent=1) + "\n")
        print(f"written: {path}")
    failed = [c for c in ours if c.verdict == "slower" and fail_slower is not None and c.ratio < fail_slower]
    return 1 if failed else 0


def facts(reports: tuple[dict, dict], found: list[Change]) -> dict:
    """The comparison as a JSON object, which also says where each side comes from."""
    sides = [{"date": r["date"], "command": r["command"], "commit": r["device"].get("commit")} for r in reports]
    points = [
        {"contender": c.contender, **c.point.facts, "old": c.old, "new": c.new, "ratio": c.ratio, "noise": c.noise,
         "assumed": c.assumed, "clocks": c.clocks, "verdict": c.verdict}
        for c in found
    ]  # fmt: skip
    head = {"what": "comparison", "of": reports[1]["what"], "device": reports[1]["device"]}
    return head | {"old": sides[0], "new": sides[1], "points": points}


def show(reports: tuple[dict, dict], found: list[Change], names: tuple[str, str]) -> None:
    """Prints Strobe's changes point by point, then what the peers tell about the two runs."""
    console = Console()
    ours = [change for change in found if change.contender == "strobe"]
    table = Table(title=f"{reports[1]['what']}, {reports[1]['device']['name']}, TFLOP/s: {names[0]} and {names[1]}")
    table.add_column("point")
    for head in ("old", "new", "new / old", "noise", "clock"):
        table.add_column(head, justify="right")
    table.add_column("")
    for c in ours:
        noise = "?" if c.noise is None else f"{'~' if c.assumed else ''}{c.noise:.1%}"
        clock = "" if c.clocks is None else f"{c.clocks:.3f}"
        color = {"faster": "green", "slower": "red"}.get(c.verdict, "")
        table.add_row(str(c.point), f"{c.old:.4g}", f"{c.new:.4g}", f"{c.ratio:.3f}", noise, clock, c.verdict, style=color)
    console.print(table)
    for line in summary(reports, found):
        console.print(line, markup=False, highlight=False)


def draw(found: dict, path: Path) -> Path:
    """Draws `facts`: the speed of new over old against length, in a panel for each shape and mask. Strobe's ratios have bars of
    noise, and are filled where they exceed it; the peers', whose code did not change, are thin lines. PNG or SVG by the path's
    suffix."""
    from strobe.lab.bench.plot import CEILING, PEERS, STROBE, over_lengths, panels_of, save

    names = list(dict.fromkeys(facts["contender"] for facts in found["points"]))
    colors = dict(zip([name for name in names if name != "strobe"], cycle(PEERS), strict=False))
    figure, panels = panels_of(found["points"], lambda point: f"{point.dtype} {point.heading}", "new / old", sharey="all")
    for panel, entries in panels:
        panel.axhline(1, color=CEILING, linewidth=1)
        for name, color in colors.items():
            theirs = [(facts["length"], facts["ratio"]) for facts in entries if facts["contender"] == name]
            panel.plot(*zip(*theirs, strict=True), color=color, linewidth=1, marker="o", markersize=2, label=name)
        for facts in entries:
            if facts["contender"] == "strobe":
                ratio, noise = facts["ratio"], facts["noise"] or 0
                ends = [[ratio - ratio * math.exp(-noise)], [ratio * math.exp(noise) - ratio]]
                face = STROBE if facts["verdict"] in ("faster", "slower") else "white"
                panel.errorbar(
                    facts["length"], ratio, yerr=ends, color=STROBE, linewidth=1.5, marker="o", markersize=5,
                    markerfacecolor=face, zorder=3, label="strobe",
                )  # fmt: skip
        over_lengths(panel, sorted({facts["length"] for facts in entries}))
    labelled = {label: line for panel, _ in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.suptitle(f"{found['of']}, {found['device']['name']}: {found['old']['date'][:10]} to {found['new']['date'][:10]}; "
                    "filled: more than the noise of the rounds", fontsize=10)  # fmt: skip
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.legend(labelled.values(), labelled.keys(), loc="lower center", ncols=len(labelled), fontsize=8, frameon=False)
    return save(figure, path, dpi=110)


def summary(reports: tuple[dict, dict], found: list[Change]) -> list[str]:
    """Lines that tell how many points changed, how the peers and the matrix product changed, and which points have one side
    only."""
    ours = [change for change in found if change.contender == "strobe"]
    words = ("faster", "slower", "within noise", "noise unknown")
    counts = [f"{sum(c.verdict == word for c in ours)} {word}" for word in words if any(c.verdict == word for c in ours)]
    lines = [", ".join(counts) or "Strobe and the two reports have no point in common"]
    for name in dict.fromkeys(c.contender for c in found):
        lines.append(f"{name}: new / old {_overall([c for c in found if c.contender == name])}")
    ceilings = [report["ceiling"].get("before") for report in reports]
    if all(ceilings):
        lines.append(f"matrix product: new / old {ceilings[1] / ceilings[0]:.3f}")
    if changed := _changed_versions(*reports):
        lines.append(f"not the same: {', '.join(changed)}")
    if any(c.assumed and c.noise is not None for c in ours):
        lines.append("~: one round at that point, so the noise of the other points is assumed")
    sides = [{Point.of(facts) for facts in report["points"]} for report in reports]
    common = [[facts for facts in report["points"] if Point.of(facts) in sides[0] & sides[1]] for report in reports]
    for which, points in zip(("old", "new"), common, strict=True):
        if counted := verdicts(points):
            lines.append(f"{which}, over the best peer: {counted}")
    for which, only in (("old", sides[0] - sides[1]), ("new", sides[1] - sides[0])):
        if only:
            lines.append(f"in the {which} report only: {len(only)} points")
    return lines


def _overall(some: list[Change]) -> str:
    """The geometric mean of the ratios, with its noise where it is known: the points' own noises are independent."""
    logs = [math.log(c.ratio) for c in some]
    noises = [c.noise for c in some if c.noise is not None]
    noise = f", noise {math.hypot(*noises) / len(noises):.1%}" if len(noises) == len(some) else ""
    return f"{math.exp(sum(logs) / len(logs)):.3f}{noise}, over {len(some)} points"


def _changed_versions(old: dict, new: dict) -> list[str]:
    """Lines that tell which versions changed between the runs: packages, the driver, CUDA, cuDNN."""
    sides = [
        report["device"].get("packages", {}) | {name: report["device"].get(name) for name in ("driver", "cuda", "cudnn")}
        for report in (old, new)
    ]
    both = [name for name in sides[0] if sides[0][name] and sides[1].get(name)]
    return [f"{name} {sides[0][name]} and {sides[1][name]}" for name in both if sides[0][name] != sides[1][name]]
