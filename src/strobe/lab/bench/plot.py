"""Draws a benchmark: TFLOP/s against length, a panel for each shape and mask, a line for each contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from strobe.lab.bench.plan import Point, short
from strobe.lab.bench.report import FLOPS_PER_CLOCK, closest, is_hopper, timed
from strobe.lab.model.cost import Cost

STROBE = "#D55E00"
PEERS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""The colours of peers: Okabe and Ito's palette, which colour-blind people can tell apart. In grey the names at the lines
help."""

CEILING = "#888888"

AHEAD, BEHIND = PEERS[0], STROBE
"""The colours of points at which Strobe is ahead of all peers, and behind one; what is level is grey."""


def save(figure: Figure, path: Path, **options) -> Path:
    """Writes a picture, PNG or SVG by its suffix and without a date in it, closes the figure and returns the path."""
    figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else {"Software": None}, **options)
    plt.close(figure)
    return path


def bars(
    panel: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], form: Callable[[float], str]
) -> None:
    """Draws horizontal bars: for each label one of each series, below each other. The first series has Strobe's color; a value
    of None has no bar. form: makes the text at a bar's end."""
    height = 0.8 / len(series)
    for n, ((name, values), color) in enumerate(zip(series.items(), cycle((STROBE, *PEERS)), strict=False)):
        shown = [(i, value) for i, value in enumerate(values) if value is not None]
        places = [i + (n - (len(series) - 1) / 2) * height for i, _ in shown]
        drawn = panel.barh(places, [value for _, value in shown], height=0.9 * height, color=color, label=name)
        panel.bar_label(drawn, [form(value) for _, value in shown], padding=3, fontsize=8)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.tick_params(labelsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    panel.spines[["top", "right"]].set_visible(False)


def draw(report: dict, path: Path) -> list[Path]:
    """Writes a picture, PNG or SVG, for each dtype of a report: the first at `path`, the others with the dtype in their
    name."""
    dtypes = list(dict.fromkeys(facts["dtype"] for facts in report["points"]))
    paths = [path if n == 0 else path.with_stem(f"{path.stem}-{dtype}") for n, dtype in enumerate(dtypes)]
    for dtype, target in zip(dtypes, paths, strict=True):
        _draw(report, [facts for facts in report["points"] if facts["dtype"] == dtype], target)
    return paths


def draw_speeds(found: Sequence[tuple[float, float]], report: dict, path: Path, across: str, what: str) -> Path:
    """Writes a picture, PNG or SVG, of problems at random. found: what stands across, and Strobe's speed over the best peer's.
    across: what stands there, in words; what: what was measured."""
    figure, panel = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    ahead, behind = [x for x in found if x[1] >= 1], [x for x in found if x[1] < 1]
    for color, name, some in ((AHEAD, "ahead", ahead), (BEHIND, "behind", behind)):
        panel.scatter([x for x, _ in some], [y for _, y in some], s=14, color=color, label=f"{name} at {len(some)}")
    panel.axhline(1.0, color=CEILING, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    panel.set_xscale("log")
    panel.set_xlabel(across)
    panel.set_ylabel("speed of Strobe over the best peer's")
    middle = f", {median(y for _, y in found):.2f} in the median" if found else ""
    panel.set_title(f"{len(found)} {what} at random, {report['device']['name']}, {report['date'][:10]}{middle}", fontsize=10)
    panel.legend(fontsize=8, frameon=False)
    return save(figure, path, dpi=130)


def draw_random(report: dict, path: Path) -> list[Path]:
    """Writes the picture of shapes at random: Strobe's speed over the best peer's against the tokens of a sequence."""
    shown = [(Point.of(facts), found[1].value) for facts in report["points"] if (found := closest(facts["results"]))]
    across = [(fmean(point.packed) if point.packed else point.length, ratio) for point, ratio in shown]
    return [draw_speeds(across, report, path, "tokens of a sequence, in the mean", "shapes")]


def draw_zoo(report: dict, path: Path) -> list[Path]:
    """Writes the picture of the shapes of models, PNG or SVG: Strobe's speed over the best peer's at each point that has one,
    with its 95 % interval; forwards as filled dots, backwards as open ones. Writes nothing where no peer has a number."""
    shown = [(Point.of(facts), *found) for facts in report["points"] if (found := closest(facts["results"]))]
    if not shown:
        return []
    figure, panel = plt.subplots(figsize=(8.5, 1.2 + 0.2 * len(shown)))
    for place, (point, _, ratio) in enumerate(shown):
        color = {"ahead": AHEAD, "behind": BEHIND}.get(ratio.verdict, CEILING)
        if ratio.half is not None:
            panel.plot([ratio.low, ratio.high], [place, place], color=color, linewidth=1.5)
        panel.plot([ratio.value], [place], "o", color=color, markerfacecolor="white" if point.backward else color, markersize=5)
        panel.annotate(f"{ratio.value:.2f}", (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(shown)), [f"{point} (over {name})" for point, name, _ in shown], fontsize=7)
    panel.set_ylim(len(shown) - 0.5, -0.5)
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    ends = [
        end for _, _, ratio in shown for end in ((ratio.value, ratio.value) if ratio.half is None else (ratio.low, ratio.high))
    ]
    marks = [mark for mark in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0) if min(ends) < mark < max(ends) or mark == 1.0]
    panel.set_xticks(marks, [f"{mark:g}" for mark in marks], fontsize=8)
    panel.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("Strobe's speed over the best peer's, 95 % intervals; open dots are backwards", fontsize=8)
    incomplete = " (incomplete)" if report["stopped"] else ""
    panel.set_title(f"Shapes of models, {report['device']['name']}, {report['date'][:10]}{incomplete}", fontsize=10)
    return [save(figure, path, dpi=130, bbox_inches="tight")]


def _draw(report: dict, entries: list[dict], path: Path) -> None:
    """Writes the picture of one dtype: masks are rows of panels, head dims (and GQA) columns; a row has one scale."""
    figure, panels = panels_of(entries, lambda point: point.heading, "TFLOP/s", sharey="row")
    styles = _styles(timed(report))
    for panel, mine in panels:
        _panel(panel, mine, styles, report)
    for panel, _ in panels:
        _names_at_the_ends(panel)
    _title(figure, report, entries[0]["dtype"])
    save(figure, path, dpi=130, bbox_inches="tight")


def panels_of(
    entries: list[dict], column: Callable[[Point], str], ylabel: str, sharey: Literal["row", "all"]
) -> tuple[Figure, list[tuple[Axes, list[dict]]]]:
    """A figure with a row of panels for each mask and a column for each name that `column` gives to a point; and the panels,
    which have titles, each with its entries in the order of length."""
    rows = list(dict.fromkeys(facts["mask"] for facts in entries))
    columns = list(dict.fromkeys(column(Point.of(facts)) for facts in entries))
    size = (0.8 + 3.2 * len(columns), 1.0 + 2.8 * len(rows))
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False, sharey=sharey)
    panels = []
    for row, mask in enumerate(rows):
        for place, name in enumerate(columns):
            panel = axes[row][place]
            mine = [facts for facts in entries if facts["mask"] == mask and column(Point.of(facts)) == name]
            if not mine:
                panel.set_axis_off()
                continue
            panel.set_title(f"{name}, {mask}", fontsize=10)
            panels.append((panel, sorted(mine, key=lambda facts: facts["length"])))
        axes[row][0].set_ylabel(ylabel)
    for panel in axes[-1]:
        panel.set_xlabel("sequence length")
    return figure, panels


def _styles(names: list[str]) -> dict[str, dict]:
    """Name of a contender -> how its line looks: ours is thick and above the peers'."""
    peers = (name for name in names if name != "strobe")
    styles: dict[str, dict] = {
        name: {"color": color, "linewidth": 1.2, "marker": "o", "markersize": 2}
        for name, color in zip(peers, cycle(PEERS), strict=False)
    }
    return styles | {"strobe": {"color": STROBE, "linewidth": 3.0, "marker": "o", "markersize": 4, "zorder": 3}}


def _panel(panel: Axes, entries: list[dict], styles: dict[str, dict], report: dict) -> None:
    """Draws a panel: medians as lines, all rounds as faint dots, ceilings dashed; lengths on a logarithmic axis."""
    for name, style in styles.items():
        shown = [(facts["length"], facts["results"][name]) for facts in entries if "tflops" in facts["results"].get(name, {})]
        if not shown:
            continue
        panel.plot([x for x, _ in shown], [result["tflops"] for _, result in shown], label=name, **style)
        dots = [(x, rate) for x, result in shown for rate in result["rounds"]]
        panel.scatter([x for x, _ in dots], [y for _, y in dots], s=2, color=style["color"], alpha=0.5, linewidths=0)
    for name, (lengths, rates) in ceilings(entries, report).items():
        panel.plot(lengths, rates, color=CEILING, linewidth=0.8, linestyle=(0, (4, 3)), label=name, zorder=1)
    lengths = [facts["length"] for facts in entries]
    over_lengths(panel, lengths)
    if len(lengths) > 1:
        panel.set_xlim(lengths[0] * 0.85, lengths[-1] * (lengths[-1] / lengths[0]) ** 0.45)  # room for the names
    panel.set_ylim(bottom=0)


def over_lengths(panel: Axes, lengths: list[int]) -> None:
    """Gives a panel a logarithmic axis of lengths, and horizontal lines to read values by."""
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.set_xticks(lengths, [short(length) for length in lengths], fontsize=8)
    panel.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def ceilings(entries: list[dict], report: dict) -> dict[str, tuple[list[int], list[float]]]:
    """Name of a ceiling -> lengths, and the TFLOP/s there that no contender exceeds: those of the run's matrix product, and
    what tensor cores and exp2 units can do at the clock that was measured at each point. exp2 is left out where it is far above
    the others and so bounds nothing."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    lengths, matmul, device = [facts["length"] for facts in entries], report["ceiling"], report["device"]
    if "before" in matmul and entries[0]["dtype"] in matmul["matmul"]:
        found["cuBLAS"] = lengths, [(matmul["before"] + matmul.get("after", matmul["before"])) / 2] * len(lengths)
    clocked = [facts for facts in entries if _mhz(facts)]
    if not clocked or not is_hopper(report) or entries[0]["dtype"] not in FLOPS_PER_CLOCK:
        return found
    tensor = FLOPS_PER_CLOCK[entries[0]["dtype"]]
    exp2 = 16 * Cost(Point.of(entries[0]).problem()).flops_per_pair
    names = {"MMA": tensor} if exp2 > 1.2 * tensor else {"MMA": tensor, "exp2": exp2}
    if exp2 == tensor:
        names = {"MMA = exp2": tensor}
    for name, per_clock in names.items():
        rates = [per_clock * device["sms"] * _mhz(facts) * 1e-6 for facts in clocked]
        found[name] = [facts["length"] for facts in clocked], rates
    return found


def _mhz(facts: dict) -> float:
    """The clock in MHz while Strobe ran; else that of the samples at the point; 0 if there are none."""
    return facts["results"].get("strobe", {}).get("sm_clock_mhz") or facts["telemetry"].get("sm_clock_mhz", 0)


def _names_at_the_ends(panel: Axes) -> None:
    """Writes each line's name beside its last point, moved apart where they would overlap."""
    step, floor = panel.get_ylim()[1] * 0.062, 0.0
    ends = {line: np.asarray(line.get_xydata())[-1] for line in panel.get_lines()}
    for line, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        name, floor = str(line.get_label()), max(floor, y)
        panel.annotate(
            name, (x, floor), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5,
            color=line.get_color(), weight="bold" if name == "strobe" else "normal", annotation_clip=False,
        )  # fmt: skip
        floor += step


def _title(figure: Figure, report: dict, dtype: str) -> None:
    device = report["device"]
    title = f"Attention {report['what']}, {dtype}, {device['name']}, {report['date'][:10]}"
    figure.suptitle(title + (" (incomplete)" if report["stopped"] else ""), fontsize=12)
    figure.tight_layout()
