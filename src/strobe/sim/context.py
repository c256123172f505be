"""The machine that runs now: what a simulated Gluon call acts on."""

from __future__ import annotations

from strobe.sim.machine import Machine

running: list[Machine] = []


def machine() -> Machine:
    """The Machine that runs now. RuntimeError outside a simulation."""
    if not running:
        raise RuntimeError("a simulated Gluon function was called outside a simulation")
    return running[-1]
