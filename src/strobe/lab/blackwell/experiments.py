"""`strobe blackwell`: the Blackwell forward with its ideas switched off one by one, by the simulator's clock.

Every experiment runs twice, because how well the compiler interleaves the operations of a role decides much, and only a GPU can
tell: "as written", one operation on a tile after the other, and "interleaved", none waiting for the pipe of the one before it
(`interleaving` of `strobe.sim.costs`). Cycles are the slope between a run of few and one of more blocks of keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from strobe.kernels.sm100.config import ROWS_PER_STAGE, Config, choose
from strobe.masks import Causal, Full, Mask
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.sim.attention import simulate_forward
from strobe.sim.costs import SM100, Cost, Costs
from strobe.sim.machine import Report

FEW, MORE = 4, 8
"""Blocks of keys of the two runs whose difference counts; from the third block on every block takes as long as the next."""

SCHEDULES = {"as written": 0.0, "interleaved": 1.0}
MEASURED = Path("benchmarks/results/model-error-h100.json")
"""The Hopper forward on an H100."""

GROWTH = 12.0
"""By how many powers of two the row maxima of growing inputs grow from block to block: more than any rescale_threshold."""


@dataclass(frozen=True)
class Experiment:
    """changes: of the Config; costs: what some cost is instead, by its name in `Costs.named`; growing: inputs whose row maxima
    grow so much from block to block that O is always rescaled, otherwise they are normal."""

    name: str
    changes: Mapping[str, int | bool | float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    head_dim: int = 128
    growing: bool = False


def _scaled(names: tuple[str, ...], factor: float) -> dict[str, float]:
    return {name: factor * SM100.named()[name] for name in names}


BARRIERS = ("arrive", "wait", "passing_wait")
EVERY = {"rescale_threshold": 0.0}
WITHOUT = {"correction": False}
BASE = Experiment("")

EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {
    "stages": (
        Experiment("two Q stages"),
        Experiment("one Q stage", {"q_stages": 1}),
        Experiment("one Q stage, no correction warps", {"q_stages": 1, **WITHOUT}),
        Experiment("one Q stage, no split P", {"q_stages": 1, "split_p": False}),
    ),
    "rows": (
        Experiment("reductions take 73 cycles more than their arithmetic"),
        Experiment("they take none", costs={"reduction_latency": 0.0}),
        Experiment("they take 146", costs={"reduction_latency": 146.0}),
    ),
    "emulation": tuple(
        Experiment(f"head dim {dim}, {emulated} of 16 in half of a block", {"emulated": emulated}, head_dim=dim)
        for dim in (128, 64)
        for emulated in (0, 1, 2, 4, 8, 16)
    ),
    "split": tuple(
        Experiment(f"head dim {dim}, {name}", changes, head_dim=dim)
        for dim in (128, 64)
        for name, changes in (("P in 3/4 and 1/4", {}), ("P at once", {"split_p": False}))
    ),
    "barriers": (
        Experiment("barriers as assumed"),
        Experiment("barriers cost nothing", costs=_scaled(BARRIERS, 0.0)),
        Experiment("barriers cost twice as much", costs=_scaled(BARRIERS, 2.0)),
    ),
    "rescaling": (
        Experiment("never needed, correction warps"),
        Experiment("never needed, softmax warps", WITHOUT),
        Experiment("every block, correction warps", EVERY, growing=True),
        Experiment("every block, softmax warps", {**EVERY, **WITHOUT}, growing=True),
    ),
    "ctas": (
        Experiment("one CTA"),
        Experiment("one CTA that rescales O every block", EVERY, growing=True),
        Experiment("two CTAs, which always do", {"two_ctas": True}),
    ),
    "ring": tuple(
        Experiment(f"{stages} slots{far}", {"kv_stages": stages}, costs)
        for far, costs in (("", {}), (", copies arrive 4 times as late", _scaled(("tma_latency",), 4.0)))
        for stages in (2, 3)
    ),
}
"""The tables, by name; in each, the first row is what the others are compared with."""

CHANGED_COSTS: dict[str, dict[str, float]] = {
    f"{name}, times {factor}": _scaled(names, factor)
    for name, names in {
        "barriers and fences": (*BARRIERS, "fence"),
        "issue, latency and commit of products": ("mma_issue", "mma_latency", "commit_latency"),
        "latency of registers and reductions": ("register_latency", "reduction_latency"),
        "rates of tensor memory": ("rate of tmem_load", "rate of tmem_store"),
        "rate of conversions": ("rate of convert",),
        "copies": ("tma_issue", "tma_latency", "tma_bytes"),
    }.items()
    for factor in (0.5, 1.5)
}

NOTHING: dict[str, float] = {}

ANSWERS: dict[str, tuple[Experiment, Experiment]] = {
    "one Q stage": (Experiment("", {"q_stages": 1}), BASE),
    "P at once": (Experiment("", {"split_p": False}), BASE),
    "no exp2 emulated": (Experiment("", {"emulated": 0}), BASE),
    "no exp2 emulated, D 64": (Experiment("", {"emulated": 0}, head_dim=64), Experiment("", head_dim=64)),
    "no correction warps": (Experiment("", WITHOUT), BASE),
    "no correction warps, rescaling every block": (
        Experiment("", {**EVERY, **WITHOUT}, growing=True),
        Experiment("", EVERY, growing=True),
    ),
}
"""What each answer compares: the cycles of the first over those of the second."""


# ---- one experiment


def problem_of(config: Config, blocks: int, mask: Mask | None = None, heads: int = 1) -> AttentionProblem:
    """One tile of queries a head, with so many blocks of keys; under a causal mask the last keys are the queries' own."""
    return AttentionProblem(
        lengths=Dense(1, config.tile_q, blocks * config.tile_kv),
        heads_q=heads,
        heads_kv=heads,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim_v,
        dtype=torch.bfloat16,
        scale=config.head_dim**-0.5,
        mask=mask or Full(),
    )


def inputs_of(problem: AttentionProblem, growing: bool = False) -> Operands:
    """Normal q, k and v; growing: with something added to q and k that makes the scores of each block of 128 keys GROWTH powers
    of two larger than those of the block to the right of it, which the kernel takes before it."""
    lengths, heads, dim = problem.lengths, problem.heads_q, problem.head_dim
    assert isinstance(lengths, Dense)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, dim, generator=generator) for n in (lengths.seqlen_q, lengths.seqlen_kv, lengths.seqlen_kv)
    )
    if growing:
        block = torch.arange(lengths.seqlen_kv) // 128
        q[..., 0] = 16.0
        k[..., 0] = (GROWTH / (16.0 * problem.scale * 1.4427) * (block.max() - block))[None, :, None]
    return Operands(q.to(problem.dtype), k.to(problem.dtype), v.to(problem.dtype))


def costs_with(changed: Mapping[str, float], interleaving: float) -> Costs:
    """Costs of sm_100 with other numbers, by their names in `Costs.named`."""
    made = {name: Cost(value, "an experiment", assumed=True) for name, value in changed.items()}
    rates = {name.removeprefix("rate of "): cost for name, cost in made.items() if name.startswith("rate of ")}
    single: dict[str, Any] = {name: cost for name, cost in made.items() if not name.startswith("rate of ")}
    single["interleaving"] = Cost(interleaving, "an experiment", assumed=True)
    return replace(SM100, rates=MappingProxyType({**SM100.rates, **rates}), **single)


def config_of(experiment: Experiment) -> Config:
    plain = Config(experiment.head_dim, experiment.head_dim)
    changes: dict[str, Any] = dict(experiment.changes)
    return replace(choose(problem_of(plain, FEW)), **changes)


def run(experiment: Experiment, schedule: str, blocks: int) -> Report:
    """One timed run of a tile of queries."""
    config = config_of(experiment)
    problem = problem_of(config, blocks)
    costs = costs_with(experiment.costs, SCHEDULES[schedule])
    return simulate_forward(problem, inputs_of(problem, experiment.growing), "sm100", config, "timed", costs=costs).report


def steady(experiment: Experiment, schedule: str) -> dict:
    """cycles: of 128 query rows and 128 keys. busy: the part of the time in which each unit works. Of a block of keys of all
    stages: barrier_uses, waits, arrivals and commits of each role; mma_waits, cycles that the MMA warp waits."""
    few, more = (run(experiment, schedule, blocks) for blocks in (FEW, MORE))
    period, blocks = more.cycles - few.cycles, MORE - FEW
    uses = {key: (number - few.barrier_uses[key]) / blocks for key, number in sorted(more.barrier_uses.items())}
    return {
        "cycles": round(period / blocks / config_of(experiment).q_stages, 1),
        "busy": {unit: round((cycles - few.busy[unit]) / period, 4) for unit, cycles in more.busy.items()},
        "barrier_uses": {f"{role}: {what}": number for (role, what), number in uses.items() if number},
        "mma_waits": round((_waits(more, "mma") - _waits(few, "mma")) / blocks, 1),
    }


def _waits(report: Report, role: str) -> float:
    return sum(span.end - span.start for span in report.spans if (span.track, span.kind) == (role, "wait"))


# ---- other runs


def totals() -> dict[str, float]:
    """Cycles of whole runs, prologue and epilogue included, as written."""
    config = config_of(Experiment(""))
    costs = costs_with({}, 0.0)

    def cycles(mask: Mask, heads: int = 1) -> float:
        problem = problem_of(config, MORE, mask, heads)
        report = simulate_forward(problem, inputs_of(problem), "sm100", config, "timed", costs=costs).report
        return round(report.cycles, 1)

    return {
        f"one tile, {MORE} blocks": cycles(Full()),
        f"one tile, {MORE} blocks, causal: the last two are masked": cycles(Causal()),
        f"four tiles of {MORE} blocks, one persistent CTA": cycles(Full(), heads=4),
    }


def rescales(threshold: float, blocks: int, growing: bool = False) -> float:
    """In which part of all blocks but the first of a stage its O is rescaled: where any of 128 rows needs it."""
    config = Config(128, 128)
    problem = problem_of(config, blocks)
    q, k = (x.float() for x in inputs_of(problem, growing)[:2])
    scores = torch.einsum("bqhd,bkhd->qk", q, k) * problem.scale * 1.4427
    maxima = scores.reshape(config.tile_q, blocks, config.tile_kv).amax(-1).flip(1)
    row_max, events = maxima[:, 0], 0
    for block_max in maxima[:, 1:].unbind(1):
        grows = block_max - row_max > threshold
        row_max = torch.where(grows, block_max, row_max)
        events += int(grows.reshape(-1, ROWS_PER_STAGE).any(1).sum())
    return events / (blocks - 1) / config.q_stages


def hopper(root: Path) -> dict[str, dict[str, float]]:
    """Cycles of a block of keys of the Hopper forward, full attention, by the same simulator and of an H100, by head dim: what
    `benchmarks/model_error.py` found."""
    points = json.loads((root / MEASURED).read_text())["points"]
    found = {str(at["head_dim"]): at["cycles"]["total"] for at in points if (at["kernel"], at["mask"]) == ("forward", "full")}
    return {dim: {name: total[name] for name in ("simulated", "measured")} for dim, total in found.items()}


def columns() -> list[dict]:
    """Arrangements of tensor memory at head dim 128 and the columns that they take: those of Config, and others."""
    two, one = Config(128, 128), Config(128, 128, q_stages=1)
    s, o = two.tile_kv, two.head_dim_v
    arrangements = {
        "two Q stages, P inside S": two.tmem_columns(),
        "two Q stages, P beside S": 2 * (s + s // 2 + o),
        "two Q stages, two S each": 2 * (2 * s + o),
        "two Q stages, one S for both": s + 2 * o,
        "three Q stages, P inside S": 3 * (s + o),
        "two Q stages, P inside S, 64 keys a block": replace(two, tile_kv=64).tmem_columns(),
        "one Q stage, P inside S": one.tmem_columns(),
        "one Q stage, two S": 2 * s + o,
    }
    return [{"arrangement": name, "columns": number} for name, number in arrangements.items()]


def machine_code() -> dict:
    """Counts in the machine code of the kernels at head dim 128, without a mask: the shuffles of each role, and how many
    instructions stand between products of the MMA warp and between exponentials of a softmax warp. Takes no GPU."""
    from strobe.lab.binary.offline import audit_sm90_forward, audit_sm100_forward

    hopper, blackwell = audit_sm90_forward((128, 128), Full()), audit_sm100_forward((128, 128), Full())
    return {
        "shuffles": {
            name: {role: counts.get("SHFL", 0) for role, counts in audit.roles.items()}
            for name, audit in (("sm90", hopper), ("sm100", blackwell))
        },
        "between_products": _between(blackwell.listings["mma"], "UTCHMMA"),
        "between_exponentials": _between(blackwell.listings["softmax 0"], "MUFU.EX2"),
        "spill_bytes": blackwell.spill_bytes,
    }


def _between(listing: list[str], name: str) -> list[int]:
    """How many other instructions stand between one `name` and the next."""
    places = [i for i, found in enumerate(listing) if found == name]
    return [after - before - 1 for before, after in pairwise(places)]


# ---- all of it


def report(root: Path) -> Iterator[tuple[str, dict]]:
    """What is done next, with what is there so far; the last one is the whole report. root: of the repository."""
    from strobe.lab.bench.machine import provenance

    result: dict = {
        "what": "Blackwell forward, simulated: no GPU was there, every number comes from a model of costs",
        **provenance("no GPU", "strobe blackwell"),
        "blocks": [FEW, MORE],
        "costs": {n: {"value": float(c), "source": c.source, "assumed": c.assumed} for n, c in SM100.named().items()},
    }
    result["experiments"] = {}
    for name, experiments in EXPERIMENTS.items():
        yield name, result
        result["experiments"][name] = [
            {"name": experiment.name, "config": str(config_of(experiment))}
            | {schedule: steady(experiment, schedule) for schedule in SCHEDULES}
            for experiment in experiments
        ]
    yield "sensitivity", result
    result["sensitivity"] = dict(sensitivity())
    yield "tiles", result
    result["totals"] = totals()
    result["rescales"] = {
        f"threshold {threshold:g}, {'growing' if growing else 'normal'} inputs, {blocks} blocks": rescales(
            threshold, blocks, growing
        )
        for threshold, blocks, growing in ((0.0, 8, False), (0.0, 64, False), (8.0, 64, False), (8.0, 8, True))
    }
    result["columns"] = columns()
    yield "Hopper", result
    result["hopper"] = hopper(root)
    yield "compiling", result
    result["machine_code"] = machine_code()
    yield "done", result


def sensitivity() -> Iterator[tuple[str, dict[str, float]]]:
    """Each answer as a ratio of cycles, with the costs as they are, and with what is assumed of them changed by half."""
    for schedule in SCHEDULES:
        for name, changed in {"nothing": NOTHING, **CHANGED_COSTS}.items():
            yield f"{schedule}; {name}", {answer: _ratio(pair, changed, schedule) for answer, pair in ANSWERS.items()}


def _ratio(pair: tuple[Experiment, Experiment], changed: Mapping[str, float], schedule: str) -> float:
    first, second = (steady(replace(experiment, costs=changed), schedule)["cycles"] for experiment in pair)
    return round(first / second, 3)
