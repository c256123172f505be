"""How Hopper's consumers hold tiles in registers."""

from strobe.kernels.gluon import gl, gluon
from strobe.kernels.sm90.config import ROWS_PER_GROUP

ROWS = gl.constexpr(ROWS_PER_GROUP)


@gluon.constexpr_function
def accumulator(columns):
    """A 64 x columns result of a wgmma, over the four warps of a group."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def rows_of(columns):
    """A vector of one value a row of such a result."""
    return gl.SliceLayout(1, accumulator(columns))


@gluon.constexpr_function
def columns_of(columns):
    """A vector of one value a column of it."""
    return gl.SliceLayout(0, accumulator(columns))


@gluon.constexpr_function
def scalar_layout(warps):
    """Layout of a single number, which all lanes of a role have."""
    return gl.BlockedLayout([1], [32], [warps], [0])
