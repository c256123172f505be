"""Tiles, warps and stages of the portable kernels, from the head dim, the dtype and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from strobe.device import Arch
from strobe.problem import AttentionProblem


@dataclass(frozen=True)
class Config:
    """How one kernel runs. A program owns tile_q rows and streams tiles of tile_kv keys, or (dK, dV) the other way round."""

    tile_q: int
    tile_kv: int
    num_warps: int
    num_stages: int
    kernel: str = "forward"
    """"forward", "dq" or "dkdv"."""
    head_dim: int = 128
    """Padded to a power of two that the tensor core takes, as is head_dim_v."""
    head_dim_v: int = 128
    itemsize: int = 2

    def smem_bytes(self) -> int:
        """An upper bound of a program's shared memory: the tiles it owns, the stages it streams, P (and dS)."""
        both = self.head_dim + self.head_dim_v
        owned, streamed = (self.tile_kv, self.tile_q) if self.kernel == "dkdv" else (self.tile_q, self.tile_kv)
        scores = self.tile_q * self.tile_kv * (1 if self.kernel == "forward" else 2)
        return (owned * both + self.num_stages * streamed * both + scores) * self.itemsize


@dataclass(frozen=True)
class BackwardConfig:
    """The backward's two kernels."""

    dkdv: Config
    dq: Config


def padded(head_dim: int) -> int:
    """The next power of two from 16 on: what a Triton tensor and a tensor core take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def config(problem: AttentionProblem, arch: Arch) -> Config | BackwardConfig:
    """What a problem runs with on an arch."""
    if problem.phase == "backward":
        return BackwardConfig(dkdv=choose("dkdv", problem, arch), dq=choose("dq", problem, arch))
    return choose("forward", problem, arch)


def choose(kernel: str, problem: AttentionProblem, arch: Arch) -> Config:
    """The first (largest) candidate whose shared memory an arch has; on a CPU small tiles, so that there are several."""
    dims = dict(head_dim=padded(problem.head_dim), head_dim_v=padded(problem.head_dim_v), itemsize=problem.dtype.itemsize)
    if not arch.is_gpu:
        return Config(64, 32, 4, 1, kernel, **dims)
    candidates = [replace(candidate, **dims) for candidate in _candidates(kernel, problem)]
    return next((c for c in candidates if c.smem_bytes() <= arch.smem_per_block), candidates[-1])


def _candidates(kernel: str, problem: AttentionProblem) -> Iterator[Config]:
    """Largest first: the stages go before the tiles."""
    widest = padded(max(problem.head_dim, problem.head_dim_v))
    for tile_q, tile_kv, num_warps in _tiles(kernel, widest, problem.dtype.itemsize == 4):
        for num_stages in (3, 2, 1):
            yield Config(tile_q, tile_kv, num_warps, num_stages, kernel)


def _tiles(kernel: str, widest: int, float32: bool) -> list[tuple[int, int, int]]:
    """(tile_q, tile_kv, num_warps): accumulators, which are float32, must stay in the registers of the warps."""
    if float32:
        # No tensor core: products are unrolled into multiply-adds, so a tile costs instructions as well as registers.
        return [(32, 32, 4), (32, 16, 4), (16, 16, 4)] if widest <= 128 else [(16, 16, 4)]
    if widest > 128:
        return (
            [(32, 64, 8), (32, 32, 4), (16, 16, 4)]
            if kernel == "dkdv"
            else [(64, 64, 8), (64, 32, 8), (32, 32, 4), (16, 16, 4)]
        )
    if kernel == "dkdv":
        return [(64, 128, 8), (32, 64, 4), (32, 32, 4), (16, 16, 4)]
    return [(128, 64, 8), (64, 32, 4), (32, 32, 4), (16, 16, 4)]
