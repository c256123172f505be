"""Tensors in registers, scalars and pointers: what a kernel computes with.

Types follow Triton's own rules of promotion. A float32 result is rounded to float32, a bfloat16 one is computed in float32 and
rounded. Integer tensors wrap around, as the hardware's do (bit tricks need it, and an address that wrapped is out of bounds);
a signed scalar that would wrap is an error, because scalars are lengths, indices and phases. `//` and `%` truncate toward zero.
A literal of the source stays a Python number: a constexpr.

Layouts are carried from operand to result and never checked: the compiler does that.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.language.semantic import TritonSemantic

from strobe.sim.context import machine
from strobe.sim.dtypes import (
    FLOAT8,
    GLUON,
    RANGE,
    TORCH,
    UNSIGNED,
    WIDE_UNSIGNED,
    Inferred,
    Shape,
    TensorType,
    check_range,
    constant,
    gluon_dtype,
    round_to,
    torch_dtype,
)
from strobe.sim.errors import IllegalOperation, Unfinished, Unsupported
from strobe.sim.kernel_source import where
from strobe.sim.memory import Load, Outcome, outcome_of
from strobe.sim.operators import DIVIDE, LSHIFT, OPERATORS, RSHIFT, SIMPLE, SUB, XOR, Op

__all__ = ["Pointer", "Scalar", "Tensor", "Value", "compute", "gluon_dtype", "torch_dtype"]


class Value:
    """What Gluon calls a tensor: a Tensor, a Scalar or a Pointer. The functions of the language are its methods."""

    __slots__ = ()

    method: ClassVar[Callable[[str], Callable | None]]
    """Finds the function that is the method of a name; `lift`, which knows the language, sets it."""

    def __getattr__(self, name: str) -> Any:
        function = None if name.startswith("_") else Value.method(name)
        if function is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(function, self)


# ---- operators

_rules: Any = object.__new__(TritonSemantic)  # for its rules of promotion, which use no builder
_promoted: dict[tuple, torch.dtype] = {}


def kind_of(x) -> torch.dtype:
    """The dtype of a Tensor, a Scalar or a number of the source."""
    if type(x) is Tensor:
        return x.data.dtype
    if type(x) is Scalar:
        return x.kind
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, int):
        kinds = (torch.int32, torch.uint32, torch.int64, torch.uint64)
        kind = next((kind for kind in kinds if RANGE[kind][0] <= x <= RANGE[kind][1]), None)
        if kind is None:
            raise IllegalOperation(f"{where()}: {x} fits no integer type")
        return kind
    return torch.float32 if not math.isfinite(x) or x == 0.0 or 2.0**-126 <= abs(x) < 2.0**128 else torch.float64


def promote(a, b, divides: bool = False) -> torch.dtype:
    """The type in which Triton computes with a and b (Tensors, Scalars or numbers of the source)."""
    a_kind, b_kind = kind_of(a), kind_of(b)
    a_number, b_number = not isinstance(a, Value), not isinstance(b, Value)
    key = (a_kind, b_kind, a_number, b_number, divides)
    if key not in _promoted:
        try:
            result = _rules.computation_type_impl(GLUON[a_kind], a_number, GLUON[b_kind], b_number, divides)
        except TypeError as error:
            raise IllegalOperation(f"{where()}: {error}") from None
        _promoted[key] = TORCH[result.name]
    return _promoted[key]


def _evaluate(op: Op, kind: torch.dtype, a, b) -> torch.Tensor:
    """`op` of torch tensors or numbers, at least one of them a tensor, in the type `kind`."""
    a = (a if a.dtype is kind else round_to(a, kind)) if isinstance(a, torch.Tensor) else constant(a, kind)
    if isinstance(b, torch.Tensor):
        b = b if b.dtype is kind else round_to(b, kind)
    elif op.takes_number and kind in (torch.float32, torch.int32, torch.int64):
        check_range(b, kind)
    else:
        b = constant(b, kind)
    if kind in WIDE_UNSIGNED:
        return torch.from_numpy(np.asarray(op.numpy(a.numpy(), b.numpy())))
    if kind in FLOAT8:
        result = op.torch(a.float(), b.float())
        return result if op.compares else round_to(result, kind)
    return op.torch(a, b)


def binary(op: Op, a, b) -> Any:
    """`a op b` of Tensors, Scalars and numbers."""
    for x in (a, b):
        if not isinstance(x, (Tensor, Scalar, int, float)):
            return NotImplemented
    if type(a) is not Tensor and type(b) is not Tensor:
        return _scalar_binary(op, a, b)
    kind = promote(a, b, op.divides)
    if op is DIVIDE and not kind.is_floating_point:
        kind = torch.float32
    if op.integers and kind.is_floating_point:
        raise IllegalOperation(f"{where()}: {op.symbol} of {GLUON[kind]}")
    if kind is torch.bool and not (op.integers or op.compares):
        raise Unsupported(f"{where()}: {op.symbol} of int1; convert to int32 first")
    if type(a) is Tensor and type(b) is Tensor and a.data.shape != b.data.shape:
        broadcast_shape(a.data.shape, b.data.shape)
    left = a.value if type(a) is Scalar else a
    right = b.value if type(b) is Scalar else b
    pipe = op.float_pipe if kind.is_floating_point else "alu"
    return compute(pipe, partial(_evaluate, op, kind), left, right, layout=layout_of(a, b))


def broadcast_shape(a, b) -> list[int]:
    """The common shape of two tensors. Gluon broadcasts dimensions of size 1 and adds none."""
    if len(a) != len(b) or any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        raise IllegalOperation(f"{where()}: shapes {list(a)} and {list(b)} do not broadcast: same rank, equal sizes or 1")
    return [n if m == 1 else m for m, n in zip(a, b, strict=True)]


def layout_of(*operands):
    """The layout of an elementwise result: the first one that is no AutoLayout."""
    layout = None
    for x in operands:
        if type(x) is Tensor:
            if x.layout is not None and type(x.layout) is not gl.AutoLayout:
                return x.layout
            layout = x.layout
    return layout


def compute(pipe: str, function: Callable, *operands, layout=None, elements: int | None = None) -> Tensor:
    """Compute `function` of the operands' data, issued to a pipe of the machine: the one way by which registers are made.

    pipe: "fma" (float add, multiply), "fma2" (packed), "alu" (integers, compare, select, convert), "mufu" (exp2, log, sqrt,
    division), "shuffle" (across lanes), "mma", "free" (views). elements: work of the pipe, by default one for each element of
    the result. Unfinished if an operand is the result of asynchronous work that nobody waited for.
    """
    ready, data, outcomes, load = [], [], [], None
    for x in operands:
        if type(x) is Tensor:
            if x.load is not None and pipe == "free" and len(operands) == 1:
                load = x.load
            elif x.load is not None or x.pending is not None:
                x.check_finished()
            ready.append(x.ready)
            data.append(x.data)
            if x.outcome is not None:
                outcomes.append(x.outcome)
        else:
            data.append(x)
    result = function(*data)
    issued = machine().issue(pipe, _own_share(result.numel() if elements is None else elements), ready)
    return Tensor(result, layout, issued, outcome=outcome_of(outcomes) if outcomes else None, load=load)


def _own_share(elements: int) -> int:
    """Elements of an operation that are this CTA's: the CTAs of a cluster share those of a tensor; a scalar each has to
    itself."""
    return max(1, elements // machine().num_ctas)


# ---- scalars


class Scalar(Value):
    """A number that all threads hold: program ids, lengths, phases. kind: its torch dtype."""

    __slots__ = ("kind", "value")
    ready = pending = layout = outcome = None

    def __init__(self, value, dtype):
        self.value = value
        self.kind = dtype if type(dtype) is torch.dtype else torch_dtype(dtype)

    dtype = property(lambda self: GLUON[self.kind])
    type = property(lambda self: GLUON[self.kind])
    shape = property(lambda self: Shape())
    numel = property(lambda self: 1)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    __hash__ = object.__hash__

    def __neg__(self) -> Scalar:
        return Scalar(fit(-self.value, self.kind, "-", self), self.kind)

    def __pos__(self) -> Scalar:
        return self

    def __invert__(self) -> Scalar:
        if self.kind.is_floating_point:
            raise IllegalOperation(f"{where()}: ~ of {self.dtype}")
        low, high = RANGE[self.kind]
        return Scalar(type(self.value)(~self.value if low else high - self.value), self.kind)

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False) -> Scalar:
        kind = torch_dtype(dtype)
        if bitcast or fp_downcast_rounding is not None:
            data = Tensor(torch.tensor([self.value], dtype=self.kind)).to(dtype, fp_downcast_rounding, bitcast).data
            return Scalar(data.item(), kind)
        if kind.is_floating_point:
            return Scalar(fit(float(self.value), kind, "to", self), kind)
        return Scalar(round_to(torch.tensor([self.value], dtype=self.kind), kind).item(), kind)


def scalar(value) -> Any:
    """A number of the source as a Scalar, everything else as it is."""
    if not isinstance(value, (int, float)):
        return value
    kind = kind_of(value)
    return Scalar(fit(value, kind, "=", value), kind)


def argument(value: int | float) -> Scalar:
    """The Scalar of a number that a launch passes: int32, or int64 if it must be; float32."""
    kind = torch.bool if isinstance(value, bool) else torch.float32 if isinstance(value, float) else None
    if kind is None:
        kind = next((k for k in (torch.int32, torch.int64, torch.uint64) if RANGE[k][0] <= value <= RANGE[k][1]), None)
    if kind is None:
        raise ValueError(f"an argument must fit 64 bits, got {value}")
    return Scalar(fit(value, kind, "=", value), kind)


def fit(value, kind: torch.dtype, symbol: str, *operands):
    """The result of a scalar operation, rounded to its type. IllegalOperation if a signed integer overflows."""
    if kind is torch.float32:
        return ctypes.c_float(value).value
    if kind is torch.float64:
        return float(value)
    if kind.is_floating_point:
        return round_to(torch.tensor(value, dtype=torch.float32), kind).item()
    low, high = RANGE[kind]
    if low <= value <= high:
        return bool(value) if kind is torch.bool else value
    if kind in UNSIGNED or symbol == "<<":
        return (value - low) % (high - low + 1) + low
    raise IllegalOperation(f"{where()}: {GLUON[kind]} overflow: {f' {symbol} '.join(map(str, operands))} = {value}")


def _scalar_binary(op: Op, a, b) -> Scalar:
    kind = promote(a, b, op.divides)
    if op is DIVIDE and not kind.is_floating_point:
        kind = torch.float32
    if op.integers and kind.is_floating_point:
        raise IllegalOperation(f"{where()}: {op.symbol} of {GLUON[kind]}")
    x, y = (v.value if type(v) is Scalar else v for v in (a, b))
    if kind.is_floating_point:
        x, y = fit(float(x), kind, op.symbol), fit(float(y), kind, op.symbol)
    else:
        for v in (x, y):
            check_range(v, kind)
        if y == 0 and op.divides:
            raise IllegalOperation(f"{where()}: {a} {op.symbol} 0")
        if op in (LSHIFT, RSHIFT) and y < 0:
            raise IllegalOperation(f"{where()}: {a} {op.symbol} {b}")
    result = op.host(x, y)
    return Scalar(result, torch.bool) if op.compares else Scalar(fit(result, kind, op.symbol, a, b), kind)


def _define_scalar(op: Op) -> None:
    """Define an operator of Scalars, with a short way for int32: phases and indices are computed thousands of times."""
    host, compares = op.host, op.compares
    low, high = RANGE[torch.int32]

    def forward(self, other):
        value = other if type(other) is int else other.value if type(other) is Scalar and other.kind is torch.int32 else None
        if value is None or self.kind is not torch.int32 or not low <= value <= high:
            return binary(op, self, other)
        if compares:
            return Scalar(host(self.value, value), torch.bool)
        if op in SIMPLE or (self.value >= 0 and value > 0 and op is not DIVIDE):
            result = host(self.value, value)
            if low <= result <= high:
                return Scalar(result, torch.int32)
        return binary(op, self, other)

    setattr(Scalar, f"__{op.name}__", forward)
    if not compares:
        setattr(Scalar, f"__r{op.name}__", lambda self, other: binary(op, other, self))


# ---- tensors


class Tensor(Value):
    """A tensor in registers. ready: when it is there (timed runs). pending: unfinished asynchronous work that writes it, with
    `.finished` and `.description`. outcome: the Outcome of the products that it comes from. load: the Load whose result it is,
    or a view of."""

    __slots__ = ("data", "layout", "load", "outcome", "pending", "ready")

    def __init__(
        self, data: torch.Tensor, layout=None, ready=None, pending=None,
        outcome: Outcome | None = None, load: Load | None = None,
    ):  # fmt: skip
        self.data, self.layout, self.ready, self.pending, self.outcome, self.load = data, layout, ready, pending, outcome, load

    dtype = property(lambda self: GLUON[self.data.dtype])
    shape = property(lambda self: Shape(self.data.shape))
    numel = property(lambda self: self.data.numel())
    type = property(lambda self: TensorType(self.dtype, self.shape, self.layout or gl.AutoLayout()))

    @property
    def T(self) -> Tensor:
        return compute("free", lambda x: x.transpose(-1, -2), self, layout=Inferred(self.data.dim()))

    def check_finished(self) -> None:
        """Check it before something uses it: Unfinished if asynchronous work writes it and it is not what the wait for that
        work returned. (To the compiler any other tensor is the one of before the wait: it may use those registers before
        it.)"""
        if self.load is not None:
            self.load.use()
        if self.pending is not None:
            waited = self.pending.finished
            how = "which is not among the deps of the wait for it" if waited else "which nobody has waited for"
            raise Unfinished(f"{where()} uses the result of {self.pending.description}, {how}")

    def check_ready(self) -> None:
        """Check it before it goes to memory or decides something: `check_finished`, and the error of a product that it comes
        from and that read what it may not."""
        self.check_finished()
        if self.outcome is not None:
            self.outcome.depend()

    def __bool__(self) -> bool:
        raise DecidesPerElement(
            f"{where()}: a tensor of shape {list(self.shape)} is neither true nor false: use & | ~ or gl.where on tensors"
        )

    def __iter__(self) -> Iterator:
        raise IllegalOperation(f"{where()}: a tensor cannot be iterated")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def __getitem__(self, index) -> Tensor:
        result, taken = self, 0
        for dim, item in enumerate(index if isinstance(index, tuple) else (index,)):
            if item is None:
                result = expand_dims(result, dim)
            elif item == slice(None):
                taken += 1
            else:
                raise IllegalOperation(f"{where()}: a tensor is indexed with None and : alone, got {item}")
        if taken > self.data.dim():
            raise IllegalOperation(f"{where()}: {taken} indices for a tensor of shape {list(self.shape)}")
        return result

    def __neg__(self) -> Tensor:
        return compute("alu", torch.neg, self, layout=self.layout) if self.data.dtype not in UNSIGNED else binary(SUB, 0, self)

    def __pos__(self) -> Tensor:
        return self

    def __invert__(self) -> Tensor:
        if self.data.dtype.is_floating_point:
            raise IllegalOperation(f"{where()}: ~ of {self.dtype}")
        if self.data.dtype in WIDE_UNSIGNED:
            return binary(XOR, self, RANGE[self.data.dtype][1])
        return compute("alu", torch.bitwise_not, self, layout=self.layout)

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False) -> Tensor:
        """The tensor converted, or with `bitcast` its bits seen as another type of the same width."""
        kind = torch_dtype(dtype)
        if bitcast:
            kinds = {kind, self.data.dtype}
            if len(kinds) == 2 and (len({k.itemsize for k in kinds}) == 2 or torch.bool in kinds):
                raise IllegalOperation(f"{where()}: bitcast of {self.dtype} to {dtype}, which has another width")
            return compute("free", lambda x: x.contiguous().view(kind), self, layout=self.layout)
        if kind is self.data.dtype:
            return self
        if fp_downcast_rounding == "rtz":
            return compute("alu", lambda x: _toward_zero(x, kind), self, layout=self.layout)
        narrows = self.data.dtype is torch.float32 and kind in (torch.float16, torch.bfloat16)
        return compute("convert" if narrows else "alu", lambda x: round_to(x, kind), self, layout=self.layout)


class DecidesPerElement(IllegalOperation):
    """A branch on a tensor: legal only where a function is mapped over elements."""


def _toward_zero(data: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """float32 rounded toward zero to a 16-bit float: one step back where rounding to nearest went away from zero."""
    if data.dtype is not torch.float32 or kind not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"{where()}: rounding toward zero from {data.dtype} to {kind}")
    nearest = data.to(kind)
    return (nearest.view(torch.int16) - (nearest.float().abs() > data.abs()).to(torch.int16)).view(kind)


def expand_dims(x: Tensor, axis: int) -> Tensor:
    """x with a dimension of size 1 at `axis`."""
    axis = int(axis) if axis >= 0 else int(axis) + x.data.dim() + 1
    sliced = isinstance(x.layout, gl.SliceLayout) and x.layout.dim == axis
    layout = x.layout.parent if sliced else Inferred(x.data.dim() + 1)
    return compute("free", lambda data: data.unsqueeze(axis), x, layout=layout)


def _define_tensor(op: Op) -> None:
    setattr(Tensor, f"__{op.name}__", lambda self, other: binary(op, self, other))
    if not op.compares:
        setattr(Tensor, f"__r{op.name}__", lambda self, other: binary(op, other, self))


for _op in OPERATORS:
    _define_scalar(_op)
    _define_tensor(_op)


# ---- pointers


class Pointer(Value):
    """Addresses of elements of an array in global memory. offset: a number of elements, or an int64 Tensor of them."""

    __slots__ = ("array", "offset")

    def __init__(self, array, offset: int | Tensor = 0):
        self.array = array
        self.offset = offset.to(gl.int64) if type(offset) is Tensor else offset

    shape = property(lambda self: Shape(self.offset.shape) if type(self.offset) is Tensor else Shape())
    layout = property(lambda self: self.offset.layout if type(self.offset) is Tensor else None)

    @property
    def dtype(self):
        return gl.pointer_type(GLUON[self.array.flat.dtype])

    @property
    def type(self):
        return TensorType(self.dtype, self.shape, self.layout or gl.AutoLayout()) if self.shape else self.dtype

    def offsets(self) -> torch.Tensor:
        """The offsets, int64, of this pointer's shape; [1] for a single address."""
        return self.offset.data if type(self.offset) is Tensor else torch.tensor([self.offset])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Pointer:
        """Pointers at `function` of the offsets, a view or a broadcast."""
        if type(self.offset) is not Tensor:
            raise IllegalOperation(f"{where()}: a single address has no dimensions")
        return Pointer(self.array, function(self.offset))

    def __getitem__(self, index) -> Pointer:
        return self.mapped(lambda offset: offset[index])

    def __add__(self, other) -> Pointer:
        if not isinstance(other, (Tensor, Scalar, int)) or kind_of(other).is_floating_point:
            return NotImplemented
        distance: Any = other.to(gl.int64) if type(other) is Tensor else int(other)
        return Pointer(self.array, self.offset + distance)

    __radd__ = __add__

    def __sub__(self, other) -> Pointer:
        return self + -other

    def to(self, dtype, **_) -> Pointer:
        if dtype == self.dtype:
            return self
        raise Unsupported(
            f"{where()}: the simulator keeps pointers apart from numbers and other pointers: {self.dtype} to {dtype}"
        )

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"
