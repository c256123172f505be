"""The portable kernels for calls that look the same: their launches, prepared."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from strobe.kernels.common.call import Call
from strobe.kernels.launcher import Call as CompiledCall
from strobe.kernels.launcher import Launch, compiled_call, maker, prepare
from strobe.kernels.portable import backward, forward
from strobe.problem import AttentionProblem, Gradients, Operands, lse_shape, summed_bias, zero_bias
from strobe.recent import Made
from strobe.scores import sinks_gradient


class Launches:
    """Calls in a row, to be made with other tensors, on any stream and by any thread."""

    def __init__(self, calls: Sequence[Call], tensors: Sequence[torch.Tensor]):
        def compiled(call: Call) -> CompiledCall:
            with torch.cuda.device_of(tensors[0]):
                return compiled_call(call.kernel, call.grid, *call.arguments, **call.keywords)

        with ThreadPoolExecutor(len(calls)) as pool:  # a first call waits for the longest compilation, not for all
            prepared = prepare(list(pool.map(compiled, calls)), tensors)
        self._of_stream: Made[int, tuple[Launch, threading.Lock]] = Made(
            64, lambda stream: (prepared.on(stream), threading.Lock())
        )

    def run(self, stream: int, addresses: tuple[int, ...]) -> None:
        """addresses: of the tensors, in their order."""
        launch, lock = self._of_stream[stream]
        with lock:
            launch(addresses)


class ForwardPlan:
    """`run` is a Plan of `strobe.eager`."""

    def __init__(self, problem: AttentionProblem, operands: Operands, tensors: tuple[torch.Tensor | None, ...]):
        q = operands.q
        out = q.new_empty(*q.shape[:-1], problem.head_dim_v)
        lse = torch.empty(lse_shape(problem), dtype=torch.float32, device=q.device)
        spans = forward.new_row_spans(problem)
        self._new_out, self._new_lse, self._new_spans = maker(out), maker(lse), [maker(x) for x in (spans,) if x is not None]
        self._blind = problem.varlen or problem.seqused
        """Whether there may be rows that no kernel writes."""
        given = [x for x in (*tensors, out, lse, spans) if x is not None]
        self._launches = Launches(forward.calls(problem, operands, out, lse, spans), given)

    def run(
        self, stream: int, wants_lse: bool, addresses: tuple[int, ...], tensors: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, spans = self._new_out(), self._new_lse(), [new() for new in self._new_spans]
        if self._blind:
            out.zero_()
            lse.fill_(-torch.inf)
        self._launches.run(stream, (*addresses, *[x.data_ptr() for x in (out, lse, *spans)]))
        return out, lse


class BackwardPlan:
    """`run` is a BackwardPlan of `strobe.eager`."""

    def __init__(self, problem: AttentionProblem, operands: Operands, tensors: tuple[Any, ...]):
        out, lse, dout, dlse = tensors[3:7]
        bias = problem.score.bias if "bias" in problem.learned else None
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands[:3])
        grads = Gradients(dq, dk, dv, None if bias is None else zero_bias(problem, bias))
        delta = torch.empty_like(lse, memory_format=torch.contiguous_format)
        spans = backward.new_all_spans(problem)
        self._new_gradients = [maker(x) for x in (dq, dk, dv)]
        self._new_bias = None if grads.bias is None else maker(grads.bias)
        self._new_others = [maker(x) for x in (delta, *spans)]
        self._blind = problem.varlen or problem.seqused
        self._learns_sinks = "sinks" in problem.learned
        calls = [
            backward.delta_call(problem, out, dout, dlse, delta),
            *backward.calls(problem, operands, lse, dout, delta, grads, spans),
        ]
        self._launches = Launches(calls, [x for x in (*tensors, *grads, delta, *spans) if x is not None])

    def run(self, stream: int, addresses: tuple[int, ...], tensors: tuple[Any, ...]) -> Gradients:
        dq, dk, dv = [new() for new in self._new_gradients]
        if self._blind:
            for x in (dq, dk, dv):
                x.zero_()
        dbias = None if self._new_bias is None else self._new_bias().zero_()
        delta, *spans = [new() for new in self._new_others]
        self._launches.run(stream, (*addresses, *[x.data_ptr() for x in (dq, dk, dv, dbias, delta, *spans) if x is not None]))
        *_others, bias, sinks, _seed = tensors
        dsinks = sinks_gradient(sinks, tensors[4], delta) if self._learns_sinks else None
        return Gradients(dq, dk, dv, None if dbias is None else summed_bias(dbias, bias), dsinks)
