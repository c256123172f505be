"""The Hopper forward over a cache, and the decode kernels around it, in the simulator, on requests drawn at random."""

from dataclasses import replace
from types import ModuleType
from unittest import mock

import torch
from decode_launch import Drawn, check, described, right

from strobe.device import KNOWN
from strobe.kernels.common.call import Tensors
from strobe.kernels.sm90 import cache_config, cache_launch
from strobe.kernels.sm90.tile_list import list_tiles
from strobe.sim import Launch
from strobe.sim.attention import unwritten

BOUNDS = ((20, 20), (10, 60))
"""Queries from which on a request may be the forward's here, and is."""


def run(
    call: Drawn, ctas: int = 3, order: str = "in_order", seed: int = 0, launches: int = 1, few: ModuleType | None = None,
    forward: ModuleType | None = None, noted: ModuleType | None = None, bounds: tuple[int, int] = BOUNDS[0], **config,
) -> int:  # fmt: skip
    """Simulate the launches of a call, so many times with the same notes and counters, check their results, and say how many
    blocks were computed again. few, forward, noted: modules in place of `decode.hopper`, `sm90.forward` and `decode.forward`.
    bounds: see `BOUNDS`. config: changes of the forward's config."""
    out = torch.full((*call.q.shape[:-1], call.cache.v.shape[-1]), torch.nan, dtype=call.q.dtype)
    problem, operands = described(call, out=out)
    gpu = replace(KNOWN["H200"], sms=ctas)
    chosen = replace(cache_config.choose(problem, gpu), **config)
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    least, always = bounds
    with (
        mock.patch.object(cache_launch, "MANY_QUERIES", always),
        mock.patch.object(cache_config, "MANY_QUERIES", always),
        mock.patch.object(cache_launch, "least_queries", lambda problem, config: least),
    ):
        tensors = Tensors(**given, **unwritten(cache_launch.buffers(problem, gpu)))
        tensors.arrivals.zero_()
        listed, calls = [], cache_launch.calls(problem, tensors, gpu, chosen)
    if problem.ragged:
        listed, calls = calls[:1], calls[1:]
        assert listed[0].kernel is list_tiles
    rewritable = "arrivals", "notes", "counters", "out", "lse", "o_desc"
    simulated = [
        Launch(one.kernel if module is None else getattr(module, one.kernel.__name__), one.grid, one.arguments, one.keywords,
               rewritable=rewritable)
        for module, one in zip((few, forward, noted)[-len(calls) :], calls, strict=True)
    ]  # fmt: skip
    rows = torch.ones(out.shape[0], dtype=torch.bool)
    if operands.cu_seqlens_q is not None:
        rows = torch.arange(out.shape[0]) < operands.cu_seqlens_q[-1]
    wanted = right(call)
    for _ in range(launches):
        out.fill_(torch.nan)
        tensors.lse.fill_(torch.nan if operands.cu_seqlens_q is None else -torch.inf)
        for one in listed:
            one.launch()
        report = None
        for one in simulated:
            report = one.simulate(order, seed, after=report)
        check((out[rows], tensors.lse), (wanted[0][rows], wanted[1]), call.q.dtype)
        assert out[~rows].isnan().all(), "a row of no request is written"
        for left in (tensors.notes, tensors.arrivals, tensors.counters[:4]):
            assert not left.any(), "something is left over"
    return int(tensors.counters[4]) // launches
