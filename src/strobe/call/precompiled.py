"""A process that is told of kernels compiled ahead, by `strobe precompile`: what its first call waits for begins at the import.

Such a call compiles nothing, so that it waits for what Triton does before it finds a kernel: its import, a hash of its own
files, the import of the kernels and a hash of their source. A thread does these while a program loads its model; the hashes
were written down, and are taken from there if the files are the same.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from strobe.call import triton_internals
from strobe.kernels import has_triton

log = logging.getLogger("strobe")

MARK = "strobe-precompiled.json"
"""The file in a folder of compiled kernels that says what they are for."""

MOVED_CACHE = "strobe.call.moved_cache:MovedCache"
"""What TRITON_CACHE_MANAGER is set to where `strobe precompile` has filled Triton's folder."""


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What a folder that `strobe precompile` filled says of itself; None for any other folder."""
    try:
        return json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return None


def hash_of_sources() -> str:
    """A hash of the files that kernels are compiled from, which takes no time: where they are the same, so are the hashes that
    Triton finds by reading each function."""
    package = Path(__file__).parents[1]
    files = sorted([*package.glob("*.py"), *(package / "kernels").rglob("*.py")])
    return hashlib.sha256(b"".join(str(x.relative_to(package)).encode() + x.read_bytes() for x in files)).hexdigest()


@functools.cache
def begin() -> threading.Thread | None:
    """Begin, in a thread, what the first call would wait for; None in a process that is told of no compiled kernels."""
    if os.environ.get("TRITON_CACHE_MANAGER") != MOVED_CACHE or not has_triton():
        return None
    mark = read_mark(Path(os.environ.get("TRITON_CACHE_DIR", ""))) or {}
    thread = threading.Thread(target=_get_ready, args=(mark,), name="strobe-precompiled", daemon=True)
    thread.start()
    os.register_at_fork(before=thread.join)  # a child would wait forever for modules that the thread has half imported
    return thread


def wait() -> None:
    """Wait for what `begin` began. Whoever imports kernels waits first, as two threads that import modules which import each
    other may each see half of one."""
    if (begun := begin()) is not None:
        begun.join()


def _get_ready(mark: dict[str, Any]) -> None:
    try:
        if not triton_internals.take_key(mark.get("triton", {})):
            triton_internals.hash_ahead()
        triton_internals.compile_without_driver()
        triton_internals.parse_in_turn()
        triton_internals.stable_keys()
        unchanged = mark.get("sources") == hash_of_sources()
        for module, name, key in mark.get("kernels", ()):
            kernel = getattr(importlib.import_module(module), name)
            if unchanged:
                kernel.hash = key
            _ = kernel.cache_key
    except Exception as reason:  # a first call does all of it again, and says what is wrong
        log.warning(f"what precompiled kernels need could not be made ready ahead: {type(reason).__name__}: {reason}")
