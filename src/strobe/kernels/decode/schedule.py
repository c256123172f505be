"""Which CTA computes which keys of which request: found on the device, from the lengths.

A request's work comes in jobs: one for each key head and each tile of its rows. A job's keys come in units, steps of `tokens`
keys, or, where a request's bits must not depend on the others, splits of `split` keys that begin at multiples of `split` and
are added up in chains of `chain` keys (see `arguments.Chain`). All
units of all jobs stand in one line, request by request, and every CTA takes a stretch of it, all of the same length. So the
work is even whatever the lengths, and the host need not know them. Tiles that are abreast (`Config.abreast`), or key heads
(`Config.heads_abreast`), are one job in this line, and as many CTAs, a team of neighbours, take the same stretch of it, each
for a tile of its own, or a key head.

A piece costs time beside its keys, too. So a job's units are followed in the line by an empty place, as long as the units that
could be read meanwhile (`Config.start`): a CTA that has many short jobs has fewer keys than others. Where all requests are
nearly alike, all jobs have the same room instead, a whole number of stretches or a whole part of one, so that no CTA has pieces
of two jobs:

    alike       request 0, head 0    .  | request 0, head 1    .  | request 1, head 0    .  |
    stretches   CTA 0  | CTA 1  | CTA 2 | CTA 3  | CTA 4  | CTA 5 | CTA 6  | CTA 7  | CTA 8 |

    room of a job         its units, and the empty place behind them
    parts of a job        stretches that cut its units, in order
    place of a part       where its partial result goes: two a CTA, as a stretch begins and ends within a job at most; where
                          there are splits, one for each that a CTA hands in
"""

from strobe.kernels.decode.keys import wide
from strobe.kernels.decode.notes import Notes
from strobe.kernels.gluon import aggregate, gl, gluon

AT_ONCE = gl.constexpr(128)
"""Requests whose lengths are looked at together."""


@aggregate
class Requests:
    """What is known of requests: pointers to lengths and, or None, to leftpad, index and cu_q; how many requests, the most
    queries and keys of one, the packed rows of all, and the entries of the cache that index may name; how far to the left of
    its own position a query sees, or None. notes: of another kernel, and nothing but what it noted is computed (see
    `notes`); or None. served: 1 for each request that another kernel serves, which has none here, or else 0; or None."""

    lengths: gl.tensor
    leftpad: (gl.tensor, gl.constexpr)
    index: (gl.tensor, gl.constexpr)
    cu_q: (gl.tensor, gl.constexpr)
    batch: gl.tensor
    n_q: gl.tensor
    capacity: gl.tensor
    total_q: gl.tensor
    entries: gl.tensor
    left: (gl.tensor, gl.constexpr)
    notes: (Notes, gl.constexpr)
    served: (gl.tensor, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, lengths, leftpad, index, cu_q, batch, n_q, capacity, total_q, entries, left, notes=None, served=None):
        self.lengths = lengths
        self.leftpad = gl.constexpr(None) if leftpad is None else leftpad
        self.index = gl.constexpr(None) if index is None else index
        self.cu_q = gl.constexpr(None) if cu_q is None else cu_q
        self.batch = batch
        self.n_q = n_q
        self.capacity = capacity
        self.total_q = total_q
        self.entries = entries
        self.left = gl.constexpr(None) if left is None else left
        self.notes = gl.constexpr(None) if notes is None else notes
        self.served = gl.constexpr(None) if served is None else served


@gluon.jit
def queries_of(requests, b, there):
    """The first row and the number of queries of request b (or of several), none if it is not `there`."""
    first, number = b * 0, b * 0 + requests.n_q
    if requests.cu_q is not None:
        first = gl.load(requests.cu_q + b, mask=there, other=0)
        end = gl.load(requests.cu_q + b + 1, mask=there, other=0)
        first = gl.minimum(gl.maximum(first, 0), requests.total_q)
        end = gl.minimum(gl.maximum(end, 0), requests.total_q)
        number = gl.minimum(gl.maximum(end - first, 0), requests.n_q)
    if requests.served is not None:
        there = there & (gl.load(requests.served + b, mask=there, other=1) == 0)
    return first, gl.where(there, number, 0)


@gluon.jit
def keys_of(requests, b, there, queries, AT_ONCE: gl.constexpr = False):
    """[begin, end) of the keys that some query of request b (or of several) may see, and the length that positions count from.
    Whatever the numbers are, 0 <= begin <= end <= capacity. AT_ONCE: the length is asked for here, and not where the compiler
    thinks it needed."""
    length = gl.load(requests.lengths + b, mask=there, other=0, volatile=AT_ONCE)
    length = gl.minimum(gl.maximum(length, 0), requests.capacity)
    begin, end = length * 0, length
    if requests.leftpad is not None:
        begin = gl.minimum(gl.maximum(gl.load(requests.leftpad + b, mask=there, other=0), 0), length)
    if requests.left is not None:
        begin = gl.minimum(gl.maximum(begin, length - queries - requests.left), length)
    if requests.index is not None:
        entry = gl.load(requests.index + b, mask=there, other=0)
        end = gl.where((entry >= 0) & (entry < requests.entries), end, begin)
    return begin, end, length


@gluon.jit
def jobs_and_units(requests, b, there, heads, C: gl.constexpr, GROUP: gl.constexpr):
    """How many jobs request b (or each of several) has, and how many units a job of it."""
    _, queries = queries_of(requests, b, there)
    begin, end, _ = keys_of(requests, b, there, queries)
    return jobs_of(queries, heads, C, GROUP), units_of(begin, end, C)


@gluon.jit
def jobs_of(queries, heads, C: gl.constexpr, GROUP: gl.constexpr):
    """How many jobs a request of so many queries has, tiles abreast counted as one. heads: its key heads, or teams' of them."""
    together: gl.constexpr = C.rows * C.abreast
    return heads * ((queries * GROUP + together - 1) // together)


@gluon.jit
def units_of(begin, end, C: gl.constexpr):
    """How many units a job of the keys [begin, end) has: at least one, as rows that see nothing have a result too."""
    return gl.maximum((end + C.unit - 1) // C.unit - begin // C.unit, 1)


@gluon.constexpr_function
def of_requests(warps):
    """The layout of lengths: every warp has all of them, so sums need no other warp."""
    return gl.BlockedLayout([AT_ONCE.value // 32], [32], [warps], [0])


@gluon.jit
def quotient(a, b):
    """a // b of numbers that are not negative, for which a division without signs takes fewer instructions."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@gluon.jit
def _add(a, b):
    return a + b


@aggregate
class Line:
    """The line of all units. room: that of every job, where requests are alike, or 0; span: that of every request then; start:
    places behind the units of a job, else. total: all places; stretch: those that a CTA takes, or each of a team."""

    room: gl.tensor
    span: gl.tensor
    start: gl.tensor
    total: gl.tensor
    stretch: gl.tensor

    @gluon.constexpr_function
    def __init__(self, room, span, start, total, stretch):
        self.room, self.span, self.start, self.total, self.stretch = room, span, start, total, stretch


@gluon.jit
def line_of(requests, heads, C: gl.constexpr, GROUP: gl.constexpr):
    """The line of all requests. They are alike if it would be longer by an eighth at most, if all had as many units as the one
    that has most."""
    # An H200, 64 heads on 8, pages of 64, microseconds (and if only equal ones were alike), lengths drawn evenly
    #   from 0.98 to 1 of 8k keys: 16 queries, 8 requests 76.8 (81.8), 32 255.7 (272.4); but 128 of 1k 165.7 (161.7)
    #   from 0.88 to 1:            16 queries, 8 76.1 (77.8), 32 247.8 (261.1); 1 query, 8 64.3 (65.9), 32 235.3 (235.2)
    #   from 0.82 to 1:            16 queries, 8 75.0 (77.8), 32 240.3 (252.4); 1 query, 8 63.2 (65.4), 32 230.1 (228.0)
    units, most, jobs, number = all_units(requests, heads, C, GROUP)
    every = requests.batch * jobs
    alike = wide(every, most) * 8 <= units.to(gl.int64) * 9
    start = gl.where(alike, 0, C.start)  # alike: as much of it for each CTA
    total = gl.where(alike, every * most, units + number * start)
    stretch, room = stretch_of(total, every, most, alike, C)
    return Line(room, jobs * room, start, gl.where(alike, every * room, total), stretch)


@gluon.jit
def all_units(requests, heads, C: gl.constexpr, GROUP: gl.constexpr):
    """The units of all requests together, the most that a job has, the most jobs that a request has, and all jobs."""
    lane = gl.arange(0, AT_ONCE, of_requests(gl.num_warps()))
    total, most, most_jobs, number = requests.batch * 0, requests.batch * 0, requests.batch * 0, requests.batch * 0
    for first in range(0, requests.batch, AT_ONCE):
        b = first + lane
        jobs, units = jobs_and_units(requests, b, b < requests.batch, heads, C, GROUP)
        if requests.cu_q is None and requests.notes is None:  # as many jobs for each
            jobs = 1
        else:
            jobs = gl.where(b < requests.batch, jobs, 0)
            number += gl.sum(jobs, 0)
            most_jobs = gl.maximum(most_jobs, gl.max(jobs, 0))
            units = gl.where(jobs > 0, units, 0)
        units = gl.where(b < requests.batch, units, 0)
        total += gl.sum(jobs * units, 0)
        most = gl.maximum(most, gl.max(units, 0))
    if requests.cu_q is None and requests.notes is None:
        jobs = jobs_of(requests.n_q, heads, C, GROUP)
        return total * jobs, most, jobs, requests.batch * jobs
    else:
        return total, most, most_jobs, number


@gluon.jit
def stretch_of(total, number, units, alike, C: gl.constexpr):
    """How many places a CTA takes of so many, or each of a team, and what room a job has where requests are alike:
    `number` jobs of `units` units. What makes the work even or, where they are alike, what cuts a job in equal parts, or is
    several whole jobs, if that is hardly more: then no CTA takes pieces of two jobs, which costs a few microseconds, nor hands
    in a part where the whole job takes about as long."""
    teams = gl.num_programs(0) // C.team
    stretch, room = gl.maximum(quotient(total + teams - 1, teams), 1), gl.where(alike, units, 0)
    if alike & (total > 0):
        # Equal parts: an H200, 16 queries, pages of 64, microseconds (and, another time, cut where it makes the work even): 64
        # heads on 8, 1 request of 3000 keys 13.5 (21.6), 9000 21.4 (29.5), 40000 52.1 (58.7), 4 of 5000 33.7 (41.0); 28 on 4, 1
        # of 3000 11.1 (18.1), of 9000 18.8 (24.6), 8 of 9000 48.4 (56.7). 4 queries: 64 on 8, 4 of 5000 27.1 (33.0)
        # Several whole jobs: an H100, 64 heads on 8, 4 queries, 128 requests of 2k keys: 377 microseconds, not 389; of 1k: 198,
        # not 206. 128 rows, 32 requests of 8k: 389, not 417. 128 heads of a latent, 2 queries, 128 of 1k: 156, not 174.
        equal, padded = units, units
        if number > teams:
            equal = quotient(number + teams - 1, teams) * units
        else:
            parts = quotient(teams, number)
            part = quotient(units + parts - 1, parts)
            if part + C.start // 2 < units:
                equal, padded = part, parts * part
        if (8 * equal <= 9 * stretch) | (equal <= stretch + C.start):
            stretch, room = equal, padded
    return stretch, room


@gluon.jit
def turn_of(line, C: gl.constexpr):
    """From one job of a CTA to its next one, in places, if all have several whole ones, which they take by turns; else 0. What
    neighbours read at once is then all heads of a request, which lie side by side in memory."""
    whole = line.stretch > line.room
    if whole & (line.room > 0):
        whole = quotient(line.stretch, line.room) * line.room == line.stretch
    return gl.where(whole, gl.num_programs(0) // C.team * line.room, 0)


@gluon.jit
def request_at(requests, x, line, heads, C: gl.constexpr, GROUP: gl.constexpr):
    """The request that has place x of the line, and where its own places begin in the line."""
    number, begins = requests.batch * 0, requests.batch * 0
    if line.room > 0:
        if requests.batch > 1:
            number = quotient(x, line.span)
            begins = number * line.span
    else:
        lane, ahead = gl.arange(0, AT_ONCE, of_requests(gl.num_warps())), requests.batch * 0
        for first in range(0, requests.batch, AT_ONCE):
            b = first + lane
            jobs, units = jobs_and_units(requests, b, b < requests.batch, heads, C, GROUP)
            own = gl.where(b < requests.batch, jobs * (units + line.start), 0)
            ends = ahead + gl.associative_scan(own, 0, _add)
            before = (ends <= x) & (b < requests.batch)
            number += gl.sum(before.to(gl.int32), 0)
            begins = gl.maximum(begins, gl.max(gl.where(before, ends, 0), 0))
            ahead += gl.sum(own, 0)
    return number, begins


@gluon.jit
def start_of(cta, stretch, total):
    """Where the stretch of a CTA begins in the line."""
    return gl.minimum(cta * stretch, total)


@gluon.jit
def parts_of(job_begins, units, stretch):
    """How many parts a job has whose units begin at `job_begins` in the line, and the CTA of the first one."""
    first = quotient(job_begins, stretch)
    return quotient(job_begins + units - 1, stretch) - first + 1, first


@gluon.jit
def place_of(part, first, job_begins, stretch, C: gl.constexpr):
    """Where the partial result of a job's part goes. part: its number, or several; first: of `parts_of`."""
    within = (job_begins > first * stretch).to(gl.int32)
    return (2 * (first + part) + gl.where(part == 0, within, 0)) * C.team + gl.program_id(0) % C.team
