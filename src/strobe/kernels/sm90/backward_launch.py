"""The host half of the Hopper backward: buffers, arguments, and the launches of `backward_ends` and `backward`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from strobe.device import arch_of
from strobe.kernels.common.arguments import LOG2_E, even_bundles, meta, meta_operands
from strobe.kernels.gluon import TensorDescriptor
from strobe.kernels.sm90 import backward_ends as ends
from strobe.kernels.sm90.backward import backward_kernel, flat
from strobe.kernels.sm90.backward_config import KEYS, ROWS_PADDED, Config
from strobe.kernels.sm90.config import SMS
from strobe.kernels.sm90.descriptors import descriptors
from strobe.kernels.workspace import Workspace
from strobe.problem import AttentionProblem, Operands, Varlen

HALF_L2 = 30_000_000
"""Bytes."""


class Buffers(NamedTuple):
    """What the three kernels share (see `backward_ends`), float32; and of the workspace the counters and the notes, one for 64
    keys of each key head and then one for 64 rows of each query head."""

    statistics: torch.Tensor
    accumulator: torch.Tensor
    counters: torch.Tensor
    notes: torch.Tensor


def padded_rows(problem: AttentionProblem) -> tuple[int, int]:
    """Of a query head in the shared buffers, and of all heads (and batch entries) together."""
    lengths = problem.lengths
    if isinstance(lengths, Varlen):
        padded = triton.cdiv(lengths.total_q + lengths.batch * ROWS_PADDED, ROWS_PADDED) * ROWS_PADDED
        return padded, padded * problem.heads_q
    padded = triton.cdiv(lengths.seqlen_q, ROWS_PADDED) * ROWS_PADDED
    return padded, padded * problem.heads_q * lengths.batch


def number_of_notes(problem: AttentionProblem) -> tuple[int, int]:
    """Of blocks of 64 keys, of blocks of 64 rows."""
    lengths = problem.lengths
    keys = lengths.batch * problem.heads_kv * triton.cdiv(lengths.seqlen_kv, 64)
    return keys, lengths.batch * problem.heads_q * triton.cdiv(lengths.seqlen_q, 64)


def buffers(problem: AttentionProblem, config: Config, device: torch.device, space: Workspace) -> Buffers:
    _, rows = padded_rows(problem)
    new = functools.partial(torch.empty, dtype=torch.float32, device=device)
    return Buffers(new(2 * rows), new(rows * config.head_dim), *space)


def launch(
    problem: AttentionProblem, operands: Operands, out, lse, dout, dlse: torch.Tensor | None,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, space: Buffers, config: Config,
) -> None:  # fmt: skip
    """Write dq, dk, dv, at least one query and one key given; rows that belong to no sequence are left alone. Where a mask
    cuts, the notes of blocks are set into which something may have come that they do not see."""
    grid, arguments = prepare_arguments(problem, operands, out, lse, dout, dlse, space, config)
    ends.prepare[grid](**arguments)
    grid, arguments, constants = kernel_arguments(problem, operands, dout, dk, dv, space, config)
    backward_kernel[grid](*arguments, **constants)
    grid, arguments = convert_arguments(problem, operands, dq, space, config)
    ends.convert[grid](**arguments)


def prepare_arguments(problem: AttentionProblem, operands: Operands, out, lse, dout, dlse, space: Buffers, config: Config):
    """Grid and arguments of `backward_ends.prepare`."""
    lengths = problem.lengths
    padded, _ = padded_rows(problem)
    tiles = triton.cdiv(lengths.seqlen_q, ROWS_PADDED) * ROWS_PADDED // ends.ROWS
    return (tiles * problem.heads_q * lengths.batch,), dict(
        out=out, dout=dout, dlse=dlse, lse=lse, statistics=space.statistics, accumulator=space.accumulator,
        **_lengths(problem, operands, padded, tiles),
        **_strides("out", out), **_strides("dout", dout),
        **dict(zip(("lse_batch", "lse_head"), _of_vector(lse), strict=False)),
        **dict(zip(("dlse_batch", "dlse_head", "dlse_row"), (0, 0, 0) if dlse is None else _of_vector(dlse), strict=True)),
        DIM_V=problem.head_dim_v, PADDED_V=triton.next_power_of_2(problem.head_dim_v), DIM=config.head_dim,
        TILE_Q=config.tile_q, ROWS_PADDED=ROWS_PADDED, ROWS=ends.ROWS,
    )  # fmt: skip


def convert_arguments(problem: AttentionProblem, operands: Operands, dq, space: Buffers, config: Config):
    """Grid and arguments of `backward_ends.convert`."""
    lengths = problem.lengths
    padded, _ = padded_rows(problem)
    tiles = triton.cdiv(lengths.seqlen_q, ends.ROWS)
    columns = config.narrow or 64
    keys, _ = number_of_notes(problem)
    grid = (config.head_dim // columns * tiles * problem.heads_q * lengths.batch,)
    return grid, dict(
        accumulator=space.accumulator, dq=dq, notes=space.notes[keys:] if is_noted(problem) else None,
        **_lengths(problem, operands, padded, tiles), scale=problem.scale, **_strides("dq", dq),
        DIM=problem.head_dim, COLUMNS=columns, PADDED=config.head_dim, ROWS_PADDED=ROWS_PADDED, ROWS=ends.ROWS,
    )  # fmt: skip


def _lengths(problem: AttentionProblem, operands: Operands, padded: int, tiles: int) -> dict:
    lengths = problem.lengths
    return dict(
        cu_seqlens_q=operands.cu_seqlens_q, seqused_q=operands.seqused_q, n_q=lengths.seqlen_q,
        total_q=lengths.total_q if isinstance(lengths, Varlen) else 0, heads=problem.heads_q, padded=padded, tiles=tiles,
    )  # fmt: skip


def _strides(name: str, x: torch.Tensor) -> dict:
    batch = x.stride(0) if x.dim() == 4 else 0
    return {f"{name}_batch": batch, f"{name}_row": x.stride(-3), f"{name}_head": x.stride(-2)}


def _of_vector(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of an LSE by batch, head and row."""
    return (x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.stride(-1))


def is_noted(problem: AttentionProblem) -> bool:
    """Whether a row may meet, in a tile, what it does not see."""
    return problem.mask.band != (None, None, None) or problem.mask.by_pair or problem.seqused


def kernel_arguments(problem: AttentionProblem, operands: Operands, dout, dk, dv, space: Buffers, config: Config):
    """Grid, arguments and compile-time constants of `backward.backward_kernel`."""
    lengths = problem.lengths
    left, right, prefix = problem.mask.device_band
    padded, _ = padded_rows(problem)
    heads = lengths.batch * problem.heads_kv
    blocks = triton.cdiv(lengths.seqlen_kv, KEYS) * heads
    row_bytes = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v) + 4 * config.head_dim
    chunks, chunks_v = (config.wide, config.narrow), (config.wide_v, config.narrow_v)
    arguments = (
        *descriptors(operands.q, config.tile_q, chunks),
        *descriptors(operands.k, 64, chunks),
        *descriptors(operands.v, 64, chunks_v),
        *descriptors(dout, config.tile_q, chunks_v),
        TensorDescriptor.from_tensor(space.statistics, [2 * config.tile_q], flat(1)),
        *_shares(space.accumulator, config),
        *descriptors(dk, 64, chunks),
        *descriptors(dv, 64, chunks_v),
        space.notes,
        space.counters,
        operands.cu_seqlens_q,
        operands.cu_seqlens_kv,
        operands.seqused_q,
        operands.seqused_kv,
        problem.heads_q,
        problem.heads_kv,
        even_bundles(heads, HALF_L2 // max(1, lengths.seqlen_q * row_bytes * problem.group)),
        heads,
        blocks,
        padded,
        lengths.seqlen_q,
        lengths.seqlen_kv,
        left,
        right,
        prefix,
        *_score(problem),
        problem.scale,
    )
    constants = {
        "MASKED": is_noted(problem) or problem.varlen or lengths.seqlen_kv % KEYS != 0,
        "NOTED": is_noted(problem),
        "C": config,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return (min(blocks, arch_of(operands.q.device).sms or SMS),), arguments, constants


def _shares(accumulator: torch.Tensor, config: Config) -> list[TensorDescriptor | None]:
    """Of the accumulator, in the parts that each group adds, if they differ."""
    rows = [columns // 4 for columns in config.share_columns]
    flat_rows = accumulator.view(-1, 256)
    found = [TensorDescriptor.from_tensor(flat_rows, [number, 256], flat(2)) for number in sorted(set(rows), reverse=True)]
    return [*found, None][:2]


def _score(problem: AttentionProblem) -> tuple:
    score = problem.score
    inner, outer = problem.scale * LOG2_E, None
    if score.softcap:
        inner, outer = problem.scale / score.softcap, score.softcap * LOG2_E
    if score.alibi is None:
        return inner, outer, None, 0, 0
    return inner, outer, score.alibi, score.alibi.stride(0) * (score.alibi.dim() == 2), score.alibi.stride(-1)


def compile_only(problem: AttentionProblem, config: Config):
    """The compiled main kernel that `launch` would run, from shapes alone (see strobe.lab.offline)."""
    operands = meta_operands(problem)
    dout = meta(*operands.q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    space = buffers(problem, config, torch.device("meta"), Workspace(meta(16, dtype=torch.int32), meta(1, dtype=torch.int32)))
    grid, arguments, constants = kernel_arguments(problem, operands, dout, operands.k, operands.v, space, config)
    return backward_kernel.warmup(*arguments, grid=grid, **constants)
