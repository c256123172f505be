"""Forward-mode AD and the transforms of torch.func: right, or refused in one sentence."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from problems import CASES, SEED, Case, _score_function, describe, tensors
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import strobe
from strobe.masks import Mask
from strobe.problem import LEARNED
from strobe.reference import dense
from strobe.scores import Score


def formula(q, k, v, mask=None, score=None, **keywords):
    """The specification, in whatever transforms stand around it: no tensor is written to."""
    return dense.attend(q, k, v, q.shape[-1] ** -0.5, mask or Mask(), score or Score())


def attention(q, k, v, **keywords):
    return strobe.attention(q, k, v, return_lse=True, **keywords)


def finite(results):
    """-inf, which the LSE of a row that sees nothing is, has no derivative."""
    return [x.nan_to_num(neginf=0.0) for x in results]


# ---- forward mode


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_mode_is_that_of_the_formula(case):
    """Of q, k, v, a bias and sinks at once."""
    t = tensors(case, torch.float64)
    score = t.keywords["score"]
    learned = {name: x.double() for name in LEARNED if (x := getattr(score, name)) is not None}
    if score.bias is not None:
        learned["bias"] = learned["bias"].contiguous()
    random = torch.Generator().manual_seed(3)
    primals = (t.q, t.k, t.v, *learned.values())
    tangents = tuple(torch.randn(x.shape, generator=random, dtype=x.dtype) for x in primals)
    torch.manual_seed(SEED)
    problem, operands = describe(t)

    def of_strobe(q, k, v, *others):
        torch.manual_seed(SEED)
        ours = replace(score, **{name: x if name == "bias" else x.float() for name, x in zip(learned, others, strict=True)})
        return strobe.attention(q, k, v, return_lse=True, backend="tiled", **{**t.keywords, "score": ours})

    def of_formula(q, k, v, *others):
        return dense.attention(problem, operands._replace(q=q, k=k, v=v, **dict(zip(learned, others, strict=True))))

    if "sinks" in learned:
        index = 3 + list(learned).index("sinks")
        tangents = tuple(x.float().double() if n == index else x for n, x in enumerate(tangents))
    results, got = jvp(of_strobe, primals, tangents)
    want_results, want = jvp(of_formula, primals, tangents)
    for a, b in zip((*finite(results), *got), (*finite(want_results), *want), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["tiled", "torch_cpu"])
def test_forward_mode_in_every_dtype(dtype, backend):
    t = tensors(Case(70, 90, heads_q=4, mask="causal"), dtype)
    tangents = tuple(torch.randn_like(x) for x in (t.q, t.k, t.v))
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(x, y) for x, y in zip((t.q, t.k, t.v), tangents, strict=True))
        got = [forward_ad.unpack_dual(x).tangent for x in attention(*duals, backend=backend, **t.keywords)]
    exact = tuple(x.double() for x in (t.q, t.k, t.v)), tuple(x.double() for x in tangents)
    _, want = jvp(lambda *qkv: formula(*qkv, **t.keywords), *exact)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    allowed = (16 if dtype == torch.float32 else 3) * torch.finfo(dtype).eps
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).abs().max() <= allowed * b.abs().max()


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_one_tangent_alone(which):
    qkv = torch.randn(3, 1, 9, 2, 16, dtype=torch.float64).unbind()
    t = torch.randn_like(qkv[0])

    def of_one(function):
        return lambda x: function(*qkv[:which], x, *qkv[which + 1 :])

    _, got = jvp(of_one(attention), (qkv[which],), (t,))
    _, want = jvp(of_one(formula), (qkv[which],), (t,))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_masked_out_reaches_no_tangent(poison):
    q, k, v, *tangents = torch.randn(6, 1, 20, 2, 16).unbind()
    mask = strobe.Window(left=4, right=0)

    def derivative(q, k, v, *tangents):
        return jvp(lambda *qkv: attention(*qkv, mask=mask), (q, k, v), tuple(tangents))[1]

    want = derivative(q, k[:, 10:], v[:, 10:], tangents[0], *(x[:, 10:] for x in tangents[1:]))
    for x in (k, v, *tangents[1:]):
        x[:, :10] = poison
    got = derivative(q, k, v, *tangents)
    torch.testing.assert_close(got[0][:, 14:], want[0][:, 14:])
    torch.testing.assert_close(got[1][:, :, 14:], want[1][:, :, 14:])


def test_forward_mode_through_flash_attns_doors():
    q, k, v, t = torch.randn(4, 2, 12, 2, 16, dtype=torch.float64).unbind()
    _, want = jvp(lambda q: formula(q, k, v, mask=strobe.Causal())[0], (q,), (t,))
    for packed in (
        lambda q: strobe.flash_attn_func(q, k, v, causal=True),
        lambda q: strobe.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True),
        lambda q: strobe.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True),
    ):
        torch.testing.assert_close(jvp(packed, (q,), (t,))[1], want)
    cu = torch.tensor([0, 12, 24], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v, t)]
    _, got = jvp(
        lambda q: strobe.flash_attn_varlen_func(q, flat[1], flat[2], cu, cu, 12, 12, causal=True), (flat[0],), (flat[3],)
    )
    torch.testing.assert_close(got, want.flatten(0, 1))


# ---- compositions


def loss(function):
    return lambda *qkv: sum(x.sin().sum() for x in function(*qkv))


TRANSFORMS = {
    "grad": lambda f: grad(loss(f), (0, 1, 2)),
    "jacrev": lambda f: jacrev(f, (0, 1, 2)),
    "jacfwd": lambda f: jacfwd(f, (0, 1, 2)),
    "vjp": lambda f: lambda *qkv: vjp(f, *qkv)[1]((qkv[1].cos(), qkv[1][..., 0].mT.cos())),
    "vmap": lambda f: lambda q, k, v: vmap(f, (0, None, 1))(torch.stack([q, k, v]), k, torch.stack([v, q, k], 1)),
    "vmap of vmap": lambda f: lambda *qkv: vmap(vmap(f))(*(x[None, None] for x in qkv)),
    "vmap of grad": lambda f: lambda *qkv: vmap(grad(loss(f), (0, 1, 2)))(*(torch.stack([x, -x]) for x in qkv)),
    "grad of vmap": lambda f: lambda *qkv: grad(
        lambda q: loss(vmap(f, (0, None, None)))(torch.stack([q, -q]), *qkv[1:])
    )(qkv[0]),
    "vmap of jvp": lambda f: lambda *qkv: vmap(lambda t: jvp(lambda q: f(q, *qkv[1:]), (qkv[0],), (t,)))(
        torch.stack([qkv[1], qkv[2]])
    ),
}  # fmt: skip


@pytest.mark.parametrize("keywords", [{}, {"mask": strobe.Causal()}, {"score": strobe.Score(softcap=2.0)}], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, keywords):
    """A batched dim becomes part of the batch; a score with a cap is the tiled backend's."""
    qkv = torch.randn(3, 1, 5, 2, 8, dtype=torch.float64).unbind()
    got, want = (TRANSFORMS[name](partial(function, **keywords))(*qkv) for function in (attention, formula))
    torch.testing.assert_close(got, want)


def beside(x):
    """A mask and a score of one entry of x [n, batch, ...], which has whatever may differ between entries."""
    return dict(
        mask=strobe.Causal() & strobe.Document(x["ids"]),
        score=strobe.Score(alibi=x["slopes"], bias=x["bias"], sinks=x["sinks"]),
    )


def test_every_other_tensor_may_be_batched():
    """Then each entry is a call."""
    n, batch, length, heads = 3, 2, 6, 2
    q, k, v = torch.randn(3, n, batch, length, heads, 8).unbind()
    x = dict(
        ids=torch.randint(0, 2, (n, batch, length), dtype=torch.int32).sort(-1).values,
        slopes=torch.rand(n, batch, heads),
        bias=torch.randn(n, batch, heads, length, length),
        sinks=torch.randn(n, heads),
    )

    def value(bias, sinks, q, k, v, x):
        return loss(lambda *qkv: attention(*qkv, **beside({**x, "bias": bias, "sinks": sinks})))(q, k, v)

    got = vmap(grad(value, (0, 1, 2)))(x["bias"], x["sinks"], q, k, v, x)
    for number in range(n):
        one = {name: y[number] for name, y in x.items()}
        want = grad(value, (0, 1, 2))(one["bias"], one["sinks"], q[number], k[number], v[number], one)
        torch.testing.assert_close([y[number] for y in got], list(want))


def test_functions_and_packed_sequences_see_each_entry():
    """A function knows the batch, so a batched dim cannot become part of it."""
    q, k, v = torch.randn(3, 4, 2, 10, 2, 8).unbind()
    keywords = dict(score=strobe.Score(function=_score_function))
    got = vmap(lambda *qkv: attention(*qkv, **keywords))(q, k, v)
    packed = [x.flatten(1, 2) for x in (q, k, v)]
    cu = torch.tensor([0, 3, 20], dtype=torch.int32)
    lengths = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu)
    of_packed = vmap(lambda *qkv: attention(*qkv, **lengths))(*packed)
    for number in range(4):
        torch.testing.assert_close([x[number] for x in got], list(attention(q[number], k[number], v[number], **keywords)))
        one = attention(*(x[number] for x in packed), **lengths)
        torch.testing.assert_close([x[number] for x in of_packed], list(one))


def test_vmap_over_nothing():
    nothing = torch.empty(0, 1, 4, 2, 8)
    assert vmap(lambda x: strobe.attention(x, x, x))(nothing).shape == nothing.shape
    with pytest.raises(ValueError, match="vmap over a dim of size 0 takes q, k and v alone"):
        vmap(lambda x: strobe.attention(x, x, x, score=strobe.Score(alibi=torch.ones(2))))(nothing)


def test_dropout_under_vmap_is_as_it_is_asked_to_be():
    x = torch.randn(1, 8, 2, 8).expand(4, -1, -1, -1, -1)

    def dropped(x):
        return strobe.attention(x, x, x, dropout_p=0.5)

    same, different = (vmap(dropped, randomness=randomness)(x) for randomness in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(dropped)(x)


@pytest.mark.parametrize(
    "case", [Case(4, 5, batch=1, head_dim=8, mask="causal"), Case(4, 4, batch=1, head_dim=8, sinks=True)], ids=str
)
def test_gradcheck(case):
    """PyTorch's own check by finite differences: both modes, each also batched."""
    t = tensors(case, torch.float64).with_gradients()
    assert torch.autograd.gradcheck(
        lambda *qkv: attention(*qkv, **t.keywords), (t.q, t.k, t.v), check_forward_ad=True, check_batched_grad=True,
        check_batched_forward_grad=True, fast_mode=True,
    )  # fmt: skip


def test_compiled_transforms():
    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    for transform in (grad(lambda q: loss(attention)(q, k, v)), vmap(lambda q: attention(q[None], k, v)[0])):
        compiled = torch.compile(transform, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q), transform(q))


# ---- what there is not


def square(q):
    return attention(q, q, q)[0].square().sum()


TWICE = {
    "grad of grad": lambda q: grad(lambda q: grad(square)(q).sum())(q),
    "grad of jvp": lambda q: grad(lambda q: jvp(square, (q,), (q,))[1])(q),
    "jvp of grad": lambda q: jvp(grad(square), (q,), (q,)),
    "jvp of jvp": lambda q: jvp(lambda q: jvp(square, (q,), (q.detach(),))[1], (q,), (q,)),
    "hessian": lambda q: hessian(square)(q),
    "backward of jvp": lambda q: jvp(square, (q.clone().requires_grad_(),), (q,))[1].backward(),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_refused(name):
    with pytest.raises(NotImplementedError, match="strobe has no second derivative"):
        TWICE[name](torch.randn(1, 4, 1, 8))


def test_what_has_no_derivative_is_refused():
    q = torch.randn(1, 4, 2, 8)
    slopes = torch.rand(2)
    with pytest.raises(ValueError, match="needs the derivative of the score function _score_function: pass it as"):
        jvp(lambda q: attention(q, q, q, score=strobe.Score(function=_score_function)), (q,), (q,))
    with pytest.raises(NotImplementedError, match="alibi_slopes have no derivative"):
        jvp(lambda slopes: attention(q, q, q, score=strobe.Score(alibi=slopes)), (slopes,), (slopes,))
    with pytest.raises(ValueError, match="alibi_slopes must not require a gradient"):
        grad(lambda slopes: loss(lambda q: attention(q, q, q, score=strobe.Score(alibi=slopes)))(q))(slopes)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(300, 333, heads_q=4, mask="causal", head_dim=64), Case(90, 120, packed=True, batch=4)])
def test_forward_mode_and_transforms_on_a_gpu(case):
    """Whatever kernel ran the forward."""
    t = tensors(case, torch.bfloat16, "cuda")
    tangents = tuple(torch.randn_like(x) for x in (t.q, t.k, t.v))
    primals = t.q, t.k, t.v
    _, got = jvp(lambda *qkv: attention(*qkv, **t.keywords), primals, tangents)
    wide = [tuple(x.double().cpu() for x in given) for given in (primals, tangents)]
    keywords = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in t.keywords.items()}
    _, want = jvp(lambda *qkv: attention(*qkv, backend="tiled", **keywords), *wide)
    for a, b in zip(got, want, strict=True):
        assert (a.double().cpu() - b).abs().max() <= 3 * torch.finfo(torch.bfloat16).eps * b.abs().max()
    entries = vmap(grad(lambda q: loss(lambda q: attention(q, t.k, t.v, **t.keywords))(q)))(torch.stack([t.q, -t.q]))
    q = t.q.clone().requires_grad_()
    torch.testing.assert_close(entries[0], torch.autograd.grad(loss(lambda q: attention(q, t.k, t.v, **t.keywords))(q), q)[0])
