"""The arithmetic of `strobe.masks`, compiled for the device: one source for the host, Triton and Gluon."""

import triton

from strobe import masks

visible = triton.jit(masks.visible)
kv_range = triton.jit(masks.kv_range)
kv_full = triton.jit(masks.kv_full)
q_range = triton.jit(masks.q_range)
q_full = triton.jit(masks.q_full)
