"""What a warm call costs the host: its CPU time, beside the peers', and that of a step over a cache. Of a process's first call:
`benchmarks/first_call.py`.

Shapes are tiny and the GPU is waited for every few calls, so that no call waits for it: what is timed is the host alone.

    python benchmarks/host.py [--json FILE] [--calls 2000]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import strobe
from strobe.call import prepared_calls
from strobe.lab.bench.machine import provenance, save
from strobe.lab.bench.peers import peers_for

SHAPE = (1, 128, 4, 128)

ROUNDS, UNCOUNTED = 10, 32


class Way(NamedTuple):
    """A call, and what it is timed in."""

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager] = nullcontext


def warm(calls: int) -> dict[str, dict]:
    """Strobe's ways and every peer that is installed: name -> times, or the reason why there are none.

    In rounds, of which the first is not counted, and in each a call's first ones are not: who comes first would pay for a host
    and a GPU that are not awake yet, and who follows a slow one for cold caches."""
    q, k, v = torch.randn(3, *SHAPE, device="cuda", dtype=torch.bfloat16).unbind()
    leaf, mask = q.clone().requires_grad_(), strobe.Causal()

    def causal():
        return strobe.attention(q, k, v, mask=mask)

    def portable():
        return strobe.attention(q, k, v, mask=mask, backend="portable")

    def operators():
        return mock.patch.object(prepared_calls, "attention", lambda *call: None)

    ways = {
        "strobe.attention, causal": Way(causal),
        "strobe.attention, full": Way(lambda: strobe.attention(q, k, v)),
        "strobe.flash_attn_func, causal": Way(lambda: strobe.flash_attn_func(q, k, v, causal=True)),
        "strobe.attention, causal, with a gradient to come": Way(lambda: strobe.attention(leaf, k, v, mask=mask)),
        "strobe.attention, causal, dropout": Way(lambda: strobe.attention(q, k, v, mask=mask, dropout_p=0.1)),
        "strobe.attention, causal, by the operator": Way(causal, operators),
        "strobe.attention, causal, portable": Way(portable),
        "strobe.attention, causal, portable, by the operator": Way(portable, operators),
        **over_a_cache(),
    }
    results: dict[str, dict] = {}
    for name, peer in peers_for(q.device).items():
        if name.startswith("strobe") or not peer.installed:
            continue
        try:
            native = [x.transpose(1, 2).contiguous() if peer.heads_first else x for x in (q, k, v)]
            with torch.no_grad(), peer.context():
                call = peer.prepare(*native, mask)
                call()
            ways[name] = Way(call, _without_gradients(peer.context))
        except Exception as reason:
            results[name] = {"error": f"{type(reason).__name__}: {reason}"}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            with way.context():
                found = cpu_times(way.call, -(-calls // ROUNDS))
            if turn:
                times[name] += found
    return {name: summary(found) for name, found in times.items()} | results


def over_a_cache() -> dict[str, Way]:
    """Steps of 8 requests over pages of 64 keys, of one token each."""
    heads, (batch, page, columns), dim = SHAPE[2], (8, 64, 4), SHAPE[3]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = (normal(batch, 1, heads, dim) for _ in range(3))
    pages = normal(batch * columns, page, heads, dim), normal(batch * columns, page, heads, dim)
    lengths = torch.full((batch,), 100, dtype=torch.int32, device="cuda")
    table = torch.arange(batch * columns, dtype=torch.int32, device="cuda").view(batch, columns)
    cache, turns = strobe.Cache(*pages, lengths, table), (normal(256, dim // 2), normal(256, dim // 2))
    rotary, given = strobe.Rotary(*turns), {"cache_seqlens": lengths, "block_table": table, "causal": True}
    packed = {"max_seqlen_q": 1, "seqused_k": lengths, "block_table": table, "causal": True, "out": torch.empty_like(q)[:, 0]}
    rows, bounds = q[:, 0], torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    fa3 = {}
    if importlib.util.find_spec("flash_attn_interface"):
        from flash_attn_interface import flash_attn_with_kvcache

        of_fa3 = partial(flash_attn_with_kvcache, q, *pages, cache_seqlens=lengths, page_table=table, causal=True)
        fa3["FA3 flash_attn_with_kvcache"] = Way(of_fa3)
        fa3["FA3 flash_attn_with_kvcache, appending with a rotary embedding"] = Way(
            partial(of_fa3, k=k, v=v, rotary_cos=turns[0], rotary_sin=turns[1])
        )
    return {
        "strobe.decode": Way(lambda: strobe.decode(q, cache)),
        "strobe.decode, deterministic": Way(lambda: strobe.decode(q, cache, deterministic=True)),
        "strobe.append, with a rotary embedding": Way(lambda: strobe.append(cache, k, v, q=q, rotary=rotary)),
        "strobe.flash_attn_with_kvcache": Way(lambda: strobe.flash_attn_with_kvcache(q, *pages, **given)),
        "strobe.flash_attn_with_kvcache, appending with a rotary embedding": Way(
            lambda: strobe.flash_attn_with_kvcache(q, *pages, k, v, *turns, **given)
        ),
        "strobe.flash_attn_varlen_func over pages": Way(lambda: strobe.flash_attn_varlen_func(rows, *pages, bounds, **packed)),
        **fa3,
    }


def _without_gradients(context: Callable[[], AbstractContextManager]) -> Callable[[], AbstractContextManager]:
    @contextmanager
    def both():
        with torch.no_grad(), context():
            yield

    return both


def cpu_times(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of each of some calls, after some others."""
    times = []
    for number in range(UNCOUNTED + calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        if number % 8 == 7:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return times[UNCOUNTED:]


def summary(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {"median_us": round(statistics.median(times), 2), "p90_us": round(times[int(0.9 * len(times))], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calls", type=int, default=2000)
    arguments = parser.parse_args()
    results = {"shape": SHAPE, "warm": warm(arguments.calls)}
    for name, times in results["warm"].items():
        text = times.get("error") or f"{times['median_us']:8.1f} us   p90 {times['p90_us']:8.1f} us"
        print(f"{name:<68} {text}")
    if arguments.json:
        save(arguments.json, {"what": "host", **provenance(torch.device("cuda")), **results})


if __name__ == "__main__":
    main()
