"""The Hopper forward over a cache in the simulator: prompts of every kind, in every order, against the specification."""

import pytest
import torch
from cache_launch import BOUNDS, run
from decode_launch import described
from requests_at_random import draw

import strobe
from strobe.device import KNOWN
from strobe.kernels.sm90 import cache_config

ORDERS = ("in_order", "random", "late", "early")
PAGES = (16, None, 64, 48, 128)


def simulate(seed: int) -> None:
    """Random prompts, some of few queries, on a random number of CTAs; every third has pages that are not there."""
    dtype = (torch.float16, torch.bfloat16)[seed % 2]
    call = draw(seed, dtype, seed % 3 > 0, n_q=(20, 70, 90)[seed % 3], page=PAGES[seed % 5], tree=False, leftpad=False)
    run(call, ctas=1 + seed % 4, order=ORDERS[seed // 2 % 4], seed=seed, bounds=BOUNDS[seed // 3 % 2])


@pytest.mark.parametrize("seed", range(10))
def test_against_the_specification(seed):
    simulate(seed)


@pytest.mark.exhaustive
def test_many_more():
    for seed in range(100, 250):
        simulate(seed)


PLAIN = dict(head_dim=64, head_dim_v=64, group=2, heads_kv=1, ragged=False, tree=False, leftpad=False, softcap=0.0, alibi=False,
             sinks=False, mask=strobe.Causal(), page=16, room=257)  # fmt: skip


def test_a_block_has_boxes_of_two_chunks_of_columns():
    """96 columns are 64 and 32, and 192 are two panels of 64 and another chunk."""
    for dim in (96, 192):
        run(draw(1, torch.bfloat16, **{**PLAIN, "head_dim": dim, "head_dim_v": dim, "n_q": 30, "batch": 1}), tile_kv=64, box=16)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("page", [16, 48, 32])
def test_groups_of_keys(dim, page):
    """Requests that end with a block, with a box, with a group, within one; pages that are not there."""
    case = {
        **PLAIN,
        "head_dim": dim,
        "head_dim_v": dim,
        "page": page,
        "n_q": 30,
        "batch": 5,
        "lengths": [192, 224, 200, 251, 5],
    }
    for honest in (True, False):
        run(draw(1, torch.bfloat16, honest, **case), order="late")


@pytest.mark.parametrize("group", [3, 5])
@pytest.mark.parametrize("ragged", [False, True])
def test_heads_that_do_not_fill_tiles_of_two(group, ragged):
    """Three fill a tile of three groups; of five one is alone. Pages that are not there are noted for the heads that are."""
    for honest, dim in ((True, 64), (False, 128)):
        shape = {"group": group, "heads_kv": 2, "ragged": ragged, "n_q": 70, "batch": 3, "head_dim": dim, "head_dim_v": dim}
        call = draw(5, torch.bfloat16, honest, **{**PLAIN, **shape, "lengths": [200, 90, 257]})
        config = cache_config.choose(described(call)[0], KNOWN["H200"])
        assert (config.groups, config.tile_heads, config.uneven_group) == ((3, 3, 0) if group == 3 else (2, 2, 5))
        for order in ORDERS:
            run(call, order=order)


def test_prompts_and_single_tokens_share_a_batch():
    call = draw(2, torch.bfloat16, **{**PLAIN, "ragged": True, "n_q": 70, "batch": 5, "lengths": [200, 3, 0, 100, 257]})
    cu = torch.tensor([0, 70, 71, 91, 110, 112], dtype=torch.int32)
    q = torch.randn(115, *call.q.shape[1:], generator=torch.Generator().manual_seed(0)).to(call.q.dtype)
    run(call._replace(q=q, keywords={**call.keywords, "cu_seqlens_q": cu}), launches=2)


@pytest.mark.parametrize("order", ORDERS)
def test_what_the_optimism_gets_wrong_is_computed_again(order):
    """A key that counts for more than all others meets some rows late; a part of the notes is set at a time."""
    call = draw(3, torch.float16, **{**PLAIN, "n_q": 70, "batch": 2, "lengths": [257, 200]})
    late = int(call.cache.page_table[0, 250 // 16])
    call.cache.k[late, 250 % 16] *= 300.0
    redone = run(call, order=order, launches=2)
    assert 0 < redone < 2 * 2 * 2


@pytest.mark.parametrize("lengths", [[-5, 10**9], [2**31 - 1, -(2**31)]])
def test_lengths_that_lie_stay_within_the_cache(lengths):
    call = draw(2, torch.float16, **{**PLAIN, "n_q": 30, "batch": 2, "lengths": [64, 64], "room": 64})
    lying = strobe.Cache(**{**vars(call.cache), "lengths": torch.tensor(lengths, dtype=torch.int32)})
    run(call._replace(cache=lying))


@pytest.mark.parametrize("dim", [64, 128])
def test_layouts_of_other_caches(dim):
    """Heads ahead of rows, keys beside values, one page."""
    dims = {"head_dim": dim, "head_dim_v": dim}
    call = draw(4, torch.float16, **{**PLAIN, **dims, "n_q": 30, "batch": 2, "heads_kv": 2})
    k, v, *others = vars(call.cache).values()
    by_heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    both = torch.stack([k, v], 1)
    for pools in (by_heads, (both[:, 0], both[:, 1])):
        run(call._replace(cache=strobe.Cache(*pools, *others)))
    one = draw(4, torch.float16, **{**PLAIN, **dims, "n_q": 30, "batch": 1, "page": 64, "room": 60})
    used = one.cache.page_table[0, :1].long()
    run(one._replace(cache=strobe.Cache(one.cache.k[used], one.cache.v[used], one.cache.lengths, torch.zeros(1, 1).int())))
