"""The Hopper forward under ConSan, Triton's concurrency sanitizer, which is compiled into a kernel: it follows, on the GPU, who
may see which shared memory, and stops the kernel where an access is ordered by no barrier and no wait.

    python benchmarks/consan.py       every case; exits with 1 if one is stopped or wrong, or a mistake made on purpose is not

The problems are small: it puts the accesses of the whole GPU in a row. A kernel takes many times as long to compile with it:
each case runs in a process of its own, as many at a time as there are CPUs. It needs Triton 3.9: with 3.6 no case has compiled
in 15 minutes. It does not see a buffer that is given back while a product still reads it (`strobe.sim` does).
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

import torch
import triton
from triton.runtime._allocation import set_profile_allocator

from strobe import Causal, Full, Mask, Window
from strobe.kernels.sm90 import forward, launch
from strobe.kernels.sm90.config import Config
from strobe.lab import forward_alone
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import dense

LIMIT_SECONDS = 240
"""Of a case: to compile it takes 30 to 150. What a mistake leaves waiting for ever ends here too."""


@dataclass(frozen=True)
class Case:
    """edit: text of the kernel and what takes its place, a mistake. With three groups of consumers ConSan is slow: one block of
    keys is done in 105 seconds on an H200, with compilation, five blocks are not in 500."""

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
    Case(Full(), Config(64, 64, 3, 64, 3), n_q=192, n_kv=64),
    Case(Full(), Config(64, 64, 3, 64, 2, q_stages=1), n_q=192, n_kv=192),
    Case(Causal(), Config(96, 96, 2, 64, 2)),
    Case(Causal(), Config(128, 128, 2, 64, 2, o_buffers=2)),
    Case(Causal(), Config(64, 64, 2, 64, 2, optimistic=False)),
    Case(Causal(), TWO_STAGES, edit=('    k.wait(g)\n    stamp(trace, w, "k_ready", g)\n    s = start', "    s = start")),
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
    lengths, dims = Dense(1, case.n_q, case.n_kv), (config.head_dim, config.head_dim_v)
    problem = AttentionProblem(lengths, 2, 1, *dims, dtype=torch.bfloat16, scale=dims[0] ** -0.5, mask=case.mask)
    q = torch.randn(1, case.n_q, 2, dims[0], dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, case.n_kv, 1, dim, dtype=torch.bfloat16, device="cuda") for dim in dims)
    if case.edit is not None:
        launch.forward_kernel = altered(case.edit, folder).forward_kernel
    out = forward_alone.launch(problem, Operands(q, k, v), config).out
    torch.cuda.synchronize()
    expected, _ = dense.attention(problem, Operands(q, k, v))
    torch.testing.assert_close(out.double(), expected.double(), atol=2e-2, rtol=2e-2)


@dataclass
class Run:
    """A case in a process of its own: what it says, and when it must have ended."""

    case: Case
    process: subprocess.Popen
    output: IO[bytes]
    end: float

    def ended(self) -> bool:
        return self.process.poll() is not None or time.monotonic() > self.end

    def report(self) -> bool:
        """Prints what became of it; whether that is as it should be."""
        case = self.case
        result = {None: f"not done after {LIMIT_SECONDS} s", 0: "clean and right"}.get(self.process.poll(), "stopped")
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its compiler too
        mistake = f", without {case.edit[0].strip().splitlines()[0]!r}" if case.edit else ""
        as_it_should = (result == "clean and right") if case.edit is None else (result == "stopped")
        print(f"{'ok ' if as_it_should else 'BAD'} {case.mask}, {case.config}{mistake}: {result}", flush=True)
        self.output.seek(0)
        said = self.output.read().decode(errors="replace").splitlines()
        reasons = [line for line in said if "ssert" in line or "Error" in line]
        for line in dict.fromkeys(reasons[:4] if result == "stopped" else []):
            print(f"      {line[:300]}", flush=True)
        return as_it_should


def started(number: int) -> Run:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call
    command = [sys.executable, os.path.abspath(__file__), str(number)]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    return Run(CASES[number], process, output, time.monotonic() + LIMIT_SECONDS)


def main() -> None:
    if len(sys.argv) == 2:
        with tempfile.TemporaryDirectory() as folder:
            run(CASES[int(sys.argv[1])], Path(folder))
        return
    at_once, waiting, running, good = max(1, os.cpu_count() or 1), [*range(len(CASES))], list[Run](), 0
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(started(waiting.pop(0)))
        for done in [one for one in running if one.ended()]:
            running.remove(done)
            good += done.report()
        time.sleep(0.2)
    print(f"Triton {triton.__version__}: {good} of {len(CASES)} cases as they should be")
    sys.exit(good < len(CASES))


if __name__ == "__main__":
    main()
