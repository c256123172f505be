"""The command line, through its own door."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from reports import report as bench_report

from strobe_cli.options import command_given

pytestmark = pytest.mark.usefixtures("small_product")


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("demo", "explain", "bench"))


def test_help_imports_nothing_heavy():
    """Neither PyTorch nor Strobe, whose import takes longer than the answer."""
    code = (
        "import sys; from typer.testing import CliRunner; from strobe_cli.app import app; "
        "assert CliRunner().invoke(app, ['explain', '--help']).exit_code == 0; "
        "print([name for name in ('torch', 'numpy', 'triton', 'matplotlib', 'strobe') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_explain_answers_for_a_gpu_that_is_not_here():
    result = run("explain", "--arch", "h200", "--seqlen-q", "16384")
    assert result.exit_code == 0
    assert "device    H200 (sm_90)" in result.output and "refused   torch_cpu: runs on a CPU only" in result.output
    assert "passed    sm80, portable, tiled: run it too, by name" in result.output
    assert "at least  2.22 ms, bound by matmul" in result.output


def test_explain_builds_the_problem_it_was_asked_about():
    options = (
        "--arch CPU --batch 3 --seqlen-q 100 --seqlen-kv 200 --heads 8 --heads-kv 2 --head-dim 192 --head-dim-v 128 "
        "--dtype fp16 --causal --window 64,-1 --softcap 30 --backward --backend tiled"
    )
    result = run("explain", *options.split())
    expected = (
        "backward, batch 3, 100 x 200, heads 8/2, head dim 192, 128, float16, mask window(left=64, right=0), score softcap(30)"
    )
    assert expected in result.output
    assert "chosen    tiled" in result.output and "at least  unknown: cost: no peak rates of CPU" in result.output


def test_explain_asks_one_backend():
    result = run("explain", "--arch", "CPU", "--backend", "torch_cpu", "--softcap", "1")
    assert "chosen    none" in result.output and "tiled" not in result.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("explain --arch T9", "arch must be one of T4, A100"),
        ("explain --window 3", "window must be LEFT,RIGHT, such as 1024,0, got '3'"),
        ("explain --window=-2,0", "window must be -1 or more, got -2"),
        ("explain --heads 6 --heads-kv 4", "heads must be a multiple of heads-kv, got 6 and 4"),
        ("explain --heads 0", "heads must be 1 or more, got 0"),
        ("explain --seqlen-kv=-1", "seqlen-kv must be 0 or more, got -1"),
        ("explain --head-dim 100", "head-dim must be a multiple of 8 from 8 to 256, got 100"),
        ("explain --head-dim-v 264", "head-dim-v must be a multiple of 8 from 8 to 256, got 264"),
        ("explain --dtype int8", "dtype must be one of bf16, fp16, fp32, got 'int8'"),
        ("explain --softcap=-1", "softcap must be 0 (none) or positive, got -1.0"),
        ("explain --backend sm70", "backend must be one of sm100, sm90, sm80, portable"),
        ("bench backward --device cpu --dtype bf16,fp8", "fp8 is a forward's, as attention_fp8 has no gradient"),
        ("simulate --timeline t.gif", "timeline must end in .png or .svg, got t.gif"),
        ("bench forward --device cpu --lengths 1,x", "lengths must be comma-separated integers, got '1,x'"),
        ("bench forward --device cpu --lengths 0", "lengths must be 1 or more, got 0"),
        (
            "bench forward --device cpu --head-dims 64,100",
            "multiples of 8 from 8 to 256, or two joined by /, got 100",
        ),
        ("bench forward --device cpu --heads 6 --heads-kv 4", "heads must be a multiple of heads-kv, got 6 and 4"),
        ("bench forward --device cpu --dtype bf16,int8", "dtype must be one of bf16, fp16, fp32, fp8, got 'int8'"),
        ("bench forward --device cpu --mask causal,all", "mask must be one of full, causal, window, got 'all'"),
        ("bench forward --device cpu --head-dims 64/64/64", "or two joined by /, got 64/64/64"),
        ("bench backward --device cpu --resume", "resume needs --json with a file that is there, got None"),
        ("bench check nowhere.json", "a result of strobe bench must be a JSON file, got nowhere.json"),
        ("bench forward --device cpu --backends triton", "backends must be one of sm100, sm90, sm80, portable"),
        ("bench forward --device cpu --peers FA9", "peers must be one of SDPA flash, SDPA math, got 'FA9'"),
        ("bench forward --device cpu --rounds 0", "rounds must be 1 or more, got 0"),
        ("bench forward --device cpu --seconds 0", "seconds must be more than 0, got 0.0"),
        ("timeline --simulate --mask window", "mask must be one of full, causal, got 'window'"),
        ("bench forward --device tpu", "device must be one of"),
        ("bench forward --device cpu --part 3/2", "part must be I/N with 1 <= I <= N, got '3/2'"),
        ("bench forward --device cpu --part 1", "part must be I/N with 1 <= I <= N, got '1'"),
        ("bench merge nowhere.json --out merged.json", "a result of strobe bench must be a JSON file, got nowhere.json"),
        ("bench forward --device cpu --protocol short", "protocol must be one of sustained, single, got 'short'"),
        ("bench forward --device cpu --protocol single --seconds 1", "seconds belongs to the sustained protocol, got 1.0"),
    ],
)
def test_wrong_options_are_one_sentence_and_status_2(arguments, words):
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


TINY = "--device cpu --head-dims 32/16 --lengths 64 --tokens 64 --heads 2 --mask causal --rounds 1 --seconds 0.001 --dtype fp32"


def test_bench_measures_writes_and_resumes(tmp_path):
    path = tmp_path / "result.json"
    result = run("bench", "forward", *TINY.split(), "--peers", "all", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert [(p["length"], p["mask"], p["heads"], p["head_dim_v"]) for p in report["points"]] == [(64, "causal", 2, 16)]
    assert report["points"][0]["results"]["SDPA math"]["tflops"] > 0 and report["what"] == "forward"
    result = run("bench", "forward", *TINY.split(), "--json", str(path), "--resume")
    assert result.exit_code == 0 and "0 points" in result.output
    assert json.loads(path.read_text())["points"] == report["points"]


def test_bench_in_parts(tmp_path):
    paths = [str(tmp_path / f"{n}.json") for n in (1, 2)]
    for n, path in enumerate(paths, 1):
        shape = [*TINY.split(), "--mask", "full,causal", "--part", f"{n}/2", "--peers", "SDPA math"]
        assert run("bench", "forward", *shape, "--json", path).exit_code == 0
    result = run("bench", "merge", *paths, "--out", str(tmp_path / "whole.json"))
    assert result.exit_code == 0 and "full S=" in result.output and "causal S=" in result.output
    assert "incomplete" not in result.output
    again = run("bench", "merge", paths[0], paths[0], "--out", str(tmp_path / "twice.json"))
    assert again.exit_code == 2 and "merge needs points that were measured once" in again.output


def test_bench_backward(tmp_path):
    path = tmp_path / "result.json"
    result = run("bench", "backward", *TINY.replace("32/16", "32").split(), "--peers", "SDPA math", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["what"] == "backward"


def test_bench_check_lists_shortfalls_and_says_so_by_its_status(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(bench_report()))
    below = run("bench", "check", str(path), "--at-least", "1.25")
    assert below.exit_code == 1 and "bf16 D=128 full S=1024: 1.200 of cuDNN, under 1.25" in below.output
    above = run("bench", "check", str(path), "--at-least", "1.19")
    assert above.exit_code == 0 and "2 points, none falls short" in above.output


# ---- what would be lost, or would change nothing

REPORT = json.dumps({"schema": 2, "points": [{}]})


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("cost --arch H200 --json nowhere/c.json", "a file to write must be in a folder that is there and takes it"),
        ("cost --arch H200 --out nowhere/c.png", "takes it, got nowhere/c.png"),
        ("bench forward --json nowhere/b.json", "takes it, got nowhere/b.json"),
        ("bench forward --out b.gif", "out must end in .png or .svg, got b.gif"),
        ("report half.json --out .", "takes it, got ."),
        ("cost --arch H200 --backward --tile 64x64", "tile and packed are a forward's"),
        ("cost --arch H200 --backward --packed", "tile and packed are a forward's"),
        ("occupancy --arch L4 --registers 80 --threads 128 --mask full", "registers must be given without mask"),
        ("occupancy --arch L4 --grid 4", "smem and grid go with registers and threads, got None and 4 without"),
        ("audit half.json --head-dims 64 --mask causal", "a cubin must be given without head-dims, mask"),
        ("timeline --report half.json --simulate --length 4", "report must be given without simulate, length"),
        ("simulate half.json --heads 3", "file must be given without heads, which would change nothing"),
        ("bench forward --mask window --lengths 512", "a window of 1024 keys needs a length of more than 1024"),
        ("timeline --simulate --head-dims 512", "head-dim must be a multiple of 8 from 8 to 256, got 512"),
        ("timeline --simulate --head-dims 128 --mask full --length 100", "got none: give a longer length"),
        *((f"{command} half.json", "must be whole, got half.json, in which something is missing")
          for command in ("bench check", "bench compare half.json", "roofline --report")),
        *((f"timeline --report {name}", f"must hold points with stamps, got {name}") for name in ("half.json", "list.json")),
        ("profile --report half.json", "must hold subjects and tables, got half.json without them"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_sentence_and_status_2(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.json").write_text(REPORT)
    (tmp_path / "list.json").write_text("[1]")
    result = run(*arguments.split())
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output, result.output
    assert isinstance(result.exception, SystemExit) and {p.name for p in tmp_path.iterdir()} == {"half.json", "list.json"}


def test_a_result_says_how_it_was_made_and_not_where_it_went():
    given = ["cost", "--arch", "H200", "--out", "a.png", "--json", "b.json", "--causal"]
    assert command_given(given) == "strobe cost --arch H200 --causal"
    for command, option in (("timeline", "--perfetto"), ("audit", "--sass")):
        for where in ([option, "a.txt"], [f"{option}=a.txt"], [option, "a.txt", f"{option}=b.txt", "--resume"]):
            assert command_given([command, *where, "--mask=full"]) == f"strobe {command} --mask=full"
    assert command_given(["cost", "--json"]) == "strobe cost"
    assert command_given(["bench", "forward", "--peers", "SDPA flash"]) == "strobe bench forward --peers 'SDPA flash'"


def test_pictures_of_a_benchmark_and_of_a_timeline_go_where_they_are_asked_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = "--head-dims 64 --lengths 64 --tokens 64 --heads 1 --mask full --peers all --rounds 1 --seconds 0.001"
    result = run("bench", "forward", *shape.split(), "--device", "cpu", "--json", "b.json", "--out", "b.svg")
    assert result.exit_code == 0 and "<svg" in (tmp_path / "b.svg").read_text(), result.output
    assert not (tmp_path / "b.png").exists()
    measured = Path(__file__).parents[2] / "benchmarks/results/timeline-h200-2026-11-22.json"
    result = run("timeline", "--report", str(measured), "--out", "t.svg")
    assert result.exit_code == 0 and "<svg" in (tmp_path / "t.svg").read_text(), result.output
