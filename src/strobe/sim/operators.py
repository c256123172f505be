"""The binary operators: of tensors by torch (or numpy), of numbers by Python."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch


class Op(NamedTuple):
    """A binary operator: `torch` and `numpy` of tensors, `host` of numbers. takes_number: `torch` takes a number on the
    right."""

    name: str
    symbol: str
    torch: Callable
    numpy: Callable
    host: Callable
    float_pipe: str = "alu"
    takes_number: bool = False
    compares: bool = False
    integers: bool = False
    divides: bool = False


def _quotient(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) or a % b == 0 else a // b + 1


def _ratio(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0.0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _remainder(a, b):
    if isinstance(a, float):
        return math.nan if b == 0.0 or math.isinf(a) else math.fmod(a, b)
    return a - b * _quotient(a, b)


def _without_zero(divisor: torch.Tensor) -> torch.Tensor:
    """The divisor with 1 for 0: lanes that a mask leaves out may divide by zero, and the hardware does not trap."""
    return divisor if bool((divisor != 0).all()) else torch.where(divisor == 0, 1, divisor)


def _shift(a: torch.Tensor, b: torch.Tensor, left: bool) -> torch.Tensor:
    """Shifted bits; an amount beyond the width shifts all of them out, as in PTX."""
    bits = a.element_size() * 8
    amount = torch.where((b < 0) | (b >= bits), bits, b)
    if left:
        return torch.where(amount == bits, 0, torch.bitwise_left_shift(a, amount.clamp(max=bits - 1))).to(a.dtype)
    return torch.bitwise_right_shift(a, amount.clamp(max=bits - 1))


def _smaller(a, b):
    return b if a != a else a if b != b else min(a, b)


def _larger(a, b):
    return b if a != a else a if b != b else max(a, b)


def _extreme(of_floats, of_integers):
    return lambda a, b: (of_floats if a.dtype.is_floating_point else of_integers)(a, b)


ADD = Op("add", "+", torch.add, np.add, operator.add, "fma", True)
SUB = Op("sub", "-", torch.sub, np.subtract, operator.sub, "fma", True)
MUL = Op("mul", "*", torch.mul, np.multiply, operator.mul, "fma", True)
DIVIDE = Op("truediv", "/", torch.true_divide, np.true_divide, _ratio, "mufu", divides=True)
FLOORDIV = Op("floordiv", "//", lambda a, b: torch.div(a, _without_zero(b), rounding_mode="trunc"),
              lambda a, b: a // np.where(b == 0, 1, b), _quotient, divides=True, integers=True)  # fmt: skip
MOD = Op("mod", "%", lambda a, b: torch.fmod(a, b if a.dtype.is_floating_point else _without_zero(b)),
         lambda a, b: a % np.where(b == 0, 1, b), _remainder, divides=True)  # fmt: skip
AND = Op("and", "&", torch.bitwise_and, np.bitwise_and, operator.and_, integers=True)
OR = Op("or", "|", torch.bitwise_or, np.bitwise_or, operator.or_, integers=True)
XOR = Op("xor", "^", torch.bitwise_xor, np.bitwise_xor, operator.xor, integers=True)
LSHIFT = Op("lshift", "<<", partial(_shift, left=True), np.left_shift, lambda a, b: a << min(b, 64), integers=True)
RSHIFT = Op("rshift", ">>", partial(_shift, left=False), np.right_shift, operator.rshift, integers=True)
LESS = Op("lt", "<", torch.lt, np.less, operator.lt, takes_number=True, compares=True)
LESS_EQUAL = Op("le", "<=", torch.le, np.less_equal, operator.le, takes_number=True, compares=True)
GREATER = Op("gt", ">", torch.gt, np.greater, operator.gt, takes_number=True, compares=True)
GREATER_EQUAL = Op("ge", ">=", torch.ge, np.greater_equal, operator.ge, takes_number=True, compares=True)
EQUAL = Op("eq", "==", torch.eq, np.equal, operator.eq, takes_number=True, compares=True)
NOT_EQUAL = Op("ne", "!=", torch.ne, np.not_equal, operator.ne, takes_number=True, compares=True)
MINIMUM = Op("minimum", "min", _extreme(torch.fmin, torch.minimum), np.minimum, _smaller)
MAXIMUM = Op("maximum", "max", _extreme(torch.fmax, torch.maximum), np.maximum, _larger)
SIMPLE = (ADD, SUB, MUL, AND, OR, XOR)
OPERATORS = (ADD, SUB, MUL, DIVIDE, FLOORDIV, MOD, AND, OR, XOR, LSHIFT, RSHIFT,
             LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, EQUAL, NOT_EQUAL)  # fmt: skip
