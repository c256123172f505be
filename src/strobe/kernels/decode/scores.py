"""Scores from products: scale, softcap, ALiBi; and which row sees which key."""

from strobe.kernels.common.gluon_math import tanh
from strobe.kernels.common.scores import LOG2E
from strobe.kernels.decode.keys import is_key, is_page, look_up, owners_of, rows_at
from strobe.kernels.decode.layouts import along, keys_in
from strobe.kernels.gluon import gl, gluon


@gluon.jit
def scores_of(s, terms, cached, piece, entry, first, pages, k_scale, C: gl.constexpr, GROUP: gl.constexpr,
              LAYOUT: gl.constexpr, EVERY_PAGE: gl.constexpr = False):  # fmt: skip
    """Scores, times log2(e), of products s from key `first` on, which lie in `pages`: -inf where nobody sees a key. In most
    steps every row sees all keys, but for those of pages that are not there. EVERY_PAGE: as if all were."""
    KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if terms.K_BY_TOKEN:
        at = rows_at(cached, first, pages, entry, terms.k_scale_page, terms.k_scale_row, C, KEYS) + piece.head
        scales = gl.load(terms.k_scale + at, mask=is_key(cached, piece, first, pages, C, KEYS), other=0.0)
        s = s * gl.expand_dims(scales, 1)
    s = changed(s, terms, piece, first, k_scale, C, GROUP, LAYOUT)
    if cached.PAGE and not EVERY_PAGE:
        s = gl.where(gl.expand_dims(is_page(cached, pages), 1), s, -float("inf"))
    if some_are_hidden(terms, piece, first, C):
        s = gl.where(is_seen(terms, piece, first, C, GROUP, LAYOUT), s, -float("inf"))
    return s


@gluon.jit
def changed(s, terms, piece, first, k_scale, C: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores, times log2(e), of products s from key `first` on, as if every row saw every key."""
    KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if terms.softcap is not None:
        s = terms.softcap * LOG2E * tanh(s * (terms.scale * k_scale / terms.softcap))
    else:
        s = s * (terms.scale * k_scale * LOG2E)
    if terms.alibi is not None:
        query, head, there = owners_of(piece.first_row + along(C.rows, 1, LAYOUT), piece, C, GROUP)
        slope = gl.load(terms.alibi + piece.batch * terms.alibi_batch + head, mask=there, other=0.0)
        away = piece.length - piece.queries + query - gl.expand_dims(first + keys_in(C, KEYS), 1)
        s = s - (slope * LOG2E) * gl.abs(away.to(gl.float32))
    return s


@gluon.jit
def some_are_hidden(terms, piece, first, C: gl.constexpr):
    """Whether some row of a tile may not see some key of the step from key `first` on."""
    hidden = (first < piece.begin) | (first + C.tokens > piece.end)
    if terms.BY_ROW:
        own = piece.length - piece.queries  # the key on which the first query stands
        if terms.right is not None:
            hidden = hidden | (first + C.tokens > own + terms.right + 1)
        if terms.left is not None:
            hidden = hidden | (first < piece.length - 1 - terms.left)
        if terms.tree is not None:
            hidden = hidden | (first + C.tokens > own)
    return hidden


@gluon.jit
def is_seen(terms, piece, first, C: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Whether each row of a tile sees each key of the step from key `first` on."""
    keys = gl.expand_dims(first + keys_in(C, gl.SliceLayout(1, LAYOUT)), 1)
    seen = (keys >= piece.begin) & (keys < piece.end)
    if terms.BY_ROW:
        query = (piece.first_row + along(C.rows, 1, LAYOUT)) // GROUP
        position = piece.length - piece.queries + query
        if terms.right is not None:
            seen = seen & (keys <= position + terms.right)
        if terms.left is not None:
            seen = seen & (keys >= position - terms.left)
        if terms.tree is not None:
            drafted = keys - (piece.length - piece.queries)
            at = terms.tree + piece.batch.to(gl.int64) * terms.tree_batch + query * terms.tree_row
            asked = (drafted >= 0) & (drafted < piece.queries) & (query < piece.queries)
            seen = seen & gl.load(at + drafted * terms.tree_column, mask=asked, other=1).to(gl.int1)
    return seen


@gluon.jit
def scale_of_values(terms, cached, piece, entry, first, C: gl.constexpr, layout: gl.constexpr):
    """The scales of the values of the step from key `first` on, 0 for those that are none."""
    pages = look_up(cached, piece, first, C, layout)
    at = rows_at(cached, first, pages, entry, terms.v_scale_page, terms.v_scale_row, C, layout) + piece.head
    return gl.load(terms.v_scale + at, mask=is_key(cached, piece, first, pages, C, layout), other=0.0)


@gluon.jit
def finite(x):
    """x, or 0 for -inf: what maxima are subtracted as, since -inf - -inf would be NaN."""
    return gl.where(x == -float("inf"), 0.0, x)
