"""The command line. What a command needs is imported inside it, so that `strobe --help` answers at once."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from strobe_cli.instruments import instruments
from strobe_cli.ladder import ladder
from strobe_cli.options import (
    DeviceName,
    GpuName,
    HeadDim,
    HeadDims,
    HeadDimV,
    Heads,
    HeadsOf2048,
    JsonFile,
    KeyHeads,
    Keys,
    Peers,
    WindowSides,
    alone,
    arch_named,
    at_least,
    changed_config,
    command_given,
    device_of,
    dtype_of,
    fp8_forward,
    given,
    gpu_named,
    heads_and_dims,
    names_of,
    numbers_of,
    one_of,
    pair_of_heads,
    pairs_of_dims,
    part_of,
    picture_path,
    positive,
    problem_of,
    writable,
)

if TYPE_CHECKING:
    from strobe.device import Arch
    from strobe.problem import AttentionProblem

app = typer.Typer(
    help="Flash attention for PyTorch in pure Python, and the instruments that show why it is fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def demo() -> None:
    """Run a real text encoder on Strobe, beside PyTorch's attention."""
    from strobe_cli.demo import main

    main()


@app.command()
def doctor(json: JsonFile = None) -> None:
    """What is installed, which backends run here and why the others do not, a short self test, and what to do."""
    from pathlib import Path

    from strobe.lab.bench.machine import save
    from strobe_cli.doctor import examine, passed, text

    found = examine()
    typer.echo(text(found))
    if json is not None:
        typer.echo(f"written: {save(Path(json), found)}")
    raise typer.Exit(0 if passed(found) else 1)


@app.command()
def precompile(
    model: Annotated[str, typer.Argument(help="A model's config.json.", metavar="CONFIG")],
    out: Annotated[str, typer.Option(help="The folder for the compiled kernels.")],
    arch: GpuName = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a sequence, at most.")] = 32768,
    max_batch: Annotated[int, typer.Option(help="Sequences, or requests, of a batch, at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    train: Annotated[bool, typer.Option("--train", help="The backward, too.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Attention over a cache of pages, too.")] = False,
    page_size: Annotated[int, typer.Option(help="Keys of a page, with --serve.")] = 64,
) -> None:
    """Compile a model's kernels into a folder, for a GPU that need not be there: for containers."""
    from json import loads
    from pathlib import Path

    from strobe_cli.precompile import layers_of, text
    from strobe_cli.precompile import precompile as compile_into

    at_least(1, page_size=page_size, max_length=max_length, max_batch=max_batch)
    try:
        layers = layers_of(loads(Path(model).read_text()))
        made = compile_into(
            layers, gpu_named(arch), Path(out), dtype=dtype_of(dtype, ("bf16", "fp16")), trained=train,
            max_batch=max_batch, max_length=max_length, page_size=page_size if serve else None,
            command=command_given(sys.argv[1:]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"a model is a config.json whose attention a kernel runs, got {model}: {error}") from None
    typer.echo(text(made))


@app.command()
def explain(
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    seqlen_q: Annotated[int, typer.Option(help="Queries of a sequence.")] = 4096,
    seqlen_kv: Keys = None,
    heads: Heads = 16,
    heads_kv: KeyHeads = None,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask.")] = False,
    window: WindowSides = None,
    softcap: Annotated[float, typer.Option(help="Softcap of the scores; 0: none.")] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="Ask about the backward.")] = False,
    arch: Annotated[str | None, typer.Option(help="A GPU by name (H200, A100, ...) or CPU; default: this machine's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask about one backend only.")] = None,
    config: Annotated[str | None, typer.Option(help="Change the config, such as kv_stages=6,two_ctas=true.")] = None,
) -> None:
    """Which kernel runs a problem on a GPU, why the others do not, and what the problem costs at least."""
    from dataclasses import replace

    from strobe.call.dispatch import BACKENDS, explain_problem

    if backend is not None:
        one_of("backend", backend, BACKENDS)
    problem = problem_of(
        batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads=heads, heads_kv=heads_kv, head_dim=head_dim,
        head_dim_v=head_dim_v, dtype=dtype, causal=causal, window=window, softcap=softcap, backward=backward,
    )  # fmt: skip
    on = arch_named(arch)
    explanation = explain_problem(problem, on, backend)
    if config is not None:
        if explanation.config is None:
            raise typer.BadParameter(f"no kernel runs this, so there is no config to change: {explanation.refusals[0][1]}")
        explanation = replace(explanation, config=changed_config(explanation.config, config, keep=vars(problem)))
    typer.echo(explanation)
    typer.echo(f"at least  {_at_least_time(problem, on)}")


bench = typer.Typer(help="Time Strobe beside the attentions that are installed, and check the result.")
app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Time Strobe beside the attentions that are installed, and check the result. Alone: `strobe bench forward`."""
    if context.invoked_subcommand is None:
        measure(context)


@bench.command("forward")
@bench.command("backward")
def measure(
    context: typer.Context,
    head_dims: HeadDims = None,
    lengths: Annotated[str | None, typer.Option(help="Comma-separated sequence lengths.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Batch x length; default: 16384.")] = None,
    heads: HeadsOf2048 = None,
    heads_kv: KeyHeads = None,
    dtype: Annotated[str | None, typer.Option(help="Of bf16, fp16, fp32, fp8, comma-separated.")] = None,
    mask: Annotated[str | None, typer.Option(help="Of full, causal, window (1024 keys), comma-separated.")] = None,
    protocol: Annotated[
        str, typer.Option(help="sustained (launches without a pause) or single (32 warm-ups, 128 timed calls).")
    ] = "sustained",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds at least, more where a balanced order needs it; default: 6.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Of one contender in one round; default: 0.015.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Stop then, with what was measured.")] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="normal (the default), model (a model's activations) or worst (for an optimistic softmax)."),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="I/N: this part of the points alone, see strobe bench merge; 1/N matters most.")
    ] = None,
    backends: Annotated[str | None, typer.Option(help="Strobe's backends to time by name too, comma-separated.")] = None,
    peers: Peers = None,
    device: DeviceName = None,
    json: Annotated[
        str | None, typer.Option(help="Default: benchmarks/results/<what>-<gpu>-<date>.json.", callback=writable)
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Draw to this PNG or SVG; default: a PNG beside the JSON.", callback=writable)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the finished points of the file that --json names.")] = False,
) -> None:
    """Check and time Strobe and its peers at the points of docs/bench.md, or at those that the options name; fewer on a CPU."""
    from dataclasses import replace
    from pathlib import Path

    from strobe.call.dispatch import BACKENDS
    from strobe.lab.bench import plan as plans
    from strobe.lab.bench.bench import bench as run
    from strobe.lab.bench.inputs import KINDS
    from strobe.lab.bench.peers import peers_for

    at_least(1, tokens=tokens, heads=heads, heads_kv=heads_kv, rounds=rounds)
    where, backward = device_of(device), context.info_name == "backward"
    shape = given(
        head_dims=pairs_of_dims(head_dims),
        lengths=numbers_of("lengths", lengths),
        tokens=tokens,
        heads=heads,
        heads_kv=heads_kv,
        dtypes=names_of("dtype", dtype, plans.DTYPES),
        masks=names_of("mask", mask, plans.MASKS),
    )
    timing = given(
        rounds=rounds,
        seconds=positive("seconds", seconds),
        max_seconds=positive("max-seconds", max_seconds),
        part=part_of(part),
        inputs=one_of("inputs", inputs, KINDS) if inputs else None,
        backends=names_of("backends", backends, BACKENDS),
        peers=None if peers == "all" else names_of("peers", peers, peers_for(where)),
    )
    if one_of("protocol", protocol, plans.PROTOCOLS) == "single" and seconds is not None:
        raise typer.BadParameter(f"seconds belongs to the sustained protocol, got {seconds} with single")
    grids = plans.SINGLE if protocol == "single" else plans.BACKWARD if backward else plans.FORWARD
    grids = plans.CPU if where.type == "cpu" else grids
    grids = (replace(grids[0], **shape),) if shape else grids
    fp8_forward(grids[0].dtypes, backward)
    for dim, _ in grids[0].head_dims:
        heads_and_dims(grids[0].heads or max(1, 2048 // dim), grids[0].heads_kv, dim, None)
    path = Path(json) if json else None
    if resume and not (path and path.exists()):
        raise typer.BadParameter(f"resume needs --json with a file that is there, got {json}")
    plan, picture = plans.Plan(grids, backward, protocol, **timing), picture_path(out)
    try:
        plans.some(plan.points())
        status = run(plan, where, command_given(sys.argv[1:]), path, resume, picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@bench.command("zoo")
def bench_zoo(
    only: Annotated[str | None, typer.Option(help="Comma-separated words: models whose names have one of them.")] = None,
    phase: Annotated[str | None, typer.Option(help="forward or backward; default: both.")] = None,
    random: Annotated[
        int | None, typer.Option(help="So many shapes at random, in place of models', forward unless --phase says backward.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of --random; default: 0.")] = None,
    peers: Peers = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds at least, more where a balanced order needs it; default: 6.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Of one contender in one round; default: 0.015.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Of the run, compilers included: shared out evenly, so that no point is left out.")
    ] = None,
    part: Annotated[str | None, typer.Option(help="I/N: this part of the points alone, see strobe bench merge.")] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Default: benchmarks/results/zoo-<gpu>-<date>.json; of random shapes random-...", callback=writable),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Draw to this PNG or SVG; default: a PNG beside the JSON.", callback=writable)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the finished points of the file that --json names.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print the shapes and where they come from; measure nothing.")] = False,
) -> None:
    """Check and time Strobe and its peers at the shapes of real models, or at random ones, forward and backward
    (docs/bench.md)."""
    from pathlib import Path

    from strobe.lab.bench import plan as plans
    from strobe.lab.bench import zoo
    from strobe.lab.bench.bench import bench as run
    from strobe.lab.bench.peers import peers_for

    at_least(1, rounds=rounds, random=random)
    if seed is not None and random is None:
        raise typer.BadParameter(f"seed belongs to --random, got {seed} without it")
    if only and random is not None:
        raise typer.BadParameter(f"only names models, which --random has none of, got {only}")
    backward = None if phase is None else one_of("phase", phase, ("forward", "backward")) == "backward"
    try:
        words = tuple(only.split(",")) if only else ()
        points = zoo.points(backward, words) if random is None else zoo.drawn(random, seed or 0, backward)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if list_:
        for point in points:
            typer.echo(f"{point}: {point.shape} ({zoo.source_of(point.model)})")
        return
    where = device_of("cuda")
    timing = given(
        rounds=rounds,
        seconds=positive("seconds", seconds),
        max_seconds=positive("max-seconds", max_seconds),
        part=part_of(part),
        peers=None if peers == "all" else names_of("peers", peers, peers_for(where)),
    )
    path = Path(json) if json else None
    if resume and not (path and path.exists()):
        raise typer.BadParameter(f"resume needs --json with a file that is there, got {json}")
    plan = plans.Plan(zoo=points, random=random is not None, even=max_seconds is not None, **timing)
    try:
        plans.some(plan.points())
        status = run(plan, where, command_given(sys.argv[1:]), path, resume, picture_path(out))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@bench.command("decode")
def bench_decode(
    batches: Annotated[str | None, typer.Option(help="Comma-separated; default: 1,8,32,128.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Keys of a request, comma-separated; default: 1k to 128k.")] = None,
    heads: Annotated[str | None, typer.Option(help="Query heads/key heads, comma-separated; default: 64/8.")] = None,
    head_dims: Annotated[str | None, typer.Option(help="Comma-separated; default: 128.")] = None,
    queries: Annotated[str | None, typer.Option(help="Queries of a request, comma-separated; default: 1.")] = None,
    pages: Annotated[str | None, typer.Option(help="Keys of a page, comma-separated, 0: contiguous; default: 64.")] = None,
    caches: Annotated[str | None, typer.Option(help="Of bf16, fp16, e4m3, fp32, comma-separated; default: bf16.")] = None,
    windows: Annotated[str | None, typer.Option(help="Keys that a query sees, comma-separated; default: 0, all.")] = None,
    ragged: Annotated[bool, typer.Option("--ragged", help="Lengths drawn around a mean, log-normal.")] = False,
    random: Annotated[
        int | None, typer.Option(help="So many steps at random, of any length from the least to the greatest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of --random; default: 0.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Interleaved rounds; default: 9.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Stop then, with what was measured.")] = None,
    part: Annotated[str | None, typer.Option(help="I/N: this part of the points alone, see strobe bench merge.")] = None,
    deterministic: Annotated[bool, typer.Option(help="Whether deterministic=True is timed, too.")] = True,
    peers: Peers = None,
    device: DeviceName = None,
    json: Annotated[
        str | None, typer.Option(help="Default: benchmarks/results/decode-<gpu>-<date>.json.", callback=writable)
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Draw to this PNG or SVG; default: a PNG beside the JSON.", callback=writable)
    ] = None,
) -> None:
    """Check and time attention over a cache beside its peers, in bytes of keys and values a second (docs/serving.md)."""
    from dataclasses import replace
    from pathlib import Path

    from strobe.lab.bench import decode_peers as lab
    from strobe.lab.bench.decode import bench as run

    where = device_of(device)
    at_least(1, rounds=rounds, random=random)
    if seed is not None and random is None:
        raise typer.BadParameter(f"seed belongs to --random, got {seed} without it")
    pairs = None if heads is None else tuple(pair_of_heads(part) for part in heads.split(","))
    dims = numbers_of("head-dims", head_dims)
    for dim in dims or ():
        heads_and_dims(1, None, dim, None)
    changes = given(
        batches=numbers_of("batches", batches), lengths=numbers_of("lengths", lengths), heads=pairs, head_dims=dims,
        queries=numbers_of("queries", queries), pages=numbers_of("pages", pages, least=0),
        caches=names_of("caches", caches, lab.CACHES), windows=numbers_of("windows", windows, least=0), rounds=rounds,
        max_seconds=positive("max-seconds", max_seconds),
        peers=None if peers == "all" else names_of("peers", peers, lab.peers_for(where)), part=part_of(part),
        random=random, seed=seed,
    )  # fmt: skip
    usual = lab.CPU if where.type != "cuda" else lab.Plan() if random is None else lab.RANDOM
    plan = replace(usual, ragged=ragged, deterministic=deterministic, **changes)
    picture = picture_path(out)
    try:
        status = run(plan, where, command_given(sys.argv[1:]), Path(json) if json else None, picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@bench.command("parallel")
def bench_parallel(
    gpus: Annotated[
        str | None, typer.Option(help="Numbers of GPUs, comma-separated; default: 2, 4, 8 as far as there are.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of the whole sequence, comma-separated.")] = "131072",
    weak_tokens: Annotated[int, typer.Option(help="Tokens of each GPU in weak scaling; 0: none.")] = 0,
    heads: Heads = 32,
    heads_kv: Annotated[int, typer.Option(help="Key heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    checked: Annotated[int, typer.Option(help="Tokens of the sequence of which every method and mask is checked.")] = 2048,
    masks: Annotated[
        str, typer.Option(help="Of full, causal, window, prefix, comma-separated: those that are checked.")
    ] = "full,causal,window",
    peers: Annotated[bool, typer.Option(help="Whether PyTorch's ways take part.")] = True,
    repeats: Annotated[int, typer.Option(help="Timed runs of each.")] = 5,
    device: Annotated[str, typer.Option(help="cuda (NCCL), or cpu (Gloo), to try it out.")] = "cuda",
    json: Annotated[
        str | None, typer.Option(help="Default: benchmarks/results/parallel-<gpu>-<date>.json.", callback=writable)
    ] = None,
) -> None:
    """Check and time strobe.parallel on several GPUs of this host, beside one GPU and PyTorch's ways; status 1 if wrong."""
    from pathlib import Path

    import torch

    from strobe.lab.bench import parallel as lab
    from strobe.lab.bench.machine import save
    from strobe.lab.bench.report import default_path

    at_least(1, heads=heads, heads_kv=heads_kv, repeats=repeats, checked=checked)
    heads_and_dims(heads, heads_kv, head_dim, None)
    one_of("device", device, ("cuda", "cpu"))
    there = torch.cuda.device_count() if device == "cuda" else 2
    numbers = numbers_of("gpus", gpus) or tuple(n for n in (2, 4, 8) if n <= there)
    if not numbers:
        raise typer.BadParameter(f"bench parallel needs two GPUs or more, got {there}; --device cpu tries it out")
    settings = lab.Settings(
        numbers, numbers_of("tokens", tokens) or (), weak_tokens, heads, heads_kv, head_dim, checked, repeats, device=device,
        masks=names_of("masks", masks, lab.MASKS) or (), peers=lab.WAYS_OF_PYTORCH if peers else (),
    )  # fmt: skip
    try:
        report = lab.run(settings, command_given(sys.argv[1:]))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for row in lab.cells(report):
        typer.echo("  ".join(f"{cell:>12}" for cell in row))
    path = Path(json) if json else default_path(report)
    typer.echo(f"written: {save(path, report)}")
    typer.echo(f"written: {lab.draw(report, path.with_suffix('.png'))}")
    failures = lab.wrong(report)
    for one in failures:
        typer.echo(f"wrong: {one}")
    raise typer.Exit(bool(failures))


@bench.command()
def check(
    file: Annotated[str, typer.Argument(help="JSON of strobe bench.")],
    at_least: Annotated[float | None, typer.Option(help="One floor for all points; default: each point's own.")] = None,
) -> None:
    """List the points at which Strobe is not as far ahead of the best peer as it should be; status 1 if there are any."""
    from pathlib import Path

    from strobe.lab.bench.check import check as run

    try:
        status = run(Path(file), positive("at-least", at_least))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@bench.command()
def merge(
    files: Annotated[list[str], typer.Argument(help="JSON of strobe bench with --part, all parts of one plan.")],
    out: Annotated[str, typer.Option(help="Where the report of all points goes.", callback=writable)],
) -> None:
    """Make one report of a run's parts, if all are of the same GPU, commit, versions and protocol."""
    from pathlib import Path

    from strobe.lab.bench import decode, report
    from strobe.lab.bench.merge import merge as run

    try:
        merged = run([Path(file) for file in files], Path(out))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    (decode if merged["what"] == "decode" else report).show(merged)
    typer.echo(f"written: {out}")


@bench.command()
def compare(
    old: Annotated[str, typer.Argument(help="JSON of strobe bench.")],
    new: Annotated[str, typer.Argument(help="Another, of the same GPU, phase and protocol.")],
    fail_slower: Annotated[
        float | None, typer.Option(help="Status 1 if a point is under so many times its old speed, beyond its noise.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Draw the ratios with their noise to this PNG or SVG.", callback=writable)
    ] = None,
    json: JsonFile = None,
) -> None:
    """Compare two reports point by point: the speed of new over old, and whether they differ by more than the rounds' noise."""
    from pathlib import Path

    from strobe.lab.bench.compare import compare as run

    try:
        floor, picture = positive("fail-slower", fail_slower), picture_path(out)
        status = run(Path(old), Path(new), floor, Path(json) if json else None, picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@app.command()
def tune(
    head_dims: HeadDims = None,
    quick: Annotated[bool, typer.Option("--quick", help="At few lengths.")] = False,
    json: Annotated[
        str | None, typer.Option(help="The table; default: your own, in your cache folder.", callback=writable)
    ] = None,
) -> None:
    """Time the Hopper forward's configs on this GPU, and write the table that its choices come from (docs/tuning.md)."""
    from pathlib import Path

    from strobe.lab.bench.tune import tune as run

    try:
        status = run(pairs_of_dims(head_dims), quick, command_given(sys.argv[1:]), Path(json) if json else None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@app.command()
def timeline(
    context: typer.Context,
    head_dims: Annotated[str, typer.Option(help="Comma-separated.")] = "64,128",
    length: Annotated[int, typer.Option(help="Sequence length.")] = 4096,
    mask: Annotated[str, typer.Option(help="Of full, causal, comma-separated.")] = "full,causal",
    simulate: Annotated[bool, typer.Option("--simulate", help="By the simulator's clock; needs no GPU.")] = False,
    report: Annotated[str | None, typer.Option(help="Draw this JSON instead of measuring.")] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Default: benchmarks/results/timeline-<gpu>-<date>.json; none with --simulate.", callback=writable),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Draw to this PNG or SVG; default: a PNG beside the JSON.", callback=writable)
    ] = None,
    perfetto: Annotated[
        str | None, typer.Option(help="Write whole CTAs here too, as a trace for ui.perfetto.dev.", callback=writable)
    ] = None,
) -> None:
    """Show when each warp role of the Hopper forward does what, in cycles, on this GPU or simulated; a table and a picture."""
    from pathlib import Path

    from strobe.lab.bench.machine import save
    from strobe.lab.bench.report import default_path
    from strobe.lab.timeline import timeline as timelines

    at_least(1, length=length)
    picture = picture_path(out)
    if report is not None:
        alone(context, "report", "out", "perfetto")
        path: Path | None = Path(report)
        try:
            measurement = timelines.load(Path(report))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    else:
        from strobe.lab.timeline import tracing

        masks, dims = names_of("mask", mask, ("full", "causal")) or (), numbers_of("head-dims", head_dims) or ()
        for dim in dims:
            heads_and_dims(1, None, dim, None)
        try:
            run = tracing.simulate if simulate else tracing.measure
            measurement = run(dims, masks, length, command_given(sys.argv[1:]))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        path = Path(json) if json else None if simulate else default_path(measurement)
        if path is not None:
            typer.echo(f"written: {save(path, measurement, indent=None)}")
    typer.echo(timelines.table(measurement))
    typer.echo(f"\nof the time of a typical CTA (and hidden under other work of it):\n{timelines.hidden_table(measurement)}")
    drawn = picture or (path and path.with_suffix(".png"))
    if drawn is not None:
        typer.echo(f"written: {timelines.draw(timelines.measured(measurement), drawn)}")
    if perfetto is not None:
        made = {key: measurement[key] for key in ("date", "command", "device")}
        trace = made | timelines.perfetto(timelines.whole_ctas(measurement))
        typer.echo(f"written: {save(Path(perfetto), trace, indent=None)}")


@app.command()
def simulate(
    context: typer.Context,
    file: Annotated[str | None, typer.Argument(help="A Python file whose simulation() returns a strobe.sim.Launch.")] = None,
    backend: Annotated[str, typer.Option(help="Without a file: which of our forward kernels, sm80, sm90 or sm100.")] = "sm90",
    seqlen_q: Annotated[int, typer.Option(help="Queries of a sequence.")] = 300,
    seqlen_kv: Keys = None,
    heads: Heads = 2,
    heads_kv: KeyHeads = None,
    head_dim: HeadDim = 64,
    head_dim_v: HeadDimV = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask.")] = False,
    window: WindowSides = None,
    config: Annotated[str | None, typer.Option(help="Change the config, such as q_stages=1,split_p=false.")] = None,
    orders: Annotated[
        str, typer.Option(help="Of in_order, random, late, early, uneven.")
    ] = "in_order,random,late,early,uneven",
    seeds: Annotated[int, typer.Option(help="Runs of each order that takes a seed.")] = 3,
    timeline: Annotated[
        str | None,
        typer.Option(help="Draw what each role does when, by the cost model, to this PNG or SVG.", callback=writable),
    ] = None,
) -> None:
    """Run a Gluon kernel on the CPU: are its numbers right, and is there a race, a deadlock or a missing fence in it?"""
    from pathlib import Path

    from strobe.call.dispatch import backend_module
    from strobe.device import KNOWN
    from strobe.lab.simulated.simulate import attention, draw_timeline, launches_of, simulate_all
    from strobe.sim.attention import BACKENDS

    at_least(1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, seeds=seeds)
    chosen = names_of("orders", orders, ("in_order", "random", "late", "early", "uneven")) or ()
    one_of("backend", backend, BACKENDS)
    picture = picture_path(timeline, "timeline")
    try:
        if file is not None:
            alone(context, "file", "orders", "seeds", "timeline")
            factory = launches_of(Path(file))
        else:
            problem = problem_of(
                seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads=heads, heads_kv=heads_kv, head_dim=head_dim,
                head_dim_v=head_dim_v, dtype=dtype, causal=causal, window=window,
            )  # fmt: skip
            reason = backend_module(backend).refuses(problem, KNOWN[{"sm80": "A100", "sm90": "H200", "sm100": "B200"}[backend]])
            if reason is not None:
                raise typer.BadParameter(f"{backend} {reason}")
            changed = changed_config(BACKENDS[backend][1](problem), config, ("head_dim", "head_dim_v")) if config else None
            factory = attention(problem, backend, changed)
        status = simulate_all(factory, chosen, seeds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if picture is not None:
        typer.echo(f"written: {draw_timeline(factory, picture)}")
    raise typer.Exit(status)


@app.command()
def blackwell() -> None:
    """Simulate the Blackwell forward with its ideas switched off one by one, and write the tables and pictures of its page."""
    from pathlib import Path

    from strobe.lab.blackwell.page import PAGE, make

    if not PAGE.exists():
        raise typer.BadParameter(f"strobe blackwell must run in the repository, where {PAGE} is")
    make(Path())


app.registered_commands += instruments.registered_commands
app.add_typer(ladder, name="ladder", no_args_is_help=True)


def _at_least_time(problem: AttentionProblem, arch: Arch) -> str:
    from strobe.lab.model.cost import Cost

    try:
        return str(Cost(problem).lower_bound(arch))
    except ValueError as error:
        return f"unknown: {error}"


def main() -> None:
    """The `strobe` command.

    What libraries write as the interpreter ends is left out: Triton's bindings list every object of the compiler that is still
    there, which is no use to the reader of a table."""
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()))
    app()
