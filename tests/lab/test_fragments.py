"""`strobe fragments`: the formulas against Triton's layouts, on a GPU against the instructions themselves; `strobe devices`."""

import json
import re

import pytest
import torch
from commands import run
from typer.testing import CliRunner

from strobe.device import KNOWN
from strobe.lab.model.fragments import FRAGMENTS, Place, cell, facts
from strobe_cli.app import app

gl = pytest.importorskip("triton.experimental.gluon.language")

MMA = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
WGMMA = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
LAYOUTS = {
    "mma-a": (gl.DotOperandLayout(0, MMA, 2), 2),
    "mma-b": (gl.DotOperandLayout(1, MMA, 2), 2),
    "mma-c": (MMA, 1),
    "wgmma-a": (gl.DotOperandLayout(0, WGMMA, 2), 2),
    "wgmma-d": (WGMMA, 1),
}
"""Fragment -> Triton's layout of the same operand, and how many elements share a register."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_triton_has_the_same_layout(name):
    """Triton prints a matrix of T<thread>:<number of the element in the thread>."""
    layout, packed = LAYOUTS[name]
    if not hasattr(layout, "format_tensor_view"):
        pytest.skip("this Triton does not print layouts")
    one = FRAGMENTS[name]
    printed = [re.findall(r"T(\d+): ?(\d+)", line) for line in layout.format_tensor_view([one.rows, one.columns]).splitlines()]
    assert len(printed) == one.rows and all(len(line) == one.columns for line in printed)
    for row, line in enumerate(printed):
        for column, (thread, number) in enumerate(line):
            want = Place(int(thread) // 32, int(thread) % 32, int(number) // packed, int(number) % packed)
            assert one.at(row, column) == want, (row, column)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_place_is_taken_once(name):
    one = FRAGMENTS[name]
    places = [one.at(row, column) for row in range(one.rows) for column in range(one.columns)]
    assert len(set(places)) == len(places) == one.warps * 32 * one.registers * (32 // one.bits)


def test_the_command(tmp_path):
    path, picture = tmp_path / "fragments.json", tmp_path / "fragments.png"
    result = run("fragments", "mma-a", "ldmatrix.x1", "--json", str(path), "--out", str(picture))
    assert result.exit_code == 0 and "4 registers a lane of two elements each" in result.output
    found = json.loads(path.read_text())
    assert found["fragments"][0]["places"][9][11] == [0, 5, 3, 1]  # row 9, column 11: lane 5, the last register's upper half
    assert cell(found["fragments"][0]["places"][9][11], 1) == "5.3" and picture.stat().st_size > 10_000
    assert run("fragments", "mma-d").exit_code == 2
    assert facts(["mma-c"])["fragments"][0]["registers"] == 4


def test_devices(tmp_path):
    path = tmp_path / "devices.json"
    result = run("devices", "--json", str(path))
    assert result.exit_code == 0 and all(name in result.output for name in KNOWN)
    narrow = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["devices"]).output
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    found = {one["name"]: one for one in json.loads(path.read_text())["devices"]}
    assert len(found) == len(KNOWN)
    assert (found["A100"]["smem_per_block"], found["RTX 3090"]["smem_per_block"]) == (163 * 1024, 99 * 1024)
    assert found["A100"]["registers_per_thread"] == 255 and found["RTX 3090"]["warps_per_sm"] == 48


# ---- the instructions themselves


def scattered(name, matrix):
    """A matrix of 16-bit numbers as the registers that hold it: int32 [registers, 32 lanes]."""
    one, numbers = FRAGMENTS[name], matrix.view(torch.int16).tolist()
    words = [[0] * 32 for _ in range(one.registers)]
    for row in range(one.rows):
        for column in range(one.columns):
            place = one.at(row, column)
            words[place.register][place.lane] |= (numbers[row][column] & 0xFFFF) << 16 * place.half
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def gathered(name, words, dtype):
    """The matrix that registers [registers, 32 lanes] hold."""
    one = FRAGMENTS[name]
    numbers = words.view(dtype).reshape(one.registers, 32, -1)
    rows = [[one.at(row, column) for column in range(one.columns)] for row in range(one.rows)]
    return torch.stack([torch.stack([numbers[p.register, p.lane, p.half] for p in places]) for places in rows])


@pytest.fixture(scope="module")
def kernels():
    """Kernels of one warp with one instruction each."""
    from fragment_kernels import load_matrices, multiply

    return multiply, load_matrices


@pytest.mark.gpu
def test_mma_on_a_gpu(kernels):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).half() for shape in ((16, 16), (16, 8)))
    c = torch.randn(16, 8, generator=generator)
    registers = torch.empty(4, 32)
    for row in range(16):
        for column in range(8):
            place = FRAGMENTS["mma-c"].at(row, column)
            registers[place.register, place.lane] = c[row, column]
    d = torch.empty(4, 32, device="cuda")
    kernels[0][(1,)](scattered("mma-a", a).cuda(), scattered("mma-b", b).cuda(), registers.cuda(), d, num_warps=1)
    torch.testing.assert_close(gathered("mma-c", d.cpu(), torch.float32), a.float() @ b.float() + c, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_on_a_gpu(kernels, transposed):
    rows = torch.arange(32 * 8, dtype=torch.int16).reshape(32, 8)
    out = torch.empty(4, 32, dtype=torch.int32, device="cuda")
    kernels[1][(1,)](rows.view(torch.int32).cuda(), out, TRANSPOSED=transposed, num_warps=1)
    name = "ldmatrix.x4.trans" if transposed else "ldmatrix.x4"
    assert torch.equal(gathered(name, out.cpu(), torch.int16), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mma-c", "wgmma-d"])
def test_who_holds_an_accumulator_on_a_gpu(name):
    """Each thread writes its own number where its elements of a product go, and the product is right."""
    from fragment_kernels import holders_of_mma, holders_of_wgmma

    if name == "wgmma-d" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is Hopper's")
    one, kernel = FRAGMENTS[name], holders_of_wgmma if name == "wgmma-d" else holders_of_mma
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(one.rows, 16, generator=generator).half().cuda()
    b = torch.randn(16, one.columns, generator=generator).half().cuda()
    d = torch.empty(one.rows, one.columns, device="cuda")
    threads = torch.empty(one.rows, one.columns, dtype=torch.int32, device="cuda")
    kernel[(1,)](a, b, d, threads, num_warps=one.warps)
    torch.testing.assert_close(d, a.float() @ b.float(), rtol=1e-3, atol=1e-3)
    want = [[32 * one.at(r, c).warp + one.at(r, c).lane for c in range(one.columns)] for r in range(one.rows)]
    assert threads.tolist() == want
