"""Runs our attention kernels in the simulator: the same kernels and argument builders as on a GPU, tensors on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton.language as tl

from strobe.device import KNOWN
from strobe.kernels.blind_rows import fill_blind
from strobe.kernels.common import cluster, dependent_launch, exp2, flags, named_barrier, packed_halves, prefetch
from strobe.kernels.common.call import Buffers, Tensors, gradients
from strobe.kernels.common.documents import SPAN
from strobe.kernels.gluon import gl
from strobe.kernels.sm80 import config as sm80_config
from strobe.kernels.sm80 import forward as sm80_forward
from strobe.kernels.sm80 import launch as sm80_launch
from strobe.kernels.sm90 import (
    backward,
    backward_config,
    backward_dq,
    backward_short,
    backward_short_launch,
    backward_split,
    fp8_launch,
    fp8_transpose,
    short,
    short_config,
    short_launch,
    tile_list,
)
from strobe.kernels.sm90 import backward_launch as sm90_backward_launch
from strobe.kernels.sm90 import config as sm90_config
from strobe.kernels.sm90 import forward as sm90_forward
from strobe.kernels.sm90 import launch as sm90_launch
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig
from strobe.kernels.sm100 import config as sm100_config
from strobe.kernels.sm100 import forward as sm100_forward
from strobe.kernels.sm100 import launch as sm100_launch
from strobe.problem import AttentionProblem, Gradients, Operands, Upstream
from strobe.sim import clusters, registers
from strobe.sim.barriers import named_arrive, named_sync
from strobe.sim.costs import Costs
from strobe.sim.global_memory import await_flag
from strobe.sim.launch import Launch, simulate
from strobe.sim.lift import register
from strobe.sim.machine import Report
from strobe.sim.tensor import Tensor, compute
from strobe.sim.units.control import fence_async_global, launch_dependents, take_turn
from strobe.sim.units.tma import await_additions, raise_flag

BACKENDS = {
    "sm80": (sm80_forward, lambda problem: sm80_config.choose(problem, KNOWN["A100"]), 80),
    "sm90": (sm90_forward, sm90_config.choose, 90),
    "sm90 short": (short, short_config.choose, 90),
    "sm100": (sm100_forward, sm100_config.choose, 100),
}


def _exchange(x: Tensor, top: Tensor, total: Tensor, ctas: int, posts: bool) -> tuple[Tensor, ...]:
    """Model of `cluster.exchange`."""
    for tensor in (x, top, total):
        tensor.check_ready()
    of_rows = (of_row.data[:, None].expand(x.data.shape) for of_row in (top, total))
    return tuple(Tensor(found) for found in clusters.all_to_all(ctas, x.data, *of_rows))


register(named_barrier.meet, partial(named_sync, threads=256))
register(named_barrier.announce, partial(named_arrive, threads=256))
register(dependent_launch.let_next_begin, launch_dependents)
register(dependent_launch.take_turn, take_turn)
register(cluster.read_arguments, lambda *_: None)
register(dependent_launch.take_program_turn, take_turn)
register(dependent_launch.take_last_turn, take_turn)
register(prefetch.prefetch, lambda pointer, size: None)
register(flags.await_flag, await_flag)
register(flags.await_additions, await_additions)
register(flags.raise_flag, raise_flag)
register(flags.fence_async_global, fence_async_global)
register(exp2.exp2_flushed, registers.exp2)
register(cluster.begin_cluster, lambda ctas, *_: clusters.begin(ctas))
register(cluster.exchange, _exchange)
register(packed_halves.rounded, lambda x, dtype: x.to(dtype))
register(packed_halves.widened, lambda x: x.to(tl.float32))
register(packed_halves.widened_8_bits, lambda x, dtype: x.to(dtype))
register(packed_halves.unpacked, lambda pairs, KIND: _unpacked(pairs, KIND))


def _unpacked(pairs: Tensor, kind) -> tuple[Tensor, Tensor]:
    """Model of `packed_halves.unpacked`."""
    float8 = torch.float8_e4m3fn if kind == gl.float8e4nv else torch.float8_e5m2

    def number(place: int) -> Tensor:
        return compute("alu", lambda data: data.contiguous()[..., None].view(float8)[..., place].half(), pairs)

    return number(0), number(1)


def _packed(p: Tensor, C) -> Tensor:
    """Model of `fp8.packed`: four e4m3 numbers in each int32."""
    rows, keys = p.shape
    x = p.to(gl.float8e4nv).reshape([rows, keys // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4)
    return compute("free", lambda data: data.reshape(rows, keys // 16, 4, 4).contiguous().view(torch.int32).squeeze(-1), x)


def _add_rounded(sums: Tensor, p: Tensor) -> Tensor:
    """Model of `fp8.add_rounded`: the sums of rows plus the rounded weights of a block."""

    def add(s, packed):
        weights = packed.contiguous().view(torch.float8_e4m3fn).view(*packed.shape, 4).float()
        return s + weights.sum((1, 3))

    return compute("fma", add, sums, p, layout=sums.layout)


def _register_assembly(kernels: ModuleType) -> None:
    """Register models of what `strobe.kernels.sm90.fp8`, or a copy of it, does by assembly."""
    register(kernels.packed, _packed)
    register(kernels.add_rounded, _add_rounded)
    register(kernels.from_now, lambda p: p)
    register(kernels.scaled, lambda x, factor: x * factor[:, None])


def _words_of(x: Tensor) -> Tensor:
    """Model of `fp8_transpose.words_of`."""
    keys, columns = x.shape

    def words(data: torch.Tensor) -> torch.Tensor:
        of_lanes = data.view(torch.uint8).reshape(keys // 16, 2, 4, 2, columns).permute(0, 2, 4, 1, 3)
        return of_lanes.contiguous().reshape(keys // 4, columns, 4).view(torch.int32).squeeze(-1)

    return compute("free", words, x)


class Forward(NamedTuple):
    """Results of a forward: out, lse and notes as the backend's `launch` gives them, and what the simulation saw.

    notes: None, or non-zero where rows hold a NaN or an infinity. With a Config that has splits, out and lse are float32, with
    the splits in front.
    """

    out: torch.Tensor
    lse: torch.Tensor
    notes: torch.Tensor | None
    report: Report


def simulate_forward(
    problem: AttentionProblem, operands: Operands, backend: str = "sm90", config=None, order: str = "in_order", seed: int = 0,
    ctas: int = 1, costs: Costs | None = None,
) -> Forward:  # fmt: skip
    """Simulate the forward kernel of a backend over operands on the CPU.

    config: the backend's Config; None: what it chooses. order, seed: see `strobe.sim.machine`. ctas: how many CTAs share the
    tiles if the kernel is persistent, so that one computes several; other kernels have a CTA for each tile. costs: the costs of
    a timed run; None means the arch's own. ValueError for another backend or an empty problem; a SimulationError for a mistake
    in the kernel.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    kernels, choose, arch = BACKENDS[backend]
    launch, out, lse, notes = forward_launch(kernels, arch, problem, operands, config or choose(problem), ctas)
    return Forward(out, lse, notes, launch.simulate(order, seed, costs))


def forward_launch(
    kernels: ModuleType, arch: int, problem: AttentionProblem, operands: Operands, config, ctas: int = 1
) -> tuple[Launch, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The launch of a module's `forward_kernel`, and what it fills: out, lse (both NaN until then) and notes."""
    if 0 in (*operands.q.shape, *operands.k.shape):
        raise ValueError(f"no kernel runs for q {list(operands.q.shape)} and k {list(operands.k.shape)}: one is empty")
    few = isinstance(config, short_config.ShortConfig)
    host = short_launch if few else {80: sm80_launch, 90: sm90_launch, 100: sm100_launch}[arch]
    buffers = sm100_launch.buffers(problem, config) if arch == 100 else host.buffers(problem)
    tensors = Tensors(**operands._asdict(), **unwritten(buffers))
    if arch == 90:
        _prepare(problem, operands, tensors, config.tile_q)
    if arch == 80 and buffers.made["out"].fill is not None:  # as before a call
        tensors.out.zero_()
        tensors.lse.fill_(-torch.inf)
    if operands.document_q is not None and operands.document_kv is not None:
        tensors.row_spans = spans_of(operands.document_q, operands.document_kv)
    call = host.forward_call(problem, tensors, _ARCHS[arch], config)
    grid = (min(ctas, *call.grid),) if getattr(config, "persistent", False) else call.grid
    rewritable = ("out", "lse") if arch == 80 else ("notes", "counters")  # a tile may be computed again
    launch = Launch(getattr(kernels, call.kernel.__name__), grid, call.arguments, call.keywords, arch, rewritable)
    split = getattr(config, "splits", 1) > 1
    out, lse = (tensors.out_parts, tensors.lse_parts) if split else (tensors.out, tensors.lse)
    return launch, out, lse, tensors.notes


def _prepare(problem: AttentionProblem, operands: Operands, tensors: Tensors, tile_q: int) -> None:
    """What is done ahead of Hopper's forward: rows that no tile writes are filled, and tiles of packed sequences listed."""
    if problem.varlen or sm90_launch.has_blind_tiles(problem):
        longest = problem.lengths.seqlen_q
        fill_blind(tensors.out, tensors.lse, longest, operands.sinks, operands.cu_seqlens_q, operands.seqused_q)
    if problem.varlen:
        tensors.tiles_listed = tiles_listed(problem, operands, tile_q)


_ARCHS = {80: KNOWN["A100"], 90: replace(KNOWN["H100"], sms=0), 100: replace(KNOWN["B200"], sms=0)}
"""GPUs of which a launch takes as many multiprocessors as it has tiles."""


def unwritten(buffers: Buffers) -> dict[str, torch.Tensor]:
    """The tensors that a kernel is to write, NaN until then or, of integers, the least number; notes and counters are 0."""
    made = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in {**buffers.made, **buffers.shared}.items()}
    for x in made.values():
        x.view(torch.uint8).fill_(0x7F) if x.dtype.itemsize == 1 else x.fill_(torch.nan if x.is_floating_point() else 0)
    notes = {name: torch.zeros(number, dtype=torch.int32) for name, number in (buffers.notes or {}).items()}
    return {**made, **notes, "counters": torch.zeros(16, dtype=torch.int32)}


def spans_of(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The spans that `kernels.common.documents.spans_kernel` finds, in plain torch."""
    parts = ids.split(SPAN.value, 1)
    least, most = (torch.stack([extreme(part, 1) for part in parts], 1) for extreme in (torch.amin, torch.amax))
    seen = (others[:, None] >= least[..., None]) & (others[:, None] <= most[..., None])
    place = torch.arange(others.shape[1])
    begin, end = torch.where(seen, place, others.shape[1]).amin(2), torch.where(seen, place + 1, 0).amax(2)
    whole = (least == most) & (seen.sum(2) == end - begin)
    return torch.stack([begin, end, whole], 2).to(torch.int32)


def tiles_listed(problem: AttentionProblem, operands: Operands, tile_q: int) -> torch.Tensor:
    """The list that `kernels.sm90.tile_list.list_tiles` makes, in plain Python."""
    (starts_q, rows), (starts_kv, keys) = clamped_sequences(problem, operands)
    longest_first = sorted(range(problem.lengths.batch), key=lambda b: (rows[b] + tile_q - 1) // tile_q, reverse=True)
    tiles = [
        (b, row, starts_q[b], rows[b], starts_kv[b], keys[b], 0, 0)
        for b in longest_first
        for row in reversed(range(0, rows[b], tile_q))
    ]
    nothing = (0,) * 8  # there is room for a tile, of which a kernel without any reads what stands there
    return torch.tensor([(len(tiles), *[0] * 7), *(tiles or [nothing])], dtype=torch.int32)


def clamped_sequences(problem: AttentionProblem, operands: Operands) -> list[tuple[list[int], list[int]]]:
    """First rows and lengths of packed sequences, of queries and of keys, clamped as kernels do."""
    lengths = problem.lengths
    return [
        _clamped(operands.cu_seqlens_q, operands.seqused_q, lengths.seqlen_q, operands.q.shape[0]),
        _clamped(operands.cu_seqlens_kv, operands.seqused_kv, lengths.seqlen_kv, operands.k.shape[0]),
    ]


def _clamped(bounds: torch.Tensor | None, used: torch.Tensor | None, longest: int, total: int) -> tuple[list[int], list[int]]:
    assert bounds is not None
    ends = bounds.long().clamp(0, total)
    lengths = ends.diff().clamp(0, longest)
    return ends[:-1].tolist(), (lengths if used is None else lengths.minimum(used.long().clamp(min=0))).tolist()


def fp8_launches(
    kernels: ModuleType, problem: AttentionProblem, operands: Operands, ctas: int = 1, transposing: ModuleType = fp8_transpose
) -> tuple[Launch, Launch, torch.Tensor, torch.Tensor]:
    """The launch of a module that transposes V, that of a module's `fp8_kernel`, and what the second fills: out and lse, NaN
    before. ctas: how many share the tiles, and V."""
    _register_assembly(kernels)
    register(transposing.words_of, _words_of)
    config = kernels.config(problem)
    tensors = Tensors(**operands._asdict(), **unwritten(fp8_launch.buffers(problem, config)))
    _prepare(problem, operands, tensors, config.tile_q)
    first = fp8_launch.transpose_call(problem, tensors, _ARCHS[90], config)
    grid = (min(ctas, *first.grid),) if fp8_launch.is_beside(problem) else first.grid
    attending = fp8_launch.forward_call(problem, tensors, _ARCHS[90], config)
    launches = (
        Launch(getattr(transposing, first.kernel.__name__), grid, _by_bytes(tensors, first.arguments), first.keywords, 90),
        Launch(
            kernels.fp8_kernel, (min(ctas, *attending.grid),), attending.arguments, attending.keywords, 90, ("counters",)
        ),
    )  # fmt: skip
    return *launches, tensors.out, tensors.lse


def _by_bytes(tensors: Tensors, arguments: tuple) -> list[Any]:
    """The arguments of a launch that casts the pointers to V and V^T, which the simulator does not."""
    cast = {id(tensors.v): tensors.v.view(torch.uint8), id(tensors.v_t): tensors.v_t.view(torch.int32)}
    return [cast.get(id(x), x) for x in arguments]


def backward_launches(
    kernels: ModuleType,
    problem: AttentionProblem,
    tensors: Tensors,
    config: Config | SplitConfig,
    ctas: int = 1,
    dq_kernels: ModuleType = backward_dq,
    resident: int = 1,
) -> list[Launch]:
    """The launches over tiles of scores, of a module's kernels and, where dS is stored, of `dq_kernels`, on tensors that
    `sm90.backward_pre_post.prepare` has filled. dQ of one pass is added to the accumulator, from where `convert` fetches it.
    ctas, resident: how many share the blocks of one pass, and run at a time."""
    launches = []
    for call in sm90_backward_launch.main_calls(problem, tensors, _ARCHS[90], config):
        name = call.kernel.__name__
        kernel = getattr(dq_kernels if name == "dq_kernel" else kernels, name)
        grid = (min(ctas, *call.grid),) if name == "backward_kernel" else call.grid
        ordered = ("dq_wide",) if isinstance(config, Config) and config.order else ()
        launches.append(
            Launch(kernel, grid, call.arguments, call.keywords, 90, ("notes", "counters"), resident=resident, ordered=ordered)
        )
    return launches


class Backward(NamedTuple):
    """What the launches of a Hopper backward leave, but for that which redoes blocks with notes.

    grads: a bias has that of every pair, sinks have none. report: of the first launch over tiles of scores."""

    grads: Gradients
    tensors: Tensors
    report: Report


def simulate_backward(
    problem: AttentionProblem, operands: Operands, upstream: Upstream,
    config: Config | SplitConfig | ShortBackwardConfig | None = None, order: str = "in_order", seed: int = 0, ctas: int = 1,
    kernels: ModuleType | None = None, dq_kernels: ModuleType | None = None, resident: int = 1,
) -> Backward:  # fmt: skip
    """Simulate the launches of a Hopper backward, one after the other as in a stream. config: None means what the backend
    chooses for any number of keys. order, seed, ctas: see `simulate_forward`; with few keys, of each config.ctas. kernels,
    dq_kernels, resident: see `backward_launches`; None means the backend's own."""
    config = config or backward_config.choose(problem)
    if isinstance(config, ShortBackwardConfig):
        return _short_backward(problem, operands, upstream, config, order, seed, ctas, kernels or backward_short, resident)
    kernels = kernels or (backward if isinstance(config, Config) else backward_split)
    tensors, host, report = backward_tensors(problem, operands, upstream, config), sm90_backward_launch, None
    if host.is_listed(problem, config):
        call = tile_list.backward_list_call(problem, tensors)
        few = (call.grid[0], -(-4 // call.grid[0]))  # programs that share what there is
        report = simulate(call.kernel, few, **call.keywords)
    call = host.prepare_call(problem, tensors, config)
    report = simulate(call.kernel, call.grid, after=report, **call.keywords)
    reports = []
    for launch in backward_launches(kernels, problem, tensors, config, ctas, dq_kernels or backward_dq, resident):
        report = launch.simulate(order, seed, after=report)
        reports.append(report)
    if isinstance(config, Config) and not config.stored:
        call = host.convert_call(problem, tensors, config)
        simulate(call.kernel, call.grid, after=report, **call.keywords)
    return Backward(Gradients(tensors.dq, tensors.dk, tensors.dv, tensors.dbias), tensors, reports[0])


def _short_backward(
    problem: AttentionProblem, operands: Operands, upstream: Upstream, config: ShortBackwardConfig, order: str, seed: int,
    ctas: int, kernels: ModuleType, resident: int,
) -> Backward:  # fmt: skip
    """What the one launch of a backward to few keys leaves."""
    arch = replace(_ARCHS[90], sms=ctas)
    made = unwritten(backward_short_launch.buffers(problem, arch, config))
    tensors = Tensors(**operands._asdict(), **upstream._asdict(), **made)
    call = backward_short_launch.backward_call(problem, tensors, arch, config)
    kernel = getattr(kernels, call.kernel.__name__)
    launch = Launch(kernel, call.grid, call.arguments, call.keywords, 90, ("arrivals",), resident=resident)
    report = launch.simulate(order, seed)
    return Backward(Gradients(tensors.dq, tensors.dk, tensors.dv, None), tensors, report)


def backward_tensors(
    problem: AttentionProblem, operands: Operands, upstream: Upstream, config: Config | SplitConfig
) -> Tensors:
    """All tensors of a Hopper backward's launches, those to be written unwritten."""
    made = unwritten(sm90_backward_launch.buffers(problem, config)) | unfilled_gradients(problem)
    if sm90_backward_launch.is_listed(problem, config):  # that launch writes what the others leave
        for name in ("dq", "dk", "dv"):
            made[name].fill_(torch.nan)
    tensors = Tensors(**operands._asdict(), **upstream._asdict(), **made)
    if tensors.flags is not None:
        tensors.flags.fill_(7)  # of tiles that may exist
    if tensors.document_q is not None:
        tensors.key_spans = spans_of(tensors.document_kv, tensors.document_q)
        if tensors.row_spans is not None:
            tensors.row_spans = spans_of(tensors.document_q, tensors.document_kv)
    return tensors


def unfilled_gradients(problem: AttentionProblem) -> dict[str, torch.Tensor]:
    """dq, dk, dv, dbias to be filled: NaN, or 0 if kernels leave what is not used alone; that of a bias is 0, as kernels add to
    it or write only what somebody sees."""
    found = {}
    for name, (shape, dtype, _) in gradients(problem).items():
        found[name] = torch.full(shape, 0.0 if problem.seqused or name == "dbias" else torch.nan, dtype=dtype)
    return found
