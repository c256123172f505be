"""Key heads that have CTAs of their own, which share their keys evenly: when that is faster, and how many CTAs."""

from __future__ import annotations

from dataclasses import replace

from strobe.device import Arch
from strobe.kernels.decode import wide_heads
from strobe.kernels.decode.config import MMA_ROWS, MOST_COLUMNS, Config, power_of_two
from strobe.kernels.decode.sizes import (
    FALLBACK_SMS,
    has_fast_memory,
    keys_of,
    keys_of_share,
    padded,
    rows_of_tile,
    seen_of,
)
from strobe.serving.problem import DecodeProblem

MOST_SHARED_ROWS = 32
"""Rows of a key head up to which CTAs share it evenly. An H200, one request, 8 queries of 64 heads on 8, 8k keys: 20.7
microseconds, 16.7 by one group of wgmma; 4 queries: 15.9 and 16.5."""
MOST_SHARES = 64
"""CTAs that share a key head where keys are not many: each has a part that is merged."""
MANY_SHARED_KEYS = 1 << 17
"""Keys of all key heads from which on copies bind, not what comes ahead and behind: eight warps have a step. An H200, one query
of 64 heads on 8, 32k keys: 37.0 microseconds, 39.4 with four warps; an H100, 8k keys: 18.1 and 17.4."""
LEAST_HEADS_OF_SHORT_RINGS = 8
"""Key heads from which on one request's many keys over pages have a ring of two steps: see `gains_by_less_under_way`."""
MOST_KEYS_OF_SHARE = 1024
"""Keys, as far as room goes, that a CTA has at most of a key head of one of several requests, since all others may wait for it;
half as many, of 16 bits, with more than 8 rows if it shares. An H200, 4 queries of 64 heads on 8, 8 requests of 2k keys,
microseconds (and dealt out): 22.9 (23.2), all but one an eighth as long 20.0 (13.5). Half as many of more than 128 columns,
too: one query of 28 heads on 4, 256 columns, 16 requests of log-normal lengths around 302, the longest of which has nearly 2k,
28.1 (14.3); with half as many, 8 of 2k 21.6 (22.8), 16 heads on 8, 8 of 1k 20.4 (22.4); but with as many as of 128 columns
8 of 2k 1.16 times as fast as FlashAttention-3 (1.09)."""
MOST_KEYS_OF_SHORT_STEPS = 128
"""Keys of 8 bits of such a CTA, of one request, up to which steps have as many as those of 16 bits; of several requests up to
twice as many, or their steps, with more than 8 rows."""
MOST_REQUESTS = 65535
"""What a grid may have in its second dimension."""
CLUSTER, SMALL_CLUSTER = 16, 8
MOST_HEADS_OF_CLUSTERS, MOST_HEADS_OF_SMALL_CLUSTERS = 4, 15
"""Key heads of all requests up to which they are for clusters of that size: so each CTA of all has a multiprocessor to itself
(of an H200, which runs 15 clusters of 8 so)."""
MOST_HEADS_OF_ONE = 8
"""Key heads of one request up to which they are for clusters of `CLUSTER` CTAs that meet, all the same. Of several requests 8
of 4k keys: an H200, 11.0 microseconds, shared without a cluster 9.6."""
MOST_KEYS_OF_POSTS, MOST_KEYS_OF_CLUSTERS = 1024, 4096
"""Keys of a request, as far as room goes, up to which its key heads are for clusters whose CTAs post to each other, and for
clusters of `CLUSTER` CTAs that meet."""


def takes_shares(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether each key head has CTAs of its own, which share it evenly whatever its length: where a tile has all of its rows,
    and two CTAs or more have it or, of several requests, the longest one is not waited for long."""
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    fits = dims == (128, 128) and problem.kv_dtype.itemsize <= 2 and problem.rows <= MOST_SHARED_ROWS
    if dims == (64, 64):
        # An H200, 64 heads on 8, pages of 64, microseconds (and dealt out): 1 query, 1 request of 2k keys 6.0 (7.7), 8k 9.3
        # (11.0), 32k 21.1 (22.8), 8 of 2k 11.9 (13.1); 4 queries, 1 of 2k 6.9 (8.8), 8k 11.6 (11.9)
        # 4 queries of several (and one group of wgmma; mma.sync dealt out): 8 of 256 7.2 (6.9; 9.0), of 1k 11.5 (11.6; 13.8),
        # 32 of 256 9.6 (12.3; 11.9), of 1k 21.5 (26.8; 23.3), 128 of 256 29.7 (38.4; 32.7), of 1k 74.2 (96.4; 80.5); behind a
        # window of 128 keys 8 6.6 (7.0; 8.5), 32 7.6 (11.9; 9.2), 128 28.0 (42.9; 34.8)
        fits = problem.kv_dtype.itemsize == 2 and problem.rows <= MOST_SHARED_ROWS
    if dims == (MOST_COLUMNS, MOST_COLUMNS):
        fits = wide_heads.fits_shares(problem)
    return not problem.deterministic and fits and arch.capability == 90 and shares_of(problem, arch) > (problem.batch == 1)


def shares_of(problem: DecodeProblem, arch: Arch) -> int:
    """How many CTAs have a key head, if each multiprocessor has one; 0 where work is better dealt out from the lengths. Of one
    request eights of them, if they are many."""
    if problem.batch > 1:
        return shares_of_several(problem, arch)
    shares = (arch.sms or FALLBACK_SMS) // problem.heads_kv
    if keys_of(problem) < MANY_SHARED_KEYS:
        shares = min(MOST_SHARES, shares)
    return shares if shares < 8 else shares // 8 * 8


def shares_of_several(problem: DecodeProblem, arch: Arch) -> int:
    """The same of several requests, whose lengths may differ: a power of two, or 1 where key heads are so many that nobody
    waits long for a multiprocessor that has one more than others."""
    # An H200, one query, pages of 64, microseconds (and dealt out) where all requests have as many keys as there is room for,
    # where lengths are drawn evenly up to that, and where one has so many and all others an eighth:
    #   16 heads on 2   8 of 1k  6.9 (9.4), 6.6 (8.5), 6.3 (7.8)    8 of 4k 12.6 (15.1), 10.6 (13.2), 9.8 (11.3)
    #   28 heads on 4   8 of 1k  8.8 (11.6), 7.8 (9.8), 7.3 (8.8)   8 of 4k 20.8 (22.8), 15.3 (16.9), 14.1 (12.4)
    #                  32 of 1k 19.0 (20.8), 14.6 (19.0), 11.9 (11.8)
    #   64 heads on 8   8 of 1k 12.4 (14.1), 9.9 (11.5), 9.4 (9.1)  8 of 2k 20.0 (21.9), 15.4 (17.3), 14.1 (11.8)
    #                 128 of 1k 124 (134), 73 (84), 25 (42)
    # contiguous: 16 heads on 2, 8 of 1k 6.7 (9.6); 28 on 4, 8 of 1k 8.2 (11.9), 32 of 1k 18.5 (20.1); 32 on 8, 8 of 1k 11.7
    # (13.8), 32 of 1k 33.3 (36.5); 64 on 8, 8 of 2k 21.4 (24.4), 17.4 (19.7), 17.4 (13.9); 28 on 4, 8 of 4k 21.9 (24.4), 16.0
    # (17.0), 17.6 (13.7). With 160 key heads of 1k whole ones would take 30.1 (28.2), with 400 51.8 (59.4).
    # Four queries, pages of 64:
    #   64 heads on 8   2 of 1k 10.7 (11.6)  3 of 2k 16.0 (21.0)  8 of 1k 15.1 (15.6), 14.0 (15.3), 13.3 (10.8)
    #                  32 of 1k 37.8 (39.0), 30.3 (33.8), 20.2 (17.6)  128 of 1k 135.9 (139.8), 86.0 (95.1), 34.1 (45.7)
    #   28 heads on 4   2 of 1k 9.5 (11.2)  8 of 1k 12.3 (12.1), 11.6 (11.5), 10.8 (9.5)
    #                  32 of 1k 21.1 (21.7), 19.2 (22.0), 17.6 (13.5)
    # Two queries, 64 heads on 8, 8 of 1k 15.1 (17.0), 28 on 4 11.1 (13.2), 16 on 2 9.9 (11.9).
    sms, heads = arch.sms or FALLBACK_SMS, problem.batch * problem.heads_kv
    shares = min(MOST_SHARES, power_of_two(sms // heads))
    most = shares * MOST_KEYS_OF_SHARE
    if shares > 1 and problem.rows > MMA_ROWS // 2 and problem.kv_dtype.itemsize == 2:
        most //= 2
    if padded(problem.head_dim) == MOST_COLUMNS:
        most //= 2
    even = heads <= sms or 2 * heads >= 3 * sms
    return shares if even and seen_of(problem) <= most and problem.batch <= MOST_REQUESTS else 0


def cluster_of(problem: DecodeProblem) -> int:
    """CTAs of the clusters that have its key heads, or 1."""
    heads = problem.batch * problem.heads_kv
    if problem.rows > MMA_ROWS // 2 or padded(problem.head_dim) != 128:
        return 1
    if seen_of(problem) > MOST_KEYS_OF_POSTS:
        most = MOST_HEADS_OF_ONE if problem.batch == 1 else MOST_HEADS_OF_CLUSTERS
        return CLUSTER if heads <= most and seen_of(problem) <= MOST_KEYS_OF_CLUSTERS else 1
    # An H100, one query, pages of 64, microseconds (and dealt out): 2 requests of 1k keys, 16 heads on 2, 4.5 (7.2), 28 on 4
    # 5.5 (8.3); 15 key heads 6.5 (9.7); 4 of 2k keys, by clusters that meet, 6.2 (8.6), of 4k 8.6 (11.2)
    return CLUSTER if heads <= MOST_HEADS_OF_CLUSTERS else SMALL_CLUSTER if heads <= MOST_HEADS_OF_SMALL_CLUSTERS else 1


def gains_by_less_under_way(problem: DecodeProblem, arch: Arch) -> bool:
    """Whether a ring of two steps is faster than one of three: where memory is fast, and many heads of each page are read."""
    # An H200, one request, microseconds (and with three), pages of 16:
    #   4 queries, 32 heads on 8: 16k keys 22.9 (24.7), 32k 38.3 (41.8), 128k 130 (145); 64 on 16, 128k 248 (284)
    #              16 on 4: 32k 26.1 (23.9), 128k 80.6 (70.0)
    #   1 query, 64 on 8, 32k 37.3 (38.0); 28 on 4, 128k 79.0 (69.0); 16 on 2, 128k 42.8 (39.6)
    # and of 64: 64 on 8, 16k 21.9 (22.8), 32k 37.1 (38.2), 128k 127.4 (128.6); 32 on 32, 32k 123.0 (125.3), 128k 483 (486)
    # contiguous: 64 on 8, 32k 35.1 (34.7). Fewer heads, and an H100, have three.
    several = problem.heads_kv >= LEAST_HEADS_OF_SHORT_RINGS and problem.page_size is not None
    return several and problem.kv_dtype.itemsize == 2 and has_fast_memory(arch)


def of_shares(problem: DecodeProblem, arch: Arch) -> Config:
    """The config of key heads that have CTAs of their own: mma.sync, and as few warps and stages as leave room for the next
    launch, whose CTAs are there when their turn comes, unless keys are many. Few rows and keys are for clusters."""
    shares, kv_bytes = shares_of(problem, arch), problem.kv_dtype.itemsize
    if padded(problem.head_dim) == MOST_COLUMNS:
        return wide_heads.of_shares(problem, shares)
    dim = padded(problem.head_dim)
    tokens = 128 * 128 // (dim * kv_bytes)
    dealt = Config(dim, dim, rows_of_tile(problem.rows), tokens, 3, 4, 1, shares=shares, kv_bytes=kv_bytes)
    if cluster_of(problem) > 1:
        return of_clusters(problem, dealt)
    return of_one_request(problem, arch, dealt) if problem.batch == 1 else of_several_requests(problem, arch, dealt)


def of_clusters(problem: DecodeProblem, dealt: Config) -> Config:
    """The config of clusters that have a key head each: steps of 64 keys."""
    # An H100, and an H200, one query over pages of 64 keys, microseconds: clusters of 8 that post, of 16 that post, of 16 that
    # meet, and without clusters
    #   64 heads on 8   1k: 5.4, 5.8, 5.8, 6.5   2k: 7.6, 8.1, 7.3, 8.0   4k: 11.7, 12.1, 10.3, 11.3   5k: -, -, 11.7, 12.2
    #                   1k: 5.0, 5.3, 5.2, 5.9   2k: 7.1, 7.2, 6.5, 7.1   4k: -, 10.8, 8.5, 9.7        5k: -, -, 10.6, 10.6
    #   28 heads on 4   1k: 4.9, 4.2, 4.5, 5.7   2k: 7.2, 5.3, 5.5, 7.2   4k: -, 7.8, 7.6, 8.8         8k: -, 12.0, 11.2, 11.9
    #                   1k: -, 3.9, 3.8, 5.3     2k: -, 5.1, 5.0, 6.8     4k: -, 7.3, 6.9, 7.9         8k: -, 11.4, 10.4, 10.3
    cluster = cluster_of(problem)
    stages = 2 if cluster == CLUSTER else 3 if dealt.kv_bytes == 2 else 4  # one of 3 would hold 64 columns of O
    posts = seen_of(problem) <= MOST_KEYS_OF_POSTS
    return replace(dealt, tokens=64, stages=stages, shares=cluster, clustered=True, posts=posts)


def of_one_request(problem: DecodeProblem, arch: Arch, dealt: Config) -> Config:
    """The config of CTAs that share the key heads of one request: eight warps where copies bind, and where keys of 8 bits are
    few steps of half as many."""
    if dealt.rows == MMA_ROWS and keys_of(problem) >= MANY_SHARED_KEYS:
        stages = 2 if gains_by_less_under_way(problem, arch) else dealt.stages
        return replace(dealt, tokens=2 * dealt.tokens, warps=8, stages=stages)
    if dealt.kv_bytes == 1 and keys_of_share(problem, dealt) <= MOST_KEYS_OF_SHORT_STEPS:
        return replace(dealt, tokens=dealt.tokens // 2, stages=2 if problem.rows > MMA_ROWS // 2 else 4)
    return dealt


def of_several_requests(problem: DecodeProblem, arch: Arch, dealt: Config) -> Config:
    """The config of CTAs that have key heads of several requests, or share them: eight warps where a multiprocessor has one,
    and rows are few; where keys of 8 bits are few, or rows many, a ring of two steps."""
    # A cache of e4m3, pages of 64, microseconds (and bf16)
    #   an H200, 4 queries, steps of 64 keys, of 128 keys: 64 heads on 8, 1 request of 1k 7.7, 9.8 (7.7), 2k 8.5, 8.8 (8.6), 4k
    #            10.6, 10.3 (11.3), 8k -, 12.8 (15.3); 16 on 2, 1k 7.2, 9.4 (6.7); 32 on 8, 1k 6.9, 7.3 (6.4)
    #   an H200, 4 queries of several requests, dealt out, shared: 64 heads on 8, 8 of 1k 17.3, 13.4 (14.6), 8 of 2k 21.7, 18.5
    #            (22.7), 32 of 1k 26.6, 24.1 (38.6); 32 on 8, 8 of 1k 13.4, 11.4 (14.4); 16 on 2, 8 of 1k 14.2, 11.1 (9.3)
    #   an H200, 1 query, 16 on 2, steps of 128 keys, of 256 keys: 8 of 1k 6.7, 6.9 (6.3), 8 of 2k 8.1, 8.0 (8.2)
    #   an H200, as they are, and before, with longer rings, more warps, or steps of 128 keys: 1 query, 8 of 1k, 16 on 2
    #            6.3, 6.8 (6.5), 28 on 4 7.3, 8.1 (8.1); 4 queries, 16 on 2, 8 of 1k 9.2, 10.8 (9.3), of 2k 10.9, 11.9 (11.4),
    #            but 64 on 8, 8 of 1k, 12.6, 12.3 (14.8); 16 on 2, 1 of 1k 6.7, 7.1 (6.5), 64 on 8 7.1, 7.5 (7.8), 2k 8.1, 8.5
    #            (8.7), 32 on 8, 1k 6.4, 6.8 (6.6)
    #   an H100, dealt out, shared, one loop before: 1 query of 64 on 8, 8 of 1k, 2k 14.7, 11.1, 18.8, 17.5
    many_rows, few_keys = problem.rows > MMA_ROWS // 2, keys_of_share(problem, dealt) <= 2 * MOST_KEYS_OF_SHORT_STEPS
    if dealt.kv_bytes == 1 and (many_rows or few_keys):
        return replace(dealt, tokens=dealt.tokens // 2 if many_rows and few_keys else dealt.tokens, stages=2)
    two_fit = problem.batch * problem.heads_kv > (arch.sms or FALLBACK_SMS)
    if many_rows or two_fit or (dealt.shares > 1 and problem.page_size is None):
        return dealt
    return replace(dealt, tokens=2 * dealt.tokens, warps=8, stages=2)
