"""What docs/lab.md shows of a command is what the command prints, and `make lab` would leave its files as they are."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strobe.kernels import triton_version
from strobe.lab.pages import shown
from strobe_cli.app import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / shown.PAGE).read_text()
SHOWN = {command: PAGE[start:end] for command, start, end in shown.outputs(PAGE) if ".cubin" not in command}
COMPILES = ("audit", "occupancy --arch H200")
SLOW = (*COMPILES, "report", "timeline", "roofline --arch")
MADE = ("date", "command", "device", "kernels")


def cases() -> list:
    other = pytest.mark.skipif(triton_version() != (3, 9), reason="the page shows what Triton 3.9 compiles")
    marks = {True: [pytest.mark.exhaustive], False: []}
    return [
        pytest.param(command, marks=marks[command.startswith(SLOW)] + [other] * command.startswith(COMPILES))
        for command in SHOWN
    ]


@pytest.mark.parametrize("command", cases())
def test_outputs_are_what_the_commands_print(command, tmp_path, monkeypatch):
    if command.startswith(COMPILES):
        said = shown.run(command, tmp_path, ROOT)
    else:
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("COLUMNS", shown.COLUMNS)
        result = CliRunner().invoke(app, shown.redirected(command, tmp_path))
        assert result.exit_code == 0, result.output
        said = result.output
    assert shown.missing(SHOWN[command], said) is None, "run `make lab`"
    arguments = shlex.split(command)
    if "--json" in arguments:
        paths = ROOT / arguments[arguments.index("--json") + 1], tmp_path / shown.FILES["--json"]
        committed, made = (json.loads(path.read_text()) | dict.fromkeys(MADE) for path in paths)
        assert committed == made, "run `make lab`"


def test_there_are_outputs_of_both_kinds():
    assert (
        len(SHOWN) > 15
        and "banks" in SHOWN
        and "occupancy --arch L4 --registers 80 --threads 128 --smem 43780 --grid 128" in SHOWN
    )


SAID = "A: 12\nB: 13\nC: 14\n"


def test_an_output_that_changed_is_found():
    assert shown.missing("A: 12\n...\nC:  14\n", SAID) is None
    assert shown.missing("A: 12\nB: 14\n", SAID) == "B: 14"
    assert shown.missing("B: 13\nA: 12\n", SAID) == "A: 12"
    assert shown.missing("3 barriers, compiled in 5 ms", "3 barriers, compiled in 71 ms\n") is None


@pytest.mark.parametrize(
    ("output", "new"),
    [
        ("A: 12\n  B: 13\nC: 14\n", "A: 12\n  B: 13\nC: 14\n"),
        ("A: 12\nB: 13\nC: 15\n", SAID),
        ("A: 11\n...\nC: 15\n", "A: 12\n...\nC: 14\n"),
        ("D: 11\n...\n", "D: 11\n...\n"),
    ],
)
def test_a_page_shows_what_is_said_now(output, new):
    page = "```\n$ strobe blend a\n{0}$ strobe mix\nnothing\n```\n\n```\nstrobe stir\n```\n```\n{0}```\n"
    said = {"blend a": SAID, "mix": "nothing\n", "stir": SAID}
    assert shown.rewritten(page.format(output), said.__getitem__) == page.format(new)
