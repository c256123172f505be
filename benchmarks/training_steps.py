"""Whole training steps of short sequences, with Strobe's attention beside PyTorch's: is a model that trains faster with it?

A GPT of 512 and of 1024 tokens, and a ViT-B/16 of 197 (Dosovitskiy 2021), six layers of 768 in 12 heads: forward, backward and
an AdamW step, in bfloat16 autocast; eager, and compiled whole. Both start from the same weights and read the same inputs. They
take turns, a burst of steps each, so that each follows the other as often as itself.

    python benchmarks/training_steps.py [--rounds 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import strobe
from strobe.lab.bench.bench import balanced_order
from strobe.lab.bench.intervals import Ratio
from strobe.lab.bench.machine import provenance, save

WAYS = ("eager", "compiled")


@dataclass(frozen=True)
class Shape:
    """A model and what it reads in a step."""

    name: str
    batch: int
    tokens: int
    causal: bool
    layers: int = 6
    width: int = 768
    heads: int = 12


SHAPES = (
    Shape("GPT, 512 tokens", 32, 512, True),
    Shape("GPT, 1024 tokens", 16, 1024, True),
    Shape("GPT, 1024 tokens, batch 2", 2, 1024, True),
    Shape("ViT-B/16", 64, 197, False),
)
TINY = (Shape("GPT, 16 tokens", 2, 16, True, 1, 32, 2),)
"""For a CPU."""


def with_strobe(qkv: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = qkv.unbind(2)
    return strobe.attention(q, k, v, mask=strobe.Causal() if causal else strobe.Full())


def with_sdpa(qkv: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


ATTENTIONS: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {"strobe": with_strobe, "SDPA": with_sdpa}


class Block(nn.Module):
    """Attention, then two linear layers, each after a norm and added to the residual stream."""

    def __init__(self, shape: Shape, attention: str):
        super().__init__()
        self.shape, self.attention = shape, ATTENTIONS[attention]
        width = shape.width
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (3, self.shape.heads, self.shape.width // self.shape.heads)
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, heads)
        x = x + self.out(self.attention(qkv, self.shape.causal).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Training:
    """A model that trains on one batch; `step` is one step."""

    def __init__(self, shape: Shape, attention: str, way: str, device: torch.device):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(shape, attention) for _ in range(shape.layers)), nn.LayerNorm(shape.width)).to(
            device
        )
        self.x = torch.randn(shape.batch, shape.tokens, shape.width, device=device)
        self.wanted = torch.randn_like(self.x)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device = device
        self.loss = torch.compile(self._loss) if way == "compiled" else self._loss

    def _loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return F.mse_loss(self.model(self.x).float(), self.wanted)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def measure(shape: Shape, way: str, device: torch.device, rounds: int, seconds: float) -> dict:
    """Milliseconds of a step of each attention, round by round, and the losses after the steps that warm up."""
    torch.compiler.reset()
    runs = {name: Training(shape, name, way, device) for name in ATTENTIONS}
    losses = {name: [float(run.step()) for _ in range(5)] for name, run in runs.items()}
    steps = max(1, round(seconds / burst(runs["SDPA"], 3)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for order in balanced_order(len(names), rounds):
        for i in order:
            found[names[i]].append(1e3 * burst(runs[names[i]], steps))
    return {"shape": asdict(shape), "way": way, "steps": steps, "milliseconds": found, "losses": losses}


def burst(run: Training, steps: int) -> float:
    """Seconds of a step, one after the other as a training loop runs them."""
    wait(run.device)
    begin = time.perf_counter()
    for _ in range(steps):
        run.step()
    wait(run.device)
    return (time.perf_counter() - begin) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ratio(point: dict) -> Ratio:
    """How many times as fast steps are with Strobe."""
    times = point["milliseconds"]
    return Ratio.of([1 / x for x in times["strobe"]], [1 / x for x in times["SDPA"]])


def line(point: dict) -> str:
    times = {name: statistics.median(x) for name, x in point["milliseconds"].items()}
    return f"{point['shape']['name']:28} {point['way']:9} {times['strobe']:8.3f} ms {times['SDPA']:8.3f} ms  {ratio(point)}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a burst")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points = []
    for shape in SHAPES if device.type == "cuda" else TINY:
        for way in WAYS:
            points.append(measure(shape, way, device, options.rounds, options.seconds))
            print(line(points[-1]), flush=True)
            if options.json:  # after each point, so that a run that is cut keeps what it has
                protocol = {"rounds": options.rounds, "seconds": options.seconds}
                save(options.json, {"what": "training steps", **provenance(device), "protocol": protocol, "points": points})


if __name__ == "__main__":
    main(sys.argv[1:])
