"""A BlockMask as a `strobe.Mask`: the mask_mod's formula, read as a band, a prefix, documents or a function, and compared with
the BlockMask's lists, which have the last word."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from strobe.integrations.flex.formulas import Formula, NoFormula, formula_of, function_of, leaves
from strobe.integrations.flex.tracing import PAIR, Argument, Entry, Traced, trace
from strobe.masks import Blocks, Document, Full, Mask, Prefix, Visible, Window

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


class Shape(NamedTuple):
    """The pairs of a call."""

    batch: int
    heads: int
    n_q: int
    n_kv: int


@dataclass(frozen=True)
class Read:
    """A mask_mod in Strobe's terms."""

    mask: Mask
    keys: int
    """How many of the keys the mask is among: no row sees a later one."""


# ---- a formula as a mask in normal form


@dataclass
class _Band:
    """The pairs with low <= q_index - kv_index <= high and kv_index < keys, and what else must be true of them."""

    low: int | None = None
    high: int | None = None
    keys: int | None = None
    prefix: int | None = None
    documents: list[tuple[Entry, Entry]] = field(default_factory=list)
    others: list[Formula] = field(default_factory=list)

    def at_least(self, bound: int) -> None:
        self.low = bound if self.low is None else max(self.low, bound)

    def at_most(self, bound: int) -> None:
        self.high = bound if self.high is None else min(self.high, bound)

    def before(self, key: int) -> None:
        self.keys = key if self.keys is None else min(self.keys, key)


def read(traced: Traced, shape: Shape) -> Read:
    """The mask that a mask_mod means. NoFormula, which says what stands in the way, if it has no such form."""
    band = _Band()
    for term in _terms(formula_of(traced)):
        _add_term(band, term)
    n_q, n_kv = shape.n_q, shape.n_kv
    keys = min(n_kv, *(x for x in (band.keys, None if band.low is None else n_q - band.low) if x is not None), n_kv)
    if keys <= 0:
        raise NoFormula("hides every key")
    shift = keys - n_q  # the query at q_index stands at q_index + shift
    mask = Full()
    if band.low is not None:
        mask &= Window(right=-shift - band.low)
    if band.high is not None:
        if band.high + shift < 0:
            raise NoFormula("shows a query only keys far behind it")
        mask &= Window(left=band.high + shift)
    if band.prefix is not None:
        if shift != 0:
            raise NoFormula("is a prefix with other numbers of queries and keys")
        mask &= Prefix(band.prefix)
    if band.documents:
        mask &= _documents(band.documents, shape, keys)
    for term in band.others:
        if "entry" in leaves(term):
            raise NoFormula("reads a tensor, but for documents")
        mask &= Visible(function_of(term, "mask_mod", PAIR))
    return Read(mask, keys)


def _terms(formula: Formula) -> Iterator[Formula]:
    if formula[0] == "and":
        yield from _terms(formula[1])
        yield from _terms(formula[2])
    elif formula[0] in ("le", "lt") and formula[1][0] == "abs":
        yield formula[0], formula[1][1], formula[2]
        yield formula[0], ("sub", ("number", 0), formula[1][1]), formula[2]
    elif formula != ("number", True):
        yield formula


def _add_term(band: _Band, term: Formula) -> None:
    if (pair := _document_pair(term)) is not None:
        band.documents.append(pair)
    elif (bound := _prefix(term)) is not None:
        band.prefix = bound if band.prefix is None else min(band.prefix, bound)
    elif (line := _comparison(term)) is None or not _add_line(band, *line):
        band.others.append(term)


def _add_line(band: _Band, word: str, q: int, kv: int, constant: int) -> bool:
    """Add q * q_index + kv * kv_index + constant `word` 0 to a band; False if it is none."""
    if (q, kv) in ((-1, 1), (0, -1)):
        word, q, kv, constant = _FLIPPED[word], -q, -kv, -constant
    if (q, kv) == (1, -1):  # q_index - kv_index `word` -constant
        if word in ("ge", "gt", "eq"):
            band.at_least(-constant + (word == "gt"))
        if word in ("le", "lt", "eq"):
            band.at_most(-constant - (word == "lt"))
        return True
    if (q, kv) == (0, 1) and word in ("lt", "le"):
        band.before(-constant + (word == "le"))
        return True
    return False


def _comparison(term: Formula) -> tuple[str, int, int, int] | None:
    """A comparison of integers as (word, a, b, c): a * q_index + b * kv_index + c `word` 0."""
    if term[0] in _FLIPPED:
        left, right = _line(term[1]), _line(term[2])
        if left is not None and right is not None:
            q, kv, constant = (a - b for a, b in zip(left, right, strict=True))
            return term[0], q, kv, constant
    return None


def _line(x: Formula) -> tuple[int, int, int] | None:
    """x as (a, b, c): a * q_index + b * kv_index + c, in integers."""
    if x[0] in ("q_index", "kv_index"):
        return int(x[0] == "q_index"), int(x[0] == "kv_index"), 0
    if x[0] == "number":
        return (0, 0, x[1]) if isinstance(x[1], int) and not isinstance(x[1], bool) else None
    if x[0] in ("add", "sub"):
        a, b = _line(x[1]), _line(x[2])
        if a is None or b is None:
            return None
        sign = 1 if x[0] == "add" else -1
        return a[0] + sign * b[0], a[1] + sign * b[1], a[2] + sign * b[2]
    return None


def _prefix(term: Formula) -> int | None:
    """n, if a term is kv_index <= q_index or kv_index < n."""
    if term[0] != "or":
        return None
    bands = []
    for part in term[1:]:
        line, band = _comparison(part), _Band()
        if line is None or not _add_line(band, *line):
            return None
        bands.append(band)
    for causal, prefix in (bands, bands[::-1]):
        if causal == _Band(low=0) and prefix == _Band(keys=prefix.keys) and prefix.keys is not None and prefix.keys >= 0:
            return prefix.keys
    return None


def _document_pair(term: Formula) -> tuple[Entry, Entry] | None:
    """(that of queries, that of keys), if a term compares what two tensors of integers say of the query and of the key."""
    if term[0] != "eq" or term[1][0] != "entry" or term[2][0] != "entry":
        return None
    found: dict[str, Entry] = {}
    for _, entry in term[1:]:
        if not isinstance(entry, Entry) or entry.base.needs or entry.dtype.is_floating_point or entry.dtype.is_complex:
            return None
        names = [index.name if isinstance(index, Argument) else "" for index in entry.indices]
        if names in (["q_index"], ["batch", "q_index"], ["kv_index"], ["batch", "kv_index"]):
            found[names[-1]] = entry
    return (found["q_index"], found["kv_index"]) if len(found) == 2 else None


def _documents(pairs: list[tuple[Entry, Entry]], shape: Shape, keys: int) -> Mask:
    if len(pairs) > 1:
        raise NoFormula("compares documents by several tensors")
    tensors = []
    for entry, n in zip(pairs[0], (shape.n_q, keys), strict=True):
        x = Traced(entry.base).of_pairs({}) if not isinstance(entry.base, Argument) else None
        assert x is not None
        if x.shape[-1] < n or (x.dim() == 2 and x.shape[0] < shape.batch):
            raise NoFormula(f"indexes a tensor of shape {list(x.shape)} beyond its end")
        x = x if x.dim() == 2 else x[None].expand(shape.batch, -1)
        tensors.append(x[: shape.batch, :n])
    return Document(*tensors)


# ---- a BlockMask's lists


def is_block_mask(x) -> bool:
    """Whether x is PyTorch's BlockMask, asked by what it has: importing its module imports the compiler."""
    return all(hasattr(x, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE"))


def listed_blocks(block_mask: Any, blocks: tuple[int, int]) -> torch.Tensor:
    """int8 [batch or 1, heads or 1, blocks of rows, blocks of keys]: 0 where a block is not listed, 1 where pairs in it are for
    the mask_mod to decide, 2 where it is listed as seen whole."""
    kinds = _table(block_mask.kv_num_blocks, block_mask.kv_indices, blocks[1])
    if block_mask.full_kv_num_blocks is not None:
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks[1])
        kinds = torch.where(full.bool(), 2, kinds)
    return kinds[..., : blocks[0], :].to(torch.int8)


def _table(number: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Whether [..., row, column] is among the first number[..., row] of indices[..., row, :]."""
    places = torch.arange(indices.shape[-1], device=indices.device)
    counted = places < number[..., None]
    table = indices.new_zeros(*indices.shape[:-1], columns + 1, dtype=torch.int32)
    return table.scatter_(-1, torch.where(counted, indices, columns).long(), 1)[..., :columns]


@dataclass(frozen=True)
class Lists:
    """What a BlockMask shows, by its lists and its mask_mod together."""

    kinds: torch.Tensor
    """int32 [batch or 1, heads or 1, blocks of rows, blocks of keys]: 0 where a block shows no pair, 1 where all, 2 where
    some."""
    size: tuple[int, int]
    """Rows and keys of these blocks: the BlockMask's, or what kernels take in their place."""
    agree: bool
    """Whether a pair is seen exactly if the mask_mod says so: no pair that it shows lies in a block that is not listed, and
    none that it hides in a block that is listed as seen whole."""


_SIZE, _LARGEST = 128, 1024


def lists_of(block_mask: Any, traced: Traced, shape: Shape) -> Lists:
    """The lists of a BlockMask, compared once with its mask_mod, pair by pair, some rows at a time, as it was made. What the
    mask_mod reads from outside is looked at then, as it was when the lists were made."""
    return once(block_mask, "lists", (shape, traced), lambda: _lists(block_mask, traced, shape))


def blocks_of(block_mask: Any, traced: Traced, shape: Shape) -> Blocks:
    """A BlockMask as the blocks of a `strobe.Mask`, made once: its mask_mod is kept for the pairs of blocks of which it shows
    some."""
    return once(block_mask, "blocks", (shape, traced), lambda: _blocks(block_mask, traced, shape))


def once(block_mask: Any, what: str, key: tuple, make: Callable[[], Any]) -> Any:
    """What `make` makes of a BlockMask, kept as long as that lives and the key stays the same."""
    known = _known.setdefault(block_mask, {})
    if known.get(what, (None,))[0] != key:
        known[what] = key, make()
    return known[what][1]


_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""BlockMask -> what was made of it -> (for which call, it)."""


def _lists(block_mask: Any, traced: Traced, shape: Shape) -> Lists:
    listed, (rows, keys) = _listed(block_mask, shape), _size(block_mask)
    wrong = torch.zeros((), dtype=torch.bool, device=listed.device)
    kinds = []
    for first in range(0, shape.n_q, rows):
        i = torch.arange(first, min(first + rows, shape.n_q), device=listed.device)
        of_pairs, seen = _kinds_of_pairs(listed, i, shape.n_kv, *block_mask.BLOCK_SIZE), seen_pairs(traced, shape, i)
        wrong |= ((of_pairs == 0) & seen).any() | ((of_pairs == 2) & ~seen).any()
        seen = (of_pairs == 2) | ((of_pairs == 1) & seen)
        some, hidden = (_by_blocks(x, keys).any(-1).any(-2) for x in (seen, ~seen))
        kinds.append(some.int() + (some & hidden).int())
    return Lists(torch.stack(kinds, 2), (rows, keys), not bool(wrong))


def _blocks(block_mask: Any, traced: Traced, shape: Shape) -> Blocks:
    lists, listed = lists_of(block_mask, traced, shape), _listed(block_mask, shape)
    kinds, (rows, keys), pairs, number = lists.kinds.clone(), lists.size, [], 0
    for row, first in enumerate(range(0, shape.n_q, rows)):
        some = kinds[:, :, row] == 2
        i = torch.arange(first, min(first + rows, shape.n_q), device=listed.device)
        of_pairs = _kinds_of_pairs(listed, i, shape.n_kv, *block_mask.BLOCK_SIZE)
        seen = (of_pairs == 2) | ((of_pairs == 1) & seen_pairs(traced, shape, i))
        found = _by_blocks(seen, keys).transpose(2, 3)[some].to(torch.uint8)  # [blocks, rows, keys]
        kinds[:, :, row][some] = torch.arange(number, number + len(found), dtype=torch.int32, device=kinds.device) + 2
        number += len(found)
        pairs.append(torch.nn.functional.pad(found, (0, 0, 0, rows - found.shape[1])))
    if not number:
        pairs = [kinds.new_zeros(1, rows, keys, dtype=torch.uint8)]
    return Blocks(kinds.contiguous(), torch.cat(pairs))


def _listed(block_mask: Any, shape: Shape) -> torch.Tensor:
    rows, columns = block_mask.BLOCK_SIZE
    return listed_blocks(block_mask, (math.ceil(shape.n_q / rows), math.ceil(shape.n_kv / columns)))


def _size(block_mask: Any) -> tuple[int, int]:
    """The rows and keys of the blocks that kernels take for those of a BlockMask."""
    rows, keys = block_mask.BLOCK_SIZE
    fits = rows % 16 == keys % 16 == 0 and max(rows, keys) <= _LARGEST
    return (rows, keys) if fits else (_SIZE, _SIZE)


def _by_blocks(pairs: torch.Tensor, keys: int) -> torch.Tensor:
    """[..., rows, n_kv] -> [..., rows, blocks, keys], filled up with False."""
    return torch.nn.functional.pad(pairs, (0, -pairs.shape[-1] % keys)).unflatten(-1, (-1, keys))


def _kinds_of_pairs(kinds: torch.Tensor, i: torch.Tensor, n_kv: int, rows: int, columns: int) -> torch.Tensor:
    j = torch.arange(n_kv, device=kinds.device)
    return kinds[:, :, (i // rows)[:, None], (j // columns)[None]]


def hides_more(lists: Lists, mask: Mask, shape: Shape, keys: int) -> bool:
    """Whether a BlockMask hides blocks that the band of a mask, among the first `keys` keys, does not."""
    rows, columns = lists.size
    visited = torch.zeros(lists.kinds.shape[2:], dtype=torch.bool)
    for row, first in enumerate(range(0, shape.n_q, rows)):
        begin, end = mask.kv_range(first, min(first + rows, shape.n_q) - 1, shape.n_q, keys)
        visited[row, begin // columns : -(-end // columns)] = end > begin
    return bool((visited.to(lists.kinds.device) & (lists.kinds == 0)).any())


def seen_pairs(traced: Traced, shape: Shape, i: torch.Tensor) -> torch.Tensor:
    """bool, broadcasts to [batch, heads, rows i, keys]: what a mask_mod says of some rows."""
    with torch.no_grad():
        return traced.of_pairs(indices(shape, i)).to(torch.bool)


def indices(shape: Shape, i: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of a mask_mod for some rows and all keys."""
    batch, heads, j = (torch.arange(n, device=i.device, dtype=torch.int32) for n in (shape.batch, shape.heads, shape.n_kv))
    i = i.to(torch.int32)
    return dict(zip(PAIR, (batch[:, None, None, None], heads[:, None, None], i[:, None], j), strict=True))


def traced_mask(block_mask: Any, device: torch.device) -> Traced:
    """The graph of a BlockMask's mask_mod, as it was when it was first asked for."""
    mask_mod = block_mask.mask_mod
    return once(block_mask, "graph", (mask_mod, device), lambda: trace("mask_mod", mask_mod, PAIR, device))
