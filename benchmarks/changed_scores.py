"""What changes scores, compares pairs or drops weights, on Hopper's kernels beside the portable ones: forward and backward.

bf16, 4 x 4096 tokens, heads 2048 / D, causal but for those of all keys. Each problem is compiled in a process of its own, all
at once; then they are timed one after the other, the least of three replays of a CUDA graph of five calls. Prints a table,
writes JSON.

    python benchmarks/changed_scores.py --json benchmarks/results/changed-scores.json
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import strobe
from strobe.lab.bench.bench import CudaClock
from strobe.lab.bench.machine import provenance, save

BATCH, LENGTH, WIDTH = 4, 4096, 2048
HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
WAYS = {"portable": ("portable", False), "sm90": ("sm90", False), "sm90, deterministic": ("sm90", True)}
TIMES, CALLS = 3, 5


def near(score, batch, head, q_index, kv_index):
    return strobe.math.where(q_index - kv_index < 64, 1.5 * score, score)


def near_gradient(score, batch, head, q_index, kv_index):
    return strobe.math.where(q_index - kv_index < 64, 1.5 + 0.0 * score, 1.0)


def even(batch, head, q_index, kv_index):
    return (kv_index + q_index) % 2 == 0


def bias(batch: int) -> torch.Tensor:
    return torch.randn(batch, 1, LENGTH, LENGTH, dtype=torch.bfloat16, device="cuda")


FEATURES: dict[str, Callable[[int], dict]] = {
    "plain": lambda heads: {},
    "softcap": lambda heads: {"score": strobe.Score(softcap=5.0)},
    "slopes": lambda heads: {"score": strobe.Score(alibi=torch.rand(heads, device="cuda"))},
    "bias": lambda heads: {"score": strobe.Score(bias=bias(1))},
    "bias, its gradient": lambda heads: {"score": strobe.Score(bias=bias(BATCH).requires_grad_())},
    "score function": lambda heads: {"score": strobe.Score(function=near, function_gradient=near_gradient)},
    "four documents": lambda heads: {"mask": strobe.Causal() & strobe.Document(documents(4))},
    "four documents, all keys": lambda heads: {"mask": strobe.Document(documents(4))},
    "one document, all keys": lambda heads: {"mask": strobe.Document(documents(1))},
    "mask function": lambda heads: {"mask": strobe.Causal() & strobe.Visible(even)},
    "dropout": lambda heads: {"dropout_p": 0.1},
}
"""By name, what a number of heads makes of `strobe.attention`'s keywords."""


def documents(number: int) -> torch.Tensor:
    """So many in each sequence, of the same length."""
    ids = torch.arange(LENGTH, dtype=torch.int32, device="cuda") * number // LENGTH
    return ids.expand(BATCH, LENGTH).contiguous()


def calls(dims: tuple[int, int], feature: str) -> dict[str, Callable[[], object]]:
    """Forwards and backwards, by name; each has run."""
    heads = WIDTH // dims[0]
    shapes = [(BATCH, LENGTH, heads, dim) for dim in (dims[0], dims[0], dims[1])]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for shape in shapes)
    dout = torch.randn_like(v)
    keywords = {"mask": strobe.Causal(), **FEATURES[feature](heads)}
    learned = keywords["score"].bias if "score" in keywords else None
    inputs = [q, k, v, *([learned] if learned is not None and learned.requires_grad else [])]
    found: dict[str, Callable[[], object]] = {}

    def backward(out):
        return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    for way, (backend, deterministic) in WAYS.items():

        def forward(backend=backend, deterministic=deterministic):
            return strobe.attention(q, k, v, **keywords, backend=backend, deterministic=deterministic)

        if not deterministic:
            found[f"forward, {way}"] = forward
        found[f"backward, {way}"] = functools.partial(backward, forward())
    for call in found.values():
        call()
    torch.cuda.synchronize()
    return found


def milliseconds(clock: CudaClock, call: Callable[[], object]) -> float:
    """Of a call in a CUDA graph of several, so that none waits for the host."""
    replay, _ = clock.captured([call], CALLS)
    replay()
    return min(clock.seconds(replay, 1) for _ in range(TIMES)) / CALLS * 1e3


def child(dims: tuple[int, int], feature: str, folder: Path, all_of_them: int) -> None:
    """Compiles, waits until all have, then for its turn; prints its times as JSON."""
    torch.manual_seed(0)
    clock = CudaClock(torch.device("cuda"))
    with clock.running():
        prepared = calls(dims, feature)
    (folder / f"{dims[0]} {feature}").touch()
    while len(list(folder.iterdir())) <= all_of_them:  # the lock is there too
        time.sleep(0.1)
    with (folder / "turn").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with clock.running():
            times = {name: round(milliseconds(clock, call), 4) for name, call in prepared.items()}
        print(json.dumps(times))


def show(points: list[dict]) -> None:
    table = Table(title="milliseconds, causal, 4 x 4096 tokens, heads 2048 / D")
    names = list(points[0]["milliseconds"])
    table.add_column("problem")
    for name in names:
        table.add_column(name, justify="right")
    for point in points:
        dims = " / ".join(str(dim) for dim in dict.fromkeys(point["head_dims"]))
        table.add_row(f"D {dims}, {point['feature']}", *(f"{point['milliseconds'][name]:.2f}" for name in names))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the times")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        number, feature, folder, all_of_them = given.child
        child(HEAD_DIMS[int(number)], feature, Path(folder), int(all_of_them))
        return
    points = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "turn").touch()
        jobs = list(product(range(len(HEAD_DIMS)), FEATURES))
        commands = [[sys.executable, __file__, "--child", str(i), feature, folder, str(len(jobs))] for i, feature in jobs]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            while any(process.poll() is None for process in running):
                for (i, feature), process in zip(jobs, running, strict=True):
                    if process.poll():
                        sys.exit(f"head dim {HEAD_DIMS[i][0]}, {feature}: exit status {process.returncode}")
                time.sleep(0.2)
        finally:
            for process in running:
                process.kill()
        for (i, feature), process in zip(jobs, running, strict=True):
            times = json.loads(process.communicate()[0].splitlines()[-1])
            points.append({"head_dims": HEAD_DIMS[i], "feature": feature, "milliseconds": times})
    show(points)
    if given.json:
        save(given.json, {"what": "changed scores", **provenance(torch.device("cuda")), "points": points})


if __name__ == "__main__":
    main()
