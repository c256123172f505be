"""How many kernels a server needs: lengths and page tables lie on the device, and batches and rooms choose among a few."""

import json

import pytest
from tritons import answer_of

PROGRAM = """
import itertools, json, sys
from collections import defaultdict
from unittest import mock
from strobe.device import KNOWN
from strobe.kernels.common.call import Tensors, unfilled_buffers
from strobe.kernels.decode import launch
from strobe.lab.bench.decode import config_of
from strobe.lab.bench.decode_peers import Point, described
from strobe.lab.binary.offline import pretend_gpu

def key(call):
    found = []
    with mock.patch.object(call.kernel, "_do_compile", lambda key, *_, **__: found.append(key)):
        call.kernel.warmup(*call.arguments, grid=call.grid, **call.keywords)
    return found[0]

arch, heads, queries = json.loads(sys.argv[1])
arch, kernels = KNOWN[arch], defaultdict(set)
with pretend_gpu(arch.capability):
    batches, rooms = (1, 2, 3, 7, 16, 17, 128, 129), (1, 2, 3, 16, 17, 128, 129, 2048)
    for page, batch, columns in itertools.product((0, 16), batches, rooms):
        point = Point(batch, columns * 64, *heads, queries=queries, page=page)
        problem, operands = described(point, False)
        config = config_of(point, arch, False)
        given = {name: x for name, x in operands._asdict().items() if x is not None}
        tensors = Tensors(**given, **unfilled_buffers(launch.buffers(problem, arch, config)))
        kernels[page, str(config)] |= {key(call) for call in launch.calls(problem, tensors, arch, config)}
print(json.dumps([len(one) for one in kernels.values()]))
"""

POINTS = [("H200", (64, 8), 1), ("H100", (64, 8), 16), ("H200", (28, 4), 4), ("A100", (64, 8), 1)]


@pytest.mark.parametrize(("arch", "heads", "queries"), POINTS)
def test_batches_and_rooms_need_a_kernel_for_each_of_a_few_configs(arch, heads, queries):
    kernels = answer_of(PROGRAM, json.dumps([arch, heads, queries]), timeout=200)
    assert set(kernels) == {1} and len(kernels) <= 26  # of two caches
