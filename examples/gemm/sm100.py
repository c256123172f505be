"""C = A B^T for Blackwell, in Gluon: TMA, tcgen05 with tensor memory, warp specialisation; persistent. Triton 3.8 or newer.

A [M, K] and B [N, K] are float16 or bfloat16, C is [M, N] of the same dtype; rows are contiguous and multiples of 16 bytes.
As many CTAs as fit the GPU each compute several tiles of C, one after the other. Their warps have roles:

    role       warps   work
    producer   1       copies blocks of A and B from global to shared memory (TMA), which fills with zeros beyond the ends
    mma        1       issues the products; the tensor core adds them up in tensor memory
    epilogue   4       takes a finished tile out of tensor memory, 64 columns at a time, and through shared memory to C

    memory           shape                        filled by     read by
    a_s              [STAGES, 128, BLOCK_K]       producer      tensor core
    b_s              [STAGES, BLOCK_N, BLOCK_K]   producer      tensor core
    accumulators     [2, 128, BLOCK_N] in TMEM    tensor core   epilogue
    c_s              [2, 128, 64]                 epilogue      TMA

    barrier          arrivals                     says
    full[stage]      TMA bytes                    blocks of A and B are there
    empty[stage]     1, the tensor core           the product has read them
    acc_full[i]      1, the tensor core           all products of a tile are done (commit)
    acc_empty[i]     1, epilogue                  the accumulator has been read

There are two accumulators, so that one tile is stored while the next is computed. Blocks are counted by `position` over all
tiles of a CTA, tiles by i: the p-th use of a ring of S buffers is of buffer p % S for the (p // S)-th time, and a barrier's
phase flips with every use.
"""

from functools import partial

import torch
import triton
from check import check, small_launch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from strobe.kernels.gluon import partition_barrier, tma_load, tma_store, tma_store_wait

BLOCK_M = gl.constexpr(128)
CHUNK = gl.constexpr(64)  # columns that the epilogue holds in registers at once


@gluon.jit
def tile_origin(i, N, BLOCK_N: gl.constexpr):
    """First row and column of this CTA's i-th tile."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    columns = gl.cdiv(N, BLOCK_N)
    return tile // columns * BLOCK_M, tile % columns * BLOCK_N


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
def mma(a_s, b_s, accumulators, full, empty, acc_full, acc_empty, K, tiles):
    STAGES: gl.constexpr = a_s.shape[0]
    BLOCK_K: gl.constexpr = a_s.shape[2]
    position = 0
    for i in range(tiles):
        acc = accumulators.index(i % 2)
        mbarrier.wait(acc_empty.index(i % 2), ((i // 2) & 1) ^ 1)
        for k in range(0, K, BLOCK_K):
            stage = position % STAGES
            mbarrier.wait(full.index(stage), (position // STAGES) & 1)
            b = b_s.index(stage).permute((1, 0))
            tcgen05_mma(a_s.index(stage), b, acc, use_acc=k > 0, mbarriers=[empty.index(stage)])
            position += 1
        tcgen05_commit(acc_full.index(i % 2))


@gluon.jit
def epilogue(c_desc, c_s, accumulators, acc_full, acc_empty, N, tiles):
    BLOCK_N: gl.constexpr = accumulators.shape[2]
    for i in range(tiles):
        row, column = tile_origin(i, N, BLOCK_N)
        acc = accumulators.index(i % 2)
        mbarrier.wait(acc_full.index(i % 2), (i // 2) & 1)
        for j in gl.static_range(BLOCK_N // CHUNK):
            c = acc.slice(j * CHUNK, CHUNK).load()
            if j == BLOCK_N // CHUNK - 1:
                mbarrier.arrive(acc_empty.index(i % 2), count=1)
            tma_store_wait(1)  # the store before the last one has read its buffer; only its thread can wait for it
            partition_barrier()
            c_s.index(j % 2).store(c.to(c_desc.dtype))
            fence_async_shared()
            partition_barrier()
            tma_store(c_desc, [row, column + j * CHUNK], c_s.index(j % 2))
    tma_store_wait(0)


@gluon.jit
def make_barriers(number: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def matmul_kernel(a_desc, b_desc, c_desc, M, N, K, STAGES: gl.constexpr):
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    a_s = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    c_s = gl.allocate_shared_memory(c_desc.dtype, [2, BLOCK_M, CHUNK], c_desc.layout)
    accumulators = allocate_tensor_memory(
        gl.float32, [2, BLOCK_M, BLOCK_N], TensorMemoryLayout((BLOCK_M, BLOCK_N), col_stride=1)
    )
    full, empty = make_barriers(STAGES), make_barriers(STAGES)
    acc_full, acc_empty = make_barriers(2), make_barriers(2)
    fence_async_shared()
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    tiles = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))  # of this CTA
    gl.warp_specialize([
        (epilogue, (c_desc, c_s, accumulators, acc_full, acc_empty, N, tiles)),
        (producer, (a_desc, b_desc, a_s, b_s, full, empty, N, K, tiles)),
        (mma, (a_s, b_s, accumulators, full, empty, acc_full, acc_empty, K, tiles)),
    ], [1, 1], [40, 40])  # fmt: skip


def descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def launch_arguments(a, b, c, ctas=148, block_n=256, block_k=64, stages=4):
    """The kernel's grid, arguments and compile-time constants: for a launch, a simulation, or to compile only."""
    (M, K), (N, _) = a.shape, b.shape
    rows, chunk = BLOCK_M.value, CHUNK.value
    descriptors = descriptor(a, [rows, block_k]), descriptor(b, [block_n, block_k]), descriptor(c, [rows, chunk])
    grid = (min(ctas, triton.cdiv(M, rows) * triton.cdiv(N, block_n)),)
    return grid, (*descriptors, M, N, K), {"STAGES": stages, "num_warps": 4}


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K], b [N, K] -> a b^T [M, N], on a Blackwell GPU. AssertionError if a row is no multiple of 16 bytes."""
    c = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    ctas = torch.cuda.get_device_properties(a.device).multi_processor_count
    grid, arguments, constants = launch_arguments(a, b, c, ctas)
    matmul_kernel[grid](*arguments, **constants)
    return c


def simulation():
    """For `strobe simulate`."""
    return small_launch(matmul_kernel, partial(launch_arguments, ctas=2), arch=100)


if __name__ == "__main__":
    check(matmul, matmul_kernel, launch_arguments, oldest=(10, 0), newest=(10, 3))
