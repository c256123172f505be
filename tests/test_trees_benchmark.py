"""benchmarks/trees.py runs versions of Strobe beside each other in one process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ("--lengths", "48", "--masks", "causal", "--tokens", "96", "--width", "64", "--rounds", "2", "--seconds", "0.001")


def compare(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "benchmarks" / "trees.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_each_version_runs_its_own_code(tmp_path, forward):
    """One of two copies scales its scores otherwise."""
    shutil.copytree(ROOT / "src" / "strobe", tmp_path / "strobe")
    tiled = tmp_path / "strobe" / "reference" / "tiled.py"
    text = tiled.read_text()
    assert "problem.scale" in text
    tiled.write_text(text.replace("problem.scale", "(2.0 * problem.scale)"))
    found = tmp_path / "found.json"
    given = [ROOT / "src", tmp_path, ROOT / "src", "--head-dims", "32/16", "--json", found, *TINY]
    done = compare(*given, *["--forward"] * forward)
    assert done.returncode == 0, done.stderr
    [(point, versions)] = json.loads(found.read_text())["points"].items()
    assert point == "(32, 16) 48 causal"
    mine, other = versions.values()
    assert mine["apart"] == 0 and mine["us"] > 0
    assert other["apart"] > 0.01


def test_what_is_no_version():
    done = compare("no-such-revision", *TINY)
    assert done.returncode == 1
    assert done.stderr == "a version must be a revision of git or a folder with a strobe package, got 'no-such-revision'\n"
