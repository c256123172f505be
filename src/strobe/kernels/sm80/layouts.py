"""How warps hold tiles in registers and in shared memory, where products are mma.sync."""

from strobe.kernels.gluon import gl, gluon


@gluon.constexpr_function
def product_layout(warps, across=1):
    """A result [rows, columns] of mma.sync: warps lie along the rows, `across` of them beside each other."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps // across, across], instr_shape=[16, 8])


@gluon.constexpr_function
def left(layout, width=2):
    """The left operand of a product whose result has a layout; a lane has `width` neighbours in a row. With 2 it has what the
    result of another product has."""
    return gl.DotOperandLayout(operand_index=0, parent=layout, k_width=width)


@gluon.constexpr_function
def right(layout, width=2):
    """The right operand of a product whose result has a layout; a lane has `width` neighbours in a column."""
    return gl.DotOperandLayout(operand_index=1, parent=layout, k_width=width)


@gluon.constexpr_function
def unit_of(dtype):
    """How many numbers 16 bytes have."""
    return 128 // dtype.primitive_bitwidth


@gluon.constexpr_function
def swizzled(columns, dtype):
    """Shared memory of rows: the 16-byte units of the eight rows that an ldmatrix reads at a time are in different banks. A row
    of fewer than 128 bytes, which all banks have, shares them with its neighbours."""
    units = columns // unit_of(dtype)
    return gl.SwizzledSharedLayout(unit_of(dtype), per_phase=max(1, 8 // units), max_phase=min(8, units), order=[1, 0])


@gluon.constexpr_function
def in_rows(columns, warps, dtype):
    """Which threads copy which 16 bytes of a tile: neighbours in a row, rows among warps."""
    lanes = min(32, columns // unit_of(dtype))
    return gl.BlockedLayout([1, unit_of(dtype)], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def along(layout, rank, dim):
    """A vector along one dim of a tensor with a layout and so many dims."""
    for other in range(rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout
