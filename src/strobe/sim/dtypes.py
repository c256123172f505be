"""Types of numbers in torch and in Gluon, and conversions of numbers to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLayout

from strobe.sim.errors import IllegalOperation, Unsupported
from strobe.sim.kernel_source import where

TORCH = {
    "int1": torch.bool, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
GLUON = {kind: getattr(gl, {"fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}.get(name, str(kind).removeprefix("torch.")), gl.int1)
          for name, kind in TORCH.items()}  # fmt: skip
RANGE = {kind: (torch.iinfo(kind).min, torch.iinfo(kind).max) for kind in TORCH.values()
          if kind is not torch.bool and not kind.is_floating_point}  # fmt: skip
RANGE[torch.bool] = (0, 1)
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch stores them, numpy computes with them
UNSIGNED = (*WIDE_UNSIGNED, torch.uint8)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_INT32_MIN, _INT32_MAX = RANGE[torch.int32]


def torch_dtype(dtype) -> torch.dtype:
    """torch's name of a Gluon dtype. Unsupported if torch has no such type."""
    if type(dtype) is torch.dtype:
        return dtype
    if dtype.name not in TORCH:
        raise Unsupported(f"{where()}: the simulator has no numbers of type {dtype}")
    return TORCH[dtype.name]


def gluon_dtype(kind: torch.dtype):
    """Gluon's name of a torch dtype."""
    return GLUON[kind]


class TensorType(gl.distributed_type):
    """The type of a tensor, `x.type`; its layout may be one that only the simulator knows."""

    def __init__(self, element_ty, shape, layout):
        gl.block_type.__init__(self, element_ty, list(shape))
        self.layout = layout


@dataclass(frozen=True)
class Inferred(DistributedLayout):
    """A layout that the compiler would derive and the simulator does not."""

    dims: int

    @property
    def rank(self) -> int:
        return self.dims


class Shape(tuple):
    """A tuple that lists can be added to, as kernels do."""

    def __add__(self, other):
        return Shape((*self, *other))

    def __radd__(self, other):
        return Shape((*other, *self))

    def __getitem__(self, index):
        value = super().__getitem__(index)
        return Shape(value) if isinstance(index, slice) else value

    def __eq__(self, other):
        return tuple(self) == tuple(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = tuple.__hash__


def constant(value, kind: torch.dtype) -> torch.Tensor:
    """A number as a 0-d tensor. IllegalOperation if an integer does not fit."""
    check_range(value, kind)
    if kind in FLOAT8:
        return round_to(torch.tensor(float(value)), kind)
    return torch.tensor(value, dtype=kind)


def check_range(value, kind: torch.dtype) -> None:
    """Raise IllegalOperation if a number does not fit an integer type."""
    low, high = RANGE.get(kind, (value, value))
    if not low <= value <= high and value == value:
        raise IllegalOperation(f"{where()}: {value} is no {GLUON[kind]}")


def round_to(data: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """`data` as `kind`: to nearest for floats, truncated and saturated from float to integer, wrapped between integers."""
    if data.dtype is kind:
        return data
    if kind in FLOAT8:
        limit = torch.finfo(kind).max
        return data.float().clamp(-limit, limit).to(kind)
    if data.dtype.is_floating_point and kind in RANGE and kind is not torch.bool:
        low, high = RANGE[kind]
        wide = data.double().nan_to_num(nan=0.0)
        inside = wide.clamp(low, min(high, 2.0**63 - 1024)).to(torch.int64)
        return torch.where(wide >= high, torch.tensor(min(high, 2**63 - 1)), inside).to(kind)
    return data.to(kind)
