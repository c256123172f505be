"""The HTML report in a headless browser, on a phone and on a wide screen."""

import json

import pytest
from browser import measured, needs_browser
from commands import run
from reports import report as bench_report

FOUND = """(() => {
const all = (names) => [...document.querySelectorAll(names)];
const box = (element) => element.getBoundingClientRect();
const style = (element) => getComputedStyle(element);
const scrolls = (element) => element && (style(element).overflowX === "auto" || scrolls(element.parentElement));
const nav = box(document.querySelector("nav")), main = box(document.querySelector("main"));
return {
  width: innerWidth,
  page: document.documentElement.scrollWidth,
  cut: all("main *").filter((x) => box(x).right > innerWidth + 1 && !scrolls(x)).map((x) => x.outerHTML.slice(0, 80)),
  tables: all("table").length,
  beside: nav.right <= main.left,
  above: nav.bottom <= main.top,
  line: Math.max(...all("main p").map((x) => box(x).width)),
  letters: Math.min(...all("main *, nav a").map((x) => parseFloat(style(x).fontSize))),
  lost: all("nav a").filter((a) => !document.getElementById(a.hash.slice(1))).length,
  pictures: [...document.images].map((image) => image.complete && image.naturalWidth > 0),
}})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with a long command, wide tables and pictures."""
    folder = tmp_path_factory.mktemp("report")
    report = bench_report() | {"command": "strobe bench forward --json " + "a-very-long-name" * 20}
    for n in range(2):
        (folder / f"{n}.json").write_text(json.dumps(report))
    result = run("report", *(str(folder / f"{n}.json") for n in range(2)), "--out", str(folder / "out.html"))
    assert result.exit_code == 0, result.output
    return folder / "out.html"


@needs_browser
@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.exhaustive)])
def test_it_fits(page, width):
    seen = measured(page, width, FOUND)
    assert seen["width"] == width and seen["page"] == width, "the page does not scroll to the side"
    assert seen["cut"] == [] and seen["tables"] >= 2, "what is wider than the screen scrolls by itself"
    assert seen["letters"] >= 12 and seen["lost"] == 0 and seen["pictures"] == [True, True]
    assert (seen["beside"], seen["above"]) == ((True, False) if width == 1440 else (False, True)), "the contents"
    assert seen["line"] <= 1200
