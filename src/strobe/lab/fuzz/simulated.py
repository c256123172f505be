"""One case of the fuzzer in the simulator: Hopper's forward and backward, as a GPU would run them."""

from __future__ import annotations

from dataclasses import replace

import torch

from strobe.call.dispatch import backend_module
from strobe.device import KNOWN
from strobe.kernels.sm90 import short_config
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig
from strobe.kernels.sm90.config import padded
from strobe.lab.fuzz.cases import Case
from strobe.lab.fuzz.inputs import inputs
from strobe.lab.fuzz.right import Precision, Results, describe, differs, reference
from strobe.lab.fuzz.run import Outcome, Wrong, outcome, upstream_of_lse
from strobe.problem import LEARNED, AttentionProblem, Operands, Upstream, summed_bias
from strobe.scores import sinks_gradient

_ARCH = KNOWN["H200"]


def simulated(case: Case) -> Outcome:
    """Runs a case and compares its results with the specification. What a GPU forbids, and where it would wait for ever, is an
    "error". Never raises."""
    return outcome(case, _run)


def _run(case: Case) -> Outcome:
    given = inputs(replace(case, device="cpu", way="once"))
    problem, operands = describe(given.given)
    problems = [problem]
    if case.gradients:
        learned = tuple(name for name in LEARNED if getattr(operands, name) is not None)
        problems.append(replace(problem, phase="backward", learned=learned))
    reasons = [reason for one in problems if (reason := backend_module("sm90").refuses(one, _ARCH))]
    if problem.is_empty or reasons:
        return Outcome("refused", f"simulator: {'there is nothing to run' if problem.is_empty else reasons[0]}")
    dout, dlse = given.dout, None
    precision = Precision.of(problem.dtype, "cuda")
    if given.dlse is not None:
        lse = reference(given.clean, precision)[0].lse
        assert lse is not None
        dlse = upstream_of_lse(given, lse)
    want, allowed = reference(given.clean, precision, dout, dlse)
    found = [_forward(case, problem, operands)]
    if case.gradients:
        assert want.lse is not None
        dout = torch.zeros(want.out.shape, dtype=problem.dtype) if dout is None else dout
        upstream = Upstream(want.out.to(problem.dtype), want.lse.float(), dout, None if dlse is None else dlse.float())
        found.append(_backward(case, problems[1], operands, upstream))
    for results in found:
        words = None if results is None else differs(_filled(results, want, problem), want, allowed)
        if words is not None:
            raise Wrong(words)
    if not any(found):
        return Outcome("refused", "simulator: leaves blocks to another kernel")
    return Outcome("right")


def _order(case: Case) -> str:
    return "in_order" if case.way == "once" else case.way


def _forward(case: Case, problem: AttentionProblem, operands: Operands) -> Results | None:
    """None: some blocks, or the merging of parts, are left to another kernel."""
    from strobe.sim.attention import simulate_forward

    config = backend_module("sm90").config(problem, _ARCH)
    name = "sm90 short" if isinstance(config, short_config.ShortConfig) else "sm90"
    found = simulate_forward(problem, operands, name, config, _order(case), case.seed)
    noted = found.notes is not None and bool(found.notes.any())
    return None if noted or getattr(config, "splits", 1) > 1 else Results(found.out, found.lse)


def _backward(case: Case, problem: AttentionProblem, operands: Operands, upstream: Upstream) -> Results | None:
    """None: some blocks are left to another kernel."""
    from strobe.sim.attention import simulate_backward

    problem = replace(problem, deterministic=case.backend == "deterministic")
    config = _config(case, problem)
    # CTAs that add to dQ in an order wait for each other, those that share a head count each other: more than run at a time.
    several = isinstance(config, ShortBackwardConfig) or (isinstance(config, Config) and config.order != 0)
    ctas, resident = (3, 2) if several else (1, 1)
    left = simulate_backward(
        problem, operands, upstream, config, _order(case), case.seed, ctas=ctas, resident=resident,
    )  # fmt: skip
    if any(notes is not None and notes.any() for notes in (left.tensors.key_notes, left.tensors.row_notes)):
        return None
    grads, sinks = left.grads, operands.sinks
    return Results(
        None, None, grads.q, grads.k, grads.v,  # type: ignore[arg-type]
        None if grads.bias is None or operands.bias is None else summed_bias(grads.bias, operands.bias),
        None if sinks is None else sinks_gradient(sinks, upstream.lse, left.tensors.delta),
    )  # fmt: skip


def _config(case: Case, problem: AttentionProblem) -> Config | SplitConfig | ShortBackwardConfig:
    if case.backend == "two passes":
        return SplitConfig(padded(problem.head_dim), padded(problem.head_dim_v))
    return backend_module("sm90").config(problem, _ARCH)


def _filled(results: Results, want: Results, problem: AttentionProblem) -> Results:
    """Results with 0 in rows and keys that belong to no packed sequence, which a call fills before its launches."""
    if not problem.varlen:
        return results
    found = {}
    for name in Results.ALL:
        ours, right = getattr(results, name), getattr(want, name)
        found[name] = ours if ours is None or name == "lse" else torch.where(ours.isnan() & (right == 0), 0.0, ours)
    return Results(**found)
