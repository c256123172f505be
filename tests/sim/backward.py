"""The Hopper backward on the CPU: what runs before and after it in Triton's interpreter, the kernel itself in the simulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
import triton.language as tl
from problems import Results, Tensors, check, describe, formula, upstream

from strobe.kernels.sm90 import backward, backward_ends, backward_launch, backward_split
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.kernels.workspace import Workspace
from strobe.problem import Gradients, summed_bias
from strobe.sim.attention import backward_launch as kernel_launch
from strobe.sim.attention import spans_of, split_backward_launches
from strobe.sim.machine import Report


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Triton's interpreter, which replaces the language by its own and, where a function calls another, leaves it replaced."""
    things = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base)
    before = [(thing, dict(vars(thing))) for thing in things]
    try:
        yield
    finally:
        for thing, members in before:
            for name, member in members.items():
                if vars(thing)[name] is not member:
                    setattr(thing, name, member)


class Left(NamedTuple):
    """What the launches leave, and the report of the main kernel."""

    grads: Gradients
    space: backward_launch.Buffers
    report: Report


class Backward:
    """All three launches of a backward, for the inputs t. ctas: how many share the blocks. kernels: the module of the main
    kernel."""

    def __init__(self, t: Tensors, config: Config | SplitConfig, ctas: int = 1, kernels: ModuleType = backward):
        self.t, self.config, self.ctas, self.kernels = t, config, ctas, kernels
        problem, self.operands = describe(t, "backward")
        self.problem = replace(problem, learned=("bias",) if problem.score.bias is not None else ())
        exact = formula(t)
        dout, dlse = upstream(exact.out, exact.lse)
        half = t.q.dtype
        self.given = exact.out.to(half), exact.lse.float(), dout.to(half), dlse.float()

    def run(self, order: str, seed: int) -> Report:
        """AssertionError if the gradients are wrong, or notes or counters are left."""
        grads, space, report = self.simulate(order, seed)
        dbias = {} if grads.bias is None else {"dbias": summed_bias(grads.bias, self.problem.score.bias)}
        check(Results(None, None, grads.q, grads.k, grads.v, **dbias), self.t, ("dq", "dk", "dv", *dbias))
        assert not (space.key_notes.any() or space.row_notes.any() or space.counters.any())
        return report

    def simulate(self, order: str, seed: int) -> Left:
        problem, operands, config, space = self.problem, self.operands, self.config, self._space()
        grid, _, arguments = backward_launch.prepare_arguments(problem, operands, *self.given, space, config)
        with interpreter():
            backward_ends.prepare[grid](**arguments)
        launch, grads = kernel_launch(self.kernels, problem, operands, self.given[2], space, config, self.ctas)
        report = launch.simulate(order, seed)
        grid, _, arguments = backward_launch.convert_arguments(problem, operands, grads.q, space, config)
        with interpreter():
            backward_ends.convert[grid](**arguments)
        return Left(grads, space, report)

    def _space(self) -> backward_launch.Buffers:
        notes = sum(backward_launch.number_of_notes(self.problem))
        zeros = Workspace(torch.zeros(16, dtype=torch.int32), torch.zeros(notes, dtype=torch.int32))
        space = backward_launch.buffers(self.problem, self.config, torch.device("cpu"), zeros)
        if documents := self.problem.mask.documents:
            space.key_spans.copy_(spans_of(documents.kv, documents.q))
            if space.row_spans is not None:
                space.row_spans.copy_(spans_of(documents.q, documents.kv))
        return space


class SplitBackward(Backward):
    """The launches of a backward in two passes. kernels: the module of its two main kernels."""

    def __init__(self, t: Tensors, config: SplitConfig, kernels: ModuleType = backward_split):
        super().__init__(t, config, kernels=kernels)

    def simulate(self, order: str, seed: int) -> Left:
        """The report is of the keys pass."""
        problem, operands, config, space = self.problem, self.operands, self.config, self._space()
        grid, _, arguments = backward_launch.prepare_arguments(problem, operands, *self.given, space, config)
        with interpreter():
            backward_ends.prepare[grid](**arguments)
        keys, rows, grads = split_backward_launches(self.kernels, problem, operands, self.given[2], space, config)
        report = keys.simulate(order, seed)
        rows.simulate(order, seed)
        return Left(grads, space, report)
