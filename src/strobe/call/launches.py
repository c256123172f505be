"""Runs the launches that a backend lists for a problem: at once, or prepared for later calls that look the same.

A backend names its tensors and lists its launches once (see `strobe.kernels.common.call`). Both ways use the same list.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import torch

from strobe.call import counters, precompiled, torch_internals
from strobe.call.tables import Memo
from strobe.call.triton_internals import stable_keys
from strobe.device import Arch, arch_of
from strobe.kernels import workspace
from strobe.kernels.blind_rows import fill_blind
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, launch_in_clusters
from strobe.problem import (
    AttentionProblem,
    Gradients,
    Operands,
    Upstream,
    addressable,
    lse_shape_of,
    made_addressable,
    summed_bias,
)
from strobe.scores import sinks_gradient
from strobe.serving.problem import DecodeOperands, DecodeProblem

# ---- at once


def forward(
    backend: ModuleType, problem: AttentionProblem | DecodeProblem, operands: Operands | DecodeOperands
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a problem, computed by a backend's launches."""
    if problem.is_empty:
        return _without_pairs(problem, operands)
    tensors = run(backend, problem, operands._asdict(), arch_of(operands.q.device))
    return tensors.out, tensors.lse


def backward(backend: ModuleType, problem: AttentionProblem, operands: Operands, upstream: Upstream) -> Gradients:
    """The gradients of a problem, computed by a backend's launches."""
    if problem.is_empty:
        return _gradients_without_pairs(problem, operands, upstream)
    # Kernels write delta where the LSE's strides say, into a tensor of its own: of a view they would write beyond its end.
    upstream = upstream._replace(dout=made_addressable(upstream.dout), lse=upstream.lse.contiguous())
    given = {**operands._asdict(), **upstream._asdict()}
    tensors = run(backend, problem, given, arch_of(operands.q.device))
    return _gradients(problem, operands, upstream.lse, vars(tensors))


def run(backend: ModuleType, problem: AttentionProblem | DecodeProblem, given: dict[str, Any], arch: Arch) -> Tensors:
    """Make the launches of a call on the current stream of its device. given: the call's tensors, by name. Returns them and all
    that the launches needed beside them, results included."""
    precompiled.wait()
    stable_keys()
    with torch.cuda.device_of(given["q"]), workspace.lock(given["q"].device):
        tensors = allocated(backend.buffers(problem, arch), given)
        for call in backend.calls(problem, tensors, arch):
            call.launch()
    return tensors


def allocated(buffers: Buffers, given: dict[str, Any]) -> Tensors:
    """All tensors of a call's launches: the given ones, and new ones for the buffers, on the same device."""
    device = given["q"].device
    others = {name: _filled(buffer, device) for name, buffer in {**buffers.made, **buffers.shared}.items()}
    given = {name: x for name, x in given.items() if x is not None}
    tensors = Tensors(**given, **others, **_workspace(buffers, device))
    if buffers.fill is not None:
        buffers.fill(tensors)
    return tensors


def _filled(buffer: Buffer, device: torch.device) -> torch.Tensor:
    if buffer.dtype == torch.int32 and buffer.fill == 0.0:
        return counters.zeros(device, buffer.shape[0])
    made = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return made if buffer.fill is None else made.fill_(buffer.fill)


def _workspace(buffers: Buffers, device: torch.device) -> dict[str, torch.Tensor]:
    """The counters and the notes that belong to the current stream, by the names under which kernels take them."""
    if buffers.notes is None:
        return {}
    aligned = workspace.ALIGNED
    sizes = [number + -number % aligned for number in buffers.notes.values()]
    shared, notes = _shared_space(device, sum(sizes))
    parts = zip(buffers.notes.items(), notes.split(sizes), strict=True)
    named = {name: part[:number] for (name, number), part in parts}
    return {"counters": shared, "redone": shared[aligned : aligned + 1], **named}


def _shared_space(device: torch.device, notes: int) -> workspace.Workspace:
    """The workspace of the current stream, or of what is being captured there."""
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return workspace.cut(counters.of_capture(device, workspace.COUNTERS + notes, "notes"), notes)
        counters.make_reserve(device)
    return workspace.workspace(device, notes)


def _gradients(problem: AttentionProblem, operands: Operands, lse: torch.Tensor, made: dict[str, Any]) -> Gradients:
    """The gradients that a backward returns, from the tensors that its launches made."""
    dbias, dsinks = made.get("dbias"), None
    if dbias is not None:
        assert operands.bias is not None
        dbias = summed_bias(dbias, operands.bias)
    if operands.sinks is not None and "sinks" in problem.learned:
        dsinks = sinks_gradient(operands.sinks, lse, made["delta"])
    return Gradients(made["dq"], made["dk"], made["dv"], dbias, dsinks)


def _without_pairs(
    problem: AttentionProblem | DecodeProblem, operands: Operands | DecodeOperands
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a problem without keys, or without queries: zeros, and an LSE of -inf or, in a row that is used, its
    sink."""
    q, used_q = operands.q, operands.seqused_q if isinstance(operands, Operands) else None
    out = None if isinstance(operands, Operands) else operands.out
    if out is None:
        out = torch.empty(problem.out_shape, dtype=problem.out_dtype, device=q.device)
    lse = torch.empty(lse_shape_of(problem.lengths, problem.heads_q), dtype=torch.float32, device=q.device)
    fill_blind(out, lse, problem.lengths.seqlen_q, operands.sinks, operands.cu_seqlens_q, used_q)
    return out, lse


def _gradients_without_pairs(problem: AttentionProblem, operands: Operands, upstream: Upstream) -> Gradients:
    """The gradients of a problem without keys or queries: zeros, but not those of sinks, because the LSE of
    a row that sees nothing is its sink."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=problem.grad_dtype, device=x.device) for x in operands[:3])
    made = {"dq": dq, "dk": dk, "dv": dv}
    if operands.bias is not None and "bias" in problem.learned:
        made["dbias"] = torch.zeros_like(operands.bias, memory_format=torch.contiguous_format)
    made["delta"] = torch.zeros_like(upstream.lse) if upstream.dlse is None else -upstream.dlse
    return _gradients(problem, operands, upstream.lse, made)


# ---- prepared


class _Place(NamedTuple):
    """What calls on one stream need. owned: tensors that must stay alive as long as the place is used."""

    launch: Callable[[tuple[int, ...]], None]
    lock: threading.Lock
    scratch: int
    """The address where the kernels write an LSE that nobody wants."""
    space: tuple[int, ...]
    """The addresses of what a call ahead tells, and of the tensors that the calls of the stream share."""
    owned: tuple[Any, ...]


class Ahead(NamedTuple):
    """A call that is launched ahead of a backend's. tensors: what it is given, whose addresses come ahead of the others. told:
    what it makes for the backend's, and no call returns."""

    call: Call
    tensors: list[torch.Tensor]
    told: list[torch.Tensor]

    def tells(self, x: torch.Tensor | None) -> bool:
        return any(x is one for one in self.told)


def prepared(
    backend: ModuleType,
    problem: AttentionProblem | DecodeProblem,
    operands: Operands | DecodeOperands,
    upstream: Upstream | None = None,
    ahead: Ahead | None = None,
) -> Prepared | None:
    """The prepared launches of calls whose tensors look like these. Each tensor must be an object of its own.

    None where nothing can be prepared: a backend that launches nothing, no driver of CUDA, an empty problem, or a gradient or
    an LSE that has to be copied first."""
    if not hasattr(backend, "calls") or not _has_driver(operands.q) or problem.is_empty:
        return None
    if upstream is not None and not (addressable(upstream.dout) and upstream.lse.is_contiguous()):
        return None
    return Prepared(backend, problem, operands, upstream, ahead)


def _has_driver(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None


class Inner(NamedTuple):
    """Tensors that no call returns, in one piece of memory, as each that PyTorch is asked for takes a microsecond. new() makes
    it; each of the tensors begins at an offset."""

    new: Callable[[], torch.Tensor]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Inner:
        from strobe.call.launcher import maker

        *offsets, nbytes = _laid_out(tensors)
        return cls(maker(torch.empty(nbytes, dtype=torch.uint8, device=tensors[0].device)), tuple(offsets))


def _laid_out(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where each of the tensors begins that share one piece of memory, and where that ends, in bytes."""
    return [0, *itertools.accumulate(-(-x.nbytes // _ALIGNED) * _ALIGNED for x in tensors)]


_ALIGNED = 512
"""Bytes of which PyTorch's allocator gives multiples."""


_asked_for: set[tuple] = set()
"""What `kind_of` says of the kernels that were compiled, or found, in this process."""


def kind_of(call: Call) -> tuple:
    """What calls of one compiled kernel have in common, but for the types and the alignment of what they are given."""
    parameters = getattr(call.kernel, "params", ())  # an interpreted kernel has none
    given = {**dict(zip((p.name for p in parameters), call.arguments, strict=False)), **call.keywords}
    return call.kernel, *(given.get(p.name) if p.is_constexpr else given.get(p.name) is None for p in parameters)


class Prepared:
    """A backend's launches for calls that look the same. Everything is known but the tensors' addresses."""

    def __init__(
        self,
        backend: ModuleType,
        problem: AttentionProblem | DecodeProblem,
        operands: Operands | DecodeOperands,
        upstream: Upstream | None,
        ahead: Ahead | None,
    ):
        from strobe.call.launcher import maker, prepare
        from strobe.call.triton_internals import hash_ahead

        precompiled.wait()
        hash_ahead()
        self._problem, self._device, self._index = problem, operands.q.device, operands.q.get_device()
        arch = arch_of(self._device)
        self._buffers = buffers = backend.buffers(problem, arch)
        given = {**operands._asdict(), **({} if upstream is None else upstream._asdict())}
        given = {name: x for name, x in given.items() if x is not None}
        made, shared = ({name: _filled(x, self._device) for name, x in of.items()} for of in (buffers.made, buffers.shared))
        space = _workspace(buffers, self._device)
        calls = backend.calls(problem, Tensors(**given, **made, **shared, **space), arch)
        self._names = tuple(made)
        self._of_qkv = self._names[:3] == ("dq", "dk", "dv") and not (isinstance(problem, AttentionProblem) and problem.learned)
        """Whether the first that is made are the gradients, and no other is asked for."""
        self._new = tuple(_maker(maker(x), buffers.made[name].fill) for name, x in made.items())
        self._inner = Inner.of([x for x in made.values()][3:]) if self._has_inner() else None
        # what later calls find as an earlier one left it
        kept = {name: x for name, x in shared.items() if buffers.shared[name].fill is not None}
        self._new_kept = tuple(functools.partial(_filled, buffers.shared[name], self._device) for name in kept)
        self._spare_lse = "lse" in made and buffers.made["lse"].fill is None and buffers.fill is None
        """Whether an LSE that nobody wants may be written to the scratch memory of the stream."""
        self._places: Memo[int, _Place] = Memo(64, self._place)
        before = operands if upstream is None else (*operands[:3], *upstream, *operands[3:])  # as addresses come
        told: list[torch.Tensor] = []
        if ahead is not None:
            calls, told = [ahead.call, *calls], ahead.told
            before = (*ahead.tensors, *[x for x in before if not ahead.tells(x)])
        passing = [x for name, x in shared.items() if name not in kept]
        spare = [made["lse"]] if self._spare_lse else []
        self._passing = _laid_out([*spare, *told, *passing])
        """Where in the scratch memory of a stream lies what its next call may overwrite, whatever that looks like. (There are
        calls of many looks, and parts of results take up to 300 MB.)"""
        beside = (*told, *passing, *kept.values(), *space.values())
        tensors = [x for x in (*before, *made.values(), *beside) if x is not None]
        # An H200, 4 queries of 64 heads on 8, what appending adds, microseconds (and if launches do not ask for all shared
        # memory): 1 request of 8k keys 2.3 (5.2), 8 of 1k 2.8 (5.3), 32 of 1k 3.3 (3.8). Other problems' launches gain nothing:
        # a forward and its backward take as long, or up to 2 percent longer.
        of_step = isinstance(problem, DecodeProblem)
        self._launches = prepare(self._all_compiled(calls), tensors, all_shared=of_step)

    def forward(
        self, stream: int, wants_lse: bool, addresses: Sequence[int], tensors: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch a forward and return out and lse; None instead of lse where that saves its memory and nobody wants it.

        stream: handle of the current device's current stream. tensors: in the order of `Operands`, of which the last ones
        may be left out. addresses: those of the tensors that are not None."""
        place = self._place_of(stream) if stream else self._places[stream]
        new = self._new
        out, lse, at_lse = new[0](), None, place.scratch
        if wants_lse or not self._spare_lse:
            lse = new[1]()
            at_lse = lse.data_ptr()
        others = [one() for one in new[2:]] if len(new) > 2 else ()
        if self._buffers.fill is not None:
            self._buffers.fill(Tensors(**Operands(*tensors)._asdict(), out=out, lse=lse))
        beside = [x.data_ptr() for x in others] if others else ()
        place.lock.acquire()  # takes half the time of `with`
        try:
            place.launch((*addresses, out.data_ptr(), at_lse, *beside, *place.space))
        finally:
            place.lock.release()
        return out, lse

    def decode(self, stream: int, addresses: Sequence[int]) -> torch.Tensor | None:
        """Launch attention over a cache, which writes the `out` that it is given, and return the LSE, or None where the problem
        has none.

        stream: handle of the current device's current stream. addresses: those of `DecodeOperands` that are not None."""
        place = self._place_of(stream) if stream else self._places[stream]
        made = [new() for new in self._new] if self._new else ()
        if made:
            addresses = (*addresses, *[x.data_ptr() for x in made])
        place.lock.acquire()
        try:
            place.launch((*addresses, *place.space))
        finally:
            place.lock.release()
        return made[0] if made else None

    def backward(self, stream: int, addresses: Sequence[int], tensors: tuple[Any, ...]) -> Gradients:
        """Launch a backward and return the gradients.

        stream: handle of the current device's current stream. tensors: q, k, v, those of `Upstream`, the others of `Operands`,
        of which the last ones may be left out. addresses: those of the tensors that are not None."""
        place, inner = self._place_of(stream), self._inner
        made = [new() for new in (self._new if inner is None else self._new[:3])]
        places = [x.data_ptr() for x in made]
        if inner is not None:
            memory = inner.new()
            begin = memory.data_ptr()
            places += [begin + offset for offset in inner.offsets]
        place.lock.acquire()
        try:
            place.launch((*addresses, *places, *place.space))
        finally:
            place.lock.release()
        if self._of_qkv:
            return Gradients(*made[:3])
        q, k, v, _out, lse, _dout, _dlse, *others = tensors
        assert isinstance(self._problem, AttentionProblem)
        return _gradients(self._problem, Operands(q, k, v, *others), lse, dict(zip(self._names, made, strict=True)))

    def _has_inner(self) -> bool:
        """Whether this is a backward that returns the first three tensors it makes, and fills no other."""
        others = [self._buffers.made[name] for name in self._names[3:]]
        return self._of_qkv and len(others) > 1 and all(buffer.fill is None for buffer in others)

    def _place_of(self, stream: int) -> _Place:
        # A graph has a place of its own. (The default stream, 0, cannot be captured, and to ask takes half a microsecond.)
        if stream and torch_internals.is_capturing():
            return self._place(stream)
        return self._places[stream]

    def _place(self, stream: int) -> _Place:
        """Make the place of the current stream. That takes longer than the launches, so places are kept."""
        kept = [*(new() for new in self._new_kept), *_workspace(self._buffers, self._device).values()]
        *offsets, nbytes = self._passing
        scratch = workspace.scratch(self._device, nbytes // 4) if nbytes else None
        begin = 0 if scratch is None else scratch.data_ptr()
        launch, lock = self._launches.on(stream), workspace.lock(self._device)
        passing = [begin + offset for offset in offsets[self._spare_lse :]]
        return _Place(launch, lock, begin, (*passing, *[x.data_ptr() for x in kept]), (*kept, scratch))

    def _all_compiled(self, calls: list[Call]) -> list[Any]:
        """The compiled calls. Kernels that this process has not asked for yet are compiled at once, so that a first call waits
        for the longest compilation alone. (To start threads takes longer than to find kernels that are there.)"""
        new = {kind: call for call in calls if (kind := kind_of(call)) not in _asked_for}
        if len(new) > 1:
            with ThreadPoolExecutor(len(new)) as pool:
                list(pool.map(self._compiled, new.values()))
        _asked_for.update(new)
        return [self._compiled(call) for call in calls]

    def _compiled(self, call: Call) -> Any:
        from strobe.call.launcher import compiled_call

        with torch.cuda.device(self._index):  # -1 where there is no GPU: does nothing
            made = compiled_call(call.kernel, call.grid, *call.arguments, **call.keywords)
        if call.cluster > 1:
            launch_in_clusters(made.compiled, call.cluster)
        return made


class PreparedCall:
    """One launch for calls that look the same, which shares nothing with other launches. Everything is known but the tensors'
    addresses."""

    def __init__(self, call: Call, tensors: list[torch.Tensor]):
        from strobe.call.launcher import compiled_call, prepare

        made = compiled_call(call.kernel, call.grid, *call.arguments, **call.keywords)
        self._launches = prepare([made], tensors, all_shared=True)
        self._on: Memo[int, tuple[Callable[[tuple[int, ...]], None], threading.Lock]] = Memo(64, self._place)

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Launch on the current device's current stream, whose handle is `stream`. addresses: those of the tensors that it was
        prepared with, in their order."""
        launch, lock = self._on[stream]
        with lock:
            launch(addresses)

    def _place(self, stream: int) -> tuple[Callable[[tuple[int, ...]], None], threading.Lock]:
        return self._launches.on(stream), threading.Lock()


def prepared_call(call: Call, tensors: list[torch.Tensor]) -> PreparedCall | None:
    """A call prepared for others whose tensors look like these, each of which is an object of its own; None without CUDA's
    driver."""
    return PreparedCall(call, tensors) if _has_driver(tensors[0]) else None


def _maker(new: Callable[[], torch.Tensor], fill: float | None) -> Callable[[], torch.Tensor]:
    """A function that makes a tensor as a call's launches need it: filled with `fill`, or uninitialised where that is None."""
    if fill is None:
        return new
    return functools.partial(_fill, new, fill)


def _fill(new: Callable[[], torch.Tensor], fill: float) -> torch.Tensor:
    return new().fill_(fill)
