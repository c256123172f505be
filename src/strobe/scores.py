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
from dataclasses import dataclass, replace

import torch

from strobe import math
from strobe.functions import Function, score_function, score_function_gradient

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@dataclass(frozen=True, eq=False)
class Score:
    """Changes of the scores, of which any may be combined.

    softcap: a positive bound, or 0 for none.
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

    def __post_init__(self):
        if not self.softcap >= 0.0:
            raise ValueError(f"score: softcap must be 0 (none) or positive, got {self.softcap}")
        # What is a Function already stays: PyTorch 2.11 compiles no call that it is given to.
        if self.function is not None and not isinstance(self.function, Function):
            object.__setattr__(self, "function", score_function(self.function))
        if self.function_gradient is not None:
            if self.function is None:
                raise ValueError("score: function_gradient goes with a function, got none")
            if not isinstance(self.function_gradient, Function):
                object.__setattr__(self, "function_gradient", score_function_gradient(self.function_gradient))

    @property
    def changed(self) -> bool:
        """Whether scores are anything but scale * q.k."""
        return bool(self.softcap) or any(x is not None for x in (self.alibi, self.bias, self.function))

    def __str__(self) -> str:
        parts = [f"softcap({self.softcap:g})"] if self.softcap else []
        parts += [name for name in ("alibi", "bias", "sinks") if getattr(self, name) is not None]
        parts += [f"function {self.function}"] if self.function is not None else []
        return " + ".join(parts) or "plain"

    def of_batch(self, number: int) -> Score:
        """The score of one batch entry (or sequence), whose tensors have a batch of 1; its function is not told the number."""
        alibi = self.alibi if self.alibi is None or self.alibi.dim() == 1 else self.alibi[number : number + 1]
        bias = self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[number : number + 1]
        return replace(self, alibi=alibi, bias=bias)

    def apply(
        self, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int, first_batch: int = 0
    ) -> torch.Tensor:
        """Scaled products s [batch, heads_q, rows, keys] -> scores, for rows i [rows, 1] and keys j [1, keys].

        first_batch: what the function is told of the first batch entry.
        """
        s = self._before_function(s, i, j, n_q, n_kv)
        if isinstance(self.function, Function):
            s = self.function(s, *_places(s, first_batch), i, j).to(s.dtype).expand(s.shape).contiguous()
        return s

    def _before_function(self, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int) -> torch.Tensor:
        if self.softcap:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.alibi is not None:
            slopes = self.alibi.to(s.dtype)
            slopes = (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None]
            s = s - slopes * (i + (n_kv - n_q) - j).abs()
        if self.bias is not None:
            rows, keys = (
                x.flatten() if size > 1 else x.new_zeros(1) for x, size in zip((i, j), self.bias.shape[2:], strict=True)
            )
            s = s + self.bias[:, :, rows][..., keys].to(s.dtype)
        return s

    def gradient(
        self, ds: torch.Tensor, s: torch.Tensor, i: torch.Tensor, j: torch.Tensor, n_q: int, n_kv: int, first_batch: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From ds = d loss / d score, and the arguments of `apply`: d loss / d (scaled product), and what a bias gets of each
        pair. ValueError if there is a function without its gradient."""
        if isinstance(self.function_gradient, Function):
            before = self._before_function(s, i, j, n_q, n_kv)
            factor = self.function_gradient(before, *_places(s, first_batch), i, j).to(s.dtype)
            ds = torch.where(ds == 0.0, 0.0, ds * factor)
        elif self.function is not None:
            raise ValueError(f"score: function {self.function} has no function_gradient")
        of_bias = ds
        if self.softcap:
            ds = ds * (1.0 - torch.tanh(s / self.softcap) ** 2)
        return ds, of_bias


def _places(s: torch.Tensor, first_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function is told of batch and head, for scores [batch, heads_q, rows, keys]."""
    batch = torch.arange(first_batch, first_batch + s.shape[0], device=s.device)[:, None, None, None]
    return batch, torch.arange(s.shape[1], device=s.device)[None, :, None, None]


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
    """Of a user's function at the score before it, in units of log2: d score after it / d score before it."""
    return gradient(s * LN2, batch, head, i, j)


def gradient_through_function(ds, s, gradient, batch, head, i, j):
    """d loss / d score before a user's function from that after it, given the score before it, in units of log2."""
    return math.where(ds == 0.0, 0.0, ds * gradient_of_function(s, gradient, batch, head, i, j))
