"""Numbers in documents, and where each of them comes from.

A section of a page, from one heading to the next, names the sources of its numbers in a comment that the rendered page does not
show:

    <!-- numbers
    host: benchmarks/results/host-h200-2026-11-24.json
    tune: strobe.lab.bench.tune
    14.9 us = host.warm["strobe.attention, causal"].median_us
    2.4 to 2.9 times = [point.ms["100 %"] / point.ms["safe"] for point in redo.points]
    within 2 % = tune.TOLERANCE
    700 W = cited: H200 data sheet
    -->

`NAME: FILE.json` and `NAME: MODULE` name a source, for the whole page. `WORDS = EXPRESSION` says where the numbers in WORDS
come from, which stand in the section just so. The expression is Python over the named sources. Its value is compared with as
many digits as are written: a value for each number, or, of "2.4 to 2.9", any values, their least and greatest; with a % a
share. `WORDS = cited: WHERE` is somebody else's number, and not compared.

`<!-- no measurement: WHY -->` in front of a paragraph or table says that its numbers are settings, arithmetic or a rule.
Numbers in generated blocks and in blocks of code have their own tests.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from strobe.lab.bench import report

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\.?\w)")
UNITS = (
    r"[TG]FLOP/s", r"[TG]B/s", "[num]s", "s", "%", "W", "m?J", "[GM]Hz", "cycles?", "microseconds", "milliseconds", "seconds?",
    "minutes?", "hours?", r"times (?:as|its|longer|slower|faster|less|more)", "x (?:faster|slower)",
)  # fmt: skip
MEASURED = re.compile(
    rf"(?<![\w.^-])\d+(?:\.\d+)?(?:(?:, | and | to | or |-)\d+(?:\.\d+)?)* ?(?:{'|'.join(UNITS)})(?!\w)"  # 15.4 us, 3 and 4 %
    r"|(?<![\w.^-])(?<!PyTorch )[012]\.\d\d(?![\d.\w])"  # a ratio, such as 1.07
)
_CELL = re.compile(r"[~<>]?-?\d+(?:\.\d+)?(?: ?%| us| ms)?(?: \([\d., ]+\))?(?: / \d+(?:\.\d+)?)*")


class Facts:
    """JSON, read by attributes: facts.warm["SDPA flash"].median_us; of a list, `facts.points(head_dim=64)` is the one entry
    that is so."""

    def __init__(self, raw: Any):
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, key: str | int) -> Any:
        return _facts(self.raw[key])

    def __iter__(self) -> Iterator[Any]:
        return map(_facts, self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def __call__(self, **where: object) -> Any:
        found = [entry for entry in self.raw if all(entry.get(key) == value for key, value in where.items())]
        if len(found) != 1:
            raise ValueError(f"one entry must have {where}, got {len(found)}")
        return _facts(found[0])


def _facts(raw: Any) -> Any:
    return Facts(raw) if isinstance(raw, (dict, list)) else raw


def busy(benchmark: Facts, point: Facts, name: str) -> float:
    """The share of its cycles at a point of a benchmark in which a contender's tensor cores did work that counts."""
    found = report.busy(benchmark.raw, point.raw, name)
    if found is None:
        raise ValueError(f"{name} must have run at the point, with its clock")
    return found


FUNCTIONS = {"busy": busy, "abs": abs, "min": min, "max": max, "sum": sum, "len": len, "mean": fmean, "median": median}


@dataclass(frozen=True)
class Section:
    """A heading with its text, without what is generated, code, or comments; and its references, as words -> expression."""

    title: str
    text: str
    references: dict[str, str]


def sections(page: str) -> tuple[list[Section], dict[str, str]]:
    """A page's sections, and the sources that it names: name -> file or module."""
    page = re.sub(r"<!-- begin: (.+?) -->.*?<!-- end: \1 -->", "", page, flags=re.DOTALL)
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    found, sources = [], dict[str, str]()
    for part in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        references: dict[str, str] = {}
        for comment in re.findall(r"<!-- numbers\n(.*?)-->", part, re.DOTALL):
            for line in comment.splitlines():
                left, mark, right = line.partition(" = ")
                if not mark:
                    left, mark, right = line.partition(": ")
                if not mark:
                    raise ValueError(f"a reference must be NAME: SOURCE or WORDS = EXPRESSION, got {line!r}")
                (references if mark == " = " else sources)[left.strip()] = right.strip()
        text = re.sub(r"<!-- no measurement: .+? -->\n.*?(?=\n\n|\Z)", "", part, flags=re.DOTALL)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r"`[^`]*`", "``", re.sub(r"\]\([^)]*\)", "]", text))
        found.append(Section(part.partition("\n")[0].strip("# "), _plain(text), references))
    return found, sources


def _plain(text: str) -> str:
    """Without the ends of a paragraph's lines; a table's stay."""
    return re.sub(r"(?<=[^\n|])\n(?=[^\n|])", " ", text)


def wrong(page: str, root: Path) -> list[str]:
    """A sentence for each reference of a page that does not hold, and for each measured number that has none."""
    found, named = sections(page)
    sources = {name: _source(where, root) for name, where in named.items()}
    return [
        f"{section.title}: {fault}"
        for section in found
        for fault in [*_false(section, sources), *(f"{number!r} has no reference" for number in unreferenced(section))]
    ]


def _source(where: str, root: Path) -> Any:
    return Facts(json.loads((root / where).read_text())) if where.endswith(".json") else importlib.import_module(where)


def _false(section: Section, sources: dict[str, Any]) -> Iterator[str]:
    for words, expression in section.references.items():
        if not _alone(words).search(section.text):
            yield f"{words!r} is not in the text"
        elif not expression.startswith("cited: "):
            try:
                value = eval(expression, {"__builtins__": {}} | FUNCTIONS | sources)
            except Exception as error:
                yield f"{words!r} = {expression}: {error!r}"
                continue
            values = [value] if isinstance(value, (int, float)) else list(value)
            if not says(words, values):
                yield f"{words!r} is written, {', '.join(f'{value:.5g}' for value in values)} was found"


def _alone(words: str) -> re.Pattern[str]:
    """Words that are no part of a longer number or word."""
    return re.compile(rf"(?<![\w.]){re.escape(words)}(?!\w)")


def says(words: str, values: Sequence[float]) -> bool:
    """Whether the numbers in some words are these values, to the digits written; of "2 to 5", their least and greatest."""
    written = NUMBER.findall(words)
    if len(written) == 2 and " to " in words:
        values = min(values), max(values)
    share = 100 if "%" in words else 1
    return len(written) == len(values) and all(
        math.isclose(float(number), value * share, rel_tol=1e-9, abs_tol=0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9)
        for number, value in zip(written, values, strict=True)
    )


def unreferenced(section: Section) -> list[str]:
    """What looks measured in a section, by its unit or as a cell of a table, and has no reference."""
    text = section.text
    for words in sorted(section.references, key=len, reverse=True):
        text = _alone(words).sub("", text)
    cells = [cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.split("|")[2:-1]]
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    return [*MEASURED.findall(prose), *(cell for cell in cells if _CELL.fullmatch(cell))]
