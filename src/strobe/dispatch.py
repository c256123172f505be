"""problem + arch -> kernel, or the reasons why not.

Selection is candidates -> legal -> ranked. Each backend is a module that stands beside its kernel and says

    refuses(problem, arch) -> str | None     the reason why it cannot run this, or None
    config(problem, arch)                    what it would run with (printed by `explain`)
    forward(problem, operands)               -> out, lse
    backward(problem, operands, out, lse, dout, dlse) -> Gradients

and, if it has a choice of configs,

    origin(problem, arch) -> str             where the config comes from, in words (printed by `explain`)

and, if its kernel never ran on the hardware that it is for,

    UNPROVEN                                 what was done instead, in words: it runs only when asked for by name

Modules are imported when first asked, so that `import strobe` costs no Triton.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from types import ModuleType

from strobe.device import Arch
from strobe.kernels import maps
from strobe.problem import AttentionProblem

log = logging.getLogger("strobe")

BACKENDS: dict[str, str] = {
    "sm100": "strobe.kernels.sm100.backend",
    "sm90": "strobe.kernels.sm90.backend",
    "portable": "strobe.kernels.portable.backend",
    "torch_cpu": "strobe.reference.torch_cpu",
    "tiled": "strobe.reference.tiled",
}
"""Name -> module, the fastest on a GPU first."""

FORWARD_ONLY = ("sm100",)
"""It runs the forward; the backward of the same call goes to the first of the others that does not refuse."""


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs a problem on an arch, with what config, and why the others do not."""

    problem: AttentionProblem
    arch: Arch
    chosen: str | None
    config: object
    refusals: tuple[tuple[str, str], ...]
    backward: Explanation | None = None
    """The choice for the backward, if one was asked about."""
    origin: str | None = None
    """Where the config comes from, in words."""
    warning: str | None = None
    """What to know before trusting the chosen kernel."""

    def __str__(self) -> str:
        lines = [f"problem   {self.problem}", f"device    {self.arch}", f"chosen    {self.chosen or 'none'}"]
        if self.warning is not None:
            lines.append(f"warning   {self.warning}")
        if self.config is not None:
            lines += [f"config    {self.config}", *maps.lines(self.config)]
        if self.origin is not None:
            lines.append(f"choice    {self.origin}")
        lines += [f"refused   {name}: {reason}" for name, reason in self.refusals]
        if self.backward is not None:
            lines += ["", str(self.backward)]
        return "\n".join(lines)


def backend_module(name: str) -> ModuleType:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {name!r}")
    return importlib.import_module(BACKENDS[name])


def _unproven(name: str) -> str | None:
    return getattr(backend_module(name), "UNPROVEN", None)


def _refusal(name: str, problem: AttentionProblem, arch: Arch, by_name: bool) -> str | None:
    """Why a backend does not run a problem: its own reason, or that nobody asked for it and it is unproven."""
    reason = backend_module(name).refuses(problem, arch)
    if reason is None and not by_name and _unproven(name):
        return f"{_unproven(name)}, so it runs only by name: backend={name!r}"
    return reason


def ranked(arch: Arch) -> list[str]:
    """The backends in the order of preference: the first that does not refuse runs."""
    if arch.is_gpu:
        return list(BACKENDS)
    return sorted(BACKENDS, key=lambda name: name == "portable")  # on a CPU it is an interpreter, made for tests


def explain_problem(problem: AttentionProblem, arch: Arch, backend: str | None = None) -> Explanation:
    """The choice for a problem; `chosen` is None if every candidate (or the one asked for) refuses."""
    refusals, chosen = [], None
    for name in ranked(arch) if backend is None else [backend]:
        reason = _refusal(name, problem, arch, backend is not None)
        if reason is not None:
            refusals.append((name, reason))
        elif chosen is None:
            chosen = name
    config = backend_module(chosen).config(problem, arch) if chosen else None
    warning = _unproven(chosen) if chosen else None
    origin = getattr(backend_module(chosen), "origin", None) if chosen else None
    words = origin(problem, arch) if origin else None
    return Explanation(problem, arch, chosen, config, tuple(refusals), origin=words, warning=warning)


def select(problem: AttentionProblem, arch: Arch, backend: str | None = None) -> ModuleType:
    """The backend that runs a problem. ValueError with every reason if none does, or if the one asked for does not."""
    refusals: list[tuple[str, str]] = []
    for name in ranked(arch) if backend is None else [backend]:
        reason = _refusal(name, problem, arch, backend is not None)
        if reason is None:
            _log_choice(name, problem, refusals)
            return backend_module(name)
        refusals.append((name, reason))
    asked = f"backend {backend!r} refuses" if backend else "no backend runs"
    raise ValueError(f"{asked} [{problem}] on {arch}: " + "; ".join(f"{name}: {reason}" for name, reason in refusals))


def _log_choice(name: str, problem: AttentionProblem, refusals: list[tuple[str, str]]) -> None:
    if log.isEnabledFor(logging.INFO):
        passed_over = "; ".join(f"{other}: {reason}" for other, reason in refusals) or "nothing"
        log.info("%s runs [%s]; refused before it: %s", name, problem, passed_over)
