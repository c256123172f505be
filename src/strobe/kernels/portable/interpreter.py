"""A mend of Triton's interpreter (3.6 to 3.9 at least), which keeps bfloat16 as its bits in uint16.

Its `tl.dot` multiplies those bits as integers, and its cast from float32 cuts the lower half off where a GPU rounds to
nearest even. Both give wrong numbers and no error. And it runs no assembly, of which here a kernel taking its turn is all: it
runs one launch after the other.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from strobe.kernels.common import dependent_launch


def mend() -> None:
    """Make the interpreter compute bfloat16 as a GPU does; does nothing unless TRITON_INTERPRET=1, or a second time."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    if not hasattr(InterpreterBuilder, "strobe_mended"):
        InterpreterBuilder.strobe_mended = True
        _mend_dot(InterpreterBuilder)
        _mend_cast(InterpreterBuilder)
        _mend_assembly(InterpreterBuilder)


def float32_of_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16 as its bits -> float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of_float32(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as its bits, rounded to nearest even; a NaN stays one."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _mend_dot(builder) -> None:
    from triton.runtime.interpreter import TensorHandle

    theirs = builder.create_dot

    def create_dot(self, a, b, d, *options):
        if a.dtype.scalar != tl.bfloat16:
            return theirs(self, a, b, d, *options)
        product = np.matmul(float32_of_bits(a.data), float32_of_bits(b.data))
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


def _mend_cast(builder) -> None:
    from triton.runtime.interpreter import TensorHandle

    theirs = builder.cast_impl

    def cast_impl(self, source, to):
        kinds = source.dtype.scalar, to.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(float32_of_bits(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(bits_of_float32(np.ascontiguousarray(source.data)), tl.bfloat16)
        return theirs(self, source, to)

    builder.cast_impl = cast_impl


def _mend_assembly(builder) -> None:
    from triton.runtime.interpreter import TensorHandle

    theirs = builder.create_inline_asm

    def create_inline_asm(self, assembly, constraints, values, kinds, *options):
        if assembly not in (dependent_launch.PTX.value, dependent_launch.LAST.value):
            return theirs(self, assembly, constraints, values, kinds, *options)
        nothing = TensorHandle(np.zeros(1, np.int32), tl.int32)
        nothing.get_result = lambda _number: nothing
        return nothing

    builder.create_inline_asm = create_inline_asm
