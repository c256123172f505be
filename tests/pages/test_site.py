"""The documents as a site: every page has its place, every link leads to one, and the quick start runs as it is shown."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import BROWSER, measured

from strobe.lab.pages import site

ROOT = Path(__file__).parents[2]


def in_nav() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", nav, re.MULTILINE)


def test_every_page_has_its_place():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    places = in_nav()
    assert len(places) == len(set(places))
    assert set(places) == pages | set(site.PAGES.values())


def test_the_gallery_leads_to_every_page_with_a_picture():
    picture = re.compile(r"!\[[^]]*\]\(([^)]+\.png)\)")
    pages = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    gallery = pages.pop("gallery.md")
    assert {name for name, text in pages.items() if picture.search(text)} <= set(re.findall(r"\(([a-z_]+\.md)\)", gallery))
    assert all((ROOT / "docs" / name).exists() for name in picture.findall(gallery)) and len(picture.findall(gallery)) >= 12


def test_links_are_changed_to_places_on_the_site():
    text = (
        "[a](../README.md#limits) [b](bench.md) [c](../src/strobe/places.py) [d](https://x.org/y) [e](#here) [f](../src/strobe)"
    )
    assert site.changed_links(text, "docs/lab.md") == (
        "[a](index.md#limits) [b](bench.md) [c](source/src/strobe/places.py.md) [d](https://x.org/y) [e](#here) [f](index.md)"
    )
    text = "[a](docs/bench.md) ![b](docs/masks.png) [c](benchmarks/results/cpu.json)"
    assert site.changed_links(text, "README.md") == "[a](bench.md) ![b](masks.png) [c](source/benchmarks/results/cpu.json)"
    assert site.changed_links("[a](../masks.md)", "docs/reference/masks.md") == "[a](../masks.md)"


def test_the_quick_start_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/quickstart.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    exec("\n".join(blocks), {"__name__": "quickstart"})


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`: pip install '.[docs]'")
def test_the_site_is_built(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'id="strobe.flex_attention"' in (tmp_path / "reference/doors.html").read_text()
    assert "<h1" in (tmp_path / "index.html").read_text()
    if BROWSER is None:
        return
    for page in ("index.html", "gallery.html", "lab.html", "reference/attention.html"):
        wide, pictures = measured(tmp_path / page, 390, _ON_A_PHONE)
        assert wide == 390, f"{page} scrolls to the side on a phone"
        assert all(width >= 600 for width in pictures), f"{page}: letters of pictures are too small to read"


_ON_A_PHONE = """[
  document.documentElement.scrollWidth,
  [...document.querySelectorAll("article img")].map((image) => image.getBoundingClientRect().width),
]"""
