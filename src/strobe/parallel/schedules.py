"""What a rank does, step by step: its launches, and the exchanges beside them.

    ulysses(u)   u ranks of a team trade: each has all rows of the team, of a share of the heads, and trades back at the end
    ring         keys and values travel around the teams; each team merges what its rows get from them, in float32. In the
                 backward the gradients of keys and values travel one step behind them, and then home
    usp          both: a ring of teams. ring is usp with teams of one, ulysses is usp with one team
    allgather    every rank gets all keys, a few heads at a time, those of the next heads while it computes with these; in the
                 backward it gives the gradients back, which each rank adds up in the order of ranks

All are generators (see `strobe.parallel.links`): the same steps run in processes, in one process, and on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from strobe.call.options import Options
from strobe.parallel.links import Message, Parcel, Request, Start, Wait, packed, parcel_of
from strobe.parallel.merge import merge_into
from strobe.parallel.sharding import Sharding
from strobe.parallel.work import (
    Heads,
    Inputs,
    Job,
    Results,
    Rows,
    Sums,
    attend,
    attend_part,
    attend_to_own_keys,
    differentiate,
    launches_between,
    nothing,
    problems_between,
    wide,
    without_keys,
    zero_sums,
)
from strobe.problem import AttentionProblem, Upstream


class Compute(NamedTuple):
    """Asks for what some rows get from some keys, or give back to them. `run` computes it; `dry` returns what looks like it."""

    what: str
    job: Job
    q: Rows
    kv: Rows
    heads: Heads
    backward: bool
    run: Callable[[], Any]
    dry: Callable[[], Any] | None = None


Step = Generator[Request, Any, Any]


class Method(NamedTuple):
    """How ranks share the work: "allgather", with how many groups of heads; or "usp", with how many ranks a team."""

    name: str
    size: int


# ---- trades


class Item(NamedTuple):
    """A tensor to trade: which dims are its rows and its heads (None: it has none), whose rows they are, and which heads a rank
    of the group gets."""

    x: torch.Tensor
    rows: int
    heads: int | None
    sharding: Sharding
    heads_of: Callable[[int], range]

    def of_heads(self, rank: int) -> torch.Tensor:
        """The part that a rank gets."""
        if self.heads is None:
            return self.x
        heads = self.heads_of(rank)
        return self.x.narrow(self.heads, heads.start, len(heads))

    def shape(self, rows_of: int, heads_of: int) -> tuple[int, ...]:
        """The shape of the rows of one rank, of the heads of another."""
        shape = list(self.x.shape)
        shape[self.rows] = sum(self.sharding.rows(rows_of, rows_of))
        if self.heads is not None:
            shape[self.heads] = len(self.heads_of(heads_of))
        return tuple(shape)


class Gathering(NamedTuple):
    """An exchange that brings all rows of a team, of a rank's own heads, together."""

    start: Start
    parcels: dict[int, Parcel]
    buffers: dict[int, torch.Tensor]
    items: Sequence[Item]
    rank: int
    team: range

    def rows(self) -> list[torch.Tensor]:
        """The tensors, when the exchange has ended: the team's rows in order."""
        by_rank = {rank: self.parcels[rank].open(self.buffers[rank]) for rank in self.buffers}
        by_rank[self.rank] = [item.of_heads(self.rank) for item in self.items]
        joined = []
        for number, item in enumerate(self.items):
            all_rows = torch.cat([by_rank[rank][number] for rank in self.team], item.rows)
            order = item.sharding.order(self.team[0], self.team[-1], all_rows.device)
            joined.append(_in_order(all_rows, item.rows, order))
        return joined


def gathering(what: str, rank: int, team: range, items: Sequence[Item]) -> Gathering:
    """The exchange in which each rank of a team gives its rows, and gets those of all, of the heads that it is to have."""
    device, (forth, back) = items[0].x.device, _in_turn(rank, team)
    dtypes = tuple(item.x.dtype for item in items)
    parcels = {other: Parcel(tuple(item.shape(other, rank) for item in items), dtypes) for other in back}
    buffers = {other: parcels[other].buffer(device) for other in back}
    sends = [Message(other, packed([item.of_heads(other) for item in items])) for other in forth]
    return Gathering(Start(what, sends, [Message(*one) for one in buffers.items()]), parcels, buffers, items, rank, team)


class Return(NamedTuple):
    """An exchange that brings rows back to the ranks that have them, with all heads; heads that several ranks had are added
    up."""

    start: Start
    parcels: dict[int, Parcel]
    buffers: dict[int, torch.Tensor]
    own: list[torch.Tensor]
    items: Sequence[Item]
    rank: int
    team: range

    def into(self, whole: Sequence[torch.Tensor]) -> None:
        """Add the rows to tensors of all heads, when the exchange has ended, in the order of ranks."""
        for other in self.team:
            parts = self.own if other == self.rank else self.parcels[other].open(self.buffers[other])
            for item, sums, part in zip(self.items, whole, parts, strict=True):
                assert item.heads is not None
                heads = item.heads_of(other)
                sums.narrow(item.heads, heads.start, len(heads)).add_(part)


def returning(what: str, rank: int, team: range, items: Sequence[Item]) -> Return:
    """The exchange in which each rank of a team gives back what the others' rows got. items: all rows of the team, in order, of
    the rank's own heads."""
    forth, others = _in_turn(rank, team)
    parts: dict[int, list[torch.Tensor]] = {other: [] for other in team}
    for item in items:
        back = item.sharding.back(team[0], team[-1], item.x.device)
        sizes = [sum(item.sharding.rows(other, other)) for other in team]
        for other, part in zip(team, _in_order(item.x, item.rows, back).split(sizes, item.rows), strict=True):
            parts[other].append(part)
    dtypes = tuple(item.x.dtype for item in items)
    parcels = {other: Parcel(tuple(item.shape(rank, other) for item in items), dtypes) for other in others}
    buffers = {other: parcels[other].buffer(items[0].x.device) for other in others}
    start = Start(what, [Message(x, packed(parts[x])) for x in forth], [Message(*one) for one in buffers.items()])
    return Return(start, parcels, buffers, parts[rank], items, rank, team)


def _in_turn(rank: int, team: range) -> tuple[list[int], list[int]]:
    """The other ranks of a team in the order in which a rank sends to them, and receives from them: at each turn every rank
    sends to another one, so that no two meet at a link."""
    size, place = len(team), rank - team.start
    forth = [team[(place + turn) % size] for turn in range(1, size)]
    return forth, [team[(place - turn) % size] for turn in range(1, size)]


def _in_order(x: torch.Tensor, dim: int, order: torch.Tensor) -> torch.Tensor:
    return x if order.numel() < 2 else x.index_select(dim, order)


# ---- who has what


def heads_of(job: Job, size: int, place: int) -> Heads:
    """The heads of one of `size` ranks of a team: query heads evenly, and the key heads that they share."""
    each = job.heads_q // size
    q, group = range(place * each, (place + 1) * each), job.heads_q // job.heads_kv
    return Heads(q, range(q.start // group, (q.stop - 1) // group + 1))


def divides(heads_q: int, heads_kv: int, size: int) -> bool:
    """Whether a team of this size can share the heads: every rank has whole groups of query heads, or a part of one."""
    return heads_q % size == 0 and (heads_kv % size == 0 or size % heads_kv == 0)


def team_of(rank: int, size: int) -> range:
    """The ranks of a rank's team."""
    return range(rank - rank % size, rank - rank % size + size)


@lru_cache(maxsize=256)
def _hops(known: tuple, size: int, q: Sharding, kv: Sharding) -> int:
    ring = q.ranks // size
    for hop in range(ring - 1, 0, -1):
        pairs = ((_rows(q, team, size), _rows(kv, (team - hop) % ring, size)) for team in reversed(range(ring)))
        if any(launches_between(*known, *pair) for pair in pairs):
            return hop
    return 0


def _rows(sharding: Sharding, team: int, size: int) -> Rows:
    return Rows(sharding, team * size, team * size + size - 1)


def hops(job: Job, size: int) -> int:
    """How often keys travel on around a ring of teams of this size: as far as some team sees some of them."""
    known = job.band, job.by_number, job.options.alibi is not None, job.packed
    return _hops(known, size, job.q, job.kv)


# ---- forward


def forward(job: Job, method: Method, rank: int, x: Inputs) -> Step:
    """The program of a rank's forward: returns the Results of its rows."""
    job = yield from _with_seed(job, rank)
    if method.name == "allgather":
        return (yield from _allgather(job, method.size, rank, x))
    return (yield from _usp(job, method.size, rank, x))


def _attends(job: Job, q: Rows, kv: Rows, x: Inputs, heads: Heads) -> Compute:
    run, dry = partial(attend, job, q, kv, x, heads), partial(nothing, job, x.q, x.v, heads, x.q.dtype)
    return Compute("all keys", job, q, kv, heads, False, run, dry)


def _differentiates(job: Job, q: Rows, kv: Rows, x: Inputs, heads: Heads, upstream: Upstream, sums: Sums) -> Compute:
    run = partial(differentiate, job, q, kv, x, heads, upstream, sums)
    return Compute(f"keys of ranks {kv.first}..{kv.last}", job, q, kv, heads, True, run)


def problems_of(job: Job, method: Method, rank: int, x: Inputs) -> Iterator[tuple[str, AttentionProblem]]:
    """A rank's first computations, in words, as problems: its own keys, and those of the rank or team before it."""
    size = 1 if method.name == "allgather" else method.size
    heads = heads_of(job, method.size, rank % method.size)
    if method.name == "allgather" or size == job.q.ranks:
        q_rows = Rows(job.q, rank, rank) if method.name == "allgather" else Rows(job.q, 0, job.q.ranks - 1)
        pairs = [("all keys", Rows(job.kv, 0, job.kv.ranks - 1))]
    else:
        team, ring = rank // size, job.q.ranks // size
        q_rows = _rows(job.q, team, size)
        pairs = [("own keys", _rows(job.kv, team, size)), ("keys of the one before", _rows(job.kv, (team - 1) % ring, size))]
    for what, keys in pairs:
        for launch, problem in problems_between(job, q_rows, keys, x, heads, merged=what != "all keys"):
            yield f"{what}, {launch}", problem


def _with_seed(job: Job, rank: int) -> Step:
    """The job with the seed of rank 0, so that all drop the same."""
    seed = job.options.seed
    if seed is None or job.q.ranks == 1:
        return job
    buffer = packed([seed])
    others = [Message(other, buffer) for other in range(1, job.q.ranks)]
    start = Start("the seed of dropout", others, []) if rank == 0 else Start("the seed of dropout", [], [Message(0, buffer)])
    ticket = yield start
    yield Wait(ticket)
    return replace(job, options=replace(job.options, seed=parcel_of([seed]).open(buffer)[0]))


def _items(
    job: Job, team: range, x: Inputs, extra: Sequence[torch.Tensor] = (), lse: Sequence[torch.Tensor] = ()
) -> list[Item]:
    """q, k, v, what is like out, what is like an LSE, and the document numbers, to be traded for heads."""
    size = len(team)

    def of_q(rank: int) -> range:
        return heads_of(job, size, rank % size).q

    def of_kv(rank: int) -> range:
        return heads_of(job, size, rank % size).kv

    row, items = job.row_dim, []
    items.append(Item(x.q, row, row + 1, job.q, of_q))
    items += [Item(y, row, row + 1, job.kv, of_kv) for y in (x.k, x.v)]
    items += [Item(y, row, row + 1, job.q, of_q) for y in extra]
    items += [Item(y, y.dim() - 1, y.dim() - 2, job.q, of_q) for y in lse]
    if x.document_q is not None and x.document_kv is not None:
        items += [Item(x.document_q, 1, None, job.q, of_q), Item(x.document_kv, 1, None, job.kv, of_kv)]
    return items


def _usp(job: Job, size: int, rank: int, x: Inputs) -> Step:
    team = team_of(rank, size)
    heads = heads_of(job, size, rank % size)
    q_rows, kv_rows = Rows(job.q, team[0], team[-1]), Rows(job.kv, team[0], team[-1])
    if size > 1:
        trade = gathering("the trade of rows for heads", rank, team, _items(job, team, x))
        yield Wait((yield trade.start))
        x = Inputs(*trade.rows())
    if size == job.q.ranks:
        results = yield _attends(job, q_rows, kv_rows, x, heads)
    else:
        results = yield from _ring(job, size, rank, q_rows, x, heads)
    if size > 1:
        results = yield from _trade_back(job, rank, team, results, heads)
    return results


def _trade_back(job: Job, rank: int, team: range, results: Results, heads: Heads) -> Step:
    row, size = job.row_dim, len(team)

    def of_q(other: int) -> range:
        return heads_of(job, size, other % size).q

    out, lse = results
    items = [Item(out, row, row + 1, job.q, of_q), Item(lse, lse.dim() - 1, lse.dim() - 2, job.q, of_q)]
    trade = returning("the trade of heads for rows", rank, team, items)
    yield Wait((yield trade.start))
    whole = [
        y.new_zeros(_with_heads(item.shape(rank, rank), item.heads, job.heads_q))
        for y, item in zip(results, items, strict=True)
    ]
    trade.into(whole)
    return Results(*whole)


def _with_heads(shape: tuple[int, ...], dim: int | None, heads: int) -> tuple[int, ...]:
    assert dim is not None
    return *shape[:dim], heads, *shape[dim + 1 :]


class _Keys(NamedTuple):
    """Two buffers in which the keys of teams travel: one is read and sent, the other received."""

    buffers: list[torch.Tensor]
    parcels: list[Parcel]

    def message(self, step: int, team: int, rank: int) -> Message:
        """The keys of a team, in the buffer of a step, to or from a rank."""
        return Message(rank, self.buffers[step % 2][: self.parcels[team].bytes])

    def of(self, step: int, team: int) -> list[torch.Tensor]:
        """The tensors of a team that a step reads."""
        return self.parcels[team].open(self.buffers[step % 2])


def _keys(tensors: Sequence[torch.Tensor], row_dims: Sequence[int], rows: Sequence[Rows], own: int, used: int) -> _Keys:
    """Buffers for tensors like these, of any team; the first holds these, of the team `own`."""
    parcels = []
    for of_team in rows:
        shapes = tuple((*x.shape[:dim], of_team.total, *x.shape[dim + 1 :]) for x, dim in zip(tensors, row_dims, strict=True))
        parcels.append(Parcel(shapes, tuple(x.dtype for x in tensors)))
    most = max(parcel.bytes for parcel in parcels)
    buffers = [torch.empty(most, dtype=torch.uint8, device=tensors[0].device) for _ in range(used)]
    for view, x in zip(parcels[own].open(buffers[0]), tensors, strict=True):
        view.copy_(x)
    return _Keys(buffers, parcels)


def _ring(job: Job, size: int, rank: int, q_rows: Rows, x: Inputs, heads: Heads) -> Step:
    ring, own, last = job.q.ranks // size, rank // size, hops(job, size)
    rows = [_rows(job.kv, team, size) for team in range(ring)]
    tensors = [x.k, x.v] + ([] if x.document_kv is None else [x.document_kv])
    row_dims = [job.row_dim, job.row_dim, 1][: len(tensors)]
    keys = _keys(tensors, row_dims, rows, own, 2 if last else 1)
    sums = nothing(job, x.q, x.v, heads, wide(x.q.dtype))
    for hop in range(last + 1):
        team, next_team = (own - hop) % ring, (own - hop - 1) % ring
        if hop < last:
            ticket = yield Start(
                f"keys on hop {hop + 1} of {last}",
                [keys.message(hop, team, (rank + size) % job.q.ranks)],
                [keys.message(hop + 1, next_team, (rank - size) % job.q.ranks)],
            )
        k, v, *documents = keys.of(hop, team)
        here = Inputs(x.q, k, v, x.document_q, *documents)
        part = partial(attend_part, job, q_rows, rows[team], here, heads, sums)
        yield Compute(f"keys of ranks {rows[team].first}..{rows[team].last}", job, q_rows, rows[team], heads, False, part)
        if hop < last:
            yield Wait(ticket)
    return Results(sums.out.to(x.q.dtype), sums.lse)


def _allgather(job: Job, groups: int, rank: int, x: Inputs) -> Step:
    everyone = range(job.q.ranks)
    q_rows, kv_rows = Rows(job.q, rank, rank), Rows(job.kv, 0, job.q.ranks - 1)
    out, lse = [], []
    trade = _keys_of_group(job, groups, 0, rank, everyone, x)
    ticket = yield trade.start
    for group in range(groups):
        yield Wait(ticket)
        k, v, *documents = trade.rows()
        if group + 1 < groups:
            trade = _keys_of_group(job, groups, group + 1, rank, everyone, x)
            ticket = yield trade.start
        heads = heads_of(job, groups, group)
        q = x.q.narrow(job.row_dim + 1, heads.q.start, len(heads.q))
        results = yield _attends(job, q_rows, kv_rows, Inputs(q, k, v, x.document_q, *documents), heads)
        out.append(results.out)
        lse.append(results.lse)
    return Results(torch.cat(out, job.row_dim + 1), torch.cat(lse, 0 if job.packed else 1))


def _keys_of_group(job: Job, groups: int, group: int, rank: int, everyone: range, x: Inputs) -> Gathering:
    """The exchange of all keys of a group of heads, and their document numbers."""
    row, of_group = job.row_dim, _always(heads_of(job, groups, group).kv)
    items = [Item(y, row, row + 1, job.kv, of_group) for y in (x.k, x.v)]
    items += [] if x.document_kv is None else [Item(x.document_kv, 1, None, job.kv, of_group)]
    return gathering(f"the keys of head group {group + 1} of {groups}", rank, everyone, items)


def _always(heads: range) -> Callable[[int], range]:
    """The same heads for every rank."""
    return lambda _: heads


def decoding(options: Options, rank: int, ranks: int, x: Inputs) -> Step:
    """The program of a rank's decode: out and lse, merged from what all ranks found, in the order of ranks."""
    mine = attend_to_own_keys(options, x)
    others = [other for other in range(ranks) if other != rank]
    parcel, buffer = parcel_of(mine), packed(mine)
    buffers = {other: parcel.buffer(buffer.device) for other in others}
    start = Start("what ranks found", [Message(x, buffer) for x in others], [Message(*one) for one in buffers.items()])
    yield Wait((yield start))
    sums = without_keys(options.sinks, mine)
    for other in range(ranks):
        merge_into(sums.out, sums.lse, *(mine if other == rank else parcel.open(buffers[other])))
    return Results(sums.out.to(x.q.dtype), sums.lse)


# ---- backward


def backward(job: Job, method: Method, rank: int, x: Inputs, upstream: Upstream) -> Step:
    """The program of a rank's backward: returns the gradients of its q, k and v, wide."""
    job = yield from _with_seed(job, rank)
    if method.name == "allgather":
        return (yield from _allgather_backward(job, method.size, rank, x, upstream))
    return (yield from _usp_backward(job, method.size, rank, x, upstream))


def _usp_backward(job: Job, size: int, rank: int, x: Inputs, upstream: Upstream) -> Step:
    team = team_of(rank, size)
    heads = heads_of(job, size, rank % size)
    q_rows, kv_rows = Rows(job.q, team[0], team[-1]), Rows(job.kv, team[0], team[-1])
    own = x
    if size > 1:
        out, lse, dout, dlse = upstream
        of_lse = [lse] if dlse is None else [lse, dlse]
        trade = gathering("the trade of rows for heads", rank, team, _items(job, team, x, (out, dout), of_lse))
        yield Wait((yield trade.start))
        q, k, v, out, dout, *rest = trade.rows()
        x = Inputs(q, k, v, *rest[len(of_lse) :])
        upstream = Upstream(out, rest[0], dout, None if dlse is None else rest[1])
    if size == job.q.ranks:
        sums = zero_sums(x)
        yield _differentiates(job, q_rows, kv_rows, x, heads, upstream, sums)
    else:
        sums = yield from _ring_backward(job, size, rank, q_rows, x, heads, upstream)
    if size > 1:
        items = [item._replace(x=y) for item, y in zip(_items(job, team, own)[:3], sums, strict=True)]
        back = returning("the trade of gradients for rows", rank, team, items)
        yield Wait((yield back.start))
        sums = zero_sums(own)
        back.into(sums)
    return sums


def _ring_backward(job: Job, size: int, rank: int, q_rows: Rows, x: Inputs, heads: Heads, upstream: Upstream) -> Step:
    ring, own, last = job.q.ranks // size, rank // size, hops(job, size)
    rows = [_rows(job.kv, team, size) for team in range(ring)]
    tensors = [x.k, x.v] + ([] if x.document_kv is None else [x.document_kv])
    keys = _keys(tensors, [job.row_dim, job.row_dim, 1][: len(tensors)], rows, own, 2 if last else 1)
    wide_keys = [torch.empty(y.shape, dtype=wide(y.dtype), device=y.device) for y in (x.k, x.v)]
    travel = _keys(wide_keys, [job.row_dim] * 2, rows, own, 2 if last else 1)
    forth, back = (rank + size) % job.q.ranks, (rank - size) % job.q.ranks
    dq = torch.zeros(x.q.shape, dtype=wide(x.q.dtype), device=x.q.device)
    ticket = None
    for hop in range(last + 1):
        team, next_team = (own - hop) % ring, (own - hop - 1) % ring
        if hop < last:
            key_ticket = yield Start(
                f"keys on hop {hop + 1} of {last}", [keys.message(hop, team, forth)], [keys.message(hop + 1, next_team, back)]
            )
        k, v, *documents = keys.of(hop, team)
        here = Inputs(x.q, k, v, x.document_q, *documents)
        zeros = zero_sums(here)._replace(q=dq)
        yield _differentiates(job, q_rows, rows[team], here, heads, upstream, zeros)
        if ticket is not None:
            yield Wait(ticket)
        for sum_, new in zip(travel.of(hop, team), zeros[1:], strict=True):
            sum_.copy_(new) if hop == 0 else sum_.add_(new)
        if hop < last:
            ticket = yield Start(
                f"gradients of keys on hop {hop + 1} of {last}",
                [travel.message(hop, team, forth)], [travel.message(hop + 1, next_team, back)],
            )  # fmt: skip
            yield Wait(key_ticket)
    if last:
        home, from_whom = (rank - last * size) % job.q.ranks, (rank + last * size) % job.q.ranks
        ticket = yield Start(
            "gradients of keys on their way home",
            [travel.message(last, (own - last) % ring, home)], [travel.message(last + 1, own, from_whom)],
        )  # fmt: skip
        yield Wait(ticket)
    dk, dv = travel.of(last + 1 if last else 0, own)
    return Sums(dq, dk, dv)


def _allgather_backward(job: Job, groups: int, rank: int, x: Inputs, upstream: Upstream) -> Step:
    everyone, row = range(job.q.ranks), job.row_dim
    q_rows, kv_rows = Rows(job.q, rank, rank), Rows(job.kv, 0, job.q.ranks - 1)
    sums = zero_sums(x)
    trade = _keys_of_group(job, groups, 0, rank, everyone, x)
    ticket = yield trade.start
    returns: list = []
    for group in range(groups):
        yield Wait(ticket)
        k, v, *documents = trade.rows()
        if group + 1 < groups:
            trade = _keys_of_group(job, groups, group + 1, rank, everyone, x)
            ticket = yield trade.start
        heads = heads_of(job, groups, group)
        of_q = [y.narrow(row + 1, heads.q.start, len(heads.q)) for y in (x.q, upstream.out, upstream.dout, sums.q)]
        lse = upstream.lse.narrow(-2, heads.q.start, len(heads.q))
        dlse = None if upstream.dlse is None else upstream.dlse.narrow(-2, heads.q.start, len(heads.q))
        here = Inputs(of_q[0], k, v, x.document_q, *documents)
        found = zero_sums(here)._replace(q=of_q[3])
        yield _differentiates(job, q_rows, kv_rows, here, heads, Upstream(of_q[1], lse, of_q[2], dlse), found)
        if returns:
            returns = yield from _returned(returns, sums)
        items = [Item(y, row, row + 1, job.kv, _always(heads.kv)) for y in found[1:]]
        back = returning(f"the gradients of head group {group + 1} of {groups}", rank, everyone, items)
        returns = [back, (yield back.start)]
    yield from _returned(returns, sums)
    return sums


def _returned(returns: list, sums: Sums) -> Step:
    """End the return of a head group's gradients, and add them up."""
    back, ticket = returns
    yield Wait(ticket)
    back.into(sums[1:])
    return []
