"""Comparing two benchmarks, through the command."""

import json
import math
import re

import pytest
from commands import run
from reports import report

from strobe.lab.bench import bench, plot
from strobe.lab.bench.compare import changes, draw


def against(*ratios: float, rounds: tuple[float, ...] = (0.99, 1.0, 1.01, 1.0)) -> dict:
    """A report of points with Strobe at 500 TFLOP/s times each ratio, and a peer that is always the same."""
    measured = report()
    facts = measured["points"][0]
    measured["points"] = [
        facts | {"length": 1024 << n, "results": {"strobe": speed(500 * ratio, rounds), "cuDNN": speed(450, rounds)}}
        for n, ratio in enumerate(ratios)
    ]
    return measured


def speed(tflops: float, rounds: tuple[float, ...]) -> dict:
    return bench.summary(1e12, [1 / (tflops * share) for share in rounds])


def compared(tmp_path, old: dict, new: dict, *options: str):
    for name, measured in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(measured))
    return run("bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options)


def test_only_what_exceeds_the_noise_is_a_change(tmp_path):
    """Rounds of 1% around the median: the ratio of two medians of four is uncertain by 3.71 * 1.25 * 0.8% / sqrt(2)."""
    result = compared(tmp_path, against(1, 1, 1), against(1.05, 1.01, 0.95), "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    ours = [point for point in written["points"] if point["contender"] == "strobe"]
    assert [point["verdict"] for point in ours] == ["faster", "within noise", "slower"]
    assert [point["ratio"] for point in ours] == pytest.approx([1.05, 1.01, 0.95])
    deviation = math.sqrt((math.log(0.99) ** 2 + math.log(1.01) ** 2) / 3)
    assert ours[0]["noise"] == pytest.approx(3.71 * math.sqrt(math.pi / 2) * deviation / math.sqrt(2), rel=1e-3)
    lines = result.output.splitlines()
    assert "1 faster, 1 slower, 1 within noise" in lines and "matrix product: new / old 1.000" in lines
    assert any(line.startswith("cuDNN: new / old 1.000, noise") for line in lines)
    assert "old, over the best peer: ahead at 3 points, level at 0, behind at 0, of 3" in lines
    assert any("full S=2048" in line and "505" in line and "1.010" in line and "within noise" in line for line in lines)


def test_more_rounds_see_a_smaller_change():
    verdicts = []
    for rounds in ((0.99, 1.0, 1.01), (0.99, 1.0, 1.01) * 6):
        found = changes(against(1, rounds=rounds), against(1.015, rounds=rounds))
        verdicts.append(found[0].verdict)
    assert verdicts == ["within noise", "faster"]


def test_the_status_is_1_only_where_strobe_is_too_slow_beyond_its_noise(tmp_path):
    slower = against(1, 0.95)
    for options, status in (((), 0), (("--fail-slower", "0.9"), 0), (("--fail-slower", "0.97"), 1)):
        assert compared(tmp_path, against(1, 1), slower, *options).exit_code == status
    noisy = against(1, 0.95, rounds=(0.8, 1.0, 1.2))
    assert compared(tmp_path, against(1, 1), noisy, "--fail-slower", "0.97").exit_code == 0
    peer = against(1, 1)
    for facts in peer["points"]:
        facts["results"]["cuDNN"] = speed(100, (0.99, 1.0, 1.01))
    assert compared(tmp_path, against(1, 1), peer, "--fail-slower", "0.97").exit_code == 0


def test_one_round_takes_the_noise_of_the_other_points_and_says_so(tmp_path):
    new = against(1.05, 1.05)
    new["points"][1]["results"]["strobe"] = speed(525, (1.0,))
    result = compared(tmp_path, against(1, 1), new)
    assert "~" in result.output and "the noise of the other points is assumed" in result.output
    one, assumed = [change for change in changes(against(1, 1), new) if change.contender == "strobe"]
    assert assumed.assumed and not one.assumed and assumed.noise > one.noise


def test_noise_that_nobody_measured_is_unknown(tmp_path):
    result = compared(tmp_path, against(1, rounds=(1.0,)), against(1.5, rounds=(1.0,)), "--fail-slower", "3")
    assert result.exit_code == 0 and "1 noise unknown" in result.output and "?" in result.output


def test_clocks_stand_beside_the_ratio():
    reports = against(1), against(1)
    for measured, mhz in zip(reports, (1500, 1650), strict=True):
        measured["points"][0]["results"]["strobe"]["sm_clock_mhz"] = mhz
    assert changes(*reports)[0].clocks == pytest.approx(1.1)


def test_what_else_changed_is_said(tmp_path):
    new = against(1)
    assert "not the same" not in compared(tmp_path, against(1), new).output
    new["device"] = new["device"] | {"driver": "580", "packages": {"torch": "2.12.0", "triton": "3.6.0"}}
    assert "not the same: torch 2.11.0 and 2.12.0, driver 570 and 580" in compared(tmp_path, against(1), new).output


def test_the_picture_has_every_ratio_with_its_noise(tmp_path):
    """Of three points the second is within its noise: hollow."""
    picture = tmp_path / "c.svg"
    result = compared(tmp_path, against(1, 1, 1), against(1.05, 1.01, 0.95), "--out", str(picture))
    assert result.exit_code == 0 and f"written: {picture}" in result.output, result.output
    words = re.findall("<!-- (.*) -->", picture.read_text())
    assert {"bf16 D=128, full", "1k", "2k", "4k", "strobe", "cuDNN", "new / old"} <= set(words)
    report = json.loads(compared_json(tmp_path))
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "save", lambda figure, path, **_: figures.append(figure) or path)
        draw(report, picture)
    (panel,) = figures[0].axes
    bars = panel.containers
    assert [bar.lines[0].get_ydata()[0] for bar in bars] == pytest.approx([1.05, 1.01, 0.95])
    assert [bar.lines[0].get_markerfacecolor() == "white" for bar in bars] == [False, True, False]
    ends = bars[0].lines[2][0].get_segments()[0][:, 1]
    noise = report["points"][0]["noise"]
    assert ends == pytest.approx([1.05 * math.exp(-noise), 1.05 * math.exp(noise)])
    assert any(set(line.get_ydata()) == {1} for line in panel.lines)


def compared_json(tmp_path) -> str:
    """Of the reports that were compared last."""
    path = tmp_path / "compared.json"
    run("bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), "--json", str(path))
    return path.read_text()


def other(**changed) -> dict:
    return against(1) | changed


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (other(device=report()["device"] | {"name": "NVIDIA B200"}), "the same GPU, got NVIDIA H200 and NVIDIA B200"),
        (other(what="backward"), "the same phase, got forward and backward"),
        (other(protocol={"rounds": 3, "name": "single"}), "the same protocol, got sustained and single"),
        (other(points=[]), "a point and a contender in common"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(tmp_path, new, words):
    result = compared(tmp_path, against(1), new)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert run("bench", "compare", "nowhere.json", "nowhere.json").exit_code == 2
