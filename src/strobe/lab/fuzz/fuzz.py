"""`strobe fuzz`: random problems through the public door against the float64 specification, by workers that may die.

The parent hands out numbers; each worker, a process of its own, draws their cases (`fuzz_cases`), runs and checks them
(`fuzz_run`) and tells what became of them. A worker that dies or takes too long costs its case and is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from strobe.device import KNOWN
from strobe.lab.fuzz import caches
from strobe.lab.fuzz.caches import CacheCase
from strobe.lab.fuzz.cases import FAMILY, Case, drawn
from strobe.lab.fuzz.compiled import compiled
from strobe.lab.fuzz.run import Outcome, outcome

DEADLINE = 120.0
"""Seconds that a case may take, with what is compiled for it and with a worker's start."""

GRACE = 15.0
"""Seconds that running cases may still take when a campaign's time is up."""

SMALLER_SECONDS = 60.0
"""Seconds that the search for the smallest cases of all failures may take."""

CACHES = 2 * 10**9
"""Cases of this number and above are caches."""

AnyCase = Case | CacheCase

Kind = tuple[str, str]
"""What failures have in common: how it failed, and its words without numbers."""


@dataclass(frozen=True)
class Failure:
    number: int | None
    case: AnyCase
    outcome: Outcome
    smallest: AnyCase | None = None
    arch: str | None = None
    """What it was compiled for, if it did not run."""

    @property
    def kind(self) -> Kind:
        return self.outcome.kind, re.sub(r"-?(\d+\.)?\d+(e[-+]\d+)?|\[[^]]*\]|nan|inf", "#", self.outcome.words)[:80]

    def command(self) -> str:
        """What runs the smallest case that is known."""
        where = f"--arch {self.arch} " if self.arch else ""
        if self.smallest is None and self.number is not None:
            return f"strobe fuzz {where or f'--device {self.case.device} '}--case {self.number}"
        return f'strobe fuzz {where}--case "{self.smallest or self.case}"'


@dataclass
class Found:
    """What a campaign has found so far."""

    arch: str | None = None
    cases: int = 0
    features: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    cut_off: int = 0
    """How many cases were still running at the end."""

    def add(self, number: int | None, case: AnyCase, of: Outcome) -> None:
        self.cases += 1
        if of.bad:
            self.failures.append(Failure(number, case, of, arch=self.arch))
        elif of.kind == "refused":
            self.refusals[re.sub(r"\d+", "#", of.words)[:100]] += 1
        else:
            self.features.update(case.features())

    def by_kind(self) -> dict[Kind, list[Failure]]:
        kinds: dict[Kind, list[Failure]] = {}
        for failure in self.failures:
            kinds.setdefault(failure.kind, []).append(failure)
        return kinds


# ---- workers


Run = Callable[[Any], Outcome]
"""What a worker does with a case."""


def _work(tasks: Connection, device: str, run: Run) -> None:
    """A worker: takes numbers or cases, and answers each with its outcome, until it is ended."""
    _prepare(device)
    while True:
        task = tasks.recv()
        tasks.send(run(case_of(task, _kind(device)) if isinstance(task, int) else task))


def case_of(number: int, device: str) -> AnyCase:
    """The case of a number, on "cpu", "cuda" or "simulator"."""
    return caches.drawn(number - CACHES, device) if number >= CACHES else drawn(number, device)


def _kind(device: str) -> str:
    """The kind of device that cases are drawn for: "cuda" where they are compiled for an arch."""
    return "cuda" if device in KNOWN else device


def _prepare(device: str) -> None:
    """Settings of a process that runs cases; on a CPU plain Triton kernels run in Triton's interpreter, and nothing but the
    compiler runs where kernels are compiled for an arch."""
    if device in KNOWN:
        os.environ.pop("TRITON_INTERPRET", None)
    elif device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which PyTorch wants of deterministic products
    import torch

    torch.set_num_threads(1)


class Worker:
    """A process that runs cases, one at a time."""

    def __init__(self, device: str, run: Run):
        context = multiprocessing.get_context("spawn")
        self.device, self.run = device, run
        self.tasks, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, device, run), daemon=True)
        self._process.start()
        theirs.close()
        self.task: int | AnyCase | None = None
        self._since = time.monotonic()

    def start(self, task: int | AnyCase) -> None:
        self.task, self._since = task, time.monotonic()
        with suppress(OSError):  # it died, which `result` will say
            self.tasks.send(task)

    @property
    def late(self) -> bool:
        return self.task is not None and time.monotonic() - self._since > DEADLINE

    def result(self) -> Outcome:
        """The Outcome of the worker's task, which is done, or ended the process, or takes too long."""
        if self.late and not self.tasks.poll():
            self.end()
            return Outcome("hung", f"no result after {DEADLINE:g} s")
        try:
            found = self.tasks.recv()
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode or 0
            return Outcome("died", signal.Signals(-code).name if code < 0 else f"with exit status {code}")
        if not found.lost:
            self.task = None
        return found

    @property
    def alive(self) -> bool:
        """Whether it takes another task."""
        return self.task is None and self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self.tasks.close()


# ---- a campaign


def campaign(
    device: str, seconds: float, workers: int = 1, first: int = 0, most: int | None = None,
    on_step: Callable[[Found], None] = lambda found: None, run: Run | None = None,
) -> Found:  # fmt: skip
    """Runs the cases of first, first + 1, ... for so many seconds, or so many of them, then looks for smaller cases of what
    failed. device: "cuda", "cpu", "simulator", or an arch for which cases are compiled. A worker takes a whole family of cases,
    whose kernels it has compiled then. run: what it does with a case; default: `run_on`. What still runs `GRACE` seconds after
    the end is cut off."""
    run = run or run_on(device)
    found, deadline = Found(device if device in KNOWN else None), time.monotonic() + seconds
    families = _families(first, most, FAMILY if _kind(device) == "cuda" else 8, caches=device != "simulator")
    crew: dict[Worker, Iterator[int]] = {}
    idle = [Worker(device, run) for _ in range(workers)]
    while True:
        for worker in idle:
            number = None
            while number is None and time.monotonic() < deadline:
                if worker not in crew:
                    numbers = next(families, None)
                    if numbers is None:
                        break
                    crew[worker] = numbers
                number = next(crew[worker], None)
                if number is None:
                    del crew[worker]
            if number is None:
                crew.pop(worker, None)
                worker.end()
            else:
                worker.start(number)
        busy = list(crew)
        if not busy:
            break
        if time.monotonic() > deadline + GRACE:
            found.cut_off = len(busy)
            for worker in busy:
                worker.end()
            break
        idle = []
        ready = wait([worker.tasks for worker in busy], 1.0)
        for worker in busy:
            if worker.tasks in ready or worker.late:
                assert isinstance(worker.task, int)
                number = worker.task
                found.add(number, case_of(number, _kind(device)), worker.result())
                on_step(found)
                idle.append(worker if worker.alive else _replaced(worker, crew))
    found.failures = _smallest(found, device, run)
    return found


def _families(first: int, most: int | None, size: int, caches: bool) -> Iterator[Iterator[int]]:
    """Numbers from first on, by families; without an end each fourth family is one of caches, if there are any."""
    if most is not None:
        yield from _consecutive(first, first + most, size)
        return
    of_attention, of_caches = (_consecutive(start, None, size) for start in (first, first + CACHES))
    for turn in count():
        yield next(of_caches if caches and turn % 4 == 3 else of_attention)


def _consecutive(start: int, end: int | None, size: int) -> Iterator[Iterator[int]]:
    while end is None or start < end:
        stop = (start // size + 1) * size
        yield iter(range(start, stop if end is None else min(stop, end)))
        start = stop


def _replaced(worker: Worker, crew: dict[Worker, Iterator[int]]) -> Worker:
    """Another worker in place of one that died or hung, with the rest of its numbers."""
    numbers = crew.pop(worker)
    worker.end()
    other = Worker(worker.device, worker.run)
    crew[other] = numbers
    return other


def _smallest(found: Found, device: str, run: Run) -> list[Failure]:
    """The failures, of which the first of each kind is made smaller, unless each try would take its deadline."""
    failures: list[Failure] = []
    deadline = time.monotonic() + SMALLER_SECONDS
    for same in found.by_kind().values():
        first, *others = same
        if first.outcome.kind == "hung":
            failures += same
            continue
        smallest = _smaller(Worker(device, run), first, deadline)
        failures += [replace(first, smallest=smallest), *others]
    return failures


def _smaller(worker: Worker, failure: Failure, deadline: float) -> AnyCase:
    """A case with few facts that fails alike, found by putting facts back to their simplest, one after the other."""
    case = failure.case
    progress = True
    while progress:
        progress = False
        for simple in case.simpler():
            if time.monotonic() > deadline:
                break
            worker.start(simple)
            of = worker.result() if _done(worker, deadline) else Outcome("right")
            if not worker.alive:
                worker.end()
                worker = Worker(worker.device, worker.run)
            if of.kind == failure.outcome.kind:
                case, progress = simple, True
                break
    worker.end()
    return case


def _done(worker: Worker, deadline: float) -> bool:
    """Waits for a worker's result, until the deadline or its own."""
    while not worker.late and time.monotonic() < deadline:
        if worker.tasks.poll(0.5):
            return True
    return worker.late


# ---- the command


def fuzz(device: str, seconds: float, workers: int, first: int) -> dict:
    """Runs a campaign, tells each failure when it comes, and shows all at the end. Returns its facts, of which "failures"
    is empty if nothing was found."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting workers", total=seconds)
        start, told = time.monotonic(), 0

        def step(found: Found) -> None:
            nonlocal told
            for failure in found.failures[told:]:
                _tell(progress.console, failure.outcome.kind, failure.outcome.words, failure.command())
            told = len(found.failures)
            words = f"{found.cases} cases, {found.refusals.total()} refused, {len(found.failures)} failed"
            progress.update(task, completed=time.monotonic() - start, description=words)

        found = campaign(device, seconds, workers, first, on_step=step)
    facts = _facts(found, device, first)
    show(facts)
    return facts


def run_on(device: str) -> Run:
    """What is done with a case: it runs on "cuda", "cpu" or "simulator", or is compiled for an arch."""
    return partial(compiled, arch=device) if device in KNOWN else outcome_of


def outcome_of(case: AnyCase) -> Outcome:
    """Runs a case of any kind."""
    if isinstance(case, CacheCase):
        return caches.outcome(case)
    if case.device == "simulator":
        from strobe.lab.fuzz.simulated import simulated  # which imports Triton: `_prepare` must come before

        return simulated(case)
    return outcome(case)


def told(text: str) -> AnyCase:
    """The case of what `str` made. ValueError for other text."""
    return CacheCase.told(text) if "door='cache'" in text else Case.told(text)


def fuzz_one(text: str, device: str) -> Outcome:
    """Does with one case here what a campaign does, told by its number or its facts, and prints it. ValueError for other
    text."""
    case = case_of(int(text), _kind(device)) if text.isdigit() else told(text)
    _prepare(device if device in KNOWN else case.device)
    console = Console()
    console.print(f"case      {escape(str(case))}", highlight=False, soft_wrap=True)
    of = run_on(device)(case)
    console.print(f"outcome   {of.kind}{': ' * bool(of.words)}{escape(of.words)}", highlight=False, soft_wrap=True)
    return of


def _facts(found: Found, device: str, first: int) -> dict[str, Any]:
    failures = [
        {
            "number": one.number,
            "case": str(one.case),
            "kind": one.outcome.kind,
            "words": one.outcome.words,
            "reproduce": one.command(),
        }
        for one in found.failures
    ]
    return {
        "what": "fuzz",
        "machine": device,
        "first": first,
        "cases": found.cases,
        "cut_off": found.cut_off,
        "refused": dict(found.refusals.most_common()),
        "features": dict(found.features.most_common()),
        "failures": failures,
    }


def show(facts: dict) -> None:
    """A table of what ran, why the rest was refused, and each failure with the line that reproduces it."""
    console = Console()
    table = Table(title=f"{facts['cases']} cases from {facts['first']} on, on {facts['machine']}")
    table.add_column("feature")
    table.add_column("right", justify="right")
    for name, times in sorted(facts["features"].items()):
        table.add_row(name, str(times))
    console.print(table)
    for reason, times in facts["refused"].items():
        console.print(f"refused {times:5d}   {reason}", markup=False, highlight=False, soft_wrap=True)
    if facts["cut_off"]:
        console.print(f"{facts['cut_off']} cases still ran at the end and were cut off", highlight=False)
    for failure in facts["failures"]:
        _tell(console, failure["kind"], failure["words"], failure["reproduce"])
    console.print(f"{len(facts['failures'])} failures" if facts["failures"] else "nothing was found", highlight=False)


def _tell(console: Console, kind: str, words: str, command: str) -> None:
    console.print(f"{kind}: {words}", markup=False, style="red", highlight=False, soft_wrap=True)
    console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
