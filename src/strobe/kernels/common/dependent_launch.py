"""Programmatic dependent launch (Hopper and later): a launch may begin before the one ahead of it in its stream has ended.

A kernel that is launched with `launch_pdl` sets up what only it knows, its barriers, say, and takes its turn before it touches
memory that others read or write. From then on the next launch may begin, and waits for its own turn.

A CTA of every launch takes its turn, and so does whoever touches memory: a launch only knows that the one ahead has ended, and
relies on it for those before. If the launch ahead took its turn before it let this one begin, those before it have ended when
a CTA begins, and what they wrote may be read ahead of the turn.

A short launch that ends a call lets the next one begin before its own turn: what that does ahead of its turn, and its way to
the multiprocessors, hides behind the long launch ahead of both. That needs room beside its CTAs, and shared memory that is
parted as the next launch needs it: a multiprocessor does that only when it is idle. So kernels of a step over a cache all ask
for the same (`call.launcher.Driver.carve_out_all`).
"""

import triton
import triton.language as tl

from strobe.kernels.gluon import gl, gluon

PTX = tl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;")
BEGIN = tl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
LAST = tl.constexpr("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, 0;")


@gluon.jit
def let_next_begin():
    """Let the next launch begin, ahead of the own turn. One role does it for all."""
    gl.inline_asm_elementwise(BEGIN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn():
    """Wait until the launches ahead have ended and what they wrote is seen. One role does it for all: the kernel's first warps
    before the roles begin, or the producer, for which all others wait before they touch memory."""
    gl.inline_asm_elementwise(PTX, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@triton.jit
def take_program_turn():
    """Wait until the launches ahead have ended and what they wrote is seen, in a kernel in plain Triton."""
    tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take_last_turn():
    """Let the next launch begin, then wait until the launches ahead have ended and what they wrote is seen: in a short kernel,
    in plain Triton, that ends a call."""
    tl.inline_asm_elementwise(LAST, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
