"""What becomes of a barrier's memory that holds something else, while other processes take turns at its GPU?

A kernel makes a barrier (mbarrier) that nobody uses, so Triton gives its memory to the numbers that the kernel then writes to
shared memory, holds for some milliseconds, and reads again. The same kernel invalidates the barrier before, or keeps it until
the end, so that its memory is its own. Other processes keep the GPU busy meanwhile: with matrix products, or with sines, whose
kernels use no shared memory. Prints a line for each setting, with the numbers that changed, writes JSON.

    python benchmarks/shared_gpu.py [--json FILE] [--neighbours 4] [--seconds 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from strobe.kernels.gluon import gl, gluon, mbarrier, partition_barrier
from strobe.lab.bench.machine import provenance, save

WORDS, CTAS_OF_SM, NANOSECONDS = 1024, 4, 20_000_000
BARRIERS = ("used by nobody", "invalidated before", "kept until the end")
BUSY = ("nothing", "products", "sines")

HOLD = """
{
    .reg .u64 begun, now;
    .reg .pred early;
    mov.u64 begun, %globaltimer;
again:
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begun;
    setp.lt.u64 early, now, $1;
    @early bra again;
    mov.b32 $0, 0;
}
"""

NEIGHBOUR = """
import sys, torch
a, b = torch.randn(3000, 3000, dtype=torch.bfloat16, device="cuda"), torch.randn(2**21, device="cuda")
print("there", flush=True)
while True:
    for _ in range(8):
        a @ a if sys.argv[1] == "products" else b.sin()
    torch.cuda.synchronize()
"""


@gluon.jit
def hold_kernel(out, nanoseconds, HOLD: gl.constexpr, WORDS: gl.constexpr, INVALIDATED: gl.constexpr, KEPT: gl.constexpr):
    """Hold the numbers program * WORDS, program * WORDS + 1, ... in shared memory, and write what is there afterwards."""
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=2)
    if INVALIDATED:
        mbarrier.invalidate(barriers.index(0))
    words = gl.allocate_shared_memory(gl.int64, [WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    number = gl.program_id(0).to(gl.int64) * WORDS + gl.arange(0, WORDS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    words.store(number)
    partition_barrier()
    gl.inline_asm_elementwise(HOLD, "=r,l", [nanoseconds], dtype=gl.int32, is_pure=False, pack=1)
    partition_barrier()
    gl.store(out + number, words.load(number.type.layout))
    if KEPT:
        mbarrier.invalidate(barriers.index(0))


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


def measured(barrier: str, seconds: float) -> dict[str, Any]:
    """Of launches for some seconds: how many there were, in how many a number changed, and which words came in its place."""
    ctas = CTAS_OF_SM * torch.cuda.get_device_properties("cuda").multi_processor_count
    numbers = torch.arange(ctas * WORDS, device="cuda")
    runs, differ, found = 0, 0, Counter[tuple[int, str]]()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        out = torch.empty_like(numbers)
        hold_kernel[(ctas,)](out, NANOSECONDS, HOLD, WORDS, barrier == BARRIERS[1], barrier == BARRIERS[2])
        wrong = (out != numbers).nonzero().flatten().tolist()
        runs, differ = runs + 1, differ + bool(wrong)
        found += Counter((8 * (i % WORDS), f"{out[i].item() & 2**64 - 1:016x}") for i in wrong)
    words = [{"byte": byte, "bytes": held, "times": times} for (byte, held), times in found.most_common(10)]
    return {"runs": runs, "differ": differ, "words": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each setting")
    arguments = parser.parse_args()
    settings = []
    for busy in BUSY:
        with neighbours(arguments.neighbours, busy):
            for barrier in BARRIERS:
                settings.append({"barrier": barrier, "neighbours": busy, **measured(barrier, arguments.seconds)})
                print(settings[-1], flush=True)
    if arguments.json:
        found = {"what": "shared-gpu", "processes": arguments.neighbours, "settings": settings}
        save(arguments.json, provenance(torch.device("cuda")) | found)


if __name__ == "__main__":
    main()
