"""Batches as a server's scheduler makes them, prompts and single tokens together, beside FlashAttention-3.

At each point some requests have one query and others a prompt's, or a chunk's of it, packed in one tensor over pages, as vLLM
calls. "apart": the single tokens and the prompts in a call each, as a user could do who knows on the host which is which;
"decode kernel": all in the one that decodes. FlashAttention-3 where it is installed, with its plan made ahead as well. Each is
compared with float64 first, in a request of a single token and in a prompt. CUDA graphs over copies of the cache beyond the L2
cache, interleaved rounds, medians. Prints a line for each point and writes JSON.

    python benchmarks/mixed.py [--json FILE] [--heads 32/8,64/8] [--head-dims 128] [--pages 16,64]
        [--max-seconds 60]
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch

import strobe
from strobe.lab.bench.bench import CudaClock, balanced_order
from strobe.lab.bench.decode import BOUNDS, COLD_BYTES
from strobe.lab.bench.failures import compact
from strobe.lab.bench.machine import provenance, save
from strobe.lab.bench.precompile import in_processes
from strobe.reference import cached
from strobe.serving.arguments import checked
from strobe.serving.problem import describe

ROUNDS, LAUNCHES = 7, 10
BOUND = BOUNDS["bf16"]
ROOM = 16384
"""Keys that the page table has room for in each request, as a server's that is as wide as the longest prompt it takes."""

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """`tokens` requests of one query of `length` keys in the mean, log-normal, and one of each number of `prompts` queries,
    which have `before` keys ahead of them."""

    name: str
    tokens: int
    length: int
    prompts: tuple[int, ...] = ()
    before: int = 0

    def requests(self) -> list[tuple[int, int]]:
        """Queries and keys of each request, the single tokens first."""
        drawn = torch.exp(torch.randn(max(self.tokens, 1), generator=torch.Generator().manual_seed(1)))
        lengths = (drawn / drawn.mean() * self.length).int().clamp(1, ROOM).tolist()
        return [(1, n) for n in lengths[: self.tokens]] + [(n, n + self.before) for n in self.prompts]


BATCHES = (
    Batch("32 tokens, a chunk of 480", 32, 4096, (480,), 2048),
    Batch("64 tokens, a prompt of 1984", 64, 4096, (1984,)),
    Batch("64 tokens, a chunk of 1984", 64, 4096, (1984,), 6144),
    Batch("128 tokens, 4 prompts of 480", 128, 2048, (480,) * 4),
    Batch("16 tokens, 16 prompts of 60 to 300", 16, 2048, tuple(range(60, 300, 15))),
    Batch("200 tokens, a chunk of 56", 200, 1024, (56,), 1024),
    Batch("8 prompts of 100 to 1500", 0, 1024, tuple(range(100, 1700, 200))),
    Batch("16 chunks of 64", 0, 1024, (64,) * 16, 4032),
    Batch("16 tokens, 16 prompts of 150", 16, 2048, (150,) * 16),
    Batch("32 chunks of 100", 0, 1024, (100,) * 32, 2000),
    Batch("40 tokens, 24 chunks of 20, one of 500", 40, 2048, (20,) * 24 + (500,), 2000),
)


class Inputs:
    """The tensors of a batch."""

    def __init__(self, batch: Batch, heads: int, heads_kv: int, dim: int, page: int, seed: int):
        g, requests, device = torch.Generator("cuda").manual_seed(seed), batch.requests(), "cuda"
        used = [-(-n // page) for _, n in requests]
        shape = (sum(used), page, heads_kv, dim)
        self.k, self.v = (torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16) for _ in range(2))
        numbers = torch.randperm(shape[0], generator=g, device=device).int().split(used)
        self.table = torch.zeros(len(requests), ROOM // page, dtype=torch.int32, device=device)
        for row, some in zip(self.table, numbers, strict=True):
            row[: len(some)] = some
        queries, lengths = zip(*requests, strict=True)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.bounds = torch.tensor((0, *queries), dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        self.q = torch.randn((sum(queries), heads, dim), generator=g, device=device, dtype=torch.bfloat16)
        self.most, self.longest, self.page, self.tokens = max(queries), max(lengths), page, batch.tokens
        self.out = torch.empty_like(self.q)

    @property
    def cache(self) -> strobe.Cache:
        return strobe.Cache(self.k, self.v, self.lengths, self.table)


def of_strobe(inputs: Inputs) -> Call:
    def call() -> torch.Tensor:
        strobe.flash_attn_varlen_func(
            inputs.q, inputs.k, inputs.v, inputs.bounds, max_seqlen_q=inputs.most, max_seqlen_k=ROOM,
            seqused_k=inputs.lengths, block_table=inputs.table, causal=True, out=inputs.out,
        )  # fmt: skip
        return inputs.out

    return call


def of_decode_kernel(inputs: Inputs) -> Call:
    return partial(
        strobe.decode, inputs.q, inputs.cache, cu_seqlens_q=inputs.bounds, max_seqlen_q=inputs.most, out=inputs.out,
        backend="decode",
    )  # fmt: skip


def apart(inputs: Inputs) -> Call:
    n = inputs.tokens
    if not n or n == len(inputs.lengths):
        raise ValueError("takes single tokens and prompts")
    few = strobe.Cache(inputs.k, inputs.v, inputs.lengths[:n], inputs.table[:n])
    many = strobe.Cache(inputs.k, inputs.v, inputs.lengths[n:], inputs.table[n:])
    bounds = inputs.bounds[n:] - n

    def call() -> torch.Tensor:
        strobe.decode(inputs.q[:n, None], few, out=inputs.out[:n, None])
        strobe.decode(inputs.q[n:], many, cu_seqlens_q=bounds, max_seqlen_q=inputs.most, out=inputs.out[n:])
        return inputs.out

    return call


def of_fa3(inputs: Inputs, ahead: bool) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    plan = None
    if ahead:
        (_, heads, dim), heads_kv = inputs.q.shape, inputs.k.shape[2]
        plan = get_scheduler_metadata(
            len(inputs.lengths), inputs.most, inputs.longest, heads, heads_kv, dim, inputs.lengths,
            cu_seqlens_q=inputs.bounds, page_size=inputs.page, causal=True,
        )  # fmt: skip
    return partial(
        flash_attn_with_kvcache, inputs.q, inputs.k, inputs.v, cache_seqlens=inputs.lengths, page_table=inputs.table,
        cu_seqlens_q=inputs.bounds, max_seqlen_q=inputs.most, causal=True, scheduler_metadata=plan,
    )  # fmt: skip


def contenders() -> dict[str, Callable[[Inputs], Call]]:
    found: dict[str, Callable[[Inputs], Call]] = {"strobe": of_strobe, "apart": apart, "decode kernel": of_decode_kernel}
    if importlib.util.find_spec("flash_attn_interface"):
        found |= {"FA3": partial(of_fa3, ahead=False), "FA3 planned": partial(of_fa3, ahead=True)}
    return found


def right(inputs: Inputs) -> dict[slice, torch.Tensor]:
    """What the first and the last request should give, in float64, by their rows."""
    found, bounds = {}, inputs.bounds.tolist()
    for b in {0, len(inputs.lengths) - 1}:
        cache = strobe.Cache(inputs.k, inputs.v, inputs.lengths[b : b + 1], inputs.table[b : b + 1])
        rows = slice(bounds[b], bounds[b + 1])
        operands, options = checked(inputs.q[rows][None], cache)
        found[rows] = cached.decode(describe(operands, options), operands, torch.float64)[0][0]
    return found


def entered(prepare: Callable[[Inputs], Call], sets: list[Inputs], wanted: dict[slice, torch.Tensor], clock: CudaClock):
    """What replays a contender's graph, and what must live as long. ValueError if it is wrong."""
    calls = [prepare(inputs) for inputs in sets]
    sets[0].out.fill_(torch.nan)
    found = calls[0]()
    error = max(float((found[rows].double() - x).abs().max() / x.abs().max()) for rows, x in wanted.items())
    if not error <= BOUND:
        raise ValueError(f"wrong: its largest error is {error:.1e} of the largest result, allowed {BOUND:.0e}")
    many = [calls[i % len(calls)] for i in range(LAUNCHES)]
    for call in calls:
        call()
    run, results = clock.captured(many, 1)
    clock.seconds(run, 1)
    return run, calls, results


def measure(batch: Batch, heads: tuple[int, int], dim: int, page: int, clock: CudaClock) -> dict:
    """Microseconds of a call of each contender, which take turns."""
    one = Inputs(batch, *heads, dim, page, 0)
    copies = min(LAUNCHES, -(-COLD_BYTES // (2 * one.k.nbytes)))
    sets = [one, *(Inputs(batch, *heads, dim, page, seed) for seed in range(1, copies))]
    wanted, ready, refused = right(one), {}, {}
    for name, prepare in contenders().items():
        try:
            ready[name] = entered(prepare, sets, wanted, clock)
        except Exception as error:
            refused[name] = compact(error)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for order in balanced_order(len(names), ROUNDS):
        for name in (names[i] for i in order):
            seconds[name].append(clock.seconds(ready[name][0], 1) / LAUNCHES)
    us = {name: 1e6 * median(each) for name, each in seconds.items()}
    return {**asdict(batch), "heads": heads, "head_dim": dim, "page": page, "us": us, "refused": refused}


def line_of(at: dict) -> str:
    others = "; ".join([f"{name} {us:.1f}" for name, us in at["us"].items()] + [f"{k}: {v}" for k, v in at["refused"].items()])
    return f"{at['name']}, heads {at['heads'][0]}/{at['heads'][1]}, D={at['head_dim']}, page {at['page']}: {others}"


def warm(batch: Batch, heads: tuple[int, int], dim: int, page: int) -> None:
    """Compile what a point needs of Strobe, in a process of its own; it stays in Triton's cache on disk."""
    inputs = Inputs(batch, *heads, dim, page, 0)
    for name, prepare in contenders().items():
        if "FA3" not in name and not (name == "apart" and not batch.tokens):
            prepare(inputs)()
    torch.cuda.synchronize()


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    def pairs(text: str) -> list[tuple[int, int]]:
        return [(int(a), int(b)) for a, b in (pair.split("/") for pair in text.split(","))]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--heads", type=pairs, default=[(32, 8), (64, 8)], help="query heads / key heads")
    parser.add_argument("--head-dims", type=numbers, default=[128])
    parser.add_argument("--pages", type=numbers, default=[16, 64])
    parser.add_argument("--max-seconds", type=float, default=1e9)
    options = parser.parse_args()
    asked, begin, points = list(product(BATCHES, options.heads, options.head_dims, options.pages)), time.monotonic(), []
    in_processes(warm, asked)
    clock = CudaClock(torch.device("cuda"))
    with torch.no_grad(), clock.running():
        for each in asked:
            if time.monotonic() - begin < options.max_seconds:
                points.append(measure(*each, clock))
                print(line_of(points[-1]), flush=True)
    if options.json:
        save(options.json, {"what": "mixed", **provenance(torch.device("cuda")), "rounds": ROUNDS, "points": points})


if __name__ == "__main__":
    main()
