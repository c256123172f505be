"""Compile our kernels on a machine without their GPU, or without any: the very code that would run there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch

from strobe.device import KNOWN
from strobe.lab.sass import Audit, audit
from strobe.masks import Causal, Full
from strobe.problem import AttentionProblem, Dense


@contextlib.contextmanager
def pretend_gpu(capability: int) -> Iterator[None]:
    """Within it, `kernel.warmup(...)` on meta tensors compiles for this compute capability (90, 100, ...)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET=1: unset it before Triton is imported")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Pretended:
        """What Triton asks of a driver while it compiles."""

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=0):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

        def map_python_to_cpp_type(self, type_):
            return type_

    before = driver._active
    driver.set_active(Pretended())
    try:
        yield
    finally:
        driver._active = before


def audit_sm90_forward(
    head_dim: int = 128,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    traced: bool = False,
) -> Audit:
    """Compile the Hopper forward for one problem, and audit it. traced: the one that `forward.launch_traced` runs.
    Takes no GPU; 1 to 5 seconds on two CPU cores."""
    from strobe.kernels.sm90 import backend, forward

    problem = AttentionProblem(
        lengths=Dense(1, length, length),
        heads_q=1,
        heads_kv=1,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        scale=head_dim**-0.5,
        mask=Causal() if causal else Full(),
    )
    config = backend.config(problem, KNOWN["H200"])
    start = time.perf_counter()
    with pretend_gpu(90):
        compiled = forward.compile_only(problem, config, traced)
    name = f"sm90 forward, head dim {head_dim}, {'causal' if causal else 'full'}, {str(dtype).removeprefix('torch.')}"
    roles = (*(f"consumer {w}" for w in range(config.groups)), "producer")
    return audit(compiled, name, time.perf_counter() - start, roles)
