"""`deterministic` reaches the problem of a backward, by every door, and changes nothing where gradients always are."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import HAS_GPU
from problems import Case, check, run, tensors

import strobe
from strobe import api
from strobe.call import launches, prepared_calls
from strobe.call.options import NAMES, Options
from strobe.cpu import tiled

CASE = Case(24, 24, heads_q=4, heads_kv=2, mask="causal")


@pytest.fixture
def problems(monkeypatch):
    """Those that the tiled backend computes."""
    seen = []
    for phase in ("forward", "backward"):
        run = getattr(tiled, phase)
        monkeypatch.setattr(tiled, phase, lambda problem, *rest, run=run: (seen.append(problem), run(problem, *rest))[1])
    prepared_calls.forget()
    yield seen
    prepared_calls.forget()


@pytest.fixture
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(door=strobe.attention, **keywords) -> tuple[torch.Tensor, ...]:
    device = "cuda" if HAS_GPU and keywords.get("backend") == "portable" else "cpu"
    t = tensors(CASE, device=device).with_gradients()
    return torch.autograd.grad(door(t.q, t.k, t.v, **keywords).square().sum(), (t.q, t.k, t.v))


def asked(problems) -> list[tuple[str, bool]]:
    return [(problem.phase, problem.deterministic) for problem in problems]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("short", [False, True], ids=["operator", "short way"])
def test_only_a_backward_is_asked(problems, monkeypatch, deterministic, short):
    if not short:
        monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
    gradients(backend="tiled", deterministic=deterministic)
    assert asked(problems) == [("forward", False), ("backward", deterministic)]


def test_all_algorithms_at_once(problems, deterministic_algorithms):
    gradients(backend="tiled")
    assert asked(problems) == [("forward", False), ("backward", True)]


def test_the_short_way_keeps_them_apart(problems, monkeypatch):
    """One plan each for calls with a gradient to come; one for both where there is none."""
    made = []

    def prepared(backend, problem, operands, upstream=None):
        if upstream is not None:
            return None
        made.append(problem)
        return SimpleNamespace(forward=lambda stream, wants_lse, addresses, now: tiled.forward(problem, operands))

    monkeypatch.setattr(launches, "prepared", prepared)
    for deterministic in (False, True, False, True):
        gradients(backend="tiled", deterministic=deterministic)
    assert [wants for phase, wants in asked(problems) if phase == "backward"] == [False, True, False, True] and len(made) == 2
    with torch.no_grad():
        for deterministic in (False, True):
            t = tensors(CASE)
            strobe.attention(t.q, t.k, t.v, backend="tiled", deterministic=deterministic)
    assert len(made) == 3


def test_the_compiler_keeps_it(problems):
    gradients(torch.compile(strobe.attention, backend="aot_eager", fullgraph=True), backend="tiled", deterministic=True)
    assert asked(problems)[-1] == ("backward", True)


def test_flash_attn_functions_pass_it_on(monkeypatch):
    seen = []
    monkeypatch.setattr(api, "attention", lambda q, *rest, **keywords: (seen.append(keywords["deterministic"]), q)[1])
    q, cu = torch.randn(1, 8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    strobe.flash_attn_func(q, q, q, deterministic=True)
    strobe.flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), deterministic=True)
    strobe.flash_attn_kvpacked_func(q, torch.stack((q, q), 2), deterministic=True)
    strobe.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 8, 8, deterministic=True)
    strobe.flash_attn_func(q, q, q)
    assert seen == [True, True, True, True, False]


@pytest.mark.parametrize("backend", ["torch_cpu", "tiled", "portable"])
def test_backends_that_always_are_give_the_same(backend):
    for default, asked_for in zip(gradients(backend=backend), gradients(backend=backend, deterministic=True), strict=True):
        assert torch.equal(default, asked_for)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 24, 24), (2, 1, 24, 1), (2, 4, 1, 24), (1, 1, 1, 1), (2, 4, 24, 24)], ids=str)
def test_a_bias_may_be_repeated(shape, dtype):
    device = "cuda" if HAS_GPU else "cpu"
    t = tensors(replace(CASE, batch=2), torch.float32, device)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    t = replace(t, q=t.q.to(dtype), k=t.k.to(dtype), v=t.v.to(dtype), keywords=t.keywords | {"score": strobe.Score(bias=bias)})
    got = run(replace(t, keywords=t.keywords | {"deterministic": True}), "portable")
    assert got.dbias.shape == bias.shape and got.dbias.dtype == bias.dtype
    check(got, t)


def test_explain_says_so(capsys):
    t = tensors(CASE).with_gradients()
    explanation = strobe.explain(t.q, t.k, t.v, deterministic=True)
    assert explanation.backward.problem.deterministic and not explanation.problem.deterministic
    assert capsys.readouterr().out.count(", deterministic\n") == 1


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_it_is_true_or_false(value):
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(TypeError, match="deterministic must be True or False, got"):
        strobe.attention(q, q, q, deterministic=value)


def test_it_is_an_option_of_both_operators():
    assert dict(zip(NAMES, Options(deterministic=True).arguments(), strict=True))["deterministic"] is True
    for operator in (torch.ops.strobe.forward, torch.ops.strobe.backward):
        names = [x.name for x in operator.default._schema.arguments]
        assert names.index("backend") == names.index("deterministic") + 1
