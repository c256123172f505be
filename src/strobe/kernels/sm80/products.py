"""Products by mma.sync, summed in float32: of 16-bit numbers as they are, of float32 in three products of TF32.

A float32 has 24 bits, an operand of TF32 11. So x = big + small, big the upper bits and small what is left, and

    a b = big big + big small + small big,    less than 2^-19 of it missing: small small, and the last bits of each small

The tensor cores cut off what a sum has no room for, they do not round. So what a block gives is summed by itself, the large
products and the small ones apart, and then added up by the other units.
"""

from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from strobe.kernels.gluon import gl, gluon
from strobe.kernels.sm80.layouts import left, right

STEP = gl.constexpr(16)
"""Columns of float32 operands that are in registers at a time: Triton 3.6 takes no fewer."""

BY_LDMATRIX = gl.constexpr(1)
"""How many neighbours of a row of float32 a lane has, if ldmatrix reads it."""


@gluon.jit
def parts(x):
    """float32 as (big, small): see above."""
    big = (x.to(gl.int32, bitcast=True) & -0x2000).to(gl.float32, bitcast=True)
    return big, x - big


@gluon.jit
def add_three(big, small, a, b):
    """The sums (big, small) with the products of A and B, which are given in `parts`."""
    small = mma_v2(a[1], b[0], small, input_precision="tf32")
    small = mma_v2(a[0], b[1], small, input_precision="tf32")
    return mma_v2(a[0], b[0], big, input_precision="tf32"), small


@gluon.jit
def total(big, small, CAREFUL: gl.constexpr):
    """The sum of both. CAREFUL: where an infinity came in, big knows, and small is a NaN that counts for nothing."""
    if CAREFUL:
        small = gl.where(small * 0.0 == 0.0, small, 0.0)
    return big + small


@gluon.jit
def rows_by_rows(a, b, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr, CAREFUL: gl.constexpr = False):
    """A B^T, [M, N], summed over columns. a: chunks in shared memory or, of 16-bit numbers, left operands; b: chunks in shared
    memory. CAREFUL: see `total`."""
    s = gl.full([M, N], 0.0, gl.float32, LAYOUT)
    if b[0].dtype == gl.float32:
        small = gl.full([M, N], 0.0, gl.float32, LAYOUT)
        for c in gl.static_range(len(b)):
            for i in gl.static_range(b[c].shape[1] // STEP):
                x = a[c].slice(i * STEP, STEP, dim=1).load(left(LAYOUT, BY_LDMATRIX))
                y = b[c].slice(i * STEP, STEP, dim=1).permute((1, 0)).load(right(LAYOUT, BY_LDMATRIX))
                s, small = add_three(s, small, parts(x), parts(y))
        s = total(s, small, CAREFUL)
    else:
        for c in gl.static_range(len(b)):
            x = a[c] if isinstance(a[c], gl.tensor) else a[c].load(left(LAYOUT))
            s = mma_v2(x, b[c].permute((1, 0)).load(right(LAYOUT)), s)
    return s


@gluon.jit
def add_product(acc, a, b, LAYOUT: gl.constexpr, CAREFUL: gl.constexpr = False):
    """acc + A B, of operands in registers. CAREFUL: see `total`."""
    if a.dtype == gl.float32:
        nothing = gl.full(acc.shape, 0.0, gl.float32, LAYOUT)
        big, small = add_three(nothing, nothing, parts(a), parts(b))
        acc = acc + total(big, small, CAREFUL)
    else:
        acc = mma_v2(a, b, acc)
    return acc


@gluon.jit
def add_products(acc, a, b, LAYOUT: gl.constexpr):
    """Each chunk of acc with A times that of B. a: a left operand; b: chunks in shared memory."""
    new = ()
    for c in gl.static_range(len(b)):
        new += (add_product(acc[c], a, b[c].load(right(LAYOUT)), LAYOUT),)
    return new
