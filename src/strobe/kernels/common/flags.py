"""Flags in global memory, by which CTAs wait for what others have added there: numbers that grow, each written by one thread.

One thread of a warp, the one that the TMA elects, starts an addition and waits until that is over; another warp, which is told
by a barrier, raises the flag. Who waits for the flag knows what these knew. Of what the TMA does, that holds for additions that
were waited for until they are in memory, not only read from shared memory (`await_additions`), and on the other side for
additions behind a fence (`fence_async_global`).

Why that is an order, by PTX's memory model: an addition in bulk is made by the async proxy, each of its elements relaxed, at
the GPU's scope. Its completion, which `wait_group` without `.read` waits for, comes with a fence between the proxies: what it
wrote is visible to the thread that waits, as if stored by it. Barrier, release and acquire, of the generic proxy and at the
GPU's scope, too, put it before all that the other thread does later by that proxy. The other addition is of the async proxy, of
another CTA; so a fence between the proxies has to stand before it, after the acquire, in that CTA. It is of global memory
alone, where the sums are: what is added lies in shared memory, and who stored it there has fenced that and arrived at a
barrier. So one addition is before the other in causality order, and so are all that were before that one; where both touch a
number, its sum is formed in that order.

The fence of both memories (`fence.proxy.async`) would say more, and is compiled to one that waits for all that the
multiprocessor has under way (MEMBAR.GPU), as a release is; the fence of global memory is not.
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
def await_additions():
    """Wait until all additions of the TMA that a thread has started are over: in memory, and seen by it."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def raise_flag(flag, number):
    """Let a flag hold a number; who acquires it knows what this thread knows."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [flag.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fence_async_global():
    """Let the TMA see what this thread knows of global memory."""
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
