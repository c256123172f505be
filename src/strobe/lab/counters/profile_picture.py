"""The picture of a profile: how busy each unit was, what the warps waited for, and where the calls stand under the roof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from strobe.lab.bench.plan import Point
from strobe.lab.bench.plot import CEILING, PEERS, STROBE, bars, plt, save
from strobe.lab.counters import counters
from strobe.lab.counters.counters import Row
from strobe.lab.model.cost_report import si

BUSY = (
    *(row for row in counters.THROUGHPUT if row.label.endswith("Throughput")),
    next(row for row in counters.OCCUPANCY if row.label == "Achieved Occupancy"),
)
"""What is given in percent of the most that is possible."""

LEAST_SHARE = 1.0
"""Percent of the stalls: reasons below it, in every kernel, are left out."""


def draw(report: dict, path: Path) -> Path:
    """Writes what a report of `strobe profile` holds of: throughputs and occupancy, stall reasons, the roofline; its subjects
    side by side. PNG or SVG by the path's suffix. ValueError if it holds none of them."""
    panels = panels_of(report)
    if not panels:
        raise ValueError("a picture needs throughputs, stalls or a point on the roofline, got a profile without them")
    bars_in_a_panel = max(panel.bars for panel in panels)
    size = (4.6 * len(panels), max(3.2, 1.4 + 0.12 * bars_in_a_panel))
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        panel.draw(axis)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    of = f", {report['device']['name']}, {Point.of(report['point'])}" if report["point"] else ""
    figure.suptitle(f"Nsight Compute{of}", fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return save(figure, path, dpi=110)


class Panel(NamedTuple):
    """What draws a panel, and how many bars it has, with the gaps between them."""

    draw: Callable[[Axes], None]
    bars: int


def panels_of(report: dict) -> list[Panel]:
    """The panels of a report: those of which something was measured."""
    subjects = report["subjects"]
    busy, stalls = _by_label(subjects, BUSY), _shares(_by_label(subjects, counters.STALLS))
    panels = [
        Panel(partial(_bars, subjects=subjects, found=found, what=what), len(found) * (1 + len(subjects)))
        for found, what in (
            (busy, "% of the most possible"),
            (stalls, "what a warp waits for, % of the cycles between its instructions"),
        )
        if found
    ]
    if any(subject["roofline"] for subject in subjects):
        panels.append(Panel(partial(_roofline, subjects=subjects), 0))
    return panels


def _by_label(subjects: Sequence[dict], rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Label of a row -> the mean of each subject (None where it has none), for the rows that were measured at all."""
    found = {row.label: [subject["metrics"].get(row.metrics[0], {}).get("mean") for subject in subjects] for row in rows}
    return {label: means for label, means in found.items() if any(mean is not None for mean in means)}


def _shares(stalls: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Percent of each subject's stalls, the longest of the first one first."""
    wholes = [sum(mean or 0 for mean in column) for column in zip(*stalls.values(), strict=True)]
    shares = {
        label: [100 * mean / whole if mean is not None and whole else None for mean, whole in zip(means, wholes, strict=True)]
        for label, means in stalls.items()
    }
    large = {label: found for label, found in shares.items() if max(share or 0 for share in found) >= LEAST_SHARE}
    return dict(sorted(large.items(), key=lambda item: -(item[1][0] or 0)))


def _bars(panel: Axes, subjects: Sequence[dict], found: dict[str, list[float | None]], what: str) -> None:
    series = {subject["name"]: [means[n] for means in found.values()] for n, subject in enumerate(subjects)}
    bars(panel, list(found), series, "{:.1f}".format)
    panel.set_xlabel(what, fontsize=8)


def _roofline(panel: Axes, subjects: Sequence[dict]) -> None:
    """A point for each subject, under its own roof, as far as that is known."""
    points = [(subject["name"], subject["roofline"]) for subject in subjects if subject["roofline"]]
    known = [point["intensity"] for _, point in points] + [
        point["peak"] / point["bandwidth"] for _, point in points if "peak" in point
    ]
    left, right = 0.4 * min(known), 2.5 * max(known)
    colors = dict(zip((subject["name"] for subject in subjects), cycle((STROBE, *PEERS)), strict=False))
    for name, point in points:
        if "peak" in point:
            ridge = point["peak"] / point["bandwidth"]
            roof = [min(x * point["bandwidth"], point["peak"]) / 1e12 for x in (left, ridge, right)]
            panel.plot((left, ridge, right), roof, color=CEILING, linewidth=1.2, zorder=1)
        said = si(point["flops"], "FLOP/s") + (f", {point['flops'] / point['roof']:.0%} of the roof" if "roof" in point else "")
        panel.scatter(point["intensity"], point["flops"] / 1e12, color=colors[name], s=36, zorder=2)
        panel.annotate(
            said, (point["intensity"], point["flops"] / 1e12), xytext=(0, -13), textcoords="offset points", fontsize=8,
            ha="center", color=colors[name],
        )  # fmt: skip
    panel.set(xscale="log", yscale="log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.set_xlabel("FLOPs a byte of DRAM", fontsize=8)
    panel.set_ylabel("TFLOP/s", fontsize=8)
    panel.tick_params(which="both", labelsize=8)
    panel.margins(y=0.25)
    panel.spines[["top", "right"]].set_visible(False)
