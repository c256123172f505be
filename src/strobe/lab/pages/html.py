"""`strobe report`: what strobe's commands wrote as JSON, as one HTML file that needs nothing else, not even a network.

A file is shown by what it says that it is, with the tables and pictures of the command that wrote it. Pictures are inside the
file, as PNG. How all of that looks, on a phone and on a wide screen, is report.html.jinja's alone.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from rich.table import Table

from strobe.call.dispatch import explain_problem
from strobe.lab.bench.plan import Point
from strobe.lab.bench.report import SCHEMA, arch_of, closest, extra_memory, number, refusals, timed, verdicts


class Piece(NamedTuple):
    """A part of a section: its kind, of which the template knows how it looks, a title and what it shows."""

    kind: str
    title: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    text: str = ""


Pieces = list[Piece]


class Section(NamedTuple):
    """What one file holds, under a title. headings: those within, as they are listed in the contents."""

    title: str
    file: str
    facts: Sequence[str]
    pieces: Pieces

    @property
    def headings(self) -> list[str]:
        return [piece.title for piece in self.pieces if piece.kind == "heading"]


# ---- pieces of a section


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Pieces:
    """Cells are shown as they are."""
    return [Piece("table", head=head, rows=[list(row) for row in rows])]


def heading(text: str) -> Pieces:
    return [Piece("heading", text)]


def words(*lines: str) -> Pieces:
    return [Piece("words", text=line) for line in lines]


def folded(title: str, text: str) -> Pieces:
    """Text that opens on a click."""
    return [Piece("folded", title, text=text)]


def picture(path: Path, what: str) -> Pieces:
    """A PNG, inside the page. 128 colors are enough for lines and blocks, and make it a third as large."""
    from PIL import Image  # which matplotlib brings

    small = io.BytesIO()
    Image.open(path).convert("RGB").quantize(128).save(small, "PNG", optimize=True)
    return [Piece("picture", what, text=base64.b64encode(small.getvalue()).decode())]


# ---- a benchmark


def of_bench(report: dict) -> Pieces:
    """Problem, kernel, table, pictures, what did not run."""
    names, protocol = timed(report), report["protocol"]
    how = ", ".join(f"{key} {value}" for key, value in protocol.items() if not isinstance(value, dict))
    ceiling = report["ceiling"]
    lines = [f"Protocol: {protocol.get('name', 'sustained')}; {how}."]
    if "before" in ceiling:
        rates = ", ".join(f"{ceiling[when]:.4g} {when}" for when in ("before", "after") if when in ceiling)
        lines.append(f"A matrix product ({ceiling['matmul']}) in the same run, TFLOP/s: {rates}.")
    if host := [f"{name} {result['us']:.0f}" for name, result in report["host_us"].items() if "us" in result]:
        lines.append(f"CPU time of a call, us: {', '.join(host)}.")
    if extra := extra_memory(report):
        lines.append(f"Peak extra memory, bytes for each query of each head: {extra}.")
    if report["not installed"]:
        lines.append(f"Not installed: {', '.join(report['not installed'])}.")
    if report["stopped"]:
        lines.append(f"Incomplete: {report['stopped']}.")
    if counted := verdicts(report["points"]):
        lines.append(f"Strobe over the best peer, by its 95% interval: {counted}.")
    rows = [_bench_row(facts, names) for facts in report["points"]]
    head = ["point", "batch", "heads", "FLOPs", *names, "strobe / best peer, 95%", "", "SM clock, MHz"]
    page = words(*lines) + heading("TFLOP/s, median of the rounds") + table(head, rows)
    page += _spreads(report, names) + _bench_pictures(report) + heading("Which kernel, and why") + _explanations(report)
    if reasons := refusals(report):
        page += heading("What did not run") + words(*reasons)
    return page


def _bench_row(facts: dict, names: Sequence[str]) -> list[str]:
    point, results = Point.of(facts), facts["results"]
    heads = f"{point.heads}" if point.heads == point.heads_kv else f"{point.heads}/{point.heads_kv}"
    rates = [number(results.get(name, {}).get("tflops")) for name in names]
    clock = results.get("strobe", {}).get("sm_clock_mhz", "-")
    compared = closest(results)
    words = ["-", ""] if compared is None else [str(compared[1]), compared[1].verdict]
    return [str(point), str(point.batch), heads, f"{point.flops:.3e}", *rates, *words, str(clock)]


def _spreads(report: dict, names: Sequence[str]) -> Pieces:
    """Where calls were timed one by one."""
    rows = []
    for facts in report["points"]:
        for name in names:
            result = facts["results"].get(name, {})
            if us := result.get("calls_us"):
                cells = [f"{us[key]:.1f}" for key in ("median", "p10", "p90", "min", "max")]
                rows.append([str(Point.of(facts)), name, us["count"], *cells])
    if not rows:
        return []
    return heading("Calls one by one, us") + table(["point", "", "calls", "median", "p10", "p90", "min", "max"], rows)


def _bench_pictures(report: dict) -> Pieces:
    from strobe.lab.bench.plot import draw

    if not report["points"]:
        return []
    with tempfile.TemporaryDirectory() as folder:
        drawn = draw(report, Path(folder) / "bench.png")
        return [piece for path in drawn for piece in picture(path, "TFLOP/s against length")]


def _explanations(report: dict) -> Pieces:
    """The backend that ran each family of points, and what dispatch says of it today."""
    arch = arch_of(report)
    families: dict[Point, list[dict]] = {}
    for facts in report["points"]:
        families.setdefault(Point.of(facts).family, []).append(facts)
    page: Pieces = []
    for entries in families.values():
        point = Point.of(entries[-1])
        ran = sorted({found for facts in entries if (found := facts["results"].get("strobe", {}).get("backend"))})
        title = f"{point.dtype} {point.heading} {point.mask}: {', '.join(ran) or 'nothing'} ran"
        said = str(explain_problem(point.problem(), arch)) if arch else f"{report['device']['name']} is not known by name"
        page += folded(title, said)
    return page


# ---- the others


def of_comparison(report: dict) -> Pieces:
    """Every contender at every point, the picture."""
    from strobe.lab.bench.compare import draw

    sides = [
        f"{side}: {report[side]['date']}, commit {report[side]['commit']}, {report[side]['command']}" for side in ("old", "new")
    ]
    rows = [
        [
            str(Point.of(facts)), facts["contender"], number(facts["old"], ".4g"), number(facts["new"], ".4g"),
            number(facts["ratio"], ".3f"), number(facts["noise"], ".1%"), number(facts["clocks"], ".3f"), facts["verdict"],
        ]
        for facts in report["points"]
    ]  # fmt: skip
    head = ["point", "", "old", "new", "new / old", "noise", "clock", ""]
    drawn = _drawn(lambda path: draw(report, path), "new over old against length")
    return words(*sides) + heading(f"{report['of']}, TFLOP/s") + table(head, rows) + drawn


def of_timeline(report: dict) -> Pieces:
    """The steady state, what is hidden, the picture."""
    from strobe.lab.timeline import timeline

    configs = [[point["head_dim"], point["mask"], point["length"], point["config"]] for point in report["points"]]
    drawn = _drawn(lambda path: timeline.draw(timeline.measured(report), path), "what each role does when")
    return (
        heading("Which kernel") + table(["D", "mask", "length", "config"], configs)
        + heading("Cycles of a block of keys: median (tenth to ninetieth percentile of the CTAs)")
        + _of_lines(timeline.table(report))
        + heading("Of the time of a typical CTA (and hidden under other work of it)") + _of_lines(timeline.hidden_table(report))
        + drawn
    )  # fmt: skip


def _of_lines(text: str) -> Pieces:
    """A table of text, whose columns are two spaces apart at least."""
    rows = [[cell for cell in line.split("  ") if cell] for line in text.splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows]
    return table(rows[0], rows[1:])


def of_profile(report: dict) -> Pieces:
    """The tables of Nsight Compute's measurements, the picture."""
    from strobe.lab.counters import profile_picture

    point = words(f"{Point.of(report['point'])}") if report["point"] else []
    tables = [piece for one in report["tables"] for piece in heading(one["title"]) + table(one["head"], one["rows"])]
    if not profile_picture.panels_of(report):
        return point + tables
    return point + tables + _drawn(lambda path: profile_picture.draw(report, path), "throughputs, stalls, roofline")


def _of_table(shown: Table) -> Pieces:
    """A table of the terminal."""
    columns = [list(column.cells) for column in shown.columns]
    return table([str(column.header) for column in shown.columns], zip(*columns, strict=True))


def _drawn(draw: Callable[[Path], object], what: str) -> Pieces:
    """What a function draws to a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        return picture(path, what)


def of_cost(report: dict) -> Pieces:
    """Counts and least times of each way to compute, what moves, and all numbers in full."""
    from strobe.lab.model import cost_report

    counts = {name: value for name, value in report.items() if isinstance(value, dict)}
    return (
        words(*cost_report.summary(report).splitlines()) + _of_table(cost_report.table(report))
        + _drawn(lambda path: cost_report.draw(report, path), "least times") + of_facts(counts)
    )  # fmt: skip


def of_roofline(report: dict) -> Pieces:
    """Ceilings, least times, what binds each point, the picture."""
    from strobe.lab.model import roofline

    ceilings, found = roofline.of_facts(report)
    return (
        words(str(ceilings)) + heading("Least time in us on each unit") + _of_table(roofline.table(found))
        + words(*map(roofline.sentence, found))
        + _drawn(lambda path: roofline.draw(found, ceilings, path), "TFLOP/s against FLOPs a byte")
    )  # fmt: skip


def of_occupancy(report: dict) -> Pieces:
    """Limits, waves, the picture."""
    from strobe.lab.model import occupancy

    shown = occupancy.table(report)
    return (
        heading(str(shown.title)) + _of_table(shown) + words(*map(occupancy.sentence, report["kernels"]))
        + _drawn(lambda path: occupancy.draw(report, path), "block limits")
    )  # fmt: skip


def of_audit(report: dict) -> Pieces:
    """Kernels with what they take, counts of instructions, warnings, the picture, and what the instructions do."""
    from strobe.lab.binary import audit_report as audit

    names = {name for kernel in report["kernels"] for part in kernel["parts"].values() for name in part["instructions"]}
    return (
        words(*audit.headings(report)) + heading(audit.caption(report)) + _of_table(audit.table(report))
        + words(*audit.warnings(report)) + _drawn(lambda path: audit.draw(report, path), "the main loops")
        + folded("What the instructions do", "\n".join(audit.sentences(names)))
    )  # fmt: skip


def of_banks(report: dict) -> Pieces:
    """Wavefronts of each access in each layout, what the names mean, the picture."""
    from strobe.lab.model import banks

    tile, counts = banks.of_facts(report)
    return (
        heading(banks.caption(tile)) + _of_table(banks.table(counts)) + words(*banks.notes(counts))
        + _drawn(lambda path: banks.draw(tile, counts, path), "which banks each lane hits")
    )  # fmt: skip


def of_ladder(report: dict) -> Pieces:
    """The rungs with their times and the compiler's numbers, what did not run or gained nothing, the picture."""
    from strobe.lab.ladder import report as ladder

    drawn = any(facts.get("seconds") for facts in report["rungs"])
    return (
        _of_table(ladder.table(report)) + words(*ladder.sentences(report))
        + (_drawn(lambda path: ladder.draw(report, path), "TFLOP/s of each rung") if drawn else [])
    )  # fmt: skip


def of_facts(report: dict) -> Pieces:
    """Any object, a line for each value."""
    return table(["", ""], [(key, _shown(value)) for key, value in _flat(report).items()])


def _flat(facts: dict, prefix: str = "") -> dict:
    """Objects inside of objects by names with dots."""
    found: dict = {}
    for key, value in facts.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


# ---- the page

BENCH = "benchmark"
RENDERERS: dict[str, Callable[[dict], Pieces]] = {
    BENCH: of_bench,
    "comparison": of_comparison,
    "timeline": of_timeline,
    "timeline, simulated": of_timeline,
    "profile": of_profile,
    "cost": of_cost,
    "roofline": of_roofline,
    "occupancy": of_occupancy,
    "audit": of_audit,
    "banks": of_banks,
    "ladder": of_ladder,
}
"""What a JSON says that it is -> what shows it."""


def kind_of(report: object) -> str | None:
    """One of RENDERERS, or None."""
    if not isinstance(report, dict):
        return None
    if report.get("schema") == SCHEMA and "points" in report:
        return BENCH
    return report["what"] if report.get("what") in RENDERERS and report["what"] != BENCH else None


def load(path: Path) -> dict:
    """A JSON file of one of strobe's commands. ValueError for anything else."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a report is made of JSON files, got {path}: {error}") from None
    if kind_of(report) is None:
        raise ValueError(
            f"a report is made of the JSON of strobe's commands ({', '.join(RENDERERS)}), got {path}, which is none"
        )
    return report


def page(reports: Sequence[tuple[str, dict]]) -> str:
    """The HTML of some reports, each with the name of its file."""
    sections = [_section(name, report) for name, report in reports]
    devices = dict.fromkeys(name for _, report in reports if (name := _device(report)) is not None)
    return _template().render(devices=list(devices), sections=sections)


@functools.cache
def _template() -> Template:
    """The page's template, which stands beside this file. Whatever is put into it is escaped."""
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).from_string(Path(__file__).with_name("report.html.jinja").read_text())


def _device(report: dict) -> str | None:
    """The GPU that a report is of, if it is of one."""
    device = report.get("device")
    return device["name"] if isinstance(device, dict) and device.get("name", "no GPU") != "no GPU" else None


def _title(report: dict) -> str:
    on = _device(report)
    return report.get("what", "forward") + (f", {on}" if on else "")


def _section(name: str, report: dict) -> Section:
    kind = kind_of(report)
    assert kind is not None, "load() takes no others"
    facts = [f"{key}: {report[key]}" for key in ("date", "command", "remark") if report.get(key)]
    try:
        shown = RENDERERS[kind](report)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a report is made of whole JSON files, got {name}, in which something is missing: {error!r}"
        ) from None
    return Section(_title(report), name, facts, shown + _environment(report))


def _environment(report: dict) -> Pieces:
    """Device, versions, clocks, as far as the file holds them."""
    device, telemetry = report.get("device"), report.get("telemetry")
    if not isinstance(device, dict):
        return []
    rows = [(key, _shown(value)) for key, value in _flat(device).items() if value is not None]
    rows += [(key, _shown(value)) for key, value in _flat(telemetry or {}).items()]
    return heading("Environment") + table(["", ""], rows)


def write(paths: Sequence[Path], target: Path) -> Path:
    """Writes the page of some JSON files; returns where. ValueError if one is none of strobe's."""
    reports = [(path.name, load(path)) for path in paths]
    target.write_text(page(reports))
    return target
