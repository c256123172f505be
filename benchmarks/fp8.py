"""What e4m3 costs in accuracy, and on a Hopper GPU what it gains in speed.

Accuracy: the relative error (root mean square) against float64 on the inputs before they are rounded, normal ones and ones with
a few channels, or a few rows, that are much larger, quantised by one number for a whole tensor, by head, and by blocks of
128 rows (v then by head). bf16 is the same attention of inputs in bfloat16. On a CPU `attention_fp8` rounds the inputs alone.

Sums of many keys, on a GPU: the largest error where all values are 3, and the error (root mean square) of normal ones, of the
last 128 rows against float64 on the rounded inputs, beside FlashAttention-3 if it is installed.

Speed: CUDA graphs in interleaved rounds, medians; V's transposition is part of it.

    python benchmarks/fp8.py --json benchmarks/results/fp8.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

import strobe
from strobe.fp8 import DESCALE_ROWS, E4M3, attention_fp8
from strobe.lab.bench.machine import provenance, save

ROUNDS = 15
TOKENS, WIDTH = 16384, 2048
HEADS, ROWS = 4, 1024
"""Of the inputs for accuracy, at head dim 128."""
LAST = 128
"""Rows that `sums` compares."""


def inputs(kind: str, device: str) -> tuple[torch.Tensor, ...]:
    """q, k, v [1, ROWS, HEADS, 128], float64."""
    q, k, v = torch.randn(3, 1, ROWS, HEADS, 128, dtype=torch.float64, device=device)
    if kind == "large channels":
        k[..., :4] *= 20
        q[..., :4] /= 20
    elif kind == "large rows":
        k[:, ::97] *= 10
        v[:, ::97] *= 10
    elif kind == "a large head":
        for x in (k, v):
            x[:, :, 0] *= 100
        q[:, :, 0] /= 100
    return q, k, v


def quantised(x: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e4m3, and its descale as `attention_fp8` takes it."""
    batch, rows, heads, dim = x.shape
    blocks = rows // DESCALE_ROWS if way == "by block" else 1
    parts = x.view(batch, blocks, -1, heads, dim)
    descale = parts.abs().amax((2, 4), keepdim=True) / 448
    if way == "by tensor":
        descale = descale.amax().expand(descale.shape)
    descales = descale[:, :, 0, :, 0].transpose(1, 2).float()
    return (parts / descale).to(E4M3).view(x.shape), (descales if way == "by block" else descales[..., 0])


def accuracy(device: str) -> list[dict]:
    found = []
    for kind in ("normal", "large channels", "large rows", "a large head"):
        q, k, v = inputs(kind, device)
        want = strobe.attention(q.cpu(), k.cpu(), v.cpu()).to(device)
        errors = {"bf16": error(strobe.attention(*(x.bfloat16() for x in (q, k, v))), want)}
        for way in ("by tensor", "by head", "by block"):
            of_v = "by head" if way == "by block" else way
            (q8, of_q), (k8, of_k), (v8, v_descale) = quantised(q, way), quantised(k, way), quantised(v, of_v)
            out = attention_fp8(q8, k8, v8, q_descale=of_q, k_descale=of_k, v_descale=v_descale)
            errors[way] = error(out, want)
        found.append({"inputs": kind, **errors})
        print(kind, *(f"{name} {value:.4f}" for name, value in errors.items()), sep=", ")
    return found


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return ((out.double() - want).norm() / want.norm()).item()


def sums() -> list[dict]:
    """Errors by the number of keys, in percent: of a row's weights the tensor cores sum up as many."""
    found = []
    for head_dim, length in itertools.product((64, 128), (1024, 4096, 16384, 65536)):
        q, k, v = (torch.randn(1, length, 2, head_dim, device="cuda").to(E4M3) for _ in range(3))
        three = torch.full_like(v, 3.0, dtype=torch.float32).to(E4M3)
        last = q[:, -LAST:].double()
        want = strobe.attention(last.cpu(), k.cpu().double(), v.cpu().double(), mask=strobe.Full()).cuda()
        of_point: dict = {"head_dim": head_dim, "keys": length}
        for name, call in contenders().items():
            constant, normal = (call(q, k, x)[:, -LAST:].double() for x in (three, v))
            of_point[name] = {"constant": 100 * (constant / 3 - 1).abs().max().item(), "normal": 100 * error(normal, want)}
        found.append(of_point)
        print(head_dim, length, *(f"{name} {x}" for name, x in of_point.items() if isinstance(x, dict)), sep=", ", flush=True)
    return found


def contenders() -> dict[str, Callable[..., torch.Tensor]]:
    """Attention of e4m3 without a mask, by name."""
    found: dict[str, Callable[..., torch.Tensor]] = {"Strobe": attention_fp8}
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return found
    return found | {"FA3": lambda q, k, v: first(flash_attn_func(q, k, v))}


def first(x: torch.Tensor | tuple) -> torch.Tensor:
    return x[0] if isinstance(x, tuple) else x


def speed() -> list[dict]:
    found = []
    for head_dim in (64, 128, 256):
        for mask in (strobe.Full(), strobe.Causal()):
            for length in (2048, 8192, 16384):
                shape = (TOKENS // length, length, WIDTH // head_dim, head_dim)
                q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                q8, k8, v8 = (x.to(E4M3) for x in (q, k, v))
                runs = {
                    "bf16": captured(lambda q=q, k=k, v=v, mask=mask: strobe.attention(q, k, v, mask=mask)),
                    "fp8": captured(lambda q=q8, k=k8, v=v8, mask=mask: attention_fp8(q, k, v, mask=mask)),
                }
                flops = 4 * shape[0] * shape[2] * head_dim * mask.count(length, length)
                tflops = {name: flops / seconds / 1e12 for name, seconds in medians(runs).items()}
                found.append({"head_dim": head_dim, "mask": str(mask), "length": length, **tflops})
                print(head_dim, mask, length, *(f"{name} {value:.0f}" for name, value in tflops.items()), sep=", ")
    return found


LAUNCHES = 5


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    return graph


def medians(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Seconds a call."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = {
        "what": "fp8",
        **provenance(torch.device(device)),
        "accuracy": accuracy(device),
        "sums": sums() if device == "cuda" else [],
        "speed": speed() if device == "cuda" else [],
    }
    if path:
        save(path, result)


if __name__ == "__main__":
    main()
