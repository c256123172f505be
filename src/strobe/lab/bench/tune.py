"""`strobe tune`: times the configs of a kernel on this GPU, and writes the table from which the kernel chooses.

1. Candidates come from arithmetic (`candidates` beside the kernel), and all are compiled first, in many processes.
2. Gate. A config whose kernel spills, touches local memory or has its wgmma made serial is rejected, and so is one whose
   result is further from float64 than a benchmark allows.
3. Rounds. At each point every config runs once a round as a CUDA graph of several launches, in a balanced order; the median
   counts.
4. Few configs are kept: where several are equally good within `TOLERANCE`, one is enough, and each costs its users a
   compilation.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from strobe.device import KNOWN, arch_of
from strobe.kernels.sm90.config import Config, candidates, padded
from strobe.lab.bench.accuracy import BOUNDS, out_error
from strobe.lab.bench.bench import CudaClock, balanced_order
from strobe.lab.bench.failures import compact
from strobe.lab.bench.machine import Telemetry, Watchdog, describe
from strobe.lab.bench.plan import Inputs
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import Audit, audit
from strobe.lab.model.cost import Cost
from strobe.masks import Causal, Full, Mask, Window
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.tuning.table import SCHEMA, Dims, Shape, load, name_of, users

ARCH = "sm90"

HEAD_DIMS: tuple[Dims, ...] = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))

TOKENS, ROUNDS, SECONDS = 16384, 6, 0.01
"""Batch x length of a point; how many times each config is timed there; how many seconds one timing takes."""

TOLERANCE = 0.02
"""Rates that differ by less than this share count as equal, since two runs differ by as much."""

HANG_SECONDS = 60.0

Step = Callable[[str], None]


# ---- what is measured


def points(head_dims: Dims, quick: bool) -> list[AttentionProblem]:
    """The problems at which a pair of head dims is measured: full and causal at several lengths, and windows of several
    widths."""
    lengths = (1024, 4096, 16384) if quick else (512, 1024, 2048, 4096, 8192, 16384, 32768)
    widths = (1024,) if quick else (128, 1024, 4096)
    masks: list[tuple[Mask, int]] = [(mask, length) for mask in (Full(), Causal()) for length in lengths]
    masks += [(Window(width - 1, 0), TOKENS) for width in widths]
    head_dim, head_dim_v = head_dims
    heads = max(1, 2048 // head_dim)
    return [
        AttentionProblem(
            lengths=Dense(max(1, TOKENS // length), length, length),
            heads_q=heads,
            heads_kv=heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=torch.bfloat16,
            scale=head_dim**-0.5,
            mask=mask,
        )
        for mask, length in masks
    ]


def name(config: Config) -> str:
    """The name of a config in a table: the fields that tell it from other configs of the same head dims."""
    fields = asdict(config)
    return name_of({field: fields[field] for field in ("groups", "tile_kv", "num_stages", "q_stages", "o_buffers")})


# ---- compiling


Job = tuple[Config, bool]
"""A kernel to compile: its config, and whether it has a mask."""


def compiled(job: Job) -> Audit:
    """Compiles the kernel of a job, without a GPU, and returns its Audit. The kernel stays in Triton's cache, where a launch
    finds it."""
    from strobe.kernels.sm90 import launch

    config, masked = job
    problem = AttentionProblem(
        lengths=Dense(256, 4096, 4096),
        heads_q=1,
        heads_kv=1,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim_v,
        dtype=torch.bfloat16,
        scale=1.0,
        mask=Causal() if masked else Full(),
    )
    with pretend_gpu(90):
        kernel = launch.compile_only(problem, KNOWN["H200"], config)
    return audit(kernel, f"dims {config.head_dim}, {config.head_dim_v}, {name(config)}" + ", masked" * masked)


def compile_all(jobs: Iterable[Job], on_step: Step = lambda what: None) -> dict[Job, Audit]:
    """Compiles all jobs, in as many processes as there are processors (16 at most), and returns the Audit of each."""
    jobs = list(jobs)
    workers = max(1, min(16, os.cpu_count() or 1, len(jobs)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(compiled, job): job for job in jobs}
        audits = {}
        for done, future in enumerate(as_completed(running), 1):
            audits[running[future]] = future.result()
            on_step(f"compiled {done} of {len(jobs)} kernels")
    return audits


FEW_BYTES = 16
"""How many bytes a kernel may spill: a few numbers that it needs once a tile. (Head dim 256, causal, 16k, was as fast with
them.)"""


def flaw(audit: Audit) -> str | None:
    """Why a compiled kernel cannot be as fast as it should, or not right; or None."""
    if audit.spill_bytes > FEW_BYTES:
        return f"spills {audit.spill_bytes} bytes"
    if not audit.spill_bytes and audit.instructions.keys() & {"LDL", "STL"}:
        return "uses local memory"
    if audit.warnings:
        return f"ptxas: {audit.warnings[0].strip()}"
    if audit.wrong_code:
        return audit.wrong_code[0]
    if audit.smem_bytes > KNOWN["H200"].smem_per_block:
        return f"takes {audit.smem_bytes} bytes of shared memory"
    return None


# ---- timing


@dataclass
class Contender:
    """A config that is ready to be timed at a point. run: replays a CUDA graph of `launches` launches. seconds: of one launch,
    in each round."""

    name: str
    run: Callable[[], object]
    launches: int
    seconds: list[float]


def enter(config: Config, problem: AttentionProblem, inputs: Inputs, clock: CudaClock) -> Contender:
    """Launches a config, checks the result and captures the launch in a CUDA graph. ValueError if the result is wrong."""
    from strobe.lab.forward_alone import launch

    operands = Operands(inputs.q, inputs.k, inputs.v)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        made = launch(problem, operands, config)
        return made.out, made.notes

    call()
    seconds = clock.seconds(call, 2)
    launches = max(1, min(32, round(SECONDS / seconds)))
    run, [(out, notes)] = clock.captured([call], launches)
    run()
    clock.synchronize()
    error = out_error(out, inputs, problem.mask)
    if not error <= BOUNDS["bf16"]:
        raise ValueError(f"wrong: relative error {error:.1e} against float64, allowed {BOUNDS['bf16']:.0e}")
    if notes.any():
        raise ValueError("wrong: a block of rows asks to be redone, which plain inputs never need")
    return Contender(name(config), run, launches, [])


def measure(
    problem: AttentionProblem, configs: Sequence[Config], clock: CudaClock, rejected: dict[str, str], on_step: Step
) -> dict[str, float]:
    """TFLOP/s of each config at a point, by name. A config that fails is added to `rejected`, with the reason."""
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = problem.lengths

    def normal(length: int, heads: int, dim: int) -> torch.Tensor:
        shape = (lengths.batch, length, heads, dim)
        return torch.randn(shape, device="cuda", generator=generator).to(problem.dtype)

    q = normal(lengths.seqlen_q, problem.heads_q, problem.head_dim)
    k = normal(lengths.seqlen_kv, problem.heads_kv, problem.head_dim)
    v = normal(lengths.seqlen_kv, problem.heads_kv, problem.head_dim_v)
    contenders = []
    for config in configs:
        on_step(f"{problem.mask} {lengths}: {name(config)}")
        try:
            contenders.append(enter(config, problem, Inputs(q, k, v, None), clock))
        except Exception as error:
            rejected[name(config)] = f"{problem.mask}, {lengths}: {compact(error)}"
            clock.synchronize()  # it raises again if the GPU is lost
    for order in balanced_order(len(contenders), ROUNDS):
        for contender in (contenders[place] for place in order):
            contender.seconds.append(clock.seconds(contender.run, 1) / contender.launches)
    flops = Cost(problem).quoted_flops
    return {contender.name: round(flops / median(contender.seconds) / 1e12, 1) for contender in contenders}


def keep(rates: Sequence[dict[str, float]], tolerance: float = TOLERANCE) -> list[str]:
    """Few configs, so chosen that at every point one of them is as fast as the fastest, within the tolerance: the one that is
    so at the most points, then the one that is so at the most of the other points, and so on.

    rates: for each point, name -> TFLOP/s, with the same names at all points."""
    left = [{config for config, rate in at.items() if rate >= (1 - tolerance) * max(at.values())} for at in rates]
    kept: list[str] = []
    while left:
        best = max(rates[0], key=lambda config: (sum(config in good for good in left), sum(at[config] for at in rates)))
        kept.append(best)
        left = [good for good in left if best not in good]
    return kept


# ---- the table


def tune(head_dims: Sequence[Dims] | None, quick: bool, command: str, path: Path | None = None) -> int:
    """Measures configs, and prints and writes the result after each pair of head dims. Returns the exit status.

    path: of the table, a JSON; None: the user's own table. Its entries for other head dims stay.

    ValueError without a Hopper GPU, or for a path with something else. A kernel that hangs ends the process with status 3."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arch_of(device).capability != 90:
        raise ValueError(f"strobe tune times kernels for Hopper on a Hopper GPU (sm_90), got {arch_of(device)}")
    console, path, found = Console(stderr=True), path or users(ARCH), list[dict]()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = load(path, ARCH)["head_dims"] if path.exists() else []

    def hung(what: str) -> None:
        console.print(f"hung: {what}; the head dims before it are in {path}, if any", markup=False)
        os._exit(3)

    with (
        Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, refresh_per_second=4) as progress,
        Watchdog(hung) as watchdog,
        Telemetry(device) as telemetry,
    ):
        dims = list(dict.fromkeys((padded(of_k), padded(of_v)) for of_k, of_v in head_dims or HEAD_DIMS))
        made = provenance(device, command)
        for of in measured(dims, quick, progress, watchdog, telemetry):
            found.append(made | of)
            path.write_text(json.dumps(merged(known, found), indent=1) + "\n")
    show(found)
    console.print(f"written: {path}", markup=False)
    return 0


def provenance(device: torch.device, command: str) -> dict:
    """Facts about how an entry of a table was made: when, by which command and on what, as a JSON object."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "device": describe(device),
        "protocol": {"rounds": ROUNDS, "seconds": SECONDS, "tolerance": TOLERANCE, "gate": BOUNDS["bf16"], "dtype": "bf16"},
    }


def merged(known: Sequence[dict], found: Sequence[dict]) -> dict:
    """A table with one entry for each pair of head dims: the found one, where there is one, else the known one."""
    by_dims = {(of["head_dim"], of["head_dim_v"]): of for of in (*known, *found)}
    return {"schema": SCHEMA, "arch": ARCH, "head_dims": [by_dims[dims] for dims in sorted(by_dims)]}


def measured(
    head_dims: Sequence[Dims], quick: bool, progress: Progress, watchdog: Watchdog, telemetry: Telemetry
) -> Iterator[dict]:
    """Measures pairs of head dims one after the other, and yields the table's entry for each."""
    jobs = [(config, masked) for dims in head_dims for config in candidates(*dims) for masked in (False, True)]
    compiling = progress.add_task("", total=len(jobs))
    audits = compile_all(jobs, lambda what: progress.update(compiling, advance=1, description=what))
    flaws = {config: reason for (config, _), audit in audits.items() if (reason := flaw(audit))}
    timing = progress.add_task("", total=sum(len(points(dims, quick)) for dims in head_dims))

    def step(what: str) -> None:
        progress.update(timing, description=what)
        watchdog.expect(what, HANG_SECONDS)

    clock = CudaClock(torch.device("cuda"))
    with clock.running():
        for dims in head_dims:
            rejected = {name(config): flaws[config] for config in candidates(*dims) if config in flaws}
            rates, start = [], time.monotonic()
            for problem in points(dims, quick):
                left = [config for config in candidates(*dims) if name(config) not in rejected]
                rates.append((problem, measure(problem, left, clock, rejected, step)))
                progress.update(timing, advance=1)
            yield entry(dims, rates, rejected) | {"telemetry": telemetry.since(start)}


def entry(dims: Dims, found: Sequence[tuple[AttentionProblem, dict[str, float]]], rejected: dict[str, str]) -> dict:
    """The table's entry for a pair of head dims. ValueError if no config is left."""
    rates = [{config: rate for config, rate in at.items() if config not in rejected} for _, at in found]
    if not all(rates):
        raise ValueError(f"no config for head dims {dims[0]}, {dims[1]} passed: {rejected}")
    facts: list[dict] = []
    for (problem, _), tflops in zip(found, rates, strict=True):
        shape = Shape.of(problem.lengths, problem.heads_q, problem.mask.band)
        at = {"mask": shape.mask, "keys": shape.keys, "batch": shape.sequences, "length": shape.length, "heads": shape.heads}
        facts.append(at | {"tflops": tflops})
    return {"head_dim": dims[0], "head_dim_v": dims[1], "kept": keep(rates), "rejected": rejected, "points": facts}


def show(entries: Sequence[dict]) -> None:
    """Prints each point with the rates of the configs that are kept, the fastest in bold; then these configs, and the rejected
    ones."""
    console = Console()
    for of in entries:
        shown = Table(title=f"head dims {of['head_dim']}, {of['head_dim_v']}: TFLOP/s on {of['device']['name']}")
        for column in ("mask", "length", "keys a row", *(f"config {i}" for i in range(1, len(of["kept"]) + 1))):
            shown.add_column(column, justify="left" if column == "mask" else "right")
        for at in of["points"]:
            rates = [at["tflops"][config] for config in of["kept"]]
            cells = [f"[bold]{rate:.0f}[/bold]" if rate == max(rates) else f"{rate:.0f}" for rate in rates]
            shown.add_row(at["mask"], str(at["length"]), str(at["keys"]), *cells)
        console.print(shown)
        for i, config in enumerate(of["kept"], 1):
            console.print(f"config {i}: {config}", markup=False, highlight=False)
        for config, reason in of["rejected"].items():
            console.print(f"rejected: {config}: {reason}", markup=False, highlight=False)
