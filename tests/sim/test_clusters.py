"""What the simulator says of mistakes that two CTAs make together: one small kernel for each."""

import re

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from strobe.kernels import triton_version
from strobe.kernels.gluon import (
    TensorDescriptor,
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    reinterpret,
    tcgen05_commit,
    tcgen05_mma,
    tma_load,
)
from strobe.sim import ORDERS, BarrierMisuse, Deadlock, IllegalOperation, Race, Unfinished, Uninitialised, Unsupported, simulate

if triton_version() < (3, 8):  # before that, the layouts below cannot be made
    pytest.skip("clusters need Triton 3.8 or newer", allow_module_level=True)

cluster = hopper.cluster


def swizzled(halves: list[int]):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=[halves] if halves else [])


BY_ROWS, BY_COLUMNS, WHOLE = (gl.constexpr(swizzled(halves)) for halves in ([1, 0], [0, 1], []))
ACC = gl.constexpr(TensorMemoryLayout((128, 64), col_stride=1, cga_layout=[[1, 0]], two_ctas=True))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]]))
BYTES = gl.constexpr(128 * 64 * 2)

MISTAKES = []


def mistake(error, says: str):
    """The message holds `says`, in which "<>" is a place in this file. The kernel takes a descriptor of float16 [256, 64] in
    one box."""
    return lambda kernel: MISTAKES.append((kernel, error, says)) or kernel


@gluon.jit
def barrier_of(count: gl.constexpr, both: gl.constexpr):
    barrier = mbarrier.allocate_mbarrier(two_ctas=both)
    mbarrier.init(barrier, count=count)
    gl.barrier(cluster=True)
    return barrier


@gluon.jit
def operands():
    """A and B of a product of [256, 64] and [64, 64], and its accumulator."""
    a = gl.allocate_shared_memory(gl.float16, [256, 64], BY_ROWS)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], BY_COLUMNS)
    a.store(gl.full([256, 64], 0.0, gl.float16, ROWS))
    b.store(gl.full([64, 64], 0.0, gl.float16, ROWS))
    fence_async_shared()
    acc = allocate_tensor_memory(gl.float32, [256, 64], ACC)
    gl.barrier(cluster=True)
    return a, b, acc


@gluon.jit
def right(x):
    a, b, acc = operands()
    done = barrier_of(1, False)
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[])
    tcgen05_commit(done, descs=[a])
    mbarrier.wait(done, 0)
    acc.load()


@mistake(Deadlock, "waits for parity 0 of done of CTA 1 at <> (phase 0 has 0 of 1 arrivals)")
@gluon.jit
def tells_one(x):
    a, b, acc = operands()
    done = barrier_of(1, False)
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[])
    tcgen05_commit(done)
    mbarrier.wait(done, 0)


@mistake(Unfinished, "CTA 1 of the cluster exits and nobody in it has waited for tcgen05.mma")
@gluon.jit
def one_waits_for_both(x):
    a, b, acc = operands()
    done = barrier_of(1, True)
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[])
    tcgen05_commit(done)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)  # at a barrier of both the first waits


@mistake(Race, "reads acc (columns 0 to 63); nothing orders it after the write by tcgen05.mma of")
@gluon.jit
def reads_too_early(x):
    a, b, acc = operands()
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[])
    acc.load()


@mistake((Race, Uninitialised), "tcgen05.mma of starts_before_the_other_wrote at <> reads b")
@gluon.jit
def starts_before_the_other_wrote(x):
    a = gl.allocate_shared_memory(gl.float16, [256, 64], BY_ROWS)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], BY_COLUMNS)
    a.store(gl.full([256, 64], 0.0, gl.float16, ROWS))
    gl.barrier(cluster=True)
    b.store(gl.full([64, 64], 0.0, gl.float16, ROWS))
    fence_async_shared()
    acc = allocate_tensor_memory(gl.float32, [256, 64], ACC)
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[])


@mistake(Deadlock, "waits for parity 0 of ready at <> (phase 0 has 2 of 4 arrivals)")
@gluon.jit
def counts_both_twice(x):
    ready = barrier_of(2, True)
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)


@mistake(BarrierMisuse, "arrives 3 times at ready, of which phase 0 has 0 of 2")
@gluon.jit
def arrives_for_the_other(x):
    ready = barrier_of(1, True)
    mbarrier.arrive(ready, count=3)


@mistake(Deadlock, f"waits for parity 0 of full of CTA 0 at <> (phase 0 has 1 of 1 arrivals, {BYTES.value} bytes to come)")
@gluon.jit
def expects_the_bytes_of_both(x):
    tile = gl.allocate_shared_memory(gl.float16, [256, 64], BY_ROWS)
    full = barrier_of(1, False)
    mbarrier.expect(full, 2 * x.nbytes_per_cta)
    tma_load(x, [0, 0], full, tile)
    mbarrier.wait(full, 0)


@mistake(IllegalOperation, "<>: of a product of two CTAs each takes half the columns of b")
@gluon.jit
def halves_b_by_rows(x):
    a, b, acc = operands()
    tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=False, mbarriers=[])


@mistake(IllegalOperation, "reads halves of by_rows other than those that the CTAs of its cluster wrote")
@gluon.jit
def reads_other_halves(x):
    a, _, acc = operands()
    by_rows = gl.allocate_shared_memory(gl.float16, [64, 64], BY_ROWS)
    by_rows.store(gl.full([64, 64], 0.0, gl.float16, ROWS))
    fence_async_shared()
    gl.barrier(cluster=True)
    tcgen05_mma(a, reinterpret(by_rows, gl.float16, [64, 64], BY_COLUMNS), acc, use_acc=False, mbarriers=[])


@mistake(Unsupported, "of which each CTA of a cluster has a copy of its own")
@gluon.jit
def has_it_whole(x):
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], WHOLE)
    tile.store(gl.full([64, 64], 0.0, gl.float16, ROWS))


@mistake(Unsupported, "a reduction of fp16[256, 64] across the CTAs of a cluster")
@gluon.jit
def reduces_over_both(x):
    a, _, _ = operands()
    gl.max(a.load(ROWS), 0)


@mistake(Unsupported, "a reduction of fp16[256, 64] across the CTAs of a cluster")
@gluon.jit
def reduces_everything(x):
    a, _, _ = operands()
    gl.sum(a.load(ROWS))


@mistake(Unsupported, "a reduction of fp16[256, 64] across the CTAs of a cluster")
@gluon.jit
def scans_over_both(x):
    a, _, _ = operands()
    gl.associative_scan(a.load(ROWS), 0, larger)


@gluon.jit
def larger(x, y):
    return gl.maximum(x, y)


@mistake(Unsupported, "no model of copies that are multicast")
@gluon.jit
def copies_to_both(x):
    tile = gl.allocate_shared_memory(gl.float16, [256, 64], BY_ROWS)
    tma_load(x, [0, 0], barrier_of(1, False), tile, multicast=True)


@mistake(Unsupported, "no model of a relaxed barrier")
@gluon.jit
def meets_relaxed(x):
    cluster.barrier(relaxed=True)


@gluon.jit
def meets_by_the_cluster(x, MEETS: gl.constexpr):
    """As `starts_before_the_other_wrote`, with a meeting of the CTAs or of one CTA's warps before the product."""
    a, b, acc = operands()
    done = barrier_of(1, False)
    b.store(gl.full([64, 64], 0.0, gl.float16, ROWS))
    fence_async_shared()
    if MEETS:
        cluster.barrier()
    else:
        gl.barrier()
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)


@pytest.mark.parametrize("order", ORDERS)
def test_a_barrier_of_the_cluster_is_no_barrier_of_a_cta(order):
    box = TensorDescriptor.from_tensor(torch.zeros(256, 64).half(), [256, 64], BY_ROWS.value)
    simulate(meets_by_the_cluster, (1,), box, True, order=order, arch=100, num_ctas=2)
    with pytest.raises(Race):
        simulate(meets_by_the_cluster, (1,), box, False, order=order, arch=100, num_ctas=2)


@gluon.jit
def initialises_at_once(x, BOTH: gl.constexpr):
    """And invalidates. No barrier of the cluster between initialisation and use: the compiler puts one there."""
    tile = gl.allocate_shared_memory(gl.float16, [256, 64], BY_ROWS)
    full = mbarrier.allocate_mbarrier(two_ctas=BOTH)
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x.nbytes_per_cta)
    tma_load(x, [0, 0], full, tile)
    mbarrier.wait(full, 0)
    gl.barrier(cluster=True)
    mbarrier.invalidate(full)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("both", [False, True])
def test_barriers_may_be_used_once_they_are_initialised(both, order):
    box = TensorDescriptor.from_tensor(torch.zeros(256, 64).half(), [256, 64], BY_ROWS.value)
    simulate(initialises_at_once, (1,), box, both, order=order, arch=100, num_ctas=2)


def run(kernel, order: str):
    box = TensorDescriptor.from_tensor(torch.zeros(256, 64).half(), [256, 64], BY_ROWS.value)
    return simulate(kernel, (1,), box, order=order, arch=100, num_ctas=2)


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "uneven"])  # another mistake may come to light first
@pytest.mark.parametrize("kernel, error, says", MISTAKES, ids=[kernel.__name__ for kernel, *_ in MISTAKES])
def test_what_is_said(kernel, error, says, order):
    with pytest.raises(error) as raised:
        run(kernel, order)
    message = re.sub(r"test_clusters\.py:\d+ in \w+", "<>", str(raised.value))
    assert says in message, message


@pytest.mark.parametrize("order", ORDERS)
def test_of_what_is_right(order):
    assert run(right, order).tmem_columns == 64
