"""Options, which are the arguments of the torch operators beside q, k and v, and the problem that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from strobe.functions import known
from strobe.masks import SOME_DOCUMENTS, BlockFacts, Mask
from strobe.problem import (
    LEARNED,
    OPTIONAL,
    AttentionProblem,
    Dense,
    Gradients,
    Operands,
    Phase,
    Varlen,
    addressable,
)
from strobe.scores import SCORE_TENSORS, ScoreFacts, tensor_facts


@dataclass(frozen=True)
class Options:
    """The arguments of the operators beside q, k and v, in the order of their schema. Tensors have the names of `Operands`, and
    come last, in its order.

    The schema has no defaults: PyTorch's compiler would hand over what is left out by keywords, which takes 5 us."""

    scale: float = 1.0
    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    softcap: float = 0.0
    max_q: int = 0
    max_kv: int = 0
    dropout: float = 0.0
    mask_function: str | None = None
    """The key of a `strobe.functions.Function`; score_function and score_gradient are such keys, too."""
    score_function: str | None = None
    score_gradient: str | None = None
    deterministic: bool = False
    backend: str | None = None
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

    def arguments(self) -> tuple:
        """The options as a tuple, in the order in which the operators take them."""
        return tuple([getattr(self, name) for name in NAMES])

    def is_band(self) -> bool:
        """Whether nothing is asked for but a scale and a band."""
        return (
            self.prefix is self.mask_function is self.score_function is self.backend is self.cu_seqlens_q is None
            and not (self.softcap or self.dropout or self.deterministic)
            and all(x is None for x in self.tensors())
        )

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The options that are tensors, in the order of `OPTIONAL`."""
        return tuple([getattr(self, name) for name in OPTIONAL])


NAMES = tuple(one.name for one in fields(Options))

NUMBERS = len(NAMES) - len(OPTIONAL)
"""How many options there are before the tensors."""

BAND = NAMES.index("right") + 1
"""How many options, the first ones, say the scale and the band."""

_SCHEMA_TYPES = {
    "torch.Tensor | None": "Tensor?", "int": "SymInt", "int | None": "SymInt?", "float": "float", "str | None": "str?",
    "bool": "bool",
}  # fmt: skip

_DECLARED = [f"{_SCHEMA_TYPES[str(one.type)]} {one.name}" for one in fields(Options)]

SCHEMA, SCHEMA_OF_BAND = ", ".join(_DECLARED), ", ".join(_DECLARED[:BAND])
"""The part of an operator's schema that declares the options: all, or a scale and a band alone."""


def operands_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Operands:
    """The Operands of an operator's call: its tensors, by name."""
    return Operands(q, k, v, *options.tensors())


def describe(operands: Operands, options: Options, phase: Phase = "forward", learned: Sequence[str] = ()) -> AttentionProblem:
    """The AttentionProblem that operands and options describe. The tensors in the options are not looked at."""
    q, k, v = operands[:3]
    lengths: Dense | Varlen
    if operands.cu_seqlens_q is not None:
        batch, total_q, total_kv = operands.cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
        lengths = Varlen(batch, total_q, total_kv, min(options.max_q, total_q), min(options.max_kv, total_kv))
    else:
        lengths = Dense(q.shape[0], q.shape[1], k.shape[1])
    mask = Mask(
        options.left,
        options.right,
        options.prefix,
        SOME_DOCUMENTS if operands.document_q is not None else None,
        known(options.mask_function),
        None if operands.block_pairs is None else BlockFacts(*operands.block_pairs.shape[1:]),
    )
    if operands.places is None:  # else bounds count from positions in sequences that are longer than what is here
        mask = mask.within(lengths.seqlen_q, lengths.seqlen_kv)
    return AttentionProblem(
        lengths=lengths,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=q.dtype,
        scale=options.scale,
        mask=mask,
        score=ScoreFacts(
            options.softcap,
            function=known(options.score_function),
            function_gradient=known(options.score_gradient),
            **{name: tensor_facts(getattr(operands, name)) for name in SCORE_TENSORS},
        ),
        phase=phase,
        unaligned=tuple(name for name, x in (("q", q), ("k", k), ("v", v)) if not addressable(x)),
        seqused=operands.seqused_q is not None or operands.seqused_kv is not None,
        deterministic=phase == "backward" and (options.deterministic or torch.are_deterministic_algorithms_enabled()),
        dropout=options.dropout,
        learned=tuple(learned),
    )


def learned_of(options: Options) -> list[str]:
    """Which tensors of `LEARNED` need gradients, by name."""
    tensors = {name: getattr(options, name) for name in LEARNED}
    return [name for name, x in tensors.items() if x is not None and x.requires_grad]


def gradients(saved: Sequence, options: Options, learned: Sequence[str], dout, dlse) -> Gradients:
    """The gradients, computed by the backward's operator. saved: q, k, v, out, lse, then the tensors of `OPTIONAL`, which the
    options do not hold, or none of them. dout and dlse may be None."""
    q, k, v, out, lse, *optional = saved
    options = replace(options, **dict(zip(OPTIONAL, optional, strict=False)))
    dout = torch.zeros_like(out) if dout is None else dout
    tensors = dout, dlse, q, k, v, out, lse
    if options.is_band():
        return Gradients(*torch.ops.strobe.backward_band.default(*tensors, *options.arguments()[:BAND]))
    return Gradients(*torch.ops.strobe.backward.default(*tensors, *options.arguments(), list(learned)))
