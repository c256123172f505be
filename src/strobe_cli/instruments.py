"""The lab's commands. What a command needs is imported inside it, so that `strobe --help` answers at once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from strobe_cli.options import (
    DTYPES_OF_FORWARDS,
    GpuName,
    HeadDim,
    HeadDims,
    HeadDimV,
    Heads,
    HeadsOf2048,
    JsonFile,
    KeyHeads,
    Keys,
    WindowSides,
    alone,
    arch_named,
    at_least,
    command_given,
    device_of,
    dtype_of,
    fp8_forward,
    gpu_named,
    heads_and_dims,
    names_of,
    numbers_of,
    one_of,
    pairs_of_dims,
    picture_path,
    positive,
    problem_of,
    shape_of,
    writable,
)

if TYPE_CHECKING:
    import torch

    from strobe.lab.model.roofline import Ceilings

instruments = typer.Typer()


@instruments.command()
def cost(
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    seqlen_q: Annotated[int, typer.Option(help="Queries of a sequence.")] = 4096,
    seqlen_kv: Keys = None,
    heads: Heads = 16,
    heads_kv: KeyHeads = None,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or, of a forward, fp8 (e4m3).")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask.")] = False,
    window: WindowSides = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward.")] = False,
    tile: Annotated[str | None, typer.Option(help="QUERIESxKEYS of a forward; default: 128x128.")] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Tiles hold the rows of all heads that share a key head.")] = False,
    arch: GpuName = None,
    out: Annotated[str | None, typer.Option(help="Draw the least times to this PNG or SVG.", callback=writable)] = None,
    json: JsonFile = None,
) -> None:
    """FLOPs, exponentials and bytes of a problem by standard attention and by flash attention, and what bounds each."""
    from rich.console import Console

    from strobe.lab.model import cost_report

    at_least(1, batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    if backward and (tile is not None or packed):
        raise typer.BadParameter("tile and packed are a forward's, got one of them with backward")
    fp8_forward((dtype,), backward)
    picture = picture_path(out)
    problem = problem_of(
        batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads=heads, heads_kv=heads_kv, head_dim=head_dim,
        head_dim_v=head_dim_v, dtype=dtype, causal=causal, window=window, backward=backward, dtypes=DTYPES_OF_FORWARDS,
    )  # fmt: skip
    try:
        found = cost_report.facts(problem, gpu_named(arch), shape_of("tile", tile or "128x128"), packed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    Console().print(cost_report.table(found))
    typer.echo(cost_report.summary(found))
    if picture is not None:
        typer.echo(f"written: {cost_report.draw(found, picture)}")
    _write_json(json, found)


def _measured(dtype: torch.dtype) -> Ceilings:
    """The ceilings of the GPU that is there."""
    from strobe.lab.model.ceilings import measure

    return measure(device_of(None), dtype)


@instruments.command()
def roofline(
    head_dims: HeadDims = None,
    lengths: Annotated[str | None, typer.Option(help="Comma-separated sequence lengths.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Batch x length; default: 16384.")] = None,
    heads: HeadsOf2048 = None,
    heads_kv: KeyHeads = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or, of a forward, fp8 (e4m3).")] = "bf16",
    mask: Annotated[str, typer.Option(help="Of full, causal, window (1024 keys), comma-separated.")] = "full,causal",
    phase: Annotated[
        str | None, typer.Option(help="forward (the default), backward, or decode: few queries of each sequence, over a cache.")
    ] = None,
    queries: Annotated[int | None, typer.Option(help="Queries of each sequence in a decode; default: 1.")] = None,
    arch: GpuName = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the ceilings of this machine's GPU.")] = False,
    report: Annotated[
        str | None, typer.Option(help="Place what this JSON of strobe bench measured, of what the options above allow.")
    ] = None,
    context_parallel: Annotated[
        bool,
        typer.Option("--context-parallel", help="From which tokens a GPU on strobe.parallel hides links, for 2 to 4096 GPUs."),
    ] = False,
    out: Annotated[str | None, typer.Option(help="Draw the roofline to this PNG or SVG.", callback=writable)] = None,
    json: JsonFile = None,
) -> None:
    """What bounds a problem on a GPU (tensor cores, exp2, shared memory, HBM), and what would move it."""
    from pathlib import Path

    from rich.console import Console

    from strobe.lab.bench import plan
    from strobe.lab.bench.report import load
    from strobe.lab.model import roofline as lab

    at_least(1, tokens=tokens, heads=heads, heads_kv=heads_kv, queries=queries)
    if queries is not None and phase != "decode":
        raise typer.BadParameter(f"queries belongs to --phase decode, got {queries} without it")
    if phase is not None:  # a decode has reports of its own
        one_of("phase", phase, ("forward", "backward") if report else ("forward", "backward", "decode"))
    picture = picture_path(out)
    if (arch is not None) + measure + (report is not None) > 1:
        raise typer.BadParameter("arch, measure and report each say which GPU it is: give one of them")
    if context_parallel:
        if measure or report is not None or phase is not None or lengths is not None:
            raise typer.BadParameter("context-parallel must be given without measure, report, phase and lengths")
        _context_parallel(head_dims or "128", heads or 32, heads_kv or 8, dtype, mask, tokens or 8192, arch, picture, json)
        return
    dims, masks = pairs_of_dims(head_dims), names_of("mask", mask, plan.MASKS) or ()
    many = numbers_of("lengths", lengths)
    shape = plan.Grid(
        head_dims=dims or ((64, 64), (128, 128), (256, 256)),
        lengths=many or (1024, 16384),
        tokens=tokens or 16384,
        heads=heads,
        heads_kv=heads_kv,
        dtypes=(one_of("dtype", dtype, DTYPES_OF_FORWARDS),),
        masks=masks,
    )
    fp8_forward(shape.dtypes, phase == "backward")
    for dim, _ in shape.head_dims:
        heads_and_dims(heads or max(1, 2048 // dim), heads_kv, dim, None)
    try:
        if report is not None:
            choice = lab.Choice(dtype, masks, dims, many, tokens, heads, heads_kv, phase)
            ceilings, found = lab.of_report(load(Path(report)), choice)
        else:
            kind = plan.DTYPES[dtype]
            ceilings = _measured(kind) if measure else lab.Ceilings.of(gpu_named(arch), kind)
            hopper = arch_named(arch).capability == 90
            points = plan.some(shape.points(phase == "backward"))
            problems = [lab.problem_of(point, phase or "forward", queries or 1) for point in points]
            decode = phase == "decode"
            found = [lab.place_decode(x, ceilings) if decode else lab.place(x, ceilings, hopper) for x in problems]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    Console().print(lab.table(found))
    typer.echo(ceilings)
    for placed in found:
        typer.echo(lab.sentence(placed))
    if picture is not None:
        typer.echo(f"written: {lab.draw(found, ceilings, picture)}")
    _write_json(json, lab.facts(ceilings, found), device_of(None) if measure else None)


def _context_parallel(
    head_dims: str, heads: int, heads_kv: int, dtype: str, mask: str, tokens: int, arch: str | None, picture, json: str | None
) -> None:  # fmt: skip
    """`strobe roofline --context-parallel`: heads 32 on 8 unless they are given, causal first, `tokens` on each GPU."""
    from rich.console import Console

    from strobe.lab.bench import plan
    from strobe.lab.model import context_parallel as lab
    from strobe.masks import Causal, Full, Window

    ((dim, _),) = pairs_of_dims(head_dims) or ((128, 128),)
    heads_and_dims(heads, heads_kv, dim, None)
    masks = {"causal": Causal(), "full": Full(), "window": Window(1024, 0)}
    names = names_of("mask", mask, plan.MASKS) or ()
    chosen = masks["causal" if "causal" in names else names[0]]
    kind = plan.DTYPES[one_of("dtype", dtype, ("bf16", "fp16"))]
    gpu = arch_named(arch or "H200").name
    setting = lab.setting_of(heads, heads_kv, dim, chosen, kind, tokens)
    found = lab.facts(setting, gpu)
    Console().print(lab.table(found))
    typer.echo(lab.sentence(found))
    if picture is not None:
        typer.echo(f"written: {lab.draw(setting, found, picture)}")
    _write_json(json, found)


@instruments.command()
def occupancy(
    context: typer.Context,
    registers: Annotated[int | None, typer.Option(help="Of a thread: a block of your own, with --threads.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of a block.")] = None,
    smem: Annotated[int | None, typer.Option(help="Bytes of shared memory of a block; default: 0.")] = None,
    grid: Annotated[int | None, typer.Option(help="Blocks in all.")] = None,
    backends: Annotated[str | None, typer.Option(help="Of sm90, portable; default: all that take the problem.")] = None,
    head_dims: Annotated[str, typer.Option(help="Comma-separated, such as 64,192/128 (of q and k / of v).")] = "64,128",
    length: Annotated[int, typer.Option(help="Sequence length; batch x length is 16384 tokens.")] = 4096,
    heads: HeadsOf2048 = None,
    dtype: Annotated[str, typer.Option(help="Of bf16, fp16, fp32, comma-separated.")] = "bf16",
    mask: Annotated[str, typer.Option(help="Of full, causal, window (1024 keys), comma-separated.")] = "causal",
    arch: GpuName = None,
    out: Annotated[str | None, typer.Option(help="Draw the limits to this PNG or SVG.", callback=writable)] = None,
    json: JsonFile = None,
) -> None:
    """How many blocks a multiprocessor runs at once, which resource says so, and the waves of a grid."""
    from rich.console import Console

    from strobe.lab.bench import plan
    from strobe.lab.model import occupancy as lab
    from strobe.lab.progress import each

    at_least(1, registers=registers, threads=threads, grid=grid, length=length, heads=heads)
    at_least(0, smem=smem)
    on, picture = gpu_named(arch), picture_path(out)
    if (registers is None) != (threads is None):
        raise typer.BadParameter(f"registers and threads go together, got {registers} and {threads}")
    if registers is not None:
        alone(context, "registers", "threads", "smem", "grid", "arch", "out", "json")
    elif smem is not None or grid is not None:
        raise typer.BadParameter(f"smem and grid go with registers and threads, got {smem} and {grid} without")
    shape = plan.Grid(
        head_dims=pairs_of_dims(head_dims) or (),
        lengths=(length,),
        heads=heads,
        dtypes=names_of("dtype", dtype, ("bf16", "fp16", "fp32")) or (),
        masks=names_of("mask", mask, plan.MASKS) or (),
    )
    chosen = names_of("backends", backends, lab.BACKENDS)
    try:
        if registers is not None and threads is not None:
            found = [(lab.Occupancy(on, lab.Block(threads, registers, smem or 0)), grid)]
        else:
            points = plan.some(shape.points(backward=False))
            asked = [(backend, point) for point in points for backend in chosen or lab.takers(point, on)]
            blocks = [lab.compiled(backend, point, on) for backend, point in each(asked, "compiling")]
            found = [(lab.Occupancy(on, block), tiles) for block, tiles in blocks]
        facts = lab.facts(found)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    Console().print(lab.table(facts))
    for kernel in facts["kernels"]:
        typer.echo(lab.sentence(kernel))
    if picture is not None:
        typer.echo(f"written: {lab.draw(facts, picture)}")
    _write_json(json, facts)


@instruments.command()
def audit(
    context: typer.Context,
    kernels: Annotated[list[str], typer.Argument(help="KERNEL, KERNEL@ARCH or a cubin file; several are compared.")],
    head_dims: Annotated[str, typer.Option(help="Comma-separated, such as 64,192/128 (of q and k / of v).")] = "128",
    length: Annotated[int, typer.Option(help="Sequence length; batch x length is 16384 tokens.")] = 4096,
    heads: HeadsOf2048 = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of bf16, fp16, fp32, comma-separated; default: bf16, fp8 for sm90-fp8.")
    ] = None,
    mask: Annotated[str, typer.Option(help="Of full, causal, window (1024 keys), comma-separated.")] = "full",
    explain: Annotated[bool, typer.Option("--explain", help="Say what the instructions do, and cost.")] = False,
    sass: Annotated[
        str | None, typer.Option(help="Write the main loops' instructions to this file.", callback=writable)
    ] = None,
    out: Annotated[str | None, typer.Option(help="Draw the main loops to this PNG or SVG.", callback=writable)] = None,
    json: JsonFile = None,
) -> None:
    """What the compiler made of a kernel, without a GPU: registers, spills, the instructions of each role, and warnings."""
    from pathlib import Path

    from strobe.lab.bench import plan
    from strobe.lab.binary import audit as lab
    from strobe.lab.binary import audit_report

    at_least(1, length=length, heads=heads)
    if not any(kernel.partition("@")[0] in lab.KERNELS for kernel in kernels):
        alone(context, "a cubin", "kernels", "explain", "sass", "out", "json")
    picture = picture_path(out)
    shape = plan.Grid(
        head_dims=pairs_of_dims(head_dims) or (),
        lengths=(length,),
        heads=heads,
        dtypes=names_of("dtype", dtype or "bf16", ("bf16", "fp16", "fp32")) or (),
        masks=names_of("mask", mask, plan.MASKS) or (),
    )
    try:
        reports = lab.reports_of(kernels, plan.some(shape.points(backward=False)), own_dtype=dtype is None)
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    facts = lab.facts(reports)
    audit_report.show(facts, explain)
    if picture is not None:
        typer.echo(f"written: {audit_report.draw(facts, picture)}")
    if sass is not None:
        Path(sass).write_text(lab.listing(reports))
        typer.echo(f"written: {sass}")
    _write_json(json, facts)


@instruments.command()
def banks(
    tile: Annotated[str, typer.Option(help="ROWSxCOLUMNS.")] = "64x128",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    layouts: Annotated[
        str, typer.Option(help="Of none, padded, xor, xor4, nvmma32, nvmma64, nvmma128.")
    ] = "none,padded,xor,xor4,nvmma32,nvmma64,nvmma128",
    accesses: Annotated[
        str, typer.Option(help="Of rows, ldmatrix, fragment, column, row-a-lane.")
    ] = "rows,ldmatrix,fragment,column,row-a-lane",
    out: Annotated[str | None, typer.Option(help="Draw the banks of every lane to this PNG or SVG.", callback=writable)] = None,
    json: JsonFile = None,
) -> None:
    """Bank conflicts: which banks of shared memory a warp hits in a tile, with and without a swizzle, and how long it takes."""
    from strobe.lab.model import banks as lab

    (rows, columns), picture = shape_of("tile", tile), picture_path(out)
    chosen = lab.Tile(rows, columns, dtype_of(dtype).itemsize)
    asked = names_of("layouts", layouts, lab.LAYOUTS) or (), names_of("accesses", accesses, lab.ACCESSES) or ()
    counts = lab.measure(chosen, *asked)
    lab.show(chosen, counts)
    if picture is not None:
        typer.echo(f"written: {lab.draw(chosen, counts, picture)}")
    _write_json(json, lab.facts(chosen, counts))


@instruments.command()
def fragments(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Of mma-a, mma-b, mma-c, ldmatrix.x1, ldmatrix.x2, ldmatrix.x4, ldmatrix.x4.trans, wgmma-d, wgmma-a, "
            "tcgen05-d; default: those of mma."
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Draw them to this PNG or SVG.", callback=writable)] = None,
    json: JsonFile = None,
) -> None:
    """Which lane of a warp holds which element of a tensor core's operands and results, and in which register."""
    from rich.console import Console

    from strobe.lab.model import fragments as lab

    picture = picture_path(out)
    found = lab.facts([one_of("names", name, lab.FRAGMENTS) for name in names or ("mma-a", "mma-b", "mma-c")])
    for one in found["fragments"]:
        typer.echo(lab.caption(one))
        Console().print(lab.table(one))
    if picture is not None:
        typer.echo(f"written: {lab.draw(found, picture)}")
    _write_json(json, found)


@instruments.command()
def devices(json: JsonFile = None) -> None:
    """The GPUs that are known: compute capability, shared memory, registers, warps, blocks, peak rates."""
    from rich.console import Console

    from strobe.lab.model import devices as lab

    found = lab.facts()
    for table in lab.tables(found):
        Console().print(table)
    _write_json(json, found)


@instruments.command()
def profile(
    context: typer.Context,
    backends: Annotated[str | None, typer.Option(help="One or two, comma-separated; default: what dispatch picks.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    length: Annotated[int, typer.Option(help="Sequence length.")] = 4096,
    heads: Heads = 16,
    heads_kv: KeyHeads = None,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")] = "bf16",
    mask: Annotated[str, typer.Option(help="full, causal or window (1024 keys).")] = "full",
    backward: Annotated[bool, typer.Option("--backward", help="The backward.")] = False,
    kernel: Annotated[str | None, typer.Option(help="Only kernels whose name holds this regular expression.")] = None,
    calls: Annotated[int, typer.Option(help="Calls that are profiled, of which the mean is shown.")] = 8,
    csv: Annotated[list[str] | None, typer.Option(help="Read this output of ncu --csv instead; may be repeated.")] = None,
    flops: Annotated[float | None, typer.Option(help="With --csv: FLOPs of a launch, for the roofline.")] = None,
    report: Annotated[str | None, typer.Option(help="Show this JSON of strobe profile instead of measuring.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Draw throughputs, stalls and the roofline to this PNG or SVG.", callback=writable)
    ] = None,
    json: JsonFile = None,
) -> None:
    """Show Nsight Compute's measurements of a kernel, or of two beside each other, as tables, and their place on the
    roofline."""
    from pathlib import Path

    from strobe.call.dispatch import BACKENDS
    from strobe.lab.bench import plan as plans
    from strobe.lab.bench.machine import describe
    from strobe.lab.counters import profile as profiles

    if report is not None:
        alone(context, "report", "out")
    elif csv:
        alone(context, "csv", "flops", "out", "json")
    elif flops is not None:
        raise typer.BadParameter(f"flops goes with csv, got {flops:g} without one")
    at_least(1, batch=batch, length=length, heads=heads, heads_kv=heads_kv, calls=calls)
    heads_and_dims(heads, heads_kv, head_dim, head_dim_v)
    shape = batch, length, heads, heads_kv or heads, head_dim, head_dim_v or head_dim
    kind, cut = one_of("dtype", dtype, plans.DTYPES), one_of("mask", mask, plans.MASKS)
    point, picture = plans.Point(*shape, kind, cut, backward), picture_path(out)
    try:
        if report is not None:
            found = profiles.load(Path(report))
        elif csv:
            subjects = profiles.of_files([Path(file) for file in csv], positive("flops", flops))
            found = profiles.report_of(subjects, command_given(sys.argv[1:]), {"name": "that of the CSV"})
        else:
            chosen = names_of("backends", backends, BACKENDS) or (None,)
            subjects = profiles.profile_backends(point, chosen, kernel, calls)
            found = profiles.report_of(subjects, command_given(sys.argv[1:]), describe(device_of("cuda")), point)
        profiles.show(found)
        if picture is not None:
            from strobe.lab.counters.profile_picture import draw

            typer.echo(f"written: {draw(found, picture)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _write_json(json, found)


@instruments.command()
def mutate(
    context: typer.Context,
    kernels: Annotated[
        list[str], typer.Argument(help="Of ours, such as sm90-forward, or a Python file that defines simulation().")
    ],
    sample: Annotated[int, typer.Option(help="Mutants of each kernel.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    only: Annotated[str | None, typer.Option(help='The mutant of this name alone, such as "forward.py:340 delete".')] = None,
    workers: Annotated[int, typer.Option(help="Processes at a time.")] = 2,
    json: JsonFile = None,
) -> None:
    """Make mistakes in a Gluon kernel's synchronisation, one at a time: which of them does the simulator not notice?"""
    from strobe.lab.simulated import mutate as lab

    at_least(1, sample=sample, workers=workers)
    if only is not None:
        alone(context, "only", "kernels", "workers", "json")
    try:
        found = []
        for kernel in kernels:
            found.append(lab.campaign(kernel, sample, seed, workers, only))
            _write_json(json, lab.facts_of(found))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    lab.show(found)
    raise typer.Exit(any(map(lab.missed, found)))


@instruments.command()
def fuzz(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(help="How long cases are drawn.")] = 60.0,
    workers: Annotated[int | None, typer.Option(help="Processes; default: as many as processors, 12 at most.")] = None,
    first: Annotated[int | None, typer.Option(help="The first case's number; default: one that was not drawn before.")] = None,
    case: Annotated[str | None, typer.Option(help="Run this case alone: its number, or its facts.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cpu, or simulator: Hopper's kernels without a GPU.")] = None,
    arch: Annotated[str | None, typer.Option(help="Compile for this GPU (H200, A100, ...), and run nothing.")] = None,
    json: JsonFile = None,
) -> None:
    """Random problems, layouts and bad arguments against the float64 specification; status 1 if any fails (docs/fuzzing.md)."""
    from os import cpu_count
    from random import SystemRandom

    from strobe.device import KNOWN
    from strobe.lab.fuzz import fuzz as fuzzer

    if arch is not None:
        alone(context, "arch", *(set(context.params) - {"device"}))
        one_of("arch", arch, [name for name, known in KNOWN.items() if known.is_gpu])
    simulated = device == "simulator"
    where = device_of("cpu" if simulated else device)
    on = arch or ("simulator" if simulated else where.type)
    if case is not None:
        alone(context, "case", "device", "arch")
        try:
            raise typer.Exit(fuzzer.fuzz_one(case, on).bad)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    positive("seconds", seconds)
    at_least(1, workers=workers)
    at_least(0, first=first)
    start = SystemRandom().randrange(10**9) if first is None else first
    found = fuzzer.fuzz(on, seconds, workers or min(12, cpu_count() or 1), start)
    _write_json(json, found, where)
    raise typer.Exit(bool(found["failures"]))


@instruments.command()
def report(
    files: Annotated[list[str], typer.Argument(help="JSON of strobe's commands: bench, bench compare, timeline, profile, ...")],
    out: Annotated[str, typer.Option(help="The HTML file.", callback=writable)] = "report.html",
) -> None:
    """One HTML file of some results that opens without a network: tables, pictures, which kernel and why, environment."""
    from pathlib import Path

    from strobe.lab.pages.html import write

    try:
        typer.echo(f"written: {write([Path(file) for file in files], Path(out))}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _write_json(path: str | None, found: dict, device: torch.device | None = None) -> None:
    """Write a command's result as JSON, if a path was given. device: the one that was measured, if any."""
    from pathlib import Path

    from strobe.lab.bench.machine import provenance, save

    if path is not None:
        given = {"what": found["what"]} | provenance(device or "no GPU", command_given(sys.argv[1:]))
        typer.echo(f"written: {save(Path(path), given | found)}")
