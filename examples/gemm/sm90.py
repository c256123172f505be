"""C = A B^T for Hopper, in Gluon: TMA, mbarriers, warp specialisation, asynchronous wgmma; persistent.

A [M, K] and B [N, K] are float16 or bfloat16, C is [M, N] of the same dtype; rows are contiguous and multiples of 16 bytes.
As many CTAs as fit the GPU each compute several tiles of C, one after the other. Their warps have roles:

    role        warps   work
    producer    1       copies blocks of A and B from global to shared memory (TMA), which fills with zeros beyond the ends
    consumer w  4       64 of the tile's 128 rows: products (wgmma), then its part of C through shared memory (TMA)

    shared memory   shape                    filled by     read by
    a_s             [STAGES, 128, BLOCK_K]   producer      consumer w its 64 rows
    b_s             [STAGES, BLOCK_N, BLOCK_K]   producer  both consumers
    c_s             [2, 64, BLOCK_N]         consumer w its part, which TMA reads

    barrier        arrivals        says
    full[stage]    TMA bytes       blocks of A and B are there
    empty[stage]   2, consumers    both consumers have read them

Blocks are counted by `position` over all tiles of a CTA: position p uses stage p % STAGES for the (p // STAGES)-th time,
and a barrier's phase flips with every use. So the producer runs ahead into the next tile while this one is stored.
A consumer keeps one product in flight: it gives back a stage when the product after it has been issued.
"""

from functools import partial

import torch
import triton
from check import check, small_launch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from strobe.kernels.gluon import partition_barrier, tma_load, tma_store, tma_store_wait

ROWS = gl.constexpr(64)  # of a consumer: the M of a wgmma
CONSUMERS = gl.constexpr(2)


@gluon.jit
def tile_origin(i, N, BLOCK_N: gl.constexpr):
    """First row and column of this CTA's i-th tile."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    columns = gl.cdiv(N, BLOCK_N)
    return tile // columns * (CONSUMERS * ROWS), tile % columns * BLOCK_N


@gluon.jit
def producer(a_desc, b_desc, a_s, b_s, full, empty, N, K, tiles):
    STAGES: gl.constexpr = a_s.shape[0]
    BLOCK_K: gl.constexpr = a_s.shape[2]
    position = 0
    for i in range(tiles):
        row, column = tile_origin(i, N, b_s.shape[1])
        for k in range(0, K, BLOCK_K):
            stage = position % STAGES
            mbarrier.wait(empty.index(stage), ((position // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [row, k], full.index(stage), a_s.index(stage))
            tma_load(b_desc, [column, k], full.index(stage), b_s.index(stage))
            position += 1


@gluon.jit
def consumer(W: gl.constexpr, c_desc, a_s, b_s, c_s, full, empty, N, K, tiles):
    STAGES: gl.constexpr = a_s.shape[0]
    BLOCK_K: gl.constexpr = a_s.shape[2]
    BLOCK_N: gl.constexpr = b_s.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    c_buffer = c_s.index(W)
    position = 0
    for i in range(tiles):
        row, column = tile_origin(i, N, BLOCK_N)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        for k in range(0, K, BLOCK_K):
            stage = position % STAGES
            mbarrier.wait(full.index(stage), (position // STAGES) & 1)
            a = a_s.index(stage).slice(W * ROWS, ROWS)
            acc = warpgroup_mma(a, b_s.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((position + STAGES - 1) % STAGES), count=1, pred=k > 0)
            position += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((position + STAGES - 1) % STAGES), count=1)

        tma_store_wait(0)  # the store of the tile before has read the buffer; only its thread can wait for it
        partition_barrier()
        c_buffer.store(acc.to(c_desc.dtype))
        fence_async_shared()
        partition_barrier()
        tma_store(c_desc, [row + W * ROWS, column], c_buffer)
    tma_store_wait(0)


@gluon.jit
def matmul_kernel(a_desc, b_desc, c_desc, M, N, K, STAGES: gl.constexpr):
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    a_s = gl.allocate_shared_memory(a_desc.dtype, [STAGES, CONSUMERS * ROWS, BLOCK_K], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    c_s = gl.allocate_shared_memory(c_desc.dtype, [CONSUMERS, ROWS, BLOCK_N], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    tiles = gl.cdiv(M, CONSUMERS * ROWS) * gl.cdiv(N, BLOCK_N)
    tiles = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))  # of this CTA
    gl.warp_specialize([
        (consumer, (0, c_desc, a_s, b_s, c_s, full, empty, N, K, tiles)),
        (consumer, (1, c_desc, a_s, b_s, c_s, full, empty, N, K, tiles)),
        (producer, (a_desc, b_desc, a_s, b_s, full, empty, N, K, tiles)),
    ], [4, 1], [232, 40])  # fmt: skip


def descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def launch_arguments(a, b, c, ctas=132, block_n=256, block_k=64, stages=3):
    """The kernel's grid, arguments and compile-time constants: for a launch, a simulation, or to compile only."""
    (M, K), (N, _) = a.shape, b.shape
    rows = CONSUMERS.value * ROWS.value
    descriptors = descriptor(a, [rows, block_k]), descriptor(b, [block_n, block_k]), descriptor(c, [ROWS.value, block_n])
    grid = (min(ctas, triton.cdiv(M, rows) * triton.cdiv(N, block_n)),)
    return grid, (*descriptors, M, N, K), {"STAGES": stages, "num_warps": 4}


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K], b [N, K] -> a b^T [M, N], on a Hopper GPU. AssertionError if a row is no multiple of 16 bytes."""
    c = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    ctas = torch.cuda.get_device_properties(a.device).multi_processor_count
    grid, arguments, constants = launch_arguments(a, b, c, ctas)
    matmul_kernel[grid](*arguments, **constants)
    return c


def simulation():
    """For `strobe simulate`."""
    return small_launch(matmul_kernel, partial(launch_arguments, ctas=2), arch=90)


if __name__ == "__main__":
    check(matmul, matmul_kernel, launch_arguments, oldest=(9, 0), newest=(9, 0))
