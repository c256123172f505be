"""Numbers that follow from a problem: rows and tiles, jobs, keys, splits; and stages that there is room for."""

from __future__ import annotations

import functools
from dataclasses import replace

from strobe.device import KIB, Arch
from strobe.kernels.decode.config import MMA_ROWS, MOST_ROWS, Config, power_of_two
from strobe.serving.problem import DecodeProblem

OVERHEAD = 2 * KIB
"""Shared memory of a CTA beside its rings: statistics, what the compiler adds, what the driver takes."""
MOST_STAGES = 8
MOST_PARTS = 32
WGMMA_TOKENS = 64
LONG_ROOM = 2048
"""Keys of a request from which on there is room for many, where 65 rows or more share a key head: see `of_wgmma`."""
FALLBACK_SMS = 108
FAST_MEMORY = 4e12
"""Bytes a second of a memory that is fast beside its multiprocessors: an H200's, not an H100's."""
LEAST_SPLIT, USUAL_SPLIT = 256, 1024
HOPEFUL_ROOM = 4096
"""Keys of a request from which on its steps are so many that the optimistic softmax gains: on an H200, with 16 queries of 64
heads on 8, it was ahead from 8k on, level at 2k and behind at 1k."""


def has_fast_memory(arch: Arch) -> bool:
    """Whether a GPU of Hopper has memory that is fast beside its multiprocessors."""
    return arch.capability == 90 and arch.dram_bandwidth >= FAST_MEMORY


def seen_of(problem: DecodeProblem) -> int:
    """The most keys that some query of a request may see: those there is room for or, of a window, its own and what lies beside
    them in steps. With `deterministic=True` room alone counts."""
    # A window of 128 keys in rooms of 8k, 64 heads on 8 of 64 columns, an H200, microseconds (and as chosen for the room): one
    # query, 8 requests 3.7 (5.3), 32 4.4 (5.9); of 1024 keys, 16 heads on 8 of 256 columns: one query, 8 requests 20.7 (26.0),
    # 32 71.8 (76.9), 4 queries, 8 21.6 (26.3)
    left = problem.mask.left
    if left is None or problem.deterministic:
        return problem.capacity
    return min(problem.capacity, left + problem.lengths.seqlen_q + WGMMA_TOKENS)


def keys_of(problem: DecodeProblem) -> int:
    """The most keys of all key heads of all requests that some query may see."""
    return problem.batch * problem.heads_kv * seen_of(problem)


def weighs_evenly(problem: DecodeProblem) -> bool:
    """Whether a key counts for as much however far back it is: there is no left bound, and no ALiBi."""
    return problem.mask.left is None and problem.score.alibi is None


def is_hopeful(problem: DecodeProblem) -> bool:
    """Whether the optimistic softmax gains: there are many steps that all rows see whole, whose scores are not likely to be far
    above those of the first one, of which each row sees some."""
    return (seen_of(problem) >= HOPEFUL_ROOM or padded(problem.head_dim) == 64) and weighs_evenly(problem)


def rows_of_tile(rows: int) -> int:
    """Rows of a tile for requests that have at most so many rows that share a key head."""
    tile = MMA_ROWS
    while tile < min(rows, MOST_ROWS):
        tile *= 2
    return tile


def is_latent(problem: DecodeProblem) -> bool:
    """Whether keys are 576 columns wide and their first 512 are the values, as in multi-head latent attention."""
    return problem.shared and (problem.head_dim, problem.head_dim_v) == (576, 512)


def split_of(capacity: int, tokens: int) -> int:
    """Keys of a part that depend on nothing but the room of a request: a quarter of the room, from 256 to 1024, or a 32nd of
    it."""
    split = LEAST_SPLIT
    while split * MOST_PARTS < capacity or (split < USUAL_SPLIT and 4 * split < capacity):
        split *= 2
    return max(split, tokens)


def short_split_of(problem: DecodeProblem) -> int:
    """The same where a CTA goes from one split to the next without a pause: with 8 key heads a 16th of the room, or an 8th of
    up to 4096, so that one request keeps a GPU busy."""
    room, splits = room_of(problem.capacity), min(32, max(8, power_of_two(128 // problem.heads_kv)))
    return max(WGMMA_TOKENS, max(room, min(8192, 2 * room)) // splits)


def chain_of(problem: DecodeProblem) -> int:
    """Keys of a chain: the room or, where many keys hide that what was found of one chain is written and read, half of it."""
    room = room_of(problem.capacity)
    return 0 if not problem.deterministic else room // 2 if room > LONG_ROOM else max(room, USUAL_SPLIT)


def room_of(capacity: int) -> int:
    """The power of two that holds what a request has room for."""
    return 1 << (capacity - 1).bit_length()


def padded(dim: int) -> int:
    """The power of two, at least 16, into which a head dim fits."""
    return max(16, 1 << (dim - 1).bit_length())


def partial_places(problem: DecodeProblem, config: Config, ctas: int) -> int:
    """How many partial results there may be."""
    if config.clustered or config.shares == 1:  # they meet in shared memory, or each CTA has a job whole
        return 1
    if not config.split:
        return 2 * ctas
    splits = -(-problem.capacity // config.split)
    units = jobs(problem, config) // config.team * splits
    stretch = 9 * -(-units // (ctas // config.team)) // 8 + 1  # at most: see `schedule.stretch_of`
    return ctas * (min(stretch, splits + 1) + config.optimistic)


def jobs(problem: DecodeProblem, config: Config) -> int:
    """The most jobs that there may be."""
    return problem.batch * problem.heads_kv * tiles_of_rows(problem, config)


def tiles_of_rows(problem: DecodeProblem, config: Config) -> int:
    """Tiles of the rows of one key head in the longest request, as many as are abreast or a multiple of it."""
    return -(-rows_of(problem, config) // (config.rows * config.abreast)) * config.abreast


def rows_of(problem: DecodeProblem, config: Config) -> int:
    """Rows of a key head in the longest request."""
    return problem.rows // problem.group * (problem.group + config.absent)


def absent_of(problem: DecodeProblem, rows: int) -> int | None:
    """How many rows of each query stand for no head where TMA copies the rows of Q, queries times the power of two that holds
    the heads of a group, and half a tile has whole queries; None if that is not so, or would be more tiles."""
    group = 1 << (problem.group - 1).bit_length()
    padded_rows = problem.lengths.seqlen_q * group
    fits = 2 * group <= rows and -(-padded_rows // rows) == -(-problem.rows // rows)
    return group - problem.group if fits else None


def keys_of_share(problem: DecodeProblem, dealt: Config) -> int:
    """The most keys that a CTA has of a key head."""
    return -(-seen_of(problem) // max(dealt.shares, 1))


@functools.lru_cache(256)  # of calls that look like none before, most have configs that others had
def with_all_stages(config: Config, arch: Arch, most: int = MOST_STAGES) -> Config:
    """A config with as many stages as there is room for, up to `most`."""
    room = arch.smem_per_sm or 100 * KIB
    while config.ctas * (replace(config, stages=config.stages + 1).smem + OVERHEAD) <= room and config.stages < most:
        config = replace(config, stages=config.stages + 1)
    return config
