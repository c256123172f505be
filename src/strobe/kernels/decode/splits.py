"""Keys that are cut in splits, so that a request's bits depend on nothing but its own keys.

A split is `split` keys from a multiple of it on. What a row finds of it is found from nothing; the splits of `chain` keys are
added up one after the other, a chain, and so are the chains of a job, two at most. Whoever adds something up does so in this
order, with the roundings of `added`.

A CTA has neighbouring splits of a job, its piece. Where it has the first split of a chain, it adds those of the chain that it
has to each other, and hands them in as one part; splits of a chain that another CTA began are a part each:

    splits      0   1   2   3   4   5 | 6   7   8       two chains, three CTAs
    CTA         0   0   0   1   1   1   1   2   2
    parts       ---------   -   -   -   -----   -   -

A job that a CTA has whole is handed to nobody: the sum of its first chain, of two, waits where a part would.
"""

from strobe.kernels.decode.schedule import quotient
from strobe.kernels.decode.scores import finite
from strobe.kernels.gluon import aggregate, gl, gluon


@gluon.jit
def added(o, top, total, other, other_top, other_total):
    """A state of a softmax, of chunks of O, and that of the keys behind it, added up: rounded the same whoever does it."""
    M: gl.constexpr = gl.SliceLayout(1, o[0].type.layout)
    top, total, factor, other_factor = added_sums(top, total, other_top, other_total)
    factor, other_factor = gl.convert_layout(factor, M), gl.convert_layout(other_factor, M)
    new = ()
    for c in gl.static_range(len(o)):
        # a zero behind it has no sign, as it has none where a state begins
        behind = gl.fma(other[c], gl.expand_dims(other_factor, 1), 0.0)
        new += (gl.fma(o[c], gl.expand_dims(factor, 1), behind),)
    return new, top, total


@gluon.jit
def added_sums(top, total, other_top, other_total):
    """The maximum and the sum of both, and by what O of each is multiplied."""
    new_top = gl.maximum(top, other_top)
    shift = finite(new_top)
    factor, other_factor = gl.exp2(top - shift), gl.exp2(other_top - shift)
    return new_top, gl.fma(total, factor, other_total * other_factor), factor, other_factor


@gluon.jit
def added_numbers(o, top, total, other, other_top, other_total):
    """`added` of numbers of O that each come with the maximum and the sum of their row."""
    top, total, factor, other_factor = added_sums(top, total, other_top, other_total)
    return gl.fma(o, factor, gl.fma(other, other_factor, 0.0)), top, total


@gluon.jit
def ends_part(chain, end, C: gl.constexpr):
    """Whether a part ends with the split that ends with key `end`."""
    return (end <= chain.settled) | (end % C.chain == 0)


@gluon.jit
def places_of_cta(requests, stretch, C: gl.constexpr):
    """How many places a CTA has for parts: for those of the job with which its stretch begins in their order, for those of
    another, with which it ends, or of a whole one, from the last place on; but whole jobs have one of their own, the last, if
    they may be taken again (see `again`), when parts of others are handed in."""
    return gl.minimum(stretch, (requests.capacity + C.unit - 1) // C.unit + 1) + own_places(C)


@gluon.constexpr_function
def own_places(C):
    """Places of a CTA for nothing but whole jobs."""
    return int(C.optimistic)


@gluon.jit
def place_from(chain, split, team, begins, stretch, places, C: gl.constexpr):
    """The place of the part that begins with a split of a job, of that CTA of a team whose place in it is this one's. begins:
    whether the job begins with it."""
    PER_CHAIN: gl.constexpr = C.chain // C.split
    of_others = chain.line + split - team * stretch
    of_first = places - 1 - own_places(C) - (split // PER_CHAIN - chain.job_begin // PER_CHAIN)
    return (team * C.team + gl.program_id(0) % C.team) * places + gl.where(begins, of_first, of_others)


@gluon.jit
def own_place(job, key, places, C: gl.constexpr):
    """The place of this CTA's part whose last key is `key`."""
    begin = gl.where(key < job.chain.settled, key // C.split, key // C.chain * (C.chain // C.split))
    begin = gl.maximum(begin, job.chain.job_begin)
    place = place_from(job.chain, begin, gl.program_id(0) // C.team, job.chain.begins, job.stretch, places, C)
    if own_places(C):
        place = gl.where(job.parts == 1, gl.program_id(0) * places + places - 1, place)
    return place


@aggregate
class Parts:
    """The parts of a tile in their order: `number` of them, the first `of_first` of the job's first chain. head, head_2: 1 if a
    part is what a CTA has of a chain from its first split on, `begin` or `begin_2`, else 0. Then come single splits, from
    `single` or `single_2` on."""

    number: gl.tensor
    of_first: gl.tensor
    head: gl.tensor
    head_2: gl.tensor
    begin: gl.tensor
    begin_2: gl.tensor
    single: gl.tensor
    single_2: gl.tensor


@gluon.jit
def parts_in_order(job, C: gl.constexpr):
    """The parts of a job's tile."""
    PER_CHAIN: gl.constexpr = C.chain // C.split
    chain = job.chain
    middle = (chain.job_begin // PER_CHAIN + 1) * PER_CHAIN
    head, single, singles = parts_of_chain(job, chain.job_begin, gl.minimum(middle, chain.end))
    head_2, single_2, singles_2 = parts_of_chain(job, middle, chain.end)
    return Parts(head + singles + head_2 + singles_2, head + singles, head, head_2, chain.job_begin, middle, single, single_2)


@gluon.jit
def parts_of_chain(job, begin, end):
    """Tell of splits [begin, end) of a chain: whether those of the CTA with the first one are a part of the tile, the first of
    the others, and how many they are."""
    chain = job.chain
    beyond = (quotient(chain.line + begin, job.stretch) + 1) * job.stretch - chain.line
    first = gl.maximum(chain.begin, begin)
    single = gl.maximum(first, beyond)
    return (first < gl.minimum(beyond, end)).to(gl.int32), single, gl.maximum(end - single, 0)


@gluon.jit
def place_of_part(job, parts, i, places, C: gl.constexpr):
    """The place of the i-th part of a tile, or of several."""
    j = i - parts.of_first
    of_first = gl.where(i < parts.head, parts.begin, parts.single + i - parts.head)
    of_second = gl.where(j < parts.head_2, parts.begin_2, parts.single_2 + j - parts.head_2)
    split = gl.where(j < 0, of_first, of_second)
    team = quotient(job.chain.line + split, job.stretch)
    return place_from(job.chain, split, team, team == job.first, job.stretch, places, C)
