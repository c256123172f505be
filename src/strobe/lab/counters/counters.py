"""What Nsight Compute counts, as tables: which metrics stand in which row, and the point on the roofline.

Several subjects (kernels, or calls of several kernels) stand beside each other; a row has one unit, and numbers are means
over the launches of the kernel that takes the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from strobe.lab.counters import ncu
from strobe.lab.counters.ncu import Launch, Value
from strobe.lab.model.roofline import Ceilings


@dataclass(frozen=True)
class Metric:
    """Over launches: a mean with its extremes in `unit`, or a word."""

    mean: float | str
    low: float
    high: float
    unit: str


@dataclass(frozen=True)
class Subject:
    """What is profiled: its launches in `calls` calls, and, if known, the FLOPs of a call and the ceilings for its dtype."""

    name: str
    launches: list[Launch]
    calls: int
    flops: float | None = None
    ceilings: Ceilings | None = None

    @property
    def kernels(self) -> dict[str, list[Launch]]:
        """The launches of each kernel, those first that take the longest together."""
        found: dict[str, list[Launch]] = {}
        for launch in self.launches:
            found.setdefault(launch.kernel, []).append(launch)
        return dict(sorted(found.items(), key=lambda item: -(_total(item[1], DURATION) or 0)))

    def metric(self, row: Row) -> Metric | None:
        """Over the launches of the kernel that takes the longest; None where it was not measured."""
        values = [value for launch in next(iter(self.kernels.values())) if (value := row.of(launch)) is not None]
        if not values:
            return None
        if isinstance(values[0].number, str):
            return Metric(values[0].number, 0, 0, values[0].unit)
        unit = max(values, key=lambda value: value.base).unit
        numbers = [value.to(unit) for value in values]
        return Metric(fmean(numbers), min(numbers), max(numbers), unit)


@dataclass(frozen=True)
class Row:
    """A line of a table: its label and section on ncu's details page, and its metrics on the raw page, the first that is there
    counts."""

    label: str
    section: str
    metrics: tuple[str, ...]

    def of(self, launch: Launch) -> Value | None:
        keys: list[str | tuple[str, str]] = [*self.metrics, (self.section, self.label)]
        return next((launch.metrics[key] for key in keys if key in launch.metrics), None)


def _rows(section: str, *rows: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows of a section, each given as (label, metric, ...)."""
    return tuple(Row(label, section, tuple(metrics)) for label, *metrics in rows)


ELAPSED, ACTIVE = "pct_of_peak_sustained_elapsed", "pct_of_peak_sustained_active"

THROUGHPUT = _rows(
    "GPU Speed Of Light Throughput",
    ("DRAM Frequency", "dram__cycles_elapsed.avg.per_second"),
    ("SM Frequency", "sm__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second"),
    ("Elapsed Cycles", "sm__cycles_elapsed.max"),
    ("Memory Throughput", f"gpu__compute_memory_throughput.avg.{ELAPSED}"),
    ("DRAM Throughput", f"gpu__dram_throughput.avg.{ELAPSED}"),
    ("Duration", "gpu__time_duration.sum"),
    ("L1/TEX Cache Throughput", f"l1tex__throughput.avg.{ACTIVE}"),
    ("L2 Cache Throughput", f"lts__throughput.avg.{ELAPSED}"),
    ("SM Active Cycles", "sm__cycles_active.avg"),
    ("Compute (SM) Throughput", f"sm__throughput.avg.{ELAPSED}"),
)

LAUNCH = _rows(
    "Launch Statistics",
    ("Block Size", "launch__block_size"),
    ("Cluster Size", "launch__cluster_size"),
    ("Function Cache Configuration", "launch__func_cache_config"),
    ("Grid Size", "launch__grid_size"),
    ("Registers Per Thread", "launch__registers_per_thread"),
    ("Shared Memory Configuration Size", "launch__shared_mem_config_size"),
    ("Driver Shared Memory Per Block", "launch__shared_mem_per_block_driver"),
    ("Dynamic Shared Memory Per Block", "launch__shared_mem_per_block_dynamic"),
    ("Static Shared Memory Per Block", "launch__shared_mem_per_block_static"),
    ("# SMs", "launch__sm_count"),
    ("Threads", "launch__thread_count"),
    ("Uses Green Context", "launch__uses_green_context"),
    ("Waves Per SM", "launch__waves_per_multiprocessor"),
)

OCCUPANCY = _rows(
    "Occupancy",
    ("Block Limit SM", "launch__occupancy_limit_blocks"),
    ("Block Limit Registers", "launch__occupancy_limit_registers"),
    ("Block Limit Shared Mem", "launch__occupancy_limit_shared_mem"),
    ("Block Limit Warps", "launch__occupancy_limit_warps"),
    ("Theoretical Active Warps per SM", "sm__maximum_warps_avg_per_active_cycle"),
    ("Theoretical Occupancy", "sm__maximum_warps_per_active_cycle_pct"),
    ("Achieved Occupancy", f"sm__warps_active.avg.{ACTIVE}"),
    ("Achieved Active Warps Per SM", "sm__warps_active.avg.per_cycle_active"),
)

UNITS = {"DRAM": "dram", "L1": "l1tex", "L2": "lts", "SM": "sm", "SMSP": "smsp"}
_WORKLOAD = "GPU and Memory Workload Distribution"
AVERAGES = _rows(_WORKLOAD, *((f"Average {unit} Active Cycles", f"{name}__cycles_active.avg") for unit, name in UNITS.items()))
TOTALS = _rows(_WORKLOAD, *((f"Total {unit} Elapsed Cycles", f"{name}__cycles_elapsed.sum") for unit, name in UNITS.items()))

CONFLICTS = _rows(
    "",
    ("Bank Conflicts, Loads", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"),
    ("Bank Conflicts, Stores", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"),
)
WAVEFRONTS = _rows(
    "",
    ("Wavefronts, Loads", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"),
    ("Wavefronts, Stores", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"),
)

REASONS = (
    *("long_scoreboard", "short_scoreboard", "math_pipe_throttle", "gmma", "wait", "barrier", "mio_throttle", "lg_throttle"),
    *("tex_throttle", "dispatch_stall", "not_selected", "no_instruction", "branch_resolving", "imc_miss", "sleeping", "drain"),
    *("membar", "misc", "selected"),
)
"""What a warp waits for, as ncu names it: math_pipe_throttle and gmma wait for the tensor cores, the scoreboards for memory,
barrier for other warps; a selected warp issues."""
STALLS = _rows("", *((reason, f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio") for reason in REASONS))

NVPROF = _rows(
    "",
    ("achieved_occupancy", f"sm__warps_active.avg.{ACTIVE}"),
    ("sm_efficiency", f"smsp__cycles_active.avg.{ELAPSED}"),
    ("shared_load_throughput", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum.per_second"),
    ("shared_store_throughput", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum.per_second"),
    ("gld_throughput", "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum.per_second"),
    ("gst_throughput", "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum.per_second"),
)
"""nvprof's metrics and what took their place, by Nsight Compute's transition guide. A wavefront of shared memory is 128 bytes
at most, and is shown as that."""

DURATION = Row("Duration", "GPU Speed Of Light Throughput", ("gpu__time_duration.sum",))
FREQUENCY = THROUGHPUT[1]
DRAM = Row("", "", ("dram__bytes.sum",))
DRAM_READ, DRAM_WRITE = Row("", "", ("dram__bytes_read.sum",)), Row("", "", ("dram__bytes_write.sum",))
DRAM_RATE = Row("Memory Throughput", "Memory Workload Analysis", ("dram__bytes.sum.per_second",))

ROWS = (*THROUGHPUT, *LAUNCH, *OCCUPANCY, *AVERAGES, *TOTALS, *CONFLICTS, *WAVEFRONTS, *STALLS, *NVPROF)
"""All of them."""

EXTRA = tuple(row.metrics[0] for row in (*CONFLICTS, *WAVEFRONTS, *NVPROF, DRAM, DRAM_READ, DRAM_WRITE))
"""Metrics that ncu is asked for beside its full set."""


# ---- tables


@dataclass(frozen=True)
class Table:
    """Text in rows, the labels first."""

    title: str
    head: list[str]
    rows: list[list[str]]


def tables(subjects: Sequence[Subject]) -> list[Table]:
    """All that was measured of some subjects, beside each other; rows and tables without a number are left out."""
    made = [
        _kernels(subjects),
        _plain("Throughput", THROUGHPUT, subjects),
        _plain("Launch", LAUNCH, subjects),
        _plain("Occupancy", OCCUPANCY, subjects),
        _workload(subjects),
        _conflicts(subjects),
        _stalls(subjects),
        _nvprof(subjects),
        _roofline(subjects),
    ]
    return [table for table in made if table.rows]


def _plain(title: str, rows: Sequence[Row], subjects: Sequence[Subject]) -> Table:
    lines = []
    for row in rows:
        metrics = [subject.metric(row) for subject in subjects]
        if any(metrics):
            unit = _unit(metrics)
            lines.append([row.label, unit, *(_cell(metric, unit) for metric in metrics)])
    return Table(title, ["metric", "unit", *(subject.name for subject in subjects)], lines)


def _unit(metrics: Sequence[Metric | None]) -> str:
    """One unit for a row: that of its largest number."""
    known = [metric for metric in metrics if metric]
    return max(known, key=lambda m: 0.0 if isinstance(m.mean, str) else m.mean * ncu.factor(m.unit)).unit


def _cell(metric: Metric | None, unit: str) -> str:
    if metric is None:
        return "-"
    return metric.mean if isinstance(metric.mean, str) else number(Value(metric.mean, metric.unit).to(unit))


def number(value: float) -> str:
    """Two decimals as in ncu's tables, none of a whole number, three digits of a small one."""
    if abs(value - round(value)) < 1e-9:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.3g}"


def _mean(subject: Subject, row: Row) -> float | None:
    """In base units; None where there is no number."""
    metric = subject.metric(row)
    return None if metric is None or isinstance(metric.mean, str) else metric.mean * ncu.factor(metric.unit)


def _kernels(subjects: Sequence[Subject]) -> Table:
    """A table of each kernel's share of a call, for subjects whose call has more than one kernel."""
    rows = []
    for subject in subjects:
        whole = _total(subject.launches, DURATION)
        if whole is None or len(subject.kernels) < 2:
            continue
        for name, launches in subject.kernels.items():
            mine = _total(launches, DURATION) or 0
            per_call = len(launches) / subject.calls
            rows.append([name, subject.name, number(per_call), number(mine / subject.calls * 1e6), f"{mine / whole:.1%}"])
    return Table("Kernels of a call; the tables below are of the first", ["kernel", "of", "launches", "us", "share"], rows)


def _workload(subjects: Sequence[Subject]) -> Table:
    """The units' cycles, and each unit's share of all elapsed cycles."""
    head = ["metric", "unit"]
    for subject in subjects:
        head += [subject.name, f"{subject.name} %"]
    sums = [[_mean(subject, row) for row in TOTALS] for subject in subjects]
    wholes = [sum(known) if (known := [cycles for cycles in mine if cycles is not None]) else None for mine in sums]
    rows = []
    for row in (*AVERAGES, *TOTALS):
        cells = []
        for subject, whole in zip(subjects, wholes, strict=True):
            cycles = _mean(subject, row)
            share = f"{cycles / whole:.2%}" if row in TOTALS and cycles is not None and whole else "-"
            cells += ["-" if cycles is None else number(cycles), share]
        if any(cell != "-" for cell in cells):
            rows.append([row.label, "cycle", *cells])
    if any(wholes):
        cells = [cell for whole in wholes for cell in ((number(whole), "100%") if whole else ("-", "-"))]
        rows.append(["Total Elapsed Cycles", "cycle", *cells])
    return Table("Workload of each unit", head, rows)


def _conflicts(subjects: Sequence[Subject]) -> Table:
    """A table of conflicts in shared memory. A wavefront more than needed is a conflict."""
    table = _plain("Shared memory", (*CONFLICTS, *WAVEFRONTS), subjects)
    for conflicts, wavefronts in zip(CONFLICTS, WAVEFRONTS, strict=True):
        shares = []
        for subject in subjects:
            extra, whole = _mean(subject, conflicts), _mean(subject, wavefronts)
            shares.append("-" if extra is None or not whole else number(100 * extra / whole))
        if any(share != "-" for share in shares):
            table.rows.append([conflicts.label.replace("Bank Conflicts", "Conflicts of Wavefronts"), "%", *shares])
    return table


def _stalls(subjects: Sequence[Subject]) -> Table:
    """Cycles of a warp between two of its instructions, by what it waits for, the longest of the first subject first."""
    found = {row.label: [_mean(subject, row) for subject in subjects] for row in STALLS}
    found = {label: cycles for label, cycles in found.items() if any(cycle is not None for cycle in cycles)}
    wholes = [sum(cycles[i] or 0 for cycles in found.values()) for i in range(len(subjects))]
    rows = []
    for label, cycles in sorted(found.items(), key=lambda item: -(item[1][0] or 0)):
        cells = []
        for cycle, whole in zip(cycles, wholes, strict=True):
            cells += ["-" if cycle is None else number(cycle), "-" if cycle is None or not whole else f"{cycle / whole:.1%}"]
        rows.append([label, "cycle", *cells])
    head = [cell for subject in subjects for cell in (subject.name, f"{subject.name} %")]
    return Table("Stalls: cycles between two instructions of a warp", ["waits for", "unit", *head], rows)


def _nvprof(subjects: Sequence[Subject]) -> Table:
    """Minimum, maximum and mean over the launches, by nvprof's names and in its units."""
    rows = []
    for row in NVPROF:
        metrics = [subject.metric(row) for subject in subjects]
        if any(metrics):
            rows.append([row.label, *(cell for metric in metrics for cell in _nvprof_cells(row.label, metric))])
    head = [cell for subject in subjects for cell in (f"{subject.name} min", "max", "avg")]
    return Table("By nvprof's names", ["metric", *head], rows)


def _nvprof_cells(label: str, metric: Metric | None) -> list[str]:
    if metric is None or isinstance(metric.mean, str):
        return ["-"] * 3
    shown: Callable[[float], str] = "{:.2f}%".format
    scale = 1.0
    if label == "achieved_occupancy":
        shown, scale = "{:.6f}".format, 0.01
    elif label.endswith("throughput"):
        wavefront = 128 if label.startswith("shared") else 1
        shown, scale = "{:.5g} GB/s".format, 1e-9 * wavefront * ncu.factor(metric.unit)
    return [shown(scale * value) for value in (metric.low, metric.high, metric.mean)]


# ---- the roofline


def roofline(subject: Subject) -> dict[str, float] | None:
    """Where a call stands: its seconds, bytes of DRAM, FLOP/s ("flops") and FLOPs a byte ("intensity"). With known ceilings
    also those at the clock that ncu held: of products ("peak", FLOP/s), of DRAM ("bandwidth", bytes a second), and the roof
    that they make over the call (FLOP/s). None without FLOPs, duration or traffic."""
    seconds, moved = _total(subject.launches, DURATION), _dram_bytes(subject.launches)
    if not (subject.flops and seconds and moved):
        return None
    seconds, moved = seconds / subject.calls, moved / subject.calls
    point = {"seconds": seconds, "bytes": moved, "flops": subject.flops / seconds, "intensity": subject.flops / moved}
    clock = _mean(subject, FREQUENCY)
    if subject.ceilings is not None and clock:
        here = subject.ceilings.at_clock(clock)
        point |= {"peak": here.matmul, "bandwidth": here.hbm, "roof": min(here.matmul, point["intensity"] * here.hbm)}
    return point


def _total(launches: Sequence[Launch], row: Row) -> float | None:
    """The sum over launches, in base units; None if one has no such number."""
    values = [row.of(launch) for launch in launches]
    known = [value.base for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _dram_bytes(launches: Sequence[Launch]) -> float | None:
    whole, read, written = (_total(launches, row) for row in (DRAM, DRAM_READ, DRAM_WRITE))
    if whole is not None:
        return whole
    if read is not None and written is not None:
        return read + written
    pairs = [(DRAM_RATE.of(launch), DURATION.of(launch)) for launch in launches]
    known = [rate.base * time.base for rate, time in pairs if rate and time]
    return sum(known) if len(known) == len(pairs) else None


def _roofline(subjects: Sequence[Subject]) -> Table:
    points = [roofline(subject) for subject in subjects]
    lines = (
        ("Arithmetic Intensity", "FLOP/byte", lambda p: number(p["intensity"])),
        ("Performance", "TFLOP/s", lambda p: number(p["flops"] / 1e12)),
        ("Roof at that Intensity", "TFLOP/s", lambda p: number(p["roof"] / 1e12) if "roof" in p else "-"),
        ("Share of the Roof", "%", lambda p: number(100 * p["flops"] / p["roof"]) if "roof" in p else "-"),
    )
    rows = [[label, unit, *(form(point) if point else "-" for point in points)] for label, unit, form in lines]
    rows = [row for row in rows if any(cell != "-" for cell in row[2:])]
    return Table("Roofline, of a call", ["metric", "unit", *(subject.name for subject in subjects)], rows)
