"""benchmarks/training_steps.py: both attentions train the same model, and take turns."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
training_steps = importlib.import_module("training_steps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shapes of a GPU take long")
def test_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_steps, "WAYS", ("eager",))
    path = tmp_path / "steps.json"
    training_steps.main(["--rounds", "2", "--seconds", "0.001", "--json", str(path)])
    (point,) = json.loads(path.read_text())["points"]
    assert {name: len(times) for name, times in point["milliseconds"].items()} == {"strobe": 2, "SDPA": 2}
    assert point["losses"]["strobe"] == pytest.approx(point["losses"]["SDPA"], rel=1e-3)
    assert point["losses"]["strobe"][-1] < point["losses"]["strobe"][0]
    assert "GPT, 16 tokens" in capsys.readouterr().out


def test_faster_is_more_than_one():
    point = {"milliseconds": {"strobe": [1.0, 1.1], "SDPA": [2.0, 2.2]}}
    assert training_steps.ratio(point).value == pytest.approx(2.0)
