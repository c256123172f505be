"""The ptxas of the oldest Triton, CUDA 12.8, is known to make wrong code of some kernels for Hopper (docs/upstream.md), but of
none of ours. Decode's are looked at in `test_decode_compiles.py`, those of all configs beside what else is asked of them."""

import json

import pytest
from tritons import answer_of

AUDIT = """
import json, sys, triton
from strobe.lab.bench.plan import Grid
from strobe.lab.binary import audit
kernel, *head_dims = json.loads(sys.argv[1])
points = Grid(head_dims=[(dim, dim) for dim in head_dims], lengths=(4096,), masks=("causal",)).points(False)
found = [(r.name, r.warnings) for r in audit.reports_of([kernel], points, own_dtype=True)]
print(json.dumps([triton.__version__, found]))
"""


HOPPER = [("sm90-fp8", 64, 256), *((f"sm90-{name}", 64, 128, 256) for name in ("forward", "backward", "split"))]


@pytest.mark.parametrize(
    "kernel", [("sm90-fp8", 128), *(pytest.param(kernel, marks=pytest.mark.exhaustive) for kernel in HOPPER)], ids=str
)
def test_ptxas_made_no_known_mistake(kernel):
    version, found = answer_of(AUDIT, json.dumps(kernel), triton="oldest Triton")
    assert version.startswith("3.6") and len(found) >= len(kernel) - 1
    for name, warnings in found:
        assert not any("wrong code" in warning for warning in warnings), (name, warnings)
