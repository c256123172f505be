"""From products to scores in the registers of mma.sync: what changes scores, and the masks. A tile here is rows by keys."""

from strobe.kernels.common.gluon_philox import dropped
from strobe.kernels.gluon import gl, gluon
from strobe.kernels.sm90.scores import documents_of_keys, keys_of_lanes, score_and_factors, seen_by


@gluon.jit
def indices(s, i, tile, C: gl.constexpr):
    """Indices in their sequence: of the tile's rows, and of the keys of block i. s: a tensor with the layout of scores."""
    LAYOUT: gl.constexpr = s.type.layout
    row = tile.row + gl.arange(0, C.tile_q, gl.SliceLayout(1, LAYOUT))
    return row, i * C.tile_kv + gl.arange(0, C.tile_kv, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def scores_of(K, s, i, tile):
    """q.k of block i -> (scores, by what they have yet to be multiplied), in powers of two."""
    if not K.score.CHANGED:
        return s, K.score.inner
    else:
        row, key = indices(s, i, tile, K.C)
        s, _, _ = score_and_factors(
            s, row[:, None], key[None, :], tile.batch, tile.head, tile.slope, tile.n_q, tile.n_kv, K.score
        )
        return s, 1.0


@gluon.jit
def apply_mask(K, s, i, documents, tile):
    """-inf where the band or documents hide a key of block i from a row. documents: of `documents_of_block`.

    A row sees the keys of one interval. Seen as [rows, a, b, c], a lane compares numbers of its own with numbers that the
    compiler knows (see `keys_of_lanes`)."""
    x = gl.reshape(s, [K.C.tile_q, K.C.tile_kv // 8, 4, 2])
    L: gl.constexpr = x.type.layout
    p = tile.p + gl.arange(0, K.C.tile_q, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    begin, end = seen_by(p, tile.n_kv, K.lengths)
    key, lane = keys_of_lanes(L, K.C)
    first = i * K.C.tile_kv + lane
    x = gl.where(key < end[:, None, None, None] - first, x, float("-inf"))
    if K.lengths.left is not None:
        x = gl.where(key >= begin[:, None, None, None] - first, x, float("-inf"))
    x = gl.convert_layout(gl.reshape(x, [K.C.tile_q, K.C.tile_kv]), s.type.layout)
    if K.score.document_q is not None:
        x = gl.where(tile.documents[:, None] == documents[None, :], x, float("-inf"))
    return x


@gluon.jit
def ask_function(K, s, i, tile):
    """-inf where the user's function hides a key of block i from a row."""
    if K.score.visible is not None:
        row, key = indices(s, i, tile, K.C)
        s = gl.where(K.score.visible(tile.batch, tile.head, row[:, None], key[None, :]), s, float("-inf"))
    return s


@gluon.jit
def documents_of_block(K, LAYOUT: gl.constexpr, i, tile):
    """Documents of the keys of block i, to be asked for before the scores are computed; nobody reads the 0 where there are
    none. LAYOUT: of scores."""
    if K.score.document_kv is None:
        return 0
    else:
        key = i * K.C.tile_kv + gl.arange(0, K.C.tile_kv, gl.SliceLayout(0, LAYOUT))
        return documents_of_keys(tile.batch, key, tile.n_kv, K.score)


@gluon.jit
def kept_weights(K, p, i, tile):
    """P of block i with 0 for what dropout drops."""
    if K.score.seed is None:
        return p
    else:
        return dropped(p, tile.row, i * K.C.tile_kv, K.score.seed, K.score.threshold, tile.batch, tile.head, TRANSPOSED=False)
