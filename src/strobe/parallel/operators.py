"""The torch operators `strobe::parallel_forward` and `strobe::parallel_backward`: opaque to compilers, differentiable.

Before a call exchanges anything else, the ranks of a group agree on what they call: on a CPU at every call, on a GPU, where the
host would wait for it, at the first call of a kind.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from strobe.call.operators import library
from strobe.call.options import NAMES, SCHEMA, Options, learned_of
from strobe.call.torch_internals import group_of_name
from strobe.parallel import choice
from strobe.parallel.links import Links, ParallelError, run
from strobe.parallel.schedules import Method, backward, divides, forward
from strobe.parallel.sharding import Sharding, checked, lengths_of
from strobe.parallel.work import Inputs, Job
from strobe.problem import OPTIONAL, Upstream
from strobe.reference.precision import without_autocast
from strobe.scores import sinks_gradient

PLAN = (
    "Tensor? whole_cu_q, Tensor? whole_cu_kv, SymInt whole_q, SymInt whole_kv, str layout, int ranks, int rank, str method, "
    "int team, bool training, str group"
)
"""The part of a schema that says how the work is shared."""

library.define(f"parallel_forward(Tensor q, Tensor k, Tensor v, {SCHEMA}, {PLAN}) -> (Tensor out, Tensor lse)")
library.define(
    f"parallel_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {SCHEMA}, {PLAN}, "
    "bool learn_sinks) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)


@dataclass(frozen=True)
class Plan:
    """How the work is shared, as operators take it: what a caller says of the whole sequences, and the method by its name."""

    cu_q: torch.Tensor | None
    cu_kv: torch.Tensor | None
    """Bounds of the packed whole, on any device; None: those of the queries."""
    seqlen_q: int
    seqlen_kv: int
    """Rows and keys of the dense whole."""
    layout: str
    ranks: int
    rank: int
    method: str
    team: int
    """Ranks of a team of "usp"; 0: as the cost model says."""
    training: bool
    group: str

    def arguments(self) -> tuple:
        """The plan as arguments of the operators."""
        return tuple([getattr(self, one.name) for one in fields(self)])

    def shardings(self) -> tuple[Sharding, Sharding]:
        """The shardings of queries and of keys."""
        of_q, of_kv = [self.seqlen_q], [self.seqlen_kv]
        if self.cu_q is not None:
            of_q = lengths_of("cu_seqlens", self.cu_q)
            of_kv = of_q if self.cu_kv is None else lengths_of("cu_seqlens_kv", self.cu_kv)
            if len(of_q) != len(of_kv):
                raise ValueError(f"cu_seqlens_kv must have as many sequences as cu_seqlens, {len(of_q)}, got {len(of_kv)}")
        return checked(of_q, self.ranks, self.layout), checked(of_kv, self.ranks, self.layout)


_PLAN = len(fields(Plan))


class Settled(NamedTuple):
    """A rank's call, checked: what all ranks know, how the work is shared, and the rank's own tensors."""

    job: Job
    method: Method
    inputs: Inputs


def settle(options: Options, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Settled:
    """Check a rank's call and choose its method. ValueError for a wrong shard, or a method that cannot be."""
    q_of, kv_of = plan.shardings()
    packed = options.cu_seqlens_q is not None
    for name, x, sharding in (("q", q, q_of), ("k", k, kv_of)):
        rows, have = sum(sharding.rows(plan.rank, plan.rank)), x.shape[0 if packed else 1]
        if rows != have:
            raise ValueError(
                f"{name} must have the {rows} rows of rank {plan.rank} of {plan.ranks} ({plan.layout}, {sharding.total} in "
                f"all), got {have}: cut it with strobe.parallel.shard, and give seqlen where ranks have different numbers"
            )
    nothing: dict[str, Any] = dict.fromkeys(OPTIONAL)
    kept = {name: getattr(options, name) for name in ("alibi", "sinks", "seed")}
    job = Job(replace(options, **nothing | kept), q_of, kv_of, packed, q.shape[-2], k.shape[-2])
    return Settled(job, _method(plan, job, q, v), Inputs(q, k, v, options.document_q, options.document_kv))


def _method(plan: Plan, job: Job, q: torch.Tensor, v: torch.Tensor) -> Method:
    """The method that a user means. ValueError if it cannot be."""
    if plan.method == "allgather":
        return Method("allgather", choice.head_groups(job.heads_kv))
    if plan.method == "ring":
        return Method("usp", 1)
    size = plan.ranks if plan.method == "ulysses" else plan.team
    if not size:
        return chosen(plan, job, q, v).method
    if plan.ranks % size:
        raise ValueError(f"team must divide the {plan.ranks} ranks, got {size}")
    if not divides(job.heads_q, job.heads_kv, size):
        raise ValueError(
            f"method {plan.method!r} shares heads among {size} ranks, which must divide q's heads, and divide k's or be a "
            f"multiple of them, got {job.heads_q} and {job.heads_kv}"
        )
    return Method("usp", size)


def chosen(plan: Plan, job: Job, q: torch.Tensor, v: torch.Tensor) -> choice.Choice:
    """What the cost model says of a call."""
    work = choice.workload(job, q, v, plan.training)
    return choice.choose(work, choice.machine_of(q.device, plan.ranks), plan.method)


# ---- groups


_LINKS: dict[str, Links] = {}
"""The name of a process group -> its links."""


def known_group(group: dist.ProcessGroup) -> str:
    """The name by which operators find a group again."""
    name = group.group_name
    if group_of_name is None:
        _remember(name, group)
    return name


def links_of(name: str) -> Links:
    """The links of a known group."""
    if group_of_name is not None:
        _remember(name, group_of_name(name))
    return _LINKS[name]


def _remember(name: str, group: dist.ProcessGroup) -> None:
    if name not in _LINKS or _LINKS[name].group is not group:
        _LINKS[name] = Links(group)
        _agreed.cache_clear()


_FACTS = (
    "dims", "batch", "heads of q", "heads of k", "head dim", "head dim of v", "dtype", "seqlen of q", "seqlen of k",
    "sequences",
    "mask, score, scale, dropout or other options", "layout or method", "direction",
)  # fmt: skip


def _facts(options: Options, settled: Settled, q, k, v, direction: str) -> tuple[int, ...]:
    """What all ranks must have alike, by `_FACTS`."""
    tensors = dict.fromkeys(OPTIONAL)
    given = [name for name in OPTIONAL if getattr(options, name) is not None]
    others = repr(replace(options, max_q=0, max_kv=0, backend=None, **tensors)), given  # type: ignore[arg-type]
    job = settled.job
    return (
        q.dim(), 0 if job.packed else q.shape[0], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], _hash(q.dtype),
        job.q.total, job.kv.total, _hash((job.q.lengths, job.kv.lengths)), _hash(others),
        _hash((job.q.layout, settled.method)), _hash(direction),
    )  # fmt: skip


def _hash(x: Any) -> int:
    return zlib.crc32(repr(x).encode())


def _agree(links: Links, facts: tuple[int, ...], device: torch.device) -> None:
    if device.type == "cpu":
        _exchange_facts(links, facts, device)
    else:
        _agreed(links, facts, device)


@lru_cache(maxsize=4096)
def _agreed(links: Links, facts: tuple[int, ...], device: torch.device) -> None:
    _exchange_facts(links, facts, device)


def _exchange_facts(links: Links, facts: tuple[int, ...], device: torch.device) -> None:
    """Compare facts with those of all ranks. ValueError on all if they differ; ParallelError if a rank does not answer."""
    mine = torch.tensor(facts, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(links.ranks)]
    try:
        dist.all_gather(found, mine, group=links.group)
        table = torch.stack(found).tolist()
    except RuntimeError as error:
        raise ParallelError(
            f"strobe.parallel: on rank {links.rank} of {links.ranks} the ranks could not compare what they call: one of the "
            f"group died, is later than the group's timeout, or called something else ({str(error).splitlines()[0]})"
        ) from error
    for column, name in enumerate(_FACTS):
        values = [row[column] for row in table]
        if len(set(values)) > 1:
            shown = values if max(values) < 2**24 or "seqlen" in name else _as_letters(values)
            raise ValueError(f"all ranks must call attention alike, but they differ in {name}: {shown} on ranks 0, 1, ...")


def _as_letters(values: list[int]) -> str:
    """Which of some hashes are the same, in words."""
    names = {value: chr(ord("A") + number % 26) for number, value in enumerate(dict.fromkeys(values))}
    return ", ".join(names[value] for value in values)


def agree_on_queries(links: Links, options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Compare with all ranks a call of which each has other keys, in any number."""
    same, none = replace(options, seqused_kv=None), Sharding((), links.ranks, "")
    job = Job(same, Sharding((q.shape[1],), links.ranks, ""), none, False, q.shape[-2], k.shape[-2])
    _agree(links, _facts(same, Settled(job, Method("decode", 0), Inputs(q, k, v)), q, k, v, "decode"), q.device)


# ---- the operators


@without_autocast
def _forward(q, k, v, *arguments):
    options, plan = _split(arguments)
    settled, links = settle(options, plan, q, k, v), links_of(plan.group)
    _agree(links, _facts(options, settled, q, k, v, "forward"), q.device)
    return tuple(run(forward(settled.job, settled.method, plan.rank, settled.inputs), links))


@without_autocast
def _backward(dout, dlse, q, k, v, out, lse, *arguments):
    *rest, learn_sinks = arguments
    options, plan = _split(rest)
    settled, links = settle(options, plan, q, k, v), links_of(plan.group)
    _agree(links, _facts(options, settled, q, k, v, "backward"), q.device)
    upstream = Upstream(out, lse, dout.contiguous(), dlse)
    sums = run(backward(settled.job, settled.method, plan.rank, settled.inputs, upstream), links)
    return *(x.to(like.dtype) for x, like in zip(sums, (q, k, v), strict=True)), of_sinks(options.sinks, upstream, learn_sinks)


def of_sinks(sinks: torch.Tensor | None, upstream: Upstream, learn: bool) -> torch.Tensor:
    """What the rows of a rank give to the gradient of the sinks; empty if nobody asks for it."""
    if sinks is None or not learn:
        return upstream.out.new_empty(0)
    wide = upstream.lse.dtype
    delta = (upstream.out.to(wide) * upstream.dout.to(wide)).sum(-1).transpose(-1, -2)
    return sinks_gradient(sinks, upstream.lse, delta if upstream.dlse is None else delta - upstream.dlse)


def _split(arguments: Sequence) -> tuple[Options, Plan]:
    return Options(*arguments[: len(NAMES)]), Plan(*arguments[len(NAMES) : len(NAMES) + _PLAN])


def _fake_forward(q, k, v, *arguments):
    packed = Options(*arguments[: len(NAMES)]).cu_seqlens_q is not None
    lse = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(lse, dtype=dtype)


def _fake_backward(dout, dlse, q, k, v, out, lse, *arguments):
    sinks = Options(*arguments[: len(NAMES)]).sinks
    of_learned = sinks if arguments[-1] and sinks is not None else q.new_empty(0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), of_learned.new_empty(of_learned.shape)


def _setup(ctx, inputs, output) -> None:
    q, k, v, *arguments = inputs
    options = Options(*arguments[: len(NAMES)])
    cu_q, cu_kv, *ctx.plan = arguments[len(NAMES) :]
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_kv, *options.tensors())
    nothing: dict[str, Any] = dict.fromkeys(OPTIONAL)
    ctx.options = replace(options, **nothing)
    ctx.learn_sinks = "sinks" in learned_of(options)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse, cu_q, cu_kv, *tensors = ctx.saved_tensors
    options = replace(ctx.options, **dict(zip(OPTIONAL, tensors, strict=True)))
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.strobe.parallel_backward(
        dout, dlse, q, k, v, out, lse, *options.arguments(), cu_q, cu_kv, *ctx.plan, ctx.learn_sinks
    )
    of_options = (dsinks if name == "sinks" and ctx.learn_sinks else None for name in NAMES)
    return dq, dk, dv, *of_options, *(None for _ in range(_PLAN))


for _key in ("CPU", "CUDA"):
    library.impl("parallel_forward", _forward, _key)
    library.impl("parallel_backward", _backward, _key)
torch.library.register_fake("strobe::parallel_forward", _fake_forward, lib=library)
torch.library.register_fake("strobe::parallel_backward", _fake_backward, lib=library)
torch.library.register_autograd("strobe::parallel_forward", _gradients, setup_context=_setup, lib=library)
