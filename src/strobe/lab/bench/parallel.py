"""`strobe bench parallel`: `strobe.parallel` on several GPUs of one host, beside one GPU and beside PyTorch's ways.

One process a GPU (NCCL; on a CPU Gloo, at small sizes, to try it out). It measures, for each number of GPUs:

    right      results and gradients of each method and mask against one GPU's, and the error of both against float32
    scaling    a long causal sequence in zig-zag: time of each method, of the same on one GPU, TFLOP/s a GPU, memory a GPU
    beside     PyTorch's context_parallel and an all-gather before PyTorch's attention, at the same shapes
    timeline   when each rank computes and waits, in one forward and one backward
    steps      the kernels' share of each step of each of 8 ranks, which run one after the other on one GPU
    ring       the error against float64 as a ring grows from 2 to 16 ranks, simulated on one GPU
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import functional as F

import strobe
from strobe import parallel
from strobe.call.options import Options
from strobe.lab.bench.machine import provenance
from strobe.lab.bench.plot import PEERS, STROBE, plt, save
from strobe.lab.model import schedule
from strobe.parallel.links import Links, Start, Wait, run_together
from strobe.parallel.schedules import Compute, Method, backward, forward
from strobe.parallel.sharding import Sharding
from strobe.parallel.work import Inputs, Job
from strobe.problem import Upstream

WAYS_OF_PYTORCH = ("context_parallel allgather", "context_parallel alltoall", "all-gather + SDPA")


@dataclass(frozen=True)
class Settings:
    """What is measured. tokens: of the whole sequence, for "scaling"; checked: for "right". repeats: timed runs of each."""

    gpus: tuple[int, ...]
    tokens: tuple[int, ...] = (131072,)
    weak_tokens: int = 0
    """Tokens of each GPU in weak scaling; 0: none."""
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    checked: int = 2048
    repeats: int = 5
    methods: tuple[str, ...] = ("ring", "allgather", "ulysses", "usp")
    masks: tuple[str, ...] = ("full", "causal", "window")
    peers: tuple[str, ...] = WAYS_OF_PYTORCH
    device: str = "cuda"
    timeout: float = 120.0


ONE_GPU = "one GPU"

_WARM_UP = 2
"""Rounds that do not count: they compile, and warm the GPUs up."""

MASKS = {
    "full": strobe.Full(), "causal": strobe.Causal(), "window": strobe.Window(1024, 0), "prefix": strobe.Prefix(500),
}  # fmt: skip


def run(settings: Settings, command: str) -> dict:
    """Measure, in processes of its own. ValueError if there are fewer GPUs than asked for."""
    there = torch.cuda.device_count() if settings.device == "cuda" else os.cpu_count() or 1
    if settings.device == "cuda" and max(settings.gpus) > there:
        raise ValueError(f"gpus must be at most the {there} that are here, got {max(settings.gpus)}")
    found = []
    for gpus in settings.gpus:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("spawn")
            processes = [context.Process(target=_process, args=(settings, rank, gpus, folder)) for rank in range(gpus)]
            for process in processes:
                process.start()
            try:
                for process in processes:
                    process.join()
            finally:
                for process in processes:
                    process.kill()
            answers = [Path(folder, f"{rank}.json") for rank in range(gpus)]
            if not all(path.exists() for path in answers):
                raise RuntimeError(f"a process of {gpus} died: see its message above")
            by_rank = [json.loads(path.read_text()) for path in answers]
            found.append(
                {**by_rank[0], "timelines": [one["timeline"] for one in by_rank], "memory": [x["memory"] for x in by_rank]}
            )
    device = torch.device(settings.device)
    return {"what": "parallel", **provenance(device, command), "settings": asdict(settings), "runs": found}


def _process(settings: Settings, rank: int, gpus: int, folder: str) -> None:
    """One rank: writes what it found."""
    device = torch.device(settings.device, rank) if settings.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # or those of all ranks would wait for each other's
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=gpus,
        timeout=timedelta(seconds=settings.timeout), device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    bench = _Rank(settings, rank, gpus, device)
    found: dict[str, Any] = {"gpus": gpus, "scaling": [], "memory": {}, "timeline": {}, "right": bench.right()}
    found["ring"] = bench.ring_error() if gpus == settings.gpus[0] else []
    found["steps"] = [bench.steps(settings.tokens[0], method) for method in ("ring", "allgather")] if rank == 0 else []
    lengths = (*settings.tokens, *([settings.weak_tokens * gpus] if settings.weak_tokens else []))
    for tokens in dict.fromkeys(lengths):
        found["scaling"].append(bench.scaling(tokens, found["memory"]))
    for method in ("ring", "allgather"):
        found["timeline"][method] = bench.timeline(settings.tokens[0], method)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class _Rank:
    """What one rank measures. All ranks call the same methods in the same order."""

    def __init__(self, settings: Settings, rank: int, gpus: int, device: torch.device):
        self.settings, self.rank, self.gpus, self.device = settings, rank, gpus, device

    def _whole(self, tokens: int, seed: int = 0, dtype=torch.bfloat16) -> list[torch.Tensor]:
        """q, k, v and dout, the same on all ranks."""
        random = torch.Generator(self.device).manual_seed(seed)
        s = self.settings
        shapes = [(1, tokens, heads, s.head_dim) for heads in (s.heads, s.heads_kv, s.heads_kv, s.heads)]
        return [torch.randn(shape, generator=random, device=self.device).to(dtype) for shape in shapes]

    def _random_shard(self, tokens: int) -> list[torch.Tensor]:
        """q, k, v and dout of this rank alone, so that no rank holds the whole."""
        return self._whole(tokens // self.gpus, seed=self.rank)

    def _shard(self, x: torch.Tensor, layout: str) -> torch.Tensor:
        return parallel.shard(x, layout=layout)

    # ---- right

    def right(self) -> list[dict]:
        """Errors against float32 on one device: of all ranks' results, and of one GPU's, relative to the largest number."""
        found: list[dict] = []
        for name in self.settings.masks:
            mask = MASKS[name]
            tokens = self.settings.checked
            whole = self._whole(tokens)
            exact = _run(partial(_formula, seen=mask.dense(tokens, tokens, device=self.device)), [x.float() for x in whole])
            alone = _run(partial(strobe.attention, mask=mask), whole)
            for method in self.settings.methods:
                for layout in ("contiguous", "zigzag"):
                    mine = [self._shard(x, layout) for x in whole]
                    try:
                        call = partial(parallel.attention, mask=mask, method=method, layout=layout)
                        got = _run(call, mine)
                    except ValueError as error:
                        found.append({"mask": name, "method": method, "layout": layout, "refused": str(error)})
                        continue
                    errors = {}
                    for what, x, single, want in zip(("out", "dq", "dk", "dv"), got, alone, exact, strict=True):
                        joined = parallel.unshard(x, layout=layout)
                        errors[what] = [_error(joined, want), _error(single, want)]
                    good = all(ours <= 1.5 * theirs + 2**-9 for ours, theirs in errors.values())
                    found.append({"mask": name, "method": method, "layout": layout, "errors": errors, "right": good})
        return found

    def ring_error(self) -> list[dict]:
        """Error of rings of 2 to 16 simulated ranks against float64, beside that of one call: bf16, 2k tokens, 4 heads."""
        random = torch.Generator(self.device).manual_seed(1)
        q, k, v = (torch.randn(1, 2048, heads, 128, generator=random, device=self.device) for heads in (4, 2, 2))
        half = [x.to(torch.bfloat16) for x in (q, k, v)]
        q, k, v = (x.double() for x in half)
        exact = _formula(q, k, v, strobe.Causal().dense(2048, 2048, device=self.device))
        alone = cast(torch.Tensor, strobe.attention(*half, mask=strobe.Causal()))
        found: list[dict[str, Any]] = [{"ranks": 1, "error": _error(alone, exact)}]
        for ranks in (2, 4, 8, 16):
            out = parallel.simulate(*half, ranks=ranks, mask=strobe.Causal(), method="ring", layout="zigzag")
            found.append({"ranks": ranks, "error": _error(cast(torch.Tensor, out), exact)})
        return found

    # ---- scaling

    def scaling(self, tokens: int, memory: dict) -> dict:
        """Milliseconds of forward and backward, of each method and peer, and of one GPU with the whole, if that fits: then all
        ranks compute the whole. In each round all take their turn, so that all run on GPUs equally warm."""
        mine = self._random_shard(tokens)
        inputs = dict.fromkeys((*self.settings.methods, *self.settings.peers), mine)
        found: dict[str, Any] = {"tokens": tokens, "milliseconds": {}, "failed": {}}
        with _failures(found["failed"], ONE_GPU):
            inputs = {ONE_GPU: self._whole(tokens), **inputs}
        for number in range(_WARM_UP + self.settings.repeats):
            names = [name for name in inputs if name not in found["failed"]]
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                with _failures(found["failed"], name), self._within(name) as call:
                    times, most = self._time(call, inputs[name])
                    memory[f"{tokens} {name}"] = most
                    for phase, one in zip(("forward", "backward"), times, strict=True):
                        of_name = found["milliseconds"].setdefault(name, {"forward": [], "backward": []})
                        of_name[phase] += [one] if number >= _WARM_UP else []
                self._together()
        found["milliseconds"] = {name: found["milliseconds"][name] for name in inputs if name not in found["failed"]}
        return found

    def _together(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def _time(self, call: Callable, tensors: list[torch.Tensor]) -> tuple[list[float], int]:
        """Milliseconds of the forward and the backward, of the slowest rank; the most bytes that this rank held on its GPU,
        its inputs among them."""
        on_gpu = self.device.type == "cuda"
        held = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        self._together()
        begin = time.perf_counter()
        out = call(q, k, v)
        self._wait()
        middle = time.perf_counter()
        self._together()
        again = time.perf_counter()
        out.backward(tensors[3])
        self._wait()
        end = time.perf_counter()
        slowest = torch.tensor([middle - begin, end - again], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        most = torch.cuda.max_memory_allocated() - held + sum(x.nbytes for x in tensors) if on_gpu else 0
        return [1e3 * seconds for seconds in slowest.tolist()], most

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # ---- peers

    @contextmanager
    def _within(self, name: str) -> Iterator[Callable]:
        """What is measured, as a call, within what it needs: PyTorch's context covers the backward too. It gets as many key
        heads as query heads, which its ring needs."""
        if name == ONE_GPU:
            yield partial(strobe.attention, mask=strobe.Causal())
            return
        if name in self.settings.methods:
            yield partial(parallel.attention, mask=strobe.Causal(), method=name, layout="zigzag")
            return
        if name == "all-gather + SDPA":
            yield self._gathered
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import _attention as experimental

        def call(q, k, v):
            group = q.shape[2] // k.shape[2]
            q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        experimental.set_rotate_method(name.split()[-1])
        something = torch.zeros(1, 2 * self.gpus, device=self.device)  # it wants a buffer to shard
        mesh = init_device_mesh(self.device.type, (self.gpus,))
        with experimental.context_parallel(mesh, buffers=[something], buffer_seq_dims=[1]):
            yield call

    def _gathered(self, q, k, v):
        """All keys on every rank, then PyTorch's attention of each piece of the zig-zag, with the mask as a causal one."""
        sharding = Sharding((q.shape[1] * self.gpus,), self.gpus, "zigzag")
        index = sharding.order(0, self.gpus - 1, self.device)
        k, v = (_AllGather.apply(x, self.gpus).index_select(1, index) for x in (k, v))
        near, far = sharding.pieces(self.rank, self.rank)[0]
        outs, first = [], 0
        for piece in (near, far):
            rows = q[:, first : first + len(piece)].transpose(1, 2)
            first += len(piece)
            keys, values = (x[:, : piece.stop].transpose(1, 2) for x in (k, v))
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(rows.shape[2], keys.shape[2])
            outs.append(F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, enable_gqa=True).transpose(1, 2))
        return torch.cat(outs, 1)

    # ---- the kernels' share

    def steps(self, tokens: int, method: str, ranks: int = 8) -> dict:
        """Milliseconds of each computation of each rank, forward and backward, run one after the other on one GPU."""
        s, how = self.settings, Method("usp", 1) if method == "ring" else Method("allgather", min(4, self.settings.heads_kv))
        sharding = Sharding((tokens,), ranks, "zigzag")
        job = Job(Options(right=0, scale=s.head_dim**-0.5), sharding, sharding, False, s.heads, s.heads_kv)
        q, k, v, dout = self._whole(tokens)
        rows = [sharding.index(rank, rank, self.device) for rank in range(ranks)]
        inputs = [Inputs(*(x.index_select(1, own) for x in (q, k, v))) for own in rows]
        found: list[list] = []
        for _ in range(2):  # the first one compiles
            found = []
            programs = [_timed(forward(job, how, rank, x), rank, "forward", found) for rank, x in enumerate(inputs)]
            results = run_together(programs)
            upstream = [Upstream(one.out, one.lse, dout.index_select(1, own)) for one, own in zip(results, rows, strict=True)]
            programs = [
                _timed(backward(job, how, rank, x, up), rank, "backward", found)
                for rank, (x, up) in enumerate(zip(inputs, upstream, strict=True))
            ]
            run_together(programs)
        return {"method": method, "tokens": tokens, "ranks": ranks, "steps": found}

    # ---- the timeline

    def timeline(self, tokens: int, method: str) -> list[list]:
        """[kind, what, start, end] in milliseconds of this rank's forward and backward, by events of its stream."""
        if self.device.type != "cuda":
            return []
        q, k, v, dout = self._random_shard(tokens)
        s, sharding = self.settings, Sharding((tokens // self.gpus * self.gpus,), self.gpus, "zigzag")
        options = Options(right=0, scale=s.head_dim**-0.5)
        job = Job(options, sharding, sharding, False, s.heads, s.heads_kv)
        how = Method("usp", 1) if method == "ring" else Method("allgather", min(4, s.heads_kv))
        links = Links(dist.group.WORLD)  # type: ignore[arg-type]
        spans: list[list] = []
        for attempt in range(2):  # the first one compiles
            self._together()
            events: list[tuple] = []
            results = _traced(forward(job, how, self.rank, Inputs(q, k, v)), links, events)
            upstream = Upstream(results.out, results.lse, dout, None)
            _traced(backward(job, how, self.rank, Inputs(q, k, v), upstream), links, events)
            self._wait()
            if attempt and events:
                zero = events[0][2]
                spans = [[kind, what, zero.elapsed_time(a), zero.elapsed_time(b)] for kind, what, a, b in events]
        return spans


def _traced(program, links: Links, events: list[tuple]) -> Any:
    """`links.run`, with an event before and after each computation and each wait."""
    answer = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as end:
            return end.value
        answer = None
        if isinstance(request, Start):
            answer = links.start(request)
            continue
        begin, end_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        if isinstance(request, Wait):
            links.wait(request.ticket)
        else:
            answer = request.run()
        end_.record()
        kind = "wait" if isinstance(request, Wait) else "compute"
        what = request.ticket[0].what if isinstance(request, Wait) else request.what
        events.append((kind, what, begin, end_))


def _timed(program, rank: int, phase: str, found: list[list]) -> Any:
    """The same program, whose computations are timed: [rank, phase, what, milliseconds] each."""
    answer = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(request, Compute):
            request = request._replace(run=partial(_timed_run, request, rank, phase, found))
        answer = yield request


def _timed_run(request: Compute, rank: int, phase: str, found: list[list]) -> Any:
    _synchronize()
    begin = time.perf_counter()
    answer = request.run()
    _synchronize()
    found.append([rank, phase, request.what, 1e3 * (time.perf_counter() - begin)])
    return answer


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _AllGather(torch.autograd.Function):
    """All ranks' rows, one behind the other; gradients are reduced and scattered."""

    @staticmethod
    def forward(ctx, x, ranks: int):
        ctx.ranks = ranks
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(ctx.ranks, 1)]
        mine = torch.empty_like(parts[0])
        if grad.is_cuda:
            dist.reduce_scatter(mine, parts)
        else:
            whole = grad.contiguous()
            dist.all_reduce(whole)
            mine = whole.chunk(ctx.ranks, 1)[dist.get_rank()]
        return mine, None


def _formula(q, k, v, seen: torch.Tensor) -> torch.Tensor:
    """Attention as its formula, a query head after the other; seen: [n_q, n_kv]."""
    group, outs = q.shape[2] // k.shape[2], []
    for head in range(q.shape[2]):
        scores = q[0, :, head] @ k[0, :, head // group].T * q.shape[-1] ** -0.5
        outs.append(torch.where(seen, scores, -torch.inf).softmax(-1) @ v[0, :, head // group])
    return torch.stack(outs, 1)[None]


def _run(call: Callable, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = call(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


@contextmanager
def _failures(found: dict[str, str], name: str) -> Iterator[None]:
    """Notes what does not run: out of memory, or a peer that cannot."""
    try:
        yield
    except (RuntimeError, ValueError, ImportError, AttributeError, LookupError, TypeError, AssertionError) as error:
        found[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---- what is shown


def cells(report: dict) -> list[list[str]]:
    """Scaling as a table: milliseconds forward / backward, and the share of linear scaling."""
    rows = [["GPUs", "tokens", "what", "forward ms", "backward ms", "of linear", "GiB a GPU"]]
    for run_ in report["runs"]:
        for point in run_["scaling"]:
            alone = point["milliseconds"].get(ONE_GPU)
            for name, times in point["milliseconds"].items():
                forward_ms, backward_ms = (statistics.median(times[phase]) for phase in ("forward", "backward"))
                share = ""
                if alone and name != ONE_GPU:
                    one = sum(statistics.median(alone[phase]) for phase in ("forward", "backward"))
                    share = f"{one / run_['gpus'] / (forward_ms + backward_ms):.0%}"
                memory = [x.get(f"{point['tokens']} {name}", 0) for x in run_["memory"]]
                gib = f"{max(memory) / 2**30:.1f}" if any(memory) else ""
                rows.append(
                    [str(run_["gpus"]), str(point["tokens"]), name, f"{forward_ms:.2f}", f"{backward_ms:.2f}", share, gib]
                )
            rows += [[str(run_["gpus"]), str(point["tokens"]), name, why, "", "", ""] for name, why in point["failed"].items()]
    return rows


def wrong(report: dict) -> list[str]:
    """What was not right, in words."""
    return [
        f"{run_['gpus']} GPUs, {one['method']}, {one['layout']}, {one['mask']}: {one['errors']}"
        for run_ in report["runs"]
        for one in run_["right"]
        if not one.get("right", True)
    ]


def draw(report: dict, path: Path) -> Path:
    """Draw the share of linear scaling, and the measured timelines of the largest run."""
    last = report["runs"][-1]
    timelines = {f"{m}, {last['gpus']} GPUs": m for m in ("ring", "allgather") if any(x.get(m) for x in last["timelines"])}
    rows = 1 + len(timelines)
    figure, panels = plt.subplots(rows, 1, figsize=(12, 0.5 + 3 * rows), squeeze=False, layout="constrained")
    bars: dict[str, list[tuple[str, float]]] = {}
    for row in cells(report)[1:]:
        if row[5]:
            bars.setdefault(row[2], []).append((f"{row[0]} GPUs, {int(row[1]) // 1024}k", float(row[5].rstrip("%"))))
    labels = list(dict.fromkeys(label for values in bars.values() for label, _ in values))
    for number, (name, values) in enumerate(bars.items()):
        own = name in report["settings"]["methods"]
        places = [labels.index(label) + 0.8 * number / max(1, len(bars)) for label, _ in values]
        color = STROBE if own else PEERS[number % len(PEERS)]
        width, shade = 0.8 / max(1, len(bars)), 0.9 if own else 0.6
        panels[0, 0].bar(places, [y for _, y in values], width=0.9 * width, label=name, color=color, alpha=shade)
    panels[0, 0].set_xticks([x + 0.4 for x in range(len(labels))], labels, fontsize=8)
    panels[0, 0].set_ylabel("% of linear")
    panels[0, 0].legend(fontsize=7, ncols=3, frameon=False)
    for panel, (title, method) in zip(panels[1:, 0], timelines.items(), strict=True):
        spans = [
            schedule.Span(rank, kind, what, start / 1e3, end / 1e3)
            for rank, found in enumerate(last["timelines"])
            for kind, what, start, end in found.get(method, [])
        ]
        schedule.timeline(panel, f"{title}, forward and backward, measured", schedule.Run(spans), most=8)
    return save(figure, path, dpi=110)
