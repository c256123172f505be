"""`strobe.math` in Gluon, and how a function over it is compiled."""

import functools
import sys

from strobe import functions, scores
from strobe.kernels.gluon import gl, gluon


@gluon.jit
def abs(x):
    return gl.abs(x)


@gluon.jit
def exp(x):
    return gl.exp(x)


@gluon.jit
def exp2(x):
    return gl.exp2(x)


@gluon.jit
def log(x):
    return gl.log(x)


@gluon.jit
def log2(x):
    return gl.log2(x)


@gluon.jit
def maximum(a, b):
    return gl.maximum(a, b)


@gluon.jit
def minimum(a, b):
    return gl.minimum(a, b)


@gluon.jit
def sqrt(x):
    return gl.sqrt(x)


@gluon.jit
def where(condition, a, b):
    return gl.where(condition, a, b)


def compiled(function):
    """Compile a plain function over `strobe.math` for kernels in Gluon."""
    return functions.translated(function, sys.modules[__name__], gluon.jit, gl.constexpr)


@functools.cache
def of_user(function: functions.Function | None):
    """A user's function as an argument of a kernel; None stays None."""
    return None if function is None else compiled(function.python)


tanh = compiled(scores.tanh)
