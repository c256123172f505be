"""Properties over random problems: every backend against the reference, in every corner that hypothesis finds."""

from dataclasses import replace

import pytest
import torch
from conftest import HAS_GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Case, Results, Tensors, check, run, tensors

import strobe

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
BACKENDS = ("sm90", "portable", "tiled") if HAS_GPU else ("portable", "tiled", "torch_cpu")
EXAMPLES = 100 if HAS_GPU else 15
LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 100] + ([127, 128, 129, 255, 300, 777] if HAS_GPU else []))
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)])
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# What a kernel is compiled for: head_dim, mask, softcap, alibi, packed, dtype. Drawn where kernels are interpreted; on a
# GPU, where each costs seconds, these, each in a test of its own.
COMPILED = [
    (64, "causal", 0.0, False, False, torch.bfloat16),
    (128, "full", 0.0, False, False, torch.float16),
    (256, "causal", 0.0, False, False, torch.float16),
    (128, "window", 0.0, False, False, torch.bfloat16),
    (40, "window", 4.0, False, False, torch.float16),
    (64, "documents", 0.0, True, False, torch.bfloat16),
    (128, "causal", 0.0, False, True, torch.bfloat16),
    (32, "all", 0.0, False, False, torch.float32),
    (80, "prefix", 4.0, True, True, torch.float16),
]
KINDS = COMPILED if HAS_GPU else ["any"]


def kinds(always: int):
    """A test for each kind, of which so many always run."""
    return pytest.mark.parametrize("kind", [
        pytest.param(kind, id="-".join(map(str, kind)) if HAS_GPU else kind, marks=[pytest.mark.exhaustive] * (i >= always))
        for i, kind in enumerate(KINDS)
    ])  # fmt: skip


def examples(number: int = EXAMPLES):
    """Settings for so many examples, of all kinds together."""
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
    return settings(max_examples=-(-number // len(KINDS)), deadline=None, suppress_health_check=quiet, derandomize=True)


@st.composite
def drawn_kinds(draw, packed=None):
    """What a kernel is compiled for, where nothing is compiled."""
    packed = draw(st.booleans()) if packed is None else packed
    masks = ["full", "causal", "window", "prefix"] + ([] if packed else ["documents", "all"])
    return (
        draw(st.sampled_from([8, 16, 24, 32, 40, 64, 80])),
        draw(st.sampled_from(masks)),
        draw(st.sampled_from([0.0, 0.0, 4.0])),
        draw(st.sampled_from([False, False, True])),
        packed,
        draw(st.sampled_from(DTYPES)),
    )


@st.composite
def inputs(draw, kind, packed=None, logits=(1.0, 1.0, 10.0, 100.0)) -> tuple[Case, torch.dtype]:
    """A case of a kind, or of any."""
    head_dim, mask, softcap, alibi, packed, dtype = draw(drawn_kinds(packed)) if kind == "any" else kind
    heads_q, heads_kv = draw(HEADS)
    case = Case(
        n_q=draw(LENGTHS),
        n_kv=draw(LENGTHS),
        batch=draw(st.integers(2 if packed else 1, 3)),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        mask=mask,
        softcap=softcap,
        alibi=alibi,
        packed=packed,
        logits=draw(st.sampled_from(logits)),
    )
    return case, dtype


def legal(t: Tensors, backend: str) -> bool:
    return strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]


def agree(case: Case, dtype: torch.dtype, backend: str) -> None:
    t = tensors(case, dtype, DEVICE)
    if not legal(t, backend):
        return
    if backend == "sm90":  # its forward alone; the backward is another backend's
        out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend=backend, **t.keywords)
        empty = torch.empty(0)
        check(Results(out, lse, empty, empty, empty), t, ("out", "lse"))
    else:
        check(run(t, backend), t)


@kinds(always=5)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_against_the_reference(backend, kind):
    @examples()
    @given(inputs(kind))
    def prove(drawn):
        agree(*drawn, backend)

    prove()


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "window", "prefix"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_against_the_reference(head_dim, mask):
    """Every example is one that the Hopper kernel takes."""

    @examples(200)
    @given(inputs((head_dim, mask, 0.0, False, False, torch.bfloat16)))
    def prove(drawn):
        agree(*drawn, "sm90")

    prove()


@kinds(always=2)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch_cpu"])
def test_nothing_depends_on_what_is_masked_out(backend, kind):
    """Results are the same, bit for bit, whatever stands in keys that no row sees: numbers, NaN or infinities."""
    if kind != "any" and kind[4]:
        pytest.skip("packed sequences have no keys that no row sees")

    @examples(EXAMPLES // 2)
    @given(inputs(kind, packed=False), st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e4]))
    def prove(drawn, poison):
        case, dtype = drawn
        t = tensors(case, dtype, DEVICE)
        if not legal(t, backend):
            return
        seen = t.keywords["mask"].dense(case.n_q, case.n_kv, device=DEVICE)
        unseen = ~(seen if seen.dim() == 3 else seen[None]).any(1).expand(case.batch, case.n_kv)
        bad = Tensors(t.q, t.k.clone(), t.v.clone(), t.keywords)
        bad.k[unseen] = poison
        bad.v[unseen] = poison
        if backend == "sm90":
            results = [strobe.attention(x.q, x.k, x.v, backend=backend, **t.keywords) for x in (t, bad)]
            torch.testing.assert_close(*results)  # a tile that is redone differs by its rounding
            return
        clean, poisoned = run(t, backend), run(bad, backend)
        for name in clean.FIELDS:
            torch.testing.assert_close(getattr(poisoned, name), getattr(clean, name), rtol=0, atol=0)

    prove()


@kinds(always=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_repeat_bit_for_bit(backend, kind):
    @examples(EXAMPLES // 5)
    @given(inputs(kind))
    def prove(drawn):
        t = tensors(*drawn, DEVICE)
        if not legal(t, backend):
            return
        t = replace(t, keywords={**t.keywords, "deterministic": True})
        name = None if backend == "sm90" else backend
        first, second = run(t, name), run(t, name)
        assert all(torch.equal(getattr(first, field), getattr(second, field)) for field in first.FIELDS)

    prove()


@kinds(always=2)
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_weights_of_a_row_sum_to_one(backend, kind):
    """With v all ones every row that sees a key gives 1, and every other 0, exactly up to rounding."""

    @examples(EXAMPLES // 2)
    @given(inputs(kind, logits=(10.0,)))
    def prove(drawn):
        t = tensors(*drawn, DEVICE)
        if backend is not None and not legal(t, backend):
            return
        ones = torch.ones_like(t.v)
        out, lse = strobe.attention(t.q, t.k, ones, return_lse=True, backend=backend, **t.keywords)
        want = torch.isfinite(lse).to(out.dtype).transpose(-1, -2)[..., None].expand_as(out)
        torch.testing.assert_close(out, want, atol=1e-5 if out.dtype == torch.float32 else 1e-2, rtol=0)

    prove()
