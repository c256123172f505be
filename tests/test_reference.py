"""The CPU backends against the specification."""

import pytest
import torch
from problems import CASES, check, run, tensors

import strobe


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["tiled", "torch_cpu"])
def test_against_reference(case, dtype, backend):
    t = tensors(case, dtype)
    if not strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]:
        pytest.skip("refused")
    check(run(t, backend), t)
