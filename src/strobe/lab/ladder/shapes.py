"""`strobe ladder shapes`: the tables of a tile, as JSON and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from strobe.lab.ladder.arithmetic import Tile


def facts(tile: Tile, lengths: Sequence[int]) -> dict[str, Any]:
    """GEMM shapes, register storage, operations and intensity of a tile as a JSON object."""
    return {
        "what": "ladder shapes",
        "tile": vars(tile),
        "gemms": tile.gemms(),
        "registers": tile.registers(),
        "operations": tile.operations(),
        "flops": {"products": tile.product_flops, "softmax": tile.softmax_flops},
        "intensity": [
            {"length": length, "bytes": tile.bytes_moved(length), "flops_per_byte": tile.intensity(length)}
            for length in lengths
        ],
    }


TITLES = {
    "gemms": "Products of one block, of one warp",
    "registers": "Registers of a lane, were the whole tiles held there",
    "operations": "Loads and stores of one block, instructions of one warp",
    "intensity": "Global memory of one tile, over all blocks",
}


def tables(found: dict[str, Any]) -> list[Table]:
    """`facts` as tables."""
    made = []
    for name, title in TITLES.items():
        shown = Table(title=title, title_justify="left")
        for column in found[name][0] if found[name] else ():
            shown.add_column(column.replace("_", " "), justify="left" if column in ("product", "tensor") else "right")
        for row in found[name]:
            shown.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
        made.append(shown)
    return made
