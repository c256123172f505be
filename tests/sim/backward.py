"""The launches of a Hopper backward in the simulator, one after the other as in a stream."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from problems import Results, Tensors, check, describe, formula, upstream

from strobe.kernels.common.call import Tensors as CallTensors
from strobe.kernels.sm90 import backward, backward_dq, backward_launch, backward_split, tile_list
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.problem import Gradients, Upstream, summed_bias
from strobe.sim import simulate
from strobe.sim.attention import backward_launches, spans_of, unfilled_gradients, unwritten
from strobe.sim.machine import Report


class Left(NamedTuple):
    """What the launches leave, and the report of the main kernel."""

    grads: Gradients
    tensors: CallTensors
    report: Report


class Backward:
    """The launches of a backward, for the inputs t. ctas: how many share the blocks of one pass. kernels: the module of the
    main kernels; dq_kernels: of the one that computes dQ where dS is stored."""

    def __init__(
        self,
        t: Tensors,
        config: Config | SplitConfig,
        ctas: int = 1,
        kernels: ModuleType = backward,
        dq_kernels: ModuleType = backward_dq,
    ):
        self.t, self.config, self.ctas, self.kernels, self.dq_kernels = t, config, ctas, kernels, dq_kernels
        problem, self.operands = describe(t, "backward")
        self.problem = replace(problem, learned=("bias",) if problem.score.bias is not None else ())
        exact = formula(t)
        dout, dlse = upstream(exact.out, exact.lse)
        half = t.q.dtype
        self.given = Upstream(exact.out.to(half), exact.lse.float(), dout.to(half), dlse.float())

    def run(self, order: str, seed: int) -> Report:
        """AssertionError if the gradients are wrong, or notes or counters are left."""
        grads, tensors, report = self.simulate(order, seed)
        dbias = {} if grads.bias is None else {"dbias": summed_bias(grads.bias, self.operands.bias)}
        check(Results(None, None, grads.q, grads.k, grads.v, **dbias), self.t, ("dq", "dk", "dv", *dbias))
        assert not (tensors.key_notes.any() or tensors.row_notes.any() or tensors.counters.any())
        return report

    def simulate(self, order: str, seed: int) -> Left:
        """The report is of the first main kernel."""
        tensors = self._tensors()
        launches = backward_launches(self.kernels, self.problem, tensors, self.config, self.ctas, self.dq_kernels)
        reports = [self._prepared(tensors)]
        for launch in launches:
            reports.append(launch.simulate(order, seed, after=reports[-1]))
        if tensors.accumulator is not None:
            call = backward_launch.convert_call(self.problem, tensors, self.config)
            simulate(call.kernel, call.grid, after=reports[-1], **call.keywords)
        return Left(_gradients(tensors), tensors, reports[1])

    def _prepared(self, tensors: CallTensors) -> Report:
        """Report of the launch that prepares, behind the one that lists the tiles of packed sequences."""
        report = None
        if backward_launch.is_listed(self.problem, self.config):
            with mock.patch.object(tile_list, "PROGRAMS", 4):
                call = tile_list.backward_list_call(self.problem, tensors)
            report = simulate(call.kernel, call.grid, **call.keywords)
        call = backward_launch.prepare_call(self.problem, tensors, self.config)
        return simulate(call.kernel, call.grid, after=report, **call.keywords)

    def _tensors(self) -> CallTensors:
        made = unwritten(backward_launch.buffers(self.problem, self.config)) | unfilled_gradients(self.problem)
        if backward_launch.is_listed(self.problem, self.config):  # that launch writes what the others leave
            for name in ("dq", "dk", "dv"):
                made[name].fill_(torch.nan)
        tensors = CallTensors(**self.operands._asdict(), **self.given._asdict(), **made)
        if tensors.document_q is not None:
            tensors.key_spans = spans_of(tensors.document_kv, tensors.document_q)
            if tensors.row_spans is not None:
                tensors.row_spans = spans_of(tensors.document_q, tensors.document_kv)
        return tensors


def _gradients(tensors: CallTensors) -> Gradients:
    return Gradients(tensors.dq, tensors.dk, tensors.dv, tensors.dbias)


class SplitBackward(Backward):
    """The launches of a backward in two passes."""

    def __init__(self, t: Tensors, config: SplitConfig, kernels: ModuleType = backward_split, **more):
        super().__init__(t, config, kernels=kernels, **more)
