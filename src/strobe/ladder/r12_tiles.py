"""Rung 12: tiles of other sizes, of which the fastest is taken.

q, k, v, out [heads, S, D], float16 or bfloat16. One CTA of WARPS warps a tile of ROWS queries, and blocks of KEYS keys.

    shared memory   shape          holds
    q_s             [ROWS, D]      Q on its way to registers
    k_s, v_s        [2, KEYS, D]   the block of K and of V that is read, and the one that is on its way

K and V are groups of their own: Q K^T waits for K alone, and the next K is asked for before it begins. The barrier after
a wait says that everybody's copies are there, and that everybody has read the block before, whose buffer is filled next.
After the last block it is copied again, and nobody reads that.
"""

from strobe.ladder.gluon import cp_async, cp_async_commit, cp_async_wait, gl, gluon, mma_v2, partition_barrier
from strobe.ladder.launch import LOG2_E, Launch

TILES = {
    64: ((128, 64, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8), (128, 32, 4)),
    128: ((128, 64, 8), (64, 64, 4), (64, 32, 4), (128, 32, 8), (128, 32, 4)),
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
def fragment(k_s, column: gl.constexpr, B: gl.constexpr):
    """Sixteen columns of K as the right operand [16, KEYS] of a product."""
    return k_s.slice(column, 16, dim=1).permute((1, 0)).load(B)


@gluon.jit
def attention_kernel(q, k, v, out, S, scale, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
                     WARPS: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # 16 bytes a lane, 8 lanes along a row
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    row, head = gl.program_id(0) * ROWS, gl.program_id(1).to(gl.int64) * S * D
    q_s = gl.allocate_shared_memory(dtype, [ROWS, D], SHARED)
    k_s = gl.allocate_shared_memory(dtype, [2, KEYS, D], SHARED)
    v_s = gl.allocate_shared_memory(dtype, [2, KEYS, D], SHARED)
    copy(q + head + tile(row, ROWS, D, COPY), q_s)
    copy(k + head + tile(0, KEYS, D, COPY), k_s.index(0))
    cp_async_commit()
    copy(v + head + tile(0, KEYS, D, COPY), v_s.index(0))
    cp_async_commit()
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    acc = gl.zeros([ROWS, D], gl.float32, MMA)
    cp_async_wait(1)
    partition_barrier()
    q_r = ()
    for i in gl.static_range(D // 16):
        q_r += (q_s.slice(16 * i, 16, dim=1).load(A),)
    for block in range(S // KEYS):
        here, ahead, key = block % 2, (block + 1) % 2, gl.minimum((block + 1) * KEYS, S - KEYS)
        cp_async_wait(1)
        partition_barrier()
        copy(k + head + tile(key, KEYS, D, COPY), k_s.index(ahead))
        cp_async_commit()
        s = gl.zeros([ROWS, KEYS], gl.float32, MMA)
        k_r = fragment(k_s.index(here), 0, B)
        for i in gl.static_range(D // 16):
            k_next = fragment(k_s.index(here), (i + 1) * 16 % D, B)
            s = mma_v2(q_r[i], k_r, s)
            k_r = k_next
        m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
        correction = gl.exp2(m - m_new)
        p = gl.exp2(s * scale - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        acc = acc * correction[:, None]
        cp_async_wait(1)
        partition_barrier()
        copy(v + head + tile(key, KEYS, D, COPY), v_s.index(ahead))
        cp_async_commit()
        acc = mma_v2(gl.convert_layout(p.to(dtype), A), v_s.index(here).load(B), acc)
    cp_async_wait(0)
    acc = acc * (1 / l)[:, None]
    gl.store(out + head + tile(row, ROWS, D, MMA), acc.to(dtype))


def launches(q, k, v, out, tile=None):
    heads, S, D = q.shape
    rows, keys, warps = tile or TILES[D][0]
    constants = {"D": D, "ROWS": rows, "KEYS": keys, "WARPS": warps, "num_warps": warps}
    return [Launch(attention_kernel, (S // rows, heads), (q, k, v, out, S, D**-0.5 * LOG2_E), constants)]
