"""The attentions over a cache that `strobe bench decode` measures, and the points at which it does.

A contender's `prepare(inputs)` returns the call to be timed, which returns out [batch, queries, heads, head_dim]. It raises
where the contender is missing or does not take the point; the report holds the reason.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import strobe
from strobe.lab.bench.cudnn_graph import CudnnGraph
from strobe.lab.bench.plan import short
from strobe.serving.arguments import checked
from strobe.serving.problem import DecodeOperands, DecodeProblem, describe

CACHES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32}
"""Dtypes of a cache, by name. The queries of one of 8 bits are bfloat16, those of another have its dtype."""


@dataclass(frozen=True)
class Point:
    """A decode step. length: keys of each request, or their mean if they are ragged. page: keys of a page; 0: contiguous.
    window: keys that a query sees, its own the last of them; 0: all before it."""

    batch: int
    length: int
    heads: int
    heads_kv: int
    head_dim: int = 128
    queries: int = 1
    page: int = 64
    cache: str = "bf16"
    ragged: bool = False
    window: int = 0

    @classmethod
    def of(cls, facts: dict) -> Point:
        """The point at which an entry of a report was measured; older reports have no windows."""
        return cls(**{field.name: facts[field.name] for field in fields(cls) if field.name in facts or field.name != "window"})

    def __str__(self) -> str:
        return f"B={self.batch} kv={short(self.length)} {self.heading}"

    @property
    def heading(self) -> str:
        """The point without batch and length, in words."""
        where = f"page {self.page}" if self.page else "contiguous"
        some = f" x {self.queries}" if self.queries > 1 else ""
        ragged = " ragged" if self.ragged else ""
        window = f" window {self.window}" if self.window else ""
        return f"{self.cache} heads {self.heads}/{self.heads_kv} D={self.head_dim}{some} {where}{ragged}{window}"

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        return self.batch * self.length * self.bytes_of_key

    @property
    def bytes_of_key(self) -> int:
        """Bytes of a key and its value, of all key heads."""
        return self.heads_kv * self.head_dim * 2 * CACHES[self.cache].itemsize

    @property
    def read(self) -> int:
        """Bytes of the keys and values that some query sees."""
        most = self.window + self.queries - 1 if self.window else max(lengths_of(self))
        return sum(min(length, most) for length in lengths_of(self)) * self.bytes_of_key

    @property
    def mask(self) -> strobe.Mask | None:
        """The window, or None for the causal mask that a cache has by default."""
        return strobe.Window(self.window - 1, 0) if self.window else None

    @property
    def kind(self) -> Point:
        """The point without its batch and length, the same for all points whose kernels differ by their configs alone."""
        group, behind = self.heads // self.heads_kv, min(self.window, 1)
        return Point(1, 1, group, 1, self.head_dim, self.queries, self.page, self.cache, window=behind)


def in_order(points: Iterable[dict]) -> list[dict]:
    """Entries of a report, shape by shape at each length and batch, as those of one run are."""

    def key(facts: dict) -> tuple:
        point = Point.of(facts)
        shape = (-point.heads, point.heads_kv, point.head_dim, point.window, point.queries, point.page, point.cache)
        return abs(math.log2(point.length / 8192)), point.length, point.batch, *shape

    return sorted(points, key=key)


class Inputs:
    """The tensors of a point: a cache whose pages lie in any order, queries, and where the result goes."""

    def __init__(self, point: Point, device: torch.device, seed: int):
        self.point, g = point, torch.Generator(device).manual_seed(seed)
        dtype = CACHES[point.cache]
        lengths = lengths_of(point)
        columns = -(-max(lengths) // (point.page or max(lengths)))
        shape = (point.batch * columns, point.page or max(lengths), point.heads_kv, point.head_dim)
        self.k, self.v = (_normal(shape, g, dtype) for _ in range(2))
        self.table = None
        if point.page:
            self.table = torch.randperm(shape[0], generator=g, device=device).view(point.batch, columns).int()
        q = (point.batch, point.queries, point.heads, point.head_dim)
        self.q = _normal(q, g, torch.bfloat16 if dtype.itemsize == 1 else dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.q)
        self.cache = strobe.Cache(self.k, self.v, self.lengths, self.table)


def lengths_of(point: Point) -> list[int]:
    """The keys of each request. Ragged ones are drawn from a log-normal distribution."""
    if not point.ragged:
        return [point.length] * point.batch
    drawn = torch.exp(torch.randn(point.batch, generator=torch.Generator().manual_seed(1)))
    return (drawn / drawn.mean() * point.length).int().clamp(min=1).tolist()


def described(point: Point, deterministic: bool) -> tuple[DecodeProblem, DecodeOperands]:
    """The problem of a point, and tensors without memory."""
    meta, dtype = partial(torch.empty, device="meta"), CACHES[point.cache]
    columns = -(-max(lengths_of(point)) // (point.page or max(lengths_of(point))))
    shape = (point.batch * columns, point.page or max(lengths_of(point)), point.heads_kv, point.head_dim)
    k, v = (meta(shape, dtype=dtype) for _ in range(2))
    q = meta((point.batch, point.queries, point.heads, point.head_dim), dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    table = meta((point.batch, columns), dtype=torch.int32) if point.page else None
    cache = strobe.Cache(k, v, meta(point.batch, dtype=torch.int32), table)
    operands, options = checked(q, cache, point.mask, out=torch.empty_like(q), deterministic=deterministic)
    return describe(operands, options), operands


def _normal(shape: tuple[int, ...], g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
    return torch.randn(shape, generator=g, device=g.device, dtype=wide).to(dtype)


# ---- contenders

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """An attention over a cache. module: of a package that must be installed; None: it comes with PyTorch or is Strobe."""

    name: str
    prepare: Callable[[Inputs], Call]
    module: str | None = None

    @property
    def installed(self) -> bool:
        return self.module is None or importlib.util.find_spec(self.module) is not None


def _strobe(inputs: Inputs, deterministic: bool = False) -> Call:
    return partial(strobe.decode, inputs.q, inputs.cache, mask=inputs.point.mask, out=inputs.out, deterministic=deterministic)


def _fa3(inputs: Inputs, ahead: bool) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    point, keywords = inputs.point, {}
    if point.cache == "e4m3":
        raise ValueError("takes queries of 8 bits with such a cache")
    if inputs.table is not None:
        keywords["page_table"] = inputs.table
    window = (point.window - 1, 0) if point.window else (-1, -1)
    if ahead:
        keywords["scheduler_metadata"] = get_scheduler_metadata(
            point.batch, point.queries, int(inputs.lengths.max()), point.heads, point.heads_kv, point.head_dim, inputs.lengths,
            page_size=point.page or None, causal=True, window_size=window,
        )  # fmt: skip
    return partial(
        flash_attn_with_kvcache,
        inputs.q,
        inputs.k,
        inputs.v,
        cache_seqlens=inputs.lengths,
        causal=True,
        num_splits=0,
        window_size=window,
        **keywords,
    )


def _xqa(inputs: Inputs) -> Call:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    point = inputs.point
    if inputs.table is None or point.queries > 1 or point.window:
        raise ValueError("takes pages and one query of a request that sees all keys")
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=inputs.q.device)
    q, out, scale = inputs.q[:, 0], inputs.out[:, 0], point.head_dim**-0.5
    longest = inputs.table.shape[1] * point.page

    def call() -> torch.Tensor:
        xqa_batch_decode_with_kv_cache(
            q, (inputs.k, inputs.v), workspace, inputs.table, inputs.lengths, longest, bmm1_scale=scale, out=out
        )
        return inputs.out

    return call


def _sdpa(inputs: Inputs, backend: SDPBackend | None) -> Call:
    point = inputs.point
    if inputs.table is not None or point.queries > 1 or point.ragged or point.cache == "e4m3" or point.window:
        raise ValueError("takes a contiguous cache of 16 or 32 bits, one query of a request that sees all, and equal lengths")
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))

    def call() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=point.heads != point.heads_kv)
        return out.transpose(1, 2)

    def forced() -> torch.Tensor:
        assert backend is not None
        with sdpa_kernel(backend):
            return call()

    return call if backend is None else forced


def _cudnn(inputs: Inputs) -> Call:
    point, table = inputs.point, inputs.table
    if point.cache == "e4m3" or point.queries > 1 or point.window:
        raise ValueError("is measured with a cache of 16 bits and one query of a request that sees all keys")
    lengths = inputs.lengths.view(-1, 1, 1, 1)
    q, k, v, out = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.out))
    bound = [q, k, v, torch.ones_like(lengths), lengths]
    if table is not None:
        bound.append(table.view(point.batch, 1, -1, 1))
    graph = CudnnGraph(inputs.q.dtype)
    described = graph.takes(*bound)
    options = dict(zip(("q", "k", "v", "seq_len_q", "seq_len_kv"), described, strict=False))
    if table is not None:
        options |= {"paged_attention_k_table": described[-1], "paged_attention_v_table": described[-1]}
        options["paged_attention_max_seq_len_kv"] = table.shape[1] * point.page
    found, _ = graph.graph.sdpa(**options, attn_scale=point.head_dim**-0.5, use_padding_mask=True, generate_stats=False)
    graph.gives(found, out)
    run = graph.ready(tuple(bound), (out,))

    def call() -> torch.Tensor:
        run()
        return inputs.out

    return call


OURS = (Contender("strobe", _strobe), Contender("strobe deterministic", partial(_strobe, deterministic=True)))
_SDPA = Contender("SDPA", partial(_sdpa, backend=None))
_PEERS = (
    Contender("FA3", partial(_fa3, ahead=False), "flash_attn_interface"),
    Contender("FA3 planned", partial(_fa3, ahead=True), "flash_attn_interface"),
    Contender("XQA", _xqa, "flashinfer"),
    Contender("cuDNN", _cudnn, "cudnn"),
    _SDPA,
    Contender("SDPA cuDNN", partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)),
    Contender("SDPA flash", partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)),
)


def peers_for(device: torch.device) -> dict[str, Contender]:
    """The peers of a device, by name. "FA3 planned" has its schedule made ahead, untimed."""
    return {peer.name: peer for peer in (_PEERS if device.type == "cuda" else (_SDPA,))}


# ---- the plan


@dataclass(frozen=True)
class Plan:
    """What to measure, every combination or some at random, and how long."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    lengths: tuple[int, ...] = (1024, 2048, 8192, 32768, 131072)
    heads: tuple[tuple[int, int], ...] = ((64, 8),)
    """Pairs of query heads and key heads."""
    head_dims: tuple[int, ...] = (128,)
    queries: tuple[int, ...] = (1,)
    pages: tuple[int, ...] = (64,)
    caches: tuple[str, ...] = ("bf16",)
    windows: tuple[int, ...] = (0,)
    """Keys that a query sees; 0: all before it."""
    ragged: bool = False
    rounds: int = 9
    max_seconds: float = math.inf
    peers: tuple[str, ...] | None = None
    """Names of the peers to measure; None: all that are installed."""
    most_bytes: int = 40 * 2**30
    """Larger caches are left out."""
    deterministic: bool = True
    """Whether `deterministic=True` takes part."""
    part: tuple[int, int] = (1, 1)
    """Which part of the points, of how many; each has its share of every length. What differs by queries, pages or the cache
    alone is in one part, so that one GPU times it."""
    random: int = 0
    """So many steps drawn at random, in place of every combination: see `drawn`."""
    seed: int = 0

    def points(self) -> list[Point]:
        """The plan's part. ValueError if none is left."""
        points = self.drawn() if self.random else self.combinations()
        points = [point for point in points if point.bytes <= self.most_bytes]
        if not points:
            raise ValueError(f"a cache must have at most {self.most_bytes} bytes, got none at these batches and lengths")
        part, parts = self.part
        shapes = dict.fromkeys(map(_shape_of, points))
        mine = {shape for n, shape in enumerate(shapes) if (n + n // parts) % parts == part - 1}
        return [point for point in points if _shape_of(point) in mine]

    def drawn(self) -> list[Point]:
        """Steps drawn from the plan's values, each with a length between the least and the greatest, as likely from 1k to 2k as
        from 2k to 4k, or as long as its cache may be; about half of them ragged. A value that the plan has twice is drawn twice
        as often."""
        rng, least, most, found = Random(self.seed), min(self.lengths), max(self.lengths), []
        for _ in range(self.random):
            length, (heads, heads_kv) = round(least * (most / least) ** rng.random()), rng.choice(self.heads)
            point = Point(
                rng.choice(self.batches), length, heads, heads_kv, rng.choice(self.head_dims), rng.choice(self.queries),
                rng.choice(self.pages), rng.choice(self.caches), self.ragged or rng.random() < 0.5, rng.choice(self.windows),
            )  # fmt: skip
            longest = self.most_bytes // (point.batch * point.bytes_of_key)
            found.append(replace(point, length=max(min(point.length, longest), 1)))
        return found

    def combinations(self) -> list[Point]:
        """All of them, shape by shape at each batch and length, those first that tell most."""
        return [
            Point(batch, length, *heads, head_dim, queries, page, cache, self.ragged, window)
            for length in sorted(self.lengths, key=lambda n: abs(math.log2(n / 8192)))
            for batch in self.batches
            for heads in self.heads
            for head_dim in self.head_dims
            for queries in self.queries
            for page in self.pages
            for cache in self.caches
            for window in self.windows
        ]


def _shape_of(point: Point) -> tuple[int, ...]:
    return point.batch, point.length, point.heads, point.heads_kv, point.head_dim


RANDOM = Plan(
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 64, 100, 200),
    lengths=(300, 50000),
    heads=((32, 8), (64, 8), (28, 4), (40, 8), (24, 8), (16, 4), (12, 2), (48, 8), (32, 4), (8, 8), (16, 16), (64, 4), (20, 4),
           (8, 1), (96, 8), (24, 24), (128, 8), (10, 2)),
    head_dims=(*6 * (128,), 64, 64, 80, 96, 160, 192, 256, 256),
    queries=(*8 * (1,), 2, 3, 4, 4, 5, 6, 8, 12, 16),
    pages=(*3 * (64,), 0, 0, 16, 16, 32, 128, 256),
    windows=(*9 * (0,), 1024),
    most_bytes=3 * 10**9,
)  # fmt: skip
"""What steps at random are drawn from on a GPU: shapes of models, and some that no model has."""

CPU = Plan((1, 4), (256, 1024), ((8, 2),), (64,), (1,), (16, 0), ("fp32",), rounds=3)
"""What is measured on a CPU: a few small caches."""
