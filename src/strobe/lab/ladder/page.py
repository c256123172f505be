"""The generated parts of docs/ladder.md: the climb, rung by rung, the tables, and the online softmax with numbers."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from strobe.lab.ladder.explain import moved_counters, source, value_of
from strobe.lab.ladder.report import GAIN, rows
from strobe.ladder import RUNGS, Rung

COMPILED = Path("docs/lab/ladder-compiled.json")
RESULTS = Path("benchmarks/results")
NOTHING = "Not measured on a GPU yet."
LONGEST_DIFF = 40
"""Lines of a difference that the page shows; a longer one is left to `strobe ladder diff`."""


def newest(root: Path) -> tuple[dict, Path] | None:
    """The newest result of `strobe ladder run` on a GPU, and its path from the root."""
    found = [(json.loads(path.read_text()), path.relative_to(root)) for path in (root / RESULTS).glob("ladder-*.json")]
    return max(found, key=lambda one: one[0]["date"], default=None)


def measured(root: Path) -> str:
    """The table of the newest run on a GPU."""
    found = newest(root)
    if found is None:
        return NOTHING
    report, path = found
    problem, device = report["problem"], report["device"]
    lines = [["rung", "ms", "TFLOP/s", "over rung 0", "over the one before", "of the best peer", "of its roof"]]
    for row in rows(report):
        lines.append([
            f"{row['number']} {row['title']}", _number(row["seconds"] and 1e3 * row["seconds"], ".3g"),
            _number(row["tflops"], ".3g"),
            _number(row["over first"], ".0f"), _number(row["over before"], ".2f"), _number(row["of best peer"], ".0%"),
            _number(row["of roof"], ".0%"),
        ])  # fmt: skip
    where = (
        f"{device['name']}, {report['date'][:10]}, commit {device['commit']} ([JSON](../{path})): {problem['heads']} heads, "
        f"length "
        f"{problem['length']}, head dim {problem['head_dim']}, {problem['dtype']}, without a mask. Roofs: "
    )
    roofs = ", ".join(f"{name} {rate / 1e12:.4g} TFLOP/s" for name, rate in report["roofs"].items())
    picture = (
        f"![TFLOP/s of each rung](../{path.with_suffix('.png')})\n\n" if (root / path).with_suffix(".png").exists() else ""
    )
    return f"{picture}{where}{roofs}.\n\n{_table(lines)}"


def studies(root: Path) -> str:
    """Rungs at the shapes of others' studies, a run each: study-*.json."""
    paths = sorted((root / RESULTS).glob("study-*.json"))
    found = [(json.loads(path.read_text()), path.relative_to(root)) for path in paths if "profile" not in path.name]
    if not found:
        return NOTHING
    lines = [["", "rung", "ms", "TFLOP/s", "over the one above", "JSON"]]
    for report, path in found:
        problem = report["problem"]
        shape = f"{problem['heads']} heads, length {problem['length']}, head dim {problem['head_dim']}"
        before: float | None = None
        for row in rows(report):
            if row["seconds"] is None:
                continue
            over = before / row["seconds"] if before else None
            lines.append([
                f"{report['device']['name']}, {shape}", f"{row['number']} {row['title']}", f"{1e3 * row['seconds']:.3g}",
                f"{row['tflops']:.3g}", _number(over, ".2f"), f"[{report['date'][:10]}](../{path})",
            ])  # fmt: skip
            before = row["seconds"]
    return _table(lines)


def counters(root: Path) -> str:
    """What Nsight Compute counted of neighbouring rungs, by the newest rungs-profile-*.json."""
    profile = _newest_profile(root, "rungs-profile-*.json")
    if profile is None:
        return NOTHING
    names = {subject["name"] for subject in profile["subjects"]}
    known = [rung for rung in RUNGS if f"{rung.number} {rung.title}" in names]
    pairs = [pair for pair in pairwise(known) if pair[0].number + 1 == pair[1].number]
    return "\n\n".join([_by(profile), *(_table(moved_counters(profile, *pair)) for pair in pairs)])


OF_A_PAIR = "Throughput", "Launch", "Occupancy", "Workload of each unit", "By nvprof's names"
"""The tables of a profile that `pair` shows."""


def pair(root: Path) -> str:
    """Nsight Compute's tables of FP32 against tensor cores, by the newest study-profile-*.json."""
    profile = _newest_profile(root, "study-profile-*.json")
    if profile is None:
        return NOTHING
    tables = [table for table in profile["tables"] if table["title"] in OF_A_PAIR]
    return "\n\n".join([_by(profile), *(f"{one['title']}:\n\n{_table([one['head'], *one['rows']])}" for one in tables)])


def _newest_profile(root: Path, pattern: str) -> dict | None:
    """The newest JSON of `strobe ladder run --profile` of a pattern, and in "path" where it lies."""
    found = [json.loads(path.read_text()) | {"path": path.relative_to(root)} for path in (root / RESULTS).glob(pattern)]
    return max(found, key=lambda one: one["date"], default=None)


def _by(profile: dict) -> str:
    return f"{profile['device']['name']}, {profile['date'][:10]} ([JSON](../{profile['path']})), by `{profile['command']}`:"


def climb(root: Path) -> str:
    """A section for each rung: the bottleneck, the change with its lines of code, the prediction, the numbers that moved."""
    compiled = {facts["number"]: facts for facts in json.loads((root / COMPILED).read_text())["rungs"]}
    run = newest(root)
    found = {row["number"]: row for row in rows(run[0])} if run else {}
    return "\n\n".join(_section(rung, RUNGS[rung.number - 1] if rung.number else None, compiled, found) for rung in RUNGS)


def _section(rung: Rung, before: Rung | None, compiled: dict[int, dict], found: dict[int, dict]) -> str:
    parts = [
        f"### {rung.number}. {rung.title}",
        f"**Bottleneck before.** {rung.bottleneck}",
        f"**Change** ([`{rung.name}.py`](../src/strobe/ladder/{rung.name}.py)). {rung.changes}",
    ]
    if before is not None and rung.number > 4 and (lines := _difference(before, rung)):
        parts.append(f"```diff\n{lines}\n```")
    parts.append(f"**Prediction.** {rung.prediction}")
    if before is not None and rung.moves:
        parts.append(_moved(before, rung, compiled))
    parts.append(f"**Measured.** {_verdict(rung, found)}")
    return "\n\n".join(parts)


def _difference(before: Rung, rung: Rung) -> str:
    """The lines of code that differ, without docstrings; "" if they are too many."""
    left, right = (source(one).split('"""', 2)[2].splitlines() for one in (before, rung))
    lines = [line for line in difflib.unified_diff(left, right, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))]
    return "\n".join(lines) if len(lines) <= LONGEST_DIFF else ""


def _moved(before: Rung, rung: Rung, compiled: dict[int, dict]) -> str:
    """The compiler's numbers that the rung names, of both."""
    known = [one for one in (before, rung) if one.number in compiled]
    heads = [f"{one.number}, {compiled[one.number]['compiled for']}" for one in known]
    lines = [["", *heads]]
    for name in rung.moves:
        cells = [value_of(compiled[one.number]["compiled"], name) for one in known]
        lines.append([name, *("-" if cell is None else f"{cell:g}" for cell in cells)])
    return _table(lines)


def _verdict(rung: Rung, found: dict[int, dict]) -> str:
    row = found.get(rung.number)
    if row is None or row["seconds"] is None:
        return (row or {}).get("note") or NOTHING
    said = f"{row['tflops']:.3g} TFLOP/s"
    if row["over before"] is None:
        return f"{said}."
    if row["over before"] < GAIN:
        return f"{said}, {row['over before']:.2f} times as fast as the rung before: it gains nothing here. {rung.nothing}"
    return f"{said}, {row['over before']:.2f} times as fast as the rung before."


# ---- the online softmax with numbers

SCORES, VALUES = (1.0, 3.0, 2.0, 5.0), (10.0, 20.0, 30.0, 40.0)
BLOCK = 2


def steps() -> list[dict[str, Any]]:
    """The online softmax of one query over four keys with values of one number, in blocks of two: m, the correction, l and the
    sum of weighted values after each block."""
    m, total, acc = -math.inf, 0.0, 0.0
    made = []
    for first in range(0, len(SCORES), BLOCK):
        scores, values = SCORES[first : first + BLOCK], VALUES[first : first + BLOCK]
        m_new = max(m, *scores)
        correction = math.exp(m - m_new)
        p = [math.exp(score - m_new) for score in scores]
        total = total * correction + sum(p)
        acc = acc * correction + sum(weight * value for weight, value in zip(p, values, strict=True))
        m = m_new
        made.append({"scores": scores, "values": values, "m": m, "correction": correction, "p": p, "l": total, "acc": acc})
    return made


def example(root: Path) -> str:
    """`steps` in words and a table."""
    lines = [["block", "scores", "m", "correction", "p", "l", "sum of p v"]]
    for number, step in enumerate(steps()):
        lines.append([
            str(number), ", ".join(f"{x:g}" for x in step["scores"]), f"{step['m']:g}", f"{step['correction']:.4f}",
            ", ".join(f"{x:.4f}" for x in step["p"]), f"{step['l']:.4f}", f"{step['acc']:.4f}",
        ])  # fmt: skip
    last = steps()[-1]
    scores, values = (", ".join(f"{x:g}" for x in numbers) for numbers in (SCORES, VALUES))
    return (
        f"One query, four keys with scores {scores} and values {values}, in blocks of two:\n\n{_table(lines)}\n\n"
        f"out = {last['acc']:.4f} / {last['l']:.4f} = {last['acc'] / last['l']:.4f}. All at once, with the "
        f"maximum {max(SCORES):g}: the same weights, {', '.join(f'{math.exp(x - max(SCORES)):.4f}' for x in SCORES)}, "
        f"the same sums, the same result."
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(lines: Iterable[list[str]]) -> str:
    heading, *others = lines
    marked = [heading, ["---", *["---:"] * (len(heading) - 1)], *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in marked)
