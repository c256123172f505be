"""The tiles of packed sequences, in lists that the kernels read, and the results of rows that no tile has.

Sequences differ in length, and a grid that gives each as many tiles as the longest has to skip most of them: a counter and the
bounds of a sequence are read for each, a microsecond that no product hides. So a small launch goes ahead of the forward: it
writes where each tile is, those of the longest sequences first, as they see the most keys, and of a sequence the last one
first. It fills the rows, too, that the forward leaves alone: those of no sequence, those not used, and those that see nothing.
(32 sequences of 35 to 2608 tokens, 32 heads on 8, D = 128, causal: 473 -> 297 us; 256 of 3 to 848, 12 heads, D = 64: 244 -> 106
us; H200, of which zeros for all of out and the LSE took a part.)

Ahead of the backward in one pass goes one that lists tiles of rows, for what comes before and after, and blocks of keys, those
that the most rows may see first, and fills dQ, dK and dV in the same way. (Backwards of these sequences: 1260 -> 1099 us, and
with the order of rows in `backward` 1006; 504 -> 326 us; H100.)

    tiles_listed    int32 [1 + tiles, 8]    first how many tiles are listed; then of each (batch, first row, start_q, n_q,
                                            start_kv, n_kv, -, -), `Work` in brief
    served          int32 [sequences]       1 for each whose tiles are listed, or 0, if another kernel serves some: see `Apart`
    rows_listed     the same, of ROWS_PADDED rows each
    keys_listed     the same, of KEYS keys each, with its first key; those of a sequence come one after the other
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from strobe.kernels.common.arguments import totals
from strobe.kernels.common.call import Buffer, Call, Tensors
from strobe.kernels.common.dependent_launch import take_program_turn
from strobe.kernels.common.masks import kv_range
from strobe.kernels.portable.primitives import LENGTHS_AND_BOUNDS, sequence
from strobe.kernels.sm90.backward_config import KEYS, ROWS_PADDED
from strobe.kernels.sm90.config import ROWS_PER_GROUP
from strobe.problem import AttentionProblem, Varlen

RECORD = tl.constexpr(8)
"""Numbers of a tile, of which the last two are not used."""

CHUNK = 1024
"""Sequences whose lengths a program looks at together."""

ELEMENTS = 4096
"""Elements that a program fills at once."""

PROGRAMS = 264
"""Programs, about: those that fill many rows should not be few."""


class Apart(NamedTuple):
    """Which sequences another kernel serves: those of fewer rows than `least`, and of those of fewer than `most` the ones that
    see more than twice as many keys as a multiprocessor walks along in all: most would wait for their tiles. tiles_abreast:
    tiles of the same rows, of different heads; sms: multiprocessors."""

    least: int
    most: int
    tiles_abreast: int
    sms: int


@triton.jit(
    do_not_specialize=(*LENGTHS_AND_BOUNDS, "batches", "heads", "width", "sink_stride", "least", "most", "tiles_abreast", "sms")
)
def list_tiles(
    listed, served, out, lse, sinks, sink_stride, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, batches, heads, width,
    n_q, n_kv, total_q, total_kv, left, right, prefix, least, most, tiles_abreast, sms,
    TILE: tl.constexpr, RECORD: tl.constexpr, CHUNK: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """List the tiles of a sequence, and fill its share of the rows that no tile has; the second dim of the grid shares the
    filling. width: elements of a row of out, of all heads. Without out nothing is filled. Where some are
    another kernel's (see `Apart`), `served` says which are not."""
    take_program_turn()
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start_q, rows = sequence(cu_seqlens_q, seqused_q, b, n_q, total_q)
    start_kv, keys = sequence(cu_seqlens_kv, seqused_kv, b, n_kv, total_kv)
    load = None
    if served is not None:
        load = tl.zeros((), tl.int64)
        for first in tl.range(0, batches, CHUNK):
            other = first + tl.arange(0, CHUNK)
            at = tl.minimum(other, batches - 1)
            _, others_rows = sequence(cu_seqlens_q, seqused_q, at, n_q, total_q)
            _, others_keys = sequence(cu_seqlens_kv, seqused_kv, at, n_kv, total_kv)
            counts = (other < batches) & (others_rows >= least)
            load += tl.sum(tl.where(counts, tl.cdiv(others_rows, TILE).to(tl.int64) * others_keys, 0), 0)
        load = load * tiles_abreast // sms
    tiles = _tiles(rows, keys, load, least, most, TILE)
    if part == 0:
        before, total = tiles * 0, tiles * 0
        for first in tl.range(0, batches, CHUNK):
            other = first + tl.arange(0, CHUNK)
            exists = other < batches
            at = tl.minimum(other, batches - 1)
            _, others_rows = sequence(cu_seqlens_q, seqused_q, at, n_q, total_q)
            others_keys = others_rows
            if served is not None:
                _, others_keys = sequence(cu_seqlens_kv, seqused_kv, at, n_kv, total_kv)
            others = tl.where(exists, _tiles(others_rows, others_keys, load, least, most, TILE), 0)
            earlier = (others > tiles) | ((others == tiles) & (other < b))
            before += tl.sum(tl.where(earlier, others, 0), 0)
            total += tl.sum(others, 0)
        if b == 0:
            tl.store(listed, total)
        if served is not None:
            tl.store(served + b, (tiles > 0).to(tl.int32))
        _list(listed, before, tiles, b, start_q, rows, start_kv, keys, TILE, RECORD)
    if out is not None:
        begin, end = _around(cu_seqlens_q, start_q, b, batches, n_q, total_q)
        _fill(out, lse, None, 0, begin, start_q, heads, width, total_q, part, parts, ELEMENTS)
        _fill(out, lse, None, 0, start_q + rows, end, heads, width, total_q, part, parts, ELEMENTS)
        for tile in tl.range(0, tiles):
            first = tile * TILE
            last = tl.minimum(first + TILE, rows)
            key_begin, key_end = kv_range(first + keys - rows, last - 1 + keys - rows, keys, left, right, prefix)
            if key_end <= key_begin:
                _fill(out, lse, sinks, sink_stride, start_q + first, start_q + last, heads, width, total_q, part, parts,
                      ELEMENTS)  # fmt: skip


@triton.jit
def _tiles(rows, keys, load, least, most, TILE: tl.constexpr):
    """How many tiles of a sequence are listed. load: keys that a multiprocessor walks along in all, for the tiles of all; None:
    no sequence is another kernel's."""
    tiles = tl.cdiv(rows, TILE)
    if load is not None:
        tiles = tl.where((rows >= most) | ((rows >= least) & (keys <= 2 * load)), tiles, 0)
    return tiles


@triton.jit(do_not_specialize=("batches", "width_q", "width_k", "width_v", "n_q", "n_kv", "total_q", "total_kv"))
def list_rows_and_keys(
    rows_listed, keys_listed, dq, dk, dv, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, batches,
    width_q, width_k, width_v, n_q, n_kv, total_q, total_kv,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RECORD: tl.constexpr, CHUNK: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """List a sequence's tiles of rows and its blocks of keys, and write 0 to its share of the gradients that no tile has. The
    sequences with the most rows come first. width_q, width_k, width_v: elements of a row of dQ, dK, dV, of all heads."""
    take_program_turn()
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start_q, rows = sequence(cu_seqlens_q, seqused_q, b, n_q, total_q)
    start_kv, keys = sequence(cu_seqlens_kv, seqused_kv, b, n_kv, total_kv)
    if part == 0:
        rows_before, rows_total, keys_before, keys_total = rows * 0, rows * 0, rows * 0, rows * 0
        for first in tl.range(0, batches, CHUNK):
            other = first + tl.arange(0, CHUNK)
            exists = other < batches
            _, others_rows = sequence(cu_seqlens_q, seqused_q, tl.minimum(other, batches - 1), n_q, total_q)
            _, others_keys = sequence(cu_seqlens_kv, seqused_kv, tl.minimum(other, batches - 1), n_kv, total_kv)
            earlier = (others_rows > rows) | ((others_rows == rows) & (other < b))
            of_rows = tl.where(exists, tl.cdiv(others_rows, ROWS), 0)
            of_keys = tl.where(exists, tl.cdiv(others_keys, KEYS), 0)
            rows_before += tl.sum(tl.where(earlier, of_rows, 0), 0)
            keys_before += tl.sum(tl.where(earlier, of_keys, 0), 0)
            rows_total += tl.sum(of_rows, 0)
            keys_total += tl.sum(of_keys, 0)
        if b == 0:
            tl.store(rows_listed, rows_total)
            tl.store(keys_listed, keys_total)
        _list(rows_listed, rows_before, tl.cdiv(rows, ROWS), b, start_q, rows, start_kv, keys, ROWS, RECORD)
        _list(keys_listed, keys_before, tl.cdiv(keys, KEYS), b, start_q, rows, start_kv, keys, KEYS, RECORD)
    begin, end = _around(cu_seqlens_q, start_q, b, batches, n_q, total_q)
    _fill_rows(dq, begin, start_q, width_q, part, parts, ELEMENTS)
    _fill_rows(dq, start_q + rows, end, width_q, part, parts, ELEMENTS)
    begin, end = _around(cu_seqlens_kv, start_kv, b, batches, n_kv, total_kv)
    _fill_rows(dk, begin, start_kv, width_k, part, parts, ELEMENTS)
    _fill_rows(dk, start_kv + keys, end, width_k, part, parts, ELEMENTS)
    _fill_rows(dv, begin, start_kv, width_v, part, parts, ELEMENTS)
    _fill_rows(dv, start_kv + keys, end, width_v, part, parts, ELEMENTS)


@triton.jit
def _list(listed, before, tiles, b, start_q, rows, start_kv, keys, TILE: tl.constexpr, RECORD: tl.constexpr):
    """List the tiles of sequence b, the last one first, behind those that are `before` it."""
    for first in tl.range(0, tiles, 32):
        number = first + tl.arange(0, 32)
        at = listed + (1 + before + number) * RECORD
        _store(at, 0, b, number < tiles)
        _store(at, 1, (tiles - 1 - number) * TILE, number < tiles)
        _store(at, 2, start_q, number < tiles)
        _store(at, 3, rows, number < tiles)
        _store(at, 4, start_kv, number < tiles)
        _store(at, 5, keys, number < tiles)


@triton.jit
def _store(at, field: tl.constexpr, value, mask):
    tl.store(at + field, tl.zeros(at.shape, tl.int32) + value, mask=mask)


@triton.jit
def _around(cu_seqlens, start, b, batches, n, total):
    """[begin, end) of the rows that are sequence b's or, around it, none's: those before the first one, and those up to the
    next. Where numbers decrease, or sequences overlap, a row may be filled that a tile writes: the tiles come later."""
    following, _ = sequence(cu_seqlens, None, tl.minimum(b + 1, batches - 1), n, total)
    return tl.where(b == 0, 0, start), tl.where(b + 1 < batches, following, total)


@triton.jit
def _fill(out, lse, sinks, sink_stride, begin, end, heads, width, total, part, parts, ELEMENTS: tl.constexpr):
    """Write 0, and an LSE of -inf or the head's sink, to the rows begin..end."""
    _fill_rows(out, begin, end, width, part, parts, ELEMENTS)
    element = tl.arange(0, ELEMENTS)
    for head in tl.range(part, heads, parts):
        value = float("-inf")
        if sinks is not None:
            value = tl.load(sinks + head * sink_stride).to(tl.float32)
        for first_row in tl.range(begin, end, ELEMENTS):
            row = first_row + element
            tl.store(lse + total.to(tl.int64) * head + row, tl.zeros((ELEMENTS,), tl.float32) + value, mask=row < end)


@triton.jit
def _fill_rows(x, begin, end, width, part, parts, ELEMENTS: tl.constexpr):
    """Write 0 to a part of the rows begin..end."""
    element = tl.arange(0, ELEMENTS)
    first = begin.to(tl.int64) * width
    number = tl.maximum(end - begin, 0).to(tl.int64) * width
    for at in tl.range(part * ELEMENTS, number, parts * ELEMENTS):
        tl.store(x + first + at + element, tl.zeros((ELEMENTS,), x.dtype.element_ty), mask=at + element < number)


def list_buffers(problem: AttentionProblem) -> dict[str, Buffer]:
    """Room for the list, where sequences are packed: as many tiles as all would have if they were the longest, or (that is what
    bounds may say that cannot be) had all rows."""
    lengths = problem.lengths
    if not isinstance(lengths, Varlen):
        return {}
    return {"tiles_listed": _room(lengths.batch, lengths.seqlen_q, lengths.total_q, ROWS_PER_GROUP)}


def _room(sequences: int, longest: int, total: int, tile: int) -> Buffer:
    """For a list of tiles of so many rows: of sequences that have `total` rows together, each at most `longest`."""
    return Buffer((1 + sequences * triton.cdiv(min(longest, total), tile), RECORD.value), torch.int32)


def list_calls(problem: AttentionProblem, tensors: Tensors, tile_q: int, apart: Apart | None = None) -> list[Call]:
    """The launch that lists the tiles, of so many rows, where sequences are packed. apart: which sequences another kernel
    serves, if one does. Without `out` among the tensors rows that no tile has are left alone."""
    if not problem.varlen:
        return []
    lengths, sinks = problem.lengths, tensors.sinks
    left, right, prefix = problem.mask.device_band
    total_q, total_kv = totals(problem)
    programs = 1 if tensors.out is None else triton.cdiv(PROGRAMS, lengths.batch)
    least, most, tiles_abreast, sms = apart or (1, 1, 1, 1)
    return [Call(list_tiles, (lengths.batch, programs), (), dict(
        listed=tensors.tiles_listed, served=tensors.served if apart else None, out=tensors.out, lse=tensors.lse, sinks=sinks,
        sink_stride=0 if sinks is None else sinks.stride(0), cu_seqlens_q=tensors.cu_seqlens_q,
        cu_seqlens_kv=tensors.cu_seqlens_kv, seqused_q=tensors.seqused_q, seqused_kv=tensors.seqused_kv,
        batches=lengths.batch, heads=problem.heads_q, width=problem.heads_q * problem.head_dim_v,
        n_q=lengths.seqlen_q, n_kv=lengths.seqlen_kv, total_q=total_q, total_kv=total_kv, left=left, right=right, prefix=prefix,
        least=least, most=most, tiles_abreast=tiles_abreast, sms=sms, TILE=tile_q, RECORD=RECORD.value, CHUNK=CHUNK,
        ELEMENTS=ELEMENTS,
        enable_fp_fusion=True, launch_pdl=True,
    ))]  # fmt: skip


# ---- the lists of a backward


def backward_list_buffers(problem: AttentionProblem) -> dict[str, Buffer]:
    """Room for the lists of a backward, as in `list_buffers`."""
    lengths = problem.lengths
    assert isinstance(lengths, Varlen)
    return {
        "rows_listed": _room(lengths.batch, lengths.seqlen_q, lengths.total_q, ROWS_PADDED),
        "keys_listed": _room(lengths.batch, lengths.seqlen_kv, lengths.total_kv, KEYS),
    }


def backward_list_call(problem: AttentionProblem, tensors: Tensors) -> Call:
    """The launch that lists the tiles of rows and the blocks of keys of a backward on packed sequences."""
    lengths = problem.lengths
    total_q, total_kv = totals(problem)
    return Call(list_rows_and_keys, (lengths.batch, triton.cdiv(PROGRAMS, lengths.batch)), (), dict(
        rows_listed=tensors.rows_listed, keys_listed=tensors.keys_listed, dq=tensors.dq, dk=tensors.dk, dv=tensors.dv,
        cu_seqlens_q=tensors.cu_seqlens_q, cu_seqlens_kv=tensors.cu_seqlens_kv, seqused_q=tensors.seqused_q,
        seqused_kv=tensors.seqused_kv, batches=lengths.batch, width_q=problem.heads_q * problem.head_dim,
        width_k=problem.heads_kv * problem.head_dim, width_v=problem.heads_kv * problem.head_dim_v, n_q=lengths.seqlen_q,
        n_kv=lengths.seqlen_kv, total_q=total_q, total_kv=total_kv, ROWS=ROWS_PADDED, KEYS=KEYS, RECORD=RECORD.value,
        CHUNK=CHUNK, ELEMENTS=ELEMENTS, enable_fp_fusion=True, launch_pdl=True,
    ))  # fmt: skip


def likely_tiles(lengths: Varlen, rows: int) -> int:
    """How many tiles of so many rows of queries sequences have at most, unless their bounds say what cannot be."""
    return min(lengths.total_q // rows + lengths.batch, lengths.batch * triton.cdiv(lengths.seqlen_q, rows))
