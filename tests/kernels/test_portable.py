"""The portable Triton kernels: in Triton's interpreter where there is no GPU, on the GPU where there is one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import CASES, Case, check, describe, run, tensors, upstream
from tritons import output_of

import strobe
from strobe.call import launches
from strobe.device import CPU, KNOWN, arch_of
from strobe.kernels import workspace
from strobe.kernels.common.call import Tensors as CallTensors
from strobe.kernels.portable import backend
from strobe.kernels.portable import backward as portable_backward
from strobe.kernels.portable import forward as portable_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = (
    Case(1024, 1024, head_dim=64, mask="causal"),
    Case(1000, 1100, heads_q=8, heads_kv=2, head_dim=128, mask="causal"),
    Case(1000, 1100, head_dim=128),
    Case(1000, 1100, head_dim=256, mask="window"),
    Case(700, 900, head_dim=128, packed=True, batch=5, mask="causal"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_reference(case, dtype):
    t = tensors(case, dtype, DEVICE)
    check(run(t, "portable"), t)


def test_bfloat16_is_rounded_to_nearest_even():
    """Two keys of the same score: the mean of their values, which has more bits than bfloat16."""
    t = tensors(Case(1, 2, head_dim=64, logits=0.0), torch.bfloat16, DEVICE)
    out = strobe.attention(t.q, t.k, t.v, backend="portable")
    assert_same(out[:, 0], t.v.float().mean(1).to(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_against_reference(case, dtype):
    t = tensors(case, dtype, "cuda")
    check(run(t, "portable"), t)


# ---- a NaN reaches the rows that see it, and no others

POISON = Case(100, 100, batch=1, heads_q=2, heads_kv=1, head_dim=16, mask="causal")
ROW, END = 70, POISON.n_q


def poisoned(name: str, value: float, dtype, mask=None):
    """(clean results, results) of a causal problem where one entry of row ROW of q, k or v is not finite."""
    t = tensors(POISON, dtype, DEVICE)
    keywords = t.keywords if mask is None else {**t.keywords, "mask": mask}
    clean = replace(t, keywords=keywords)
    broken = getattr(t, name).clone()
    broken[0, ROW, 0, 3] = value
    return run(clean, "portable"), run(replace(clean, **{name: broken}), "portable")


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_value_reaches_only_rows_that_see_it(dtype, value):
    clean, got = poisoned("v", value, dtype)
    assert_same(got.out[:, :ROW], clean.out[:, :ROW])
    assert_same(got.lse, clean.lse)
    assert not torch.isfinite(got.out[:, ROW:, :, 3]).any()
    assert_same(got.out[..., 4:], clean.out[..., 4:])
    assert torch.isfinite(got.dq[:, :ROW]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_key_reaches_only_rows_that_see_it(dtype):
    clean, got = poisoned("k", float("nan"), dtype)
    assert_same(got.out[:, :ROW], clean.out[:, :ROW])
    assert_same(got.lse[:, :, :ROW], clean.lse[:, :, :ROW])
    assert got.out[:, ROW:].isnan().all() and got.lse[:, :, ROW:].isnan().all()
    assert_same(got.dq[:, :ROW], clean.dq[:, :ROW])
    assert got.dq[:, ROW:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_query_reaches_only_keys_that_it_sees(dtype):
    clean, got = poisoned("q", float("nan"), dtype)
    others = [row for row in range(POISON.n_q) if row != ROW]
    assert_same(got.out[:, others], clean.out[:, others])
    assert got.out[:, ROW, 0].isnan().all()
    assert_same(got.dq[:, others], clean.dq[:, others])
    for name in ("dk", "dv"):
        grad, want = getattr(got, name), getattr(clean, name)
        assert_same(grad[:, ROW + 1 :], want[:, ROW + 1 :])
        assert grad[:, : ROW + 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_upstream_gradient_reaches_only_keys_that_its_row_sees(dtype):
    t = tensors(POISON, dtype, DEVICE).with_gradients()
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend="portable", **t.keywords)
    dout, dlse = upstream(out, lse)
    broken = dout.clone()
    broken[0, ROW, 0, 3] = float("nan")
    clean, got = (torch.autograd.grad((out, lse), (t.q, t.k, t.v), (d, dlse), retain_graph=True) for d in (dout, broken))
    assert_same(got[1][:, ROW + 1 :], clean[1][:, ROW + 1 :])
    assert got[1][:, : ROW + 1].isnan().all()
    assert_same(got[2][:, ROW + 1 :], clean[2][:, ROW + 1 :])
    assert got[2][:, : ROW + 1, :, 3].isnan().all()
    assert_same(got[2][..., 4:], clean[2][..., 4:])


@pytest.mark.parametrize("heads", [1, 2])
def test_key_reaches_only_the_biases_of_rows_that_see_it(heads):
    """Whether heads share the bias, so that it is added up, or not: a tile that is computed again adds to it once."""
    t = tensors(POISON, torch.float32, DEVICE)
    keywords = {**t.keywords, "score": strobe.Score(bias=torch.randn(1, heads, POISON.n_q, POISON.n_kv, device=DEVICE))}
    broken = t.k.clone()
    broken[0, ROW, 0, 3] = float("nan")
    clean, got = (run(replace(t, k=k, keywords=keywords), "portable").dbias for k in (t.k, broken))
    assert clean[:, :, :ROW].any()
    assert_same(got[:, :, :ROW], clean[:, :, :ROW])
    assert got[:, :, ROW, : ROW + 1].isnan().all() and not got[:, :, ROW, ROW + 1 :].any()


def not_before_the_end(batch, head, q_index, kv_index):
    return (kv_index != ROW) | (q_index >= END)


def test_rows_that_are_not_there_give_nothing_to_a_bias_that_all_rows_share():
    """A tile has rows beyond the last one, which may see what no row sees."""
    t = tensors(POISON, torch.float32, DEVICE)
    score = strobe.Score(bias=torch.randn(1, 2, 1, POISON.n_kv, device=DEVICE))
    t = replace(t, keywords=dict(mask=strobe.Visible(not_before_the_end), score=score))
    clean = run(t, "portable").dbias
    t.k[:, ROW] = float("nan")
    got = run(t, "portable").dbias
    assert clean.any() and not clean[..., ROW].any()
    assert_same(got, clean)


def test_nan_of_another_document_is_not_seen():
    ids = torch.arange(POISON.n_q, device=DEVICE)[None] // 40
    clean, got = poisoned("v", float("nan"), torch.float32, strobe.Document(ids))
    elsewhere = ids[0] != ids[0, ROW]
    assert_same(got.out[:, elsewhere], clean.out[:, elsewhere])
    assert_same(got.dk[:, elsewhere], clean.dk[:, elsewhere])


# ---- documents


@pytest.fixture
def tiles_of(monkeypatch):
    """A function that gives all kernels tiles of so many rows and keys."""

    def give(tile_q: int, tile_kv: int) -> None:
        for module in (portable_forward, portable_backward):
            chosen = module.choose
            monkeypatch.setattr(
                module, "choose", lambda *given, f=chosen: replace(f(*given), tile_q=tile_q, tile_kv=tile_kv, num_stages=1)
            )

    return give


@pytest.mark.parametrize("ids", ["packed", "shuffled", "of nobody"])
@pytest.mark.parametrize("tiles", [(16, 128), (128, 16), (64, 64)], ids=str)
def test_documents_and_tiles(tiles_of, tiles, ids):
    """A tile has the documents of a part of 64 rows, or of several such, the last of them cut."""
    tiles_of(*tiles)
    t = tensors(Case(290, 330, batch=2, head_dim=16), torch.float32, DEVICE)
    random = torch.Generator().manual_seed(0)
    of_q, of_kv = (torch.randint(0, 4, (2, n), dtype=torch.int32, generator=random) for n in (290, 330))
    if ids == "packed":
        of_q, of_kv = of_q.sort().values, of_kv.sort().values
    if ids == "of nobody":
        of_q, of_kv = of_q.sort().values, of_kv + 2
    t = replace(t, keywords={"mask": strobe.Document(of_q.to(DEVICE), of_kv.to(DEVICE))})
    check(run(t, "portable"), t)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts products in Triton's interpreter")
def test_tiles_of_other_documents_are_not_visited(tiles_of, monkeypatch):
    """Four documents of 128 rows: 16 pairs of tiles of 64 where one document has 64."""
    from triton.runtime.interpreter import InterpreterBuilder

    tiles_of(64, 64)
    products, theirs = [], InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *given: (products.append(1), theirs(*given))[1])
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 512, 1, 16).unbind())

    def counted(documents: int) -> tuple[int, int]:
        ids = torch.arange(512, dtype=torch.int32)[None] * documents // 512
        products.clear()
        out = strobe.attention(q, k, v, mask=strobe.Document(ids), backend="portable")
        forward = len(products)
        out.sum().backward()
        return forward, len(products) - forward

    assert counted(1) == (2 * 64, (4 + 3) * 64)
    assert counted(4) == (2 * 16, (4 + 3) * 16)


def not_the_poisoned(batch, head, q_index, kv_index):
    return (kv_index != ROW) | (q_index < 5)


def test_nan_that_a_function_hides_is_not_seen():
    clean, got = poisoned("v", float("nan"), torch.float32, strobe.Visible(not_the_poisoned))
    assert_same(got.out[:, 5:], clean.out[:, 5:])
    assert got.out[:, :5, :, 3].isnan().all()
    clean, got = poisoned("k", float("nan"), torch.float32, strobe.Visible(not_the_poisoned))
    assert_same(got.dq[:, 5:], clean.dq[:, 5:])
    assert got.dq[:, :5].isnan().all()


def test_upstream_gradient_that_a_function_hides_is_not_seen():
    t = tensors(POISON, torch.float32, DEVICE).with_gradients()
    mask = strobe.Visible(not_the_poisoned)
    out = strobe.attention(t.q, t.k, t.v, mask=mask, backend="portable")
    dout = torch.ones_like(out)
    broken = dout.clone()
    broken[0, 40, 0, 3] = float("nan")
    clean, got = (torch.autograd.grad(out, (t.q, t.k, t.v), d, retain_graph=True) for d in (dout, broken))
    for a, b in zip(got[1:], clean[1:], strict=True):
        assert_same(a[:, ROW], b[:, ROW])
    assert got[1][:, 0].isnan().all() and got[2][:, 0, :, 3].isnan().all()


# ---- layouts


def strided(t, how: str):
    """The same numbers with other strides."""
    if how == "transposed":  # [batch, heads, n, D] in memory
        return (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (t.q, t.k, t.v))
    if how == "sliced":  # a part of wider rows, at an odd offset
        return (torch.nn.functional.pad(x, (3, 5))[..., 3 : 3 + x.shape[-1]] for x in (t.q, t.k, t.v))
    return (t.q, *(x[:, :, :1].expand(-1, -1, 2, -1) for x in (t.k, t.v)))  # one head, repeated with stride 0


@pytest.mark.parametrize("how", ["transposed", "sliced", "expanded"])
def test_strides(how):
    t = tensors(Case(70, 90, head_dim=24, mask="causal"), torch.float32, DEVICE)
    q, k, v = strided(t, how)
    t = replace(t, q=q, k=k, v=v)
    check(run(t, "portable"), t)


def test_results_are_contiguous():
    t = tensors(Case(33, 40), torch.float32, DEVICE)
    q, k, v = strided(t, "transposed")
    results = run(replace(t, q=q, k=k, v=v), "portable")
    assert all(getattr(results, name).is_contiguous() for name in results.FIELDS)


def test_rows_of_no_sequence_are_zero():
    t = tensors(Case(40, 50), torch.float32, DEVICE)
    q, k, v = (x.flatten(0, 1) for x in (t.q, t.k, t.v))
    cu_q, cu_kv = (torch.tensor(cu, dtype=torch.int32, device=DEVICE) for cu in ([0, 30, 55], [0, 20, 60]))
    keywords = dict(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=30, max_seqlen_kv=40)
    got = run(replace(t, q=q, k=k, v=v, keywords=keywords), "portable")
    assert not got.out[55:].any() and got.lse[:, 55:].isneginf().all() and not got.dq[55:].any()
    assert not got.dk[60:].any() and not got.dv[60:].any()
    assert got.out[:55].any(-1).all() and got.dk[:60].any(-1).all()


# ---- the notes


def test_a_redo_visits_the_keys_of_its_spans_alone():
    """It does not see what is beyond them, even if the documents say that it should."""
    t = tensors(Case(130, 200, batch=1, heads_q=2, heads_kv=1), torch.float32, DEVICE)
    ids = [torch.zeros(1, n, dtype=torch.int32, device=DEVICE) for n in (130, 200)]
    problem, operands = describe(replace(t, keywords={"mask": strobe.Document(*ids)}))
    spans = torch.tensor([[[0, 200], [64, 128], [200, 0]]], dtype=torch.int32, device=DEVICE)
    spans = torch.cat([spans, torch.zeros_like(spans[..., :1])], 2)
    notes = torch.ones(2 * 3, dtype=torch.int32, device=DEVICE)
    out, lse = torch.full((1, 130, 2, 32), 7.0, device=DEVICE), torch.full((1, 2, 130), 7.0, device=DEVICE)
    given = CallTensors(**operands._asdict(), out=out, lse=lse, notes=notes, row_spans=spans)
    portable_forward.redo_call(problem, given, arch_of(notes.device)).launch()
    for rows, keys in ((slice(0, 64), slice(0, 200)), (slice(64, 128), slice(64, 128)), (slice(128, 130), slice(0, 0))):
        want = strobe.attention(t.q[:, rows], t.k[:, keys], t.v[:, keys], return_lse=True, backend="tiled")
        torch.testing.assert_close(out[:, rows], want[0])
        torch.testing.assert_close(lse[..., rows], want[1])


NOTED = (
    Case(300, 300, heads_q=4, heads_kv=2, mask="causal"),
    Case(300, 200, heads_q=2, heads_kv=1, packed=True, batch=4, mask="causal"),
    Case(150, 260, packed=True, batch=3),
    Case(150, 130, softcap=4.0, alibi=True, bias=True, sinks=True, function=True, mask="functions"),
)


@pytest.mark.parametrize("share, waiting, noted", [(2, 8, None), (128, 8, None), (2, 3, 1), (128, 2, 1)])
@pytest.mark.parametrize("case", NOTED, ids=str)
def test_only_noted_rows_are_written(case, share, waiting, noted, monkeypatch):
    """However many notes a program looks at in one go, and whether all wait, or a few and those that see that there is a
    note."""
    monkeypatch.setattr(portable_forward, "_SHARE", share)
    monkeypatch.setattr(portable_forward, "WAITING", waiting)
    t = tensors(case, torch.float32, DEVICE)
    problem, operands = describe(t)
    want_out, want_lse = launches.forward(backend, problem, operands)
    blocks = -(-case.n_q // portable_forward.NOTED_ROWS)
    notes = torch.zeros(case.batch * case.heads_q * blocks, dtype=torch.int32, device=DEVICE)
    notes[::3] = 1
    set_notes, counter = notes.nonzero().flatten().tolist(), torch.tensor([5], dtype=torch.int32, device=DEVICE)
    out, lse = torch.full_like(want_out, 7.0), torch.full_like(want_lse, 7.0)
    given = CallTensors(**operands._asdict(), out=out, lse=lse, notes=notes, redone=counter)
    if noted is not None:
        given.counters = torch.zeros(16, dtype=torch.int32, device=DEVICE)
        given.counters[workspace.NOTED] = noted
    portable_forward.redo_call(problem, given, arch_of(notes.device), given.counters).launch()
    assert noted is None or not given.counters[: workspace.SHARES].any()  # the next forward sets that back
    assert not notes.any() and counter.item() == 5 + len(set_notes)
    noted = torch.zeros_like(want_lse, dtype=torch.bool)
    starts = t.keywords["cu_seqlens_q"].tolist() if case.packed else None
    for note in set_notes:
        batch, head, first = note // blocks // case.heads_q, note // blocks % case.heads_q, note % blocks * 64
        if starts is None:
            noted[batch, head, first : first + 64] = True
        else:
            noted[head, starts[batch] + first : min(starts[batch] + first + 64, starts[batch + 1])] = True
    assert noted.any() and not noted.all()
    assert_same(lse, torch.where(noted, want_lse, 7.0))
    assert_same(out, torch.where(noted.transpose(-1, -2)[..., None], want_out, 7.0))


# ---- refusals


def problem(dtype=torch.float16, **changes):
    return replace(describe(tensors(Case(8, 8), dtype))[0], **changes)


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem(torch.float64), KNOWN["A100"], "float64"),
        (problem(), replace(KNOWN["T4"], capability=70), "7.5"),
        (problem(torch.bfloat16), KNOWN["T4"], "bfloat16"),
        (problem(lengths=replace(problem().lengths, seqlen_kv=1 << 30)), KNOWN["A100"], "2\\^30"),
        (problem(), replace(CPU, name="xpu"), "GPU"),
    ],
)
def test_refusals(asked, arch, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(backend.refuses(asked, arch))


def test_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.refuses(problem(), CPU) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in backend.refuses(problem(), CPU)


@pytest.mark.parametrize("arch", [KNOWN["T4"], KNOWN["A100"], KNOWN["RTX 4090"], KNOWN["H200"]], ids=str)
def test_takes_float16(arch):
    assert backend.refuses(problem(), arch) is None


# ---- the compiler takes what the interpreter takes, and what it needs of a GPU is there

COMPILE = """
import json, sys
import torch
from triton.runtime.jit import JITFunction
from problems import Case, describe, tensors
from strobe.device import KNOWN
from strobe.call import launches
from strobe.kernels.portable import backend, config, forward
from strobe.problem import Upstream
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import disassemble, wrong_code

arch, dtype, compiled = KNOWN[sys.argv[1]], getattr(torch, sys.argv[2]), {}
launch = JITFunction.run

def compile_only(self, *args, warmup, **keywords):
    compiled[self.__name__] = launch(self, *args, warmup=True, **keywords)

JITFunction.run = compile_only
for head_dim in map(int, sys.argv[4].split(",")):
    t = tensors(Case(8, 8, head_dim=head_dim, mask=sys.argv[3], **json.loads(sys.argv[5])), dtype).with_gradients()
    problem, operands = describe(t)
    with pretend_gpu(arch.capability):
        made = launches.run(backend, problem, operands._asdict(), arch)
        if arch.capability >= 90:
            made.notes, made.redone = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
            forward.redo_call(problem, made, arch).launch()
        upstream = Upstream(made.out, made.lse, made.out, made.lse)
        launches.run(backend, describe(t, "backward")[0], operands._asdict() | upstream._asdict(), arch)
    for kernel in ("forward", "redo", "dkdv", "dq") if arch.capability >= 90 else ("forward", "dkdv", "dq"):
        made = compiled[f"_{kernel}"]
        bound = config.choose(kernel, problem, arch).smem_bytes()
        wrong = wrong_code(disassemble(made.asm["cubin"])) if arch.capability == 90 else []
        print(json.dumps([head_dim, kernel, made.metadata.shared, bound, "trap;" in made.asm["ptx"], wrong]))
"""
EVERYTHING = {"softcap": 4.0, "alibi": True, "bias": True, "sinks": True, "function": True, "seqused": True, "dropout": 0.1}


@pytest.mark.parametrize("triton", ["installed Triton", "oldest Triton"], ids=["installed", "3.6"])
@pytest.mark.parametrize(
    ("gpu", "dtype", "mask", "head_dims", "features"),
    [
        ("T4", "float16", "causal", "64", {}),
        ("A100", "bfloat16", "full", "128", {}),
        ("A100", "float32", "causal", "64", {}),
        ("RTX 4090", "bfloat16", "causal", "256", {}),
        ("H200", "bfloat16", "window", "128", {}),
        ("H200", "float16", "prefix", "40", {"head_dim_v": 8}),  # narrow rows of V: the ptxas of CUDA 12.8 made wrong code
        ("B200", "bfloat16", "causal", "256", {}),
        ("RTX 5090", "float16", "documents", "128", {}),
        ("A100", "bfloat16", "all", "64", {}),
        ("A100", "bfloat16", "functions", "128", EVERYTHING),
        ("H200", "bfloat16", "causal", "128", EVERYTHING),
        ("H200", "bfloat16", "function", "64", {"packed": True, "sinks": True, "seqused": True}),
        ("B200", "float16", "functions", "64", EVERYTHING),
    ],
)
def test_compiles(gpu, dtype, mask, head_dims, features, triton):
    arguments = [gpu, dtype, mask, head_dims, json.dumps(features)]
    printed = output_of(COMPILE, *arguments, triton=triton, path=[Path(__file__).parents[1]])
    kernels = [json.loads(line) for line in printed.splitlines()]
    assert len(kernels) == (4 if KNOWN[gpu].capability >= 90 else 3) * len(head_dims.split(","))
    for head_dim, kernel, shared, bound, traps, wrong in kernels:
        assert shared <= bound <= KNOWN[gpu].smem_per_block, f"{kernel}, head dim {head_dim}: {shared} bytes, bound {bound}"
        assert not traps, f"{kernel}, head dim {head_dim}: the compiler gave up and made a kernel that traps"
        assert not wrong, f"{kernel}, head dim {head_dim}: {wrong}"
