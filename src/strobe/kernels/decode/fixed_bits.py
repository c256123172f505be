"""Bits that do not depend on the batch: which references splits have, and which of the kernels that find the same bits runs."""

from __future__ import annotations

from strobe.device import Arch
from strobe.kernels.decode.config import MOST_ROWS
from strobe.kernels.decode.heads_abreast import fills_lines
from strobe.kernels.decode.sizes import (
    WGMMA_TOKENS,
    has_fast_memory,
    keys_of,
    padded,
    room_of,
    short_split_of,
    weighs_evenly,
)
from strobe.serving.problem import DecodeProblem

LEAST_ROOM_OF_LATE = 2048
"""Keys of a request from which on its steps are so many that the optimistic softmax gains within splits. It is compared with
the power of two that holds a request's room, as bits depend on no more of it."""
MOST_KEYS_OF_ONE_ROLE = 1 << 18
"""Keys of all key heads of all requests up to which eight warps that hold Q have one role, if references are late and each job
is cut. An H200, 16 queries, pages of 64, microseconds (and without Q in registers; and with two roles): 64 heads on 8, 1
request of 32k keys 46.5 (56.6; 57.5), 8 of 4k 48.4 (56.5; 58.8), 4 of 8k 57.6 (67.0; 66.7), but 8 of 8k 93.2 (-; 90.8); 28 on
4, 8 of 8k 74.1 (79.0; 78.8), but 32 of 2k, of more jobs, 60.3 (58.7; 57.7)."""
MOST_KEYS_OF_SHORT_SPLITS, SHORT_SPLIT = 1 << 17, 512
"""Keys of all key heads of all requests up to which 65 to 128 rows are two tiles of one group's, if references are late and
splits shorter than this. An H200, 16 queries, pages of 64, microseconds (and one role of eight warps): 64 heads on 8, 8
requests of 2k keys 34.4 (39.8), 4 of 4k 34.0 (34.7); 28 on 4, 8 of 4k 37.7 (42.9), of 2k 33.9 (37.6). Of splits of 512 keys and
more: 64 on 8, 2 of 8k 39.7 (36.4), 1 of 8k 24.5 (23.7); 28 on 4, 1 of 32k 38.0 (34.1); with 2^18 keys 64 on 8, 8 of 4k 56.6
(48.4)."""
LEAST_KEYS_OF_SMALL_PAGES = 1 << 23
"""Keys of all key heads of all requests from which on TMA copies those of small pages for up to 64 rows, if references are
late. An H200, 64 heads on 8, pages of 16, microseconds (and copied by cp.async): 4 queries, 32 requests of 128k keys 3864
(3973), of 32k 977 (1000), but 8 of 32k 261 (256); 1 query, 32 of 128k 3819 (3937), of 32k 964 (980). Over pages of 64, and
contiguous: level with as many keys, slower by up to a tenth with fewer."""


def is_late(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether what is found of a split is counted from references that move late, so that the optimistic softmax may find it,
    too. Bits depend on that, so it depends on what the requests of a batch have in common, not on how many there are."""
    # An H200, 16 queries of 64 heads on 8, pages of 64, microseconds (and with maxima): 32 requests of 8k keys 296 (332), of
    # 32k 1104 (1397); 8 of 8k 89.3 (93.4), of 32k 276 (322); 128 of 8k 1240 (1387); over pages of 16 32 of 8k 333 (344),
    # contiguous 301 (336); 32 of 2k 97 (107), 128 of 2k 391 (416). For fewer rows see `choice.of_one_group`.
    wide = padded(problem.head_dim) == padded(problem.head_dim_v) == 128
    long = room_of(problem.capacity) >= LEAST_ROOM_OF_LATE
    return problem.deterministic and wide and long and has_fast_memory(arch) and weighs_evenly(problem)


def one_group_gains(problem: DecodeProblem) -> bool:
    """Whether one group of wgmma, whose keys cp.async copies, is the fastest choice if references are late."""
    keys = keys_of(problem)
    if problem.rows > MOST_ROWS:
        return keys <= MOST_KEYS_OF_SHORT_SPLITS and short_split_of(problem) < SHORT_SPLIT
    small_pages = problem.page_size is not None and problem.page_size < WGMMA_TOKENS
    # where TMA would read lines twice (see `heads_abreast`), it was not timed with fixed bits
    return not small_pages or keys < LEAST_KEYS_OF_SMALL_PAGES or not fills_lines(problem)
