"""A score_mod as a `strobe.Score`: a softcap, a bias, or a function with its derivative."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import inf

import torch

from strobe.integrations.flex.formulas import (
    ONE,
    ZERO,
    Formula,
    NoFormula,
    added,
    derivative,
    formula_of,
    function_of,
    in_order,
    leaves,
    multiplied,
    number,
    of_pairs,
    with_dtype_of_score,
)
from strobe.integrations.flex.masks import Shape, indices
from strobe.integrations.flex.tracing import PAIR, Traced
from strobe.scores import Score

_PARAMETERS = ("score", *PAIR)


@dataclass(frozen=True)
class ReadScore:
    """A score_mod in Strobe's terms."""

    score: Score
    factor: float = 1.0
    """What the scale is multiplied by."""

    @property
    def words(self) -> str:
        """What became of it, for people."""
        if self.score.bias is not None:
            shape = list(self.score.bias.shape)
            return f"{self.score}; the bias was computed from the tensors that score_mod reads, for all pairs: {shape}"
        return str(self.score)


def read_score(traced: Traced, shape: Shape, dtype: torch.dtype, device: torch.device) -> ReadScore:
    """The score that a score_mod means. TypeError, which names the way out, if Strobe has none."""
    try:
        return _read(traced, shape, dtype, device)
    except NoFormula as reason:
        raise TypeError(
            f"score_mod {reason}, which Strobe's kernels cannot: use strobe.math's functions, add what tensors say to the "
            "score (score + bias[...]), or call torch.nn.attention.flex_attention for this one"
        ) from None


def _read(traced: Traced, shape: Shape, dtype: torch.dtype, device: torch.device) -> ReadScore:
    if traced not in _without_tensors:
        found = _read_again(traced, shape, dtype, device)
        if traced.outside():  # which may hold other numbers next time
            return found
        _without_tensors[traced] = found
    return _without_tensors[traced]


_without_tensors: weakref.WeakKeyDictionary[Traced, ReadScore] = weakref.WeakKeyDictionary()
"""What was read from graphs without tensors from outside: it is the same for all calls."""


def _read_again(traced: Traced, shape: Shape, dtype: torch.dtype, device: torch.device) -> ReadScore:
    formula = formula_of(traced)
    cap, base = _softcap(formula)
    line = _line(formula, base)
    if line == (ONE, ZERO):
        return ReadScore(Score(softcap=cap))
    if "entry" not in leaves(formula):
        function = function_of(with_dtype_of_score(formula), "score_mod", _PARAMETERS)
        slope = function_of(with_dtype_of_score(derivative(formula)), "score_mod_gradient", _PARAMETERS)
        return ReadScore(Score(function=function, function_gradient=slope))
    if line is None or _number(line[0]) in (None, 0) or (cap and line[0] != ONE):
        raise NoFormula("does more with tensors from outside than to add what they say to the score (times a number)")
    return ReadScore(Score(softcap=cap, bias=_bias(line[1], shape, dtype, device)), float(line[0][1]))


def _softcap(formula: Formula) -> tuple[float, Formula]:
    """(c, the part c * tanh(score / c) of a formula), or (0, the score)."""
    parts = in_order(formula)
    for x in parts:
        if x[0] == "mul":
            for cap, tanh in (x[1:], x[:0:-1]):
                if (_number(cap) or 0) > 0 and tanh[0] == "tanh" and tanh[1] == ("div", ("score",), cap):
                    return float(cap[1]), x
    return 0.0, next((x for x in parts if x[0] == "score"), ("score",))


def _number(x: Formula):
    return x[1] if x[0] == "number" else None


def _line(x: Formula, base: Formula) -> tuple[Formula, Formula] | None:
    """(a, b), if a formula is a * base + b with a number a and no score in b."""
    if x is base:
        return ONE, ZERO
    if "score" not in leaves(x):
        return ZERO, x
    if x[0] in ("add", "sub"):
        first, second = _line(x[1], base), _line(x[2], base)
        if first is None or second is None:
            return None
        if x[0] == "sub":
            second = _scaled(second[0], -1.0), _scaled(second[1], -1.0)
        return _sum(first[0], second[0]), added(first[1], second[1])
    if x[0] == "mul" and None in (_number(x[1]), _number(x[2])):
        factor, other = (x[1], x[2]) if _number(x[1]) is not None else (x[2], x[1])
        line = _line(other, base)
        return None if line is None or _number(factor) is None else (_scaled(line[0], factor[1]), _scaled(line[1], factor[1]))
    if x[0] == "div" and _number(x[2]):
        line = _line(x[1], base)
        return None if line is None else (_scaled(line[0], 1.0 / x[2][1]), _scaled(line[1], 1.0 / x[2][1]))
    if x[0] == "where" and "score" not in leaves(x[1]):
        first, second = _line(x[2], base), _line(x[3], base)
        if first is not None and second is not None:
            hidden = ("number", -inf)
            if first[0] == second[0] or second[1] == hidden:
                return first[0], ("where", x[1], first[1], second[1])
            if first[1] == hidden:
                return second[0], ("where", x[1], first[1], second[1])
    return None


def _scaled(x: Formula, factor: float) -> Formula:
    """factor * x."""
    return number(x[1] * factor) if x[0] == "number" else multiplied(number(factor), x)


def _sum(a: Formula, b: Formula) -> Formula:
    return number(a[1] + b[1])


def _bias(formula: Formula, shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a formula without a score gives for all pairs, [batch or 1, heads or 1, n_q or 1, n_kv or 1]."""
    values = indices(shape, torch.arange(shape.n_q, device=device))
    bias = of_pairs(formula, values)
    bias = bias if isinstance(bias, torch.Tensor) else torch.tensor(float(bias), device=device)
    if bias.dtype not in (dtype, torch.float32):
        bias = bias.to(torch.promote_types(dtype, torch.float32))
    return bias[(None,) * (4 - bias.dim())]
