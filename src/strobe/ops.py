"""The torch operators `strobe::forward` and `strobe::backward`: schema, fake implementation, autograd.

torch.compile, torch.export and CUDA graphs see these two opaque operators; which kernel runs is decided inside them,
from the AttentionProblem that the arguments describe. Nothing here waits for the GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from strobe import dispatch
from strobe.device import arch_of
from strobe.masks import Mask, with_documents
from strobe.problem import AttentionProblem, Dense, Operands, Varlen
from strobe.scores import Score

_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, SymInt max_q, SymInt max_kv, float scale, SymInt? left, SymInt? right, "
    "SymInt? prefix, Tensor? document_q, Tensor? document_kv, float softcap, Tensor? alibi, str? backend"
)
_library = torch.library.Library("strobe", "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


@dataclass(frozen=True)
class Options:
    """The arguments after q, k, v that both operators share, in the order of their schema."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    max_q: int = 0
    max_kv: int = 0
    scale: float = 1.0
    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    document_q: torch.Tensor | None = None
    document_kv: torch.Tensor | None = None
    softcap: float = 0.0
    alibi: torch.Tensor | None = None
    backend: str | None = None

    def arguments(self) -> tuple:
        """As the operators take them."""
        return (
            self.cu_seqlens_q, self.cu_seqlens_kv, self.max_q, self.max_kv, self.scale, self.left, self.right, self.prefix,
            self.document_q, self.document_kv, self.softcap, self.alibi, self.backend,
        )  # fmt: skip


def describe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, phase="forward") -> AttentionProblem:
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
        mask=with_documents(Mask(options.left, options.right, options.prefix), options.document_q, options.document_kv),
        score=Score(options.softcap, options.alibi),
        phase=phase,
        unaligned=tuple(name for name, x in (("q", q), ("k", k), ("v", v)) if not _aligned(x)),
    )


def _aligned(x: torch.Tensor) -> bool:
    """Whether a TMA descriptor can address x: base and strides in multiples of 16 bytes, no dim repeated by stride 0."""
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)


def _run_forward(q, k, v, *options):
    opts = Options(*options)
    problem, operands = describe(q, k, v, opts), Operands(q, k, v, opts.cu_seqlens_q, opts.cu_seqlens_kv)
    _check_cu_seqlens(problem, operands)
    return dispatch.select(problem, arch_of(q.device), opts.backend).forward(problem, operands)


def _run_backward(dout, dlse, q, k, v, out, lse, *options):
    opts = Options(*options)
    problem, operands = describe(q, k, v, opts, "backward"), Operands(q, k, v, opts.cu_seqlens_q, opts.cu_seqlens_kv)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    chosen = dispatch.select(problem, arch_of(q.device), opts.backend)
    return chosen.backward(problem, operands, out, lse, dout, dlse)


def _check_cu_seqlens(problem: AttentionProblem, operands: Operands) -> None:
    """Order and range of cu_seqlens: on the CPU always; on a GPU only with STROBE_DEBUG=1, by asserts on the device."""
    lengths = problem.lengths
    if not isinstance(lengths, Varlen):
        return
    on_cpu = operands.q.device.type == "cpu"
    if not on_cpu and os.environ.get("STROBE_DEBUG", "0") != "1":
        return
    for name, cu, total, longest in (
        ("cu_seqlens_q", operands.cu_seqlens_q, lengths.total_q, lengths.max_q),
        ("cu_seqlens_k", operands.cu_seqlens_kv, lengths.total_kv, lengths.max_kv),
    ):
        assert cu is not None
        steps = cu.diff()
        for good, rule in (
            ((cu[:1] == 0).all() & (steps >= 0).all(), "start at 0 and never decrease"),
            ((cu <= total).all(), f"not exceed the {total} rows given"),
            ((steps <= longest).all(), f"have no sequence longer than max_seqlen = {longest}"),
        ):
            if on_cpu and not bool(good):
                raise ValueError(f"{name} must {rule}, got {cu.tolist()}")
            if not on_cpu:
                torch._assert_async(good, f"{name} must {rule}")


def _fake_forward(q, k, v, *options):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = (q.shape[1], q.shape[0]) if Options(*options).cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(lse, dtype=lse_dtype)


def _fake_backward(dout, dlse, q, k, v, out, lse, *options):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, *rest = inputs
    options = Options(*rest)
    tensors = (options.cu_seqlens_q, options.cu_seqlens_kv, options.document_q, options.document_kv, options.alibi)
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.options = replace(options, cu_seqlens_q=None, cu_seqlens_kv=None, document_q=None, document_kv=None, alibi=None)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout, dlse):
    q, k, v, out, lse, cu_q, cu_kv, document_q, document_kv, alibi = ctx.saved_tensors
    options = replace(
        ctx.options, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, document_q=document_q, document_kv=document_kv, alibi=alibi
    )
    dout = torch.zeros_like(out) if dout is None else dout
    grads = torch.ops.strobe.backward(dout, dlse, q, k, v, out, lse, *options.arguments())
    return (*grads, *(None for _ in options.arguments()))


def _no_second_gradient(ctx, *grads):
    raise NotImplementedError("strobe has no second derivative: its backward cannot be differentiated again")


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _run_forward, _key)
    _library.impl("backward", _run_backward, _key)
torch.library.register_fake("strobe::forward", _fake_forward, lib=_library)
torch.library.register_fake("strobe::backward", _fake_backward, lib=_library)
torch.library.register_autograd("strobe::forward", _gradient, setup_context=_save, lib=_library)
torch.library.register_autograd("strobe::backward", _no_second_gradient, lib=_library)
