"""Occupancy against Nsight Compute's own table, and against blocks worked out by hand."""

import json
from dataclasses import replace

import pytest
from tritons import output_of
from typer.testing import CliRunner

from strobe.device import CPU, KIB, KNOWN
from strobe.lab.model.occupancy import Block, Occupancy, Waves, draw, facts
from strobe_cli.app import app

L4 = KNOWN["L4"]

NSIGHT = {
    "fa": dict(threads=512, registers=54, smem_bytes=29820),
    "fa_tc_v1": dict(threads=128, registers=80, smem_bytes=43780),
}
"""Two kernels of a published study on an L4, a flash attention in FP32 and one on tensor cores, as Nsight Compute's launch
section has them; kB to four digits."""


@pytest.mark.parametrize(
    "name, limits, warps, percent, carveout_kb",
    [
        ("fa", {"SM": 24, "registers": 2, "shared memory": 2, "warps": 3}, 32, 66.67, 65.54),
        ("fa_tc_v1", {"SM": 24, "registers": 6, "shared memory": 2, "warps": 12}, 8, 16.67, 102.40),
    ],
)
def test_nsight_computes_occupancy_section(name, limits, warps, percent, carveout_kb):
    found = Occupancy(L4, Block(**NSIGHT[name]))
    assert found.limits == limits
    assert found.warps == warps
    assert round(100 * found.theoretical, 2) == percent
    assert round(found.smem_carveout / 1000, 2) == carveout_kb
    assert round(found.waves(128).number, 2) == 1.10


def test_shared_memory_that_was_cut_to_fit_does_not_bind():
    assert Occupancy(L4, Block(**NSIGHT["fa"])).binds == ["registers"]  # 100 KiB would hold three blocks
    assert Occupancy(L4, Block(**NSIGHT["fa_tc_v1"])).binds == ["shared memory"]


def test_registers_come_to_warps_in_256s_within_a_quarter():
    # 168 registers: 5376 a warp, three warps in a quarter's 16384, twelve in all
    assert Occupancy(L4, Block(64, 168, 0)).limits["registers"] == 6
    assert Occupancy(L4, Block(64, 169, 0)).limits["registers"] == 4
    assert Occupancy(L4, Block(96, 168, 0)).limits["registers"] == 4


def test_shared_memory_comes_in_128s_with_a_kibibyte_for_the_driver():
    at_most = L4.smem_per_sm // 4 - KIB
    assert Occupancy(L4, Block(32, 32, at_most)).limits["shared memory"] == 4
    assert Occupancy(L4, Block(32, 32, at_most + 1)).limits["shared memory"] == 3
    t4 = KNOWN["T4"]  # nothing for the driver before sm_80
    assert Occupancy(t4, Block(32, 32, t4.smem_per_sm // 4)).limits["shared memory"] == 4


@pytest.mark.parametrize(
    "arch, blocks, warps",
    [("T4", 16, 32), ("A100", 32, 64), ("RTX 3090", 16, 48), ("L4", 24, 48), ("H200", 32, 64), ("RTX 5090", 24, 48)],
)
def test_small_blocks_meet_the_limits_of_the_multiprocessor(arch, blocks, warps):
    small = Occupancy(KNOWN[arch], Block(32, 16, 0))
    assert small.blocks == blocks and small.binds == ["SM"]
    large = Occupancy(KNOWN[arch], Block(256, 32, 0))
    assert large.warps == warps and large.theoretical == 1.0 and "warps" in large.binds


def test_carveouts_hold_the_largest_block():
    for arch in KNOWN.values():
        assert arch.smem_carveouts[-1] == arch.smem_per_sm == arch.smem_per_block + arch.smem_reserved
        assert Occupancy(arch, Block(32, 32, arch.smem_per_block)).blocks == 1


def test_a_resource_more_lets_a_block_more_in():
    block = Block(128, 128, 40 * KIB)
    assert Occupancy(L4, block).binds == ["shared memory"] and Occupancy(L4, block).blocks == 2
    assert Occupancy(replace(L4, smem_carveouts=(200 * KIB,)), block).blocks == 4
    assert Occupancy(L4, replace(block, smem_bytes=32 * KIB)).blocks == 3


def test_waves():
    assert (Waves(264, 132).full, Waves(264, 132).tail, Waves(264, 132).efficiency) == (2, 0.0, 1.0)
    tail = Waves(265, 132)
    assert (tail.full, tail.tail) == (2, 1 / 132)
    assert tail.efficiency == pytest.approx(265 / 396)
    assert Waves(0, 132).efficiency == 0.0


@pytest.mark.parametrize(
    "block, arch, words",
    [
        (Block(2048, 32, 0), L4, "a block on L4 .sm_89. must have 1 to 1024 threads, got 2048"),
        (Block(128, 256, 0), L4, "must have 1 to 255 registers, got 256"),
        (Block(128, 32, 101376 + 1), L4, "must have 0 to 101376 bytes of shared memory, got 101377"),
        (Block(1024, 128, 0), L4, "must have 1 to 65536 registers of all threads, got 131072"),
        (Block(128, 32, 0), CPU, "the limits of CPU are not known"),
    ],
)
def test_what_an_arch_does_not_take(block, arch, words):
    with pytest.raises(ValueError, match=words):
        Occupancy(arch, block)


def test_draws_png_and_svg(tmp_path):
    found = facts([(Occupancy(L4, Block(**given, name=name)), 128) for name, given in NSIGHT.items()])
    assert draw(found, tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    svg = draw(found, tmp_path / "o.svg").read_text()
    assert "<svg" in svg


# ---- strobe occupancy


def run(arguments: str):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["occupancy", *arguments.split()])


def test_the_command_of_a_block_by_its_numbers(tmp_path):
    path = tmp_path / "o.json"
    result = run(f"--arch L4 --registers 54 --threads 512 --smem 29820 --grid 128 --json {path}")
    assert result.exit_code == 0, result.output
    assert "kernel: 2 blocks of an SM by its registers; 1.10 waves, the last on 10% of the GPU" in result.output
    (kernel,) = json.loads(path.read_text())["kernels"]
    assert kernel["limits"] == {"SM": 24, "registers": 2, "shared memory": 2, "warps": 3}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--arch CPU", "arch must be a GPU, one of T4, A100"),
        ("--arch L4 --registers 64", "registers and threads go together, got 64 and None"),
        ("--arch L4 --registers 64 --threads 2048", "must have 1 to 1024 threads, got 2048"),
        ("--arch L4 --registers 64 --threads 0", "threads must be 1 or more, got 0"),
        ("--arch L4 --backends sm80", "backends must be one of sm90, portable, got 'sm80'"),
        ("--arch A100 --backends sm90", "sm90 needs a Hopper GPU (sm_90), not A100 (sm_80)"),
        ("--arch T4", "portable needs compute capability 8.0 or newer for bfloat16"),
        ("--arch L4 --out limits.pdf", "out must end in .png or .svg, got limits.pdf"),
    ],
)
def test_wrong_options_are_one_sentence_and_status_2(arguments, words):
    result = run(arguments)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


def test_our_kernels_by_the_compilers_numbers(tmp_path):
    path = tmp_path / "o.json"
    program = f"from strobe_cli.app import app; app('occupancy --arch H200 --head-dims 128 --json {path}'.split())"
    output_of(program)
    hopper, portable = json.loads(path.read_text())["kernels"]
    # Two consumer groups and the producer's warps share 65536 registers, and nearly all shared memory: one CTA, by both.
    assert (hopper["threads"], hopper["registers"], hopper["blocks"]) == (384, 168, 1)
    assert hopper["binds"] == ["registers", "shared memory"] and hopper["theoretical"] == 12 / 64
    assert hopper["grid"] == 4 * 16 * 4096 // 128
    assert portable["threads"] == 256 and portable["registers"] <= 255 and portable["grid"] == hopper["grid"]
