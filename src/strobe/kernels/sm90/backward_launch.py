"""The host half of the Hopper backward: tensors, arguments, and the launches of its kernels."""

from __future__ import annotations

import math

import torch
import triton

from strobe.device import Arch
from strobe.kernels.common.arguments import bundles, bundles_of_heads, totals
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, gradients, unfilled
from strobe.kernels.common.descriptors import layout_of
from strobe.kernels.common.documents import span_buffers, span_calls
from strobe.kernels.gluon import TensorDescriptor
from strobe.kernels.portable import backward as portable
from strobe.kernels.portable.scores import bias_gradient
from strobe.kernels.sm90 import backward_pre_post as ends
from strobe.kernels.sm90.backward import backward_kernel, flat
from strobe.kernels.sm90.backward_config import (
    FLAG_STRIDE,
    KEYS,
    LAST_BLOCKS,
    PARTIAL_COLUMNS,
    PARTS,
    PRODUCT,
    ROWS_PADDED,
    SPLIT_TILE,
    Chunks,
    Config,
    DqConfig,
    SplitConfig,
    stored_bytes,
    stored_heads,
    stored_pairs,
)
from strobe.kernels.sm90.backward_dq import dq_kernel
from strobe.kernels.sm90.backward_split import keys_kernel, rows_kernel
from strobe.kernels.sm90.config import HALF_L2, SMS
from strobe.kernels.sm90.descriptors import descriptors
from strobe.kernels.sm90.launch import has_blind_tiles
from strobe.kernels.sm90.scores import score_arguments
from strobe.kernels.sm90.tile_list import RECORD, backward_list_buffers, backward_list_call, likely_tiles
from strobe.problem import AttentionProblem, Varlen, lse_shape

SIDE_BY_SIDE = 34_000_000
"""Bytes that the rows of a bundle of heads take where blocks of keys add to dQ in an order: as much as the L2 cache holds, so
that few CTAs share a head, as these wait for each other. Of the default's time on an H100, with half as much, this, and twice
as much: head dim 64, 16k, 1.03, 1.03, 1.04, causal 1.05, 1.04, 1.27; 128, 16k, 1.09, 1.07, 1.10, causal 1.09, 1.09, 1.34, 4k
1.07, 1.06, 1.06, causal 1.04, 1.08, 1.55. At 1k with 16 heads, the most, and with 32: head dim 64 0.97, 0.97, causal 0.93,
0.92; 96 0.94, 0.95, causal 0.91, 0.96; 128 0.97, 1.02, causal 0.97, 1.07."""

ABREAST = 2048
"""Rows of a query head that CTAs are at, where these walk from the last rows on, one behind the other: only these have to be in
the L2 cache. Of the default's time on an H100, 32 heads on 8, causal, with bundles of 1, 2, 4 and 8 key heads: head dim 64, 16k
1.11, 1.07, 1.05, 1.03; 128, 16k 1.10, 1.04, 1.04, 1.08; with 2, 4 and 8: 128, 4k 1.04, 1.04, 0.98."""

KEYS_PASS_L2 = 8_000_000
"""Bytes, likewise, for the keys pass of two. Head dim 256, full and causal, with half of the L2 / with this: S = 1k 1063 / 951
and 620 / 589 us, 2k 1921 / 1878 and 1018 / 982."""


def buffers(problem: AttentionProblem, config: Config | SplitConfig) -> Buffers:
    """The tensors of a backward. Beside the gradients it takes, for each query row and head, 8 bytes, with folded statistics
    32, under a mask 4 more, and in one pass 4 for each column of the padded head dim.

    statistics, accumulator: what the kernels share (see `backward_pre_post`), the accumulator only in one pass.
    flags: of the order in which dQ is added up, if it has one (see `backward_order`).
    delta: as the LSE lies, where somebody else wants it too.
    key_notes, row_notes: one for 64 keys of each key head, one for 64 rows of each query head.
    """
    _, rows = padded_rows(problem)
    keys, row_notes = number_of_notes(problem)
    made = gradients(problem)
    if is_listed(problem, config):  # that launch writes the zeros
        made |= {name: made[name]._replace(fill=None) for name in ("dq", "dk", "dv")}
    folded = Buffer((2 * rows, PARTS), torch.bfloat16)
    made["statistics"] = folded if is_folded(config) else Buffer((2 * rows,), torch.float32)
    if is_noted(problem) or "sinks" in problem.learned:
        made["delta"] = Buffer(lse_shape(problem), torch.float32)
    if isinstance(config, Config) and not config.stored:
        made["accumulator"] = Buffer((rows * config.head_dim // 256, 256), torch.float32)
    if is_ordered(config):
        made["flags"] = Buffer((number_of_flags(problem), FLAG_STRIDE), torch.int32)
    if config.stored:
        numbers = stored_heads(problem) * stored_bytes(problem) // problem.dtype.itemsize
        made["stored"] = Buffer((numbers // ROWS_PADDED, ROWS_PADDED), problem.dtype)
    names = ("key_spans",) if isinstance(config, Config) else ("key_spans", "row_spans")
    lists = backward_list_buffers(problem) if is_listed(problem, config) else {}
    return Buffers(made, {**span_buffers(problem, *names), **lists}, {"key_notes": keys, "row_notes": row_notes})


def is_listed(problem: AttentionProblem, config: Config | SplitConfig) -> bool:
    """Whether there are lists of rows and keys (see `tile_list`)."""
    return problem.varlen and isinstance(config, Config) and not config.stored


def is_folded(config: Config | SplitConfig | DqConfig) -> bool:
    return isinstance(config, Config) and config.folded


def is_ordered(config: Config | SplitConfig) -> bool:
    return isinstance(config, Config) and config.order != 0


def is_cleared(problem: AttentionProblem, config: Config | SplitConfig) -> bool:
    """Whether dQ's accumulator has to be 0 from the start: where blocks of keys add to it as they come, or where there may be
    rows to which none adds. With an order the first block that adds to a tile stores its share."""
    return not is_ordered(config) or problem.varlen or has_blind_tiles(problem)


def number_of_flags(problem: AttentionProblem) -> int:
    """Flags of the order of dQ: one for each block of keys."""
    return problem.lengths.batch * problem.heads_kv * triton.cdiv(problem.lengths.seqlen_kv, KEYS)


def padded_rows(problem: AttentionProblem) -> tuple[int, int]:
    """How many rows one query head has in the shared buffers, padding included, and how many all heads and batch entries have
    together."""
    lengths = problem.lengths
    if isinstance(lengths, Varlen):
        padded = triton.cdiv(lengths.total_q + lengths.batch * ROWS_PADDED, ROWS_PADDED) * ROWS_PADDED
        return padded, padded * problem.heads_q
    padded = triton.cdiv(lengths.seqlen_q, ROWS_PADDED) * ROWS_PADDED
    return padded, padded * problem.heads_q * lengths.batch


def number_of_notes(problem: AttentionProblem) -> tuple[int, int]:
    """How many notes a backward may leave: one for each block of 64 keys, and one for each block of 64 rows."""
    lengths = problem.lengths
    keys = lengths.batch * problem.heads_kv * triton.cdiv(lengths.seqlen_kv, 64)
    return keys, lengths.batch * problem.heads_q * triton.cdiv(lengths.seqlen_q, 64)


def is_noted(problem: AttentionProblem) -> bool:
    """Whether a row may meet, in a tile, what it does not see."""
    return problem.mask.band != (None, None, None) or problem.mask.by_pair or problem.seqused


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config | SplitConfig) -> list[Call]:
    """The launches of a backward, in order: pairs of a bias that nobody sees are left alone, and so are, where there are no
    lists, rows that belong to no sequence. Where a mask cuts, the notes of blocks are set into which something may have come
    that they do not see, and the last launch redoes these."""
    found = [*span_calls(tensors)]
    if is_listed(problem, config):
        found.append(backward_list_call(problem, tensors))
    found += [prepare_call(problem, tensors, config), *main_calls(problem, tensors, arch, config)]
    if isinstance(config, Config) and not config.stored:
        found.append(convert_call(problem, tensors, config))
    return [*found, portable.redo_call(problem, tensors, arch)] if is_noted(problem) else found


def main_calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config | SplitConfig) -> list[Call]:
    """The launches over tiles of scores: one pass, or those of keys and of rows. Where dS is stored, for some heads after the
    other, the pass over keys and the product that is dQ."""
    heads = problem.lengths.batch * problem.heads_kv
    at_once = stored_heads(problem) if config.stored else heads
    found = []
    for first in range(0, heads, at_once):
        turn = range(first, min(first + at_once, heads))
        if isinstance(config, Config):
            found.append(one_pass_call(problem, tensors, arch, config, turn))
        else:
            found.append(keys_call(problem, tensors, config, turn))
        if config.stored:
            found.append(dq_call(problem, tensors, config, turn))
        elif isinstance(config, SplitConfig):
            found.append(rows_call(problem, tensors, config))
    return found


def compile_only(problem: AttentionProblem, arch: Arch, config: Config | SplitConfig) -> list:
    """The compiled kernels over tiles of scores, from shapes alone (see strobe.lab.binary.offline)."""
    tensors = unfilled(problem, buffers(problem, config))
    calls = main_calls(problem, tensors, arch, config)
    return [call.compile() for call in {id(call.kernel): call for call in calls}.values()]


# ---- the launch of each kernel


def one_pass_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config, turn: range) -> Call:
    """turn: the key heads, of the whole batch, whose blocks the launch has."""
    columns = problem.head_dim + problem.head_dim_v + (0 if config.stored else 2 * config.head_dim)
    cache_bytes = SIDE_BY_SIDE if config.order else HALF_L2
    rows = min(problem.lengths.seqlen_q, ABREAST) if config.downwards else problem.lengths.seqlen_q
    first, blocks, heads = _key_blocks(problem, KEYS, rows, columns, cache_bytes, turn, is_listed(problem, config))
    arguments = (
        *_inputs(tensors, config, config.tile_q, KEYS, 64),
        _statistics(tensors.statistics, config.tile_q),
        *_shares(tensors.accumulator, config),
        *_key_gradients(tensors, config),
        *_stored(problem, tensors, config.tile_q),
        tensors.flags,
        tensors.key_notes,
        first,
        tensors.counters,
        tensors.keys_listed,
        *_sequences(tensors),
        *heads,
        *_bounds(problem),
        *score_arguments(problem, tensors),
        tensors.key_spans,
        *bias_gradient(problem, tensors.dbias),
        problem.scale,
        *totals(problem),
    )
    return Call(backward_kernel, (min(blocks, arch.sms or SMS),), arguments, _constants(problem, KEYS, config))


def keys_call(problem: AttentionProblem, tensors: Tensors, config: SplitConfig, turn: range) -> Call:
    """turn: as in `one_pass_call`."""
    rows = problem.lengths.seqlen_q
    first, blocks, heads = _key_blocks(problem, SPLIT_TILE, rows, problem.head_dim + problem.head_dim_v, KEYS_PASS_L2, turn)
    arguments = (
        *_inputs(tensors, config, SPLIT_TILE, SPLIT_TILE, SPLIT_TILE, config.held),
        _statistics(tensors.statistics, SPLIT_TILE),
        *_key_gradients(tensors, config),
        *_stored(problem, tensors, SPLIT_TILE),
        tensors.key_notes,
        first,
        *_sequences(tensors),
        *heads,
        *_bounds(problem),
        *score_arguments(problem, tensors),
        tensors.key_spans,
        problem.scale,
        *totals(problem),
    )
    return Call(keys_kernel, (blocks,), arguments, _constants(problem, SPLIT_TILE, config))


def dq_call(problem: AttentionProblem, tensors: Tensors, of_keys: Config | SplitConfig, turn: range) -> Call:
    """turn: as in `one_pass_call`."""
    config = DqConfig(of_keys.head_dim, of_keys.head_dim_v)
    tiles, heads = triton.cdiv(problem.lengths.seqlen_q, config.tile_q), problem.lengths.batch * problem.heads_q
    of_turn = range(turn.start * problem.group, turn.stop * problem.group)
    arguments = (
        *descriptors(tensors.k, SPLIT_TILE, (config.wide, config.narrow)),
        *_stored(problem, tensors, SPLIT_TILE),
        of_turn.start * tiles,
        *descriptors(tensors.dq, SPLIT_TILE, (config.wide, config.narrow)),
        tensors.row_notes,
        *_sequences(tensors),
        problem.heads_q,
        problem.group,
        *_of_turn(_dq_bundles(problem, config), heads, of_turn),
        heads * tiles,
        *_bounds(problem),
        problem.scale,
        *totals(problem),
    )
    constants = _constants(problem, SPLIT_TILE, config)
    del constants["MASKED"]
    return Call(dq_kernel, (len(of_turn) * tiles,), arguments, constants)


def _dq_bundles(problem: AttentionProblem, config: DqConfig) -> tuple[int, int]:
    """`bundles_of_heads` of the product dQ = dS K. Where nothing is masked head dim 256 takes a head at a time: on an H100, of
    the product's time with bundles that fill half of the L2 cache, at 4k 0.90, at 16k 1.00; causal, 4k, 1.03."""
    if config.head_dim == 256 and not is_noted(problem) and not problem.varlen:
        return 1, problem.lengths.batch * problem.heads_q
    return bundles_of_heads(problem, HALF_L2)


def rows_call(problem: AttentionProblem, tensors: Tensors, config: SplitConfig) -> Call:
    lengths = problem.lengths
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q
    arguments = (
        *_inputs(tensors, config, SPLIT_TILE, SPLIT_TILE, SPLIT_TILE),
        tensors.statistics,
        *descriptors(tensors.dq, SPLIT_TILE, (config.wide, config.narrow)),
        tensors.row_notes,
        *_sequences(tensors),
        padded_rows(problem)[0],
        problem.heads_q,
        problem.group,
        *bundles_of_heads(problem, HALF_L2),
        tiles,
        *_bounds(problem),
        *score_arguments(problem, tensors),
        tensors.row_spans,
        *bias_gradient(problem, tensors.dbias),
        problem.scale,
        *totals(problem),
    )
    return Call(rows_kernel, (tiles,), arguments, _constants(problem, SPLIT_TILE, config))


def prepare_call(problem: AttentionProblem, tensors: Tensors, config: Config | SplitConfig) -> Call:
    lengths, out, dout, lse, dlse = problem.lengths, tensors.out, tensors.dout, tensors.lse, tensors.dlse
    tiles = triton.cdiv(lengths.seqlen_q, ROWS_PADDED) * ROWS_PADDED // ends.ROWS
    by_batch, by_head, _ = _of_vector(lse)
    return Call(ends.prepare, (_row_programs(problem, config, tiles),), (), dict(
        out=out, dout=dout, dlse=dlse, lse=lse, statistics=tensors.statistics, delta=tensors.delta,
        accumulator=tensors.accumulator if is_cleared(problem, config) else None,
        flags=tensors.flags, flagged=number_of_flags(problem) if is_ordered(config) else None,
        **_rows(problem, tensors, config, tiles),
        **_strides("out", out), **_strides("dout", dout), scale=problem.scale, lse_batch=by_batch, lse_head=by_head,
        **dict(zip(("dlse_batch", "dlse_head", "dlse_row"), (0, 0, 0) if dlse is None else _of_vector(dlse), strict=True)),
        DIM_V=problem.head_dim_v, PADDED_V=triton.next_power_of_2(problem.head_dim_v), DIM=config.head_dim,
        TILE_Q=config.tile_q if isinstance(config, Config) else SPLIT_TILE, PARTS=PARTS, ROWS_PADDED=ROWS_PADDED,
        ROWS=ends.ROWS, RECORD=RECORD.value, enable_fp_fusion=True, launch_pdl=True,
    ))  # fmt: skip


def convert_call(problem: AttentionProblem, tensors: Tensors, config: Config) -> Call:
    dq = tensors.dq
    tiles = triton.cdiv(problem.lengths.seqlen_q, ends.ROWS)
    columns = min(config.share_columns)
    grid = (config.head_dim // columns * _row_programs(problem, config, tiles),)
    return Call(ends.convert, grid, (), dict(
        accumulator=tensors.accumulator, dq=dq, notes=tensors.row_notes if is_noted(problem) else None,
        **_rows(problem, tensors, config, tiles), scale=problem.scale, **_strides("dq", dq),
        DIM=problem.head_dim, COLUMNS=columns, PADDED=config.head_dim, ROWS_PADDED=ROWS_PADDED, ROWS=ends.ROWS,
        RECORD=RECORD.value, enable_fp_fusion=True, launch_pdl=True,
    ))  # fmt: skip


# ---- what several take


def _inputs(tensors: Tensors, config: Chunks, rows: int, rows_k: int, rows_v: int, part: int = 0) -> list:
    """TMA descriptors of Q, K, V, dO, in blocks of so many rows; of K and V in blocks of `part` columns where it is not 0."""
    chunks, chunks_v = (config.wide, config.narrow), (config.wide_v, config.narrow_v)
    parts, parts_v = ((part, 0), (part, 0)) if part else (chunks, chunks_v)
    return [
        *descriptors(tensors.q, rows, chunks),
        *descriptors(tensors.k, rows_k, parts),
        *descriptors(tensors.v, rows_v, parts_v),
        *descriptors(tensors.dout, rows, chunks_v),
    ]


def _key_gradients(tensors: Tensors, config: Chunks) -> list[TensorDescriptor | None]:
    chunks, chunks_v = (config.wide, config.narrow), (config.wide_v, config.narrow_v)
    if tensors.dk.dtype == torch.float32:
        chunks = chunks_v = (PARTIAL_COLUMNS, 0)
    return [*descriptors(tensors.dk, 64, chunks), *descriptors(tensors.dv, 64, chunks_v)]


def _sequences(tensors: Tensors) -> tuple[torch.Tensor | None, ...]:
    return tensors.cu_seqlens_q, tensors.cu_seqlens_kv, tensors.seqused_q, tensors.seqused_kv


def _statistics(statistics: torch.Tensor, rows: int) -> TensorDescriptor:
    """Descriptor that loads the statistics of a tile of so many rows. Folded ones have fewer columns than a product takes: TMA
    fills the others with zeros."""
    if statistics.dim() == 2:
        block = (2 * rows, PRODUCT)
        return TensorDescriptor(statistics, [*statistics.shape], [PARTS, 1], [*block], layout_of(block, torch.bfloat16))
    return TensorDescriptor.from_tensor(statistics, [2 * rows], flat(1))


def _shares(accumulator: torch.Tensor | None, config: Config) -> list[TensorDescriptor | None]:
    """Descriptors of the accumulator of dQ, for the parts in which a group adds to it; the second is None if all parts are
    equally large, and both if there is none."""
    if accumulator is None:
        return [None, None]
    rows = sorted({columns // 4 for columns in config.share_columns}, reverse=True)
    found = [TensorDescriptor.from_tensor(accumulator, [number, 256], flat(2)) for number in rows]
    return [*found, None][:2]


def _stored(problem: AttentionProblem, tensors: Tensors, rows: int) -> tuple[TensorDescriptor | None, int, int]:
    """The arguments of `StoredTiles`, for tiles of so many rows."""
    if tensors.stored is None:
        return None, 1, 1
    block = (SPLIT_TILE, rows)
    stored = TensorDescriptor.from_tensor(tensors.stored, [*block], layout_of(block, problem.dtype))
    return stored, stored_heads(problem) * problem.group, stored_pairs(problem)


def _of_turn(bundles: tuple[int, int], heads: int, turn: range) -> tuple[int, int]:
    """`bundles` of which none has heads of two turns."""
    if len(turn) == heads:
        return bundles
    at_once = math.gcd(bundles[0], turn.start, turn.stop)
    return at_once, heads // at_once * at_once


def _key_blocks(
    problem: AttentionProblem,
    keys: int,
    rows: int,
    columns: int,
    cache_bytes: int,
    turn: range,
    listed: bool = False,
) -> tuple[int, int, tuple[int, ...]]:
    """The number of the first block of so many keys of a turn's heads, how many these have, and the numbers of a kernel's
    `Heads`. rows, columns: of a query head that are to be in the L2 at a time, and that a row brings, in the inputs' type;
    cache_bytes: what the rows of a bundle of heads may take of it."""
    lengths = problem.lengths
    heads, blocks = lengths.batch * problem.heads_kv, triton.cdiv(lengths.seqlen_kv, keys)
    row_bytes = problem.group * columns * problem.dtype.itemsize
    fitting = cache_bytes // (max(1, rows) * row_bytes)
    at_once, rest = _of_turn(bundles(heads, fitting, 1, LAST_BLOCKS // max(1, blocks)), heads, turn)
    if listed:
        at_once = max(cache_bytes // row_bytes, LAST_BLOCKS * keys)
    numbers = problem.heads_q, problem.heads_kv, at_once, rest, heads, turn.stop * blocks, padded_rows(problem)[0]
    return turn.start * blocks, len(turn) * blocks, numbers


def _bounds(problem: AttentionProblem) -> tuple:
    return problem.lengths.seqlen_q, problem.lengths.seqlen_kv, *problem.mask.device_band


def _constants(problem: AttentionProblem, keys: int, config: Config | SplitConfig | DqConfig) -> dict:
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


def _row_programs(problem: AttentionProblem, config: Config | SplitConfig, tiles: int) -> int:
    """Programs that take so many tiles of a sequence each, or those that are listed."""
    lengths = problem.lengths
    if is_listed(problem, config):
        assert isinstance(lengths, Varlen)
        return likely_tiles(lengths, ROWS_PADDED) * (ROWS_PADDED // ends.ROWS) * problem.heads_q
    return tiles * problem.heads_q * lengths.batch


def _rows(problem: AttentionProblem, tensors: Tensors, config: Config | SplitConfig, tiles: int) -> dict:
    """tiles: of a sequence."""
    lengths = problem.lengths
    return dict(
        listed=tensors.rows_listed if is_listed(problem, config) else None, cu_seqlens_q=tensors.cu_seqlens_q,
        seqused_q=tensors.seqused_q, n_q=lengths.seqlen_q, total_q=lengths.total_q if isinstance(lengths, Varlen) else 0,
        heads=problem.heads_q, padded=padded_rows(problem)[0], tiles=tiles,
    )  # fmt: skip


def _strides(name: str, x: torch.Tensor) -> dict:
    return {f"{name}_batch": x.stride(0) if x.dim() == 4 else 0, f"{name}_row": x.stride(-3), f"{name}_head": x.stride(-2)}


def _of_vector(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of an LSE by batch, head and row."""
    return x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.stride(-1)
