"""The arithmetic of `strobe.masks`, compiled for the device by Gluon: the same source as the host and Triton run."""

from types import FunctionType

from strobe import masks
from strobe.kernels.gluon import gl, gluon


def _of_tensors(function):
    """`gluon.jit` of the function with Gluon's minimum and maximum for min and max, which Triton 3.9 takes for numbers only."""
    names = {**function.__globals__, "min": gl.minimum, "max": gl.maximum}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__module__ = function.__module__
    return gluon.jit(copy)


visible = gluon.jit(masks.visible)
kv_range = _of_tensors(masks.kv_range)
kv_full = _of_tensors(masks.kv_full)
q_range = _of_tensors(masks.q_range)
q_full = _of_tensors(masks.q_full)
