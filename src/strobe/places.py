"""Where the rows and keys of a shard stand in the whole sequence.

A shard of a sequence is at most two pieces of it, in order, one behind the other: rows 0 .. cut - 1 of the shard are rows
near .. near + cut - 1 of the sequence, and its later rows i are rows i + far. So a position is one comparison and one addition,
positions grow with the rows, and a range of positions is a range of rows. One launch then attends from any shard to any other.

The two functions are plain arithmetic, as those of `strobe.masks`: kernels compile the same source.
"""

from __future__ import annotations

from typing import NamedTuple


def position_of(i, cut, near, far):
    """The row of the sequence that row i of a shard is."""
    return i + near + (i >= cut) * (far - near)


def number_before(x, n, cut, near, far):
    """How many of a shard's n rows stand before row x of the sequence."""
    return min(max(x - near, 0), cut) + min(max(x - far - cut, 0), n - cut)


class Place(NamedTuple):
    """Where the rows (or keys) of a shard stand: `cut`, `near` and `far` as above, and the length of the whole sequence."""

    cut: int
    near: int
    far: int
    whole: int

    def position(self, i):
        """The row of the sequence that row i, an int or a tensor, of the shard is."""
        return position_of(i, self.cut, self.near, self.far)

    def before(self, x: int, n: int) -> int:
        """How many of the shard's n rows stand before row x of the sequence."""
        return number_before(x, n, self.cut, self.near, self.far)


class Places(NamedTuple):
    """Where the queries and the keys of one batch entry (or packed sequence) stand, and which head its first query head is."""

    q: Place
    kv: Place
    first_head: int = 0

    def numbers(self) -> list[int]:
        """The row of `Operands.places` that says this."""
        return [*self.q, *self.kv, self.first_head]


NUMBERS = 2 * len(Place._fields) + 1
"""Columns of `Operands.places`: int32 [batch, NUMBERS], a row as `Places.numbers` gives it."""


def places_of(numbers: list[int]) -> Places:
    """The Places that a row of `Operands.places` says."""
    side = len(Place._fields)
    return Places(Place(*numbers[:side]), Place(*numbers[side : 2 * side]), numbers[-1])
