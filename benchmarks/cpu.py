"""What a CPU user gets: Strobe's CPU backends beside torch SDPA, and tile sizes for `tiled`.

Writes results/cpu.json and prints the tables of docs/cpu.md. One thread, so that other work on the machine disturbs it
little; medians of rounds in which every contestant has its turn.

    python benchmarks/cpu.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import torch

import strobe
from strobe.cpu import tiled
from strobe.lab.bench.machine import provenance, save

ROUNDS = 5
TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
LENGTHS = (128, 512, 1024, 4096)
MASKS = ("full", "causal", "padding")
TILES = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512))


def medians(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each contestant, over rounds in which all have their turn; the first round is warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS + 1):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: round(1e3 * statistics.median(all_times[1:]), 2) for name, all_times in times.items()}


def inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (TOKENS // length, length, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_() for _ in range(3)]


def attentions(mask: str, length: int) -> dict[str, Callable]:
    """SDPA and Strobe's backends with this mask: functions of q, k, v [batch, length, heads, D]."""
    batch = TOKENS // length
    real = torch.arange(length) < torch.linspace(length / 4, length, batch)[:, None]
    documents = strobe.Document(torch.zeros(batch, length, dtype=torch.int32), real.to(torch.int32) - 1)
    masks = {"full": strobe.Full(), "causal": strobe.Causal(), "padding": documents}

    def sdpa(q, k, v):
        bias = real[:, None, None] if mask == "padding" else None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=mask == "causal")
        return out.transpose(1, 2)

    def backend(name: str):
        return lambda q, k, v: strobe.attention(q, k, v, mask=masks[mask], backend=name)

    return {"sdpa": sdpa} | {name: backend(name) for name in ("torch_cpu", "tiled")}


def forward(attention: Callable, qkv: list[torch.Tensor]) -> None:
    with torch.no_grad():
        attention(*qkv)


def both(attention: Callable, qkv: list[torch.Tensor]) -> None:
    out = attention(*qkv)
    torch.autograd.grad(out, qkv, torch.ones_like(out))


def compare() -> list[dict]:
    rows = []
    for dtype, length, mask, phase in product((torch.float32, torch.bfloat16), LENGTHS, MASKS, (forward, both)):
        qkv = inputs(length, dtype)
        runs = {name: partial(phase, run, qkv) for name, run in attentions(mask, length).items()}
        name = str(dtype).removeprefix("torch.")
        rows.append({"dtype": name, "length": length, "mask": mask, "backward": phase is both, "ms": medians(runs)})
        print(rows[-1], flush=True)
    return rows


def compare_tiles() -> list[dict]:
    """`tiled`'s forward with other tiles."""
    rows = []
    for length, mask in product(LENGTHS, ("full", "causal")):
        qkv, run = inputs(length, torch.float32), attentions(mask, length)["tiled"]

        def with_tile(tile: tuple[int, int], run=run, qkv=qkv) -> None:
            chosen = tiled.Config(*tile)
            with mock.patch.object(tiled, "Config", lambda: chosen):
                forward(run, qkv)

        runs = {f"{q} x {kv}": partial(with_tile, (q, kv)) for q, kv in TILES}
        rows.append({"length": length, "mask": mask, "ms": medians(runs)})
        print(rows[-1], flush=True)
    return rows


def table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    torch.set_num_threads(1)
    result = {
        "what": "cpu",
        **provenance(torch.device("cpu")),
        "rounds": ROUNDS,
        "problem": {"tokens": TOKENS, "heads": HEADS, "head_dim": HEAD_DIM},
        "tiles": compare_tiles(),
        "backends": compare(),
    }
    path = Path(__file__).parent / "results" / "cpu.json"
    print(f"written: {save(path, result)}")
    tiles = [f"{q} x {kv}" for q, kv in TILES]
    print(
        table(["length", "mask", *tiles], [[str(r["length"]), r["mask"], *map(str, r["ms"].values())] for r in result["tiles"]])
    )
    rows = [
        [
            r["dtype"],
            str(r["length"]),
            r["mask"],
            "forward + backward" if r["backward"] else "forward",
            *map(str, r["ms"].values()),
        ]
        for r in result["backends"]
    ]
    print(table(["dtype", "length", "mask", "", "SDPA", "torch_cpu", "tiled"], rows))


if __name__ == "__main__":
    main()
