"""C = A B^T for Ampere and later, in Gluon: cp.async in several stages, ldmatrix, mma.sync.

A [M, K] and B [N, K] are float16 or bfloat16 with contiguous rows, K a multiple of 8; C is [M, N] of the same dtype. One
CTA of eight warps computes one BLOCK_M x BLOCK_N tile of C; all warps do the same:

    shared memory   shape                        holds
    a_s             [STAGES, BLOCK_M, BLOCK_K]   blocks k ... k + STAGES - 1 of A, those beyond k still being copied
    b_s             [STAGES, BLOCK_N, BLOCK_K]   the same of B

Each block of A and B is one commit group of cp.async. A thread can wait for its own copies only, so after the wait a
barrier of the CTA says that everybody's copies of block k are there. The same barrier says that everybody has read block
k - 1, whose buffer then takes block k + STAGES - 1. Lanes beyond the ends of the matrices copy zeros.
"""

import torch
import triton
from check import check, small_launch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.gluon import cp_async, partition_barrier

# Copies: a warp takes 4 rows of 64 values, 16 bytes a lane. Shared memory: 16-byte units of a row are swizzled, so that
# the eight rows which one ldmatrix phase reads lie in different banks. Products: a warp has a
# quarter of the rows and half of the columns.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 2], instr_shape=[16, 8]))


@gluon.jit
def copy_block(source, row, length, k, K, buffer):
    """Start copying source[row:, k:] into a buffer [rows, BLOCK_K]: zeros from row `length` and column K on."""
    rows = row + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, COPY))
    columns = k + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, COPY))
    inside = (rows < length)[:, None] & (columns < K)[None, :]
    inside = gl.max_constancy(inside, [1, 8])  # K is a multiple of 8: a lane's 16 bytes are inside or outside together
    pointers = source + (rows.to(gl.int64) * K)[:, None] + columns[None, :]
    cp_async(buffer, gl.multiple_of(pointers, [1, 16]), mask=inside)  # bytes


@gluon.jit
def matmul_kernel(a, b, c, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                  STAGES: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = a.dtype.element_ty
    a_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], SHARED)
    b_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], SHARED)
    row, column = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N

    for k in gl.static_range(STAGES - 1):
        copy_block(a, row, M, k * BLOCK_K, K, a_s.index(k))
        copy_block(b, column, N, k * BLOCK_K, K, b_s.index(k))
        async_copy.commit_group()

    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, PRODUCT)
    for k in range(gl.cdiv(K, BLOCK_K)):
        async_copy.wait_group(STAGES - 2)
        partition_barrier()
        ahead = k + STAGES - 1  # beyond K it copies zeros that nobody reads, and the count of groups stays the same
        copy_block(a, row, M, ahead * BLOCK_K, K, a_s.index(ahead % STAGES))
        copy_block(b, column, N, ahead * BLOCK_K, K, b_s.index(ahead % STAGES))
        async_copy.commit_group()
        left = a_s.index(k % STAGES).load(gl.DotOperandLayout(0, PRODUCT, 2))
        right = b_s.index(k % STAGES).permute((1, 0)).load(gl.DotOperandLayout(1, PRODUCT, 2))
        acc = mma_v2(left, right, acc)
    async_copy.wait_group(0)

    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PRODUCT))
    columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PRODUCT))
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    gl.store(c + (rows.to(gl.int64) * N)[:, None] + columns[None, :], acc.to(dtype), mask=inside)


def launch_arguments(a, b, c, block_m=128, block_n=128, block_k=64, stages=3):
    """The kernel's grid, arguments and compile-time constants: for a launch, a simulation, or to compile only."""
    (M, K), (N, _) = a.shape, b.shape
    if K % 8 or not (a.is_contiguous() and b.is_contiguous() and c.is_contiguous()):
        raise ValueError(f"a, b and c must be contiguous and K a multiple of 8, got K = {K}")
    grid = (triton.cdiv(M, block_m), triton.cdiv(N, block_n))
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages, "num_warps": 8}
    return grid, (a, b, c, M, N, K), constants


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K], b [N, K] -> a b^T [M, N], on the GPU. ValueError if K is no multiple of 8."""
    c = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    grid, arguments, constants = launch_arguments(a, b, c)
    matmul_kernel[grid](*arguments, **constants)
    return c


def simulation():
    """For `strobe simulate`."""
    return small_launch(matmul_kernel, launch_arguments, arch=80)


if __name__ == "__main__":
    check(matmul, matmul_kernel, launch_arguments, oldest=(8, 0), newest=(12, 1))
