"""Every rung: its numbers on a CPU (numba, the simulator) and on a GPU, its machine code, what its waits are for."""

import json
from pathlib import Path

import pytest
import torch
from tritons import answer_of

from strobe.device import KNOWN
from strobe.lab.bench.accuracy import BOUNDS
from strobe.lab.ladder import page
from strobe.lab.ladder.arithmetic import LANES_OF_K, LANES_OF_Q, LANES_OF_V, Tile, footprint, races
from strobe.lab.ladder.checked import relative_error
from strobe.lab.ladder.edited import told, variant, without
from strobe.lab.ladder.explain import changed_lines, padding, too_many
from strobe.lab.model.fragments import FRAGMENTS
from strobe.ladder import RUNGS
from strobe.ladder.rungs import capability_of
from strobe.sim import simulate

ROOT = Path(__file__).parents[2]
SIMULATED = [rung for rung in RUNGS if rung.least and hasattr(rung.module, "launches")]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def ids(rungs):
    return [str(rung.number) for rung in rungs]


def inputs(heads, length, head_dim, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(length + head_dim)
    return [torch.randn(heads, length, head_dim, generator=generator).to(dtype).to(device) for _ in range(3)]


def run_simulated(rung, q, k, v, order):
    out = torch.full_like(q, float("nan"))
    for launch in rung.launches(q, k, v, out):
        options = {"order": order, "seed": 1, "arch": rung.simulated_as, **launch.constants}
        simulate(launch.kernel, launch.grid, *launch.arguments, **options)
    return out


# ---- on a CPU


def test_on_one_core():
    pytest.importorskip("numba")
    q, k, v = inputs(2, 77, 48, torch.float32)
    want = torch.softmax(q.double() @ k.double().mT * 48**-0.5, -1) @ v.double()
    torch.testing.assert_close(RUNGS[0].module.attention(q, k, v).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim, order", [(64, "late"), (128, "random")])
@pytest.mark.parametrize("rung", SIMULATED, ids=ids(SIMULATED))
def test_in_the_simulator(rung, head_dim, order):
    dtype = torch.float32 if rung.takes_fp32 else torch.bfloat16 if head_dim == 64 else torch.float16
    q, k, v = inputs(2, 64 if rung.takes_fp32 else 2 * rung.multiple, head_dim, dtype)
    assert relative_error(run_simulated(rung, q, k, v, order), q, k, v) < BOUNDS[NAMES[dtype]]


@pytest.mark.parametrize("rung", SIMULATED, ids=ids(SIMULATED))
def test_large_and_small_scores(rung):
    """Scores of some hundreds, which a softmax without a maximum would overflow, and rows that are far below others."""
    dtype = torch.float32 if rung.takes_fp32 else torch.float16
    q, k, v = inputs(1, 3 * rung.multiple, 64, dtype)
    q[:, ::3] *= 30
    k[:, ::5] *= 10
    assert relative_error(run_simulated(rung, q, k, v, "in_order"), q, k, v) < BOUNDS[NAMES[dtype]]


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.waits], ids=lambda rung: str(rung.number))
def test_the_simulator_says_what_the_waits_are_for(rung):
    for statement in rung.waits:
        assert (told(rung, statement) or "").startswith(("Race", "BarrierMisuse")), statement


@pytest.mark.parametrize("title, old, new", RUNGS[4].variants)
def test_variants(title, old, new):
    q, k, v = inputs(1, 128, 64, torch.bfloat16)
    with variant(RUNGS[4], old, new) as edited:
        assert relative_error(run_simulated(edited, q, k, v, "random"), q, k, v) < BOUNDS["bf16"]


def test_a_statement_that_is_not_there():
    words = r"must be a line of rung 5, got none like it in r05_registers\.py"
    with pytest.raises(ValueError, match=words), without(RUNGS[5], "cp_async_wait(0)"):
        pass
    with pytest.raises(ValueError, match="must stand in rung 5 once, got 0 times"), variant(RUNGS[5], "nowhere", ""):
        pass


@pytest.mark.parametrize(
    "length, head_dim, dtype, capability, words",
    [
        (100, 128, torch.bfloat16, 80, "rung 5 takes lengths that are multiples of 64, got 100"),
        (64, 96, torch.bfloat16, 80, "rung 5 takes head dims 32, 64, 128, got 96"),
        (64, 64, torch.float32, 80, "rung 5 takes torch.float16 and torch.bfloat16, got torch.float32"),
        (64, 64, torch.float16, 75, "rung 5 needs a GPU from sm_80 on, got sm_75"),
        (64, 64, torch.float16, 0, "rung 5 needs a GPU from sm_80 on, got a CPU"),
    ],
)
def test_what_is_refused(length, head_dim, dtype, capability, words):
    assert RUNGS[5].refuses(length, head_dim, dtype, capability) == words


def test_a_length_whose_square_overflows_is_refused():
    words = "rung 1 takes lengths up to 32768, got 65536"
    assert RUNGS[1].refuses(65536, 64, torch.float32, 90) == words and RUNGS[3].refuses(65536, 64, torch.float32, 90) is None


def test_refused_before_anything_is_launched():
    q, k, v = inputs(1, 64, 64, torch.float16)
    with pytest.raises(ValueError, match=r"rung 8 needs a GPU|rung 8 needs"):
        RUNGS[8].attention(q, k, v)
    with pytest.raises(ValueError, match="q must be \\[heads, S, D\\], contiguous"):
        RUNGS[0].attention(q.mT, k, v)
    with pytest.raises(ValueError, match="the same shape"):
        RUNGS[8].attention(q[:, :32].contiguous(), k, v)


# ---- arithmetic


def test_the_footprint_of_one_thread_a_score():
    assert footprint(32, 32, 64) == 41_728
    assert "must have 1 to 65536 registers of all threads" in too_many(KNOWN["A100"], 65)
    assert too_many(KNOWN["A100"], 64) == "the launch goes through, as 1024 x 64 registers fit."


def test_barriers_may_go_while_a_row_is_a_warp():
    assert races(32, 32) == []
    assert "row maxima read what another warp wrote as scores" in races(16, 64)


def test_padding():
    ways = {row["pad"]: (row["store"], row["column"], row["wmma"]) for row in padding()}
    assert ways == {0: (4, 32, True), 4: (2, 4, False), 8: (1, 8, False), 16: (2, 16, True)}


def test_a_tile_in_registers():
    """Head dim 128, 64 x 64, four warps: the table that a published series prints for its first kernels."""
    tile = Tile(64, 64, 128)
    found = {row["tensor"]: row["registers"] for row in tile.registers()}
    assert [found[name] for name in "QKVSPO"] == [32, 128, 128, 32, 16, 64]
    assert [(one["m"], one["n"], one["k"], one["mma"]) for one in tile.gemms()] == [(16, 64, 128, 64), (16, 128, 64, 64)]
    assert tile.bytes_moved(4096) == 2 * 128 * (64 + 4096) * 2
    assert tile.product_flops == 4 * 64 * 64 * 128


OPERATIONS = {"LDG": "LDG", "STS": "STS", "cp.async": "LDGSTS", "ldmatrix.x4": "LDSM", "ldmatrix.x4.trans": "LDSM"}


@pytest.mark.parametrize("number", range(5, 13))
def test_loads_and_stores_are_the_compilers(number):
    """By arithmetic and in the loop's machine code. Rung 4 is left out, as S and P cross shared memory there, too."""
    rungs = json.loads((ROOT / page.COMPILED).read_text())["rungs"]
    compiled = next(facts["compiled"]["loop"] for facts in rungs if facts["number"] == number)
    tile, counts = Tile.of(RUNGS[number], 128), dict.fromkeys(OPERATIONS.values(), 0)
    for one in tile.operations():
        counts[OPERATIONS[one["instruction"].split(",")[0]]] += one["count"]
    assert counts == {name: compiled.get(name, 0) for name in counts}
    assert sum(one["mma"] for one in tile.gemms()) == compiled["HMMA"]


def corner(name: str, register: int) -> tuple[int, int]:
    """The first row and column of what a register holds of an operand."""
    one = FRAGMENTS[name]
    return next((r, c) for r in range(one.rows) for c in range(one.columns) if one.at(r, c).register == register)


@pytest.mark.parametrize("lane", range(32))
def test_which_row_a_lane_names_for_ldmatrix(lane):
    """Of a matrix that becomes register lane // 8: of A, or of two B operands beside each other, whose columns are the rows of
    K, and whose rows are those of V, transposed on the way."""
    matrix, row = lane // 8, lane % 8
    of_q, (k, _) = corner("mma-a", matrix), corner("mma-b", matrix % 2)
    wanted = [
        (LANES_OF_Q, (of_q[0] + row, of_q[1])),
        (LANES_OF_K, (matrix // 2 * 8 + row, k)),
        (LANES_OF_V, (k + row, matrix // 2 * 8)),
    ]
    for lanes, want in wanted:
        row_of, column_of = (part.split(" ", 1)[1].replace(" (", " * (") for part in lanes.split(", "))
        assert (eval(row_of, {"l": lane}), eval(column_of, {"l": lane})) == want


def test_a_rung_is_a_few_lines_more_than_the_one_before():
    assert changed_lines(RUNGS[7], RUNGS[8]) == 1
    assert all(changed_lines(RUNGS[n - 1], RUNGS[n]) <= 20 for n in range(5, 13))


# ---- compiled, without a GPU

SCRIPT = """
import json, sys, torch
from strobe.device import KNOWN
from strobe.lab.ladder.compiled import compile_rung, of_rung
from strobe.lab.ladder.explain import uncapped_registers
from strobe.ladder import RUNGS
found = {}
for rung in RUNGS[1:] if sys.argv[1] == "all" else [RUNGS[n] for n in (4, 5, 6, 7, 8, 11, 17)]:
    for head_dim in (64, 128) if sys.argv[1] == "all" else (64,):
        for arch in (("A100", "H200") if sys.argv[1] == "all" else ("A100",)) if rung.least < 90 else ("H200",):
            found[f"{rung.number} {head_dim} {arch}"] = of_rung(compile_rung(rung, KNOWN[arch], head_dim))
print(json.dumps([found, uncapped_registers(KNOWN["A100"], 64)]))
"""
COMPILED = [
    pytest.param(("installed Triton", "some"), id="some, installed Triton"),
    pytest.param(("installed Triton", "all"), id="all, installed Triton", marks=pytest.mark.exhaustive),
    pytest.param(("oldest Triton", "all"), id="all, oldest Triton", marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module", params=COMPILED)
def compiled(request):
    """ "number head-dim arch" -> what the compiler makes of a rung, and the registers of rung 3 without a cap."""
    triton, which = request.param
    return answer_of(SCRIPT, which, triton=triton)


def test_no_wgmma_is_made_serial(compiled):
    found, _ = compiled
    warnings = [(name, line) for name, facts in found.items() if facts for line in facts["warnings"] if "C75" in line]
    assert warnings == []


def loop(found, number, *names, arch="A100"):
    counts = found[f"{number} 64 {arch}"]["loop"]
    return [counts.get(name, 0) for name in names]


def test_what_each_rung_changes_in_the_machine_code(compiled):
    found, _ = compiled
    assert loop(found, 4, "HMMA") == [64] and all(loop(found, 4, "STS", "LDS", "BAR"))
    assert loop(found, 5, "STS", "LDS", "LDSM", "BAR") == [0, 0, 0, 0] and found["5 64 A100"]["smem_bytes"] == 0
    assert loop(found, 5, "LDG")[0] > 10 * loop(found, 6, "LDG")[0] > 0
    assert loop(found, 6, "LDG", "STS", "LDGSTS") == [8, 8, 0] and loop(found, 7, "LDG", "STS", "LDGSTS") == [0, 0, 8]
    assert [found[f"{n} 64 A100"]["conflicts"] for n in (6, 7, 8)] == [8, 8, 1]
    assert loop(found, 8, "FMUL")[0] > 3 * loop(found, 11, "FMUL")[0]
    assert loop(found, 17, "HMMA", "FMUL", arch="H200") == [0, 0] and loop(found, 17, "HGMMA", "UTMALDG", arch="H200") == [
        12,
        2,
    ]


def test_what_the_other_rungs_change(compiled):
    found, _ = compiled
    if "9 64 A100" not in found:
        pytest.skip("compiled by the campaign alone")
    assert loop(found, 3, "HMMA") == [0] and found["9 64 A100"]["conflicts"] == 1
    assert loop(found, 7, "LDSM") == loop(found, 8, "LDSM") > loop(found, 10, "LDSM")
    assert found["9 64 A100"]["smem_bytes"] - found["8 64 A100"]["smem_bytes"] == 2 * 64 * 64 * 2
    assert loop(found, 10, "FMUL")[0] > 3 * loop(found, 11, "FMUL")[0]
    shares = [hmma / ldsm for hmma, ldsm in (loop(found, n, "HMMA", "LDSM") for n in (11, 12))]
    assert shares[1] == 2 * shares[0]
    assert loop(found, 13, "HMMA", "LDSM", arch="H200") == [0, 0] and loop(found, 13, "HGMMA", "LDGSTS", arch="H200") == [12, 8]
    assert loop(found, 14, "UTMALDG", "LDGSTS", arch="H200") == [2, 0]
    assert loop(found, 15, "BAR", arch="H200") < loop(found, 14, "BAR", arch="H200")
    assert loop(found, 15, "HGMMA", arch="H200") == loop(found, 16, "HGMMA", arch="H200")
    assert loop(found, 17, "FMUL", arch="H200")[0] < loop(found, 16, "FMUL", arch="H200")[0] // 4


def test_nothing_spills_that_should_not(compiled):
    found, _ = compiled
    spilling = {name for name, facts in found.items() if facts and facts["spill_bytes"] > 80}
    assert spilling <= {"4 128 H200", "5 128 H200"}  # which hold whole operands in registers


def test_too_many_resources(compiled):
    _, registers = compiled
    assert 64 < registers < 128 and "the launch fails" in too_many(KNOWN["A100"], registers)


# ---- on a GPU

ON_GPU = [(rung, head_dim, dtype) for rung in RUNGS[1:] for head_dim in (64, 128) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.gpu
@pytest.mark.parametrize("rung, head_dim, dtype", ON_GPU, ids=lambda value: str(getattr(value, "number", value)))
def test_on_a_gpu(rung, head_dim, dtype):
    kind = torch.float32 if rung.takes_fp32 else dtype
    q, k, v = inputs(3, 1024, head_dim, kind, "cuda")
    reason = rung.refuses(1024, head_dim, kind, capability_of(q.device))
    if reason is not None:
        pytest.skip(reason)
    for tile in rung.tiles(head_dim):
        poison = torch.full_like(q, float("nan"))  # memory that the result may get
        del poison
        out = rung.attention(q, k, v, **tile)
        assert relative_error(out, q, k, v) < BOUNDS[NAMES[kind]], tile
        assert torch.equal(out, rung.attention(q, k, v, **tile)), "two runs must give the same bits"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("title, old, new", RUNGS[4].variants)
def test_variants_on_a_gpu(title, old, new, head_dim):
    q, k, v = inputs(2, 512, head_dim, torch.bfloat16, "cuda")
    with variant(RUNGS[4], old, new) as edited:
        assert relative_error(edited.attention(q, k, v), q, k, v) < BOUNDS["bf16"]


@pytest.mark.gpu
def test_too_many_resources_on_a_gpu():
    """Rung 3, told to take more than 64 registers: 1024 threads of it do not fit."""
    from triton.runtime.errors import OutOfResources

    q, k, v = inputs(1, 64, 64, torch.float32, "cuda")
    [launch] = RUNGS[3].launches(q, k, v, torch.empty_like(q))
    with pytest.raises((OutOfResources, RuntimeError)):
        launch.kernel[launch.grid](*launch.arguments, **launch.constants, maxnreg=128)
