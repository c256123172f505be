"""The generated blocks of docs/blackwell.md: every table in it, from the report of `strobe blackwell`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from strobe.kernels.memory_map import lines
from strobe.kernels.sm100.config import TMEM_COLUMNS, Config
from strobe.lab.bench.machine import save
from strobe.lab.blackwell import experiments
from strobe.lab.blackwell.experiments import SCHEDULES
from strobe.lab.pages.readme import with_block

PAGE = Path("docs/blackwell.md")
REPORT = Path("benchmarks/results/blackwell-simulated.json")

FA4_TFLOPS, B200_SMS, B200_GHZ = 1613, 148, 1.85

UNITS = {"tensor core": "tensor core", "mufu": "exp2 unit", "fma": "FMA", "alu": "ALU", "TMA": "copies"}


def rewritten(text: str, report: dict) -> str:
    """The page with its generated blocks made anew. ValueError where one has no markers."""
    for name, make in BLOCKS.items():
        text = with_block(text, name, make(report), PAGE.name)
    return text


def make(root: Path) -> None:
    """`strobe blackwell`: runs everything, shows progress and a table, writes the report, the pictures and the page under root.
    FileNotFoundError if the page is not there."""
    from strobe.lab.blackwell.pictures import pictures

    page, console = root / PAGE, Console()
    text = page.read_text()
    with console.status("") as status:
        for step, found in experiments.report(root):  # noqa: B007
            status.update(f"simulating: {step}")
    show(found, console)
    save(root / REPORT, found)
    page.write_text(rewritten(text, found))
    for path in (root / REPORT, page, *pictures(page.parent)):
        console.print(f"written: {path}", highlight=False)


def show(found: dict, console: Console) -> None:
    """Cycles of 128 query rows and 128 keys in every experiment."""
    table = Table("", "", *SCHEDULES, title=f"{found['what']}\ncycles of 128 query rows and 128 keys", box=None)
    for name, rows in found["experiments"].items():
        for i, row in enumerate(rows):
            table.add_row("" if i else name, row["name"], *(f"{row[schedule]['cycles']:.0f}" for schedule in SCHEDULES))
    console.print(table)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines_ = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines_)


def _experiments(name: str, units: Sequence[str] = (), groups: int = 1) -> Callable[[dict], str]:
    """A table of experiments: cycles in both schedules, times those of the first row of its group, and how busy `units` are.
    The rows make `groups` groups of equal size."""

    def table(report: dict) -> str:
        rows, made = report["experiments"][name], []
        size = len(rows) // groups
        for i, row in enumerate(rows):
            cells = [row["name"]]
            for schedule in SCHEDULES:
                cycles, first = row[schedule]["cycles"], rows[i // size * size][schedule]["cycles"]
                cells += [f"{cycles:.0f}", f"{cycles / first:.2f}"]
            cells += [" / ".join(f"{row[schedule]['busy'].get(unit, 0):.0%}" for schedule in SCHEDULES) for unit in units]
            made.append(cells)
        head = ["", *(cell for schedule in SCHEDULES for cell in (schedule, "times"))]
        return _markdown([*head, *(f"{UNITS[unit]} busy" for unit in units)], made)

    return table


def _costs(report: dict) -> str:
    rows = [
        [name, f"{cost['value']:g}", ("assumed: " if cost["assumed"] else "") + cost["source"]]
        for name, cost in report["costs"].items()
        if not name.startswith(("cp_async", "rate of mma", "rate of cp_async", "named_barrier"))
    ]
    head, rule, *body = _markdown(["cost", "", "source"], rows).splitlines()
    return "\n".join([head, rule.replace("---: | ---:", "---: | ---"), *body])


def _sensitivity(report: dict) -> str:
    answers = list(next(iter(report["sensitivity"].values())))
    rows = []
    for schedule in SCHEDULES:
        found = {name: ratios for name, ratios in report["sensitivity"].items() if name.startswith(f"{schedule}; ")}
        plain, *others = found.values()
        for answer in answers:
            low, high = (choose(ratios[answer] for ratios in others) for choose in (min, max))
            rows.append([f"{answer}, {schedule}", f"{plain[answer]:.2f}", f"{low:.2f}", f"{high:.2f}"])
    return _markdown(["cycles, times those of the kernel as it is", "", "least", "most"], rows)


def _barriers(report: dict) -> str:
    uses = report["experiments"]["barriers"][0]["as written"]["barrier_uses"]
    roles = list(dict.fromkeys(key.split(": ")[0] for key in uses))
    kinds = ("wait", "arrive", "commit")
    names = {"softmax": "softmax 0"}
    rows = [[names.get(role, role), *(f"{uses.get(f'{role}: {kind}', 0):g}" for kind in kinds)] for role in roles]
    return _markdown(["of a block of keys, both Q stages", "waits", "arrivals", "commits"], rows)


def _slack(report: dict) -> str:
    cells = [
        f"{row['mma_waits']:.0f} of {2 * row['cycles']:.0f} cycles ({schedule})"
        for schedule, row in ((schedule, report["experiments"]["stages"][0][schedule]) for schedule in SCHEDULES)
    ]
    extra = 2 * report["costs"]["passing_wait"]["value"]
    return (
        f"The MMA warp waits for {cells[0]} or {cells[1]} of a block of both stages. A barrier of its own for each hand-over "
        f"would be one wait more of this warp for each stage: {extra:.0f} cycles, by the cost of a wait that passes."
    )


def _columns(report: dict) -> str:
    rows = [
        [entry["arrangement"], str(entry["columns"]), "yes" if entry["columns"] <= TMEM_COLUMNS else "no"]
        for entry in report["columns"]
    ]
    return _markdown(["head dim 128, 128 keys a block unless it says", "columns", f"fit in {TMEM_COLUMNS}"], rows)


def _rescales(report: dict) -> str:
    return _markdown(["", "blocks that rescale O"], [[name, f"{part:.0%}"] for name, part in report["rescales"].items()])


def _totals(report: dict) -> str:
    return _markdown(["", "cycles"], [[name, f"{cycles:.0f}"] for name, cycles in report["totals"].items()])


def _code(report: dict) -> str:
    code = report["machine_code"]
    rows = [
        [f"{kernel}, {role}", str(number)]
        for kernel, roles in code["shuffles"].items()
        for role, number in roles.items()
        if role.startswith(("consumer", "softmax"))
    ]
    return _markdown(["role", "SHFL"], rows)


def _products(report: dict) -> str:
    gaps = sorted(report["machine_code"]["between_products"])
    return (
        "- Descriptors of shared memory are computed from the ring's slot on the uniform datapath: in the compiled mma warp "
        f"{gaps[len(gaps) // 2]} other instructions stand between one tcgen05.mma and the next (median of {len(gaps)}). That "
        "is little beside the time of a product. So hoisting them out of the loop, which was another explanation, cannot "
        "matter much in this kernel: the mma warp waits most of the time (above)."
    )


def _exponentials(report: dict) -> str:
    gaps = report["machine_code"]["between_exponentials"]
    return (
        f"In the compiled softmax warp {sum(gap <= 1 for gap in gaps)} of the {len(gaps)} gaps between exponentials hold at "
        "most one other instruction."
    )


def _maps(_report: dict) -> str:
    config = Config(128, 128)
    return "\n".join(["```", *lines(config), "```"])


def _origin(report: dict) -> str:
    base = report["experiments"]["stages"][0]
    simulated = ", ".join(f"{base[schedule]['cycles']:.0f} {schedule}" for schedule in SCHEDULES)
    published = 4 * 128**3 / (FA4_TFLOPS * 1e12 / (B200_SMS * B200_GHZ * 1e9))
    hopper = "; ".join(
        f"head dim {dim}: {periods['simulated']:.0f} simulated, {periods['measured']:.0f} measured"
        for dim, periods in report["hopper"].items()
    )
    return (
        f"{report['date'][:10]}, `{report['command']}`; all of it is in [{REPORT.name}](../{REPORT}).\n\n"
        f"- Cycles of a block of keys of the Hopper forward by the same simulator, as written, and of an H100: {hopper}.\n"
        f"- 128 query rows and 128 keys at head dim 128 take {simulated}. FlashAttention-4's paper (arXiv 2603.05451) reports "
        f"up to {FA4_TFLOPS} TFLOP/s of its own kernel on a B200: {published:.0f} cycles at the data sheet's {B200_SMS} SMs "
        f"and {B200_GHZ} GHz."
    )


BLOCKS: dict[str, Callable[[dict], str]] = {
    "origin": _origin,
    "maps": _maps,
    "costs": _costs,
    "stages": _experiments("stages", ("tensor core", "mufu")),
    "rows": _experiments("rows"),
    "code": _code,
    "emulation": _experiments("emulation", ("tensor core", "mufu", "fma", "alu"), groups=2),
    "exponentials": _exponentials,
    "split": _experiments("split", ("tensor core",), groups=2),
    "barriers": _barriers,
    "slack": _slack,
    "barrier-costs": _experiments("barriers"),
    "products": _products,
    "columns": _columns,
    "rescaling": _experiments("rescaling", ("tensor core",), groups=2),
    "rescales": _rescales,
    "ring": _experiments("ring", groups=2),
    "ctas": _experiments("ctas", ("tensor core", "TMA")),
    "totals": _totals,
    "sensitivity": _sensitivity,
}
