"""The kernels for mma.sync, their source unchanged, in the simulator: right numbers, and no mistake found, in every order."""

from dataclasses import replace

import pytest
import torch
from ampere_backward import ARCH, Backward
from problems import CASES, Case, Results, check, describe, tensors

import strobe
from strobe.kernels.portable import backward as portable_backward
from strobe.kernels.sm80.config import BackwardConfig, Config, may_be_optimistic, padded
from strobe.sim.attention import simulate_forward

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ORDERS = (("in_order", 0), ("random", 1), ("random", 2), ("late", 0), ("early", 0))


def case(n_q, n_kv, heads=(1, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, **more)


def config(head_dim=64, head_dim_v=None, tile_q=64, tile_kv=32, warps=4, **more) -> Config:
    return Config(padded(head_dim), padded(head_dim_v or head_dim), tile_q, tile_kv, warps, **more)


def short(value) -> str:
    """The name of a test: what differs from a config's defaults is read in the list."""
    return "" if isinstance(value, Config | BackwardConfig) else str(value).removeprefix("torch.")


def assert_right(case: Case, dtype, config: Config, order: str, seed: int):
    t = tensors(case, dtype)
    out, lse, _notes, report = simulate_forward(*describe(t), "sm80", config, order, seed)
    check(Results(out, lse, None, None, None), t, ("out", "lse"))
    assert report.smem_bytes == config.smem_bytes()


SEVERAL = case(150, 133, heads=(2, 1), head_dim=64)
FORWARD = [
    (case(64, 32, head_dim=64), FP16, config()),  # one block, seen whole
    (case(150, 128, heads=(2, 1), head_dim=64), BF16, config()),
    (SEVERAL, FP16, config(stages=2)),
    (replace(SEVERAL, mask="causal"), BF16, config(tile_q=128, stages=2)),
    (replace(SEVERAL, mask="causal"), FP16, config(tile_kv=64, q_in_registers=True)),
    (replace(SEVERAL, mask="window"), BF16, config(stages=2, q_in_registers=True)),
    (case(300, 90, head_dim=64, mask="causal"), FP16, config()),  # the first tiles see nothing
    (case(128, 128, head_dim=64, mask="ahead"), FP16, config()),
    (replace(SEVERAL, mask="prefix", logits=30.0), BF16, config(tile_q=128, warps=8)),
    (replace(SEVERAL, mask="documents", batch=2), FP16, config(stages=2)),
    (replace(SEVERAL, mask="causal", logits=30.0), FP16, config(optimistic=False, stages=2)),
    # Two warps share rows.
    (SEVERAL, BF16, config(tile_kv=64, across=2)),
    (replace(SEVERAL, mask="causal"), FP16, config(stages=2, across=2)),
    (
        replace(SEVERAL, mask="window", logits=30.0),
        BF16,
        config(tile_kv=64, across=2, warps=8, tile_q=128, q_in_registers=True),
    ),
    (replace(SEVERAL, mask="prefix", logits=100.0), FP16, config(across=2, optimistic=False)),
    (case(70, 90, head_dim=192, head_dim_v=128, mask="causal"), FP16, config(192, 128, across=2)),
    # Tiles that are computed again.
    (replace(SEVERAL, logits=30.0), FP16, config()),
    (replace(SEVERAL, logits=100.0, mask="causal"), FP16, config(stages=2)),
    (replace(SEVERAL, logits=30.0, mask="causal"), FP16, config(q_in_registers=True)),
    # Every way in which head dims are cut into chunks.
    *((case(100, 70, head_dim=d, mask="causal"), FP16, config(d)) for d in (8, 24, 40, 72, 96, 136, 160, 192)),
    (case(70, 70, head_dim=256), BF16, config(256, q_in_registers=True)),
    (case(130, 128, head_dim=96), BF16, config(96, tile_q=128, tile_kv=64, stages=2)),
    (case(70, 90, head_dim=192, head_dim_v=128, mask="causal"), BF16, config(192, 128)),
    (case(70, 90, head_dim=64, head_dim_v=88, mask="window"), FP16, config(64, 88, stages=2)),
    # float32.
    *((case(100, 70, heads=(2, 1), head_dim=d, mask="causal"), FP32, config(d, itemsize=4)) for d in (24, 80, 128)),
    (SEVERAL, FP32, config(tile_kv=16, stages=2, itemsize=4)),
    (replace(SEVERAL, logits=30.0, mask="window"), FP32, config(itemsize=4)),
    (case(70, 90, head_dim=64, head_dim_v=88), FP32, config(64, 88, tile_q=128, warps=8, itemsize=4, optimistic=False)),
]


@pytest.mark.parametrize("order, seed", ORDERS)
@pytest.mark.parametrize("case, dtype, config", FORWARD, ids=short)
def test_forward(case, dtype, config, order, seed):
    assert_right(case, dtype, config, order, seed)


RUNNABLE = [case for case in CASES if case.n_q and case.n_kv and case.batch and (case.scale or 1.0) > 0]
CONFIGS = (
    dict(),
    dict(stages=2, q_in_registers=True),
    dict(tile_q=128, tile_kv=64),
    dict(tile_q=128, warps=8, stages=2),
    dict(tile_kv=64, across=2),
)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=short)
@pytest.mark.parametrize("number, case", list(enumerate(RUNNABLE)), ids=short)
def test_every_problem(number, case, dtype):
    """With both softmaxes, if the optimistic one may be taken."""
    softmaxes = (True, False) if may_be_optimistic(describe(tensors(case, dtype))[0]) else (False,)
    for optimistic in softmaxes:
        chosen = config(case.head_dim, case.head_dim_v, **CONFIGS[number % len(CONFIGS)], optimistic=optimistic)
        if chosen.smem_bytes() > 160_000:
            chosen = replace(chosen, stages=1, tile_kv=32)
        assert_right(case, dtype, chosen, "random", number)


# ---- a tile is computed again


@pytest.mark.parametrize("dtype, excess", [(BF16, 118), (BF16, 121), (FP16, 14), (FP16, 17)], ids=str)
def test_a_later_block_beyond_the_first(dtype, excess):
    """One score of one row is 2^excess times the others: within the range of an optimistic softmax, or beyond."""
    t = tensors(case(150, 133, heads=(2, 1), head_dim=64), dtype)
    q, k = torch.zeros_like(t.q), torch.zeros_like(t.k)
    q[0, 70, 1, 0], k[0, 120, 0, 0] = 16.0, excess / (16.0 * 64**-0.5 * strobe.scores.LOG2E)
    t = replace(t, q=q, k=k)
    out, lse, *_ = simulate_forward(*describe(t), "sm80", config())
    check(Results(out, lse), t, ("out", "lse"))


POISON = case(100, 100, heads=(2, 1), head_dim=16, mask="causal")
ROW = 70


@pytest.mark.parametrize("optimistic", [True, False])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=short)
def test_what_is_not_finite_reaches_only_rows_that_see_it(name, value, optimistic, dtype):
    """As it does in the formula, row by row and column by column."""
    t = tensors(POISON, dtype)
    broken = getattr(t, name).clone()
    broken[0, ROW, 0, 3] = value
    chosen = config(16, optimistic=optimistic, itemsize=dtype.itemsize)
    clean, *_ = simulate_forward(*describe(t), "sm80", chosen)
    got, *_ = simulate_forward(*describe(replace(t, **{name: broken})), "sm80", chosen)
    seen = torch.zeros(POISON.n_q, dtype=torch.bool)
    seen[ROW if name == "q" else slice(ROW, None)] = True
    torch.testing.assert_close(got[:, ~seen], clean[:, ~seen], atol=2e-2, rtol=2e-2)
    assert torch.isfinite(got[:, ~seen]).all()
    if name == "v":
        reached = got[:, seen, :, 3]
        assert (reached.isnan() if value != value else reached == value).all() and torch.isfinite(got[:, seen][..., 4:]).all()
    elif name == "k" or value != value:
        heads = slice(None) if name == "k" else slice(0, 1)
        rows = got[:, seen, heads]
        assert not torch.isfinite(rows).all() if value == value else rows.isnan().all()


# ---- backward


def backward(head_dim=64, head_dim_v=None, tile_q=64, tile_kv=64, warps=4, **more) -> BackwardConfig:
    return BackwardConfig(padded(head_dim), padded(head_dim_v or head_dim), tile_q, tile_kv, warps, **more)


SMALL = case(100, 90, heads=(2, 1), head_dim=64)
BACKWARD = [
    (case(64, 64, head_dim=64), FP16, backward()),  # one block and one tile
    (case(1, 1, head_dim=64), BF16, backward()),
    (SMALL, BF16, backward(tile_kv=128, warps=8)),
    (replace(SMALL, mask="causal"), FP16, backward(tile_q=32)),
    (replace(SMALL, mask="causal"), BF16, backward(across=2, warps=8)),
    (replace(SMALL, mask="window"), FP16, backward(stages=1)),
    (case(150, 60, head_dim=64, mask="causal"), BF16, backward(stages=1, across=2, warps=8)),
    (case(130, 70, heads=(4, 2), head_dim=96, mask="prefix"), FP16, backward(96, across=2, warps=8)),
    (case(60, 70, head_dim=80), BF16, backward(80, stages=1)),
    (case(60, 70, head_dim=192, head_dim_v=128, mask="causal"), FP16, backward(192, 128, across=2, warps=8, stages=1)),
    (case(60, 70, head_dim=136, mask="causal"), BF16, backward(136, across=4, warps=8)),
    (case(60, 70, batch=4, head_dim=64, mask="causal", packed=True), BF16, backward(across=2, warps=8)),
    # All whole: dQ is added in chunks, or in pieces of them.
    (case(128, 64, heads=(2, 1), head_dim=96), FP16, backward(96, across=2, warps=8)),
    (case(128, 64, heads=(2, 1), head_dim=128), BF16, backward(128, across=2, warps=8)),
    (case(64, 128, head_dim=144), FP16, backward(144, stages=1)),
    (case(60, 70, head_dim=64, mask="documents", batch=2), FP16, backward()),
    (SMALL, FP16, backward(tile_kv=128, parts=2)),
    (replace(SMALL, mask="causal"), BF16, backward(tile_kv=128, parts=2)),
    (case(130, 140, heads=(4, 2), head_dim=40, mask="window"), BF16, backward(40, tile_kv=128, parts=2, stages=1)),
    # dQ, and the gradient of a bias, by the portable kernel.
    (case(60, 70, heads=(2, 1), head_dim=64, mask="causal"), BF16, backward(with_dq=False)),
    (case(60, 70, heads=(2, 1), head_dim=64, bias=True), FP16, backward(across=2, warps=8, with_dq=False)),
    (case(60, 70, head_dim=64, mask="documents", batch=2), BF16, backward(with_dq=False)),
    # float32.
    (SMALL, FP32, backward(tile_q=32, itemsize=4)),
    (case(60, 70, heads=(2, 1), head_dim=24, mask="causal"), FP32, backward(24, tile_q=32, stages=1, itemsize=4)),
    (case(60, 70, head_dim=128, mask="window"), FP32, backward(128, tile_q=32, warps=8, across=2, stages=1, itemsize=4)),
    (case(60, 40, head_dim=96), FP32, backward(96, tile_q=16, tile_kv=32, across=2, stages=1, itemsize=4)),
]


@pytest.mark.parametrize("order, seed", ORDERS)
@pytest.mark.parametrize("case, dtype, config", BACKWARD, ids=short)
def test_backward(case, dtype, config, order, seed):
    report = Backward(tensors(case, dtype), config).run(order, seed)
    assert report.smem_bytes == config.smem_bytes()


BACKWARD_CONFIGS = (
    dict(), dict(warps=8, across=2), dict(tile_kv=128, warps=8, stages=1), dict(tile_q=128, warps=8, across=2),
    dict(tile_kv=128, parts=2),
)  # fmt: skip


@pytest.mark.parametrize("number, case", list(enumerate(RUNNABLE)), ids=short)
def test_backward_of_every_problem(number, case):
    chosen = backward(case.head_dim, case.head_dim_v, **BACKWARD_CONFIGS[number % len(BACKWARD_CONFIGS)])
    if chosen.smem_bytes() > 160_000:
        chosen = replace(chosen, tile_q=64, tile_kv=64, warps=4 * chosen.across, stages=1, parts=1)
    Backward(tensors(case, (FP16, BF16)[number % 2]), chosen).run("random", number)


@pytest.mark.parametrize("name", [*(pytest.param(x, marks=pytest.mark.exhaustive) for x in "qv"), "k", "dout"])
def test_what_is_not_finite_is_noted_and_redone(name):
    """Gradients of keys and rows that do not see it are as without it; the notes are as before."""
    t = tensors(case(150, 150, heads=(2, 1), head_dim=16, mask="causal"), BF16)
    clean = Backward(t, backward(16))
    wanted = clean.simulate("in_order", 0).tensors
    given = clean.given
    if name == "dout":
        broken = given.dout.clone()
        broken[0, ROW, 0, 3] = torch.nan
        run = Backward(t, backward(16), given=given._replace(dout=broken))
    else:
        broken = getattr(t, name).clone()
        broken[0, ROW, 0, 3] = torch.nan
        run = Backward(replace(t, **{name: broken}), backward(16), given=given)
    got = run.simulate("in_order", 0).tensors
    assert got.key_notes.any()
    portable_backward.redo_call(run.problem, got, ARCH, in_turn=False).launch()
    assert not got.key_notes.any() and not got.row_notes.any()
    beyond = slice(ROW + 1, None)
    unseen = {"q": [("dk", beyond), ("dv", beyond)], "k": [("dq", slice(0, ROW))], "v": [("dq", slice(0, ROW))]}
    for gradient, rows in unseen.get(name, unseen["q"]):
        x, want = getattr(got, gradient)[:, rows], getattr(wanted, gradient)[:, rows]
        assert torch.isfinite(x).all()
        torch.testing.assert_close(x, want, atol=5e-2, rtol=5e-2)
