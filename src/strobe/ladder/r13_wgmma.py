"""Rung 13: wgmma: four warps multiply together, and K and V are read from shared memory by the tensor cores themselves.

q, k, v, out [heads, S, D], float16 or bfloat16. One CTA of WARPS warps a tile of ROWS queries, and blocks of KEYS keys.

    shared memory   shape          holds
    q_s             [ROWS, D]      Q, which the tensor cores read
    k_s, v_s        [2, KEYS, D]   the block of K and of V that is read, and the one that is on its way

K and V are groups of their own: Q K^T waits for K alone, and the next K is asked for before it begins. The barrier after
a wait says that everybody's copies are there, and that everybody has read the block before, whose buffer is filled next;
the fence shows the copies to the tensor cores. After the last block it is copied again, and nobody reads that.
"""

from strobe.ladder.gluon import (
    cp_async,
    cp_async_commit,
    cp_async_wait,
    fence_async_shared,
    gl,
    gluon,
    partition_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.ladder.launch import LOG2_E, Launch

TILES = {
    64: ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4)),
    128: ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4)),
}
"""Head dim -> ROWS, KEYS and WARPS to try."""


@gluon.jit
def tile(row, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the elements of rows `row` and on, [ROWS, D]."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return rows[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def copy(pointers, buffer):
    """Start copying a tile, 16 bytes a lane."""
    cp_async(buffer, gl.multiple_of(pointers, [1, 16]))


@gluon.jit
def attention_kernel(q, k, v, out, S, scale, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr):
    dtype: gl.constexpr = q.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, KEYS, 16])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # 16 bytes a lane, 8 lanes along a row
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row, head = gl.program_id(0) * ROWS, gl.program_id(1).to(gl.int64) * S * D
    q_s = gl.allocate_shared_memory(dtype, [ROWS, D], SHARED)
    k_s = gl.allocate_shared_memory(dtype, [2, KEYS, D], SHARED)
    v_s = gl.allocate_shared_memory(dtype, [2, KEYS, D], SHARED)
    copy(q + head + tile(row, ROWS, D, COPY), q_s)
    copy(k + head + tile(0, KEYS, D, COPY), k_s.index(0))
    cp_async_commit()
    copy(v + head + tile(0, KEYS, D, COPY), v_s.index(0))
    cp_async_commit()
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, D], gl.float32, MMA)
    for block in range(S // KEYS):
        here, ahead, key = block % 2, (block + 1) % 2, gl.minimum((block + 1) * KEYS, S - KEYS)
        cp_async_wait(1)
        fence_async_shared()
        partition_barrier()
        copy(k + head + tile(key, KEYS, D, COPY), k_s.index(ahead))
        cp_async_commit()
        s = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        s = warpgroup_mma(q_s, k_s.index(here).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
        correction = gl.exp2(m - m_new)
        p = gl.exp2(s * scale - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, MMA))[:, None]
        cp_async_wait(1)
        fence_async_shared()
        partition_barrier()
        copy(v + head + tile(key, KEYS, D, COPY), v_s.index(ahead))
        cp_async_commit()
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), A), v_s.index(here), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    cp_async_wait(0)
    acc = acc * gl.convert_layout(1 / l, gl.SliceLayout(1, MMA))[:, None]
    gl.store(out + head + tile(row, ROWS, D, MMA), acc.to(dtype))


def launches(q, k, v, out, tile=None):
    heads, S, D = q.shape
    rows, keys, warps = tile or TILES[D][0]
    constants = {"D": D, "ROWS": rows, "KEYS": keys, "WARPS": warps, "num_warps": warps}
    return [Launch(attention_kernel, (S // rows, heads), (q, k, v, out, S, D**-0.5 * LOG2_E), constants)]
