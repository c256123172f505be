"""What the Hopper backward to few keys runs with, which problems it takes, and what it costs in shared memory and registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strobe.kernels.common.refusals import changed_scores_refused
from strobe.kernels.derived import Derived
from strobe.kernels.memory_map import Buffer, total_bytes
from strobe.kernels.sm90.config import ROWS_PER_GROUP
from strobe.problem import AttentionProblem, Dense

_PARTS = ((64,), (64, 16), (64, 32), (128,))
"""Parts in which keys come: powers of two."""

_REGISTERS = 65536
_AT_ONCE = 160
"""Registers of a thread that take what is loaded of shares."""

_SMEM_OF_SM, _RESERVED = 233472, 1024
"""Bytes of a multiprocessor, and how many of them each of its CTAs takes beside its own."""


@dataclass(frozen=True)
class ShortBackwardConfig(Derived):
    """How the kernel for few keys runs.

    head_dim, head_dim_v: padded, as results with a row for each column are computed 64 rows at a time.
    parts: how many keys come together.
    warps: of a CTA.
    most_ctas: of a multiprocessor, if memory allows them.
    stages: tiles of Q and dO that are here or on their way.
    """

    head_dim: int
    head_dim_v: int
    parts: tuple[int, ...]
    warps: int = 4
    most_ctas: int = 2
    stages: int = 2

    @property
    def tile_q(self) -> int:
        return ROWS_PER_GROUP

    @property
    def keys(self) -> int:
        return sum(self.parts)

    @property
    def tile_kv(self) -> int:
        """All keys."""
        return self.keys

    @property
    def share_numbers(self) -> int:
        """Numbers of a CTA's share of a head's dK and dV."""
        return self.keys * (self.head_dim + self.head_dim_v)

    @property
    def at_once(self) -> int:
        """Shares that are loaded at a time, of dK or of dV: as many as registers hold."""
        return max(1, _AT_ONCE * 32 * self.warps // (self.keys * max(self.head_dim, self.head_dim_v)))

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor."""
        return min(self.most_ctas, _SMEM_OF_SM // (self.smem_bytes() + _RESERVED))

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that as many CTAs find room."""
        return min(255, _REGISTERS // (32 * self.warps * self.ctas) // 8 * 8)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of Q and dO."""
        return 2 * ROWS_PER_GROUP * (self.head_dim + self.head_dim_v)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.keys * (self.head_dim + self.head_dim_v)

    def smem_map(self) -> list[Buffer]:
        """The buffers of a CTA: in 2-byte elements, and 8 bytes a barrier."""
        buffers = {
            "sQ": (self.stages, ROWS_PER_GROUP, self.head_dim),
            "sdO": (self.stages, ROWS_PER_GROUP, self.head_dim_v),
            "sK": (self.keys, self.head_dim),
            "sV": (self.keys, self.head_dim_v),
            "sP": (ROWS_PER_GROUP, self.keys),
            "sdS": (ROWS_PER_GROUP, self.keys),
            "sdQ": (ROWS_PER_GROUP, self.head_dim),
        }
        return [
            *(Buffer(name, shape, 2 * math.prod(shape)) for name, shape in buffers.items()),
            Buffer("barriers", (1 + self.stages,), 8 * (1 + self.stages)),
        ]

    def smem_bytes(self) -> int:
        """The sum of `smem_map`."""
        return total_bytes(self.smem_map())

    def __str__(self) -> str:
        kib = self.smem_bytes() / 1024
        return (
            f"dims {self.head_dim}, {self.head_dim_v}, tile {self.tile_q} x {self.tile_kv}, all keys at once, "
            f"{self.ctas} CTAs of {self.warps} warps a multiprocessor, {self.stages} stages, {kib:.0f} KiB shared memory each"
        )


def takes(problem: AttentionProblem) -> bool:
    """Whether the kernel for few keys runs a backward: plain scores, dense, all keys seen, which memory holds."""
    few = isinstance(problem.lengths, Dense) and 0 < problem.lengths.seqlen_kv <= sum(_PARTS[-1])
    plain = problem.mask.band == (None, None, None) and not changed_scores_refused(problem)
    return few and plain and max(problem.head_dim, problem.head_dim_v) <= 128


def choose(problem: AttentionProblem) -> ShortBackwardConfig:
    """The config of a problem that the kernel takes: four warps where their registers hold the sums, and two CTAs. Measured on
    an H100, microseconds, 8 x 4096 x 77, 10 heads of 64 columns: two CTAs of four warps 64.1, of eight 75.3, one CTA of four
    75.9, of eight 88.6, and the backward for any number of keys 218. With three stages 64.1, too; 8 heads of 40 columns, 49.9,
    with two 47.5."""
    parts = next(parts for parts in _PARTS if sum(parts) >= problem.lengths.seqlen_kv)
    head_dim, head_dim_v = (64 if dim <= 64 else 128 for dim in (problem.head_dim, problem.head_dim_v))
    small = max(head_dim, head_dim_v) == 64 and sum(parts) <= 96
    return ShortBackwardConfig(head_dim, head_dim_v, parts, *((4, 2) if small else (8, 1)))


def tiles_of_a_cta(config: ShortBackwardConfig, tiles: int, heads: int, sms: int) -> int:
    """How many of a key head's tiles a CTA goes through: so that all CTAs find room at once, and not so few that to add up the
    shares of many CTAs takes longer than their tiles. On an H100, microseconds, head dim 64, of one head's 256 tiles 4, 8, 16 a
    CTA: 32.4, 25.9, 29.9; of 64 tiles 1, 4, 16: 28.5, 15.4, 24.5; 10 heads, of 16 tiles each 1, 2, 4: 18.3, 10.8, 10.7."""
    ctas = min(config.ctas * sms // heads, math.isqrt(2 * tiles))
    return -(-tiles // max(1, ctas))
