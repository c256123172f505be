"""Attention of e4m3 inputs: the door, V's order of keys, what the compiler makes of the kernel, and the kernel on a GPU."""

import pytest
import torch
from tritons import TRITONS, output_of

from strobe import Causal, Document, Full, Prefix, Window, attention
from strobe.device import KNOWN
from strobe.fp8 import E4M3, attention_fp8
from strobe.kernels.sm90.fp8_backend import refuses
from strobe.problem import AttentionProblem, Dense, Varlen
from strobe.reference.dense import attend
from strobe.scores import Score


def quantised(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e4m3, and what that is to be multiplied by, for what is left of x without `dims`."""
    descale = x.abs().amax(dims, keepdim=True).clamp(min=1e-6).float() / 448
    return (x / descale).to(E4M3), descale.squeeze(dims)


def by_head(*shape: int, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return quantised(torch.randn(*shape, device=device), (1, 3))


def reference(q, k, v, descales, mask, scale=None):
    """In float64, descales [batch, heads] or None."""
    values = []
    for x, descale in zip((q, k, v), descales, strict=True):
        heads = (
            1.0 if descale is None else descale.double().repeat_interleave(x.shape[2] // descale.shape[1], 1)[:, None, :, None]
        )
        values.append(x.double() * heads)
    return attend(*values, scale or q.shape[-1] ** -0.5, mask, Score())


def relative_error(out, want) -> float:
    return ((out.double() - want).norm() / want.norm()).item()


# ---- the door, on a CPU


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(5, 3), Prefix(4)], ids=str)
def test_descales_per_head_multiply_the_inputs(mask):
    torch.manual_seed(0)
    (q, _), (k, k_descale), (v, v_descale) = by_head(2, 9, 4, 16), by_head(2, 21, 2, 16), by_head(2, 21, 2, 16)
    q_descale = torch.rand(2, 2) / 100 + 0.001
    out, lse = attention_fp8(
        q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, mask=mask, return_lse=True
    )  # fmt: skip
    want, want_lse = reference(q, k, v, (q_descale, k_descale, v_descale), mask)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_descales_by_blocks_of_128_rows():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, heads, 16).to(E4M3) for heads in (4, 2, 2))
    q_descale, k_descale = torch.rand(1, 4, 3) + 0.5, torch.rand(1, 2, 3) + 0.5
    by_row = [x.transpose(1, 2).repeat_interleave(128, 1)[:, :300, :, None].double() for x in (q_descale, k_descale)]
    want, _ = attend(q.double() * by_row[0], k.double() * by_row[1], v.double(), 0.25, Causal(), Score())
    out = attention_fp8(q, k, v, q_descale=q_descale, k_descale=k_descale, mask=Causal())
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-3)


def test_packed_sequences_have_descales_of_their_own():
    torch.manual_seed(0)
    q, k, v = (torch.randn(12, 2, 16).to(E4M3) for _ in range(3))
    cu = torch.tensor([0, 5, 11], dtype=torch.int32)  # row 11 belongs to none
    descale = torch.tensor([[1.0, 2.0], [0.5, 0.25]])
    out = attention_fp8(q, k, v, k_descale=descale, v_descale=descale, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    for b, (begin, end) in enumerate([(0, 5), (5, 11)]):
        rows = [x[None, begin:end] for x in (q, k, v)]
        want, _ = reference(*rows, (None, descale[b : b + 1], descale[b : b + 1]), Full())
        torch.testing.assert_close(out[None, begin:end].double(), want, rtol=1e-2, atol=1e-3)
    assert not out[11].any()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_scores_and_used_lengths_are_those_of_attention(packed):
    torch.manual_seed(0)
    q, k, v = (torch.randn(*((40,) if packed else (2, 20)), heads, 16).to(E4M3) for heads in (4, 2, 2))
    used_q, used_kv = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([20, 5], [7, 20]))
    lengths: dict = {"seqused_q": used_q, "seqused_kv": used_kv}
    if packed:
        cu = torch.tensor([0, 20, 40], dtype=torch.int32)
        lengths |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    keywords = {"mask": Causal(), "score": Score(softcap=2.0, sinks=torch.randn(4)), "return_lse": True, **lengths}
    out, lse = attention_fp8(q, k, v, **keywords)
    want, want_lse = attention(q.double(), k.double(), v.double(), **keywords)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="score: sinks must not require a gradient"):
        attention_fp8(q, k, v, score=Score(sinks=torch.zeros(4, requires_grad=True)), **lengths)


def test_bad_arguments_are_named():
    x = torch.zeros(2, 8, 4, 16, dtype=E4M3)
    with pytest.raises(TypeError, match=r"v must be float8_e4m3fn, got torch\.bfloat16"):
        attention_fp8(x, x, x.to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"k_descale must have shape \[2, 4\] or \[2, 4, 1\], got \[4\]"):
        attention_fp8(x, x, x, k_descale=torch.ones(4))
    with pytest.raises(ValueError, match=r"v_descale must have shape \[2, 4\], got \[2, 4, 1\]"):
        attention_fp8(x, x, x, v_descale=torch.ones(2, 4, 1))
    with pytest.raises(TypeError, match=r"q_descale must be float32, got torch\.float64"):
        attention_fp8(x, x, x, q_descale=torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="k must have q's head dim 16, got 32"):
        attention_fp8(x, torch.zeros(2, 8, 4, 32, dtype=E4M3), x)
    with pytest.raises(ValueError, match="q must be contiguous in its last dim"):
        attention_fp8(x.transpose(2, 3), x, x)


def test_what_requires_a_gradient_is_refused():
    """It has none, and silence would train nothing."""
    x = torch.zeros(1, 8, 2, 64, dtype=E4M3)
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="q must not require a gradient: attention_fp8 has none"):
        attention_fp8(x.clone().requires_grad_(), x, x)
    for name in ("q_descale", "k_descale", "v_descale"):
        learned = ones.clone().requires_grad_()
        with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
            attention_fp8(x, x, x, **{name: learned})
        with torch.no_grad():
            assert not attention_fp8(x, x, x, **{name: learned}).requires_grad
        for transform in (torch.func.grad, lambda f: lambda y: torch.func.jvp(f, (y,), (y,))):
            with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
                transform(lambda y, name=name: attention_fp8(x, x, x, **{name: y}).sum())(ones)


@pytest.mark.gpu
def test_a_head_dim_that_the_kernel_does_not_take_is_a_bad_value():
    x = torch.zeros(1, 8, 2, 72, device="cuda").to(E4M3)
    with pytest.raises(ValueError, match=r"no backend runs \[.*head dim 72, float8_e4m3fn.*sm90_fp8: "):
        attention_fp8(x, x, x)


def test_vmap_is_refused():
    x = torch.zeros(3, 1, 8, 2, 64, dtype=E4M3)
    with pytest.raises(ValueError, match="q must not be batched by vmap, which attention_fp8 does not know"):
        torch.vmap(lambda x: attention_fp8(x, x, x))(x)
    with pytest.raises(ValueError, match="v_descale must not be batched by vmap"):
        torch.vmap(lambda y: attention_fp8(x[0], x[0], x[0], v_descale=y))(torch.ones(3, 1, 2))


def problem(head_dim=128, mask=None, **changes) -> AttentionProblem:
    return AttentionProblem(Dense(1, 256, 256), 2, 2, head_dim, head_dim, E4M3, 0.1, mask or Full(), **changes)


def test_the_kernel_says_what_it_does_not_take():
    h200 = KNOWN["H200"]
    assert refuses(problem(), h200) is None
    assert "needs a Hopper GPU" in refuses(problem(), KNOWN["B200"])
    for head_dim in (72, 264):
        assert "takes head dims up to 256 in multiples of 16" in refuses(problem(head_dim), h200)
    assert "of scores softcap and sinks alone" in refuses(problem(score=Score(alibi=torch.ones(2))), h200)
    for taken in (problem(96), problem(seqused=True), problem(score=Score(softcap=3.0))):
        assert refuses(taken, h200) is None
    numbers = torch.zeros(1, 256, dtype=torch.int32)
    assert "no documents" in refuses(problem(mask=Document(numbers, numbers)), h200)
    assert "which k lacks" in refuses(problem(unaligned=("k", "v")), h200)
    assert refuses(problem(unaligned=("v",)), h200) is None


# ---- V^T


def lane_order(tile: int) -> list[int]:
    """Keys in the order of the fp8 operand's places, by the tables of PTX: place 16 i + 4 b + e of the operand is the e-th
    byte of lane b, and the accumulator's lane b has keys 8 j + 2 b + {0, 1}."""
    return [16 * i + 8 * j + 2 * b + c for i in range(tile // 16) for b in range(4) for j in (0, 1) for c in (0, 1)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_v_is_transposed_in_the_order_of_the_lanes(packed):
    from strobe.kernels.common.call import Tensors
    from strobe.kernels.sm90 import fp8, fp8_launch
    from strobe.sim.attention import unwritten

    torch.manual_seed(0)
    if packed:
        spans = [(0, 130), (130, 130), (130, 333)]
        lengths, shape = Varlen(3, 333, 333, 256, 256), (333, 2, 64)
        cu = torch.tensor([0, 130, 130, 333], dtype=torch.int32)
        firsts = [0, 130 // 128 + 1, 130 // 128 + 2]
    else:
        spans, lengths, shape, cu = [(0, 200), (200, 400)], Dense(2, 200, 200), (2, 200, 2, 64), None
        firsts = [0, 2]
    v = torch.randn(shape).to(E4M3)
    given = AttentionProblem(lengths, 2, 2, 64, 64, E4M3, 0.1, unaligned=("v",))  # else it takes a GPU
    tensors = Tensors(v=v, cu_seqlens_kv=cu, **unwritten(fp8_launch.buffers(given, fp8.config(given))))
    fp8_launch.transpose_call(given, tensors, KNOWN["H200"], fp8.config(given)).launch()
    v_t = tensors.v_t.float().reshape(2, -1, 64, 128)
    rows = v.float().reshape(-1, 2, 64)
    for first, (begin, end) in zip(firsts, spans, strict=True):
        for block in range(-(-(end - begin) // 128)):
            keys = torch.zeros(128, 2, 64)
            found = rows[begin + 128 * block : min(begin + 128 * (block + 1), end)]
            keys[: len(found)] = found
            want = keys[lane_order(128)].permute(1, 2, 0)
            assert torch.equal(v_t[:, first + block], want)


# ---- offline: the compiler's own numbers

OFFLINE = """
import sys, torch
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.sm90 import fp8, fp8_launch
from strobe.lab.binary.offline import pretend_gpu, problem_of
from strobe.lab.binary.sass import audit
from strobe.masks import Causal
problem = problem_of((int(sys.argv[1]),) * 2, Causal(), torch.float8_e4m3fn, 4096)
with pretend_gpu(90):
    compiled = fp8_launch.compile_only(problem, KNOWN["H200"], fp8.config(problem), by_block=sys.argv[2] == "blocks")
    tensors = unfilled(problem, fp8_launch.buffers(problem, fp8.config(problem)))
    transposing = audit(fp8_launch.transpose_call(problem, tensors, KNOWN["H200"], fp8.config(problem)).compile(), "V^T")
    assert transposing.spill_bytes == 0 and not transposing.warnings, transposing
groups = fp8.config(problem).groups
report = audit(compiled, "fp8", roles=(*(f"consumer {w}" for w in range(groups)), "producer"))
consumer = report.roles["consumer 0"]
counts = [consumer.get(name, 0) for name in ("QGMMA", "F2FP", "PRMT")]
counts.insert(0, sum(loop.get(name, 0) for loop in report.main_loops.values() for name in ("LDL", "STL")))
print(report.spill_bytes, report.smem_bytes, *counts, report.warnings)
"""


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("head_dim, descales, products", [(64, "heads", 22), (128, "blocks", 28), (256, "heads", 32)])
def test_the_kernel_compiles_without_spills_in_its_loops_or_serialised_products(head_dim, descales, products, triton):
    printed, oldest = output_of(OFFLINE, str(head_dim), descales, triton=triton), triton == "oldest Triton"
    spills, smem, local, found, conversions, moves, warnings = printed.split(maxsplit=6)
    crowded = not oldest and head_dim == 64  # three groups of 160 registers, of which newer compilers spill a few
    assert int(local) <= (16 if crowded else 0) and ("C75" not in warnings)
    assert int(spills) <= (600 if crowded else 0 if head_dim == 128 else 100)  # between tiles
    assert int(smem) <= 227 * 1024
    assert int(found) == products
    # P is rounded and packed twice in the text, and at 256 summed up again twice, two weights an instruction; no byte is
    # moved (on the oldest Triton an instruction for four weights puts the pairs together, once)
    assert int(conversions) == (4 if head_dim == 256 else 2) * 32 + head_dim // 4
    assert int(moves) <= (16 if oldest else 0)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "score", "used"), [(96, 0, False), (16, 0, True), (192, 1, False), (64, 1, True), (128, 1, True)]
)
def test_scores_used_lengths_and_head_dims_on_a_gpu(head_dim, score, used):
    torch.manual_seed(0)
    for n_q, n_kv in ((1, 1), (130, 700), (500, 130)):
        q, k, v = (torch.randn(2, n, heads, head_dim, device="cuda").to(E4M3) for n, heads in ((n_q, 4), (n_kv, 2), (n_kv, 2)))
        keywords: dict = {"mask": Causal(), "return_lse": True}
        if score:
            keywords["score"] = Score(softcap=5.0, sinks=torch.randn(4, device="cuda"))
        if used:
            lengths = torch.tensor([n_kv, n_kv // 3], dtype=torch.int32, device="cuda")
            keywords |= {"seqused_kv": lengths, "seqused_q": lengths.clamp(max=n_q)}
        out, lse = attention_fp8(q, k, v, **keywords)
        on_cpu = {
            name: Score(softcap=5.0, sinks=x.sinks.cpu()) if name == "score" else x.cpu() if torch.is_tensor(x) else x
            for name, x in keywords.items()
        }
        want, want_lse = attention(*(x.cpu().double() for x in (q, k, v)), **on_cpu)
        assert relative_error(out.cpu(), want) < 0.04
        torch.testing.assert_close(lse.cpu().double(), want_lse.double(), rtol=0, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(200, 0), Window(30, 40), Window(2500, 9), Prefix(70)], ids=str)
def test_on_a_gpu(mask, head_dim):
    torch.manual_seed(0)
    many = [(300, 4200)] if head_dim == 64 else []  # which take three groups, but in the small windows
    for n_q, n_kv in ((1, 1), (130, 700), (1000, 1000), (500, 130), *many):
        (q, _), (k, k_descale), (v, v_descale) = (
            by_head(2, n, h, head_dim, device="cuda") for n, h in ((n_q, 4), (n_kv, 2), (n_kv, 2))
        )
        q_descale = torch.rand(2, 2, device="cuda") / 100 + 0.002
        descales = (q_descale, k_descale, v_descale)
        out, lse = attention_fp8(
            q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, mask=mask, return_lse=True
        )  # fmt: skip
        want, want_lse = reference(q, k, v, descales, mask)
        assert relative_error(out, want) < 0.04
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(200, 129)], ids=str)
def test_values_that_are_all_the_same_on_a_gpu(mask, head_dim):
    """Their mean is what they are, however weights are rounded."""
    torch.manual_seed(0)
    q, k = (4 * torch.randn(1, n, heads, head_dim, device="cuda") for n, heads in ((700, 5), (1279, 1)))
    v = torch.full((1, 1279, 1, head_dim), 3.0, device="cuda")
    out = attention_fp8(q.to(E4M3), k.to(E4M3), v.to(E4M3), mask=mask)
    assert (out.float() - 3.0).abs().max() <= 3.0 / 128


@pytest.mark.gpu
def test_blocks_with_descales_of_their_own_on_a_gpu():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 600, heads, 128, device="cuda").to(E4M3) for heads in (4, 2, 2))
    q_descale, k_descale = (torch.rand(1, heads, 5, device="cuda") + 0.5 for heads in (4, 2))
    arguments = [x.cpu() for x in (q, k, v)]
    out = attention_fp8(q, k, v, q_descale=q_descale, k_descale=k_descale, mask=Causal())
    want = attention_fp8(*arguments, q_descale=q_descale.cpu(), k_descale=k_descale.cpu(), mask=Causal())
    assert relative_error(out.cpu(), want.double()) < 0.04


@pytest.mark.gpu
def test_packed_sequences_on_a_gpu():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1000, heads, 128, device="cuda").to(E4M3) for heads in (4, 2, 2))
    cu = torch.tensor([0, 300, 300, 717, 990], dtype=torch.int32, device="cuda")
    descale = torch.rand(4, 2, device="cuda") + 0.5
    keywords = {"v_descale": descale, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    out = attention_fp8(q, k, v, mask=Causal(), **keywords)
    want = attention_fp8(*(x.cpu() for x in (q, k, v)), mask=Causal(), **{name: x.cpu() for name, x in keywords.items()})
    assert relative_error(out.cpu(), want.double()) < 0.04


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [1, 4, 8, 9, 20, 60, 120])
def test_later_keys_may_outgrow_the_first_block_on_a_gpu(growth):
    """Scores of the last keys, which come second, exceed the others by 2^growth weights: past what e4m3 holds."""
    q, k, v = (torch.zeros(1, 640, 1, 64, device="cuda") for _ in range(3))
    q[..., 0], k[:, 600:, :, 0] = 1, 2
    v += torch.randn(640, 1, 1, device="cuda").view(1, 640, 1, 1)
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    scale = growth * 0.6931471805599453 / 2
    out, lse = attention_fp8(q, k, v, scale=scale, return_lse=True)
    want, want_lse = reference(q, k, v, (None, None, None), Full(), scale)
    assert relative_error(out, want) < 0.04
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)
