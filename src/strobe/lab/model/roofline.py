"""Places problems under the ceilings of a GPU: tensor cores, exp2 units, shared memory and HBM.

The least time on each unit is its work over its rate; the longest binds, and gives the TFLOP/s that nothing exceeds. HBM bytes
are `Cost`'s: each input and result once. Where our Hopper kernels run the problem, FLOPs, exponentials and the bytes that
their products read from shared memory are those of the whole tiles that they visit (`strobe.lab.model.hopper_passes`);
elsewhere, and in fp8, FLOPs and exponentials are of visible pairs, and shared memory has no ceiling. TFLOP/s are always of
visible pairs. (Williams, Waterman and Patterson 2009, "Roofline".)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from rich.table import Table

from strobe.device import KNOWN, Arch
from strobe.kernels.decode.config import MMA_ROWS
from strobe.kernels.decode.sizes import rows_of_tile
from strobe.lab.bench.plan import DTYPES, Dims, Point
from strobe.lab.bench.report import arch_of
from strobe.lab.model.cost import Cost, Standard, Tiling, matmul_rate
from strobe.lab.model.cost_report import si
from strobe.lab.model.hopper_passes import passes
from strobe.problem import AttentionProblem, Dense

# ---- ceilings


@dataclass(frozen=True)
class Ceilings:
    """What a GPU does in a second: FLOPs of products, exponentials, bytes of shared memory and of HBM. clock: Hz of its
    multiprocessors; source: where the numbers come from."""

    name: str
    matmul: float
    exp2: float
    smem: float
    hbm: float
    clock: float
    source: str

    @classmethod
    def of(cls, arch: Arch, dtype: torch.dtype) -> Ceilings:
        """The ceilings of an arch by its data sheet. ValueError where its rates, or its rate for this dtype, are not known."""
        matmul = matmul_rate(arch, dtype)
        return cls(str(arch), matmul, arch.exp2_rate, arch.smem_bandwidth, arch.dram_bandwidth, arch.clock, arch.source)

    def at_clock(self, clock: float) -> Ceilings:
        """The ceilings of the same multiprocessors at another clock, in Hz. HBM has a clock of its own, and stays as it is."""
        ratio = clock / self.clock
        return replace(self, matmul=self.matmul * ratio, exp2=self.exp2 * ratio, smem=self.smem * ratio, clock=clock)

    @property
    def ridge(self) -> float:
        """The FLOPs for each byte of HBM at which products and HBM take the same time."""
        return self.matmul / self.hbm

    def __str__(self) -> str:
        return (
            f"{self.name} at {self.clock / 1e6:.0f} MHz: {si(self.matmul, 'FLOP/s')}, {si(self.exp2, 'exp2/s')}, shared memory "
            f"{si(self.smem, 'B/s')}, HBM {si(self.hbm, 'B/s')}; ridge at {self.ridge:.0f} FLOPs a byte ({self.source})"
        )


# ---- points


@dataclass(frozen=True)
class Placed:
    """A problem under ceilings.

    head_dims: those of k and of v. seconds: the least time of each unit. clock: that of the ceilings, in Hz. standard: FLOPs a
    byte, and FLOP/s at most, of standard attention. useful: the share of visible pairs in the tiles of our Hopper kernel, where
    that runs. measured: seconds that a kernel took, if one was timed."""

    name: str
    head_dims: tuple[int, int]
    flops: int
    intensity: float
    seconds: dict[str, float]
    clock: float
    standard: tuple[float, float]
    useful: float | None = None
    measured: float | None = None

    @property
    def binds(self) -> str:
        return max(self.seconds, key=lambda unit: self.seconds[unit])

    @property
    def least(self) -> float:
        return self.seconds[self.binds]

    @property
    def ceiling(self) -> float:
        """FLOP/s on visible pairs that nothing exceeds."""
        return self.flops / self.least

    @property
    def rate(self) -> float | None:
        """FLOP/s on visible pairs that were measured; None if no kernel was timed."""
        return self.flops / self.measured if self.measured else None

    @property
    def share(self) -> float | None:
        """The share of the ceiling that the measured kernel reached."""
        return self.least / self.measured if self.measured else None


def place(problem: AttentionProblem, ceilings: Ceilings, hopper: bool, measured: float | None = None) -> Placed:
    """Places a problem under ceilings. hopper: whether these are of a Hopper GPU, where our own kernels are known tile by tile.
    measured: seconds that a kernel took."""
    cost, standard = Cost(problem), Standard(problem)
    seconds, useful = _seconds(cost, ceilings), None
    walks = [(one, one.blocks(problem)) for one in passes(problem)] if hopper else []
    if walks:
        weighed = [blocks * one.tile_q * one.tile_kv for one, blocks in walks if one.weights]
        useful = len(weighed) * cost.exponentials / sum(weighed) if sum(weighed) else 0.0
        seconds |= {
            "matmul": sum(blocks * one.flops for one, blocks in walks) / ceilings.matmul,
            "exp2": sum(weighed) / ceilings.exp2,
            "smem": sum(blocks * one.operand_bytes for one, blocks in walks) / ceilings.smem,
        }
    return Placed(
        name_of(problem),
        (problem.head_dim, problem.head_dim_v),
        cost.flops,
        cost.intensity,
        seconds,
        ceilings.clock,
        (standard.intensity, standard.flops / max(_seconds(standard, ceilings).values())),
        useful,
        measured,
    )


def place_decode(problem: AttentionProblem, ceilings: Ceilings) -> Placed:
    """Places a problem of few queries under ceilings as the decode kernel computes it: the queries and query heads that share a
    key head are the rows of a tile, 16 at least, and each 16 rows read all of K and V from shared memory. (It multiplies with
    mma.sync, which does not reach the ceiling of products.)"""
    tiling = Tiling(problem, rows_of_tile(problem.lengths.seqlen_q * problem.group), STEP, packed=True)
    read = tiling.tile_q // MMA_ROWS * STEP * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    seconds = {
        "matmul": tiling.flops / ceilings.matmul,
        "exp2": tiling.blocks * tiling.tile_q * STEP / ceilings.exp2,
        "smem": tiling.blocks * read / ceilings.smem,
    }
    placed = place(problem, ceilings, False)
    return replace(placed, seconds=placed.seconds | seconds, useful=tiling.useful)


STEP = 64
"""Keys of a step of the decode kernel, in most of its configs."""


def _seconds(cost: Cost, ceilings: Ceilings) -> dict[str, float]:
    moved = cost.bytes_read + cost.bytes_written
    return {
        "matmul": cost.flops / ceilings.matmul,
        "exp2": cost.exponentials / ceilings.exp2,
        "HBM": moved / ceilings.hbm,
    }


def problem_of(point: Point, phase: str, queries: int = 1) -> AttentionProblem:
    """The problem at a point of a plan. In "decode" each sequence has few queries, against a cache of the point's length."""
    problem = point.problem()
    if phase == "decode":
        return replace(problem, lengths=Dense(point.batch, queries, point.length))
    return problem


def name_of(problem: AttentionProblem) -> str:
    """A problem in words: "D=128 heads 16 causal 4 x 4096 x 4096", which ends with batch, queries and keys."""
    dims = str(problem.head_dim) + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    lengths = problem.lengths
    shape = f"{lengths.batch} x {lengths.seqlen_q} x {lengths.seqlen_kv}"
    heads = f"{problem.heads_q}" + (f"/{problem.heads_kv}" if problem.group > 1 else "")
    return f"D={dims} heads {heads} {problem.mask} {shape}"


def gpu_of(report: dict) -> Arch:
    """The GPU of a report. ValueError for one whose facts are not known."""
    arch = arch_of(report)
    if arch is None or not arch.is_gpu:
        raise ValueError(f"roofline: the report must be of one of {', '.join(KNOWN)}, got {report['device']['name']}")
    return replace(arch, sms=report["device"].get("sms", arch.sms))


@dataclass(frozen=True)
class Choice:
    """A choice of points: those with these properties; None: any. tokens: batch x length, at least one sequence. phase: forward
    or backward."""

    dtype: str
    masks: tuple[str, ...]
    head_dims: tuple[Dims, ...] | None = None
    lengths: tuple[int, ...] | None = None
    tokens: int | None = None
    heads: int | None = None
    heads_kv: int | None = None
    phase: str | None = None

    def takes(self, point: Point) -> bool:
        return (
            point.dtype == self.dtype
            and point.mask in self.masks
            and (self.head_dims is None or (point.head_dim, point.head_dim_v) in self.head_dims)
            and (self.lengths is None or point.length in self.lengths)
            and (self.tokens is None or point.batch == max(1, self.tokens // point.length))
            and self.heads in (None, point.heads)
            and self.heads_kv in (None, point.heads_kv)
            and self.phase in (None, "backward" if point.backward else "forward")
        )

    def __str__(self) -> str:
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return ", ".join(f"{name.replace('_', '-')} {_listed(value)}" for name, value in given.items())


def _listed(value: object) -> str:
    """A value as the command line takes it, such as 64,192/128."""
    if isinstance(value, tuple):
        return ",".join("/".join(map(str, dict.fromkeys(one))) if isinstance(one, tuple) else str(one) for one in value)
    return str(value)


def of_report(report: dict, choice: Choice) -> tuple[Ceilings, list[Placed]]:
    """Places what `strobe bench` measured of Strobe at the points of a choice. Returns the ceilings at the median of the
    points' clocks, and the points, each under the ceilings at its own clock. ValueError for a GPU or a dtype whose rates are
    not known, and where no point is left."""
    arch = gpu_of(report)
    ceilings = Ceilings.of(arch, DTYPES[choice.dtype])
    points = [Point.of(entry) for entry in report["points"]]
    taken = ((point, entry["results"]) for point, entry in zip(points, report["points"], strict=True) if choice.takes(point))
    found = [placed for point, results in taken if (placed := place_measured(point, results.get("strobe", {}), arch))]
    if not found:
        raise ValueError(f"roofline: the report must have a point of Strobe's as asked for, got none of {choice}")
    return ceilings.at_clock(median(placed.clock for placed in found)), found


def place_measured(point: Point, result: dict, arch: Arch) -> Placed | None:
    """Places what `strobe bench` measured of Strobe at a point, at the clock that it ran at; None where it measured nothing."""
    if "tflops" not in result:
        return None
    ceilings = Ceilings.of(arch, DTYPES[point.dtype])
    here = ceilings.at_clock(result.get("sm_clock_mhz", ceilings.clock / 1e6) * 1e6)
    return place(point.problem(), here, arch.capability == 90, point.flops / (result["tflops"] * 1e12))


# ---- what it says


MOVES = {
    "matmul": "only fewer FLOPs, or products in fewer bits, would move it",
    "exp2": "more columns a head, or a part of the exponentials as polynomials on the FMA units, would move it",
    "smem": "products of more than 64 rows for each read of an operand, or more operands in registers, would move it",
    "HBM": "more queries for each key, or a cache in fewer bits, would move it",
}


def moves(placed: Placed) -> str:
    """Words that tell what would raise a problem's ceiling."""
    if placed.useful is not None and placed.useful < 0.5 and placed.binds != "HBM":
        return f"its tiles are {placed.useful:.1%} full: tiles of fewer rows, or a group's heads in one tile, would move it"
    if _second(placed)[1] > 0.98 * placed.least:
        return "both would have to move"
    return MOVES[placed.binds]


def _second(placed: Placed) -> tuple[str, float]:
    """The unit that takes the longest after the one that binds, and its seconds."""
    return sorted(placed.seconds.items(), key=lambda unit: unit[1])[-2]


def sentence(placed: Placed) -> str:
    """A sentence that tells what bounds a problem, how near the next unit is, and what would raise the ceiling."""
    second, seconds = _second(placed)
    reached = f", of which {placed.share:.0%} were measured" if placed.share is not None else ""
    return (
        f"{placed.name}: {words(placed.binds)} binds at {si(placed.ceiling, 'FLOP/s')}{reached}; "
        f"{words(second)} needs {seconds / placed.least:.0%} of its time; {moves(placed)}"
    )


def words(unit: str) -> str:
    return "shared memory" if unit == "smem" else unit


def table(points: list[Placed]) -> Table:
    """Points as a table: the least time of each unit, which one binds, TFLOP/s at most, and measured TFLOP/s with their share
    of that."""
    measured = any(placed.measured for placed in points)
    shown = Table(title="least time in us on each unit")
    shown.add_column("")
    units = ("matmul", "exp2", "smem", "HBM")
    for heading in ("FLOP/B", *units, "binds", "TFLOP/s", *(("timed", "share", "MHz") if measured else ())):
        shown.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for placed in points:
        times = (_microseconds(placed.seconds.get(unit)) for unit in units)
        cells = [f"{placed.intensity:.0f}", *times, placed.binds, f"{placed.ceiling / 1e12:.4g}"]
        if placed.rate is not None and placed.share is not None:
            cells += [f"{placed.rate / 1e12:.4g}", f"{placed.share:.0%}", f"{placed.clock / 1e6:.0f}"]
        shown.add_row(placed.name, *cells)
    return shown


def _microseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.3g}"


def facts(ceilings: Ceilings, points: list[Placed]) -> dict:
    """Ceilings and points as a JSON object: rates a second, times in seconds."""
    return {
        "what": "roofline",
        "ceilings": asdict(ceilings) | {"ridge": ceilings.ridge},
        "points": [asdict(p) | {"binds": p.binds, "ceiling": p.ceiling, "rate": p.rate, "share": p.share} for p in points],
    }


def of_facts(found: dict) -> tuple[Ceilings, list[Placed]]:
    """The ceilings and points that `facts` were made of."""
    ceilings, points = ({field.name for field in fields(kind)} for kind in (Ceilings, Placed))
    return Ceilings(**{name: value for name, value in found["ceilings"].items() if name in ceilings}), [
        replace(
            Placed(**{name: value for name, value in point.items() if name in points}),
            head_dims=tuple(point["head_dims"]),
            standard=tuple(point["standard"]),
        )
        for point in found["points"]
    ]


def draw(found: list[Placed], ceilings: Ceilings, path: Path) -> Path:
    """Draws the roofline: FLOP/s over FLOPs a byte of HBM. Hollow marks are ceilings, filled ones measured, crosses standard
    attention at most; dashed lines are exp2 and shared memory, for head dims that they bound. PNG or SVG by the path's
    suffix."""
    from strobe.lab.bench.plot import CEILING, PEERS, STROBE, plt, save

    figure, panel = plt.subplots(figsize=(7.4, 4.4))
    dims = list(dict.fromkeys(placed.head_dims for placed in found))
    colors = dict(zip(dims, cycle((STROBE, *PEERS)), strict=False))
    right = 2 * max(ceilings.ridge, *(placed.intensity for placed in found))
    left = 0.5 * min(ceilings.ridge, *(min(placed.intensity, placed.standard[0]) for placed in found))
    roof = [left, ceilings.ridge, right]
    panel.plot(roof, [min(x * ceilings.hbm, ceilings.matmul) / 1e12 for x in roof], color="black", linewidth=1.4)
    for head_dims in dims:
        mine = [placed for placed in found if placed.head_dims == head_dims]
        _points(panel, mine, colors[head_dims], f"D={head_dims[0]}" + (f"/{head_dims[1]}" if len(set(head_dims)) > 1 else ""))
        for unit in ("exp2", "smem"):
            bound = [placed for placed in mine if placed.binds == unit]
            if bound:
                height = max(placed.ceiling for placed in bound) / 1e12
                panel.plot([left, right], [height] * 2, color=colors[head_dims], linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
                panel.annotate(
                    words(unit), (left, height), xytext=(2, 2), textcoords="offset points", fontsize=7, color=CEILING
                )
    panel.annotate(
        f"tensor cores, {ceilings.matmul / 1e12:.0f} TFLOP/s", (left, ceilings.matmul / 1e12), xytext=(2, 3),
        textcoords="offset points", fontsize=7,
    )  # fmt: skip
    panel.annotate(
        f"HBM, {ceilings.hbm / 1e12:.3g} TB/s", (left * 1.6, left * 1.6 * ceilings.hbm / 1e12), xytext=(8, -8),
        textcoords="offset points", fontsize=7,
    )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="FLOPs a byte of HBM", ylabel="TFLOP/s", xlim=(left, right))
    panel.set_title(f"{ceilings.name} at {ceilings.clock / 1e6:.0f} MHz", fontsize=10)
    panel.legend(fontsize=7, frameon=False, loc="lower right")
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return save(figure, path, dpi=110)


def _points(panel, found: list[Placed], color: str, label: str) -> None:
    intensities = [placed.intensity for placed in found]
    panel.scatter(
        intensities,
        [placed.ceiling / 1e12 for placed in found],
        s=26,
        facecolors="none",
        edgecolors=color,
        label=f"{label}, at most",
    )
    x, y = zip(*(placed.standard for placed in found), strict=True)
    panel.scatter(x, [rate / 1e12 for rate in y], s=18, marker="x", color=color, linewidths=0.8, label=f"{label}, standard")
    timed = [(placed.intensity, placed.rate / 1e12) for placed in found if placed.rate is not None]
    if timed:
        panel.scatter(*zip(*timed, strict=True), s=14, color=color, label=f"{label}, measured")
