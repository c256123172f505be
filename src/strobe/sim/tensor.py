"""What a kernel computes with: tensors in registers, scalars and pointers.

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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLayout
from triton.language.semantic import TritonSemantic

from strobe.sim.context import machine, where
from strobe.sim.errors import IllegalOperation, Unfinished, Unsupported

# ---- types

_TORCH = {
    "int1": torch.bool, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
_GLUON = {kind: getattr(gl, {"fp8e4nv": "float8e4nv", "fp8e5": "float8e5"}.get(name, str(kind).removeprefix("torch.")), gl.int1)
          for name, kind in _TORCH.items()}  # fmt: skip
_RANGE = {kind: (torch.iinfo(kind).min, torch.iinfo(kind).max) for kind in _TORCH.values()
          if kind is not torch.bool and not kind.is_floating_point}  # fmt: skip
_RANGE[torch.bool] = (0, 1)
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch stores them, numpy computes with them
_UNSIGNED = (*_WIDE_UNSIGNED, torch.uint8)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_INT32_MIN, _INT32_MAX = _RANGE[torch.int32]


def torch_dtype(dtype) -> torch.dtype:
    """torch's name of a Gluon dtype. Unsupported if torch has no such type."""
    if type(dtype) is torch.dtype:
        return dtype
    if dtype.name not in _TORCH:
        raise Unsupported(f"{where()}: the simulator has no numbers of type {dtype}")
    return _TORCH[dtype.name]


def gluon_dtype(kind: torch.dtype):
    """Gluon's name of a torch dtype."""
    return _GLUON[kind]


class TensorType(gl.distributed_type):
    """What `x.type` tells of a tensor; its layout may be one that only the simulator knows."""

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


class Value:
    """What Gluon calls a tensor: a Tensor, a Scalar or a Pointer. The functions of the language are its methods."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        from strobe.sim.language import method

        function = None if name.startswith("_") else method(name)
        if function is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return partial(function, self)


# ---- operators


class Op(NamedTuple):
    """A binary operator. torch, numpy: of tensors; host: of numbers. takes_number: torch's may have a number on the right."""

    name: str
    symbol: str
    torch: Callable
    numpy: Callable
    host: Callable
    float_pipe: str = "alu"
    takes_number: bool = False
    compares: bool = False
    integers: bool = False
    divides: bool = False


def _quotient(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) or a % b == 0 else a // b + 1


def _ratio(a: float, b: float) -> float:
    return float(np.divide(np.float64(a), np.float64(b)))


def _remainder(a, b):
    return math.fmod(a, b) if isinstance(a, float) else a - b * _quotient(a, b)


def _some(divisor: torch.Tensor) -> torch.Tensor:
    """The divisor with 1 for 0: lanes that a mask leaves out may divide by zero, and the hardware does not trap."""
    return divisor if bool((divisor != 0).all()) else torch.where(divisor == 0, 1, divisor)


def _shift(a: torch.Tensor, b: torch.Tensor, left: bool) -> torch.Tensor:
    """PTX: an amount beyond the width shifts all bits out."""
    bits = a.element_size() * 8
    amount = torch.where((b < 0) | (b >= bits), bits, b)
    if left:
        return torch.where(amount == bits, 0, torch.bitwise_left_shift(a, amount.clamp(max=bits - 1))).to(a.dtype)
    return torch.bitwise_right_shift(a, amount.clamp(max=bits - 1))


def _smaller(a, b):
    return b if a != a else a if b != b else min(a, b)


def _larger(a, b):
    return b if a != a else a if b != b else max(a, b)


def _extreme(of_floats, of_integers):
    return lambda a, b: (of_floats if a.dtype.is_floating_point else of_integers)(a, b)


ADD = Op("add", "+", torch.add, np.add, operator.add, "fma", True)
SUB = Op("sub", "-", torch.sub, np.subtract, operator.sub, "fma", True)
MUL = Op("mul", "*", torch.mul, np.multiply, operator.mul, "fma", True)
DIVIDE = Op("truediv", "/", torch.true_divide, np.true_divide, _ratio, "mufu", divides=True)
FLOORDIV = Op("floordiv", "//", lambda a, b: torch.div(a, _some(b), rounding_mode="trunc"),
              lambda a, b: a // np.where(b == 0, 1, b), _quotient, divides=True, integers=True)  # fmt: skip
MOD = Op("mod", "%", lambda a, b: torch.fmod(a, b if a.dtype.is_floating_point else _some(b)),
         lambda a, b: a % np.where(b == 0, 1, b), _remainder, divides=True)  # fmt: skip
AND = Op("and", "&", torch.bitwise_and, np.bitwise_and, operator.and_, integers=True)
OR = Op("or", "|", torch.bitwise_or, np.bitwise_or, operator.or_, integers=True)
XOR = Op("xor", "^", torch.bitwise_xor, np.bitwise_xor, operator.xor, integers=True)
LSHIFT = Op("lshift", "<<", partial(_shift, left=True), np.left_shift, lambda a, b: a << min(b, 64), integers=True)
RSHIFT = Op("rshift", ">>", partial(_shift, left=False), np.right_shift, operator.rshift, integers=True)
LESS = Op("lt", "<", torch.lt, np.less, operator.lt, takes_number=True, compares=True)
LESS_EQUAL = Op("le", "<=", torch.le, np.less_equal, operator.le, takes_number=True, compares=True)
GREATER = Op("gt", ">", torch.gt, np.greater, operator.gt, takes_number=True, compares=True)
GREATER_EQUAL = Op("ge", ">=", torch.ge, np.greater_equal, operator.ge, takes_number=True, compares=True)
EQUAL = Op("eq", "==", torch.eq, np.equal, operator.eq, takes_number=True, compares=True)
NOT_EQUAL = Op("ne", "!=", torch.ne, np.not_equal, operator.ne, takes_number=True, compares=True)
MINIMUM = Op("minimum", "min", _extreme(torch.fmin, torch.minimum), np.minimum, _smaller)
MAXIMUM = Op("maximum", "max", _extreme(torch.fmax, torch.maximum), np.maximum, _larger)
OPERATORS = (ADD, SUB, MUL, DIVIDE, FLOORDIV, MOD, AND, OR, XOR, LSHIFT, RSHIFT,
             LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, EQUAL, NOT_EQUAL)  # fmt: skip

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
        kind = next((kind for kind in kinds if _RANGE[kind][0] <= x <= _RANGE[kind][1]), None)
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
            result = _rules.computation_type_impl(_GLUON[a_kind], a_number, _GLUON[b_kind], b_number, divides)
        except TypeError as error:
            raise IllegalOperation(f"{where()}: {error}") from None
        _promoted[key] = _TORCH[result.name]
    return _promoted[key]


def constant(value, kind: torch.dtype) -> torch.Tensor:
    """A number as a 0-d tensor. IllegalOperation if an integer does not fit."""
    _check_range(value, kind)
    if kind in FLOAT8:
        return round_to(torch.tensor(float(value)), kind)
    return torch.tensor(value, dtype=kind)


def _check_range(value, kind: torch.dtype) -> None:
    low, high = _RANGE.get(kind, (value, value))
    if not low <= value <= high and value == value:
        raise IllegalOperation(f"{where()}: {value} is no {_GLUON[kind]}")


def round_to(data: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """`data` as `kind`: to nearest for floats, truncated and saturated from float to integer, wrapped between integers."""
    if data.dtype is kind:
        return data
    if kind in FLOAT8:
        limit = torch.finfo(kind).max
        return data.float().clamp(-limit, limit).to(kind)
    if data.dtype.is_floating_point and kind in _RANGE and kind is not torch.bool:
        low, high = _RANGE[kind]
        wide = data.double().nan_to_num(nan=0.0)
        inside = wide.clamp(low, min(high, 2.0**63 - 1024)).to(torch.int64)
        return torch.where(wide >= high, torch.tensor(min(high, 2**63 - 1)), inside).to(kind)
    return data.to(kind)


def _evaluate(op: Op, kind: torch.dtype, a, b) -> torch.Tensor:
    """`op` of torch tensors or numbers, at least one of them a tensor, in the type `kind`."""
    a = (a if a.dtype is kind else round_to(a, kind)) if isinstance(a, torch.Tensor) else constant(a, kind)
    if isinstance(b, torch.Tensor):
        b = b if b.dtype is kind else round_to(b, kind)
    elif op.takes_number and kind in (torch.float32, torch.int32, torch.int64):
        _check_range(b, kind)
    else:
        b = constant(b, kind)
    if kind in _WIDE_UNSIGNED:
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
        raise IllegalOperation(f"{where()}: {op.symbol} of {_GLUON[kind]}")
    if kind is torch.bool and not (op.integers or op.compares):
        raise Unsupported(f"{where()}: {op.symbol} of int1; convert to int32 first")
    if type(a) is Tensor and type(b) is Tensor and a.data.shape != b.data.shape:
        broadcast_shape(a.data.shape, b.data.shape)
    left = a.value if type(a) is Scalar else a
    right = b.value if type(b) is Scalar else b
    pipe = op.float_pipe if kind.is_floating_point else "alu"
    return compute(pipe, partial(_evaluate, op, kind), left, right, layout=layout_of(a, b))


def broadcast_shape(a, b) -> torch.Size:
    """The common shape of two tensors. Gluon broadcasts dimensions of size 1 and adds none."""
    if len(a) != len(b) or any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        raise IllegalOperation(f"{where()}: shapes {list(a)} and {list(b)} do not broadcast: same rank, equal sizes or 1")
    return torch.broadcast_shapes(a, b)


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
    """The one way by which registers are computed: `function` of the operands' data, issued to a pipe of the machine.

    pipe: "fma" (float add, multiply), "fma2" (packed), "alu" (integers, compare, select, convert), "mufu" (exp2, log, sqrt,
    division), "shuffle" (across lanes), "mma", "free" (views). elements: work of the pipe, by default one for each element of
    the result. Unfinished if an operand is the result of asynchronous work that nobody waited for.
    """
    ready, data = [], []
    for x in operands:
        if type(x) is Tensor:
            if x.pending is not None:
                x.check_ready()
            ready.append(x.ready)
            data.append(x.data)
        else:
            data.append(x)
    result = function(*data)
    return Tensor(result, layout, machine().issue(pipe, result.numel() if elements is None else elements, ready))


# ---- scalars


class Scalar(Value):
    """A number that all threads hold: program ids, lengths, phases. kind: its torch dtype."""

    __slots__ = ("kind", "value")
    ready = pending = layout = None

    def __init__(self, value, dtype):
        self.value = value
        self.kind = dtype if type(dtype) is torch.dtype else torch_dtype(dtype)

    dtype = property(lambda self: _GLUON[self.kind])
    type = property(lambda self: _GLUON[self.kind])
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
        low, high = _RANGE[self.kind]
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
    """A number that a launch passes: int32, or int64 if it must be; float32."""
    kind = torch.bool if isinstance(value, bool) else torch.float32 if isinstance(value, float) else None
    if kind is None:
        kind = next((k for k in (torch.int32, torch.int64, torch.uint64) if _RANGE[k][0] <= value <= _RANGE[k][1]), None)
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
    low, high = _RANGE[kind]
    if low <= value <= high:
        return bool(value) if kind is torch.bool else value
    if kind in _UNSIGNED or symbol == "<<":
        return (value - low) % (high - low + 1) + low
    raise IllegalOperation(f"{where()}: {_GLUON[kind]} overflow: {f' {symbol} '.join(map(str, operands))} = {value}")


def _scalar_binary(op: Op, a, b) -> Scalar:
    kind = promote(a, b, op.divides)
    if op is DIVIDE and not kind.is_floating_point:
        kind = torch.float32
    if op.integers and kind.is_floating_point:
        raise IllegalOperation(f"{where()}: {op.symbol} of {_GLUON[kind]}")
    x, y = (v.value if type(v) is Scalar else v for v in (a, b))
    if kind.is_floating_point:
        x, y = fit(float(x), kind, op.symbol), fit(float(y), kind, op.symbol)
    else:
        for v in (x, y):
            _check_range(v, kind)
        if y == 0 and op.divides:
            raise IllegalOperation(f"{where()}: {a} {op.symbol} 0")
        if op in (LSHIFT, RSHIFT) and y < 0:
            raise IllegalOperation(f"{where()}: {a} {op.symbol} {b}")
    if op is MOD and kind.is_floating_point and (y == 0.0 or math.isinf(x)):
        result = math.nan
    else:
        result = op.host(x, y)
    return Scalar(result, torch.bool) if op.compares else Scalar(fit(result, kind, op.symbol, a, b), kind)


def _define_scalar(op: Op) -> None:
    host, compares = op.host, op.compares
    simple = op in (ADD, SUB, MUL, AND, OR, XOR) or compares

    def forward(self, other):
        if simple and self.kind is torch.int32:
            if type(other) is int and _INT32_MIN <= other <= _INT32_MAX:
                result = host(self.value, other)
            elif type(other) is Scalar and other.kind is torch.int32:
                result = host(self.value, other.value)
            else:
                return binary(op, self, other)
            if compares:
                return Scalar(result, torch.bool)
            if _INT32_MIN <= result <= _INT32_MAX:
                return Scalar(result, torch.int32)
        return binary(op, self, other)

    setattr(Scalar, f"__{op.name}__", forward)
    if not compares:
        setattr(Scalar, f"__r{op.name}__", lambda self, other: binary(op, other, self))


# ---- tensors


class Tensor(Value):
    """A tensor in registers. ready: when it is there (timed runs). pending: unfinished asynchronous work that writes it, with
    `.finished` and `.description`."""

    __slots__ = ("data", "layout", "pending", "ready")

    def __init__(self, data: torch.Tensor, layout=None, ready=None, pending=None):
        self.data, self.layout, self.ready, self.pending = data, layout, ready, pending

    dtype = property(lambda self: _GLUON[self.data.dtype])
    shape = property(lambda self: Shape(self.data.shape))
    numel = property(lambda self: self.data.numel())
    type = property(lambda self: TensorType(self.dtype, self.shape, self.layout or gl.AutoLayout()))

    @property
    def T(self) -> Tensor:
        return compute("free", lambda x: x.transpose(-1, -2), self, layout=Inferred(self.data.dim()))

    def check_ready(self) -> None:
        """Unfinished if asynchronous work that nobody waited for still writes this tensor."""
        if self.pending is not None and not self.pending.finished:
            raise Unfinished(f"{where()} uses the result of {self.pending.description}, which nobody has waited for")

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
        return compute("alu", torch.neg, self, layout=self.layout) if self.data.dtype not in _UNSIGNED else binary(SUB, 0, self)

    def __pos__(self) -> Tensor:
        return self

    def __invert__(self) -> Tensor:
        if self.data.dtype.is_floating_point:
            raise IllegalOperation(f"{where()}: ~ of {self.dtype}")
        if self.data.dtype in _WIDE_UNSIGNED:
            return binary(XOR, self, _RANGE[self.data.dtype][1])
        return compute("alu", torch.bitwise_not, self, layout=self.layout)

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False) -> Tensor:
        """Converted, or with `bitcast` its bits seen as another type of the same width."""
        kind = torch_dtype(dtype)
        if bitcast:
            if kind.itemsize != self.data.dtype.itemsize or torch.bool in (kind, self.data.dtype) and kind != self.data.dtype:
                raise IllegalOperation(f"{where()}: bitcast of {self.dtype} to {dtype}, which has another width")
            return compute("free", lambda x: x.contiguous().view(kind), self, layout=self.layout)
        if kind is self.data.dtype:
            return self
        if fp_downcast_rounding == "rtz":
            return compute("alu", lambda x: _toward_zero(x, kind), self, layout=self.layout)
        return compute("alu", lambda x: round_to(x, kind), self, layout=self.layout)


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
        return gl.pointer_type(_GLUON[self.array.flat.dtype])

    @property
    def type(self):
        return TensorType(self.dtype, self.shape, self.layout or gl.AutoLayout()) if self.shape else self.dtype

    def offsets(self) -> torch.Tensor:
        """int64, of this pointer's shape; [1] for a single address."""
        return self.offset.data if type(self.offset) is Tensor else torch.tensor([self.offset])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Pointer:
        """With `function` of its offsets: views and broadcasts."""
        if type(self.offset) is not Tensor:
            raise IllegalOperation(f"{where()}: a single address has no dimensions")
        return Pointer(self.array, function(self.offset))

    def __getitem__(self, index) -> Pointer:
        return self.mapped(lambda offset: offset[index])

    def __add__(self, other) -> Pointer:
        if not isinstance(other, (Tensor, Scalar, int)) or kind_of(other).is_floating_point:
            return NotImplemented
        if type(other) is Tensor:
            other = other.to(gl.int64)
        else:
            other = int(other)
        return Pointer(self.array, self.offset + other)

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
