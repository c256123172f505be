"""benchmarks/shared_gpu.py: Triton gives the memory of a barrier to others where the kernel says so, and nowhere else."""

from pathlib import Path

from tritons import answer_of

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from shared_gpu import BARRIERS, HOLD, NANOSECONDS, WORDS, hold_kernel
from strobe.call.triton_internals import compiled_kernel
from strobe.lab.binary.barriers import lost_barriers
from strobe.lab.binary.offline import pretend_gpu

found = {}
with pretend_gpu(90):
    for barrier in BARRIERS:
        arguments = torch.empty(WORDS, dtype=torch.int64), NANOSECONDS, HOLD, WORDS, *(barrier == one for one in BARRIERS[1:])
        compiled = compiled_kernel(hold_kernel, (1,), arguments, {})
        found[barrier] = compiled.metadata.shared, len(lost_barriers(compiled.asm["ttgir"]))
print(json.dumps(found))
"""


def test_numbers_lie_where_a_barrier_was_that_nobody_keeps():
    found = answer_of(PROGRAM, str(Path(__file__).parents[2] / "benchmarks"))
    assert found == {"used by nobody": [8192, 1], "invalidated before": [8192, 0], "kept until the end": [8200, 0]}
