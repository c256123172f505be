"""Which requests over a cache the Hopper forward serves, as which attention, and with what config."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from strobe.device import Arch
from strobe.kernels.common.panels import PANEL_COLUMNS, lie_in_groups
from strobe.kernels.decode import choice
from strobe.kernels.decode.config import Config as DecodeConfig
from strobe.kernels.decode.sizes import padded
from strobe.kernels.sm90 import backend as sm90
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config, of_short_prompts, sharing, together
from strobe.problem import AttentionProblem, Varlen
from strobe.serving.problem import DecodeProblem
from strobe.tuning.table import Shape

MANY_QUERIES = 256
"""Queries from which on a request is the forward's. Of those of fewer it takes the ones that it is faster with
(`least_queries`) and that do not keep one multiprocessor busy while others idle (see `tile_list.Apart`); the rest are left to
the decode kernels, which share the keys of a tile."""

FEW_QUERIES = 16
"""Queries up to which a packed request is the decode kernel's."""

TIME_OF_TILE = 1.45
"""How long the decode kernel takes for 64 rows and the keys that they see, where a batch has prompts, beside the forward for
128. An H200, 64 heads on 8, 4k keys, 64 queries: 9 requests 316 microseconds by the decode kernel, 16 by the forward 199."""

SHORT_PROMPT, SHORT_PROMPTS = 512, 1536
"""Queries of the longest prompt, and of the longest of several, from which on blocks have the keys that suit an attention of
long sequences; for shorter ones 64, and two groups. (One alone may be a chunk, with many keys ahead of it.) An H200, 32 heads
on 8 | 64 on 8, pages of 16, microseconds (and with 128 keys; FlashAttention-3), D = 128: 32 prompts of 300 98 (121; 155) |
171 (210; 243), 8 of 100 to 1500 118 (130; 144) | 213 (228; 276), one of 2000 67 (70; 72) | 117 (122; 138), one of 8000 749
(728; 959) | 1549 (1484; 1960), 4 of 2000 after 2k keys 562 (554; 701) | 1227 (1163; 1496). D = 64: 79 (118 by the table, of
three groups; 113) | 136 (210; 199), 95 (104; 104) | 172 (186; 194), 56 (56; 55) | 96 (95; 98), 566 (489; 558) | 1151 (977;
1150), 454 (409; 453) | 890 (792; 904)."""

SLOTS = 4
"""Tiles that are known at a time: what goes ahead of a tile (its number, its place, its pages) takes longer than the products
of a tile of few keys. An H200, 64 prompts of 100 queries, 32 heads on 8 | 64 on 8, D = 128, microseconds (with two): 65 (69)
| 112 (119), in blocks of 128 keys 77 (99) | 134 (174); level for longer ones."""

LEAST_BOX = 16
"""Keys that TMA copies together, at least: in smaller boxes copies would take longer than products."""


def as_attention(problem: DecodeProblem) -> AttentionProblem:
    """What the forward computes: an attention in which each sequence uses some of the keys that it has room for."""
    return AttentionProblem(
        problem.lengths, problem.heads_q, problem.heads_kv, problem.head_dim, problem.head_dim_v, problem.dtype, problem.scale,
        problem.mask, problem.score, unaligned=problem.unaligned, seqused=True,
    )  # fmt: skip


@functools.lru_cache(256)
def choose(problem: DecodeProblem, arch: Arch) -> Config:
    """The forward's config for the attention, with the keys that a block has on one page."""
    attention = as_attention(problem)
    config = sm90.config(attention, arch)
    if has_short_prompts(problem):
        config = replace(of_short_prompts(attention), optimistic=config.optimistic)
    box = config.tile_kv if problem.page_size is None else math.gcd(config.tile_kv, problem.page_size)
    grouped = box < config.tile_kv and takes_groups(config, problem)
    config = replace(config, box=box, grouped=grouped, beside=problem.ragged, slots=SLOTS, tile_heads=1, uneven_group=0)
    if problem.group % config.groups == 0:
        return together(config, problem.group)
    return sharing(config, Shape.of(problem.lengths, problem.heads_q, problem.mask.band), problem.group)


def has_short_prompts(problem: DecodeProblem) -> bool:
    """Whether tiles see few keys, as far as the queries tell."""
    lengths = problem.lengths
    several = (lengths.total_q if isinstance(lengths, Varlen) else lengths.batch * lengths.seqlen_q) >= 2 * lengths.seqlen_q
    return lengths.seqlen_q < (SHORT_PROMPTS if several else SHORT_PROMPT)


def least_queries(problem: DecodeProblem, config: Config) -> int:
    """Queries from which on a packed request is the forward's: its tiles take less time than those of `config_of_few`, and it
    does not read more than it computes."""
    tiles = config.tiles_of(problem.group)
    its_tiles = math.floor(tiles / TIME_OF_TILE) + 1
    return max(FEW_QUERIES, ROWS_PER_GROUP * (its_tiles - 1) // problem.group) + 1


def least_longest(config: Config) -> int:
    """Queries of the longest request, from which on there may be work for the forward: they fill three quarters of a tile."""
    return 3 * config.tile_q // 4


def takes_groups(config: Config, problem: DecodeProblem) -> bool:
    """Whether keys may lie in groups with all of their columns: these are several whole panels, and pages lie a whole number of
    groups apart."""
    dims = (problem.head_dim, problem.head_dim_v)
    panels = dims == (config.wide, config.wide_v) and min(dims) > PANEL_COLUMNS
    return panels and lie_in_groups(problem.page_rows)


def tiles(problem: DecodeProblem, config: Config) -> int:
    """Tiles of all heads; of packed requests, of which only the longest is known, about as many as there are at least."""
    lengths = problem.lengths
    if isinstance(lengths, Varlen):
        each = max(lengths.total_q - lengths.batch, 0) // config.tile_q
    else:
        each = lengths.batch * -(-lengths.seqlen_q // config.tile_q)
    return problem.heads_kv * config.tiles_of(problem.group) * each


def of_few_queries(problem: DecodeProblem) -> DecodeProblem:
    """What the decode kernel serves of packed requests. (To it no request has more than `MANY_QUERIES` queries.)"""
    assert isinstance(problem.lengths, Varlen)
    return replace(problem, lengths=replace(problem.lengths, max_q=min(problem.lengths.max_q, MANY_QUERIES)))


@functools.lru_cache(256)
def config_of_few(problem: DecodeProblem, arch: Arch) -> DecodeConfig:
    """The decode kernel's config for them, of which most have one query: one group of wgmma, where it can do it; by TMA where
    each query head has keys of its own."""
    # An H200, pages of 64, microseconds (and TMA, with Q in registers; mma.sync in tiles of 16 rows, eight warps and steps of
    # 128 keys, in another run; behind the forward, by mma.sync in tiles of 64 rows, in another one), 32 heads on 8:
    #   32 tokens of 4k keys and 480 queries of 2.5k 164 (168; -; 221), 64 of 4k and 1984 of 2k 299 (308; 291; 421), of 8k 616
    #   (600; -; 748), 128 of 2k and 4 of 480 303 (303; 283; 482)
    # and 64 on 8, pages of 16: 191 (193; 205; -), 354 (355; 371; -), 923 (907; 989; -), 329 (330; 332; -).
    # On three quarters of the multiprocessors, so that the forward has the others, TMA: 160, 300, 561, 321; on half: 181, 335,
    # 502, 457.
    # 32 heads, each with keys of its own, pages of 16 (by what decodes requests of many queries, TMA): 590 (528), 1073 (999),
    # 1451 (1293), 1265 (1062); but 16 tokens of 2k and 16 of 150 queries 176 (191). So for 32 on 8: 167 (177), 297 (311), 613
    # (559), 292 (307), 80 (92).
    if problem.group == 1:
        return choice.choose(problem, arch)
    one_width = padded(problem.head_dim) == padded(problem.head_dim_v)
    make = choice.of_one_group if one_width and choice.takes_wgmma(problem, arch) else choice.of_mma
    return choice.dealt_out(make(problem, arch), problem, arch)
