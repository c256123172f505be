"""Neighbouring key heads that CTAs, neighbours, walk along at the same time: their keys lie side by side in memory."""

from __future__ import annotations

import math

from strobe.device import Arch
from strobe.kernels.common.panels import PANEL_COLUMNS
from strobe.kernels.decode.config import MMA_ROWS, MOST_ROWS, Config
from strobe.kernels.decode.sizes import has_fast_memory, keys_of, padded
from strobe.serving.problem import DecodeProblem

LINE = 128
"""Bytes of a cache line. TMA asks memory for whole ones, whatever promotion to the L2 cache its descriptors ask for: an H200,
16 queries of 64 heads on 8, 96 columns, 32 requests of 8k keys 220 microseconds, with none 227."""
MOST_OF_CUT_LINES = 8
"""Key heads that are abreast where TMA copies rows that end within a line, of which the next head has the rest: read at another
time, it comes from memory again. An H200, 16 queries of 64 heads on 8, pages of 64, microseconds (and 4; and none;
FlashAttention-3): 96 columns, 24 requests of 8k keys 161.5 (210.9; 280.6; 242.2), 32 of 8k 205.2 (257.5; 300.7; 237.4), 128 of
2k 271.3 (283.1; 382.3; 289.0), 32 of lengths drawn evenly from 2k to 8k 168.9 (203.9; 266.3; 187.1); 112 columns, the same
187.3 (236.0; 307.6; 186.1); 80 columns, 32 of 8k 213.5 (224.7; 280.9; 275.5)."""
MOST_HEADS_ABREAST = 4
"""The same elsewhere. What gains are lengths that differ, and jobs that are cut where heads would be read at different times.
An H200, pages of 64, microseconds (and none), log-normal lengths, 1 | 4 | 16 queries:
  64 heads on 8: 8 requests around 8k keys 68.9 (70.2) | 70.8 (72.3) | 81.7 (82.5); 32 around 2k 73.2 (74.3) | 76.6 (77.9) |
                 86.3 (88.5), around 8k 246.3 (252.8) | 251.8 (258.6) | 270.5 (280.3); 128 around 2k 260.2 (264.1) | 271.3
                 (276.2) | 293.5 (300.4)
  32 on 32:      8 around 8k 245.2 (249.5) | 246.8 (250.4) | 249.6 (252.9); 28 on 4: 39.9 (40.2) | 40.8 (42.0) | 51.0 (50.0)
Fixed bits, 64 on 8: 8 around 8k 73.6 (79.6) | 78.4 (81.2) | 117.8 (112.6); 32 around 2k 75.9 (79.2) | 79.1 (85.3) | 120.7
(122.8). Equal lengths: 24 of 8k 190.8 (196.3) with 4 queries, 207.0 (211.4) with 16; 8 and 32 of 8k: level, or slower by less
than a percent. 8 abreast, 32 around 2k: 72.2 | 75.7 | 87.5."""
MOST_OF_CONTIGUOUS = 8
"""The same of a contiguous cache by mma.sync, where neighbouring heads lie side by side for all keys. An H200, one query,
microseconds (and 4), in long steps: 32 heads on 32, 32 requests of 32k keys 3871 (3942), of 8k 964.5 (976.2), 8 of 128k 3881
(3894); 64 on 8, 128 of 8k 953.4 (962.5); 32 on 8, 128 of 8k 953.6 (965.4); log-normal lengths, 64 on 8, 32 around 8k 245.8
(247.7), 32 on 32, 8 around 8k 251.5 (255.7); other points level. In steps of 64 keys: level."""
MOST_COLUMNS_OF_CUT_LINES, LEAST_KEYS_OF_CUT_LINES = 96, 1 << 17
"""Columns of heads of 128 or fewer, and keys of all key heads of all requests beyond which, where rows end within a cache line,
TMA is the faster choice for 9 to 64 rows, too. An H200, pages of 64, microseconds (and one group, whose keys cp.async copies;
mma.sync; FlashAttention-3): 96 columns, 32 heads on 8, 16 queries, 32 requests of 8k keys 202.7 (243.8; 372.3; 252.3), 128 of
512 66.4 (79.8; 105.7; 84.2), 2 queries of 64 on 8, 128 of 2k 206.8 (248.4; 223.9; 260.1), 4 queries, 8 of 8k 56.8 (59.0; 66.3;
65.7), contiguous 32 of 8k, 32 on 8, 191.2 (220.4; 215.1, by long steps 208.5; -); 80 columns, the first 184.4 (236.2; 349.0;
243.9); log-normal lengths, 8 queries, pages of 16, 32 around 2k, 32 on 8, 80 columns 61.4 (69.7; 69.4; 70.4), 96 65.8 (71.9;
73.0; 73.5). But 1 request of 8k, 16 queries, 96 columns 16.5 (15.2; 23.6; 19.1), 8 around 2k, 4 queries of 64 on 8, 23.6 (23.1;
27.0; 25.0); 112 columns, 4 queries of 64 on 8, 32 around 2k 75.5 (74.2; 81.3; 76.1)."""
LEAST_KEYS_OF_MANY_ROWS = 1 << 19
"""Keys of all key heads of all requests from which on that gains with more than 64 rows: 28 heads on 4 above, 2^18, do not."""


def fills_lines(problem: DecodeProblem) -> bool:
    """Whether a key's row of a head is whole cache lines."""
    return all(dim * problem.kv_dtype.itemsize % LINE == 0 for dim in (problem.head_dim, problem.head_dim_v))


def are_cut_lines_abreast(problem: DecodeProblem) -> bool:
    """Whether TMA, with key heads abreast, is the fastest choice for 9 to 64 rows since lines are cut."""
    # One request, and heads that have no neighbours, are not abreast, for which TMA is slower by up to two thirds.
    if problem.batch == 1 or math.gcd(MOST_OF_CUT_LINES, problem.heads_kv) == 1:
        return False
    dims = problem.head_dim, problem.head_dim_v
    narrow = max(dims) <= MOST_COLUMNS_OF_CUT_LINES and set(map(padded, dims)) == {2 * PANEL_COLUMNS}
    many = problem.rows > MMA_ROWS // 2 and keys_of(problem) > LEAST_KEYS_OF_CUT_LINES
    return narrow and many and not fills_lines(problem)


def heads_abreast_of(problem: DecodeProblem, arch: Arch, config: Config) -> int:
    """How many key heads of a request are walked along together."""
    if config.shares or problem.batch == 1:
        return 1
    most = 1
    if config.box and not fills_lines(problem):
        most = MOST_OF_CUT_LINES
    elif gains(problem, arch, config):
        most = MOST_OF_CONTIGUOUS if problem.page_size is None and not config.by_wgmma else MOST_HEADS_ABREAST
    if config.abreast > 1:
        most = min(most, MOST_HEADS_ABREAST // config.abreast)
    return math.gcd(most, problem.heads_kv)


def gains(problem: DecodeProblem, arch: Arch, config: Config) -> bool:
    """Whether key heads abreast gain though no line is cut: memory is fast, and binds. Elsewhere it was not timed."""
    # Three panels by cp.async, 160 columns, rows that end within a cache line but not within half of one, microseconds (and
    # four abreast): 8 heads on 8, 5 queries, 64 of 1654 keys 137.2 (144.0); 10 on 2, 1 query, 200 around 11.7k, contiguous,
    # 748.1 (767.8); 32 on 8, 128 of 1k 177.3 (184.0). 144 columns, 32 around 2k 97.3 (90.8), 176, 4 queries, pages of 16 118.1
    # (113.2); 192, 64 around 3k, 40 heads on 8, 2 queries 290.7 (285.7); others level.
    panels = config.by_wgmma and not config.box and config.head_dim == 3 * PANEL_COLUMNS
    if panels and problem.head_dim * problem.kv_dtype.itemsize % LINE == LINE // 2:
        return False
    many = keys_of(problem) >= LEAST_KEYS_OF_MANY_ROWS and not config.split and not config.bytes_stages
    return has_fast_memory(arch) and (config.rows <= MOST_ROWS or many)
