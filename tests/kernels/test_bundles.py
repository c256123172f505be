"""Bundles of heads: how long multiprocessors wait at the end of a causal problem, by arithmetic."""

import heapq
from dataclasses import replace
from math import ceil
from unittest import mock

import pytest
import torch

from strobe import Causal
from strobe.device import KNOWN
from strobe.kernels.common.arguments import bundles_of_heads
from strobe.kernels.common.call import unfilled
from strobe.kernels.sm90 import backward_launch
from strobe.kernels.sm90.backward_config import KEYS
from strobe.kernels.sm90.backward_config import choose as choose_backward
from strobe.kernels.sm90.config import HALF_L2, choose
from strobe.problem import AttentionProblem, Dense

SMS = 132
ENDS = 1.0
"""Key blocks that a tile's beginning and end take as long as."""


def causal(length: int, head_dim: int, head_dim_v: int, heads: int, group: int = 1) -> AttentionProblem:
    lengths = Dense(max(1, 16384 // length), length, length)
    return AttentionProblem(lengths, heads, heads // group, head_dim, head_dim_v, torch.bfloat16, 1.0, Causal())


def busy(problem: AttentionProblem, tile_q: int, tile_kv: int, at_once: int, rest: int) -> float:
    """The share of time in which multiprocessors work, if each takes the next tile, in `locate`'s order, when it is free."""
    heads, length = problem.lengths.batch * problem.heads_q, problem.lengths.seqlen_q
    costs = [ceil(min(length, (tile + 1) * tile_q) / tile_kv) + ENDS for tile in range(ceil(length / tile_q))]
    return busy_with(costs, heads, at_once, rest)


def busy_with(costs: list[float], heads: int, at_once: int, rest: int) -> float:
    """The same for tiles of a head that cost so much, of which the last comes first."""
    free = [0.0] * SMS
    for size in [*[at_once] * (rest // at_once), heads - rest]:
        for cost in reversed(costs):
            for _ in range(size):
                heapq.heapreplace(free, free[0] + cost)
    return heads * sum(costs) / SMS / max(free)


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_multiprocessors_are_busy_to_the_end(dims, length):
    problem = causal(length, *dims, heads=2048 // max(dims))
    config = choose(problem)
    assert busy(problem, config.tile_q, config.tile_kv, *bundles_of_heads(problem, HALF_L2)) > 0.96


def test_bundles_fit_and_the_last_has_what_is_left():
    for heads, group in ((16, 1), (21, 1), (40, 1), (64, 8), (13, 1), (1, 1), (28, 7)):
        for length in (128, 1024, 8192, 131072):
            problem = causal(length, 128, 128, heads, group)
            at_once, rest = bundles_of_heads(problem, HALF_L2)
            all_heads, bytes_of_head = problem.lengths.batch * heads, length * 512 / group
            assert 1 <= at_once <= min(all_heads, 16 * group) and at_once * bytes_of_head <= max(1.25 * HALF_L2, bytes_of_head)
            assert rest % at_once == 0 and 0 <= rest < all_heads
            assert at_once <= all_heads - rest < 64 * group + at_once


def test_small_last_bundles_cost_time():
    problem = causal(512, 256, 256, heads=8)
    assert bundles_of_heads(problem, HALF_L2) == (16, 192)
    assert busy(problem, 128, 64, 16, 240) < 0.94 < 0.96 < busy(problem, 128, 64, 16, 192)


def of_backward(heads: int, heads_kv: int, length: int) -> float:
    """The share of time in which multiprocessors work in a causal backward in one pass."""
    problem = replace(causal(length, 128, 128, heads, heads // heads_kv), lengths=Dense(1, length, length), phase="backward")
    config = choose_backward(problem)
    tensors = unfilled(problem, backward_launch.buffers(problem, config))
    call = backward_launch.one_pass_call(problem, tensors, KNOWN["H200"], config, range(heads_kv))
    given = dict(zip(call.kernel.arg_names, call.arguments, strict=False))
    tiles = [ceil((length - first) / config.tile_q) * problem.group + ENDS for first in range(0, length, KEYS)]
    return busy_with(tiles[::-1], heads_kv, given["at_once"], given["rest"])


@pytest.mark.parametrize("heads, heads_kv", [(28, 4), (32, 8), (40, 8), (64, 8), (16, 16)])
def test_few_key_heads_of_a_backward_end_together(heads, heads_kv):
    assert of_backward(heads, heads_kv, 8192) > 0.9
    with mock.patch.object(backward_launch, "LAST_BLOCKS", 1):
        assert of_backward(40, 8, 8192) < 0.85
