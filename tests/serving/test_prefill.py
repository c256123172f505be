"""Prompts and chunks of them over a cache, through the public door: which kernel serves them, and on a GPU what it gives."""

import pytest
import torch
from requests_at_random import Drawn, check, described, draw, right, with_queries

import strobe
from strobe.call import launches
from strobe.call.dispatch import explain_problem
from strobe.device import KNOWN
from strobe.kernels.sm90 import cache_backend, cache_config
from strobe.serving.arguments import checked
from strobe.serving.problem import describe

GPU = pytest.mark.gpu
BACKEND = "sm90_cache"
PAGES = [None, 16, 48, 64, 128, 256]


def prompts(seed: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **fixed) -> Drawn:
    """Chunks of prompts of up to 300 queries, in pages of every kind."""
    given = {"n_q": (130, 200, 300)[seed % 3], "page": PAGES[seed % 6], "room": (257, 700)[seed % 2], "tree": False}
    return draw(seed, dtype, honest=fixed.pop("honest", True), device=device, **{**given, "leftpad": False, **fixed})


def chosen(call: Drawn, gpu: str = "H200") -> str | None:
    return explain_problem(described(call)[0], KNOWN[gpu]).chosen


PLAIN = dict(mask=strobe.Causal(), softcap=0.0, alibi=False, sinks=False, head_dim=128, head_dim_v=128)
MANY = dict(n_q=2048, heads_kv=8, group=4, batch=1, page=64, room=70, ragged=False, **PLAIN)


@pytest.mark.parametrize(
    ("changes", "backend", "says"),
    [
        ({}, BACKEND, ""),
        ({"page": 48}, BACKEND, ""),
        ({"page": None}, BACKEND, ""),
        ({"ragged": True, "batch": 4}, BACKEND, "others are the decode kernel's, whose launch goes ahead"),
        ({"n_q": 47}, "decode", "is for requests of 48 queries or more, not 47"),
        ({"n_q": 95, "group": 1}, "decode", "is for requests of 96 queries or more, not 95"),
        ({"n_q": 64, "batch": 16}, BACKEND, ""),
        (
            {"n_q": 64, "batch": 9},
            "decode",
            "would leave many of 132 multiprocessors idle at the end, with 144 tiles of 64 queries",
        ),
        ({"n_q": 64, "batch": 9, "ragged": True}, "decode", "may leave many of 132 multiprocessors idle"),
        ({"n_q": 128, "group": 1}, "decode", "would leave most of 132 multiprocessors idle, with 8 tiles"),
        ({"page": 24}, "decode", "takes pages of a multiple of 16 keys, not 24"),
        ({"leftpad": True}, "decode", "takes no leftpad"),
        ({"deterministic": True}, "decode", "bits that depend on the number of queries"),
    ],
)
def test_which_kernel_serves_a_chunk(changes, backend, says):
    problem, _ = described(prompts(1, **{**MANY, **changes}))
    explanation = explain_problem(problem, KNOWN["H200"])
    assert explanation.chosen == backend and says in str(explanation)
    assert explain_problem(problem, KNOWN["A100"]).chosen == "decode"


@pytest.mark.parametrize(
    ("changes", "grouped"),
    [
        ({"page": 16}, True),
        ({"page": 48}, True),
        ({"head_dim": 256, "head_dim_v": 256, "page": 16}, True),
        ({"page": 64}, False),
        ({"page": None}, False),
        ({"page": 16, "head_dim": 64, "head_dim_v": 64}, False),
        ({"page": 16, "head_dim": 120, "head_dim_v": 128}, False),
        ({"page": 16, "head_dim": 192}, False),
    ],
)
def test_keys_lie_in_groups_where_these_are_whole_panels_and_blocks_have_several_pages(changes, grouped):
    call = prompts(1, **{**MANY, **changes})
    assert cache_config.choose(described(call)[0], KNOWN["H200"]).grouped == grouped
    if grouped:  # pages that lie no whole number of groups apart
        pages, page, heads, dim = call.cache.k.shape
        k = torch.zeros(pages, page + 4, heads, dim, dtype=call.q.dtype)[:, :page]
        apart = call._replace(cache=strobe.Cache(k, *list(vars(call.cache).values())[1:]))
        assert not cache_config.choose(described(apart)[0], KNOWN["H200"]).grouped


@pytest.mark.parametrize(("queries", "batch", "keys"), [(511, 1, 64), (512, 1, 128), (1535, 2, 64), (1536, 2, 128)])
def test_short_prompts_have_small_blocks(queries, batch, keys):
    """One alone may be a chunk, with many keys ahead of it."""
    call = prompts(1, **{**MANY, "n_q": queries, "batch": batch, "head_dim": 64, "head_dim_v": 64, "room": 16384})
    config = cache_config.choose(described(call)[0], KNOWN["H200"])
    assert config.tile_kv == keys


@pytest.mark.parametrize("queries", [300, 2000])
def test_slopes_without_a_causal_mask_keep_the_safe_softmax(queries):
    """The first block says nothing of the scores of near keys."""
    for mask, optimistic in ((strobe.Mask(), False), (strobe.Causal(), True)):
        call = prompts(1, **{**MANY, "n_q": queries, "batch": 4, "alibi": True, "mask": mask})
        assert cache_config.choose(described(call)[0], KNOWN["H200"]).optimistic == optimistic


@pytest.mark.parametrize(
    ("group", "least", "queries"),
    [(1, 17, 2048), (2, 17, 2048), (3, 17, 2048), (4, 17, 2048), (7, 37, 2048), (8, 17, 2048), (16, 21, 2048), (7, 19, 200)],
)
def test_from_which_number_of_queries_on_the_forward_takes_a_request(group, least, queries):
    """From where its tiles, of two heads if it can be, take less time than those of 64 rows of all heads. Seven heads are four
    tiles of two if requests are short."""
    shape = {"batch": 4, "heads_kv": 16, "group": group, "n_q": queries, "room": 4096}
    problem, _ = described(prompts(1, **{**MANY, "ragged": True, **shape}))
    assert f"and of {least} or more" in str(explain_problem(problem, KNOWN["H200"]))


def test_pages_that_lie_no_whole_number_of_rows_apart_stay_with_the_decode_kernel():
    call = prompts(1, **MANY)
    pages, page, heads, dim = call.cache.k.shape
    room = torch.zeros(pages * (page * heads * dim + 8), dtype=call.q.dtype)
    k = room.as_strided((pages, page, heads, dim), (page * heads * dim + 8, heads * dim, dim, 1))
    assert chosen(call) == BACKEND
    assert chosen(call._replace(cache=strobe.Cache(k, call.cache.v, call.cache.lengths, call.cache.page_table))) == "decode"
    by_heads = call.cache.k.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack([call.cache.k, call.cache.v], 1)
    for k, v in ((by_heads, call.cache.v), (both[:, 0], both[:, 1])):
        assert chosen(call._replace(cache=strobe.Cache(k, v, call.cache.lengths, call.cache.page_table))) == BACKEND


def test_an_lse_that_nobody_asked_for_is_not_filled():
    """Of packed requests one that is returned begins as -inf, in a launch ahead of the others."""
    call = prompts(1, **{**MANY, "ragged": True, "batch": 4})
    fills = {}
    for wanted in (False, True):
        operands, options = checked(call.q, call.cache, return_lse=wanted, **call.keywords)
        buffers = cache_backend.buffers(describe(operands, options), KNOWN["H200"])
        fills[wanted] = {**buffers.made, **buffers.shared}["lse"].fill
    assert fills == {False: None, True: -torch.inf}


# ---- on a GPU


@GPU
@pytest.mark.parametrize("seed", range(36))
def test_on_a_gpu(seed):
    call = prompts(seed, (torch.float16, torch.bfloat16)[seed % 2], "cuda", honest=seed % 4 > 0)
    found = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
    for _ in range(2):  # prepared, and with notes and counters that the call before has left
        again = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
    check(found, right(call), call.q.dtype)
    assert torch.equal(found[0], again[0])


@GPU
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (96, 96), (192, 128), (256, 256)])
def test_head_dims_on_a_gpu(dim, dim_v):
    for page in (16, 64):
        call = prompts(5, device="cuda", page=page, head_dim=dim, head_dim_v=dim_v, ragged=False)
        check(strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords), right(call), call.q.dtype)


@GPU
@pytest.mark.parametrize("page", [16, 128])
def test_what_the_optimism_gets_wrong_is_computed_again(page):
    """A key that counts for more than all others meets some rows late."""
    call = prompts(7, device="cuda", page=page, room=700, lengths=[650, 300], batch=2, n_q=200, ragged=False, **PLAIN)
    table, size = call.cache.page_table, page
    call.cache.k[table[0, 640 // size].long(), 640 % size] *= 2000.0
    before = strobe.redone_blocks("cuda")
    found = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
    check(found, right(call), call.q.dtype)
    assert strobe.redone_blocks("cuda") > before
    again = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
    assert torch.equal(found[0], again[0])


@GPU
def test_prompts_and_single_tokens_in_one_batch():
    call = prompts(3, device="cuda", page=64, room=700, lengths=[650, 300, 1, 0, 690, 128], batch=6, n_q=400, ragged=True,
                   mask=strobe.Causal())  # fmt: skip
    call = with_queries(call, [400, 1, 1, 3, 130, 127])
    out = torch.full((*call.q.shape[:-1], call.cache.v.shape[-1]), 7.0, dtype=call.q.dtype, device="cuda")
    found = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, out=out, **call.keywords)
    wanted = right(call)
    assert (out[-2:] == 7.0).all()  # rows of no request
    check((found[0][:-2], found[1]), (wanted[0][:-2], wanted[1]), call.q.dtype)


@GPU
@pytest.mark.parametrize("many", [1, 12])
@pytest.mark.parametrize(("group", "dim"), [(1, 128), (3, 128), (4, 64), (4, 128), (7, 128), (8, 256), (2, 192)])
def test_requests_of_any_number_of_queries_in_one_batch(group, dim, many):
    """By one kernel or the other: of one chunk that sees many keys, or of many."""
    each = [1, 16, 17, 18, 40, 47, 48, 63, 64, 65, 100, 127, 128, 130, 200, 255, 256, 300, *[90] * many]
    lengths = [n + 37 * i for i, n in enumerate(each)]
    lengths[-1] = 1500
    call = prompts(5, device="cuda", room=1500, lengths=lengths, batch=len(each), heads_kv=2, group=group, ragged=True,
                   **{**PLAIN, "head_dim": dim, "head_dim_v": dim, "page": 16})  # fmt: skip
    call = with_queries(call, each)
    found = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
    wanted = right(call)
    check((found[0][:-2], found[1]), (wanted[0][:-2], wanted[1]), call.q.dtype)


@GPU
@pytest.mark.parametrize(("dim", "page"), [(64, 16), (96, 64), (128, 64), (128, 16), (192, 64), (256, 48)])
def test_kernels_that_run_beside_each_other_give_the_same_each_time(dim, page):
    """Tokens of many keys, and prompts whose kernel begins before the tokens' has ended."""
    lengths = [1500 - 60 * i for i in range(20)] + [1400, 700, 300, 127]
    call = prompts(3, device="cuda", room=1500, lengths=lengths, batch=24, heads_kv=4, group=8, ragged=True,
                   **{**PLAIN, "head_dim": dim, "head_dim_v": dim, "page": page})  # fmt: skip
    call = with_queries(call, [1] * 18 + [5, 16, 600, 128, 300, 127])
    wanted, results = right(call), []
    for _ in range(30):
        out = torch.full_like(call.q, torch.nan)
        results.append(strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, out=out, **call.keywords))
    for out, lse in results:
        assert torch.equal(out[:-2], results[0][0][:-2]) and torch.equal(lse, results[0][1])
    check((results[0][0][:-2], results[0][1]), (wanted[0][:-2], wanted[1]), call.q.dtype)


@GPU
def test_a_batch_of_other_sizes_starts_no_threads(monkeypatch):
    """Its kernels are there: threads are for those that must be compiled."""
    fixed = dict(device="cuda", page=64, room=700, ragged=True, n_q=300, heads_kv=2, group=4, **PLAIN)
    for seed, batch in ((1, 3), (2, 5)):
        call = prompts(seed, batch=batch, **fixed)
        call = with_queries(call, [300, *[seed] * (batch - 1)])
        out, _ = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
        check((out[:-2],), (right(call)[0][:-2],), call.q.dtype)
        monkeypatch.setattr(launches, "ThreadPoolExecutor", None)


@GPU
def test_a_graph_is_replayed_with_other_lengths_pages_and_queries():
    fixed = dict(device="cuda", page=16, ragged=False, room=700, batch=3, n_q=200, head_dim=128, head_dim_v=128, heads_kv=2,
                 group=4)  # fmt: skip
    call, other = prompts(11, **fixed), prompts(12, **fixed)
    strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = strobe.decode(call.q, call.cache, return_lse=True, backend=BACKEND, **call.keywords)
    for source in (other, call, other):
        for name in ("k", "v", "lengths", "page_table"):
            getattr(call.cache, name).copy_(getattr(source.cache, name).clone())
        call.q.copy_(source.q.clone())
        graph.replay()
        check(found, right(call), torch.bfloat16)


@GPU
def test_vllm_and_flash_attn_ask_for_it():
    """Both doors give what `decode` gives."""
    call = prompts(3, device="cuda", page=64, room=700, lengths=[650, 300], batch=2, n_q=300, ragged=True, heads_kv=8, group=8,
                   **PLAIN)  # fmt: skip
    cu = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
    q = torch.randn(600, *call.q.shape[1:], device="cuda").to(call.q.dtype)
    call = call._replace(q=q, keywords={**call.keywords, "cu_seqlens_q": cu, "max_seqlen_q": 300})
    assert chosen(call) == BACKEND
    cache, wanted = call.cache, right(call)
    k, v, lengths, table = cache.k, cache.v, cache.lengths, cache.page_table
    varlen = strobe.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, max_seqlen_q=300, seqused_k=lengths, block_table=table, causal=True
    )
    q = q.view(2, 300, *q.shape[1:])
    dense = strobe.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=True)
    check((varlen,), wanted, q.dtype)
    check((dense.flatten(0, 1),), wanted, q.dtype)


@GPU
def test_nothing_is_compiled_for_other_lengths_and_page_tables():
    from strobe.kernels.decode.forward import decode_kernel
    from strobe.kernels.sm90.forward import forward_kernel

    fixed = dict(device="cuda", page=64, ragged=False, batch=2, n_q=200, heads_kv=2, group=4, **PLAIN)
    sizes = set()
    for seed, room in ((1, 700), (2, 1300), (3, 257)):
        call = prompts(seed, room=room, **fixed)
        strobe.decode(call.q, call.cache, backend=BACKEND, **call.keywords)
        sizes.add(tuple(len(next(iter(kernel.device_caches.values()))[0]) for kernel in (forward_kernel, decode_kernel)))
    assert len(sizes) == 1


def test_a_box_lies_in_one_page_and_one_block():
    for page, box in ((None, 64), (16, 16), (48, 16), (64, 64), (192, 64)):
        config = cache_config.choose(described(prompts(1, **{**MANY, "page": page}))[0], KNOWN["H200"])
        assert (config.tile_kv, config.box) == (64, box)
