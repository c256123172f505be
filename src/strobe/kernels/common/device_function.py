"""The decorator of functions that kernels call."""

from collections.abc import Callable
from types import FunctionType

import triton


def device_function(function):
    """`triton.jit`; in Triton's interpreter the function itself, as plain Python runs there just as well.

    There a jitted function re-patches all of `triton.language` at every call, and must sit in a file that imports it.
    """
    return function if triton.knobs.runtime.interpret else triton.jit(function)


def of_tensors(function: Callable, language) -> FunctionType:
    """The function with a language's minimum and maximum for Python's min and max, which Triton 3.9 takes for numbers only."""
    names = {**function.__globals__, "min": language.minimum, "max": language.maximum}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__module__, copy.__annotations__ = function.__module__, function.__annotations__
    return copy
