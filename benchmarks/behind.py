"""A decode step behind a matrix product, as in a model, beside the step alone.

Alone, launches of one kernel follow each other: its instructions are in the caches, and each launch begins while the one ahead
ends. In a model other kernels come between, which read more than the L2 cache holds. Here each step follows the product of 16
rows with a matrix of 64 MiB and a copy of its queries, which so are in the L2 cache; what both take by themselves is
subtracted. Of Strobe, and of FlashAttention-3 with its plan made ahead where it is installed; 64 heads on 8, pages of 64 keys.
Every contender is compared with float64 first. CUDA graphs over copies of the cache beyond the L2 cache, interleaved rounds,
medians, as `strobe bench decode` has them. Prints a line for each point and writes JSON.

    python benchmarks/behind.py [--json FILE] [--batches 1,8,32] [--lengths 1024,8192] [--queries 1,4,16]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch

from strobe.device import arch_of
from strobe.lab.bench.bench import CudaClock
from strobe.lab.bench.decode import compile_ahead, measure
from strobe.lab.bench.decode_peers import OURS, Call, Contender, Inputs, Point, peers_for
from strobe.lab.bench.machine import provenance, save

ROUNDS, LAUNCHES = 7, 100
ROWS, DEPTH, COLUMNS = 16, 4096, 8192
PEER = "FA3 planned"

Ahead = Callable[[torch.Tensor], Callable[[], object]]
"""What comes ahead of a step that has these queries."""


def make_ahead() -> Ahead:
    """A product that reads a matrix of 64 MiB, and a copy of the queries."""
    shapes = (ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS)
    x, weights, out = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)

    def ahead_of(q: torch.Tensor) -> Callable[[], object]:
        kept = q.clone()

        def ahead() -> object:
            torch.mm(x, weights, out=out)
            return q.copy_(kept)

        return ahead

    return ahead_of


def behind(ahead_of: Ahead, prepare: Callable[[Inputs], Call], inputs: Inputs) -> Call:
    """A contender's call, with something ahead of it."""
    ahead, call = ahead_of(inputs.q), prepare(inputs)

    def both() -> object:
        ahead()
        return call()

    return both


def us_ahead(ahead_of: Ahead, point: Point, clock: CudaClock) -> float:
    """Microseconds of what comes ahead of a point's step, where others like it follow."""
    q = torch.zeros((point.batch, point.queries, point.heads, point.head_dim), dtype=torch.bfloat16, device="cuda")
    replay, _ = clock.captured([ahead_of(q)], LAUNCHES)
    clock.seconds(replay, 1)
    return median(1e6 * clock.seconds(replay, 1) / LAUNCHES for _ in range(ROUNDS))


def contenders(ahead_of: Ahead) -> list[Contender]:
    """Strobe and the peer, alone and behind something."""
    peer = peers_for(torch.device("cuda"))[PEER]
    alone = [OURS[0]] + ([peer] if peer.installed else [])
    return alone + [Contender(f"{one.name} behind", partial(behind, ahead_of, one.prepare)) for one in alone]


def line_of(facts: dict) -> str:
    """The point, and what each contender takes alone and behind."""
    us = {name: result["us"] for name, result in facts["results"].items() if "us" in result}
    pairs = [f"{name} {us[name]:.1f}, {us[f'{name} behind'] - facts['ahead_us']:.1f}" for name in us if f"{name} behind" in us]
    return f"B={facts['batch']} kv={facts['length']} x {facts['queries']}: {'; '.join(pairs)} us alone, behind"


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--lengths", type=numbers, default=[1024, 8192])
    parser.add_argument("--queries", type=numbers, default=[1, 4, 16])
    options = parser.parse_args()
    device, points = torch.device("cuda"), []
    each = product(options.queries, options.lengths, options.batches)
    asked = [Point(batch, length, 64, 8, queries=queries) for queries, length, batch in each]
    compile_ahead(asked, arch_of(device), deterministic=False)
    clock = CudaClock(device)
    with torch.no_grad(), clock.running():
        ahead_of = make_ahead()
        for point in asked:
            facts = measure(point, contenders(ahead_of), clock, device, ROUNDS)
            points.append({**facts, "ahead_us": us_ahead(ahead_of, point, clock)})
            print(line_of(points[-1]), flush=True)
    if options.json:
        save(options.json, {"what": "behind", **provenance(device), "rounds": ROUNDS, "points": points})


if __name__ == "__main__":
    main()
