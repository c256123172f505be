"""What the processes of a crew do: the whole inputs come from a case, and each takes its own rows."""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from problems import SEED, Case, Results, Tensors, tensors, upstream
from torch.distributed.device_mesh import DeviceMesh

import strobe
from strobe import parallel
from strobe.parallel.sharding import Sharding

METHODS = ({"method": "ring"}, {"method": "allgather"}, {"method": "ulysses"}, {"method": "usp", "team": 2})


def whole_keywords(t: Tensors, packed: bool) -> dict:
    """The keywords of `strobe.parallel.simulate` for those of `strobe.attention`."""
    kept = {name: x for name, x in t.keywords.items() if not name.startswith(("cu_seqlens", "max_seqlen"))}
    if packed:
        kept |= dict(cu_seqlens=t.keywords["cu_seqlens_q"], cu_seqlens_kv=t.keywords["cu_seqlens_kv"])
    return kept


def simulated(t: Tensors, packed: bool, ranks: int, layout: str, method: dict) -> Results:
    """Results of all ranks in one process."""
    t = t.with_gradients()
    torch.manual_seed(SEED)
    out, lse = parallel.simulate(
        t.q, t.k, t.v, ranks=ranks, return_lse=True, layout=layout, **method, **whole_keywords(t, packed)
    )  # fmt: skip
    return Results(out.detach(), lse.detach(), **t.gradients((out, lse), upstream(out, lse)))


def shardings(t: Tensors, packed: bool, ranks: int, layout: str) -> tuple[Sharding, Sharding]:
    """Of the queries and the keys."""
    if packed:
        lengths = (t.keywords[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_kv"))
        return tuple(Sharding(tuple(n), ranks, layout) for n in lengths)  # type: ignore[return-value]
    return Sharding((t.q.shape[1],), ranks, layout), Sharding((t.k.shape[1],), ranks, layout)


def attend(group, cases: list[tuple[Case, torch.dtype, str, dict]]) -> list[tuple[torch.Tensor, ...]]:
    """out, lse, dq, dk, dv (and dsinks) of this rank's rows, case by case."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return [_attend(group, rank, ranks, *one) for one in cases]


def _attend(group, rank: int, ranks: int, case: Case, dtype, layout: str, method: dict) -> tuple[torch.Tensor, ...]:
    t = tensors(case, dtype)
    row = 0 if case.packed else 1
    q_of, kv_of = shardings(t, case.packed, ranks, layout)
    rows, keys = (of.index(rank, rank) for of in (q_of, kv_of))
    keywords = whole_keywords(t, case.packed)
    if not case.packed:
        keywords |= dict(seqlen=case.n_q, seqlen_kv=case.n_kv)
    documents = keywords["mask"].documents
    if documents is not None:
        own = replace(documents, q=documents.q[:, rows], kv=documents.kv[:, keys])
        keywords["mask"] = replace(keywords["mask"], documents=own)
    mine = Tensors(*(x.index_select(row, at) for x, at in ((t.q, rows), (t.k, keys), (t.v, keys))), keywords)
    mine = mine.with_gradients()
    torch.manual_seed(SEED + rank)  # the seed of rank 0 counts
    out, lse = parallel.attention(
        mine.q, mine.k, mine.v, group=group, return_lse=True, layout=layout, **method, **mine.keywords
    )  # fmt: skip
    whole_out = torch.empty(*t.q.shape[:-1], t.v.shape[-1], dtype=dtype)
    whole_lse = torch.zeros((t.q.shape[1], t.q.shape[0]) if case.packed else (t.q.shape[0], t.q.shape[2], t.q.shape[1]))
    dout, dlse = upstream(whole_out, whole_lse)
    dlse = torch.where(torch.isfinite(lse), dlse.index_select(-1, rows), 0.0)
    grads = mine.gradients((out, lse), (dout.index_select(row, rows), dlse))
    return out.detach(), lse.detach(), *grads.values()


def die(group, how: str) -> float | str:
    """The last rank dies or calls something else; the others say what they get."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q = torch.randn(1, 8, 2, 16)
    if rank == ranks - 1:
        if how == "dies":
            os._exit(1)
        if how == "other shapes":
            q = torch.randn(1, 10, 2, 16)
        if how == "other dtype":
            q = q.double()
        if how == "other mask":
            return _error(lambda: parallel.attention(q, q, q, mask=strobe.Causal(), group=group))
    return _error(lambda: parallel.attention(q, q, q, group=group, method="ring"))


def _error(call) -> tuple[str, str, float]:
    begin = time.perf_counter()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - begin
    return "", "", time.perf_counter() - begin


def decode(group, used: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank has other keys, the first one none."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q, k, v, sinks, counts = decode_inputs(ranks)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    seqused = torch.full((q.shape[0],), counts[rank] // 2, dtype=torch.int32) if used else None
    score = strobe.Score(softcap=5.0, sinks=sinks)
    return parallel.decode(q, k[:, own], v[:, own], score=score, seqused_kv=seqused, group=group, return_lse=True)


def decode_inputs(ranks: int):
    """q, all keys and values, sinks, and how many keys each rank has."""
    random = torch.Generator().manual_seed(3)
    counts = [7 * rank for rank in range(ranks)]
    q, k, v = (torch.randn(2, n, h, 32, generator=random) for n, h in ((3, 4), (sum(counts), 2), (sum(counts), 2)))
    return q, k, v, torch.randn(4, generator=random), counts


def shards(group, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a rank has of 0 .. 10, where that stands, and the whole again."""
    x = torch.arange(11)
    mine = parallel.shard(x, 0, group=group, layout=layout)
    where = parallel.positions(11, group=group, layout=layout)
    return mine, where, parallel.unshard(mine, 0, group=group, layout=layout, seqlen=11)


def meshes(group) -> list[torch.Tensor]:
    """The same by the group, by a mesh of one dim and by one of two; all processes of a crew of 4."""
    random = torch.Generator().manual_seed(4)
    whole = torch.randn(1, 24, 4, 16, generator=random)
    x = parallel.shard(whole, group=group)
    line = DeviceMesh("cpu", list(range(4)))
    square = DeviceMesh("cpu", [[0, 1], [2, 3]])
    call = partial(parallel.attention, x, x, x, mask=strobe.Causal())
    return [
        call(group=group, method="ring"), call(group=line, method="ring"), call(group=square, method="usp"),
        call(group=group, method="usp", team=2), call(method="auto"),
    ]  # fmt: skip


def compiled(group) -> tuple[torch.Tensor, ...]:
    """Eager and compiled, without a break in the graph: out and dq of each."""
    x = parallel.shard(torch.randn(1, 24, 4, 16, generator=torch.Generator().manual_seed(5)), group=group)

    def layer(x):
        return parallel.attention(2 * x, x, x, mask=strobe.Causal(), group=group, method="ring").square()

    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        mine = x.clone().requires_grad_()
        out = call(mine)
        out.sum().backward()
        found += [out.detach(), mine.grad]
    return tuple(found)


def under_autocast(group) -> torch.dtype:
    """The dtype of a result whose inputs autocast makes bfloat16."""
    x = torch.randn(1, 6, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        return parallel.attention(x, x, x, group=group, method="ring").dtype


def refused(group) -> list[str]:
    """Wrong calls, each by this rank alone: what it is told before anything is exchanged."""
    x = torch.randn(1, 6, 4, 16)
    packed = torch.randn(6, 4, 16)
    calls = (
        lambda: parallel.attention(x, x, x, group=group, seqlen=19),
        lambda: parallel.attention(x, x, x, group=group, method="tree"),
        lambda: parallel.attention(x, x, x, group=group, layout="striped"),
        lambda: parallel.attention(x, x, x, group=group, method="usp", team=3),
        lambda: parallel.attention(x, x, x, group=group, method="ring", team=2),
        lambda: parallel.attention(x[:, :, :3], x[:, :, :1], x[:, :, :1], group=group, method="ulysses"),
        lambda: parallel.attention(packed, packed, packed, group=group, cu_seqlens=torch.tensor([0, 9, 20])),
        lambda: parallel.attention(packed, packed, packed, group=group, cu_seqlens=torch.tensor([0, 9, 3])),
        lambda: parallel.attention(x, x, x, group=group, score=strobe.Score(bias=torch.zeros(1, 1, 6, 6))),
        lambda: parallel.attention(x, x, x.double(), group=group),
        lambda: parallel.attention(x, x, x, group="world"),
        lambda: parallel.decode(x.requires_grad_(), x, x, group=group),
        lambda: parallel.unshard(x, group=group),
    )
    return [_error(call)[1] for call in calls]


def train(group, settings: dict, method: str, layout: str) -> list[float]:
    """The losses of examples/train_gpt_parallel.py, in all processes of a crew of 4."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("train_gpt_parallel")
    return example.train(example.Settings(**settings), torch.device("cpu"), method, layout)
