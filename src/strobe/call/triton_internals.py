"""The one file that knows what Triton keeps to itself about launches: where a compiled kernel has its parameters, and how it is
loaded. Where something is different from what is known, `Unknown` is raised, and Triton launches.

The tests run on the versions in `KNOWN`. On any other version, kernels that write down the arguments they got
(`strobe.call.echo`) are launched first, in the same way as all others, and must find every argument in its place."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from strobe.kernels import triton_version

log = logging.getLogger("strobe")

KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose launchers take parameters as `strobe.call.launcher` lays them out."""


class Unknown(Exception):
    """Raised where only Triton can launch a kernel; says why."""


def is_known() -> bool:
    """Whether the installed Triton is one of `KNOWN`."""
    return triton_version() in KNOWN


def signature_of(compiled) -> dict[str, Any]:
    """The name of each parameter of a kernel's source -> its type in Triton's words."""
    return compiled.src.signature


def cluster_of(compiled) -> int:
    """How many CTAs Triton launches for each program of a compiled kernel's grid, as a cluster."""
    return compiled.packed_metadata[1]


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


def key_of_files() -> dict[str, str]:
    """What Triton's key of its own files is, and a hash of the list of these files as they were installed, which takes no time:
    where the list is the same, so is the key. Empty where one of them cannot be told."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return {}
    files = _installed_files()
    return {} if files is None else {"files": files, "key": triton_key()}


def take_key(known: dict[str, str]) -> bool:
    """Have Triton take its key from an earlier `key_of_files`, if the same files are installed; says whether it does."""
    from triton.runtime import cache

    if not hasattr(cache, "triton_key") or not known or known["files"] != _installed_files():
        return False
    cache.triton_key = lambda: known["key"]
    return True


def _installed_files() -> str | None:
    """A hash of the names and hashes of Triton's files, as its installer listed them; None where it did not."""
    import triton

    try:
        installed = distribution("triton")
    except PackageNotFoundError:
        return None
    if Path(str(installed.locate_file("triton"))).resolve() != Path(triton.__file__).resolve().parent:
        return None
    lines = (installed.read_text("RECORD") or "").splitlines()
    listed = sorted(line for line in lines if line.startswith("triton/") and ",sha256=" in line)
    return hashlib.sha256("\n".join(listed).encode()).hexdigest() if listed else None


class _Driver:
    """What Triton asks of a driver while it compiles, as PyTorch knows it. Everything else is asked of Triton's own driver,
    which is made then, and for which Triton runs a C compiler if its folder has none."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_current_stream(self, device: int | None = None) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def __getattr__(self, name: str):
        from triton.runtime import driver

        return getattr(driver.default, name)


def compile_without_driver() -> None:
    """Have Triton's own driver made only where something needs it; a process that finds all its kernels does not."""
    from triton.runtime import driver

    if getattr(driver, "_active", driver) is None and hasattr(driver, "set_active") and torch.version.hip is None:
        driver.set_active(_Driver())


def compiled_kernel(kernel, grid: Sequence[int], arguments: tuple, keywords: dict):
    """The kernel of a call, compiled for the current device if it was not yet. Several threads may compile at once."""
    if (hashing := hash_ahead()) is not None:
        hashing.join()
    parse_in_turn()
    stable_keys()
    return kernel.warmup(*arguments, grid=grid, **keywords)


@functools.cache
def parse_in_turn() -> None:
    """Makes CPython 3.11's threads parse the source of kernels, and of what these call, one at a time from now on.

    It has one counter, for all threads, of how deeply the parsed source is nested. If a garbage collection lets a
    second thread parse in the middle, both fail with a SystemError; and Triton, which was about to hash a function's source,
    uses a hash without the source from then on."""
    if sys.version_info[:2] != (3, 11):
        return
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


@functools.cache
def stable_keys() -> None:
    """Makes the key under which Triton looks for a kernel on disk depend on the kernel alone.

    Part of it are the constants that the kernel and what it calls use, in the order of their names and, where two modules have
    one of the same name, of these modules' addresses, which differ from process to process. And before Triton 3.8 those of a
    called function count only if that was hashed earlier, for another kernel."""
    try:
        from triton.runtime.jit import DependenciesFinder

        begin, update_hash = DependenciesFinder.__init__, DependenciesFinder._update_hash
    except (ImportError, AttributeError):
        log.warning("Triton has no DependenciesFinder: a process may compile again what another one has left on disk")
        return

    def by_value(self, *arguments, **keywords):
        begin(self, *arguments, **keywords)
        self.used_global_vals = _Constants()

    def called_first(self, function):
        _ = function.cache_key
        update_hash(self, function)

    DependenciesFinder.__init__, DependenciesFinder._update_hash = by_value, called_first  # type: ignore[method-assign]


class _Constants(dict):
    """A function's constants, (name, number of their module) -> (value, that module's names), which sort by name and value."""

    def items(self):
        return [(_Constant.of(key, value), (value, module)) for key, (value, module) in super().items()]


class _Constant(tuple):
    """A key of `_Constants` that knows the value."""

    shown: str

    @classmethod
    def of(cls, key: tuple[str, int], value) -> _Constant:
        made = cls(key)
        made.shown = str(value)
        return made

    def __lt__(self, other) -> bool:
        return (self[0], self.shown) < (other[0], other.shown)


_parsing = threading.RLock()
"""The lock of all wrappers. Two threads that run `parse_in_turn` at once may wrap twice, so its owner can take it again."""
