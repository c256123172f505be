"""Multi-head latent attention over a paged cache, beside FlashMLA's dense kernel.

A step of `--queries` queries of each request, whose query heads share one latent of 576 columns, the first 512 of which are the
values (DeepSeek-V3; 128 heads, or 16 where eight GPUs share them). Pages of 64 keys, in random order. Caches rotate, so that no
call finds its keys in the L2 cache. All are CUDA graphs, timed in interleaved rounds; medians. FlashMLA's schedule is made
ahead, untimed ("planned"), or in each call. Results are compared before they are timed.

    python benchmarks/latent.py --flashmla _flashmla_C.abi3.so [--json FILE] [--batches 1,8] [--keys 1024,8192] [--heads 128,16]
        [--queries 1] [--max-seconds 60]

The library is vLLM's: `unzip vllm-0.33.0-*.whl vllm/_flashmla_C.abi3.so`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from prefill import medians

import strobe
from strobe.lab.bench.machine import provenance, save

ROUNDS = 9
DIM, DIM_V, PAGE = 576, 512, 64
SCALE = 192**-0.5
"""DeepSeek's: of the 128 + 64 columns that a head has before the latent takes their place."""
BEYOND_L2 = 160 * 2**20
"""Bytes of the caches that take turns."""
BOUND = 0.02
"""The largest difference from the first contestant, over its largest result."""

Call = Callable[[], torch.Tensor]


class Inputs:
    """The tensors of a call."""

    def __init__(self, batch: int, keys: int, heads: int, queries: int):
        pages = -(-keys // PAGE)
        self.latent = torch.randn(batch * pages, PAGE, 1, DIM, dtype=torch.bfloat16, device="cuda")
        self.table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
        self.lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, queries, heads, DIM, dtype=torch.bfloat16, device="cuda")

    def strobe(self) -> Call:
        cache = strobe.Cache(self.latent, None, self.lengths, self.table, head_dim_v=DIM_V)
        return lambda: strobe.decode(self.q, cache, mask=strobe.Causal(), scale=SCALE)

    def flashmla(self, planned: bool) -> Call:
        def call(*plan: torch.Tensor | None):
            arguments = (self.q, self.latent, DIM_V, self.lengths, self.table, SCALE, True, *plan, None)
            return torch.ops._flashmla_C.dense_decode_fwd(*arguments)

        plan = call(None, None)[2:4] if planned else (None, None)
        return lambda: call(*plan)[0]


def contestants(sets: list[Inputs], flashmla: bool) -> dict[str, list[Call]]:
    """What is timed, by name: a call for each set of inputs."""
    found = {"strobe": [one.strobe() for one in sets]}
    if flashmla:
        found["FlashMLA planned"] = [one.flashmla(True) for one in sets]
        found["FlashMLA"] = [one.flashmla(False) for one in sets]
    return found


def graph_of(calls: list[Call], wanted: torch.Tensor) -> Callable[[], object]:
    """A CUDA graph of the calls, as a function that replays it. ValueError if the first one is wrong."""
    error = float((calls[0]() - wanted).float().abs().max() / wanted.float().abs().max())
    if not error <= BOUND:
        raise ValueError(f"its largest difference is {error:.1e} of the largest result")
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph.replay


def point(batch: int, keys: int, heads: int, queries: int, flashmla: bool) -> dict:
    """Medians of all contestants, which take turns."""
    size = batch * keys * DIM * 2
    sets = [Inputs(batch, keys, heads, queries) for _ in range(min(48, -(-BEYOND_L2 // size) + 1))]
    ready, refused = {}, {}
    wanted = sets[0].strobe()()
    for name, calls in contestants(sets, flashmla).items():
        try:
            ready[name] = graph_of(calls, wanted), len(calls)
        except Exception as error:
            refused[name] = str(error).splitlines()[0][:200]
    us = medians(ready, ROUNDS)
    return {"batch": batch, "keys": keys, "heads": heads, "queries": queries, "bytes": size, "us": us, "refused": refused}


def line(at: dict) -> str:
    """A point: microseconds, and the rate at which keys were read."""
    cells = [f"{name} {us:.1f} us ({at['bytes'] / us / 1e3:.0f} GB/s)" for name, us in at["us"].items()]
    place = f"batch {at['batch']}, {at['keys']} keys, {at['heads']} heads, {at['queries']} queries"
    return f"{place}: " + "; ".join([*cells, *(f"{name}: {why}" for name, why in at["refused"].items())])


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashmla", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--keys", type=numbers, default=[1024, 8192, 32768])
    parser.add_argument("--heads", type=numbers, default=[128, 16])
    parser.add_argument("--queries", type=numbers, default=[1, 2])
    parser.add_argument("--max-seconds", type=float, default=120.0)
    options = parser.parse_args()
    if options.flashmla:
        torch.ops.load_library(str(options.flashmla))
    begin, points = time.monotonic(), []
    for batch, keys, heads, queries in product(options.batches, options.keys, options.heads, options.queries):
        if time.monotonic() - begin > options.max_seconds:
            break
        points.append(point(batch, keys, heads, queries, options.flashmla is not None))
        print(line(points[-1]), flush=True)
        if options.json:
            save(options.json, {"what": "latent", **provenance(torch.device("cuda")), "points": points})


if __name__ == "__main__":
    main()
