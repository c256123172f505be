"""Are gradients the same bits in every run, and what does it cost? The same backward many times on a busy GPU.

Each of 20 runs of a backward starts while matrix products run beside it on another stream, so that its thread blocks meet in
another order every time. For dq, dk and dv: how many distinct bit patterns there were, and the largest spread of an element
over the runs, relative to the largest element. Then the time of a backward with and without `deterministic=True`, in
interleaved rounds on an idle GPU; medians. Peers take part that can be asked for the same. Prints a table, writes JSON. Kernels
are compiled before, in many processes at once.

    python benchmarks/determinism.py [--json FILE] [--peers cuDNN,FA4] [--dims 64,96] [--max-seconds 80]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch

from strobe.call.dispatch import explain_problem
from strobe.device import arch_of
from strobe.lab.bench.machine import provenance, save
from strobe.lab.bench.peers import Peer, bind, deterministic_peers, strobe_peer
from strobe.lab.bench.plan import Inputs, Point

GRADIENTS = ("dq", "dk", "dv")
RUNS, ROUNDS, LAUNCHES = 20, 9, 4
HEAD_DIMS = 64, 96, 128
LENGTHS = 1024, 4096, 16384
MASKED = [*product(("full", "causal"), LENGTHS), ("window", 4096)]
SHARED = 64, 128
"""Head dims at which 32 heads share 8 of keys, too, under a causal mask."""
ALIKE = (192, 128), (256, 256)
"""Head dims at which both ways are the same kernels."""
TOKENS, WIDTH = 16384, 2048
WAYS = {"default": strobe_peer(), "deterministic": strobe_peer(deterministic=True)}
"""Ours."""

Backward = Callable[[], tuple[torch.Tensor, ...]]
"""Returns dq, dk, dv."""


@dataclass
class Scatter:
    """What one gradient was in several runs."""

    distinct: int
    spread: float
    """The largest difference of an element over the runs, relative to the largest element."""


class Observed:
    """A gradient over its runs: the distinct ones, and the least and the most of each element."""

    def __init__(self):
        self._distinct: list[torch.Tensor] = []
        self._least = self._most = None

    def add(self, gradient: torch.Tensor) -> None:
        if any(torch.equal(_bits(gradient), _bits(known)) for known in self._distinct):
            return
        self._distinct.append(gradient)
        self._least = gradient if self._least is None else torch.minimum(self._least, gradient)
        self._most = gradient if self._most is None else torch.maximum(self._most, gradient)

    def scatter(self) -> Scatter:
        difference = (self._most.float() - self._least.float()).max().item()
        return Scatter(len(self._distinct), difference / self._distinct[0].abs().max().item())


def _bits(x: torch.Tensor) -> torch.Tensor:
    """As integers, of which -0 and 0 differ, and a NaN equals itself."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


class Load:
    """Matrix products on a stream of their own; `begin` sets some going, and returns at once. Nothing on a CPU."""

    def __init__(self, device: torch.device, size: int = 2048, products: int = 64):
        self._products = products if device.type == "cuda" else 0
        if self._products:
            self._stream = torch.cuda.Stream(device)
            self._a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
            self._out = torch.empty_like(self._a)
            torch.cuda.synchronize()

    def begin(self) -> None:
        with torch.cuda.stream(self._stream) if self._products else nullcontext():
            for _ in range(self._products):
                torch.mm(self._a, self._a, out=self._out)


def backward_of(point: Point, device: torch.device, peer: Peer) -> Backward:
    """The backward of one attention, over and over on the same inputs."""
    return bind(peer, point, Inputs.random(point, device, torch.Generator(device).manual_seed(0)))


def scatters(backward: Backward, load: Load, runs: int) -> dict[str, Scatter]:
    """Of each gradient, over so many runs under load."""
    observed = {name: Observed() for name in GRADIENTS}
    for _ in range(runs):
        load.begin()
        for name, gradient in zip(GRADIENTS, backward(), strict=True):
            observed[name].add(gradient)
    return {name: seen.scatter() for name, seen in observed.items()}


def milliseconds(backward: Backward, device: torch.device, launches: int) -> float:
    """Of one backward, the mean of several in a row."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(launches):
            backward()
        return (time.perf_counter() - start) / launches * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(launches):
        backward()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / launches


def interleaved(ways: dict[str, Backward], device: torch.device, rounds: int, launches: int) -> dict[str, float]:
    """Median milliseconds of each way; who begins changes from round to round. The first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else reversed(ways):
            took = milliseconds(ways[name], device, launches)
            if number:
                times[name].append(took)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(point: Point, device: torch.device, ways: dict[str, Peer], runs: int, rounds: int, launches: int) -> dict:
    """Scatter and time of all ways at one point; of a peer that does not take it, its words."""
    backwards, refused = {}, {}
    for way, peer in ways.items():
        try:
            backwards[way] = backward_of(point, device, peer)
            backwards[way]()
        except (ImportError, RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
            if way in WAYS:
                raise
            backwards.pop(way, None)
            refused[way] = (str(error).splitlines() or [type(error).__name__])[0]
    problems = {way: replace(point.problem(), deterministic=way == "deterministic") for way in WAYS}
    load = Load(device)
    found = {way: scatters(backward, load, runs) for way, backward in backwards.items()}
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "point": asdict(point),
        "backend": {way: explain_problem(problem, arch_of(device)).chosen for way, problem in problems.items()},
        "scatter": {way: {name: asdict(one) for name, one in each.items()} for way, each in found.items()},
        "ms": interleaved(backwards, device, rounds, launches),
        "refused": refused,
    }


def table(points: list[dict]) -> str:
    """A row for each point: of each way distinct results and spread of dq / dk / dv, and its time; last, how many times as long
    a deterministic backward of ours takes as a default one."""
    ways = list(dict.fromkeys(way for at in points for way in at["ms"]))
    heading = [f"{way}: {what}" for way in ways for what in ("distinct", "spread", "ms")]
    lines = [["", *heading, "time"], ["---"] * (len(heading) + 2)]
    for at in points:
        row = [str(Point(**at["point"]))]
        for way in ways:
            row += _cells(at, way) if way in at["ms"] else ["", "", ""]
        lines.append([*row, f"{at['ms']['deterministic'] / at['ms']['default']:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(at: dict, way: str) -> list[str]:
    scatter = [at["scatter"][way][name] for name in GRADIENTS]
    distinct = " / ".join(str(one["distinct"]) for one in scatter)
    return [distinct, " / ".join(f"{one['spread']:.1e}" for one in scatter), f"{at['ms'][way]:.3f}"]


def points_of(device: torch.device) -> list[Point]:
    """The evidence's on a GPU; one tiny one on a CPU."""
    if device.type != "cuda":
        return [Point(1, 128, 2, 2, 32, 32, "fp32", "causal", True)]
    shapes = [(length, WIDTH // dim, WIDTH // dim, dim, dim, mask) for dim, (mask, length) in product(HEAD_DIMS, MASKED)]
    shapes += [(length, 32, 8, dim, dim, "causal") for dim, length in product(SHARED, LENGTHS)]
    shapes += [(4096, WIDTH // dims[0], WIDTH // dims[0], *dims, "causal") for dims in ALIKE]
    return [Point(TOKENS // length, length, *heads_and_dims, "bf16", mask, True) for length, *heads_and_dims, mask in shapes]


def compile_all(points: list[Point], device: torch.device, peers: list[Peer]) -> None:
    """Have the kernels of all points on disk."""
    if device.type == "cuda":
        kinds: dict[Point, list[Point]] = {}
        for point in points:
            kinds.setdefault(point.kind, []).append(point)
        ours = list(product(kinds.values(), WAYS))
        theirs = [(kind, peer.name) for kind, peer in product(kinds.values(), peers) if peer.compiles]
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(run_once, *zip(*theirs, *ours, strict=True)))


def run_once(points: Iterable[Point], way: str) -> None:
    """The backward of each; a peer that does not take it says so when it is measured."""
    for point in points:
        try:
            backward_of(point, torch.device("cuda"), (WAYS | deterministic_peers())[way])()
        except Exception:
            if way in WAYS:
                raise


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result, after each point")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--peers", default="", help="of cuDNN and FA4, with commas between them")
    parser.add_argument("--dims", default="", help="head dims of q and k, with commas between them; all, if none is given")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="begin no point later than that")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peers = [deterministic_peers()[name] for name in options.peers.split(",") if name]
    dims = {int(dim) for dim in options.dims.split(",") if dim}
    asked = [point for point in points_of(device) if not dims or point.head_dim in dims]
    compile_all(asked, device, peers)
    ways = WAYS | {peer.name: peer for peer in peers}
    points: list[dict] = []
    for point in asked:
        if time.monotonic() - begin < options.max_seconds:
            points.append(measure(point, device, ways, options.runs, ROUNDS, LAUNCHES))
            print(table(points[-1:]).splitlines()[-1], flush=True)
            if options.json:
                protocol = {"runs": options.runs, "rounds": ROUNDS, "launches": LAUNCHES}
                save(options.json, {"what": "determinism", **provenance(device), "protocol": protocol, "points": points})
    print(table(points))


if __name__ == "__main__":
    main()
