"""Attention over a cache beside its peers: a decode step's time, and the bandwidth at which it reads keys and values.

    python benchmarks/decode.py [--points pilot] [--configs "ctas=3,stages=2; warps=8,tokens=128,stages=2,ctas=1"]
        [--peers FA3,SDPA,...] [--xqa FOLDER] [--max-seconds 90] [--json FILE]

Each contestant is captured in a CUDA graph of several launches over copies of the cache which together are larger than three
L2 caches, so that no launch finds its keys there. Rounds are interleaved: every contestant once a round, and the median counts.
Before it is timed, a contestant is compared with float64 attention; whoever is wrong is not timed.

FA3 is `flash_attn_interface` (tokenspeed-fa3); XQA is the module `xqa_peer` in FOLDER, with its compiled libraries. Peers that
are not there, or do not take a point, are named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe
from strobe.device import KNOWN, arch_of
from strobe.kernels.common.call import Tensors
from strobe.lab.bench.machine import provenance, save, snapshot
from strobe.reference import cached
from strobe.serving.arguments import checked
from strobe.serving.problem import describe

LAUNCHES, ROUNDS, WARM = 20, 9, 2
COLD_BYTES = 200 * 2**20
"""What the copies of a cache take together at least."""
SEED = 1


@dataclass(frozen=True)
class Point:
    """A decode step. lengths: "equal", or "lognormal" with kv as the mean."""

    batch: int
    kv: int
    heads: int
    heads_kv: int
    n_q: int = 1
    page: int | None = 64
    head_dim: int = 128
    lengths: str = "equal"

    def __str__(self) -> str:
        where = "contiguous" if self.page is None else f"page {self.page}"
        ragged = "" if self.lengths == "equal" else f" {self.lengths}"
        return (
            f"B {self.batch} kv {self.kv}{ragged} heads {self.heads}/{self.heads_kv} S_q {self.n_q} D {self.head_dim} {where}"
        )


def pilot() -> list[Point]:
    """A few points of each kind, those that say most first."""
    return [
        Point(32, 8192, 64, 8),
        Point(1, 1024, 64, 8),
        Point(1, 8192, 64, 8),
        Point(8, 2048, 64, 8),
        Point(8, 8192, 64, 8),
        Point(32, 8192, 32, 8, page=None),
        Point(32, 8192, 32, 8, page=16),
        Point(8, 8192, 32, 32),
        Point(32, 8192, 64, 8, lengths="lognormal"),
        Point(8, 8192, 64, 8, n_q=4),
        Point(8, 8192, 64, 8, n_q=16),
        Point(1, 2048, 64, 8, page=None),
        Point(1, 131072, 64, 8),
        Point(128, 2048, 64, 8),
        Point(128, 1024, 32, 8, page=1),
        Point(32, 8192, 28, 4),
        Point(8, 8192, 64, 8, head_dim=64),
        Point(8, 8192, 16, 8, head_dim=256),
    ]


def reach() -> list[Point]:
    """The whole grid, in an order in which any beginning of it says something of all of it."""
    points = [
        Point(batch, kv, heads, heads_kv, n_q, page)
        for batch in (1, 8, 32, 128)
        for kv in (1024, 2048, 8192, 32768, 131072)
        for heads, heads_kv in ((64, 8), (32, 8), (32, 32), (28, 4), (16, 2))
        for n_q in (1, 4, 16)
        for page in (None, 16, 64, 256)
        if batch * kv * heads_kv * 512 < 40 * 2**30
    ]
    random.Random(SEED).shuffle(points)
    return points


SETS = {"pilot": pilot, "reach": reach}


class Inputs:
    """The tensors of a point: a paged or a contiguous cache, lengths, queries and where the result goes."""

    def __init__(self, point: Point, seed: int):
        self.point, g = point, torch.Generator("cuda").manual_seed(seed)
        normal = partial(torch.randn, generator=g, device="cuda", dtype=torch.bfloat16)
        self.lengths = lengths_of(point)
        longest = int(self.lengths.max())
        self.table = None
        if point.page is None:
            shape = (point.batch, longest, point.heads_kv, point.head_dim)
        else:
            columns = -(-longest // point.page)
            shape = (point.batch * columns, point.page, point.heads_kv, point.head_dim)
            self.table = torch.randperm(point.batch * columns, generator=g, device="cuda").view(point.batch, columns).int()
        self.k, self.v = normal(shape), normal(shape)
        self.q = normal(point.batch, point.n_q, point.heads, point.head_dim)
        self.out = torch.empty_like(self.q)
        self.cache = strobe.Cache(self.k, self.v, self.lengths, self.table)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are read."""
        return int(self.lengths.sum()) * self.point.heads_kv * self.point.head_dim * 2 * 2


def lengths_of(point: Point) -> torch.Tensor:
    if point.lengths == "equal":
        return torch.full((point.batch,), point.kv, dtype=torch.int32, device="cuda")
    g = torch.Generator().manual_seed(SEED)
    drawn = torch.exp(torch.randn(point.batch, generator=g))
    return (drawn / drawn.mean() * point.kv).int().clamp(min=1).cuda()


# ---- contestants: each is made for the tensors of a point, and returns a function that launches once

Launch = Callable[[], torch.Tensor | None]


def ours(inputs: Inputs) -> Launch:
    return partial(strobe.decode, inputs.q, inputs.cache, out=inputs.out)


def ours_deterministic(inputs: Inputs) -> Launch:
    return partial(strobe.decode, inputs.q, inputs.cache, out=inputs.out, deterministic=True)


def ours_with(changes: dict[str, int], inputs: Inputs) -> Launch:
    """The kernel with another config."""
    from strobe.kernels.decode import launch
    from strobe.kernels.decode.config import choose

    operands, options = checked(inputs.q, inputs.cache, out=inputs.out)
    problem, arch = describe(operands, options), arch_of(inputs.q.device)
    config = replace(choose(problem, arch), **changes)
    buffers = launch.buffers(problem, arch, config)
    shared = {name: torch.zeros(x.shape, dtype=x.dtype, device="cuda") for name, x in buffers.shared.items()}
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    (call,) = launch.calls(problem, Tensors(**given, **shared), arch, config)
    return call.launch


def fa3(inputs: Inputs, ahead: bool = False) -> Launch:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    point, metadata = inputs.point, None
    if ahead:
        metadata = get_scheduler_metadata(
            point.batch, point.n_q, int(inputs.lengths.max()), point.heads, point.heads_kv, point.head_dim, inputs.lengths,
            page_size=point.page, causal=True,
        )  # fmt: skip
    keywords = {} if inputs.table is None else {"page_table": inputs.table}
    if metadata is not None:
        keywords["scheduler_metadata"] = metadata

    def launch() -> torch.Tensor:
        return flash_attn_with_kvcache(
            inputs.q, inputs.k, inputs.v, cache_seqlens=inputs.lengths, causal=True, num_splits=0, **keywords
        )

    return launch


def xqa(inputs: Inputs) -> Launch:
    import xqa_peer

    point = inputs.point
    if inputs.table is None or point.n_q != 1:
        raise ValueError("takes pages and one query a request")
    q, out = inputs.q[:, 0], inputs.out[:, 0]
    return partial(xqa_peer.xqa_decode, q, inputs.k, inputs.v, inputs.table, inputs.lengths, out)


def sdpa(inputs: Inputs, backend: SDPBackend | None = None) -> Launch:
    point = inputs.point
    if inputs.table is not None or point.n_q != 1 or point.lengths != "equal":
        raise ValueError("takes a contiguous cache, one query and equal lengths")
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))

    def launch() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=point.heads != point.heads_kv)
        return out.transpose(1, 2)

    if backend is None:
        return launch

    def forced() -> torch.Tensor:
        with sdpa_kernel(backend):
            return launch()

    return forced


PEERS: dict[str, Callable[[Inputs], Launch]] = {
    "FA3": fa3,
    "FA3, metadata ahead": partial(fa3, ahead=True),
    "XQA": xqa,
    "SDPA": sdpa,
    "SDPA flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
}


def configs_of(text: str) -> Iterator[tuple[str, dict[str, int]]]:
    for one in filter(None, (part.strip() for part in text.split(";"))):
        yield f"Strobe {one}", {name.strip(): int(value) for name, _, value in (pair.partition("=") for pair in one.split(","))}


# ---- measuring


class Broken(Exception):
    """Raised when a contestant has broken this process's GPU context. name: the contestant; reason: what it said."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} broke the GPU context: {reason}")
        self.name, self.reason = name, reason


def error_of(inputs: Inputs, launch: Launch) -> float:
    """The largest error of the first and the last request, over the largest result."""
    inputs.out.fill_(torch.nan)
    found = launch()
    found = inputs.out if found is None else found.view_as(inputs.out)
    worst = 0.0
    for b in {0, inputs.point.batch - 1}:
        one = slice(b, b + 1)
        keys = inputs.k, inputs.v
        table = inputs.table
        if table is None:
            keys, of_table = (inputs.k[one], inputs.v[one]), None
        else:
            of_table = table[one]
        operands, options = checked(inputs.q[one], strobe.Cache(*keys, inputs.lengths[one], of_table))
        wanted, _ = cached.decode(describe(operands, options), operands, torch.float64)
        worst = max(worst, float((found[one].double() - wanted).abs().max() / wanted.abs().max()))
    return worst


def captured(launches: list[Launch]) -> torch.cuda.CUDAGraph:
    """A graph of LAUNCHES launches, over the copies in turn."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            launches[i % len(launches)]()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a launch in a graph."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / LAUNCHES


def measure(point: Point, contestants: dict[str, Callable[[Inputs], Launch]]) -> dict:
    """What every contestant takes for a point."""
    first = Inputs(point, SEED)
    copies = min(LAUNCHES, max(1, -(-COLD_BYTES // first.bytes)))
    inputs = [first, *(Inputs(point, SEED + i) for i in range(1, copies))]
    graphs, results = {}, {}
    alive = []  # what a contestant keeps from call to call (FA3's metadata) lives no longer than its function
    for name, make in contestants.items():
        try:
            launches = [make(one) for one in inputs]
            alive.append(launches)
            error = error_of(first, launches[0])
            if not error < 0.03:
                raise ValueError(f"is wrong: its largest error is {error:.3g} of the largest result")
            graph = captured(launches)
            graph.replay()
            torch.cuda.synchronize()  # so that an error of a launch is told under its own name
            graphs[name], results[name] = graph, {"error": error, "us": []}
        except Exception as reason:
            results[name] = {"reason": f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"}
            try:
                torch.cuda.synchronize()
            except Exception as broken:
                raise Broken(name, results[name]["reason"]) from broken
    for number in range(WARM + ROUNDS):
        for name, graph in graphs.items():
            us = timed(graph)
            if number >= WARM:
                results[name]["us"].append(round(us, 3))
    for name in graphs:
        us = median(results[name]["us"])
        results[name] |= {"median_us": us, "gb_s": round(first.bytes / us / 1e3, 1)}
    return {"point": asdict(point), "bytes": first.bytes, "copies": copies, "results": results}


def host_time(calls: int = 300) -> dict[str, float]:
    """Microseconds of the host's time that a call of a tiny step takes."""
    inputs, found = Inputs(Point(1, 64, 8, 1), SEED), {}
    for name, make in {"Strobe": ours, "FA3": fa3}.items():
        try:
            launch, times = make(inputs), []
            for _ in range(20):
                launch()
            for _ in range(calls // 10):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(10):
                    launch()
                times.append((time.perf_counter() - begin) * 1e5)
            found[name] = round(median(times), 2)
        except Exception as reason:
            print(f"host time of {name}: {reason}", file=sys.stderr)
    return found


# ---- compiling ahead, many kernels at once


def kind_of(point: Point) -> tuple:
    """What a point's kernels are compiled for."""
    return point.heads // point.heads_kv, point.page, point.head_dim, point.n_q


def compile_ahead(points: list[Point], configs: str) -> None:
    """Compile the kernels of all points in processes of their own; they stay in Triton's cache on disk."""
    capability = arch_of(torch.device("cuda")).capability
    kinds = {kind_of(point): point for point in points}.values()
    jobs = [json.dumps({"point": asdict(point), "configs": configs, "capability": capability}) for point in kinds]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(
            lambda job: subprocess.run([sys.executable, __file__, "--compile", job], capture_output=True), jobs
        ):
            if done.returncode:
                print(done.stderr.decode()[-500:], file=sys.stderr)


def compile_kinds(job: dict) -> None:
    """Compile the kernels of a point, for a GPU that need not be there: those that `ours` and the other configs launch."""
    from strobe.kernels.decode import launch
    from strobe.kernels.decode.config import choose
    from strobe.lab.binary.offline import pretend_gpu

    point = Point(**job["point"])
    arch = next(arch for arch in KNOWN.values() if arch.capability == job["capability"])
    columns = -(-point.kv // (point.page or 1))
    meta = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q = meta(point.batch, point.n_q, point.heads, point.head_dim)
    shape = (point.batch, point.kv) if point.page is None else (point.batch * columns, point.page)
    k, v = (meta(*shape, point.heads_kv, point.head_dim) for _ in range(2))
    table = None if point.page is None else meta(point.batch, columns, dtype=torch.int32)
    cache = strobe.Cache(k, v, meta(point.batch, dtype=torch.int32), table)
    variants = [({}, False), ({}, True), *((changes, False) for _, changes in configs_of(job["configs"]))]
    for changes, deterministic in variants:
        operands, options = checked(q, cache, out=meta(*q.shape), deterministic=deterministic)
        problem = describe(operands, options)
        try:
            config = replace(choose(problem, arch), **changes)
        except ValueError:
            continue
        buffers = launch.buffers(problem, arch, config)
        shared = {name: meta(*x.shape, dtype=x.dtype) for name, x in buffers.shared.items()}
        given = {name: x for name, x in operands._asdict().items() if x is not None}
        (call,) = launch.calls(problem, Tensors(**given, **shared), arch, config)
        with pretend_gpu(arch.capability):
            call.compile()


def go_on(options: argparse.Namespace, result: dict, number: int, name: str, seconds: float) -> None:
    """Go on in a new process at point `number`, without the contestant that broke this one."""
    so_far = Path(tempfile.mkdtemp()) / "decode.json"
    so_far.write_text(json.dumps(result))
    given = {
        "--points": options.points, "--peers": options.peers, "--configs": options.configs, "--only": options.only,
        "--xqa": options.xqa, "--json": options.json, "--max-seconds": seconds, "--so-far": so_far, "--begin": number,
        "--without": ";".join([*options.without, name]),
    }  # fmt: skip
    arguments = [str(part) for pair in given.items() if pair[1] is not None for part in pair]
    os.execv(sys.executable, [sys.executable, __file__, *arguments])


def show(measured: dict) -> None:
    results = measured["results"]
    print(f"\n{Point(**measured['point'])}: {measured['bytes'] / 1e6:.1f} MB, {measured['copies']} copies")
    for name, one in sorted(results.items(), key=lambda item: item[1].get("median_us", 1e9)):
        if "median_us" in one:
            print(f"  {name:<44} {one['median_us']:9.2f} us {one['gb_s']:8.0f} GB/s   error {one['error']:.1e}")
        else:
            print(f"  {name:<44} {one['reason'][:110]}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", choices=SETS, default="pilot")
    parser.add_argument("--peers", default=",".join(PEERS), help="names, joined by ';' or ','; none for ''")
    parser.add_argument("--configs", default="", help="configs of ours to time too, joined by ';'")
    parser.add_argument("--only", default="", help="only points whose description has this in it")
    parser.add_argument("--xqa", type=Path, help="the folder of xqa_peer.py")
    parser.add_argument("--max-seconds", type=float, default=90.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without", default="", help="contestants that are left out, joined by ';'")
    parser.add_argument("--begin", type=int, default=0, help="the first point, by its number")
    parser.add_argument("--so-far", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    begin = time.monotonic()
    if options.compile:
        compile_kinds(json.loads(options.compile))
        return
    if options.xqa is not None:
        sys.path.insert(0, str(options.xqa))
    contestants: dict[str, Callable[[Inputs], Launch]] = {"Strobe": ours, "Strobe deterministic": ours_deterministic}
    contestants |= {name: partial(ours_with, changes) for name, changes in configs_of(options.configs)}
    contestants |= {name: make for name, make in PEERS.items() if name in options.peers}
    options.without = [name for name in options.without.split(";") if name]
    points = [point for point in SETS[options.points]() if options.only in str(point)]
    if options.so_far is None:
        compile_ahead(points[options.begin :], options.configs)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    result = {"what": "decode", **provenance(torch.device("cuda")), "before": snapshot(torch.device("cuda"))}
    result |= {"launches": LAUNCHES, "rounds": ROUNDS, "host_us": host_time(), "points": [], "incomplete": None}
    print(f"host time of a call, us: {result['host_us']}")
    if options.so_far is not None:
        result["points"] = json.loads(options.so_far.read_text())["points"]
    for number, point in list(enumerate(points))[options.begin :]:
        if time.monotonic() - begin > options.max_seconds:
            result["incomplete"] = f"out of time after {number} of {len(points)} points"
            print(f"\n{result['incomplete']}")
            break
        try:
            measured = measure(point, {name: make for name, make in contestants.items() if name not in options.without})
        except Broken as broken:
            print(f"\n{point}: {broken}\nand on without it, in a new process", flush=True)
            result["points"].append({"point": asdict(point), "broken": {broken.name: broken.reason}})
            go_on(options, result, number, broken.name, options.max_seconds - (time.monotonic() - begin))
        result["points"].append(measured)
        show(measured)
        torch.cuda.empty_cache()
    result["after"] = snapshot(torch.device("cuda"))
    if options.json is not None:
        save(options.json, result)


if __name__ == "__main__":
    main()
