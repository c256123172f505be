"""Which CTA gets which keys of which request, in the simulator: every key once, parts that fit together, and no CTA with pieces
of two jobs where requests are nearly alike."""

import itertools
import random
from collections import defaultdict

import pytest
import torch

from strobe.kernels.decode.arguments import Cached, Kernel, Outputs, Terms
from strobe.kernels.decode.config import Config
from strobe.kernels.decode.pieces import take_pieces
from strobe.kernels.decode.schedule import Requests
from strobe.kernels.gluon import gl, gluon
from strobe.sim import attention as attention  # which gives the simulator the models of our assembly
from strobe.sim import simulate

MOST, NUMBERS = gl.constexpr(64), gl.constexpr(8)
TOKENS, HEADS = 64, 2


@gluon.jit
def write_down(found, K, piece, job, taken):
    """The `taken`-th piece of this CTA: whose it is, its keys, the number of its parts, where its part goes."""
    at = found + (gl.program_id(0) * MOST + taken) * NUMBERS
    numbers = (piece.batch, piece.head, piece.first_row, piece.begin, piece.end, job.parts, job.place, job.number)
    for i in gl.static_range(NUMBERS):
        gl.store(at + i, numbers[i])
    return taken + 1


@gluon.jit
def walk(found, lengths, cu_q, batch, n_q, capacity, left, tiles, heads, C: gl.constexpr, GROUP: gl.constexpr):
    zero = 0 * batch
    requests = Requests(lengths, None, None, cu_q, batch, n_q, capacity, 1000 + zero, zero, left)
    terms = Terms(None, zero, zero, zero, None, zero, None, None, None, zero, zero, zero, zero, 1.0, None, None, None,
                  False, False, False)  # fmt: skip
    cached = Cached(found, found, None, zero, zero, zero, zero, zero, zero, zero, zero, 0)
    outputs = Outputs(found, zero, zero, zero, found, zero, zero, zero, None, zero, zero, found, found, found)
    K = Kernel(requests, outputs, terms, cached, heads, tiles, C, GROUP, 16, 16, C.rows)
    take_pieces(write_down, found, K, zero)


def pieces_of(lengths, ctas, start=0, queries=None, n_q=1, by_turns=False, left=None):
    """The pieces of each CTA, as `write_down` has them. queries: of each request, if they are packed."""
    config = Config(16, 16, 16, TOKENS, 2, 4, 1, start=start, by_turns=by_turns)
    found = torch.full((ctas, MOST.value, NUMBERS.value), -1, dtype=torch.int32)
    cu = None if queries is None else torch.tensor([0, *queries]).cumsum(0).int()
    tiles = -(-n_q * 8 // config.rows)
    simulate(walk, (ctas,), found, torch.tensor(lengths, dtype=torch.int32), cu, len(lengths), n_q, max(lengths) + 100, left,
             tiles, HEADS, C=config, GROUP=8)  # fmt: skip
    return [[piece for piece in cta.tolist() if piece[0] >= 0] for cta in found]


def check(ctas, lengths, queries):
    """Every key of every job comes once, in as many pieces as each of them says, with places of their own."""
    jobs, places = defaultdict(list), []
    for batch, head, row, begin, end, parts, place, _ in (piece for cta in ctas for piece in cta):
        jobs[batch, head, row].append((begin, end, parts))
        places += [place] * (parts > 1)
    wanted = {(b, head, 16 * t) for b, n in enumerate(queries) for head in range(HEADS) for t in range(-(-8 * n // 16))}
    assert jobs.keys() == wanted and len(set(places)) == len(places)
    for (batch, _, _), pieces in jobs.items():
        pieces.sort()
        assert pieces[0][0] == 0 and pieces[-1][1] == lengths[batch]
        assert all(one[1] == two[0] for one, two in itertools.pairwise(pieces))
        assert {parts for *_, parts in pieces} == {len(pieces)}


@pytest.mark.parametrize("seed", range(40))
def test_every_key_comes_once(seed):
    rnd = random.Random(seed)
    batch, longest = rnd.choice([1, 2, 5, 17]), rnd.choice([100, 1000, 5000])
    lengths = [longest - rnd.randrange((10, longest // 8, longest)[seed % 3]) for _ in range(batch)]
    queries = [rnd.choice([0, 1, 1, 3]) for _ in lengths] if seed % 4 == 1 else None
    n_q = 1 if queries is None else 3
    ctas = pieces_of(lengths, rnd.choice([1, 7, 20, 132]), rnd.choice([0, 2, 6]), queries, n_q, seed % 4 == 2)
    check(ctas, lengths, queries or [1] * batch)


@pytest.mark.parametrize("length", [1000, 1100, 3000, 3072, 5000, 9000])
@pytest.mark.parametrize(("batch", "ctas"), [(1, 132), (3, 132), (20, 132), (8, 50)])
@pytest.mark.parametrize("spread", [0, 60])
def test_no_cta_has_pieces_of_two_jobs(length, batch, ctas, spread):
    """Nor much more to do than others, whatever the number of keys; several whole jobs, if jobs are more than CTAs."""
    rnd = random.Random(length)
    lengths = [length - rnd.randrange(spread + 1) for _ in range(batch)]
    found = pieces_of(lengths, ctas, start=4)
    check(found, lengths, [1] * batch)
    assert all(len(cta) == 1 or {piece[5] for piece in cta} == {1} for cta in found if cta)
    steps = [sum(-(-piece[4] // TOKENS) - piece[3] // TOKENS for piece in cta) for cta in found]
    jobs, units = batch * HEADS, -(-length // TOKENS)
    assert max(steps) <= max(-(-units // max(ctas // jobs, 1)), -(-jobs // ctas) * units)


def test_few_steps_are_not_cut():
    """A part that is handed in would take longer than the steps that another CTA would have had of it."""
    whole, cut = ({piece[5] for cta in pieces_of([n], 8, start=4) for piece in cta} for n in (128, 640))
    assert (whole, cut) == ({1}, {4})


@pytest.mark.parametrize("ctas", [5, 16, 40])
@pytest.mark.parametrize("by_turns", [False, True])
def test_who_has_fewer_queries_leaves_room(ctas, by_turns):
    queries = [1] * 7 + [0] + [1] * 12
    check(pieces_of([400] * 20, ctas, 2, queries, 1, by_turns), [400] * 20, queries)
    queries = [9] * 11 + [1] + [9] * 8
    check(pieces_of([400] * 20, ctas, 2, queries, 9, by_turns), [400] * 20, queries)


def test_who_is_not_alike_is_cut_as_evenly_as_before():
    lengths = [5000, 64, 300, 2000]
    found = pieces_of(lengths, 16, start=2)
    check(found, lengths, [1] * 4)
    steps = [sum(-(-piece[4] // TOKENS) - piece[3] // TOKENS for piece in cta) for cta in found]
    assert max(steps) <= 17
