"""Conformance: named barriers, and what an mbarrier does with late waits, early bytes and copies by threads."""

import torch
from conformance import Case, blank, integers, plain
from conformance_machine import (
    COPIED,
    LINEAR,
    ROW_MAJOR,
    TMA_INPUT,
    box,
    make_barrier,
    reads,
    seen,
    yes,
)
from conformance_registers import BLOCK, VECTOR, block_offsets
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from strobe.kernels.gluon import cp_async, fence_async_shared, mbarrier, partition_barrier, tma_load

# ---- named barriers: inline assembly, for which a test in the simulator registers Python


@gluon.jit
def named_sync(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(f"bar.sync {NUMBER}, {THREADS}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_arrive(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        f"bar.arrive {NUMBER}, {THREADS}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def named_writer(x, memory, items, N: gl.constexpr):
    for item in range(items):
        named_sync(14, 256)
        memory.store(gl.load(x + item * N + gl.arange(0, N, VECTOR)))
        named_arrive(15, 256)


@gluon.jit
def named_reader(out, memory, items, N: gl.constexpr):
    for item in range(items):
        named_arrive(14, 256)
        named_sync(15, 256)
        gl.store(out + item * N + gl.arange(0, N, VECTOR), memory.load(VECTOR) * 2)


@gluon.jit
def named_ring(x, out, items, N: gl.constexpr):
    """One buffer that two partitions fill and read in turn: each arrives at one barrier and waits at the other."""
    memory = gl.allocate_shared_memory(gl.float32, [N], LINEAR)
    gl.warp_specialize([(named_reader, (out, memory, items, N)), (named_writer, (x, memory, items, N))], [4], [48])


@gluon.jit
def named_third(x, memory, PART: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = PART * 64 + gl.arange(0, 64, layout)
    memory.slice(PART * 64, 64).store(gl.load(x + i))
    named_sync(15, 192)
    memory.slice(128 + PART * 64, 64).store(gl.load(x + i) * 3)
    named_sync(15, 192)


@gluon.jit
def named_reader_of_all(out, memory, N: gl.constexpr):
    named_sync(15, 192)
    gl.store(out + gl.arange(0, 128, VECTOR), memory.slice(0, 128).load(VECTOR))
    named_sync(15, 192)
    gl.store(out + 128 + gl.arange(0, 128, VECTOR), memory.slice(128, 128).load(VECTOR))


@gluon.jit
def named_meeting(x, out, N: gl.constexpr):
    """Four warps and twice one meet, two times."""
    memory = gl.allocate_shared_memory(gl.float32, [N], LINEAR)
    gl.warp_specialize([
        (named_reader_of_all, (out, memory, N)), (named_third, (x, memory, 0)), (named_third, (x, memory, 1)),
    ], [1, 1], [48, 48])  # fmt: skip


# ---- mbarriers


@gluon.jit
def spend_time():
    for _i in range(100):
        partition_barrier()


@gluon.jit
def third_phase(memory, late, ready):
    for _i in gl.static_range(2):
        mbarrier.arrive(late, count=1)
    mbarrier.arrive(ready, count=1)
    spend_time()
    memory.store(gl.full([64], 1, gl.int32, VECTOR))
    partition_barrier()
    mbarrier.arrive(late, count=1)


@gluon.jit
def waits_late(out, memory, late, ready):
    mbarrier.wait(ready, 0)
    mbarrier.wait(late, 1)  # over, and the latest of its parity
    mbarrier.wait(late, 0)  # two phases late: this is the wait for the third
    gl.store(out + gl.arange(0, 64, VECTOR), memory.load(VECTOR))


@gluon.jit
def late_wait(out):
    memory = gl.allocate_shared_memory(gl.int32, [64], LINEAR)
    late = make_barrier(1)
    ready = make_barrier(1)
    memory.store(gl.full([64], 0, gl.int32, VECTOR))
    partition_barrier()
    gl.warp_specialize([(waits_late, (out, memory, late, ready)), (third_phase, (memory, late, ready))], [4], [48])


@gluon.jit
def early_bytes(x_desc, y, x, out):
    """A copy signals bytes that nobody expects yet."""
    memory = gl.allocate_shared_memory(x_desc.dtype, [16, 64], x_desc.layout)
    barrier = make_barrier(1)
    tma_load(x_desc, [y, x], barrier, memory)
    spend_time()
    mbarrier.expect(barrier, x_desc.block_type.nbytes)
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(16, 64), memory.load(BLOCK))


@gluon.jit
def not_expected(x_desc, y, x, out):
    """An expect, a copy and an arrival whose predicate is false are none; so is a wait."""
    memory = gl.allocate_shared_memory(x_desc.dtype, [16, 64], x_desc.layout)
    barrier = make_barrier(2)
    mbarrier.expect(barrier, x_desc.block_type.nbytes, pred=False)
    tma_load(x_desc, [0, 0], barrier, memory, pred=False)
    mbarrier.wait(barrier, 0, pred=False)
    mbarrier.expect(barrier, x_desc.block_type.nbytes)
    tma_load(x_desc, [y, x], barrier, memory)
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(16, 64), memory.load(BLOCK))


@gluon.jit
def two_lives(out):
    """Once invalidated, a barrier may be initialised with another count, and begins with its first phase."""
    barrier = make_barrier(1)
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)
    partition_barrier()
    mbarrier.invalidate(barrier)
    partition_barrier()
    mbarrier.init(barrier, count=3)
    fence_async_shared()
    partition_barrier()
    mbarrier.wait(barrier, 1)
    mbarrier.arrive(barrier, count=3)
    mbarrier.wait(barrier, 0)
    gl.store(out, 1)


# ---- cp.async


@gluon.jit
def copies_arrive(x, out, COUNTED: gl.constexpr):
    """An mbarrier waits for the copies of all threads: those that it was initialised to count, or arrivals made for them."""
    memory = gl.allocate_shared_memory(gl.int32, [16, 32], ROW_MAJOR)
    barrier = make_barrier(128 if COUNTED else 1)
    cp_async(memory, x + block_offsets(16, 32))
    async_copy.mbarrier_arrive(barrier, increment_count=not COUNTED)
    if not COUNTED:
        partition_barrier()
        mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(32, 16), memory.permute((1, 0)).load(BLOCK))


ITEMS = integers(8, 64, seed=10)
CORNERS = integers(128, seed=11)
CASES = [
    Case(
        "named barriers pass a buffer to and fro",
        named_ring,
        lambda device: ((ITEMS.to(device), out := blank(8, 64).to(device), 8), out),
        ITEMS * 2,
        constants=(("N", 64),),
    ),
    Case(
        "partitions of different sizes meet at a named barrier",
        named_meeting,
        plain(CORNERS, out=blank(256)),
        torch.cat([CORNERS, CORNERS * 3]),
        constants=(("N", 256),),
    ),
    seen(late_wait, "a wait two phases late waits for the third", expected=torch.ones(64, dtype=torch.int32)),
    Case("bytes may come before they are expected", early_bytes, reads(4, 8), box(TMA_INPUT, 4, 8)),
    Case("what a false predicate leaves out does not count", not_expected, reads(20, 0), box(TMA_INPUT, 20, 0)),
    yes(two_lives, "an mbarrier has a second life with another count"),
    *(
        Case(
            f"cp.async arrives at an mbarrier that {('makes room for', 'counts')[counted]} its threads",
            copies_arrive,
            plain(COPIED[0], out=blank(32, 16, dtype=torch.int32)),
            COPIED[0].T.contiguous(),
            constants=(("COUNTED", counted),),
        )
        for counted in (False, True)
    ),
]
