"""What a benchmark measures: a plan, its points, and their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from strobe.device import arch_of
from strobe.lab.cost import Cost
from strobe.masks import Causal, Full
from strobe.problem import AttentionProblem, Dense

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Plan:
    """What to measure: every dtype x mask x head dim x length, at `tokens` = batch x length (at least one sequence)."""

    head_dims: tuple[int, ...] = (64, 128, 256)
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    tokens: int = 16384
    heads: int | None = None
    """Query heads; None: 2048 / head dim."""
    heads_kv: int | None = None
    """Key heads; None: as many as query heads."""
    dtypes: tuple[str, ...] = ("bf16",)
    masks: tuple[str, ...] = ("full", "causal")
    backward: bool = False
    rounds: int = 6
    seconds: float = 0.1
    """Of one timing: one contender in one round."""
    max_seconds: float = math.inf
    """The run stops at this age, with what was measured."""
    backends: tuple[str, ...] = ()
    """Strobe's backends to measure by name, beside what dispatch picks."""
    peers: tuple[str, ...] | None = None
    """Names of peers; None: all but flex, which compiles for every shape."""

    def points(self) -> list[Point]:
        points = []
        for dtype in self.dtypes:
            for head_dim in self.head_dims:
                for mask in self.masks:
                    heads = self.heads or max(1, 2048 // head_dim)
                    shapes = [(max(1, self.tokens // n), n) for n in self.lengths]
                    common = (heads, self.heads_kv or heads, head_dim, dtype, mask == "causal", self.backward)
                    points += [Point(batch, length, *common) for batch, length in shapes]
        return points


CPU_PLAN = Plan(head_dims=(64, 128), lengths=(512, 2048), tokens=2048, dtypes=("fp32",), rounds=3)
"""The defaults on a CPU: the same shapes, smaller."""


@dataclass(frozen=True)
class Point:
    """One problem of a plan: one place on one axis of the picture."""

    batch: int
    length: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: str
    causal: bool
    backward: bool

    def __str__(self) -> str:
        return f"{self.dtype} D={self.head_dim} {'causal' if self.causal else 'full'} S={self.length}"

    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            lengths=Dense(self.batch, self.length, self.length),
            heads_q=self.heads,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=DTYPES[self.dtype],
            scale=self.head_dim**-0.5,
            mask=Causal() if self.causal else Full(),
            phase="backward" if self.backward else "forward",
        )


@dataclass(frozen=True)
class Inputs:
    """q and dout [B, S, H, D], k and v [B, S, Hkv, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, point: Point, device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(heads: int) -> torch.Tensor:
            shape = (point.batch, point.length, heads, point.head_dim)
            return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(DTYPES[point.dtype])

        return cls(normal(point.heads), normal(point.heads_kv), normal(point.heads_kv), normal(point.heads))


def input_sets(point: Point, device: torch.device) -> list[Inputs]:
    """As many different inputs as exceed the L2 cache twice, at most 32."""
    cost = Cost(point.problem())
    count = math.ceil(2 * arch_of(device).l2_bytes / max(1, cost.bytes_read))
    generator = torch.Generator(device).manual_seed(0)
    return [Inputs.random(point, device, generator) for _ in range(min(32, max(1, count)))]
