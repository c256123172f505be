"""A rung's file with one line changed: without a wait, to see what it is for, or with another layout, to see what it does."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from strobe.lab.ladder.checked import simulated
from strobe.ladder import Rung


@dataclass(frozen=True)
class Edited(Rung):
    """A rung whose module is another file."""

    file: ModuleType | None = None

    @property
    def module(self) -> ModuleType:
        assert self.file is not None
        return self.file


@contextmanager
def without(rung: Rung, statement: str) -> Iterator[Rung]:
    """The rung without each line that is `statement`, within the `with`. ValueError if there is no such line."""
    lines = _text(rung).splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != statement]
    if len(kept) == len(lines):
        raise ValueError(f"{statement!r} must be a line of rung {rung.number}, got none like it in {rung.name}.py")
    with _of_text(rung, "".join(kept), "without") as edited:
        yield edited


@contextmanager
def variant(rung: Rung, old: str, new: str) -> Iterator[Rung]:
    """The rung with other words in one place, within the `with`. ValueError if they do not stand in it just once."""
    text = _text(rung)
    if text.count(old) != 1:
        raise ValueError(f"{old!r} must stand in rung {rung.number} once, got {text.count(old)} times in {rung.name}.py")
    with _of_text(rung, text.replace(old, new), "variant") as edited:
        yield edited


def _text(rung: Rung) -> str:
    assert rung.module.__file__ is not None
    return Path(rung.module.__file__).read_text()


@contextmanager
def _of_text(rung: Rung, text: str, how: str) -> Iterator[Rung]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{rung.name}_{how}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        facts = {name: getattr(rung, name) for name in Rung.__dataclass_fields__}
        yield Edited(**facts, file=module)


ORDERS = ("late", "random", "in_order")
"""Orders of the simulator that are tried until one finds something. Races are found in any."""


def told(rung: Rung, statement: str) -> str | None:
    """What the simulator says of the rung without a statement; None if it finds nothing."""
    with without(rung, statement) as edited:
        for order in ORDERS:
            found = simulated(edited, torch.bfloat16, order)
            if "wrong" in found:
                return found["wrong"]
    return None
