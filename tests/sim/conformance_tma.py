"""Conformance: where TMA's boxes may lie, packed sequences, groups of stores, and sums into global memory."""

import torch
from conformance import Case, blank, integers
from conformance_machine import BLOCK, TMA_INPUT, VALUES, block_offsets, descriptor, make_barrier, store_box, writes, written
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from strobe.kernels.common.descriptors import ENDLESS, FAR, coordinates
from strobe.kernels.gluon import (
    TensorDescriptor,
    fence_async_shared,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
)

# ---- packed sequences: a 5-dimensional descriptor, whose addresses wrap around at 2^64


@gluon.jit
def load_packed(x_desc, start, n, head, row, out):
    """16 rows of a sequence of n, which begins at `start`."""
    memory = gl.allocate_shared_memory(x_desc.dtype, [16, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    barrier = make_barrier(1)
    mbarrier.expect(barrier, x_desc.block_type.nbytes)
    tma_load(x_desc, coordinates(x_desc, start, n, 0, head, row, 0), barrier, memory.reshape(x_desc.block_type.shape))
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(16, 64), memory.load(BLOCK))


@gluon.jit
def store_packed(values, start, n, head, row, out_desc):
    memory = gl.allocate_shared_memory(out_desc.dtype, [16, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    memory.store(gl.load(values + block_offsets(16, 64)))
    fence_async_shared()
    partition_barrier()
    tma_store(out_desc, coordinates(out_desc, start, n, 0, head, row, 0), memory.reshape(out_desc.block_type.shape))
    tma_store_wait(0)


PACKED = integers(70, 3, 64, seed=12, dtype=torch.float16) + 5  # [rows of all sequences, heads, columns]
START, LENGTH, HEAD = 13, 29, 2


def packed_descriptor(x: torch.Tensor) -> TensorDescriptor:
    n, heads, _ = x.stride()
    shape = [ENDLESS, ENDLESS, x.shape[1], FAR.value, x.shape[2]]
    block = [1, 1, 1, 16, 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16)
    return TensorDescriptor(x, shape, [2**34 - n, n, heads, n, 1], block, layout)


def packed_load(row: int) -> Case:
    def arguments(device):
        out = blank(16, 64, dtype=torch.float16).to(device)
        return (packed_descriptor(PACKED.to(device)), START, LENGTH, HEAD, row, out), out

    sequence = PACKED[START : START + LENGTH, HEAD]
    expected = torch.zeros(16, 64, dtype=torch.float16)
    expected[: max(0, LENGTH - row)] = sequence[row : row + 16]
    return Case(
        f"a block at row {row} of a packed sequence of {LENGTH} is zero beyond its end", load_packed, arguments, expected
    )


def packed_store(row: int) -> Case:
    def arguments(device):
        out = blank(*PACKED.shape, dtype=torch.float16).to(device)
        return (VALUES[:16].contiguous().to(device), START, LENGTH, HEAD, row, packed_descriptor(out)), out

    expected = blank(*PACKED.shape, dtype=torch.float16)
    rows = max(0, min(16, LENGTH - row))
    expected[START + row : START + row + rows, HEAD] = VALUES[:rows]
    return Case(f"a block stored at row {row} of a packed sequence of {LENGTH} ends there", store_packed, arguments, expected)


# ---- groups of stores


@gluon.jit
def two_stores(values, out_desc):
    """wait(1) frees the buffer of the older of two stores."""
    memory = gl.allocate_shared_memory(out_desc.dtype, [2, 16, 64], out_desc.layout)
    for i in gl.static_range(2):
        memory.index(i).store(gl.load(values + i * 16 * 64 + block_offsets(16, 64)))
    fence_async_shared()
    partition_barrier()
    tma_store(out_desc, [0, 0], memory.index(0))
    tma_store(out_desc, [16, 0], memory.index(1))
    tma_store_wait(1)
    partition_barrier()
    memory.index(0).store(gl.zeros([16, 64], out_desc.dtype, BLOCK))
    partition_barrier()
    tma_store_wait(0)


# ---- sums: Triton 3.8 and newer have a name for them


@gluon.jit
def add_twice(values, out_desc):
    """Two CTAs and two copies of each add to the same box."""
    memory = gl.allocate_shared_memory(out_desc.dtype, [16, 64], out_desc.layout)
    memory.store(gl.load(values + block_offsets(16, 64)))
    fence_async_shared()
    partition_barrier()
    tma.async_atomic_add(out_desc, [44, 40], memory)
    tma.async_atomic_add(out_desc, [44, 40], memory)
    tma_store_wait(0)


def sums(device):
    out = (TMA_INPUT * 2).float().to(device)
    return (VALUES[:16].float().contiguous().to(device), descriptor(out, [16, 64])), out


SUM = (TMA_INPUT * 2).float()
SUM[44:, 40:] += 4 * VALUES[:8, :32].float()

CASES = [
    *map(packed_load, (0, 8, 20, 32)),
    *map(packed_store, (0, 8, 20, 32)),
    Case("a box stored beyond the end changes nothing", store_box, writes(VALUES[:16], 52, 0), blank(52, 72).half()),
    Case("the older of two stores lets its buffer go", two_stores, writes(VALUES), written(VALUES, 0, 0)),
]
if hasattr(tma, "async_atomic_add"):
    CASES.append(Case("TMA adds to what is there, and leaves out what is beyond", add_twice, sums, SUM, grid=(2,)))
