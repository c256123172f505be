"""The script that simulates Triton's tutorials, on files that stand in for a checkout of Triton."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "simulate_tutorials.py"
TUTORIAL = """
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def kernel(x, STEP: gl.constexpr):
    gl.store(x + gl.program_id(0) * STEP, 1.0)


def fill(x, step):
    assert torch.cuda.get_device_capability() == (9, 0)
    kernel[(torch.cuda.get_device_properties("cuda").multi_processor_count,)](x, step, num_warps=4)


def benchmark_fill():
    raise RuntimeError("there is no GPU")


benchmark_fill()
"""


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("simulate_tutorials", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "simulate_tutorials", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("step, expected, status, says", [
    (1, None, 0, "right"),
    (0, None, 1, "DoubleWrite"),
    (0, ("DoubleWrite", "store to x by kernel"), 0, "DoubleWrite"),
    (1, ("DoubleWrite", ""), 1, "right"),
])  # fmt: skip
def test_what_it_says(script, tmp_path, capsys, monkeypatch, step, expected, status, says):
    folder = tmp_path / script.TUTORIALS
    folder.mkdir(parents=True)
    (folder / "00-fill.py").write_text(TUTORIAL)
    case = script.Case("00-fill", "fill", 90, lambda m: m.fill(torch.zeros(2), step), expected, sms=2)
    monkeypatch.setattr(script, "CASES", [case])
    assert script.main(tmp_path) == status
    assert f"in_order 0, random 0, random 1, random 2, late 0, early 0, uneven 0, uneven 1, uneven 2: {says}" in (
        capsys.readouterr().out
    )
