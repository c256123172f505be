"""What a rung's waits are for: the same file without one, in the simulator, which names the race, and timed on a GPU."""

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
    assert rung.module.__file__ is not None
    lines = Path(rung.module.__file__).read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != statement]
    if len(kept) == len(lines):
        raise ValueError(f"{statement!r} must be a line of rung {rung.number}, got none like it in {rung.name}.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{rung.name}_without.py"
        path.write_text("".join(kept))
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
