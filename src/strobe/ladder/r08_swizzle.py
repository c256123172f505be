"""Rung 8: the 16-byte units of a row are swizzled, so that the eight rows of an ldmatrix lie in different banks.

q, k, v, out [heads, S, D], float16 or bfloat16. One CTA of 4 warps a tile of 64 queries; each warp has 16 of them.

    shared memory   shape       holds
    q_s             [ROWS, D]   Q, from which each product takes its left operand again
    k_s, v_s        [KEYS, D]   a block of K and of V, which all warps read
"""

from strobe.ladder.gluon import cp_async, cp_async_commit, cp_async_wait, gl, gluon, mma_v2, partition_barrier
from strobe.ladder.launch import Launch

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a lane, 8 lanes along a row
SHARED = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))


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
def attention_kernel(q, k, v, out, S, scale, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    dtype: gl.constexpr = q.dtype.element_ty
    row, head = gl.program_id(0) * ROWS, gl.program_id(1).to(gl.int64) * S * D
    q_s = gl.allocate_shared_memory(dtype, [ROWS, D], SHARED)
    k_s = gl.allocate_shared_memory(dtype, [KEYS, D], SHARED)
    v_s = gl.allocate_shared_memory(dtype, [KEYS, D], SHARED)
    copy(q + head + tile(row, ROWS, D, COPY), q_s)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    acc = gl.zeros([ROWS, D], gl.float32, MMA)
    for key in range(0, S, KEYS):
        partition_barrier()
        copy(k + head + tile(key, KEYS, D, COPY), k_s)
        copy(v + head + tile(key, KEYS, D, COPY), v_s)
        cp_async_commit()
        cp_async_wait(0)
        partition_barrier()
        s = mma_v2(q_s.load(A), k_s.permute((1, 0)).load(B), gl.zeros([ROWS, KEYS], gl.float32, MMA)) * scale
        m_new = gl.maximum(m, gl.max(s, axis=1))
        correction = gl.exp(m - m_new)
        p = gl.exp(s - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        acc = acc * correction[:, None]
        acc = mma_v2(gl.convert_layout(p.to(dtype), A), v_s.load(B), acc)
    acc = acc * (1 / l)[:, None]
    gl.store(out + head + tile(row, ROWS, D, MMA), acc.to(dtype))


def launches(q, k, v, out, rows=64, keys=64):
    heads, S, D = q.shape
    constants = {"D": D, "ROWS": rows, "KEYS": keys, "num_warps": 4}
    return [Launch(attention_kernel, (S // rows, heads), (q, k, v, out, S, D**-0.5), constants)]
