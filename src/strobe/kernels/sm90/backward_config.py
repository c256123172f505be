"""What the Hopper backward runs with, and what that costs in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from strobe.kernels.memory_map import Buffer, total_bytes
from strobe.kernels.sm90.config import SCRATCH, SMEM_BYTES, Chunks, padded
from strobe.problem import AttentionProblem, Varlen

KEYS = 128
"""Keys of a block: 64 for each of two groups."""

STAGES = 2
"""Tiles of Q and dO that are in shared memory at a time."""

SLOTS = 2
"""Blocks that are known at a time: one is worked on, one is next."""

ROWS_PADDED = 128
"""Rows of a sequence are rounded up to so many in what the backward's kernels share: a multiple of every tile_q."""

PARTS = 8
"""16-bit numbers that a folded statistic takes in global memory: its parts and zeros, as many as a TMA row has at least."""

PRODUCT = 16
"""Numbers that a product of 16-bit numbers takes at least of a row."""

LEAST_SCALE = 1e-30
"""By which an LSE can be divided: what comes out is a number."""

PARTIAL_COLUMNS = 32
"""Columns of dK or dV in float32 that leave together: 128 bytes a row, what a swizzle spans."""

SPLIT_TILE = 64
"""Rows, and keys, of a tile of the split backward."""

MOST_STORED = 2**30
"""Bytes of dS that are in memory at a time, at most: heads take turns."""

FLAG_STRIDE = 32
"""Numbers from one flag of dQ's order to the next, so that each has a line of the L2 cache to itself."""


LAST_BLOCKS = 256
"""Blocks of keys of the last bundle of heads, at least: about two for each multiprocessor, as under a causal mask the first
ones of a head take twice as long as the mean, and should not begin when all others end."""

NARROW = {64: 2048, 96: 2048, 128: 1024}
"""Keys to the left that a row of a window sees, at most, where an order is faster, by head dim. Times as fast as without
one, H100, 4k and 16k, windows of 1024: head dim 64 1.05, 1.01, 96 1.06, 1.06, 128 1.01, 1.04; of 2048, 4k: 1.02, 1.07,
0.94; 64 heads on 8, head dim 64, 8k, a window of 128: 1.25."""

SHORT = 1024
"""Keys of a causal sequence, at most, where an order is faster, and of a full one, at least, at head dim 96. Times as fast,
H100, causal, 256, 512, 1k, 2k: head dim 64 1.17, 1.17, 1.08, 1.00, 128 1.30, 1.20, 1.07, 0.94, 96 -, 1.22, 1.13, 1.03 (4k
1.01); 32 heads on 8, 1k 1.16; 64 on 8, 512, 1k, 2k 1.47, 1.43, 1.37. Full, 96, 4k, 8k, 16k 1.08, 1.05, 1.03; but head dim
64, 512, where each waits for the one before, 0.89."""


@dataclass(frozen=True)
class Config(Chunks):
    """The backward in one pass (`backward`), for head dims up to 192, of v up to 128, and 160 of both. tile_q: query rows a
    tile. turns: whether the groups take turns at issuing products. held_k, held_v: columns of K and V, the first ones, that a
    group has in registers, too: whole chunks, or of K 64 columns of one of 128. folded: whether the products of S and dP
    subtract the statistics, too (see `backward_pre_post`); head dims up to 128, scores that nothing changes. stored: whether dS
    is stored, and dQ is a product of its own (`backward_dq`). order: 1 or -1 if blocks of keys add to dQ one after the other,
    from the first or the last on (see `backward_order`), 0 if as they come; up to head dim 128, where nothing changes scores.
    downwards: whether a block goes over rows from the last on, at each through all heads of a group (see `_is_grouped`)."""

    tile_q: int
    turns: bool
    held_k: int = 0
    held_v: int = 0
    folded: bool = False
    stored: bool = False
    order: int = 0
    downwards: bool = False

    @property
    def k_stages(self) -> int:
        """Blocks of K in shared memory at a time. With two, a block's last dQ is computed beside the next block's first tile;
        above 96 there is no room. Measured on an H200, kilocycles of a backward with one / with two: head dim 64, 1k full
        1321 / 1292, 4k 4120 / 4195, causal 2265 / 2199, window of 1024 1301 / 1279, 16k causal 7730 / 7568; 96, 1k causal
        886 / 853, 4k full 4009 / 3924, causal 2231 / 2206, window 1287 / 1254."""
        return 2 if max(self.head_dim, self.head_dim_v) <= 96 else 1

    @property
    def dq_waits_once(self) -> bool:
        """Whether a group asks once a block, when it waits for K anyway, and not at each tile, whether the TMA has read its
        place of dQ: where the writer sends dQ from there, that was dK alone. With an order, of the default's time before and
        so, H200, head dim 128: full, 1k 1.08, 1.08, 4k 1.09, 1.05, 16k 1.03, 1.01; causal, 4k, 32 heads on 8: 1.12, 1.10. Not
        measured with two places for K, of which the next one is there before dK has left."""
        return self.order != 0 and self.k_stages == 1

    @property
    def ds_keys(self) -> int:
        """Keys of a place of dS: of both groups, or, where each group's leaves, of one."""
        return SPLIT_TILE if self.stored else KEYS

    @property
    def share_columns(self) -> tuple[int, ...]:
        """Columns of dQ that a group computes at a time: of 64 rows a part of them, or, of 128 rows, all for half of the rows.
        A third share is computed by the groups in turn."""
        return {96: (64, 32), 160: (64, 64, 32), 192: (64, 64, 64)}.get(self.head_dim, (64, 64))

    @property
    def products_dp(self) -> int:
        """How many products of dP may still be in flight when S is waited for."""
        return self.products_v + self.folded

    @property
    def serial(self) -> bool:
        """Whether S, dP and dQ are computed one after the other, as the registers hold dK, dV and but one of them."""
        return self.head_dim > 128

    @property
    def statistics_bytes(self) -> int:
        """Bytes of shared memory for the statistics (LSE and delta) of one tile of rows."""
        return 2 * self.tile_q * (2 * PRODUCT if self.folded else 4)

    def smem_map(self) -> list[Buffer]:
        of_k = self.k_stages + (self.k_stages == 1)  # that it is read is told by those of rows, where there are two
        barriers = 2 * SLOTS + of_k + 4 + 2 * STAGES + (6 + 2 * SLOTS if self.order else 0)
        shapes = {
            "sK": (self.k_stages, KEYS, self.head_dim),
            "sV": (KEYS, self.head_dim_v),
            "sQ": (STAGES, self.tile_q, self.head_dim),
            "sdO": (STAGES, self.tile_q, self.head_dim_v),
            "sdS": (2, KEYS, self.tile_q),
        }
        return [
            *(Buffer(name, shape, 2 * math.prod(shape)) for name, shape in shapes.items()),
            Buffer("sdQ", (2, 64, 64), 4 * 2 * 64 * 64),
            Buffer("statistics", (STAGES, 2, self.tile_q), STAGES * self.statistics_bytes),
            *([Buffer("ones", (KEYS // 2, PRODUCT), KEYS * PRODUCT)] if self.folded else ()),
            Buffer("numbers", (SLOTS,), 4 * SLOTS * (2 if self.order else 1)),
            Buffer("barriers", (barriers,), 8 * barriers),
        ]

    def smem_bytes(self) -> int:
        return total_bytes(self.smem_map())


class RowTiles(Chunks):
    """What goes over tiles of rows, 64 of which each of two groups has, and over keys 64 at a time."""

    @property
    def tile_q(self) -> int:
        return 2 * SPLIT_TILE

    @property
    def tile_kv(self) -> int:
        return SPLIT_TILE

    @property
    def splits(self) -> int:
        """Parts that the keys of a tile are shared out to (see `tile_scheduler.locate`)."""
        return 1


@dataclass(frozen=True)
class SplitConfig(RowTiles):
    """The backward in two passes (`backward_split`). stored: whether the keys pass stores dS, so that dQ is a product
    (`backward_dq`), else the pass over rows computes it again. held: columns of K and of V, the first ones of a single chunk,
    that groups of the keys pass have in registers instead of shared memory. v_stages: blocks in the ring of V in the pass over
    rows."""

    stored: bool = False
    held: int = 0

    @property
    def v_stages(self) -> int:
        return 1 if self.head_dim_v == 256 else STAGES

    @property
    def q_stages(self) -> int:
        """Tiles of Q in shared memory at a time in the keys pass: three where there is room."""
        return 3 if total_bytes(self._keys_map(3)) + SCRATCH <= SMEM_BYTES else 2

    @property
    def products_dp(self) -> int:
        """How many products of dP may still be in flight when dK is waited for."""
        return 2 if self.held else self.products_v

    def smem_map(self) -> list[Buffer]:
        """The shared memory of the pass, over keys or over rows, that takes more of it."""
        return self.keys_map() if self.stored else max(self.keys_map(), self.rows_map(), key=total_bytes)

    def keys_map(self) -> list[Buffer]:
        return self._keys_map(self.q_stages)

    def _keys_map(self, q_stages: int) -> list[Buffer]:
        dim, dim_v, barriers = self.head_dim, self.head_dim_v, 2 + 2 * (q_stages + STAGES)
        return [
            *_tiles(sK=(1, dim - self.held), sV=(1, dim_v - self.held), sQ=(q_stages, dim), sdO=(STAGES, dim_v)),
            *_tiles(sP=(2, SPLIT_TILE)),
            *(_tiles(sdS=(2, SPLIT_TILE)) if self.stored else ()),
            Buffer("statistics", (q_stages, 2, SPLIT_TILE), 4 * q_stages * 2 * SPLIT_TILE),
            Buffer("barriers", (barriers,), 8 * barriers),
        ]

    def rows_map(self) -> list[Buffer]:
        dim, dim_v, barriers = self.head_dim, self.head_dim_v, 4 + 2 * (STAGES + self.v_stages)
        tiles = _tiles(sQ=(2, dim), sdO=(2, dim_v), sK=(STAGES, dim), sV=(self.v_stages, dim_v))
        return [*tiles, Buffer("barriers", (barriers,), 8 * barriers)]

    def smem_bytes(self) -> int:
        return total_bytes(self.smem_map())


@dataclass(frozen=True)
class DqConfig(RowTiles):
    """The product dQ = dS K, of what was stored (`backward_dq`). stages: blocks of keys in the ring. behind: how many products
    of a group may be under way while the next block is waited for. (Of two chunks with Triton 3.6 ptxas would make them serial;
    and the groups overlap each other, anyway.)"""

    @property
    def stages(self) -> int:
        return 4

    @property
    def behind(self) -> int:
        return 0 if self.narrow else 1

    def smem_map(self) -> list[Buffer]:
        tiles = _tiles(sdS=(2 * self.stages, SPLIT_TILE), sK=(self.stages, self.head_dim))
        return [*tiles, Buffer("barriers", (2 * self.stages,), 8 * 2 * self.stages)]

    def smem_bytes(self) -> int:
        return total_bytes(self.smem_map())


def _tiles(**buffers: tuple[int, int]) -> list[Buffer]:
    """name=(number, columns), each of 64 rows of 2-byte numbers."""
    return [
        Buffer(name, (number, SPLIT_TILE, columns), 2 * number * SPLIT_TILE * columns)
        for name, (number, columns) in buffers.items()
    ]


STORING = (192, 128), (160, 160)
"""Head dims of k and v at which dS is stored in any case: see `choose`."""


def choose(problem: AttentionProblem) -> Config | SplitConfig:
    """One pass where registers hold dK and dV. Where the result must have the same bits in every run, blocks add to dQ in an
    order, or dS is stored (`_ordered`); so they do where that is faster. At (192, 128) and at 160 dS is stored in any case:
    on an H100, of the time of one pass, at 1k, 4k, 16k: (192, 128) 0.82, 0.97, 0.94, causal 0.81, 0.93, 0.95, a window of
    1024 0.89 (4k); 160 at 4k 1.00, causal 0.99, at 1k 0.89. (Not in packed sequences, whose blocks are listed in one pass:
    these were not measured.)

    Measured on an H200, S = 1k, 4k, 16k. (192, 128), TFLOP/s at 4k, 16k: in one pass 579, 596, in two 320, 305. 160, 4k
    causal on an H100: in one pass 507, in two 325, padded to 192 296. Turns, microseconds with / without, head dim 64: 812
    / 829, 2788 / 2866, 10543 / 10701, causal 571 / 587, 1404 / 1506, 5176 / 5581; 96, where 64 columns of K and V are held:
    803 / 822, 2613 / 2667, 9884 / 9602, causal 537 / 557, 1421 / 1543, 5004 / 5228; 128: 721 / 735, 2435 / 2534, 8960 /
    9420, causal 484 / 485, 1247 / 1250, 4711 / 4846. What changes scores or drops some takes registers: head dim 64,
    causal, 4k, milliseconds with slopes, a bias, dropout: in tiles of 128 rows 3.0, 7.5, 3.5, of 64 rows 2.3, 3.2, 2.8;
    with documents 2.3, 2.7. Folded statistics, microseconds without / with, S = 4k full, causal, window of 1024, 16k
    causal: head dim 64 2868 / 2759, 1572 / 1477, 873 / 864, 5431 / 4971, 128 2418 / 2349, 1339 / 1277, 764 / 724, 4739 /
    4417; 96, with 96 columns of K held, 2663 / 2713, 1427 / 1449, 801 / 799, 5030 / 5068."""
    head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    stored = _may_store(problem)
    if head_dim > 192 or head_dim_v > (160 if head_dim == 160 else 128):
        return _split(problem, head_dim, head_dim_v, stored and "bias" not in problem.learned)
    config = _one_pass(problem, head_dim, head_dim_v)
    if problem.deterministic or _order_is_faster(problem, config):
        in_two = replace(config, stored=True) if stored else SplitConfig(head_dim, head_dim_v)
        return _ordered(problem, config, stored) or in_two
    if stored and (head_dim, head_dim_v) in STORING and not problem.varlen:
        return replace(config, stored=True)
    return replace(config, downwards=config.turns and head_dim == 128 and _is_grouped(problem) and _is_one_bundle(problem))


def origin(problem: AttentionProblem) -> str:
    """Where the config comes from, and what becomes of dS, in words."""
    config, measured, mib = choose(problem), "measured, for each head dim", stored_bytes(problem) / 2**20
    if isinstance(config, Config) and config.order:
        return f"{measured}; blocks of keys add to dQ in an order, from the {'last' if config.order == -1 else 'first'} on"
    if config.stored:
        return f"{measured}; stores dS, {stored_heads(problem) * mib:.0f} MiB at a time"
    if isinstance(config, SplitConfig) and stored_bytes(problem) > MOST_STORED:
        return f"{measured}; computes dS twice, as a key head's is {mib:.0f} MiB, more than {MOST_STORED >> 20}"
    return measured


def _one_pass(problem: AttentionProblem, head_dim: int, head_dim_v: int) -> Config:
    """What is measured, see `choose`. head_dim, head_dim_v: padded."""
    simple = not (problem.score.changed or problem.dropout)
    if head_dim == head_dim_v == 64 and simple:
        return Config(64, 64, 128, turns=True, folded=problem.scale >= LEAST_SCALE)
    head_dim = max(96, head_dim)  # the groups share dQ's columns: 64 each, or a chunk each
    if head_dim > 128 or not simple:
        return Config(head_dim, head_dim_v, 64, turns=False)
    # Folded, without a mask and with gradients in float32, Triton 3.6's ptxas makes the products serial.
    serial = problem.partial and _sees_everything(problem)
    folded = head_dim == 128 and problem.scale >= LEAST_SCALE and not serial
    return Config(head_dim, head_dim_v, 64, True, *_held(problem, head_dim, head_dim_v), folded)


def _split(problem: AttentionProblem, head_dim: int, head_dim_v: int, stored: bool) -> SplitConfig:
    """K and V are held where that makes room for a third tile of Q, and registers have room, too. Measured on an H100, no mask,
    16k and 4k, microseconds of a backward: before 11949 and 3092, dK started before dP 10332 and 2803, with a third tile of
    Q, too, 8440 and 2410."""
    simple = not (problem.score.changed or problem.dropout)
    held = 128 if stored and simple and head_dim == head_dim_v == 256 else 0
    return SplitConfig(head_dim, head_dim_v, stored, held)


def stored_pairs(problem: AttentionProblem) -> int:
    """Pairs of tiles of 64 rows that a block of keys has room for where dS is stored: those that may see it."""
    left, right, prefix = problem.mask.band
    pairs = -(-problem.lengths.seqlen_q // ROWS_PADDED)
    if left is not None and right is not None and prefix is None:
        pairs = min(pairs, (left + right + KEYS + ROWS_PADDED - 2) // ROWS_PADDED + 1)
    return pairs


def stored_bytes(problem: AttentionProblem) -> int:
    """Bytes of dS of the query heads that share a key head."""
    return problem.group * -(-problem.lengths.seqlen_kv // KEYS) * KEYS * stored_pairs(problem) * ROWS_PADDED * 2


def stored_heads(problem: AttentionProblem) -> int:
    """Key heads whose dS is in memory at a time: all, or a power of two."""
    fitting = MOST_STORED // max(1, stored_bytes(problem))  # there may be no keys
    return min(problem.lengths.batch * problem.heads_kv, 1 << fitting.bit_length() - 1)


def _may_store(problem: AttentionProblem) -> bool:
    """Whether dS may be stored: where there is memory for it, dQ is to be rounded, and a pass over rows visits no tile that one
    over keys leaves out, of which documents assure nobody."""
    mask = problem.mask
    plain = not problem.partial and mask.documents is None and mask.blocks is None
    return plain and stored_bytes(problem) <= MOST_STORED and _turns_are_full(problem)


def _ordered(problem: AttentionProblem, config: Config, stored: bool) -> Config | None:
    """The config with an order in which blocks of keys add to dQ; None if they can't have one. Packed sequences, which were not
    measured, have none where dS may be stored. Else it is faster than dS stored, or level. Of the default's time on an H100,
    ordered and stored, head dim 128: causal, 1k 0.97, 1.00, 4k 1.08, 1.17, 16k 1.09, 1.19, a window of 1024, 4k 0.99, 1.10;
    32 heads on 8, causal, 1k 0.87, 0.85. 96 on an H200, when flags shared lines and sums were cleared: full, 1k 1.02, 1.14,
    4k 0.99, 1.14, causal, 1k 1.04, 1.04, 4k 1.05, 1.17, 16k 1.02, 1.16."""
    if not _may_order(problem, config) or (stored and problem.varlen):
        return None
    downwards = problem.varlen or _is_grouped(problem)
    return replace(config, order=1 if downwards or _sees_what_comes(problem) else -1, downwards=downwards)


def _is_grouped(problem: AttentionProblem) -> bool:
    """Whether all blocks of keys see the last rows, and several heads share keys: CTAs that go over rows from the last on are
    at the same ones, and the L2 cache holds what they add to dQ there."""
    return problem.group > 1 and _is_causal(problem) and not problem.varlen


def _is_one_bundle(problem: AttentionProblem) -> bool:
    """Whether all heads are one bundle, whose rows the L2 cache does not hold, as they have few blocks of keys. From the last
    rows on, times as fast, head dim 128, H100: 28 heads on 4, 4k, 8k 1.07, 1.16; 64 on 8, 4k 1.13; 16 on 2, 8k 1.04; 14 on 2,
    16k 1.08. (28 on 4, 8k, on an H200: 1.03.) Head dims 64 and 96: 0.99. With more blocks, 40 heads on 8, 8k: 0.90."""
    lengths = problem.lengths
    return lengths.batch * problem.heads_kv * -(-lengths.seqlen_kv // KEYS) <= LAST_BLOCKS


def _order_is_faster(problem: AttentionProblem, config: Config) -> bool:
    """Whether blocks of keys take less time if they add to dQ in an order: the first one stores its sums, so that nobody clears
    them, and where few blocks see a row nobody waits for long."""
    left, lengths = problem.mask.band[0], problem.lengths
    if problem.varlen or not _may_order(problem, config):
        return False
    if left is not None:
        return left <= NARROW[config.head_dim]
    longest = max(lengths.seqlen_q, lengths.seqlen_kv)
    if _is_causal(problem):
        return longest <= (2 * SHORT if problem.group > 4 else SHORT)
    return config.head_dim == 96 and longest >= SHORT and _sees_everything(problem)


def _may_order(problem: AttentionProblem, config: Config) -> bool:
    """Whether blocks of keys may add to dQ in an order: where nothing changes scores, and the blocks that a row sees are
    neighbours, known from the mask alone."""
    left, _, prefix = problem.mask.band
    return config.turns and not (problem.mask.by_pair or (left is not None and prefix is not None))


def _turns_are_full(problem: AttentionProblem) -> bool:
    """Whether turns are few, or have something to do: each has room for the longest of packed sequences."""
    lengths = problem.lengths
    if not isinstance(lengths, Varlen):
        return True
    few = lengths.batch * problem.heads_kv <= 4 * stored_heads(problem)
    room = lengths.batch**2 * lengths.seqlen_q * lengths.seqlen_kv
    return few or 8 * lengths.total_q * lengths.total_kv >= room


def _held(problem: AttentionProblem, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Columns of K and V that a group keeps in registers: what the compilers of Triton 3.6 to 3.9 have room for. Measured on an
    H200, S = 4k, microseconds with none, 64 of K, 96 of K, 64 of both. Head dim 96 (none: without turns): 2844, 2717, 2666,
    2613, causal 1512, 1458, 1432, 1421; with Triton 3.9: 2854, 2780, 2810, 2819, causal 1567, 1471, 1501, 1686. 128, none and
    64 of K: 2457, 2429, causal 1345, 1318; with Triton 3.9: 2597, 2491, causal 1365, 1364."""
    if problem.mask.by_pair or problem.partial:  # what leaves in float32 takes registers too
        return 0, 0
    if head_dim + head_dim_v > 192:
        return 64, 0
    return (64, 64) if _sees_everything(problem) or head_dim == 128 else (96, 0)


def _sees_what_comes(problem: AttentionProblem) -> bool:
    """Whether a row sees all keys behind it."""
    _, right, prefix = problem.mask.band
    return right is None and prefix is None


def _is_causal(problem: AttentionProblem) -> bool:
    """Whether a row sees all keys up to one, and none after it."""
    left, right, prefix = problem.mask.band
    return right is not None and left is prefix is None


def _sees_everything(problem: AttentionProblem) -> bool:
    """Whether no band hides a key."""
    return problem.mask.band == (None, None, None)
