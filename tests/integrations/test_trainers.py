"""The examples for torchtitan and torchtune: with their own modules where they are installed, else with modules that have the
parts which the examples touch."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

import strobe
from strobe.integrations import sdpa

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
torchtitan_model = importlib.import_module("torchtitan_model")
torchtune_model = importlib.import_module("torchtune_model")

needs_impls = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"), reason="this PyTorch takes no implementations"
)


def missing(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return True
    return False


class Tuned(torch.nn.Module):
    """What a layer of torchtune is to the example."""

    def __init__(self):
        super().__init__()
        self._attention_call = None


@pytest.mark.exhaustive
def test_torchtune():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Tuned())
    torchtune_model.use_strobe(model)
    q, k, v = torch.randn(3, 2, 4, 20, 16)
    call = model[1]._attention_call
    torch.testing.assert_close(
        call(q, k, v, None, 0.0, True), torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    )
    seen = (torch.rand(2, 20, 20) > 0.3) | torch.eye(20, dtype=torch.bool)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
    torch.testing.assert_close(call(q, k, v, seen, 0.0, False), expected)
    packed = create_block_mask(lambda b, h, i, j: (i // 7 == j // 7) & (i >= j), 2, None, 20, 20, device="cpu")
    at = torch.arange(20)
    inside = (at[:, None] // 7 == at // 7) & (at[:, None] >= at)
    torch.testing.assert_close(
        call(q, k, v, packed, 0.0, False), torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=inside)
    )


@pytest.mark.skipif(missing("torchtune.modules"), reason="needs torchtune, with torchao")
def test_torchtunes_own_layer():
    from torchtune.modules import MultiHeadAttention

    torch.manual_seed(0)
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "output_proj": 64}
    linear = {name: torch.nn.Linear(64, size, bias=False) for name, size in sizes.items()}
    layer = MultiHeadAttention(embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, **linear)
    x = torch.randn(2, 20, 64)
    expected = layer(x, x)
    torchtune_model.use_strobe(layer)
    torch.testing.assert_close(layer(x, x), expected)


@needs_impls
def test_torchtitan():
    class Layer(torch.nn.Module):
        sdpa_backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)

    model = torch.nn.Sequential(Layer(), torch.nn.Linear(1, 1))
    try:
        torchtitan_model.use_strobe(model)
        assert torch.nn.attention.current_flash_attention_impl() == "strobe"
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert model[0].sdpa_backends == [SDPBackend.FLASH_ATTENTION] and not hasattr(model[1], "sdpa_backends")


@needs_impls
@pytest.mark.skipif(missing("torchtitan.models.common.attention"), reason="needs torchtitan")
def test_torchtitans_own_layers():
    from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention, VarlenMetadata

    torchtitan_model.use_strobe(layer := ScaledDotProductAttention(ScaledDotProductAttention.Config()))
    torch.nn.attention.restore_flash_attention_impl()
    assert layer.sdpa_backends == [SDPBackend.FLASH_ATTENTION]
    q, k, v = torch.randn(3, 1, 20, 4, 16).bfloat16()
    cu = torch.tensor([0, 6, 20], dtype=torch.int32)
    strobe_on_cpu = sdpa.Implementation("CPU")
    try:
        torch.nn.attention.activate_flash_attention_impl("strobe")
        out = VarlenAttention(VarlenAttention.Config())(q, k, v, attention_masks=VarlenMetadata(cu, cu, 14, 14))
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        strobe_on_cpu.remove()
    document = (torch.arange(20) >= 6).int()[None]
    torch.testing.assert_close(
        out, strobe.attention(q, k, v, mask=strobe.Causal() & strobe.Document(document)), atol=2e-2, rtol=0
    )
