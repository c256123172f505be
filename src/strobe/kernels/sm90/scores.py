"""The score terms of the Hopper kernels: what the host hands over, and the way from products to scores in the registers of the
consumers: softcap, slopes, bias, functions, and the masks."""

from typing import Any, NamedTuple

import torch

from strobe.dropout import threshold
from strobe.kernels.common import gluon_math
from strobe.kernels.common.call import Tensors
from strobe.kernels.common.gluon_masks import kv_range
from strobe.kernels.common.gluon_philox import dropped
from strobe.kernels.common.gluon_scores import gradient_of_function, score_and_factor, with_bias, with_function
from strobe.kernels.common.scores import LOG2E
from strobe.kernels.gluon import aggregate, gl, gluon
from strobe.kernels.sm90.layouts import ROWS, accumulator, columns_of, rows_of
from strobe.problem import AttentionProblem

SCORE_NUMBERS = (
    *("threshold", "slope_batch", "slope_head", "bias_batch", "bias_head", "bias_row", "bias_key"),
    *("document_q_batch", "document_q_row", "document_kv_batch", "sink_stride"),
)
"""Integers of a Score, which no kernel is specialised for, in the order of an entry's parameters: so strides that belong
together lie on 8 bytes, and one load brings two. Each is a parameter, and none is in `terms`, because Triton (3.6 to 3.9)
specialises the integers of a tuple whatever `do_not_specialize` says: a 1 becomes a constant, a multiple of 16 is known as
one. (Kernels are specialised for the stride of the keys' documents, `document_kv_row`: if it is 1, as nearly always, their
addresses differ by numbers that the compiler knows.)"""


# ---- on the host


class Terms(NamedTuple):
    """Tensors, functions and factors of a score, one argument of a kernel: None where a problem has no such term. `Score` adds
    the strides."""

    inner: float
    outer: float | None
    slopes: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    function: Any
    gradient: Any
    visible: Any
    document_q: torch.Tensor | None
    document_kv: torch.Tensor | None
    seed: torch.Tensor | None
    kept_scale: float


def score_arguments(problem: AttentionProblem, tensors: Tensors) -> tuple:
    """The arguments `terms`, those named in `SCORE_NUMBERS`, and `document_kv_row`. log2(e) is folded into the factors.
    A backward is told of no sinks: they are in the LSE."""
    score, backward = problem.score, problem.phase == "backward"
    inner, outer = inner_and_outer(problem)
    slopes, bias, seed = tensors.alibi, tensors.bias, tensors.seed
    sinks = None if backward else tensors.sinks
    terms = Terms(
        inner,
        outer,
        slopes,
        bias,
        sinks,
        gluon_math.of_user(score.function),
        gluon_math.of_user(score.function_gradient) if backward else None,
        gluon_math.of_user(problem.mask.function),
        tensors.document_q,
        tensors.document_kv,
        seed,
        0.0 if seed is None else 1.0 / (1.0 - problem.dropout),
    )
    document_kv_batch, document_kv_row = _strides(tensors.document_kv)
    return (
        terms,
        0 if seed is None else threshold(problem.dropout),
        *((0, 0) if slopes is None else (slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))),
        *((0, 0, 0, 0) if bias is None else _repeated(bias)),
        *_strides(tensors.document_q),
        document_kv_batch,
        0 if sinks is None else sinks.stride(0),
        document_kv_row,
    )


def inner_and_outer(problem: AttentionProblem) -> tuple[float, float | None]:
    """The factors of `strobe.scores.score_and_factor`, log2(e) in them; None: there is no softcap."""
    softcap = problem.score.softcap
    if softcap:
        return problem.scale / softcap, softcap * LOG2E.value
    return problem.scale * LOG2E.value, None


def _strides(ids: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0) if ids is None else ids.stride()


def _repeated(bias: torch.Tensor) -> list[int]:
    """Strides of a bias: 0 where its one number stands for all."""
    return [stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)]


# ---- in a kernel


@aggregate
class Score:
    """What happens to q.k before the softmax (see `strobe.scores`), and what of the masks is compared pair by pair. Strides in
    elements. What there is not is None.

    inner, outer: the factors of `strobe.scores.score_and_factor`. slopes: by batch, head. bias: by batch, head, row, key.
    sinks: by head. function, gradient, visible: a user's, of scores, of their gradients, and of masks. document_q, document_kv:
    by batch, row or key. seed, threshold, kept_scale: of dropout (`strobe.dropout`), the last what kept weights are multiplied
    by. PLACED: whether batch, head, rows and keys of a tile make a difference.
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
    gradient: gl.constexpr
    visible: gl.constexpr
    document_q: (gl.tensor, gl.constexpr)
    document_kv: (gl.tensor, gl.constexpr)
    document_q_strides: gl.tuple
    document_kv_batch: gl.tensor
    document_kv_row: (gl.tensor, gl.constexpr)
    seed: (gl.tensor, gl.constexpr)
    threshold: gl.tensor
    kept_scale: gl.tensor
    CHANGED: gl.constexpr
    BY_PAIR: gl.constexpr
    PLACED: gl.constexpr


@gluon.jit
def score_of(terms, slope_strides, bias_strides, sink_stride, document_strides, threshold):
    """The Score of a kernel's arguments. terms: see `Terms`. document_strides: by batch and row of q,
    then of kv."""
    GIVEN: gl.constexpr = (
        terms.outer is not None or terms.slopes is not None or terms.bias is not None or terms.function is not None
    )
    BY_PAIR: gl.constexpr = terms.document_q is not None or terms.visible is not None
    batch_q, row_q, batch_kv, row_kv = document_strides
    return Score(
        inner=terms.inner, outer=terms.outer, slopes=terms.slopes, slope_strides=slope_strides, bias=terms.bias,
        bias_strides=bias_strides, sinks=terms.sinks, sink_stride=sink_stride, function=terms.function,
        gradient=terms.gradient, visible=terms.visible, document_q=terms.document_q, document_kv=terms.document_kv,
        document_q_strides=(batch_q, row_q), document_kv_batch=batch_kv, document_kv_row=row_kv, seed=terms.seed,
        threshold=threshold, kept_scale=terms.kept_scale, CHANGED=GIVEN, BY_PAIR=BY_PAIR,
        PLACED=GIVEN or BY_PAIR or terms.seed is not None,
    )  # fmt: skip


@gluon.jit
def simple_score(inner, outer, sinks, sink_stride):
    """The Score that has factors and sinks alone. The strides of what there is not are 0. sink_stride: None without sinks."""
    zero = gl.to_tensor(0)
    if sink_stride is None:
        sink_stride = zero
    return Score(
        inner=inner, outer=outer, slopes=None, slope_strides=(zero, zero), bias=None, bias_strides=(zero, zero, zero, zero),
        sinks=sinks, sink_stride=sink_stride, function=None, gradient=None, visible=None, document_q=None, document_kv=None,
        document_q_strides=(zero, zero), document_kv_batch=zero, document_kv_row=zero, seed=None, threshold=zero,
        kept_scale=zero, CHANGED=outer is not None, BY_PAIR=False, PLACED=False,
    )  # fmt: skip


@aggregate
class BiasGradient:
    """Where a bias's gradient goes: a pointer, or None if nobody wants it; strides, None where one number stands for all.
    SHARED: whether several heads or batch entries have one place."""

    pointer: (gl.tensor, gl.constexpr)
    batch: (gl.tensor, gl.constexpr)
    head: (gl.tensor, gl.constexpr)
    row: (gl.tensor, gl.constexpr)
    key: (gl.tensor, gl.constexpr)
    SHARED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pointer, batch, head, row, key):
        self.pointer = gl.constexpr(None) if pointer is None else pointer
        self.batch = gl.constexpr(None) if batch is None else batch
        self.head = gl.constexpr(None) if head is None else head
        self.row = gl.constexpr(None) if row is None else row
        self.key = gl.constexpr(None) if key is None else key
        self.SHARED = gl.constexpr(batch is None or head is None)


@gluon.jit
def lengths_of_tile(tile, lengths):
    """n_q and n_kv of the tile's sequence."""
    if lengths.VARY:
        return tile.n_q, tile.n_kv
    else:
        return lengths.n_q, lengths.n_kv


@gluon.jit
def slope_of(batch, head, score):
    """The slope of a head, in powers of two; where there are none, nobody reads the 0."""
    if score.slopes is None:
        return 0.0
    else:
        return gl.load(score.slopes + batch * score.slope_strides[0] + head * score.slope_strides[1]) * LOG2E


@gluon.jit
def scores_of(K, s, i, tile):
    """q.k of block i -> (scores, by what they have yet to be multiplied), in powers of two."""
    if not K.score.CHANGED:
        return s, K.score.inner
    else:
        row, key = indices(i, tile, K.lengths, K.C)
        n_q, n_kv = lengths_of_tile(tile, K.lengths)
        s, _, _ = score_and_factors(s, row[:, None], key[None, :], tile.batch, tile.head, tile.slope, n_q, n_kv, K.score)
        return s, 1.0


@gluon.jit
def score_and_factors(s, row, key, batch, head, slope, n_q, n_kv, score):
    """q.k -> (score in powers of two, the factor of softcap on its gradient, that of the function). row, key: indices in the
    sequence that broadcast to s. slope: of `slope_of`."""
    slope = slope if score.slopes is not None else None
    s, factor = score_and_factor(s, row + (n_kv - n_q), key, score.inner, score.outer, slope)
    if score.bias is not None:
        s = with_bias(s, bias_of(row, key, batch, head, n_q, n_kv, score))
    of_function = 1.0
    if score.gradient is not None:
        of_function = gl.zeros_like(s) + gradient_of_function(s, score.gradient, batch, head, row, key)
    if score.function is not None:
        s = gl.zeros_like(s) + with_function(s, score.function, batch, head, row, key)
    return s, factor, of_function


@gluon.jit
def weighed(p, of_function, score):
    """Weights times the function's factor, which counts for nothing where they are 0, even if it is NaN."""
    if score.gradient is None:
        return p
    else:
        return gl.where(p == 0.0, 0.0, p * of_function)


@gluon.jit
def bias_of(row, key, batch, head, n_q, n_kv, score):
    """The bias of a tile, float32."""
    by_batch, by_head, by_row, by_key = score.bias_strides
    corner = score.bias + batch.to(gl.int64) * by_batch + head.to(gl.int64) * by_head
    at = row.to(gl.int64) * by_row + key.to(gl.int64) * by_key
    return gl.load(corner + at, mask=(row < n_q) & (key < n_kv), other=0.0).to(gl.float32)


@gluon.jit
def add_to_bias(dbias, ds, p, row, key, batch, head, n_q, n_kv, TRANSPOSED: gl.constexpr):
    """Give a bias's gradient the tile ds of rows and keys, vectors along the dims of ds or, TRANSPOSED, the other way round. A
    pair has a place of its own, or shares it where the bias is repeated, and what shares a place is added up. p: the weights;
    where they are 0, so is ds, whatever a NaN that is not seen made of it."""
    ROW: gl.constexpr = 1 if TRANSPOSED else 0
    KEY: gl.constexpr = 1 - ROW
    ds = gl.where(p == 0.0, 0.0, ds)
    at = dbias.pointer
    if dbias.batch is not None:
        at += batch.to(gl.int64) * dbias.batch
    if dbias.head is not None:
        at += head.to(gl.int64) * dbias.head
    exists_row = row < n_q
    exists_key = key < n_kv
    if dbias.row is not None:
        of_row = row.to(gl.int64) * dbias.row
    if dbias.key is not None:
        of_key = key.to(gl.int64) * dbias.key
    if dbias.row is None and dbias.key is None:
        sums = gl.sum(warp_sums(ds), 1)
        gl.atomic_add(at + gl.zeros_like(sums).to(gl.int32), sums, sem="relaxed")
    elif dbias.row is None:
        add_sums(at, of_key, exists_key, ds, ROW)
    elif dbias.key is None:
        add_sums(at, of_row, exists_row, ds, KEY)
    else:
        at += gl.expand_dims(of_row, KEY) + gl.expand_dims(of_key, ROW)
        exists = gl.expand_dims(exists_row, KEY) & gl.expand_dims(exists_key, ROW)
        if dbias.SHARED:
            gl.atomic_add(at, ds, mask=exists, sem="relaxed")
        else:
            gl.store(at, ds.to(dbias.pointer.dtype.element_ty), mask=exists)


@gluon.jit
def add_sums(at, places, exists, ds, DIM: gl.constexpr):
    """Add ds, summed over a dim, to `places`, which belong to the other."""
    if DIM == 1:
        gl.atomic_add(at + places, gl.sum(ds, 1), mask=exists, sem="relaxed")
    else:
        sums = warp_sums(ds)
        LAYOUT: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
        everywhere = gl.zeros_like(sums).to(gl.int32)
        places = gl.convert_layout(places, LAYOUT)[None, :] + everywhere
        exists = gl.convert_layout(exists, LAYOUT)[None, :] & (everywhere == 0)
        gl.atomic_add(at + places, sums, mask=exists, sem="relaxed")


@gluon.jit
def warp_sums(x):
    """An accumulator's sums over each warp's 16 rows: [64, columns] -> [4, columns]. A sum over all would take shared memory,
    of which nothing is left at head dim 192."""
    return gl.sum(gl.reshape(x, [4, 16, x.shape[1]]), 1)


@gluon.jit
def sink_of(head, score):
    """The sink of a head, in powers of two."""
    return gl.load(score.sinks + head * score.sink_stride).to(gl.float32) * LOG2E


@gluon.jit
def kept_weights(K, p, i, tile):
    """P of block i with 0 for what dropout drops."""
    if K.score.seed is None:
        return p
    else:
        n_q, n_kv = lengths_of_tile(tile, K.lengths)
        first = tile.p - (n_kv - n_q)
        return dropped(p, first, i * K.C.tile_kv, K.score.seed, K.score.threshold, tile.batch, tile.head, TRANSPOSED=False)


@gluon.jit
def indices(i, tile, lengths, C: gl.constexpr):
    """Indices in their sequence: of this group's rows, and of the keys of block i."""
    n_q, n_kv = lengths_of_tile(tile, lengths)
    row = tile.p - (n_kv - n_q) + gl.arange(0, ROWS, rows_of(C.tile_kv))
    return row, i * C.tile_kv + gl.arange(0, C.tile_kv, columns_of(C.tile_kv))


@gluon.jit
def keys_of_lanes(L: gl.constexpr, C: gl.constexpr):
    """Key 8 a + 2 b + c of a block lies in lane b of a quad: (8 a + c, 2 b), where a tile of scores is seen as [rows, a, b, c],
    L its layout. The first is known to the compiler, so the keys take a register in all."""
    a = gl.arange(0, C.tile_kv // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    return 8 * a[None, :, None, None] + c[None, None, None, :], 2 * b[None, None, :, None]


@gluon.jit
def is_whole(i, tile):
    """Whether neither the band nor documents hide any of block i."""
    if tile.full_begin is None:
        return i < tile.full_end
    else:
        return (i < tile.full_end) & (i >= tile.full_begin)


@gluon.jit
def apply_mask(s, i, tile, lengths, C: gl.constexpr):
    """-inf where the band hides a key of block i from a row, which sees the keys of one interval."""
    x = gl.reshape(s, [ROWS, C.tile_kv // 8, 4, 2])
    L: gl.constexpr = x.type.layout
    p = tile.p + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    _n_q, n_kv = lengths_of_tile(tile, lengths)
    begin, end = seen_by(p, n_kv, lengths)
    key, lane = keys_of_lanes(L, C)
    first = i * C.tile_kv + lane
    x = gl.where(key < end[:, None, None, None] - first, x, float("-inf"))
    if lengths.left is not None:
        x = gl.where(key >= begin[:, None, None, None] - first, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, C.tile_kv]), accumulator(C.tile_kv))


@gluon.jit
def seen_by(p, n_kv, lengths):
    """[begin, end) of the keys that the row at each position p sees of a band."""
    begin, end = kv_range(p, p, n_kv, lengths.left, lengths.right, lengths.prefix)
    return begin + 0 * p, end + 0 * p  # without bounds they are the same for all


@gluon.jit
def compare_documents(s, documents, tile, score):
    """-inf where a row's document is not a key's. documents: see `documents_of_block`."""
    if score.document_q is not None:
        s = gl.where(tile.documents[:, None] == documents, s, float("-inf"))
    return s


@gluon.jit
def ask_function(K, s, i, tile):
    """-inf where the user's function hides a key of block i from a row."""
    if K.score.visible is not None:
        row, key = indices(i, tile, K.lengths, K.C)
        s = gl.where(K.score.visible(tile.batch, tile.head, row[:, None], key[None, :]), s, float("-inf"))
    return s


@gluon.jit
def documents_of_block(K, i, tile):
    """Documents of the keys of block i, [1, keys], to be asked for before the scores are waited for; nobody reads the 0 where
    there are none, or where the block is whole."""
    if K.score.document_kv is None:
        return 0
    else:
        _n_q, n_kv = lengths_of_tile(tile, K.lengths)
        s = gl.full([ROWS, K.C.tile_kv], 0.0, gl.float32, accumulator(K.C.tile_kv))
        x = gl.reshape(s, [ROWS, K.C.tile_kv // 8, 4, 2])
        L: gl.constexpr = x.type.layout
        key, lane = keys_of_lanes(L, K.C)
        first = i * K.C.tile_kv + lane
        at = K.score.document_kv + tile.batch.to(gl.int64) * K.score.document_kv_batch
        at = at + first.to(gl.int64) * K.score.document_kv_row + key.to(gl.int64) * K.score.document_kv_row
        documents = 0 * (first + key)
        if not is_whole(i, tile):
            if (i + 1) * K.C.tile_kv <= n_kv:  # nearly always, and faster
                documents = gl.load(at)
            else:
                exists = first + key < n_kv
                documents = gl.load(at, mask=exists, other=0)
        return gl.convert_layout(gl.reshape(documents, [1, K.C.tile_kv]), accumulator(K.C.tile_kv))


@gluon.jit
def documents_of_rows(batch, row, n_q, score):
    """Documents of rows; 0 of those that do not exist."""
    by_batch, by_row = score.document_q_strides
    at = score.document_q + batch.to(gl.int64) * by_batch + row.to(gl.int64) * by_row
    return gl.load(at, mask=row < n_q, other=0)


@gluon.jit
def documents_of_keys(batch, key, n_kv, score):
    """Documents of keys; 0 of those that do not exist."""
    at = score.document_kv + batch.to(gl.int64) * score.document_kv_batch + key.to(gl.int64) * score.document_kv_row
    return gl.load(at, mask=key < n_kv, other=0)
