"""Launches the Hopper forward's kernel alone: nobody redoes what it notes."""

from __future__ import annotations

import math

import torch

from strobe.call import launches
from strobe.device import arch_of
from strobe.kernels.common.call import Tensors
from strobe.kernels.common.stamp import COUNT, ROLES
from strobe.kernels.sm90.config import Config
from strobe.kernels.sm90.launch import buffers, forward_call, preparing_calls
from strobe.problem import AttentionProblem, Operands, lse_shape


def launch(problem: AttentionProblem, operands: Operands, config: Config, trace: torch.Tensor | None = None) -> Tensors:
    """The tensors of the launch, among them out, lse and the notes, which the caller has to set back to 0."""
    with torch.cuda.device_of(operands.q):  # Triton launches on the current device, which need not be q's
        tensors = launches.allocated(buffers(problem), operands._asdict())
        forward = forward_call(problem, tensors, arch_of(operands.q.device), config, trace)
        for call in (*preparing_calls(problem, tensors, config), forward):
            call.launch()
    return tensors


def launch_traced(problem: AttentionProblem, operands: Operands, config: Config) -> torch.Tensor:
    """The stamps of a launch: int64 [CTAs, roles, events, key blocks] (see `common.stamp`; the roles are the consumers and then
    the producer), 0 where a role does not pass an event. Each CTA has one tile.

    ValueError if the stamps are 2^31 or more: the kernel counts them in int32."""
    *_, rows = lse_shape(problem)
    blocks = -(-problem.lengths.seqlen_kv // config.tile_kv)
    tiles = problem.lengths.batch * problem.heads_kv * config.tiles_of(problem.group) * -(-rows // config.tile_q)
    shape = (blocks, tiles, ROLES.value, COUNT.value)
    if math.prod(shape) >= 2**31:
        raise ValueError(f"a traced launch takes fewer than 2^31 stamps, got {shape[0]} key blocks in {shape[1]} CTAs")
    trace = torch.zeros(shape, dtype=torch.int64, device=operands.q.device)
    launch(problem, operands, config, trace)
    return trace.permute(1, 2, 3, 0)
