"""What PyTorch programs expect of a library: FLOPs, and masks and scores that are values."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import strobe
from strobe.lab.model.cost import Cost
from strobe.problem import AttentionProblem, Dense

LIMIT = 5


def near(batch, head, q_index, kv_index):
    return abs(q_index - kv_index) < LIMIT


def far_and(window):
    def far(batch, head, q_index, kv_index):
        return near(batch, head, q_index, kv_index) & (q_index - kv_index < window)

    return far


def halved(score, batch, head, q_index, kv_index):
    return score * 0.5 + strobe.math.where(q_index > 2, 0.25, 0.0)


IDS = torch.tensor([[0, 0, 1, 1, 2], [3, 3, 3, 4, 4]])

VALUES = {
    "band": lambda: strobe.Window(3, 1) & strobe.Prefix(2),
    "documents": lambda: strobe.Document(IDS.clone()) & strobe.Causal(),
    "function": lambda: strobe.Visible(near),
    "function within one": lambda: strobe.Visible(far_and(3)),
    "score": lambda: strobe.Score(5.0, sinks=torch.arange(4.0), bias=torch.ones(1, 1, 5, 5)),
    "score function": lambda: strobe.Score(function=halved),
}


@pytest.mark.parametrize("name", VALUES)
def test_masks_and_scores_are_values(name):
    one = VALUES[name]()
    for other in (VALUES[name](), copy.deepcopy(one), copy.copy(one), pickle.loads(pickle.dumps(one))):
        assert one == other and hash(one) == hash(other)
    others = [make() for key, make in VALUES.items() if key != name]
    assert all(one != other for other in others) and one != "a word"


def test_values_that_differ():
    ids = IDS.clone()
    ids[1, 2] = 9
    assert strobe.Document(IDS) != strobe.Document(ids) and strobe.Document(IDS) != strobe.Document(IDS, ids)
    assert strobe.Visible(far_and(3)) != strobe.Visible(far_and(4))
    sinks = torch.zeros(4)
    assert strobe.Score(sinks=sinks) != strobe.Score(sinks=sinks.half()) and strobe.Score(sinks=sinks) != strobe.Score()
    assert strobe.Score(bias=torch.zeros(1, 1, 2, 3)) == strobe.Score(bias=torch.zeros(1, 1, 3, 2).transpose(2, 3))


def test_another_process_gives_the_same_result(tmp_path):
    """Pickled functions, of this file's functions and numbers, run where nobody made them. The module that counts FLOPs, which
    imports Triton, stays away until it is asked for."""
    q = torch.randn(2, 5, 4, 16)
    call = dict(mask=strobe.Visible(far_and(3)), score=strobe.Score(function=halved))
    (tmp_path / "call").write_bytes(pickle.dumps((q, call)))
    program = (
        "import pickle, sys, torch, strobe\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"
        "q, call = pickle.load(open('call', 'rb'))\n"
        "torch.save(strobe.attention(q, q, q, **call), 'out')\n"
        "from torch.utils.flop_counter import flop_registry\n"
        "assert torch.ops.strobe.forward in flop_registry and torch.ops.strobe.backward in flop_registry"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "out"), strobe.attention(q, q, q, **call))


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("mask", [strobe.Full(), strobe.Causal(), strobe.Window(7, 2), strobe.Prefix(5)], ids=str)
def test_flops_are_the_cost_models(mask):
    q = torch.randn(2, 40, 4, 16, requires_grad=True)
    k, v = torch.randn(2, 50, 2, 16, requires_grad=True), torch.randn(2, 50, 2, 24, requires_grad=True)
    problem = AttentionProblem(Dense(2, 40, 50), 4, 2, 16, 24, torch.float32, 0.25, mask=mask)
    forward = Cost(problem).flops
    assert flops(lambda: strobe.attention(q, k, v, mask=mask)) == forward > 0
    backward = forward * (3 * 16 + 2 * 24) // (16 + 24)
    assert flops(lambda: strobe.attention(q, k, v, mask=mask).sum().backward()) == forward + backward


def test_flops_of_lengths_that_a_tensor_holds():
    q = torch.randn(11, 4, 16)
    cu, used = torch.tensor([0, 4, 11], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    pair, causal = 4 * 64, strobe.Causal()
    packed = dict(mask=causal, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=7, max_seqlen_kv=7)
    assert flops(lambda: strobe.attention(q, q, q, **packed)) == pair * (10 + 28)
    of_used = causal.count(4, 3) + causal.count(7, 5)
    assert flops(lambda: strobe.attention(q, q, q, seqused_kv=used, **packed)) == pair * of_used
    x = torch.randn(2, 5, 4, 16)
    assert flops(lambda: strobe.attention(x, x, x, mask=strobe.Document(IDS))) == pair * (4 + 4 + 1 + 9 + 4)
