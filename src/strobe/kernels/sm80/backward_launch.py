"""The host half of the backward for mma.sync: tensors, arguments, and the launches of its kernels."""

from __future__ import annotations

import torch
import triton

from strobe.device import Arch
from strobe.kernels.common.arguments import bundles, totals
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, gradients, unfilled
from strobe.kernels.common.documents import span_buffers, span_calls
from strobe.kernels.portable import backward as portable
from strobe.kernels.sm80 import backward_ends as ends
from strobe.kernels.sm80.backward import backward_kernel
from strobe.kernels.sm80.config import ROWS_PADDED, BackwardConfig
from strobe.kernels.sm80.launch import half_l2, is_cut, strides_of
from strobe.kernels.sm90.scores import score_arguments
from strobe.problem import AttentionProblem, Varlen, lse_shape


def buffers(problem: AttentionProblem, config: BackwardConfig) -> Buffers:
    """The tensors of a backward. Beside the gradients it takes, for each query row and head, 8 bytes, under a mask 4 more, and
    4 for each column of the padded head dim.

    statistics, accumulator: what the kernels share (see `backward_ends`), the accumulator only where dQ is added up in it.
    delta: as the LSE lies, where somebody else wants it too.
    key_notes, row_notes: one for 64 keys of each key head, one for 64 rows of each query head, where a mask cuts.
    """
    _, rows = padded_rows(problem)
    made = gradients(problem)
    made["statistics"] = Buffer((2 * rows,), torch.float32)
    if config.with_dq:
        made["accumulator"] = Buffer((rows * config.head_dim,), torch.float32)
    if is_cut(problem) or "sinks" in problem.learned or not config.with_dq:
        made["delta"] = Buffer(lse_shape(problem), torch.float32)
    lengths, notes = problem.lengths, None
    if is_cut(problem):
        notes = {
            "key_notes": lengths.batch * problem.heads_kv * triton.cdiv(lengths.seqlen_kv, portable.NOTED),
            "row_notes": lengths.batch * problem.heads_q * triton.cdiv(lengths.seqlen_q, portable.NOTED),
        }
    names = ("key_spans",) if config.with_dq else ("key_spans", "row_spans")
    return Buffers(made, span_buffers(problem, *names), notes)


def padded_rows(problem: AttentionProblem) -> tuple[int, int]:
    """How many rows one query head has in the shared buffers, padding included, and how many all heads and batch entries have
    together."""
    lengths = problem.lengths
    if isinstance(lengths, Varlen):
        padded = triton.cdiv(lengths.total_q + lengths.batch * ROWS_PADDED, ROWS_PADDED) * ROWS_PADDED
        return padded, padded * problem.heads_q
    padded = triton.cdiv(lengths.seqlen_q, ROWS_PADDED) * ROWS_PADDED
    return padded, padded * problem.heads_q * lengths.batch


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: BackwardConfig) -> list[Call]:
    """The launches of a backward, in order: rows that belong to no sequence are left alone. Where a mask cuts, the notes of
    blocks are set into which something may have come that they do not see, and the last launch redoes these."""
    found = [
        *span_calls(tensors, in_turn=False),
        prepare_call(problem, tensors, config),
        main_call(problem, tensors, arch, config),
        convert_call(problem, tensors, config) if config.with_dq else portable.calls(problem, tensors, arch)[-1],
    ]
    return [*found, portable.redo_call(problem, tensors, arch, in_turn=False)] if is_cut(problem) else found


def compile_only(problem: AttentionProblem, arch: Arch, config: BackwardConfig):
    """The compiled kernel over tiles of scores, from shapes alone (see strobe.lab.binary.offline)."""
    return main_call(problem, unfilled(problem, buffers(problem, config)), arch, config).compile()


# ---- the launch of each kernel


def main_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: BackwardConfig) -> Call:
    lengths = problem.lengths
    all_heads = lengths.batch * problem.heads_kv
    blocks = triton.cdiv(lengths.seqlen_kv, config.tile_kv) * all_heads
    columns = problem.head_dim + problem.head_dim_v + 2 * config.head_dim
    head_bytes = max(1, lengths.seqlen_q) * problem.group * columns * problem.dtype.itemsize
    at_once, rest = bundles(all_heads, half_l2(arch) // head_bytes)
    given = (tensors.q, tensors.k, tensors.v, tensors.dout, tensors.dk, tensors.dv)
    arguments = (
        *given,
        *(stride for x in given for stride in strides_of(x)),
        tensors.statistics,
        tensors.accumulator,
        tensors.key_notes,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_kv,
        tensors.seqused_q,
        tensors.seqused_kv,
        *(problem.heads_q, problem.heads_kv, at_once, rest, all_heads, blocks, padded_rows(problem)[0]),
        *(lengths.seqlen_q, lengths.seqlen_kv, *problem.mask.device_band),
        *score_arguments(problem, tensors),
        tensors.key_spans,
        problem.scale,
        *totals(problem),
    )
    constants = {
        "MASKED": is_masked(problem, config),
        "NOTED": is_cut(problem),
        "DIM": problem.head_dim,
        "DIM_V": problem.head_dim_v,
        "C": config,
        "num_warps": config.warps,
        "maxnreg": 255,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
    }
    return Call(backward_kernel, (blocks,), arguments, constants)


def is_masked(problem: AttentionProblem, config: BackwardConfig) -> bool:
    """Whether a tile may have rows that do not see a key."""
    lengths = problem.lengths
    cut = lengths.seqlen_kv % config.tile_kv != 0 or lengths.seqlen_q % config.tile_q != 0
    return is_cut(problem) or problem.varlen or cut


def prepare_call(problem: AttentionProblem, tensors: Tensors, config: BackwardConfig) -> Call:
    lengths, out, dout, lse, dlse = problem.lengths, tensors.out, tensors.dout, tensors.lse, tensors.dlse
    tiles = triton.cdiv(lengths.seqlen_q, ROWS_PADDED) * ROWS_PADDED // ends.ROWS
    by_batch, by_head, _ = _of_vector(lse)
    return Call(ends.prepare, (tiles * problem.heads_q * lengths.batch,), (), dict(
        out=out, dout=dout, dlse=dlse, lse=lse, statistics=tensors.statistics, delta=tensors.delta,
        accumulator=tensors.accumulator, **_rows(problem, tensors, tiles), **_strides("out", out), **_strides("dout", dout),
        lse_batch=by_batch, lse_head=by_head,
        **dict(zip(("dlse_batch", "dlse_head", "dlse_row"), (0, 0, 0) if dlse is None else _of_vector(dlse), strict=True)),
        DIM_V=problem.head_dim_v, PADDED_V=triton.next_power_of_2(problem.head_dim_v), DIM=config.head_dim,
        TILE_Q=config.tile_q, ROWS_PADDED=ROWS_PADDED, ROWS=ends.ROWS, enable_fp_fusion=True,
    ))  # fmt: skip


def convert_call(problem: AttentionProblem, tensors: Tensors, config: BackwardConfig) -> Call:
    lengths, dq = problem.lengths, tensors.dq
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q)
    return Call(ends.convert, (tiles * problem.heads_q * lengths.batch,), (), dict(
        accumulator=tensors.accumulator, dq=dq, notes=tensors.row_notes, **_rows(problem, tensors, tiles), scale=problem.scale,
        **_strides("dq", dq), DIM=problem.head_dim, PADDED=config.head_dim,
        WIDEST=config.widest if is_masked(problem, config) else config.piece,
        DOWN=config.warps // config.across_q, ACROSS=config.across_q, TILE_Q=config.tile_q, ROWS_PADDED=ROWS_PADDED,
        num_warps=8, enable_fp_fusion=True,
    ))  # fmt: skip


# ---- what several take


def _rows(problem: AttentionProblem, tensors: Tensors, tiles: int) -> dict:
    """tiles: of a sequence."""
    lengths = problem.lengths
    return dict(
        cu_seqlens_q=tensors.cu_seqlens_q, seqused_q=tensors.seqused_q, n_q=lengths.seqlen_q,
        total_q=lengths.total_q if isinstance(lengths, Varlen) else 0, heads=problem.heads_q, padded=padded_rows(problem)[0],
        tiles=tiles,
    )  # fmt: skip


def _strides(name: str, x: torch.Tensor) -> dict:
    return dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), strides_of(x), strict=True))


def _of_vector(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of an LSE by batch, head and row."""
    return x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.stride(-1)
