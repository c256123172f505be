"""Requests with caches of every kind, drawn from a seed, and what is right for them."""

import random
from typing import NamedTuple

import torch

import strobe
from strobe.reference import cached
from strobe.serving.arguments import checked
from strobe.serving.problem import DecodeOperands, DecodeProblem, describe


class Drawn(NamedTuple):
    """A call of `decode`: q, the cache, the other keywords."""

    q: torch.Tensor
    cache: strobe.Cache
    keywords: dict


def draw(
    seed: int, dtype: torch.dtype, honest: bool = True, device: str = "cpu", deterministic: bool = False, **fixed
) -> Drawn:
    """A call with a small cache. Whatever nobody may read is NaN; page numbers beyond a length are nonsense. honest: no page
    within a length is missing. fixed: numbers that are not drawn, by their names below."""
    rnd = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    drawn = {
        "head_dim": rnd.choice([64, 80, 128]), "head_dim_v": 0, "group": rnd.choice([1, 2, 4, 7, 8]),
        "heads_kv": rnd.choice([1, 2, 3]), "batch": rnd.choice([1, 2, 3, 5]), "n_q": rnd.choice([1, 1, 2, 3, 5, 16]),
        "page": rnd.choice([None, 1, 3, 16, 64, 128]), "room": rnd.choice([64, 130, 257]), "ragged": rnd.random() < 0.3,
        "tree": rnd.random() < 0.3, "leftpad": rnd.random() < 0.2,
        "mask": rnd.choice([None, strobe.Full(), strobe.Causal(), strobe.Window(10, 0), strobe.Window(40, 3)]),
        "softcap": rnd.choice([0.0, 0.0, 5.0]), "alibi": rnd.random() < 0.3, "sinks": rnd.random() < 0.3, "lengths": None,
    }  # fmt: skip
    at = {**drawn, **fixed}
    dim, heads_kv, batch, n_q, room, page = (at[name] for name in ("head_dim", "heads_kv", "batch", "n_q", "room", "page"))
    dim_v, heads = at["head_dim_v"] or rnd.choice([dim, dim, 64]), at["group"] * heads_kv
    lengths = at["lengths"] or [rnd.randint(0, room) for _ in range(batch)]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    table = index = None
    if page:
        columns = -(-room // page)
        pages = batch * columns + 3
        k, v = (torch.full((pages, page, heads_kv, d), torch.nan) for d in (dim, dim_v))
        table = torch.randperm(pages, generator=g)[: batch * columns].view(batch, columns).int()
        places = [[(int(table[b, t // page]), t % page) for t in range(lengths[b])] for b in range(batch)]
    else:
        k, v = (torch.full((batch + 2, room, heads_kv, d), torch.nan) for d in (dim, dim_v))
        index = torch.randperm(batch + 2, generator=g)[:batch].int() if rnd.random() < 0.5 else None
        places = [[(b if index is None else int(index[b]), t) for t in range(lengths[b])] for b in range(batch)]
    for pairs in places:
        for place in pairs:
            k[place], v[place] = normal(heads_kv, dim), normal(heads_kv, dim_v)
    if table is not None:
        for b, length in enumerate(lengths):
            used = -(-length // page)
            table[b, used:] = rnd.choice([-1, 10**6, 0])
            if used and not honest:
                table[b, rnd.randrange(used)] = rnd.choice([-1, k.shape[0], 2**31 - 1])
    keywords: dict = {"mask": at["mask"], "deterministic": deterministic}
    keywords["score"] = strobe.Score(
        at["softcap"], torch.rand(heads, generator=g).to(device) if at["alibi"] else None,
        sinks=normal(heads).to(device) if at["sinks"] else None,
    )  # fmt: skip
    if at["ragged"]:
        counts = [rnd.randint(0, n_q) for _ in range(batch)]
        q = normal(max(1, sum(counts) + rnd.randint(0, 2)), heads, dim)
        keywords |= {"cu_seqlens_q": torch.tensor([0, *counts]).cumsum(0).int().to(device), "max_seqlen_q": n_q}
    else:
        q = normal(batch, n_q, heads, dim)
    if at["tree"]:
        keywords["tree"] = (torch.rand(batch, 16, 16, generator=g) < 0.6).to(device)
    leftpad = torch.tensor([rnd.randint(0, n) for n in lengths], dtype=torch.int32) if at["leftpad"] else None
    ints = [None if x is None else x.to(device) for x in (torch.tensor(lengths, dtype=torch.int32), table, index, leftpad)]
    cache = strobe.Cache(k.to(dtype).to(device), v.to(dtype).to(device), *ints)
    return Drawn(q.to(dtype).to(device), cache, keywords)


def with_queries(call: Drawn, numbers: list[int]) -> Drawn:
    """The call with other queries, so many of each request, packed, and two rows more."""
    bounds = torch.tensor([0, *numbers], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = torch.randn(int(bounds[-1]) + 2, *call.q.shape[-2:], generator=torch.Generator().manual_seed(0)).to(call.q)
    keywords = {**call.keywords, "cu_seqlens_q": bounds.to(q.device), "max_seqlen_q": max(numbers)}
    return call._replace(q=q, keywords=keywords)


def described(call: Drawn, **keywords) -> tuple[DecodeProblem, DecodeOperands]:
    operands, options = checked(call.q, call.cache, return_lse=True, **call.keywords, **keywords)
    return describe(operands, options), operands


def right(call: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the specification."""
    return cached.decode(*described(call))


BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    """AssertionError if out or lse is not right within the precision of a dtype; NaN and infinities must be equal."""
    for name, x, y in zip(("out", "lse"), found, wanted, strict=False):
        bound = BOUNDS[dtype] if name == "out" else min(BOUNDS[dtype], 4e-3)
        assert x.shape == y.shape, name
        torch.testing.assert_close(
            x.double().cpu(), y.double().cpu(), rtol=bound, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
        )
