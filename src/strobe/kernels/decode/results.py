"""What becomes of what was found of a piece: it is written, or handed in as a part, and parts are merged in the same launch.

A job whose keys are all in one piece is written at once. Otherwise each part is written to global memory, and whoever comes
last merges them, in their order, together with those who are done and wait; counters are set back to 0. Of a tile's rows only
ROWS may be in use.
"""

from strobe.kernels.common.cluster import exchange
from strobe.kernels.common.scores import LN2, LOG2E
from strobe.kernels.decode.arguments import Piece
from strobe.kernels.decode.keys import owners_of, wide
from strobe.kernels.decode.layouts import along, lanes, result_layout
from strobe.kernels.decode.schedule import place_of
from strobe.kernels.decode.scores import finite
from strobe.kernels.decode.splits import (
    added,
    added_numbers,
    ends_part,
    own_place,
    parts_in_order,
    place_of_part,
    places_of_cta,
)
from strobe.kernels.gluon import gl, gluon, partition_barrier

MANY_AT_ONCE = gl.constexpr(32)
"""Parts that are merged at a time where CTAs share the columns, too."""
PATIENCE = gl.constexpr(64)
"""How often a CTA whose work is done looks whether the other parts of its last job are there, to help to merge them."""
GAVE_UP = gl.constexpr(1 << 16)
MOST_JOINED = gl.constexpr(4)
"""Parts of a job that the last CTA to come adds to its own: see `are_joined`. An H200, 16 queries of 64 heads on 8, unequal
lengths, microseconds (and up to two parts merged by one, from memory, more by all who wait): 8 requests around 2k keys 35.3
(37.5), 32 88.6 (91.4), 8 around 8k 84.1 (87.1). Where all of a job's CTAs wait, as those of 8 requests of 8k keys, 28 heads on
4: 47.0 (45.9)."""


@gluon.constexpr_function
def parts_at_once(C, rows):
    return C.parts_at_once(rows)


@gluon.constexpr_function
def rows_of_group(C, rows):
    """Rows that one group of warps may have, of `rows` of a result that may be in use."""
    return min(rows, C.rows)


@gluon.constexpr_function
def most_alone(C, rows):
    return C.most_alone(rows)


@gluon.constexpr_function
def merge_layout(C, rows, columns):
    """The layout in which so many rows and columns of parts are read: as they lie."""
    if columns < C.head_dim_v:  # a warp has the same 8 columns of several parts
        return gl.BlockedLayout([1, 1, 4], [16 // rows, rows, 2], [1, 1, C.warps], [2, 1, 0])
    if not C.parts_in_squares:
        if rows < C.warps:
            each = rows * C.head_dim_v // (32 * C.warps)
            return gl.BlockedLayout([1, 1, each], [1, 1, 32], [1, rows, C.warps // rows], [2, 1, 0])
        return result_layout(C, C.head_dim_v)
    down = min(8, rows)
    high = min(C.warps, rows // down)
    return gl.BlockedLayout([1, 1, 4], [1, down, 32 // down], [1, high, C.warps // high], [2, 1, 0])


@gluon.jit
def place_in_part(row, column, C: gl.constexpr):
    """Where a number of O lies in a part: in its row, or in a square of 8 rows and 8 columns, as a warp has it of wgmma."""
    if C.parts_in_squares:
        return row // 8 * (8 * C.head_dim_v) + column // 8 * 64 + row % 8 * 8 + column % 8
    else:
        return row * C.head_dim_v + column


@gluon.jit
def merge(K, job, row, rows, column, MERGED: gl.constexpr, COLUMNS: gl.constexpr, AT_ONCE: gl.constexpr):
    """The parts of a job added up in their order, AT_ONCE of them at a time, MERGED rows from row `row` on, of `rows` in use,
    and COLUMNS from `column` on: see `gather_warps`. Every thread loads the maxima and sums by which it weighs O, so none waits
    for another."""
    C: gl.constexpr = K.C
    R: gl.constexpr = merge_layout(C, MERGED, COLUMNS)
    STRIDE: gl.constexpr = K.ROWS * C.head_dim_v
    H: gl.constexpr = gl.SliceLayout(2, R)
    M: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, R))
    number = gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(1, H)), 1)
    row_2 = row + gl.expand_dims(gl.arange(0, MERGED, gl.SliceLayout(0, H)), 0)
    number_3, row_3, column = along(AT_ONCE, 0, R), row + along(MERGED, 1, R), column + along(COLUMNS, 2, R)
    o = gl.full([MERGED, COLUMNS], 0.0, gl.float32, gl.SliceLayout(0, R))
    top = gl.full([MERGED], -float("inf"), gl.float32, gl.SliceLayout(0, H))
    total = gl.full([MERGED], 0.0, gl.float32, gl.SliceLayout(0, H))
    SPACE: gl.constexpr = 2 * C.abreast  # places from one part to the next, but for the first one
    start = place_of(1, job.first, job.begins, job.stretch, C) - SPACE
    own = place_of(0, job.first, job.begins, job.stretch, C) - start
    sums = K.outputs.sums + start * (2 * K.ROWS) + row_2
    parts = K.outputs.parts + start.to(gl.int64) * STRIDE + place_in_part(row_3, column, C)
    for i in range(0, job.parts, AT_ONCE):
        at = sums + number * (SPACE * 2 * K.ROWS) + gl.where(i + number == 0, own * (2 * K.ROWS), i * (SPACE * 2 * K.ROWS))
        there = (i + number < job.parts) & (row_2 < rows)
        tops = gl.load(at, mask=there, other=-float("inf"), cache_modifier=".cg")
        totals = gl.load(at + K.ROWS, mask=there, other=0.0, cache_modifier=".cg")
        at = parts + number_3 * (SPACE * STRIDE) + gl.where(i + number_3 == 0, own * STRIDE, i * (SPACE * STRIDE))
        there = (i + number_3 < job.parts) & (row_3 < rows) & (column < C.head_dim_v)
        os = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, gl.max(tops, 0))
        shift = finite(new_top)
        weights, rescale = gl.exp2(tops - gl.expand_dims(shift, 0)), gl.exp2(top - shift)
        total = total * rescale + gl.sum(totals * weights, 0)
        o = o * gl.expand_dims(gl.convert_layout(rescale, M), 1)
        o += gl.sum(os * gl.expand_dims(weights, 2), 0)
        top = new_top
    return o, gl.convert_layout(top, M), gl.convert_layout(total, M)


@gluon.jit
def merge_splits(K, job, row, rows, MERGED: gl.constexpr, AT_ONCE: gl.constexpr):
    """The same of a job whose keys are cut in splits: its parts are added up to chains, and these, one after the other."""
    C: gl.constexpr = K.C
    L: gl.constexpr = gl.SliceLayout(0, merge_layout(C, MERGED, C.head_dim_v))
    M: gl.constexpr = gl.SliceLayout(1, L)
    row = row + gl.arange(0, MERGED, M)
    row_2, column = gl.expand_dims(row, 1), gl.expand_dims(gl.arange(0, C.head_dim_v, gl.SliceLayout(0, L)), 0)
    sums, parts = K.outputs.sums + row, K.outputs.parts + place_in_part(row_2, column, C)
    places, own = places_of_cta(K.requests, job.stretch, C), parts_in_order(job, C)
    o = (gl.full([MERGED, C.head_dim_v], 0.0, gl.float32, L),)
    top, total = gl.full([MERGED], -float("inf"), gl.float32, M), gl.full([MERGED], 0.0, gl.float32, M)
    before, before_top, before_total = o, top, total
    lane = gl.arange(0, 32, lanes(gl.num_warps()))
    for i in range(0, own.number, AT_ONCE):
        os, tops, totals = (), (), ()
        each = gl.where(i + lane < own.number, place_of_part(job, own, i + lane, places, C), 0)
        for k in gl.static_range(AT_ONCE):
            place = gl.max(gl.where(lane == k, each, 0), 0)
            there = (row < rows) & (i + k < own.number)
            at = sums + place * (2 * K.ROWS)
            tops += (gl.load(at, mask=there, other=-float("inf"), cache_modifier=".cg"),)
            totals += (gl.load(at + K.ROWS, mask=there, other=0.0, cache_modifier=".cg"),)
            at = parts + place.to(gl.int64) * (K.ROWS * C.head_dim_v)
            there = (row_2 < rows) & (i + k < own.number) & (column < C.head_dim_v)
            os += (gl.load(at, mask=there, other=0.0, cache_modifier=".cg"),)
        for k in gl.static_range(AT_ONCE):
            if i + k < own.number:
                if (i + k == 0) | (i + k == own.of_first):
                    before, before_top, before_total = o, top, total
                    o, top, total = (os[k],), tops[k], totals[k]
                else:
                    o, top, total = added(o, top, total, (os[k],), tops[k], totals[k])
    if own.number > own.of_first:
        o, top, total = added(before, before_top, before_total, o, top, total)
    return o[0], top, total


@gluon.constexpr_function
def wide_layout(layout, rows, columns):
    """A layout in which a thread has 16 bytes of a row, not 4 as after a product, for which only lanes of a warp exchange
    numbers; other layouts stay as they are."""
    # an H100, 128 heads, 128 requests of 1k keys: 87 microseconds, not 96
    if not isinstance(layout, gl.NVMMADistributedLayout):
        return layout
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *([0, 1 << bit] for bit in range(5, columns.bit_length() - 1))],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[1 << bit, 0] for bit in range(4, rows.bit_length() - 1)],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.jit
def rows_of_result(K, piece, row, n: gl.constexpr, layout: gl.constexpr):
    """Query and head of n rows of a piece's tile from row `row` on, and whether they are there."""
    query, head, there = owners_of(piece.first_row + row + gl.arange(0, n, layout), piece, K.C, K.GROUP)
    return piece.first_query + query, head, there


@gluon.jit
def store_rows(K, piece, row, o, column, WIDTH: gl.constexpr):
    """Write rows of out from row `row` of a piece's tile on; o: columns from `column` on. WIDTH: neighbours of a thread."""
    outputs = K.outputs
    query, head, there = rows_of_result(K, piece, row, o.shape[0], gl.SliceLayout(1, o.type.layout))
    column = column + gl.expand_dims(gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout)), 0)
    at = outputs.out + wide(piece.batch, outputs.out_batch)
    at += gl.expand_dims(wide(query, outputs.out_row) + wide(head, outputs.out_head), 1) + column
    mask = gl.max_constancy(gl.expand_dims(there, 1) & (column < K.DIM_V), [1, WIDTH])
    gl.store(gl.multiple_of(at, [1, 2 * WIDTH]), o, mask=mask)  # bytes


@gluon.jit
def factor_and_lse(K, piece, head, there, top, total):
    """By what O of rows is multiplied at last, and their LSE; of each, or of all numbers of one."""
    terms, rescale = K.terms, 1.0
    if terms.sinks is not None:
        sink = gl.load(terms.sinks + head, mask=there, other=0.0).to(gl.float32) * LOG2E
        new_top = gl.maximum(top, sink)
        rescale = gl.exp2(top - finite(new_top))
        total = total * rescale + gl.exp2(sink - finite(new_top))
        top = new_top
    nothing = total == 0.0
    factor = rescale / gl.where(nothing, 1.0, total)
    if terms.v_scale is not None:
        if not terms.V_BY_TOKEN:
            factor *= gl.load(terms.v_scale + piece.batch * terms.v_scale_page + piece.head * terms.v_scale_row)
    return factor, gl.where(nothing, -float("inf"), (top + gl.log2(total)) * LN2)


@gluon.jit
def write(K, piece, row, o, top, total, column, place=None):
    """Write out and the LSE of rows of a piece's tile, from row `row` on; o: columns from `column` on. place: free shared
    memory of its shape, by way of which a thread comes to have more of a row; or None."""
    outputs = K.outputs
    L: gl.constexpr = o.type.layout
    query, head, there = rows_of_result(K, piece, row, o.shape[0], gl.SliceLayout(1, L))
    factor, lse = factor_and_lse(K, piece, head, there, top, total)
    if outputs.lse is not None:
        if column == 0:
            at = outputs.lse + wide(piece.batch, outputs.lse_batch) + wide(head, outputs.lse_head) + query
            gl.store(at, lse, mask=there)
    o = (o * gl.expand_dims(factor, 1)).to(outputs.out.dtype.element_ty)
    if place is not None:
        store_rows(K, piece, row, by_rows(o, place), column, 8)
    elif K.C.writes_wide:
        store_rows(K, piece, row, gl.convert_layout(o, wide_layout(L, o.shape[0], o.shape[1])), column, 8)
    else:
        store_rows(K, piece, row, o, column, 4)


@gluon.jit
def write_all(K, piece, acc, top, total, place=None):
    """Write out and the LSE of a piece's tile, O in chunks of columns. place: see `write`."""
    for c in gl.static_range(len(acc)):
        write(K, piece, 0, acc[c], top, total, c * acc[0].shape[1], place)


@gluon.jit
def by_rows(o, place):
    """The same numbers, of which a thread has 16 bytes of a row."""
    WIDE: gl.constexpr = o.shape[1]
    partition_barrier()  # everybody has read what lies there
    place.store(o)
    partition_barrier()
    return place.load(gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0]))


@gluon.constexpr_function
def stays(C):
    """Whether parts of results stay in the L2 cache while keys pass through it: those of splits wait for others."""
    return "evict_last" if C.split else ""


@gluon.jit
def leave_part(K, place, rows, o, top, total, COLUMN: gl.constexpr):
    """Write `rows` of a part of a result to where whoever merges it looks for it; o: columns from COLUMN on."""
    L: gl.constexpr = o.type.layout
    row = gl.arange(0, o.shape[0], gl.SliceLayout(1, L))
    if COLUMN == 0:
        at = K.outputs.sums + place * (2 * K.ROWS) + row
        gl.store(at, top, mask=row < rows)
        gl.store(at + K.ROWS, total, mask=row < rows)
    row, column = gl.expand_dims(row, 1), COLUMN + gl.expand_dims(gl.arange(0, o.shape[1], gl.SliceLayout(0, L)), 0)
    at = K.outputs.parts + place.to(gl.int64) * (K.ROWS * K.C.head_dim_v) + place_in_part(row, column, K.C)
    gl.store(at, o, mask=(row < rows) & (column < K.C.head_dim_v), eviction_policy=stays(K.C))


@gluon.jit
def leave_parts(K, piece, job, key, acc, top, total):
    """Write a part of a piece's result, O in chunks of columns, whose last key is `key`."""
    C: gl.constexpr = K.C
    M: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    top, total = gl.convert_layout(top, M), gl.convert_layout(total, M)
    place = job.place
    if C.split:
        place = own_place(job, key, places_of_cta(K.requests, job.stretch, C), C)
    rows = piece.queries * K.GROUP - piece.first_row
    for c in gl.static_range(len(acc)):
        leave_part(K, place, rows, acc[c], top, total, c * acc[0].shape[1])


@gluon.jit
def chunk_of_part(K, place, row, there, c: gl.constexpr, like):
    """Chunk `c` of O in the part at a place, as `like` lies: the rows that are there."""
    L: gl.constexpr = like.type.layout
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L)), 1)
    there = gl.expand_dims(gl.convert_layout(there, gl.SliceLayout(1, L)), 1)
    column = c * like.shape[1] + gl.expand_dims(gl.arange(0, like.shape[1], gl.SliceLayout(0, L)), 0)
    at = K.outputs.parts + place.to(gl.int64) * (K.ROWS * K.C.head_dim_v) + place_in_part(row, column, K.C)
    return gl.load(at, mask=there & (column < K.C.head_dim_v), other=0.0, cache_modifier=".cg")


@gluon.jit
def part_at(K, place, row, there, like):
    """The part at a place, O in chunks as `like` has them, the maxima and the sums: the rows that are there."""
    at = K.outputs.sums + place * (2 * K.ROWS) + row
    top = gl.load(at, mask=there, other=-float("inf"), cache_modifier=".cg")
    total = gl.load(at + K.ROWS, mask=there, other=0.0, cache_modifier=".cg")
    o = ()
    for c in gl.static_range(len(like)):
        o += (chunk_of_part(K, place, row, there, c, like[c]),)
    return o, top, total


@gluon.jit
def with_chain_before(K, piece, job, acc, top, total):
    """What was found of a job's second chain, with what this CTA left of the first one, if it has both."""
    C: gl.constexpr = K.C
    M: gl.constexpr = top.type.layout
    begins = (piece.end - 1) // C.chain * C.chain
    if piece.begin < begins:
        place = own_place(job, begins - 1, places_of_cta(K.requests, job.stretch, C), C)
        partition_barrier()  # of a row's numbers each is written by one of the threads that need it
        row = gl.arange(0, acc[0].shape[0], M)
        there = row < piece.queries * K.GROUP - piece.first_row
        before, before_top, before_total = part_at(K, place, row, there, acc)
        acc, top, total = added(before, before_top, before_total, acc, top, total)
    return acc, top, total


@gluon.jit
def are_joined(job):
    """Whether the last CTA to come adds all other parts of a job to its own: if they are few, and some CTA has parts of two
    jobs, and so does not wait for the others of the first one."""
    return (job.parts > 1) & (job.parts <= MOST_JOINED) & (job.begins > job.first * job.stretch)


@gluon.jit
def hand_in(K, piece, job, rows):
    """A part of a job is written: the last to arrive merges all parts, `rows` of each, at once if they are few; else all who
    wait for that do it together."""
    ROWS: gl.constexpr = rows_of_group(K.C, K.ROWS)
    arrivals = K.outputs.arrivals + 2 * job.number
    partition_barrier()  # so the arrival tells of what all threads wrote
    there = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
    together = job.parts > most_alone(K.C, ROWS)
    if K.C.joins:
        together = together & ~are_joined(job)
    if most_alone(K.C, ROWS) == 0:  # noqa: SIM114, so that there is no code for it
        merge_together(K, piece, job, rows, arrivals, there)
    elif together:
        merge_together(K, piece, job, rows, arrivals, there)
    elif there == job.parts:
        gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
        merge_alone(K, piece, job, rows, parts_at_once(K.C, ROWS))


@gluon.jit
def merge_alone(K, piece, job, rows, AT_ONCE: gl.constexpr):
    """Merge all parts of a job, AT_ONCE of them at a time or, if they are few, 8, as code for more takes longer though most of
    it loads nothing."""
    ROWS: gl.constexpr = rows_of_group(K.C, K.ROWS)
    if K.C.split:
        merge_rows(K, piece, job, 0, rows, ROWS)
    elif AT_ONCE > 8:
        if job.parts <= 8:
            merge_alone(K, piece, job, rows, 8)
        else:
            o, top, total = merge(K, job, 0, rows, 0, ROWS, K.C.head_dim_v, AT_ONCE)
            write(K, piece, 0, o, top, total, 0)
    else:
        o, top, total = merge(K, job, 0, rows, 0, ROWS, K.C.head_dim_v, AT_ONCE)
        write(K, piece, 0, o, top, total, 0)


@gluon.jit
def merge_together(K, piece, job, rows, arrivals, there):
    """Merge many parts with whoever waits for them. there: how many have arrived.

    Nobody relies on a helper: one may give up until all parts are there, and a launch needs no CTA to run beside another. Of
    the two counters the first one counts parts, and GAVE_UP times those who did not wait. Once all are there nobody gives up,
    so all who waited see how many are absent: if nobody is, or all others are, each knows its share of the rows; else each
    takes the next few, by the second counter, until none are left. Everybody counts there: so the last one knows that he is,
    and sets both back to 0."""
    size = rows_at_once(K.C, job.parts)
    there, number = wait_for_parts(job, arrivals, there)
    absent = there // GAVE_UP
    if there % GAVE_UP == job.parts:
        answer = ask(arrivals + 1, K.C)
        alone = absent == job.parts - 1
        known = (absent == 0) | alone
        turn, turns = gl.where(alone, 0, number), (rows + size - 1) // size
        if K.C.merged_columns < K.C.head_dim_v:
            turns = gl.where(size == K.C.merged_rows, turns * (K.C.head_dim_v // K.C.merged_columns), turns)
        if not known:
            turn = heard(answer, K.C)
        while turn < turns:
            if K.C.merged_of_few > 0:
                if job.parts <= K.C.few_parts:
                    merge_rows(K, piece, job, turn * size, rows, K.C.merged_of_few)
                else:
                    merge_blocks(K, piece, job, turn, rows)
            else:
                merge_blocks(K, piece, job, turn, rows)
            if known:
                turn += job.parts - absent
            else:
                turn = gl.atomic_add(arrivals + 1, 1, sem="relaxed", scope="gpu")
        left = turn - turns
        if known:
            left = heard(answer, K.C)
        if left == job.parts - absent - 1:
            gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
            gl.atomic_xchg(arrivals + 1, 0, sem="relaxed", scope="gpu")


@gluon.jit
def rows_at_once(C: gl.constexpr, parts):
    """Rows of a job of so many parts that are merged at once."""
    rows = 0 * parts + C.merged_rows
    if C.merged_of_few > 0:
        rows = gl.where(parts <= C.few_parts, C.merged_of_few, rows)
    return rows


@gluon.jit
def merge_blocks(K, piece, job, turn, rows):
    """Merge the rows of a job of many parts, or the columns of them, whose turn it is."""
    ROWS: gl.constexpr = K.C.merged_rows
    COLUMNS: gl.constexpr = K.C.merged_columns
    ACROSS: gl.constexpr = K.C.head_dim_v // COLUMNS
    if ACROSS == 1:
        merge_rows(K, piece, job, turn * ROWS, rows, ROWS)
    else:
        row, column = turn // ACROSS * ROWS, turn % ACROSS * COLUMNS
        o, top, total = merge(K, job, row, rows, column, ROWS, COLUMNS, MANY_AT_ONCE)
        write(K, piece, row, o, top, total, column)


@gluon.jit
def merge_rows(K, piece, job, row, rows, MERGED: gl.constexpr):
    """Merge MERGED rows of a job from row `row` on, of `rows` in use, and write them."""
    if K.C.split:
        o, top, total = merge_splits(K, job, row, rows, MERGED, parts_at_once(K.C, MERGED))
    else:
        o, top, total = merge(K, job, row, rows, 0, MERGED, K.C.head_dim_v, parts_at_once(K.C, MERGED))
    write(K, piece, row, o, top, total, 0)


@gluon.jit
def ask(counter, C: gl.constexpr):
    """Add 1 to a counter; what it was, see `heard`, need not be there yet where one thread alone waits for it."""
    if C.specialised:
        lane = gl.arange(0, 32 * gl.num_warps(), lanes(gl.num_warps()))
        return gl.atomic_add(counter + 0 * lane, 1 + 0 * lane, mask=lane == 0, sem="relaxed", scope="gpu")
    else:  # mma.sync's kernel has no register for it
        return gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@gluon.jit
def heard(answer, C: gl.constexpr):
    """What a counter was when `ask` did."""
    if C.specialised:
        lane = gl.arange(0, 32 * gl.num_warps(), lanes(gl.num_warps()))
        return gl.max(gl.where(lane == 0, answer, 0), 0)
    else:
        return answer


@gluon.jit
def wait_for_parts(job, arrivals, there):
    """Wait until all parts of a job are there, or give up, which the counter of arrivals then says: its value, which others do
    not change any more once all are there, and as the how-manieth part this one came. there: how many have arrived."""
    number, looks = there % GAVE_UP - 1, job.patience
    while (there % GAVE_UP < job.parts) & (looks > 0):
        there = gl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
        looks -= 1
    stays = looks >= 0
    while (there % GAVE_UP < job.parts) & stays:
        seen = gl.atomic_cas(arrivals, there, there + GAVE_UP, sem="acquire", scope="gpu")
        stays = seen != there
        there = seen
    return there, number


@gluon.jit
def deliver(K, piece, job, acc, top, total, place=None):
    """Write what was found of a piece, O in chunks of columns: the result, by way of `place` (see `write`), or a part of it,
    which whoever comes last merges."""
    M: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    top, total = gl.convert_layout(top, M), gl.convert_layout(total, M)
    rows = piece.queries * K.GROUP - piece.first_row
    whole = job.parts == 1
    if K.C.joins:
        if are_joined(job) & (rows > 0):
            arrivals = K.outputs.arrivals + 2 * job.number
            if gl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") == job.parts - 1:  # all others
                gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
                acc, top, total = joined(K, job, rows, acc, top, total)
                whole = job.parts > 1
    if whole:
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
def joined(K, job, rows, acc, top, total):
    """What was found of a piece with all other parts of its job, which are there."""
    C: gl.constexpr = K.C
    row = gl.arange(0, acc[0].shape[0], top.type.layout)
    there = row < rows
    for part in range(job.parts):
        if part != gl.program_id(0) - job.first:
            place = place_of(part, job.first, job.begins, job.stretch, C)
            its, its_top, its_total = part_at(K, place, row, there, acc)
            acc, top, total = added(acc, top, total, its, its_top, its_total)
    return acc, top, total


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
