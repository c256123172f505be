"""The Hopper forward to few keys: which problems it takes, how work is shared out, what the compiler makes of it, and on a GPU
what it computes."""

import pytest
import torch
from problems import Case, Results, check, tensors
from tritons import TRITONS, answer_by

import strobe
from strobe.device import KNOWN
from strobe.kernels.sm90 import backend
from strobe.kernels.sm90.config import Config
from strobe.kernels.sm90.short_config import ShortConfig, choose, takes, tiles_of_a_cta
from strobe.masks import Causal
from strobe.problem import AttentionProblem, Dense, Varlen

H200 = KNOWN["H200"]


def problem(n_q=4096, n_kv=77, head_dim=64, **more) -> AttentionProblem:
    dims = {"heads_q": 8, "heads_kv": 8, "head_dim": head_dim, "head_dim_v": head_dim, "scale": head_dim**-0.5}
    return AttentionProblem(**{"lengths": Dense(8, n_q, n_kv), "dtype": torch.bfloat16, **dims, **more})


def test_it_takes_plain_attention_to_few_keys():
    for n_kv, head_dim in ((1, 64), (77, 40), (197, 64), (77, 160), (128, 128), (144, 128)):
        assert takes(problem(n_kv=n_kv, head_dim=head_dim))
        assert isinstance(backend.config(problem(n_kv=n_kv, head_dim=head_dim), H200), ShortConfig)
    refused = (
        problem(n_kv=1000),
        problem(n_kv=209),
        problem(n_kv=197, head_dim=128),
        problem(n_kv=197, head_dim=128, head_dim_v=64),
        problem(head_dim=256),
        problem(mask=Causal()),
        problem(score=strobe.Score(softcap=3.0)),
        problem(seqused=True),
        problem(partial=True),
        problem(dropout=0.1),
        problem(lengths=Varlen(8, 4096, 600, 600, 77)),
    )
    for other in refused:
        assert not takes(other) and isinstance(backend.config(other, H200), Config)


def test_keys_come_in_the_smallest_parts_that_hold_them():
    held = {n_kv: sum(choose(problem(n_kv=n_kv)).parts) for n_kv in (1, 64, 65, 80, 81, 97, 128)}
    assert held == {1: 64, 64: 64, 65: 80, 80: 80, 81: 96, 97: 128, 128: 128}


def test_ctas_find_room():
    for n_kv in (1, 77, 90, 128, 197):
        for head_dim in (40, 64, 80, 128, 160):
            config = choose(problem(n_kv=n_kv, head_dim=head_dim))
            assert config.ctas * (config.smem_bytes() + 1024) <= H200.smem_carveouts[-1] + 1024 * config.ctas
            assert config.ctas * config.registers * 128 <= H200.registers_per_sm


def test_where_ctas_have_a_head_each_they_ask_for_two_tiles_at_once():
    assert choose(problem()).stages == 1
    assert (choose(problem(head_dim=40)).stages, choose(problem(head_dim=40)).ctas) == (2, 2)
    assert choose(problem(lengths=Dense(128, 77, 77))).stages == 2
    assert choose(problem(lengths=Dense(128, 197, 197))).stages == 1  # or a CTA less would find room


@pytest.mark.parametrize("tiles, heads", [(64, 80), (16, 160), (64, 64), (1, 1536), (64, 8), (3, 1000), (5, 1)])
def test_all_tiles_are_shared_out(tiles, heads):
    """As many CTAs as find room at once, unless there are more heads; none has a share without a tile."""
    config = choose(problem())
    share = tiles_of_a_cta(config, tiles, heads, 132)
    parts = -(-tiles // share)
    assert (parts - 1) * share < tiles <= parts * share
    assert parts == 1 or parts * heads <= config.ctas * 132
    assert share == 1 or heads > config.ctas * 132 or -(-tiles // (share - 1)) * heads > config.ctas * 132


AUDIT = """
import json, torch, triton
from strobe.device import KNOWN
from strobe.kernels.sm90 import short_config
from strobe.lab.binary.offline import sm90_forward
from strobe.problem import AttentionProblem, Dense
found = []
for n_kv, head_dim in ((77, 64), (128, 40), (77, 80), (77, 128), (130, 128)):
    lengths = Dense(8, 4096, n_kv)
    problem = AttentionProblem(lengths, 8, 8, head_dim, head_dim, torch.bfloat16, head_dim**-0.5)
    config, (made,) = short_config.choose(problem), sm90_forward(problem, KNOWN["H200"])
    audit = made.audit()
    sizes = audit.registers, config.registers, audit.spill_bytes, audit.smem_bytes - config.smem_bytes()
    found.append((*sizes, audit.warnings, audit.wrong_code))
print(json.dumps({"triton": triton.__version__, "found": found}))
"""


@pytest.mark.parametrize("triton", [TRITONS[1], pytest.param(TRITONS[0], marks=pytest.mark.exhaustive)])
def test_what_the_compiler_makes_of_it(triton):
    for registers, most, spills, excess, warnings, wrong_code in answer_by(triton, AUDIT)["found"]:
        assert registers <= most and spills == 0 and 0 <= excess <= 512
        assert not warnings and not wrong_code


# ---- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_q, n_kv", [(1, 1), (64, 64), (333, 77), (1000, 90), (200, 128), (99, 130), (65, 16), (197, 197)])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 160])
def test_right_numbers(head_dim, n_q, n_kv, dtype):
    t = tensors(Case(n_q, n_kv, batch=3, heads_q=4, heads_kv=2, head_dim=head_dim), dtype, "cuda")
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend="sm90", **t.keywords)
    check(Results(out, lse), t, ("out", "lse"))


@pytest.mark.gpu
def test_huge_scores_and_what_is_no_number():
    """Of huge scores the largest counts alone; a row of NaN stays one row, and a NaN among values its column."""
    q, k, v = (torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (200, 77, 77))
    huge, _ = strobe.attention(q * 2.0**60, k * 2.0**60, v, return_lse=True, backend="sm90")
    best = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()).argmax(-1)
    expected = torch.stack([v[0, best[0, h], h] for h in range(2)], 1)[None]
    torch.testing.assert_close(huge, expected)
    q[0, 70, 0], v[0, 5, 1, 3] = torch.nan, torch.nan
    out = strobe.attention(q, k, v, backend="sm90")
    broken = torch.zeros_like(out, dtype=torch.bool)
    broken[0, 70, 0], broken[0, :, 1, 3] = True, True
    assert torch.equal(out.isnan(), broken)
