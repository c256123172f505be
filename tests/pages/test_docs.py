"""The documents: the commands that they show exist with their options, the files and headings that they link to are there."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from strobe_cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LAB = ROOT / "docs/lab.md"
INSTRUMENTS = ("cost", "roofline", "occupancy", "audit", "banks", "timeline", "profile", "bench compare", "report")


def commands(page: Path) -> list[str]:
    """What stands behind `strobe` in the page's blocks of code, without prompts and comments."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = (line.removeprefix("$ ") for block in blocks for line in block.splitlines())
    return [line.removeprefix("strobe ").split("  ")[0] for line in lines if line.startswith("strobe ")]


def parse(line: str) -> str:
    """The name of the command that a line calls. LookupError if there is none; click's own error if its options are wrong."""
    command, arguments, names = typer.main.get_command(app), shlex.split(line), []
    while hasattr(command, "commands") and (arguments or not names):  # `strobe bench` is a command, too
        names.append(arguments.pop(0))
        command = command.commands[names[-1]]
    command.make_context(" ".join(names), arguments)
    return " ".join(names)


def anchors(page: Path) -> set[str]:
    """The headings, as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_with_their_options(page):
    for line in commands(page):
        assert parse(line), line


def test_a_wrong_command_is_found():
    assert parse("bench compare old.json new.json") == "bench compare"
    for line in ("blend", "bench weigh", ""):
        with pytest.raises(LookupError):
            parse(line)
    for line in ("cost --speed 3", "occupancy --length many"):
        with pytest.raises(Exception, match=r"No such option|valid int"):
            parse(line)


def test_every_instrument_is_in_the_labs_page():
    shown = {parse(line) for line in commands(LAB)}
    assert set(INSTRUMENTS) <= shown, set(INSTRUMENTS) - shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        if re.match(r"\w+:", name):
            continue
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} links to {target}"


def test_what_the_labs_page_shows_of_its_files_is_in_them():
    """The outputs are of the JSON that is committed beside them."""
    text, audited = LAB.read_text(), json.loads((ROOT / "docs/lab/audit.json").read_text())
    for kernel in audited["kernels"]:
        assert f"{kernel['name']}, sm_90a: {kernel['registers']} registers, {kernel['smem_bytes']} bytes" in text
    for placed in json.loads((ROOT / "docs/lab/roofline.json").read_text())["points"]:
        [row] = [line for line in text.splitlines() if line.startswith(f"│ {placed['name']} ")]
        assert f"│ {placed['rate'] / 1e12:.4g} │ {placed['share']:>5.0%} │ {placed['clock'] / 1e6:.0f} │" in row
    for kernel in json.loads((ROOT / "docs/lab/occupancy.json").read_text())["kernels"]:
        assert f"{kernel['name']}: 1 block of an SM by its registers and shared memory; {kernel['waves']:.2f} waves" in text
