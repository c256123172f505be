"""A chunk of a prompt over a paged cache, beside the same attention over contiguous keys.

At each point the last `queries` of a prompt of `keys` are attended causally: over contiguous tensors ("forward"), over a
contiguous cache, over pages of several sizes, by the decode kernel, and by FlashAttention-3 over the same pages where it is
installed. The page numbers are shuffled. All are CUDA graphs, so that Python does not count, timed in interleaved rounds;
medians. Each is compared with the forward before it is timed. Prints a table and writes JSON.

    python benchmarks/prefill.py --json benchmarks/results/prefill.json [--queries 512,2048] [--keys 8192] [--pages 16,64]
        [--batches 1,4] [--heads 32/8] [--head-dims 128] [--max-seconds 60]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

import strobe
from strobe.lab.bench.machine import provenance, save
from strobe.lab.bench.precompile import in_processes

ROUNDS = 11
SECONDS = 3e-3
"""What a graph takes at least, about."""
BOUND = 0.02
"""The largest difference from the forward, over its largest result."""

Call = Callable[[], torch.Tensor]


def contestants(batch: int, queries: int, keys: int, heads: int, heads_kv: int, dim: int, pages: list[int]) -> dict[str, Call]:
    """What is timed at a point, by name."""
    q, k, v = (
        torch.randn(batch, n, h, dim, dtype=torch.bfloat16, device="cuda")
        for n, h in ((queries, heads), (keys, heads_kv), (keys, heads_kv))
    )
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    found: dict[str, Call] = {"forward": lambda: strobe.attention(q, k, v, mask=strobe.Causal(), backend="sm90")}
    whole = strobe.Cache(k, v, lengths)
    found["contiguous cache"] = lambda: strobe.decode(q, whole, backend="sm90_cache")
    for page in pages:
        each = -(-keys // page)
        table = torch.randperm(batch * each, device="cuda").view(batch, each)
        pools = [torch.zeros(batch * each, page, heads_kv, dim, dtype=x.dtype, device="cuda") for x in (k, v)]
        for pool, x in zip(pools, (k, v), strict=True):
            pool[table] = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, each * page - keys)).view(batch, each, page, heads_kv, dim)
        cache = strobe.Cache(*pools, lengths, table.int())
        found[f"page {page}"] = lambda cache=cache: strobe.decode(q, cache, backend="sm90_cache")
        found[f"page {page}, decode"] = lambda cache=cache: strobe.decode(q, cache, backend="decode")
        if importlib.util.find_spec("flash_attn_interface"):
            from flash_attn_interface import flash_attn_with_kvcache

            found[f"page {page}, FA3"] = lambda cache=cache: flash_attn_with_kvcache(
                q, cache.k, cache.v, cache_seqlens=lengths, page_table=cache.page_table, causal=True
            )
    return found


def milliseconds(run: Callable[[], object], launches: int) -> float:
    """Of one launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / launches


def graph_of(call: Call, wanted: torch.Tensor) -> tuple[Callable[[], object], int]:
    """A CUDA graph of a call, as a function that replays it, and how many launches it has. ValueError if it is wrong."""
    found = call()
    error = float((found - wanted).float().abs().max() / wanted.float().abs().max())
    if not error <= BOUND:
        raise ValueError(f"its largest difference is {error:.1e} of the largest result")
    call()
    launches = max(2, min(50, int(SECONDS / milliseconds(call, 1) * 1e3)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    graph.replay()
    return graph.replay, launches


def medians(ready: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, float]:
    """Microseconds of a launch of each, by name: medians of rounds in which they take turns. ready: see `graph_of`."""
    times: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(milliseconds(*ready[name]))
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def point(batch: int, queries: int, keys: int, heads: tuple[int, int], dim: int, pages: list[int]) -> dict:
    """Medians of all contestants, which take turns."""
    calls = contestants(batch, queries, keys, *heads, dim, pages)
    wanted, ready, refused = calls["forward"](), {}, {}
    for name, call in calls.items():
        try:
            ready[name] = graph_of(call, wanted)
        except Exception as error:
            refused[name] = str(error).splitlines()[0][:200]
    us = medians(ready, ROUNDS)
    at = {"batch": batch, "queries": queries, "keys": keys, "heads": heads, "head_dim": dim}
    return {**at, "us": us, "refused": refused}


def warm(batch: int, queries: int, keys: int, heads: tuple[int, int], dim: int, page: int) -> None:
    """Compile what a point needs of Strobe with one size of page, in a process of its own; it stays in Triton's cache on
    disk."""
    for name, call in contestants(batch, queries, keys, *heads, dim, [page]).items():
        if "FA3" not in name:
            call()
    torch.cuda.synchronize()


def line(at: dict) -> str:
    """A point: microseconds, and in brackets the ratio to the forward's."""
    forward = at["us"].get("forward")
    cells = [f"{name} {us:.1f}" + (f" ({us / forward:.3f})" if forward else "") for name, us in at["us"].items()]
    place = f"batch {at['batch']}, {at['queries']} of {at['keys']}, heads {at['heads'][0]}/{at['heads'][1]}, D={at['head_dim']}"
    return f"{place}: " + "; ".join([*cells, *(f"{name}: {why}" for name, why in at["refused"].items())])


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    defaults = {"batches": [1], "queries": [2048, 512, 8192], "keys": [8192, 32768], "pages": [64, 16, 256], "head-dims": [128]}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=numbers, default=default)
    parser.add_argument("--heads", default="32/8", help="query heads / key heads")
    parser.add_argument("--max-seconds", type=float, default=1e9)
    options = parser.parse_args()
    torch.manual_seed(0)
    heads = tuple(int(x) for x in options.heads.split("/"))
    asked = product(options.keys, options.head_dims, options.batches, options.queries)
    places = [(batch, queries, keys, heads, dim) for keys, dim, batch, queries in asked if queries <= keys]
    begin, points = time.monotonic(), []
    in_processes(warm, [(*place, page) for place in places for page in options.pages])
    for place in places:
        if time.monotonic() - begin < options.max_seconds:
            points.append(point(*place, options.pages))
            print(line(points[-1]), flush=True)
    if options.json:
        save(options.json, {"what": "prefill", **provenance(torch.device("cuda")), "rounds": ROUNDS, "points": points})


if __name__ == "__main__":
    main()
