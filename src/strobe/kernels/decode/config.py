"""How the decode kernel runs, and what it takes of a multiprocessor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from strobe.device import KIB
from strobe.kernels.memory_map import Buffer, total_bytes

MMA_ROWS = 16
"""Rows of a product of tensor cores (mma.sync), for one warp."""
MOST_ROWS = 64
MOST_COLUMNS = 256
"""Columns of a head that every kernel takes; a latent has more."""
FEW_SHARES, FEW_SHARED_ROWS = 8, 128
"""Parts of a key head that the last CTA to come merges alone, as it would wait for others for as long, and the rows that they
have together at most. An H200, 8 requests of 1k keys, microseconds merged by one, by all: 32 rows, eight parts 11.5, 10.0 (a
cache of e4m3 11.4, 9.5), four 12.3, 12.4, two 15.1, 17.3; 16 rows, eight 9.9, 9.9, four 11.1, 11.7; 8 rows, eight 8.3, 8.8."""


@dataclass(frozen=True)
class Config:
    """How the kernel runs.

    head_dim, head_dim_v: columns of K and V in shared memory: powers of two, or three times `chunk`.
    rows: rows of a tile: queries times the query heads that share a key head. A multiple of 16, a warp's, and a power of two.
    tokens: keys of a step.
    stages: steps in the ring.
    warps: rows / 16 of them share the rows, column_warps the columns of O, the others the keys of a step.
    ctas: on each multiprocessor.
    split: keys of a part, where parts must not depend on other requests; 0: parts are as long as balance asks.
    chain: keys whose splits are added up one after the other; half of those that a request has room for, at least.
    kv_bytes: of an element of the cache.
    narrow: columns of K beyond head_dim, where V is its first head_dim columns; 0 where V lies elsewhere.
    column_warps: warps that share a state of the softmax, and halve (or quarter) the columns of O, which would not fit the
        registers of one: they exchange scores at every step.
    box: keys that TMA copies together, all of one page; 0: cp.async copies.
    chunk: columns of shared memory that lie together, for wgmma, by which four warps have 64 rows; 0: mma.sync multiplies.
    abreast: tiles of a key head whose CTAs, neighbours, walk along the same keys at the same time: the first of them reads a
        key from memory, the others find it in the L2 cache.
    heads_abreast: key heads whose CTAs, neighbours, do the same, each for the keys of its own, which lie beside the others'.
    halves: groups of so many warps that have head_dim_v columns of O each, and take turns at the softmax.
    groups: of warps, each of which has a share of the rows, and a role of its own.
    shares: CTAs that have a key head of a request, and its steps by turns; 0: work is dealt out from the lengths.
    clustered: those of a key head are a cluster.
    posts: they post to each other what they found (see `common.cluster`).
    by_way_of_q: results pass through the shared memory of Q, after which a thread writes 16 bytes of a row, not 4.
    start: units that a CTA could read in the time that a piece costs beside its keys.
    by_turns: CTAs that have several whole jobs take them by turns.
    under_way: steps of K, and of V, that TMA copies at once; 0: as many as the ring has.
    holds_q: a group of warps has its rows of Q in registers.
    asks_q: who copies K asks for Q, too, ahead of a piece's keys, by TMA.
    absent: rows of each query that stand for no head, so that TMA copies a power of two.
    few_jobs: jobs are so few that each may have more parts than there are rows to merge at a time.
    joins: the last CTA to come adds up a few parts, of which its own is in registers.
    optimistic: exponents of steps that all rows see whole are counted from the maxima of the first step of a piece, or split.
    late: those of a split are counted from maxima of its first step that move only if a score is far above them.
    grouped: 8 keys lie together in shared memory with all of their columns, then the next 8, so that TMA copies all columns of
        a page's keys in one box (see `common.groups`).
    bytes_stages: steps whose bytes the ring has from which they are converted, where wgmma multiplies a cache of 8 bits; 0:
        nothing is converted.
    """

    head_dim: int
    head_dim_v: int
    rows: int
    tokens: int
    stages: int
    warps: int
    ctas: int
    split: int = 0
    kv_bytes: int = 2
    column_warps: int = 1
    narrow: int = 0
    box: int = 0
    chunk: int = 0
    abreast: int = 1
    heads_abreast: int = 1
    halves: int = 1
    groups: int = 1
    shares: int = 0
    clustered: bool = False
    posts: bool = False
    by_way_of_q: bool = False
    start: int = 0
    by_turns: bool = False
    under_way: int = 0
    holds_q: bool = False
    asks_q: bool = False
    absent: int = 0
    few_jobs: bool = False
    joins: bool = False
    optimistic: bool = False
    chain: int = 0
    late: bool = False
    bytes_stages: int = 0
    grouped: bool = False

    @property
    def of_group(self) -> Config:
        """The config as one group of warps sees it."""
        return replace(self, rows=self.rows // self.groups, warps=self.warps // self.groups, groups=1)

    @property
    def stride(self) -> int:
        """Keys from the begin of a CTA's step to that of its next one."""
        return self.tokens * max(1, self.shares)

    @property
    def team(self) -> int:
        """CTAs, neighbours, that take the same stretch of the line: of tiles that are abreast, or of key heads."""
        return self.abreast * self.heads_abreast

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.shares if self.clustered else 1

    @property
    def meets_apart(self) -> bool:
        """Whether what the warps found meets in memory of its own, for which a short ring leaves room."""
        short = self.stages == 2 if self.clustered else self.meeting_bytes > self.ring_bytes(self.head_dim)
        return self.shares > 0 and short and not self.by_wgmma

    @property
    def by_wgmma(self) -> bool:
        return self.chunk > 0

    @property
    def specialised(self) -> bool:
        """Whether warps have roles: some multiply, others copy."""
        return self.by_wgmma and not self.shares and (not self.narrow or self.halves > 1)

    @property
    def q_in_turn(self) -> bool:
        """Whether Q that TMA copies lies in shared memory until the group is through with it, or has converted it: who copies
        asks for the next piece's then."""
        return self.asks_q and (self.bytes_stages > 0 or not self.holds_q)

    @property
    def sums_wait(self) -> bool:
        """Whether O of a part's splits waits in shared memory while the next split is found, as Q takes the registers."""
        return self.holds_q and self.split > 0

    @property
    def parts_in_squares(self) -> bool:
        """Whether parts of results lie in squares of 8 rows and columns, as a warp has them of wgmma, 32 bytes of each row."""
        return self.specialised  # an H100, one request of 1k to 8k keys, 128 rows: half a microsecond faster

    @property
    def writes_wide(self) -> bool:
        """Whether lanes exchange numbers of a result before it is written, so that a thread writes 16 bytes of a row, not 4."""
        # An H200, 16 queries, pages of 64, microseconds (and 4 bytes), where Q stays in shared memory: 256 columns, 32 heads on
        # 4, 32 requests of 2k keys 78.3 (83.4), of 8k 258.0 (264.8), 128 of 1k 169.8 (183.2); 192 columns, 32 of 2k 58.5
        # (61.2), 128 of 1k 120.5 (129.1); 128 columns, 64 on 8, whose keys cp.async copies, 8 of 1k 18.5 (19.4), 8 queries, 32
        # of 2k 69.8 (71.3); 4 queries, or a ring that has a step less: level
        return self.specialised and not self.split

    @property
    def copied_chunk(self) -> int:
        """Columns that TMA copies together."""
        return 64 if self.bytes_stages else self.chunk

    @property
    def tells(self) -> bool:
        """Whether who copies K, or all, finds the CTA's pieces of work, and tells the other roles, whose code is so much
        shorter."""
        return (self.groups > 1 or self.bytes_stages > 0) and self.box > 0 and not self.split

    @property
    def row_warps(self) -> int:
        return self.rows // MMA_ROWS

    @property
    def token_warps(self) -> int:
        """Warps that have keys of their own, and a state of the softmax."""
        return self.warps // (self.row_warps * self.column_warps)

    @property
    def result_columns(self) -> int:
        """The power of two that holds the columns of V, as tensors of all columns have."""
        return 1 << (self.head_dim_v - 1).bit_length()

    @property
    def unit(self) -> int:
        """Keys of what the schedule deals in."""
        return self.split or self.tokens

    @property
    def copier_warps(self) -> int:
        """Warps that copy or convert; one that copies alone counts as four."""
        return 4 + 4 * self.converters

    @property
    def converters(self) -> int:
        """Roles of four warps that convert."""
        # beside two of them the group would be compiled for 128 registers, and a product of 256 columns takes 158
        return 0 if not self.bytes_stages else 2 if self.groups == 1 and self.chunk <= 128 else 1

    @property
    def registers(self) -> int:
        """Registers that a thread may have, so that all CTAs of a multiprocessor have some. Warps come by fours."""
        warps = 2 * self.warps if self.halves > 1 else self.warps + self.copier_warps if self.specialised else self.warps
        return min(255, 65536 // (32 * warps * self.ctas) // 8 * 8)

    @property
    def group_registers(self) -> int:
        """Registers a thread that the second group sets for itself: what copiers leave."""
        others = 32 * 4 * (self.copier_registers + self.converters * self.converter_registers)
        return (65536 // self.ctas - others) // (32 * self.warps) // 8 * 8

    @property
    def copier_registers(self) -> int:
        """Registers a thread that a warp which copies sets for itself (setmaxnreg)."""
        # by cp.async over pages of 64 keys, with 104 the loop spilled: 16.4 microseconds, not 14.8 (an H200, one request of 8k)
        if self.bytes_stages:
            return 56 if self.groups == 1 else 40
        # An H200, 16 queries of 32 heads on 4, in turn, microseconds (and with 80, so that the groups have fewer): 192 columns,
        # 32 requests of 8k keys, pages of 16 207.9 (220.1), of 64 199.3 (199.3); 256 columns, 32 of 8k 260.4 (264.1), 32 of 2k
        # 76.3 (78.5). Where Q is held: level.
        return (56 if self.split or self.q_in_turn else 80) if self.box else 152

    @property
    def converter_registers(self) -> int:
        """Registers a thread of those warps that convert."""
        return 80 if self.groups == 1 else 64

    @property
    def merged_rows(self) -> int:
        """Rows of many parts that are merged at once, 8 at most, as many as any result has."""
        if self.shares > 1:  # all who have a share help
            return 2 * max(1, 128 // self.head_dim_v)
        if self.narrow:  # so that a thread has four numbers of a part, and many parts at once
            # an H200, one request of 8k keys, 16 heads: 20.0 microseconds, with 8 rows 33.6; 128 heads: 24.6, with 4 rows 28.6
            return 128 * self.warps // self.head_dim_v
        if self.split and self.specialised:
            return 8
        return min(8, self.warps * max(1, 128 // self.head_dim_v))

    @property
    def merged_columns(self) -> int:
        """Columns of these rows that are merged at once: fewer than all, if jobs are so few that there are more CTAs than rows
        are merged at once."""
        return 8 * self.warps if self.few_jobs else self.result_columns

    @property
    def merged_of_few(self) -> int:
        """The same for few parts, of which a thread reads several rows; 0: the same number."""
        # an H200, 128 heads, 32 requests of 8k keys, two parts of each tile: 145 microseconds, with 2 rows 154
        # 16 queries of 16 heads on 2, 256 columns, 32 requests of 8k keys: 148.2, with 8 rows 152.5; of 2k 52.7, 56.2
        asked = self.holds_q or self.asks_q
        return 8 * self.warps if self.split and self.specialised else 16 if self.halves > 1 or asked else 0

    @property
    def few_parts(self) -> int:
        """Parts of a job that are so few; CTAs that have parts, where each may have several."""
        # 8 requests of 8k keys, 16 heads on 2, microseconds (and with 4): 29.5 (30.2) on an H200, 36.7 (37.2) on an H100
        return 4 if self.split or (self.holds_q and self.rows <= MOST_ROWS) else 8

    def parts_beside(self, rows: int) -> int:
        """Partial results of so many rows that the warps can hold beside their sum, in the registers that are free."""
        registers = 136 if self.specialised else 160
        return registers * 32 * self.warps // (rows * self.result_columns) - 1

    def parts_at_once(self, rows: int) -> int:
        """Partial results of so many rows that the warps load together when they merge, a power of two: as many as they can
        hold, since each further turn waits for memory again, but 16 at most, or 8 of wgmma's, which takes less code."""
        # an H100, 128 rows, one request of 1k, 8k: 11.5 and 23.3 microseconds in tiles of 64 rows, with 32 parts 12.4 and 24.0
        if self.specialised:
            return min(16 if self.narrow else 8, power_of_two(self.parts_beside(rows)))
        return min(16, power_of_two(2 * self.parts_beside(rows) // 3))  # maxima and sums take half as many registers as O

    def most_alone(self, rows: int) -> int:
        """Up to how many parts of so many rows the last to come merges them alone: in two turns, or four. 0 where registers do
        not hold them, or where parts must be added up in an order that does not depend on the rows."""
        if self.shares > 1:
            return min(FEW_SHARES, FEW_SHARED_ROWS // rows)
        if self.split:
            return 16 if rows <= 8 else 0
        if self.holds_q:
            return 2
        most = 8 if self.specialised else 32
        beside = self.parts_beside(rows)
        return 0 if beside < 1 else max(4, 2 * min(most, power_of_two(beside)))

    def __post_init__(self):
        if (
            self.tokens // self.token_warps < MMA_ROWS
            or self.rows % MMA_ROWS
            or self.warps % (self.row_warps * self.column_warps)
        ):
            raise ValueError(f"decode: each warp takes 16 rows or more and 16 keys or more of a step, got {self}")

    @property
    def meeting_bytes(self) -> int:
        """Bytes of what the warps of a CTA found, O in float32, which meets in the wider ring."""
        return 4 * self.token_warps * self.rows * self.head_dim_v

    def ring_bytes(self, columns: int) -> int:
        """Bytes of a ring of rows of so many columns."""
        return self.stages * self.tokens * columns * self.kv_bytes

    def smem_map(self) -> list[Buffer]:
        """The rings of K and V, and the rows of Q for wgmma. The results of warps meet in the wider ring, when it is empty, or
        in a place of their own, as does what the CTAs of a cluster give each other (`common.cluster`)."""
        other = ("sK narrow", self.narrow) if self.narrow else ("sV", self.head_dim_v)
        shapes: dict[str, tuple[int, ...]] = {"sQ": (self.rows, self.head_dim + self.narrow)} if self.by_wgmma else {}
        shapes |= {"sP": (self.rows, self.tokens)} if self.by_wgmma and self.narrow and self.halves == 1 else {}
        shapes |= {"sK": (self.stages, self.tokens, self.head_dim), other[0]: (self.stages, self.tokens, other[1])}
        meet = (self.token_warps, MMA_ROWS // 2 if self.clustered else self.rows, self.head_dim_v)
        met = [Buffer("sO of warps", meet, 4 * math.prod(meet))] if self.meets_apart else []
        if self.sums_wait or (self.by_wgmma and self.shares):
            met = [Buffer("sO", (self.rows, self.head_dim_v), 4 * self.rows * self.head_dim_v)]
        wide = self.writes_wide and self.halves == 1 and not self.by_way_of_q
        exchanged = [Buffer("sO of lanes", (self.warps // 4, 2 * KIB), self.warps // 4 * 2 * KIB)] if wide else []
        columns = {"bytes of K": self.head_dim, "bytes of V": self.head_dim_v} if self.bytes_stages else {}
        size = 2 if self.by_wgmma else self.kv_bytes
        met += [
            Buffer(name, (self.bytes_stages, self.tokens, n), self.bytes_stages * self.tokens * n)
            for name, n in columns.items()
        ]
        return [*(Buffer(name, shape, size * math.prod(shape)) for name, shape in shapes.items()), *met, *exchanged]

    @property
    def smem(self) -> int:
        """Bytes of shared memory of a CTA, but for what the compiler adds."""
        return total_bytes(self.smem_map())


def power_of_two(n: int) -> int:
    """The greatest power of two that is not more than a number, or 1."""
    return 1 << max(0, n.bit_length() - 1)
