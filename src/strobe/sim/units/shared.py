"""Models shared memory: allocations, and the views of them that kernels hold."""

from __future__ import annotations

import gc
import math
from types import FrameType

import torch
from triton.experimental.gluon import language as gl

from strobe.device import KNOWN
from strobe.sim.clusters import halved_dim, only_own, own, transposed
from strobe.sim.context import machine
from strobe.sim.errors import IllegalOperation, OutOfBounds, Unsupported
from strobe.sim.kernel_source import assigned_name, kernel_frame, where
from strobe.sim.memory import Access, Buffer, Footprint, Load, bounds_check, dense_footprint, reshaped
from strobe.sim.tensor import Tensor, torch_dtype

CAPACITY = {arch.capability: arch.smem_per_block for arch in KNOWN.values()}
"""Bytes of shared memory that a CTA may have, by compute capability; an arch that is not here has as much as the largest."""


class SharedView:
    """A typed, strided view of a buffer: what Gluon calls a shared_memory_descriptor."""

    def __init__(self, buffer: Buffer, data: torch.Tensor, dtype, layout, name: str):
        self.buffer, self.data, self.dtype, self.layout, self.name = buffer, data, dtype, layout, name

    # ---- what a descriptor tells

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> SharedView:
        return self

    @property
    def element_ty(self):
        return self.dtype

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def nbytes_per_cta(self) -> int:
        return self.data.numel() * self.data.element_size() // machine().num_ctas

    def label(self, field: str) -> None:
        """Take the name of the field of an aggregate that holds this view: "stage0.p_full" says more in a message than
        "stage0[3]"."""
        if self.name.endswith(field):
            return
        cta, begin = machine().cta, self.data.storage_offset()
        self.name = cta.unique_name(f"{self.buffer.name}.{field}", (id(self.buffer), begin))
        for (buffer, offset), barrier in cta.barriers.items():
            if buffer == id(self.buffer) and 0 <= offset - begin < self.numel:
                barrier.name = self.name if self.numel == 1 else f"{self.name}[{offset - begin}]"

    # ---- views

    def _view(self, data: torch.Tensor, name: str | None = None) -> SharedView:
        return SharedView(self.buffer, data, self.dtype, self.layout, name or self.name)

    def index(self, index) -> SharedView:
        """The view of one index. Beyond the end it is one that must not be used: a kernel may form it, and leave it out by
        `pred`."""
        index = int(index)
        try:
            bounds_check(index, self.data.shape[0], f"{self.name} at {where()}")
        except OutOfBounds as error:
            return Nowhere(error)
        return self._view(self.data[index], f"{self.name}[{index}]")

    def slice(self, start, length, dim=0) -> SharedView:
        start, length, dim = int(start), int(length), int(dim)
        bounds_check(start + length - 1, self.data.shape[dim], f"dim {dim} of {self.name} at {where()}")
        return self._view(self.data.narrow(dim, start, length), f"{self.name}[{start}:{start + length}]")

    def permute(self, order) -> SharedView:
        axes = [int(axis) for axis in order]
        return SharedView(self.buffer, self.data.permute(axes), self.dtype, transposed(self.layout, axes), self.name)

    def reshape(self, shape) -> SharedView:
        return self._view(reshaped(self.data, [int(n) for n in shape], self.name))

    def reinterpret(self, dtype=None, shape=None, layout=None) -> SharedView:
        dtype = self.dtype if dtype is None else dtype
        shape = self.shape if shape is None else [int(n) for n in shape]
        if not self.data.is_contiguous():
            raise IllegalOperation(f"{where()} reinterprets a view of {self.name} that has gaps")
        memory, begin = self.data.untyped_storage(), self.data.storage_offset() * self.data.element_size()
        wanted = math.prod(shape) * dtype.primitive_bitwidth // 8
        if begin + wanted > memory.nbytes():  # a stage of a ring may be seen as longer: it goes on in the next one
            raise IllegalOperation(
                f"{where()} reinterprets {self.name}, {self.shape} {self.dtype}, as {shape} {dtype}: past the end of "
                f"{self.buffer.name}"
            )
        # As numbers of another type it is other memory by another name: nobody reads by the one what was written by the other.
        swizzled = isinstance(self.layout, gl.NVMMASharedLayout) and isinstance(layout, gl.NVMMASharedLayout)
        swizzled = swizzled and dtype == self.dtype
        if swizzled and self.shape[-2] != shape[-2] and (_is_wide(self.layout, self.shape) or _is_wide(layout, shape)):
            raise IllegalOperation(
                f"{where()} reinterprets {self.name}, {self.shape}, as {shape}: columns beyond the width of a swizzle lie "
                f"behind all rows of the others"
            )
        data = torch.empty(0, dtype=torch.uint8).set_(memory, begin, (wanted,), (1,)).view(torch_dtype(dtype)).view(shape)
        if isinstance(layout, gl.SharedLinearLayout):
            steps = _unswizzled(layout.offset_bases, self.layout)
            return LinearView(self.buffer, _by_bits(data, steps), dtype, layout, self.name)
        return SharedView(self.buffer, data, dtype, layout or self.layout, self.name)

    _reinterpret = reinterpret

    def _keep_alive(self) -> None:
        pass

    # ---- accesses

    def values(self) -> torch.Tensor:
        """What is there now, in the shape of the view."""
        return self.data

    def footprint(self, data: torch.Tensor) -> Footprint:
        key = (data.storage_offset() * data.element_size(), data.element_size(), tuple(data.shape), data.stride())
        return self.buffer.footprint(key, lambda: dense_footprint(data))

    def touch(self, access: Access, write: bool, part: torch.Tensor | None = None) -> None:
        """Note an access to all of it, or to a part."""
        self.buffer.touch(self.footprint(self.data if part is None else part), access, write, self.name)
        if machine().num_ctas > 1:
            self._touch_halves(access, write)

    def _touch_halves(self, access: Access, write: bool) -> None:
        """Raise IllegalOperation if two CTAs read a buffer by other halves than those by which they wrote it: each has only the
        bytes of its own half."""
        dim = halved_dim(self.layout, self.data.dim())
        if dim is None:
            return
        size = self.data.element_size()
        last = sum((n - 1) * int(stride) for n, stride in zip(self.shape, self.data.stride(), strict=True))
        begin, step = int(self.data.storage_offset()) * size, int(self.data.stride(dim)) * size
        mine = (begin, begin + (last + 1) * size, step)
        others = [other for other in self.buffer.halves if other[0] < mine[1] and mine[0] < other[1] and other[2] != step]
        if write:
            self.buffer.halves = {other for other in self.buffer.halves if other not in others} | {mine}
        elif others:
            raise IllegalOperation(f"{access} reads halves of {self.name} other than those that the CTAs of its cluster wrote")

    def own(self) -> torch.Tensor:
        """The part of it that lies in the CTA that runs now."""
        return own(self.layout, self.data)

    def load(self, layout=None) -> Tensor:
        running = machine()
        running.pause()
        mine = self.own()
        load = Load()
        self.touch(running.partition.access(load=load), write=False, part=mine)
        ready = running.issue("shared", mine.numel() * mine.element_size(), [])
        return Tensor(only_own(self.layout, self.data).reshape(self.shape), layout, ready, load=load)

    def store(self, value: Tensor) -> None:
        running = machine()
        running.needs(value)
        running.pause()
        if list(value.data.shape) != self.shape or value.data.dtype != self.data.dtype:
            raise IllegalOperation(
                f"{where()} stores {list(value.data.shape)} {value.data.dtype} to {self.name}, {self.shape} {self.data.dtype}"
            )
        value.check_ready()
        mine = self.own()
        self.touch(running.partition.access(), write=True, part=mine)
        ready = running.issue("shared", mine.numel() * mine.element_size(), [value.ready] if value.ready else [])
        mine.copy_(own(self.layout, value.data).reshape(mine.shape))
        if ready is not None:
            running.partition.time = max(running.partition.time, ready.end)

    def gather(self, indices: Tensor, axis) -> Tensor:
        running = machine()
        running.pause()
        self.touch(running.partition.access(), write=False)
        chosen = torch.gather(self.data, int(axis), indices.data.long())
        return Tensor(chosen, indices.layout, running.issue("shared", chosen.numel() * chosen.element_size(), []))

    def scatter(self, values: Tensor, indices: Tensor, axis) -> None:
        running = machine()
        running.pause()
        self.touch(running.partition.access(), write=True)
        shape = torch.broadcast_shapes(values.data.shape, indices.data.shape)
        self.data.scatter_(int(axis), indices.data.expand(shape).long(), values.data.expand(shape))


class Nowhere(SharedView):
    """A view beyond the end of its buffer: any use of it raises `error`."""

    def __init__(self, error: OutOfBounds):
        object.__setattr__(self, "_error", error)

    def __getattribute__(self, name: str):
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise object.__getattribute__(self, "_error")


class LinearView(SharedView):
    """A view whose elements lie in the order of a SharedLinearLayout: `data` has a dim of 2 for each bit of its indices."""

    @property
    def shape(self) -> list[int]:
        bits = [max(step[dim] for step in self.layout.offset_bases) for dim in range(len(self.layout.offset_bases[0]))]
        return [2 * bit for bit in bits]

    def permute(self, order) -> LinearView:
        axes, bits = [int(axis) for axis in order], [size.bit_length() - 1 for size in self.shape]
        begins = [sum(bits[:dim]) for dim in range(len(bits))]
        data = self.data.permute([begins[axis] + bit for axis in axes for bit in range(bits[axis])])
        layout = gl.SharedLinearLayout([[step[axis] for axis in axes] for step in self.layout.offset_bases])
        return LinearView(self.buffer, data, self.dtype, layout, self.name)

    def values(self) -> torch.Tensor:
        return self.data.reshape(self.shape)


def _unswizzled(steps: list[list[int]], layout) -> list[list[int]]:
    """The steps without the swizzle of the memory's own layout, by which elements do not lie here: 16 bytes of a row, which has
    128, lie at their number XOR the row's."""
    swizzle = layout.swizzle_byte_width if isinstance(layout, gl.NVMMASharedLayout) else 0
    if swizzle != 128 or all(sum(map(bool, step)) == 1 for step in steps):
        return steps
    row, unit = (int(math.log2(8 * size // layout.element_bitwidth)) for size in (swizzle, 16))
    swizzled = zip(steps[row:], steps[unit:row], strict=False)
    plain = [[a - b for a, b in zip(step, by, strict=True)] for step, by in swizzled]
    return [*steps[:row], *plain, *steps[row + len(plain) :]]


def _by_bits(data: torch.Tensor, steps: list[list[int]]) -> torch.Tensor:
    """A view of contiguous elements, each bit of whose number is one step in one dim: it has a dim of 2 for each of these
    steps, the largest of the first dim first."""
    if any(
        sum(map(bool, step)) != 1 or min(step) < 0 or max(step) & (max(step) - 1) for step in steps
    ) or data.numel() != 2 ** len(steps):
        raise Unsupported(f"the simulator has no shared memory in the order of {steps}, which {where()} asks for")
    places = [len(steps) - 1 - i for i in sorted(range(len(steps)), key=steps.__getitem__, reverse=True)]
    return data.view([2] * len(steps)).permute(places)


def allocate(element_ty, shape, layout=None, value: Tensor | None = None) -> SharedView:
    """Allocate uninitialised bytes (a pattern that is no number), or a copy of `value` (gl.allocate_shared_memory)."""
    name = assigned_name()
    view = machine().cta.allocated(lambda: _allocate(element_ty, shape, layout, name))
    if value is not None:
        view.store(value)
    return view


def _allocate(element_ty, shape, layout, name: str) -> SharedView:
    running = machine()
    shape, dtype = [int(n) for n in shape], torch_dtype(element_ty)
    size = math.prod(shape) * dtype.itemsize
    limit = CAPACITY.get(running.arch, max(CAPACITY.values()))
    buffer = Buffer(name, "shared", size)
    taken = running.cta.take_shared(buffer, size // running.num_ctas, _about_to_be_replaced(name))
    if taken > limit:
        raise IllegalOperation(f"{where()} allocates {name}: {taken} bytes of shared memory in all, of {limit}")
    data = torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)  # 0xFF..: a NaN in every float type
    return SharedView(buffer, data, element_ty, layout, name)


def _about_to_be_replaced(name: str) -> Buffer | None:
    """The buffer that the kernel's variable `name`, and nothing else, still holds: in a loop, the one of the iteration
    before."""
    frame = kernel_frame()
    variables = frame.f_locals if frame else {}
    held = variables.get(name)
    if not isinstance(held, SharedView):
        return None
    return held.buffer if _holders(held) == _holders(held.buffer) == 1 else None


def _holders(thing) -> int:
    """The number of objects that refer to a thing; the variables of a function count as one."""
    return sum(not isinstance(holder, FrameType) for holder in gc.get_referrers(thing))


def _is_wide(layout: gl.NVMMASharedLayout, shape) -> bool:
    """Whether a row is wider than a swizzle, so that it lies in pieces."""
    return 0 < 8 * layout.swizzle_byte_width < shape[-1] * layout.element_bitwidth
