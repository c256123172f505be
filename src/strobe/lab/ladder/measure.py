"""`strobe ladder run`: every rung checked against float64, then timed beside PyTorch's attention; without a GPU simulated.

On a GPU. Each rung is compiled, run once into poisoned memory and compared with float64; a wrong one is reported and not timed.
Then rungs and peers take turns: a round times each of them once, by CUDA events over launches in a row, after an untimed lead
as long; the median of the rounds counts. What takes longer than `ALONE` seconds a call is timed once. Rung 0 runs on one core
of the CPU, on the first queries of the first head, and its time is that of all of them by proportion.

Without a GPU a rung's numbers are checked in the simulator on a small problem, and only rung 0 has a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from strobe.device import KNOWN, Arch, arch_of
from strobe.lab.bench.accuracy import BOUNDS
from strobe.lab.bench.bench import CudaClock
from strobe.lab.bench.failures import compact
from strobe.lab.bench.machine import Telemetry, provenance
from strobe.lab.bench.peers import bind, peers_for
from strobe.lab.bench.plan import DTYPES, Inputs, Point
from strobe.lab.ladder.checked import checked, name_of, relative_error, simulated
from strobe.lab.ladder.compiled import compile_rung, of_rung
from strobe.lab.ladder.edited import told, variant, without
from strobe.ladder import RUNGS, Rung

ROUNDS, SECONDS, ALONE = 5, 0.02, 0.05
"""How many rounds there are, how long one timing lasts, and the call that is so long that one is enough."""

GRAPH_SECONDS, GRAPH_BELOW = 0.002, 0.02
"""How many seconds of calls a CUDA graph holds, about, and how long a call may take to be in one."""

PEERS = "SDPA flash", "SDPA cuDNN"
"""PyTorch's attentions: FlashAttention-2 (mma.sync), and cuDNN's, which uses whatever the GPU has."""

CPU_FLOPS = 2e9
"""Multiply-adds of rung 0 that are timed, counted as two FLOPs each."""


@dataclass(frozen=True)
class Problem:
    """The problem that all rungs are given: dense, no mask."""

    heads: int
    length: int
    head_dim: int
    dtype: str

    @property
    def flops(self) -> int:
        return 4 * self.heads * self.length**2 * self.head_dim

    def inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normal q, k and v [heads, S, D], the same numbers for all dtypes but for their rounding."""
        generator = torch.Generator(device).manual_seed(0)
        shape = self.heads, self.length, self.head_dim
        q, k, v = (torch.randn(shape, generator=generator, device=device).to(DTYPES[self.dtype]) for _ in range(3))
        return q.to(dtype), k.to(dtype), v.to(dtype)


Step = Callable[[int, str], None]
"""Called before each step with how many rungs are done, and what comes."""


def run(
    problem: Problem, device: torch.device, command: str, max_seconds: float, rungs: tuple[Rung, ...] = RUNGS,
    rounds: int = ROUNDS, on_step: Step = lambda done, what: None,
) -> dict[str, Any]:  # fmt: skip
    """The report as a JSON object. It stops after `max_seconds`, with what was measured until then. ValueError if no rung takes
    the problem."""
    started = time.monotonic()
    arch = arch_of(device) if device.type == "cuda" else None
    kinds = [(rung, torch.float32 if rung.takes_fp32 else DTYPES[problem.dtype]) for rung in rungs]
    refusals = [
        reason
        for rung, kind in kinds
        if (reason := rung.refuses(problem.length, problem.head_dim, kind, arch.capability if arch else rung.least))
    ]
    if len(refusals) == len(rungs):
        raise ValueError(refusals[0])
    report: dict[str, Any] = {
        "what": "ladder",
        **provenance(device, command),
        "problem": {**vars(problem), "flops": problem.flops},
        "protocol": {"rounds": rounds, "seconds": SECONDS, "alone": ALONE, "gate": BOUNDS, "clock": "CUDA events"},
        "rungs": [{"number": rung.number, "name": rung.name, "title": rung.title} for rung in rungs],
        "peers": {},
        "roofs": {},
        "telemetry": {},
        "stopped": None,
    }

    def late() -> bool:
        if time.monotonic() - started > max_seconds:
            report["stopped"] = f"after {max_seconds:g} s"
        return report["stopped"] is not None

    on_step(0, "compilers")
    compiled = _compile_all(rungs, arch, problem)
    for done, (rung, facts) in enumerate(zip(rungs, report["rungs"], strict=True)):
        facts |= compiled[rung.number][0]
        if late():
            break
        if rung.number == 0:
            on_step(done, f"rung {rung.number}: on one core")
            facts |= _on_a_core(rung, problem)
        elif arch is None:
            on_step(done, f"rung {rung.number}: simulated")
            facts |= simulated(rung, DTYPES[problem.dtype])
    if arch is not None and not late():
        clock = CudaClock(device)
        with torch.cuda.device(device), clock.running(), Telemetry(device) as telemetry:
            _on_a_gpu(problem, arch, clock, device, rungs, compiled, report, rounds, late, on_step)
            report["telemetry"] = telemetry.since(started)
    return report


Compilations = dict[int, list[dict[str, Any]]]
"""A rung's number -> for each of its tiles "compiled for", and "compiled" or, in words, "not compiled"."""


def _compile_all(rungs: tuple[Rung, ...], arch: Arch | None, problem: Problem) -> Compilations:
    """Static numbers of all tiles of all rungs, in processes of their own, which leave in Triton's cache what will run.
    Without a GPU those of the first tiles, for an A100 or an H200, whichever the rung needs."""
    tiles = {rung.number: rung.tiles(problem.head_dim) if rung.least else [{}] for rung in rungs}
    jobs = [
        (number, arch or KNOWN["A100" if RUNGS[number].least < 90 else "H200"], problem, tile)
        for number, choices in tiles.items()
        for tile in (choices if arch else choices[:1])
    ]
    if arch is None:
        found = [_compiled(job) for job in jobs]
    else:
        workers = min(16, os.cpu_count() or 1, len(jobs))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            found = [_result(future) for future in [pool.submit(_compiled, job) for job in jobs]]
    by_rung: Compilations = {}
    for (number, *_), facts in zip(jobs, found, strict=True):
        by_rung.setdefault(number, []).append(facts)
    return by_rung


def _result(future: Future) -> dict[str, Any]:
    """What a process compiled, or in words that it died."""
    try:
        return future.result()
    except Exception as error:
        return {"not compiled": compact(error)}


def _compiled(job: tuple[int, Arch, Problem, dict]) -> dict[str, Any]:
    number, arch, problem, tile = job
    rung = RUNGS[number]
    if not rung.least:
        return {}
    facts: dict[str, Any] = {"compiled for": str(arch)}
    dtype = torch.float32 if rung.takes_fp32 else DTYPES[problem.dtype]
    try:
        return facts | {"compiled": of_rung(compile_rung(rung, arch, problem.head_dim, problem.length, dtype, tile))}
    except Exception as error:
        return facts | {"not compiled": compact(error)}


def _on_a_core(rung: Rung, problem: Problem) -> dict[str, Any]:
    """Rung 0's error and time, from as many queries of the first head as `CPU_FLOPS` allow; or that numba is missing."""
    if find_spec("numba") is None:
        return {"refused": "rung 0 needs numba, which is not installed"}
    rows = max(1, min(problem.length, int(CPU_FLOPS / (4 * problem.length * problem.head_dim))))
    q, k, v = (x[:1].contiguous() for x in problem.inputs(torch.device("cpu"), torch.float32))
    few = q[:, :rows].contiguous()
    rung.attention(few[:, :1].contiguous(), k, v)  # compiles
    begin = time.perf_counter()
    out = rung.attention(few, k, v)
    seconds = (time.perf_counter() - begin) * problem.heads * problem.length / rows
    error = relative_error(out, few, k, v)
    return {"error": error, **checked(error, "fp32"), "seconds": [seconds], "timed": f"{rows} of {problem.length} queries"}


# ---- on a GPU


@dataclass
class Contender:
    """What is timed: its facts, what runs `calls` calls of it, and the seconds of one."""

    facts: dict[str, Any]
    run: Callable[[], object]
    calls: int
    once: float


def _ready(facts: dict[str, Any], call: Callable[[], object], clock: CudaClock) -> Contender:
    """A call that has run before, as a CUDA graph of several where it is short: then Python's time does not count."""
    once = clock.seconds(call, 1)
    run, calls = call, 1
    if once < GRAPH_BELOW:
        times = max(1, min(32, round(GRAPH_SECONDS / once)))
        try:
            run, _ = clock.captured([call], times)
            run()
            clock.synchronize()
            calls = times
        except Exception as error:
            clock.synchronize()
            run, facts["no graph"] = call, compact(error.__context__ or error)
    return Contender(facts, run, calls, min(clock.seconds(run, 1) for _ in range(2)) / calls)


def _on_a_gpu(
    problem: Problem, arch: Arch, clock: CudaClock, device: torch.device, rungs: tuple[Rung, ...], compiled: Compilations,
    report: dict, rounds: int, late: Callable[[], bool], on_step: Step,
) -> None:  # fmt: skip
    ready: list[Contender] = []
    tensors = {dtype: problem.inputs(device, dtype) for dtype in (torch.float32, DTYPES[problem.dtype])}
    for done, (rung, facts) in enumerate(zip(rungs, report["rungs"], strict=True)):
        if rung.number == 0:
            continue
        if late():
            return
        on_step(done, f"rung {rung.number}: checked against float64")
        kind = torch.float32 if rung.takes_fp32 else DTYPES[problem.dtype]
        reason = rung.refuses(problem.length, problem.head_dim, kind, arch.capability)
        if reason is not None:
            facts["refused"] = reason
        else:
            ready += _entered(rung, problem, tensors[kind], facts, compiled[rung.number], clock)
    ready += _without_waits(rungs, report, ready, tensors[DTYPES[problem.dtype]], clock)
    ready += _variants(rungs, report, ready, tensors[DTYPES[problem.dtype]], clock)
    for name in PEERS:
        if not late():
            on_step(len(rungs), f"{name}: checked against float64")
            _enter_peer(name, problem, tensors[DTYPES[problem.dtype]], report["peers"], ready, clock)
    on_step(len(rungs), "roofs")
    _roofs(report, device, arch, DTYPES[problem.dtype], clock)
    for number in range(rounds):
        for contender in ready:
            if late():
                return
            if number == 0 or contender.once < ALONE:
                on_step(len(rungs), f"round {number + 1} of {rounds}")
                _time(contender, clock)


def _entered(rung: Rung, problem: Problem, inputs, facts: dict, compiled: list[dict], clock: CudaClock) -> list[Contender]:
    """The rung with its fastest tile, ready to be timed; none if no tile works. A tile that is wrong or fails is in the facts,
    and if it is one of several the others still run."""
    q, k, v = inputs
    found: list[tuple[Contender, int]] = []
    tiles, faults = rung.tiles(problem.head_dim), []
    for number, tile in enumerate(tiles):
        poison = torch.full_like(q, float("nan"))  # in the memory that the result may get
        del poison
        try:
            error = relative_error(rung.attention(q, k, v, **tile), q, k, v)
            fault = checked(error, name_of(q.dtype))
            if not fault:
                found.append((_ready({"error": error, **tile}, partial(rung.attention, q, k, v, **tile), clock), number))
        except Exception as failure:
            clock.synchronize()
            fault = {"failed": compact(failure)}
        if fault:
            faults.append({**tile, **fault})
    if faults:
        facts["faults"] = faults
        facts |= {name: fault[name] for fault in faults for name in ("wrong", "failed") if name in fault}
    if not found:
        return []
    if len(tiles) > 1:
        facts["tiles"] = [{"tile": contender.facts["tile"], "seconds": contender.once} for contender, _ in found]
    best, number = min(found, key=lambda one: one[0].once)
    facts |= compiled[number] | best.facts
    best.facts = facts
    return [best]


def _without_waits(rungs, report: dict, ready: list[Contender], inputs, clock: CudaClock) -> list[Contender]:
    """The rungs whose cp.async waits can be left out, without them: what the waits cost, whatever the numbers become. Waits
    for an mbarrier are not left out on a GPU, as a barrier that is out of step may hang."""
    q, k, v = inputs
    added = []
    report["removed"] = []
    by_facts = {contender.facts["number"]: contender for contender in ready}
    for rung in rungs:
        for statement in rung.waits:
            facts: dict[str, Any] = {"rung": rung.number, "statement": statement}
            report["removed"].append(facts)
            try:
                facts["simulator"] = told(rung, statement)
            except ImportError as missing:
                facts["simulator"] = f"not asked: {missing}"
            if rung.number not in by_facts or not statement.startswith("cp_async"):
                continue
            with without(rung, statement) as edited:
                call = partial(edited.attention, q, k, v)
                call()
                added.append(_ready(facts, call, clock))
    return added


def _variants(rungs, report: dict, ready: list[Contender], inputs, clock: CudaClock) -> list[Contender]:
    """The other ways to do what a rung does, checked and ready to be timed."""
    q, k, v = inputs
    added = []
    report["variants"] = []
    entered = {contender.facts.get("number") for contender in ready}
    for rung in rungs:
        for title, old, new in rung.variants if rung.number in entered else ():
            facts: dict[str, Any] = {"rung": rung.number, "title": title}
            report["variants"].append(facts)
            with variant(rung, old, new) as edited:
                call = partial(edited.attention, q, k, v)
                facts["error"] = relative_error(call(), q, k, v)
                facts |= checked(facts["error"], name_of(q.dtype))
                if "wrong" not in facts:
                    added.append(_ready(facts, call, clock))
    return added


def _enter_peer(
    name: str, problem: Problem, inputs: tuple[torch.Tensor, ...], peers: dict, ready: list[Contender], clock: CudaClock
) -> None:
    device = inputs[0].device
    peer = peers_for(device).get(name)
    if peer is None:
        peers[name] = {"refused": "not there"}
        return
    q, k, v = inputs
    point = Point(
        1, problem.length, problem.heads, problem.heads, problem.head_dim, problem.head_dim, problem.dtype, "full", False
    )
    q_in, k_in, v_in = (x[None].transpose(1, 2) for x in inputs)
    try:
        call = bind(peer, point, Inputs(q_in, k_in, v_in, None))

        def within() -> torch.Tensor:
            with peer.context():
                return call()

        error = relative_error(within()[0], q, k, v)
        found = {"error": error, **checked(error, problem.dtype)}
        peers[name] = found
        if "wrong" not in found:
            ready.append(_ready(found, within, clock))
    except Exception as failure:
        clock.synchronize()
        peers[name] = {"refused": compact(failure)}


def _time(contender: Contender, clock: CudaClock) -> None:
    count = max(1, round(SECONDS / max(contender.once * contender.calls, 1e-6)))
    if count > 1:
        clock.seconds(contender.run, count)
    contender.facts.setdefault("seconds", []).append(clock.seconds(contender.run, count) / contender.calls)
    contender.facts.setdefault("mhz", []).append(clock.mhz())


def _roofs(report: dict, device: torch.device, arch: Arch, dtype: torch.dtype, clock: CudaClock) -> None:
    """What the units reach in this run, in FLOP/s: cuBLAS, a bare loop of mma.sync; by the data sheet at this clock FFMA."""
    from strobe.lab.ladder.roofs import mma_flops

    x = torch.randn(8192, 8192, device=device).to(dtype)
    x @ x
    report["roofs"]["matrix product"] = 2 * 8192**3 / min(clock.seconds(lambda: x @ x, 5) for _ in range(2))
    report["roofs"]["mma.sync"] = mma_flops(device, dtype, clock)
    if arch.fp32_flops:
        report["roofs"]["FFMA, by the data sheet"] = arch.fp32_flops * (clock.mhz() or arch.clock / 1e6) * 1e6 / arch.clock


def seconds_of(facts: dict) -> float | None:
    """A rung's or a peer's time of a call, the median of its rounds; None if it has none."""
    return median(facts["seconds"]) if facts.get("seconds") else None
