"""What type checkers make of a user's program: they know what is returned, and find what is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import strobe

USER = Path(__file__).parent / "typed_user.py"
SOURCE = Path(strobe.__file__).parents[1]


def wrong_lines() -> set[int]:
    return {number for number, line in enumerate(USER.read_text().splitlines(), 1) if line.endswith("# wrong")}


@pytest.mark.exhaustive
def test_mypy(tmp_path):
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", str(USER)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"MYPYPATH": str(SOURCE)})
    found = {int(line) for line in re.findall(r"^[^\n]*typed_user\.py:(\d+): error:", run.stdout, re.MULTILINE)}
    assert found == wrong_lines(), run.stdout + run.stderr


def test_pyright(tmp_path):
    """Pyright is not among what `make test` installs: it brings its own program from another registry."""
    pyright = shutil.which("pyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if pyright is None:
        pytest.skip("needs pyright: pip install pyright")
    shutil.copy(USER, tmp_path)
    places = {"include": [USER.name], "extraPaths": [str(SOURCE)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(places))
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    reports = json.loads(run.stdout)["generalDiagnostics"]
    errors = [report for report in reports if report["severity"] == "error"]
    assert {report["range"]["start"]["line"] + 1 for report in errors} == wrong_lines(), errors
