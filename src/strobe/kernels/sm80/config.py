"""What the kernels for mma.sync run with, and what that costs in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from strobe.device import Arch
from strobe.kernels.derived import Derived
from strobe.kernels.memory_map import Buffer, total_bytes
from strobe.problem import AttentionProblem

SCRATCH = 1024
"""Bytes of shared memory that the compiler may add, for a maximum over all warps."""

LARGEST = 256
"""The largest head dim."""

LONG = 1024
"""From so many keys on a CTA that a multiprocessor has to itself loses less at its begin and end than it gains between: by what
was measured at 512 and 4096 keys, a tile's time being linear in them, from 709 on."""

ROWS_PADDED = 128
"""Rows of a sequence are rounded up to so many in what the backward's kernels share: a multiple of every tile_q."""


def padded(head_dim: int) -> int:
    """The head dim that the kernels compute with, for one up to 256: columns beyond the given ones are 0."""
    return -(-head_dim // 16) * 16


def _chunks(head_dim: int, widest: int) -> tuple[int, ...]:
    """A padded head dim in parts of 64 or 32 columns, 128 bytes, and for what is left in parts of 32 and 16 columns.

    A tensor of Triton's has a power of two of them. And 128 bytes are all that a swizzle mixes: in wider rows every step of 16
    columns has addresses of its own, which took a third more instructions at head dim 256, and registers of which there are
    too few."""
    rest = head_dim % widest
    return (*(widest,) * (head_dim // widest), *(size for size in (32, 16) if rest & size))


def _firsts(chunks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(chunks[:c]) for c in range(len(chunks)))


@dataclass(frozen=True)
class Chunks(Derived):
    """Head dims, padded, and the chunks of columns that tensors come in. head_dim: of q and k; head_dim_v: of v; itemsize: 2 or
    4 bytes of a number."""

    head_dim: int
    head_dim_v: int
    itemsize: int = field(default=2, kw_only=True)

    @property
    def widest(self) -> int:
        """The most columns of a chunk: of 128 bytes."""
        return 128 // self.itemsize

    @property
    def chunks(self) -> tuple[int, ...]:
        """Columns of each chunk of Q and K."""
        return _chunks(self.head_dim, self.widest)

    @property
    def chunks_v(self) -> tuple[int, ...]:
        """Columns of each chunk of V and O."""
        return _chunks(self.head_dim_v, self.widest)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first column of each chunk of Q and K."""
        return _firsts(self.chunks)

    @property
    def firsts_v(self) -> tuple[int, ...]:
        """The first column of each chunk of V and O."""
        return _firsts(self.chunks_v)


def _shares(rows: int, columns: int, warps: int) -> bool:
    """Whether so many warps have 16 rows and 8 columns each of a product's result."""
    return rows * columns >= 16 * 8 * warps


def _check(config: Config | BackwardConfig, rows: int) -> None:
    """ValueError if there are more than two stages, or if some of the warps of a tile with so many rows for one warp across
    would have none of their own: what two warps hold they would store twice, and read between."""
    if config.stages not in (1, 2):
        raise ValueError(f"stages must be 1 or 2, got {config.stages}")
    if rows < 16 * config.warps:
        raise ValueError(f"each of {config.warps} warps needs 16 rows of its own, got {rows} rows")


@dataclass(frozen=True)
class Config(Chunks):
    """How the forward runs. A CTA computes tile_q rows of one head, each warp 16 or 32 of them, over blocks of tile_kv keys.

    stages: blocks of K, and of V, that are in shared memory at a time, 1 or 2. With one, V is copied while S is computed, and
        the next K beside the softmax.
    q_in_registers: whether a warp keeps its rows of Q in registers, or reads them again for each block.
    across: warps that share rows, 1 or 2. Of two each has half of the keys of S and half of the columns of O, so that it can
        have 32 rows where the head dim is large; P passes through shared memory.
    optimistic: whether the softmax is optimistic (docs/optimistic_softmax.md), or has a running maximum.
    """

    tile_q: int
    tile_kv: int
    warps: int
    stages: int = 1
    q_in_registers: bool = False
    across: int = 1
    optimistic: bool = True

    def __post_init__(self) -> None:
        _check(self, self.tile_q * self.across)
        if self.q_in_registers and self.itemsize != 2:
            raise ValueError("Q stays in registers as 16-bit numbers alone, got float32")

    @property
    def widest(self) -> int:
        """The most columns of a chunk: 32 where all can have as many, as at head dim 96. Addresses differ by constants, which
        leaves registers for blocks of 64 keys, or for Q. At head dims 128 and 256 it lost up to 13 % of the speed."""
        even = self.head_dim % 64 == self.head_dim_v % 64 == 32
        return 32 if even else super().widest

    @property
    def splits(self) -> int:
        """Parts into which the keys of a tile are split: one."""
        return 1

    @property
    def brief(self) -> str:
        """What tells it from others for the same head dims, in few words."""
        held = ", Q in registers" * self.q_in_registers + ", P shared" * (self.across > 1)
        return f"{self.tile_q}x{self.tile_kv}x{self.warps}, stages {self.stages}{held}"

    @property
    def leaves_by_q(self) -> bool:
        """Whether O leaves through the shared memory of Q, whose shape it has; else straight from registers."""
        return self.head_dim == self.head_dim_v

    def smem_map(self) -> list[Buffer]:
        """The buffers of a CTA."""
        shapes = {
            "sQ": (self.tile_q, self.head_dim),
            "sK": (self.stages, self.tile_kv, self.head_dim),
            "sV": (self.stages, self.tile_kv, self.head_dim_v),
            **({"sP": (self.tile_q, self.tile_kv)} if self.across > 1 else {}),
        }
        return [Buffer(name, shape, self.itemsize * math.prod(shape)) for name, shape in shapes.items()]

    def smem_bytes(self) -> int:
        """The sum of `smem_map`. The compiler adds its own scratch, some bytes a warp."""
        return total_bytes(self.smem_map())

    def __str__(self) -> str:
        softmax = "optimistic" if self.optimistic else "safe"
        held = ", Q in registers" * self.q_in_registers + ", P through shared memory" * (self.across > 1)
        return (
            f"dims {self.head_dim}, {self.head_dim_v}, tile {self.tile_q} x {self.tile_kv}, {self.warps} warps, "
            f"{self.stages} stages{held}, {softmax} softmax, {self.smem_bytes() / 1024:.0f} KiB shared memory"
        )


@dataclass(frozen=True)
class BackwardConfig(Chunks):
    """How the backward runs. A CTA takes tile_kv keys of one key head, over tiles of tile_q rows.

    across: warps that share the rows of S^T, dK and dV: 1, or 2 or 4, and P^T passes through shared memory.
    stages: tiles of Q and dO that are in shared memory at a time, 1 or 2.
    parts: of a tile's rows, one after the other, so that a warp has registers for 32 keys of its own beside dK and dV of them.
        Of four warps a multiprocessor has room for two CTAs then, and needs them (see `_fits`).
    with_dq: whether it finds dQ, too, by additions in any order; else the portable kernel does, in one order, and the gradient
        of a bias with it.
    """

    tile_q: int
    tile_kv: int
    warps: int
    across: int = 1
    stages: int = 2
    parts: int = 1
    with_dq: bool = True

    def __post_init__(self) -> None:
        _check(self, self.tile_kv * self.across)
        if ROWS_PADDED % self.tile_q:
            raise ValueError(f"tile_q must divide {ROWS_PADDED}, got {self.tile_q}")
        if self.parts > 1 and self.across > 1:
            raise ValueError(f"rows come in parts where no warps share them, got {self.parts} parts and across={self.across}")
        if not _shares(self.rows, self._least, self.warps):
            raise ValueError(
                f"each of {self.warps} warps needs 16 rows and 8 columns of dQ of its own, "
                f"got {self.rows} rows of {self._least} columns"
            )

    @property
    def brief(self) -> str:
        """What tells it from others for the same head dims, in few words."""
        shared = ", P shared" * (self.across > 1) + f" by {self.across}" * (self.across > 2)
        parts = f", {self.parts} parts" * (self.parts > 1)
        return f"{self.tile_q}x{self.tile_kv}x{self.warps}, stages {self.stages}{parts}{shared}"

    @property
    def rows(self) -> int:
        """Rows of a part."""
        return self.tile_q // self.parts

    @property
    def apart(self) -> bool:
        """Whether tiles that are seen whole have a step of their own in the backward's loop. Causal, 4k, head dims 64, 96, 128
        and 256: 5, 6, 5 and -4 % of the speed."""
        return self.itemsize == 2 and max(self.head_dim, self.head_dim_v) <= 128

    @property
    def piece(self) -> int:
        """The most columns of dQ that are added to the accumulator at a time, where no mask is: 32, between the products of the
        others, from head dims 128 on; else a chunk, after all products. Full, 16k, head dims 128 and 256: 7 and 8 % of the
        speed, by chunks 4 and 7, at head dim 96 -1; under a causal mask -2."""
        return 32 if self.itemsize == 2 and self.head_dim > 96 else self.widest

    @property
    def across_q(self) -> int:
        """Warps beside each other in a tile of dQ: so many that each has 32 rows, unless a chunk has too few columns."""
        return min(self.warps, self.warps * 32 // self.tile_q, self._least // 8)

    @property
    def _least(self) -> int:
        """The fewest columns of dQ that are a product by themselves."""
        return min(*self.chunks, self.piece)

    def smem_map(self) -> list[Buffer]:
        """The buffers of a CTA; the statistics are float32."""
        shapes = {
            "sK": (self.tile_kv, self.head_dim),
            "sV": (self.tile_kv, self.head_dim_v),
            "sQ": (self.stages, self.tile_q, self.head_dim),
            "sdO": (self.stages, self.tile_q, self.head_dim_v),
            "sdS": (self.parts, self.tile_kv, self.rows),
            **({"sP": (self.tile_kv, self.tile_q)} if self.across > 1 else {}),
        }
        return [
            *(Buffer(name, shape, self.itemsize * math.prod(shape)) for name, shape in shapes.items()),
            Buffer("statistics", (self.stages, 2, self.tile_q), 4 * self.stages * 2 * self.tile_q),
        ]

    def smem_bytes(self) -> int:
        """The sum of `smem_map`. The compiler adds its own scratch."""
        return total_bytes(self.smem_map())

    def __str__(self) -> str:
        shared = f" in {self.parts} parts" * (self.parts > 1) + ", P through shared memory" * (self.across > 1)
        shared += "" if self.with_dq else ", dQ by the portable kernel"
        return (
            f"dims {self.head_dim}, {self.head_dim_v}, tile {self.tile_q} x {self.tile_kv}, {self.warps} warps{shared}, "
            f"{self.stages} stages, {self.smem_bytes() / 1024:.0f} KiB shared memory"
        )


# ---- which configs there are

_TILES: dict[int, tuple[tuple, ...]] = {
    64: ((128, 64, 4, 2, True), (128, 64, 4, 2), (64, 64, 4, 2, True)),
    96: ((128, 32, 4, 2), (128, 32, 4, 2, True), (128, 64, 4, 2), (128, 64, 4), (64, 64, 4, 2)),
    128: ((128, 32, 4, 2), (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1, True)),
    192: ((64, 64, 4, 1, False, 2), (64, 64, 4), (128, 64, 8), (64, 32, 4, 2)),
    256: ((64, 64, 4, 1, False, 2), (128, 64, 8, 1, False, 2), (64, 32, 4, 2, False, 2), (64, 64, 4), (64, 32, 4, 2)),
}
"""Largest head dim -> (tile_q, tile_kv, warps, stages, q_in_registers, across) worth timing, the best first. A warp with
32 rows reads K and V from shared memory half as often as one with 16, but has registers for few keys beside them; from head dim
192 on O alone would take all registers, so two warps share the rows."""


_TILES_FP32: dict[int, tuple[tuple, ...]] = {
    64: ((64, 64, 4), (64, 32, 4, 2), (64, 32, 4)),
    128: ((64, 32, 4), (64, 16, 4, 2), (64, 32, 4, 2)),
    256: ((64, 16, 4), (64, 32, 4)),
}
"""The same for float32, whose products take three instructions and registers for both parts of each operand."""


def candidates(problem: AttentionProblem, arch: Arch) -> list[Config]:
    """The configs that are worth timing on an arch, the best first: those that its shared memory holds."""
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    table = _TILES_FP32 if problem.dtype.itemsize == 4 else _TILES
    widest = next(dim for dim in table if dim >= max(dims))
    size, optimistic = problem.dtype.itemsize, may_be_optimistic(problem)
    found = [replace(Config(*dims, *tile), itemsize=size, optimistic=optimistic) for tile in table[widest]]
    lengths, whole = problem.lengths, problem.mask.band == (None, None, None) and not problem.mask.by_pair
    if widest == LARGEST and whole and lengths.seqlen_kv >= LONG:  # 5 % faster and more; causal, 5 % slower and more
        found.sort(key=lambda config: -config.tile_q)
    if (
        dims == (96, 96) and size == 2
    ):  # whole, 64 keys are 3 to 5 % faster than Q in registers; causal, at 512 tokens, 8 % slower
        found.sort(key=lambda config: (-config.tile_kv, not _twice(config, arch)) if whole else (not config.q_in_registers,))
    tiles = -(-lengths.seqlen_q // found[0].tile_q) * lengths.batch * problem.heads_q
    if tiles <= arch.sms:  # one each at most, and room for two of half the rows; not timed yet
        found.sort(key=lambda config: config.tile_q)
    if not optimistic:  # a running maximum of two warps' keys is two more barriers a block
        found.sort(key=lambda config: config.across)
    return [config for config in found if config.smem_bytes() + SCRATCH <= arch.smem_per_block]


def choose(problem: AttentionProblem, arch: Arch) -> Config:
    return candidates(problem, arch)[0]


_BACKWARD_TILES: dict[int, tuple[tuple, ...]] = {
    64: ((64, 128, 4, 1, 2, 2), (128, 128, 8, 2), (128, 128, 8, 4), (64, 128, 8), (64, 128, 8, 2), (64, 64, 4)),
    96: ((64, 128, 8, 2), (64, 128, 8), (64, 64, 4), (64, 64, 4, 1, 1)),
    128: ((64, 128, 8, 2), (64, 128, 8), (64, 64, 8, 2), (64, 64, 4, 1, 1)),
    256: ((64, 64, 8, 4), (64, 64, 8, 2), (64, 64, 8, 4, 1), (64, 64, 8, 2, 1), (32, 32, 4, 2, 1)),
}
"""Largest head dim -> (tile_q, tile_kv, warps, across, stages, parts) worth timing, the best guess first."""


_BACKWARD_TILES_FP32: dict[int, tuple[tuple, ...]] = {
    64: ((32, 64, 4, 1, 2), (32, 64, 4, 1, 1)),
    128: ((32, 64, 8, 2, 1), (32, 32, 4, 2, 1), (16, 64, 4, 1, 1)),
    256: ((32, 64, 8, 2, 1), (16, 32, 4, 2, 1), (32, 32, 4, 2, 1)),
}
"""The same for float32."""


def backward_candidates(problem: AttentionProblem, arch: Arch) -> list[BackwardConfig]:
    """The configs of a backward that are worth timing on an arch, the best guess first: those that its shared memory holds, and
    whose warps all have a part of dQ. There may be none for float32."""
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    table = _BACKWARD_TILES_FP32 if problem.dtype.itemsize == 4 else _BACKWARD_TILES
    tiles = table[next(dim for dim in table if dim >= max(dims))]
    with_dq, size = not problem.deterministic and "bias" not in problem.learned, problem.dtype.itemsize
    least = min(_chunks(dims[0], 128 // size))
    found = [
        replace(BackwardConfig(*dims, *tile, itemsize=size), with_dq=with_dq)
        for tile in tiles
        if _shares(tile[0], least, tile[2])
    ]
    lengths = problem.lengths
    if found and -(-lengths.seqlen_kv // found[0].tile_kv) * lengths.batch * problem.heads_kv <= arch.sms:
        found.sort(key=lambda config: config.parts)  # of CTAs without a neighbour, those of eight warps are 5 % faster
    return [config for config in found if _fits(config, arch)]


def _fits(config: BackwardConfig, arch: Arch) -> bool:
    """Whether the shared memory of an arch holds a config: where rows come in parts, of two CTAs a multiprocessor, one of which
    multiplies while the other takes exponentials."""
    return config.smem_bytes() + SCRATCH <= arch.smem_per_block and (config.parts == 1 or _twice(config, arch))


def _twice(config: Config | BackwardConfig, arch: Arch) -> bool:
    """Whether the shared memory of a multiprocessor holds two CTAs."""
    return 2 * (config.smem_bytes() + arch.smem_reserved) <= arch.smem_per_sm


def choose_backward(problem: AttentionProblem, arch: Arch) -> BackwardConfig:
    return backward_candidates(problem, arch)[0]


def may_be_optimistic(problem: AttentionProblem) -> bool:
    """Whether a tile's first block is likely to say how large its scores are: functions, biases and slopes may put what counts
    anywhere."""
    score, mask = problem.score, problem.mask
    return score.alibi is None and score.bias is None and score.function is None and mask.function is None


def origin(problem: AttentionProblem) -> str:
    """Where the config comes from, in words."""
    if problem.dtype.itemsize == 2 and max(padded(problem.head_dim), padded(problem.head_dim_v)) in MEASURED:
        return "by what was measured on Hopper"
    return "guessed from what the compiler makes of it, not measured yet"


MEASURED = 64, 96, 128, 256
"""Head dims that configs were timed at (docs/ampere.md)."""
