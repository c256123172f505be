"""The commands of `strobe ladder`. What a command needs is imported inside it, so that `strobe --help` answers at once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from strobe_cli.options import (
    DeviceName,
    JsonFile,
    alone,
    at_least,
    command_given,
    device_of,
    gpu_named,
    numbers_of,
    one_of,
    picture_path,
    positive,
    shape_of,
    writable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from strobe.device import Arch
    from strobe.lab.ladder.measure import Problem
    from strobe.ladder import Rung

ladder = typer.Typer(help="One attention, from a loop on one core to the product's kernel, step by step (docs/ladder.md).")

Number = Annotated[int, typer.Argument(help="A rung's number.")]
HeadDim = Annotated[int, typer.Option(help="64 or 128; of rungs below 6 also 32.")]
ArchName = Annotated[
    str | None, typer.Option(help="A GPU by name to compile for; default: A100, or H200 where a rung needs one.")
]


@ladder.command()
def run(
    context: typer.Context,
    heads: Annotated[int, typer.Option(help="Heads, of all sequences together.")] = 16,
    length: Annotated[int, typer.Option(help="Queries and keys.")] = 4096,
    head_dim: HeadDim = 128,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16; rungs 0 to 3 compute in float32.")] = "bf16",
    rungs: Annotated[str | None, typer.Option(help="Such as 0-8 or 3,4; default: all.")] = None,
    rounds: Annotated[int, typer.Option(help="Timings of each rung, of which the median counts.")] = 5,
    max_seconds: Annotated[float, typer.Option(help="Stop then, with what was measured.")] = 300.0,
    device: DeviceName = None,
    profile: Annotated[bool, typer.Option("--profile", help="By Nsight Compute instead: counters of each rung.")] = False,
    calls: Annotated[int, typer.Option(help="With --profile: calls, of which mean and extremes are shown.")] = 4,
    report: Annotated[str | None, typer.Option(help="Show this JSON of strobe ladder run instead of measuring.")] = None,
    json: Annotated[
        str | None, typer.Option(help="Default: benchmarks/results/ladder-<gpu>-<date>.json on a GPU.", callback=writable)
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Draw to this PNG or SVG; default: a PNG beside the JSON.", callback=writable)
    ] = None,
) -> None:
    """Check every rung against float64, then time it beside PyTorch's attention; without a GPU they are simulated and
    compiled."""
    from pathlib import Path

    from strobe.lab.bench.machine import save
    from strobe.lab.bench.report import default_path
    from strobe.lab.ladder import report as reports
    from strobe.lab.ladder.measure import Problem

    picture = picture_path(out)
    try:
        if report is not None:
            alone(context, "report", "out")
            found = reports.load(Path(report))
            _shown(found)
            if picture is not None:
                typer.echo(f"written: {reports.draw(found, picture)}")
            return
        at_least(1, heads=heads, length=length, rounds=rounds, calls=calls)
        one_of("dtype", dtype, ("bf16", "fp16"))
        _head_dim(head_dim)
        problem, chosen = Problem(heads, length, head_dim, dtype), _rungs(rungs)
        seconds = positive("max-seconds", max_seconds) or 0.0
        if profile:
            _profiled(problem, chosen, calls, seconds, json)
            return
        where = device_of(device)
        found = _measured(problem, chosen, where, rounds, seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _shown(found)
    path = Path(json) if json else default_path(found) if where.type == "cuda" else None
    if path is not None:
        typer.echo(f"written: {save(path, found)}")
    if picture is None and path is not None and any(facts.get("seconds") for facts in found["rungs"]):
        picture = path.with_suffix(".png")
    if picture is not None:
        typer.echo(f"written: {_drawn(found, picture)}")
    raise typer.Exit(any("wrong" in facts or "failed" in facts for facts in found["rungs"]))


def _drawn(found: dict, picture: Path) -> Path:
    from strobe.lab.ladder.report import draw

    try:
        return draw(found, picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _head_dim(head_dim: int) -> None:
    from strobe.ladder.rungs import HEAD_DIMS

    if head_dim not in HEAD_DIMS:
        raise typer.BadParameter(f"head-dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")


def _rungs(text: str | None) -> tuple[Rung, ...]:
    """The rungs that "3,5-8" names, in order."""
    from strobe.ladder import RUNGS

    if text is None:
        return RUNGS
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise typer.BadParameter(f"rungs must be numbers and ranges, such as 0-8 or 3,4, got {text!r}")
        numbers |= set(range(int(first), int(last if dash else first) + 1))
    if not numbers or not numbers <= set(range(len(RUNGS))):
        raise typer.BadParameter(f"rungs must be from 0 to {len(RUNGS) - 1}, got {text!r}")
    return tuple(RUNGS[number] for number in sorted(numbers))


def _rung(number: int) -> Rung:
    return _rungs(str(number))[0]


def _measured(problem: Problem, rungs: tuple[Rung, ...], where, rounds: int, max_seconds: float) -> dict:
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    from strobe.lab.ladder.measure import run as measure

    with Progress(
        *Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("the ladder", total=len(rungs))

        def step(done: int, what: str) -> None:
            progress.update(task, completed=done, description=what)

        return measure(problem, where, command_given(sys.argv[1:]), max_seconds, rungs, rounds, step)


def _shown(found: dict) -> None:
    from rich.console import Console

    from strobe.lab.ladder import report as reports

    Console().print(reports.table(found))
    for line in reports.sentences(found):
        typer.echo(line)


def _profiled(problem: Problem, rungs: Sequence[Rung], calls: int, max_seconds: float, json: str | None) -> None:
    from pathlib import Path

    from strobe.lab.bench.machine import describe, save
    from strobe.lab.counters import profile as profiles
    from strobe.lab.ladder.profiled import profile_rungs

    subjects, late = profile_rungs(problem, rungs, calls, max_seconds)
    for rung in late:
        typer.echo(f"not done after {max_seconds:g} s: {rung.number} {rung.title}", err=True)
    found = profiles.report_of(subjects, command_given(sys.argv[1:]), describe(device_of("cuda")))
    profiles.show(found)
    if json is not None:
        typer.echo(f"written: {save(Path(json), found)}")


@ladder.command()
def show(number: Number, head_dim: HeadDim = 128, arch: ArchName = None, json: JsonFile = None) -> None:
    """A rung's source, and what the compiler makes of it, without a GPU."""
    from rich.console import Console
    from rich.syntax import Syntax

    from strobe.lab.ladder import explain as lab

    rung = _rung(number)
    found = _compiled([rung], head_dim, arch)
    Console().print(Syntax(lab.source(rung), "python", background_color="default"))
    if rung.least:
        Console().print(lab.table(found))
    _write(json, found)


@ladder.command()
def diff(
    old: Number,
    new: Number,
    head_dim: HeadDim = 128,
    arch: ArchName = None,
    unified: Annotated[bool, typer.Option("--unified", help="Changed lines alone, as diff -u shows them.")] = False,
    json: JsonFile = None,
) -> None:
    """Two rungs' sources beside each other, and their machine code's counts: which instructions went."""
    from rich.console import Console

    from strobe.lab.ladder import explain as lab

    pair = _rung(old), _rung(new)
    found = _compiled([rung for rung in pair if rung.least], head_dim, arch)
    console = Console()
    if unified:
        console.print(lab.difference(*pair), markup=False, highlight=False)
    else:
        console.print(lab.side_by_side(*pair, width=max(console.width, 160)))
    console.print(lab.table(found))
    _write(json, found)


@ladder.command()
def explain(
    number: Number,
    head_dim: HeadDim = 128,
    arch: ArchName = None,
    report: Annotated[str | None, typer.Option(help="JSON of strobe ladder run, for what was measured.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="JSON of strobe ladder run --profile, for the counters that moved.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """The bottleneck before a rung, what changes, the prediction, and the numbers that moved; what its waits are for."""
    from pathlib import Path

    from rich.console import Console

    from strobe.lab.counters.profile import load as load_profile
    from strobe.lab.ladder import explain as lab
    from strobe.lab.ladder.report import load

    rung = _rung(number)
    before = _rung(number - 1) if number else None
    try:
        measured = load(Path(report)) if report else None
        moved = lab.counters_moved(load_profile(Path(profile)), before, rung) if profile and before else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found = _compiled([one for one in (before, rung) if one and one.least], head_dim, arch)
    for line in lab.explanation(rung, before, found, measured):
        typer.echo(line)
    on = lab.arch_for([rung], gpu_named(arch) if arch else None)
    for line in [*lab.show_variants(rung, on, head_dim), *lab.show_waits(rung)]:
        typer.echo(line)
    if rung.moves:
        Console().print(lab.table(found, rung.moves))
    if moved is not None:
        Console().print(moved)
    _write(json, found)


@ladder.command()
def shapes(
    tile: Annotated[str | None, typer.Option(help="QUERIESxKEYS; default: 64x64.")] = None,
    head_dim: HeadDim = 128,
    warps: Annotated[int | None, typer.Option(help="Of a CTA; default: 4.")] = None,
    rung: Annotated[int | None, typer.Option(help="Of this rung, 4 to 12: its tile, and how it loads.")] = None,
    lengths: Annotated[
        str, typer.Option(help="Comma-separated, for the arithmetic intensity.")
    ] = "512,1024,2048,4096,8192,16384",
    json: JsonFile = None,
) -> None:
    """A tile's GEMM shapes, registers, loads and stores, and FLOPs a byte of global memory."""
    from rich.console import Console

    from strobe.lab.ladder.arithmetic import Tile
    from strobe.lab.ladder.shapes import facts, tables

    _head_dim(head_dim)
    if rung is not None:
        if tile is not None or warps is not None:
            raise typer.BadParameter("rung must be given without tile and warps: it has its own")
        try:
            chosen = Tile.of(_rung(rung), head_dim)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    else:
        rows, keys = shape_of("tile", tile or "64x64")
        chosen = Tile(rows, keys, head_dim, warps or 4)
        at_least(1, warps=chosen.warps)
        if rows % (16 * chosen.warps) or keys % 16:
            raise typer.BadParameter(
                f"tile must have a multiple of {16 * chosen.warps} queries and of 16 keys, got {tile} for {chosen.warps} warps"
            )
    found = facts(chosen, numbers_of("lengths", lengths) or ())
    for shown in tables(found):
        Console().print(shown)
    _write(json, found)


def _compiled(rungs: Sequence[Rung], head_dim: int, arch: str | None) -> dict:
    from strobe.lab.ladder import explain as lab

    _head_dim(head_dim)
    on: Arch | None = gpu_named(arch) if arch else None
    try:
        return lab.facts(rungs, lab.arch_for(rungs, on), head_dim)
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None


def _write(path: str | None, found: dict) -> None:
    from pathlib import Path

    from strobe.lab.bench.machine import provenance, save

    if path is not None:
        result = {"what": found["what"]} | provenance("no GPU", command_given(sys.argv[1:])) | found
        typer.echo(f"written: {save(Path(path), result)}")
