"""Functions that users pass: one plain Python function, run over torch tensors by the references and compiled into kernels.

Such a function may use its arguments, numbers, Python's operators and comparisons (with `&`, `|`, `~` between them), `abs`,
`min`, `max`, `strobe.math`, and functions of the same kind. What it names from outside, numbers of its module or of the
function that made it, is read when the Score or the Mask is made: so one `def` with other numbers is another function.

The same source serves everyone (`translated`): a copy of the function whose globals and closure hold, in place of
`strobe.math`, the module of that name for torch, Triton or Gluon.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import inspect
import marshal
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from strobe import math
from strobe.call.torch_internals import constant_when_compiled

_MODULES = ("strobe.math", "triton.language")
"""Names of the modules that count as `strobe.math`: a function that was written for Triton may keep its own."""

_BUILTINS = {"abs": "abs", "min": "minimum", "max": "maximum"}
"""Python's name -> that of `strobe.math`, which takes tensors."""

_MAY_USE = f"numbers, {', '.join(_BUILTINS)}, strobe.math and functions of the same kind"


@dataclass(frozen=True)
class Function:
    """A user's function. Two with the same source and the same numbers are equal."""

    name: str
    key: str
    """Name of the function in operators, whose arguments cannot be functions; made of its source, so it is the same in every
    process."""
    python: FunctionType = field(compare=False, repr=False)
    """The function as the user wrote it, with the values that its names had when it was given."""

    def __call__(self, *arguments):
        """Apply the function to torch tensors."""
        return _on_tensors(self)(*arguments)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self):
        return _unpickled, (self.name, self.key, _pickled(self.python))


_known: dict[str, Function] = {}


@constant_when_compiled
def score_function(given) -> Function:
    """The Function of what a user gave for a score. TypeError if it cannot be one."""
    return _function("score: function", given, ("score", "batch", "head", "q_index", "kv_index"))


@constant_when_compiled
def score_function_gradient(given) -> Function:
    """The Function of what a user gave for a score function's derivative. TypeError if it cannot be one."""
    return _function("score: function_gradient", given, ("score", "batch", "head", "q_index", "kv_index"))


@constant_when_compiled
def mask_function(given) -> Function:
    """The Function of what a user gave for a mask. TypeError if it cannot be one."""
    return _function("mask: function", given, ("batch", "head", "q_index", "kv_index"))


def both(first: Function, second: Function) -> Function:
    """The mask function that is true where both of two are."""
    if first == second:
        return first
    a, b = first.python, second.python

    def both(batch, head, q_index, kv_index):
        return a(batch, head, q_index, kv_index) & b(batch, head, q_index, kv_index)

    return mask_function(both)


def known(key: str | None) -> Function | None:
    """The Function of a key, None for None. ValueError if this process has not made it."""
    if key is None:
        return None
    if key not in _known:
        name = key.partition("@")[0]
        raise ValueError(f"function {name} is unknown in this process: make the strobe.Score or strobe.Visible that holds it")
    return _known[key]


# ---- from what a user gives to a Function


def _function(what: str, given, parameters: tuple[str, ...]) -> Function:
    if isinstance(given, Function):
        return given
    python = _unwrapped(given)
    if not isinstance(python, FunctionType) or python.__name__ == "<lambda>":
        raise TypeError(f"{what} must be a Python function made by def (or triton.jit of one), got {given!r}")
    taken = inspect.signature(python).parameters.values()
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in taken)
    if len(taken) != len(parameters) or not plain:
        raise TypeError(f"{what} must take ({', '.join(parameters)}), got {python.__name__}{inspect.signature(python)}")
    key = _key(what, python)
    if key not in _known:
        function = Function(python.__name__, key, _frozen(python))
        _try(what, function, parameters)
        _known[key] = function
    return _known[key]


def _unwrapped(given):
    """The Python function within triton.jit or gluon.jit; anything else as it is."""
    inner = getattr(given, "fn", given)
    return inner if isinstance(inner, FunctionType) else given


def _key(what: str, function: FunctionType) -> str:
    """The key of a function: name@hash of its source and of everything that it names."""
    digest = hashlib.sha256(_source(what, function.__code__).encode())
    for name, value in sorted(_outside(function).items()):
        digest.update(f"{name}={_described(what, function, name, value)}\n".encode())
    return f"{function.__name__}@{digest.hexdigest()[:16]}"


@functools.cache
def _source(what: str, code: CodeType) -> str:
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        raise TypeError(f"{what} must not define functions within itself (nor use comprehensions), as {code.co_name} does")
    if any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code)):
        raise TypeError(f"{what} must not import within itself, as {code.co_name} does: import strobe.math beside it")
    try:
        return inspect.getsource(code)
    except OSError:
        raise TypeError(f"{what} must be defined in a file, for kernels are compiled from its source: {code.co_name}") from None


def _described(what: str, function: FunctionType, name: str, value) -> str:
    """The value of a name, as text. TypeError if kernels cannot know it."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, ModuleType) and value.__name__ in ("strobe", *_MODULES):
        return value.__name__
    if _in_math(value) is not None:
        return f"strobe.math.{_in_math(value)}"
    helper = _unwrapped(value)
    if isinstance(helper, FunctionType):
        return _key(what, helper)
    raise TypeError(f"{what} {function.__name__} uses {name}, a {type(value).__name__}: it may use {_MAY_USE}")


def _in_math(value) -> str | None:
    """The name in `strobe.math` of a function of that module, of Triton's of that name, or of a Python builtin."""
    name = getattr(value, "__name__", "")
    if name in _BUILTINS and value is getattr(builtins, name):
        return _BUILTINS[name]
    if name in math.__all__:
        if value is getattr(math, name) or (getattr(value, "__module__", None) or "").startswith("triton.language"):
            return name
    return None


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    return tuple({one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def _outside(function: FunctionType) -> dict[str, Any]:
    """The names that a function uses and does not define itself, with their values now."""
    known_names = vars(builtins) | function.__globals__
    names = {name: known_names[name] for name in _global_names(function.__code__) if name in known_names}
    return names | _cells(function)


def _cells(function: FunctionType) -> dict[str, Any]:
    closure = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, closure, strict=True)}


def _frozen(function: FunctionType) -> FunctionType:
    """A copy of the function that keeps the values which its names have now."""

    def change(value):
        helper = _unwrapped(value)
        return _frozen(helper) if isinstance(helper, FunctionType) and _in_math(value) is None else value

    return _copy(function, change)


def _copy(function: FunctionType, change: Callable[[Any], Any]) -> FunctionType:
    """A copy of a function in which every value that it names from outside is changed."""
    names, cells = {name: change(value) for name, value in _outside(function).items()}, _cells(function)
    scope = {"__name__": function.__module__, "__builtins__": builtins, **names}
    closure = tuple(CellType(names[name]) for name in cells)
    copy = FunctionType(function.__code__, scope, function.__name__, None, closure)
    copy.__qualname__ = function.__qualname__
    return copy


def _try(what: str, function: Function, parameters: tuple[str, ...]) -> None:
    """Call the function for a tile of 2 rows and 3 keys. TypeError if it fails, or does not return what it should."""
    tile = {"score": torch.zeros(1, 1, 2, 3), "q_index": torch.arange(2)[:, None], "kv_index": torch.arange(3)[None, :]}
    number = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        result = function(*(tile.get(name, number) for name in parameters))
    except Exception as error:
        raise TypeError(
            f"{what} {function} fails on tensors ({type(error).__name__}: {error}); it may use {_MAY_USE}"
        ) from error
    returned = result.dtype if isinstance(result, torch.Tensor) else type(result).__name__
    if "score" in parameters and not (isinstance(returned, torch.dtype) and returned.is_floating_point):
        raise TypeError(f"{what} {function} must return a floating point tensor, got {returned}")
    if "score" not in parameters and returned != torch.bool:
        raise TypeError(f"{what} {function} must return a bool tensor, got {returned}")


# ---- to other processes, and back


def _pickled(function: FunctionType) -> tuple:
    """A function as what pickle takes: its compiled code and what it names. Functions that are defined within others are, too.
    Kernels are compiled from its source, so its file must be there where it is unpickled."""
    cells = _cells(function)
    names = {name: _pickled_value(value) for name, value in _outside(function).items() if name not in vars(builtins)}
    return marshal.dumps(function.__code__), function.__module__, function.__qualname__, names, tuple(cells)


def _pickled_value(value) -> tuple[str, Any]:
    if isinstance(value, ModuleType):
        return "module", value.__name__
    helper = _unwrapped(value)
    if isinstance(helper, FunctionType) and _in_math(value) is None:
        return "function", _pickled(helper)
    return "value", value


def _unpickled(name: str, key: str, pickled: tuple) -> Function:
    if key not in _known:
        _known[key] = Function(name, key, _unpickled_function(*pickled))
    return _known[key]


def _unpickled_function(
    code: bytes, module: str, qualname: str, names: dict[str, tuple], cells: tuple[str, ...]
) -> FunctionType:
    from_pickle: dict[str, Callable] = {
        "module": import_module,
        "function": lambda given: _unpickled_function(*given),
        "value": lambda given: given,
    }
    values = {name: from_pickle[kind](given) for name, (kind, given) in names.items()}
    scope = {"__name__": module, "__builtins__": builtins, **values}
    closure = tuple(CellType(values[name]) for name in cells)
    function = FunctionType(marshal.loads(code), scope, qualname.rpartition(".")[2], None, closure)
    function.__qualname__ = qualname
    return function


# ---- from a Function to what runs


def translated(
    function: FunctionType,
    namespace: ModuleType,
    compiled: Callable[[FunctionType], Any] = lambda f: f,
    constant: Callable[[Any], Any] = lambda x: x,
):
    """`compiled(copy)` of a copy of the function in which `namespace` stands for `strobe.math` and `constant(x)` for a number
    x; the functions that it calls are translated in the same way.

    A copy's name has the function's key in it: within a kernel Triton takes functions of one name for the same function, and a
    maker of functions gives all that it makes one name."""

    def change(value):
        if isinstance(value, (bool, int, float)):
            return constant(value)
        if isinstance(value, ModuleType):
            return _package_with(namespace) if value.__name__ == "strobe" else namespace
        if _in_math(value) is not None:
            return getattr(namespace, _in_math(value) or "")
        return translated(_unwrapped(value), namespace, compiled, constant)

    copy = _copy(function, change)
    copy.__qualname__ += "_" + _key("function", function).partition("@")[2]
    return compiled(copy)


def _package_with(namespace: ModuleType) -> ModuleType:
    """A package that stands for `strobe` and holds `strobe.math` alone."""
    package = ModuleType("strobe")
    package.math = namespace  # type: ignore[attr-defined]
    return package


@functools.cache
def _on_tensors(function: Function):
    return translated(function.python, math)
