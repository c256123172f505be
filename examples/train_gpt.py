"""Trains a small GPT twice, with Strobe's attention and with PyTorch's: the same start, the same data, the same loss?

A byte-level GPT in plain PyTorch reads the English that ships with Python (`pydoc_data.topics`). Two copies of it, one for each
attention, take turns, a window of steps each, on the same batches; on a GPU in bfloat16 autocast. Writes the loss of every step
and the time of every window as JSON, and a picture beside it.

    python examples/train_gpt.py                      # on a GPU: 600 steps of 32 x 512 bytes, 6 layers of 512
    python examples/train_gpt.py --heads-kv 2         # the same with GQA
    python examples/train_gpt.py --context 4096 --batch 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn import functional as F

import strobe
from strobe.lab.bench.machine import provenance, save
from strobe.lab.bench.plot import PEERS, STROBE

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [B, S, H, D], k and v [B, S, Hkv, D] -> out [B, S, H, D], causal."""

COLORS = {"strobe": STROBE, "SDPA": PEERS[0]}


@dataclass(frozen=True)
class Settings:
    """Of the model and its training; the command line's options have the same names."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    heads_kv: int = 8
    context: int = 512
    batch: int = 32
    steps: int = 600
    window: int = 20
    """Steps that one model takes before the other has its turn, and over which time is measured."""
    learning_rate: float = 1e-3
    seed: int = 0


TINY = Settings(layers=2, width=64, heads=4, heads_kv=4, context=128, batch=4, steps=40, window=10)
"""For a CPU."""


# ---- attention


def with_strobe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return strobe.attention(q, k, v, mask=strobe.Causal())


def with_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"strobe": with_strobe, "SDPA": with_sdpa}


# ---- the model


class Block(nn.Module):
    """Attention, then two linear layers, each after a norm and added to the residual stream."""

    def __init__(self, settings: Settings, attention: Attention):
        super().__init__()
        width, head_dim = settings.width, settings.width // settings.heads
        self.attention, self.head_dim = attention, head_dim
        self.heads = (settings.heads, settings.heads_kv, settings.heads_kv)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (sum(self.heads), self.head_dim))
        x = x + self.out(self.attention(*qkv.split(self.heads, dim=2)).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Bytes [B, S] -> the loss of predicting each next byte."""

    def __init__(self, settings: Settings, attention: Attention):
        super().__init__()
        self.token = nn.Embedding(256, settings.width)
        self.position = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.Sequential(*(Block(settings, attention) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.logits = nn.Linear(settings.width, 256, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.token(given) + self.position.weight[: given.shape[1]]
        return F.cross_entropy(self.logits(self.norm(self.blocks(x))).float().flatten(0, 1), wanted.flatten())


# ---- training


def corpus() -> torch.Tensor:
    """The help texts of Python, as bytes."""
    return torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8)


class Batches:
    """Random pieces of the text, the same in every run of a seed: step -> bytes [batch, context + 1]."""

    def __init__(self, settings: Settings, device: torch.device):
        text, generator = corpus(), torch.Generator().manual_seed(settings.seed)
        shape = (settings.steps, settings.batch, 1)
        self._begins = torch.randint(len(text) - settings.context, shape, generator=generator).to(device)
        self._text, self._offsets = text.to(device), torch.arange(settings.context + 1, device=device)

    def __getitem__(self, step: int) -> torch.Tensor:
        return self._text[self._begins[step] + self._offsets].long()


class Training:
    """One model under way with one attention."""

    def __init__(self, settings: Settings, attention: Attention, device: torch.device):
        torch.manual_seed(settings.seed)
        self._settings, self._device = settings, device
        self._model = GPT(settings, attention).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=settings.learning_rate, fused=device.type == "cuda")
        warmup = max(1, settings.steps // 20)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / warmup))
        self.losses: list[float] = []
        self.window_ms: list[float] = []
        """Of a step, the mean of each window."""

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self._model.parameters())

    def window(self, batches: list[torch.Tensor]) -> None:
        """A step on each batch. Nothing waits for the GPU in between; its time is that of all of them, whole."""
        self._synchronize()
        begin = time.perf_counter()
        losses = [self._step(batch) for batch in batches]
        self._synchronize()
        self.window_ms.append((time.perf_counter() - begin) / len(batches) * 1e3)
        self.losses += torch.stack(losses).tolist()

    def _step(self, batch: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            loss = self._model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        return loss.detach()

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def train(settings: Settings, device: torch.device, console: Console) -> dict:
    """Trains with every attention, in turns, and returns what was seen as a JSON object."""
    batches = Batches(settings, device)
    trainings = {name: Training(settings, attention, device) for name, attention in ATTENTIONS.items()}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=settings.steps)
        for number, first in enumerate(range(0, settings.steps, settings.window)):
            window = [batches[step] for step in range(first, min(first + settings.window, settings.steps))]
            for name in list(trainings) if number % 2 == 0 else reversed(trainings):
                trainings[name].window(window)
            losses = ", ".join(f"{name} {training.losses[-1]:.3f}" for name, training in trainings.items())
            progress.update(task, advance=len(window), description=f"loss {losses}")
    return {
        "what": "train",
        **provenance(device),
        "settings": asdict(settings),
        "dtype": "bf16 autocast" if device.type == "cuda" else "fp32",
        "parameters": trainings["strobe"].parameters,
        "bytes": len(corpus()),
        "runs": {
            name: {"loss": run.losses, "window_ms": run.window_ms, "step_ms": step_ms(run.window_ms)}
            for name, run in trainings.items()
        },
    }


def step_ms(window_ms: list[float]) -> float:
    """The median window; the first one compiles kernels, and counts only if there is no other."""
    return statistics.median(window_ms[1:] or window_ms)


# ---- what a user sees


def differences(report: dict) -> list[float]:
    """Strobe's loss minus SDPA's, by step."""
    ours, theirs = (report["runs"][name]["loss"] for name in ("strobe", "SDPA"))
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def summary(report: dict) -> str:
    """Losses at the end, how far they came apart, and the time of a step."""
    tail = max(1, report["settings"]["steps"] // 10)
    lines = [f"{report['device']['name']}, {report['parameters'] / 1e6:.1f} M parameters, {report['dtype']}"]
    for name, run in report["runs"].items():
        loss = statistics.fmean(run["loss"][-tail:])
        lines.append(f"{name:<7} loss {loss:.4f} (mean of the last {tail} steps), {run['step_ms']:.2f} ms a step")
    apart = [abs(difference) for difference in differences(report)]
    lines.append(f"losses differ by {statistics.fmean(apart):.1e} on average, by {max(apart):.1e} at most")
    return "\n".join(lines)


def draw(report: dict, path: Path) -> None:
    """Both loss curves on each other, their difference below, and the time of a step at the side, as PNG."""
    figure = plt.figure(figsize=(10, 5))
    grid = figure.add_gridspec(2, 2, height_ratios=(2, 1), width_ratios=(4, 1))
    loss, difference, times = (figure.add_subplot(grid[place]) for place in ((0, 0), (1, 0), (slice(None), 1)))
    for name, width in (("SDPA", 3.0), ("strobe", 1.0)):
        loss.plot(report["runs"][name]["loss"], color=COLORS[name], linewidth=width, label=name)
    loss.set_ylabel("loss, nats a byte")
    loss.legend(frameon=False)
    difference.plot(differences(report), color="black", linewidth=0.8)
    difference.axhline(0.0, color="#888888", linewidth=0.8)
    difference.set_ylabel("strobe - SDPA")
    difference.set_xlabel("step")
    for place, (name, run) in enumerate(report["runs"].items()):
        times.bar(place, run["step_ms"], color=COLORS[name])
        times.annotate(f"{run['step_ms']:.3g}", (place, run["step_ms"]), ha="center", va="bottom")
    times.set_xticks(range(len(report["runs"])), report["runs"])
    times.set_ylabel("ms a step, whole")
    for panel in (loss, difference, times):
        panel.spines[["top", "right"]].set_visible(False)
    settings = report["settings"]
    shape = f"{settings['layers']} layers of {settings['width']}, {settings['batch']} x {settings['context']} bytes a step"
    figure.suptitle(f"GPT, {shape}, {report['dtype']}, {report['device']['name']}, {report['date'][:10]}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


def default_path(report: dict) -> Path:
    device = report["device"]["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    return Path("benchmarks/results") / f"train-gpt-{device}-{report['date'][:10]}.json"


def parsed(arguments: list[str], defaults: Settings) -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/train-gpt-<device>-<date>.json")
    for option in fields(Settings):
        default = getattr(defaults, option.name)
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(default), default=default, help=f"{default}")
    options = vars(parser.parse_args(arguments))
    path = options.pop("json")
    return Settings(**options), path


def main(arguments: list[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings, path = parsed(arguments, Settings() if device.type == "cuda" else TINY)
    report = train(settings, device, Console(stderr=True))
    path = path or default_path(report)
    save(path, report)
    draw(report, path.with_suffix(".png"))
    print(summary(report))
    print(f"written: {path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main(sys.argv[1:])
