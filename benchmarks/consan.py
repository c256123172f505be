"""The Hopper forward under ConSan, Triton's concurrency sanitizer, which is compiled into a kernel: it follows, on the GPU, who
may see which shared memory, and stops the kernel where an access is ordered by no barrier and no wait.

    python benchmarks/consan.py       every case; exits with 1 if one is stopped or wrong, or a mistake made on purpose is not

A kernel takes many times as long to compile with it: each case runs in a process of its own, as many at a time as there are
CPUs. It needs Triton 3.9: with 3.6 no case has compiled in 15 minutes.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton.runtime._allocation import set_profile_allocator

from strobe import Causal, Full, Mask, Window
from strobe.kernels.sm90 import forward, launch
from strobe.kernels.sm90.config import Config
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import dense

LIMIT_SECONDS = 90
"""Of the cases that run at a time. What a mistake leaves waiting for ever ends here too."""


@dataclass(frozen=True)
class Case:
    """edits: text of the kernel and what takes its place, a mistake."""

    mask: Mask
    config: Config
    n_q: int = 300
    n_kv: int = 330
    edit: tuple[str, str] | None = None


TWO_STAGES = Config(64, 64, 2, 64, 2)
CASES = (
    Case(Full(), TWO_STAGES),
    Case(Causal(), TWO_STAGES),
    Case(Window(37, 11), TWO_STAGES),
    Case(Causal(), Config(64, 64, 2, 64, 3, q_stages=1)),
    Case(Causal(), Config(64, 64, 3, 64, 3)),
    Case(Causal(), Config(96, 96, 2, 64, 2)),
    Case(Causal(), Config(128, 128, 2, 64, 2, o_buffers=2)),
    Case(Causal(), Config(64, 64, 2, 64, 2, optimistic=False)),
    Case(Causal(), TWO_STAGES, edit=('    k.wait(g)\n    stamp(trace, w, "k_ready", g)\n    s = start', "    s = start")),
    Case(
        Causal(),
        TWO_STAGES,
        edit=(
            '    acc = wait_output(acc)\n    stamp(trace, w, "o_ready", before)\n    v.release(before)\n',
            '    v.release(before)\n    acc = wait_output(acc)\n    stamp(trace, w, "o_ready", before)\n',
        ),
    ),
    Case(Causal(), Config(128, 128, 2, 64, 2), edit=("        tma_store_wait(C.o_buffers - 1)", "        # ")),
)


def altered(edit: tuple[str, str], folder: Path) -> ModuleType:
    """A copy of the kernel's module with other text, which must stand in it once."""
    before, after = edit
    source = Path(str(forward.__file__)).read_text()
    if source.count(before) != 1:
        sys.exit(f"the kernel must have this once, it has it {source.count(before)} times: {before!r}")
    path = folder / "altered_forward.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location("altered_forward", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(case: Case, folder: Path) -> None:
    """Exits with 0 if the kernel was not stopped and is right."""
    triton.knobs.compilation.instrumentation_mode = "consan"

    def scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int8, device="cuda")

    triton.set_allocator(scratch)
    set_profile_allocator(scratch)
    config = case.config
    lengths, dims = Dense(2, case.n_q, case.n_kv), (config.head_dim, config.head_dim_v)
    problem = AttentionProblem(lengths, 4, 2, *dims, dtype=torch.bfloat16, scale=dims[0] ** -0.5, mask=case.mask)
    q = torch.randn(2, case.n_q, 4, dims[0], dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(2, case.n_kv, 2, dim, dtype=torch.bfloat16, device="cuda") for dim in dims)
    if case.edit is not None:
        launch.forward_kernel = altered(case.edit, folder).forward_kernel
    out, _, _ = launch.launch(problem, Operands(q, k, v), config)
    torch.cuda.synchronize()
    expected, _ = dense.attention(problem, Operands(q, k, v))
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=2e-2)


def started(number: int) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, os.path.abspath(__file__), str(number)], **pipes)


def ended(number: int, process: subprocess.Popen, seconds: float) -> bool:
    """Waits for a case, prints what became of it; whether that is as it should be."""
    case = CASES[number]
    try:
        said, _ = process.communicate(timeout=seconds)
        result = "clean and right" if process.returncode == 0 else "stopped"
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        result = f"not done after {LIMIT_SECONDS} s"
    reasons = [line for line in said.splitlines() if "ssert" in line or "Error" in line]
    mistake = f", without {case.edit[0].strip().splitlines()[0]!r}" if case.edit else ""
    as_it_should = (result == "clean and right") if case.edit is None else (result == "stopped")
    print(f"{'ok ' if as_it_should else 'BAD'} {case.mask}, {case.config}{mistake}: {result}", flush=True)
    for line in dict.fromkeys(reasons[:4] if result == "stopped" else []):
        print(f"      {line[:300]}", flush=True)
    return as_it_should


def main() -> None:
    if len(sys.argv) == 2:
        with tempfile.TemporaryDirectory() as folder:
            run(CASES[int(sys.argv[1])], Path(folder))
        return
    at_once, good = max(1, os.cpu_count() or 1), []
    for first in range(0, len(CASES), at_once):
        running = [(number, started(number)) for number in range(first, min(first + at_once, len(CASES)))]
        end = time.monotonic() + LIMIT_SECONDS
        good += [ended(number, process, max(1.0, end - time.monotonic())) for number, process in running]
    print(f"Triton {triton.__version__}: {sum(good)} of {len(good)} cases as they should be")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
