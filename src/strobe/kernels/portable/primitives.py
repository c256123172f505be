"""What the kernels of the forward and the backward share on the device: addresses, loads, ranges of tiles, a guarded product.

Scores are kept in units of log2: the softmax takes exp2, which the hardware has, and log2(e) is folded into the scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from strobe.kernels.common.device_function import device_function
from strobe.kernels.common.documents import SPAN
from strobe.kernels.common.masks import kv_full, kv_range, q_full, q_range, visible
from strobe.kernels.common.places import number_before, position_of
from strobe.places import NUMBERS

LENGTHS_AND_BOUNDS = ("n_q", "n_kv", "total_q", "total_kv", "left", "right", "prefix")
"""Arguments that no kernel is specialised for: another length or window does not recompile."""


QUERIES, KEYS, FIRST_HEAD = tl.constexpr(0), tl.constexpr(4), tl.constexpr(8)
"""Where a row of `Operands.places` says what is known of queries, of keys, and of the first head."""

PLACE_NUMBERS = tl.constexpr(NUMBERS)


class Matrix(NamedTuple):
    """A tensor: rows by batch and head. Strides in elements; the last dim, where there is one, has stride 1."""

    pointer: Any
    batch: Any
    row: Any
    head: Any


class Mask(NamedTuple):
    """The band of `strobe.masks` and the document numbers, each None where it does not apply."""

    left: Any
    right: Any
    prefix: Any
    document_q: Any
    document_kv: Any


class Blocks(NamedTuple):
    """`strobe.masks.Blocks`: pointers to the kinds and to the pairs, strides of the kinds in elements (0 where one stands for
    many), rows and keys of a block, which tiles divide."""

    kinds: Any
    batch: Any
    head: Any
    row: Any
    pairs: Any
    rows: Any
    keys: Any


class Stream(NamedTuple):
    """The rows of one sequence and head: where they begin, offsets [TILE, PADDED] of a tile's elements, a row's stride."""

    base: Any
    at: Any
    row: Any


@device_function
def sequence(cu_seqlens, seqused, batch, n, total):
    """(first row, used length) of a sequence. Whatever the tensors hold, they lie within the `total` rows that there are, and
    the length is at most n, by which grids and workspaces are sized."""
    first = n * 0
    if cu_seqlens is not None:
        first = within(tl.load(cu_seqlens + batch), total)
        n = within(within(tl.load(cu_seqlens + batch + 1), total) - first, n)
    if seqused is not None:
        n = within(tl.load(seqused + batch), n)
    return first, n


@device_function
def position(i, places, SIDE: tl.constexpr):
    """Where rows (or keys, by SIDE) i stand in the whole sequence."""
    if places is not None:
        i = position_of(i, tl.load(places + SIDE), tl.load(places + SIDE + 1), tl.load(places + SIDE + 2))
    return i


@device_function
def before(x, n, places, SIDE: tl.constexpr):
    """How many of n rows (or keys, by SIDE) stand before row x of the whole sequence."""
    if places is not None:
        x = number_before(x, n, tl.load(places + SIDE), tl.load(places + SIDE + 1), tl.load(places + SIDE + 2))
    return x


@device_function
def whole_length(n, places, SIDE: tl.constexpr):
    """The length of the whole sequence of which there are n rows (or keys, by SIDE)."""
    if places is not None:
        n = tl.load(places + SIDE + 3)
    return n


@device_function
def row_position(i, n_q, n_kv, places):
    """Where rows i stand among the keys of the whole sequence."""
    if places is None:
        p = i + n_kv - n_q
    else:
        p = position(i, places, QUERIES) + (whole_length(n_kv, places, KEYS) - whole_length(n_q, places, QUERIES))
    return p


@device_function
def tile_positions(first, p_first, n_q, n_kv, places, TILE: tl.constexpr):
    """`row_position` of the TILE rows from `first` on, which stands at p_first."""
    p = p_first + tl.arange(0, TILE)
    if places is not None:
        p = row_position(first + tl.arange(0, TILE), n_q, n_kv, places)
    return p


@device_function
def whole_head(head, places):
    """A query head's number among all heads, which functions and dropout are told."""
    if places is not None:
        head += tl.load(places + FIRST_HEAD)
    return head


@device_function
def within(x, most):
    """x from 0 to `most`, in 32 bits. (Clamped first: cut to 32 bits, 2^32 + 5 would be 5.)"""
    return tl.minimum(tl.maximum(x, 0), most).to(tl.int32)


@device_function
def address(matrix, batch, row, head):
    """Where a row begins, in 64 bits."""
    at = tl.cast(batch, tl.int64) * matrix.batch + tl.cast(row, tl.int64) * matrix.row + tl.cast(head, tl.int64) * matrix.head
    return matrix.pointer + at


@device_function
def stream(matrix, batch, row, head, TILE: tl.constexpr, PADDED: tl.constexpr):
    """The rows of a matrix from `row` on, for tiles of TILE of them."""
    rows = tl.arange(0, TILE).to(tl.int64) * matrix.row
    return Stream(address(matrix, batch, row, head), rows[:, None] + tl.arange(0, PADDED)[None, :], matrix.row)


@device_function
def vector_stream(matrix, batch, row, head, TILE: tl.constexpr):
    """The same for a matrix with one number per row (LSE, delta, document numbers)."""
    return Stream(address(matrix, batch, row, head), tl.arange(0, TILE).to(tl.int64) * matrix.row, matrix.row)


@device_function
def pointers_of(stream, first):
    """Pointers to the tile that begins at row `first` of a stream."""
    return stream.base + tl.cast(first, tl.int64) * stream.row + stream.at


@device_function
def load_tile(stream, first, remaining, DIM: tl.constexpr):
    """Rows first.. of a stream: 0 from the `remaining`th on (None: all are there) and beyond head dim DIM."""
    TILE: tl.constexpr = stream.at.shape[0]
    PADDED: tl.constexpr = stream.at.shape[1]
    rows = tl.arange(0, TILE)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    if remaining is not None:
        if DIM == PADDED:
            tile = tl.load(pointers_of(stream, first), mask=rows < remaining, other=0.0)
        else:
            tile = tl.load(pointers_of(stream, first), mask=(rows < remaining) & (columns < DIM), other=0.0)
    elif DIM == PADDED:
        tile = tl.load(pointers_of(stream, first))
    else:
        tile = tl.load(pointers_of(stream, first), mask=columns < DIM, other=0.0)
    return tile


@device_function
def store_tile(stream, first, remaining, tile, DIM: tl.constexpr):
    """Store a tile's first `remaining` rows, and its first DIM columns, as rows first.. of a stream."""
    TILE: tl.constexpr = stream.at.shape[0]
    PADDED: tl.constexpr = stream.at.shape[1]
    stored = (tl.arange(0, TILE)[:, None] < remaining) & (tl.arange(0, PADDED)[None, :] < DIM)
    tl.store(pointers_of(stream, first), tile.to(stream.base.dtype.element_ty), mask=stored)


@device_function
def load_vector(stream, first, remaining):
    """Numbers first.. of a stream: 0 from the `remaining`th on (None: all are there)."""
    TILE: tl.constexpr = stream.at.shape[0]
    if remaining is None:
        vector = tl.load(pointers_of(stream, first))
    else:
        vector = tl.load(pointers_of(stream, first), mask=tl.arange(0, TILE) < remaining, other=0)
    return vector


@device_function
def store_vector(stream, first, remaining, vector):
    """Store the first `remaining` numbers as numbers first.. of a stream."""
    TILE: tl.constexpr = stream.at.shape[0]
    tl.store(pointers_of(stream, first), vector, mask=tl.arange(0, TILE) < remaining)


@device_function
def load_ids(documents, batch, first, n, TILE: tl.constexpr):
    """Document numbers of rows first..first + TILE (0 where there are no documents). Rows from n on: masked by position."""
    ids = tl.zeros((TILE,), tl.int32)
    if documents is not None:
        ids = load_vector(vector_stream(documents, batch, 0, 0, TILE), first, n - first)
    return ids


@device_function
def kv_phases(p_first, p_last, n_kv, mask, score, places, TILE_KV: tl.constexpr):
    """(begin, full_begin, full_end, end): the keys that rows p_first..p_last see, and those that all of them see.

    All but end are bounds of tiles.
    """
    whole = whole_length(n_kv, places, KEYS)
    begin, end = kv_range(p_first, p_last, whole, mask.left, mask.right, mask.prefix)
    begin = before(begin, n_kv, places, KEYS) // TILE_KV * TILE_KV
    end = tl.maximum(before(end, n_kv, places, KEYS), begin)
    if mask.document_q is None and score.visible is None and score.blocks is None:
        full_begin, full_end = kv_full(p_first, p_last, whole, mask.left, mask.right, mask.prefix)
        full_begin = before(full_begin, n_kv, places, KEYS)
        full_end = before(full_end, n_kv, places, KEYS)
        full_begin = tl.minimum(tl.cdiv(full_begin, TILE_KV), tl.cdiv(end, TILE_KV)) * TILE_KV
        full_end = tl.maximum(full_end // TILE_KV * TILE_KV, full_begin)
    else:
        full_begin = begin
        full_end = begin
    return begin, full_begin, full_end, end


@device_function
def q_phases(first, last, n_q, n_kv, mask, score, places, TILE_Q: tl.constexpr):
    """(begin, full_begin, full_end, end): the rows that see keys of first..last, and those that see them all.

    All but end are bounds of tiles.
    """
    whole = whole_length(n_kv, places, KEYS)
    shift = whole - whole_length(n_q, places, QUERIES)
    j_first = position(first, places, KEYS)
    j_last = position(last, places, KEYS)
    begin, end = q_range(j_first, j_last, shift, whole, mask.left, mask.right, mask.prefix)
    begin = before(begin - shift, n_q, places, QUERIES) // TILE_Q * TILE_Q
    end = tl.maximum(before(end - shift, n_q, places, QUERIES), begin)
    if mask.document_q is None and score.visible is None and score.blocks is None:
        full_begin, full_end = q_full(j_first, j_last, shift, whole, mask.left, mask.right, mask.prefix)
        full_begin = before(full_begin - shift, n_q, places, QUERIES)
        full_begin = tl.minimum(tl.cdiv(full_begin, TILE_Q), tl.cdiv(end, TILE_Q)) * TILE_Q
        full_end = tl.maximum(before(full_end - shift, n_q, places, QUERIES) // TILE_Q * TILE_Q, full_begin)
    else:
        full_begin = begin
        full_end = begin
    return begin, full_begin, full_end, end


@device_function
def within_spans(begin, end, spans, first, last, TILE: tl.constexpr, STEP: tl.constexpr):
    """What is left of [begin, end), in tiles of STEP, for the TILE rows (or keys) from `first` to `last` by their documents.
    spans: a pointer to those of their batch entry (see `common.documents`)."""
    NUMBER: tl.constexpr = TILE // SPAN if TILE > SPAN else 1
    at = spans + 3 * tl.minimum(first // SPAN + tl.arange(0, NUMBER), last // SPAN)
    begin = tl.maximum(begin, tl.min(tl.load(at), 0) // STEP * STEP)
    end = tl.maximum(tl.minimum(end, tl.max(tl.load(at + 1), 0)), begin)
    return begin, end


@device_function
def seen_in(p, key, n_q, n_kv, mask, score, ids_q, ids_kv, batch, head, places):
    """Which pairs of a tile are visible; positions p and keys broadcast to it, as do the document numbers."""
    whole = whole_length(n_kv, places, KEYS)
    j = position(key, places, KEYS)
    seen = visible(p, j, whole, mask.left, mask.right, mask.prefix)
    if places is not None:
        seen = seen & (key < n_kv)
    if mask.document_q is not None:
        seen = seen & (ids_q == ids_kv)
    if score.visible is not None:
        i = p - (whole - whole_length(n_q, places, QUERIES))
        seen = seen & score.visible(batch, whole_head(head, places), i, j)
    if score.blocks is not None:
        seen = seen & seen_in_blocks(score.blocks, p - (n_kv - n_q), key, batch, head)
    return seen


@device_function
def kind_of_block(blocks, i, j, batch, head):
    """What `strobe.masks.Blocks.kinds` says of row i and key j."""
    at = tl.cast(batch, tl.int64) * blocks.batch + tl.cast(head, tl.int64) * blocks.head
    return tl.load(blocks.kinds + at + (i // blocks.rows).to(tl.int64) * blocks.row + j // blocks.keys)


@device_function
def seen_in_blocks(blocks, i, j, batch, head):
    """Which pairs of rows i and keys j, which broadcast to a tile within one block, the block shows."""
    first_i = tl.min(i)
    first_j = tl.min(j)
    kind = kind_of_block(blocks, first_i, first_j, batch, head)
    size = blocks.rows * blocks.keys
    pairs = blocks.pairs + tl.maximum(kind - 2, 0).to(tl.int64) * size
    at = (i - first_i // blocks.rows * blocks.rows) * blocks.keys + (j - first_j // blocks.keys * blocks.keys)
    # Of the other kinds nothing is loaded.
    seen = tl.load(pairs + at, mask=at < tl.where(kind > 1, size, 0), other=0).to(tl.int32)
    return tl.where(kind == 1, 1, seen) != 0


@device_function
def product(a, b, acc):
    """acc + a b, with a in b's type; float32 without TF32."""
    return tl.dot(a.to(b.dtype), b, acc, input_precision="ieee")


@device_function
def any_nan(tile):
    """Whether a tile of results holds a NaN."""
    # Over both axes at once: one after the other crashes the compiler of Triton 3.6 for sm_100.
    return tl.max((tile != tile).to(tl.int32)) > 0


@device_function
def any_not_finite(tile):
    """Whether a tile of results holds a NaN or an infinity."""
    return tl.max(tl.where(is_finite(tile), 0, 1)) > 0


@device_function
def is_finite(tile):
    """Which entries are neither NaN nor infinite; in float32 because the interpreter knows bfloat16 by its bits only."""
    return tl.abs(tile.to(tl.float32)) < float("inf")


@device_function
def finite_part(tile):
    """The tile with 0 for NaN and infinities."""
    return tl.where(is_finite(tile), tile, 0.0)


@device_function
def count_broken(seen, tile, acc):
    """acc + for each row of `seen` and column of the tile, how many entries that are not finite the row sees."""
    broken = tl.where(is_finite(tile), 0.0, 1.0)
    seen = tl.broadcast_to(seen, acc.shape[0], tile.shape[0])  # a mask may look at keys alone
    return tl.dot(seen.to(tl.float16), broken.to(tl.float16), acc)


@device_function
def count_broken_keys(
    stream, p, ids_q, batch, head, n_q, n_kv, mask, score, places, begin, end,
    TILE_Q: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    """[TILE_Q, PADDED]: how many entries of keys (or values) that are not finite each row sees, by column."""
    counts = tl.zeros((TILE_Q, PADDED), tl.float32)
    for first in tl.range(begin, end, TILE_KV, num_stages=1):
        key = first + tl.arange(0, TILE_KV)
        ids_kv = load_ids(mask.document_kv, batch, first, n_kv, TILE_KV)
        seen = seen_in(p[:, None], key[None, :], n_q, n_kv, mask, score, ids_q[:, None], ids_kv[None, :], batch, head, places)
        counts = count_broken(seen, load_tile(stream, first, n_kv - first, DIM), counts)
    return counts
