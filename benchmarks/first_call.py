"""What a process waits for until its first result: imports, the GPU, the call. It finds its kernels where `strobe precompile`
made them (in a folder that was moved, without a C compiler), or in Triton's cache, or compiles them.

    python benchmarks/first_call.py [--json FILE] [--processes 5] [--call decode]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from strobe.call.precompiled import MOVED_CACHE
from strobe.lab.bench.machine import provenance, save

PROGRAM = """
import json, time
laps, begin = {}, time.perf_counter()
def lap(name):
    global begin
    now = time.perf_counter()
    laps[name], begin = now - begin, now
import torch
lap("import torch")
import strobe
lap("import strobe")
q, k, v = torch.randn(3, 1, 128, 4, 128, device="cuda", dtype=torch.bfloat16).unbind()
pages, lengths = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([[1, 0]], [128]))
torch.cuda.synchronize()
lap("tensors on the GPU")
CALL
torch.cuda.synchronize()
lap("call")
print(json.dumps(laps))
"""
CALLS = {
    "attention": "strobe.attention(q, k, v, mask=strobe.Causal())",
    "decode": "strobe.decode(q[:, :1], strobe.Cache(k.view(2, 64, 4, 128), v.view(2, 64, 4, 128), lengths, pages))",
}
MODEL = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
"""The config of a model whose layers make that call."""


def python(program: str, *arguments: str, **environment: str) -> str:
    """What a Python program prints."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True).stdout


def laps(name: str, call: str, processes: int, environment: dict[str, str]) -> list[dict[str, float]]:
    """Seconds of each step of so many processes, one after the other. call: of `CALLS`."""
    found = []
    for _ in range(processes):
        printed = python(PROGRAM.replace("CALL", CALLS[call]), **environment)
        found.append({step: round(seconds, 4) for step, seconds in json.loads(printed).items()})
        print(f"{name:<12} {', '.join(f'{step} {seconds:.3f}' for step, seconds in found[-1].items())} s", flush=True)
    return found


def measured(folder: Path, call: str, processes: int) -> dict[str, list[dict[str, float]]]:
    """The way in which kernels are found -> the laps of its processes. folder: an empty one."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    options = ["--serve"] if call == "decode" else []
    options += ["--max-length", "128", "--max-batch", "1", "--out", str(folder / "made")]
    python("from strobe_cli.app import main; main()", "precompile", str(folder / "config.json"), *options)
    told = {"TRITON_CACHE_DIR": str((folder / "made").rename(folder / "moved")), "TRITON_CACHE_MANAGER": MOVED_CACHE}
    cached = {"TRITON_CACHE_DIR": str(folder / "cache")}
    return {
        "precompiled": laps("precompiled", call, processes, {**told, "CC": "/bin/false"}),
        "compiles": laps("compiles", call, 1, cached),
        "from disk": laps("from disk", call, processes, cached),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--call", choices=CALLS, default="attention")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), arguments.call, arguments.processes)
    medians = {way: {step: statistics.median(one[step] for one in runs) for step in runs[0]} for way, runs in found.items()}
    for way, steps in medians.items():
        print(f"{way:<12} median: {', '.join(f'{step} {seconds:.3f}' for step, seconds in steps.items())} s")
    if arguments.json:
        report = {"what": "first call", "call": arguments.call, **provenance(torch.device("cuda"))}
        save(arguments.json, {**report, "median_s": medians, "each_s": found})


if __name__ == "__main__":
    main()
