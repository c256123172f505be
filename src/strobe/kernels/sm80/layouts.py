"""How warps hold tiles in registers and in shared memory, where products are mma.sync."""

from strobe.kernels.gluon import gl, gluon


@gluon.constexpr_function
def product_layout(warps, across=1):
    """A result [rows, columns] of mma.sync: warps lie along the rows, `across` of them beside each other."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps // across, across], instr_shape=[16, 8])


@gluon.constexpr_function
def left(layout):
    """The left operand of a product whose result has a layout: 16-bit numbers."""
    return gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)


@gluon.constexpr_function
def right(layout):
    """The right operand of a product whose result has a layout: 16-bit numbers."""
    return gl.DotOperandLayout(operand_index=1, parent=layout, k_width=2)


@gluon.constexpr_function
def swizzled(columns):
    """Shared memory of 16-bit rows: the 16-byte units of the eight rows that an ldmatrix reads at a time are in different
    banks. A row of fewer than 64 columns shares the 128 bytes of all banks with its neighbours."""
    return gl.SwizzledSharedLayout(vec=8, per_phase=max(1, 64 // columns), max_phase=min(8, columns // 8), order=[1, 0])


@gluon.constexpr_function
def in_rows(columns, warps):
    """Which threads copy which 16 bytes of a tile: neighbours in a row, rows among warps."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def along(layout, rank, dim):
    """A vector along one dim of a tensor with a layout and so many dims."""
    for other in range(rank - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout
