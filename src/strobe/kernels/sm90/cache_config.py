"""Which requests over a cache the Hopper forward serves, as which attention, and with what config."""

from __future__ import annotations

import math
from dataclasses import replace

from strobe.device import Arch
from strobe.kernels.common.panels import PANEL_COLUMNS, lie_in_groups
from strobe.kernels.sm90 import backend as sm90
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.problem import AttentionProblem, Varlen
from strobe.serving.problem import DecodeProblem

MANY_QUERIES = 128
"""Queries from which on a request is the forward's, whose tiles have so many of one head. The others are left to the decode
kernel, whose tiles have all heads of a group."""

LEAST_BOX = 16
"""Keys that TMA copies together, at least: in smaller boxes copies would take longer than products."""


def as_attention(problem: DecodeProblem) -> AttentionProblem:
    """What the forward computes: an attention in which each sequence uses some of the keys that it has room for."""
    return AttentionProblem(
        problem.lengths, problem.heads_q, problem.heads_kv, problem.head_dim, problem.head_dim_v, problem.dtype, problem.scale,
        problem.mask, problem.score, unaligned=problem.unaligned, seqused=True,
    )  # fmt: skip


def choose(problem: DecodeProblem, arch: Arch) -> Config:
    """The forward's config for the attention, with the keys that a block has on one page."""
    config = sm90.config(as_attention(problem), arch)
    box = config.tile_kv if problem.page_size is None else math.gcd(config.tile_kv, problem.page_size)
    return replace(config, box=box, grouped=box < config.tile_kv and takes_groups(config, problem))


def takes_groups(config: Config, problem: DecodeProblem) -> bool:
    """Whether keys may lie in groups with all of their columns: these are several whole panels, and pages lie a whole number of
    groups apart."""
    dims = (problem.head_dim, problem.head_dim_v)
    panels = dims == (config.wide, config.wide_v) and min(dims) > PANEL_COLUMNS
    return panels and lie_in_groups(problem.page_rows)


def tiles(problem: DecodeProblem) -> int:
    """Tiles of 128 rows of all heads; of packed requests, of which only the longest is known, those that there are at least."""
    lengths = problem.lengths
    rows = 2 * ROWS_PER_GROUP
    each = lengths.total_q // rows if isinstance(lengths, Varlen) else lengths.batch * -(-lengths.seqlen_q // rows)
    return problem.heads_q * each
