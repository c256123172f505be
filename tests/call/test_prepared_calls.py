"""The short way of `strobe.attention` gives what the operator gives, and leaves it what is the operator's."""

from dataclasses import replace

import pytest
import torch
from problems import Case, run, tensors, upstream, without_plans
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import strobe
from strobe.call import dispatch, known_calls, launches, prepared_calls
from strobe.call.tables import ClockCache
from strobe.cpu import tiled
from strobe.kernels.common.call import Buffer, Buffers
from strobe.problem import Operands, Upstream


def halved(score, batch, head, q_index, kv_index):
    return score * 0.5


def half(score, batch, head, q_index, kv_index):
    return score * 0.0 + 0.5


class Plans:
    """Prepared launches for the tiled backend, which counts those that it makes and their calls; if `backwards`, of backwards
    too."""

    def __init__(self):
        self.made = self.called = self.backwards_made = self.backwards_called = 0
        self.wanted_lse: bool | None = None
        self.backwards = False

    def prepared(self, backend, problem, operands, upstream=None):
        if backend is not tiled:
            return None
        given = [x for x in (*operands, *(upstream or ())) if x is not None]
        assert len({id(x) for x in given}) == len(given) and not any(x.requires_grad for x in given)
        if upstream is None:
            self.made += 1
            return Planned(self, problem, operands[:-1])  # without the places of shards, which no prepared call has
        if not self.backwards:
            return None
        assert problem.phase == "backward"
        self.backwards_made += 1
        return Planned(self, problem, (*operands[:3], *upstream, *operands[3:-1]))


class Planned:
    """The prepared launches of one problem."""

    def __init__(self, plans: Plans, problem, tensors):
        self.plans, self.problem = plans, problem
        self.looks = [x if x is None else x.stride() for x in tensors]

    def check(self, addresses, now):
        assert list(addresses) == [x.data_ptr() for x in now if x is not None]
        looks = [x if x is None else x.stride() for x in now]  # of the operators, without what no call gives
        assert self.looks[: len(looks)] == looks and not any(self.looks[len(looks) :])

    def forward(self, stream, wants_lse, addresses, now):
        self.check(addresses, now)
        self.plans.called += 1
        self.plans.wanted_lse = wants_lse
        out, lse = tiled.forward(self.problem, Operands(*now))
        return out, lse if wants_lse else None

    def backward(self, stream, addresses, now):
        self.check(addresses, now)
        self.plans.backwards_called += 1
        return tiled.backward(self.problem, Operands(*now[:3], *now[7:]), Upstream(*now[3:7]))


@pytest.fixture
def plans(monkeypatch):
    """Of forwards: gradients are the operator's."""
    plans = Plans()
    monkeypatch.setattr(launches, "prepared", plans.prepared)
    monkeypatch.setattr(known_calls, "may_be_prepared", lambda x: True)
    for phase in ("forward", "backward"):  # the operators have none, but in the tests of those
        monkeypatch.setattr(prepared_calls, phase, lambda *call: None)
    prepared_calls.forget()
    yield plans
    prepared_calls.forget()


@pytest.fixture
def all_plans(plans):
    """Of backwards too."""
    plans.backwards = True
    return plans


def attention(t, **keywords):
    return strobe.attention(t.q, t.k, t.v, backend="tiled", **{**t.keywords, **keywords})


CASES = [Case(24, 40, mask="causal"), Case(16, 16, heads_q=4, heads_kv=2), Case(9, 30, mask="window")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_results_and_gradients(plans, monkeypatch, case):
    t = tensors(case, torch.float32, "cpu")
    short = run(t, "tiled"), run(t, "tiled")
    assert (plans.made, plans.called) == (1, 2)
    monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
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


def test_one_tensor_given_twice_or_thrice_is_no_plan_for_others(plans):
    q, k, v = torch.randn(3, 1, 8, 2, 16).unbind()
    for number, call in enumerate([(q, q, q), (q, k, k), (q, q, v), (q, k, q), (q, k, v)], 1):
        for _ in range(2):
            got = strobe.attention(*call, backend="tiled")
            torch.testing.assert_close(got, strobe.attention(*call, backend="torch_cpu"))
        assert (plans.made, plans.called) == (number, 2 * number)


def test_bounds_of_keys_that_are_those_of_queries_are_no_plan_for_others(plans):
    """Guards are given one object once, so that of which it is given must be told apart."""
    x, few, many = torch.randn(6, 2, 16), *(torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 2, 6], [0, 1, 2]))
    calls = [{"cu_seqlens_q": few, "cu_seqlens_kv": few}, {"cu_seqlens_q": few, "cu_seqlens_kv": many}]
    used = torch.tensor([1, 1], dtype=torch.int32)
    calls += [
        {**calls[0], "seqused_q": used, "seqused_kv": used},
        {**calls[0], "seqused_q": used},
        {**calls[0], "seqused_kv": used},
    ]
    for number, keywords in enumerate(calls, 1):
        for _ in range(2):
            got = strobe.attention(x, x.clone(), x.clone(), backend="tiled", **keywords)
        assert (plans.made, plans.called) == (number, 2 * number)
        with without_plans():
            torch.testing.assert_close(got, strobe.attention(x, x.clone(), x.clone(), backend="tiled", **keywords))


@pytest.mark.parametrize("name", ["dense", "thrice", "packed", "used", "documents", "bias", "all", "gradients"])
def test_what_is_repeated_is_recognised_by_its_guard(plans, monkeypatch, name):
    """To make a key, which takes longer, is for what was not seen lately."""
    keywords = beside(name, 0) if name in BESIDE else {}
    q, k, v = (x.detach().requires_grad_(name == "gradients") for x in leaves(name == "packed"))
    if name == "gradients":
        plans.backwards = True
    if name == "thrice":
        k = v = q

    def call():
        out = strobe.attention(q, k, v, backend="tiled", **keywords)
        return torch.autograd.grad(out.sum(), q) if name == "gradients" else out

    call()
    made = plans.made
    for module, function in ((prepared_calls, "_looks"), (known_calls, "likeness")):
        monkeypatch.setattr(module, function, lambda x: pytest.fail("a key was made"))
    call()
    assert plans.made == made == 1


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
    monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
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


def test_many_shapes_in_turn_find_their_plans(plans):
    """More of them than are tried by their guards."""
    given = [tensors(Case(9 + n, 20, mask="causal"), torch.float32, "cpu") for n in range(prepared_calls._LATEST + 3)]
    for _ in range(3):
        for t in given:
            assert attention(t).shape == t.q.shape
    assert (plans.made, plans.called) == (len(given), 3 * len(given))


MODES = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_for_each_mode(plans, mode):
    t = tensors(CASES[0], torch.float32, "cpu")
    for _ in range(2):
        out = attention(t)
        with MODES[mode]():
            torch.testing.assert_close(out, attention(t).float(), atol=3e-2, rtol=3e-2)  # autocast casts q, k, v
    assert (plans.made, plans.called) == (2, 4)


def test_a_plan_without_gradients_and_one_for_inference(plans):
    """PyTorch's guards tell the two modes apart, and so does the key: else the second would be looked up in every call."""
    t = tensors(CASES[0], torch.float32, "cpu")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            attention(t)
            attention(t)
    assert (plans.made, plans.called) == (2, 4)


def test_a_plan_for_the_same_bits(plans):
    t = tensors(CASES[0], torch.float32, "cpu").with_gradients()
    for deterministic in (False, True):
        attention(t, deterministic=deterministic)
    assert (plans.made, plans.called) == (2, 2)


def test_longest_sequences_that_are_no_plain_numbers(plans):
    """A bool that equals the number of an earlier call is refused; a tensor's number is the operator's to read."""
    q = torch.randn(2, 2, 16)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)

    def packed(longest):
        return strobe.attention(
            q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=1, backend="tiled"
        )

    want = packed(1)
    with pytest.raises(TypeError, match="max_seqlen_q must be an int, got bool"):
        packed(True)
    assert torch.equal(packed(torch.tensor(1)), want) and torch.equal(packed(torch.tensor(1)), want)
    assert (plans.made, plans.called) == (1, 1)


def test_what_is_no_plain_tensor_is_refused_after_one_of_its_looks(plans):
    t = tensors(CASES[1], torch.float32, "cpu")
    attention(t)
    nested = torch.nested.nested_tensor(list(t.q.unbind()))
    for bad in (nested, t.q.to_sparse(), t.q.to_mkldnn()):
        with pytest.raises(TypeError, match=r"q must be a (plain|dense) tensor"):
            attention(replace(t, q=bad))
        with pytest.raises(TypeError, match=r"bias must be a (plain|dense) tensor"):
            attention(t, score=strobe.Score(bias=bad))
    assert plans.called == 1


def test_a_view_of_the_other_sign_is_the_operators(all_plans):
    """Its memory holds -x."""
    t = tensors(CASES[1], torch.float32, "cpu")
    want = attention(replace(t, q=-t.q))
    assert torch.equal(attention(replace(t, q=torch._neg_view(t.q))), want)
    assert all_plans.called == 1
    bias = torch.randn(1, 1, 16, 16)
    want = attention(t, score=strobe.Score(bias=-bias))
    assert torch.equal(attention(t, score=strobe.Score(bias=torch._neg_view(bias))), want)
    assert all_plans.called == 2
    q = t.q.clone().requires_grad_()
    out = attention(replace(t, q=q))
    want = torch.autograd.grad(out, q, -out.detach(), retain_graph=True)
    assert torch.equal(*torch.autograd.grad(out, q, torch._neg_view(out.detach())), *want)
    assert all_plans.backwards_called == 1


def test_dropout_draws_once_a_call(all_plans, monkeypatch):
    t = tensors(CASES[0], torch.float32, "cpu")

    def three():
        torch.manual_seed(5)
        results = []
        for p in (0.3, 0.3, 0.7):
            qkv = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
            out = strobe.attention(*qkv, dropout_p=p, backend="tiled", **t.keywords)
            results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
        return results, torch.get_rng_state()

    got, state = three()
    assert (all_plans.made, all_plans.called, all_plans.backwards_made, all_plans.backwards_called) == (2, 3, 2, 3)
    assert not torch.equal(got[0][0], got[1][0])
    monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
    want, operators_state = three()
    assert all_plans.called == 3 and torch.equal(state, operators_state)
    for ours, operators in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, operators, strict=True))


def test_errors_are_the_same(plans, monkeypatch):
    t = tensors(CASES[0], torch.float32, "cpu")
    attention(t)
    attention(t, scale=1)
    bad = [
        (TypeError, {"scale": True}),
        (TypeError, {"scale": [1]}),
        (TypeError, {"mask": "causal"}),
        (TypeError, {"score": 3}),
        (ValueError, {"scale": float("nan")}),
        (ValueError, {"max_seqlen_q": 3}),
        (ValueError, {"dropout_p": 1.0}),
        (TypeError, {"dropout_p": "0.1"}),
        (TypeError, {"dropout_p": False}),
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
            monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
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
    _, tangent = torch.func.jvp(lambda q: attention(replace(t, q=q)), (t.q,), (t.q.cos(),))
    with forward_ad.dual_level():
        dual = attention(replace(t, q=forward_ad.make_dual(t.q, t.q.cos())))
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent) and tangent.any()
    assert plans.called == 1


def beside(name: str, number: int) -> dict:
    """Keywords that bring tensors beside q, k, v [2, 24, 4, 16], or [48, 4, 16] of packed sequences: look-alikes for every
    number."""
    random = torch.Generator().manual_seed(number)
    packed = {"cu_seqlens_q": (cu := torch.tensor([0, 20 + number, 48], dtype=torch.int32)), "cu_seqlens_kv": cu}
    used = {"seqused_q": torch.tensor([24, 9 + number], dtype=torch.int32)}
    used["seqused_kv"] = torch.tensor([13 - number, 24], dtype=torch.int32)
    documents = strobe.Document(torch.arange(24, dtype=torch.int32).sub(number).div(7, rounding_mode="floor").expand(2, 24))
    bias = torch.randn(2, 1, 24, 1, generator=random).expand(2, 4, 24, 24)
    slopes, sinks = torch.rand(2, 4, generator=random), torch.randn(4, generator=random)
    return {
        "packed": packed | {"mask": strobe.Causal()},
        "used": used,
        "documents": {"mask": documents & strobe.Causal()},
        "slopes": {"score": strobe.Score(alibi=slopes)},
        "bias": {"score": strobe.Score(bias=bias)},
        "sinks": {"score": strobe.Score(sinks=sinks)},
        "all": used | {"mask": documents, "score": strobe.Score(alibi=slopes, bias=bias, sinks=sinks)},
    }[name]


BESIDE = ["packed", "used", "documents", "slopes", "bias", "sinks", "all"]


def leaves(packed: bool = False) -> list[torch.Tensor]:
    shape = (48, 4, 16) if packed else (2, 24, 4, 16)
    return [torch.randn(shape, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)]


@pytest.mark.parametrize("backwards", [True, False], ids=["plans", "operator's backward"])
@pytest.mark.parametrize("name", BESIDE)
def test_gradients_beside_other_tensors(plans, monkeypatch, name, backwards):
    """Of look-alikes, each with its own tensors."""
    if backwards:
        plans.backwards = True
    qkv = leaves(name == "packed")

    def trained(number):
        out, lse = strobe.attention(*qkv, return_lse=True, backend="tiled", **beside(name, number))
        alone = torch.autograd.grad(out, qkv, upstream(out, lse)[0], retain_graph=True)
        return out, lse, *alone, *torch.autograd.grad((out, lse), qkv, upstream(out, lse))

    short = trained(0), trained(1), trained(0)
    assert (plans.made, plans.called) == (1, 3)
    want = (2, 6) if backwards else (0, 0)  # each once without a gradient of the LSE, and once with it
    assert (plans.backwards_made, plans.backwards_called) == want
    monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
    operators = trained(0), trained(1), trained(0)
    for got, want in zip(short, operators, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not torch.equal(short[0][2], short[1][2])


@pytest.mark.parametrize("backwards", [True, False], ids=["plans", "operator's backward"])
@pytest.mark.parametrize("names", [["bias"], ["sinks"], ["bias", "sinks"]], ids=str)
def test_what_is_learned(plans, monkeypatch, names, backwards):
    """A bias or sinks, with gradients of q, k and v or alone, and beside the other one, which is not learned."""
    if backwards:
        plans.backwards = True
    score = beside("all", 0)["score"]
    learned = {name: getattr(score, name).clone().requires_grad_() for name in names}

    def trained(qkv):
        out = strobe.attention(*qkv, score=replace(score, **learned), backend="tiled")
        wanted = [x for x in (*qkv, *learned.values()) if x.requires_grad]
        return out, *torch.autograd.grad(out.square().sum(), wanted)

    ways = leaves(), [x.detach() for x in leaves()]
    short = [trained(qkv) for qkv in (*ways, *ways)]
    assert (plans.made, plans.called) == (2, 4)
    assert (plans.backwards_made, plans.backwards_called) == ((2, 4) if backwards else (0, 0))
    with torch.no_grad():
        strobe.attention(*leaves(), score=replace(score, **learned), backend="tiled")
    strobe.attention(*leaves(), score=score, backend="tiled").sum().backward()
    assert (plans.made, plans.called) == (4, 6)
    monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
    for got, want in zip(short, [trained(qkv) for qkv in (*ways, *ways)], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("short", [True, False], ids=["short way", "operator"])
@pytest.mark.parametrize("name", BESIDE[:-1])
def test_what_a_backward_needs_must_not_change_before(all_plans, monkeypatch, name, short):
    if not short:
        monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
    keywords = beside(name, 0)
    mask, score = keywords.get("mask", strobe.Full()), keywords.get("score", strobe.Score())
    found = [x for x in keywords.values() if isinstance(x, torch.Tensor)]
    found += [x for x in (score.alibi, score.bias, score.sinks) if x is not None]
    found += [] if mask.documents is None else [mask.documents.q]
    for x in found:
        out = strobe.attention(*leaves(name == "packed"), backend="tiled", **keywords)
        (x._base if x._base is not None else x).add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert all_plans.called == (len(found) if short else 0) and all_plans.backwards_called == 0


def test_backwards_that_look_different_have_plans_of_their_own(all_plans):
    """By the strides of the output's gradient, whether the LSE has one, and whether all algorithms are deterministic."""
    qkv = leaves()

    def gradient(dout, dlse=None):
        out, lse = strobe.attention(*qkv, return_lse=True, backend="tiled")
        return torch.autograd.grad((out, lse)[: 2 - (dlse is None)], qkv, (dout, dlse)[: 2 - (dlse is None)])

    dout = torch.randn(2, 24, 4, 16)
    want = gradient(dout)
    others = (dout.transpose(1, 2).contiguous().transpose(1, 2), None), (dout, torch.zeros(2, 4, 24))
    for number, other in enumerate(others, 2):
        torch.testing.assert_close(gradient(*other), want)
        assert all_plans.backwards_made == number
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(gradient(dout), want)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(gradient(dout), want)
    assert (all_plans.made, all_plans.backwards_made, all_plans.backwards_called) == (1, 4, 5)


@pytest.mark.parametrize("name", ["q, k and v", "bias"])
def test_hooks_may_bring_what_lies_otherwise(all_plans, name):
    """What hooks of saved tensors give a backward has the shapes that the forward saw, and strides of its own."""
    wide, bias = torch.randn(2, 24, 3, 4, 16), torch.randn(2, 1, 24, 1).expand(2, 4, 24, 24)
    qkv = [x.detach().requires_grad_() for x in wide.unbind(2)] if name != "bias" else leaves()
    score = strobe.Score(bias=bias if name == "bias" else bias.contiguous())

    def gradient():
        return torch.autograd.grad(strobe.attention(*qkv, score=score, backend="tiled").square().sum(), qkv)

    want = gradient()
    with saved_tensors_hooks(lambda x: x.detach().clone(memory_format=torch.contiguous_format), lambda x: x):
        torch.testing.assert_close(gradient(), want)
    torch.testing.assert_close(gradient(), want)
    assert (all_plans.made, all_plans.backwards_made, all_plans.backwards_called) == (1, 2, 3)


def test_lengths_that_the_device_checks_are_the_operators(all_plans, monkeypatch):
    monkeypatch.setenv("STROBE_DEBUG", "1")
    for name in ("packed", "used"):
        strobe.attention(*leaves(name == "packed"), backend="tiled", **beside(name, 0)).sum().backward()
    assert all_plans.made == all_plans.backwards_made == 0


def test_a_gradient_of_the_lse_alone_is_the_operators(all_plans):
    q, k, v = leaves()
    _, lse = strobe.attention(q, k, v, return_lse=True, backend="tiled")
    got = torch.autograd.grad(lse.sum(), q)
    _, lse = strobe.attention(q, k, v, return_lse=True, backend="torch_cpu")
    torch.testing.assert_close(got, torch.autograd.grad(lse.sum(), q))
    assert (all_plans.called, all_plans.backwards_called) == (1, 0)


def test_many_gradients_at_once_are_the_operators(all_plans):
    q, k, v = leaves()
    out = strobe.attention(q, k, v, backend="tiled")
    dout = torch.randn(3, *out.shape)
    got = torch.autograd.grad(out, (q, k, v), dout, is_grads_batched=True, retain_graph=True)
    assert (all_plans.called, all_plans.backwards_called) == (1, 0)
    for number in range(3):
        want = torch.autograd.grad(out, (q, k, v), dout[number], retain_graph=True)
        torch.testing.assert_close([x[number] for x in got], list(want))


@pytest.mark.parametrize("backwards", [True, False], ids=["plans", "operator's backward"])
def test_checkpoints(plans, monkeypatch, backwards):
    """They allow a backward to ask for what was saved once."""
    if backwards:
        plans.backwards = True
    q, k, v = leaves()

    def loss(q):
        return strobe.attention(q, k, v, backend="tiled", **beside("all", 0)).square().sum()

    (got,) = torch.autograd.grad(checkpoint(loss, q, use_reentrant=False), q)
    assert plans.backwards_called == backwards
    assert torch.equal(got, torch.autograd.grad(loss(q), q)[0])


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
    table = ClockCache(3)
    for key in "abc":
        table.put(key, key.upper())
    assert table.get("a") == "A"
    table.put("d", "D")
    assert len(table) == 3 and [table.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    for key in "efghi":
        table.put(key, key)
    assert len(table) == 3 and table.get("i") == "i"


# ---- operators


@pytest.fixture
def operators(monkeypatch):
    """Plans of the operators alone, which compilers run."""
    plans = Plans()
    monkeypatch.setattr(launches, "prepared", plans.prepared)
    plans.backwards = True
    monkeypatch.setattr(prepared_calls, "attention", lambda *call: None)
    monkeypatch.setattr(known_calls, "may_be_prepared", lambda x: True)
    prepared_calls.forget()
    yield plans
    prepared_calls.forget()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_have_plans(operators, case):
    t = tensors(case, torch.float32, "cpu")
    got = run(t, "tiled"), run(t, "tiled")
    made = operators.made, operators.called, operators.backwards_made, operators.backwards_called
    assert made == (1, 2, 1, 2)
    with without_plans():
        want = run(t, "tiled")
    for one in got:
        for name in want.FIELDS:
            assert torch.equal(getattr(one, name), getattr(want, name)), name


@pytest.mark.parametrize("name", BESIDE)
def test_operators_beside_other_tensors(operators, name):
    """Look-alikes share a plan, each with its own tensors."""
    qkv = leaves(name == "packed")

    def trained(number):
        out = strobe.attention(*qkv, backend="tiled", **beside(name, number))
        return out, *torch.autograd.grad(out.square().sum(), qkv)

    got = trained(0), trained(1), trained(0)
    assert (operators.made, operators.called, operators.backwards_made, operators.backwards_called) == (1, 3, 1, 3)
    with without_plans():
        want = trained(0), trained(1), trained(0)
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [None, "packed", "sinks"])
def test_what_operators_repeat_is_recognised_by_its_guard(operators, monkeypatch, name):
    qkv = [x.detach() for x in leaves(name == "packed")]
    keywords = {} if name is None else beside(name, 0)
    strobe.attention(*qkv, backend="tiled", **keywords)
    monkeypatch.setattr(known_calls, "likeness", lambda x: pytest.fail("a key was made"))
    strobe.attention(*qkv, backend="tiled", **keywords)
    assert (operators.made, operators.called) == (1, 2)


def test_what_operators_tell_apart(operators):
    t = tensors(Case(24, 24, heads_q=4, heads_kv=4), torch.float32, "cpu")
    turned = t.q.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.empty(t.q.numel() + 1)[1:].view(t.q.shape).copy_(t.q)
    others = [{}, {"mask": strobe.Causal()}, {"scale": 0.5}, {"score": strobe.Score(softcap=2.0)}]
    others += [{"score": strobe.Score(function=halved)}, {"score": strobe.Score(function=half)}]
    given = [(t, keywords) for keywords in others] + [(replace(t, q=q), {}) for q in (turned, shifted, t.q[:, :-1])]
    got = [attention(x, **keywords) for x, keywords in given + given]
    assert (operators.made, operators.called) == (len(given), 2 * len(given))
    with without_plans():
        assert all(torch.equal(x, attention(y, **keywords)) for x, (y, keywords) in zip(got, given + given, strict=True))


def test_what_compilers_make_finds_plans(operators):
    t = tensors(CASES[0], torch.float32, "cpu").with_gradients()
    compiled = torch.compile(lambda q, k, v: strobe.attention(q, k, v, backend="tiled", **t.keywords), backend="aot_eager")
    for number in (1, 2, 3):
        out = compiled(t.q, t.k, t.v)
        got = torch.autograd.grad(out.square().sum(), (t.q, t.k, t.v))
        assert (operators.called, operators.backwards_called) == (number, number)
    assert (operators.made, operators.backwards_made) == (1, 1)
    with without_plans():
        want = attention(t)
        assert torch.equal(out, want)
        gradients = torch.autograd.grad(want.square().sum(), (t.q, t.k, t.v))
    assert all(torch.equal(x, y) for x, y in zip(got, gradients, strict=True))


def test_deterministic_algorithms_are_another_plan_of_an_operator(operators):
    t = tensors(CASES[0], torch.float32, "cpu")
    run(t, "tiled")
    torch.use_deterministic_algorithms(True)
    try:
        run(t, "tiled")
    finally:
        torch.use_deterministic_algorithms(False)
    assert (operators.made, operators.backwards_made) == (1, 2)


def test_what_a_launch_is_given_of_a_workspace_is_aligned():
    """Otherwise Triton compiles kernels once more for some sizes, and those that were compiled ahead are not found."""
    buffers = Buffers({"out": Buffer((3,), torch.float32)}, notes={"row_notes": 5, "key_notes": 3})
    made = launches.allocated(buffers, {"q": torch.empty(1)})
    addresses = {x.data_ptr() for x in (made.counters, made.redone, made.row_notes, made.key_notes)}
    assert len(addresses) == 4 and not any(address % 16 for address in addresses)
    assert made.row_notes.numel() >= 5 and made.key_notes.numel() >= 3 and made.redone.numel() == 1
