"""The single-call protocol: 32 calls to warm up, then 128 that are timed one by one.

It was published with a series of flash-attention kernels (docs/bench.md): lengths 512 to 16384, head dim 128, no mask. A call
is timed between two events of the GPU. Before the warm-up the GPU spins for as long as the host needs to queue all calls, so
that the times do not include Python's. The protocol shows the spread from call to call, which the sustained one averages out,
and a card whose clock the power limit has not yet lowered."""

from __future__ import annotations

import time
from statistics import fmean, median, quantiles, stdev

from strobe.lab.bench.peers import Call

WARMUPS, CALLS = 32, 128
SPIN_SECONDS = 0.2
"""How long the GPU spins at most. Where the host needs more time to queue all calls, the times include Python's."""


def call_times(calls: list[Call], clock) -> list[float]:
    """Seconds of each of `CALLS` calls. calls: one for each set of inputs; they are made in turn, so the L2 cache is cold.
    clock: one of `strobe.lab.bench.bench`."""
    host = _host_seconds(calls, clock)
    clock.spin(min(SPIN_SECONDS, 2 * host * (WARMUPS + CALLS)))  # 2, because the events are queued, too
    for n in range(WARMUPS):
        calls[n % len(calls)]()
    return clock.seconds_of_each([calls[n % len(calls)] for n in range(CALLS)])


def _host_seconds(calls: list[Call], clock) -> float:
    """Mean seconds until a call returns, begun with an empty queue."""
    clock.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    seconds = (time.perf_counter() - begin) / len(calls)
    clock.synchronize()
    return seconds


def statistics(seconds: list[float]) -> dict[str, float]:
    """How many calls were timed, and in microseconds their mean, standard deviation, median, 10th and 90th percentile, and
    extremes."""
    us = [1e6 * s for s in seconds]
    cuts = quantiles(us, n=10, method="inclusive")
    spread = {"median": median(us), "p10": cuts[0], "p90": cuts[-1], "min": min(us), "max": max(us)}
    return {"count": len(us), "mean": fmean(us), "stdev": stdev(us)} | spread
