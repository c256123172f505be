"""Rung 4: tensor cores, with S and P through shared memory, as the wmma API has it.

q, k, v, out [heads, S, D], float16 or bfloat16. One CTA of 4 warps a tile of 64 queries; each warp has 16 of them.
K and V come from global memory straight into the layout that mma.sync wants.

    shared memory   shape          holds
    s_s             [ROWS, KEYS]   scores, as the tensor cores leave them, for a softmax that wants whole rows
    p_s             [ROWS, KEYS]   their exponentials, for the second product
"""

from strobe.ladder.gluon import gl, gluon, mma_v2, partition_barrier
from strobe.ladder.launch import Launch

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
ROW = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))  # 16 lanes along a row
SQUARE = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))


@gluon.jit
def tile(row, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the elements of rows `row` and on, [ROWS, D]."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return rows[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def turned(row, ROWS: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the same elements as [D, ROWS]."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    return rows[None, :] * D + gl.arange(0, D, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def attention_kernel(q, k, v, out, S, scale, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    dtype: gl.constexpr = q.dtype.element_ty
    row, head = gl.program_id(0) * ROWS, gl.program_id(1).to(gl.int64) * S * D
    s_s = gl.allocate_shared_memory(gl.float32, [ROWS, KEYS], SQUARE)
    p_s = gl.allocate_shared_memory(dtype, [ROWS, KEYS], SQUARE)
    q_r = gl.load(q + head + tile(row, ROWS, D, A))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, ROW))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, ROW))
    acc = gl.zeros([ROWS, D], gl.float32, MMA)
    for key in range(0, S, KEYS):
        k_r = gl.load(k + head + turned(key, KEYS, D, B))
        s_s.store(mma_v2(q_r, k_r, gl.zeros([ROWS, KEYS], gl.float32, MMA)))
        partition_barrier()
        s = s_s.load(ROW) * scale
        m_new = gl.maximum(m, gl.max(s, axis=1))
        correction = gl.exp(m - m_new)
        p = gl.exp(s - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        p_s.store(p.to(dtype))
        partition_barrier()
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, MMA))[:, None]
        v_r = gl.load(v + head + tile(key, KEYS, D, B))
        acc = mma_v2(p_s.load(A), v_r, acc)
    acc = acc * gl.convert_layout(1 / l, gl.SliceLayout(1, MMA))[:, None]
    gl.store(out + head + tile(row, ROWS, D, MMA), acc.to(dtype))


def launches(q, k, v, out, rows=64, keys=64):
    heads, S, D = q.shape
    constants = {"D": D, "ROWS": rows, "KEYS": keys, "num_warps": 4}
    return [Launch(attention_kernel, (S // rows, heads), (q, k, v, out, S, D**-0.5), constants)]
