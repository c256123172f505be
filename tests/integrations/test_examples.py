"""The GEMMs under examples/: what the compiler makes of them, their numbers in the simulator, and on a GPU."""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from tritons import TRITONS, compiling, output_of

GEMM = Path(__file__).parents[2] / "examples" / "gemm"
OLDEST_ARCH = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0)}
sys.path.insert(0, str(GEMM))


def example(name: str):
    if name == "sm100":
        pytest.importorskip("triton", minversion="3.8")
    return loaded(name)


@cache
def loaded(name: str):
    """The module from its file: benchmarks that other tests import bear the same names."""
    spec = importlib.util.spec_from_file_location(f"gemm_{name}", GEMM / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operands(m: int, n: int, k: int, dtype=torch.float16, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, generator=generator).to(dtype).to(device) for rows in (m, n))
    return a, b


def check(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """c = a b^T, in float64, up to the rounding of c's type and of sums in float32."""
    want = a.double() @ b.double().T
    torch.testing.assert_close(c.double(), want, rtol=2 * torch.finfo(c.dtype).eps, atol=1e-4 * a.shape[1] ** 0.5)


# ---- offline, on the oldest and on the installed Triton

AUDIT = """
import dataclasses, importlib, json, sys, torch
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import audit
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    a, b, c = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((200, 264), (304, 264), (200, 304)))
    grid, arguments, constants = module.launch_arguments(a, b, c)
    with pretend_gpu(int(name.removeprefix("sm"))):
        compiled = module.matmul_kernel.warmup(*arguments, grid=grid, **constants)
    print(json.dumps(dataclasses.asdict(audit(compiled, name))))
"""
INSTRUCTIONS = {
    "sm80": ("LDGSTS", "LDGDEPBAR", "LDSM", "HMMA"),
    "sm90": ("UTMALDG", "HGMMA", "SYNCS", "UTMASTG"),
    "sm100": ("UTMALDG", "UTCHMMA", "UTCBAR", "LDTM", "UTMASTG"),
}


@pytest.mark.parametrize("triton", TRITONS)
def test_what_the_compiler_makes_of_them(triton):
    names = ["sm80", "sm90"] if triton == "oldest Triton" else ["sm80", "sm90", "sm100"]
    printed = output_of(AUDIT, str(GEMM), *names, triton=triton)
    audits = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [audit["name"] for audit in audits] == names
    for audit in audits:
        assert audit["spill_bytes"] == 0, audit["name"]
        assert not [warning for warning in audit["warnings"] if "C75" in warning], audit["warnings"]  # a wgmma made serial
        for instruction in INSTRUCTIONS[audit["name"]]:
            assert audit["instructions"].get(instruction), (audit["name"], instruction)


# ---- in the simulator

SMALL = {
    "sm80": {"block_m": 64, "block_n": 64, "block_k": 64},
    "sm90": {"block_n": 64, "stages": 2, "ctas": 2},
    "sm100": {"block_n": 128, "stages": 2, "ctas": 2},
}


@pytest.mark.parametrize("order", ["in_order", "random", "late", "early", "uneven"])
@pytest.mark.parametrize("name", SMALL)
def test_in_the_simulator(name, order):
    """Two CTAs and several tiles for each, none of whose sides the tile divides."""
    from strobe.sim import simulate

    module = example(name)
    a, b = operands(200, 296, 136)
    c = torch.full((200, 296), float("nan"), dtype=a.dtype)
    grid, arguments, constants = module.launch_arguments(a, b, c, **SMALL[name])
    simulate(module.matmul_kernel, grid, *arguments, arch=int(name.removeprefix("sm")), order=order, seed=1, **constants)
    check(c, a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they run there")
@pytest.mark.parametrize("name", SMALL)
def test_as_a_script(name):
    from strobe.sim import ORDERS

    done = subprocess.run([sys.executable, GEMM / f"{name}.py"], capture_output=True, text=True, env=compiling())
    assert done.returncode == 0, done.stderr
    assert "needs a GPU" in done.stdout and done.stdout.count("the same as torch") == len(ORDERS)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 8), (200, 304, 264), (1000, 1000, 1000), (4001, 2048, 520), (128, 256, 64)], ids=str)
def test_on_a_gpu(name, dtype, shape):
    module, here = example(name), torch.cuda.get_device_capability()
    if here < OLDEST_ARCH[name] or (name != "sm80" and here[0] != OLDEST_ARCH[name][0]):
        pytest.skip(f"{name} does not run on compute capability {here}")
    a, b = operands(*shape, dtype, "cuda")
    check(module.matmul(a, b), a, b)


@pytest.mark.gpu
def test_rows_that_no_tile_divides():
    """The Ampere GEMM stores by masks, so N may be odd."""
    a, b = operands(77, 131, 72, device="cuda")
    check(example("sm80").matmul(a, b), a, b)


def test_what_is_refused():
    a, b = operands(64, 64, 60)
    c = torch.empty(64, 64, dtype=a.dtype)
    with pytest.raises(ValueError, match="a multiple of 8, got K = 60"):
        example("sm80").launch_arguments(a, b, c)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        example("sm90").launch_arguments(a, b, c)
