"""The README's generated blocks are what their generator makes, so they cannot go stale."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from reports import report

import strobe
from strobe.cpu import torch_cpu
from strobe.device import CPU
from strobe.kernels import triton_version
from strobe.lab.pages import readme

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(triton_version() < (3, 8), reason="the README says what a Triton runs that no backend refuses")
@pytest.mark.parametrize("page", readme.PAGES)
def test_pages_are_up_to_date(page):
    text = (ROOT / page).read_text()
    assert readme.rewritten(text, ROOT, page) == text, "run `make readme`"


def test_nothing_is_claimed_before_it_was_measured(tmp_path):
    assert (
        readme.measured(tmp_path)
        == readme.in_short(tmp_path)
        == readme.steps_in_short(tmp_path)
        == "No measurement on a GPU is published yet."
    )


def write(root: Path, name: str, **changes) -> None:
    path = root / readme.RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report() | changes))


def test_measured_block_is_the_newest_gpu_result(tmp_path):
    write(tmp_path, "forward-old.json", date="2025-12-31T00:00:00+00:00", command="old")
    write(tmp_path, "forward-new.json", command="strobe bench --seconds 1")
    write(tmp_path, "forward-cpu.json", date="2027-01-01T00:00:00+00:00", device={"kind": "cpu"})
    text = readme.measured(tmp_path)
    assert "(../benchmarks/results/forward-new.png)" in text and "`strobe bench --seconds 1`" in text
    assert "2026-01-02" in text and "commit abc" in text and "NVIDIA H200" in text and "at 800" in text
    assert "over the best of cuDNN." in text, "contenders that never ran are not named"
    assert "|  | mask | 1k |" in text
    assert "| bf16 D=128 | full | 600 (1.20) |" in text
    assert "| bf16 D=128 | causal | 300 |" in text
    assert "incomplete" not in text


def test_the_caption_says_who_is_ahead_of_whom_on_what(tmp_path):
    rates = {"strobe": [110.0, 111.0, 112.0], "cuDNN": [100.0, 100.0, 100.0]}
    ahead = {name: {"tflops": rounds[1], "rounds": rounds} for name, rounds in rates.items()}
    behind = {"strobe": ahead["cuDNN"], "cuDNN": ahead["strobe"]}
    first, second = report()["points"]
    points = [first | {"results": ahead, "redone": 0.021}, second | {"results": behind, "redone": None}]
    changed = {"kernels/sm90/forward.py": "0"}
    write(tmp_path, "forward-h200.json", points=points, inputs="model", kernels=changed)
    text = readme.measured(tmp_path)
    assert "Strobe is ahead at 1 points, level at 0, behind at 1, of 2" in text
    assert "| 111 (**1.11 ±0.03**) |" in text and "| 100 (*0.90 ±0.03*) |" in text
    assert "Not taking part: FA3 (not installed); FA4 (not measured)." in text
    assert "inputs: a model's activations, at most 2% of the blocks computed twice." in text
    assert "Changed since then: the kernel `sm90 forward`." in text


def test_in_short_a_head_dim_is_a_line(tmp_path):
    """The geometric mean of 1.1 and 0.9; the interval is half of the root of the points' squares."""
    rates = {"strobe": [110.0, 111.1, 108.9], "cuDNN": [100.0, 100.0, 100.0]}
    ahead = {name: {"tflops": rounds[0], "rounds": rounds} for name, rounds in rates.items()}
    behind = {"strobe": {"tflops": 90.0, "rounds": [90.0, 90.9, 89.1]}, "cuDNN": ahead["cuDNN"]}
    first, second = report()["points"]
    wide = first | {"head_dim": 256, "head_dim_v": 256, "results": behind}
    write(tmp_path, "forward-h200.json", points=[first | {"results": ahead}, second | {"results": behind}, wide])
    write(tmp_path, "backward-h200.json", points=[first | {"results": ahead, "length": 4096}], what="backward")
    lines = readme.in_short(tmp_path).splitlines()
    assert lines[0] == "|  | forward | backward |"
    assert lines[2] == "| D=128 | 0.99 ±0.02 (0.90 to 1.10) | **1.10 ±0.03** (1.10 to 1.10) |"
    assert lines[3] == "| D=256 | *0.90 ±0.03* (0.90 to 0.90) |  |"
    assert "1k to 1k tokens, beside cuDNN: ahead at 1 points, level at 0, behind at 2, of 3 (NVIDIA H200" in lines[5]
    assert "[JSON](benchmarks/results/backward-h200.json)" in lines[5] and "(benchmarks/results/forward-h200.png)" in lines[7]


def test_in_short_a_step_over_a_cache_is_compared_by_heads_and_queries(tmp_path):
    """Of the GPU that was measured last, over all of its results."""
    rates = {"strobe": [110.0, 111.1, 108.9], "FA3 planned": [100.0, 100.0, 100.0], "XQA": [50.0, 50.0, 50.0]}
    results = {name: {"us": 1e4 / rounds[0], "gb_s": rounds[0], "rounds": rounds} for name, rounds in rates.items()}
    one = {"batch": 1, "length": 1024, "heads": 64, "heads_kv": 8, "head_dim": 128, "queries": 1, "results": results}
    other = one | {"batch": 8, "length": 8192, "queries": 4}
    alone = one | {"results": {"strobe": results["strobe"]}}
    few = one | {"heads": 16, "heads_kv": 2}
    steps = {"what": "decode", "contenders": ["strobe", "FA3 planned", "XQA"]}
    write(tmp_path, "decode-h200.json", **steps, points=[one, other, alone], date="2026-01-02")
    write(tmp_path, "heads-decode-h200.json", **steps, points=[few], date="2026-01-02")
    write(tmp_path, "wide-decode-h200.json", **steps, points=[few | {"head_dim": 256}], date="2026-01-04")
    write(tmp_path, "wide-decode-shared-h200.json", **steps, points=[few | {"head_dim": 256, "queries": 4}], date="2026-01-04")
    elsewhere = {"name": "NVIDIA H100", "kind": "cuda"}
    write(tmp_path, "heads-decode-h100.json", **steps, points=[few] * 5, date="2026-01-03", device=elsewhere)
    lines = readme.steps_in_short(tmp_path).splitlines()
    assert lines[0] == "|  | 1 query | 4 queries |"
    assert lines[2] == "| heads 64/8 | **1.10 ±0.03** (1.10 to 1.10) | **1.10 ±0.03** (1.10 to 1.10) |"
    assert lines[3] == "| heads 16/2 | **1.10 ±0.03** (1.10 to 1.10) |  |"
    assert lines[4] == "| heads 16/2, D=256 | **1.10 ±0.03** (1.10 to 1.10) | **1.10 ±0.03** (1.10 to 1.10) |"
    assert "1 to 8 requests of 1k to 8k keys, contiguous and in pages, beside FA3 planned, XQA: ahead at 5 points" in lines[6]
    assert "2026-01-02 and 2026-01-04" in lines[6] and "heads-decode-h200.json" in lines[6] and "h100" not in lines[6]


def test_a_row_holds_all_lengths_of_one_shape(tmp_path):
    point = report()["points"][0]
    longer = point | {"length": 16384, "results": {"cuDNN": {"tflops": 640.0}, "strobe": {"refused": "too long"}}}
    write(tmp_path, "forward-h200.json", points=[longer, point, longer | {"head_dim_v": 64}])
    text = readme.measured(tmp_path)
    assert "|  | mask | 1k | 16k |" in text
    assert "| bf16 D=128 | full | 600 (1.20) | - (cuDNN 640) |" in text
    assert "| bf16 D=128/64 | full |  | - (cuDNN 640) |" in text


def test_an_incomplete_run_says_so(tmp_path):
    write(tmp_path, "forward-h200.json", stopped="out of time after 1 of 2 points")
    assert "The run is incomplete: out of time after 1 of 2 points." in readme.measured(tmp_path)


def test_support_quotes_the_refusals_of_the_backends():
    text = readme.support()
    softcap = next(line for line in text.splitlines() if line.startswith("| softcap")).split("|")
    reason = torch_cpu.refuses(replace(readme.BASE, score=strobe.Score(softcap=30.0)), CPU)
    number = softcap[6].strip().removeprefix("✗<sup>").removesuffix("</sup>")
    assert f"\n{number}. {reason}" in text
    assert softcap[7].strip() == "✓"


def test_support_marks_archs_that_differ_and_backwards_that_are_refused(monkeypatch):
    class Backend:
        @staticmethod
        def refuses(problem, arch):
            if arch.name == "A100" and problem.head_dim == 256:
                return "too wide"
            return "no gradient of softcap" if problem.phase == "backward" and problem.score.softcap else None

    monkeypatch.setattr(readme, "backend_module", lambda name: Backend)
    lines = {line.split("|")[1].strip(): line.split("|")[5].strip() for line in readme.support().splitlines() if "|" in line}
    assert lines["head dim 256"] == "✗<sup>2</sup> A100, ✓ RTX 4090, ✓ H200"
    assert lines["softcap"] == "✓ forward only<sup>1</sup>"
    assert lines["causal"] == "✓"


def test_missing_markers_are_an_error():
    with pytest.raises(ValueError, match="begin: in short"):
        readme.rewritten("# nothing", ROOT)
