"""Compile our kernels on a machine without their GPU, or without any: the very code that would run there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from strobe.device import KNOWN, Arch
from strobe.kernels.sm90.backward_config import Config as BackwardConfig
from strobe.kernels.sm90.backward_config import SplitConfig
from strobe.kernels.sm90.backward_config import choose as choose_backward
from strobe.kernels.sm90.config import Config
from strobe.lab.sass import Audit, audit
from strobe.masks import Causal, Mask
from strobe.problem import AttentionProblem, Dense, Varlen

CAUSAL = Causal()


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
    head_dims: tuple[int, int] = (128, 128),
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    packed: bool = False,
    traced: bool = False,
    config: Config | None = None,
) -> Audit:
    """Compile the Hopper forward for one problem (packed: of sequences up to the length; traced: with its stamps), with a
    config or the one that it would get, and audit it. head_dims: of k and of v. Takes no GPU; some seconds on two CPU cores."""
    from strobe.kernels.sm90 import backend, launch

    problem = _forward_problem(head_dims, mask, dtype, length)
    if packed:
        rows = problem.lengths.batch * length
        problem = replace(problem, lengths=Varlen(problem.lengths.batch, length, length, rows, rows))
    config = config or backend.config(problem, KNOWN["H200"])
    start = time.perf_counter()
    with pretend_gpu(90):
        compiled = launch.compile_only(problem, config, traced)
    roles = (*(f"consumer {w}" for w in range(config.groups)), "producer")
    return audit(compiled, _name("sm90", problem), time.perf_counter() - start, roles)


def audit_sm90_backward(
    head_dims: tuple[int, int] = (128, 128),
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    config: BackwardConfig | SplitConfig | None = None,
) -> list[Audit]:
    """Compile the main kernel of the Hopper backward for one problem, or those of its two passes, with a config or the one that
    it would get, and audit them. head_dims: of k and of v. Takes no GPU; some seconds on two CPU cores."""
    from strobe.kernels.sm90 import backward_launch

    problem = replace(_forward_problem(head_dims, mask, dtype, length), phase="backward")
    config = config or choose_backward(problem)
    start = time.perf_counter()
    with pretend_gpu(90):
        compiled = backward_launch.compile_only(problem, config)
    seconds, name = time.perf_counter() - start, _name("sm90", problem)
    if isinstance(config, BackwardConfig):
        return [audit(compiled[0], name, seconds, ("consumer 0", "consumer 1", "producer"))]
    of_keys, of_rows = compiled
    return [
        audit(of_keys, f"{name}, keys pass", seconds, ("values", "keys", "producer")),
        audit(of_rows, f"{name}, rows pass", seconds, ("rows 0", "rows 1", "producer")),
    ]


def audit_sm100_forward(
    head_dims: tuple[int, int] = (128, 128),
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    **changes,
) -> Audit:
    """Compile the Blackwell forward for one problem, with `changes` of its config, and audit it. head_dims: of k and of v.
    Takes no GPU; 4 to 20 seconds on two CPU cores."""
    from strobe.kernels.sm100 import backend, forward

    problem = _forward_problem(head_dims, mask, dtype, length)
    config = replace(backend.config(problem, KNOWN["B200"]), **changes)
    start = time.perf_counter()
    with pretend_gpu(100):
        compiled = forward.compile_only(problem, config)
    softmax = (f"softmax {w}" for w in range(config.q_stages))
    roles = (*softmax, *(["correction"] if config.correction else []), "mma", "epilogue", "load")
    return audit(compiled, _name("sm100", problem), time.perf_counter() - start, roles)


def audit_portable_forward(
    head_dims: tuple[int, int] = (128, 128),
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    arch: Arch = KNOWN["A100"],
) -> Audit:
    """Compile the portable forward for one problem on an arch, and audit it. head_dims: of k and of v. Takes no GPU."""
    from strobe.kernels.portable import forward

    problem = _forward_problem(head_dims, mask, dtype, length)
    start = time.perf_counter()
    with pretend_gpu(arch.capability):
        compiled = forward.compile_only(problem, arch)
    return audit(compiled, _name("portable", problem), time.perf_counter() - start)


def _forward_problem(head_dims: tuple[int, int], mask: Mask, dtype: torch.dtype, length: int) -> AttentionProblem:
    """Enough tiles of one head, in many sequences, to fill any GPU."""
    return AttentionProblem(
        lengths=Dense(256, length, length),
        heads_q=1,
        heads_kv=1,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
        scale=head_dims[0] ** -0.5,
        mask=mask,
    )


def _name(kernel: str, problem: AttentionProblem) -> str:
    dims = f"{problem.head_dim}" + (f", {problem.head_dim_v}" if problem.head_dim != problem.head_dim_v else "")
    return f"{kernel} {problem.phase}, head dim {dims}, {problem.mask}, {str(problem.dtype).removeprefix('torch.')}"
