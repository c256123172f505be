"""The benchmark of processes that share a GPU: what it says of stored dS that differ."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from shared_gpu import differences


def test_it_says_which_words_differ_and_where():
    first = torch.randn(3 * 64, 128, dtype=torch.bfloat16)
    other = first.clone()
    assert not differences(first, other)
    for tile in (0, 2):
        other.view(torch.int64)[64 * tile, 0] = 0x7FFFF000001FFFFC
    other[64 + 5, 9] += 1.0
    found = differences(first, other)
    assert found.pop(("key 0, row 0", "7ffff000001ffffc")) == 2
    assert [place for place, _ in found] == ["key 5, row 8"] and found.total() == 1
