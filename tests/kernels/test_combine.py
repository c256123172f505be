"""The merge of attention over parts of the keys: the law, and that it is attention over all of them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Case, describe, tensors
from tritons import TRITONS, output_of

from strobe.kernels.combine import combine
from strobe.kernels.splits import COMBINE_BLOCKS, choose_splits
from strobe.reference import dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (2, 19, 3, 24)  # batch, n, heads, D: no power of two


def parts(splits: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random O and LSE of some parts."""
    batch, n, heads, _ = SHAPE
    random = torch.Generator().manual_seed(seed)
    o = torch.randn(splits, *SHAPE, generator=random).to(DEVICE)
    return o, (5 * torch.randn(splits, batch, heads, n, generator=random)).to(DEVICE)


def merge(o: torch.Tensor, lse: torch.Tensor, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """combine, into tensors full of NaN."""
    out, total = torch.full_like(o[0], torch.nan, dtype=dtype), torch.full_like(lse[0], torch.nan)
    combine(o, lse, out, total)
    return out, total


def assert_same(got, want, tolerance=1e-6):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_is_the_formula():
    o, lse = parts(5)
    total = lse.double().logsumexp(0)
    weights = (lse.double() - total).exp().transpose(2, 3)[..., None]
    assert_same(merge(o, lse), ((weights * o).sum(0).float(), total.float()), 1e-5)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_is_associative(cut):
    o, lse = parts(4)
    left, right = merge(o[:cut], lse[:cut]), merge(o[cut:], lse[cut:])
    both = (torch.stack(pair) for pair in zip(left, right, strict=True))
    assert_same(merge(*both), merge(o, lse), 1e-5)


def test_order_does_not_matter():
    o, lse = parts(3)
    for order in itertools.permutations(range(3)):
        assert_same(merge(o[list(order)], lse[list(order)]), merge(o, lse), 1e-5)


def test_one_part_is_itself():
    o, lse = parts(1)
    assert_same(merge(o, lse), (o[0], lse[0]))


@pytest.mark.parametrize("rubbish", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_part_changes_nothing(empty, rubbish):
    o, lse = parts(3)
    rest = [s for s in range(3) if s != empty]
    o[empty], lse[empty] = rubbish, -torch.inf
    assert_same(merge(o, lse), merge(o[rest], lse[rest]))


def test_a_row_whose_parts_are_all_empty():
    o, lse = parts(3)
    o[:, 0, 7, 1], lse[:, 0, 1, 7] = torch.nan, -torch.inf
    out, total = merge(o, lse)
    assert (out[0, 7, 1] == 0).all() and total[0, 1, 7] == -torch.inf
    assert out.isfinite().all() and total.isfinite().sum() == total.numel() - 1


def test_a_nan_stays_in_its_row():
    o, lse = parts(3)
    clean = merge(o, lse)
    o[1, 0, 7, 1] = torch.nan
    out, total = merge(o, lse)
    assert out[0, 7, 1].isnan().all()
    out[0, 7, 1] = clean[0][0, 7, 1]
    assert_same((out, total), clean, 0.0)


def test_large_scores_do_not_overflow():
    o, lse = parts(2)
    assert_same(merge(o, lse + 3e4)[:1], merge(o, lse)[:1], 2e-2)  # float32 has 3e4 to within 2e-3
    assert merge(o, lse - 3e4)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_to_the_dtype_of_out_once(dtype):
    o, lse = parts(2)
    torch.testing.assert_close(merge(o, lse, dtype)[0], merge(o, lse)[0].to(dtype), atol=0, rtol=0)


def test_strides_and_packed_problems():
    o, lse = parts(3)
    want = merge(o, lse)
    wide = torch.empty(2, 19, 3, 48, device=DEVICE)
    total = torch.empty_like(want[1])
    combine(o, lse, wide[..., 24:], total)
    assert_same((wide[..., 24:], total), want, 0.0)
    packed_out, packed_lse = torch.empty_like(want[0][1]), torch.empty_like(want[1][1])
    combine(o[:, 1].contiguous(), lse[:, 1].contiguous(), packed_out, packed_lse)
    assert_same((packed_out, packed_lse), (want[0][1], want[1][1]), 0.0)


def test_attention_over_parts_is_attention():
    """Keys in three parts of different lengths, against float64 over all of them."""
    t = tensors(Case(40, 90, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=96), torch.float32, DEVICE)
    problem, operands = describe(t)
    found = [
        dense.attention(problem, operands._replace(k=t.k[:, keys], v=t.v[:, keys]), torch.float64)
        for keys in (slice(0, 7), slice(7, 64), slice(64, 90))
    ]
    got = merge(*(torch.stack(x).float() for x in zip(*found, strict=True)))
    assert_same(got, (x.float() for x in dense.attention(problem, operands, torch.float64)), 1e-5)


@pytest.mark.gpu
def test_large_on_the_gpu():
    """9.4e8 elements of parts; the last rows are compared with the formula in float64."""
    random = torch.Generator("cuda").manual_seed(0)
    o = torch.randn(7, 2, 4096, 128, 128, device="cuda", generator=random)
    lse = torch.randn(7, 2, 128, 4096, device="cuda", generator=random)
    out, total = merge(o, lse)
    rows = slice(4000, None)
    weights = (lse[..., rows].double() - lse[..., rows].double().logsumexp(0)).exp().transpose(2, 3)[..., None]
    torch.testing.assert_close(out[:, rows], (weights * o[:, :, rows]).sum(0).float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, lse.logsumexp(0), atol=1e-5, rtol=1e-5)


COMPILE = """
import torch
from strobe.kernels import combine as c
from strobe.kernels.portable.arguments import matrix, vector
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import audit
for capability in (80, 90, 100):
    o = torch.empty(6, 64, 8, 96, device="meta")
    out = torch.empty(2, 64, 8, 96, device="meta", dtype=torch.bfloat16)
    lse_parts, lse = (torch.empty(batch, 8, 64, device="meta") for batch in (6, 2))
    with pretend_gpu(capability):
        compiled = c._combine.warmup(
            matrix(o), vector(lse_parts), matrix(out), vector(lse), 3, 2, 8, 64, DIM=96, PADDED=128, TILE=c.TILE_ROWS, grid=(1,)
        )
    print(capability, audit(compiled, "combine").spill_bytes)
"""


@pytest.mark.parametrize("triton", TRITONS)
def test_compiles_for_gpus_that_are_not_there(triton):
    assert output_of(COMPILE, triton=triton).splitlines() == ["80 0", "90 0", "100 0"]


# ---- into how many parts


def test_a_full_gpu_does_not_split():
    assert choose_splits(tiles=148, blocks=512, workers=148) == 1
    assert choose_splits(tiles=75, blocks=512, workers=148) == 1  # not two parts each
    assert choose_splits(tiles=0, blocks=512, workers=148) == 1


def test_short_rows_do_not_split():
    assert choose_splits(tiles=1, blocks=COMBINE_BLOCKS + 1, workers=148) == 1


def test_decoding_splits():
    assert choose_splits(tiles=8, blocks=512, workers=148) == 18
    assert choose_splits(tiles=1, blocks=32, workers=148) == 32


@settings(max_examples=200, deadline=None)
@given(tiles=st.integers(1, 400), blocks=st.integers(0, 3000), workers=st.integers(1, 300))
def test_parts_run_at_once_and_none_is_idle(tiles, blocks, workers):
    splits = choose_splits(tiles, blocks, workers)
    assert splits == 1 or (tiles * splits <= workers and blocks - -(-blocks // splits) > COMBINE_BLOCKS)
    longest = -(-blocks // splits)
    assert splits == 1 or (splits - 1) * longest < blocks  # parts of `longest` blocks: the last is not empty
