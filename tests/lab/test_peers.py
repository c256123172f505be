"""Peers that run on GPUs alone, asked on the CPU: what they are called with, and that it is the same attention."""

import sys
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe.lab.bench import peers
from strobe.lab.bench.accuracy import Gate
from strobe.lab.bench.inputs import input_sets
from strobe.lab.bench.peers import bind, peers_for, standard
from strobe.lab.bench.plan import MASKS, Point

PEERS = peers_for(torch.device("cuda"))
SMALL_WINDOW = strobe.Window(5, 0)


@pytest.fixture(params=["full", "causal", "window"])
def point(request, monkeypatch):
    """Grouped heads; the window is small enough to cut something off."""
    monkeypatch.setitem(MASKS, "window", SMALL_WINDOW)
    return Point(2, 40, 4, 2, 16, 16, "fp32", request.param, False)


def error(peer, point) -> float:
    inputs = input_sets(point, torch.device("cpu"))[0]
    result = bind(peer, point, inputs)()
    results = result if isinstance(result, tuple) else (result,)
    got = tuple(standard(x, peer) for x in results)
    return Gate(inputs, MASKS[point.mask]).error(got if point.backward else got[0])


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_computes_the_same(point, monkeypatch):
    """Uncompiled, which PyTorch offers for this. One compilation serves all inputs of a point, and no other point."""
    compiled, resets = [], []
    monkeypatch.setattr(torch, "compile", lambda function, **options: (compiled.append(function.__name__), function)[1])
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    peers._compiled_flex.cache_clear()
    assert error(PEERS["FlexAttention"], point) < 1e-5 and error(PEERS["FlexAttention"], point) < 1e-5
    names = ("create_block_mask", "flex_attention")
    assert [compiled.count(name) for name in names] == [point.mask != "full", 1]
    assert error(PEERS["FlexAttention"], Point.of(vars(point) | {"heads_kv": 4})) < 1e-5
    assert len(resets) == 2
    peers._compiled_flex.cache_clear()


class Triangle:
    """xFormers' mask from the first key on, which is ours where there are as many keys as queries."""

    mask = strobe.Causal()


class Local:
    def __init__(self, window_left, window_right):
        self.mask = strobe.Window(window_left, window_right)


def memory_efficient(q, k, v, attn_bias):
    """What xFormers documents: [B, M, H, K], or [B, M, G, H, K] with keys expanded along H."""
    assert q.shape[:-1] == k.shape[:-1]
    mask = attn_bias.mask if attn_bias else strobe.Full()
    return strobe.attention(q.flatten(2, -2), k.flatten(2, -2), v.flatten(2, -2), mask=mask).view(q.shape[:-1] + v.shape[-1:])


@pytest.fixture
def xformers(monkeypatch):
    ops = SimpleNamespace(LowerTriangularMask=Triangle, memory_efficient_attention=memory_efficient)
    bias = SimpleNamespace(LocalAttentionFromBottomRightMask=Local)
    for name, module in (("xformers", ops), ("xformers.ops", ops), ("xformers.ops.fmha", ops)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", bias)


@pytest.mark.parametrize("heads_kv", [2, 4])
def test_xformers_is_asked_for_the_same(point, heads_kv, xformers):
    point = Point.of(vars(point) | {"heads_kv": heads_kv})
    assert error(PEERS["xFormers"], point) < 1e-5
    assert error(PEERS["xFormers"], Point.of(vars(point) | {"backward": True})) < 1e-5


@pytest.mark.parametrize("name", ["FlexAttention", "xFormers"])
def test_what_they_do_not_take_is_one_sentence(name, xformers):
    x = torch.zeros(1, 8, 1, 16)
    with pytest.raises(ValueError, match="takes fp16 and bf16, not fp8"):
        PEERS[name].prepare(*(x.to(torch.float8_e4m3fn),) * 3, strobe.Full())
    with pytest.raises(ValueError, match="window_size cannot express"):
        PEERS[name].prepare(x, x, x, strobe.Prefix(3))


def test_xformers_refuses_half_a_window(xformers):
    x = torch.zeros(1, 8, 1, 16)
    with pytest.raises(ValueError, match="windows with two bounds, not window"):
        PEERS["xFormers"].prepare(x, x, x, strobe.Window(3, None))


@pytest.fixture
def fa3(monkeypatch):
    """flash_attn_interface as the wheel has it: out alone, or with its LSE; the keywords that we pass, and no others."""
    seen = {"tuple": False}

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        left, right = (None if bound < 0 else bound for bound in window_size)
        mask = strobe.Window(left, 0 if causal else right)
        out, lse = strobe.attention(q, k, v, mask=mask, scale=softmax_scale, return_lse=True)
        return (out, lse) if seen["tuple"] else out

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setitem(sys.modules, "flash_attn_config", None)
    return seen


@pytest.mark.parametrize("with_lse", [False, True])
def test_fa3_is_asked_for_the_same(point, with_lse, fa3):
    fa3["tuple"] = with_lse
    assert error(PEERS["FA3"], point) < 1e-5
    assert error(PEERS["FA3"], Point.of(vars(point) | {"backward": True})) < 1e-5


def test_a_build_of_fa3_without_a_backward_refuses_it(fa3, monkeypatch):
    config = {"build_flags": {"FLASHATTENTION_DISABLE_BACKWARD": True}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", SimpleNamespace(CONFIG=config))
    point = Point(2, 40, 4, 2, 16, 16, "fp32", "causal", False)
    assert error(PEERS["FA3"], point) < 1e-5
    with pytest.raises(NotImplementedError, match="this build of FlashAttention-3 has no backward"):
        error(PEERS["FA3"], Point.of(vars(point) | {"backward": True}))
