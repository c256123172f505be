"""The one file that knows what Triton keeps to itself about launches: where a compiled kernel has its parameters, and how it is
loaded. Where something is different from what is known, `Unknown` is raised, and Triton launches.

The tests run on the versions in `KNOWN`. On any other version, kernels that write down the arguments they got
(`strobe.call.echo`) are launched first, in the same way as all others, and must find every argument in its place."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from strobe.kernels import has_triton, triton_version

log = logging.getLogger("strobe")

KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose launchers take parameters as `strobe.call.launcher` lays them out."""


MOVED_CACHE = "strobe.call.moved_cache:MovedCache"
"""What TRITON_CACHE_MANAGER is set to where `strobe precompile` has filled Triton's folder."""


class Unknown(Exception):
    """Raised where only Triton can launch a kernel; says why."""


def is_known() -> bool:
    """Whether the installed Triton is one of `KNOWN`."""
    return triton_version() in KNOWN


def signature_of(compiled) -> dict[str, Any]:
    """The name of each parameter of a kernel's source -> its type in Triton's words."""
    return compiled.src.signature


@functools.cache
def hash_ahead() -> threading.Thread | None:
    """Begin to hash Triton's own files, some hundred megabytes, in a thread that lets others run. Triton does it before it
    looks for the first kernel of a process, and until then there are modules of kernels to import. None if this Triton has no
    such function."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        log.warning("Triton has no triton_key: the first call of a process takes longer")
        return None
    thread = threading.Thread(target=triton_key, name="strobe-hash", daemon=True)
    thread.start()
    return thread


def begin_where_precompiled() -> None:
    """Begin to hash Triton's files now, which imports Triton, in a process that is told of kernels compiled ahead: its first
    call compiles nothing, so that hashing is most of what it would wait for."""
    if os.environ.get("TRITON_CACHE_MANAGER") == MOVED_CACHE and has_triton():
        hash_ahead()


def compiled_kernel(kernel, grid: Sequence[int], arguments: tuple, keywords: dict):
    """The kernel of a call, compiled for the current device if it was not yet. Several threads may compile at once."""
    if (hashing := hash_ahead()) is not None:
        hashing.join()
    if sys.version_info[:2] == (3, 11):
        _parse_in_turn()
    return kernel.warmup(*arguments, grid=grid, **keywords)


@functools.cache
def _parse_in_turn() -> None:
    """Makes threads parse the source of kernels, and of the functions that these call, one at a time from now on.

    CPython 3.11 has one counter, for all threads, of how deeply the parsed source is nested. If a garbage collection lets a
    second thread parse in the middle, both fail with a SystemError; and Triton, which was about to hash a function's source,
    uses a hash without the source from then on."""
    try:
        from triton.runtime.jit import JITCallable

        theirs = JITCallable.parse
    except (ImportError, AttributeError):
        log.warning("Triton has no JITCallable.parse: on Python 3.11 two threads that compile at once may fail")
        return

    def parse(self):
        with _parsing:
            return theirs(self)

    JITCallable.parse = parse


_parsing = threading.RLock()
"""The lock of all wrappers. Two threads that run `_parse_in_turn` at once may wrap twice, so its owner can take it again."""


@functools.cache
def function(compiled, device: int) -> int:
    """The driver's handle of a compiled kernel, loaded on a device, which must be the current one.

    Triton's own way, `_init_handles`, also makes a launcher, for which Triton 3.6 runs a C compiler. It is not needed here."""
    if compiled.module is not None:
        return compiled.function
    from triton.runtime import driver

    _module, found, *_ = driver.active.utils.load_binary(compiled.name, compiled.kernel, compiled.metadata.shared, device)
    return found
