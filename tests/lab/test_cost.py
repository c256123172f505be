"""The cost model against numbers worked out by hand."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import strobe
from strobe.device import CPU, KNOWN
from strobe.lab.model.cost import Cost, Standard, Tile, Tiling, matmul_rate
from strobe.problem import AttentionProblem, Dense, Varlen
from strobe_cli.app import app


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


def test_e4m3_inputs_have_a_byte_and_out_has_two():
    cost, standard = (kind(problem(dtype=torch.float8_e4m3fn)) for kind in (Cost, Standard))
    assert cost.flops == Cost(problem()).flops and cost.bytes_read == 512 + 512 + 256
    assert cost.bytes_written == 256 * 2 + 32 * 4 and cost.intensity == 12288 / (1280 + 640)
    assert standard.matrix_bytes == 4 * 64 and standard.bytes_written == 256 * 2 + 2 * 256
    assert Tiling(problem(dtype=torch.float8_e4m3fn), 4, 8).bytes_loaded == 512 + 2 * 4 * 8 * (16 + 8)


@pytest.mark.parametrize("arch, tflops", [("L4", 242), ("H100", 1978.8), ("H200", 1978.8), ("B200", 4500), ("RTX 5090", 419)])
def test_fp8_has_twice_the_products_of_16_bits(arch, tflops):
    """Of the data sheets, dense."""
    assert matmul_rate(KNOWN[arch], torch.float8_e4m3fn) == pytest.approx(tflops * 1e12)


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


def test_float32_runs_at_the_rate_of_three_products_of_tf32_or_of_the_cuda_cores():
    """TF32 has half the rate of 16 bits."""
    for name, rate in (("A100", KNOWN["A100"].tensor_flops / 6), ("RTX 4090", KNOWN["RTX 4090"].fp32_flops)):
        bound = Cost(problem(dtype=torch.float32)).lower_bound(KNOWN[name])
        assert bound.tensor == pytest.approx(12288 / rate)


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


# ---- the softmax's FLOPs, and standard attention


def square(length: int, **changes) -> AttentionProblem:
    return problem(lengths=Dense(1, length, length), heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128, **changes)


def test_softmax_is_five_a_visible_pair():
    causal = problem(strobe.Causal())
    assert Cost(causal).softmax_flops == 5 * 4 * 52 == Cost(replace(causal, phase="backward")).softmax_flops


def test_standard_attention_by_hand():
    standard = Standard(problem(strobe.Causal()))
    assert standard.pairs == 2 * 4 * 8  # the mask hides pairs; it does not save them
    assert standard.matrix_bytes == 4 * 64 * 2
    assert standard.flops == 12288 and standard.exponentials == 4 * 64 and standard.softmax_flops == 6 * 4 * 64
    # as flash attention's, without the LSE: S is written and read, P is written and read
    assert standard.bytes_read == (512 + 512 + 256) * 2 + 2 * 512
    assert standard.bytes_written == 256 * 2 + 2 * 512
    assert standard.passes == 4


def test_standard_backward_by_hand():
    standard = Standard(problem(phase="backward"))
    assert standard.flops == 4 * 64 * 2 * (2 * 16 + 2 * 8)  # four products of P's shape, none to find P again
    assert standard.exponentials == 0 and standard.softmax_flops == 4 * 4 * 64
    # dV = P^T dO; dP = dO V^T; dS of P and dP; dQ = dS K and dK = dS^T Q
    assert standard.bytes_read == (512 + 512 + 256 + 2 * 256) * 2 + 5 * 512
    assert standard.bytes_written == (512 + 512 + 256) * 2 + 2 * 512
    assert standard.passes == 7


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_without_the_score_matrix_the_bottleneck_moves_from_memory_to_the_tensor_cores(phase):
    long = square(16384, phase=phase)
    standard, flash = Standard(long), Cost(long)
    assert standard.lower_bound(KNOWN["A100"]).binds == "HBM" and flash.lower_bound(KNOWN["A100"]).binds == "matmul"
    assert flash.intensity > 50 * standard.intensity
    ridge = KNOWN["A100"].tensor_flops / KNOWN["A100"].dram_bandwidth
    assert standard.intensity < ridge < flash.intensity


def test_recomputing_the_scores_costs_a_quarter_more_flops_and_a_hundredth_of_the_traffic():
    standard, flash = (cost(square(16384, phase="backward")) for cost in (Standard, Cost))
    assert flash.flops == 1.25 * standard.flops
    assert flash.bytes_read + flash.bytes_written < 0.01 * (standard.bytes_read + standard.bytes_written)


def test_standard_intensity_does_not_grow_with_the_length():
    # 2 (D + Dv) FLOPs for two elements written and two read: D + Dv over 4 in 16 bits, less Q, K, V and O
    lengths = (1024, 4096, 16384)
    standard, flash = ([cost(square(n)).intensity for n in lengths] for cost in (Standard, Cost))
    assert standard == sorted(standard) and standard[-1] < (128 + 128) / 4
    assert flash[-1] / flash[0] == pytest.approx(16)


# ---- tile by tile


ELEM_SIZE = 2


def softmax_flop(B_r, B_c, d_head):
    """This and the next three as a published walk through an FA2 kernel for Ampere computes its intensities ("Calculating
    Arithmetic Intensity"): for one pair of tiles; a multiply-add is one FLOP there."""
    return B_r * (5 * B_c + d_head + 4)


def tile_flop(B_r, B_c, d_head):
    return B_r * d_head * B_c + B_r * B_c * d_head + softmax_flop(B_r, B_c, d_head)


def gmem_transfer_size(B_r, B_c, d_head):
    return d_head * 2 * (B_r + B_c) * ELEM_SIZE


def arithmetic_intensity(B_r, B_c, kv_seq_len, d_head):
    return tile_flop(B_r, B_c, d_head) * (kv_seq_len // B_c) / gmem_transfer_size(B_r, kv_seq_len, d_head)


@pytest.mark.parametrize("rows, keys", [(64, 32), (64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("length", [512, 4096, 16384])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_tile_is_the_published_formulas(rows, keys, length, head_dim):
    tile = Tile(rows, keys, head_dim, head_dim)
    assert tile.softmax_flops == softmax_flop(rows, keys, head_dim)
    assert tile.flops / 2 + tile.softmax_flops == tile_flop(rows, keys, head_dim)
    assert tile.bytes_moved(length) == gmem_transfer_size(rows, length, head_dim)
    softmax = tile.softmax_flops * (length // keys) / tile.bytes_moved(length)
    assert tile.intensity(length) / 2 + softmax == pytest.approx(arithmetic_intensity(rows, keys, length, head_dim))


def test_rows_of_a_tile_not_keys_make_its_intensity():
    wide, tall = Tile(64, 256, 128, 128), Tile(256, 64, 128, 128)
    assert wide.intensity(4096) == Tile(64, 64, 128, 128).intensity(4096) < tall.intensity(4096)
    assert tall.intensity(2**20) == pytest.approx(256, rel=1e-3)  # 2 rows FLOPs for an element of 2 bytes


def test_whole_tiles_of_a_full_problem_are_the_problem():
    full = Tiling(square(4096), 128, 64)
    assert full.tiles == 16 * 32 and full.blocks == 16 * 32 * 64
    assert full.flops == Cost(square(4096)).flops and full.useful == 1.0
    assert full.bytes_loaded == 16 * 4096 * 128 * 2 + 16 * 32 * 4096 * 256 * 2


def test_tiles_of_a_mask_by_hand():
    # rows 0..3, 4..7 at positions 2..9 of 10 keys: they see keys 0..5 and 0..9, 2 and 3 blocks of 4
    causal = problem(strobe.Causal(), lengths=Dense(1, 8, 10), heads_q=1, heads_kv=1)
    tiling = Tiling(causal, 4, 4)
    assert (tiling.tiles, tiling.blocks) == (2, 5)
    assert tiling.bytes_loaded == (8 * 16 + (8 + 10) * 24) * 2  # the second tile has no more than 10 keys to load
    assert tiling.useful == Cost(causal).pairs / (5 * 16)
    window = replace(causal, mask=strobe.Window(1, 0))  # keys 1..5, then 5..9
    assert Tiling(window, 4, 4).blocks == 2 + 2


def test_rows_that_see_nothing_visit_nothing():
    blind = problem(strobe.Causal(), lengths=Dense(1, 8, 4), heads_q=1, heads_kv=1)  # positions -4..3
    assert (Tiling(blind, 4, 4).tiles, Tiling(blind, 4, 4).blocks) == (2, 1)
    nothing = Tiling(problem(lengths=Dense(0, 4, 8)))
    assert nothing.flops == nothing.bytes_loaded == 0 and nothing.useful == 0.0


def test_packing_a_group_reads_the_cache_once():
    decode = problem(lengths=Dense(8, 1, 4096), heads_q=32, heads_kv=4, head_dim=128, head_dim_v=128)
    apart, packed = Tiling(decode, 16, 128), Tiling(decode, 16, 128, packed=True)
    cache = 8 * 4096 * 4 * 256 * 2
    q = 8 * 32 * 128 * 2
    assert (apart.tiles, packed.tiles) == (8 * 32, 8 * 4)
    assert apart.bytes_loaded - q == 8 * cache and packed.bytes_loaded - q == cache
    assert packed.useful == 8 / 16 and apart.useful == 1 / 16


def test_packed_rows_share_a_mask():
    # two queries, a group of 2: rows are (query 0, head 0), (0, 1), (1, 0), (1, 1), which see 3, 3, 4, 4 keys
    causal = problem(strobe.Causal(), lengths=Dense(1, 2, 4), heads_q=2, heads_kv=1)
    assert Tiling(causal, 2, 1, packed=True).blocks == 3 + 4
    assert Tiling(causal, 1, 1).blocks == 2 * (3 + 4)


@pytest.mark.parametrize(
    "asked, words",
    [
        (lambda: Tiling(problem(phase="backward")), "must be a forward of dense lengths, got backward"),
        (lambda: Tiling(problem(lengths=Varlen(2, 10, 10, 8, 8))), "got forward, 2 packed sequences"),
        (lambda: Tiling(problem(), 0, 128), "a tile must have rows and keys, got 0 x 128"),
    ],
)
def test_what_has_no_tiling(asked, words):
    with pytest.raises(ValueError, match=words):
        asked()


# ---- strobe cost


def cost_command(arguments: str):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["cost", *arguments.split()])


def test_the_command_shows_the_bottleneck_move(tmp_path):
    path = tmp_path / "cost.json"
    result = cost_command(f"--arch A100 --seqlen-q 16384 --causal --json {path} --out {tmp_path / 'cost.svg'}")
    assert result.exit_code == 0, result.output
    assert all(f"<!-- {words} -->" in (tmp_path / "cost.svg").read_text() for words in ("standard", "flash", "HBM", "17 ms"))
    assert "moves 8.59 GB of scores 4 times to or from HBM, and HBM binds; without it matmul binds" in result.output
    found, causal = json.loads(path.read_text()), square(16384, mask=strobe.Causal())
    assert found["standard"]["flops"] == Standard(causal).flops and found["flash"]["flops"] == Cost(causal).flops
    assert found["tiles"]["blocks"] == Tiling(causal).blocks == 16 * 128 * 129 // 2
    assert found["ridge"] == pytest.approx(312e12 / 2039e9)


def test_the_command_of_a_decode_and_a_backward(tmp_path):
    path = tmp_path / "cost.json"
    result = cost_command(f"--arch H200 --seqlen-q 1 --seqlen-kv 8192 --heads-kv 2 --tile 16x64 --packed --json {path}")
    tiles = json.loads(path.read_text())["tiles"]
    assert tiles["tiles"] == 2 and tiles["useful"] == 8 / 16 and "and HBM binds\n" in result.output
    backward = cost_command("--arch H200 --backward")
    assert "of scores 7 times" in backward.output and "tiles" not in backward.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--arch CPU", "arch must be a GPU, one of T4, A100"),
        ("--arch T4", "no peak rates of T4 (sm_75) for bfloat16 are known"),
        ("--arch H200 --tile 128", "tile must be ROWSxCOLUMNS, such as 64x128, got '128'"),
        ("--arch H200 --tile 0x1", "tile must be 1 or more, got 0"),
        ("--arch H200 --seqlen-q 0", "seqlen-q must be 1 or more, got 0"),
        ("--arch A100 --dtype fp8", "fp8 needs tensor cores that take it, from sm_89 on (L4, H200, ...), not A100 (sm_80)"),
        ("--arch H200 --dtype fp8 --backward", "fp8 is a forward's, as attention_fp8 has no gradient"),
    ],
)
def test_wrong_options_of_the_command(arguments, words):
    result = cost_command(arguments)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
