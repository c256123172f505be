"""The gate of a benchmark: how far a contender is from float64, on a sample that is affordable at any length."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from strobe.lab.bench.plan import Inputs, ends
from strobe.masks import Mask

BOUNDS = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-4, "fp8": 1e-1}
"""The largest relative error that is allowed, of an output row or of a head's gradient as a whole: four times the error of
rounding, and less than that of a window of 1024 keys which is one key too long. For fp8 the exact result is that of the same
fp8 inputs, so errors come from P, and with some kernels the output, having three bits of mantissa."""


class Gate:
    """Knows the exact results at one point, and tells how far a contender's are from them. Of packed sequences it knows the
    first and the last."""

    def __init__(self, inputs: Inputs, mask: Mask):
        self._inputs, self._mask = inputs, mask

    def error(self, result) -> float:
        """The largest relative error of an output [B, S, H, Dv], or of gradients (dq, dk, dv) with the shapes of q, k and v."""
        if self._inputs.packed is None:
            return self._error(self._inputs, result, 0)
        worst = 0.0
        for n, at in enumerate(ends(self._inputs.packed)):
            part = result[:, at] if self._inputs.dout is None else tuple(x[:, at] for x in result)
            worst = max(worst, self._error(self._inputs.sequence(at), part, n))
        return worst

    def _error(self, inputs: Inputs, result, n: int) -> float:
        """The error of the n-th sequence, whose inputs and results stand by themselves."""
        if inputs.dout is None:
            return out_error(result, inputs, self._mask)
        return gradient_error(result, self._gradients[n])

    @cached_property
    def _gradients(self) -> list[dict[tuple[int, int], tuple[torch.Tensor, ...]]]:
        """Exact gradients by (batch entry, key head), for the first and the last key head, of each sequence that is looked at.
        They are computed once, for all contenders, because a gradient sums over all rows."""
        return [self._exact(inputs) for inputs in self._inputs.sequences()]

    def _exact(self, inputs: Inputs) -> dict[tuple[int, int], tuple[torch.Tensor, ...]]:
        sample = {(0, 0), (inputs.k.shape[0] - 1, inputs.k.shape[2] - 1)}
        return {(b, h): exact_gradients(inputs, self._mask, b, h) for b, h in sorted(sample)}


def exact_out(inputs: Inputs, mask: Mask, batch: int, head: int, rows: torch.Tensor) -> torch.Tensor:
    """The exact output of some rows [n] of one head, in float64: [n, Dv]."""
    p, _, _, v = _exact_softmax(inputs, mask, batch, head, rows)
    return p @ v


def _exact_softmax(inputs: Inputs, mask: Mask, batch: int, head: int, rows: torch.Tensor):
    """The softmax P [n, S] of some rows [n] of one head, the factor that a softcap brings to the gradient of their scores, and
    that head's k and v, in float64."""
    length, length_kv, head_dim = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[-1]
    key_head = head // (inputs.q.shape[2] // inputs.k.shape[2])
    q, k, v = (
        inputs.q[batch, :, head].double()[rows],
        inputs.k[batch, :, key_head].double(),
        inputs.v[batch, :, key_head].double(),
    )
    keys = torch.arange(length_kv, device=q.device)[None, :]
    seen = mask.tile(rows[:, None], keys, length, length_kv)
    scores, factor = q @ k.T * head_dim**-0.5, torch.ones((), dtype=torch.float64, device=q.device)
    if inputs.softcap:
        bent = torch.tanh(scores / inputs.softcap)
        scores, factor = inputs.softcap * bent, 1.0 - bent.square()
    scores = torch.where(seen, scores, -torch.inf)
    if inputs.sinks is None:
        return torch.softmax(scores, -1), factor, k, v
    sink = inputs.sinks[head].double().expand(len(rows), 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[:, :-1], factor, k, v


def exact_gradients(inputs: Inputs, mask: Mask, batch: int, key_head: int, chunk: int = 1024) -> tuple[torch.Tensor, ...]:
    """dq [S, group, D], dk [S, D] and dv [S, Dv] of one key head and the query heads that share it, in float64."""
    assert inputs.dout is not None, "a forward's inputs have no gradients"
    length, length_kv, head_dim = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[-1]
    group = inputs.q.shape[2] // inputs.k.shape[2]
    dq = inputs.q.new_zeros((length, group, head_dim), dtype=torch.float64)
    dk, dv = (inputs.q.new_zeros((length_kv, x.shape[-1]), dtype=torch.float64) for x in (inputs.k, inputs.v))
    for member in range(group):
        head = key_head * group + member
        for first in range(0, length, chunk):
            rows = torch.arange(first, min(first + chunk, length), device=dq.device)
            p, factor, k, v = _exact_softmax(inputs, mask, batch, head, rows)
            dout = inputs.dout[batch, rows, head].double()
            dp = dout @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor * head_dim**-0.5
            dq[rows, member] = ds @ k
            dk += ds.T @ inputs.q[batch, rows, head].double()
            dv += p.T @ dout
    return dq, dk, dv


def out_error(out: torch.Tensor, inputs: Inputs, mask: Mask) -> float:
    """The largest relative error of a row of an output, over up to 256 rows of the first and of the last head."""
    batch, length, heads = out.shape[:3]
    rows = torch.linspace(0, length - 1, min(256, length), device=out.device, dtype=torch.float64).round().long()
    worst = 0.0
    for b, h in {(0, 0), (batch - 1, heads - 1)}:
        want = exact_out(inputs, mask, b, h, rows)
        size = want.norm(dim=-1)
        error = (out[b, rows, h].double() - want).norm(dim=-1) / size.clamp(min=size.square().mean().sqrt())
        worst = max(worst, _or_infinite(error.max()))
    return worst


def gradient_error(gradients: tuple[torch.Tensor, ...], exact: dict[tuple[int, int], tuple[torch.Tensor, ...]]) -> float:
    """The largest relative error of dq, dk and dv, each in the norm of a whole head. exact: (batch, key head) -> theirs, in
    float64.

    The norm is that of a head and not of a row, because a causal mask's first rows have gradients that cancel to almost 0.
    """
    dq, dk, dv = gradients
    group, worst = dq.shape[2] // dk.shape[2], 0.0
    for (b, h), wanted in exact.items():
        ours = dq[b, :, h * group : (h + 1) * group], dk[b, :, h], dv[b, :, h]
        for got, want in zip(ours, wanted, strict=True):
            worst = max(worst, _or_infinite((got.double() - want).norm() / want.norm()))
    return worst


def _or_infinite(error: torch.Tensor) -> float:
    """An error as a number, infinite where it is NaN: no comparison would find a NaN too large."""
    return error.item() if bool(torch.isfinite(error)) else math.inf
