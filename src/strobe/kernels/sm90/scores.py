"""From products to scores, in the registers of Hopper's consumers: softcap, slopes, bias, functions, and the masks."""

from strobe.kernels.common.gluon_masks import kv_range
from strobe.kernels.common.gluon_scores import score_of, with_bias, with_function
from strobe.kernels.gluon import aggregate, gl, gluon
from strobe.kernels.sm90.layouts import ROWS, accumulator, columns_of, rows_of
from strobe.kernels.sm90.tiles import numbers

LOG2_E = gl.constexpr(1.4426950408889634)


@aggregate
class Score:
    """What happens to q.k before the softmax (see `strobe.scores`), and what of the masks is compared pair by pair. Strides in
    elements. What there is not is None.

    inner, outer: the factors of `strobe.scores.score_and_factor`. slopes: by batch, head. bias: by batch, head, row, key.
    sinks: by head. function, visible: a user's, of scores and of masks. document_q, document_kv: by batch, row or key.
    """

    inner: gl.tensor
    outer: (gl.tensor, gl.constexpr)
    slopes: (gl.tensor, gl.constexpr)
    slope_strides: gl.tuple
    bias: (gl.tensor, gl.constexpr)
    bias_strides: gl.tuple
    sinks: (gl.tensor, gl.constexpr)
    sink_stride: gl.tensor
    function: gl.constexpr
    visible: gl.constexpr
    document_q: (gl.tensor, gl.constexpr)
    document_kv: (gl.tensor, gl.constexpr)
    document_strides: gl.tuple
    CHANGED: gl.constexpr
    BY_PAIR: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, inner, outer, slopes, slope_strides, bias, bias_strides, sinks, sink_stride, function, visible,
                 document_q, document_kv, document_strides):  # fmt: skip
        self.inner = inner
        self.outer = gl.constexpr(None) if outer is None else outer
        self.slopes = gl.constexpr(None) if slopes is None else slopes
        self.slope_strides = slope_strides
        self.bias = gl.constexpr(None) if bias is None else bias
        self.bias_strides = bias_strides
        self.sinks = gl.constexpr(None) if sinks is None else sinks
        self.sink_stride = sink_stride
        self.function = gl.constexpr(function)
        self.visible = gl.constexpr(visible)
        self.document_q = gl.constexpr(None) if document_q is None else document_q
        self.document_kv = gl.constexpr(None) if document_kv is None else document_kv
        self.document_strides = document_strides
        given = [x is not None for x in (outer, slopes, bias, function)]
        self.CHANGED = gl.constexpr(any(given))
        self.BY_PAIR = gl.constexpr(document_q is not None or visible is not None)


@gluon.jit
def scores_of(s, i, tile, lengths, score, C: gl.constexpr):
    """q.k of block i -> (scores, by what they have yet to be multiplied), in powers of two."""
    if not score.CHANGED:
        return s, score.inner
    else:
        row, key = indices(i, tile, lengths, C)
        n_q, n_kv = numbers(tile, lengths)
        slope = None
        if score.slopes is not None:
            slope = gl.load(score.slopes + tile.batch * score.slope_strides[0] + tile.head * score.slope_strides[1]) * LOG2_E
        p = row + (n_kv - n_q)
        s = score_of(s, p[:, None], key[None, :], score.inner, score.outer, slope)
        if score.bias is not None:
            s = with_bias(s, bias_of(row, key, tile, lengths, score))
        if score.function is not None:
            s = gl.zeros_like(s) + with_function(s, score.function, tile.batch, tile.head, row[:, None], key[None, :])
        return s, 1.0


@gluon.jit
def bias_of(row, key, tile, lengths, score):
    """The bias of a block, float32."""
    by_batch, by_head, by_row, by_key = score.bias_strides
    corner = score.bias + tile.batch.to(gl.int64) * by_batch + tile.head.to(gl.int64) * by_head
    at = row.to(gl.int64)[:, None] * by_row + key.to(gl.int64)[None, :] * by_key
    n_q, n_kv = numbers(tile, lengths)
    return gl.load(corner + at, mask=(row < n_q)[:, None] & (key < n_kv)[None, :], other=0.0).to(gl.float32)


@gluon.jit
def sink_of(head, score):
    """The sink of a head, in powers of two."""
    return gl.load(score.sinks + head * score.sink_stride).to(gl.float32) * LOG2_E


@gluon.jit
def indices(i, tile, lengths, C: gl.constexpr):
    """Of this group's rows in their sequence, and of the keys of block i."""
    n_q, n_kv = numbers(tile, lengths)
    row = tile.p - (n_kv - n_q) + gl.arange(0, ROWS, rows_of(C.tile_kv))
    return row, i * C.tile_kv + gl.arange(0, C.tile_kv, columns_of(C.tile_kv))


@gluon.jit
def apply_mask(s, i, tile, lengths, score, C: gl.constexpr):
    """-inf where a row does not see a key of block i. Of a band, a row sees the keys of one interval.

    Key 8 a + 2 b + c of a block lies in lane b of a quad. Seen in these dims a lane compares its bounds with numbers that the
    compiler knows: no registers for keys.
    """
    x = gl.reshape(s, [ROWS, C.tile_kv // 8, 4, 2])
    L: gl.constexpr = x.type.layout
    p = tile.p + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    a = gl.arange(0, C.tile_kv // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    _n_q, n_kv = numbers(tile, lengths)
    begin, end = seen_by(p, n_kv, lengths)
    key = 8 * a[None, :, None, None] + c[None, None, None, :]
    first = i * C.tile_kv + 2 * b[None, None, :, None]
    x = gl.where(key < end[:, None, None, None] - first, x, float("-inf"))
    if lengths.left is not None:
        x = gl.where(key >= begin[:, None, None, None] - first, x, float("-inf"))
    s = gl.convert_layout(gl.reshape(x, [ROWS, C.tile_kv]), accumulator(C.tile_kv))
    if score.BY_PAIR:
        s = compare_pairs(s, i, tile, lengths, score, C)
    return s


@gluon.jit
def seen_by(p, n_kv, lengths):
    """[begin, end) of the keys that the row at each position p sees of a band."""
    begin, end = kv_range(p, p, n_kv, lengths.left, lengths.right, lengths.prefix)
    return begin + 0 * p, end + 0 * p  # without bounds they are the same for all


@gluon.jit
def compare_pairs(s, i, tile, lengths, score, C: gl.constexpr):
    """-inf where documents differ, or the user's function is false."""
    row, key = indices(i, tile, lengths, C)
    n_q, n_kv = numbers(tile, lengths)
    if score.document_q is not None:
        batch_q, by_row, batch_kv, by_key = score.document_strides
        q = score.document_q + tile.batch.to(gl.int64) * batch_q + row.to(gl.int64) * by_row
        kv = score.document_kv + tile.batch.to(gl.int64) * batch_kv + key.to(gl.int64) * by_key
        same = gl.load(q, mask=row < n_q, other=0)[:, None] == gl.load(kv, mask=key < n_kv, other=0)[None, :]
        s = gl.where(same, s, float("-inf"))
    if score.visible is not None:
        s = gl.where(score.visible(tile.batch, tile.head, row[:, None], key[None, :]), s, float("-inf"))
    return s
