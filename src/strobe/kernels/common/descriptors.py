"""What TMA is told of a tensor: blocks of rows of one head, in dense tensors and in packed sequences."""

import functools

import torch

from strobe.kernels.gluon import TensorDescriptor, gl, gluon

FAR = gl.constexpr(1 << 30)
"""The number of rows of a packed tensor to TMA: see `descriptor`."""

ENDLESS = 0x7FFF0000
GLUON_DTYPES = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}  # fmt: skip


@gluon.jit
def coordinates(descriptor, start, n, batch, head, row, column):
    """Where a block begins that starts at `row` of a sequence of n rows: see `descriptor`."""
    if len(descriptor.block_type.shape) == 5:
        return FAR, start + n, head, FAR - n + row, column
    else:
        return batch, head, row, column


@gluon.jit
def one_or_two(first, second):
    """The descriptors of all chunks, none where the first is None."""
    if first is None:
        return ()
    elif second is None:
        return (first,)
    else:
        return (first, second)


def descriptor(x: torch.Tensor, rows: int, columns: int, halved: int | None = None) -> TensorDescriptor:
    """A TMA descriptor of [batch, n, heads, dim], or of packed rows [total, heads, dim], in blocks of one head, of which two
    CTAs halve the rows (0) or the columns (1).

    Packed rows have two dims more, so that the hardware ends a block where its sequence ends: the row dim is FAR long,
    and the last row of a sequence is taken as its last; another dim, with the same stride, moves the whole sequence, and
    the first makes up for FAR: FAR times its stride, 2^34 less a row, is 2^64 elements less FAR rows. (The idea is
    Triton's, `triton.tools.ragged_tma`.)
    """
    n, heads, _ = x.stride()[-3:]
    # A dim of size 1 is never stepped along, but its stride must be a legal one.
    heads = heads if x.shape[-2] > 1 else x.shape[-1]
    if x.dim() == 3:
        shape = [ENDLESS, ENDLESS, x.shape[1], FAR.value, x.shape[2]]
        strides = [2**34 - n, n, heads, n, 1]
    else:
        shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
        strides = [x.stride(0) if x.shape[0] > 1 else x.shape[3], heads, n if x.shape[1] > 1 else x.shape[3], 1]
    block = [1] * (len(shape) - 2) + [rows, columns]
    return TensorDescriptor(x, shape, strides, block, layout_of(tuple(block), x.dtype, halved))


@functools.cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype, halved: int | None = None) -> gl.NVMMASharedLayout:
    """The swizzle of a block; finding it takes as long as the rest of a descriptor."""
    halves = None if halved is None else [[int(dim == len(block) - 2 + halved) for dim in range(len(block))]]
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype], cga_layout=halves)
