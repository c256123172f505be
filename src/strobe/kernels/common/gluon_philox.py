"""Dropout on the results of tensor cores: the words of `philox`, in Gluon."""

from strobe.kernels.common import philox
from strobe.kernels.gluon import gl, gluon

four_words = gluon.jit(philox.four_words)


@gluon.jit
def dropped(x, first, second, seed, threshold, batch, head, TRANSPOSED: gl.constexpr):
    """x with 0 for the pairs that are dropped. x: a result of tensor cores, in their layout, [rows, keys] from row `first` and
    key `second` on, or TRANSPOSED [keys, rows] from key `first` and row `second` on; all of these are multiples of 16. seed: a
    pointer; threshold: `strobe.dropout.threshold`.

    A thread has all four numbers that share a counter: 8 apart along both dims."""
    M: gl.constexpr = x.shape[0] // 16
    N: gl.constexpr = x.shape[1] // 16
    y = gl.reshape(x, [M, 2, 8, N, 2, 8])
    L: gl.constexpr = y.type.layout
    FOUR: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, L))  # [M, 8, N, 8]
    m = gl.arange(0, M, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, FOUR))))
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, FOUR))))
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, FOUR))))
    e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, FOUR))))
    i = first // 2 + 8 * m[:, None, None, None] + r[None, :, None, None]
    j = second // 2 + 8 * n[None, None, :, None] + e[None, None, None, :]
    # w1 belongs to the pair that is 8 further along the second dim, w2 to that 8 further along the first, w3 to both.
    if TRANSPOSED:
        w0, w2, w1, w3 = four_words(gl.load(seed), i, j, head, batch)
    else:
        w0, w1, w2, w3 = four_words(gl.load(seed), j, i, head, batch)
    h = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, L))))))
    g = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(5, L))))))
    far_first = h[None, :, None, None, None, None] == 1
    far_second = g[None, None, None, None, :, None] == 1
    near = gl.where(far_second, spread(w1), spread(w0))
    far = gl.where(far_second, spread(w3), spread(w2))
    word = gl.where(far_first, far, near)
    y = gl.where((word >> 1).to(gl.int32) >= threshold, y, 0.0)
    return gl.convert_layout(gl.reshape(y, x.shape), x.type.layout)


@gluon.jit
def spread(word):
    """A word [M, 8, N, 8] in a shape that broadcasts to [M, 2, 8, N, 2, 8]."""
    return gl.expand_dims(gl.expand_dims(word, 1), 4)
