"""Pieces that are taken again, because the optimistic softmax left its range.

It counts exponents of all steps that every row sees whole from a row's maximum in the first step of a piece, and so needs no
further maxima, and no factors (docs/optimistic_softmax.md). A group of warps whose sums or results then are not what they
should be delivers nothing. When all roles of a CTA are through with its pieces, they learn which ones those are, and take
them once more, with a running maximum.

    shared memory   shape      filled by       read by
    broken          [groups]   a multiplier    all roles

    barrier         arrivals                   says
    told            one of each multiplier     all pieces have been taken
"""

from strobe.kernels.common.channel import make_barriers
from strobe.kernels.decode.layouts import lanes
from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier

ALL = gl.constexpr(-1)
"""The choice of all pieces, which are taken for the first time. Other choices are sums of bits, see `is_chosen`."""
LAST_BIT = gl.constexpr(30)
LEAST, MOST = gl.constexpr(0.5), gl.constexpr(2.0**60)
"""Bounds of a row's sum: docs/optimistic_softmax.md; the upper one lower, as parts are yet to be added up."""


@aggregate
class Again:
    """What a CTA's roles tell each other: see the table above."""

    broken: gl.shared_memory_descriptor
    told: gl.shared_memory_descriptor


@gluon.jit
def make_again(GROUPS: gl.constexpr):
    """The caller fences."""
    broken = gl.allocate_shared_memory(gl.int32, [GROUPS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Again(broken, make_barriers(1, GROUPS))


@gluon.jit
def bit_of(number, job, C: gl.constexpr):
    """The bit of a CTA's piece of that number. Later ones share a bit, as the result of a whole job may be written twice; but a
    part must not be handed in twice. The first piece may be one, and the last, if others go on with its job."""
    goes_on = (job.parts > 1) & (job.first == gl.program_id(0) // C.team)
    return 1 << gl.where(goes_on, LAST_BIT, gl.minimum(number, LAST_BIT - 1))


@gluon.jit
def is_chosen(chosen, number, job, C: gl.constexpr):
    """Whether a CTA's piece of that number is one of those chosen."""
    if C.optimistic:
        return (chosen & bit_of(number, job, C)) != 0
    else:
        return True


@gluon.jit
def tell(again, W: gl.constexpr, chosen, broken, C: gl.constexpr):
    """The W-th group has taken all pieces, if they are chosen, and tells which ones it has to take again."""
    if C.optimistic:
        if chosen == ALL:
            again.broken.index(W).store(gl.full([1], 0, gl.int32, lanes(gl.num_warps())) + broken)
            mbarrier.arrive(again.told.index(0), count=1)


@gluon.jit
def chosen_next(again, chosen, C: gl.constexpr):
    """The pieces that some group has to take again, after all pieces; else none."""
    next = 0 * chosen
    if C.optimistic:
        GROUPS: gl.constexpr = again.broken.shape[0]
        if chosen == ALL:
            mbarrier.wait(again.told.index(0), 0)
            for w in gl.static_range(GROUPS):
                next = next | gl.max(again.broken.index(w).load(lanes(gl.num_warps())), 0)
    return next


@gluon.jit
def out_of_range(acc, total):
    """Whether O is not finite in a row, or its sum not within its bounds."""
    right = (total >= LEAST) & (total < MOST)
    for c in gl.static_range(len(acc)):
        right = right & (gl.convert_layout(gl.sum(acc[c] * 0.0, 1), total.type.layout) == 0.0)
    return gl.min(right.to(gl.int32), 0) == 0
