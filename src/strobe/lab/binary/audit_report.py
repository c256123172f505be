"""What `strobe audit` shows of the JSON that it writes: a line for each kernel, the table, the warnings, the picture."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from strobe.lab.pages.glossary import GLOSSARY, Entry, explained


def show(found: dict, explain: bool) -> None:
    """Prints `facts`: a line for each kernel; a table, of the parts of a single kernel or of the main loops of several kernels
    beside each other; the warnings; and the glossary if asked for."""
    console = Console()
    for line in headings(found):
        console.print(line, markup=False, highlight=False)
    console.print(f"{caption(found)}:")
    console.print(table(found))
    for line in warnings(found):
        console.print(line, markup=False, highlight=False)
    if explain:
        names = (name for kernel in found["kernels"] for part in kernel["parts"].values() for name in part["instructions"])
        for line in sentences(names):
            console.print(line, markup=False, highlight=False)


def headings(found: dict) -> list[str]:
    """A line for each kernel."""
    lines = []
    for letter, kernel in _lettered(found):
        spills = kernel["spill_bytes"]
        declared, spilled = (" declared", "") if spills is None else ("", f", {spills} bytes of spills")
        takes = f"{kernel['registers']} registers, {kernel['smem_bytes']} bytes of shared memory{declared}{spilled}"
        lines.append(f"{letter}{readable(kernel['name'])}, {kernel['arch']}: {takes}")
        if said := ptxas_words(kernel.get("ptxas", {})):
            lines.append(f"{' ' * len(letter)}ptxas: {said}")
    return lines


PTXAS = {
    "stack_bytes": "{} bytes of stack frame",
    "barriers": "{} named barriers",
    "constant_bytes": "{} bytes of constant memory",
    "ptxas_ms": "compiled in {:.0f} ms",
}
"""What ptxas says beside registers and spills, in words."""


def ptxas_words(said: dict) -> str:
    """What ptxas said, without what it left out: newer ones say nothing of constant memory."""
    return ", ".join(words.format(said[name]) for name, words in PTXAS.items() if said.get(name) is not None)


def warnings(found: dict) -> list[str]:
    """A line for each warning."""
    return [f"warning: {letter}{warning}" for letter, kernel in _lettered(found) for warning in kernel["warnings"]]


def _lettered(found: dict) -> list[tuple[str, dict]]:
    """The kernels with a letter each, if there are several: A to Z, then numbers."""
    kernels = found["kernels"]
    if len(kernels) == 1:
        return [("", kernels[0])]
    return [(f"{chr(ord('A') + n) if n < 26 else n + 1}: ", kernel) for n, kernel in enumerate(kernels)]


def readable(name: str) -> str:
    """A kernel's name: of one that C++ mangled the part before its template arguments, which may be pages."""
    mangled = re.match(r"_ZN?K?(?=\d)", name)
    if mangled is None:
        return name
    parts, place = [], mangled.end()
    while found := re.match(r"\d+", name[place:]):
        place += found.end() + int(found[0])
        parts.append(name[place - int(found[0]) : place])
    shown = "::".join("(anonymous)" if part.startswith("_GLOBAL__N_") else part for part in parts)
    return f"{shown}<...>" if name[place : place + 1] == "I" else shown


def caption(found: dict) -> str:
    several = len(found["kernels"]) > 1
    return "Instructions in the main loops" if several else "Instructions in the text, and of these in the main loop"


def table(found: dict) -> Table:
    """Instructions that the glossary knows are rows; of one kernel the parts are columns, of several each one's main loops."""
    [(_, kernel), *more] = _lettered(found)
    columns = _beside_each_other(found) if more else [_whole(name, part) for name, part in kernel["parts"].items()]
    return _table(columns)


class Column(NamedTuple):
    """cells: by instruction, of those in the glossary; all: how many there are of any kind."""

    heading: str
    cells: dict[str, str]
    all: str


def _whole(name: str, part: dict) -> Column:
    """Counts in the text and in the main loop."""
    counts, loop = part["instructions"], part["main_loop"]
    cells = {name: f"{counts[name]} {loop.get(name, 0):4}" for name in counts if name in GLOSSARY}
    return Column(name, cells, f"{sum(counts.values())} {sum(loop.values()):4}")


def _beside_each_other(found: dict) -> list[Column]:
    """Counts in the main loops; those of one kernel that are alike, as its consumers are, share a column."""
    columns: list[Column] = []
    for letter, kernel in _lettered(found):
        for cells, names in _alike(kernel).items():
            sizes = sorted({sum(kernel["parts"][name]["main_loop"].values()) for name in names})
            columns.append(Column(letter + ", ".join(names), dict(cells), " to ".join(map(str, sizes[:1] + sizes[1:][-1:]))))
    return columns


def _alike(kernel: dict) -> dict[tuple, list[str]]:
    """Counts in a main loop, of what the glossary has -> the parts that have them."""
    alike: dict[tuple, list[str]] = {}
    for part, counts in kernel["parts"].items():
        shown = {name: str(times) for name, times in counts["main_loop"].items() if name in GLOSSARY}
        alike.setdefault(tuple(sorted(shown.items())), []).append(part)
    return alike


def draw(found: dict, path: Path) -> Path:
    """Writes the main loops as bars, a bar for each role or for those that are alike: how many instructions of each of the
    glossary's groups, and others; PNG or SVG by the path's suffix."""
    from strobe.lab.bench.plot import CEILING, PEERS, STROBE, plt, save

    groups = list(dict.fromkeys(entry.group for entry in GLOSSARY.values()))
    bars = {label: _by_group(loop) for label, loop in _loops(found).items()}
    shown = [group for group in groups if any(group in bar for bar in bars.values())]
    figure, panel = plt.subplots(figsize=(9, 1.6 + 0.36 * len(bars)))
    reached = [0] * len(bars)
    for group, color in zip([*shown, "other"], [*islice(cycle((STROBE, *PEERS, "#F0E442")), len(shown)), CEILING], strict=True):
        counts = [bar.get(group, 0) for bar in bars.values()]
        drawn = panel.barh(list(bars), counts, left=reached, color=color, edgecolor="white", label=group)
        panel.bar_label(drawn, [str(count) if count > 9 else "" for count in counts], label_type="center", fontsize=7)
        reached = [left + count for left, count in zip(reached, counts, strict=True)]
    panel.invert_yaxis()
    panel.set_xlabel("instructions of the main loop", fontsize=8)
    panel.set_title("\n".join(headings(found)), fontsize=7, loc="left")
    panel.tick_params(labelsize=8)
    panel.legend(fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    panel.spines[["top", "right"]].set_visible(False)
    return save(figure, path, dpi=110, bbox_inches="tight")


def _loops(found: dict) -> dict[str, dict[str, int]]:
    """The main loops that are there, by the kernel's letter and the part's name; those that are alike in what matters once."""
    loops = {}
    for letter, kernel in _lettered(found):
        for names in _alike(kernel).values():
            if loop := kernel["parts"][names[0]]["main_loop"]:
                loops[letter + ", ".join(names)] = loop
    return loops


def _by_group(loop: dict[str, int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, times in loop.items():
        group = GLOSSARY[name].group if name in GLOSSARY else "other"
        counts[group] = counts.get(group, 0) + times
    return counts


def _table(columns: list[Column]) -> Table:
    shown = Table()
    shown.add_column("", min_width=max(map(len, GLOSSARY)))
    for column in columns:
        shown.add_column(column.heading, justify="right")
    group = None
    for name, entry in GLOSSARY.items():
        if any(name in column.cells for column in columns):
            if group not in (None, entry.group):
                shown.add_section()
            group = entry.group
            shown.add_row(name, *(column.cells.get(name, "-") for column in columns))
    shown.add_section()
    shown.add_row("all", *(column.all for column in columns))
    return shown


def sentences(names: Iterable[str]) -> list[str]:
    """The glossary's lines of some instructions."""
    return [_sentence(name, entry) for name, entry in explained(names).items()]


def _sentence(name: str, entry: Entry) -> str:
    since = "" if entry.since == "all" else f", since {entry.since}"
    return f"{name} ({entry.group}{since}): {entry.meaning}" + (f". {entry.cost}" if entry.cost else "")
