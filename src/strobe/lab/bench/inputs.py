"""Makes the inputs of a benchmark: normal numbers, a model's activations, or the worst that an optimistic softmax can meet.

normal: q, k and v are drawn from N(0, 1).

model: q, k and v of all heads of all layers of the encoder of `strobe demo` (all-MiniLM-L6-v2: 72 heads of 32 columns), on one
passage of the demo's text as long as the model takes. A head of D columns is D / 32 neighbouring heads of the model side by
side, q scaled so that logits spread as the model's do (neighbours are alike: their sum spreads more than the kernel's scale
1 / sqrt(D) takes back). Where a sequence is longer than the passage, the passage repeats, which does not change any row's
maximum. Heads, sequences and sets differ in the model's head at which they begin; query heads that share a key head differ in
the token at which they begin.

worst: N(0, 1), but for one column, which makes the logits of every row grow from key to key, by `GROWTH` powers of two or more.
So whichever keys a row's reference is taken from, later keys exceed it by more than any dtype holds, and the optimistic softmax
computes nearly all blocks twice: all but those of the first rows under a mask, which see too few keys.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import torch

from strobe.device import arch_of
from strobe.lab.bench.plan import DTYPES, Inputs, Point

KINDS = ("normal", "model", "worst")

HEAD = 32
"""The head dim of the model."""

GROWTH, LEAST = 0.5, 1024
"""By how many powers of two the weights of `worst` grow from one key to the next, and at least over a whole sequence. A float32
holds 2^128; over a window of 1024 keys they grow by 2^512."""


def input_sets(point: Point, device: torch.device, kind: str = "normal") -> list[Inputs]:
    """Different sets of inputs, at most 32, so many that together they are at least twice as large as the L2 cache. ValueError
    where inputs of this kind cannot be made."""
    count = math.ceil(2 * arch_of(device).l2_bytes / max(1, point.bytes_read))
    generator = torch.Generator(device).manual_seed(0)
    make = {"normal": Inputs.random, "model": model, "worst": worst}[kind]
    return [make(point, device, generator) for _ in range(min(32, max(1, count)))]


def worst(point: Point, device: torch.device, generator: torch.Generator) -> Inputs:
    """The inputs called "worst" above. The growing column of q and that of k are equally large at the last key."""
    inputs = Inputs.random(point, device, generator)
    growth = max(GROWTH, LEAST / point.length) * math.log(2) * math.sqrt(point.head_dim)
    size = math.sqrt(growth * point.length)
    inputs.q[..., 0] = size
    inputs.k[..., 0] = (torch.arange(point.length, device=device) * (growth / size))[:, None].to(inputs.k.dtype)
    return inputs


def model(point: Point, device: torch.device, generator: torch.Generator) -> Inputs:
    """The inputs called "model" above. ValueError for a head dim that is no multiple of the model's, or where there is no
    model."""
    if point.head_dim % HEAD or point.head_dim_v % HEAD:
        raise ValueError(f"a model's activations need head dims in multiples of {HEAD}, got {point.heading}")
    q, k, v = (x.to(device) for x in activations())
    heads, length = q.shape[:2]
    q = q * (_spread(1) / _spread(point.head_dim // HEAD))
    first = int(torch.randint(heads, (), generator=generator, device=device))
    group = point.heads // point.heads_kv

    def tiled(x: torch.Tensor, count: int, dim: int, shift: int) -> torch.Tensor:
        """`count` heads made of the model's x, [B, S, count, dim]. Head j belongs to key head j // (count / key heads)."""
        numbers = torch.arange(point.batch * count, device=device).view(point.batch, count)
        each = count // point.heads_kv
        source = first + (numbers // each) * (point.head_dim // HEAD)
        columns = (source[..., None] + torch.arange(dim // HEAD, device=device)) % heads
        token = (torch.arange(point.length, device=device)[None] + shift * (numbers % each).view(-1, 1)) % length
        picked = x[columns.view(-1, 1, dim // HEAD), token[..., None]]
        return picked.reshape(point.batch, count, point.length, dim).transpose(1, 2).contiguous().to(DTYPES[point.dtype])

    drawn = Inputs.random(point, device, generator) if point.backward else None
    return Inputs(
        tiled(q, point.heads, point.head_dim, length // (group + 1)),
        tiled(k, point.heads_kv, point.head_dim, 0),
        tiled(v, point.heads_kv, point.head_dim_v, 0),
        None if drawn is None else drawn.dout,
    )


@functools.cache
def _spread(count: int) -> float:
    """The standard deviation of a row's logits, on average over rows, where `count` neighbouring heads of the model are one
    head."""
    q, k, _ = activations()
    logits = torch.einsum("hid,hjd->hij", q, k)
    summed = torch.stack([logits.roll(-shift, 0) for shift in range(count)]).sum(0)
    return (summed / math.sqrt(count)).std(-1).mean().item()


@functools.cache
def activations() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of all heads of all layers of the model, [heads, tokens, 32] each. They are read from the file that
    $STROBE_ACTIVATIONS names (made by `python -m strobe.lab.bench.inputs FILE`, for machines without the model), or
    computed."""
    if given := os.environ.get("STROBE_ACTIVATIONS"):
        q, k, v = (x.float() for x in torch.load(given, weights_only=True))
        return q, k, v
    return computed()


@torch.inference_mode()
def computed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the model in float32 and returns the `activations`. ValueError if it is not installed."""
    try:
        from transformers import AttentionInterface, AutoModel, AutoTokenizer, logging

        from strobe_cli.demo import model_folder

        folder = model_folder()
    except (ImportError, SystemExit) as error:
        raise ValueError(f"a model's activations need the demo's model, got none: {error}") from None
    from strobe_cli.demo_text import TEXTS

    seen: list[tuple[torch.Tensor, ...]] = []

    def record(module, query, key, value, attention_mask, *, scaling=None, **_):
        seen.append((query[0], key[0], value[0]))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None

    logging.disable_progress_bar()
    AttentionInterface.register("recording", record)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    network = AutoModel.from_pretrained(folder, attn_implementation="recording", local_files_only=True).eval()
    most = network.config.max_position_embeddings
    network(input_ids=tokenizer(" ".join(TEXTS), truncation=True, max_length=most, return_tensors="pt")["input_ids"])
    q, k, v = (torch.cat([layer[i] for layer in seen]).half().float() for i in range(3))
    return q, k, v


if __name__ == "__main__":
    import sys

    torch.save([x.half() for x in computed()], Path(sys.argv[1]))
