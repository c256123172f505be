"""Attention kernels with a mistake in them: text of their source is replaced, and the result is a module of its own."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from problems import Case, Results, Tensors, check, describe, tensors

from strobe.sim import SimulationError, attention
from strobe.sim.attention import forward_launch

ORDERS = (("in_order", 0), ("random", 1), ("random", 2), ("late", 0), ("early", 0))
"""Orders, with seeds, in each of which a mistake must be found."""

SM100_HOST = "strobe.kernels.sm100.launch"

UNEVEN = tuple(("uneven", number) for number in range(4))
"""Each partition in turn is left behind by the others."""

Run = Callable[[str, int], Any]
"""Of an order and a seed."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Kernel:
    """A module with a kernel, and what it usually runs here. start: of a copy of the module, a Bug, inputs and a config, what
    runs it in an order and checks its results; None: of a `forward_kernel`."""

    module: str
    arch: int
    case: Case
    config: Any
    start: Callable[[ModuleType, Bug, Tensors, Any], Run] | None = None


@dataclass(frozen=True)
class Bug:
    """In `module`, the kernel's own or one that it uses, a text that occurs once becomes another, for each of `edits`.

    errors: one of which a simulation raises; none if only the numbers show it. says: words of every message. case, config:
    what differs from the kernel's usual. ctas, resident: how many share its tiles, and run at a time. launches: in a row.
    """

    what: str
    kernel: Kernel
    module: str
    edits: tuple[tuple[str, str], ...]
    errors: tuple[type[SimulationError], ...]
    says: tuple[str, ...] = ()
    case: Case | None = None
    config: dict = field(default_factory=dict)
    ctas: int = 1
    resident: int = 1
    launches: int = 1

    def __str__(self) -> str:
        return self.what


def one_edit(kernel: Kernel, module: str, what: str, before: str, after: str, errors, **more) -> Bug:
    """One text in `module` becomes another."""
    return Bug(what, kernel, module, ((before, after),), errors, **more)


def assert_right_unless_broken(kernel: Kernel, folder: Path) -> None:
    """A copy without a mistake gives the right numbers, in every order and with many seeds."""
    run = _run(Bug("none", kernel, kernel.module, (), ()), folder)
    for order, seed in (*ORDERS, *(("random", seed) for seed in range(3, 20)), *UNEVEN):
        run(order, seed)


def assert_found(bug: Bug, folder: Path, orders=ORDERS) -> None:
    """In every order."""
    run = _run(bug, folder)
    for order, seed in orders:
        with pytest.raises(bug.errors or AssertionError) as raised:
            run(order, seed)
        missing = [words for words in bug.says if words not in str(raised.value)]
        assert not missing, f"{order} {seed}: {raised.value}"


def assert_found_in_some_order(bug: Bug, folder: Path) -> None:
    run, found = _run(bug, folder), 0
    for order, seed in (*ORDERS, *UNEVEN):
        try:
            run(order, seed)
        except bug.errors:
            found += 1
    assert found


def _run(bug: Bug, folder: Path) -> Run:
    """Runs the broken kernel in an order and checks its numbers."""
    if bug.module == SM100_HOST:
        return _by_host(bug, altered(bug.module, bug.edits, folder), folder)
    kernel = altered_over(tuple(dict.fromkeys((bug.module, bug.kernel.module))), bug.edits, folder)
    t = tensors(bug.case or bug.kernel.case, torch.float16)
    config = replace(bug.kernel.config, **bug.config)
    return (bug.kernel.start or _forward)(kernel, bug, t, config)


def _by_host(bug: Bug, host: ModuleType, folder: Path) -> Run:
    """Runs the kernel as it is, with the arguments of a broken host half."""
    run = _run(replace(bug, module=bug.kernel.module, edits=()), folder)

    def by_host(order: str, seed: int) -> None:
        with mock.patch.object(attention, "sm100_launch", host):
            run(order, seed)

    return by_host


def _forward(kernel: ModuleType, bug: Bug, t: Tensors, config) -> Run:
    def run(order: str, seed: int) -> None:
        launch, out, lse, notes = forward_launch(kernel, bug.kernel.arch, *describe(t), config, bug.ctas)
        for number in range(bug.launches):
            if number:
                out.fill_(torch.nan)
            launch.simulate(order, seed)
            check(Results(out, lse), t, ("out", "lse"))
        assert notes is None or not notes.any()

    return run


def altered(module: str, edits: tuple[tuple[str, str], ...], folder: Path) -> ModuleType:
    """A copy of a module with other text. AssertionError if a text does not occur in it exactly once."""
    source = Path(str(importlib.import_module(module).__file__)).read_text()
    for before, after in edits:
        assert source.count(before) == 1, f"{module} has this {source.count(before)} times, not once: {before!r}"
        source = source.replace(before, after)
    name = f"altered_{next(_numbers)}_{module.replace('.', '_')}"
    path = folder / f"{name}.py"  # on disk, because Triton and the simulator's messages read the source
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def altered_over(modules: Sequence[str], edits: tuple[tuple[str, str], ...], folder: Path) -> ModuleType:
    """A copy of the last of some modules, each of which may use those before it, where the first one has other text."""
    copies = [altered(modules[0], edits, folder)]
    for module in modules[1:]:
        copy = altered(module, (), folder)
        used = sum(_used_instead(copy, name, other) for name, other in zip(modules, copies, strict=False))
        assert used or module != modules[-1], f"{module} uses nothing of {modules[:-1]}"
        copies.append(copy)
    return copies[-1]


def _used_instead(user: ModuleType, module: str, copy: ModuleType) -> int:
    """Let a module use what is of a copy where it used what is of another module. How many names that are."""
    original = vars(importlib.import_module(module))
    names = [name for name, value in vars(copy).items() if not name.startswith("__") and value is not original.get(name)]
    changed = [name for name in names if name in original and vars(user).get(name) is original[name]]
    for name in changed:
        setattr(user, name, getattr(copy, name))
    return len(changed)
