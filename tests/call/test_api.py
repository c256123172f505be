"""The public door: flash-attn's signatures and returns, explain, supports, what an import costs."""

import inspect
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from problems import Case, _score_function, check, describe, formula, run, tensors

import strobe
from strobe.call import dispatch
from strobe.problem import Upstream
from strobe.reference import dense

FLASH_TAIL = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
    "deterministic": False, "return_attn_probs": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "function, head, tail",
    [
        ("flash_attn_func", ["q", "k", "v"], {}),
        ("flash_attn_qkvpacked_func", ["qkv"], {}),
        ("flash_attn_kvpacked_func", ["q", "kv"], {}),
        (
            "flash_attn_varlen_func",
            ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
            {"block_table": None},
        ),
    ],
)
def test_signatures_are_flash_attns(function, head, tail):
    parameters = inspect.signature(getattr(strobe, function)).parameters
    of_later_versions = [name for name, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    assert list(parameters) == [*head, *FLASH_TAIL, *tail, *of_later_versions]
    assert set(of_later_versions) <= {
        "page_table", "seqused_q", "seqused_k", "learnable_sink", "out", "return_softmax_lse", "paged",
    }  # fmt: skip
    assert {name: parameters[name].default for name in (*FLASH_TAIL, *tail)} == {**FLASH_TAIL, **tail}


def test_flash_attn_func_and_packed_forms_agree():
    qkv = torch.randn(2, 20, 3, 4, 32)
    q, k, v = qkv.unbind(2)
    out, lse, probabilities = strobe.flash_attn_func(q, k, v, causal=True, window_size=(7, 3), return_attn_probs=True)
    want, want_lse = strobe.attention(q, k, v, mask=strobe.Causal() & strobe.Window(7), return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and lse.shape == (2, 4, 20) and probabilities.numel() == 0
    assert torch.equal(strobe.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(7, 3)), out)
    assert torch.equal(strobe.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True, window_size=(7, 3)), out)


def test_varlen_is_each_sequence_alone():
    t = tensors(Case(30, 40, packed=True, batch=4, heads_q=4, heads_kv=2, mask="causal"))
    cu_q, cu_k = t.keywords["cu_seqlens_q"], t.keywords["cu_seqlens_kv"]
    out, lse, _ = strobe.flash_attn_varlen_func(
        t.q, t.k, t.v, cu_q, cu_k, 30, 40, causal=True, return_attn_probs=True, softmax_scale=0.3
    )
    assert lse.shape == (4, t.q.shape[0])
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one, one_lse = strobe.attention(
            t.q[None, rows], t.k[None, keys], t.v[None, keys], mask=strobe.Causal(), scale=0.3, return_lse=True
        )
        torch.testing.assert_close(out[rows], one[0])
        torch.testing.assert_close(lse[:, rows], one_lse[0])


def test_rows_outside_every_sequence_give_zero():
    q = torch.randn(10, 2, 16, requires_grad=True)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    out, lse = strobe.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, return_lse=True)
    assert not out[7:].any() and torch.isneginf(lse[:, 7:]).all() and torch.isfinite(lse[:, :7]).all()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert not gradient[7:].any()


def test_lse_alone_has_a_gradient():
    q, k = (torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(2))
    _, lse = strobe.attention(q, k, k.detach(), return_lse=True, mask=strobe.Causal())
    got = torch.autograd.grad(lse.sum(), (q, k))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    want = torch.autograd.grad(scores.masked_fill(~strobe.Causal().dense(9, 9), -torch.inf).logsumexp(-1).sum(), (q, k))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["heads first", "sliced", "expanded heads", "offset by one element"])
def test_strides(layout):
    t = tensors(Case(37, 37, heads_q=4, heads_kv=4, mask="causal"))

    def laid_out(x):
        if layout == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            return torch.stack([x, x + 1], -2)[..., 0, :]
        if layout == "expanded heads":
            return x[:, :, :1].expand(-1, -1, 4, -1)
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    strided = type(t)(laid_out(t.q), laid_out(t.k), laid_out(t.v), t.keywords)
    check(run(strided, None), strided)


def test_what_a_tma_descriptor_cannot_address_is_named():
    """A dim repeated by stride 0, a base and a stride of no multiple of 16 bytes; a dim of 1 has no stride that matters."""
    t = tensors(Case(8, 8, heads_q=4, heads_kv=4))
    repeated = t.q[:, :, :1].expand(-1, -1, 4, -1)
    shifted = torch.cat([t.q.new_zeros(1), t.q.flatten()])[1:].view(t.q.shape)
    narrow = torch.cat([t.q, t.q[..., :1]], -1)[..., :-1]
    for bad in (repeated, shifted, narrow):
        assert describe(replace(t, k=bad))[0].unaligned == ("k",)
    assert describe(replace(t, q=t.q[:1], k=t.k[:1].expand(1, -1, -1, -1), v=t.v[:1]))[0].unaligned == ()


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_finite_scale(scale):
    """0 weighs all keys alike; a negative one prefers the least similar."""
    t = tensors(Case(40, 50, mask="causal"))
    t.keywords["scale"] = scale
    for backend in (None, "torch_cpu", "tiled", "portable"):
        if strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]:
            check(run(t, backend), t)


@pytest.mark.parametrize("mask", [strobe.Window(right=2**31 - 1), strobe.Window(left=2**63), strobe.Prefix(2**31)], ids=str)
def test_bounds_beyond_int32_hide_nothing(mask):
    """On the device positions are int32, and a bound added to one must not wrap around."""
    q = torch.randn(1, 150, 2, 64).to(torch.float16 if HAS_GPU else torch.float32).to("cuda" if HAS_GPU else "cpu")
    want = strobe.attention(q, q, q)
    for backend in strobe.BACKENDS:
        if strobe.supports(q, q, q, mask=mask, backend=backend)[0]:
            torch.testing.assert_close(strobe.attention(q, q, q, mask=mask, backend=backend), want, atol=2e-3, rtol=2e-3)


def test_whatever_stands_for_an_integer_is_one():
    """numpy's, and tensors of one element, which flash-attn's users pass."""
    q = torch.randn(10, 2, 16)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    want = strobe.flash_attn_varlen_func(q, q, q, cu, cu, 6, 6, window_size=(2, 0))
    for six, two, zero in ((np.int64(6), np.int32(2), np.int64(0)), (torch.tensor(6), torch.tensor(2), torch.tensor([0]))):
        got = strobe.flash_attn_varlen_func(q, q, q, cu, cu, six, six, window_size=(two, zero))
        assert torch.equal(got, want)


def test_an_infinite_softcap_caps_nothing():
    q, k, v = torch.randn(3, 1, 9, 2, 16).unbind()
    assert strobe.Score(softcap=float("inf")).softcap == strobe.Score(softcap=1e300).softcap == 0
    assert torch.equal(strobe.flash_attn_func(q, k, v, softcap=float("inf")), strobe.flash_attn_func(q, k, v))


@pytest.mark.parametrize("backend", ["tiled", "portable"])
def test_slopes_by_head_are_a_bias_of_distances(backend):
    """[heads] and [batch, heads], beside a bias that is made here."""
    t = tensors(Case(30, 40, heads_q=4))
    if not strobe.supports(t.q, t.k, t.v, backend=backend, score=strobe.Score(bias=torch.zeros(1, 1, 1, 1)))[0]:
        pytest.skip("refused")
    for slopes in (torch.tensor([0.5, 0.25, 0.125, 0.0]), torch.rand(2, 4)):
        distance = (torch.arange(30)[:, None] + 10 - torch.arange(40)).abs()
        bias = -(slopes.expand(2, 4)[..., None, None] * distance)
        want = strobe.attention(t.q, t.k, t.v, score=strobe.Score(bias=bias), backend="tiled")
        got = strobe.attention(t.q, t.k, t.v, score=strobe.Score(alibi=slopes), backend=backend)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


# ---- autocast


def test_autocast_casts_as_it_does_for_pytorchs_attention():
    """q, k and v may be of different dtypes then; float64 stays; gradients have the dtypes of what was given."""
    q, k, v = torch.randn(3, 2, 30, 2, 16).unbind()
    given = [x.requires_grad_() for x in (q.clone(), k.bfloat16(), v.half())]
    bias = torch.randn(1, 2, 30, 30).half()
    with torch.autocast("cpu", torch.bfloat16):
        out = strobe.attention(*given, score=strobe.Score(bias=bias))
        double = strobe.attention(q.double(), q.double(), q.double())
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        assert strobe.supports(*given)[0] and strobe.explain(*given).problem.dtype == torch.bfloat16
    assert out.dtype == theirs.dtype == torch.bfloat16 and double.dtype == torch.float64
    want = strobe.attention(q.bfloat16(), k.bfloat16(), v.half().bfloat16(), score=strobe.Score(bias=bias.bfloat16()))
    assert torch.equal(out, want)
    grads = torch.autograd.grad(out.float().sum(), given)
    assert [x.dtype for x in grads] == [torch.float32, torch.bfloat16, torch.float16]
    with pytest.raises(TypeError, match="k must have q's dtype"):
        strobe.attention(*given)


@pytest.mark.parametrize("backend", ["tiled", "torch_cpu"])
def test_autocast_does_not_reach_into_a_backend(backend):
    """Its products are kept in float32, forward, backward and in forward mode, as without."""
    q, k, v = torch.randn(3, 1, 40, 2, 32).bfloat16().unbind()

    def all_of_it():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = strobe.attention(*inputs, mask=strobe.Causal(), return_lse=True, backend=backend)
        _, tangent = torch.func.jvp(lambda q: strobe.attention(q, k, v, mask=strobe.Causal(), backend=backend), (q,), (k,))
        return out, lse, tangent, *torch.autograd.grad((out, lse), inputs, (out.detach(), lse.detach()))

    want = all_of_it()
    with torch.autocast("cpu", torch.bfloat16):
        got = all_of_it()
        exact, _ = dense.attend(q.double(), k.double(), v.double(), 32**-0.5, strobe.Causal(), strobe.Score())
        single, _ = dense.attend(q.float(), k.float(), v.float(), 32**-0.5, strobe.Causal(), strobe.Score())
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    torch.testing.assert_close(single.double(), exact, atol=1e-6, rtol=1e-5)


def test_explain_prints_choice_and_refusals(capsys):
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    explanation = strobe.explain(q, q, q, score=strobe.Score(softcap=3.0))
    printed = capsys.readouterr().out
    assert explanation.chosen == "tiled" and explanation.backward.chosen == "tiled"
    assert "chosen    tiled" in printed and "refused   sm90: needs a Hopper GPU" in printed
    assert "takes no score" in dict(explanation.refusals)["torch_cpu"]


def test_explain_of_what_nothing_runs(capsys):
    q = torch.randn(1, 8, 2, 16)
    explanation = strobe.explain(q, q, q, backend="sm100")
    assert (explanation.chosen, explanation.config, explanation.origin, explanation.warning) == (None,) * 4
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split() == ["chosen", "none"] and printed[3].startswith("refused   sm100: ") and len(printed) == 4


def test_supports_and_what_runs_are_one():
    q = torch.randn(1, 8, 2, 16)
    assert strobe.supports(q, q, q) == (True, strobe.supports(q, q, q)[1])
    score = strobe.Score(softcap=3.0)
    ok, reasons = strobe.supports(q, q, q, score=score, backend="torch_cpu")
    assert not ok and reasons[0].startswith("torch_cpu: takes no score")
    with pytest.raises(ValueError, match="takes no score"):
        strobe.attention(q, q, q, score=score, backend="torch_cpu")


def test_the_choice_is_logged(caplog):
    q = torch.randn(1, 8, 2, 16)
    with caplog.at_level("INFO", "strobe"):
        strobe.attention(q, q, q, score=strobe.Score(softcap=3.0))
    assert "tiled runs" in caplog.text and "torch_cpu: takes no score" in caplog.text


def test_import_is_light():
    """No Triton, no compiler, no lab behind `import strobe`, and little time beside `import torch`."""
    code = (
        "import torch, sys, time; before = set(sys.modules); start = time.perf_counter(); import strobe;"
        "took = time.perf_counter() - start; new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(took, *sorted(new)); assert not torch.cuda.is_initialized()"
    )
    took, *new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"triton", "numpy", "transformers", "matplotlib", "rich", "typer", "pytest"}
    assert "strobe" in new and not heavy & set(new)
    assert float(took) < 1.0


def test_poison_in_keys_that_no_row_sees():
    """NaN and infinity in masked-out keys and values reach nothing, forward and backward."""
    case = Case(50, 90, heads_q=4, heads_kv=2, mask="window")
    t = tensors(case)
    t.keywords["mask"] = strobe.Window(left=20, right=0)
    unseen = ~t.keywords["mask"].dense(50, 90).any(0)
    assert unseen.any()
    clean = formula(t)
    for poison in (float("nan"), float("inf"), -float("inf")):
        bad = type(t)(t.q, t.k.clone(), t.v.clone(), t.keywords)
        bad.k[:, unseen] = poison
        bad.v[:, unseen] = poison
        got = run(bad, None)
        for name in got.FIELDS:
            torch.testing.assert_close(getattr(got, name).double(), getattr(clean, name), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["tiled", "torch_cpu"])
def test_poison_reaches_only_rows_that_see_it(backend):
    t = tensors(Case(40, 40, mask="causal"))
    clean = run(t, backend).out
    t.v[:, 25] = float("nan")
    out = run(t, backend).out
    torch.testing.assert_close(out[:, :25], clean[:, :25])
    assert out[:, 25:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_kv", [1, 3, 15, 40])
@pytest.mark.parametrize("what", ["q", "one row of q", "k", "v"])
def test_nan_that_is_seen_is_not_lost(what, n_kv, dtype):
    """With fewer keys than a vector has numbers, PyTorch's kernel takes such rows for some that see nothing."""
    q, k, v = (torch.randn(1, n, 2, 32).to(dtype) for n in (8, n_kv, n_kv))
    {"q": q, "one row of q": q[:, 5], "k": k, "v": v}[what][:] = float("nan")
    for mask in (strobe.Full(), strobe.Window(left=30)):
        out, lse = strobe.attention(q, k, v, mask=mask, return_lse=True)
        want, want_lse = strobe.attention(q, k, v, mask=mask, return_lse=True, backend="tiled")
        assert out.isnan().any() and torch.equal(out.isnan(), want.isnan()) and torch.equal(lse.isnan(), want_lse.isnan())


# ---- biases, sinks, and lengths that are used


def on_every_backend(t, **keywords):
    """The results of all backends of this machine that take a problem."""
    for backend in strobe.BACKENDS:
        if strobe.supports(t.q, t.k, t.v, backend=backend, **keywords)[0]:
            yield strobe.attention(t.q, t.k, t.v, backend=backend, return_lse=True, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 40, 50), (1, 4, 1, 50), (2, 1, 40, 1), (1, 1, 1, 1), (1, 4, 40, 50)], ids=str)
def test_biases_broadcast(shape, dtype):
    t = tensors(Case(40, 50, heads_q=4, mask="causal"), torch.bfloat16)
    bias = torch.randn(shape, dtype=dtype)
    keywords = {**t.keywords, "score": strobe.Score(bias=bias)}
    whole = {**t.keywords, "score": strobe.Score(bias=bias.expand(2, 4, 40, 50).contiguous())}
    ran = list(zip(on_every_backend(t, **keywords), on_every_backend(t, **whole), strict=True))
    assert len(ran) >= 2 or HAS_GPU
    for got, want in ran:
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("backend", ["tiled", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(3, 4, 70, 50), (1, 4, 70, 50), (3, 1, 70, 50), (3, 4, 1, 50), (3, 4, 70, 1), (1, 1, 1, 50), (1, 1, 1, 1)],
    ids=str,
)
def test_gradients_of_biases_broadcast(shape, dtype, backend):
    """What is repeated is summed in float32 and rounded once; used lengths, GQA and a window beside it."""
    t = tensors(Case(70, 50, batch=3, heads_q=4, heads_kv=2, seqused=True, mask="window"), dtype)
    t.keywords["score"] = strobe.Score(softcap=3.0, bias=torch.randn(shape, dtype=dtype))
    if not strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]:
        pytest.skip("refused")
    got = run(t, backend)
    assert got.dbias.shape == shape and got.dbias.dtype == dtype and got.dbias.any()
    check(got, t)


@pytest.mark.parametrize("backend", ["tiled", "portable"])
def test_what_needs_no_gradient_is_not_computed(backend):
    t = tensors(Case(20, 30, bias=True, sinks=True))
    if not strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]:
        pytest.skip("refused")
    problem, operands = describe(t, "backward")
    out, lse = dispatch.forward(replace(problem, phase="forward"), operands, backend)
    for learned in ((), ("bias",), ("sinks",)):
        grads = dispatch.backward(replace(problem, learned=learned), operands, Upstream(out, lse, out), backend)
        assert (grads.bias is not None, grads.sinks is not None) == ("bias" in learned, "sinks" in learned)


def test_a_bias_of_minus_infinity_is_a_mask():
    t = tensors(Case(40, 50, mask="causal"))
    bias = torch.where(strobe.Causal().dense(40, 50), 0.0, -torch.inf)[None, None]
    bias[:, :, 5] = -torch.inf
    want, want_lse = strobe.attention(t.q, t.k, t.v, mask=strobe.Causal(), return_lse=True)
    for out, lse in on_every_backend(t, score=strobe.Score(bias=bias)):
        assert not out[:, 5].any() and lse[..., 5].isneginf().all()
        rows = [row for row in range(40) if row != 5]
        torch.testing.assert_close(out[:, rows], want[:, rows])
        torch.testing.assert_close(lse[..., rows], want_lse[..., rows])


def test_a_sink_takes_weight_and_has_no_value():
    t = tensors(Case(30, 40, heads_q=4, mask="causal"))
    sinks = torch.tensor([-torch.inf, -2.0, 0.0, 5.0])
    plain, plain_lse = strobe.attention(t.q, t.k, t.v, return_lse=True, mask=strobe.Causal())
    keywords = dict(mask=strobe.Causal(), score=strobe.Score(sinks=sinks))
    for out, lse in on_every_backend(t, **keywords):
        torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None]))
        torch.testing.assert_close(out, plain * (plain_lse - lse).exp().transpose(1, 2)[..., None])
    out = strobe.flash_attn_func(t.q, t.k, t.v, causal=True, learnable_sink=sinks)
    torch.testing.assert_close(out, strobe.attention(t.q, t.k, t.v, **keywords))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_alone_may_be_learned(dtype):
    """Through flash-attn's door, in their own dtype, where q, k and v need no gradient; -inf is no sink and gets 0."""
    q, k, v = torch.randn(3, 2, 30, 4, 16)
    sinks = torch.tensor([-torch.inf, -2.0, 0.0, 5.0], dtype=dtype, requires_grad=True)
    out, lse, _ = strobe.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks, return_attn_probs=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    (got,) = torch.autograd.grad((out, lse), sinks, (dout, dlse))
    other = sinks.detach().requires_grad_()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    scores = scores.masked_fill(~strobe.Causal().dense(30, 30), -torch.inf)
    scores = torch.cat([scores, other.float()[None, :, None, None].expand(2, 4, 30, 1)], -1)
    result = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v)
    (want,) = torch.autograd.grad((result, scores.logsumexp(-1)), other, (dout, dlse))
    assert got.dtype == dtype and got[0] == 0
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_used_is_as_if_it_were_not_there(packed):
    """NaN in it reaches nothing; masks are aligned to what is used; rows that are not used give 0 and -inf."""
    t = tensors(Case(30, 40, batch=3, packed=packed))
    used_q, used_kv = torch.tensor([30, 11, 0], dtype=torch.int32), torch.tensor([17, 40, 5], dtype=torch.int32)
    keywords = {**t.keywords, "mask": strobe.Causal(), "score": strobe.Score(sinks=torch.tensor([0.5, 1.0]))}
    starts_q, starts_kv = torch.arange(3) * 30, torch.arange(3) * 40
    q, k, v = t.q, t.k, t.v
    if packed:
        bounds_q, bounds_kv = keywords["cu_seqlens_q"], keywords["cu_seqlens_kv"]
        used_q, used_kv = used_q.minimum(bounds_q.diff()), used_kv.minimum(bounds_kv.diff())
        starts_q, starts_kv = bounds_q[:-1], bounds_kv[:-1]
    flat = [x.flatten(0, -3).clone() for x in (q, k, v)]
    rows, keys = (torch.cat([torch.arange(n) + s for s, n in zip(*pair, strict=True)]) for pair in (
        (starts_q, used_q), (starts_kv, used_kv),
    ))  # fmt: skip
    for x, kept in zip(flat, (rows, keys, keys), strict=True):
        unused = torch.ones(x.shape[0], dtype=torch.bool)
        unused[kept] = False
        x[unused] = torch.nan
    bad = type(t)(*(x.view(y.shape) for x, y in zip(flat, (q, k, v), strict=True)), keywords)
    for out, lse in on_every_backend(bad, **keywords, seqused_q=used_q, seqused_kv=used_kv):
        out, lse = out.flatten(0, -3), (lse if packed else lse.transpose(0, 1).flatten(1))
        unused = torch.ones(out.shape[0], dtype=torch.bool)
        unused[rows] = False
        assert not out[unused].any() and lse[:, unused].isneginf().all()
        for b in range(3):
            mine = slice(starts_q[b], starts_q[b] + used_q[b])
            k_b, v_b = (x[starts_kv[b] : starts_kv[b] + used_kv[b]][None] for x in flat[1:])
            want = strobe.attention(
                flat[0][None, mine], k_b, v_b, mask=keywords["mask"], score=keywords["score"], return_lse=True
            )
            torch.testing.assert_close(out[mine], want[0][0])
            torch.testing.assert_close(lse[:, mine], want[1][0])


@pytest.mark.parametrize("backend", ["tiled", "portable"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_used_has_no_gradient_and_no_part_in_others(packed, backend):
    t = tensors(Case(90, 70, batch=4, packed=packed, seqused=True, heads_q=4, mask="causal"))
    if not strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]:
        pytest.skip("refused")
    unused = {}
    for name, x in (("q", t.q), ("kv", t.k)):
        used = t.keywords[f"seqused_{name}"].tolist()
        starts = t.keywords[f"cu_seqlens_{name}"].tolist() if packed else [b * x.shape[1] for b in range(4)]
        unused[name] = torch.ones(x.flatten(0, -3).shape[0], dtype=torch.bool)
        for start, n in zip(starts, used, strict=False):
            unused[name][start : start + n] = False
    assert all(rows.any() and not rows.all() for rows in unused.values())

    def poisoned(x, rows):
        bad = x.clone()
        bad.flatten(0, -3)[rows] = torch.nan
        return bad

    def gradients(q, k, v, dout):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(strobe.attention(q, k, v, backend=backend, **t.keywords), (q, k, v), dout)

    dout, of_q, of_kv = torch.randn_like(t.q), unused["q"], unused["kv"]
    want = gradients(t.q, t.k, t.v, dout)
    got = gradients(poisoned(t.q, of_q), poisoned(t.k, of_kv), poisoned(t.v, of_kv), poisoned(dout, of_q))
    for a, b, rows in zip(got, want, (of_q, of_kv, of_kv), strict=True):
        assert torch.equal(a, b) and not a.flatten(0, -3)[rows].any() and a.any()


def test_seqused_through_flash_attns_door():
    t = tensors(Case(30, 40, packed=True, batch=3))
    cu_q, cu_k = t.keywords["cu_seqlens_q"], t.keywords["cu_seqlens_kv"]
    used = (cu_k.diff() // 2).to(torch.int32)
    out = strobe.flash_attn_varlen_func(t.q, t.k, t.v, cu_q, cu_k, 30, 40, causal=True, seqused_k=used)
    want = strobe.attention(t.q, t.k, t.v, **{**t.keywords, "mask": strobe.Causal()}, seqused_kv=used)
    assert torch.equal(out, want)


def test_explain_names_what_has_no_gradient(capsys):
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    explanation = strobe.explain(q, q, q, score=strobe.Score(function=_score_function))
    assert explanation.chosen == "tiled" and explanation.backward.chosen is None
    assert "needs the derivative of the score function" in dict(explanation.backward.refusals)["portable"]
    bias = torch.zeros(1, 1, 1, 1, requires_grad=True)
    explanation = strobe.explain(q.detach(), q.detach(), q.detach(), score=strobe.Score(bias=bias))
    assert explanation.backward.chosen == "tiled" and explanation.backward.problem.learned == ("bias",)
