"""The decode kernel in the simulator, on requests drawn at random."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from strobe.device import KNOWN
from strobe.kernels.common.call import Tensors
from strobe.kernels.decode import launch
from strobe.kernels.decode.choice import of_mma
from strobe.sim import Launch
from strobe.sim import attention as attention  # which gives the simulator the models of our assembly

sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))
from requests_at_random import Drawn, check, described, right


def run(
    call: Drawn, ctas: int = 3, order: str = "in_order", seed: int = 0, arch: int = 90, launches: int = 1,
    kernel: ModuleType | None = None, choose: Callable = of_mma, **config,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and the LSE of a call: simulate `launches` launches, one after the other with the same counters, and check their
    results. kernel: a module in place of the one that has the kernel which is launched. choose: makes the config; config:
    changes of it."""
    columns = call.cache.head_dim_v if call.cache.v is None else call.cache.v.shape[-1]
    out = torch.full((*call.q.shape[:-1], columns), torch.nan, dtype=call.q.dtype)
    if "cu_seqlens_q" in call.keywords:
        out.zero_()
    problem, operands = described(call, out=out)
    gpu = replace(KNOWN["H200" if arch == 90 else "A100"], sms=ctas)
    chosen = replace(choose(problem, gpu), **{"ctas": 1, **config})
    buffers = launch.buffers(problem, gpu, chosen)
    made = {
        name: torch.full(x.shape, torch.nan if x.fill is None else x.fill, dtype=x.dtype)
        for name, x in {**buffers.made, **buffers.shared}.items()
    }
    assert all(len(x.shape) == 1 for x in buffers.shared.values() if x.fill is not None), "counters stand in one line"
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    tensors = Tensors(**given, **made)
    (one,) = launch.calls(problem, tensors, gpu, chosen)
    function = one.kernel if kernel is None else getattr(kernel, one.kernel.__name__)
    grid = (one.grid[0] * one.cluster, *one.grid[1:])
    again = ("arrivals", "parts", "sums") if chosen.split else ("arrivals",)  # by a CTA that merges several whole jobs
    simulated = Launch(function, grid, (), one.keywords, arch=arch, rewritable=again, resident=one.cluster)
    wanted = right(call)
    for _ in range(launches):
        if "cu_seqlens_q" not in call.keywords:
            out.fill_(torch.nan)
        simulated.simulate(order, seed)
        check((out, made["lse"]), wanted, call.q.dtype)
    assert not tensors.arrivals.any(), "a counter is not set back"
    return out, made["lse"]
