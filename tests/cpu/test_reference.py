"""The CPU backends against the specification."""

import pytest
import torch
from problems import CASES, Case, check, run, tensors

import strobe


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["tiled", "torch_cpu"])
def test_against_reference(case, dtype, backend):
    t = tensors(case, dtype)
    if not strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]:
        pytest.skip("refused")
    check(run(t, backend), t)


@pytest.mark.parametrize("backend", ["tiled", "torch_cpu"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_masked_out_is_not_read(backend, poison):
    t = tensors(Case(9, 9, mask="full"))
    ids = torch.zeros(2, 9, dtype=torch.int32)
    hidden = ids.clone()
    hidden[:, 4:6] = 1
    t.keywords["mask"] = strobe.Document(ids, hidden)
    want = run(t, backend)
    t.k[:, 4], t.v[:, 5] = poison, poison
    got = run(t, backend)
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_may_be_negative(dtype, scale):
    """PyTorch's kernel takes maxima before it scales, so the backend that wraps it must leave these to others."""
    t = tensors(Case(16, 16, head_dim=128, mask="causal", scale=scale), dtype)
    check(run(t, None), t)
    assert "torch_cpu: takes a positive scale" in strobe.supports(t.q, t.k, t.v, backend="torch_cpu", **t.keywords)[1][0]
