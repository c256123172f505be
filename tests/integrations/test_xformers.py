"""xFormers' function on Strobe: its biases, those of the package where it is installed, else classes with the same names and
attributes, beside the softmax over all pairs in float64."""

import importlib
from dataclasses import dataclass, field

import pytest
import torch

from strobe.integrations.xformers import memory_efficient_attention


@dataclass
class Lengths:
    """Sequences one behind the other, as xFormers' _SeqLenInfo says; with `seqlen`, as its _PaddedSeqLenInfo does."""

    seqstart_py: list
    seqlen_py: list | None = None
    seqstart: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.seqstart = torch.tensor(self.seqstart_py, dtype=torch.int32)
        if self.seqlen_py is not None:
            self.seqlen = torch.tensor(self.seqlen_py, dtype=torch.int32)

    @staticmethod
    def of(lengths):
        return Lengths([0, *torch.tensor(lengths).cumsum(0).tolist()])


def made(name, **attributes):
    """An instance of the package's class, or of a stand-in of its name."""
    try:
        kind = getattr(importlib.import_module("xformers.ops.fmha.attn_bias"), name)
    except ImportError:
        kind = type(name, (), {})
    bias = object.__new__(kind)
    bias.__dict__.update(attributes)
    return bias


def band(n_q, n_kv, left=None, right=None, shift=0):
    """bool [n_q, n_kv]: i + shift - left <= j <= i + shift + right."""
    i, j = torch.arange(n_q)[:, None] + shift, torch.arange(n_kv)
    seen = torch.ones(n_q, n_kv, dtype=torch.bool)
    seen &= seen if right is None else j <= i + right
    return seen if left is None else seen & (j >= i - left)


def by_hand(q, k, v, seen=None, bias=None, scale=None):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
    weights = weights if seen is None else weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def compare(ours, theirs, learned):
    torch.manual_seed(1)
    dout = torch.randn(theirs.shape, dtype=theirs.dtype)
    results = [(out, *torch.autograd.grad(out, learned, dout.reshape(out.shape))) for out in (ours, theirs)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape), rtol=1e-8, atol=1e-8)


def inputs(n_q, n_kv, batch=2, heads=3, dim=20, dim_v=12):
    torch.manual_seed(0)
    shapes = (batch, n_q, heads, dim), (batch, n_kv, heads, dim), (batch, n_kv, heads, dim_v)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


BANDS = {
    "LowerTriangularMask": ({}, lambda n_q, n_kv: band(n_q, n_kv, right=0)),
    "LowerTriangularFromBottomRightMask": ({}, lambda n_q, n_kv: band(n_q, n_kv, right=0, shift=n_kv - n_q)),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        dict(_window_size=4), lambda n_q, n_kv: band(n_q, n_kv, left=3, right=0, shift=n_kv - n_q),
    ),
    "LocalAttentionFromBottomRightMask": (
        dict(window_left=3, window_right=2), lambda n_q, n_kv: band(n_q, n_kv, left=3, right=2, shift=n_kv - n_q),
    ),
}  # fmt: skip


@pytest.mark.parametrize("n_q, n_kv", [(11, 11), (7, 12), (12, 7)])
@pytest.mark.parametrize("name", BANDS)
def test_bands(name, n_q, n_kv):
    attributes, seen = BANDS[name]
    q, k, v = inputs(n_q, n_kv)
    compare(memory_efficient_attention(q, k, v, made(name, **attributes)), by_hand(q, k, v, seen(n_q, n_kv)), [q, k, v])


@pytest.mark.parametrize("shape", [(2, 3, 9, 13), (1, 3, 9, 13), (9, 13), (2, 1, 1, 13)])
def test_tensors(shape):
    q, k, v = inputs(9, 13)
    bias = torch.randn(shape, dtype=torch.float64).requires_grad_()
    compare(memory_efficient_attention(q, k, v, bias, scale=0.3), by_hand(q, k, v, None, bias, 0.3), [q, k, v, bias])
    both = made("LowerTriangularMaskWithTensorBias", _bias=bias)
    compare(memory_efficient_attention(q, k, v, both), by_hand(q, k, v, band(9, 13, right=0), bias), [q, k, v, bias])


Q, SAME, LONGER, MIXED = [4, 1, 7], [4, 1, 7], [6, 1, 9], [6, 1, 5]
PACKED = {
    "full": ("BlockDiagonalMask", {}, MIXED, {}, False),
    "causal": ("BlockDiagonalCausalMask", {}, SAME, dict(right=0), True),
    "causal, longer keys": ("BlockDiagonalCausalMask", {}, LONGER, dict(right=0), True),
    "causal, any keys": ("BlockDiagonalCausalMask", {}, MIXED, dict(right=0), True),
    "causal from below": ("BlockDiagonalCausalFromBottomRightMask", {}, LONGER, dict(right=0), False),
    "local": ("BlockDiagonalCausalLocalAttentionMask", dict(_window_size=3), SAME, dict(left=2, right=0), True),
    "local, any keys": ("BlockDiagonalCausalLocalAttentionMask", dict(_window_size=3), MIXED, dict(left=2, right=0), True),
    "local from below": (
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask", dict(_window_size=3), LONGER, dict(left=2, right=0), False,
    ),
}  # fmt: skip


def blocks(lengths_q, starts_kv, lengths_kv, total_kv, sides, upper_left):
    """bool [total_q, total_kv]: the band in each block."""
    seen, first = torch.zeros(sum(lengths_q), total_kv, dtype=torch.bool), 0
    for n_q, start, n_kv in zip(lengths_q, starts_kv, lengths_kv, strict=True):
        shift = 0 if upper_left else n_kv - n_q
        seen[first : first + n_q, start : start + n_kv] = band(n_q, n_kv, shift=shift, **sides)
        first += n_q
    return seen


@pytest.mark.parametrize("name", PACKED)
def test_packed(name):
    kind, attributes, lengths_kv, sides, upper_left = PACKED[name]
    bias = made(kind, q_seqinfo=Lengths.of(Q), k_seqinfo=Lengths.of(lengths_kv), **attributes)
    q, k, v = inputs(sum(Q), sum(lengths_kv), batch=1)
    seen = blocks(Q, bias.k_seqinfo.seqstart_py[:-1], lengths_kv, k.shape[1], sides, upper_left)
    compare(memory_efficient_attention(q, k, v, bias), by_hand(q, k, v, seen), [q, k, v])


USED = {
    "padded": ("BlockDiagonalPaddedKeysMask", {}, {}),
    "padded, causal": ("BlockDiagonalCausalWithOffsetPaddedKeysMask", {}, dict(right=0)),
    "padded, local": ("BlockDiagonalLocalAttentionPaddedKeysMask", dict(window_left=2, window_right=1), dict(left=2, right=1)),
    "padded, causal and local": (
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
        dict(_window_size=3),
        dict(left=2, right=0),
    ),
    "gappy": ("BlockDiagonalGappyKeysMask", {}, {}),
    "gappy, causal": ("BlockDiagonalCausalWithOffsetGappyKeysMask", {}, dict(right=0)),
}


@pytest.mark.parametrize("name", USED)
def test_keys_with_gaps(name):
    kind, attributes, sides = USED[name]
    starts, lengths = ([0, 8, 16, 24], [5, 1, 8]) if name.startswith("padded") else ([0, 7, 9, 20], [5, 1, 9])
    bias = made(kind, q_seqinfo=Lengths.of([2, 1, 4]), k_seqinfo=Lengths(starts, lengths), **attributes)
    q, k, v = inputs(7, starts[-1], batch=1)
    with torch.no_grad():
        k[:, 6] = v[:, 6] = torch.nan  # lies in a gap
    seen = blocks([2, 1, 4], starts[:-1], lengths, starts[-1], sides, False)
    finite = [torch.nan_to_num(x.detach()).requires_grad_() for x in (q, k, v)]
    out = memory_efficient_attention(q, k, v, bias)
    torch.testing.assert_close(out, by_hand(*finite, seen), rtol=1e-8, atol=1e-8)
    compare(memory_efficient_attention(*finite, bias), by_hand(*finite, seen), finite)


def test_layouts():
    q, k, v = inputs(9, 13, heads=1)
    compare(memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0]), by_hand(q, k, v), [q, k, v])
    bias = torch.randn(2, 9, 13, dtype=torch.float64)
    out = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], bias)
    torch.testing.assert_close(out[:, :, None], by_hand(q, k, v, None, bias[:, None]))
    q, k, v = inputs(9, 13, heads=6)
    grouped = [x.unflatten(2, (2, 3)) for x in (q, k, v)]
    bias = torch.randn(2, 2, 1, 9, 13, dtype=torch.float64)
    of_heads = bias.expand(-1, -1, 3, -1, -1).flatten(1, 2)
    compare(memory_efficient_attention(*grouped, bias), by_hand(q, k, v, None, of_heads), [q, k, v])
    shared_k, shared_v = (x[:, :, :, :1].expand_as(x) for x in grouped[1:])
    repeated = [x.flatten(2, 3) for x in (shared_k, shared_v)]
    compare(memory_efficient_attention(grouped[0], shared_k, shared_v), by_hand(q, *repeated), [q, k, v])


def test_dropout():
    q, k, v = inputs(9, 13)
    torch.manual_seed(5)
    first = memory_efficient_attention(q, k, v, p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, memory_efficient_attention(q, k, v, p=0.5))
    assert not torch.allclose(first, by_hand(q, k, v))


def test_refused():
    q, k, v = inputs(12, 12)
    packed = made("BlockDiagonalMask", q_seqinfo=Lengths.of(Q), k_seqinfo=Lengths.of(Q))
    overlapping = made("BlockDiagonalGappyKeysMask", q_seqinfo=Lengths.of([12]), k_seqinfo=Lengths([0, 12], [13]))
    for error, words, bias in (
        (ValueError, "a batch of 1, got a batch of 2", packed),
        (TypeError, "strobe.decode", made("PagedBlockDiagonalPaddedKeysMask")),
        (TypeError, "attn_bias must be None, a tensor or one of LowerTriangularMask", "causal"),
        (ValueError, r"attn_bias must broadcast to \[2, 3, 12, 12\], got \[4, 3, 12, 12\]", torch.zeros(4, 3, 12, 12)),
    ):
        with pytest.raises(error, match=words):
            memory_efficient_attention(q, k, v, bias)
    for error, words, bias in (
        (ValueError, "must be of query's 11 rows, got one of 12", packed),
        (ValueError, "some that overlap", overlapping),
    ):
        n = 11 if bias is packed else 12
        with pytest.raises(error, match=words):
            memory_efficient_attention(q[:1, :n], k[:1], v[:1], bias)
    with pytest.raises(ValueError, match="output_dtype must be None or query's dtype"):
        memory_efficient_attention(q, k, v, output_dtype=torch.float16)
    with pytest.raises(ValueError, match="key must have 3, 4 or 5 dims as query"):
        memory_efficient_attention(q, k[0], v)


def of_the_package():
    """xFormers' own biases, as its users make them, with the numbers of queries and keys that they are of."""
    fmha = pytest.importorskip("xformers.ops.fmha.attn_bias", reason="needs xFormers, of which no kernel is called")
    diagonal, longer = fmha.BlockDiagonalMask.from_seqlens(Q), fmha.BlockDiagonalMask.from_seqlens(Q, LONGER)
    padded = dict(q_seqlen=[2, 1, 4], kv_padding=8, kv_seqlen=[5, 1, 8])
    gappy = dict(q_seqlen=[2, 1, 4], kv_seqstarts=[0, 7, 9, 20], kv_seqlen=[5, 1, 9])
    return [
        *((fmha.LowerTriangularMask(), n_q, n_kv) for n_q, n_kv in ((7, 12), (12, 7))),
        (fmha.LowerTriangularFromBottomRightMask(), 7, 12),
        (fmha.LowerTriangularFromBottomRightMask().make_local_attention(4), 7, 12),
        (fmha.LocalAttentionFromBottomRightMask(window_left=3, window_right=2), 7, 12),
        (fmha.LowerTriangularMask().add_bias(torch.randn(1, 3, 7, 12)), 7, 12),
        (diagonal, 12, 12),
        (diagonal.make_causal(), 12, 12),
        (diagonal.make_local_attention(3), 12, 12),
        (longer, 12, 16),
        (longer.make_causal(), 12, 16),
        (longer.make_causal_from_bottomright(), 12, 16),
        (longer.make_local_attention_from_bottomright(3), 12, 16),
        (fmha.BlockDiagonalPaddedKeysMask.from_seqlens(**padded), 7, 24),
        (fmha.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(**padded), 7, 24),
        (fmha.BlockDiagonalPaddedKeysMask.from_seqlens(**padded).make_local_attention(3, 2), 7, 24),
        (fmha.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(**padded, window_size=3), 7, 24),
        (fmha.BlockDiagonalGappyKeysMask.from_seqlens(**gappy), 7, 20),
        (fmha.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(**gappy), 7, 20),
    ]


def test_the_package():
    for bias, n_q, n_kv in of_the_package():
        q, k, v = inputs(n_q, n_kv, batch=1)
        pairs = bias.materialize((1, 3, n_q, n_kv), dtype=torch.float64)
        seen = pairs > -torch.inf
        out = by_hand(q, k, v, seen, pairs.masked_fill(~seen, 0.0))
        compare(memory_efficient_attention(q, k, v, bias), out, [q, k, v])
