"""The range in which the sums of an optimistic softmax may be trusted: docs/optimistic_softmax.md proves it."""

from typing import NamedTuple


class Bounds(NamedTuple):
    """What a row must keep, given what P is rounded to.

    most: a row sum is below.
    least: the row sum of a row that its first block judged is at least this much.
    least_by_key: that of any other is at least this much times the number of keys that the row sees.
    """

    most: float
    least: float
    least_by_key: float


BOUNDS = {
    "bfloat16": Bounds(most=2.0**120, least=0.5, least_by_key=2.0**-100),
    "float16": Bounds(most=2.0**120, least=0.5, least_by_key=2.0**-14),
}
