"""benchmarks/generate.py on a CPU, where it says nothing of speed: every way that needs no GPU generates."""

import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import generate
from generate import TINY, Way, measure, model_of

from strobe.integrations.transformers import register


def test_ways_are_timed_or_say_why_not(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ways = (Way("sdpa", "static cache"), Way("strobe", "pages"), Way("no attention", "pages"), Way("strobe", "pages", True))
    monkeypatch.setattr(generate, "WAYS", ways)
    register()
    found = measure(model_of(torch.device("cpu")), TINY[0], 1, time.monotonic() + 60)
    assert set(found["ms"]) == {"sdpa, static cache", "strobe, pages"}
    assert list(found["refused"]) == ["no attention, pages"] and (found["batch"], found["tokens"]) == (2, 4)
