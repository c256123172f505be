"""`strobe doctor`."""

import json

import pytest
import torch
from commands import run

from strobe.call import dispatch
from strobe.call.precompiled import MOVED_CACHE
from strobe_cli import doctor, precompile


@pytest.fixture(scope="module")
def found():
    return doctor.examine()


def test_it_says_what_is_here(tmp_path):
    path = tmp_path / "doctor.json"
    result = run("doctor", "--json", str(path))
    assert result.exit_code == 0, result.output
    said = json.loads(path.read_text())
    assert said["versions"]["torch"] == torch.__version__.partition("+")[0] or said["versions"]["torch"] == torch.__version__
    assert [one["name"] for one in said["backends"]] == list(dispatch.BACKENDS)
    for word in ("versions  strobe", "backend   tiled: runs", "self test causal, GQA on", "cache     ", "advice    "):
        assert word in result.output
    if not torch.cuda.is_available():
        assert "backend   sm90: " in result.output and "backend   sm90: runs" not in result.output


def test_the_self_test_is_short_and_passes(found):
    assert doctor.passed(found) and all(case["error"] is not None for case in found["self_test"])
    if not torch.cuda.is_available():
        assert sum(case["seconds"] for case in found["self_test"]) < doctor.SECONDS


def test_wrong_results_are_found(monkeypatch):
    right = doctor.strobe.attention
    monkeypatch.setattr(doctor.strobe, "attention", lambda *tensors, **keywords: right(*tensors, **keywords) * 1.05)
    monkeypatch.setattr(doctor, "_CASES", {"window": doctor._CASES["window"]})
    found = doctor.examine()
    assert found["self_test"][0]["failure"].startswith("WRONG: error") and not doctor.passed(found)
    assert "WRONG" in doctor.text(found) and "please report it" in found["advice"][-1]
    assert run("doctor").exit_code == 1


def test_what_raises_is_found(monkeypatch):
    def fails(*tensors, **keywords):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(doctor.strobe, "attention", fails)
    assert {case["failure"] for case in doctor.examine()["self_test"]} == {"FAILED: RuntimeError: no such kernel"}


def test_time_that_is_over(monkeypatch):
    found = doctor.examine(seconds=0.0)
    assert doctor.passed(found) and "left out, the time was over" in doctor.text(found)
    assert any("run strobe doctor again" in sentence for sentence in found["advice"])


def test_advice(found, monkeypatch):
    def advice(**changes):
        return " ".join(doctor._advice(found | changes))

    assert "built without CUDA" in advice(device={"name": "CPU"}, torch_cuda=None)
    assert "PyTorch sees no GPU" in advice(device={"name": "CPU"}, torch_cuda="13.0")
    gpu = {"name": "H200", "capability": 90, "free_memory_gib": 0.5}
    assert "less than 1 GiB" in advice(device=gpu) and "CUDA" not in advice(device=gpu)
    assert "very slowly" in advice(environment={"TRITON_INTERPRET": "1"})
    assert "STROBE_DEBUG=1" in advice(environment={"STROBE_DEBUG": "1"})
    cache = {"folder": "/somewhere", "bytes": 11 << 30, "files": 1, "writable": False, "precompiled": None}
    assert "/somewhere cannot be written" in advice(cache=cache) and "/somewhere is large" in advice(cache=cache)
    monkeypatch.setattr(doctor, "_imports", lambda name: False)
    assert "pip install 'triton>=3.6'" in advice()


def test_a_backend_that_cannot_be_imported(monkeypatch):
    def missing(name):
        raise ImportError("no module named triton")

    monkeypatch.setattr(dispatch, "backend_module", missing)
    assert doctor._backend("portable", doctor.arch_of(torch.device("cpu")))["reason"] == (
        "cannot be imported: no module named triton"
    )


def test_precompiled_kernels_that_are_not_found(monkeypatch, tmp_path):
    made = {"folder": "/elsewhere", "arch": "H200", "capability": 90, "command": "strobe precompile config.json"}
    mark = tmp_path / precompile.MARK
    mark.write_text(json.dumps(made | {"versions": precompile.versions() | {"triton": "3.5.0"}}))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    said = doctor.examine(seconds=0.0)
    assert "precompiled for H200 by strobe precompile config.json" in doctor.text(said)
    advice = " ".join(said["advice"])
    assert "with triton 3.5.0, and this is" in advice and f"TRITON_CACHE_MANAGER={MOVED_CACHE}" in advice
    monkeypatch.setenv("TRITON_CACHE_MANAGER", MOVED_CACHE)
    mark.write_text(json.dumps(made | {"versions": precompile.versions()}))
    assert "precompiled" not in " ".join(doctor.examine(seconds=0.0)["advice"]) or torch.cuda.is_available()
