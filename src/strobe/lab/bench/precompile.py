"""Compiles kernels ahead of a measurement: contenders that compile at their first call do so here, in many processes at once.

Each process takes one family of points (all lengths of one kind of problem) and calls every contender that compiles on
each of them once; the kernels stay in the caches on disk, from which the measuring process loads them. A contender that
dies or hangs here would end the measurement, too, so it is left out there, with that reason; one that merely raises is
tried again there.

`python -m strobe.lab.bench.precompile` is such a process: it reads its job as JSON from stdin, and says on stdout what it
begins.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress

import torch

from strobe.lab.bench.peers import Peer, bind, peers_for, strobe_peer
from strobe.lab.bench.plan import Inputs, Point

SECONDS = 180.0
"""How many seconds a process may take for its family of points."""

Unusable = dict[tuple[str, Point], str]
"""(name of a contender, point) -> why the contender must not be called there."""


def warm(points: Sequence[Point], peers: Sequence[Peer], device: torch.device, on_step: Callable[[str], None]) -> Unusable:
    """Compiles for all points. Returns at which of them contenders died or hung. On a CPU there is nothing to do."""
    names = [peer.name for peer in peers if peer.compiles]
    if device.type != "cuda" or not names:
        return {}
    families: dict[Point, list[Point]] = {}
    for point in points:
        families.setdefault(point.kind, []).append(point)
    unusable: Unusable = {}
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(_family, family, names, device) for family in families.values()]
        for done, job in enumerate(as_completed(jobs), 1):
            on_step(f"compiled {done} of {len(jobs)} kinds of problems")
            unusable |= job.result()
    return unusable


def in_processes(compile_one: Callable, asked: Iterable[tuple]) -> None:
    """Calls a function of the running program with each of these arguments, in up to 16 processes at a time. What raises there
    is left to who measures it."""
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_one, *arguments) for arguments in asked]:
            job.exception()


def _family(points: list[Point], names: list[str], device: torch.device) -> Unusable:
    """Runs one process. If it ended early, the contender that it called last is unusable from that point of the family on."""
    job = json.dumps({"device": str(device), "names": names, "points": [point.facts for point in points]})
    command = [sys.executable, "-m", "strobe.lab.bench.precompile"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        output, _ = process.communicate(job, timeout=SECONDS)
        ended = f"its process ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ended = f"compiling and running once took more than {SECONDS:.0f} s"
    return unfinished(output, points, ended)


def unfinished(output: str, points: list[Point], ended: str) -> Unusable:
    """What is unusable after a process, from its output: "begin<tab>name<tab>number of the point" before each call, and "done"
    at the end. ended: why the process ended."""
    lines = output.splitlines()
    begun = [line.split("\t") for line in lines if line.startswith("begin\t")]
    if "done" in lines or not begun:
        return {}
    _, name, number = begun[-1]
    return {(name, point): ended for point in points[int(number) :]}


def main() -> None:
    job = json.load(sys.stdin)
    device = torch.device(job["device"])
    for name in job["names"]:
        peer = strobe_peer(name.partition(" ")[2] or None) if name.startswith("strobe") else peers_for(device)[name]
        for number, facts in enumerate(job["points"]):
            print(f"begin\t{name}\t{number}", flush=True)
            with suppress(Exception):  # a contender that raises here raises again where that is reported
                _once(peer, Point.of(facts), device)
    print("done", flush=True)


def _once(peer: Peer, point: Point, device: torch.device) -> None:
    inputs = Inputs.random(point, device, torch.Generator(device))
    with peer.context():
        bind(peer, point, inputs)()
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
