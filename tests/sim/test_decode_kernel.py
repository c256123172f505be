"""The decode kernel in the simulator: requests of every kind, in every order, against the specification."""

import itertools
import math
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from decode_launch import run
from requests_at_random import Drawn, described, draw

import strobe
from strobe.call import dispatch
from strobe.device import KNOWN
from strobe.kernels.decode.choice import (
    choose,
    of_converted,
    of_held_queries,
    of_long_steps,
    of_mma,
    of_one_group,
    of_split_clusters,
    of_wgmma,
    takes_held_queries,
)
from strobe.kernels.decode.launch import buffers
from strobe.kernels.decode.shares import of_shares, takes_shares

ORDERS = ("in_order", "random", "late", "early")


def simulate(seed: int) -> None:
    """Random requests on a random number of CTAs; every third has pages that are not there, every fourth must not depend on the
    others."""
    dtype = (torch.float16, torch.bfloat16)[seed % 2]
    deterministic = seed % 4 == 3
    call = draw(seed, dtype, honest=seed % 3 > 0, deterministic=deterministic)
    config = {"split": 128, "chain": 256} if deterministic else {"start": seed % 5}
    run(call, ctas=1 + seed % 6, order=ORDERS[seed // 2 % 4], seed=seed, arch=(80, 90)[seed % 2], **config)


@pytest.mark.parametrize("seed", range(24))
def test_against_the_specification(seed):
    simulate(seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["none", "e5m2", "64 and 128", "80", "256", "request", "key", "large values", "large queries", "small queries"]
)
@pytest.mark.parametrize(("n_q", "deterministic"), [(1, False), (4, False), (4, True)])
def test_a_cache_of_8_bits(kind, dtype, n_q, deterministic):
    dims = {"64 and 128": (64, 128), "80": (80, 80), "256": (256, 256)}.get(kind, (128, 128))
    call = draw(6, dtype, head_dim=dims[0], head_dim_v=dims[1], ragged=False, page=16, heads_kv=2, group=7, n_q=n_q)
    of_8_bits = torch.float8_e5m2 if kind == "e5m2" else torch.float8_e4m3fn
    k, v = (x.nan_to_num(nan=448.0).to(of_8_bits) for x in (call.cache.k, call.cache.v))
    shape = {"request": (len(call.cache.lengths), 2), "key": k.shape[:3], "large values": k.shape[:3]}.get(kind)
    g = torch.Generator().manual_seed(0)
    scales = [None, None] if shape is None else [torch.rand(shape, generator=g) + 0.5 for _ in range(2)]
    if kind == "large values":  # beyond float16, in which P meets values that have no such scales
        v, scales[1] = (v.float().abs() * 2.0**-6).to(v.dtype), scales[1] * 2.0**18
    if kind.endswith("queries") and dtype == torch.bfloat16:  # beyond float16, in which they meet such keys
        power = 18.0 if kind == "large queries" else -30.0
        call = call._replace(q=call.q * 2.0**power, keywords={**call.keywords, "scale": 2.0 ** (-3.0 - power)})
    cache = strobe.Cache(k, v, call.cache.lengths, call.cache.page_table, k_scale=scales[0], v_scale=scales[1])
    call = call._replace(cache=cache, keywords={**call.keywords, "deterministic": deterministic})
    run(call, ctas=4, **({"split": 128, "chain": 256} if deterministic else {}))


def test_columns_that_two_warps_share():
    run(draw(7, torch.float16, head_dim=256, head_dim_v=256, ragged=False, group=4, heads_kv=1), ctas=3)


@pytest.mark.parametrize(("heads", "deterministic"), [(16, False), (16, True), (64, False)])
def test_values_that_are_columns_of_keys(heads, deterministic):
    call = latent(heads)._replace(keywords={"deterministic": deterministic})
    run(call, ctas=3, **({"split": 64, "chain": 128} if deterministic else {}))


def simulate_one_request(seed: int) -> None:
    """One request, whose key heads are shared evenly, half of the time by clusters; packed, too, when it may have no query; of
    every third a page is not there."""
    n_q, group = [(1, 8), (1, 4), (2, 4), (1, 1), (3, 2)][seed % 5]
    if seed % 7 == 6:
        n_q, group = 4, 6
    dim, page = (80, 96, 128)[seed % 3], [None, 16, 64, 128, 1, 48][seed % 6]
    call = draw(seed, (torch.float16, torch.bfloat16)[seed % 2], honest=seed % 3 > 0, ragged=seed % 5 < 2, batch=1, heads_kv=2,
                n_q=n_q, group=group, page=page, head_dim=dim, head_dim_v=dim, room=(64, 700, 2100)[seed // 2 % 3])  # fmt: skip
    problem, _ = described(call)
    config = choose(problem, KNOWN["H200"])
    assert (config.shares, config.clustered) == ((64, False) if n_q * group > 8 else (16, True))
    changes = {}
    if seed % 4 and n_q * group <= 8:
        changes = {"clustered": seed % 4 == 1, "shares": (5, 8, 2, 12)[seed % 4], "stages": 3}
    run(call, ctas=19, order=ORDERS[seed // 2 % 4], seed=seed, launches=1 + seed % 2, choose=of_shares, **changes)


@pytest.mark.parametrize("seed", range(16))
def test_one_request(seed):
    simulate_one_request(seed)


def simulate_few_jobs(seed: int) -> None:
    """Some requests, packed or not, each of whose key heads is a cluster's, or shared without one, or one CTA's; of every third
    a page is not there, every fourth has a cache of 8 bits."""
    n_q, group = [(1, 8), (1, 4), (2, 4), (1, 1), (1, 7)][seed % 5]
    dim, page = (80, 96, 128)[seed % 3], [None, 16, 64, 128, 1, 48][seed % 6]
    call = draw(seed, (torch.float16, torch.bfloat16)[seed % 2], honest=seed % 3 > 0, ragged=seed // 2 % 3 == 1,
                batch=(1, 2, 3, 5)[seed % 4], heads_kv=(2, 1, 3)[seed % 3], n_q=n_q, group=group, page=page,
                head_dim=dim, head_dim_v=dim, room=(64, 700, 1100)[seed // 2 % 3])  # fmt: skip
    order, launches, kv_bytes = ORDERS[seed // 2 % 4], 1 + seed % 2, 1 if seed % 4 == 2 else 2
    if kv_bytes == 1:
        k, v = (x.nan_to_num(nan=448.0).to(torch.float8_e4m3fn) for x in (call.cache.k, call.cache.v))
        call = call._replace(cache=replace(call.cache, k=k, v=v))
    stages = (2, 5 - kv_bytes)[seed // 4 % 2]
    clusters = {"clustered": True, "shares": (8, 16)[seed // 2 % 2], "stages": stages, "tokens": 64, "warps": 4}
    evenly = {"clustered": False, "shares": (1, 2, 5, 12)[seed % 4], "stages": 3 - seed // 4 % 2}
    tokens = {"tokens": 128 // kv_bytes * (1 + seed // 3 % 2), "warps": 4 * (1 + seed // 3 % 2)}
    for changes in (clusters, {**evenly, **tokens}):
        run(call, order=order, seed=seed, launches=launches, choose=of_shares, **changes)


@pytest.mark.parametrize("seed", range(16))
def test_few_jobs(seed):
    simulate_few_jobs(seed)


@pytest.mark.parametrize("kv_bytes", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_few_keys_of_more_rows(seed, kv_bytes):
    """Up to 32 rows of each key head of one request or several, whose CTAs share it evenly."""
    n_q, group = [(4, 8), (3, 8), (4, 4), (2, 7)][seed % 4]
    call = draw(seed, (torch.float16, torch.bfloat16)[seed % 2], honest=seed % 3 > 0, ragged=seed % 4 == 2, heads_kv=2, n_q=n_q,
                group=group, head_dim=(96, 128)[seed % 2], head_dim_v=128, batch=(1, 3)[seed // 2 % 2],
                page=[16, 64, 128, None, 48][seed % 5], room=(64, 700, 2100)[seed % 3])  # fmt: skip
    if kv_bytes == 1:
        k, v = (x.nan_to_num(nan=448.0).to(torch.float8_e4m3fn) for x in (call.cache.k, call.cache.v))
        call = call._replace(cache=replace(call.cache, k=k, v=v))
    problem, _ = described(call)
    assert takes_shares(problem, KNOWN["H200"])
    run(call, order=ORDERS[seed % 4], seed=seed, launches=1 + seed % 2, choose=of_shares, shares=(1, 2, 5)[seed % 3])


def simulate_wgmma(seed: int) -> None:
    """Random requests on TMA and wgmma; of every third a page is not there."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128][seed % 5]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page)
    run(call, ctas=1 + seed % 6, order=ORDERS[seed // 2 % 4], seed=seed, choose=of_wgmma, start=seed % 4)


@pytest.mark.parametrize("seed", range(16))
def test_wgmma(seed):
    simulate_wgmma(seed)


@pytest.mark.parametrize("seed", range(8))
def test_long_steps(seed):
    call = draw(seed, (torch.float16, torch.bfloat16)[seed % 2], page=None, group=(8, 7, 1)[seed % 3],
                n_q=(1, 4)[seed // 2 % 2], head_dim=128, head_dim_v=128, room=(700, 2100)[seed % 2])  # fmt: skip
    run(call, ctas=1 + seed % 5, order=ORDERS[seed // 2 % 4], seed=seed, choose=of_long_steps, start=seed % 3)


FAR = strobe.Window(1 << 20, 0)
"""As far as there is room; but nobody is optimistic behind a left bound."""


@pytest.mark.parametrize(
    ("batch", "heads_kv", "room", "fixed", "arch", "tokens"),
    [
        (17, 4, 2048, {}, "H200", 128), (17, 4, 2047, {}, "H200", 64), (16, 4, 2049, {}, "H200", 128),
        (3, 4, 9000, {}, "H200", 64), (33, 4, 2048, {}, "H200", 128), (34, 4, 8191, {}, "H200", 64),
        (34, 4, 8192, {}, "H200", 128), (17, 4, 2048, {}, "H100", 64),
        (128, 8, 8192, {}, "H200", 128), (133, 8, 8192, {}, "H200", 64), (8, 4, 8192, {"page": 64}, "H200", 64),
        (32, 4, 8192, {"n_q": 2}, "H200", 128), (31, 4, 8192, {"n_q": 2}, "H200", 64), (32, 4, 8192, {"n_q": 4}, "H200", 128),
        (32, 4, 8192, {"n_q": 5}, "H200", 64), (8, 4, 8192, {"deterministic": True}, "H200", 64),
        (8, 4, 8192, {"head_dim": 64}, "H200", 64),
    ],
)  # fmt: skip
def test_who_has_long_steps(batch, heads_kv, room, fixed, arch, tokens):
    """Up to 32 rows over many keys of contiguous caches, where memory is fast and key heads are not very many."""
    problem = problem_of(**{"n_q": 1, "page": None, **fixed})
    config = choose(with_room(problem, batch, heads_kv, room), KNOWN[arch])
    assert (config.tokens if config.head_dim == 128 else 64) == tokens and (tokens == 64 or config.ctas == 1)


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize(("kind", "n_q"), [(of_wgmma, 16), (of_one_group, 4), (of_mma, 4)])
def test_several_whole_jobs(kind, n_q, by_turns):
    """Eight jobs of three steps for three CTAs: three whole ones each, not eight steps."""
    call = draw(5, torch.float16, ragged=False, batch=4, lengths=[190] * 4, room=192, n_q=n_q, group=8, heads_kv=2, page=64,
                leftpad=False, mask=None, head_dim=128, head_dim_v=128)  # fmt: skip
    run(call, ctas=3, choose=kind, launches=2, by_turns=by_turns)


@pytest.mark.parametrize("kind", [of_mma, of_one_group])
@pytest.mark.parametrize("length", [190, 0])
def test_turns_that_are_not_taken(kind, length):
    """Where lengths differ or jobs are cut, each CTA has one stretch."""
    for lengths, ctas in (([190, 190, 190, length], 3), ([190] * 4, 5)):
        call = draw(5, torch.float16, ragged=False, batch=4, lengths=lengths, room=192, n_q=2, group=2, heads_kv=2, page=64,
                    leftpad=False, mask=None, head_dim=128, head_dim_v=128)  # fmt: skip
        run(call, ctas=ctas, choose=kind, by_turns=True, start=2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [of_mma, of_wgmma, of_one_group])
def test_pieces_that_count_for_more_than_their_keys(kind, order):
    """Short requests between long ones: stretches that begin in a job, behind its units and where a job begins."""
    call = draw(1, torch.float16, ragged=False, lengths=[250, 1, 0, 130, 1, 400], batch=6, page=16, room=400, n_q=2, group=2,
                heads_kv=2, head_dim=128, head_dim_v=128)  # fmt: skip
    for ctas in (3, 8, 19):
        run(call, ctas=ctas, order=order, launches=2, choose=kind, start=3)


@pytest.mark.parametrize("seed", range(12))
def test_key_heads_that_are_abreast(seed):
    """Random requests, by every kernel, of one tile and of several: CTAs of a team have a key head each; of a GPU whose
    multiprocessors are no whole number of teams, too."""
    kind, abreast = (of_mma, of_one_group, of_wgmma)[seed % 3], (2, 3, 4)[seed // 3 % 3]
    n_q, group = [(1, 4), (16, 8), (3, 7), (40, 4)][seed % 4]
    call = draw(seed, (torch.float16, torch.bfloat16)[seed % 2], honest=seed % 3 > 0, page=[16, None, 48, 64][seed // 2 % 4],
                n_q=n_q, group=group, heads_kv=abreast * (1 + seed % 2), head_dim=128, head_dim_v=128, tree=False)  # fmt: skip
    run(call, ctas=abreast * (1 + seed % 5) + seed % 2, order=ORDERS[seed // 2 % 4], seed=seed, launches=2, choose=kind,
        start=seed % 4, heads_abreast=abreast, by_turns=seed % 5 == 0)  # fmt: skip


def of_two_tiles(seed: int = 5, **changes) -> Drawn:
    """Requests of unequal lengths whose 160 rows of a key head are two tiles."""
    given = {"lengths": [60, 700, 1, 0, 190], "room": 704, "n_q": 20, "group": 8, "heads_kv": 2, "page": 64, "leftpad": False}
    return draw(seed, torch.float16, ragged=False, batch=5, head_dim=128, head_dim_v=128, tree=False, **{**given, **changes})


@pytest.mark.parametrize("seed", range(8))
def test_tiles_and_key_heads_that_are_abreast(seed):
    """A team has a CTA for each tile of each of its key heads; where tiles are no whole number of those abreast, some have
    none."""
    tiles, heads = (2, 3)[seed % 2], (1, 2)[seed // 2 % 2]
    call = of_two_tiles(seed, n_q=(20, 50)[seed // 4], **({"lengths": [640] * 5} if seed % 3 == 0 else {}))
    asked = {**ASKED_Q, "absent": 0} if call.q.shape[1] == 20 else {"groups": 2}
    run(call, ctas=tiles * heads * (1 + seed % 4), order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_wgmma,
        abreast=tiles, heads_abreast=heads, start=seed % 3, **asked)  # fmt: skip


@pytest.mark.parametrize("kind", [of_mma, of_wgmma, of_one_group])
def test_turns_of_key_heads_that_are_abreast(kind):
    """Eight jobs of two key heads for three teams, where a seventh CTA would be one without a team."""
    call = draw(5, torch.float16, ragged=False, batch=8, lengths=[190] * 8, room=192, n_q=4, group=8, heads_kv=2, page=64,
                leftpad=False, mask=None, head_dim=128, head_dim_v=128)  # fmt: skip
    run(call, ctas=7, choose=kind, launches=2, by_turns=True, heads_abreast=2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_parts_of_key_heads_that_are_abreast(groups, order):
    """Added up by the last CTA to come, and taken again."""
    asked = {**ASKED_Q, "groups": groups, "choose": of_wgmma, "heads_abreast": 2, "order": order, "launches": 2}
    for ctas in (4, 7, 10):
        run(of_unequal_lengths(heads_kv=2), ctas=ctas, joins=True, **asked)
    run(queries_below_zero(), ctas=6, **{**asked, "optimistic": True})


@pytest.mark.parametrize("abreast", [1, 2])
def test_a_part_behind_so_many_pieces_that_some_are_taken_again_together(abreast):
    """34 of a CTA, of which the last is a part: it is not handed in twice."""
    call = far_scores(torch.float16, 64, lengths=[130] * 33 + [9000], heads_kv=abreast)
    run(call, ctas=2 * abreast, choose=of_wgmma, heads_abreast=abreast, **{**OPTIMISTIC, "groups": 1})


@pytest.mark.parametrize("seed", range(9))
def test_splits_of_key_heads_that_are_abreast(seed):
    """The same bits as by one CTA after the other."""
    kind, abreast = (of_mma, of_one_group, of_wgmma)[seed % 3], (2, 4)[seed % 2]
    n_q, group = [(4, 8), (3, 7), (40, 4), (16, 8)][seed % 4]
    call = draw(seed, torch.float16, honest=seed % 3 > 0, page=[16, None, 48][seed % 3], n_q=n_q, group=group,
                heads_kv=abreast, head_dim=128, head_dim_v=128, tree=False, deterministic=True, alibi=False,
                mask=strobe.Causal(), room=(257, 700)[seed // 3 % 2])  # fmt: skip
    cut = {"split": 128 if kind is of_mma else 64, "chain": (256, 512)[seed // 2 % 2], "choose": kind}
    late = {} if kind is of_mma else {"late": True, "stages": 2}
    usual = run(call, ctas=1, **cut, **late)
    hopeful = OPTIMISTIC if late else {}
    found = run(call, ctas=abreast * (1 + seed % 4) + seed % 2, order=ORDERS[seed // 2 % 4], seed=seed, launches=2,
                heads_abreast=abreast, **cut, **late, **hopeful)  # fmt: skip
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(usual, found, strict=True))


def test_a_scale_that_is_not_positive():
    for scale in (-0.2, 0.0):
        for choose_one in (of_wgmma, of_one_group):
            call = draw(
                6, torch.float16, ragged=False, n_q=16, group=8, heads_kv=1, page=16, head_dim=64, head_dim_v=64, softcap=0.0
            )
            run(call._replace(keywords={**call.keywords, "scale": scale}), choose=choose_one)


def simulate_one_group(seed: int) -> None:
    """Random requests on one group of wgmma, whose keys cp.async copies; of every third a page is not there. Poison is where
    nobody has a key."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128, 1, 32][seed % 7]
    n_q, group = [(4, 8), (3, 7), (16, 4), (5, 4)][seed % 4]
    dim, dim_v = [(128, 128), (80, 80), (96, 128)][seed % 3]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=n_q, group=group, head_dim=dim, head_dim_v=dim_v)
    run(call, ctas=1 + seed % 6, order=ORDERS[seed // 2 % 4], seed=seed, choose=of_one_group, stages=2 + seed % 5,
        start=seed % 3)  # fmt: skip


@pytest.mark.parametrize("seed", range(14))
def test_one_group_of_wgmma(seed):
    simulate_one_group(seed)


def with_8_bits(call, kind=torch.float8_e4m3fn, scaled=False):
    """A call over a cache of such numbers, NaN where nobody has a key; scaled: by a number for each request and key head."""
    shape, g = (len(call.cache.lengths), call.cache.k.shape[2]), torch.Generator().manual_seed(3)
    k_scale, v_scale = (torch.rand(shape, generator=g) + 0.5 if scaled else None for _ in range(2))
    k, v = call.cache.k.to(kind), call.cache.v.to(kind)
    return call._replace(cache=replace(call.cache, k=k, v=v, k_scale=k_scale, v_scale=v_scale))


@pytest.mark.parametrize("seed", range(14))
def test_a_cache_of_8_bits_by_wgmma(seed):
    """Random requests whose keys four warps convert, for one group or two, with and without hope; of every third a page is not
    there. Queries in bfloat16 are beyond float16, in which they meet keys, or far below it."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128, 96, 32][seed % 7]
    n_q, group = [(4, 8), (3, 7), (16, 8), (5, 4)][seed % 4]
    dim, dim_v = [(128, 128), (80, 80), (96, 128)][seed % 3]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=n_q, group=group, head_dim=dim, head_dim_v=dim_v)
    kind = torch.float8_e5m2 if seed % 5 == 3 else torch.float8_e4m3fn
    call = with_8_bits(call, kind, scaled=seed // 2 % 2 == 1)
    if dtype == torch.bfloat16:
        power = (20.0, -30.0)[seed // 2 % 2]
        call = call._replace(q=call.q * 2.0**power, keywords={**call.keywords, "scale": 2.0 ** (-3.5 - power)})
    run(call, ctas=1 + seed % 6, order=ORDERS[seed // 2 % 4], seed=seed, choose=of_converted, stages=2 + seed % 2,
        start=seed % 3, bytes_stages=2 + seed % 4, optimistic=seed % 3 == 0)  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_pieces_of_8_bits_are_taken_again(order):
    for n_q in (16, 8):
        call = with_8_bits(far_scores(torch.float16, 64))
        call = call._replace(q=call.q[:, -n_q:])
        run(call, ctas=2, order=order, launches=2, choose=of_converted, optimistic=True, stages=2, bytes_stages=3)


@pytest.mark.parametrize("order", ORDERS)
def test_one_group_launch_after_launch(order):
    """With jobs of many steps, and as many stages as on a GPU."""
    call = draw(2, torch.bfloat16, ragged=False, lengths=[700, 33, 0], batch=3, page=16, room=720, n_q=4, group=8, heads_kv=1,
                head_dim=128, head_dim_v=128)  # fmt: skip
    run(call, ctas=4, order=order, launches=2, choose=of_one_group)


@pytest.mark.parametrize(
    ("rows", "tokens", "stages", "groups"), [(128, 64, 2, 1), (64, 32, 5, 1), (128, 128, 2, 1), (128, 64, 3, 2)]
)
def test_other_configs_of_wgmma(rows, tokens, stages, groups):
    call = draw(4, torch.bfloat16, head_dim=128, head_dim_v=64, ragged=False, group=8, heads_kv=1, n_q=19, page=32)
    of_rows = {"rows": rows, "warps": rows // 16, "groups": groups}
    run(call, ctas=4, choose=of_wgmma, tokens=tokens, stages=stages, box=32, chunk=64, **of_rows)


FIXED = {"head_dim": 128, "head_dim_v": 128, "page": 64, "ragged": False, "room": 900, "batch": 2, "lengths": [880, 300],
         "tree": False, "mask": strobe.Causal(), "group": 4, "heads_kv": 1, "leftpad": False, "softcap": 0.0, "alibi": False,
         "sinks": False}  # fmt: skip
CUT = {"split": 128, "chain": 512}
"""Keys of a split and of a chain, so few that a request has two chains."""


@pytest.mark.parametrize("n_q", [4, 18])
@pytest.mark.parametrize("kinds", [(of_mma,), (of_one_group, of_wgmma)])
def test_bits_depend_on_a_requests_keys_alone(kinds, n_q):
    """On neither other requests, nor the number of queries, nor how many CTAs there are, nor how many groups of warps."""
    call = draw(21, torch.bfloat16, deterministic=True, n_q=n_q, **FIXED)
    cache = strobe.Cache(call.cache.k, call.cache.v, call.cache.lengths[:1], call.cache.page_table[:1])
    whole = run(call, ctas=1, choose=kinds[0], **CUT)
    for kind, ctas in itertools.product(kinds, (2, 3, 16)):
        found = run(call, ctas=ctas, choose=kind, **CUT)
        assert torch.equal(whole[0], found[0]) and torch.equal(whole[1], found[1]), (kind, ctas)
        last = run(call._replace(q=call.q[:1, -1:], cache=cache), ctas=ctas, choose=kind, **CUT)
        assert torch.equal(whole[0][:1, -1:], last[0]) and torch.equal(whole[1][:1, :, -1:], last[1]), (kind, ctas)


def simulate_splits(seed: int) -> None:
    """Random requests whose keys are cut in splits: the same bits by one CTA and by several; of every third a page is not
    there."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128][seed % 5]
    n_q, group = [(4, 8), (3, 7), (40, 4), (5, 16)][seed % 4]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=n_q, group=group, heads_kv=1, head_dim=128, head_dim_v=128,
                tree=False, deterministic=True, room=(257, 700)[seed // 3 % 2])  # fmt: skip
    kind, order = (of_one_group, of_wgmma, of_mma)[seed % 3], ORDERS[seed // 2 % 4]
    cut = {"split": 128 if kind is of_mma else 64, "chain": ((256, 512), (384, 1024))[seed // 3 % 2][seed // 2 % 2]}
    one, several = (run(call, ctas=ctas, order=order, seed=seed, choose=kind, **cut) for ctas in (1, 2 + seed % 12))
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one, several, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_splits(seed):
    simulate_splits(seed)


@pytest.mark.parametrize("seed", range(8))
def test_splits_of_one_group_with_the_optimistic_softmax(seed):
    """Random requests of which a page may be missing: the same bits as without it, by more CTAs."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128][seed % 5]
    n_q, group = [(4, 8), (3, 7), (16, 8), (5, 4)][seed % 4]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=n_q, group=group, heads_kv=1, head_dim=128, head_dim_v=128,
                tree=False, deterministic=True, room=(257, 700)[seed // 3 % 2], alibi=False,
                mask=[strobe.Causal(), strobe.Full(), None][seed // 2 % 3])  # fmt: skip
    cut = {
        "choose": of_one_group,
        "stages": 2 + seed % 3,
        "split": 64 * (1 + seed % 2),
        "chain": (256, 512)[seed // 2 % 2],
        "late": True,
    }
    usual = run(call, ctas=1, **cut)
    found = run(call, ctas=2 + seed % 7, order=ORDERS[seed // 2 % 4], seed=seed, launches=2, **cut, **OPTIMISTIC)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(usual, found, strict=True))


def simulate_split_clusters(seed: int) -> None:
    """Random requests whose splits are a cluster's: the same bits as one group of warps finds; of every third a page is not
    there."""
    n_q, group = [(1, 8), (4, 8), (3, 7), (8, 8), (2, 8)][seed % 5]
    call = draw(seed, (torch.float16, torch.bfloat16)[seed % 2], honest=seed % 3 > 0, page=[None, 16, 48, 64, 128][seed % 5],
                n_q=n_q, group=group, batch=(1, 2)[seed % 2], heads_kv=1, head_dim=(80, 128)[seed % 2], ragged=False,
                head_dim_v=128, tree=seed % 4 == 3, deterministic=True, room=(200, 700)[seed // 3 % 2])  # fmt: skip
    shares, stages = (8, 16)[seed // 2 % 2], (1, 2)[seed // 3 % 2]
    cut = {"split": 64 * stages, "chain": 64 * stages * shares // (1 + seed // 4 % 2), "late": seed % 2 == 0}
    usual = run(call, ctas=3, choose=of_one_group, stages=4, **cut)
    found = run(call, order=ORDERS[seed // 2 % 4], seed=seed, launches=1 + seed % 2, choose=of_split_clusters, shares=shares,
                stages=stages, posts=seed % 3 > 0, **cut)  # fmt: skip
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(usual, found, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_split_clusters(seed):
    simulate_split_clusters(seed)


@pytest.mark.parametrize(
    ("batch", "heads_kv", "room", "n_q", "shares"),
    [
        (1, 8, 1024, 4, 8), (1, 8, 1024, 5, 0), (1, 8, 2048, 1, 8), (1, 8, 2048, 2, 0), (1, 8, 2049, 1, 0), (1, 8, 600, 4, 8),
        (1, 15, 1024, 1, 0), (2, 8, 1024, 1, 0), (1, 2, 1024, 1, 16), (2, 2, 1024, 1, 16), (8, 2, 1024, 4, 16),
        (9, 2, 1024, 1, 0), (4, 4, 1024, 1, 16), (5, 4, 1024, 1, 0), (2, 2, 2048, 1, 16), (3, 2, 2048, 1, 0),
    ],
)  # fmt: skip
def test_whose_splits_are_for_clusters(batch, heads_kv, room, n_q, shares):
    problem = with_room(problem_of(n_q=n_q, deterministic=True), batch, heads_kv, room)
    assert choose(problem, KNOWN["H200"]).shares == choose(problem, KNOWN["H100"]).shares == shares
    assert not choose(replace(problem, page_size=1), KNOWN["H200"]).shares


def test_splits_are_whole_steps_and_chains_whole_splits():
    for heads_kv, room in itertools.product(range(1, 20), (64, 1000, 1 << 15)):
        config = choose(with_room(problem_of(n_q=1, deterministic=True), 1, heads_kv, room), KNOWN["H200"])
        assert config.split % config.tokens == 0 and config.chain % config.split == 0


@pytest.mark.parametrize(
    "fixed", [{}, {"head_dim": 64}, {"head_dim": 256}, {"head_dim_v": 64}, {"page": 8}, {"page": None}], ids=str
)
@pytest.mark.parametrize("n_q", [1, 16, 200])
@pytest.mark.parametrize("gpu", ["A100", "H100", "H200"])
def test_bits_depend_on_the_power_of_two_that_holds_the_room(fixed, n_q, gpu):
    """On nothing of a batch, then; `explain` says the rooms."""
    problem, bits = problem_of(**{"n_q": n_q, "deterministic": True, **fixed}), attrgetter("split", "chain", "late", "by_wgmma")
    for room in (512, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 17):
        ways = {
            bits(choose(with_room(problem, batch, 4, room - less), KNOWN[gpu]))
            for batch, less in itertools.product((1, 7, 500), (0, room // 2 - 1))
        }
        said = str(dispatch.explain_problem(with_room(problem, 7, 4, room - 1), KNOWN[gpu]))
        assert len(ways) == 1 and f"has the same bits in all calls with room for {room // 2 + 1} to {room} keys" in said


@pytest.mark.parametrize(("fixed", "most"), [(False, 35e6), (True, 300e6)])
@pytest.mark.parametrize("n_q", [1, 4, 16, 70])
def test_parts_of_results_take_little_memory(n_q, fixed, most):
    """As docs/support.md says; it is one piece for all calls of a stream."""
    for dim, page in itertools.product((64, 128, 256), (64, None)):
        problem = problem_of(n_q=n_q, deterministic=fixed, head_dim=dim, page=page)
        for batch, room, heads_kv in itertools.product((1, 8, 64, 300), (512, 1 << 13, 1 << 17), (1, 8, 32)):
            here = with_room(problem, batch, heads_kv, room)
            needed = buffers(here, KNOWN["H200"], choose(here, KNOWN["H200"])).shared.values()
            assert sum(4 * math.prod(x.shape) for x in needed if x.fill is None) <= most


@pytest.mark.parametrize("room", [257, 700])
def test_splits_of_fewer_rows_than_a_tile(room):
    call = draw(5, torch.bfloat16, n_q=1, group=4, heads_kv=1, head_dim=128, head_dim_v=128, tree=False, deterministic=True,
                room=room)  # fmt: skip
    one, several = (run(call, ctas=ctas, choose=of_mma, split=128, chain=room // 2 // 128 * 128) for ctas in (1, 3))
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one, several, strict=True))


@pytest.mark.parametrize("choose_one", [of_mma, of_wgmma])
def test_bits_of_latent_keys(choose_one):
    call = latent(48)._replace(keywords={"deterministic": True})
    one, *others = (run(call, ctas=ctas, choose=choose_one, split=64, chain=128) for ctas in (1, 2, 5))
    assert all(torch.equal(x, y) for other in others for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("fixed", "kind"),
    [
        ({"n_q": 1}, "mma"),
        ({"n_q": 4}, "mma"),
        ({"n_q": 5}, "one group"),
        ({"n_q": 5, "group": 7, "page": None, "head_dim": 80}, "one group"),
        ({"n_q": 8, "page": 16}, "one group"),
        ({"n_q": 8, "page": 8}, "mma"),
        ({"n_q": 8, "head_dim_v": 64}, "TMA, 64 rows"),
        ({"n_q": 1, "deterministic": True}, "one group"),
        ({"n_q": 4, "deterministic": True}, "one group"),
        ({"n_q": 4, "head_dim_v": 64, "deterministic": True}, "TMA, 64 rows"),
        ({"n_q": 9}, "one group"),
        ({"n_q": 17}, "TMA, 128 rows"),
        ({"n_q": 40, "batch": 40}, "TMA, 128 rows"),
        ({"n_q": 16, "page": 16}, "one group"),
        ({"n_q": 16, "deterministic": True}, "one group"),
        ({"n_q": 17, "deterministic": True}, "TMA, 128 rows"),
        ({"n_q": 16, "page": 8}, "mma"),
        ({"n_q": 1, "group": 1}, "mma"),
        ({"n_q": 16, "head_dim": 64}, "TMA, 128 rows"),
        ({"n_q": 8, "head_dim": 64}, "one group"),
        ({"n_q": 4, "head_dim": 64}, "mma"),
        ({"n_q": 1, "head_dim": 64}, "mma"),
        ({"n_q": 16, "head_dim": 64, "deterministic": True}, "mma"),
    ],
)
def test_which_kernel_runs(fixed, kind):
    problem = problem_of(**fixed)
    assert kind_of(choose(problem, KNOWN["H200"])) == kind
    assert kind_of(choose(problem, KNOWN["A100"])) == "mma"


@pytest.mark.parametrize(
    ("fixed", "kind"),
    [
        ({"n_q": 4}, "mma"), ({"n_q": 5}, "64 rows"), ({"n_q": 8, "page": None}, "64 rows"), ({"n_q": 9}, "64 rows"),
        ({"n_q": 16, "room": 1 << 14}, "64 rows"), ({"n_q": 9, "room": 1 << 15}, "128 rows"), ({"n_q": 40}, "128 rows"),
        ({"n_q": 16, "room": 64}, "64 rows"), ({"n_q": 16, "page": 8}, "mma"), ({"n_q": 16, "deterministic": True}, "mma"),
        ({"n_q": 16, "head_dim": 64}, "mma"), ({"n_q": 40, "head_dim": 80}, "128 rows"),
    ],
)  # fmt: skip
def test_which_caches_of_8_bits_are_converted(fixed, kind):
    problem = replace(problem_of(**{"room": 2048, **fixed}), kv_dtype=torch.float8_e4m3fn)
    config = choose(problem, KNOWN["H200"])
    assert (f"{config.rows} rows" if config.bytes_stages else "mma") == kind and config.by_wgmma == (kind != "mma")
    assert not choose(problem, KNOWN["A100"]).bytes_stages
    if config.bytes_stages:
        by_key = replace(problem, k_scale=torch.empty(1, 1, 1))
        assert not choose(by_key, KNOWN["H200"]).bytes_stages


@pytest.mark.parametrize(
    ("n_q", "batch", "room", "kind"),
    [
        (16, 16, 512, "one group"),
        (16, 17, 512, "TMA, 128 rows"),
        (8, 33, 1023, "one group"),
        (8, 34, 1023, "TMA, 64 rows"),
        (8, 34, 1024, "one group"),
        (5, 34, 1023, "TMA, 64 rows"),
    ],
)
@pytest.mark.parametrize("gpu", ["H200", "H100"])
def test_tiles_in_turn_of_few_keys_are_not_one_groups(n_q, batch, room, kind, gpu):
    """With four key heads, more than 132 tiles of 64 rows, of which a multiprocessor has one after the other."""
    assert kind_of(choose(with_room(problem_of(n_q=n_q, mask=FAR), batch, 4, room), KNOWN[gpu])) == kind


@pytest.mark.parametrize("fixed", [{}, {"n_q": 4}, {"n_q": 16}, {"head_dim": 64}, {"head_dim": 256}, {"page": None}], ids=str)
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_window_is_all_that_counts(fixed, batch):
    """Of a long request behind a window as much is read as of a short one."""
    window = 1000 - problem_of(**{"n_q": 1, **fixed}).lengths.seqlen_q - 64
    behind = with_room(problem_of(**{"n_q": 1, "mask": strobe.Window(window, 0), **fixed}), batch, 4, 1 << 15)
    assert choose(behind, KNOWN["H200"]) == choose(with_room(behind, batch, 4, 1000), KNOWN["H200"])
    alone = replace(behind, deterministic=True)  # bits depend on the room
    assert choose(alone, KNOWN["H200"]) != choose(with_room(alone, batch, 4, 1000), KNOWN["H200"])


@pytest.mark.parametrize(
    ("n_q", "dim", "most", "kind"),
    [
        (4, 128, 1 << 17, "mma"),
        (8, 128, 1 << 17, "TMA, 64 rows"),
        (8, 64, 1 << 13, "TMA, 64 rows"),
    ],
)
def test_many_keys_are_not_one_groups(n_q, dim, most, kind):
    problem = problem_of(n_q=n_q, head_dim=dim, mask=FAR)
    for keys, wanted in ((most, "one group"), (most + 1, kind)):  # of 2 requests and 4 key heads
        longer = replace(problem, lengths=replace(problem.lengths, seqlen_kv=keys))
        assert kind_of(choose(longer, KNOWN["H200"])) == wanted
        assert kind_of(choose(longer, KNOWN["H100"])) == ("one group" if dim == 128 else wanted)


@pytest.mark.parametrize(
    ("fixed", "room", "kinds"),
    [
        ({}, 1 << 12, ("one group", "one group")), ({}, (1 << 12) + 1, ("TMA, 128 rows", "one group")),
        ({}, 1 << 13, ("TMA, 128 rows", "one group")), ({}, (1 << 13) + 1, ("TMA, 128 rows", "TMA, 128 rows")),
        ({"batch": 8}, 2047, ("one group", "one group")), ({"batch": 8}, 2048, ("TMA, 128 rows", "one group")),
        ({"mask": strobe.Window(40, 0)}, 1 << 13, ("one group", "one group")),
    ],
)  # fmt: skip
def test_fewer_keys_of_many_rows_are_one_groups_where_requests_are_long(fixed, room, kinds):
    """Of 2 requests and 4 key heads, on an H200 and an H100."""
    problem = problem_of(**{"n_q": 16, "alibi": False, "mask": strobe.Causal(), **fixed})
    longer = replace(problem, lengths=replace(problem.lengths, seqlen_kv=room))
    assert tuple(kind_of(choose(longer, KNOWN[arch])) for arch in ("H200", "H100")) == kinds


def with_room(problem, batch, heads_kv, room):
    """The problem of so many requests and key heads, with room for so many keys."""
    lengths = replace(problem.lengths, batch=batch, seqlen_kv=room)
    return replace(problem, lengths=lengths, heads_kv=heads_kv, heads_q=8 * heads_kv)


@pytest.mark.parametrize(
    ("heads_kv", "batch", "room", "fixed", "abreast", "on_an_h100"),
    [
        (8, 8, 8192, {}, 4, 1), (6, 8, 8192, {}, 2, 1), (7, 8, 8192, {}, 1, 1), (8, 1, 8192, {"n_q": 8}, 1, 1),
        (8, 2, 700, {}, 1, 1), (8, 40, 700, {"n_q": 8}, 4, 1), (8, 8, 8192, {"n_q": 16}, 4, 1),
        (8, 8, 8191, {"n_q": 16}, 1, 1), (8, 8, 8192, {"deterministic": True}, 4, 1),
        (8, 8, 8192, {"deterministic": True, "n_q": 16}, 1, 1), (8, 2, 300, {"n_q": 16, "head_dim": 96}, 4, 1),
        (8, 2, 8192, {"n_q": 16, "head_dim": 96}, 8, 8), (4, 4, 8192, {"n_q": 16, "head_dim": 80}, 4, 4),
        (8, 1, 8192, {"n_q": 16, "head_dim": 96}, 1, 1), (8, 2, 8192, {"n_q": 16, "head_dim": 64}, 1, 1),
        (8, 8, 8192, {"head_dim": 96}, 4, 1), (8, 2, 8192, {"n_q": 16, "head_dim": 160}, 8, 8),
        (8, 2, 8192, {"n_q": 2, "head_dim": 160}, 1, 1), (8, 2, 8192, {"n_q": 2, "head_dim": 144}, 4, 1),
        (8, 8, 8192, {"n_q": 20}, 2, 1), (8, 2, 8192, {"n_q": 20}, 1, 1), (8, 4, 8192, {"n_q": 2, "head_dim": 96}, 8, 8),
        (8, 1, 8192, {"n_q": 2, "head_dim": 96}, 1, 1),
        (8, 8, 8192, {"page": None}, 8, 1), (32, 8, 8192, {"page": None}, 8, 1), (2, 32, 8192, {"page": None}, 2, 1),
        (8, 8, 8192, {"page": None, "n_q": 8}, 4, 1),
    ],
)  # fmt: skip
def test_which_key_heads_are_abreast(heads_kv, batch, room, fixed, abreast, on_an_h100):
    """Those of several requests where memory is fast and binds, or where TMA copies rows that end within a cache line."""
    problem = with_room(problem_of(**{"n_q": 1, **fixed}), batch, heads_kv, room)
    assert [choose(problem, KNOWN[gpu]).heads_abreast for gpu in ("H200", "H100")] == [abreast, on_an_h100]


@pytest.mark.parametrize(
    ("room", "fixed", "tiles"),
    [
        (2048, {"n_q": 20}, 2), (2047, {"n_q": 20}, 1), (2048, {"n_q": 16}, 1), (2048, {"n_q": 40}, 3),
        (2048, {"n_q": 20, "deterministic": True}, 1), (2048, {"n_q": 20, "head_dim": 160}, 2),
        (2048, {"n_q": 20, "page": 1}, 1),
    ],
)  # fmt: skip
def test_which_tiles_are_abreast(room, fixed, tiles):
    """Those of 128 rows whose keys would have left the L2 cache before they are read again."""
    problem = with_room(problem_of(**fixed), 32, 8, room)
    assert choose(problem, KNOWN["H200"]).abreast == tiles
    assert choose(replace(problem, kv_dtype=torch.float8_e4m3fn), KNOWN["H200"]).abreast == 1


@pytest.mark.parametrize(
    ("head_dim", "n_q", "kind"),
    [(96, 1, "mma"), (96, 2, "TMA, 64 rows"), (104, 2, "one group"), (112, 8, "one group"), (80, 9, "TMA, 128 rows"),
     (128, 1, "TMA, 64 rows"), (224, 2, "one group"), (160, 2, "one group"), (192, 8, "one group"), (160, 9, "TMA, 128 rows"),
     (224, 9, "TMA, 128 rows")],
)  # fmt: skip
def test_rows_that_end_within_a_cache_line(head_dim, n_q, kind):
    """Of up to 64 rows cp.async copies those of very many keys, too, but not of 65 to 96 columns of key heads abreast."""
    for gpu in ("H200", "H100") if n_q > 1 else ("H200",):
        assert kind_of(choose(with_room(problem_of(n_q=n_q, head_dim=head_dim), 32, 8, 1 << 15), KNOWN[gpu])) == kind


@pytest.mark.parametrize(
    ("batch", "heads_kv", "kind"), [(1, 8, "one group"), (32, 7, "one group"), (32, 1, "one group"), (2, 2, "TMA, 64 rows")]
)
def test_cut_lines_of_heads_without_neighbours_are_not_for_tma(batch, heads_kv, kind):
    """Nor are those of one request, whose key heads are not walked along together."""
    assert kind_of(choose(with_room(problem_of(n_q=8, head_dim=96), batch, heads_kv, 1 << 18), KNOWN["H200"])) == kind


@pytest.mark.parametrize(("batch", "heads_kv"), [(2, 4), (16, 8), (17, 8)])
@pytest.mark.parametrize("room", [64, 1025, 1 << 14, 1 << 18])
def test_few_rows_are_one_groups_only_with_very_many_keys(batch, heads_kv, room):
    for page in (64, None):
        longer = with_room(problem_of(n_q=1, page=page), batch, heads_kv, room)
        held = page is not None and batch * heads_kv * room > 1 << 20
        assert kind_of(choose(longer, KNOWN["H200"])) == ("TMA, 64 rows" if held else "mma")
        assert kind_of(choose(longer, KNOWN["H100"])) == "mma"


@pytest.mark.parametrize(
    ("batch", "heads_kv", "room", "paged", "contiguous"),
    [  # CTAs that have a key head, and whether they are a cluster, or their warps
        (1, 8, 1024, (8, True), (8, True)), (1, 8, 4096, (16, True), (16, True)), (1, 4, 1024, (16, True), (16, True)),
        (2, 2, 1024, (16, True), (16, True)), (2, 2, 4096, (16, True), (16, True)), (2, 2, 4097, (32, 8), (32, 4)),
        (15, 1, 1024, (8, True), (8, True)), (15, 1, 1025, (8, 8), (8, 4)), (2, 4, 2048, (16, 8), (16, 4)),
        (16, 1, 1024, (8, 8), (8, 4)), (16, 1, 8192, (8, 8), (8, 4)), (16, 1, 8193, (0, 4), (0, 4)),
        (33, 2, 2048, (2, 8), (2, 4)), (67, 1, 1024, (1, 8), (1, 8)), (33, 4, 1024, (1, 8), (1, 8)),
        (33, 4, 1025, (0, 4), (0, 4)), (133, 1, 1024, (0, 4), (0, 4)), (197, 1, 1024, (0, 4), (0, 4)),
        (198, 1, 1024, (1, 4), (1, 4)), (4096, 8, 1024, (1, 4), (1, 4)), (65536, 1, 64, (0, 4), (0, 4)),
    ],
)  # fmt: skip
def test_how_many_ctas_have_a_key_head(batch, heads_kv, room, paged, contiguous):
    for page, wanted in ((64, paged), (None, contiguous)):
        for gpu in ("H200", "H100"):
            config = choose(with_room(problem_of(n_q=1, page=page), batch, heads_kv, room), KNOWN[gpu])
            assert (config.shares, config.clustered or config.warps) == wanted
    if batch > 1:
        assert not choose(with_room(problem_of(n_q=1, head_dim=32), batch, heads_kv, room), KNOWN["H200"]).shares


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize(
    ("batch", "heads_kv", "most", "shares"),
    [(2, 2, 16384, 32), (16, 1, 4096, 8), (33, 2, 1024, 2), (67, 1, 1024, 1), (133, 1, 0, 0), (198, 1, 1024, 1)],
)
def test_how_many_ctas_share_more_rows(batch, heads_kv, most, shares, page):
    """By room, of which there may be twice as much in 8 bits, if a key head is shared."""
    for n_q, kv_bytes in ((2, 2), (4, 2), (4, 1)):
        dtype = torch.float8_e4m3fn if kv_bytes == 1 else torch.bfloat16
        problem = replace(problem_of(n_q=n_q, page=page), kv_dtype=dtype)
        room = most * (2 if kv_bytes == 1 and shares > 1 else 1)
        for keys, wanted in ((room, shares), (room + 1, 0)):
            config = choose(with_room(problem, batch, heads_kv, max(keys, 1)), KNOWN["H200"])
            assert (config.shares, config.clustered) == (wanted, False)
    assert not choose(with_room(problem_of(n_q=5, page=page), batch, heads_kv, 64), KNOWN["H200"]).shares


@pytest.mark.parametrize("order", ORDERS)
def test_two_groups_launch_after_launch(order):
    call = draw(2, torch.bfloat16, ragged=False, lengths=[700, 33, 0], batch=3, page=16, room=720, n_q=16, group=7, heads_kv=1,
                head_dim=128, head_dim_v=128)  # fmt: skip
    run(call, ctas=4, order=order, launches=2, choose=of_wgmma, groups=2)


@pytest.mark.parametrize("gpu", ["H200", "H100"])
@pytest.mark.parametrize(
    ("batch", "keys", "fixed", "groups"),
    [
        (2, 1 << 17, {}, 1), (2, (1 << 17) + 1, {}, 2), (16, 2048, {}, 1), (17, 2048, {}, 2),
        (2, (1 << 17) - 1, {"deterministic": True, "mask": FAR}, 1), (2, 1 << 17, {"deterministic": True, "mask": FAR}, 2),
        (17, 2048, {"head_dim": 64}, 2), (4, 2048, {"head_dim": 64}, 1),
    ],
)  # fmt: skip
def test_who_has_two_roles(batch, keys, fixed, groups, gpu):
    """Many keys, and jobs that are not cut, if Q is held; of four key heads."""
    assert choose(with_room(problem_of(n_q=16, **fixed), batch, 4, keys), KNOWN[gpu]).groups == groups


@pytest.mark.parametrize(
    ("batch", "heads_kv", "room", "late", "early"),
    [
        (8, 8, 2048, "64 rows", "one role"), (1, 8, 8192, "one role", "64 rows"), (16, 8, 2048, "two roles", "one role"),
        (8, 8, 4096, "one role", "one role"), (8, 4, 8192, "one role", "one role"), (9, 8, 4096, "two roles", "one role"),
        (8, 8, 1024, "64 rows", "64 rows"), (2, 8, 8192, "one role", "one role"),
    ],
)  # fmt: skip
def test_how_many_rows_of_fixed_bits_are_taken(batch, heads_kv, room, late, early):
    """By one group of 64 rows, or eight warps of 128; with references that move late, on an H200, and early, on an H100."""
    problem = with_room(problem_of(n_q=16, deterministic=True), batch, heads_kv, room)
    for gpu, wanted in (("H200", late), ("H100", early)):
        config = choose(problem, KNOWN[gpu])
        assert wanted == ("64 rows" if config.rows == 64 else "one role" if config.groups == 1 else "two roles")
        assert config.late == config.optimistic == config.holds_q == (gpu == "H200" and room > 1024)


@pytest.mark.parametrize(("page", "keys", "kind"), [(16, 20, "TMA, 64 rows"), (16, 19, "one group"), (64, 20, "one group")])
def test_who_copies_many_keys_of_fixed_bits(page, keys, kind):
    """Small pages TMA, from 2^23 keys of eight key heads on."""
    problem = with_room(problem_of(n_q=4, deterministic=True, page=page), 1 << (keys - 14), 8, 1 << 14)
    assert kind_of(choose(problem, KNOWN["H200"])) == kind and kind_of(choose(problem, KNOWN["H100"])) == "one group"


@pytest.mark.parametrize(
    ("capacity", "fixed", "optimistic"),
    [
        (4096, {}, True), (4095, {}, False), (4096, {"mask": strobe.Window(40, 0)}, False), (4096, {"alibi": True}, False),
        (1024, {"deterministic": True}, False), (1025, {"deterministic": True}, True), (4096, {"head_dim": 64}, True),
        (2048, {"deterministic": True, "n_q": 1}, True), (2048, {"deterministic": True, "alibi": True}, False),
    ],
)  # fmt: skip
def test_who_is_optimistic(capacity, fixed, optimistic):
    problem = problem_of(**{"n_q": 16, "alibi": False, "mask": strobe.Causal(), "batch": 8, **fixed})
    longer = replace(problem, lengths=replace(problem.lengths, seqlen_kv=capacity))
    assert choose(longer, KNOWN["H200"]).optimistic == optimistic


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "groups", "page"), [(torch.bfloat16, 2, 64), (torch.float16, 1, 16), (torch.float16, 2, None)]
)
def test_pieces_are_taken_again_where_scores_leave_the_range(dtype, groups, page, order):
    """Of whole jobs and of parts, launch after launch; with two groups only one of them has such scores."""
    for ctas in (2, 5):
        run(far_scores(dtype, page), ctas=ctas, order=order, launches=2, choose=of_wgmma, groups=groups, **OPTIMISTIC)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "page"), [(torch.bfloat16, 64), (torch.float16, None)])
def test_bits_where_scores_of_splits_leave_the_range(dtype, page, order):
    """Whether the optimistic softmax was tried or not, of all queries or of a few, whoever copies keys."""
    call = far_scores(dtype, page, deterministic=True)
    usual = run(call, ctas=1, choose=of_one_group, stages=4, **FAR_CUT)
    last = run(call._replace(q=call.q[:, -3:]), ctas=2, order=order, choose=of_one_group, stages=4, **FAR_CUT)
    assert torch.equal(last[0], usual[0][:, -3:]) and torch.equal(last[1], usual[1][..., -3:])
    by_tma, by_cp_async = {"choose": of_wgmma, "groups": 2, "stages": 2}, {"choose": of_one_group, "stages": 3}
    for ctas, kind in itertools.product((1, 2, 5), (by_tma, by_cp_async)):
        found = run(call, ctas=ctas, order=order, launches=2, **kind, **OPTIMISTIC, **FAR_CUT)
        assert all(torch.equal(x, y) for x, y in zip(usual, found, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_many_rows_with_the_optimistic_softmax(seed):
    """Random requests of which a page may be missing."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128][seed % 5]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=16, group=8, heads_kv=1, head_dim=128, head_dim_v=128,
                alibi=False, mask=[strobe.Causal(), strobe.Full(), None][seed // 2 % 3])  # fmt: skip
    run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, choose=of_wgmma, groups=1 + seed % 2, **OPTIMISTIC)


@pytest.mark.parametrize("seed", range(8))
def test_the_copier_asks_for_q(seed):
    """Of random requests of which a page may be missing, with and without hope; with a negative scale, launch after launch."""
    dtype, page, group = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128][seed % 5], [8, 7, 16, 1][seed % 4]
    padded = 1 << (group - 1).bit_length()
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=128 // padded - seed % 3, group=group, ragged=seed % 4 < 2,
                tree=False, heads_kv=1 + seed % 2, head_dim=128, head_dim_v=128)  # fmt: skip
    for optimistic in (False, True):
        run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, choose=of_wgmma, optimistic=optimistic,
            **{**ASKED_Q, "absent": padded - group})  # fmt: skip
    run(queries_below_zero(), ctas=1 + seed % 4, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_wgmma, **ASKED_Q)


@pytest.mark.parametrize(
    ("heads_kv", "fixed", "gpu", "stages"),
    [(8, {}, "H200", 2), (4, {}, "H200", 3), (8, {}, "H100", 3), (8, {"page": None}, "H200", 3)],
)
def test_who_has_a_ring_of_two_steps(heads_kv, fixed, gpu, stages):
    problem = problem_of(**{"n_q": 2, "page": 16, **fixed})
    config = choose(with_room(problem, 1, heads_kv, 1 << 17), KNOWN[gpu])
    assert (config.shares > 0, config.tokens, config.stages) == (True, 128, stages)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_last_to_come_adds_a_few_parts_to_its_own(groups, order):
    """Of jobs that are cut where a CTA goes on with another one, launch after launch."""
    for ctas in (2, 5, 7):
        run(
            of_unequal_lengths(),
            ctas=ctas,
            order=order,
            launches=2,
            choose=of_wgmma,
            **{**ASKED_Q, "joins": True, "groups": groups},
        )


@pytest.mark.parametrize(
    ("heads_kv", "fixed", "joins"), [(8, {}, True), (7, {}, False), (8, {"deterministic": True}, False), (8, {"n_q": 8}, False)]
)
def test_who_adds_a_few_parts_to_its_own(heads_kv, fixed, joins):
    """A tile that holds Q, of a request with 8 key heads or more."""
    config = of_wgmma(with_room(problem_of(**{"n_q": 16, **fixed}), 8, heads_kv, 2048), KNOWN["H200"])
    assert config.joins == joins


@pytest.mark.parametrize(
    ("group", "n_q", "ragged", "absent"),
    [
        (8, 16, False, 0),
        (7, 16, False, 1),
        (5, 16, False, 3),
        (7, 18, False, None),
        (1, 128, False, 0),
        (96, 1, False, None),
        (7, 16, True, 1),
    ],
)
def test_how_many_rows_of_a_query_are_absent(group, n_q, ragged, absent):
    """None where TMA does not copy Q: padded, there would be more tiles, or half a tile had no whole queries."""
    problem = problem_of(n_q=n_q, group=group, head_dim=128, head_dim_v=128, ragged=ragged)
    chosen = of_wgmma(problem, KNOWN["H200"])
    assert (chosen.absent if chosen.asks_q else None) == absent


@pytest.mark.parametrize("fixed", [{}, {"groups": 1, "holds_q": False, "asks_q": False, "absent": 0}], ids=["two roles", "one"])
@pytest.mark.parametrize("order", ORDERS)
def test_few_jobs_of_many_parts(order, fixed):
    """Of which CTAs merge some columns of some rows each."""
    run(one_job(), ctas=20, order=order, launches=2, choose=of_wgmma, **{**FEW_JOBS, **fixed})


@pytest.mark.parametrize(("groups", "page"), [(1, 64), (2, 16), (2, None)])
def test_results_by_way_of_q(groups, page):
    """Of whole jobs and of parts, in one chunk of columns and in two."""
    call = draw(4, torch.float16, ragged=False, batch=4, lengths=[190, 64, 0, 130], room=192, n_q=13, group=7, heads_kv=1,
                page=page, head_dim=128, head_dim_v=128)  # fmt: skip
    for ctas in (3, 8):
        run(call, ctas=ctas, launches=2, choose=of_wgmma, groups=groups, **BY_WAY_OF_Q)


@pytest.mark.parametrize("seed", range(8))
def test_keys_in_groups(seed):
    """Of random requests of which a page may be missing: 128 rows of one role and of two, 64 rows, fixed bits."""
    dtype, page, fixed = (torch.float16, torch.bfloat16)[seed % 2], (16, 48, 32)[seed % 3], seed % 4 == 3
    rows = 64 if seed % 4 == 1 else 128
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=rows // 8, group=8, heads_kv=2, head_dim=128, head_dim_v=128,
                deterministic=fixed, room=(257, 700)[seed // 2 % 2], tree=False, alibi=False, mask=strobe.Causal())  # fmt: skip
    config = {"grouped": True, "chunk": 128, "stages": 2, "holds_q": True, "by_way_of_q": False, "late": fixed}
    config |= {"optimistic": fixed, "groups": 1 + (rows == 128 and seed > 3)}
    run(call, ctas=1 + seed % 5, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_wgmma, **config)


@pytest.mark.parametrize("seed", range(6))
def test_keys_in_groups_of_fixed_bits(seed):
    """Of up to 64 rows: the bits that one group finds whose keys cp.async copies."""
    dtype, page, n_q = (torch.float16, torch.bfloat16)[seed % 2], (16, 32)[seed % 2], (1, 4, 8)[seed % 3]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=n_q, group=8, heads_kv=2, head_dim=128, head_dim_v=128,
                deterministic=True, room=(257, 700)[seed // 2 % 2], tree=False, alibi=False, mask=strobe.Causal())  # fmt: skip
    cut = {"split": 64, "chain": (256, 512)[seed // 2 % 2], "late": True}
    held = {"grouped": True, "chunk": 128, "by_way_of_q": False, "stages": 2 + seed % 3, "under_way": 2 * (seed % 2)}
    usual = run(call, ctas=1, choose=of_one_group, stages=4, **cut)
    found = run(call, ctas=2 + seed, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_wgmma, **OPTIMISTIC, **held,
                **cut)  # fmt: skip
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(usual, found, strict=True))


@pytest.mark.parametrize(
    ("page", "fixed", "grouped"),
    [
        (16, {}, True),
        (48, {}, True),
        (64, {}, False),
        (None, {}, False),
        (16, {"head_dim": 80}, False),
        (32, {"n_q": 8}, True),
        (16, {"deterministic": True}, False),
    ],
)
def test_whose_keys_lie_in_groups(page, fixed, grouped):
    """Where a step has several pages, each a whole number of groups from the next, and Q is held."""
    problem = problem_of(**{"n_q": 16, "page": page, **fixed})
    assert of_wgmma(problem, KNOWN["H200"]).grouped == grouped
    assert not of_wgmma(replace(problem, page_rows=(page, 20)), KNOWN["H200"]).grouped


@pytest.mark.parametrize("seed", range(8))
def test_one_group_that_holds_q(seed):
    """Up to 64 rows by TMA, with the optimistic softmax and without."""
    dtype, page, group = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128][seed % 5], [8, 7, 4][seed % 3]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=64 // group - seed % 2, group=group, heads_kv=2, head_dim=128,
                head_dim_v=128, room=(257, 700)[seed // 2 % 2], alibi=False,
                mask=[strobe.Causal(), strobe.Full(), None][seed // 2 % 3])  # fmt: skip
    config = of_wgmma(described(call)[0], KNOWN["H200"])
    assert (config.rows, config.groups, config.ctas, config.holds_q) == (64, 1, 1, True)
    for optimistic in (False, True):
        run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, choose=of_wgmma, optimistic=optimistic)


@pytest.mark.parametrize("seed", range(8))
def test_held_queries_of_few_rows(seed):
    """Up to 32 rows of random requests of which a page may be missing, whole jobs by turns and not."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 16, 48, 64, 128][seed % 5]
    n_q, group = [(1, 8), (4, 8), (3, 7), (4, 1), (2, 16)][seed % 5]
    call = draw(seed, dtype, honest=seed % 3 > 0, page=page, n_q=n_q, group=group, heads_kv=2, batch=(3, 7)[seed % 2],
                head_dim=128, head_dim_v=128, room=(257, 700)[seed // 2 % 2], alibi=False, ragged=seed % 4 == 1,
                mask=[strobe.Causal(), strobe.Full(), None][seed // 2 % 3])  # fmt: skip
    for by_turns in (False, True):
        run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_held_queries, by_turns=by_turns,
            start=seed % 3, optimistic=True)  # fmt: skip


@pytest.mark.parametrize(
    ("fixed", "held"),
    [
        ({}, True), ({"n_q": 4}, True), ({"n_q": 5}, False), ({"page": None}, False), ({"n_q": 2, "page": None}, True),
        ({"page": 8}, False), ({"alibi": True}, False), ({"mask": strobe.Window(9, 0)}, False), ({"head_dim": 64}, False),
        ({"batch": 32}, False), ({"deterministic": True}, False), ({"group": 1, "n_q": 16}, True),
    ],
)  # fmt: skip
def test_whose_queries_of_few_rows_are_held(fixed, held):
    """Those of more than 2^20 keys of eight key heads, on an H200."""
    problem = problem_of(**{"n_q": 1, "alibi": False, "heads_kv": 8, "batch": 33, **fixed})
    longer = replace(problem, lengths=replace(problem.lengths, seqlen_kv=4096))
    assert takes_held_queries(longer, KNOWN["H200"]) == held and not takes_held_queries(longer, KNOWN["H100"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("stages", "under_way"), [(3, 1), (3, 2), (2, 2)])
def test_a_ring_of_which_few_steps_are_under_way(stages, under_way, order):
    call = draw(3, torch.bfloat16, ragged=False, lengths=[700, 33, 0, 64], batch=4, page=16, room=720, n_q=16, group=7,
                heads_kv=1, head_dim=128, head_dim_v=128)  # fmt: skip
    run(call, ctas=4, order=order, choose=of_wgmma, groups=2, stages=stages, under_way=under_way, **OPTIMISTIC)


@pytest.mark.parametrize(
    ("capacity", "page", "fixed", "under_way"),
    [
        (2048, 16, {}, 2),
        (1024, 64, {}, 2),
        (2047, None, {}, 2),
        (2048, None, {}, 2),
        (2048, None, {"batch": 20}, 2),
        (1024, 64, {"deterministic": True}, 0),
        (2048, 64, {"n_q": 8}, 2),
    ],
)
def test_how_many_steps_are_under_way(capacity, page, fixed, under_way):
    problem = problem_of(**{"n_q": 16, **fixed})
    longer = replace(problem, lengths=replace(problem.lengths, seqlen_kv=capacity), page_size=page)
    assert [of_wgmma(longer, KNOWN[arch]).under_way for arch in ("H200", "H100")] == [under_way] * 2


@pytest.mark.parametrize(
    ("fixed", "keys", "archs"),
    [
        ({"n_q": 1}, 1 << 17, ["H200", "H100"]), ({"n_q": 1}, (1 << 17) - 1, []),
        ({"n_q": 4}, 1 << 18, ["H200", "H100"]),
        ({"n_q": 4}, 1 << 17, ["H100"]), ({"n_q": 16}, 1 << 17, ["H100"]), ({"n_q": 1, "heads_kv": 1}, 1 << 20, []),
        ({"n_q": 4, "deterministic": True}, 1 << 18, []),
    ],
)  # fmt: skip
def test_where_whole_jobs_are_taken_by_turns(fixed, keys, archs):
    problem = problem_of(**fixed)
    longer = replace(problem, lengths=replace(problem.lengths, seqlen_kv=keys))  # of 2 requests and 4 key heads
    assert [arch for arch in ("H200", "H100") if choose(longer, KNOWN[arch]).by_turns] == archs


@pytest.mark.parametrize(
    ("capacity", "page", "fixed", "stages", "by_way_of_q"),
    [
        (1024, 64, {}, 4, False), (2048, 64, {}, 4, False), (2048, None, {}, 4, False), (2047, None, {}, 4, False),
        (2048, 64, {"deterministic": True}, 4, False), (1024, 64, {"deterministic": True}, 6, True),
        (2048, 64, {"head_dim": 64, "head_dim_v": 64}, 8, False),
    ],
)  # fmt: skip
def test_many_rows_by_the_room_of_a_request(capacity, page, fixed, stages, by_way_of_q):
    problem = problem_of(n_q=16, group=8, head_dim=128, head_dim_v=128)
    longer = replace(problem, lengths=replace(problem.lengths, seqlen_kv=capacity), page_size=page, **fixed)
    chosen = of_wgmma(longer, KNOWN["H200"])
    assert (chosen.stages, chosen.by_way_of_q) == (stages, by_way_of_q)


@pytest.mark.parametrize(
    ("fixed", "batch", "room", "start"),
    [
        ({"n_q": 1}, 40, 4096, 2),  # mma.sync, two CTAs
        ({"n_q": 4, "alibi": True}, 4000, 4096, 4),  # of more rows
        ({"n_q": 4}, 4000, 4096, 6),  # TMA, which copies Q, too
        ({"n_q": 4}, 40, 4096, 4),  # one group, cp.async
        ({"n_q": 4, "head_dim": 64}, 2, 128, 8),
        ({"n_q": 40}, 40, 128, 6),  # TMA, which copies Q, too
        ({"n_q": 40, "head_dim": 64}, 40, 128, 24),
        ({"n_q": 4, "deterministic": True}, 2, 128, 0),
    ],
)
def test_how_many_units_a_piece_costs_beside_its_keys(fixed, batch, room, start):
    assert choose(with_room(problem_of(**fixed), batch, 4, room), KNOWN["H200"]).start == start


def problem_of(**fixed):
    shape = {"page": 64, "group": 8, "heads_kv": 4, "head_dim": 128, "head_dim_v": fixed.get("head_dim", 128), "batch": 2,
             "ragged": False, "tree": False, "room": 70, "mask": strobe.Causal()}  # fmt: skip
    return described(draw(1, torch.bfloat16, **{**shape, **fixed}))[0]


def kind_of(config) -> str:
    if not config.by_wgmma:
        return "mma"
    return f"TMA, {config.rows} rows" if config.box else "one group"


OPTIMISTIC = {"holds_q": True, "optimistic": True}
FAR_CUT = {"split": 128, "chain": 256, "late": True}
BY_WAY_OF_Q = {"by_way_of_q": True, "holds_q": False, "asks_q": False, "absent": 0}
ASKED_Q = {"groups": 2, "holds_q": True, "asks_q": True, "absent": 1, "by_way_of_q": False}
FEW_JOBS = {**ASKED_Q, "few_jobs": True}


def one_job() -> Drawn:
    """Cut in eleven parts by 20 CTAs."""
    return draw(3, torch.bfloat16, ragged=False, lengths=[1300], batch=1, page=16, room=1344, n_q=16, group=7, heads_kv=1,
                head_dim=128, head_dim_v=128, mask=strobe.Causal())  # fmt: skip


def of_unequal_lengths(heads_kv: int = 1) -> Drawn:
    """Seven CTAs cut jobs in up to four parts, and go on with others."""
    return draw(3, torch.bfloat16, ragged=False, lengths=[130, 1000, 300], batch=3, page=64, room=1024, n_q=16, group=7,
                heads_kv=heads_kv, head_dim=128, head_dim_v=128, mask=strobe.Causal(), tree=False, leftpad=False)  # fmt: skip


def queries_below_zero() -> Drawn:
    """A call of several short pieces for each CTA, whose scale is negative."""
    call = draw(5, torch.float16, ragged=False, batch=5, lengths=[60, 130, 1, 0, 190], room=192, n_q=13, group=7, heads_kv=2,
                page=16, head_dim=128, head_dim_v=128, softcap=0.0, alibi=False)  # fmt: skip
    return call._replace(keywords={**call.keywords, "scale": -0.1})


def far_scores(dtype: torch.dtype, page: int | None, lengths=(390, 130, 260), heads_kv: int = 1, **keywords) -> Drawn:
    """A call of 128 rows, of which the last 64 have scores far above those of a piece's first step."""
    call = draw(3, dtype, ragged=False, batch=len(lengths), lengths=list(lengths), room=max(lengths) + 10, n_q=16, group=8,
                heads_kv=heads_kv, page=page, head_dim=128, head_dim_v=128, leftpad=False, mask=strobe.Causal(), tree=False,
                alibi=False)  # fmt: skip
    q = call.q.clone()
    q[:, :8] *= 2.0**-6
    high = torch.rand(*call.cache.k.shape[:2], 1, 1, generator=torch.Generator().manual_seed(1)) < 0.1
    k = torch.where(high, (16 if dtype == torch.float16 else 256) * call.cache.k, call.cache.k)
    return call._replace(q=q, cache=replace(call.cache, k=k), keywords={**call.keywords, **keywords})


def latent(heads: int, n_q: int = 1) -> Drawn:
    """A call of multi-head latent attention: 576 columns of keys, of which the first 512 are the values."""
    g = torch.Generator().manual_seed(heads)
    columns = torch.full((7, 64, 1, 576), torch.nan)
    for page, rows in ((5, 64), (0, 64), (3, 2), (1, 33)):
        columns[page, :rows] = torch.randn(rows, 1, 576, generator=g)
    table, lengths = torch.tensor([[5, 0, 3], [1, -1, 9]], dtype=torch.int32), torch.tensor([130, 33], dtype=torch.int32)
    cache = strobe.Cache(columns.half(), None, lengths, table, head_dim_v=512)
    return Drawn(torch.randn(2, n_q, heads, 576, generator=g).half(), cache, {})


def long_latent(heads: int, honest: bool = True, scale: float = 0.1) -> Drawn:
    """The same with more steps, and a request without keys. honest: no page is missing."""
    call = drawn_latent(1, torch.float16, honest=honest, page=64, group=heads, heads_kv=1, batch=3, lengths=[430, 0, 250],
                        room=450, n_q=1, ragged=False, tree=False, leftpad=False, mask=None, softcap=0.0, alibi=False,
                        sinks=False)  # fmt: skip
    return call._replace(keywords={**call.keywords, "scale": scale})


def drawn_latent(seed: int, dtype: torch.dtype, **fixed) -> Drawn:
    """A random call of which the values are columns of keys."""
    call = draw(seed, dtype, head_dim=576, head_dim_v=512, **fixed)
    return call._replace(cache=strobe.Cache(**{**vars(call.cache), "v": None, "head_dim_v": 512}))


def simulate_turns(seed: int) -> None:
    """Random requests of more than 64 rows, for two groups that take turns; of every third a page is not there."""
    dtype, page = (torch.float16, torch.bfloat16)[seed % 2], [None, 64, 128][seed % 3]
    fixed = {"group": (66, 72, 80, 128)[seed % 4], "heads_kv": 1 + seed % 2, "room": (130, 257, 400)[seed // 3 % 3]}
    call = drawn_latent(seed, dtype, honest=seed // 4 % 3 > 0, page=page, **fixed)
    run(call, ctas=1 + seed % 6, order=ORDERS[seed // 2 % 4], seed=seed, choose=of_wgmma, start=seed % 3)


@pytest.mark.parametrize("seed", range(12))
def test_two_groups_that_take_turns(seed):
    simulate_turns(seed)


def test_tiles_abreast_in_many_parts():
    """Two CTAs walk along each part; 7 steps in four parts and more, so that some lie far from the first one."""
    run(long_latent(128), ctas=14, choose=of_wgmma)


@pytest.mark.parametrize(("heads", "n_q", "order"), [(16, 1, "late"), (48, 2, "random"), (128, 1, "early"), (3, 1, "in_order")])
def test_values_that_are_columns_of_keys_by_wgmma(heads, n_q, order):
    run(latent(heads, n_q), ctas=3, choose=of_wgmma, order=order)


@pytest.mark.exhaustive
def test_many_more():
    for seed in range(100, 400):
        simulate(seed)
    for seed in range(100, 200):
        simulate_wgmma(seed)
        simulate_one_group(seed)
        simulate_splits(seed)
        simulate_turns(seed)


@pytest.mark.parametrize("order", ORDERS)
def test_parts_are_merged_launch_after_launch(order):
    call = draw(1, torch.float16, ragged=False, lengths=[250, 1, 0, 130], batch=4, page=16, room=257, n_q=2)
    run(call, ctas=7, order=order, launches=2)


@pytest.mark.parametrize("lengths", [[-5, 10**9], [2**31 - 1, -(2**31)]])
def test_lengths_that_lie_stay_within_the_cache(lengths):
    """A length counts as one from 0 to what there is room for."""
    for page in (None, 16):
        call = draw(2, torch.float16, honest=True, ragged=False, lengths=[64, 64], batch=2, page=page, room=64, leftpad=False)
        honest = call._replace(cache=strobe.Cache(**{**vars(call.cache), "lengths": torch.tensor(lengths, dtype=torch.int32)}))
        run(honest, ctas=3)


def test_more_requests_than_are_looked_at_together():
    call = draw(3, torch.float16, ragged=False, batch=131, lengths=[(7 * b) % 20 for b in range(131)], room=32, page=16, n_q=1,
                heads_kv=1, group=2, head_dim=64, head_dim_v=64, tree=False)  # fmt: skip
    run(call, ctas=5)


@pytest.mark.parametrize(("tokens", "stages", "warps"), [(64, 2, 4), (128, 2, 8), (128, 3, 4)])
def test_other_configs(tokens, stages, warps):
    call = draw(4, torch.bfloat16, head_dim=64, head_dim_v=64, ragged=False)
    run(call, ctas=4, tokens=tokens, stages=stages, warps=warps)


@pytest.mark.parametrize("choose", [of_mma, of_wgmma])
def test_a_tree_over_a_latent(choose):
    """As a rank of vLLM's decode context parallelism has it, whose keys are some of a sequence's."""
    call = latent(16, 3)
    tree = torch.rand(len(call.cache.lengths), 3, 3, generator=torch.Generator().manual_seed(1)) < 0.5
    run(call._replace(keywords={"mask": strobe.Full(), "tree": tree}), ctas=3, choose=choose)
