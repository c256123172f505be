"""A Gluon and a Triton kernel that take every kind of argument, for tests of launches."""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from strobe.kernels.gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
)

ROWS, COLUMNS = gl.constexpr(64), gl.constexpr(64)


@gluon.jit(do_not_specialize=["n", "large"])
def scale_rows(x_desc, sums, absent, n, large, factor, y_desc, NUM_WARPS: gl.constexpr):
    """y = factor * x + large % 7, tile by tile; sums: of y's rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    fence_async_shared()
    row = gl.program_id(0) * ROWS
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma_load(x_desc, [row, 0], full, tile)
    mbarrier.wait(full, 0)
    y = tile.load(layout).to(gl.float32) * factor + (large % 7).to(gl.float32)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    gl.store(sums + rows, gl.sum(y, 1), mask=rows < n)
    tile.store(y.to(x_desc.dtype))
    fence_async_shared()
    tma_store(y_desc, [row, 0], tile)
    tma_store_wait(0)


def descriptor(x):
    layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, COLUMNS.value], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [ROWS.value, COLUMNS.value], layout)


def scale_rows_arguments(x, y, sums, factor=2.0):
    """For x and y [n, 64] bfloat16 and sums [n] float32: grid, arguments, keywords. `large` does not fit in 32 bits."""
    n = x.shape[0]
    arguments = (descriptor(x), sums, None, n, 2**40 + 3, factor, descriptor(y))
    return (triton.cdiv(n, ROWS.value),), arguments, {"NUM_WARPS": 4, "num_warps": 4}


Matrix = namedtuple("Matrix", "base row column")


@triton.jit(do_not_specialize=["n"])
def add_one(x, y, n, negative: tl.constexpr, BLOCK: tl.constexpr):
    """y = x + 1 (less 1 if negative), whose matrices are tuples of an address and strides."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    value = tl.load(x.base + row * x.row + columns * x.column, mask=columns < n)
    tl.store(y.base + row * y.row + columns * y.column, value + (-1 if negative else 1), mask=columns < n)


def add_one_arguments(x, y):
    arguments = (Matrix(x, *x.stride()), Matrix(y, *y.stride()), x.shape[1])
    return (x.shape[0],), arguments, {"negative": False, "BLOCK": triton.next_power_of_2(x.shape[1])}


def rows(n, device):
    """x, y, sums for `scale_rows`."""
    x = torch.arange(n * COLUMNS.value, device=device).remainder(101).view(n, COLUMNS.value).to(torch.bfloat16)
    return x, torch.zeros_like(x), torch.zeros(n, device=device)
