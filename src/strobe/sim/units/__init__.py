"""Units of a multiprocessor beside those that compute in registers: memories, copies, tensor cores, control."""

from __future__ import annotations

from collections.abc import Callable

from strobe.sim import barriers
from strobe.sim.units import control, cp_async, shared, tcgen05, tensor_memory, tma, wgmma

MODELS: dict[str, Callable] = {
    "allocate_shared_memory": shared.allocate,
    "allocate_tensor_memory": tensor_memory.allocate,
    "async_copy.async_copy_global_to_shared": cp_async.copy,
    "async_copy.async_load": cp_async.copy,
    "async_copy.commit_group": cp_async.commit_group,
    "async_copy.mbarrier_arrive": cp_async.mbarrier_arrive,
    "async_copy.wait_group": cp_async.wait_group,
    "barrier": control.barrier,
    "cluster.barrier": control.cluster_barrier,
    "fence_async_shared": control.fence_async_shared,
    "gdc_launch_dependents": control.launch_dependents,
    "gdc_wait": control.take_turn,
    "mbarrier.allocate_mbarrier": barriers.allocate,
    "mbarrier.arrive": barriers.arrive,
    "mbarrier.expect": barriers.expect,
    "mbarrier.init": barriers.init,
    "mbarrier.invalidate": barriers.invalidate,
    "mbarrier.wait": barriers.wait,
    "shared_memory_descriptor": shared.SharedView,
    "tcgen05_commit": tcgen05.commit,
    "tcgen05_copy": tcgen05.copy,
    "tcgen05_mma": tcgen05.mma,
    "tensor_memory_descriptor": tensor_memory.TensorMemoryView,
    "thread_barrier": control.barrier,
    "tma.async_atomic_add": tma.reduce_add,
    "tma.async_copy_global_to_shared": tma.load,
    "tma.async_copy_shared_to_global": tma.store,
    "tma.async_load": tma.load,
    "tma.async_store": tma.store,
    "tma.make_tensor_descriptor": tma.make_descriptor,
    "tma.store_wait": tma.store_wait,
    "tma_add": tma.reduce_add,
    "warp_specialize": control.warp_specialize,
    "warpgroup_mma": wgmma.mma,
    "warpgroup_mma_init": wgmma.init,
    "warpgroup_mma_wait": wgmma.wait,
}
"""Names of Gluon, of old and new Triton, and what simulates them: functions, and classes for `isinstance`."""
