"""Random caches for the fuzzer: requests that generate, through `strobe.decode`, against the float64 specification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

import strobe
from strobe.lab.bench.failures import compact
from strobe.lab.fuzz.cases import FAMILY, Facts
from strobe.lab.fuzz.inputs import dtype_of
from strobe.lab.fuzz.right import Precision
from strobe.lab.fuzz.run import Outcome
from strobe.reference import cached
from strobe.serving.arguments import checked
from strobe.serving.problem import DecodeOperands, DecodeProblem, describe

WAYS = ("once", "once", "once", "again", "into", "graph")
"""again: a second call is right, too, and gives the same bits if it must. into: the result goes to a tensor that is given.
graph: a CUDA graph is replayed, then again with other lengths, pages and numbers."""

POISON = {"nan": torch.nan, "inf": torch.inf, "large": 3e4}
"""What lies where no request may read."""


@dataclass(frozen=True)
class CacheCase(Facts):
    """Requests, their cache, and how `decode` is called. Defaults are the simplest."""

    device: str = "cpu"
    dtype: str = "fp32"
    eight_bits: str = ""
    """"" or of which its scales are: "cache", "head", "request", "key"; the cache is of e4m3 then."""
    head_dim: int = 64
    head_dim_v: int = 64
    latent: bool = False
    group: int = 1
    heads_kv: int = 1
    batch: int = 1
    n_q: int = 1
    page: int = 0
    """Keys of a page; 0: a contiguous cache."""
    room: int = 64
    """Keys that a request may have."""
    full: bool = False
    """Whether all requests have as many as there is room for."""
    ragged: bool = False
    tree: bool = False
    leftpad: bool = False
    indexed: bool = False
    missing: bool = False
    """Whether a page within a request's length is not there."""
    mask: str = "causal"
    softcap: float = 0.0
    alibi: str = ""
    """"", "heads" or "batch"."""
    sinks: bool = False
    poison: str = ""
    layout: str = "contiguous"
    """How the cache lies in memory: "contiguous", "heads first" or "gaps"."""
    logits: float = 1.0
    deterministic: bool = False
    way: str = "once"
    seed: int = 0

    door: str = "cache"
    """Always told: by it the text of such a case is known."""

    def __str__(self) -> str:
        return f"door={self.door!r},{super().__str__()}".rstrip(",")

    def features(self) -> list[str]:
        """What a campaign counts."""
        found = ["door cache", f"dtype {self.dtype}", f"way {self.way}", f"page {self.page}" if self.page else "no pages"]
        return found + [f"cache {name}" for name in self.changed() if name not in ("device", "dtype", "way", "page", "seed")]

    def simpler(self) -> Iterator[CacheCase]:
        """Cases that are one step simpler, the greatest steps first."""
        for name in (one for one in self.changed() if one not in ("device", "seed", "head_dim_v", "batch", "room", "n_q")):
            facts: dict[str, Any] = {"head_dim_v": 64} if name in ("head_dim", "latent") else {}
            yield replace(self, **facts, **{name: getattr(CacheCase(), name)})
        yield from self.lessened(("batch", "n_q", "room"))


def drawn(number: int, device: str = "cpu") -> CacheCase:
    """The case of a number. On a GPU consecutive ones share what kernels are compiled for."""
    kernel = Random(f"{device} cache kernel {number if device == 'cpu' else number // FAMILY}")
    random = Random(f"{device} cache {number}")

    def some(of: Random, share: float) -> bool:
        return of.random() < share

    dim = kernel.choice((64, 128, 128, 128, 80, 96, 256, 40))
    facts: dict[str, Any] = dict(
        dtype=kernel.choice(("bf16", "bf16", "fp16") if device == "cuda" else ("bf16", "fp16", "fp32")),
        head_dim=dim, head_dim_v=dim, group=kernel.choice((1, 2, 4, 7, 8)),
        page=kernel.choice((0, 0, 1, 3, 16, 16, 64, 64, 128, 256)),
        ragged=some(kernel, 0.3), tree=some(kernel, 0.15), leftpad=some(kernel, 0.2), softcap=5.0 * some(kernel, 0.2),
        alibi=kernel.choice(("", "", "", "heads", "batch")), sinks=some(kernel, 0.25), deterministic=some(kernel, 0.2),
        mask=kernel.choice(("causal", "causal", "full", "window")), n_q=kernel.choice((1, 1, 1, 2, 4, 5, 16, 33)),
    )  # fmt: skip
    if some(kernel, 0.1):
        facts |= dict(latent=True, head_dim=576, head_dim_v=512, group=kernel.choice((4, 16)), dtype="bf16")
    elif some(kernel, 0.2):
        facts |= dict(eight_bits=kernel.choice(("cache", "head", "request", "key")), dtype="bf16")
    elif some(kernel, 0.1):
        facts |= dict(head_dim_v=kernel.choice((64, 128)))
    facts |= dict(
        heads_kv=1 if facts.get("latent") else random.choice((1, 2, 3, 8)), batch=random.choice((1, 1, 2, 3, 5, 9)),
        room=random.choice((1, 17, 64, 130, 257, 600, 2000) if device == "cuda" else (1, 17, 64, 130)), full=some(random, 0.2),
        indexed=not facts["page"] and some(random, 0.3), missing=bool(facts["page"]) and some(random, 0.1),
        poison=random.choice(("", "nan", "inf", "large")), logits=random.choice((1.0, 1.0, 5.0, 30.0)),
        layout=random.choice(("contiguous", "contiguous", "heads first", "gaps")), way=random.choice(WAYS),
    )  # fmt: skip
    if facts["way"] == "graph" and (device == "cpu" or facts["ragged"]):
        facts["way"] = "once"
    return CacheCase(device=device, seed=number % 1000, **facts)


# ---- tensors


class Call:
    """A call of `decode`: q, the cache and the other keywords of a case, and how its tensors are filled anew."""

    def __init__(self, case: CacheCase):
        self.case, self.random = case, Random(case.seed)
        self.numbers = torch.Generator().manual_seed(case.seed)
        self.columns = -(-case.room // case.page) if case.page else 0
        entries = case.batch * self.columns + 3 if case.page else case.batch + 2
        self.shape = entries, case.page or case.room, case.heads_kv
        heads = case.group * case.heads_kv
        counts = [self.random.randint(0, case.n_q) for _ in range(case.batch)] if case.ragged else [case.n_q] * case.batch
        rows = (max(1, sum(counts)),) if case.ragged else (case.batch, case.n_q)
        self.q = self._on_device(self._normal(*rows, heads, case.head_dim) * case.logits).to(dtype_of(case.dtype))
        self.keywords: dict[str, Any] = {"mask": self._mask(), "score": self._score(heads), "deterministic": case.deterministic}
        if case.ragged:
            bounds = torch.tensor([0, *counts]).cumsum(0).int()
            self.keywords |= {"cu_seqlens_q": self._on_device(bounds), "max_seqlen_q": case.n_q}
        if case.tree:
            tree = torch.rand(case.batch, case.n_q, case.n_q, generator=self.numbers) < 0.6
            self.keywords["tree"] = self._on_device(tree)
        self.cache = self._cache()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.numbers)

    def _on_device(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.case.device)

    def _mask(self) -> strobe.masks.Mask:
        left = self.random.choice((0, 10, 40))
        return {"causal": strobe.Causal(), "full": strobe.Full(), "window": strobe.Window(left, 0)}[self.case.mask]

    def _score(self, heads: int) -> strobe.Score:
        case = self.case
        of_batch = (case.batch, heads) if case.alibi == "batch" else (heads,)
        slopes = self._on_device(torch.rand(*of_batch, generator=self.numbers)) if case.alibi else None
        return strobe.Score(case.softcap, slopes, sinks=self._on_device(self._normal(heads)) if case.sinks else None)

    def _cache(self) -> strobe.Cache:
        case = self.case
        table = index = None
        if case.page:
            places = torch.randperm(self.shape[0], generator=self.numbers)[: case.batch * self.columns]
            table = places.view(case.batch, self.columns).int()
        elif case.indexed:
            index = torch.randperm(self.shape[0], generator=self.numbers)[: case.batch].int()
        lengths = torch.tensor([case.room if case.full else self.random.randint(0, case.room) for _ in range(case.batch)])
        pads = torch.tensor([self.random.randint(0, int(n)) for n in lengths]) if case.leftpad else None
        keys, values = self._filled(case.head_dim), self._filled(case.head_dim_v)
        for b, length in enumerate(lengths.tolist()):
            entry, at = self._places(b, length, table, index)
            for x in (keys, values):
                x[entry, at] = self._normal(length, *x.shape[2:])
            if table is not None:
                used = -(-length // case.page)
                table[b, used:] = self.random.choice((-1, 10**6, 0))
                if used and case.missing:
                    table[b, self.random.randrange(used)] = self.random.choice((-1, self.shape[0], 2**31 - 1))
        scales = self._scales()
        k, v = (self._lying(x) for x in (keys, values))
        ints = [None if x is None else self._on_device(x.int()) for x in (lengths, table, index, pads)]
        shared = {"head_dim_v": case.head_dim_v} if case.latent else {}
        return strobe.Cache(k, None if case.latent else v, ints[0], *ints[1:], *scales, **shared)  # type: ignore[arg-type]

    def _filled(self, dim: int) -> torch.Tensor:
        return torch.full((*self.shape, dim), POISON.get(self.case.poison, 0.0))

    def _places(self, b: int, length: int, table, index) -> tuple[torch.Tensor, torch.Tensor]:
        """(entry, row) of a request's keys."""
        key = torch.arange(length)
        if table is None:
            return torch.full_like(key, b if index is None else int(index[b])), key
        return table[b, key // self.case.page].long(), key % self.case.page

    def _scales(self) -> list[torch.Tensor | None]:
        heads, of = self.case.heads_kv, self.case.eight_bits
        if not of:
            return [None, None]
        shape = {"cache": (), "head": (heads,), "request": (self.case.batch, heads), "key": self.shape}[of]
        return [self._on_device(torch.rand(shape, generator=self.numbers) + 0.5) for _ in range(2)]

    def _lying(self, x: torch.Tensor) -> torch.Tensor:
        """x on the device and in the cache's dtype, as the case wants it to lie in memory."""
        x = self._on_device(x).to(torch.float8_e4m3fn if self.case.eight_bits else dtype_of(self.case.dtype))
        if self.case.layout == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.case.layout == "gaps":
            wide = x.new_empty(*x.shape[:-1], x.shape[-1] + 32)
            wide[..., : x.shape[-1]] = x
            return wide[..., : x.shape[-1]]
        return x

    def change(self, other: Call) -> None:
        """Take another call's numbers, lengths and pages, in place."""
        self.q.copy_(other.q)
        for name in ("k", "v", "lengths", "page_table", "index", "leftpad", "k_scale", "v_scale"):
            ours, theirs = getattr(self.cache, name), getattr(other.cache, name)
            if ours is not None:
                ours.copy_(theirs)


# ---- right


def bounds(problem: DecodeProblem, operands: DecodeOperands) -> tuple[torch.Tensor, ...]:
    """out and lse by the specification, and how far off each number may be."""
    out, lse = cached.decode(problem, operands)
    sizes = operands._replace(v=operands.v.float().abs().to(operands.v.dtype)) if not problem.shared else operands
    of_values = cached.decode(problem, sizes)[0] if not problem.shared else _largest(out)
    q, k = (x.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1) for x in (operands.q, operands.k))
    size = abs(problem.scale) * q.max() * k.clamp(max=1e3).max() * 2 + problem.score.softcap
    if operands.alibi is not None:
        size = size + operands.alibi.abs().max() * (problem.capacity + problem.lengths.seqlen_q)
    precision = Precision.of(problem.dtype, operands.q.device.type)
    unit, wide = precision.unit, precision.scores
    score = wide * (16 * (1 + size) + problem.capacity / 2)
    return out, lse, (4 * unit + 4 * score) * of_values + 1e-6, score + 4 * wide * lse.abs().nan_to_num(0.0, 0.0, 0.0)


def _largest(out: torch.Tensor) -> torch.Tensor:
    """A size for all numbers of a row, its largest: the latent's values are keys, too, whose signs count."""
    return out.abs().amax(-1, keepdim=True).expand_as(out) + 1.0


def wrong(found: tuple[torch.Tensor, ...], case: CacheCase, call: Call) -> str | None:
    """What is wrong with out and lse, in one line; or None."""
    operands, options = checked(call.q, call.cache, return_lse=True, **call.keywords)
    out, lse, off_out, off_lse = bounds(describe(operands, options), operands)
    for name, got, want, off in (("out", found[0], out, off_out), ("lse", found[1], lse, off_lse)):
        got = got.double()
        if not torch.equal(torch.isneginf(got), torch.isneginf(want)):
            return f"{name}: -inf in other places than the specification"
        error = torch.where(torch.isneginf(want), 0.0, got - want).abs()
        bad = ~(error <= off)
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            return f"{name}: {got[at].item():.6g} at {list(at)}, not {want[at].item():.6g}; allowed {off[at].item():.2g}"
    return None


REFUSALS = "page_table (block_table) must name", "no backend runs", "backend "
"""How the sentences begin that a case may be refused with: a page that is not there, on a CPU; and what no kernel takes."""


def outcome(case: CacheCase) -> Outcome:
    """Runs a case. Never raises, but for what ends a process."""
    try:
        words = run(case)
        if case.device == "cuda":
            torch.cuda.synchronize()
        return Outcome("right") if words is None else Outcome("wrong", words)
    except torch.OutOfMemoryError:
        return Outcome("refused", "takes too much memory for this machine")
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(REFUSALS):
            return Outcome("refused", str(error).split(", got")[0])
        return Outcome("error", compact(error))


def run(case: CacheCase) -> str | None:
    """Calls `decode` in the way of a case; what is wrong, or None."""
    call = Call(case)

    def decode(**more) -> tuple[torch.Tensor, torch.Tensor]:
        return strobe.decode(call.q, call.cache, return_lse=True, **call.keywords, **more)

    if case.way == "graph":
        return _in_a_graph(case, call, decode)
    if case.way == "into":
        out = torch.zeros(*call.q.shape[:-1], case.head_dim_v, dtype=call.q.dtype, device=call.q.device)
        found = decode(out=out)
        if found[0].data_ptr() != out.data_ptr():
            return "out: another tensor than the one that was given"
        return wrong(found, case, call)
    found = decode()
    if case.way == "again":
        again = decode()
        if (case.deterministic or case.device == "cpu") and not all(map(torch.equal, found, again)):
            return "out: other bits in a second call"
        return wrong(found, case, call) or wrong(again, case, call)
    return wrong(found, case, call)


def _in_a_graph(case: CacheCase, call: Call, decode) -> str | None:
    """Replayed with the lengths, pages and numbers that were there, and with others."""
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode()
    graph.replay()
    words = wrong(found, case, call)
    if words is None:
        call.change(Call(replace(case, seed=case.seed + 1)))
        graph.replay()
        words = wrong(found, case, call)
    return words
