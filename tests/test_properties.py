"""Properties over random problems: every backend against the reference, in every corner that hypothesis finds."""

from functools import partial

import pytest
import torch
from conftest import HAS_GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Case, Tensors, check, run, tensors

import strobe

DEVICE = "cuda" if HAS_GPU else "cpu"
BACKENDS = ("sm90", "portable", "tiled") if HAS_GPU else ("portable", "tiled", "torch_cpu")
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
EXAMPLES = 150 if HAS_GPU else 25
LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 100] + ([127, 128, 129, 255, 300, 777] if HAS_GPU else []))
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)])
HEAD_DIMS = st.sampled_from([8, 16, 24, 32, 40, 64, 80] + ([96, 128, 160, 192, 256] if HAS_GPU else []))
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


def examples(number: int = EXAMPLES):
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
    return settings(max_examples=number, deadline=None, suppress_health_check=quiet, derandomize=True)


@st.composite
def cases(draw, **fixed) -> Case:
    heads_q, heads_kv = draw(HEADS)
    packed = fixed.get("packed", draw(st.booleans()))
    masks = ["full", "causal", "window", "prefix"] + ([] if packed else ["documents", "all"])
    drawn = {
        "n_q": draw(LENGTHS),
        "n_kv": draw(LENGTHS),
        "batch": draw(st.integers(2 if packed else 1, 3)),
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": draw(HEAD_DIMS),
        "mask": draw(st.sampled_from(masks)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 4.0])),
        "alibi": draw(st.sampled_from([False, False, True])),
        "packed": packed,
        "logits": draw(st.sampled_from([1.0, 1.0, 10.0, 100.0])),
    }
    return Case(**{**drawn, **fixed})


def legal(t: Tensors, backend: str) -> bool:
    return strobe.supports(t.q, t.k, t.v, backend=backend, **t.keywords)[0]


def agree(case: Case, dtype: torch.dtype, backend: str) -> None:
    t = tensors(case, dtype, DEVICE)
    if not legal(t, backend):
        return
    if backend == "sm90":  # its forward alone; the backward is another backend's
        out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend=backend, **t.keywords)
        empty = torch.empty(0)
        check(results_of(out, lse, empty), t, ("out", "lse"))
    else:
        check(run(t, backend), t)


def results_of(out, lse, rest):
    from problems import Results

    return Results(out, lse, rest, rest, rest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_against_the_reference(backend):
    @examples()
    @given(cases(), DTYPES)
    def prove(case, dtype):
        agree(case, dtype, backend)

    prove()


@pytest.mark.gpu
def test_hopper_against_the_reference():
    """Drawn from what the Hopper kernel takes, so that no example is idle."""
    plain = partial(cases, packed=False, softcap=0.0, alibi=False)

    @examples(200)
    @given(st.sampled_from([64, 128, 256]), st.data(), st.sampled_from([torch.float16, torch.bfloat16]))
    def prove(head_dim, data, dtype):
        mask = data.draw(st.sampled_from(["full", "causal", "window", "prefix"]))
        agree(data.draw(plain(head_dim=head_dim, mask=mask)), dtype, "sm90")

    prove()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch_cpu"])
def test_nothing_depends_on_what_is_masked_out(backend):
    """Results are the same, bit for bit, whatever stands in keys that no row sees: numbers, NaN or infinities."""

    @examples(EXAMPLES // 2)
    @given(cases(packed=False), DTYPES, st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e4]))
    def prove(case, dtype, poison):
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
            assert torch.equal(*results)
            return
        clean, poisoned = run(t, backend), run(bad, backend)
        for name in clean.FIELDS:
            assert torch.equal(getattr(clean, name), getattr(poisoned, name)), name

    prove()


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_repeat_bit_for_bit(backend):
    @examples(EXAMPLES // 5)
    @given(cases(), DTYPES)
    def prove(case, dtype):
        t = tensors(case, dtype, DEVICE)
        if not legal(t, backend):
            return
        name = None if backend == "sm90" else backend
        first, second = run(t, name), run(t, name)
        assert all(torch.equal(getattr(first, field), getattr(second, field)) for field in first.FIELDS)

    prove()


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_weights_of_a_row_sum_to_one(backend):
    """With v all ones every row that sees a key gives 1, and every other 0, exactly up to rounding."""

    @examples(EXAMPLES // 2)
    @given(cases(logits=10.0), DTYPES)
    def prove(case, dtype):
        t = tensors(case, dtype, DEVICE)
        ones = torch.ones_like(t.v)
        if backend is not None and not legal(t, backend):
            return
        out, lse = strobe.attention(t.q, t.k, ones, return_lse=True, backend=backend, **t.keywords)
        want = torch.isfinite(lse).to(out.dtype).transpose(-1, -2)[..., None].expand_as(out)
        torch.testing.assert_close(out, want, atol=1e-2 if dtype != torch.float32 else 1e-5, rtol=0)

    prove()
