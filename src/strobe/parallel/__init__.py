"""Attention over sequences that are sharded across the ranks of a torch.distributed process group."""

from strobe.parallel.api import attention, decode, explain, positions, shard, simulate, unshard
from strobe.parallel.links import ParallelError

__all__ = ["ParallelError", "attention", "decode", "explain", "positions", "shard", "simulate", "unshard"]
