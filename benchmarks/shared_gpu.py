"""Does a kernel compute the same while other processes take turns at its GPU?

A backward that stores dS runs over and over on the same inputs, with and without matrix products on a stream beside it, while
other processes keep the GPU busy: with matrix products, or with sines, whose kernels use no shared memory. Every run must store
the same bits; of those that do not, it shows which 8-byte words differ, what they hold, and where in a tile they lie. Prints a
line for each setting, writes JSON.

    python benchmarks/shared_gpu.py [--json FILE] [--neighbours 4] [--seconds 8]
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from determinism import Load

import strobe
from strobe.call import launches
from strobe.device import arch_of
from strobe.kernels.sm90 import backend
from strobe.lab.bench.machine import provenance, save
from strobe.problem import AttentionProblem, Dense, Operands, Upstream

ROWS, KEYS, BUSY = 128, 64, ("nothing", "products", "sines")

NEIGHBOUR = """
import sys, torch
a, b = torch.randn(3000, 3000, dtype=torch.bfloat16, device="cuda"), torch.randn(2**21, device="cuda")
print("there", flush=True)
while True:
    for _ in range(8):
        a @ a if sys.argv[1] == "products" else b.sin()
    torch.cuda.synchronize()
"""


def stored_by(batch: int = 2, length: int = 4096, heads: int = 32, head_dim: int = 64):
    """A function that runs one backward, and returns the dS that it stored."""
    q, k, v, dout = (torch.randn(batch, length, heads, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    out, lse = strobe.attention(q, k, v, return_lse=True)
    dims = {"heads_q": heads, "heads_kv": heads, "head_dim": head_dim, "head_dim_v": head_dim, "scale": head_dim**-0.5}
    problem = AttentionProblem(Dense(batch, length, length), dtype=q.dtype, phase="backward", deterministic=True, **dims)
    given = Operands(q, k, v)._asdict() | Upstream(out, lse, dout, None)._asdict()
    return lambda: launches.run(backend, problem, given, arch_of(q.device)).stored


def differences(first: torch.Tensor, stored: torch.Tensor) -> Counter[tuple[str, str]]:
    """How often which 8 bytes lie in which place of a tile where two stored dS differ: (key and row, the bytes)."""
    words = stored.view(torch.int64)
    at = (words != first.view(torch.int64)).nonzero().tolist()
    return Counter((f"key {line % KEYS}, row {4 * word}", f"{words[line, word].item() & 2**64 - 1:016x}") for line, word in at)


@contextmanager
def neighbours(number: int, busy: str) -> Iterator[None]:
    """Other processes that keep the GPU busy."""
    command = [sys.executable, "-c", NEIGHBOUR, busy]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(number if busy != "nothing" else 0)]
    try:
        for process in started:
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measured(backward, load: Load | None, seconds: float) -> dict[str, Any]:
    """Of runs for some seconds: how many there were, how many stored other bits than the first, and which."""
    first, runs, differ, found = backward().clone(), 0, 0, Counter[tuple[str, str]]()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if load is not None:
            load.begin()
        other = differences(first, backward())
        runs, differ, found = runs + 1, differ + bool(other), found + other
    words = [{"place": place, "bytes": held, "times": times} for (place, held), times in found.most_common(10)]
    return {"runs": runs, "differ": differ, "words": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each setting")
    arguments = parser.parse_args()
    device, settings = torch.device("cuda"), []
    backward, load = stored_by(), Load(device)
    backward()
    for busy, beside in itertools.product(BUSY, (False, True)):
        with neighbours(arguments.neighbours, busy):
            found = measured(backward, load if beside else None, arguments.seconds)
        settings.append({"neighbours": busy, "products beside": beside, **found})
        print(settings[-1], flush=True)
    if arguments.json:
        found = {"what": "shared-gpu", "processes": arguments.neighbours, "settings": settings}
        save(arguments.json, provenance(device) | found)


if __name__ == "__main__":
    main()
