"""The simulated experiments of docs/blackwell.md: what must hold of them, and that the page says what the report says."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tritons import needs_tcgen05
from typer.testing import CliRunner

from strobe.kernels import triton_version
from strobe_cli.app import app

ROOT = Path(__file__).parents[2]

pytestmark = needs_tcgen05

if triton_version() >= (3, 8):
    from strobe.lab.blackwell import experiments, page, pictures
    from strobe.lab.blackwell.experiments import BASE, EVERY, SCHEDULES, WITHOUT, Experiment


def cycles(changes, schedule, **others) -> float:
    return experiments.steady(Experiment("", changes, **others), schedule)["cycles"]


@pytest.mark.parametrize("schedule", ["as written", "interleaved"])
def test_two_q_stages_and_split_p_are_faster(schedule):
    base = cycles({}, schedule)
    assert cycles({"q_stages": 1}, schedule) > 1.5 * base
    assert cycles({"split_p": False}, schedule) > base


@pytest.mark.parametrize("schedule", ["as written", "interleaved"])
def test_correction_warps_pay_where_o_is_rescaled(schedule):
    with_warps = cycles(EVERY, schedule, growing=True)
    assert with_warps >= cycles({}, schedule)
    assert cycles({**EVERY, **WITHOUT}, schedule, growing=True) > with_warps


def test_interleaving_is_faster():
    assert cycles({}, "interleaved") < cycles({}, "as written")


def test_emulation_moves_exponentials_to_the_fma_pipe():
    """The exp2 unit does 16 a cycle: all of 128 x 128, or those that are no polynomials, and a factor for each row."""
    work = {}
    for emulated in (0, 16):
        result = experiments.steady(Experiment("", {"emulated": emulated}), "as written")
        work[emulated] = {unit: busy * result["cycles"] for unit, busy in result["busy"].items()}
    assert work[0]["mufu"] == pytest.approx(128 * 128 / 16 + 128 / 16, rel=1e-3)
    assert work[16]["mufu"] == pytest.approx(128 * 128 / 32 + 128 / 16, rel=1e-3)
    assert work[16]["fma"] > work[0]["fma"] and work[16]["alu"] > work[0]["alu"]


def test_two_ctas_do_the_same_work_and_copy_half():
    one, two = (experiments.steady(Experiment("", changes), "as written") for changes in ({}, {"two_ctas": True}))
    work = [{unit: busy * result["cycles"] for unit, busy in result["busy"].items()} for result in (one, two)]
    assert work[1]["mufu"] == pytest.approx(work[0]["mufu"], rel=1e-3)
    assert work[1]["tensor core"] == pytest.approx(work[0]["tensor core"], rel=1e-3)
    assert work[1]["TMA"] == pytest.approx(work[0]["TMA"] / 2, rel=1e-3)


def test_how_often_o_is_rescaled():
    assert experiments.rescales(8.0, 8) == 0 and experiments.rescales(8.0, 8, growing=True) == 1
    assert 0.9 < experiments.rescales(0.0, 64) < 1


# ---- pictures


@pytest.mark.parametrize("correction", [True, False])
def test_a_picture_has_every_block_of_every_role(correction):
    experiment = Experiment("", {**EVERY, "correction": correction}, growing=True)
    report, n = experiments.run(experiment, "as written", 4), 4
    timeline = pictures.timeline_of(report, experiments.config_of(experiment), "")
    names = {track: {s.name for s in timeline.spans if s.track == track and s.kind == "work"} for track in timeline.tracks()}
    blocks = [f"n-{i}" for i in range(1, n + 1)]
    assert names["tensor core"] == {f"{letter}{w},{block}" for letter in "SO" for w in (0, 1) for block in blocks}
    assert names["load (TMA)"] == {"Q0", "Q1", *(f"{letter} {block}" for letter in "KV" for block in blocks)}
    for w in (0, 1):
        assert {f"P{w},{block}" for block in blocks} <= names[f"softmax {w}"]
    rescaling = [s for s in timeline.spans if s.name == "correct"]
    assert len(rescaling) == 2 * (n - 1)
    assert {s.track for s in rescaling} == ({"correction"} if correction else {"softmax 0", "softmax 1"})
    products = sorted((s.start, s.end) for s in timeline.spans if s.track == "tensor core")
    assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(products))


# ---- the report and the page


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads((ROOT / page.REPORT).read_text())


def test_the_page_says_what_the_report_says(report):
    text = (ROOT / page.PAGE).read_text()
    assert page.rewritten(text, report) == text, "run `strobe blackwell`"


def test_the_page_shows_every_picture():
    text = (ROOT / page.PAGE).read_text()
    for name in pictures.PICTURES:
        picture = f"blackwell-{name}.png"
        assert f"]({picture})" in text and (ROOT / "docs" / picture).exists()


def test_the_report_is_of_this_kernel_and_these_costs(report):
    found = report["experiments"]["stages"][0]
    for schedule in SCHEDULES:
        fresh = experiments.steady(BASE, schedule)["cycles"]
        assert found[schedule]["cycles"] == pytest.approx(fresh, rel=0.05), "run `strobe blackwell`"


def test_outside_the_repository_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["blackwell"])
    assert result.exit_code == 2 and "must run in the repository" in result.output
