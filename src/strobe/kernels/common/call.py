"""What a backend says of a problem's launches: the tensors that they need, and the calls themselves.

    buffers(problem, arch) -> Buffers               what a call makes, what calls on one stream share
    calls(problem, tensors, arch) -> list[Call]     the launches, in order

`tensors` has every tensor of a call as an attribute: those of `Operands`, for a backward those of `Upstream`, and all that
`Buffers` names. `strobe.call.launches` allocates and launches, at once or prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from strobe.masks import BlockFacts
from strobe.places import NUMBERS
from strobe.problem import AttentionProblem, Operands, bias_shape, lse_shape
from strobe.scores import SCORE_TENSORS


class Tensors(SimpleNamespace):
    """The tensors of a call by their names; one that it does not have is None."""

    def __getattr__(self, name: str) -> Any:
        return None


class Call(NamedTuple):
    """A launch that is not made yet: `kernel[grid](*arguments, **keywords)`. cluster: how many CTAs, each a program of its own,
    take the place of each of the grid, run at the same time and reach each other's shared memory."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    keywords: dict
    cluster: int = 1

    def launch(self) -> None:
        """Launch on the current device and its current stream."""
        if self.cluster > 1:
            self.compile()  # so Triton knows of the clusters
        self.kernel[self.grid](*self.arguments, **self.keywords)

    def compile(self) -> Any:
        """The compiled kernel, not launched; the tensors may be on the meta device."""
        compiled = self.kernel.warmup(*self.arguments, grid=self.grid, **self.keywords)
        if self.cluster > 1:
            launch_in_clusters(compiled, self.cluster)
        return compiled


def launch_in_clusters(compiled: Any, size: int) -> None:
    """Have Triton launch a compiled kernel in clusters. (To Triton the CTAs of a cluster are one program, which it compiles as
    such, but how it launches them is told apart.)"""
    warps, _, shared = compiled.packed_metadata
    compiled.packed_metadata = warps, size, shared


class Buffer(NamedTuple):
    """A contiguous tensor that a call needs, and what it holds before the launches; None is anything."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None = None


class Buffers(NamedTuple):
    """The tensors that launches need beside those that are given.

    made: tensors of each call, results among them (out and lse; dq, dk, dv, dbias).
    shared: tensors that all calls of a stream may share, as each call writes before it reads; filled ones those that look the
        same, as each leaves them as it found them.
    notes: how many notes of each name the launches leave in the stream's workspace (see `kernels.workspace`), of which they
        take `counters` and `redone` too; None if they take no workspace.
    fill: writes into tensors what no number says, before the launches.
    """

    made: Mapping[str, Buffer]
    shared: Mapping[str, Buffer] = MappingProxyType({})
    notes: dict[str, int] | None = None
    fill: Callable[[Tensors], None] | None = None


def results(problem: AttentionProblem, fill: bool) -> dict[str, Buffer]:
    """out and lse of a forward, which come first of what it makes. fill: whether there are rows that no kernel writes, which
    have 0 and an LSE of -inf."""
    return {
        "out": Buffer(problem.out_shape, problem.out_dtype, 0.0 if fill else None),
        "lse": Buffer(lse_shape(problem), torch.float32, -torch.inf if fill else None),
    }


def gradients(problem: AttentionProblem) -> dict[str, Buffer]:
    """dq, dk, dv of a backward, of zeros where not all of them is written, and dbias if it is asked for.

    No tile writes to pairs that nobody sees. A bias that is repeated has its gradient added up in float32 and in no order, or,
    deterministic, in an order by `summed_bias`: every pair has a place of its own then."""
    fill = 0.0 if problem.varlen or problem.seqused else None
    shapes = {"dq": problem.q_shape, "dk": problem.k_shape, "dv": problem.v_shape}
    found = {name: Buffer(shape, problem.grad_dtype, fill) for name, shape in shapes.items()}
    bias = problem.score.bias
    if bias is not None and "bias" in problem.learned:
        every_pair = bias_shape(problem)
        shape = every_pair if problem.deterministic else bias.shape
        found["dbias"] = Buffer(shape, torch.float32 if bias.shape != every_pair else bias.dtype, 0.0)
    return found


def unfilled(problem: AttentionProblem, buffers: Buffers) -> Tensors:
    """The tensors of a problem without numbers, on the meta device, to compile its calls for."""
    backward = problem.phase == "backward"
    upstream = {
        "out": _meta(problem.out_shape, problem.out_dtype),
        "lse": _meta(lse_shape(problem), torch.float32),
        "dout": _meta(problem.out_shape, problem.out_dtype),
        "dlse": None,
    }
    return Tensors(**unfilled_operands(problem)._asdict(), **{**(upstream if backward else {}), **unfilled_buffers(buffers)})


def unfilled_buffers(buffers: Buffers) -> dict[str, torch.Tensor]:
    """The tensors of a call's buffers, and of a workspace, on the meta device."""
    made = {name: _meta(shape, dtype) for name, (shape, dtype, _) in {**buffers.made, **buffers.shared}.items()}
    return {**made, **{name: _meta((16,), torch.int32) for name in ("counters", "redone", *(buffers.notes or ()))}}


def unfilled_operands(problem: AttentionProblem) -> Operands:
    """Operands on the meta device, without descales."""
    lengths, score, packed = problem.lengths, problem.score, problem.varlen
    cu = _meta((lengths.batch + 1,), torch.int32) if packed else None
    used = _meta((lengths.batch,), torch.int32) if problem.seqused else None
    with_documents = problem.mask.documents is not None
    changes = {
        name: torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
        for name in SCORE_TENSORS
        if (x := getattr(score, name)) is not None
    }
    return Operands(
        *(_meta(shape, problem.dtype) for shape in (problem.q_shape, problem.k_shape, problem.v_shape)),
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        seqused_q=used,
        seqused_kv=used,
        document_q=_meta((lengths.batch, lengths.seqlen_q), torch.int32) if with_documents else None,
        document_kv=_meta((lengths.batch, lengths.seqlen_kv), torch.int32) if with_documents else None,
        **(_unfilled_blocks(problem, problem.mask.blocks) if isinstance(problem.mask.blocks, BlockFacts) else {}),
        **changes,
        seed=_meta((1,), torch.int64) if problem.dropout else None,
        places=_meta((lengths.batch, NUMBERS), torch.int32) if problem.placed else None,
    )


def _unfilled_blocks(problem: AttentionProblem, blocks: BlockFacts) -> dict[str, torch.Tensor]:
    n_q, n_kv = problem.lengths.seqlen_q, problem.lengths.seqlen_kv
    kinds = _meta((1, 1, -(-n_q // blocks.rows), -(-n_kv // blocks.keys)), torch.int32)
    return {"block_kinds": kinds, "block_pairs": _meta((1, *blocks), torch.uint8)}


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
