"""Joules of a call: Strobe beside its peers, each for a second or more without a pause, by the GPU's own meter.

A kernel that keeps the chip busy runs at the power limit, which lowers the clock until the limit holds. Who gets there is as
fast as its calls are frugal, and no faster for having fewer cycles: watts tell who does, joules how frugal a call is.

    python benchmarks/energy.py [--json FILE] [--seconds 1.2] [--peers cuDNN,FA4] [POINT ...]

A point is forward or backward, head dim (of q and k / of v, if they differ), mask and length, backward:192/128:causal:4096, or
a shape of the zoo: "backward:SDXL, cross attention 64 x 64".
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from strobe.lab.bench import zoo
from strobe.lab.bench.bench import CudaClock, contenders_of
from strobe.lab.bench.energy_meter import Meter, power_limit, watts
from strobe.lab.bench.machine import provenance, save
from strobe.lab.bench.peers import Peer, bind
from strobe.lab.bench.plan import Grid, Inputs, Plan, Point

POINTS = (
    *("backward:64:full:4096", "backward:96:full:4096", "backward:96:causal:16384", "backward:96:window:4096"),
    *("backward:128:full:4096", "backward:128:causal:4096", "backward:256:full:16384"),
    *("forward:64:full:16384", "forward:64:causal:16384", "forward:128:full:16384", "forward:192/128:causal:16384"),
    *("forward:256:full:16384", "forward:256:causal:16384"),
)
LEAD = 0.3
"""Seconds until the clock is what the power limit leaves."""


def point_of(text: str) -> Point:
    try:
        phase, _, model = text.partition(":")
        for point in zoo.points({"forward": False, "backward": True}[phase]):
            if point.model == model:
                return point
        dims, mask, length = model.split(":")
        head_dim, _, head_dim_v = dims.partition("/")
        grid = Grid(head_dims=((int(head_dim), int(head_dim_v or head_dim)),), lengths=(int(length),), masks=(mask,))
        [point] = grid.points({"forward": False, "backward": True}[phase])
        return point
    except (KeyError, ValueError):
        example = "backward:192/128:causal:4096"
        raise SystemExit(f"a point must be phase:head dim:mask:length, such as {example}, got {text!r}") from None


def measured(point: Point, peer: Peer, seconds: float, meter: Meter, clock: CudaClock) -> dict[str, float]:
    """Of a call: microseconds, joules; the watts and the clock meanwhile."""
    with clock.running(), peer.context():
        call = bind(peer, point, Inputs.random(point, torch.device("cuda"), torch.Generator("cuda").manual_seed(0)))
        call()
        clock.synchronize()
        once = clock.seconds(call, 3)
        clock.seconds(call, max(1, round(LEAD / once)))
        begin = time.monotonic()
        once = clock.seconds(call, max(1, round(seconds / once)))
        power = watts(meter.samples, begin, time.monotonic())
    return {"us": 1e6 * once, "joules": once * power, "watts": power, "sm_clock_mhz": clock.mhz() or 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", default=POINTS, metavar="POINT")
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--peers", default="cuDNN,FA4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    points = [point_of(text) for text in options.points]
    if not torch.cuda.is_available():
        raise SystemExit("energy is measured by an NVIDIA GPU's meter, got a machine without one")
    device = torch.device("cuda")
    try:
        contenders = contenders_of(Plan(peers=tuple(options.peers.split(","))), device)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    peers = [peer for peer in contenders if peer.installed]
    clock, limit = CudaClock(device), power_limit(device)
    results: dict[str, dict] = {}
    print(f"power limit {limit} W")
    with Meter(device) as meter:
        for text, point in zip(options.points, points, strict=True):
            results[text] = {peer.name: _tried(point, peer, options.seconds, meter, clock) for peer in peers}
            print(f"{text:<32}", "   ".join(_line(name, x) for name, x in results[text].items()), flush=True)
            if options.json:  # after each point, so that a run that is cut keeps what it has
                facts = {"power limit, W": limit, "seconds": options.seconds, "points": results}
                save(options.json, {"what": "energy", **provenance(device), **facts})


def _tried(point: Point, peer: Peer, seconds: float, meter: Meter, clock: CudaClock) -> dict[str, float | str]:
    """What is `measured`; of a peer that does not take the point its words."""
    try:
        return measured(point, peer, seconds, meter, clock)
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        return {"refused": str(error).splitlines()[0]}


def _line(name: str, x: dict) -> str:
    if "refused" in x:
        return f"{name} {x['refused']}"
    return f"{name} {x['us']:.0f} us {x['joules']:.3f} J {x['watts']:.0f} W {x['sm_clock_mhz']:.0f} MHz"


if __name__ == "__main__":
    main()
