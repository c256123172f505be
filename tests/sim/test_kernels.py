"""Every Gluon kernel of ours, its source unchanged, in the simulator: right numbers, and no mistake found, in every order."""

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import Case, Results, check, describe, formula, tensors
from tritons import needs_tcgen05

from strobe.kernels.common import arguments
from strobe.kernels.sm90 import forward as sm90_forward
from strobe.kernels.sm90.config import Config as Hopper
from strobe.kernels.sm90.config import padded
from strobe.kernels.sm90.short_config import ShortConfig
from strobe.kernels.sm90.short_config import choose as choose_short
from strobe.kernels.sm100.config import Config as Blackwell
from strobe.reference import optimistic
from strobe.scores import LOG2E
from strobe.sim import simulate
from strobe.sim.attention import forward_launch, simulate_forward

FP16, BF16 = torch.float16, torch.bfloat16
ORDERS = (("in_order", 0), ("random", 1), ("random", 2), ("late", 0), ("early", 0))


def case(n_q, n_kv, heads=(1, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, **more)


def short(value) -> str:
    """The name of a test: what differs from a config's defaults is read in the list."""
    return "" if isinstance(value, Hopper | ShortConfig | Blackwell) else str(value).removeprefix("torch.")


def assert_right(case: Case, dtype, backend: str, config, order: str, seed: int, ctas: int = 1):
    t = tensors(case, dtype)
    out, lse, notes, report = simulate_forward(*describe(t), backend, config, order, seed, ctas)
    check(Results(out, lse, None, None, None), t, ("out", "lse"))
    assert notes is None or not notes.any()
    return report


# ---- Hopper


def hopper(head_dim=64, head_dim_v=None, groups=2, tile_kv=64, num_stages=2, **more) -> Hopper:
    return Hopper(head_dim, head_dim_v or head_dim, groups, tile_kv, num_stages, **more)


def uneven(head_dim=64, **more) -> Hopper:
    """Of three heads that share keys two are in the first tile, and one is in the last."""
    return hopper(head_dim, tile_heads=2, uneven_group=3, **more)


SEVERAL = case(300, 333, heads=(2, 1), head_dim=64)
HOPPER = [
    (case(64, 64, head_dim=64), FP16, hopper()),
    (case(128, 64, head_dim=64), BF16, hopper()),  # a block a tile, all of it seen
    (case(150, 333, heads=(2, 1), head_dim=64), BF16, hopper(tile_kv=128, num_stages=3)),
    (case(150, 333, head_dim=64, mask="causal"), FP16, hopper(groups=3, num_stages=3)),
    (case(200, 90, head_dim=64, mask="causal"), BF16, hopper()),  # the first rows see nothing
    (case(500, 90, heads=(2, 1), head_dim=64, mask="causal"), FP16, hopper()),  # whole tiles see nothing
    (case(1, 77, heads=(4, 2), head_dim=64, mask="causal"), FP16, hopper()),
    (case(77, 1, head_dim=64), BF16, hopper()),
    (case(1, 1, batch=3, heads=(2, 2), head_dim=64, mask="causal"), BF16, hopper()),
    (case(130, 300, batch=2, head_dim=64, mask="window"), FP16, hopper()),  # narrower than a tile
    (case(300, 130, head_dim=64, mask="window"), BF16, hopper(num_stages=3)),
    (case(200, 500, heads=(2, 1), head_dim=64, mask="window"), BF16, hopper(groups=3, num_stages=5)),
    (case(128, 128, head_dim=64, mask="ahead"), FP16, hopper()),  # no block is whole, and none ends after the last key
    (case(300, 320, head_dim=64, mask="ahead"), BF16, hopper()),
    (case(130, 200, heads=(3, 1), head_dim=64, mask="prefix"), FP16, hopper()),
    (case(200, 260, heads=(2, 1), head_dim=128, mask="causal"), BF16, hopper(128, tile_kv=128)),
    (case(140, 140, head_dim=128, mask="prefix"), FP16, hopper(128)),
    # Every head dim that is padded, in its chunks.
    *((case(130, 150, head_dim=d, mask="causal"), FP16, hopper(padded(d))) for d in (8, 40, 72, 80, 96, 104)),
    *((case(130, 150, head_dim=d), BF16, hopper(padded(d), q_stages=1)) for d in (136, 192, 200, 256)),
    *((case(130, 150, head_dim=d, mask=m), BF16, hopper(80, tile_kv=n)) for d, m, n in ((80, "causal", 64), (72, "full", 128))),
    # Few keys: tiles in a fixed order, more of them known.
    (case(300, 77, heads=(2, 1), batch=2, head_dim=64), BF16, hopper(tile_kv=128, slots=4, static=True)),
    (case(300, 90, heads=(2, 1), head_dim=64, mask="causal"), FP16, hopper(slots=4, static=True)),
    # V's own head dim, less and more than that of K.
    (case(150, 200, heads=(2, 1), head_dim=192, head_dim_v=128, mask="causal"), BF16, hopper(192, 128)),
    (case(150, 200, head_dim=64, head_dim_v=256, mask="window"), FP16, hopper(64, 256, q_stages=1)),
    (case(150, 200, head_dim=128, head_dim_v=40), FP16, hopper(128, 64)),
    (case(150, 200, head_dim=64, head_dim_v=88, mask="causal"), BF16, hopper(64, 96)),
    # Packed sequences, some empty.
    (case(150, 200, heads=(2, 1), batch=4, head_dim=64, packed=True), FP16, hopper()),
    (case(300, 200, batch=3, head_dim=64, mask="causal", packed=True), BF16, hopper(groups=3)),
    (case(150, 170, batch=3, head_dim=96, mask="window", packed=True), FP16, hopper(96)),
    (case(150, 170, batch=3, head_dim=192, head_dim_v=128, mask="prefix", packed=True), BF16, hopper(192, 128, q_stages=1)),
    # Each switch of Config.
    (SEVERAL, FP16, hopper(q_stages=1)),
    (replace(SEVERAL, mask="causal"), BF16, hopper(q_stages=1, groups=3)),
    (replace(SEVERAL, head_dim=128), FP16, hopper(128, o_buffers=2)),
    (replace(SEVERAL, head_dim=96, mask="window"), BF16, hopper(96, o_buffers=3)),
    (replace(SEVERAL, head_dim=256, n_kv=100), BF16, hopper(256, q_stages=1, o_buffers=2)),
    (SEVERAL, FP16, hopper(optimistic=False)),
    (replace(SEVERAL, logits=30.0), FP16, hopper(optimistic=False)),
    (replace(SEVERAL, logits=30.0, mask="causal"), BF16, hopper(optimistic=False, q_stages=1, groups=3)),
    (replace(SEVERAL, logits=30.0, mask="window", head_dim=96), BF16, hopper(96, optimistic=False)),
    (replace(SEVERAL, logits=10.0, mask="causal"), BF16, hopper()),
    # What changes scores, and what masks pair by pair.
    (replace(SEVERAL, softcap=3.0, mask="causal"), FP16, hopper()),
    (replace(SEVERAL, alibi=True, mask="causal"), BF16, hopper(optimistic=False)),
    (replace(SEVERAL, bias=True, batch=2), FP16, hopper(optimistic=False)),
    (replace(SEVERAL, sinks=True, n_kv=100, mask="causal"), BF16, hopper()),
    (replace(SEVERAL, function=True), FP16, hopper(optimistic=False)),
    (replace(SEVERAL, mask="documents", batch=2), BF16, hopper()),
    (replace(SEVERAL, mask="all", alibi=True, batch=2), FP16, hopper(q_stages=1, groups=3, optimistic=False)),
    # The first rows see nothing: what the consumers load for no tile must exist.
    (case(500, 90, head_dim=64, mask="all"), BF16, hopper(optimistic=False)),
    (case(500, 90, head_dim=64, mask="window", bias=True), FP16, hopper(q_stages=1, optimistic=False)),
    (replace(SEVERAL, dropout=0.3, mask="causal", batch=2), BF16, hopper()),
    (replace(SEVERAL, mask="functions"), FP16, hopper(groups=3)),
    (replace(SEVERAL, seqused=True, batch=4, mask="window"), BF16, hopper()),
    (replace(SEVERAL, seqused=True, packed=True, sinks=True, batch=4), FP16, hopper(q_stages=1)),
    # Heads that share keys share a tile: of some rows that are none, that see nothing, of what knows its head.
    (case(150, 200, heads=(4, 2), batch=2, head_dim=64), BF16, hopper(tile_heads=2)),
    (case(150, 333, heads=(4, 1), head_dim=64, mask="causal"), FP16, hopper(tile_heads=2, tile_kv=128, num_stages=3, slots=4)),
    (case(150, 200, heads=(6, 2), batch=2, head_dim=64, mask="causal"), BF16, hopper(groups=3, tile_heads=3)),
    (case(300, 130, heads=(4, 2), head_dim=64, mask="window"), FP16, hopper(tile_heads=2, num_stages=3)),
    (case(200, 90, heads=(2, 1), head_dim=64, mask="causal"), BF16, hopper(tile_heads=2)),
    (case(90, 77, heads=(4, 2), batch=3, head_dim=64, mask="causal"), FP16, hopper(tile_heads=2, slots=4, static=True)),
    (case(150, 200, heads=(4, 2), batch=4, head_dim=64, packed=True), FP16, hopper(tile_heads=2)),
    (case(300, 200, heads=(4, 1), batch=3, head_dim=96, mask="causal", packed=True), BF16, hopper(96, tile_heads=2, slots=4)),
    (
        case(150, 170, heads=(2, 1), batch=3, head_dim=192, head_dim_v=128, mask="prefix", packed=True),
        BF16,
        hopper(192, 128, q_stages=1, tile_heads=2),
    ),
    (replace(SEVERAL, head_dim=256, n_kv=100), BF16, hopper(256, q_stages=1, o_buffers=2, tile_heads=2)),
    # Heads that do not fill their tiles.
    (case(150, 200, heads=(6, 2), batch=2, head_dim=64), BF16, uneven()),
    (case(90, 150, heads=(10, 2), head_dim=64, mask="causal"), FP16, hopper(tile_heads=2, uneven_group=5, slots=4)),
    (case(150, 130, heads=(4, 2), batch=2, head_dim=64, mask="window"), BF16, hopper(groups=3, tile_heads=3, uneven_group=2)),
    (case(70, 100, heads=(4, 1), head_dim=64, mask="causal"), FP16, hopper(groups=3, tile_heads=3, uneven_group=4)),
    (
        case(90, 120, heads=(6, 2), batch=4, head_dim=96, mask="causal", packed=True),
        BF16,
        uneven(96),
    ),
    (
        case(150, 200, heads=(3, 1), batch=3, head_dim=64, logits=30.0, packed=True),
        FP16,
        uneven(optimistic=False),
    ),
    (
        case(90, 130, heads=(6, 2), batch=2, head_dim=64, alibi=True, mask="causal"),
        BF16,
        uneven(optimistic=False),
    ),
    (
        case(90, 130, heads=(3, 1), batch=2, head_dim=64, bias=True),
        FP16,
        uneven(optimistic=False),
    ),
    (case(90, 130, heads=(6, 2), head_dim=64, sinks=True, mask="causal"), BF16, uneven()),
    (case(90, 130, heads=(3, 1), head_dim=64, mask="functions"), FP16, uneven(optimistic=False)),
    (case(90, 130, heads=(6, 2), batch=2, head_dim=64, mask="documents"), BF16, uneven()),
    (case(90, 130, heads=(6, 2), batch=2, head_dim=64, dropout=0.3), FP16, uneven()),
    (
        case(150, 170, heads=(6, 2), batch=3, head_dim=64, seqused=True, mask="causal"),
        BF16,
        uneven(),
    ),
    (
        case(150, 170, heads=(3, 1), batch=3, head_dim=64, seqused=True, packed=True, sinks=True),
        FP16,
        uneven(),
    ),
    (replace(SEVERAL, logits=30.0, mask="causal"), BF16, hopper(optimistic=False, tile_heads=2)),
    (replace(SEVERAL, softcap=3.0, mask="causal"), FP16, hopper(tile_heads=2)),
    (replace(SEVERAL, alibi=True, mask="causal", batch=2), BF16, hopper(optimistic=False, tile_heads=2)),
    (replace(SEVERAL, bias=True, batch=2), FP16, hopper(optimistic=False, tile_heads=2)),
    (replace(SEVERAL, sinks=True, n_kv=100, mask="causal"), BF16, hopper(tile_heads=2)),
    (replace(SEVERAL, mask="functions"), FP16, hopper(tile_heads=2)),
    (replace(SEVERAL, mask="documents", batch=2), BF16, hopper(tile_heads=2)),
    (replace(SEVERAL, dropout=0.3, mask="causal", batch=2), BF16, hopper(tile_heads=2)),
    (replace(SEVERAL, seqused=True, batch=4, mask="window"), BF16, hopper(tile_heads=2)),
    (replace(SEVERAL, seqused=True, packed=True, sinks=True, batch=4), FP16, hopper(q_stages=1, tile_heads=2)),
]


@pytest.mark.parametrize("order, seed, ctas", [*((*order, 1) for order in ORDERS), ("random", 3, 2)])
@pytest.mark.parametrize("case, dtype, config", HOPPER, ids=short)
def test_hopper(case, dtype, config, order, seed, ctas):
    """All tiles in one CTA, or two that share them."""
    report = assert_right(case, dtype, "sm90", config, order, seed, ctas)
    assert report.smem_bytes == config.smem_bytes()


FEW_KEYS = [
    (case(300, 77, heads=(2, 1), batch=2, head_dim=64), BF16, None),
    (case(130, 90, heads=(2, 1), head_dim=40), FP16, None),
    (case(200, 70, heads=(2, 2), head_dim=72), BF16, None),
    (case(130, 65, head_dim=64, head_dim_v=80), FP16, None),
    (case(1, 1, batch=3, head_dim=64), BF16, None),
    (case(150, 197, heads=(1, 1), head_dim=64), FP16, None),
    (case(70, 77, head_dim=160), BF16, None),
    (case(70, 130, head_dim=128), BF16, None),  # of wide rows the first part comes in one box
    (case(70, 256, head_dim=64), BF16, ShortConfig(64, 64, (128, 128))),
    (case(300, 77, head_dim=64, logits=100.0), FP16, ShortConfig(64, 64, (64, 16), stages=2)),
    (case(300, 50, head_dim=64), BF16, ShortConfig(64, 64, (64,), stages=3)),
]


@pytest.mark.parametrize("order, seed", ORDERS)
@pytest.mark.parametrize("case, dtype, config", FEW_KEYS, ids=short)
def test_hopper_to_few_keys(case, dtype, config, order, seed):
    """A CTA goes through all tiles of a head."""
    chosen = config or choose_short(describe(tensors(case, dtype))[0])
    report = assert_right(case, dtype, "sm90 short", chosen, order, seed)
    assert report.smem_bytes == chosen.smem_bytes()


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_heads_in_several_bundles(mask, monkeypatch):
    """Of one head each, but for the last one, which has two."""
    monkeypatch.setattr(arguments, "MOST_HEADS", 1)
    monkeypatch.setattr(arguments, "MOST_LAST", 2)
    assert_right(case(300, 300, heads=(5, 5), head_dim=64, mask=mask), FP16, "sm90", hopper(), "random", 1, ctas=2)


def test_hopper_leaves_its_counters_as_they_were():
    """However many CTAs there are, with or without a tile for each."""
    for ctas in (1, 3, 12):
        launch, *_ = forward_launch(sm90_forward, 90, *describe(tensors(SEVERAL, FP16)), hopper(), ctas)
        counters = next(x for x in launch.args if isinstance(x, torch.Tensor) and x.shape == (16,))
        for seed in range(3):
            launch.simulate("random", seed)
            assert not counters.any()


@pytest.mark.parametrize("dtype, excess, noted", [(BF16, 118, 0), (BF16, 121, 1), (FP16, 14, 0), (FP16, 17, 1)], ids=str)
@pytest.mark.parametrize("row, config", [
    (140, hopper()), (200, hopper(q_stages=1, groups=3)), (299, hopper(optimistic=False)), (140, hopper(tile_heads=2)),
])  # fmt: skip
def test_a_later_block_beyond_the_first_is_noted(row, config, dtype, excess, noted):
    """One score of one row is 2^excess times the others: the 64 rows around it are noted where that is too much."""
    t = tensors(case(300, 333, heads=(2, 1), head_dim=64), dtype)
    q, k = torch.zeros_like(t.q), torch.zeros_like(t.k)
    q[0, row, 1, 0], k[0, 290, 0, 0] = 16.0, excess / (16.0 * 64**-0.5 * LOG2E)
    out, lse, notes, _ = simulate_forward(*describe(replace(t, q=q, k=k)), "sm90", config)
    expected = torch.zeros(2, 5, dtype=torch.int32)
    expected[1, row // 64] = noted and config.optimistic
    assert notes.tolist() == expected.flatten().tolist()
    if not expected.any():
        check(Results(out, lse), replace(t, q=q, k=k), ("out", "lse"))


WILD = [
    (case(300, 333, heads=(2, 1), head_dim=64, logits=30.0), hopper()),
    (case(300, 333, heads=(2, 1), head_dim=64, logits=30.0, mask="causal"), hopper(groups=3, num_stages=3)),
    (case(500, 333, head_dim=64, logits=100.0, mask="causal"), hopper(tile_kv=128, num_stages=3)),
    (case(300, 300, head_dim=64, logits=10.0, mask="window"), hopper(q_stages=1)),
    (case(300, 500, head_dim=64, logits=60.0, mask="prefix"), hopper()),
    (case(300, 500, batch=3, head_dim=64, logits=60.0, mask="causal", packed=True), hopper()),
    (case(300, 100, head_dim=64, logits=30.0, mask="causal", sinks=True), hopper()),
    (case(300, 333, heads=(4, 2), batch=2, head_dim=64, logits=30.0, mask="causal"), hopper(tile_heads=2)),
    (case(300, 500, heads=(2, 1), batch=3, head_dim=64, logits=60.0, packed=True), hopper(tile_heads=2)),
    (case(150, 333, heads=(6, 2), batch=2, head_dim=64, logits=30.0, mask="causal"), uneven()),
]


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=short)
@pytest.mark.parametrize("case, config", WILD, ids=short)
def test_what_is_not_noted_is_right(case, config, dtype):
    """The notes are those of the model in plain torch; every other block of 64 rows is right."""
    t = tensors(case, dtype)
    problem, operands = describe(t)
    out, lse, notes, _ = simulate_forward(problem, operands, "sm90", config, "random", 1)
    assert notes.bool().tolist() == optimistic.forward(problem, operands, config.tile_q, config.tile_kv).noted.tolist()
    exact = formula(t)
    for place, (batch, head, block) in enumerate(
        itertools.product(*map(range, (case.batch, case.heads_q, -(-case.n_q // 64))))
    ):
        if not notes[place]:
            rows = slice(64 * block, 64 * block + 64)
            if case.packed:
                begin, end = t.keywords["cu_seqlens_q"][batch : batch + 2].tolist()
                rows = slice(min(begin + 64 * block, end), min(begin + 64 * block + 64, end))
            where = (rows, head) if case.packed else (batch, rows, head)
            torch.testing.assert_close(out[where].double(), exact.out[where], atol=2e-2, rtol=2e-2)
            where = (head, rows) if case.packed else (batch, head, rows)
            torch.testing.assert_close(lse[where].double(), exact.lse[where], atol=1e-3, rtol=1e-5)


# ---- Blackwell


def blackwell(head_dim=64, head_dim_v=None, tile_kv=64, kv_stages=3, **more) -> Blackwell:
    return Blackwell(head_dim, head_dim_v or head_dim, tile_kv=tile_kv, kv_stages=kv_stages, **more)


THREE_TILES = case(150, 170, heads=(3, 1), head_dim=64)
BLACKWELL = [
    (case(256, 128, head_dim=64), FP16, blackwell()),
    (case(300, 333, heads=(2, 1), head_dim=64), BF16, blackwell(tile_kv=128)),
    (case(300, 333, heads=(2, 2), head_dim=64, mask="causal"), FP16, blackwell()),
    (case(300, 90, head_dim=64, mask="causal"), BF16, blackwell()),  # the first rows see nothing
    (case(1, 77, heads=(4, 2), head_dim=64, mask="causal"), FP16, blackwell()),
    (case(77, 1, batch=3, head_dim=64), BF16, blackwell()),
    (case(130, 300, batch=2, head_dim=64, mask="window"), FP16, blackwell()),
    (case(300, 130, head_dim=64, mask="window"), BF16, blackwell(kv_stages=6)),
    (case(130, 200, heads=(3, 1), head_dim=64, mask="prefix"), FP16, blackwell(kv_stages=2)),
    (case(300, 200, heads=(2, 1), head_dim=96, mask="causal"), BF16, blackwell(96)),
    (case(130, 200, head_dim=96), FP16, blackwell(96, tile_kv=128)),
    (case(300, 300, heads=(2, 1), head_dim=128, mask="causal"), BF16, blackwell(128, tile_kv=128)),
    (case(130, 150, heads=(3, 3), head_dim=128), FP16, blackwell(128)),
    (case(300, 150, heads=(2, 1), head_dim=192, head_dim_v=128, mask="causal"), FP16, blackwell(192, 128)),
    (case(130, 333, batch=3, head_dim=192, head_dim_v=128), BF16, blackwell(192, 128, tile_kv=128)),
    (case(150, 200, heads=(2, 1), batch=4, head_dim=64, packed=True), FP16, blackwell()),
    (case(300, 200, batch=3, head_dim=64, mask="causal", packed=True), BF16, blackwell()),
    (case(150, 170, batch=3, head_dim=96, mask="window", packed=True), FP16, blackwell(96)),
    (case(150, 170, batch=3, head_dim=192, head_dim_v=128, mask="causal", packed=True), BF16, blackwell(192, 128)),
    # Each switch of Config; logits of 30 make every block rescale O, those of 1 almost none.
    (THREE_TILES, FP16, blackwell(rescale_threshold=0.0)),
    (case(150, 300, heads=(3, 1), head_dim=64, logits=30.0), FP16, blackwell()),
    (case(150, 300, heads=(3, 1), head_dim=64, logits=30.0, mask="causal"), BF16, blackwell(rescale_threshold=0.0)),
    (THREE_TILES, FP16, blackwell(emulated=0)),
    (THREE_TILES, BF16, blackwell(emulated=16)),
    (THREE_TILES, FP16, blackwell(split_p=False)),
    (THREE_TILES, FP16, blackwell(correction=False)),
    (THREE_TILES, FP16, blackwell(q_stages=1)),
    (case(150, 300, heads=(2, 1), head_dim=64, logits=30.0, mask="causal"), FP16, blackwell(correction=False, split_p=False)),
    (case(300, 170, heads=(2, 1), head_dim=64, mask="window"), BF16, blackwell(q_stages=1, correction=False)),
    (case(150, 170, heads=(2, 1), head_dim=192, head_dim_v=128), FP16, blackwell(192, 128, q_stages=1)),
    (case(150, 170, heads=(2, 1), head_dim=192, head_dim_v=128), FP16, blackwell(192, 128, correction=False)),
    (THREE_TILES, FP16, blackwell(persistent=False)),
]


@needs_tcgen05
@pytest.mark.parametrize("order, seed", ORDERS)
@pytest.mark.parametrize("case, dtype, config", BLACKWELL, ids=short)
def test_blackwell(case, dtype, config, order, seed):
    """All tiles in one CTA."""
    report = assert_right(case, dtype, "sm100", config, order, seed)
    assert report.tmem_columns == config.tmem_allocation
    assert report.smem_bytes <= config.smem_bytes()


SPLIT = [
    (case(150, 333, heads=(2, 1), head_dim=64), FP16, blackwell(splits=2)),
    (case(300, 300, head_dim=64, mask="causal"), BF16, blackwell(splits=3)),  # of some rows a part sees nothing
    (case(130, 200, heads=(2, 1), head_dim=96, mask="window"), FP16, blackwell(96, splits=2)),
    (case(1, 300, heads=(4, 1), head_dim=192, head_dim_v=128), BF16, blackwell(192, 128, splits=5)),
    (case(150, 200, batch=3, head_dim=64, mask="causal", packed=True), FP16, blackwell(splits=2)),
]


@needs_tcgen05
@pytest.mark.parametrize("order, seed", ORDERS)
@pytest.mark.parametrize("case, dtype, config", SPLIT, ids=short)
def test_blackwell_splits_keys(case, dtype, config, order, seed):
    """The parts, merged, are the whole."""
    t = tensors(case, dtype)
    parts, lses, notes, _ = simulate_forward(*describe(t), "sm100", config, order, seed)
    assert len(parts) == len(lses) == config.splits
    assert notes is None or not notes.any()
    lse = torch.logsumexp(lses, 0)
    share = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse)).transpose(-1, -2)
    out = (share[..., None] * parts).sum(0).to(dtype)
    check(Results(out, lse, None, None, None), t, ("out", "lse"))


@needs_tcgen05
def test_blackwell_on_two_ctas():
    """Which share the tiles."""
    assert assert_right(THREE_TILES, FP16, "sm100", blackwell(), "in_order", 0, ctas=2).ctas == 2


# ---- Blackwell, two CTAs a tile


def pair(*dims, kv_stages=4, **more) -> Blackwell:
    return blackwell(*dims, kv_stages=kv_stages, two_ctas=True, **more)


PAIRS = [
    (case(512, 128, head_dim=64), FP16, pair(64)),
    (case(700, 333, heads=(2, 1), head_dim=64, mask="causal"), BF16, pair(64, tile_kv=128)),
    (case(300, 90, head_dim=64, mask="causal"), FP16, pair(64)),  # the first rows see nothing
    (case(130, 300, batch=2, head_dim=64, mask="window"), BF16, pair(64, kv_stages=6)),
    (case(1, 77, heads=(4, 2), head_dim=64, mask="causal"), FP16, pair(64)),
    (case(520, 200, head_dim=96), BF16, pair(96)),
    (case(300, 300, heads=(2, 1), head_dim=96, mask="causal"), FP16, pair(96, tile_kv=128)),
    (case(600, 300, heads=(2, 1), head_dim=128, mask="causal"), BF16, pair(128, tile_kv=128)),
    (case(300, 170, batch=3, head_dim=128, mask="window"), FP16, pair(128)),
    (case(300, 150, heads=(2, 1), head_dim=192, head_dim_v=128, mask="causal"), FP16, pair(192, 128)),
    (case(530, 333, head_dim=192, head_dim_v=128), BF16, pair(192, 128, tile_kv=128)),
    (case(300, 170, batch=2, head_dim=192, head_dim_v=128, mask="window"), BF16, pair(192, 128)),
    (case(300, 200, batch=3, head_dim=64, mask="causal", packed=True), BF16, pair(64)),
    (case(300, 300, heads=(2, 1), head_dim=64, logits=30.0), FP16, pair(64, rescale_threshold=0.0)),
    (case(300, 300, heads=(2, 1), head_dim=64), FP16, pair(64, correction=False)),
    (case(300, 300, heads=(2, 1), head_dim=64), FP16, pair(64, q_stages=1)),
    (case(300, 300, heads=(2, 1), head_dim=64), FP16, pair(64, split_p=False)),
    (case(300, 300, heads=(2, 1), head_dim=64), FP16, pair(64, persistent=False)),
]


@needs_tcgen05
@pytest.mark.parametrize("order, seed", [*ORDERS, ("timed", 0)])
@pytest.mark.parametrize("case, dtype, config", PAIRS, ids=short)
def test_blackwell_in_pairs(case, dtype, config, order, seed):
    """All tiles in one pair, each CTA of which runs all roles."""
    report = assert_right(case, dtype, "sm100", config, order, seed)
    assert report.smem_bytes <= config.smem_bytes()


# ---- both


@pytest.mark.parametrize("backend, config, n_q, noted", [
    ("sm90", hopper(), 300, [0, 0, 0, 0, 1]),
    ("sm90", hopper(groups=3), 2, [1]),
    pytest.param("sm100", blackwell(), 300, [0, 0, 0, 0, 1], marks=needs_tcgen05),
    pytest.param("sm100", blackwell(), 2, [1], marks=needs_tcgen05),
], ids=short)  # fmt: skip
def test_a_nan_leaves_notes(backend, config, n_q, noted):
    """Of the 64 rows around those that may see it; the rows beyond the last, which a tile has, write none."""
    t = tensors(case(n_q, 300, head_dim=64, mask="causal"), FP16)
    t.v[:, 280] = torch.nan
    _, _, notes, _ = simulate_forward(*describe(t), backend, config)
    assert notes.tolist() == noted


@pytest.mark.parametrize("backend, shape, says", [
    ("sm70", (64, 64), "backend must be one of sm80, sm90, sm90 short, sm100, got 'sm70'"),
    ("sm90", (0, 64), "no kernel runs for q [1, 0, 1, 64] and k [1, 64, 1, 64]: one is empty"),
])  # fmt: skip
def test_what_it_refuses(backend, shape, says):
    with pytest.raises(ValueError) as raised:
        simulate_forward(*describe(tensors(case(*shape, head_dim=64), FP16)), backend)
    assert says in str(raised.value)


# ---- the GEMMs

GEMM = Path(__file__).parent.parent.parent / "examples" / "gemm"
TILES = {
    "sm80": {"block_m": 64, "block_n": 64, "block_k": 64},
    "sm90": {"block_n": 64, "ctas": 2},
    "sm100": {"block_n": 128, "ctas": 2},
}


def gemm(name: str):
    sys.path.insert(0, str(GEMM))
    try:
        spec = importlib.util.spec_from_file_location(f"gemm_{name}", GEMM / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(GEMM))


SIDES = [(300, 264, 200), (128, 256, 128)]
"""Of which a tile divides none, or all."""


@pytest.mark.parametrize("order, seed", ORDERS)
@pytest.mark.parametrize("dtype, sides", [(FP16, SIDES[0]), (BF16, SIDES[0]), (FP16, SIDES[1])], ids=short)
@pytest.mark.parametrize("name", ["sm80", "sm90", pytest.param("sm100", marks=needs_tcgen05)])
def test_gemm(name, dtype, sides, order, seed):
    """Several tiles for each CTA where it is persistent."""
    gemm_is_right(gemm(name), name, dtype, sides, order, seed)


def gemm_is_right(module, name: str, dtype, sides: tuple[int, int, int], order: str, seed: int) -> None:
    m, n, k = sides
    a, b = (torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(dtype) for rows in (m, n))
    c = torch.full((m, n), torch.nan, dtype=dtype)
    grid, arguments, constants = module.launch_arguments(a, b, c, **TILES[name])
    simulate(module.matmul_kernel, grid, *arguments, order=order, seed=seed, arch=int(name[2:]), **constants)
    torch.testing.assert_close(c, (a.double() @ b.double().T).to(dtype))
