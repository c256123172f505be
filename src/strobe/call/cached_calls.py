"""From a call of attention over a cache to what runs it: the torch operator `strobe::decode`, and prepared launches for calls
that look like an earlier one.

Which backend runs is decided from the DecodeProblem. Nothing here waits for the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from strobe.call import dispatch, launches, operators
from strobe.call.contents import check_append_contents, check_contents, is_debugging
from strobe.call.known_calls import KnownCalls
from strobe.call.torch_internals import raw_stream
from strobe.call.triton_internals import stable_keys
from strobe.cpu import append as append_cpu
from strobe.cpu.cached import merged
from strobe.device import arch_of
from strobe.serving.problem import AppendOperands, AppendOptions, DecodeOperands, DecodeOptions, describe

_OUT = DecodeOperands._fields.index("out")

Checked = tuple[DecodeOperands, DecodeOptions]
CheckedAppend = tuple[AppendOperands, AppendOptions]
Outputs = tuple[torch.Tensor, torch.Tensor | None]


class Known(NamedTuple):
    """What calls of attention over a cache that look the same need. launches: attention, and an append ahead of it where there
    is one. new_out: makes the tensor for a result. places: what the launches are given, of the addresses of the call's tensors,
    out last; None: all of them, as they come."""

    launches: launches.Prepared
    new_out: Callable[[], torch.Tensor]
    places: Callable[[Sequence[int]], Sequence[int]] | None


class Append(NamedTuple):
    """What calls of `append` that look the same need. launch: None if each of them is run by the operator. new: make the new
    lengths and, where there are queries, those turned."""

    launch: launches.PreparedCall | None
    new: tuple[Callable[[], torch.Tensor], ...]


_known: KnownCalls[Known | None] = KnownCalls()
_appends: KnownCalls[Append] = KnownCalls()


def forget() -> None:
    """Drop everything that was prepared."""
    _known.forget()
    _appends.forget()


def decode(
    tensors: tuple[torch.Tensor | None, ...], numbers: tuple, check: Callable[..., Checked], arguments: tuple
) -> Outputs:
    """out, and the LSE or None if it is not wanted, of a call.

    tensors: in the order of `DecodeOperands`; v is None where the values are columns of the keys. numbers: all else that its
    user gave. check(*arguments): checks the call."""
    found = attention(tensors, numbers, _prepared_decode, (tensors, check, arguments))
    return _by_operator(*check(*arguments)) if found is None else found


def attention(
    tensors: tuple[torch.Tensor | None, ...], numbers: tuple, prepare: Callable[..., Known | None], arguments: tuple
) -> Outputs | None:
    """Launch what was prepared for calls that look like this one: out, and the LSE or None if it is not wanted. None, and
    nothing is done, where nothing is prepared for such calls.

    tensors: all that the user gave, out last. numbers: all else that the user gave. Calls whose tensors look the same and whose
    numbers are equal run the same launches. prepare(*arguments): checks the call and prepares these (`prepared`)."""
    known, addresses = _known.find(tensors, numbers, prepare, arguments) or (None, [])
    if known is None:
        return None
    prepared, new_out, places = known
    out = tensors[-1]
    if out is None:
        out = new_out()
        addresses.append(out.data_ptr())
    return out, prepared.decode(raw_stream(out.get_device()), addresses if places is None else places(addresses))


GIVEN = tuple({"k": "k_cache", "v": "v_cache"}.get(name, name) for name in DecodeOperands._fields)
"""The names of what attention reads, as an append calls them."""


def _prepared_decode(tensors: tuple[torch.Tensor | None, ...], check: Callable[..., Checked], arguments: tuple) -> Known | None:
    return prepared(dict(zip(GIVEN, tensors, strict=True)), check, arguments)


def prepared(
    given: dict[str, torch.Tensor | None],
    check: Callable[..., Checked],
    arguments: tuple,
    check_append: Callable[..., CheckedAppend] | None = None,
    of_append: tuple = (),
) -> Known | None:
    """What calls that look like this one need; None where they are not prepared, and where a launch would read a tensor that
    was made for this call.

    given: the call's tensors by the names of `GIVEN` and of `AppendOperands`, out last. check(*arguments): checks the
    attention, whose first two arguments, q and the cache, are those before the append; check_append(*of_append) the append
    ahead of it, if there is one."""
    ahead: launches.Ahead | None = None
    reads: list[tuple[str, torch.Tensor | None]] = []
    if check_append is not None:
        appended, options_of_append = check_append(*of_append)
        if _copies(appended):
            return None
        ahead = _append_launch(appended, options_of_append)
        q, cache, *others = arguments
        lengths, *turned = ahead.told
        arguments = (turned[0] if turned else q, cache._with_lengths(lengths), *others)
        reads = list(zip(AppendOperands._fields, appended, strict=True))
    operands, options = check(*arguments)
    reads += [each for each in zip(GIVEN, operands, strict=True) if ahead is None or not ahead.tells(each[1])]
    places = _places(given, reads)
    found = None if places is None else _launches(operands, options, ahead)
    if places is None or found is None:
        return None
    like = _new_out(operands, options)
    new_out: Callable[[], torch.Tensor] = functools.partial(torch.zeros, like.shape, dtype=like.dtype, device=like.device)
    if operands.cu_seqlens_q is None:
        from strobe.call.launcher import maker

        new_out = maker(like)
    as_they_come = places == tuple(range(len(places)))
    return Known(found, new_out, None if as_they_come else itemgetter(*places))


def _places(given: dict[str, torch.Tensor | None], reads: list[tuple[str, torch.Tensor | None]]) -> tuple[int, ...] | None:
    """The places of what launches read among those given tensors that are not None, and then of out, given or new. None if they
    read anything else."""
    if given["v_cache"] is None:  # the values are columns of the keys
        reads = [("k_cache" if name == "v_cache" else name, x) for name, x in reads]
    there = {name: x for name, x in given.items() if x is not None and name != "out"}
    inputs = [(name, x) for name, x in reads if x is not None and name != "out"]
    if any(name not in there or there[name].data_ptr() != x.data_ptr() for name, x in inputs):
        return None
    names = list(there)
    return (*[names.index(name) for name, _ in inputs], len(names))


def _launches(
    operands: DecodeOperands, options: DecodeOptions, ahead: launches.Ahead | None = None
) -> launches.Prepared | None:
    if is_debugging():  # the operator checks lengths and tables in every call
        return None
    operands = _with_out(operands, options)
    problem = describe(operands, options)
    backend = dispatch.select(problem, arch_of(operands.q.device), options.backend)
    # Each an object of its own, but what the append tells is one.
    own = DecodeOperands._make(x if x is None or (ahead and ahead.tells(x)) else x.detach() for x in operands)
    return launches.prepared(backend, problem, own, ahead=ahead)


def _new_out(operands: DecodeOperands, options: DecodeOptions) -> torch.Tensor:
    """Where the result goes; packed rows may belong to no request, so they begin as 0."""
    q, new = operands.q, torch.empty if operands.cu_seqlens_q is None else torch.zeros
    return new((*q.shape[:-1], options.head_dim_v), dtype=q.dtype, device=q.device)


def _with_out(operands: DecodeOperands, options: DecodeOptions) -> DecodeOperands:
    return operands if operands.out is not None else operands._replace(out=_new_out(operands, options))


# ---- the operator

_TENSORS = ", ".join(
    f"Tensor{'' if name in ('q', 'k', 'v', 'lengths') else '?'} {name}" for name in DecodeOperands._fields[:_OUT]
)
_NUMBERS = (
    "SymInt max_q, int head_dim_v, bool shared, float scale, SymInt? left, SymInt? right, float softcap, bool with_lse, "
    "bool deterministic, str? backend"
)
operators.library.define(f"decode({_TENSORS}, {_NUMBERS}) -> (Tensor out, Tensor lse)")
operators.library.define(f"decode_into(Tensor(a!) out, {_TENSORS}, {_NUMBERS}) -> Tensor lse")


def _by_operator(operands: DecodeOperands, options: DecodeOptions) -> Outputs:
    if operands.out is None:
        out, lse = torch.ops.strobe.decode(*operands[:_OUT], *options)
    else:
        out, lse = operands.out, torch.ops.strobe.decode_into(operands.out, *operands[:_OUT], *options)
    return out, lse if options.with_lse else None


def _run(*arguments):
    operands, options = DecodeOperands(*arguments[:_OUT]), DecodeOptions(*arguments[_OUT:])
    operands = _with_out(operands, options)
    return operands.out, _run_into(operands.out, *arguments)


def _run_into(out, *arguments):
    operands, options = DecodeOperands(*arguments[:_OUT])._replace(out=out), DecodeOptions(*arguments[_OUT:])
    problem = describe(operands, options)
    check_contents(problem, operands)
    found, lse = dispatch.forward(problem, operands, options.backend)
    if found is not out:
        out.copy_(found)
    return lse if options.with_lse else out.new_empty(0, dtype=torch.float32)


def _fake(*arguments):
    q = arguments[0]
    return q.new_empty(*q.shape[:-1], DecodeOptions(*arguments[_OUT:]).head_dim_v), _fake_into(None, *arguments)


def _fake_into(_out, *arguments):
    operands, options = DecodeOperands(*arguments[:_OUT]), DecodeOptions(*arguments[_OUT:])
    dtype = torch.float64 if operands.q.dtype == torch.float64 else torch.float32
    q = operands.q
    shape = (q.shape[1], q.shape[0]) if operands.cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape if options.with_lse else (0,), dtype=dtype)


for _dispatch_key in ("CPU", "CUDA"):
    operators.library.impl("decode", _run, _dispatch_key)
    operators.library.impl("decode_into", _run_into, _dispatch_key)
torch.library.register_fake("strobe::decode", _fake, lib=operators.library)
torch.library.register_fake("strobe::decode_into", _fake_into, lib=operators.library)


# ---- append and merge

_NEW = ", ".join(
    {"k_cache": "Tensor(a!) k_cache", "v_cache": "Tensor(b!)? v_cache", "k": "Tensor k", "lengths": "Tensor lengths"}.get(
        name, f"Tensor? {name}"
    )
    for name in AppendOperands._fields
)
operators.library.define(f"append({_NEW}, bool interleaved, bool one_position) -> (Tensor lengths, Tensor q)")
operators.library.define("merge(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)")


def append(
    tensors: tuple[torch.Tensor | None, ...], numbers: tuple, check: Callable[..., CheckedAppend], arguments: tuple
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write new rows to a cache; the new lengths, and the queries turned, None where there are none. tensors: in the order of
    `AppendOperands`; numbers, check and arguments: see `decode`."""
    found = _appends.find(tensors, numbers, _prepared_append, (check, arguments))
    if found is None or found[0].launch is None:
        operands, options = check(*arguments)
        lengths, turned = torch.ops.strobe.append(*operands, *options)
        return lengths, None if operands.q is None else turned
    (launch, new), addresses = found
    k_cache = tensors[0]
    assert k_cache is not None and launch is not None
    made = [make() for make in new]
    launch.launch(raw_stream(k_cache.get_device()), (*addresses, *[x.data_ptr() for x in made]))
    return made[0], made[1] if len(made) > 1 else None


def _prepared_append(check: Callable[..., CheckedAppend], arguments: tuple) -> Append:
    operands, options = check(*arguments)
    if _copies(operands) or is_debugging():
        return Append(None, ())
    from strobe.call.launcher import maker

    call, tensors, told = _append_launch(operands, options)
    return Append(launches.prepared_call(call, [*tensors, *told]), tuple(maker(x) for x in told))


def _copies(operands: AppendOperands) -> bool:
    """Whether each call copies something first."""
    return not all(x.is_contiguous() for x in (operands.cos, operands.sin) if x is not None)


def _append_launch(operands: AppendOperands, options: AppendOptions) -> launches.Ahead:
    """The launch of an append, which tells the new lengths and, where there are queries, those turned."""
    from strobe.kernels.decode.append import append_call

    own = AppendOperands._make(None if x is None else x.detach() for x in operands)  # each an object of its own
    lengths, q = torch.empty_like(operands.lengths), operands.q
    turned = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    call = append_call(own, options, lengths, turned, arch_of(lengths.device))
    told = [lengths] if turned is None else [lengths, turned]
    return launches.Ahead(call, [x for x in own if x is not None], told)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over all keys, from those of parts, stacked."""
    return torch.ops.strobe.merge(outs, lses)


def _append(*arguments):
    count = len(AppendOperands._fields)
    operands, options = AppendOperands(*arguments[:count]), AppendOptions(*arguments[count:])
    check_append_contents(operands, options)
    if operands.k.device.type == "cpu":
        return append_cpu.append(operands, options)
    from strobe.kernels.decode import append as kernel

    stable_keys()
    return kernel.append(operands, options)


def _fake_append(*arguments):
    operands = AppendOperands(*arguments[: len(AppendOperands._fields)])
    q = operands.k.new_empty(0) if operands.q is None else operands.q.new_empty(operands.q.shape)
    return torch.empty_like(operands.lengths), q


def _merge(outs: torch.Tensor, lses: torch.Tensor):
    if outs.device.type != "cpu":
        from strobe.kernels.decode import merge as kernel

        stable_keys()
        return kernel.merge(outs, lses)
    return merged(outs, lses)


def _fake_merge(outs: torch.Tensor, lses: torch.Tensor):
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


for _dispatch_key in ("CPU", "CUDA"):
    operators.library.impl("append", _append, _dispatch_key)
    operators.library.impl("merge", _merge, _dispatch_key)
torch.library.register_fake("strobe::append", _fake_append, lib=operators.library)
torch.library.register_fake("strobe::merge", _fake_merge, lib=operators.library)
