"""Bad input: one clear ValueError or TypeError that names the argument, before any launch. The table of them."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe import device
from strobe.call import dispatch
from strobe.device import Arch


def x(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


Q = x(2, 8, 4, 32)
T = x(10, 4, 32)
CU = torch.tensor([0, 4, 10], dtype=torch.int32)


def cu(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def varlen(q=T, k=T, v=T, cu_q=CU, cu_k=CU, max_q=6, max_k=6, **keywords):
    return strobe.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **keywords)


def flash(q=Q, k=Q, v=Q, **keywords):
    return strobe.flash_attn_func(q, k, v, **keywords)


def attend(q=Q, k=Q, v=Q, **keywords):
    return strobe.attention(q, k, v, **keywords)


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([Q[0], Q[1]], layout=layout)


def halved(score, batch, head, q_index, kv_index):
    return score * 0.5


BAD = {
    # what: (call, error, what the message says)
    "q is no tensor": (lambda: attend(q=[1.0]), TypeError, "q must be a tensor, got list"),
    "q of rank 3": (lambda: attend(q=x(8, 4, 32)), ValueError, r"q must have shape \[batch, seqlen, heads, head_dim\]"),
    "v of rank 5": (lambda: attend(v=x(1, 2, 8, 4, 32)), ValueError, "v must have shape"),
    "integers": (lambda: attend(q=x(2, 8, 4, 32, dtype=torch.int32)), TypeError, "q must be float16, bfloat16"),
    "mixed dtypes": (lambda: attend(k=x(2, 8, 4, 32, dtype=torch.float16)), TypeError, "k must have q's dtype"),
    "mixed devices": (lambda: attend(v=x(2, 8, 4, 32, device="meta")), ValueError, "v must be on q's device cpu"),
    "head dim not a multiple of 8": (lambda: attend(*[x(2, 8, 4, 36)] * 3), ValueError, "multiple of 8 from 8 to 256, got 36"),
    "head dim too large": (lambda: attend(*[x(2, 8, 4, 264)] * 3), ValueError, "from 8 to 256, got 264"),
    "head dim 0": (lambda: attend(*[x(2, 8, 4, 0)] * 3), ValueError, "from 8 to 256, got 0"),
    "head dims differ": (lambda: attend(k=x(2, 8, 4, 64)), ValueError, "k must have q's head dim 32, got 64"),
    "k and v lengths differ": (lambda: attend(v=x(2, 9, 4, 32)), ValueError, "v must have k's shape"),
    "batches differ": (lambda: attend(k=x(3, 8, 4, 32), v=x(3, 8, 4, 32)), ValueError, "k must have q's batch 2, got 3"),
    "heads not divisible": (lambda: attend(k=x(2, 8, 3, 32), v=x(2, 8, 3, 32)), ValueError, "multiple of k's, got 4 and 3"),
    "no heads": (lambda: attend(k=x(2, 8, 0, 32), v=x(2, 8, 0, 32)), ValueError, "multiple of k's, got 4 and 0"),
    "last dim strided": (lambda: attend(q=x(2, 8, 32, 4).mT), ValueError, "q must be contiguous in its last dim"),
    "no heads of q": (lambda: attend(q=x(2, 8, 0, 32)), ValueError, "q's heads must be a multiple of k's, got 0 and 4"),
    "q nested": (lambda: attend(q=nested(), k=nested(), v=nested()), TypeError, "q must be a plain tensor, got a nested one"),
    "q jagged": (lambda: attend(q=nested(torch.jagged)), TypeError, "all nested tensors or none, got a plain k"),
    "k sparse": (lambda: attend(k=Q.to_sparse()), TypeError, "k must be a dense tensor, got one with layout torch.sparse_coo"),
    "v mkldnn": (lambda: attend(v=Q.to_mkldnn()), TypeError, "v must be a dense tensor, got one with layout torch._mkldnn"),
    "bias sparse": (
        lambda: attend(score=strobe.Score(bias=x(1, 1, 8, 8).to_sparse())), TypeError, "bias must be a dense tensor, got one",
    ),
    "scale not a number": (lambda: flash(softmax_scale="1"), TypeError, "softmax_scale must be a number"),
    "scale NaN": (lambda: flash(softmax_scale=float("nan")), ValueError, "softmax_scale must be finite"),
    "scale beyond floats": (lambda: flash(softmax_scale=10**400), ValueError, "softmax_scale must be .* an int of 1329 bits"),
    "scale beyond float32": (lambda: flash(softmax_scale=-1e300), ValueError, r"at most 2\^127 in size, got -1e\+300"),
    "dropout": (lambda: flash(dropout_p=1.0), ValueError, "dropout_p must be from 0 to below 1, got 1.0"),
    "dropout, varlen": (lambda: varlen(dropout_p=-0.1), ValueError, "dropout_p must be from 0 to below 1, got -0.1"),
    "dropout no number": (lambda: attend(dropout_p="0.1"), TypeError, "dropout_p must be a number, got str"),
    "dropout that a backend does not take": (
        lambda: attend(dropout_p=0.1, backend="torch_cpu"), ValueError, "torch_cpu: takes no dropout",
    ),
    "window of three": (lambda: flash(window_size=(1, 2, 3)), ValueError, "window_size must be a pair"),
    "window of one int": (lambda: flash(window_size=3), ValueError, "window_size must be a pair"),
    "window of floats": (lambda: flash(window_size=(1.5, 0)), TypeError, "window_size must hold two ints"),
    "window below -1": (lambda: flash(window_size=(-2, 0)), ValueError, "window_size must hold -1"),
    "causal, window below -1": (lambda: flash(causal=True, window_size=(4, -3)), ValueError, "window_size must hold -1"),
    "negative Window": (lambda: strobe.Window(left=-1), ValueError, "left must be 0 or more"),
    "negative Prefix": (lambda: strobe.Prefix(-4), ValueError, "prefix must be 0 or more"),
    "softcap negative": (lambda: flash(softcap=-1.0), ValueError, "softcap must be 0"),
    "softcap NaN": (lambda: flash(softcap=float("nan")), ValueError, "softcap must be 0 .* got nan"),
    "softcap no number": (lambda: flash(softcap="1"), TypeError, "softcap must be a number, got str"),
    "softcap a tensor": (lambda: strobe.Score(softcap=x(1)), TypeError, "softcap must be a number, got Tensor"),
    "mask no mask": (lambda: attend(mask="causal"), TypeError, "mask must be a strobe mask"),
    "score no score": (lambda: attend(score=30.0), TypeError, "score must be a strobe.Score"),
    "alibi of wrong dtype": (lambda: flash(alibi_slopes=x(4, dtype=torch.float16)), TypeError, "alibi_slopes must be float32"),
    "alibi of wrong shape": (lambda: flash(alibi_slopes=x(3)), ValueError, r"alibi_slopes must have shape \[4\] or \[2, 4\]"),
    "alibi on another device": (lambda: flash(alibi_slopes=x(4, device="meta")), ValueError, "alibi_slopes must be on"),
    "alibi with gradient": (lambda: flash(alibi_slopes=x(4).requires_grad_()), ValueError, "alibi_slopes must not require"),
    "documents of wrong dtype": (lambda: strobe.Document(x(2, 8)), TypeError, "Document: q must be an integer tensor"),
    "documents nested": (lambda: strobe.Document(nested().long()), TypeError, "Document: q must be a dense tensor"),
    "documents of wrong rank": (lambda: strobe.Document(cu(0, 1)), ValueError, "Document: q must have shape"),
    "documents of wrong shape": (
        lambda: attend(mask=strobe.Document(torch.zeros(2, 7, dtype=torch.int32))), ValueError, "Document's q must have shape",
    ),
    "documents with packed sequences": (
        lambda: attend(T, T, T, cu_seqlens_q=CU, cu_seqlens_kv=CU, mask=strobe.Document(cu(0).view(1, 1))),
        ValueError, "Document goes with dense",
    ),
    "cu_seqlens of wrong dtype": (lambda: varlen(cu_q=CU.long()), TypeError, "cu_seqlens_q must be int32, got torch.int64"),
    "cu_seqlens of wrong rank": (lambda: varlen(cu_k=CU.view(1, 3)), ValueError, "cu_seqlens_k must be contiguous with shape"),
    "cu_seqlens of other length": (lambda: varlen(cu_k=cu(0, 10)), ValueError, "cu_seqlens_k must have cu_seqlens_q's shape"),
    "cu_seqlens decreasing": (lambda: varlen(cu_q=cu(0, 7, 5)), ValueError, "cu_seqlens_q must start at 0 and never decrease"),
    "cu_seqlens not from 0": (lambda: varlen(cu_k=cu(1, 4, 10)), ValueError, "cu_seqlens_k must start at 0"),
    "cu_seqlens too large": (lambda: varlen(cu_q=cu(0, 4, 11), max_q=9), ValueError, "must not exceed the 10 rows given"),
    "cu_seqlens empty": (lambda: varlen(cu_q=CU[:0], cu_k=CU[:0]), ValueError, "cu_seqlens_q must be contiguous with shape"),
    "cu_seqlens missing": (lambda: varlen(cu_k=None), TypeError, "cu_seqlens_k must be an int32 tensor, got None"),
    "cu_seqlens on another device": (lambda: varlen(cu_q=CU.to("meta")), ValueError, "cu_seqlens_q must be on q's device"),
    "max_seqlen too small": (lambda: varlen(max_q=5), ValueError, "no sequence longer than max_seqlen = 5, got"),
    "max_seqlen a tensor of floats": (lambda: varlen(max_k=torch.tensor(6.0)), TypeError, "max_seqlen_k must be an int"),
    "max_seqlen a bool": (lambda: varlen(max_k=True), TypeError, "max_seqlen_k must be an int, got bool"),
    "max_seqlen a string": (lambda: varlen(max_q="6"), TypeError, "max_seqlen_q must be an int, got str"),
    "max_seqlen negative": (lambda: varlen(max_q=-1), ValueError, "max_seqlen_q must be 0 or more"),
    "max_seqlen beyond int32": (lambda: varlen(max_k=10**39), ValueError, "max_seqlen_k must be at most 2147483647, got 1000"),
    "max_seqlen for dense": (lambda: attend(max_seqlen_q=8), ValueError, "max_seqlen_q and max_seqlen_kv go with cu_seqlens"),
    "packed q of rank 4": (lambda: varlen(q=Q), ValueError, r"q must have shape \[total, heads, head_dim\]"),
    "block table": (lambda: varlen(block_table=cu(0)), ValueError, "k_cache must have shape .pages, page_size"),
    "qkv of wrong shape": (lambda: strobe.flash_attn_qkvpacked_func(x(2, 8, 2, 4, 32)), ValueError, "qkv must have shape"),
    "kv of wrong shape": (lambda: strobe.flash_attn_kvpacked_func(Q, x(2, 8, 3, 4, 32)), ValueError, "kv must have shape"),
    "bias no tensor": (lambda: attend(score=strobe.Score(bias=1.0)), TypeError, "bias must be a tensor, got float"),
    "bias of wrong shape": (
        lambda: attend(score=strobe.Score(bias=x(2, 4, 8, 7))), ValueError,
        r"bias must have shape \[2, 4, 8, 8\], any of which may be 1, got \[2, 4, 8, 7\]",
    ),
    "bias of wrong dtype": (
        lambda: attend(score=strobe.Score(bias=x(1, 1, 8, 8, dtype=torch.float16))), TypeError, "bias must be float32 or have",
    ),
    "bias for packed sequences": (
        lambda: attend(T, T, T, cu_seqlens_q=CU, cu_seqlens_kv=CU, score=strobe.Score(bias=x(1, 1, 1, 1))),
        ValueError, "bias goes with dense q, k, v, got packed sequences",
    ),
    "sinks of wrong shape": (lambda: flash(learnable_sink=x(3)), ValueError, r"sinks must have shape \[4\], got \[3\]"),
    "sinks of integers": (lambda: flash(learnable_sink=cu(1, 2, 3, 4)), TypeError, "sinks must be float32, bfloat16 or"),
    "sinks elsewhere": (lambda: flash(learnable_sink=x(4, device="meta")), ValueError, "sinks must be on q's device cpu"),
    "seqused of wrong dtype": (lambda: attend(seqused_q=cu(8, 8).long()), TypeError, "seqused_q must be int32, got"),
    "seqused of wrong shape": (lambda: attend(seqused_kv=cu(8)), ValueError, r"seqused_k must be contiguous with shape \[2\]"),
    "seqused elsewhere": (lambda: attend(seqused_kv=cu(8, 8).to("meta")), ValueError, "seqused_k must be on q's device cpu"),
    "seqused too large": (lambda: attend(seqused_kv=cu(8, 9)), ValueError, "seqused_k must be from 0 to the length of each"),
    "seqused negative": (lambda: attend(seqused_q=cu(-1, 8)), ValueError, r"seqused_q must be from 0 .* got \[-1, 8\]"),
    "seqused too large for its sequence": (lambda: varlen(seqused_k=cu(5, 6)), ValueError, "seqused_k must be from 0 to the"),
    "a gradient that is not there": (
        lambda: attend(x(2, 8, 4, 32).requires_grad_(), score=strobe.Score(function=halved)).sum().backward(),
        ValueError, r"tiled: needs the derivative of the score function halved: pass it as strobe.Score\(function_gradient=",
    ),
    "a derivative of nothing": (
        lambda: strobe.Score(function_gradient=halved), ValueError, "function_gradient goes with a function, got none",
    ),
    "a derivative that is none": (
        lambda: strobe.Score(function=halved, function_gradient=0.5), TypeError, "score: function_gradient must be a Python f",
    ),
    "unknown backend": (lambda: attend(backend="fastest"), ValueError, "backend must be one of sm100, sm90, sm80, portable"),
    "backend no name": (lambda: attend(backend=["tiled"]), TypeError, "backend must be a name from .*, got list"),
    "dropout_mask of a negative length": (
        lambda: strobe.dropout_mask(torch.zeros(1, dtype=torch.int64), 0.1, 1, 2, -3, 4), ValueError, "n_q must be 0 or more",
    ),
    "dropout_mask of half a head": (
        lambda: strobe.dropout_mask(torch.zeros(1, dtype=torch.int64), 0.1, 1, 0.5, 3, 4), TypeError, "heads must be an int",
    ),
    "backend that refuses": (lambda: attend(backend="sm90"), ValueError, "backend 'sm90' refuses .*needs a Hopper GPU"),
    "backend without backward": (
        lambda: attend(q=x(2, 8, 4, 32).requires_grad_(), backend="sm100"), ValueError, "'sm100' has no backward",
    ),
    "backend without backward, sinks": (
        lambda: attend(score=strobe.Score(sinks=x(4).requires_grad_()), backend="sm100"), ValueError, "'sm100' has no backward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    call, error, message = BAD[what]
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_supports_gives_the_reason_instead():
    ok, reasons = strobe.supports(Q, Q[..., :16], Q)
    assert not ok and reasons == ["k must have q's head dim 32, got 16"]
    ok, reasons = strobe.supports(Q, Q, Q, scale=10**400)
    assert not ok and "an int of 1329 bits" in reasons[0]
    ok, reasons = strobe.supports(nested(torch.jagged), Q, Q)
    assert not ok and "got a plain k" in reasons[0]


def test_a_nested_tensor_beside_plain_ones_of_its_sizes():
    """It is refused before anything that would end the process is asked of it."""
    for _ in range(2):
        attend()
    with pytest.raises(TypeError, match="q must be a plain tensor"):
        attend(nested(), nested(), nested())


def test_second_gradient_is_refused():
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(strobe.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["mps", "xpu", "AMD Instinct MI300X under ROCm"])
def test_devices_of_others_are_refused_and_the_way_out_is_named(monkeypatch, name):
    monkeypatch.setattr(dispatch, "arch_of", lambda device: Arch(name, 0))
    q = torch.randn(1, 8, 2, 32)
    cache = strobe.Cache(q, q, cu(8))
    untried = rf"on {name}: .*tiled: plain PyTorch, never yet run on {name}, so it runs only by name: backend='tiled'"
    with pytest.raises(ValueError, match=untried):
        strobe.attention(q, q, q)
    assert strobe.attention(q, q, q, backend="tiled").isfinite().all()
    with pytest.raises(ValueError, match=f"decode: needs an NVIDIA GPU, not {name}"):
        strobe.decode(q, cache)


def test_an_amd_gpu_is_no_nvidia_gpu_of_a_high_number(monkeypatch):
    found = SimpleNamespace(name="AMD Instinct MI300X", major=9, minor=4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    arch = device._cuda_arch.__wrapped__(0)
    assert arch.is_untried and not arch.is_gpu and str(arch) == "AMD Instinct MI300X under ROCm"


BAD_CU_SEQLENS_ON_A_GPU = """
import torch, strobe
q = torch.randn(10, 2, 64, dtype=torch.bfloat16, device="cuda")
cu = torch.tensor([0, 7, 5, 400], dtype=torch.int32, device="cuda")
out = strobe.flash_attn_varlen_func(q, q, q, cu, cu, 10, 10)
torch.cuda.synchronize()
print("ran", bool(torch.isfinite(out).all()))
"""


@pytest.mark.gpu
def test_cu_seqlens_on_a_gpu_are_checked_with_the_debug_switch_and_harmless_without():
    def run(debug):
        environment = {**os.environ, "STROBE_DEBUG": debug}
        return subprocess.run([sys.executable, "-c", BAD_CU_SEQLENS_ON_A_GPU], capture_output=True, text=True, env=environment)

    assert "ran True" in run("0").stdout
    checked = run("1")
    assert checked.returncode != 0 and "cu_seqlens_q must start at 0 and never decrease" in checked.stderr
