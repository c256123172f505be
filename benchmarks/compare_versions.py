"""Versions of Strobe beside each other, in one process: microseconds, and cycles of the GPU's clock, of a backward or forward.

A version is a revision of git, or a folder that holds a `strobe` package, itself or in `src`. All of them compute on the same
inputs, and on a GPU as CUDA graphs that share one pool of memory, so that what they write lies at the same addresses, and none
has the better ones.
They run in balanced orders, in bursts long enough for the power limit, at several placements. Cycles tell what a kernel needs,
time also what the power limit makes of it: a kernel that keeps the chip busier runs at a lower clock, and so does whoever
comes next. In bursts of half a second and more (`--seconds 0.5`) the GPU's meter tells joules, too, on which time depends
where the power limit does.

    python benchmarks/compare_versions.py HEAD~1 HEAD --head-dims 64,96 --masks full,causal --lengths 4096 [--forward]
        [--packed] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strobe.lab.bench.bench import Clock, CpuClock, CudaClock, balanced_order
from strobe.lab.bench.energy_meter import Meter, watts
from strobe.lab.bench.machine import provenance, save

ROOT = Path(__file__).parent.parent
TOKENS, WIDTH = 16384, 2048
MASKS = {"full": lambda strobe: None, "causal": lambda strobe: strobe.Causal(), "window": lambda strobe: strobe.Window(1023, 0)}
HOLE = 37 * 2**20 + 1
"""Bytes that are taken before the inputs, once more at each placement."""


class Point(NamedTuple):
    head_dim: int
    head_dim_v: int
    length: int
    mask: str

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim}, {self.head_dim_v})"
        return f"{dims} {self.length} {self.mask}"


class Version(AbstractContextManager):
    """The `strobe` package of a folder, whose text it changes: its operators get a namespace of their own. Within it,
    `import strobe` means that one."""

    def __init__(self, name: str, number: int, folder: Path):
        self.name, self._namespace, self._folder = name, f"strobe_{number}", folder
        for path in (folder / "strobe").rglob("*.py"):
            text = path.read_text()
            new = text.replace('Library("strobe"', f'Library("{self._namespace}"').replace('"strobe::', f'"{self._namespace}::')
            path.write_text(re.sub(r"torch\.ops\.strobe\b", f"torch.ops.{self._namespace}", new))
        self._modules: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        with self:
            self.strobe, api = importlib.import_module("strobe"), importlib.import_module("strobe.api")
        self._options_of = getattr(api, "_options_of", None) or api.options_of  # its name before and after 2026-11-24

    def __enter__(self) -> Version:
        self._others = _taken()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self._folder))
        return self

    def __exit__(self, *raised) -> None:
        sys.path.remove(str(self._folder))
        self._modules = _taken()
        sys.modules.update(self._others)

    def forward(self, q, k, v, mask: str, lengths: dict) -> tuple[torch.Tensor, ...]:
        """lengths: keywords of `strobe.attention`."""
        return self._operators().forward(q, k, v, *self._options(q, k, v, mask, lengths))

    def backward(self, dout, out, lse, q, k, v, mask: str, lengths: dict) -> tuple[torch.Tensor, ...]:
        return self._operators().backward(dout, None, q, k, v, out, lse, *self._options(q, k, v, mask, lengths), [])[:3]

    def _operators(self):
        return getattr(torch.ops, self._namespace)

    def _options(self, q, k, v, mask: str, lengths: dict):
        return self._options_of(q, k, v, mask=MASKS[mask](self.strobe), **lengths).arguments()


def _taken() -> dict[str, Any]:
    """The modules of `strobe`, which nobody finds any more."""
    names = [name for name in sys.modules if name == "strobe" or name.startswith("strobe.")]
    return {name: sys.modules.pop(name) for name in names}


def unpacked(name: str, folder: Path) -> None:
    """Put the `strobe` package of a version into a folder."""
    for package in (Path(name) / "strobe", Path(name) / "src" / "strobe"):
        if package.is_dir():
            subprocess.run(["cp", "-r", str(package), str(folder)], check=True)
            return
    packed = subprocess.run(["git", "archive", name, "src/strobe"], cwd=ROOT, capture_output=True)
    if packed.returncode:
        sys.exit(f"a version must be a revision of git or a folder with a strobe package, got {name!r}")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "src" / "strobe").rename(folder / "strobe")


class Inputs:
    """q, k, v, dout, packed or not, and the first version's out and LSE."""

    def __init__(self, point: Point, tokens: int, width: int, packed: bool, device: str):
        generator = torch.Generator(device).manual_seed(0)
        batch, heads = max(1, tokens // point.length), max(1, width // max(point.head_dim, point.head_dim_v))

        def new(dim: int) -> torch.Tensor:
            shape = (batch * point.length,) if packed else (batch, point.length)
            return torch.randn(*shape, heads, dim, generator=generator, dtype=torch.bfloat16, device=device)

        self.qkv = new(point.head_dim), new(point.head_dim), new(point.head_dim_v)
        self.dout = new(point.head_dim_v)
        self.lengths: dict[str, Any] = {}
        if packed:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * point.length
            self.lengths = {f"cu_seqlens_{side}": starts for side in ("q", "kv")}
            self.lengths |= {f"max_seqlen_{side}": point.length for side in ("q", "kv")}
        self.outputs: tuple[torch.Tensor, ...] = ()

    def call(self, version: Version, mask: str, forward: bool) -> Callable[[], tuple[torch.Tensor, ...]]:
        if not self.outputs:
            with version:
                self.outputs = version.forward(*self.qkv, mask, self.lengths)
        if forward:
            return lambda: version.forward(*self.qkv, mask, self.lengths)
        return lambda: version.backward(self.dout, *self.outputs, *self.qkv, mask, self.lengths)


def captured(version: Version, call: Callable[[], tuple[torch.Tensor, ...]], pool) -> tuple[Callable[[], None], list]:
    """A call as a function without results, a CUDA graph on a GPU; and copies of its results, whose memory is free again."""
    with version:
        results = call()  # compiles
        if results[0].device.type == "cpu":
            return (lambda: _within(version, call)), list(results)
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        del results
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            results = call()
    graph.replay()
    return graph.replay, [x.clone() for x in results]


def _within(version: Version, call: Callable[[], object]) -> None:
    with version:
        call()


class Burst(NamedTuple):
    """Of a call in one burst, the mean: None where nobody can tell."""

    us: float
    cycles: float | None
    joules: float | None


class Times:
    """Bursts of a call."""

    def __init__(self, run: Callable[[], None], clock: Clock, meter: Meter | None):
        self._run, self._clock, self._meter = run, clock, meter
        self._estimate = clock.seconds(run, 1)

    def take(self, seconds: float) -> Burst:
        count = max(1, int(seconds / self._estimate))
        for _ in range(count):  # until the clock is what the power limit leaves
            self._run()
        self._clock.synchronize()
        begin = time.monotonic()
        microseconds = 1e6 * self._clock.seconds(self._run, count)
        mhz, power = self._clock.mhz(), self._watts(begin)
        return Burst(microseconds, mhz and microseconds * mhz, power and 1e-6 * microseconds * power)

    def _watts(self, begin: float) -> float | None:
        try:
            return self._meter and watts(self._meter.samples, begin, time.monotonic())
        except ValueError:  # too short
            return None


def measured(point: Point, versions: list[Version], options, meter: Meter | None) -> dict:
    """Of each version the mean over rounds and placements, and how far its results are from the first one's at most."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: list[list[Burst]] = [[] for _ in versions]
    apart = [0.0 for _ in versions]
    for placement in range(options.placements):
        hole = torch.empty(placement * HOLE, dtype=torch.uint8, device=device)
        inputs = Inputs(point, options.tokens, options.width, options.packed, device)
        clock: Clock = CudaClock(torch.device(device)) if device == "cuda" else CpuClock()
        pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
        runs, first = [], None
        for number, version in enumerate(versions):
            run, results = captured(version, inputs.call(version, point.mask, options.forward), pool)
            first = first or results
            apart[number] = max(apart[number], *(_apart(x, y) for x, y in zip(results, first, strict=True)))
            runs.append(Times(run, clock, meter))
        for order in balanced_order(len(runs), options.rounds):
            for i in order:
                found[i].append(runs[i].take(options.seconds))
        del hole, runs, inputs
    return {
        version.name: {
            "us": round(_mean([burst.us for burst in bursts]) or 0.0, 1),
            "cycles": _mean([burst.cycles for burst in bursts], 0),
            "joules": _mean([burst.joules for burst in bursts], 4),
            "apart": far,
        }
        for version, bursts, far in zip(versions, found, apart, strict=True)
    }


def _mean(values: list[float | None], digits: int = 3) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), digits) if len(known) == len(values) else None


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()


def points_of(options) -> list[Point]:
    def dims(text: str) -> tuple[int, int]:
        head_dim, _, head_dim_v = text.partition("/")
        return int(head_dim), int(head_dim_v or head_dim)

    given = itertools.product(options.head_dims.split(","), options.lengths.split(","), options.masks.split(","))
    return [Point(*dims(head_dim), int(length), mask) for head_dim, length, mask in given]


def compile_all(points: list[Point], options) -> None:
    """In a process for each version and head dim: a kernel on disk is found by all."""
    ahead = {(point.head_dim, point.head_dim_v, point.mask): point for point in points}
    with tempfile.TemporaryDirectory() as folder:
        version = Version("", 0, _folder(options.versions[0], Path(folder)))
        for point in ahead.values():
            inputs = Inputs(point, point.length, max(point.head_dim, point.head_dim_v), options.packed, "cuda")
            _within(version, inputs.call(version, point.mask, options.forward))


def _folder(name: str, parent: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=parent))
    unpacked(name, folder)
    return folder


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--head-dims", default="64,96,128,192/128")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--masks", default="full,causal,window")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--packed", action="store_true", help="sequences of one length, one after the other, by cu_seqlens")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of all sequences")
    parser.add_argument("--width", type=int, default=WIDTH, help="columns of all heads")
    parser.add_argument("--placements", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.025, help="of a burst, after one as long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    points = points_of(options)
    if options.compile:
        compile_all(points, options)
        return
    if torch.cuda.is_available():
        common = ["--lengths", options.lengths, "--masks", options.masks, "--compile"]
        common += ["--forward"] * options.forward + ["--packed"] * options.packed
        compilers = [
            subprocess.Popen([sys.executable, __file__, name, "--head-dims", head_dim, *common])
            for name, head_dim in itertools.product(options.versions, options.head_dims.split(","))
        ]
        for compiler in compilers:
            compiler.wait()
    with tempfile.TemporaryDirectory() as folder, _metered() as meter:
        versions = [Version(name, i, _folder(name, Path(folder))) for i, name in enumerate(options.versions)]
        results = {}
        for point in points:
            results[str(point)] = measured(point, versions, options, meter)
            figures = results[str(point)].values()
            first = next(iter(figures))
            print(f"{point!s:<24}", "   ".join(_line(x, first) for x in figures), flush=True)
    if options.json:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        save(options.json, {"what": "trees", **provenance(device), "points": results})


def _metered() -> AbstractContextManager[Meter | None]:
    """A GPU's meter, if there is one."""
    if not torch.cuda.is_available():
        return nullcontext()
    try:
        return Meter(torch.device("cuda"))
    except RuntimeError as reason:
        print(f"no joules: {reason}", flush=True)
        return nullcontext()


def _line(x: dict, first: dict) -> str:
    """What is known, each with how many times the first version takes."""
    units = {"us": (1, "us"), "cycles": (1e3, "kilocycles"), "joules": (1e-3, "mJ")}
    known = [(x[name], first[name], *unit) for name, unit in units.items() if x[name] is not None and first[name] is not None]
    return (
        ", ".join(f"{mine / by:.0f} {unit} ({other / mine:.3f})" for mine, other, by, unit in known)
        + f", {x['apart']:.1e} apart"
    )


if __name__ == "__main__":
    main()
