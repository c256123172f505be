"""Views that begin, or step, at no multiple of 16 bytes, which TMA cannot address: run otherwise, or refused by name."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from problems import Case, Results, check, describe, formula, run, tensors, upstream

import strobe
from strobe.call import launches
from strobe.call.dispatch import explain_problem
from strobe.device import KNOWN
from strobe.problem import Upstream, addressable, lse_shape, made_addressable

CASE = Case(100, 130, heads_q=4, heads_kv=2, head_dim=120, mask="causal")


def base_off(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous, from 8 bytes after a multiple of 16 on."""
    return torch.cat([x.new_zeros(8 // x.element_size()), x.flatten()])[8 // x.element_size() :].view(x.shape)


def stride_off(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, 8 bytes between rows."""
    return torch.nn.functional.pad(x, (0, 8 // x.element_size()))[..., : x.shape[-1]]


def heads_of_more(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, some heads of a larger tensor: TMA can address them."""
    return torch.nn.functional.pad(x, (0, 0, 1, 2))[..., 1:-2, :]


def every_second(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, NaN between them."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


VIEWS = {"base": base_off, "stride": stride_off}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_another_backend_runs_and_says_so(name, view):
    t = tensors(CASE, torch.float16)
    t = replace(t, **{name: view(getattr(t, name))})
    problem, _ = describe(t)
    explanation = explain_problem(problem, KNOWN["H200"])
    assert explanation.chosen == "portable"
    assert f"which {name} lacks" in dict(explanation.refusals)["sm90"]
    assert "multiples of 16 bytes" in str(explanation)


def test_heads_of_a_larger_tensor_are_no_copy():
    t = tensors(CASE, torch.float16)
    v = heads_of_more(t.v)
    assert torch.equal(v, t.v) and addressable(v) and made_addressable(v) is v
    assert describe(replace(t, v=v))[0].unaligned == ()


@pytest.mark.parametrize("view", [*VIEWS.values(), every_second], ids=[*VIEWS, "last dim"])
def test_a_copy_is_addressable(view):
    x = torch.randn(2, 5, 4, 120).to(torch.float16)
    copy = made_addressable(view(x))
    assert not addressable(view(x)) and addressable(copy) and torch.equal(copy, x)


@pytest.mark.parametrize("packed", [False, True])
def test_an_lse_of_a_larger_tensor_is_copied(packed, monkeypatch):
    """Kernels write delta where the LSE's strides say, into a tensor as large as the LSE: found as memory that a backward of
    half of the rows overwrote."""
    given = {}

    def run(backend, problem, tensors, arch):
        given.update(tensors)
        return SimpleNamespace(**{f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"})

    monkeypatch.setattr(launches, "run", run)
    problem, operands = describe(tensors(replace(CASE, packed=packed), torch.float16), "backward")
    out = torch.randn_like(operands.q)
    whole = torch.randn(*lse_shape(problem)[:-1], 2 * lse_shape(problem)[-1])
    lse = whole[..., : lse_shape(problem)[-1]]
    backend = SimpleNamespace(calls=None)
    launches.backward(backend, problem, operands, Upstream(out, lse, out, None))
    assert not lse.is_contiguous() and given["lse"].is_contiguous() and torch.equal(given["lse"], lse)


@pytest.mark.gpu
@pytest.mark.parametrize("view", [*VIEWS.values(), heads_of_more], ids=[*VIEWS, "heads of more"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_on_a_gpu(name, view):
    """In turns with tensors that TMA can address, of the same shapes: what is prepared for these must not serve those."""
    plain = tensors(CASE, torch.float16, "cuda")
    other = replace(plain, **{name: view(getattr(plain, name))})
    for t in (plain, other, plain, other):
        check(run(t, None), t)
    if view is not heads_of_more:
        with pytest.raises(ValueError, match=f"which {name} lacks"):
            strobe.attention(other.q, other.k, other.v, backend="sm90", **other.keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_upstream_gradients_on_a_gpu(mask, deterministic):
    t = tensors(replace(CASE, mask=mask), torch.float16, "cuda").with_gradients()
    want = formula(t)
    for view in itertools.islice(itertools.cycle([lambda x: x, base_off, stride_off, heads_of_more, every_second]), 10):
        out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, deterministic=deterministic, **t.keywords)
        dout, dlse = upstream(out, lse)
        grads = t.gradients((out, lse), (view(dout), dlse))
        check(Results(want.out, want.lse, **grads), t, ("dq", "dk", "dv"))
