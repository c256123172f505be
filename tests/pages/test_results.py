"""The committed results: each says how it was made, and somebody reads it."""

import json
import re
import shlex
import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from test_docs import parse

from strobe.lab.bench import machine

ROOT = Path(__file__).parents[2]
RESULTS = sorted([*(ROOT / "benchmarks/results").glob("*.json"), *(ROOT / "docs/lab").glob("*.json")])
READERS = [
    *(path for pattern in ("*.md", "docs/*.md", "Makefile") for path in ROOT.glob(pattern)),
    *(path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")),
]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_says_how_it_was_made(path):
    """When, by which command, of which commit ("+": its source was changed), on what, with which versions. What was not written
    down at the time and found in the history afterwards is named in `recovered`; so are versions that nobody knows any more."""
    result = json.loads(path.read_text())
    device, recovered = result["device"], result.get("recovered", ())
    assert datetime.fromisoformat(result["date"]).tzinfo is not None
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?", device["commit"]) and device["name"]
    assert device["packages"].get("torch") or "device.packages" in recovered
    program, *arguments = shlex.split(result["command"])
    if program == "strobe":
        assert parse(shlex.join(arguments))
    else:
        assert program == "python" and (ROOT / arguments[0]).is_file()


def test_somebody_reads_each_result():
    text = "".join(path.read_text() for path in READERS)
    assert not [path.name for path in RESULTS if path.stem not in text]


def test_provenance_is_that_of_the_command_and_the_device(monkeypatch):
    script = str(ROOT / "benchmarks/fp8.py")
    monkeypatch.setattr(sys, "argv", [script, "--json", "out.json", "--rounds", "3"])
    made = machine.provenance(torch.device("cpu"))
    assert made["command"] == "python benchmarks/fp8.py --rounds 3" and made["device"]["kind"] == "cpu"
    assert made["device"]["packages"]["torch"] == version("torch")
    assert machine.provenance("no GPU", "strobe cost")["command"] == "strobe cost"


def test_what_says_the_same_stays_as_it_was(tmp_path):
    path = tmp_path / "folder" / "result.json"
    old = {"what": "x", "date": "then", "device": {"commit": "a"}, "rows": (1, 2)}
    assert machine.save(path, old) == path
    machine.save(path, old | {"date": "now", "device": {"commit": "b"}})
    assert json.loads(path.read_text())["date"] == "then"
    machine.save(path, old | {"date": "now", "rows": (1, 3)})
    assert json.loads(path.read_text())["date"] == "now"


@pytest.mark.parametrize("commit", ["a+", None])
def test_what_was_made_by_a_changed_source_is_made_anew(commit, tmp_path):
    path = tmp_path / "result.json"
    machine.save(path, {"date": "then", "device": {"commit": commit}, "rows": []})
    machine.save(path, {"date": "now", "device": {"commit": "b"}, "rows": []})
    assert json.loads(path.read_text())["date"] == "now"
