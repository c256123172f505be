"""Compile our kernels on a machine without their GPU, or without any: the very code that would run there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from strobe.call.triton_internals import stable_keys
from strobe.device import KNOWN, Arch
from strobe.kernels.common.call import Buffers, Tensors, unfilled, unfilled_buffers
from strobe.kernels.decode.config import Config as DecodeConfig
from strobe.kernels.sm90.backward_config import Config as BackwardConfig
from strobe.kernels.sm90.backward_config import SplitConfig
from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig
from strobe.kernels.sm90.config import Config
from strobe.kernels.sm90.short_config import ShortConfig
from strobe.lab.binary.sass import Audit, audit
from strobe.masks import Causal, Mask
from strobe.problem import AttentionProblem, Dense, Varlen
from strobe.serving.problem import DecodeOperands, DecodeProblem

CAUSAL = Causal()


@contextlib.contextmanager
def pretend_gpu(capability: int) -> Iterator[None]:
    """Within it, `kernel.warmup(...)` on meta tensors compiles for this compute capability (90, 100, ...)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET=1: unset it before Triton is imported")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    stable_keys()

    class Pretended:
        """What Triton asks of a driver while it compiles."""

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            # Triton keeps what it compiled by the number of the device: no other arch, and no real GPU, may have this one.
            return 1000 + capability

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


@dataclass(frozen=True)
class Made:
    """A kernel as Triton compiled it, the names of its warp partitions in the order of their list (none: it has no
    partitions), and how long compiling took."""

    name: str
    kernel: Any
    roles: tuple[str, ...] = ()
    seconds: float = 0.0

    def audit(self) -> Audit:
        return audit(self.kernel, self.name, self.seconds, self.roles)


def _timed(arch: Arch, compile_only: Callable) -> tuple[Any, float]:
    """What a function compiles for an arch, and the seconds that it takes."""
    start = time.perf_counter()
    with pretend_gpu(arch.capability):
        compiled = compile_only()
    return compiled, time.perf_counter() - start


# ---- our kernels, each for one problem on one arch


def portable_forward(problem: AttentionProblem, arch: Arch) -> list[Made]:
    from strobe.kernels.portable import forward

    tensors = unfilled(problem, forward.buffers(problem))
    compiled, seconds = _timed(arch, lambda: forward.calls(problem, tensors, arch)[-1].compile())
    return [Made(_name("portable", problem), compiled, seconds=seconds)]


def portable_backward(problem: AttentionProblem, arch: Arch) -> list[Made]:
    """Two kernels: of dK and dV, and of dQ."""
    from strobe.kernels.portable import backward

    tensors = unfilled(problem, backward.buffers(problem))
    compiled, seconds = _timed(arch, lambda: [call.compile() for call in backward.calls(problem, tensors, arch)[-2:]])
    names = (f"{_name('portable', problem)}, {result}" for result in ("dK and dV", "dQ"))
    return [Made(name, kernel, seconds=seconds) for name, kernel in zip(names, compiled, strict=True)]


def sm80_forward(problem: AttentionProblem, arch: Arch, config: Any = None) -> list[Made]:
    """config: an `sm80.config.Config`; None: what the arch gets."""
    from strobe.kernels.sm80 import config as sm80_config
    from strobe.kernels.sm80 import launch

    chosen = config or sm80_config.choose(problem, arch)
    compiled, seconds = _timed(arch, lambda: launch.compile_only(problem, arch, chosen))
    return [Made(_name("sm80", problem), compiled, seconds=seconds)]


def sm80_backward(problem: AttentionProblem, arch: Arch, config: Any = None) -> list[Made]:
    """config: an `sm80.config.BackwardConfig`; None: what the arch gets."""
    from strobe.kernels.sm80 import backward_launch
    from strobe.kernels.sm80 import config as sm80_config

    chosen = config or sm80_config.choose_backward(problem, arch)
    compiled, seconds = _timed(arch, lambda: backward_launch.compile_only(problem, arch, chosen))
    return [Made(_name("sm80", problem), compiled, seconds=seconds)]


def sm90_forward(
    problem: AttentionProblem, arch: Arch, config: Config | ShortConfig | None = None, traced: bool = False
) -> list[Made]:
    from strobe.kernels.sm90 import backend, launch, short_launch

    chosen = config or (backend.long_config(problem) if traced else backend.config(problem, arch))
    if isinstance(chosen, ShortConfig):
        compiled, seconds = _timed(arch, lambda: short_launch.compile_only(problem, arch, chosen))
        return [Made(_name("sm90", problem), compiled, seconds=seconds)]
    compiled, seconds = _timed(arch, lambda: launch.compile_only(problem, arch, chosen, traced))
    return [Made(_name("sm90", problem), compiled, _sm90_roles(chosen.groups), seconds)]


def sm90_backward(
    problem: AttentionProblem, arch: Arch, config: BackwardConfig | SplitConfig | ShortBackwardConfig | None = None
) -> list[Made]:
    """One kernel, or those of two passes, or one with that of dQ."""
    from strobe.kernels.sm90 import backend, backward_launch, backward_short_launch

    chosen = config or backend.config(problem, arch)
    if isinstance(chosen, ShortBackwardConfig):
        one, seconds = _timed(arch, lambda: backward_short_launch.compile_only(problem, arch, chosen))
        return [Made(_name("sm90", problem), one, seconds=seconds)]
    compiled, seconds = _timed(arch, lambda: backward_launch.compile_only(problem, arch, chosen))
    name = _name("sm90", problem)
    found = []
    if isinstance(chosen, BackwardConfig):
        found.append(Made(name, compiled[0], (*_sm90_roles(2), *(("writer", "teller") if chosen.order else ())), seconds))
    else:
        found.append(Made(f"{name}, keys pass", compiled[0], ("dv", "dk", "producer"), seconds))
    for of_rows in compiled[1:]:
        found.append(Made(f"{name}, {'dQ' if chosen.stored else 'rows pass'}", of_rows, ("dq 0", "dq 1", "producer"), seconds))
    return found


def sm90_fp8(problem: AttentionProblem, arch: Arch) -> list[Made]:
    from strobe.kernels.sm90 import fp8, fp8_launch

    config = fp8.config(problem)
    compiled, seconds = _timed(arch, lambda: fp8_launch.compile_only(problem, arch, config))
    return [Made(_name("sm90", problem), compiled, _sm90_roles(config.groups), seconds)]


def sm100_forward(problem: AttentionProblem, arch: Arch, **changes) -> list[Made]:
    """changes: of its config."""
    from strobe.kernels.sm100 import backend, launch

    config = replace(backend.config(problem, arch), **changes)
    compiled, seconds = _timed(arch, lambda: launch.compile_only(problem, arch, config))
    softmax = (f"softmax {w}" for w in range(config.q_stages))
    roles = (*softmax, *(["correction"] if config.correction else []), "mma", "epilogue", "load")
    return [Made(_name("sm100", problem), compiled, roles, seconds)]


def decode(problem: DecodeProblem, operands: DecodeOperands, arch: Arch, config: DecodeConfig | None = None) -> list[Made]:
    """operands: on the meta device; config: None is what the arch gets."""
    from strobe.kernels.decode import launch
    from strobe.kernels.decode.choice import choose

    chosen = config or choose(problem, arch)
    tensors = with_buffers(operands, launch.buffers(problem, arch, chosen))
    compiled, seconds = _timed(arch, lambda: launch.calls(problem, tensors, arch, chosen)[0].compile())
    return [Made(str(problem), compiled, _decode_roles(chosen), seconds)]


def with_buffers(operands: DecodeOperands, buffers: Buffers) -> Tensors:
    """The tensors of a call over a cache, without numbers. operands: on the meta device."""
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    return Tensors(**given, **unfilled_buffers(buffers))


def _decode_roles(config: DecodeConfig) -> tuple[str, ...]:
    """The warp partitions of `hopper_kernel` where there are more than two: two are told apart by no switch (`role_blocks`)."""
    if not config.specialised or config.halves > 1 or not config.box:
        return ()
    return (*("multiplier", "second multiplier")[: config.groups], "copier of keys", "copier of values")


def _sm90_roles(groups: int) -> tuple[str, ...]:
    return (*(f"consumer {w}" for w in range(groups)), "producer")


# ---- audited


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
    problem = problem_of(head_dims, mask, dtype, length)
    if packed:
        rows = problem.lengths.batch * length
        problem = replace(problem, lengths=Varlen(problem.lengths.batch, length, length, rows, rows))
    return sm90_forward(problem, KNOWN["H200"], config, traced)[0].audit()


def audit_sm90_backward(
    head_dims: tuple[int, int] = (128, 128),
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    config: BackwardConfig | SplitConfig | None = None,
) -> list[Audit]:
    """Compile the main kernel of the Hopper backward for one problem, or those of its two passes, with a config or the one that
    it would get, and audit them. head_dims: of k and of v. Takes no GPU; some seconds on two CPU cores."""
    problem = replace(problem_of(head_dims, mask, dtype, length), phase="backward")
    return [made.audit() for made in sm90_backward(problem, KNOWN["H200"], config)]


def audit_sm100_forward(
    head_dims: tuple[int, int] = (128, 128),
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    **changes,
) -> Audit:
    """Compile the Blackwell forward for one problem, with `changes` of its config, and audit it. head_dims: of k and of v.
    Takes no GPU; 4 to 20 seconds on two CPU cores."""
    return sm100_forward(problem_of(head_dims, mask, dtype, length), KNOWN["B200"], **changes)[0].audit()


def audit_portable_forward(
    head_dims: tuple[int, int] = (128, 128),
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 4096,
    arch: Arch = KNOWN["A100"],
) -> Audit:
    """Compile the portable forward for one problem on an arch, and audit it. head_dims: of k and of v. Takes no GPU."""
    return portable_forward(problem_of(head_dims, mask, dtype, length), arch)[0].audit()


def problem_of(head_dims: tuple[int, int], mask: Mask, dtype: torch.dtype, length: int = 4096) -> AttentionProblem:
    """A forward with enough tiles of one head, in many sequences, to fill any GPU. head_dims: of k and of v."""
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
