"""Scores: what happens to q.k between the product and the softmax, in this order.

s = scale * q.k
s = softcap * tanh(s / softcap)      where softcap > 0    (Gemma 2; flash-attn's order: before the slopes)
s = s - slope[h] * |p - j|           where ALiBi slopes are given; p is the row's position among the keys
s = s + bias[b, h, i, j]             where a bias is given
s = f(s, b, h, i, j)                 where a function is given

and to the softmax itself: where there are sinks, exp(sink[h]) is one more term of every row's sum, which has no value
(gpt-oss; Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"). A key with a score of -inf weighs
nothing, and a row that sees no other is as one that sees none.

The functions at the end are plain arithmetic, as those of `strobe.masks`: kernels compile the same source with Triton and
Gluon (`kernels/common/scores.py`, `gluon_scores.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from strobe import math
from strobe.checks import check_device, check_tensor, same_tensor
from strobe.functions import Function, score_function, score_function_gradient

LOG2E = 1.4426950408889634
"""log2(e): kernels compute with scores in units of log2, as exp2 is the instruction that GPUs have."""

LN2 = 0.6931471805599453
"""ln(2), which takes such a score, or an LSE, back to natural units."""

_NO_CAP = 2.0**127
"""No score of float32 is changed by a cap of this size."""


SCORE_TENSORS = ("alibi", "bias", "sinks")
"""The names of a score's tensors, in `Score`, `ScoreFacts` and `strobe.problem.Operands`."""

_PARAMETERS = {"alibi": "alibi_slopes"}
"""A tensor's name -> the argument by which users know it, where that is another."""


class TensorFacts(NamedTuple):
    """What is known of a tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def tensor_facts(x: torch.Tensor | None) -> TensorFacts | None:
    """The facts of a tensor that may be absent."""
    return None if x is None else TensorFacts(tuple(x.shape), x.stride(), x.dtype)


@dataclass(frozen=True)
class ScoreFacts:
    """A `Score` without its tensors: it has a hash, and is equal to those that the same kernels compute."""

    softcap: float = 0.0
    alibi: TensorFacts | None = None
    bias: TensorFacts | None = None
    sinks: TensorFacts | None = None
    function: Function | None = None
    function_gradient: Function | None = None

    @property
    def changed(self) -> bool:
        """Whether scores are anything but scale * q.k."""
        return bool(self.softcap) or any(x is not None for x in (self.alibi, self.bias, self.function))

    def __str__(self) -> str:
        parts = [f"softcap({self.softcap:g})"] if self.softcap else []
        parts += [name for name in ("alibi", "bias", "sinks") if getattr(self, name) is not None]
        parts += [f"function {self.function}"] if self.function is not None else []
        return " + ".join(parts) or "plain"


@dataclass(frozen=True, eq=False)
class Score:
    """Changes of the scores, of which any may be combined.

    softcap: a positive bound, or 0 for none; one of 2^127 and more, or infinity, is none.
    alibi: float32 slopes, [heads_q] or [batch, heads_q].
    bias: [batch, heads_q, seqlen_q, seqlen_kv], any of which may be 1, with any strides, of q's dtype or float32.
    sinks: [heads_q], of float32, bfloat16 or float16.
    function: f(score, batch, head, q_index, kv_index) -> score, a Python function of arithmetic and `strobe.math` (see
        docs/masks.md), given tensors that broadcast to a tile of scores; indices count from 0 in each sequence.
    function_gradient: g(score, batch, head, q_index, kv_index) -> d f / d score at the score that f is given, a function of
        the same kind, which a backward needs. The gradient of a pair that weighs nothing is 0, whatever it returns.

    bias and sinks have gradients, of their shapes and dtypes, if they require them. They are the same bits at every run, except
    that of a bias of which a dim is 1 and stands for many: it is summed in float32, on a GPU by atomic additions, in any order.
    """

    softcap: float = 0.0
    alibi: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    function: Function | Callable | None = None
    function_gradient: Function | Callable | None = None
    tensors: tuple[torch.Tensor | None, ...] = field(init=False, repr=False)
    """The score's tensors, in the order of `SCORE_TENSORS`."""
    has_tensors: bool = field(init=False, repr=False)

    def __post_init__(self):
        if isinstance(self.softcap, bool) or not isinstance(self.softcap, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"score: softcap must be a number, got {type(self.softcap).__name__}")
        if not self.softcap >= 0.0:
            raise ValueError(f"score: softcap must be 0 (none) or positive, got {self.softcap}")
        if self.softcap >= _NO_CAP:
            object.__setattr__(self, "softcap", 0.0)
        tensors = tuple(getattr(self, name) for name in SCORE_TENSORS)
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "has_tensors", any(x is not None for x in tensors))
        # What is a Function already stays: PyTorch 2.11 compiles no call that it is given to.
        if self.function is not None and not isinstance(self.function, Function):
            object.__setattr__(self, "function", score_function(self.function))
        if self.function_gradient is not None:
            if self.function is None:
                raise ValueError("score: function_gradient goes with a function, got none")
            if not isinstance(self.function_gradient, Function):
                object.__setattr__(self, "function_gradient", score_function_gradient(self.function_gradient))

    def __eq__(self, other) -> bool:
        """Whether two change scores alike. Of tensors that are not the same ones it waits for a GPU."""
        if not isinstance(other, Score):
            return NotImplemented
        pairs = zip(self.tensors, other.tensors, strict=True)
        return self._numbers() == other._numbers() and all(same_tensor(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self._numbers(), tuple(None if x is None else x.shape for x in self.tensors)))

    def _numbers(self) -> tuple:
        return self.softcap, self.function, self.function_gradient

    def facts(self) -> ScoreFacts:
        """The score without its tensors."""
        return ScoreFacts(self.softcap, *map(tensor_facts, self.tensors), self.function, self.function_gradient)  # type: ignore

    def check(self, q: torch.Tensor, k: torch.Tensor, batch: int, packed: bool) -> None:
        """TypeError or ValueError if a tensor does not fit q and k. batch: the number of batch entries or sequences."""
        shapes = {"alibi": self._check_alibi, "bias": self._check_bias, "sinks": self._check_sinks}
        for name, x in zip(SCORE_TENSORS, self.tensors, strict=True):
            if x is not None:
                called = _PARAMETERS.get(name, name)
                check_tensor(called, x)
                shapes[name](x, q, k, batch, packed)
                check_device(called, x, q)

    def _check_alibi(self, alibi, q, k, batch: int, packed: bool) -> None:
        if alibi.dtype != torch.float32:
            raise TypeError(f"alibi_slopes must be float32, got {alibi.dtype}")
        heads = q.shape[-2]
        by_sequence = alibi.dim() == 2 and alibi.shape[0] == batch
        if not (alibi.dim() == 1 or by_sequence) or alibi.shape[-1] != heads:
            raise ValueError(f"alibi_slopes must have shape [{heads}] or [{batch}, {heads}], got {list(alibi.shape)}")
        if alibi.requires_grad:
            raise ValueError("alibi_slopes must not require a gradient: Strobe has none for them; pass alibi_slopes.detach()")

    def _check_bias(self, bias, q, k, batch: int, packed: bool) -> None:
        if packed:
            raise ValueError("bias goes with dense q, k, v, got packed sequences: a score function may compute it instead")
        if bias.dtype not in (q.dtype, torch.float32):
            raise TypeError(f"bias must be float32 or have q's dtype {q.dtype}, got {bias.dtype}")
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if bias.dim() != 4 or any(n != 1 and n != full for n, full in zip(bias.shape, shape, strict=True)):
            raise ValueError(f"bias must have shape {list(shape)}, any of which may be 1, got {list(bias.shape)}")

    def _check_sinks(self, sinks, q, k, batch: int, packed: bool) -> None:
        if sinks.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"sinks must be float32, bfloat16 or float16, got {sinks.dtype}")
        if tuple(sinks.shape) != (q.shape[-2],):
            raise ValueError(f"sinks must have shape [{q.shape[-2]}], got {list(sinks.shape)}")

    def __str__(self) -> str:
        return str(self.facts())

    def of_batch(self, number: int) -> Score:
        """The score of one batch entry (or sequence), whose tensors have a batch of 1; its function is not told the number."""
        alibi = self.alibi if self.alibi is None or self.alibi.dim() == 1 else self.alibi[number : number + 1]
        bias = self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[number : number + 1]
        return replace(self, alibi=alibi, bias=bias)

    def apply(
        self, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int, first_batch: int = 0, first_head: int = 0
    ) -> torch.Tensor:
        """Scaled products s [batch, heads_q, rows, keys] -> scores, for rows i [rows, 1] and keys j [1, keys].

        first_batch, first_head: what the function is told of the first batch entry, and of the first head.
        """
        s = self._before_function(s, i, j, n_q, n_kv)
        if isinstance(self.function, Function):
            s = self.function(s, *_entries(s, first_batch, first_head), i, j).to(s.dtype).expand(s.shape).contiguous()
        return s

    def _before_function(self, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int) -> torch.Tensor:
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.alibi is not None:
            slopes = self.alibi.to(s.dtype)
            slopes = (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None]
            s = s - slopes * (i + (n_kv - n_q) - j).abs()
        if self.bias is not None:
            s = s + _of_tile(self.bias, i, j).to(s.dtype)
        return s

    def tangent(
        self, ds: torch.Tensor, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int, first_batch: int = 0,
        dbias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """From ds, the tangent of the scaled product, the arguments of `apply`, and the tangent of the bias: the tangent of the
        score. ValueError if there is a function without its gradient."""
        if self.softcap:
            ds = ds * (1.0 - torch.tanh(s / self.softcap) ** 2)
        if dbias is not None:
            ds = ds + _of_tile(dbias, i, j).to(ds.dtype)
        return self._through_function(ds, s, i, j, n_q, n_kv, first_batch, 0)

    def gradient(
        self, ds: torch.Tensor, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int, first_batch: int = 0,
        first_head: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """From ds = d loss / d score, and the arguments of `apply`: d loss / d (scaled product), and what a bias gets of each
        pair. ValueError if there is a function without its gradient."""
        ds = of_bias = self._through_function(ds, s, i, j, n_q, n_kv, first_batch, first_head)
        if self.softcap:
            ds = ds * (1.0 - torch.tanh(s / self.softcap) ** 2)
        return ds, of_bias

    def _through_function(self, ds, s, i, j, n_q: int, n_kv: int, first_batch: int, first_head: int) -> torch.Tensor:
        """ds times the function's derivative: a number for each pair, so it is the same whichever way a derivative goes."""
        if self.function is None:
            return ds
        if not isinstance(self.function_gradient, Function):
            raise ValueError(f"score: function {self.function} has no function_gradient")
        before = self._before_function(s, i, j, n_q, n_kv)
        factor = self.function_gradient(before, *_entries(s, first_batch, first_head), i, j).to(s.dtype)
        return torch.where(ds == 0.0, 0.0, ds * factor)


def _of_tile(bias: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """A bias for rows i [rows, 1] and keys j [1, keys]; dims of 1 stay."""
    rows, keys = (x.flatten() if size != 1 else x.new_zeros(1) for x, size in zip((i, j), bias.shape[2:], strict=True))
    return bias[:, :, rows][..., keys]


def _entries(s: torch.Tensor, first_batch: int, first_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function is told of batch and head, for scores [batch, heads_q, rows, keys]."""
    batch = torch.arange(first_batch, first_batch + s.shape[0], device=s.device)[:, None, None, None]
    return batch, torch.arange(first_head, first_head + s.shape[1], device=s.device)[None, :, None, None]


def sinks_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """d loss / d sinks, [heads_q], from what every backward has: lse and delta = rowsum(dO * O) - dLSE, both [batch, heads_q,
    rows] or [heads_q, rows].

    A sink is a key without a value, so dP is 0 and dS = P * (0 - delta), P = exp(sink - LSE), of which each row has one."""
    of_rows = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.to(lse.dtype)[:, None] - lse) * -delta)
    by_head = of_rows.sum(-1)
    return (by_head if by_head.dim() == 1 else by_head.sum(0)).to(sinks.dtype)


# ---- the arithmetic of kernels


def tanh(x):
    """Accurate near 0 too, where (1 - e) / (1 + e) would cancel: Lambert's continued fraction."""
    x2 = x * x
    near = x * (10395.0 + x2 * (1260.0 + 21.0 * x2)) / (10395.0 + x2 * (4725.0 + x2 * (210.0 + x2)))
    e = math.exp2(math.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return math.where(x2 < 0.25, near, math.where(x < 0, -far, far))


def tanh_of_score(x):
    """tanh in few instructions, without the relative accuracy near 0 that `tanh` has: of a score the absolute error counts."""
    return 1.0 - 2.0 / (1.0 + math.exp2(x * (2.0 * LOG2E)))


def score_and_factor(raw, p, j, inner, outer, slope):
    """q.k -> (score, the factor that softcap puts on its gradient); p and j broadcast to the tile.

    s = inner * q.k, or outer * tanh(inner * q.k) where outer is not None; then - slope * |p - j| where slope is not None.
    In units of log2 if log2(e) is folded into the last factor of the product and into the slope.
    """
    factor = 1.0
    if outer is None:
        s = raw * inner
    else:
        t = tanh_of_score(raw * inner)
        s = t * outer
        factor = 1.0 - t * t
    if slope is not None:
        s = s - slope * math.abs(p - j)
    return s, factor


def score_of(raw, p, j, inner, outer, slope):
    """The score of `score_and_factor` alone."""
    s, _ = score_and_factor(raw, p, j, inner, outer, slope)
    return s


def with_bias(s, bias):
    """Scores in units of log2 and a bias that is not."""
    return s + bias * LOG2E


def with_function(s, function, batch, head, i, j):
    """Scores in units of log2, through a user's function, which knows natural ones; row i of the sequence, not position p."""
    return function(s * LN2, batch, head, i, j) * LOG2E


def gradient_of_function(s, gradient, batch, head, i, j):
    """Derivative of a user's function, d score after it / d score before it, at a score before it in units of log2."""
    return gradient(s * LN2, batch, head, i, j)


def gradient_through_function(ds, s, gradient, batch, head, i, j):
    """d loss / d score before a user's function from that after it, given the score before it, in units of log2."""
    return math.where(ds == 0.0, 0.0, ds * gradient_of_function(s, gradient, batch, head, i, j))
