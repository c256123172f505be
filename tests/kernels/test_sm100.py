"""The Blackwell forward: what the compiler makes of it, what it keeps where, who may run it. No GPU needed."""

import json
import re
from dataclasses import replace

import pytest
import torch
from problems import Case, Results, check, describe, formula, tensors
from tritons import answer_by, needs_tcgen05
from typer.testing import CliRunner

import strobe
from strobe.call import launches
from strobe.call.dispatch import explain_problem, select
from strobe.call.options import describe as problem_described
from strobe.call.options import operands_of
from strobe.device import KNOWN
from strobe.kernels.memory_map import Buffer, Columns, lines
from strobe.kernels.sm100 import backend
from strobe.kernels.sm100.config import HEAD_DIMS, Config, choose
from strobe.problem import AttentionProblem, Dense, Varlen
from strobe.sim import simulate
from strobe_cli.app import app

B200 = KNOWN["B200"]

pytestmark = needs_tcgen05

# ---- offline: the compiler's own numbers, on the oldest Triton that can and on the installed one

AUDIT = """
import dataclasses, json, sys, torch, triton
from strobe.lab.binary.offline import audit_sm100_forward
from strobe.masks import Causal, Full
problems = (
    ((128, 128), True, torch.bfloat16, 4096), ((128, 128), False, torch.float16, 4096),
    ((64, 64), True, torch.float16, 1000), ((96, 96), True, torch.bfloat16, 1000),
    ((192, 128), True, torch.bfloat16, 4096),
)
which = json.loads(sys.argv[1])
audits = [
    {"head_dims": dims, "causal": causal,
     **dataclasses.asdict(audit_sm100_forward(dims, Causal() if causal else Full(), dtype, length))}
    for dims, causal, dtype, length in (problems if which is None else [problems[i] for i in which])
]
print(json.dumps({"triton": triton.__version__, "audits": audits}))
"""

AUDIT_OTHERS = """
import json, triton
from strobe.lab.binary.offline import audit_sm100_forward
from strobe.masks import Causal, Full
cases = [*(((dim, 128 if dim == 192 else dim), False, {}) for dim in (64, 96, 128, 192)),
         ((128, 128), False, {"splits": 4}), ((192, 128), True, {"splits": 4}),
         ((128, 128), False, {"two_ctas": True}), ((128, 128), True, {"two_ctas": True})]
def one(dims, causal, changes):
    audit = audit_sm100_forward(dims, Causal() if causal else Full(), **changes)
    owners = {name: [role for role, counts in audit.roles.items() if name in counts] for name in ("UTCHMMA", "UTMALDG")}
    name = f"{dims} {'causal' if causal else 'full'} {changes}"
    return name, "two_ctas" in changes and causal, audit.spill_bytes, owners
audits = [one(*case) for case in cases]
print(json.dumps({"triton": triton.__version__, "audits": audits}))
"""


AUDITED = [
    pytest.param(("installed Triton", (0, 2)), id="some, installed Triton"),
    *(
        pytest.param((triton, None), id=f"all, {triton}", marks=pytest.mark.exhaustive)
        for triton in ("Triton 3.8", "installed Triton")
    ),
]
"""By which Triton which problems are compiled; None: all."""


@pytest.fixture(scope="module", params=AUDITED)
def audits(request):
    triton, which = request.param
    return answer_by(triton, AUDIT, json.dumps(which))["audits"]


@pytest.fixture(scope="module", params=[pytest.param("Triton 3.8", marks=pytest.mark.exhaustive), "installed Triton"])
def other_audits(request):
    return answer_by(request.param, AUDIT_OTHERS)["audits"]


def config_of(audit) -> Config:
    head_dim, head_dim_v = audit["head_dims"]
    return choose(problem(head_dim=head_dim, head_dim_v=head_dim_v))


def test_shared_memory_is_what_config_says(audits):
    for audit in audits:
        excess = audit["smem_bytes"] - config_of(audit).smem_bytes()
        assert 0 <= excess <= 768, audit["name"]
        assert audit["smem_bytes"] <= B200.smem_per_block


def test_nothing_spills(audits):
    for audit in audits:
        spilling = {role: counts.get("STL", 0) + counts.get("LDL", 0) for role, counts in audit["roles"].items()}
        assert audit["spill_bytes"] == 0, (audit["name"], spilling)


@pytest.mark.exhaustive
def test_other_configs(other_audits):
    """Two CTAs under a mask keep two words of the kernel's start in local memory; each role loads them before its loop."""
    for name, two_ctas_masked, spilled, owners in other_audits:
        assert spilled <= (56 if two_ctas_masked else 0), (name, spilled)
        assert owners == {"UTCHMMA": ["mma"], "UTMALDG": ["load"]}, (name, owners)


def test_roles_do_their_own_work_only(audits):
    """Of the instructions that matter, who has them: tensor cores, TMA loads and stores, tensor memory, exponentials."""
    owners = {
        "UTCHMMA": {"mma"},
        "UTMALDG": {"load"},
        "UTMASTG": {"epilogue"},
        "LDTM": {"softmax 0", "softmax 1", "correction"},
        "STTM": {"softmax 0", "softmax 1", "correction"},
        "MUFU.EX2": {"softmax 0", "softmax 1"},
    }
    for audit in audits:
        for instruction, expected in owners.items():
            found = {role for role, counts in audit["roles"].items() if instruction in counts}
            assert found == expected, (audit["name"], instruction)


def test_products_and_copies_are_all_there(audits):
    for audit in audits:
        config, counts = config_of(audit), audit["instructions"]
        # Products of 16 in K: S takes head_dim / 16 for each stage; O tile_kv / 16 for each stage and chunk of head_dim_v.
        step = config.q_stages * (config.head_dim // 16 + len(config.chunks_v) * config.tile_kv // 16)
        assert counts["UTCHMMA"] >= step, audit["name"]
        assert counts["UTMALDG"] >= len(config.chunks) * (config.q_stages + 1) + len(config.chunks_v), audit["name"]
        assert not audit["warnings"], audit["warnings"]


def test_exponentials_are_shared_by_two_pipes(audits):
    """Of each 16 exponentials in the middle half of a block, `emulated` are polynomials: they are not in MUFU.EX2."""
    for audit in audits:
        config = config_of(audit)
        for role in ("softmax 0", "softmax 1"):
            special = config.tile_kv - config.tile_kv // 2 * config.emulated // 16
            assert special <= audit["roles"][role]["MUFU.EX2"] <= special + 2, (audit["name"], role)
            assert audit["roles"][role]["FFMA2"]


# ---- memory


def problem(**changes) -> AttentionProblem:
    plain = {"lengths": Dense(2, 4096, 4096), "heads_q": 64, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
    return AttentionProblem(**{**plain, "dtype": torch.bfloat16, "scale": 0.1, **changes})


def test_memory_of_two_ctas_at_head_dim_128():
    """The layouts of FlashAttention-4's forward at these parameters, as CuTe prints them."""
    config = Config(128, 128, q_stages=2, tile_kv=128, kv_stages=6, two_ctas=True)
    assert config.smem_map()[:5] == [
        Buffer("sQ", ((128, 16), 1, (4, 2), 2), 64 << 10),
        Buffer("sK", ((64, 16), 1, (4, 2), 6), 96 << 10),
        Buffer("sV", ((64, 16), 1, 8, 6), 96 << 10, over="sK"),
        Buffer("sO", ((8, 16), (64, 2), (1, 2)), 64 << 10),
        Buffer("sScale", (2, 2, 128), 4 * 2 * 128 * 2),
    ]
    assert config.tmem_map() == [
        *(Columns("S0", 0, 128), Columns("S1", 128, 128)),
        *(Columns("P0", 64, 64), Columns("P1", 192, 64)),
        *(Columns("O0", 256, 128), Columns("O1", 384, 128)),
    ]
    assert config.tmem_columns() == 512
    assert config.smem_bytes() <= B200.smem_per_block


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("two_ctas", [False, True], ids=["1 CTA", "2 CTAs"])
def test_shapes_hold_as_many_elements_as_their_bytes(dims, two_ctas):
    config = replace(Config(*dims, kv_stages=2), two_ctas=two_ctas)
    for buffer in config.smem_map():
        size = {"sScale": 4, "barriers": 8}.get(buffer.name, 2)
        assert size * _product(buffer.shape) == buffer.bytes, buffer


def _product(shape) -> int:
    total = 1
    for part in shape:
        total *= _product(part) if isinstance(part, tuple) else part
    return total


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_maps_do_not_overlap_unless_they_say_so(dims):
    config = choose(problem(head_dim=dims[0], head_dim_v=dims[1]))
    names = {buffer.name for buffer in config.smem_map()}
    assert all(not buffer.over or buffer.over in names for buffer in config.smem_map())
    ranges = [columns for columns in config.tmem_map() if not columns.name.startswith("P")]
    taken = [column for columns in ranges for column in range(columns.first, columns.last + 1)]
    assert len(taken) == len(set(taken)) and max(taken) < B200.tmem_columns
    for p in config.tmem_map():
        if p.name.startswith("P"):
            assert [s.name for s in ranges if s.covers(p)] == [p.name.replace("P", "S")]


def test_explain_prints_the_maps():
    options = ["--arch", "B200", "--backend", "sm100", "--config", "kv_stages=6,two_ctas=true"]
    result = CliRunner().invoke(app, ["explain", *options])
    assert result.exit_code == 0, result.output
    words = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "shared sV ((64,16), 1, 8, 6) in sK" in words
    assert "shared sO ((8,16), (64,2), (1,2)) 65536 bytes" in words
    assert "tensor P1 columns 192 to 255 in S1" in words
    assert "512 columns of tensor memory" in result.output


@pytest.mark.parametrize(
    "change, words",
    [
        ("kv_stages=9", "a CTA has 232448 bytes of shared memory"),
        ("head_dim=64", "NAME of q_stages"),
        ("two_ctas=1", "two_ctas must be of type bool, got '1'"),
        ("kv_stages=x", "kv_stages must be of type int, got 'x'"),
    ],
)
def test_a_config_that_cannot_be_is_one_sentence(change, words):
    result = CliRunner().invoke(app, ["explain", "--arch", "B200", "--backend", "sm100", "--config", change])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert words in " ".join(result.output.replace("│", "").split())


def test_a_cpu_has_no_config_to_change():
    result = CliRunner().invoke(app, ["explain", "--arch", "CPU", "--config", "kv_stages=6"])
    assert result.exit_code == 2 and "no config to change" in " ".join(result.output.replace("│", "").split())


def test_a_hopper_config_has_a_map_too():
    config = explain_problem(problem(), KNOWN["H200"]).config
    assert sum(buffer.bytes for buffer in config.smem_map() if not buffer.over) == config.smem_bytes()
    buffers = config.q_stages * config.groups
    assert lines(config)[0].split() == ["shared", "sQ", f"({buffers},", "64,", "128)", f"{buffers * 64 * 128 * 2}", "bytes"]


# ---- dispatch


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float32}, "float16 and bfloat16, not float32"),
        ({"head_dim": 256, "head_dim_v": 256}, "head dims 64, 96 and 128.*not 256 and 256"),
        ({"head_dim_v": 64}, "not 128 and 64"),
        ({"phase": "backward"}, "no backward"),
        ({"score": strobe.Score(softcap=3.0)}, "no score but the plain one yet, not softcap"),
        ({"scale": -0.1}, "positive scale.*not -0.1"),
        ({"scale": float("nan")}, "positive scale.*not nan"),
        ({"unaligned": ("k", "v")}, "multiples of 16 bytes.*which k, v lacks"),
        ({"mask": strobe.Document(torch.zeros(2, 4096, dtype=torch.int32))}, "no documents"),
        ({"lengths": Dense(1, 1, 1 << 30)}, "fewer than 2\\^30"),
        ({"lengths": Varlen(2, 1 << 30, 10, 5, 5)}, "fewer than 2\\^30"),
    ],
)
def test_refusals(changes, reason):
    assert backend.refuses(problem(), B200) is None
    assert re.search(reason, backend.refuses(problem(**changes), B200))


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("mask", [strobe.Full(), strobe.Causal(), strobe.Window(100, 3), strobe.Prefix(7)], ids=str)
def test_accepts(dims, mask):
    for capability in (100, 103):
        assert (
            backend.refuses(problem(head_dim=dims[0], head_dim_v=dims[1], mask=mask), replace(B200, capability=capability))
            is None
        )


def test_accepts_packed_sequences():
    assert backend.refuses(problem(lengths=Varlen(2, 10, 10, 5, 5)), B200) is None


def test_other_gpus_are_refused():
    for name in ("T4", "A100", "RTX 4090", "H200", "RTX 5090"):
        assert "needs a data-center Blackwell GPU" in backend.refuses(problem(), KNOWN[name])


def test_an_old_triton_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "triton_version", lambda: (3, 7))
    assert backend.refuses(problem(), B200) == "needs Triton 3.8 or newer, not 3.7"
    assert "Hopper" not in backend.refuses(problem(), B200)
    assert explain_problem(problem(), B200).chosen == "portable"


def test_it_runs_by_name_only_and_says_why():
    chosen = explain_problem(problem(), B200)
    assert chosen.chosen == "portable" and chosen.warning is None
    assert dict(chosen.refusals)["sm100"] == (
        "compiled and simulated, never yet run on a Blackwell GPU, so it runs only by name: backend='sm100'"
    )
    assert select(problem(), B200).__name__.endswith("portable.backend")
    asked = explain_problem(problem(), B200, "sm100")
    assert asked.chosen == "sm100"
    assert "warning   compiled and simulated, never yet run on a Blackwell GPU" in str(asked)
    assert select(problem(), B200, "sm100") is backend


def test_a_refusal_of_its_own_comes_first():
    assert dict(explain_problem(problem(dtype=torch.float32), B200).refusals)["sm100"].startswith("takes float16")


def test_the_backward_runs_elsewhere():
    explanation = explain_problem(problem(phase="backward"), B200)
    assert explanation.chosen == "portable" and dict(explanation.refusals)["sm100"] == "has no backward yet"
    with pytest.raises(ValueError, match="'sm100' has no backward"):
        x = torch.zeros(1, 8, 1, 64, requires_grad=True)
        strobe.attention(x, x, x, backend="sm100")


def test_no_keys_or_no_queries_launch_nothing():
    for case in (Case(5, 0, head_dim=64), Case(0, 5, head_dim=64), Case(5, 5, batch=0, head_dim=192, head_dim_v=128)):
        described, operands = describe(tensors(case, torch.bfloat16))
        out, lse = launches.forward(backend, described, operands)
        assert out.shape == (*operands.q.shape[:-1], case.head_dim_v or 64) and not out.any()
        assert lse.shape == (case.batch, case.heads_q, case.n_q) and lse.isneginf().all()


# ---- splits


def splits(n_q: int, n_kv: int, batch: int = 1, heads: int = 8, **changes) -> int:
    lengths = Dense(batch, n_q, n_kv)
    return backend.config(problem(lengths=lengths, heads_q=heads, heads_kv=1, **changes), B200).splits


def test_few_queries_of_many_keys_are_split():
    assert splits(1, 65536) > 8
    assert splits(4096, 4096, batch=2, heads=64) == 1
    assert splits(1, 128) == 1
    assert splits(0, 65536) == splits(1, 0) == 1


def test_what_a_mask_hides_is_not_counted():
    assert splits(1, 65536, mask=strobe.Window(200, 0)) == 1
    assert splits(1, 65536, mask=strobe.Causal()) == splits(1, 65536)


# ---- all of it, the Gluon kernel in the simulator and the Triton kernels in Triton's interpreter


@pytest.fixture
def simulated(monkeypatch):
    """On tensors of the CPU, the backend's forward runs as on a B200."""
    from strobe.kernels.sm100 import launch as host

    kernel = host.forward_kernel

    class Simulated:
        def __getitem__(self, grid):
            return lambda *args, **options: simulate(kernel, grid, *args, arch=100, rewritable=("notes",), **options)

    monkeypatch.setattr(host, "forward_kernel", Simulated())
    monkeypatch.setattr(launches, "arch_of", lambda device: B200)


WHOLE = (
    Case(150, 150, batch=1, head_dim=64, mask="causal"),
    Case(3, 900, batch=1, heads_q=2, heads_kv=1, head_dim=64),  # in 8 parts
    Case(3, 900, batch=1, head_dim=192, head_dim_v=128, mask="causal"),
    Case(70, 140, batch=3, packed=True, head_dim=64),
    Case(70, 140, batch=3, packed=True, head_dim=96, mask="causal"),
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


@without_gpu
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_the_whole_forward(simulated, case):
    t = tensors(case, torch.float16)
    out, lse = launches.forward(backend, *describe(t))
    check(Results(out, lse, out, out, out), t, ("out", "lse"))


@without_gpu
def test_the_whole_forward_splits_where_it_should():
    assert backend.config(describe(tensors(WHOLE[1], torch.float16))[0], B200).splits == 8


@without_gpu
@pytest.mark.parametrize("case", [WHOLE[0], WHOLE[2]], ids=str)
def test_a_nan_in_a_masked_value_is_redone(simulated, case):
    """Of the last key, which the last row alone sees."""
    t = tensors(case, torch.float16)
    clean = formula(t)
    t.v[:, -1] = torch.nan
    out, lse = launches.forward(backend, *describe(t))
    torch.testing.assert_close(out[:, :-1].double(), clean.out[:, :-1], atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(lse.double(), clean.lse, atol=1e-4, rtol=1e-4)
    assert out[:, -1].isnan().all()


@without_gpu
@pytest.mark.parametrize("mask", [strobe.Full(), strobe.Causal()], ids=str)
def test_a_nan_of_a_neighbour_is_not_read(simulated, mask):
    """In packed values: sequence 1 is NaN altogether, the others do not see it; rows of no sequence are 0 and -inf."""
    lengths = torch.tensor([0, 40, 70, 150], dtype=torch.int32)
    q, k, v = torch.randn(3, 160, 1, 64, dtype=torch.float16, generator=torch.Generator().manual_seed(0))
    keywords = dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=80, max_seqlen_kv=80, mask=mask)
    want, want_lse = strobe.attention(q, k, v, return_lse=True, backend="tiled", **keywords)
    v[40:70] = torch.nan
    options = strobe.arguments.options_of(q, k, v, **keywords)
    operands = operands_of(q, k, v, options)
    out, lse = launches.forward(backend, problem_described(operands, options), operands)
    assert out[40:70].isnan().all()
    out[40:70] = want[40:70]
    torch.testing.assert_close(out, want, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)
    assert not out[150:].any() and lse[:, 150:].isneginf().all()


# ---- on a Blackwell GPU: what must pass before `backend.unproven` may go

on_blackwell = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10, reason="needs a Blackwell GPU (sm_100)"
)
BLACKWELL_CASES = [
    Case(n_q, n_kv, heads_q=heads_q, heads_kv=heads_kv, head_dim=dim, head_dim_v=dim_v, mask=mask)
    for dim, dim_v in HEAD_DIMS
    for mask in ("full", "causal", "window", "prefix")
    for n_q, n_kv, heads_q, heads_kv in ((512, 512, 4, 4), (1, 300, 4, 1), (333, 777, 4, 2), (777, 333, 2, 2), (1, 9000, 1, 1))
]


def forward(t) -> Results:
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend="sm100", **t.keywords)
    return Results(out, lse, out, out, out)


@pytest.mark.gpu
@on_blackwell
@pytest.mark.parametrize("case", BLACKWELL_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_reference(case, dtype):
    t = tensors(case, dtype, "cuda")
    check(forward(t), t, ("out", "lse"))


@pytest.mark.gpu
@on_blackwell
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_poison_reaches_only_rows_that_see_it(dims):
    t = tensors(Case(500, 500, head_dim=dims[0], head_dim_v=dims[1], mask="causal"), torch.bfloat16, "cuda")
    clean = formula(t)
    t.v[:, 200] = float("nan")
    got = forward(t)
    torch.testing.assert_close(got.out[:, :200].double(), clean.out[:, :200], atol=2e-2, rtol=2e-2)
    assert got.out[:, 200:].isnan().all()
    torch.testing.assert_close(got.lse.double(), clean.lse, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@on_blackwell
def test_repeats_bit_for_bit():
    t = tensors(Case(3000, 3000, batch=4, heads_q=8, heads_kv=8, head_dim=128, mask="causal"), torch.bfloat16, "cuda")
    first = forward(t)
    for _ in range(20):
        again = forward(t)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)
