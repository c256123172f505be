"""Appends keys and values to a cache, turned by a rotary embedding, and turns the queries beside them: one launch, in Triton.

A program has some heads of one row (a token): of K and V, or of Q. The last programs write the new lengths. What has no place
(no room, a page that is not there) is not written; a position beyond the embedding's last row is taken as that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strobe.device import Arch, arch_of
from strobe.kernels.common.call import Call
from strobe.kernels.common.dependent_launch import take_last_turn
from strobe.kernels.common.device_function import device_function
from strobe.kernels.portable import interpreter
from strobe.serving.problem import AppendOperands, AppendOptions

interpreter.mend()

AT_ONCE = 128
"""Requests that a program looks at together."""
NUMBERS = 2048
"""Numbers of K, or of Q, that a program turns. An H200, what appending adds to 16 queries of 64 heads on 8, microseconds (and
with 8192): 8 requests of 1k keys 3.7 (4.7), 32 of 8k 7.7 (12.6); 4 queries, 32 of 1k 3.3 (5.4), 1 query level. A program of one
or two warps, with as many numbers for each: slower."""


@device_function
def _request_of(row, cu, batch, n, AT_ONCE: tl.constexpr):
    """The request of a row, and the row's number in it. cu: the bounds of packed rows, or None for n rows each."""
    if cu is None:  # no early return: Triton 3.6 compiles what comes after it, too
        number = row // n
        within = row % n
    else:
        number = 0
        for first in range(0, batch, AT_ONCE):
            b = first + tl.arange(0, AT_ONCE)
            ends = tl.load(cu + b + 1, mask=b < batch, other=2147483647)
            number += tl.sum((ends <= row).to(tl.int32), 0)
        within = row - tl.load(cu + tl.minimum(number, batch - 1))
    return number, within


@device_function
def _angles(cos, sin, position, rows, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """cos and sin of a position, [1, COLUMNS]."""
    column = tl.arange(0, COLUMNS)
    at = tl.minimum(tl.maximum(position, 0), rows - 1).to(tl.int64) * HALF + column
    c = tl.load(cos + at, mask=column < HALF, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=column < HALF, other=0.0).to(tl.float32)
    return c[None, :], s[None, :]


@device_function
def _turned(a, b, c, s, factor, kind: tl.constexpr):
    """Pairs of numbers turned by c and s, times the factor of their head. As elsewhere, what is turned is rounded to the dtype
    of K before it is scaled for a cache of 8 bits."""
    new_a = (a * c - b * s).to(kind).to(tl.float32) * factor[:, None]
    new_b = (a * s + b * c).to(kind).to(tl.float32) * factor[:, None]
    return new_a, new_b


@device_function
def _turn(source, source_head, target, target_head, there, c, s, first, HEADS: tl.constexpr, TOGETHER: tl.constexpr,
          DIM: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr, factor):  # fmt: skip
    """Copy a row of the heads from `first` on, its first 2 * HALF columns turned by c and s, each head times its factor."""
    head = first + tl.arange(0, TOGETHER)[:, None]
    rows = head < HEADS * there.to(tl.int32)
    kind = target.dtype.element_ty
    if INTERLEAVED:  # rows as they lie: by every other column an H100 took 14.0 microseconds for 64 heads, by halves 1.6
        column = tl.arange(0, 2 * COLUMNS)[None, :]
        mask = rows & (column < 2 * HALF)
        x = tl.load(source + head * source_head + column, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [TOGETHER, COLUMNS, 2]))
        a, b = _turned(a, b, c, s, factor, source.dtype.element_ty)
        tl.store(target + head * target_head + column, tl.interleave(a, b).to(kind), mask=mask)
    else:
        pair = tl.arange(0, COLUMNS)[None, :]
        mask = rows & (pair < HALF)
        a = tl.load(source + head * source_head + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + head * source_head + pair + HALF, mask=mask, other=0.0).to(tl.float32)
        a, b = _turned(a, b, c, s, factor, source.dtype.element_ty)
        tl.store(target + head * target_head + pair, a.to(kind), mask=mask)
        tl.store(target + head * target_head + pair + HALF, b.to(kind), mask=mask)
    _copy(source, source_head, target, target_head, there, 2 * HALF, first, HEADS, TOGETHER, DIM, factor)


@device_function
def _copy(source, source_head, target, target_head, there, begin: tl.constexpr, first, HEADS: tl.constexpr,
          TOGETHER: tl.constexpr, DIM: tl.constexpr, factor):  # fmt: skip
    """Copy the columns from `begin` on of a row of the heads from `first` on."""
    if begin < DIM:
        head = first + tl.arange(0, TOGETHER)[:, None]
        WIDTH: tl.constexpr = triton.next_power_of_2(DIM - begin)
        column = begin + tl.arange(0, WIDTH)[None, :]
        mask = (head < HEADS * there.to(tl.int32)) & (column < DIM)
        x = tl.load(source + head * source_head + column, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
        tl.store(target + head * target_head + column, x.to(target.dtype.element_ty), mask=mask)


@device_function
def _inverse(scale, scale_batch, scale_head, b, first, HEADS: tl.constexpr, TOGETHER: tl.constexpr):
    """1 / scale of each head from `first` on, or 1."""
    factor = tl.full([TOGETHER], 1.0, tl.float32)
    if scale is not None:
        head = first + tl.arange(0, TOGETHER)
        factor = 1.0 / tl.load(scale + b * scale_batch + head * scale_head, mask=head < HEADS, other=1.0)
    return factor


@triton.jit(do_not_specialize=["batch", "n", "n_q", "rows", "rows_q", "capacity", "pages", "table_row", "angles"])
def append_kernel(
    k_cache, v_cache, k, v, q, turned, lengths, new_lengths, table, entries, cu, cu_q, cos, sin, positions, k_scale, v_scale,
    k_cache_strides, v_cache_strides, k_strides, v_strides, q_strides, turned_strides, k_scale_strides, v_scale_strides,
    batch, n, n_q, rows, rows_q, capacity, pages, table_row, angles,
    SIZE: tl.constexpr, HEADS: tl.constexpr, HEADS_Q: tl.constexpr, TOGETHER: tl.constexpr, DIM: tl.constexpr,
    DIM_V: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr,
    ONE_POSITION: tl.constexpr, AT_ONCE: tl.constexpr, IN_TURN: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (HEADS + TOGETHER - 1) // TOGETHER
    PARTS_Q: tl.constexpr = (HEADS_Q + TOGETHER - 1) // TOGETHER
    program = tl.program_id(0)
    if IN_TURN:
        take_last_turn()
    if program < rows * PARTS:
        row, first = program // PARTS, program % PARTS * TOGETHER
        b, i = _request_of(row, cu, batch, n, AT_ONCE)
        known = (b < batch) & (i >= 0)
        safe = tl.minimum(b, batch - 1)
        length = tl.load(lengths + safe)
        at = length + i
        there = known & (length >= 0) & (at >= 0) & (at < capacity)
        place = safe
        if table is not None:
            place = tl.load(table + safe.to(tl.int64) * table_row + at // SIZE, mask=there, other=-1)
        if entries is not None:
            place = tl.load(entries + safe)
        there = there & (place >= 0) & (place < pages)
        place = place.to(tl.int64)
        own = i if cu is None else row
        source = k + safe.to(tl.int64) * k_strides[0] + own.to(tl.int64) * k_strides[1]
        target = k_cache + place * k_cache_strides[0] + (at % SIZE).to(tl.int64) * k_cache_strides[1]
        factor = _inverse(k_scale, k_scale_strides[0], k_scale_strides[1], safe, first, HEADS, TOGETHER)
        if cos is None:
            _copy(source, k_strides[2], target, k_cache_strides[2], there, 0, first, HEADS, TOGETHER, DIM, factor)
        else:
            position = at
            if positions is not None:
                position = tl.load(positions + safe) + i
            c, s = _angles(cos, sin, position, angles, HALF, COLUMNS)
            _turn(source, k_strides[2], target, k_cache_strides[2], there, c, s, first, HEADS, TOGETHER, DIM, HALF, COLUMNS,
                  INTERLEAVED, factor)  # fmt: skip
        if v is not None:
            source = v + safe.to(tl.int64) * v_strides[0] + own.to(tl.int64) * v_strides[1]
            target = v_cache + place * v_cache_strides[0] + (at % SIZE).to(tl.int64) * v_cache_strides[1]
            factor = _inverse(v_scale, v_scale_strides[0], v_scale_strides[1], safe, first, HEADS, TOGETHER)
            _copy(source, v_strides[2], target, v_cache_strides[2], there, 0, first, HEADS, TOGETHER, DIM_V, factor)
    elif program < rows * PARTS + rows_q * PARTS_Q:
        if q is not None:
            program -= rows * PARTS
            row, first = program // PARTS_Q, program % PARTS_Q * TOGETHER
            b, i = _request_of(row, cu_q, batch, n_q, AT_ONCE)
            safe = tl.minimum(b, batch - 1)
            position = tl.load(lengths + safe)
            if positions is not None:
                position = tl.load(positions + safe)
            if not ONE_POSITION:
                position += i
            c, s = _angles(cos, sin, position, angles, HALF, COLUMNS)
            own = i if cu_q is None else row
            source = q + safe.to(tl.int64) * q_strides[0] + own.to(tl.int64) * q_strides[1]
            target = turned + safe.to(tl.int64) * turned_strides[0] + own.to(tl.int64) * turned_strides[1]
            factor = tl.full([TOGETHER], 1.0, tl.float32)
            _turn(source, q_strides[2], target, turned_strides[2], row >= 0, c, s, first, HEADS_Q, TOGETHER, DIM, HALF, COLUMNS,
                  INTERLEAVED, factor)  # fmt: skip
    else:  # names of their own: Triton wants one type of a name in all branches
        requests = (program - rows * PARTS - rows_q * PARTS_Q) * AT_ONCE + tl.arange(0, AT_ONCE)
        more = n + requests * 0
        if cu is not None:
            begin = tl.load(cu + requests, mask=requests < batch, other=0)
            more = tl.load(cu + requests + 1, mask=requests < batch, other=0) - begin
        before = tl.minimum(tl.maximum(tl.load(lengths + requests, mask=requests < batch, other=0), 0), capacity)
        tl.store(new_lengths + requests, tl.minimum(before + tl.maximum(more, 0), capacity), mask=requests < batch)


def append(operands: AppendOperands, options: AppendOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new rows, and return the new lengths and the queries turned (nothing where there are none)."""
    q, lengths = operands.q, torch.empty_like(operands.lengths)
    turned = operands.k.new_empty(0) if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(lengths):
        append_call(operands, options, lengths, turned, arch_of(lengths.device)).launch()
    return lengths, turned


def append_call(
    operands: AppendOperands, options: AppendOptions, lengths: torch.Tensor, turned: torch.Tensor | None, arch: Arch
) -> Call:
    """The launch of `append`. From Hopper on it takes its turn, so that attention is there when it ends."""
    # an H200, pages of 64, microseconds of both launches (and without turns): 1 request of 1k keys 7.3 (8.2), 8 of 1k 14.5
    # (15.7), 1 of 8k 15.9 (17.0), 8 of 8k 71.3 (71.9), 32 of 8k 253 (251); 4 queries (and when it kept CTAs of the attention
    # off their multiprocessors, see `Driver.carve_out_all`): 1 of 8k 17.2 (20.1), 8 of 1k 17.1 (19.6)
    o, batch, in_turn = operands, lengths.shape[0], arch.capability >= 90
    rows, rows_q = o.k.shape[:-2].numel(), 0 if o.q is None else o.q.shape[:-2].numel()
    half = 0 if o.cos is None else o.cos.shape[1]
    heads, heads_q = o.k.shape[-2], 1 if o.q is None else o.q.shape[-2]
    size, table, dim = o.k_cache.shape[1], o.page_table, o.k.shape[-1]
    together = min(max(NUMBERS // triton.next_power_of_2(dim), 1), triton.next_power_of_2(max(heads, heads_q)))
    programs = rows * triton.cdiv(heads, together) + rows_q * triton.cdiv(heads_q, together) + triton.cdiv(batch, AT_ONCE)
    return Call(append_kernel, (programs,), (), dict(
        k_cache=o.k_cache, v_cache=o.v_cache, k=o.k, v=o.v, q=o.q, turned=None if o.q is None else turned, lengths=o.lengths,
        new_lengths=lengths, table=table, entries=o.entries, cu=o.cu_seqlens, cu_q=o.cu_seqlens_q,
        cos=None if o.cos is None else o.cos.contiguous(), sin=None if o.sin is None else o.sin.contiguous(),
        positions=o.positions, k_scale=o.k_scale, v_scale=o.v_scale,
        k_cache_strides=o.k_cache.stride()[:3], v_cache_strides=_strides(o.v_cache), k_strides=_strides(o.k),
        v_strides=_strides(o.v), q_strides=_strides(o.q), turned_strides=_strides(None if o.q is None else turned),
        k_scale_strides=_of_scale(o.k_scale), v_scale_strides=_of_scale(o.v_scale),
        batch=batch, n=0 if o.cu_seqlens is not None else o.k.shape[1],
        n_q=0 if o.q is None or o.cu_seqlens_q is not None else o.q.shape[1], rows=rows, rows_q=rows_q,
        capacity=size * (1 if table is None else table.shape[1]), pages=o.k_cache.shape[0],
        table_row=0 if table is None else table.stride(0), angles=1 if o.cos is None else o.cos.shape[0],
        SIZE=size, HEADS=heads, HEADS_Q=heads_q, TOGETHER=together, DIM=dim, DIM_V=dim if o.v is None else o.v.shape[-1],
        HALF=half, COLUMNS=triton.next_power_of_2(max(half, 1)), INTERLEAVED=options.interleaved,
        ONE_POSITION=options.one_position, AT_ONCE=AT_ONCE, IN_TURN=in_turn, enable_fp_fusion=True,
        **({"launch_pdl": True} if in_turn else {}),
    ))  # fmt: skip


def _strides(x: torch.Tensor | None) -> tuple[int, int, int]:
    """The strides of a batch entry (0 where rows are packed), a row and a head."""
    if x is None:
        return 0, 0, 0
    return x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2)


def _of_scale(x: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))
