"""The host half of the Hopper forward: results, arguments and the launch of `forward.forward_kernel`."""

import math

import torch
import triton

from strobe.device import arch_of
from strobe.kernels.common.arguments import bundles_of_heads, meta, meta_operands
from strobe.kernels.common.documents import find_spans, new_spans
from strobe.kernels.common.stamp import COUNT, ROLES
from strobe.kernels.sm90.arguments import score_arguments
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.kernels.sm90.descriptors import descriptors
from strobe.kernels.sm90.forward import forward_kernel
from strobe.kernels.workspace import Workspace, workspace
from strobe.problem import AttentionProblem, Operands, lse_shape

HALF_L2 = 30_000_000
"""Bytes."""


def launch(
    problem: AttentionProblem, operands: Operands, config: Config, trace: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out, lse, the notes, and where there are documents the spans of rows (see `documents`). Notes: int32 [batch * heads_q *
    ceil(seqlen_q / 64)], non-zero where 64 rows have to be computed again, as their sums left the range that an optimistic
    softmax may use, or a NaN or an infinity came out, which a masked-out value may have caused. They are the workspace's (see
    `kernels.workspace`): who redoes a block clears its note."""
    q = operands.q
    rows = triton.cdiv(problem.lengths.seqlen_q, ROWS_PER_GROUP)
    space = workspace(q.device, problem.lengths.batch * problem.heads_q * rows)
    out, lse = outputs_of(problem, operands)
    documents = problem.mask.documents
    spans = None if documents is None else find_spans(documents.q, documents.kv)
    grid, arguments, constants = kernel_arguments(problem, operands, out, lse, space, config, spans, trace)
    with torch.cuda.device_of(q):  # Triton launches on the current device, which need not be q's
        forward_kernel[grid](*arguments, **constants)
    return out, lse, space.notes, spans


def outputs_of(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, to be filled."""
    q = operands.q
    out = torch.empty(*q.shape[:-1], problem.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(lse_shape(problem), dtype=torch.float32, device=q.device)
    if has_blind_tiles(problem):
        fill_blind(out, lse, problem.score.sinks, operands.cu_seqlens_q, operands.seqused_q)
    return out, lse


def fill_blind(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, cu_q: torch.Tensor | None, used_q: torch.Tensor | None
) -> None:
    """What rows are to have that see nothing: 0, and -inf or, in a sequence, what its sink alone gives."""
    out.zero_()
    if sinks is None:
        lse.fill_(-torch.inf)
        return
    lse.copy_(sinks[:, None].expand(lse.shape))
    if cu_q is not None or used_q is not None:
        lse.masked_fill_(~_used_rows(lse.shape[-1], cu_q, used_q), -torch.inf)


def _used_rows(rows: int, cu_q: torch.Tensor | None, used_q: torch.Tensor | None) -> torch.Tensor:
    """Which rows a sequence has and uses, as a bool to be broadcast against an LSE."""
    if cu_q is None:
        assert used_q is not None
        return torch.arange(rows, device=used_q.device) < used_q[:, None, None]
    row = torch.arange(rows, dtype=cu_q.dtype, device=cu_q.device)
    ends = cu_q[1:] if used_q is None else cu_q[:-1] + used_q
    sequence = torch.searchsorted(cu_q[1:].contiguous(), row, right=True).clamp(max=len(ends) - 1)
    return row < ends[sequence]


def has_blind_tiles(problem: AttentionProblem) -> bool:
    """Whether there may be tiles, or packed rows of no sequence, that see nothing: they never run, so out and lse have to say
    so from the start."""
    lengths = problem.lengths
    early = lengths.seqlen_q > lengths.seqlen_kv  # the first rows stand before the first key
    return problem.varlen or problem.seqused or (early and problem.mask.band != (None, None, None))


def launch_traced(problem: AttentionProblem, operands: Operands, config: Config) -> torch.Tensor:
    """A launch that stamps: int64 [CTAs, roles, events, key blocks] (see `common.stamp`; the roles are the consumers and
    then the producer), 0 where a role does not pass an event. Each CTA has one tile.

    ValueError if the stamps are 2^31 or more: the kernel counts them in int32."""
    _, heads, rows = lse_shape(problem)
    blocks = triton.cdiv(problem.lengths.seqlen_kv, config.tile_kv)
    shape = (blocks, problem.lengths.batch * heads * triton.cdiv(rows, config.tile_q), ROLES.value, COUNT.value)
    if math.prod(shape) >= 2**31:
        raise ValueError(f"a traced launch takes fewer than 2^31 stamps, got {shape[0]} key blocks in {shape[1]} CTAs")
    trace = torch.zeros(shape, dtype=torch.int64, device=operands.q.device)
    launch(problem, operands, config, trace)
    return trace.permute(1, 2, 3, 0)


def compile_only(problem: AttentionProblem, config: Config, traced: bool = False):
    """The compiled kernel that `launch` (or `launch_traced`) would run, from shapes alone (see strobe.lab.offline)."""
    operands = meta_operands(problem)
    out = meta(*operands.q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    lse = meta(*lse_shape(problem), dtype=torch.float32)
    trace = meta(1, dtype=torch.int64) if traced else None
    space = Workspace(meta(16, dtype=torch.int32), meta(1, dtype=torch.int32))
    spans = None if problem.mask.documents is None else new_spans(problem.mask.documents.q)
    grid, arguments, constants = kernel_arguments(problem, operands, out, lse, space, config, spans, trace)
    return forward_kernel.warmup(*arguments, grid=grid, **constants)


def kernel_arguments(
    problem: AttentionProblem, operands: Operands, out, lse, space: Workspace, config: Config, spans=None, trace=None
):  # fmt: skip
    """The kernel's grid, arguments and compile-time constants. spans: of the rows, where there are documents. With a trace
    every tile has a CTA of its own."""
    lengths = problem.lengths
    left, right, prefix = problem.mask.device_band
    tiles = triton.cdiv(lengths.seqlen_q, config.tile_q) * lengths.batch * problem.heads_q
    arguments = (
        *descriptors(operands.q, ROWS_PER_GROUP, (config.wide, config.narrow)),
        *descriptors(operands.k, config.tile_kv, (config.wide, config.narrow)),
        *descriptors(operands.v, config.tile_kv, (config.wide_v, config.narrow_v)),
        *descriptors(out, ROWS_PER_GROUP, (config.o_columns,)),
        lse,
        space.notes,
        space.counters,
        trace,
        operands.cu_seqlens_q,
        operands.cu_seqlens_kv,
        operands.seqused_q,
        operands.seqused_kv,
        problem.heads_q,
        problem.group,
        *bundles_of_heads(problem, HALF_L2),
        tiles,
        operands.q.shape[:-2].numel(),
        lengths.seqlen_q,
        lengths.seqlen_kv,
        left,
        right,
        prefix,
        *score_arguments(problem, operands.seed),
        spans,
    )
    mask = problem.mask
    cut = mask.band != (None, None, None) or mask.by_pair or lengths.seqlen_kv % config.tile_kv != 0
    constants = {
        "MASKED": cut or problem.varlen or problem.seqused,
        "C": config,
        "num_warps": 4,
        "enable_fp_fusion": True,  # Triton 3.10 turns it off
        "launch_pdl": True,
    }
    ctas = arch_of(operands.q.device).sms
    return (min(tiles, ctas) if ctas and trace is None else tiles,), arguments, constants
