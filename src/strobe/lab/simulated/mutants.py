"""Mutants of a kernel: its source with one small mistake, of the kinds that are made in synchronisation and in bounds.

A mutant is one statement of a jitted function, or two neighbours, replaced by others. It is made in the syntax tree and keeps
its line, so that what the simulator says of it names the kernel's own lines.
"""

from __future__ import annotations

import ast
import inspect
import marshal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

BARRIERS = {"wait", "arrive", "expect", "acquire", "release", "announce", "meet", "rendezvous"}
ASYNCHRONOUS = {"warpgroup_mma_wait", "commit", "tcgen05_commit", "commit_group", "wait_group", "store_wait", "tma_store_wait"}
SYNCHRONISE = BARRIERS | ASYNCHRONOUS | {"fence_async_shared", "take_turn"}
"""Last names of the functions that do. (Not `partition_barrier`: a partition is one agent to the simulator.)"""

PLACES = {"index", "at", "slice", "permute", "reshape", "block", "slot", "program_id", "num_programs", "cdiv"}
"""Functions that only say where something is: it does not matter when."""

PENDING = {"warpgroup_mma_wait": 0, "tma_store_wait": 0, "store_wait": 0, "wait_group": 0, "finished": 1}
"""Which argument says how much may be under way after the wait."""

COUNTS = {"make_barriers": 1, "make_channel": 5}
"""Which argument says how many arrivals complete a phase."""

LOOPS = {"range", "static_range"}
SILENT = {"stamp", "static_assert", "partition_barrier"}
"""Calls in which nothing is changed."""


@dataclass(frozen=True)
class Mutant:
    """module: its number among those of a subject. function: its qualified name in the module. operator: the kind of mistake.
    before, after: what it replaces. key: what stays the same when lines move. code: the function's, marshalled."""

    module: int
    function: str
    operator: str
    file: str
    line: int
    number: int
    before: str
    after: str
    key: str
    code: bytes

    @property
    def name(self) -> str:
        """FILE:LINE OPERATOR, with a number from the second one on."""
        return f"{self.file}:{self.line} {self.operator}" + (f" {self.number}" if self.number > 1 else "")


def mutants_of(modules: Sequence[ModuleType], helpers: Sequence[str] = ()) -> list[Mutant]:
    """All mutants of the jitted functions of some modules. helpers: functions of theirs that do nothing but synchronise."""
    return [mutant for number, module in enumerate(modules) for mutant in _of_module(number, module, {*SYNCHRONISE, *helpers})]


def sample(mutants: Sequence[Mutant], number: int, seed: int = 0) -> list[Mutant]:
    """So many of them, of each operator as many as of the others where there are enough. The same for the same seed, and mostly
    the same after a change of the kernel: each has its own place in the order."""

    def place(mutant: Mutant) -> bytes:
        return sha256(f"{seed} {mutant.key}".encode()).digest()

    turns: Counter[str] = Counter()
    rounds = []
    for mutant in sorted(mutants, key=place):
        turns[mutant.operator] += 1
        rounds.append((turns[mutant.operator], mutant))
    chosen = [mutant for _, mutant in sorted(rounds, key=lambda item: (item[0], place(item[1])))[:number]]
    return sorted(chosen, key=lambda mutant: (mutant.module, mutant.line, mutant.name))


def mutate(mutant: Mutant, modules: Sequence[ModuleType]) -> None:
    """Put the mistake into the loaded modules, wherever the function is known already."""
    thing = modules[mutant.module]
    for name in mutant.function.split("."):
        thing = inspect.getattr_static(thing, name)
    function = getattr(thing, "fn", thing)
    assert isinstance(function, FunctionType)
    function.__code__ = marshal.loads(mutant.code)


# ---- the statements of a module


def _of_module(number: int, module: ModuleType, synchronise: set[str]) -> Iterator[Mutant]:
    path = Path(str(module.__file__))
    tree = ast.parse(path.read_text())
    keys: Counter[str] = Counter()
    names: Counter[tuple[int, str]] = Counter()
    for function, node in _jitted(tree, ""):
        seen: set[tuple[int, str]] = set()
        for edit in _edits(node, synchronise):
            if (id(edit.old[0]), edit.after) in seen:
                continue
            seen.add((id(edit.old[0]), edit.after))
            key = f"{path.stem}.{function}: {edit.before} [{edit.change}]"
            keys[key] += 1
            names[edit.line, edit.operator] += 1
            yield Mutant(
                number, function, edit.operator, path.name, edit.line, names[edit.line, edit.operator], edit.before, edit.after,
                key + (f" ({keys[key]})" if keys[key] > 1 else ""), edit.code(node, path),
            )  # fmt: skip


def _jitted(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Gluon's jitted functions, also of classes, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _jitted(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef) and any("gluon.jit" in ast.unparse(d) for d in child.decorator_list):
            yield f"{prefix}{child.name}", child


@dataclass(frozen=True)
class _Edit:
    """`old`, statements from a place in a block on, become `new`."""

    operator: str
    change: str
    line: int
    block: list[ast.stmt]
    place: int
    old: list[ast.stmt]
    new: list[ast.stmt]

    @property
    def before(self) -> str:
        return "; ".join(map(_text, self.old))

    @property
    def after(self) -> str:
        return "; ".join(map(_text, self.new))

    def code(self, function: ast.FunctionDef, path: Path) -> bytes:
        here = slice(self.place, self.place + len(self.old))
        self.block[here] = self.new
        try:
            module = ast.fix_missing_locations(ast.Module([function], []))
            code = compile(module, str(path), "exec", dont_inherit=True)
        finally:
            self.block[here] = self.old
        return marshal.dumps(next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == function.name))


def _text(statement: ast.stmt) -> str:
    """The source of a statement; the header alone if it has a body."""
    if hasattr(statement, "body"):
        statement = type(statement)(**{**dict(ast.iter_fields(statement)), "body": [ast.Pass()], "orelse": []})
        return ast.unparse(ast.fix_missing_locations(statement)).splitlines()[0]
    return ast.unparse(statement)


def _edits(function: ast.FunctionDef, synchronise: set[str]) -> Iterator[_Edit]:
    for block in _blocks(function):
        for place, statement in enumerate(block):
            if _is_text(statement):
                continue
            if _last_name(_call_of(statement)) in synchronise:
                yield _Edit(
                    "delete", "deleted", statement.lineno, block, place, [statement], [ast.copy_location(ast.Pass(), statement)]
                )
            for operator, change, line, changed in _changed(statement):
                yield _Edit(operator, change, line, block, place, [statement], [changed])
            pair = block[place : place + 2]
            if len(pair) == 2 and any(_synchronises(s, synchronise) for s in pair) and _order_matters(*pair):
                yield _Edit("swap", "swapped", statement.lineno, block, place, pair, pair[::-1])


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if block:
            yield block
            for statement in block:
                yield from _blocks(statement)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _order_matters(one: ast.stmt, other: ast.stmt) -> bool:
    """Whether both do something, or one needs what the other assigns."""
    if not all(isinstance(s, (ast.Expr, ast.Assign, ast.AugAssign)) and not _is_text(s) for s in (one, other)):
        return False
    if any(_last_name(_call_of(s)) in SILENT for s in (one, other)):
        return False
    does_something = [any(isinstance(n, ast.Call) and _last_name(n) not in PLACES for n in ast.walk(s)) for s in (one, other)]
    return all(does_something) or bool(_assigned(one) & _names(other) or _assigned(other) & _names(one))


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _assigned(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _call_of(statement: ast.stmt) -> ast.expr | None:
    """The call that the statement is, or whose result it assigns."""
    return statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None


def _last_name(node: ast.AST | None) -> str:
    """The last name of the function that a call calls; "" for a node that is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _synchronises(statement: ast.stmt, synchronise: set[str]) -> bool:
    return any(_last_name(node) in synchronise for node in ast.walk(statement))


# ---- the expressions of a statement


def _changed(statement: ast.stmt) -> Iterator[tuple[str, str, int, ast.stmt]]:
    """(operator, what becomes what, line, the statement with it) for all that may be wrong within one."""
    for node in _expressions(statement):
        for operators in _OPERATORS:
            for operator, other in operators(node):
                change = f"{ast.unparse(node)} -> {ast.unparse(other)}"
                yield operator, change, node.lineno, _with(statement, node, other)
    if isinstance(statement, ast.AugAssign) and (other_sign := _other_sign(statement.op, statement.value)):
        changed = deepcopy(statement)
        changed.op = other_sign
        yield "sign", "other sign", statement.lineno, changed


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Outer ones first, without those of statements within, of annotations and of silent calls."""
    if isinstance(statement, ast.AnnAssign):
        fields = [statement.value]
    else:
        fields = [value for name, value in ast.iter_fields(statement) if name not in ("body", "orelse", "target", "targets")]
    waiting: list[Any] = [node for field in fields for node in (field if isinstance(field, list) else [field])]
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, ast.AST) or _last_name(node) in SILENT:
            continue
        if isinstance(node, ast.expr):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def _with(statement: ast.stmt, node: ast.expr, other: ast.expr) -> ast.stmt:
    """A copy of the statement with another expression in place of one."""
    memo = {id(node): ast.copy_location(deepcopy(other), node)}
    return deepcopy(statement, memo)


Changes = Iterator[tuple[str, ast.expr]]


def _binary(left: ast.expr, op: ast.operator, right: ast.expr | int) -> ast.expr:
    return ast.BinOp(left, op, ast.Constant(right) if isinstance(right, int) else right)


def _with_argument(call: ast.Call, place: int, make: Callable[[ast.expr], ast.expr]) -> ast.expr:
    arguments = list(call.args)
    arguments[place] = make(arguments[place])
    return ast.Call(call.func, arguments, call.keywords)


def _phases(node: ast.expr) -> Changes:
    """Changes of a phase: a wait gets the other one; what is XORed with 1, as phases are, is no longer."""
    if _last_name(node) == "wait" and isinstance(node, ast.Call) and len(node.args) >= 2 and not _is_flipped(node.args[1]):
        yield "phase", _with_argument(node, 1, lambda phase: _binary(phase, ast.BitXor(), 1))
    if isinstance(node, ast.BinOp) and _is_flipped(node):
        yield "phase", node.left


def _is_flipped(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor) and _is_one(node.right)


def _stages(node: ast.expr) -> Changes:
    """The next place of a ring."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and _last_name(node) == "index"
        and len(node.args) == 1
    ):
        yield "stage", _with_argument(node, 0, lambda index: _next(index, node.func.value))  # type: ignore[attr-defined]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _last_name(node) == "at" and len(node.args) == 2:
        first = ast.Subscript(node.args[0], ast.Constant(0), ast.Load())
        yield "stage", _with_argument(node, 1, lambda index: _next(index, first))


def _next(index: ast.expr, ring: ast.expr) -> ast.expr:
    places = ast.Subscript(ast.Attribute(ring, "shape", ast.Load()), ast.Constant(0), ast.Load())
    return _binary(_binary(index, ast.Add(), 1), ast.Mod(), places)


def _counts(node: ast.expr) -> Changes:
    """Arrivals, bytes, and how much may be under way."""
    if not isinstance(node, ast.Call):
        return
    name = _last_name(node)
    for place, keyword in enumerate(node.keywords):
        others = node.keywords[:place] + node.keywords[place + 1 :]
        if keyword.arg == "count" and name in ("arrive", "init"):
            more = ast.keyword("count", _binary(keyword.value, ast.Add(), 1))
            yield "count", ast.Call(node.func, node.args, [*others, more])
        if keyword.arg == "pred" and name in SYNCHRONISE:
            yield "predicate", ast.Call(node.func, node.args, others)
    if name in COUNTS and len(node.args) > COUNTS[name]:
        yield "count", _with_argument(node, COUNTS[name], lambda count: _binary(count, ast.Add(), 1))
    if name == "expect" and len(node.args) == 2:
        yield "bytes", _with_argument(node, 1, lambda size: _binary(size, ast.FloorDiv(), 2))
        yield "bytes", _with_argument(node, 1, lambda size: _binary(size, ast.Mult(), 2))
    if name in PENDING and len(node.args) > PENDING[name]:
        yield "pending", _with_argument(node, PENDING[name], lambda pending: _binary(pending, ast.Add(), 1))


def _dependencies(node: ast.expr) -> Changes:
    """What a wait gives back is not what is used afterwards: (waited := wait(..., deps=[a, b]), (a, waited[1]))[1]."""
    if _last_name(node) != "warpgroup_mma_wait" or not isinstance(node, ast.Call):
        return
    deps = next((k.value.elts for k in node.keywords if k.arg == "deps" and isinstance(k.value, ast.List)), [])
    for place, dep in enumerate(deps):
        waited: ast.expr = ast.NamedExpr(ast.Name("waited", ast.Store()), node)
        results = [_item(ast.Name("waited", ast.Load()), i) for i in range(len(deps))]
        result = dep if len(deps) == 1 else ast.Tuple([*results[:place], dep, *results[place + 1 :]], ast.Load())
        yield "deps", _item(ast.Tuple([waited, result], ast.Load()), 1)


def _item(node: ast.expr, place: int) -> ast.expr:
    return ast.Subscript(node, ast.Constant(place), ast.Load())


_SHARPER: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def _bounds(node: ast.expr) -> Changes:
    """Comparisons, the ends of loops, and a 1 too many or too few."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SHARPER:
        yield "comparison", ast.Compare(node.left, [_SHARPER[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.Call) and _last_name(node) in LOOPS and node.args:
        end = 0 if len(node.args) == 1 else 1
        if end:
            yield "loop", _with_argument(node, 0, lambda begin: _binary(begin, ast.Add(), 1))
        yield "loop", _with_argument(node, end, lambda stop: _binary(stop, ast.Sub(), 1))
        yield "loop", _with_argument(node, end, lambda stop: _binary(stop, ast.Add(), 1))
    if isinstance(node, ast.BinOp) and (other := _other_sign(node.op, node.right)) and not isinstance(node.left, ast.Tuple):
        yield "sign", ast.BinOp(node.left, other, node.right)
        if _is_one(node.right):
            yield "one", node.left


def _other_sign(op: ast.operator, right: ast.expr) -> ast.operator | None:
    """None where it is no sum of numbers."""
    if isinstance(right, ast.Tuple):
        return None
    return ast.Sub() if isinstance(op, ast.Add) else ast.Add() if isinstance(op, ast.Sub) else None


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


_OPERATORS = (_phases, _stages, _counts, _dependencies, _bounds)
