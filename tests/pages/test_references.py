"""The numbers in documents: each says where it comes from, and its source says the same."""

import json
from pathlib import Path

import pytest

from strobe.lab.pages import references
from strobe.lab.pages.references import says, wrong

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_come_from_where_they_say(page):
    assert not wrong(page.read_text(), ROOT), "`src/strobe/lab/pages/references.py` says how a number names its source"


def faults(text: str, tmp_path: Path, references: str = "") -> list[str]:
    """What is wrong with a page that says this of a small result."""
    points = [{"mask": "full", "us": {"SDPA flash": 17.11}}, {"mask": "causal", "us": {"SDPA flash": 20.0}}]
    (tmp_path / "x.json").write_text(json.dumps({"points": points, "share": 0.914}))
    return wrong(f"# Page\n\n{text}\n\n<!-- numbers\nx: x.json\n{references}\n-->\n" if references else text, tmp_path)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("It takes 17.1 us.", '17.1 us = x.points(mask="full").us["SDPA flash"]'),
        ("It takes 17\nus.", 'takes 17 us = x.points(mask="full").us["SDPA flash"]'),
        ("17.1 to 20.0 us", '17.1 to 20.0 us = [point.us["SDPA flash"] for point in x.points]'),
        ("A ratio of 1.17.", 'of 1.17 = x.points[1].us["SDPA flash"] / x.points[0].us["SDPA flash"]'),
        ("Busy for 91 % of the time.", "91 % = x.share"),
        ("Busy for 1 and 2%.", "1 and 2% = [0.01, 0.02]"),
        ("| a | b |\n| --- | --- |\n| full | 17.1 (0.86) |", "17.1 (0.86) = [17.11, 17.11 / 20]"),
        ("They report 1613 TFLOP/s.", "1613 TFLOP/s = cited: arXiv 2603.05451"),
    ],
)
def test_what_is_so_passes(text, reference, tmp_path):
    assert faults(text, tmp_path, reference) == []


@pytest.mark.parametrize(
    ("text", "reference", "said"),
    [
        ("It takes 17.2 us.", '17.2 us = x.points(mask="full").us["SDPA flash"]', "17.11 was found"),
        ("17.1 to 19.0 us", '17.1 to 19.0 us = [point.us["SDPA flash"] for point in x.points]', "was found"),
        ("Busy for 92 %.", "92 % = x.share", "was found"),
        ("Busy for 91 %.", "92 % = x.share", "not in the text"),
        ("Busy for 91 %.", "91 % = x.shares", "KeyError"),
        ("17.1 us", 'x.points(mask="window") = 1\n17.1 us = x.points(mask="window").us', "one entry must have"),
        ("17.1 us, and 3 ms more", '17.1 us = x.points[0].us["SDPA flash"]', "'3 ms' has no reference"),
        ("117.1 us", '17.1 us = x.points[0].us["SDPA flash"]', "'117.1 us' has no reference"),
    ],
)
def test_what_is_not_so_is_said(text, reference, said, tmp_path):
    assert any(said in fault for fault in faults(text, tmp_path, reference))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "520 TFLOP/s",
            "3.2 times as fast",
            "1 to 3 % slower",
            "12%",
            "4 s",
            "about 700 W",
            "a ratio of 1.07",
            "64, full: 0.98",
        ),
        *("ten runs of 30 ms each", "1340 to 1800 MHz", "| D | us |\n| --- | --- |\n| 64 | 512 |", "takes (0.99, 0.97)"),
    ],
)
def test_a_number_without_a_source_is_found(text, tmp_path):
    assert faults(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "head dim 128 at 16k",
            "Triton 3.6 and torch 2.11.0",
            "`2 ms` of code",
            "2^-17",
            "an H200's 132 SMs",
            "sm_90",
            "v0.1.0",
        ),
        *(
            "```\n520 TFLOP/s\n```",
            "[a picture](bench-30-ms.png)",
            "Python >= 3.10, PyTorch 2.11",
            "| mask | heads |\n| --- | --- |\n| full | 32/4 |",
        ),
        "<!-- begin: table -->\n| D | us |\n| --- | --- |\n| 64 | 512 |\n<!-- end: table -->",
        "<!-- no measurement: a setting -->\nRounds of 30 ms.",
    ],
)
def test_what_is_no_measurement_is_left_alone(text, tmp_path):
    assert faults(text, tmp_path) == []


def test_no_measurement_ends_with_its_paragraph(tmp_path):
    page = "# A\n\n<!-- no measurement: a setting -->\nRounds of 30 ms.\n\nThey took 31 ms."
    assert wrong(page, tmp_path) == ["A: '31 ms' has no reference"]


def test_a_reference_is_of_its_own_section(tmp_path):
    page = "# A\n\n17.1 us\n\n# B\n\n17.1 us\n\n<!-- numbers\n17.1 us = 17.11\n-->\n"
    assert wrong(page, tmp_path) == ["A: '17.1 us' has no reference"]


def test_a_line_that_is_no_reference_is_refused():
    with pytest.raises(ValueError, match="must be NAME: SOURCE or WORDS = EXPRESSION, got '17 us'"):
        references.sections("<!-- numbers\n17 us\n-->")


def test_digits_that_are_written_are_compared():
    assert says("17.1 us", [17.149]) and not says("17.1 us", [17.151])
    assert says("17 us", [17.49]) and not says("17.0 us", [17.06])
    assert says("-3 %", [-0.031])
    assert not says("1 and 2", [1.0])
