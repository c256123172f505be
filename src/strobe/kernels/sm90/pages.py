"""Keys and values of a cache for the Hopper forward: TMA copies a block in boxes, each of which lies in one page.

To TMA a cache is packed rows, of which a box is a short sequence (see `common.descriptors.descriptor`): the hardware ends it
where its request ends, and writes zeros instead of what lies beyond, which may be anything. So pages lie a whole number of rows
apart.

A box has a panel of columns, 64, as rows are swizzled by 128 bytes; all keys of a block lie together in one panel, then in the
next. Small pages take many boxes so. Where the config is `grouped`, 8 keys lie together in all panels instead, then the next 8:
a box has all columns. To TMA keys are groups of 8 then, which end nowhere, so the box in which a request ends is copied in
squares of 8 keys and one panel instead.

A page that is not there is a box of zeros. What sees it is noted, and computed again by the decode kernel, to which its keys
are none.
"""

import math

import torch
import triton.language as tl

from strobe.kernels.common.call import Tensors
from strobe.kernels.common.descriptors import ENDLESS, FAR, layout_of
from strobe.kernels.common.groups import GROUP, PANEL, groups_descriptor, in_squares
from strobe.kernels.decode.notes import NOTED
from strobe.kernels.gluon import TensorDescriptor, aggregate, gl, gluon, mbarrier, tma_load
from strobe.kernels.sm90.config import Config
from strobe.kernels.sm90.tile_queue import (
    BATCH,
    BEGIN,
    END,
    FULL_BEGIN,
    FULL_END,
    GO,
    HEAD,
    N_KV,
    first_block,
    get,
    later_block,
    note_of_group,
    note_of_tile,
    row_of_head,
)
from strobe.serving.problem import page_rows

CACHE_NUMBERS = ("table_row", "k_page", "v_page", "number_of_pages")
"""Integers of a cache, which no kernel is specialised for."""

NO_CACHE = (None,) * 6
"""What `cache_arguments` gives where there is none."""


@aggregate
class Pages:
    """Where the keys of a cache lie. table: the pages of each request, by table_row and page, or None where it has one entry,
    of its own number or that in `entries`. k_page, v_page: rows of K and V from one page (or entry) to the next. number: of
    pages. SIZE: keys of a page."""

    table: (gl.tensor, gl.constexpr)
    entries: (gl.tensor, gl.constexpr)
    table_row: gl.tensor
    k_page: gl.tensor
    v_page: gl.tensor
    number: gl.tensor
    SIZE: gl.constexpr


@gluon.jit
def copy_pages(pages, descriptors, channel, g, page_rows, n, batch, head, i, C: gl.constexpr):
    """Start the copy of block i of a request with n keys to position g. Whether a page of it is not there. page_rows: rows from
    one page to the next. Pages are looked up before the place is waited for, a lane each, so that they take one register."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    BOXES: gl.constexpr = C.tile_kv // C.box
    key = i * C.tile_kv + lane * C.box
    exists = (lane < BOXES) & (key < n)
    page = page_of(pages, batch, key, exists)
    there = exists & (page >= 0) & (page < pages.number)
    row = gl.where(there, page * page_rows + row_of(pages, key), -1)
    missing = gl.max((exists & ~there).to(gl.int32), 0) != 0
    firsts = ()
    if not C.grouped:  # whose boxes, found early, do not fit the uniform registers
        for b in gl.static_range(BOXES):
            firsts += (box_of(row, lane, b),)
    barrier = channel.acquire(g)
    chunks = channel.block(g)
    mbarrier.expect(barrier, bytes_of(chunks))
    if C.grouped:
        keys = gl.maximum(n - i * C.tile_kv, 0)
        if (keys >= C.tile_kv) | (keys % C.box == 0):
            copy_groups(descriptors[0], chunks[0], barrier, head, row, lane, C)
        else:
            copy_last(descriptors[1], chunks[0], barrier, head, row, lane, keys, C)
    else:
        for b in gl.static_range(BOXES):
            rows = gl.where(firsts[b] < 0, 0, gl.minimum(n - (i * C.tile_kv + b * C.box), C.box))
            for c in gl.static_range(len(chunks)):
                copy_box(descriptors[c], chunks[c], barrier, head, gl.maximum(firsts[b], 0), rows, b * C.box,
                         c * chunks[0].shape[1])  # fmt: skip
    return missing


@gluon.jit
def box_of(place, lane, b):
    """Where box b lies, which lane b knows."""
    return gl.max(gl.where(lane == b, place, -1), 0)


@gluon.jit
def copy_groups(descriptor, block, barrier, head, row, lane, C: gl.constexpr):
    """Start the copies of a block of groups, which ends with a box. row: of the cache, where a lane's box begins, or -1."""
    BOXES: gl.constexpr = C.tile_kv // C.box
    GROUPS: gl.constexpr = C.box // GROUP
    group = (row.to(gl.uint32) // GROUP).to(gl.int32)  # that of -1 lies beyond all others, and comes as zeros
    for b in gl.static_range(BOXES):
        tma_load(descriptor, [box_of(group, lane, b), head, 0, 0, 0], barrier, block.slice(b * GROUPS, GROUPS, 0))


@gluon.jit
def copy_last(descriptor, block, barrier, head, row, lane, keys, C: gl.constexpr):
    """Start the copies of a block of groups, of which so many keys are the request's, in squares of 8 keys and one panel. row:
    of the cache, that each lane's box begins with, or -1."""
    GROUPS: gl.constexpr = block.shape[0]
    PANELS: gl.constexpr = block.shape[2]
    squares = in_squares(block)
    begun = (keys + GROUP - 1) // GROUP
    for i in range(begun):
        copy_squares(descriptor, squares, barrier, head, row, lane, keys, i, PANELS, C)
    for i in range(begun, GROUPS):  # of zeros; one loop for both would be unrolled
        copy_squares(descriptor, squares, barrier, head, row, lane, keys, i, PANELS, C)


@gluon.jit
def copy_squares(descriptor, squares, barrier, head, row, lane, keys, i, PANELS: gl.constexpr, C: gl.constexpr):
    """Start the copies of group i of the block."""
    first = box_of(row, lane, i * GROUP // C.box)
    rows = gl.where(first < 0, 0, gl.minimum(gl.maximum(keys - i * GROUP, 0), GROUP))
    end = gl.maximum(first, 0) + i * GROUP % C.box + rows
    for p in gl.static_range(PANELS):
        square = squares.index(i * PANELS + p).reshape([1, 1, 1, GROUP, PANEL])
        tma_load(descriptor, [FAR, end, head, FAR - rows, p * PANEL], barrier, square)


@gluon.jit
def copy_box(descriptor, chunk, barrier, head, first, rows, at: gl.constexpr, column: gl.constexpr):
    """Start the copy of the columns of a chunk, which begin at `column` of a head, to the rows of the chunk from `at` on: so
    many rows of the cache from the first one on, and zeros in the rest of the box."""
    ROWS_OF_CHUNK: gl.constexpr = chunk.shape[0]
    COLUMNS: gl.constexpr = chunk.shape[1]
    BOX: gl.constexpr = descriptor.block_type.shape[3]
    WIDTH: gl.constexpr = descriptor.block_type.shape[4]
    box = chunk.reshape([1, 1, 1, ROWS_OF_CHUNK, COLUMNS]).slice(at, BOX, 3)
    for i in gl.static_range(COLUMNS // WIDTH):
        place = [FAR, first + rows, head, FAR - rows, column + i * WIDTH]
        tma_load(descriptor, place, barrier, box.slice(i * WIDTH, WIDTH, 4))


@gluon.jit
def page_of(pages, batch, key, exists):
    """The page (or entry) of some keys of a request, where they exist."""
    if pages.table is not None:
        at = pages.table + batch.to(gl.int64) * pages.table_row + key // pages.SIZE
        return gl.load(at, mask=exists, other=-1)
    elif pages.entries is not None:
        return gl.load(pages.entries + batch) + 0 * key
    else:
        return batch + 0 * key


@gluon.jit
def row_of(pages, key):
    """The row of a key in its page (or entry)."""
    if pages.table is not None:
        return key % pages.SIZE
    else:
        return key


@gluon.constexpr_function
def bytes_of(chunks):
    """Bytes of a block."""
    return sum(math.prod(chunk.shape) * chunk.dtype.primitive_bitwidth // 8 for chunk in chunks)


@gluon.jit
def note_missing(K, work, missing):
    """Note all rows of a tile if a page that it looked up is not there."""
    GROUPS: gl.constexpr = K.C.groups
    if missing:
        note = note_of_tile(work, K)
        for w in gl.static_range(GROUPS):
            if row_of_head(w, work.row, work.head, K) < work.n_q:
                gl.store(K.outputs.notes + note + note_of_group(w, K), 1)
        gl.store(K.counters + NOTED, 1)


@gluon.jit
def producer_of_v(K):
    """Copy blocks of V in, as `forward.producer` does those of K, and learn of tiles as the consumers do."""
    tiles = K.memory.tiles
    turn = gl.to_tensor(0)
    g = gl.to_tensor(0)
    mbarrier.wait(K.memory.tile_full.index(0), 0)
    while get(tiles, turn % K.C.slots, GO, 1) != 0:
        slot = turn % K.C.slots
        batch = get(tiles, slot, BATCH, 1)
        kv_head = get(tiles, slot, HEAD, 1) // K.heads.group
        n = get(tiles, slot, N_KV, 1)
        begin = get(tiles, slot, BEGIN, 1)
        end = get(tiles, slot, END, 1)
        full_begin = get(tiles, slot, FULL_BEGIN, 1)
        full_end = get(tiles, slot, FULL_END, 1)
        mbarrier.arrive(K.memory.tile_empty.index(slot), count=1)
        lead = first_block(begin, end, full_begin, full_end, K.lengths, K.score)
        for j in tl.range(0, end - begin):
            i = gl.where(j == 0, lead, later_block(j, begin, lead))
            copy_pages(K.pages, K.inputs[2], K.v, g, K.pages.v_page, n, batch, kv_head, i, K.C)
            g += 1
        turn += 1
        mbarrier.wait(K.memory.tile_full.index(turn % K.C.slots), (turn // K.C.slots) & 1)


# ---- on the host


def box_descriptors(x: torch.Tensor, config: Config, chunks: tuple[int, ...]) -> list[TensorDescriptor | None]:
    """TMA descriptors of k or v of a cache, [pages, page_size, heads, columns], in boxes of one head, one for each chunk of
    columns; None for one of no columns. Of groups two, the second for the last block of a request."""
    if config.grouped:
        return [groups_descriptor(x, config.box, chunks[0]), _descriptor(x, GROUP.value, PANEL.value)]
    whole = config.box == config.tile_kv
    widths = [columns if whole else min(columns, PANEL.value) for columns in chunks]
    return [_descriptor(x, config.box, columns) if columns else None for columns in widths]


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor of packed rows (see `common.descriptors.descriptor`) that are those of all pages."""
    row, head = x.stride(1), x.stride(2) if x.shape[2] > 1 else x.shape[3]
    shape, strides = [ENDLESS, ENDLESS, x.shape[2], FAR.value, x.shape[3]], [2**34 - row, row, head, row, 1]
    block = (1, 1, 1, rows, columns)
    return TensorDescriptor(x, shape, strides, list(block), layout_of(block, x.dtype))


def cache_arguments(tensors: Tensors) -> tuple:
    """What a kernel is told of a cache."""
    t = tensors
    table_row = 0 if t.page_table is None else t.page_table.stride(0)
    return t.page_table, t.entries, table_row, page_rows(t.k), page_rows(t.v), t.k.shape[0]
