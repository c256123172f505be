"""benchmarks/determinism.py: that it tells gradients apart, and a whole run on the CPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import strobe
from strobe.lab.bench.peers import Peer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
determinism = importlib.import_module("determinism")


def observed(*runs: torch.Tensor):
    seen = determinism.Observed()
    for run in runs:
        seen.add(run)
    return seen.scatter()


def test_bit_patterns_are_told_apart():
    zero, negative, nan = torch.tensor([4.0, 0.0]), torch.tensor([4.0, -0.0]), torch.tensor([4.0, torch.nan])
    assert observed(zero, zero.clone()) == determinism.Scatter(1, 0.0)
    assert observed(zero, negative, zero) == determinism.Scatter(2, 0.0)
    assert observed(nan, nan.clone()).distinct == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spread_is_of_an_element_relative_to_the_largest(dtype):
    runs = (torch.tensor([x, -4.0], dtype=dtype) for x in (1.0, 1.5, 0.5))
    assert observed(*runs) == determinism.Scatter(3, 0.25)


def test_both_ways_are_asked_for(monkeypatch):
    asked, attention = [], strobe.attention
    record = lambda *tensors, **keywords: (asked.append(keywords["deterministic"]), attention(*tensors, **keywords))[1]  # noqa: E731
    monkeypatch.setattr(strobe, "attention", record)
    determinism.measure(determinism.points_of(torch.device("cpu"))[0], torch.device("cpu"), determinism.WAYS, 2, 1, 1)
    assert asked == [False, True]


def test_a_peer_that_refuses_says_so():
    def refuse(*_):
        raise ValueError("takes no float32\nat all")

    cpu, ways = torch.device("cpu"), determinism.WAYS | {"other": Peer("other", refuse)}
    point = determinism.measure(determinism.points_of(cpu)[0], cpu, ways, 2, 1, 1)
    assert point["refused"] == {"other": "takes no float32"} and set(point["ms"]) == set(determinism.WAYS)


def test_a_run(tmp_path, capsys):
    path = tmp_path / "deep" / "determinism.json"
    determinism.main(["--json", str(path), "--runs", "3"])
    result = json.loads(path.read_text())
    (point,) = result["points"]
    for way in determinism.WAYS:
        assert point["scatter"][way] == {name: {"distinct": 1, "spread": 0.0} for name in ("dq", "dk", "dv")}
        assert point["ms"][way] > 0 and point["backend"][way] in ("torch_cpu", "portable")
    assert "| fp32 D=32 causal S=128 |" in capsys.readouterr().out and result["device"]["kind"] == "cpu"


def test_points_of_a_gpu():
    points = determinism.points_of(torch.device("cuda"))
    shapes = [(p.head_dim, p.mask, p.length, p.heads // p.heads_kv) for p in points]
    assert len(set(shapes)) == len(shapes) and all(p.batch * p.length == 16384 for p in points)
    assert {shape for shape in shapes if shape[0] > 128} == {(dim, "causal", 4096, 1) for dim in (192, 256)}
    for dim in (64, 96, 128):
        assert {(mask, length) for of, mask, length, group in shapes if (of, group) == (dim, 1)} == {
            *((mask, length) for mask in ("full", "causal") for length in (1024, 4096, 16384)),
            ("window", 4096),
        }
    assert {(dim, mask, length) for dim, mask, length, group in shapes if group == 4} == {
        (dim, "causal", length) for dim in (64, 128) for length in (1024, 4096, 16384)
    }


@pytest.mark.gpu
def test_deterministic_is_one_bit_pattern(alone):
    """Alone: not tried yet beside processes that take turns at the GPU, since barriers keep their memory (docs/upstream.md)."""
    device = torch.device("cuda")
    point = next(p for p in determinism.points_of(device) if (p.head_dim, p.mask) == (128, "causal"))
    backward, load = determinism.backward_of(point, device, determinism.WAYS["deterministic"]), determinism.Load(device)
    backward()
    with alone():
        assert all(one.distinct == 1 for one in determinism.scatters(backward, load, 20).values())
