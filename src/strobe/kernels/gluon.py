"""The one file that knows which Triton it runs on: Gluon's names, 3.6 to the newest, under one name each.

Kernels import everything of Gluon's from here. What moved: `thread_barrier` became `barrier` (3.7), the TMA copies
became `tma.async_load` and `tma.async_store` (3.8; the old names raise from 3.9 on), cp.async `async_copy.async_load`,
`aggregate` went public.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if hasattr(gluon, "aggregate"):
    aggregate = gluon.aggregate
else:
    from triton.language.core import _aggregate as aggregate

cp_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = [
    "GluonASTSource",
    "TensorDescriptor",
    "aggregate",
    "cp_async",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "partition_barrier",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
