"""What the simulator says of a mistake: one small kernel for each, which does nothing else."""

import re
from collections.abc import Callable

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from strobe.kernels import triton_version
from strobe.kernels.gluon import (
    TensorDescriptor,
    TensorMemoryLayout,
    allocate_tensor_memory,
    cp_async,
    fence_async_shared,
    mbarrier,
    reinterpret,
    tcgen05_commit,
    tcgen05_mma,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.sim import (
    ORDERS,
    BarrierMisuse,
    Deadlock,
    DoubleWrite,
    IllegalOperation,
    MissingFence,
    OutOfBounds,
    Race,
    Unfinished,
    Uninitialised,
    Unsupported,
    barriers,
    register,
    simulate,
)

LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
BLOCK = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))

MISTAKES: list[tuple[Callable, type[Exception], str, int]] = []


def mistake(error: type[Exception], says: str, arch: int = 90):
    """The message begins with `says`, in which "<>" is a place in this file. The kernel takes x, float32 [128], and a and b,
    descriptors of float16 [64, 64] in boxes of 64 x 64."""
    return lambda kernel: MISTAKES.append((kernel, error, says, arch)) or kernel


@gluon.jit
def barrier_of(count: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=count)
    return barrier


@gluon.jit
def nothing():
    pass


# ---- mbarriers


@mistake(Deadlock, "waits_for_nobody waits for parity 0 of ready at <> (phase 0 has 1 of 2 arrivals)")
@gluon.jit
def waits_for_nobody(x, a, b):
    ready = barrier_of(2)
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)


@mistake(Deadlock, "expects_too_much waits for parity 0 of ready at <> (phase 0 has 1 of 1 arrivals, 16 bytes to come)")
@gluon.jit
def expects_too_much(x, a, b):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    ready = barrier_of(1)
    mbarrier.expect(ready, a.block_type.nbytes + 16)
    tma_load(a, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)


@gluon.jit
def waits(ready):
    mbarrier.wait(ready, 0)


@mistake(Deadlock, "nothing waits for the other roles to end; waits waits for parity 0 of ready at <>")
@gluon.jit
def a_role_waits_for_ever(x, a, b):
    ready = barrier_of(1)
    gl.warp_specialize([(nothing, ()), (waits, (ready,))], [1], [24])


@mistake(BarrierMisuse, "[cta 0] arrives_too_often at <> arrives 2 times at ready, of which phase 0 has 0 of 1 arrivals")
@gluon.jit
def arrives_too_often(x, a, b):
    ready = barrier_of(1)
    mbarrier.arrive(ready, count=2)


@mistake(BarrierMisuse, "[cta 0] <> uses the mbarrier ready, which is not initialised")
@gluon.jit
def uses_no_barrier(x, a, b):
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.wait(ready, 0)


@mistake(BarrierMisuse, "[cta 0] <> initialises the mbarrier ready again")
@gluon.jit
def initialises_twice(x, a, b):
    ready = barrier_of(1)
    mbarrier.init(ready, count=1)


@mistake(BarrierMisuse, "ready is left in use at exit: phase 0 has 1 of 2 arrivals")
@gluon.jit
def leaves_a_barrier(x, a, b):
    ready = barrier_of(2)
    mbarrier.arrive(ready, count=1)


# ---- named barriers


@gluon.jit
def sync(number: gl.constexpr, threads: gl.constexpr):
    gl.inline_asm_elementwise(f"bar.sync {number}, {threads};", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


register(sync, barriers.named_sync)


@mistake(Deadlock, "too_few_threads waits for named barrier 1 at <> (128 of 256 threads are there)")
@gluon.jit
def too_few_threads(x, a, b):
    sync(1, 256)


@mistake(BarrierMisuse, "[cta 0] too_many_threads at <> brings 128 threads to named barrier 1: more than 96")
@gluon.jit
def too_many_threads(x, a, b):
    sync(1, 96)


@mistake(BarrierMisuse, "[cta 0] <>: named barriers are 0 to 15 and take whole warps, got 16 and 128 threads")
@gluon.jit
def no_such_barrier(x, a, b):
    sync(16, 128)


@gluon.jit
def asm():
    gl.inline_asm_elementwise("nanosleep.u32 10;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@mistake(Unsupported, "[cta 0] <>: the simulator runs no PTX, such as 'nanosleep.u32 10;'; strobe.sim.register(function")
@gluon.jit
def runs_assembly(x, a, b):
    asm()


# ---- shared memory


@mistake(Uninitialised, "[cta 0] reads_nothing at <> reads memory, part of which nothing has written")
@gluon.jit
def reads_nothing(x, a, b):
    memory = gl.allocate_shared_memory(gl.float32, [128], LINEAR)
    memory.load(VECTOR)


@mistake(OutOfBounds, "[cta 0] index 2 of memory at <>, which has 2")
@gluon.jit
def a_buffer_too_far(x, a, b):
    memory = gl.allocate_shared_memory(gl.float32, [2, 128], LINEAR)
    memory.index(2).load(VECTOR)


@mistake(IllegalOperation, "[cta 0] <> allocates memory: 262144 bytes of shared memory in all, of 232448")
@gluon.jit
def too_much_shared_memory(x, a, b):
    memory = gl.allocate_shared_memory(gl.float32, [65536], LINEAR)
    memory.load(VECTOR)


@gluon.jit
def writes(memory):
    memory.store(gl.full([128], 0.0, gl.float32, ONE_WARP))


@mistake(Race, "[cta 0] writes")
@gluon.jit
def two_roles_write(x, a, b):
    memory = gl.allocate_shared_memory(gl.float32, [128], LINEAR)
    gl.warp_specialize([(writes, (memory,)), (writes, (memory,))], [1], [24])


# ---- global memory


@mistake(OutOfBounds, "[cta 0] store to x by stores_too_far at <> reaches element 128 of x, which has 128")
@gluon.jit
def stores_too_far(x, a, b):
    gl.store(x + 1 + gl.arange(0, 128, VECTOR), 0.0)


@mistake(
    DoubleWrite, "[cta 0] store to x by stores_twice at <> writes an element of x that store to x by stores_twice at <> wrote"
)
@gluon.jit
def stores_twice(x, a, b):
    gl.store(x, 0.0)
    gl.store(x, 0.0)


# ---- TMA and cp.async


@mistake(
    Race, "[cta 0] does_not_wait at <> reads tile; nothing orders it after the write by TMA load of a by does_not_wait at <>"
)
@gluon.jit
def does_not_wait(x, a, b):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    ready = barrier_of(1)
    mbarrier.expect(ready, a.block_type.nbytes)
    tma_load(a, [0, 0], ready, tile)
    tile.load(BLOCK)


@mistake(Unfinished, "the CTA exits and nobody")
@gluon.jit
def leaves_a_copy(x, a, b):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    ready = barrier_of(1)
    mbarrier.expect(ready, a.block_type.nbytes)
    tma_load(a, [0, 0], ready, tile)


@mistake(
    MissingFence,
    "[cta 0] TMA store to b by no_fence at <> reads tile through the async proxy, written by no_fence at <>, with no",
)
@gluon.jit
def no_fence(x, a, b):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    tile.store(gl.full([64, 64], 0.0, gl.float16, BLOCK))
    tma_store(b, [0, 0], tile)
    tma_store_wait(0)


@mistake(Unfinished, "[cta 0] leaves_a_store ends and has not waited for the TMA store to b by leaves_a_store at <>")
@gluon.jit
def leaves_a_store(x, a, b):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    tile.store(gl.full([64, 64], 0.0, gl.float16, BLOCK))
    fence_async_shared()
    tma_store(b, [0, 0], tile)
    tma_store_wait(1)


@mistake(Race, "[cta 0] stores_over at <> writes tile; nothing orders it after the read by TMA store to b by stores_over at <>")
@gluon.jit
def stores_over(x, a, b):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    tile.store(gl.full([64, 64], 0.0, gl.float16, BLOCK))
    fence_async_shared()
    tma_store(b, [0, 0], tile)
    tile.store(gl.full([64, 64], 1.0, gl.float16, BLOCK))


@mistake(Race, "[cta 0] TMA load of b by reads_back at <> reads b; nothing orders it after the write by TMA store to b by")
@gluon.jit
def reads_back(x, a, b):
    """The wait tells that shared memory was read, not that global memory was written."""
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    ready = barrier_of(1)
    tile.store(gl.full([64, 64], 0.0, gl.float16, BLOCK))
    fence_async_shared()
    tma_store(b, [0, 0], tile)
    tma_store_wait(0)
    mbarrier.expect(ready, b.block_type.nbytes)
    tma_load(b, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)


@gluon.jit
def gives_a_place_back(a, USED: gl.constexpr, FENCED: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    ready, empty = barrier_of(1), barrier_of(1)
    for turn in gl.static_range(2):
        mbarrier.expect(ready, a.block_type.nbytes)
        tma_load(a, [0, 0], ready, tile)
        mbarrier.wait(ready, turn)
        value = tile.load(BLOCK)[None, :, :]
        if USED:
            value += 1.0
        if FENCED:
            fence_async_shared()
        mbarrier.arrive(empty, count=1)
        mbarrier.wait(empty, turn)
        value += 1.0


@mistake(
    Race,
    "[cta 0] TMA load of a by leaves_a_load at <> writes tile through the async proxy, while the read by leaves_a_load at",
)
@gluon.jit
def leaves_a_load(x, a, b):
    gives_a_place_back(a, False, False)


@mistake(Race, "[cta 0] waits_for_the_wrong_group at <> reads memory; nothing orders it after the write by cp.async", arch=80)
@gluon.jit
def waits_for_the_wrong_group(x, a, b):
    memory = gl.allocate_shared_memory(gl.float32, [128], LINEAR)
    cp_async(memory, x + gl.arange(0, 128, VECTOR))
    async_copy.commit_group()
    async_copy.wait_group(1)
    memory.load(VECTOR)


@mistake(Unfinished, "[cta 0] no_commit ends and has not waited for all of its cp.async copies", arch=80)
@gluon.jit
def no_commit(x, a, b):
    memory = gl.allocate_shared_memory(gl.float32, [128], LINEAR)
    cp_async(memory, x + gl.arange(0, 128, VECTOR))
    async_copy.wait_group(0)


# ---- wgmma


@gluon.jit
def zeros():
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    tile.store(gl.full([64, 64], 0.0, gl.float16, BLOCK))
    fence_async_shared()
    return tile


@mistake(Unfinished, "[cta 0] <> uses the result of wgmma at <>")
@gluon.jit
def uses_a_product_too_early(x, a, b):
    tile = zeros()
    acc = gl.full([64, 64], 0.0, gl.float32, PRODUCT)
    acc = warpgroup_mma(tile, tile, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    acc + 1.0


@mistake(Uninitialised, "[cta 0] wgmma of stores_a_product_of_nothing at <> reads tile, part of which nothing has written")
@gluon.jit
def stores_a_product_of_nothing(x, a, b):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    acc = gl.full([64, 64], 0.0, gl.float32, PRODUCT)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(tile, tile, acc, is_async=True)])
    gl.store(x + gl.arange(0, 64, gl.SliceLayout(1, PRODUCT)), gl.max(acc * 2.0, 1))


@gluon.jit
def drops_a_product_of_nothing(x):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], SWIZZLED)
    acc = gl.full([64, 64], 0.0, gl.float32, PRODUCT)
    warpgroup_mma_wait(0, deps=[warpgroup_mma(tile, tile, acc, is_async=True)]) * 2.0


def test_a_product_of_nothing_may_be_dropped():
    simulate(drops_a_product_of_nothing, (1,), torch.zeros(128))


@mistake(
    Race, "[cta 0] writes_an_operand at <> writes tile; nothing orders it after the read by wgmma of writes_an_operand at <>"
)
@gluon.jit
def writes_an_operand(x, a, b):
    tile = zeros()
    acc = gl.full([64, 64], 0.0, gl.float32, PRODUCT)
    acc = warpgroup_mma(tile, tile, acc, is_async=True)
    tile.store(gl.full([64, 64], 1.0, gl.float16, BLOCK))
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.store(x + gl.arange(0, 64, gl.SliceLayout(1, PRODUCT)), gl.max(acc, 1))


@gluon.jit
def drops_a_product_of_what_it_overwrites(x):
    tile = zeros()
    acc = gl.full([64, 64], 0.0, gl.float32, PRODUCT)
    acc = warpgroup_mma(tile, tile, acc, is_async=True)
    tile.store(gl.full([64, 64], 1.0, gl.float16, BLOCK))
    warpgroup_mma_wait(0, deps=[acc]) * 2.0


def test_a_product_of_what_is_overwritten_may_be_dropped():
    simulate(drops_a_product_of_what_it_overwrites, (1,), torch.zeros(128))


@gluon.jit
def multiplies(x, tile):
    acc = gl.full([64, 64], 0.0, gl.float32, PRODUCT)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(tile, tile, acc, is_async=True)])
    gl.store(x + gl.arange(0, 64, gl.SliceLayout(1, PRODUCT)), gl.max(acc + 1.0, 1))


@gluon.jit
def overwrites(tile):
    tile.store(gl.full([64, 64], 1.0, gl.float16, BLOCK))


@gluon.jit
def multiplies_and_overwrites(x):
    tile = zeros()
    gl.warp_specialize([(multiplies, (x, tile)), (overwrites, (tile,))], [4], [24])


@pytest.mark.parametrize("seed", range(5))
def test_a_product_of_what_another_role_overwrites_is_found_before_and_after_it_was_used(seed):
    with pytest.raises(Race, match=r"(writes|reads) tile; nothing orders it after"):
        simulate(multiplies_and_overwrites, (1,), torch.zeros(128), order="random", seed=seed)


@mistake(Unfinished, "[cta 0] leaves_a_product ends and has not waited for the wgmma at <>")
@gluon.jit
def leaves_a_product(x, a, b):
    tile = zeros()
    warpgroup_mma(tile, tile, gl.full([64, 64], 0.0, gl.float32, PRODUCT), is_async=True)


@mistake(Unsupported, "[cta 0] the simulator has no shared memory in the order of [[0, 1], [1, 1]], which ")
@gluon.jit
def has_an_order_that_is_none_of_bits(x, a, b):
    tile = gl.allocate_shared_memory(gl.float32, [4], LINEAR)
    reinterpret(tile, gl.float32, [2, 2], gl.SharedLinearLayout([[0, 1], [1, 1]]))


# ---- tcgen05


@gluon.jit
def operands():
    tile = gl.allocate_shared_memory(gl.float16, [128, 64], SWIZZLED)
    tile.store(gl.full([128, 64], 0.0, gl.float16, BLOCK))
    fence_async_shared()
    acc = allocate_tensor_memory(gl.float32, [128, 64], TensorMemoryLayout((128, 64), col_stride=1))
    return tile, acc


@mistake(
    Race, "[cta 0] reads_too_early at <> reads acc (columns 0 to 63); nothing orders it after the write by tcgen05.mma of", 100
)
@gluon.jit
def reads_too_early(x, a, b):
    tile, acc = operands()
    tcgen05_mma(tile, tile.slice(0, 64).permute((1, 0)), acc, use_acc=False, mbarriers=[])
    acc.load()


@mistake(Uninitialised, "[cta 0] tcgen05.mma of adds_to_nothing at <> reads acc (columns 0 to 63), part of which nothing", 100)
@gluon.jit
def adds_to_nothing(x, a, b):
    tile, acc = operands()
    tcgen05_mma(tile, tile.slice(0, 64).permute((1, 0)), acc, mbarriers=[])


@mistake(Deadlock, "commits_nothing waits for parity 0 of done at <> (phase 0 has 0 of 1 arrivals)", 100)
@gluon.jit
def commits_nothing(x, a, b):
    tile, acc = operands()
    done = barrier_of(1)
    tcgen05_mma(tile, tile.slice(0, 64).permute((1, 0)), acc, use_acc=False, mbarriers=[])
    mbarrier.wait(done, 0)


@mistake(
    Race, "[cta 0] commits_too_early at <> reads acc (columns 0 to 63); nothing orders it after the write by tcgen05.mma", 100
)
@gluon.jit
def commits_too_early(x, a, b):
    tile, acc = operands()
    done = barrier_of(1)
    tcgen05_commit(done)
    tcgen05_mma(tile, tile.slice(0, 64).permute((1, 0)), acc, use_acc=False, mbarriers=[])
    mbarrier.wait(done, 0)
    acc.load()


@mistake(IllegalOperation, "[cta 0] <> allocates more: 576 columns of tensor memory in all, of 512", 100)
@gluon.jit
def too_much_tensor_memory(x, a, b):
    operands()
    more = allocate_tensor_memory(gl.float32, [128, 512], TensorMemoryLayout((128, 128), col_stride=1))
    more.load()


@mistake(IllegalOperation, "[cta 0] <> uses tcgen05, which sm_90 does not have")
@gluon.jit
def on_an_old_gpu(x, a, b):
    tile = zeros()
    tcgen05_mma(tile, tile, tile, mbarriers=[])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel, error, says, arch", MISTAKES, ids=[kernel.__name__ for kernel, *_ in MISTAKES])
def test_what_is_said(kernel, error, says, arch, order):
    if arch == 100 and triton_version() < (3, 8):
        pytest.skip("tcgen05 needs Triton 3.8 or newer")
    boxes = [TensorDescriptor.from_tensor(torch.zeros(64, 64).half(), [64, 64], SWIZZLED.value) for _ in range(2)]
    with pytest.raises(error) as raised:
        simulate(kernel, (1,), torch.zeros(128), *boxes, order=order, arch=arch)
    message = re.sub(r"test_messages\.py:\d+ in \w+", "<>", str(raised.value))
    assert message.startswith(says), message


@gluon.jit
def sees_two_stages_as_one(x, FIRST: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.float32, [3, 128], LINEAR)
    ring.index(2).store(gl.full([128], 2.0, gl.float32, VECTOR))
    both = reinterpret(ring.index(FIRST), gl.float32, [256], LINEAR)
    both.slice(0, 128).store(gl.full([128], 1.0, gl.float32, VECTOR))
    at = gl.arange(0, 256, VECTOR)
    gl.store(x + at, both.load(VECTOR))


def test_a_stage_may_be_seen_as_longer_but_not_past_its_ring():
    x = torch.zeros(256)
    simulate(sees_two_stages_as_one, (1,), x, 1)
    assert x.tolist() == [1.0] * 128 + [2.0] * 128
    with pytest.raises(IllegalOperation, match=r"reinterprets ring\[2\], .* as \[256\] fp32: past the end of ring"):
        simulate(sees_two_stages_as_one, (1,), x, 2)


@gluon.jit
def doubles(x):
    at = gl.arange(0, 128, VECTOR)
    y = gl.inline_asm_elementwise(
        """
        add.f32   $0, $1, $1;
        """,
        "=f,f", [gl.load(x + at)], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    gl.store(x + at, y)


def test_assembly_has_a_model_by_its_text(monkeypatch):
    monkeypatch.setattr("strobe.sim.program.assembly", {})
    register("add.f32 $0,  $1, $1;", lambda x: x + x)
    x = torch.ones(128)
    simulate(doubles, (1,), x, rewritable=("x",))
    assert x.tolist() == [2.0] * 128


@gluon.jit
def ring_of_one(x):
    """A view of index -1 is formed, and left out."""
    done = barrier_of(1)
    ring = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.arrive(ring.index(-1), count=1, pred=False)
    mbarrier.wait(ring.index(2), 0, pred=False)
    mbarrier.arrive(done, count=1)


def test_a_view_that_does_not_exist_may_be_formed_but_not_used():
    simulate(ring_of_one, (1,), torch.zeros(1))


@gluon.jit
def allocates_in_a_loop(x, n, KEEPS: gl.constexpr):
    at = gl.arange(0, 16384, VECTOR)
    kept = ()
    for i in gl.static_range(4):
        memory = gl.allocate_shared_memory(gl.float32, [16384], LINEAR)
        memory.store(gl.full([16384], 0.0, gl.float32, VECTOR))
        gl.store(x + i * 16384 + at, memory.load(VECTOR))
        if KEEPS:
            kept += (memory,)
    for one in gl.static_range(len(kept)):
        kept[one].load(VECTOR)


def test_shared_memory_of_an_iteration_is_free_in_the_next():
    x = torch.zeros(4 * 16384)
    assert simulate(allocates_in_a_loop, (1,), x, 4, False).smem_bytes == 65536
    with pytest.raises(IllegalOperation, match="262144 bytes of shared memory in all"):
        simulate(allocates_in_a_loop, (1,), x, 4, True)


@gluon.jit
def stores_unfenced(x, FENCED: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float16, [64, 64], x.layout)
    memory.store(gl.full([64, 64], 0.0, gl.float16, BLOCK))
    if FENCED:
        fence_async_shared()
    tma_store(x, [0, 0], memory)
    tma_store_wait(0)


def test_new_triton_fences_before_a_store():
    box = TensorDescriptor.from_tensor(torch.zeros(64, 64).half(), [64, 64], SWIZZLED.value)
    simulate(stores_unfenced, (1,), box, False, triton=(3, 8))
    simulate(stores_unfenced, (1,), box, True, triton=(3, 7))
    with pytest.raises(MissingFence):
        simulate(stores_unfenced, (1,), box, False, triton=(3, 7))


@gluon.jit
def copies_to_tensor_memory(x, out, WAITS: gl.constexpr, FENCED: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout((128, 64), col_stride=1)
    tile = gl.allocate_shared_memory(gl.float32, [128, 64], gl.NVMMASharedLayout(128, 32, rank=2))
    done = barrier_of(1)
    at = gl.arange(0, 128, gl.SliceLayout(1, BLOCK))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, BLOCK))[None, :]
    tile.store(gl.load(x + at))
    if FENCED:
        fence_async_shared()
    there = allocate_tensor_memory(gl.float32, [128, 64], layout)
    tcgen05_copy(tile, there)
    tcgen05_commit(done)
    if WAITS:
        mbarrier.wait(done, 0)
    values = there.load(there.get_reg_layout())
    gl.store(out + at, gl.convert_layout(values, BLOCK))
    mbarrier.wait(done, 0)


@pytest.mark.skipif(triton_version() < (3, 8), reason="tcgen05 needs Triton 3.8 or newer")
@pytest.mark.parametrize("order", ORDERS)
def test_copies_to_tensor_memory(order):
    x, out = torch.randn(128, 64), torch.zeros(128, 64)
    simulate(copies_to_tensor_memory, (1,), x, out, True, True, order=order, arch=100)
    assert torch.equal(x, out)
    for waits, fenced, error in ((False, True, Race), (True, False, MissingFence)):
        with pytest.raises(error):
            simulate(copies_to_tensor_memory, (1,), x, torch.zeros(128, 64), waits, fenced, order=order, arch=100)


@gluon.constexpr_function
def a_product_layout(layout):
    assert isinstance(layout, gl.NVMMADistributedLayout), f"no layout of a product: {type(layout).__name__}"
    return layout


@gluon.jit
def asks_for_a_layout(x):
    a_product_layout(gl.arange(0, 128, VECTOR).type.layout)


def test_an_assertion_of_the_kernel_is_no_failed_check():
    with pytest.raises(IllegalOperation, match="an assertion in a_product_layout failed: no layout of a product"):
        simulate(asks_for_a_layout, (1,), torch.zeros(1))


@gluon.jit
def counts_warps(x, num_warps: gl.constexpr):
    gl.store(x, num_warps + gl.num_warps())


def test_warps_may_be_a_parameter():
    x = torch.zeros(1)
    simulate(counts_warps, (1,), x, num_warps=8)
    assert x.item() == 16


def test_a_name_that_triton_has_removed_is_refused():
    if triton_version() < (3, 9):
        pytest.skip("the name is there before Triton 3.9")

    @gluon.jit
    def kernel(x):
        tma.async_copy_shared_to_global(x, [0, 0], x)

    with pytest.raises(IllegalOperation, match=r"in kernel: async_copy_shared_to_global has been removed; call async_store"):
        simulate(kernel, (1,), torch.zeros(1))


def test_clusters_of_four_are_not_simulated():
    with pytest.raises(Unsupported, match="clusters of 1 or 2 CTAs, got num_ctas=4"):
        simulate(counts_warps, (1,), torch.zeros(1), num_ctas=4)


@pytest.mark.parametrize("used, fenced", [(True, False), (False, True)], ids=["used", "fenced"])
def test_a_load_is_over_once_it_is_used_or_fenced(used, fenced):
    box = TensorDescriptor.from_tensor(torch.zeros(64, 64).half(), [64, 64], SWIZZLED.value)
    simulate(gives_a_place_back, (1,), box, used, fenced)


def test_of_two_ctas_that_write_the_same():
    @gluon.jit
    def kernel(x):
        gl.store(x, 0.0)

    with pytest.raises(DoubleWrite, match=r"\[cta 1\] store to x by kernel"):
        simulate(kernel, (2,), torch.zeros(1))
