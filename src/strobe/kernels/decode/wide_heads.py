"""Heads of 129 to 256 columns, of which registers and shared memory hold little: which kernel is the fastest for whom.

Measured on an H200; an H100 has the same choices, which were not timed there.
"""

from __future__ import annotations

import math
from dataclasses import replace

from strobe.device import Arch
from strobe.kernels.common.panels import PANEL_COLUMNS
from strobe.kernels.decode.config import MMA_ROWS, MOST_COLUMNS, MOST_ROWS, Config
from strobe.kernels.decode.heads_abreast import fills_lines
from strobe.kernels.decode.sizes import (
    FALLBACK_SMS,
    LONG_ROOM,
    WGMMA_TOKENS,
    absent_of,
    is_hopeful,
    keys_of,
    keys_of_share,
    rows_of_tile,
    seen_of,
    with_all_stages,
)
from strobe.serving.problem import DecodeProblem

MOST_ROWS_OF_ONE_REQUEST, MOST_HEADS_OF_MANY_ROWS = 32, 4
"""Rows of a key head of one request, and its key heads, up to which CTAs share more than `MMA_ROWS` rows."""
LARGE_PAGE = 64
MOST_KEYS_OF_SMALL_PAGES = 1 << 16
"""Keys of one request's heads of 129 to 256 columns up to which they are shared over small pages: see `fits_shares`."""
LEAST_ROOM_OF_PANELS = 1 << 15
"""Keys of a request from which on heads of up to 192 columns are not shared."""
MOST_KEYS_OF_SHORT_RING = 128
"""Keys that a CTA has of a shared key head up to which its ring has two steps."""
THREE_PANELS = 3 * PANEL_COLUMNS
"""Columns of heads that are not as wide as `MOST_COLUMNS`: wgmma multiplies a panel at a time, so that they need not be a power
of two."""
MOST_KEYS_OF_ONE_GROUP = 1 << 20
"""Keys of all key heads of all requests up to which 64 rows of more than 192 columns are for one group of wgmma whose keys
cp.async copies. An H200, 256 columns, 32 heads on 8, 4 queries, 32 requests of 8k keys, which are 2^21, 543.5 microseconds (by
TMA 499.4), 16 queries 579.1 (504.0)."""
FEW_KEYS_OF_TWO_TILES = 1 << 14
"""The same for 65 to 128 rows."""
MOST_KEYS_OF_WIDE_TILES, MOST_KEYS_OF_NARROWER_TILES = 1 << 17, 1 << 16
"""Keys of all key heads of all requests up to which more than 64 rows are tiles of 64, if each has a multiprocessor; of up to
192 columns. See `of_wgmma`."""
LEAST_KEYS_OF_WIDE_STEPS = 1 << 19
"""The same from which on two groups have steps of 64 keys though columns are more than 192."""


def fits_shares(problem: DecodeProblem) -> bool:
    """Whether CTAs may share key heads: of 16 bits, up to 16 rows, or 32 of one request with few heads; over small pages of one
    request alone, if keys are not many."""
    # An H200, microseconds (and one group of wgmma), pages of 16:
    #   1 query, 1 request, 16 heads on 2: of 2k keys 8.4 (15.0), 8k 11.3 (17.0), 32k 25.8 (29.2); 16 on 8: of 2k 9.1 (11.3), 8k
    #            23.2 (24.2), 32k 75.2 (68.0); 8 requests of 2k 42.6 (36.8), 16 on 2, of 8k 43.8 (38.0)
    #   4 queries, 1 request, 16 on 2: of 2k 12.1 (15.3), 8k 16.6 (18.2), 32k 31.8 (30.7)
    #   16 queries, 1 request, 16 on 8, which are 32 rows: of 2k 14.0 (12.6), 8k 31.5 (25.6), pages of 64 27.4 (25.4)
    # 192 columns of 32k keys, pages of 64 (and three panels by TMA): 1 query, 32 on 8 56.7 (54.5), 4 queries, 16 on 2 28.6
    # (27.3), but of 8k 32 on 8 19.7 (20.5); 8 requests of 4k, 24 on 4, 30.7 (31.8)
    # Larger pages: `of_shares`.
    rows = MOST_ROWS_OF_ONE_REQUEST if problem.batch == 1 and problem.heads_kv <= MOST_HEADS_OF_MANY_ROWS else MMA_ROWS
    large = problem.page_size is None or problem.page_size >= LARGE_PAGE
    few = problem.batch == 1 and keys_of(problem) <= MOST_KEYS_OF_SMALL_PAGES
    long = is_narrower(problem) and seen_of(problem) >= LEAST_ROOM_OF_PANELS
    return (large or few) and not long and problem.kv_dtype.itemsize == 2 and problem.rows <= rows


def of_shares(problem: DecodeProblem, shares: int) -> Config:
    """The config of CTAs that share key heads, whose columns two warps halve: a short ring where keys are few."""
    # An H200, one query, pages of 64, microseconds (and with one step more, or less; one group of wgmma; FlashAttention-3)
    #   16 heads on 2: 1 request of 1k keys 7.5 (7.6; 10.4; 12.1), 8k 12.6 (-; 17.4; 17.3), 32k 25.5 (27.1; 29.7; 30.3); 8 of 1k
    #                  9.3 (9.7; 11.4; 14.3), of 2k 14.6 (-; 15.5; 18.3)
    #   16 on 8:       1 of 2k 10.0 (10.9; 12.3; 14.8), 8k 23.2 (25.6; 24.1; 27.1), 32k 68.3 (88.3; 69.4; 74.6); 8 of 1k 20.6
    #                  (21.8; 22.3; 25.8)
    # four queries, 16 on 2: 1 of 2k 12.3 (12.7; 15.6; 13.8), 8k 17.2 (-; 18.9; 18.8), but 8 of 1k 16.3 (-; 12.7; 16.2)
    dealt = Config(MOST_COLUMNS, MOST_COLUMNS, rows_of_tile(problem.rows), 64, 3, 8, 1, column_warps=2, shares=shares)
    return replace(dealt, stages=2) if keys_of_share(problem, dealt) <= MOST_KEYS_OF_SHORT_RING else dealt


def one_group_gains(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether one group of wgmma, whose keys cp.async copies, is the fastest choice where wgmma can do it."""
    # An H200, microseconds (and mma.sync; TMA and one group that holds Q; FlashAttention-3):
    #   16 heads on 2, 1 query:  32 requests of 8k keys, pages of 64 128.6 (130.6; -; 134.7), of 16 127.2 (-; 128.4; 132.4)
    #                  4 queries: 32 of 8k 132.0 (150.2; 132.1; 137.5), 8 of 8k 40.4 (-; 41.6; 43.9), 32 of 1k 25.0 (-;
    #                  26.2; 29.7)
    #   16 on 8, 1 query: 32 of 8k 489.0 (498.1; -; 502.9), pages of 16 480.7 (568.4; 484.1; 484.0); 8 of 4k 66.1 (-; 67.4;
    #            69.9); 4 queries: 8 of 2k 37.3 (-; 38.5; 41.8), contiguous 36.2 (-; 37.2; 42.2)
    # 128 rows in two tiles: 1 of 8k 18.4 (-; 20.4; 26.2), of 16k 25.4 (-; 25.7; 30.0)
    # With the most keys it is ahead, too, for some milliseconds of launches: 16 on 8, 32 of 32k 1917 (1961; 1949; 1930).
    # But over pages it is far behind where they go on, as the clock falls: 2325 (-; -; 1986).
    # More than 192 columns whose rows are not whole cache lines, with any number of keys: 224 columns, 32 on 8, lengths drawn
    # evenly, 32 from 1k to 4k 158.6 (-; 182.8; 158.9), 16 queries 189.0 (-; 199.7; 164.4), 8 of 8k, 4 queries 124.2 (-; 146.0;
    # 127.7); 208 columns, 1 query 155.4 (-; 164.7; 152.7). Up to 192 columns: `of_panels`.
    if problem.deterministic:
        return False
    if is_narrower(problem):
        return are_tiles_of_one_group(problem, arch, MOST_KEYS_OF_NARROWER_TILES)
    many_columns = min(problem.head_dim, problem.head_dim_v) > MOST_COLUMNS - PANEL_COLUMNS
    cut = many_columns and problem.rows <= MOST_ROWS and not fills_lines(problem)
    return cut or keys_of(problem) <= (FEW_KEYS_OF_TWO_TILES if problem.rows > MOST_ROWS else MOST_KEYS_OF_ONE_GROUP)


def are_tiles_of_one_group(problem: DecodeProblem, arch: Arch, most_keys: int) -> bool:
    """Whether tiles have 64 rows: there is one, or each has a multiprocessor, and they read few keys again."""
    tiles = problem.batch * problem.heads_kv * -(-problem.rows // MOST_ROWS)
    return problem.rows <= MOST_ROWS or (tiles <= (arch.sms or FALLBACK_SMS) and keys_of(problem) <= most_keys)


def of_panels(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of one group of wgmma that holds Q, and multiplies up to 192 columns as three panels, whose keys cp.async
    copies: no more of them than there are, where TMA asks for whole cache lines."""
    # An H200, pages of 64, microseconds (and by TMA, with key heads abreast where lines are cut; FlashAttention-3):
    #   160 columns, 1 query: 32 heads on 8, 128 requests of 1k keys 177.3 (226.3; 200.1), 10 on 2, 16 of 8391 51.3 (54.3; 53.7)
    #                4 queries: 24 on 4, 32 of 8k 184.2 (205.8; 184.4); 16 queries: 24 on 24, pages of 16, 16 of 3610 222.5
    #                (285.4; 232.5); log-normal lengths, 12 queries, 32 on 8, 40 around 10k 585.8 (716.0; 561.7), 16 queries,
    #                32 around 2k 108.8 (117.8; 106.7), 1 query, 24 on 8, pages of 16, 4 around 1787 17.5 (21.2; 20.4)
    #   192 columns, 1 query: 32 on 8, 128 of 1k 195.8 (212.4; 214.2), 24 on 4, 32 of 8k, pages of 16, 191.7 (191.5; 199.6)
    #                4 queries: 24 on 4, 8 of 1k 14.6 (15.6, multiplied as 256 15.5; 17.8), 32 of 8k 190.2 (191.4; 198.0), 32 on
    #                8, 1 of 32k 54.9 (56.2; 58.1); 16 queries: 24 around 2k 91.5 (97.5; 90.1), 16 on 4, 8 of 512 12.4 (13.7;
    #                16.2)
    # Q in shared memory: level for few rows, but 160 columns, 8 queries of 32 on 4, 40 around 1549 68.8 (59.0), 16 queries, 32
    # around 2k 120.9 (109.1). Optimistic (and not), 160 columns, 4 queries, 32 of 8k 184.2 (188.6); 192 190.2 (190.2).
    config = Config(THREE_PANELS, THREE_PANELS, MOST_ROWS, WGMMA_TOKENS, 2, MOST_ROWS // MMA_ROWS, 1, chunk=PANEL_COLUMNS,
                    holds_q=True, optimistic=problem.rows <= MOST_ROWS and is_hopeful(problem))  # fmt: skip
    return with_all_stages(config, arch)


def of_wgmma(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of TMA and wgmma: one group that holds Q beside O or, where tiles of 64 rows would read too many keys again,
    two groups, whose registers O takes, so that Q stays in shared memory. Of up to 192 columns three panels are multiplied."""
    # An H200, 16 queries of 16 heads on 2, 256 columns, microseconds by one group, by two in steps of 32 keys, of 64 (and
    # FlashAttention-3):
    #   pages of 64: 8 requests of 2k keys 22.5, 26.7, - (25.8); 8 of 8k 51.7, 53.4, - (52.5); 32 of 2k 47.0, 52.7, - (57.3)
    #                1 of 32k 34.4, 41.6, - (37.5), of 64k 55.9, 59.2, 63.9 (54.2); 16 of 8k 89.8, 83.0, 87.6 (83.8)
    #                32 of 8k 165.9, 154.9, 150.9 (152.8); 128 of 1k 141.7, 95.1, 102.1 (91.1), of 2k 265, 163.2, 164.4 (151.4)
    #   pages of 16: 64 of 4k 255.0, 161.2, 146.2 (138.6); 128 of 2k 263.2, 172.4, 164.6 (150.3)
    #   contiguous, 32 on 4: 32 of 8k 482.9, 292.8, 262.9 (263.1), 128 of 1k 275.1, 173.7, 180.4 (171.0)
    # Two groups, Q stored by them: 8 of 2k 33.2; with the optimistic softmax 8 of 2k 35.5, 32 of 8k 176.8 (asked for, and steps
    # of 64 keys 152.9); with half of Q in registers 32 of 8k 196.9: ptxas then makes each product wait for the one before.
    # 192 columns, pages of 64, multiplied as 192 (and as 256; FlashAttention-3):
    #   32 on 4, 16 queries, by two groups: 32 of 8k 197.7 (236.7; 203.3), of 2k 60.5 (74.9; 60.5), 8 of 8k 64.8 (76.3; 66.6);
    #            and in tiles of 64: 8 of 4k 41.5, 42.8 (-; 43.3), but 4 of 4k 29.3, 26.7 (31.1; 29.2)
    # Optimistic (and not), log-normal lengths, 192 columns, 16 queries, by two groups, 32 around 2k 90.5 (85.2). Two
    # groups that hold Q, and so spill: 32 of 8k 259.4; steps of 32 keys: 275.7.
    keys, narrower = keys_of(problem), is_narrower(problem)
    one = not narrower and are_tiles_of_one_group(problem, arch, MOST_KEYS_OF_WIDE_TILES)
    long = narrower or (not one and keys >= LEAST_KEYS_OF_WIDE_STEPS and seen_of(problem) >= LONG_ROOM)
    rows, tokens = MOST_ROWS if one else 2 * MOST_ROWS, WGMMA_TOKENS if long else WGMMA_TOKENS // 2
    box = tokens if problem.page_size is None else math.gcd(tokens, problem.page_size)
    columns, chunk, absent = THREE_PANELS if narrower else MOST_COLUMNS, PANEL_COLUMNS, absent_of(problem, rows)
    if box == tokens and not narrower:
        chunk = MOST_COLUMNS if one else 2 * PANEL_COLUMNS
    config = Config(columns, columns, rows, tokens, 2, rows // MMA_ROWS, 1, box=box, chunk=chunk,
                    groups=rows // MOST_ROWS, holds_q=one, asks_q=absent is not None, absent=absent or 0)  # fmt: skip
    return with_all_stages(config, arch)


def is_narrower(problem: DecodeProblem) -> bool:
    """Whether three panels hold all columns."""
    return max(problem.head_dim, problem.head_dim_v) <= THREE_PANELS
