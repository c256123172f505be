"""Which kernels a measurement was made with: a hash for each source file, and what changed since.

A hash is of the file's meaning: comments, docstrings and layout do not count. So a result goes stale when a kernel it speaks of
changes, not when its comments do. The file's syntax tree is written out by `_shape` instead of `ast.dump`, whose words differ
between versions of Python.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import strobe

ROOT = Path(strobe.__file__).parent
PARTS = ("kernels", "tuning")
"""What decides how fast a kernel is, below `ROOT`: sources and tables of tuned configs."""
SUFFIXES = (".py", ".json")

KERNELS: dict[str, tuple[str, ...]] = {
    "sm90 forward": (
        "kernels/sm90/launch.py",
        "kernels/sm90/short_launch.py",
        "kernels/sm90/plan.py",
        "tuning/tables/sm90.json",
    ),
    "sm90 backward": (
        "kernels/sm90/backward_launch.py",
        "kernels/sm90/backward_short_launch.py",
        "kernels/sm90/backward_plan.py",
    ),
    "sm90 fp8": ("kernels/sm90/fp8_launch.py", "kernels/sm90/fp8.py", "tuning/tables/sm90.json"),
    "portable": ("kernels/portable/forward.py", "kernels/portable/backward.py", "kernels/portable/plan.py"),
    "sm80 forward": ("kernels/sm80/launch.py", "kernels/sm80/backend.py"),
    "sm80 backward": ("kernels/sm80/backward_launch.py", "kernels/sm80/backend.py"),
    "decode": ("kernels/decode/launch.py",),
    "sm100 forward": ("kernels/sm100/launch.py", "kernels/sm100/backend.py", "kernels/sm100/forward.py"),
}
"""Kernel -> the files it begins with: host code, by all names that it has had, and tables. Those that a version lacks do not
count. What they import from `PARTS`, and so on, belongs to the kernel too."""

PROOFS = ROOT.parents[1] / "benchmarks" / "results" / "same-code.json"
"""What `benchmarks/same_code.py` found: pairs of versions whose kernels compile to the same code."""

Sources = dict[str, str]
"""Path below `ROOT` -> hash."""

Texts = dict[str, str]
"""Path below `ROOT` -> what the file says."""


@functools.cache
def texts() -> Texts:
    """The files of all kernels, as they are here."""
    return texts_in(ROOT)


def texts_in(root: Path) -> Texts:
    """The files of all kernels of a `strobe` package."""
    found = (path for part in PARTS for path in sorted((root / part).rglob("*")) if path.suffix in SUFFIXES)
    return {path.relative_to(root).as_posix(): path.read_text() for path in found}


def texts_at(commit: str) -> Texts | None:
    """The files of all kernels at an earlier commit of this repository; None where its history does not hold that commit."""
    everything = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, "."]
    try:
        packed = subprocess.run(everything, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found: Texts = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        for file in files:
            content, suffix = files.extractfile(file), PurePosixPath(file.name).suffix
            if content is not None and suffix in SUFFIXES and file.name.startswith(PARTS):
                found[file.name] = content.read().decode()
    return found


@functools.cache
def sources() -> Sources:
    """The hash of each file of all kernels, as they are here."""
    return hashes(texts())


def sources_at(commit: str) -> Sources | None:
    """`sources()` of an earlier commit of this repository; None where its history does not hold that commit."""
    found = texts_at(commit)
    return None if found is None else hashes(found)


def hashes(files: Texts) -> Sources:
    return {file: digest(PurePosixPath(file).suffix, text) for file, text in files.items()}


def digest(suffix: str, text: str) -> str:
    """Twelve hexadecimal digits for what a file (".py" or ".json") means."""
    meaning = _shape(_without_docstrings(ast.parse(text))) if suffix == ".py" else json.dumps(json.loads(text), sort_keys=True)
    return hashlib.sha256(meaning.encode()).hexdigest()[:12]


def _without_docstrings(tree: ast.AST) -> ast.AST:
    """The tree without statements that are strings: docstrings, of attributes too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not (isinstance(s, ast.Expr) and _is_text(s.value))]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _shape(node: object) -> str:
    """A tree in words. Empty fields are left out, as later versions of Python add some."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(f'{name}={_shape(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_shape, node))}]"
    return repr(node)


@functools.cache
def files_of(kernel: str) -> tuple[str, ...]:
    """The files that a kernel is made of today, as in `sources`."""
    return files_among(texts(), kernel)


def files_among(files: Texts, kernel: str) -> tuple[str, ...]:
    """The files that a kernel is made of in the version that has these files."""
    found, ahead = set[str](), [file for file in KERNELS[kernel] if file in files]
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ahead += _imported(file, files)
    return tuple(sorted(found))


def made_of(files: Texts, kernel: str) -> Sources:
    """The hashes of the files that a kernel is made of in the version that has these files."""
    return hashes({file: files[file] for file in files_among(files, kernel)})


def _imported(file: str, files: Texts) -> list[str]:
    """Which of these files a file imports, at its head or when a function of it runs."""
    if not file.endswith(".py"):
        return []
    names = []
    for statement in ast.walk(ast.parse(files[file])):
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names += [statement.module or "", *(f"{statement.module}.{alias.name}" for alias in statement.names)]
    paths = (name.removeprefix("strobe.").replace(".", "/") + ".py" for name in names if name.startswith("strobe."))
    return [path for path in paths if path in files]


def changed(measured: Sources, kernel: str, proofs: Sequence[dict] | None = None) -> list[str]:
    """The files of a kernel that are not what they were when it was measured. There are none if a row of proofs (None: those of
    `PROOFS`) leads from what was measured to today's files."""
    files, today = files_of(kernel), sources()
    versions = _same_code(measured, kernel, known_proofs() if proofs is None else proofs)
    if any(all(version.get(file) == today.get(file) for file in files) for version in versions):
        return []
    return [file for file in files if measured.get(file) != today.get(file)]


@functools.cache
def known_proofs() -> tuple[dict, ...]:
    """The proofs of `PROOFS`; none where the repository is not there."""
    return tuple(json.loads(PROOFS.read_text())["proofs"]) if PROOFS.is_file() else ()


def _same_code(measured: Sources, kernel: str, proofs: Sequence[dict]) -> Iterator[Sources]:
    """What was measured, and each version of the kernel that is proven to compile to the same code."""
    reached, ahead = [measured], [proof["kernels"][kernel] for proof in proofs if kernel in proof["kernels"]]
    for version in reached:  # which grows meanwhile
        yield version
        holding = [proof for proof in ahead if _begins_at(version, proof)]
        ahead = [proof for proof in ahead if proof not in holding]
        reached += [proof["new"] for proof in holding]


def _begins_at(version: Sources, proof: dict) -> bool:
    same = proof["compared"] > 0 and not proof["differ"]
    return same and bool(proof["old"]) and all(version.get(file) == digest for file, digest in proof["old"].items())
