"""The short way from `strobe.attention`, and from its operators, to a kernel: for plain tensors, on the current device.

The checks, the choice of a backend, its config and most of a launch follow from shapes, strides, dtypes, the mask and a few
numbers; and an operator's dispatch serves compilers, subclasses and transforms. A call that needs none of those, and was
seen before in all that matters, finds its plan in a table: the backend's launches, ready but for the tensors' addresses. What
a compiler makes of a call runs the operators, which find their plans by a key of their arguments.

A backend takes part by a function beside its `forward`:

    plan(problem, operands, tensors) -> Plan | None                     None: such calls are left to the operator
    backward_plan(problem, operands, tensors) -> BackwardPlan | None    likewise, beside its `backward`

`tensors` are q, k, v, for a backward also out, lse, dout and, or None, dlse, and then, or None, those of `OPTIONAL`. They are
what `problem` and `operands` hold, each an object of its own, even if the caller's are not. A plan is called with the tensors
of a later call that looks the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from strobe import dispatch, ops
from strobe.device import arch_of
from strobe.dropout import new_seed
from strobe.masks import Mask
from strobe.problem import Gradients
from strobe.recent import Recent
from strobe.scores import Score

OPTIONAL = ops.TENSORS
"""The tensors of a call beside q, k and v, by their names in Options, the last of them the seed of dropout."""

_PLACES = [[one.name for one in fields(ops.Options)].index(name) for name in OPTIONAL]
"""Theirs among the options."""

_LEARNED = slice(OPTIONAL.index("bias"), OPTIONAL.index("sinks") + 1)

Outputs = tuple[torch.Tensor, Any]
"""out and lse, which may be None where nobody wants it."""

Plan = Callable[..., Outputs]
"""plan(stream, wants_lse, addresses, tensors) -> out, lse, on the current device and its current stream, given as the driver's
handle (CPU: 0). addresses: of the tensors, without those that are None."""

BackwardPlan = Callable[..., Gradients]
"""plan(stream, addresses, tensors) -> gradients, likewise; tensors: q, k, v, out, lse, dout, dlse and those of OPTIONAL."""


class Prepared(NamedTuple):
    """What is known of calls that look the same. alike(q, k, v): whether those of another call look like theirs. plan: None if
    they are the operator's. options: without tensors. learned: the names of those with gradients. backward: the plan, or
    (None,), of a backward whose gradients look the same."""

    alike: Callable[..., bool]
    plan: Plan | None
    differentiable: bool
    options: ops.Options
    learned: list[str]
    backward: Recent[tuple[BackwardPlan | None]]


_prepared: Recent[Prepared] = Recent(1024)
_of_operators: Recent[tuple[Plan | BackwardPlan | None]] = Recent(1024)
_latest: Recent[tuple[Prepared, ...]] = Recent(1024)
"""What a call's q, k and v have no part in -> the latest ones that were prepared for it, or found again, newest first."""
_LATEST = 4
_PLAIN = (torch.Tensor, Parameter)
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_in_functorch = torch._C._are_functorch_transforms_active
_NONE = (None,) * len(OPTIONAL)


def forget() -> None:
    """Drop all plans: for whatever changes the choice of a backend or of a config."""
    _prepared.clear()
    _latest.clear()
    _of_operators.clear()


def attention(check: Callable[..., ops.Options], call: tuple, dropout: float, wants_lse: bool) -> Outputs | None:
    """out and lse (see Plan), or None if the call is the operator's. check(*call, dropout): the checks, and what they make of
    a call.

    Every call of a model comes through here. What tells q, k and v apart are twenty questions or so, a tenth of a microsecond
    each; PyTorch's guards, by which compiled code knows its inputs again, ask them all in one call. So the latest plans are
    tried by their guards, and all others are found by a key."""
    if torch.compiler.is_compiling() or _transformed():
        return None
    q, k, v, mask, score, scale, cu_q, cu_kv, max_q, max_kv, used_q, used_kv, deterministic, backend = call
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN and type(deterministic) is bool):
        return None
    rules: tuple | None = None
    optional: tuple = _NONE
    likenesses: tuple | None = None
    if mask is not None:
        if not isinstance(mask, Mask):
            return None
        rules = (mask.left, mask.right, mask.prefix, mask.function)
    if score is not None:
        if not isinstance(score, Score):
            return None
        rules = (rules, score.softcap, score.function, score.function_gradient)
    device = q.get_device()
    addresses: tuple = q.data_ptr(), k.data_ptr(), v.data_ptr()
    of_mask = None if mask is None else mask.documents
    if (
        of_mask is not None
        or (score is not None and (score.alibi is not None or score.bias is not None or score.sinks is not None))
        or cu_q is not None or cu_kv is not None or used_q is not None or used_kv is not None
    ):  # fmt: skip
        documents = (None, None) if of_mask is None else (of_mask.q, of_mask.kv)
        changes = (None, None, None) if score is None else (score.alibi, score.bias, score.sinks)
        optional = (cu_q, cu_kv, used_q, used_kv, *documents, *changes, None)
        likenesses = tuple([None if x is None else _likeness(x) for x in optional])
        if False in likenesses:
            return None
        addresses += tuple([x.data_ptr() for x in optional if x is not None])
    if device >= 0 and device != torch._C._cuda_getDevice():
        return None
    numbers = None
    if scale is not None or max_q is not None or max_kv is not None or dropout != 0.0 or dropout is False:
        # 1 and True are equal, and 0 and False, but not the same to `check`.
        numbers = (scale, type(scale), max_q, type(max_q), max_kv, type(max_kv), dropout, type(dropout))
    alignments = (addresses[0] | addresses[1] | addresses[2]) % 16 and _alignments(addresses)
    gradients = torch.is_grad_enabled()
    rest = alignments, likenesses, rules, numbers, backend, gradients, gradients and deterministic
    try:
        latest = _latest.get(rest) or ()
    except TypeError:  # a number that is a list, say
        return None
    for prepared in latest:
        if prepared.alike(q, k, v):
            break
    else:
        key = rest, _looks(q), _looks(k), _looks(v), _dispatch()
        found = _prepared.get(key)
        prepared = found or _prepare(check(*call, dropout), (q, k, v, *optional))
        if found is None:
            _prepared.put(key, prepared)
        others = [other for other in latest if other is not prepared]
        _latest.put(rest, (prepared, *others[: _LATEST - 1]))
    plan = prepared.plan
    if plan is None:
        return None
    if dropout != 0.0:
        seed = new_seed(q.device)
        optional = (*optional[:-1], seed)
        addresses += (seed.data_ptr(),)
    stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
    if prepared.differentiable:
        return _Differentiable.apply(prepared, stream, addresses, optional, q, k, v, *optional[_LEARNED])
    return plan(stream, wants_lse, addresses, (q, k, v, *optional))


def _transformed() -> bool:
    """Whether something stands between a call and its kernels: a mode, a transform of functorch, forward gradients."""
    return _dispatch_modes() > 0 or _function_modes() > 0 or _in_functorch() or forward_ad._current_level >= 0


def _likeness(x) -> tuple | bool:
    """What the checks and plans depend on, or False if x is no plain tensor, or one whose memory has the other sign."""
    if type(x) not in _PLAIN or x.is_neg():
        return False
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, x.requires_grad


def _looks(x: torch.Tensor) -> tuple:
    """All that a guard compares of a tensor."""
    keys = torch._C._dispatch_keys(x).raw_repr()
    return type(x), x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, keys


def _dispatch() -> tuple[int, int]:
    """What a guard compares beside: inference mode and autocasts."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return include.raw_repr(), exclude.raw_repr()


def _alignments(addresses: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(address % 16 for address in addresses[:3])


def _prepare(options: ops.Options, tensors: tuple) -> Prepared:
    """For calls that look like this one, whose options are checked."""
    if options.dropout:  # what is drawn is each call's own
        tensors = (*tensors[:-1], torch.zeros(1, dtype=torch.int64, device=tensors[0].device))
    gradients = torch.is_grad_enabled()
    differentiable = gradients and any(x is not None and x.requires_grad for x in tensors)
    learned = ops.learned_of(options) if gradients else []
    nothing: dict[str, Any] = dict.fromkeys(OPTIONAL)
    bare = replace(options, **nothing)
    plan = None if any(x.is_neg() for x in tensors[:3]) else _plan(options, tensors)
    guards = torch._C._dynamo.guards.TensorGuards(*tensors[:3], dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return Prepared(guards.check, plan, differentiable, bare, learned, Recent(16))


def _plan(options: ops.Options, tensors: tuple) -> Plan | None:
    own, options = _own(options, tensors)
    q, k, v = own[:3]
    problem = ops.describe(q, k, v, options)
    backend = dispatch.select(problem, arch_of(q.device), options.backend)
    # Lengths that live on the device are checked there, in every call.
    asserts = (problem.varlen or problem.seqused) and os.environ.get("STROBE_DEBUG", "0") == "1"
    if asserts or not hasattr(backend, "plan"):
        return None
    return backend.plan(problem, ops.operands_of(q, k, v, options), own)


def _own(options: ops.Options, tensors: tuple) -> tuple[tuple[Any, ...], ops.Options]:
    """The tensors, of which those of OPTIONAL come last, detached, each an object of its own; and options that hold these."""
    own: tuple[Any, ...] = tuple([None if x is None else x.detach() for x in tensors])
    optional: dict[str, Any] = dict(zip(OPTIONAL, own[-len(OPTIONAL) :], strict=True))
    return own, replace(options, **optional)


class _Differentiable(torch.autograd.Function):
    """A plan, differentiable in q, k, v, a bias and sinks; its gradient by a plan too, or else the operator's."""

    @staticmethod
    def forward(ctx, prepared: Prepared, stream: int, addresses: tuple[int, ...], optional: tuple, q, k, v, _bias, _sinks):
        assert prepared.plan is not None
        outputs = prepared.plan(stream, True, addresses, (q, k, v, *optional))
        ctx.save_for_backward(q, k, v, *outputs, *optional)  # as the operator does
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, dout, dlse):
        prepared, saved = ctx.prepared, ctx.saved_tensors  # asked for once: checkpoints unpack no tensor again
        gradients = _gradients(prepared, (*saved[:5], dout, dlse, *saved[5:]))
        if gradients is None:
            gradients = ops.gradients(saved, prepared.options, prepared.learned, dout, dlse)
        return None, None, None, None, *gradients


def _gradients(prepared: Prepared, tensors: tuple) -> Gradients | None:
    """By a plan. None if a backward is the operator's: one without dout, say, or one that is to be differentiated
    again, which it refuses."""
    dout = tensors[5]
    if dout is None or torch.is_grad_enabled() or _transformed():
        return None
    given = [x for x in tensors if x is not None]
    if any([type(x) not in _PLAIN or x.is_neg() for x in given]):
        return None
    device = dout.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        return None
    addresses = tuple([x.data_ptr() for x in given])
    # What was saved looks as it did in the forward, or else hooks of saved tensors brought copies, which have other strides.
    strides, alignments = tuple([x.stride() for x in given]), tuple([address % 16 for address in addresses])
    key = strides, alignments, torch.are_deterministic_algorithms_enabled()
    found = prepared.backward.get(key)
    if found is None:
        found = (_backward_plan(prepared.options, prepared.learned, tensors),)
        prepared.backward.put(key, found)
    (plan,) = found
    if plan is None:
        return None
    return plan(torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0, addresses, tensors)


def _backward_plan(options: ops.Options, learned: list[str], tensors: tuple) -> BackwardPlan | None:
    own, options = _own(options, tensors)
    q, k, v = own[:3]
    problem = ops.describe(q, k, v, options, "backward", learned)
    backend = dispatch.select(problem, arch_of(q.device), options.backend)
    if not hasattr(backend, "backward_plan"):
        return None
    return backend.backward_plan(problem, ops.operands_of(q, k, v, options), own)


# ---- of operators


def forward(options: Sequence, *tensors: torch.Tensor) -> Outputs | None:
    """out and lse of the operator's call with tensors q, k, v and these options (see `ops.Options`); None if it has no plan."""
    found = _of_operator(_plan, options, tensors, ())
    if found is None:
        return None
    plan, stream, addresses, tensors = found
    return plan(stream, True, addresses, tensors)


def backward(options: Sequence, learned: list[str], *tensors: torch.Tensor | None) -> Gradients | None:
    """Likewise gradients, with tensors q, k, v, out, lse, dout, dlse, of which the last may be None."""

    def plan_of(options: ops.Options, tensors: tuple) -> BackwardPlan | None:
        return _backward_plan(options, learned, tensors)

    found = _of_operator(plan_of, options, tensors, (*learned, torch.are_deterministic_algorithms_enabled()))
    if found is None:
        return None
    plan, stream, addresses, tensors = found
    return plan(stream, addresses, tensors)


def _may_have_a_plan(q: torch.Tensor) -> bool:
    """No backend for a CPU has plans, so to make a key there takes time for nothing."""
    return q.is_cuda


def _of_operator(
    make: Callable[[ops.Options, tuple], Any], options: Sequence, tensors: tuple, beside: tuple
) -> tuple[Any, int, tuple[int, ...], tuple] | None:
    """A plan, and the stream, addresses and tensors that it takes. beside: what else a plan follows from."""
    if not _may_have_a_plan(tensors[0]):
        return None
    device = tensors[0].get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        return None
    tensors = (*tensors, *[options[place] for place in _PLACES])
    likenesses = tuple([None if x is None else _likeness(x) for x in tensors])
    if False in likenesses:
        return None
    key = likenesses, tuple([x for x in options if not isinstance(x, torch.Tensor)]), beside
    found = _of_operators.get(key)
    if found is None:
        found = (make(ops.Options(*options), tensors),)
        _of_operators.put(key, found)
    (plan,) = found
    if plan is None:
        return None
    stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
    return plan, stream, tuple([x.data_ptr() for x in tensors if x is not None]), tensors
