"""PyTorch's attention on Strobe: the function beside PyTorch's, and PyTorch's own function through the flash operators.

The operators are tried on a CPU too, which has none of its own: the implementation is registered for that key, and PyTorch's
autograd and its varlen_attn find it there.
"""

import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import strobe
from strobe.integrations import sdpa

HAS_IMPLS = hasattr(torch_attention, "restore_flash_attention_impl")
needs_impls = pytest.mark.skipif(not HAS_IMPLS, reason="PyTorch takes implementations and gives them back from 2.11 on")
needs_pages = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="this PyTorch's varlen_attn takes no pages, no out and no groups of heads",
)


def qkv(shape_q=(2, 3, 5, 16), shape_k=None, head_dim_v=None, dtype=torch.float64):
    torch.manual_seed(0)
    shape_k = shape_k or shape_q
    shape_v = (*shape_k[:-1], head_dim_v or shape_k[-1])
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in (shape_q, shape_k, shape_v))


def compare(tensors, mask=None, **keywords):
    """Result and gradients of strobe's function and PyTorch's, for the same upstream gradient."""
    learned = [x for x in (*tensors, mask) if x is not None and x.requires_grad]
    results = []
    for function in (strobe.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
        out = function(*tensors, attn_mask=mask, **keywords)
        torch.manual_seed(1)
        results.append((out, *torch.autograd.grad(out, learned, torch.randn(out.shape, dtype=out.dtype))))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


SHAPES = {
    "no heads": ((4, 8), (6, 8)),
    "no batch": ((3, 4, 8), (3, 6, 8)),
    "usual": ((2, 3, 5, 16), (2, 3, 7, 16)),
    "two batch dims": ((2, 2, 3, 4, 8), (2, 2, 3, 5, 8)),
    "keys of all batch entries": ((2, 3, 5, 16), (1, 3, 6, 16)),
    "keys of all heads": ((2, 3, 5, 16), (2, 1, 6, 16)),
    "queries of all batch entries": ((1, 3, 5, 16), (2, 3, 6, 16)),
    "fewer dims": ((2, 3, 5, 16), (3, 6, 16)),
    "odd head dim": ((2, 3, 5, 13), (2, 3, 7, 13)),
    "no queries": ((2, 3, 0, 16), (2, 3, 7, 16)),
    "no keys": ((2, 3, 5, 16), (2, 3, 0, 16)),
    "no heads at all": ((2, 0, 5, 16), (2, 0, 5, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    if name == "no heads at all" and torch.__version__ < "2.13":
        pytest.skip("PyTorch's own function divides by zero before 2.13")
    compare(qkv(*SHAPES[name]))
    compare(qkv(*SHAPES[name], head_dim_v=7), scale=0.3)


@pytest.mark.parametrize("n_q, n_kv", [(5, 5), (5, 9), (9, 5), (1, 7), (7, 1)])
def test_causal_is_top_left(n_q, n_kv):
    tensors = qkv((2, 3, n_q, 16), (2, 3, n_kv, 16))
    compare(tensors, is_causal=True)
    upper_left = causal_upper_left(n_q, n_kv)
    assert torch.equal(
        strobe.scaled_dot_product_attention(*tensors, attn_mask=upper_left),
        strobe.scaled_dot_product_attention(*tensors, is_causal=True),
    )
    lower_right = torch.ones(n_q, n_kv, dtype=torch.bool).tril(n_kv - n_q)
    torch.testing.assert_close(
        strobe.scaled_dot_product_attention(*tensors, attn_mask=causal_lower_right(n_q, n_kv)),
        torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=lower_right),
    )


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (3, 1, 7), (2, 1, 1, 7), (2, 3, 5, 7), (1, 1, 1, 1)])
@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_masks_broadcast(shape, kind):
    torch.manual_seed(2)
    mask = torch.randn(shape, dtype=torch.float64)
    mask = mask > 0 if kind == "bool" else mask.requires_grad_(kind == "learned")
    compare(qkv((2, 3, 5, 16), (2, 3, 7, 16)), mask)


def test_masks_of_many_dims_and_of_few():
    mask = torch.randn(2, 1, 1, 4, 5, dtype=torch.float64, requires_grad=True)
    compare(qkv((2, 2, 3, 4, 8), (2, 2, 3, 5, 8)), mask)
    compare(qkv((4, 8), (5, 8)), torch.randn(4, 5, dtype=torch.float64) > 0)


@pytest.mark.parametrize("n_q, n_kv", [(5, 5), (4, 9), (9, 4)])
def test_a_pair_is_seen_by_both_the_mask_and_causal(n_q, n_kv):
    tensors, mask = qkv((2, 3, n_q, 16), (2, 3, n_kv, 16)), torch.randn(n_q, n_kv, dtype=torch.float64)
    both = mask.masked_fill(~torch.ones(n_q, n_kv, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(
        strobe.scaled_dot_product_attention(*tensors, mask, is_causal=True),
        torch.nn.functional.scaled_dot_product_attention(*tensors, both),
    )


def test_rows_that_see_nothing_give_zero():
    tensors = qkv()
    for mask in (torch.zeros(5, 5, dtype=torch.bool), torch.full((5, 5), -torch.inf, dtype=torch.float64)):
        out = strobe.scaled_dot_product_attention(*tensors, mask)
        assert not out.any() and not any(x.any() for x in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("shape_k", [(2, 2, 5, 16), (2, 1, 5, 16), (2, 4, 5, 16), (1, 2, 5, 16)])
def test_gqa(shape_k):
    q, k, v = qkv((2, 4, 5, 16), shape_k)
    if shape_k[0] == 2:
        compare((q, k, v), enable_gqa=True, is_causal=True)
        compare((q, k, v[:, :1].detach().clone().requires_grad_()), enable_gqa=True)
    repeated = (x.repeat_interleave(4 // shape_k[1], 1) for x in (k, v))
    torch.testing.assert_close(
        strobe.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        torch.nn.functional.scaled_dot_product_attention(q, *repeated),
    )


def test_dropout():
    q, k, v = qkv((2, 3, 64, 16), dtype=torch.float32)
    torch.manual_seed(3)
    out = strobe.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    assert torch.equal(out, strobe.attention(*rows, dropout_p=0.3).transpose(1, 2))
    gone = strobe.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    assert not gone.any() and not torch.autograd.grad(gone.sum(), q)[0].any()


def test_it_has_pytorchs_signature():
    signature = inspect.signature(strobe.scaled_dot_product_attention)
    assert list(signature.parameters) == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    ]
    with pytest.raises(TypeError, match="positional"):
        strobe.scaled_dot_product_attention(*qkv(), None, 0.0, False, 1.0)


Q = torch.randn(2, 4, 5, 16)
WRONG = {
    "one dim": dict(query=Q[0, 0, 0]),
    "dtypes": dict(key=Q.half()),
    "ints": dict(query=Q.int(), key=Q.int(), value=Q.int()),
    "no tensor": dict(query=1),
    "head dims": dict(key=Q[..., :8]),
    "mask's dtype": dict(attn_mask=torch.ones(5, 5, dtype=torch.int32)),
    "mask's precision": dict(attn_mask=torch.ones(5, 5, dtype=torch.float64)),
    "mask's shape": dict(attn_mask=torch.ones(5, 6)),
    "mask of one dim": dict(attn_mask=torch.ones(5)),
    "mask of too many dims": dict(attn_mask=torch.ones(2, 1, 1, 5, 5)),
    "dropout": dict(dropout_p=2.0),
    "heads": dict(key=Q[:, :2], value=Q[:, :2]),
    "groups": dict(key=Q[:, :3], value=Q[:, :3], enable_gqa=True),
    "too few groups": dict(query=Q[:, :2], enable_gqa=True),
    "a name for a scale": dict(scale="a"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_raises_what_pytorch_raises(name):
    arguments = dict(query=Q, key=Q, value=Q) | WRONG[name]
    with pytest.raises(Exception) as theirs:
        torch.nn.functional.scaled_dot_product_attention(**arguments)
    with pytest.raises(theirs.type):
        strobe.scaled_dot_product_attention(**arguments)


def test_a_causal_bias_of_other_lengths_is_refused():
    with pytest.raises(RuntimeError, match="must be of 5 queries and 5 keys, got one of 5 queries and 6 keys"):
        strobe.scaled_dot_product_attention(Q, Q, Q, attn_mask=causal_lower_right(5, 6))


def test_it_compiles_whole():
    def loss(q, k, v, mask):
        return strobe.scaled_dot_product_attention(q, k, v, mask, is_causal=True).square().sum()

    tensors = qkv((2, 4, 9, 16), (2, 4, 5, 16), dtype=torch.float32)
    mask = torch.randn(9, 5).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*tensors, mask), (*tensors, mask))
    for one, other in zip(ours, torch.autograd.grad(loss(*tensors, mask), (*tensors, mask)), strict=True):
        torch.testing.assert_close(one, other)


# ---- PyTorch's flash operators


@needs_impls
def test_it_is_offered_and_not_active():
    assert "strobe" in torch_attention.list_flash_attention_impls()
    assert torch_attention.current_flash_attention_impl() is None


WITHOUT_AN_IMPORT = """
import sys, torch
assert not [name for name in sys.modules if name.partition(".")[0] in ("strobe", "triton")]
assert "strobe" in torch.nn.attention.list_flash_attention_impls()
torch.nn.attention.activate_flash_attention_impl("strobe")
print("active:", torch.nn.attention.current_flash_attention_impl(), "strobe.integrations.sdpa" in sys.modules)
"""


@needs_impls
def test_a_program_need_not_import_strobe(tmp_path):
    """Where it is installed, by the entry point that PyTorch loads."""
    source = Path(strobe.__file__).parents[1]
    (entry,) = re.findall(r'"torch\.backends"\]\n(strobe) = "(.*)"', (source.parent / "pyproject.toml").read_text())
    about = tmp_path / "strobe_attention_here-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: strobe-attention-here\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\n{entry[0]} = {entry[1]}\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", WITHOUT_AN_IMPORT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "active: strobe True" in done.stdout, done.stdout + done.stderr


@needs_impls
def test_it_comes_and_goes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_attention.activate_flash_attention_impl("strobe")
    assert torch_attention.current_flash_attention_impl() == "strobe"
    torch_attention.restore_flash_attention_impl()
    assert torch_attention.current_flash_attention_impl() is None


@pytest.fixture
def on_cpu():
    implementation = sdpa.Implementation("CPU")
    yield implementation
    implementation.remove()


flash = torch.ops.aten._scaled_dot_product_flash_attention


@needs_impls
@pytest.mark.parametrize("packed_heads", [False, True])
def test_the_operators_of_sdpa(on_cpu, packed_heads):
    """packed_heads: [batch, heads, rows, D] that is [batch, rows, heads, D] in memory, as models have it."""
    tensors = qkv((2, 4, 9, 16), dtype=torch.float32)
    if packed_heads:
        tensors = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors)
    meta = flash(*(x.detach().to("meta") for x in tensors), is_causal=True)
    results = flash(*tensors, is_causal=True, scale=0.2)
    for ours, theirs in zip(results, meta, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, torch.Tensor):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        else:
            assert ours == theirs
    upstream = torch.randn(2, 4, 9, 16)
    ours = (results[0], *torch.autograd.grad(results[0], tensors, upstream))
    out = strobe.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.2)
    for one, other in zip(ours, (out, *torch.autograd.grad(out, tensors, upstream)), strict=True):
        torch.testing.assert_close(one, other)
        if one is not out:
            assert one.stride() == torch.empty_like(tensors[0]).stride()


@needs_impls
def test_dropout_of_the_operators(on_cpu):
    tensors, upstream = qkv((2, 4, 9, 16), dtype=torch.float32), torch.randn(2, 4, 9, 16)
    torch.manual_seed(4)
    out = flash(*tensors, 0.4)[0]
    torch.manual_seed(4)
    expected = strobe.scaled_dot_product_attention(*tensors, dropout_p=0.4)
    torch.testing.assert_close(out, expected)
    for one, other in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (out, expected)), strict=True):
        torch.testing.assert_close(one, other)


@needs_pages
def test_varlen_attn(on_cpu):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    torch.manual_seed(5)
    q = torch.randn(11, 4, 16, requires_grad=True)
    k, v = (torch.randn(13, 2, 16, requires_grad=True) for _ in range(2))
    cu_q, cu_k = torch.tensor([0, 4, 11], dtype=torch.int32), torch.tensor([0, 6, 13], dtype=torch.int32)
    for window, mask in (((-1, -1), None), ((-1, 0), strobe.Causal()), ((3, 1), strobe.Window(3, 1))):
        out, lse = varlen_attn(q, k, v, cu_q, cu_k, 7, 7, window_size=window, enable_gqa=True, return_aux=AuxRequest(lse=True))
        expected, expected_lse = strobe.attention(
            q, k, v, mask=mask, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k, max_seqlen_q=7, max_seqlen_kv=7, return_lse=True
        )
        torch.testing.assert_close((out, lse), (expected, expected_lse))
        upstream = torch.randn(out.shape)
        grads, expected_grads = (torch.autograd.grad(x, (q, k, v), upstream) for x in (out, expected))
        torch.testing.assert_close(grads, expected_grads)


@needs_pages
def test_varlen_attn_into_a_tensor(on_cpu):
    q = torch.randn(11, 4, 16)
    cu, used = torch.tensor([0, 4, 11], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    torch.ops.aten._flash_attention_forward_no_dropout_inplace(out, q, q, q, cu, cu, 7, 7, 0.0, False, False, seqused_k=used)
    expected = strobe.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=7, max_seqlen_kv=7, seqused_kv=used)
    torch.testing.assert_close(out, expected)


@needs_pages
def test_varlen_attn_over_pages(on_cpu):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    i32, (k, v) = dict(dtype=torch.int32), torch.randn(2, 7, 4, 2, 16)
    q, cu = torch.randn(6, 4, 16), torch.tensor([0, 1, 6], **i32)
    used, table = torch.tensor([6, 9], **i32), torch.tensor([[3, 0, 99], [5, 1, 2]], **i32)
    keys, values = (torch.cat([x[[3, 0]].flatten(0, 1)[:6], x[[5, 1, 2]].flatten(0, 1)[:9]]) for x in (k, v))
    cu_k = torch.tensor([0, 6, 15], **i32)
    for window, mask in (((-1, -1), None), ((-1, 0), strobe.Causal()), ((3, 0), strobe.Window(3, 0))):
        out, lse = varlen_attn(
            q, k, v, cu, None, 5, 9, window_size=window, enable_gqa=True, return_aux=AuxRequest(lse=True), seqused_k=used,
            block_table=table, num_splits=1,
        )  # fmt: skip
        expected = strobe.attention(
            q, keys, values, mask=mask, cu_seqlens_q=cu, cu_seqlens_kv=cu_k, max_seqlen_q=5, max_seqlen_kv=9, return_lse=True
        )
        torch.testing.assert_close((out, lse), expected)
    into = torch.full_like(q, torch.nan)
    varlen_attn_out(into, q, k, v, cu, None, 5, 9, window_size=(3, 0), enable_gqa=True, seqused_k=used, block_table=table)
    torch.testing.assert_close(into, expected[0])
    with pytest.raises(ValueError, match="dropout_p must be 0 with a block_table"):
        torch.ops.aten._flash_attention_forward(q, k, v, cu, None, 5, 9, 0.5, False, False, seqused_k=used, block_table=table)


@needs_pages
def test_what_the_operators_refuse(on_cpu):
    q = torch.randn(2, 9, 4, 16)
    call = (q, q, q, None, None, 9, 9, 0.0, False)
    for keywords, message in (
        (dict(block_table=torch.zeros(2, 1, dtype=torch.int32)), r"seqused_k must be int32 \[batch\] with a block_table"),
        (dict(num_splits=1), "num_splits must be None without a block_table"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.aten._flash_attention_forward(*call, False, **keywords)
    with pytest.raises(ValueError, match="return_debug_mask must be False"):
        torch.ops.aten._flash_attention_forward(*call, True)


@pytest.mark.gpu
@needs_impls
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_own_function_on_a_gpu(compiled):
    """Strobe's kernels are what runs, forward and backward, and the results are those of the math backend in float64."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.profiler import ProfilerActivity, profile

    tensors = [torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    upstream = torch.randn_like(tensors[0])

    def call(*tensors):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)

    run = torch.compile(call, fullgraph=True) if compiled else call
    torch_attention.activate_flash_attention_impl("strobe")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.autograd.grad(run(*tensors), tensors, upstream)
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                out = run(*tensors)
                grads = torch.autograd.grad(out, tensors, upstream)
                torch.cuda.synchronize()
    finally:
        torch_attention.restore_flash_attention_impl()
    assert not [event.name for event in profiled.events() if "flash_fwd" in event.name or "flash_bwd" in event.name]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        expected = call(*wide)
    for one, other in zip((out, *grads), (expected, *torch.autograd.grad(expected, wide, upstream.double())), strict=True):
        assert (one.double() - other).abs().max() <= 3e-2 * other.abs().max()


@pytest.mark.gpu
@needs_impls
def test_varlen_attn_on_a_gpu():
    from torch.nn.attention.varlen import varlen_attn

    q = torch.randn(1100, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 400, 1100], dtype=torch.int32, device="cuda")
    expected = strobe.attention(
        q, q, q, mask=strobe.Causal(), cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=700, max_seqlen_kv=700
    )
    torch_attention.activate_flash_attention_impl("strobe")
    try:
        out = varlen_attn(q, q, q, cu, cu, 700, 700, window_size=(-1, 0))
        (grad,) = torch.autograd.grad(out.sum(), q)
    finally:
        torch_attention.restore_flash_attention_impl()
    assert torch.equal(out, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), q)[0], rtol=2e-2, atol=2e-2)
