"""Documents on Hopper: right however they lie, and blocks of other documents are never loaded."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from backward import Backward, SplitBackward
from problems import Case, Results, Tensors, check, describe, tensors

import strobe
from strobe.kernels.common.call import Tensors as CallTensors
from strobe.kernels.common.documents import span_calls
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.kernels.sm90.config import Config as Forward
from strobe.sim.attention import simulate_forward, spans_of

BACKWARDS = [(Backward, Config(96, 64, 64, turns=False)), (SplitBackward, SplitConfig(64, 64))]


def problem(n: int, mask: strobe.Mask, heads: tuple[int, int] = (2, 1)) -> Tensors:
    t = tensors(Case(n, n, batch=1, heads_q=heads[0], heads_kv=heads[1], head_dim=64), torch.bfloat16)
    return replace(t, keywords={"mask": mask})


def packed(*lengths: int) -> torch.Tensor:
    """Of documents of these lengths, one after the other: [1, total]."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def shuffled(n: int, documents: int, seed: int) -> torch.Tensor:
    return torch.randint(-5, documents - 5, (1, n), generator=torch.Generator().manual_seed(seed))


IDS = {
    "packed": (packed(100, 3, 97, 64, 36), packed(90, 70, 1, 139)),
    "in any order": (shuffled(300, 3, 0), shuffled(300, 3, 1)),
    "turned round": (packed(100, 100, 100), packed(100, 100, 100).flip(1)),
    "of few": (packed(150, 150), 7 * packed(120, 180)),  # the second half of the rows sees nothing
}


@pytest.mark.parametrize("mask", [strobe.Full(), strobe.Causal(), strobe.Window(70, 5)], ids=str)
@pytest.mark.parametrize("ids", IDS.values(), ids=list(IDS))
def test_forward(ids, mask):
    t = problem(300, mask & strobe.Document(*ids))
    for groups, optimistic in ((2, True), (2, False), (3, False)):
        config = Forward(64, 64, groups, 64, 2, optimistic=optimistic)
        out, lse, notes, _ = simulate_forward(*describe(t), "sm90", config, "random", 1, 2)
        check(Results(out, lse, None, None, None), t, ("out", "lse"))
        blind = torch.isneginf(lse).view(-1, 300).split(64, 1)  # of them nobody knows whether their weights underflowed
        assert notes.view(2, -1).bool().tolist() == torch.stack([x.any(1) & optimistic for x in blind], 1).tolist()


def test_what_exceeds_the_first_block_is_noted():
    """By 2^127, beyond what bfloat16 may: in the document of the last rows, so none but theirs."""
    t = problem(300, strobe.Document(packed(130, 170)))
    t.q[:], t.k[:] = 0.0, 0.0
    t.q[..., 0], t.k[:, 280, :, 0] = 8.0, 88.0
    _, _, notes, _ = simulate_forward(*describe(t), "sm90", Forward(64, 64, 2, 64, 2))
    assert notes.view(2, -1).tolist() == 2 * [[0, 0, 1, 1, 1]]


@pytest.mark.parametrize("ids", IDS.values(), ids=list(IDS))
@pytest.mark.parametrize("kernels, config", BACKWARDS, ids=["one pass", "two passes"])
def test_backward(ids, kernels, config):
    kernels(problem(300, strobe.Causal() & strobe.Document(*ids)), config).run("random", 1)


def loads(ids: torch.Tensor) -> int:
    """What the producer of a head's forward says and expects by TMA, at 128 rows a tile and 64 keys a block."""
    t = problem(512, strobe.Document(ids), (1, 1))
    *_, report = simulate_forward(*describe(t), "sm90", Forward(64, 64, 2, 64, 2, optimistic=False))
    return report.barrier_uses["producer", "arrive"]


def test_blocks_of_other_documents_are_not_loaded():
    """Each of 4 tiles loads K and V of 2 blocks instead of 8; of documents that end within a tile, those that it touches."""
    everything = loads(packed(512))
    assert everything - loads(packed(128, 128, 128, 128)) == 4 * (8 - 2) * 2
    assert everything - loads(packed(100, 412)) == 3 * 1 * 2  # later tiles have no use for the first block alone
    assert everything == loads(torch.arange(512)[None] % 2)


@contextlib.contextmanager
def interpreter() -> Iterator[None]:
    """Triton's interpreter, which replaces the language by its own and, where a function calls another, leaves it replaced."""
    things = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base)
    before = [(thing, dict(vars(thing))) for thing in things]
    try:
        yield
    finally:
        for thing, members in before:
            for name, member in members.items():
                if vars(thing)[name] is not member:
                    setattr(thing, name, member)


@pytest.mark.parametrize("n, n_others", [(1, 1), (64, 130), (300, 5000), (777, 333)])
def test_spans(n, n_others):
    """The kernel's against those that the simulator takes, and both against all pairs; of any strides."""
    ids = torch.stack([shuffled(n, 400, seed)[0] for seed in range(3)]).sort(1).values.to(torch.int32)
    others = torch.stack([shuffled(n_others, 400, seed)[0] for seed in range(3)], 1).to(torch.int32).T
    spans = torch.empty(3, -(-n // 64), 3, dtype=torch.int32)
    with interpreter():
        for call in span_calls(CallTensors(document_q=ids, document_kv=others, row_spans=spans)):
            call.launch()
    assert torch.equal(spans, spans_of(ids, others))
    for batch, (row, other) in enumerate(zip(ids.tolist(), others.tolist(), strict=True)):
        for place, (begin, end, whole) in enumerate(spans[batch].tolist()):
            own = row[64 * place : 64 * place + 64]
            seen = [i for i, one in enumerate(other) if min(own) <= one <= max(own)]
            assert (begin, end) == ((seen[0], seen[-1] + 1) if seen else (n_others, 0))
            assert bool(whole) == (begin < end and {*own, *other[begin:end]} == {own[0]})


def test_spans_of_packed_documents_are_whole_but_for_their_ends():
    ids = packed(100, 28, 192, 64)
    assert spans_of(ids, ids)[0].tolist() == [
        [0, 100, 1], [0, 128, 0], [128, 320, 1], [128, 320, 1], [128, 320, 1], [320, 384, 1],
    ]  # fmt: skip


WHOLE = packed(128, 128, 100, 156)
TOLD = torch.where(torch.arange(512) < 256, -1, WHOLE)
"""Wrong where whole blocks are all that there is."""


def test_whole_blocks_are_not_compared(monkeypatch):
    """Nothing changes if the kernel is told of wrong documents there."""
    monkeypatch.setattr("strobe.sim.attention.spans_of", lambda *_: spans_of(WHOLE, WHOLE))
    config = Forward(64, 64, 2, 64, 2, optimistic=False)
    tensors = (problem(512, strobe.Document(ids, WHOLE), (1, 1)) for ids in (WHOLE, TOLD))
    assert torch.equal(*(simulate_forward(*describe(t), "sm90", config).out for t in tensors))


@pytest.mark.parametrize("kernels, config", BACKWARDS, ids=["one pass", "two passes"])
def test_whole_blocks_are_not_compared_backward(kernels, config, monkeypatch):
    monkeypatch.setattr("strobe.sim.attention.spans_of", lambda *_: spans_of(WHOLE, WHOLE))
    simulated = kernels(problem(512, strobe.Document(WHOLE, WHOLE), (1, 1)), config)
    simulated.problem = replace(simulated.problem, mask=strobe.Document(TOLD, WHOLE))
    simulated.run("in_order", 0)
