"""The kernels for mma.sync beside PyTorch's (the flash backend, which is FlashAttention-2; for float32 the efficient one and
the formula) and the portable ones, in one process, in turns.

Every contender runs as CUDA graphs on the same inputs, in balanced orders, and is checked against float64 first. Of `sm80`
each config takes part that is worth timing (`candidates` in `kernels/sm80/config.py`), or the first few of them, and those that
are asked for. With `--portable` the portable kernels take part: as they are and, but for float32, compiled as for an A100
(mma.sync and cp.async instead of wgmma), which tells what they are worth there.

    python benchmarks/sm80.py --pilot --max-seconds 90
    python benchmarks/sm80.py --portable --json benchmarks/results/sm80.json
    python benchmarks/sm80.py --dtypes fp32 --head-dims 64,128 --lengths 4096
    python benchmarks/sm80.py --phases forward --tokens 1024 --lengths 1024,512
    python benchmarks/sm80.py --phases backward --head-dims 128 --masks causal --lengths 4096 --config tile_kv=64,warps=4

A GPU of another kind than the one that a config is for says less: what carries over are the orders of configs, not the times.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from strobe.call import launches
from strobe.device import KNOWN, Arch, arch_of
from strobe.kernels.common.call import unfilled
from strobe.lab.bench.accuracy import BOUNDS, Gate
from strobe.lab.bench.bench import CudaClock, balanced_order, block_of, summary
from strobe.lab.bench.intervals import Ratio
from strobe.lab.bench.machine import provenance, save
from strobe.lab.bench.peers import Peer, bind, sdpa
from strobe.lab.bench.plan import MASKS, Inputs, Point
from strobe.problem import AttentionProblem, Operands, Upstream
from strobe_cli.options import changed_config

PEERS = {"FA2": "FLASH_ATTENTION", "SDPA efficient": "EFFICIENT_ATTENTION", "SDPA math": "MATH"}
"""PyTorch's backends that take part, by the names that are shown."""
GRAPH_SECONDS = 0.004
"""How long a captured graph runs, about."""

PILOT = {"head_dims": (96, 256, 128, 64), "lengths": (4096,), "masks": ("causal", "full"), "most": (2,), "rounds": 2}
"""What --pilot changes: one length, two configs a point, few rounds."""


# ---- backends with one config


@dataclass
class Fixed:
    """The `sm80` backend with one config."""

    config: Any
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"sm80 {self.config.brief}"

    def buffers(self, problem: AttentionProblem, arch: Arch):
        from strobe.kernels.sm80 import backward_launch, launch

        return backward_launch.buffers(problem, self.config) if problem.phase == "backward" else launch.buffers(problem)

    def calls(self, problem: AttentionProblem, tensors, arch: Arch):
        from strobe.kernels.sm80 import backward_launch, launch

        module = backward_launch if problem.phase == "backward" else launch
        return module.calls(problem, tensors, arch, self.config)


class Portable:
    """The portable backend, with kernels of its own: Triton keeps what it compiled by the kernel, not by what it was compiled
    as."""

    def __init__(self, name: str, arch: Arch):
        self.name, self._arch, self._modules = name, arch, {}

    def _module(self, phase: str):
        if phase not in self._modules:
            spec = importlib.util.find_spec(f"strobe.kernels.portable.{phase}")
            assert spec is not None and spec.origin is not None and spec.loader is not None
            spec = importlib.util.spec_from_file_location(f"{self.name.replace(' ', '_')}_{phase}", spec.origin)
            assert spec is not None and spec.loader is not None
            self._modules[phase] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self._modules[phase])
        return self._modules[phase]

    def buffers(self, problem: AttentionProblem, arch: Arch):
        return self._module(problem.phase).buffers(problem)

    def calls(self, problem: AttentionProblem, tensors, arch: Arch):
        return self._module(problem.phase).calls(problem, tensors, self._arch)


@contextmanager
def compiled_as(arch: str | None) -> Iterator[None]:
    """Within it kernels are compiled to the PTX of another arch, and that for the GPU that is there; None: for that alone."""
    if arch is None:
        yield
        return
    from triton import knobs

    def hook(backend=None, stages=None, options=None, language=None, capability=None):
        """Triton makes PTX of the GPU that is there, whatever its passes worked for. Without arguments: what it asks in order
        to know this PTX in its cache."""
        if stages is None:
            return f"PTX for {arch}", hashlib.sha256(arch.encode()).hexdigest()
        stages["ptx"] = lambda source, metadata: backend.make_ptx(source, metadata, options, capability)

    with knobs.runtime.scope():
        knobs.runtime.override_arch = arch
        knobs.runtime.add_stages_inspection_hook = hook
        yield


def backends(point: Point, arch: Arch, arguments: argparse.Namespace) -> list[tuple[Any, str | None]]:
    """The contenders of ours, each with the arch that it is compiled as."""
    from strobe.kernels.sm80.config import backward_candidates, candidates

    problem = point.problem()
    found = (backward_candidates if point.backward else candidates)(problem, arch)
    asked = [changed_config(found[0], text, ("head_dim", "head_dim_v")) for text in arguments.config]
    most = arguments.most and arguments.most[-1 if point.backward else 0]
    chosen = dict.fromkeys((*found[:most], *asked))
    ours: list[tuple[Any, str | None]] = [(Fixed(config), None) for config in chosen]
    if not arguments.portable:
        return ours
    ours.append((Portable("portable", arch), None))
    if point.dtype != "fp32":  # of which multiply-adds are made, one by one, on either
        ours.append((Portable("portable as sm_80", replace(KNOWN["A100"], sms=arch.sms)), "sm80"))
    return ours


# ---- compiled ahead, in many processes


def compile_ahead(point: Point, number: int, arch: Arch, arguments: argparse.Namespace) -> None:
    """Compile what one of the contenders of a point needs, to the cache on disk. It leaves the GPU alone."""
    backend, as_arch = backends(point, arch, arguments)[number]
    from strobe.lab.binary.offline import pretend_gpu

    hash_in_one_order()

    with pretend_gpu(arch.capability):
        compile_all(backend, point, arch, as_arch)
        if point.backward and number == 0:
            above = replace(point, backward=False)
            compile_all(fastest(above, arch), above, arch, None)


class Ahead:
    """Compiles what points need, in their order, in many processes, while the first points are measured."""

    def __init__(self, points: list[Point], arch: Arch, arguments: argparse.Namespace):
        self._pool = ProcessPoolExecutor(min(28, max(1, (os.cpu_count() or 1) - 2)), mp_context=get_context("spawn"))
        self._jobs: dict[Point, list[Future]] = {}
        for point in points:
            if (family := self._family(point)) not in self._jobs:
                jobs = range(len(backends(point, arch, arguments)))
                self._jobs[family] = [self._pool.submit(compile_ahead, point, n, arch, arguments) for n in jobs]

    @staticmethod
    def _family(point: Point) -> Point:
        """One length is enough: no kernel is compiled for a length."""
        return replace(point, batch=1, length=1)

    def wait(self, point: Point) -> None:
        """Wait until what a point needs is compiled."""
        for job in self._jobs[self._family(point)]:
            if job.exception() is not None:  # it raises again where that is reported
                print(f"compiling: {' '.join(str(job.exception()).split())[:200]}", file=sys.stderr)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def hash_in_one_order() -> None:
    """Triton 3.6 finds a kernel on disk by a hash that depends on which other kernel was hashed before it, so processes that
    share what they compile hash all kernels in the same order."""
    from strobe.kernels.portable import backward as portable
    from strobe.kernels.sm80 import backward, backward_ends, forward

    for kernel in (forward.forward_kernel, backward.backward_kernel, backward_ends.prepare, backward_ends.convert):
        _ = kernel.cache_key
    _ = portable.redo_noted.cache_key


def compile_all(backend: Any, point: Point, arch: Arch, as_arch: str | None) -> None:
    problem = point.problem()
    with compiled_as(as_arch):
        for call in backend.calls(problem, unfilled(problem, backend.buffers(problem, arch)), arch):
            call.compile()


def fastest(point: Point, arch: Arch) -> Fixed:
    """What dispatch would take."""
    from strobe.kernels.sm80 import backend

    return Fixed(backend.config(point.problem(), arch))


# ---- a point


@dataclass
class Contender:
    name: str
    call: Callable[[], Any]
    heads_first: bool = False
    run: Callable[[], object] | None = None
    launches: int = 1
    count: int = 1
    error: float = 0.0
    seconds: list[float] = field(default_factory=list)
    mhz: list[float] = field(default_factory=list)


def our_call(backend: Any, point: Point, inputs: Inputs, upstream: Upstream | None, arch: Arch) -> Callable[[], Any]:
    problem, operands = point.problem(), Operands(inputs.q, inputs.k, inputs.v)
    given = {**operands._asdict(), **({} if upstream is None else upstream._asdict())}

    def call():
        made = launches.run(backend, problem, given, arch)
        return made.out if upstream is None else (made.dq, made.dk, made.dv)

    return call


def upstream_of(point: Point, inputs: Inputs, arch: Arch) -> Upstream | None:
    """out and LSE of our forward, for all backwards of ours."""
    if not point.backward:
        return None
    above = replace(point, backward=False)
    made = launches.run(fastest(above, arch), above.problem(), Operands(inputs.q, inputs.k, inputs.v)._asdict(), arch)
    out, lse = made.out, made.lse
    assert inputs.dout is not None
    return Upstream(out, lse, inputs.dout, None)


def enter(contender: Contender, context, clock: CudaClock, gate: Gate, bound: float, burst: float) -> None:
    """Run, check and capture a contender. Raises what it raises, or ValueError if it is wrong."""
    with context:
        result = contender.call()
        clock.synchronize()
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        if contender.heads_first:
            results = [x.transpose(1, 2) for x in results]
        contender.error = gate.error(results[0] if isinstance(result, torch.Tensor) else tuple(results))
        if not contender.error <= bound:
            raise ValueError(f"wrong: relative error {contender.error:.1e} against float64, allowed {bound:.0e}")
        launch = clock.seconds(contender.call, 2)
        contender.launches = max(1, min(32, round(GRAPH_SECONDS / launch)))
        contender.run, _ = clock.captured([contender.call], contender.launches)
        launch = clock.seconds(contender.run, 2) / contender.launches
        contender.count = max(1, round(burst / (launch * contender.launches)))


def measure(contender: Contender, clock: CudaClock) -> None:
    """One round: as many runs untimed before those that are timed."""
    assert contender.run is not None
    for _ in range(contender.count):
        contender.run()
    contender.seconds.append(clock.seconds(contender.run, contender.count) / contender.launches)
    if (mhz := clock.mhz()) is not None:
        contender.mhz.append(mhz)


def peers_of(point: Point) -> list[Peer]:
    """Whom a point is timed beside, the one of the ratios first. The flash backend takes no float32."""
    names = ("SDPA efficient", "SDPA math") if point.dtype == "fp32" else ("FA2",)
    return [sdpa(name, PEERS[name]) for name in names]


def measured(point: Point, arguments: argparse.Namespace, clock: CudaClock, out_of_time: Callable[[], bool]) -> dict:
    device = torch.device("cuda")
    arch = arch_of(device)
    inputs = Inputs.random(point, device, torch.Generator(device).manual_seed(0))
    gate, peers = Gate(inputs, MASKS[point.mask]), peers_of(point)
    upstream = upstream_of(point, inputs, arch)
    entries = []
    for peer in peers:
        with peer.context():
            entries.append((Contender(peer.name, bind(peer, point, inputs), peer.heads_first), peer.context()))
    for backend, as_arch in backends(point, arch, arguments):
        entries.append((Contender(backend.name, our_call(backend, point, inputs, upstream, arch)), compiled_as(as_arch)))
    racing, left_out = [], {}
    for contender, context in entries:
        if out_of_time():
            left_out[contender.name] = "out of time"
            continue
        try:
            enter(contender, context, clock, gate, BOUNDS[point.dtype], arguments.seconds)
            racing.append(contender)
        except Exception as error:
            clock.synchronize()
            left_out[contender.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    rounds = max(arguments.rounds, block_of(len(racing)) if arguments.rounds > 2 else 0)
    for order in balanced_order(len(racing), rounds):
        for number in order:
            measure(racing[number], clock)
        if out_of_time():
            break
    return asdict(point) | {
        "peer": peers[0].name,
        "results": {x.name: result_of(x, point) for x in racing},
        "left_out": left_out,
    }


def result_of(contender: Contender, point: Point) -> dict:
    clock = {"sm_clock_mhz": median(contender.mhz)} if contender.mhz else {}
    return summary(point.flops, contender.seconds) | {"error": contender.error} | clock


def show(entry: dict, seconds: float) -> None:
    """A line for each contender: TFLOP/s, and over the peer with its 95 % interval. seconds: since the start."""
    point, peer = Point.of(entry), entry["peer"]
    print(f"\n{point} {'backward' if point.backward else 'forward'} ({seconds:.0f} s)")
    base = entry["results"].get(peer)
    for name, result in sorted(entry["results"].items(), key=lambda item: -item[1]["tflops"]):
        over = "" if base is None or name == peer else f"  {Ratio.of(result['rounds'], base['rounds'])} of {peer}"
        print(f"  {result['tflops']:7.1f} TFLOP/s  {name}{over}  (error {result['error']:.1e})")
    for name, reason in entry["left_out"].items():
        print(f"  left out: {name}: {reason}")
    sys.stdout.flush()


# ---- all points


def points_of(arguments: argparse.Namespace) -> list[Point]:
    """By length, the ones that tell most first, so that a run that is cut short has every shape; a backward after each
    forward."""
    phases = [phase == "backward" for phase in arguments.phases]
    return [
        Point(max(1, arguments.tokens // length), length, 2048 // dim, 2048 // dim, dim, dim, dtype, mask, backward)
        for length in arguments.lengths
        for dtype in arguments.dtypes
        for dim in arguments.head_dims
        for mask in arguments.masks
        for backward in phases
    ]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", type=words, default=("bf16",), help="of bf16, fp16, fp32")
    parser.add_argument("--head-dims", type=numbers, default=(64, 128, 96, 256))
    parser.add_argument("--lengths", type=numbers, default=(4096, 1024, 16384, 512, 2048, 8192))
    parser.add_argument("--tokens", type=int, default=16384, help="batch x length")
    parser.add_argument("--masks", type=words, default=("full", "causal"))
    parser.add_argument("--phases", type=words, default=("forward", "backward"))
    parser.add_argument("--config", action="append", default=[], help="another config of sm80, as changes of the first one")
    parser.add_argument("--most", type=numbers, help="of the configs worth timing at most so many, or F,B: forward, backward")
    parser.add_argument("--portable", action="store_true", help="the portable kernels, too")
    parser.add_argument("--pilot", action="store_true", help="one length, two configs a point, few rounds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.015, help="of a burst")
    parser.add_argument("--max-seconds", type=float, default=540.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.pilot:
        vars(arguments).update(PILOT)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        sys.exit("needs an NVIDIA GPU of compute capability 8.0 or newer")

    start = time.monotonic()
    points = points_of(arguments)
    arch = arch_of(torch.device("cuda"))
    result: dict = {**provenance(torch.device("cuda")), "what": "mma.sync beside PyTorch's", "points": []}
    hash_in_one_order()
    clock = CudaClock(torch.device("cuda"))
    with Ahead(points, arch, arguments) as ahead, clock.running():
        for point in points:
            ahead.wait(point)
            if time.monotonic() - start > arguments.max_seconds:
                result["stopped"] = f"out of time after {len(result['points'])} of {len(points)} points"
                print(result["stopped"])
                break
            entry = measured(point, arguments, clock, lambda: time.monotonic() - start > arguments.max_seconds)
            show(entry, time.monotonic() - start)
            result["points"].append(entry)
            torch.cuda.empty_cache()
            if arguments.json is not None:
                save(arguments.json, result)


if __name__ == "__main__":
    main()
