"""The rate of mma.sync by itself: a loop of products on registers, so that nothing else can be the limit."""

from __future__ import annotations

import torch

from strobe.device import arch_of
from strobe.lab.bench.bench import CudaClock
from strobe.ladder.gluon import gl, gluon, mma_v2

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
M, N, K = (gl.constexpr(size) for size in (64, 128, 64))
TURNS = 4096


@gluon.jit
def products(x, out, turns):
    """Adds the product of the same operands `turns` times; every CTA stores its sum, so that nothing is left out."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    value = gl.load(x)
    a = gl.full([M, K], value, x.dtype.element_ty, A)
    b = gl.full([K, N], value, x.dtype.element_ty, B)
    acc = gl.zeros([M, N], gl.float32, MMA)
    for _ in range(turns):
        acc = mma_v2(a, b, acc)
    rows = gl.program_id(0) * M + gl.arange(0, M, gl.SliceLayout(1, MMA))
    gl.store(out + rows[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, MMA))[None, :], acc)


def mma_flops(device: torch.device, dtype: torch.dtype, clock: CudaClock) -> float:
    """FLOP/s of mma.sync m16n8k16 on all multiprocessors, accumulating in float32."""
    programs = 2 * arch_of(device).sms
    x = torch.full((1,), 2.0**-10, dtype=dtype, device=device)
    out = torch.empty(programs * M.value, N.value, device=device)
    seconds = min(clock.seconds(lambda: products[(programs,)](x, out, TURNS, num_warps=4), 1) for _ in range(3))
    want = TURNS * K.value * 2.0**-20
    if not torch.allclose(out, torch.full_like(out, want)):
        raise RuntimeError(f"the products' sum is not {want}")
    return programs * TURNS * 2 * M.value * N.value * K.value / seconds
