"""What the two Hopper kernels to few keys share: all keys lie in shared memory at once, and CTAs share a multiprocessor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strobe.kernels.common.refusals import changed_scores_refused
from strobe.kernels.derived import Derived
from strobe.kernels.memory_map import Buffer, total_bytes
from strobe.kernels.sm90.config import ROWS_PER_GROUP
from strobe.problem import AttentionProblem, Dense

_REGISTERS = 65536
_SMEM_OF_SM, _RESERVED = 233472, 1024
"""Bytes of a multiprocessor, and how many of them each of its CTAs takes beside its own."""


@dataclass(frozen=True)
class FewKeys(Derived):
    """How a kernel for few keys runs.

    head_dim, head_dim_v: of q and k, and of v; padded.
    parts: how many keys come together: powers of two.
    warps: of a CTA.
    stages: tiles of rows that are here or on their way.
    most_ctas: of a multiprocessor, if memory allows them.
    """

    head_dim: int
    head_dim_v: int
    parts: tuple[int, ...]
    warps: int = 4
    stages: int = 1
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

    @property
    def ctas(self) -> int:
        """CTAs that share a multiprocessor."""
        return min(self.most_ctas, _SMEM_OF_SM // (self.smem_bytes() + _RESERVED))

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that as many CTAs find room."""
        return min(255, _REGISTERS // (32 * self.warps * self.ctas) // 8 * 8)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.keys * (self.head_dim + self.head_dim_v)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The buffers of a CTA, in 2-byte elements."""
        raise NotImplementedError

    def smem_map(self) -> list[Buffer]:
        """The `shapes`, and 8 bytes a barrier: one for the keys, one for each stage."""
        barriers = Buffer("barriers", (1 + self.stages,), 8 * (1 + self.stages))
        return [*(Buffer(name, shape, 2 * math.prod(shape)) for name, shape in self.shapes().items()), barriers]

    def smem_bytes(self) -> int:
        """The sum of `smem_map`."""
        return total_bytes(self.smem_map())

    def __str__(self) -> str:
        kib = self.smem_bytes() / 1024
        return (
            f"dims {self.head_dim}, {self.head_dim_v}, tile {self.tile_q} x {self.tile_kv}, all keys at once, "
            f"{self.ctas} CTAs of {self.warps} warps a multiprocessor, {self.stages} stages, {kib:.0f} KiB shared memory each"
        )


def plain_to_few_keys(problem: AttentionProblem, most: int) -> bool:
    """Whether a problem has plain scores of dense tensors, and its rows see all of at most so many keys."""
    few = isinstance(problem.lengths, Dense) and 0 < problem.lengths.seqlen_kv <= most
    return few and problem.mask.band == (None, None, None) and not changed_scores_refused(problem)
