"""Powers of two by polynomial, for kernels whose special-function units are the bottleneck (Blackwell's, as Hopper's, do
16 exp2 a clock on a multiprocessor, its FMA pipe 128 multiply-adds). The idea is FlashAttention-4's."""

from strobe.kernels.gluon import PropagateNan, gl, gluon

# The minimax polynomial of degree 3 for 2^f, f in [-1/2, 1/2], by Remez' algorithm on the relative error.
C0 = gl.constexpr(0.99992807)
C1 = gl.constexpr(0.69326099)
C2 = gl.constexpr(0.24261112)
C3 = gl.constexpr(0.05517167)

# A float32 of this size has a unit in the last place of 1: adding it rounds to an integer, which then stands in the low
# bits of the mantissa. The 127 is the bias of an exponent.
ROUND = gl.constexpr(3.0 * 2**22 + 127)
KEEP_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def exp2_flushed(x):
    """2^x, and 0 below 2^-126: the instruction alone, without the two products and the comparison that make smaller numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2_polynomial(x):
    """2^x for x <= 127, with a relative error below 7.6e-5 down to 2^-126, and 0 below; a NaN stays one.

    x = n + f with n an integer and f in [-1/2, 1/2]: 2^x = 2^n 2^f, where 2^n is n moved into the exponent's bits.
    """
    x = gl.maximum(x, -127.0, propagate_nan=KEEP_NAN)
    rounded = x + ROUND
    f = x - (rounded - ROUND)
    power = gl.fma(gl.fma(gl.fma(C3, f, C2), f, C1), f, C0)
    return power * (rounded.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def exp2_mixed(x, EMULATED: gl.constexpr):
    """2^x for x [rows, columns], where the last EMULATED of 16 parts of the columns are computed by polynomial."""
    if EMULATED == 0:
        return gl.exp2(x)
    elif EMULATED == 16:
        return exp2_polynomial(x)
    else:
        rows: gl.constexpr = x.shape[0]
        columns: gl.constexpr = x.shape[1]
        left, right = x.reshape([rows, 2, columns // 2]).permute(0, 2, 1).split()
        both = gl.join(gl.exp2(left), exp2_mixed(right, 2 * EMULATED))
        return gl.convert_layout(both.permute(0, 2, 1).reshape([rows, columns]), x.type.layout)
