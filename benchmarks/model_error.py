"""How wrong the simulator's clock is: cycles of the Hopper kernels of today, measured and simulated.

    python benchmarks/model_error.py --json benchmarks/results/cycles-h200.json                  # on a Hopper GPU
    python benchmarks/model_error.py --of benchmarks/results/cycles-h200.json --json benchmarks/results/model-error-h200.json

The first measures; the second simulates the same configs, on a CPU, and compares (`--of` takes a measured timeline, too). Of a
forward both have the same stamps and the same analysis (`strobe timeline`): cycles a consumer takes for a block of keys, and
for each phase of it. A backward has no stamps. Its cycles of a tile of rows are what a launch takes longer at twice the length
with as many tokens (launches around the main kernel, and what comes once a block of keys, are the same), shared out to the
multiprocessors; and in the simulator what a CTA takes longer for twice as many tiles.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch

from strobe.kernels.sm90 import backward_config
from strobe.lab.bench.machine import provenance, save
from strobe.lab.timeline import tracing
from strobe.masks import Full
from strobe.problem import AttentionProblem, Dense, lse_shape

HEAD_DIMS, MASKS = (64, 128, 256), ("full", "causal")
LENGTH = 4096
"""Of a forward. Which config runs depends on it."""

BACKWARD_DIM, TOKENS, HEADS = 128, 16384, 33
"""33 heads of 128 blocks of 128 keys are 32 blocks for each of an H200's 132 multiprocessors."""
LENGTHS = (8192, 16384)
TILES = (8, 16)
"""Of rows, in the simulated backward."""
ROUNDS, LAUNCHES = 12, 8


def backward_problem(batch: int, rows: int, keys: int, heads: int) -> AttentionProblem:
    return AttentionProblem(
        lengths=Dense(batch, rows, keys), heads_q=heads, heads_kv=heads, head_dim=BACKWARD_DIM, head_dim_v=BACKWARD_DIM,
        dtype=torch.bfloat16, scale=BACKWARD_DIM**-0.5, mask=Full(), phase="backward",
    )  # fmt: skip


def one_pass(problem: AttentionProblem) -> backward_config.Config:
    """The config that runs. TypeError where it is not the backward in one pass, of which alone this script knows the tiles."""
    config = backward_config.choose(problem)
    if not isinstance(config, backward_config.Config):
        raise TypeError(f"head dim {BACKWARD_DIM} must run the backward in one pass, got {config}")
    return config


# ---- on a GPU


def measured() -> dict:
    """Forwards by their stamps, and a backward by its time."""
    forwards = tracing.measure(HEAD_DIMS, MASKS, LENGTH, "")["points"]
    return {"forward": [{k: v for k, v in at.items() if k != "typical"} for at in forwards], "backward": [backward_cycles()]}


def backward_cycles() -> dict:
    """Of a tile of rows and a block of keys, from launches of two lengths in turn; the SMs' clock is counted beside them."""
    from strobe.lab.bench.bench import CudaClock

    device = torch.device("cuda")
    clock, calls = CudaClock(device), [backward_call(length, device) for length in LENGTHS]
    cycles: list[list[float]] = [[], []]
    with clock.running():
        for number in range(ROUNDS + 1):
            for call, found in zip(calls, cycles, strict=True):
                seconds = clock.seconds(call, LAUNCHES)
                if number:  # the first is a warm-up
                    found.append(seconds * (clock.mhz() or 0) * 1e6)
    config = one_pass(backward_problem(TOKENS // LENGTHS[0], LENGTHS[0], LENGTHS[0], HEADS))
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    more_tiles = HEADS * (TOKENS // backward_config.KEYS) * (LENGTHS[1] - LENGTHS[0]) // config.tile_q
    each = [(long - short) * sms / more_tiles for short, long in zip(*cycles, strict=True)]
    facts = {"head_dim": BACKWARD_DIM, "mask": "full", "lengths": LENGTHS, "config": str(config), "tile_q": config.tile_q}
    return facts | {"cycles": median(each), "rounds": each}


def backward_call(length: int, device: torch.device):
    """A whole backward, by its prepared tensors."""
    import strobe

    shape = (TOKENS // length, length, HEADS, BACKWARD_DIM)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = strobe.attention(*inputs, backend="sm90")
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


# ---- in the simulator


def simulated() -> dict:
    forwards = tracing.simulate(HEAD_DIMS, MASKS, LENGTH, "")["points"]
    return {"forward": [{k: v for k, v in at.items() if k != "typical"} for at in forwards], "backward": [simulated_backward()]}


def simulated_backward() -> dict:
    config = one_pass(backward_problem(TOKENS // LENGTHS[0], LENGTHS[0], LENGTHS[0], HEADS))
    few, more = (simulated_cycles(config, tiles) for tiles in TILES)
    facts = {"head_dim": BACKWARD_DIM, "mask": "full", "config": str(config), "tile_q": config.tile_q}
    return facts | {"cycles": (more - few) / (TILES[1] - TILES[0])}


def simulated_cycles(config: backward_config.Config, tiles: int) -> float:
    """Of one CTA with one block of keys and so many tiles of rows."""
    from strobe.kernels.common.call import Tensors
    from strobe.kernels.sm90 import backward, backward_launch
    from strobe.sim import simulate
    from strobe.sim.attention import backward_launches, unwritten

    keys, rows = backward_config.KEYS, tiles * config.tile_q
    problem = backward_problem(1, rows, keys, 1)
    make = torch.Generator().manual_seed(0)
    q, k, v, out, dout = (
        torch.randn(1, n, 1, BACKWARD_DIM, generator=make).to(torch.bfloat16) for n in (rows, keys, keys, rows, rows)
    )
    lse = torch.full(lse_shape(problem), 5.0)
    made = unwritten(backward_launch.buffers(problem, config))
    tensors = Tensors(q=q, k=k, v=v, out=out, lse=lse, dout=dout, **made)
    prepare = backward_launch.prepare_call(problem, tensors, config)
    prepared = simulate(prepare.kernel, prepare.grid, **prepare.keywords)
    [launch] = backward_launches(backward, problem, tensors, config)
    return launch.simulate("timed", after=prepared).cycles


# ---- both


def compared(measured: dict, simulated: dict) -> list[dict]:
    """A row for each kernel, head dim and mask: cycles of a tile, in all and by phase, measured and simulated."""
    rows = []
    for kernel, points in measured.items():
        by_name = {(at["head_dim"], at["mask"]): at for at in simulated[kernel]}
        for mine in points:
            theirs = by_name[mine["head_dim"], mine["mask"]]
            if mine["config"] != theirs["config"]:
                raise ValueError(f"measured and simulated need the same config, got {mine['config']} and {theirs['config']}")
            parts = {"total": (_cycles(mine), _cycles(theirs))}
            if "steady" in mine:
                names = (name for name in mine["steady"] if name != "period")
                parts |= {name: (mine["steady"][name]["median"], theirs["steady"][name]["median"]) for name in names}
            cycles = {name: {"measured": a, "simulated": b, "ratio": b / a if a else None} for name, (a, b) in parts.items()}
            rows.append({"kernel": kernel, "head_dim": mine["head_dim"], "mask": mine["mask"], "cycles": cycles})
    return rows


def _cycles(point: dict) -> float:
    return point["cycles"] if "steady" not in point else point["steady"]["period"]["median"]


def table(rows: list[dict]) -> str:
    lines = [["kernel", "D", "mask", "what", "measured", "simulated", "simulated / measured"], ["---"] * 7]
    for row in rows:
        for name, at in row["cycles"].items():
            ratio = "-" if at["ratio"] is None else f"{at['ratio']:.2f}"
            names = [row["kernel"], str(row["head_dim"]), row["mask"], name]
            lines.append([*names, f"{at['measured']:.0f}", f"{at['simulated']:.0f}", ratio])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", type=Path, help="what was measured: simulate the same, and compare")
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.of is None:
        save(options.json, {"what": "cycles of a tile", **provenance(torch.device("cuda")), **measured()})
        return
    found = json.loads(options.of.read_text())
    points = {"forward": found["points"]} if found["what"] == "timeline" else {k: found[k] for k in ("forward", "backward")}
    rows = compared(points, simulated())
    print(table(rows))
    head = provenance(f"sm_90, simulated, beside {found['device']['name']}")
    of = {"file": options.of.name, "date": found["date"], "commit": found["device"]["commit"]}
    save(options.json, {"what": "error of the simulator's clock", **head, "measured": of, "points": rows})


if __name__ == "__main__":
    main()
