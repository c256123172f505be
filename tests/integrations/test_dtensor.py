"""DTensor: attention of tensors sharded along the batch or the heads, in two processes, beside the whole on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import strobe
from strobe.integrations import dtensor

dtensor.register()
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole = dict(
    q=torch.randn(2, 9, 4, 16), k=torch.randn(2, 9, 2, 16), v=torch.randn(2, 9, 2, 16), bias=torch.randn(1, 4, 9, 9),
    sinks=torch.randn(4), alibi=torch.rand(4),
)
ids = torch.tensor([[0] * 4 + [1] * 5, [2] * 7 + [3] * 2], dtype=torch.int32)
upstream = torch.randn(2, 9, 4, 16)


def run(placements, gathered):
    tensors = {name: x.clone() for name, x in whole.items()}
    documents, dout = ids, upstream
    if placements:
        tensors = {name: distribute_tensor(x, mesh, [placements.get(name, Replicate())]) for name, x in tensors.items()}
        documents = distribute_tensor(ids, mesh, [placements["documents"]])
        dout = distribute_tensor(upstream, mesh, [placements["q"]])
    leaves = {name: x.requires_grad_(name != "alibi") for name, x in tensors.items()}
    score = strobe.Score(alibi=leaves["alibi"], bias=leaves["bias"], sinks=leaves["sinks"])
    mask = strobe.Causal() & strobe.Document(documents)
    out = strobe.attention(leaves["q"], leaves["k"], leaves["v"], mask=mask, score=score)
    if placements:
        assert isinstance(out, DTensor) and out.placements[0] == placements["q"] != gathered, out.placements
    grads = torch.autograd.grad(out, [x for x in leaves.values() if x.requires_grad], dout)
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in (out, *grads)]


expected = run({}, None)
batch = dict(q=Shard(0), k=Shard(0), v=Shard(0), documents=Shard(0))
heads = dict(q=Shard(2), k=Shard(2), v=Shard(2), bias=Shard(1), sinks=Shard(0), alibi=Shard(0), documents=Replicate())
for placements in (batch, heads):
    for ours, theirs in zip(run(placements, Replicate()), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
q = distribute_tensor(whole["q"], mesh, [Shard(2)])
assert strobe.attention(q, q, q, dropout_p=0.5).placements[0] == Replicate()
q, k = torch.randn(2, 9, 12, 16), torch.randn(2, 9, 3, 16)
uneven = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, k)]
torch.testing.assert_close(strobe.attention(*uneven).full_tensor(), strobe.attention(q, k, k))
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_two_processes(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [run.communicate(timeout=200)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors[0][-3000:]
