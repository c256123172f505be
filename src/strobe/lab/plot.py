"""The picture of a benchmark: TFLOP/s against length, a panel for each head dim and mask, a line for each contender."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STROBE = "#D55E00"
PEERS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#000000")
MARKERS = ("s", "^", "D", "v", "P", "X", "*")
"""Okabe and Ito's palette, which the colour-blind can tell apart, and a marker for each for those who print in grey."""


def draw(report: dict, path: Path) -> Path:
    """Writes the picture of a report (see `strobe.lab.bench`) as PNG; returns the path."""
    points = report["points"]
    rows = list(dict.fromkeys((point["dtype"], point["causal"]) for point in points))
    columns = list(dict.fromkeys(point["head_dim"] for point in points))
    size = (1.2 + 3.6 * len(columns), 1.5 + 2.7 * len(rows))
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False, sharey=True)
    styles = _styles(_measured(report))
    for row, (dtype, causal) in enumerate(rows):
        for column, head_dim in enumerate(columns):
            panel = axes[row][column]
            mine = [p for p in points if (p["dtype"], p["causal"], p["head_dim"]) == (dtype, causal, head_dim)]
            _panel(panel, mine, styles, report["ceiling"])
            panel.set_title(f"D = {head_dim}, {'causal' if causal else 'full'}, {dtype}", fontsize=10)
            if row == len(rows) - 1:
                panel.set_xlabel("sequence length")
        axes[row][0].set_ylabel("TFLOP/s")
    _legend(figure, report)
    figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return path


def _measured(report: dict) -> list[str]:
    """The contenders with a number somewhere."""
    timed = {name for point in report["points"] for name, result in point["results"].items() if "tflops" in result}
    return [name for name in report["contenders"] if name in timed]


def _styles(names: list[str]) -> dict[str, dict]:
    peers = [name for name in names if name != "strobe"]
    line = {"linewidth": 1.5, "markersize": 5, "zorder": 2}
    looks = zip(peers, cycle(PEERS), cycle(MARKERS), strict=False)
    styles: dict[str, dict] = {name: {"color": color, "marker": marker} | line for name, color, marker in looks}
    if "strobe" in names:
        styles["strobe"] = {"color": STROBE, "marker": "o", "linewidth": 2.8, "markersize": 7, "zorder": 3}
    return styles


def _panel(panel: Axes, points: list[dict], styles: dict[str, dict], ceiling: dict) -> None:
    """Medians as lines, extremes as thin bars, the matrix product as a dashed line; lengths evenly spaced."""
    lengths = sorted({point["length"] for point in points})
    for name, style in styles.items():
        timed = sorted((p["length"], p["results"][name]) for p in points if "tflops" in p["results"].get(name, {}))
        if not timed:
            continue
        x = [lengths.index(length) for length, _ in timed]
        y = [result["tflops"] for _, result in timed]
        down = [result["tflops"] - result["min"] for _, result in timed]
        up = [result["max"] - result["tflops"] for _, result in timed]
        panel.errorbar(x, y, yerr=(down, up), label=name, elinewidth=0.8, capsize=2, **style)
    if "before" in ceiling:
        panel.axhline(ceiling["before"], color="#999999", linestyle="--", linewidth=1, label="matrix product", zorder=1)
    panel.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
    panel.set_xlim(-0.3, len(lengths) - 0.7)
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _legend(figure: Figure, report: dict) -> None:
    device = report["device"]
    handles: dict = {}
    for other in figure.axes:
        for handle, label in zip(*other.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    order = sorted(handles, key=lambda name: (name != "strobe", name == "matrix product"))
    title = f"Attention {report['what']}, {device['name']}, {report['date'][:10]}"
    figure.suptitle(title + (" (incomplete)" if report["stopped"] else ""), fontsize=12)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend([handles[n] for n in order], order, loc="lower center", ncols=min(len(order), 5), frameon=False)
