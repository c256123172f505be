"""`strobe.math` in Triton, and how a function over it is compiled."""

import functools
import sys

import triton.language as tl

from strobe import functions, scores
from strobe.kernels.common.device_function import device_function


@device_function
def abs(x):
    return tl.abs(x)


@device_function
def exp(x):
    return tl.exp(x)


@device_function
def exp2(x):
    return tl.exp2(x)


@device_function
def log(x):
    return tl.log(x)


@device_function
def log2(x):
    return tl.log2(x)


@device_function
def maximum(a, b):
    return tl.maximum(a, b)


@device_function
def minimum(a, b):
    return tl.minimum(a, b)


@device_function
def sqrt(x):
    return tl.sqrt(x)


@device_function
def where(condition, a, b):
    return tl.where(condition, a, b)


def compiled(function):
    """Compile a plain function over `strobe.math` for kernels in Triton."""
    return functions.translated(function, sys.modules[__name__], device_function, tl.constexpr)


@functools.cache
def of_user(function: functions.Function | None):
    """A user's function as an argument of a kernel; None stays None."""
    return None if function is None else compiled(function.python)


tanh = compiled(scores.tanh)
