"""Nested tensors with layout=torch.jagged: forward and backward are those of the sequences one by one, or a sentence says why
not."""

import pytest
import torch

import strobe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = (5, 0, 33, 1)
MASKS = {"full": None, "causal": strobe.Causal(), "window": strobe.Window(left=3, right=2)}


def jagged(lengths, heads, dim, device, dtype, like=None):
    """A nested leaf of random sequences, [batch, jagged, heads, dim]; like: with the bounds of this one."""
    rows = torch.randn(sum(lengths), heads, dim, device=device, dtype=dtype)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0) if like is None else like.offsets()
    return torch.nested.nested_tensor_from_jagged(rows, offsets).requires_grad_()


def inputs(device, lengths=LENGTHS, lengths_kv=None, dtype=None, heads=(4, 2), dims=(64, 64)):
    torch.manual_seed(0)
    dtype = dtype or (torch.float64 if device == "cpu" else torch.float16)
    q = jagged(lengths, heads[0], dims[0], device, dtype)
    lengths_kv = lengths_kv or lengths
    k = jagged(lengths_kv, heads[1], dims[0], device, dtype, q if lengths_kv == lengths else None)
    return q, k, jagged(lengths_kv, heads[1], dims[1], device, dtype, k)


def one_by_one(q, k, v, **keywords):
    """out and lse of each sequence alone, in float64, and the leaves they are of."""
    leaves = [[x.detach().double().requires_grad_() for x in y.unbind()] for y in (q, k, v)]
    rows = (strobe.attention(*(x[None] for x in each), return_lse=True, **keywords) for each in zip(*leaves, strict=True))
    outs, lses = zip(*rows, strict=True)
    return torch.cat([x[0] for x in outs]), torch.cat([x[0] for x in lses], 1), leaves


def check(q, k, v, out, expected, leaves, atol):
    """out and its gradients against the sequences'."""
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(out.values(), (q, k, v), upstream.to(out.dtype))
    wanted = torch.autograd.grad(expected, [x for one in leaves for x in one], upstream)
    torch.testing.assert_close(out.values().double(), expected, atol=atol, rtol=0)
    for x, gradient, parts in zip((q, k, v), gradients, zip(*[iter(wanted)] * q.shape[0], strict=True), strict=True):
        assert gradient.is_nested and gradient.shape == x.shape
        torch.testing.assert_close(gradient.values().double(), torch.cat(parts), atol=atol * 4, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths_kv", [LENGTHS, (7, 4, 0, 40)], ids=["as many keys", "other keys"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_that_of_the_sequences(device, mask, lengths_kv):
    q, k, v = inputs(device, lengths_kv=lengths_kv)
    atol = 1e-9 if device == "cpu" else 4e-3
    out, lse = strobe.attention(q, k, v, mask=MASKS[mask], return_lse=True)
    expected, lse_expected, leaves = one_by_one(q, k, v, mask=MASKS[mask])
    assert out.shape == q.shape and lse.shape == q.transpose(1, 2).shape[:-1] and (out + q).shape == q.shape
    torch.testing.assert_close(lse.values().double(), lse_expected, atol=max(atol, 1e-5), rtol=0)
    check(q, k, v, out, expected, leaves, atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_signature(device, causal):
    q, k, v = inputs(device, dims=(64, 32))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = strobe.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=0.3, enable_gqa=True)
    expected, _, leaves = one_by_one(q, k, v, mask=strobe.Causal() if causal else None, scale=0.3)
    assert out.shape == (*heads_first[0].shape[:-1], 32)
    check(q, k, v, out.transpose(1, 2), expected, leaves, 1e-9 if device == "cpu" else 4e-3)
    nothing = strobe.scaled_dot_product_attention(*heads_first, dropout_p=1.0, enable_gqa=True)
    assert (nothing.values() == 0).all() and nothing.shape == out.shape


@pytest.mark.parametrize("device", DEVICES)
def test_rows_between_the_sequences_are_not_seen(device):
    """Sequences that torch.nested.narrow cuts out of a dense tensor, and NaN around them."""
    dense = torch.randn(3, 12, 2, 64, device=device, dtype=torch.float32)
    lengths, starts = torch.tensor([3, 9, 1]), torch.tensor([2, 0, 11])
    beyond = torch.arange(12)[None]
    unused = (beyond < starts[:, None]) | (beyond >= (starts + lengths)[:, None])
    dense[unused.to(device)] = torch.nan
    q = torch.nested.narrow(dense, 1, starts.to(device), lengths.to(device), layout=torch.jagged)
    out = strobe.attention(q, q, q)
    for n, start, x, one in zip(lengths, starts, dense, out.unbind(), strict=True):
        rows = x[None, start : start + n].double()
        torch.testing.assert_close(one.double(), strobe.attention(rows, rows, rows)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    q, k, v = (x.detach() for x in inputs(device, dtype=torch.float16))
    wanted = strobe.attention(q, k, v, mask=strobe.Causal())
    compiled = torch.compile(lambda *x: strobe.attention(*x, mask=strobe.Causal()) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v).values(), wanted.values() * 2)


def test_what_is_asked_about_it():
    q, k, v = (x.detach().half() for x in inputs("cpu"))
    assert strobe.supports(q, k, v)[0] and "4 packed sequences of at most 33 x 33" in str(strobe.api.explained(q, k, v))
    assert strobe.flash_attn_func(q, k, v, causal=True).shape == q.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert strobe.attention(q, k, v).dtype == torch.bfloat16


Q, K, V = inputs("cpu")
PLAIN, CU = torch.randn(2, 4, 4, 64, dtype=torch.float64), torch.zeros(5, dtype=torch.int32)
OTHER = jagged((7, 4, 0, 40), 4, 64, "cpu", torch.float64)
STRIDED, SHORT = torch.nested.nested_tensor([PLAIN[0]]), jagged((3,), 4, 64, "cpu", torch.float64)
REFUSED = {
    "a plain k": (lambda: strobe.attention(Q, PLAIN, V), TypeError, "all nested tensors or none, got a plain k"),
    "a strided v": (lambda: strobe.attention(Q, K, STRIDED), TypeError, "make q, k and v with layout=torch.jagged"),
    "heads first": (
        lambda: strobe.attention(*(x.transpose(1, 2) for x in (Q, K, V))),
        ValueError,
        r"q must have shape \[batch, jagged, heads, head_dim\]",
    ),
    "rank": (lambda: strobe.attention(Q[..., 0], K, V), ValueError, "q must have shape"),
    "batch": (lambda: strobe.attention(Q, SHORT, SHORT), ValueError, "k must have q's batch 4"),
    "bounds of v": (lambda: strobe.attention(Q, K, OTHER), ValueError, "v must have as many rows as k"),
    "cu_seqlens": (lambda: strobe.attention(Q, K, V, cu_seqlens_q=CU), ValueError, "cu_seqlens_q must be left out"),
    "documents": (lambda: strobe.attention(Q, K, V, mask=strobe.Document(CU[None])), ValueError, "are separate documents"),
    "PyTorch's, heads last": (lambda: strobe.scaled_dot_product_attention(Q, K, V), ValueError, "query must have shape"),
    "PyTorch's, plain": (
        lambda: strobe.scaled_dot_product_attention(Q.transpose(1, 2), PLAIN, PLAIN), ValueError, "got another key",
    ),
    "PyTorch's, strided": (
        lambda: strobe.scaled_dot_product_attention(STRIDED, STRIDED, STRIDED), ValueError, "got a nested one",
    ),
    "PyTorch's mask": (lambda: sdpa(Q, K, V, attn_mask=PLAIN), ValueError, "attn_mask must be None with nested tensors"),
    "PyTorch's dropout": (lambda: sdpa(Q, K, V, dropout_p=2.0), RuntimeError, "dropout_p must be from 0 to 1"),
    "PyTorch's heads": (lambda: sdpa(Q, K, V, enable_gqa=False), RuntimeError, "key must have query's 4 heads"),
    "PyTorch's causal": (lambda: sdpa(Q, OTHER, OTHER, is_causal=True), ValueError, "as many keys as queries"),
}  # fmt: skip


def sdpa(*tensors, enable_gqa=True, **keywords):
    return strobe.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors), enable_gqa=enable_gqa, **keywords)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.gpu
def test_pytorchs_own_function_runs_on_strobe():
    """PyTorch's function packs the sequences itself, of which none may be empty, and calls its flash backend."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("PyTorch takes implementations from 2.11 on")
    q, k, v = inputs("cuda", (5, 33, 1), heads=(4, 4))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    torch.nn.attention.activate_flash_attention_impl("strobe")
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
            expected, _, leaves = one_by_one(q, k, v, mask=strobe.Causal())
            check(q, k, v, out.transpose(1, 2), expected, leaves, 4e-3)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
