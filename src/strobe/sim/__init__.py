"""Runs Gluon kernels, their source unchanged, on a CPU."""

from strobe.sim.barriers import named_arrive as named_barrier_arrive
from strobe.sim.barriers import named_sync as named_barrier_sync
from strobe.sim.errors import (
    BarrierMisuse,
    Deadlock,
    DoubleWrite,
    IllegalOperation,
    MissingFence,
    OutOfBounds,
    Race,
    SimulationError,
    Unfinished,
    Uninitialised,
    Unsupported,
)
from strobe.sim.launch import Launch, simulate
from strobe.sim.lift import register
from strobe.sim.machine import ORDERS, Report

__all__ = [
    "ORDERS",
    "BarrierMisuse",
    "Deadlock",
    "DoubleWrite",
    "IllegalOperation",
    "Launch",
    "MissingFence",
    "OutOfBounds",
    "Race",
    "Report",
    "SimulationError",
    "Unfinished",
    "Uninitialised",
    "Unsupported",
    "named_barrier_arrive",
    "named_barrier_sync",
    "register",
    "simulate",
]
