"""Gluon's functions on registers: arithmetic, conversions, shapes.

Names and arguments are Gluon's own. Approximate instructions (ex2.approx, div.full) are computed to float32 precision.
"""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl

from strobe.sim.context import machine
from strobe.sim.dtypes import Inferred, constant, gluon_dtype, round_to, torch_dtype
from strobe.sim.errors import IllegalOperation, Unsupported
from strobe.sim.kernel_source import where
from strobe.sim.layouts import same_place
from strobe.sim.operators import ADD, MAXIMUM, MINIMUM, MUL, SUB
from strobe.sim.tensor import (
    Pointer,
    Scalar,
    Tensor,
    Value,
    binary,
    broadcast_shape,
    compute,
    expand_dims,
    fit,
    kind_of,
    layout_of,
    promote,
    scalar,
)


def only(tensor: Tensor) -> Scalar:
    """The Scalar in a tensor of one element, for which the partition waits."""
    machine().needs(tensor)
    tensor.check_ready()
    return Scalar(tensor.data.item(), tensor.data.dtype)


def _listed(values) -> list[int]:
    """A shape, or an order of axes, that is given as (a, b) or ((a, b),)."""
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    return [int(n) for n in values]


# ---- creation


def full(shape, value, dtype, layout=None) -> Tensor:
    kind = torch_dtype(dtype)
    number = value.value if isinstance(value, Scalar) else value
    if not kind.is_floating_point and isinstance(number, float):
        number = int(number)
    return compute("free", lambda: constant(number, kind).expand(_listed([shape])).clone(), layout=layout or gl.AutoLayout())


def zeros(shape, dtype, layout=None) -> Tensor:
    return full(shape, 0, dtype, layout)


def full_like(input, value, shape=None, dtype=None, layout=None) -> Tensor:
    return full(
        shape or input.shape, value, input.dtype if dtype is None else dtype, input.layout if layout is None else layout
    )


def zeros_like(input, shape=None, dtype=None, layout=None) -> Tensor:
    return full_like(input, 0, shape, dtype, layout)


def arange(start, end, layout=None) -> Tensor:
    return compute("free", lambda: torch.arange(int(start), int(end), dtype=torch.int32), layout=layout or gl.AutoLayout())


def to_tensor(x):
    return scalar(x)


# ---- arithmetic


def add(x, y, sanitize_overflow=True):
    return x + y


def sub(x, y, sanitize_overflow=True):
    return x - y


def mul(x, y, sanitize_overflow=True):
    return x * y


def _extreme(op, x, y, propagate_nan):
    if not isinstance(x, Value) and not isinstance(y, Value):
        return op.host(x, y)
    result = binary(op, x, y)
    if "ALL" not in str(propagate_nan) or not kind_of(result).is_floating_point:
        return result
    for operand in (x, y):
        result = where_(operand != operand, math.nan, result)
    return result


def maximum(x, y, propagate_nan=None):
    return _extreme(MAXIMUM, x, y, propagate_nan)


def minimum(x, y, propagate_nan=None):
    return _extreme(MINIMUM, x, y, propagate_nan)


def clamp(x, min, max, propagate_nan=None):
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def cdiv(x, div):
    return (x + div - 1) // div


def _select(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Select as torch.where does, but by the bits: several times as fast for a tile of float32."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.dtype.itemsize)
    if bits is None:
        return torch.where(condition, x, y)
    a, b = x.contiguous().view(bits), y.contiguous().view(bits)
    return (b ^ ((a ^ b) & condition.to(bits).neg_())).view(x.dtype)


def where_(condition, x, y):
    """Select x where the condition holds, else y (gl.where)."""
    if not any(isinstance(v, Tensor) for v in (condition, x, y)):
        chosen = x if condition else y
        kind = promote(x, y)
        value = chosen.value if isinstance(chosen, Scalar) else chosen
        return Scalar(fit(value if not kind.is_floating_point else float(value), kind, "where", value), kind)
    kind = promote(x, y)
    tensors = [v for v in (condition, x, y) if isinstance(v, Tensor)]
    for other in tensors[1:]:
        broadcast_shape(tensors[0].data.shape, other.data.shape)
    numbers = [v.value if isinstance(v, Scalar) else v for v in (condition, x, y)]

    def choose(c, a, b):
        c = c != 0 if isinstance(c, torch.Tensor) and c.dtype is not torch.bool else c
        c = c if isinstance(c, torch.Tensor) else torch.tensor(bool(c))
        a, b = (round_to(v, kind) if isinstance(v, torch.Tensor) else constant(v, kind) for v in (a, b))
        return _select(c, a, b)

    return compute("alu", choose, *numbers, layout=layout_of(x, y, condition))


def _float_function(name: str, function, pipe: str = "mufu", keeps_integers: bool = False):
    """Make an elementwise function of floats, which takes tensors and scalars."""

    def apply(x):
        if isinstance(x, Tensor):
            if not (keeps_integers or x.data.dtype.is_floating_point):
                raise IllegalOperation(f"{where()}: {name} of {x.dtype}; convert to a float first")
            return compute(pipe, function, x, layout=x.layout)
        value = scalar(x)
        result = function(torch.tensor([value.value], dtype=value.kind))
        return Scalar(result.item(), result.dtype)

    apply.__name__ = name
    return apply


LARGEST_DENORMAL = 2.0**-126 - 2.0**-149


def _exp2(data: torch.Tensor) -> torch.Tensor:
    """2^x as ex2.approx.ftz computes it: denormal results are zero. In float64 first, since PyTorch's last bit depends on where
    in a tensor a number stands."""
    return torch.nn.functional.threshold(torch.exp2(data.double()).to(data.dtype), LARGEST_DENORMAL, 0.0)


exp2 = _float_function("exp2", _exp2)
exp = _float_function("exp", torch.exp)
log2 = _float_function("log2", torch.log2)
log = _float_function("log", torch.log)
sin = _float_function("sin", torch.sin)
cos = _float_function("cos", torch.cos)
sqrt = _float_function("sqrt", torch.sqrt)
rsqrt = _float_function("rsqrt", torch.rsqrt)
erf = _float_function("erf", torch.erf)
floor = _float_function("floor", torch.floor, "alu")
ceil = _float_function("ceil", torch.ceil, "alu")
absolute = _float_function("abs", torch.abs, "alu", keeps_integers=True)


def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


def fdiv(x, y, ieee_rounding=False, approx=False):
    return x / y


def umulhi(x, y):
    """The upper 32 bits of the 64-bit product."""
    kind = promote(x, y)
    if kind not in (torch.int32, torch.uint32):
        raise Unsupported(f"{where()}: umulhi of {gluon_dtype(kind)}")
    wide = [v.to(gl.uint32, bitcast=kind is torch.int32).to(gl.uint64) for v in map(scalar, (x, y))]
    return ((wide[0] * wide[1]) >> 32).to(gl.uint32).to(gluon_dtype(kind), bitcast=kind is torch.int32)


def _fused(x, y, z, kind: torch.dtype) -> torch.Tensor:
    """x * y + z, rounded once (a product of two float32 is exact in float64)."""
    x, y, z = (round_to(v, kind) if isinstance(v, torch.Tensor) else constant(v, kind) for v in (x, y, z))
    if not kind.is_floating_point:
        return x * y + z
    if kind is torch.float64:
        return torch.addcmul(z, x, y)
    return torch.addcmul(z.double(), x.double(), y.double()).to(kind)


def fma(x, y, z, pipe: str = "fma"):
    if not any(isinstance(v, Tensor) for v in (x, y, z)):
        tensors = [Tensor(torch.tensor([v.value], dtype=v.kind)) for v in map(scalar, (x, y, z))]
        return only(fma(tensors[0], tensors[1], tensors[2]))
    kind = kind_of(_widest(x, y, z))
    numbers = [v.value if isinstance(v, Scalar) else v for v in (x, y, z)]
    tensors = [v for v in (x, y, z) if isinstance(v, Tensor)]
    for other in tensors[1:]:
        broadcast_shape(tensors[0].data.shape, other.data.shape)
    return compute(pipe, lambda a, b, c: _fused(a, b, c, kind), *numbers, layout=layout_of(x, y, z))


def _widest(*operands) -> Scalar:
    """A Scalar of the type in which the operands are computed together; numbers of the source come last."""
    result, *rest = sorted(operands, key=lambda v: not isinstance(v, Value))
    for other in rest:
        result = Scalar(0, promote(result, other)) if isinstance(result, Value) else other
    return result


def _packed(op):
    def apply(lhs, rhs, dtype=None):
        kind = promote(lhs, rhs) if dtype is None else torch_dtype(dtype)
        x, y = (v.value if isinstance(v, Scalar) else v for v in (lhs, rhs))

        def both(a, b):
            a, b = (round_to(v, kind) if isinstance(v, torch.Tensor) else constant(v, kind) for v in (a, b))
            return op.torch(a, b)

        return compute("fma2" if op.float_pipe == "fma" else "alu", both, x, y, layout=layout_of(lhs, rhs))

    return apply


add2, sub2, mul2, min2, max2 = map(_packed, (ADD, SUB, MUL, MINIMUM, MAXIMUM))


def fma2(lhs, rhs, acc, dtype=None):
    result = fma(lhs, rhs, acc, pipe="fma2")
    return result if dtype is None else result.to(dtype)


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def fp4_to_fp(src, elem_type, axis) -> Tensor:
    """Unpack the two e2m1 numbers in each byte, the lower half first, side by side along `axis`."""
    axis = axis_of(axis, src.data.dim())

    def unpacked(data):
        halves = torch.stack((_FP4[(data & 15).long()], _FP4[(data >> 4 & 15).long()]), axis + 1)
        return round_to(halves.flatten(axis, axis + 1), torch_dtype(elem_type))

    return compute("alu", unpacked, src, layout=Inferred(src.data.dim()))


def logical_and(x, y):
    return cast(x, gl.int1) & cast(y, gl.int1)


def logical_or(x, y):
    return cast(x, gl.int1) | cast(y, gl.int1)


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return scalar(input).to(dtype, fp_downcast_rounding, bitcast)


# ---- matrix products by threads


def _tf32(data: torch.Tensor) -> torch.Tensor:
    """Numbers as a tensor core sees them: of a float32 the upper 19 bits."""
    return (data.view(torch.int32) & ~0x1FFF).view(torch.float32) if data.dtype is torch.float32 else data.float()


def _product(pipe: str, seen, a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    shapes = [list(x.data.shape) for x in (a, b, acc)]
    m, k, n = shapes[0][-2], shapes[0][-1], shapes[1][-1]
    if shapes[1][-2] != k or shapes[2][-2:] != [m, n]:
        raise IllegalOperation(f"{where()} multiplies {shapes[0]} by {shapes[1]} into {shapes[2]}")
    elements = a.data.numel() * n
    if not acc.data.dtype.is_floating_point:
        return compute(pipe, lambda x, y, z: z + x.to(z.dtype) @ y.to(z.dtype), a, b, acc, layout=acc.layout, elements=elements)
    return compute(
        pipe, lambda x, y, z: (z.float() + seen(x) @ seen(y)).to(z.dtype), a, b, acc, layout=acc.layout, elements=elements
    )


def mma_v2(a, b, acc, input_precision=None) -> Tensor:
    return _product("mma", _tf32, a, b, acc)


def dot_fma(a, b, acc) -> Tensor:
    return _product("fma", torch.Tensor.float, a, b, acc)


# ---- shapes


def axis_of(axis, rank: int) -> int:
    axis = int(axis)
    if not -rank <= axis < rank:
        raise IllegalOperation(f"{where()}: axis {axis} of a tensor of rank {rank}")
    return axis % rank


def kept(x: Tensor, shape: list[int]) -> Tensor:
    return compute("free", lambda data: data.reshape(shape), x, layout=Inferred(len(shape)))


def broadcast_all(values) -> list[Tensor]:
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not tensors:
        raise IllegalOperation(f"{where()}: no tensor among the arguments")
    shape = tensors[0].data.shape
    for x in tensors[1:]:
        shape = torch.Size(broadcast_shape(shape, x.data.shape))
    layout = layout_of(*tensors)
    return [broadcast_to(v, shape) if isinstance(v, Tensor) else full(shape, v, scalar(v).dtype, layout) for v in values]


def _viewed(x, function, layout):
    """A view of a Tensor, or of a Pointer's addresses."""
    if isinstance(x, Pointer):
        return x.mapped(lambda offset: _viewed(offset, function, layout))
    return compute("free", function, x, layout=layout)


def broadcast_to(x, *sizes):
    shape = _listed(sizes)
    if isinstance(x, Scalar):
        return full(shape, x, x.dtype)
    if broadcast_shape(x.shape, shape) != shape:
        raise IllegalOperation(f"{where()}: shape {list(x.shape)} does not broadcast to {shape}")
    return _viewed(x, lambda data: data.expand(shape), x.layout)


def broadcast(input, other) -> tuple:
    return tuple(broadcast_all((input, other)))


def reshape(x, *sizes, can_reorder=False):
    shape = _listed(sizes)
    if math.prod(shape) != math.prod(x.shape):
        raise IllegalOperation(f"{where()}: {list(x.shape)} cannot be reshaped to {shape}")
    return _viewed(x, lambda data: data.reshape(shape), Inferred(len(shape)))


def ravel(x, can_reorder=False):
    return reshape(x, [math.prod(x.shape)])


def permute(x, *axes):
    dims = _listed(axes)
    return _viewed(x, lambda data: data.permute(dims), Inferred(len(dims)))


def trans(x, *dims):
    return permute(x, *dims) if dims else _viewed(x, lambda data: data.transpose(-1, -2), Inferred(len(x.shape)))


def expand_dims_(input, axis):
    """A tensor, or pointers, with a dimension of size 1 at `axis` (gl.expand_dims)."""
    return input.mapped(lambda offset: expand_dims(offset, axis)) if isinstance(input, Pointer) else expand_dims(input, axis)


def join(a, b) -> Tensor:
    a, b = broadcast_all((a, b))
    return compute("free", lambda x, y: torch.stack((x, y), -1), a, b, layout=Inferred(a.data.dim() + 1))


def split(a) -> tuple[Tensor, Tensor]:
    if a.data.shape[-1] != 2:
        raise IllegalOperation(f"{where()}: split of shape {list(a.shape)}: the last dimension must be 2")
    layout = Inferred(a.data.dim() - 1)
    return compute("free", lambda x: x[..., 0], a, layout=layout), compute("free", lambda x: x[..., 1], a, layout=layout)


def cat(input, other, can_reorder=False, dim=0, layout=None) -> Tensor:
    return compute("free", lambda x, y: torch.cat((x, y), int(dim)), input, other, layout=layout or input.layout)


def interleave(a, b):
    joined = join(a, b)
    return reshape(joined, [*joined.shape[:-2], 2 * joined.shape[-2]])


def flip(x, dim=None) -> Tensor:
    axis = axis_of(-1 if dim is None else dim, x.data.dim())
    return compute("shuffle", lambda data: data.flip(axis), x, layout=x.layout)


def gather(src, index, axis) -> Tensor:
    return compute("shuffle", lambda x, i: torch.gather(x, int(axis), i.long()), src, index, layout=index.layout)


def histogram(input, num_bins, mask=None, layout=None) -> Tensor:
    def count(values, chosen):
        values = values.long() if chosen is None else values.long()[chosen]
        return torch.bincount(values, minlength=int(num_bins))[: int(num_bins)].to(torch.int32)

    return compute("shuffle", count, input, mask, layout=layout, elements=input.numel)


def convert_layout(value, layout, assert_trivial=False) -> Tensor:
    """Convert to another layout: registers change hands, unless every thread has its elements already."""
    pipe = "free" if assert_trivial or same_place(value.layout, layout, value.data.shape) else "shuffle"
    return compute(pipe, lambda data: data, value, layout=layout, elements=value.numel)


def set_auto_layout(value, layout) -> Tensor:
    return compute("free", lambda data: data, value, layout=layout)
