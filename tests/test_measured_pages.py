"""The generated blocks of the documentation's pages: from the newest results, with their numbers."""

import json

import pytest

from strobe.lab import measured_pages as pages

DEVICE = {"kind": "cuda", "name": "NVIDIA H200", "commit": "0123456789abcdef", "packages": {"torch": "2.11", "triton": "3.6"}}


def write(root, name: str, **report) -> None:
    folder = root / pages.RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"date": "2026-11-22T01:02:03", "device": DEVICE, **report}))


@pytest.mark.parametrize("block", [pages.trained, pages.deterministic, pages.changed_scores])
def test_without_results_it_says_so(block, tmp_path):
    assert block(tmp_path) == pages.NOTHING


def training(context: int) -> dict:
    settings = {"layers": 6, "width": 512, "batch": 32, "context": context, "steps": 20}
    runs = {
        "strobe": {"loss": [3.0] * 18 + [1.5, 1.25], "step_ms": 5.125},
        "SDPA": {"loss": [3.0] * 18 + [1.5, 1.5], "step_ms": 6.0},
    }
    return {"settings": settings, "runs": runs}


def test_trained_shows_every_run_on_a_gpu(tmp_path):
    write(tmp_path, "train-gpt-h200-4096.json", **training(4096))
    write(tmp_path, "train-gpt-h200-512.json", **training(512))
    write(tmp_path, "train-gpt-cpu.json", **training(64) | {"device": DEVICE | {"kind": "cpu"}})
    text = pages.trained(tmp_path)
    assert text.index("32 x 512 bytes") < text.index("32 x 4096 bytes") and "x 64 bytes" not in text
    assert "(../benchmarks/results/train-gpt-h200-512.png)" in text and "commit 0123456789" in text
    assert (
        "last 2 steps is 1.3750 with Strobe and 1.5000" in text and "2.5e-01 at most" in text and "5.12 ms and 6.00 ms" in text
    )


def test_deterministic_takes_the_newest(tmp_path):
    def points(ms: float) -> list[dict]:
        scatter = {name: {"distinct": 1, "spread": 0.0} for name in ("dq", "dk", "dv")}
        default = scatter | {"dq": {"distinct": 50, "spread": 0.0015}}
        point = {"head_dim": 64, "mask": "causal", "length": 4096}
        ways = {"default": default, "deterministic": scatter}
        return [{"point": point, "scatter": ways, "ms": {"default": 1.0, "deterministic": ms}}]

    write(tmp_path, "determinism-b.json", protocol={"runs": 50}, points=points(2.5))
    write(tmp_path, "determinism-a.json", protocol={"runs": 50}, points=points(9.0), date="2026-11-21T00:00:00")
    text = pages.deterministic(tmp_path)
    assert "| D 64, causal, 4096 | 50 / 1 / 1 | 1.5e-03 | 1.00 | 1 / 1 / 1 | 2.50 | 2.50 |" in text


def test_changed_scores(tmp_path):
    times = {"forward, portable": 1.0, "forward, sm90": 0.5}
    points = [{"head_dims": dims, "feature": "dropout", "milliseconds": times} for dims in ([64, 64], [192, 128])]
    write(tmp_path, "changed-scores-h200.json", points=points)
    text = pages.changed_scores(tmp_path)
    assert "| D 64: dropout | 1.00 | 0.50 |" in text and "| D 192, 128: dropout | 1.00 | 0.50 |" in text
