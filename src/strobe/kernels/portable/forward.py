"""Flash attention's forward in plain Triton (`reference/tiled.py` is the same algorithm, in torch).

One program owns tile_q rows of one query head. The keys that they see lie in up to three phases: tiles that need the
mask, tiles that all rows see whole, tiles that need it again. Only the first and the last pay for the mask, the bounds
and the guard against NaN in masked-out values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strobe.device import arch_of
from strobe.kernels.common.masks import kv_full, kv_range
from strobe.kernels.portable import arguments, interpreter
from strobe.kernels.portable.config import choose
from strobe.kernels.portable.tiles import (
    LN2,
    address,
    load_ids,
    load_tile,
    masked_product,
    offsets,
    product,
    score_of,
    seen_in,
    sequence,
    slope_of,
    store_tile,
)
from strobe.problem import AttentionProblem, Operands

interpreter.mend()

NOTED_ROWS = 128
"""Rows that one note of `launch` stands for."""


@triton.jit
def phases(p_first, p_last, n_kv, band, documents, TILE_KV: tl.constexpr):
    """(begin, full_begin, full_end, end) of the keys that rows p_first..p_last see, all but end on bounds of tiles."""
    begin, end = kv_range(p_first, p_last, n_kv, band[0], band[1], band[2])
    full_begin, full_end = kv_full(p_first, p_last, n_kv, band[0], band[1], band[2])
    begin = begin // TILE_KV * TILE_KV
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(tl.cdiv(full_begin, TILE_KV), tl.cdiv(end, TILE_KV)) * TILE_KV
    full_end = tl.maximum(full_end // TILE_KV * TILE_KV, full_begin)
    if documents is not None:
        full_begin = begin
        full_end = begin
    return begin, full_begin, full_end, end


@triton.jit
def _attend(
    state, q, keys, rows, band, score, begin, end,
    DIMS: tl.constexpr, TILE_KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys [begin, end), in tiles. state: (accumulator, row_max, row_sum)."""
    acc, row_max, row_sum = state
    k, k_at, k_row, v, v_at, v_row, n_kv, document_kv, batch = keys
    p, ids_q, slope = rows
    for start in tl.range(begin, end, TILE_KV):
        first = tl.cast(start, tl.int64)
        remaining = None
        if MASKED:
            remaining = n_kv - start
        k_tile = load_tile(k + first * k_row + k_at, remaining, TILE_KV, DIMS[0], DIMS[1])
        j = start + tl.arange(0, TILE_KV)
        s = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        s, _ = score_of(s, p[:, None], j[None, :], score, slope)
        if MASKED:
            ids_kv = None
            if document_kv is not None:
                ids_kv = load_ids(document_kv, batch, start, remaining, TILE_KV)[None, :]
            seen = seen_in(p[:, None], j[None, :], n_kv, band, ids_q, ids_kv)
            s = tl.where(seen, s, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        shift = new_max
        if MASKED:
            # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is no number: shift by 0 instead.
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        v_tile = load_tile(v + first * v_row + v_at, remaining, TILE_KV, DIMS[2], DIMS[3])
        if MASKED:
            acc = masked_product(weights, v_tile, seen, acc)
        else:
            acc = product(weights, v_tile, acc)
        row_max = new_max
    return acc, row_max, row_sum
