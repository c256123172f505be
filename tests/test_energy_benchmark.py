"""benchmarks/energy.py: what it makes of the meter, and what it refuses."""

import importlib.util
from pathlib import Path

import pytest

from strobe.lab.peers import Peer
from strobe.lab.plan import Point

PATH = Path(__file__).parent.parent / "benchmarks" / "energy.py"
spec = importlib.util.spec_from_file_location("energy", PATH)
energy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(energy)


def test_watts_are_taken_between_changes():
    """The meter changes now and then: what it says in between is old."""
    samples = [(0.9, 1000), (1.1, 200_000), (1.3, 260_000), (1.6, 400_000), (2.1, 900_000)]
    assert energy.watts(samples, 1.0, 2.0) == pytest.approx(400.0)
    with pytest.raises(ValueError, match=r"must change twice within the 0\.3 s measured, got 1"):
        energy.watts(samples, 1.2, 1.5)


def test_points():
    assert energy.point_of("backward:192/128:causal:4096") == Point(4, 4096, 10, 10, 192, 128, "bf16", "causal", True)
    assert all(isinstance(energy.point_of(text), Point) for text in energy.POINTS)
    for text in ("backward:64:full", "sideways:64:full:4096", "forward:64:band:4096", "forward:x:full:4096"):
        with pytest.raises(SystemExit, match=rf"a point must be phase:head dim:mask:length, .* got '{text}'"):
            energy.point_of(text)


def test_peers_are_chosen_by_name():
    peers = {"cuDNN": Peer("cuDNN", None), "absent": Peer("absent", None, module="no_such_module")}
    assert energy.chosen(["cuDNN"], peers) == [peers["cuDNN"]]
    with pytest.raises(SystemExit, match="peers must be installed, of cuDNN, got absent, FA9"):
        energy.chosen(["absent", "FA9"], peers)
