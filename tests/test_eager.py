"""The short way of `strobe.attention` gives what the operator gives, and leaves it what is the operator's."""

import pytest
import torch
from problems import Case, run, tensors

import strobe
from strobe import dispatch, eager
from strobe.problem import Operands
from strobe.recent import Recent
from strobe.reference import tiled


def halved(score, batch, head, q_index, kv_index):
    return score * 0.5


def half(score, batch, head, q_index, kv_index):
    return score * 0.0 + 0.5


class Plans:
    """A planner for the tiled backend, which counts its plans and the calls of them."""

    def __init__(self):
        self.made = self.called = 0
        self.wanted_lse: bool | None = None

    def plan(self, problem, operands, tensors):
        assert tensors[:3] == operands[:3] and len({id(x) for x in tensors[:3]}) == 3
        self.made += 1

        def call(stream, wants_lse, addresses, now):
            self.called += 1
            self.wanted_lse = wants_lse
            assert addresses == tuple(x.data_ptr() for x in now if x is not None)
            out, lse = tiled.forward(problem, Operands(*now[: len(operands)]))
            return out, lse if wants_lse else None

        return call


@pytest.fixture
def plans(monkeypatch):
    plans = Plans()
    monkeypatch.setattr(tiled, "plan", plans.plan, raising=False)
    eager.forget()
    yield plans
    eager.forget()


def attention(t, **keywords):
    return strobe.attention(t.q, t.k, t.v, backend="tiled", **{**t.keywords, **keywords})


CASES = [Case(24, 40, mask="causal"), Case(16, 16, heads_q=4, heads_kv=2), Case(9, 30, mask="window")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_results_and_gradients(plans, monkeypatch, case):
    t = tensors(case, torch.float32, "cpu")
    short = run(t, "tiled"), run(t, "tiled")
    assert (plans.made, plans.called) == (1, 2)
    monkeypatch.setattr(eager, "attention", lambda *call: None)
    want = run(t, "tiled")
    assert plans.called == 2
    for got in short:
        for name in want.FIELDS:
            assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_a_plan_serves_calls_that_look_the_same(plans):
    first, second = (tensors(CASES[0], torch.float32, "cpu", seed) for seed in (0, 1))
    out = attention(first), attention(second)
    assert (plans.made, plans.called) == (1, 2)
    assert not torch.equal(*out)


def test_one_tensor_given_thrice_plans_for_three(plans):
    q, k, v = torch.randn(3, 1, 8, 2, 16).unbind()
    strobe.attention(q, q, q, backend="tiled")
    got = strobe.attention(q, k, v, backend="tiled")
    assert (plans.made, plans.called) == (1, 2)
    torch.testing.assert_close(got, strobe.attention(q, k, v, backend="torch_cpu"))


def test_who_wants_the_lse(plans):
    """Whoever gets it, and a backward."""
    t = tensors(CASES[1], torch.float32, "cpu")
    out = attention(t)
    assert not plans.wanted_lse
    again, lse = attention(t, return_lse=True)
    assert plans.wanted_lse and lse is not None and torch.equal(out, again)
    attention(t.with_gradients()).sum().backward()
    assert plans.wanted_lse and plans.called == 3


@pytest.mark.parametrize(
    "change",
    [
        {"mask": strobe.Causal()},
        {"mask": strobe.Window(left=3)},
        {"scale": 0.5},
        {"score": strobe.Score(softcap=2.0)},
        {"score": strobe.Score(alibi=torch.ones(4))},
        {"score": strobe.Score(function=halved)},
        {"score": strobe.Score(function=halved, function_gradient=half)},
    ],
    ids=str,
)
def test_other_numbers_are_another_plan(plans, monkeypatch, change):
    t = tensors(Case(24, 24, heads_q=4, heads_kv=4), torch.float32, "cpu")
    attention(t)
    got = attention(t, **change)
    assert (plans.made, plans.called) == (2, 2)
    monkeypatch.setattr(eager, "attention", lambda *call: None)
    assert torch.equal(got, attention(t, **change))


def test_other_shapes_strides_and_alignments_are_another_plan(plans):
    t = tensors(Case(24, 24, heads_q=4, heads_kv=4), torch.float32, "cpu")
    q, k, v = t.q, t.k, t.v
    shifted = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    assert shifted.data_ptr() % 16
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    for number, other in enumerate((q, q[:, :-1], turned, shifted), 1):
        strobe.attention(other, k, v, backend="tiled")
        assert plans.made == plans.called == number


def test_errors_are_the_same(plans, monkeypatch):
    t = tensors(CASES[0], torch.float32, "cpu")
    attention(t, scale=1)
    bad = [
        (TypeError, {"scale": True}),
        (TypeError, {"scale": [1]}),
        (TypeError, {"mask": "causal"}),
        (TypeError, {"score": 3}),
        (ValueError, {"scale": float("nan")}),
        (ValueError, {"max_seqlen_q": 3}),
    ]
    texts = []
    for _ in range(3):
        for error, keywords in bad:
            with pytest.raises(error) as caught:
                attention(t, **keywords)
            texts.append(str(caught.value))
        with pytest.raises(TypeError, match="q must be a tensor") as caught:
            strobe.attention(None, t.k, t.v)
        texts.append(str(caught.value))
        if len(texts) == 2 * (len(bad) + 1):
            monkeypatch.setattr(eager, "attention", lambda *call: None)
    third = len(texts) // 3
    assert texts[:third] == texts[third : 2 * third] == texts[2 * third :]
    assert len(set(texts[:third])) > 3


class Subclass(torch.Tensor):
    pass


def test_what_is_the_operators(plans):
    """Compilers, fake tensors, subclasses, transforms, modes and forward gradients see the operator."""
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    t = tensors(CASES[1], torch.float32, "cpu")
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    want = attention(t)
    assert plans.called == 1
    with Watch():
        assert torch.equal(attention(t), want)
    assert "strobe.forward.default" in seen
    assert torch.equal(torch.compile(lambda: attention(t), backend="eager", fullgraph=True)(), want)
    out = strobe.attention(t.q.as_subclass(Subclass), t.k, t.v, backend="tiled", **t.keywords)
    assert torch.equal(out.as_subclass(torch.Tensor), want)
    with FakeTensorMode() as mode:
        fake = strobe.attention(*(mode.from_tensor(x) for x in (t.q, t.k, t.v)), backend="tiled", **t.keywords)
        assert fake.shape == want.shape
    with torch.device("cpu"):
        attention(t)
    assert plans.called == 1


def test_gradients_beside_other_tensors_are_the_operators(plans):
    t = tensors(Case(24, 24, heads_q=4, heads_kv=4), torch.float32, "cpu").with_gradients()
    score = strobe.Score(alibi=torch.ones(4))
    strobe.attention(t.q, t.k, t.v, score=score, backend="tiled").sum().backward()
    assert t.q.grad is not None and plans.made == 0
    with torch.no_grad():
        strobe.attention(t.q, t.k, t.v, score=score, backend="tiled")
    assert plans.called == 1


def test_gradients_through_functions_have_plans(plans):
    """Of which one with another derivative is another."""
    t = tensors(Case(24, 24, heads_q=4, heads_kv=4), torch.float32, "cpu").with_gradients()

    def gradient(**keywords):
        return torch.autograd.grad(strobe.attention(t.q, t.k, t.v, backend="tiled", **keywords).sum(), t.q)[0]

    with pytest.raises(ValueError, match="needs the derivative of the score function halved"):
        gradient(score=strobe.Score(function=halved))
    got = gradient(score=strobe.Score(function=halved, function_gradient=half))
    assert plans.called == plans.made == 2
    torch.testing.assert_close(got, gradient(scale=0.5 * t.q.shape[-1] ** -0.5))


def test_no_second_derivative(plans):
    t = tensors(CASES[1], torch.float32, "cpu").with_gradients()
    out = attention(t)
    (gradient,) = torch.autograd.grad(out.sum(), t.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()
    assert plans.called == 1


def test_a_refusal_is_raised_by_every_call(plans):
    t = tensors(CASES[1], torch.float32, "cpu")
    for _ in range(2):
        with pytest.raises(ValueError, match="needs a Hopper GPU"):
            strobe.attention(t.q, t.k, t.v, backend="sm90")
    assert "sm90" in dispatch.BACKENDS


def test_recent():
    """Of what is full, the oldest goes that nobody got."""
    table = Recent(3)
    for key in "abc":
        table.put(key, key.upper())
    assert table.get("a") == "A"
    table.put("d", "D")
    assert len(table) == 3 and [table.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    for key in "efghi":
        table.put(key, key)
    assert len(table) == 3 and table.get("i") == "i"
