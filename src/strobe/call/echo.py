"""Kernels that write down the arguments they got. They show whether an unknown Triton lays out parameters as known ones do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strobe.kernels.common.call import Call
from strobe.kernels.gluon import TensorDescriptor, fence_async_shared, gl, gluon, mbarrier, tma_load

SMALL, LARGE, NUMBER = 7, 2**40 + 3, 0.5
ROWS, COLUMNS = 16, 64


@triton.jit(do_not_specialize=("small", "large", "number"))
def echo_numbers(out, pair, small, large, number, beside):
    """Write to out, int64 [5]: the pair's pointer's value, the pair's number, small, large; last, 1 if number is 0.5, plus 2
    times the value at beside."""
    tl.store(out, tl.load(pair[0]).to(tl.int64))
    tl.store(out + 1, pair[1].to(tl.int64))
    tl.store(out + 2, small.to(tl.int64))
    tl.store(out + 3, large.to(tl.int64))
    tl.store(out + 4, (number == 0.5).to(tl.int64) + 2 * tl.load(beside).to(tl.int64))


@gluon.jit(do_not_specialize=["small"])
def echo_tile(tile, small, out):
    """Write the sum of a tile of ones, which TMA brings, and `small` to out, float32 [2]."""
    place = gl.allocate_shared_memory(tile.dtype, tile.block_type.shape, tile.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    fence_async_shared()
    mbarrier.expect(barrier, tile.block_type.nbytes)
    tma_load(tile, [0, 0], barrier, place)
    mbarrier.wait(barrier, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = place.load(layout)
    gl.store(out, gl.sum(gl.sum(x.to(gl.float32), 1), 0))
    gl.store(out + 1, small.to(gl.float32))


Wanted = list[tuple[torch.Tensor, list[int]]]
"""Tensors, and the numbers that they hold if every argument came through."""


def calls(device: torch.device, with_tma: bool) -> tuple[list[Call], list[torch.Tensor], Wanted]:
    """The launches of the kernels, all tensors in their arguments, and what they must write."""
    given, beside = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (11, 13))
    numbers = torch.zeros(5, dtype=torch.int64, device=device)
    found = [Call(echo_numbers, (1,), (numbers, (given, 5), SMALL, LARGE, NUMBER, beside), {"num_warps": 1})]
    tensors, wanted = [numbers, given, beside], [(numbers, [11, 5, SMALL, LARGE, 1 + 2 * 13])]
    if with_tma:
        ones, sums = torch.ones(ROWS, COLUMNS, dtype=torch.float16, device=device), torch.zeros(2, device=device)
        layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)
        tile = TensorDescriptor.from_tensor(ones, [ROWS, COLUMNS], layout)
        found.append(Call(echo_tile, (1,), (tile, SMALL, sums), {"num_warps": 4}))
        tensors, wanted = [*tensors, ones, sums], [*wanted, (sums, [ROWS * COLUMNS, SMALL])]
    return found, tensors, wanted
