"""Kernels of one warp or warpgroup, with one instruction each, whose registers are seen from outside."""

import triton
import triton.language as tl

from strobe.ladder.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mma_v2,
    partition_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@triton.jit
def multiply(a, b, c, d):
    """D = A B + C by one mma.m16n8k16; a [4, 32], b [2, 32], c and d [4, 32]: registers of the lanes."""
    lane = tl.arange(0, 32)
    d0, d1, d2, d3 = tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [
            tl.load(a + lane), tl.load(a + 32 + lane), tl.load(a + 64 + lane), tl.load(a + 96 + lane),
            tl.load(b + lane), tl.load(b + 32 + lane),
            tl.load(c + lane), tl.load(c + 32 + lane), tl.load(c + 64 + lane), tl.load(c + 96 + lane),
        ],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(d + lane, d0)
    tl.store(d + 32 + lane, d1)
    tl.store(d + 64 + lane, d2)
    tl.store(d + 96 + lane, d3)


@triton.jit
def load_matrices(rows, out, TRANSPOSED: tl.constexpr):
    """ldmatrix.x4 of four 8 x 8 matrices of 16 bits, rows [32, 4 words], which each lane first puts into shared memory: lane l
    row l. out: [4, 32] registers."""
    lane = tl.arange(0, 32)
    KIND: tl.constexpr = ".trans" if TRANSPOSED else ""
    r0, r1, r2, r3 = tl.inline_asm_elementwise(
        "{\n.shared .align 16 .b8 matrices[512];\n.reg .u32 base, place;\nmov.u32 base, matrices;\n"
        "mad.lo.u32 place, $8, 16, base;\n"
        "st.shared.v4.b32 [place], {$4, $5, $6, $7};\nbar.warp.sync -1;\n"
        "ldmatrix.sync.aligned.m8n8.x4" + KIND + ".shared.b16 {$0, $1, $2, $3}, [place];\n}",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [
            tl.load(rows + 4 * lane), tl.load(rows + 4 * lane + 1), tl.load(rows + 4 * lane + 2),
            tl.load(rows + 4 * lane + 3), lane,
        ],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + lane, r0)
    tl.store(out + 32 + lane, r1)
    tl.store(out + 64 + lane, r2)
    tl.store(out + 96 + lane, r3)


@gluon.jit
def places(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return rows[:, None] * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def store_with_holders(d, threads, value, LAYOUT: gl.constexpr):
    """Stores a product, and for each of its elements the number of the thread that holds it."""
    there = places(value.shape[0], value.shape[1], LAYOUT)
    holder = gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(d + there, value)
    gl.store(threads + there, holder)


@gluon.jit
def holders_of_mma(a, b, d, threads):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    left, right = gl.load(a + places(16, 16, A)), gl.load(b + places(16, 8, B))
    store_with_holders(d, threads, mma_v2(left, right, gl.zeros([16, 8], gl.float32, MMA)), MMA)


@gluon.jit
def holders_of_wgmma(a, b, d, threads):
    WGMMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    a_s = gl.allocate_shared_memory(gl.float16, [64, 16], SHARED)
    b_s = gl.allocate_shared_memory(gl.float16, [16, 16], SHARED)
    a_s.store(gl.load(a + places(64, 16, FLAT)))
    b_s.store(gl.load(b + places(16, 16, FLAT)))
    fence_async_shared()
    partition_barrier()
    acc = warpgroup_mma(a_s, b_s, gl.zeros([64, 16], gl.float32, WGMMA), use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    store_with_holders(d, threads, acc, WGMMA)
