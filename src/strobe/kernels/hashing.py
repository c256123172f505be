"""A kernel has one key in Triton's folder, whichever kernels its process looked for before."""

import functools

from strobe.kernels import triton_version


@functools.cache
def hash_callees_first() -> None:
    """Have Triton 3.6 and 3.7 hash a function that is called before they read which globals it uses, as newer ones do.

    A kernel's key tells the values of the globals that it and its callees use. Before 3.8 it misses those of callees that were
    not hashed yet, and so depends on the kernels that were hashed before: a process that calls in another order compiles again
    what lies in the folder."""
    if triton_version() >= (3, 8):
        return
    from triton.runtime.jit import DependenciesFinder

    theirs = DependenciesFinder._update_hash

    def update(self, callee) -> None:
        _ = callee.cache_key
        theirs(self, callee)

    DependenciesFinder._update_hash = update
