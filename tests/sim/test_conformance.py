"""The simulator gives the answers that a GPU gives: the same small kernels run in one and on the other."""

import conformance_machine
import conformance_registers
import pytest
import torch
from conformance import check

CASES = [*conformance_registers.CASES, *conformance_machine.CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_the_simulator(case):
    from strobe.sim import simulate

    def launch(kernel, grid, *arguments, **options):
        simulate(kernel, grid, *arguments, arch=case.arch, **options)

    check(case, launch, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case):
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < case.arch or (case.arch == 90 and major != 9):
        pytest.skip(f"asks about sm_{case.arch}")

    def launch(kernel, grid, *arguments, **options):
        kernel[grid](*arguments, **options)

    check(case, launch, "cuda")
