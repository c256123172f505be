"""The generated blocks of docs/training.md and docs/backward.md, each from the newest result of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

RESULTS = Path("benchmarks/results")
NOTHING = "Not measured on a GPU yet."


def trained(root: Path) -> str:
    """Each run of examples/train_gpt.py on a GPU: its picture and what it says, the longest context last."""
    reports = [(report, path) for report, path in results(root, "train-gpt-*.json") if report["device"]["kind"] == "cuda"]
    reports.sort(key=lambda found: found[0]["settings"]["context"])
    return "\n\n".join(_training(report, path) for report, path in reports) or NOTHING


def _training(report: dict, path: Path) -> str:
    settings, runs = report["settings"], report["runs"]
    tail = max(1, settings["steps"] // 10)
    ends = {name: fmean(run["loss"][-tail:]) for name, run in runs.items()}
    apart = [abs(a - b) for a, b in zip(runs["strobe"]["loss"], runs["SDPA"]["loss"], strict=True)]
    shape = f"{settings['layers']} layers of {settings['width']}, {settings['batch']} x {settings['context']} bytes a step"
    return (
        f"![Loss curves of Strobe and of PyTorch's attention](../{path.with_suffix('.png')})\n\n"
        f"{_where(report, path)} {shape}, {settings['steps']} steps. The mean loss of the last {tail} steps is "
        f"{ends['strobe']:.4f} with Strobe and {ends['SDPA']:.4f} with PyTorch's attention; the two differ by "
        f"{fmean(apart):.1e} on average and by {max(apart):.1e} at most. A whole training step takes "
        f"{runs['strobe']['step_ms']:.2f} ms and {runs['SDPA']['step_ms']:.2f} ms."
    )


def deterministic(root: Path) -> str:
    """What benchmarks/determinism.py found."""
    found = results(root, "determinism-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    runs = report["protocol"]["runs"]
    rows = [["", "distinct dQ / dK / dV", "spread of dQ", "ms", "deterministic: distinct", "ms", "time"]]
    for at in report["points"]:
        point, default, fixed = at["point"], at["scatter"]["default"], at["scatter"]["deterministic"]
        names = ("dq", "dk", "dv")
        rows.append([
            f"D {point['head_dim']}, {point['mask']}, {point['length']}",
            " / ".join(str(default[name]["distinct"]) for name in names), f"{default['dq']['spread']:.1e}",
            f"{at['ms']['default']:.2f}", " / ".join(str(fixed[name]["distinct"]) for name in names),
            f"{at['ms']['deterministic']:.2f}", f"{at['ms']['deterministic'] / at['ms']['default']:.2f}",
        ])  # fmt: skip
    text = f"{runs} runs each on a busy GPU: how many different results there were, and by how much an element of dQ differed"
    return f"{_where(report, path)} {text}, relative to the largest. Times are of an idle GPU.\n\n{_table(rows)}"


def changed_scores(root: Path) -> str:
    """What benchmarks/changed_scores.py found."""
    found = results(root, "changed-scores-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    names = list(report["points"][0]["milliseconds"])
    rows = [["milliseconds", *names]]
    for point in report["points"]:
        dims = ", ".join(str(dim) for dim in dict.fromkeys(point["head_dims"]))
        rows.append([f"D {dims}: {point['feature']}", *(f"{point['milliseconds'][name]:.2f}" for name in names)])
    return f"{_where(report, path)} Causal, bf16, 4 x 4096 tokens, heads 2048 / D.\n\n{_table(rows)}"


def results(root: Path, pattern: str) -> list[tuple[dict, Path]]:
    """The reports of a pattern by their date, and their paths from the root."""
    paths = (root / RESULTS).glob(pattern)
    reports = ((json.loads(path.read_text()), path.relative_to(root)) for path in paths)
    return sorted(reports, key=lambda found: found[0]["date"])


def _where(report: dict, path: Path) -> str:
    device = report["device"]
    commit = f", commit {device['commit'][:10]}" if device.get("commit") else ""
    versions = f"torch {device['packages']['torch']}, Triton {device['packages']['triton']}"
    return f"{device['name']}, {report['date'][:10]}{commit}, {versions} ([JSON](../{path}))."


def _table(rows: Iterable[list[str]]) -> str:
    heading, *others = rows
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
