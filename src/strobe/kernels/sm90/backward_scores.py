"""From S and dP to dS in the registers of Hopper's backward, all transposed: a row of a tile there is a key."""

from strobe.kernels.common.gluon_philox import dropped
from strobe.kernels.gluon import gl, gluon
from strobe.kernels.sm90.backward_tiles import HALF
from strobe.kernels.sm90.layouts import accumulator, columns_of, rows_of
from strobe.kernels.sm90.scores import add_to_bias, documents_of_keys, documents_of_rows, score_and_factors, weighed


@gluon.jit
def indices_transposed(w: gl.constexpr, row, work, TILE_Q: gl.constexpr):
    """Indices in their sequence: of the rows of the tile that begins at `row`, and of group w's keys."""
    rows = row + gl.arange(0, TILE_Q, columns_of(TILE_Q))
    return rows, work.first + w * HALF + gl.arange(0, HALF, rows_of(TILE_Q))


@gluon.jit
def scores_transposed(s, w: gl.constexpr, row, head, slope, work, score):
    """q.k -> (score in powers of two, the factors of its gradient: see `scores.score_and_factors`)."""
    if not score.CHANGED:
        return s * score.inner, 1.0, 1.0
    else:
        rows, keys = indices_transposed(w, row, work, s.shape[1])
        return score_and_factors(s, rows[None, :], keys[:, None], work.batch, head, slope, work.n_q, work.n_kv, score)


@gluon.jit
def apply_mask_transposed(w: gl.constexpr, K, x, other, row, head, work):
    """x [64 keys, tile_q] with `other` where a row of the tile that begins at `row` does not see a key.

    Row 8 a + 2 b + e of a tile lies in lane b of a quad. Seen in these dims a lane compares a number of its own with numbers
    that the compiler knows: no registers for rows."""
    TILE_Q: gl.constexpr = x.shape[1]
    y = gl.reshape(x, [HALF, TILE_Q // 8, 4, 2])
    L: gl.constexpr = y.type.layout
    key = work.first + w * HALF + gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    a = gl.arange(0, TILE_Q // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    within = 8 * a[None, :, None, None] + e[None, None, None, :]
    p = row + (work.n_kv - work.n_q) + 2 * b[None, None, :, None]
    key = key[:, None, None, None]
    y = gl.where(key < work.n_kv, y, other)
    if K.lengths.right is not None:
        y = gl.where(within >= key - K.lengths.right - p, y, other)
    if K.lengths.left is not None:
        y = gl.where(within <= key + K.lengths.left - p, y, other)
    if K.lengths.prefix is not None:
        y = gl.where(within >= gl.where(key < K.lengths.prefix, 0, key - p), y, other)
    x = gl.convert_layout(gl.reshape(y, [HALF, TILE_Q]), accumulator(TILE_Q))
    rows, keys = indices_transposed(w, row, work, TILE_Q)
    if K.score.document_q is not None:
        of_rows = documents_of_rows(work.batch, rows, work.n_q, K.score)
        of_keys = documents_of_keys(work.batch, keys, work.n_kv, K.score)
        x = gl.where(of_rows[None, :] == of_keys[:, None], x, other)
    if K.score.visible is not None:
        x = gl.where(K.score.visible(work.batch, head, rows[None, :], keys[:, None]), x, other)
    return x


@gluon.jit
def kept_weights_transposed(p, w: gl.constexpr, row, head, work, score):
    """P with 0 for what dropout drops, and what is kept multiplied."""
    if score.seed is None:
        return p
    else:
        first = work.first + w * HALF
        return dropped(p, first, row, score.seed, score.threshold, work.batch, head, TRANSPOSED=True) * score.kept_scale


@gluon.jit
def gradients_transposed(w: gl.constexpr, K, p, kept, dp, delta, factor, of_function, row, head, work):
    """dS, also to where a bias's gradient goes: P (dP - delta) and what comes of changed scores. kept: P after dropout."""
    if K.score.seed is None:
        ds = weighed(p, of_function, K.score) * (dp - delta)
    else:
        ds = weighed(kept, of_function, K.score) * dp - weighed(p, of_function, K.score) * delta
    if K.outputs.dbias.pointer is not None:
        rows, keys = indices_transposed(w, row, work, p.shape[1])
        add_to_bias(K.outputs.dbias, ds, p, rows, keys, work.batch, head, work.n_q, work.n_kv, TRANSPOSED=True)
    if K.score.CHANGED:
        ds = ds * factor
    return ds
