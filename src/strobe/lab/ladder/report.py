"""What `strobe ladder run` shows of the JSON that it writes: the table, the sentences, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from strobe.lab.ladder.measure import seconds_of
from strobe.ladder import RUNGS

GAIN = 1.02
"""A rung that is not faster than the one before by this factor gains nothing."""


def load(path: Path) -> dict[str, Any]:
    """A report of `strobe ladder run`. ValueError if the file is anything else."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a result of strobe ladder run must be a JSON file, got {path}: {error}") from None
    if not isinstance(report, dict) or report.get("what") != "ladder" or "rungs" not in report:
        raise ValueError(f'a result of strobe ladder run must hold "what": "ladder" and rungs, got {path} without them')
    return report


def roof_of(report: dict, number: int) -> tuple[str, float] | None:
    """The name and FLOP/s of the unit that limits a rung at best; None where it was not measured."""
    name = "FFMA, by the data sheet" if number < 4 else "mma.sync" if number < 13 else "matrix product"
    return (name, report["roofs"][name]) if name in report["roofs"] else None


def rows(report: dict) -> list[dict[str, Any]]:
    """What the table shows of each rung: seconds, tflops, how many times as fast as rung 0 and as the rung before, shares of
    the best peer and of the roof (None where there is no number), and the compiler's numbers."""
    flops = report["problem"]["flops"]
    peers = [seconds for facts in report["peers"].values() if (seconds := seconds_of(facts))]
    found: list[dict[str, Any]] = []
    first = before = None
    for facts in report["rungs"]:
        seconds, roof = seconds_of(facts), roof_of(report, facts["number"])
        compiled = facts.get("compiled") or {}
        found.append(
            {
                "number": facts["number"],
                "title": facts["title"],
                "seconds": seconds,
                "tflops": flops / seconds / 1e12 if seconds else None,
                "over first": first / seconds if seconds and first else None,
                "over before": before / seconds if seconds and before else None,
                "of best peer": min(peers) / seconds if seconds and peers else None,
                "of roof": flops / seconds / roof[1] if seconds and roof else None,
                "error": facts.get("error"),
                "note": next((facts[name] for name in ("wrong", "failed", "refused", "not compiled") if name in facts), None),
                **{name: compiled.get(name) for name in ("registers", "smem_bytes", "spill_bytes", "blocks", "conflicts")},
                "occupancy": compiled.get("occupancy"),
            }
        )
        if seconds:
            first, before = first or (seconds if facts["number"] == 0 else None), seconds
    return found


def table(report: dict) -> Table:
    """The rungs and the peers as a table."""
    problem = report["problem"]
    shape = f"{problem['heads']} heads, length {problem['length']}, head dim {problem['head_dim']}, {problem['dtype']}"
    shown = Table(title=f"The ladder on {report['device']['name']}: {shape}, dense", title_justify="left")
    names = ("time", "TFLOP/s", "over rung 0", "over before", "of best peer", "of roof", "error")
    static = ("registers", "spills", "shared", "blocks", "occupancy", "conflicts")
    shown.add_column("rung", no_wrap=True)
    for name in (*names, *static):
        shown.add_column(name, justify="right", min_width=5)
    for row in rows(report):
        measured = (
            _time(row["seconds"]), _number(row["tflops"], ".3g"), _times(row["over first"]), _times(row["over before"]),
            _number(row["of best peer"], ".0%"), _number(row["of roof"], ".0%"), _number(row["error"], ".0e"),
        )  # fmt: skip
        compiled = (
            _number(row["registers"], "d"), _number(row["spill_bytes"], "d"), _number(row["smem_bytes"], "d"),
            _number(row["blocks"], "d"), _number(row["occupancy"], ".0%"), _times(row["conflicts"]),
        )  # fmt: skip
        shown.add_row(f"{row['number']:2} {row['title']}", *measured, *compiled)
    shown.add_section()
    for name, facts in report["peers"].items():
        seconds = seconds_of(facts)
        rate = problem["flops"] / seconds / 1e12 if seconds else None
        shown.add_row(f"   {name}", _time(seconds), _number(rate, ".3g"), "", "", "", "", _number(facts.get("error"), ".0e"))
    return shown


def sentences(report: dict) -> list[str]:
    """What stands below the table: roofs, what did not run, what gained nothing and why, removed waits."""
    lines = [f"roof, {name}: {rate / 1e12:.4g} TFLOP/s" for name, rate in report["roofs"].items()]
    lines += [f"{name}: {facts['refused']}" for name, facts in report["peers"].items() if "refused" in facts]
    for row, facts in zip(rows(report), report["rungs"], strict=True):
        words = RUNGS[row["number"]]
        if row["note"]:
            lines.append(f"rung {row['number']}: {row['note']}")
        if "timed" in facts:
            lines.append(f"rung {row['number']}: timed on {facts['timed']} of one head, the rest by proportion")
        if row["over before"] is not None and row["over before"] < GAIN:
            lines.append(f"rung {row['number']} gains nothing here ({row['over before']:.2f} times): {words.nothing}")
    lines += [_without(report, removed) for removed in report.get("removed", [])]
    lines += [_varied(report, facts) for facts in report.get("variants", [])]
    if not any(row["seconds"] for row in rows(report)[1:]):
        lines.append("no GPU is here: numbers were checked in the simulator, and only rung 0 was timed")
    if report["stopped"]:
        lines.append(f"incomplete: stopped {report['stopped']}")
    return lines


def _varied(report: dict, facts: dict) -> str:
    """How fast another way to do a rung is."""
    whole = next((row["seconds"] for row in rows(report) if row["number"] == facts["rung"]), None)
    seconds = seconds_of(facts)
    said = f"{whole / seconds:.2f} times as fast" if seconds and whole else facts.get("wrong", "not timed")
    return f"rung {facts['rung']}, another way, {facts['title']}: {said}"


def _without(report: dict, removed: dict) -> str:
    """What a wait costs, by the clock, and what it is for, by the simulator."""
    whole = next((row["seconds"] for row in rows(report) if row["number"] == removed["rung"]), None)
    seconds = seconds_of(removed)
    cost = f" takes {seconds / whole:.1%} of the time, and is wrong" if seconds and whole else " is wrong"
    return f"rung {removed['rung']} without {removed['statement']}{cost}. The simulator: {removed['simulator']}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}x" if value < 1000 else f"{value:.0f}x"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def draw(report: dict, path: Path) -> Path:
    """Draws TFLOP/s of each rung as a bar on a logarithmic axis, with the gain over the rung before, peers and roofs as lines;
    PNG or SVG by the path's suffix. ValueError if no rung has a time."""
    from strobe.lab.bench.plot import CEILING, PEERS, STROBE, plt, save

    shown = [row for row in rows(report) if row["tflops"]]
    if not shown:
        raise ValueError("the picture needs a rung with a time, got a report without any")
    figure, panel = plt.subplots(figsize=(9, 1.2 + 0.34 * len(shown)))
    bars = panel.barh([f"{row['number']} {row['title']}" for row in shown], [row["tflops"] for row in shown], color=STROBE)
    labels = [f"{row['tflops']:.3g}" + (f"  ({row['over before']:.2f}x)" if row["over before"] else "") for row in shown]
    panel.bar_label(bars, labels, padding=3, fontsize=8)
    flops = report["problem"]["flops"]
    for (name, facts), color in zip(report["peers"].items(), PEERS, strict=False):
        if seconds := seconds_of(facts):
            panel.axvline(flops / seconds / 1e12, color=color, lw=1, zorder=0, label=name)
    for (name, rate), style in zip(report["roofs"].items(), ("--", "-.", ":"), strict=False):
        panel.axvline(rate / 1e12, color=CEILING, lw=1, ls=style, zorder=0, label=f"roof: {name}")
    panel.set_xscale("log")
    panel.set_xlabel("TFLOP/s")
    panel.margins(x=0.25, y=0.01)
    panel.invert_yaxis()
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    if panel.get_legend_handles_labels()[0]:
        figure.legend(fontsize=8, loc="lower center", ncols=5, frameon=False)
    problem = report["problem"]
    panel.set_title(
        f"The ladder, {report['device']['name']}: {problem['heads']} heads, length {problem['length']}, "
        f"head dim {problem['head_dim']}, {problem['dtype']}",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return save(figure, path, dpi=110)
