"""What runs before and after the Hopper backward's main kernel: streams of memory, in plain Triton.

The three share two float32 buffers, in which each query head has `padded` rows, a multiple of 128 (packed: of all sequences,
each from a multiple of 128 on).

    statistics    [rows / tile_q, 2, tile_q]    of each tile of rows the LSE in powers of two, then delta; a row that does not
                                                exist has an LSE of +inf, so that it weighs nothing
    or, folded    [rows / tile_q, 2, tile_q, 8] bfloat16: what a product adds to S to subtract the LSE, -LSE / scale, and to dP,
                                                -delta, as three numbers whose sum it is, and zeros; of a row that does not
                                                exist -2^127
    accumulator   [rows / 64, dim * 64]         dQ, 64 rows at a time, in the order of registers (`backward.UNIT`)
"""

import triton
import triton.language as tl

from strobe.kernels.common.dependent_launch import take_program_turn
from strobe.kernels.common.scores import LOG2E
from strobe.kernels.portable.primitives import sequence
from strobe.kernels.sm90 import backward_config as sizes

FAR = tl.constexpr(2.0**127)
FLAG_STRIDE = tl.constexpr(sizes.FLAG_STRIDE)
ROWS = 64
"""Rows of queries that one program works on."""


@triton.jit
def _first_row(cu_seqlens, start, batch, head, heads, padded, ROWS_PADDED: tl.constexpr):
    """Index of the first row of one head and sequence in the shared buffers, int64."""
    if cu_seqlens is None:
        return (batch * heads + head).to(tl.int64) * padded
    else:
        return head.to(tl.int64) * padded + (start + batch * ROWS_PADDED) // ROWS_PADDED * ROWS_PADDED


STRIDES_BY_LENGTH = ("lse_batch", "lse_head", "dlse_batch", "dlse_head")
"""Strides that Triton must not specialise for, as they follow from a length and so may be any number. The strides of the other
tensors are nearly always multiples of 16."""


@triton.jit(do_not_specialize=("flagged", "n_q", "total_q", "heads", "padded", "tiles", "scale", *STRIDES_BY_LENGTH))
def prepare(
    out, dout, dlse, lse, statistics, delta, accumulator, flags, flagged, listed, cu_seqlens_q, seqused_q, n_q, total_q, heads,
    padded, tiles, scale,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, dlse_batch, dlse_head, dlse_row,
    DIM_V: tl.constexpr, PADDED_V: tl.constexpr, DIM: tl.constexpr, TILE_Q: tl.constexpr, PARTS: tl.constexpr,
    ROWS_PADDED: tl.constexpr, ROWS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """The statistics of some rows; their delta once more, as the LSE lies, and zeros in their accumulator, where these are
    wanted. DIM: columns of the accumulator. flags: so many become 0, which the programs share. listed: the tiles of packed
    sequences (see `tile_list`), which the programs share, too, however many there are."""
    take_program_turn()
    if flags is not None:
        for number in tl.range(tl.program_id(0), flagged, tl.num_programs(0)):
            tl.store(flags + number * FLAG_STRIDE, 0)
    if listed is None:
        block = tl.program_id(0) % tiles
        head = tl.program_id(0) // tiles % heads
        batch = tl.program_id(0) // tiles // heads
        start, n = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
        first = block * ROWS
        if first >= tl.cdiv(n, ROWS_PADDED) * ROWS_PADDED:
            return
        _prepare_rows(out, dout, dlse, lse, statistics, delta, accumulator, cu_seqlens_q, batch, head, first, start, n, heads,
                      padded, scale, out_batch, out_row, out_head, dout_batch, dout_row, dout_head, lse_batch, lse_head,
                      dlse_batch, dlse_head, dlse_row, DIM_V, PADDED_V, DIM, TILE_Q, PARTS, ROWS_PADDED, ROWS)  # fmt: skip
    else:
        pieces = tl.load(listed) * (ROWS_PADDED // ROWS)
        for number in tl.range(tl.program_id(0), pieces * heads, tl.num_programs(0)):
            piece = number // heads
            at = listed + (1 + piece // (ROWS_PADDED // ROWS)) * RECORD
            first = tl.load(at + 1) + piece % (ROWS_PADDED // ROWS) * ROWS
            _prepare_rows(out, dout, dlse, lse, statistics, delta, accumulator, cu_seqlens_q, tl.load(at), number % heads,
                          first, tl.load(at + 2), tl.load(at + 3), heads, padded, scale, out_batch, out_row, out_head,
                          dout_batch, dout_row, dout_head, lse_batch, lse_head, dlse_batch, dlse_head, dlse_row, DIM_V,
                          PADDED_V, DIM, TILE_Q, PARTS, ROWS_PADDED, ROWS)  # fmt: skip


@triton.jit
def _prepare_rows(
    out, dout, dlse, lse, statistics, delta, accumulator, cu_seqlens_q, batch, head, first, start, n, heads, padded, scale,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, dlse_batch, dlse_head, dlse_row,
    DIM_V: tl.constexpr, PADDED_V: tl.constexpr, DIM: tl.constexpr, TILE_Q: tl.constexpr, PARTS: tl.constexpr,
    ROWS_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What `prepare` makes of the rows from `first` on of a sequence and head. start, n: of the sequence."""
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
    if statistics.dtype.element_ty == tl.float32:
        tl.store(statistics + here, tl.where(exists, shift * LOG2E, float("inf")))
        tl.store(statistics + here + TILE_Q, sums)
    else:
        _store_parts(statistics, here, tl.where(exists, -shift / scale, -FAR), PARTS)
        _store_parts(statistics, here + TILE_Q, -sums, PARTS)
    if delta is not None:
        tl.store(delta + number * lse_batch + head * lse_head + place, sums, mask=exists)
    if accumulator is not None:
        if cu_seqlens_q is None:
            _clear(accumulator, first_row + first, DIM, ROWS)
        else:
            if first < n:  # short sequences have as many rows of padding, of which nobody reads what is added up
                _clear(accumulator, first_row + first, DIM, ROWS)


@triton.jit
def _clear(accumulator, first_row, DIM: tl.constexpr, ROWS: tl.constexpr):
    zeros = first_row * DIM + tl.arange(0, ROWS)[:, None] * DIM
    for c in tl.static_range(0, DIM, 32):
        tl.store(accumulator + zeros + c + tl.arange(0, 32)[None, :], tl.zeros((ROWS, 32), tl.float32))


@triton.jit
def _store_parts(statistics, here, x, PARTS: tl.constexpr):
    """x in three parts of 8 bits of precision each, which are all that it has, and zeros."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    part = tl.arange(0, PARTS)[None, :]
    parts = tl.where(part == 0, high[:, None], tl.where(part == 1, middle[:, None], tl.where(part == 2, low[:, None], 0.0)))
    tl.store(statistics + here[:, None] * PARTS + part, parts)


@triton.jit(do_not_specialize=("n_q", "total_q", "heads", "padded", "tiles"))
def convert(
    accumulator, dq, notes, listed, cu_seqlens_q, seqused_q, n_q, total_q, heads, padded, tiles, scale,
    dq_batch, dq_row, dq_head,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS_PADDED: tl.constexpr, ROWS: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    """Some rows and columns of dQ from the accumulator: put in order, scaled, rounded. PADDED: columns of the accumulator,
    which comes in shares of COLUMNS; notes, if given: 1 where a NaN came out; listed: as in `prepare`. The last heads come
    first: what was added up last is still in the L2 cache."""
    take_program_turn()
    shares: tl.constexpr = PADDED // COLUMNS
    if listed is None:
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        share = number % shares
        block = number // shares % tiles
        head = number // shares // tiles % heads
        batch = number // shares // tiles // heads
        start, n = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
        first = block * ROWS
        if first >= n:
            return
        _convert_rows(accumulator, dq, notes, cu_seqlens_q, batch, head, first, share, start, n, heads, padded, tiles, scale,
                      dq_batch, dq_row, dq_head, DIM, COLUMNS, PADDED, ROWS_PADDED, ROWS)  # fmt: skip
    else:
        pieces = tl.load(listed) * (ROWS_PADDED // ROWS)
        last = pieces * heads * shares - 1
        for turned in tl.range(tl.program_id(0), last + 1, tl.num_programs(0)):
            number = last - turned
            piece = number // shares // heads
            at = listed + (1 + piece // (ROWS_PADDED // ROWS)) * RECORD
            first = tl.load(at + 1) + piece % (ROWS_PADDED // ROWS) * ROWS
            n = tl.load(at + 3)
            if first < n:
                _convert_rows(accumulator, dq, notes, cu_seqlens_q, tl.load(at), number // shares % heads, first,
                              number % shares, tl.load(at + 2), n, heads, padded, tiles, scale, dq_batch, dq_row, dq_head, DIM,
                              COLUMNS, PADDED, ROWS_PADDED, ROWS)  # fmt: skip


@triton.jit
def _convert_rows(
    accumulator, dq, notes, cu_seqlens_q, batch, head, first, share, start, n, heads, padded, tiles, scale,
    dq_batch, dq_row, dq_head,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What `convert` makes of a share of the columns of the rows from `first` on of a sequence and head."""
    first_row = _first_row(cu_seqlens_q, start, batch, head, heads, padded, ROWS_PADDED)
    x = tl.load(accumulator + ((first_row + first) * PADDED + share * ROWS * COLUMNS) + tl.arange(0, ROWS * COLUMNS))
    x = tl.reshape(x, (COLUMNS // 8, 4, 8, 4, 2, 2))  # column / 8, warp, row % 8, lane of the quad, row / 8 % 2, column % 2
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), (ROWS, COLUMNS))
    row = first + tl.arange(0, ROWS)
    column = share * COLUMNS + tl.arange(0, COLUMNS)
    number = 0 if cu_seqlens_q is not None else batch.to(tl.int64)
    place = number * dq_batch + (start + row).to(tl.int64)[:, None] * dq_row + head * dq_head + column[None, :]
    inside = (row < n)[:, None] & (column < DIM)[None, :]
    tl.store(dq + place, (x * scale).to(dq.dtype.element_ty), mask=inside)
    if notes is not None:
        broken = tl.max(tl.where(inside & (x * 0.0 != 0.0), 1, 0))
        if broken != 0:
            tl.store(notes + (batch * heads + head) * tiles + first // ROWS, 1)
