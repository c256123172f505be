"""The optimistic softmax: every row of its model is right or noted, nothing ordinary is noted, and the kernel agrees."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import HAS_GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Case, Tensors, describe, formula, tensors

import strobe
from strobe.device import arch_of
from strobe.kernels.common.optimistic import Bounds
from strobe.kernels.sm90.config import Config
from strobe.reference import optimistic
from strobe.reference.optimistic import Optimistic, key_blocks

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = (BF16, FP16)
INF, NAN = float("inf"), float("nan")
LN_2 = math.log(2.0)

# The last power of two by which a key may exceed its row's reference, in a row of 128 keys with ordinary values.
LAST = {BF16: 119, FP16: 15}
MASKS = {
    "full": strobe.Full(),
    "causal": strobe.Causal(),
    "window": strobe.Window(100, 0),
    "wide window": strobe.Window(300, 7),
    "prefix": strobe.Prefix(150),
    "ahead": strobe.Window(None, 90),
}

# ---- scores made to order


@dataclass(frozen=True)
class Scores:
    """x[i, j] = row[i] + key[j] in powers of two, multiples of 1/4 up to some thousands, which are exact in every dtype."""

    row: torch.Tensor
    key: torch.Tensor

    def tensors(self, dtype, mask, v=None, device="cpu", head_dim=64, heads=1) -> Tensors:
        """q, k whose products are the scores: the scale ln 2 undoes the kernels' log2(e). v: by default random."""
        q, k = (torch.zeros(1, len(x), heads, head_dim) for x in (self.row, self.key))
        for column, (row, key) in enumerate(zip(_split(self.row), _split(self.key), strict=True)):
            unit = (64.0, 1.0)[column]
            q[..., 2 * column], k[..., 2 * column] = unit, key[None, :, None]
            q[..., 2 * column + 1], k[..., 2 * column + 1] = row[None, :, None], unit
        if v is None:
            v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        return Tensors(q, k, v, dict(mask=mask, score=strobe.Score(), scale=LN_2))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as 64 a + b, both of few bits."""
    a = torch.round(x / 64)
    return a, x - 64 * a


def flat(n_q: int, n_kv: int, row: float = 0.0, spikes: dict[int, float] | None = None) -> Scores:
    """All scores the same, but for some keys'."""
    key = torch.zeros(n_kv)
    for j, x in (spikes or {}).items():
        key[j] = x
    return Scores(torch.full((n_q,), row), key)


def test_scores_are_exact():
    random = torch.Generator().manual_seed(0)
    row, key = (torch.randint(-8000, 8000, (n,), generator=random) / 4 for n in (70, 90))
    for dtype in DTYPES:
        t = Scores(row, key).tensors(dtype, strobe.Full())
        products = t.q[0, :, 0].double() @ t.k[0, :, 0].double().T
        assert torch.equal(products, row[:, None].double() + key[None, :].double())


# ---- right or noted


def model(t: Tensors, tile_q: int = 128, tile_kv: int = 128, bounds: Bounds | None = None) -> Optimistic:
    return optimistic.forward(*describe(t), tile_q, tile_kv, bounds)


def noted_rows(t: Tensors, noted: torch.Tensor) -> torch.Tensor:
    """The notes of a dense problem, spread over its rows: [batch, heads, n_q]."""
    batch, n_q, heads, _ = t.q.shape
    return noted.view(batch, heads, -1).repeat_interleave(64, dim=-1)[..., :n_q]


def allowed(t: Tensors, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of docs/optimistic_softmax.md on the errors of out and of lse, by row, [batch, heads, n_q]."""
    eps, of_subnormals = torch.finfo(t.q.dtype).eps, 2.0**-25 if t.q.dtype == FP16 else 0.0
    group = t.q.shape[2] // t.k.shape[2]
    scale = t.keywords.get("scale", t.q.shape[-1] ** -0.5)
    norms = [x.double().nan_to_num(0, 0, 0).norm(dim=-1).transpose(1, 2) for x in (t.q, t.k.repeat_interleave(group, dim=2))]
    # Scores are float32 sums of products, and exponents float32 differences of at most 128 and the score's own rounding.
    of_scores = 2.0**-21 * (abs(scale) * norms[0] * norms[1].amax(-1, keepdim=True) + 128)
    largest = t.v.double().abs().nan_to_num(0, 0, 0).amax()
    return largest * (2 * eps + 2 * of_scores + 2 * t.k.shape[1] * of_subnormals), of_scores + 2.0**-21 * lse.abs()


def assert_right_or_noted(t: Tensors, result: Optimistic) -> torch.Tensor:
    """Returns which rows are noted."""
    exact, noted = formula(t), noted_rows(t, result.noted)
    nothing = torch.isneginf(exact.lse)
    for_out, for_lse = allowed(t, torch.where(nothing, 0.0, exact.lse))
    error = (result.out.double() - exact.out).abs().amax(-1).transpose(1, 2)
    assert bool((noted | (error <= for_out)).all()), "a row that is not noted is wrong"
    assert torch.equal(torch.isneginf(result.lse) & ~noted, nothing & ~noted)
    error = torch.where(nothing, 0.0, (result.lse.double() - exact.lse).abs())
    assert bool((noted | (error <= for_lse)).all()), "the LSE of a row that is not noted is wrong"
    return noted


EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LENGTHS = st.sampled_from([1, 5, 64, 100, 128, 129, 192, 200, 300])
EDGES = [-250, -127, -126, -100, -64, -33, -25, -24, -15, -14, -13, 0, 9, 13, 14, 15, 16, 17, 32, 33, 95, 96, 97, 110]
EDGES += [113, 118, 119, 120, 121, 125, 126, 127, 128, 129, 150, 300]


@st.composite
def stretched(draw) -> tuple[Tensors, int, int]:
    """Scores with steps and spikes around every bound, under any mask, in any tiles."""
    n_q, n_kv = draw(LENGTHS), draw(LENGTHS)
    key = torch.randn(n_kv, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))).mul(8).round() / 4
    for _ in range(draw(st.integers(0, 3))):  # from some key on, or at it alone
        first, alone = draw(st.integers(0, n_kv - 1)), draw(st.booleans())
        key[first : first + 1 if alone else n_kv] += draw(st.sampled_from(EDGES)) + draw(
            st.sampled_from([-0.5, 0.0, 0.0, 0.25])
        )
    row = torch.full((n_q,), float(draw(st.sampled_from(EDGES))))
    row[:: draw(st.integers(1, 5))] = float(draw(st.sampled_from([0, *EDGES])))
    scores = Scores(row.clamp(-1000, 1000), key.clamp(-1000, 1000))
    t = scores.tensors(draw(st.sampled_from(DTYPES)), MASKS[draw(st.sampled_from(list(MASKS)))], head_dim=16)
    largest = draw(st.sampled_from([1.0, 1.0, 2.0**-10, 2.0**12]))
    t.v.mul_(largest)
    t.v[..., draw(st.sampled_from([0, 15]))] = 0.0
    return t, draw(st.sampled_from([64, 128, 192])), draw(st.sampled_from([32, 64, 128]))


@pytest.mark.skipif(HAS_GPU, reason="says nothing of the GPU")
@EXAMPLES
@given(stretched())
def test_every_row_is_right_or_noted(drawn):
    t, tile_q, tile_kv = drawn
    assert_right_or_noted(t, model(t, tile_q, tile_kv))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over", [-3, -1, 0, 1, 3])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_later_block_that_exceeds_the_first(dtype, over, mask):
    """Rows 128.. see a key that exceeds their first block by as much as is allowed and a little less or more."""
    excess = LAST[dtype] + 1 + over
    t = flat(300, 300, spikes={140: excess}).tensors(dtype, MASKS[mask])
    seen = MASKS[mask].dense(300, 300)[:, 140]
    noted = assert_right_or_noted(t, model(t))
    blocks = torch.tensor([bool(seen[first : first + 64].any()) for first in range(0, 300, 64)])
    # A tile of 128 rows whose own diagonal block leads has the spike there.
    judged = torch.tensor([not (mask == "causal" and first < 128) for first in range(0, 300, 64)])
    assert torch.equal(noted[0, 0, ::64], blocks & judged & (over >= 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_infinite_weight_is_seen_whatever_the_value(dtype, value):
    """inf * 0 is NaN: a value of 0 hides nothing."""
    t = flat(64, 256, spikes={200: 140.0}).tensors(dtype, strobe.Full(), torch.full((1, 256, 1, 64), value))
    assert model(t).noted.all()


@pytest.mark.parametrize("dtype, last", [(FP16, -14), (BF16, -100)])
@pytest.mark.parametrize("under", [0, 1])
def test_rows_that_the_first_block_does_not_judge(dtype, last, under):
    """A window of 64 keys in 192 rows: rows 127.. see nothing of their tile's first block and count from 0."""
    t = flat(192, 192, row=last - under).tensors(dtype, strobe.Window(63, 0))
    noted = assert_right_or_noted(t, model(t, tile_q=192, tile_kv=64))
    assert noted[0, 0, ::64].tolist() == [False, bool(under), bool(under)]


def test_least_is_needed():
    """With less of it, rows that lost their precision would pass."""
    t = flat(192, 192, row=-22.25).tensors(FP16, strobe.Window(63, 0))
    with pytest.raises(AssertionError, match="wrong"):
        assert_right_or_noted(t, model(t, 192, 128, Bounds(2.0**120, 0.5, 2.0**-25)))


# ---- values that are not numbers, or hardly


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("place", [3, 77, 150])
def test_poison_is_noted_wherever_it_is_seen(dtype, poison, where, place):
    t = tensors(Case(200, 200, batch=1, head_dim=64, mask="causal"), dtype)
    exact = formula(t)
    getattr(t, where)[:, place] = poison
    result = model(t, 128, 64)
    noted = noted_rows(t, result.noted)
    rows = torch.arange(200)
    sees = rows == place if where == "q" else rows >= place
    assert noted[..., sees].all()
    far = ~noted & (rows // 128 != place // 128)
    assert far.any() == (where == "q" or place >= 128)
    torch.testing.assert_close(result.lse[far].double(), exact.lse[far], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.out.transpose(1, 2)[far].double(), exact.out.transpose(1, 2)[far], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x", [-2000.0, -1.0, 0.0, 1.0, 2000.0])
def test_constant_rows(dtype, x):
    """All scores equal, however large: the mean of the values, and no note where the first block judges all rows."""
    t = flat(128, 300, row=x).tensors(dtype, strobe.Full())
    noted = assert_right_or_noted(t, model(t))
    assert not noted.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_float32_cannot_tell_apart(dtype):
    """Logits of 1e9 and more are right up to their own rounding, or noted; -1e30 in a key is no weight at all."""
    random = torch.Generator().manual_seed(0)
    large = torch.full((1, 200, 1, 64), 30000.0)
    for sign in (1.0, -1.0):
        for scale in (1.0, 0.3, 0.1234567):
            v = torch.randn(large.shape, generator=random)
            t = Tensors(large.to(dtype), (sign * large).to(dtype), v.to(dtype), dict(mask=strobe.Full(), scale=scale))
            assert_right_or_noted(t, model(t))
    t = tensors(Case(100, 200, batch=1, heads_q=1, heads_kv=1, head_dim=64), BF16)
    t.q[..., 0], t.k[..., 0] = 1.0, 0.0
    t.k[:, 120:, :, 0] = -1e30
    assert not assert_right_or_noted(t, model(t)).any()
    t.k[..., 0] = 0.0
    t.k[:, :150, :, 0] = -1e30  # the first block too: every later key exceeds it by 1e30
    assert assert_right_or_noted(t, model(t)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [-200.0, -3.0, 0.0, 5.0, 60.0])
def test_learned_sinks(dtype, sink):
    """A sink is a key without a value. Rows that see nothing have its LSE, whatever its size."""
    t = tensors(Case(300, 200, heads_q=4, heads_kv=2, head_dim=64, mask="causal"), dtype)
    t.keywords["score"] = strobe.Score(sinks=torch.tensor([sink, 0.0, sink, 1.0]))
    result = model(t)
    assert not assert_right_or_noted(t, result).any()
    torch.testing.assert_close(result.lse[:, 0, :100], torch.full((2, 100), sink))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_that_hides_lost_keys(dtype):
    """The sum with the sink is large; the keys' own, which is what was lost, is not."""
    t = flat(192, 192, row=-283.0).tensors(dtype, strobe.Window(63, 0))
    t.keywords["score"] = strobe.Score(sinks=torch.tensor([-120.0]))
    noted = assert_right_or_noted(t, model(t, tile_q=192, tile_kv=64))
    assert noted[0, 0, ::64].tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype):
    t = tensors(Case(300, 100, head_dim=64, mask="causal"), dtype)
    result = model(t)
    assert not assert_right_or_noted(t, result).any()
    assert bool((result.out[:, :200] == 0).all()) and bool(torch.isneginf(result.lse[..., :200]).all())


# ---- nothing ordinary is noted


ORDINARY = [Case(400, 400, mask=mask, head_dim=64) for mask in ("full", "causal", "window", "prefix")]
ORDINARY += [
    Case(130, 500, heads_q=4, heads_kv=2, mask="causal"),
    Case(300, 300, mask="causal", alibi=True, head_dim=64),
    Case(300, 300, mask="causal", softcap=20.0, head_dim=64),
    Case(200, 300, packed=True, batch=4, mask="causal"),
    Case(200, 200, mask="all"),
    Case(300, 300, mask="causal", logits=2.0, head_dim=64),
]


@pytest.mark.parametrize("tile_q, tile_kv", [(128, 128), (192, 128), (128, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ORDINARY, ids=str)
def test_ordinary_inputs_are_not_noted(case, dtype, tile_q, tile_kv):
    t = tensors(case, dtype)
    result = model(t, tile_q, tile_kv)
    assert not result.noted.any()
    exact = formula(t)
    torch.testing.assert_close(result.out.double(), exact.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(result.lse.double(), exact.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logit", [10.0, 20.0, 60.0])
def test_attention_sinks_are_not_noted(dtype, logit):
    """Key 0 far above all others, as in trained models: a causal tile is led by its block."""
    t = tensors(Case(500, 500, head_dim=64, mask="causal"), dtype)
    t.q[..., 0], t.k[..., 0] = 8.0, 0.0
    t.k[:, 0, :, 0] = logit
    assert not assert_right_or_noted(t, model(t)).any()


@pytest.mark.parametrize("offset", [-12.0, 12.0])
def test_a_channel_that_moves_all_scores_is_not_noted(offset):
    """An outlier channel adds a constant to a row's logits. fp16 follows it wherever a first block judges all rows."""
    for dtype, mask in ((BF16, "causal"), (FP16, "causal"), (FP16, "wide window")):
        t = tensors(Case(700, 700, head_dim=64), dtype)
        t.q[..., 0], t.k[..., 0] = 8.0, offset
        t.keywords["mask"] = MASKS[mask]
        noted = assert_right_or_noted(t, model(t))
        assert not noted.any(), (dtype, mask)


# ---- the order of the visit


def order(mask, row: int, n: int = 512, tile_q: int = 128, tile_kv: int = 128, **more) -> list[int]:
    t = tensors(Case(n, n, batch=1, head_dim=8, **more))
    t.keywords["mask"] = mask
    problem, _ = describe(t)
    return [keys.start // tile_kv for keys in key_blocks(problem, range(row, row + tile_q), n, n, tile_kv)]


def test_order_of_the_visit():
    assert order(strobe.Full(), 0) == [0, 1, 2, 3]
    assert order(strobe.Causal(), 256) == [0, 1, 2]
    assert order(strobe.Causal(), 0) == [0]
    assert order(strobe.Causal(), 0, tile_q=192) == [0, 1]  # rows 0..127 see nothing of block 1
    assert order(strobe.Window(300, 0), 384) == [2, 0, 1, 3]  # the leftmost that all rows see whole
    assert order(strobe.Window(20, 0), 384) == [3, 2]
    assert order(strobe.Window(20, 0), 192, tile_q=192) == [1, 2]  # rows 276..383 see nothing of it
    assert order(strobe.Causal(), 256, alibi=True) == [2, 0, 1]


# ---- the kernel


def simulated(dtype) -> list[Tensors]:
    """Few and small: steps around the bounds, rows that are not judged, a NaN. Two heads, so that a CTA has several tiles."""
    last, least = LAST[dtype], {BF16: -100.0, FP16: -14.0}[dtype]
    ordered = [(flat(200, 300, spikes={140: last + 1 + over}), strobe.Causal()) for over in (-1, 1)]
    ordered += [(flat(70, 200, spikes={170: last + 1.0}), strobe.Full())]
    ordered += [(flat(200, 200, row=least + over), strobe.Window(20, 0)) for over in (1.0, -1.0)]
    cases = [scores.tensors(dtype, mask, heads=2) for scores, mask in ordered]
    cases += [tensors(Case(200, 200, batch=1, head_dim=64, mask=mask), dtype) for mask in ("causal", "full")]
    cases[-1].v[:, 150, 1] = NAN
    return cases


@pytest.mark.parametrize("groups, tile_kv", [(2, 64), (3, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_simulated_kernel_notes_what_the_model_notes(dtype, groups, tile_kv):
    pytest.importorskip("greenlet", reason="the simulator needs greenlet")
    from strobe.sim.attention import simulate_forward

    config = Config(64, 64, groups, tile_kv, 2)
    numbers = []
    for t in simulated(dtype):
        out, lse, notes, _ = simulate_forward(*describe(t), "sm90", config)
        want = model(t, config.tile_q, tile_kv)
        assert torch.equal(notes != 0, want.noted)
        numbers.append(int(want.noted.sum()))
        torch.testing.assert_close(lse, want.lse, atol=1e-5, rtol=1e-5, equal_nan=True)
        noted = noted_rows(t, want.noted).transpose(1, 2)
        torch.testing.assert_close(out[~noted], want.out[~noted], atol=2e-2, rtol=2e-2)
    assert [bool(number) for number in numbers] == [False, True, True, False, True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_simulated_safe_kernel_is_right_or_notes_it(dtype):
    """With a running maximum too, which begins at 0 in rows that see nothing of their first block."""
    pytest.importorskip("greenlet", reason="the simulator needs greenlet")
    from strobe.sim.attention import simulate_forward

    for row in (-140.0, -30.0, -18.25, 0.0, 30.0, 140.0):
        t = flat(200, 200, row=row).tensors(dtype, strobe.Window(20, 0), heads=2)
        out, lse, notes, _ = simulate_forward(*describe(t), "sm90", Config(64, 64, 2, 64, 2, optimistic=False))
        noted = assert_right_or_noted(t, Optimistic(out, lse, notes != 0))
        assert row < 0.0 or not noted.any()


def launched(t: Tensors):
    """out, lse and which blocks are noted, straight from the kernel; and then what the second launch makes of them, with how
    many blocks it did again."""
    from strobe.kernels.portable import forward as portable
    from strobe.kernels.sm90 import backend
    from strobe.kernels.workspace import workspace
    from strobe.lab.forward_alone import launch

    problem, operands = describe(t)
    config = backend.config(problem, arch_of(t.q.device))
    made = launch(problem, operands, config)
    optimistic_result = Optimistic(made.out.clone(), made.lse.clone(), made.notes != 0)
    made.redone = torch.zeros(1, dtype=torch.int32, device=t.q.device)
    portable.redo_call(problem, made, arch_of(t.q.device)).launch()
    assert not workspace(t.q.device, made.notes.numel()).notes.any()
    return optimistic_result, (made.out, made.lse), int(made.redone), config


def hard_cases(dtype) -> list[Tensors]:
    """Inputs of which some blocks are noted, none by a margin of less than a factor of 2, and some that are not."""
    last, random = LAST[dtype], torch.Generator().manual_seed(0)

    def to_order(scores: Scores, mask) -> Tensors:
        return scores.tensors(dtype, mask, device="cuda", heads=2)

    noise = torch.randn(700, generator=random).mul(4).round() / 4
    cases = [
        to_order(flat(700, 700, spikes={spike: last + 1 + over}), mask)
        for over in (-2, 1, 2, 30)
        for spike in (0, 130, 500, 699)
        for mask in (strobe.Full(), strobe.Causal(), strobe.Window(200, 30))
    ]
    cases += [to_order(flat(400, 400, row=row), strobe.Window(20, 0)) for row in (-130.0, -16.0, -10.0, 0.0, 10.0, 18.0, 130.0)]
    later = (torch.arange(700) > 300).float()
    cases += [to_order(Scores(8 * noise[:300], noise + step * later), strobe.Full()) for step in (-9, 7, 60)]
    for poison in (NAN, INF, -INF):
        for name in ("q", "k", "v"):
            t = tensors(Case(300, 500, head_dim=64, mask="full"), dtype, "cuda")
            getattr(t, name)[0, 170, 1] = poison
            cases.append(t)
    return cases


def on_cpu(t: Tensors) -> Tensors:
    return replace(t, q=t.q.cpu(), k=t.k.cpu(), v=t.v.cpu())


def both_ways(t: Tensors):
    """strobe.attention with the optimistic softmax and with the running maximum."""
    optimistic_result = strobe.attention(t.q, t.k, t.v, return_lse=True, backend="sm90", **t.keywords)
    strobe.use_optimistic_softmax(False)
    try:
        return optimistic_result, strobe.attention(t.q, t.k, t.v, return_lse=True, backend="sm90", **t.keywords)
    finally:
        strobe.use_optimistic_softmax(True)


def assert_same(t: Tensors, got, want) -> None:
    """out and lse agree within the bounds of the model; what is no number is in the same places."""
    for_out, for_lse = allowed(t, torch.where(torch.isfinite(want[1]), want[1], 0.0).double())
    for one, other, bound in zip(got, want, (for_out.transpose(1, 2)[..., None], for_lse), strict=True):
        finite = torch.isfinite(other)
        assert torch.equal(torch.isfinite(one), finite)
        error = torch.where(finite, one.double() - other.double(), 0.0).abs()
        assert bool((error <= 2 * bound).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_notes_what_the_model_notes(dtype):
    some = 0
    for t in hard_cases(dtype):
        first, second, number, config = launched(t)
        want = model(on_cpu(t), config.tile_q, config.tile_kv)
        assert torch.equal(first.noted.cpu(), want.noted)
        assert number == int(want.noted.sum())
        some += number
        if all(bool(torch.isfinite(x).all()) for x in (t.q, t.k, t.v)):
            assert_right_or_noted(t, first)
            assert not assert_right_or_noted(t, Optimistic(*second, torch.zeros_like(first.noted))).any()
    assert some


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_equals_the_safe_one(dtype):
    for t in hard_cases(dtype):
        assert_same(t, *both_ways(t))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [strobe.Full(), strobe.Causal(), strobe.Window(100, 20)], ids=str)
def test_documents_equal_those_of_the_safe_one(dtype, base):
    """With spikes and poison in one document or another, and rows whose document no key has."""
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([100, 28, 300, 200, 72]))[None].to("cuda")
    masks = [base & strobe.Document(ids), base & strobe.Document(ids, ids.clamp(max=3))]
    before = strobe.redone_blocks("cuda")
    for mask in masks:
        for spike in (0, 110, 300, 699):
            for over in (-2, 1, 30):
                t = flat(700, 700, spikes={spike: LAST[dtype] + 1 + over}).tensors(dtype, mask, device="cuda", heads=2)
                assert_same(t, *both_ways(t))
        for poison in (NAN, INF):
            t = flat(700, 700).tensors(dtype, mask, device="cuda", heads=2)
            t.v[0, 170, 1] = poison
            assert_same(t, *both_ways(t))
    assert strobe.redone_blocks("cuda") > before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nothing_ordinary_is_redone(dtype, head_dim):
    before = strobe.redone_blocks("cuda")
    for mask in ("full", "causal", "window"):
        t = tensors(Case(1000, 1000, heads_q=4, head_dim=head_dim, mask=mask), dtype, "cuda")
        strobe.attention(t.q, t.k, t.v, backend="sm90", **t.keywords)
    assert strobe.redone_blocks("cuda") == before


@pytest.mark.gpu
def test_the_counter_says_what_was_redone():
    t = flat(700, 700, spikes={500: 200.0}).tensors(BF16, strobe.Full(), device="cuda", heads=2)
    before = strobe.redone_blocks("cuda")
    for _ in range(3):
        strobe.attention(t.q, t.k, t.v, backend="sm90", **t.keywords)
    assert strobe.redone_blocks("cuda") - before == 3 * 2 * 11


def ordinary_and_hard(n: int = 700) -> list[Tensors]:
    """Inputs of one shape: ordinary ones, and others whose every block, or whose every block of one head, is noted."""
    ordinary = tensors(Case(n, n, batch=1, head_dim=64), BF16, "cuda")
    ordinary.keywords["scale"] = LN_2
    all_blocks = flat(n, n, spikes={n - 1: 200.0}).tensors(BF16, strobe.Full(), device="cuda", heads=2)
    one_head = replace(all_blocks, q=all_blocks.q.clone())
    one_head.q[:, :, 0] = 0
    return [ordinary, all_blocks, one_head]


@pytest.mark.gpu
def test_graphs_replay_with_changing_inputs():
    """No note outlives a replay: what overflowed is right, and so is what comes after it."""
    inputs = ordinary_and_hard()
    want = [strobe.attention(t.q, t.k, t.v, return_lse=True, backend="sm90", **t.keywords) for t in inputs]
    q, k, v = (x.clone() for x in (inputs[0].q, inputs[0].k, inputs[0].v))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = strobe.attention(q, k, v, return_lse=True, backend="sm90", **inputs[0].keywords)
    for turn in range(20):
        t, expected = inputs[turn % 3], want[turn % 3]
        for mine, new in zip((q, k, v), (t.q, t.k, t.v), strict=True):
            mine.copy_(new)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True)), turn


@pytest.mark.gpu
def test_streams_at_once():
    """Each has its own notes: the blocks of one are never taken for the other's, nor left undone."""
    inputs = ordinary_and_hard(1500)
    want = [strobe.attention(t.q, t.k, t.v, backend="sm90", **t.keywords) for t in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got = []
    for turn in range(60):
        number = (turn + turn // 3) % 3  # each stream meets all inputs
        with torch.cuda.stream(streams[turn % 3]):
            t = inputs[number]
            got.append((number, strobe.attention(t.q, t.k, t.v, backend="sm90", **t.keywords)))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want[number]) for number, out in got)


@pytest.mark.gpu
def test_the_switch():
    with pytest.raises(TypeError, match="True or False"):
        strobe.use_optimistic_softmax("no")
    t = flat(300, 300, spikes={299: 200.0}).tensors(BF16, strobe.Full(), device="cuda")
    before = strobe.redone_blocks("cuda")
    strobe.use_optimistic_softmax(False)
    try:
        strobe.attention(t.q, t.k, t.v, backend="sm90", **t.keywords)
    finally:
        strobe.use_optimistic_softmax(True)
    assert strobe.redone_blocks("cuda") == before
