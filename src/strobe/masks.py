"""Masks: which keys a query may see.

Every mask here is one conjunction in normal form, a band around the diagonal, a bidirectional prefix, document numbers, a
function and blocks, so that `Causal() & Window(left=1024) & Document(ids)` is again a `Mask` and a kernel has one thing to
read.

Positions. Query row i of a sequence with n_q queries and n_kv keys stands at position p = i + n_kv - n_q among the
keys: the last query stands on the last key ("bottom-right" alignment). In these terms key j is visible to row p if

    p - left <= j <= p + right        (a bound that is None does not apply)
    j <= p  or  j < prefix            (where a prefix is given)
    document_q[i] == document_kv[j]   (where documents are given)
    the block of (b, h, i, j) says so (where blocks are given)
    f(b, h, i, j)                     (where a function is given)

The five functions below are plain arithmetic on purpose. The host calls them with integers or torch tensors, and the
kernels call *the same source*, compiled by Triton or Gluon (`kernels/common/masks.py`), where a bound that is None
disappears at compile time. What is proven about them on the CPU therefore holds on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch

from strobe.checks import same_tensor
from strobe.functions import Function, both, mask_function


def visible(p, j, n_kv, left, right, prefix):
    """Whether the row at position p sees key j; broadcasts p against j. Documents and functions are the caller's."""
    seen = (j >= 0) & (j < n_kv)
    if right is not None:
        seen = seen & (j <= p + right)
    if left is not None:
        seen = seen & (j >= p - left)
    if prefix is not None:
        seen = seen & ((j <= p) | (j < prefix))
    return seen


def kv_range(p_first, p_last, n_kv, left, right, prefix):
    """[begin, end) of the keys that some row of p_first..p_last sees (empty: end <= begin)."""
    begin = p_first * 0
    end = n_kv
    if right is not None:
        end = min(end, p_last + right + 1)
    if prefix is not None:
        end = min(end, max(p_last + 1, prefix))
    if left is not None:
        begin = max(begin, p_first - left)
    return begin, end


def kv_full(p_first, p_last, n_kv, left, right, prefix):
    """[begin, end) of the keys that every row of p_first..p_last sees (empty: end <= begin)."""
    begin = p_first * 0
    end = n_kv
    if right is not None:
        end = min(end, p_first + right + 1)
    if prefix is not None:
        end = min(end, max(p_first + 1, prefix))
    if left is not None:
        begin = max(begin, p_last - left)
    return begin, end


def q_range(j_first, j_last, p_begin, p_end, left, right, prefix):
    """[begin, end) of the positions in [p_begin, p_end) whose rows see some key of j_first..j_last."""
    begin = p_begin
    end = p_end
    if right is not None:
        begin = max(begin, j_first - right)
    if prefix is not None:
        begin = max(begin, j_first if j_first >= prefix else begin)
    if left is not None:
        end = min(end, j_last + left + 1)
    return begin, end


def q_full(j_first, j_last, p_begin, p_end, left, right, prefix):
    """[begin, end) of the positions in [p_begin, p_end) whose rows see every key of j_first..j_last."""
    begin = p_begin
    end = p_end
    if right is not None:
        begin = max(begin, j_last - right)
    if prefix is not None:
        begin = max(begin, j_last if j_last >= prefix else begin)
    if left is not None:
        end = min(end, j_first + left + 1)
    return begin, end


MAX_BOUND = 1 << 30
"""Positions and bounds are int32 on the device: no sequence may be this long, so a larger bound says no more than this."""


_MAX_INT64 = (1 << 63) - 1
"""Operators take bounds as int64."""


class TileClass(Enum):
    """What a mask leaves of a tile of scores: kernels skip EMPTY tiles and run FULL ones without a mask."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, eq=False)
class Documents:
    """Document numbers of the queries, [batch, n_q], and of the keys, [batch, n_kv]: int32, on the tensors' device."""

    q: torch.Tensor
    kv: torch.Tensor

    def __eq__(self, other) -> bool:
        """Whether two hold the same numbers. Of tensors that are not the same ones it waits for a GPU."""
        if not isinstance(other, Documents):
            return NotImplemented
        return self is other or (same_tensor(self.q, other.q) and same_tensor(self.kv, other.kv))

    def __hash__(self) -> int:
        return hash(tuple(None if x is None else x.shape for x in (self.q, self.kv)))


SOME_DOCUMENTS = Documents(None, None)  # type: ignore[arg-type]
"""What a mask holds that is a fact of a problem: that there are documents, and not which."""


class BlockFacts(NamedTuple):
    """What is known of `Blocks` without their tensors: the rows and the keys of a block."""

    rows: int
    keys: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which pairs are seen, by blocks of rows and keys, each of a multiple of 16.

    kinds: int32 [batch or 1, heads_q or 1, blocks of rows, blocks of keys], contiguous: 0 where no pair of a block is seen, 1
        where all are, n + 2 where pairs[n] says which.
    pairs: uint8 [n, rows, keys], contiguous, 1 where a pair is seen; at least one block, whether or not a kind names it.
    """

    kinds: torch.Tensor
    pairs: torch.Tensor

    def __eq__(self, other) -> bool:
        """Whether two hold the same numbers. Of tensors that are not the same ones it waits for a GPU."""
        if not isinstance(other, Blocks):
            return NotImplemented
        return self is other or (same_tensor(self.kinds, other.kinds) and same_tensor(self.pairs, other.pairs))

    def __hash__(self) -> int:
        return hash((self.kinds.shape, self.pairs.shape))

    def facts(self) -> BlockFacts:
        """The blocks without their tensors."""
        return BlockFacts(*self.pairs.shape[1:])

    def seen(self, i: torch.Tensor, j: torch.Tensor, batches: range, heads: range) -> torch.Tensor:
        """bool [batch or 1, heads or 1, rows, keys], for rows i [rows, 1] and keys j [1, keys]."""
        rows, keys = self.facts()
        kinds = self.kinds if self.kinds.shape[0] == 1 else self.kinds[batches.start : batches.stop]
        kinds = kinds if kinds.shape[1] == 1 else kinds[:, heads.start : heads.stop]
        kinds = kinds[:, :, i // rows, j // keys]
        return (kinds == 1) | ((kinds > 1) & self.pairs[(kinds - 2).clamp(min=0), i % rows, j % keys].bool())

    def hide(self, row_first: int, row_last: int, key_first: int, key_last: int) -> bool:
        """Whether no batch entry and head sees a pair of these rows and keys (bounds inclusive). It waits for a GPU."""
        rows, keys = self.facts()
        within = self.kinds[:, :, row_first // rows : row_last // rows + 1, key_first // keys : key_last // keys + 1]
        return not bool(within.any())


@dataclass(frozen=True)
class Mask:
    """A conjunction of a band (left, right), a prefix, documents, a function and blocks; `&` gives the conjunction of two
    masks."""

    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    documents: Documents | None = None
    function: Function | None = None
    blocks: Blocks | BlockFacts | None = None
    """Blocks of pairs; a problem keeps their facts alone."""

    def __post_init__(self):
        for name in ("left", "right", "prefix"):
            value = getattr(self, name)
            if value is None or isinstance(value, torch.SymInt):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"mask: {name} must be an int or None, got {' '.join(repr(value).split())}")
            if value < 0:
                raise ValueError(f"mask: {name} must be 0 or more (None for no bound), got {value}")
            object.__setattr__(self, name, min(value, _MAX_INT64))

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        if self.documents is not None and other.documents is not None and self.documents is not other.documents:
            raise ValueError("mask: a conjunction can hold one Document mask, got two; combine their numbers into one")
        if self.blocks is not None and other.blocks is not None and self.blocks is not other.blocks:
            raise ValueError("mask: a conjunction can hold the blocks of one mask, got two")
        return Mask(
            left=_least(self.left, other.left),
            right=_least(self.right, other.right),
            prefix=_least(self.prefix, other.prefix),
            documents=self.documents if self.documents is not None else other.documents,
            function=both(self.function, other.function)
            if self.function and other.function
            else self.function or other.function,
            blocks=self.blocks if self.blocks is not None else other.blocks,
        )

    def __str__(self) -> str:
        parts = []
        if self.right == 0 and self.left is None:
            parts.append("causal")
        elif self.left is not None or self.right is not None:
            parts.append(f"window(left={self.left}, right={self.right})")
        if self.prefix is not None:
            parts.append(f"prefix({self.prefix})")
        if self.documents is not None:
            parts.append("documents")
        if self.function is not None:
            parts.append(f"function {self.function}")
        if self.blocks is not None:
            rows, keys = self.blocks.facts() if isinstance(self.blocks, Blocks) else self.blocks
            parts.append(f"blocks of {rows} x {keys}")
        return " & ".join(parts) or "full"

    @property
    def band(self) -> tuple[int | None, int | None, int | None]:
        """(left, right, prefix): the part of the mask that is arithmetic, as the functions above take it."""
        return self.left, self.right, self.prefix

    @property
    def device_band(self) -> tuple[int | None, int | None, int | None]:
        """`band` as kernels take it: the sum of a bound and a position stays within int32."""
        left, right, prefix = (None if bound is None else min(bound, MAX_BOUND) for bound in self.band)
        return left, right, prefix

    def within(self, n_q: int, n_kv: int) -> Mask:
        """The mask of at most n_q rows and n_kv keys, without the bounds that hide none of these, as kernels are faster with
        fewer: a window that is wider than its sequences is a causal mask."""
        wide = {
            "left": self.left is not None and self.left >= n_kv - 1,
            "right": self.right is not None and self.right >= n_q - 1,
            "prefix": self.prefix is not None and self.prefix >= n_kv,
        }
        return replace(self, **{name: None for name, hides_none in wide.items() if hides_none}) if any(wide.values()) else self

    @property
    def is_causal(self) -> bool:
        """True for exactly the causal mask, with nothing else in the conjunction."""
        return self == Causal()

    @property
    def by_pair(self) -> bool:
        """Whether pairs are compared one by one, so that no tile is known to be seen whole."""
        return self.documents is not None or self.function is not None or self.blocks is not None

    def of_batch(self, number: int) -> Mask:
        """The mask of one batch entry, whose documents have a batch of 1; its function is not told the number."""
        if self.documents is None:
            return self
        one = slice(number, number + 1)
        return replace(self, documents=Documents(self.documents.q[one], self.documents.kv[one]))

    def dense(self, n_q: int, n_kv: int, batch: int = 1, heads: int = 1, device=None) -> torch.Tensor:
        """The specification: bool, True where visible; [n_q, n_kv], or [batch, n_q, n_kv] if there are documents (which know
        the batch), or [batch, heads, n_q, n_kv] if there is a function, or are blocks."""
        i = torch.arange(n_q, device=device)[:, None]
        j = torch.arange(n_kv, device=device)[None, :]
        return self.tile(i, j, n_q, n_kv, range(batch), range(heads))

    def tile(
        self, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int, batches: range = range(1), heads: range = range(1),
        numbered: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`dense` for some rows i [rows, 1] and keys j [1, keys]. batches, heads: what a function is told of them; those of
        documents are all that they have. numbered: where the documents have the numbers of these rows and keys, if not at i
        and j, as in a shard."""
        seen = visible(i + (n_kv - n_q), j, n_kv, *self.band).expand(i.shape[0], j.shape[1])
        if self.documents is not None:
            row, key = numbered or (i, j)
            seen = seen & (self.documents.q[:, row[:, 0], None] == self.documents.kv[:, None, key[0]])
            batches = range(batches.start, batches.start + seen.shape[0])
        if isinstance(self.blocks, Blocks):
            seen = (seen[:, None] if seen.dim() == 3 else seen) & self.blocks.seen(i, j, batches, heads)
            seen = seen.expand(len(batches), len(heads), i.shape[0], j.shape[1])
        if self.function is not None:
            batch = torch.arange(batches.start, batches.stop, device=i.device)[:, None, None, None]
            head = torch.arange(heads.start, heads.stop, device=i.device)[:, None, None]
            seen = (seen[:, None] if seen.dim() == 3 else seen) & self.function(batch, head, i, j)
            seen = seen.expand(len(batches), len(heads), i.shape[0], j.shape[1])
        return seen

    def kv_range(self, row_first: int, row_last: int, n_q: int, n_kv: int) -> tuple[int, int]:
        """[begin, end) of the keys that some row of row_first..row_last may see; documents, functions and blocks are not looked
        at."""
        shift = n_kv - n_q
        begin, end = kv_range(row_first + shift, row_last + shift, n_kv, *self.band)
        return begin, max(begin, end)

    def tile_class(self, row_first: int, row_last: int, key_first: int, key_last: int, n_q: int, n_kv: int) -> TileClass:
        """The class of the tile rows x keys (bounds inclusive); with documents, a function or blocks never FULL."""
        begin, end = self.kv_range(row_first, row_last, n_q, n_kv)
        if key_last < begin or key_first >= end:
            return TileClass.EMPTY
        shift = n_kv - n_q
        begin, end = kv_full(row_first + shift, row_last + shift, n_kv, *self.band)
        if begin <= key_first and key_last < end and not self.by_pair:
            return TileClass.FULL
        return TileClass.PARTIAL

    def count(self, n_q: int, n_kv: int, batch: int = 1, heads: int = 1) -> int:
        """How many (row, key) pairs are visible, for FLOPs; where that differs, the mean over batch and heads, rounded.

        With documents, over their batch; with a function or blocks, over `batch` and `heads`."""
        if self.by_pair:
            return round(self._count_pairs(n_q, n_kv, range(batch), range(heads)))
        p = torch.arange(n_kv - n_q, n_kv)
        end = torch.full_like(p, n_kv)
        if self.right is not None:
            end = end.minimum(p + self.right + 1)
        if self.prefix is not None:
            end = end.minimum((p + 1).clamp(min=self.prefix))
        begin = torch.zeros_like(p) if self.left is None else (p - self.left).clamp(min=0)
        return int((end - begin).clamp(min=0).sum())

    def _count_pairs(self, n_q: int, n_kv: int, batches: range, heads: range) -> float:
        """`count`, by looking at every pair, some rows at a time."""
        device = None if self.documents is None else self.documents.q.device
        device = self.blocks.kinds.device if isinstance(self.blocks, Blocks) else device
        j, total = torch.arange(n_kv, device=device)[None, :], 0.0
        for i in torch.arange(n_q, device=device).split(1024):
            seen = self.tile(i[:, None], j, n_q, n_kv, batches, heads)
            total += seen.sum().item() / max(1, seen.shape[:-2].numel())
        return total


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


_FULL, _CAUSAL = Mask(), Mask(right=0)
"""Made once: a call of attention takes little more time than making a mask."""


def Full() -> Mask:
    """Every query sees every key."""
    return _FULL


def Causal() -> Mask:
    """A query sees the keys up to its own position; bottom-right aligned when n_q != n_kv, as flash-attn since 2.1."""
    return _CAUSAL


def Window(left: int | None = None, right: int | None = None) -> Mask:
    """A query at position p sees the keys p - left .. p + right; None leaves that side open."""
    return Mask(left=left, right=right)


def Prefix(length: int) -> Mask:
    """The first `length` keys are seen by all queries, the others causally (a prefix language model)."""
    return Mask(prefix=length)


def Visible(function: Callable) -> Mask:
    """A query sees the keys for which f(batch, head, q_index, kv_index) is True.

    function: a Python function of arithmetic, comparisons and `strobe.math` (see docs/masks.md), given int tensors that
        broadcast to a tile, which returns a bool one. Indices count from 0 in each sequence: unlike `Causal()`, a function
        aligns what it compares itself.
    """
    return Mask(function=mask_function(function))


def Document(q: torch.Tensor, kv: torch.Tensor | None = None) -> Mask:
    """A query sees the keys of its own document: integer tensors [batch, n_q] and [batch, n_kv] (kv=None: the same).

    Any numbers of any integer dtype, of which kernels take int32: wider ones are numbered anew for each batch entry, in their
    order, which sorts them once when the mask is made.
    """
    kv = q if kv is None else kv
    for name, ids in (("q", q), ("kv", kv)):
        if not isinstance(ids, torch.Tensor) or ids.dtype.is_floating_point or ids.dtype.is_complex:
            raise TypeError(f"Document: {name} must be an integer tensor, got {getattr(ids, 'dtype', type(ids).__name__)}")
        if ids.is_nested or ids.layout is not torch.strided:
            raise TypeError(f"Document: {name} must be a dense tensor, got a nested or sparse one")
        if ids.dim() != 2:
            raise ValueError(f"Document: {name} must have shape [batch, length], got {list(ids.shape)}")
    if q.dtype in _FIT_INT32 and kv.dtype in _FIT_INT32:
        q32 = q.to(torch.int32)
        return Mask(documents=Documents(q32, q32 if kv is q else kv.to(torch.int32)))
    return Mask(documents=Documents(*_numbered_anew(q, kv)))


_FIT_INT32 = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32)


def _numbered_anew(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Document numbers as int32: in each batch entry the least of q and kv is 0, the next one 1. Nothing waits for a GPU."""
    ids = q.long() if kv is q else torch.cat([q.long(), kv.long()], 1)
    ids, places = ids.sort(1)
    new = torch.zeros_like(ids, dtype=torch.int32)
    new[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
    new = torch.empty_like(new).scatter_(1, places, new)
    return (new, new) if kv is q else (new[:, : q.shape[1]].contiguous(), new[:, q.shape[1] :].contiguous())


def with_documents(mask: Mask, q: torch.Tensor | None, kv: torch.Tensor | None) -> Mask:
    """The mask with its documents set from tensors that may be absent (how operators hand them over)."""
    return mask if q is None or kv is None else replace(mask, documents=Documents(q, kv))
