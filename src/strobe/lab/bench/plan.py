"""What a benchmark measures: a plan, its points, and their inputs."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, fields, replace

import torch

from strobe.lab.model.cost import Cost
from strobe.masks import Causal, Full, Mask, Window
from strobe.problem import AttentionProblem, Dense, Varlen
from strobe.scores import Score

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}

MASKS: dict[str, Mask] = {"full": Full(), "causal": Causal(), "window": Window(left=1023, right=0)}
"""The masks that are measured, by name. "window" has 1024 keys: a query's own and the 1023 before it, which is
window_size=(1023, 0) of flash-attn. Where that cuts nothing off, the problem is the causal one and is left out."""


def mask_of(name: str) -> Mask:
    """The mask of a name: one of `MASKS`, or "window 128", a query's own key and the 127 before it."""
    return MASKS[name] if name in MASKS else Window(left=int(name.removeprefix("window ")) - 1, right=0)


Dims = tuple[int, int]
"""Two head dims: that of q and k, and that of v."""


@dataclass(frozen=True)
class Point:
    """One problem of a benchmark. What has a default is that of a model's shape (`strobe.lab.bench.zoo`): its name, the number
    of keys where it is not that of queries, lengths of packed sequences (then batch is their number, length the longest), a
    softcap, and whether there are sinks."""

    batch: int
    length: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str
    backward: bool
    model: str = ""
    length_kv: int | None = None
    packed: tuple[int, ...] | None = None
    softcap: float = 0.0
    sinks: bool = False

    @classmethod
    def of(cls, facts: dict) -> Point:
        """The point at which an entry of a report was measured."""
        known = {field.name: facts[field.name] for field in fields(cls) if field.name in facts or field.default is MISSING}
        if known.get("packed") is not None:
            known["packed"] = tuple(known["packed"])
        return cls(**known)

    @property
    def facts(self) -> dict:
        """The point in an entry of a report: what differs from its default."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name] or defaults[name] is MISSING}

    def __str__(self) -> str:
        if self.model:
            return self.model + (", backward" if self.backward else "")
        return f"{self.dtype} {self.heading} {self.mask} S={self.length}"

    @property
    def heading(self) -> str:
        """The shape without the length, in words: "D=128", "D=192/128" or "D=128 heads 64/8"."""
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"D={dims}" + ("" if self.heads == self.heads_kv else f" heads {self.heads}/{self.heads_kv}")

    @property
    def shape(self) -> str:
        """The whole shape in words: "2 x 4096 x 77, heads 10, D=64, full" (batch, queries, keys)."""
        lengths = f"{self.batch} x {self.length}" + (f" x {self.length_kv}" if self.length_kv else "")
        if self.packed is not None:
            lengths = f"{len(self.packed)} packed, {min(self.packed)} to {max(self.packed)}"
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        extras = [f"softcap {self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sinks
        return ", ".join([lengths, f"heads {heads}", f"D={dims}", self.mask, *extras])

    @property
    def family(self) -> Point:
        """The point without its length and batch, the same for all points that differ in these alone."""
        return replace(self, batch=1, length=1)

    @property
    def kind(self) -> Point:
        """The family; of a model's shape without the model, so that what is compiled alike is equal."""
        if not self.model:
            return self.family
        packed = None if self.packed is None else (1,)
        return replace(self.family, model="", length_kv=None, packed=packed, heads=1, heads_kv=1)

    @property
    def is_plain(self) -> bool:
        """Whether q, k, v and a mask say all of it."""
        return self.packed is None and not self.softcap and not self.sinks

    def problem(self) -> AttentionProblem:
        sinks = torch.empty(self.heads, device="meta") if self.sinks else None
        if self.packed is not None:
            lengths: Dense | Varlen = Varlen(len(self.packed), sum(self.packed), sum(self.packed), self.length, self.length)
        else:
            lengths = Dense(self.batch, self.length, self.length_kv or self.length)
        return AttentionProblem(
            lengths=lengths,
            heads_q=self.heads,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=DTYPES[self.dtype],
            scale=self.head_dim**-0.5,
            mask=mask_of(self.mask),
            score=Score(softcap=self.softcap, sinks=sinks).facts(),
            phase="backward" if self.backward else "forward",
        )

    @property
    def costs(self) -> list[Cost]:
        """The Cost of each packed sequence; of all together where they are not packed."""
        if self.packed is None:
            return [Cost(self.problem())]
        one = replace(self, packed=None, batch=1)
        return [Cost(replace(one, length=length).problem()) for length in self.packed]

    @property
    def flops(self) -> int:
        """FLOPs as they are usually quoted: a causal mask counts half of a full one, a window its visible pairs; and where
        there are more keys than queries, a causal mask its visible pairs."""
        return sum(cost.flops if self.length_kv else cost.quoted_flops for cost in self.costs)

    @property
    def bytes_read(self) -> int:
        """Bytes of all inputs."""
        return sum(cost.bytes_read for cost in self.costs)


@dataclass(frozen=True)
class Grid:
    """Points for every combination of a dtype, head dims, a mask and a length. tokens: batch x length (at least one
    sequence)."""

    head_dims: tuple[Dims, ...] = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
    tokens: int = 16384
    heads: int | None = None
    """Number of query heads; None: 2048 / head dim, rounded down."""
    heads_kv: int | None = None
    """Number of key heads; None: as many as query heads."""
    dtypes: tuple[str, ...] = ("bf16",)
    masks: tuple[str, ...] = ("full", "causal", "window")

    def points(self, backward: bool) -> list[Point]:
        points = []
        for dtype in self.dtypes:
            for head_dim, head_dim_v in self.head_dims:
                heads = self.heads or max(1, 2048 // head_dim)
                for mask in self.masks:
                    for length in self.lengths:
                        if (MASKS[mask].left or 0) >= length - 1:
                            continue
                        shape = max(1, self.tokens // length), length, heads, self.heads_kv or heads, head_dim, head_dim_v
                        points.append(Point(*shape, dtype, mask, backward))
        return points


def some(points: list[Point]) -> list[Point]:
    """These points; ValueError if there are none, as when windows at least as long as the sequences were left out."""
    if not points:
        raise ValueError("a window of 1024 keys needs a length of more than 1024, got none: below, it is the causal mask")
    return points


def short(length: int) -> str:
    """A length in few characters, such as "512" or "16k"."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


FORWARD = (
    Grid(),
    Grid(head_dims=((128, 128),), heads=64, heads_kv=8),
    Grid(dtypes=("fp16",), lengths=(1024, 16384)),
    Grid(dtypes=("fp8",), lengths=(4096, 16384), head_dims=((64, 64), (128, 128), (256, 256)), masks=("full", "causal")),
)
"""What is measured of the forward: bf16 at all lengths, with and without GQA (Llama 3's heads); fp16 and fp8 at few lengths."""

_TRAINED = (1024, 2048, 4096, 8192, 16384, 32768)

BACKWARD = (
    Grid(lengths=_TRAINED),
    Grid(lengths=_TRAINED, head_dims=((128, 128),), heads=64, heads_kv=8),
    Grid(lengths=(4096,), head_dims=((64, 64), (128, 128)), dtypes=("fp16",)),
)
"""What is measured of the backward: bf16 at the lengths that models are trained with, with and without GQA; fp16 at one
length."""

SINGLE = (Grid(head_dims=((128, 128),), lengths=(512, 1024, 2048, 4096, 8192, 16384), masks=("full",)),)
"""What is measured call by call unless asked otherwise: the points of the published protocol, see
`strobe.lab.bench.single_call`."""

CPU = (Grid(head_dims=((64, 64), (128, 128)), lengths=(512, 2048), tokens=2048, dtypes=("fp32",), masks=("full", "causal")),)
"""What is measured on a CPU: a few small problems."""


BY_WEIGHT = (4096, 16384, 1024, 8192, 2048, 32768, 512, 131072)
"""The lengths in the order of measurement: those that tell most come first, and lengths that are not here come last."""


def _weight(length: int) -> int:
    return BY_WEIGHT.index(length) if length in BY_WEIGHT else len(BY_WEIGHT)


PROTOCOLS = ("sustained", "single")
"""Ways to time. "sustained": launches without a pause, timed together, as a busy GPU runs them; "single": calls timed one by
one, after a short warm-up."""


@dataclass(frozen=True)
class Plan:
    """What to measure, how, and how long."""

    grids: tuple[Grid, ...] = FORWARD
    backward: bool = False
    protocol: str = "sustained"
    """How to time, one of `PROTOCOLS`."""
    rounds: int = 6
    """The least number of rounds: more where a balanced order needs it, but fewer where one launch takes long."""
    seconds: float = 0.015
    """How long the sustained protocol times one contender in one round. An untimed lead of the same length goes before."""
    max_seconds: float = math.inf
    """The run stops after so many seconds, and keeps what was measured until then."""
    even: bool = False
    """Whether `max_seconds` are shared out evenly: all points are measured, in fewer or shorter rounds if need be."""
    backends: tuple[str, ...] = ()
    """Backends of Strobe to measure by name, beside the one that dispatch picks."""
    inputs: str = "normal"
    """The kind of inputs, one of `strobe.lab.bench.inputs.KINDS`."""
    peers: tuple[str, ...] | None = None
    """Names of the peers to measure; None: all that are installed."""

    part: tuple[int, int] = (1, 1)
    """Which part of the points, of how many; the first holds what matters most."""
    zoo: tuple[Point, ...] | None = None
    """Shapes to measure, instead of grids, in this order."""
    random: bool = False
    """Whether these shapes were drawn at random, instead of models'."""

    @property
    def what(self) -> str:
        """What is measured, in a word: the name of a report's file begins with it."""
        if self.zoo is not None:
            return "random" if self.random else "zoo"
        return "backward" if self.backward else "forward"

    def points(self) -> list[Point]:
        """The points of the plan's part in the order of measurement: dtype by dtype, and each by length as in `BY_WEIGHT`, so
        that a run that is cut short has every shape and mask at the lengths that tell most. Shapes of models keep their
        order."""
        points = [point for grid in self._by_dtype() for point in sorted(grid, key=lambda point: _weight(point.length))]
        points = points if self.zoo is None else list(self.zoo)
        part, parts = self.part
        return points[len(points) * (part - 1) // parts : len(points) * part // parts]

    def _by_dtype(self) -> list[list[Point]]:
        """The points of all parts, in a list for each dtype."""
        found: dict[str, list[Point]] = {}
        for grid in self.grids:
            for point in grid.points(self.backward):
                found.setdefault(point.dtype, []).append(point)
        return list(found.values())


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call: q [B, S, H, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv] and dout [B, S, H, Dv], which only a backward
    has. sinks: float32 [H]. packed: lengths of sequences that lie one after the other along S; B is 1 then."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    packed: tuple[int, ...] | None = None

    @classmethod
    def random(cls, point: Point, device: torch.device, generator: torch.Generator) -> Inputs:
        batch, length = (point.batch, point.length) if point.packed is None else (1, sum(point.packed))

        def normal(heads: int, dim: int, length: int = length) -> torch.Tensor:
            shape = (batch, length, heads, dim)
            return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(DTYPES[point.dtype])

        length_kv = point.length_kv or length
        q, k = normal(point.heads, point.head_dim), normal(point.heads_kv, point.head_dim, length_kv)
        v = normal(point.heads_kv, point.head_dim_v, length_kv)
        dout = normal(point.heads, point.head_dim_v) if point.backward else None
        sinks = torch.randn(point.heads, device=device, generator=generator) if point.sinks else None
        return cls(q, k, v, dout, sinks, point.softcap, point.packed)

    def sequences(self) -> list[Inputs]:
        """The first and the last of packed sequences, by themselves; all of it where nothing is packed."""
        return [self] if self.packed is None else [self.sequence(at) for at in ends(self.packed)]

    def sequence(self, at: slice) -> Inputs:
        """One packed sequence by itself, whose rows `at` says."""
        q, k, v = (x[:, at] for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, dout=None if self.dout is None else self.dout[:, at], packed=None)


def ends(packed: tuple[int, ...]) -> list[slice]:
    """The rows of the first and of the last packed sequence."""
    return [slice(0, packed[0]), slice(sum(packed[:-1]), sum(packed))]
