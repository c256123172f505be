"""`python -m strobe.lab.pages.shown` runs the commands that docs/lab.md shows with their output, and writes what they print
now.

A command stands behind a prompt in the block of its output, or in a block of its own before it. A line "..." stands for any
others; the lines around it are replaced by those that differ in their numbers alone.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PAGE = Path("docs/lab.md")
PROGRAM = "from strobe_cli.app import app; app()"
FILES = {"--json": "result.json", "--out": "picture.png", "--perfetto": "trace.json"}
COLUMNS = "128"

_BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^\$ strobe (.*)\n", re.MULTILINE)


def outputs(page: str) -> Iterator[tuple[str, int, int]]:
    """Each command that a page shows with its output, and where in the page that begins and ends."""
    before = None
    for block in _BLOCK.finditer(page):
        text, start = block[1], block.start(1)
        prompts = list(_PROMPT.finditer(text))
        ends = [*(prompt.start() for prompt in prompts[1:]), len(text)]
        yield from ((prompt[1], start + prompt.end(), start + end) for prompt, end in zip(prompts, ends, strict=False))
        if before is not None and not text.startswith(("strobe ", "$ ")):
            yield before, start, block.end(1)
        alone = re.fullmatch(r"strobe (.*)\n", text)
        before = alone[1] if alone else None


def redirected(command: str, folder: Path) -> list[str]:
    """The arguments of a command whose files go to a folder."""
    arguments = shlex.split(command)
    for option, name in FILES.items():
        if option in arguments:
            arguments[arguments.index(option) + 1] = str(folder / name)
        elif option == "--out" and command.startswith("timeline"):  # which draws beside its JSON else
            arguments += [option, str(folder / name)]
    return arguments


def run(command: str, folder: Path, root: Path) -> str:
    """What a command prints, by a process of its own, which may compile. CalledProcessError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"COLUMNS": COLUMNS}
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM, *redirected(command, folder)]
    return subprocess.run(program, capture_output=True, text=True, env=environment, cwd=root, check=True, timeout=600).stdout


def missing(output: str, said: str) -> str | None:
    """The first line of an output that does not stand in what was said, behind the ones before it; None if all do."""
    rest = _squeezed(said)
    for line in output.splitlines():
        wanted = _squeezed(line)
        if wanted and wanted != "..." and not line.startswith("written: "):
            _, found, rest = rest.partition(wanted)
            if not found:
                return line
    return None


def renewed(output: str, said: str) -> str:
    """An output with what is said now. Lines that nothing said is like but for its numbers stay as they are."""
    if missing(output, said) is None:
        return output
    if "...\n" not in output:
        return "".join(f"{line.rstrip()}\n" for line in said.splitlines() if not line.startswith("written: "))
    left, lines = said.splitlines(), []
    for line in output.splitlines():
        place = next((i for i, one in enumerate(left) if _words(one) == _words(line) != ""), None)
        lines.append(line if place is None else left[place].rstrip())
        left = left if place is None else left[place + 1 :]
    return "".join(f"{line}\n" for line in lines)


def _squeezed(text: str) -> str:
    """Without what depends on a terminal's width, or on how fast the compiler was."""
    return re.sub(r"compiled in \d+ ms|[\s─━]+", "", text)


def _words(line: str) -> str:
    """Without numbers."""
    return re.sub(r"[\d.]+", "", _squeezed(line))


def rewritten(page: str, said: Callable[[str], str]) -> str:
    """A page with its outputs made anew: said runs a command. Those of somebody else's kernels, which are not here, stay."""
    for command, start, end in reversed(list(outputs(page))):
        if ".cubin" not in command:
            page = page[:start] + renewed(page[start:end], said(command)) + page[end:]
    return page


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(rewritten(PAGE.read_text(), lambda command: run(command, Path(folder), Path())))


if __name__ == "__main__":
    main()
