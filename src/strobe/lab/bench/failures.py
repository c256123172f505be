"""Writes a failure as one line, which goes into a report where a contender has no number."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

FOLDERS = re.compile(r"(?<![\w:/])/(?:[\w.+-]+/)+")
"""The folders of a file's absolute path."""


def compact(error: BaseException) -> str:
    """An error in one line: its type, its first words, and where it was raised. Files have their names alone: a report is
    published, and the folders are its user's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = FOLDERS.sub("", lines[0] if lines else "")[:240]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {words}{where}"


@contextmanager
def reasons() -> Iterator[list[str]]:
    """A context that collects the texts of warnings, in which PyTorch tells why each of its kernels refused."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield found
    for warning in caught:
        line = str(warning.message).splitlines()[0].split(" (Triggered internally", 1)[0]
        if line not in found:
            found.append(line[:160])
