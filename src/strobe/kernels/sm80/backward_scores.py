"""From products to dS in the registers of mma.sync's backward, all transposed: a row of a tile there is a key."""

from strobe.kernels.common.gluon_philox import dropped
from strobe.kernels.gluon import gl, gluon
from strobe.kernels.sm90.scores import documents_of_keys, documents_of_rows, score_and_factors, weighed


@gluon.jit
def indices_transposed(K, s, row, work):
    """Indices in their sequence: of the rows of the tile that begins at `row`, and of the block's keys. s: a tensor with the
    layout of scores."""
    LAYOUT: gl.constexpr = s.type.layout
    rows = row + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
    return rows, work.first + gl.arange(0, K.C.tile_kv, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def scores_transposed(K, s, row, head, slope, work):
    """q.k -> (score in powers of two, the factors of its gradient: see `sm90.scores.score_and_factors`)."""
    if not K.score.CHANGED:
        return s * K.score.inner, 1.0, 1.0
    else:
        rows, keys = indices_transposed(K, s, row, work)
        return score_and_factors(s, rows[None, :], keys[:, None], work.batch, head, slope, work.n_q, work.n_kv, K.score)


@gluon.jit
def apply_mask_transposed(K, x, row, head, work):
    """x [keys, rows] with -inf where a row of the tile that begins at `row` does not see a key.

    Row 8 a + 2 b + e of a tile lies in lane b of a quad. Seen in these dims a lane compares a number of its own with numbers
    that the compiler knows: no registers for rows."""
    y = gl.reshape(x, [K.C.tile_kv, x.shape[1] // 8, 4, 2])
    L: gl.constexpr = y.type.layout
    key = work.first + gl.arange(0, K.C.tile_kv, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    a = gl.arange(0, x.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    within = 8 * a[None, :, None, None] + e[None, None, None, :]
    first = row + 2 * b[None, None, :, None]
    p = first + (work.n_kv - work.n_q)
    key = key[:, None, None, None]
    hidden = float("-inf")
    y = gl.where(key < work.n_kv, y, hidden)
    y = gl.where(within < work.n_q - first, y, hidden)
    if K.lengths.right is not None:
        y = gl.where(within >= key - K.lengths.right - p, y, hidden)
    if K.lengths.left is not None:
        y = gl.where(within <= key + K.lengths.left - p, y, hidden)
    if K.lengths.prefix is not None:
        y = gl.where(within >= gl.where(key < K.lengths.prefix, 0, key - p), y, hidden)
    x = gl.convert_layout(gl.reshape(y, x.shape), x.type.layout)
    rows, keys = indices_transposed(K, x, row, work)
    if K.score.document_q is not None:
        of_rows = documents_of_rows(work.batch, rows, work.n_q, K.score)
        of_keys = documents_of_keys(work.batch, keys, work.n_kv, K.score)
        x = gl.where(of_rows[None, :] == of_keys[:, None], x, hidden)
    if K.score.visible is not None:
        x = gl.where(K.score.visible(work.batch, head, rows[None, :], keys[:, None]), x, hidden)
    return x


@gluon.jit
def kept_weights_transposed(K, p, row, head, work):
    """P with 0 for what dropout drops, and what is kept multiplied."""
    if K.score.seed is None:
        return p
    else:
        kept = dropped(p, work.first, row, K.score.seed, K.score.threshold, work.batch, head, TRANSPOSED=True)
        return kept * K.score.kept_scale


@gluon.jit
def gradients_transposed(K, p, kept, dp, delta, factor, of_function):
    """dS: P (dP - delta) and what comes of changed scores. kept: P after dropout."""
    if K.score.seed is None:
        ds = weighed(p, of_function, K.score) * (dp - delta)
    else:
        ds = weighed(kept, of_function, K.score) * dp - weighed(p, of_function, K.score) * delta
    if K.score.CHANGED:
        ds = ds * factor
    return ds
