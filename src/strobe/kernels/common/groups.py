"""Keys of a cache that lie in shared memory by eights, with all of their columns, so that TMA copies whole keys in one box.

Shared memory is swizzled by rows of 128 bytes, a panel of 64 columns of 16 bits, and usually has all keys of a block in the
first panel, then in the next: a box for each. A group is 8 keys in all panels instead, then come the next 8, which the tensor
core reads as well, by other strides.
"""

import torch

from strobe.kernels.common.channel import swizzled
from strobe.kernels.common.descriptors import layout_of
from strobe.kernels.common.panels import GROUP_KEYS, PANEL_COLUMNS
from strobe.kernels.gluon import TensorDescriptor, gl, gluon, reinterpret
from strobe.serving.problem import page_rows

PANEL, GROUP = gl.constexpr(PANEL_COLUMNS), gl.constexpr(GROUP_KEYS)


@gluon.jit
def make_groups(dtype: gl.constexpr, number: gl.constexpr, keys: gl.constexpr, columns: gl.constexpr):
    """So many blocks of groups, [groups, 1, panels, 8, 64] each, as TMA writes them."""
    SHAPE: gl.constexpr = [number, keys // GROUP, 1, columns // PANEL, GROUP, PANEL]
    return gl.allocate_shared_memory(dtype, SHAPE, in_boxes(dtype))


@gluon.jit
def in_rows(block):
    """A block of groups as products take it, [keys, columns]."""
    KEYS: gl.constexpr = block.shape[0] * GROUP
    COLUMNS: gl.constexpr = block.shape[2] * PANEL
    return reinterpret(block, block.dtype, [KEYS, COLUMNS], in_groups(KEYS, COLUMNS))


@gluon.jit
def block_of(channel, position, C: gl.constexpr):
    """The chunks of a position of a channel as products take them, [keys, columns] each, whether they lie in groups or not."""
    if C.grouped:
        return (in_rows(channel.block(position)[0]),)
    else:
        return channel.block(position)


@gluon.jit
def in_squares(block):
    """A block of groups as squares of 8 keys and one panel, those of a group one after the other."""
    SQUARES: gl.constexpr = block.shape[0] * block.shape[2]
    return reinterpret(block, block.dtype, [SQUARES, GROUP, PANEL], swizzled(block.dtype, PANEL))


@gluon.constexpr_function
def in_boxes(dtype):
    """The layout of boxes [groups, 1, panels, 8, 64]."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.primitive_bitwidth, rank=5)


@gluon.constexpr_function
def in_groups(keys, columns):
    """The same as products read it: the steps, in key and column, of each bit of an element's number. 8 columns of a key of a
    group lie at their number XOR the key's."""
    square = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    panels = [[0, PANEL.value << i] for i in range((columns // PANEL.value).bit_length() - 1)]
    groups = [[GROUP.value << i, 0] for i in range((keys // GROUP.value).bit_length() - 1)]
    return gl.SharedLinearLayout(square + panels + groups)


def groups_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor of the groups that are those of all pages of k or v of a cache, [pages, page_size, heads, columns],
    in boxes of so many rows of one head with all columns."""
    row, head = x.stride(1), x.stride(2) if x.shape[2] > 1 else x.shape[3]
    group, panel = GROUP.value, PANEL.value
    shape = [x.shape[0] * page_rows(x) // group, x.shape[2], columns // panel, group, panel]
    block = (rows // group, 1, columns // panel, group, panel)
    return TensorDescriptor(x, shape, [group * row, head, panel, row, 1], list(block), layout_of(block, x.dtype))
