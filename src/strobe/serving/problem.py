"""DecodeProblem: attention of a few new queries of each request over the keys that a cache holds.

It keeps to the rules of `strobe.problem`: facts that the host knows, and no tensor, so it has a hash. The tensors travel beside
it, by name, as `DecodeOperands`. How many keys a request has, where they lie and which requests there are is known on the
device alone.

    contiguous   k [entries, size, heads_kv, head_dim]: request b has entry b, or entries[b]
    paged        k [pages, page_size, heads_kv, head_dim]: key t of request b is row t % page_size of page page_table[b, t //
                 page_size]

Request b sees the keys leftpad[b] ... lengths[b] - 1 of its own; its last query stands on the last key. A length counts up to
`capacity` and no further, a page or an entry that is not there has no keys: so whatever these tensors hold, nothing outside of
the cache is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from strobe.masks import Mask
from strobe.problem import Dense, Lengths, Varlen, addressable
from strobe.scores import ScoreFacts, TensorFacts, tensor_facts


@dataclass(frozen=True)
class DecodeProblem:
    """out = softmax(score(scale * q k^T), mask) v over a cache, for heads_q query heads that share heads_kv key heads."""

    lengths: Lengths
    """The requests' queries; as keys, the most that a request can have (`capacity`)."""
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    pages: int
    """How many pages, or entries, the cache has."""
    page_size: int | None = None
    """Keys of a page; None: the cache is contiguous."""
    shared: bool = False
    """Whether v is the first columns of k (the latent of multi-head latent attention)."""
    mask: Mask = field(default_factory=Mask)
    """A band; it has nothing else."""
    score: ScoreFacts = field(default_factory=ScoreFacts)
    """A softcap, ALiBi slopes, sinks; it has nothing else."""
    tree: bool = False
    indexed: bool = False
    leftpad: bool = False
    k_scale: TensorFacts | None = None
    v_scale: TensorFacts | None = None
    with_lse: bool = True
    """Whether the LSE is wanted."""
    deterministic: bool = False
    """Whether a request's bits must not depend on what else is in the batch."""
    unaligned: tuple[str, ...] = ()
    """Names of the tensors whose base or strides are not multiples of 16 bytes."""
    page_rows: tuple[int | None, int | None] = (None, None)
    """Rows of k and of v from one page (or entry) to the next, where that is a whole number."""

    @property
    def batch(self) -> int:
        return self.lengths.batch

    @property
    def capacity(self) -> int:
        """The most keys that a request can have."""
        return self.lengths.seqlen_kv

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv

    @property
    def ragged(self) -> bool:
        """Whether requests have different numbers of queries, packed one after the other."""
        return isinstance(self.lengths, Varlen)

    @property
    def rows(self) -> int:
        """The most rows of a request that share a key head: queries times query heads."""
        return self.lengths.seqlen_q * self.group

    @property
    def out_shape(self) -> tuple[int, ...]:
        lengths = self.lengths
        rows = (lengths.total_q,) if isinstance(lengths, Varlen) else (lengths.batch, lengths.seqlen_q)
        return *rows, self.heads_q, self.head_dim_v

    @property
    def out_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def is_empty(self) -> bool:
        """Whether there is no row of a query, or no key can be."""
        return 0 in self.out_shape or 0 in (self.lengths.seqlen_q, self.capacity, self.pages, self.batch)

    def __str__(self) -> str:
        lengths, dims = self.lengths, [self.head_dim] if self.head_dim == self.head_dim_v else [self.head_dim, self.head_dim_v]
        requests = f"{lengths.batch} request{'s' * (lengths.batch != 1)}"
        queries = f"{'at most ' * self.ragged}{lengths.seqlen_q} {'query' if lengths.seqlen_q == 1 else 'queries'}"
        where = "contiguous" if self.page_size is None else f"pages of {self.page_size}"
        parts = [
            f"decode, {requests} of {queries}, up to {self.capacity} keys ({where})",
            f"heads {self.heads_q} on {self.heads_kv}",
            f"head dim {', '.join(map(str, dims))}{' (v in k)' if self.shared else ''}",
            _name(self.dtype) if self.kv_dtype == self.dtype else f"{_name(self.dtype)}, cache {_name(self.kv_dtype)}",
            f"mask {self.mask}{' & tree' if self.tree else ''}",
            f"score {self.score}",
        ]
        parts += ["deterministic"] if self.deterministic else []
        return "; ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class DecodeOperands(NamedTuple):
    """The tensors of a DecodeProblem, by name. Of the lengths and indices, all are int32 and on q's device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    tree: torch.Tensor | None = None
    """bool [batch, n, n] of any strides, n at least the most queries of a request: whether query i sees the key of query j."""
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    """float32 [batch, heads_kv], or one for each key and head, [pages, page_size, heads_kv]; v_scale likewise."""
    v_scale: torch.Tensor | None = None
    out: torch.Tensor | None = None
    """Where to write the result. Rows that no request has stay as they are."""


class AppendOperands(NamedTuple):
    """The tensors of an append, by name: the cache's, the new keys and values, what turns them. v_cache and v are None where
    the values are columns of k."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor | None
    lengths: torch.Tensor
    page_table: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    q: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    """float32 [batch, heads_kv], by which what is written is divided; v_scale likewise."""
    v_scale: torch.Tensor | None = None


class AppendOptions(NamedTuple):
    """What is no tensor of an append. interleaved: whether the rotary embedding turns neighbours. one_position: whether all
    queries of a request have the position of the first."""

    interleaved: bool
    one_position: bool


class DecodeOptions(NamedTuple):
    """What is no tensor of a call of `decode`. max_q: the most queries of a request whose queries are packed."""

    max_q: int
    head_dim_v: int
    shared: bool
    scale: float
    left: int | None
    right: int | None
    softcap: float
    with_lse: bool
    deterministic: bool
    backend: str | None


def describe(operands: DecodeOperands, options: DecodeOptions) -> DecodeProblem:
    """The DecodeProblem that operands and options describe."""
    q, k, table = operands.q, operands.k, operands.page_table
    batch, capacity = operands.lengths.shape[0], k.shape[1] * (1 if table is None else table.shape[1])
    lengths: Lengths = Dense(batch, q.shape[1], capacity)
    if operands.cu_seqlens_q is not None:
        lengths = Varlen(batch, q.shape[0], batch * capacity, min(options.max_q, q.shape[0]), capacity)
    return DecodeProblem(
        lengths=lengths,
        heads_q=q.shape[-2],
        heads_kv=k.shape[2],
        head_dim=k.shape[3],
        head_dim_v=options.head_dim_v,
        dtype=q.dtype,
        kv_dtype=k.dtype,
        scale=options.scale,
        pages=k.shape[0],
        page_size=None if table is None else k.shape[1],
        shared=options.shared,
        mask=Mask(options.left, options.right),
        score=ScoreFacts(options.softcap, tensor_facts(operands.alibi), sinks=tensor_facts(operands.sinks)),
        tree=operands.tree is not None,
        indexed=operands.entries is not None,
        leftpad=operands.leftpad is not None,
        k_scale=tensor_facts(operands.k_scale),
        v_scale=tensor_facts(operands.v_scale),
        with_lse=options.with_lse,
        deterministic=options.deterministic,
        unaligned=tuple(name for name in ("q", "k", "v", "out") if _unaligned(getattr(operands, name))),
        page_rows=(page_rows(k), page_rows(operands.v)),
    )


def page_rows(x: torch.Tensor) -> int | None:
    """Rows from one page of x to the next, if that is a whole number."""
    page, row = x.stride()[:2]
    if x.shape[0] == 1:
        return x.shape[1]
    return page // row if 0 < row <= page and page % row == 0 else None


def _unaligned(x: torch.Tensor | None) -> bool:
    return x is not None and not addressable(x)


def tokens_of(problem: DecodeProblem, operands: DecodeOperands, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the keys of request `number` lie: their pages (or entries), their rows in these, and whether each is there. Reads
    lengths and tables on the host; a place that is not there is given as the first one."""
    size = problem.page_size
    length = min(max(int(operands.lengths[number]), 0), problem.capacity)
    first = 0 if operands.leftpad is None else min(max(int(operands.leftpad[number]), 0), length)
    tokens = torch.arange(first, length, device=operands.k.device)
    if operands.page_table is not None and size is not None:
        places, rows = operands.page_table[number].long()[tokens // size], tokens % size
    else:
        entry = number if operands.entries is None else int(operands.entries[number])
        places, rows = torch.full_like(tokens, entry), tokens
    there = (places >= 0) & (places < problem.pages)
    return torch.where(there, places, 0), rows, there


def queries_of(problem: DecodeProblem, operands: DecodeOperands, number: int) -> tuple[slice, int]:
    """The rows of q that request `number` has, among all packed rows or among those of its batch entry, and their number.
    Reads cu_seqlens_q on the host, clamped to the rows that there are."""
    lengths = problem.lengths
    if operands.cu_seqlens_q is None or not isinstance(lengths, Varlen):
        return slice(0, lengths.seqlen_q), lengths.seqlen_q
    begin, end = (min(max(int(x), 0), lengths.total_q) for x in operands.cu_seqlens_q[number : number + 2])
    count = min(max(end - begin, 0), lengths.seqlen_q)
    return slice(begin, begin + count), count
