"""Tells how sure a ratio of two speeds is: its 95 % interval, and the verdict "ahead", "level" or "behind".

Two contenders of one run took turns, so round i of one and round i of the other saw the same card. Their ratio is estimated by
the mean of the logarithms of these quotients, and its interval is Student's: mean -+ t(n - 1) s / sqrt(n) (Student 1908, "The
probable error of a mean"; for timings Georges, Buytaert and Eeckhout 2007, "Statistically rigorous Java performance
evaluation"). Pairing removes what both rounds share, the card's clock above all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom. For more of them the last one is used, which is a little too
careful."""

SMALLEST = 0.01
"""The smallest difference that counts as ahead or behind. Addresses and order alone change a kernel's speed by about as
much."""

VERDICTS = ("ahead", "level", "behind", "unknown")


@dataclass(frozen=True)
class Ratio:
    """A ratio of speeds, and half the width of its 95 % interval in logarithms; None where a single round tells nothing of
    it."""

    value: float
    half: float | None

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """The Ratio of two lists of speeds by round, of which the longer one is cut. ValueError if there is no round."""
        logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=False)]
        if not logs:
            raise ValueError("a ratio needs a round of each side, got none")
        if len(logs) == 1:
            return cls(math.exp(logs[0]), None)
        t = T95[min(len(logs) - 1, len(T95)) - 1]
        return cls(math.exp(fmean(logs)), t * stdev(logs) / math.sqrt(len(logs)))

    @classmethod
    def over(cls, ratios: Sequence[Ratio]) -> Ratio:
        """The geometric mean of ratios of one run, whose errors are independent. ValueError if there are none."""
        if not ratios:
            raise ValueError("a mean needs a ratio, got none")
        halves = [ratio.half for ratio in ratios]
        half = None if None in halves else math.hypot(*halves) / len(halves)  # type: ignore[arg-type]
        return cls(math.exp(fmean(math.log(ratio.value) for ratio in ratios)), half)

    @property
    def low(self) -> float:
        return 0.0 if self.half is None else self.value * math.exp(-self.half)

    @property
    def high(self) -> float:
        return math.inf if self.half is None else self.value * math.exp(self.half)

    @property
    def verdict(self) -> str:
        """Ahead or behind if the interval leaves 1 out and the ratio differs from 1 by `SMALLEST` at least, else level."""
        if self.half is None:
            return "unknown"
        if self.low > 1 and self.value >= 1 + SMALLEST:
            return "ahead"
        if self.high < 1 and self.value <= 1 - SMALLEST:
            return "behind"
        return "level"

    @property
    def open(self) -> bool:
        """Whether more rounds may change the verdict: the interval is wider than `SMALLEST` to each side, and reaches a border
        of it."""
        return self.half is not None and self.half > SMALLEST and self.low < 1 + SMALLEST and self.high > 1 - SMALLEST

    def __str__(self) -> str:
        """The ratio in words: "1.17 ±0.02", the second number rounded up, or "1.17" where the interval is not known."""
        if self.half is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ±{math.ceil(100 * self.value * math.expm1(self.half) - 1e-9) / 100:.2f}"
