"""Compares an example with torch: on the GPU that it is for, with the times, or else in the simulator, on the CPU."""

from collections.abc import Callable

import torch
import triton


def check(
    matmul: Callable, kernel: Callable, launch_arguments: Callable, oldest: tuple[int, int], newest: tuple[int, int]
) -> None:
    """oldest, newest: the compute capabilities that the kernel is for. AssertionError if its numbers are wrong."""
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if here is None or not oldest <= here <= newest:
        print(f"needs a GPU of compute capability {oldest} to {newest}, and here is {here or 'none'}: simulated on the CPU")
        simulated(kernel, launch_arguments, arch=10 * oldest[0] + oldest[1])
    else:
        timed(matmul)


def operands(m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k, dtype=torch.float16, device=device), torch.randn(n, k, dtype=torch.float16, device=device)


def timed(matmul: Callable) -> None:
    m, n, k = 4001, 4000, 4104  # no multiples of a tile
    a, b = operands(m, n, k, "cuda")
    torch.testing.assert_close(matmul(a, b), a @ b.T, atol=0.1, rtol=0.01)
    ours, theirs = (triton.testing.do_bench(f) for f in (lambda: matmul(a, b), lambda: a @ b.T))
    print(f"[{m}, {k}] @ [{k}, {n}]: the same as torch; {ours:.3f} ms, torch {theirs:.3f} ms")


def simulated(kernel: Callable, launch_arguments: Callable, arch: int) -> None:
    from strobe.sim import ORDERS

    for order in ORDERS:
        launch = small_launch(kernel, launch_arguments, arch)
        launch.simulate(order)
        launch.check()
        print(f"asynchronous work in the order {order!r}: the same as torch")


def small_launch(kernel: Callable, launch_arguments: Callable, arch: int):
    """A launch for the simulator: no size is a multiple of a tile, and persistent CTAs have several tiles."""
    from strobe.sim import Launch

    m, n, k = 300, 520, 264
    a, b = operands(m, n, k, "cpu")
    c = torch.full((m, n), float("nan"), dtype=a.dtype)
    grid, arguments, constants = launch_arguments(a, b, c)

    def compare() -> None:
        torch.testing.assert_close(c.float(), a.float() @ b.float().T, atol=0.1, rtol=0.01)

    return Launch(kernel, grid, arguments, constants, arch, check=compare)
