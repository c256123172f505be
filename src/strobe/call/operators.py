"""The torch operators `strobe::forward`, `strobe::backward` and `strobe::jvp`: schema, fake implementation.

`strobe::forward_band` and `strobe::backward_band` are the same with a scale and a band as their only options: most calls.

torch.compile, torch.export and CUDA graphs see these opaque operators; which kernel runs is decided inside them, from the
AttentionProblem that the arguments describe. Nothing here waits for the GPU.

`strobe.call.derivatives` makes them differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from strobe.call import dispatch, prepared_calls
from strobe.call.contents import Rule, are_checked, check_rule, rules_of_bounds
from strobe.call.options import BAND, SCHEMA, SCHEMA_OF_BAND, Options, describe, operands_of
from strobe.cpu import tiled
from strobe.problem import LEARNED, AttentionProblem, Operands, Tangents, Upstream, Varlen, without_gradient

library = torch.library.Library("strobe", "DEF")
_QKV, _GRADIENTS = "Tensor q, Tensor k, Tensor v", ", ".join(f"Tensor d{name}" for name in ("q", "k", "v", *LEARNED))
for _band, _options, _learned in (("", SCHEMA, ", str[] learned"), ("_band", SCHEMA_OF_BAND, "")):
    library.define(f"forward{_band}({_QKV}, {_options}) -> (Tensor out, Tensor lse)")
    library.define(
        f"backward{_band}(Tensor dout, Tensor? dlse, {_QKV}, Tensor out, Tensor lse, {_options}{_learned}) -> ({_GRADIENTS})"
    )
library.define(
    f"jvp({', '.join(f'Tensor? d{name}' for name in Tangents._fields)}, {_QKV}, Tensor out, Tensor lse, "
    f"{SCHEMA}) -> (Tensor dout, Tensor dlse)"
)


def run_forward(q, k, v, *options):
    found = prepared_calls.forward(options, q, k, v)
    if found is not None:
        return found
    opts = Options(*options)
    operands = operands_of(q, k, v, opts)
    problem = describe(operands, opts)
    _check_lengths(problem, operands)
    return dispatch.forward(problem, operands, opts.backend)


def run_backward(dout, dlse, q, k, v, out, lse, *arguments):
    options, learned = of_backward(arguments)
    grads = prepared_calls.backward(options, learned, q, k, v, out, lse, dout, dlse)
    if grads is None:
        opts = Options(*options)
        operands = operands_of(q, k, v, opts)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        problem = describe(operands, opts, "backward", learned)
        grads = dispatch.backward(problem, operands, Upstream(out, lse, dout, dlse), opts.backend)
    return tuple(grads)


def of_backward(arguments: tuple) -> tuple[tuple, Sequence[str]]:
    """The options among the last arguments of a backward, and which tensors of `LEARNED` need gradients."""
    return (arguments, ()) if len(arguments) == BAND else (arguments[:-1], arguments[-1])


def call_forward(q, k, v, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, by the forward's operator; by that of a band where it is enough, for each argument takes a tenth of a
    microsecond."""
    if options.is_band():
        return torch.ops.strobe.forward_band.default(q, k, v, *options.arguments()[:BAND])
    return torch.ops.strobe.forward.default(q, k, v, *options.arguments())


def run_jvp(*arguments):
    tangents, (q, k, v, out, lse, *options) = arguments[:_TANGENTS], arguments[_TANGENTS:]
    opts = Options(*options)
    operands = operands_of(q, k, v, opts)
    problem = describe(operands, opts, "backward")
    reason = without_gradient(problem)
    if reason is not None:
        raise ValueError(f"no forward-mode derivative of [{problem}]: it {reason}")
    return tiled.jvp(problem, operands, out, lse, Tangents(*tangents))


_TANGENTS = len(Tangents._fields)


def _check_lengths(problem: AttentionProblem, operands: Operands) -> None:
    """Check the order and the range of cu_seqlens and seqused: always on the CPU; on a GPU only with STROBE_DEBUG=1, by asserts
    that run on the GPU."""
    if (problem.varlen or problem.seqused) and are_checked(operands.q):
        for each in _rules(problem, operands):
            check_rule(*each)


def _rules(problem: AttentionProblem, operands: Operands) -> Iterator[Rule]:
    """Rules for the lengths that a problem's tensors hold."""
    lengths = problem.lengths
    total_q, total_kv = (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else (0, 0)
    for side, cu, used, total, longest in (
        ("q", operands.cu_seqlens_q, operands.seqused_q, total_q, lengths.seqlen_q),
        ("k", operands.cu_seqlens_kv, operands.seqused_kv, total_kv, lengths.seqlen_kv),
    ):
        if cu is not None:
            name, steps = f"cu_seqlens_{side}", cu.diff()
            yield from rules_of_bounds(name, cu, total)
            yield name, cu, (steps <= longest).all(), f"have no sequence longer than max_seqlen = {longest}"
        if used is not None:
            most = longest if cu is None else cu.diff()
            yield f"seqused_{side}", used, ((used >= 0) & (used <= most)).all(), "be from 0 to the length of each sequence"


def _fake_forward(q, k, v, *options):
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = (q.shape[1], q.shape[0]) if Options(*options).cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype), q.new_empty(lse, dtype=lse_dtype)


def _fake_backward(dout, dlse, q, k, v, out, lse, *arguments):
    options, learned = of_backward(arguments)
    opts = Options(*options)
    of_options = (getattr(opts, name) if name in learned else None for name in LEARNED)
    return tuple(None if x is None else x.new_empty(x.shape) for x in (q, k, v, *of_options))


def _fake_jvp(*arguments):
    out, lse = arguments[_TANGENTS + 3 : _TANGENTS + 5]
    return torch.empty_like(out), torch.empty_like(lse)


for _key in ("CPU", "CUDA"):
    for _band in ("", "_band"):
        library.impl(f"forward{_band}", run_forward, _key)
        library.impl(f"backward{_band}", run_backward, _key)
    library.impl("jvp", run_jvp, _key)
for _band in ("", "_band"):
    torch.library.register_fake(f"strobe::forward{_band}", _fake_forward, lib=library)
    torch.library.register_fake(f"strobe::backward{_band}", _fake_backward, lib=library)
torch.library.register_fake("strobe::jvp", _fake_jvp, lib=library)
