"""`python -m strobe.lab.pages.readme` rewrites the generated blocks of README.md, and of pages in docs, in the current folder.

A block stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`:

measured   the newest benchmarks/results/forward-*.json (by its date) that was measured on a GPU, and its picture
in short   the same, a line for each head dim, beside the backward
steps in short   the same of steps over a cache: the newest decode-*.json and heads-decode-*.json of one GPU
support    what each backend refuses, asked of the backend itself
others     see `strobe.lab.pages.measured_pages`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from strobe.call.dispatch import backend_module, unproven
from strobe.device import CPU, KNOWN, Arch
from strobe.lab.bench.intervals import SMALLEST, Ratio
from strobe.lab.bench.plan import Point, short
from strobe.lab.bench.report import best_peer, closest, load, missing, outdated, timed, verdicts
from strobe.lab.ladder import page as ladder_page
from strobe.lab.pages import measured_pages
from strobe.masks import Causal, Document, Prefix, Visible, Window
from strobe.problem import AttentionProblem, Dense, Varlen
from strobe.scores import Score

RESULTS = Path("benchmarks/results")
NOTHING = "No measurement on a GPU is published yet."

Key = TypeVar("Key")

BASE = AttentionProblem(
    lengths=Dense(2, 1024, 1024), heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128, dtype=torch.bfloat16, scale=128**-0.5
)
"""The problem that every row of the support matrix changes in one thing."""


def _dims(d: int, dv: int) -> dict:
    return {"head_dim": d, "head_dim_v": dv, "scale": d**-0.5}


def _every_other_key(batch, head, q_index, kv_index):
    return kv_index % 2 == 0


def _halved(score, batch, head, q_index, kv_index):
    return score * 0.5


def _half(score, batch, head, q_index, kv_index):
    return score * 0.0 + 0.5


FEATURES: dict[str, dict] = {
    "forward": {},
    "backward": {"phase": "backward"},
    "causal": {"mask": Causal()},
    "sliding window": {"mask": Window(256, 0)},
    "prefix": {"mask": Prefix(256)},
    "documents": {"mask": Document(torch.zeros(2, 1024, dtype=torch.int32))},
    "mask function": {"mask": Visible(_every_other_key)},
    "softcap": {"score": Score(softcap=30.0)},
    "ALiBi": {"score": Score(alibi=torch.ones(16))},
    "bias": {"score": Score(bias=torch.zeros(1, 16, 1024, 1024)), "learned": ("bias",)},
    "attention sinks": {"score": Score(sinks=torch.zeros(16)), "learned": ("sinks",)},
    "score function": {"score": Score(function=_halved, function_gradient=_half)},
    "dropout": {"dropout": 0.1},
    "GQA, MQA": {"heads_kv": 2},
    "packed sequences (varlen)": {"lengths": Varlen(2, 2048, 2048, 1024, 1024)},
    "used lengths (seqused)": {"seqused": True},
    "head dim 64": _dims(64, 64),
    "head dim 96": _dims(96, 96),
    "head dim 128": _dims(128, 128),
    "head dim 256": _dims(256, 256),
    "head dim 192, 128 for v": _dims(192, 128),
    "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16},
    "fp32": {"dtype": torch.float32},
}
"""Row of the support matrix -> what it changes in BASE."""


@dataclass(frozen=True)
class Column:
    """A backend and the devices that it is asked about."""

    backend: str
    archs: tuple[Arch, ...]

    @property
    def title(self) -> str:
        return f"`{self.backend}` on {', '.join(arch.name for arch in self.archs)}"


COLUMNS = (
    Column("sm100", (KNOWN["B200"],)),
    Column("sm90", (KNOWN["H200"],)),
    Column("sm80", (KNOWN["A100"], KNOWN["RTX 4090"], KNOWN["RTX 5090"])),
    Column("portable", (KNOWN["A100"], KNOWN["RTX 4090"], KNOWN["H200"])),
    Column("torch_cpu", (CPU,)),
    Column("tiled", (CPU,)),
)


class Footnotes:
    """Numbers for texts: the same text has the same number."""

    def __init__(self):
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self._texts:
            self._texts.append(text)
        return f"<sup>{self._texts.index(text) + 1}</sup>"

    def lines(self) -> list[str]:
        return [f"{i}. {text}" for i, text in enumerate(self._texts, 1)]


def support() -> str:
    """The support matrix; its footnotes are the backends' own words."""
    notes = Footnotes()
    lines = [_row(["", *(column.title for column in COLUMNS)]), _row(["---", *(":---:" for _ in COLUMNS)])]
    for feature, changes in FEATURES.items():
        problem = replace(BASE, **changes)
        lines.append(_row([feature, *(_cell(column, problem, notes) for column in COLUMNS)]))
    legend = "Every row is one change to a dense bf16 forward with head dim 128. ✓ runs, ✗ is refused with the reason below."
    return "\n".join([*lines, "", " ".join([legend, *_unproven()]), "", *notes.lines()])


def _unproven() -> list[str]:
    """Sentences for each backend that runs by name only, or whose backward or float32 does, on its column's first device."""
    parts = {"The backward of ": replace(BASE, phase="backward"), "In float32 ": replace(BASE, dtype=torch.float32)}
    found = []
    for name, arch in ((column.backend, column.archs[0]) for column in COLUMNS):
        for what, problem in {"": BASE, **parts}.items():
            if backend_module(name).refuses(problem, arch) is None and (words := unproven(name, problem, arch)):
                found.append(f"{what}`{name}` is {words}: it runs by name only, `backend={name!r}`.")
                if not what:
                    break
    return found


def _cell(column: Column, problem: AttentionProblem, notes: Footnotes) -> str:
    """One mark if all archs agree, else a mark for each. "forward only" where the backward of this row alone is refused."""
    by_arch = {arch.name: _mark(column.backend, arch, problem, notes) for arch in column.archs}
    if len(set(by_arch.values())) == 1:
        return next(iter(by_arch.values()))
    return ", ".join(f"{mark} {name}" for name, mark in by_arch.items())


def _mark(backend: str, arch: Arch, problem: AttentionProblem, notes: Footnotes) -> str:
    refuses = backend_module(backend).refuses
    reason = refuses(problem, arch)
    if reason is not None:
        return f"✗{notes.mark(reason)}"
    reason = refuses(replace(problem, phase="backward"), arch)
    if reason is None or reason == refuses(replace(BASE, phase="backward"), arch):
        return "✓"
    return f"✓ forward only{notes.mark(reason)}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def newest(root: Path, what: str) -> Path | None:
    """The newest result of the forward, or backward, on a GPU under root, or None."""
    dated = []
    for path in (root / RESULTS).glob(f"{what}-*.json"):
        report = load(path)
        if report["device"]["kind"] == "cuda":
            dated.append((report["date"], path))
    return max(dated)[1] if dated else None


def measured(root: Path, what: str = "forward") -> str:
    """The picture, the table of one dtype and where they come from, for a page in docs; says so if nothing was measured yet."""
    path = newest(root, what)
    if path is None:
        return NOTHING
    report = load(path)
    relative = ".." / path.relative_to(root)
    points = _of_one_dtype(report)
    lengths = sorted({facts["length"] for facts in points})
    lines = [f"![TFLOP/s against sequence length]({relative.with_suffix('.png')})", "", _origin(report, relative, points), ""]
    lines += [_row(["", "mask", *(short(length) for length in lengths)]), _row(["---", "---", *("---:" for _ in lengths)])]
    families: dict[Point, dict[int, dict]] = {}
    for facts in points:
        families.setdefault(Point.of(facts).family, {})[facts["length"]] = facts["results"]
    for family, by_length in families.items():
        cells = [_rate(by_length[length]) if length in by_length else "" for length in lengths]
        lines.append(_row([f"{family.dtype} {family.heading}", family.mask, *cells]))
    return "\n".join(lines)


def _of_one_dtype(report: dict) -> list[dict]:
    return [facts for facts in report["points"] if facts["dtype"] == report["points"][0]["dtype"]]


def in_short(root: Path) -> str:
    """How many times as fast as the best peer Strobe is: for each head dim, over its points, the forward and the backward."""
    paths = {what: path for what in ("forward", "backward") if (path := newest(root, what)) is not None}
    reports = {what: load(path) for what, path in paths.items()}
    if not reports:
        return NOTHING
    found = {
        what: _ratios_by(_of_one_dtype(report), lambda facts: Point.of(facts).family.heading)
        for what, report in reports.items()
    }
    headings = list(dict.fromkeys(heading for by_heading in found.values() for heading in by_heading))
    lines = [_row(["", *reports]), _row(["---", *("---:" for _ in reports)])]
    lines += [
        _row([heading, *(_over_points(by_heading.get(heading, [])) for by_heading in found.values())]) for heading in headings
    ]
    picture = next(iter(paths.values())).relative_to(root).with_suffix(".png")
    origins = [_short_origin(report, paths[what].relative_to(root)) for what, report in reports.items()]
    return "\n".join([*lines, "", " ".join(origins), "", f"![TFLOP/s against sequence length]({picture})"])


def steps_in_short(root: Path) -> str:
    """The same of a step over a cache: for each number of heads and head dim, over lengths, batches and layouts, by the queries
    of a request."""
    reports = _of_steps(root)
    if not reports:
        return NOTHING
    points = [facts for report, _ in reports for facts in report["points"]]
    found = _ratios_by(points, lambda facts: (_heads_of(facts), facts["queries"]))
    queries = sorted({n for _, n in found})
    lines = [_row(["", *(f"{n} quer{'y' if n == 1 else 'ies'}" for n in queries)]), _row(["---", *("---:" for _ in queries)])]
    lines += [
        _row([heads, *(_over_points(found.get((heads, n), [])) for n in queries)])
        for heads in dict.fromkeys(h for h, _ in found)
    ]
    batches, lengths = (sorted({facts[name] for facts in points}) for name in ("batch", "length"))
    contenders = dict.fromkeys(name for report, _ in reports for name in report["contenders"])
    peers = ", ".join(name for name in contenders if not name.startswith("strobe"))
    of, to = batches[0], batches[-1]
    what = f"{of} to {to} requests of {short(lengths[0])} to {short(lengths[-1])} keys, contiguous and in pages, beside {peers}"
    dates = " and ".join(sorted({report["date"][:10] for report, _ in reports}))
    files = ", ".join(f"[JSON]({path})" for _, path in reports)
    where = f"{reports[0][0]['device']['name']}, {dates}, {files}, [how](docs/serving.md#measured)"
    return "\n".join([*lines, "", f"A step over a cache, {what}: {verdicts(points)} ({where})."])


def _heads_of(facts: dict) -> str:
    """The heads of a step, and their head dim if it is not the usual one."""
    dim = f", D={facts['head_dim']}" if facts["head_dim"] != 128 else ""
    return f"heads {facts['heads']}/{facts['heads_kv']}{dim}"


OTHER_STEPS = ("heads-decode-*.json", "narrow-decode-*.json", "wide-decode-[!s]*.json", "wide-decode-shared-*.json")
"""Results of other heads and head dims than those of decode-*.json."""


def _of_steps(root: Path) -> list[tuple[dict, Path]]:
    """The newest decode-*.json of a GPU, and of `OTHER_STEPS` the newest of each of the same GPU."""
    found = [each for each in measured_pages.results(root, "decode-*.json") if each[0]["device"]["kind"] == "cuda"][-1:]
    for pattern in OTHER_STEPS:
        others = measured_pages.results(root, pattern)
        found += [each for each in others if found and each[0]["device"]["name"] == found[0][0]["device"]["name"]][-1:]
    return found


def _ratios_by(points: list[dict], key: Callable[[dict], Key]) -> dict[Key, list[Ratio]]:
    """The points' ratios to their best peers, by what `key` says of a point."""
    found: dict[Key, list[Ratio]] = {}
    for facts in points:
        if compared := closest(facts["results"]):
            found.setdefault(key(facts), []).append(compared[1])
    return found


def _over_points(ratios: list[Ratio]) -> str:
    """The mean of points, and the least and the greatest of them: "**1.12 ±0.01** (1.03 to 1.21)"."""
    if not ratios:
        return ""
    of_all, values = Ratio.over(ratios), [ratio.value for ratio in ratios]
    mark = {"ahead": "**", "behind": "*"}.get(of_all.verdict, "")
    return f"{mark}{of_all}{mark} ({min(values):.2f} to {max(values):.2f})"


def _short_origin(report: dict, path: Path) -> str:
    """Against whom, at how many points, where and when, and whether its kernels have changed since."""
    points = _of_one_dtype(report)
    lengths = sorted(facts["length"] for facts in points)
    peers = ", ".join(name for name in timed(report) if not name.startswith("strobe"))
    what = f"The {report['what']}, {short(lengths[0])} to {short(lengths[-1])} tokens, beside {peers}"
    where = f"{report['device']['name']}, {report['date'][:10]}, [JSON]({path})"
    changed = f" Changed since then: {', '.join(names)}." if (names := outdated(report)) else ""
    return f"{what}: {verdicts(points)} ({where}).{changed}"


def _rate(results: dict[str, dict]) -> str:
    """Our TFLOP/s, and in brackets how many times as fast as the best peer that is: bold if ahead, in italics if behind."""
    ours, found = results.get("strobe", {}).get("tflops"), closest(results)
    if ours is None:
        best = best_peer(results)
        return f"- ({best[0]} {best[1]:.0f})" if best else "-"
    if found is None:
        return f"{ours:.0f}"
    mark = {"ahead": "**", "behind": "*"}.get(found[1].verdict, "")
    return f"{ours:.0f} ({mark}{found[1]}{mark})"


def _origin(report: dict, path: Path, points: list[dict]) -> str:
    """What the table says, then device, date, versions, protocol, who is missing, command: a sentence each."""
    device, ceiling, packages = report["device"], report["ceiling"], report["device"]["packages"]
    versions = f"torch {packages['torch']}, Triton {packages['triton']}, cuDNN {device['cudnn']}"
    for name in ("flash-attn-4", "tokenspeed-fa3"):
        versions += f", {name} {packages[name]}" if packages.get(name) else ""
    peers = ", ".join(name for name in timed(report) if not name.startswith("strobe"))
    commit = f", commit {device['commit'][:10]}" if device["commit"] else ""
    parts = [f"Attention {report['what']} in TFLOP/s (causal counted as half) and, in brackets, over the best of {peers}."]
    if counted := verdicts(points):
        parts.append(
            f"By its 95 % interval (±) and {SMALLEST:.0%} at least, Strobe is {counted}; bold is ahead, italics behind."
        )
    parts += [
        f"Not taking part: {'; '.join(absent)}." if (absent := missing(report)) else "",
        f"{device['name']}, {report['date'][:10]}{commit}, driver {device['driver']}, {versions}.",
        f"{_rounds(points)}, launches alone{_inputs(report, points)}.",
        f"A matrix product ({ceiling['matmul']}) ran at {ceiling['before']:.0f} in the same process.",
        f"Reproduce with `{report['command']}`; all figures are in [{path.name}]({path}).",
        f"The run is incomplete: {report['stopped']}." if report["stopped"] else "",
        f"Changed since then: {', '.join(changed)}." if (changed := outdated(report)) else "",
        report.get("remark", ""),
    ]
    return " ".join(part for part in parts if part)


def _inputs(report: dict, points: list[dict]) -> str:
    """The kind of inputs, and the largest share of blocks that were computed twice; nothing of reports that do not say."""
    if "inputs" not in report:
        return ""
    kind = {"normal": "N(0, 1)", "model": "a model's activations", "worst": "the optimistic softmax's worst"}[report["inputs"]]
    shares = [facts["redone"] for facts in points if facts.get("redone") is not None]
    return f"; inputs: {kind}" + (f", at most {max(shares):.0%} of the blocks computed twice" if shares else "")


def _rounds(points: list[dict]) -> str:
    """How many rounds Strobe had: "Median of 8 to 32 interleaved rounds"."""
    found = [len(facts["results"].get("strobe", {}).get("rounds", [])) for facts in points]
    counts = [count for count in found if count]
    if not counts:
        return "Interleaved rounds"
    least, most = min(counts), max(counts)
    return f"Median of {least} interleaved rounds" if least == most else f"Median of {least} to {most} interleaved rounds"


PAGES: dict[str, dict[str, Callable[[Path], str]]] = {
    "README.md": {
        "in short": in_short,
        "steps in short": steps_in_short,
    },
    "docs/ampere.md": {
        "measured": measured_pages.ampere,
        "portable": measured_pages.ampere_portable,
        "float32": measured_pages.ampere_float32,
    },
    "docs/training.md": {
        "deterministic": measured_pages.deterministic,
        "train-gpt": measured_pages.trained,
        "training steps": measured_pages.training_steps,
    },
    "docs/backward.md": {"changed-scores": measured_pages.changed_scores},
    "docs/bench.md": {
        "measured": measured,
        "measured backward": lambda root: measured(root, "backward"),
        "zoo": measured_pages.zoo,
        "single": measured_pages.single,
    },
    "docs/cpu.md": {"backends": measured_pages.cpu_backends, "tiles": measured_pages.cpu_tiles},
    "docs/fp8.md": {
        "accuracy": measured_pages.fp8_accuracy,
        "sums": measured_pages.fp8_sums,
        "speed": measured_pages.fp8_speed,
    },
    "docs/upstream.md": {"shared": measured_pages.shared},
    "docs/ladder.md": {
        "measured": ladder_page.measured,
        "example": ladder_page.example,
        "climb": ladder_page.climb,
        "studies": ladder_page.studies,
        "pair": ladder_page.pair,
        "counters": ladder_page.counters,
    },
    "docs/masks.md": {"documents": measured_pages.documents},
    "docs/optimistic_softmax.md": {"redo-cost": measured_pages.redo_cost},
    "docs/parallel.md": {"on paper": measured_pages.context_parallel, "measured": measured_pages.parallel},
    "docs/serving.md": {"measured": measured_pages.decode},
    "docs/support.md": {"support": lambda root: support()},
    "docs/simulator.md": {"model error": measured_pages.model_error},
    "docs/timeline.md": {"timeline": measured_pages.timelines, "hidden": measured_pages.hidden},
}


def rewritten(text: str, root: Path, page: str = "README.md") -> str:
    """A page's text with its generated blocks made anew. ValueError where a block has no markers."""
    for name, make in PAGES[page].items():
        text = with_block(text, name, make(root), page)
    return text


def with_block(text: str, name: str, block: str, file: str) -> str:
    """The text of a file with one generated block made anew."""
    markers = re.search(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", text, re.DOTALL)
    if markers is None:
        raise ValueError(f"{file} must hold <!-- begin: {name} --> and <!-- end: {name} --> on lines of their own")
    return f"{text[: markers.end(1)]}{block}\n{text[markers.start(2) :]}"


def main() -> None:
    for page in PAGES:
        path = Path(page)
        path.write_text(rewritten(path.read_text(), Path(), page))


if __name__ == "__main__":
    main()
