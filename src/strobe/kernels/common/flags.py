"""Flags in global memory, by which CTAs wait for what others have done there: numbers, each written by one CTA at a time.

Who waits knows what the CTA that raised the flag knew then. Of what the TMA does, that holds for stores that were waited for
(`await_stores`), and on the other side for copies behind a fence (`fence_async`).
"""

from strobe.kernels.gluon import gl, gluon


@gluon.jit
def await_flag(flag, number):
    """Wait until a flag holds a number. The threads of a warp read it together, and go on together."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred other;
        .reg .b32 seen;
        again:
        ld.acquire.gpu.global.b32 seen, [$1];
        setp.ne.b32 other, seen, $2;
        vote.sync.any.pred other, other, 0xffffffff;
        @other bra.uni again;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [flag.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def raise_flag(flag, number):
    """Let a flag hold a number, unless it is 0. All threads write it: if one of them did, the compiler would take a loop around
    it for one in which threads part, and compute for each of them what they have in common."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred any;
        setp.ne.b32 any, $2, 0;
        @any st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [flag.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_stores():
    """Wait until what this thread stored or added by the TMA is in global memory."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_async():
    """Let the TMA see what this thread wrote to shared memory, and come after what it knows of global memory."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
