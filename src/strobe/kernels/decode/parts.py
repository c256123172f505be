"""Parts of results, which are handed in through global memory, and merged in the same launch.

Whoever comes last merges a job's parts, in their order, together with those who are done and wait; counters are set back to 0.
"""

from strobe.kernels.decode.layouts import along, lanes, result_layout
from strobe.kernels.decode.schedule import place_of
from strobe.kernels.decode.scores import finite
from strobe.kernels.decode.splits import added, own_place, parts_in_order, place_of_part, places_of_cta
from strobe.kernels.decode.writes import write
from strobe.kernels.gluon import gl, gluon, partition_barrier

MANY_AT_ONCE = gl.constexpr(32)
"""Parts that are merged at a time where CTAs share the columns, too."""
PATIENCE = gl.constexpr(64)
"""How often a CTA whose work is done looks whether the other parts of its last job are there, to help to merge them."""
GAVE_UP = gl.constexpr(1 << 16)
MOST_JOINED = gl.constexpr(4)
"""Parts of a job that the last CTA to come adds up, of which its own is in registers: see `are_joined`. An H200, 16 queries of
64 heads on 8, unequal lengths, microseconds, before these parts had an order (and up to two parts merged by one, from memory,
more by all who wait): 8 requests around 2k keys 35.3 (37.5), 32 88.6 (91.4), 8 around 8k 84.1 (87.1). Where all of a job's CTAs
wait, as those of 8 requests of 8k keys, 28 heads on 4: 47.0 (45.9)."""


# ---- handing in


@gluon.jit
def place_in_part(row, column, C: gl.constexpr):
    """Where a number of O lies in a part: in its row, or in a square of 8 rows and 8 columns, as a warp has it of wgmma."""
    if C.parts_in_squares:
        return row // 8 * (8 * C.head_dim_v) + column // 8 * 64 + row % 8 * 8 + column % 8
    else:
        return row * C.head_dim_v + column


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
def hand_in(K, piece, job, rows):
    """A part of a job is written: the last to arrive merges all parts, `rows` of each, at once if they are few; else all who
    wait for that do it together."""
    ROWS: gl.constexpr = rows_of_group(K.C, K.ROWS)
    arrivals = K.outputs.arrivals + 2 * job.number
    partition_barrier()  # so the arrival tells of what all threads wrote
    there = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
    together = job.parts > most_alone(K.C, ROWS)
    if most_alone(K.C, ROWS) == 0:  # noqa: SIM114, so that there is no code for it
        merge_together(K, piece, job, rows, arrivals, there)
    elif together:
        merge_together(K, piece, job, rows, arrivals, there)
    elif there == job.parts:
        gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
        merge_alone(K, piece, job, rows, parts_at_once(K.C, ROWS))


# ---- added to what is in registers


@gluon.jit
def are_joined(job):
    """Whether the last CTA to come adds up all parts of a job, its own from registers: if they are few, and some CTA has parts
    of two jobs, and so does not wait for the others of the first one."""
    return (job.parts > 1) & (job.parts <= MOST_JOINED) & (job.begins > job.first * job.stretch)


@gluon.jit
def is_last(K, piece, job, acc, top, total):
    """Whether all other parts of a job are there, of which this CTA's is then the last; else it is handed in."""
    arrivals = K.outputs.arrivals + 2 * job.number
    last = gl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") == job.parts - 1
    if not last:
        leave_parts(K, piece, job, piece.end - 1, acc, top, total)
        partition_barrier()  # as in `hand_in`
        last = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == job.parts - 1
    if last:
        gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
    return last


@gluon.jit
def joined(K, job, rows, acc, top, total):
    """What was found of a piece with all other parts of its job, which are there, in their order: so the bits are the same
    whoever comes last."""
    row, own = gl.arange(0, acc[0].shape[0], top.type.layout), gl.program_id(0) // K.C.team - job.first
    o, all_top, all_total = none_like(acc, top)
    for part in range(job.parts):
        place = place_of(part, job.first, job.begins, job.stretch, K.C)
        its, its_top, its_total = part_at(K, place, row, (row < rows) & (part != own), acc, top, total)
        o, all_top, all_total = added(o, all_top, all_total, its, its_top, its_total)
    return o, all_top, all_total


@gluon.jit
def none_like(acc, top):
    """What is found of no keys, O in chunks as `acc` has them, the maxima and the sums."""
    o = ()
    for c in gl.static_range(len(acc)):
        o += (gl.full_like(acc[c], 0.0),)
    return o, gl.full_like(top, -float("inf")), gl.full_like(top, 0.0)


@gluon.jit
def chunk_of_part(K, place, row, there, c: gl.constexpr, otherwise):
    """Chunk `c` of O in the part at a place: the rows that are there, `otherwise` in others, and as it lies."""
    L: gl.constexpr = otherwise.type.layout
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L)), 1)
    there = gl.expand_dims(gl.convert_layout(there, gl.SliceLayout(1, L)), 1)
    column = c * otherwise.shape[1] + gl.expand_dims(gl.arange(0, otherwise.shape[1], gl.SliceLayout(0, L)), 0)
    at = K.outputs.parts + place.to(gl.int64) * (K.ROWS * K.C.head_dim_v) + place_in_part(row, column, K.C)
    return gl.load(at, mask=there & (column < K.C.head_dim_v), other=otherwise, cache_modifier=".cg")


@gluon.jit
def part_at(K, place, row, there, acc, top, total):
    """The part at a place, O in chunks, the maxima and the sums, of the rows that are there; of others what is given."""
    at = K.outputs.sums + place * (2 * K.ROWS) + row
    its_top = gl.load(at, mask=there, other=top, cache_modifier=".cg")
    its_total = gl.load(at + K.ROWS, mask=there, other=total, cache_modifier=".cg")
    o = ()
    for c in gl.static_range(len(acc)):
        o += (chunk_of_part(K, place, row, there, c, acc[c]),)
    return o, its_top, its_total


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
        before, before_top, before_total = part_at(K, place, row, there, *none_like(acc, top))
        acc, top, total = added(before, before_top, before_total, acc, top, total)
    return acc, top, total


# ---- merging


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
    if columns < C.result_columns:  # a warp has the same 8 columns of several parts
        return gl.BlockedLayout([1, 1, 4], [16 // rows, rows, 2], [1, 1, C.warps], [2, 1, 0])
    if not C.parts_in_squares:
        if rows < C.warps:
            each = rows * columns // (32 * C.warps)
            return gl.BlockedLayout([1, 1, each], [1, 1, 32], [1, rows, C.warps // rows], [2, 1, 0])
        return result_layout(C, columns)
    down = min(8, rows)
    high = min(C.warps, rows // down)
    return gl.BlockedLayout([1, 1, 4], [1, down, 32 // down], [1, high, C.warps // high], [2, 1, 0])


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
            o, top, total = merge(K, job, 0, rows, 0, ROWS, K.C.result_columns, AT_ONCE)
            write(K, piece, 0, o, top, total, 0)
    else:
        o, top, total = merge(K, job, 0, rows, 0, ROWS, K.C.result_columns, AT_ONCE)
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
        if K.C.merged_columns < K.C.result_columns:
            turns = gl.where(size == K.C.merged_rows, turns * (K.C.result_columns // K.C.merged_columns), turns)
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
    ACROSS: gl.constexpr = K.C.result_columns // COLUMNS
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
        o, top, total = merge(K, job, row, rows, 0, MERGED, K.C.result_columns, parts_at_once(K.C, MERGED))
    write(K, piece, row, o, top, total, 0)


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
    SPACE: gl.constexpr = 2 * C.team  # places from one part to the next, but for the first one
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
    L: gl.constexpr = gl.SliceLayout(0, merge_layout(C, MERGED, C.result_columns))
    M: gl.constexpr = gl.SliceLayout(1, L)
    row = row + gl.arange(0, MERGED, M)
    row_2, column = gl.expand_dims(row, 1), gl.expand_dims(gl.arange(0, C.result_columns, gl.SliceLayout(0, L)), 0)
    sums, parts = K.outputs.sums + row, K.outputs.parts + place_in_part(row_2, column, C)
    places, own = places_of_cta(K.requests, job.stretch, C), parts_in_order(job, C)
    o = (gl.full([MERGED, C.result_columns], 0.0, gl.float32, L),)
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


# ---- waiting for the others


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
