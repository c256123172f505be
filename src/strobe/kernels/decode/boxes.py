"""Boxes of keys that TMA copies for Hopper's kernels of a cache: where they lie, and what of them is no key of a piece."""

import triton.language as tl

from strobe.kernels.common.channel import swizzled
from strobe.kernels.common.groups import GROUP, PANEL, in_squares
from strobe.kernels.decode.keys import is_page, wide
from strobe.kernels.decode.layouts import lanes
from strobe.kernels.gluon import gl, gluon, reinterpret, tma_load


@gluon.constexpr_function
def rows_layout(columns, warps):
    """The layout of [1, rows or keys, columns] when a thread has 16 bytes of a row."""
    across = columns // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def boxes_shape(C, shape):
    """A chunk of a ring, [stages, tokens, columns], as TMA sees it."""
    return [shape[0] * (C.tokens // C.box), C.box, shape[2]]


@gluon.jit
def pages_of_boxes(cached, piece, first, C: gl.constexpr):
    """The page (or entry) of each box of the step from key `first` on; -1 for one that has no key of the piece."""
    pages = ()
    for b in gl.static_range(C.tokens // C.box):
        if cached.PAGE == 0:
            pages += (piece.entry,)
        else:
            at = cached.table + wide(piece.batch, cached.table_row) + (first + b * C.box) // cached.PAGE
            pages += (gl.load(at, mask=has_keys(piece, first + b * C.box, C), other=-1),)
    return pages


@gluon.constexpr_function
def window_of(C):
    """Steps whose pages are looked up together, one by each lane."""
    return 32 // (C.tokens // C.box)


@gluon.jit
def pages_of_window(cached, piece, first, C: gl.constexpr):
    """The pages of the boxes from key `first` on, one in each lane; -1 for one that has no key of the piece. For one warp."""
    first += gl.arange(0, 32, lanes(1)) * C.box
    if cached.PAGE == 0:
        return first
    else:
        at = cached.table + wide(piece.batch, cached.table_row) + first // cached.PAGE
        return gl.load(at, mask=has_keys(piece, first, C), other=-1)


@gluon.jit
def pages_of_step(cached, piece, window, i, C: gl.constexpr):
    """The page (or entry) of each box of the i-th step of a window."""
    BOXES: gl.constexpr = C.tokens // C.box
    pages = ()
    for b in gl.static_range(BOXES):
        if cached.PAGE == 0:
            pages += (piece.entry,)
        else:
            lane = gl.arange(0, 32, lanes(1))
            pages += (gl.max(gl.where(lane == i * BOXES + b, window, -(2**31)), 0),)
    return pages


@gluon.jit
def has_keys(piece, first, C: gl.constexpr):
    """Whether a box has keys of a piece."""
    return (first + C.box > piece.begin) & (first < piece.end)


@gluon.jit
def copy_boxes(descriptor, chunk, slot, barrier, cached, pages, head, first, COLUMN: gl.constexpr, C: gl.constexpr):
    """Start copying columns from COLUMN on of the step from key `first` on to a place in a ring. chunk: [stages, tokens,
    columns]. TMA copies zeros for a page that is not there, and for keys beyond a contiguous cache."""
    BOXES: gl.constexpr = C.tokens // C.box
    ring = reinterpret(chunk, chunk.dtype, boxes_shape(C, chunk.shape), swizzled(chunk.dtype, chunk.shape[2]))
    for b in gl.static_range(BOXES):
        page, row = place_of_box(cached, pages[b], first + b * C.box)
        box = ring.index(slot * BOXES + b).reshape(descriptor.block_type.shape)
        tma_load(descriptor, [page, head, row, COLUMN], barrier, box)


@gluon.jit
def copy_groups(descriptor, block, barrier, cached, pages, page_stride, row_stride, head, first, C: gl.constexpr):
    """The same where keys lie in groups, all columns of them, to a block of groups."""
    GROUPS: gl.constexpr = C.box // GROUP
    of_page = (page_stride // (GROUP * row_stride)).to(gl.int32)
    for b in gl.static_range(C.tokens // C.box):
        page, row = place_of_box(cached, pages[b], first + b * C.box)
        group = page * of_page + row // GROUP
        tma_load(descriptor, [group, head, 0, 0, 0], barrier, block.slice(b * GROUPS, GROUPS, 0))


@gluon.jit
def place_of_box(cached, page, first):
    """Where TMA finds the box from key `first` on: its page, the one behind the last for one that is not there, and its row."""
    row = first
    if cached.PAGE:
        row = row % cached.PAGE
    return gl.where(is_page(cached, page), page, cached.pages), row


@gluon.jit
def clear_values(values, piece, first, C: gl.constexpr):
    """Set the values of a step to zero that are not of a piece: 0 * NaN would be NaN. values: a chunk of their columns. The
    caller fences."""
    AT_ONCE: gl.constexpr = 16
    L: gl.constexpr = gl.SliceLayout(0, rows_layout(C.chunk, gl.num_warps()))
    for i in gl.static_range(C.tokens // AT_ONCE):
        keys = first + i * AT_ONCE + gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(1, L)), 1)
        clear_some(values.slice(i * AT_ONCE, AT_ONCE, 0), keys, piece, L)


@gluon.jit
def clear_groups(values, piece, first, C: gl.constexpr):
    """The same of a block of groups."""
    L: gl.constexpr = gl.SliceLayout(0, rows_layout(PANEL, gl.num_warps()))
    PANELS: gl.constexpr = values.shape[2]
    SQUARES: gl.constexpr = values.shape[0] * PANELS
    squares = in_squares(values)
    for i in range(SQUARES):
        keys = first + i // PANELS * GROUP + gl.expand_dims(gl.arange(0, GROUP, gl.SliceLayout(1, L)), 1)
        clear_some(squares.index(i), keys, piece, L)


@gluon.jit
def clear_some(values, keys, piece, L: gl.constexpr):
    values.store(gl.where((keys >= piece.begin) & (keys < piece.end), values.load(L), 0.0))


@gluon.jit
def has_others(piece, first, C: gl.constexpr):
    """Whether a step has keys that are not of a piece."""
    return (first < piece.begin) | (first + C.tokens > piece.end)


@gluon.jit
def first_step(piece, C: gl.constexpr):
    """The first key of a piece's first step, and how many steps it has, one at least."""
    first = piece.begin // C.tokens * C.tokens
    return first, gl.maximum((piece.end - first + C.tokens - 1) // C.tokens, 1)


@gluon.jit
def copy_steps(COPY: gl.constexpr, memory, K, piece, state):
    """Copy the steps of a piece, each by COPY, which is told its first key and its pages. They are looked up a window of steps
    ahead."""
    C: gl.constexpr = K.C
    first, steps = first_step(piece, C)
    window = pages_of_window(K.cached, piece, first, C)
    for begin in tl.range(0, steps, window_of(C)):
        next_window = pages_of_window(K.cached, piece, first + (begin + window_of(C)) * C.tokens, C)
        for i in tl.range(begin, gl.minimum(begin + window_of(C), steps)):
            pages = pages_of_step(K.cached, piece, window, i - begin, C)
            state = COPY(memory, K, piece, first + i * C.tokens, pages, state)
        window = next_window
    return state


LOOKED_AT = gl.constexpr(512)
"""Pages that are looked at together."""


@gluon.jit
def misses_a_page(cached, piece):
    """Whether a page of a piece is not there."""
    missing = piece.begin < piece.begin
    if cached.PAGE:
        L: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 32 // gl.num_warps()], [32], [gl.num_warps()], [0])
        end = (piece.end + cached.PAGE - 1) // cached.PAGE
        for first in range(piece.begin // cached.PAGE, end, LOOKED_AT):
            number = first + gl.arange(0, LOOKED_AT, L)
            at = cached.table + wide(piece.batch, cached.table_row) + number
            pages = gl.load(at, mask=number < end, other=-1)
            missing = missing | (gl.max(((number < end) & ~is_page(cached, pages)).to(gl.int32), 0) > 0)
    return missing
