"""How long a token takes that a model of transformers generates: Strobe's attention beside eager and SDPA.

A Llama of 1.2 billion random weights (32 heads on 8, head dim 64, 16 layers), in bfloat16, by `generate()` over transformers'
own caches and over Strobe's pages; and by steps that are one CUDA graph, over what keeps its place in memory. All ways have the
same weights and prompts and take turns. A token's time is that of many tokens less that of the first one.

    python benchmarks/generate.py [--rounds 3] [--max-seconds 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import DynamicCache, StaticCache

from strobe.integrations.paged_cache import PagedCache
from strobe.integrations.transformers import register
from strobe.lab.bench.bench import balanced_order
from strobe.lab.bench.failures import compact
from strobe.lab.bench.machine import provenance, save


class Shape(NamedTuple):
    """Prompts, and how many tokens are generated after each."""

    batch: int
    prompt: int
    tokens: int


SHAPES = (Shape(1, 512, 33), Shape(1, 8192, 33), Shape(8, 4096, 33))
TINY = (Shape(2, 9, 4),)
"""For a CPU."""

LLAMA = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8)
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


class Way(NamedTuple):
    """How tokens are generated. attention: transformers' name of it. graph: each step is the replay of one CUDA graph."""

    attention: str
    cache: str
    graph: bool = False

    def __str__(self) -> str:
        return f"{self.attention}, {self.cache}{', CUDA graph' if self.graph else ''}"


WAYS = (
    Way("eager", "dynamic cache"), Way("sdpa", "dynamic cache"), Way("sdpa", "static cache"), Way("strobe", "dynamic cache"),
    Way("strobe", "static cache"), Way("strobe", "pages"), Way("sdpa", "static cache", graph=True),
    Way("strobe", "static cache", graph=True), Way("strobe", "pages", graph=True),
)  # fmt: skip


def model_of(device: torch.device):
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=16384, **(LLAMA if device.type == "cuda" else SMALL))
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()


def cache_of(way: Way, model, shape: Shape):
    length = shape.prompt + shape.tokens
    if way.cache == "pages":
        return PagedCache(shape.batch, length)
    return StaticCache(config=model.config, max_cache_len=length) if way.cache == "static cache" else DynamicCache()


def seconds_of_generate(model, way: Way, shape: Shape, prompt: torch.Tensor) -> float:
    """Seconds of one token, of those after the first."""
    options = {"do_sample": False, "pad_token_id": 0, "disable_compile": True, "attention_mask": torch.ones_like(prompt)}

    def timed(tokens: int) -> float:
        begin = time.perf_counter()
        cache = cache_of(way, model, shape)
        model.generate(prompt, past_key_values=cache, min_new_tokens=tokens, max_new_tokens=tokens, **options)
        synchronize(prompt.device)
        return time.perf_counter() - begin

    first = timed(1)
    return (timed(shape.tokens) - first) / (shape.tokens - 1)


def steps_of_a_graph(model, way: Way, shape: Shape, prompt: torch.Tensor) -> Callable[[], float]:
    """What generates tokens by replays of a step, always the same ones, and returns the seconds of one."""
    cache = cache_of(way, model, shape)
    token = model(prompt, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    position = torch.full_like(token, shape.prompt)

    def step() -> None:
        logits = model(token, past_key_values=cache, position_ids=position).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    synchronize(prompt.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    replays, layers = shape.tokens - 2, [vars(layer).values() for layer in cache.layers]
    lengths = [x for layer in layers for x in layer if isinstance(x, torch.Tensor) and x.numel() <= shape.batch]
    now = [(x, x.clone()) for x in (*lengths, token, position)]

    def timed(kept=cache) -> float:  # whose memory the graph reads
        for x, before in now:
            x.copy_(before)
        synchronize(prompt.device)
        begin = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        synchronize(prompt.device)
        return (time.perf_counter() - begin) / replays

    return timed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def measure(model, shape: Shape, rounds: int, deadline: float) -> dict:
    """Milliseconds of a token, by the ways' names; or why a way has none."""
    prompt = torch.randint(1, model.config.vocab_size, (shape.batch, shape.prompt), device=model.device)
    calls: dict[Way, Callable[[], float]] = {}
    refused: dict[str, str] = {}
    for way in WAYS:
        if way.graph and model.device.type != "cuda":
            continue
        try:
            model.set_attn_implementation(way.attention)
            if way.graph:
                calls[way] = steps_of_a_graph(model, way, shape, prompt)
            else:
                calls[way] = partial(seconds_of_generate, model, way, shape, prompt)
            calls[way]()  # compiles
        except Exception as error:
            calls.pop(way, None)
            refused[str(way)] = compact(error)
    found: dict[Way, list[float]] = {way: [] for way in calls}
    ways = list(calls)
    for order in balanced_order(len(ways), rounds):
        if time.monotonic() > deadline and all(found.values()):
            break
        for way in (ways[i] for i in order):
            model.set_attn_implementation(way.attention)
            found[way].append(1e3 * calls[way]())
    return {**shape._asdict(), "ms": {str(way): statistics.median(ms) for way, ms in found.items()}, "refused": refused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.max_seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    register()
    model, points = model_of(device), []
    for shape in SHAPES if device.type == "cuda" else TINY:
        if points and time.monotonic() > deadline:
            break
        points.append(measure(model, shape, arguments.rounds, deadline))
        print(f"batch {shape.batch}, prompts of {shape.prompt} tokens: milliseconds of a token", flush=True)
        for name, ms in points[-1]["ms"].items():
            print(f"  {name:<36} {ms:7.2f}", flush=True)
        for name, reason in points[-1]["refused"].items():
            print(f"  {name:<36} refused: {reason}", flush=True)
        if arguments.json:
            save(arguments.json, {"what": "generate", **provenance(device), "rounds": arguments.rounds, "points": points})


if __name__ == "__main__":
    main()
