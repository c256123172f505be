"""CONTRIBUTING's rule of docstrings: each stands alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import strobe

SOURCE = Path(strobe.__file__).parent
HANGING = re.compile(r"(Of|Likewise|As|Also|Theirs|Its|Those|Ditto|Same)\b(?! soon as| long as)")
"""How a docstring begins that needs the one before it."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each statement that is a string: docstrings, of attributes and constants too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_docstrings_stand_alone():
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text.splitlines()[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in docstrings(path)
        if HANGING.match(text.strip())
    ]
    assert not found, "\n".join(found)


def test_a_hanging_docstring_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('x = 1\n"""Of a tile, likewise."""\n')
    assert [(line, bool(HANGING.match(text))) for line, text in docstrings(path)] == [(2, True)]
