"""What another kernel leaves to the decode kernel: blocks of rows that it noted.

The Hopper forward over a cache (`kernels.sm90.pages`) goes ahead, and notes the 64 rows of a head whose results are not to be
trusted: the optimistic softmax left its range, or a page was not there. If there is a note the decode kernel computes the tiles
that have one, and its last CTA sets all notes back to 0.
"""

from strobe.kernels import workspace
from strobe.kernels.gluon import aggregate, gl, gluon, partition_barrier

NOTED_ROWS = gl.constexpr(64)
AT_ONCE = gl.constexpr(1024)
NOTED, ENDED, REDONE = gl.constexpr(workspace.NOTED), gl.constexpr(workspace.ENDED), gl.constexpr(4)
"""Where in the workspace's counters it stands whether a block is noted, how many CTAs have looked at the notes and ended, and
how many blocks were computed again."""


@aggregate
class Notes:
    """notes: int32 [batch, heads, blocks of rows]; counters: of the workspace."""

    notes: gl.tensor
    counters: gl.tensor


@gluon.jit
def is_noted(notes, batch, kv_heads, head, first_row, queries, n_q, C: gl.constexpr, GROUP: gl.constexpr):
    """Whether a tile of the rows that share a key head has a note. n_q: the most queries of a request."""
    noted = queries < 0
    blocks = (n_q + NOTED_ROWS - 1) // NOTED_ROWS
    last = gl.minimum(first_row + C.rows, queries * GROUP) - 1
    for block in range(first_row // GROUP // NOTED_ROWS, last // GROUP // NOTED_ROWS + 1):
        for i in range(GROUP):
            note = ((batch * kv_heads + head) * GROUP + i) * blocks + block
            noted = noted | (gl.load(notes.notes + note) != 0)
    return noted


@gluon.jit
def forget(notes, number, warps: gl.constexpr):
    """Set all notes back to 0, so many, if this is the last CTA to end."""
    partition_barrier()  # everybody has looked at them
    if gl.atomic_add(notes.counters + ENDED, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        lane = gl.arange(0, AT_ONCE, gl.BlockedLayout([4], [32], [warps], [0]))
        redone = number * 0
        for first in range(0, number, AT_ONCE):
            at = notes.notes + first + lane
            redone += gl.sum(gl.load(at, mask=first + lane < number, other=0), 0)
            gl.store(at, gl.zeros_like(lane), mask=first + lane < number)
        gl.atomic_add(notes.counters + REDONE, redone)
        gl.store(notes.counters + NOTED, 0)
        gl.store(notes.counters + ENDED, 0)
