"""Finds the kernel for a problem on an arch, or the reasons why there is none.

Selection is candidates -> legal -> ranked. Each backend is a module that stands beside its kernel and says

    refuses(problem, arch) -> str | None     the reason why it cannot run this, or None
    config(problem, arch)                    what it would run with (printed by `explain`)

and, if it launches kernels (see `strobe.kernels.common.call`; `strobe.call.launches` makes the launches),

    buffers(problem, arch)                   the tensors that they need
    calls(problem, tensors, arch)            the launches

else

    forward(problem, operands)               -> out, lse
    backward(problem, operands, upstream)    -> Gradients

and, if it has a choice of configs,

    origin(problem, arch) -> str | None      where the config comes from, or what it decides, in words (printed by `explain`)

and, if some kernel of its never ran on hardware that it is for, or was not timed there beside the next backend's, or takes
longer for some problems,

    unproven(problem, arch) -> str | None    that, in words, of what a problem runs: only when asked for by name

Modules are imported when first asked, so that `import strobe` costs no Triton.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from types import ModuleType

import torch

from strobe.call import launches
from strobe.device import Arch, arch_of
from strobe.kernels import memory_map
from strobe.problem import AttentionProblem, Gradients, Operands, Upstream
from strobe.serving.problem import DecodeOperands, DecodeProblem

log = logging.getLogger("strobe")

BACKENDS: dict[str, str] = {
    "sm100": "strobe.kernels.sm100.backend",
    "sm90": "strobe.kernels.sm90.backend",
    "sm80": "strobe.kernels.sm80.backend",
    "portable": "strobe.kernels.portable.backend",
    "torch_cpu": "strobe.cpu.torch_cpu",
    "tiled": "strobe.cpu.tiled",
    "sm90_fp8": "strobe.kernels.sm90.fp8_backend",
    "by_value": "strobe.cpu.by_value",
}
"""Name of a backend -> its module, those that are fastest on a GPU first."""

OF_CACHES: dict[str, str] = {
    "sm90_cache": "strobe.kernels.sm90.cache_backend",
    "decode": "strobe.kernels.decode.backend",
    "cached_cpu": "strobe.cpu.cached",
}
"""Backends of attention over a cache (`strobe.decode`), those that are fastest on a GPU first."""

FORWARD_ONLY = ("sm100", "sm90_fp8", "by_value")
"""Backends that run only the forward. The backward of the same call goes to the first of the others that does not refuse it."""

OF_E4M3 = ("sm90_fp8", "by_value")
"""Backends that take float8_e4m3fn and no other dtype. No other backend takes it."""


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs a problem on an arch, with what config, and why the others do not."""

    problem: AttentionProblem | DecodeProblem
    arch: Arch
    chosen: str | None
    config: object
    refusals: tuple[tuple[str, str], ...]
    backward: Explanation | None = None
    """The choice for the backward, if one was asked about."""
    origin: str | None = None
    """Where the config comes from, or what it decides, in words."""
    warning: str | None = None
    """What to know before trusting the chosen kernel."""
    others: tuple[str, ...] = ()
    """The backends that would run it too, and come after the chosen one."""

    def __str__(self) -> str:
        lines = [f"problem   {self.problem}", f"device    {self.arch}", f"chosen    {self.chosen or 'none'}"]
        if self.warning is not None:
            lines.append(f"warning   {self.warning}")
        if self.config is not None:
            lines += [f"config    {self.config}", *memory_map.lines(self.config)]
        if self.origin is not None:
            lines.append(f"choice    {self.origin}")
        if self.others:
            lines.append(f"passed    {', '.join(self.others)}: run{'s' * (len(self.others) == 1)} it too, by name")
        lines += [f"refused   {name}: {reason}" for name, reason in self.refusals]
        if self.backward is not None:
            lines += ["", str(self.backward)]
        return "\n".join(lines)


def backend_module(name: str) -> ModuleType:
    known = BACKENDS if name in BACKENDS else OF_CACHES
    if name not in known:
        raise ValueError(f"backend must be one of {', '.join((*BACKENDS, *OF_CACHES))} or None, got {name!r}")
    return importlib.import_module(known[name])


def unproven(name: str, problem: AttentionProblem | DecodeProblem, arch: Arch) -> str | None:
    """Why a backend runs a problem by name only, in words; None if it runs it without being asked for."""
    found = getattr(backend_module(name), "unproven", None)
    return None if found is None else found(problem, arch)


def _refusal(name: str, problem: AttentionProblem | DecodeProblem, arch: Arch, by_name: bool) -> str | None:
    """Why a backend does not run a problem: its own reason, or that it is unproven and was not asked for by name. None: it
    runs."""
    if (name in OF_CACHES) != isinstance(problem, DecodeProblem):
        return "runs attention over a cache alone" if name in OF_CACHES else "runs no attention over a cache"
    reason = backend_module(name).refuses(problem, arch)
    if reason is None and not by_name and (words := unproven(name, problem, arch)):
        return f"{words}, so it runs only by name: backend={name!r}"
    return reason


def ranked(problem: AttentionProblem | DecodeProblem, arch: Arch) -> list[str]:
    """The backends for a problem's kind and dtype, in the order of preference. The first that does not refuse runs the
    problem."""
    if isinstance(problem, DecodeProblem):
        return list(OF_CACHES)
    names = [name for name in BACKENDS if (name in OF_E4M3) == (problem.dtype == torch.float8_e4m3fn)]
    return names if arch.is_gpu else sorted(names, key=lambda name: name == "portable")  # interpreted on a CPU, for tests


def explain_problem(problem: AttentionProblem | DecodeProblem, arch: Arch, backend: str | None = None) -> Explanation:
    """The choice of a backend for a problem. `chosen` is None if all candidates refuse, or the one that was asked for."""
    refusals, takers = [], []
    for name in ranked(problem, arch) if backend is None else [backend]:
        reason = _refusal(name, problem, arch, backend is not None)
        if reason is not None:
            refusals.append((name, reason))
        else:
            takers.append(name)
    chosen = takers[0] if takers else None
    config = backend_module(chosen).config(problem, arch) if chosen else None
    warning = unproven(chosen, problem, arch) if chosen else None
    origin = getattr(backend_module(chosen), "origin", None) if chosen else None
    words = origin(problem, arch) if origin else None
    return Explanation(problem, arch, chosen, config, tuple(refusals), origin=words, warning=warning, others=tuple(takers[1:]))


def select(problem: AttentionProblem | DecodeProblem, arch: Arch, backend: str | None = None) -> ModuleType:
    """The backend that runs a problem. ValueError with every reason if none does, or if the one asked for does not."""
    refusals: list[tuple[str, str]] = []
    for name in ranked(problem, arch) if backend is None else [backend]:
        reason = _refusal(name, problem, arch, backend is not None)
        if reason is None:
            _log_choice(name, problem, refusals)
            return backend_module(name)
        refusals.append((name, reason))
    asked = f"backend {backend!r} refuses" if backend else "no backend runs"
    raise ValueError(f"{asked} [{problem}] on {arch}: " + "; ".join(f"{name}: {reason}" for name, reason in refusals))


def forward(
    problem: AttentionProblem | DecodeProblem, operands: Operands | DecodeOperands, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a problem, computed by the backend that `select` finds."""
    chosen = select(problem, arch_of(operands.q.device), backend)
    if hasattr(chosen, "calls"):
        return launches.forward(chosen, problem, operands)
    return chosen.forward(problem, operands)


def backward(problem: AttentionProblem, operands: Operands, upstream: Upstream, backend: str | None = None) -> Gradients:
    """The gradients of a problem, computed by the backend that `select` finds."""
    chosen = select(problem, arch_of(operands.q.device), backend)
    if hasattr(chosen, "calls"):
        return launches.backward(chosen, problem, operands, upstream)
    return chosen.backward(problem, operands, upstream)


def _log_choice(name: str, problem: AttentionProblem | DecodeProblem, refusals: list[tuple[str, str]]) -> None:
    if log.isEnabledFor(logging.INFO):
        passed_over = "; ".join(f"{other}: {reason}" for other, reason in refusals) or "nothing"
        log.info("%s runs [%s]; refused before it: %s", name, problem, passed_over)
