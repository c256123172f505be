"""The single-call protocol: 32 calls to warm up, then 128 that are timed one by one.

As published with a series of flash-attention kernels (docs/bench.md): lengths 512 to 16384, head dim 128, no mask. A call is
timed between two events of the GPU. Before the warm-up the GPU spins for as long as the host needs to queue all calls, so that
Python is not in the times. It shows what the sustained protocol averages out, the spread from call to call, and a card that
is not yet held down by its power limit.
"""

from __future__ import annotations

import time
from statistics import fmean, median, quantiles, stdev

from strobe.lab.peers import Call

WARMUPS, CALLS = 32, 128
SPIN_SECONDS = 0.2
"""The longest spin; whose host needs more has Python in its times."""


def call_times(calls: list[Call], clock) -> list[float]:
    """Seconds of each of CALLS calls, which take the inputs in turn: the L2 cache is cold. clock: of `strobe.lab.bench`."""
    host = _host_seconds(calls, clock)
    clock.spin(min(SPIN_SECONDS, 2 * host * (WARMUPS + CALLS)))  # 2: the events are queued too
    for n in range(WARMUPS):
        calls[n % len(calls)]()
    return clock.seconds_of_each([calls[n % len(calls)] for n in range(CALLS)])


def _host_seconds(calls: list[Call], clock) -> float:
    """Until a call returns, on an empty queue; the first may be a little longer."""
    clock.synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    seconds = (time.perf_counter() - begin) / len(calls)
    clock.synchronize()
    return seconds


def statistics(seconds: list[float]) -> dict[str, float]:
    """How many were timed, and in us their mean, standard deviation, median, tenth and ninetieth percentile, and extremes."""
    us = [1e6 * s for s in seconds]
    cuts = quantiles(us, n=10, method="inclusive")
    spread = {"median": median(us), "p10": cuts[0], "p90": cuts[-1], "min": min(us), "max": max(us)}
    return {"count": len(us), "mean": fmean(us), "stdev": stdev(us)} | spread
