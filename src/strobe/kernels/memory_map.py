"""Maps of shared and tensor memory: where a kernel keeps what. A Config computes them, `explain` prints them.

Shapes of operands of a matrix product are nested as CuTe writes them, in the order in which the tensor core reads them.
"""

from __future__ import annotations

from typing import NamedTuple

SWIZZLE = 64
"""Number of 16-bit elements of a row that are swizzled together: 128 bytes."""

K_ATOM = 16
"""The K of one product of 16-bit operands."""

Shape = tuple["int | Shape", ...]


class Buffer(NamedTuple):
    """A buffer in the shared memory of one CTA. over: name of the buffer whose memory it shares; then its bytes do not
    count."""

    name: str
    shape: Shape
    bytes: int
    over: str = ""


class Columns(NamedTuple):
    """A range of the 32-bit columns of tensor memory, in all 128 lanes."""

    name: str
    first: int
    columns: int

    @property
    def last(self) -> int:
        return self.first + self.columns - 1

    def covers(self, other: Columns) -> bool:
        return self.first <= other.first and other.last <= self.last


def total_bytes(buffers: list[Buffer]) -> int:
    return sum(buffer.bytes for buffer in buffers if not buffer.over)


def k_major(rows: int, columns: int, stages: int) -> Shape:
    """Shape of an operand whose rows lie along K (Q, K): ((rows, 16), 1, products along K, stages)."""
    swizzle = min(columns, SWIZZLE)
    return (rows, K_ATOM), 1, _split(columns // K_ATOM, swizzle // K_ATOM), stages


def mn_major(rows: int, columns: int, stages: int) -> Shape:
    """Shape of an operand whose rows lie across K (V, a row for each key): ((columns, 16), 1, products along K, stages)."""
    return (_split(columns, SWIZZLE), K_ATOM), 1, rows // K_ATOM, stages


def stored(rows: int, columns: int, stages: int) -> Shape:
    """Shape of what a TMA store takes (O), in swizzled tiles of 8 rows: ((8, tiles), (64, tiles), (1, stages))."""
    swizzle = min(columns, SWIZZLE)
    return (8, rows // 8), (swizzle, columns // swizzle), (1, stages)


def _split(n: int, inner: int) -> int | Shape:
    return n if n <= inner else (inner, n // inner)


def lines(config) -> list[str]:
    """The maps of a config that has them, a line for each buffer and each range of columns."""
    texts = []
    for buffer in config.smem_map() if hasattr(config, "smem_map") else []:
        size = f"in {buffer.over}" if buffer.over else f"{buffer.bytes} bytes"
        texts.append(f"shared    {buffer.name:<12} {_text(buffer.shape):<30} {size}")
    ranges = config.tmem_map() if hasattr(config, "tmem_map") else []
    for columns in ranges:
        within = next((other.name for other in ranges if other is not columns and other.covers(columns)), "")
        place = f"columns {columns.first} to {columns.last}"
        texts.append(f"tensor    {columns.name:<12} {place:<30} {f'in {within}' if within else ''}".rstrip())
    return texts


def _text(shape: Shape) -> str:
    """A shape as text, such as ((128,16), 1, (4,2), 2)."""
    return f"({', '.join(str(part).replace(' ', '') for part in shape)})"
