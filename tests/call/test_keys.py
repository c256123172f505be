"""Under which key Triton looks for a kernel on disk: it must not depend on what the process did before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from strobe.call.triton_internals import stable_keys
from strobe.kernels.sm90.backward_pre_post import prepare
from strobe.kernels.common.dependent_launch import take_program_turn
if "patched" in sys.argv:
    stable_keys()
if "called first" in sys.argv:
    take_program_turn.cache_key
print(prepare.cache_key)
"""


def run(folder: str | None, program: str, *arguments: str) -> str:
    """What a program prints, with the Triton of a folder beside the installed packages."""
    path = [str(Path(__file__).parents[2] / "src")]
    if folder is not None:
        path.insert(0, str(Path(sys.prefix) / folder))
        if not Path(path[0]).is_dir():
            pytest.skip("`make test` installs Triton 3.6 in .venv/triton-3.6; it is not there")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.mark.parametrize("folder", ["triton-3.6", None], ids=["oldest Triton", "installed Triton"])
def test_a_key_does_not_depend_on_which_functions_came_earlier(folder):
    assert run(folder, PROGRAM, "patched") == run(folder, PROGRAM, "patched", "called first")
    if folder is not None:
        assert run(folder, PROGRAM) != run(folder, PROGRAM, "called first")  # what the patch is for


CONSTANTS_OF_ONE_NAME = """
from triton.language import constexpr
from triton.runtime.jit import DependenciesFinder
from strobe.call.triton_internals import stable_keys
stable_keys()
for values in ((1, 2), (2, 1)):
    finder, modules = DependenciesFinder("f", {}, {}, ""), sorted(({}, {}), key=id)
    for module, value in zip(modules, values):
        finder.record_reference(constexpr(value), module, "SIZE")
    print([value.value for _, (value, _) in sorted(finder.used_global_vals.items())], len(finder.used_global_vals))
"""


@pytest.mark.parametrize("folder", ["triton-3.6", None], ids=["oldest Triton", "installed Triton"])
def test_constants_of_one_name_are_sorted_by_their_values(folder):
    assert run(folder, CONSTANTS_OF_ONE_NAME) == "[1, 2] 2\n" * 2
