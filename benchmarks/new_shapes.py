"""What a call costs the host whose shapes no call before had, while its kernels are there: a server's next batch.

Each call has another number of rows or requests. Its checks, its config and its launches are worked out and kept for calls that
look like it, as those of a step's other layers do: `again` is such a call. Of warm calls in detail: `benchmarks/host.py`.

    python benchmarks/new_shapes.py [--json FILE] [--calls 40]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import strobe
from strobe.lab.bench.machine import provenance, save

HEADS, HEADS_KV, DIM, PAGE, ROOM, UNCOUNTED = 32, 8, 128, 64, 16384, 6

Call = Callable[[], object]
new = partial(torch.zeros, device="cuda", dtype=torch.bfloat16)


def attention(i: int) -> Call:
    """Attention over 1000 tokens and more."""
    q = new((1, 1000 + 7 * i, HEADS, DIM))
    return lambda: strobe.attention(q, q, q, mask=strobe.Causal())


def packed(i: int) -> Call:
    """Two packed sequences."""
    n = 1000 + 7 * i
    q, bounds = new((n, HEADS, DIM)), torch.tensor([0, n // 3, n], dtype=torch.int32, device="cuda")
    return lambda: strobe.flash_attn_varlen_func(q, q, q, bounds, bounds, n, n, causal=True)


def server_of() -> Callable[[int, int], Call]:
    """A server's next step: a function of how many requests there are and how many queries the last one has."""
    k, v = new((2, 1000, PAGE, HEADS_KV, DIM))
    table = torch.zeros((512, ROOM // PAGE), dtype=torch.int32, device="cuda")

    def step(batch: int, last: int) -> Call:
        lengths = torch.full((batch,), last, dtype=torch.int32, device="cuda")
        bounds = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        bounds[-1] += last - 1
        q = new((batch + last - 1, HEADS, DIM))
        return partial(
            strobe.flash_attn_varlen_func, q, k, v, bounds, max_seqlen_q=last, max_seqlen_k=ROOM, seqused_k=lengths,
            block_table=table[:batch], causal=True, out=torch.empty_like(q),
        )  # fmt: skip

    return step


def measure(make: Callable[[int], Call], calls: int) -> dict[str, float]:
    """Microseconds of the host, medians: of calls each of which has shapes of its own, and of the same ones again."""
    first, again = [], []
    for call in [make(i) for i in range(UNCOUNTED + calls)]:
        for times in (first, again):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
    return {"new": statistics.median(first[UNCOUNTED:]), "again": statistics.median(again[UNCOUNTED:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    step = server_of()
    ways: dict[str, Callable[[int], Call]] = {
        "attention": attention,
        "packed sequences": packed,
        "single tokens over pages": lambda i: step(20 + 2 * i, 1),
        "prompts and single tokens over pages": lambda i: step(32 + i % 7, 480 + 13 * i),
    }
    found = {}
    for name, make in ways.items():
        found[name] = measure(make, options.calls)
        print(f"{name}: {found[name]['new']:.0f} us, again {found[name]['again']:.0f} us", flush=True)
    if options.json:
        save(options.json, {"what": "new shapes", **provenance(torch.device("cuda")), "us": found})


if __name__ == "__main__":
    main()
