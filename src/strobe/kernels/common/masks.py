"""The arithmetic of `strobe.masks`, compiled for the device: one source for the host, Triton and Gluon."""

from strobe import masks
from strobe.kernels.common.device_function import device_function

visible = device_function(masks.visible)
kv_range = device_function(masks.kv_range)
kv_full = device_function(masks.kv_full)
q_range = device_function(masks.q_range)
q_full = device_function(masks.q_full)
