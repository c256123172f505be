"""Under which key Triton looks for a kernel on disk: it must not depend on what the process did before."""

import pytest
from tritons import TRITONS, output_of

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


def run(triton: str, program: str, *arguments: str) -> str:
    """What a program prints."""
    return output_of(program, *arguments, triton=triton, timeout=200)


@pytest.mark.parametrize("triton", TRITONS)
def test_a_key_does_not_depend_on_which_functions_came_earlier(triton):
    assert run(triton, PROGRAM, "patched") == run(triton, PROGRAM, "patched", "called first")
    if triton == "oldest Triton":
        assert run(triton, PROGRAM) != run(triton, PROGRAM, "called first")  # what the patch is for


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


@pytest.mark.parametrize("triton", TRITONS)
def test_constants_of_one_name_are_sorted_by_their_values(triton):
    assert run(triton, CONSTANTS_OF_ONE_NAME) == "[1, 2] 2\n" * 2
