"""Models TMA: copies of boxes between global and shared memory, which the async proxy makes on its own.

A load signals its bytes at an mbarrier, those outside the tensor included, for which it writes zeros. A store leaves out what
lies beyond the tensor's end, and may not begin before its start. Stores are grouped;
`store_wait(n)` waits until at most the n newest are still reading shared memory. Copies finish in any order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from strobe.sim import barriers
from strobe.sim.clusters import halved_dim, own
from strobe.sim.context import machine
from strobe.sim.errors import IllegalOperation, OutOfBounds, Unfinished, Unsupported
from strobe.sim.kernel_source import where
from strobe.sim.machine import Partition
from strobe.sim.memory import Access, GlobalArray
from strobe.sim.tensor import Pointer, gluon_dtype

FENCES_STORES = (3, 8)
"""The release of Triton whose compiler begins to put a fence before each TMA store."""


class Descriptor:
    """A tensor in global memory, read and written in boxes of `block_shape`."""

    def __init__(self, array: GlobalArray, offset: int, shape, strides, block_shape, layout, name: str):
        self.array, self.offset, self.name, self.layout = array, offset, name, layout
        self.shape = [int(n) for n in shape]
        self.strides = [int(n) for n in strides]
        self.block_shape = [int(n) for n in block_shape]
        self.dtype = gluon_dtype(array.flat.dtype)
        nbytes = math.prod(self.block_shape) * array.flat.element_size()
        self.halved = None if machine().num_ctas == 1 else halved_dim(layout, len(self.block_shape))
        self.nbytes_per_cta = nbytes if self.halved is None else nbytes // 2
        self.block_type = SimpleNamespace(shape=self.block_shape, nbytes=nbytes, element_ty=self.dtype)
        self._check()

    @property
    def type(self) -> Descriptor:
        return self

    def _check(self) -> None:
        size = self.array.flat.element_size()
        if self.offset * size % 16 or any(stride * size % 16 for stride in self.strides[:-1]) or self.strides[-1] != 1:
            raise IllegalOperation(
                f"a TMA descriptor needs a base and strides in multiples of 16 bytes and a last stride of 1, "
                f"{self.name} has strides {self.strides} of {size} bytes from element {self.offset}"
            )
        if any(not 1 <= n <= 256 for n in self.block_shape):
            raise IllegalOperation(f"a TMA box has 1 to 256 elements a dim, that of {self.name} has {self.block_shape}")

    def own_box(self, coordinates: list[int]) -> tuple[np.ndarray, tuple[slice, ...]]:
        """`box` of this CTA's half, or of all if no two CTAs halve it."""
        if self.halved is None:
            return self.box(coordinates, self.block_shape)
        corner, block = list(coordinates), list(self.block_shape)
        block[self.halved] //= 2
        corner[self.halved] += machine().rank * block[self.halved]
        return self.box(corner, block)

    def box(self, coordinates: list[int], block_shape: list[int]) -> tuple[np.ndarray, tuple[slice, ...]]:
        """Offsets of the elements of a box that lie inside the tensor, and where in the box they are. Offsets wrap around
        as 64-bit addresses do, which descriptors of ragged tensors make use of; whoever uses one checks where it lies."""
        offsets, inside = np.full((1,) * len(self.shape), self.offset), []
        for axis, (at, n, stride, block) in enumerate(zip(coordinates, self.shape, self.strides, block_shape, strict=True)):
            low, high = max(0, at), min(n, at + block)
            inside.append(slice(low - at, max(low, high) - at))
            along = np.arange(low, max(low, high)) * stride
            offsets = offsets + along.reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        return offsets, tuple(inside)


def descriptor_of(tensor_descriptor, name: str, rewritable: bool = False) -> Descriptor:
    """The Descriptor of a TensorDescriptor of the host."""
    base = tensor_descriptor.base
    array = machine().array_of(base, name, rewritable)
    return Descriptor(
        array, base.storage_offset(), tensor_descriptor.shape, tensor_descriptor.strides,
        tensor_descriptor.block_shape, tensor_descriptor.layout, name,
    )  # fmt: skip


def make_descriptor(base: Pointer, shape, strides, block_shape, layout=None, **_) -> Descriptor:
    """Make a Descriptor from a pointer, in the kernel (tma.make_tensor_descriptor)."""
    return Descriptor(base.array, int(base.offset), shape, strides, block_shape, layout, base.array.name)


def load(tensor_desc: Descriptor, coord, barrier, result, pred=True, multicast=False, **_) -> None:
    """Start the copy of a box from global to shared memory; the barrier is told of its bytes."""
    barriers.meet_after_initialising()
    running = machine()
    if multicast and running.num_ctas > 1:
        raise Unsupported(f"{where()}: the simulator has no model of copies that are multicast to the CTAs of a cluster")
    running.spend(running.costs.tma_issue)
    running.pause()
    if not pred:
        return
    place, at, coordinates = where(), barriers.at(barrier), [int(c) for c in coord]
    if result.shape != tensor_desc.block_shape or result.dtype != tensor_desc.dtype:
        raise IllegalOperation(
            f"{place} copies boxes {tensor_desc.block_shape} of {tensor_desc.dtype} to {result.name}, {result.shape} of "
            f"{result.dtype}"
        )
    access = _begin(f"TMA load of {tensor_desc.name} by {running.partition.name} at {place}")
    mine = own(tensor_desc.layout, result.data)
    offsets, inside = tensor_desc.own_box(coordinates)
    tensor_desc.array.read(offsets.reshape(-1), running.cta.index, access)
    result.touch(access, write=True, part=mine)
    begin, end = _time(tensor_desc.nbytes_per_cta)

    def finish() -> None:
        mine.zero_()
        if offsets.size:
            mine[inside] = tensor_desc.array.flat[torch.from_numpy(offsets)]
        at.arrive(0, access.knows, access.what, -tensor_desc.nbytes_per_cta, end)

    running.cta.post(("TMA load", access.agent), access.what, finish, end)
    running.span("TMA", f"load {result.name}", begin, end)


class BulkStores:
    """The stores of one partition that it has not waited for. Their writes to global memory are by an agent of their own, as a
    wait that only asks whether shared memory was read (read_only) tells nothing of them."""

    def __init__(self, partition: Partition) -> None:
        self.open: list[SimpleNamespace] = []
        self.agent, self.issued = partition.cta.new_agent(), 0

    def at_exit(self) -> None:
        if self.open:
            raise Unfinished(f"{machine().partition.name} ends and has not waited for the {self.open[0].access}")


def store(tensor_desc: Descriptor, coord, src, **_) -> None:
    """Start the copy of a box from shared to global memory."""
    _store(tensor_desc, coord, src, None)


def reduce_add(tensor_desc: Descriptor, coord, src, **_) -> None:
    """Add a box to what is there in global memory (tma.async_atomic_add)."""
    _store(tensor_desc, coord, src, torch.add)


def _store(tensor_desc: Descriptor, coord, src, operation) -> None:
    running = machine()
    running.spend(running.costs.tma_issue)
    running.pause()
    partition, place = running.partition, where()
    if src.shape != tensor_desc.block_shape or src.dtype != tensor_desc.dtype:
        raise IllegalOperation(
            f"{place} copies {src.name}, {src.shape} of {src.dtype}, to boxes {tensor_desc.block_shape} of {tensor_desc.dtype}"
        )
    coordinates = [int(c) for c in coord]
    if min(coordinates) < 0:  # in whichever dim, an H200 answers with an illegal instruction; loads may begin there
        raise OutOfBounds(f"{place} stores a box at {coordinates} of {tensor_desc.name}: before its start")
    if running.triton >= FENCES_STORES:
        partition.fence()
    access = _begin(f"TMA store to {tensor_desc.name} by {partition.name} at {place}")
    mine = own(tensor_desc.layout, src.data)
    offsets, inside = tensor_desc.own_box(coordinates)
    src.touch(access, write=False, part=mine)
    stores = _bulk_stores()
    stores.issued += 1
    written = replace(access, agent=stores.agent, tick=stores.issued)
    if operation is None:
        tensor_desc.array.write(offsets.reshape(-1), running.cta.index, written)
    else:
        tensor_desc.array.update(offsets.reshape(-1), running.cta.index, written)
    begin, end = _time(tensor_desc.nbytes_per_cta)
    entry = SimpleNamespace(access=access, number=stores.issued, done=False, time=end)

    def finish() -> None:
        if offsets.size:
            where_, values = torch.from_numpy(offsets), mine[inside]
            flat = tensor_desc.array.flat
            flat[where_] = values if operation is None else operation(flat[where_], values)
        entry.done = True

    running.cta.post(("TMA store", access.agent), access.what, finish, end)
    running.span("TMA", f"store {src.name}", begin, end)
    stores.open.append(entry)


def store_wait(pendings=0, read_only=True, **_) -> None:
    """Wait until at most the newest `pendings` stores still read shared memory; without `read_only`, write global memory."""
    running, place, stores = machine(), where(), _bulk_stores()
    first = stores.open[: len(stores.open) - int(pendings)]
    running.wait(
        lambda: all(entry.done for entry in first),
        lambda: f"its TMA stores at {place}",
        lambda: max((entry.time for entry in first), default=0.0),
    )
    for entry in first:
        running.partition.knows.learn(entry.access.agent, entry.access.tick)
    if not read_only:  # those of which it waited for the reads before, too
        running.partition.knows.learn(stores.agent, stores.issued - min(int(pendings), len(stores.open)))
    stores.open = stores.open[len(first) :]


def await_additions() -> None:
    """Wait until no store is under way."""
    store_wait(0, read_only=False)


def raise_flag(flag: Pointer, number) -> None:
    """Let an element hold a number, by a store that releases."""
    machine().atomic_global(flag.array, flag.offsets(), torch.tensor([int(number)]), None, lambda _, new: new, "release")


def _bulk_stores() -> BulkStores:
    partition = machine().partition
    if "bulk stores" not in partition.units:
        partition.units["bulk stores"] = BulkStores(partition)
    return partition.units["bulk stores"]


def _begin(what: str) -> Access:
    """The access of a copy that begins now: an agent of its own, which knows what the partition knows."""
    running = machine()
    knows = running.partition.knows.copy()
    agent, tick = running.cta.new_slot(running.partition.knows)
    knows.learn(agent, tick)
    running.partition.tick()
    running.cta.must_know[agent] = (tick, what, (running.rank,))
    return Access(agent, tick, knows, what, generic=False, acquired=running.partition.fenced)


def _time(bytes_: int) -> tuple[float, float]:
    """The times at which a copy of so many bytes begins to move them, and at which it is over."""
    running = machine()
    if not running.timed:
        return 0.0, 0.0
    costs, now = running.costs, running.partition.time
    begin, end = running.cta.pipes["TMA"].reserve(now, bytes_ / costs.tma_bytes)
    return begin, end + costs.tma_latency
