"""`strobe fragments`: which lane of a warp holds which element of a tensor core's operands, and in which register.

Each formula is the PTX manual's ("Matrix Fragments for mma.m16n8k16", "Warp-level matrix load instruction: ldmatrix", "Register
Fragments and Shared Memory Matrix Layouts" of wgmma, "tcgen05.ld"). Two elements of 16 bits share a register of 32, the one
of the lower column (of a transposed load: row) in its lower half; an element of 32 bits has one for itself.

The order of k inside a product cannot be seen from outside: permuting it in A and B alike changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table


class Place(NamedTuple):
    """Where an element is: warp of the group, lane of the warp, register of those that hold the fragment, and which half of
    it (0 where an element fills a register)."""

    warp: int
    lane: int
    register: int
    half: int = 0


class Fragment(NamedTuple):
    """A matrix as registers hold it. at(row, column): the place of an element; bits: of an element."""

    meaning: str
    rows: int
    columns: int
    bits: int
    at: Callable[[int, int], Place]

    @property
    def warps(self) -> int:
        return 1 + max(self.at(row, column).warp for row in range(self.rows) for column in range(self.columns))

    @property
    def registers(self) -> int:
        """Registers of each lane that hold it."""
        return 1 + max(self.at(row, column).register for row in range(self.rows) for column in range(self.columns))


def _left(row: int, column: int) -> Place:
    """A lane of eight rows has two neighbours of each 8 x 8 block; blocks go down first."""
    return Place(row // 16, row % 8 * 4 + column % 8 // 2, row % 16 // 8 + column // 8 * 2, column % 2)


def _right(row: int, column: int) -> Place:
    return Place(0, column * 4 + row % 8 // 2, row // 8, row % 2)


def _accumulator(row: int, column: int) -> Place:
    return Place(row // 16, row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row % 16 // 8 * 2 + column % 2)


def _loaded(row: int, column: int) -> Place:
    """8 x 8 matrices one below the other, a register each."""
    return Place(0, row % 8 * 4 + column // 2, row // 8, column % 2)


def _transposed(row: int, column: int) -> Place:
    return Place(0, column * 4 + row % 8 // 2, row // 8, row % 2)


def _tensor_memory(row: int, column: int) -> Place:
    """Lane of tensor memory = row of the accumulator; a warp reads the 32 lanes of its number, a register for each column."""
    return Place(row // 32, row % 32, column)


WGMMA_COLUMNS = 16
"""Columns of a wgmma accumulator that are shown; more go on in the same way, four registers for each eight."""

FRAGMENTS: dict[str, Fragment] = {
    "mma-a": Fragment("A of mma.m16n8k16, row by k", 16, 16, 16, _left),
    "mma-b": Fragment("B of mma.m16n8k16, k by column", 16, 8, 16, _right),
    "mma-c": Fragment("C and D of mma.m16n8k16, float32", 16, 8, 32, _accumulator),
    "ldmatrix.x1": Fragment("ldmatrix.x1: an 8 x 8 matrix, whose row r lane r names", 8, 8, 16, _loaded),
    "ldmatrix.x2": Fragment("ldmatrix.x2: two, whose row r of matrix i lane 8 i + r names", 16, 8, 16, _loaded),
    "ldmatrix.x4": Fragment("ldmatrix.x4: four, whose row r of matrix i lane 8 i + r names", 32, 8, 16, _loaded),
    "ldmatrix.x4.trans": Fragment("ldmatrix.x4.trans: the same, each matrix transposed", 32, 8, 16, _transposed),
    "wgmma-d": Fragment("D of wgmma m64nNk16, float32, 16 of N columns", 64, WGMMA_COLUMNS, 32, _accumulator),
    "wgmma-a": Fragment("A of wgmma m64nNk16 in registers", 64, 16, 16, _left),
    "tcgen05-d": Fragment("D of tcgen05 with M = 128 in tensor memory, read by tcgen05.ld.32x32b", 128, 8, 32, _tensor_memory),
}
"""By name, what `strobe fragments` shows."""


def facts(names: Sequence[str]) -> dict[str, Any]:
    """The fragments of these names as a JSON object: for each row of elements their [warp, lane, register, half]."""
    found = []
    for name in names:
        one = FRAGMENTS[name]
        places = [[list(one.at(row, column)) for column in range(one.columns)] for row in range(one.rows)]
        found.append(
            {
                "name": name,
                "meaning": one.meaning,
                "bits": one.bits,
                "warps": one.warps,
                "registers": one.registers,
                "places": places,
            }
        )
    return {"what": "fragments", "fragments": found}


def cell(place: Sequence[int], warps: int) -> str:
    """A place in few characters: lane.register, with the warp in front where there are several."""
    warp, lane, register, _ = place
    return f"w{warp} {lane}.{register}" if warps > 1 else f"{lane}.{register}"


def caption(found: dict[str, Any]) -> str:
    """A line above the table of one of `facts`' fragments."""
    pairs = " of two elements each" if found["bits"] == 16 else ""
    return f"{found['name']}: {found['meaning']}; {found['registers']} registers a lane{pairs}, shown as lane.register"


def table(found: dict[str, Any]) -> Table:
    """One of `facts`' fragments as a matrix of places; elements that share a register, neighbours in a row or in a column,
    stand together."""
    places = found["places"]
    wide = 2 if found["bits"] == 16 and places[0][0][:3] == places[0][1][:3] else 1
    tall = 2 if found["bits"] == 16 and wide == 1 else 1
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for column in range(0, len(places[0]), wide):
        shown.add_column(f"{column},{column + 1}" if wide == 2 else str(column), justify="right", no_wrap=True)
    for row in range(0, len(places), tall):
        head = f"{row},{row + 1}" if tall == 2 else str(row)
        shown.add_row(head, *(cell(place, found["warps"]) for place in places[row][::wide]))
    return shown


def draw(found: dict[str, Any], path: Path) -> Path:
    """Draws `facts`, PNG or SVG by the path's suffix: a panel for each fragment, whose cells have the colour of their lane
    and the number of lane and register."""
    from matplotlib import colormaps

    from strobe.lab.bench.plot import plt, save

    fragments = found["fragments"]
    widths = [len(one["places"][0]) for one in fragments]
    tallest = max(len(one["places"]) for one in fragments)
    size = (1.0 + 0.42 * sum(widths) + 0.3 * len(fragments), 1.0 + 0.24 * tallest)
    figure, panels = plt.subplots(1, len(fragments), figsize=size, squeeze=False, width_ratios=widths, layout="constrained")
    for panel, one in zip(panels[0], fragments, strict=True):
        lanes = [[place[1] for place in row] for row in one["places"]]
        panel.imshow(lanes, cmap=colormaps["viridis"], vmin=0, vmax=31, aspect="auto")
        for row, places in enumerate(one["places"]):
            for column, place in enumerate(places):
                color = "white" if place[1] < 20 else "black"
                text = cell(place, one["warps"]).replace(" ", "\n")
                panel.text(column, row, text, ha="center", va="center", fontsize=5 if one["warps"] == 1 else 3.5, color=color)
        panel.set_title(one["name"], fontsize=8)
        panel.set_xticks([])
        panel.set_yticks([])
    return save(figure, path, dpi=130)
