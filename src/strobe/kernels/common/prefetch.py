"""Asks for bytes of global memory before it is known which of them a CTA needs, so that the L2 cache has them when it reads."""

import triton.language as tl

from strobe.kernels.gluon import gl, gluon

LINE = gl.constexpr(128)
PTX = tl.constexpr("{ .reg .pred p; setp.lt.s64 p, $1, $2; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }")


@gluon.jit
def prefetch(pointer, size):
    """Ask for `size` bytes from `pointer` on, a line for each thread of the grid, until all are asked for or no thread is
    left."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    lane = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    begin = pointer.to(gl.int64)
    at = begin // LINE * LINE + (gl.program_id(0) * THREADS + lane).to(gl.int64) * LINE
    ask(at, begin + size + 0 * at)


@gluon.jit
def ask(at, end):
    """Ask for the line at an address, if it is ahead of `end`."""
    gl.inline_asm_elementwise(PTX, "=r,l,l", [at, end], dtype=gl.int32, is_pure=False, pack=1)
