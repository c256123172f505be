"""What the Hopper forward runs with, and what that costs in shared memory and registers."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from strobe.device import KNOWN
from strobe.kernels.derived import Derived
from strobe.kernels.memory_map import Buffer, total_bytes
from strobe.problem import AttentionProblem, Dense
from strobe.tuning.table import Shape, entries, fields_of

ROWS_PER_GROUP = 64
"""Query rows of a consumer warpgroup: the M of a wgmma."""

SMEM_BYTES = KNOWN["H100"].smem_per_block
"""Shared memory that a CTA may have on Hopper."""

HALF_L2 = 30_000_000
"""Bytes of K and V that a bundle of heads may take: about half of the L2 cache of a Hopper GPU."""

SMS = KNOWN["H100"].sms
"""Multiprocessors of an H100 SXM and an H200; the Hopper GPUs with fewer choose as if they had these."""

SCRATCH = 1024
"""Shared memory that the compiler adds: for the hand-over to the warp roles, for sums across warps."""

_BARRIER, _TILE_FIELDS = 8, 13
_CHUNKS = {64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0), 160: (128, 32), 192: (128, 64), 256: (256, 0)}

NARROWED = 80
"""A head dim that the forward alone computes with, by what is measured at 96: see `_adapted`."""


def padded(head_dim: int) -> int:
    """The head dim that a kernel is tuned for, for one up to 256: columns beyond the given ones are 0 (TMA fills them)."""
    return next(dim for dim in _CHUNKS if dim >= head_dim and dim != NARROWED)


def chunked(head_dim: int) -> int:
    """The least columns, in chunks, that hold a head dim up to 256."""
    return next(dim for dim in _CHUNKS if dim >= head_dim)


@dataclass(frozen=True)
class Chunks(Derived):
    """Head dims, padded, and the chunks of columns that tensors come in. head_dim: of q and k; head_dim_v: of v."""

    head_dim: int
    head_dim_v: int

    @property
    def wide(self) -> int:
        """Columns of the wide chunk of Q and K. Chunks are powers of two."""
        return _CHUNKS[self.head_dim][0]

    @property
    def narrow(self) -> int:
        """Columns of the narrow chunk of Q and K; 0: there is none."""
        return _CHUNKS[self.head_dim][1]

    @property
    def wide_v(self) -> int:
        """Columns of the wide chunk of V and dO."""
        return _CHUNKS[self.head_dim_v][0]

    @property
    def narrow_v(self) -> int:
        """Columns of the narrow chunk of V and dO; 0: there is none."""
        return _CHUNKS[self.head_dim_v][1]

    @property
    def products(self) -> int:
        """Products that a sum over rows of Q or K takes, such as dK: one for each chunk."""
        return 2 if self.narrow else 1

    @property
    def products_v(self) -> int:
        """Products that a sum over rows of V or dO takes, such as P V or dV: one for each chunk."""
        return 2 if self.narrow_v else 1


@dataclass(frozen=True)
class Config(Chunks):
    """How the kernel runs.

    groups: consumer warpgroups, 64 query rows each.
    tile_kv: keys a block.
    num_stages: blocks in the ring of K, and in that of V.
    q_stages: with 2, the Q of the next tile comes early.
    o_buffers: pieces of 64 rows and o_columns columns that a group may have on their way out.
    optimistic: whether the softmax is optimistic (docs/optimistic_softmax.md), or has a running maximum.
    partial: whether O leaves in float32, in pieces of half the columns.
    slots: tiles that are known at a time.
    static: whether a CTA takes every so-manieth tile, instead of the next that nobody has.
    box: of a cache the keys that are copied together, all of one page (see `pages`); 0: K and V are no cache.
    grouped: whether 8 keys of a cache lie together with all of their columns, which one copy brings (see `pages`).
    beside: whether it begins on the multiprocessors that the launch ahead of it leaves, and waits for its end at its own.
    tile_heads: query heads of a tile, which share K and V: one, or as many as groups, which take the same rows of one each.
    uneven_group: query heads that share K and V, if they do not fill their tiles, so that a group has none in the last; else 0.
    """

    groups: int
    tile_kv: int
    num_stages: int
    q_stages: int = 2
    o_buffers: int = 1
    optimistic: bool = True
    partial: bool = False
    slots: int = 2
    static: bool = False
    box: int = 0
    grouped: bool = False
    beside: bool = False
    tile_heads: int = 1
    uneven_group: int = 0

    @property
    def o_columns(self) -> int:
        return (self.narrow_v or 64) // (2 if self.partial else 1)

    @property
    def splits(self) -> int:
        """Parts into which the keys of a tile are split: one."""
        return 1

    @property
    def persistent(self) -> bool:
        """Whether a CTA computes several tiles: always."""
        return True

    @property
    def tile_q(self) -> int:
        return self.groups // self.tile_heads * ROWS_PER_GROUP

    def tiles_of(self, group: int) -> int:
        """Tiles of the same rows for the query heads that share K and V, which `group` do."""
        return -(-group // self.tile_heads)

    @property
    def tiles_abreast(self) -> int:
        """`tiles_of` an uneven group."""
        return self.tiles_of(self.uneven_group)

    @property
    def consumer_registers(self) -> int:
        """Registers a thread that a consumer sets for itself (setmaxnreg): what 65536 leave beside the producer's."""
        return ((504 if self.groups == 2 else 512) - self.producer_registers) // self.groups // 8 * 8

    @property
    def producers(self) -> int:
        """Warps that copy: the second one V, where K and V are a cache."""
        return 2 if self.box else 1

    @property
    def producer_registers(self) -> int:
        """Registers a thread of a producer, which takes more to copy a block in many boxes."""
        if self.grouped or (self.box and self.tile_kv // self.box > 2):
            return 40 if self.groups == 2 else 32
        return 24

    def smem_map(self) -> list[Buffer]:
        """The buffers of a CTA: Q, the two rings and O, in 2-byte elements (a partial O: 4 bytes); 4 bytes for each number of a
        tile, 8 a barrier."""
        q_buffers = self.q_stages * self.groups
        barriers = 2 * q_buffers + 4 * self.num_stages + 2 * self.slots
        buffers = {
            "sQ": (q_buffers, ROWS_PER_GROUP, self.head_dim),
            "sK": (self.num_stages, self.tile_kv, self.head_dim),
            "sV": (self.num_stages, self.tile_kv, self.head_dim_v),
            "sO": (self.groups * self.o_buffers, ROWS_PER_GROUP, self.o_columns),
        }
        sizes = {"sO": 4 if self.partial else 2}
        return [
            *(Buffer(name, shape, sizes.get(name, 2) * math.prod(shape)) for name, shape in buffers.items()),
            Buffer("tiles", (self.slots, _TILE_FIELDS), 4 * self.slots * _TILE_FIELDS),
            Buffer("barriers", (barriers,), _BARRIER * barriers),
        ]

    def smem_bytes(self) -> int:
        """The sum of `smem_map`. The compiler adds its own scratch, some hundred bytes."""
        return total_bytes(self.smem_map())

    def __str__(self) -> str:
        softmax, out = "optimistic" if self.optimistic else "safe", "O in float32" if self.partial else "O"
        tiles = "" if (self.slots, self.static) == (2, False) else f"{self.slots} tiles known, "
        tiles += f"{self.box} keys of a page at a time, " if self.box else ""
        tiles += "beside the launch ahead, " if self.beside else ""
        tiles += f"{self.tile_heads} heads a tile, " if self.tile_heads > 1 else ""
        tiles += f"of {self.uneven_group}, " if self.uneven_group else ""
        return (
            f"dims {self.head_dim}, {self.head_dim_v}, tile {self.tile_q} x {self.tile_kv}, {self.groups} consumer groups, "
            f"{self.num_stages} stages, {self.q_stages} of Q, {self.o_buffers} of {out}, {tiles}{softmax} softmax, "
            f"{self.smem_bytes() / 1024:.0f} KiB shared memory"
        )


# ---- which configs there are


_RING_KEYS = 512
"""A ring of more keys than this hides no more latency: at head dim 64 it would hold whole short sequences."""

SHORT_KEYS = 128
"""Where there are so few keys a tile is done before the next one is known, unless that is known early."""

NARROW_GAIN = 1.2
"""How much faster a row's work is in three groups where head dims are less than 64: rows of less than 128 bytes take the TMA
longer, and in three groups more query rows share what it brings. Head dim 40, 8 x 4096, 8 heads, on an H100: 471 us, with
two groups 582."""

FEW_KEYS, FEW_MASKED_KEYS = 4800, 8192
"""Keys that a multiprocessor walks along in all, up to which blocks of 64 keys are faster, as the first and the last block of
its tiles overlap with less; at head dims 64 and 96 not where all keys are seen. More (the second) where tiles have a block of
which a mask leaves half: windows, and causal masks from head dim 128 on, unless the table prefers three groups for their number
of tiles. On an H100, of the time in blocks of 128 keys, head dim 128: causal, 1 x 2048, 32 heads (4096 keys) 0.93; 3 x 1999, 13
heads (4997) 0.95; 8 x 1024, 24 heads (6144) 0.92; 1 x 3072, 24 heads (7680) 0.98; 4 x 2048, 16 heads (8192) 0.96, 2 x 4096, 8
heads 1.00; 1 x 8192, 8 heads (16384) 1.06; full, 1 x 2048, 16 heads (4096) 0.89; 2 x 2048 and 8 x 1024, 16 heads (8192) 1.02
and 0.99. On an H200, of the time by the table, 16 heads, head dim 64 | 96 | 128: windows of 256 keys, 2 x 4096 (2048) 0.93 |
0.92 | 0.95, 32 x 300 (3072) 0.87 | 0.91 | 0.91, 40 sequences of 76 to 2022 (6400) 0.85 | 0.87 | 0.91; of 512, 1 x 16384 (15872)
1.06 | - | 1.00; causal, 32 x 300 (1800) 0.98 | 0.92, 8 of 100 to 1500 (2800) 0.96 | 0.95, 8 x 1000 (4000) 0.98 | 0.97, 5 of
777 to 4000 (14052) 1.08 | 1.07; full, 4 x 700 (2100) 1.07 | 1.07."""

FEWEST_KEYS = 256
"""Keys of a row, up to which four tiles are known at a time (what goes ahead of a tile takes longer than its products), and at
head dims 64 and 96 two groups and blocks of 64 keys are faster in any case. An H200, packed, microseconds: causal, 32 heads on
8, head dim 128 | 64 (with two tiles known), 64 sequences of 100 53 (62) | 43 (49), 100 of 10 to 406 205 (211) | 148 (156), 32
of 300 level; full, 16 heads, head dim 64 | 96 (by the table), 16 of 60 to 285 21 (26) | 28 (32), 100 of 10 to 406 97 (102) |
125 (129)."""

_SPARE_REGISTERS = 30
"""Registers that a consumer needs for all but its parts of O, S and P."""


def candidates(head_dim: int, head_dim_v: int) -> list[Config]:
    """The configs that are worth timing, the best guess first: of those that fit, the ones that leave nothing on the table, as
    more stages, Q stages or O buffers are taken not to hurt unless one is paid for with another."""
    dims = padded(head_dim), padded(head_dim_v)
    choices = itertools.product((2, 3), (64, 128), range(2, 9), (1, 2), (1, 2, 3))
    fitting = [config for config in (Config(*dims, *choice) for choice in choices) if _fits(config)]
    worthwhile = [config for config in fitting if not any(_dominates(other, config) for other in fitting)]
    return sorted(worthwhile, key=_guess, reverse=True)


def _fits(config: Config) -> bool:
    """Whether shared memory holds it, and the registers of a consumer O, S and P (4, 4 and 2 bytes, over 128 threads)."""
    live = config.head_dim_v // 2 + config.tile_kv // 2 + config.tile_kv // 4
    return (
        live + _SPARE_REGISTERS <= config.consumer_registers
        and config.smem_bytes() + SCRATCH <= SMEM_BYTES
        and config.num_stages * config.tile_kv <= _RING_KEYS
        and config.head_dim_v // config.o_columns % config.o_buffers == 0  # a piece finds its buffer as the last tile left it
    )


def _dominates(one: Config, other: Config) -> bool:
    """Whether one has the tile of the other, and more of something and less of nothing."""

    def amounts(config: Config) -> tuple[int, int, int]:
        return config.num_stages, config.q_stages, config.o_buffers

    same_tile = (one.groups, one.tile_kv) == (other.groups, other.tile_kv)
    return same_tile and one != other and all(a >= b for a, b in zip(amounts(one), amounts(other), strict=True))


def _guess(config: Config) -> tuple:
    """Rank of a config for head dims that nobody measured: by what the measured ones like, the most important first."""
    return config.groups == 2, config.tile_kv, min(config.num_stages, 3), config.q_stages, config.o_buffers


# ---- which one a problem gets


def choose(problem: AttentionProblem) -> Config:
    """The config for a problem: of those that the tuning table keeps for its head dims, the one with the most TFLOP/s at the
    nearest measured point (mask class, then keys a row sees), corrected for the share of the GPU that its grid of tiles keeps
    busy here and did there. Without a measurement, the first of the candidates. What is computed pair by pair takes registers,
    so it gets two groups, and small blocks; but not so for documents, which are compared at their ends alone."""
    return _choice(problem).config


def origin(problem: AttentionProblem) -> str:
    """Origin of the choice, in words."""
    return _choice(problem).origin


class Choice(NamedTuple):
    config: Config
    origin: str


def _choice(problem: AttentionProblem) -> Choice:
    config, origin = _of_one_head(problem)
    shape = _shape(problem)
    if shape.keys <= FEWEST_KEYS:
        config = replace(config, slots=4)
    return Choice(sharing(config, shape, problem.group), origin)


def _of_one_head(problem: AttentionProblem) -> Choice:
    """The choice for tiles of one head."""
    mask, score = problem.mask, problem.score
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    if score.changed or mask.function is not None:
        return _spacious(*dims, 64)
    if mask.documents is not None:
        return _spacious(*dims, 128 if dims[0] <= 128 else 64)  # head dim 192 would spill 252 bytes (Triton 3.9)
    heads = problem.heads_q, problem.group
    found = _ranked(problem.head_dim, problem.head_dim_v, *heads, problem.lengths, mask.left, mask.right, mask.prefix)
    return Choice(_adapted(found.config, problem), found.origin)


def sharing(config: Config, shape: Shape, group: int) -> Config:
    """The config, with heads that share K and V in a tile where that leaves less of it empty or masked."""
    return max(config, together(config, group), key=lambda one: _share(shape, one, group))


def together(config: Config, group: int) -> Config:
    """The config with heads that share K and V in a tile, of which there are `group`. (Three groups of consumers that they do
    not fill were not measured.)"""
    if group % config.groups == 0:
        return replace(config, tile_heads=config.groups)
    return replace(config, tile_heads=2, uneven_group=group) if config.groups == 2 and group > 1 else config


def _share(shape: Shape, config: Config, group: int) -> float:
    return shape.share(config.tile_q, config.tile_kv, SMS, config.tile_heads, group)


def _shape(problem: AttentionProblem) -> Shape:
    return Shape.of(problem.lengths, problem.heads_q, problem.mask.band)


def _adapted(config: Config, problem: AttentionProblem) -> Config:
    """A table's config, changed for what no table measures; measured on an H100. Head dims up to 80 in 80 columns instead of
    96: 8 x 1024 rows, 8 heads 55.5 us instead of 57.7 (in three groups 52.1 instead of 54.5); 8 x 2048, 32 heads, causal, 385
    instead of 404. Few keys, in 64 columns, which a mask keeps from the kernel for few keys: two groups, tiles in a fixed
    order. 77 rows and keys, causal, 1536 heads: 30.5 us instead of 38.8. But with 197 keys it is slower. A few tiles, of few
    blocks: see FEW_KEYS."""
    columns, dims = max(problem.head_dim, problem.head_dim_v), (config.head_dim, config.head_dim_v)
    if dims in ((64, 64), (96, 96), (128, 128), (160, 160)) and _walks_few(config, _shape(problem)):
        config = _of_small_blocks(*dims, problem.group)
    if dims == (96, 96) and columns <= NARROWED and not problem.partial:
        config = replace(config, head_dim=NARROWED, head_dim_v=NARROWED, o_buffers=1)
    few = isinstance(problem.lengths, Dense) and problem.lengths.seqlen_kv <= SHORT_KEYS and not problem.seqused
    return replace(config, static=True) if few and dims == (64, 64) else config


def _walks_few(config: Config, shape: Shape) -> bool:
    """Whether the tiles of a multiprocessor see few keys, one after the other: see FEW_KEYS. Of causal ones half of them
    count."""
    tiles = shape.sequences * shape.heads * -(-shape.length // config.tile_q)
    walked = -(-tiles // SMS) * shape.keys
    narrow = config.head_dim < 128
    if shape.mask == "window":
        few = walked <= FEW_MASKED_KEYS
    elif shape.mask == "causal":
        few = walked // 2 <= (FEW_KEYS if narrow or config.groups == 3 else FEW_MASKED_KEYS)
    else:
        few = walked <= FEW_KEYS and not narrow
    return few or (narrow and shape.keys <= FEWEST_KEYS)


def of_short_prompts(problem: AttentionProblem) -> Config:
    """The config for tiles that see few keys: two groups, and blocks of 64 keys."""
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    return _adapted(_of_small_blocks(*dims, problem.group), problem)


def _of_small_blocks(head_dim: int, head_dim_v: int, group: int) -> Config:
    """The config with blocks of 64 keys: of two groups, or of three if these are filled by heads that share keys, and two are
    not. An H200, causal, 24 heads on 8, packed log-normal lengths, D = 128 | 64, microseconds (in two groups, two of three
    heads a tile; one): 500 of 35 in the mean 159 (170; 211) | 121 (127; 159), 200 of 100 144 (164; 158) | 112 (121; 120), 80 of
    250 172 (208; 184) | 131 (161; 142)."""
    entry = entries("sm90").get((head_dim, head_dim_v))
    if entry is not None and group % 3 == 0 and group % 2:
        kept = (_parsed(head_dim, head_dim_v, name) for name in entry.kept)
        found = next((config for config in kept if (config.groups, config.tile_kv) == (3, 64)), None)
        if found is not None:
            return found
    return _spacious(head_dim, head_dim_v, 64).config


@functools.cache
def _spacious(head_dim: int, head_dim_v: int, keys: int) -> Choice:
    """The choice for what is compared or computed pair by pair: its numbers need registers, which two groups leave, the more
    so the fewer keys a block has. Documents, 4 x 4096 tokens, one document a sequence, all keys, head dim 64: 1.02 ms with 128
    keys, 1.24 with 64."""
    small = (config for config in candidates(head_dim, head_dim_v) if config.groups == 2 and config.tile_kv <= keys)
    return Choice(next(small), f"two groups and blocks of up to {keys} keys, for what is compared or computed pair by pair")


@functools.lru_cache(maxsize=4096)
def _ranked(head_dim, head_dim_v, heads, group, lengths, left, right, prefix) -> Choice:
    """The choice for plain scores and a band, by arguments that are fast to compare and keep no tensor alive; heads that could
    share a tile have yet to (see `sharing`)."""
    narrow = max(head_dim, head_dim_v) < 64
    head_dim, head_dim_v = padded(head_dim), padded(head_dim_v)
    entry = entries("sm90").get((head_dim, head_dim_v))
    if entry is None:
        ranked = candidates(head_dim, head_dim_v)
        return Choice(ranked[0], f"no measurement for these head dims: the first of {len(ranked)} candidates by arithmetic")
    shape = Shape.of(lengths, heads, (left, right, prefix))
    nearest = entry.nearest(shape)

    def speed(name: str) -> float:
        config = _parsed(head_dim, head_dim_v, name)
        rate = nearest.tflops[name] * (NARROW_GAIN if narrow and config.groups == 3 else 1.0)
        return rate * _share(shape, sharing(config, shape, group), group) / _share(nearest.shape, config, 1)

    best = max(entry.kept, key=speed)
    where = f"{nearest.shape.mask}, {nearest.shape.keys} keys a row"
    return Choice(_parsed(head_dim, head_dim_v, best), f"the fastest of {len(entry.kept)} by {entry.source}, at {where}")


@functools.cache
def _parsed(head_dim: int, head_dim_v: int, name: str) -> Config:
    """The config of a name in a table. ValueError if the kernel cannot run it: a table may be of another version."""
    try:
        config = Config(head_dim, head_dim_v, **fields_of(name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"a tuning table must name configs of the Hopper forward, got {name!r}: {error}") from None
    if not _fits(config):
        raise ValueError(
            f"a tuning table must name configs that fit a Hopper GPU, got {name!r} for head dims {head_dim}, {head_dim_v}"
        )
    return config
