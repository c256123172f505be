"""Gluon's reductions and scans, and functions mapped over elements."""

from __future__ import annotations

import math
from functools import partial

import torch
from triton.experimental.gluon import language as gl

from strobe.sim.clusters import halved_dim
from strobe.sim.context import machine
from strobe.sim.dtypes import Inferred
from strobe.sim.errors import IllegalOperation, Unsupported
from strobe.sim.kernel_source import where
from strobe.sim.registers import axis_of, broadcast_all, kept, only
from strobe.sim.tensor import DecidesPerElement, Scalar, Tensor, compute, expand_dims, layout_of, scalar


def _reduced(x: Tensor, axis, keep_dims, pipe: str, function):
    """x reduced by `function(data, axis)`, which drops the axis; over all axes a Scalar."""
    if not isinstance(x, Tensor):
        raise IllegalOperation(f"{where()}: a reduction of {x!r}, which is no tensor")
    rank = x.data.dim()
    _within_a_cta(x, axis)
    if axis is None:
        result = compute(f"reduce {pipe}", lambda data: function(data.reshape(-1), 0), x, elements=x.numel)
        return kept(result, [1] * rank) if keep_dims else only(result)
    axis = axis_of(axis, rank)
    layout = gl.SliceLayout(axis, x.layout or Inferred(rank)) if rank > 1 else None
    result = compute(f"reduce {pipe}", lambda data: function(data, axis), x, layout=layout, elements=x.numel)
    if keep_dims:
        return expand_dims(result, axis) if rank > 1 else kept(result, [1])
    return result if rank > 1 else only(result)


def _within_a_cta(x: Tensor, axis) -> None:
    """Raise Unsupported if a reduction or scan crosses the CTAs of a cluster, each of which has only its own half here."""
    if machine().num_ctas == 1:
        return
    rank = x.data.dim()
    halved = halved_dim(x.layout, rank)
    if halved is not None and axis in (None, halved, halved - rank):
        raise Unsupported(f"{where()}: a reduction of {x!r} across the CTAs of a cluster, which halve it")


def sum_(input, axis=None, keep_dims=False, dtype=None):
    """Sum (gl.sum): integers narrower than 32 bits are summed in int32 or uint32."""
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
    """The first index of the largest or the smallest element, int32."""
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
    """Reduce by `combine_fn`, which must be associative: neighbours first, in log2(n) steps."""
    tensors = _inputs(input)
    shape, layout = list(tensors[0].data.shape), tensors[0].layout
    for x in tensors:
        _within_a_cta(x, axis)
    if axis is None:
        tensors, axis = [kept(x, [x.numel]) for x in tensors], 0
    axis = axis_of(axis, tensors[0].data.dim())
    state = [Tensor(x.data.movedim(axis, -1), None, x.ready, x.pending, x.outcome) for x in tensors]
    while (n := state[0].data.shape[-1]) > 1:
        if n % 2:
            raise IllegalOperation(f"{where()}: a reduction over {n} elements: the sizes of tensors are powers of two")
        halves = [compute("free", lambda data, first=first: data[..., first::2], x) for first in (0, 1) for x in state]
        state = mapped(combine_fn, halves)
    rank = tensors[0].data.dim()
    if rank == 1:
        return _results([kept(x, [1] * len(shape)) if keep_dims else only(x) for x in state], input)
    sliced = gl.SliceLayout(axis, layout or Inferred(rank))
    state = [compute("free", lambda data: data.squeeze(-1), x, layout=sliced) for x in state]
    return _results([expand_dims(x, axis) if keep_dims else x for x in state], input)


def associative_scan(input, axis, combine_fn, reverse=False):
    """Scan, inclusive: element i combines elements 0 .. i, or i .. n - 1 with `reverse`."""
    tensors = _inputs(input)
    for x in tensors:
        _within_a_cta(x, axis)
    axis = axis_of(axis, tensors[0].data.dim())

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
    """Results of `function` for all elements at once, or, if it branches on them, element by element."""
    try:
        result = function(*tensors)
    except DecidesPerElement:
        for x in tensors:
            x.check_ready()
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
    """Map a function over elements: `pack` neighbours of each argument go to one call."""
    tensors = broadcast_all(args)
    shape, layout, pack = tensors[0].data.shape, layout_of(*tensors), int(pack)
    if pack > 1:
        tensors = [compute("free", lambda data, j=j: data.reshape(-1, pack)[:, j], x) for x in tensors for j in range(pack)]
    results = mapped(scalar_fn, tensors)
    if pack > 1:
        groups = [results[i : i + pack] for i in range(0, len(results), pack)]
        results = [compute("free", lambda *parts: torch.stack(parts, -1).reshape(shape), *group) for group in groups]
    results = [Tensor(x.data, layout, x.ready, x.pending, x.outcome) for x in results]
    return results[0] if len(results) == 1 else tuple(results)
