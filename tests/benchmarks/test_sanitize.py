"""benchmarks/sanitize.py: what is compiled ahead is what a GPU asks for, as far as that can be seen without one."""

import subprocess
import sys
from pathlib import Path

import pytest
from tritons import compiling

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks" / "sanitize.py"), *arguments]
    return subprocess.run(command, env=compiling(**environment), capture_output=True, text=True, timeout=300)


def test_a_second_process_finds_what_was_compiled(tmp_path):
    """One case, of its own kernel and the one that computes noted blocks again, for one GPU and then for another."""
    found = [run("--compile", gpu, "--share", "9/12", "fp8", TRITON_CACHE_DIR=str(tmp_path)) for gpu in ("H100", "H200")]
    assert [one.returncode for one in found] == [0, 0], found[0].stderr + found[1].stderr
    wanted = ["fp8: 2 kernels compiled, 0 were there", "fp8: 0 kernels compiled, 2 were there"]
    assert [one.stdout.strip().partition(" s  ")[2] for one in found] == wanted


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--compile", "A100"), "invalid choice: 'A100'"),
        (("--share", "5/4"), "must be I/N with I from 1 to N, got 5/4"),
        (("nothing",), "PART must be of decode, several"),
    ],
)
def test_wrong_options(arguments, says):
    found = run(*arguments)
    assert found.returncode == 2 and says in found.stderr
