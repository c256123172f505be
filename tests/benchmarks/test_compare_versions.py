"""benchmarks/compare_versions.py runs versions of Strobe beside each other in one process."""

import importlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strobe.lab.bench.bench import CpuClock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
compare_versions = importlib.import_module("compare_versions")
TINY = ("--lengths", "48", "--masks", "causal", "--tokens", "96", "--width", "64", "--rounds", "2", "--seconds", "0.001")


def compare(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "benchmarks" / "compare_versions.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("more", [["--forward"], [], ["--packed"]], ids=["forward", "backward", "packed backward"])
def test_each_version_runs_its_own_code(tmp_path, more):
    """One of two copies scales its scores otherwise."""
    shutil.copytree(ROOT / "src" / "strobe", tmp_path / "strobe")
    tiled = tmp_path / "strobe" / "cpu" / "tiled.py"
    text = tiled.read_text()
    assert "problem.scale" in text
    tiled.write_text(text.replace("problem.scale", "(2.0 * problem.scale)"))
    found = tmp_path / "found.json"
    given = [ROOT / "src", tmp_path, ROOT / "src", "--head-dims", "32/16", "--json", found, *TINY]
    done = compare(*given, *more)
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


class SteadyMeter:
    """Of a device that takes 250 W, read twice now."""

    @property
    def samples(self):
        before, now = time.monotonic() - 1e-4, time.monotonic()
        return [(before, 0), (now, 250_000 * (now - before))]


def test_joules_are_watts_of_a_burst():
    burst = compare_versions.Times(lambda: time.sleep(0.001), CpuClock(), SteadyMeter()).take(0.005)
    assert burst.us >= 1000 and burst.cycles is None
    assert burst.joules == pytest.approx(250e-6 * burst.us)
    assert compare_versions.Times(lambda: None, CpuClock(), None).take(0.0).joules is None
    line = compare_versions._line(
        {"us": 50.0, "cycles": 75e3, "joules": 0.02, "apart": 0}, {"us": 100.0, "cycles": None, "joules": 0.03}
    )
    assert line == "50 us (2.000), 20 mJ (1.500), 0.0e+00 apart"
