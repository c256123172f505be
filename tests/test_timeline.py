"""Stamps, timelines and unit costs: what compiles, what is drawn, what is tabulated."""

import os
import subprocess
import sys

# ---- stamps

CLOCKS = """
from strobe.lab import offline
from strobe.kernels.sm90 import forward
compile_only, clocks = forward.compile_only, []
def spy(*arguments):
    compiled = compile_only(*arguments)
    clocks.append(compiled.asm["ptx"].count("%clock64"))
    return compiled
forward.compile_only = spy
audits = [offline.audit_sm90_forward(128, traced=traced) for traced in (False, True)]
stores = [audit.instructions["STG"] for audit in audits]
print(clocks, stores[1] - stores[0], [audit.spill_bytes for audit in audits], [audit.warnings for audit in audits])
"""


def test_stamps_stand_in_a_traced_kernel_only():
    """Each of 2 consumers stamps 4 times before its loop, 5 in it and 3 after it; the producer twice."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CLOCKS], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[0, 26] 26 [0, 0] [(), ()]", done.stdout + done.stderr
