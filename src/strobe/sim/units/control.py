"""Control: specialised warps, barriers of a partition, fences."""

from __future__ import annotations

from functools import partial

from strobe.sim import barriers
from strobe.sim.context import machine, where
from strobe.sim.errors import IllegalOperation


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """The first function in the warps that are there, each other one in warps of its own; returns when all have ended."""
    running = machine()
    parent = running.partition
    (function, arguments), *workers = functions_and_args
    warps = [int(n) for n in worker_num_warps]
    if len(warps) != len(workers):
        raise IllegalOperation(f"{where()} names {len(workers)} roles beside the first and warps for {len(warps)}")
    if sum(warps) + parent.warps > 32 * 2:
        raise IllegalOperation(f"{where()} takes {sum(warps) + parent.warps} warps: more than a multiprocessor has")
    if running.num_ctas > 1:  # the compiler lets a cluster meet once its barriers are initialised
        barrier(cluster=True)
    parent.name = _unique(function.__name__)
    started = []
    for (role, role_arguments), n in zip(workers, warps, strict=True):
        name = _unique(role.__name__)
        body = partial(role, *role_arguments)
        started.append(running.spawn(name, body, n, parent.knows.copy(), parent.time, parent.rank))
    parent.tick()
    result = function(*arguments)
    running.wait(
        lambda: all(partition.done for partition in started),
        lambda: "the other roles to end",
        lambda: max(partition.time for partition in started),
    )
    for partition in started:
        parent.knows.join(partition.knows)
    return result


def _unique(name: str) -> str:
    """A role's name; the second `consumer` is "consumer 1". In a cluster it says of which CTA."""
    running = machine()
    if running.num_ctas > 1:
        name = f"CTA {running.rank} {name}"
    taken = {partition.name for partition in running.cta.partitions}
    candidates = (name, *(f"{name} {i}" for i in range(1, 64)))
    return next(candidate for candidate in candidates if candidate not in taken)


def barrier(cluster=False) -> None:
    """gl.barrier: the warps of a partition meet. They run as one here, so this is only a place to stop at, unless all CTAs of
    a cluster are to meet."""
    running = machine()
    running.spend(running.costs.named_barrier)
    running.pause()
    if cluster:
        barriers.cluster_sync()


def fence_async_shared(cluster=False) -> None:
    """What this partition wrote, or knows to be written, becomes visible to the async proxy."""
    machine().partition.fence()
