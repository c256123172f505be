"""What a rank computes of an attention whose sequence is sharded: some of its rows against some of its keys, and merges.

Any rows against any keys are one launch: the kernels are told where both stand (`strobe.places`). Where that makes no
difference (all is seen, or a shard meets itself under a causal mask, or rows see what stands before them) it is an ordinary
problem of the rows and keys that matter, and is handed over as one, so that every kernel may take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from strobe.call import dispatch
from strobe.call.options import Options, describe, operands_of
from strobe.masks import Causal, Full, Mask, TileClass
from strobe.parallel.merge import merge_into
from strobe.parallel.sharding import Sharding, cumulative
from strobe.places import Place, Places
from strobe.problem import AttentionProblem, Operands, Upstream


@dataclass(frozen=True)
class Rows:
    """The rows (or keys) that the ranks first..last have together."""

    sharding: Sharding
    first: int
    last: int

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each sequence."""
        return self.sharding.rows(self.first, self.last)

    @cached_property
    def places(self) -> list[Place]:
        """Where they stand in each sequence."""
        return self.sharding.places(self.first, self.last)

    @cached_property
    def total(self) -> int:
        """Rows of all sequences."""
        return sum(self.lengths)

    @property
    def whole(self) -> bool:
        """Whether they are all rows."""
        return self.first == 0 and self.last == self.sharding.ranks - 1

    def bounds(self, device: torch.device) -> torch.Tensor:
        """The cu_seqlens of packed rows."""
        return _bounds(self, device)


class Heads(NamedTuple):
    """Some of the query heads, and the key heads that they share, by their numbers."""

    q: range
    kv: range


@dataclass(frozen=True)
class Job:
    """An attention, as all ranks know it."""

    options: Options
    """They hold slopes, sinks and the seed alone of its tensors: bounds and documents belong to rows."""
    q: Sharding
    kv: Sharding
    packed: bool
    heads_q: int
    heads_kv: int

    @property
    def heads(self) -> Heads:
        """All heads."""
        return Heads(range(self.heads_q), range(self.heads_kv))

    @cached_property
    def band(self) -> Mask:
        """The part of the mask that is arithmetic."""
        return Mask(self.options.left, self.options.right, self.options.prefix)

    @property
    def by_number(self) -> bool:
        """Whether something looks at the numbers of rows, keys and heads themselves: functions and dropout."""
        return bool(self.options.mask_function or self.options.score_function or self.options.dropout)

    @property
    def row_dim(self) -> int:
        """The dim of rows in q, k, v and out; in an LSE it is the last."""
        return 0 if self.packed else 1


class Launch(NamedTuple):
    """Some rows against some keys in one launch: an ordinary problem with this band, or, placed, all of them and the whole's
    band."""

    rows: slice
    keys: slice
    band: Mask
    placed: bool


_ALL = slice(None)


@lru_cache(maxsize=4096)
def launches_between(band: Mask, by_number: bool, slopes: bool, packed: bool, q: Rows, kv: Rows) -> tuple[Launch, ...]:
    """`launches` of a job of which this is known."""
    classes = [_classes(band, p, n, r, m) for p, n, r, m in zip(q.places, q.lengths, kv.places, kv.lengths, strict=True)]
    found = [one for of_sequence in classes for one in of_sequence.values()]
    if all(one is TileClass.EMPTY for one in found):
        return ()
    if by_number or (slopes and not (q.whole and kv.whole)):
        return (Launch(_ALL, _ALL, band, True),)
    if all(one is TileClass.FULL for one in found):
        return (Launch(_ALL, _ALL, Full(), False),)
    if q.whole and kv.whole:
        return (Launch(_ALL, _ALL, band, False),)
    if band == Causal() and q.places == kv.places:
        return (Launch(_ALL, _ALL, band, False),)
    if packed:
        return (Launch(_ALL, _ALL, band, True),)
    (seen,) = classes
    return _rectangle(seen, q.places[0], q.total, kv.places[0], kv.total) or (Launch(_ALL, _ALL, band, True),)


def _pieces(place: Place, n: int) -> list[range]:
    """The pieces, none empty and none a continuation of the other, of a shard's n rows, as ranges of them."""
    if place.near == place.far:
        return [range(n)] if n else []
    return [piece for piece in (range(place.cut), range(place.cut, n)) if piece]


def _classes(band: Mask, q: Place, n_q: int, kv: Place, n_kv: int) -> dict[tuple[range, range], TileClass]:
    """What a band leaves of each piece of rows against each piece of keys."""
    return {
        (rows, keys): band.tile_class(
            q.position(rows[0]), q.position(rows[-1]), kv.position(keys[0]), kv.position(keys[-1]), q.whole, kv.whole
        )
        for rows in _pieces(q, n_q)
        for keys in _pieces(kv, n_kv)
    }


def _rectangle(seen: dict[tuple[range, range], TileClass], q: Place, n_q: int, kv: Place, n_kv: int) -> tuple[Launch, ...]:
    """One launch without a mask, where the pairs that are seen are some pieces of rows against some of keys, whole; or none."""
    some = [pair for pair, one in seen.items() if one is not TileClass.EMPTY]
    rows, keys = ({pair[side] for pair in some} for side in (0, 1))
    if len(some) != len(rows) * len(keys) or any(seen[pair] is not TileClass.FULL for pair in some):
        return ()
    own, theirs = (slice(min(x.start for x in pieces), max(x.stop for x in pieces)) for pieces in (rows, keys))
    return (Launch(own, theirs, Full(), False),)


def before_them(job: Job, q: Rows, kv: Rows) -> tuple[Launch, ...]:
    """Launches of rows against all keys, where they see but what stands before them: a piece of the rows and the keys up to its
    last row are aligned as an ordinary problem is. No launches where the mask or a row is not of that kind."""
    options = job.options
    if job.packed or job.by_number or q.whole or not kv.whole or options.right != 0 or options.prefix is not None:
        return ()
    place, found = q.places[0], []
    shift = kv.places[0].whole - place.whole
    for piece in _pieces(place, q.total):
        first, last = place.position(piece[0]) + shift, place.position(piece[-1]) + shift
        if first < 0:
            return ()
        begin = 0 if options.left is None else max(0, first - options.left)
        found.append(Launch(slice(piece.start, piece.stop), slice(begin, last + 1), job.band, False))
    return tuple(found)


def launches(job: Job, q: Rows, kv: Rows) -> tuple[Launch, ...]:
    """The launches of rows against keys; none if nothing is seen."""
    return launches_between(job.band, job.by_number, job.options.alibi is not None, job.packed, q, kv)


class Inputs(NamedTuple):
    """The tensors of some rows and keys: [batch, n, heads, D], or packed [n, heads, D]; document numbers [batch, n] or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    document_q: torch.Tensor | None = None
    document_kv: torch.Tensor | None = None


def _problem(
    job: Job, launch: Launch, q: Rows, kv: Rows, x: Inputs, heads: Heads, sinks: bool, partial: bool
) -> tuple[AttentionProblem, Operands]:
    """A launch as a problem."""
    options, device = job.options, x.q.device
    alibi = None if options.alibi is None else options.alibi[..., heads.q.start : heads.q.stop]
    own = replace(
        options,
        left=launch.band.left,
        right=launch.band.right,
        prefix=launch.band.prefix,
        alibi=alibi,
        sinks=options.sinks[heads.q.start : heads.q.stop] if sinks and options.sinks is not None else None,
        document_q=None if x.document_q is None else x.document_q[:, launch.rows],
        document_kv=None if x.document_kv is None else x.document_kv[:, launch.keys],
    )
    if job.packed:
        own = replace(
            own, cu_seqlens_q=q.bounds(device), cu_seqlens_kv=kv.bounds(device), max_q=max(q.lengths, default=0),
            max_kv=max(kv.lengths, default=0),
        )  # fmt: skip
    q_here, k_here, v_here = x[:3]
    if not job.packed:
        q_here, k_here, v_here = q_here[:, launch.rows], k_here[:, launch.keys], v_here[:, launch.keys]
    operands = operands_of(q_here, k_here, v_here, own)
    placed = launch.placed or (job.by_number and len(heads.q) < job.heads_q)
    if placed:
        batch = len(q.lengths) if job.packed else x.q.shape[0]
        operands = operands._replace(places=_places(q, kv, heads.q.start, batch, device))
    return replace(describe(operands, own), placed=placed, partial=partial), operands


@lru_cache(maxsize=256)
def _bounds(rows: Rows, device: torch.device) -> torch.Tensor:
    return torch.tensor(cumulative(rows.lengths), dtype=torch.int32, device=device)


@lru_cache(maxsize=1024)
def _places(q: Rows, kv: Rows, first_head: int, batch: int, device: torch.device) -> torch.Tensor:
    numbers = [Places(a, b, first_head).numbers() for a, b in zip(q.places, kv.places, strict=True)]
    numbers = numbers * batch if len(numbers) == 1 else numbers
    return torch.tensor(numbers, dtype=torch.int32, device=device)


class Results(NamedTuple):
    """out and lse of some rows."""

    out: torch.Tensor
    lse: torch.Tensor


def nothing(job: Job, q: torch.Tensor, v: torch.Tensor, heads: Heads, dtype: torch.dtype) -> Results:
    """The results of rows that have seen nothing yet: 0, and an LSE of -inf or, as that is a part without a value, the sink."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    shape = (q.shape[1], q.shape[0]) if job.packed else (q.shape[0], q.shape[2], q.shape[1])
    sinks = job.options.sinks
    of_heads = None if sinks is None else sinks[heads.q.start : heads.q.stop]
    return without_keys(of_heads, Results(out, q.new_empty(shape, dtype=wide(q.dtype))))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are kept."""
    return torch.promote_types(dtype, torch.float32)


def attend_part(job: Job, q: Rows, kv: Rows, x: Inputs, heads: Heads, sum_: Results) -> None:
    """Merge into `sum_`, which is wide, what rows get from keys."""
    for launch in launches(job, q, kv):
        problem, operands = _problem(job, launch, q, kv, x, heads, sinks=False, partial=True)
        part = dispatch.forward(problem, operands, job.options.backend)
        mine = _results_of_rows(job, launch, sum_)
        merge_into(mine.out, mine.lse, *part)


def attend(job: Job, q: Rows, kv: Rows, x: Inputs, heads: Heads) -> Results:
    """out and lse of rows that see all of their keys here: in q's dtype, with their sinks."""
    found = before_them(job, q, kv) or launches(job, q, kv)
    if len(found) == 1 and found[0].rows == _ALL:
        problem, operands = _problem(job, found[0], q, kv, x, heads, sinks=True, partial=False)
        return Results(*dispatch.forward(problem, operands, job.options.backend))
    results = nothing(job, x.q, x.v, heads, x.q.dtype)
    for launch in found:
        problem, operands = _problem(job, launch, q, kv, x, heads, sinks=True, partial=False)
        found_here = dispatch.forward(problem, operands, job.options.backend)
        for mine, new in zip(_results_of_rows(job, launch, results), found_here, strict=True):
            mine.copy_(new)
    return results


def _results_of_rows(job: Job, launch: Launch, results: Results) -> Results:
    """The rows of a launch."""
    if job.packed:
        return results
    return Results(results.out[:, launch.rows], results.lse[:, :, launch.rows])


def _upstream_of_rows(job: Job, launch: Launch, upstream: Upstream) -> Upstream:
    """The rows of a launch."""
    if job.packed:
        return upstream
    out, lse, dout, dlse = upstream
    of_dlse = None if dlse is None else dlse[:, :, launch.rows]
    return Upstream(out[:, launch.rows], lse[:, :, launch.rows], dout[:, launch.rows], of_dlse)


def problems_between(
    job: Job, q: Rows, kv: Rows, x: Inputs, heads: Heads, merged: bool
) -> Iterator[tuple[str, AttentionProblem]]:  # fmt: skip
    """The launches of rows against keys, in words, as problems; x: of the rank's own rows, of which dtypes and dims count."""
    kind = x.q.new_empty(0).dtype, "meta"
    device = torch.device("meta")

    def like(y: torch.Tensor, rows: Rows, number: int) -> torch.Tensor:
        shape = (rows.total, number, y.shape[-1]) if job.packed else (y.shape[0], rows.total, number, y.shape[-1])
        return torch.empty(shape, dtype=kind[0], device=device)

    given = Inputs(like(x.q, q, len(heads.q)), like(x.k, kv, len(heads.kv)), like(x.v, kv, len(heads.kv)))
    if x.document_q is not None and x.document_kv is not None:
        ids = (torch.empty(x.q.shape[0], rows.total, dtype=torch.int32, device=device) for rows in (q, kv))
        given = given._replace(document_q=next(ids), document_kv=next(ids))
    found = launches(job, q, kv) if merged else before_them(job, q, kv) or launches(job, q, kv)
    for launch in found:
        words = "placed" if launch.placed else f"an ordinary problem with the mask {launch.band}"
        yield words, _problem(job, launch, q, kv, given, heads, sinks=not merged, partial=merged)[0]


def attend_to_own_keys(options: Options, x: Inputs) -> Results:
    """What queries get from keys of which they see all, wide and without sinks."""
    options = replace(options, sinks=None)
    operands = operands_of(x.q, x.k, x.v, options)
    return Results(*dispatch.forward(replace(describe(operands, options), partial=True), operands, options.backend))


def without_keys(sinks: torch.Tensor | None, like: Results) -> Results:
    """The results of rows that have seen nothing yet, shaped as others: 0, and an LSE of -inf or the sink."""
    lse = torch.full_like(like.lse, -torch.inf)
    if sinks is not None:
        lse.copy_(sinks[:, None].expand(lse.shape))
    return Results(torch.zeros_like(like.out), lse)


class Sums(NamedTuple):
    """Gradients of q, k and v, to which launches add."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def zero_sums(x: Inputs) -> Sums:
    """Sums of nothing, wide."""
    return Sums(*(torch.zeros(y.shape, dtype=wide(y.dtype), device=y.device) for y in x[:3]))


def differentiate(job: Job, q: Rows, kv: Rows, x: Inputs, heads: Heads, upstream: Upstream, sums: Sums) -> None:
    """Add to the sums what rows and keys give each other. upstream: of all that the rows see, here or elsewhere."""
    for launch in before_them(job, q, kv) or launches(job, q, kv):
        problem, operands = _problem(job, launch, q, kv, x, heads, sinks=False, partial=True)
        own = _upstream_of_rows(job, launch, upstream)
        found = dispatch.backward(replace(problem, phase="backward"), operands, own, job.options.backend)
        rows, keys = (_ALL, _ALL) if job.packed else ((_ALL, launch.rows), (_ALL, launch.keys))
        sums.q[rows] += found.q
        sums.k[keys] += found.k
        sums.v[keys] += found.v
