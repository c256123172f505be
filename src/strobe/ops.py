"""The torch operators `strobe::forward` and `strobe::backward`: schema, fake implementation, autograd.

torch.compile, torch.export and CUDA graphs see these two opaque operators; which kernel runs is decided inside them,
from the AttentionProblem that the arguments describe. Nothing here waits for the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from strobe import dispatch
from strobe.device import arch_of
from strobe.functions import known
from strobe.masks import Mask, with_documents
from strobe.problem import AttentionProblem, Dense, Gradients, Operands, Varlen, addressable
from strobe.scores import Score

_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, SymInt max_q, SymInt max_kv, Tensor? seqused_q, Tensor? seqused_kv, "
    "float scale, SymInt? left, SymInt? right, SymInt? prefix, Tensor? document_q, Tensor? document_kv, str? mask_function, "
    "float softcap, Tensor? alibi, Tensor? bias, Tensor? sinks, str? score_function, str? score_gradient, "
    "float dropout, Tensor? seed, bool deterministic, str? backend"
)
_library = torch.library.Library("strobe", "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, str[] learned) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)


@dataclass(frozen=True)
class Options:
    """The arguments after q, k, v that both operators share, in the order of their schema."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    max_q: int = 0
    max_kv: int = 0
    seqused_q: torch.Tensor | None = None
    seqused_kv: torch.Tensor | None = None
    scale: float = 1.0
    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    document_q: torch.Tensor | None = None
    document_kv: torch.Tensor | None = None
    mask_function: str | None = None
    """The key of a `strobe.functions.Function`, as are score_function and score_gradient."""
    softcap: float = 0.0
    alibi: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    score_function: str | None = None
    score_gradient: str | None = None
    dropout: float = 0.0
    seed: torch.Tensor | None = None
    deterministic: bool = False
    backend: str | None = None

    def arguments(self) -> tuple:
        """As the operators take them."""
        return (
            self.cu_seqlens_q, self.cu_seqlens_kv, self.max_q, self.max_kv, self.seqused_q, self.seqused_kv, self.scale,
            self.left, self.right, self.prefix, self.document_q, self.document_kv, self.mask_function, self.softcap, self.alibi,
            self.bias, self.sinks, self.score_function, self.score_gradient, self.dropout, self.seed, self.deterministic,
            self.backend,
        )  # fmt: skip


TENSORS = (
    "cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "document_q", "document_kv", "alibi", "bias", "sinks", "seed",
)  # fmt: skip
"""Those of the options that are tensors."""


LEARNED = ("bias", "sinks")
"""Those that have gradients."""


def learned_of(options: Options) -> list[str]:
    """The names of those whose gradients are asked for."""
    tensors = {name: getattr(options, name) for name in LEARNED}
    return [name for name, x in tensors.items() if x is not None and x.requires_grad]


def describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, phase="forward", learned: Sequence[str] = ()
) -> AttentionProblem:
    """The AttentionProblem that an operator's arguments mean."""
    lengths: Dense | Varlen
    if options.cu_seqlens_q is not None:
        batch = options.cu_seqlens_q.shape[0] - 1
        lengths = Varlen(batch, q.shape[0], k.shape[0], options.max_q, options.max_kv)
    else:
        lengths = Dense(q.shape[0], q.shape[1], k.shape[1])
    return AttentionProblem(
        lengths=lengths,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=q.dtype,
        scale=options.scale,
        mask=with_documents(
            Mask(options.left, options.right, options.prefix, function=known(options.mask_function)),
            options.document_q,
            options.document_kv,
        ),
        score=Score(
            options.softcap,
            options.alibi,
            options.bias,
            options.sinks,
            known(options.score_function),
            known(options.score_gradient),
        ),
        phase=phase,
        unaligned=tuple(name for name, x in (("q", q), ("k", k), ("v", v)) if not addressable(x)),
        seqused=options.seqused_q is not None or options.seqused_kv is not None,
        deterministic=phase == "backward" and (options.deterministic or torch.are_deterministic_algorithms_enabled()),
        dropout=options.dropout,
        learned=tuple(learned),
    )


def operands_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Operands:
    return Operands(q, k, v, options.cu_seqlens_q, options.cu_seqlens_kv, options.seqused_q, options.seqused_kv, options.seed)


def _run_forward(q, k, v, *options):
    from strobe import eager  # which imports this module

    planned = eager.forward(options, q, k, v)
    if planned is not None:
        return planned
    opts = Options(*options)
    problem, operands = describe(q, k, v, opts), operands_of(q, k, v, opts)
    _check_lengths(problem, operands)
    return dispatch.select(problem, arch_of(q.device), opts.backend).forward(problem, operands)


def _run_backward(dout, dlse, q, k, v, out, lse, *arguments):
    from strobe import eager

    *options, learned = arguments
    grads = eager.backward(options, learned, q, k, v, out, lse, dout, dlse)
    if grads is None:
        opts = Options(*options)
        problem, operands = describe(q, k, v, opts, "backward", learned), operands_of(q, k, v, opts)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        chosen = dispatch.select(problem, arch_of(q.device), opts.backend)
        grads = chosen.backward(problem, operands, out, lse, dout, dlse)
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)  # an operator returns tensors, no None


def _check_lengths(problem: AttentionProblem, operands: Operands) -> None:
    """Order and range of cu_seqlens and seqused: on the CPU always; on a GPU only with STROBE_DEBUG=1, by asserts there."""
    if not problem.varlen and not problem.seqused:
        return
    on_cpu = operands.q.device.type == "cpu"
    if not on_cpu and os.environ.get("STROBE_DEBUG", "0") != "1":
        return
    for name, lengths, good, rule in _rules(problem, operands):
        if on_cpu and not bool(good):
            raise ValueError(f"{name} must {rule}, got {lengths.tolist()}")
        if not on_cpu:
            torch._assert_async(good, f"{name} must {rule}")


def _rules(problem: AttentionProblem, operands: Operands) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, str]]:
    """Of the lengths that a problem's tensors hold: name, tensor, whether it keeps a rule (a tensor), the rule in words."""
    lengths = problem.lengths
    total_q, total_kv = (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else (0, 0)
    for side, cu, used, total, longest in (
        ("q", operands.cu_seqlens_q, operands.seqused_q, total_q, lengths.seqlen_q),
        ("k", operands.cu_seqlens_kv, operands.seqused_kv, total_kv, lengths.seqlen_kv),
    ):
        if cu is not None:
            name, steps = f"cu_seqlens_{side}", cu.diff()
            yield name, cu, (cu[:1] == 0).all() & (steps >= 0).all(), "start at 0 and never decrease"
            yield name, cu, (cu <= total).all(), f"not exceed the {total} rows given"
            yield name, cu, (steps <= longest).all(), f"have no sequence longer than max_seqlen = {longest}"
        if used is not None:
            most = longest if cu is None else cu.diff()
            yield f"seqused_{side}", used, ((used >= 0) & (used <= most)).all(), "be from 0 to the length of each sequence"


def _fake_forward(q, k, v, *options):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = (q.shape[1], q.shape[0]) if Options(*options).cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(lse, dtype=lse_dtype)


def _fake_backward(dout, dlse, q, k, v, out, lse, *arguments):
    *options, learned = arguments
    opts = Options(*options)
    of_options = (getattr(opts, name) if name in learned else q.new_empty(0) for name in LEARNED)
    return tuple(x.new_empty(x.shape) for x in (q, k, v, *of_options))


def _save(ctx, inputs, output):
    q, k, v, *rest = inputs
    options = Options(*rest)
    ctx.save_for_backward(q, k, v, *output, *(getattr(options, name) for name in TENSORS))
    without_tensors: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.options = replace(options, **without_tensors)
    ctx.learned = learned_of(options)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, dlse):
    found = gradients(ctx.saved_tensors, ctx.options, ctx.learned, dout, dlse)
    return *found[:3], *(getattr(found, one.name) if one.name in LEARNED else None for one in fields(Options))


def gradients(saved: Sequence, options: Options, learned: list[str], dout, dlse) -> Gradients:
    """saved: q, k, v, out, lse and those of TENSORS, which the options are without."""
    q, k, v, out, lse, *tensors = saved
    options = replace(options, **dict(zip(TENSORS, tensors, strict=True)))
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, *others = torch.ops.strobe.backward(dout, dlse, q, k, v, out, lse, *options.arguments(), learned)
    return Gradients(dq, dk, dv, *(x if name in learned else None for name, x in zip(LEARNED, others, strict=True)))


def _no_second_gradient(ctx, *grads):
    raise NotImplementedError("strobe has no second derivative: its backward cannot be differentiated again")


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _run_forward, _key)
    _library.impl("backward", _run_backward, _key)
torch.library.register_fake("strobe::forward", _fake_forward, lib=_library)
torch.library.register_fake("strobe::backward", _fake_backward, lib=_library)
torch.library.register_autograd("strobe::forward", _gradient, setup_context=_save, lib=_library)
torch.library.register_autograd("strobe::backward", _no_second_gradient, lib=_library)
