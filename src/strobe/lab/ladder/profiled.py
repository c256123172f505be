"""Nsight Compute on rungs: `profile_rungs`, and the process that ncu watches.

`python -m strobe.lab.ladder.profiled JOB` takes a JSON object: "problem" (fields of `measure.Problem`), "rung" and "calls". ncu
is to run with `--profile-from-start off`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from strobe.device import arch_of
from strobe.lab.bench.plan import DTYPES
from strobe.lab.counters.counters import Subject
from strobe.lab.counters.profile import launches_of, need_ncu
from strobe.lab.ladder.measure import Problem
from strobe.lab.model.roofline import Ceilings
from strobe.ladder import RUNGS, Rung

OWN_KERNELS = "kernel"
"""What the names of the rungs' kernels hold; PyTorch's own, which fill memory, are called otherwise or take little time."""


def profile_rungs(problem: Problem, rungs: Sequence[Rung], calls: int) -> list[Subject]:
    """A Subject for each rung that runs on this GPU, by ncu. ValueError if ncu is missing, not permitted or fails, or without a
    GPU."""
    need_ncu()
    if not torch.cuda.is_available():
        raise ValueError("profiling needs an NVIDIA GPU, got none")
    arch = arch_of(torch.device("cuda"))
    found = []
    for rung in rungs:
        dtype = torch.float32 if rung.takes_fp32 else DTYPES[problem.dtype]
        if rung.least and rung.refuses(problem.length, problem.head_dim, dtype, arch.capability) is None:
            job = json.dumps({"problem": vars(problem), "rung": rung.number, "calls": calls})
            launches = launches_of(["-m", "strobe.lab.ladder.profiled", job], OWN_KERNELS)
            name = f"{rung.number} {rung.title}"
            found.append(Subject(name, launches, calls, problem.flops, Ceilings.of(arch, DTYPES[problem.dtype])))
    if not found:
        raise ValueError(f"profiling needs a rung that runs on {arch}, got none")
    return found


def main(job: dict) -> None:
    rung, problem, device = RUNGS[job["rung"]], Problem(**job["problem"]), torch.device("cuda")
    inputs = problem.inputs(device, torch.float32 if rung.takes_fp32 else DTYPES[problem.dtype])
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
