"""Models control: specialised warps, barriers of a partition, fences."""

from __future__ import annotations

from functools import partial

from strobe.sim import barriers
from strobe.sim.context import machine
from strobe.sim.errors import IllegalOperation, Unsupported
from strobe.sim.kernel_source import where


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Run the first function in the warps that are there, each other one in warps of its own; returns when all have ended."""
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
    """A name for a role that no other has: the second `consumer` is "consumer 1"; in a cluster it says of which CTA."""
    running = machine()
    if running.num_ctas > 1:
        name = f"CTA {running.rank} {name}"
    taken = {partition.name for partition in running.cta.partitions}
    candidates = (name, *(f"{name} {i}" for i in range(1, 64)))
    return next(candidate for candidate in candidates if candidate not in taken)


def barrier(cluster=False) -> None:
    """Let the warps of a partition meet (gl.barrier). They run as one here, so this is only a place to stop at, unless all CTAs
    of a cluster are to meet."""
    running = machine()
    running.spend(running.costs.named_barrier)
    running.pause()
    if cluster:
        barriers.cluster_sync()


def cluster_barrier(relaxed=False) -> None:
    """Let all CTAs of a cluster meet (hopper.cluster.barrier). Relaxed, they tell each other nothing of their memory."""
    if relaxed:
        raise Unsupported(f"{where()}: the simulator has no model of a relaxed barrier of a cluster")
    barrier(cluster=True)


def take_turn() -> None:
    """Wait until the launch ahead has ended and what it wrote is seen (griddepcontrol.wait)."""
    running = machine()
    running.pause()
    running.partition.take_turn()


def launch_dependents() -> None:
    """Let the next launch begin (griddepcontrol.launch_dependents); it waits for its own turn, so there is nothing to do."""


def fence_async_shared(cluster=False) -> None:
    """Make what this partition wrote to shared memory, or knows to be written, visible to the async proxy."""
    machine().partition.fence()


def fence_async_global() -> None:
    """Make what this partition knows of global memory visible to the async proxy (fence.proxy.async.global)."""
    partition = machine().partition
    partition.fenced = {cta: knows.copy() for cta, knows in partition.acquired.items()}
