"""What it costs to compute blocks twice: the Hopper forward with an optimistic softmax, of whose blocks some are noted.

The rows of a noted block weigh the last key by 2^200 more than any other, and meet it after the block that fixes m.
The kernel with a running maximum ("safe") computes the same inputs. All are CUDA graphs, so that Python does not count, timed
in interleaved rounds; medians. Prints a table and writes JSON.

    python benchmarks/redo_cost.py --json benchmarks/results/redo-cost.json
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

import strobe
from strobe.lab.bench.machine import provenance, save

ROUNDS, LAUNCHES = 15, 10
TOKENS, WIDTH = 16384, 2048
LENGTHS = (1024, 4096, 16384)
HEAD_DIMS = (64, 128)
PERCENTS = (0, 1, 10, 100)
ROWS = 64
EXCESS = 200.0
"""Powers of two by which the one key exceeds the others: beyond what any dtype can hold."""


def inputs(length: int, head_dim: int, percent: int) -> list[torch.Tensor]:
    """q, k, v of which the given share of blocks of 64 rows is noted, spread evenly over all rows and heads."""
    shape = (TOKENS // length, length, WIDTH // head_dim, head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    batch, heads, blocks = shape[0], shape[2], length // ROWS
    number = torch.arange(batch * heads * blocks, device="cuda")
    noted = number * percent // 100 != (number + 1) * percent // 100
    rows = noted.view(batch, heads, blocks).repeat_interleave(ROWS, dim=2).transpose(1, 2)
    size = math.sqrt(EXCESS * math.log(2.0) * math.sqrt(head_dim))
    q[..., 0], k[..., 0] = size * rows, 0.0
    k[:, -1, :, 0] = size
    return [q, k, v]


def launches(qkv: list[torch.Tensor], optimistic: bool) -> tuple[Callable[[], None], int]:
    """A CUDA graph of LAUNCHES calls, as a function that replays it, and how many blocks one call computes again.
    The graph reads `qkv` in each replay: they have to live as long."""
    strobe.use_optimistic_softmax(optimistic)
    try:
        before = strobe.redone_blocks("cuda")
        strobe.attention(*qkv, backend="sm90")
        redone = strobe.redone_blocks("cuda") - before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                strobe.attention(*qkv, backend="sm90")
    finally:
        strobe.use_optimistic_softmax(True)
    return graph.replay, redone


def milliseconds(run: Callable[[], None]) -> float:
    """Of one launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / LAUNCHES


def point(length: int, head_dim: int) -> dict:
    """Medians of all contestants, which take turns."""
    blocks = TOKENS // ROWS * (WIDTH // head_dim)
    given = {percent: inputs(length, head_dim, percent) for percent in PERCENTS}
    prepared = {f"{percent} %": launches(qkv, True) for percent, qkv in given.items()}
    prepared["safe"] = launches(given[0], False)
    contestants = {name: run for name, (run, _) in prepared.items()}
    shares = {name: redone / blocks for name, (_, redone) in prepared.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(ROUNDS):
        names = list(contestants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(milliseconds(contestants[name]))
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {"length": length, "head_dim": head_dim, "ms": medians, "redone": shares}


def table(points: list[dict]) -> str:
    """Milliseconds, and in brackets the ratio to the safe kernel."""
    names = [f"{percent} %" for percent in PERCENTS]
    lines = [["head dim", "length", "safe, ms", *names], ["---"] * (3 + len(names))]
    for at in points:
        ms = at["ms"]
        cells = [f"{ms[name]:.3f} ({ms[name] / ms['safe']:.2f})" for name in names]
        lines.append([str(at["head_dim"]), str(at["length"]), f"{ms['safe']:.3f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    torch.manual_seed(0)
    points = [point(length, head_dim) for head_dim, length in product(HEAD_DIMS, LENGTHS)]
    print(table(points))
    for at in points:
        print(f"head dim {at['head_dim']}, length {at['length']}: redone {at['redone']}")
    if options.json:
        result = {"rounds": ROUNDS, "launches": LAUNCHES, "points": points}
        save(options.json, {"what": "redo cost", **provenance(torch.device("cuda")), **result})


if __name__ == "__main__":
    main()
