"""The short way from `strobe.attention`, and from its operators, to a kernel: for plain tensors, on the current device.

The checks, the choice of a backend, its config and most of a launch follow from shapes, strides, dtypes, the mask and a few
numbers; and an operator's dispatch serves compilers, subclasses and transforms. So a call that needs none of these, and looks
like an earlier one in all that matters, finds what was prepared for that one in a table: the backend's launches, which lack
only the tensors' addresses. Compiled code runs the operators, which find their prepared launches in tables of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from strobe.call import dispatch, launches
from strobe.call.contents import is_debugging
from strobe.call.known_calls import PLAIN, KnownCalls, each_once
from strobe.call.options import NUMBERS, Options, describe, gradients, learned_of
from strobe.call.tables import ClockCache
from strobe.call.torch_internals import (
    bare_apply,
    current_device,
    dispatch_state,
    guard_of,
    is_transformed,
    keys_of,
    raw_stream,
)
from strobe.device import arch_of
from strobe.dropout import new_seed
from strobe.masks import Mask
from strobe.problem import LEARNED, OPTIONAL, Gradients, Operands, Upstream
from strobe.scores import SCORE_TENSORS, Score

_LEARNED = slice(OPTIONAL.index(LEARNED[0]), OPTIONAL.index(LEARNED[-1]) + 1)

Outputs = tuple[torch.Tensor, Any]
"""out and lse, which may be None where nobody wants it."""


class Known(NamedTuple):
    """What is known of calls that look the same.

    alike(...): whether another call's tensors, each once, look like those of these calls. launches: the prepared ones, None if
    these calls run the operator. options: without their tensors. learned: the names of tensors of `LEARNED` that need
    gradients. backward: the prepared launches of their backwards; None where the operator runs it."""

    alike: Callable[..., bool]
    launches: launches.Prepared | None
    differentiable: bool
    options: Options
    learned: list[str]
    backward: KnownCalls[launches.Prepared | None]


_known: ClockCache[Known] = ClockCache(1024)
_latest: ClockCache[tuple[Known, ...]] = ClockCache(1024)
"""Key of all arguments but q, k and v -> the most recently used entries, newest first."""

_forwards: KnownCalls[launches.Prepared | None] = KnownCalls()
"""What was prepared for the forward's operator."""
_backwards: KnownCalls[launches.Prepared | None] = KnownCalls()
"""What was prepared for the backward's operator."""

_LATEST = 4
_NO_SEED = (None,) * (len(OPTIONAL) - 1)
_NO_CHANGES = (None,) * len(SCORE_TENSORS)
_NO_DESCALES = (None, None, None)
_NO_BLOCKS = (None, None)


def forget() -> None:
    """Drop everything that was prepared. Whatever changes the choice of a backend or of a config calls this."""
    _known.clear()
    _latest.clear()
    _forwards.forget()
    _backwards.forget()


def attention(
    check: Callable[..., Options], call: tuple, dropout: float, wants_lse: bool, descales: tuple = _NO_DESCALES
) -> Outputs | None:
    """out and lse of a call by prepared launches, or None if the operator must run it.

    check(*call, dropout): checks a call and returns its Options. descales: those of q, k and v, which `check` knows.

    Every call of a model comes through here. To compare q, k and v with those of an earlier call takes about twenty questions,
    a tenth of a microsecond each; PyTorch's guards, by which compiled code recognises its inputs, ask them all in one call. So
    the latest entries are tried by their guards first, and all others are found by a key."""
    if torch.compiler.is_compiling() or is_transformed():
        return None
    q, k, v, mask, score, scale, cu_q, cu_kv, max_q, max_kv, used_q, used_kv, deterministic, backend = call
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN and type(deterministic) is bool):
        return None
    rules: tuple | None = None
    optional: tuple = ()
    given: Sequence = (q, k, v)
    places: tuple | None = None
    if mask is not None:
        if not isinstance(mask, Mask):
            return None
        if mask.blocks is not None:  # rare, and made of tensors: the operator keeps what it prepares of these
            return None
        rules = (mask.left, mask.right, mask.prefix, mask.function)
    if score is not None:
        if not isinstance(score, Score):
            return None
        rules = (rules, score.softcap, score.function, score.function_gradient)
    if q.is_nested or k.is_nested or v.is_nested:  # PyTorch's guards crash the process on one
        return None
    device = q.get_device()
    try:
        addresses: tuple = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:  # some tensors have no address, such as sparse ones
        return None
    of_mask = None if mask is None else mask.documents
    if (
        of_mask is not None
        or (score is not None and score.has_tensors)
        or cu_q is not None or cu_kv is not None or used_q is not None or used_kv is not None
        or descales is not _NO_DESCALES
    ):  # fmt: skip
        of_q, of_kv = (None, None) if of_mask is None else (of_mask.q, of_mask.kv)
        changes = _NO_CHANGES if score is None else score.tensors
        optional = (cu_q, cu_kv, used_q, used_kv, of_q, of_kv, *_NO_BLOCKS, *changes, *descales, None)
        # Of queries and keys they are often one object, and guards refuse one that comes twice.
        same = cu_kv is cu_q, used_kv is used_q, of_kv is of_q
        of_keys = None if same[0] else cu_kv, None if same[1] else used_kv, None if same[2] else of_kv
        once = (cu_q, used_q, of_q, *of_keys, *changes, *descales)
        beside = [x for x in once if x is not None]
        if any([type(x) not in PLAIN or x.is_nested for x in beside]):
            return None
        try:
            addresses += tuple([x.data_ptr() for x in optional if x is not None])
        except RuntimeError:
            return None
        given, places = (q, k, v, *beside), (same, *map(type, once))
    elif q is k or q is v or k is v:
        given, places = each_once(given)
    if device >= 0 and device != current_device():
        return None
    numbers = None
    if scale is not None or max_q is not None or max_kv is not None or type(dropout) is not float or dropout != 0.0:
        if isinstance(max_q, torch.Tensor) or isinstance(max_kv, torch.Tensor):  # a key needs their values
            return None
        # Types, too: 1 and True are equal, and so are 0 and False, but `check` does not take them for the same.
        numbers = (scale, type(scale), max_q, type(max_q), max_kv, type(max_kv), dropout, type(dropout))
    bits = 0
    for address in addresses:
        bits |= address
    misaligned = bits % 16 and tuple([address % 16 for address in addresses])
    grad_enabled = torch.is_grad_enabled()
    rest = misaligned, places, rules, numbers, backend, grad_enabled, grad_enabled and deterministic
    try:
        latest = _latest.get(rest) or ()
    except TypeError:  # a value that has no hash, such as a list
        return None
    for known in latest:
        if known.alike(*given):
            break
    else:
        key = rest, tuple(map(_looks, given)), dispatch_state()
        found = _known.get(key)
        known = found or _prepare(check(*call, dropout), (q, k, v, *optional), guard_of(*given))
        if found is None:
            _known.put(key, known)
        others = [other for other in latest if other is not known]
        _latest.put(rest, (known, *others[: _LATEST - 1]))
    if known.launches is None:
        return None
    if dropout != 0.0:
        seed = new_seed(q.device)
        optional = _with_seed(optional, seed)
        addresses += (seed.data_ptr(),)
    stream = raw_stream(device) if device >= 0 else 0
    if known.differentiable:
        return _apply(known, stream, addresses, optional, q, k, v, *optional[_LEARNED])
    return known.launches.forward(stream, wants_lse, addresses, (q, k, v, *optional))


def _looks(x: torch.Tensor) -> tuple:
    """Everything that a guard of PyTorch's compares of a tensor, as a key."""
    return type(x), x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad, keys_of(x)


def _with_seed(optional: tuple, seed: torch.Tensor) -> tuple:
    """The tensors of `OPTIONAL`, or none, with dropout's seed at their end."""
    return (*(optional[:-1] or _NO_SEED), seed)


def _prepare(options: Options, tensors: tuple, alike: Callable[..., bool]) -> Known:
    """Prepare for calls that look like this one, whose options are checked. tensors: in the order of `Operands`, of which the
    last ones may be left out."""
    given = [x for x in tensors if x is not None]
    if options.dropout:  # each call draws a seed of its own, so any seed does here
        tensors = (*tensors[:3], *_with_seed(tensors[3:], torch.zeros(1, dtype=torch.int64, device=tensors[0].device)))
    grad_enabled = torch.is_grad_enabled()
    differentiable = grad_enabled and any(x.requires_grad for x in given)
    learned = learned_of(options) if grad_enabled else []
    nothing: dict[str, Any] = dict.fromkeys(OPTIONAL)
    found = None if any(x.is_neg() for x in given) else _launches(options, tensors)
    return Known(alike, found, differentiable, replace(options, **nothing), learned, KnownCalls(16))


def _launches(options: Options, tensors: tuple) -> launches.Prepared | None:
    operands = Operands(*_own(tensors))
    problem = describe(operands, options)
    backend = dispatch.select(problem, arch_of(operands.q.device), options.backend)
    # The operator checks lengths that live on the device, in every call.
    if (problem.varlen or problem.seqused) and is_debugging():
        return None
    return launches.prepared(backend, problem, operands)


def _own(tensors: tuple) -> list[Any]:
    """The tensors, detached. Each is an object of its own, even where a caller passed one tensor twice."""
    return [None if x is None else x.detach() for x in tensors]


class _Differentiable(torch.autograd.Function):
    """Prepared launches as a function that is differentiable in q, k, v and the tensors of `LEARNED`. Prepared launches compute
    the gradients too, or else the operator does."""

    @staticmethod
    def forward(ctx, known: Known, stream: int, addresses: tuple[int, ...], optional: tuple, q, k, v, *_learned):
        assert known.launches is not None
        outputs = known.launches.forward(stream, True, addresses, (q, k, v, *optional))
        ctx.save_for_backward(q, k, v, *outputs, *optional)  # as the operator does
        ctx.known = known
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, dout, dlse):
        known, saved = ctx.known, ctx.saved_tensors  # read once: a checkpoint refuses to unpack a tensor twice
        found = _gradients(known, (*saved[:5], dout, dlse, *saved[5:]))
        if found is None:
            found = gradients(saved, known.options, known.learned, dout, dlse)
        return None, None, None, None, *found


_apply = bare_apply(_Differentiable)


def _gradients(known: Known, tensors: tuple) -> Gradients | None:
    """The gradients by prepared launches; None if the operator must run the backward: one without dout, say, or one that is to
    be differentiated again, which the operator refuses."""
    dout = tensors[5]
    if dout is None or torch.is_grad_enabled() or is_transformed():
        return None
    # Saved tensors look as they did in the forward, unless hooks of saved tensors made copies, whose strides may differ.
    numbers = (torch.are_deterministic_algorithms_enabled(),)
    found = known.backward.look_up(tensors, numbers, _backward_launches, (known.options, known.learned, tensors))
    if found is None:
        return None
    prepared, addresses = found
    return None if prepared is None else prepared.backward(_stream_of(dout), addresses, tensors)


def _backward_launches(options: Options, learned: Sequence[str], tensors: tuple) -> launches.Prepared | None:
    q, k, v, out, lse, dout, dlse, *others = _own(tensors)
    operands, upstream = Operands(q, k, v, *others), Upstream(out, lse, dout, dlse)
    problem = describe(operands, options, "backward", learned)
    backend = dispatch.select(problem, arch_of(operands.q.device), options.backend)
    return launches.prepared(backend, problem, operands, upstream)


# ---- of operators


def forward(options: tuple, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs | None:
    """out and lse for the forward's operator, by prepared launches; None if it has none. options: see `Options`."""
    tensors = (q, k, v, *_optional(options))
    found = _forwards.look_up(tensors, options[:NUMBERS], _launches_of, (options, tensors))
    if found is None:
        return None
    prepared, addresses = found
    return None if prepared is None else prepared.forward(_stream_of(q), True, addresses, tensors)


def backward(options: tuple, learned: Sequence[str], q: torch.Tensor, *others: torch.Tensor | None) -> Gradients | None:
    """The gradients for the backward's operator, by prepared launches; None if it has none. options: see `Options`. others: k,
    v, out, lse, dout, dlse; dlse may be None."""
    tensors = (q, *others, *_optional(options))
    numbers = options[:NUMBERS], tuple(learned), torch.are_deterministic_algorithms_enabled()
    found = _backwards.look_up(tensors, numbers, _backward_launches_of, (options, learned, tensors))
    if found is None:
        return None
    prepared, addresses = found
    return None if prepared is None else prepared.backward(_stream_of(q), addresses, tensors)


def _launches_of(options: tuple, tensors: tuple) -> launches.Prepared | None:
    return _launches(Options(*options), tensors)


def _backward_launches_of(options: tuple, learned: Sequence[str], tensors: tuple) -> launches.Prepared | None:
    return _backward_launches(Options(*options), learned, tensors)


def _optional(options: tuple) -> tuple:
    """The tensors among an operator's options; none of them where each is None."""
    tensors = options[NUMBERS:]
    return tensors if any([x is not None for x in tensors]) else ()


def _stream_of(x: torch.Tensor) -> int:
    device = x.get_device()
    return raw_stream(device) if device >= 0 else 0
