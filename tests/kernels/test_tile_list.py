"""The list of packed tiles and the rows filled beside it, against plain Python: in Triton's interpreter, or on a GPU."""

from dataclasses import replace

import lying
import pytest
import torch
from problems import Case, describe, tensors

from strobe.kernels.blind_rows import fill_blind
from strobe.kernels.common.call import Tensors
from strobe.kernels.sm90 import tile_list
from strobe.kernels.sm90.launch import buffers
from strobe.masks import kv_range
from strobe.sim.attention import tiles_listed, unwritten

CUDA = torch.cuda.is_available()
TILE = 64


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Of which each fills little, and takes the interpreter long."""
    monkeypatch.setattr(tile_list, "PROGRAMS", 6)


def made(problem, operands) -> Tensors:
    """What the launch leaves in tensors that were NaN, and a list of 0."""
    device = operands.q.device
    new = {name: x.to(device) for name, x in unwritten(buffers(problem)).items()}
    found = Tensors(**operands._asdict(), **new)
    for call in tile_list.list_calls(problem, found, TILE):
        call.launch()
    return found


def check(problem, operands) -> None:
    found, want = made(problem, operands), tiles_listed(problem, operands, TILE)
    number = int(want[0, 0])
    assert int(found.tiles_listed[0, 0]) == number
    want = want[1 : number + 1]
    assert torch.equal(found.tiles_listed[1 : number + 1, :6].cpu(), want[:, :6])
    written = torch.zeros(operands.q.shape[0], dtype=torch.bool)  # by tiles
    band = problem.mask.device_band
    for _, row, start_q, n_q, _, n_kv, *_ in want.tolist():
        shift, end = n_kv - n_q, min(row + TILE, n_q)
        begin, stop = kv_range(row + shift, end - 1 + shift, n_kv, *band)
        written[start_q + row : start_q + end] |= stop > begin
    out, lse = torch.full_like(found.out, torch.nan), torch.full_like(found.lse, torch.nan)
    fill_blind(out, lse, problem.lengths.seqlen_q, operands.sinks, operands.cu_seqlens_q, operands.seqused_q)
    left = ~written.to(out.device)
    torch.testing.assert_close(found.out[left], out[left], rtol=0, atol=0)
    torch.testing.assert_close(found.lse[:, left], lse[:, left], rtol=0, atol=0)
    overlapping = int((operands.cu_seqlens_q.diff() < 0).sum()) > 0
    assert overlapping or bool(found.out[~left].isnan().all()), "rows of tiles are filled, too"


CASES = [
    Case(200, 230, packed=True, batch=4, mask="causal"),
    Case(150, 70, packed=True, batch=5, heads_q=4, mask="causal", sinks=True),
    Case(100, 70, packed=True, batch=3, seqused=True, mask="window", sinks=True),
    Case(130, 130, packed=True, batch=7),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_honest_lengths(case):
    check(*describe(tensors(case, torch.float16, "cuda" if CUDA else "cpu")))


@pytest.mark.parametrize("chunk", [1, 2, 1024])
def test_many_sequences_are_looked_at_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(tile_list, "CHUNK", chunk)
    check(*describe(tensors(replace(CASES[0], batch=5), torch.float16, "cuda" if CUDA else "cpu")))


@pytest.mark.parametrize("lie", [lie for lie in lying.LIES if lie.packed and lie.max_q < 2**28], ids=str)
def test_lying_lengths(lie):
    _, problem, operands = lying.inputs(lie, device="cuda" if CUDA else "cpu")
    check(problem, operands)


def test_the_list_is_as_long_as_lengths_may_be():
    """Not as long as the longest sequence says, which nobody checks."""
    _, problem, _ = lying.inputs(next(lie for lie in lying.LIES if lie.max_q == 2**29))
    (room,) = tile_list.list_buffers(problem).values()
    assert room.shape == (1 + lying.BATCH * -(-lying.N_Q // 64), 8)
