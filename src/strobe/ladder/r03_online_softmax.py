"""Rung 3: one launch: a CTA keeps O, l and m of its queries, and walks along the keys (online softmax).

q, k, v, out [heads, S, D], float32, no tensor cores. A CTA has 32 warps: a warp a row of a 32 x 32 tile, a lane a column.
O is divided by l once, at the end.

    shared memory   shape      holds
    q_s, k_s, v_s   [32, D]    tiles of Q, K and V
    p_s             [32, 32]   exponentials of the scores
"""

from strobe.ladder.gluon import gl, gluon, partition_barrier
from strobe.ladder.launch import Launch

TILE = gl.constexpr(32)
ROW = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [32, 1], [1, 0]))
A = gl.constexpr(gl.DotOperandLayout(0, ROW, 0))
B = gl.constexpr(gl.DotOperandLayout(1, ROW, 0))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))
CHUNK = gl.constexpr(16)  # of a sum's terms, which are in registers at a time


@gluon.jit
def tile(row, D: gl.constexpr):
    """Offsets of the elements of rows `row` and on, [32, D]."""
    rows = row + gl.arange(0, TILE, gl.SliceLayout(1, ROW))
    return rows[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]


@gluon.jit
def product(a_s, b_s, acc):
    """acc + a_s b_s, by multiply-adds: a_s [32, K], b_s [K, N] in shared memory."""
    for i in gl.static_range(a_s.shape[1] // CHUNK):
        a, b = a_s.slice(i * CHUNK, CHUNK, dim=1), b_s.slice(i * CHUNK, CHUNK, dim=0)
        acc = gl.dot_fma(a.load(A), b.load(B), acc)
    return acc


@gluon.jit
def attention_kernel(q, k, v, out, S, scale, D: gl.constexpr):
    row, head = gl.program_id(0) * TILE, gl.program_id(1).to(gl.int64) * S * D
    q_s = gl.allocate_shared_memory(gl.float32, [TILE, D], SHARED)
    k_s = gl.allocate_shared_memory(gl.float32, [TILE, D], SHARED)
    v_s = gl.allocate_shared_memory(gl.float32, [TILE, D], SHARED)
    p_s = gl.allocate_shared_memory(gl.float32, [TILE, TILE], SHARED)
    q_s.store(gl.load(q + head + tile(row, D)))
    m = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, ROW))
    l = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, ROW))
    acc = gl.zeros([TILE, D], gl.float32, ROW)
    for key in range(0, S, TILE):
        partition_barrier()
        k_s.store(gl.load(k + head + tile(key, D)))
        v_s.store(gl.load(v + head + tile(key, D)))
        partition_barrier()
        s = product(q_s, k_s.permute((1, 0)), gl.zeros([TILE, TILE], gl.float32, ROW)) * scale
        m_new = gl.maximum(m, gl.max(s, axis=1))
        correction = gl.exp(m - m_new)
        p = gl.exp(s - m_new[:, None])
        l = l * correction + gl.sum(p, axis=1)
        m = m_new
        p_s.store(p)
        partition_barrier()
        acc = product(p_s, v_s, acc * correction[:, None])
    gl.store(out + head + tile(row, D), acc / l[:, None])


def launches(q, k, v, out):
    heads, S, D = q.shape
    constants = {"D": D, "num_warps": 32}
    return [Launch(attention_kernel, (S // TILE.value, heads), (q, k, v, out, S, D**-0.5), constants)]
