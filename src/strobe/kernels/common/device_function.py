"""The decorator of functions that kernels call."""

import triton


def device_function(function):
    """`triton.jit`; in Triton's interpreter the function itself, as plain Python runs there just as well.

    There a jitted function re-patches all of `triton.language` at every call, and must sit in a file that imports it.
    """
    return function if triton.knobs.runtime.interpret else triton.jit(function)
