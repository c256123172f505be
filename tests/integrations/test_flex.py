"""FlexAttention on Strobe: results and gradients beside PyTorch's own eager FlexAttention, in float64."""

import logging
from random import Random

import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, noop_mask, or_masks

import strobe
from strobe.integrations import flex
from strobe.integrations.flex.masks import Shape, read, traced_mask
from strobe.integrations.flex.scores import read_score
from strobe.integrations.flex.tracing import PAIR, trace

B, H, L, D = 2, 4, 40, 16
BLOCK = 16
torch.manual_seed(3)
SLOPES = torch.randn(H, dtype=torch.float64)
BIAS = torch.randn(H, 2 * L, dtype=torch.float64)
TABLE = torch.randn(B, H, L, L, dtype=torch.float64)
DOCUMENTS = torch.tensor([[0] * 7 + [4] * 20 + [2] * 13, [1] * 30 + [0] * 10])
CAP = torch.tensor(3.0)


# ---- mask functions as users of FlexAttention write them


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 5


def before(b, h, q_idx, kv_idx):
    return kv_idx < 23


def document(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b][kv_idx]


def first_document(b, h, q_idx, kv_idx):
    return DOCUMENTS[0][q_idx] == DOCUMENTS[0, :][kv_idx]


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < 9


def dilated(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 == 0


def by_head(b, h, q_idx, kv_idx):
    return (kv_idx // 4 + h) % 2 == 0


def hides_a_row(b, h, q_idx, kv_idx):
    return (q_idx != 3) & (DOCUMENTS[b, kv_idx] != 4)


def strided(b, h, q_idx, kv_idx):
    return (q_idx // 16 + kv_idx // 16) % 2 == 0


def nothing(b, h, q_idx, kv_idx):
    return kv_idx < 0


def behind(b, h, q_idx, kv_idx):
    return (kv_idx + 2 <= q_idx) & (q_idx < kv_idx + 9)


MASKS = {
    "causal": (causal, "causal"),
    "causal, written backwards": (lambda b, h, q, k: ~(k > q), "causal"),
    "window": (window, "window(left=5, right=5)"),
    "causal window": (and_masks(causal, window), "window(left=5, right=0)"),
    "keys up to one": (before, "full of the first 23 keys"),
    "both": (and_masks(causal, before), "window(left=None, right=17) of the first 23 keys"),
    "behind": (behind, "window(left=6, right=0) of the first 38 keys"),
    "documents": (document, "documents"),
    "causal documents": (and_masks(causal, document), "causal & documents"),
    "the same documents for all": (first_document, "documents"),
    "prefix": (or_masks(causal, prefix), "prefix(9)"),
    "noop": (noop_mask, "full"),
    "dilated": (and_masks(causal, dilated), "causal & function mask_mod; no block is hidden but by the rest"),
    "by head": (by_head, "function mask_mod; no block is hidden"),
    "strided": (strided, "blocks of 16 x 16, of which 32 of 72 are hidden and not visited: mask_mod is a function"),
    "hides a row": (hides_a_row, "blocks of 16 x 16, of which 0 of 72 are hidden"),
    "nothing": (nothing, "blocks of 16 x 16, of which 72 of 72 are hidden and not visited: mask_mod hides every key"),
}


# ---- score functions


def squashed(score, b, h, q_idx, kv_idx):
    return 3.0 * torch.tanh(score / 3.0)


def squashed_by_a_tensor(score, b, h, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def relative(score, b, h, q_idx, kv_idx):
    return score * 0.5 - BIAS[h][q_idx - kv_idx + 39]


def tabled(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score + TABLE[b, h, q_idx, kv_idx], -float("inf"))


def squashed_and_relative(score, b, h, q_idx, kv_idx):
    return squashed(score, b, h, q_idx, kv_idx) + BIAS[h, q_idx] * SLOPES.exp()[h]


def formula(score, b, h, q_idx, kv_idx):
    far = (q_idx - kv_idx).abs()
    near = torch.sigmoid(score) * 2 + torch.clamp(score, -0.5, 0.75) ** 3 - torch.exp(-far * 0.25)
    return torch.where(
        (far < 9) | (h == 1), near, score / (1 + far) + torch.sqrt(score * score + 1.0) - torch.log1p(score.abs())
    )


def constant(score, b, h, q_idx, kv_idx):
    return torch.zeros_like(score)


def halved(score, b, h, q_idx, kv_idx):
    return score / 2


def hidden_and_squashed(score, b, h, q_idx, kv_idx):
    """Its derivative is 0 where the score is -inf within it."""
    return torch.sigmoid(torch.where(q_idx >= kv_idx, score, -float("inf")))


SCORES = {
    "softcap": (squashed, "softcap(3)"),
    "softcap of a tensor": (squashed_by_a_tensor, "softcap(3)"),
    "alibi": (alibi, "bias"),
    "relative": (relative, "bias"),
    "table": (tabled, "bias"),
    "softcap and bias": (squashed_and_relative, "softcap(3) + bias"),
    "formula": (formula, "function score_mod"),
    "sigmoid of -inf": (hidden_and_squashed, "function score_mod"),
    "constant": (constant, "function score_mod"),
    "scaled": (halved, "function score_mod"),
}


def qkv(n_q=L, n_kv=L, heads_kv=H, batch_kv=B, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (B, H, n_q, D), (batch_kv, heads_kv, n_kv, D), (batch_kv, heads_kv, n_kv, 12)
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)


def blocks(mask_mod, n_q=L, n_kv=L, size=BLOCK, batch=B, heads=H):
    return create_block_mask(mask_mod, batch, heads, n_q, n_kv, device="cpu", BLOCK_SIZE=size)


def eager(q, k, v, score_mod, mask_mod, scale):
    """PyTorch's eager FlexAttention, which its public function keeps from training on a CPU."""
    score_mod = score_mod or (lambda score, *pair: score)
    out, lse, _ = math_attention(q, k, v, score_mod, (mask_mod,), scale or q.shape[-1] ** -0.5, {})
    return out, lse * torch.tensor(2.0, dtype=torch.float64).log()


def compare(tensors, score_mod=None, block_mask=None, mask_mod=None, learned=(), scale=None, **keywords):
    """Results and gradients, for the same upstream gradients. Where rows see nothing PyTorch's LSE has no gradient, but NaN."""
    mask_mod = mask_mod or (noop_mask if block_mask is None else block_mask.mask_mod)
    ours = strobe.flex_attention(*tensors, score_mod, block_mask, scale=scale, return_lse=True, **keywords)
    theirs = eager(*tensors, score_mod, mask_mod, scale)
    learned = (*tensors, *learned)
    gradients = []
    for out, lse in (ours, theirs):
        torch.manual_seed(1)
        dout, dlse = torch.randn(out.shape, dtype=out.dtype), torch.randn(lse.shape, dtype=lse.dtype)
        loss = (out * dout).sum()
        if lse.isfinite().all():
            loss = loss + (lse * dlse).sum()
        gradients.append(torch.autograd.grad(loss, learned, allow_unused=True))
    assert ours[0].shape == theirs[0].shape and ours[0].dtype == theirs[0].dtype
    for a, b in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        a, b = (torch.zeros(()) if x is None else x for x in (a, b))
        assert a.any() or not b.any()
        torch.testing.assert_close(a, b.expand(a.shape).to(a.dtype), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name, capsys):
    mask_mod, words = MASKS[name]
    tensors = qkv()
    compare(tensors, None, blocks(mask_mod))
    said = flex.explain(*tensors, None, blocks(mask_mod))
    assert words in said.mask and str(said) in capsys.readouterr().out
    assert said.kernel.chosen in strobe.BACKENDS and said.kernel.backward.chosen in strobe.BACKENDS
    assert said.mask.startswith(words) and ("function" in words or "not visited" in said.mask)


@pytest.mark.parametrize("n_q, n_kv", [(24, 40), (40, 24), (1, 40)])
@pytest.mark.parametrize("name", ["causal", "causal window", "keys up to one", "behind", "dilated", "hides a row"])
def test_other_lengths(name, n_q, n_kv):
    mask_mod, _ = MASKS[name]
    compare(qkv(n_q, n_kv), alibi, blocks(mask_mod, n_q, n_kv))


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    score_mod, words = SCORES[name]
    tensors = qkv()
    compare(tensors, score_mod, blocks(and_masks(causal, window)))
    said = flex.explain(*tensors, score_mod)
    assert (said.score.startswith(words) and said.kernel.problem.score.bias is not None) or "bias" not in words


@pytest.mark.parametrize("score_mod, learned", [(alibi, SLOPES), (tabled, TABLE), (squashed_and_relative, SLOPES)])
def test_what_is_added_learns(score_mod, learned):
    learned.requires_grad_()
    try:
        compare(qkv(), score_mod, blocks(causal), learned=[learned])
    finally:
        learned.requires_grad_(False)


def test_heads_batches_and_scale():
    compare(qkv(heads_kv=2), relative, blocks(document), enable_gqa=True, scale=0.7)
    compare(qkv(heads_kv=1, batch_kv=1), squashed, blocks(by_head), enable_gqa=True)
    compare(qkv(), None, blocks(causal, batch=None, heads=None))


def test_lists_have_the_last_word(caplog):
    """A BlockMask made by hand, whose lists hide more than its mask_mod, and one whose lists show more."""
    number = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    columns = torch.tensor([[[[0, 1, 2], [2, 0, 1], [1, 0, 2]]]], dtype=torch.int32)
    listed = {(0, 0), (1, 0), (1, 2), (2, 1)}

    def by_lists(b, h, q_idx, kv_idx):
        return sum(((q_idx // BLOCK == row) & (kv_idx // BLOCK == column)) for row, column in listed) > 0

    by_hand = BlockMask.from_kv_blocks(number, columns, BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(L, L))
    compare(qkv(), None, by_hand, and_masks(causal, by_lists))
    full = BlockMask.from_kv_blocks(number * 0, columns, number, columns, BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(L, L))
    with caplog.at_level(logging.INFO, logger="strobe"):
        compare(qkv(), None, full, by_lists)
    assert "5 of 9 are hidden and not visited: mask_mod says other things than the lists" in caplog.text
    large = BlockMask.from_kv_blocks(number[..., :1], columns[..., :1, :1], BLOCK_SIZE=1 << 14, mask_mod=hides_a_row)
    large.seq_lengths = (L, L)
    compare(qkv(), None, large)
    assert "blocks of 128 x 128" in flex.explain(*qkv(), None, large).mask


def test_a_function_is_read_again_when_what_it_names_changes():
    bound = 5

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx < bound

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * bound

    for bound in (5, 7):  # noqa: B007
        compare(qkv(), score_mod, blocks(mask_mod))
    weight = torch.ones((), dtype=torch.float64)
    moved = lambda score, b, h, q, k: score + weight * k  # noqa: E731
    compare(qkv(), moved)
    weight.mul_(-1.0)
    compare(qkv(), moved)


@pytest.mark.parametrize("score_mod", [formula, constant, halved])
def test_a_gpu_kernel_takes_what_was_read(score_mod):
    """The portable kernels compile the functions that are made of score_mod and mask_mod."""
    q, k, v = (x.detach().float().transpose(1, 2)[:1].contiguous() for x in qkv())
    v = v[..., :8].contiguous()
    shape = Shape(1, H, L, L)
    mask = read(traced_mask(blocks(and_masks(dilated, by_head)), q.device), shape).mask
    score = read_score(trace("score_mod", score_mod, ("score", *PAIR), q.device), shape, q.dtype, q.device).score
    results = []
    for backend in ("portable", "tiled"):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out = strobe.attention(*tensors, mask=mask, score=score, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_return_aux_and_nothing():
    q, k, v = qkv(dtype=torch.float32)
    out, aux = strobe.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(aux.lse, strobe.flex_attention(q, k, v, return_lse=True)[1])
    assert aux.max_scores is None and aux.lse.dtype == torch.float32
    out = strobe.flex_attention(q[:, :, :0], k, v)
    assert out.shape == (B, H, 0, 12)
    out.sum().backward()
    assert not q.grad.any()


def test_compiled():
    tensors = qkv()
    block_mask = blocks(causal)
    compiled = torch.compile(lambda q, k, v: strobe.flex_attention(q, k, v, squashed, block_mask) * 2, backend="eager")
    torch.testing.assert_close(compiled(*tensors), strobe.flex_attention(*tensors, squashed, block_mask) * 2)


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


def sums(score, b, h, q_idx, kv_idx):
    return score + SLOPES[q_idx:].sum()


def scales(score, b, h, q_idx, kv_idx):
    return score * SLOPES[h]


def writes(score, b, h, q_idx, kv_idx):
    return score.add_(1.0)


REFUSED = {
    "a branch": (dict(score_mod=branches), TypeError, "score_mod must not branch on.*torch.where"),
    "a sum": (dict(score_mod=sums), TypeError, "must not branch on, or take a Python number"),
    "a factor from outside": (dict(score_mod=scales), TypeError, "score_mod does more with tensors.*score \\+ bias"),
    "in place": (dict(score_mod=writes), TypeError, "must not write to tensors"),
    "no operator of Strobe's": (dict(score_mod=lambda s, b, h, q, k: s.sin()), TypeError, "aten.sin.default.*flex_attention"),
    "no tensor": (dict(score_mod=lambda s, b, h, q, k: 3), TypeError, "score_mod must return a tensor, got int"),
    "no function": (dict(score_mod=3), TypeError, "score_mod must be a function or None, got int"),
    "no block mask": (dict(block_mask=torch.ones(L, L)), TypeError, "block_mask must be .*BlockMask or None, got Tensor"),
    "other lengths": (dict(block_mask=lambda: blocks(causal, 16)), ValueError, "block_mask must be of 40 queries and 40 keys"),
    "another batch": (
        dict(block_mask=lambda: blocks(causal, batch=3)),
        ValueError,
        "block_mask must have query's batch 2 or 1",
    ),
    "the largest scores": (dict(return_aux=AuxRequest(max_scores=True)), ValueError, "do not return the largest score"),
    "two ways to the LSE": (dict(return_aux=AuxRequest(lse=True), return_lse=True), ValueError, "return_lse must be left out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    keywords, error, words = REFUSED[name]
    if callable(keywords.get("block_mask")):
        keywords = dict(block_mask=keywords["block_mask"]())
    with pytest.raises(error, match=words):
        strobe.flex_attention(*qkv(), **keywords)


def test_refused_tensors():
    q, k, v = qkv()
    for given, words in (
        ((q[0], k, v), "query must have shape"),
        ((q, k[:, :2], v[:, :2]), "or enable_gqa=True"),
        ((q, k[..., :8], v), "key must have query's head dim 16, got 8"),
        ((q, k, v[:, :, :8]), "value must have key's heads and length"),
        ((q, k[:1].repeat(3, 1, 1, 1), v), "key must have query's batch 2 or 1, got 3"),
    ):
        with pytest.raises(ValueError, match=words):
            strobe.flex_attention(*given)


# ---- a campaign of random functions


def random_mask(random, n):
    """A mask_mod of up to three comparisons, documents and functions, joined and negated at random."""
    a, b, d = random.randint(-6, n // 2), random.randint(-6, n // 2), random.randint(1, 9)
    terms = (
        lambda b_, h, q, k: q >= k,
        lambda b_, h, q, k: k <= q + a,
        lambda b_, h, q, k: q - k < b,
        lambda b_, h, q, k: a + k > q - b,
        lambda b_, h, q, k: (q - k).abs() <= abs(a),
        lambda b_, h, q, k: k < abs(a) + 3,
        lambda b_, h, q, k: q < abs(a) + 4,
        lambda b_, h, q, k: (q >= k) | (k < abs(b)),
        lambda b_, h, q, k: DOCUMENTS[b_, q] == DOCUMENTS[b_, k],
        lambda b_, h, q, k: DOCUMENTS[0][q] == DOCUMENTS[1, k],
        lambda b_, h, q, k: (q - k) % d == 0,
        lambda b_, h, q, k: (k // d + h) % 2 == 0,
        lambda b_, h, q, k: (q - 3) // d == (k - 3) // d,
    )
    chosen = [(random.choice(terms), random.random() < 0.2, random.random() < 0.3) for _ in range(random.randint(1, 3))]

    def mask_mod(b, h, q_idx, kv_idx):
        seen = q_idx >= 0
        for term, negated, joined in chosen:
            x = ~term(b, h, q_idx, kv_idx) if negated else term(b, h, q_idx, kv_idx)
            seen = seen | x if joined else seen & x
        return seen

    return mask_mod


def random_score(random):
    """A score_mod of up to three steps, none of which gives NaN."""
    c = random.choice((-1.5, 0.25, 2.0))
    steps = (
        lambda s, b, h, q, k: s * c,
        lambda s, b, h, q, k: s + c,
        lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
        lambda s, b, h, q, k: torch.where(q >= k, s, c),
        lambda s, b, h, q, k: s + (q - k) * 0.01,
        lambda s, b, h, q, k: s - BIAS[h, (q - k).abs()],
        lambda s, b, h, q, k: torch.sigmoid(s),
        lambda s, b, h, q, k: torch.clamp(s, -1, 1.5),
        lambda s, b, h, q, k: s.abs() + torch.exp(-(s**2)),
        lambda s, b, h, q, k: torch.maximum(s, 0.1 * s),
        lambda s, b, h, q, k: s / (1 + k),
    )
    chosen = [random.choice(steps) for _ in range(random.randint(1, 3))]

    def score_mod(score, b, h, q_idx, kv_idx):
        for step in chosen:
            score = step(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


@pytest.mark.exhaustive
def test_a_campaign():
    random, refused = Random(5), 0
    for _ in range(400):
        n_q, n_kv = random.choice(((40, 40), (40, 40), (33, 40), (40, 33), (1, 20)))
        score_mod = random_score(random) if random.random() < 0.6 else None
        try:
            compare(qkv(n_q, n_kv), score_mod, blocks(random_mask(random, 40), n_q, n_kv))
        except TypeError as error:
            assert "does more with tensors" in str(error)
            refused += 1
    assert refused < 80
