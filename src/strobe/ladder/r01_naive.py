"""Rung 1: the formula, three kernels: S = Q K^T, P = softmax(S), O = P V, with S and P [S, S] in global memory.

q, k, v, out, s [heads, S, D or S], float32, no tensor cores. A CTA has 32 warps: a warp a row of a 32 x 32 tile, a lane a
column. P takes the place of S.

    shared memory   shape      holds
    a_s, b_s        [32, D]    tiles of Q and K, or of P and V
"""

import torch

from strobe.ladder.gluon import gl, gluon, partition_barrier
from strobe.ladder.launch import Launch

TILE = gl.constexpr(32)
ROW = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [32, 1], [1, 0]))
A = gl.constexpr(gl.DotOperandLayout(0, ROW, 0))
B = gl.constexpr(gl.DotOperandLayout(1, ROW, 0))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))
CHUNK = gl.constexpr(16)  # of a sum's terms, which are in registers at a time


@gluon.jit
def tile(row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr, stride):
    """Offsets of the elements from (row, column) on of a matrix whose rows are `stride` apart, [ROWS, COLUMNS]."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, ROW))
    return rows[:, None] * stride + columns[None, :]


@gluon.jit
def product(a_s, b_s, acc):
    """acc + a_s b_s, by multiply-adds: a_s [32, K], b_s [K, N] in shared memory."""
    for i in gl.static_range(a_s.shape[1] // CHUNK):
        a, b = a_s.slice(i * CHUNK, CHUNK, dim=1), b_s.slice(i * CHUNK, CHUNK, dim=0)
        acc = gl.dot_fma(a.load(A), b.load(B), acc)
    return acc


@gluon.jit
def scores_kernel(q, k, s, S, scale, D: gl.constexpr):
    row, key, head = gl.program_id(0) * TILE, gl.program_id(1) * TILE, gl.program_id(2).to(gl.int64)
    q_s = gl.allocate_shared_memory(gl.float32, [TILE, D], SHARED)
    k_s = gl.allocate_shared_memory(gl.float32, [TILE, D], SHARED)
    q_s.store(gl.load(q + head * S * D + tile(row, 0, TILE, D, D)))
    k_s.store(gl.load(k + head * S * D + tile(key, 0, TILE, D, D)))
    partition_barrier()
    scores = product(q_s, k_s.permute((1, 0)), gl.zeros([TILE, TILE], gl.float32, ROW)) * scale
    gl.store(s + head * S * S + tile(row, key, TILE, TILE, S), scores)


@gluon.jit
def softmax_kernel(s, S):
    """Three walks along 32 rows of S: their largest scores, the sums of the exponentials, the weights."""
    row, head = gl.program_id(0) * TILE, gl.program_id(1).to(gl.int64)
    s += head * S * S
    largest = gl.full([TILE], float("-inf"), gl.float32, gl.SliceLayout(1, ROW))
    for key in range(0, S, TILE):
        largest = gl.maximum(largest, gl.max(gl.load(s + tile(row, key, TILE, TILE, S)), axis=1))
    total = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, ROW))
    for key in range(0, S, TILE):
        total += gl.sum(gl.exp(gl.load(s + tile(row, key, TILE, TILE, S)) - largest[:, None]), axis=1)
    for key in range(0, S, TILE):
        here = s + tile(row, key, TILE, TILE, S)
        gl.store(here, gl.exp(gl.load(here) - largest[:, None]) / total[:, None])


@gluon.jit
def values_kernel(p, v, out, S, D: gl.constexpr):
    row, head = gl.program_id(0) * TILE, gl.program_id(1).to(gl.int64)
    p_s = gl.allocate_shared_memory(gl.float32, [TILE, TILE], SHARED)
    v_s = gl.allocate_shared_memory(gl.float32, [TILE, D], SHARED)
    acc = gl.zeros([TILE, D], gl.float32, ROW)
    for key in range(0, S, TILE):
        partition_barrier()
        p_s.store(gl.load(p + head * S * S + tile(row, key, TILE, TILE, S)))
        v_s.store(gl.load(v + head * S * D + tile(key, 0, TILE, D, D)))
        partition_barrier()
        acc = product(p_s, v_s, acc)
    gl.store(out + head * S * D + tile(row, 0, TILE, D, D), acc)


def launches(q, k, v, out):
    heads, S, D = q.shape
    s = torch.empty(heads, S, S, dtype=torch.float32, device=q.device)
    tiles = S // TILE.value
    return [
        Launch(scores_kernel, (tiles, tiles, heads), (q, k, s, S, D**-0.5), {"D": D, "num_warps": 32}),
        Launch(softmax_kernel, (tiles, heads), (s, S), {"num_warps": 32}),
        Launch(values_kernel, (tiles, heads), (s, v, out, S), {"D": D, "num_warps": 32}),
    ]
