"""The Hopper forward for calls that look the same: its two launches, prepared."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from strobe.kernels import workspace
from strobe.kernels.common.documents import new_spans, spans_call
from strobe.kernels.launcher import Launch, compiled_call, maker, prepare
from strobe.kernels.portable import forward as portable
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.kernels.sm90.forward import forward_kernel
from strobe.kernels.sm90.launch import fill_blind, has_blind_tiles, kernel_arguments, outputs_of
from strobe.problem import AttentionProblem, Operands
from strobe.recent import Made


class Place(NamedTuple):
    """What calls on one stream need, and what it must keep alive."""

    launch: Launch
    lock: threading.Lock
    scratch: int
    """The address where an LSE goes that nobody wants."""
    space: tuple[int, ...]
    """The addresses of the workspace's counters, of its notes, of the count of blocks redone, and where there are documents of
    the spans of rows."""
    kept: tuple[torch.Tensor, ...]


class ForwardPlan:
    """`run` is a Plan of `strobe.eager`."""

    def __init__(self, problem: AttentionProblem, operands: Operands, tensors: tuple[torch.Tensor | None, ...], config: Config):
        self._device = operands.q.device
        self._blind = has_blind_tiles(problem)
        self._notes = problem.lengths.batch * problem.heads_q * -(-problem.lengths.seqlen_q // ROWS_PER_GROUP)
        self._places: Made[int, Place] = Made(64, self._place)
        out, lse = outputs_of(problem, operands)
        self._new_out, self._new_lse, self._rows = maker(out), maker(lse), lse.numel()
        space = workspace.workspace(self._device, self._notes)
        redone, documents = space.counters[2:3], problem.mask.documents
        self._spans = None if documents is None else new_spans(documents.q)
        given = [x for x in (*tensors, out, lse, space.counters, space.notes, redone, self._spans) if x is not None]
        grid, arguments, constants = kernel_arguments(problem, operands, out, lse, space, config, self._spans)
        redo_grid, keywords = portable.redo_arguments(
            problem, operands, out, lse, space.notes, self._notes, redone, self._spans
        )

        def compile_redo():
            with torch.cuda.device(self._device):
                return compiled_call(portable._redo, redo_grid, **keywords)

        with ThreadPoolExecutor(1) as beside:  # a first call waits for the longer compilation, not for both
            redo = beside.submit(compile_redo)
            forward = compiled_call(forward_kernel, grid, *arguments, **constants)
            calls = [forward, redo.result()]
        if documents is not None and self._spans is not None:
            spans = spans_call(documents.q, documents.kv, self._spans)
            calls.insert(0, compiled_call(spans.kernel, spans.grid, *spans.arguments, **spans.keywords))
        self._prepared = prepare(calls, given)

    def run(
        self, stream: int, wants_lse: bool, addresses: tuple[int, ...], tensors: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # A graph has a place of its own. (The default stream, 0, cannot be captured, and to ask takes half a microsecond.)
        capturing = stream and torch._C._cuda_isCurrentStreamCapturing()
        place = self._place(stream) if capturing else self._places[stream]
        out, lse, lse_address = self._new_out(), None, place.scratch
        if wants_lse or self._blind:
            lse = self._new_lse()
            lse_address = lse.data_ptr()
            if self._blind:
                _q, _k, _v, cu_q, _cu_kv, used_q, *_others, sinks, _seed = tensors
                fill_blind(out, lse, sinks, cu_q, used_q)
        place.lock.acquire()  # half the time of `with`
        try:
            place.launch((*addresses, out.data_ptr(), lse_address, *place.space))
        finally:
            place.lock.release()
        return out, lse

    def _place(self, stream: int) -> Place:
        """The place of the current stream. Making one takes longer than the launches."""
        counters, notes = workspace.workspace(self._device, self._notes)
        scratch = workspace.scratch(self._device, self._rows)
        shared = [counters, notes, counters[2:3]]
        if self._spans is not None:
            shared.append(torch.empty_like(self._spans))
        launch, lock = self._prepared.on(stream), workspace.lock(self._device)
        return Place(launch, lock, scratch.data_ptr(), tuple(x.data_ptr() for x in shared), (*shared, scratch))
