"""Makes a kernel callable on the CPU, with its source unchanged.

A jitted function is compiled Python that Triton reads and never runs. Here its code object runs, over globals and closure
cells in which every name of Gluon's is replaced by what simulates it (`language`), and every jitted function, aggregate and
constexpr by its lifted self. What is made for one launch is dropped with it: nothing is shared with the next.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import triton.language.core as tl
import triton.language.standard
from triton.runtime.jit import JITCallable

from strobe.sim import program, registers
from strobe.sim.errors import IllegalOperation, SimulationError, Unsupported
from strobe.sim.kernel_source import where
from strobe.sim.language import REGISTERS, TYPES, simulated, unwrap
from strobe.sim.tensor import Value

_HOST = {*sys.stdlib_module_names, "torch", "numpy"}
"""Packages whose functions run as they are."""

_HERE = __name__.rpartition(".")[0]

_registered: dict[int, tuple[Any, Callable]] = {}


def register(function, implementation: Callable) -> None:
    """Simulate a jitted function by `implementation`, called in its place with simulated tensors: for inline assembly.

    A kernel's assembly stands in a small jitted function, whose parameters are the implementation's. For bar.sync:

        @gluon.jit
        def sync(NUMBER: gl.constexpr, THREADS: gl.constexpr):
            gl.inline_asm_elementwise(f"bar.sync {NUMBER}, {THREADS}; mov.u32 $0, 0;", ...)

        register(sync, strobe.sim.named_barrier_sync)

    In place of a function the text of the assembly will do, whatever its spaces; the implementation is called with its
    operands. TypeError if `function` is neither or `implementation` is not callable.
    """
    if isinstance(function, str):
        program.assembly[" ".join(function.split())] = implementation
        return
    if not _is_jitted(function):
        raise TypeError(f"register takes a jitted function, got {function!r}")
    if not callable(implementation):
        raise TypeError(f"the implementation of {function.__name__} must be callable, got {implementation!r}")
    _registered[id(function)] = (function, implementation)


def lift(thing, overrides: dict[Any, Callable] | None = None) -> Any:
    """`thing` as simulated code sees it. overrides: jitted function -> implementation, for this call alone."""
    return _Lifter({id(function): (function, body) for function, body in (overrides or {}).items()}).lift(thing)


@functools.cache
def _method(name: str) -> Callable | None:
    """The function that is the method `name` of a tensor, as in x.sum(0)."""
    if not hasattr(tl.tensor, name):
        return None
    if name in REGISTERS:
        return REGISTERS[name]
    function = getattr(triton.language.standard, name, None)
    return None if function is None else lift(function)


Value.method = staticmethod(_method)


class _Lifter:
    """Lifts the things of one launch, each once: id of the original -> it (so that the id stays its own) and its lifted
    self."""

    def __init__(self, overrides: dict[int, tuple[Any, Callable]]):
        self._done: dict[int, tuple[Any, Any]] = {**_registered, **overrides}
        self._globals: dict[int, dict[str, Any]] = {}

    def lift(self, thing) -> Any:
        thing = unwrap(thing)
        if isinstance(thing, (int, float, str, Value)) or thing is None:
            return thing
        if id(thing) in self._done:
            return self._done[id(thing)][1]
        if isinstance(thing, (tuple, list)):
            return self._sequence(thing)
        if isinstance(thing, ModuleType):
            return thing if _package(thing.__name__) in _HOST else self._remember(thing, _Module(thing, self))
        if getattr(thing, "__triton_aggregate__", False) and isinstance(thing, type):
            return self._aggregate(thing)
        if isinstance(thing, type):
            return self._class(thing)
        if callable(thing):
            return self._callable(thing)
        return thing

    def _remember(self, original, lifted):
        self._done[id(original)] = (original, lifted)
        return lifted

    def _sequence(self, items):
        """The lifted sequence: a copy only if something in it changes, as kernels may compare tables by identity."""
        lifted = [self.lift(item) for item in items]
        if all(a is b for a, b in zip(lifted, items, strict=True)):
            return items
        return type(items)(*lifted) if hasattr(items, "_fields") else type(items)(lifted)

    def _class(self, cls):
        if cls in TYPES:
            return TYPES[cls]
        if _package(cls.__module__) == "triton":
            return simulated(cls.__module__, cls.__name__) or cls
        return cls

    # ---- functions

    def _callable(self, thing):
        module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__name__", "")
        jitted = _is_jitted(thing)
        if jitted:
            module, name = thing.fn.__module__, thing.fn.__name__
        builtin = getattr(thing, "__triton_builtin__", False)  # one of ours may stand in for a name that old Triton lacks
        if builtin or _package(module) == "triton":
            found = simulated(module, name) if ".amd." not in module else None
            removed = _removal(thing)
            if removed:
                return self._remember(thing, _that_raises(IllegalOperation, removed))
            if found is not None:
                return self._remember(thing, found)
        if type(thing).__name__ == "ConstexprFunction":
            return self._remember(thing, self._constexpr_function(thing.fn))
        if builtin:
            return self._remember(thing, _that_raises(Unsupported, f"the simulator has no model of {module}.{name}"))
        if jitted:
            return self._function(thing.fn, thing)
        if isinstance(thing, FunctionType) and _package(module) not in _HOST | {"triton"} and not module.startswith(_HERE):
            return self._function(thing, thing)
        if isinstance(thing, BuiltinFunctionType):
            return _BUILTINS.get(name, thing) if thing is getattr(builtins, name, None) else thing
        return thing

    def _constexpr_function(self, function: FunctionType) -> Callable:
        """A constexpr function that runs as it is, on plain values, once in a launch for the same ones (Gluon searches long for
        some layouts); what it returns may name things to lift."""
        known: dict[tuple, Any] = {}

        def asserted(*args, **kwargs):
            try:
                return self.lift(function(*args, **kwargs))
            except AssertionError as error:  # the compiler's error, not that of a check of results
                raise IllegalOperation(f"{where()}: an assertion in {function.__name__} failed: {error}") from error

        def run(*args, **kwargs):
            values = tuple(map(unwrap, args))
            if kwargs or not all(map(_constant, values)):
                return asserted(*values, **{name: unwrap(value) for name, value in kwargs.items()})
            key = (*values, *map(type, values))
            if key not in known:
                known[key] = asserted(*values)
            return known[key]

        run.__name__ = function.__name__
        return run

    def _function(self, function: FunctionType, key) -> FunctionType:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        names = self._globals_of(function)
        lifted = FunctionType(function.__code__, names, function.__name__, None, cells)
        lifted.__qualname__, lifted.__module__, lifted.__doc__ = function.__qualname__, function.__module__, function.__doc__
        self._remember(key, lifted)
        if function is not key:
            self._remember(function, lifted)
        lifted.__defaults__ = function.__defaults__ and tuple(self.lift(value) for value in function.__defaults__)
        lifted.__kwdefaults__ = function.__kwdefaults__ and {k: self.lift(v) for k, v in function.__kwdefaults__.items()}
        for name in _names(function.__code__):
            if name in function.__globals__ and name not in names:
                names[name] = self.lift(function.__globals__[name])
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            if _filled(original):
                cell.cell_contents = self.lift(original.cell_contents)
        return lifted

    def _globals_of(self, function: FunctionType) -> dict[str, Any]:
        """The globals that lifted functions of one module share, filled as functions need them."""
        original = function.__globals__
        if id(original) not in self._globals:
            self._globals[id(original)] = {"__builtins__": _BUILTINS, "__name__": function.__module__}
            self._remember(original, self._globals[id(original)])
        return self._globals[id(original)]

    # ---- aggregates

    def _aggregate(self, original: type) -> type:
        """A plain class with the aggregate's fields and lifted methods."""
        cls = type(original.__name__, (_Aggregate,), {"__module__": original.__module__, "__doc__": original.__doc__})
        self._remember(original, cls)
        init: Any = original.hash_attrs[0]  # type: ignore[attr-defined]
        if getattr(init, "__triton_builtin__", False) or init is object.__init__:
            fields = getattr(original, "__aggregate_fields__", None) or tuple(original.__annotations__)
            defaults = getattr(original, "__aggregate_defaults__", {})
            initialise: Callable = _initialiser(fields, {name: self.lift(value) for name, value in defaults.items()})
        else:
            function = getattr(init, "fn", init)
            initialise = self._function(function, function)
        cls.__init__ = initialise  # type: ignore[misc]
        for name, member in vars(original).items():
            if isinstance(member, (JITCallable, FunctionType)) and name not in _INFRASTRUCTURE:
                setattr(cls, name, self.lift(member))
        return cls


_INFRASTRUCTURE = {
    "__new__",
    "__init__",
    "__setattr__",
    "_get_instance",
    "_set_name",
    "_flatten_ir",
    "__annotate__",
    "__annotate_func__",
}


class _Aggregate:
    """Base of lifted aggregates. A buffer gets the name of the field that holds it."""

    def __setattr__(self, name: str, value) -> None:
        for view in value if isinstance(value, tuple) else (value,):
            if hasattr(view, "label"):
                view.label(name)
        object.__setattr__(self, name, value)

    @property
    def type(self):
        return self


def _initialiser(fields, defaults) -> Callable:
    def initialise(self, *args, **kwargs):
        given = {**defaults, **dict(zip(fields, args, strict=False)), **kwargs}
        if len(args) > len(fields) or set(given) != set(fields):
            raise IllegalOperation(
                f"{where()}: {type(self).__name__} has the fields {', '.join(fields)}, got {', '.join(given)}"
            )
        for name, value in given.items():
            setattr(self, name, value)

    return initialise


class _Module:
    """A module whose attributes are lifted when they are used."""

    def __init__(self, module: ModuleType, lifter: _Lifter):
        self.__dict__["_lifted"] = (module, lifter)

    def __getattr__(self, name: str):
        module, lifter = self.__dict__["_lifted"]
        value = lifter.lift(_uninterpreted(module.__name__, name, getattr(module, name)))
        self.__dict__[name] = value
        return value


def _uninterpreted(module: str, name: str, value) -> Any:
    """The value of a module's name, or the original of which it stands in the place: kernels that ran in Triton's interpreter
    leave its own functions in the places of some of the language's."""
    if getattr(getattr(value, "func", value), "__module__", None) != "triton.runtime.interpreter":
        return value
    original = (getattr(value, "__kwdefaults__", None) or {}).get("member")
    return original or simulated(module, name) or value


def _is_jitted(thing) -> bool:
    """Whether a thing is a function jitted by Gluon, by Triton, or by Triton's interpreter."""
    return isinstance(getattr(thing, "fn", None), FunctionType)


def _that_raises(error: type[SimulationError], says: str) -> Callable:
    def raises(*_, **__):
        raise error(f"{where()}: {says}")

    return raises


def _removal(function) -> str | None:
    """The error that Triton raises for a name that it has removed; None for others."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    texts = code.co_consts if code else ()
    return next((text for text in texts if isinstance(text, str) and "has been removed" in text), None)


def _constant(value) -> bool:
    """Whether equal values stay equal: so do integers, and dataclasses whose hash says so."""
    return type(value) in (int, bool) or (is_dataclass(value) and type(value).__hash__ not in (None, object.__hash__))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _names(code: CodeType) -> set[str]:
    """The global names that a code object may use, those of its nested functions included."""
    return set(code.co_names).union(*(_names(const) for const in code.co_consts if isinstance(const, CodeType)))


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def _chosen(plain: Callable, simulated_: Callable) -> Callable:
    """Python's min or max, which for simulated values is Gluon's."""

    def choose(*args, **kwargs):
        if not any(isinstance(x, Value) for x in args):
            return plain(*args, **kwargs)
        result, *rest = args
        for x in rest:
            result = simulated_(result, x)
        return result

    return choose


_BUILTINS: dict[str, Any] = {
    **vars(builtins),
    "min": _chosen(builtins.min, registers.minimum),
    "max": _chosen(builtins.max, registers.maximum),
    "range": program.steps,
    "abs": lambda x: registers.absolute(x) if isinstance(x, Value) else builtins.abs(x),
}
