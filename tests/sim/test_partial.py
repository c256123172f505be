"""Hopper's kernels with results in float32, which somebody merges: the same bits before they are rounded, in every order."""

from dataclasses import replace

import pytest
import torch
from backward import Backward
from problems import Case, describe, tensors

from strobe.kernels.sm90.backward_config import Config as BackwardConfig
from strobe.kernels.sm90.config import Config
from strobe.sim.attention import simulate_forward

BF16 = torch.bfloat16
FORWARD = [
    (Case(150, 200, 1, 2, 1, 64, mask="causal"), Config(64, 64, 2, 64, 2)),
    (Case(130, 150, 1, 1, 1, 128), Config(128, 128, 2, 64, 2, o_buffers=2)),
    (Case(70, 90, 2, 1, 1, 192, 128, packed=True, mask="causal"), Config(192, 128, 2, 64, 2)),
    pytest.param(Case(130, 150, 1, 1, 1, 96, mask="causal"), Config(96, 96, 3, 64, 2), marks=pytest.mark.exhaustive),
    pytest.param(Case(130, 100, 1, 1, 1, 256), Config(256, 256, 2, 64, 2, q_stages=1), marks=pytest.mark.exhaustive),
]
BACKWARD = [
    (Case(130, 150, 1, 2, 1, 64, mask="causal"), BackwardConfig(64, 64, 128, turns=True)),
    (Case(90, 150, 1, 1, 1, 128), BackwardConfig(128, 128, 64, turns=True)),
    pytest.param(Case(90, 150, 1, 1, 1, 96, mask="causal"), BackwardConfig(96, 96, 64, True), marks=pytest.mark.exhaustive),
    pytest.param(
        Case(90, 150, 2, 2, 1, 192, 128, seqused=True), BackwardConfig(192, 128, 64, turns=False), marks=pytest.mark.exhaustive
    ),
]


@pytest.mark.parametrize(("case", "config"), FORWARD, ids=str)
def test_forward(case, config):
    problem, operands = describe(tensors(case, BF16))
    want = simulate_forward(problem, operands, "sm90", config)
    problem, wide = replace(problem, partial=True), replace(config, partial=True)
    assert wide.smem_bytes() == config.smem_bytes()
    for order, seed in (("random", 1), ("late", 0)):
        out, lse, _, report = simulate_forward(problem, operands, "sm90", wide, order, seed)
        assert out.dtype == torch.float32 and report.smem_bytes == wide.smem_bytes()
        assert torch.equal(out.to(BF16), want.out) and torch.equal(lse, want.lse)
        assert not torch.equal(out, want.out.float())  # it was not rounded on its way


@pytest.mark.parametrize(("case", "config"), BACKWARD, ids=str)
def test_backward(case, config):
    t = tensors(case, BF16)
    want = Backward(t, config).simulate("in_order", 0).grads
    backward = Backward(t, config)
    backward.problem = replace(backward.problem, partial=True)
    for order, seed in (("random", 1), ("late", 0)):
        left = backward.simulate(order, seed)
        for name in ("k", "v"):  # dQ is added up in any order
            got, exact = getattr(left.grads, name), getattr(want, name)
            assert got.dtype == torch.float32 and torch.equal(got.to(BF16), exact)
            assert not torch.equal(got, exact.float())
        assert left.grads.q.dtype == torch.float32
        torch.testing.assert_close(left.grads.q, want.q.float(), rtol=1e-2, atol=1e-3)
