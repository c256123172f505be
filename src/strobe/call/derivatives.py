"""Derivatives of the operators: reverse and forward mode, and what torch.func makes of them.

Autograd, forward-mode AD and the transforms of torch.func (grad, vjp, jvp, jacrev, jacfwd, vmap, and what is composed of these)
find their rules at the operators' dispatch keys, as with PyTorch's own operators. A derivative is an operator too, which vmap
takes and which has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from strobe.call.operators import library, run_backward, run_forward, run_jvp
from strobe.call.options import BAND, NAMES, Options, gradients, learned_of
from strobe.call.torch_internals import (
    HAS_RULES,
    SingleLevelFunction,
    any_requires_grad,
    below_autograd,
    in_dual_level,
    in_functorch,
    next_is_a_kernel,
    set_forward_gradients,
    single_level,
)
from strobe.problem import LEARNED, OPTIONAL

_ops = torch.ops.strobe


class _Forward(SingleLevelFunction):
    @staticmethod
    def forward(ctx, *arguments):
        outputs = _plain(_ops.forward_band if len(arguments) == 3 + BAND else _ops.forward, arguments)
        _save(ctx, arguments, outputs)
        return outputs

    @staticmethod
    def backward(ctx, dout, dlse):
        found = gradients(ctx.saved_tensors, ctx.options, ctx.learned, dout, dlse)
        return *found[:3], *(getattr(found, name) if name in LEARNED else None for name in NAMES)

    @staticmethod
    def jvp(ctx, dq, dk, dv, *tangents):
        of_options = dict.fromkeys(NAMES) | dict(zip(NAMES, tangents, strict=False))
        if of_options["alibi"] is not None:
            raise NotImplementedError("alibi_slopes have no derivative: they must not have a tangent")
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        options = _with_tensors(ctx.options, tensors)
        of_learned = (of_options[name] for name in LEARNED)
        return torch.ops.strobe.jvp(dq, dk, dv, *of_learned, q, k, v, out, lse, *options.arguments())


def _save(ctx, inputs: Sequence, output: Sequence) -> None:
    """Keep what the derivatives of a forward need."""
    q, k, v, *rest = inputs
    options = Options(*rest)
    saved = (q, k, v, *output, *options.tensors())
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)
    without_tensors: dict[str, Any] = dict.fromkeys(OPTIONAL)
    ctx.options = replace(options, **without_tensors)
    ctx.learned = learned_of(options)
    ctx.set_materialize_grads(False)


def _with_tensors(options: Options, tensors: Sequence) -> Options:
    return replace(options, **dict(zip(OPTIONAL, tensors, strict=True)))


class _Derivative(SingleLevelFunction):
    """A derivative as an operator of its own, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx, operator, *arguments):
        return _plain(operator, arguments)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("strobe has no second derivative: its first one cannot be differentiated again")

    jvp = backward


def _plain(operator: Callable, arguments: Sequence):
    """Calls an operator so that its results have no derivatives, except those that other transforms of torch.func ask for."""
    with below_autograd():
        if not in_functorch():
            return operator(*arguments)
        with torch.enable_grad(), set_forward_gradients(True):  # an autograd.Function turns both off
            return operator(*arguments)


def _batched(call: Callable, leading: int, info, in_dims: Sequence, arguments: Sequence) -> tuple[tuple, tuple]:
    """vmap's rule: the results of a call for every entry of the batched dims, and the place of that dim in each result.

    arguments: `leading` tensors, then options. in_dims: the batched dim of each argument, None where it has none. Where no
    other tensor and no function of pairs knows of a batch, the batched dim is folded into the batch of one call; else every
    entry is a call of its own."""
    size = info.batch_size
    dims = [dim if isinstance(x, torch.Tensor) else None for x, dim in zip(arguments, in_dims, strict=True)]
    tensors, rest = arguments[:leading], arguments[leading:]
    options = Options(*rest[: len(NAMES)])
    if any(getattr(options, name) is not None for name in (*OPTIONAL, "mask_function", "score_function")):
        if not size:
            raise ValueError("vmap over a dim of size 0 takes q, k and v alone: no other tensor, and no function of pairs")
        entries = (
            [x if dim is None else x.select(dim, n) for x, dim in zip(arguments, dims, strict=True)] for n in range(size)
        )
        of_each = zip(*(call(*entry) for entry in entries), strict=True)
        results = tuple(None if of_one[0] is None else torch.stack(of_one) for of_one in of_each)
    else:
        first = [x if x is None else _in_front(x, dim, size) for x, dim in zip(tensors, dims, strict=False)]
        batch = next(x.shape[1] for x in first if x is not None)
        folded = call(*(x if x is None else x.flatten(0, 1) for x in first), *rest)
        results = tuple(None if x is None else x.unflatten(0, (size, batch)) for x in folded)
    return results, tuple(None if x is None else 0 for x in results)


def _in_front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """x with its batched dim in front; without such a dim, x repeated `size` times (as a view)."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _register(
    name: str, kernel: Callable, leading: int, apply: Callable, backward: Callable, save: Callable | None = None
) -> None:
    """Give an operator its derivative and its rule for vmap.

    kernel: what it runs on plain tensors. leading: how many tensors its arguments begin with."""
    operator = getattr(_ops, name)

    def differentiable(keyset, *arguments):
        if in_functorch():
            with single_level():
                return apply(*arguments)
        if in_dual_level() or (torch.is_grad_enabled() and any_requires_grad(*arguments)):
            return apply(*arguments)
        if next_is_a_kernel(keyset):  # as in every call of compiled code: to dispatch once more takes 7 us
            return kernel(*arguments)
        return _plain(operator, arguments)

    def batched(info, in_dims, *arguments):
        return _batched(operator, leading, info, in_dims, arguments)

    if HAS_RULES:
        library.impl(name, differentiable, "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(f"strobe::{name}", backward, setup_context=save, lib=library)
    torch.library.register_vmap(f"strobe::{name}", batched, lib=library)


for _name in ("forward", "forward_band"):
    _register(_name, run_forward, 3, _Forward.apply, _Forward.backward, _save)
for _name, _kernel, _leading in (("backward", run_backward, 7), ("backward_band", run_backward, 7), ("jvp", run_jvp, 10)):
    _register(_name, _kernel, _leading, partial(_Derivative.apply, getattr(_ops, _name)), _Derivative.backward)
