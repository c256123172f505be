"""Trains a small GPT on sequences that are sharded across processes, and on the same sequences whole: the same loss?

Each process has a shard of every sequence: its bytes, its positions, its part of the loss. Only attention looks beyond the
shard (`strobe.parallel.attention`); all else is as on one GPU. Weights are the same everywhere, and their gradients are summed.

    python examples/train_gpt_parallel.py                       # 4 processes on the CPU (Gloo), then one
    python examples/train_gpt_parallel.py --method ulysses --layout contiguous
    torchrun --nproc-per-node 4 examples/train_gpt_parallel.py  # the same on 4 GPUs (NCCL), without the run on one
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional as F
from train_gpt import GPT, Batches, Settings, with_strobe

import strobe
from strobe import parallel

TINY = Settings(layers=2, width=64, heads=4, heads_kv=4, context=250, batch=2, steps=20)
"""A context that four processes do not divide, so shards differ in length."""


def shard_loss(model: GPT, text: torch.Tensor, layout: str) -> torch.Tensor:
    """The part that this process's rows have in the loss of predicting each next byte of text [B, S + 1]."""
    given, wanted = (parallel.shard(x, 1, layout=layout) for x in (text[:, :-1], text[:, 1:]))
    where = parallel.positions(text.shape[1] - 1, layout=layout, device=text.device)
    x = model.token(given) + model.position(where)
    logits = model.logits(model.norm(model.blocks(x))).float()
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / text[:, 1:].numel()


def train(settings: Settings, device: torch.device, method: str, layout: str) -> list[float]:
    """The loss of every step, of all processes together."""
    attention = partial(
        parallel.attention, mask=strobe.Causal(), method=method, layout=layout, seqlen=settings.context
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    model = GPT(settings, attention).to(device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    batches, losses = Batches(settings, device), []
    for step in range(settings.steps):
        loss = shard_loss(model, batches[step], layout)
        loss.backward()
        for weight in model.parameters():  # a position of another process has no gradient here
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
        loss = loss.detach()
        dist.all_reduce(loss)
        update(model, optimizer)
        losses.append(loss.item())
    return losses


def train_whole(settings: Settings, device: torch.device) -> list[float]:
    """The same in one process, with whole sequences."""
    torch.manual_seed(settings.seed)
    model = GPT(settings, with_strobe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    batches, losses = Batches(settings, device), []
    for step in range(settings.steps):
        loss = model(batches[step])
        loss.backward()
        update(model, optimizer)
        losses.append(loss.item())
    return losses


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _process(rank: int, settings: Settings, processes: int, folder: str, method: str, layout: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=processes)
    losses = train(settings, torch.device("cpu"), method, layout)
    if rank == 0:
        torch.save(losses, Path(folder, "losses"))
    dist.destroy_process_group()


def train_in_processes(settings: Settings, processes: int, method: str, layout: str) -> list[float]:
    """The losses of `processes` processes on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (settings, processes, folder, method, layout), processes)
        return torch.load(Path(folder, "losses"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="ring", choices=parallel.api.METHODS)
    parser.add_argument("--layout", default="zigzag", choices=parallel.sharding.LAYOUTS)
    parser.add_argument("--processes", type=int, default=4)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # by torchrun
        dist.init_process_group("nccl")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        losses = train(Settings(steps=100, context=4096, batch=4), device, arguments.method, arguments.layout)
        if dist.get_rank() == 0:
            print("\n".join(f"step {step:4}: loss {loss:.4f}" for step, loss in enumerate(losses)))
        dist.destroy_process_group()
        return
    sharded = train_in_processes(TINY, arguments.processes, arguments.method, arguments.layout)
    whole = train_whole(TINY, torch.device("cpu"))
    for step, (ours, one) in enumerate(zip(sharded, whole, strict=True)):
        print(f"step {step:4}: loss {ours:.6f} in {arguments.processes} processes, {one:.6f} in one")
    print(f"they differ by at most {max(abs(a - b) for a, b in zip(sharded, whole, strict=True)):.1e}")


if __name__ == "__main__":
    main()
