"""What the Hopper forward runs with, and what that costs in shared memory and registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strobe.kernels.maps import Buffer, total_bytes
from strobe.problem import AttentionProblem

ROWS_PER_GROUP = 64
"""Query rows of a consumer warpgroup: the M of a wgmma."""

_BARRIER = 8


@dataclass(frozen=True)
class Config:
    """head_dim: of q, k and v. groups: consumer warpgroups, 64 query rows each. tile_kv: keys a block.
    num_stages: blocks in the ring of K, and in that of V."""

    head_dim: int
    groups: int
    tile_kv: int
    num_stages: int

    @property
    def tile_q(self) -> int:
        return self.groups * ROWS_PER_GROUP

    @property
    def consumer_registers(self) -> int:
        """Registers a thread that a consumer sets for itself (setmaxnreg): what 65536 leave beside the producer's."""
        return 240 if self.groups == 2 else 160

    @property
    def producer_registers(self) -> int:
        return 24

    def smem_map(self) -> list[Buffer]:
        """Q and the two rings, in 2-byte elements, and 8 bytes a barrier; O leaves through Q's buffer."""
        barriers = self.groups + 4 * self.num_stages
        buffers = {
            "sQ": (self.groups, ROWS_PER_GROUP, self.head_dim),
            "sK": (self.num_stages, self.tile_kv, self.head_dim),
            "sV": (self.num_stages, self.tile_kv, self.head_dim),
        }
        return [
            *(Buffer(name, shape, 2 * math.prod(shape)) for name, shape in buffers.items()),
            Buffer("sO", buffers["sQ"], 2 * math.prod(buffers["sQ"]), over="sQ"),
            Buffer("barriers", (barriers,), _BARRIER * barriers),
        ]

    def smem_bytes(self) -> int:
        """The sum of `smem_map`. The compiler adds its own scratch (reductions across warps, the hand-over to the warp
        roles), some hundred bytes."""
        return total_bytes(self.smem_map())

    def __str__(self) -> str:
        return (
            f"tile {self.tile_q} x {self.tile_kv}, {self.groups} consumer groups, {self.num_stages} stages, "
            f"{self.smem_bytes() / 1024:.0f} KiB shared memory"
        )


def choose(problem: AttentionProblem) -> Config:
    """The config for a problem.

    Figures: TFLOP/s of the kernel alone, H200, bf16, 16k tokens in all, 2026-11-21, each line from one interleaved run
    that timed `forward.launch` with either Config. `strobe bench` times the one that is chosen.
    """
    head_dim = problem.head_dim
    if head_dim == 256:
        return Config(head_dim, groups=2, tile_kv=64, num_stages=2)  # all that fits
    if head_dim == 128:
        # Full, S = 1024 / 4096: 497 / 615; tile_kv 64 with 3 stages: 437 / 523.
        return Config(head_dim, groups=2, tile_kv=128, num_stages=2)
    if problem.mask.band != (None, None, None) and problem.lengths.seqlen_q < 2048:
        # Causal, S = 1024: 240; 3 groups: 219, too many rows for the few blocks that they see.
        return Config(head_dim, groups=2, tile_kv=128, num_stages=2)
    # Full, S = 1024 / 4096: 357 / 472; 2 groups: 358 / 429. Causal, S = 4096 / 16384: 402 / 502; 2 groups: 380 / 429.
    return Config(head_dim, groups=3, tile_kv=128, num_stages=3)
