"""Attention over a sequence that is sharded across the ranks of a process group. Every argument is checked before anything is
exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from strobe.api import autocast
from strobe.arguments import checked_options, integer, wants_gradient
from strobe.call import dispatch
from strobe.call.options import Options
from strobe.checks import check_tensor
from strobe.device import arch_of
from strobe.dropout import new_seed
from strobe.masks import Mask
from strobe.parallel import choice
from strobe.parallel.links import Wait, run, run_together
from strobe.parallel.operators import Plan, agree_on_queries, known_group, links_of, of_sinks, settle
from strobe.parallel.schedules import Item, Method, backward, decoding, forward, gathering, problems_of
from strobe.parallel.sharding import LAYOUTS, Sharding, checked, lengths_of
from strobe.parallel.work import Inputs, Job
from strobe.problem import Upstream
from strobe.scores import Score

METHODS = ("auto", "allgather", "ring", "ulysses", "usp")


def _plan(
    q, k, group: tuple[str, int, int], seqlen, seqlen_kv, cu_seqlens, cu_seqlens_kv, method, layout, team, training: bool
) -> Plan:  # fmt: skip
    """What a caller says of the whole, and how to share it. Where a length is not said it is the rows here times the ranks."""
    name, ranks, rank = group
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if team is not None and method != "usp":
        raise ValueError(f"team goes with method='usp', got method={method!r}")
    if team is not None and integer("team must be an int", team) < 1:
        raise ValueError(f"team must be 1 or more, got {team}")
    if cu_seqlens is None and cu_seqlens_kv is not None:
        raise ValueError("cu_seqlens_kv goes with cu_seqlens, got it alone")
    whole_q = whole_kv = 0
    if cu_seqlens is None:
        whole_q = _length("seqlen", seqlen, q.shape[1] * ranks)
        whole_kv = _length("seqlen_kv", seqlen_kv, whole_q if k.shape[1] == q.shape[1] else k.shape[1] * ranks)
    elif seqlen is not None or seqlen_kv is not None:
        raise ValueError("seqlen and seqlen_kv go with dense q, k, v; with cu_seqlens leave them None")
    return Plan(cu_seqlens, cu_seqlens_kv, whole_q, whole_kv, layout, ranks, rank, method, team or 0, training, name)


def _length(name: str, value: int | None, otherwise: int) -> int:
    value = otherwise if value is None else integer(f"{name} must be an int", value)
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
    return value


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    method: str = "auto",
    layout: str = "contiguous",
    seqlen: int | None = None,
    seqlen_kv: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    team: int | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence of which each rank of a group has a shard: `strobe.attention` of the whole, its rows on
    this rank. All ranks call it, with the same arguments but for the tensors; it is differentiable, and its backward is a call
    of all ranks too.

    Masks, slopes, functions and dropout look at where rows and keys stand in the whole sequence. Partial results are kept in
    float32 until they are merged. Under torch.autocast q, k and v are cast as by `strobe.attention`.

    Args:
        q: this rank's rows, [batch, n, heads_q, head_dim], as `shard` cuts them; packed: [n, heads_q, head_dim].
        k, v: this rank's keys and values, with heads_kv, which divides heads_q.
        mask: as for `strobe.attention`. Document's numbers are those of this rank's rows and keys: [batch, n].
        score: as for `strobe.attention`, the same on all ranks, but no bias: a score function may compute it. Each rank gets
            the share that its rows have in the gradient of the sinks, as of every other weight.
        scale: default 1 / sqrt(head_dim).
        group: a process group, or a DeviceMesh of one dim, or, for "usp", of two (teams by their ranks) that is all processes;
            default all processes.
        method: "allgather", "ring", "ulysses", "usp" (see docs/parallel.md), or "auto": what the cost model finds fastest.
        layout: "contiguous" or "zigzag", by which `shard` has cut; zigzag balances causal masks.
        seqlen, seqlen_kv: rows of the whole sequence, queries and keys; default: those of this rank times the ranks. They are
            needed where the shards differ in length.
        cu_seqlens, cu_seqlens_kv: integer [sequences + 1], the bounds of the whole packed sequences, of which every one is
            sharded. They are read on the host: kept on the CPU they make nothing wait.
        team: ranks of a team of "usp"; default: the mesh's second dim, or what the cost model finds fastest.
        dropout_p: as for `strobe.attention`. The seed is that of rank 0; what is dropped is the same as on one GPU.
        return_lse, deterministic, backend: as for `strobe.attention`.

    Returns:
        out, shaped as q with v's head dim; or (out, lse), lse float32 [batch, heads_q, n] or packed [heads_q, n].

    Raises:
        ValueError, TypeError: naming the argument, before anything is exchanged; or on all ranks, if they differ in what they
            call.
        strobe.parallel.ParallelError: on the ranks that are left, within the group's timeout, if one dies.
    """
    name, ranks, rank, of_mesh = _place_in(group)
    place = name, ranks, rank
    q, k, v, score = autocast(q, k, v, score)
    options = _checked(q, k, v, mask, score, scale, cu_seqlens, cu_seqlens_kv, dropout_p, deterministic, backend)
    training = wants_gradient(q, k, v, options.sinks)
    team = of_mesh if team is None and method == "usp" else team
    plan = _plan(q, k, place, seqlen, seqlen_kv, cu_seqlens, cu_seqlens_kv, method, layout, team, training)
    if options.dropout:
        options = replace(options, seed=new_seed(q.device))
    out, lse = torch.ops.strobe.parallel_forward(q, k, v, *options.arguments(), *plan.arguments())
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def _place_in(group: Any) -> tuple[str, int, int, int | None]:
    """The name of the group that a user means, its ranks, this one, and the ranks of a team that a mesh of two dims has."""
    found, team = _group(group)
    return known_group(found), dist.get_world_size(found), dist.get_rank(found), team


def _group(group: Any) -> tuple[dist.ProcessGroup, int | None]:
    """The process group that a user means, and the ranks of a team that a mesh of two dims has."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "strobe.parallel needs torch.distributed.init_process_group(...) first (or use strobe.parallel.simulate)"
        )
    if group is None:
        return dist.group.WORLD, None  # type: ignore[return-value]
    if isinstance(group, DeviceMesh):
        if group.ndim == 1:
            return group.get_group(), None
        if group.ndim == 2 and group.mesh.flatten().tolist() == list(range(dist.get_world_size())):
            return dist.group.WORLD, group.size(1)  # type: ignore[return-value]
        raise ValueError(
            f"group must be a process group or a DeviceMesh of one dim, or of two that has all processes in order, "
            f"got {group.ndim} dims, {group.mesh.tolist()}"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, a DeviceMesh or None, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group must be one that this process is in")
    return group, None


def _checked(q, k, v, mask, score, scale, cu_seqlens, cu_seqlens_kv, dropout_p, deterministic, backend) -> Options:
    """The checked options of a rank's call; bounds are those of the whole."""
    if isinstance(score, Score) and score.bias is not None:
        raise ValueError("bias must be None: it is not sharded; a score function may compute it instead")
    if isinstance(mask, Mask) and mask.blocks is not None:
        raise ValueError("mask must have no blocks: they are not sharded; a mask function may compute them instead")
    bounds = [None, None]
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens)
        cu_seqlens_kv = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
        check_tensor("cu_seqlens_kv", cu_seqlens_kv)
        bounds = [x.to(q.device if isinstance(q, torch.Tensor) else None, torch.int32) for x in (cu_seqlens, cu_seqlens_kv)]
    cu_q, cu_kv = bounds
    return checked_options(q, k, v, mask, score, scale, cu_q, cu_kv, None, None, None, None, deterministic, backend, dropout_p)


@dataclass(frozen=True)
class Explanation:
    """What the cost model says of a call, and which kernels its launches run on."""

    choice: choice.Choice
    """The methods, the one that is taken first."""
    kernels: tuple[tuple[str, dispatch.Explanation], ...]
    """Launches of this rank, in words, with the choice of a kernel for each."""

    def __str__(self) -> str:
        lines = [str(self.choice)]
        for what, one in self.kernels:
            lines.append(f"kernel    {what}: {one.chosen or 'none'} [{one.problem}]")
            lines += [f"          refused {name}: {reason}" for name, reason in one.refusals]
        return "\n".join(lines)


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, ranks: int | None = None, rank: int | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None, **keywords,
) -> Explanation:  # fmt: skip
    """Print, and return, which method `attention(q, k, v, **keywords)` takes and why, and which kernels it runs on this rank.
    Nothing is exchanged; with rank and ranks no group is needed."""
    of_mesh = None
    if group is not None or ranks is None:
        _, of_mesh = _group(group)
    rank, ranks = _rank(group, rank, ranks)
    mask, score, scale = (keywords.pop(name, None) for name in ("mask", "score", "scale"))
    dropout_p, deterministic = keywords.pop("dropout_p", 0.0), keywords.pop("deterministic", False)
    backend, method, team = keywords.pop("backend", None), keywords.pop("method", "auto"), keywords.pop("team", None)
    seqlen, seqlen_kv = keywords.pop("seqlen", None), keywords.pop("seqlen_kv", None)
    cu_seqlens, cu_seqlens_kv = keywords.pop("cu_seqlens", None), keywords.pop("cu_seqlens_kv", None)
    layout = keywords.pop("layout", "contiguous")
    keywords.pop("return_lse", None)
    if keywords:
        raise TypeError(f"explain takes the keywords of strobe.parallel.attention, not {', '.join(keywords)}")
    q, k, v, score = autocast(q, k, v, score)
    options = _checked(q, k, v, mask, score, scale, cu_seqlens, cu_seqlens_kv, dropout_p, deterministic, backend)
    training = wants_gradient(q, k, v, options.sinks)
    team = of_mesh if team is None and method == "usp" else team
    place = "", ranks, rank
    plan = _plan(q, k, place, seqlen, seqlen_kv, cu_seqlens, cu_seqlens_kv, method, layout, team, training)
    job, how, inputs = settle(options, plan, q, k, v)
    work, machine = choice.workload(job, q, v, training), choice.machine_of(q.device, ranks)
    found = choice.Choice(work, machine, (choice.predict(work, how, machine),))
    if method in ("auto", "usp") and not team:
        found = choice.choose(work, machine, method)
    explanation = Explanation(found, tuple(_kernels(job, how, rank, inputs)))
    print(explanation)
    return explanation


def _kernels(job: Job, how: Method, rank: int, x: Inputs) -> Iterator[tuple[str, dispatch.Explanation]]:
    """The launches of a rank's first computations, in words, and the choice of a kernel for each."""
    arch = arch_of(x.q.device)
    for what, problem in problems_of(job, how, rank, x):
        yield what, dispatch.explain_problem(problem, arch, job.options.backend)


# ---- decode


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score: Score | None = None,
    scale: float | None = None,
    seqused_kv: torch.Tensor | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries, which all ranks have, to keys of which each rank has some: the same result on every rank.

    Each rank attends to its own keys, all exchange what they found (out in float32, and its LSE), and merge it in the order of
    ranks. Which keys a rank has does not matter, for every query sees all of them. No gradient.

    Args:
        q: [batch, n, heads_q, head_dim], the same on all ranks.
        k, v: this rank's keys and values, [batch, n_kv, heads_kv, ...]; n_kv may differ between ranks, and be 0.
        score: softcap and sinks, the same on all ranks.
        seqused_kv: int32 [batch], how many of this rank's keys each batch entry uses.
        scale, group, return_lse, backend: as for `attention`.

    Raises:
        ValueError, TypeError, ParallelError: as `attention`.
    """
    found, _ = _group(group)
    q, k, v, score = autocast(q, k, v, score)
    options = checked_options(q, k, v, None, score, scale, None, None, None, None, None, seqused_kv, False, backend)
    if options.alibi is not None or options.bias is not None or options.score_function is not None:
        raise ValueError("score must have softcap and sinks alone: decode does not know where a rank's keys stand")
    if wants_gradient(q, k, v, options.sinks):
        raise ValueError("decode has no gradient: call it under torch.no_grad()")
    links = links_of(known_group(found))
    agree_on_queries(links, options, q, k, v)
    out, lse = run(decoding(options, links.rank, links.ranks, Inputs(q, k, v)), links)
    return (out, lse) if return_lse else out


# ---- shards


def shard(
    x: torch.Tensor, dim: int = 1, *, group: dist.ProcessGroup | DeviceMesh | None = None, layout: str = "contiguous",
    cu_seqlens: torch.Tensor | None = None, rank: int | None = None, ranks: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """This rank's rows of a whole tensor, of any kind (hidden states, labels, document numbers): a copy, differentiable.

    dim: which dim the sequence is. cu_seqlens: the bounds of packed sequences along it. rank, ranks: another rank's, or
    without a group.
    """
    rank, ranks = _rank(group, rank, ranks)
    sharding = _sharding_of(x.shape[dim], cu_seqlens, ranks, layout)
    return x.index_select(dim, sharding.index(rank, rank, x.device))


def positions(
    seqlen: int | None = None, *, group: dist.ProcessGroup | DeviceMesh | None = None, layout: str = "contiguous",
    cu_seqlens: torch.Tensor | None = None, rank: int | None = None, ranks: int | None = None, device=None,
) -> torch.Tensor:  # fmt: skip
    """Where this rank's rows stand, each in its own sequence, as rotary embeddings need it: int64 [n].

    seqlen: rows of the whole sequence; with cu_seqlens leave it None.
    """
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueError("positions takes seqlen or cu_seqlens, one of the two")
    rank, ranks = _rank(group, rank, ranks)
    sharding = _sharding_of(seqlen, cu_seqlens, ranks, layout)
    pieces = [torch.arange(piece.start, piece.stop) for both in sharding.pieces(rank, rank) for piece in both]
    return torch.cat(pieces or [torch.arange(0)]).to(device)


def unshard(
    x: torch.Tensor, dim: int = 1, *, group: dist.ProcessGroup | DeviceMesh | None = None, layout: str = "contiguous",
    seqlen: int | None = None, cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The whole tensor, on every rank, from its shards. It has no gradient: x must not require one.

    seqlen: rows of the whole, needed where the shards differ in length.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x must not require a gradient: unshard has none; pass x.detach()")
    found, _ = _group(group)
    rank, ranks = dist.get_rank(found), dist.get_world_size(found)
    whole = None if cu_seqlens is not None else _length("seqlen", seqlen, x.shape[dim] * ranks)
    sharding = _sharding_of(whole, cu_seqlens, ranks, layout)
    rows = sum(sharding.rows(rank, rank))
    if x.shape[dim] != rows:
        raise ValueError(f"x must have the {rows} rows of rank {rank} of {ranks} in dim {dim}, got {x.shape[dim]}")
    return run(_unshard(x, dim % x.dim(), rank, sharding), links_of(known_group(found)))


def _unshard(x: torch.Tensor, dim: int, rank: int, sharding: Sharding):
    whole = gathering("the shards of a tensor", rank, range(sharding.ranks), [Item(x, dim, None, sharding, lambda _: range(0))])
    yield Wait((yield whole.start))
    return whole.rows()[0]


def _rank(group, rank: int | None, ranks: int | None) -> tuple[int, int]:
    if rank is not None and ranks is not None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
        return rank, ranks
    if ranks is not None:
        raise ValueError("ranks goes with rank, got it alone")
    found, _ = _group(group)
    return dist.get_rank(found) if rank is None else rank, dist.get_world_size(found)


def _sharding_of(seqlen: int | None, cu_seqlens: torch.Tensor | None, ranks: int, layout: str) -> Sharding:
    if cu_seqlens is None:
        return checked([_length("seqlen", seqlen, 0)], ranks, layout)
    lengths = lengths_of("cu_seqlens", cu_seqlens)
    if seqlen is not None and seqlen != sum(lengths):
        raise ValueError(f"cu_seqlens must end at the {seqlen} rows given, got {sum(lengths)}")
    return checked(lengths, ranks, layout)


# ---- one process for all ranks


def simulate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    ranks: int,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    method: str = "auto",
    layout: str = "contiguous",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    team: int | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What `ranks` processes that call `attention` compute, to the bit, in this one: of whole q, k and v, the whole result.

    The ranks run one after the other, each until it waits for another. Arguments are those of `attention`, the tensors' and
    Document's numbers whole; differentiable in q, k, v and the sinks.
    """
    q, k, v, score = autocast(q, k, v, score)
    options = _checked(q, k, v, mask, score, scale, cu_seqlens, cu_seqlens_kv, dropout_p, deterministic, backend)
    training = wants_gradient(q, k, v, options.sinks)
    seqlen, seqlen_kv = (q.shape[1], k.shape[1]) if cu_seqlens is None else (None, None)
    place = "", ranks, 0
    plan = _plan(q, k, place, seqlen, seqlen_kv, cu_seqlens, cu_seqlens_kv, method, layout, team, training)
    if options.dropout:
        options = replace(options, seed=new_seed(q.device))
    out, lse = _Simulated.apply(q, k, v, options.sinks, options, plan)
    return (out, lse) if return_lse else out


class _Simulated(torch.autograd.Function):
    """All ranks in one process, as one function."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, options: Options, plan: Plan):
        q_of, kv_of = plan.shardings()
        row, calls = 0 if options.cu_seqlens_q is not None else 1, []
        for rank in range(plan.ranks):
            rows, keys = (of.index(rank, rank, q.device) for of in (q_of, kv_of))
            own = q.index_select(row, rows), k.index_select(row, keys), v.index_select(row, keys)
            document_q, document_kv = options.document_q, options.document_kv
            if document_q is not None and document_kv is not None:
                document_q, document_kv = document_q.index_select(1, rows), document_kv.index_select(1, keys)
            here = replace(options, document_q=document_q, document_kv=document_kv)
            job, how, inputs = settle(here, replace(plan, rank=rank), *own)
            calls.append((job, how, rank, inputs))
        results = run_together([forward(*call) for call in calls])
        ctx.calls, ctx.results, ctx.shardings, ctx.row, ctx.sinks, ctx.like = (
            calls,
            results,
            (q_of, kv_of),
            row,
            sinks,
            (q, k, v),
        )
        order = q_of.order(0, plan.ranks - 1, q.device)
        out = torch.cat([one.out for one in results], row).index_select(row, order)
        return out, torch.cat([one.lse for one in results], -1).index_select(-1, order)

    @staticmethod
    def backward(ctx, dout, dlse):
        q_of, kv_of = ctx.shardings
        programs, dsinks = [], None
        for (job, how, rank, inputs), results in zip(ctx.calls, ctx.results, strict=True):
            rows = q_of.index(rank, rank, dout.device)
            dout_here, dlse_here = dout.index_select(ctx.row, rows), dlse.index_select(-1, rows)
            upstream = Upstream(results.out, results.lse, dout_here, dlse_here)
            programs.append(backward(job, how, rank, inputs, upstream))
            if ctx.sinks is not None:
                share = of_sinks(ctx.sinks, upstream, True)
                dsinks = share if dsinks is None else dsinks + share
        sums = run_together(programs)
        found = []
        for number, (like, sharding) in enumerate(zip(ctx.like, (q_of, kv_of, kv_of), strict=True)):
            joined = torch.cat([one[number].to(like.dtype) for one in sums], ctx.row)
            found.append(joined.index_select(ctx.row, sharding.order(0, sharding.ranks - 1, joined.device)))
        return *found, dsinks, None, None
