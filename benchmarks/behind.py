"""A decode step behind a matrix product, as in a model, beside the step alone.

Alone, launches of one kernel follow each other: its instructions are in the caches, and each launch begins while the one ahead
ends. In a model other kernels come between, which read more than the L2 cache holds. Here each step follows the product of 16
rows with a matrix of 64 MiB, and what products take by themselves is subtracted. Of Strobe, and of FlashAttention-3 with its
plan made ahead where it is installed; 64 heads on 8, pages of 64 keys. Every contender is compared with float64 first. CUDA
graphs over copies of the cache beyond the L2 cache, interleaved rounds, medians, as `strobe bench decode` has them. Prints a
line for each point and writes JSON.

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

ROUNDS, PRODUCTS = 7, 100
ROWS, DEPTH, COLUMNS = 16, 4096, 8192
PEER = "FA3 planned"


def make_product() -> Callable[[], object]:
    """A product as a model has it ahead of its attention, which reads a matrix of 64 MiB."""
    shapes = (ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS)
    x, weights, out = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return partial(torch.mm, x, weights, out=out)


def us_of(run: Callable[[], object], clock: CudaClock) -> float:
    """Microseconds of a run where others like it follow."""
    replay, _ = clock.captured([run], PRODUCTS)
    clock.seconds(replay, 1)
    return median(1e6 * clock.seconds(replay, 1) / PRODUCTS for _ in range(ROUNDS))


def behind(ahead: Callable[[], object], prepare: Callable[[Inputs], Call], inputs: Inputs) -> Call:
    """A contender's call, with something ahead of it."""
    call = prepare(inputs)

    def both():
        ahead()
        return call()

    return both


def contenders(ahead: Callable[[], object]) -> list[Contender]:
    """Strobe and the peer, alone and behind something."""
    peer = peers_for(torch.device("cuda"))[PEER]
    alone = [OURS[0]] + ([peer] if peer.installed else [])
    return alone + [Contender(f"{one.name} behind", partial(behind, ahead, one.prepare)) for one in alone]


def line_of(facts: dict, product_us: float) -> str:
    """The point, and what each contender takes alone and behind a product."""
    us = {name: result["us"] for name, result in facts["results"].items() if "us" in result}
    pairs = [f"{name} {us[name]:.1f}, {us[f'{name} behind'] - product_us:.1f}" for name in us if f"{name} behind" in us]
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
        ahead = make_product()
        product_us = us_of(ahead, clock)
        print(f"a product: {product_us:.1f} us", flush=True)
        for point in asked:
            points.append(measure(point, contenders(ahead), clock, device, ROUNDS))
            print(line_of(points[-1], product_us), flush=True)
    if options.json:
        facts = {"what": "behind", **provenance(device), "rounds": ROUNDS, "product_us": product_us, "points": points}
        save(options.json, facts)


if __name__ == "__main__":
    main()
