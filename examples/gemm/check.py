"""Runs an example on the GPU: are its numbers those of torch, and how long does it take."""

import sys
from collections.abc import Callable

import torch
import triton


def check(matmul: Callable, oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Compare matmul(a, b) with a @ b.T on a GPU whose compute capability lies in [oldest, newest]; exits without one."""
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if here is None or not oldest <= here <= newest:
        sys.exit(
            f"needs a GPU of compute capability {oldest} to {newest}, and here is {here or 'none'}. On a CPU:\n"
            "    grid, arguments, constants = launch_arguments(a, b, c)\n"
            f"    strobe.sim.simulate(matmul_kernel, grid, *arguments, arch={10 * oldest[0] + oldest[1]}, **constants)"
        )
    m, n, k = 4001, 4000, 4104  # no multiples of a tile
    a, b = torch.randn(m, k, device="cuda", dtype=torch.float16), torch.randn(n, k, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(matmul(a, b), a @ b.T, atol=0.1, rtol=0.01)
    ours, theirs = (triton.testing.do_bench(f) for f in (lambda: matmul(a, b), lambda: a @ b.T))
    print(f"[{m}, {k}] @ [{k}, {n}]: the same as torch; {ours:.3f} ms, torch {theirs:.3f} ms")
