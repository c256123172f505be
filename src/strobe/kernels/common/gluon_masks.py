"""The arithmetic of `strobe.masks`, compiled for the device by Gluon: the same source as the host and Triton run."""

from strobe import masks
from strobe.kernels.gluon import gluon

visible = gluon.jit(masks.visible)
kv_range = gluon.jit(masks.kv_range)
kv_full = gluon.jit(masks.kv_full)
q_range = gluon.jit(masks.q_range)
q_full = gluon.jit(masks.q_full)
