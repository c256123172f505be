"""`strobe ladder`: the harness on a CPU and with a clock that stands for a GPU's, reports, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from commands import run
from tritons import output_of

from strobe.device import KNOWN
from strobe.lab.bench.peers import Peer
from strobe.lab.counters import counters
from strobe.lab.ladder import measure, page
from strobe.lab.ladder.conflicts import conflicts_in
from strobe.lab.ladder.explain import counters_moved, difference, show_waits
from strobe.lab.ladder.measure import Problem
from strobe.lab.ladder.report import draw, load, rows, sentences, table
from strobe.ladder import RUNGS, Rung

ROOT = Path(__file__).parents[2]
PROBLEM = Problem(2, 256, 64, "bf16")


class Clock:
    """Stands for a GPU's clock: every call takes as long as the test says its rung does."""

    def __init__(self, seconds):
        self._of, self.now = seconds, 0

    def seconds(self, call, count):
        call()
        return self._of(self.now)

    def synchronize(self):
        pass

    def captured(self, calls, times):
        raise RuntimeError("no graphs here")

    def mhz(self):
        return 1000.0


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Runs the part of a measurement that needs a GPU, with rungs that PyTorch computes on a CPU: 5 is wrong, 8 fails, 7 is as
    fast as 6."""
    clock = Clock(lambda rung: {3: 0.1, 6: 0.002, 7: 0.002}.get(rung, 0.01 / (rung + 1)))

    def attention(self, q, k, v, **tile):
        clock.now = self.number
        if self.number == 8:
            raise RuntimeError("out of registers\nand more")
        out = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1) @ v.float()
        return out.to(q.dtype) if self.number != 5 else torch.zeros_like(q)

    monkeypatch.setattr(Rung, "attention", attention)

    def prepare(q, k, v, mask):
        def call():
            clock.now = 99
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return call

    monkeypatch.setattr(measure, "PEERS", ("SDPA", "another"))
    monkeypatch.setattr(measure, "peers_for", lambda device: {"SDPA": Peer("SDPA", prepare, heads_first=True)})
    monkeypatch.setattr(measure, "_roofs", lambda report, *_: report["roofs"].update({"mma.sync": 1e12}))
    monkeypatch.setattr(measure, "told", lambda rung, statement: "Race: of a test")
    rungs = tuple(RUNGS[number] for number in (3, 5, 6, 7, 8, 12))
    compiled = {rung.number: [{"compiled": None}] * len(rung.tiles(64)) for rung in rungs}
    report = {
        "what": "ladder", "device": {"name": "a GPU"}, "problem": {**vars(PROBLEM), "flops": PROBLEM.flops}, "roofs": {},
        "peers": {}, "stopped": None, "rungs": [{"number": r.number, "name": r.name, "title": r.title} for r in rungs],
    }  # fmt: skip
    late, step = (lambda: False), (lambda done, what: None)
    measure._on_a_gpu(PROBLEM, KNOWN["H200"], clock, torch.device("cpu"), rungs, compiled, report, 3, late, step)
    return report


def test_a_report_of_a_gpu(on_a_gpu, tmp_path):
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(on_a_gpu))
    report = load(path)
    found = {row["number"]: row for row in rows(report)}
    assert found[3]["seconds"] == 0.1 and len(report["rungs"][0]["seconds"]) == 1  # too long to be timed again
    assert len(report["rungs"][2]["seconds"]) == 3
    assert found[5]["note"].startswith("relative error") and found[5]["seconds"] is None
    assert found[8]["note"] == "RuntimeError: out of registers and more" or "out of registers" in found[8]["note"]
    assert found[6]["over before"] == 50 and found[7]["over before"] == 1
    assert found[7]["of roof"] == pytest.approx(PROBLEM.flops / 0.002 / 1e12)
    assert len(report["rungs"][5]["tiles"]) == len(RUNGS[12].tiles(64)) and "tile" in report["rungs"][5]
    said = "\n".join(sentences(report))
    assert f"rung 7 gains nothing here (1.00 times): {RUNGS[7].nothing}" in said
    assert "rung 7 without cp_async_wait(0) takes 100.0% of the time, and is wrong. The simulator: Race: of a test" in said
    assert table(report).row_count == 8 and report["peers"]["another"] == {"refused": "not there"}
    assert found[6]["of best peer"] == pytest.approx(0.0001 / 0.002) and report["peers"]["SDPA"]["error"] < 1e-2
    assert draw(report, tmp_path / "ladder.png").stat().st_size > 10_000


def test_run_without_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    path = tmp_path / "ladder.json"
    options = "--heads 2 --length 256 --head-dim 64 --rungs 0,4-5 --max-seconds 60"
    result = run("ladder", "run", *options.split(), "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["what"] == "ladder"
    assert [facts["number"] for facts in report["rungs"]] == [0, 4, 5] and report["stopped"] is None
    assert all(facts["error"] < 1e-2 for facts in report["rungs"]) and report["rungs"][0]["seconds"][0] > 0
    assert report["device"]["commit"] and report["device"]["packages"]["triton"]
    shown = run("ladder", "run", "--report", str(path))
    assert shown.exit_code == 0 and "no GPU is here" in shown.output and "P stays in registers" in shown.output


def profile_of_two_rungs() -> dict:
    conflicts, duration = counters.CONFLICTS[0].metrics[0], counters.DURATION.metrics[0]

    def subject(number, missed, time, unit):
        name = f"{number} {RUNGS[number].title}"
        return {"name": name, "metrics": {conflicts: {"mean": missed, "unit": ""}, duration: {"mean": time, "unit": unit}}}

    return {"subjects": [subject(7, 1000.0, 2.0, "ms"), subject(8, 0.0, 500.0, "us")]}


def test_counters_that_moved():
    """Of two rungs in a profile: in base units, the largest factor first."""
    profile = profile_of_two_rungs()
    columns = [list(column.cells) for column in counters_moved(profile, RUNGS[7], RUNGS[8]).columns]
    assert columns[0] == [counters.CONFLICTS[0].label, "Duration"] and columns[3] == ["0", "0.25"]
    with pytest.raises(ValueError, match="a profile must hold both rungs, got one without 9 double buffering"):
        counters_moved(profile, RUNGS[8], RUNGS[9])


def test_a_report_as_a_page(on_a_gpu, tmp_path):
    path, out = tmp_path / "ladder.json", tmp_path / "report.html"
    path.write_text(json.dumps(on_a_gpu | {"date": "2026-01-01T00:00:00+00:00", "command": "strobe ladder run"}))
    result = run("report", str(path), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "rung 7 gains nothing here" in out.read_text() and "data:image/png" in out.read_text()


def test_a_run_stops():
    report = measure.run(PROBLEM, torch.device("cpu"), "test", 1e-9, RUNGS[:2])
    assert report["stopped"] == "after 1e-09 s" and "error" not in report["rungs"][0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("run --rungs 3-99", "rungs must be from 0 to 18, got '3-99'"),
        ("run --rungs x", "rungs must be numbers and ranges, such as 0-8 or 3,4, got 'x'"),
        ("run --head-dim 96", "head-dim must be one of 32, 64, 128, got 96"),
        ("run --dtype fp32", "dtype must be one of bf16, fp16, got 'fp32'"),
        ("run --length 100 --rungs 5 --device cpu", "rung 5 takes lengths that are multiples of 64, got 100"),
        ("run --report nowhere.json", "a result of strobe ladder run must be a JSON file, got nowhere.json"),
        ("run --report nowhere.json --heads 3", "report must be given without heads, which would change nothing"),
        ("run --profile", "this needs Nsight Compute, got no ncu on the PATH"),
        ("show 19", "rungs must be from 0 to 18, got '19'"),
        ("show 14 --arch A100", "rung 14 needs a GPU from sm_90 to sm_90, got sm_80"),
        ("shapes --rung 13", "shapes are those of rungs 4 to 12, which multiply by mma.sync, got rung 13"),
        ("shapes --rung 6 --warps 8", "rung must be given without tile and warps: it has its own"),
        ("shapes --tile 60x64", "tile must have a multiple of 64 queries and of 16 keys, got 60x64 for 4 warps"),
    ],
)
def test_what_is_refused(arguments, words, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("ladder", *arguments.split())
    assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split())


def test_shapes(tmp_path):
    result = run("ladder", "shapes", "--json", str(tmp_path / "shapes.json"))
    assert result.exit_code == 0 and "ldmatrix.x4.trans" in result.output
    assert json.loads((tmp_path / "shapes.json").read_text())["registers"][0]["registers"] == 32
    result = run("ladder", "shapes", "--rung", "5")
    assert result.exit_code == 0 and "LDG, 2 bytes a lane" in result.output and "ldmatrix" not in result.output


def test_show_diff_and_explain(tmp_path):
    """In one process that may compile, as the tests' own runs Triton's interpreter."""
    code = (
        "from commands import run\n"
        "for arguments in ('show 8 --head-dim 64', 'diff 7 8 --head-dim 64', 'explain 3 --head-dim 64', 'explain 0'):\n"
        "    result = run('ladder', *arguments.split())\n"
        "    assert result.exit_code == 0, (arguments, result.output, result.exception)\n"
        "    print(result.output, '=====')\n"
    )
    shown, beside, third, first = output_of(code, path=[Path(__file__).parents[1]]).split("=====")[:4]
    assert "max_phase=8" in shown and "LDGSTS" in shown
    assert "max_phase=1" in beside and "max_phase=8" in beside and "conflicts" in beside
    assert "+SHARED = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8" in difference(RUNGS[7], RUNGS[8])
    assert "41728 bytes" in third and "Too many resources requested" in third and "the launch fails" in third
    assert show_waits(RUNGS[7])[0].startswith("Without cp_async_wait(0), the simulator says: Race")
    assert "the baseline that speed-ups are counted from" in first


def test_the_online_softmax_that_the_page_shows():
    values, scores = torch.tensor(page.VALUES, dtype=torch.float64), torch.tensor(page.SCORES, dtype=torch.float64)
    *_, last = page.steps()
    want = (torch.softmax(scores, 0) @ values).item()
    assert last["acc"] / last["l"] == pytest.approx(want) and last["m"] == max(page.SCORES)
    assert f"= {want:.4f}. All at once" in page.example(ROOT)


def test_the_page_of_a_measured_ladder(on_a_gpu, tmp_path, monkeypatch):
    """The page's blocks, made of a result that is not there yet."""
    report = on_a_gpu | {"date": "2026-01-01T00:00:00+00:00", "device": {"name": "a GPU", "commit": "0123456789"}}
    for folder in ("benchmarks/results", "docs/lab"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "benchmarks/results/ladder-gpu.json").write_text(json.dumps(report))
    (tmp_path / page.COMPILED).write_text((ROOT / page.COMPILED).read_text())
    assert "| 7 cp.async | 2 | " in page.measured(tmp_path) and "mma.sync 1 TFLOP/s" in page.measured(tmp_path)
    written = page.climb(tmp_path)
    assert f"1.00 times as fast as the rung before: it gains nothing here. {RUNGS[7].nothing}" in written
    assert "50.00 times as fast as the rung before." in written and "relative error" in written
    assert {make(tmp_path / "docs") for make in (page.measured, page.studies, page.counters, page.pair)} == {page.NOTHING}


def test_the_page_shows_studies_and_counters(on_a_gpu, tmp_path):
    folder = tmp_path / page.RESULTS
    folder.mkdir(parents=True)
    dated = {"date": "2026-01-01T00:00:00+00:00", "command": "strobe ladder run --profile --rungs 7-8"}
    (folder / "study-l4.json").write_text(json.dumps(on_a_gpu | dated))
    written = page.studies(tmp_path)
    assert "head dim" in written and "| 7 cp.async |" in written and "(../benchmarks/results/study-l4.json)" in written
    (folder / "rungs-profile-h100.json").write_text(json.dumps(profile_of_two_rungs() | dated | {"device": {"name": "H100"}}))
    assert "| Duration | 0.002 | 0.0005 | 0.25 |" in page.counters(tmp_path)
    tables = [{"title": title, "head": ["metric", "3", "4"], "rows": [["x", "1", "2"]]} for title in ("Launch", "Another")]
    profiled = dated | {"device": {"name": "H100"}, "tables": tables}
    (folder / "study-profile-h100.json").write_text(json.dumps(profiled))
    assert "Launch:\n\n| metric | 3 | 4 |\n| --- | ---: | ---: |\n| x | 1 | 2 |" in page.pair(tmp_path)
    assert "Another" not in page.pair(tmp_path) and page.studies(tmp_path) == written


TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1], order = [1, 0]}>
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 8]}>
#shared = #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = PHASE, order = [1, 0]}>
#shared1 = #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = PHASE, order = [0, 1]}>
  %1 = ttg.async_copy_global_to_local %0, %q : tensor<64x64x!tt.ptr<bf16>, #blocked> -> <64x64xbf16, #shared, #smem, mutable>
  %s = ttg.local_load %k : !ttg.memdesc<64x64xbf16, #shared1, #smem, mutable> -> """ + (
    "tensor<64x64xbf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>> loc(#loc)"
)


@pytest.mark.parametrize("phase, ways", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_conflicts_by_the_compilers_text(phase, ways):
    load, copy = conflicts_in(TTGIR.replace("PHASE", str(phase)))
    assert (load.what, load.tile, load.ways) == ("load by ldmatrix", "64 x 64", ways)
    assert (copy.what, copy.ways) == ("copy of 16 bytes a lane, 8 lanes along a row", 1)
