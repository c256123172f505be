"""What a call costs the host: CPU time of a warm call, beside the peers', and the first call of a process.

Shapes are tiny and the GPU is waited for every few calls, so that no call waits for it: what is timed is the host alone.

    python benchmarks/host.py [--json FILE] [--calls 2000]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

import strobe
from strobe import eager
from strobe.lab.peers import peers_for

SHAPE = (1, 128, 4, 128)

FIRST_CALL = """
import time, torch, strobe
q, k, v = torch.randn(3, 1, 128, 4, 128, device="cuda", dtype=torch.bfloat16).unbind()
torch.cuda.synchronize()
begin = time.perf_counter()
strobe.attention(q, k, v, mask=strobe.Causal())
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def cpu_time(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Microseconds of one warm call: the median and the 90th percentile."""
    times = []
    for number in range(calls + 100):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        if number % 8 == 7:
            torch.cuda.synchronize()
    times = sorted(times[100:])
    return {"median_us": round(statistics.median(times), 2), "p90_us": round(times[int(0.9 * calls)], 2)}


def warm(calls: int) -> dict[str, dict]:
    """Strobe's ways and every peer that is installed: name -> times, or the reason why there are none."""
    q, k, v = torch.randn(3, *SHAPE, device="cuda", dtype=torch.bfloat16).unbind()
    leaf, mask = q.clone().requires_grad_(), strobe.Causal()
    ours: dict[str, Callable[[], object]] = {
        "strobe.attention, causal": lambda: strobe.attention(q, k, v, mask=mask),
        "strobe.attention, full": lambda: strobe.attention(q, k, v),
        "strobe.flash_attn_func, causal": lambda: strobe.flash_attn_func(q, k, v, causal=True),
        "strobe.attention, causal, with a gradient to come": lambda: strobe.attention(leaf, k, v, mask=mask),
    }
    results = {name: cpu_time(call, calls) for name, call in ours.items()}
    with mock.patch.object(eager, "attention", lambda *call: None):
        results["strobe.attention, causal, by the operator"] = cpu_time(ours["strobe.attention, causal"], calls)
    for name, peer in peers_for(q.device).items():
        if name.startswith("strobe") or not peer.installed:
            continue
        try:
            native = [x.transpose(1, 2).contiguous() if peer.heads_first else x for x in (q, k, v)]
            with torch.no_grad(), peer.context():
                results[name] = cpu_time(peer.prepare(*native, mask), calls)
        except Exception as reason:
            results[name] = {"error": f"{type(reason).__name__}: {reason}"}
    return results


def first_calls() -> dict[str, float]:
    """Seconds of a process's first call, that compiles; and of the next process's, that finds the kernels on disk."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}

        def seconds() -> float:
            done = subprocess.run(
                [sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, check=True
            )
            return round(float(done.stdout), 3)

        return {"compiles_s": seconds(), "from_disk_s": seconds()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calls", type=int, default=2000)
    arguments = parser.parse_args()
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    results = {"versions": versions, "shape": SHAPE, "warm": warm(arguments.calls), "first": first_calls()}
    for name, times in results["warm"].items():
        text = times.get("error") or f"{times['median_us']:8.1f} us   p90 {times['p90_us']:8.1f} us"
        print(f"{name:<52} {text}")
    first = results["first"]
    print(f"first call of a process: {first['compiles_s']} s compiling, {first['from_disk_s']} s from the disk's cache")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
