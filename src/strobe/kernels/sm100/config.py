"""What the Blackwell forward runs with, and what that costs in shared memory, tensor memory and registers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from strobe.device import KNOWN
from strobe.kernels.derived import Derived
from strobe.kernels.memory_map import Buffer, Columns, k_major, mn_major, stored, total_bytes
from strobe.problem import AttentionProblem

ROWS_PER_STAGE = 128
"""Query rows of a Q stage in one CTA: the lanes of tensor memory, and the M of a tcgen05.mma (256 by two CTAs)."""

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))
"""Pairs of head_dim and head_dim_v that the kernel takes."""

TMEM_COLUMNS = KNOWN["B200"].tmem_columns
SMEM_BYTES = KNOWN["B200"].smem_per_block

HALF_L2 = 60_000_000
"""Bytes of K and V that a bundle of heads may take: about half of the L2 cache of a B200."""

_BARRIER = 8
_SCRATCH = 768
"""Bytes that the compiler may add: what the warp roles are handed, and their states."""


@dataclass(frozen=True)
class Config(Derived):
    """How the kernel runs.

    head_dim, head_dim_v: of q and k, and of v; one of HEAD_DIMS.
    q_stages: tiles of 128 query rows that a CTA has in flight, each with its own softmax warpgroup.
    tile_kv: keys a block. kv_stages: slots of the one ring that holds blocks of K and V in turn.
    correction: warps of their own rescale and write O; without, the softmax warps do it between their blocks.
    split_p: three quarters of P go to the tensor core while the last is computed.
    emulated: of each 16 exponentials in the middle half of a block, how many are polynomials on the FMA pipe.
    rescale_threshold: O is rescaled once a row maximum has grown by more than this many powers of two; 0: always.
    two_ctas: a pair of CTAs works as one on twice the rows, each holding half of every block of K and V.
    persistent: as many CTAs as fit the GPU take tiles in turn; otherwise a CTA a tile.
    splits: parts of the keys that are attended to separately, to be combined afterwards.
    """

    head_dim: int
    head_dim_v: int
    q_stages: int = 2
    tile_kv: int = 128
    kv_stages: int = 3
    correction: bool = True
    split_p: bool = True
    emulated: int = 4
    rescale_threshold: float = 8.0
    two_ctas: bool = False
    persistent: bool = True
    splits: int = 1

    def __post_init__(self):
        if (self.head_dim, self.head_dim_v) not in HEAD_DIMS:
            raise ValueError(f"head_dim and head_dim_v must be one of {HEAD_DIMS}, got {(self.head_dim, self.head_dim_v)}")
        if self.q_stages not in (1, 2):
            raise ValueError(f"q_stages must be 1 or 2, got {self.q_stages}")
        if self.tile_kv not in (64, 128):
            raise ValueError(f"tile_kv must be 64 or 128, got {self.tile_kv}")
        if self.kv_stages < 2:
            raise ValueError(f"kv_stages must be 2 or more (a block of K beside one of V), got {self.kv_stages}")
        if self.emulated not in (0, 1, 2, 4, 8, 16):
            raise ValueError(f"emulated must be 0, 1, 2, 4, 8 or 16 of 16 exponentials, got {self.emulated}")
        if not 0.0 <= self.rescale_threshold <= 8.0:
            raise ValueError(f"rescale_threshold must be 0 to 8 powers of two, got {self.rescale_threshold}")
        if self.splits < 1:
            raise ValueError(f"splits must be 1 or more, got {self.splits}")
        if self.tmem_columns() > TMEM_COLUMNS:
            raise ValueError(f"tensor memory has {TMEM_COLUMNS} columns, this config needs {self.tmem_columns()}: {self}")
        if self.smem_bytes() > SMEM_BYTES - _SCRATCH:
            raise ValueError(
                f"a CTA has {SMEM_BYTES} bytes of shared memory, {_SCRATCH} of them the compiler's, "
                f"this config needs {self.smem_bytes()}: {self}"
            )

    @property
    def ctas(self) -> int:
        """CTAs that work on one tile together."""
        return 2 if self.two_ctas else 1

    @property
    def rows(self) -> int:
        """Query rows of a Q stage, over its CTAs."""
        return ROWS_PER_STAGE * self.ctas

    @property
    def tile_q(self) -> int:
        """Query rows of a tile: what a CTA, or a pair of them, works on at a time."""
        return self.q_stages * self.rows

    @property
    def chunks(self) -> tuple[int, ...]:
        """head_dim as a sum of powers of two, the sizes that a tensor may have."""
        return _chunks(self.head_dim)

    @property
    def chunks_v(self) -> tuple[int, ...]:
        """head_dim_v as a sum of powers of two."""
        return _chunks(self.head_dim_v)

    @property
    def narrow_stages(self) -> int:
        """Slots for the second chunk of a block: one a slot of the ring, or, if only K has a second chunk, one for each block
        of K among as many blocks in turn as the ring holds."""
        return self.kv_stages if len(self.chunks_v) == 2 else (self.kv_stages + 1) // 2 if len(self.chunks) == 2 else 0

    @property
    def o_in_q(self) -> bool:
        """Whether O leaves through Q's buffer, because one of its own does not fit."""
        return self.head_dim > 128 and self.splits == 1

    @property
    def softmax_registers(self) -> int:
        """Registers a thread of the softmax warps, by setmaxnreg: four warpgroups share 512 a thread."""
        return 192 if self.correction else 224

    @property
    def correction_registers(self) -> int:
        """Registers a thread of the correction warps."""
        return 88

    @property
    def other_registers(self) -> int:
        """Registers a thread of the load, MMA and epilogue warps, which share a warpgroup with the padding warp."""
        return 40

    @property
    def worker_warps(self) -> list[int]:
        """Warps of the roles after softmax0: softmax1, correction, mma, epilogue, load."""
        return [4] * (self.q_stages - 1 + self.correction) + [1, 1, 1]

    @property
    def worker_registers(self) -> list[int]:
        """Registers a thread of the roles after softmax0, in the order of `worker_warps`."""
        softmax = [self.softmax_registers] * (self.q_stages - 1)
        return softmax + [self.correction_registers] * self.correction + [self.other_registers] * 3

    def smem_map(self) -> list[Buffer]:
        """The buffers of one CTA: 16-bit elements, float32 row statistics, 8-byte barriers. Each chunk of a head dim is a
        buffer of its own. K and V take turns in one ring; a CTA of two holds half the rows of K, half the columns of V."""
        rows, keys, q_stages = ROWS_PER_STAGE, self.tile_kv // self.ctas, self.q_stages
        buffers, ring = [], (self.kv_stages, self.narrow_stages)
        for name, chunk in _named("sQ", self.chunks):
            buffers.append(Buffer(name, k_major(rows, chunk, q_stages), 2 * q_stages * rows * chunk))
        for (name, chunk), stages in zip(_named("sK", self.chunks), ring, strict=False):
            buffers.append(Buffer(name, k_major(keys, chunk, stages), 2 * stages * keys * chunk))
        places = [name for name, _ in _named("sK", self.chunks)]
        for (name, chunk), stages, place in zip(_named("sV", self.chunks_v), ring, places, strict=False):
            shape = mn_major(self.tile_kv, chunk // self.ctas, stages)
            buffers.append(Buffer(name, shape, 2 * stages * keys * chunk, over=place))
        for name, chunk in _named("sO", self.chunks_v) if self.splits == 1 else ():  # else it goes straight to global memory
            over = _named("sQ", self.chunks)[0][0] if self.o_in_q else ""
            buffers.append(Buffer(name, stored(rows, chunk, q_stages), 2 * q_stages * rows * chunk, over))
        buffers.append(Buffer("sScale", (q_stages, 2, rows), 4 * q_stages * 2 * rows))
        barriers = 2 * self.kv_stages + 10 * q_stages
        buffers.append(Buffer("barriers", (barriers,), _BARRIER * barriers))
        return buffers

    def tmem_map(self) -> list[Columns]:
        """S, P and O of each stage; P is 16-bit and lies in the second half of its S."""
        stages, s = range(self.q_stages), self.tile_kv
        return [
            *(Columns(f"S{i}", i * s, s) for i in stages),
            *(Columns(f"P{i}", i * s + s // 2, s // 2) for i in stages),
            *(Columns(f"O{i}", self.o_first(i), self.head_dim_v) for i in stages),
        ]

    def o_first(self, stage: int) -> int:
        """The first column of a stage's O, a multiple of the power of two that holds its head_dim_v."""
        return self.q_stages * self.tile_kv + stage * (1 << (self.head_dim_v - 1).bit_length())

    def smem_bytes(self) -> int:
        """The sum of `smem_map`; the compiler adds some hundred bytes of its own."""
        return total_bytes(self.smem_map())

    def tmem_columns(self) -> int:
        """Columns of tensor memory in use."""
        return max(columns.first + columns.columns for columns in self.tmem_map())

    @property
    def tmem_allocation(self) -> int:
        """Columns of tensor memory that the hardware allocates: a power of two."""
        return 1 << (self.tmem_columns() - 1).bit_length()

    def __str__(self) -> str:
        """Every field that is not its default, and what the config takes of shared memory, tensor memory and registers."""
        switches = {field.name: getattr(self, field.name) for field in fields(self)[5:]}
        switches = {name: value for name, value in switches.items() if value != getattr(Config, name)}
        others = "".join(f", {name} {value}" for name, value in switches.items())
        registers = "/".join(map(str, sorted({self.softmax_registers, *self.worker_registers}, reverse=True)))
        return (
            f"tile {self.tile_q} x {self.tile_kv}, head dims {self.head_dim} and {self.head_dim_v}, {self.q_stages} Q stages, "
            f"{self.kv_stages} K/V stages{others}, {self.smem_bytes() / 1024:.0f} KiB shared memory, "
            f"{self.tmem_columns()} columns of tensor memory, {registers} registers"
        )


def _chunks(head_dim: int) -> tuple[int, ...]:
    wide = 1 << (head_dim.bit_length() - 1)
    return (wide,) if wide == head_dim else (wide, head_dim - wide)


def _named(name: str, chunks: tuple[int, ...]) -> list[tuple[str, int]]:
    """The buffers that hold the chunks of a head dim: one by its name, or one for each range of columns."""
    if len(chunks) == 1:
        return [(name, chunks[0])]
    ends = [sum(chunks[: i + 1]) for i in range(len(chunks))]
    return [(f"{name}[{end - chunk}:{end}]", chunk) for end, chunk in zip(ends, chunks, strict=True)]


def choose(problem: AttentionProblem) -> Config:
    """The config for a problem: as many K/V stages, up to 6, as fit. Never timed on a Blackwell GPU."""
    kv_stages = {64: 6, 96: 5, 128: 3, 192: 3}[problem.head_dim]
    return Config(problem.head_dim, problem.head_dim_v, kv_stages=kv_stages)
