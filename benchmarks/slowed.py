"""Do decode steps compute the same in slow motion?

Before each barrier, arrival and atomic of their kernels, as Triton has compiled them, a warp waits now and then, for a time
that its clock gives. So warps, roles and CTAs meet in orders that are rare otherwise, and a launch takes long enough to be
stopped while other processes have the GPU. Each process runs the steps of a part of `sanitize.py` again and again: every result
must be like the first one, and all counters of arrivals must be 0 after a launch. Prints what is not; status 1 if anything is.

    python benchmarks/slowed.py [PART ...] [--processes 8] [--seconds 20]
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

import strobe
from strobe.call import counters

MET = re.compile(r"\s*(bar\.sync|bar\.warp\.sync|@%p\d+ (atom\.|mbarrier\.arrive|ld\.global\.gpu\.acq))")
"""Lines of PTX before which a warp waits."""

WAIT = """
{{
    .reg .b32 begun, now, until, warp;
    .reg .pred over;
    mov.u32 begun, %clock;
    mov.u32 warp, %tid.x;
    shr.u32 warp, warp, 5;
    mov.u32 now, %ctaid.x;
    mad.lo.u32 warp, now, 16, warp;
    mad.lo.u32 until, begun, 2654435761, {salt};
    xor.b32 until, until, warp;
    mul.lo.u32 until, until, 2246822519;
    shr.u32 now, until, 15;
    xor.b32 until, until, now;
    mul.lo.u32 until, until, 3266489917;
    shr.u32 until, until, 16;
    and.b32 now, until, 7;
    setp.ne.u32 over, now, 0;
    @over bra passed;
    shr.u32 until, until, 3;
again:
    mov.u32 now, %clock;
    sub.u32 now, now, begun;
    setp.lt.u32 over, now, until;
    @over bra again;
passed:
}}
"""
"""One in eight of those who come by waits, up to 8191 cycles. No lane waits alone: what it is found from is the warp's."""

RUNS = 20
"""Launches of a step from one look at the counters to the next."""


def slowed(ptx: str, seed: int) -> str:
    """The same kernel in slow motion."""
    lines = []
    for number, line in enumerate(ptx.split("\n")):
        if MET.match(line):
            lines.append(WAIT.format(salt=(7919 * number + 104729 * seed) % 2**31))
        lines.append(line)
    return "\n".join(lines)


def slow_down(seed: int, folder: str) -> None:
    """Have this process compile all its kernels in slow motion, into a folder of their own."""
    knobs.cache.dir = folder
    make = CUDABackend.make_ptx
    CUDABackend.make_ptx = lambda self, *arguments, **keywords: slowed(make(self, *arguments, **keywords), seed)


def steps_of(parts: list[str]) -> list[Callable[[], torch.Tensor]]:
    """The decode steps of parts of `sanitize.py`, each as a function that runs it."""
    import sanitize

    steps: list[Callable[[], torch.Tensor]] = []
    decode = strobe.decode

    def kept(q, cache, return_lse=False, **keywords):
        steps.append(lambda: decode(q, cache, **keywords))
        return decode(q, cache, return_lse=return_lse, **keywords)

    strobe.decode, sanitize.say = kept, lambda what: None
    for part in parts:
        sanitize.PARTS[part]()
    strobe.decode = decode
    return steps


def differs(out: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Whether a number is no rounding of the first one."""
    far = (out.float() - first.float()).abs() > 2e-2 + 2e-2 * first.float().abs()
    return (far | (out.isnan() != first.isnan())).any()


def watch(seed: int, parts: list[str], seconds: float) -> int:
    """Run the steps for some seconds; how many looks found something wrong, which is printed."""
    held: list[torch.Tensor] = []
    zeros = counters.zeros

    def counted(device: torch.device, number: int) -> torch.Tensor:
        held.append(zeros(device, number))
        return held[-1]

    counters.zeros = counted
    steps = steps_of(parts)
    firsts = [step().clone() for step in steps]
    launches, wrong, until = 0, 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for number, (step, first) in enumerate(zip(steps, firsts, strict=True)):
            others = sum(differs(step(), first).int() for _ in range(RUNS))
            left = sum(int(one.count_nonzero()) for one in held)
            launches += RUNS
            if int(others) or left:
                wrong += 1
                print(f"step {number}: {int(others)} of {RUNS} results differ, {left} counters are not 0", flush=True)
                for one in held:
                    one.zero_()
    print(f"process {seed}: {launches} launches of {len(steps)} steps, {wrong} times wrong", flush=True)
    return wrong


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", default=["queries"], help="of sanitize.py: queries, say")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, help="run as one process, with these times")
    given = parser.parse_args()
    if given.seed is not None:
        with tempfile.TemporaryDirectory() as folder:
            slow_down(given.seed, folder)
            return watch(given.seed, given.parts, given.seconds) > 0
    command = [sys.executable, __file__, *given.parts, "--seconds", str(given.seconds), "--seed"]
    started = [subprocess.Popen([*command, str(seed)]) for seed in range(given.processes)]
    return any([process.wait() for process in started])


if __name__ == "__main__":
    sys.exit(main())
