"""The simulator gives the answers that a GPU gives: the same small kernels run in one and on the other."""

from dataclasses import replace
from pathlib import Path

import conformance_barriers
import conformance_machine
import conformance_registers
import conformance_tma
import pytest
import torch
from conformance import check
from tritons import TRITONS, output_of

MODULES = (conformance_registers, conformance_machine, conformance_barriers, conformance_tma)
CASES = [case for module in MODULES for case in module.CASES]


@pytest.mark.parametrize("order", ["in_order", "random", "late", "early", "timed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_the_simulator(case, order):
    """In whatever order asynchronous work finishes."""
    from strobe.sim import named_barrier_arrive, named_barrier_sync, register, simulate  # the tests on a GPU take none

    register(conformance_barriers.named_arrive, named_barrier_arrive)
    register(conformance_barriers.named_sync, named_barrier_sync)

    def launch(kernel, grid, *arguments, **options):
        simulate(kernel, grid, *arguments, arch=case.arch, order=order, seed=3, **options)

    check(case, launch, "cpu")


COMPILE = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from strobe.lab.binary.offline import pretend_gpu
for case in [case for module in sys.argv[2:] for case in importlib.import_module(module).CASES]:
    for capability in {case.arch, 90}:
        with pretend_gpu(capability):
            case.kernel.warmup(*case.arguments("cpu")[0], grid=case.grid, **case.options())
print("compiled all")
"""


@pytest.mark.parametrize("triton", TRITONS)
def test_the_compiler_takes_them(triton):
    """All of them, for the oldest GPU that they ask about and for Hopper."""
    modules = [module.__name__ for module in MODULES]
    assert output_of(COMPILE, str(Path(__file__).parent), *modules, triton=triton) == "compiled all\n"


@pytest.mark.parametrize("row, column", [(-3, -8), (-3, 8), (4, -8), (-16, 0), (0, -64), (-20, 0), (0, -72), (-1, 0), (0, -1)])
def test_a_store_before_the_start_is_found(row, column):
    """A question to which an H200 gives no answer: at each of these places it stops with an illegal instruction, so no GPU test
    asks it."""
    from strobe.sim import OutOfBounds, simulate

    case = next(case for case in CASES if str(case) == "TMA stores a box and clips it at the end")
    moved = replace(case, arguments=conformance_machine.writes(conformance_machine.VALUES[:16], row, column))
    with pytest.raises(OutOfBounds, match=rf"in store_box stores a box at \[{row}, {column}\] of .*before its start"):
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
