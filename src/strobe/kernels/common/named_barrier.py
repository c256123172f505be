"""Named barriers, on which warps of different roles meet: bar.sync and bar.arrive of PTX, by numbers that Triton leaves alone.

A barrier completes when so many threads have arrived at it; `meet` waits for that, `announce` does not. What a thread wrote to
shared memory before it arrived is seen by whoever waited.
"""

from strobe.kernels.gluon import gl, gluon

FIRST = gl.constexpr(8)
"""Number of the first barrier that is ours, of 8 to 15: Triton numbers those of its roles from 0 on."""


@gluon.jit
def meet(number):
    """Arrive at a barrier of two warpgroups, and wait for all their threads."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def announce(number):
    """Arrive at a barrier of two warpgroups, and go on."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rendezvous(number, w: gl.constexpr):
    """Let warpgroups 0 and 1 wait for each other, at the barriers `number` and `number` + 1. (One barrier would do. But the
    groups come to it at different places of the code, and that is what compute-sanitizer's synccheck calls divergence.)

    Group 1 answers only after it has met group 0: if both announced first, a group that is ahead could announce twice before
    the other one meets it once."""
    if w == 0:
        announce(number + 1)
        meet(number)
    else:
        meet(number + 1)
        announce(number)
