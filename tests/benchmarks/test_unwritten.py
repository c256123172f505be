"""The script that reproduces a mistake of ptxas, on the Triton that has it and on the one that is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST_TRITON = ROOT / ".venv" / "triton-3.6"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("folder", "status"), [(OLDEST_TRITON, 1), (None, 0)], ids=["oldest Triton", "installed Triton"])
def test_it_finds_the_mistake_where_it_is(folder, status):
    if folder is not None and not folder.exists():
        pytest.skip("`make test` installs Triton 3.6 in .venv/triton-3.6; it is not there")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder and str(folder), environment.get("PYTHONPATH")]))
    script = [sys.executable, str(ROOT / "benchmarks" / "unwritten.py")]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert done.returncode == status and "such instructions" in done.stdout, done.stdout + done.stderr[-2000:]
