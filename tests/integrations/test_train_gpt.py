"""examples/train_gpt.py: both attentions train the same model; on a GPU also at its real size."""

import importlib
import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
train_gpt = importlib.import_module("train_gpt")

CPU = torch.device("cpu")
SETTINGS = train_gpt.Settings(layers=1, width=32, heads=2, heads_kv=2, context=32, batch=2, steps=3, window=2)


LONGER = replace(SETTINGS, steps=30, learning_rate=1e-2)
"""Long enough for the scores to leave 0, where every attention is the same mean."""


def losses(settings, device=CPU) -> tuple[list[float], list[float]]:
    runs = train_gpt.train(settings, device, Console(quiet=True))["runs"]
    return runs["strobe"]["loss"], runs["SDPA"]["loss"]


@pytest.mark.parametrize("heads_kv", [2, 1], ids=["MHA", "GQA"])
def test_both_attentions_train_alike(heads_kv):
    ours, theirs = losses(replace(LONGER, heads_kv=heads_kv))
    assert len(ours) == 30 and 5.0 < ours[0] < 6.0, "at first every byte is as likely: ln 256 = 5.5"
    assert ours[-1] < ours[0] - 1.0, "it learns"
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_wrong_attention_is_seen(monkeypatch):
    monkeypatch.setitem(train_gpt.ATTENTIONS, "strobe", lambda q, k, v: train_gpt.with_sdpa(q, k.flip(2), v))
    ours, theirs = losses(LONGER)
    assert ours != pytest.approx(theirs, rel=1e-3)


def test_json_picture_and_summary(tmp_path, capsys):
    path = tmp_path / "deep" / "train.json"
    options = [f"--{name}={value}" for name, value in vars(SETTINGS).items()]
    train_gpt.main([*(option.replace("_", "-") for option in options), f"--json={path}"])
    report = json.loads(path.read_text())
    assert report["settings"] == vars(SETTINGS) and report["device"]["packages"]["torch"] == version("torch")
    for run in report["runs"].values():
        assert len(run["loss"]) == 3 and len(run["window_ms"]) == 2 and run["step_ms"] == run["window_ms"][1] > 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "strobe  loss" in text and "SDPA    loss" in text and "losses differ by" in text
    assert train_gpt.default_path(report | {"date": "2026-01-02T"}).name == "train-gpt-cpu-2026-01-02.json"


def test_the_same_data_in_every_run():
    first, second = (train_gpt.Batches(SETTINGS, CPU) for _ in range(2))
    assert first[2].shape == (2, 33) and torch.equal(first[2], second[2]) and not torch.equal(first[1], first[2])
    assert len(train_gpt.corpus()) > 100_000


@pytest.mark.gpu
def test_on_a_gpu():
    ours, theirs = losses(train_gpt.Settings(steps=20, window=5), torch.device("cuda"))
    assert ours == pytest.approx(theirs, rel=2e-2) and ours[-1] < ours[0]
