"""Measures the ceilings of the GPU in this machine, by a matrix product, a copy, and exponentials in registers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import triton
import triton.language as tl

from strobe.device import GIB, arch_of
from strobe.lab.bench.bench import CudaClock
from strobe.lab.model.roofline import Ceilings

_MATMUL = 8192
_UNROLLED, _SIZE, _WARPS = 16, 1024, 8
_SECONDS = 0.03
"""How long one timing is. An untimed lead of the same length goes before, because the GPU's clock answers to its power of the
last tens of milliseconds."""
_ROUNDS = 5


@triton.jit
def exp2_chains(out, n, UNROLLED: tl.constexpr, SIZE: tl.constexpr):
    """Fills out [programs, SIZE] by chains of n * UNROLLED exponentials x -> 2^-x, each of the result of the one before."""
    place = tl.arange(0, SIZE)
    x = place.to(tl.float32) / SIZE
    for _ in range(n):
        for _ in tl.static_range(UNROLLED):
            x = tl.exp2(-x)
    tl.store(out + tl.program_id(0) * SIZE + place, x)


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures the ceilings of a CUDA GPU, at the clock of its matrix product. Takes some seconds. Shared memory is not timed:
    it gives 128 bytes a cycle in each multiprocessor. ValueError without a CUDA GPU, and for fp8."""
    if device.type != "cuda":
        raise ValueError("roofline: measuring ceilings needs a CUDA GPU; without one name a GPU with --arch")
    if dtype.itemsize < 2:
        raise ValueError("roofline: measuring ceilings takes bf16, fp16 or fp32, got fp8; name a GPU with --arch")
    arch = arch_of(device)
    x = torch.randn(_MATMUL, _MATMUL, device=device).to(dtype)
    product, clock = _timed(lambda: x @ x, device)
    turns, programs = 64, 8 * arch.sms
    out = torch.empty(programs, _SIZE, device=device)
    chains, own_clock = _timed(lambda: exp2_chains[(programs,)](out, turns, _UNROLLED, _SIZE, num_warps=_WARPS), device)
    source = torch.empty(max(8 * arch.l2_bytes, GIB), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy, _ = _timed(lambda: target.copy_(source), device)
    return Ceilings(
        name=f"{arch.name} here",
        matmul=2 * _MATMUL**3 / product,
        exp2=turns * _UNROLLED * out.numel() / chains * clock / own_clock,
        smem=128 * arch.sms * clock,
        hbm=2 * source.numel() / copy,
        clock=clock,
        source=f"measured: {_MATMUL} x {_MATMUL} x {_MATMUL}, exp2 in registers, a copy; shared memory: 128 bytes a clock",
    )


def _timed(launch: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds of a launch and the mean clock of the multiprocessors in Hz, both as medians over some rounds."""
    clock = CudaClock(device)
    with clock.running():
        once = [clock.seconds(launch, 1) for _ in range(2)][-1]
        number, rounds = max(1, round(_SECONDS / once)), []
        for _ in range(_ROUNDS):
            clock.seconds(launch, number)
            rounds.append((clock.seconds(launch, number), (clock.mhz() or 0.0) * 1e6))
    return median(seconds for seconds, _ in rounds), median(hz for _, hz in rounds)
