"""The HTML report in a headless browser, on a phone and on a wide screen; where no browser is installed nothing is tested."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from commands import run
from reports import report as bench_report

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: one of {', '.join(NAMES)}")

MEASURE = """
<script>
const box = (element) => element.getBoundingClientRect();
const style = (element) => getComputedStyle(element);
const scrolls = (element) => element && (style(element).overflowX === "auto" || scrolls(element.parentElement));
const wide = [...document.querySelectorAll("main *")].filter((element) => box(element).right > innerWidth + 1);
document.documentElement.dataset.found = JSON.stringify({
  width: innerWidth,
  page: document.documentElement.scrollWidth,
  cut: wide.filter((element) => !scrolls(element)).map((element) => element.outerHTML.slice(0, 80)),
  tables: document.querySelectorAll("table").length,
  beside: box(document.querySelector("nav")).right <= box(document.querySelector("main")).left,
  above: box(document.querySelector("nav")).bottom <= box(document.querySelector("main")).top,
  line: Math.max(...[...document.querySelectorAll("main p")].map((element) => box(element).width)),
  letters: Math.min(...[...document.querySelectorAll("main *, nav a")].map((element) => parseFloat(style(element).fontSize))),
  lost: [...document.querySelectorAll("nav a")].filter((a) => !document.getElementById(a.hash.slice(1))).length,
  pictures: [...document.images].map((image) => image.complete && image.naturalWidth > 0),
});
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with a long command, a wide table and a picture, and what measures it when it is loaded."""
    folder = tmp_path_factory.mktemp("report")
    measured = bench_report() | {"command": "strobe bench forward --json " + "a-very-long-name" * 20}
    for n in range(2):
        (folder / f"{n}.json").write_text(json.dumps(measured))
    result = run("report", *(str(folder / f"{n}.json") for n in range(2)), "--out", str(folder / "out.html"))
    assert result.exit_code == 0, result.output
    text = (folder / "out.html").read_text()
    (folder / "measured.html").write_text(text.replace("</body>", MEASURE + "</body>"))
    return folder / "measured.html"


def found(page, width: int) -> dict:
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--window-size={width},900",
        "--hide-scrollbars",
        "--virtual-time-budget=5000",
    ]
    shown = subprocess.run([BROWSER, *options, page.as_uri()], capture_output=True, text=True, timeout=60)
    measured = re.search(r'data-found="([^"]*)"', shown.stdout)
    assert measured, shown.stderr
    return json.loads(unescape(measured[1]))


@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.exhaustive)])
def test_it_fits(page, width):
    seen = found(page, width)
    assert seen["width"] == width and seen["page"] == width, "the page does not scroll to the side"
    assert seen["cut"] == [] and seen["tables"] >= 2, "what is wider than the screen scrolls by itself"
    assert seen["letters"] >= 12 and seen["lost"] == 0 and seen["pictures"] == [True, True]
    assert (seen["beside"], seen["above"]) == ((True, False) if width == 1440 else (False, True)), "the contents"
    assert seen["line"] <= 1200
