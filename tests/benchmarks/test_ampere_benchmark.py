"""The benchmark of the kernels for mma.sync: what it measures, and in what order."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tritons import output_of

from strobe.device import KNOWN

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sm80.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("sm80_benchmark", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def arguments(benchmark, **changes) -> argparse.Namespace:
    plain = {
        "dtypes": ("bf16",),
        "phases": ("forward", "backward"),
        "config": [],
        "portable": False,
        "most": None,
        "tokens": 16384,
    }
    return argparse.Namespace(**{**plain, **benchmark.PILOT, **changes})


def test_a_pilot_has_every_head_dim_and_both_phases(benchmark):
    points = benchmark.points_of(arguments(benchmark))
    assert {(p.head_dim, p.mask, p.backward) for p in points} == {
        (dim, mask, backward) for dim in (64, 96, 128, 256) for mask in ("full", "causal") for backward in (False, True)
    }
    for point in points:
        ours = benchmark.backends(point, KNOWN["H200"], arguments(benchmark))
        assert 1 <= len(ours) <= 2 and len({backend.name for backend, _ in ours}) == len(ours)


def test_other_configs_and_the_portable_kernels_by_choice(benchmark):
    point = benchmark.points_of(arguments(benchmark))[0]
    asked = arguments(benchmark, most=(1,), config=["tile_kv=16"], portable=True)
    names = [backend.name for backend, _ in benchmark.backends(point, KNOWN["H200"], asked)]
    assert len(names) == 4 and "x16x" in names[1] and names[2:] == ["portable", "portable as sm_80"]


def test_so_many_configs_of_each_phase(benchmark):
    forward, backward = benchmark.points_of(arguments(benchmark))[:2]
    asked = arguments(benchmark, most=(3, 1))
    assert [len(benchmark.backends(point, KNOWN["H200"], asked)) for point in (forward, backward)] == [3, 1]


def test_what_float32_is_timed_beside(benchmark):
    point = benchmark.points_of(arguments(benchmark, dtypes=("fp32",), head_dims=(128,)))[0]
    assert point.dtype == "fp32" and [peer.name for peer in benchmark.peers_of(point)] == ["SDPA efficient", "SDPA math"]
    *_, (portable, _) = benchmark.backends(point, KNOWN["A100"], arguments(benchmark, portable=True))
    assert portable.name == "portable"
    assert all(backend.config.itemsize == 4 for backend, _ in benchmark.backends(point, KNOWN["A100"], arguments(benchmark)))


AS_SM80 = """
import re, subprocess, sys
from dataclasses import replace
from pathlib import Path
import torch, triton
sys.path.insert(0, sys.argv[1])
import sm80 as benchmark
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.lab.bench.plan import Point
from strobe.lab.binary.offline import pretend_gpu
problem = Point(1, 4096, 16, 16, 64, 64, "bf16", "causal", False).problem()
backend = benchmark.Portable("portable as sm_80", KNOWN["A100"])
with pretend_gpu(90), benchmark.compiled_as("sm80"):
    calls = backend.calls(problem, unfilled(problem, backend.buffers(problem, KNOWN["A100"])), KNOWN["A100"])
    ptx = calls[-1].compile().asm["ptx"]
assert "mma.sync" in ptx and "cp.async" in ptx and "wgmma" not in ptx
assert re.search(r"^\\.target sm_80$", ptx, re.MULTILINE)
path = Path(sys.argv[2])
path.write_text(re.sub(r"\\.version \\S+", ".version 8.0", ptx))
ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
subprocess.run([ptxas, "-arch=sm_80", path, "-o", path.with_suffix(".cubin")], check=True)
"""


def test_the_portable_kernels_as_sm_80_are_code_for_sm_80(tmp_path):
    """What runs on Hopper is PTX that assembles for an A100."""
    output_of(AS_SM80, str(SCRIPT.parent), str(tmp_path / "forward.ptx"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_it_says_so():
    ran = subprocess.run([sys.executable, str(SCRIPT), "--pilot"], capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr.strip() == "needs an NVIDIA GPU of compute capability 8.0 or newer"
