"""Our attention kernels in the simulator: the same kernels and argument builders as on a GPU, tensors on the CPU."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
import triton.language as tl

from strobe.kernels.common import named_barrier, pairs, turn
from strobe.kernels.common.documents import SPAN
from strobe.kernels.sm90 import backward_launch as sm90_backward_launch
from strobe.kernels.sm90 import config as sm90_config
from strobe.kernels.sm90 import forward as sm90_forward
from strobe.kernels.sm90 import launch as sm90_launch
from strobe.kernels.sm100 import config as sm100_config
from strobe.kernels.sm100 import forward as sm100_forward
from strobe.kernels.workspace import Workspace
from strobe.problem import AttentionProblem, Gradients, Operands, lse_shape, zero_bias
from strobe.sim.barriers import named_arrive, named_sync
from strobe.sim.costs import Costs
from strobe.sim.launch import Launch
from strobe.sim.lift import register
from strobe.sim.machine import Report

BACKENDS = {"sm90": (sm90_forward, sm90_config.choose, 90), "sm100": (sm100_forward, sm100_config.choose, 100)}
_ROWS_PER_NOTE = 64
register(named_barrier.meet, partial(named_sync, threads=256))
register(named_barrier.announce, partial(named_arrive, threads=256))
register(turn.take_turn, lambda: None)  # a simulated launch is alone
register(pairs.rounded, lambda x, dtype: x.to(dtype))
register(pairs.widened, lambda x: x.to(tl.float32))


class Forward(NamedTuple):
    """out, lse and notes as the backend's `launch` gives them: notes None, or non-zero where rows hold a NaN or an infinity;
    of a Config with splits, out and lse float32 with the splits in front."""

    out: torch.Tensor
    lse: torch.Tensor
    notes: torch.Tensor | None
    report: Report


def simulate_forward(
    problem: AttentionProblem, operands: Operands, backend: str = "sm90", config=None, order: str = "in_order", seed: int = 0,
    ctas: int = 1, costs: Costs | None = None,
) -> Forward:  # fmt: skip
    """The forward kernel of a backend over operands on the CPU.

    config: the backend's Config; None: what it chooses. order, seed: see `strobe.sim.machine`. ctas: how many CTAs share the
    tiles if the kernel is persistent, so that one computes several; others have one a tile. costs: of a timed run; None
    means the arch's own. ValueError for another backend or an empty problem; a SimulationError for a mistake in the kernel.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    kernels, choose, arch = BACKENDS[backend]
    launch, out, lse, notes = forward_launch(kernels, arch, problem, operands, config or choose(problem), ctas)
    return Forward(out, lse, notes, launch.simulate(order, seed, costs))


def forward_launch(
    kernels: ModuleType, arch: int, problem: AttentionProblem, operands: Operands, config, ctas: int = 1
) -> tuple[Launch, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The launch of a module's `forward_kernel`, and what it fills: out, lse (both NaN until then) and notes."""
    if 0 in (*operands.q.shape, *operands.k.shape):
        raise ValueError(f"no kernel runs for q {list(operands.q.shape)} and k {list(operands.k.shape)}: one is empty")
    splits = getattr(config, "splits", 1)
    parts, dtype = ((), problem.dtype) if splits == 1 else ((splits,), torch.float32)
    out = torch.full((*parts, *operands.q.shape[:-1], problem.head_dim_v), torch.nan, dtype=dtype)
    lse = torch.full((*parts, *lse_shape(problem)), torch.nan)
    number = problem.lengths.batch * problem.heads_q * -(-problem.lengths.seqlen_q // _ROWS_PER_NOTE)
    notes: torch.Tensor | None = None
    if arch == 90:
        if sm90_launch.has_blind_tiles(problem):
            sm90_launch.fill_blind(out, lse, problem.score.sinks, operands.cu_seqlens_q, operands.seqused_q)
        space = Workspace(torch.zeros(16, dtype=torch.int32), torch.zeros(number, dtype=torch.int32))
        notes = space.notes
        documents = problem.mask.documents
        spans = None if documents is None else spans_of(documents.q, documents.kv)
        grid, arguments, constants = sm90_launch.kernel_arguments(problem, operands, out, lse, space, config, spans)
    else:
        if problem.mask.band != (None, None, None):
            notes = torch.zeros(number, dtype=torch.int32)
        grid, arguments, constants = kernels.kernel_arguments(problem, operands, out, lse, notes, config)
    if getattr(config, "persistent", False):
        grid = (min(ctas, *grid),)
    return Launch(kernels.forward_kernel, grid, arguments, constants, arch, ("notes", "counters")), out, lse, notes


def spans_of(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """As `kernels.common.documents.spans_kernel` finds them."""
    parts = ids.split(SPAN.value, 1)
    least, most = (torch.stack([extreme(part, 1) for part in parts], 1) for extreme in (torch.amin, torch.amax))
    seen = (others[:, None] >= least[..., None]) & (others[:, None] <= most[..., None])
    place = torch.arange(others.shape[1])
    begin, end = torch.where(seen, place, others.shape[1]).amin(2), torch.where(seen, place + 1, 0).amax(2)
    whole = (least == most) & (seen.sum(2) == end - begin)
    return torch.stack([begin, end, whole], 2).to(torch.int32)


def backward_launch(
    kernels: ModuleType, problem: AttentionProblem, operands: Operands, dout, space: sm90_backward_launch.Buffers, config,
    ctas: int = 1,
) -> tuple[Launch, Gradients]:  # fmt: skip
    """The launch of a module's `backward_kernel`, on buffers that `sm90.backward_ends.prepare` has filled, and the gradients
    that it fills, NaN until then, but for dQ: it adds that to `space`, from where `convert` fetches it."""
    grads = _unfilled(problem, operands)
    (blocks,), arguments, constants = sm90_backward_launch.one_pass_arguments(problem, operands, dout, grads, space, config)
    return Launch(kernels.backward_kernel, (min(ctas, blocks),), arguments, constants, 90, ("notes", "counters")), grads


def split_backward_launches(
    kernels: ModuleType, problem: AttentionProblem, operands: Operands, dout, space: sm90_backward_launch.Buffers, config
) -> tuple[Launch, Launch, Gradients]:
    """The launches of a module's `keys_kernel` and `rows_kernel`, as `backward_launch`, and the gradients that they fill."""
    grads = _unfilled(problem, operands)
    grid, arguments, constants = sm90_backward_launch.keys_arguments(problem, operands, dout, grads, space, config)
    keys = Launch(kernels.keys_kernel, grid, arguments, constants, 90, ("notes",))
    grid, arguments, constants = sm90_backward_launch.rows_arguments(problem, operands, dout, grads, space, config)
    return keys, Launch(kernels.rows_kernel, grid, arguments, constants, 90, ("notes",)), grads


def _unfilled(problem: AttentionProblem, operands: Operands) -> Gradients:
    """NaN, but for a bias's, to which kernels add, or write what somebody sees."""
    grads = Gradients(*(torch.full_like(x, torch.nan) for x in operands[:3]))
    bias = problem.score.bias
    return grads._replace(bias=zero_bias(problem, bias)) if bias is not None and "bias" in problem.learned else grads
