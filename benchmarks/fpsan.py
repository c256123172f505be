"""The Blackwell forward on a Hopper GPU: Triton's FpSan replaces its arithmetic, and tensor memory, by integers.

FpSan (Triton 3.9) turns sums, products, matrix products and exp2 into operations of a ring of integers modulo 2^w, whose
results do not depend on the order of sums. What is left of the kernel is everything else: roles, barriers, TMA, rings, phases,
which columns of tensor memory hold what. No tcgen05 instruction is among it, so that the code for sm_100 can be assembled for
sm_90a. A plain Triton kernel computes the same formulas, a block after the other. Both must give the same bits.

    python benchmarks/fpsan.py          every case; exits with 1 if one differs from the reference or a mistake does not

Two things that the kernel does with numbers mean nothing among these integers. The polynomial exp2 works on the bits of floats:
every case has `emulated=0`. And their order is another, so that the least of the factors of O does not tell whether all are
1: in the copy of the kernel that runs here O is always rescaled. FpSan is no test of missing barriers and fences (Triton's
guide, "Floating-Point Sanitizer"). Pairs of CTAs cannot be assembled: sm_90a lacks the `.cta_group::2` of their TMA copies.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver
from triton.runtime._allocation import set_profile_allocator

from strobe.call import launches
from strobe.device import arch_of
from strobe.kernels.sm100 import forward, launch
from strobe.kernels.sm100.config import Config
from strobe.masks import Causal, Full
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.scores import LOG2E

ALWAYS_RESCALE = ("if gl.min(factor, 0) < 1.0:", "if C.q_stages > 0:")
FP16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """edit: a mistake to make in forward.py, after which the results must differ."""

    n_q: int
    n_kv: int
    causal: bool
    dtype: torch.dtype
    config: Config
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    edit: tuple[str, str] | None = None


def config(head_dim: int, head_dim_v: int | None = None, **more) -> Config:
    return Config(head_dim, head_dim_v or head_dim, emulated=0, rescale_threshold=0.0, **more)


CASES = (
    Case(512, 256, False, FP16, config(64)),
    Case(512, 512, True, FP16, config(64)),
    Case(512, 512, False, BF16, config(64, tile_kv=64, kv_stages=4)),
    Case(512, 512, True, FP16, config(64, tile_kv=64, correction=False)),
    Case(512, 512, False, FP16, config(64, split_p=False, q_stages=1)),
    Case(300, 333, True, BF16, config(64, tile_kv=64), heads=(4, 2), batch=2),
    Case(333, 300, False, FP16, config(64), heads=(2, 1)),
    Case(200, 200, True, FP16, config(64, tile_kv=64), heads=(40, 8), batch=8),  # more tiles than CTAs
    Case(300, 400, True, FP16, config(96, tile_kv=64), heads=(2, 1)),
    Case(512, 512, True, BF16, config(128, kv_stages=2)),
    Case(512, 400, False, FP16, config(128, tile_kv=64, kv_stages=3), heads=(2, 2)),
    Case(300, 512, True, BF16, config(192, 128, tile_kv=64, kv_stages=2), heads=(2, 1)),
    Case(512, 512, False, FP16, config(64), edit=("row_sum = row_sum * factor +", "row_sum = row_sum +")),
    Case(512, 512, False, FP16, config(64), edit=("v[c].slice(part * SIZE, SIZE)", "v[c].slice(0, SIZE)")),
    Case(512, 512, False, FP16, config(64), edit=("use_acc=c > 0", "use_acc=True")),
)


@triton.jit
def reference(q, k, v, out, n_q, n_kv, scale, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
              D_V: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
              TILE_Q: tl.constexpr):  # fmt: skip
    """ROWS rows of one head of q, k, v and out [heads, rows, dim]: the formulas of the kernel, in its order of blocks."""
    head = tl.program_id(1)
    q, k, v, out = q + head * n_q * D, k + head * n_kv * D, v + head * n_kv * D_V, out + head * n_q * D_V
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    q_rows = tl.load(q + rows[:, None] * D + d[None, :], mask=(rows < n_q)[:, None] & (d < D)[None, :], other=0.0)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    end = n_kv
    if CAUSAL:
        end = tl.minimum(end, tl.minimum((tl.program_id(0) * ROWS // TILE_Q + 1) * TILE_Q, n_q) + n_kv - n_q)
    blocks = tl.maximum(tl.cdiv(end, KEYS), 1)
    for g in range(blocks):
        keys = (blocks - 1 - g) * KEYS + tl.arange(0, KEYS)
        there = (keys < n_kv)[:, None]
        k_rows = tl.load(k + keys[:, None] * D + d[None, :], mask=there & (d < D)[None, :], other=0.0)
        v_rows = tl.load(v + keys[:, None] * D_V + d[None, :], mask=there & (d < D_V)[None, :], other=0.0)
        s = tl.dot(q_rows, tl.trans(k_rows))
        if MASKED:
            s = tl.where((keys < n_kv)[None, :], s, float("-inf"))
        if CAUSAL:
            s = tl.where(keys[None, :] <= rows[:, None] + (n_kv - n_q), s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        new_max = tl.where(new_max - row_max > 0.0, new_max, row_max)
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        factor = tl.exp2(row_max - shift)
        p = tl.exp2(s * scale - shift[:, None])
        row_sum = row_sum * factor + tl.sum(p, 1)
        acc = acc * factor[:, None] + tl.dot(p.to(q_rows.dtype), v_rows)
        row_max = new_max
    acc = acc * tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
    place = out + rows[:, None] * D_V + d[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(rows < n_q)[:, None] & (d < D_V)[None, :])


class _CallsItself100:
    """The driver of the GPU that is there, which says that it is an sm_100."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def get_current_target(self):
        return GPUTarget("cuda", 100, 32)


@contextlib.contextmanager
def compiled_for_100_assembled_for_90():
    """Within it, Triton compiles kernels for sm_100 and assembles them for sm_90a. RuntimeError if tcgen05 is left in one."""
    real, make_cubin, arch_name = driver.active, nvidia.CUDABackend.make_cubin, nvidia.sm_arch_from_capability

    def retargeted(self, source, *rest):
        if "tcgen05" in source:
            raise RuntimeError("FpSan has left a tcgen05 instruction in the kernel")
        return make_cubin(self, source.replace(".target sm_100a", ".target sm_90a"), *rest)

    driver.set_active(_CallsItself100(real))
    nvidia.CUDABackend.make_cubin, nvidia.sm_arch_from_capability = retargeted, lambda capability: "sm_90a"
    try:
        yield
    finally:
        nvidia.CUDABackend.make_cubin, nvidia.sm_arch_from_capability = make_cubin, arch_name
        driver.set_active(real)


def altered(edits: list[tuple[str, str]], folder: str):
    """forward.py with some texts, each of which it has once, replaced."""
    source = Path(forward.__file__).read_text()
    for before, after in edits:
        if source.count(before) != 1:
            raise ValueError(f"forward.py has {before!r} {source.count(before)} times, not once")
        source = source.replace(before, after)
    path = Path(folder) / "altered_forward.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("altered_forward", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def by_heads(x: torch.Tensor, group: int = 1) -> torch.Tensor:
    """[batch, rows, heads, dim] -> [batch * heads * group, rows, dim]."""
    return x.transpose(1, 2).repeat_interleave(group, 1).flatten(0, 1).contiguous()


def agreeing(case: Case, kernel: Any) -> tuple[int, int]:
    """How many elements of the output have the bits of the reference's, of how many."""
    config, (heads_q, heads_kv) = case.config, case.heads
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(case.batch, n, heads, dim, device="cuda").to(case.dtype)
        for n, heads, dim in (
            (case.n_q, heads_q, config.head_dim),
            (case.n_kv, heads_kv, config.head_dim),
            (case.n_kv, heads_kv, config.head_dim_v),
        )
    )
    problem = AttentionProblem(
        lengths=Dense(case.batch, case.n_q, case.n_kv), heads_q=heads_q, heads_kv=heads_kv, head_dim=config.head_dim,
        head_dim_v=config.head_dim_v, dtype=case.dtype, scale=config.head_dim**-0.5, mask=Causal() if case.causal else Full(),
    )  # fmt: skip
    group = heads_q // heads_kv
    flat = by_heads(q), by_heads(k, group), by_heads(v, group)
    expected = torch.empty(*flat[0].shape[:2], config.head_dim_v, dtype=case.dtype, device="cuda")
    grid = (triton.cdiv(case.n_q, 64), flat[0].shape[0])
    padded = triton.next_power_of_2(config.head_dim)
    reference[grid](*flat, expected, case.n_q, case.n_kv, problem.scale * LOG2E,
                    64, config.tile_kv, config.head_dim, config.head_dim_v, padded, case.causal,
                    case.causal or case.n_kv % config.tile_kv != 0, config.tile_q)  # fmt: skip
    with compiled_for_100_assembled_for_90():
        tensors = launches.allocated(launch.buffers(problem, config), Operands(q, k, v)._asdict())
        call = launch.forward_call(problem, tensors, arch_of(q.device), config)
        call._replace(kernel=kernel.forward_kernel).launch()
    out = tensors.out
    same = by_heads(out).view(torch.int16) == expected.view(torch.int16)
    return int(same.sum()), same.numel()


def run(number: int) -> None:
    case = CASES[number]
    triton.knobs.compilation.instrumentation_mode = "fpsan"
    set_profile_allocator(lambda size, _alignment, _stream: torch.zeros(size, dtype=torch.int8, device="cuda"))
    with tempfile.TemporaryDirectory() as folder:
        edits = [ALWAYS_RESCALE] if case.edit is None else [ALWAYS_RESCALE, case.edit]
        same, elements = agreeing(case, altered(edits, folder))
    mask = "causal" if case.causal else "full"
    mistake = f", with {case.edit[1]!r} for {case.edit[0]!r}" if case.edit else ""
    print(f"{case.batch} x {case.heads} heads, {case.n_q} x {case.n_kv}, {mask}, {case.config}{mistake}: "
          f"{same} of {elements} elements are the reference's", flush=True)  # fmt: skip
    sys.exit((same == elements) != (case.edit is None))


def main() -> None:
    """Each case in a process of its own, several at a time."""
    if len(sys.argv) == 2:
        run(int(sys.argv[1]))
    here, at_once, failed = os.path.abspath(__file__), max(1, (os.cpu_count() or 2) - 2), []
    for first in range(0, len(CASES), at_once):
        numbers = range(first, min(first + at_once, len(CASES)))
        running = [subprocess.Popen([sys.executable, here, str(number)]) for number in numbers]
        failed += [number for number, process in zip(numbers, running, strict=True) if process.wait()]
    print(f"{len(CASES)} cases, failed: {failed or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
