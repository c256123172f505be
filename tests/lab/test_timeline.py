"""Stamps, timelines and unit costs: what compiles, what is drawn, what is tabulated."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tritons import output_of
from typer.testing import CliRunner

from strobe.kernels.common.stamp import EVENTS, ROLES
from strobe.lab.timeline import timeline, tracing
from strobe.sim.trace import Event, Span, Timeline, phases, timeline_of
from strobe_cli.app import app

ROOT = Path(__file__).parents[2]

# ---- stamps

CLOCKS = """
from strobe.lab.binary import offline
from strobe.kernels.sm90 import launch
from strobe.lab.binary.sass import disassemble
compile_only, clocks, reads = launch.compile_only, [], []
def spy(*arguments):
    compiled = compile_only(*arguments)
    clocks.append(compiled.asm["ptx"].count("%clock64"))
    reads.append(sum("CS2R" in line and "SR_CLOCK" in line for line in disassemble(compiled.asm["cubin"]).splitlines()))
    return compiled
launch.compile_only = spy
audits = [offline.audit_sm90_forward((128, 128), traced=traced) for traced in (False, True)]
stores = [audit.instructions["STG"] for audit in audits]
print(clocks, reads, stores[1] - stores[0], [audit.spill_bytes for audit in audits], [audit.warnings for audit in audits])
"""


def test_stamps_stand_in_a_traced_kernel_only():
    """In the PTX and in the machine code. Each of 2 consumers stamps 4 times before its loop, 5 in it and 3 after it; the
    producer for the first K, in its loop twice, and for the last V."""
    assert output_of(CLOCKS).splitlines()[-1] == "[0, 28] [0, 28] 28 [0, 0] [(), ()]"


# ---- from stamps to timelines

BLOCKS, CTAS = 8, 12
WAIT_K, S, P, WAIT_O, CORRECT = 30, 700, 800, 50, 100
PERIOD = WAIT_K + S + P + WAIT_O + CORRECT
NAMES = ["consumer 0", "consumer 1", "producer"]


def stamps() -> torch.Tensor:
    """[CTAs, roles, events, blocks] of a machine that takes exactly the times above; the second consumer is 500 later, and
    odd CTAs see half of the blocks."""
    trace = torch.zeros(CTAS, ROLES.value, len(EVENTS), BLOCKS, dtype=torch.int64)

    def note(cta, role, event, g, clock):
        trace[cta, role, EVENTS.index(event), g] = clock

    for cta in range(CTAS):
        origin, blocks = 10**12 + 10**6 * cta, BLOCKS // (1 + cta % 2)
        for w in range(2):
            for g in range(blocks):
                clock = origin + 500 * w + PERIOD * g
                note(cta, w, "begin", g, clock)
                note(cta, w, "k_ready", g, clock + WAIT_K)
                note(cta, w, "s_ready", g, clock + WAIT_K + S)
                note(cta, w, "p_ready", g, clock + WAIT_K + S + P)
                note(cta, w, "o_ready", g, clock + WAIT_K + S + P + WAIT_O + PERIOD)
            end = origin + 500 * w + PERIOD * (blocks + 1)
            note(cta, w, "epilogue", 0, end)
            note(cta, w, "end", 0, end + 900)
        for g in range(blocks):
            note(cta, 2, "k_issued", g, origin + PERIOD * g + 1)
            note(cta, 2, "v_issued", g, origin + PERIOD * g + 600)
    return trace


def whole() -> Timeline:
    return timeline_of(tracing._of_cta(stamps(), NAMES, 0), "a CTA")


def test_phases_are_those_of_the_machine():
    of = tracing._of_cta(stamps(), NAMES, 0)
    expected = {"period": PERIOD, "wait for K": WAIT_K, "S": S, "softmax": P, "wait for O": WAIT_O, "correct": CORRECT}
    assert phases(of["consumer 0"]) == phases(of["consumer 1"]) == expected
    with pytest.raises(ValueError, match="five key blocks or more, got 4"):
        phases(tracing._of_cta(stamps(), NAMES, 1)["consumer 0"])


def test_blocks_that_a_consumer_passes_over_are_left_out():
    trace = stamps()
    for event in ("begin", "k_ready", "s_ready", "p_ready", "o_ready"):
        trace[0, 0, EVENTS.index(event), 2:] = trace[0, 0, EVENTS.index(event), 1:-1].clone()
        trace[0, 0, EVENTS.index(event), 1] = 0
    of = tracing._of_cta(trace, NAMES, 0)
    assert phases(of["consumer 0"]) == phases(of["consumer 1"])
    names = [span.name for span in timeline_of(of, "").spans if span.track == "consumer 0" and span.kind == "work"]
    assert [name for name in names if name[0] == "P"] == ["P0", *(f"P{g}" for g in range(2, BLOCKS))]


def test_timeline_has_every_block_of_every_role():
    timeline_ = whole()
    products = [span.name for span in timeline_.spans if span.track == "consumer 1: products"]
    assert sorted(products) == sorted(f"{letter}{g}" for letter in "SO" for g in range(BLOCKS))
    work = {span.name: span for span in timeline_.spans if span.track == "consumer 1" and span.kind == "work"}
    begin = 1 + 500 + 3 * PERIOD + WAIT_K + S  # clocks count from 1, since 0 says "not passed"
    assert work["P3"] == Span("consumer 1", "P3", begin - 1, begin - 1 + P)
    assert {event.name for event in timeline_.events} == {f"{letter}{g}" for letter in "KV" for g in range(BLOCKS)}
    assert Event("producer", "V2", 2 * PERIOD + 600) in timeline_.events


def test_spans_of_a_track_leave_no_gap_and_do_not_overlap():
    for track in ("consumer 0", "consumer 1"):
        spans = sorted(
            (span for span in whole().cut(2 * PERIOD, 8 * PERIOD).spans if span.track == track), key=lambda s: s.start
        )
        assert len(spans) > 25 and all(a.end == b.start for a, b in pairwise(spans))


def test_cut_clips():
    part = whole().cut(PERIOD, 2 * PERIOD)
    assert min(span.start for span in part.spans) == PERIOD and max(span.end for span in part.spans) == 2 * PERIOD
    assert all(PERIOD <= event.time <= 2 * PERIOD for event in part.events)


def test_busy_counts_overlaps_once():
    spans = (Span("a", "S0", 0, 60), Span("a", "S1", 40, 80), Span("a", "P0", 80, 100, "wait"), Span("b", "P0", 0, 50))
    assert timeline.busy(Timeline("", spans)) == {"a": 0.8, "b": 0.5}
    assert timeline.period(whole(), "consumer 0", "P") == PERIOD


# ---- reports


@pytest.fixture
def report() -> dict:
    steady = tracing._steady(stamps(), NAMES)
    assert [cta for cta, _ in steady] == list(range(0, CTAS, 2))
    typical = {str(cta): tracing._of_cta(stamps(), NAMES, cta) for cta in tracing._typical(steady)}
    point = {
        "head_dim": 128,
        "mask": "full",
        "length": 1024,
        "tile_q": 128,
        "tile_kv": 128,
        "telemetry": {"sm_clock_mhz": 1700.0},
    }
    point |= {"steady": tracing._spread([sample for _, sample in steady]), "typical": typical}
    return {"device": {"name": "A GPU"}, "points": [point, point]}


def test_table_and_picture_of_a_report(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["timeline", "--report", str(path)])
    assert result.exit_code == 0, result.output
    assert f"{PERIOD} ({PERIOD}-{PERIOD})" in result.output and "2048" in result.output
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    svg = timeline.draw(timeline.measured(report), tmp_path / "report.svg").read_text()
    assert svg.lstrip().startswith("<?xml")


def test_perfetto_has_every_span_of_every_role():
    trace = timeline.perfetto([whole(), whole()])["traceEvents"]
    slices, instants, names = ([e for e in trace if e["ph"] == kind] for kind in "XiM")
    assert len(slices) == 2 * len(whole().spans) and len(instants) == 2 * len(whole().events)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert {name for (pid, _), name in threads.items() if pid == 2} >= set(whole().tracks())
    assert {e["args"]["name"] for e in names if e["name"] == "process_name"} == {"a CTA"}
    assert all(isinstance(e[key], int) for e in trace for key in ("pid", "tid") if key in e), "names are metadata, ids numbers"
    (p0,) = (e for e in slices if e["pid"] == 1 and e["name"] == "P0" and threads[1, e["tid"]] == "consumer 0")
    assert (p0["ts"], p0["dur"], p0["cat"]) == (WAIT_K + S, P, "work")


def test_slices_of_a_perfetto_thread_lie_one_after_the_other(tmp_path):
    """Of measured CTAs as a whole, through the command, as JSON."""
    source = ROOT / "benchmarks/results/timeline-h200-2026-11-22.json"
    (tmp_path / "report.json").write_text(source.read_text())
    path = tmp_path / "trace.json"
    result = CliRunner(env={"COLUMNS": "300"}).invoke(
        app, ["timeline", "--report", str(tmp_path / "report.json"), "--perfetto", str(path)]
    )
    assert result.exit_code == 0 and f"written: {path}" in result.output
    by_thread: dict = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len({pid for pid, _ in by_thread}) == 6
    for slices in by_thread.values():
        assert all(start <= end for start, end in slices)
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(slices)))


def test_spans_that_cross_get_a_thread_of_their_own():
    crossing = Timeline("", (Span("a", "S0", 0, 60), Span("a", "S1", 40, 80), Span("a", "S2", 60, 90)))
    trace = timeline.perfetto([crossing])["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert {e["name"]: threads[e["tid"]] for e in trace if e["ph"] == "X"} == {"S0": "a", "S1": "a (2)", "S2": "a"}


def test_what_is_hidden():
    """A consumer's product of 60 under the other's softmax of 30, and its own wait for it."""
    spans = (
        Span("consumer 0: products", "S0", 0, 60),
        Span("consumer 0", "S0", 0, 60, "wait"),
        Span("consumer 1", "P0", 20, 50),
        Span("consumer 1", "K1", 50, 80, "wait"),
        Span("consumer 0", "P0", 60, 70),
        Span("consumer 0", "epilogue", 70, 100),
    )
    assert timeline.hidden(Timeline("", spans)) == {
        "QK": (0.6, 0.5),
        "softmax": (0.4, 0.75),
        "epilogue": (0.3, 0.0),
        "wait for S": (0.6, 0.5),
        "wait for K": (0.3, pytest.approx(2 / 3)),
    }


def test_what_is_hidden_stands_below_the_table(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["timeline", "--report", str(path)])
    found = timeline.hidden(timeline.whole_ctas(report)[0])
    assert f"{found['softmax'][0]:.0%} ({found['softmax'][1]:.0%})" in result.output and "wait for K" in result.output


@pytest.mark.parametrize("text", [None, "no json", '{"points": [{"length": 3}]}'])
def test_what_is_no_report_is_one_sentence(tmp_path, text):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    result = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["timeline", "--report", str(path)])
    assert result.exit_code == 2 and "a report of strobe timeline must" in result.output and "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_sentence():
    result = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["timeline"])
    assert result.exit_code == 2 and "needs a Hopper GPU (sm_90), not CPU; --simulate works without one" in result.output


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_simulated_timeline_lies_between_the_products_and_the_safe_kernel(mask):
    """The committed measurement, an H200, is of the kernel with a running maximum: without one a block takes less, and no less
    than its products."""
    measured = json.loads((ROOT / "benchmarks/results/timeline-h200-2026-11-21.json").read_text())
    for head_dim in (64, 128):
        point = tracing.simulate((head_dim,), (mask,), 2048, "")["points"][0]
        (reference,) = (p for p in measured["points"] if (p["head_dim"], p["mask"]) == (head_dim, mask))
        assert point["steady"]["correct"]["median"] < reference["steady"]["correct"]["median"] / 2
        assert point["steady"]["period"]["median"] < reference["steady"]["period"]["median"]
        assert point["steady"]["period"]["median"] >= 4 * point["tile_q"] * point["tile_kv"] * head_dim / 4096


def test_a_timeline_is_simulated_without_a_gpu(tmp_path):
    path = tmp_path / "simulated.json"
    options = ["timeline", "--simulate", "--head-dims", "64", "--mask", "full", "--length", "1024", "--json", str(path)]
    code = "from strobe_cli.app import app; app()"  # in a process of its own: what other tests import is not there
    output_of(code, *options)
    assert json.loads(path.read_text())["device"]["name"] == "simulated sm_90"
    assert (tmp_path / "simulated.png").exists()


def test_a_simulated_timeline_writes_nothing_unasked(tmp_path, monkeypatch):
    found = timeline.load(ROOT / "benchmarks/results/timeline-h200-2026-11-22.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracing, "simulate", lambda *asked: found)
    shown = CliRunner().invoke(app, ["timeline", "--simulate"])
    assert shown.exit_code == 0 and "softmax" in shown.output and not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, ["timeline", "--simulate", "--out", "drawn.png"]).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.png"]
