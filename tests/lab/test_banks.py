"""Bank conflicts: the layouts are the compiler's, the counts are those of the literature, and the benchmark compiles."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from tritons import output_of

from strobe.kernels import triton_version
from strobe.lab.model.banks import ACCESSES, BANKS, LANES, LAYOUTS, Count, Tile, count, measure

ROOT = Path(__file__).parents[2]
BF16, FP32 = 2, 4


def wavefronts(tile: Tile, layout: str, access: str) -> int:
    return count(tile, LAYOUTS[layout], ACCESSES[access]).wavefronts


# ---- where a layout puts things


LINEAR = """
import json, sys
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl

context = ir.context()
ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
found = {}
for columns in (32, 64, 128):
    per_phase = max(1, 64 // columns)
    layouts = {"none": gl.SwizzledSharedLayout(8, 1, 1, [1, 0])}
    layouts["xor"] = gl.SwizzledSharedLayout(8, per_phase, 8 // per_phase, [1, 0])
    for width in (32, 64, 128):
        layouts[f"nvmma{width}"] = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=2)
    for name, layout in layouts.items():
        if name != "nvmma128" or columns > 32:
            found[f"{name} {columns}"] = builder.to_linear_layout(layout._to_ir(builder), [16, columns]).offset_bases
print(json.dumps(found))
"""
"""Triton's own description of shared layouts of 16 rows: what each bit of an offset adds (XOR) to (row, column)."""


@pytest.mark.skipif(triton_version() < (3, 8), reason="older ones describe layouts otherwise")
def test_layouts_are_tritons():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LINEAR], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout.splitlines()[0])
    assert len(described) == 14
    for case, bases in described.items():
        name, columns = case.split()
        tile = Tile(16, int(columns), BF16)
        for row in range(tile.rows):
            for column in range(tile.columns):
                offset = LAYOUTS[name].place(tile, row, column * BF16) // BF16
                found = (0, 0)
                for bit, (down, right) in enumerate(bases):
                    if offset >> bit & 1:
                        found = (found[0] ^ down, found[1] ^ right)
                assert found == (row, column), case


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_two_bytes_share_a_place(name):
    tile = Tile(32, 64, BF16)
    places = {LAYOUTS[name].place(tile, row, byte) for row in range(tile.rows) for byte in range(tile.row_bytes)}
    assert len(places) == tile.rows * tile.row_bytes


# ---- conflicts


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_rows_in_a_row_collide_and_swizzles_mend_it(columns):
    """A row of head dim 64 and more is a multiple of 128 bytes, so the rows of an 8 x 8 matrix begin in the same bank."""
    tile = Tile(64, columns, BF16)
    for access, free in (("ldmatrix", 4), ("fragment", 1), ("row-a-lane", 4)):
        assert wavefronts(tile, "none", access) == 8 * free
        for layout in ("padded", "xor", "nvmma128", "nvmma64", "nvmma32"):
            assert wavefronts(tile, layout, access) == free, (layout, access)
    assert wavefronts(tile, "none", "rows") == 4  # a quarter of a warp reads 128 bytes in a row


def test_a_column_of_words():
    """The lecture's example: 32 threads, one column of a row-major tile with D = 128: one bank; (row ^ col) % 32 spreads it."""
    tile = Tile(32, 128, FP32)
    plain, spread = (count(tile, LAYOUTS[layout], ACCESSES["column"]) for layout in ("none", "xor4"))
    assert plain.wavefronts == 32 and {word.bank for word in plain.words} == {0}
    assert spread.wavefronts == 1 and [word.bank for word in spread.words] == [(row ^ 0) % 32 for row in range(32)]


@pytest.mark.parametrize("d", [32, 64])
def test_the_key_tile_of_a_first_kernel(d):
    """kj[threadIdx.x * d + i] of 32 threads in float32: a beginner's flash attention pays for every product 32 times."""
    assert wavefronts(Tile(32, d, FP32), "none", "column") == 32
    assert wavefronts(Tile(32, d, FP32), "xor4", "column") == 1


def test_pairs_of_float32_accumulators():
    """8 bytes a lane go in two halves of a warp; panels of 32 bytes are the width of four lanes' pairs."""
    tile = Tile(64, 128, FP32)
    assert count(tile, LAYOUTS["none"], ACCESSES["fragment"]).free == 2
    assert wavefronts(tile, "none", "fragment") == 8
    assert wavefronts(tile, "xor", "fragment") == 4
    assert wavefronts(tile, "nvmma32", "fragment") == 2


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_words_are_given_once_and_by_one_bank_a_wavefront(access, layout):
    found = measure(Tile(64, 128, BF16), [layout], [access])[access, layout]
    if isinstance(found, str):
        assert layout == "xor4" and "which this layout moves apart" in found
        return
    assert {word.lane for word in found.words} == set(range(LANES))
    given = {}
    for word in found.words:
        assert given.setdefault((word.bank, word.wavefront), word.word) == word.word
    assert found.wavefronts == 1 + max(word.wavefront for word in found.words) >= found.free
    assert all(0 <= word.bank < BANKS for word in found.words)


def test_lanes_that_want_the_same_word_share_it():
    """Two bfloat16 of a word: 32 lanes down a column of a tile with rows of 2 bytes ask for 16 words."""
    found = count(Tile(32, 1, BF16), LAYOUTS["none"], ACCESSES["column"])
    assert found.wavefronts == 1 and len({word.word for word in found.words}) == 16


# ---- the command


def test_the_command_shows_writes_and_draws(tmp_path):
    report, pictures = tmp_path / "banks.json", [tmp_path / "banks.png", tmp_path / "banks.svg"]
    for picture in pictures:
        options = ("--layouts", "none,xor", "--accesses", "ldmatrix,column", "--json", str(report), "--out", str(picture))
        result = run("banks", *options)
        assert result.exit_code == 0, result.output
        assert picture.stat().st_size > 5000
    assert "tile of 64 x 128 elements of 2 bytes" in result.output
    [line] = [line for line in result.output.splitlines() if line.startswith("│ ldmatrix")]
    assert line.replace("│", "").split() == ["ldmatrix", "4", "32", "4"]
    points = json.loads(report.read_text())["counts"]
    assert [(p["access"], p["layout"], p["wavefronts"], p["without_conflicts"]) for p in points] == [
        ("ldmatrix", "none", 32, 4), ("ldmatrix", "xor", 4, 4), ("column", "none", 32, 1), ("column", "xor", 4, 1),
    ]  # fmt: skip
    assert points[0]["banks_of_lanes"][0] == [0, 1, 2, 3] and points[1]["banks_of_lanes"][1] == [4, 5, 6, 7]


def test_what_does_not_fit_is_said():
    """Once for all layouts with the same reason."""
    result = run("banks", "--tile", "8x8", "--layouts", "none,xor", "--accesses", "rows")
    assert "rows in none, xor: this access needs a tile of at least 4 rows of 128 bytes" in result.output
    result = run("banks", "--tile", "16x24", "--layouts", "nvmma64", "--accesses", "column,ldmatrix")
    assert result.exit_code == 0
    assert (
        "column in nvmma64: this access needs a tile of at least 32 rows of 2 bytes, got 16 x 24 elements of 2 bytes"
        in result.output
    )
    assert (
        "ldmatrix in nvmma64: this layout needs rows of a multiple of 64 bytes, got 16 x 24 elements of 2 bytes"
        in result.output
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--tile 64", "tile must be ROWSxCOLUMNS, such as 64x128, got '64'"),
        ("--tile 64x0", "tile must be 1 or more, got 0"),
        ("--dtype int8", "dtype must be one of bf16, fp16, fp32, got 'int8'"),
        ("--layouts xor8", "layouts must be one of none, padded, xor"),
        ("--accesses diagonal", "accesses must be one of rows, ldmatrix"),
        ("--out banks.gif", "out must end in .png or .svg, got banks.gif"),
    ],
)
def test_wrong_options_are_one_sentence_and_status_2(arguments, words):
    result = run("banks", *arguments.split())
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


# ---- the benchmark that asks the hardware, compiled for a GPU that is not here

COMPILE = """
import json, sys
import torch
import banks
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import disassemble, flow_of

tensors = [torch.empty(n, dtype=dtype, device="meta") for n, dtype in ((1, torch.int64), (1, torch.int32), (32, torch.int32))]
for asm in (banks.LDMATRIX, *banks.LOADS.values(), *banks.STORES.values()):
    with pretend_gpu(90):
        compiled = banks.access_kernel.warmup(*tensors, 16, asm, grid=(1,), num_warps=banks.WARPS)
    instructions = [i for block in flow_of(disassemble(compiled.asm["cubin"])).blocks for i in block.instructions]
    begin, end = (n for n, i in enumerate(instructions) if "CLOCK" in i.operands)
    print(json.dumps([i.mnemonic for i in instructions[begin:end]]))
"""


def test_the_benchmark_times_the_accesses_and_nothing_else():
    expected = ["LDSM.16.M88.4", "LDS.U16", "LDS", "LDS.64", "LDS.128", "STS.U16", "STS", "STS.64", "STS.128"]
    found = [json.loads(line) for line in output_of(COMPILE, path=[ROOT / "benchmarks"]).splitlines()]
    for timed, mnemonic in zip(found, expected, strict=True):
        assert timed.count(mnemonic) == 16 + (mnemonic == "LDS"), timed  # the last load waits for the accesses before it
        assert not {"BAR", "LDG", "STG", "BRA"} & {name.split(".")[0] for name in timed}


def test_the_counters_stand_beside_the_model(monkeypatch):
    """ncu's part is played by what the model counts, with twice the conflicts, and something for each launch."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import banks

    def run_ncu(arguments: list[str]) -> str:
        assert arguments[-2:] == [banks.__file__, "--launch"] and "--profile-from-start" in arguments
        lines = [["ID", "Kernel Name", banks.WAVEFRONTS, banks.CONFLICTS], ["", "", "", ""]]
        for i, (case, n) in enumerate((case, n) for case in banks.cases() for n in (banks.FEW, banks.MANY)):
            conflicts = 2 * (case.counted.wavefronts - case.counted.free)
            both = (case.counted.wavefronts * 4 * n + 100, conflicts * 4 * n + 7)
            lines.append([str(i), "access_kernel", *(f"{one:,}" for one in both)])
        return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)

    monkeypatch.setattr(banks, "run_ncu", run_ncu)
    found = banks.counted_by_ncu()
    assert len(found) > 20 and any(point["conflicts"] for point in found)
    assert all(point["ncu_wavefronts"] == point["wavefronts"] for point in found)
    assert all(point["ncu_conflicts"] == 2 * point["conflicts"] for point in found)
    monkeypatch.setattr(banks, "run_ncu", lambda arguments: "==PROF== nothing\n" + run_ncu(arguments)[:400])
    with pytest.raises(ValueError, match=r"ncu must count wavefronts and conflicts of \d+ launches, got"):
        banks.counted_by_ncu()


def test_the_benchmark_takes_every_access(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import banks

    for (access, layout), found in measure(banks.TILE, LAYOUTS, ACCESSES).items():
        if isinstance(found, Count):
            offsets = banks.offsets_of(banks.TILE, LAYOUTS[layout], ACCESSES[access])
            assert max(offsets) + 128 * max(banks.COUNTS) + 16 <= banks.BYTES.value
            assert banks.instructions_of(access, banks.TILE)
