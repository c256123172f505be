"""The script that reproduces a mistake of ptxas, on the Triton that has it and on the one that is installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from tritons import TRITONS, compiling

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("triton", "status"), [("oldest Triton", 1), ("installed Triton", 0)], ids=TRITONS)
def test_it_finds_the_mistake_where_it_is(triton, status):
    script = [sys.executable, str(ROOT / "benchmarks" / "unwritten.py")]
    done = subprocess.run(script, capture_output=True, text=True, env=compiling(triton))
    assert done.returncode == status and "such instructions" in done.stdout, done.stdout + done.stderr[-2000:]
