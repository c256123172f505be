"""Layouts of mma.sync's decode kernel, and numbers along them. Tensors of a step are
[token_warps, rows or keys of a warp, keys or columns]."""

from strobe.kernels.gluon import gl, gluon


@gluon.constexpr_function
def lanes(warps):
    """A number for each lane, or one for all: every warp has them, so sums need no other warp."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def product_layout(C):
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[C.token_warps, C.row_warps, C.column_warps], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def copy_layout(C, columns, width):
    """A thread copies 16 bytes, neighbours the next ones; a warp's keys are copied by it and those that share them."""
    across = min(32, columns // width)
    return gl.BlockedLayout(
        [1, 1, width], [1, 32 // across, across], [C.token_warps, C.row_warps * C.column_warps, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def ring_layout(columns, width):
    """16-byte units of a row are swizzled, so that the rows which ldmatrix reads together lie in different banks."""
    return gl.SwizzledSharedLayout(vec=width, per_phase=1, max_phase=min(8, columns // width), order=[2, 1, 0])


@gluon.constexpr_function
def result_layout(C, columns):
    """The layout of [parts or warps, rows, columns] when results are added up along the first dim, within a thread."""
    across = min(32, columns // 4)
    return gl.BlockedLayout([1, 1, 4], [1, 32 // across, across], [1, C.warps, 1], [2, 1, 0])


@gluon.jit
def along(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 ... n - 1 along an axis of a layout of rank 3."""
    if axis == 0:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    elif axis == 1:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    else:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)


@gluon.constexpr_function
def keys_of_warp(C):
    return C.tokens // C.token_warps


@gluon.jit
def first_keys_in(C: gl.constexpr, layout: gl.constexpr):
    """The number of the first key of each warp in a step, [token_warps, 1] in a layout of rank 2."""
    return gl.expand_dims(gl.arange(0, C.token_warps, gl.SliceLayout(1, layout)), 1) * keys_of_warp(C)


@gluon.jit
def keys_in(C: gl.constexpr, layout: gl.constexpr):
    """The numbers of a step's keys, [token_warps, keys of a warp] in a layout of rank 2."""
    return first_keys_in(C, layout) + gl.expand_dims(gl.arange(0, keys_of_warp(C), gl.SliceLayout(0, layout)), 0)
