"""The Hopper backward for calls that look the same: its launches, prepared."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from strobe.kernels import workspace
from strobe.kernels.common.call import Call
from strobe.kernels.launcher import Call as CompiledCall
from strobe.kernels.launcher import Launch, compiled_call, maker, prepare
from strobe.kernels.sm90 import backward_launch
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.problem import AttentionProblem, Gradients, Operands, summed_bias, zero_bias
from strobe.recent import Made
from strobe.scores import sinks_gradient


class Place(NamedTuple):
    """What calls on one stream need. space: the addresses of the workspace's counters, of its notes, of those of rows, and,
    where there are documents, of the spans. kept: what these are of."""

    launch: Launch
    lock: threading.Lock
    space: tuple[int, ...]
    kept: tuple[torch.Tensor, ...]


class BackwardPlan:
    """`run` is a BackwardPlan of `strobe.eager`."""

    def __init__(
        self, problem: AttentionProblem, operands: Operands, tensors: tuple[Any, ...], config: Config | SplitConfig,
        empty: Callable[[torch.Tensor], torch.Tensor],
    ):  # fmt: skip
        """empty: makes a gradient like its tensor, contiguous."""
        out, lse, dout, dlse = tensors[3:7]
        self._device = operands.q.device
        keys, rows = backward_launch.number_of_notes(problem)
        self._keys, self._notes = keys, keys + rows
        self._places: Made[int, Place] = Made(64, self._place)
        self._empty = empty
        space = backward_launch.buffers(problem, config, self._device, workspace.workspace(self._device, self._notes))
        self._new_shared = [maker(x) for x in (space.statistics, space.delta, space.accumulator) if x is not None]
        self._new_spans = [maker(x) for x in (space.key_spans, space.row_spans) if x is not None]
        bias = problem.score.bias if "bias" in problem.learned else None
        dbias = None if bias is None else zero_bias(problem, bias)
        self._new_bias = None if dbias is None else maker(dbias)
        self._learns_sinks = "sinks" in problem.learned
        q, k, v = operands[:3]
        gradients = Gradients(empty(q), empty(k), empty(v), dbias)
        calls = backward_launch.calls(problem, operands, out, lse, dout, dlse, gradients, space, config)
        given = [x for x in (*tensors, *gradients, *space) if x is not None]
        with ThreadPoolExecutor(len(calls)) as pool:  # a first call waits for the longest compilation, not for all
            compiled = list(pool.map(self._compiled, calls))
        self._prepared = prepare(compiled, given)

    def run(self, stream: int, addresses: tuple[int, ...], tensors: tuple[Any, ...]) -> Gradients:
        capturing = stream and torch._C._cuda_isCurrentStreamCapturing()  # see `ForwardPlan.run`
        place = self._place(stream) if capturing else self._places[stream]
        dq, dk, dv = [self._empty(x) for x in tensors[:3]]
        dbias = None if self._new_bias is None else self._new_bias().zero_()
        shared = [new() for new in self._new_shared]
        made = [x.data_ptr() for x in (dq, dk, dv, dbias, *shared) if x is not None]
        place.lock.acquire()  # half the time of `with`
        try:
            place.launch((*addresses, *made, *place.space))
        finally:
            place.lock.release()
        *_others, bias, sinks, _seed = tensors
        dsinks = None
        if self._learns_sinks:
            _statistics, delta, *_accumulator = shared
            dsinks = sinks_gradient(sinks, tensors[4], delta)
        return Gradients(dq, dk, dv, dbias if dbias is None else summed_bias(dbias, bias), dsinks)

    def _compiled(self, call: Call) -> CompiledCall:
        with torch.cuda.device(self._device):
            return compiled_call(call.kernel, call.grid, *call.arguments, **call.keywords)

    def _place(self, stream: int) -> Place:
        counters, notes = workspace.workspace(self._device, self._notes)
        spans = [new() for new in self._new_spans]
        space = counters, notes, notes[self._keys :], *spans
        launch, lock = self._prepared.on(stream), workspace.lock(self._device)
        return Place(launch, lock, tuple(x.data_ptr() for x in space), space)
