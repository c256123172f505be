"""The kernels for mma.sync: what the compiler makes of them (no GPU needed), and on a GPU what they compute."""

import json
import re
from dataclasses import replace

import pytest
import torch
from problems import CASES, SEED, Case, Results, check, describe, formula, run, tensors, upstream, without_plans
from tritons import TRITONS, answer_by

import strobe
from strobe.call import launches
from strobe.call.dispatch import explain_problem
from strobe.device import KNOWN, arch_of
from strobe.kernels.sm80 import backend
from strobe.kernels.sm80.config import SCRATCH, BackwardConfig, Config, backward_candidates, candidates
from strobe.problem import AttentionProblem, Dense, Upstream, Varlen

GPUS = ("A100", "A10", "RTX 4090", "H200", "RTX 5090")


def problem(**changes) -> AttentionProblem:
    plain = {"lengths": Dense(2, 512, 512), "heads_q": 4, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128}
    return AttentionProblem(**{**plain, "dtype": torch.bfloat16, "scale": 0.1, **changes})


# ---- dispatch


def _not_after(batch, head, q_index, kv_index):
    return kv_index <= q_index


def _twice(score, batch, head, q_index, kv_index):
    return 2.0 * score


@pytest.mark.parametrize(
    "changes, gpu, reason",
    [
        ({}, "T4", "mma.sync for 16 bits and cp.async \\(sm_80 or newer\\), not T4"),
        ({"dtype": torch.float64}, "A100", "float16 and bfloat16 and float32, not float64"),
        (
            {"dtype": torch.float32, "head_dim": 256, "head_dim_v": 256, "phase": "backward"},
            "A10",
            "more shared memory for the backward of float32 at head dims 256 and 256 than A10",
        ),
        ({"scale": -0.1}, "A100", "positive scale.*not -0.1"),
        ({"head_dim": 20}, "A100", "multiples of 8 .*, not 20 and 128"),
        ({"head_dim_v": 264}, "A100", "head dims up to 256"),
        ({"unaligned": ("k",)}, "RTX 4090", "multiples of 16 bytes.*which k lacks"),
        ({"lengths": Dense(1, 2**30, 4)}, "A100", "fewer than 2\\^30"),
        ({"phase": "backward", "score": strobe.Score(function=_twice)}, "A100", "needs the derivative"),
    ],
)
def test_refusals(changes, gpu, reason):
    assert re.search(reason, backend.refuses(problem(**changes), KNOWN[gpu]))


TAKEN = [
    *({"head_dim": dim, "head_dim_v": dim} for dim in range(8, 257, 8)),
    {"head_dim": 192},
    {"head_dim_v": 256},
    {"lengths": Varlen(3, 500, 600, 200, 300)},
    {"score": strobe.Score(softcap=3.0)},
    {"score": strobe.Score(alibi=torch.ones(4), sinks=torch.ones(4))},
    {"mask": strobe.Document(torch.zeros(2, 512, dtype=torch.int32))},
    {"mask": strobe.Visible(_not_after)},
    {"seqused": True},
    {"dropout": 0.1},
    {"score": strobe.Score(bias=torch.zeros(1, 1, 1, 1), function=_twice, function_gradient=_twice)},
    *({"dtype": torch.float32, "head_dim": dim, "head_dim_v": dim} for dim in range(8, 137, 8)),
]


@pytest.mark.parametrize("changes", TAKEN, ids=str)
def test_what_it_takes(changes):
    """On every GPU there are configs that its shared memory holds."""
    for gpu in GPUS:
        arch = KNOWN[gpu]
        assert backend.refuses(problem(**changes), arch) is None
        found = candidates(problem(**changes), arch)
        assert found and backend.config(problem(**changes), arch) == found[0]
        backward = problem(**changes, phase="backward")
        assert backend.refuses(backward, arch) is None
        for_backward = backward_candidates(backward, arch)
        assert for_backward and backend.config(backward, arch) == for_backward[0]
        assert all(config.smem_bytes() + SCRATCH <= arch.smem_per_block for config in (*found, *for_backward))


def test_the_optimistic_softmax_where_the_first_block_says_enough():
    arch = KNOWN["A100"]
    assert backend.config(problem(), arch).optimistic
    assert backend.config(problem(mask=strobe.Causal()), arch).optimistic
    assert not backend.config(problem(mask=strobe.Visible(_not_after)), arch).optimistic
    assert not backend.config(problem(score=strobe.Score(alibi=torch.ones(4))), arch).optimistic


def test_which_tile_a_length_a_mask_and_few_tiles_ask_for():
    """See `config.candidates`."""
    arch = KNOWN["A100"]

    def tile(**changes) -> tuple[int, int]:
        chosen = backend.config(problem(**changes), arch)
        return chosen.tile_q, chosen.warps

    def of(batch: int, length: int) -> dict:
        return {"lengths": Dense(batch, length, length), "heads_q": 8, "heads_kv": 8}

    wide = {"head_dim": 256, "head_dim_v": 256}
    assert tile(**wide, **of(4, 4096)) == (128, 8)
    assert tile(**wide, **of(32, 512)) == tile(**wide, **of(4, 4096), mask=strobe.Causal()) == (64, 4)
    assert tile(**of(4, 4096)) == (128, 4)
    assert tile(**of(1, 1024)) == tile(**wide, **of(1, 1024)) == (64, 4)
    between = {"head_dim": 96, "head_dim_v": 96, **of(4, 4096)}
    whole, causal = (backend.config(problem(**between, mask=mask), arch) for mask in (strobe.Full(), strobe.Causal()))
    assert (whole.tile_kv, whole.q_in_registers) == (64, False) and (causal.tile_kv, causal.q_in_registers) == (32, True)


def test_chunks_and_pieces():
    """Equal chunks in the forward, wide ones in the backward, whose dQ comes in pieces where head dims are large."""
    assert [Config(dim, dim, 64, 32, 4).chunks for dim in (80, 96, 128)] == [(64, 16), (32, 32, 32), (64, 64)]
    assert [BackwardConfig(dim, dim, 64, 64, 4).chunks for dim in (80, 96, 128)] == [(64, 16), (64, 32), (64, 64)]
    assert [BackwardConfig(dim, dim, 64, 64, 4).piece for dim in (80, 96, 128)] == [64, 64, 32]
    assert BackwardConfig(128, 128, 32, 64, 8, across=2).across_q == 4


def test_rows_come_in_parts_where_two_ctas_have_room_and_work():
    """See `config.backward_candidates`."""

    def parts(gpu: str, batch: int, **changes) -> int:
        shape = {"phase": "backward", "lengths": Dense(batch, 1024, 1024), "head_dim": 64, "head_dim_v": 64, **changes}
        return backend.config(problem(**shape, heads_q=16, heads_kv=16), KNOWN[gpu]).parts

    assert [parts(gpu, 4) for gpu in ("A100", "H100", "RTX 4090", "RTX 5090")] == [2, 2, 1, 1]
    assert [parts(gpu, 1) for gpu in ("A100", "H100")] == [2, 1]  # 128 blocks
    assert parts("A100", 4, head_dim=96, head_dim_v=96) == 1


def test_what_has_an_order_is_left_to_the_portable_kernel():
    arch = KNOWN["A100"]
    assert backend.config(problem(phase="backward"), arch).with_dq
    assert not backend.config(problem(phase="backward", deterministic=True), arch).with_dq
    assert not backend.config(problem(phase="backward", learned=("bias",)), arch).with_dq


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "phase, dtype", [(phase, dtype) for phase in ("forward", "backward") for dtype in (BF16, FP32)], ids=str
)
def test_where_it_is_the_default(phase, dtype):
    """Where warps multiply by mma.sync; on Hopper in float32, which wgmma does not take."""
    shape = problem(phase=phase, dtype=dtype)
    for gpu in ("A100", "A10", "L4", "RTX 4090", "RTX 5090"):
        found = explain_problem(shape, KNOWN[gpu])
        assert found.chosen == "sm80" and found.warning is None
        assert found.config == backend.config(shape, KNOWN[gpu])
    assert explain_problem(shape, KNOWN["H200"]).chosen == ("sm90" if dtype == BF16 else "sm80")


@pytest.mark.parametrize(
    "phase, dtype", [(phase, dtype) for phase in ("forward", "backward") for dtype in (BF16, FP32)], ids=str
)
def test_where_it_runs_by_name(phase, dtype):
    shape, arch = problem(phase=phase, dtype=dtype), KNOWN["B200"]
    asked, found = (explain_problem(shape, arch, name) for name in ("sm80", None))
    assert asked.chosen == "sm80" and asked.warning == backend.unproven(shape, arch)
    assert found.chosen == "portable" and "so it runs only by name: backend='sm80'" in dict(found.refusals)["sm80"]


# ---- offline: the compiler's own numbers

COMPILE = """
import json, sys, torch, triton
from dataclasses import asdict, replace
from strobe.device import KNOWN
from strobe.kernels.sm80.config import BackwardConfig, Config
from strobe.lab.binary.offline import problem_of, sm80_backward, sm80_forward
from strobe.lab.binary.sass import counted, disassemble, flow_of, innermost_loops
from strobe.masks import Causal, Full
masks = {"full": Full(), "causal": Causal()}
found = []
for gpu, mask, phase, config in json.loads(sys.argv[1]):
    config = (Config if phase == "forward" else BackwardConfig)(**config)
    dtype = torch.float32 if config.itemsize == 4 else torch.bfloat16
    problem = replace(problem_of((config.head_dim, config.head_dim_v), masks[mask], dtype), phase=phase)
    made, = (sm80_forward if phase == "forward" else sm80_backward)(problem, KNOWN[gpu], config)
    audit, flow = made.audit(), flow_of(disassemble(made.kernel.asm["cubin"]))
    loops = innermost_loops(flow, set(range(len(flow.blocks))), ("HMMA",))
    found.append({
        "gpu": gpu, "mask": mask, "phase": phase, "config": asdict(config), "registers": audit.registers,
        "smem_bytes": audit.smem_bytes,
        "loops": [counted(i.mnemonic.split(".")[0] for i in flow.instructions(loop)) for loop in loops],
        "copies": [i.mnemonic for i in flow.instructions(range(len(flow.blocks))) if i.mnemonic.startswith("LDGSTS")],
        "stores": counted(i.mnemonic for i in flow.instructions(range(len(flow.blocks))) if i.mnemonic.startswith("STG")),
    })
print(json.dumps({"triton": triton.__version__, "found": found}))
"""

COMPILED = [
    ("A100", "full", Config(128, 128, 64, 64, 4, 1, True)),
    ("A100", "causal", Config(64, 64, 128, 64, 4, 2)),
    ("A10", "full", Config(128, 128, 128, 32, 4)),
    ("RTX 4090", "causal", Config(96, 96, 128, 32, 4)),
    ("RTX 5090", "full", Config(64, 64, 128, 64, 4)),
    ("H200", "full", Config(64, 64, 128, 64, 4, 2)),
    ("H200", "causal", Config(128, 128, 64, 64, 4, 1, True)),
    ("A100", "causal", BackwardConfig(64, 64, 64, 128, 8)),
    ("A100", "full", BackwardConfig(64, 64, 64, 128, 4, parts=2)),
    ("H200", "causal", BackwardConfig(64, 64, 64, 128, 4, parts=2)),
    ("A10", "full", BackwardConfig(128, 128, 64, 64, 4, stages=1)),
    ("H200", "causal", BackwardConfig(128, 128, 64, 128, 8, across=2)),
    ("A100", "full", BackwardConfig(96, 96, 64, 128, 8, across=2)),
    ("A100", "full", Config(256, 256, 64, 64, 4, across=2)),
    ("A100", "causal", BackwardConfig(256, 256, 64, 64, 8, across=4, stages=1)),
    ("A100", "full", Config(128, 128, 64, 32, 4, itemsize=4)),
    ("RTX 4090", "causal", Config(64, 64, 64, 32, 4, 2, itemsize=4)),
    ("H200", "full", BackwardConfig(64, 64, 32, 64, 4, itemsize=4)),
    ("A10", "causal", BackwardConfig(128, 128, 32, 32, 4, across=2, stages=1, itemsize=4)),
    ("A100", "full", Config(96, 96, 128, 64, 4, 2)),
    ("H200", "causal", Config(96, 96, 128, 32, 4, 2, True)),
    ("A100", "full", BackwardConfig(128, 128, 64, 128, 8, across=2)),
    ("H200", "full", BackwardConfig(256, 256, 64, 64, 8, across=4)),
]
SOME = (0, 3, 5, 8, 13, 16)
"""Those that are always compiled. A campaign compiles all."""
ONE = (4,)
"""What the oldest Triton always compiles."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("installed Triton", SOME), id="some, installed Triton"),
        pytest.param(("oldest Triton", ONE), id="one, oldest Triton"),
        *(
            pytest.param((triton, range(len(COMPILED))), id=f"all, {triton}", marks=pytest.mark.exhaustive)
            for triton in TRITONS
        ),
    ],
)
def compiled(request):
    triton, which = request.param
    asked = [(gpu, mask, phase_of(config), vars(config)) for gpu, mask, config in (COMPILED[i] for i in which)]
    return answer_by(triton, COMPILE, json.dumps(asked))["found"]


def phase_of(config: Config | BackwardConfig) -> str:
    return "forward" if isinstance(config, Config) else "backward"


def instructions_of_a_product(config: Config | BackwardConfig) -> int:
    """How many make 16 x 8 numbers of 16 terms each: of float32, three for 8 terms."""
    return 6 if config.itemsize == 4 else 1


def test_shared_memory_is_what_config_says(compiled):
    for found in compiled:
        config = (Config if found["phase"] == "forward" else BackwardConfig)(**found["config"])
        assert 0 <= found["smem_bytes"] - config.smem_bytes() <= SCRATCH
        assert found["smem_bytes"] <= KNOWN[found["gpu"]].smem_per_block


def test_the_loop_over_blocks_seen_whole(compiled):
    """It has the products and the ldmatrix that arithmetic says, one exponential a score, and no tile in local memory (but
    some numbers of the CTA's work, where the rest of a masked kernel needs many)."""
    for found in compiled:
        if found["phase"] == "backward":
            continue
        config = Config(**found["config"])
        loop = max(found["loops"], key=lambda counts: counts["HMMA"] / sum(counts.values()))
        rows = config.tile_q * config.across // config.warps // 16  # products of 16 rows that a warp makes of its own
        products = config.tile_kv // 8 * config.head_dim // 16 + config.head_dim_v // 8 * config.tile_kv // 16
        products = rows * products // config.across * instructions_of_a_product(config)
        blocks = loop["HMMA"] // products  # of two stages the compiler may take one after the other
        assert blocks in (1, config.stages) and loop["HMMA"] == blocks * products, found
        # Four 8 x 8 matrices at a time, of the keys of S and of the columns of O that a warp has.
        operands = config.tile_kv * (config.head_dim + config.head_dim_v) // 256 // config.across
        if config.across > 1:
            operands += rows * config.tile_kv // 16  # P
        q = 0 if config.q_in_registers else rows * config.head_dim // 16
        if config.itemsize == 4:  # twice as many bytes; of V, which would have to be transposed, none comes by ldmatrix
            operands, q = config.tile_kv * config.head_dim // 128, 2 * q
        assert loop["LDSM"] == blocks * (operands + q), found
        assert loop["MUFU"] == blocks * config.tile_q * config.tile_kv // (32 * config.warps), found
        assert not {"STL", "FMUL", "FMNMX", *(("STS",) if config.across == 1 else ())} & loop.keys(), found
        assert loop.get("LDL", 0) <= (0 if found["mask"] == "full" else 10), found
        assert loop["BAR"] == blocks * (3 - config.stages + (config.across > 1)), found


def test_the_loop_over_tiles_of_rows(compiled):
    """Five products; a float32 addition to memory for each number of dQ; hardly anything in local memory. (An A10's tiles of
    128 columns, whose dQ comes in pieces, keep most there.)"""
    for found in compiled:
        if found["phase"] == "forward":
            continue
        config = BackwardConfig(**found["config"])
        loop = max(found["loops"], key=lambda counts: counts["HMMA"] / sum(counts.values()))
        multiplied = config.tile_q * config.tile_kv * (3 * config.head_dim + 2 * config.head_dim_v)
        products = multiplied // (16 * 8 * 16 * config.warps) * instructions_of_a_product(config)
        tiles = loop["HMMA"] // products  # of each stage one and, with a mask in 16 bits, one more without it
        assert tiles in (1, config.stages, 2 * config.stages) and loop["HMMA"] == tiles * products, found
        added = loop.get("RED", 0) + loop.get("REDG", 0)
        assert added == tiles * config.tile_q * config.head_dim // (32 * config.warps), found
        assert loop["MUFU"] == tiles * config.tile_q * config.tile_kv // (32 * config.warps), found
        assert loop.get("LDL", 0) + loop.get("STL", 0) <= (45 if config.itemsize == 2 else 90) * tiles, found
        assert loop["BAR"] == tiles * (4 - config.stages), found


def test_copies_are_of_16_bytes_and_pass_by_the_l1_cache(compiled):
    for found in compiled:
        assert found["copies"] and all(name.startswith("LDGSTS.E.BYPASS") and "128" in name for name in found["copies"])


def test_results_leave_by_16_bytes(compiled):
    """O, dK and dV, once each; what else is stored are the LSE, notes and, if it comes to that, a tile computed again."""
    for found in compiled:
        forward = found["phase"] == "forward"
        config = (Config if forward else BackwardConfig)(**found["config"])
        numbers = config.tile_q * config.head_dim_v if forward else config.tile_kv * (config.head_dim + config.head_dim_v)
        wide = sum(count for name, count in found["stores"].items() if name.endswith(".128"))
        assert wide * 16 * 32 * config.warps == numbers * config.itemsize, found


ENDS = """
import json, sys, torch, triton
from dataclasses import replace
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.sm80 import backward_launch
from strobe.kernels.sm80.config import choose_backward
from strobe.lab.binary.offline import pretend_gpu, problem_of
from strobe.masks import Causal
arch = KNOWN["A100"]
for dim, dtype in ((128, torch.bfloat16), (112, torch.float32)):
    problem = replace(problem_of((dim, dim), Causal(), dtype), phase="backward")
    config = choose_backward(problem, arch)
    tensors = unfilled(problem, backward_launch.buffers(problem, config))
    with pretend_gpu(80):
        for call in backward_launch.calls(problem, tensors, arch, config):
            if call.kernel.__name__ in ("prepare", "convert"):
                call.compile()
print(json.dumps({"triton": triton.__version__}))
"""


@pytest.mark.parametrize("triton", TRITONS)
def test_what_runs_before_and_after_the_backward_compiles(triton):
    """With several chunks of each width: what a compiler takes of one chunk it may refuse of two."""
    answer_by(triton, ENDS)


# ---- on the GPU

GPU_CASES = [
    *(
        Case(n_q, n_kv, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, mask=mask)
        for head_dim in (64, 96, 128, 256)
        for mask in ("full", "causal", "window", "prefix")
        for n_q, n_kv, heads_q, heads_kv in ((512, 512, 4, 4), (1, 300, 4, 1), (333, 777, 4, 2), (777, 333, 2, 2), (1, 1, 1, 1))
    ),
    *(Case(333, 400, heads_q=4, head_dim=head_dim, mask="causal") for head_dim in range(8, 257, 8)),
    *(
        Case(300, 500, head_dim=head_dim, head_dim_v=head_dim_v, mask=mask)
        for head_dim, head_dim_v in ((192, 128), (64, 256), (256, 64), (40, 96), (128, 8))
        for mask in ("full", "causal")
    ),
    *(
        Case(700, 900, batch=7, heads_q=4, head_dim=head_dim, mask=mask, packed=True)
        for head_dim in (64, 80, 128, 256)
        for mask in ("full", "causal", "window")
    ),
    *(Case(700, 700, head_dim=128, mask="causal", logits=logits) for logits in (10.0, 100.0)),
    *(case for case in CASES if case.n_q and case.n_kv and case.batch and (case.scale or 1.0) > 0),
]


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_against_reference(case, dtype):
    t = tensors(case, dtype, "cuda")
    check(run(t, "sm80"), t)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_candidate_of_the_backward(head_dim, mask, dtype, monkeypatch):
    t = tensors(Case(333, 400, heads_q=4, head_dim=head_dim, mask=mask), dtype, "cuda")
    shape = problem(head_dim=head_dim, head_dim_v=head_dim, phase="backward", dtype=dtype)
    for chosen in backward_candidates(shape, KNOWN["A100"]):
        with without_plans():
            monkeypatch.setattr(backend, "choose_backward", lambda problem, arch, chosen=chosen: chosen)
            check(run(t, "sm80"), t)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_ordinary_is_redone(head_dim, dtype):
    """Gradients are right, and there are no notes, before the launch that redoes what is noted: it would hide a mistake, and
    takes three times as long as all others."""
    t = tensors(Case(600, 600, heads_q=4, heads_kv=2, head_dim=head_dim, mask="causal"), dtype, "cuda")
    exact = formula(t)
    dout, dlse = upstream(exact.out, exact.lse)
    shape, operands = describe(t, "backward")
    arch = arch_of(t.q.device)
    given = Upstream(exact.out.to(dtype), exact.lse.float(), dout.to(dtype), dlse.float())
    made = launches.allocated(backend.buffers(shape, arch), {**operands._asdict(), **given._asdict()})
    calls = backend.calls(shape, made, arch)
    for call in calls[:-1]:
        call.launch()
    assert not made.key_notes.any() and not made.row_notes.any()
    check(Results(None, None, made.dq, made.dk, made.dv), t, ("dq", "dk", "dv"))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_deterministic_gradients(mask):
    t = tensors(Case(600, 700, heads_q=4, heads_kv=2, head_dim=128, mask=mask), torch.bfloat16, "cuda")
    t = replace(t, keywords={**t.keywords, "deterministic": True})
    first = run(t, "sm80")
    check(first, t)
    for _ in range(5):
        again = run(t, "sm80")
        assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("dq", "dk", "dv"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_reaches_no_gradient_that_does_not_see_it(name):
    t = tensors(Case(300, 300, batch=1, heads_q=2, heads_kv=1, head_dim=64, mask="causal"), torch.bfloat16, "cuda")
    getattr(t, name)[0, 170, 0, 3] = torch.nan
    got = run(t, "sm80")
    if name == "q":
        assert torch.isfinite(got.dk[:, 171:]).all() and torch.isfinite(got.dv[:, 171:]).all()
        assert torch.isfinite(got.dq[:, :170]).all() and torch.isfinite(got.dq[:, 171:]).all()
    else:
        assert torch.isfinite(got.dq[:, :170]).all() and got.dq[:, 170:].isnan().any(-1).all()


def forward(t) -> Results:
    torch.manual_seed(SEED)
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend="sm80", **t.keywords)
    return Results(out, lse, out, out, out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_reference(case, dtype):
    t = tensors(case, dtype, "cuda")
    check(forward(t), t, ("out", "lse"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_candidate(head_dim, mask, dtype, monkeypatch):
    """Whatever config of those that are worth timing is chosen, on any GPU that it fits."""
    t = tensors(Case(333, 400, heads_q=4, head_dim=head_dim, mask=mask), dtype, "cuda")
    shape = problem(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    for chosen in candidates(shape, KNOWN["A100"]):
        with without_plans():
            monkeypatch.setattr(backend, "choose", lambda problem, arch, chosen=chosen: chosen)
            check(forward(t), t, ("out", "lse"))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["heads first", "sliced", "batch of one"])
def test_strides(layout):
    t = tensors(Case(260, 260, heads_q=4, heads_kv=4, head_dim=64, mask="causal"), torch.bfloat16, "cuda")
    if layout == "heads first":
        t = replace(t, **{name: getattr(t, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"})
    elif layout == "sliced":
        q, k, v = torch.stack([t.q, t.k, t.v], 2).unbind(2)
        t = replace(t, q=q, k=k, v=v)
    else:
        t = replace(t, q=t.q[:1], k=t.k[:1], v=t.v[:1])
    check(forward(t), t, ("out", "lse"))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_reaches_only_rows_that_see_it(value):
    t = tensors(Case(300, 300, heads_q=2, heads_kv=1, head_dim=64, mask="causal"), torch.bfloat16, "cuda")
    clean = forward(t).out
    t.v[0, 170, 0, 3] = value
    got = forward(t).out
    assert torch.isfinite(got[0, :170]).all() and not torch.isfinite(got[0, 170:, :, 3]).any()
    torch.testing.assert_close(got[0, :170], clean[0, :170], atol=2e-2, rtol=2e-2)
    assert torch.isfinite(got[0, ..., 4:]).all() and torch.equal(got[1], clean[1])


@pytest.mark.gpu
def test_repeats_bit_for_bit():
    t = tensors(Case(1500, 1500, batch=4, heads_q=8, heads_kv=8, head_dim=128, mask="causal"), torch.bfloat16, "cuda")
    first = forward(t)
    for _ in range(20):
        again = forward(t)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
