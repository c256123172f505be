"""Which of the decode kernels runs a problem, and with which config, with the reason of each choice: what was measured."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from strobe.device import KIB, Arch
from strobe.kernels.common.panels import PANEL_COLUMNS, lie_in_groups
from strobe.kernels.decode import fixed_bits, wide_heads
from strobe.kernels.decode.config import MMA_ROWS, MOST_COLUMNS, MOST_ROWS, Config
from strobe.kernels.decode.heads_abreast import are_cut_lines_abreast, fills_lines, heads_abreast_of
from strobe.kernels.decode.shares import (
    CLUSTER,
    MOST_HEADS_OF_CLUSTERS,
    MOST_HEADS_OF_SMALL_CLUSTERS,
    MOST_SHARED_ROWS,
    SMALL_CLUSTER,
    of_shares,
    takes_shares,
)
from strobe.kernels.decode.sizes import (
    FALLBACK_SMS,
    LONG_ROOM,
    MOST_PARTS,
    MOST_STAGES,
    OVERHEAD,
    WGMMA_TOKENS,
    absent_of,
    chain_of,
    has_fast_memory,
    is_hopeful,
    is_latent,
    jobs,
    keys_of,
    padded,
    room_of,
    rows_of_tile,
    seen_of,
    short_split_of,
    split_of,
    weighs_evenly,
    with_all_stages,
)
from strobe.serving.problem import DecodeProblem

FEW_JOBS = 8
"""Jobs, key heads of all requests, that are so few that each is cut in many parts."""
LEAST_BOX = 16
"""Keys of a page from which on TMA copies them: fewer at a time would take more instructions than cp.async does."""
LATENT_BOX = 64
MOST_TILES_ABREAST = 4
"""Tiles that are walked along together: more leave multiprocessors over. On an H100, 128 heads, 128 requests of 32k keys took
as long as reading them twice, one time for each tile."""
WGMMA_FROM_ROWS = 33
"""Rows that share a key head from which on TMA and wgmma do a decode on Hopper. On an H100 with 64 heads on 8 mma.sync was
faster at 8 and 16 rows and mostly at 32, by far slower at 128; 64: not timed."""
MOST_KEYS_OF_ONE_GROUP = 1 << 20
"""Keys of all key heads of all requests up to which 9 to 64 rows are one group's of wgmma where memory is fast. An H200: ahead
of mma.sync up to 2^19, level at 2^20, behind it at 2^21, where it takes more power: 4 queries of 64 heads on 8, 32 requests of
8k keys over pages 244 microseconds, not 246, for some milliseconds, but 275, not 254, for longer. An H100: ahead with any
number, as whole jobs are taken by turns: 4 queries of 64 heads on 8, 128 requests of 8k keys 1418 microseconds, not 1425; of
unequal lengths, 32 around 2k 104.4, not 108.2, 128 around 2k 386, not 388, 32 around 8k 370, not 374."""
FEW_KEYS_OF_ONE_GROUP = 1 << 16
"""The same for 65 to 128 rows, whose two tiles both read them, and for head dim 64: on an H100 it was ahead at 2^16, behind or
level at 2^19, and at 2^18 with head dim 64."""
LEAST_KEYS_OF_TILES_IN_TURN = 1024
"""Keys of a request from which on more than 32 rows are one group's though a multiprocessor has several tiles of them one after
the other: see `gains_by_one_group`."""
FEW_LATENT_KEYS = 1 << 17
"""Keys of all requests up to which 64 rows of a latent are for eight warps that do the same. On an H200 with 16 heads they were
ahead of two groups in turns at 2^16 (36.4 and 44.5 microseconds), level at 2^17, behind at 2^18 (99.7 and 96.7) and at 2^20
(341 and 298)."""
LEAST_KEYS_OF_TWO_GROUPS = 1 << 20
"""Keys of all key heads of all requests from which on the two groups that share 128 rows have a role each, where they do not
hold Q."""
MOST_KEYS_OF_ONE_ROLE = 1 << 20
"""The same up to which eight warps that hold Q have one role where each job is cut, as there are half as many as
multiprocessors or fewer: their code is half as long, and what begins and ends a piece runs once or twice in a launch. An H200,
16 queries, pages of 64, microseconds (and with two roles; and if these found their pieces by themselves): 28 heads on 4, 1
request of 32k keys 29.8 (32.0; 34.0), 8 of 8k 46.1 (46.4; 49.2); 16 on 2, 32 of 8k 77.6 (77.9; 80.3), over pages of 16 79.2
(81.7; 82.2); 64 on 8, 1 of 128k 137.1 (-; 140.1); but 8 of 32k 267.3 (-; 262.9), and 28 on 4, 32 of 2k, whose jobs are whole,
42.9 (41.4; 42.3)."""
MOST_KEYS_OF_STORED_Q = 1 << 15
"""Keys of all key heads of all requests up to which 65 rows or more of 64 columns are stored by their group, not held: see
`of_wgmma`."""
MOST_CONVERTED_KEYS_OF_TILES = 1 << 17
"""Keys of 8 bits of all key heads of all requests up to which 65 to 128 rows are two tiles of one group's. An H200, 64 heads
on 8, microseconds (and two groups): 1 request of 1k keys 12.8 (18.4), 8 of 1k 18.4 (30.7), 8 of 2k 27.2 (41.1), 1 of 8k 20.8
(27.3); but 32 of 8k 344 (264)."""
LEAST_HEADS_OF_JOINS = 8
"""Key heads of a request from which on the last CTA adds a few parts to its own where Q is held, which gains if lengths differ
(see `results.MOST_JOINED`), and whose code takes time in each piece. An H200, 16 queries of equal lengths, microseconds (and
without, in another run, whose peer took the same time within 6 %): 64 heads on 8, 128 of 2k keys 306 (296), 32 of 1k 46.0
(45.2); but 28 on 4, 32 of 1k, over pages of 256 27.5 (24.5), contiguous 26.4 (24.4), 1 of 32k 31.4 (29.6); 16 on 2, 128 of 1k,
pages of 256, 47.7 (45.5), 1 of 128k 48.5 (46.6)."""
MOST_ROWS_OF_LONG_STEPS = 32
LEAST_ROOM_OF_LONG_STEPS, LEAST_ROOM_OF_LONG_STEPS_OF_MANY_HEADS = 2048, 8192
LEAST_KEYS_OF_LONG_STEPS, LEAST_KEYS_OF_LONG_STEPS_OF_MANY_ROWS = 1 << 17, 1 << 20
"""Keys of a request, and of all key heads of all requests, from which on steps are long: see `takes_long_steps`."""
MOST_UNDER_WAY = 128 * KIB
"""Bytes of keys and values that such a CTA copies at once where it has to look up pages."""
LEAST_KEYS_OF_TURNS = 1 << 20
"""Keys of all key heads of all requests from which on CTAs take whole jobs by turns: for fewer nothing was gained, and 16
queries of 32 requests of 1k keys were slower by the instructions."""
UNDER_WAY = 2
"""Steps of K, and of V, that such a CTA copies at once if it holds Q; the others of its ring are there. What is asked
for beside keys waits for less. An H200, 16 queries of 64 heads on 8, pages of 64, microseconds (and with all 4 under way): 32
requests of 8k keys 264 (288), over pages of 16 286 (311), 8 of 32k 264 (300), 128 of 8k 1069 (1100), 8 of 8k 80.4 (82.4), 32 of
2k 81.9 (82.3), 128 of 2k 320 (320); of unequal lengths, 32 around 2k 97.8 (100.2), 8 around 8k 91.0 (101.7), 128 around 8k 1074
(1116). One step: 292, for 32 of 8k; three of six: 289; two of six: 273. Contiguous (and all 5): 8 of 32k 257 (276), of 128k 992
(1052), 32 of 2k 73.5 (75.3), of 32k 989 (1055), 128 of 2k 304 (302), of 8k 1035 (1077); 28 on 4, 8 of 128k 502 (570), 128 of
8k 504 (532); 16 on 2, 8 of 128k 254 (288); three of five: 260. An H100: not timed by itself."""
START_BYTES = 128 * KIB
"""Bytes of keys and values that a multiprocessor could read in the time that a piece costs beside its keys, where cp.async
copies. An H100, 4 queries of 64 heads on 8, 32 requests whose lengths have a log-normal distribution around 2k: 104.5
microseconds with one group, 110.9 without; by mma.sync 109.5 and 113.1."""
START_BYTES_OF_MANY_ROWS = 256 * KIB
"""The same of more than 16 rows by mma.sync. An H200, 4 queries, log-normal lengths, of FlashAttention-3's speed (and with
`START_BYTES`): 32 requests around 2k keys 0.96 (0.93), 128 1.00 (0.96), 32 around 8k 1.04 (1.04), 128 1.05 (1.04)."""
START_BYTES_OF_TMA, START_BYTES_WITH_Q = 384 * KIB, 192 * KIB
"""The same where TMA copies, behind which a piece's rows of Q come late, and where it copies these, too, ahead of the keys."""
START_KEYS_IN_TURN = 576
"""The same in keys, where Q stays in shared memory, and that of the next piece waits for it. An H200, 16 queries of 32 heads on
4, log-normal lengths, microseconds with 576 (384; 192): 256 columns, 32 requests around 2k keys 109.4 (115.6; 121.9), 8 around
8k 94.3 (97.1; 101.9), 128 around 1k 197.9 (195.7; 220.9), 32 around 8k 301 (304; 320); 192 columns with 768 (512; 256): 81.0
(81.9; 84.6), 74.4 (77.4; 85.3), 154.6 (145.6; 147.4), 223 (224; 232)."""
MOST_KEYS_OF_SPLIT_CLUSTERS = 2048
"""Keys of a request, as far as room goes, up to which shared memory has room for a fixed split beside what CTAs exchange; with
more than 8 rows half as many, as nothing is gained beyond."""
MOST_HEADS_OF_ONE_STEP = 16
"""Key heads of all requests up to which they are for clusters of `CLUSTER` CTAs that have a step each as a split, so that two
fit a multiprocessor. An H200, pages of 64, 1k keys, microseconds (and dealt out), one query: 4 requests, 16 heads on 2, 6.8
(10.6), 2, 28 on 4, 6.6 (10.7), 8, 16 on 2, 10.6 (12.0), but 8, 28 on 4, 17.6 (15.3); four queries: 8, 16 on 2, 14.4 (14.9)."""


def choose(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of a problem on an arch: for wgmma, by TMA or cp.async, where it is faster, else for mma.sync."""
    make: Callable[[DecodeProblem, Arch], Config] = of_mma
    if takes_shares(problem, arch):
        make = of_shares
    elif takes_split_clusters(problem, arch):
        make = of_split_clusters
    elif takes_conversion(problem, arch):
        make = of_converted
    elif takes_held_queries(problem, arch):
        make = of_held_queries
    elif takes_long_steps(problem, arch):
        make = of_long_steps
    elif takes_wgmma(problem, arch):
        if gains_by_one_group(problem, arch):
            make = of_one_group
        elif gains_by_wgmma(problem):
            make = wide_heads.of_wgmma if padded(problem.head_dim) == MOST_COLUMNS else of_wgmma
    return dealt_out(make(problem, arch), problem, arch)


def dealt_out(config: Config, problem: DecodeProblem, arch: Arch) -> Config:
    """The config with what says how its work is dealt out: places for pieces, turns, tiles and key heads abreast."""
    if gains_by_tiles_abreast(problem, config):
        config = replace(config, abreast=tiles_abreast(problem, config))
    return replace(config, start=start_of(config), by_turns=gains_by_turns(problem, arch, config),
                   heads_abreast=heads_abreast_of(problem, arch, config))  # fmt: skip


def gains_by_tiles_abreast(problem: DecodeProblem, config: Config) -> bool:
    """Whether several tiles of 128 rows are better read along together than one after the other: requests are so long that keys
    have left the L2 cache meanwhile."""
    # An H200, pages of 64, microseconds (and with four key heads abreast in their place; FlashAttention-3): 128 columns, 16
    # queries of 96 heads on 8, 32 requests of 2k keys 132.8 (152.4; 134.1), log-normal around 2k 138.1 (157.8; 148.7), of 128
    # on 8, pages of 16, 16 around 4k 123.7 (152.9; 137.0); level with 8 of 32k, and 160 columns, pages of 16, 24 around 6379
    # 510.5 (507.2; 464.3); but 200 around 509, pages of 128, 355.7 (337.9; 303.5). Tiles abreast without key heads, or with
    # four: level, but 160 columns with four 553.3 (490.0).
    by_tma = config.box > 0 and config.by_wgmma and not (config.narrow or config.split or config.bytes_stages)
    return by_tma and config.rows == 2 * MOST_ROWS and problem.rows > config.rows and seen_of(problem) >= LONG_ROOM


def gains_by_turns(problem: DecodeProblem, arch: Arch, config: Config) -> bool:
    """Whether whole jobs are taken by turns: there are many keys, and a request's heads have neighbours. Not by wgmma where
    memory is fast, but for few rows."""
    # Microseconds, pages of 64, and in the line's order, 1 query | 4 queries:
    #   an H100, one group: 64 heads on 8, 128 requests of 8k keys 1406 (1425) | 1418 (1443), of 2k 359 (368) | 369 (376);
    #                       32 on 32, 32 of 8k 1394 (1417) | 1401 (1423); 40 on 8, 128 of 8k 1400 (1420) | 1416 (1434)
    #             mma.sync: 128 of 8k 1411 (1426) | 1425 (1440); 28 on 4 708 (714) | 718 (730); 16 queries 1478 (1500)
    #   an H200, mma.sync:  128 of 8k 960 (971) | 986 (988), of 2k 246 (252) | 260 (264); 32 on 32 956 (962) | 957 (968)
    #   an H200, one group, 4 queries, 128 of 1k: 151 (141). 128 rows: from level to a percent faster, or slower
    #   an H200, queries that are held, pages of 16: 128 of 8k 978 (990) | 996 (1003), of 2k 252 (264) | 261 (265)
    many = keys_of(problem) >= LEAST_KEYS_OF_TURNS and problem.heads_kv > 1 and not config.shares
    slow = config.by_wgmma and has_fast_memory(arch) and not takes_held_queries(problem, arch)
    return many and not config.split and not slow


def start_of(config: Config) -> int:
    """`Config.start`. Splits are pieces of their own, each as costly as the others; for a latent none was tried."""
    if config.split or config.narrow:
        return 0
    if config.q_in_turn and not config.bytes_stages:
        return START_KEYS_IN_TURN // config.tokens
    columns = config.head_dim + config.head_dim_v
    size = START_BYTES_OF_TMA if config.box and not config.bytes_stages else START_BYTES
    if config.asks_q or (config.holds_q and not config.box):
        size = START_BYTES_WITH_Q
    if config.rows > MMA_ROWS and not config.by_wgmma:
        size = START_BYTES_OF_MANY_ROWS
    return size // (config.ctas * config.tokens * columns * config.kv_bytes)


@functools.lru_cache(256)  # asked four times for a call of prompts that looks like none before
def of_mma(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of cp.async and mma.sync: two CTAs share a multiprocessor, and the ring is as long as their shared memory
    allows, up to three steps of 64 keys, so that 26 KB of each multiprocessor are always under way. On an H100 three CTAs with
    two steps were slower, one CTA with six level or slower, and one group of copies a step, instead of two, level."""
    if is_latent(problem):
        return _latent(problem)
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    rows = MMA_ROWS if problem.deterministic else rows_of_tile(problem.rows)
    wide, kv_bytes = max(dim, dim_v), problem.kv_dtype.itemsize
    columns = 2 if dim_v > 128 else 1
    warps = max(4 * columns, rows // MMA_ROWS * columns)
    tokens, stages = max(64, min(256, 8192 * 2 // (wide * kv_bytes))), 3
    # e4m3, an H200, microseconds (and the loop of four barriers, with three steps), pages of 64: 4 queries of 64 heads on 8, 32
    # requests of 8k keys 139.8 (144.9), 128 of 8k 623 (658), 8 of 32k 159.8 (169.9), 8 of 8k 46.0 (47.9); 16 on 2, 32 of 8k
    # 45.7 (47.6), 1 query 39.2 (40.0); 1 query of 64 on 8, 32 of 8k 132.2 (133.8), 32 of 32k 509 (513)
    if kv_bytes == 1 and wide <= 128:
        stages = 2
    if rows == MOST_ROWS and wide == MOST_COLUMNS and kv_bytes == 2:
        tokens, stages = 32, 4  # with 64 the loop spills
    if kv_bytes == 1 and wide == MOST_COLUMNS:
        # an H200, one query, 32 requests of 8k keys, microseconds (and two CTAs of 64 keys, which do not hold Q): 16 heads on 2
        # 74.2 (135.5), 16 on 8 261.4 (518.8)
        tokens = 128
    if rows == MOST_ROWS and wide == 128 and kv_bytes == 2:
        tokens, stages = 32, 6  # 64 rows: a warp has half as many scores at once: 4 % faster (16 queries of 64 heads on 8)
    split = split_of(problem.capacity, max(tokens, 64)) if problem.deterministic else 0
    config = Config(dim, dim_v, rows, tokens, 2, warps, 1, split, kv_bytes, columns, chain=chain_of(problem))
    few = not split and rows == MMA_ROWS and jobs(problem, config) <= FEW_JOBS
    if few and wide == 128 and kv_bytes == 2 and arch.capability == 90:
        config = replace(config, warps=8, tokens=128)  # half as many parts to merge: 4 % faster (batch 1, 8k keys, 8 key heads)
    config = with_room_to_meet(config)
    if config.smem + OVERHEAD > arch.smem_per_block:  # 256 columns, and 99 KB
        config = replace(config, rows=min(rows, 2 * MMA_ROWS), tokens=64 // kv_bytes, stages=2, warps=4)
        config = with_room_to_meet(config)
    room = arch.smem_per_sm or 100 * KIB
    ctas = 2 if 2 * (config.smem + OVERHEAD) <= room else 1
    while config.stages < stages and ctas * (replace(config, stages=config.stages + 1).smem + OVERHEAD) <= room:
        config = replace(config, stages=config.stages + 1)
    return replace(config, ctas=ctas)


@functools.lru_cache(256)
def with_room_to_meet(config: Config) -> Config:
    """A config with stages enough that its warps may meet in the wider ring."""
    while config.meeting_bytes > config.ring_bytes(max(config.head_dim, config.head_dim_v)):
        config = replace(config, stages=config.stages + 1)
    return config


def takes_long_steps(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether one CTA on a multiprocessor, whose steps are long, reads a contiguous cache faster than two: up to 32 rows of
    long requests, and fast memory, which binds. Not where key heads are so many that where one ends and the next begins
    counts."""
    # An H200, one query, of the speed of SDPA by cuDNN (and as it would be without), requests of equal lengths:
    #   64 heads on 8   8 of 8k 1.03 (1.00), of 32k 1.02 (1.00); 32 of 8k 1.02 (1.00); 128 of 8k 1.01 (1.00)
    #   28 heads on 4   8 of 8k 1.03 (0.99), of 32k 1.01 (0.99); 32 of 8k 1.00 (0.97); 128 of 8k 1.00 (0.99)
    #   16 heads on 2   8 of 32k 1.02 (0.99); 32 of 8k 1.02 (1.00), of 32k 1.00 (0.99); 128 of 32k 1.00 (0.98)
    #   32 heads on 32  8 of 8k 1.02 (1.00), of 32k 1.00 (0.99), of 128k 0.99 (0.99); but 128 of 8k 0.96 (0.99)
    # and 32 of 2k, 64 heads on 8, 0.98 (1.01). Log-normal lengths, of FlashAttention-3's speed: 32 around 8k 1.05 (1.07), 32
    # around 32k 1.04 (1.07). Over pages two CTAs are faster.
    # One query, no more key heads than multiprocessors, microseconds (and two CTAs; one group of wgmma): 28 heads on 4, 32 of
    # 2k 35.7 (37.7; 37.3); 64 on 8, 16 of 2k 36.3 (38.3; 37.6), 3 of 8k 32.7 (33.9; 35.3); 32 on 8, 8 of 4k 37.2 (37.4; 38.9).
    # Four queries, microseconds (and two CTAs): 64 heads on 8, 8 of 32k 243.0 (252.5), 32 of 8k 250.3 (254.9), 128 of 8k 972
    # (993); 28 on 4, 32 of 32k 473 (484); 16 on 2, 8 of 128k 247.5 (251.7); 32 on 8, 8 of 32k 240.1 (246.5). Log-normal
    # lengths, 64 on 8: 32 around 8k 264 (268), but 32 around 2k 79.4 (76.5).
    # 64 columns, 64 on 8, microseconds (and two CTAs, in a run whose peer took 1.03 and 1.01 times as long): 8 of 32k 122.3
    # (127.1), four queries 126.4 (132.2).
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    wide = dims in ((64, 64), (128, 128)) and problem.kv_dtype.itemsize == 2
    sms, heads, few_rows = arch.sms or FALLBACK_SMS, problem.batch * problem.heads_kv, problem.rows <= MMA_ROWS // 2
    room = LEAST_ROOM_OF_LONG_STEPS if heads <= sms else LEAST_ROOM_OF_LONG_STEPS_OF_MANY_HEADS
    keys = LEAST_KEYS_OF_LONG_STEPS if few_rows else LEAST_KEYS_OF_LONG_STEPS_OF_MANY_ROWS
    few = problem.rows <= MOST_ROWS_OF_LONG_STEPS and heads <= 8 * sms
    many = seen_of(problem) >= room and keys_of(problem) >= keys and (few_rows or not are_cut_lines_abreast(problem))
    return not problem.deterministic and problem.page_size is None and wide and few and many and has_fast_memory(arch)


def of_long_steps(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of such steps: twice as many keys in each, and two of them in the ring."""
    return replace(of_mma(problem, arch), tokens=128 * 128 // padded(problem.head_dim), stages=2, ctas=1)


def takes_held_queries(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether TMA and one group of wgmma, which holds Q and is optimistic, is the fastest choice for up to 32 rows: very many
    keys, of fast memory, beside which instructions and the power that they take count."""
    # An H200, 4 queries, microseconds (and mma.sync, of a contiguous cache by long steps):
    #   64 heads on 8, pages of 16: 32 requests of 8k keys 252 (257), 8 of 32k 252 (263), 32 of 32k 1044 (1050), of 128k 3901
    #                  (3942), 128 of 2k 261 (268), of 8k 996 (1002); pages of 64: 128 of 8k 993 (993), 32 of 128k 3898 (3981);
    #                  contiguous: 128 of 8k 968 (1006), 32 of 128k 3818 (4042)
    #   pages of 16:   32 of 32k 28 on 4 496 (506), 32 on 32 3913 (4164), 16 on 2 254 (264)
    # 1 query, over pages of 16: 8 of 32k 249 (253), 32 of 128k 3886 (3994), 128 of 8k 978 (983), of 2k 252 (251); of 64: 32 of
    # 128k 3846 (3951), 128 of 8k 980 (977); but contiguous 32 of 128k 3978 (3865). With all steps of the ring under way: level.
    # Of 96 columns, whose lines are cut, where jobs are cut, too: 1 query, 24 of 17.6k, 20 heads on 4, 276 (153, by mma.sync).
    wide = padded(problem.head_dim) == padded(problem.head_dim_v) == 128 and fills_lines(problem)
    few_rows = problem.rows < WGMMA_FROM_ROWS and (problem.page_size is not None or problem.lengths.seqlen_q > 1)
    many = keys_of(problem) > MOST_KEYS_OF_ONE_GROUP and is_hopeful(problem)
    chosen = wide and few_rows and many and has_fast_memory(arch)
    return chosen and not problem.deterministic and takes_wgmma(problem, arch)


def of_held_queries(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of such a group."""
    return of_wgmma(problem, arch, rows=MOST_ROWS)


def takes_split_clusters(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether each key head is a cluster's whose CTAs have a fixed split each, and one tile has all of its rows."""
    # Microseconds (and dealt out), one request, 64 heads on 8, an H200 | an H100:
    #   1 query, 1k: pages of 64 6.4 (9.6) | 6.8 (9.7), of 16 6.6 (9.3) | 7.4 (9.9), contiguous 5.6 (9.3) | 5.5 (9.1)
    #            2k: 10.1 (11.1) | 10.8 (11.4), of 16 - | 11.2 (11.9), contiguous - | 9.8 (11.0)
    #   4 queries, 1k: 7.6 (10.1) | 8.4 (10.7); 2k: 11.9 (11.9) | 12.1 (12.1)
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    if not problem.deterministic or problem.ragged or problem.rows > MOST_SHARED_ROWS or dims != (128, 128):
        return False
    splits, heads = room_of(problem.capacity) // short_split_of(problem), problem.batch * problem.heads_kv
    of_cluster = MOST_HEADS_OF_ONE_STEP if short_split_of(problem) == WGMMA_TOKENS else MOST_HEADS_OF_CLUSTERS
    most = {CLUSTER: of_cluster, SMALL_CLUSTER: MOST_HEADS_OF_SMALL_CLUSTERS}.get(splits, 0)
    room = MOST_KEYS_OF_SPLIT_CLUSTERS // (1 if problem.rows <= MMA_ROWS // 2 else 2)
    return takes_wgmma(problem, arch) and heads <= most and problem.capacity <= room


def of_split_clusters(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of such clusters."""
    split = short_split_of(problem)
    return Config(128, 128, MOST_ROWS, WGMMA_TOKENS, split // WGMMA_TOKENS, 4, 1, split, chunk=128, chain=chain_of(problem),
                  shares=room_of(problem.capacity) // split, clustered=True, posts=True,
                  late=fixed_bits.is_late(problem, arch))  # fmt: skip


def takes_wgmma(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether TMA and wgmma can do it with keys as they are, of 16 bits."""
    return can_take_wgmma(problem, arch) and problem.kv_dtype == problem.dtype


def can_take_wgmma(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether wgmma can do it with keys of 16 bits: head dims of 33 to 128, or both of 129 to 256, or latent keys, pages of
    whole boxes, no scale for each key."""
    by_token = any(scale is not None and len(scale.shape) == 3 for scale in (problem.k_scale, problem.v_scale))
    latent, box = is_latent(problem), LATENT_BOX if is_latent(problem) else LEAST_BOX
    dims = {padded(problem.head_dim), padded(problem.head_dim_v)}
    fits = latent or (not problem.shared and (dims <= {64, 128} or dims == {MOST_COLUMNS}))
    paged = problem.page_size is None or problem.page_size % box == 0
    return arch.capability == 90 and fits and paged and not by_token


def gains_by_wgmma(problem: DecodeProblem) -> bool:
    """Whether TMA and wgmma are the faster choice where they can do it. Bits that must not depend on the number of queries come
    from one kernel, whatever that number is."""
    if is_latent(problem):  # by far faster, with 16 heads and with 128
        return True
    if padded(problem.head_dim) == 64:
        # 64 heads on 8, 16 queries, an H100, 1 of 8k, 32 of 1k, 8k: 20.7, 41.3, 243.8 microseconds, not 21.8, 66.2, 418.9
        # an H200, 32 heads on 8, 16 queries, 32 of 8k: 130.1, not 158.1; 8 of 2k 17.0 (22.1)
        return padded(problem.head_dim_v) == 64 and problem.rows >= WGMMA_FROM_ROWS and not problem.deterministic
    if padded(problem.head_dim) == MOST_COLUMNS:  # two sums of O, of a split and of those before, would not fit
        return not problem.deterministic
    return problem.deterministic or problem.rows >= WGMMA_FROM_ROWS or are_cut_lines_abreast(problem)


def of_wgmma(problem: DecodeProblem, arch: Arch, rows: int = 0) -> Config:
    """The config of TMA and wgmma: 64 rows for four warps, and two CTAs on a multiprocessor; or 128 rows for eight and one CTA.
    What is computed of a row is the same, to the bit. rows: 64 or 128; 0: as the problem asks."""
    # Groups of two roles do not wait for each other, those of one have one code. An H200, 128 rows, microseconds with two
    # (and one), pages of 64 and 16, contiguous: 32 requests of 8k keys: 337 (372), 362 (384), 324 (371); 8 of 8k over pages: 85
    # (87), 91 (89); 32 of 1k: 54 (55), 58 (58); 1 of 32k: 50.3 (48.9).
    tokens = WGMMA_TOKENS
    split = short_split_of(problem) if problem.deterministic else 0
    if is_latent(problem):
        return of_latent(problem, arch)
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    box = tokens if problem.page_size is None else math.gcd(tokens, problem.page_size)
    rows = rows or (128 if problem.rows > 64 else 64)
    # An H100, 128 rows, microseconds as it is now (and with all stages, written by 4 bytes), pages of 64 and 16:
    #   a long room:  8 requests of 8k keys 104.9 (107.4), 108.6 (111.1); 32 of 8k 378.8 (382.4), 385.5 (400.4);
    #                 1 of 32k 59.8 (60.8), 62.0 (65.9); 8 of 2k 37.5 (38.0), 39.2 (40.9)
    #   a short one:  32 of 1k 61.7 (64.8), 64.1 (68.0); 128 of 1k 233.7 (237.7), 237.8 (243.2)
    # What is asked for beside keys (page numbers, Q) comes behind all that is under way. With 4 stages 128 of 1k took 257.5
    # over pages of 16. An H200, of FlashAttention-3's speed, before it and now: 32 of 1k 0.92 and 0.94, over pages of 16 0.88
    # and 0.93; 32 of 8k 0.89 and 0.95, 0.83 and 0.87.
    # Two groups that hold Q, with the optimistic softmax from 8k on, on an H200, of FlashAttention-3's speed (and before, in
    # the same run), pages of 64 and 16:
    #   128 requests of 8k keys 1.10 (0.93), 0.97 (0.84); 8 of 32k 1.08 (0.92), 0.90 (0.85); 32 of 8k 1.05 (1.02), 0.93 (0.87);
    #   8 of 8k 0.99 (0.95), 0.96 (0.90); 32 of 2k 0.97 (0.90), 0.94 (0.87); 32 of 1k 1.00 (0.92), 0.98 (0.93)
    # On an H100 level or a percent or two faster from 2^20 keys on; for fewer, one group was ahead.
    # TMA copies Q, results are written by 16 bytes, and up to four parts merged 16 rows at a time, on an H200 (and before):
    #   28 heads on 4: 32 requests of 1k keys, contiguous, half of the ring under way, 25.3 (27.8), pages of 64 26.7 (29.1);
    #   128 of 1k 86.5 (91.7); 32 of 2k 42.2 (44.6); 8 of 8k 49.3 (51.3); 32 of 8k 133.0 (135.5); 1 of 32k 34.8 (35.2)
    #   64 on 8: 128 of 2k 296 (310); 8 of 2k 32.7 (33.6); 32 of 8k 257 (261); 128 of 8k 1025 (1044)
    # and on an H100: 128 of 2k 409 (418), contiguous 400 (415), over pages of 16 416 (424); 32 of 8k 375 (378).
    # As an H200 does it since roles are told of their pieces, an H100 (and before: up to 2^20 keys one role, which held no Q):
    #   28 heads on 4: 32 requests of 1k keys 32.6 (34.6), contiguous 31.1 (33.4), 32 of 2k 55.3 (58.6), 128 of 1k 112.6 (118),
    #   8 of 8k 59.3 (62.2); 64 on 8: 1 of 32k 59.0 (60.4), 12 of 2k 53.2 (61.0), contiguous 32 of 2k 101.1 (108.5); around 1k,
    #   8 of unequal lengths 29.8 (33.7), around 2k 44.3 (43.7), 32 around 2k 122.7 (132.7)
    many, long, paged = rows > MOST_ROWS, seen_of(problem) >= LONG_ROOM, problem.page_size is not None
    # One CTA that holds Q has 33 to 64 rows. An H200, 16 queries of 32 heads on 8, microseconds (and two that do not): 8
    # requests of 32k keys, contiguous 247.6 (256.7), over pages of 256 249.4 (255.3), of 16 253.9 (264.8), 8 of 128k,
    # contiguous 958 (976), of unequal lengths, 32 around 8k 273 (283); 32 and 128 of 8k, 32 of 32k: level. With all six steps
    # under way, not half of four: 251.0, -, 254.6, 966, 276.
    # With 64 columns, 16 queries, an H200, microseconds (and without Q in registers, the optimistic softmax, and rows that TMA
    # copies): 64 heads on 8, 32 requests of 8k keys, pages of 64 152.2 (188.5), of 16 164.6 (202.4), contiguous 173.0 (222.9),
    # 8 of 8k 46.3 (63.0), 32 of 2k 47.4 (65.6), 128 of 1k 96.8 (122.4), 1 of 8k 16.7 (18.8), but 1 of 2k 12.2 (11.4); of all
    # steps under way 155.5, 47.4, 48.0; of one role of eight warps 173.0, 52.3, 53.5.
    narrow = dim == dim_v == 64 and keys_of(problem) > MOST_KEYS_OF_STORED_Q
    late = fixed_bits.is_late(problem, arch)
    holds_q = late if problem.deterministic else dim == dim_v == 128 or narrow
    apart = many and (holds_q or (keys_of(problem) >= LEAST_KEYS_OF_TWO_GROUPS and (long or not problem.deterministic)))
    absent = absent_of(problem, rows) if holds_q else None
    grouped = holds_q and box < tokens and takes_groups(problem)
    chunk = min(dim, dim_v) if box == tokens or grouped else PANEL_COLUMNS
    ctas = 1 if holds_q and not (narrow and rows <= MOST_ROWS) else 128 // rows
    config = Config(dim, dim_v, rows, tokens, 2, rows // 16, ctas, split, box=box, chunk=chunk, groups=1 + apart,
                    by_way_of_q=many and not long and not holds_q, holds_q=holds_q, asks_q=absent is not None,
                    absent=absent or 0, optimistic=late or (holds_q and is_hopeful(problem)),
                    under_way=(2 * UNDER_WAY if narrow and many else UNDER_WAY) if holds_q else 0,
                    chain=chain_of(problem), late=late, grouped=grouped)  # fmt: skip
    # Parts merged by blocks of columns, microseconds (and by rows), one request: of 128k keys of 16 heads on 2 50.0 (52.8) on
    # an H200, 64.0 (66.2) on an H100; of 32k of 28 on 4 35.1 (34.8), 38.4 (39.3); but of 64 on 8, of 16 parts, 62.0 (60.9).
    sms, number = arch.sms or FALLBACK_SMS, jobs(problem, config)
    config = replace(config, few_jobs=many and not split and sms // number > MOST_PARTS,
                     joins=many and holds_q and not (split or narrow) and problem.heads_kv >= LEAST_HEADS_OF_JOINS)  # fmt: skip
    most_keys = fixed_bits.MOST_KEYS_OF_ONE_ROLE if split else MOST_KEYS_OF_ONE_ROLE
    if holds_q and not narrow and 2 * number <= sms and keys_of(problem) <= most_keys:
        config = replace(config, groups=1)
    most = MOST_STAGES
    if config.under_way or (many and long and paged):
        most = MOST_UNDER_WAY // (tokens * (dim + dim_v) * config.kv_bytes)
    return with_all_stages(config, arch, most)


def takes_groups(problem: DecodeProblem) -> bool:
    """Whether keys may lie in groups with all of their columns: these are two panels, and pages lie a whole number of groups
    apart."""
    # An H200, 16 queries, pages of 16, microseconds (and in two boxes): 64 heads on 8, 128 requests of 1k keys 174.8 (175.8),
    # of 2k 312 (324), 32 of 1k 47.9 (49.7), of 2k 79.9 (81.9), 1 of 32k 44.4 (45.2); 28 on 4, 128 of 2k 159.6 (169.8), 8 of
    # 8k 45.6 (46.1), of 32k 150.7 (156.8). Over pages of 64, and contiguous: level, or up to a percent faster or slower.
    return problem.head_dim == problem.head_dim_v == 2 * PANEL_COLUMNS and lie_in_groups(problem.page_rows)


def of_latent(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of TMA and wgmma for multi-head latent attention: eight warps that do the same, or two groups of four."""
    split = split_of(problem.capacity, WGMMA_TOKENS) if problem.deterministic else 0
    usual = Config(512, 512, 64, WGMMA_TOKENS, 2, 8, 1, split, column_warps=2, narrow=64, box=LATENT_BOX, chunk=256,
                   chain=chain_of(problem))  # fmt: skip
    keys = keys_of(problem)
    if split or (problem.rows <= usual.rows and keys <= FEW_LATENT_KEYS):
        return usual
    abreast = min(tiles_abreast(problem, usual), arch.sms or 1)
    return replace(usual, head_dim_v=256, warps=4, column_warps=1, halves=2, abreast=abreast)


def tiles_abreast(problem: DecodeProblem, config: Config) -> int:
    """How many tiles of a key head are walked along together: all of a request, or of a query where requests have different
    numbers; up to four, so that few multiprocessors are left over."""
    rows = problem.group if problem.ragged else problem.rows
    tiles = -(-rows // config.rows)
    return -(-tiles // -(-tiles // MOST_TILES_ABREAST))


def gains_by_one_group(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether one group of wgmma, whose keys cp.async copies, is the fastest choice where wgmma can do it: more rows than half
    of a product of mma.sync and one group's at most, or two where both may read the keys, and, where memory is fast, not too
    many keys. Bits that must not depend on the number of queries come from `of_wgmma`, whatever that number is."""
    # An H200, page 64, microseconds beside those of mma.sync, in runs of their own, whose peer took the same time within 2 %:
    #   16 rows, 32 heads on 8:  1 of 1k 8.4 (9.2), 1 of 8k 15.3 (16.6), 8 of 1k 14.2 (14.8), 8 of 8k 67.3 (70.9);
    #                            page 16: 1 of 8k 15.2 (17.8), 8 of 8k 67.7 (71.7)
    # Up to 8 rows are mma.sync's. An H200, one query, page 64, microseconds beside those of one group, in one run:
    #   28 heads on 4:  8 of 8k 38.8 (40.0), 32 of 2k 38.2 (36.5), 32 of 4k 68.5 (67.6), all but one of them an eighth as long
    #                   15.8 (19.7); log-normal lengths, 32 around 1k 26.3 (28.3)
    #   64 heads on 8:  8 of 8k 71.1 (71.0), 3 of 32k 109.0 (105.2); log-normal lengths, 8 around 2k 26.4 (27.0)
    # An H100, 32 rows (4 queries of 64 heads on 8), bf16, microseconds beside those of mma.sync:
    #              1 of 1k      1 of 8k      8 of 1k      8 of 8k        32 of 8k
    #   page 16    10.0 (12.0)  20.7 (22.2)  19.4 (21.0)   97.8 (102.3)  375 (365)
    #   page 64    10.1 (11.9)  22.0 (22.2)  21.0 (20.9)  100.3 (101.0)
    # TMA and two CTAs, 8 of 8k: 107.8 and 107.4; 33 to 64 rows, which are the same products, were not timed.
    # 128 rows (16 queries) in two tiles, beside TMA and tiles of 128:
    #              1 of 1k      1 of 8k      8 of 1k
    #   page 16    11.9 (15.8)  24.2 (30.6)  21.7 (32.4)
    #   page 64    12.1 (14.9)  24.2 (28.8)  21.7 (31.6)
    #   contiguous 11.4 (14.9)  23.0 (28.0)  20.3 (29.0)
    # head dim 64, 32 rows, beside mma.sync: 14.7 (17.7) for 1 of 8k, but 33.3 (31.4) for 32 of 1k
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    if dim != dim_v or problem.rows > 2 * MOST_ROWS:
        return False
    keys = keys_of(problem)
    if dim == MOST_COLUMNS:
        return wide_heads.one_group_gains(problem, arch)
    if fixed_bits.is_late(problem, arch):
        return fixed_bits.one_group_gains(problem)
    if problem.deterministic:
        return dim == 128 and (problem.rows <= MOST_ROWS or keys <= FEW_KEYS_OF_ONE_GROUP)
    if dim == 64:
        return MMA_ROWS < problem.rows <= MOST_ROWS and keys <= FEW_KEYS_OF_ONE_GROUP
    if problem.rows <= MMA_ROWS // 2:
        return False
    if problem.rows <= MOST_ROWS and not fills_lines(problem):
        return not are_cut_lines_abreast(problem)
    # An H200, 64 heads on 8, pages of 64, microseconds (and TMA), where a multiprocessor has tiles one after the other:
    #   16 queries: 32 requests of 128 keys 25.5 (17.6), of 256 32.3 (22.0); but 8 of 128 8.6 (9.4), of 1k 19.4 (20.7)
    #    8 queries: 32 of 128 14.5 (13.1), of 512 26.1 (23.5), 128 of 128 47.1 (34.8), of 512 89.8 (78.5), but 8 of 512 12.6
    #               (13.4)
    tiles = problem.batch * problem.heads_kv * -(-problem.rows // MOST_ROWS)
    few_keys = seen_of(problem) < LEAST_KEYS_OF_TILES_IN_TURN
    if problem.rows >= WGMMA_FROM_ROWS and tiles > (arch.sms or FALLBACK_SMS) and few_keys:
        return False
    if problem.rows > MOST_ROWS:
        # An H200, 16 queries, pages of 64, microseconds with 2^16 keys (and by one role that holds Q): 64 heads on 8, 1
        # request of 8k 22.2 (20.3), 2 of 4k 21.3 (19.1), 4 of 2k 20.6 (20.6), 8 of 1k 19.2 (20.7); 28 on 4, 1 of 16k 20.7
        # (19.9), 4 of 4k 20.9 (19.2), 8 of 2k 21.1 (20.6); 16 on 2, 1 of 32k 22.2 (21.6), 8 of 4k 21.3 (19.0), 32 of 1k 19.4
        # (20.7). With 2^15: 28 on 4, 1 of 8k 14.5 (16.0); 64 on 8, 1 of 4k 17.2 (18.3). An H100: not timed.
        long = seen_of(problem) >= LONG_ROOM and has_fast_memory(arch)
        return keys <= (FEW_KEYS_OF_ONE_GROUP // 2 if long else FEW_KEYS_OF_ONE_GROUP)
    return keys <= MOST_KEYS_OF_ONE_GROUP or not has_fast_memory(arch)


def of_one_group(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of one group of wgmma, beside four warps that copy by cp.async: one CTA a multiprocessor, and a long ring."""
    # two CTAs with half a ring each: 13.2, 26.7, 25.3 and 109.8 microseconds, in place of the four in the first line above
    dim, dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    if dim == dim_v == MOST_COLUMNS and wide_heads.is_narrower(problem):
        return wide_heads.of_panels(problem, arch)
    split = short_split_of(problem) if problem.deterministic else 0
    # 256 columns in steps of 64 keys, 16 heads on 2: 1 query, 32 of 8k 135.1 microseconds (128.6), 8 of 2k 18.8 (15.3)
    tokens = WGMMA_TOKENS // 2 if dim == MOST_COLUMNS else WGMMA_TOKENS
    # Splits whose references are late, an H200, microseconds (and with running maxima, and Q in shared memory), 64 heads on 8,
    # pages of 64:
    #   4 queries: 32 requests of 8k keys 256.0 (306.9), 8 of 32k 253.6 (302.0), of 8k 68.5 (69.9), of 4k 38.7 (39.8), 1 of 8k
    #              17.7 (17.9), of 4k 14.4 (15.7), 32 of 128k 3815 (4067), over pages of 16 3973 (4333), contiguous 3761 (4025)
    #   1 query:   32 of 8k 249.2 (250.4), 8 of 32k 251.7 (259.7), 1 of 8k 16.7 (16.8), of 4k 13.4 (14.2), 128 of 2k 269.4
    #              (281.1), 32 of 128k over pages of 16 3937 (4753); but 28 heads on 4, 1 of 8k 17.5 (17.3), 4 queries, 32 of 2k
    #              39.3 (38.2)
    late = fixed_bits.is_late(problem, arch)
    config = Config(dim, dim_v, 64, tokens, 2, 4, 1, split, chunk=dim, chain=chain_of(problem), holds_q=late,
                    optimistic=late, late=late)  # fmt: skip
    return with_all_stages(config, arch)


def takes_conversion(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether wgmma is the faster choice for a cache of 8 bits, where it can do it: many rows, which mma.sync takes longer for
    than for the same keys in 16 bits. Bits that must not depend on the number of queries come from mma.sync."""
    # An H200, e4m3, pages of 64, 16 queries, microseconds (mma.sync), 32 heads on 8: 1 request of 1k keys 11.7 (14.2), 8 of 1k
    # 16.4 (28.9), 32 of 1k 32.7 (41.3); 64 on 8: 32 of 1k 56.0 (76.4)
    # 256 columns, 32 requests of 8k keys, 16 heads on 2: 4 queries 87.1 (96.8), 16 154.8 (299.9), but 1 84.5 (74.2)
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    least = {(128, 128): WGMMA_FROM_ROWS, (MOST_COLUMNS, MOST_COLUMNS): MMA_ROWS + 1}.get(dims)
    if least is None or problem.rows < least or problem.kv_dtype.itemsize > 1:
        return False
    return not problem.deterministic and can_take_wgmma(problem, arch)


def of_converted(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of wgmma for a cache of 8 bits: one group of warps, or two for 65 rows or more, beside those that convert."""
    # An H200, e4m3, microseconds (copied by cp.async and converted by the same warps, to bfloat16; a cache of 16 bits):
    #   64 rows:  32 requests of 8k keys, pages of 64 178 (232; 255), of 16 161 (223; 257), contiguous 172 (231; 253); 8 of 8k
    #             48.0 (57.6; 71.2); 128 of 8k 708 (927; 1017); 32 of 2k 50.8 (60.0; 71.3)
    #   128 rows: 32 of 8k 264 (304; 259), of 16 244 (364; 267), contiguous 269 (315; 260); 8 of 8k 80.4 (82.3; 77.0); 128 of
    #             8k 1057 (1222; 1029); 32 of 2k 82.1 (83.5; 77.4); without Q in registers: 297, 82.0, 1187, 86.2
    # 64 rows in steps of 128 keys: 32 of 8k 168, of 16 163, contiguous 165; 8 of 8k 51.1; 128 of 8k 669; 32 of 2k 52.5.
    # Of 256 columns two groups that hold Q have no registers for O, and one has in steps of 32 keys.
    dim = padded(problem.head_dim)
    tiles = MOST_ROWS < problem.rows <= 2 * MOST_ROWS and keys_of(problem) <= MOST_CONVERTED_KEYS_OF_TILES
    groups = 2 if problem.rows > MOST_ROWS and not tiles and dim == 128 else 1
    tokens = WGMMA_TOKENS if dim == 128 else WGMMA_TOKENS // 2
    hopeful = weighs_evenly(problem)
    box = tokens if problem.page_size is None else math.gcd(tokens, problem.page_size)
    absent = absent_of(problem, MOST_ROWS * groups)
    config = Config(dim, dim, MOST_ROWS * groups, tokens, 2, 4 * groups, 1, kv_bytes=1, box=box, chunk=dim, groups=groups,
                    holds_q=True, asks_q=absent is not None, absent=absent or 0, optimistic=hopeful,
                    bytes_stages=4)  # fmt: skip
    return with_all_stages(config, arch)


def _latent(problem: DecodeProblem) -> Config:
    """The config of multi-head latent attention: one CTA on each multiprocessor, four warps share the columns of O."""
    rows = 32 if problem.rows > MMA_ROWS and not problem.deterministic else MMA_ROWS
    split = split_of(problem.capacity, 64) if problem.deterministic else 0
    kv_bytes = problem.kv_dtype.itemsize
    return Config(512, 512, rows, 64, 2 if kv_bytes == 2 else 4, 8, 1, split, kv_bytes, 4, 64, chain=chain_of(problem))


DTYPES = (torch.float16, torch.bfloat16)
