"""The Hopper backward on a GPU: against float64, with poison, in graphs and streams, past 2^31 elements, bit for bit."""

from dataclasses import replace

import pytest
import torch
from problems import CASES, Case, Results, Tensors, check, formula, run, tensors, upstream, without_plans

import strobe
from strobe.call import prepared_calls
from strobe.call.dispatch import explain_problem
from strobe.device import KNOWN
from strobe.kernels.sm90 import backward_launch
from strobe.problem import AttentionProblem, Dense

pytestmark = pytest.mark.gpu

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))

TAKEN = [case for case in CASES if case.n_q and case.n_kv and case.batch and case.scale is None]

GRADIENT_CASES = [
    *(
        Case(n_q, n_kv, heads_q=heads_q, heads_kv=heads_kv, head_dim=dims[0], head_dim_v=dims[1], mask=mask)
        for dims in DIMS
        for mask in ("full", "causal", "window", "prefix")
        for n_q, n_kv, heads_q, heads_kv in ((512, 512, 4, 4), (1, 300, 4, 1), (333, 777, 4, 2), (777, 333, 2, 2), (1, 1, 1, 1))
    ),
    *(Case(200, 260, heads_q=4, head_dim=head_dim, mask="causal") for head_dim in range(8, 257, 24)),
    *(Case(300, 500, head_dim=d, head_dim_v=d_v, mask="causal") for d, d_v in ((64, 256), (256, 64), (40, 96), (128, 8))),
    *(
        Case(700, 900, batch=7, heads_q=4, head_dim=dims[0], head_dim_v=dims[1], mask=mask, packed=True)
        for dims in DIMS
        for mask in ("full", "causal", "window")
    ),
    *(
        Case(700, 700, head_dim=dim, mask=mask, logits=x)
        for dim in (64, 128)
        for mask in ("full", "causal")
        for x in (10.0, 100.0)
    ),
    Case(3000, 100, heads_q=20, heads_kv=4, head_dim=64, mask="causal"),  # most keys are seen by few
    # Many blocks a CTA, of one tile or two.
    *(Case(100, 200, batch=40, heads_q=32, head_dim=dim, mask=mask) for dim in (64, 96, 128) for mask in ("causal", "full")),
    *TAKEN,
]


@pytest.mark.parametrize(
    "case, dtype",
    [*((case, torch.bfloat16) for case in GRADIENT_CASES), *((case, torch.float16) for case in TAKEN)],
    ids=str,
)
def test_against_reference(case, dtype):
    t = tensors(case, dtype, "cuda")
    check(run(t, "sm90"), t)


@pytest.mark.parametrize("shape", [(1, 4, 1, 500), (2, 1, 300, 1), (1, 1, 1, 1), (1, 4, 300, 500), (2, 4, 300, 500)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_bias_may_be_repeated(head_dim, shape):
    t = tensors(Case(300, 500, heads_q=4, head_dim=head_dim, head_dim_v=min(head_dim, 128)), torch.bfloat16, "cuda")
    t = replace(t, keywords=t.keywords | {"score": strobe.Score(bias=torch.randn(shape, device="cuda"))})
    check(run(t, "sm90"), t)
    again = [run(replace(t, keywords=t.keywords | {"deterministic": True}), "sm90") for _ in range(5)]
    check(again[0], t)
    assert all(torch.equal(getattr(again[0], name), getattr(x, name)) for x in again for name in ("dq", "dk", "dv", "dbias"))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_deterministic(dims, mask):
    case = Case(700, 900, heads_q=4, heads_kv=2, head_dim=dims[0], head_dim_v=dims[1], mask=mask)
    t = tensors(case, torch.bfloat16, "cuda")
    t = replace(t, keywords={**t.keywords, "deterministic": True})
    first = run(t, None)
    check(first, replace(t, keywords={k: x for k, x in t.keywords.items() if k != "deterministic"}))
    for _ in range(10):
        again = run(t, None)
        assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("dq", "dk", "dv"))


DETERMINISTIC_CASES = [
    *(
        Case(n_q, n_kv, batch=3, heads_q=4, heads_kv=2, head_dim=dims[0], head_dim_v=dims[1], mask=mask)
        for dims in (*DIMS, (64, 256))
        for mask in ("full", "causal", "window", "prefix")
        for n_q, n_kv in ((333, 777), (777, 333))
    ),
    *(
        Case(700, 900, batch=7, heads_q=4, head_dim=dims[0], head_dim_v=dims[1], mask=mask, packed=True)
        for dims in DIMS
        for mask in ("full", "causal", "window")
    ),
    *TAKEN,
    *(replace(case, head_dim=256) for case in TAKEN if case.head_dim_v is None and not case.function),
]


@pytest.mark.parametrize("at_once", [1, None], ids=["turns", "at once"])
@pytest.mark.parametrize("case", DETERMINISTIC_CASES, ids=str)
def test_deterministic_against_reference(case, at_once, monkeypatch):
    """dQ has an order, or dS is stored, where it can be; turns: of one key head at a time."""
    t = tensors(case, torch.bfloat16, "cuda")
    if at_once:
        monkeypatch.setattr(backward_launch, "stored_heads", lambda problem: at_once)
    with without_plans():
        check(run(replace(t, keywords={**t.keywords, "deterministic": True}), "sm90"), t)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_on_a_busy_gpu(head_dim, alone):
    """Matrix products run beside it on another stream, so that thread blocks and copies meet in another order every time."""
    q, k, v, dout = torch.randn(4, 4, 4096, 2048 // head_dim, head_dim, dtype=torch.bfloat16, device="cuda")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = strobe.attention(q, k, v, deterministic=True)
    first, beside = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), torch.cuda.Stream()
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    with alone():
        for _ in range(20):
            with torch.cuda.stream(beside):
                for _ in range(8):
                    x @ x
            grads = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_poison_reaches_only_what_sees_it(dims):
    """A NaN in a row of q, and one in a key and a value, under a causal mask; then, on the same stream, none."""
    case = Case(500, 500, head_dim=dims[0], head_dim_v=dims[1], mask="causal")
    clean = formula(tensors(case, torch.bfloat16, "cuda"))

    def same(got, want):
        torch.testing.assert_close(got.double(), want, atol=4e-2, rtol=4e-2)

    t = tensors(case, torch.bfloat16, "cuda")
    t.q[:, 100] = float("nan")
    results = run(t, "sm90")
    same(results.dk[:, 101:], clean.dk[:, 101:])
    same(results.dv[:, 101:], clean.dv[:, 101:])
    same(results.dq[:, :100], clean.dq[:, :100])
    same(results.dq[:, 101:], clean.dq[:, 101:])
    assert results.dv[:, :101].isnan().all()

    t = tensors(case, torch.bfloat16, "cuda")
    t.k[:, 200] = float("nan")
    t.v[:, 333] = float("inf")
    results = run(t, "sm90")
    same(results.dq[:, :200], clean.dq[:, :200])
    assert results.dq[:, 200:].isnan().all()

    t = tensors(case, torch.bfloat16, "cuda")
    check(run(t, "sm90"), t)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_delta_that_is_no_number_stays_out_of_dv(head_dim):
    """An infinity in V makes every delta NaN, and with it dQ and dK, but no weight."""
    t = tensors(Case(300, 300, head_dim=head_dim), torch.bfloat16, "cuda")
    clean = run(t, "sm90")
    t.v[:, 33] = float("inf")
    results = run(t, "sm90")
    torch.testing.assert_close(results.dv, clean.dv, atol=4e-2, rtol=4e-2)
    assert results.dq.isnan().all() and results.dk.isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_scale_makes_no_difference(head_dim):
    """The LSE divided by it is what the products subtract: queries times a power of two, divided by it again."""
    q, k, v, dout = (torch.randn(2, 300, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def gradients(power: int):
        leaves = [x.clone().requires_grad_() for x in (q * 2.0**power, k, v)]
        out = strobe.attention(*leaves, mask=strobe.Causal(), scale=0.125 * 2.0**-power, backend="sm90")
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return dq * 2.0**power, dk, dv

    for power in (-60, -10, 10, 60):
        for got, want in zip(gradients(power), gradients(0), strict=True):
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_strides_and_expanded_gradients(head_dim):
    t = tensors(Case(260, 300, heads_q=4, heads_kv=4, head_dim=head_dim, mask="causal"), torch.bfloat16, "cuda")
    t = replace(t, **{name: getattr(t, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"})
    check(run(t, "sm90"), t)
    leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    strobe.attention(*leaves, backend="sm90", **t.keywords).sum().backward()
    plain = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    strobe.attention(*plain, backend="portable", **t.keywords).sum().backward()
    for got, want in zip(leaves, plain, strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_plan_and_the_operator_give_the_same(head_dim):
    t = tensors(Case(300, 300, heads_q=4, heads_kv=2, head_dim=head_dim, mask="causal"), torch.bfloat16, "cuda")
    by_plan = run(t, "sm90")
    with without_plans():
        by_operator = run(t, "sm90")
    for name in ("out", "dk", "dv"):
        assert torch.equal(getattr(by_plan, name), getattr(by_operator, name)), name
    torch.testing.assert_close(by_plan.dq, by_operator.dq)


ALL = "used+documents+slopes+bias+sinks"
BESIDE = ("packed", "packed+used+sinks", "used", "documents", "slopes", "bias", "sinks", "documents+slopes+sinks", ALL)
LENGTH = 300


def beside(names: str, number: int = 0) -> dict:
    """Keywords of causal attention that bring tensors beside q, k, v [2, 300, 4, D], or [600, 4, D] of packed sequences: for
    every number others that look the same."""
    kinds = names.split("+")
    random = torch.Generator("cuda").manual_seed(number)

    def lengths(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def uniform(*shape):
        return torch.rand(shape, generator=random, device="cuda")

    keywords, mask = {}, strobe.Causal()
    if "packed" in kinds:
        cu = lengths(0, 130, 130 + 90 * number, 600)
        keywords |= dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=470, max_seqlen_kv=470)
    if "used" in kinds:
        of_q, of_kv = ((100, 0, 280), (77, 0, 290)) if "packed" in kinds else ((300, 211 + number), (170 - number, 300))
        keywords |= dict(seqused_q=lengths(*of_q), seqused_kv=lengths(*of_kv))
    if "documents" in kinds:
        ids = torch.arange(LENGTH, device="cuda", dtype=torch.int32).div(70 + 9 * number, rounding_mode="floor")
        mask = mask & strobe.Document(ids.expand(2, LENGTH).contiguous())
    slopes = uniform(3 if "packed" in kinds else 2, 4) if "slopes" in kinds else None
    bias = uniform(2, 1, 1, LENGTH) if "bias" in kinds else None
    sinks = uniform(4) if "sinks" in kinds else None
    return keywords | dict(mask=mask, score=strobe.Score(alibi=slopes, bias=bias, sinks=sinks))


def given(keywords: dict) -> list[torch.Tensor]:
    """The tensors among keywords."""
    documents, score = keywords["mask"].documents, keywords["score"]
    of_mask = () if documents is None else (documents.q, documents.kv)
    return [x for x in (*keywords.values(), *of_mask, score.alibi, score.bias, score.sinks) if isinstance(x, torch.Tensor)]


def leaves(head_dim: int, names: str) -> list[torch.Tensor]:
    shape = (2 * LENGTH, 4, head_dim) if "packed" in names else (2, LENGTH, 4, head_dim)
    return [x.requires_grad_() for x in torch.randn(3, *shape, device="cuda").bfloat16().unbind()]


def trained(qkv: list[torch.Tensor], with_lse: bool = True, **keywords) -> Results:
    """with_lse: whether the LSE has a gradient, too."""
    out, lse = strobe.attention(*qkv, return_lse=True, backend="sm90", **keywords)
    dout, dlse = upstream(out, lse)
    outputs, upstreams = ((out, lse), (dout, dlse)) if with_lse else ((out,), (dout,))
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(outputs, qkv, upstreams))


def same(got: Results, want: Results, dq: bool) -> None:
    """Bit for bit; dq: there too, where no atomic additions sum it."""
    for name in Results.FIELDS:
        exact = dict(rtol=0, atol=0) if dq or name != "dq" else {}
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), **exact, msg=lambda text, name=name: f"{name}: {text}"
        )


def backwards_planned() -> int:
    """How many plans there are of backwards."""
    backwards = [entry.backward for entry, _ in prepared_calls._known._entries.values()]
    plans = [plan for table in backwards for (plan,), _ in table._prepared._entries.values()]
    return sum(plan is not None for plan in plans)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("names", BESIDE)
def test_a_plan_and_the_operator_give_the_same_beside_other_tensors(names, head_dim):
    """Of calls in a row whose other tensors look the same, with and without a gradient of the LSE; against float64, too."""
    prepared_calls.forget()
    qkv, keywords = leaves(head_dim, names), [beside(names, number) for number in (0, 1, 2)]
    ways = [(one, with_lse) for one in keywords for with_lse in (True, False)]
    by_plan = [trained(qkv, with_lse, **one) for one, with_lse in ways]
    assert len(prepared_calls._known) == 1 and backwards_planned() == 2
    with without_plans():
        by_operator = [trained(qkv, with_lse, **one) for one, with_lse in ways]
    for got, want in zip(by_plan, by_operator, strict=True):
        same(got, want, head_dim == 256)
    assert not torch.equal(by_plan[0].dk, by_plan[2].dk)
    for got, one in zip(by_plan[::2], keywords, strict=True):
        check(got, Tensors(*(x.detach() for x in qkv), one), Results.FIELDS)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("names", [["bias"], ["sinks"], ["bias", "sinks"]], ids=str)
def test_a_plan_and_the_operator_learn_the_same(names, head_dim):
    """A bias of every pair, to whose gradient each tile writes its own part, and sinks; of calls in a row."""
    prepared_calls.forget()
    qkv, learned = leaves(head_dim, "used"), []
    for _ in range(2):
        one = {"bias": torch.randn(2, 4, LENGTH, LENGTH, device="cuda").bfloat16(), "sinks": torch.randn(4, device="cuda")}
        learned.append({name: one[name].requires_grad_() for name in names})

    def trained_by(one):
        out = strobe.attention(*qkv, mask=strobe.Causal(), score=strobe.Score(**one), backend="sm90")
        dq, dk, dv, *others = torch.autograd.grad(out, [*qkv, *one.values()], torch.ones_like(out))
        return Results(out.detach(), None, dq, dk, dv), others

    by_plan = [trained_by(one) for one in learned]
    assert len(prepared_calls._known) == backwards_planned() == 1
    with without_plans():
        by_operator = [trained_by(one) for one in learned]
    for (got, ours), (want, operators) in zip(by_plan, by_operator, strict=True):
        assert torch.equal(got.out, want.out) and torch.equal(got.dk, want.dk) and torch.equal(got.dv, want.dv)
        assert all(torch.equal(x, y) for x, y in zip(ours, operators, strict=True))
        torch.testing.assert_close(got.dq, want.dq)
    assert not any(torch.equal(x, y) for x, y in zip(by_plan[0][1], by_plan[1][1], strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_plan_and_the_operator_drop_the_same(head_dim):
    prepared_calls.forget()
    qkv = leaves(head_dim, "used")

    def three():
        torch.manual_seed(7)
        return [trained(qkv, mask=strobe.Causal(), dropout_p=p) for p in (0.2, 0.2, 0.6)]

    by_plan = three()
    assert len(prepared_calls._known) == backwards_planned() == 2
    with without_plans():
        by_operator = three()
    for got, want in zip(by_plan, by_operator, strict=True):
        same(got, want, head_dim == 256)
    assert not torch.equal(by_plan[0].out, by_plan[1].out)


@pytest.mark.parametrize("names", ["packed", ALL])
def test_deterministic_beside_other_tensors(names):
    """In two passes at every head dim."""
    qkv, keywords = leaves(64, names), beside(names) | {"deterministic": True}
    first = trained(qkv, **keywords)
    for _ in range(5):
        same(trained(qkv, **keywords), first, True)
    with without_plans():
        same(trained(qkv, **keywords), first, True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_other_tensors_that_hooks_bring(head_dim):
    """Copies that hooks of saved tensors give a backward lie otherwise than what the forward had."""
    wide = torch.randn(2, LENGTH, 3, 4, head_dim, device="cuda").bfloat16()
    qkv = [x.detach().requires_grad_() for x in wide.unbind(2)]
    bias = torch.rand(2, 1, 1, LENGTH, device="cuda").expand(2, 4, LENGTH, LENGTH)
    keywords = {"mask": strobe.Causal(), "score": strobe.Score(bias=bias)}
    want = trained(qkv, **keywords)
    with torch.autograd.graph.save_on_cpu():
        hooked = trained(qkv, **keywords)
    for got in (hooked, trained(qkv, **keywords)):
        for name in Results.FIELDS:
            torch.testing.assert_close(getattr(got, name), getattr(want, name))


def captured(step):
    """A graph of a step, after one on another stream, and what its replays fill."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    return graph, got


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("names", ["packed", "used", ALL])
def test_a_graph_beside_other_tensors(names, head_dim):
    """Replays see what the other tensors hold by then."""
    qkv, static = leaves(head_dim, names), beside(names)
    dout = torch.randn_like(qkv[0])

    def step():
        out, lse = strobe.attention(*qkv, return_lse=True, backend="sm90", **static)
        return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, qkv, dout))

    graph, got = captured(step)
    for number in (1, 0, 2):
        for mine, other in zip(given(static), given(beside(names, number)), strict=True):
            mine.copy_(other)
        want = step()
        graph.replay()
        torch.cuda.synchronize()
        same(got, want, head_dim == 256)


def test_streams_at_once_beside_other_tensors():
    kinds = [(64, "packed"), (256, "documents"), (64, ALL)]
    inputs = [(leaves(head_dim, names), beside(names)) for head_dim, names in kinds]
    want = [trained(qkv, **keywords) for qkv, keywords in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        got = []
        for stream, (qkv, keywords) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(trained(qkv, **keywords))
        torch.cuda.synchronize()
        for (head_dim, _), mine, alone in zip(kinds, got, want, strict=True):
            same(mine, alone, head_dim == 256)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_graph_of_forward_and_backward(head_dim):
    case = Case(500, 500, heads_q=4, heads_kv=2, head_dim=head_dim, mask="causal")
    inputs = [tensors(case, torch.bfloat16, "cuda", seed) for seed in range(3)]
    inputs[1].q[:, 100] = float("nan")  # noted blocks in one replay, none in the next
    static = tensors(case, torch.bfloat16, "cuda", 7)
    leaves = [x.requires_grad_() for x in (static.q, static.k, static.v)]
    dout = torch.randn(2, 500, 4, head_dim, device="cuda", dtype=torch.bfloat16)

    def step():
        out = strobe.attention(*leaves, backend="sm90", **static.keywords)
        return torch.autograd.grad(out, leaves, dout)

    graph, got = captured(step)
    for t in (*inputs, *inputs):
        for leaf, x in zip(leaves, (t.q, t.k, t.v), strict=True):
            leaf.data.copy_(x)
        want = step()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(got[1], want[1], equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(got[2], want[2], equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(got[0], want[0], equal_nan=True)


def test_streams_at_once():
    cases = [Case(600, 600, heads_q=4, head_dim=head_dim, mask="causal") for head_dim in (64, 128, 96, 256)]
    inputs = [tensors(case, torch.bfloat16, "cuda", seed) for seed, case in enumerate(cases)]
    want = [run(t, "sm90") for t in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        got = []
        for stream, t in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(t, "sm90"))
        torch.cuda.synchronize()
        for mine, alone in zip(got, want, strict=True):
            assert torch.equal(mine.dk, alone.dk) and torch.equal(mine.dv, alone.dv)


def test_compiled_whole():
    t = tensors(Case(200, 200, heads_q=4, heads_kv=2, head_dim=64, mask="causal"), torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
    compiled = torch.compile(lambda q, k, v: strobe.attention(q, k, v, **t.keywords), fullgraph=True)
    dout = torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16)
    got = torch.autograd.grad(compiled(*leaves), leaves, dout)
    want = torch.autograd.grad(strobe.attention(*leaves, **t.keywords), leaves, dout)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_extra_memory(head_dim):
    """For each row and head 32 bytes, 4 for each number of dQ, and under a mask 4 more: nothing that grows with S x S."""
    shape = (1, 8192, 8, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = strobe.attention(*leaves, mask=strobe.Causal(), backend="sm90")
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, dout)
    gradients = 3 * q.numel() * 2
    rows = 8192 * 8
    extra = torch.cuda.max_memory_allocated() - before - gradients
    assert extra <= rows * (32 + 4 + 4 * head_dim) + 2**21


@pytest.mark.usefixtures("much_memory")
def test_past_two_to_the_31_elements():
    batch, length, heads, head_dim = 2, 8192, 1025, 128
    assert batch * length * heads * head_dim > 2**31
    q, k, v, dout = (torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = strobe.Window(100, 0)
    got = torch.autograd.grad(strobe.attention(*leaves, mask=mask), leaves, dout)
    last = [x.detach()[1:, :, -1:].contiguous().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(strobe.attention(*last, mask=mask, backend="portable"), last, dout[1:, :, -1:].contiguous())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[1:, :, -1:], b, atol=4e-2, rtol=4e-2)


def test_it_is_chosen():
    problem = AttentionProblem(Dense(1, 256, 256), 2, 2, 128, 128, torch.bfloat16, 0.1, strobe.Causal(), phase="backward")
    assert explain_problem(problem, KNOWN["H200"]).chosen == "sm90"
