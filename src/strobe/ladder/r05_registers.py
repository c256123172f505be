"""Rung 5: P stays in registers: the accumulator of the first product is the left operand of the second.

q, k, v, out [heads, S, D], float16 or bfloat16. One CTA of 4 warps a tile of 64 queries; each warp has 16 of them.
K and V come from global memory straight into the layout that mma.sync wants. No shared memory at all.
"""

from strobe.ladder.gluon import gl, gluon, mma_v2
from strobe.ladder.launch import Launch

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))


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
    q_r = gl.load(q + head + tile(row, ROWS, D, A))
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    acc = gl.zeros([ROWS, D], gl.float32, MMA)
    for key in range(0, S, KEYS):
        k_r = gl.load(k + head + turned(key, KEYS, D, B))
        s = mma_v2(q_r, k_r, gl.zeros([ROWS, KEYS], gl.float32, MMA)) * scale
        m_new = gl.maximum(m, gl.max(s, axis=1))
        correction = gl.exp(m - m_new)
        p = gl.exp(s - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        acc = acc * correction[:, None]
        v_r = gl.load(v + head + tile(key, KEYS, D, B))
        acc = mma_v2(gl.convert_layout(p.to(dtype), A), v_r, acc)
    acc = acc * (1 / l)[:, None]
    gl.store(out + head + tile(row, ROWS, D, MMA), acc.to(dtype))


def launches(q, k, v, out, rows=64, keys=64):
    heads, S, D = q.shape
    constants = {"D": D, "ROWS": rows, "KEYS": keys, "num_warps": 4}
    return [Launch(attention_kernel, (S // rows, heads), (q, k, v, out, S, D**-0.5), constants)]
