"""The one file that knows which Triton it runs on: Gluon's names, 3.6 to the newest, under one name each.

Kernels import everything of Gluon's from here. What moved: `thread_barrier` became `barrier` (3.7), the TMA copies
became `tma.async_load` and `tma.async_store` (3.8; the old names raise from 3.9 on), cp.async `async_copy.async_load`,
`aggregate` went public, and makes an `__init__` for a class without one (3.8). Names of Blackwell's that came with 3.8 are None
before; the kernel that needs them is refused there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tensor_memory_descriptor_type,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan, core

_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
if hasattr(core, "_wrap_init_args"):
    aggregate = _aggregate
else:

    def aggregate(cls):
        """Triton's, and for a class without an `__init__` one that assigns the fields, as Triton makes it from 3.8 on."""
        if "__init__" in vars(cls):
            return _aggregate(cls)
        fields = tuple(cls.__annotations__)

        def assign(self, *args, **kwargs):
            for name, value in {**dict(zip(fields, args, strict=False)), **kwargs}.items():
                setattr(self, name, value if isinstance(value, core.base_value) else gl.constexpr(value))

        assign.__triton_builtin__ = True
        cls.__init__ = assign
        made = _aggregate(cls)
        made.__aggregate_fields__ = fields
        hashed = gluon.constexpr_function(assign)
        hashed.hash = str(cls.__annotations__)  # or a kernel in Triton's cache would not depend on the fields
        made.hash_attrs.append(hashed)
        return made


cp_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Add a block of shared memory to global memory: Triton 3.6 has the instruction, without a name."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tensor_descriptor = tma.tensor_descriptor
fma2 = getattr(blackwell, "fma2", None)
mul2 = getattr(blackwell, "mul2", None)

if hasattr(tensor_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same memory, shared or tensor, as another type."""
        return memory.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same memory, shared or tensor, as another type."""
        return memory._reinterpret(dtype, shape, layout)


__all__ = [
    "GluonASTSource",
    "PropagateNan",
    "TensorDescriptor",
    "TensorMemoryLayout",
    "aggregate",
    "allocate_tensor_memory",
    "async_copy",
    "cp_async",
    "fence_async_shared",
    "fma2",
    "gl",
    "gluon",
    "mbarrier",
    "mul2",
    "partition_barrier",
    "reinterpret",
    "tcgen05_commit",
    "tcgen05_mma",
    "tensor_descriptor",
    "tensor_memory_descriptor",
    "tensor_memory_descriptor_type",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
