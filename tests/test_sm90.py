"""The Hopper forward: what the compiler makes of it (no GPU needed), and on a GPU what it computes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import Case, Results, check, formula, run, tensors

import strobe
from strobe.device import KNOWN
from strobe.kernels.sm90 import backend
from strobe.kernels.sm90.config import Config, choose
from strobe.lab.sass import list_by_role
from strobe.problem import AttentionProblem, Dense

OLDEST_TRITON = Path(sys.prefix) / "triton-3.6"

# ---- offline: the compiler's own numbers, on the oldest and on the installed Triton

AUDIT = """
import dataclasses, itertools, json, torch, triton
from strobe.lab.offline import audit_sm90_forward
audits = [
    {"head_dim": d, "causal": c, "length": length, **dataclasses.asdict(audit_sm90_forward(d, c, dtype, length))}
    for d, c, dtype, length in (
        (64, False, torch.bfloat16, 4096), (64, True, torch.float16, 4096), (64, True, torch.bfloat16, 1000),
        (128, False, torch.float16, 4096),
        (128, True, torch.bfloat16, 4096), (128, False, torch.bfloat16, 1000), (256, False, torch.bfloat16, 4096),
        (256, True, torch.bfloat16, 1000),
    )
]
print(json.dumps({"triton": triton.__version__, "audits": audits}))
"""


@pytest.fixture(scope="module", params=["oldest Triton", "installed Triton"])
def audits(request):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if request.param == "oldest Triton":
        if not OLDEST_TRITON.exists():
            pytest.skip("`make test` installs Triton 3.6 in .venv/triton-3.6; it is not there")
        environment["PYTHONPATH"] = str(OLDEST_TRITON)
    done = subprocess.run([sys.executable, "-c", AUDIT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (request.param == "oldest Triton") == result["triton"].startswith("3.6")
    return result["audits"]


def config_of(audit) -> Config:
    mask = strobe.Causal() if audit["causal"] else strobe.Full()
    lengths = Dense(1, audit["length"], audit["length"])
    return choose(problem(lengths=lengths, head_dim=audit["head_dim"], head_dim_v=audit["head_dim"], mask=mask))


def test_shared_memory_is_what_config_says(audits):
    for audit in audits:
        excess = audit["smem_bytes"] - config_of(audit).smem_bytes()
        assert 0 <= excess <= 512, audit["name"]
        assert audit["smem_bytes"] <= KNOWN["H200"].smem_per_block


def test_spills(audits):
    """At head dim 64 with 3 groups, which have 160 registers a thread, the newest Triton spills up to 14 of them."""
    for audit in audits:
        assert audit["spill_bytes"] <= (112 if config_of(audit).groups == 3 else 0), audit["name"]
        moves = sum(counts.get("LDL", 0) + counts.get("STL", 0) for counts in audit["roles"].values())
        assert audit["spill_bytes"] == 4 * moves, audit["name"]  # so they were counted in the code that runs


def test_tensor_cores_run_unhindered(audits):
    for audit in audits:
        counts, config = audit["instructions"], config_of(audit)
        assert not audit["warnings"], audit["warnings"]  # ptxas's C75xx: a wgmma made serial
        # Products of 16 in K: S takes head_dim / 16 of them and P V tile_kv / 16; each stands in the loop and outside it.
        expected = 2 * (config.head_dim // 16 + config.tile_kv // 16)
        copies = counts["HGMMA"] / expected
        assert 2 <= copies <= 3, (audit["name"], copies)  # groups; the compiler may merge two of three
        assert counts["UTMALDG"] and counts["UTMASTG"]
        # One exponential a score: 2 scores a lane and 8 keys, and 2 rows to rescale.
        assert counts["MUFU.EX2"] >= config.groups * 2 * config.tile_kv // 2


def test_roles_do_their_own_work_only(audits):
    for audit in audits:
        *consumers, producer = audit["roles"].values()
        assert list(audit["roles"]) == [*(f"consumer {w}" for w in range(config_of(audit).groups)), "producer"]
        assert producer["UTMALDG"] and not {"HGMMA", "MUFU.EX2", "UTMASTG"} & set(producer), audit["name"]
        for counts in consumers:
            assert counts["HGMMA"] and counts["MUFU.EX2"] and counts["UTMASTG"] and "UTMALDG" not in counts, audit["name"]


def test_roles_that_the_kernel_does_not_have():
    with pytest.raises(ValueError, match="2 roles were named, the kernel branches to 0 besides the first"):
        list_by_role("", ("consumer", "producer"))


def test_registers_fit_the_file():
    for groups in (2, 3):
        config = Config(64, groups=groups, tile_kv=128, num_stages=3)
        warpgroups = groups * config.consumer_registers + config.producer_registers
        assert 128 * warpgroups <= KNOWN["H200"].registers_per_sm


# ---- dispatch


def problem(**changes) -> AttentionProblem:
    plain = {"lengths": Dense(2, 512, 512), "heads_q": 4, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128}
    return AttentionProblem(**{**plain, "dtype": torch.bfloat16, "scale": 0.1, **changes})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float32}, "float16 and bfloat16, not float32"),
        ({"head_dim": 96, "head_dim_v": 96}, "head dims 64, 128 and 256"),
        ({"head_dim_v": 64}, "the same for k and v"),
        ({"phase": "backward"}, "no backward"),
        ({"score": strobe.Score(softcap=3.0)}, "no score but the plain one yet, not softcap"),
        ({"scale": -0.1}, "positive scale.*not -0.1"),
        ({"scale": 0.0}, "positive scale.*not 0"),
        ({"unaligned": ("k",)}, "multiples of 16 bytes.*which k lacks"),
        ({"mask": strobe.Document(torch.zeros(2, 512, dtype=torch.int32))}, "no documents"),
    ],
)
def test_refusals(changes, reason):
    hopper = KNOWN["H200"]
    assert backend.refuses(problem(), hopper) is None
    assert re.search(reason, backend.refuses(problem(**changes), hopper))


def test_other_gpus_are_refused():
    for name in ("T4", "A100", "RTX 4090", "B200"):
        assert "needs a Hopper GPU" in backend.refuses(problem(), KNOWN[name])


# ---- on the GPU

HOPPER_CASES = [
    Case(n_q, n_kv, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, mask=mask)
    for head_dim in (64, 128, 256)
    for mask in ("full", "causal", "window", "prefix")
    for n_q, n_kv, heads_q, heads_kv in ((512, 512, 4, 4), (1, 300, 4, 1), (333, 777, 4, 2), (777, 333, 2, 2), (1, 1, 1, 1))
] + [
    *(Case(700, 700, head_dim=128, mask="causal", logits=logits) for logits in (10.0, 100.0)),
    *(
        Case(2048 + 77, n_kv, batch=1, head_dim=64, mask=mask)
        for n_kv in (2100, 2300)
        for mask in ("causal", "window", "prefix")
    ),
]


def forward(t, backend="sm90") -> Results:
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend=backend, **t.keywords)
    return Results(out, lse, out, out, out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_reference(case, dtype):
    t = tensors(case, dtype, "cuda")
    check(forward(t), t, ("out", "lse"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_call_that_trains(head_dim):
    """Forward on Hopper's kernel and backward on the portable one, as dispatch picks them."""
    t = tensors(Case(300, 300, heads_q=4, heads_kv=2, head_dim=head_dim, mask="causal"), torch.bfloat16, "cuda")
    with_gradients = t.with_gradients()
    explanation = strobe.explain(with_gradients.q, with_gradients.k, with_gradients.v, **t.keywords)
    assert (explanation.chosen, explanation.backward.chosen) == ("sm90", "portable")
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
@pytest.mark.parametrize("head_dim", [64, 128, 256])
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
def test_repeats_bit_for_bit():
    t = tensors(Case(1500, 1500, batch=4, heads_q=8, heads_kv=8, head_dim=128, mask="causal"), torch.bfloat16, "cuda")
    first = forward(t)
    for _ in range(20):
        again = forward(t)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("backend_name", ["sm90", "portable"])
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
