"""Attention over a cache through the public door, on a CPU and on a GPU, against the specification."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from requests_at_random import Drawn, check, draw, right

import strobe
from strobe.call import cached_calls, dispatch, launches
from strobe.cpu import cached as cpu
from strobe.device import KNOWN, arch_of

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
GPU = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(40))
def test_on_a_cpu(seed):
    dtype = DTYPES[seed % 4]
    call = draw(seed, dtype)
    check(strobe.decode(call.q, call.cache, return_lse=True, **call.keywords), right(call), dtype)


@pytest.mark.parametrize("copied", [1, 700])
def test_keys_that_are_copied_in_blocks(copied, monkeypatch):
    """Of one key each, and of some."""
    monkeypatch.setattr(cpu, "COPIED", copied)
    for seed in range(24):
        dtype = DTYPES[seed % 4]
        call = draw(seed, dtype)
        check(strobe.decode(call.q, call.cache, return_lse=True, **call.keywords), right(call), dtype)


def test_without_an_lse_and_into_a_tensor():
    call = draw(3, torch.float32, ragged=False)
    wanted, _ = right(call)
    out = torch.full_like(wanted, torch.nan, dtype=torch.float32)
    assert strobe.decode(call.q, call.cache, out=out, **call.keywords) is out
    check((out,), (wanted,), torch.float32)
    check((strobe.decode(call.q, call.cache, **call.keywords),), (wanted,), torch.float32)


def test_prefill_is_decode_token_by_token():
    """Queries that come together see what each sees alone."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 16, generator=g) for heads in (4, 2, 2))
    cache = strobe.Cache(k, v, torch.tensor([9, 9], dtype=torch.int32))
    together = strobe.decode(q, cache)
    for t in range(9):
        so_far = strobe.Cache(k, v, torch.tensor([t + 1] * 2, dtype=torch.int32))
        torch.testing.assert_close(strobe.decode(q[:, t : t + 1], so_far), together[:, t : t + 1])
    torch.testing.assert_close(together, strobe.attention(q, k, v, mask=strobe.Causal()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 8, 40])
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_nan_is_not_lost(dtype, length, of):
    """A request whose last key or value is NaN, or its query, has no number for a result; the other one has its own bits."""
    g = torch.Generator().manual_seed(6)
    tensors = {"q": torch.randn(2, 1, 4, 16, generator=g), "k": torch.randn(2, 40, 2, 16, generator=g)}
    tensors = {name: x.to(dtype) for name, x in {**tensors, "v": torch.randn(2, 40, 2, 16, generator=g)}.items()}
    lengths = torch.tensor([length, length], dtype=torch.int32)

    def decoded() -> tuple[torch.Tensor, torch.Tensor]:
        return strobe.decode(tensors["q"], strobe.Cache(tensors["k"], tensors["v"], lengths), return_lse=True)

    clean = decoded()
    tensors[of][0, 0 if of == "q" else length - 1] = torch.nan
    out, lse = decoded()
    assert out[0].isnan().all() and lse[0].isnan().all() == (of != "v")
    assert torch.equal(out[1], clean[0][1]) and torch.equal(lse[1], clean[1][1])


@pytest.mark.parametrize("scale", [-3.0, 0.0])
def test_scales_that_are_not_positive(scale):
    g = torch.Generator().manual_seed(8)
    q, k, v = (8 * torch.randn(1, n, 2, 64, generator=g) for n in (2, 60, 60))
    cache = strobe.Cache(k, v, torch.tensor([60], dtype=torch.int32))
    wanted = strobe.decode(q.double(), replace(cache, k=k.double(), v=v.double()), scale=scale, return_lse=True)
    found = strobe.decode(q, cache, scale=scale, return_lse=True)
    check(found, wanted, torch.float32)
    s = scale * torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    s = s.masked_fill(~torch.ones(2, 60, dtype=torch.bool).tril(58), -torch.inf)
    check((torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v.double()), s.logsumexp(-1)), wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["plain", "softcap", "alibi"])
def test_bits_that_do_not_depend_on_the_batch(dtype, score):
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(3, n, heads, 64, generator=g).to(dtype) for n, heads in ((5, 8), (300, 2), (300, 2)))
    slopes = torch.rand(8, generator=g)
    scores = {"plain": strobe.Score(), "softcap": strobe.Score(softcap=20.0), "alibi": strobe.Score(alibi=slopes)}
    options = {"deterministic": True, "return_lse": True, "score": scores[score]}
    together = strobe.decode(q, strobe.Cache(k, v, torch.tensor([300, 7, 120], dtype=torch.int32)), **options)
    for b, length in enumerate((300, 7, 120)):
        for i in range(5):
            so_far = torch.tensor([length - 4 + i], dtype=torch.int32)
            alone = strobe.decode(q[b : b + 1, i : i + 1], strobe.Cache(k[b : b + 1], v[b : b + 1], so_far), **options)
            assert torch.equal(alone[0][0, 0], together[0][b, i]) and torch.equal(alone[1][0, :, 0], together[1][b, :, i])


def test_the_operator_is_known_to_the_compiler():
    call = draw(5, torch.float32, ragged=False, tree=False)
    torch.library.opcheck(torch.ops.strobe.merge, (torch.randn(3, 2, 4, 2, 8), torch.randn(3, 2, 2, 4)))
    decode = torch.compile(lambda q: strobe.decode(q, call.cache, **call.keywords), fullgraph=True, backend="aot_eager")
    check((decode(call.q),), right(call)[:1], torch.float32)


def test_values_that_are_columns_of_keys():
    """The latent of multi-head latent attention: 576 columns of keys, the first 512 of which are the values."""
    g = torch.Generator().manual_seed(1)
    q, latent = torch.randn(2, 1, 16, 576, generator=g), torch.randn(6, 16, 1, 576, generator=g)
    lengths, table = torch.tensor([40, 17], dtype=torch.int32), torch.tensor([[3, 0, 5], [1, 2, -7]], dtype=torch.int32)
    found = strobe.decode(q, strobe.Cache(latent, None, lengths, table, head_dim_v=512))
    wanted = strobe.decode(q, strobe.Cache(latent, latent[..., :512].contiguous(), lengths, table))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["", "head", "request", "key"])
def test_caches_of_8_bits(kind):
    g = torch.Generator().manual_seed(2)
    shape = {"": (), "head": (2,), "request": (3, 2), "key": (8, 16, 2)}[kind]
    k, v = (torch.randn(8, 16, 2, 64, generator=g).to(torch.float8_e4m3fn) for _ in range(2))
    scales = [torch.rand(shape, generator=g) + 0.5 for _ in range(2)]
    full = [s if s.dim() < 3 else s[..., None] for s in scales]
    table, lengths = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32), torch.tensor([30, 1, 16], dtype=torch.int32)
    q = torch.randn(3, 1, 4, 64, generator=g)
    found = strobe.decode(q, strobe.Cache(k, v, lengths, table, k_scale=scales[0], v_scale=scales[1]))
    if kind == "request":
        wide = [torch.zeros(8, 16, 2, 64) for _ in range(2)]
        for b in range(3):
            for x, w, s in zip((k, v), wide, scales, strict=True):
                w[table[b]] = x[table[b]].float() * s[b][:, None]
    else:
        wide = [x.float() * (s[:, None] if kind == "head" else s) for x, s in zip((k, v), full, strict=True)]
    torch.testing.assert_close(found, strobe.decode(q, strobe.Cache(*wide, lengths, table)))


def test_explain_and_supports_answer(capsys):
    call = draw(4, torch.bfloat16)
    explanation = strobe.explain(call.q, call.cache, **call.keywords)
    assert (
        explanation.chosen == "cached_cpu" and "decode: needs a GPU" in str(explanation) and "decode" in capsys.readouterr().out
    )
    reasons = ["sm90_cache: needs a Hopper GPU (sm_90), not CPU", "decode: needs a GPU"]
    assert strobe.supports(call.q, call.cache, **call.keywords) == (True, reasons)
    assert strobe.supports(call.q, call.cache, backend="decode", **call.keywords)[0] is False
    assert strobe.supports(call.q, call.cache, scale="large")[0] is False


def cache_of(**changes) -> strobe.Cache:
    tensors = {"k": torch.zeros(4, 8, 2, 16), "v": torch.zeros(4, 8, 2, 16), "lengths": torch.tensor([8, 3], dtype=torch.int32)}
    return strobe.Cache(**{**tensors, **changes})


def ints(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


REFUSED = {
    "cache must be a strobe.Cache": {"cache": 3},
    "cache.k must have shape": {"cache": cache_of(k=torch.zeros(4, 8, 16), v=torch.zeros(4, 8, 16))},
    "cache.v must have cache.k's dtype": {"cache": cache_of(v=torch.zeros(4, 8, 2, 16).half())},
    "cache.v must have cache.k's shape": {"cache": cache_of(v=torch.zeros(4, 8, 1, 16))},
    "cache.lengths must be int32": {"cache": cache_of(lengths=torch.tensor([8, 3]))},
    "cache.index goes with a contiguous cache": {"cache": cache_of(page_table=ints([0], [1]), index=ints(0, 1))},
    "cache.page_table must have shape": {"cache": cache_of(page_table=ints([0], [1], [2]))},
    "cache.k_scale goes with a cache of 8 bits": {"cache": cache_of(k_scale=torch.ones(()))},
    "head_dim_v must be": {"cache": cache_of(v=None)},
    "mask must be Full, Causal or Window": {"mask": strobe.Prefix(3)},
    "score must be softcap": {"score": strobe.Score(bias=torch.zeros(1, 1, 1, 1))},
    "q must have shape": {"q": torch.zeros(3, 1, 4, 16)},
    "cache.k must have q's dtype": {"q": torch.zeros(2, 1, 4, 16).half()},
    "cache.k must have q's head dim": {"q": torch.zeros(2, 1, 4, 24)},
    "q's heads must be a multiple": {"q": torch.zeros(2, 1, 3, 16)},
    "must not require a gradient": {"q": torch.zeros(2, 1, 4, 16, requires_grad=True)},
    "max_seqlen_q goes with cu_seqlens_q": {"max_seqlen_q": 1},
    "cu_seqlens_q must be contiguous with shape": {"q": torch.zeros(2, 4, 16), "cu_seqlens_q": ints(0, 1)},
    "tree must be bool": {"tree": torch.zeros(1, 1)},
    "tree must have shape": {"tree": torch.zeros(2, 3, dtype=torch.bool)},
    "out must have shape": {"out": torch.zeros(2, 1, 4, 8)},
    "backend must be one of": {"backend": "sm90"},
    r"lengths \(cache_seqlens\) must be from 0 to the 8": {"cache": cache_of(lengths=ints(9, 3))},
    r"page_table \(block_table\) must name one of 4 pages": {"cache": cache_of(page_table=ints([0], [4]))},
    r"leftpad \(cache_leftpad\) must be from 0 to the length": {"cache": cache_of(leftpad=ints(0, 4))},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_taken_is_refused_by_name(says):
    call = {"q": torch.zeros(2, 1, 4, 16), "cache": cache_of(), **REFUSED[says]}
    with pytest.raises((TypeError, ValueError), match=says):
        strobe.decode(**call)


# ---- on a GPU


@GPU
@pytest.mark.parametrize("heads", [16, 128])
def test_values_that_are_columns_of_keys_on_a_gpu(heads):
    g = torch.Generator().manual_seed(1)
    q, latent = (torch.randn(shape, generator=g).bfloat16().cuda() for shape in ((2, 1, heads, 576), (90, 64, 1, 576)))
    lengths, table = torch.tensor([5000, 17], dtype=torch.int32), torch.randperm(90, generator=g)[:80].view(1, 80).expand(2, 80)
    cache = strobe.Cache(latent, None, lengths.cuda(), table.int().contiguous().cuda(), head_dim_v=512)
    call = Drawn(q, cache, {})
    check(strobe.decode(q, cache, return_lse=True), right(call), torch.bfloat16)


@GPU
@pytest.mark.parametrize("kind", ["head", "key"])
def test_caches_of_8_bits_on_a_gpu(kind):
    call = draw(6, torch.bfloat16, head_dim=128, head_dim_v=128, page=16, heads_kv=2, device="cuda")
    k, v = (x.nan_to_num(nan=448.0).to(torch.float8_e4m3fn) for x in (call.cache.k, call.cache.v))
    scales = [torch.rand((2,) if kind == "head" else k.shape[:3], device="cuda") + 0.5 for _ in range(2)]
    cache = strobe.Cache(k, v, call.cache.lengths, call.cache.page_table, k_scale=scales[0], v_scale=scales[1],
                         leftpad=call.cache.leftpad)  # fmt: skip
    call = call._replace(cache=cache)
    check(strobe.decode(call.q, cache, return_lse=True, **call.keywords), right(call), torch.bfloat16)


def check_each_time(call, dtype: torch.dtype) -> None:
    """Check what a call gives, and that it gives the same bits again."""
    found = strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    check(found, right(call), dtype)
    for _ in range(3):
        assert torch.equal(strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)[0], found[0])


@GPU
@pytest.mark.parametrize("seed", range(24))
def test_33_to_128_rows_over_caches_of_8_bits_on_a_gpu(seed):
    """Which Hopper converts to 16 bits for wgmma, unless each key has a scale. NaN and infinities lie where nobody has a key,
    and many queries in bfloat16 are beyond float16, or far below it. The same call has the same bits."""
    page, kind = [16, 64, None][seed % 3], (torch.float8_e4m3fn, torch.float8_e5m2)[seed // 3 % 2]
    dtype, (n_q, group) = DTYPES[2 + seed // 6 % 2], [(8, 8), (16, 8), (9, 4), (12, 7)][(seed + seed // 12 * 2) % 4]
    call = draw(seed, dtype, honest=seed % 4 > 0, device="cuda", heads_kv=2, n_q=n_q, group=group, page=page, batch=4,
                head_dim=(128, 80)[seed // 8 % 2], head_dim_v=128, room=3000)  # fmt: skip
    k, v = call.cache.k, call.cache.v
    for x in (k, v):
        x[..., ::2] = x[..., ::2].nan_to_num(nan=torch.inf)
    shape = [None, (2,), (4, 2), k.shape[:3]][(seed // 3 + seed // 12) % 4]
    scales = [None if shape is None else torch.rand(shape, device="cuda") + 0.5 for _ in range(2)]
    cache = replace(call.cache, k=k.to(kind), v=v.to(kind), k_scale=scales[0], v_scale=scales[1])
    call = call._replace(cache=cache)
    if dtype == torch.bfloat16 and seed // 2 % 3 and not call.keywords["score"].softcap:
        power = (20.0, -30.0)[seed % 2]
        call = call._replace(q=call.q * 2.0**power, keywords={**call.keywords, "scale": 2.0 ** (-3.5 - power)})
    check_each_time(call, dtype)


@GPU
@pytest.mark.parametrize("seed", range(18))
def test_up_to_32_rows_over_few_keys_of_8_bits_on_a_gpu(seed):
    """Whose key heads are shared evenly on Hopper, by CTAs or by clusters. The same call has the same bits."""
    n_q, group = [(4, 8), (1, 8), (2, 7), (3, 8), (4, 4), (1, 4)][seed % 6]
    batch, heads_kv, room = [(1, 2, 1000), (8, 2, 1000), (8, 4, 1000), (1, 8, 2000), (8, 2, 2000), (3, 8, 700),
                             (1, 8, 9000)][seed % 7]  # fmt: skip
    page, dtype = [64, 16, None, 128, 1][seed % 5], DTYPES[2 + seed % 2]
    call = draw(seed, dtype, honest=seed % 4 > 0, device="cuda", ragged=False, batch=batch, heads_kv=heads_kv, n_q=n_q,
                group=group, page=page, head_dim=128, head_dim_v=128, room=room)  # fmt: skip
    kind = (torch.float8_e4m3fn, torch.float8_e5m2)[seed // 3 % 2]
    cache = replace(call.cache, k=call.cache.k.to(kind), v=call.cache.v.to(kind))
    call = call._replace(cache=cache)
    check_each_time(call, dtype)


@GPU
@pytest.mark.parametrize("seed", range(60))
def test_on_a_gpu(seed):
    dtype = DTYPES[2 + seed % 2]
    call = draw(seed, dtype, honest=seed % 3 > 0, device="cuda", deterministic=seed % 5 == 0)
    found = strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    for _ in range(2):  # prepared, and with counters that the call before has left
        again = strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    check(found, right(call), dtype)
    assert torch.equal(found[0], again[0])


@GPU
def test_batches_of_many_looks_take_no_more_memory_than_one():
    """As a server's do, in each step. Parts of results take 17 MB on an H200, and all of them share it."""
    q, (k, v) = torch.randn(64, 16, 128, device="cuda").bfloat16(), torch.randn(2, 32, 64, 2, 128, device="cuda").bfloat16()
    table, lengths = (torch.arange(32, device="cuda").int().view(4, 8), torch.full((4,), 500, device="cuda").int())

    def step(rows: int) -> None:
        cu = torch.tensor([0, 1, 2, rows - 16, rows], dtype=torch.int32, device="cuda")
        strobe.decode(q[:rows], strobe.Cache(k, v, lengths, table), cu_seqlens_q=cu, max_seqlen_q=48)

    for rows in (64, 63):
        step(rows)
    before = torch.cuda.memory_allocated()
    for rows in range(20, 60):
        step(rows)
    assert torch.cuda.memory_allocated() - before < 8e6


@GPU
@pytest.mark.parametrize("seed", range(12))
def test_17_to_64_rows_on_a_gpu(seed):
    """Which Hopper gives to one group of wgmma, in many parts; the same call has the same bits."""
    n_q, group = [(4, 8), (3, 7), (16, 4), (5, 8)][seed % 4]
    page = [16, 64, 256, None, 48, 1][seed % 6]
    call = draw(seed, torch.bfloat16, honest=seed % 3 > 0, device="cuda", n_q=n_q, group=group, page=page, room=3000, batch=3,
                head_dim=(128, 80)[seed % 2], head_dim_v=128)  # fmt: skip
    found = strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    check(found, right(call), torch.bfloat16)
    for _ in range(5):
        assert torch.equal(strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)[0], found[0])


@GPU
@pytest.mark.parametrize("seed", range(18))
def test_one_request_on_a_gpu(seed):
    """Whose key heads are shared evenly on Hopper, in clusters where keys are few; the same call has the same bits."""
    n_q, group = [(1, 8), (1, 4), (2, 4), (1, 1), (3, 2), (4, 8), (1, 16)][seed % 7]
    page, dim, room = [None, 16, 64, 128, 1, 48][seed % 6], (80, 96, 128)[seed % 3], (64, 700, 2900, 9000)[seed // 2 % 4]
    call = draw(seed, DTYPES[2 + seed % 2], honest=seed % 3 > 0, device="cuda", ragged=False, batch=1, heads_kv=1 + seed % 8,
                n_q=n_q, group=group, page=page, head_dim=dim, head_dim_v=dim, room=room)  # fmt: skip
    found = strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    check(found, right(call), DTYPES[2 + seed % 2])
    for _ in range(5):
        assert torch.equal(strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)[0], found[0])


@GPU
@pytest.mark.parametrize("seed", range(30))
def test_other_head_dims_on_a_gpu(seed):
    """129 to 256 columns, and up to 64: of few rows and many, few keys and many, of 8 bits; the same call has the same bits."""
    n_q, group = [(1, 8), (16, 8), (4, 8), (12, 7), (1, 2), (8, 8)][seed % 6]
    batch, room = [(1, 900), (4, 2900), (36, 2100), (1, 9000), (9, 700)][seed // 2 % 5]
    page, dim = [None, 64, 16, 128, 1, 48, 32][seed % 7], (256, 64, 192, 136, 40)[seed % 5]
    dtype = DTYPES[2 + seed % 2]
    call = draw(seed, dtype, honest=seed % 3 > 0, device="cuda", batch=batch, heads_kv=2, n_q=n_q, group=group, page=page,
                head_dim=dim, head_dim_v=dim, room=room)  # fmt: skip
    if seed // 5 % 3 == 2 and dim % 16 == 0:  # others are not aligned to 16 bytes
        k, v = (x.nan_to_num(nan=448.0).to(torch.float8_e4m3fn) for x in (call.cache.k, call.cache.v))
        call = call._replace(cache=replace(call.cache, k=k, v=v))
    check_each_time(call, dtype)


def nearly_equal(seed: int, device: str, smaller: int = 1) -> Drawn:
    """Requests whose lengths differ by a twelfth at most, so many times smaller."""
    rnd = random.Random(seed)
    n_q, group = [(16, 8), (1, 8), (4, 8), (8, 8), (12, 7)][seed % 5]
    batch, length = [(1, 3000), (4, 5000), (9, 1100), (40, 700), (2, 9000), (20, 300)][seed % 6]
    lengths = [length // smaller - rnd.randrange(length // smaller // 12) for _ in range(batch)]
    dim = (128, 64, 256)[seed // 3 % 3]
    return draw(seed, DTYPES[2 + seed % 2], device=device, batch=batch, heads_kv=(8, 2)[seed % 2], n_q=n_q, group=group,
                page=(64, 16, None)[seed // 2 % 3], head_dim=dim, head_dim_v=dim, lengths=lengths,
                room=2 * length, mask=(None, strobe.Window(500, 0))[seed // 4 % 2], ragged=seed % 4 == 1,
                deterministic=seed % 8 == 7)  # fmt: skip


@GPU
@pytest.mark.parametrize("seed", range(24))
def test_nearly_equal_lengths_on_a_gpu(seed):
    """No powers of two, packed with some that have fewer queries, behind windows, too; the same call has the same bits."""
    check_each_time(nearly_equal(seed, "cuda"), DTYPES[2 + seed % 2])


@pytest.mark.parametrize("seed", range(6))
def test_nearly_equal_lengths(seed):
    """Those, smaller, on a CPU."""
    check_each_time(nearly_equal(seed, "cpu", 16), DTYPES[2 + seed % 2])


@GPU
@pytest.mark.parametrize("seed", range(20))
def test_few_rows_of_several_requests_on_a_gpu(seed):
    """Each of whose key heads has CTAs of its own on Hopper: a cluster, several, or one; the same call has the same bits."""
    n_q, group = [(1, 8), (1, 4), (2, 4), (1, 7)][seed % 4]
    batch, heads_kv, room = [(2, 2, 900), (3, 4, 1000), (4, 4, 2900), (8, 4, 700), (30, 2, 1000), (40, 3, 900),
                             (70, 4, 500)][seed % 7]  # fmt: skip
    page, dim = [None, 64, 16, 128, 1, 48][seed % 6], (128, 96, 80)[seed % 3]
    call = draw(seed, DTYPES[2 + seed % 2], honest=seed % 3 > 0, device="cuda", ragged=False, batch=batch, heads_kv=heads_kv,
                n_q=n_q, group=group, page=page, head_dim=dim, head_dim_v=dim, room=room)  # fmt: skip
    found = strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    check(found, right(call), DTYPES[2 + seed % 2])
    for _ in range(5):
        assert torch.equal(strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)[0], found[0])


@GPU
@pytest.mark.parametrize("batch", [1, 3])
def test_a_graph_is_replayed_with_other_lengths_pages_and_queries(batch):
    same = {"page": 16, "ragged": False, "room": 257, "leftpad": False, "batch": batch}
    if batch == 1:  # a cluster for each key head on Hopper
        same |= {"head_dim": 128, "head_dim_v": 128, "group": 8, "n_q": 1}
    call = draw(11, torch.bfloat16, device="cuda", **same)
    same |= {"head_dim": call.q.shape[-1], "head_dim_v": call.cache.v.shape[-1], "heads_kv": call.cache.k.shape[2],
             "group": call.q.shape[2] // call.cache.k.shape[2], "n_q": call.q.shape[1]}  # fmt: skip
    other = draw(12, torch.bfloat16, device="cuda", **same)
    strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
    for source in (other, call, other):
        for name in ("k", "v", "lengths", "page_table"):
            getattr(call.cache, name).copy_(getattr(source.cache, name).clone())
        call.q.copy_(source.q.clone())
        wanted = right(call)
        graph.replay()
        check(found, wanted, torch.bfloat16)


@GPU
def test_the_bits_of_a_request_do_not_depend_on_the_others():
    call = draw(21, torch.bfloat16, device="cuda", page=16, ragged=False, room=5000, lengths=[4999, 3000, 17, 1], batch=4,
                n_q=4, mask=strobe.Causal(), tree=False, head_dim=128, head_dim_v=128, group=4, heads_kv=2,
                leftpad=False)  # fmt: skip
    together = strobe.decode(call.q, call.cache, **{**call.keywords, "deterministic": True})
    for b in range(4):
        alone = strobe.Cache(call.cache.k, call.cache.v, call.cache.lengths[b : b + 1], call.cache.page_table[b : b + 1])
        one = strobe.decode(call.q[b : b + 1], alone, **{**call.keywords, "deterministic": True})
        assert torch.equal(one, together[b : b + 1])
        last = strobe.decode(call.q[b : b + 1, 3:], alone, **{**call.keywords, "deterministic": True})
        assert torch.equal(last, together[b : b + 1, 3:])


@GPU
@pytest.mark.parametrize(("dtype", "page"), [(torch.bfloat16, 64), (torch.float16, 16)])
@pytest.mark.parametrize("far", [False, True])
def test_bits_of_splits_whose_references_move_late(dtype, page, far, monkeypatch):
    """As an H200 counts exponents, of a batch by the optimistic softmax, of fewer requests or queries without it; far: of some
    queries and keys, so that pieces are taken again."""
    known = arch_of(torch.device("cuda"))
    if known.capability != 90:
        pytest.skip("Hopper's kernels")
    for module in (cached_calls, dispatch, launches):
        monkeypatch.setattr(module, "arch_of", lambda device: replace(known, dram_bandwidth=KNOWN["H200"].dram_bandwidth))
    batch, room, g = 8, 8192, torch.Generator("cuda").manual_seed(5)
    k, v = (torch.randn(batch * room // page, page, 8, 128, generator=g, device="cuda").to(dtype) for _ in range(2))
    q = torch.randn(batch, 16, 64, 128, generator=g, device="cuda").to(dtype)
    if far:
        q[:, ::3] *= 30
        k[::7] *= 6
    table = torch.randperm(len(k), generator=g, device="cuda").int().view(batch, -1)
    lengths = torch.tensor([8192, 5801, 8192, 7001, 8190, 6144, 8000, 5000], dtype=torch.int32, device="cuda")

    def found(q, requests, lengths):
        return strobe.decode(q, strobe.Cache(k, v, lengths, table[requests]), deterministic=True)

    together = found(q, slice(None), lengths)
    assert torch.equal(found(q[:, 12:], slice(None), lengths), together[:, 12:])
    for b in (0, 3, 7):
        one = slice(b, b + 1)
        assert torch.equal(found(q[one], one, lengths[one]), together[one])
        assert torch.equal(found(q[one, 12:], one, lengths[one]), together[one, 12:])
        assert torch.equal(found(q[one, 7:8], one, lengths[one] - 8), together[one, 7:8])
        check((together[one],), right(Drawn(q[one], strobe.Cache(k, v, lengths[one], table[one]), {})), dtype)


A_PAGE_THAT_IS_NONE = """
import torch, strobe
q, pages = (torch.ones(*shape, 2, 64, dtype=torch.bfloat16, device="cuda") for shape in ((1, 1), (4, 16)))
lengths, table = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([40], [[3, 4, 1]]))
out = strobe.decode(q, strobe.Cache(pages, pages, lengths, table))
torch.cuda.synchronize()
print("ran", bool((out == 1).all()))
"""


NO_ROOM = """
import torch, strobe
new, full = (torch.full((1, n, 2, 64), n, dtype=torch.bfloat16, device="cuda") for n in (1, 4))
for _ in range(2):  # by a launch that is prepared, if nobody asks
    cache, _ = strobe.append(strobe.Cache(full, full, torch.tensor([4], dtype=torch.int32, device="cuda")), new, new)
torch.cuda.synchronize()
print("ran", bool((full == 4).all() and cache.lengths.tolist() == [4]))
"""


@GPU
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (A_PAGE_THAT_IS_NONE, "page_table (block_table) must name one of 4 pages for all keys of its request"),
        (NO_ROOM, "lengths (cache_seqlens) must leave room for the keys that are appended"),
    ],
)
def test_lies_are_told_with_the_debug_switch_and_harmless_without(program, says, monkeypatch):
    def run(debug: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "STROBE_DEBUG": debug}
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)

    assert "ran True" in run("0").stdout
    told = run("1")
    assert told.returncode != 0 and says in told.stderr
    monkeypatch.setenv("STROBE_DEBUG", "1")
    call = draw(4, torch.bfloat16, device="cuda")
    check(strobe.decode(call.q, call.cache, return_lse=True, **call.keywords), right(call), torch.bfloat16)
