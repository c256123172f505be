"""Models tensor memory of sm_100: 128 lanes (rows) of 512 columns of 32 bits, where tcgen05 finds and leaves its operands.

A buffer is rows x 32-bit columns, and any type is a bit view of them: two bf16 share a column, so P in bf16 takes half the
columns of the S that it lies over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from strobe.device import KNOWN
from strobe.sim.clusters import only_own, own
from strobe.sim.context import machine
from strobe.sim.dtypes import Inferred
from strobe.sim.errors import IllegalOperation
from strobe.sim.kernel_source import assigned_name, where
from strobe.sim.memory import Access, Buffer, Footprint, bounds_check
from strobe.sim.pipes import Ready
from strobe.sim.tensor import Tensor, torch_dtype

COLUMNS = KNOWN["B200"].tmem_columns


class TensorMemoryView:
    """A view of consecutive columns of a buffer, as [rows, n] of `dtype`, or [stages, rows, n]: what Gluon calls a
    tensor_memory_descriptor. words: int32 [stages, rows, columns] or [rows, columns]."""

    def __init__(self, buffer: Buffer, words: torch.Tensor, begin: int, dtype, layout, shape: list[int], name: str):
        self.buffer, self.words, self.begin = buffer, words, begin
        self.dtype, self.layout, self.shape, self.allocation = dtype, layout, shape, name

    @property
    def name(self) -> str:
        return f"{self.allocation} (columns {self.begin} to {self.begin + self.columns - 1})"

    @property
    def type(self) -> TensorMemoryView:
        return self

    @property
    def element_ty(self):
        return self.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def data(self) -> torch.Tensor:
        """The elements, a view of the words."""
        return self.words.view(torch_dtype(self.dtype))[..., : self.shape[-1]]

    @property
    def columns(self) -> int:
        """The number of 32-bit columns of all stages."""
        return self.words.shape[-1] * (self.words.shape[0] if self.words.dim() == 3 else 1)

    def index(self, index) -> TensorMemoryView:
        index = int(index)
        bounds_check(index, self.shape[0], f"{self.name} at {where()}")
        begin = self.begin + index * self.words.shape[-1]
        return TensorMemoryView(self.buffer, self.words[index], begin, self.dtype, self.layout, self.shape[1:], self.allocation)

    def slice(self, start, length, dim=1) -> TensorMemoryView:
        start, length, bits = int(start), int(length), self.dtype.primitive_bitwidth
        if int(dim) != self.rank - 1 or self.rank != 2:
            raise IllegalOperation(f"{where()} slices {self.name} along dim {int(dim)}: tensor memory is sliced by columns")
        if start * bits % 32 or length * bits % 32:
            raise IllegalOperation(f"{where()} slices {self.name} from {start}, {length} long: no whole 32-bit columns")
        bounds_check(start + length - 1, self.shape[-1], f"columns of {self.name} at {where()}")
        first, n = start * bits // 32, length * bits // 32
        words = self.words[..., first : first + n]
        return TensorMemoryView(
            self.buffer, words, self.begin + first, self.dtype, self.layout, [*self.shape[:-1], length], self.allocation
        )

    def reinterpret(self, dtype=None, shape=None, layout=None) -> TensorMemoryView:
        dtype = self.dtype if dtype is None else dtype
        shape = self.shape if shape is None else [int(n) for n in shape]
        columns = shape[-1] * dtype.primitive_bitwidth // 32
        if shape[:-1] != list(self.words.shape[:-1]) or columns > self.words.shape[-1]:
            raise IllegalOperation(
                f"{where()} reinterprets {self.name}, {self.shape} {self.dtype}, as {shape} {dtype}: other rows or columns"
            )
        return TensorMemoryView(
            self.buffer, self.words[..., :columns], self.begin, dtype, layout or self.layout, shape, self.allocation
        )

    _reinterpret = reinterpret

    def get_reg_layout(self, num_warps=None, instr_variant="32x32b", **_):
        return Inferred(self.rank)

    # ---- accesses

    def footprint(self, rank: int) -> Footprint:
        """The columns that it has in one CTA of the cluster."""
        begin = self.begin + rank * COLUMNS
        return self.buffer.footprint((begin, self.columns), lambda: Footprint(begin, begin + self.columns))

    def touch(self, access: Access, write: bool, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.buffer.touch(self.footprint(rank), access, write, self.name)

    def load(self, layout=None, **_) -> Tensor:
        running = machine()
        self._check_warps()
        running.pause()
        self.touch(running.partition.access(), write=False, ranks=(running.rank,))
        ready = running.issue("tmem_load", self._bytes(), [])
        self._note("load", ready)
        return Tensor(only_own(self.layout, self.data), layout, ready)

    def load_max(self, layout=None, abs=False, **_) -> tuple[Tensor, Tensor]:
        values = self.load(layout)
        return values, Tensor((values.data.abs() if abs else values.data).amax(-1), None, values.ready)

    def load_min(self, layout=None, abs=False, **_) -> tuple[Tensor, Tensor]:
        values = self.load(layout)
        return values, Tensor((values.data.abs() if abs else values.data).amin(-1), None, values.ready)

    def store(self, value: Tensor, pred=True) -> None:
        running = machine()
        self._check_warps()
        running.needs(value)
        running.pause()
        if not pred:
            return
        if list(value.data.shape) != self.shape or value.data.dtype != torch_dtype(self.dtype):
            raise IllegalOperation(
                f"{where()} stores {list(value.data.shape)} {value.data.dtype} to {self.name}, {self.shape} {self.dtype}"
            )
        value.check_ready()
        self.touch(running.partition.access(), write=True, ranks=(running.rank,))
        ready = running.issue("tmem_store", self._bytes(), [value.ready] if value.ready else [])
        own(self.layout, self.data).copy_(own(self.layout, value.data))
        if ready is not None:  # the compiler waits for the store (tcgen05.wait::st) before anything else can know of it
            running.partition.time = max(running.partition.time, ready.end)
        self._note("store", ready)

    def _note(self, what: str, ready: Ready | None) -> None:
        if ready is not None:
            running = machine()
            running.span("tensor memory", f"{running.partition.name}: {what} {self.name}", ready.start, ready.end)

    def _bytes(self) -> int:
        return self.words.numel() * 4 // machine().num_ctas

    def _check_warps(self) -> None:
        partition = machine().partition
        if partition.warps % 4:
            raise IllegalOperation(
                f"{partition.name} at {where()} has {partition.warps} warps: a warp reaches 32 of the 128 rows of {self.name}, "
                f"so tensor memory takes multiples of 4"
            )


def allocate(element_ty, shape, layout, value: Tensor | None = None) -> TensorMemoryView:
    """Allocate uninitialised columns, or a copy of `value` (allocate_tensor_memory)."""
    name = assigned_name()
    view = machine().cta.allocated(lambda: _allocate(element_ty, shape, layout, name))
    if value is not None:
        view.store(value)
    return view


def _allocate(element_ty, shape, layout, name: str) -> TensorMemoryView:
    running = machine()
    if running.arch // 10 not in (10, 11):
        raise IllegalOperation(f"{where()} allocates tensor memory, which sm_{running.arch} does not have")
    shape = [int(n) for n in shape]
    rows = 128 * running.num_ctas
    blocks = max(1, shape[-2] // rows)
    columns = blocks * shape[-1] * element_ty.primitive_bitwidth * getattr(layout, "col_stride", 1) // 32
    lead = math.prod(shape[:-2])
    running.cta.tmem_columns += lead * columns
    if running.cta.tmem_columns > COLUMNS:
        raise IllegalOperation(
            f"{where()} allocates {name}: {running.cta.tmem_columns} columns of tensor memory in all, of {COLUMNS}"
        )
    words = torch.full((*shape[:-1], columns // blocks), -1, dtype=torch.int32)  # 0xFFFFFFFF: a NaN in every float type
    return TensorMemoryView(Buffer(name, "tensor", COLUMNS * running.num_ctas), words, 0, element_ty, layout, shape, name)
