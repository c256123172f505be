"""The arithmetic of the rungs that needs no compiler: a tile's FLOPs and bytes, GEMM shapes, registers that tiles take, loads
and stores, and what a barrier is for.

FLOPs of a pair of tiles [rows, D] and [keys, D] count a multiply-add as two: rows x D x keys x 2 for each of the products, and
for the softmax rows x (5 keys + D + 4), or 4 keys once the scale is folded into exp2's argument. (The write-up that these
formulas come from has half of that for the products; its own source code has them as here.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strobe.ladder import Rung

ITEM = 2
"""Bytes of an element of Q, K, V and O."""


@dataclass(frozen=True)
class Tile:
    """A CTA's tile: queries, keys of a block, head dim, warps; whether the scale is folded into exp2; how K and V come
    ("fragments": from global memory as mma.sync wants them, "registers": through these to shared memory, "cp.async"); whether Q
    stays in registers."""

    rows: int
    keys: int
    head_dim: int
    warps: int = 4
    folded: bool = True
    way: str = "cp.async"
    q_held: bool = False

    @staticmethod
    def of(rung: Rung, head_dim: int) -> Tile:
        """The tile of a rung that multiplies by mma.sync; of several the first. ValueError for another rung."""
        if not 4 <= rung.number <= 12:
            raise ValueError(f"shapes are those of rungs 4 to 12, which multiply by mma.sync, got rung {rung.number}")
        tile = rung.tiles(head_dim)[0].get("tile", (64, 64, 4))
        way = "fragments" if rung.number < 6 else "registers" if rung.number == 6 else "cp.async"
        rows, keys, warps = tile
        return Tile(rows, keys, head_dim, warps, rung.number >= 11, way, rung.number < 6 or rung.number >= 10)

    @property
    def product_flops(self) -> int:
        """FLOPs of both products of one block."""
        return 2 * (2 * self.rows * self.head_dim * self.keys)

    @property
    def softmax_flops(self) -> int:
        return self.rows * ((4 if self.folded else 5) * self.keys + self.head_dim + 4)

    def bytes_moved(self, length: int) -> int:
        """Bytes of global memory: Q and O of the tile, K and V of all keys."""
        return self.head_dim * 2 * (self.rows + length) * ITEM

    def intensity(self, length: int) -> float:
        """FLOPs a byte of global memory over all blocks."""
        return (self.product_flops + self.softmax_flops) * (length // self.keys) / self.bytes_moved(length)

    def gemms(self) -> list[dict]:
        """Each product of a block, of one warp: its shape m x n x k, and how many mma.m16n8k16 that is."""
        rows = self.rows // self.warps
        shapes = {"S = Q K^T": (rows, self.keys, self.head_dim), "O += P V": (rows, self.head_dim, self.keys)}
        return [
            {"product": name, "m": m, "n": n, "k": k, "mma": (m // 16) * (n // 8) * (k // 16)}
            for name, (m, n, k) in shapes.items()
        ]

    def registers(self) -> list[dict]:
        """What whole tiles take in registers of 32 bits, of one lane: two 16-bit elements or one float32 each. A kernel that
        reads fragments as it goes holds only part of Q, K and V."""
        rows = self.rows // self.warps
        tensors = {
            "Q": ("A", rows * self.head_dim, ITEM),
            "K": ("B", self.keys * self.head_dim, ITEM),
            "V": ("B", self.keys * self.head_dim, ITEM),
            "S": ("C", rows * self.keys, 4),
            "P": ("A", rows * self.keys, ITEM),
            "O": ("C", rows * self.head_dim, 4),
        }
        found = [
            {"tensor": name, "operand": operand, "itemsize": size, "registers": elements * size // 4 // 32}
            for name, (operand, elements, size) in tensors.items()
        ]
        each = rows // 8  # a lane has a row of each 8
        return found + [
            {"tensor": name, "operand": "-", "itemsize": 4, "registers": each} for name in ("m, row maxima", "l, row sums")
        ]

    def operations(self) -> list[dict]:
        """Loads and stores of one block, in instructions of one warp, and where lane l begins: its row and column."""
        tensors = {"K": LANES_OF_K, "V": LANES_OF_V}
        if self.way == "fragments":  # two neighbours in a row of K are one register's, of V they are two registers'
            sizes, pair = {"K": 4, "V": 2}, {"K": "row l // 4, column 2 (l % 4)", "V": "row 2 (l % 4), column l // 4"}
            return [
                _operation(
                    name, "global", "registers", f"LDG, {sizes[name]} bytes a lane", self._bytes, sizes[name], pair[name]
                )
                for name in tensors
            ]
        copied = self._bytes // self.warps
        found = []
        for name in tensors:
            if self.way == "cp.async":
                found.append(_operation(name, "global", "shared", "cp.async, 16 bytes a lane", copied, 16, LANES_OF_COPY))
            else:
                found.append(_operation(name, "global", "registers", "LDG, 16 bytes a lane", copied, 16, LANES_OF_COPY))
                found.append(_operation(name, "registers", "shared", "STS, 16 bytes a lane", copied, 16, LANES_OF_COPY))
        for name, lanes in tensors.items():
            instruction = "ldmatrix.x4" + ".trans" * (name == "V")
            found.append(_operation(name, "shared", "registers", instruction, self._bytes, 16, lanes))
        if not self.q_held:
            q = self.rows // self.warps * self.head_dim * ITEM
            found.append(_operation("Q", "shared", "registers", "ldmatrix.x4", q, 16, LANES_OF_Q))
        return found

    @property
    def _bytes(self) -> int:
        """Bytes of a block of K, or of V."""
        return self.keys * self.head_dim * ITEM


LANES_OF_COPY = "row l // 8, column 8 (l % 8)"
LANES_OF_K = "row l % 8 + 8 (l // 16), column 8 (l // 8 % 2)"
LANES_OF_V = LANES_OF_Q = "row l % 16, column 8 (l // 16)"
"""Where lane l begins in a tile of 64 columns that is copied, or which row of 8 it names for ldmatrix, so that registers come
in the order of `strobe fragments`."""


def _operation(tensor: str, source: str, to: str, instruction: str, size: int, each: int, lanes: str) -> dict:
    """A row of `Tile.operations`: so many bytes, of which a lane takes `each` at a time."""
    count = size // (each * 32)
    return {"tensor": tensor, "from": source, "to": to, "instruction": instruction, "count": count, "lane l": lanes}


# ---- the FP32 kernel of one thread an element


STUDENT_VECTORS, STUDENT_SQUARES, STUDENT_TILES = 6, 2, 4
"""What the kernel of one thread a score keeps in shared memory: six vectors of rows, S and P, and tiles of Q, K, V and O."""


def footprint(rows: int, keys: int, head_dim: int) -> int:
    """Bytes of shared memory of that kernel: 41,728 at 32 x 32 and head dim 64."""
    tiles = 2 * (rows + keys) * head_dim
    return 4 * (tiles + STUDENT_VECTORS * rows + STUDENT_SQUARES * rows * keys)


Place = Callable[[int, int, int], set[tuple]]
"""(thread's row, thread's column, columns) -> elements of shared memory."""


@dataclass(frozen=True)
class Step:
    """A step of the kernel of one thread a score: what the thread at (row, column) reads and writes."""

    name: str
    reads: Place
    writes: Place


def _row_of(array: str) -> Place:
    return lambda i, j, columns: {(array, i, other) for other in range(columns)}


def _own(array: str) -> Place:
    return lambda i, j, columns: {(array, i, j)}


def _of_row(array: str) -> Place:
    return lambda i, j, columns: {(array, i)}


def _none(i: int, j: int, columns: int) -> set[tuple]:
    return set()


STEPS = (
    Step("scores", _none, _own("s")),
    Step("row maxima", _row_of("s"), _of_row("m")),
    Step("exponentials", lambda i, j, columns: {("s", i, j), ("m", i)}, _own("p")),
    Step("row sums", _row_of("p"), _of_row("l")),
    Step("output", lambda i, j, columns: _row_of("p")(i, j, columns) | {("l", i)}, _none),
)
"""Between loading tiles and storing the output. K and V are read by all; the barrier before the scores is never in question."""


def races(rows: int, columns: int) -> list[str]:
    """Which barriers between the steps keep a race away, where threads [rows, columns] have a score each: a sentence for each
    step that reads what another warp wrote in an earlier one. None: all of them may go, as long as a warp's lanes keep step."""
    found = []
    for place, step in enumerate(STEPS):
        for before in STEPS[:place]:
            writers: dict[tuple, set[int]] = {}
            for i in range(rows):
                for j in range(columns):
                    for element in before.writes(i, j, columns):
                        writers.setdefault(element, set()).add((i * columns + j) // 32)
            if any(
                writers.get(element, set()) - {(i * columns + j) // 32}
                for i in range(min(rows, 2))
                for j in range(columns)
                for element in step.reads(i, j, columns)
            ):
                found.append(f"{step.name} read what another warp wrote as {before.name}")
    return found
