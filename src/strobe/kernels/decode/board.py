"""Pieces of work that one role of a CTA finds, and of which it tells the others.

shared memory   shape                    filled by        read by
numbers         [PIECES * NUMBERS, 1]    the one role     the others

barrier         arrivals                 says
told            the one role             a piece stands on the board, or that there is none any more
heard           one of each other role   it has been read
"""

from strobe.kernels.common.channel import make_barriers
from strobe.kernels.decode.arguments import Job, Piece
from strobe.kernels.decode.layouts import lanes
from strobe.kernels.decode.pieces import take_pieces
from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier

PIECES = gl.constexpr(2)
"""Pieces that stand on the board at once."""
NUMBERS = gl.constexpr(16)
"""Numbers of a piece and its job."""


@aggregate
class Board:
    """See the table above. Pieces count 0, 1, 2, ... over the whole life of a CTA."""

    numbers: gl.shared_memory_descriptor
    told: gl.shared_memory_descriptor
    heard: gl.shared_memory_descriptor


@gluon.jit
def make_board(LISTENERS: gl.constexpr):
    """The caller fences."""
    numbers = gl.allocate_shared_memory(gl.int32, [PIECES * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Board(numbers, make_barriers(PIECES, 1), make_barriers(PIECES, LISTENERS))


@gluon.jit
def tell_of(board, n, piece, job):
    """Tell of the n-th piece."""
    numbers = (
        piece.batch, piece.entry, piece.head, piece.first_row, piece.first_query, piece.queries, piece.length, piece.begin,
        piece.end, job.number, job.parts, job.first, job.begins, job.stretch, job.place, job.patience,
    )  # fmt: skip
    mbarrier.wait(board.heard.index(n % PIECES), n // PIECES & 1 ^ 1)
    for i in gl.static_range(NUMBERS):
        place = board.numbers.index(n % PIECES * NUMBERS + i)
        place.store(gl.full([1], 0, gl.int32, lanes(gl.num_warps())) + numbers[i])
    mbarrier.arrive(board.told.index(n % PIECES), count=1)


@gluon.jit
def tell_of_the_end(board, n):
    """Tell that there is no n-th piece, by a job of no parts."""
    none = gl.to_tensor(0)
    piece = Piece(none, none, none, none, none, none, none, none, none)
    tell_of(board, n, piece, Job(none, none, none, none, none, none, none))


@gluon.jit
def hear(board, n):
    """The n-th piece and its job."""
    mbarrier.wait(board.told.index(n % PIECES), n // PIECES & 1)
    x = ()
    for i in gl.static_range(NUMBERS):
        x += (gl.max(board.numbers.index(n % PIECES * NUMBERS + i).load(lanes(gl.num_warps())), 0),)
    mbarrier.arrive(board.heard.index(n % PIECES), count=1)
    return Piece(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8]), Job(x[9], x[10], x[11], x[12], x[13], x[14], x[15])


@gluon.jit
def take_told(TAKE: gl.constexpr, memory, K, n, state):
    """What `take_pieces` does, with the pieces from the n-th on that stand on the board; which one is told of next, and the
    state."""
    parts = 0 * n + 1
    while parts > 0:
        piece, job = hear(memory.board, n)
        parts = job.parts
        if parts > 0:
            state = TAKE(memory, K, piece, job, state)
        n += 1
    return n, state


@gluon.jit
def take_all(TAKE: gl.constexpr, memory, K, told, state):
    """All pieces of a CTA, found or told of, the first of them as the `told`-th one; see `take_told`."""
    if K.C.tells:
        told, state = take_told(TAKE, memory, K, told, state)
    else:
        state = take_pieces(TAKE, memory, K, state)
    return told, state
