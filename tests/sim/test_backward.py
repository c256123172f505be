"""Hopper's backward, its source unchanged, in the simulator: the gradients, and no mistake found, in every order."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from backward import Backward, SplitBackward
from broken import UNEVEN
from problems import Case, tensors

import strobe
from strobe.kernels.common import arguments
from strobe.kernels.gluon import gl, gluon, reinterpret
from strobe.kernels.sm90 import backward_launch
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.sim import simulate

FP16, BF16 = torch.float16, torch.bfloat16
ORDERS = (("in_order", 0), ("random", 1), ("random", 2), ("late", 0), ("early", 0), ("timed", 0), *UNEVEN)
D64 = Config(64, 64, 128, turns=True, folded=True)
D64_PLAIN = Config(64, 64, 128, turns=True)
D96 = Config(96, 96, 64, turns=False)
D96_TURNS = Config(96, 96, 64, turns=True, held_k=64, held_v=64)
D96_MASKED = Config(96, 96, 64, turns=True, held_k=96)
D128 = Config(128, 128, 64, turns=True, held_k=64, folded=True)
D128_PLAIN = Config(128, 128, 64, turns=False)
D160 = Config(160, 160, 64, turns=False)
D192 = Config(192, 128, 64, turns=False)


def case(n_q, n_kv, head_dim, heads=(1, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, head_dim, **more)


CASES = [
    # One block and one tile; several; ends inside of both.
    (case(128, 128, 64), FP16, D64),
    (case(1, 1, 64), BF16, D64),
    (case(300, 300, 64, heads=(4, 2)), FP16, D64),
    (case(140, 300, 128, heads=(2, 1)), BF16, D128),
    (case(140, 300, 128, heads=(2, 1)), FP16, D128),
    (case(150, 170, 96, heads=(2, 1)), BF16, D96),
    (case(150, 170, 96, heads=(2, 1)), BF16, D96_TURNS),
    (case(140, 300, 192, heads=(2, 1), head_dim_v=128), BF16, D192),
    (case(140, 300, 160, heads=(2, 1)), BF16, D160),
    # Many blocks, of one tile or two: the last dQ of each is computed with another K beside it.
    (case(100, 700, 64, heads=(2, 1)), BF16, D64),
    (case(100, 700, 96), FP16, D96),
    (case(90, 600, 96, heads=(2, 1)), BF16, D96_TURNS),
    # Masks: of 300 causal rows the first 170 see none of 130 keys, and no row sees a block far behind a window.
    (case(200, 300, 64, heads=(2, 1), batch=2, mask="causal"), BF16, D64),
    (case(300, 130, 64, mask="causal"), FP16, D64),
    (case(100, 400, 64, mask="window"), FP16, D64),
    (case(300, 130, 64, mask="window"), BF16, D64),
    (case(150, 300, 64, mask="prefix"), FP16, D64),
    (case(140, 300, 128, mask="causal"), BF16, D128),
    (case(150, 170, 96, heads=(2, 1), mask="causal"), FP16, D96_MASKED),
    (case(150, 170, 192, heads=(2, 1), head_dim_v=128, mask="causal"), FP16, D192),
    (case(150, 170, 144, heads=(2, 1), mask="causal"), FP16, D160),
    # Sequences packed, one of them empty.
    (case(200, 170, 64, heads=(2, 1), batch=4, packed=True), BF16, D64),
    (case(200, 170, 64, heads=(2, 1), batch=4, packed=True, mask="causal"), FP16, D64),
    (case(140, 300, 128, batch=4, packed=True), FP16, D128),
    (case(150, 170, 96, batch=3, packed=True, mask="window"), BF16, D96),
    (case(140, 300, 192, head_dim_v=128, batch=4, packed=True, mask="window"), BF16, D192),
    # Of some entries less is used, or nothing: 0 goes to what is left.
    (case(150, 170, 64, batch=4, seqused=True, mask="causal"), FP16, D64),
    (case(100, 140, 128, batch=4, seqused=True), BF16, D128),
    (case(100, 140, 192, head_dim_v=128, batch=4, packed=True, seqused=True), FP16, D192),
    # What changes scores.
    (case(200, 300, 64, heads=(2, 1), softcap=3.0, alibi=True, mask="causal"), FP16, D64_PLAIN),
    (case(90, 150, 96, heads=(2, 1), alibi=True), BF16, D96),
    (case(90, 150, 192, heads=(2, 1), head_dim_v=96, alibi=True, softcap=3.0), FP16, Config(192, 96, 64, turns=False)),
    (case(90, 150, 64, heads=(2, 1), batch=2, bias=True, mask="causal"), FP16, D64_PLAIN),
    (case(90, 150, 128, heads=(2, 1), bias=True, function=True, softcap=4.0), BF16, D128_PLAIN),
    (case(90, 150, 192, heads=(2, 1), head_dim_v=128, bias=True, function=True, mask="window"), FP16, D192),
    # What is compared pair by pair, and what is dropped.
    (case(150, 170, 64, heads=(2, 1), batch=2, mask="all"), BF16, D64),
    (case(150, 170, 96, heads=(2, 1), mask="functions"), FP16, D96),
    (case(150, 170, 192, heads=(2, 1), head_dim_v=128, mask="documents"), BF16, D192),
    (case(150, 170, 192, heads=(2, 1), head_dim_v=128, mask="function"), FP16, D192),
    (case(150, 170, 64, heads=(2, 1), batch=2, dropout=0.3, mask="causal"), BF16, D64_PLAIN),
    (case(150, 170, 128, heads=(2, 1), dropout=0.3, function=True, alibi=True), FP16, D128_PLAIN),
    (case(150, 170, 192, heads=(2, 1), head_dim_v=128, dropout=0.2, function=True), FP16, D192),
    (case(100, 140, 160, batch=3, packed=True, seqused=True, dropout=0.2, mask="window"), BF16, D160),
    # Head dims that are padded, and V's own.
    (case(150, 170, 80, mask="window"), FP16, D96_TURNS),
    (case(100, 150, 128, head_dim_v=64, mask="causal"), FP16, Config(128, 64, 64, True, 64, 64, folded=True)),
    (case(100, 150, 40, head_dim_v=128), BF16, Config(96, 128, 64, turns=True, held_k=64)),
]


def short(value) -> str:
    return "" if isinstance(value, Config) else str(value).removeprefix("torch.")


@pytest.mark.parametrize("case, dtype, config", CASES, ids=short)
def test_in_every_order(case, dtype, config):
    """All blocks in one CTA, one after the other."""
    backward = Backward(tensors(case, dtype), config)
    for order, seed in ORDERS:
        assert backward.run(order, seed).smem_bytes == config.smem_bytes()


@pytest.mark.parametrize("shape", [(1, 2, 1, 150), (2, 1, 90, 1), (1, 1, 1, 1), (1, 2, 90, 150), (2, 2, 90, 150)], ids=str)
@pytest.mark.parametrize("of_both", [(Backward, D96), (SplitBackward, SplitConfig(96, 96))], ids=["one pass", "two passes"])
def test_a_bias_may_be_repeated(of_both, shape):
    """Its gradient is the sum over what a number stands for."""
    t = tensors(case(90, 150, 96, heads=(2, 1), batch=2, mask="causal"), FP16)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kernels, config = of_both
    t = replace(t, keywords=t.keywords | {"score": strobe.Score(bias=bias)})
    kernels(t, config).run("random", 1)
    if kernels is SplitBackward:
        kernels(replace(t, keywords=t.keywords | {"deterministic": True}), config).run("random", 1)


OF_BOTH = {"one pass": (Backward, D64), "two passes": (SplitBackward, SplitConfig(64, 64))}


@pytest.mark.parametrize("name", OF_BOTH)
def test_what_is_not_used_gets_0(name):
    """Whatever it holds."""
    unused_gets_0(name, "random", 1)


def unused_gets_0(name: str, order: str, seed: int) -> None:
    kernels, config = OF_BOTH[name]
    t = tensors(case(100, 140, 64, batch=4, seqused=True, mask="causal"), FP16)
    unused = [(batch, slice(n, None)) for batch, n in enumerate(t.keywords["seqused_kv"].tolist())]
    for place in unused:
        t.k[place] = t.v[place] = torch.nan
    grads = kernels(t, config).simulate(order, seed).grads
    assert not any(grad[place].any() for grad in (grads.k, grads.v) for place in unused)


@pytest.mark.parametrize("ctas", [2, 5, 12])
@pytest.mark.parametrize("mask, config", [("causal", D64), ("full", D128)], ids=short)
def test_ctas_share_the_blocks(mask, config, ctas):
    """As many blocks as CTAs, more, or fewer; the counters are 0 again whoever ends last."""
    t = tensors(case(90, 300, config.head_dim, heads=(4, 2), mask=mask), FP16)
    assert Backward(t, config, ctas).run("random", 1).ctas == min(ctas, 6)


@pytest.mark.parametrize("name", OF_BOTH)
def test_heads_in_several_bundles(name):
    in_bundles(name, "random", 1)


def in_bundles(name: str, order: str, seed: int) -> None:
    """Of one head each, but for the last one, which has two; the last block of each head is whole."""
    kernels, config = OF_BOTH[name]
    t = tensors(case(150, 256, config.head_dim, heads=(5, 5), mask="causal"), FP16)
    with mock.patch.multiple(arguments, MOST_HEADS=1, MOST_LAST=2):
        kernels(t, config).run(order, seed)


def test_heads_of_packed_sequences_in_several_bundles():
    """Of the longest sequence in three, the last of which has one head, of another one in two, of a short one in one."""
    t = tensors(case(300, 300, 64, heads=(5, 5), batch=5, packed=True, mask="causal"), FP16)
    with mock.patch.multiple(backward_launch, LAST_BLOCKS=3, HALF_L2=1):
        Backward(t, D64, ctas=2).run("random", 1)


def test_notes_tell_who_met_a_nan():
    """A NaN in dO of row 10: the keys of its tile, each 64 of them, and the 64 rows around it."""
    backward = Backward(tensors(case(300, 300, 64, mask="causal"), FP16), D64)
    backward.given.dout[:, 10] = torch.nan
    left = backward.simulate("in_order", 0).tensors
    assert left.key_notes.tolist() == [1, 1, 0, 0, 0]
    assert left.row_notes.tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("config", [D64, D128], ids=short)
def test_delta_that_is_no_number_stays_out_of_dv(config):
    """An infinity in V makes every delta NaN, and with it dQ and dK, but no weight."""
    t = tensors(case(140, 150, config.head_dim), BF16)
    clean = Backward(t, config).simulate("in_order", 0).grads
    t.v[:, 33] = torch.inf
    dq, dk, dv, *_ = Backward(t, config).simulate("in_order", 0).grads
    assert torch.equal(dv, clean.v)
    assert dq.isnan().all() and dk.isnan().all()


@gluon.jit
def reorder(x, to_memory, to_columns):
    """Stores [4, 4] by columns of pairs of rows; loads it as memory has it, and again by columns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    places = gl.arange(0, 4, gl.SliceLayout(1, layout))[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    memory = gl.allocate_shared_memory(gl.float32, [4, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ordered = reinterpret(memory, gl.float32, [4, 4], gl.SharedLinearLayout([[1, 0], [0, 1], [0, 2], [2, 0]]))
    ordered.store(gl.load(x + places))
    gl.store(to_memory + places, memory.load(layout))
    gl.store(to_columns + places, ordered.load(layout))


def test_memory_in_the_order_of_a_linear_layout():
    x, memory, again = torch.arange(16.0), torch.empty(16), torch.empty(16)
    simulate(reorder, (1,), x, memory, again)
    assert memory.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert torch.equal(again, x)
