"""The host half of the Hopper forward: tensors, arguments and the launches of `forward.forward_kernel` and of its redo."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

from strobe.device import Arch
from strobe.kernels.blind_rows import fill_blind_lse
from strobe.kernels.common.arguments import bundles_of_heads, totals
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors, results, unfilled
from strobe.kernels.common.documents import span_buffers, span_calls
from strobe.kernels.gluon import TensorDescriptor
from strobe.kernels.portable import forward as portable
from strobe.kernels.sm90.config import HALF_L2, ROWS_PER_GROUP, Config
from strobe.kernels.sm90.descriptors import descriptors
from strobe.kernels.sm90.forward import forward_kernel
from strobe.kernels.sm90.pages import NO_CACHE, box_descriptors, cache_arguments
from strobe.kernels.sm90.scores import score_arguments
from strobe.kernels.sm90.tile_list import list_buffers, list_calls
from strobe.problem import AttentionProblem


def buffers(problem: AttentionProblem) -> Buffers:
    """The tensors of a forward.

    notes: int32 [batch * heads_q * ceil(seqlen_q / 64)], non-zero where 64 rows have to be computed again, as their sums left
    the range that an optimistic softmax may use, or a NaN or an infinity came out, which a masked-out value may have caused.
    """
    lengths = problem.lengths
    notes = lengths.batch * problem.heads_q * triton.cdiv(lengths.seqlen_q, ROWS_PER_GROUP)
    made, fill = results_of_tiles(problem)
    return Buffers(made, {**span_buffers(problem, "row_spans"), **list_buffers(problem)}, {"notes": notes}, fill)


def results_of_tiles(problem: AttentionProblem) -> tuple[dict[str, Buffer], Callable[[Tensors], None] | None]:
    """out and lse, and what writes into them first what no number says, or None."""
    made, blind = results(problem, fill=has_blind_tiles(problem)), has_blind_tiles(problem)
    if problem.score.sinks is None or not blind:
        return made, None
    made["lse"] = made["lse"]._replace(fill=None)
    return made, functools.partial(_fill_lse, problem.lengths.seqlen_q)


def has_blind_tiles(problem: AttentionProblem) -> bool:
    """Whether there may be tiles that see nothing: they never run, so out and lse have to say so from the start. (Of packed
    sequences `tile_list` writes what rows have that no tile writes.)"""
    lengths = problem.lengths
    early = lengths.seqlen_q > lengths.seqlen_kv  # the first rows stand before the first key
    return not problem.varlen and (problem.seqused or (early and problem.mask.band != (None, None, None)))


def _fill_lse(longest: int, tensors: Tensors) -> None:
    fill_blind_lse(tensors.lse, longest, tensors.sinks, tensors.cu_seqlens_q, tensors.seqused_q)


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The launches of a forward, in order. The last one exits at once where there is no note."""
    forward = forward_call(problem, tensors, arch, config)
    return [*preparing_calls(problem, tensors, config), forward, portable.redo_call(problem, tensors, arch, tensors.counters)]


def preparing_calls(problem: AttentionProblem, tensors: Tensors, config: Config) -> list[Call]:
    """The launches that go before the kernel."""
    return [*span_calls(tensors), *list_calls(problem, tensors, config.tile_q)]


def forward_call(
    problem: AttentionProblem, tensors: Tensors, arch: Arch, config: Config, trace: torch.Tensor | None = None
) -> Call:
    """The launch of the kernel. With a trace every tile has a CTA of its own."""
    lengths, mask = problem.lengths, problem.mask
    of_key = config.tiles_of(problem.group)
    abreast = problem.heads_kv * of_key
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * abreast
    arguments = (
        *descriptors(tensors.q, ROWS_PER_GROUP, (config.wide, config.narrow)),
        *key_descriptors(tensors.k, config, (config.wide, config.narrow)),
        *key_descriptors(tensors.v, config, (config.wide_v, config.narrow_v)),
        *descriptors(tensors.out, ROWS_PER_GROUP, (config.o_columns,)),
        tensors.lse,
        tensors.notes,
        tensors.counters,
        trace,
        tensors.tiles_listed if problem.varlen else None,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_kv,
        tensors.seqused_q,
        tensors.seqused_kv,
        abreast,
        of_key,
        *bundles_of_heads(problem, HALF_L2, config.tile_heads),
        tiles,
        tensors.q.shape[:-2].numel(),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        *mask.device_band,
        *score_arguments(problem, tensors),
        tensors.row_spans,
        totals(problem)[1],
        *(cache_arguments(tensors) if config.box else NO_CACHE),
    )
    cut = mask.band != (None, None, None) or mask.by_pair or lengths.seqlen_kv % config.tile_kv != 0
    constants = {
        "MASKED": cut or problem.varlen or problem.seqused,
        "C": config,
        "PAGE": 0 if tensors.page_table is None else tensors.k.shape[1],
        "num_warps": 4,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
        "launch_pdl": True,
    }
    ctas = min(tiles, arch.sms) if arch.sms and trace is None else tiles
    return Call(forward_kernel, (ctas,), arguments, constants)


def key_descriptors(x: torch.Tensor, config: Config, chunks: tuple[int, ...]) -> list[TensorDescriptor | None]:
    """TMA descriptors of k or v, one for each chunk of columns; None for one of no columns."""
    return box_descriptors(x, config, chunks) if config.box else descriptors(x, config.tile_kv, chunks)


def compile_only(problem: AttentionProblem, arch: Arch, config: Config, traced: bool = False) -> Any:
    """The compiled kernel of a forward (or of a traced one), from shapes alone (see strobe.lab.binary.offline)."""
    trace = torch.empty(1, dtype=torch.int64, device="meta") if traced else None
    return forward_call(problem, unfilled(problem, buffers(problem)), arch, config, trace).compile()
