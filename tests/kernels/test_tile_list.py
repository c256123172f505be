"""The lists of packed tiles and the rows filled beside them, against plain Python: in Triton's interpreter, or on a GPU."""

from dataclasses import replace

import lying
import pytest
import torch
from problems import Case, describe, tensors

from strobe.kernels.blind_rows import fill_blind
from strobe.kernels.common.call import Tensors
from strobe.kernels.sm90 import backward_launch, tile_list
from strobe.kernels.sm90.backward_config import KEYS, ROWS_PADDED, Config
from strobe.kernels.sm90.launch import buffers
from strobe.masks import kv_range
from strobe.sim.attention import clamped_sequences, tiles_listed, unwritten

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


def check_backward(problem, operands) -> None:
    """The lists of rows and of keys, and zeros in the gradients where no sequence is."""
    problem = replace(problem, phase="backward")
    made = unwritten(backward_launch.buffers(problem, Config(64, 64, 128, turns=True)))
    found = Tensors(**operands._asdict(), **{name: x.to(operands.q.device) for name, x in made.items()})
    tile_list.backward_list_call(problem, found).launch()
    (starts_q, rows), (starts_kv, keys) = clamped_sequences(problem, operands)
    most_rows_first = sorted(range(problem.lengths.batch), key=lambda b: rows[b], reverse=True)
    for listed, lengths, size in ((found.rows_listed, rows, ROWS_PADDED), (found.keys_listed, keys, KEYS)):
        want = [
            [b, first, starts_q[b], rows[b], starts_kv[b], keys[b]]
            for b in most_rows_first
            for first in reversed(range(0, lengths[b], size))
        ]
        assert int(listed[0, 0]) == len(want) < len(listed)
        assert listed[1 : 1 + len(want), :6].tolist() == want
    overlapping = any(bool((bounds.diff() < 0).any()) for bounds in (operands.cu_seqlens_q, operands.cu_seqlens_kv))
    for grad, starts, lengths in ((found.dq, starts_q, rows), (found.dk, starts_kv, keys), (found.dv, starts_kv, keys)):
        outside = torch.ones(grad.shape[0], dtype=torch.bool)
        for start, n in zip(starts, lengths, strict=True):
            outside[start : start + n] = False
        outside = outside.to(grad.device)
        assert bool((grad[outside] == 0).all())
        assert overlapping or bool(grad[~outside].isnan().all()), "rows of sequences are filled, too"


def listed_apart(rows: list[int], keys: list[int], apart: tile_list.Apart) -> list[bool]:
    """Which sequences a list has, in plain Python."""
    work = [-(-n // TILE) * k for n, k in zip(rows, keys, strict=True) if n >= apart.least]
    load = sum(work) * apart.tiles_abreast // apart.sms

    return [n >= apart.most or (n >= apart.least and k <= 2 * load) for n, k in zip(rows, keys, strict=True)]


CASES = [
    Case(200, 230, packed=True, batch=4, mask="causal"),
    Case(150, 70, packed=True, batch=5, heads_q=4, mask="causal", sinks=True),
    Case(100, 70, packed=True, batch=3, seqused=True, mask="window", sinks=True),
    Case(130, 130, packed=True, batch=7),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_honest_lengths(case):
    described = describe(tensors(case, torch.float16, "cuda" if CUDA else "cpu"))
    check(*described)
    check_backward(*described)


@pytest.mark.parametrize("chunk", [1, 2, 1024])
def test_many_sequences_are_looked_at_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(tile_list, "CHUNK", chunk)
    described = describe(tensors(replace(CASES[0], batch=5), torch.float16, "cuda" if CUDA else "cpu"))
    check(*described)
    check_backward(*described)


@pytest.mark.parametrize("lie", [lie for lie in lying.LIES if lie.packed and lie.max_q < 2**28], ids=str)
def test_lying_lengths(lie):
    _, problem, operands = lying.inputs(lie, device="cuda" if CUDA else "cpu")
    check(problem, operands)
    check_backward(problem, operands)


@pytest.mark.parametrize("chunk", [2, 1024])
@pytest.mark.parametrize("sms", [1, 3, 8, 132])
def test_another_kernel_serves_what_would_leave_multiprocessors_idle(sms, chunk, monkeypatch):
    """Of those of 48 rows and more, by their keys: all, some, or none but the one of 130 rows are listed."""
    monkeypatch.setattr(tile_list, "CHUNK", chunk)
    device = "cuda" if CUDA else "cpu"
    problem, operands = describe(tensors(Case(150, 900, packed=True, batch=8, mask="causal"), torch.float16, device))
    rows, keys = [30, 50, 130, 64, 100, 0, 1, 49], [900, 50, 300, 640, 0, 100, 900, 64]
    ends = torch.tensor([0, *rows], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    operands = operands._replace(
        cu_seqlens_q=ends, cu_seqlens_kv=None, seqused_kv=torch.tensor(keys, dtype=torch.int32).to(device)
    )
    found = Tensors(**operands._asdict(), tiles_listed=torch.zeros(99, 8, dtype=torch.int32, device=device))
    found.out, found.served = None, torch.full((8,), -1, dtype=torch.int32, device=device)
    apart = tile_list.Apart(least=48, most=128, tiles_abreast=4, sms=sms)
    for call in tile_list.list_calls(problem, found, TILE, apart):
        call.launch()
    want = listed_apart(rows, keys, apart)
    assert found.served.tolist() == [int(x) for x in want]
    number = int(found.tiles_listed[0, 0])
    assert sorted({b for b, *_ in found.tiles_listed[1 : number + 1].tolist()}) == [b for b, x in enumerate(want) if x]
    assert number == sum(-(-n // TILE) for n, x in zip(rows, want, strict=True) if x)


def test_the_list_is_as_long_as_lengths_may_be():
    """Not as long as the longest sequence says, which nobody checks."""
    _, problem, _ = lying.inputs(next(lie for lie in lying.LIES if lie.max_q == 2**29))
    (room,) = tile_list.list_buffers(problem).values()
    assert room.shape == (1 + lying.BATCH * -(-lying.N_Q // 64), 8)
    rows, keys = tile_list.backward_list_buffers(problem).values()
    assert rows.shape == (1 + lying.BATCH * -(-lying.N_Q // ROWS_PADDED), 8)
    assert keys.shape == (1 + lying.BATCH * -(-lying.N_KV // KEYS), 8)
