"""`strobe ladder show`, `diff` and `explain`: a rung's source and machine code, beside those of another, in tables and
sentences."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from strobe.device import KNOWN, Arch
from strobe.lab.counters import counters, ncu
from strobe.lab.ladder.arithmetic import STEPS, Tile, footprint, races
from strobe.lab.ladder.compiled import SHOWN, compile_rung, of_rung
from strobe.lab.ladder.edited import told, variant
from strobe.lab.ladder.report import rows
from strobe.lab.model.banks import ACCESSES, Layout, count
from strobe.lab.model.banks import Tile as Matrix
from strobe.lab.model.occupancy import Block, Occupancy
from strobe.ladder import RUNGS, Rung

NUMBERS = ("registers", "spill_bytes", "smem_bytes", "threads", "blocks", "conflicts", "instructions")


def source(rung: Rung) -> str:
    """The text of a rung's file."""
    assert rung.module.__file__ is not None
    return Path(rung.module.__file__).read_text()


def arch_for(rungs: Sequence[Rung], arch: Arch | None) -> Arch:
    """The arch to compile for: the one that was named, else an A100, or an H200 where a rung needs one."""
    return arch or KNOWN["A100" if all(rung.least <= 80 for rung in rungs) else "H200"]


def facts(rungs: Sequence[Rung], arch: Arch, head_dim: int) -> dict[str, Any]:
    """What the compiler makes of rungs for one arch, as a JSON object. ValueError for what a rung does not take."""
    return {
        "what": "ladder compiled",
        "arch": str(arch),
        "head_dim": head_dim,
        "rungs": [
            {"number": rung.number, "title": rung.title, "compiled": of_rung(compile_rung(rung, arch, head_dim))}
            for rung in rungs
        ],
    }


def table(found: dict[str, Any], only: Sequence[str] | None = None) -> Table:
    """`facts` as a table: a column for each rung. only: these numbers and instructions; None: all that are not zero."""
    shown = Table(title=f"{found['arch']}, head dim {found['head_dim']}; instructions of the main loop", title_justify="left")
    shown.add_column("")
    for rung in found["rungs"]:
        shown.add_column(f"{rung['number']} {rung['title']}", justify="right")
    for name in only or (*NUMBERS, *SHOWN):
        cells = [value_of(rung["compiled"], name) for rung in found["rungs"]]
        if only or any(cells):
            shown.add_row(name, *("-" if cell is None else f"{cell:g}" for cell in cells))
    return shown


def value_of(compiled: dict | None, name: str) -> float | None:
    """A number of `of_rung` by its name, or how often an instruction stands in the loop; None of a rung without kernels."""
    if compiled is None:
        return None
    return compiled[name] if name in compiled else compiled["loop"].get(name, 0)


def difference(old: Rung, new: Rung) -> str:
    """The lines that differ between two rungs' files, as `diff -u` shows them."""
    left, right = (source(rung).splitlines() for rung in (old, new))
    return "\n".join(difflib.unified_diff(left, right, f"{old.name}.py", f"{new.name}.py", lineterm="", n=1))


def changed_lines(old: Rung, new: Rung) -> int:
    """How many lines the second rung has that the first has not, but for its docstring."""
    left, right = (source(rung).split('"""', 2)[2].splitlines() for rung in (old, new))
    changes = difflib.unified_diff(left, right, lineterm="", n=0)
    return sum(line.startswith("+") and not line.startswith("+++") for line in changes)


def side_by_side(old: Rung, new: Rung, width: int) -> Table:
    """Two rungs' files beside each other, each line next to the one that it became."""
    left, right = source(old).splitlines(), source(new).splitlines()
    shown = Table(show_lines=False, box=None, width=width)
    shown.add_column(f"{old.number} {old.title}", ratio=1)
    shown.add_column(f"{new.number} {new.title}", ratio=1)
    for kind, i, j, k, end in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for n in range(max(j - i, end - k)):
            one, other = left[i + n] if i + n < j else "", right[k + n] if k + n < end else ""
            shown.add_row(_plain(one), _plain(other), style=None if kind == "equal" else "bold yellow")
    return shown


def _plain(line: str) -> str:
    return line.replace("[", "\\[")


def explanation(rung: Rung, before: Rung | None, found: dict[str, Any], report: dict | None) -> list[str]:
    """Sentences: what held back the rung before, what changes, the prediction, what was measured (report: of `strobe ladder
    run`), and what belongs to this rung alone."""
    lines = [
        f"Rung {rung.number}: {rung.title}",
        f"The bottleneck before: {rung.bottleneck}",
        f"The change: {rung.changes}",
        f"The prediction: {rung.prediction}",
    ]
    lines += _measured(rung, report)
    lines.append(f"If it gains nothing: {rung.nothing}")
    if before is not None and rung.number > 4:
        lines.append(f"In the source: {changed_lines(before, rung)} new lines of code.")
    return lines + EXTRAS.get(rung.number, lambda found: [])(found)


def _measured(rung: Rung, report: dict | None) -> list[str]:
    row = next((row for row in rows(report) if row["number"] == rung.number), None) if report else None
    if row is None or row["seconds"] is None:
        return ["Measured: not yet; `strobe ladder run` on a GPU, then --report with its JSON."]
    gain = f", {row['over before']:.2f} times as fast as the rung before" if row["over before"] else ""
    return [f"Measured on {report['device']['name'] if report else ''}: {row['tflops']:.3g} TFLOP/s{gain}."]


# ---- what belongs to one rung alone


def _too_many(found: dict) -> list[str]:
    """How large the tile may be, and the launch that fails for its registers."""
    arch = next(arch for arch in KNOWN.values() if str(arch) == found["arch"])
    dim = found["head_dim"]
    taken = footprint(32, 32, dim)
    lines = [
        f"Shared memory of a kernel with one thread a score and tiles of Q, K, V and O, S, P and six vectors in it: {taken} "
        f"bytes at 32 x 32, head dim {dim}. Ours holds O, l and m in registers, and S."
    ]
    if taken <= arch.smem_per_block:
        one = Occupancy(arch, Block(1024, 47, taken))
        lines.append(
            f"Of an SM that is {arch.smem_carveouts[-1] // one.smem_allocated} blocks by shared memory, "
            f"{one.limits['registers']} by registers, {one.limits['warps']} by warps: {' and '.join(one.binds)} bind. A wider "
            f"tile has no threads: 32 x 32 is 1024, the most of a block. So {taken} bytes cost nothing."
        )
    uncapped = uncapped_registers(arch, dim)
    lines.append(
        f"Too many resources requested: Triton tells ptxas that there are 1024 threads, so it stays within 65536 / 1024 = 64 "
        f"registers. Told that it may use 128, it takes {uncapped}, and {too_many(arch, uncapped)}"
    )
    kept = [f"{columns} columns: {'; '.join(races(1024 // columns, columns)) or 'none'}" for columns in (32, 64)]
    lines.append(
        f"Barriers between its steps ({', '.join(step.name for step in STEPS)}), with a thread a score, that keep a race away: "
        f"{'. '.join(kept)}. So they may go only while a row is one warp, and only while the lanes of a warp keep step, which "
        "GPUs from Volta on do not promise without __syncwarp."
    )
    return lines


def uncapped_registers(arch: Arch, head_dim: int) -> int:
    """Registers that rung 3 takes if ptxas is not told to fit 1024 threads."""
    import torch

    from strobe.lab.binary.offline import pretend_gpu
    from strobe.lab.binary.sass import resources_of

    q = torch.empty(16, 4096, head_dim, device="meta")
    launch = RUNGS[3].launches(q, q, q, q)[0]
    with pretend_gpu(arch.capability):
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants, maxnreg=128)
    return resources_of(compiled).registers


def too_many(arch: Arch, registers: int) -> str:
    """What becomes of a launch of 1024 threads with so many registers each."""
    try:
        Occupancy(arch, Block(1024, registers, 0))
    except ValueError as error:
        return f"the launch fails: {str(error).removeprefix('occupancy: ')}."
    return f"the launch goes through, as 1024 x {registers} registers fit."


PADS = 0, 4, 8, 16


def _longer_rows(pad: int) -> Callable[[Matrix, int, int], int]:
    """Where a byte of a float32 tile is whose rows have so many elements more."""
    return lambda tile, row, byte: row * (tile.row_bytes + 4 * pad) + byte


def padding(pads: Sequence[int] = PADS) -> list[dict[str, Any]]:
    """Rung 4's square of scores, 64 x 64 float32, with rows made longer: wavefronts of the accumulator's store and of a row's
    load, as multiples of those without conflicts, and whether wmma takes the stride, which it wants as a multiple of 16
    elements."""
    tile = Matrix(64, 64, 4)
    found = []
    for pad in pads:
        layout = Layout("", _longer_rows(pad))
        store, column = (count(tile, layout, ACCESSES[name]) for name in ("fragment", "column"))
        found.append({"pad": pad, "stride": 64 + pad, "store": store.ways, "column": column.ways, "wmma": (64 + pad) % 16 == 0})
    return found


def _padding(found: dict) -> list[str]:
    lines = [
        "Padding S, 64 x 64 of float32: "
        + "; ".join(
            f"{row['pad']} more elements a row: the accumulator's store {row['store']:g}-way, a column's load "
            f"{row['column']:g}-way{'' if row['wmma'] else ' (a stride that wmma does not take)'}"
            for row in padding()
        )
        + ". wmma wants a leading dimension that is a multiple of 16 elements: a 16-wide tile padded by 8 has stride 24, and "
        "results go to wrong addresses."
    ]
    return [
        *lines,
        "wmma hides who holds what, so S and P must cross shared memory; mma.sync's layouts are in the PTX manual: rung 5.",
    ]


def _tile(found: dict) -> list[str]:
    tile = Tile(64, 64, found["head_dim"], folded=False)
    mma = ", ".join(f"{one['product']} {one['m']} x {one['n']} x {one['k']} = {one['mma']} mma" for one in tile.gemms())
    return [f"A warp's products of one block: {mma}. See strobe ladder shapes for registers, loads and intensity."]


EXTRAS = {3: _too_many, 4: _padding, 5: _tile}


MOST_MOVED = 12
"""How many counters a table shows, those first that moved by the largest factor."""


def counters_moved(profile: dict[str, Any], before: Rung, rung: Rung) -> Table:
    """The table of `moved_counters`."""
    heads, *lines = moved_counters(profile, before, rung)
    shown = Table(title="Counters that moved", title_justify="left")
    for number, head in enumerate(heads):
        shown.add_column(head, justify="right" if number else "left")
    for line in lines:
        shown.add_row(*line)
    return shown


def moved_counters(profile: dict[str, Any], before: Rung, rung: Rung) -> list[list[str]]:
    """The counters of Nsight Compute that differ most between two rungs, by the JSON of `strobe ladder run --profile`: a line
    of heads, then the counters'. ValueError if one of the rungs is not in it."""
    found = {subject["name"]: subject["metrics"] for subject in profile["subjects"]}
    names = [f"{one.number} {one.title}" for one in (before, rung)]
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"a profile must hold both rungs, got one without {' and '.join(missing)}")
    labels = {row.metrics[0]: row.label for row in counters.ROWS}
    old, new = (found[name] for name in names)
    pairs = {
        metric: [one[metric]["mean"] * ncu.factor(one[metric]["unit"]) for one in (old, new)]
        for metric in labels
        if metric in old and metric in new and not isinstance(old[metric]["mean"], str)
    }
    lines = [["", *names, "times"]]
    for metric, (a, b) in sorted(pairs.items(), key=lambda pair: -_factor(*pair[1]))[:MOST_MOVED]:
        lines.append([labels[metric], f"{a:.4g}", f"{b:.4g}", f"{b / a:.3g}" if a else "-"])
    return lines


def _factor(a: float, b: float) -> float:
    """By what factor two numbers differ; infinite where one of them is 0."""
    low, high = sorted((abs(a), abs(b)))
    return 1.0 if high == 0 else float("inf") if low == 0 else high / low


def show_variants(rung: Rung, arch: Arch, head_dim: int) -> list[str]:
    """What the compiler makes of each variant of a rung, beside the rung itself."""
    lines = []
    for title, old, new in rung.variants:
        with variant(rung, old, new) as edited:
            made = of_rung(compile_rung(edited, arch, head_dim))
        numbers = ", ".join(
            f"{value_of(made, name):g} {name}" for name in ("LDG", "LDSM", "registers", "spill_bytes", "smem_bytes")
        )
        lines.append(f"Another way: {title}: {numbers}")
    return lines


def show_waits(rung: Rung) -> list[str]:
    """What the simulator says of the rung without each of its waits."""
    return [
        f"Without {statement}, the simulator says: {told(rung, statement) or 'nothing is wrong'}" for statement in rung.waits
    ]
