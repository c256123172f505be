"""The order in which blocks of keys add to dQ, where it must have the same bits in every run (`Config.order`).

Each share of 64 rows of dQ has a flag, an int32 in global memory, 0 before the launch: the block of keys that added last, plus
1. Of the blocks that a tile's rows see, which are neighbours of each other, each waits until the one before it has added:

    order       masks                 a block waits for             why
    descending  with a right side     the block of later keys       it begins at a later tile: it is ahead
    ascending   all others            the block of earlier keys     all begin at the first tile, one after the other

A share's flag is raised when its addition is over, not only read from shared memory, and a tile later than it was started, when
that has long been so.

Under a causal mask, with no window, the last blocks to begin are the longest then, and most CTAs wait for the end. So where a
head has its own keys, the last bundle of heads turns back: blocks ascend, and their rows descend, all from the last tile on.

Nobody waits for ever, however few CTAs the GPU runs at a time. Blocks have numbers in that order, and a CTA takes the next
number when it runs, and has none of its own: so every block with a smaller number is done, or a running CTA has it. A CTA's
groups do their blocks and tiles in order, raise what they have added before they wait for the next flag, and wait for smaller
numbers alone. So of all additions that are still to come, the first, by number and tile, waits for nobody.
"""

from strobe.kernels.common.flags import raise_flag
from strobe.kernels.gluon import aggregate, gl, gluon
from strobe.kernels.sm90 import backward_config as sizes
from strobe.kernels.sm90.backward_tiles import KEYS, tiles_that_see

UNITS = gl.constexpr(sizes.FLAGGED // 64)
"""Places, of 64 numbers, for which there is a flag."""


@aggregate
class Neighbour:
    """The block that adds before this one: its tiles [begin, end), none if there is no such block. number, before: what
    flags hold when this block, and that one, has added."""

    begin: gl.tensor
    end: gl.tensor
    number: gl.tensor
    before: gl.tensor


@gluon.jit
def neighbour_of(work, lengths, C: gl.constexpr):
    """Which block adds before this one."""
    step = C.order
    if C.turns_back:
        step = gl.where(work.backwards, 1, -1)
    first = work.first - step * KEYS
    last = gl.minimum(first + KEYS, work.n_kv) - 1
    begin, end = tiles_that_see(first, last, work.n_q, work.n_kv, lengths, C.tile_q)
    end = gl.where(first >= 0, end, begin)
    number = work.first // KEYS + 1
    return Neighbour(begin, end, number, number - step)


# ---- what a group carries from tile to tile


@aggregate
class Turn:
    """What a group waits for next, and hands on. before, after: what the flags hold of the tile whose dQ comes next, when that
    may be added, and when it has been. place, added: of what was added last, until that is handed on, and what its flag will
    hold then; third: that of the third share, None if there is none. 0 is nothing."""

    before: gl.tensor
    after: gl.tensor
    place: gl.tensor
    added: gl.tensor
    third: (gl.tensor, gl.constexpr)


@gluon.jit
def no_turn(C: gl.constexpr):
    """The Turn before the first tile; () if there is no order."""
    none = gl.to_tensor(0)
    if C.order == 0:
        return ()
    elif len(C.share_columns) == 3:
        return Turn(none, none, none, none, none)
    else:
        return Turn(none, none, none, none, None)


@gluon.jit
def turn_of(tile, neighbour, turn):
    """The Turn with this tile as the one whose dQ comes next."""
    waits = (tile >= neighbour.begin) & (tile < neighbour.end)
    return Turn(gl.where(waits, neighbour.before, 0), neighbour.number, turn.place, turn.added, turn.third)


@gluon.jit
def added(place, third, turn, C: gl.constexpr):
    """The Turn when dQ has been added at a place; third: whether this group has added the third share, too."""
    if C.order == 0:
        return turn
    elif turn.third is None:
        return Turn(turn.before, turn.after, place, turn.after, None)
    else:
        return Turn(turn.before, turn.after, place, turn.after, gl.where(third, turn.after, 0))


@gluon.jit
def hand_on(w: gl.constexpr, K, turn):
    """Raise the flags of what this group added last, which all its threads know to be over; returned is the Turn then."""
    none = gl.to_tensor(0)
    if K.C.order == 0:
        return turn
    else:
        raise_flag(flag_of(turn.place, K), turn.added)
        if turn.third is None:
            return Turn(turn.before, turn.after, none, none, None)
        else:
            raise_flag(flag_of(turn.place + (2 - w) * 64, K), turn.third)
            return Turn(turn.before, turn.after, none, none, none)


@gluon.jit
def flag_of(place, K):
    """Where the flag of a place of dQ is."""
    return K.outputs.flags + place // UNITS
