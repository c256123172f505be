"""Rung 15: warps have roles: one copies, two groups of four compute, and barriers in shared memory are all that they share.

q, k, v, out [heads, S, D], float16 or bfloat16. One CTA a tile of 128 queries, and blocks of KEYS keys.

    role        warps   work
    producer    1       copies Q, and blocks of K and V as their buffers become free (TMA)
    consumer w  4       64 of the queries: S = Q K^T, softmax, O += P V

    shared memory   shape              filled by     read by
    q_s             [2, 64, D]         producer      consumer w its 64 rows; at the end O on its way out
    k_s, v_s        [2, KEYS, D]       producer      both consumers

    barrier              arrivals        says
    q_full[w]            TMA bytes       consumer w's rows of Q are there
    k_full, v_full       TMA bytes       a block is there
    k_empty, v_empty     2, consumers    both have read it

The n-th block uses stage n % 2 for the (n // 2)-th time, and a barrier's phase flips with each use.
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

ROWS = gl.constexpr(64)  # of a consumer: the M of a wgmma
TILES = {64: ((128,), (64,)), 128: ((128,), (64,))}
"""Head dim -> KEYS to try."""


@gluon.jit
def producer(q, k, v, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, S):
    KEYS: gl.constexpr = k.block_type.shape[0]
    head = gl.program_id(1) * S  # the first of its rows, in all heads' rows
    for w in gl.static_range(2):
        mbarrier.expect(q_full.index(w), q.block_type.nbytes)
        tma_load(q, [head + (gl.program_id(0) * 2 + w) * ROWS, 0], q_full.index(w), q_s.index(w))
    for block in range(S // KEYS):
        stage, phase, key = block % 2, (block // 2) & 1, head + block * KEYS
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
        tma_load(k, [key, 0], k_full.index(stage), k_s.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
        tma_load(v, [key, 0], v_full.index(stage), v_s.index(stage))


@gluon.jit
def consumer(W: gl.constexpr, out, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, S, scale):
    KEYS: gl.constexpr = k_s.shape[1]
    D: gl.constexpr = k_s.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, D], gl.float32, MMA)
    mbarrier.wait(q_full.index(W), 0)
    for block in range(S // KEYS):
        stage, phase = block % 2, (block // 2) & 1
        mbarrier.wait(k_full.index(stage), phase)
        s = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        s = warpgroup_mma(q_s.index(W), k_s.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
        correction = gl.exp2(m - m_new)
        p = gl.exp2(s * scale - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, MMA))[:, None]
        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(gl.convert_layout(p.to(out.dtype), A), v_s.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage), count=1)
    acc = acc * gl.convert_layout(1 / l, gl.SliceLayout(1, MMA))[:, None]
    q_s.index(W).store(acc.to(out.dtype))
    fence_async_shared()
    partition_barrier()
    tma_store(out, [gl.program_id(1) * S + (gl.program_id(0) * 2 + W) * ROWS, 0], q_s.index(W))
    tma_store_wait(0)


@gluon.jit
def attention_kernel(q, k, v, out, S, scale):
    KEYS: gl.constexpr = k.block_type.shape[0]
    D: gl.constexpr = k.block_type.shape[1]
    q_s = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], q.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [2, KEYS, D], k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [2, KEYS, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (0, out, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, S, scale)),
        (consumer, (1, out, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, S, scale)),
        (producer, (q, k, v, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, S)),
    ], [4, 1], [240, 24])  # fmt: skip


def launches(q, k, v, out, tile=None):
    heads, S, D = q.shape
    (keys,), rows = tile or TILES[D][0], ROWS.value
    tiles = tensor_descriptor(q, rows), tensor_descriptor(k, keys), tensor_descriptor(v, keys), tensor_descriptor(out, rows)
    return [Launch(attention_kernel, (S // (2 * rows), heads), (*tiles, S, D**-0.5 * LOG2_E), {"num_warps": 4})]
