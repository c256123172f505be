"""How many kernels a server needs: lengths and page tables lie on the device, and batches and rooms choose among a few."""

import json

import pytest
from tritons import answer_of

KEYS = """
import itertools, json, sys
from collections import defaultdict
from unittest import mock
from strobe.device import KNOWN
from strobe.lab.binary.offline import pretend_gpu, with_buffers

def key(call):
    found = []
    with mock.patch.object(call.kernel, "_do_compile", lambda key, *_, **__: found.append(key)):
        call.kernel.warmup(*call.arguments, grid=call.grid, **call.keywords)
    return found[0]
"""
"""key(call): under which key Triton keeps a call's kernel in a process."""

STEPS = """
from strobe.kernels.decode import launch
from strobe.lab.bench.decode import config_of
from strobe.lab.bench.decode_peers import Point, described

arch, heads, queries = json.loads(sys.argv[1])
arch, kernels = KNOWN[arch], defaultdict(set)
with pretend_gpu(arch.capability):
    batches, rooms = (1, 2, 3, 7, 16, 17, 128, 129), (1, 2, 3, 16, 17, 128, 129, 2048)
    for page, batch, columns in itertools.product((0, 16), batches, rooms):
        point = Point(batch, columns * 64, *heads, queries=queries, page=page)
        problem, operands = described(point, False)
        config = config_of(point, arch, False)
        tensors = with_buffers(operands, launch.buffers(problem, arch, config))
        kernels[page, str(config)] |= {key(call) for call in launch.calls(problem, tensors, arch, config)}
print(json.dumps([len(one) for one in kernels.values()]))
"""

POINTS = [("H200", (64, 8), 1), ("H100", (64, 8), 16), ("H200", (28, 4), 4), ("A100", (64, 8), 1)]


@pytest.mark.parametrize(("arch", "heads", "queries"), POINTS)
def test_batches_and_rooms_need_a_kernel_for_each_of_a_few_configs(arch, heads, queries):
    kernels = answer_of(KEYS + STEPS, json.dumps([arch, heads, queries]), timeout=200)
    assert set(kernels) == {1} and len(kernels) <= 26  # of two caches


MIXED = """
from functools import partial
import torch
import strobe
from strobe.call.launches import kind_of
from strobe.kernels.sm90 import cache_backend
from strobe.serving.arguments import checked
from strobe.serving.problem import describe

arch, meta = KNOWN["H200"], partial(torch.empty, device="meta", dtype=torch.int32)
keys, kinds = defaultdict(set), defaultdict(set)
with pretend_gpu(arch.capability):
    for room, batch, total, most in itertools.product((2048, 131072), (1, 2, 33, 200), (513, 2048, 4097), (200, 513, 2000)):
        q, k = (meta(shape, dtype=torch.bfloat16) for shape in ((total, 32, 128), (5000, 64, 8, 128)))
        cache = strobe.Cache(k, k, meta(batch), meta((batch, room // 64)))
        operands, options = checked(q, cache, out=q, cu_seqlens_q=meta(batch + 1), max_seqlen_q=min(most, total))
        problem = describe(operands, options)
        if cache_backend.refuses(problem, arch) is None:
            tensors = with_buffers(operands, cache_backend.buffers(problem, arch))
            for call in cache_backend.calls(problem, tensors, arch):
                keys[call.kernel.__name__].add(key(call))
                kinds[call.kernel.__name__].add(kind_of(call))
print(json.dumps([{name: len(one) for name, one in found.items()} for found in (keys, kinds)]))
"""


def test_batches_of_prompts_and_tokens_need_a_few_kernels():
    """Whatever the batch, its queries, the longest of its prompts, and the room; and what tells them apart is known without
    Triton (`kind_of`)."""
    keys, kinds = answer_of(KEYS + MIXED, timeout=200)
    assert keys == kinds and keys == {"list_tiles": 2, "hopper_kernel": 2, "forward_kernel": 3, "decode_kernel": 1}
