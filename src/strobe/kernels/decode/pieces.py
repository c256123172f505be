"""The work of a CTA: the pieces of its stretch, one after the other."""

from strobe.kernels.common.prefetch import prefetch
from strobe.kernels.decode.arguments import Chain, Job, Piece
from strobe.kernels.decode.notes import NOTED_ROWS, forget, is_noted
from strobe.kernels.decode.parts import PATIENCE
from strobe.kernels.decode.schedule import (
    jobs_of,
    keys_of,
    line_of,
    parts_of,
    place_of,
    queries_of,
    quotient,
    request_at,
    start_of,
    turn_of,
    units_of,
)
from strobe.kernels.decode.splits import places_of_cta
from strobe.kernels.gluon import gl, gluon


@gluon.jit
def ask_ahead(K):
    """Ask for page numbers and queries while the lengths are on their way."""
    requests, cached, outputs = K.requests, K.cached, K.outputs
    if cached.PAGE:
        columns = (requests.capacity + cached.PAGE - 1) // cached.PAGE
        prefetch(cached.table, ((requests.batch - 1).to(gl.int64) * cached.table_row + columns) * 4)
    if requests.cu_q is None:
        last = (requests.batch - 1).to(gl.int64) * outputs.q_batch + (requests.n_q - 1).to(gl.int64) * outputs.q_row
        last += (K.heads_kv * (K.GROUP - K.C.absent) - 1).to(gl.int64) * outputs.q_head
        prefetch(outputs.q, (last + K.DIM) * 2)


@gluon.jit
def tile_in_turn(i, tiles):
    """The i-th tile of a key head: first and last ones in turn, so that a CTA with several has as many keys as others where
    the last rows see the most."""
    return gl.where(i % 2 == 0, i // 2, tiles - 1 - i // 2)


@gluon.jit
def keys_of_tile(terms, first_row, queries, begin, end, length, C: gl.constexpr, GROUP: gl.constexpr):
    """[begin, end) of the keys that some row of a tile may see, of those that some query of its request may."""
    own = length - queries
    if terms.BY_ROW:
        if terms.right is not None:
            last = gl.minimum(first_row + C.rows, queries * GROUP) - 1
            end = gl.minimum(end, gl.maximum(own + last // GROUP + terms.right + 1, begin))
        if terms.left is not None:
            begin = gl.minimum(gl.maximum(begin, own + first_row // GROUP - terms.left), end)
    return begin, end


@gluon.jit
def take_pieces(TAKE: gl.constexpr, memory, K, state):
    """All pieces of a CTA's stretch, one after the other. TAKE: what a role does with a piece, as `take` does, in a kernel's
    own memory; `state` is what it remembers from piece to piece."""
    C: gl.constexpr = K.C
    GROUP: gl.constexpr = K.GROUP
    requests, heads_kv, tiles = K.requests, K.heads_kv, K.tiles
    heads = heads_kv // C.heads_abreast
    line = line_of(requests, heads, C, GROUP)
    team, member = gl.program_id(0) // C.team, gl.program_id(0) % C.team
    x, last = start_of(team, line.stretch, line.total), start_of(team + 1, line.stretch, line.total)
    turn = 0 * line.room
    if C.by_turns:
        turn = turn_of(line, C)
        if turn > 0:
            x, last = team * line.room, line.total
    b, begins = request_at(requests, x, line, heads, C, GROUP)
    while x < last:
        first_query, queries = queries_of(requests, b, b < requests.batch)
        begin, end, length = keys_of(requests, b, b < requests.batch, queries)
        jobs, units = jobs_of(queries, heads, C, GROUP), units_of(begin, end, C)
        room = gl.where(line.room > 0, line.room, units + line.start)
        span = jobs * room
        if requests.cu_q is not None or requests.notes is not None:  # some may have fewer jobs, and places behind them
            span = gl.where(line.room > 0, line.span, span)
        if x >= begins + span:
            b += 1
            begins = x
            if C.by_turns:
                b = gl.where(turn > 0, quotient(x, gl.maximum(line.span, 1)), b)
                begins = gl.where(turn > 0, b * line.span, x)
        else:
            job = quotient(x - begins, room)
            job_begins = begins + job * room
            unit = x - job_begins
            count = gl.minimum(units - unit, last - x)  # none, if the stretch begins behind the units
            next = gl.where(unit + count == units, job_begins + room, x + count)
            if requests.cu_q is not None or requests.notes is not None:
                count, next = gl.where(job < jobs, count, 0), gl.where(job < jobs, next, begins + span)
                job = gl.where(job < jobs, job, 0)
            if C.by_turns:
                next = gl.where(turn > 0, x + turn, next)
            head, tile = job, 0 * job
            some_begin, some_end = begin, end
            if tiles > 1:
                own_tiles = gl.maximum(jobs // heads, 1)
                head = job // own_tiles
                tile = tile_in_turn(job - head * own_tiles, own_tiles) * C.abreast + member % C.abreast
                some_begin, some_end = keys_of_tile(K.terms, tile * C.rows, queries, begin, end, length, C, GROUP)
            head = head * C.heads_abreast + member // C.abreast
            entry = b
            if requests.index is not None:
                entry = gl.load(requests.index + b)
            origin = (begin // C.unit + unit) * C.unit
            piece = Piece(b, entry, head, tile * C.rows, first_query, queries, length, gl.maximum(some_begin, origin),
                          gl.minimum(some_end, origin + count * C.unit))  # fmt: skip
            ours = count > 0
            if C.abreast > 1:
                ours = ours & (piece.first_row < queries * GROUP)
            if requests.notes is not None:
                ours = ours & is_noted(requests.notes, b, heads_kv, head, piece.first_row, queries, requests.n_q, C, GROUP)
            if ours:
                parts, first = parts_of(job_begins, units, line.stretch)
                part = team - first
                chain = None
                if C.split:
                    places, own = places_of_cta(requests, line.stretch, C), begin // C.unit
                    settled = gl.where(part > 0, (origin + C.chain - 1) // C.chain * C.chain, 0)
                    chain = Chain(part == 0, settled, job_begins - own, own, some_begin // C.unit,
                                  (some_end + C.unit - 1) // C.unit)  # fmt: skip
                    place = team * places
                else:
                    place = place_of(part, first, job_begins, line.stretch, C)
                patience = gl.where(next < last, 0, PATIENCE)
                number = (b * heads_kv + head) * tiles + tile
                of = Job(number, parts, first, job_begins, line.stretch, place, patience, chain)
                state = TAKE(memory, K, piece, of, state)
            x = next
    if requests.notes is not None:
        blocks = (requests.n_q + NOTED_ROWS - 1) // NOTED_ROWS
        forget(requests.notes, requests.batch * heads_kv * GROUP * blocks, C.warps)
    return state
