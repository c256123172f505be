"""What the Hopper forward to few keys runs with, which problems it takes, and what it costs in shared memory and registers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from strobe.kernels.common.refusals import changed_scores_refused
from strobe.kernels.memory_map import Buffer, total_bytes
from strobe.kernels.sm90.config import ROWS_PER_GROUP, SMS, Chunks, chunked
from strobe.problem import AttentionProblem, Dense

_PARTS = ((64,), (64, 16), (64, 32), (128,), (128, 16), (128, 32), (128, 64), (128, 64, 16))
"""Parts in which keys come: powers of two."""

_KEYS_OF_BOX, _SWIZZLE = 64, 128
"""Keys that the TMA copies at a time, and bytes of a row that it swizzles."""

MOST = 272
"""Keys and columns of V together, of which a thread holds scores and O: more of them leave a multiprocessor too few CTAs.
64 x 256 tokens, 12 heads of 64 columns: 48.9 us, in blocks of 128 keys 46.4. On an H100."""

_THREADS, _REGISTERS = 128, 65536
_SMEM_OF_SM, _RESERVED = 233472, 1024
"""Bytes of a multiprocessor, and how many of them each of its CTAs takes beside its own."""


@dataclass(frozen=True)
class ShortConfig(Chunks):
    """How the kernel for few keys runs.

    parts: how many keys come together.
    q_stages: tiles of Q that are here or on their way.
    most_ctas: of a multiprocessor, if memory allows them.
    """

    parts: tuple[int, ...]
    q_stages: int = 1
    most_ctas: int = 4

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

    def first(self, part: int) -> int:
        """The first key of a part."""
        return sum(self.parts[:part])

    def box(self, wide: int) -> int:
        """Keys that the TMA copies at a time, of chunks `wide` columns wide; those of a smaller part at once. What rows have
        beyond the width of a swizzle lies behind all rows of a part: such a part is one box."""
        return self.parts[0] if 2 * wide > _SWIZZLE else _KEYS_OF_BOX

    def rest(self, wide: int) -> int:
        """Keys of the last part, if these are less than a box, else a box."""
        return min(self.box(wide), self.parts[-1])

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor."""
        return min(self.most_ctas, _SMEM_OF_SM // (self.smem_bytes() + _RESERVED))

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that as many CTAs find room."""
        return min(255, _REGISTERS // (_THREADS * self.ctas) // 8 * 8)

    @property
    def q_bytes(self) -> int:
        """Bytes of a tile of Q."""
        return 2 * ROWS_PER_GROUP * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.keys * (self.head_dim + self.head_dim_v)

    def smem_map(self) -> list[Buffer]:
        """The buffers of a CTA: in 2-byte elements, and 8 bytes a barrier."""
        buffers = {
            "sQ": (self.q_stages, ROWS_PER_GROUP, self.head_dim),
            "sK": (self.keys, self.head_dim),
            "sV": (self.keys, self.head_dim_v),
            "sO": (ROWS_PER_GROUP, self.head_dim_v),
        }
        return [
            *(Buffer(name, shape, 2 * math.prod(shape)) for name, shape in buffers.items()),
            Buffer("barriers", (1 + self.q_stages,), 8 * (1 + self.q_stages)),
        ]

    def smem_bytes(self) -> int:
        """The sum of `smem_map`."""
        return total_bytes(self.smem_map())

    def __str__(self) -> str:
        kib = self.smem_bytes() / 1024
        return (
            f"dims {self.head_dim}, {self.head_dim_v}, tile {self.tile_q} x {self.tile_kv}, all keys at once, "
            f"{self.ctas} CTAs a multiprocessor, {self.q_stages} stages of Q, {kib:.0f} KiB shared memory each"
        )


def takes(problem: AttentionProblem) -> bool:
    """Whether the kernel for few keys runs a forward: plain scores, dense, all keys seen, which registers and memory hold."""
    few = isinstance(problem.lengths, Dense) and 0 < problem.lengths.seqlen_kv <= sum(_PARTS[-1])
    plain = problem.mask.band == (None, None, None) and not changed_scores_refused(problem)
    return few and plain and _fits(choose(problem))


def _fits(config: ShortConfig) -> bool:
    sizes = {config.parts[0], config.parts[-1]}  # of boxes, for wide rows
    boxes = 2 * max(config.wide, config.wide_v) <= _SWIZZLE or set(config.parts) <= sizes
    return boxes and config.keys + config.head_dim_v <= MOST and config.ctas >= 2


def choose(problem: AttentionProblem) -> ShortConfig:
    """The config of a problem that the kernel takes; measured on an H100. Four CTAs and one stage of Q: 8 x 1024 x 77, 8 heads
    of 80 columns, 9.9 us, with two stages 12.1. Where CTAs have a head each, and few tiles, two stages if they cost no CTA:
    128 x 77 x 77, 12 heads of 64, 23.3, with one 27.2. Rows of less than 128 bytes take longer if many are on their way: two
    CTAs and two stages, 8 x 4096 x 77, 8 heads of 40, 24.5, with four CTAs 31.9, and of one stage 27.4."""
    parts = next(parts for parts in _PARTS if sum(parts) >= problem.lengths.seqlen_kv)
    one = ShortConfig(chunked(problem.head_dim), chunked(problem.head_dim_v), parts)
    two = replace(one, q_stages=2)
    if max(problem.head_dim, problem.head_dim_v) < 64:
        return replace(two, most_ctas=2)
    many = problem.lengths.batch * problem.heads_q > one.ctas * SMS
    return two if many and two.ctas == one.ctas else one


def tiles_of_a_cta(config: ShortConfig, tiles: int, heads: int, sms: int) -> int:
    """How many of a head's tiles a CTA goes through, so that all CTAs find room at once, or a head has one."""
    parts = max(1, config.ctas * sms // heads)
    return -(-tiles // parts)
