"""What becomes of what was found of a piece: it is written, or handed in as a part, and parts are merged in the same launch.

A job whose keys are all in one piece is written at once. Otherwise each part is written to global memory, and whoever comes
last merges them, in their order, together with those who are done and wait; counters are set back to 0. Of a tile's rows only
ROWS may be in use.
"""

from strobe.kernels.common.cluster import exchange
from strobe.kernels.decode.arguments import Piece
from strobe.kernels.decode.keys import wide
from strobe.kernels.decode.parts import are_joined, hand_in, is_last, joined, leave_parts, rows_of_group, with_chain_before
from strobe.kernels.decode.scores import finite
from strobe.kernels.decode.splits import added, added_numbers, ends_part
from strobe.kernels.decode.writes import factor_and_lse, write_all
from strobe.kernels.gluon import gl, gluon, partition_barrier


@gluon.jit
def deliver(K, piece, job, acc, top, total, place=None):
    """Write what was found of a piece, O in chunks of columns: the result, by way of `place` (see `write`), or a part of it,
    which whoever comes last merges."""
    M: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    top, total = gl.convert_layout(top, M), gl.convert_layout(total, M)
    rows = piece.queries * K.GROUP - piece.first_row
    if K.C.joins:
        deliver_joined(K, piece, job, rows, acc, top, total, place)
    elif job.parts == 1:
        if K.C.split:
            acc, top, total = with_chain_before(K, piece, job, acc, top, total)
        write_all(K, piece, acc, top, total, place)
    elif rows > 0:
        if K.C.split:
            if piece.begin < piece.end:  # else nobody reads it
                leave_parts(K, piece, job, piece.end - 1, acc, top, total)
        else:
            leave_parts(K, piece, job, piece.end - 1, acc, top, total)
        hand_in(K, piece, job, gl.minimum(rows, rows_of_group(K.C, K.ROWS)))


@gluon.jit
def deliver_joined(K, piece, job, rows, acc, top, total, place):
    """The same where the last CTA to come may add up all parts of a job, its own from registers (see `are_joined`): one that is
    there before all others are is handed in."""
    whole, joins = job.parts == 1, are_joined(job)
    if joins & (rows > 0):
        if is_last(K, piece, job, acc, top, total):
            acc, top, total = joined(K, job, rows, acc, top, total)
            whole = job.parts > 1
    if whole:
        write_all(K, piece, acc, top, total, place)
    elif (rows > 0) & ~joins:
        leave_parts(K, piece, job, piece.end - 1, acc, top, total)
        hand_in(K, piece, job, gl.minimum(rows, rows_of_group(K.C, K.ROWS)))


# ---- shares of a cluster, and splits of one


@gluon.jit
def of_cta(x, i: gl.constexpr):
    """What the i-th CTA has of x, [CTAs, numbers]."""
    number = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)), 1)
    return gl.sum(gl.where(number == i, x, 0.0), 0)


@gluon.jit
def splits_in_order(shares, tops, totals, piece, K):
    """The splits of a cluster's CTAs, a share of each, added up to chains, and these, in their order."""
    C: gl.constexpr = K.C
    begin = piece.begin // C.split - gl.program_id(0) % C.shares
    nothing = gl.full([shares.shape[1]], 0.0, gl.float32, gl.SliceLayout(0, shares.type.layout))
    none = (nothing, nothing - float("inf"), nothing)
    chain, before = none, none
    for i in gl.static_range(shares.shape[0]):
        if (begin + i) % (C.chain // C.split) == 0:
            before, chain = chain, none
        chain = added_numbers(*chain, of_cta(shares, i), of_cta(tops, i), of_cta(totals, i))
    return added_numbers(*before, *chain)


@gluon.jit
def deliver_share(K, piece, rank, o, top, total):
    """Write a CTA's share, some rows or a part of one, of what all CTAs of a cluster found of their pieces of a job."""
    shares, top_of, total_of = exchange(o, top, total, K.C.cluster, K.C.posts)
    if K.C.split:
        share, top, total = splits_in_order(shares, top_of, total_of, piece, K)
    else:
        top = gl.max(top_of, 0)
        weight_of = gl.exp2(top_of - gl.expand_dims(finite(top), 0))
        share, total = gl.sum(shares * weight_of, 0), gl.sum(total_of * weight_of, 0)
    SHARE: gl.constexpr = shares.shape[1]
    COLUMNS: gl.constexpr = o.shape[1]
    outputs, row, column = K.outputs, rank * SHARE // COLUMNS, gl.arange(0, SHARE, total.type.layout)
    if SHARE > COLUMNS:
        row, column = row + column // COLUMNS, column % COLUMNS
    else:
        column += rank * SHARE % COLUMNS
    query, head = piece.first_query + row // K.GROUP, piece.head * K.GROUP + row % K.GROUP
    there = row < piece.queries * K.GROUP
    factor, lse = factor_and_lse(K, piece, head, there, top, total)
    if outputs.lse is not None:
        at = outputs.lse + wide(piece.batch, outputs.lse_batch) + wide(head, outputs.lse_head) + query
        gl.store(at + 0 * column, lse, mask=there & (column == 0))
    at = outputs.out + wide(piece.batch, outputs.out_batch)
    at += wide(query, outputs.out_row) + wide(head, outputs.out_head)
    o = (share * factor).to(outputs.out.dtype.element_ty)
    gl.store(at + column, o, mask=there & (column < K.DIM_V))


@gluon.jit
def nothing(R: gl.constexpr, COLUMNS: gl.constexpr, K):
    """What is found of no keys: O in chunks of COLUMNS in a layout of [parts, rows, columns], the maximum and the sum of each
    row."""
    L: gl.constexpr = gl.SliceLayout(0, R)
    M: gl.constexpr = gl.SliceLayout(1, L)
    o = ()
    for _ in gl.static_range(K.C.head_dim_v // COLUMNS):
        o += (gl.full([K.ROWS, COLUMNS], 0.0, gl.float32, L),)
    return o, gl.full([K.ROWS], -float("inf"), gl.float32, M), gl.full([K.ROWS], 0.0, gl.float32, M)


@gluon.jit
def take_splits(FIND: gl.constexpr, memory, K, piece, job, found, state):
    """What FIND finds of each split of a piece is added to `found`, and delivered, or handed in by itself."""
    SPLIT: gl.constexpr = K.C.split
    o, top, total = found
    first = piece.begin // SPLIT
    splits = gl.maximum((piece.end + SPLIT - 1) // SPLIT - first, 1)
    for i in range(splits):
        begin, end = gl.maximum((first + i) * SPLIT, piece.begin), gl.minimum((first + i + 1) * SPLIT, piece.end)
        its = Piece(piece.batch, piece.entry, piece.head, piece.first_row, piece.first_query, piece.queries, piece.length,
                    begin, end)  # fmt: skip
        its_found, state = FIND(memory, K, its, state)
        its_o, its_top, its_total = its_found
        partition_barrier()  # everybody has read what was found, where K goes next
        if end <= job.chain.settled:
            o, top, total = its_o, its_top, its_total
        else:
            o, top, total = added(o, top, total, its_o, its_top, its_total)
        if (i + 1 < splits) & ends_part(job.chain, end, K.C):
            leave_parts(K, its, job, end - 1, o, top, total)
            o, top, total = found
    deliver(K, piece, job, o, top, total)
    return state
