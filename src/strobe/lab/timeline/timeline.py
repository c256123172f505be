"""Draws timelines: a row for each role, blocks for what it works on, pale ones for what it waits for.

One Timeline or several below each other, as PNG or SVG; a table of how busy each track is; a trace for Perfetto.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from strobe.lab.bench.plot import plt, save
from strobe.sim.trace import PHASES, Span, Timeline, timeline_of

COLORS = {
    "S": ("#0072B2", "S = Q K\u1d40"),
    "O": ("#56B4E9", "O += P V"),
    "P": ("#E69F00", "softmax: P"),
    "correct": ("#CC79A7", "rescale O; P to 16 bits"),
    "epilogue": ("#009E73", "epilogue"),
    "K": ("#7F7F7F", "copy of K"),
    "V": ("#B0B0B0", "copy of V"),
    "product": ("#0072B2", "matrix product"),
    "copy": ("#7F7F7F", "copy"),
    "work": ("#E69F00", "working"),
    "wait": ("#EFEFEF", "waiting"),
}
"""Okabe and Ito's palette, which the colour-blind can tell apart, by the first letter of a span's name or by the name."""

ROW, GAP = 0.8, 1.0
BLOCKS_SHOWN = 4


def kind_of(name: str) -> str:
    """Which of COLORS a span or event called `name` has: "P12" is a "P"."""
    return name if name in COLORS else name.rstrip("0123456789,-+in ")[:1] or name[:1]


def draw(timelines: Sequence[Timeline], path: Path) -> Path:
    """Writes the picture, PNG or SVG by the path's suffix; returns the path. Its times start where the timelines do."""
    heights = [len(timeline.tracks()) + 1.2 for timeline in timelines]
    figure, axes = plt.subplots(
        len(timelines), 1, figsize=(14, 0.42 * sum(heights) + 0.7), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for panel, timeline in zip(axes[:, 0], timelines, strict=True):
        _panel(panel, timeline)
    kinds = {kind_of(s.name) if s.kind == "work" else "wait" for t in timelines for s in t.spans}
    kinds |= {kind_of(event.name) for timeline in timelines for event in timeline.events}
    handles = [
        Patch(facecolor=color, edgecolor="#555555", label=label) for kind, (color, label) in COLORS.items() if kind in kinds
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return save(figure, path, dpi=120)


def _panel(panel: Axes, timeline: Timeline) -> None:
    tracks = timeline.tracks()
    begin = min([s.start for s in timeline.spans] + [e.time for e in timeline.events])
    end = max([s.end for s in timeline.spans] + [e.time for e in timeline.events])
    for span in timeline.spans:
        _block(panel, span, len(tracks) - 1 - tracks.index(span.track), begin, end)
    for event in timeline.events:
        y, color = len(tracks) - 1 - tracks.index(event.track), COLORS.get(kind_of(event.name), ("#000000", ""))[0]
        panel.plot([event.time - begin] * 2, [y - ROW / 2, y + ROW / 2], color=color, linewidth=2)
        panel.annotate(event.name, (event.time - begin, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_yticks(range(len(tracks)), list(reversed(tracks)), fontsize=9)
    panel.set_ylim(-0.6, len(tracks) - 0.4)
    panel.set_xlim(0, end - begin)
    panel.set_title(timeline.title, fontsize=10, loc="left")
    panel.set_xlabel(timeline.unit, fontsize=9)
    panel.tick_params(length=0)
    panel.grid(axis="x", color="#E5E5E5", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _block(panel: Axes, span: Span, y: float, begin: float, end: float) -> None:
    """A span; its name only where it fits."""
    color = COLORS["wait" if span.kind == "wait" else kind_of(span.name)][0] if kind_of(span.name) in COLORS else "#FFFFFF"
    length = span.end - span.start
    panel.barh(y, length, left=span.start - begin, height=ROW, color=color, edgecolor="#555555", linewidth=0.5)
    if span.kind == "work" and length / (end - begin) > 0.008 * len(span.name):
        dark = color in ("#0072B2", "#009E73")
        middle = span.start - begin + length / 2
        panel.text(middle, y, span.name, ha="center", va="center", fontsize=8, color="white" if dark else "black")


# ---- tables


def busy(timeline: Timeline) -> dict[str, float]:
    """The part of the whole time in which each track works; spans of a track that overlap count once."""
    spans = [span for span in timeline.spans if span.kind == "work"]
    whole = max(span.end for span in timeline.spans) - min(span.start for span in timeline.spans)
    result = {}
    for track in timeline.tracks():
        total, reached = 0.0, float("-inf")
        for start, end in sorted((span.start, span.end) for span in spans if span.track == track):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        result[track] = total / whole
    return result


def period(timeline: Timeline, track: str, letter: str) -> float | None:
    """The median time between the starts of a track's spans called letter0, letter1, ...; None if there are fewer than two."""
    starts = [
        span.start for span in timeline.spans if span.track == track and kind_of(span.name) == letter and span.kind == "work"
    ]
    steps = sorted(b - a for a, b in pairwise(sorted(starts)))
    return steps[len(steps) // 2] if steps else None


def table(report: dict) -> str:
    """The steady state of every point of a measured report: medians over CTAs in cycles, tenth to ninetieth percentile."""
    head = ("D", "mask", "tile", "period", *PHASES, "products", "exp2")
    rows = [head]
    for point in report["points"]:
        steady = point["steady"]
        cells = [
            f"{one['median']:.0f} ({one['p10']:.0f}-{one['p90']:.0f})" for one in (steady[name] for name in ("period", *PHASES))
        ]
        tile = f"{point['tile_q']} x {point['tile_kv']}"
        least = 4 * point["tile_q"] * point["tile_kv"] * point["head_dim"] / 4096, point["tile_q"] * point["tile_kv"] / 16
        rows.append((str(point["head_dim"]), point["mask"], tile, *cells, *(f"{cycles:.0f}" for cycles in least)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


# ---- what is hidden

Intervals = list[tuple[float, float]]
"""Apart from each other, in order."""


def _union(spans: Iterable[Span]) -> Intervals:
    joined: Intervals = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def _common(a: Intervals, b: Intervals) -> float:
    """The time that lies in both."""
    return sum(max(0.0, min(a_end, b_end) - max(a_start, b_start)) for a_start, a_end in a for b_start, b_end in b)


def _is_product(span: Span) -> bool:
    return span.track.endswith(": products")


def _is_arithmetic(span: Span) -> bool:
    return span.kind == "work" and not _is_product(span)


UNITS: dict[str, Callable[[Span], bool]] = {
    "QK": lambda span: _is_product(span) and kind_of(span.name) == "S",
    "PV": lambda span: _is_product(span) and kind_of(span.name) == "O",
    "softmax": lambda span: _is_arithmetic(span) and kind_of(span.name) == "P",
    "correction": lambda span: _is_arithmetic(span) and kind_of(span.name) == "correct",
    "epilogue": lambda span: _is_arithmetic(span) and kind_of(span.name) == "epilogue",
    "wait for K": lambda span: span.kind == "wait" and kind_of(span.name) == "K",
    "wait for S": lambda span: span.kind == "wait" and kind_of(span.name) == "S",
    "wait for O": lambda span: span.kind == "wait" and kind_of(span.name) == "O",
}
"""What a CTA's time goes to, by the spans of `strobe.sim.trace.timeline_of`. Of the loads there are the waits alone: a copy
runs by itself, and whoever does not wait for it does not see it."""


def hidden(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Unit -> the share of the whole time in which some role of the CTA uses it, and the share of that which is hidden. Units
    that nobody uses are left out. Products and waits hide under the arithmetic of any consumer, arithmetic under products. The
    spans of a product are its consumer's view: they include its queueing."""
    whole = max(span.end for span in timeline.spans) - min(span.start for span in timeline.spans)
    products = _union(filter(_is_product, timeline.spans))
    arithmetic = _union(filter(_is_arithmetic, timeline.spans))
    found = {}
    for unit, is_of in UNITS.items():
        mine = _union(span for span in timeline.spans if is_of(span))
        if total := _length(mine):
            under = products if unit in ("softmax", "correction", "epilogue") else arithmetic
            found[unit] = total / whole, _common(mine, under) / total
    return found


def hidden_table(report: dict) -> str:
    """What `hidden` finds, as a table: a line for a typical CTA of every point, from its first stamp to its last."""
    rows = [("D", "mask", *UNITS)]
    for point, timeline in zip(report["points"], whole_ctas(report), strict=True):
        found = hidden(timeline)
        cells = [f"{found[unit][0]:.0%} ({found[unit][1]:.0%})" if unit in found else "-" for unit in UNITS]
        rows.append((str(point["head_dim"]), point["mask"], *cells))
    kept = [i for i in range(len(rows[0])) if any(row[i] != "-" for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    return "\n".join("  ".join(row[i].rjust(widths[i]) for i in kept) for row in rows)


# ---- measured reports and other tools


PARTS = {"head_dim", "mask", "length", "tile_q", "tile_kv", "steady", "typical"}
"""What a point of a report has."""


def load(path: Path) -> dict:
    """A report of `strobe timeline`. ValueError for anything else."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a report of strobe timeline must be a JSON file, got {path}: {error}") from None
    if not isinstance(report, dict) or not all(set(point) >= PARTS for point in report.get("points", [()])):
        raise ValueError(f"a report of strobe timeline must hold points with stamps, got {path} without them")
    return report


def measured(report: dict) -> list[Timeline]:
    """The Timelines of a report (see `strobe.lab.timeline.tracing`): of each point a typical CTA, a few blocks in its steady
    state."""
    result = []
    for point, whole in zip(report["points"], whole_ctas(report), strict=True):
        stamps = next(iter(point["typical"].values()))
        begins = [clock for clock in stamps["consumer 0"]["begin"] if clock]
        first = len(begins) // 2
        last = min(first + BLOCKS_SHOWN, len(begins) - 1)
        result.append(whole.cut(begins[first] - 1, begins[last] - 1))
    return result


def whole_ctas(report: dict) -> list[Timeline]:
    """The timelines of a typical CTA, from its first stamp to its last, one for each point of a report."""
    result = []
    for point in report["points"]:
        cta, stamps = next(iter(point["typical"].items()))
        title = (
            f"{report['device']['name']}: head dim {point['head_dim']}, {point['mask']}, S = {point['length']}, "
            f"CTA {cta}: {point['steady']['period']['median']:.0f} cycles a block of {point['tile_kv']} keys"
        )
        result.append(timeline_of(stamps, title))
    return result


def perfetto(timelines: Sequence[Timeline]) -> dict:
    """The Timelines in Chrome's trace event format, for ui.perfetto.dev: a process each, a thread for each track. A cycle is
    shown as a microsecond. Slices of a thread must not cross, so what does goes to a second thread of the track."""
    events: list[dict] = []
    for pid, timeline in enumerate(timelines, 1):
        threads: dict[str, int] = {}
        for track in timeline.tracks():
            for lane, spans in enumerate(_lanes([span for span in timeline.spans if span.track == track]) or [[]]):
                tid = len(threads) + 1
                threads[track if lane == 0 else f"{track} ({lane + 1})"] = tid
                events += [
                    {"name": s.name, "cat": s.kind, "ph": "X", "ts": s.start, "dur": s.end - s.start, "pid": pid, "tid": tid}
                    for s in spans
                ]
        events += [
            {"name": e.name, "cat": "event", "ph": "i", "s": "t", "ts": e.time, "pid": pid, "tid": threads[e.track]}
            for e in timeline.events
        ]
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": timeline.title}})
        for name, tid in threads.items():
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
            events.append({"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return {"traceEvents": events, "otherData": {"unit": "1 us is 1 cycle of the SM"}}


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few rows as they need to lie one after the other."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes
