"""What runs before and after the backward for mma.sync: streams of memory, in plain Triton.

They share two float32 buffers with it, in which each query head has `padded` rows, a multiple of 128 (packed: of all sequences,
each from a multiple of 128 on).

    statistics    [rows / tile_q, 2, tile_q]    of each tile of rows the LSE in powers of two, then delta; a row that does not
                                                exist has an LSE of +inf, so that it weighs nothing
    accumulator   [rows / tile_q, dim * tile_q] dQ, a tile at a time, a chunk of columns after the other, in the order of
                                                registers (`backward_dq.put_dq`)
"""

import triton
import triton.language as tl

from strobe.kernels.common.scores import LOG2E
from strobe.kernels.portable.primitives import sequence

ROWS = 64
"""Rows of queries that a program of `prepare` works on."""


@triton.jit
def _first_row(cu_seqlens, start, batch, head, heads, padded, ROWS_PADDED: tl.constexpr):
    """Index of the first row of one head and sequence in the shared buffers, int64."""
    if cu_seqlens is None:
        return (batch * heads + head).to(tl.int64) * padded
    else:
        return head.to(tl.int64) * padded + (start + batch * ROWS_PADDED) // ROWS_PADDED * ROWS_PADDED


STRIDES_BY_LENGTH = ("lse_batch", "lse_head", "dlse_batch", "dlse_head", "dlse_row")
"""Strides that Triton must not specialise for, as they follow from a length and so may be any number. The strides of the other
tensors are nearly always multiples of 16."""


@triton.jit(do_not_specialize=("n_q", "total_q", "heads", "padded", "tiles", *STRIDES_BY_LENGTH))
def prepare(
    out, dout, dlse, lse, statistics, delta, accumulator, cu_seqlens_q, seqused_q, n_q, total_q, heads, padded, tiles,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, dlse_batch, dlse_head, dlse_row,
    DIM_V: tl.constexpr, PADDED_V: tl.constexpr, DIM: tl.constexpr, TILE_Q: tl.constexpr, ROWS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The statistics of some rows; their delta once more, as the LSE lies, where it is wanted; and zeros in their accumulator,
    likewise. DIM: columns of the accumulator."""
    block = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    start, n = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
    first = block * ROWS
    if first >= tl.cdiv(n, ROWS_PADDED) * ROWS_PADDED:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_V)
    exists = row < n
    place = (start + row).to(tl.int64)
    number = 0 if cu_seqlens_q is not None else batch.to(tl.int64)
    inside = exists[:, None] & (column < DIM_V)[None, :]
    o = tl.load(out + number * out_batch + place[:, None] * out_row + head * out_head + column[None, :], mask=inside, other=0.0)
    do = tl.load(
        dout + number * dout_batch + place[:, None] * dout_row + head * dout_head + column[None, :], mask=inside, other=0.0
    )
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        sums -= tl.load(dlse + number * dlse_batch + head * dlse_head + place * dlse_row, mask=exists, other=0.0)
    shift = tl.load(lse + number * lse_batch + head * lse_head + place, mask=exists, other=0.0)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    first_row = _first_row(cu_seqlens_q, start, batch, head, heads, padded, ROWS_PADDED)
    here = (first_row + row // TILE_Q * TILE_Q) * 2 + row % TILE_Q
    tl.store(statistics + here, tl.where(exists, shift * LOG2E, float("inf")))
    tl.store(statistics + here + TILE_Q, sums)
    if delta is not None:
        tl.store(delta + number * lse_batch + head * lse_head + place, sums, mask=exists)
    if accumulator is not None:
        zeros = (first_row + first) * DIM + tl.arange(0, ROWS)[:, None] * DIM
        for c in tl.static_range(0, DIM, 16):
            tl.store(accumulator + zeros + c + tl.arange(0, 16)[None, :], tl.zeros((ROWS, 16), tl.float32))


@triton.jit(do_not_specialize=("n_q", "total_q", "heads", "padded", "tiles"))
def convert(
    accumulator, dq, notes, cu_seqlens_q, seqused_q, n_q, total_q, heads, padded, tiles, scale, dq_batch, dq_row, dq_head,
    DIM: tl.constexpr, PADDED: tl.constexpr, WIDEST: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, TILE_Q: tl.constexpr, ROWS_PADDED: tl.constexpr,
):  # fmt: skip
    """A tile of dQ from the accumulator: put in order, scaled, rounded. WIDEST: columns of a whole chunk, 32 or 64. notes, if
    given: 1 for each 64 rows of a tile in which a NaN came out. The last heads come first: what was added up last is still in
    the L2 cache."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block = program % tiles
    head = program // tiles % heads
    batch = program // tiles // heads
    start, n = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
    first = block * TILE_Q
    if first >= n:
        return
    at = accumulator + (_first_row(cu_seqlens_q, start, batch, head, heads, padded, ROWS_PADDED) + first) * PADDED
    number = 0 if cu_seqlens_q is not None else batch.to(tl.int64)
    to = dq + number * dq_batch + (start + first).to(tl.int64) * dq_row + head * dq_head
    left = n - first
    broken = 0.0
    for c in tl.static_range(PADDED // WIDEST):  # chunks as in `config.Chunks`
        broken += _convert_chunk(
            at + TILE_Q * WIDEST * c, to, dq_row, left, scale, WIDEST * c, DIM, WIDEST, DOWN, ACROSS, TILE_Q
        )
    if PADDED % WIDEST & 32:
        half: tl.constexpr = PADDED // WIDEST * WIDEST
        broken += _convert_chunk(at + TILE_Q * half, to, dq_row, left, scale, half, DIM, 32, DOWN, ACROSS, TILE_Q)
    if PADDED & 16:
        last: tl.constexpr = PADDED - 16
        broken += _convert_chunk(at + TILE_Q * last, to, dq_row, left, scale, last, DIM, 16, DOWN, ACROSS, TILE_Q)
    if notes is not None:
        if broken != 0.0:
            for row in tl.static_range(0, TILE_Q, 64):
                if first + row < n:
                    tl.store(notes + (batch * heads + head) * tl.cdiv(n_q, 64) + (first + row) // 64, 1)


@triton.jit
def _convert_chunk(
    at, to, stride, left, scale, FIRST: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, TILE_Q: tl.constexpr,
):  # fmt: skip
    """The columns of a tile from FIRST on; 0, or NaN if some number is not finite."""
    x = tl.load(at + tl.arange(0, TILE_Q * COLUMNS))
    # As they lie in memory. Of x in its order Triton 3.6 finds wrong sums of rows: a lane's bits for columns lie between those
    # for rows there, and it takes the sums from the lanes where the highest bits are 0.
    broken = tl.sum(x * 0.0, 0)
    x = tl.reshape(x, (TILE_Q // 16 // DOWN, 2, COLUMNS // 8 // ACROSS, 2, DOWN, ACROSS, 8, 4))
    x = tl.reshape(tl.permute(x, (0, 4, 1, 6, 2, 5, 7, 3)), (TILE_Q, COLUMNS))
    row = tl.arange(0, TILE_Q)
    column = FIRST + tl.arange(0, COLUMNS)
    inside = (row < left)[:, None] & (column < DIM)[None, :]
    tl.store(to + row.to(tl.int64)[:, None] * stride + column[None, :], (x * scale).to(to.dtype.element_ty), mask=inside)
    return broken
