"""The launches of a backward for mma.sync in the simulator, one after the other as in a stream."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

from problems import Results, Tensors, check, describe, formula, upstream

from strobe.device import KNOWN
from strobe.kernels.common.call import Call
from strobe.kernels.common.call import Tensors as CallTensors
from strobe.kernels.sm80 import backward, backward_launch
from strobe.kernels.sm80.config import BackwardConfig
from strobe.problem import Upstream, summed_bias
from strobe.sim import simulate
from strobe.sim.attention import spans_of, unfilled_gradients, unwritten
from strobe.sim.launch import Launch
from strobe.sim.machine import Report

ARCH = KNOWN["A100"]


class Left(NamedTuple):
    """What the launches leave, and the report of the main kernel."""

    tensors: CallTensors
    report: Report


class Backward:
    """The launches of a backward for the inputs t, but the one that redoes what is noted. kernels: the module of the main
    kernel. given: what comes from above; None: `problems.upstream`."""

    def __init__(
        self, t: Tensors, config: BackwardConfig, kernels: ModuleType = backward, given: Upstream | None = None,
        rewritable: tuple[str, ...] = (),
    ):  # fmt: skip
        self.t, self.config, self.kernels, self.rewritable = t, config, kernels, rewritable
        problem, self.operands = describe(t, "backward")
        bias = ("bias",) if problem.score.bias is not None and not config.with_dq else ()
        self.problem = replace(problem, learned=bias)
        if given is None:
            exact, half = formula(t), t.q.dtype
            dout, dlse = upstream(exact.out, exact.lse)
            given = Upstream(exact.out.to(half), exact.lse.float(), dout.to(half), dlse.float())
        self.given = given

    def run(self, order: str, seed: int) -> Report:
        """AssertionError if the gradients are wrong, or notes are left."""
        tensors, report = self.simulate(order, seed)
        dbias = {} if tensors.dbias is None else {"dbias": summed_bias(tensors.dbias, self.operands.bias)}
        check(Results(None, None, tensors.dq, tensors.dk, tensors.dv, **dbias), self.t, ("dq", "dk", "dv", *dbias))
        assert not any(notes.any() for notes in (tensors.key_notes, tensors.row_notes) if notes is not None)
        return report

    def simulate(self, order: str, seed: int) -> Left:
        buffers = backward_launch.buffers(self.problem, self.config)
        made = unwritten(buffers) | unfilled_gradients(self.problem)
        tensors = CallTensors(**self.operands._asdict(), **self.given._asdict(), **made)
        if tensors.document_q is not None:
            tensors.key_spans = spans_of(tensors.document_kv, tensors.document_q)
            if tensors.row_spans is not None:
                tensors.row_spans = spans_of(tensors.document_q, tensors.document_kv)
        self._simulate(backward_launch.prepare_call(self.problem, tensors, self.config))
        call = backward_launch.main_call(self.problem, tensors, ARCH, self.config)
        rewritable = ("notes", *self.rewritable)
        launch = Launch(self.kernels.backward_kernel, call.grid, call.arguments, call.keywords, 80, rewritable)
        report = launch.simulate(order, seed)
        if self.config.with_dq:
            self._simulate(backward_launch.convert_call(self.problem, tensors, self.config))
        else:  # in Triton's interpreter
            last = -2 if tensors.key_notes is not None else -1
            backward_launch.calls(self.problem, tensors, ARCH, self.config)[last].launch()
        return Left(tensors, report)

    def _simulate(self, call: Call) -> None:
        simulate(call.kernel, call.grid, arch=80, rewritable=("notes", *self.rewritable), **call.keywords)
