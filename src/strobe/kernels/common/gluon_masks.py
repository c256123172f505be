"""The arithmetic of `strobe.masks`, compiled for the device by Gluon: the same source as the host and Triton run."""

from strobe import masks
from strobe.kernels.common.device_function import of_tensors
from strobe.kernels.gluon import gl, gluon

visible = gluon.jit(masks.visible)
kv_range = gluon.jit(of_tensors(masks.kv_range, gl))
kv_full = gluon.jit(of_tensors(masks.kv_full, gl))
q_range = gluon.jit(of_tensors(masks.q_range, gl))
q_full = gluon.jit(of_tensors(masks.q_full, gl))
