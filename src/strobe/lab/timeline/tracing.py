"""Where a kernel's cycles go: runs it with stamps, on a GPU or in the simulator, and keeps what its roles did when.

The stamps come back as one report: for each problem the steady state of the consumers over all CTAs
(see `strobe.sim.trace.phases`), and the stamps of a few typical CTAs, which `strobe.lab.timeline.timeline` draws.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median, quantiles

import torch

from strobe.device import KNOWN, arch_of
from strobe.kernels.sm90.config import Config
from strobe.lab.bench.machine import Telemetry, provenance
from strobe.lab.progress import each
from strobe.masks import Causal, Full
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.sim.trace import Stamps, phases

TOKENS = 16384
SAMPLED, KEPT = 256, 3
"""CTAs whose steady state is computed, spread over the grid; CTAs whose stamps are kept."""
LOAD_SECONDS = 1.0
"""How long launches run without a pause before the measurement: clocks and power settle, and the telemetry sees them."""


def measure(head_dims: Sequence[int], masks: Sequence[str], length: int, command: str) -> dict:
    """The report of a forward of TOKENS tokens, bf16, for each head dim and mask ("full", "causal") on the current GPU.

    ValueError if there is no Hopper GPU, or it takes no such problem.
    """
    from strobe.kernels.sm90 import backend

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arch = arch_of(device)
    problems = [(head_dim, mask, _problem(head_dim, mask, length)) for head_dim in head_dims for mask in masks]
    for _, _, problem in problems:
        reason = backend.refuses(problem, arch)
        if reason:
            raise ValueError(f"sm90 {reason}" + ("" if arch.capability == 90 else "; --simulate works without one"))
    report: dict = {
        "what": "timeline",
        **provenance(device, command),
        "points": [],
    }
    with Telemetry(device) as telemetry:
        for head_dim, mask, problem in problems:
            facts = {"head_dim": head_dim, "mask": mask, "length": length, "tokens": TOKENS, "heads": problem.heads_q}
            report["points"].append(facts | _point(problem, device, telemetry))
    return report


def simulate(head_dims: Sequence[int], masks: Sequence[str], length: int, command: str) -> dict:
    """The same report without a GPU: from the simulator's clock, for the last query tile of one head."""
    asked = [(head_dim, mask) for head_dim in head_dims for mask in masks]
    return {
        "what": "timeline, simulated",
        **provenance("simulated sm_90", command),
        "points": [_simulated_point(head_dim, mask, length) for head_dim, mask in each(asked, "simulating")],
    }


def _simulated_point(head_dim: int, mask: str, length: int) -> dict:
    from strobe import sim
    from strobe.kernels.common.call import Tensors
    from strobe.kernels.common.stamp import COUNT, ROLES, clock
    from strobe.kernels.sm90 import backend
    from strobe.kernels.sm90.forward import forward_kernel
    from strobe.kernels.sm90.launch import buffers, forward_call
    from strobe.sim.attention import unwritten  # which brings Python for the kernels' PTX
    from strobe.sim.context import machine
    from strobe.sim.tensor import Scalar

    sim.register(clock, lambda: Scalar(1 + int(machine().partition.time), torch.int64))  # 0 says "not passed"
    config = backend.long_config(_problem(head_dim, mask, length))
    problem = replace(_problem(head_dim, mask, length), lengths=Dense(1, config.tile_q, length), heads_q=1, heads_kv=1)
    q, k, v = (torch.randn(1, n, 1, head_dim).to(problem.dtype) for n in (config.tile_q, length, length))
    tensors = Tensors(q=q, k=k, v=v, **unwritten(buffers(problem)))
    trace = torch.zeros(-(-length // config.tile_kv), 1, ROLES.value, COUNT.value, dtype=torch.int64)
    call = forward_call(problem, tensors, KNOWN["H200"], config, trace)
    rewritable = ("notes", "counters")
    report = sim.simulate(
        forward_kernel, (*call.grid, 1, 1), *call.arguments, order="timed", rewritable=rewritable, **call.keywords
    )
    facts = {"head_dim": head_dim, "mask": mask, "length": length, "cycles": report.cycles}
    return facts | _analysis(trace.permute(1, 2, 3, 0), config)


def _problem(head_dim: int, mask: str, length: int) -> AttentionProblem:
    heads = max(1, 2048 // head_dim)
    return AttentionProblem(
        lengths=Dense(max(1, TOKENS // length), length, length),
        heads_q=heads,
        heads_kv=heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=torch.bfloat16,
        scale=head_dim**-0.5,
        mask=Causal() if mask == "causal" else Full(),
    )


def _point(problem: AttentionProblem, device: torch.device, telemetry: Telemetry) -> dict:
    from strobe.kernels.sm90 import backend
    from strobe.lab.forward_alone import launch, launch_traced

    lengths, config = problem.lengths, backend.long_config(problem)
    assert isinstance(lengths, Dense)
    shape = (lengths.batch, lengths.seqlen_q, problem.heads_q, problem.head_dim)
    operands = Operands(*(torch.randn(shape, device=device).to(problem.dtype) for _ in range(3)))
    launch(problem, operands, config)
    launch_traced(problem, operands, config)
    torch.cuda.synchronize()
    start = time.monotonic()
    while time.monotonic() - start < LOAD_SECONDS:
        for _ in range(20):
            launch(problem, operands, config)
        torch.cuda.synchronize()
    stamps = launch_traced(problem, operands, config).cpu()
    return {"telemetry": telemetry.since(start)} | _analysis(stamps, config)


def _analysis(stamps: torch.Tensor, config: Config) -> dict:
    """What a report says of the stamps of a launch. ValueError where no CTA reaches a steady state."""
    roles = [f"consumer {w}" for w in range(config.groups)] + ["producer"]
    steady = _steady(stamps, roles)
    if not steady:
        raise ValueError(
            "timeline: a CTA must have more blocks of keys to be in a steady state, got none: give a longer length"
        )
    return {
        "config": str(config),
        "tile_q": config.tile_q,
        "tile_kv": config.tile_kv,
        "ctas": stamps.shape[0],
        "steady": _spread([s for _, s in steady]),
        "cta_cycles": _spread([{"cta": _duration(stamps, cta)} for cta, _ in steady])["cta"],
        "typical": {str(cta): _of_cta(stamps, roles, cta) for cta in _typical(steady)},
    }


def _of_cta(stamps: torch.Tensor, roles: list[str], cta: int) -> Stamps:
    """The stamps of a CTA from [CTAs, roles, events, blocks], clocks counted from its first one; 0 stays "not passed"."""
    from strobe.kernels.common.stamp import EVENTS

    mine = stamps[cta, : len(roles)]
    since = torch.where(mine == 0, 0, mine - mine[mine > 0].min() + 1)
    return {role: dict(zip(EVENTS, events, strict=True)) for role, events in zip(roles, since.tolist(), strict=True)}


def _duration(stamps: torch.Tensor, cta: int) -> float:
    mine = stamps[cta]
    return float(mine.max() - mine[mine > 0].min())


def _steady(stamps: torch.Tensor, roles: list[str]) -> list[tuple[int, dict[str, float]]]:
    """(CTA, phases of all its consumers) of CTAs spread over the grid, those with too few blocks left out."""
    ctas = stamps.shape[0]
    found = []
    for cta in range(0, ctas, max(1, ctas // SAMPLED)):
        of = _of_cta(stamps, roles, cta)
        try:
            each = [phases(of[role]) for role in roles[:-1]]
        except ValueError:
            continue
        found.append((cta, {name: sum(one[name] for one in each) / len(each) for name in each[0]}))
    return found


def _spread(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Over samples: median, tenth and ninetieth percentile of each quantity."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    tenths = {name: quantiles(column * 2, n=10, method="inclusive") for name, column in columns.items()}  # 2: one is too few
    return {name: {"median": median(columns[name]), "p10": cuts[0], "p90": cuts[-1]} for name, cuts in tenths.items()}


def _typical(steady: list[tuple[int, dict[str, float]]]) -> list[int]:
    """The CTAs whose periods are the closest to the median."""
    middle = median(sample["period"] for _, sample in steady)
    return [cta for cta, _ in sorted(steady, key=lambda item: abs(item[1]["period"] - middle))[:KEPT]]
