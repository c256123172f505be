"""What the Hopper forward runs with, and what that costs in shared memory and registers."""

from __future__ import annotations

from dataclasses import dataclass

from strobe.problem import AttentionProblem

ROWS_PER_GROUP = 64
"""Query rows of a consumer warpgroup: the M of a wgmma."""

_BARRIER = 8


@dataclass(frozen=True)
class Config:
    """head_dim: of q, k and v. groups: consumer warpgroups, 64 query rows each. tile_kv: keys a block.
    num_stages: blocks in the ring of K and in that of V. turns: groups take turns at the tensor cores."""

    head_dim: int
    groups: int
    tile_kv: int
    num_stages: int
    turns: bool

    @property
    def tile_q(self) -> int:
        return self.groups * ROWS_PER_GROUP

    def smem_bytes(self) -> int:
        """Q and the two rings, in 2-byte elements, and 8 bytes a barrier; O leaves through Q's buffer."""
        tiles = 2 * self.head_dim * (self.tile_q + 2 * self.num_stages * self.tile_kv)
        barriers = _BARRIER * (self.groups + 4 * self.num_stages)
        return tiles + barriers

    def registers(self) -> tuple[int, int]:
        """Registers a thread that a consumer and the producer set for themselves (setmaxnreg)."""
        return (240, 24) if self.groups == 2 else (160, 24)


def choose(problem: AttentionProblem) -> Config:
    """The config for a problem."""
    head_dim = problem.head_dim
    if head_dim == 256:
        return Config(head_dim, groups=2, tile_kv=64, num_stages=2, turns=False)
    if head_dim == 128:
        return Config(head_dim, groups=2, tile_kv=128, num_stages=2, turns=True)
    return Config(head_dim, groups=3, tile_kv=128, num_stages=3, turns=True)
