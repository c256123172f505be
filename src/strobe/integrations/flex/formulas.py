"""A graph of PyTorch's operators as a formula in the few words that Strobe's functions know (docs/masks.md), its derivative,
and the Python function that computes it, which kernels compile.

A formula is a tuple, (word, parts ...): ("q_index",), ("number", 3), ("add", a, b). Equal formulas are equal tuples, and the
parts of a formula are shared, so all that walks one remembers by identity what it has seen.
"""

from __future__ import annotations

import hashlib
import linecache
import math as numbers
import operator
from collections.abc import Callable
from types import FunctionType

import torch

from strobe import math
from strobe.integrations.flex.tracing import Argument, Entry, Node, Operation, Traced

Formula = tuple

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|",
}  # fmt: skip
_CALLS = ("exp", "exp2", "log", "log2", "sqrt", "tanh", "abs", "maximum", "minimum", "where")
LEAVES = ("score", "batch", "head", "q_index", "kv_index", "number", "entry")

TRUE: Formula = ("number", True)
ZERO: Formula = ("number", 0.0)
ONE: Formula = ("number", 1.0)


class NoFormula(Exception):
    """What a graph does that a formula cannot say."""


def number(x) -> Formula:
    return "number", x


def formula_of(traced: Traced) -> Formula:
    """The formula of a graph. Entries of tensors from outside are leaves of it, ("entry", node). NoFormula if there is none."""
    made: dict[int, Formula] = {}
    for node in traced:
        made[id(node)] = _of_node(node, made)
    return made[id(traced.result)]


def _of_node(node: Node, made: dict[int, Formula]) -> Formula:
    if isinstance(node, Argument):
        return (node.name,)
    if isinstance(node, Entry):
        return "entry", node
    if not node.needs and (constant := _constant(node)) is not None:
        return number(constant)
    if isinstance(node, Operation) and node.needs:
        rule = _RULES.get(node.name)
        if rule is None:
            raise NoFormula(f"uses {node.operator}")
        if node.keywords.get("alpha", 1) != 1:
            raise NoFormula(f"uses {node.operator} with an alpha")
        parts = [made[id(one)] if isinstance(one, Node) else one for one in node.arguments]
        plain = [_as_number(part, one, node) for part, one in zip(parts, node.arguments, strict=True)]
        return rule(node, *plain)
    return "entry", node  # a tensor from outside, of one number


def _constant(node: Node):
    """The number that a node is, if the host knows it without asking a GPU, and nothing learns it."""
    if isinstance(node, Operation) and node.name in _NUMBERS:
        return _NUMBERS[node.name](node)
    if isinstance(node, Operation) and node.name in _COPIES:
        return _constant(node.arguments[0])
    graph = Traced(node)
    known = all(x.device.type == "cpu" and not x.requires_grad for x in graph.outside())
    if not known or any(one.needs or isinstance(one, Argument) for one in graph):
        return None
    value = graph.of_pairs({})
    return value.item() if value.numel() == 1 else None


def _filled(value) -> Callable[[Operation], object]:
    return lambda node: bool(value) if node.dtype == torch.bool else value


_NUMBERS = {
    "new_ones": _filled(1), "ones_like": _filled(1), "ones": _filled(1),
    "new_zeros": _filled(0), "zeros_like": _filled(0), "zeros": _filled(0),
    "scalar_tensor": lambda node: node.arguments[0],
    "full_like": lambda node: node.arguments[1], "new_full": lambda node: node.arguments[2],
    "full": lambda node: node.arguments[1],
}  # fmt: skip


def _as_number(part, given, node: Operation):
    """A part of an operation as a formula; a bool becomes 1 or 0 where the operation is arithmetic."""
    if isinstance(part, (bool, int, float)):
        return number(part)
    logical = node.name in (*_LOGIC, "where", "_to_copy", *_COPIES)
    if isinstance(given, Node) and given.dtype == torch.bool and not logical:
        return "where", part, number(1), number(0)
    return part


# ---- an operator -> a formula


def _floating(node: Operation, x: Formula) -> Formula:
    """x as a floating point number, where PyTorch makes one of integers."""
    given = node.arguments[0]
    return x if isinstance(given, Node) and given.dtype.is_floating_point else multiplied(x, ONE, always=True)


def _call(word: str) -> Callable:
    return lambda node, x: (word, _floating(node, x))


def _infix(word: str) -> Callable:
    return lambda node, a, b: (word, a, b)


def _div(node: Operation, a: Formula, b: Formula) -> Formula:
    mode = node.keywords.get("rounding_mode")
    if mode is None:
        return "div", _floating(node, a), b
    if mode == "floor":
        return _floor_div(node, a, b)
    raise NoFormula(f"uses {node.operator} with rounding_mode={mode!r}")


def _floor_div(node: Operation, a: Formula, b: Formula) -> Formula:
    """a // b, which kernels round towards 0: for a below 0 as minus the division of -a, rounded up."""
    divisor = b[1] if b[0] == "number" else None
    if node.dtype.is_floating_point or not isinstance(divisor, int) or isinstance(divisor, bool) or divisor < 1:
        raise NoFormula(f"uses {node.operator} of anything but an integer by a positive number")
    quotient = ("floordiv", a, b)
    if not _may_be_negative(a):
        return quotient
    up = ("floordiv", ("add", ("sub", number(0), a), number(divisor - 1)), b)
    return "where", ("lt", a, number(0)), ("sub", number(0), up), quotient


def _remainder(node: Operation, a: Formula, b: Formula) -> Formula:
    return "sub", a, ("mul", _floor_div(node, a, b), b)


def _may_be_negative(x: Formula) -> bool:
    """Whether an integer may be below 0; indices are not, nor what is added, multiplied or divided of such."""
    if x[0] == "number":
        return x[1] < 0
    if x[0] in ("add", "mul", "floordiv", "maximum"):
        return any(_may_be_negative(part) for part in x[1:])
    return x[0] not in ("batch", "head", "q_index", "kv_index", "abs")


def _power(node: Operation, x: Formula, exponent: Formula) -> Formula:
    n = exponent[1] if exponent[0] == "number" else None
    if n == 0.5:
        return "sqrt", _floating(node, x)
    if n not in (1, 2, 3, 4):
        raise NoFormula(f"uses {node.operator} with another exponent than 0.5, 1, 2, 3 or 4")
    result = x
    for _ in range(int(n) - 1):
        result = ("mul", result, x)
    return result


def _clamp(node: Operation, x: Formula, low: Formula | None = None, high: Formula | None = None) -> Formula:
    low = low if low is not None else _keyword(node, "min")
    high = high if high is not None else _keyword(node, "max")
    if low is not None:
        x = ("where", ("lt", x, low), low, x)
    return x if high is None else ("where", ("gt", x, high), high, x)


def _keyword(node: Operation, name: str) -> Formula | None:
    value = node.keywords.get(name)
    return None if value is None else number(value)


def _to_copy(node: Operation, x: Formula) -> Formula:
    given, wanted = node.arguments[0].dtype, node.dtype
    if given == torch.bool and wanted != torch.bool:
        return "where", x, number(1.0 if wanted.is_floating_point else 1), number(0.0 if wanted.is_floating_point else 0)
    if wanted == torch.bool and given != torch.bool:
        return "ne", x, number(0)
    if wanted.is_floating_point:
        return _floating(node, x)
    if given.is_floating_point:
        raise NoFormula(f"uses {node.operator} to make an integer of a floating point number")
    return x


def _not(node: Operation, x: Formula) -> Formula:
    if node.arguments[0].dtype != torch.bool:
        raise NoFormula(f"uses {node.operator} of numbers")
    return negated(x)


def _both(word: str) -> Callable:
    def rule(node: Operation, a: Formula, b: Formula) -> Formula:
        if node.dtype != torch.bool or any(isinstance(x, Node) and x.dtype != torch.bool for x in node.arguments):
            raise NoFormula(f"uses {node.operator} of numbers")
        decisive = word == "or"
        for one, other in ((a, b), (b, a)):
            if one[0] == "number":
                return number(decisive) if bool(one[1]) == decisive else other
        return word, a, b

    return rule


def _xor(node: Operation, a: Formula, b: Formula) -> Formula:
    if node.dtype != torch.bool:
        raise NoFormula(f"uses {node.operator} of numbers")
    return "or", ("and", a, negated(b)), ("and", negated(a), b)


def _where(node: Operation, condition: Formula, a: Formula, b: Formula) -> Formula:
    if condition[0] == "number":
        return a if condition[1] else b
    if node.dtype == torch.bool:
        return "or", ("and", condition, a), ("and", negated(condition), b)
    return "where", condition, a, b


_LOGIC = ("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor", "bitwise_not", "logical_not")
_COPIES = ("clone", "alias", "detach", "lift_fresh_copy", "lift_fresh")

_RULES: dict[str, Callable] = {
    **{word: _infix(word) for word in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum")},
    **{word: _call(word) for word in ("exp", "exp2", "log", "log2", "sqrt", "tanh")},
    **{name: (lambda node, x: x) for name in _COPIES if name != "detach"},
    "rsub": lambda node, a, b: ("sub", b, a),
    "neg": lambda node, x: ("sub", number(0), x),
    "abs": lambda node, x: ("abs", x),
    "div": _div, "floor_divide": _floor_div, "remainder": _remainder,
    "reciprocal": lambda node, x: ("div", ONE, x),
    "rsqrt": lambda node, x: ("div", ONE, ("sqrt", _floating(node, x))),
    "log1p": lambda node, x: ("log", ("add", ONE, x)),
    "sigmoid": lambda node, x: ("sigmoid", _floating(node, x)),
    "relu": lambda node, x: ("where", ("gt", x, number(0)), x, number(0)),
    "square": lambda node, x: ("mul", x, x),
    "pow": _power, "clamp": _clamp,
    "clamp_min": lambda node, x, low: _clamp(node, x, low),
    "clamp_max": lambda node, x, high: _clamp(node, x, None, high),
    "where": _where, "_to_copy": _to_copy,
    "bitwise_not": _not, "logical_not": _not, "bitwise_xor": _xor, "logical_xor": _xor,
    "bitwise_and": _both("and"), "logical_and": _both("and"), "bitwise_or": _both("or"), "logical_or": _both("or"),
}  # fmt: skip


# ---- what is known of formulas

_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def negated(x: Formula) -> Formula:
    """The formula that is true where x is not. (Of comparisons with NaN it is not, which masks do not compare.)"""
    if x[0] == "number":
        return number(not x[1])
    if x[0] in _OPPOSITE:
        return _OPPOSITE[x[0]], *x[1:]
    if x[0] in ("and", "or"):
        return ("or" if x[0] == "and" else "and"), negated(x[1]), negated(x[2])
    return x[1] if x[0] == "not" else ("not", x)


def leaves(formula: Formula) -> set[str]:
    """The words of a formula's leaves."""
    found: set[str] = set()
    seen: set[int] = set()
    stack = [formula]
    while stack:
        x = stack.pop()
        if id(x) not in seen:
            seen.add(id(x))
            if x[0] in LEAVES:
                found.add(x[0])
            else:
                stack += x[1:]
    return found


def added(a: Formula, b: Formula) -> Formula:
    if _is(a, 0):
        return b
    return a if _is(b, 0) else ("add", a, b)


def multiplied(a: Formula, b: Formula, always: bool = False) -> Formula:
    if not always:
        if _is(a, 0) or _is(b, 0):
            return ZERO
        if _is(a, 1) or _is(b, 1):
            return b if _is(a, 1) else a
    return "mul", a, b


def _is(x: Formula, value) -> bool:
    return x[0] == "number" and x[1] == value


# ---- derivatives


def derivative(formula: Formula) -> Formula:
    """d formula / d score, with PyTorch's choices where there is none. NoFormula if a word has no rule."""
    known: dict[int, Formula] = {}
    for x in in_order(formula):
        known[id(x)] = _derivative(x, known)
    return known[id(formula)]


def in_order(formula: Formula) -> list[Formula]:
    """A formula and its parts, each once, after those that it is made of."""
    order: list[Formula] = []
    seen: set[int] = set()
    stack = [(formula, False)]
    while stack:
        x, parts_done = stack.pop()
        if parts_done:
            order.append(x)
        elif id(x) not in seen:
            seen.add(id(x))
            stack += [(x, True), *((part, False) for part in reversed(x[1:] if x[0] not in LEAVES else ()))]
    return order


def _derivative(x: Formula, known: dict[int, Formula]) -> Formula:
    if x[0] == "score":
        return ONE
    if x[0] in LEAVES or x[0] in (*_OPPOSITE, "and", "or", "not", "floordiv"):
        return ZERO
    parts = x[1:]
    slopes = [known[id(part)] for part in parts]
    return ZERO if all(_is(slope, 0) for slope in slopes) else _SLOPES[x[0]](x, *parts, *slopes)


def _minus(x: Formula) -> Formula:
    return ZERO if _is(x, 0) else ("sub", ZERO, x)


def _chosen(condition: Formula, a: Formula, b: Formula) -> Formula:
    return a if a == b else ("where", condition, a, b)


def _of_quotient(x, a, b, da, db):
    return added(ZERO if _is(da, 0) else ("div", da, b), _minus(multiplied(("div", x, b), db)))


def _of_choice(larger: str) -> Callable:
    def slope(x, a, b, da, db):
        even = multiplied(number(0.5), added(da, db))
        smaller = "lt" if larger == "gt" else "gt"
        return _chosen((larger, a, b), da, _chosen((smaller, a, b), db, even))

    return slope


_SLOPES: dict[str, Callable] = {
    "add": lambda x, a, b, da, db: added(da, db),
    "sub": lambda x, a, b, da, db: added(da, _minus(db)),
    "mul": lambda x, a, b, da, db: added(multiplied(da, b), multiplied(a, db)),
    "div": _of_quotient,
    "where": lambda x, c, a, b, dc, da, db: _chosen(c, da, db),
    "exp": lambda x, a, da: multiplied(x, da),
    "exp2": lambda x, a, da: multiplied(multiplied(x, number(numbers.log(2.0))), da),
    "log": lambda x, a, da: ("div", da, a),
    "log2": lambda x, a, da: ("div", da, multiplied(number(numbers.log(2.0)), a)),
    "sqrt": lambda x, a, da: ("div", multiplied(number(0.5), da), x),
    "sigmoid": lambda x, a, da: multiplied(multiplied(x, ("sub", ONE, x)), da),
    "tanh": lambda x, a, da: multiplied(("sub", ONE, ("mul", x, x)), da),
    "abs": lambda x, a, da: ("where", ("gt", a, number(0)), da, ("where", ("lt", a, number(0)), _minus(da), number(0))),
    "maximum": _of_choice("gt"),
    "minimum": _of_choice("lt"),
}


def of_pairs(formula: Formula, values: dict[str, torch.Tensor]):
    """A formula's value for many pairs: a number, or a tensor that has a gradient with respect to those from outside."""
    made: dict[int, object] = {}
    for x in in_order(formula):
        made[id(x)] = _value(x, made, values)
    return made[id(formula)]


def _value(x: Formula, made: dict[int, object], values: dict[str, torch.Tensor]):
    word, *parts = x
    if word == "number":
        return parts[0]
    if word == "entry":
        return Traced(parts[0]).of_pairs(values)
    if word in LEAVES:
        return values[word]
    given = [made[id(part)] for part in parts]
    return getattr(math, word)(*given) if word in _CALLS else _OPERATORS[word](*given)


_OPERATORS: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "floordiv": operator.floordiv,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "and": operator.and_, "or": operator.or_, "not": operator.invert, "sigmoid": torch.sigmoid,
}  # fmt: skip


# ---- Python functions


def function_of(formula: Formula, name: str, parameters: tuple[str, ...]) -> FunctionType:
    """A Python function of these parameters that computes a formula without entries of tensors, with `strobe.math`. Equal
    formulas have functions of the same source."""
    lines: list[str] = []
    names: dict[int, str] = {}
    for x in in_order(formula):
        if x[0] in parameters:
            names[id(x)] = x[0]
        elif x[0] == "number":
            names[id(x)] = _literal(x[1])
        else:
            names[id(x)] = f"x{len(lines)}"
            lines.append(f"    x{len(lines)} = {_expression(x, names)}")
    source = f"def {name}({', '.join(parameters)}):\n" + "\n".join([*lines, f"    return {names[id(formula)]}", ""])
    file = f"<{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    # A kernel is compiled from a function's source, which this is where the standard library looks it up.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"math": math, "infinity": numbers.inf, "nan": numbers.nan, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return scope[name]  # type: ignore[return-value]


def with_dtype_of_score(formula: Formula) -> Formula:
    """The formula with numbers that stand alone made numbers of the score's dtype: a function must return a tensor of it."""
    if leaves(formula) == {"number"}:
        formula = number(of_pairs(formula, {}))
    if formula[0] == "number":
        return "where", ("ge", ("kv_index",), number(0)), formula, ("score",)
    if formula[0] == "where" and formula[2][0] == formula[3][0] == "number":
        _, condition, a, b = formula
        return "where", condition, a, ("where", condition, ("score",), b)
    return formula


def _expression(x: Formula, names: dict[int, str]) -> str:
    word, *parts = x
    given = [names[id(part)] for part in parts]
    if word in _INFIX:
        return f"{given[0]} {_INFIX[word]} {given[1]}"
    if word == "floordiv":
        return f"{given[0]} // {given[1]}"
    if word == "not":
        return f"~{given[0]}"
    if word == "sigmoid":  # a word of its own for its derivative, which is 0, not 0 * inf, at -inf
        return f"1.0 / (1.0 + math.exp(0.0 - {given[0]}))"
    assert word in _CALLS, word
    return f"math.{word}({', '.join(given)})"


def _literal(value) -> str:
    if isinstance(value, float) and not numbers.isfinite(value):
        return "nan" if value != value else "infinity" if value > 0 else "-infinity"
    return repr(value) if value >= 0 else f"({value!r})"
