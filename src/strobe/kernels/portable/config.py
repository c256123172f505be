"""Tiles, warps and stages of the portable kernels, from the head dim, the dtype and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from strobe.device import Arch
from strobe.masks import BlockFacts
from strobe.problem import AttentionProblem


@dataclass(frozen=True)
class Config:
    """How one kernel runs. A program owns tile_q rows and streams tiles of tile_kv keys; in "dkdv" it is the other way."""

    kernel: str
    """"forward", "redo", "dq" or "dkdv"."""
    tile_q: int
    tile_kv: int
    num_warps: int
    num_stages: int
    head_dim: int
    """Padded to what a Triton tensor can have, as is head_dim_v."""
    head_dim_v: int
    itemsize: int
    """Bytes of an element in shared memory."""
    bias_itemsize: int
    """Bytes of an element of the bias, 0 if there is none."""
    mma: str
    """What products compile to: "fma" (no tensor core), "mma.sync", "wgmma" or "tcgen05"."""

    def smem_bytes(self) -> int:
        """An upper bound of a program's shared memory: tiles that it owns, stages that it streams, P and dS."""
        forward = self.kernel in ("forward", "redo")
        both, wider = self.head_dim + self.head_dim_v, max(self.head_dim, self.head_dim_v)
        rows, streamed_rows = (self.tile_kv, self.tile_q) if self.kernel == "dkdv" else (self.tile_q, self.tile_kv)
        owned = rows * (self.head_dim if forward else both)
        resident = owned
        if self.mma == "mma.sync":  # operands come from registers: a tile that is owned need not stay in shared memory
            resident = 0 if forward else rows * wider
        if self.mma == "tcgen05" and not forward:  # accumulators pass through shared memory
            resident += owned
        # One stage, too, has room for two: the tile and its transpose.
        streamed = max(self.num_stages, 2) * streamed_rows * both
        scores = self.tile_q * self.tile_kv * (1 if forward else 2)
        bias = self.num_stages * self.tile_q * self.tile_kv * self.bias_itemsize
        vectors = 8 * self.num_stages * self.tile_q + 1024
        return max(owned, rows * wider, resident + streamed + scores) * self.itemsize + bias + vectors


@dataclass(frozen=True)
class BackwardConfig:
    """The backward's two kernels over tiles of scores."""

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
    """The first (largest) candidate that an arch's shared memory holds; on a CPU small tiles, so that there are several. Tiles
    divide the blocks of a mask that has some."""
    candidates = list(_candidates(kernel, problem, arch))
    blocks = problem.mask.blocks
    if not arch.is_gpu:
        rows, keys = blocks if isinstance(blocks, BlockFacts) else (64, 32)
        return replace(candidates[0], tile_q=gcd(64, rows), tile_kv=gcd(32, keys), num_stages=1)
    if isinstance(blocks, BlockFacts):
        candidates = [c for c in candidates if blocks.rows % c.tile_q == 0 and blocks.keys % c.tile_kv == 0]
    return next((c for c in candidates if c.smem_bytes() <= arch.smem_per_block), candidates[-1])


def _candidates(kernel: str, problem: AttentionProblem, arch: Arch) -> Iterator[Config]:
    """Largest first: stages go before tiles."""
    head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    mma = _mma(problem, arch)
    if mma == "wgmma" and kernel in ("forward", "redo"):
        # Of rows of V that are narrower than K's and than 128 bytes, the ptxas of CUDA 12.8 (Triton 3.6) makes descriptors from
        # registers that nobody has written (`strobe audit` looks for such code).
        head_dim_v = max(head_dim_v, min(head_dim, 64))
    for tile_q, tile_kv, num_warps in _tiles(kernel, max(head_dim, head_dim_v), mma):
        for num_stages in (3, 2, 1):
            yield Config(
                kernel, tile_q, tile_kv, num_warps, num_stages, head_dim, head_dim_v,
                itemsize=4 if mma == "fma" else problem.dtype.itemsize,
                bias_itemsize=0 if problem.score.bias is None else problem.score.bias.dtype.itemsize,
                mma=mma,
            )  # fmt: skip


def _mma(problem: AttentionProblem, arch: Arch) -> str:
    """Triton has no tensor core instruction for float32 without TF32, nor for Turing."""
    if problem.dtype.itemsize == 4 or arch.capability < 80:
        return "fma"
    return {9: "wgmma", 10: "tcgen05"}.get(arch.capability // 10, "mma.sync")


def _tiles(kernel: str, widest: int, mma: str) -> list[tuple[int, int, int]]:
    """(tile_q, tile_kv, num_warps), chosen so that ptxas spills little or nothing in the loops that users wait for."""
    if mma == "fma":
        # Multiply-adds one by one: a tile costs instructions (and time to compile) as well as registers.
        return [(32, 32, 4), (32, 16, 4), (16, 16, 4)] if widest <= 128 else [(16, 16, 4)]
    if kernel == "dkdv":
        first = (64, 128, 8) if widest <= 64 else (64, 64, 8) if widest <= 128 else (32, 64, 8)
        if mma == "tcgen05" and widest > 128:
            first = (32, 32, 4)  # two accumulators of 64 rows would take all of tensor memory; this one is mma.sync
        return [first, (32, 32, 4), (16, 16, 4)]
    if kernel == "redo":  # one note is one tile
        return [(64, 64, 4 if widest <= 128 else 8), (64, 32, 4), (32, 32, 4), (16, 16, 4)]
    first = (128, 64, 8) if widest <= 128 else (64, 64, 8)
    return [first, (64, 32, 8 if widest > 128 else 4), (32, 32, 4), (16, 16, 4)]
