"""flash-attn's modules, which `strobe.install_as_flash_attn()` makes Strobe's."""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import strobe
from strobe.integrations import flash_attn as stand_in
from strobe.masks import Causal, Window

PUBLIC = {
    "flash_attn": (
        "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
        "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache"
    ),
    "flash_attn.flash_attn_interface": "flash_attn_func flash_attn_varlen_func flash_attn_with_kvcache",
    "flash_attn.bert_padding": (
        "index_first_axis index_put_first_axis index_first_axis_residual unpad_input pad_input "
        "unpad_input_for_concatenated_sequences"
    ),
    "flash_attn.layers.rotary": (
        "RotaryEmbedding apply_rotary_emb apply_rotary_emb_func apply_rotary_emb_kv_ apply_rotary_emb_qkv_ "
        "apply_rotary_emb_torch rotate_half"
    ),
    "flash_attn.cute": "flash_attn_func flash_attn_varlen_func",
    "flash_attn.cute.interface": "flash_attn_func flash_attn_varlen_func flash_attn_combine",
    "flash_attn_interface": (
        "flash_attn_func flash_attn_qkvpacked_func flash_attn_varlen_func flash_attn_combine flash_attn_with_kvcache "
        "get_scheduler_metadata"
    ),
}
"""The public names of flash-attn 2.8's modules of attention, of FlashAttention-3 and of FlashAttention-4."""


@pytest.fixture
def installed():
    with strobe.install_as_flash_attn():
        yield


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(installed, name):
    module = importlib.import_module(name)
    for function in PUBLIC[name].split():
        assert callable(getattr(module, function)) and getattr(module, function).__doc__, function
    assert module.__version__.startswith(("2.8.", "3.", "4."))


NOT_ATTENTION = (
    "flash_attn_triton flash_attn_triton_og flash_attn_triton_amd flash_blocksparse_attention flash_blocksparse_attn_interface "
    "fused_softmax layers.patch_embed losses losses.cross_entropy models models.bert models.gpt modules modules.mha "
    "modules.mlp ops ops.activations ops.fused_dense ops.layer_norm ops.rms_norm ops.triton ops.triton.rotary "
    "ops.triton.layer_norm utils utils.benchmark utils.distributed utils.generation utils.library utils.pretrained "
    "utils.testing utils.torch pyproject"
)
"""The other modules of flash-attn 2.8."""


@pytest.mark.parametrize("name", NOT_ATTENTION.split())
def test_what_is_not_there_says_why(installed, name):
    with pytest.raises(
        ModuleNotFoundError, match="Strobe stands for flash-attn, and of that for attention alone: it has flash_attn"
    ):
        importlib.import_module(f"flash_attn.{name}")


def test_it_comes_and_goes():
    assert importlib.util.find_spec("flash_attn") is None
    with strobe.install_as_flash_attn():
        strobe.install_as_flash_attn()
        from flash_attn import flash_attn_func

        assert flash_attn_func is strobe.flash_attn_func
        assert importlib.util.find_spec("flash_attn.layers.rotary") is not None
        assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3"
        assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]
        assert importlib.metadata.metadata("flash-attn-3")["Name"] == "flash-attn-3"
    assert importlib.util.find_spec("flash_attn") is None and "flash_attn" not in sys.modules
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    strobe.uninstall_as_flash_attn()


def test_a_real_one_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(RuntimeError, match="flash_attn is imported already, and it is not Strobe"):
        strobe.install_as_flash_attn()
    assert stand_in._installation is None


def test_what_is_not_attention_says_so(installed):
    with pytest.raises(ModuleNotFoundError, match=r"attention alone: it has .*, not flash_attn\.losses"):
        importlib.import_module("flash_attn.losses.cross_entropy")
    with pytest.raises(ImportError, match=r"strobe has no flash_attn\.flash_attn_interface\.FlashAttnFunc, which is inside"):
        from flash_attn.flash_attn_interface import FlashAttnFunc  # noqa: F401
    assert not hasattr(sys.modules["flash_attn"], "no_such_name")


def qkv(*shape):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def test_packed_sequences_in_one_tensor(installed):
    import flash_attn

    q, k, v = qkv(11, 4, 16)
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    expected = strobe.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), cu, 7, causal=True)
    pair = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), cu, cu, 7, 7, causal=True)
    assert torch.equal(packed, expected) and torch.equal(pair, expected)
    with pytest.raises(ValueError, match=r"qkv must have shape \[total, 3, heads, head_dim\]"):
        flash_attn.flash_attn_varlen_qkvpacked_func(q, cu, 7)


def test_flash_attention_3(installed):
    import flash_attn_interface as fa3

    q, k, v = qkv(2, 9, 4, 16)
    out, lse = fa3.flash_attn_func(
        q, k, v, causal=True, window_size=(3, -1), softcap=5.0, num_splits=2, pack_gqa=True, return_attn_probs=True
    )
    expected = strobe.attention(q, k, v, mask=Window(3, 0), score=strobe.Score(softcap=5.0), return_lse=True)
    torch.testing.assert_close((out, lse), expected)
    plain = strobe.attention(q, k, v)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2)), plain)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=4), plain)
    cu, used = torch.tensor([0, 9, 18], dtype=torch.int32), torch.tensor([4, 7], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    packed = fa3.flash_attn_varlen_func(*rows, cu, cu, 9, 9, seqused_k=used)
    torch.testing.assert_close(packed.unflatten(0, (2, 9)), strobe.attention(q, k, v, seqused_kv=used))
    low = [x.detach().to(torch.float8_e4m3fn) for x in (q, k, v)]
    descale = torch.full((2, 4), 0.5)
    eight = fa3.flash_attn_func(*low, q_descale=descale, causal=True)
    assert torch.equal(eight, strobe.attention_fp8(*low, q_descale=descale, mask=Causal()))
    with pytest.raises(ValueError, match=r"attention_chunk must be 0 \(no chunks\) or more, got -4"):
        fa3.flash_attn_func(q, k, v, attention_chunk=-4)
    assert torch.equal(fa3.flash_attn_func(q, k, v, q_descale=descale), fa3.flash_attn_func(q, k, v))
    capped = fa3.flash_attn_func(*low, q_descale=descale, softcap=1.0)
    assert torch.equal(capped, strobe.attention_fp8(*low, q_descale=descale, score=strobe.Score(softcap=1.0)))


def test_flash_attention_4(installed):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    from flash_attn.cute.interface import flash_attn_combine

    q, k, v = qkv(2, 9, 4, 16)
    sink = torch.randn(4)
    out, lse = flash_attn_func(q, k, v, window_size=(None, 2), learnable_sink=sink, return_lse=True)
    expected = strobe.attention(q, k, v, mask=Window(None, 2), score=strobe.Score(sinks=sink), return_lse=True)
    torch.testing.assert_close((out, lse), expected)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=9, max_seqlen_k=9)
    out, none = flash_attn_varlen_func(*rows, **packed, causal=True)
    torch.testing.assert_close(out.unflatten(0, (2, 9)), strobe.attention(q, k, v, mask=Causal()))
    assert none is None
    table, used = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)
    pages = torch.randn(2, 4, 8, 2, 16)
    out, lse = flash_attn_varlen_func(
        rows[0][:3].detach(), *pages, cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32), max_seqlen_q=2, page_table=table,
        seqused_k=used, causal=True, return_lse=True,
    )  # fmt: skip
    for at, places, length, entry in (((0, 1), [3, 1], 9, 0), ((1, 3), [0, 2], 5, 1)):
        keys, values = (x[places].flatten(0, 1)[None, :length] for x in pages)
        expected = strobe.attention(rows[0][None, at[0] : at[1]], keys, values, mask=Causal(), return_lse=True)
        torch.testing.assert_close((out[at[0] : at[1]], lse[:, at[0] : at[1]]), tuple(x[0] for x in expected)), entry
    parts = [strobe.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 4), (4, 9))]
    outs, lses = torch.stack([x for x, _ in parts]), torch.stack([x.transpose(1, 2) for _, x in parts])
    whole, whole_lse = flash_attn_combine(outs, lses)
    expected, expected_lse = strobe.attention(q, k, v, return_lse=True)
    torch.testing.assert_close((whole, whole_lse.transpose(1, 2)), (expected, expected_lse))
    assert flash_attn_combine(outs, lses, return_lse=False)[1] is None
    nothing, _ = flash_attn_combine(outs, torch.full_like(lses, -torch.inf))
    assert not nothing.any()


def _tanh(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return 20.0 * torch.tanh(score / 20.0)


def _slope(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + aux_tensors[0][head] * (q_idx - kv_idx)


def _from_the_end(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return kv_idx <= q_idx + (seqlen_info.seqlen_k - seqlen_info.seqlen_q)


def _same(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return aux_tensors[0][batch, q_idx] == aux_tensors[0][batch, kv_idx]


def _odd(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    return (q_idx + kv_idx * aux_tensors[0][kv_idx]) % aux_scalars[0] != 0


FUNCTIONS = {
    "softcap": (dict(score_mod=_tanh), dict(score=strobe.Score(softcap=20.0)), 9),
    "last keys": (dict(mask_mod=_from_the_end), dict(mask=Causal()), 12),
    "both": (dict(mask_mod=_from_the_end, score_mod=_tanh), dict(mask=Causal(), score=strobe.Score(softcap=20.0)), 12),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_flash_attention_4(installed, name):
    from flash_attn.cute import flash_attn_func

    given, ours, n_kv = FUNCTIONS[name]
    q, k, v = torch.randn(2, 9, 4, 16), *(torch.randn(2, n_kv, 2, 16) for _ in range(2))
    sink = torch.randn(4)
    out, lse = flash_attn_func(q, k, v, **given, softmax_scale=0.3, learnable_sink=sink, return_lse=True)
    score = replace(ours.get("score", strobe.Score()), sinks=sink)
    expected = strobe.attention(q, k, v, mask=ours.get("mask"), score=score, scale=0.3, return_lse=True)
    torch.testing.assert_close((out, lse), expected)


def test_aux_tensors_of_flash_attention_4(installed):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    q, k, v = qkv(2, 9, 4, 16)
    slopes = torch.randn(4, requires_grad=True)
    out, _ = flash_attn_func(q, k, v, score_mod=_slope, aux_tensors=[slopes], causal=True)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    score = strobe.Score(bias=(slopes[:, None, None] * distance)[None])
    expected = strobe.attention(q, k, v, mask=Causal(), score=score)
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(x.sum(), slopes) for x in (out, expected)), strict=True):
        torch.testing.assert_close(one, other)
    ids = torch.arange(18).view(2, 9) // 4
    out, _ = flash_attn_func(q, k, v, mask_mod=_same, aux_tensors=[ids])
    torch.testing.assert_close(out, strobe.attention(q, k, v, mask=strobe.Document(ids)))
    factors = torch.arange(9) % 3
    out, _ = flash_attn_func(q, k, v, mask_mod=_odd, aux_tensors=[factors], aux_scalars=(2,))
    seen = (torch.arange(9)[:, None] + torch.arange(9) * factors) % 2 != 0
    hidden = torch.zeros(9, 9).masked_fill(~seen, -torch.inf)[None, None]
    torch.testing.assert_close(out, strobe.attention(q, k, v, score=strobe.Score(bias=hidden)))
    with pytest.raises(ValueError, match=r"softcap must be left out beside score_mod, got 2\.0"):
        flash_attn_func(q, k, v, score_mod=_tanh, softcap=2.0)
    with pytest.raises(TypeError, match="mask_mod"):
        flash_attn_func(q, k, v, mask_mod=lambda *_: 3)
    with pytest.raises(ValueError, match="block_sparse_tensors must be left out"):
        flash_attn_func(q, k, v, block_sparse_tensors=object())
    with pytest.raises(ValueError, match="mask_mod must be left out of packed sequences"):
        flash_attn_varlen_func(q, k, v, mask_mod=_same)


def test_a_cache(installed):
    import flash_attn_interface
    from flash_attn import flash_attn_with_kvcache

    cache, used = torch.randn(2, 12, 2, 16), torch.tensor([5, 9], dtype=torch.int32)
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    outs = [
        function(q, cache.clone(), cache.clone(), k=new, v=new, cache_seqlens=used, causal=True)
        for function in (flash_attn_with_kvcache, flash_attn_interface.flash_attn_with_kvcache)
    ]
    for n, length in enumerate((5, 9)):
        rows = torch.cat((cache[n : n + 1, :length], new[n : n + 1]), 1)
        for out in outs:
            torch.testing.assert_close(out[n : n + 1], strobe.attention(q[n : n + 1], rows, rows))


@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (-1, -1)), (False, (3, 2))])
@pytest.mark.parametrize("n_q, n_kv", [(12, 12), (5, 12), (12, 5)])
def test_chunks_of_keys(causal, window, n_q, n_kv):
    from strobe.integrations.flash_attn import fa3

    g = torch.Generator().manual_seed(n_q)
    q, k, v = (torch.randn(2, n, 2, 16, generator=g, dtype=torch.float64).requires_grad_() for n in (n_q, n_kv, n_kv))

    def in_a_chunk(batch, head, i, j):
        return i // 4 == j // 4

    def wanted(q, k, v):
        left, right = (None if side < 0 else side for side in window)
        mask = Window(left, 0 if causal else right) & strobe.Visible(in_a_chunk)
        ahead = k.shape[1] - q.shape[1]  # rows ahead of the first, so that a row's number is the key on which it stands
        some = torch.nn.functional.pad(q, (0, 0, 0, 0, ahead, 0)) if ahead >= 0 else q[:, -ahead:]
        out, lse = strobe.attention(some, k, v, mask=mask, return_lse=True)
        if ahead >= 0:
            return out[:, ahead:], lse[..., ahead:]
        return torch.nn.functional.pad(out, (0, 0, 0, 0, -ahead, 0)), torch.nn.functional.pad(
            lse, (-ahead, 0), value=-torch.inf
        )

    out, lse = fa3.flash_attn_func(q, k, v, causal=causal, window_size=window, attention_chunk=4, return_attn_probs=True)
    torch.testing.assert_close((out, lse), wanted(q, k, v))
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
    found, right = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, wanted(q, k, v)[0]))
    torch.testing.assert_close(found, right)
    with pytest.raises(ValueError, match="attention_chunk must be left out: chunks of packed sequences are a mask function"):
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], None, None, n_q, n_kv, attention_chunk=4)


def test_flash_attention_3_has_an_order_of_its_own(installed):
    import flash_attn_interface

    names = list(inspect.signature(flash_attn_interface.flash_attn_with_kvcache).parameters)
    wanted = """q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table
        cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size
        attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"""
    assert names[:30] == wanted.split()
    g = torch.Generator().manual_seed(0)
    shapes = (2, 1, 4, 16), (2, 1, 2, 16), (4, 8, 2, 16), (9, 8)
    q, new, pages, turns = (torch.randn(*shape, generator=g) for shape in shapes)
    used, table = (torch.tensor(x, dtype=torch.int32) for x in ([5, 2], [[0], [3]]))
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    found = flash_attn_interface.flash_attn_with_kvcache(
        q[:, 0], pages.clone(), pages.clone(), new, new, None, turns, turns, used, None, None, table, cu, None, 1, used, None,
        None, None, 0.3, True, (4, 0), 0, 2.0, False, None, 1, True, 0, True,
    )  # fmt: skip
    wanted = strobe.flash_attn_with_kvcache(
        q[:, 0], pages.clone(), pages.clone(), new, new, turns, turns, used, block_table=table, softmax_scale=0.3, causal=True,
        window_size=(4, 0), softcap=2.0, rotary_interleaved=False, num_splits=1, return_softmax_lse=True, cu_seqlens_q=cu,
        max_seqlen_q=1, rotary_seqlens=used,
    )  # fmt: skip
    assert all(map(torch.equal, found, wanted))


def test_a_schedule_that_is_made_ahead_says_nothing(installed):
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    q, cache, lengths = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 2, 16), torch.tensor([5, 2], dtype=torch.int32)
    schedule = get_scheduler_metadata(2, 1, 8, 4, 2, 16, lengths, q.dtype, causal=True)
    assert schedule.dtype == torch.int32 and schedule.numel() == 0
    found = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True, scheduler_metadata=schedule)
    assert torch.equal(found, strobe.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True))


def test_padding(installed):
    from flash_attn.bert_padding import (
        index_first_axis,
        pad_input,
        unpad_input,
        unpad_input_for_concatenated_sequences,
    )

    x = torch.randn(3, 5, 4, 8, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]])
    rows, places, cu, longest, used = unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and (cu.tolist(), longest) == ([0, 2, 2, 5], 3)
    assert cu.dtype == used.dtype == torch.int32 and used.tolist() == [2, 0, 3]
    back = pad_input(rows, places, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    (grad,) = torch.autograd.grad((back * x.detach()).sum(), x)
    assert torch.equal(grad, x.detach() * mask[..., None, None])
    assert torch.equal(index_first_axis(x.flatten(0, 1), places), rows)
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    rows, _, cu, longest, used = unpad_input(x, mask.bool(), unused.bool())
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 3, 6], 3, [2, 0, 3]) and rows.shape == (6, 4, 8)
    lengths = torch.tensor([[2, 3, 0, 0, 0], [1, 0, 0, 0, 0], [5, 0, 0, 0, 0]])
    rows, places, cu, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert (cu.tolist(), longest) == ([0, 2, 5, 6, 11], 5) and places.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14]
    assert torch.equal(rows, x.flatten(0, 1)[places])


def turned(x, cos, sin, interleaved):
    """Every pair as a complex number, times e ** (i * angle)."""
    half = cos.shape[-1]
    a, b = (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    z = torch.complex(a, b) * torch.complex(cos, sin)[:, None]
    out = x.clone()
    if interleaved:
        out[..., : 2 * half : 2], out[..., 1 : 2 * half : 2] = z.real, z.imag
    else:
        out[..., :half], out[..., half : 2 * half] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(installed, interleaved):
    from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_

    torch.manual_seed(0)
    x, angle = torch.randn(2, 6, 3, 16, dtype=torch.float64), torch.randn(20, 6, dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    expected = turned(x, cos[:6], sin[:6], interleaved)
    torch.testing.assert_close(apply_rotary_emb(x, cos, sin, interleaved), expected)
    offsets = torch.tensor([3, 11])
    shifted = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    for n, offset in enumerate((3, 11)):
        of = slice(offset, offset + 6)
        torch.testing.assert_close(shifted[n], turned(x[n], cos[of], sin[of], interleaved))
    cu = torch.tensor([0, 4, 4, 12], dtype=torch.int32)
    packed = apply_rotary_emb(x.flatten(0, 1), cos, sin, interleaved, cu_seqlens=cu, max_seqlen=8)
    rows = x.flatten(0, 1)
    torch.testing.assert_close(packed[:4], turned(rows[:4], cos[:4], sin[:4], interleaved))
    torch.testing.assert_close(packed[4:], turned(rows[4:], cos[:8], sin[:8], interleaved))
    same = x.clone()
    assert apply_rotary_emb(same, cos, sin, interleaved, inplace=True) is same
    torch.testing.assert_close(same, expected)
    qkv = torch.stack((x, x, x), 2)
    assert apply_rotary_emb_qkv_(qkv, cos, sin, interleaved=interleaved) is qkv
    torch.testing.assert_close(qkv, torch.stack((expected, expected, x), 2))
    grouped = torch.cat((x, x[:, :, :1], x[:, :, :1]), 2)
    apply_rotary_emb_qkv_(grouped, cos, sin, interleaved=interleaved, num_heads_q=3)
    torch.testing.assert_close(grouped, torch.cat((expected, expected[:, :, :1], x[:, :, :1]), 2))
    kv = apply_rotary_emb_kv_(torch.stack((x, x), 2), cos, sin, interleaved)
    torch.testing.assert_close(kv, torch.stack((expected, x), 2))
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb(x, cos, sin, interleaved), x[:, :, :1].clone().requires_grad_())
    with pytest.raises(ValueError, match="cos must have a row for each of 6 positions, got 5"):
        apply_rotary_emb(x, cos[:5], sin[:5])
    with pytest.raises(ValueError, match="cos and sin must have one shape"):
        apply_rotary_emb(x, cos, sin[:5])


def test_rotary_embedding(installed):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    q, kv = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 1, 16)
    angle = torch.outer(torch.arange(9.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))[3:]
    expected = apply_rotary_emb(q, angle.cos(), angle.sin())
    layer = RotaryEmbedding(8)
    torch.testing.assert_close(layer(q.clone(), kv.clone(), seqlen_offset=3)[0], expected)
    with pytest.raises(ValueError, match="needs max_seqlen"):
        layer(q.clone(), kv.clone(), seqlen_offset=torch.tensor([1, 2]))
    grown = RotaryEmbedding(8, scale_base=512.0)
    (q2, kv2), plain = grown(q.clone(), kv.clone()), layer(q.clone(), kv.clone())
    products, expected = (torch.einsum("bihd,bihd->bih", a, b[:, :, 0].expand_as(a)) for a, b in ((q2, kv2), plain))
    torch.testing.assert_close(products[..., 0].isfinite(), expected[..., 0].isfinite())
    torch.testing.assert_close(products, expected, rtol=1e-3, atol=1e-3)  # on the diagonal the growth cancels


def test_signatures_are_flash_attns(installed):
    import flash_attn

    tail = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
    heads = {
        "flash_attn_func": "q k v",
        "flash_attn_qkvpacked_func": "qkv",
        "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    }
    for name, head in heads.items():
        names = list(inspect.signature(getattr(flash_attn, name)).parameters)
        assert names[: len(head.split()) + len(tail)] == head.split() + tail, name


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
def test_transformers_runs_unchanged(monkeypatch, implementation):
    """A tiny model with padding, forward and backward. transformers asks for a GPU, and is told that there is one."""
    import transformers
    from transformers.utils import import_utils

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    ids = torch.randint(0, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = model(ids, attention_mask=mask).logits
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with strobe.install_as_flash_attn():
        assert import_utils.is_flash_attn_2_available() and import_utils.is_flash_attn_3_available()
        assert import_utils.is_flash_attn_greater_or_equal("2.8.0")
        model.set_attn_implementation(implementation)
        out = model(ids, attention_mask=mask).logits
        out[mask.bool()].sum().backward()
    monkeypatch.undo()
    torch.testing.assert_close(out[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    strobe.integrations.flash_attn._forget_what_transformers_found()
    assert not import_utils.is_flash_attn_2_available()


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("by_table", [False, True])
def test_transformers_batches_continuously(monkeypatch, implementation, by_table):
    """Requests that come and go, their keys in pages; by_table: steps append to pages and read them by a table, for which
    transformers asks for a GPU."""
    import transformers
    from transformers.generation.continuous_batching import initialization, input_outputs

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    prompts = [torch.randint(1, 64, (n,)) for n in (5, 17, 40)]
    tokens = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = [model.generate(prompt[None], generation_config=tokens)[0, len(prompt) :].tolist() for prompt in prompts]
    pages = transformers.ContinuousBatchingConfig(
        page_size=32, num_blocks=16, max_batch_tokens=64, max_blocks_per_request=2 * by_table, use_cuda_graph=False
    )
    steps = []
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *given: None)
    monkeypatch.setattr(input_outputs, "get_available_devices", lambda: {"cpu"})  # which keeps what it found
    with strobe.install_as_flash_attn():
        module = importlib.import_module("flash_attn" if implementation[-1] == "2" else "flash_attn_interface")
        with_kvcache = module.flash_attn_with_kvcache
        step = functools.wraps(with_kvcache)(lambda *given, **keywords: steps.append(1) or with_kvcache(*given, **keywords))
        monkeypatch.setattr(module, "flash_attn_with_kvcache", step)
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
            on_a_gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
            model.set_attn_implementation(implementation)
        found = model.generate_batch([prompt.tolist() for prompt in prompts], tokens, continuous_batching_config=pages)
    assert [found[name].generated_tokens for name in sorted(found)] == wanted and bool(steps) == by_table
