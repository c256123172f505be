"""The decode kernels of heads of 129 to 256 columns, and of 33 to 64, in the simulator, and who runs where."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from decode_launch import run
from requests_at_random import Drawn, described, draw
from test_decode_kernel import ASKED_Q, ORDERS, kind_of, problem_of, with_8_bits, with_room

import strobe
from strobe.device import KNOWN
from strobe.kernels.decode import wide_heads
from strobe.kernels.decode.choice import choose, of_converted, of_long_steps, of_mma, of_one_group, of_wgmma
from strobe.kernels.decode.shares import of_shares, takes_shares
from strobe.kernels.decode.sizes import OVERHEAD, absent_of

PAGES = (None, 16, 48, 64, 128)


def drawn(seed: int, rows: int, dim: int, **fixed) -> Drawn:
    """Random requests whose key heads have up to `rows` rows; of every third a page may be missing."""
    group = (8, 7, 4)[seed % 3]
    keywords = {"page": PAGES[seed % 5], "n_q": max(1, rows // 8 - seed % 2), "group": group, "heads_kv": 1 + seed % 2}
    return draw(seed, (torch.float16, torch.bfloat16)[seed % 2], honest=seed % 3 > 0, head_dim=dim, head_dim_v=dim,
                **{**keywords, **fixed})  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_wide_heads_of_one_group(seed):
    """Up to 64 rows, and two tiles of them; pages of one key, too."""
    call = drawn(seed, (64, 128)[seed // 4], (256, 192)[seed % 2], **({"page": 1} if seed == 3 else {}))
    run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_one_group)


@pytest.mark.parametrize("seed", range(8))
def test_wide_heads_of_two_groups(seed):
    """Whose Q stays in shared memory until both have read it: several short pieces for each CTA, launch after launch; in steps
    of 32 keys, and of 64."""
    call = drawn(seed, (128, 320)[seed // 4], (256, 192, 136)[seed % 3], tree=False)
    for tokens in (32, 64):
        run(
            call,
            ctas=1 + seed % 2,
            order=ORDERS[seed % 4],
            seed=seed,
            launches=2,
            choose=wide_heads.of_wgmma,
            **two_groups(call, tokens),
        )


def two_groups(call: Drawn, tokens: int) -> dict:
    """What two groups change of the config of one."""
    page = call.cache.k.shape[1] if call.cache.page_table is not None else tokens
    box = math.gcd(tokens, page)
    absent = absent_of(described(call)[0], 128)
    panels = call.q.shape[-1] <= 192 or box < tokens
    return {"rows": 128, "warps": 8, "groups": 2, "holds_q": False, "tokens": tokens, "box": box, "stages": 2,
            "optimistic": False, "asks_q": absent is not None, "absent": absent or 0,
            "chunk": 64 if panels else 128}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_wide_heads_of_one_group_that_holds_q(seed):
    call = drawn(seed, (64, 128)[seed // 4], (256, 192, 136)[seed % 3], tree=False)
    wide = call.q.shape[-1] > 192
    config = (wide_heads.of_wgmma if wide else wide_heads.of_panels)(described(call)[0], KNOWN["H200"])
    assert (config.rows, config.tokens, config.holds_q, config.box > 0) == (64, 32 if wide else 64, True, wide)
    run(call, ctas=200, order=ORDERS[seed % 4], seed=seed, launches=2, choose=lambda problem, _: config)
    run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, choose=lambda problem, _: config)


@pytest.mark.parametrize("seed", range(6))
def test_three_panels(seed):
    """Of up to 192 columns, by TMA and by cp.async, optimistic and not: many parts of a job, which all CTAs merge, few, which
    one does, and none."""
    rows, dim = (64, 128)[seed % 2], (192, 136, 160)[seed // 2]
    call = drawn(seed, rows, dim, group=8, n_q=rows // 8, tree=False, alibi=False, mask=strobe.Causal(), page=PAGES[seed % 5])
    for make in (wide_heads.of_wgmma, wide_heads.of_panels):
        config = make(described(call)[0], KNOWN["H200"])
        assert (config.head_dim, config.chunk, config.result_columns) == (192, 64, 256)
        for optimistic, ctas in itertools.product((False, True), (1 + seed, 40)):
            run(call, ctas=ctas, order=ORDERS[seed % 4], seed=seed, choose=make, optimistic=optimistic)


def wide_queries_below_zero() -> Drawn:
    """A call of several short pieces for each CTA, whose scale is negative."""
    call = draw(5, torch.float16, ragged=False, batch=5, lengths=[60, 130, 1, 0, 190], room=192, n_q=13, group=7, heads_kv=2,
                page=32, head_dim=256, head_dim_v=256, softcap=0.0, alibi=False)  # fmt: skip
    return call._replace(keywords={**call.keywords, "scale": -0.1})


@pytest.mark.parametrize("order", ORDERS)
def test_a_negative_scale_where_q_stays_in_shared_memory(order):
    call = wide_queries_below_zero()
    for asks in ({}, {"asks_q": False, "absent": 0}):
        run(call, ctas=3, order=order, launches=2, choose=wide_heads.of_wgmma, **two_groups(call, 32) | asks)


@pytest.mark.parametrize("seed", range(8))
def test_wide_heads_of_8_bits(seed):
    """Converted to float16 by four warps, which one group multiplies, with the optimistic softmax and without."""
    call = with_8_bits(drawn(seed, (64, 128)[seed // 4], (256, 192)[seed % 2], tree=False), scaled=seed % 3 == 1)
    for optimistic in (False, True):
        run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_converted, optimistic=optimistic)


@pytest.mark.parametrize("seed", range(8))
def test_wide_heads_that_are_shared(seed):
    """Of one request, or of several, whose key heads have CTAs of their own, or one."""
    call = drawn(seed, (8, 32)[seed // 2 % 2], (256, 144)[seed % 2], batch=(1, 3)[seed // 4], ragged=seed % 4 == 2)
    for shares, stages in ((1, 2), (5, 3)):
        run(call, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_shares, shares=shares, stages=stages)


@pytest.mark.parametrize("seed", range(8))
def test_narrow_heads_of_few_rows(seed):
    """Shared as wide ones are, or a contiguous cache in long steps."""
    call = drawn(seed, (8, 32)[seed // 2 % 2], (64, 40)[seed % 2], batch=(1, 3)[seed // 4], ragged=seed % 4 == 2)
    long = {"tokens": 256, "warps": 8, "stages": 2}
    for changes in ({"shares": 1, "stages": 2}, {"shares": 5, "stages": 3}, {"shares": 5, **long}):
        run(call, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_shares, **changes)
    run(drawn(seed, 32, 64, page=None), ctas=3, order=ORDERS[seed % 4], seed=seed, launches=2, choose=of_long_steps)


@pytest.mark.parametrize("seed", range(8))
def test_narrow_heads_that_hold_q(seed):
    """64 rows, two CTAs on a multiprocessor, and 128 of two groups, with the optimistic softmax and without."""
    rows = (64, 128)[seed % 2]
    call = drawn(seed, rows, (64, 40)[seed // 2 % 2], group=8, n_q=rows // 8, tree=False, alibi=False, mask=strobe.Causal())
    held = {**ASKED_Q, "absent": 0, "groups": rows // 64}
    for optimistic in (False, True):
        run(call, ctas=1 + seed % 6, order=ORDERS[seed % 4], seed=seed, choose=of_wgmma, optimistic=optimistic, **held)


@pytest.mark.parametrize(
    ("n_q", "batch", "room", "kind"),
    [
        (1, 32, 8192, "one group"),
        (8, 32, 8192, "one group"),
        (16, 1, 8192, "one group"),
        (16, 8, 8192, "TMA, 64 rows"),
        (16, 32, 8192, "TMA, 128 rows"),
        (1, 1, 8192, "shared"),
        (4, 1, 2048, "shared"),
        (1, 8, 1024, "shared"),
        (4, 8, 1024, "one group"),
    ],
)
def test_who_has_wide_heads(n_q, batch, room, kind):
    """And bits that must not depend on the batch come from one kernel; many rows are converted from 8 bits."""
    problem = with_room(problem_of(n_q=n_q, head_dim=256), batch, 2, room)
    config = choose(problem, KNOWN["H200"])
    assert ("shared" if config.shares else kind_of(config)) == kind
    for other, gpu in ((replace(problem, deterministic=True), "H200"), (problem, "A100")):
        assert kind_of(choose(other, KNOWN[gpu])) == "mma"
    of_8_bits = choose(replace(problem, kv_dtype=torch.float8_e4m3fn), KNOWN["H200"])
    assert bool(of_8_bits.bytes_stages) == (n_q > 2) and not of_8_bits.shares


@pytest.mark.parametrize(
    ("n_q", "batch", "room", "kind"),
    [
        (1, 32, 8192, "one group"),
        (8, 8, 512, "one group"),
        (16, 4, 4096, "one group"),
        (16, 8, 4096, "TMA, 128 rows"),
        (16, 64, 512, "TMA, 128 rows"),
        (1, 1, 16384, "shared"),
        (1, 1, 32768, "one group"),
    ],
)
def test_who_has_three_panels(n_q, batch, room, kind):
    """Of four key heads. Shared heads are 256 columns, and two groups' are too many for Q in registers."""
    for dim in (136, 192):
        config = choose(with_room(problem_of(n_q=n_q, head_dim=dim), batch, 4, room), KNOWN["H200"])
        assert ("shared" if config.shares else kind_of(config)) == kind
        assert config.head_dim == config.head_dim_v == (256 if config.shares else 192)
        assert config.holds_q == (kind == "one group") and config.tokens == 64
        assert config.optimistic == (kind == "one group" and room >= 8192)


@pytest.mark.parametrize(
    ("page", "batch", "n_q", "room", "shares"),
    [
        (16, 1, 1, 16384, True),
        (16, 1, 1, 16385, False),
        (16, 8, 1, 1024, False),
        (64, 8, 1, 1024, True),
        (None, 8, 1, 1024, True),
        (64, 1, 4, 8192, True),
        (64, 8, 4, 1024, False),
    ],
)
def test_whose_wide_heads_are_shared(page, batch, n_q, room, shares):
    """Of four key heads, each with up to 16 rows or, of one request, 32."""
    problem = with_room(problem_of(n_q=n_q, head_dim=256, page=page), batch, 4, room)
    assert takes_shares(problem, KNOWN["H200"]) == shares


@pytest.mark.parametrize(
    ("n_q", "batch", "room", "rows", "ctas", "held"),
    [
        (16, 32, 8192, 128, 1, True),
        (16, 1, 2048, 128, 1, False),
        (8, 32, 8192, 64, 2, True),
        (8, 1, 2048, 64, 1, False),
        (4, 32, 8192, 32, 2, False),
    ],
)
def test_who_has_narrow_heads(n_q, batch, room, rows, ctas, held):
    config = choose(with_room(problem_of(n_q=n_q, head_dim=64), batch, 8, room), KNOWN["H200"])
    assert (config.rows, config.ctas, config.holds_q) == (rows, ctas, held)


@pytest.mark.parametrize(("dim", "dim_v"), [(256, 256), (192, 256), (128, 256), (256, 128), (16, 256), (64, 192)])
@pytest.mark.parametrize("n_q", [1, 4, 16])
def test_heads_that_take_much_of_little_memory(n_q, dim, dim_v):
    """On a GPU whose CTAs have 99 KB of shared memory, where V may be wider than K, and warps meet in its ring."""
    call = draw(6, torch.float16, head_dim=dim, head_dim_v=dim_v, ragged=False, group=4, heads_kv=1, n_q=n_q, page=16)
    run(call, ctas=3, arch=80, choose=lambda problem, _: of_mma(problem, KNOWN["L4"]))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("gpu", [name for name, arch in KNOWN.items() if arch.capability >= 80])
def test_every_head_dim_fits_every_gpu(gpu, kind):
    """What a CTA takes of shared memory, of few rows and of many."""
    dims = (16, 32, 64, 96, 128, 192, 256)
    for dim, dim_v, n_q in itertools.product(dims, dims, (1, 4, 16)):
        problem = replace(problem_of(n_q=n_q, head_dim=dim, head_dim_v=dim_v), kv_dtype=kind)
        for one in (problem, replace(problem, deterministic=True)):
            assert choose(one, KNOWN[gpu]).smem + OVERHEAD <= KNOWN[gpu].smem_per_sm, (dim, dim_v, n_q)
