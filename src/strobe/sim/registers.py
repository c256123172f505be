"""Gluon's functions on registers: arithmetic, reductions, shapes, and loads and stores of global memory by threads.

Names and arguments are Gluon's own. Approximate instructions (ex2.approx, div.full) are computed to float32 precision.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from triton.experimental.gluon import language as gl

from strobe.sim.context import machine, where
from strobe.sim.errors import IllegalOperation, SimulationError, Unsupported
from strobe.sim.tensor import (
    ADD,
    MAXIMUM,
    MINIMUM,
    MUL,
    SUB,
    DecidesPerElement,
    Inferred,
    Pointer,
    Scalar,
    Shape,
    Tensor,
    Value,
    binary,
    broadcast_shape,
    compute,
    constant,
    expand_dims,
    fit,
    gluon_dtype,
    kind_of,
    layout_of,
    promote,
    round_to,
    scalar,
    torch_dtype,
)


def _one(tensor: Tensor) -> Scalar:
    """The Scalar in a tensor of one element. A partition that has it in hand has waited for it."""
    machine().needs(tensor)
    return Scalar(tensor.data.item(), tensor.data.dtype)


def _listed(values) -> list[int]:
    """(a, b) or ((a, b),): a shape or an order of axes."""
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    return [int(n) for n in values]


# ---- creation


def full(shape, value, dtype, layout=None) -> Tensor:
    kind = torch_dtype(dtype)
    number = value.value if isinstance(value, Scalar) else value
    if not kind.is_floating_point and isinstance(number, float):
        number = int(number)
    return compute("free", lambda: constant(number, kind).repeat(_listed([shape])), layout=layout or gl.AutoLayout())


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
    """torch.where by the bits: several times as fast for a tile of float32."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.dtype.itemsize)
    if bits is None:
        return torch.where(condition, x, y)
    a, b = x.contiguous().view(bits), y.contiguous().view(bits)
    return (b ^ ((a ^ b) & condition.to(bits).neg_())).view(x.dtype)


def where_(condition, x, y):
    """gl.where."""
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
    """An elementwise function of floats, of tensors and scalars."""

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


exp2 = _float_function("exp2", torch.exp2)
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
        return _one(fma(*tensors))
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


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return scalar(input).to(dtype, fp_downcast_rounding, bitcast)


# ---- matrix products by threads


def _tf32(data: torch.Tensor) -> torch.Tensor:
    """The bits of a float32 that a tensor core sees: the upper 19."""
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


# ---- reductions and scans


def _reduced(x: Tensor, axis, keep_dims, pipe: str, function):
    """`function(data, axis)` drops the axis; all axes: a Scalar."""
    if not isinstance(x, Tensor):
        raise IllegalOperation(f"{where()}: a reduction of {x!r}, which is no tensor")
    rank = x.data.dim()
    if axis is None:
        result = compute(pipe, lambda data: function(data.reshape(-1), 0), x, elements=x.numel)
        return _kept(result, [1] * rank) if keep_dims else _one(result)
    axis = _axis(axis, rank)
    layout = gl.SliceLayout(axis, x.layout or Inferred(rank)) if rank > 1 else None
    result = compute(pipe, lambda data: function(data, axis), x, layout=layout, elements=x.numel)
    if keep_dims:
        return expand_dims(result, axis) if rank > 1 else _kept(result, [1])
    return result if rank > 1 else _one(result)


def _axis(axis, rank: int) -> int:
    axis = int(axis)
    if not -rank <= axis < rank:
        raise IllegalOperation(f"{where()}: axis {axis} of a tensor of rank {rank}")
    return axis % rank


def _kept(x: Tensor, shape: list[int]) -> Tensor:
    return compute("free", lambda data: data.reshape(shape), x, layout=Inferred(len(shape)))


def sum_(input, axis=None, keep_dims=False, dtype=None):
    """gl.sum: of integers narrower than 32 bits as int32 or uint32."""
    kind = input.data.dtype
    if dtype is None and not kind.is_floating_point and kind.itemsize < 4:
        dtype = gl.int32 if kind in (torch.int8, torch.int16) else gl.uint32
    if dtype is not None:
        input = input.to(dtype)
    kind = input.data.dtype
    wide = torch.int64 if kind in (torch.uint16, torch.uint32) else kind
    pipe = "fma" if kind.is_floating_point else "alu"
    return _reduced(input, axis, keep_dims, pipe, lambda data, dim: data.to(wide).sum(dim, dtype=wide).to(kind))


def _without_nan(data: torch.Tensor, axis: int, largest: bool) -> torch.Tensor:
    """amax or amin that ignores NaN, as the instruction does, unless there is nothing else."""
    extreme, limit = (torch.amax, -math.inf) if largest else (torch.amin, math.inf)
    if not data.dtype.is_floating_point:
        wide = data.to(torch.int64) if data.dtype in (torch.uint16, torch.uint32) else data
        return extreme(wide, axis).to(data.dtype)
    result = extreme(data, axis)
    if bool(result.isnan().any()):
        nothing = data.isnan().all(axis)
        result = torch.where(nothing, math.nan, extreme(data.nan_to_num(nan=limit, posinf=math.inf, neginf=-math.inf), axis))
    return result


def _arg_extreme(data: torch.Tensor, axis: int, largest: bool) -> torch.Tensor:
    """The first place of the extreme, int32."""
    best = _without_nan(data, axis, largest).unsqueeze(axis)
    places = torch.arange(data.shape[axis]).reshape([-1 if i == axis else 1 for i in range(data.dim())])
    return torch.where(data == best, places, data.shape[axis]).amin(axis).to(torch.int32)


def _extreme_reduction(largest: bool):
    def reduction(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        values = _reduced(input, axis, keep_dims, "alu", partial(_without_nan, largest=largest))
        if not return_indices:
            return values
        return values, _reduced(input, axis, keep_dims, "alu", partial(_arg_extreme, largest=largest))

    return reduction


max_, min_ = _extreme_reduction(True), _extreme_reduction(False)


def argmax(input, axis, tie_break_left=True, keep_dims=False):
    return _reduced(input, axis, keep_dims, "alu", partial(_arg_extreme, largest=True))


def argmin(input, axis, tie_break_left=True, keep_dims=False):
    return _reduced(input, axis, keep_dims, "alu", partial(_arg_extreme, largest=False))


def _inputs(input) -> list[Tensor]:
    return list(input) if isinstance(input, (tuple, list)) else [input]


def _results(values, input):
    return tuple(values) if isinstance(input, (tuple, list)) else values[0]


def reduce(input, axis, combine_fn, keep_dims=False):
    """Neighbours are combined first, in log2(n) steps; `combine_fn` must be associative."""
    tensors = _inputs(input)
    shape, layout = list(tensors[0].data.shape), tensors[0].layout
    if axis is None:
        tensors, axis = [_kept(x, [x.numel]) for x in tensors], 0
    axis = _axis(axis, tensors[0].data.dim())
    state = [Tensor(x.data.movedim(axis, -1), None, x.ready, x.pending) for x in tensors]
    while (n := state[0].data.shape[-1]) > 1:
        if n % 2:
            raise IllegalOperation(f"{where()}: a reduction over {n} elements: the sizes of tensors are powers of two")
        halves = [compute("free", lambda data, first=first: data[..., first::2], x) for first in (0, 1) for x in state]
        state = mapped(combine_fn, halves)
    rank = tensors[0].data.dim()
    if rank == 1:
        return _results([_kept(x, [1] * len(shape)) if keep_dims else _one(x) for x in state], input)
    sliced = gl.SliceLayout(axis, layout or Inferred(rank))
    state = [compute("free", lambda data: data.squeeze(-1), x, layout=sliced) for x in state]
    return _results([expand_dims(x, axis) if keep_dims else x for x in state], input)


def associative_scan(input, axis, combine_fn, reverse=False):
    """Inclusive: element i combines elements 0 .. i, or i .. n - 1 with `reverse`."""
    tensors = _inputs(input)
    axis = _axis(axis, tensors[0].data.dim())

    def turned(data):
        data = data.movedim(axis, -1)
        return data.flip(-1) if reverse else data

    def restored(data):
        return (data.flip(-1) if reverse else data).movedim(-1, axis)

    state = [compute("free", turned, x) for x in tensors]
    step = 1
    while step < state[0].data.shape[-1]:
        before = [compute("free", lambda data, n=step: data[..., :-n], x) for x in state]
        after = [compute("free", lambda data, n=step: data[..., n:], x) for x in state]
        combined = mapped(combine_fn, before + after)
        state = [
            compute("free", lambda new, old, n=step: torch.cat([old[..., :n], new], -1), new, old)
            for new, old in zip(combined, state, strict=True)
        ]
        step *= 2
    layouts = [x.layout for x in tensors]
    return _results([compute("free", restored, x, layout=layout) for x, layout in zip(state, layouts, strict=True)], input)


def cumsum(input, axis=0, reverse=False, dtype=None):
    kind = input.data.dtype
    if dtype is None and not kind.is_floating_point and kind.itemsize < 4:
        dtype = gl.int32 if kind in (torch.int8, torch.int16) else gl.uint32
    return associative_scan(input if dtype is None else input.to(dtype), axis, lambda a, b: a + b, reverse)


def cumprod(input, axis=0, reverse=False, dtype=None):
    return associative_scan(input if dtype is None else input.to(dtype), axis, lambda a, b: a * b, reverse)


def xor_sum(input, axis=None, keep_dims=False):
    return reduce(input, axis, lambda a, b: a ^ b, keep_dims)


def reduce_or(input, axis, keep_dims=False):
    return reduce(input, axis, lambda a, b: a | b, keep_dims)


def mapped(function, tensors: list[Tensor]) -> list[Tensor]:
    """`function` of tensors at once; element by element if it branches on them."""
    try:
        result = function(*tensors)
    except DecidesPerElement:
        shape = tensors[0].data.shape
        flat = [x.data.reshape(-1).tolist() for x in tensors]
        rows = []
        for values in zip(*flat, strict=True):
            got = function(*(Scalar(v, x.data.dtype) for v, x in zip(values, tensors, strict=True)))
            rows.append(got if isinstance(got, tuple) else (got,))
        columns = [[scalar(v) for v in column] for column in zip(*rows, strict=True)]
        made = [torch.tensor([v.value for v in column], dtype=column[0].kind).reshape(shape) for column in columns]
        ready = machine().issue("alu", len(rows), [x.ready for x in tensors])
        return [Tensor(data, tensors[0].layout, ready) for data in made]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def map_elementwise(scalar_fn, *args, pack=1):
    """`pack` neighbours of each argument go to one call of the function."""
    tensors = _broadcast_all(args)
    shape, layout, pack = tensors[0].data.shape, layout_of(*tensors), int(pack)
    if pack > 1:
        tensors = [compute("free", lambda data, j=j: data.reshape(-1, pack)[:, j], x) for x in tensors for j in range(pack)]
    results = mapped(scalar_fn, tensors)
    if pack > 1:
        groups = [results[i : i + pack] for i in range(0, len(results), pack)]
        results = [compute("free", lambda *parts: torch.stack(parts, -1).reshape(shape), *group) for group in groups]
    results = [Tensor(x.data, layout, x.ready, x.pending) for x in results]
    return results[0] if len(results) == 1 else tuple(results)


# ---- shapes


def _broadcast_all(values) -> list[Tensor]:
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not tensors:
        raise IllegalOperation(f"{where()}: no tensor among the arguments")
    shape = tensors[0].data.shape
    for x in tensors[1:]:
        shape = broadcast_shape(shape, x.data.shape)
    layout = layout_of(*tensors)
    return [broadcast_to(v, shape) if isinstance(v, Tensor) else full(shape, v, scalar(v).dtype, layout) for v in values]


def _viewed(x, function, layout):
    """A view of a Tensor, or of a Pointer's addresses."""
    if isinstance(x, Pointer):
        return x.mapped(lambda offset: _viewed(offset, function, layout))
    return compute("free", function, x, layout=layout)


def broadcast_to(x, *shape):
    shape = _listed(shape)
    if isinstance(x, Scalar):
        return full(shape, x, x.dtype)
    if list(broadcast_shape(x.shape, shape)) != shape:
        raise IllegalOperation(f"{where()}: shape {list(x.shape)} does not broadcast to {shape}")
    return _viewed(x, lambda data: data.expand(shape), x.layout)


def broadcast(input, other) -> tuple:
    return tuple(_broadcast_all((input, other)))


def reshape(x, *shape, can_reorder=False):
    shape = _listed(shape)
    if math.prod(shape) != math.prod(x.shape):
        raise IllegalOperation(f"{where()}: {list(x.shape)} cannot be reshaped to {shape}")
    return _viewed(x, lambda data: data.reshape(shape), Inferred(len(shape)))


def ravel(x, can_reorder=False):
    return reshape(x, [math.prod(x.shape)])


def permute(x, *dims):
    dims = _listed(dims)
    return _viewed(x, lambda data: data.permute(dims), Inferred(len(dims)))


def trans(x, *dims):
    return permute(x, *dims) if dims else _viewed(x, lambda data: data.transpose(-1, -2), Inferred(len(x.shape)))


def expand_dims_(input, axis):
    """gl.expand_dims."""
    return input.mapped(lambda offset: expand_dims(offset, axis)) if isinstance(input, Pointer) else expand_dims(input, axis)


def join(a, b) -> Tensor:
    a, b = _broadcast_all((a, b))
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
    return reshape(joined, Shape(joined.shape[:-2]) + [2 * joined.shape[-2]])


def flip(x, dim=None) -> Tensor:
    axis = _axis(-1 if dim is None else dim, x.data.dim())
    return compute("shuffle", lambda data: data.flip(axis), x, layout=x.layout)


def gather(src, index, axis) -> Tensor:
    return compute("shuffle", lambda x, i: torch.gather(x, int(axis), i.long()), src, index, layout=index.layout)


def histogram(input, num_bins, mask=None, layout=None) -> Tensor:
    def count(values, chosen):
        values = values.long() if chosen is None else values.long()[chosen]
        return torch.bincount(values, minlength=int(num_bins))[: int(num_bins)].to(torch.int32)

    return compute("shuffle", count, input, mask, layout=layout, elements=input.numel)


def convert_layout(value, layout, assert_trivial=False) -> Tensor:
    """Registers change hands through shared memory, unless both layouts are known and the same."""
    pipe = "free" if assert_trivial or value.layout is layout or value.layout == layout else "shuffle"
    return compute(pipe, lambda data: data, value, layout=layout, elements=value.numel)


def set_auto_layout(value, layout) -> Tensor:
    return compute("free", lambda data: data, value, layout=layout)


# ---- global memory


def _lanes(mask, pointer: Pointer) -> torch.Tensor | None:
    if mask is None or mask is True:
        return None
    shape = pointer.offsets().shape
    if isinstance(mask, Tensor):
        return broadcast_to(mask, shape).data.bool()
    return torch.full(shape, bool(mask))


def _ready(pointer: Pointer, *others) -> list:
    tensors = [x for x in (pointer.offset, *others) if isinstance(x, Tensor)]
    for x in tensors:
        x.check_ready()
    return [x.ready for x in tensors]


def _addresses(pointer, verb: str) -> Pointer:
    if not isinstance(pointer, Pointer):
        raise IllegalOperation(f"{where()} {verb} {pointer!r}, which is no pointer")
    return pointer


def _like(value, pointer: Pointer) -> torch.Tensor:
    """A value as elements of the pointer's array, of the pointer's shape."""
    kind, shape = pointer.array.flat.dtype, pointer.offsets().shape
    if isinstance(value, Tensor):
        return round_to(broadcast_to(value, shape).data, kind)
    number = value.value if isinstance(value, Scalar) else value
    return constant(number if kind.is_floating_point or kind is torch.bool else int(number), kind).expand(shape)


def _loaded(values: torch.Tensor, pointer: Pointer, ready):
    tensor = Tensor(values, pointer.layout, ready)
    return tensor if pointer.shape else _one(tensor)


def _poison(kind: torch.dtype):
    return math.nan if kind.is_floating_point else 1 if kind is torch.bool else torch.iinfo(kind).max - 4


def load(pointer, mask=None, other=None, **_cache):
    """Lanes that the mask leaves out hold `other`, or NaN (for integers: a large odd number)."""
    pointer = _addresses(pointer, "loads from")
    lanes, array = _lanes(mask, pointer), pointer.array
    ready = machine().issue("global", pointer.offsets().numel(), _ready(pointer, mask, other))
    values = machine().read_global(array, pointer.offsets(), lanes, where())
    if lanes is not None:
        values = torch.where(lanes, values, _like(_poison(values.dtype) if other is None else other, pointer))
    return _loaded(values, pointer, ready)


def store(pointer, value, mask=None, **_cache) -> None:
    pointer = _addresses(pointer, "stores to")
    machine().issue("global", pointer.offsets().numel(), _ready(pointer, value, mask))
    machine().write_global(pointer.array, pointer.offsets(), _like(value, pointer), _lanes(mask, pointer), where())


def _atomic(operation):
    def atomic(pointer, val, mask=None, sem=None, scope=None):
        pointer = _addresses(pointer, "updates")
        ready = machine().issue("global", pointer.offsets().numel(), _ready(pointer, val, mask))
        lanes, values = _lanes(mask, pointer), _like(val, pointer)
        return _loaded(
            machine().atomic_global(pointer.array, pointer.offsets(), values, lanes, operation, where()), pointer, ready
        )

    return atomic


atomic_add = _atomic(lambda old, new: old + new)
atomic_max = _atomic(torch.maximum)
atomic_min = _atomic(torch.minimum)
atomic_and = _atomic(lambda old, new: old & new)
atomic_or = _atomic(lambda old, new: old | new)
atomic_xor = _atomic(lambda old, new: old ^ new)
atomic_xchg = _atomic(lambda old, new: new)


def atomic_load(pointer, mask=None, sem=None, scope=None):
    return _atomic(lambda old, new: old)(pointer, 0, mask)


def atomic_store(pointer, value, mask=None, sem=None, scope=None) -> None:
    atomic_xchg(pointer, value, mask)


def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    expected, new = (_like(v, pointer).reshape(-1) for v in (cmp, val))
    number = torch.arange(expected.numel()).reshape(pointer.offsets().shape)
    ready = machine().issue("global", pointer.offsets().numel(), _ready(pointer, cmp, val))

    def exchange(old, i):
        return new[int(i)] if bool(old == expected[int(i)]) else old

    return _loaded(machine().atomic_global(pointer.array, pointer.offsets(), number, None, exchange, where()), pointer, ready)


# ---- the program, hints and assertions


def program_id(axis) -> Scalar:
    return Scalar(machine().program_id(int(axis)), torch.int32)


def num_programs(axis) -> Scalar:
    return Scalar(machine().num_programs(int(axis)), torch.int32)


def num_warps() -> int:
    return machine().partition.warps


def num_ctas() -> int:
    return machine().num_ctas


def _holds(condition) -> bool:
    return bool(condition.data.all()) if isinstance(condition, Tensor) else bool(condition)


def static_assert(cond, msg="") -> None:
    if not cond:
        raise IllegalOperation(f"{where()}: static_assert failed: {msg}")


def device_assert(cond, msg="", mask=None) -> None:
    if mask is not None:
        cond = cond | ~scalar(mask)
    if not _holds(cond):
        raise SimulationError(f"{where()}: device_assert failed: {msg}")


def assume(cond) -> None:
    if not _holds(cond):
        raise SimulationError(f"{where()}: assume is given what does not hold")


def expect_zero(x, mask):
    if not _holds((x == 0.0) | ~scalar(mask)):
        raise SimulationError(f"{where()}: expect_zero is given what is not zero")
    return x


def multiple_of(input, values):
    factor = values[0] if isinstance(values, (list, tuple)) else values
    if isinstance(input, Scalar) and int(input) % int(factor):
        raise SimulationError(f"{where()}: {input} is no multiple of {factor}")
    return input


def promised(input, values):
    """max_contiguous, max_constancy: what only the compiler uses."""
    return input


def static_print(*values, sep=" ", end="\n", file=None, flush=False) -> None:
    print(*values, sep=sep, end=end)


def device_print(prefix, *args, hex=False) -> None:
    print(prefix, *(x.data if isinstance(x, Tensor) else x for x in args))


def steps(*bounds, **_hints):
    """range in a kernel: its variable is a Scalar, int32 or as wide as the bounds."""
    numbers = [int(bound) for bound in bounds]
    kind = torch.int64 if any(kind_of(bound) is torch.int64 for bound in bounds) else torch.int32
    for i in range(*numbers):
        yield Scalar(i, kind)


def static_range(*bounds) -> range:
    return range(*(int(bound) for bound in bounds))


def inline_asm(*_, **__):
    raise Unsupported(
        f"{where()}: the simulator runs no PTX; strobe.sim.register(function, implementation) gives it Python for the function "
        f"that holds this assembly"
    )


def aggregate_replace(instance, **changes):
    copy = object.__new__(type(instance))
    copy.__dict__.update(instance.__dict__)
    for name, value in changes.items():
        if name not in copy.__dict__:
            raise IllegalOperation(f"{where()}: {type(instance).__name__} has no field {name}")
        copy.__dict__[name] = value
    return copy
