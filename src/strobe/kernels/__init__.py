"""The GPU kernels, a package for each kind of GPU. Importing one of their `backend` modules imports no Triton."""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Looking takes longer than a launch, so it is looked for once."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton, which this imports."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
