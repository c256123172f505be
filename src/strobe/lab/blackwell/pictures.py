"""Pictures of what the roles of the Blackwell forward do when, from simulated runs of the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from strobe.kernels.memory_map import Columns
from strobe.kernels.sm100.config import Config
from strobe.lab.blackwell.experiments import BASE, EVERY, WITHOUT, Experiment, config_of, run
from strobe.lab.timeline.timeline import draw
from strobe.sim.costs import SM100
from strobe.sim.machine import Report
from strobe.sim.trace import Span, Timeline

BLOCKS = 6
CYCLES = 9200
"""What a picture shows, from the first product on: two blocks of keys and a half."""

EVERY_BLOCK = "O is rescaled at every block"

PICTURES: dict[str, tuple[str, Experiment, str]] = {
    "all": (
        "As it is: two Q stages, correction warps, split P; no maximum grows so much that O is rescaled",
        BASE,
        "as written",
    ),
    "end": ("As it is: the end of a tile", BASE, "as written"),
    "interleaved": ("As it is, if the compiler interleaves all operations of a role perfectly", BASE, "interleaved"),
    "rescaling": (f"{EVERY_BLOCK}, by the correction warps", Experiment("", EVERY, growing=True), "as written"),
    "no-correction": (
        f"{EVERY_BLOCK}, by the softmax warps: no correction warps",
        Experiment("", {**EVERY, **WITHOUT}, growing=True),
        "as written",
    ),
    "one-stage": ("One Q stage", Experiment("", {"q_stages": 1}), "as written"),
    "no-split": ("P at once: no split P", Experiment("", {"split_p": False}), "as written"),
}
"""Title, experiment and schedule, by the name of the file; "end" shows the last cycles, the others the first."""


def pictures(folder: Path) -> list[Path]:
    """Draws them all, blackwell-NAME.png."""
    made = []
    for name, (title, experiment, schedule) in PICTURES.items():
        timeline = timeline_of(run(experiment, schedule, BLOCKS), config_of(experiment), f"{title} (simulated, {schedule})")
        begin = min(span.start for span in timeline.spans if span.track == "tensor core") - 100
        if name == "end":
            begin = max(span.end for span in timeline.spans) - CYCLES
        made.append(draw([timeline.cut(begin, begin + CYCLES)], folder / f"blackwell-{name}.png"))
    return made


def timeline_of(report: Report, config: Config, title: str) -> Timeline:
    """The Timeline of a timed run of one tile, a row for each role; "S0,n-1" is S of Q stage 0 and of the last of n
    blocks, which comes first."""
    tracks = [
        _loads(report, config.q_stages),
        _products(report, config),
        *(_softmax(report, config, w) for w in range(config.q_stages)),
        *([_correction(report, config)] if config.correction else []),
        _stores(report),
    ]
    return Timeline(title, tuple(span for track in tracks for span in track))


def _block(letter: str, i: int) -> str:
    return f"{letter},n-{i + 1}"


def _loads(report: Report, stages: int) -> Iterator[Span]:
    """K of a block, then its V, in turn; after the first K the stages' Q. The time in which their bytes move."""
    blocks = ((letter, i) for i in count() for letter in "KV")
    queries = iter(range(stages))
    for span in report.spans:
        if span.track == "TMA" and span.name.startswith("load"):
            name = f"Q{next(queries)}" if ".q" in span.name else _block(*next(blocks))
            yield Span("load (TMA)", name.replace(",", " "), span.start, span.end - SM100.tma_latency)


def _stores(report: Report) -> Iterator[Span]:
    for span in report.spans:
        if span.track == "TMA" and span.name.startswith("store"):
            yield Span("epilogue", "epilogue", span.start, span.end - SM100.tma_latency)


def _products(report: Report, config: Config) -> Iterator[Span]:
    """Spans of products. Products that follow each other on one accumulator without a gap are one span."""
    accumulators = [columns for columns in config.tmem_map() if columns.name[0] in "SO"]
    done = {columns.name: 0 for columns in accumulators}
    parts = {"S": 1, "O": 4 * len(config.chunks_v)}
    now: Span | None = None
    for span in (span for span in report.spans if span.track == "tensor core"):
        target = _columns_of(span.name, accumulators)
        name = _block(target, done[target] // parts[target[0]])
        done[target] += 1
        if now is not None and now.name == name and span.start - now.end < 1:
            now = Span(now.track, name, now.start, span.end)
            continue
        if now is not None:
            yield now
        now = Span(span.track, name, span.start, span.end)
    if now is not None:
        yield now


def _columns_of(name: str, places: Sequence[Columns]) -> str:
    """Which of these columns a simulated name begins with: "stages, columns 0 to 127, ..."."""
    first = int(name.split("columns ")[1].split()[0])
    return next(columns.name for columns in places if columns.first <= first <= columns.last)


def _role(report: Report, role: str) -> list[Span]:
    """When a role waits; a wait that passes at once is work."""
    return [
        span
        for span in report.spans
        if span.track == role and span.kind == "wait" and span.end - span.start > SM100.passing_wait
    ]


def _rescales(report: Report, config: Config, role: str, w: int) -> list[tuple[float, float]]:
    """From when to when a role loads and stores O of a stage in tensor memory, pieces that follow each other closely as one."""
    o = [columns for columns in config.tmem_map() if columns.name == f"O{w}"]
    found: list[tuple[float, float]] = []
    for span in report.spans:
        if span.track == "tensor memory" and span.name.startswith(f"{role}: "):
            first = int(span.name.split("columns ")[1].split()[0])
            if o[0].first <= first <= o[0].last:
                if found and span.start - found[-1][1] < 200:
                    found[-1] = (found[-1][0], max(found[-1][1], span.end))
                else:
                    found.append((span.start, span.end))
    return found


def _softmax(report: Report, config: Config, w: int) -> Iterator[Span]:
    """From the wait for S of one block to that of the next; rescaling of O and the epilogue, if this role does them."""
    role, track = ("softmax", "softmax 1")[w], f"softmax {w}"
    mine = [span for span in report.spans if span.track == role and span.kind == "wait"]
    waits = [span for span in mine if "s_full" in span.name]
    done = [span.start for span in mine if span.name == "the other roles to end"] + [report.lives[role][1]]
    finish = [span for span in mine if "o_full" in span.name]
    ends = [*(wait.start for wait in waits[1:]), *(wait.start for wait in finish), *done][: len(waits)]
    corrections = _rescales(report, config, role, w)
    for i, (wait, end) in enumerate(zip(waits, ends, strict=True)):
        yield Span(track, "wait", wait.start, wait.end, "wait")
        now = wait.end
        for start, stop in corrections:
            if wait.end <= start < end:
                yield Span(track, _block(f"P{w}", i), now, start)
                yield Span(track, "correct", start, stop)
                now = stop
        yield Span(track, _block(f"P{w}", i), now, end)
    for wait in finish:
        yield Span(track, "wait", wait.start, wait.end, "wait")
        yield Span(track, "epilogue", wait.end, done[0])


def _correction(report: Report, config: Config) -> Iterator[Span]:
    """Rescaling of O, and at the end its way to shared memory; the rest waits, or finds that nothing is to be done."""
    waits = _role(report, "correction")
    yield from (Span("correction", "wait", wait.start, wait.end, "wait") for wait in waits)
    finish = min(s.start for s in report.spans if s.track == "correction" and "o_full" in s.name)
    begins = [wait.start for wait in waits] + [report.lives["correction"][1]]
    for w in range(config.q_stages):
        found = _rescales(report, config, "correction", w)
        yield from (Span("correction", "correct", *times) for times in found if times[0] < finish)
        last = min(start for start, _ in found if start >= finish)
        yield Span("correction", "epilogue", last, min(begin for begin in begins if begin > last))
