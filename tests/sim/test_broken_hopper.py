"""Mistakes made in Hopper's forward and its channel, one at a time: the simulator finds each in every order."""

import pytest
from broken import Bug, Kernel, assert_found, assert_right_unless_broken
from problems import Case

from strobe.kernels.sm90.config import Config
from strobe.sim import (
    BarrierMisuse,
    Deadlock,
    DoubleWrite,
    MissingFence,
    OutOfBounds,
    Race,
    Unfinished,
    Uninitialised,
)

FORWARD, CHANNEL = "strobe.kernels.sm90.forward", "strobe.kernels.common.channel"
# Two tiles, each of four blocks through a ring of two.
KERNEL = Kernel(FORWARD, 90, Case(150, 200, batch=1, heads_q=1, heads_kv=1, head_dim=64), Config(64, 2, 64, 2))
TOO_EARLY = (Race, Uninitialised)
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse)

FILL_WAIT = "mbarrier.wait(self.empty.index(slot), ((position // self.stages) & 1) ^ 1)"
FULL_WAIT = "mbarrier.wait(self.full.index(position % self.stages), (position // self.stages) & 1)"
EXPECT = "mbarrier.expect(self.full.index(slot), descriptor.block_type.nbytes)"
RELEASE = "mbarrier.arrive(self.empty.index(position % self.stages), count=1)"
RELEASE_K = '    stamp(work.trace, w, "s_ready", g)\n    k.release(g)\n'
RELEASE_V = "    v.release(g - 1)\n"
S_READY = "    s = warpgroup_mma_wait(1, deps=[s])\n"
ACC_READY = '    acc = warpgroup_mma_wait(0, deps=[acc])\n    stamp(work.trace, w, "o_ready", g - 1)\n'


def channel(what, before, after, errors, **more) -> Bug:
    return Bug(what, KERNEL, CHANNEL, ((before, after),), errors, **more)


def kernel(what, before, after, errors, **more) -> Bug:
    return Bug(what, KERNEL, FORWARD, ((before, after),), errors, **more)


BUGS = [
    # The channel.
    channel("a block is copied before its buffer is empty", FILL_WAIT, "pass", (Race, BarrierMisuse)),
    channel(
        "the first fill waits for a release",
        FILL_WAIT,
        FILL_WAIT.replace(" ^ 1", ""),
        (Deadlock,),
        says=(
            "producer waits for parity 0 of k.empty[0] at",
            "consumer waits for parity 0 of k.full[0] at",
            "phase 0 has 0 of 2 arrivals",
        ),
    ),
    channel("the phase of empty never flips", FILL_WAIT, "mbarrier.wait(self.empty.index(slot), 1)", WRONG_PHASE),
    channel("a block is not waited for", FULL_WAIT, "pass", TOO_EARLY),
    channel("the other phase of full is waited for", FULL_WAIT, FULL_WAIT.replace("& 1)", "& 1 ^ 1)"), WRONG_PHASE),
    channel(
        "the phase of full never flips", FULL_WAIT, "mbarrier.wait(self.full.index(position % self.stages), 0)", WRONG_PHASE
    ),
    channel("a phase flips a buffer too late", FULL_WAIT, FULL_WAIT.replace("(position //", "((position - 1) //"), WRONG_PHASE),
    channel("half of the bytes are expected", EXPECT, EXPECT.replace("nbytes", "nbytes // 2"), WRONG_PHASE),
    channel(
        "more bytes are expected than come",
        EXPECT,
        EXPECT.replace("nbytes", "nbytes + 16"),
        (Deadlock,),
        says=("16 bytes to come",),
    ),
    channel("no bytes are expected", EXPECT, "pass", (Deadlock, BarrierMisuse)),
    channel("an arrival in place of the bytes", EXPECT, "mbarrier.arrive(self.full.index(slot), count=1)", WRONG_PHASE),
    channel(
        "all blocks go to the first buffer", "self.buffers.index(slot).reshape", "self.buffers.index(0).reshape", TOO_EARLY
    ),
    channel(
        "all blocks are read from the first buffer",
        "return self.buffers.index(position % self.stages)",
        "return self.buffers.index(0)",
        TOO_EARLY,
    ),
    channel(
        "a buffer beyond the ring",
        "return self.buffers.index(position % self.stages)",
        "return self.buffers.index(position % (self.stages + 1))",
        (OutOfBounds,),
        says=("index 2 of", "which has 2"),
    ),
    channel(
        "the copy signals another buffer's barrier",
        "self.full.index(slot), self.buffers",
        "self.full.index((slot + 1) % self.stages), self.buffers",
        WRONG_PHASE,
    ),
    channel("a consumer gives back a buffer twice", RELEASE, RELEASE.replace("count=1", "count=2"), WRONG_PHASE),
    channel("a consumer gives back another buffer", RELEASE, RELEASE.replace("position %", "(position + 1) %"), WRONG_PHASE),
    channel(
        "a buffer is never given back", RELEASE, "pass", (Deadlock,), says=("producer waits for parity 0 of k.empty[0] at",)
    ),
    channel(
        "one consumer is enough", "empty = make_barriers(stages, consumers)", "empty = make_barriers(stages, 1)", WRONG_PHASE
    ),
    channel(
        "one consumer more than there are",
        "empty = make_barriers(stages, consumers)",
        "empty = make_barriers(stages, consumers + 1)",
        (Deadlock,),
        says=("2 of 3 arrivals",),
    ),
    channel(
        "a barrier is not initialised",
        "for i in gl.static_range(number):",
        "for i in gl.static_range(number - 1):",
        (BarrierMisuse,),
        says=("not initialised",),
    ),
    channel(
        "a barrier is initialised again",
        "mbarrier.init(barriers.index(i)",
        "mbarrier.init(barriers.index(0)",
        (BarrierMisuse,),
        says=("again",),
    ),
    # The kernel.
    kernel("Q is not waited for", "mbarrier.wait(q_full.index(w), 0)", "pass", TOO_EARLY),
    kernel(
        "the other phase of Q is waited for",
        "mbarrier.wait(q_full.index(w), 0)",
        "mbarrier.wait(q_full.index(w), 1)",
        TOO_EARLY,
    ),
    kernel(
        "the rows of Q of both groups go to one buffer", "q_s.index(w).reshape(q_desc", "q_s.index(0).reshape(q_desc", TOO_EARLY
    ),
    kernel("a group beyond the last", "q = q_s.index(w)", "q = q_s.index(w + 1)", (OutOfBounds,)),
    kernel("K is not waited for", "    k.wait(g)\n", "", TOO_EARLY),
    kernel("V is waited for too late", "    v.wait(g - 1)\n    acc", "    acc", TOO_EARLY),
    kernel("the last V is not waited for", "    v.wait(last)\n", "", TOO_EARLY),
    kernel("V is given back before its product is done", ACC_READY + RELEASE_V, RELEASE_V + ACC_READY, (Race,)),
    kernel("K is never given back", RELEASE_K, "", (Deadlock,), says=("producer waits for parity 0 of k.empty[1] at",)),
    kernel("V is never given back", RELEASE_V, "", (Deadlock,), says=("producer waits for parity 0 of v.empty[0] at",)),
    kernel("K is given back twice", RELEASE_K, RELEASE_K + "    k.release(g)\n", WRONG_PHASE),
    kernel("the scores are used before they are done", S_READY, S_READY.replace("(1,", "(2,"), (Unfinished,)),
    kernel("the scores are not waited for", S_READY, "", (Unfinished, Race)),
    kernel("O is used before it is done", ACC_READY, ACC_READY.replace("(0,", "(1,"), (Unfinished, Race)),
    kernel("the first scores are not waited for", "    s = warpgroup_mma_wait(0, deps=[s])\n", "", (Unfinished, Race)),
    kernel(
        "the last product is not waited for",
        '    acc = warpgroup_mma_wait(0, deps=[acc])\n    stamp(work.trace, w, "o_ready", last)\n',
        "",
        (Unfinished,),
    ),
    kernel(
        "no fence before the store of O",
        "    fence_async_shared()\n    partition_barrier()\n",
        "    partition_barrier()\n",
        (MissingFence,),
        says=("no fence_async_shared",),
    ),
    kernel("the store of O is not waited for", "    tma_store_wait(0)\n", "", (Unfinished,)),
    kernel("one store of O may be under way at the end", "tma_store_wait(0)", "tma_store_wait(1)", (Unfinished,)),
    kernel(
        "O leaves through the other group's Q",
        "band, q, outputs, C)\n\n\n@gluon.jit\ndef epilogue",
        "band, q_s.index(0), outputs, C)\n\n\n@gluon.jit\ndef epilogue",
        (Race, MissingFence),
    ),
    kernel("both groups write the same rows", "    row = work.row + w * ROWS\n", "    row = work.row\n", (DoubleWrite,)),
    kernel("rows beyond the last have an LSE", "mask=rows < band.n_q)", "mask=rows < band.n_q + 1)", (OutOfBounds,)),
    kernel(
        "all CTAs take one tile", "row = (tiles - 1 - within // width) * C.tile_q", "row = within * 0 // width", (DoubleWrite,)
    ),
]

WRONG_NUMBERS = [
    kernel("O is not rescaled", "    acc = acc * gl.convert_layout(rescale, rows_of(C.head_dim))[:, None]\n", "", ()),
    kernel("the last block's tail is not masked", "BAND or TAIL", "BAND", ()),
]


@pytest.mark.parametrize("bug", BUGS + WRONG_NUMBERS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


def test_no_false_alarm(tmp_path):
    assert_right_unless_broken(KERNEL, tmp_path)
