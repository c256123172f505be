"""Under which key Triton looks for a kernel on disk: it must not depend on what the process did before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from strobe.call.triton_internals import hash_called_first
from strobe.kernels.sm90.backward_pre_post import prepare
from strobe.kernels.common.dependent_launch import take_program_turn
if "patched" in sys.argv:
    hash_called_first()
if "called first" in sys.argv:
    take_program_turn.cache_key
print(prepare.cache_key)
"""


@pytest.mark.parametrize("folder", ["triton-3.6", None], ids=["oldest Triton", "installed Triton"])
def test_a_key_does_not_depend_on_which_functions_came_earlier(folder):
    path = [str(Path(__file__).parents[2] / "src")]
    if folder is not None:
        path.insert(0, str(Path(sys.prefix) / folder))
        if not Path(path[0]).is_dir():
            pytest.skip("`make test` installs Triton 3.6 in .venv/triton-3.6; it is not there")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path)

    def key(*how: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, *how], env=environment, capture_output=True, text=True, timeout=200, check=True
        ).stdout

    assert key("patched") == key("patched", "called first")
    if folder is not None:
        assert key() != key("called first")  # what the patch is for
