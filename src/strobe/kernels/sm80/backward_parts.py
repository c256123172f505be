# mypy: ignore-errors
# (Device code is a language of its own: Triton's compiler checks it.)
"""A tile of rows in mma.sync's backward whose warps have 32 keys of a block to themselves, with dK and dV of them in registers.

Beside these there is no room for S and dP of more than 32 rows, so a tile comes in parts of so many. P^T and dS^T are left
operands of dV and dK where they are; for the same products Q and dO are read half as often as by warps with 16 keys, and P^T
needs no shared memory, as it does where two warps share 32 keys. One barrier a tile is left for dS.

A CTA has four such warps, and a multiprocessor two CTAs: one multiplies while the other takes exponentials. At head dim 64 by a
fifth faster than one CTA of eight warps that share keys in pairs, full and causal, 512 to 16k, where both CTAs have work.
"""

from strobe.kernels.gluon import gl, gluon, partition_barrier
from strobe.kernels.sm80.backward_scores import (
    apply_mask_transposed,
    gradients_transposed,
    kept_weights_transposed,
    scores_transposed,
)
from strobe.kernels.sm80.layouts import left
from strobe.kernels.sm80.products import add_products, rows_by_rows
from strobe.kernels.sm80.tiles import at
from strobe.kernels.sm90.scores import slope_of


@gluon.jit
def add_parts(K, work, row, head, dk, dv, S: gl.constexpr, STAGE: gl.constexpr, cut):
    """dK and dV with what a tile, from `row` on, gives; its dS in shared memory, where all warps see it."""
    PARTS: gl.constexpr = K.C.parts
    for i in gl.static_range(PARTS):
        dk, dv = add_part(K, work, row, head, dk, dv, S, STAGE, i, cut)
    partition_barrier()
    return dk, dv


@gluon.jit
def add_part(K, work, row, head, dk, dv, S: gl.constexpr, STAGE: gl.constexpr, PART: gl.constexpr, cut):
    """dK and dV with what a part of a tile gives; its dS in shared memory."""
    M = K.memory
    FIRST: gl.constexpr = PART * K.C.rows
    row += FIRST
    q = rows_from(at(M.q, STAGE, K.C.stages), FIRST, K.C.rows)
    do = rows_from(at(M.do, STAGE, K.C.stages), FIRST, K.C.rows)
    # In either stage statistics come at another place: of two stages with the same code the compiler makes one, in which it
    # does not know what is copied and what is read, and puts a barrier between.
    if STAGE == 1:
        shift = statistics_of(K, STAGE, 0, FIRST, S)
    s = rows_by_rows(M.k, q, K.C.tile_kv, K.C.rows, S)
    dp = rows_by_rows(M.v, do, K.C.tile_kv, K.C.rows, S)
    if STAGE == 0:
        shift = statistics_of(K, STAGE, 0, FIRST, S)
    x, factor, of_function = scores_transposed(K, s, row, head, slope_of(work.batch, head, K.score), work)
    x = x - shift
    if cut:
        x = apply_mask_transposed(K, x, row, head, work)
    p = gl.exp2(x)
    kept = kept_weights_transposed(K, p, row, head, work)
    if STAGE == 0:
        delta = statistics_of(K, STAGE, 1, FIRST, S)
    # The product of P stands before what makes dS: it passes under that.
    dv = add_products(dv, gl.convert_layout(kept.to(K.dtype), left(S)), do, S)
    if STAGE == 1:
        delta = statistics_of(K, STAGE, 1, FIRST, S)
    ds = gradients_transposed(K, p, kept, dp, delta, factor, of_function).to(K.dtype)
    dk = add_products(dk, gl.convert_layout(ds, left(S)), q, S)
    M.ds[PART].store(ds)
    return dk, dv


@gluon.jit
def rows_from(chunks, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """So many rows of chunks."""
    new = ()
    for c in gl.static_range(len(chunks)):
        new += (chunks[c].slice(FIRST, ROWS),)
    return new


@gluon.jit
def statistics_of(K, STAGE: gl.constexpr, NUMBER: gl.constexpr, FIRST: gl.constexpr, S: gl.constexpr):
    """The LSE (0) or delta (1) of the rows of a part, which begins at row FIRST of a tile: [1, rows]."""
    numbers = K.memory.statistics[STAGE].slice(NUMBER * K.C.tile_q + FIRST, K.C.rows)
    return numbers.load(gl.SliceLayout(0, S))[None, :]
