"""The process that Nsight Compute watches: one of our attentions, warmed up, then profiled for some calls.

`python -m strobe.lab.counters.profiled JOB` takes a JSON object: "point" (fields of `strobe.lab.bench.plan.Point`),
"backend" (a name, or null for what dispatch picks) and "calls". ncu is to run with `--profile-from-start off`.
"""

from __future__ import annotations

import json
import sys

import torch

from strobe.lab.bench.peers import bind, strobe_peer
from strobe.lab.bench.plan import Inputs, Point

WARMUPS = 3


def main(job: dict) -> None:
    device = torch.device("cuda")
    point = Point(**job["point"])
    call = bind(strobe_peer(job["backend"]), point, Inputs.random(point, device, torch.Generator(device).manual_seed(0)))
    for _ in range(WARMUPS):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _ in range(job["calls"]):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
