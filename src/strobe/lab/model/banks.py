"""`strobe banks`: shows which of the 32 banks of shared memory a warp's lanes hit, and how often they conflict.

Shared memory is 32 banks of 4 bytes: word w is in bank w % 32, and a bank gives one word a cycle (CUDA C++ Programming Guide,
"Shared Memory"). Lanes that want the same word share it. A warp that moves 8 bytes a lane goes in two halves, with 16 bytes a
lane in four quarters; ldmatrix and stmatrix go by 8 lanes as well, each of which names a row of 16 bytes. So one part of a
warp takes as many wavefronts as its busiest bank has words to give, and an access is free of conflicts if each part takes one.

A layout says at which byte of a buffer a tile's byte [row, column] is. Layouts that swizzle XOR the place of a chunk in its
row with the row's number, which costs no memory; padding makes rows longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

BANKS, WORD, LANES = 32, 4, 32
ACROSS = BANKS * WORD
"""Bytes that all banks together give in a cycle."""


class Tile(NamedTuple):
    """A tile in shared memory: rows and columns of elements of `itemsize` bytes."""

    rows: int
    columns: int
    itemsize: int

    @property
    def row_bytes(self) -> int:
        return self.columns * self.itemsize

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} elements of {self.itemsize} bytes"


# ---- layouts


class Layout(NamedTuple):
    """Where a tile's bytes are in its buffer. place(tile, row, byte of the row): the byte of the buffer. panel: rows are cut
    into panels of so many bytes; 0: they are not cut."""

    meaning: str
    place: Callable[[Tile, int, int], int]
    panel: int = 0


def _plain(tile: Tile, row: int, byte: int) -> int:
    return row * tile.row_bytes + byte


def _padded(tile: Tile, row: int, byte: int) -> int:
    return row * (tile.row_bytes + 16) + byte


def swizzled(tile: Tile, row: int, byte: int, vector: int, per_phase: int, max_phase: int) -> int:
    """The byte of the buffer, by Triton's SwizzledSharedLayout: the place of a chunk of `vector` bytes in its row is XORed with
    row / per_phase % max_phase."""
    chunk = byte // vector ^ row // per_phase % max_phase
    return row * tile.row_bytes + chunk * vector + byte % vector


def _xor(tile: Tile, row: int, byte: int) -> int:
    per_phase = max(1, ACROSS // tile.row_bytes)
    return swizzled(tile, row, byte, 16, per_phase, min(8 // per_phase or 1, max(1, tile.row_bytes // 16)))


def _xor_words(tile: Tile, row: int, byte: int) -> int:
    return swizzled(tile, row, byte, WORD, 1, min(BANKS, tile.row_bytes // WORD))


def _nvmma(width: int) -> Layout:
    def place(tile: Tile, row: int, byte: int) -> int:
        plain = row * width + byte % width
        return byte // width * tile.rows * width + (plain ^ plain // 128 % (width // 16) * 16)

    return Layout(f"TMA's and the tensor core's: panels of {width} bytes, chunks of 16 XORed with a row's number", place, width)


LAYOUTS: dict[str, Layout] = {
    "none": Layout("row after row", _plain),
    "padded": Layout("16 bytes of padding after each row", _padded),
    "xor": Layout("chunks of 16 bytes XORed with the row's number, as Triton does for ldmatrix", _xor),
    "xor4": Layout("words of 4 bytes XORed with the row's number: (row ^ column) % 32", _xor_words),
    "nvmma32": _nvmma(32),
    "nvmma64": _nvmma(64),
    "nvmma128": _nvmma(128),
}


# ---- accesses


class Access(NamedTuple):
    """How a warp accesses a tile. at(lane, itemsize): the row and the byte of the row where a lane's bytes begin.
    size(itemsize): how many bytes that are."""

    meaning: str
    at: Callable[[int, int], tuple[int, int]]
    size: Callable[[int], int]


ACCESSES: dict[str, Access] = {
    "rows": Access(
        "16 bytes a lane, 8 lanes along a row: cp.async, LDS.128, STS.128",
        lambda lane, itemsize: (lane // 8, lane % 8 * 16),
        lambda itemsize: 16,
    ),
    "ldmatrix": Access(
        "16 x 32 bytes as four 8 x 8 matrices of 16-bit numbers (stmatrix likewise)",
        lambda lane, itemsize: (lane % 16, lane // 16 * 16),
        lambda itemsize: 16,
    ),
    "fragment": Access(
        "the accumulator's pairs: lane l has row l / 4, columns 2 * (l % 4) and the next",
        lambda lane, itemsize: (lane // 4, lane % 4 * 2 * itemsize),
        lambda itemsize: 2 * itemsize,
    ),
    "column": Access(
        "one element a lane, down a column",
        lambda lane, itemsize: (lane, 0),
        lambda itemsize: itemsize,
    ),
    "row-a-lane": Access(
        "16 bytes a lane, each lane in a row of its own",
        lambda lane, itemsize: (lane, 0),
        lambda itemsize: 16,
    ),
}


class Word(NamedTuple):
    """A word of 4 bytes that a lane asks for, and the wavefront that brings it. Lanes that share a word share the wavefront."""

    lane: int
    word: int
    wavefront: int

    @property
    def bank(self) -> int:
        return self.word % BANKS


@dataclass(frozen=True)
class Count:
    """The cost of one access of one warp: the words of all lanes, how many wavefronts they take, and how many they would take
    without conflicts."""

    words: tuple[Word, ...]
    wavefronts: int
    free: int

    @property
    def ways(self) -> float:
        """How many times as long as without conflicts the access takes: 8 is an "8-way" conflict."""
        return self.wavefronts / self.free


def count(tile: Tile, layout: Layout, access: Access) -> Count:
    """The Count of a warp's access to a tile. ValueError for a tile that does not fit the layout or the access."""
    lanes = [access.at(lane, tile.itemsize) for lane in range(LANES)]
    size = access.size(tile.itemsize)
    rows, bytes_ = 1 + max(row for row, _ in lanes), size + max(byte for _, byte in lanes)
    if tile.rows < rows or tile.row_bytes < bytes_:
        raise ValueError(f"this access needs a tile of at least {rows} rows of {bytes_} bytes, got {tile}")
    if layout.panel and tile.row_bytes % layout.panel:
        raise ValueError(f"this layout needs rows of a multiple of {layout.panel} bytes, got {tile}")
    if any(
        layout.place(tile, row, byte + offset) != layout.place(tile, row, byte) + offset
        for row, byte in lanes
        for offset in range(size)
    ):
        raise ValueError(f"this access takes {size} bytes at once, which this layout moves apart")
    words: list[Word] = []
    taken = 0
    parts = _parts(lanes, size)
    for part in parts:
        wanted = [(lane, word) for lane in part for word in _words(layout.place(tile, *lanes[lane]), size)]
        turns = _turns(word for _, word in wanted)
        words += [Word(lane, word, taken + turns[word]) for lane, word in wanted]
        taken += 1 + max(turns.values())
    return Count(tuple(words), taken, len(parts))


def _parts(lanes: list, size: int) -> list[range]:
    """The groups of lanes that are served together: as many lanes as ask for 128 bytes."""
    together = min(LANES, ACROSS // size)
    return [range(first, first + together) for first in range(0, len(lanes), together)]


def _words(place: int, size: int) -> range:
    """The words that hold the `size` bytes from byte `place` on."""
    return range(place // WORD, (place + size - 1) // WORD + 1)


def _turns(words: Iterable[int]) -> dict[int, int]:
    """Word -> how many other words its bank gives before it."""
    given = [0] * BANKS
    turns = {}
    for word in dict.fromkeys(words):
        turns[word] = given[word % BANKS]
        given[word % BANKS] += 1
    return turns


# ---- the command

Counts = dict[tuple[str, str], "Count | str"]
"""(access, layout) by their names -> the Count, or in words why there is none."""


def measure(tile: Tile, layouts: Iterable[str], accesses: Iterable[str]) -> Counts:
    """The Counts of these accesses in these layouts."""
    layouts = list(layouts)
    found: Counts = {}
    for access in accesses:
        for layout in layouts:
            try:
                found[access, layout] = count(tile, LAYOUTS[layout], ACCESSES[access])
            except ValueError as error:
                found[access, layout] = str(error)
    return found


def facts(tile: Tile, counts: Counts) -> dict:
    """Counts as a JSON object: for each access and layout the wavefronts and the banks of each lane, or why there are none."""
    points = []
    for (access, layout), found in counts.items():
        point: dict = {"access": access, "layout": layout}
        if isinstance(found, Count):
            banks = [[word.bank for word in found.words if word.lane == lane] for lane in range(LANES)]
            point |= {"wavefronts": found.wavefronts, "without_conflicts": found.free, "banks_of_lanes": banks}
        else:
            point["refused"] = found
        points.append(point)
    return {"what": "banks", "tile": tile._asdict(), "counts": points}


def of_facts(found: dict) -> tuple[Tile, Counts]:
    """The tile and the Counts that `facts` were made of."""
    accesses, layouts = (dict.fromkeys(point[axis] for point in found["counts"]) for axis in ("access", "layout"))
    tile = Tile(**found["tile"])
    return tile, measure(tile, layouts, accesses)


def show(tile: Tile, counts: Counts) -> None:
    """Prints the table, what its names mean, and what does not fit."""
    from rich.console import Console

    console = Console()
    console.print(caption(tile), markup=False, highlight=False)
    console.print(table(counts))
    for line in notes(counts):
        console.print(line, markup=False, highlight=False)


def caption(tile: Tile) -> str:
    return f"Wavefronts of one warp's access to a tile of {tile}; free: without conflicts"


def table(counts: Counts) -> Table:
    """Counts as a table: accesses are its rows, layouts its columns."""
    from rich.table import Table

    accesses, layouts = _axes(counts)
    shown = Table()
    shown.add_column("access")
    shown.add_column("free", justify="right")
    for layout in layouts:
        shown.add_column(layout, justify="right")
    for access in accesses:
        found = [counts[access, layout] for layout in layouts]
        free = next((str(one.free) for one in found if isinstance(one, Count)), "-")
        shown.add_row(access, free, *(str(one.wavefronts) if isinstance(one, Count) else "-" for one in found))
    return shown


def notes(counts: Counts) -> list[str]:
    """Lines that tell what the names of a table mean, and what does not fit."""
    accesses, layouts = _axes(counts)
    refused: dict[tuple[str, str], list[str]] = {}
    for (access, layout), one in counts.items():
        if isinstance(one, str):
            refused.setdefault((access, one), []).append(layout)
    return [
        *(f"{name}: {ACCESSES[name].meaning}" for name in accesses),
        *(f"{name}: {LAYOUTS[name].meaning}" for name in layouts),
        *(f"{access} in {', '.join(names)}: {reason}" for (access, reason), names in refused.items()),
    ]


def _axes(counts: Counts) -> tuple[list[str], list[str]]:
    """The names of the accesses and of the layouts, each once."""
    return list(dict.fromkeys(access for access, _ in counts)), list(dict.fromkeys(layout for _, layout in counts))


def draw(tile: Tile, counts: Counts, path: Path) -> Path:
    """Draws Counts, PNG or SVG by the path's suffix: a panel for each access and layout, whose columns are the banks and whose
    rows are the wavefronts. A cell has the colour of the first lane that gets its word there, and each lane is named once."""
    from strobe.lab.bench.plot import plt, save

    accesses, layouts = _axes(counts)
    tallest = {
        access: max((one.wavefronts for layout in layouts if isinstance(one := counts[access, layout], Count)), default=1)
        for access in accesses
    }
    heights = [0.7 + 0.13 * tallest[access] for access in accesses]
    size = (0.6 + 3.9 * len(layouts), 0.5 + sum(heights))
    figure, panels = plt.subplots(
        len(accesses), len(layouts), figsize=size, squeeze=False, layout="constrained", height_ratios=heights
    )
    for row, access in enumerate(accesses):
        for column, layout in enumerate(layouts):
            panel, one = panels[row][column], counts[access, layout]
            panel.set(xlim=(0, BANKS), ylim=(tallest[access], 0), xticks=range(0, BANKS + 1, 8), yticks=[])
            panel.tick_params(labelsize=7)
            if isinstance(one, str):
                panel.set_title(f"{access}, {layout}: does not fit", fontsize=8)
                continue
            panel.set_title(f"{access}, {layout}: {one.wavefronts} wavefront{'s' * (one.wavefronts > 1)}", fontsize=8)
            _cells(panel, one)
    for panel in panels[-1]:
        panel.set_xlabel("bank", fontsize=8)
    for row in panels:
        row[0].set_ylabel("wavefront", fontsize=8)
    figure.suptitle(f"A warp's access to a tile of {tile}; the numbers are lanes", fontsize=10)
    return save(figure, path, dpi=80)


def _cells(panel, one: Count) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps["viridis"]
    for lane, word, wavefront in reversed(one.words):  # reversed: where lanes share a word, the first one is drawn last
        shade = colours(lane / (LANES - 1))
        panel.add_patch(Rectangle((word % BANKS, wavefront), 1, 1, facecolor=shade, edgecolor="white", lw=0.3))
    givers = {(word, wavefront): lane for lane, word, wavefront in reversed(one.words)}
    for lane in sorted(set(givers.values())):
        word, wavefront = min(place for place, giver in givers.items() if giver == lane)
        place = (word % BANKS + 0.5, wavefront + 0.5)
        panel.text(*place, str(lane), fontsize=5, color="white" if lane < 20 else "black", ha="center", va="center")
