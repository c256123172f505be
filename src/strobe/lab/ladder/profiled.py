"""Nsight Compute on rungs: `profile_rungs`, and the process that ncu watches.

`python -m strobe.lab.ladder.profiled JOB` takes a JSON object: "problem" (fields of `measure.Problem`), "rung" and "calls". ncu
is to run with `--profile-from-start off`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from strobe.device import arch_of
from strobe.lab.bench.plan import DTYPES
from strobe.lab.counters.counters import Subject
from strobe.lab.counters.ncu import Launch
from strobe.lab.counters.profile import launches_of, need_ncu
from strobe.lab.ladder.measure import Problem
from strobe.lab.model.roofline import Ceilings
from strobe.ladder import RUNGS, Rung

OWN_KERNELS = "kernel"
"""What the names of the rungs' kernels hold; PyTorch's own, which fill memory, are called otherwise or take little time."""

AT_ONCE = 8
"""How many rungs are profiled at once."""


def profile_rungs(problem: Problem, rungs: Sequence[Rung], calls: int, max_seconds: float) -> tuple[list[Subject], list[Rung]]:
    """A Subject for each rung that runs on this GPU, by ncu, a process for each; and the rungs that were not done after
    `max_seconds`. Processes start beside each other, which takes the most time; ncu itself lets one kernel run at a time.
    ValueError if ncu is missing, not permitted or fails, or without a GPU."""
    need_ncu()
    if not torch.cuda.is_available():
        raise ValueError("profiling needs an NVIDIA GPU, got none")
    arch = arch_of(torch.device("cuda"))
    taken = [rung for rung in rungs if rung.least and rung.refuses(*_given(rung, problem), arch.capability) is None]
    if not taken:
        raise ValueError(f"profiling needs a rung that runs on {arch}, got none")
    jobs = [json.dumps({"problem": vars(problem), "rung": rung.number, "calls": calls}) for rung in taken]
    ceilings = Ceilings.of(arch, DTYPES[problem.dtype])
    end = time.monotonic() + max_seconds

    def launches(job: str) -> list[Launch] | None:
        try:
            return launches_of(["-m", "strobe.lab.ladder.profiled", job], OWN_KERNELS, max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        by_rung = dict(zip(taken, pool.map(launches, jobs), strict=True))
    subjects = [
        Subject(f"{rung.number} {rung.title}", found, calls, problem.flops, ceilings)
        for rung, found in by_rung.items()
        if found is not None
    ]
    return subjects, [rung for rung, found in by_rung.items() if found is None]


def _given(rung: Rung, problem: Problem) -> tuple[int, int, torch.dtype]:
    """Length, head dim and dtype of what a rung is called with."""
    return problem.length, problem.head_dim, torch.float32 if rung.takes_fp32 else DTYPES[problem.dtype]


def main(job: dict) -> None:
    rung, problem, device = RUNGS[job["rung"]], Problem(**job["problem"]), torch.device("cuda")
    inputs = problem.inputs(device, _given(rung, problem)[-1])
    for _ in range(3):
        rung.attention(*inputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _ in range(job["calls"]):
        rung.attention(*inputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
