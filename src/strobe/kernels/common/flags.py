"""Flags in global memory, by which CTAs wait for what others have added there: numbers that grow, each written by one thread.

One warp does all of it, and one of its threads, the one that the TMA elects, starts an addition, waits until that is over and
raises the flag. Who waits for the flag knows what that thread knew. Of what the TMA does, that holds for additions that were
waited for until they are in memory, not only read from shared memory (`raise_when_added`), and on the other side for additions
behind a fence (`fence_async`).
"""

from strobe.kernels.gluon import gl, gluon


@gluon.jit
def await_flag(flag, number, known):
    """Wait until a flag is a number at least; what it is then. Where it is known to be, `known`, nothing is loaded."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred enough;
        mov.b32 $0, $3;
        again:
        setp.ge.s32 enough, $0, $2;
        @enough bra done;
        ld.acquire.gpu.global.b32 $0, [$1];
        bra again;
        done:
        }""",
        "=&r,l,r,r", [flag.to(gl.int64), number, known], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def raise_when_added(flag, number):
    """Wait until all additions of the TMA that this thread has started are over, then let a flag hold a number."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one cp.async.bulk.wait_group 0;
        @one st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [flag.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fence_async():
    """Let the TMA see what this thread knows of shared and of global memory."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
