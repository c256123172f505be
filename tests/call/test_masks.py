"""Every face of a mask agrees with its definition, exhaustively on small sizes; kernels run the same source."""

import itertools

import pytest
import torch

import strobe
from strobe import masks
from strobe.masks import Mask, TileClass

BOUNDS = (None, 0, 1, 3)
BANDS = [Mask(left, right, prefix) for left, right, prefix in itertools.product(BOUNDS, BOUNDS, (None, 0, 2, 5))]
SIZES = [(n_q, n_kv) for n_q in (1, 2, 5) for n_kv in (1, 3, 6)]


def defined(mask: Mask, i: int, j: int, n_q: int, n_kv: int) -> bool:
    """The definition in words of one pair."""
    p = i + n_kv - n_q
    return (
        (mask.left is None or j >= p - mask.left)
        and (mask.right is None or j <= p + mask.right)
        and (mask.prefix is None or j <= p or j < mask.prefix)
    )


def table(mask: Mask, n_q: int, n_kv: int) -> torch.Tensor:
    return torch.tensor([[defined(mask, i, j, n_q, n_kv) for j in range(n_kv)] for i in range(n_q)])


def spans(n: int):
    """All (first, last) within n."""
    return ((first, last) for first in range(n) for last in range(first, n))


@pytest.mark.parametrize("mask", BANDS, ids=str)
def test_faces_agree_with_the_definition(mask):
    for n_q, n_kv in SIZES:
        want = table(mask, n_q, n_kv)
        assert torch.equal(mask.dense(n_q, n_kv), want)
        assert mask.count(n_q, n_kv) == int(want.sum())
        for first, last in spans(n_q):
            rows = want[first : last + 1]
            begin, end = mask.kv_range(first, last, n_q, n_kv)
            assert set(rows.any(0).nonzero().flatten().tolist()) <= set(range(begin, end))
            for key_first, key_last in spans(n_kv):
                tile = rows[:, key_first : key_last + 1]
                got = mask.tile_class(first, last, key_first, key_last, n_q, n_kv)
                if got is TileClass.EMPTY:
                    assert not tile.any()
                assert (got is TileClass.FULL) == bool(tile.all())


@pytest.mark.parametrize("mask", BANDS, ids=str)
def test_ranges_of_rows_agree_with_the_definition(mask):
    for n_q, n_kv in SIZES:
        want, shift = table(mask, n_q, n_kv), n_kv - n_q
        for first, last in spans(n_kv):
            columns = want[:, first : last + 1]
            begin, end = masks.q_range(first, last, shift, n_kv, *mask.band)
            assert set((columns.any(1).nonzero().flatten() + shift).tolist()) <= set(range(begin, end))
            begin, end = masks.q_full(first, last, shift, n_kv, *mask.band)
            assert set((columns.all(1).nonzero().flatten() + shift).tolist()) == set(range(begin, end))


def test_ranges_leave_out_what_causal_and_window_hide():
    """Bounds must not only be safe: tiles beyond the band are not visited."""
    mask = strobe.Window(left=10, right=0)
    assert mask.kv_range(100, 199, 1000, 1000) == (90, 200)
    assert masks.q_range(100, 199, 0, 1000, *mask.band) == (100, 210)


@pytest.mark.parametrize("mask", BANDS, ids=str)
def test_bounds_that_hide_nothing_are_left_out(mask):
    """Of these sizes, and of smaller ones, as sequences of a batch have."""
    for n_q, n_kv in SIZES:
        fewer = mask.within(n_q, n_kv)
        for rows, keys in itertools.product(range(1, n_q + 1), range(1, n_kv + 1)):
            assert torch.equal(table(fewer, rows, keys), table(mask, rows, keys))


def test_bounds_that_hide_something_are_kept():
    for n_q, n_kv in SIZES:
        assert strobe.Window(n_kv - 1, n_q - 1).within(n_q, n_kv) == strobe.Prefix(n_kv).within(n_q, n_kv) == strobe.Full()
        for mask in (strobe.Window(max(0, n_kv - 2)), strobe.Window(None, max(0, n_q - 2)), strobe.Prefix(n_kv - 1)):
            hides = not table(mask, n_q, n_kv).all()
            assert mask.within(n_q, n_kv) == mask or not hides


def test_a_window_that_is_wider_than_its_sequences_is_a_causal_mask():
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    for left, says in ((63, "mask causal"), (62, "mask window(left=62, right=0)")):
        assert says in str(strobe.explain(q, k, v, mask=strobe.Window(left, 0)))


@pytest.mark.parametrize("a", BANDS[::5], ids=str)
@pytest.mark.parametrize("b", BANDS[::7], ids=str)
def test_conjunction(a, b):
    for n_q, n_kv in SIZES:
        assert torch.equal((a & b).dense(n_q, n_kv), table(a, n_q, n_kv) & table(b, n_q, n_kv))


def test_documents():
    q, kv = torch.tensor([[0, 0, 1], [2, 1, 1]]), torch.tensor([[0, 1, 1, 1], [1, 1, 2, 2]])
    mask = strobe.Document(q, kv) & strobe.Causal()
    want = (q[:, :, None] == kv[:, None, :]) & table(strobe.Causal(), 3, 4)
    assert torch.equal(mask.dense(3, 4), want)
    assert mask.tile_class(2, 2, 0, 0, 3, 4) is not TileClass.FULL
    assert str(mask) == "causal & documents"
    with pytest.raises(ValueError, match="one Document"):
        mask & strobe.Document(q, kv)


def test_documents_beside_themselves():
    """A conjunction may hold one Document mask many times."""
    documents = strobe.Document(torch.tensor([[0, 0, 1]]))
    assert torch.equal((documents & strobe.Causal() & documents).dense(3, 3), (documents & strobe.Causal()).dense(3, 3))


NUMBERS = {
    "hashes": (torch.int64, [2**32, 0, -(2**63), 2**63 - 1, 2**32 + 1, 1, -1]),
    "unsigned of 32 bits": (torch.uint32, [2**32 - 1, 0, 2**31]),
    "unsigned of 64 bits": (torch.uint64, [2**64 - 1, 0, 2**63, 2**32]),
    "unsigned of 16 bits": (torch.uint16, [2**16 - 1, 0, 2**15]),
    "bytes": (torch.uint8, [255, 0, 128]),
    "negative bytes": (torch.int8, [-128, 127, -1]),
    "short": (torch.int16, [-(2**15), 2**15 - 1, 0]),
    "int32": (torch.int32, [-(2**31), 2**31 - 1, 0]),
    "bool": (torch.bool, [True, False]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_documents_of_any_integers(name):
    dtype, numbers = NUMBERS[name]
    random = torch.Generator().manual_seed(0)
    which_q, which_kv = (torch.randint(0, len(numbers), (3, n), generator=random) for n in (7, 40))
    want = which_q[:, :, None] == which_kv[:, None, :]
    ids_q, ids_kv = (torch.tensor(numbers, dtype=dtype)[which] for which in (which_q, which_kv))
    for mask in (strobe.Document(ids_q, ids_kv), strobe.Document(ids_q, ids_kv.transpose(0, 1).contiguous().transpose(0, 1))):
        assert mask.documents.q.dtype == mask.documents.kv.dtype == torch.int32
        assert torch.equal(mask.dense(7, 40), want)
    if dtype != torch.uint64:
        assert torch.equal(strobe.Document(ids_q, ids_kv.long()).dense(7, 40), want)
    assert torch.equal(strobe.Document(ids_q).dense(7, 7), which_q[:, :, None] == which_q[:, None, :])


def test_documents_that_are_numbered_anew_keep_their_order():
    """What is packed stays packed, which kernels are fast for; int32 stays as it is."""
    ids = torch.tensor([[5, 5, 2**40, 2**41], [-(2**50), 0, 0, 7]])
    assert strobe.Document(ids).documents.q.tolist() == [[0, 0, 1, 2], [0, 1, 1, 2]]
    assert strobe.Document(ids, ids[:, :0]).documents.kv.shape == (2, 0)
    as_given = ids.int()
    assert strobe.Document(as_given).documents.q is as_given


def of_its_head(batch, head, q_index, kv_index):
    return (q_index + kv_index + batch) % (head + 2) == 0


def not_the_first(batch, head, q_index, kv_index):
    return kv_index > 0


def test_functions():
    mask = strobe.Visible(of_its_head) & strobe.Causal() & strobe.Visible(not_the_first)
    assert str(mask) == "causal & function both"
    want = torch.zeros(2, 3, 4, 5, dtype=torch.bool)
    for b, h, i, j in itertools.product(*map(range, want.shape)):
        want[b, h, i, j] = (i + j + b) % (h + 2) == 0 and 0 < j <= i + 1
    assert torch.equal(mask.dense(4, 5, batch=2, heads=3), want)
    assert mask.count(4, 5, batch=2, heads=3) == round(want.sum().item() / 6)
    rows, keys = torch.arange(1, 3)[:, None], torch.arange(2, 5)[None, :]
    assert torch.equal(mask.tile(rows, keys, 4, 5, range(1, 2), range(3)), want[1:, :, 1:3, 2:5])
    assert mask.kv_range(0, 1, 4, 5) == (0, 3)
    assert mask.tile_class(0, 0, 2, 4, 4, 5) is TileClass.EMPTY
    assert strobe.Visible(not_the_first).tile_class(0, 3, 1, 4, 4, 5) is TileClass.PARTIAL
    assert strobe.Visible(not_the_first).count(3000, 2) == 3000


def test_functions_beside_documents():
    """The batch is that of the documents."""
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    mask = strobe.Visible(of_its_head) & strobe.Document(ids)
    seen = mask.dense(4, 4, heads=2)
    assert torch.equal(seen, strobe.Document(ids).dense(4, 4)[:, None] & strobe.Visible(of_its_head).dense(4, 4, 2, 2))
    assert torch.equal(mask.of_batch(1).tile(*grid(4), 4, 4, range(1, 2), range(2)), seen[1:])


def grid(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)[None, :]


def test_the_same_function_twice_is_itself():
    mask = strobe.Visible(of_its_head)
    assert mask & mask == mask


def test_bottom_right():
    """With fewer queries than keys the last query sees every key; with more, the first queries see none."""
    assert strobe.Causal().dense(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert strobe.Causal().dense(3, 2).tolist() == [[False, False], [True, False], [True, True]]


def test_names():
    assert str(strobe.Full()) == "full"
    assert str(strobe.Causal() & strobe.Window(5)) == "window(left=5, right=0)"
    assert str(strobe.Prefix(7) & strobe.Window(5)) == "window(left=5, right=None) & prefix(7)"


@pytest.mark.parametrize("bad", [-1, 1.5, True, "2"])
def test_bad_bounds(bad):
    with pytest.raises((TypeError, ValueError), match="mask: left"):
        strobe.Window(left=bad)


def test_bounds_on_the_device_fit_int32():
    mask = strobe.Window(2**40, 7) & strobe.Prefix(2**31)
    assert (strobe.Window(2**70) & strobe.Prefix(2**63)).device_band == (masks.MAX_BOUND, None, masks.MAX_BOUND)
    assert mask.device_band == (masks.MAX_BOUND, 7, masks.MAX_BOUND) and 2 * masks.MAX_BOUND - 1 < 2**31
