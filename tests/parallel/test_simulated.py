"""All ranks in one process: right for every mask and method, as precise as one call however long the ring; and the parts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import CASES, Case, check, describe, formula, tensors

sys.path.insert(0, str(Path(__file__).parent))

import ranks

from strobe import parallel
from strobe.call.options import Options
from strobe.kernels.combine import merge_call
from strobe.masks import Causal, Full, Window
from strobe.parallel.links import Message, Start, Wait, run_together
from strobe.parallel.merge import merge_into
from strobe.parallel.schedules import hops
from strobe.parallel.sharding import Sharding
from strobe.parallel.work import Job, Rows, before_them, launches
from strobe.places import Place

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
TAKEN = [case for case in CASES if not case.bias and not case.seqused and case.batch]
LAYOUTS = ("contiguous", "zigzag")


def fits(case: Case, method: dict, number: int) -> bool:
    """Whether heads and ranks divide as a method needs it."""
    size = method.get("team", number if method["method"] == "ulysses" else 1)
    return number % size == 0 and case.heads_q % size == 0 and (case.heads_kv % size == 0 or size % case.heads_kv == 0)


def combinations(share: int):
    every = [
        (case, number, layout, method)
        for case in TAKEN
        for number in (2, 3, 4)
        for layout in LAYOUTS
        for method in ranks.METHODS
        if fits(case, method, number)
    ]
    return every[share // 2 :: share]


@pytest.mark.parametrize("share", [31, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_against_reference(share):
    """share: one of how many combinations of a case, ranks, a layout and a method."""
    for case, number, layout, method in combinations(share):
        t = tensors(case)
        check(ranks.simulated(t, case.packed, number, layout, method), t)


ON_KERNELS = [
    (Case(70, 70, 1, 2, 1, 32, mask="causal", sinks=True), "zigzag", {"method": "ring"}),
    (Case(60, 70, 3, 2, 1, 32, packed=True, mask="causal", alibi=True), "zigzag", {"method": "ring"}),
    (Case(66, 80, 1, 2, 2, 32, mask="all", function=True, dropout=0.3), "contiguous", {"method": "usp", "team": 2}),
    (Case(70, 90, 1, 2, 2, 32, mask="functions"), "contiguous", {"method": "allgather"}),
]
ON_KERNELS[1::2] = [pytest.param(*one, marks=pytest.mark.exhaustive) for one in ON_KERNELS[1::2]]


@pytest.mark.parametrize(("case", "layout", "method"), ON_KERNELS, ids=lambda x: str(x) if isinstance(x, Case) else "")
def test_on_triton_kernels(case, layout, method):
    """The portable kernels know where rows and keys stand, in Triton's interpreter too."""
    t = tensors(case, torch.float32, DEVICE)
    t = replace(t, keywords={**t.keywords, "backend": "portable"})
    check(
        ranks.simulated(t, case.packed, 2, layout, method),
        replace(t, keywords={k: x for k, x in t.keywords.items() if k != "backend"}),
    )


ONE = (Case(40, 150, 2, 4, 2, 32, mask="causal", sinks=True), 3, "zigzag", {"method": "ring"})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["one", "every"])
def test_on_a_gpu(dtype, every):
    """On the kernels that dispatch chooses: `sm90` for what is an ordinary problem."""
    for case, number, layout, method in combinations(1) if every else [ONE]:
        t = tensors(case, dtype, DEVICE)
        check(ranks.simulated(t, case.packed, number, layout, method), t)


@pytest.mark.gpu
def test_long_rings_on_a_gpu():
    """Heads 8/2, 4k tokens, head dim 128: the kernels of long shards, against one call in float32."""
    case = Case(4096, 4096, 1, 8, 2, 128, mask="causal")
    t = tensors(case, torch.bfloat16, DEVICE)
    for method in ranks.METHODS:
        check(ranks.simulated(t, False, 4, "zigzag", method), t)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str)
def test_the_error_does_not_grow_with_the_ring(dtype):
    """Partial results are kept in float32 until they are merged: 16 ranks are as precise as 2, and as one call."""
    t = tensors(Case(320, 320, 1, 2, 1, 64, mask="causal", logits=3.0), dtype)
    exact = formula(t)

    def error(number: int) -> tuple[float, ...]:
        got = ranks.simulated(t, False, number, "zigzag", {"method": "ring"})
        pairs = ((got.out, exact.out), (got.dq, exact.dq), (got.dk, exact.dk), (got.dv, exact.dv))
        return tuple((a.double() - b).pow(2).mean().sqrt().item() for a, b in pairs)

    alone = error(1)
    for number in (2, 4, 8, 16):
        for one, many in zip(alone, error(number), strict=True):
            assert many <= 1.05 * one, (number, alone)


def test_rounded_partial_results_are_seen(monkeypatch):
    """The test above would see partial results that are rounded to the inputs' dtype."""
    real = parallel.work.dispatch.forward

    def rounded(problem, operands, backend):
        out, lse = real(problem, operands, backend)
        return out.to(problem.dtype).float(), lse

    monkeypatch.setattr(parallel.work.dispatch, "forward", rounded)
    with pytest.raises(AssertionError):
        test_the_error_does_not_grow_with_the_ring(torch.bfloat16)


# ---- the parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_a_partition(layout):
    """Every row is on one rank; shards differ by a row or two; places say where rows stand, and the other way round."""
    for number in (1, 2, 3, 4, 8):
        for lengths in ((0,), (1,), (5,), (16,), (17,), (100,), (3, 0, 1, 30, 2, 2, 7)):
            sharding = Sharding(lengths, number, layout)
            shards = [sharding.index(rank, rank) for rank in range(number)]
            assert sorted(torch.cat(shards).tolist()) == list(range(sum(lengths)))
            sizes = [len(x) for x in shards]
            assert max(sizes) - min(sizes) <= 2, (lengths, number, sizes)
            for rank in range(number):
                positions = []
                for place, rows in zip(sharding.places(rank, rank), sharding.rows(rank, rank), strict=True):
                    where = [place.position(i) for i in range(rows)]
                    assert where == sorted(set(where)) and all(0 <= x < place.whole for x in where)
                    for x in range(place.whole + 1):
                        assert place.before(x, rows) == sum(one < x for one in where)
                    positions += where
                assert positions == parallel.positions(
                    cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]), rank=rank, ranks=number,
                    layout=layout,
                ).tolist()  # fmt: skip


def test_zigzag_balances_causal_masks():
    sharding = Sharding((1024,), 4, "zigzag")
    seen = [int((sharding.index(rank, rank) + 1).sum()) for rank in range(4)]
    assert max(seen) <= 1.001 * min(seen)


def job(mask, layout: str, number: int = 4, n: int = 64, **options) -> Job:
    sharding = Sharding((n,), number, layout)
    return Job(Options(left=mask.left, right=mask.right, prefix=mask.prefix, **options), sharding, sharding, False, 2, 2)


def test_pairs_that_are_ordinary_problems():
    """A causal zig-zag: own keys are causal, of earlier ranks the near half is seen whole, later ones all by the far half."""
    one = job(Causal(), "zigzag")
    rows = [Rows(one.q, rank, rank) for rank in range(4)]
    (own,) = launches(one, rows[1], rows[1])
    (earlier,) = launches(one, rows[2], rows[1])
    (later,) = launches(one, rows[1], rows[2])
    assert own.band == Causal() and not own.placed
    assert (earlier.band, earlier.keys, earlier.placed) == (Full(), slice(0, 8), False)
    assert (later.band, later.rows, later.placed) == (Full(), slice(8, 16), False)
    line = Sharding((64,), 4, "contiguous")
    assert not launches(job(Causal(), "contiguous"), Rows(line, 0, 0), Rows(line, 1, 1))
    assert [x.keys.stop for x in before_them(one, rows[1], Rows(one.kv, 0, 3))] == [16, 56]
    (numbered,) = launches(job(Causal(), "zigzag", dropout=0.1), rows[1], rows[1])
    assert numbered.placed


def test_keys_travel_no_further_than_they_are_seen():
    assert hops(job(Causal(), "zigzag"), 1) == 3
    assert hops(job(Window(10, 0), "contiguous"), 1) == 1
    assert hops(job(Window(17, 0), "contiguous"), 1) == 2
    assert hops(job(Window(3, 3), "contiguous", 8, 64), 1) == 7  # keys of the next rank come from the other side


def test_the_launch_that_merges_is_the_law_in_torch():
    random = torch.Generator().manual_seed(0)
    out, part = (torch.randn(2, 37, 3, 24, generator=random).to(DEVICE) for _ in range(2))
    lse, part_lse = (4 * torch.randn(2, 3, 37, generator=random).to(DEVICE) for _ in range(2))
    lse[0, :, :9], part_lse[:, 1, 5:20] = -torch.inf, -torch.inf
    part[0, 30] = 1e30
    part_lse[0, :, 30] = -torch.inf  # what such a row holds changes nothing
    want, want_lse = out.cpu().clone(), lse.cpu().clone()
    merge_into(want, want_lse, part.cpu(), part_lse.cpu())
    merge_call(out, lse, part, part_lse).launch()
    torch.testing.assert_close(out.cpu(), want)
    torch.testing.assert_close(lse.cpu(), want_lse)


@pytest.mark.gpu
def test_a_merge_in_place_reads_all_rows_before_it_writes_one():
    """Warps share the LSE of a tile's rows: one that is late may not read what another has already written."""
    shape, random = (2, 8192, 8, 128), torch.Generator(DEVICE).manual_seed(0)
    part, part_lse = torch.randn(shape, generator=random, device=DEVICE), torch.randn(2, 8, 8192, device=DEVICE)
    for _ in range(10):
        out, lse = torch.zeros(shape, device=DEVICE), torch.zeros(2, 8, 8192, device=DEVICE)
        merge_into(out, lse, part, part_lse)
        share = torch.sigmoid(part_lse).transpose(1, 2)[..., None]
        torch.testing.assert_close(out, share * part)
        torch.testing.assert_close(lse, torch.logaddexp(torch.zeros_like(part_lse), part_lse))


def test_ranks_that_wait_for_each_other_are_found():
    def program(other: int):
        buffer = torch.zeros(4, dtype=torch.uint8)
        yield Wait((yield Start("nothing that is sent", [], [Message(other, buffer)])))

    with pytest.raises(RuntimeError, match="wait for each other"):
        run_together([program(1), program(0)])


def test_places_in_words():
    problem, _ = describe(tensors(Case(16, 16)))
    assert "placed, partial" in str(replace(problem, placed=True, partial=True))
    assert Place(2, 5, 7, 20).position(torch.arange(4)).tolist() == [5, 6, 9, 10]


def test_positions_and_simulate_refuse():
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError, match="seqlen or cu_seqlens"):
        parallel.positions(rank=0, ranks=2)
    with pytest.raises(ValueError, match="rank must be from 0 to 1"):
        parallel.shard(x, rank=2, ranks=2)
    with pytest.raises(ValueError, match="method must be one of"):
        parallel.simulate(x, x, x, ranks=2, method="rings")
    with pytest.raises(RuntimeError, match="init_process_group"):
        parallel.attention(x, x, x)
