"""AttentionProblem: the one description of an attention that every part of Strobe takes.

It holds facts that the host knows without asking the GPU, and no tensor: it has a hash, and what is equal runs the same
kernels. The tensors travel beside it, by name, as `Operands`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from strobe.masks import SOME_DOCUMENTS, Blocks, Documents, Mask
from strobe.scores import SCORE_TENSORS, Score, ScoreFacts

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
    """out = softmax(score(scale * q k^T), mask) v, for heads_q query heads that share heads_kv key heads (GQA).

    Of a mask with documents or blocks, and of a `Score`, it keeps the facts alone (`SOME_DOCUMENTS`, `ScoreFacts`)."""

    lengths: Lengths
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    scale: float
    mask: Mask = field(default_factory=Mask)
    score: ScoreFacts = field(default_factory=ScoreFacts)
    phase: Phase = "forward"
    unaligned: tuple[str, ...] = ()
    """Names of the tensors that a TMA descriptor cannot address (base or a stride not a multiple of 16 bytes)."""
    seqused: bool = False
    """Whether the operands say how many rows or keys of each batch entry (or sequence) are used."""
    deterministic: bool = False
    """Whether a backward must give the same bits in every run. A forward is never asked."""
    dropout: float = 0.0
    """The share of the weights that is dropped, by the operands' seed; the others are divided by 1 - dropout."""
    placed: bool = False
    """Whether the operands say where rows and keys stand in a longer sequence (`strobe.places`), to which masks, slopes,
    functions and dropout look. Without, the shard is the sequence."""
    partial: bool = False
    """Whether the results are parts of a larger attention's, which somebody merges: they are kept in float32 (or float64)."""
    learned: tuple[str, ...] = ()
    """Which of the score's tensors a backward finds gradients for beside those of q, k and v: "bias", "sinks"."""

    def __post_init__(self):
        if isinstance(self.score, Score):
            object.__setattr__(self, "score", self.score.facts())
        if self.mask.documents is not None:
            object.__setattr__(self, "mask", replace(self.mask, documents=SOME_DOCUMENTS))
        if isinstance(self.mask.blocks, Blocks):
            object.__setattr__(self, "mask", replace(self.mask, blocks=self.mask.blocks.facts()))

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv

    @property
    def varlen(self) -> bool:
        return isinstance(self.lengths, Varlen)

    @property
    def q_shape(self) -> tuple[int, ...]:
        return *self._rows, self.heads_q, self.head_dim

    @property
    def k_shape(self) -> tuple[int, ...]:
        return *self._keys, self.heads_kv, self.head_dim

    @property
    def v_shape(self) -> tuple[int, ...]:
        return *self._keys, self.heads_kv, self.head_dim_v

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self._rows, self.heads_q, self.head_dim_v

    @property
    def out_dtype(self) -> torch.dtype:
        """A forward's dtype: float32 (or float64) for a partial result, bfloat16 for inputs of 8 bits, else theirs."""
        if self.partial and self.phase == "forward":
            return torch.promote_types(self.dtype, torch.float32)
        return torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the gradients of q, k and v."""
        return torch.promote_types(self.dtype, torch.float32) if self.partial else self.dtype

    @property
    def is_empty(self) -> bool:
        """Whether there is no pair of a query and a key."""
        return 0 in (self.lengths.batch, self.heads_q, *self._rows, *self._keys, self.lengths.seqlen_q, self.lengths.seqlen_kv)

    @property
    def _rows(self) -> tuple[int, ...]:
        lengths = self.lengths
        return (lengths.total_q,) if isinstance(lengths, Varlen) else (lengths.batch, lengths.seqlen_q)

    @property
    def _keys(self) -> tuple[int, ...]:
        lengths = self.lengths
        return (lengths.total_kv,) if isinstance(lengths, Varlen) else (lengths.batch, lengths.seqlen_kv)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}, {self.head_dim_v}"
        return (
            f"{self.phase}, {self.lengths}, heads {self.heads_q}/{self.heads_kv}, head dim {dims}, "
            f"{str(self.dtype).removeprefix('torch.')}, mask {self.mask}, score {self.score}"
            + ", seqused" * self.seqused
            + ", deterministic" * self.deterministic
            + (f", dropout {self.dropout:g}" if self.dropout else "")
            + ", placed" * self.placed
            + ", partial" * self.partial
        )


class Operands(NamedTuple):
    """The tensors of a problem, by name. Those after v are None where the problem has no such thing: cu_seqlens if it is not
    varlen, seqused (either or both) if it does not say so, the seed, an int64 [1], without dropout, and so on."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_kv: torch.Tensor | None = None
    document_q: torch.Tensor | None = None
    document_kv: torch.Tensor | None = None
    block_kinds: torch.Tensor | None = None
    block_pairs: torch.Tensor | None = None
    alibi: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    places: torch.Tensor | None = None
    """Where rows and keys stand, int32 [batch, NUMBERS] (see `strobe.places`); no argument of an operator."""


OPTIONAL = Operands._fields[3:-1]
"""The names of the tensors beside q, k and v that operators take; the last one is the seed of dropout."""

LEARNED = ("bias", "sinks")
"""The names of those that have gradients."""


class Upstream(NamedTuple):
    """What a backward takes beside the operands: the forward's results, and the gradients of a loss with respect to them."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None


def with_tensors(problem: AttentionProblem, operands: Operands) -> tuple[Mask, Score]:
    """The problem's mask and score, with their tensors."""
    mask, score = problem.mask, problem.score
    if operands.document_q is not None and operands.document_kv is not None:
        mask = replace(mask, documents=Documents(operands.document_q, operands.document_kv))
    if operands.block_kinds is not None and operands.block_pairs is not None:
        mask = replace(mask, blocks=Blocks(operands.block_kinds, operands.block_pairs))
    tensors = {name: getattr(operands, name) for name in SCORE_TENSORS}
    return mask, Score(score.softcap, function=score.function, function_gradient=score.function_gradient, **tensors)


class Gradients(NamedTuple):
    """Gradients of a loss with respect to a problem's tensors. Each has the shape and dtype of its tensor, and is None where
    nobody asked for it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


class Tangents(NamedTuple):
    """The direction of a derivative: of a problem's tensors, each of its tensor's shape and dtype; None is 0."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def addressable(x: torch.Tensor) -> bool:
    """Whether a TMA descriptor can address x: base and strides in multiples of 16 bytes, no dim repeated by stride 0, the last
    one contiguous."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    rows = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and rows


def made_addressable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy that a TMA descriptor can address. (A contiguous tensor may begin anywhere, so `x.contiguous()` is none.)"""
    return x if addressable(x) else x.clone(memory_format=torch.contiguous_format)


def summed_bias(dbias: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias, of its shape and dtype, from that of the pairs."""
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
    return lse_shape_of(problem.lengths, problem.heads_q)


def lse_shape_of(lengths: Lengths, heads_q: int) -> tuple[int, ...]:
    """The shape of the LSE of queries of such lengths."""
    if isinstance(lengths, Varlen):
        return heads_q, lengths.total_q
    return lengths.batch, heads_q, lengths.seqlen_q
