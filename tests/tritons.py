"""Which Triton a test needs, and programs that tests run in a process of their own, where Triton compiles."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from strobe.kernels import triton_version

needs_tcgen05 = pytest.mark.skipif(triton_version() < (3, 8), reason="the Blackwell kernel needs Triton 3.8 or newer")

VERSIONS = {"oldest Triton": "3.6", "Triton 3.8": "3.8", "installed Triton": "{}.{}".format(*triton_version())}
"""What tests call a Triton -> how its version begins."""
TRITONS = ["oldest Triton", "installed Triton"]


def compiling(triton: str = "installed Triton", path: Iterable[Path] = (), **variables: str) -> dict[str, str]:
    """The environment of a program that compiles by this Triton and does not interpret, with more folders of modules and
    more variables. Warnings are not printed, unless PYTHONWARNINGS is one of these."""
    folders = [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
    if triton != "installed Triton":
        name = f"triton-{VERSIONS[triton]}"
        folders.insert(0, Path(sys.prefix) / name)
        if not folders[0].exists():
            pytest.skip(f"`make test` installs Triton {VERSIONS[triton]} in .venv/{name}; it is not there")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONWARNINGS": "ignore"} | variables


def output_of(program: str, *arguments: str, timeout: float | None = None, **environment: Any) -> str:
    """What a program prints, which must not fail. Its environment: what `compiling` takes."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=compiling(**environment))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def answer_of(program: str, *arguments: str, **environment: Any) -> Any:
    """What the last line that a program prints says in JSON."""
    return json.loads(output_of(program, *arguments, **environment).splitlines()[-1])


def answer_by(triton: str, program: str, *arguments: str) -> dict:
    """The answer, a dict, of a program that this Triton runs, and that names under "triton" its version."""
    answer = answer_of(program, *arguments, triton=triton)
    assert answer["triton"].startswith(VERSIONS[triton]), answer["triton"]
    return answer
