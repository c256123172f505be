"""A kernel's key in Triton's folder does not depend on which kernels a process looked for before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST_TRITON = Path(sys.prefix) / "triton-3.6"
KEYS = """
import sys
from strobe.kernels.decode.forward import decode_kernel
from strobe.kernels.decode.hopper import hopper_kernel
from strobe.kernels.hashing import hash_callees_first
hash_callees_first()
kernels = {"decode": decode_kernel, "hopper": hopper_kernel}
for name in sys.argv[1:]:
    kernels[name].cache_key
print(decode_kernel.cache_key, hopper_kernel.cache_key)
"""


@pytest.mark.parametrize("triton", ["installed", "oldest"])
def test_any_order(triton):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton == "oldest":
        if not OLDEST_TRITON.exists():
            pytest.skip("`make test` installs Triton 3.6 in .venv/triton-3.6; it is not there")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OLDEST_TRITON), environment.get("PYTHONPATH")]))
    keys = set()
    for order in (("decode", "hopper"), ("hopper", "decode")):
        done = subprocess.run([sys.executable, "-c", KEYS, *order], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        keys.add(done.stdout)
    assert len(keys) == 1
