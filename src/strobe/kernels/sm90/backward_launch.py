"""The host half of the Hopper backward: buffers, arguments, and the launches of its kernels."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from strobe.device import arch_of
from strobe.kernels.common.arguments import bundles, bundles_of_heads, meta, meta_operands
from strobe.kernels.common.call import Call
from strobe.kernels.common.descriptors import layout_of
from strobe.kernels.common.documents import new_spans, spans_call
from strobe.kernels.gluon import TensorDescriptor
from strobe.kernels.portable import backward as portable
from strobe.kernels.portable.arguments import bias_gradient
from strobe.kernels.sm90 import backward_ends as ends
from strobe.kernels.sm90.arguments import score_arguments
from strobe.kernels.sm90.backward import backward_kernel, flat
from strobe.kernels.sm90.backward_config import KEYS, PARTS, PRODUCT, ROWS_PADDED, SPLIT_TILE, Chunks, Config, SplitConfig
from strobe.kernels.sm90.backward_split import keys_kernel, rows_kernel
from strobe.kernels.sm90.config import SMS
from strobe.kernels.sm90.descriptors import descriptors
from strobe.kernels.workspace import Workspace
from strobe.problem import AttentionProblem, Gradients, Operands, Varlen, lse_shape, zero_bias

HALF_L2 = 30_000_000
"""Bytes."""

KEYS_PASS_L2 = 8_000_000
"""Bytes, likewise, for the keys pass of two. Head dim 256, full and causal, with half of the L2 / with this: S = 1k 1063 / 951
and 620 / 589 us, 2k 1921 / 1878 and 1018 / 982."""


class Buffers(NamedTuple):
    """What the kernels share (see `backward_ends`), float32, the accumulator only of the backward in one pass; delta as the LSE
    lies, where somebody else wants it too; of the workspace the counters and the notes, one for 64 keys of each key head and
    one for 64 rows of each query head; and where there are documents the spans of keys, and in two passes of rows (see
    `documents`)."""

    statistics: torch.Tensor
    delta: torch.Tensor | None
    accumulator: torch.Tensor | None
    counters: torch.Tensor
    key_notes: torch.Tensor
    row_notes: torch.Tensor
    key_spans: torch.Tensor | None
    row_spans: torch.Tensor | None


def buffers(problem: AttentionProblem, config: Config | SplitConfig, device: torch.device, space: Workspace) -> Buffers:
    """space: with room for `number_of_notes`."""
    _, rows = padded_rows(problem)
    keys, _ = number_of_notes(problem)
    new = functools.partial(torch.empty, dtype=torch.float32, device=device)
    accumulator = new(rows * config.head_dim // 256, 256) if isinstance(config, Config) else None
    delta = new(lse_shape(problem)) if is_noted(problem) or "sinks" in problem.learned else None
    key_spans = row_spans = None
    if (documents := problem.mask.documents) is not None:
        key_spans = new_spans(documents.kv)
        row_spans = new_spans(documents.q) if isinstance(config, SplitConfig) else None
    notes = space.notes[:keys], space.notes[keys:]
    statistics = new(2 * rows, PARTS, dtype=torch.bfloat16) if is_folded(config) else new(2 * rows)
    return Buffers(statistics, delta, accumulator, space.counters, *notes, key_spans, row_spans)


def is_folded(config: Config | SplitConfig) -> bool:
    return isinstance(config, Config) and config.folded


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


def is_noted(problem: AttentionProblem) -> bool:
    """Whether a row may meet, in a tile, what it does not see."""
    return problem.mask.band != (None, None, None) or problem.mask.by_pair or problem.seqused


def launch(
    problem: AttentionProblem, operands: Operands, out, lse, dout, dlse: torch.Tensor | None,
    grads: Gradients, space: Buffers, config: Config | SplitConfig,
) -> None:  # fmt: skip
    """Write grads but those of sinks, at least one query and one key given; rows that belong to no sequence are left alone, and
    so are pairs of a bias that nobody sees."""
    for call in calls(problem, operands, out, lse, dout, dlse, grads, space, config):
        call.launch()


def calls(
    problem: AttentionProblem, operands: Operands, out, lse, dout, dlse: torch.Tensor | None,
    grads: Gradients, space: Buffers, config: Config | SplitConfig,
) -> list[Call]:  # fmt: skip
    """The launches of a backward, in order. Where a mask cuts, the notes of blocks are set into which something may have come
    that they do not see."""
    prepare = Call(ends.prepare, *prepare_arguments(problem, operands, out, lse, dout, dlse, space, config))
    found = [*span_calls(problem, space), prepare]
    if isinstance(config, Config):
        found += [
            Call(backward_kernel, *one_pass_arguments(problem, operands, dout, grads, space, config)),
            Call(ends.convert, *convert_arguments(problem, operands, grads.q, space, config)),
        ]
    else:
        found += [
            Call(keys_kernel, *keys_arguments(problem, operands, dout, grads, space, config)),
            Call(rows_kernel, *rows_arguments(problem, operands, dout, grads, space, config)),
        ]
    if is_noted(problem):
        notes = space.key_notes, space.row_notes
        grid, keywords = portable.redo_arguments(problem, operands, lse, dout, space.delta, grads, *notes)
        found.append(Call(portable.redo_noted, grid, (), keywords))
    return found


def span_calls(problem: AttentionProblem, space: Buffers) -> list[Call]:
    """What fills the spans, where there are any."""
    documents = problem.mask.documents
    if documents is None:
        return []
    pairs = (documents.kv, documents.q, space.key_spans), (documents.q, documents.kv, space.row_spans)
    return [spans_call(ids, others, spans) for ids, others, spans in pairs if spans is not None]


def compile_only(problem: AttentionProblem, config: Config | SplitConfig) -> list:
    """The compiled main kernels that `launch` would run, from shapes alone (see strobe.lab.offline)."""
    operands = meta_operands(problem)
    q, k, v = operands[:3]
    out = meta(*q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    lse = meta(*lse_shape(problem), dtype=torch.float32)
    space = buffers(problem, config, torch.device("meta"), Workspace(meta(16, dtype=torch.int32), meta(1, dtype=torch.int32)))
    bias = problem.score.bias if "bias" in problem.learned else None
    dbias = None if bias is None else zero_bias(problem, bias)
    found = calls(problem, operands, out, lse, out, None, Gradients(q, k, v, dbias), space, config)
    main = [call for call in found if call.kernel in (backward_kernel, keys_kernel, rows_kernel)]
    return [kernel.warmup(*arguments, grid=grid, **keywords) for kernel, grid, arguments, keywords in main]


# ---- grid, arguments and keywords of each kernel


def one_pass_arguments(problem: AttentionProblem, operands: Operands, dout, grads: Gradients, space: Buffers, config: Config):
    blocks, heads = _key_blocks(problem, KEYS, problem.head_dim + problem.head_dim_v + 2 * config.head_dim, HALF_L2)
    arguments = (
        *_inputs(operands, dout, config, config.tile_q, KEYS, 64),
        _statistics(space, config.tile_q),
        *_shares(space.accumulator, config),
        *_key_gradients(grads.k, grads.v, config),
        space.key_notes,
        space.counters,
        *operands[3:7],
        *heads,
        *_bounds(problem),
        *score_arguments(problem, operands.seed),
        space.key_spans,
        *bias_gradient(problem, grads.bias),
        problem.scale,
    )
    ctas = arch_of(operands.q.device).sms or SMS
    return (min(blocks, ctas),), arguments, _constants(problem, KEYS, config)


def keys_arguments(problem: AttentionProblem, operands: Operands, dout, grads: Gradients, space: Buffers, config: SplitConfig):
    blocks, heads = _key_blocks(problem, SPLIT_TILE, problem.head_dim + problem.head_dim_v, KEYS_PASS_L2)
    arguments = (
        *_inputs(operands, dout, config, SPLIT_TILE, SPLIT_TILE, SPLIT_TILE),
        _statistics(space, SPLIT_TILE),
        *_key_gradients(grads.k, grads.v, config),
        space.key_notes,
        *operands[3:7],
        *heads,
        *_bounds(problem),
        *score_arguments(problem, operands.seed),
        space.key_spans,
        problem.scale,
    )
    return (blocks,), arguments, _constants(problem, SPLIT_TILE, config)


def rows_arguments(problem: AttentionProblem, operands: Operands, dout, grads: Gradients, space: Buffers, config: SplitConfig):
    lengths = problem.lengths
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q
    arguments = (
        *_inputs(operands, dout, config, SPLIT_TILE, SPLIT_TILE, SPLIT_TILE),
        space.statistics,
        *descriptors(grads.q, SPLIT_TILE, (config.wide, config.narrow)),
        space.row_notes,
        *operands[3:7],
        padded_rows(problem)[0],
        problem.heads_q,
        problem.group,
        *bundles_of_heads(problem, HALF_L2),
        tiles,
        *_bounds(problem),
        *score_arguments(problem, operands.seed),
        space.row_spans,
        *bias_gradient(problem, grads.bias),
        problem.scale,
    )
    return (tiles,), arguments, _constants(problem, SPLIT_TILE, config)


def prepare_arguments(
    problem: AttentionProblem, operands: Operands, out, lse, dout, dlse, space: Buffers, config: Config | SplitConfig
):
    lengths = problem.lengths
    tiles = triton.cdiv(lengths.seqlen_q, ROWS_PADDED) * ROWS_PADDED // ends.ROWS
    by_batch, by_head, _ = _of_vector(lse)
    return (tiles * problem.heads_q * lengths.batch,), (), dict(
        out=out, dout=dout, dlse=dlse, lse=lse, statistics=space.statistics, delta=space.delta,
        accumulator=space.accumulator, **_rows(problem, operands, tiles), **_strides("out", out), **_strides("dout", dout),
        scale=problem.scale, lse_batch=by_batch, lse_head=by_head,
        **dict(zip(("dlse_batch", "dlse_head", "dlse_row"), (0, 0, 0) if dlse is None else _of_vector(dlse), strict=True)),
        DIM_V=problem.head_dim_v, PADDED_V=triton.next_power_of_2(problem.head_dim_v), DIM=config.head_dim,
        TILE_Q=config.tile_q if isinstance(config, Config) else SPLIT_TILE, PARTS=PARTS, ROWS_PADDED=ROWS_PADDED,
        ROWS=ends.ROWS, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip


def convert_arguments(problem: AttentionProblem, operands: Operands, dq, space: Buffers, config: Config):
    lengths = problem.lengths
    tiles = triton.cdiv(lengths.seqlen_q, ends.ROWS)
    columns = min(config.share_columns)
    grid = (config.head_dim // columns * tiles * problem.heads_q * lengths.batch,)
    return grid, (), dict(
        accumulator=space.accumulator, dq=dq, notes=space.row_notes if is_noted(problem) else None,
        **_rows(problem, operands, tiles), scale=problem.scale, **_strides("dq", dq),
        DIM=problem.head_dim, COLUMNS=columns, PADDED=config.head_dim, ROWS_PADDED=ROWS_PADDED, ROWS=ends.ROWS,
        enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip


# ---- what several take


def _inputs(
    operands: Operands, dout: torch.Tensor, config: Chunks, rows: int, rows_k: int, rows_v: int
) -> list[TensorDescriptor | None]:
    """Descriptors of Q, K, V, dO, in blocks of so many rows."""
    chunks, chunks_v = (config.wide, config.narrow), (config.wide_v, config.narrow_v)
    return [
        *descriptors(operands.q, rows, chunks),
        *descriptors(operands.k, rows_k, chunks),
        *descriptors(operands.v, rows_v, chunks_v),
        *descriptors(dout, rows, chunks_v),
    ]


def _key_gradients(dk: torch.Tensor, dv: torch.Tensor, config: Chunks) -> list[TensorDescriptor | None]:
    return [*descriptors(dk, 64, (config.wide, config.narrow)), *descriptors(dv, 64, (config.wide_v, config.narrow_v))]


def _statistics(space: Buffers, rows: int) -> TensorDescriptor:
    """Of a tile of so many rows. If they are folded, TMA brings zeros beyond the columns that there are, up to a product's."""
    if space.statistics.dim() == 2:
        block = (2 * rows, PRODUCT)
        return TensorDescriptor(
            space.statistics, [*space.statistics.shape], [PARTS, 1], [*block], layout_of(block, torch.bfloat16)
        )
    return TensorDescriptor.from_tensor(space.statistics, [2 * rows], flat(1))


def _shares(accumulator: torch.Tensor | None, config: Config) -> list[TensorDescriptor | None]:
    """Of the accumulator, in the parts that each group adds, if they differ."""
    assert accumulator is not None
    rows = sorted({columns // 4 for columns in config.share_columns}, reverse=True)
    found = [TensorDescriptor.from_tensor(accumulator, [number, 256], flat(2)) for number in rows]
    return [*found, None][:2]


def _key_blocks(problem: AttentionProblem, keys: int, columns: int, cache_bytes: int) -> tuple[int, tuple[int, ...]]:
    """How many blocks of so many keys there are, and the numbers of a kernel's `Heads`. columns: that a query row brings, in
    the inputs' type; cache_bytes: what the rows of a bundle of heads may take of the L2."""
    lengths = problem.lengths
    heads = lengths.batch * problem.heads_kv
    blocks = triton.cdiv(lengths.seqlen_kv, keys) * heads
    head_bytes = max(1, lengths.seqlen_q) * problem.group * columns * problem.dtype.itemsize
    at_once, rest = bundles(heads, cache_bytes // head_bytes)
    return blocks, (problem.heads_q, problem.heads_kv, at_once, rest, heads, blocks, padded_rows(problem)[0])


def _bounds(problem: AttentionProblem) -> tuple:
    return problem.lengths.seqlen_q, problem.lengths.seqlen_kv, *problem.mask.device_band


def _constants(problem: AttentionProblem, keys: int, config: Config | SplitConfig) -> dict:
    """keys: of a block."""
    return {
        # Folded, at head dim 64, ptxas finds no registers without the branch that asks for a mask, and makes products serial.
        "MASKED": is_noted(problem) or problem.varlen or problem.lengths.seqlen_kv % keys != 0 or is_folded(config),
        "NOTED": is_noted(problem),
        "C": config,
        "num_warps": 4,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
        "launch_pdl": True,
    }


def _rows(problem: AttentionProblem, operands: Operands, tiles: int) -> dict:
    """tiles: of a sequence."""
    lengths = problem.lengths
    return dict(
        cu_seqlens_q=operands.cu_seqlens_q, seqused_q=operands.seqused_q, n_q=lengths.seqlen_q,
        total_q=lengths.total_q if isinstance(lengths, Varlen) else 0, heads=problem.heads_q, padded=padded_rows(problem)[0],
        tiles=tiles,
    )  # fmt: skip


def _strides(name: str, x: torch.Tensor) -> dict:
    return {f"{name}_batch": x.stride(0) if x.dim() == 4 else 0, f"{name}_row": x.stride(-3), f"{name}_head": x.stride(-2)}


def _of_vector(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of an LSE by batch, head and row."""
    return x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.stride(-1)
