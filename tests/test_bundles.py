"""Bundles of heads: how long multiprocessors wait at the end of a causal problem, by arithmetic."""

import heapq
from math import ceil

import pytest
import torch

from strobe import Causal
from strobe.kernels.common.arguments import heads_at_once
from strobe.kernels.sm90.config import choose
from strobe.kernels.sm90.launch import HALF_L2
from strobe.problem import AttentionProblem, Dense

SMS = 132
ENDS = 1.0
"""Key blocks that a tile's beginning and end take as long as."""


def causal(length: int, head_dim: int, head_dim_v: int, heads: int, group: int = 1) -> AttentionProblem:
    lengths = Dense(max(1, 16384 // length), length, length)
    return AttentionProblem(lengths, heads, heads // group, head_dim, head_dim_v, torch.bfloat16, 1.0, Causal())


def busy(problem: AttentionProblem, tile_q: int, tile_kv: int, at_once: int) -> float:
    """The share of time in which multiprocessors work, if each takes the next tile, in `locate`'s order, when it is free."""
    heads, length = problem.lengths.batch * problem.heads_q, problem.lengths.seqlen_q
    costs = [ceil(min(length, (tile + 1) * tile_q) / tile_kv) + ENDS for tile in range(ceil(length / tile_q))]
    free = [0.0] * SMS
    for bundle in range(0, heads, at_once):
        for cost in reversed(costs):
            for _ in range(min(at_once, heads - bundle)):
                heapq.heapreplace(free, free[0] + cost)
    return heads * sum(costs) / SMS / max(free)


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_multiprocessors_are_busy_to_the_end(dims, length):
    problem = causal(length, *dims, heads=2048 // dims[0])
    config = choose(problem)
    assert busy(problem, config.tile_q, config.tile_kv, heads_at_once(problem, HALF_L2)) > 0.96


def test_bundles_are_even_and_fit():
    for heads, group in ((16, 1), (21, 1), (40, 1), (64, 8), (13, 1), (1, 1)):
        problem = causal(8192, 128, 128, heads, group)
        size = heads_at_once(problem, HALF_L2)
        all_heads = 2 * heads
        assert 1 <= size <= all_heads
        assert size / group * 8192 * 512 <= max(1.25 * HALF_L2, 8192 * 512)
        assert -all_heads % size < size / 2


def test_uneven_bundles_cost_time():
    problem = causal(8192, 256, 256, heads=8)
    assert heads_at_once(problem, HALF_L2) == 2
    assert busy(problem, 128, 64, 3) < 0.87 < 0.99 < busy(problem, 128, 64, 2)
