"""The host half of the Hopper forward over a cache: its launches, and those of the decode kernels before and after it.

Packed requests of few queries come first, which are most of a server's batch, and read the most: the forward begins while they
end, on the multiprocessors that they leave one by one (see `Config.beside`)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton

from strobe.device import Arch
from strobe.kernels.common.call import Buffer, Buffers, Call, Tensors
from strobe.kernels.decode import launch as decode_launch
from strobe.kernels.decode.choice import of_mma
from strobe.kernels.sm90.cache_config import MANY_QUERIES, as_attention, config_of_few, least_queries, of_few_queries
from strobe.kernels.sm90.config import ROWS_PER_GROUP, SMS, Config
from strobe.kernels.sm90.launch import forward_call
from strobe.kernels.sm90.tile_list import Apart, list_buffers, list_calls
from strobe.serving.problem import DecodeProblem


def buffers(problem: DecodeProblem, arch: Arch) -> Buffers:
    """The tensors of the launches: those of the decode kernels, a list of tiles, notes."""
    lengths = problem.lengths
    made, shared, _, _ = decode_launch.buffers(replace(problem, with_lse=True), arch, of_mma(problem, arch))
    if problem.ragged:
        few = of_few_queries(problem)
        others = decode_launch.buffers(few, arch, config_of_few(few, arch)).shared
        shared = {name: max(mine, others[name], key=lambda one: math.prod(one.shape)) for name, mine in shared.items()}
        shared["served"] = Buffer((lengths.batch,), torch.int32)
    notes = lengths.batch * problem.heads_q * triton.cdiv(lengths.seqlen_q, ROWS_PER_GROUP)
    shared = {**shared, **list_buffers(as_attention(problem))}
    if problem.with_lse:
        return Buffers(made, shared, {"notes": notes})
    return Buffers({}, {**shared, "lse": made["lse"]._replace(fill=None)}, {"notes": notes})


def calls(problem: DecodeProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The launches, in order: packed requests are listed, and those of few queries served; those of many; what these noted."""
    attention = as_attention(problem)
    seen = Tensors(**{**vars(tensors), "seqused_kv": tensors.lengths})
    listed = Tensors(**{**vars(seen), "out": None, "lse": None})
    found = []
    if problem.ragged:
        few = of_few_queries(problem)
        abreast = problem.heads_kv * config.tiles_of(problem.group)
        apart = Apart(least_queries(problem, config), MANY_QUERIES, abreast, arch.sms or SMS)
        (tokens,) = decode_launch.calls(few, tensors, arch, config_of_few(few, arch))
        found = [*list_calls(attention, listed, config.tile_q, apart), _with(tokens, served=tensors.served)]
    (noted,) = decode_launch.calls(problem, tensors, arch, of_mma(problem, arch))
    noted = _with(noted, notes=tensors.notes, counters=tensors.counters)
    return [*found, forward_call(attention, seen, arch, config), noted]


def _with(call: Call, **more) -> Call:
    return call._replace(keywords={**call.keywords, **more})
