"""Rung 14: TMA: one thread asks for a whole tile, and hardware works out addresses, swizzles, and says when it is there.

q, k, v, out [heads, S, D], float16 or bfloat16. One CTA of WARPS warps a tile of ROWS queries, and blocks of KEYS keys.

    shared memory   shape          holds
    q_s             [ROWS, D]      Q, which the tensor cores read; at the end O on its way out
    k_s, v_s        [2, KEYS, D]   the block of K and of V that is read, and the one that is on its way

    barrier         arrivals       says
    k_full[stage]   TMA bytes      a block of K is there (with the first one Q)
    v_full[stage]   TMA bytes      a block of V is there

The n-th block uses stage n % 2 for the (n // 2)-th time, and a barrier's phase flips with each use. A stage is filled again
after a barrier of the CTA, which says that everybody's products with it are done.
"""

from strobe.ladder.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.ladder.launch import LOG2_E, Launch, tensor_descriptor

TILES = {
    64: ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4)),
    128: ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4)),
}
"""Head dim -> ROWS, KEYS and WARPS to try."""


@gluon.jit
def attention_kernel(q, k, v, out, S, scale, WARPS: gl.constexpr):
    dtype: gl.constexpr = q.dtype
    ROWS: gl.constexpr = q.block_type.shape[0]
    KEYS: gl.constexpr = k.block_type.shape[0]
    D: gl.constexpr = q.block_type.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, KEYS, 16])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    head = gl.program_id(1) * S  # the first of its rows, in all heads' rows
    row = head + gl.program_id(0) * ROWS
    q_s = gl.allocate_shared_memory(dtype, [ROWS, D], q.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, KEYS, D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, KEYS, D], v.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
    fence_async_shared()
    mbarrier.expect(k_full.index(0), q.block_type.nbytes + k.block_type.nbytes)
    tma_load(q, [row, 0], k_full.index(0), q_s)
    tma_load(k, [head, 0], k_full.index(0), k_s.index(0))
    mbarrier.expect(v_full.index(0), v.block_type.nbytes)
    tma_load(v, [head, 0], v_full.index(0), v_s.index(0))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, D], gl.float32, MMA)
    blocks = S // KEYS
    for block in range(blocks):
        here, ahead, phase, key = block % 2, (block + 1) % 2, (block // 2) & 1, head + (block + 1) * KEYS
        more = block + 1 < blocks
        mbarrier.wait(k_full.index(here), phase)
        partition_barrier()
        mbarrier.expect(k_full.index(ahead), k.block_type.nbytes, pred=more)
        tma_load(k, [key, 0], k_full.index(ahead), k_s.index(ahead), pred=more)
        s = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        s = warpgroup_mma(q_s, k_s.index(here).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
        correction = gl.exp2(m - m_new)
        p = gl.exp2(s * scale - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, MMA))[:, None]
        mbarrier.wait(v_full.index(here), phase)
        partition_barrier()
        mbarrier.expect(v_full.index(ahead), v.block_type.nbytes, pred=more)
        tma_load(v, [key, 0], v_full.index(ahead), v_s.index(ahead), pred=more)
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), A), v_s.index(here), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    acc = acc * gl.convert_layout(1 / l, gl.SliceLayout(1, MMA))[:, None]
    partition_barrier()
    q_s.store(acc.to(dtype))
    fence_async_shared()
    partition_barrier()
    tma_store(out, [row, 0], q_s)
    tma_store_wait(0)


def launches(q, k, v, out, tile=None):
    heads, S, D = q.shape
    rows, keys, warps = tile or TILES[D][0]
    tiles = tensor_descriptor(q, rows), tensor_descriptor(k, keys), tensor_descriptor(v, keys), tensor_descriptor(out, rows)
    constants = {"WARPS": warps, "num_warps": warps}
    return [Launch(attention_kernel, (S // rows, heads), (*tiles, S, D**-0.5 * LOG2_E), constants)]
