"""Models shared, tensor and global memory: bytes that remember who touched them.

A `Buffer` is one allocation. Views of it (index, slice, permute, reshape, reinterpret) share its bytes, so aliases are
real: P written over S overwrites S. Every access goes through `Buffer.touch`, which compares it with the accesses before
it that it overlaps: two of them, at least one a write, that no chain of barriers orders are a race.

The hardware reaches shared memory by two ways: threads through the generic proxy; TMA, wgmma and tcgen05 through the async
proxy. What a thread wrote is visible to the async proxy only after a fence (PTX ISA, "Async proxy"). And what a thread reads,
the async proxy may overwrite before it is read: an arrival at a barrier waits for no load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from strobe.sim.clocks import AHEAD, Knowledge
from strobe.sim.errors import DoubleWrite, IllegalOperation, MissingFence, OutOfBounds, Race, SimulationError, Uninitialised


class Outcome:
    """The fate of a product that may be dropped, or of what was computed from such products: the error that stands against it,
    and whether something already depends on it."""

    __slots__ = ("depended_on", "error", "parts")

    def __init__(self, parts: Iterable[Outcome], error: SimulationError | None = None):
        self.parts, self.error, self.depended_on = tuple(parts), error, False

    def spoil(self, error: SimulationError) -> None:
        """Note that the product has read what it may not. Raises `error` if something depends on it."""
        if self.depended_on:
            raise error
        self.error = error

    def depend(self) -> None:
        """Note that something depends on it now. Raises the error of a part that was spoilt."""
        left = [self]
        while left:
            outcome = left.pop()
            if outcome.error is not None:
                raise outcome.error
            if not outcome.depended_on:
                outcome.depended_on = True
                left += outcome.parts


def outcome_of(outcomes: Iterable[Outcome | None]) -> Outcome | None:
    """The Outcome of what is computed from results with these outcomes; None if nothing is open."""
    open_ = {id(outcome): outcome for outcome in outcomes if outcome is not None and not outcome.depended_on}
    return None if not open_ else next(iter(open_.values())) if len(open_) == 1 else Outcome(open_.values())


class Load:
    """A load of a partition from shared memory to registers. used: something has used what it loaded. left_behind: the
    partition arrived at a barrier before anything had, and before any fence."""

    __slots__ = ("error", "left_behind", "used")

    def __init__(self):
        self.used = self.left_behind = False
        self.error: SimulationError | None = None

    def use(self) -> None:
        """Note that something uses what it loaded. Raises the error of a load that was spoilt."""
        self.used = True
        if self.error is not None:
            raise self.error

    def spoil(self, error: SimulationError) -> None:
        """Note that it may have loaded something else: an error as soon as it is used. (What nobody uses the compiler does not
        load.)"""
        self.error = error
        if self.used:
            raise error


@dataclass(frozen=True)
class Access:
    """An access of `agent` at its `tick`, with what it knew then. generic: through the generic proxy, by a thread. outcome:
    that of a read which does no harm as long as nothing depends on it. load: the Load, if it is a read to registers. acquired:
    what it knew of other CTAs, by their numbers, from atomics."""

    agent: int
    tick: int
    knows: Knowledge
    what: str
    generic: bool = True
    outcome: Outcome | None = None
    load: Load | None = None
    acquired: dict[int, Knowledge] | None = None

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, eq=False)
class Footprint:
    """The cells of a buffer that a view covers: [begin, end), or only those in `cells` if it has gaps."""

    begin: int
    end: int
    cells: np.ndarray | None = None

    def indices(self):
        return slice(self.begin, self.end) if self.cells is None else self.cells

    def overlaps(self, other: Footprint) -> bool:
        if self.end <= other.begin or other.end <= self.begin:
            return False
        if self.cells is None and other.cells is None:
            return True
        return bool(np.isin(self._all(), other._all(), assume_unique=True).any())

    def covers(self, other: Footprint) -> bool:
        if self.begin > other.begin or self.end < other.end:
            return False
        return self.cells is None or bool(np.isin(other._all(), self.cells, assume_unique=True).all())

    def _all(self) -> np.ndarray:
        return np.arange(self.begin, self.end) if self.cells is None else self.cells


@dataclass(eq=False)
class _Record:
    footprint: Footprint
    access: Access
    write: bool


class Buffer:
    """An allocation of `cells` cells (bytes of shared memory, columns of tensor memory)."""

    def __init__(self, name: str, space: str, cells: int):
        self.name, self.space = name, space
        self.defined = np.zeros(cells, bool)
        self.log: list[_Record] = []
        self.halves: set[tuple[int, int, int]] = set()
        """Begin and end of what was written in a cluster, and the stride, in bytes, of the dim that its CTAs halve."""
        self._footprints: dict[tuple, Footprint] = {}
        self._relations: dict[tuple[int, int], tuple[bool, bool]] = {}

    def footprint(self, key: tuple, make) -> Footprint:
        """The one Footprint of a key, so that relations between footprints are computed once."""
        if key not in self._footprints:
            self._footprints[key] = make()
        return self._footprints[key]

    def touch(self, footprint: Footprint, access: Access, write: bool, name: str = "") -> None:
        """Note an access. Race or MissingFence if it may not be made; Uninitialised, once noted, if it reads nothing."""
        kept = []
        for record in self.log:
            overlaps, covers = self._relation(footprint, record.footprint)
            if overlaps and (write or record.write):
                self._check(record, access, write, name)
            same = record.access.agent == access.agent and write == record.write
            if not (covers and (write or same)):
                kept.append(record)
        kept.append(_Record(footprint, access, write))
        self.log = kept
        if write:
            self.defined[footprint.indices()] = True
        elif not self.defined[footprint.indices()].all():
            raise Uninitialised(f"{access} reads {name or self.name}, part of which nothing has written")

    def _relation(self, a: Footprint, b: Footprint) -> tuple[bool, bool]:
        key = (id(a), id(b))
        if key not in self._relations:
            self._relations[key] = (a.overlaps(b), a.covers(b))
        return self._relations[key]

    def _check(self, record: _Record, access: Access, write: bool, name: str) -> None:
        before, name = record.access, name or self.name
        verb, was = ("writes" if write else "reads"), ("write" if record.write else "read")
        if access.knows.seen[before.agent] < before.tick:
            race = Race(f"{access} {verb} {name}; nothing orders it after the {was} by {before}")
            if before.outcome is None or record.write:
                raise race
            before.outcome.spoil(race)
        if before.load is not None and before.load.left_behind and not access.generic:
            before.load.spoil(
                Race(
                    f"{access} {verb} {name} through the async proxy, while the read by {before} may be under way: before its "
                    f"arrival at a barrier nothing used what it loads, and there was no fence_async_shared"
                )
            )
        fenced = access.knows.fenced[before.agent] >= before.tick
        if self.space == "shared" and record.write and before.generic and not access.generic and not fenced:
            raise MissingFence(
                f"{access} {verb} {name} through the async proxy, written by {before}, with no fence_async_shared"
            )


# ---- global memory


@dataclass(eq=False)
class _Writer:
    """Somebody who touched global memory. cta: number of the CTA, None for the launch ahead."""

    cta: int | None
    access: Access


@dataclass(frozen=True, eq=False)
class Touched:
    """Elements of one tensor's memory that a launch wrote and read, bool; for those of the next launch who have not waited for
    it, who wrote each element last, a number in `accesses`, and its updates by releasing atomics, in their order: what the
    element held then, and what was known, by the numbers of CTAs."""

    written: np.ndarray
    read: np.ndarray
    writer: np.ndarray
    accesses: list[_Writer | None]
    released: dict[int, list[tuple[float, dict[int, Knowledge]]]]


def _of_the_launch_ahead() -> _Writer:
    return _Writer(None, Access(AHEAD, 1, Knowledge(), "the launch ahead, for which it has not waited (griddepcontrol.wait)"))


def _before(cta: int) -> int:
    """The number that a CTA of the launch ahead has in the next one, whose own are not negative."""
    return -1 - cta


_AHEAD = 1
"""The number of the launch ahead in the list of a GlobalArray's accesses; 0 stands for nobody."""


def _of_elements(touched: np.ndarray, number: int) -> np.ndarray:
    """Which of so many elements were touched, or by whom last, of a memory whose larger or smaller elements are known."""
    if touched.size > number:
        return np.max(touched.reshape(number, -1), axis=1)
    return np.repeat(touched, number // max(1, touched.size))


class GlobalArray:
    """The memory of one tensor that the host gave to the kernel; offsets count elements from the start of its storage. ahead:
    what the launch ahead touched of it."""

    def __init__(self, name: str, tensor: torch.Tensor, rewritable: bool = False, ahead: Touched | None = None):
        if tensor.device.type != "cpu":
            raise ValueError(f"the simulator takes tensors on the CPU, got {name} on {tensor.device}")
        self.name, self.rewritable, self.ordered = name, rewritable, False
        self.flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # all of it, one-dimensional
        self.writer = np.zeros(self.flat.numel(), np.int32)
        self.reader = np.zeros(self.flat.numel(), np.int32)
        self.updated = np.zeros(self.flat.numel(), bool)
        self.updater = np.zeros(self.flat.numel(), np.int32)
        self.accesses: list[_Writer | None] = [None, _of_the_launch_ahead()]
        self._released: dict[int, dict[int, Knowledge]] = {}
        """Element -> what those who updated it by releasing atomics knew then, by the numbers of CTAs."""
        self._releases: dict[int, list[tuple[float, dict[int, Knowledge]]]] = {}
        """Element -> one after the other, what it held then and what that one knew."""
        self._ahead: Touched | None = None
        if ahead is not None:
            number = self.flat.numel()
            self.writer[_of_elements(ahead.written, number)] = _AHEAD
            self.reader[_of_elements(ahead.read, number)] = _AHEAD
            self._ahead = replace(ahead, writer=_of_elements(ahead.writer, number))

    def read(self, offsets: np.ndarray, cta: int, access: Access) -> None:
        self.inside(offsets, access)
        self._check(offsets, self.writer, "write", cta, access, "reads")
        self.reader[offsets] = self._number(cta, access)

    def write(self, offsets: np.ndarray, cta: int, access: Access) -> None:
        """Note a write of one access; DoubleWrite too if it has the same offset twice."""
        self.inside(offsets, access)
        self._check(offsets, self.reader, "read", cta, access, "writes")
        if not self.rewritable:
            before = self.writer[offsets]
            if before.max(initial=0) > _AHEAD:
                other = self.accesses[before.max()]
                raise DoubleWrite(f"{access} writes an element of {self.name} that {other.access} wrote already")
            self._check(offsets, self.writer, "write", cta, access, "writes")
            if np.unique(offsets).size != offsets.size:
                raise DoubleWrite(f"{access} writes an element of {self.name} twice at once")
        else:
            self._check(offsets, self.writer, "write", cta, access, "writes")
        self.writer[offsets] = self._number(cta, access)

    def touched(self) -> Touched:
        """Elements that this launch touched."""
        writer = np.where(self.writer > _AHEAD, self.writer, 0)
        return Touched((writer > 0) | self.updated, self.reader > _AHEAD, writer, self.accesses, self._releases)

    def update(self, offsets: np.ndarray, cta: int, access: Access, verb: str = "updates") -> None:
        """Note an atomic update, which races with nothing that this launch does, unless updates have to be `ordered`. What the
        launch ahead updates may be awaited meanwhile, not updated."""
        self.inside(offsets, access)
        for touched, was in ((self.writer, "write"), (self.reader, "read")):
            self._check(offsets[touched[offsets] == _AHEAD], touched, was, cta, access, verb)
        if self.ordered:
            self._check(offsets, self.updater, "update", cta, access, "updates")
            self.updater[offsets] = self._number(cta, access)
        self.updated[offsets] = True

    def acquire(self, offsets: np.ndarray, acquired: dict[int, Knowledge], least: float = math.inf) -> None:
        """Learn what those knew who released these elements; in the launch ahead, those until an element held `least`, since
        the one who waits for that may have seen no more."""
        for offset in offsets.tolist():
            _learn(acquired, self._released.get(offset, {}))
            for held, known in [] if self._ahead is None else self._ahead.released.get(offset, []):
                _learn(acquired, {_before(cta): knowledge for cta, knowledge in known.items() if cta >= 0})
                if held >= least:
                    break

    def release(self, offsets: np.ndarray, known: dict[int, Knowledge]) -> None:
        """Leave what is known at these elements, which hold their new numbers, for those who acquire them."""
        known = {cta: knowledge.copy() for cta, knowledge in known.items()}
        for offset in offsets.tolist():
            _learn(self._released.setdefault(offset, {}), known)
            self._releases.setdefault(offset, []).append((float(self.flat[offset]), known))

    def inside(self, offsets: np.ndarray, access: Access) -> None:
        """Raise OutOfBounds if an offset lies outside."""
        outside = offsets[(offsets < 0) | (offsets >= self.flat.numel())]
        if outside.size:
            raise OutOfBounds(f"{access} reaches element {outside[0]} of {self.name}, which has {self.flat.numel()}")

    def _number(self, cta: int, access: Access) -> int:
        self.accesses.append(_Writer(cta, access))
        return len(self.accesses) - 1

    def _check(self, offsets: np.ndarray, touched: np.ndarray, was: str, cta: int, access: Access, verb: str) -> None:
        numbers = touched[offsets]
        for number in np.unique(numbers):
            before = self.accesses[number]
            if before is None or self._is_before(before, cta, access):
                continue
            if before.cta is None and was == "write" and self._is_released(offsets[numbers == number], access, verb):
                continue
            if not (self.rewritable and was == "write" and verb == "writes" and before.cta is not None):
                raise Race(f"{access} {verb} {self.name}; nothing orders it after the {was} by {before.access}")

    def _is_before(self, before: _Writer, cta: int, access: Access) -> bool:
        known = [_acquired(access, before), access.knows if before.cta in (None, cta) else None]
        return any(_covers(knows, before.access) for knows in known)

    def _is_released(self, offsets: np.ndarray, access: Access, verb: str) -> bool:
        """Whether all who wrote these elements in the launch ahead, for which `access` has not waited, released them to it.
        What was only updated may be awaited, too."""
        assert self._ahead is not None
        writers = [self._ahead.accesses[number] for number in np.unique(self._ahead.writer[offsets])]
        return all(
            verb == "awaits"
            if writer is None or writer.cta is None
            else _covers(_acquired(access, _Writer(_before(writer.cta), writer.access)), writer.access)
            for writer in writers
        )


def _acquired(access: Access, writer: _Writer) -> Knowledge | None:
    """What an access knows of a CTA from atomics."""
    return None if access.acquired is None or writer.cta is None else access.acquired.get(writer.cta)


def _covers(knows: Knowledge | None, access: Access) -> bool:
    return knows is not None and bool(knows.seen[access.agent] >= access.tick)


def _learn(known: dict[int, Knowledge], more: dict[int, Knowledge]) -> None:
    for cta, knowledge in more.items():
        if cta in known:
            known[cta].join(knowledge)
        else:
            known[cta] = knowledge.copy()


# ---- views of shared memory


def dense_footprint(tensor: torch.Tensor) -> Footprint:
    """The bytes of a strided view of shared memory."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    extents = sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 1
    for stride, n in extents:
        if stride != reach:
            break
        reach *= n
    else:
        return Footprint(begin, begin + reach * size)
    elements: np.ndarray = np.zeros(1, np.int64)
    for stride, n in extents:
        elements = (elements[:, None] + np.arange(n)[None, :] * stride).reshape(-1)
    cells = np.unique((begin + elements[:, None] * size + np.arange(size)[None, :]).reshape(-1))
    return Footprint(int(cells[0]), int(cells[-1]) + 1, cells)


def bounds_check(index: int, length: int, what: str) -> None:
    """Raise OutOfBounds if an index is not one of `length`."""
    if not 0 <= index < length:
        raise OutOfBounds(f"index {index} of {what}, which has {length}")


def reshaped(tensor: torch.Tensor, shape: list[int], what: str) -> torch.Tensor:
    """A view of memory with another shape. IllegalOperation if there is none."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        raise IllegalOperation(f"{what} of shape {list(tensor.shape)} cannot be viewed as {shape}") from None
