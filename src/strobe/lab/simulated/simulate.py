"""`strobe simulate`: a kernel in the simulator, in every order, with what was found; and its timeline."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table

from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import dense
from strobe.sim import Launch, Report, SimulationError
from strobe.sim.trace import Span, Timeline

Factory = Callable[[], Launch]
"""A fresh launch, with inputs and outputs of its own."""


def module_of(path: Path) -> ModuleType:
    """A Python file, imported; it finds its neighbours. ValueError if it is none or fails."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"FILE must be a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"FILE must be Python that can be imported, got {path}: {_told(error)}") from error
    finally:
        sys.path.pop(0)
    return module


def launches_of(path: Path) -> Factory:
    """What the function `simulation` of a Python file returns. ValueError if the file or the function fails, or there is none;
    the factory's, if it returns no Launch."""
    module = module_of(path)
    if not callable(getattr(module, "simulation", None)):
        raise ValueError(f"{path} must define simulation(), which returns a strobe.sim.Launch")

    def launch() -> Launch:
        try:
            made = module.simulation()
        except Exception as error:
            raise ValueError(f"simulation() of {path} failed: {_told(error)}") from error
        if not isinstance(made, Launch):
            raise ValueError(f"simulation() of {path} must return a strobe.sim.Launch, got {type(made).__name__}")
        return made

    return launch


def _told(error: Exception) -> str:
    """With its place, which a SyntaxError names itself."""
    last = extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{place}"


def attention(problem: AttentionProblem, backend: str, config=None) -> Factory:
    """Our own forward kernel on random inputs, checked against the reference."""
    from strobe.sim.attention import BACKENDS, forward_launch

    kernels, choose, arch = BACKENDS[backend]

    def launch() -> Launch:
        generator = torch.Generator().manual_seed(0)
        operands = _random_operands(problem, generator)
        made, out, lse, _notes = forward_launch(kernels, arch, problem, operands, config or choose(problem))
        made.check = lambda: _compare(problem, operands, out, lse)
        return made

    return launch


def _random_operands(problem: AttentionProblem, generator: torch.Generator) -> Operands:
    lengths = problem.lengths
    assert isinstance(lengths, Dense)

    def random(n: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(lengths.batch, n, heads, dim, generator=generator).to(problem.dtype)

    return Operands(
        random(lengths.seqlen_q, problem.heads_q, problem.head_dim),
        random(lengths.seqlen_kv, problem.heads_kv, problem.head_dim),
        random(lengths.seqlen_kv, problem.heads_kv, problem.head_dim_v),
    )


def _compare(problem: AttentionProblem, operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected, expected_lse = dense.attention(problem, operands)
    tolerance = 2e-2 if problem.dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=1e-3, rtol=1e-3)


def runs(orders: Sequence[str], seeds: int) -> Iterator[tuple[str, int]]:
    """Every order; those that take a seed with as many as asked."""
    for order in orders:
        yield from ((order, seed) for seed in range(seeds if order in ("random", "late", "uneven") else 1))


def simulate_all(factory: Factory, orders: Sequence[str], seeds: int, console: Console | None = None) -> int:
    """Simulate in every order, print a table; 1 if anything was found, else 0."""
    console = console or Console()
    table = Table("order", "seed", "CTAs", "steps", "shared memory", "tensor memory", "seconds", "result", box=None)
    found: list[str] = []
    with console.status("simulating") as status:
        for order, seed in runs(orders, seeds):
            status.update(f"simulating: {order}, seed {seed}")
            start = time.perf_counter()
            report, mistake = _one(factory, order, seed)
            seconds = f"{time.perf_counter() - start:.2f}"
            columns = ("",) * 4
            if report is not None:
                columns = (str(report.ctas), str(report.steps), f"{report.smem_bytes} B", f"{report.tmem_columns} columns")
            table.add_row(order, str(seed), *columns, seconds, mistake.split(":")[0] if mistake else "right")
            if mistake and mistake not in found:
                found.append(mistake)
    console.print(table)
    for mistake in found:
        console.print(mistake, style="red", markup=False, highlight=False)
    return 1 if found else 0


def _one(factory: Factory, order: str, seed: int) -> tuple[Report | None, str]:
    launch = factory()
    try:
        report = launch.simulate(order, seed)
        launch.check()
    except SimulationError as error:
        return None, f"{type(error).__name__}: {error}"
    except AssertionError as error:
        return None, f"wrong numbers: {str(error).strip()}"
    return report, ""


def draw_timeline(factory: Factory, path: Path) -> Path:
    """The timeline of a timed run's first CTA, as a picture."""
    from strobe.lab.timeline.timeline import draw

    return draw([timeline_of_run(factory().simulate("timed"), "simulated, by the cost model")], path)


def timeline_of_run(report: Report, title: str) -> Timeline:
    """What the units and the roles of the first CTA did: a role works whenever it does not wait."""
    units = [
        Span(span.track, "product" if span.track == "tensor core" else "copy", span.start, span.end)
        for span in report.spans
        if span.track not in report.lives
    ]
    waits = [span for span in report.spans if span.track in report.lives]
    spans = [*units, *(span for role in report.lives for span in _working(role, report.lives[role], waits)), *waits]
    return Timeline(title, tuple(sorted(spans, key=lambda span: span.start)))


def _working(role: str, life: tuple[float, float], waits: Sequence[Span]) -> Iterator[Span]:
    now, end = life
    for wait in sorted((span for span in waits if span.track == role), key=lambda span: span.start):
        if wait.start > now:
            yield Span(role, "work", now, wait.start)
        now = max(now, wait.end)
    if end > now:
        yield Span(role, "work", now, end)
