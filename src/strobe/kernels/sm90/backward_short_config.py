"""What the Hopper backward to few keys runs with, which problems it takes, and what it costs in shared memory and registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strobe.kernels.sm90.config import ROWS_PER_GROUP
from strobe.kernels.sm90.few_keys import FewKeys, plain_to_few_keys
from strobe.problem import AttentionProblem

_PARTS = ((64,), (64, 16), (64, 32), (128,))
"""Parts in which keys come: powers of two."""

_AT_ONCE = 160
"""Registers of a thread that take what is loaded of shares."""


@dataclass(frozen=True)
class ShortBackwardConfig(FewKeys):
    """How the kernel for few keys runs; results with a row for each column are computed 64 rows at a time."""

    stages: int = 2
    most_ctas: int = 2

    @property
    def share_numbers(self) -> int:
        """Numbers of a CTA's share of a head's dK and dV."""
        return self.keys * (self.head_dim + self.head_dim_v)

    @property
    def at_once(self) -> int:
        """Shares that are loaded at a time, of dK or of dV: as many as registers hold."""
        return max(1, _AT_ONCE * 32 * self.warps // (self.keys * max(self.head_dim, self.head_dim_v)))

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of Q and dO."""
        return 2 * ROWS_PER_GROUP * (self.head_dim + self.head_dim_v)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "sQ": (self.stages, ROWS_PER_GROUP, self.head_dim),
            "sdO": (self.stages, ROWS_PER_GROUP, self.head_dim_v),
            "sK": (self.keys, self.head_dim),
            "sV": (self.keys, self.head_dim_v),
            "sP": (ROWS_PER_GROUP, self.keys),
            "sdS": (ROWS_PER_GROUP, self.keys),
            "sdQ": (ROWS_PER_GROUP, self.head_dim),
        }


def takes(problem: AttentionProblem) -> bool:
    """Whether the kernel for few keys runs a backward: plain scores, dense, all keys seen, which memory holds."""
    return plain_to_few_keys(problem, sum(_PARTS[-1])) and max(problem.head_dim, problem.head_dim_v) <= 128


def choose(problem: AttentionProblem) -> ShortBackwardConfig:
    """The config of a problem that the kernel takes: four warps where their registers hold the sums, and two CTAs. Measured on
    an H100, microseconds, 8 x 4096 x 77, 10 heads of 64 columns: two CTAs of four warps 64.1, of eight 75.3, one CTA of four
    75.9, of eight 88.6, and the backward for any number of keys 218. With three stages 64.1, too; 8 heads of 40 columns, 49.9,
    with two 47.5."""
    parts = next(parts for parts in _PARTS if sum(parts) >= problem.lengths.seqlen_kv)
    head_dim, head_dim_v = (64 if dim <= 64 else 128 for dim in (problem.head_dim, problem.head_dim_v))
    small = max(head_dim, head_dim_v) == 64 and sum(parts) <= 96
    warps, ctas = (4, 2) if small else (8, 1)
    return ShortBackwardConfig(head_dim, head_dim_v, parts, warps, most_ctas=ctas)


def tiles_of_a_cta(config: ShortBackwardConfig, tiles: int, heads: int, sms: int) -> int:
    """How many of a key head's tiles a CTA goes through: so that all CTAs find room at once, and not so few that to add up the
    shares of many CTAs takes longer than their tiles. On an H100, microseconds, head dim 64, of one head's 256 tiles 4, 8, 16 a
    CTA: 32.4, 25.9, 29.9; of 64 tiles 1, 4, 16: 28.5, 15.4, 24.5; 10 heads, of 16 tiles each 1, 2, 4: 18.3, 10.8, 10.7."""
    ctas = min(config.ctas * sms // heads, math.isqrt(2 * tiles))
    return -(-tiles // max(1, ctas))
