"""What a score_mod or a mask_mod computes: the operators that PyTorch runs when it is called for one pair, kept as a graph.

FlexAttention's functions are Python functions of tensors with one number each. `trace` calls one for pair (0, 0), looks at
every operator that runs, and returns the graph of those; `Traced.of_pairs` runs the same operators for many pairs at once.
Tensors that the function reads from outside are part of the graph, themselves and not their numbers: gradients reach them.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

PAIR = ("batch", "head", "q_index", "kv_index")
"""The arguments of a mask_mod; those of a score_mod have the score ahead."""

_MAKERS = {
    "new_ones", "new_zeros", "new_full", "full_like", "zeros_like", "ones_like", "scalar_tensor", "full", "ones", "zeros",
}  # fmt: skip
"""Operators that make a tensor of one number, whatever the shape of what they are given."""

_COPIES = {"_to_copy", "clone", "detach", "alias", "lift_fresh_copy", "lift_fresh"}

_UNTAGGED = {"floor_divide"}
"""Operators of single numbers that PyTorch does not mark as such."""


@dataclass(frozen=True, eq=False)
class Node:
    """A value in the graph: an argument, a tensor from outside, or what an operator makes of others."""

    dtype: torch.dtype
    dims: int
    needs: frozenset[str]
    """The names of the arguments that it depends on."""


@dataclass(frozen=True, eq=False)
class Argument(Node):
    name: str


@dataclass(frozen=True, eq=False)
class Outside(Node):
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Entry(Node):
    """An entry of a tensor from outside, `base[indices]`. With fewer indices than dims it is a part, to be indexed on."""

    base: Node
    indices: tuple[Node, ...]
    whole: bool
    """Whether there is an index for every dim."""


@dataclass(frozen=True, eq=False)
class Operation(Node):
    operator: Any
    arguments: tuple
    """Nodes, lists of nodes, and what else the operator was given."""
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        """The operator's name without `aten` and its overload."""
        return self.operator.overloadpacket.__name__


class Traced:
    """The graph of a function."""

    def __init__(self, result: Node):
        self.result = result

    def __iter__(self) -> Iterator[Node]:
        """Every node, each after those that it is made of."""
        seen: set[int] = set()
        stack: list[tuple[Node, bool]] = [(self.result, False)]
        while stack:
            node, inputs_done = stack.pop()
            if inputs_done:
                yield node
            elif id(node) not in seen:
                seen.add(id(node))
                stack += [(node, True), *((one, False) for one in inputs(node))]

    def outside(self) -> list[torch.Tensor]:
        """The tensors that the function reads from outside."""
        return [node.tensor for node in self if isinstance(node, Outside)]

    def of_pairs(self, values: dict[str, torch.Tensor], result: Node | None = None) -> torch.Tensor:
        """The value of a node (by default the result) for many pairs: values[name] are an argument's, which broadcast."""
        made: dict[int, Any] = {}

        def value(given):
            if isinstance(given, Node):
                return made[id(given)]
            return [value(one) for one in given] if isinstance(given, list) else given

        for node in self if result is None else Traced(result):
            if isinstance(node, Argument):
                made[id(node)] = values[node.name]
            elif isinstance(node, Outside):
                made[id(node)] = node.tensor
            elif isinstance(node, Entry):
                made[id(node)] = made[id(node.base)][tuple(made[id(index)].long() for index in node.indices)]
            elif isinstance(node, Operation):
                arguments = [value(one) for one in node.arguments]
                made[id(node)] = node.operator(*arguments, **node.keywords)
        return made[id(self.result if result is None else result)]


def inputs(node: Node) -> list[Node]:
    """The nodes that a node is made of."""
    if isinstance(node, Entry):
        return [node.base, *node.indices]
    return list(_nodes(node.arguments)) if isinstance(node, Operation) else []


def _nodes(given) -> Iterator[Node]:
    for one in given:
        if isinstance(one, Node):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _nodes(one)


def trace(what: str, function: Callable, names: tuple[str, ...], device: torch.device) -> Traced:
    """The graph of a function of these arguments. TypeError if it is not a function of single numbers."""
    key = _values_of(function)
    known = _traced.get(function) if key is not None else None
    if known is not None and known[0] == (key, device):
        return known[1]
    traced = _trace(what, function, names, device)
    if key is not None:
        _traced[function] = (key, device), traced
    return traced


_traced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Function -> ((what it named when it was traced, device), its graph)."""


def _trace(what: str, function: Callable, names: tuple[str, ...], device: torch.device) -> Traced:
    recorder = _Recorder(what)
    arguments = []
    for name in names:
        x = torch.zeros(1, dtype=torch.float32 if name == "score" else torch.int32, device=device)
        recorder.keep(x, Argument(x.dtype, 1, frozenset([name]), name))
        arguments.append(x)
    try:
        with torch.no_grad(), recorder:
            result = function(*arguments)
        if not isinstance(result, torch.Tensor):
            raise _Refused(f"{what} must return a tensor, got {type(result).__name__}")
        node = recorder.node(result)
    except _Refused as refusal:
        raise TypeError(str(refusal)) from None
    if result.numel() != 1 or (isinstance(node, Entry) and not node.whole):
        raise TypeError(f"{what} must return one number for a pair, got a tensor of shape {list(result.shape)}")
    return Traced(node)


class _Refused(Exception):
    """What a TypeError says later: one that is raised within an operator, Python takes for "try the other operand"."""


class _Recorder(TorchDispatchMode):
    """Keeps every operator that runs on what depends on the arguments, or on tensors from outside."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.nodes: dict[int, Node] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def keep(self, x: torch.Tensor, node: Node) -> None:
        """Remember that a tensor is a node's, and keep it, so that no other one gets its id."""
        self.nodes[id(x)], self.tensors[id(node)] = node, x

    def node(self, x: torch.Tensor) -> Node:
        if id(x) not in self.nodes:
            self.keep(x, Outside(x.dtype, x.dim(), frozenset(), x))
        return self.nodes[id(x)]

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [self._given(one) for one in args]
        needs = frozenset().union(*(one.needs for one in _nodes(given)))
        name = operator.overloadpacket.__name__
        if any(isinstance(x, torch.Tensor) for x in kwargs.values()) or operator._schema.is_mutable:
            raise _Refused(f"{self.what} must not write to tensors, as {operator} does")
        if name in ("_local_scalar_dense", "is_nonzero", "equal") and needs:
            raise _Refused(f"{self.what} must not branch on, or take a Python number from, its arguments: use torch.where")
        if name == "index" and needs:
            return self._entry(given[0], given[1], needs)
        result = operator(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.keep(result, self._made(operator, name, given, kwargs, needs, result))
        elif needs:
            raise _Refused(f"{self.what} uses {operator}, which gives no single tensor")
        return result

    def _given(self, one):
        if isinstance(one, torch.Tensor):
            return self.node(one)
        return [self._given(x) for x in one] if isinstance(one, (list, tuple)) else one

    def _made(self, operator, name: str, given: list, keywords: dict, needs: frozenset[str], result: torch.Tensor) -> Node:
        if not needs:
            return Operation(result.dtype, result.dim(), needs, operator, tuple(given), keywords)
        if any(isinstance(x, Entry) and not x.whole for x in _nodes(given)):
            raise _Refused(f"{self.what} must index a tensor in all its dims before {operator} uses it")
        if name in _MAKERS:
            needs = frozenset()  # of an argument's dtype and device alone
        elif name not in _COPIES | _UNTAGGED and torch.Tag.pointwise not in operator.tags:
            raise _Refused(f"{self.what} uses {operator}, which is no function of single numbers")
        return Operation(result.dtype, result.dim(), needs, operator, tuple(given), keywords)

    def _entry(self, base: Node, indices: list, needs: frozenset[str]) -> torch.Tensor:
        """Index a tensor; x[h][q] is x[h, q]."""
        if any(not isinstance(index, Node) for index in indices):
            raise _Refused(f"{self.what} must index tensors with one number for each of their first dims, not with slices")
        before: tuple[Node, ...] = ()
        if isinstance(base, Entry) and not base.whole:
            before, base = base.indices, base.base
        if base.needs:
            raise _Refused(f"{self.what} must index tensors from outside alone, not what it computes")
        every = (*before, *indices)
        if len(every) > base.dims:
            raise _Refused(f"{self.what} indexes a tensor of {base.dims} dims with {len(every)} numbers")
        result = aten.index(self.tensors[id(base)], [self.tensors[id(index)] for index in every])
        self.keep(result, Entry(result.dtype, result.dim(), needs, base, every, len(every) == base.dims))
        return result


# ---- what a function names, to know it again

_PURE = ("torch", "math", "builtins")
"""Packages whose names do not change."""

_DEEP = 8
"""Functions within functions that are looked into."""


def _values_of(function, depth: int = _DEEP) -> tuple | None:
    """What a function's result depends on, as something to compare: its code and what it names. None: nobody can tell."""
    if not isinstance(function, types.FunctionType) or not depth:
        return None
    if function.__module__.partition(".")[0] in _PURE and not function.__closure__:
        return "function", id(function)
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that nothing was put into
        return None
    scope = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    values = [_value_of(one, depth - 1) for one in (*cells, *scope, *(function.__defaults__ or ()))]
    return None if None in values or function.__kwdefaults__ else (function.__code__, *values)


def _value_of(one, depth: int) -> tuple | None:
    if one is None or isinstance(one, (bool, int, float, str, torch.dtype)):
        return type(one), one
    if isinstance(one, torch.Tensor):
        return "tensor", id(one)
    if isinstance(one, types.ModuleType):
        return ("module", one.__name__) if one.__name__.partition(".")[0] in _PURE else None
    if isinstance(one, (types.BuiltinFunctionType, type)):
        return "builtin", id(one)
    if isinstance(one, (tuple, list)):
        values = tuple(_value_of(x, depth) for x in one)
        return None if None in values else values
    return _values_of(one, depth)


def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code may look up, in functions within it too."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return (*code.co_names, *(name for names in inner for name in names))
