"""The host half of the Hopper forward over a cache: its launches, the last of which is the decode kernel's."""

from __future__ import annotations

from dataclasses import replace

import triton

from strobe.device import Arch
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.kernels.decode import launch as decode_launch
from strobe.kernels.decode.choice import of_mma
from strobe.kernels.sm90.cache_config import MANY_QUERIES, as_attention
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.kernels.sm90.launch import forward_call
from strobe.kernels.sm90.tile_list import list_buffers, list_calls
from strobe.serving.problem import DecodeProblem


def buffers(problem: DecodeProblem, arch: Arch) -> Buffers:
    """The tensors of the launches: those of the decode kernel, a list of tiles, notes."""
    lengths = problem.lengths
    made, shared, _, _ = decode_launch.buffers(replace(problem, with_lse=True), arch, of_mma(problem, arch))
    notes = lengths.batch * problem.heads_q * triton.cdiv(lengths.seqlen_q, ROWS_PER_GROUP)
    shared = {**shared, **list_buffers(as_attention(problem)), **({} if problem.with_lse else made)}
    return Buffers(made if problem.with_lse else {}, shared, {"notes": notes})


def calls(problem: DecodeProblem, tensors: Tensors, arch: Arch, config: Config) -> list[Call]:
    """The launches, in order: packed requests are listed, those of many queries served, then what is left."""
    attention = as_attention(problem)
    seen = Tensors(**{**vars(tensors), "seqused_kv": tensors.lengths})
    listed = Tensors(**{**vars(seen), "out": None, "lse": None})
    (rest,) = decode_launch.calls(problem, tensors, arch, of_mma(problem, arch))
    left = {"notes": tensors.notes, "counters": tensors.counters, "MANY": MANY_QUERIES}
    return [
        *list_calls(attention, listed, config.tile_q, MANY_QUERIES),
        forward_call(attention, seen, arch, config),
        rest._replace(keywords={**rest.keywords, **left}),
    ]
