"""Tuning tables: which configs of a kernel were how fast where, and the rule that ranks them for other shapes.

A table is JSON, written by `strobe tune`. For each pair of head dims it holds `points`, measured problems with the TFLOP/s of
every config that was timed, and `kept`, the few configs that between them are (nearly) the fastest everywhere: kernels run
with these alone, so that few are compiled. A config is written as on the command line: "groups=2,tile_kv=128".

For a pair of head dims the user's table is read if it has them, else the shipped one. The user's table is the file that
$STROBE_TUNING names, else the one that `strobe tune` writes, in the user's cache folder.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strobe.problem import Lengths, Varlen

SCHEMA = 1

Dims = tuple[int, int]
"""Head dims of q and k, and of v, as the kernel pads them."""

Band = tuple[int | None, int | None, int | None]
"""left, right and prefix of a `Mask`."""


@dataclass(frozen=True)
class Shape:
    """Everything beside the head dims that the choice of a config depends on.

    mask: "full", "causal" or "window". keys: the most keys that a row sees. sequences: how many there are, of `length` queries
    each, or if they are uneven, as packed ones may be, in the mean. heads: heads of queries.
    """

    mask: str
    keys: int
    sequences: int
    length: int
    heads: int
    uneven: bool = False

    @classmethod
    def of(cls, lengths: Lengths, heads: int, band: Band) -> Shape:
        """The Shape of a problem with these lengths, heads of queries, and band of its `Mask`."""
        n_q, n_kv, uneven = lengths.seqlen_q, lengths.seqlen_kv, False
        if isinstance(lengths, Varlen):
            n_q, n_kv = (-(-total // max(1, lengths.batch)) for total in (lengths.total_q, lengths.total_kv))
            uneven = lengths.total_q < lengths.batch * lengths.seqlen_q
        return cls(*mask_class(band, n_kv), max(1, lengths.batch), max(1, n_q), heads, uneven)

    def share(self, tile_q: int, tile_kv: int, sms: int, tile_heads: int = 1, group: int = 1) -> float:
        """The share of the problem's scores among all that a GPU has time for until the last tile is done, of tile_q rows of
        tile_heads heads, which are among a group that shares keys: small where a few large tiles leave multiprocessors idle, or
        reach beyond the ends of sequences, or blocks of tile_kv keys do, or have many keys that a mask hides."""
        abreast = self.heads // group * -(-group // tile_heads)
        tiles = self.sequences * abreast * self._parts(self.length, tile_q)
        rows = math.ceil(tiles / sms) * sms * tile_q * tile_heads
        seen, walked = self._keys(tile_q, tile_kv)
        return self.sequences * self.heads * self.length / rows * seen / walked

    def _parts(self, length: int, size: int) -> float:
        """Parts of a size, or of less at the end, that a sequence has; the last of an uneven one is half full, in the mean."""
        return max(1.0, length / size + 0.5) if self.uneven else -(-length // size)

    def _keys(self, tile_q: int, tile_kv: int) -> tuple[float, float]:
        """Keys that a row sees, and that a tile walks along, in the mean."""
        most = self._parts(self.keys, tile_kv) * tile_kv
        if self.mask == "full":
            return self.keys, most
        # A row begins where a tile or a block does, or anywhere between. Of a causal tile the groups of 64 rows that see less
        # than the last one pass over blocks, which costs about half of what a block does.
        beyond = tile_kv - math.gcd(tile_q, tile_kv)
        if self.mask == "window":
            return self.keys, self.keys + tile_q + beyond
        seen = self.keys - min(self.length, self.keys) / 2
        return seen, min(seen + ((tile_q + 64) / 2 + beyond) / 2, most)


def mask_class(band: Band, n_kv: int) -> tuple[str, int]:
    """The class of a mask ("full", "causal" or "window") and the most keys that a row sees. A band that is bounded on both
    sides is a window if it is narrower than the sequence; any other bound counts as causal."""
    left, right, _ = band
    if left is not None and right is not None and left + right + 1 < n_kv:
        return "window", left + right + 1
    return "full" if band == (None, None, None) else "causal", max(1, n_kv)


@dataclass(frozen=True)
class Measured:
    """A shape and the TFLOP/s of each config, by its name, at it."""

    shape: Shape
    tflops: dict[str, float]


@dataclass(frozen=True)
class Entry:
    """The part of a table that is about one pair of head dims. source: where it was measured, in words."""

    kept: tuple[str, ...]
    points: tuple[Measured, ...]
    source: str

    def nearest(self, shape: Shape) -> Measured:
        """The measured point whose keys are nearest by ratio, among those of the same mask class, or of all if it has none."""
        alike = [point for point in self.points if point.shape.mask == shape.mask] or self.points
        return min(alike, key=lambda point: abs(math.log2(point.shape.keys / shape.keys)))


def fields_of(name: str) -> dict[str, Any]:
    """A config's fields from its name, such as "groups=2,tile_kv=128"."""
    return {field: int(value) for field, _, value in (part.partition("=") for part in name.split(","))}


def name_of(fields: dict[str, int]) -> str:
    return ",".join(f"{field}={value}" for field, value in fields.items())


def shipped(arch: str) -> Path:
    return Path(__file__).parent / "tables" / f"{arch}.json"


def users(arch: str) -> Path:
    """The user's own table, which need not be there; its schema is in the name, so that no later Strobe trips over it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "strobe" / f"tuning-{arch}-v{SCHEMA}.json"


@functools.cache
def entries(arch: str) -> dict[Dims, Entry]:
    """The entry of each pair of head dims, read once in a process. ValueError for a file that is not a table."""
    named = os.environ.get("STROBE_TUNING")
    own = Path(named) if named else users(arch)
    paths = [path for path in (shipped(arch), own) if path.exists() or path == Path(named or "")]
    return {dims: entry for path in paths for dims, entry in read(path, arch).items()}


def read(path: Path, arch: str) -> dict[Dims, Entry]:
    """The entries of a table. ValueError, which names the file, if it is not one of this schema and arch."""
    return {(of["head_dim"], of["head_dim_v"]): _entry(of, path) for of in load(path, arch)["head_dims"]}


def load(path: Path, arch: str) -> dict:
    """The JSON of a table. ValueError, which names the file, if it is not one of this schema and arch."""
    try:
        table = json.loads(path.read_text())
        if (table["schema"], table["arch"]) != (SCHEMA, arch):
            raise ValueError(f"it holds schema {table['schema']} of {table['arch']}")
        for of in table["head_dims"]:
            _entry(of, path)
        return table
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"a tuning table must be what strobe tune writes for {arch}, got {path}: {reason}") from error


def _entry(of: dict, path: Path) -> Entry:
    points = tuple(
        Measured(Shape(p["mask"], p["keys"], p["batch"], p["length"], p["heads"]), p["tflops"]) for p in of["points"]
    )
    if not of["kept"] or not points or any(not set(of["kept"]) <= set(point.tflops) for point in points):
        raise ValueError("it must have kept configs, with a speed at every point")
    source = f"{of['device']['name']}, {of['date'][:10]}, {path.name}"
    return Entry(tuple(of["kept"]), points, source)
