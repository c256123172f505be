"""Serves requests with a small random model: continuous batching over a paged cache, in plain PyTorch and Strobe.

Requests come and go. Each step takes one packed batch: a part of the prompts that wait, and one token of each request that
generates. `strobe.append` writes the new keys to pages, `strobe.decode` attends over them, in one call for prompts and tokens
alike. A request is let in when the pages for all that it may become are free, and gives them back when it ends.

    python examples/serve.py                          # on a GPU in bfloat16: 256 requests; on a CPU: 24 small ones
    python examples/serve.py --page 1 --slots 4
    python examples/serve.py --check                  # then each request again, alone and without a cache: the same tokens?
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import strobe
from strobe.lab.bench.machine import provenance, save


@dataclass(frozen=True)
class Settings:
    """What is served, and with how much room; the command line's options have the same names."""

    layers: int = 16
    width: int = 2048
    heads: int = 16
    heads_kv: int = 4
    vocabulary: int = 32000
    requests: int = 256
    prompt: int = 512
    """Tokens of the longest prompt; the shortest has an eighth."""
    tokens: int = 256
    """The most tokens that a request wants; the least is an eighth."""
    wait: float = 0.5
    """Steps between two arrivals, on average."""
    slots: int = 64
    """Requests that generate at once, at most."""
    pages: int = 4096
    page: int = 16
    """Keys of a page."""
    chunk: int = 1024
    """Tokens of prompts that a step takes, at most."""
    seed: int = 0


SMALL = Settings(2, 64, 4, 2, 256, requests=24, prompt=64, tokens=24, wait=1.0, slots=8, pages=60, page=8, chunk=48)
"""What a CPU serves in a few seconds."""


# ---- the model


class Layer(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        self.dim, self.heads, self.heads_kv = s.width // s.heads, s.heads, s.heads_kv
        self.before, self.between = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.qkv = nn.Linear(s.width, (s.heads + 2 * s.heads_kv) * self.dim, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)
        self.up, self.down = nn.Linear(s.width, 3 * s.width, bias=False), nn.Linear(3 * s.width, s.width, bias=False)

    def forward(self, x, attend):
        """attend(q, k, v): attention of rows [total, heads, dim], rotary embedding included."""
        sizes = self.heads, self.heads_kv, self.heads_kv
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (-1, self.dim)).split(sizes, dim=-2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        return x + self.down(F.silu(self.up(self.between(x))))


class Model(nn.Module):
    """A decoder-only transformer with random weights."""

    def __init__(self, s: Settings):
        super().__init__()
        self.embed = nn.Embedding(s.vocabulary, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm, self.head = nn.RMSNorm(s.width), nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, tokens, attends, last):
        """Logits of the rows `last`, of packed tokens [total]; attends: what each layer attends with."""
        x = self.embed(tokens)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return self.head(self.norm(x[last]))


def rotary_of(s: Settings, device: torch.device) -> strobe.Rotary:
    n = s.width // s.heads // 2
    angles = torch.outer(torch.arange(s.prompt + s.tokens), 10000.0 ** -(torch.arange(n) / n))
    return strobe.Rotary(angles.cos().to(device), angles.sin().to(device))


# ---- requests


@dataclass
class Request:
    """A request: its prompt, how many tokens it wants, the step at which it comes; then what happened to it."""

    prompt: list[int]
    wants: int
    arrives: float
    made: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    length: int = 0
    """Keys that it has in the cache."""
    came: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each of its tokens was there."""

    @property
    def waiting(self) -> list[int]:
        """Tokens whose keys are not in the cache yet: what is left of the prompt, or the newest token."""
        return (self.prompt + self.made)[self.length :]


def requests_of(s: Settings) -> list[Request]:
    draw, now, found = random.Random(s.seed), 0.0, []
    for _ in range(s.requests):
        prompt = [draw.randrange(s.vocabulary) for _ in range(draw.randint(max(1, s.prompt // 8), s.prompt))]
        found.append(Request(prompt, draw.randint(max(1, s.tokens // 8), s.tokens), now))
        now += draw.expovariate(1 / s.wait)
    return found


# ---- the server


class Server:
    """Requests that generate, and the pages in which their keys and values lie."""

    def __init__(self, s: Settings, model: Model, device: torch.device, dtype: torch.dtype):
        self.s, self.model, self.device, self.rotary = s, model, device, rotary_of(s, device)
        shape = s.pages, s.page, s.heads_kv, s.width // s.heads
        self.caches = [[torch.empty(shape, dtype=dtype, device=device) for _ in range(2)] for _ in range(s.layers)]
        self.free, self.running, self.columns = list(range(s.pages)), [], -(-(s.prompt + s.tokens) // s.page)

    def let_in(self, queue: deque[Request]) -> None:
        """Let requests in, in their order, as long as there is a slot, and room for all that the next one may become."""
        while queue and len(self.running) < self.s.slots:
            needed = -(-(len(queue[0].prompt) + queue[0].wants) // self.s.page)
            if needed > len(self.free):
                return
            request = queue.popleft()
            request.pages, self.free = self.free[:needed], self.free[needed:]
            self.running.append(request)

    def step(self) -> int:
        """Compute a packed batch, a token for each request whose prompt is done. Returns how many rows it had."""
        room, batch, rows = self.s.chunk, [], []
        for request in self.running:
            row = request.waiting if request.made else request.waiting[:room]
            room -= 0 if request.made else len(row)
            if row:
                batch.append(request)
                rows.append(row)
        logits = self.logits(batch, rows)
        newest = logits.argmax(-1).tolist()  # waits for the GPU: the only time in a step
        now = time.perf_counter()
        for request, row, token in zip(batch, rows, newest, strict=True):
            request.length += len(row)
            if request.length >= len(request.prompt):
                request.made.append(token)
                request.times.append(now)
            if len(request.made) == request.wants:
                self.free += request.pages
        self.running = [request for request in self.running if len(request.made) < request.wants]
        return sum(map(len, rows))

    def logits(self, batch: list[Request], rows: list[list[int]]) -> torch.Tensor:
        """Logits of the last row of each request; the keys of all rows are written."""

        def ints(numbers: list) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32).to(self.device, non_blocking=True)

        cu, longest = ints([0, *map(len, rows)]).cumsum(0, dtype=torch.int32), max(map(len, rows))
        lengths = ints([request.length for request in batch])
        table = ints([request.pages + [-1] * (self.columns - len(request.pages)) for request in batch])

        def attend_with(k_pages, v_pages):
            def attend(q, k, v):
                cache = strobe.Cache(k_pages, v_pages, lengths, table)
                cache, q = strobe.append(cache, k, v, q=q, rotary=self.rotary, cu_seqlens=cu, cu_seqlens_q=cu)
                return strobe.decode(q, cache, cu_seqlens_q=cu, max_seqlen_q=longest)

            return attend

        tokens = ints([token for row in rows for token in row])
        return self.model(tokens, [attend_with(*pages) for pages in self.caches], cu[1:] - 1)


# ---- the same without a cache


def alone(s: Settings, model: Model, request: Request, device: torch.device) -> list[int]:
    """A request's tokens, made without a server: attention over the whole sequence at every token."""
    rotary, tokens = rotary_of(s, device), list(request.prompt)

    def turned(x):
        cos, sin = (table[: len(x), None].to(x.dtype) for table in rotary[:2])
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(q, k, v):
        return strobe.attention(turned(q)[None], turned(k)[None], v[None], mask=strobe.Causal())[0]

    while len(tokens) < len(request.prompt) + request.wants:
        logits = model(torch.tensor(tokens, device=device), [attend] * s.layers, [-1])
        tokens.append(int(logits.argmax()))
    return tokens[len(request.prompt) :]


# ---- the run


def serve(s: Settings, device: torch.device) -> tuple[dict, list[Request], Model]:
    """Serve all requests. Returns what was measured, the requests with their tokens, and the model."""
    torch.manual_seed(s.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Model(s).to(dtype).requires_grad_(False)
    server, coming, queue = Server(s, model, device, dtype), deque(requests_of(s)), deque()
    every, steps = list(coming), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(every))
        while coming or queue or server.running:
            now = time.perf_counter()
            while coming and coming[0].arrives <= len(steps):
                queue.append(coming.popleft())
                queue[-1].came = now
            server.let_in(queue)
            running = len(server.running)
            rows = server.step() if running else 0
            steps.append(
                {"requests": running, "rows": rows, "pages": s.pages - len(server.free), "seconds": time.perf_counter() - now}
            )
            done = len(every) - len(coming) - len(queue) - len(server.running)
            progress.update(
                task, completed=done, description=f"{running} generate, {len(queue)} wait, {steps[-1]['pages']} pages"
            )
    return measured(every, steps), every, model


def measured(requests: list[Request], steps: list[dict]) -> dict:
    """Tokens a second, and the latencies of requests, in seconds."""
    tokens = sum(len(request.made) for request in requests)
    gaps = [b - a for request in requests for a, b in zip(request.times, request.times[1:], strict=False)]
    seconds = max(request.times[-1] for request in requests) - min(request.came for request in requests)
    return {
        "tokens": tokens, "prompt_tokens": sum(len(request.prompt) for request in requests), "seconds": seconds,
        "tokens_a_second": tokens / seconds, "first_token": [request.times[0] - request.came for request in requests],
        "next_token": gaps, "steps": steps,
    }  # fmt: skip


def show(found: dict, console: Console) -> None:
    steps = [step for step in found["steps"] if step["rows"]]
    table = Table(title=f"{found['tokens']} tokens after {found['prompt_tokens']} of prompts, in {found['seconds']:.2f} s")
    for name in ("", "median", "95 %"):
        table.add_column(name, justify="left" if not name else "right")
    for name, key in (("first token, ms", "first_token"), ("each further token, ms", "next_token")):
        table.add_row(name, f"{1e3 * median(found[key]):.1f}", f"{1e3 * quantiles(found[key], n=20)[-1]:.1f}")
    for name, key in (("requests of a step", "requests"), ("rows of a step", "rows"), ("pages in use", "pages")):
        numbers = [step[key] for step in steps]
        table.add_row(name, f"{median(numbers):.0f}", f"{quantiles(numbers, n=20)[-1]:.0f}")
    console.print(table)
    console.print(f"{found['tokens_a_second']:.0f} tokens a second")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in fields(Settings):
        parser.add_argument(f"--{one.name}", type=type(one.default))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="then make each request's tokens again, alone and without a cache")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    changes = {one.name: getattr(options, one.name) for one in fields(Settings) if getattr(options, one.name) is not None}
    s = replace(Settings() if device.type == "cuda" else SMALL, **changes)
    if -(-(s.prompt + s.tokens) // s.page) > s.pages:
        parser.error(f"pages must hold the longest request, {s.prompt + s.tokens} keys, got {s.pages} of {s.page}")
    found, requests, model = serve(s, device)
    console = Console()
    show(found, console)
    other = [request for request in requests if options.check and alone(s, model, request, device) != request.made]
    if options.check:
        console.print(f"{len(requests) - len(other)} of {len(requests)} requests have the tokens that they have alone")
    if options.json is not None:
        save(options.json, {"what": "serve", **provenance(device), "settings": asdict(s), **found})
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
