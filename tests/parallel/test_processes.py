"""Attention across processes, on CPUs: equal to one process, whatever the method, the layout and the mask; and errors."""

import importlib
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from problems import CASES, check, tensors

import strobe

sys.path.insert(0, str(Path(__file__).parent))

import ranks
from crew import Crew

TAKEN = [case for case in CASES if not case.bias and not case.seqused and case.batch]
"""The cases that have no argument of whole rows and keys."""


@pytest.fixture(scope="module")
def crew():
    with Crew(8) as crew:
        yield crew


@pytest.fixture(scope="module")
def four():
    """A crew whose group of 4 is all of it."""
    with Crew(4) as crew:
        yield crew


def combinations(number: int) -> list[tuple]:
    """(case, dtype, layout, method) for every case, methods and layouts in turn."""
    found = []
    for place, case in enumerate(TAKEN):
        method, layout = ranks.METHODS[place % 4], ("contiguous", "zigzag")[place // 4 % 2]
        size = method.get("team", number if method["method"] == "ulysses" else 1)
        if case.heads_q % size or (case.heads_kv % size and size % case.heads_kv):
            method = ranks.METHODS[place % 2]
        found.append((case, (torch.float32, torch.bfloat16)[place % 3 == 0], layout, method))
    return found


@pytest.mark.parametrize(
    ("number", "share"),
    [(2, 2), (4, 3), (8, 12), *(pytest.param(number, 1, marks=pytest.mark.exhaustive) for number in (2, 4, 8))],
)
def test_the_bits_of_one_process(crew, number, share):
    """Results and gradients are those of ranks simulated in this process, bit for bit. share: one of how many cases."""
    cases = combinations(number)[number % share :: share]
    by_rank = crew.run(number, ranks.attend, cases)
    for place, one in enumerate(cases):
        case, dtype, layout, method = one
        t = tensors(case, dtype)
        want = ranks.simulated(t, case.packed, number, layout, method)
        check(want, t)
        q_of, kv_of = ranks.shardings(t, case.packed, number, layout)
        row = 0 if case.packed else 1
        for rank in range(number):
            rows, keys = (of.index(rank, rank) for of in (q_of, kv_of))
            got = by_rank[rank][place]
            for name, x, dim, at in (
                ("out", want.out, row, rows), ("lse", want.lse, -1, rows), ("dq", want.dq, row, rows),
                ("dk", want.dk, row, keys), ("dv", want.dv, row, keys),
            ):  # fmt: skip
                mine = got[("out", "lse", "dq", "dk", "dv").index(name)]
                assert torch.equal(mine, x.index_select(dim, at)), f"{name} of rank {rank}: {one}"
        if want.dsinks is not None:
            torch.testing.assert_close(sum(got[place][5] for got in by_rank), want.dsinks)


@pytest.mark.parametrize("how", ["other shapes", "other dtype", "other mask"])
def test_ranks_that_differ(crew, how):
    found = crew.run(4, ranks.die, how)
    assert {kind for kind, _, _ in found} == {"ValueError"}, found
    assert all("all ranks must call attention alike, but they differ in" in message for _, message, _ in found)


def test_a_rank_that_dies():
    with Crew(4, timeout=2.0) as crew:
        found = crew.try_(4, ranks.die, "dies", wait=20.0)
    assert found[3].kind == "died"
    for kind, message, seconds in found[:3]:
        assert kind == "ParallelError" and "died" in message and seconds < 8.0, (kind, message, seconds)


@pytest.mark.parametrize("used", [False, True])
def test_decode(crew, used):
    """Every rank gets the same bits, and they are right: ranks have different numbers of keys, one has none."""
    found = crew.run(4, ranks.decode, used)
    q, k, v, sinks, counts = ranks.decode_inputs(4)
    if used:
        starts = [sum(counts[:rank]) for rank in range(4)]
        seen = torch.cat([torch.arange(start, start + n // 2) for start, n in zip(starts, counts, strict=True)])
        k, v = k[:, seen], v[:, seen]
    want = strobe.attention(q, k, v, score=strobe.Score(softcap=5.0, sinks=sinks), return_lse=True)
    for out, lse in found:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
        torch.testing.assert_close(out, want[0])
        torch.testing.assert_close(lse, want[1])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards_and_positions(crew, layout):
    found = crew.run(4, ranks.shards, layout)
    for mine, where, whole in found:
        assert torch.equal(mine, where) and torch.equal(whole, torch.arange(11))
    assert sorted(torch.cat([mine for mine, _, _ in found]).tolist()) == list(range(11))


def test_meshes(four):
    found = four.run(4, ranks.meshes)
    for by_group, by_line, by_square, by_team, by_model in found:
        assert torch.equal(by_group, by_line) and torch.equal(by_square, by_team)
        torch.testing.assert_close(by_square, by_group)
        torch.testing.assert_close(by_model, by_group)


def test_a_gpt_trains_as_in_one_process(four):
    """Its context is a number that four processes do not divide."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("train_gpt_parallel")
    settings = replace(example.TINY, layers=1, width=32, context=61, steps=8, learning_rate=2e-2)
    want = example.train_whole(settings, torch.device("cpu"))
    assert want[-1] < want[0] - 0.5, "it learns"
    for found in four.run(4, ranks.train, asdict(settings), "ring", "zigzag"):
        assert found == pytest.approx(want, rel=2e-4)


def test_compiled(crew):
    for out, dq, compiled_out, compiled_dq in crew.run(2, ranks.compiled):
        assert torch.equal(out, compiled_out) and torch.equal(dq, compiled_dq)


def test_autocast(crew):
    assert crew.run(2, ranks.under_autocast) == [torch.bfloat16] * 2


def test_refused_before_anything_is_exchanged(crew):
    """One rank alone calls, so that an exchange would wait for the others until the timeout."""
    begin = time.perf_counter()
    (found,) = crew.alone(ranks.refused)
    assert time.perf_counter() - begin < 5.0
    assert all(found), found
    expected = (
        "q must have the 5 rows", "method must be one of", "layout must be one of", "team must divide the 4 ranks, got 3",
        "team goes with method='usp'", "shares heads among 4 ranks", "q must have the", "never decrease", "bias must be None",
        "v must have q's dtype", "group must be a process group", "decode has no gradient", "x must not require a gradient",
    )  # fmt: skip
    for message, words in zip(found, expected, strict=True):
        assert words in message, message
