"""The cost model against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

import strobe
from strobe.device import CPU, KNOWN
from strobe.lab.cost import Cost
from strobe.problem import AttentionProblem, Dense, Varlen


def problem(mask=None, lengths=None, **changes) -> AttentionProblem:
    base = AttentionProblem(
        lengths=lengths or Dense(2, 4, 8),
        heads_q=4,
        heads_kv=2,
        head_dim=16,
        head_dim_v=8,
        dtype=torch.bfloat16,
        scale=0.25,
        mask=mask or strobe.Full(),
    )
    return replace(base, **changes)


def test_forward_by_hand():
    cost = Cost(problem())
    assert cost.pairs == 2 * 4 * 8
    assert cost.flops == cost.quoted_flops == 4 * 64 * 2 * (16 + 8) == 12288
    assert cost.exponentials == 4 * 64
    # q 2*4*4*16, k 2*8*2*16, v 2*8*2*8 elements; out 2*4*4*8 elements and an LSE of 2*4*4 floats
    assert cost.bytes_read == (512 + 512 + 256) * 2
    assert cost.bytes_written == 256 * 2 + 32 * 4
    assert cost.intensity == 12288 / (2560 + 640)


def test_backward_by_hand():
    cost = Cost(problem(phase="backward"))
    assert cost.flops == 4 * 64 * 2 * (3 * 16 + 2 * 8)
    assert cost.bytes_read == (512 + 512 + 256 + 2 * 256) * 2 + 32 * 4
    assert cost.bytes_written == (512 + 512 + 256) * 2
    forward, backward = (Cost(problem(head_dim_v=16, phase=phase)).flops for phase in ("forward", "backward"))
    assert backward == 2.5 * forward


def test_causal_is_exact_and_quoted_as_half():
    # bottom-right: 4 queries, 8 keys see 5 + 6 + 7 + 8 = 26 of 32 pairs
    cost = Cost(problem(strobe.Causal()))
    assert cost.pairs == 2 * 26
    assert cost.flops == 4 * 52 * 2 * 24
    assert cost.quoted_flops == 12288 // 2


def test_window_is_exact():
    # positions 4..7 see the keys p-1, p, p+1; the last one has no p+1
    cost = Cost(problem(strobe.Window(1, 1)))
    assert cost.pairs == 2 * (3 + 3 + 3 + 2)
    assert cost.quoted_flops == cost.flops


def test_full_attention_has_the_fields_count():
    p = problem(lengths=Dense(2, 1024, 1024), heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128)
    assert Cost(p).flops == 4 * 2 * 16 * 1024 * 1024 * 128


def test_matmul_binds_a_long_prompt_on_an_h200():
    p = problem(lengths=Dense(1, 16384, 16384), heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128)
    bound = Cost(p).lower_bound(KNOWN["H200"])
    pairs = 16 * 16384**2
    assert bound.tensor == pytest.approx(pairs * 512 / 989.4e12)
    assert bound.exp2 == pytest.approx(pairs / (16 * 132 * 1.83e9))
    assert bound.hbm == pytest.approx((4 * 16384 * 2048 * 2 + 16 * 16384 * 4) / 4.8e12)
    assert bound.binds == "matmul" and bound.seconds == bound.tensor
    assert str(bound) == "2.22 ms, bound by matmul (matmul 2.22 ms, exp2 1.11 ms, HBM 56.1 us)"


def test_memory_binds_decode_and_exp2_a_small_head():
    decode = problem(lengths=Dense(8, 1, 4096), heads_q=32, heads_kv=8, head_dim=128, head_dim_v=128)
    assert Cost(decode).lower_bound(KNOWN["H200"]).binds == "HBM"
    small = problem(lengths=Dense(1, 8192, 8192), heads_q=8, heads_kv=8, head_dim=32, head_dim_v=32)
    assert Cost(small).lower_bound(KNOWN["H200"]).binds == "exp2"


def test_float32_runs_at_the_rate_of_the_cuda_cores():
    arch = KNOWN["A100"]
    bound = Cost(problem(dtype=torch.float32)).lower_bound(arch)
    assert bound.tensor == pytest.approx(12288 / arch.fp32_flops)


@pytest.mark.parametrize(
    "arch, dtype, words",
    [
        (KNOWN["T4"], torch.bfloat16, r"T4 \(sm_75\) for bfloat16"),
        (KNOWN["H200"], torch.float64, "float64"),
        (CPU, torch.float32, "CPU for float32"),
    ],
)
def test_unknown_rates_are_refused(arch, dtype, words):
    with pytest.raises(ValueError, match=words):
        Cost(problem(dtype=dtype)).lower_bound(arch)


def test_packed_sequences_are_refused():
    with pytest.raises(ValueError, match="must be dense"):
        Cost(problem(lengths=Varlen(2, 10, 10, 8, 8)))


def test_nothing_costs_nothing():
    cost = Cost(problem(lengths=Dense(0, 4, 8)))
    assert cost.flops == cost.exponentials == 0 and cost.intensity == 0.0
