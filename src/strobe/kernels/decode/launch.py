"""The host half of the decode kernel: its buffers, arguments and launch."""

from __future__ import annotations

from typing import Any

import torch

from strobe.device import Arch
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors
from strobe.kernels.common.descriptors import descriptor, layout_of
from strobe.kernels.common.groups import groups_descriptor
from strobe.kernels.decode.config import Config
from strobe.kernels.decode.forward import decode_kernel
from strobe.kernels.decode.hopper import hopper_kernel
from strobe.kernels.decode.sizes import FALLBACK_SMS, jobs, partial_places, rows_of, tiles_of_rows
from strobe.kernels.decode.split_clusters import split_clusters_kernel
from strobe.kernels.gluon import TensorDescriptor
from strobe.problem import lse_shape_of
from strobe.serving.problem import DecodeProblem


def ctas(problem: DecodeProblem, arch: Arch, config: Config) -> int:
    """CTAs of a launch: as many whole teams as run at once, one at least, or as many as share the key heads of requests."""
    if config.shares > 0:
        return config.shares * problem.heads_kv * problem.batch
    return max(config.ctas * (arch.sms or FALLBACK_SMS) // config.team, 1) * config.team


def result_rows(problem: DecodeProblem, config: Config) -> int:
    """Rows of a group's result: all, or the power of two that holds those of a request; 8 at least, since shared memory is
    swizzled in 8 rows and cut between them alone."""
    return min(config.rows, max(8, 1 << (rows_of(problem, config) - 1).bit_length()))


def buffers(problem: DecodeProblem, arch: Arch, config: Config) -> Buffers:
    """The tensors of a launch: the LSE, parts of results with the maximum and the sum of each row, and two counters of arrivals
    for each job and group of rows."""
    places, rows = partial_places(problem, config, ctas(problem, arch, config)), result_rows(problem, config)
    lse = Buffer(lse_shape_of(problem.lengths, problem.heads_q), torch.float32, -torch.inf if problem.ragged else None)
    shared = {
        "parts": Buffer((config.halves * places, rows, config.head_dim_v), torch.float32),
        "sums": Buffer((config.halves * places, 2, rows), torch.float32),
    }
    arrivals = 2 * config.halves * config.groups * jobs(problem, config)
    shared["arrivals"] = Buffer((arrivals,), torch.int32, 0.0)  # each launch leaves them at 0
    return Buffers({"lse": lse} if problem.with_lse else {}, shared)


def calls(problem: DecodeProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The one launch."""
    t, score = tensors, problem.score
    by_token = tuple(scale is not None and len(scale.shape) == 3 for scale in (problem.k_scale, problem.v_scale))
    arguments = dict(
        q=t.q, k=t.k, v=t.v, out=t.out, lse=t.lse, lengths=t.lengths, page_table=t.page_table, index=t.entries,
        leftpad=t.leftpad, cu_q=t.cu_seqlens_q, tree=t.tree, alibi=t.alibi, sinks=t.sinks,
        k_scale=t.k_scale, v_scale=t.v_scale, parts=t.parts, sums=t.sums, arrivals=t.arrivals,
        **_strides("q", t.q), **_strides("out", t.out), **_cache_strides("k", t.k), **_cache_strides("v", t.v),
        lse_batch=0 if problem.ragged or t.lse is None else t.lse.stride(0), lse_head=0 if t.lse is None else t.lse.stride(-2),
        table_row=0 if t.page_table is None else t.page_table.stride(0),
        **dict(zip(("tree_batch", "tree_row", "tree_column"), (0, 0, 0) if t.tree is None else t.tree.stride(), strict=True)),
        alibi_batch=0 if t.alibi is None or t.alibi.dim() == 1 else t.alibi.stride(0),
        **_scale_strides("k", t.k_scale), **_scale_strides("v", t.v_scale),
        batch=problem.batch, heads_kv=problem.heads_kv, n_q=problem.lengths.seqlen_q, capacity=problem.capacity,
        total_q=t.q.shape[0] if problem.ragged else 0, pages=problem.pages, tiles=tiles_of_rows(problem, config),
        scale=float(problem.scale), softcap=float(score.softcap) or None, left=problem.mask.device_band[0],
        right=problem.mask.device_band[1],
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        C=config, GROUP=problem.group + config.absent, PAGE=problem.page_size or 0, DIM=problem.head_dim,
        DIM_V=problem.head_dim_v // config.halves,
        ROWS=result_rows(problem, config), BY_ROW=by_row(problem), K_BY_TOKEN=by_token[0], V_BY_TOKEN=by_token[1],
        IN_TURN=arch.capability >= 90, num_warps=config.warps // config.groups, maxnreg=config.registers, enable_fp_fusion=True,
    )  # fmt: skip
    if arch.capability >= 90:
        constants["launch_pdl"] = True
    kernel = decode_kernel
    if config.by_wgmma and config.shares:
        kernel = split_clusters_kernel
    elif config.by_wgmma:
        kernel = hopper_kernel
        arguments["q_boxes"] = None
    if config.grouped:
        arguments["k"] = groups_descriptor(t.k, config.box, config.head_dim)
        arguments["v"] = groups_descriptor(t.v, config.box, config.head_dim_v)
    elif config.box:
        arguments["k"] = descriptor(t.k, config.box, config.copied_chunk)
        arguments["v"] = (
            descriptor(t.k, config.box, config.narrow) if config.narrow else descriptor(t.v, config.box, config.copied_chunk)
        )
    if config.asks_q:
        group = problem.group + config.absent
        block = [1, config.of_group.rows // group, group, config.chunk]
        layout = layout_of(tuple(block), t.q.dtype)
        q = t.q if t.q.dim() == 4 else t.q.unsqueeze(0)
        arguments["q_boxes"] = TensorDescriptor(t.q, list(q.shape), _legal_strides(q), block, layout)
    grid: tuple[int, ...] = (ctas(problem, arch, config),)
    if config.shares > 0:
        grid = (config.shares // config.cluster * problem.heads_kv, problem.batch)
    return [Call(kernel, grid, (), {**arguments, **constants}, config.cluster)]


def by_row(problem: DecodeProblem) -> bool:
    """Whether the rows of a tile may see different keys."""
    alone = problem.lengths.seqlen_q == 1 and problem.mask.right in (None, 0)
    return problem.tree or (problem.mask.band != (None, None, None) and not alone)


def _strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """The strides of q or out: of a batch entry (0 where rows are packed), a row and a head."""
    return {f"{name}_batch": x.stride(0) if x.dim() == 4 else 0, f"{name}_row": x.stride(-3), f"{name}_head": x.stride(-2)}


def _legal_strides(x: torch.Tensor) -> list[int]:
    """Strides as TMA takes them: a dim of size 1 is never stepped along."""
    return [x.shape[-1] if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]


def _cache_strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """The strides of a page, a row and a head. One page alone may have any stride; but a page behind it is none."""
    page = x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)
    return {f"{name}_page": page, f"{name}_row": x.stride(1), f"{name}_head": x.stride(2)}


def _scale_strides(name: str, x: torch.Tensor | None) -> dict[str, int]:
    """The two first strides of scales: of a request and a head, or of a page and a row, whose heads are neighbours."""
    page, row = (0, 0) if x is None else x.stride()[:2]
    return {f"{name}_scale_page": page, f"{name}_scale_row": row}
