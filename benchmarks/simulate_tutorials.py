"""What the simulator finds in Triton's own Gluon tutorials and in its attention example: kernels that nobody here wrote.

    git clone https://github.com/triton-lang/triton
    python benchmarks/simulate_tutorials.py triton            # every kernel below, in every order; a minute or two
    python benchmarks/simulate_tutorials.py triton 08         # those whose name holds "08"

Nothing of Triton's is copied here: the files are imported from the checkout, their own host code makes the launches, and a
launch goes to the simulator instead of to a GPU. No GPU is needed, but a Triton that has the names that the files use. Exits
with 1 if something else is found than the table below expects. docs/upstream.md says what is wrong, and how to mend it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.runtime.jit import KernelInterface

from strobe.kernels import triton_version
from strobe.sim import register, simulate
from strobe.sim.tensor import Tensor, compute

TUTORIALS, EXAMPLES = "python/tutorials/gluon", "python/examples/gluon"

RUNS = (("in_order", 0), *(("random", seed) for seed in range(3)), ("late", 0), ("early", 0),
        *(("uneven", number) for number in range(3)))  # fmt: skip
"""Orders and their seeds."""


@dataclass(frozen=True)
class Case:
    """A kernel of a file, run by `run(module)`, which raises AssertionError if its results are wrong. expected: of an error,
    its class and words of its message; None: it is right. sms: multiprocessors, among which a persistent kernel divides its
    tiles."""

    file: str
    what: str
    arch: int
    run: Callable[[ModuleType], None]
    expected: tuple[str, str] | None = None
    sms: int = 1
    folder: str = TUTORIALS

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def _random(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _product(call: Callable[..., None], m: int, n: int, k: int) -> None:
    a, b, c = _random(m, k), _random(k, n), torch.full((m, n), torch.nan, dtype=torch.float16)
    call(a, b, c)
    torch.testing.assert_close(c, (a.float() @ b.float()).half(), rtol=1e-3, atol=1e-1)


def _sum(call: Callable[..., None], m: int, n: int) -> None:
    a, b, c = _random(m, n, dtype=torch.float32), _random(n, m, dtype=torch.float32).T.contiguous(), torch.zeros(m, n)
    call(a, b, c)
    torch.testing.assert_close(c, a + b)


def _copy(call: Callable[..., None], n: int) -> None:
    x, y = _random(n, dtype=torch.float32), torch.zeros(n)
    call(x, y)
    torch.testing.assert_close(x, y)


def _persistent(module: ModuleType, call: str, *numbers: int, m=192, n=192, k=304) -> None:
    scheduler = getattr(module, "t7", module).PersistentTileScheduler
    _product(lambda a, b, c: getattr(module, call)(a, b, c, *numbers, scheduler), m, n, k)


def _attention(module: ModuleType) -> None:
    # Which registers hold what is not simulated.
    module._get_join_n_layout = module._get_split_n_layout = lambda *_: gl.AutoLayout()
    q, k, v = (_random(1, 1, 512, 64) for _ in range(3))
    out, lse = module.attention_forward(q, k, v, False, 0.125)[:2]
    scores = q.float() @ k.float().transpose(-1, -2) * 0.125
    torch.testing.assert_close(out.float(), torch.softmax(scores, -1) @ v.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1) / 0.6931472, rtol=1e-2, atol=1e-2)


def _two_ctas(module: ModuleType) -> None:
    a, b, c = _random(256, 64), _random(64, 128), torch.zeros(256, 128).half()
    module.run_two_cta_tcgen05(a, b, c)


CASES = [
    Case("03-async-copy", "copy", 90, lambda m: _copy(lambda x, y: m.memcpy_1d_cpasync(x, y, 128), 1000)),
    Case("03-async-copy", "sum, pipelined", 90, lambda m: _sum(partial(m.elementwise_add_pipelined, num_buffers=2), 70, 200)),
    Case("04-tma", "copy", 90, lambda m: _copy(lambda x, y: m.memcpy_1d_tma(x, y, 64), 500)),
    Case("04-tma", "sum", 90, lambda m: _sum(partial(m.elementwise_add_tma, num_buffers=2), 64, 200)),
    Case("05-wgmma", "product", 90, lambda m: _product(lambda *t: m.blocked_matmul(*t, 64, 64, 64, False, 4), 100, 80, 136)),
    Case("05-wgmma", "product, pipelined", 90,
         lambda m: _product(lambda *t: m.blocked_matmul_pipelined(*t, 64, 64, 64, 4), 104, 80, 200)),
    Case("06-tcgen05", "product", 100, lambda m: _product(lambda *t: m.blocked_matmul(*t, 64, 64, 64, False, 4), 104, 80, 136)),
    Case("06-tcgen05", "product, pipelined", 100,
         lambda m: _product(lambda *t: m.blocked_matmul_pipelined(*t, 64, 64, 64, 4), 208, 80, 200)),
    Case("07-persistence", "pipelined", 90,
         lambda m: _product(lambda *t: m.matmul_pipelined(*t, 64, 64, 64, 3, 4), 104, 80, 200)),
    Case("07-persistence", "persistent", 90, lambda m: _persistent(m, "persistent_matmul", 64, 64, 64, 3, 4)),
    Case("07-persistence", "persistent, pipelined", 90,
         lambda m: _persistent(m, "persistent_matmul_pipelined", 64, 64, 64, 3, 4), ("Unfinished", "TMA load")),
    Case("07-persistence", "persistent, pipelined, stealing B", 90,
         lambda m: _persistent(m, "persistent_matmul_pipelined", 128, 128, 64, 4, 4, k=256),
         ("IllegalOperation", "past the end of b_bufs")),
    Case("08-warp-specialization", "sum", 90,
         lambda m: _sum(lambda *t: m.elementwise_add_warp_specialized(*t, 32, 64, 2, 2, 4), 64, 200)),
    Case("08-warp-specialization", "product", 100,
         lambda m: _persistent(m, "matmul_warp_specialized", 128, 256, 64, 2, 4, 4, m=384, n=512, k=128),
         ("Deadlock", "acc_empty")),
    Case("14-multicta", "two CTAs", 100, _two_ctas, ("Unfinished", "TMA store")),
    Case("01-attention-forward", "forward", 100, _attention, ("DoubleWrite", ""), folder=EXAMPLES),
]  # fmt: skip


def _joined(x: Tensor, y: Tensor) -> Tensor:
    """Two float32 in the 64 bits of one number."""
    return compute("free", lambda a, b: torch.stack([a, b], -1).contiguous().view(torch.int64).squeeze(-1), x, y)


def _parts(x: Tensor) -> list[Tensor]:
    return [compute("free", lambda a, i=i: a.contiguous().unsqueeze(-1).view(torch.float32)[..., i], x) for i in (0, 1)]


def _of_pairs(operation: Callable) -> Callable:
    return lambda *pairs: _joined(*(operation(*parts) for parts in zip(*map(_parts, pairs), strict=True)))


PAIRS = {
    "mov.b64 $0, { $1, $2 };": _joined,
    "mov.b64 { $0, $1 }, $2;": lambda x: tuple(_parts(x)),
    "add.f32x2 $0, $1, $2;": _of_pairs(lambda a, b: a + b),
    "sub.f32x2 $0, $1, $2;": _of_pairs(lambda a, b: a - b),
    "mul.f32x2 $0, $1, $2;": _of_pairs(lambda a, b: a * b),
    "fma.rn.f32x2 $0, $1, $2, $3;": _of_pairs(lambda a, b, c: a * b + c),
}
"""What simulates the assembly of the attention example."""


@contextlib.contextmanager
def simulated(case: Case, order: str, seed: int) -> Iterator[None]:
    """Within it launches are simulated, and PyTorch and Triton speak of a GPU of the case's arch."""

    def launcher(kernel, grid):
        def launch(*args, **kwargs):
            sizes = grid(kwargs) if callable(grid) else grid
            simulate(kernel, sizes, *args, arch=case.arch, order=order, seed=seed, triton=(3, 8), **kwargs)

        return launch

    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="cuda", arch=case.arch, warp_size=32))
    with (
        mock.patch.object(KernelInterface, "__getitem__", launcher),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(case.arch, 10)),
        mock.patch.object(
            torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=case.sms, L2_cache_size=2**20)
        ),
        mock.patch.object(triton.runtime.driver, "_active", target),
    ):
        yield


def found(case: Case, root: Path, order: str, seed: int) -> str:
    """The error's class and message; "right"."""
    folder = str(root / case.folder)
    sys.path.insert(0, folder)
    try:
        supply_float2(root)
        with simulated(case, order, seed):
            case.run(imported(root / case.folder / f"{case.file}.py"))
        return "right"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        sys.path.remove(folder)


def supply_float2(root: Path) -> None:
    """Pairs of floats as the checkout has them, if its Triton is older than the installed one, which has dropped the module."""
    path = root / "python/triton/experimental/gluon/language/nvidia/blackwell/float2.py"
    if path.exists() and not hasattr(blackwell, "float2"):
        name = f"{blackwell.__name__}.float2"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        sys.modules[name] = blackwell.float2 = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(blackwell.float2)
    for text, model in PAIRS.items():
        register(text, model)


def imported(path: Path) -> ModuleType:
    """A file as a module, without the benchmarks that it runs as it is imported."""
    source = re.sub(r"^benchmark_\w+\(\)$", "pass", path.read_text(), flags=re.MULTILINE)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    return module


def as_expected(case: Case, outcome: str) -> bool:
    if case.expected is None:
        return outcome == "right"
    error, words = case.expected
    return outcome.startswith(error) and words in outcome


def main(root: Path, names: str = "") -> int:
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=60).stdout
    print(f"Triton {'.'.join(map(str, triton_version()))} runs the files of {commit.strip() or root}")
    surprises = 0
    for case in CASES:
        if names not in str(case):
            continue
        outcomes = {f"{order} {seed}": found(case, root, order, seed) for order, seed in RUNS}
        surprises += not any(as_expected(case, outcome) for outcome in outcomes.values())
        expected = "right" if case.expected is None else ": ".join(case.expected)
        print(f"\n{case} (expected: {expected})")
        for outcome in dict.fromkeys(outcomes.values()):
            orders = [order for order in outcomes if outcomes[order] == outcome]
            print(f"    {', '.join(orders)}: {outcome}", flush=True)
    return int(surprises > 0)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
