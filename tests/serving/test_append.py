"""Appending to a cache: in plain torch, and the kernel in Triton's interpreter or on a GPU, against the specification."""

import random

import pytest
import torch

import strobe
from strobe.device import CPU
from strobe.reference.cached import merged, rotated
from strobe.serving.arguments import checked_append

DEVICES = ["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
HAS_GPU = torch.cuda.is_available()


def ints(*numbers, device="cpu") -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def append(where: str, cache, k, v, **keywords):
    """`strobe.append`, on a CPU too by the kernel if that is asked for."""
    if where != "interpreter":
        return strobe.append(cache, k, v, **keywords)
    from strobe.kernels.decode.append import append_call

    given = {name: keywords.pop(name, None) for name in ("q", "rotary", "cu_seqlens", "cu_seqlens_q", "positions")}
    operands, options = checked_append(cache, k, v, **given, one_position=keywords.pop("one_position", False))
    lengths, turned = torch.empty_like(cache.lengths), None if given["q"] is None else torch.empty_like(given["q"])
    append_call(operands, options, lengths, turned, CPU).launch()
    return strobe.Cache(cache.k, cache.v, lengths, cache.page_table, cache.index), turned


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_against_the_specification(where, seed):
    if where == "interpreter" and HAS_GPU:
        pytest.skip("the kernel runs on the GPU")
    rnd, g = random.Random(seed), torch.Generator().manual_seed(seed)
    device = "cuda" if where == "cuda" else "cpu"
    dtype = torch.float32 if where != "cuda" else torch.bfloat16
    batch, heads, dim, dim_v, page = 3, rnd.choice([1, 3]), 24, 16, rnd.choice([None, 1, 5, 16])
    ragged, interleaved, turns = seed % 2 == 1, rnd.random() < 0.5, seed != 0
    lengths, counts = [rnd.randint(0, 20) for _ in range(batch)], [rnd.randint(0, 7) if ragged else 4 for _ in range(batch)]
    room = 30 if page is None else -(-30 // page) * page
    table = entries = None
    if page is None:
        caches = [torch.full((5, room, heads, d), torch.nan) for d in (dim, dim_v)]
        entries = torch.randperm(5, generator=g)[:batch].int()
    else:
        caches = [torch.full((3 * room // page, page, heads, d), torch.nan) for d in (dim, dim_v)]
        table = torch.randperm(3 * room // page, generator=g).view(batch, -1).int()
    shape = (sum(counts),) if ragged else (batch, 4)
    k, v, q = (torch.randn(*shape, h, d, generator=g).to(dtype) for h, d in ((heads, dim), (heads, dim_v), (2 * heads, dim)))
    rotary = strobe.Rotary(*(torch.randn(64, 8, generator=g) for _ in range(2)), interleaved)
    positions = ints(*(rnd.randint(0, 30) for _ in range(batch))) if seed % 3 == 2 else None
    cu = torch.tensor([0, *counts]).cumsum(0).int() if ragged else None

    def to(x):
        return None if x is None else x.to(device)

    keywords = {"cu_seqlens": to(cu)}
    if turns:
        rotary_there = strobe.Rotary(to(rotary.cos), to(rotary.sin), interleaved)
        keywords |= {
            "rotary": rotary_there,
            "q": to(q),
            "cu_seqlens_q": to(cu),
            "positions": to(positions),
            "one_position": seed == 5,
        }
    cache = strobe.Cache(*(to(x.to(dtype)) for x in caches), to(ints(*lengths)), to(table), to(entries))
    grown, turned = append(where, cache, to(k), to(v), **keywords)
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    assert grown.lengths.tolist() == [n + c for n, c in zip(lengths, counts, strict=True)]
    untouched = ~torch.isnan(grown.k).any(-1).cpu()
    for b in range(batch):
        mine = slice(sum(counts[:b]), sum(counts[: b + 1])) if ragged else b
        first = lengths[b] if positions is None else int(positions[b])
        at = first + torch.arange(counts[b])
        wanted = rotated(k[mine], at, *rotary) if turns else k[mine].double()
        for i in range(counts[b]):
            t = lengths[b] + i
            place = (int(table[b, t // page]), t % page) if page else (int(entries[b]), t)
            torch.testing.assert_close(grown.k[place].double().cpu(), wanted[i], rtol=bound, atol=bound)
            assert torch.equal(grown.v[place].cpu(), v[mine][i])
            untouched[place] = False
        if turns:
            wanted = rotated(q[mine], at if seed != 5 else torch.full_like(at, first), *rotary)
            torch.testing.assert_close(turned[mine].double().cpu(), wanted, rtol=bound, atol=bound)
    assert not untouched.any()


@pytest.mark.parametrize("where", DEVICES[1:])
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_that_several_programs_have(where, interleaved):
    """24 and 72 heads of 128 columns: a program has 16 of them, the last ones of a row have 8."""
    if where == "interpreter" and HAS_GPU:
        pytest.skip("the kernel runs on the GPU")
    device, g = "cuda" if where == "cuda" else "cpu", torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(2, 3, heads, 128, generator=g) for heads in (24, 24, 72))
    cos, sin = (torch.randn(16, 32, generator=g) for _ in range(2))
    empty = torch.full((2, 8, 24, 128), torch.nan, device=device)
    cache = strobe.Cache(empty, empty.clone(), ints(0, 5, device=device))
    rotary = strobe.Rotary(cos.to(device), sin.to(device), interleaved)
    grown, turned = append(where, cache, k.to(device), v.to(device), q=q.to(device), rotary=rotary)
    for b, length in enumerate((0, 5)):
        at = length + torch.arange(3)
        for found, given in ((grown.k[b, at], k[b]), (turned[b], q[b])):
            torch.testing.assert_close(found.cpu().double(), rotated(given, at, cos, sin, interleaved), rtol=1e-5, atol=1e-5)
        assert torch.equal(grown.v[b, at].cpu(), v[b])
        assert grown.k[b].isnan().all(-1).all(-1).sum() == 5  # and no other row was written


@pytest.mark.parametrize("where", DEVICES[1:])
def test_what_has_no_place_is_not_written(where):
    if where == "interpreter" and HAS_GPU:
        pytest.skip("the kernel runs on the GPU")
    device = "cuda" if where == "cuda" else "cpu"
    k = torch.zeros(2, 4, 1, 16, device=device)
    cache = strobe.Cache(k, k.clone(), ints(6, 3, device=device), ints([0, 1], [-1, 7], device=device))
    grown, _ = append(where, cache, *(torch.ones(2, 3, 1, 16, device=device) for _ in range(2)))
    assert grown.lengths.tolist() == [8, 6]
    for x in (grown.k, grown.v):
        assert x[0].eq(0).all() and x[1, :2].eq(0).all() and x[1, 2:].eq(1).all()


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


TURNS = strobe.Rotary(zeros(8, 8), zeros(8, 8))
PACKED = {"k": zeros(4, 1, 16), "v": zeros(4, 1, 16)}
NO_PLACES = {
    r"lengths \(cache_seqlens\) must leave room for .* of 8 for a request, got \[7, 3\]": {"lengths": ints(7, 3)},
    r"lengths \(cache_seqlens\) must be from 0 to the 8 keys .* got \[-1, 3\]": {"lengths": ints(-1, 3)},
    r"page_table \(block_table\) must name one of 4 pages for all keys that .* \[2, 4\]": {"table": ints([0, 1], [2, 4])},
    r"page_table \(block_table\) must name one of 4 .* got \[\[0, 1\], \[-1, 3\]\]": {"table": ints([0, 1], [-1, 3])},
    r"index \(cache_batch_idx\) must name one of 4 entries": {"table": None, "index": ints(0, 4), "lengths": ints(0, 1)},
    r"cu_seqlens \(cu_seqlens_k_new\) must start at 0 and never decrease": {**PACKED, "cu_seqlens": ints(1, 2, 4)},
    r"cu_seqlens \(cu_seqlens_k_new\) must not exceed the 4 rows": {**PACKED, "cu_seqlens": ints(0, 2, 5)},
    r"cu_seqlens_q must not exceed the 1 rows": {"q": zeros(1, 1, 16), "rotary": TURNS, "cu_seqlens_q": ints(0, 1, 2)},
    r"positions \(rotary_seqlens\) must let .* got \[-1, 0\]": {"rotary": TURNS, "positions": ints(-1, 0)},
    r"positions \(rotary_seqlens\) must .* got \[0, 7\]": {"rotary": TURNS, "positions": ints(0, 7)},
    r"lengths \(cache_seqlens\) must let .* the 4 rows": {"rotary": strobe.Rotary(zeros(4, 8), zeros(4, 8))},
    r"lengths \(cache_seqlens\) must let .* the 8 rows": {"rotary": TURNS, "q": zeros(2, 6, 1, 16)},
}


@pytest.mark.parametrize("says", NO_PLACES)
def test_numbers_that_cannot_be_are_errors_on_a_cpu(says):
    """In place of keys that are not written. Nothing is written ahead of them."""
    usual = {"lengths": ints(6, 3), "table": ints([-1, 1], [2, 3]), "k": zeros(2, 2, 1, 16), "v": zeros(2, 2, 1, 16)}
    call = usual | NO_PLACES[says]
    k, v = (torch.ones(4, 4, 1, 16) for _ in range(2))
    cache = strobe.Cache(k, v, call.pop("lengths"), call.pop("table"), call.pop("index", None))
    with pytest.raises(ValueError, match=says):
        strobe.append(cache, call.pop("k"), call.pop("v"), **call)
    assert cache.k.eq(1).all() and cache.v.eq(1).all()


def test_requests_of_which_nothing_is_appended_may_be_anything():
    """Full, without pages, beyond the embedding."""
    cache = strobe.Cache(zeros(2, 4, 1, 16), zeros(2, 4, 1, 16), ints(3, 4), ints([0], [-1]))
    rotary, new = strobe.Rotary(zeros(4, 8), zeros(4, 8)), zeros(1, 1, 16)
    grown, _ = strobe.append(cache, new, new, rotary=rotary, cu_seqlens=ints(0, 1, 1))
    assert grown.lengths.tolist() == [4, 4]


@pytest.mark.parametrize("where", [DEVICES[0], DEVICES[2]])  # Triton's interpreter loses carries in its cast to 8 bits
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (40, 128)])
def test_a_cache_of_8_bits_holds_what_is_divided_by_its_scale(where, heads, dim):
    device = "cuda" if where == "cuda" else "cpu"
    g = torch.Generator().manual_seed(0)
    new = torch.randn(2, 3, heads, dim, generator=g).to(device)
    scale = 2.0 ** torch.randint(-2, 3, (heads,), generator=g).float().to(device)
    empty = torch.zeros(2, 8, heads, dim, device=device).to(torch.float8_e4m3fn)
    cache = strobe.Cache(empty, empty.clone(), ints(0, 2, device=device), k_scale=scale, v_scale=scale)
    grown, _ = append(where, cache, new, new)
    wanted = (new / scale[:, None]).to(torch.float8_e4m3fn).float()
    for x in (grown.k, grown.v):
        for found, right in ((x[0, :3], wanted[0]), (x[1, 2:5], wanted[1])):
            assert torch.equal(found.float(), right)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
def test_parts_are_merged(device, packed):
    g = torch.Generator().manual_seed(3)
    outs, lses = (
        torch.randn(4, *(() if packed else (2,)), 5, 3, 16, generator=g),
        torch.randn(4, *(() if packed else (2,)), 3, 5, generator=g),
    )
    lses[1:, ..., 2], lses[..., 3] = -torch.inf, -torch.inf
    outs[1:].transpose(-2, -3)[..., 2, :], outs.transpose(-2, -3)[..., 3, :] = torch.nan, torch.nan
    out, lse = strobe.merge(outs.to(device), list(lses.to(device)))
    wanted, wanted_lse = merged(outs.nan_to_num(), lses.transpose(-1, -2))
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double().cpu(), wanted_lse.transpose(-1, -2), rtol=1e-5, atol=1e-6)


def test_a_shared_prefix_and_the_rest_are_the_whole():
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, n, h, 16, generator=g) for n, h in ((1, 4), (20, 2), (20, 2)))
    k[1, :8], v[1, :8] = k[0, :8], v[0, :8]
    whole, lse = strobe.decode(q, strobe.Cache(k, v, ints(20, 13)), return_lse=True)
    prefix = strobe.decode(q, strobe.Cache(k, v, ints(8, 8), index=ints(0, 0)), return_lse=True)
    rest = strobe.decode(q, strobe.Cache(k, v, ints(20, 13), leftpad=ints(8, 8)), return_lse=True)
    out, merged_lse = strobe.merge(*zip(prefix, rest, strict=True))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(merged_lse, lse)


@pytest.mark.parametrize(("parts", "says"), [(None, "outs must be a sequence of tensors"), ([], "at least one part")])
def test_what_are_no_parts(parts, says):
    with pytest.raises((TypeError, ValueError), match=says):
        strobe.merge(parts, parts)


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        ("k must have 2 heads of 16 columns", {"k": torch.zeros(2, 1, 1, 16)}),
        ("v must be given exactly", {"v": None}),
        ("k must have the cache's dtype", {"k": torch.zeros(2, 1, 2, 16).half()}),
        ("v must have k's rows", {"v": torch.zeros(2, 2, 2, 16)}),
        ("q and positions go with a rotary", {"q": torch.zeros(2, 1, 4, 16)}),
        ("rotary must be a strobe.Rotary", {"rotary": (1, 2)}),
        ("rotary.sin must have shape", {"rotary": strobe.Rotary(torch.zeros(8, 4), torch.zeros(8, 5))}),
        ("rotary.cos must have at most 8 columns", {"rotary": strobe.Rotary(torch.zeros(8, 9), torch.zeros(8, 9))}),
    ],
)
def test_what_is_not_taken_is_refused_by_name(says, changes):
    cache = strobe.Cache(torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16), ints(0, 0))
    call = {"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16), **changes}
    with pytest.raises((TypeError, ValueError), match=says):
        strobe.append(cache, **call)
