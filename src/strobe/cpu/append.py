"""Appends keys and values to a cache on a CPU, in plain torch: one request after the other."""

from __future__ import annotations

import torch

from strobe.serving.problem import AppendOperands, AppendOptions


def append(operands: AppendOperands, options: AppendOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new rows, and return the new lengths and the queries turned (nothing where there are none). All of them have
    places (see `strobe.call.contents`)."""
    k_cache, table = operands.k_cache, operands.page_table
    size = k_cache.shape[1]
    turned = k_cache.new_empty(0) if operands.q is None else operands.q.clone(memory_format=torch.contiguous_format)
    lengths = operands.lengths.clone()
    for b, length in enumerate(operands.lengths.tolist()):
        first = length if operands.positions is None else int(operands.positions[b])
        rows = _rows(operands.k, operands.cu_seqlens, b)
        count = operands.k[rows].shape[0]
        at = torch.arange(length, length + count)
        if table is not None:
            places = table[b].long()[at // size]
        else:
            places = torch.full_like(at, b if operands.entries is None else int(operands.entries[b]))
        for cache, new, scale in ((k_cache, operands.k, operands.k_scale), (operands.v_cache, operands.v, operands.v_scale)):
            if cache is None or new is None:
                continue
            values = new[rows]
            if cache is k_cache:
                values = _turned(values, first + torch.arange(count), operands, options)
            if scale is not None:
                values = values.float() / scale[b][:, None]
            cache[places, at % size] = values.to(cache.dtype)
        lengths[b] = length + count
        if operands.q is not None:
            rows = _rows(operands.q, operands.cu_seqlens_q, b)
            count = operands.q[rows].shape[0]
            positions = first + torch.arange(count) * (not options.one_position)
            turned[rows] = _turned(operands.q[rows], positions, operands, options)
    return lengths, turned


def _rows(x: torch.Tensor, cu: torch.Tensor | None, b: int):
    """The index of the rows of request b."""
    return b if cu is None else slice(int(cu[b]), int(cu[b + 1]))


def _turned(x: torch.Tensor, positions: torch.Tensor, operands: AppendOperands, options: AppendOptions) -> torch.Tensor:
    """x [n, heads, dim] turned by the rotary embedding, if there is one."""
    cos, sin = operands.cos, operands.sin
    if cos is None or sin is None:
        return x
    half = cos.shape[1]
    c, s = cos[positions].float()[:, None], sin[positions].float()[:, None]
    turned = x.float().clone()
    a, b = (
        (turned[..., : 2 * half : 2], turned[..., 1 : 2 * half : 2])
        if options.interleaved
        else (turned[..., :half], turned[..., half : 2 * half])
    )
    new_a, new_b = a * c - b * s, a * s + b * c
    a.copy_(new_a)
    b.copy_(new_b)
    return turned.to(x.dtype)
