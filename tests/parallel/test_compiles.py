"""The kernels of shards compile for GPUs that are not there: where rows stand, results in float32, and the merge."""

import pytest
from tritons import TRITONS, output_of

COMPILE = """
import torch
from dataclasses import replace
from strobe.device import KNOWN
from strobe.kernels.combine import merge_call
from strobe.kernels.common.call import unfilled
from strobe.kernels.portable import backend as portable
from strobe.kernels.sm90 import backend as sm90
from strobe.lab.binary.offline import pretend_gpu, problem_of, sm90_backward
from strobe.masks import Causal, Full
arch = KNOWN["H100"]
dense = replace(problem_of((64, 64), Causal(), torch.bfloat16, 1024), partial=True)
for module, problem in ((portable, replace(dense, placed=True)), (sm90, dense)):
    for phase in ("forward", "backward"):
        one = replace(problem, phase=phase)
        assert module.refuses(one, arch) is None
        with pretend_gpu(arch.capability):
            for call in module.calls(one, unfilled(one, module.buffers(one, arch)), arch):
                call.compile()
for dims in ((64, 64), (96, 96), (128, 128), (192, 128)):
    for mask in (Full(), Causal()):
        one = replace(problem_of(dims, mask, torch.bfloat16, 1024), partial=True, phase="backward")
        for role, loop in sm90_backward(one, arch)[0].audit().main_loops.items():
            assert loop["WARPGROUP"] < loop["HGMMA"], f"ptxas made products serial: {dims}, {mask}, {role}: {loop}"
out, lse = torch.empty(2, 64, 2, 64, device="meta"), torch.empty(2, 2, 64, device="meta")
with pretend_gpu(arch.capability):
    ptx = merge_call(out, lse, out, lse).compile().asm["ptx"]
assert ptx.rindex("ld.global") < ptx.rindex("bar.sync") < ptx.index("st.global"), "all is read before a row is written"
print("compiled")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("triton", TRITONS)
def test_for_a_hopper_gpu(triton):
    assert "compiled" in output_of(COMPILE, triton=triton)
