"""`strobe mutate`: mutants of a kernel in the simulator, each in a process of its own; which of them nobody notices."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import strobe
from strobe.lab.simulated.mutants import Mutant, mutants_of, mutate, sample
from strobe.lab.simulated.simulate import launches_of, module_of
from strobe.sim import Deadlock, SimulationError, Unsupported

OURS = Path(strobe.__file__).parents[2] / "tests" / "sim" / "mutated.py"
"""Problems for our kernels: a file that defines SUBJECTS, name -> what makes a Subject."""

ORDERS = (("in_order", 0), ("random", 1), ("late", 0), ("early", 0), *(("uneven", number) for number in range(4)))
"""Orders, with seeds, of a kernel that does not say in which."""

CHECK, DEADLOCK, NUMBERS, NO_END, INVALID = "check", "deadlock", "numbers", "no end", "invalid"
EQUIVALENT, SURVIVED = "equivalent", "survived"
RESULTS = {
    CHECK: "a check of the simulator",
    DEADLOCK: "a deadlock",
    NUMBERS: "wrong numbers",
    NO_END: "no end within the time limit",
    INVALID: "no kernel: it does not compile, or the simulator has no model of what it does",
    EQUIVALENT: "known to compute the same; not run",
    SURVIVED: "nothing found",
}

LEAST_LIMIT, LIMIT = 30.0, 6.0
"""Seconds that every mutant has, and how many times as long as all trials of the kernel itself."""


@dataclass(frozen=True)
class Trial:
    """what: a problem and an order. run: raises SimulationError or AssertionError if anything is wrong."""

    what: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """modules: whose jitted functions are mutated. trials: the first that fails ends a mutant. helpers: names of functions that
    do nothing but synchronise. equivalent: mutants that compute the same, their keys -> why."""

    modules: Sequence[ModuleType]
    trials: Sequence[Trial]
    helpers: Sequence[str] = ()
    equivalent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """result: a key of RESULTS. trial: what found it. says: the message."""

    result: str
    trial: str = ""
    says: str = ""
    seconds: float = 0.0


# ---- which kernel


def subject_of(kernel: str) -> Subject:
    """The Subject for the name of one of our kernels, or for a file that defines `simulation()` as for `strobe simulate`.
    ValueError if there is neither."""
    ours = subjects()
    if kernel in ours:
        return ours[kernel]()
    if not Path(kernel).exists():
        raise ValueError(f"KERNEL must be a file that defines simulation(), or one of {', '.join(ours)}, got {kernel!r}")
    return of_file(Path(kernel))


def subjects() -> dict[str, Callable[[], Subject]]:
    """Our kernels. None outside of a clone, where the tests and their problems are not."""
    return module_of(OURS).SUBJECTS if OURS.exists() else {}


def of_file(path: Path) -> Subject:
    """The jitted functions of a file, tried by its `simulation()`."""
    factory = launches_of(path)

    def run(order: str, seed: int) -> None:
        launch = factory()
        launch.simulate(order, seed)
        launch.check()

    trials = [Trial(f"{order} {seed}", partial(run, order, seed)) for order, seed in ORDERS]
    return Subject([sys.modules[path.stem]], trials)


# ---- one mutant


def attempt(kernel: str, mutant: Mutant | None) -> Outcome:
    """All trials of a kernel with a mistake, up to the first that finds something; of the kernel itself, without one."""
    subject, start = subject_of(kernel), time.perf_counter()
    if mutant is not None:
        mutate(mutant, subject.modules)
    for trial in subject.trials:
        result, says = _result(trial.run)
        if result != SURVIVED:
            return Outcome(result, trial.what, says, time.perf_counter() - start)
    return Outcome(SURVIVED, seconds=time.perf_counter() - start)


def _result(run: Callable[[], object]) -> tuple[str, str]:
    try:
        run()
    except Unsupported as error:
        return INVALID, f"Unsupported: {error}"
    except SimulationError as error:
        return DEADLOCK if isinstance(error, Deadlock) else CHECK, f"{type(error).__name__}: {error}"
    except AssertionError as error:
        return NUMBERS, str(error).strip()
    except Exception as error:
        return INVALID, f"{type(error).__name__}: {error}"
    return SURVIVED, ""


def _attempt_for(connection: Connection, kernel: str, mutant: Mutant | None) -> None:
    """The body of a process."""
    import torch

    torch.set_num_threads(1)
    connection.send(attempt(kernel, mutant))
    connection.close()


# ---- all of them


def campaign(kernel: str, number: int, seed: int, workers: int, only: str | None = None) -> dict[str, Any]:
    """So many mutants of a kernel, and what became of each, as a JSON object. only: the mutant of this name alone, which is run
    even if it is known to compute the same. ValueError if the kernel itself does not pass, or has no such mutant."""
    subject = subject_of(kernel)
    every = mutants_of(subject.modules, subject.helpers)
    chosen = sample(every, number, seed) if only is None else [mutant for mutant in every if mutant.name == only]
    if not chosen:
        raise ValueError(f"{kernel} has no mutant {only!r}, but {', '.join(mutant.name for mutant in every[:3])}, ...")
    with _server() as processes:
        ((_, itself),) = _attempts(processes, kernel, [None], 1, 600.0)
        if itself.result != SURVIVED:
            raise ValueError(f"{kernel} itself fails ({itself.trial}): {itself.says or itself.result}")
        limit = max(LEAST_LIMIT, LIMIT * itself.seconds)
        known = [mutant for mutant in chosen if only is None and mutant.key in subject.equivalent]
        found = {m.name: _facts(m, Outcome(EQUIVALENT, says=subject.equivalent[m.key])) for m in known}
        rest = [mutant for mutant in chosen if mutant.name not in found]
        with Progress(console=Console(stderr=True)) as progress:
            for mutant, outcome in progress.track(
                _attempts(processes, kernel, rest, workers, limit), total=len(rest), description=kernel
            ):
                assert mutant is not None
                found[mutant.name] = _facts(mutant, outcome)
    counts = Counter(facts["result"] for facts in found.values())
    return {
        "kernel": kernel,
        "seed": seed,
        "mutants": len(every),
        "tried": len(chosen),
        "trials": len(subject.trials),
        "seconds": round(itself.seconds, 1),
        "limit_seconds": round(limit),
        "counts": {result: counts[result] for result in RESULTS},
        "found": [found[mutant.name] for mutant in chosen],
    }


def missed(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [mutant for mutant in facts["found"] if mutant["result"] == SURVIVED]


def _facts(mutant: Mutant, outcome: Outcome) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "key": mutant.key,
        "before": mutant.before,
        "after": mutant.after,
        "result": outcome.result,
        "trial": outcome.trial,
        "says": outcome.says[:300],
        "seconds": round(outcome.seconds, 2),
    }


@contextmanager
def _server() -> Iterator[Any]:
    """Processes that begin with everything imported: forks of one that has no threads. In it Triton's interpreter runs what is
    not simulated, which must be said before Triton is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["strobe.sim.attention", "strobe.lab.simulated.mutate", "torch.fx.experimental.symbolic_shapes"]
    )
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield context
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass(frozen=True)
class _Running:
    mutant: Mutant | None
    process: Any
    deadline: float


def _attempts(
    processes, kernel: str, mutants: Sequence[Mutant | None], workers: int, limit: float
) -> Iterator[tuple[Mutant | None, Outcome]]:
    """In whatever order they end."""
    waiting, running = list(reversed(mutants)), dict[Connection, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                mutant = waiting.pop()
                ours, theirs = processes.Pipe(duplex=False)
                process = processes.Process(target=_attempt_for, args=(theirs, kernel, mutant), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Running(mutant, process, time.monotonic() + limit)
            soonest = min(one.deadline for one in running.values())
            ready = wait(list(running), max(0.0, soonest - time.monotonic()))
            late = [connection for connection, one in running.items() if one.deadline <= time.monotonic()]
            for connection in {*ready, *late}:
                assert isinstance(connection, Connection)
                one = running.pop(connection)
                yield one.mutant, _end(connection, one.process, limit)
    finally:
        for one in running.values():
            one.process.kill()


def _end(connection: Connection, process, limit: float) -> Outcome:
    try:
        return connection.recv() if connection.poll() else Outcome(NO_END, seconds=limit)
    except EOFError:
        return Outcome(INVALID, says="its process died")
    finally:
        process.kill()
        process.join()
        connection.close()


# ---- what is shown


def facts_of(subjects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"what": "mutants", "results": RESULTS, "subjects": list(subjects)}


def table(kernels: Sequence[dict[str, Any]]) -> Table:
    """A row a kernel."""
    shown = Table("kernel", "mutants", *RESULTS, box=None)
    for facts in kernels:
        counts = [str(facts["counts"][result]) for result in RESULTS if result != SURVIVED]
        shown.add_row(facts["kernel"], f"{facts['tried']} of {facts['mutants']}", *counts, share(facts))
    return shown


def share(facts: dict[str, Any]) -> str:
    """How many mutants survive, of those that compile and are not equivalent: "3 of 40 (7.5%)"."""
    real = facts["tried"] - facts["counts"][INVALID] - facts["counts"][EQUIVALENT]
    return f"{len(missed(facts))} of {real}" + (f" ({len(missed(facts)) / real:.1%})" if real else "")


def survivors(facts: dict[str, Any]) -> Table:
    """A table of the mutants that nothing noticed and nobody has called equivalent."""
    shown = Table("survivor", "source", "becomes", title=facts["kernel"], show_lines=True)
    for mutant in missed(facts):
        shown.add_row(*(escape(mutant[name]) for name in ("name", "before", "after")))
    return shown


def show(kernels: Sequence[dict[str, Any]]) -> None:
    console = Console()
    console.print(table(kernels))
    for facts in kernels:
        if missed(facts):
            console.print(survivors(facts))
