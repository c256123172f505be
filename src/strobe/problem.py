"""AttentionProblem: the one description of an attention that every part of Strobe takes.

It holds what the host knows without asking the GPU. The values of cu_seqlens and seqused stay on the device; document
numbers, slopes, biases and sinks ride along as tensors inside the mask and the score, which only the reference reads on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from strobe.masks import Mask
from strobe.scores import Score

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Dense:
    """q [batch, seqlen_q, heads_q, head_dim], k and v [batch, seqlen_kv, heads_kv, ...]."""

    batch: int
    seqlen_q: int
    seqlen_kv: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.seqlen_q} x {self.seqlen_kv}"


@dataclass(frozen=True)
class Varlen:
    """Sequences packed one after the other: q [total_q, heads_q, head_dim], k and v [total_kv, heads_kv, ...].

    Sequence b is rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1]; no sequence is longer than max_q (queries), max_kv (keys).
    """

    batch: int
    total_q: int
    total_kv: int
    max_q: int
    max_kv: int

    @property
    def seqlen_q(self) -> int:
        """The longest sequence, which is what a grid is sized for."""
        return self.max_q

    @property
    def seqlen_kv(self) -> int:
        return self.max_kv

    def __str__(self) -> str:
        return f"{self.batch} packed sequences of at most {self.max_q} x {self.max_kv}, {self.total_q} x {self.total_kv} in all"


Lengths = Dense | Varlen


@dataclass(frozen=True)
class AttentionProblem:
    """out = softmax(score(scale * q k^T), mask) v, for heads_q query heads that share heads_kv key heads (GQA)."""

    lengths: Lengths
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    scale: float
    mask: Mask = field(default_factory=Mask)
    score: Score = field(default_factory=Score)
    phase: Phase = "forward"
    unaligned: tuple[str, ...] = ()
    """Names of the tensors that a TMA descriptor cannot address (base or a stride not a multiple of 16 bytes)."""
    seqused: bool = False
    """Whether the operands say how many rows or keys of each batch entry (or sequence) are used."""
    deterministic: bool = False
    """Whether a backward must give the same bits in every run. A forward is never asked."""
    dropout: float = 0.0
    """The share of the weights that is dropped, by the operands' seed; the others are divided by 1 - dropout."""
    learned: tuple[str, ...] = ()
    """Which of the score's tensors a backward finds gradients for beside those of q, k and v: "bias", "sinks"."""

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv

    @property
    def varlen(self) -> bool:
        return isinstance(self.lengths, Varlen)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}, {self.head_dim_v}"
        return (
            f"{self.phase}, {self.lengths}, heads {self.heads_q}/{self.heads_kv}, head dim {dims}, "
            f"{str(self.dtype).removeprefix('torch.')}, mask {self.mask}, score {self.score}"
            + ", seqused" * self.seqused
            + ", deterministic" * self.deterministic
            + (f", dropout {self.dropout:g}" if self.dropout else "")
        )


class Operands(NamedTuple):
    """The tensors of a problem; cu_seqlens only if it is varlen, seqused (either or both) only if it says so, and the seed, an
    int64 [1], only if it has dropout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_kv: torch.Tensor | None = None
    seed: torch.Tensor | None = None


class Gradients(NamedTuple):
    """Of a loss with respect to a problem's tensors, each of its tensor's shape and dtype; None where nobody asked for it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def addressable(x: torch.Tensor) -> bool:
    """Whether a TMA descriptor can address x: base and strides in multiples of 16 bytes, no dim repeated by stride 0."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)


def zero_bias(problem: AttentionProblem, bias: torch.Tensor) -> torch.Tensor:
    """What the gradient of a bias is written to; no tile writes to pairs that nobody sees. A bias that is repeated has its
    gradient added up there, in float32 and in no order, or, deterministic, in an order by `summed_bias`: every pair has a place
    of its own then."""
    every_pair = bias_shape(problem)
    repeated = bias.shape != every_pair
    shape = every_pair if problem.deterministic else bias.shape
    return torch.zeros(shape, dtype=torch.float32 if repeated else bias.dtype, device=bias.device)


def summed_bias(dbias: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias, of its shape and dtype, from what the kernels left in `zero_bias`."""
    return dbias.sum_to_size(bias.shape).to(bias.dtype)


def without_gradient(problem: AttentionProblem) -> str | None:
    """Why no backward takes a problem; or None."""
    function, gradient = problem.score.function, problem.score.function_gradient
    if problem.phase == "backward" and function is not None and gradient is None:
        return f"needs the derivative of the score function {function}: pass it as strobe.Score(function_gradient=...)"
    return None


def bias_shape(problem: AttentionProblem) -> tuple[int, ...]:
    """[batch, heads_q, seqlen_q, seqlen_kv]: of a bias with a number for every pair."""
    return problem.lengths.batch, problem.heads_q, problem.lengths.seqlen_q, problem.lengths.seqlen_kv


def lse_shape(problem: AttentionProblem) -> tuple[int, ...]:
    """[batch, heads_q, seqlen_q], or [heads_q, total_q] for varlen (flash-attn's layouts)."""
    if isinstance(problem.lengths, Varlen):
        return problem.heads_q, problem.lengths.total_q
    return problem.lengths.batch, problem.heads_q, problem.lengths.seqlen_q
