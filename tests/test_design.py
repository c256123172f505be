"""DESIGN.md's rules of who imports whom."""

import ast
from pathlib import Path

import strobe

SOURCE = Path(strobe.__file__).parent
COMMANDS = ("lab/",)
"""What stands above the library and may import all of it."""


def imports(path: Path) -> set[str]:
    """The modules that a file names in its imports, those within functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers(of: str, among: str = "") -> list[str]:
    """The files below a folder that import a module, or one inside it."""
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    return sorted(
        name
        for name, path in files.items()
        if name.startswith(among) and any(module == of or module.startswith(f"{of}.") for module in imports(path))
    )


def test_the_library_imports_neither_the_lab_nor_the_simulator():
    below = [name for module in ("strobe.lab", "strobe.sim") for name in importers(module)]
    assert [name for name in below if not name.startswith((*COMMANDS, "sim/"))] == []
    assert importers("strobe.lab", "sim/") == []


def test_optimised_code_does_not_import_the_specification():
    assert importers("strobe.reference.dense", "kernels/") == []


def test_kernels_know_nothing_of_calls():
    for below in ("kernels/", "cpu/", "reference/"):
        assert importers("strobe.call", below) == []


def test_no_circles():
    """No module needs one that needs it, at its head or inside a function."""
    paths = [path for package in ("strobe", "strobe_cli") for path in (SOURCE.parent / package).rglob("*.py")]
    names = {path: path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".") for path in paths}
    graph = {name: imports(path) & set(names.values()) - {name} for path, name in names.items() if path.name != "__init__.py"}
    while free := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, f"each of these needs another of them: {sorted(graph)}"


def test_an_import_is_found():
    assert "lab/bench/bench.py" in importers("strobe.lab.bench.plan") and "lab/timeline/tracing.py" in importers("strobe.sim")
