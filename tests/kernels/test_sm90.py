"""The Hopper forward: what the compiler makes of it (no GPU needed), and on a GPU what it computes."""

import json
import re
from dataclasses import replace

import pytest
import torch
from problems import CASES, SEED, Case, Results, check, formula, run, tensors
from tritons import TRITONS, answer_by

import strobe
from strobe.device import KNOWN
from strobe.kernels.sm90 import backend
from strobe.kernels.sm90.config import Config
from strobe.lab.binary.sass import list_by_role
from strobe.problem import AttentionProblem, Dense, Varlen

# ---- offline: the compiler's own numbers, on the oldest and on the installed Triton

AUDIT = """
import dataclasses, json, sys, torch, triton
from strobe.kernels.sm90.config import Config
from strobe.lab.binary.offline import audit_sm90_forward
from strobe.masks import Causal, Full, Window
bf16, fp16 = torch.bfloat16, torch.float16
full, causal, window = Full(), Causal(), Window(1023, 0)
problems = (
    ((64, 64), full, bf16, 4096, False, Config(64, 64, 3, 128, 4)),
    ((64, 64), causal, fp16, 1000, False, Config(64, 64, 2, 128, 4)),
    ((64, 64), full, bf16, 4096, False, Config(64, 64, 2, 128, 4, q_stages=1)),
    ((64, 64), window, bf16, 4096, False, Config(64, 64, 2, 128, 4)),
    ((128, 128), full, fp16, 4096, False, Config(128, 128, 2, 128, 2)),
    ((128, 128), causal, bf16, 1000, False, Config(128, 128, 2, 64, 4)),
    ((128, 128), causal, bf16, 4096, True, Config(128, 128, 2, 128, 2)),
    ((128, 128), causal, bf16, 4096, False, Config(128, 128, 2, 128, 2, optimistic=False)),
    ((80, 80), causal, bf16, 4096, False, Config(96, 96, 2, 128, 3)),
    ((128, 40), causal, fp16, 4096, False, Config(128, 64, 2, 128, 3)),
    ((192, 128), full, bf16, 4096, False, Config(192, 128, 2, 64, 2, o_buffers=2)),
    ((256, 256), causal, bf16, 4096, False, Config(256, 256, 2, 64, 2, q_stages=1, o_buffers=2)),
    ((160, 160), causal, bf16, 4096, False, Config(160, 160, 2, 128, 2, q_stages=1)),
)
which, audits = json.loads(sys.argv[1]), []
for *problem, packed, config in problems if which == "all" else [problems[i] for i in which]:
    audit = audit_sm90_forward(*problem, packed=packed, config=config)
    audits.append({"config": dataclasses.asdict(config), **dataclasses.asdict(audit)})
print(json.dumps({"triton": triton.__version__, "audits": audits}))
"""


SOME = [0, 6, 11]
"""The problems that are always audited: three groups, packed, the largest. A campaign audits all."""
AUDITED = [
    pytest.param((TRITONS[1], SOME), id="some, installed Triton"),
    *(pytest.param((triton, "all"), id=f"all, {triton}", marks=pytest.mark.exhaustive) for triton in TRITONS),
]


@pytest.fixture(scope="module", params=AUDITED)
def audits(request):
    triton, which = request.param
    return answer_by(triton, AUDIT, json.dumps(which))["audits"]


def config_of(audit) -> Config:
    return Config(**audit["config"])


def test_shared_memory_is_what_config_says(audits):
    for audit in audits:
        excess = audit["smem_bytes"] - config_of(audit).smem_bytes()
        assert 0 <= excess <= 512, audit["name"]
        assert audit["smem_bytes"] <= KNOWN["H200"].smem_per_block


def test_ptxas_made_no_known_mistake(audits):
    for audit in audits:
        assert not audit["wrong_code"], audit["name"]


def test_spills(audits):
    """None but two, outside of the loops over blocks: with 3 groups, which have 160 registers a thread, at head dim 64 without
    a mask (newest Triton), and a number of the mask at head dim 256 (oldest)."""
    for audit in audits:
        config, full = config_of(audit), "full" in audit["name"]
        allowed = 172 if config.groups == 3 and full else 16 if config.head_dim == 256 and not full else 0
        assert audit["spill_bytes"] <= allowed, audit["name"]
        moves = sum(counts.get("LDL", 0) + counts.get("STL", 0) for counts in audit["roles"].values())
        assert audit["spill_bytes"] == 4 * moves, audit["name"]  # so they were counted in the code that runs


def test_tensor_cores_run_unhindered(audits):
    for audit in audits:
        config = config_of(audit)
        assert not audit["warnings"], audit["warnings"]  # ptxas's C75xx: a wgmma made serial
        # Products of 16 in K. S = Q K^T stands before the first tile, in the loop, and at the boundary; P V at the latter two.
        products = 3 * config.head_dim // 16 + 2 * config.products_v * config.tile_kv // 16
        *consumers, _producer = audit["roles"].values()
        for counts in consumers:
            assert counts["HGMMA"] == products, audit["name"]
            # One exponential a score of 64 rows over 128 threads, in the loop and for first blocks.
            assert counts["MUFU.EX2"] >= config.tile_kv, audit["name"]


def test_roles_do_their_own_work_only(audits):
    for audit in audits:
        config = config_of(audit)
        *consumers, producer = audit["roles"].values()
        assert list(audit["roles"]) == [*(f"consumer {w}" for w in range(config.groups)), "producer"]
        assert producer["UTMALDG"] and not {"HGMMA", "MUFU.EX2", "UTMASTG"} & set(producer), audit["name"]
        for counts in consumers:
            assert counts["HGMMA"] and counts["MUFU.EX2"] and "UTMALDG" not in counts, audit["name"]
            assert counts["UTMASTG"] == config.head_dim_v // config.o_columns, audit["name"]


WITHOUT_NOTES = """
import json, torch, triton
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.portable import forward
from strobe.kernels.sm90 import launch
from strobe.lab.binary.offline import pretend_gpu, problem_of
from strobe.lab.binary.sass import disassemble, flow_of
from strobe.masks import Causal, Full

found = []
for head_dims, mask in (((40, 40), Full()), ((128, 128), Causal())):
    problem = problem_of(head_dims, mask, torch.bfloat16)
    made = unfilled(problem, launch.buffers(problem))
    with pretend_gpu(90):
        kernel = forward.redo_call(problem, made, KNOWN["H200"], made.counters).compile()
    names = []
    for block in flow_of(disassemble(kernel.asm["cubin"])).blocks:
        names += [instruction.name for instruction in block.instructions]
        if "BAR" in block.names or "REDUX" in block.names:  # the notes are looked at together
            break
    found.append((len(names), names.count("STL")))
print(json.dumps({"triton": triton.__version__, "found": found}))
"""


@pytest.mark.parametrize("triton", [TRITONS[1], pytest.param(TRITONS[0], marks=pytest.mark.exhaustive)])
def test_where_nothing_is_noted_the_redo_looks_and_ends(triton):
    """It computes and spills next to nothing of what a block would need before it has seen a note."""
    for instructions, stores in answer_by(triton, WITHOUT_NOTES)["found"]:
        assert instructions < 200 and stores < 16


BESIDE_SCORES = """
import json, torch, triton
from dataclasses import replace
from strobe.device import KNOWN
from strobe.lab.binary.offline import problem_of, sm90_forward
from strobe.lab.binary.sass import disassemble, flow_of, main_loop, role_blocks
from strobe.masks import Causal, Documents
from strobe.scores import Score
ids = torch.empty(256, 4096, dtype=torch.int32, device="meta")
causal = problem_of((128, 128), Causal(), torch.bfloat16)
problems = {
    "slopes": replace(causal, score=Score(alibi=torch.empty(1, device="meta"))),
    "documents": replace(causal, mask=replace(Causal(), documents=Documents(ids, ids))),
}
loops = {}
for name, problem in problems.items():
    made, = sm90_forward(problem, KNOWN["H200"])
    flow = flow_of(disassemble(made.kernel.asm["cubin"]))
    consumer = role_blocks(flow, len(made.roles))[0]
    loop = [instruction.mnemonic for instruction in flow.instructions(main_loop(flow, consumer))]
    audit = made.audit()
    loops[name] = {"loop": loop, "spill_bytes": audit.spill_bytes, "warnings": audit.warnings}
print(json.dumps({"triton": triton.__version__, "loops": loops}))
"""


@pytest.mark.parametrize("triton", [pytest.param(TRITONS[0], marks=pytest.mark.exhaustive), TRITONS[1]])
def test_what_scores_need_is_loaded_before_they_are_there(triton):
    """Slopes once a tile, documents of keys while S is computed."""
    loops = answer_by(triton, BESIDE_SCORES)["loops"]
    for found in loops.values():
        assert not found["spill_bytes"] and not found["warnings"]
    assert not any(name.startswith("LDG") for name in loops["slopes"]["loop"])
    names = loops["documents"]["loop"]
    loads = [i for i, name in enumerate(names) if name.startswith("LDG")]
    waits = [i for i, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    assert loads and loads[-1] < waits[0]


def test_roles_that_the_kernel_does_not_have():
    with pytest.raises(ValueError, match="2 roles were named, the kernel branches to 0 besides the first"):
        list_by_role("", ("consumer", "producer"))


def test_registers_fit_the_file():
    for groups in (2, 3):
        config = Config(64, 64, groups, 128, 3)
        warpgroups = groups * config.consumer_registers + config.producer_registers
        assert 128 * warpgroups <= KNOWN["H200"].registers_per_sm


# ---- dispatch


def problem(**changes) -> AttentionProblem:
    plain = {"lengths": Dense(2, 512, 512), "heads_q": 4, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128}
    return AttentionProblem(**{**plain, "dtype": torch.bfloat16, "scale": 0.1, **changes})


def _not_after(batch, head, q_index, kv_index):
    return kv_index <= q_index


def _twice(score, batch, head, q_index, kv_index):
    return 2.0 * score


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float32}, "float16 and bfloat16, not float32"),
        ({"phase": "backward", "score": strobe.Score(function=_twice)}, "needs the derivative of the score function _twice"),
        ({"scale": -0.1}, "positive scale.*not -0.1"),
        ({"scale": 0.0}, "positive scale.*not 0"),
        ({"unaligned": ("k",)}, "multiples of 16 bytes.*which k lacks"),
        ({"lengths": Dense(1, 2**30, 4)}, "fewer than 2\\^30"),
    ],
)
def test_refusals(changes, reason):
    assert re.search(reason, backend.refuses(problem(**changes), KNOWN["H200"]))


@pytest.mark.parametrize(
    "changes",
    [
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
    ],
    ids=str,
)
def test_what_it_takes(changes):
    for phase in ("forward", "backward"):
        assert backend.refuses(problem(**changes, phase=phase), KNOWN["H200"]) is None
    config = backend.config(problem(**changes), KNOWN["H200"])
    assert config.smem_bytes() <= KNOWN["H200"].smem_per_block


def test_the_safe_softmax_by_choice_and_where_the_first_block_says_little():
    biased = problem(score=strobe.Score(bias=torch.zeros(1, 1, 512, 512)))
    assert backend.config(problem(), KNOWN["H200"]).optimistic
    assert backend.config(problem(mask=strobe.Document(torch.zeros(2, 512, dtype=torch.int32))), KNOWN["H200"]).optimistic
    assert not backend.config(problem(mask=strobe.Visible(_not_after)), KNOWN["H200"]).optimistic
    assert not backend.config(biased, KNOWN["H200"]).optimistic
    strobe.use_optimistic_softmax(False)
    try:
        assert not backend.config(problem(), KNOWN["H200"]).optimistic
    finally:
        strobe.use_optimistic_softmax(True)


def test_other_gpus_are_refused():
    for name in ("T4", "A100", "RTX 4090", "B200"):
        assert "needs a Hopper GPU" in backend.refuses(problem(), KNOWN[name])


# ---- on the GPU

HOPPER_CASES = [
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
    Case(700, 700, head_dim=192, head_dim_v=128, batch=5, mask="causal", packed=True),
    *(Case(700, 700, head_dim=128, mask="causal", logits=logits) for logits in (10.0, 100.0)),
    *(
        Case(2048 + 77, n_kv, batch=1, head_dim=64, mask=mask)
        for n_kv in (2100, 2300)
        for mask in ("causal", "window", "prefix")
    ),
    Case(3000, 100, heads_q=20, heads_kv=4, head_dim=64, mask="causal"),  # most tiles see nothing
    Case(100, 200, batch=40, heads_q=32, head_dim=64, mask="causal"),  # many tiles a CTA
    *(case for case in CASES if case.n_q and case.n_kv and case.batch and case.scale is None),
]


def forward(t, backend="sm90") -> Results:
    torch.manual_seed(SEED)
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend=backend, **t.keywords)
    return Results(out, lse, out, out, out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_reference(case, dtype):
    t = tensors(case, dtype, "cuda")
    check(forward(t), t, ("out", "lse"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in HOPPER_CASES if case.batch > 4 or case.head_dim in (64, 80)], ids=str)
def test_the_safe_softmax(case):
    strobe.use_optimistic_softmax(False)
    try:
        t = tensors(case, torch.bfloat16, "cuda")
        check(forward(t), t, ("out", "lse"))
    finally:
        strobe.use_optimistic_softmax(True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_a_call_that_trains(head_dim):
    """Forward and backward on Hopper's kernels, as dispatch picks them."""
    t = tensors(Case(300, 300, heads_q=4, heads_kv=2, head_dim=head_dim, mask="causal"), torch.bfloat16, "cuda")
    with_gradients = t.with_gradients()
    explanation = strobe.explain(with_gradients.q, with_gradients.k, with_gradients.v, **t.keywords)
    assert (explanation.chosen, explanation.backward.chosen) == ("sm90", "sm90")
    check(run(t, None), t)


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
def test_expanded_heads_are_refused_and_run_elsewhere():
    t = tensors(Case(64, 64, heads_q=4, heads_kv=4, head_dim=64), torch.bfloat16, "cuda")
    t = replace(t, k=t.k[:, :, :1].expand(-1, -1, 4, -1))
    with pytest.raises(ValueError, match="expanded with stride 0"):
        forward(t)
    check(forward(t, None), t, ("out", "lse"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_poison_reaches_only_rows_that_see_it(head_dim):
    """A NaN in v[j] under a causal mask: rows before j are as if it were not there, in the same tile too."""
    t = tensors(Case(500, 500, head_dim=head_dim, mask="causal"), torch.bfloat16, "cuda")
    clean = formula(t)
    t.v[:, 200] = float("nan")
    t.v[:, 499] = float("inf")
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, **t.keywords)
    torch.testing.assert_close(out[:, :200].double(), clean.out[:, :200], atol=2e-2, rtol=2e-2)
    assert out[:, 200:].isnan().all()
    torch.testing.assert_close(lse.double(), clean.lse, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_poison_beyond_the_ends():
    """q, k and v are slices of larger tensors full of NaN: nothing beyond their ends is read into a result."""
    t = tensors(Case(200, 333, head_dim=128, mask="full"), torch.bfloat16, "cuda")

    def framed(x):
        frame = torch.full((x.shape[0], x.shape[1] + 256, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
        frame[:, 128:-128] = x
        return frame[:, 128:-128]

    framed_t = replace(t, q=framed(t.q), k=framed(t.k), v=framed(t.v))
    assert torch.equal(forward(framed_t).out, forward(t).out)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 40, 96, 200])
def test_poison_beyond_the_columns(head_dim):
    """What lies beside the columns of q, k and v, up to the head dim that the kernel computes with, is not read."""
    t = tensors(Case(200, 333, head_dim=head_dim, mask="causal"), torch.bfloat16, "cuda")

    def framed(x):
        frame = torch.full((*x.shape[:-1], 256), float("nan"), dtype=x.dtype, device=x.device)
        frame[..., :head_dim] = x
        return frame[..., :head_dim]

    framed_t = replace(t, q=framed(t.q), k=framed(t.k), v=framed(t.v))
    assert torch.equal(forward(framed_t).out, forward(t).out)


@pytest.mark.gpu
def test_poison_between_sequences():
    """Rows of other sequences, and rows of none, are not read."""
    t = tensors(Case(300, 400, batch=5, head_dim=128, mask="causal", packed=True), torch.bfloat16, "cuda")
    want = forward(t)
    cu_q, cu_kv = (t.keywords[f"cu_seqlens_{x}"].tolist() for x in ("q", "kv"))
    for b in range(5):
        poisoned = replace(t, q=t.q.clone(), k=t.k.clone(), v=t.v.clone())
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        for x, own in ((poisoned.q, rows), (poisoned.k, keys), (poisoned.v, keys)):
            kept = x[own].clone()
            x.fill_(float("nan"))
            x[own] = kept
        got = forward(poisoned)
        assert torch.equal(got.out[rows], want.out[rows]) and torch.equal(got.lse[:, rows], want.lse[:, rows])


@pytest.mark.gpu
def test_a_graph_leaves_no_note_for_its_next_replay():
    """Replays with ordinary inputs, with some whose rows are redone, and with ordinary ones again."""
    cases = [Case(700, 700, heads_q=4, head_dim=64, mask="causal", logits=logits) for logits in (1.0, 300.0, 1.0)]
    inputs = [tensors(case, torch.float16, "cuda", seed) for seed, case in enumerate(cases)]
    static = replace(inputs[0], q=inputs[0].q.clone(), k=inputs[0].k.clone(), v=inputs[0].v.clone())
    forward(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(static)
    for _ in range(3):
        for t in inputs:
            for to, of in zip((static.q, static.k, static.v), (t.q, t.k, t.v), strict=True):
                to.copy_(of)
            graph.replay()
            want = forward(t)
            assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
            check(Results(got.out, got.lse), t, ("out", "lse"))


@pytest.mark.gpu
def test_redone_blocks_are_counted_and_workspaces_grow():
    """A small problem and then larger ones on one stream, whose notes need more room, none of which forgets the count."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for n, heads in ((300, 1), (1000, 2), (4000, 8)):
            t = tensors(Case(n, n, batch=1, heads_q=heads, heads_kv=heads, head_dim=64, logits=1.0), torch.float16, "cuda")
            before = strobe.redone_blocks()
            forward(t)
            assert strobe.redone_blocks() == before
            t.k[0, -1] = (
                100.0 * t.q[0, 70].sign()[: t.k.shape[2]]
            )  # the last key exceeds the first block in about half the rows
            got = forward(t)
            assert before < strobe.redone_blocks() <= before + heads * -(-n // 64)
            check(got, t, ("out", "lse"))


@pytest.mark.gpu
def test_repeats_bit_for_bit():
    t = tensors(Case(1500, 1500, batch=4, heads_q=8, heads_kv=8, head_dim=128, mask="causal"), torch.bfloat16, "cuda")
    first = forward(t)
    for _ in range(20):
        again = forward(t)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("backend_name", ["sm90", "portable"])
@pytest.mark.usefixtures("much_memory")
def test_past_two_to_the_31_elements(backend_name):
    """q holds 2.4e9 elements: the last rows are right only if offsets are 64-bit."""
    heads, head_dim, n = 16, 128, 1_180_000
    q = torch.empty(1, n, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    assert q.numel() > 2**31
    q[:, -64:] = torch.randn(1, 64, heads, head_dim, device="cuda")
    k, v = torch.randn(2, 1, 256, 1, head_dim, dtype=torch.bfloat16, device="cuda")
    q[:, :-64] = 0
    out = strobe.attention(q, k, v, backend=backend_name)
    last = strobe.attention(q[:, -64:].contiguous(), k, v, backend=backend_name)
    torch.testing.assert_close(out[:, -64:], last, atol=1e-2, rtol=1e-2)
    mean = v.float().mean(1, keepdim=True)
    torch.testing.assert_close(out[:, [0, n // 2]].float(), mean.expand(1, 2, heads, head_dim), atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_streams_do_not_disturb_each_other():
    cases = [
        tensors(Case(900, 900, heads_q=8, heads_kv=8, head_dim=128, mask="causal"), torch.bfloat16, "cuda", s) for s in (0, 1)
    ]
    want = [forward(t).out for t in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for t, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(forward(t).out)
    torch.cuda.synchronize()
    assert all(torch.equal(x, want[i % 2]) for i, x in enumerate(got))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("head_dim", [40, 128])
def test_tensors_on_another_gpu_than_the_current_one(head_dim):
    case = Case(300, 300, head_dim=head_dim, mask="causal")
    first, second = (tensors(case, torch.bfloat16, device) for device in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    want, got = run(first, None), run(second, None)
    for name in want.FIELDS:
        assert torch.equal(getattr(want, name).cpu(), getattr(got, name).cpu()), name
