"""The report of `strobe cost`: what a problem costs by standard attention, by flash attention at least, and tile by tile."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from strobe.device import Arch
from strobe.lab.model.cost import Cost, LowerBound, Standard, Tiling, matmul_rate
from strobe.problem import AttentionProblem


def facts(problem: AttentionProblem, arch: Arch, tile: tuple[int, int], packed: bool) -> dict:
    """Counts (FLOPs, exponentials, bytes) and seconds as a JSON object: "standard", "flash" and, for a forward, "tiles" of
    tile[0] queries x tile[1] keys. ValueError for an arch without peak rates, and for a problem that has no `Cost` or no
    `Tiling`."""
    standard, flash = Standard(problem), Cost(problem)
    found = {
        "what": "cost",
        "problem": str(problem),
        "arch": str(arch),
        "ridge": matmul_rate(arch, problem.dtype) / arch.dram_bandwidth,
        "standard": _counts(standard, arch) | {"matrix_bytes": standard.matrix_bytes, "passes": standard.passes},
        "flash": _counts(flash, arch),
    }
    if problem.phase == "forward":
        found["tiles"] = _of_tiles(Tiling(problem, *tile, packed))
    return found


def _counts(cost: Cost, arch: Arch) -> dict:
    bound = cost.lower_bound(arch)
    return {
        "flops": cost.flops,
        "softmax_flops": cost.softmax_flops,
        "exponentials": cost.exponentials,
        "bytes_read": cost.bytes_read,
        "bytes_written": cost.bytes_written,
        "intensity": cost.intensity,
        "seconds": _seconds(bound),
        "bound": bound.binds,
    }


def _seconds(bound: LowerBound) -> dict[str, float]:
    return {"matmul": bound.tensor, "exp2": bound.exp2, "HBM": bound.hbm}


def _of_tiles(tiling: Tiling) -> dict:
    return {
        "tile": [tiling.tile_q, tiling.tile_kv],
        "packed": tiling.packed,
        "tiles": tiling.tiles,
        "blocks": tiling.blocks,
        "flops": tiling.flops,
        "softmax_flops": tiling.blocks * tiling.tile.softmax_flops,
        "exponentials": tiling.blocks * tiling.tile.exponentials,
        "bytes_read": tiling.bytes_loaded,
        "intensity": tiling.flops / tiling.bytes_loaded if tiling.bytes_loaded else 0.0,
        "useful": tiling.useful,
    }


_ROWS = {
    "matmul FLOPs": ("flops", "FLOP"),
    "softmax FLOPs": ("softmax_flops", "FLOP"),
    "exponentials": ("exponentials", ""),
    "bytes read": ("bytes_read", "B"),
    "bytes written": ("bytes_written", "B"),
    "FLOPs a byte": ("intensity", None),
}


def table(found: dict) -> Table:
    """`facts` as a table, a column for each way to compute."""
    ways = [found[way] for way in ("standard", "flash", "tiles") if way in found]
    shown = Table()
    shown.add_column("")
    tiles = [_tiles_heading(found["tiles"])] if "tiles" in found else []
    for heading in ("standard", "flash, at least", *tiles):
        shown.add_column(heading, justify="right")
    for label, (name, unit) in _ROWS.items():
        shown.add_row(label, *(_cell(way.get(name), unit) for way in ways))
    for unit in ("matmul", "exp2", "HBM"):
        shown.add_row(f"time of {unit}", *(_time(way, unit) for way in ways))
    shown.add_row("bound by", *(way.get("bound", "-") for way in ways))
    return shown


def _tiles_heading(tiles: dict) -> str:
    rows, keys = tiles["tile"]
    return f"flash, tiles of {rows} x {keys}{', packed' if tiles['packed'] else ''}"


def _cell(value: float | None, unit: str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if unit is None else si(value, unit)


def _time(way: dict, unit: str) -> str:
    return si(way["seconds"][unit], "s") if "seconds" in way else "-"


_PREFIXES = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "u"}


def si(value: float, unit: str) -> str:
    """A number in three digits with the unit's prefix: "137 GFLOP", "2.22 ms"."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES.items() if value >= size), (1e-6, "u"))
    return "0" if not value else f"{value / size:.3g} {prefix}{unit}".rstrip()


def draw(found: dict, path: Path) -> Path:
    """Writes the least time of each unit as bars, flash attention above standard attention; PNG or SVG by the path's suffix."""
    from strobe.lab.bench.plot import bars, plt, save

    figure, panel = plt.subplots(figsize=(7.4, 2.6))
    units = list(found["flash"]["seconds"])
    ways = {way: [found[way]["seconds"][unit] for unit in units] for way in ("flash", "standard")}
    bars(panel, units, ways, lambda seconds: si(seconds, "s"))
    panel.set(xscale="log", xlabel="seconds at least")
    panel.set_title(f"{found['problem']}\n{found['arch']}", fontsize=8)
    panel.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return save(figure, path, dpi=110)


def summary(found: dict) -> str:
    """Sentences that tell which problem it is, what bounds it, and how many bytes each way moves."""
    standard, flash = found["standard"], found["flash"]
    moved = "" if standard["bound"] == flash["bound"] else f"; without it {flash['bound']} binds"
    lines = [
        found["problem"],
        f"{found['arch']}: products and HBM take the same time at {found['ridge']:.0f} FLOPs a byte",
        f"standard attention moves {si(standard['matrix_bytes'], 'B')} of scores {standard['passes']} times to or from HBM, "
        f"and {standard['bound']} binds{moved}",
    ]
    if "tiles" in found:
        tiles = found["tiles"]
        lines.append(
            f"{tiles['tiles']} tiles visit {tiles['blocks']} blocks of keys; {tiles['useful']:.0%} of their FLOPs are on "
            "visible pairs; of what their CTAs read, L2 keeps from HBM what it holds"
        )
    return "\n".join(lines)
