"""Whatever lengths hold, no kernel leaves its tensors, and what still means something is right."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from lying import (
    LIES,
    MASKS,
    N_Q,
    SAMPLE,
    Lie,
    all_lengths,
    backward_of,
    check_backward,
    check_forward,
    expected,
    inputs,
    sequences,
)
from watched import Guarded, interpreted_launches

import strobe
from strobe.call import dispatch, launches
from strobe.device import CPU, KNOWN, arch_of
from strobe.kernels import combine, workspace
from strobe.kernels.blind_rows import fill_blind
from strobe.kernels.common.call import Tensors
from strobe.kernels.portable import backend as portable
from strobe.kernels.portable import backward as portable_backward
from strobe.kernels.portable import forward as portable_forward
from strobe.kernels.sm90 import backward_launch, fp8, fp8_backend, fp8_launch, tile_list
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.problem import Upstream, lse_shape
from strobe.sim.attention import unwritten

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
LYING = [pytest.param(lie, id=str(lie), marks=[] if lie in SAMPLE else pytest.mark.exhaustive) for lie in LIES]


def upstream(t, dim: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(*t.q.shape[:-1], dim, generator=random).to(t.q.device, t.q.dtype)


def test_there_are_many_lies():
    assert len(LIES) >= 40 and len({lie.name for lie in LIES}) == len(LIES) and len(SAMPLE) == 3


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_only_rows_of_a_sequence_have_a_sink(lie: Lie):
    """What Hopper's forward is given to fill in."""
    t, problem, operands = inputs(lie)
    out, lse, sinks = torch.ones_like(t.q), torch.zeros(lse_shape(problem)), torch.tensor([1.0, -2.0])
    fill_blind(out, lse, problem.lengths.seqlen_q, sinks, operands.cu_seqlens_q, operands.seqused_q)
    want = torch.full((2, N_Q), -torch.inf)
    for start, n, _, _ in sequences(lie):
        want[:, start : start + n] = sinks[:, None]
    assert torch.equal(lse if lie.packed else lse.transpose(0, 1).flatten(1), want) and not out.any()


# ---- in Triton's interpreter


@CPU_ONLY
@pytest.mark.parametrize("mask", ["causal", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("full", "window"))])
@pytest.mark.parametrize("lie", LYING)
def test_portable(lie: Lie, mask: str):
    t, problem, operands = inputs(lie, mask=MASKS[mask])
    dout = upstream(t, 16)
    want = expected(lie, t, dout)
    with interpreted_launches(), Guarded() as guarded:
        out, lse = launches.forward(portable, problem, operands)
        grads = launches.backward(portable, backward_of(problem), operands, Upstream(out, lse, dout))
    guarded.check()
    check_forward(want, out, lse)
    check_backward(want, *grads[:3])


@CPU_ONLY
@pytest.mark.parametrize("lie", LYING)
def test_blocks_that_are_computed_again(lie: Lie):
    """All of them: what the notes of Hopper's kernels ask for."""
    t, problem, operands = inputs(lie, mask=strobe.Causal())
    dout = upstream(t, 16)
    want = expected(lie, t, dout)
    problem, behind = problem, backward_of(problem)
    keys, rows = backward_launch.number_of_notes(problem)
    left = Upstream(torch.zeros_like(dout), torch.full(lse_shape(problem), -torch.inf), dout)
    grads = {f"d{name}": torch.zeros_like(getattr(operands, name)) for name in "qkv"}
    sizes = {"notes": rows, "row_notes": rows, "key_notes": keys}
    notes = {name: torch.ones(n, dtype=torch.int32) for name, n in sizes.items()}
    given = Tensors(**operands._asdict(), **left._asdict(), **grads, **notes, delta=torch.empty_like(left.lse))
    with interpreted_launches():
        portable_forward.redo_call(problem, given, CPU).launch()
        portable_backward.delta_call(behind, given).launch()
        portable_backward.redo_call(behind, given, CPU).launch()
    assert not any(x.any() for x in notes.values())
    check_forward(want, given.out, given.lse)
    check_backward(want, *grads.values())


@CPU_ONLY
@pytest.mark.parametrize("config", [Config(64, 64, 128, turns=True, folded=True), SplitConfig(96, 96)], ids=["one pass", "two"])
@pytest.mark.parametrize("lie", LYING)
def test_ends_of_the_hopper_backward(lie: Lie, config, monkeypatch):
    t, problem, operands = inputs(lie, (64, 64))
    problem, out = backward_of(problem), upstream(t, 64)
    lse, dlse = torch.zeros(lse_shape(problem)), torch.zeros(lse_shape(problem))
    made = unwritten(backward_launch.buffers(problem, config))
    given = Tensors(**operands._asdict(), **Upstream(out, lse, out, dlse)._asdict(), **made)
    with interpreted_launches():
        if backward_launch.is_listed(problem, config):
            monkeypatch.setattr(tile_list, "PROGRAMS", 6)
            tile_list.backward_list_call(problem, given).launch()
        backward_launch.prepare_call(problem, given, config).launch()
        if isinstance(config, Config):
            backward_launch.convert_call(problem, given, config).launch()


@CPU_ONLY
@pytest.mark.parametrize("lie", [lie for lie in LYING if lie.values[0].packed and not lie.values[0].used_q])
def test_transposed_values_of_fp8(lie: Lie):
    t, problem, operands = inputs(lie, (64, 64))
    problem = replace(problem, dtype=torch.float8_e4m3fn, unaligned=("v",))  # else it takes a GPU
    operands = operands._replace(v=t.v.to(torch.float8_e4m3fn))
    given = Tensors(**operands._asdict(), **unwritten(fp8_launch.buffers(problem, fp8.config(problem))))
    with interpreted_launches():
        fp8_launch.transpose_call(problem, given, KNOWN["H200"], fp8.config(problem)).launch()


@CPU_ONLY
def test_parts_that_are_combined():
    """Packed, where rows belong to no sequence, and so to no part."""
    out, lse = torch.full((2, 40, 2, 16), torch.nan), torch.full((2, 2, 40), -torch.inf)
    with interpreted_launches(), Guarded() as guarded:
        total, total_lse = torch.empty(40, 2, 16), torch.empty(2, 40)
        combine.combine(out, lse, total, total_lse)
    guarded.check()
    assert not total.any() and torch.isneginf(total_lse).all()


@CPU_ONLY
@pytest.mark.parametrize("number", [-(2**31), -1, 0, 2**31 - 1])
def test_document_numbers(number: int):
    """Any number is a document's."""
    t, _, _ = inputs(Lie("dense", None, None), mask=None)
    ids_q, ids_kv = (torch.tensor([number, 5, number]).repeat_interleave(n // 3).repeat(3, 1) for n in (35, 44))
    ids_q, ids_kv = (torch.nn.functional.pad(x, (0, n - x.shape[1]), value=number) for x, n in ((ids_q, 35), (ids_kv, 44)))
    mask = strobe.Document(ids_q, ids_kv)
    with interpreted_launches():
        got = strobe.attention(t.q, t.k, t.v, mask=mask, backend="portable")
    torch.testing.assert_close(got, strobe.attention(t.q, t.k, t.v, mask=mask, backend="tiled"), atol=2e-3, rtol=0)


# ---- on a GPU

PLAIN = tuple(lie for lie in LIES if lie.packed and lie.used_q is None and lie.used_kv is None and not lie.wide)
USED = tuple(all_lengths(lie) for lie in LIES)
ON_A_GPU = {
    "64": ((64, 64), PLAIN),
    "64, used": ((64, 64), USED),
    "128": ((128, 128), PLAIN),
    "192 and 128, used": ((192, 128), tuple(lie for lie in USED if lie.packed and not lie.wide)),
    "256": ((256, 256), PLAIN),
}
"""Head dims, and lies that one compiled kernel takes, or two."""


@pytest.mark.gpu
@pytest.mark.parametrize("backend, deterministic", [("sm90", False), ("sm90", True), ("portable", False)])
@pytest.mark.parametrize("head_dims, lies", ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu(head_dims, lies, backend: str, deterministic: bool, monkeypatch):
    """Forward and backward, with guards around all that they make; and the forward once more through the public door."""
    monkeypatch.setattr(workspace, "_spaces", {})
    module = dispatch.backend_module(backend)
    for lie in lies:
        t, problem, operands = inputs(lie, head_dims, device="cuda", mask=strobe.Causal())
        reason = module.refuses(problem, arch_of(t.q.device))
        if reason is not None:
            pytest.skip(f"{backend} {reason}")
        dout = upstream(t, head_dims[1])
        want = expected(lie, t, dout)
        with Guarded() as guarded:
            q, k, v = (guarded.guard(x) for x in (t.q, t.k, t.v))
            operands = operands._replace(q=q, k=k, v=v)
            out, lse = launches.forward(module, problem, operands)
            behind = backward_of(problem, deterministic)
            grads = launches.backward(module, behind, operands, Upstream(out, lse, dout))
        with naming(lie):
            guarded.check()
            check_forward(want, out, lse)
            check_backward(want, *grads[:3])
            if not lie.wide:
                check_forward(want, *strobe.attention(t.q, t.k, t.v, return_lse=True, backend=backend, **t.keywords))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8_on_a_gpu(head_dim: int, monkeypatch):
    monkeypatch.setattr(workspace, "_spaces", {})
    for lie in PLAIN:
        t, problem, operands = inputs(lie, (head_dim, head_dim), device="cuda", mask=strobe.Causal())
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (t.q, t.k, t.v))
        problem = replace(problem, dtype=torch.float8_e4m3fn)
        reason = fp8_backend.refuses(problem, arch_of(q.device))
        if reason is not None:
            pytest.skip(f"fp8 {reason}")
        t = replace(t, q=q.half(), k=k.half(), v=v.half())
        with Guarded() as guarded:
            out, lse = launches.forward(fp8_backend, problem, operands._replace(q=q, k=k, v=v))
        with naming(lie):
            guarded.check()
            want = expected(lie, t, upstream(t, head_dim))
            if want.apart:  # else sequences share blocks of the values
                check_forward(want, out, lse, tolerance=0.1)


@contextmanager
def naming(lie: Lie) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{lie}: {error}") from None
