"""What Nsight Compute measured: its CSV, of the details or of the raw page, as launches with metrics.

    ncu --import profile.ncu-rep --csv --page details      a line for each metric of each launch, by the labels of its tables
    ncu --import profile.ncu-rep --csv --page raw          a line for each launch, by the names of the metrics; units come first

Lines before the one that names the columns are the program's own output, or ncu's, and are passed over. ncu scales each
number by itself (8.33 ms, 977 us), so values keep their unit and are compared in base units.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FACTS = {
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC"),
}
"""Columns of the raw page that are no metrics, beside the NVTX ranges, whose names differ."""


@dataclass(frozen=True)
class Value:
    """A number in `unit` as ncu writes it ("ms", "Kbyte/block", "%", ""), or a word."""

    number: float | str
    unit: str = ""

    @property
    def base(self) -> float:
        """In seconds, bytes, Hz, ... ValueError of a word."""
        return float(self.number) * factor(self.unit)

    def to(self, unit: str) -> float:
        """In another unit of the same kind."""
        return self.base / factor(unit)


@dataclass
class Launch:
    """One launch of a kernel. metrics: by name (raw page), or by (section, label) (details page)."""

    kernel: str
    metrics: dict[str | tuple[str, str], Value] = field(default_factory=dict)


_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SCALED = re.compile(r"([numkKMGTP]?)(?:second|sec|s|byte|hz|Hz)$")


def factor(unit: str) -> float:
    """What a unit is worth in its base unit: "ms" 0.001, "Kbyte/block" 1000 (ncu counts in thousands), "%" 1."""
    above, _, below = unit.partition("/")
    return _factor(above) / _factor(below)


def _factor(unit: str) -> float:
    scaled = _SCALED.match(unit)
    return _PREFIXES[scaled[1]] if scaled else 1.0


def read(*texts: str) -> list[Launch]:
    """The launches of a CSV, or of several pages of one profile, joined. ValueError if a text is no CSV of ncu."""
    launches: dict[str, Launch] = {}
    for text in texts:
        rows = _rows(text)
        head = next(rows, None)
        if head is None:
            raise ValueError("a profile must be the output of `ncu --csv`, got a text without a line that names its columns")
        for number, name, metrics in _details(head, rows) if "Metric Name" in head else _raw(head, rows):
            launches.setdefault(number, Launch(name)).metrics.update(metrics)
    return list(launches.values())


def read_file(path: Path) -> list[Launch]:
    """The launches of a file. ValueError if there is no such file, it is no CSV of ncu, or nothing was profiled."""
    try:
        launches = read(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"a profile must be a readable CSV file, got {path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{error} ({path})") from None
    if not launches:
        raise ValueError(f"a profile must hold a launch, got {path} without one")
    return launches


def _rows(text: str) -> Iterator[list[str]]:
    """From the line that names the columns on."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith('"ID",') and '"Kernel Name"' in line:
            yield next(csv.reader([line]))
            break
    yield from (row for row in csv.reader(line for line in lines if line.startswith('"')) if row)


Found = Iterable[tuple[str, str, dict[str | tuple[str, str], Value]]]
"""ID of a launch, name of its kernel, metrics."""


def _details(head: list[str], rows: Iterator[list[str]]) -> Found:
    for row in rows:
        fields = dict(zip(head, row, strict=False))
        value = _value(fields.get("Metric Value", ""), fields.get("Metric Unit", ""))
        label = fields.get("Metric Name", "")  # empty in the lines that hold advice
        section = fields.get("Section Name", "")
        # What was asked for by --metrics has its own name here too.
        key: str | tuple[str, str] = label if "__" in label else (section, label)
        yield fields["ID"], short(fields["Kernel Name"]), {key: value} if label and value else {}


def _raw(head: list[str], rows: Iterator[list[str]]) -> Found:
    units = dict(zip(head, next(rows, []), strict=False))
    for row in rows:
        fields = dict(zip(head, row, strict=False))
        values = {name: _value(text, units.get(name, "")) for name, text in fields.items() if name not in FACTS}
        yield fields["ID"], short(fields["Kernel Name"]), {name: value for name, value in values.items() if value}


def _value(text: str, unit: str) -> Value | None:
    """None for what ncu could not measure."""
    if text.strip().lower() in ("", "n/a", "nan", "(nan)"):
        return None
    try:
        return Value(float(text.replace(",", "")), unit)
    except ValueError:
        return Value(text, unit)


def short(kernel: str) -> str:
    """The name of a kernel without its return type, template arguments and parameters."""
    found = re.match(r"(?:void )?([\w:$~]+)", kernel)
    return found[1].split("::")[-1] if found else kernel
