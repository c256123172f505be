"""What the Hopper forward to few keys runs with, which problems it takes, and what it costs in shared memory and registers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strobe.kernels.sm90.config import ROWS_PER_GROUP, SMS, Chunks, chunked
from strobe.kernels.sm90.few_keys import FewKeys, plain_to_few_keys
from strobe.problem import AttentionProblem

_PARTS = ((64,), (64, 16), (64, 32), (128,), (128, 16), (128, 32), (128, 64), (128, 64, 16))
"""Parts in which keys come: powers of two."""

_KEYS_OF_BOX, _SWIZZLE = 64, 128
"""Keys that the TMA copies at a time, and bytes of a row that it swizzles."""

MOST = 272
"""Keys and columns of V together, of which a thread holds scores and O: more of them leave a multiprocessor too few CTAs.
64 x 256 tokens, 12 heads of 64 columns: 48.9 us, in blocks of 128 keys 46.4. On an H100."""


@dataclass(frozen=True)
class ShortConfig(FewKeys, Chunks):
    """How the kernel for few keys runs."""

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
    def q_bytes(self) -> int:
        """Bytes of a tile of Q."""
        return 2 * ROWS_PER_GROUP * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "sQ": (self.stages, ROWS_PER_GROUP, self.head_dim),
            "sK": (self.keys, self.head_dim),
            "sV": (self.keys, self.head_dim_v),
            "sO": (ROWS_PER_GROUP, self.head_dim_v),
        }


def takes(problem: AttentionProblem) -> bool:
    """Whether the kernel for few keys runs a forward: plain scores, dense, all keys seen, which registers and memory hold."""
    return plain_to_few_keys(problem, sum(_PARTS[-1])) and _fits(choose(problem))


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
    two = replace(one, stages=2)
    if max(problem.head_dim, problem.head_dim_v) < 64:
        return replace(two, most_ctas=2)
    many = problem.lengths.batch * problem.heads_q > one.ctas * SMS
    return two if many and two.ctas == one.ctas else one


def tiles_of_a_cta(config: ShortConfig, tiles: int, heads: int, sms: int) -> int:
    """How many of a head's tiles a CTA goes through, so that all CTAs find room at once, or a head has one."""
    parts = max(1, config.ctas * sms // heads)
    return -(-tiles // parts)
