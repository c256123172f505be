"""`strobe profile`: what Nsight Compute measures of one of our kernels, or of two beside each other.

`profile_backends` runs ncu on a process of its own for each backend; `of_files` takes CSVs that ncu wrote anywhere. Both give
Subjects, of which `strobe.lab.counters.counters` makes what the field's write-ups show: throughputs, launch, occupancy,
workload for each unit, bank conflicts, stalls, and the point on the roofline from the measured duration and DRAM traffic.

ncu runs a kernel many times, with caches flushed and the clock held at its base, so its durations are longer than those of
`strobe bench`: they compare kernels with each other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from strobe.call.dispatch import explain_problem
from strobe.device import Arch, arch_of
from strobe.lab.bench.plan import DTYPES, Point
from strobe.lab.counters import counters, ncu
from strobe.lab.counters.counters import Subject
from strobe.lab.counters.ncu import Launch
from strobe.lab.model.cost import Cost
from strobe.lab.model.roofline import Ceilings

# ---- where profiles come from


def of_files(paths: Sequence[Path], flops: float | None = None) -> list[Subject]:
    """A Subject for each kernel of each CSV; flops: of a launch. ValueError for what is no profile."""
    subjects = []
    for path in paths:
        launches = ncu.read_file(path)
        for kernel in dict.fromkeys(launch.kernel for launch in launches):
            mine = [launch for launch in launches if launch.kernel == kernel]
            subjects.append(Subject(f"{path.stem}: {kernel}" if len(paths) > 1 else kernel, mine, len(mine), flops))
    if flops and not any(map(counters.roofline, subjects)):
        raise ValueError("flops needs a profile with durations and DRAM traffic, for the roofline, got one without")
    return subjects


def profile_backends(point: Point, backends: Sequence[str | None], kernel: str | None, calls: int) -> list[Subject]:
    """A Subject for each backend (None: what dispatch picks) at a point, by ncu. kernel: a regular expression that the names of
    the kernels must hold. ValueError if a backend refuses, or if ncu is missing, not permitted or fails."""
    need_ncu()
    arch = arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    names = [_kernel(point, arch, backend) for backend in backends]
    flops, ceilings = Cost(point.problem()).flops, _ceilings(point, arch)
    return [
        Subject(name, _profiled(point, backend, kernel, calls), calls, flops, ceilings)
        for name, backend in zip(names, backends, strict=True)
    ]


def _kernel(point: Point, arch: Arch, backend: str | None) -> str:
    """The name of what runs a point. ValueError if nothing does, or not on a GPU."""
    chosen, refusals = _choice(point, arch, backend)
    if chosen is None or not arch.is_gpu:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
        raise ValueError(f"strobe profile needs a kernel that runs {point} on a GPU, got none on {arch}: {reasons}")
    return chosen


Choice = tuple[str | None, Sequence[tuple[str, str]]]
"""What runs a point, and why others do not."""


def _choice(point: Point, arch: Arch, backend: str | None) -> Choice:
    explanation = explain_problem(point.problem(), arch, backend)
    return explanation.chosen, explanation.refusals


def _ceilings(point: Point, arch: Arch) -> Ceilings | None:
    """None where the arch's rates for the point's dtype are not known: then there is no roof."""
    try:
        return Ceilings.of(arch, DTYPES[point.dtype])
    except ValueError:
        return None


def _profiled(point: Point, backend: str | None, kernel: str | None, calls: int) -> list[Launch]:
    """The launches of one process under ncu."""
    job = json.dumps({"point": point.facts, "backend": backend, "calls": calls})
    found = launches_of(["-m", "strobe.lab.counters.profiled", job], kernel)
    if not found:
        raise ValueError(f"kernel must be a part of a kernel's name in {point}, got {kernel!r}, which none has")
    return found


def launches_of(arguments: list[str], kernel: str | None = None, timeout: float | None = None) -> list[Launch]:
    """What a Python process with these arguments launches between torch.cuda.profiler.start() and stop(), both pages of ncu's
    report. kernel: a regular expression that the names of the kernels must hold. ValueError if ncu is missing or fails,
    TimeoutExpired if the process has not ended after so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "profile.ncu-rep")
        options = ["--config-file", "off", "--export", report, "--force-overwrite", "--profile-from-start", "off"]
        options += ["--target-processes", "application-only", "--set", "full", "--metrics", ",".join(counters.EXTRA)]
        options += ["--apply-rules", "no", "--import-source", "no", *(["--kernel-name", f"regex:{kernel}"] if kernel else [])]
        said = run_ncu([*options, sys.executable, *arguments], timeout)
        if "No kernels were profiled" in said:
            return []
        return ncu.read(*(run_ncu(["--import", report, "--csv", "--page", page]) for page in ("details", "raw")))


def need_ncu() -> None:
    """ValueError where there is none."""
    if shutil.which("ncu") is None:
        raise ValueError(
            "this needs Nsight Compute, got no ncu on the PATH; strobe profile --csv reads what it wrote on another machine"
        )


def run_ncu(arguments: list[str], timeout: float | None = None) -> str:
    """What it prints. ValueError in one sentence if it is missing, not permitted or fails, TimeoutExpired if it has not ended
    after so many seconds."""
    need_ncu()
    pipe = subprocess.PIPE
    process = subprocess.Popen(["ncu", *arguments], stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # and what it watches, which would go on using the GPU
        process.wait()
        raise
    said = out + err
    if "ERR_NVGPUCTRPERM" in said:
        raise ValueError(
            "ncu may not read the GPU's performance counters (ERR_NVGPUCTRPERM): the driver gives them to administrators "
            "only, which https://developer.nvidia.com/ERR_NVGPUCTRPERM says how to change"
        )
    if process.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if "==ERROR==" in line] + lines[-1:]
        raise ValueError(f"ncu failed with status {process.returncode}: {errors[0] if errors else 'it said nothing'}")
    return out if "--import" in arguments else said


# ---- what a user sees


def load(path: Path) -> dict:
    """What `report_of` made, from the JSON of `strobe profile`. ValueError for anything else."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"a result of strobe profile must be a JSON file, got {path}: {error}") from None
    if not isinstance(report, dict) or not {"device", "point", "subjects", "tables"} <= report.keys():
        raise ValueError(f"a result of strobe profile must hold subjects and tables, got {path} without them")
    return report


def report_of(subjects: Sequence[Subject], command: str, device: dict, point: Point | None = None) -> dict:
    """The tables, the metrics that they are made of, and where they come from, as JSON. point: None of a CSV."""
    return {
        "what": "profile",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "device": device,
        "point": point.facts if point else None,
        "subjects": [
            {
                "name": subject.name,
                "kernels": {name: len(launches) for name, launches in subject.kernels.items()},
                "calls": subject.calls,
                "flops": subject.flops,
                "metrics": {row.metrics[0]: asdict(metric) for row in counters.ROWS if (metric := subject.metric(row))},
                "roofline": counters.roofline(subject),
            }
            for subject in subjects
        ],
        "tables": [asdict(table) for table in counters.tables(subjects)],
    }


def show(report: dict) -> None:
    """The tables on the terminal, each as often as it takes for all subjects to have room."""
    console = Console()
    names = [subject["name"] for subject in report["subjects"]]
    for table in report["tables"]:
        for shown in _that_fit(table, names, console):
            console.print(shown)


def _that_fit(table: dict, names: Sequence[str], console: Console) -> list[Table]:
    """The table in parts, of as many subjects each as fit without a broken word, of one at least."""
    unbound = console.options.update(width=100_000)
    for most in range(len(names), 0, -1):
        parts = [_part(table, names, names[i : i + most]) for i in range(0, len(names), most)]
        if all(Measurement.get(console, unbound, part).minimum <= console.width for part in parts):
            break
    return parts


def _part(table: dict, names: Sequence[str], some: Sequence[str]) -> Table:
    """The columns of some subjects, beside the labels. A subject's columns are those from the first with its name on."""
    owners: list[str | None] = []
    for head in table["head"]:
        owners.append(max(filter(head.startswith, names), key=len, default=owners[-1] if owners else None))
    taken = [n for n, owner in enumerate(owners) if owner is None or owner in some]
    shown = Table(title=table["title"], title_justify="left")
    for n in taken:
        words = [len(word) for cell in (table["head"][n], *(row[n] for row in table["rows"])) for word in cell.split()]
        shown.add_column(table["head"][n], justify="left" if n == 0 else "right", min_width=max(words))
    for row in table["rows"]:
        shown.add_row(*(row[n] for n in taken))
    return shown
