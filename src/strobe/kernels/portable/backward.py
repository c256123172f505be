"""Flash attention's backward in plain Triton: three kernels; no atomics, so the same bits at every run. A bias that is repeated
is an exception, unless `deterministic` is asked for: its gradient is a sum over programs.

    delta   rowsum(dO * O) - dLSE                       one program per tile of rows
    dkdv    dV += P^T dO,  dK += scale * dS^T Q         one program per tile of keys and key head
    dq      dQ += scale * dS K,  dbias = dS             one program per tile of rows

P = exp(s - LSE) and dS = P * (dO V^T - delta) are recomputed from q, k, v and the LSE. As in the forward, tiles that
need the mask and tiles that are seen whole run in separate phases.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strobe.device import Arch
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, gradients
from strobe.kernels.common.dependent_launch import take_program_turn
from strobe.kernels.common.device_function import device_function
from strobe.kernels.common.documents import SPAN, span_buffers, span_calls
from strobe.kernels.common.philox import kept
from strobe.kernels.common.scores import LOG2E, gradient_through_function, score_and_factor
from strobe.kernels.portable import arguments, interpreter
from strobe.kernels.portable.config import choose, padded
from strobe.kernels.portable.primitives import (
    KEYS,
    LENGTHS_AND_BOUNDS,
    PLACE_NUMBERS,
    QUERIES,
    Mask,
    any_nan,
    count_broken,
    count_broken_keys,
    finite_part,
    kind_of_block,
    kv_phases,
    load_ids,
    load_tile,
    load_vector,
    position,
    product,
    q_phases,
    row_position,
    seen_in,
    sequence,
    store_tile,
    store_vector,
    stream,
    tile_positions,
    vector_stream,
    whole_head,
    whole_length,
    within_spans,
)
from strobe.kernels.portable.scores import add_to_bias, bias_gradient, biased, slope_of, through_function
from strobe.problem import AttentionProblem, lse_shape

interpreter.mend()

REDO_TILE = 16
"""Rows and keys of a tile of `redo_noted`: it fits any head dim, and need not be fast."""

TILE_DELTA = 64
"""Rows of a program of the delta kernel, which only streams memory."""


@triton.jit(do_not_specialize=("n",))
def _delta(
    out, dout, dlse, delta, n, heads,
    DIM_V: tl.constexpr, PADDED_V: tl.constexpr, TILE_Q: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n, TILE_Q)
    first = tl.program_id(0) % tiles * TILE_Q
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    o_tile = load_tile(stream(out, batch, 0, head, TILE_Q, PADDED_V), first, n - first, DIM_V)
    do_tile = load_tile(stream(dout, batch, 0, head, TILE_Q, PADDED_V), first, n - first, DIM_V)
    sums = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if dlse is not None:
        sums -= load_vector(vector_stream(dlse, batch, 0, head, TILE_Q), first, n - first)
    store_vector(vector_stream(delta, batch, 0, head, TILE_Q), first, n - first, sums)


@device_function
def _shift_of(lse):
    """What to subtract from the scores, in units of log2. Rows that see nothing have an LSE of -inf: shift them by 0."""
    return tl.where(lse == float("-inf"), 0.0, lse * LOG2E)


@device_function
def _gradients(
    products, dp, p, key, shift, delta, seen, slope, batch, head, n_q, n_kv, score, places, MASKED: tl.constexpr
):  # fmt: skip
    """Weights and gradients of a tile, given its products q.k and dP = dO V^T: P after dropout; the gradient of the scores,
    which a bias gets; and dS / scale, for dQ and dK. p, key, shift and delta broadcast to the tile."""
    j = position(key, places, KEYS)
    s, factor = score_and_factor(products, p, j, score.inner, score.outer, slope)
    i = p - (whole_length(n_kv, places, KEYS) - whole_length(n_q, places, QUERIES))
    s = biased(s, i, j, n_q, n_kv, score, batch, head)
    head = whole_head(head, places)
    weights = tl.exp2(through_function(s, i, j, score, batch, head) - shift)
    kept_weights = weights
    if score.dropout is not None:
        keep = kept(tl.load(score.dropout.seed), score.dropout.threshold, batch, head, i, j)
        kept_weights = tl.where(keep, weights * score.dropout.scale, 0.0)
        dp = tl.where(keep, dp * score.dropout.scale, 0.0)
    ds = weights * (dp - delta)
    if score.gradient is not None:
        ds = gradient_through_function(ds, s, score.gradient, batch, head, i, j)
    of_products = ds * factor
    if MASKED:  # last, as a factor is NaN where a key is
        kept_weights = tl.where(seen, kept_weights, 0.0)
        ds = tl.where(seen, ds, 0.0)
        of_products = tl.where(seen, of_products, 0.0)
    return kept_weights, ds, of_products


@device_function
def _positions(rows, n_q, n_kv, places):
    """Where rows stand among the keys of the whole sequence."""
    shift = whole_length(n_kv, places, KEYS) - whole_length(n_q, places, QUERIES)
    return position(rows, places, QUERIES) + shift


@device_function
def _keys_from_tile(
    dk, dv, k_tile, v_tile, q, dout, lse, delta, j, ids_kv, slope, batch, head, n_q, n_kv, mask, score, places, first,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_Q: tl.constexpr, MASKED: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """`_keys_from_rows`, for the tile of rows from `first` on."""
    remaining = None
    if MASKED:
        remaining = n_q - first
    rows = first + tl.arange(0, TILE_Q)
    p = _positions(rows, n_q, n_kv, places)
    q_tile = load_tile(q, first, remaining, DIM)
    products = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
    shift = _shift_of(load_vector(lse, first, remaining))
    do_tile = load_tile(dout, first, remaining, DIM_V)
    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
    seen = None
    if MASKED:
        ids_q = load_ids(mask.document_q, batch, first, n_q, TILE_Q)
        seen = seen_in(p[None, :], j[:, None], n_q, n_kv, mask, score, ids_q[None, :], ids_kv[:, None], batch, head, places)
        seen = seen & (rows[None, :] < n_q)
    weights, _, ds = _gradients(
        products, dp, p[None, :], j[:, None], shift[None, :], load_vector(delta, first, remaining)[None, :], seen, slope,
        batch, head, n_q, n_kv, score, places, MASKED,
    )  # fmt: skip
    if FINITE:
        do_tile = finite_part(do_tile)
        q_tile = finite_part(q_tile)
    dv = product(weights, do_tile, dv)
    dk = product(ds, q_tile, dk)
    return dk, dv


@device_function
def _keys_from_rows(
    state, k_tile, v_tile, q, dout, lse, delta, j, ids_kv, slope, batch, head, n_q, n_kv, mask, score, places, begin, end,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_Q: tl.constexpr, MASKED: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Add what the rows [begin, end) of one query head give to dK and dV of a tile of keys. Tiles are [keys, rows]."""
    dk, dv = state
    for first in tl.range(begin, end, TILE_Q, num_stages=1 if FINITE else None):
        if score.blocks is None:
            dk, dv = _keys_from_tile(
                dk, dv, k_tile, v_tile, q, dout, lse, delta, j, ids_kv, slope, batch, head, n_q, n_kv, mask, score, places,
                first, DIM, DIM_V, TILE_Q, MASKED, FINITE,
            )  # fmt: skip
        else:
            if kind_of_block(score.blocks, first, tl.min(j), batch, head) != 0:
                dk, dv = _keys_from_tile(
                    dk, dv, k_tile, v_tile, q, dout, lse, delta, j, ids_kv, slope, batch, head, n_q, n_kv, mask, score,
                    places, first, DIM, DIM_V, TILE_Q, MASKED, FINITE,
                )  # fmt: skip
    return dk, dv


@device_function
def _count_broken_rows(
    counts, q, dout, j, ids_kv, batch, head, n_q, n_kv, mask, score, places, begin, end,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_Q: tl.constexpr,
):  # fmt: skip
    """How many entries of q, and of dout, that are not finite each key is seen by, by column; added to counts."""
    in_q, in_dout = counts
    for first in tl.range(begin, end, TILE_Q, num_stages=1):
        rows = first + tl.arange(0, TILE_Q)
        p = _positions(rows, n_q, n_kv, places)
        ids_q = load_ids(mask.document_q, batch, first, n_q, TILE_Q)
        seen = seen_in(p[None, :], j[:, None], n_q, n_kv, mask, score, ids_q[None, :], ids_kv[:, None], batch, head, places)
        in_q = count_broken(seen, load_tile(q, first, n_q - first, DIM), in_q)
        in_dout = count_broken(seen, load_tile(dout, first, n_q - first, DIM_V), in_dout)
    return in_q, in_dout


@device_function
def _keys(
    first, head_kv, batch, start_q, start_kv, n_q, n_kv, q, k, v, dout, lse, delta, dk, dv, left, right, prefix, document_q,
    document_kv, score, places, scale, group, spans,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, ALL_MASKED: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of the keys from `first` on. spans: a pointer to those of the batch entry where there are documents (see
    `common.documents`), or None."""
    mask = Mask(left, right, prefix, document_q, document_kv)
    BY_PAIR: tl.constexpr = document_q is not None or score.visible is not None or score.blocks is not None
    last = tl.minimum(first + TILE_KV, n_kv) - 1
    begin, full_begin, full_end, end = q_phases(first, last, n_q, n_kv, mask, score, places, TILE_Q)
    if spans is not None:
        begin, end = within_spans(begin, end, spans, first, last, TILE_KV, TILE_Q)
        full_begin = begin
        full_end = begin
    j = first + tl.arange(0, TILE_KV)
    ids_kv = load_ids(document_kv, batch, first, n_kv, TILE_KV)
    k_tile = load_tile(stream(k, batch, start_kv, head_kv, TILE_KV, PADDED), first, n_kv - first, DIM)
    v_tile = load_tile(stream(v, batch, start_kv, head_kv, TILE_KV, PADDED_V), first, n_kv - first, DIM_V)

    nothing = (tl.zeros((TILE_KV, PADDED), tl.float32), tl.zeros((TILE_KV, PADDED_V), tl.float32))
    state = nothing
    for head in tl.range(head_kv * group, head_kv * group + group):
        slope = slope_of(score, batch, head)
        q_rows = stream(q, batch, start_q, head, TILE_Q, PADDED)
        do_rows = stream(dout, batch, start_q, head, TILE_Q, PADDED_V)
        lse_rows = vector_stream(lse, batch, start_q, head, TILE_Q)
        delta_rows = vector_stream(delta, batch, start_q, head, TILE_Q)
        if not BY_PAIR and not ALL_MASKED:
            state = _keys_from_rows(
                state, k_tile, v_tile, q_rows, do_rows, lse_rows, delta_rows, j, ids_kv, slope, batch, head, n_q, n_kv, mask,
                score, places, begin, full_begin, DIM, DIM_V, TILE_Q, True, False,
            )  # fmt: skip
            state = _keys_from_rows(
                state, k_tile, v_tile, q_rows, do_rows, lse_rows, delta_rows, j, ids_kv, slope, batch, head, n_q, n_kv, mask,
                score, places, full_begin, full_end, DIM, DIM_V, TILE_Q, False, False,
            )  # fmt: skip
        state = _keys_from_rows(
            state, k_tile, v_tile, q_rows, do_rows, lse_rows, delta_rows, j, ids_kv, slope, batch, head, n_q, n_kv, mask,
            score, places, begin if ALL_MASKED else full_end, end, DIM, DIM_V, TILE_Q, True, False,
        )  # fmt: skip
    dk_sum, dv_sum = state
    # Where every pair is visible there is nothing to keep out, and nothing is compiled for it.
    CUTS: tl.constexpr = left is not None or right is not None or prefix is not None or BY_PAIR
    if CUTS:
        if any_nan(dk_sum) or any_nan(dv_sum):
            finite = nothing
            broken = nothing
            for head in tl.range(head_kv * group, head_kv * group + group):
                slope = slope_of(score, batch, head)
                q_rows = stream(q, batch, start_q, head, TILE_Q, PADDED)
                do_rows = stream(dout, batch, start_q, head, TILE_Q, PADDED_V)
                lse_rows = vector_stream(lse, batch, start_q, head, TILE_Q)
                delta_rows = vector_stream(delta, batch, start_q, head, TILE_Q)
                finite = _keys_from_rows(
                    finite, k_tile, v_tile, q_rows, do_rows, lse_rows, delta_rows, j, ids_kv, slope, batch, head, n_q, n_kv,
                    mask, score, places, begin, end, DIM, DIM_V, TILE_Q, True, True,
                )  # fmt: skip
                broken = _count_broken_rows(
                    broken, q_rows, do_rows, j, ids_kv, batch, head, n_q, n_kv, mask, score, places, begin, end, DIM, DIM_V,
                    TILE_Q,
                )  # fmt: skip
            dk_sum = tl.where(broken[0] > 0, dk_sum, finite[0])
            dv_sum = tl.where(broken[1] > 0, dv_sum, finite[1])
    store_tile(stream(dk, batch, start_kv, head_kv, TILE_KV, PADDED), first, n_kv - first, dk_sum * scale, DIM)
    store_tile(stream(dv, batch, start_kv, head_kv, TILE_KV, PADDED_V), first, n_kv - first, dv_sum, DIM_V)


@triton.jit(do_not_specialize=LENGTHS_AND_BOUNDS)
def _dkdv(
    q, k, v, dout, lse, delta, dk, dv, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, n_q, n_kv, total_q, total_kv,
    left, right, prefix, document_q, document_kv, score, places, scale, heads_kv, group, spans,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_kv, TILE_KV)
    first = tl.program_id(0) % tiles * TILE_KV
    head_kv = tl.program_id(0) // tiles % heads_kv
    batch = tl.program_id(0) // tiles // heads_kv
    if spans is not None:
        spans += 3 * batch * tl.cdiv(n_kv, SPAN)
    if places is not None:
        places += PLACE_NUMBERS * batch
    start_q, n_q = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
    start_kv, n_kv = sequence(cu_seqlens_kv, seqused_kv, batch, n_kv, total_kv)
    if first < n_kv:
        _keys(
            first, head_kv, batch, start_q, start_kv, n_q, n_kv, q, k, v, dout, lse, delta, dk, dv, left, right, prefix,
            document_q, document_kv, score, places, scale, group, spans,
            DIM, DIM_V, PADDED, PADDED_V, TILE_Q, TILE_KV, False,
        )  # fmt: skip


@device_function
def _rows_from_tile(
    dq, q_tile, do_tile, shift, delta, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, dbias, first,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_KV: tl.constexpr, MASKED: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """`_rows_from_keys`, for the tile of keys from `first` on."""
    remaining = None
    if MASKED:
        remaining = n_kv - first
    j = first + tl.arange(0, TILE_KV)
    k_tile = load_tile(k, first, remaining, DIM)
    products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    dp = tl.dot(do_tile, tl.trans(load_tile(v, first, remaining, DIM_V)), input_precision="ieee")
    seen = None
    if MASKED:
        ids_kv = load_ids(mask.document_kv, batch, first, n_kv, TILE_KV)
        seen = seen_in(p[:, None], j[None, :], n_q, n_kv, mask, score, ids_q[:, None], ids_kv[None, :], batch, head, places)
    _, of_bias, ds = _gradients(
        products, dp, p[:, None], j[None, :], shift[:, None], delta[:, None], seen, slope, batch, head, n_q, n_kv, score,
        places, MASKED,
    )  # fmt: skip
    if dbias.pointer is not None and not FINITE:
        add_to_bias(dbias, of_bias, p[:, None] - (n_kv - n_q), j[None, :], batch, head, n_q, n_kv)
    if FINITE:
        k_tile = finite_part(k_tile)
    dq = product(ds, k_tile, dq)
    return dq


@device_function
def _rows_from_keys(
    dq, q_tile, do_tile, shift, delta, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, dbias, begin, end,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_KV: tl.constexpr, MASKED: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Add what the keys [begin, end) give to dQ of a tile of rows and, if it is wanted, to dbias. Tiles are [rows, keys].

    FINITE: take keys that are not finite as 0; a bias has had its gradient then."""
    for first in tl.range(begin, end, TILE_KV, num_stages=1 if FINITE else None):
        if score.blocks is None:
            dq = _rows_from_tile(
                dq, q_tile, do_tile, shift, delta, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, dbias,
                first, DIM, DIM_V, TILE_KV, MASKED, FINITE,
            )  # fmt: skip
        else:
            if kind_of_block(score.blocks, tl.min(p) - (n_kv - n_q), first, batch, head) != 0:
                dq = _rows_from_tile(
                    dq, q_tile, do_tile, shift, delta, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places,
                    dbias, first, DIM, DIM_V, TILE_KV, MASKED, FINITE,
                )  # fmt: skip
    return dq


@device_function
def _rows(
    first, head, batch, start_q, start_kv, n_q, n_kv, q, k, v, dout, lse, delta, dq, dbias, left, right, prefix, document_q,
    document_kv, score, places, scale, group, spans,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, ALL_MASKED: tl.constexpr,
):  # fmt: skip
    """Write dQ of the rows from `first` on, and what they give to the bias. spans: likewise, of these rows."""
    mask = Mask(left, right, prefix, document_q, document_kv)
    BY_PAIR: tl.constexpr = document_q is not None or score.visible is not None or score.blocks is not None
    p_first = row_position(first, n_q, n_kv, places)
    last = tl.minimum(first + TILE_Q, n_q) - 1
    p_last = row_position(last, n_q, n_kv, places)
    begin, full_begin, full_end, end = kv_phases(p_first, p_last, n_kv, mask, score, places, TILE_KV)
    if spans is not None:
        begin, end = within_spans(begin, end, spans, first, last, TILE_Q, TILE_KV)
        full_begin = begin
        full_end = begin
    p = tile_positions(first, p_first, n_q, n_kv, places, TILE_Q)
    ids_q = load_ids(document_q, batch, first, n_q, TILE_Q)
    slope = slope_of(score, batch, head)
    q_tile = load_tile(stream(q, batch, start_q, head, TILE_Q, PADDED), first, n_q - first, DIM)
    do_tile = load_tile(stream(dout, batch, start_q, head, TILE_Q, PADDED_V), first, n_q - first, DIM_V)
    shift = _shift_of(load_vector(vector_stream(lse, batch, start_q, head, TILE_Q), first, n_q - first))
    delta_rows = load_vector(vector_stream(delta, batch, start_q, head, TILE_Q), first, n_q - first)
    keys = stream(k, batch, start_kv, head // group, TILE_KV, PADDED)
    values = stream(v, batch, start_kv, head // group, TILE_KV, PADDED_V)

    acc = tl.zeros((TILE_Q, PADDED), tl.float32)
    if left is not None and not BY_PAIR and not ALL_MASKED:
        acc = _rows_from_keys(
            acc, q_tile, do_tile, shift, delta_rows, keys, values, p, ids_q, slope, batch, head, n_q, n_kv, mask, score,
            places, dbias, begin, full_begin, DIM, DIM_V, TILE_KV, True, False,
        )  # fmt: skip
    if not BY_PAIR and not ALL_MASKED:
        acc = _rows_from_keys(
            acc, q_tile, do_tile, shift, delta_rows, keys, values, p, ids_q, slope, batch, head, n_q, n_kv, mask, score,
            places, dbias, full_begin, full_end, DIM, DIM_V, TILE_KV, False, False,
        )  # fmt: skip
    acc = _rows_from_keys(
        acc, q_tile, do_tile, shift, delta_rows, keys, values, p, ids_q, slope, batch, head, n_q, n_kv, mask, score,
        places, dbias, begin if ALL_MASKED else full_end, end, DIM, DIM_V, TILE_KV, True, False,
    )  # fmt: skip
    # Where every pair is visible there is nothing to keep out, and nothing is compiled for it.
    CUTS: tl.constexpr = left is not None or right is not None or prefix is not None or BY_PAIR
    if CUTS:
        if any_nan(acc):
            finite = _rows_from_keys(
                tl.zeros((TILE_Q, PADDED), tl.float32), q_tile, do_tile, shift, delta_rows, keys, values, p, ids_q, slope,
                batch, head, n_q, n_kv, mask, score, places, dbias, begin, end, DIM, DIM_V, TILE_KV, True, True,
            )  # fmt: skip
            broken = count_broken_keys(
                keys, p, ids_q, batch, head, n_q, n_kv, mask, score, places, begin, end, TILE_Q, DIM, PADDED, TILE_KV
            )
            acc = tl.where(broken > 0, acc, finite)
    store_tile(stream(dq, batch, start_q, head, TILE_Q, PADDED), first, n_q - first, acc * scale, DIM)


@triton.jit(do_not_specialize=LENGTHS_AND_BOUNDS)
def _dq(
    q, k, v, dout, lse, delta, dq, dbias, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, n_q, n_kv, total_q, total_kv,
    left, right, prefix, document_q, document_kv, score, places, scale, heads_q, group, spans,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n_q, TILE_Q)
    first = (tiles - 1 - tl.program_id(0) % tiles) * TILE_Q
    head = tl.program_id(0) // tiles % heads_q
    batch = tl.program_id(0) // tiles // heads_q
    if spans is not None:
        spans += 3 * batch * tl.cdiv(n_q, SPAN)
    if places is not None:
        places += PLACE_NUMBERS * batch
    start_q, n_q = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
    start_kv, n_kv = sequence(cu_seqlens_kv, seqused_kv, batch, n_kv, total_kv)
    if first < n_q:
        _rows(
            first, head, batch, start_q, start_kv, n_q, n_kv, q, k, v, dout, lse, delta, dq, dbias, left, right, prefix,
            document_q, document_kv, score, places, scale, group, spans,
            DIM, DIM_V, PADDED, PADDED_V, TILE_Q, TILE_KV, False,
        )  # fmt: skip


NOTED = 64
"""Keys, and rows, of a note."""

SHARE = 32
"""Notes that a program of `redo_noted` looks at together."""


@triton.jit(do_not_specialize=(*LENGTHS_AND_BOUNDS, "heads_q", "heads_kv", "group", "key_number", "row_number"))
def redo_noted(
    q, k, v, dout, lse, delta, dq, dbias, dk, dv, key_notes, row_notes, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, n_q,
    n_kv, total_q, total_kv, left, right, prefix, document_q, document_kv, score, places, scale, heads_q, heads_kv, group,
    key_number, row_number,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE: tl.constexpr, NOTED: tl.constexpr, SHARE: tl.constexpr, IN_TURN: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of the keys, and dQ of the rows, whose note is not 0, and set it back. Normally none is. There is no
    bias. IN_TURN: whether it was launched to take its turn (`common.dependent_launch`)."""
    if IN_TURN:
        take_program_turn()
    programs = tl.num_programs(0)
    blocks = tl.cdiv(n_kv, NOTED)
    for begin in tl.range(tl.program_id(0), key_number, programs * SHARE, num_stages=1):
        looked_at = begin + programs * tl.arange(0, SHARE)
        if tl.max(tl.load(key_notes + looked_at, mask=looked_at < key_number, other=0), 0) != 0:
            for note in tl.range(begin, tl.minimum(begin + programs * SHARE, key_number), programs):
                if tl.load(key_notes + note) != 0:
                    batch = note // blocks // heads_kv
                    start_q, rows = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
                    start_kv, keys = sequence(cu_seqlens_kv, seqused_kv, batch, n_kv, total_kv)
                    own_places = places
                    if places is not None:
                        own_places = places + PLACE_NUMBERS * batch
                    for first in tl.range(note % blocks * NOTED, tl.minimum(note % blocks * NOTED + NOTED, keys), TILE):
                        _keys(
                            first, note // blocks % heads_kv, batch, start_q, start_kv, rows, keys, q, k, v, dout, lse, delta,
                            dk, dv, left, right, prefix, document_q, document_kv, score,
                            own_places, scale, group, None, DIM, DIM_V, PADDED, PADDED_V, TILE, TILE, True,
                        )  # fmt: skip
                    tl.store(key_notes + note, 0)
    blocks = tl.cdiv(n_q, NOTED)
    for begin in tl.range(tl.program_id(0), row_number, programs * SHARE, num_stages=1):
        looked_at = begin + programs * tl.arange(0, SHARE)
        if tl.max(tl.load(row_notes + looked_at, mask=looked_at < row_number, other=0), 0) != 0:
            for note in tl.range(begin, tl.minimum(begin + programs * SHARE, row_number), programs):
                if tl.load(row_notes + note) != 0:
                    batch = note // blocks // heads_q
                    start_q, rows = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
                    start_kv, keys = sequence(cu_seqlens_kv, seqused_kv, batch, n_kv, total_kv)
                    own_places = places
                    if places is not None:
                        own_places = places + PLACE_NUMBERS * batch
                    for first in tl.range(note % blocks * NOTED, tl.minimum(note % blocks * NOTED + NOTED, rows), TILE):
                        _rows(
                            first, note // blocks % heads_q, batch, start_q, start_kv, rows, keys, q, k, v, dout, lse, delta,
                            dq, dbias, left, right, prefix, document_q, document_kv, score,
                            own_places, scale, group, None, DIM, DIM_V, PADDED, PADDED_V, TILE, TILE, True,
                        )  # fmt: skip
                    tl.store(row_notes + note, 0)


def buffers(problem: AttentionProblem) -> Buffers:
    """The tensors of a backward; rows and keys of no sequence, or not used, are written by no kernel."""
    made = {**gradients(problem), "delta": Buffer(lse_shape(problem), torch.float32)}
    return Buffers(made, span_buffers(problem, "key_spans", "row_spans"))


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """The launches of a backward, in order."""
    lengths = problem.lengths
    both = _of_scores(problem, tensors)
    dkdv = both | dict(
        dk=arguments.matrix(tensors.dk),
        dv=arguments.matrix(tensors.dv),
        heads_kv=problem.heads_kv,
        spans=tensors.key_spans,
        **arguments.of_config(choose("dkdv", problem, arch)),
    )
    dq = both | dict(
        dq=arguments.matrix(tensors.dq),
        dbias=bias_gradient(problem, tensors.dbias),
        heads_q=problem.heads_q,
        spans=tensors.row_spans,
        **arguments.of_config(choose("dq", problem, arch)),
    )
    return [
        delta_call(problem, tensors),
        *span_calls(tensors, in_turn=False),
        Call(_dkdv, (triton.cdiv(lengths.seqlen_kv, dkdv["TILE_KV"]) * problem.heads_kv * lengths.batch,), (), dkdv),
        Call(_dq, (triton.cdiv(lengths.seqlen_q, dq["TILE_Q"]) * problem.heads_q * lengths.batch,), (), dq),
    ]


def delta_call(problem: AttentionProblem, tensors: Tensors) -> Call:
    """The launch that writes delta over all rows, packed or not: those of no sequence get a number that nobody reads."""
    out = tensors.out
    n, batch = (out.shape[0], 1) if problem.varlen else (out.shape[1], out.shape[0])
    return Call(_delta, (triton.cdiv(n, TILE_DELTA) * problem.heads_q * batch,), (), dict(
        out=arguments.matrix(out),
        dout=arguments.matrix(tensors.dout),
        dlse=None if tensors.dlse is None else arguments.vector(tensors.dlse),
        delta=arguments.vector(tensors.delta),
        n=n,
        heads=problem.heads_q,
        DIM_V=problem.head_dim_v,
        PADDED_V=padded(problem.head_dim_v),
        TILE_Q=TILE_DELTA,
        enable_fp_fusion=True,
    ))  # fmt: skip


def redo_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, in_turn: bool = True) -> Call:
    """The launch of `redo_noted`. in_turn: see `common.dependent_launch`, which GPUs before Hopper do not have.

    tensors: those of a backward, and
        key_notes: int32 [batch * heads_kv * ceil(seqlen_kv / 64)], by batch, head and block.
        row_notes: int32 [batch * heads_q * ceil(seqlen_q / 64)].
    """
    keys, rows = tensors.key_notes.numel(), tensors.row_notes.numel()
    programs = min(max(keys, rows), 2 * (arch.sms or 4))
    return Call(redo_noted, (programs,), (), _of_scores(problem, tensors) | dict(
        dq=arguments.matrix(tensors.dq), dk=arguments.matrix(tensors.dk), dv=arguments.matrix(tensors.dv),
        dbias=bias_gradient(problem, None), key_notes=tensors.key_notes, row_notes=tensors.row_notes,
        key_number=keys, row_number=rows, heads_q=problem.heads_q, heads_kv=problem.heads_kv,
        PADDED=padded(problem.head_dim), PADDED_V=padded(problem.head_dim_v), TILE=REDO_TILE, NOTED=NOTED, SHARE=SHARE,
        IN_TURN=in_turn, num_warps=4, maxnreg=255, enable_fp_fusion=True, **({"launch_pdl": True} if in_turn else {}),
    ))  # fmt: skip


def _of_scores(problem: AttentionProblem, tensors: Tensors) -> dict:
    """The arguments that all kernels over tiles of scores take."""
    return arguments.of_problem(problem, tensors) | dict(
        dout=arguments.matrix(tensors.dout),
        lse=arguments.vector(tensors.lse),
        delta=arguments.vector(tensors.delta),
        scale=problem.scale,
    )
