"""What the kernels of the forward and the backward share on the device: addresses, loads, scores, a guarded product.

Scores are kept in units of log2: the softmax takes exp2, which the hardware has, and log2(e) is folded into the scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from strobe.kernels.common.masks import visible

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Matrix(NamedTuple):
    """A tensor as a kernel sees it: rows of a batch and a head. The strides are in elements; the last dim has stride 1."""

    pointer: Any
    batch: Any
    row: Any
    head: Any


class Score(NamedTuple):
    """s = inner * q.k, or outer * tanh(inner * q.k) where outer is not None, - slope * |p - j|; all times log2(e)."""

    inner: Any
    outer: Any
    slopes: Any
    slope_batch: Any
    slope_head: Any


@triton.jit
def sequence(cu_seqlens, batch, n, total):
    """(first row, length) of a sequence. Bounds are clamped to the rows that exist, so no value reads outside of them."""
    first = n * 0
    if cu_seqlens is not None:
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), total)
        n = tl.maximum(tl.minimum(tl.load(cu_seqlens + batch + 1), total) - first, 0)
    return first, n


@triton.jit
def address(matrix, batch, row, head):
    """Where a row begins, in 64 bits."""
    at = tl.cast(batch, tl.int64) * matrix.batch + tl.cast(row, tl.int64) * matrix.row + tl.cast(head, tl.int64) * matrix.head
    return matrix.pointer + at


@triton.jit
def offsets(matrix, TILE: tl.constexpr, PADDED: tl.constexpr):
    """[TILE, PADDED] offsets of the elements of a tile from its first row."""
    rows = tl.arange(0, TILE).to(tl.int64) * matrix.row
    return rows[:, None] + tl.arange(0, PADDED)[None, :]


@triton.jit
def load_tile(pointers, remaining, TILE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """A tile [TILE, PADDED]: 0 from row `remaining` on (None: every row is there) and beyond head dim DIM."""
    columns = tl.arange(0, PADDED)[None, :] < DIM
    if remaining is not None:
        rows = tl.arange(0, TILE)[:, None] < remaining
        if DIM == PADDED:
            tile = tl.load(pointers, mask=rows, other=0.0)
        else:
            tile = tl.load(pointers, mask=rows & columns, other=0.0)
    elif DIM == PADDED:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=columns, other=0.0)
    return tile


@triton.jit
def store_tile(pointers, tile, remaining, TILE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store the first `remaining` rows and the first DIM columns of a tile."""
    rows = tl.arange(0, TILE)[:, None] < remaining
    columns = tl.arange(0, PADDED)[None, :] < DIM
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=rows & columns)


@triton.jit
def load_ids(documents, batch, first, remaining, TILE: tl.constexpr):
    """Document numbers of TILE rows; what lies beyond `remaining` is masked by its position."""
    rows = tl.arange(0, TILE)
    return tl.load(address(documents, batch, first, 0) + rows * documents.row, mask=rows < remaining, other=0)


@triton.jit
def slope_of(score, batch, head):
    """The ALiBi slope of a head, in units of log2 (0 where there is none)."""
    slope = 0.0
    if score.slopes is not None:
        slope = tl.load(score.slopes + batch * score.slope_batch + head * score.slope_head) * LOG2E
    return slope


@triton.jit
def tanh(x):
    """Accurate near 0 too, where (1 - e) / (1 + e) would cancel: Lambert's continued fraction."""
    x2 = x * x
    near = x * (10395.0 + x2 * (1260.0 + 21.0 * x2)) / (10395.0 + x2 * (4725.0 + x2 * (210.0 + x2)))
    e = tl.exp2(-2.0 * LOG2E * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(x2 < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def score_of(product, p, j, score, slope):
    """q.k -> (score in units of log2, the factor that softcap puts on its gradient); p and j broadcast to a tile."""
    factor = 1.0
    if score.outer is None:
        s = product * score.inner
    else:
        t = tanh(product * score.inner)
        s = t * score.outer
        factor = 1.0 - t * t
    if score.slopes is not None:
        s -= slope * tl.abs(p - j)
    return s, factor


@triton.jit
def seen_in(p, j, n_kv, band, ids_q, ids_kv):
    """Which pairs of a tile are visible; p and j broadcast to it, and so do the document numbers, where there are any."""
    seen = visible(p, j, n_kv, band[0], band[1], band[2])
    if ids_q is not None:
        seen = seen & (ids_q == ids_kv)
    return seen


@triton.jit
def product(a, b, acc):
    """acc + a b, with a in b's type; float32 without TF32."""
    return tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")


@triton.jit
def masked_product(a, b, seen, acc):
    """acc + a b where a is 0 at pairs not seen, and stays so: 0 * NaN must not reach a row that does not see the NaN.

    Only where b holds a NaN or an infinity is it split: its finite part goes to all rows, the rest to rows that see some.
    """
    # In float32: the interpreter knows bfloat16 by its bits only.
    broken = (tl.abs(b.to(tl.float32)) < float("inf")) == 0
    if tl.max(tl.max(broken.to(tl.int32), 1), 0) == 0:
        acc = product(a, b, acc)
    else:
        touched = tl.dot(seen.to(b.dtype), broken.to(b.dtype), input_precision="ieee") > 0
        rest = tl.dot(a.to(b.dtype), tl.where(broken, b, 0.0), input_precision="ieee")
        acc = product(a, tl.where(broken, 0.0, b), acc)
        acc = tl.where(touched, acc + rest, acc)
    return acc
