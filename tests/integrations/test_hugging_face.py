"""diffusers' dispatcher and the package `kernels` on Strobe, where they are installed."""

import json
from importlib.metadata import distributions

import pytest
import torch
from transformers.utils import is_kernels_available

import strobe
from strobe.integrations import diffusers as door
from strobe.integrations import kernels as kernel_door
from strobe.integrations.flash_attn import FUNCTIONS


def needs(package: str):
    missing = not list(distributions(name=package))  # a folder of tests has the name of one of them
    return pytest.mark.skipif(missing, reason=f"needs {package}, which `make test` does not install: pip install {package}")


@pytest.fixture(scope="module")
def dispatch():
    """diffusers' module of its dispatcher, with Strobe in it."""
    door.register()
    door.register()
    from diffusers.models import attention_dispatch

    return attention_dispatch


def qkv(heads_kv: int = 2) -> list[torch.Tensor]:
    return [torch.randn(2, n, heads, 24, requires_grad=True) for n, heads in ((20, 2), (33, heads_kv), (33, heads_kv))]


@needs("diffusers")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"attn_mask": torch.rand(2, 33) > 0.3},
        {"attn_mask": torch.randn(2, 1, 20, 33)},
        {"attn_mask": torch.rand(20, 33) > 0.3},
        {"is_causal": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_as_diffusers_own_backend(dispatch, options, monkeypatch):
    tensors = qkv()
    theirs = dispatch.dispatch_attention_fn(*tensors, **options, backend="native")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    ours = dispatch.dispatch_attention_fn(*tensors, **options, backend="strobe")
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    upstream = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(out, tensors, upstream) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@needs("diffusers")
def test_gqa_and_what_is_refused(dispatch):
    q, k, v = qkv(1)
    out = dispatch.dispatch_attention_fn(q, k, v, enable_gqa=True, backend="strobe")
    torch.testing.assert_close(out, strobe.attention(q, k, v))
    with pytest.raises(ValueError, match="return_lse is not taken"):
        dispatch.dispatch_attention_fn(q, k, v, attention_kwargs={"return_lse": True}, backend="strobe")
    with pytest.raises(ValueError, match=r"context parallelism is not taken.*strobe\.parallel"):
        dispatch.dispatch_attention_fn(q, k, v, parallel_config=object(), backend="strobe")


@needs("diffusers")
def test_a_model(dispatch, monkeypatch):
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    given = dict(
        hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 5, 32), pooled_projections=torch.randn(1, 32),
        timestep=torch.tensor([1.0]), img_ids=torch.randn(16, 3), txt_ids=torch.randn(5, 3),
    )  # fmt: skip
    with torch.no_grad():
        expected = model(**given).sample
        model.set_attention_backend("strobe")
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
        torch.testing.assert_close(model(**given).sample, expected, atol=1e-5, rtol=0)
        with dispatch.attention_backend("strobe"):
            assert dispatch._AttentionBackendRegistry.get_active_backend()[0].value == "strobe"


def test_a_kernel_repository_has_flash_attns_functions(tmp_path):
    folder = kernel_door.write(tmp_path / "made/here")
    for device in ("cpu", "cuda"):
        build = folder / f"build/torch-{device}"
        assert json.loads((build / "metadata.json").read_text())["backend"] == {"type": device}
        names: dict = {}
        exec((build / "__init__.py").read_text(), names)
        assert names.keys() >= FUNCTIONS.keys() and names["flash_attn_func"] is strobe.flash_attn_func


@needs("kernels")
def test_kernels_loads_it(tmp_path, monkeypatch):
    from kernels import get_kernel, get_local_kernel

    folder = kernel_door.write(tmp_path / "kernel")
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/flash-attn2={folder}")
    found = get_kernel("kernels-community/flash-attn2", version=3)
    assert found.flash_attn_varlen_func is strobe.flash_attn_varlen_func
    assert get_local_kernel(folder).flash_attn_func is strobe.flash_attn_func


@pytest.mark.skipif(not is_kernels_available(), reason="needs the version of kernels that transformers takes")
def test_transformers_loads_it(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = kernel_door.write(tmp_path / "kernel")
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/flash-attn2={folder}")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=50
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.randint(50, (2, 12))
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation("kernels-community/flash-attn2")
        torch.testing.assert_close(model(tokens).logits, expected, atol=2e-2, rtol=0)
    assert "kernels-community/flash-attn2" in model.config._attn_implementation
