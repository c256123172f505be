"""The arithmetic of `strobe.masks`, compiled for the device: one source for the host, Triton and Gluon."""

import triton

from strobe import masks


def _on_device(function):
    """Triton's interpreter calls a plain function as it is; a jitted one it takes only from a file that imports `tl`."""
    return function if triton.knobs.runtime.interpret else triton.jit(function)


visible = _on_device(masks.visible)
kv_range = _on_device(masks.kv_range)
kv_full = _on_device(masks.kv_full)
q_range = _on_device(masks.q_range)
q_full = _on_device(masks.q_full)
