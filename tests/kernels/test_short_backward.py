"""The Hopper backward to few keys: which problems it takes, how work is shared out, what the compiler makes of it, and on a GPU
what it computes."""

from dataclasses import replace

import pytest
import torch
from problems import Case, Tensors, check, run, tensors, without_plans
from tritons import TRITONS, answer_by

import strobe
from strobe.device import KNOWN
from strobe.kernels.sm90 import backend, backward_short_launch
from strobe.kernels.sm90.backward_config import Config
from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig, choose, takes, tiles_of_a_cta
from strobe.masks import Causal
from strobe.problem import AttentionProblem, Dense, Varlen

H200 = KNOWN["H200"]


def problem(n_q=4096, n_kv=77, head_dim=64, **more) -> AttentionProblem:
    dims = {"heads_q": 8, "heads_kv": 8, "head_dim": head_dim, "head_dim_v": head_dim, "scale": head_dim**-0.5}
    return AttentionProblem(**{"lengths": Dense(8, n_q, n_kv), "dtype": torch.bfloat16, "phase": "backward", **dims, **more})


def test_it_takes_plain_attention_to_few_keys():
    taken = (
        *(problem(n_kv=n_kv, head_dim=head_dim) for n_kv, head_dim in ((1, 64), (77, 40), (128, 64), (77, 128), (128, 128))),
        problem(heads_kv=2),
        problem(head_dim_v=128),
        problem(deterministic=True),
    )
    for one in taken:
        assert takes(one)
        assert isinstance(backend.config(one, H200), ShortBackwardConfig)
        assert "one block" in backend.origin(one, H200)
    refused = (
        problem(n_kv=129),
        problem(head_dim=160),
        problem(head_dim_v=160),
        problem(mask=Causal()),
        problem(score=strobe.Score(softcap=3.0)),
        problem(seqused=True),
        problem(partial=True),
        problem(dropout=0.1),
        problem(lengths=Varlen(8, 4096, 600, 600, 77)),
    )
    for one in refused:
        assert not takes(one) and not isinstance(backend.config(one, H200), ShortBackwardConfig)
    assert isinstance(backend.config(problem(mask=Causal()), H200), Config)


def test_keys_come_in_the_smallest_parts_that_hold_them():
    held = {n_kv: sum(choose(problem(n_kv=n_kv)).parts) for n_kv in (1, 64, 65, 80, 81, 97, 128)}
    assert held == {1: 64, 64: 64, 65: 80, 80: 80, 81: 96, 97: 128, 128: 128}


@pytest.mark.parametrize("n_kv", [1, 77, 90, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
def test_ctas_find_room(n_kv, head_dim):
    config = choose(problem(n_kv=n_kv, head_dim=head_dim))
    assert config.ctas >= 1
    assert config.ctas * (config.smem_bytes() + 1024) <= H200.smem_carveouts[-1] + 1024 * config.ctas
    assert config.ctas * config.registers * 32 * config.warps <= H200.registers_per_sm


@pytest.mark.parametrize(
    "tiles, heads, ctas",
    [(64, 80, 240), (16, 160, 160), (64, 1, 11), (1, 1, 1), (10**6, 1, 264), (2, 640, 640), (7, 100, 200), (128, 4, 64)],
)
def test_all_tiles_are_shared_out(tiles, heads, ctas):
    """To no more CTAs than find room at once, unless there are more heads, and to few where tiles are few."""
    share = tiles_of_a_cta(choose(problem()), tiles, heads, H200.sms)
    parts = -(-tiles // share)
    assert (parts - 1) * share < tiles and parts * heads == ctas


def test_each_cta_has_a_share_and_each_head_a_counter():
    one = problem(lengths=Dense(3, 5000, 77), heads_q=8, heads_kv=2)
    call_buffers = backward_short_launch.buffers(one, H200, choose(one)).shared
    ctas = 6 * -(-(4 * 79) // tiles_of_a_cta(choose(one), 4 * 79, 6, H200.sms))
    assert call_buffers["shares"].shape == (ctas, 80 * 128) and call_buffers["arrivals"].shape == (6,)
    many = problem(lengths=Dense(100, 500, 77))
    assert backward_short_launch.buffers(many, H200, choose(many)).shared["shares"].shape[0] == 0


AUDIT = """
import json, torch, triton
from strobe.device import KNOWN
from strobe.kernels.sm90 import backward_short_config
from strobe.lab.binary.offline import sm90_backward
from strobe.problem import AttentionProblem, Dense
found = []
for n_kv, head_dim in ((60, 64), (77, 64), (96, 40), (128, 64), (77, 80), (128, 128)):
    lengths = Dense(8, 4096, n_kv)
    problem = AttentionProblem(lengths, 8, 8, head_dim, head_dim, torch.bfloat16, head_dim**-0.5, phase="backward")
    config, (made,) = backward_short_config.choose(problem), sm90_backward(problem, KNOWN["H200"])
    audit = made.audit()
    sizes = audit.registers, config.registers, audit.spill_bytes, audit.smem_bytes - config.smem_bytes()
    found.append((*sizes, audit.warnings, audit.wrong_code))
print(json.dumps({"triton": triton.__version__, "found": found}))
"""


@pytest.mark.parametrize("triton", [TRITONS[1], pytest.param(TRITONS[0], marks=pytest.mark.exhaustive)])
def test_what_the_compiler_makes_of_it(triton):
    """Spills are of what a tile does not need."""
    for registers, most, spills, excess, warnings, wrong_code in answer_by(triton, AUDIT)["found"]:
        assert registers <= most and spills <= 64 and 0 <= excess <= 1024
        assert not warnings and not wrong_code


# ---- on the GPU

KEYS = [(1, 1), (64, 64), (333, 77), (1000, 90), (200, 128), (65, 16), (5000, 77)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_q, n_kv", KEYS)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128])
def test_right_numbers(head_dim, n_q, n_kv, dtype):
    t = tensors(Case(n_q, n_kv, batch=3, heads_q=4, heads_kv=2, head_dim=head_dim), dtype, "cuda")
    check(run(t, "sm90"), t)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 128), (128, 40)], ids=str)
def test_head_dims_of_their_own(dims):
    t = tensors(Case(300, 77, batch=3, heads_q=4, head_dim=dims[0], head_dim_v=dims[1]), torch.bfloat16, "cuda")
    check(run(t, "sm90"), t)


@pytest.mark.gpu
def test_strides_and_an_expanded_gradient():
    t = tensors(Case(260, 77, heads_q=4, heads_kv=4, head_dim=64), torch.bfloat16, "cuda")
    t = replace(t, **{name: getattr(t, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"})
    check(run(t, "sm90"), t)

    def gradients(backend: str) -> list[torch.Tensor | None]:
        leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
        strobe.attention(*leaves, backend=backend, **t.keywords).sum().backward()
        return [x.grad for x in leaves]

    for got, want in zip(gradients("sm90"), gradients("portable"), strict=True):
        torch.testing.assert_close(got, want, atol=4e-2, rtol=4e-2)


def same_bits(t: Tensors, number: int) -> None:
    """Each time, through a plan and through the operator."""
    first = run(t, "sm90")
    for _ in range(number):
        again = run(t, "sm90")
        assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("dq", "dk", "dv"))
    with without_plans():
        again = run(t, "sm90")
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("dq", "dk", "dv"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_in_every_run(head_dim):
    same_bits(tensors(Case(5000, 77, batch=2, heads_q=4, head_dim=head_dim), torch.bfloat16, "cuda"), 10)


@pytest.mark.gpu
def test_in_a_graph_and_on_another_stream():
    """Counters are left at 0: a graph is replayed, with calls of the same kind beside it on another stream."""
    q, k, v, dout = (torch.randn(2, n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (2000, 77, 77, 2000))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = strobe.attention(*leaves, backend="sm90")
    wanted = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [x.detach().requires_grad_() for x in leaves]
        found = torch.autograd.grad(strobe.attention(*captured, backend="sm90"), captured, dout)
    for _ in range(5):
        with torch.cuda.stream(beside):
            others = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        graph.replay()
        torch.cuda.synchronize()
        for x, y, z in zip(wanted, found, others, strict=True):
            assert torch.equal(x, y) and torch.equal(x, z)


@pytest.mark.gpu
def test_poison_stays_where_it_is():
    """A NaN in dO stays in its row of dQ; an infinity in V reaches dQ and dK, but not dV."""
    t = tensors(Case(300, 77, heads_q=2, heads_kv=2, head_dim=64), torch.bfloat16, "cuda")
    clean = run(t, "sm90")
    t.v[:, 33] = float("inf")
    broken = run(t, "sm90")
    torch.testing.assert_close(broken.dv, clean.dv)
    assert broken.dq.isnan().all() and broken.dk.isnan().all()
