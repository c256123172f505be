"""The range in which the sums of an optimistic softmax may be trusted: docs/optimistic_softmax.md proves it."""

from typing import NamedTuple


class Bounds(NamedTuple):
    """Bounds that the sum of a row must keep, for one type that P is rounded to.

    most: the sum of any row is below this.
    least: the sum of a row that its first block judged is at least this.
    least_by_key: the sum of any other row is at least this times the number of keys that the row sees.
    """

    most: float
    least: float
    least_by_key: float


BOUNDS = {
    "bfloat16": Bounds(most=2.0**120, least=0.5, least_by_key=2.0**-100),
    "float16": Bounds(most=2.0**120, least=0.5, least_by_key=2.0**-14),
}
