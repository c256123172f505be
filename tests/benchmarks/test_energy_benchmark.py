"""benchmarks/energy.py: what it makes of the meter, and what it refuses."""

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

from strobe.lab.bench.energy_meter import Meter, power_limit, watts
from strobe.lab.bench.plan import Point

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
energy = importlib.import_module("energy")


def test_watts_are_taken_between_changes():
    """The meter changes now and then: what it says in between is old."""
    samples = [(0.9, 1000), (1.1, 200_000), (1.3, 260_000), (1.6, 400_000), (2.1, 900_000)]
    assert watts(samples, 1.0, 2.0) == pytest.approx(400.0)
    with pytest.raises(ValueError, match=r"must change twice within the 0\.3 s measured, got 1"):
        watts(samples, 1.2, 1.5)


def test_points():
    assert energy.point_of("backward:192/128:causal:4096") == Point(4, 4096, 10, 10, 192, 128, "bf16", "causal", True)
    assert all(isinstance(energy.point_of(text), Point) for text in energy.POINTS)
    for text in (
        "backward:64:full",
        "sideways:64:full:4096",
        "forward:64:band:4096",
        "forward:64:window:512",
        "forward:x:full:4096",
    ):
        with pytest.raises(SystemExit, match=rf"a point must be phase:head dim:mask:length, .* got '{text}'"):
            energy.point_of(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_meter():
    with pytest.raises(RuntimeError, match="energy is measured by NVML, which is not there: "):
        Meter(torch.device("cuda"))


@pytest.mark.gpu
def test_the_meter_counts():
    """While a GPU multiplies matrices it takes more than while it idles, and no more than it may."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    device = torch.device("cuda")

    def power(work, seconds: float = 1.0) -> float:
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            work()
        return watts(meter.samples, begin, time.monotonic())

    def multiply():
        x @ x
        torch.cuda.synchronize()

    with Meter(device) as meter:
        idle = power(lambda: time.sleep(0.01))
        busy = power(multiply)
    assert 0 < idle < busy < 1.2 * power_limit(device)
