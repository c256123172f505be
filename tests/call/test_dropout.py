"""Dropout: Philox's words, the mask that they make, and that forward and backward of every backend drop the same weights."""

import pytest
import torch
import triton
import triton.language as tl
from conftest import HAS_GPU

import strobe
from strobe import dropout
from strobe.call import dispatch
from strobe.device import KNOWN
from strobe.kernels.common import philox
from strobe.problem import AttentionProblem, Dense

DEVICE = "cuda" if HAS_GPU else "cpu"

# Of Random123's known answers for philox4x32-7: counter, key, the words.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def seed_of(low: int, high: int) -> torch.Tensor:
    """The int64 with these halves."""
    return torch.tensor([(high << 32 | low) - (high >> 31 << 64)], device=DEVICE)


@pytest.mark.parametrize("counter, key, want", ANSWERS)
def test_known_answers(counter, key, want):
    got = dropout.philox(seed_of(*key), *(torch.tensor(word, device=DEVICE) for word in counter))
    assert tuple(word.item() for word in got) == want


def test_every_pair_of_a_square_has_a_word_of_its_own():
    """Four of a counter, and no counter twice."""
    words = dropout.word(torch.tensor([3]), *torch.zeros(2, 1, dtype=torch.int64), torch.arange(96)[:, None], torch.arange(64))
    assert words.unique().numel() == words.numel()


@triton.jit
def _kept(seed, threshold: tl.constexpr, y, first_row, first_key, head, batch):
    rows = tl.arange(0, 16)[:, None]
    keys = tl.arange(0, 32)[None, :]
    keep = philox.kept(tl.load(seed), threshold, batch, head, first_row + rows, first_key + keys)
    tl.store(y + rows * 32 + keys, keep)


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345, -1], ids=str)
def test_kernels_keep_the_same(seed):
    """To the last bit of the numbers that are compared: the threshold is one of them."""
    seed, y = torch.tensor([seed], device=DEVICE), torch.empty(16, 32, dtype=torch.bool, device=DEVICE)
    i, j = torch.arange(1001, 1017, device=DEVICE)[:, None], torch.arange(2**30 - 32, 2**30, device=DEVICE)
    head, batch = torch.tensor(7, device=DEVICE), torch.tensor(3, device=DEVICE)
    numbers = dropout.word(seed, batch, head, i, j) >> 1
    for threshold in (numbers.median().item(), numbers.median().item() + 1):
        _kept[(1,)](seed, threshold, y, 1001, 2**30 - 32, 7, 3)
        assert torch.equal(y, numbers >= threshold)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_should_be(p):
    """The mean, of all and of every row, key and head, is within 5 standard deviations."""
    keep = strobe.dropout_mask(torch.tensor([42]), p, 2, 3, 256, 256).double()
    for dims in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):
        mean = keep.mean(dims)
        deviation = (p * (1 - p) / (keep.numel() / mean.numel())) ** 0.5
        assert (mean - (1 - p)).abs().max() <= 5 * deviation


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p):
    """Batch entries, heads, rows and keys beside each other or a few apart, and the same pairs under another seed."""
    shape = (8, 8, 64, 64)
    centred = [strobe.dropout_mask(torch.tensor([seed]), p, *shape).double() - (1 - p) for seed in (5, 6, 5 + (1 << 32))]
    pairs = [(centred[0], other) for other in centred[1:]]
    for dim in range(4):
        for distance in (1, 2, 4):
            x = centred[0].transpose(0, dim)
            pairs.append((x[distance:], x[:-distance]))
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    pairs.append((centred[0][..., above], centred[0].mT[..., above]))  # rows and keys are not to be exchanged
    for a, b in pairs:
        correlation = (a * b).mean() / (p * (1 - p))
        assert abs(correlation) <= 5 / a.numel() ** 0.5


def dropped_by(backend: str, p: float, dtype: torch.dtype, cu: list[int] | None = None):
    """What q k^T = 0 and v = 1 at a feature of its own for every key say of the mask, forward and backward, of sequences of 64:
    which weights count, [batch, heads, 64, 64], by out and by dv; and the seed. None if the backend does not run it."""
    shape = (2, 64, 3, 64) if cu is None else (128, 3, 64)
    keywords = {"backend": backend, "dropout_p": p}
    if cu is not None:
        cu = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
        keywords |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 64, "max_seqlen_kv": 64}
    zero = torch.zeros(shape, device=DEVICE, dtype=dtype)
    eye = torch.eye(64, device=DEVICE, dtype=dtype).repeat(2, 1).view(2, 64, 1, 64).repeat(1, 1, 3, 1).view(shape)
    eye.requires_grad_()
    if not strobe.supports(zero, zero, eye, **keywords)[0]:
        return None
    torch.manual_seed(3)
    out = strobe.attention(zero, zero, eye, **keywords)
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, (1,), device=DEVICE)
    (dv,) = torch.autograd.grad(out, eye, eye.detach())
    of_out, of_dv = (x.detach().float().view(2, 64, 3, 64).transpose(1, 2) * 64 * (1 - p) for x in (out, dv))
    for weights in (of_out, of_dv):
        torch.testing.assert_close(weights, weights.round(), atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)
    return of_out.round().bool(), of_dv.mT.round().bool(), seed


@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize("cu", [None, [0, 64, 128]], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "dtype, needed", [(torch.float32, "portable"), pytest.param(torch.bfloat16, "sm90", marks=pytest.mark.gpu)], ids=str
)
def test_every_backend_drops_what_the_mask_says(dtype, needed, cu, p):
    ran = {}
    for backend in strobe.BACKENDS:
        ran[backend] = dropped_by(backend, p, dtype, cu)
        if ran[backend] is not None:
            of_out, of_dv, seed = ran[backend]
            want = strobe.dropout_mask(seed, p, 2, 3, 64, 64)
            assert torch.equal(of_out, want) and torch.equal(of_dv, want) and not want.all() and want.any(), backend
    assert ran[needed] is not None or torch.cuda.get_device_capability()[0] != 9


def test_every_call_drops_others_and_a_seed_of_torchs_the_same():
    q = torch.randn(1, 40, 2, 64, device=DEVICE)
    torch.manual_seed(5)
    first, second = (strobe.flash_attn_func(q, q, q, dropout_p=0.3, causal=True) for _ in range(2))
    torch.manual_seed(5)
    again = strobe.flash_attn_func(q, q, q, dropout_p=0.3, causal=True)
    assert torch.equal(first, again) and not torch.equal(first, second)
    torch.manual_seed(5)
    qkv = torch.stack([q, q, q], 2)
    assert torch.equal(strobe.flash_attn_qkvpacked_func(qkv, 0.3, causal=True), first)
    torch.manual_seed(5)
    assert torch.equal(strobe.flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.3, causal=True), first)
    torch.manual_seed(5)
    cu = torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    packed = strobe.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 40, 40, 0.3, causal=True)
    torch.testing.assert_close(packed, first[0])


@pytest.mark.parametrize(
    "gpu, phase, chosen",
    [
        *(("H200", phase, "sm90") for phase in ("forward", "backward")),
        *(("B200", phase, "portable") for phase in ("forward", "backward")),
        *(("A100", phase, "sm80") for phase in ("forward", "backward")),
    ],
)
def test_on_gpus(gpu, phase, chosen):
    problem = AttentionProblem(Dense(2, 256, 256), 4, 4, 64, 64, torch.bfloat16, 0.125, dropout=0.1, phase=phase)
    assert dispatch.explain_problem(problem, KNOWN[gpu]).chosen == chosen


def test_without_dropout_and_for_questions_nothing_is_drawn(capsys):
    q = torch.randn(1, 8, 2, 16, device=DEVICE)
    state = torch.cuda.get_rng_state if HAS_GPU else torch.get_rng_state
    before = state()
    strobe.attention(q, q, q)
    strobe.supports(q, q, q, dropout_p=0.1)
    strobe.explain(q, q, q, dropout_p=0.1)
    assert torch.equal(state(), before)
    assert "dropout 0.1" in capsys.readouterr().out
    q = q.cpu()
    assert strobe.supports(q, q, q, dropout_p=0.1, backend="torch_cpu") == (False, ["torch_cpu: takes no dropout"])


def test_the_lse_is_that_of_all_weights():
    q, k, v = torch.randn(3, 1, 20, 2, 16, device=DEVICE)
    _, want = strobe.attention(q, k, v, return_lse=True)
    _, lse = strobe.attention(q, k, v, return_lse=True, dropout_p=0.5)
    torch.testing.assert_close(lse, want)


def test_compiled():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 20, 2, 16, device=DEVICE))

    def step(q, k, v):
        return strobe.attention(q, k, v, dropout_p=0.4, mask=strobe.Causal()).square().sum()

    compiled, results = torch.compile(step, fullgraph=True, backend="aot_eager"), []
    for one in (step, compiled):
        torch.manual_seed(9)
        results.append(torch.autograd.grad(one(q, k, v), (q, k, v)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_a_graph_draws_at_every_replay():
    q = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def step():
        out = strobe.attention(q, q, q, dropout_p=0.5)
        return out, *torch.autograd.grad(out, q, q.detach())

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    replayed = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        graph.replay()
        replayed.append([x.clone() for x in captured])
    graph.replay()
    (out, grad), (again, same_grad), (other, other_grad) = replayed
    assert torch.equal(out, again) and not torch.equal(out, other)
    torch.testing.assert_close(grad, same_grad, atol=4e-2, rtol=4e-2)  # blocks of keys add to dQ as they come: not to the bit
    assert not torch.allclose(grad, other_grad)
    assert not any(torch.equal(a, b) for a, b in zip(captured, replayed[2], strict=True))


def test_bad_input():
    seed = torch.tensor([1])
    for bad, p, error, message in [
        (1, 0.1, TypeError, "seed must be a tensor, got int"),
        (seed.int(), 0.1, ValueError, r"seed must be int64 with shape \[1\], got torch.int32"),
        (torch.tensor(1), 0.1, ValueError, r"got torch.int64 with shape \[\]"),
        (seed, 1.0, ValueError, "p must be from 0 to below 1, got 1.0"),
        (seed, "0.1", TypeError, "p must be a number, got str"),
    ]:
        with pytest.raises(error, match=message):
            strobe.dropout_mask(bad, p, 1, 1, 1, 1)
