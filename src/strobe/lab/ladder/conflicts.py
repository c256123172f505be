"""How many wavefronts a kernel's accesses to shared memory take, by the layouts that Triton gave them.

`strobe.lab.model.banks` counts the banks of one access. Here the accesses come from the text of the compiler (TTGIR): which
tile, in which layout of shared memory, from or to which layout of registers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from strobe.lab.model.banks import ACCESSES, Access, Layout, Tile, count, swizzled

_SHARED = re.compile(
    r"^(#\w+) = #ttg.swizzled_shared<\{vec = (\d+), perPhase = (\d+), maxPhase = (\d+), order = \[(\d), \d\]", re.M
)
_BLOCKED = re.compile(r"^(#\w+) = #ttg.blocked<\{sizePerThread = \[(\d+), (\d+)\], threadsPerWarp = \[(\d+), (\d+)\]", re.M)
_MMA = re.compile(r"^(#\w+) = #ttg.nvidia_mma<\{versionMajor = 2", re.M)
_LOAD = re.compile(r"ttg\.local_load .*?!ttg\.memdesc<([^>]*)> -> tensor<\d+x\d+x\w+, (#[\w.]+(?:<\{.*?\}>)?)>")
_STORE = re.compile(r"ttg\.local_store .*?: tensor<\d+x\d+x\w+, (#\w+)> -> !ttg\.memdesc<([^>]*)>")
_COPY = re.compile(r"ttg\.async_copy_global_to_local .*?: tensor<\d+x\d+x!tt\.ptr<\w+>, (#\w+)> -> <([^>]*)>")
_BITS = {"f32": 4, "f16": 2, "bf16": 2}


class Conflict(NamedTuple):
    """An access of a warp: what it does, of which tile, wavefronts that it takes, and those without conflicts."""

    what: str
    tile: str
    wavefronts: int
    free: int

    @property
    def ways(self) -> float:
        return self.wavefronts / self.free


def conflicts_in(ttgir: str) -> list[Conflict]:
    """Each kind of access to swizzled shared memory in a kernel, once. Accesses in layouts that only hardware writes (TMA,
    wgmma) are not among them: they have no conflicts by construction."""
    shared = {name: (int(vec), int(per), int(most), order == "1") for name, vec, per, most, order in _SHARED.findall(ttgir)}
    blocked = {name: tuple(map(int, sizes)) for name, *sizes in _BLOCKED.findall(ttgir)}
    mma = set(_MMA.findall(ttgir))
    found = dict.fromkeys(
        [("load", memory, registers) for memory, registers in _LOAD.findall(ttgir)]
        + [("store", memory, registers) for registers, memory in _STORE.findall(ttgir)]
        + [("copy", memory, registers) for registers, memory in _COPY.findall(ttgir)]
    )
    made = [_conflict(what, memory, registers, shared, blocked, mma) for what, memory, registers in found]
    return list(dict.fromkeys(filter(None, made)))


def _conflict(what: str, memory: str, registers: str, shared: dict, blocked: dict, mma: set[str]) -> Conflict | None:
    """None for an access that has no model here."""
    parts = [part.strip() for part in memory.split(",")]
    layout, whole = shared.get(parts[1]), re.findall(r"\d+(?=x)", parts[0])
    if layout is None or len(whole) != 2:
        return None
    itemsize = _BITS[parts[0].rsplit("x", 1)[1]]
    vector, per_phase, max_phase, row_major = layout
    sizes = re.findall(r"\d+", parts[-1])[-2:] if re.fullmatch(r"[\dx]+", parts[-1]) else whole
    rows, columns = map(int, sizes if row_major else sizes[::-1])
    access = _access(registers, row_major, itemsize, blocked, mma)
    if access is None:
        return None
    numbers = (vector * itemsize, per_phase, max_phase)
    place = Layout("", lambda tile, row, byte: swizzled(tile, row, byte, *numbers))
    tile = Tile(rows, columns, itemsize)
    try:
        counted = count(tile, place, access)
    except ValueError:
        return None  # a tile smaller than what a warp reads at once
    return Conflict(
        f"{what} by {access.meaning}" if access.meaning == "ldmatrix" else f"{what} of {access.meaning}",
        f"{rows} x {columns}",
        counted.wavefronts,
        counted.free,
    )


def _access(registers: str, row_major: bool, itemsize: int, blocked: dict, mma: set[str]) -> Access | None:
    operand = re.match(r"#ttg\.dot_op<\{opIdx = (\d), parent = (#\w+)", registers)
    if operand and operand[2] in mma:
        return ACCESSES["ldmatrix"]._replace(meaning="ldmatrix") if itemsize == 2 else None
    if operand:
        if operand[1] == "0" or row_major:
            return None  # lanes share words, or stand in a line
        return ACCESSES["row-a-lane"]._replace(meaning="16 bytes a lane, each in a row of its own")
    if registers in mma:
        return ACCESSES["fragment"]._replace(meaning="the accumulator's pairs")
    if registers in blocked and row_major:
        rows, columns, _, across = blocked[registers]
        size = min(16, columns * itemsize)
        return Access(
            f"{size} bytes a lane, {across} lanes along a row",
            lambda lane, _: (lane // across * rows, lane % across * columns * itemsize),
            lambda _: size,
        )
    return None


def worst(found: list[Conflict]) -> float:
    """How many times as long as without conflicts the worst access takes; 1 if there is none."""
    return max((conflict.ways for conflict in found), default=1.0)
