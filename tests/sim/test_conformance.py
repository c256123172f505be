"""The simulator gives the answers that a GPU gives: the same small kernels run in one and on the other."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import conformance_machine
import conformance_registers
import pytest
import torch
from conformance import check

CASES = [*conformance_registers.CASES, *conformance_machine.CASES]
OLDEST_TRITON = Path(sys.prefix) / "triton-3.6"


@pytest.mark.parametrize("order", ["in_order", "random", "late", "early", "timed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_the_simulator(case, order):
    """In whatever order asynchronous work finishes."""
    from strobe.sim import simulate  # the tests on a GPU take no simulator

    def launch(kernel, grid, *arguments, **options):
        simulate(kernel, grid, *arguments, arch=case.arch, order=order, seed=3, **options)

    check(case, launch, "cpu")


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
import conformance_machine, conformance_registers
from strobe.lab.offline import pretend_gpu
for case in conformance_registers.CASES + conformance_machine.CASES:
    for capability in {case.arch, 90}:
        with pretend_gpu(capability):
            case.kernel.warmup(*case.arguments("cpu")[0], grid=case.grid, **case.options())
    print("compiled", case)
"""


@pytest.mark.parametrize("triton", ["oldest Triton", "installed Triton"])
def test_the_compiler_takes_them(triton):
    """All of them, for the oldest GPU that they ask about and for Hopper."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton == "oldest Triton":
        if not OLDEST_TRITON.exists():
            pytest.skip("`make test` installs Triton 3.6 in .venv/triton-3.6; it is not there")
        environment["PYTHONPATH"] = str(OLDEST_TRITON)
    command = [sys.executable, "-c", COMPILE, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled") == len(CASES)


def test_a_store_before_the_start_is_found():
    """The one question to which an H200 gives no answer: it stops with an illegal instruction, so no GPU test asks it."""
    from strobe.sim import OutOfBounds, simulate

    case = next(case for case in CASES if str(case) == "TMA stores a box and clips it at the end")
    moved = replace(case, arguments=conformance_machine.writes(conformance_machine.VALUES[:16], -3, -8))
    with pytest.raises(OutOfBounds, match=r"conformance_machine.py:\d+ in store_box stores a box at \[-3, -8\] of .*before"):
        check(moved, lambda kernel, grid, *given, **options: simulate(kernel, grid, *given, arch=90, **options), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case):
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < case.arch or (case.arch == 90 and major != 9):
        pytest.skip(f"asks about sm_{case.arch}")

    def launch(kernel, grid, *arguments, **options):
        kernel[grid](*arguments, **options)

    check(case, launch, "cuda")
