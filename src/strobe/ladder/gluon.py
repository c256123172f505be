"""Gluon's names for the rungs: the library's (`strobe.kernels.gluon`, which knows what moved between Tritons), and those of
mma.sync and cp.async, which did not move."""

from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.gluon import (
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

cp_async_commit, cp_async_wait = async_copy.commit_group, async_copy.wait_group

__all__ = [
    "cp_async",
    "cp_async_commit",
    "cp_async_wait",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "partition_barrier",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
