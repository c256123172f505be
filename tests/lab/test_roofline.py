"""The roofline: ceilings, our Hopper forward's shared memory against the compiler, and predictions against measurements."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reports import report as bench_report
from test_cost import problem
from tritons import output_of
from typer.testing import CliRunner

import strobe
from strobe.device import KNOWN
from strobe.kernels import triton_version
from strobe.kernels.sm90.backward_config import Config as BackwardConfig
from strobe.kernels.sm90.backward_config import SplitConfig
from strobe.kernels.sm90.config import Config
from strobe.lab.bench.plan import Grid
from strobe.lab.bench.report import load
from strobe.lab.model.ceilings import measure
from strobe.lab.model.cost import Cost, Standard, Tiling
from strobe.lab.model.hopper_passes import of_config, passes
from strobe.lab.model.roofline import Ceilings, Choice, draw, of_report, place, place_decode, problem_of, sentence
from strobe.problem import Dense
from strobe_cli.app import app

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results" / "forward-h200-2026-11-21.json"
BACKWARD = MEASURED.with_stem("backward-h200-2026-11-26")
H200 = Ceilings.of(KNOWN["H200"], torch.bfloat16)
A100 = Ceilings.of(KNOWN["A100"], torch.bfloat16)


def long(length: int = 16384, dim: int = 128, **changes):
    shape = {"heads_q": 16, "heads_kv": 16, "head_dim": dim, "head_dim_v": dim}
    return problem(lengths=Dense(1, length, length), **(shape | changes))


# ---- ceilings


def test_ceilings_of_a_data_sheet():
    assert (H200.matmul, H200.hbm) == (989.4e12, 4.8e12)
    assert H200.smem == 128 * 132 * 1.83e9 and H200.exp2 == 16 * 132 * 1.83e9
    assert H200.ridge == pytest.approx(206.1, abs=0.1)


def test_a_clock_moves_the_multiprocessors_and_not_the_memory():
    slow = H200.at_clock(H200.clock / 2)
    assert (slow.matmul, slow.exp2, slow.smem) == (H200.matmul / 2, H200.exp2 / 2, H200.smem / 2)
    assert slow.hbm == H200.hbm and slow.ridge == H200.ridge / 2


# ---- shared memory, and what our Hopper kernels do tile by tile


def test_the_forwards_operands_by_hand():
    # each of two groups: Q 64 x 128, K 128 x 128, V 128 x 128, of 2 bytes: 160 KiB, 1280 cycles beside 2048 of products
    config = Config(128, 128, groups=2, tile_kv=128, num_stages=2)
    (one,) = of_config(config)
    assert one.operand_bytes == 2 * (64 + 128 + 128) * 128 * 2 == 160 * 1024
    assert one.flops == 2 * 128 * 128 * 256 and one.flops / 4096 == 2048 > one.operand_bytes / 128 == 1280
    assert of_config(replace(config, groups=3))[0].operand_bytes == 240 * 1024
    assert of_config(replace(config, tile_kv=64))[0].operand_bytes == 2 * (64 + 64 + 64) * 128 * 2


def test_the_backwards_operands_by_hand():
    # Head dim 128, 64 rows, 128 keys. Each of two groups: K 64 x 128 and Q 64 x 128 for S, as much of V and dO for dP, dO for
    # dV and Q for dK (P and dS are in registers), dS 64 x 128 and half of K's columns, 128 x 64, for dQ: 8 of 8192 numbers.
    config = BackwardConfig(128, 128, 64, turns=True)
    (one,) = of_config(config)
    assert (one.tile_q, one.tile_kv) == (64, 128)
    assert one.operand_bytes == 2 * 8 * 8192 * 2 == 256 * 1024
    assert one.flops == 5 * 2 * 64 * 128 * 128 and one.flops / 4096 == 2560 > one.operand_bytes / 128 == 2048
    # Held in registers: 64 of K's columns, or 64 of K's and all of V's, of 64 rows a group.
    assert of_config(replace(config, held_k=64))[0].operand_bytes == one.operand_bytes - 2 * 64 * 64 * 2
    assert of_config(replace(config, held_k=64, held_v=128))[0].operand_bytes == one.operand_bytes - 2 * 64 * (64 + 128) * 2
    assert of_config(replace(config, held_k=64))[0].flops == one.flops
    # Folded statistics: ones 64 x 16 and parts 64 x 16, for S and for dP.
    (folded,) = of_config(replace(config, folded=True))
    assert folded.operand_bytes == one.operand_bytes + 2 * 2 * (64 + 64) * 16 * 2
    assert folded.flops == one.flops + 2 * 2 * 2 * 64 * 64 * 16
    # Head dim 64, 128 rows: K 64 x 64 and Q 128 x 64, as much of V and dO; dO, Q; half of dS, 128 x 64, and K 128 x 64
    (one,) = of_config(BackwardConfig(64, 64, 128, turns=True))
    assert one.operand_bytes == 2 * (2 * (4096 + 8192) + 2 * 8192 + 2 * 8192) * 2 and one.flops == 5 * 2 * 128 * 128 * 64
    # (192, 128), 64 rows: three shares of dQ, each with all of dS, 64 x 128, and 64 columns of K
    (one,) = of_config(BackwardConfig(192, 128, 64, turns=False))
    assert one.operand_bytes == 2 * 2 * (128 * 192 + 128 * 128 + 64 * 128 + 64 * 192) + 3 * 2 * (64 + 64) * 128
    assert one.flops == 2 * 64 * 128 * (3 * 192 + 2 * 128)


def test_the_two_passes_operands_by_hand():
    # 64 x 256 everywhere. Keys, one group each: K and Q, V and dO, dO, Q. Rows, two groups: Q and K, dO and V, K.
    keys, rows = of_config(SplitConfig(256, 256))
    assert (keys.tile_q, keys.tile_kv, rows.tile_q, rows.tile_kv) == (64, 64, 128, 64)
    assert keys.operand_bytes == 6 * 64 * 256 * 2 and rows.operand_bytes == 2 * 5 * 64 * 256 * 2
    assert keys.flops == 4 * 2 * 64 * 64 * 256 and rows.flops == 3 * 2 * 128 * 64 * 256, "seven products, not five"


def test_a_stored_ds_is_an_operand_by_hand():
    # dS, 64 x 64, and K, 64 x 256, of two groups; five products in all.
    keys, rows = of_config(SplitConfig(256, 256, stored=True))
    assert rows.operand_bytes == 2 * (64 * 64 + 64 * 256) * 2
    assert 2 * keys.flops + rows.flops == 5 * 2 * 128 * 64 * 256
    keys, rows = of_config(BackwardConfig(64, 64, 128, turns=True, stored=True))
    assert keys.flops + rows.flops * 2 == 5 * 2 * 128 * 128 * 64


OPERANDS = """
import json, sys
from strobe.lab.binary.audit import reports_of
from strobe.lab.bench.plan import Grid

for kernel, *dims in json.loads(sys.argv[1]):
    grid = Grid(head_dims=(tuple(dims),), lengths=(4096,), masks=("full",))
    for report in reports_of([kernel], grid.points(backward=False)):
        loops = [str(line) for part in report.parts for line in part.loop]
        print(json.dumps([line for line in loops if "HGMMA" in line]))
"""
HGMMA = re.compile(r"HGMMA\.64x(\d+)x16\.F32\.BF16 R\d+, (R\d+, )?gdesc")

COMPILED = {
    "some": [("sm90-forward", 192, 128), ("sm90-backward", 64, 64)],
    "others": [
        *(("sm90-forward", 64, 64), ("sm90-backward", 96, 96), ("sm90-backward", 128, 128)),
        ("sm90-backward", 256, 256),  # in two passes
    ],
}


@pytest.mark.parametrize("which", ["some", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_products_read_what_the_machine_code_says(which):
    """Every HGMMA of the main loops: descriptors are operands in shared memory, B always, A unless it is a register."""
    expected = [
        one
        for kernel, dim, dim_v in COMPILED[which]
        for one in passes(long(4096, dim, head_dim_v=dim_v, phase=kernel.removeprefix("sm90-")))
    ]
    lines = [json.loads(line) for line in output_of(OPERANDS, json.dumps(COMPILED[which])).splitlines()]
    assert len(lines) == len(expected) == {"some": 2, "others": 5}[which]
    for instructions, one in zip(lines, expected, strict=True):
        shapes = [HGMMA.search(line) for line in instructions]
        assert shapes and all(shapes), instructions
        assert sum(2 * 16 * (int(shape[1]) + (0 if shape[2] else 64)) for shape in shapes) == one.operand_bytes, one
        assert sum(2 * 64 * 16 * int(shape[1]) for shape in shapes) == one.flops, one


@pytest.mark.parametrize("mask", [strobe.Full(), strobe.Causal(), strobe.Window(200, 0), strobe.Prefix(300)], ids=str)
@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1111), (1111, 300)])
def test_a_pass_visits_the_same_tiles_from_the_side_of_the_keys(mask, lengths):
    """As the backward finds them: for each block of keys the tiles of rows that see one of them."""
    n_q, n_kv = lengths
    (one,) = of_config(BackwardConfig(128, 128, 64, turns=True))
    blocks, seen = 0, mask.dense(n_q, n_kv).reshape(n_q, n_kv)
    for first in range(0, n_kv, one.tile_kv):
        rows = seen[:, first : first + one.tile_kv].any(1).nonzero().flatten() // one.tile_q
        blocks += len(rows.unique())
    assert one.blocks(problem(mask, Dense(1, n_q, n_kv), heads_q=1, heads_kv=1, phase="backward")) == blocks


def test_who_has_a_shared_memory_ceiling():
    assert passes(long())[0].tile_q in (128, 192) and len(passes(long(phase="backward"))) == 1
    stored = long(dim=160, phase="backward")
    assert len(passes(stored)) == len(passes(long(dim=256, phase="backward"))) == 2
    assert passes(long(dtype=torch.float32)) == ()
    for phase in ("forward", "backward"):
        assert "smem" in place(long(phase=phase), H200, True).seconds
        assert "smem" not in place(long(phase=phase), A100, False).seconds


# ---- predictions


def test_without_tiles_a_place_is_the_lower_bound():
    for case in (long(), long(phase="backward"), problem(lengths=Dense(8, 1, 4096), head_dim=128, head_dim_v=128)):
        placed, bound = place(case, A100, False), Cost(case).lower_bound(KNOWN["A100"])
        assert placed.binds == bound.binds and placed.least == bound.seconds
        assert placed.ceiling == pytest.approx(min(A100.matmul, placed.intensity * A100.hbm))


def test_whole_tiles_of_our_own_forward():
    causal = long(4096, mask=strobe.Causal())
    (one,), placed = passes(causal), place(causal, H200, True)
    tiling = Tiling(causal, one.tile_q, one.tile_kv)
    assert placed.seconds["matmul"] == pytest.approx(tiling.flops / H200.matmul)
    assert placed.seconds["smem"] == tiling.blocks * one.operand_bytes / H200.smem
    assert placed.useful == tiling.useful < 1.0
    padded = long(4096, dim=88)  # computed with 96 columns
    assert place(padded, H200, True).seconds["matmul"] == pytest.approx(Cost(padded).flops * 96 / 88 / H200.matmul, rel=0.02)


def test_whole_tiles_of_our_own_backward():
    # 16 heads x 64 tiles of rows x 32 blocks of keys: five products and the folded statistics, 16 columns to S and to dP
    placed = place(long(4096, phase="backward"), H200, True)
    assert placed.seconds["matmul"] == pytest.approx(16 * 64 * 32 * 2 * 64 * 128 * (5 * 128 + 2 * 16) / 989.4e12)
    assert placed.seconds["smem"] == 16 * 64 * 32 * 256 * 1024 / H200.smem and placed.useful == 1
    assert placed.seconds["exp2"] == 16 * 4096**2 / H200.exp2
    # An order for dQ makes no more products
    ordered = place(long(4096, phase="backward", deterministic=True), H200, True)
    assert ordered.seconds["matmul"] == pytest.approx(placed.seconds["matmul"])
    assert ordered.seconds["exp2"] == placed.seconds["exp2"] and ordered.useful == 1
    # In two passes seven products, and the exponentials twice
    bias = replace(long(4096, dim=256, phase="backward"), learned=("bias",))
    twice = place(bias, H200, True)
    assert twice.seconds["matmul"] == pytest.approx(bias.heads_q * 4096**2 * 7 * 2 * 256 / 989.4e12)
    assert twice.seconds["exp2"] == 2 * bias.heads_q * 4096**2 / H200.exp2 and twice.useful == 1


def test_standard_attention_is_on_the_slope():
    placed = place(long(), A100, False)
    intensity, flops = placed.standard
    assert intensity == Standard(long()).intensity < A100.ridge < placed.intensity
    assert flops == pytest.approx(intensity * A100.hbm)


def test_sentences_say_what_would_move_it():
    assert "matmul binds" in sentence(place(long(), H200, True)) and "fewer FLOPs" in sentence(place(long(), H200, True))
    assert "exp2 needs 100% of its time; both would have to move" in sentence(place(long(1024, dim=64), H200, True))
    assert "exp2 binds" in (small := sentence(place(long(dim=16), A100, False))) and "polynomials" in small
    decode = problem(lengths=Dense(8, 1, 4096), heads_q=32, heads_kv=4, head_dim=128, head_dim_v=128)
    assert "HBM binds" in sentence(place(decode, A100, False)) and "more queries" in sentence(place(decode, A100, False))
    starved = replace(H200, smem=H200.smem / 4)
    assert "shared memory binds" in sentence(place(long(), starved, True))


def test_decode_is_one_query_against_the_length():
    (point,) = Grid(head_dims=((128, 128),), lengths=(4096,), masks=("causal",)).points(False)
    assert problem_of(point, "decode").lengths == Dense(4, 1, 4096)
    assert problem_of(point, "forward").lengths == Dense(4, 4096, 4096)
    assert problem_of(point, "decode", 5).lengths == Dense(4, 5, 4096)


@pytest.mark.parametrize(("queries", "rows", "used"), [(1, 16, 8), (2, 16, 16), (5, 64, 40), (16, 64, 64)])
def test_decode_is_placed_as_its_kernel_computes_it(queries, rows, used):
    """Of 8 query heads that share a key head, padded to 16 rows; 128 rows are two tiles."""
    decode = problem(lengths=Dense(8, queries, 4096), heads_q=64, heads_kv=8, head_dim=128, head_dim_v=128)
    placed, tiles = place_decode(decode, H200), -(-8 * queries // rows)
    keys = 8 * 8 * tiles * 4096
    assert placed.seconds["matmul"] == pytest.approx(keys * rows * 4 * 128 / H200.matmul)
    assert placed.seconds["smem"] == pytest.approx(keys * rows // 16 * 2 * 128 * 2 / H200.smem)
    assert placed.useful == pytest.approx(used / rows) and placed.seconds["HBM"] == place(decode, H200, False).seconds["HBM"]
    assert placed.binds == ("smem" if queries == 16 else "HBM")  # each 16 rows read K and V again


# ---- measurements


def test_no_measurement_exceeds_its_ceiling():
    """Of all that was measured on an H200: what the model calls impossible did not happen, and the best come near."""
    _, trained = of_report(load(BACKWARD), Choice("bf16", ("full", "causal", "window")))
    assert len(trained) > 20 and all("smem" in placed.seconds and placed.share < 1 for placed in trained)
    report = load(MEASURED)
    for dtype in ("bf16", "fp16"):
        _, found = of_report(report, Choice(dtype, ("full", "causal", "window")))
        shares = [placed.share for placed in found]
        assert len(found) > 20 and max(shares) <= 1.0, max(found, key=lambda placed: placed.share).name
    _, found = of_report(report, Choice("bf16", ("full",), ((128, 128),), (16384,)))
    assert len(found) == 2 and all(placed.share > 0.9 for placed in found)  # 16 heads, and 64/8


def test_why_what_the_tma_writes_is_not_counted():
    """Reads and writes together would have been more than 128 bytes a clock; reads alone are less, at every point."""
    _, found = of_report(load(MEASURED), Choice("bf16", ("full", "causal", "window")))
    reads = {placed.name: placed.seconds["smem"] / placed.measured for placed in found}
    busiest = max(reads, key=reads.get)
    assert busiest == "D=192/128 heads 10 full 1 x 131072 x 131072" and round(reads[busiest], 2) == 0.79
    config = Config(192, 128, groups=2, tile_kv=64, num_stages=2, q_stages=1)
    (one,), writes = of_config(config), 2 * config.tile_kv * (config.head_dim + config.head_dim_v)
    assert round(reads[busiest] * (one.operand_bytes + writes) / one.operand_bytes, 2) == 1.04


def test_a_report_gives_its_clock_and_its_time():
    ceilings, (placed,) = of_report(bench_at(1000), Choice("bf16", ("full",), lengths=(1024,)))
    assert placed.clock == ceilings.clock == 1e9
    assert ceilings.matmul == pytest.approx(989.4e12 * 1000 / 1830)
    assert placed.rate == pytest.approx(600e12)


def bench_at(mhz: int) -> dict:
    """The report of the benchmark's own tests, of a known GPU, at one clock."""
    report = bench_report()
    report["device"] |= {"name": "NVIDIA H200", "sms": 132}
    for entry in report["points"]:
        entry["results"]["strobe"] |= {"sm_clock_mhz": mhz, "tflops": 600.0}
    return report


def test_reports_that_have_no_place():
    report = bench_at(1000)
    with pytest.raises(ValueError, match="a point of Strobe's as asked for, got none of dtype fp16, masks full"):
        of_report(report, Choice("fp16", ("full",)))
    report["device"]["name"] = "NVIDIA A30"
    with pytest.raises(ValueError, match=r"the report must be of one of T4, A100.*, got NVIDIA A30"):
        of_report(report, Choice("bf16", ("full",)))


# ---- measured ceilings


def test_the_exponentials_that_are_timed_are_exponentials():
    from strobe.lab.model.ceilings import exp2_chains

    out = torch.zeros(2, 1024)
    exp2_chains[(2,)](out, 3, 2, 1024)
    x = torch.arange(1024) / 1024
    for _ in range(6):
        x = torch.exp2(-x)
    torch.testing.assert_close(out, x.expand(2, -1))


EXP2 = """
import torch
from strobe.lab.model.ceilings import _SIZE, _UNROLLED, _WARPS, exp2_chains
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import audit

with pretend_gpu(90):
    compiled = exp2_chains.warmup(torch.empty(1, device="meta"), 64, _UNROLLED, _SIZE, num_warps=_WARPS, grid=(1,))
counts = audit(compiled, "exp2").instructions
print(counts["MUFU.EX2"], _UNROLLED * _SIZE // (32 * _WARPS), counts.get("FMUL", 0) + counts.get("FADD", 0))
"""


@pytest.mark.skipif(triton_version() < (3, 8), reason="older ones make two instructions of each")
def test_the_timed_kernel_is_little_but_exponentials():
    made, asked, others = map(int, output_of(EXP2).split())
    assert made == asked == 64 and others < 8


@pytest.mark.gpu
def test_measured_ceilings_are_near_the_data_sheet(alone):
    with alone():
        ceilings = measure(torch.device("cuda"), torch.bfloat16)
    sheet = Ceilings.of(strobe.device.arch_of(torch.device("cuda")), torch.bfloat16).at_clock(ceilings.clock)
    for name in ("matmul", "exp2", "hbm"):
        assert 0.6 < getattr(ceilings, name) / getattr(sheet, name) < 1.02, name


# ---- strobe roofline


def run(arguments: str):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["roofline", *arguments.split()])


def test_the_command_predicts(tmp_path):
    path, picture = tmp_path / "r.json", tmp_path / "r.png"
    result = run(f"--arch H200 --head-dims 128 --lengths 16384 --mask full --json {path} --out {picture}")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["ceilings"]["ridge"] == pytest.approx(206.125)
    (point,) = found["points"]
    assert point["binds"] == "matmul" and point["ceiling"] == pytest.approx(989.4e12)
    assert (
        "D=128 heads 16 full 1 x 16384 x 16384: matmul binds at 989 TFLOP/s; shared memory needs 62% of its time"
        in result.output
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_places_a_report(tmp_path):
    result = run(f"--report {MEASURED} --head-dims 128 --lengths 16384 --mask full --out {tmp_path / 'r.svg'}")
    assert result.exit_code == 0, result.output
    assert "778.2" in result.output and "of which 95% were measured" in result.output
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_the_command_places_the_heads_that_it_is_asked_for():
    asked = f"--report {MEASURED} --head-dims 128 --lengths 16384 --mask full"
    for heads, other in (("--heads-kv 16", "heads 64/8"), ("--heads 64", "heads 16 ")):
        result = run(f"{asked} {heads}")
        assert result.exit_code == 0 and other not in result.output, result.output


def test_the_command_places_the_tokens_and_the_phase_that_it_is_asked_for():
    """The benchmark has 16384 tokens, and at longer sequences one sequence."""
    shown = [
        run(f"--report {report} --head-dims 128 --heads-kv 16 --mask full {options}").output.count(": matmul binds")
        for report, options in (
            *((MEASURED, ""), (MEASURED, "--tokens 16384 --phase forward"), (MEASURED, "--tokens 32768")),
            *((BACKWARD, "--phase backward"), (BACKWARD, "--phase backward --tokens 16384 --lengths 4096")),
        )
    ]
    assert shown == [8, 8, 2, 4, 1]


def test_the_command_of_a_decode():
    result = run("--arch A100 --phase decode --head-dims 128 --heads 64 --heads-kv 8 --lengths 4096 --mask full")
    assert "4 x 1 x 4096: HBM binds" in result.output


def test_the_command_of_fp8_predicts_and_places_what_was_measured(tmp_path):
    """At head dim 128 products at twice the rate and exponentials take the same time, to a thousandth."""
    path = tmp_path / "fp8.json"
    result = run(f"--arch H200 --dtype fp8 --head-dims 128 --lengths 16384 --mask full --json {path}")
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    (point,) = found["points"]
    moved = 16 * 16384 * (3 * 128 + 2 * 128 + 4)  # q, k, v; out in bfloat16; an LSE
    assert found["ceilings"]["matmul"] == 2 * 989.4e12 and point["useful"] is None and "smem" not in point["seconds"]
    assert point["intensity"] == pytest.approx(4 * 128 * 16 * 16384**2 / moved)
    assert point["seconds"]["matmul"] == pytest.approx(point["seconds"]["exp2"], rel=1e-3)
    shares = [placed.share for placed in of_report(load(MEASURED), Choice("fp8", ("full", "causal")))[1]]
    assert len(shares) == 12 and all(0.3 < share < 1 for share in shares)


def test_measured_ceilings_are_not_of_fp8():
    with pytest.raises(ValueError, match="takes bf16, fp16 or fp32, got fp8"):
        measure(torch.device("cuda"), torch.float8_e4m3fn)


def test_draws_the_ceiling_of_exp2_where_it_binds(tmp_path):
    svgs = [draw([place(long(dim=dim), A100, False)], A100, tmp_path / f"{dim}.svg").read_text() for dim in (16, 128)]
    assert ["<!-- exp2 -->" in svg for svg in svgs] == [True, False]  # Matplotlib's note above a text's outlines


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--arch CPU", "arch must be a GPU, one of T4, A100"),
        ("--arch T4", "no peak rates of T4 (sm_75) for bfloat16 are known"),
        ("--arch H200 --measure", "arch, measure and report each say which GPU it is: give one of them"),
        ("--arch H200 --phase train", "phase must be one of forward, backward, decode, got 'train'"),
        ("--arch H200 --mask all", "mask must be one of full, causal, window, got 'all'"),
        ("--arch H200 --dtype int8", "dtype must be one of bf16, fp16, fp32, fp8, got 'int8'"),
        ("--arch A100 --dtype fp8", "fp8 needs tensor cores that take it, from sm_89 on (L4, H200, ...), not A100 (sm_80)"),
        ("--arch H200 --dtype fp8 --phase backward", "fp8 is a forward's, as attention_fp8 has no gradient"),
        ("--arch H200 --heads 6 --heads-kv 4", "heads must be a multiple of heads-kv, got 6 and 4"),
        ("--arch H200 --out roof.pdf", "out must end in .png or .svg, got roof.pdf"),
        ("--report nowhere.json", "a result of strobe bench must be a JSON file, got nowhere.json"),
        (f"--report {MEASURED} --lengths 7,9", "got none of dtype bf16, masks full,causal, lengths 7,9"),
        (f"--report {MEASURED} --tokens 2048 --lengths 512", "lengths 512, tokens 2048"),
        (f"--report {MEASURED} --phase backward", "got none of dtype bf16, masks full,causal, phase backward"),
        (f"--report {MEASURED} --phase decode", "phase must be one of forward, backward, got 'decode'"),
        (f"--report {MEASURED} --head-dims 8,24/16", "masks full,causal, head-dims 8,24/16"),
    ],
)
def test_wrong_options_are_one_sentence_and_status_2(arguments, words):
    result = run(arguments)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_measuring_needs_a_gpu():
    result = run("--measure")
    assert result.exit_code == 2 and "measuring ceilings needs a CUDA GPU; without one name a GPU with --arch" in result.output
