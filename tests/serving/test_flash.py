"""flash-attn's functions over a cache, as flash-attn, FlashAttention-3 and vLLM call them."""

import inspect

import pytest
import torch

import strobe
from strobe.reference.cached import rotated

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ints(*numbers, device="cpu") -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def test_the_signature_is_flash_attns():
    names = list(inspect.signature(strobe.flash_attn_with_kvcache).parameters)
    wanted = """q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table
        softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"""
    assert names[:19] == wanted.split()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_turned_appended_and_seen(device, causal, paged):
    g = torch.Generator().manual_seed(0)
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    k_cache, v_cache = normal(2, 32, 2, 64), normal(2, 32, 2, 64)
    q, k, v = normal(2, 3, 4, 64), normal(2, 3, 2, 64), normal(2, 3, 2, 64)
    cos, sin = (torch.randn(40, 32, generator=g).to(dtype) for _ in range(2))
    lengths = [9, 20]
    wanted_q, wanted_k, wanted_v = q.clone(), k_cache.clone(), v_cache.clone()
    for b, n in enumerate(lengths):
        at = torch.arange(n, n + 3)
        wanted_q[b] = rotated(q[b], at if causal else torch.full_like(at, n), cos, sin, True)
        wanted_k[b, n : n + 3], wanted_v[b, n : n + 3] = rotated(k[b], at, cos, sin, True), v[b]
    mask = strobe.Causal() if causal else strobe.Full()
    wanted, lse = strobe.decode(wanted_q, strobe.Cache(wanted_k, wanted_v, ints(12, 23)), mask=mask, return_lse=True)
    table = None
    if paged:
        table = torch.randperm(8, generator=g).view(2, 4).int()
        pages = [torch.empty(8, 8, 2, 64, dtype=dtype) for _ in range(2)]
        for of, x in zip(pages, (k_cache, v_cache), strict=True):
            of[table.view(-1).long()] = x.view(8, 8, 2, 64)
        k_cache, v_cache = pages
    k_cache, v_cache, q, k, v, cos, sin = (x.to(device) for x in (k_cache, v_cache, q, k, v, cos, sin))
    found = strobe.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, ints(*lengths, device=device), causal=causal, return_softmax_lse=True,
        block_table=None if table is None else table.to(device),
    )  # fmt: skip
    torch.testing.assert_close(found[0].cpu(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(found[1].cpu(), lse.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("device", DEVICES)
def test_as_vllm_calls_it(device):
    g = torch.Generator().manual_seed(1)
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    k, v = (torch.randn(9, 16, 2, 64, generator=g).to(dtype) for _ in range(2))
    q, sinks = torch.randn(7, 4, 64, generator=g).to(dtype), torch.randn(4, generator=g)
    table, used, cu = ints([3, 1, 8], [0, -1, 99]), ints(40, 5), ints(0, 5, 6)
    wanted, lse = strobe.decode(
        q, strobe.Cache(k, v, used, table), mask=strobe.Window(20, 0), score=strobe.Score(sinks=sinks), cu_seqlens_q=cu,
        max_seqlen_q=5, return_lse=True,
    )  # fmt: skip
    out = torch.full_like(q, 7.0).to(device)
    given = {"cu_seqlens_q": cu, "seqused_k": used, "block_table": table, "s_aux": sinks}
    there = {name: x.to(device) for name, x in given.items()}
    found = strobe.flash_attn_varlen_func(
        q=q.to(device), k=k.to(device), v=v.to(device), out=out, max_seqlen_q=5, max_seqlen_k=40, softmax_scale=64**-0.5,
        causal=True, window_size=[20, 0], alibi_slopes=None, softcap=0, return_softmax_lse=True, scheduler_metadata=None,
        fa_version=3, num_splits=0, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, **there,
        **{f"{name}_descale": torch.tensor(7.0, device=device).expand(2, 2) for name in "qkv"},  # of 16 bits: nothing
    )  # fmt: skip
    assert found[0] is out and out[6:].eq(7.0).all()
    torch.testing.assert_close(out[:6].cpu(), wanted[:6], rtol=bound, atol=bound)
    torch.testing.assert_close(found[1][:, :6].cpu(), lse[:, :6].float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("device", DEVICES)
def test_as_sglang_calls_it(device):
    """With bounds of keys, though none are appended."""
    g = torch.Generator().manual_seed(4)
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    k, v = (torch.randn(20, 1, 2, 64, generator=g).to(dtype) for _ in range(2))
    q, sinks = torch.randn(4, 4, 64, generator=g).to(dtype), torch.randn(4, generator=g)
    table, used, cu = torch.randperm(20, generator=g).int().view(2, 10), ints(9, 4), ints(0, 3, 4)
    wanted, lse = strobe.decode(
        q, strobe.Cache(k, v, used, table), score=strobe.Score(sinks=sinks), cu_seqlens_q=cu, max_seqlen_q=3, return_lse=True
    )
    given = {"page_table": table, "cache_seqlens": used, "cu_seqlens_q": cu, "cu_seqlens_k_new": ints(0, 9, 13), "sinks": sinks}
    there = {name: x.to(device) for name, x in given.items()}
    descale = torch.tensor(7.0, device=device).expand(2, 2)
    out, sums, *_ = strobe.flash_attn_with_kvcache(
        q=q.to(device), k_cache=k.to(device), v_cache=v.to(device), max_seqlen_q=3, softmax_scale=64**-0.5, causal=True,
        window_size=(-1, -1), softcap=0.0, k_descale=descale, v_descale=descale, return_softmax_lse=True, num_splits=0, ver=3,
        fa_version=3, attention_chunk=None, **there,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(sums.cpu(), lse.float(), rtol=bound, atol=bound)


def test_keys_that_are_spread_over_gpus():
    """Key t is on GPU t % 3; one has none of the second sequence."""
    g = torch.Generator().manual_seed(3)
    k, v = (torch.randn(2, 20, 2, 16, generator=g) for _ in range(2))
    q, lengths = torch.randn(2, 4, 16, generator=g), (20, 2)
    wanted = strobe.decode(q[:, None], strobe.Cache(k, v, ints(*lengths)), return_lse=True)
    parts = []
    for rank in range(3):
        pages = [torch.zeros(4, 4, 2, 16) for _ in range(2)]
        for b in range(2):
            for of, x in zip(pages, (k, v), strict=True):
                mine = x[b, rank : lengths[b] : 3]
                of.view(2, 8, 2, 16)[b, : len(mine)] = mine
        used = ints(*[len(range(rank, n, 3)) for n in lengths])
        found = strobe.flash_attn_varlen_func(
            q, *pages, ints(0, 1, 2), block_table=ints([0, 1], [2, 3]), seqused_k=used, max_seqlen_q=1, max_seqlen_k=8,
            causal=True, return_softmax_lse=True, cp_world_size=3, cp_rank=rank, cp_tot_seqused_k=ints(*lengths),
        )  # fmt: skip
        parts.append(found[:2])
    out, lse = strobe.merge(*zip(*parts, strict=True))
    torch.testing.assert_close(out, wanted[0][:, 0])
    torch.testing.assert_close(lse, wanted[1][..., 0].T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_several_queries_over_keys_that_are_spread(device, world):
    """Sequences of as many queries as keys, of more queries than a GPU has keys, of none, and of one query."""
    g = torch.Generator().manual_seed(world)
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    lengths = 40, 6, 3, 0, 17
    k, v = (torch.randn(5, 40, 2, 64, generator=g).to(dtype) for _ in range(2))
    q, cu = torch.randn(13, 4, 64, generator=g).to(dtype), ints(0, 4, 10, 12, 12, 13)
    wanted = strobe.decode(q, strobe.Cache(k, v, ints(*lengths)), cu_seqlens_q=cu, max_seqlen_q=6, return_lse=True)
    parts = []
    for rank in range(world):
        pages = [torch.full((15, 16, 2, 64), torch.nan, dtype=dtype) for _ in range(2)]
        for b, n in enumerate(lengths):
            for of, x in zip(pages, (k, v), strict=True):
                mine = x[b, rank:n:world]
                of.view(5, 48, 2, 64)[b, : len(mine)] = mine
        there = dict(
            cu_seqlens_q=cu, block_table=torch.arange(15, dtype=torch.int32).view(5, 3),
            seqused_k=ints(*[len(range(rank, n, world)) for n in lengths]), cp_tot_seqused_k=ints(*lengths),
        )  # fmt: skip
        found = strobe.flash_attn_varlen_func(
            q.to(device), *(x.to(device) for x in pages), max_seqlen_q=6, max_seqlen_k=48, causal=True, return_softmax_lse=True,
            cp_world_size=world, cp_rank=rank, **{name: x.to(device) for name, x in there.items()},
        )  # fmt: skip
        parts.append([x.cpu() for x in found[:2]])
    out, lse = strobe.merge(*zip(*parts, strict=True))
    assert len({tuple(part[1].isneginf().flatten().tolist()) for part in parts}) > 1 or world == 1  # some see none of a GPU's
    torch.testing.assert_close(out, wanted[0], rtol=bound, atol=bound)
    torch.testing.assert_close(lse, wanted[1].float(), rtol=bound, atol=bound)


def over_chunks(q, k, v, first: int, length: int, chunk: int, left, right) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request's queries, [n, heads, head_dim], in float64, and its LSE [heads, n]; keys count from `first`."""
    keys = torch.arange(len(k))
    position = length - len(q) + torch.arange(len(q))
    own = (position - first) // chunk == ((keys - first) // chunk)[:, None]
    seen = own.T & (keys >= first) & (keys < length)
    seen &= (keys >= position[:, None] - left) if left is not None else True
    seen &= (keys <= position[:, None] + right) if right is not None else True
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = (torch.einsum("ihd,jhd->hij", q.double(), k) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("chunk", "causal", "window"), [(8, True, (-1, -1)), (8, False, (5, 3)), (3, False, (-1, -1)), (99, True, (4, 0))]
)
def test_chunks(device, packed, paged, chunk, causal, window):
    """As FlashAttention-3's attention_chunk: chunks count from the first key that does."""
    g = torch.Generator().manual_seed(chunk)
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    lengths, queries, first = (16, 13, 2), ((5, 1, 3) if packed else (3, 3, 3)), ((0, 0, 0) if paged else (0, 3, 1))
    k, v = (torch.randn(3, 16, 2, 64, generator=g).to(dtype) for _ in range(2))
    q = [torch.randn(n, 4, 64, generator=g).to(dtype) for n in queries]
    left, right = (None if side < 0 else side for side in window)
    wanted = [
        over_chunks(q[b], k[b], v[b], first[b], lengths[b], chunk, left, 0 if causal else right) for b in range(len(lengths))
    ]
    nobodys = torch.ones(2, 4, 64, dtype=dtype)
    rows = torch.cat([*q, nobodys]) if packed else torch.stack(q)
    given = dict(cache_seqlens=ints(*lengths), cu_seqlens_q=ints(0, 5, 6, 9) if packed else None)
    if paged:  # a request's four pages lie backwards
        table = torch.arange(12, dtype=torch.int32).view(3, 4).flip(1)
        k, v = (x.view(3, 4, 4, 2, 64).flip(1).reshape(12, 4, 2, 64) for x in (k, v))
        given["block_table"] = table.contiguous()
    else:
        given["cache_leftpad"] = ints(*first)
    there = {name: x.to(device) for name, x in given.items() if x is not None}
    out, lse = strobe.flash_attn_with_kvcache(
        *(x.to(device) for x in (rows, k, v)), attention_chunk=chunk, causal=causal, window_size=window,
        return_softmax_lse=True, **there,
    )  # fmt: skip
    found, found_lse = (list(out), list(lse)) if not packed else (out.split((*queries, 2)), lse.split((*queries, 2), 1))
    if packed:
        assert found[3].eq(0).all() and found_lse[3].isneginf().all()
    for b, (of_request, of_lse) in enumerate(wanted):
        torch.testing.assert_close(found[b].cpu().double(), of_request, rtol=bound, atol=bound)
        torch.testing.assert_close(found_lse[b].cpu().double(), of_lse, rtol=bound, atol=bound)
    again = torch.full_like(out, torch.nan)
    assert strobe.flash_attn_with_kvcache(
        *(x.to(device) for x in (rows, k, v)), attention_chunk=chunk, causal=causal, window_size=window, out=again, **there
    ) is again  # fmt: skip
    assert torch.equal(again[:9], out[:9]) and again[9:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("appended", [False, True])
def test_queries_of_values_too(device, appended):
    """As multi-head latent attention is called: keys and values are columns of one tensor, and queries have a part for each."""
    dims = (512, 64) if device == "cuda" else (24, 16)
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    g = torch.Generator().manual_seed(4)
    latent, q = (torch.randn(*shape, sum(dims), generator=g).to(dtype) for shape in ((6, 16, 1), (2, 1, 4)))
    new, table, lengths = torch.randn(2, 1, 1, sum(dims), generator=g).to(dtype), ints([4, 1, 3], [0, 5, 2]), [20, 40]
    if appended:
        for b, n in enumerate(lengths):
            latent[table[b, n // 16], n % 16] = new[b, 0]
    full = [n + appended for n in lengths]
    wanted = strobe.decode(q, strobe.Cache(latent, latent[..., : dims[0]].contiguous(), ints(*full), table))
    if appended:
        for b, n in enumerate(lengths):
            latent[table[b, n // 16], n % 16] = 0.0
    latent, q, new, table = (x.to(device) for x in (latent, q, new, table))
    v_cache, k_cache = latent.split(dims, -1)
    (v, k), (qv, q_of_k) = new.split(dims, -1), q.split(dims, -1)
    found = strobe.flash_attn_with_kvcache(
        q_of_k, k_cache, v_cache, *((k, v) if appended else ()), cache_seqlens=ints(*lengths, device=device), block_table=table,
        causal=True, qv=qv,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), wanted, rtol=bound, atol=bound)
    pages = latent[:, :, 0]
    found = strobe.flash_attn_varlen_func(
        q_of_k[:, 0], pages[..., dims[0] :].unsqueeze(-2), pages[..., : dims[0]].unsqueeze(-2), ints(0, 1, 2, device=device),
        block_table=table, seqused_k=ints(*full, device=device), max_seqlen_q=1, causal=True, q_v=qv[:, 0],
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), wanted[:, 0], rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("says", "keywords"),
    [
        ("cp_rank must be from 0 to cp_world_size - 1, got 2 of 2", {"cp_rank": 2}),
        ("max_seqlen_q must be at least 1 with cp_world_size=2, got 0", {"max_seqlen_q": 0}),
        ("max_seqlen_q must be an int with cp_world_size, got NoneType", {"max_seqlen_q": None}),
        ("cp_tot_seqused_k must be a tensor, got NoneType", {"max_seqlen_q": 2, "causal": True}),
        (
            r"cp_tot_seqused_k must be contiguous with shape \[1\]",
            {"max_seqlen_q": 2, "causal": True, "cp_tot_seqused_k": ints(1, 1)},
        ),
        (
            r"cp_tot_seqused_k must be so many that 2 GPUs have them in turn and seqused_k are those of number 0, got \[3\]",
            {"max_seqlen_q": 2, "causal": True, "cp_tot_seqused_k": ints(3)},
        ),
        ("window_size is not taken", {"window_size": (3, 0)}),
        ("alibi_slopes is not taken", {"alibi_slopes": torch.ones(2)}),
        ("s_aux is not taken", {"s_aux": torch.ones(2)}),
    ],
)
def test_what_is_not_taken_of_keys_that_are_spread(says, keywords):
    q, pages = torch.zeros(1, 2, 16), torch.zeros(1, 8, 2, 16)
    given = dict(block_table=ints([0]), seqused_k=ints(1), cp_world_size=2, max_seqlen_q=1)
    with pytest.raises((TypeError, ValueError), match=says):
        strobe.flash_attn_varlen_func(q, pages, pages, ints(0, 1), **{**given, **keywords})


def test_lengths_may_be_an_int_or_left_out():
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, n, 2, 16, generator=g) for n in (1, 8, 8))
    five = strobe.flash_attn_with_kvcache(q, k, v, cache_seqlens=5)
    torch.testing.assert_close(five, strobe.attention(q, k[:, :5], v[:, :5]))
    torch.testing.assert_close(strobe.flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(5)[0]), five)
    torch.testing.assert_close(strobe.flash_attn_with_kvcache(q, k, v), strobe.attention(q, k, v))


@pytest.mark.parametrize("how", ["nothing appended", "16 bits", "8 bits"])
def test_queries_of_8_bits(how):
    """As FlashAttention-3 is called with a cache in e4m3: q_descale and k_descale together are one scale."""
    g = torch.Generator().manual_seed(5)

    def of_8_bits(*shape):
        return torch.randn(*shape, generator=g).to(torch.float8_e4m3fn)

    q, k, v, new = of_8_bits(2, 1, 4, 64), of_8_bits(4, 16, 2, 64), of_8_bits(4, 16, 2, 64), of_8_bits(2, 1, 2, 64)
    q_descale, k_descale, v_descale = (torch.rand(2, 2, generator=g) + 0.5 for _ in range(3))
    table, lengths, descales = ints([2, 1], [0, 3]), [20, 3], {"k_descale": k_descale, "v_descale": v_descale}
    wide_k, wide_v = torch.empty(2, 32, 2, 64), torch.empty(2, 32, 2, 64)
    for b in range(2):
        wide_k[b] = k[table[b]].flatten(0, 1).float() * k_descale[b, :, None]
        wide_v[b] = v[table[b]].flatten(0, 1).float() * v_descale[b, :, None]
        if how != "nothing appended":
            wide_k[b, lengths[b]] = new[b, 0].float() * k_descale[b, :, None]
            wide_v[b, lengths[b]] = new[b, 0].float() * v_descale[b, :, None]
    appended = () if how == "nothing appended" else (new, new)
    if how == "16 bits":
        wide = new.float()[:, 0]
        appended = tuple((wide * x[..., None]).bfloat16()[:, None] for x in (k_descale, v_descale))
    full = [n + bool(appended) for n in lengths]
    wide_q = q.float() * q_descale.repeat_interleave(2, 1)[:, None, :, None]
    wanted = strobe.decode(wide_q, strobe.Cache(wide_k, wide_v, ints(*full)))
    found = strobe.flash_attn_with_kvcache(
        q, k, v, *appended, cache_seqlens=ints(*lengths), page_table=table, causal=True, q_descale=q_descale, **descales
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=3e-2, atol=3e-2)
    out = torch.empty(2, 4, 64, dtype=torch.float16)
    again = strobe.flash_attn_varlen_func(
        q[:, 0], k, v, ints(0, 1, 2), block_table=table, seqused_k=ints(*full), max_seqlen_q=1, causal=True, out=out,
        q_descale=q_descale, **descales,
    )  # fmt: skip
    assert again is out
    torch.testing.assert_close(out.float(), wanted[:, 0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("says", "keywords"),
    [
        (r"qv must have shape \[2, 1, 2, 16\] and q's torch.float32, got \[2, 1, 2, 512\]", {"qv": torch.zeros(2, 1, 2, 512)}),
        ("qv goes with v_cache and k_cache that are first and other columns", {"qv": torch.zeros(2, 1, 2, 16)}),
        ("q of 8 bits goes with a cache of 8 bits", {"q": torch.zeros(2, 1, 2, 16).to(torch.float8_e4m3fn)}),
        ("q must be a tensor, got list", {"q": [0.0]}),
        ("cu_seqlens_q must be a tensor, got list", {"cu_seqlens_q": [0, 1, 2]}),
        ("attention_chunk must be 0 .* or more, got -1", {"attention_chunk": -1}),
        ("attention_chunk must be an int, got float", {"attention_chunk": 2.5}),
        (r"lengths \(cache_seqlens\) must be from 0 to the 8", {"attention_chunk": 2, "cache_seqlens": ints(-1, 4)}),
        ("out must have shape", {"attention_chunk": 2, "out": torch.zeros(2, 1, 2, 8)}),
        ("alibi_slopes are not taken with attention_chunk", {"attention_chunk": 8, "alibi_slopes": torch.ones(2)}),
        ("q must have shape", {"attention_chunk": 8, "q": torch.zeros(1, 2, 16)}),
        ("k_cache must have q's head dim", {"attention_chunk": 8, "q": torch.zeros(2, 1, 2, 24)}),
        ("v_cache must have k_cache's dtype", {"v_cache": torch.zeros(2, 8, 2, 16).half()}),
        ("cache_seqlens must be int32", {"cache_seqlens": torch.tensor([3, 4])}),
        ("cache_leftpad must be int32", {"cache_leftpad": torch.tensor([3, 4])}),
        ("block_table and page_table are one argument", {"block_table": ints([0], [1]), "page_table": ints([0], [1])}),
        ("sinks and s_aux are one argument", {"sinks": torch.zeros(2), "s_aux": torch.zeros(2)}),
        ("and rotary_seqlens go with k and v", {"rotary_cos": torch.zeros(8, 8), "rotary_sin": torch.zeros(8, 8)}),
        ("and rotary_seqlens go with k and v", {"rotary_seqlens": ints(3, 4)}),
        (
            "rotary_seqlens must be int32",
            {"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16), "rotary_seqlens": torch.ones(2)},
        ),
        ("k and v go together", {"k": torch.zeros(2, 1, 2, 16)}),
        ("cache_seqlens must say where", {"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16), "cache_seqlens": None}),
        ("cache_seqlens must be an int32 tensor or an int", {"cache_seqlens": 2.5}),
    ],
)
def test_what_is_not_taken_is_refused_by_name(says, keywords):
    q, k = torch.zeros(2, 1, 2, 16), torch.zeros(2, 8, 2, 16)
    with pytest.raises((TypeError, ValueError), match=says):
        strobe.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": k, "cache_seqlens": ints(3, 4), **keywords})


@pytest.mark.parametrize(
    ("says", "wrong"),
    [("out must have shape", {"out": torch.zeros(2, 1, 2, 8)}), ("qv must have shape", {"qv": torch.zeros(2, 1, 2, 8)})],
)
def test_what_is_refused_has_appended_nothing(says, wrong):
    q, cache, new = torch.zeros(2, 1, 2, 16), torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16)
    with pytest.raises(ValueError, match=says):
        strobe.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=ints(3, 4), **wrong)
    assert not cache.any()


def test_what_is_not_taken_of_8_bits():
    x, table, more = torch.zeros(2, 1, 2, 16).to(torch.float8_e4m3fn), ints([0], [1]), torch.ones(2, 2)
    given = {"cache_seqlens": ints(1, 1), "block_table": table}
    with pytest.raises(ValueError, match="k_descale and v_descale are not taken with qv"):
        strobe.flash_attn_with_kvcache(x, x, x, qv=torch.zeros(2, 1, 2, 16, dtype=torch.bfloat16), k_descale=more, **given)
    with pytest.raises(ValueError, match=r"q_descale must be float32 \[2, 2\], got torch.float32 \[2\]"):
        strobe.flash_attn_with_kvcache(x, x, x, q_descale=more[0], **given)
    with pytest.raises(ValueError, match="q_descale goes with a k_descale of one number for all keys of a head"):
        strobe.flash_attn_with_kvcache(x, x, x, q_descale=more, k_descale=torch.ones(2, 1, 2), **given)
    with pytest.raises(TypeError, match="v must have 16 or 32 bits for a cache of 8"):
        strobe.append(strobe.Cache(x, x, ints(0, 0)), x.bfloat16(), x)
    with pytest.raises(TypeError, match="seqused_k must be an int32 tensor with a block_table, got list"):
        strobe.flash_attn_varlen_func(x[:, 0], x, x, ints(0, 1, 2), block_table=table, seqused_k=[1, 1])


@pytest.mark.parametrize("device", DEVICES)
def test_as_flash_attn_2_is_called_over_pages(device):
    """With the bounds of keys in place of lengths; as FlashAttention-4 names the table and windows without bounds, too."""
    g = torch.Generator().manual_seed(5)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v = (torch.randn(6, 16, 2, 64, generator=g).to(device, dtype) for _ in range(2))
    q = torch.randn(7, 4, 64, generator=g).to(device, dtype)
    table, cu_q, cu_k, used = (x.to(device) for x in (ints([3, 1, 5], [0, 2, 4]), ints(0, 5, 7), ints(0, 40, 45), ints(40, 5)))
    wanted = strobe.flash_attn_varlen_func(q, k, v, cu_q, None, 5, 40, causal=True, block_table=table, seqused_k=used)
    found = strobe.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 40, 0.0, None, True, (-1, -1), block_table=table)
    assert torch.equal(found, wanted)
    given = {"page_table": table, "window_size": (None, None), "causal": True}
    assert torch.equal(strobe.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 40, **given), wanted)
    both = strobe.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 40, seqused_k=ints(30, 5).to(device), **given)
    assert not torch.equal(both, wanted)  # as many as are used


@pytest.mark.parametrize(
    ("says", "keywords"),
    [
        ("seqused_k must be an int32 tensor with a block_table, got NoneType", {}),
        ("cu_seqlens_k must be a tensor, got list", {"cu_seqlens_k": [0, 1]}),
        ("cu_seqlens_k must be int32, got torch.int64", {"cu_seqlens_k": torch.tensor([0, 1])}),
        (r"cu_seqlens_k must be contiguous with shape \[1\], got \[\]", {"cu_seqlens_k": ints(0)[0]}),
        (r"block_table \(or page_table\) must have shape \[2, pages of a request\]", {"cu_seqlens_k": ints(0, 1, 2)}),
        (r"lengths \(cache_seqlens\) must be from 0 to the 8 .* got \[-1\]", {"cu_seqlens_k": ints(1, 0)}),
        ("block_table and page_table are one argument", {"page_table": ints([0]), "seqused_k": ints(1)}),
    ],
)
def test_lengths_over_pages_that_cannot_be(says, keywords):
    q, pages = torch.zeros(1, 2, 16), torch.zeros(1, 8, 2, 16)
    with pytest.raises((TypeError, ValueError), match=says):
        strobe.flash_attn_varlen_func(q, pages, pages, ints(0, 1), max_seqlen_q=1, block_table=ints([0]), **keywords)


def test_as_vllm_calls_it_without_pages():
    """Of an encoder, say: `out` is written, s_aux counts, and what says how to schedule does not."""
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(7, heads, 16, generator=g) for heads in (4, 2, 2))
    sinks, cu, out = torch.randn(4, generator=g), ints(0, 3, 7), torch.full_like(q, torch.nan)
    wanted = strobe.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, learnable_sink=sinks, return_softmax_lse=True)
    given = {"fa_version": 3, "num_splits": 1, "scheduler_metadata": None, "k_descale": torch.ones(2, 2), "s_aux": sinks}
    given |= {"q_v": None, "output_scale": None, "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None}
    found = strobe.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, out=out, return_softmax_lse=True, **given)
    assert found[0] is out and all(map(torch.equal, found, wanted))
    assert strobe.flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, out=out, **given) is out


@pytest.mark.parametrize(
    ("says", "keywords"),
    [
        (r"out must have shape \[4, 2, 16\]", {"out": torch.zeros(4, 2, 8)}),
        ("cp_world_size must be left out without a block_table", {"cp_world_size": 2}),
        ("q_v must be left out without a block_table", {"q_v": torch.zeros(4, 2, 16)}),
        ("s_aux and learnable_sink are one argument", {"s_aux": torch.zeros(2), "learnable_sink": torch.zeros(2)}),
    ],
)
def test_what_is_vllms_alone_is_refused_without_pages(says, keywords):
    q, cu = torch.zeros(4, 2, 16), ints(0, 4)
    with pytest.raises(ValueError, match=says):
        strobe.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, **keywords)


def test_a_result_with_a_gradient_is_written_nowhere():
    q, cu = torch.zeros(4, 2, 16, requires_grad=True), ints(0, 4)
    with pytest.raises(ValueError, match="out must be left out where a gradient is asked for"):
        strobe.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, out=torch.zeros(4, 2, 16))
    with torch.no_grad():
        strobe.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, out=torch.zeros(4, 2, 16))
