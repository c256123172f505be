"""`strobe audit`: golden numbers of our kernels on every arch, compiled without a GPU, and what it finds in anybody's cubin."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from commands import run
from tritons import VERSIONS, answer_of

from strobe.device import KNOWN
from strobe.kernels.portable.config import choose
from strobe.lab.binary import audit
from strobe.lab.binary.audit import ARCHS, layout_conflicts
from strobe.lab.binary.audit_report import ptxas_words, readable
from strobe.lab.binary.barriers import lost_barriers
from strobe.lab.binary.offline import problem_of
from strobe.lab.binary.sass import flow_of, innermost_loops, left_over, main_loop, unwritten, wrong_code
from strobe.lab.pages.glossary import GLOSSARY
from strobe.masks import Full

# ---- our kernels, on the oldest and on the installed Triton

SCRIPT = """
import json, sys
from pathlib import Path
import torch, triton
from strobe.lab.binary import audit, offline
from strobe.lab.bench.plan import Grid
from strobe.masks import Full

folder, kernels = Path(sys.argv[1]), sys.argv[2].split(",")
full, causal = Grid(head_dims=((128, 128),), lengths=(8192,), masks=("full", "causal")).points(False)
audited = {what: [r.as_json() for r in audit.reports_of([what], [full], own_dtype=True)] for what in kernels}
spilling = [r.as_json() for r in audit.reports_of(["portable-backward"], [causal])]
for arch in ("sm_80", "sm_90a"):
    [made] = offline.portable_forward(offline.problem_of((128, 128), Full(), torch.bfloat16), audit.ARCHS[arch])
    (folder / f"{arch}.cubin").write_bytes(made.kernel.asm["cubin"])
    (folder / f"{arch}.ttgir").write_text(made.kernel.asm["ttgir"])
[made] = offline.sm90_forward(full.problem(), audit.ARCHS["sm_90a"])
(folder / "roles.cubin").write_bytes(made.kernel.asm["cubin"])
print(json.dumps([triton.__version__, audited, spilling]))
"""
PORTABLE = [f"portable-forward@{arch}" for arch in ARCHS]
SOME = ["portable-forward", "portable-forward@sm_90a", "sm90-forward", "decode-16"]
ALL = [*PORTABLE, "portable-forward", "portable-backward@sm_120", "sm90-forward", "sm90-split", "sm90-fp8", "sm100-forward"]
ALL += ["decode", "decode@sm_80", "decode-16", "decode-fp8"]
MADE = [
    pytest.param(("installed Triton", [*SOME, "sm100-forward"]), id="some, installed Triton"),
    pytest.param(("installed Triton", ALL), id="all, installed Triton", marks=pytest.mark.exhaustive),
    pytest.param(("oldest Triton", SOME), id="some, oldest Triton", marks=pytest.mark.exhaustive),
]
"""By which Triton which kernels are compiled."""


@pytest.fixture(scope="module", params=MADE)
def made(request, tmp_path_factory):
    """(folder with cubins, what was audited, the audit of a kernel that spills)."""
    triton, kernels = request.param
    folder = tmp_path_factory.mktemp("cubins")
    version, audited, spilling = answer_of(SCRIPT, str(folder), ",".join(kernels), triton=triton)
    assert version.startswith(VERSIONS[triton])
    assert list(audited) == kernels
    return folder, audited, spilling


def loop_of(report: dict, part: str = "kernel") -> dict[str, int]:
    return report["parts"][part]["main_loop"]


def test_the_portable_forward_on_every_arch(made):
    """Its main loop has the products, the copies and the exponentials of one full tile of keys, and no others."""
    _, audited, _ = made
    for what in (what for what in audited if what.startswith("portable-forward")):
        [report] = audited[what]
        arch = what.partition("@")[2] or "sm_80"
        config = choose("forward", problem_of((128, 128), Full(), torch.bfloat16), ARCHS[arch])
        pairs, warps, loop = config.tile_q * config.tile_kv, config.num_warps, loop_of(report)
        assert report["arch"] == arch and list(report["parts"]) == ["kernel"]
        assert report["smem_bytes"] <= ARCHS[arch].smem_per_block and 0 < report["registers"] <= 255
        products = {"mma.sync": "HMMA", "wgmma": "HGMMA", "tcgen05": "UTCHMMA"}[config.mma]
        of_pairs = {
            "HMMA": 2 * pairs * 128 // (16 * 8 * 16) // warps,  # Q K^T and P V, 16 x 8 x 16 a warp
            "HGMMA": 128 // 16 + config.tile_kv // 16,  # two groups of 64 rows, 16 deep
            "UTCHMMA": 128 // 16 + config.tile_kv // 16,  # 128 rows, 16 deep
        }
        assert loop[products] == of_pairs[products], what
        assert not (set(of_pairs) - {products}) & set(report["parts"]["kernel"]["instructions"]), what
        assert pairs // (32 * warps) <= loop["MUFU.EX2"] <= pairs // (32 * warps) + 2, what  # and a row's rescaling
        copied = 2 * config.tile_kv * 128 * 2  # bytes of K and of V
        assert loop["LDGSTS"] == copied // (16 * 32 * warps), what
        assert not {"LDL", "STL", "LDG"} & set(loop), what


def test_a_decode_step(made):
    """16 queries of 8 heads are 128 rows, which eight warps in one role multiply by steps of 64 keys. One query of few requests
    is mma.sync's. Numbers of 8 bits are not loaded one by one."""
    _, audited, _ = made
    [many] = audited["decode-16"]
    assert list(many["parts"]) == ["multiplier", "copier of keys", "copier of values"]
    loop = loop_of(many, "multiplier")
    assert (loop["HGMMA"], loop["MUFU.EX2"]) == (128 // 16 + 64 // 16, 64 * 64 // 128)
    assert not {"LDS", "STS", "LDGSTS", "UTMALDG"} & set(loop)
    for copier in ("copier of keys", "copier of values"):
        loop = loop_of(many, copier)
        assert loop["UTMALDG"] and not {"HGMMA", "LDGSTS"} & set(loop)
    if "decode" in audited:
        ([one], [older], [eight]) = (audited[what] for what in ("decode", "decode@sm_80", "decode-fp8"))
        for step in (one, older):
            loop = loop_of(step)
            assert loop["HMMA"] and loop["LDGSTS"] and loop["LDSM"] and not {"HGMMA", "LDL", "STL", "STS"} & set(loop)
        loop = loop_of(eight)
        assert loop["HMMA"] and loop["LDSM"] and not any("LDS" in warning for warning in eight["warnings"])


def test_no_kernel_of_ours_is_called_wrong_code(made):
    _, audited, spilling = made
    for report in [*(report for reports in audited.values() for report in reports), *spilling]:
        assert not [warning for warning in report["warnings"] if "wrong code" in warning], report["name"]


def test_two_archs_in_one_process_are_two_kernels(made):
    _, audited, _ = made
    [on_80], [on_90] = audited["portable-forward"], audited["portable-forward@sm_90a"]
    assert "HMMA" in loop_of(on_80) and "HGMMA" in loop_of(on_90)


def test_serial_products_are_warned_of(made):
    """The portable forward's accumulators are touched between its wgmmas: ptxas says so, and a cubin shows it."""
    folder, audited, _ = made
    [report] = audited["portable-forward@sm_90a"]
    assert any(re.match(r"wgmma is made serial in \d+ places?, ptxas's C75\d\d: ", warning) for warning in report["warnings"])
    result = run("audit", str(folder / "sm_90a.cubin"))
    assert re.search(
        r"warning: wgmma seems to be serial: (\d+) waits for \1 products in the main loop of kernel", result.output
    )
    [hopper] = audited["sm90-forward"]
    assert not hopper["warnings"]
    assert "serial" not in run("audit", str(folder / "roles.cubin")).output


def test_spills_are_warned_of_and_placed(made):
    _, _, spilling = made
    assert [report["name"].split(", ")[-2] for report in spilling] == ["dK and dV", "dQ"]
    for report in spilling:
        moved = {name: loop_of(report).get(name, 0) for name in ("LDL", "STL")}
        [warning] = [warning for warning in report["warnings"] if "spilled" in warning]
        assert f"{report['spill_bytes']} bytes" in warning and report["spill_bytes"] > 0
        expected = f"{moved['LDL']} LDL and {moved['STL']} STL in the main loop of kernel" if any(moved.values()) else "none of"
        assert expected in warning


def test_layout_conversions_are_warned_of(made):
    """dS of dK and dV changes hands through shared memory; the forward's P goes from product to product in registers."""
    _, audited, spilling = made
    assert any("perhaps a layout conversion" in warning for warning in spilling[0]["warnings"])
    assert {"BAR"} < {"STS", "STSM", "BAR"} & set(loop_of(spilling[0]))
    assert not any("layout conversion" in warning for warning in audited["portable-forward"][0]["warnings"])


def test_roles_and_their_main_loops(made):
    _, audited, _ = made
    for what in ("sm90-forward", "sm90-fp8"):
        for report in audited.get(what, ()):
            *consumers, producer = report["parts"]
            products = "QGMMA" if what == "sm90-fp8" else "HGMMA"
            assert producer == "producer" and all(name.startswith("consumer") for name in consumers)
            assert len({loop_of(report, name)[products] for name in consumers}) == 1
            assert loop_of(report, producer)["UTMALDG"] and products not in loop_of(report, producer)
    for report in audited.get("sm90-split", ()):
        # Outside of the main loops, but for a few loads.
        assert report["spill_bytes"] <= (0 if report["name"].endswith("dQ") else 330)
        loops = [loop_of(report, name) for name in list(report["parts"])[:2]]
        assert all(loop["HGMMA"] and not loop.get("STL") and loop.get("LDL", 0) <= 3 for loop in loops)
    for what in ("sm90-forward", "sm90-split", "sm90-fp8"):  # each takes its turn (`kernels.common.turn`)
        for report in audited.get(what, ()):
            for name in ("ACQBULK", "PREEXIT"):
                assert sum(part["instructions"].get(name, 0) for part in report["parts"].values()) == 1, (what, name)
    for report in audited.get("sm100-forward", ()):
        assert list(report["parts"]) == ["softmax 0", "softmax 1", "correction", "mma", "epilogue", "load"]
        assert loop_of(report, "mma")["UTCHMMA"] == 2 * (128 // 16 + 128 // 16)  # both Q stages, head dim 128, 128 keys
        assert loop_of(report, "softmax 0")["LDTM"] and loop_of(report, "load")["UTMALDG"]
        assert report["spill_bytes"] == 0


def test_what_else_ptxas_said(made):
    _, audited, _ = made
    for what, reports in audited.items():
        for report in reports:
            said = report["ptxas"]
            assert said["barriers"] >= 1 and said["ptxas_ms"] > 0 and said["stack_bytes"] is not None, what
            assert (said["constant_bytes"] is None) == (report["arch"] in ("sm_90a", "sm_100a", "sm_120")), what
            assert f"{said['barriers']} named barriers, " in ptxas_words(said)


def test_the_kernel_is_the_one_that_a_benchmark_times(made):
    """Which config runs depends on batch, heads and length: 8k of 16k tokens in 16 heads of 128 are two groups, of 128 keys."""
    _, audited, _ = made
    [report] = audited["sm90-forward"]
    assert report["name"].endswith("S=8192") and list(report["parts"]) == ["consumer 0", "consumer 1", "producer"]
    loop = loop_of(report, "consumer 1")
    assert loop["HGMMA"] == 128 // 16 + 128 // 16 and loop["MUFU.EX2"] == 64 * 128 // 128
    assert not {"LDL", "STL", "LDS", "STS", "SHFL"} & set(loop)


def test_a_cubin_says_what_its_kernel_said(made):
    """Registers, roles and main loops are found in a file without any help from its maker."""
    folder, audited, _ = made
    for name, what in (("sm_80", "portable-forward"), ("roles", "sm90-forward")):
        path = folder / f"{name}.json"
        result = run("audit", str(folder / f"{name}.cubin"), "--json", str(path))
        assert result.exit_code == 0, result.output
        [found], [report] = json.loads(path.read_text())["kernels"], audited[what]
        part, counts = next(iter(found["parts"].items()))
        [row] = [line for line in result.output.splitlines() if line.startswith("│ MUFU.EX2")]
        expected = [counts[where]["MUFU.EX2"] for where in ("instructions", "main_loop")]
        assert row.replace("│", "").split()[1:3] == list(map(str, expected)), part
        assert (found["registers"], found["arch"], found["spill_bytes"]) == (report["registers"], report["arch"], None)
        loops = [[part["main_loop"] for part in one["parts"].values()] for one in (found, report)]
        assert loops[0] == loops[1]


def test_two_cubins_beside_each_other_explained_and_listed(made):
    folder, audited, _ = made
    listing = folder / "loop.sass"
    files = [str(folder / f"{name}.cubin") for name in ("sm_80", "sm_90a")]
    picture = folder / "loops.svg"
    result = run("audit", *files, "--explain", "--sass", str(listing), "--out", str(picture))
    assert result.exit_code == 0, result.output
    svg = picture.read_text()
    assert "<svg" in svg and all(f"<!-- {words} -->" in svg for words in ("A: kernel", "B: kernel", "tensor cores", "other"))
    assert "A: _forward, sm_80:" in result.output and "B: _forward, sm_90a:" in result.output
    [row] = [line for line in result.output.splitlines() if line.startswith("│ HMMA")]
    [report] = audited["portable-forward"]
    assert row.replace("│", "").split() == ["HMMA", str(loop_of(report)["HMMA"]), "-"]
    assert "HGMMA (tensor cores, since sm_90a): wgmma: an asynchronous product of four warps" in result.output
    text = listing.read_text()
    assert text.startswith("// _forward, sm_80: main loop of kernel, ")
    assert text.partition("// _forward, sm_90a")[0].count("\nHMMA.16816") == loop_of(report)["HMMA"]


def test_conflicts_are_found_in_tritons_layouts(made):
    folder, _, _ = made
    text = (folder / "sm_80.ttgir").read_text()
    assert "maxPhase = 8" in text and not list(layout_conflicts(text))
    [first, *_] = layout_conflicts(text.replace("maxPhase = 8", "maxPhase = 1"))
    assert "vec 8, perPhase 1, maxPhase 1, 8 times as many wavefronts as without" in first


# ---- cubins made here

HEAD = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""
LOOP = """
.visible .entry %s(.param .u64 a, .param .u32 n)
{
  .reg .b32 %%r<20>; .reg .b64 %%d<4>; .reg .f32 %%f<8>; .reg .pred %%p;
  .shared .align 16 .b8 tile_%s[4096];
  ld.param.u64 %%d1, [a]; ld.param.u32 %%r1, [n];
  mov.u32 %%r2, %%tid.x; mul.wide.u32 %%d2, %%r2, 16; add.u64 %%d1, %%d1, %%d2; shl.b32 %%r3, %%r2, 4;
  mov.f32 %%f0, 0f00000000; mov.f32 %%f1, %%f0; mov.f32 %%f2, %%f0; mov.f32 %%f3, %%f0;
  mov.u32 %%r10, tile_%s; add.u32 %%r3, %%r3, %%r10; mov.u32 %%r4, %%r2;
LOOP:
  ld.global.v4.b32 {%%r5, %%r6, %%r7, %%r8}, [%%d1+4096];
  %s
  ld.shared.b32 %%r9, [%%r3+64];
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    {%%f0,%%f1,%%f2,%%f3}, {%%r5,%%r6,%%r7,%%r8}, {%%r9,%%r9}, {%%f0,%%f1,%%f2,%%f3};
  bar.sync 0;
  add.u64 %%d1, %%d1, 8192; sub.u32 %%r1, %%r1, 1; setp.ne.u32 %%p, %%r1, 0;
  @%%p bra LOOP;
  st.global.f32 [%%d1], %%f0;
  ret;
}
"""
LINES = {
    "good": "",
    "narrow": "ld.global.b32 %r4, [%d1]; xor.b32 %r5, %r5, %r4;",
    "narrow_shared": "ld.shared.u8 %r4, [%r3+128]; xor.b32 %r5, %r5, %r4;",
    "round_trip": "st.shared.b32 [%r3], %r5; bar.sync 0;",
}
"""What each kernel's loop has beside a product, a wide load from global memory, and a load from shared memory."""


@pytest.fixture(scope="module")
def cubin(tmp_path_factory) -> Path:
    """A file of several kernels: one that does nothing, and those of LINES."""
    from triton import knobs

    folder = tmp_path_factory.mktemp("ptx")
    (folder / "made.ptx").write_text(HEAD + "".join(LOOP % (name, name, name, line) for name, line in LINES.items()))
    command = [knobs.nvidia.ptxas.path, "-arch=sm_80", "-o", str(folder / "made.cubin"), str(folder / "made.ptx")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "made.cubin"


def test_a_cubin_of_somebody_else(cubin, tmp_path):
    result = run("audit", str(cubin), "--json", str(tmp_path / "made.json"))
    assert result.exit_code == 0, result.output
    reports = {report["name"]: report for report in json.loads((tmp_path / "made.json").read_text())["kernels"]}
    assert set(reports) == {"nothing", *LINES}
    for name, report in reports.items():
        assert report["registers"] > 0 and report["arch"] == "sm_80" and report["spill_bytes"] is None
        assert report["smem_bytes"] == (0 if name == "nothing" else 4096)
        assert ("HMMA" in loop_of(report)) == (name != "nothing")
    assert reports["nothing"]["warnings"] == reports["good"]["warnings"] == []
    [narrow], [shared], [round_trip] = (reports[name]["warnings"] for name in ("narrow", "narrow_shared", "round_trip"))
    assert re.fullmatch(r"(\d+) of \d+ LDS load 2 bytes a lane or less in the main loop of kernel", shared)
    assert re.fullmatch(r"(\d+) of \d+ LDG load 4 bytes a lane or less in the main loop of kernel", narrow)
    assert round_trip.startswith("perhaps a layout conversion through shared memory, inferred from the order: ")


def test_code_that_reads_what_nothing_has_written_is_warned_of(cubin, monkeypatch):
    """As the ptxas of CUDA 12.8 made it (docs/upstream.md)."""
    wrong = "        /*0000*/                   UIADD3 UR61, UP0, UR61, 0x20, URZ ;"
    right = audit.disassemble
    monkeypatch.setattr(
        audit, "disassemble", lambda file: re.sub(r"(?m)^(\s*\.section\s+\.text\..*$)", rf"\1\n{wrong}", right(file))
    )
    assert "warning: " in (said := run("audit", str(cubin)).output)
    assert "wrong code: `UIADD3 UR61, UP0, UR61, 0x20, URZ` reads a register" in " ".join(said.split())


def test_the_main_loop_is_the_densest_of_the_innermost():
    """Two loops inside one: that which masks does more beside the same products."""
    sass = """
.entry:
        /*0000*/ S2R R0, SR_TID.X ;
.outer:
        /*0010*/ IADD3 R1, R1, 1, RZ ;
.masked:
        /*0020*/ ISETP.GE.AND P1, PT, R2, R3, PT ;
        /*0030*/ HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0040*/ @P0 BRA `(.masked) ;
.full:
        /*0050*/ HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0060*/ @P1 BRA `(.full) ;
        /*0070*/ @P2 BRA `(.outer) ;
        /*0080*/ EXIT ;
"""
    flow = flow_of(sass)
    everything = set(range(len(flow.blocks)))
    loops = innermost_loops(flow, everything, ("HMMA",))
    found = sorted([instruction.name for instruction in flow.instructions(loop)] for loop in loops)
    assert found == [["HMMA", "BRA"], ["ISETP", "HMMA", "BRA"]]
    assert [str(instruction) for instruction in flow.instructions(main_loop(flow, everything))] == [
        "HMMA.16816.F32 R4, R8, R12, R4",
        "@P1 BRA `(.full)",
    ]
    assert main_loop(flow, everything, ("HGMMA",)) == set()


def test_the_glossary_names_a_source_for_every_cost():
    for name, entry in GLOSSARY.items():
        assert entry.meaning and re.fullmatch(r"all|sm_\d+a?", entry.since), name
        assert not re.search(r"\d cycle", entry.cost) or "(" in entry.cost, name


@pytest.mark.parametrize(
    "name, shown",
    [
        ("_forward", "_forward"),
        ("sm90 forward, head dim 128, S=4096", "sm90 forward, head dim 128, S=4096"),
        ("_Z4axpyfPfS_", "axpy"),
        ("_ZN7cutlass13device_kernelINS_4gemm6kernelEEEvT_", "cutlass::device_kernel<...>"),
        ("_ZN60_GLOBAL__N__ddc97c92_21_sparse24_gemm_sm90_cu_6d241d85_141984loopEv", "(anonymous)::loop"),
    ],
)
def test_names_that_a_reader_can_read(name, shown):
    assert readable(name) == shown


# ---- what is refused


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("sm70-forward", "a kernel must be one of portable-forward, portable-backward, sm80-forward, sm80-backward"),
        ("sm90-forward sm90@sm_80", "a kernel must be one of portable-forward, portable-backward, sm80-forward"),
        ("nowhere.cubin", "or a cubin file, got 'nowhere.cubin'"),
        (__file__, "a cubin must be a file that nvdisasm reads, got"),
        ("sm90-forward@sm_75", "an arch must be one of sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120, got 'sm_75'"),
        ("sm90-forward@sm_80", "sm90-forward needs a Hopper GPU (sm_90), not A100 (sm_80)"),
        ("sm100-forward@sm_90a", "sm100-forward needs a data-center Blackwell GPU (sm_100, sm_103), not H200 (sm_90)"),
        ("sm90-fp8 --head-dims 72", "sm90-fp8 takes head dims up to 256 in multiples of 16"),
        ("portable-forward --head-dims 12", "head-dims must be multiples of 8 from 8 to 256, or two joined by /, got 12"),
        ("portable-forward --length 1024 --mask window", "a window of 1024 keys needs a length of more than 1024"),
        ("sm90-forward --dtype fp32", "sm90-forward takes float16 and bfloat16, not float32"),
        ("decode --mask window", "decode is audited with a full or a causal mask, not window"),
        ("decode --head-dims 192/128", "decode is audited with one head dim for k and v, not 192 and 128"),
        ("decode-fp8 --dtype bf16", "decode-fp8 is audited over a cache of fp8, not of bfloat16"),
        ("sm90-fp8 --dtype bf16", "sm90-fp8 takes float8_e4m3fn, not bfloat16"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_status_2(arguments, words):
    result = run("audit", *arguments.split())
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_the_interpreter_compiles_nothing():
    result = run("audit", "portable-forward")
    assert result.exit_code == 2 and "kernels cannot be compiled while TRITON_INTERPRET=1" in result.output


def test_every_arch_has_a_gpu():
    assert all(arch in KNOWN.values() and name.startswith(f"sm_{arch.capability}") for name, arch in ARCHS.items())


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["UMOV UR4, 0x1 ;", "UIADD3 UR5, UR4, UR6, URZ ;"], ("UIADD3 UR5, UR4, UR6, URZ",)),
        (["UMOV UR5, UR6 ;", "UIADD3 UR7, UR5, 0x1, URZ ;"], ("UMOV UR5, UR6",)),
        (["UMOV UR5, UR6 ;", "UIADD3 UR5, UR5, 0x1, URZ ;"], ("UMOV UR5, UR6",)),
        (["UMOV UR5, UR6 ;", "@!UP0 UMOV UR5, 0x1 ;"], ("UMOV UR5, UR6",)),
        (["UMOV UR5, UR6 ;", "UMOV UR5, 0x1 ;"], ()),
        (["UMOV.64 UR4, URZ ;", "UIADD3 UR6, UR5, 0x1, URZ ;"], ()),
    ],
)
def test_what_reads_a_uniform_register_that_nothing_has_written(lines, found):
    """A copy that the next instruction writes over is nobody's."""
    assert unwritten(listed("\n".join(lines))) == found


def listed(lines: str) -> str:
    """Labels and instructions, one a line, as nvdisasm shows them."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line}"
        for i, line in enumerate(map(str.strip, lines.strip().splitlines()))
    )


TWO_LOOPS = """
    S2UR UR4, SR_CgaCtaId ;
    ULEA UR12, UR4, UR12, 0x18 ;
    {ahead}
    @!P0 BRA `(.L_x_1) ;
    .L_x_0:
    {first}
    UMOV UR6, UR18 ;
    UMOV UR7, UR19 ;
    QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0 ;
    @P1 BRA `(.L_x_0) ;
    .L_x_1:
    {between}
    .L_x_2:
    {second}
    UMOV UR6, UR18 ;
    UMOV UR7, UR19 ;
    {product} ;
    @P2 BRA `(.L_x_2) ;
    EXIT ;
"""
"""Two loops that multiply by the same rows of Q, in UR4 and UR5, and by a block of keys, in UR6 and UR7."""

MADE_ANEW = """UIADD3 UR4, UP0, UR12, 0x2, URZ ;
    UIADD3.X UR5, UR8, 0x40000040, URZ, UP0, !UPT ;"""
SAVED = """MOV R5, UR4 ;
    UMOV UR4, 0x400 ;
    R2UR UR4, R5 ;"""
OF_BOTH = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0"


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ({"first": MADE_ANEW}, True),
        ({"first": MADE_ANEW, "second": MADE_ANEW}, False),
        ({"ahead": MADE_ANEW}, False),
        ({"first": "UIADD3.64 UR4, UR12, 0x2 ;"}, True),
        ({"first": "UMOV UR4, UR18 ;", "second": "UIADD3.X UR5, UR8, 0x40000040, URZ, UP0, !UPT ;"}, True),
        ({"first": MADE_ANEW, "second": f"@P3 {MADE_ANEW}"}, True),  # in some steps alone
        ({"ahead": "EXIT ;", "first": MADE_ANEW}, False),  # what nobody reaches
        ({"ahead": f"{MADE_ANEW}\n.L_x_3:", "first": SAVED}, False),
        ({"ahead": MADE_ANEW, "first": "UIADD3 UR4, UR4, 0x40, URZ ;"}, False),  # carried on
        ({"first": MADE_ANEW, "product": "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R8, gdesc[UR4], R24"}, False),  # reads UR6, UR7
        ({"first": MADE_ANEW, "product": "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R8, gdesc[UR2], R24"}, True),
        ({"first": MADE_ANEW, "product": "UTCHMMA gdesc[UR2], gdesc[UR8], tmem[UR22], tmem[UR16], idesc[UR17], UPT"}, False),
        ({"first": MADE_ANEW, "product": "UTCHMMA gdesc[UR2], gdesc[UR4], tmem[UR22], tmem[UR16], idesc[UR17], UPT"}, True),
    ],
)
def test_what_takes_a_descriptor_from_a_loop_that_may_not_have_run(parts, wrong):
    empty = dict.fromkeys(("ahead", "first", "between", "second"), "")
    given = empty | {"product": OF_BOTH} | parts
    lines = TWO_LOOPS.format(**given)
    assert left_over(listed(lines)) == ((given["product"],) if wrong else ())
    always = lines.replace("@!P0 BRA `(.L_x_1) ;", "")
    assert left_over(listed(always)) == ()


def test_wrong_code_is_a_sentence():
    lines = listed(
        TWO_LOOPS.format(ahead="", first=MADE_ANEW, between="UIADD3 UR9, UR40, 0x1, URZ ;", second="", product=OF_BOTH)
    )
    said = wrong_code(lines)
    assert "wrong code: `UIADD3 UR9, UR40, 0x1, URZ` reads a register that nothing before it has written" in said
    assert said[-1] == f"wrong code: `{OF_BOTH}` takes a descriptor from a loop that may not have run"


BARRIERS = """
  tt.func public @kernel() {{
    %words = ttg.local_alloc : () -> !ttg.memdesc<64xi64, #shared, #smem, mutable>
    %barriers = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable>
    %0 = ttg.memdesc_index %barriers[%c0] : !ttg.memdesc<2x1xi64, #shared, #smem, mutable> -> !ttg.memdesc<1xi64, #shared>
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared>
    ttg.warp_specialize(%words{roles}) attributes {{}}
    default {{
      ttng.wait_barrier %0, %c0 : !ttg.memdesc<1xi64, #shared>
    }}
    partition0(%arg0: !ttg.memdesc<64xi64, #shared, #smem, mutable>) num_warps(1) {{
      %0 = ttg.memdesc_index %arg0[%c0] : !ttg.memdesc<64xi64, #shared, #smem, mutable> -> !ttg.memdesc<1xi64, #shared>
      ttng.inval_barrier %0 : !ttg.memdesc<1xi64, #shared>
      ttg.warp_return
    }} : (!ttg.memdesc<64xi64, #shared, #smem, mutable>) -> ()
    {end}
    tt.return
  }}
"""
"""A kernel with a barrier for its first role, and something else of the same name in its second one."""


@pytest.mark.parametrize(
    ("roles", "end", "lost"),
    [("", "", True), (", %barriers", "", False), ("", "ttng.inval_barrier %0 : !ttg.memdesc<1xi64, #shared>", False)],
    ids=["for the first role alone", "for both roles", "invalidated"],
)
def test_a_barrier_whose_memory_others_may_get_is_wrong_code(roles, end, lost):
    sentence = "wrong code: barrier %barriers is not invalidated: others may get its memory while it is one"
    assert lost_barriers(BARRIERS.format(roles=roles, end=end)) == ((sentence,) if lost else ())
