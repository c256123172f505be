"""The HTML of results, through the command: it holds their numbers, needs no network, and escapes what it is given."""

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import run
from reports import report as bench_report

from strobe.lab.timeline import timeline

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """The cells of all tables, the text, the pictures; fails on tags that do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.cells, self.sources, self.links, self.tags, self.text, self.places = [], [], [], [], "", []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name == "href"]
        self.places += [value for name, value in attributes if name == "id"]
        self.sources += [value for name, value in attributes if name == "src"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def page(tmp_path, *reports: dict) -> Page:
    paths = []
    for n, report in enumerate(reports):
        paths.append(tmp_path / f"{n}.json")
        paths[-1].write_text(json.dumps(report))
    out = tmp_path / "out.html"
    result = run("report", *map(str, paths), "--out", str(out))
    assert result.exit_code == 0 and f"written: {out}" in result.output, result.output
    text = out.read_text()
    assert "http" not in text, "nothing is fetched, nor linked"
    found = Page(text)
    assert [link.removeprefix("#") for link in found.links] == found.places, "the contents list every part, in its order"
    assert all(source.startswith("data:image/png;base64,") for source in found.sources)
    for source in found.sources:
        assert base64.b64decode(source.partition(",")[2]).startswith(b"\x89PNG")
    return found


def test_a_benchmark_has_its_numbers_its_picture_and_its_kernels(tmp_path):
    found = page(tmp_path, bench_report())
    assert {"600", "300", "500", "1.20", "bf16 D=128 full S=1024"} <= set(found.cells)
    assert len(found.sources) == 1
    for words in ("800 before, 790 after", "strobe 30", "Not installed: FA3", "cuDNN: wrong [bf16 D=128 causal S=1024]"):
        assert words in found.text
    assert "chosen    sm90" in found.text and "refused   sm100" in found.text, "which kernel, and why not the others"
    assert {"NVIDIA H200", "570", "2.11.0", "packages.torch", "abc"} <= set(found.cells), "the environment"


def test_calls_one_by_one_have_a_table(tmp_path):
    measured = bench_report()
    us = {"count": 128, "mean": 7.0, "stdev": 1.0, "median": 61.25, "p10": 60.5, "p90": 63.75, "min": 59.0, "max": 99.5}
    measured["points"][0]["results"]["strobe"]["calls_us"] = us
    assert {"128", "61.2", "60.5", "63.8", "59.0", "99.5"} <= set(page(tmp_path, measured).cells)


def test_every_number_of_a_timeline(tmp_path):
    report = json.loads((RESULTS / "timeline-h200-2026-11-22.json").read_text())
    found = page(tmp_path, report)
    tables = timeline.table(report).splitlines() + timeline.hidden_table(report).splitlines()
    numbers = {cell.strip() for line in tables for cell in line.split("  ") if cell.strip()}
    assert len(numbers) > 50 and numbers <= set(found.cells) and len(found.sources) == 1
    assert report["points"][0]["config"] in found.cells and "580.159.04" in found.cells


def test_a_comparison_and_a_profile_have_their_tables(tmp_path):
    for name in ("old", "new"):
        (tmp_path / f"{name}.json").write_text(json.dumps(bench_report()))
    written = [tmp_path / name for name in ("comparison.json", "profile.json")]
    sides = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
    assert run("bench", "compare", *sides, "--json", str(written[0])).exit_code == 0
    assert run("profile", "--csv", str(ROOT / "tests/lab/profiles/l4-details.csv"), "--json", str(written[1])).exit_code == 0
    comparison, profile = (json.loads(path.read_text()) for path in written)
    found = page(tmp_path, comparison, profile)
    assert {"within noise", "600", "1.000"} <= set(found.cells)
    for table in profile["tables"]:
        assert {cell for row in table["rows"] for cell in row if cell} <= set(found.cells)


INSTRUMENTS = {
    "cost": ("cost --arch A100 --seqlen-q 16384 --causal", {"1.1 TFLOP", "8.72 GB"}, "without it matmul binds", 1),
    "roofline": (
        f"roofline --report {RESULTS / 'forward-h200-2026-11-21.json'} --head-dims 128,192/128 --lengths 16384 --mask full",
        {"D=128 heads 16 full 1 x 16384 x 16384", "778.2", "95%"},
        "matmul binds at 818 TFLOP/s, of which 95% were measured",
        1,
    ),
    "occupancy": (
        "occupancy --arch L4 --registers 54 --threads 512 --smem 29820 --grid 128",
        {"kernel", "66.67%", "1.10"},
        "kernel: 2 blocks of an SM by its registers",
        1,
    ),
    "banks": ("banks --layouts none,xor,nvmma32 --accesses rows,ldmatrix", {"ldmatrix", "32", "nvmma32"}, "as four 8 x 8", 1),
}
"""What writes a JSON, cells and words that its page has, pictures."""


@pytest.mark.parametrize("what", INSTRUMENTS)
def test_every_instrument_has_its_table_and_picture(tmp_path, what):
    command, cells, words, pictures = INSTRUMENTS[what]
    path = tmp_path / "written.json"
    assert run(*command.split(), "--json", str(path)).exit_code == 0
    found = page(tmp_path, json.loads(path.read_text()))
    assert cells <= set(found.cells), cells - set(found.cells)
    assert words in found.text and len(found.sources) == pictures and "command: strobe" in found.text


def kernel(name: str, spill_bytes: int | None, loop: dict[str, int]) -> dict:
    parts = {"consumer 0": {"instructions": {"HGMMA": 28, "MUFU.EX2": 192}, "main_loop": loop}}
    facts = {"name": name, "arch": "sm_90a", "registers": 128, "smem_bytes": 1024, "spill_bytes": spill_bytes}
    return facts | {"parts": parts, "warnings": ["registers are spilled"] if spill_bytes else []}


def test_an_audit_of_one_kernel_and_of_several(tmp_path):
    ours, theirs = kernel("sm90 forward", 172, {"HGMMA": 12}), kernel("_ZN3lib4loopILi2EEEvv", None, {"MUFU.EX2": 64})
    alone = page(tmp_path, {"what": "audit", "kernels": [ours]})
    assert {"HGMMA", "28   12", "192    0", "consumer 0"} <= set(alone.cells)
    assert len(alone.sources) == 1 and "172 bytes of spills" in alone.text and "warning: registers are spilled" in alone.text
    assert "wgmma: an asynchronous product of four warps" in alone.text, "the glossary"
    both = page(tmp_path, {"what": "audit", "kernels": [ours, theirs]})
    assert {"A: consumer 0", "B: consumer 0", "12", "64"} <= set(both.cells)
    assert "B: lib::loop<...>, sm_90a: 128 registers, 1024 bytes of shared memory declared" in both.text


def test_a_file_with_a_part_missing_is_one_sentence(tmp_path):
    (tmp_path / "a.json").write_text('{"what": "occupancy", "kernels": []}')
    result = run("report", str(tmp_path / "a.json"), "--out", str(tmp_path / "out.html"))
    assert result.exit_code == 2 and "whole JSON files, got a.json, in which something is missing" in result.output
    assert "Traceback" not in result.output and not (tmp_path / "out.html").exists()


def test_what_a_file_holds_is_escaped(tmp_path):
    measured = bench_report() | {"command": "strobe <script>alert(1)</script> & more"}
    measured["device"]["packages"] = {"<b>": '"quoted"'}
    measured["points"][0]["results"]["FA4"] = {"refused": "<i>no</i>"}
    found = page(tmp_path, measured)
    assert not {"script", "b", "i"} & set(found.tags)
    assert "strobe <script>alert(1)</script> & more" in found.text and "<i>no</i>" in found.text
    assert "packages.<b>" in found.cells


@pytest.mark.parametrize(
    "text", ["no json", "[]", '{"what": "weather"}', '{"what": "benchmark"}', '{"schema": 1, "points": []}', None]
)
def test_what_is_none_of_ours_is_one_sentence(tmp_path, text):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    result = run("report", str(path), "--out", str(tmp_path / "out.html"))
    assert result.exit_code == 2 and "a report is made of" in result.output and str(path) in result.output
    assert "Traceback" not in result.output and not (tmp_path / "out.html").exists()
