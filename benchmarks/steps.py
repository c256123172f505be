"""A decode step as servers ask for it: with its keys to append, and packed, beside the step alone.

At each point, one query of each request, or several, over pages of 64 keys. "appending": flash-attn's function over a cache,
which writes a key for each query, turned by a rotary embedding, and attends over all. "packed": the queries in one tensor with
their bounds, as vLLM calls. Of Strobe, and of FlashAttention-3 where it is installed. What is appended is what was there, and
the embedding turns by nothing, so that all give the same result, which is compared with float64 first. CUDA graphs over copies
of the cache beyond the L2 cache, interleaved rounds, medians, as `strobe bench decode` has them. Prints a line for each
point and writes JSON.

    python benchmarks/steps.py --json benchmarks/results/steps.json [--batches 1,8] [--lengths 1024] [--heads 64/8]
        [--queries 1,4] [--max-seconds 60]
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

import strobe
from strobe.device import arch_of
from strobe.lab.bench.bench import CudaClock
from strobe.lab.bench.decode import compile_ahead, line_of, measure
from strobe.lab.bench.decode_peers import OURS, Contender, Inputs, Point, peers_for
from strobe.lab.bench.machine import provenance, save

ROUNDS = 7
FA3 = "flash_attn_interface"


def appending(function: Callable, table: str, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """A call of a `flash_attn_with_kvcache` that writes each request's last keys and values once more. table: what it calls
    the table of pages."""
    point, before = inputs.point, inputs.lengths - inputs.point.queries
    at = before[:, None].long() + torch.arange(point.queries, device=before.device)
    page = inputs.table.long().gather(1, at // point.page)
    k, v = (x[page, at % point.page] for x in (inputs.k, inputs.v))
    half = torch.ones(point.length, point.head_dim // 2, dtype=k.dtype, device=k.device)
    return partial(
        function, inputs.q, inputs.k, inputs.v, k, v, rotary_cos=half, rotary_sin=torch.zeros_like(half), causal=True,
        cache_seqlens=before, **{table: inputs.table},
    )  # fmt: skip


def bounds_of(inputs: Inputs) -> torch.Tensor:
    """The bounds of the requests' queries, packed."""
    return torch.arange(inputs.point.batch + 1, dtype=torch.int32, device=inputs.q.device) * inputs.point.queries


def packed(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """A call as vLLM's."""
    point, bounds = inputs.point, bounds_of(inputs)
    q, out = inputs.q.flatten(0, 1), inputs.out.flatten(0, 1)

    def call() -> torch.Tensor:
        strobe.flash_attn_varlen_func(
            q, inputs.k, inputs.v, bounds, max_seqlen_q=point.queries, max_seqlen_k=point.length,
            seqused_k=inputs.lengths, block_table=inputs.table, causal=True, out=out,
        )  # fmt: skip
        return inputs.out

    return call


def packed_fa3(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """The same of FlashAttention-3, which makes a tensor of its own for the result."""
    from flash_attn_interface import flash_attn_with_kvcache

    q, bounds = inputs.q.flatten(0, 1), bounds_of(inputs)
    return lambda: flash_attn_with_kvcache(
        q, inputs.k, inputs.v, cache_seqlens=inputs.lengths, page_table=inputs.table, cu_seqlens_q=bounds,
        max_seqlen_q=inputs.point.queries, causal=True,
    ).view_as(inputs.q)  # fmt: skip


def contenders() -> list[Contender]:
    """Strobe and FlashAttention-3, alone, appending and packed."""
    of_strobe = partial(appending, strobe.flash_attn_with_kvcache, "block_table")
    found = [OURS[0], Contender("strobe appending", of_strobe), Contender("strobe packed", packed)]
    if importlib.util.find_spec(FA3):
        from flash_attn_interface import flash_attn_with_kvcache

        of_fa3 = partial(appending, flash_attn_with_kvcache, "page_table")
        alone = peers_for(torch.device("cuda"))["FA3"]
        found += [alone, Contender("FA3 appending", of_fa3), Contender("FA3 packed", packed_fa3)]
    return found


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=numbers, default=[1024, 8192])
    parser.add_argument("--heads", default="64/8,32/8", help="query heads / key heads")
    parser.add_argument("--queries", type=numbers, default=[1, 4])
    parser.add_argument("--max-seconds", type=float, default=1e9)
    options = parser.parse_args()
    heads = [tuple(int(x) for x in pair.split("/")) for pair in options.heads.split(",")]
    device, begin, points = torch.device("cuda"), time.monotonic(), []
    each = product(options.queries, options.lengths, options.batches, heads)
    asked = [Point(batch, length, *pair, queries=queries) for queries, length, batch, pair in each]
    compile_ahead(asked, arch_of(device), deterministic=False)
    clock = CudaClock(device)
    with torch.no_grad(), clock.running():
        for point in asked:
            if time.monotonic() - begin < options.max_seconds:
                points.append(measure(point, contenders(), clock, device, ROUNDS))
                print(line_of(points[-1]), flush=True)
    if options.json:
        save(options.json, {"what": "steps", **provenance(device), "rounds": ROUNDS, "points": points})


if __name__ == "__main__":
    main()
