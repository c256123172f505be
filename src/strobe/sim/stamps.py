"""The stamps of our kernels (`kernels.common.stamp`) in a timed run: the clock is the partition's own."""

from __future__ import annotations

from strobe.kernels.common.stamp import EVENTS, stamp
from strobe.sim.context import machine
from strobe.sim.lift import register
from strobe.sim.machine import Report


def _stamp(trace, ROLE, EVENT, index) -> None:
    running = machine()
    if running.timed:
        running.report.stamps.append((running.cta.index, int(ROLE), EVENT, int(index), running.partition.time))


register(stamp, _stamp)


def stamps_of(report: Report, roles: tuple[str, ...], cta: int = 0) -> dict[str, dict[str, list[float]]]:
    """The stamps of one CTA as `trace.timeline_of` and `trace.phases` take them; roles: their names, by number."""
    mine = [(role, event, index, cycle) for at, role, event, index, cycle in report.stamps if at == cta]
    blocks = 1 + max((index for _, _, index, _ in mine), default=0)
    result = {role: {event: [0.0] * blocks for event in EVENTS} for role in roles}
    for role, event, index, cycle in mine:
        result[roles[role]][event][index] = cycle
    return result
