"""One case of the fuzzer without a GPU: what it needs on one is compiled, and the machine code is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from strobe.call import dispatch
from strobe.device import KNOWN, Arch
from strobe.kernels.common.call import Call, unfilled
from strobe.lab.bench.failures import compact
from strobe.lab.fuzz.caches import CacheCase
from strobe.lab.fuzz.caches import Call as CachedCall
from strobe.lab.fuzz.cases import Case
from strobe.lab.fuzz.inputs import inputs
from strobe.lab.fuzz.right import describe
from strobe.lab.fuzz.run import Outcome
from strobe.problem import AttentionProblem
from strobe.serving.arguments import checked
from strobe.serving.problem import DecodeOperands
from strobe.serving.problem import describe as describe_decode

_seen: set[str] = set()
"""Hashes of the kernels that this process has looked at."""


def compiled(case: Case | CacheCase, arch: str) -> Outcome:
    """Compiles the kernels of a case's calls for a GPU that need not be there. "right" if all of them compile, and none is
    wrong code (`sass.Audit`); "refused" where there is nothing to compile."""
    if not isinstance(case, CacheCase) and (case.bad or case.lie or case.door == "fp8"):
        return Outcome("refused", "compiles nothing of its own")
    try:
        calls = list(_of_cache(case, KNOWN[arch]) if isinstance(case, CacheCase) else _calls(case, KNOWN[arch]))
    except (TypeError, ValueError, NotImplementedError) as error:
        return Outcome("refused", str(error).splitlines()[0])
    if not calls:
        return Outcome("refused", "runs no kernel")
    try:
        return _looked_at(calls, KNOWN[arch])
    except Exception as error:
        while error.__cause__ is not None:  # Triton tells where from, and the reason last
            error = error.__cause__  # type: ignore[assignment]
        return Outcome("error", compact(error))


def _calls(case: Case, arch: Arch) -> Iterator[Call]:
    t = inputs(replace(case, device="cpu")).given
    for phase in ("forward", "backward") if case.gradients else ("forward",):
        problem = replace(describe(t, phase)[0], deterministic=case.deterministic)
        backend = dispatch.select(problem, arch, case.backend)
        if hasattr(backend, "calls") and not problem.is_empty:
            yield from _of_backend(backend, problem, arch)


def _of_cache(case: CacheCase, arch: Arch) -> list[Call]:
    from strobe.lab.binary.offline import pretend_gpu, with_buffers

    of = CachedCall(replace(case, device="cpu", missing=False))
    operands, options = checked(of.q, of.cache, return_lse=True, **of.keywords)
    out = torch.empty(*of.q.shape[:-1], case.head_dim_v, dtype=of.q.dtype)
    problem = describe_decode(operands._replace(out=out), options)
    backend = dispatch.select(problem, arch)
    if problem.is_empty:
        return []
    there = DecodeOperands._make(None if x is None else x.to("meta") for x in operands._replace(out=out))
    with pretend_gpu(arch.capability):
        return backend.calls(problem, with_buffers(there, backend.buffers(problem, arch)), arch)


def _of_backend(backend, problem: AttentionProblem, arch: Arch) -> list[Call]:
    from strobe.lab.binary.offline import pretend_gpu

    with pretend_gpu(arch.capability):
        return backend.calls(problem, unfilled(problem, backend.buffers(problem, arch)), arch)


def _looked_at(calls: list[Call], arch: Arch) -> Outcome:
    from strobe.lab.binary.offline import pretend_gpu
    from strobe.lab.binary.sass import audit

    with pretend_gpu(arch.capability):
        for call in calls:
            kernel = call.compile()
            if kernel.hash not in _seen:
                _seen.add(kernel.hash)
                found = audit(kernel, call.kernel.__name__).wrong_code
                if found:
                    return Outcome("wrong", f"{call.kernel.__name__}: {found[0]}")
    return Outcome("right")
