"""Conversions of numbers of 16 bits that keep two of them in a register. After a plain conversion the compiler keeps each in a
register of its own, and converts them one by one, at the pace of exponentials, if they are also wanted in 32 bits again."""

from strobe.kernels.gluon import gl, gluon


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """Round float32 to bfloat16 or float16; neighbours in x's order of registers become pairs."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def widened(x):
    """Convert bfloat16 or float16 back to float32."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
            "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip


PTX_OF_E4M3 = gl.constexpr("""{
    .reg .b32 apart;
    .reg .b16 first, second;
    prmt.b32 apart, $2, 0, 0x3120;
    mov.b32 {first, second}, apart;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")
PTX_OF_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")


@gluon.jit
def unpacked(pairs, KIND: gl.constexpr):
    """The first and the second of each pair of float8 numbers, which int16 holds, as float16: of two pairs in one register both
    first ones are in one again, and both second ones."""
    return gl.inline_asm_elementwise(PTX_OF_E5M2 if gl.float8e5 == KIND else PTX_OF_E4M3, "=r,=r,r", [pairs],
                                     dtype=(gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip


PTX_TO_HALF = gl.constexpr("""{
    .reg .b16 first, second;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.KINDx2 $0, first;
    cvt.rn.f16x2.KINDx2 $1, second;
}""")
PTX_TO_BF16 = gl.constexpr("""{
    .reg .b16 first, second, a, b;
    .reg .b32 half;
    .reg .f32 x, y;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.KINDx2 half, first;
    mov.b32 {a, b}, half;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.rn.f16x2.KINDx2 half, second;
    mov.b32 {a, b}, half;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    cvt.rn.bf16x2.f32 $1, y, x;
}""")


@gluon.constexpr_function
def ptx_of_widening(kind, dtype):
    ptx = PTX_TO_BF16 if dtype == gl.bfloat16 else PTX_TO_HALF
    return ptx.value.replace("KIND", "e5m2" if kind == gl.float8e5 else "e4m3")


@gluon.jit
def widened_8_bits(x, dtype: gl.constexpr):
    """Convert e4m3 or e5m2 to bfloat16 or float16, exactly. A plain conversion to bfloat16 is one by one, at the pace of
    exponentials."""
    PTX: gl.constexpr = ptx_of_widening(x.dtype, dtype)
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(PTX, "=r,=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        return gl.inline_asm_elementwise(PTX, "=r,=r,r", [x], dtype=gl.float16, is_pure=True, pack=4)
