"""The generated blocks of the documentation's pages: from the newest results, with their numbers."""

import json
from dataclasses import replace

import pytest
import torch

from strobe.device import KNOWN
from strobe.kernels.sm80 import backend
from strobe.lab.pages import measured_pages as pages
from strobe.lab.pages import readme
from strobe.lab.timeline.timeline import PHASES
from strobe.masks import Causal

DEVICE = {"kind": "cuda", "name": "NVIDIA H200", "commit": "0123456789abcdef", "packages": {"torch": "2.11", "triton": "3.6"}}


def write(root, name: str, **report) -> None:
    folder = root / pages.RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"date": "2026-11-22T01:02:03", "device": DEVICE, **report}))


BLOCKS = [
    *(pages.trained, pages.deterministic, pages.changed_scores, pages.documents, pages.redo_cost, pages.fp8_accuracy),
    *(pages.fp8_speed, pages.cpu_backends, pages.cpu_tiles, pages.timelines, pages.hidden, pages.ampere, pages.ampere_portable),
    *(pages.ampere_float32, pages.single, pages.shared),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_without_results_it_says_so(block, tmp_path):
    assert block(tmp_path) == pages.NOTHING


def test_ampere_shows_what_dispatch_takes_and_the_portable_kernels(tmp_path):
    def point(length: int, backward: bool, dtype: str = "bf16", **results) -> dict:
        shape = {"batch": 32, "heads": 16, "heads_kv": 16, "head_dim": 128, "head_dim_v": 128, "mask": "causal"}
        rounds = {name: {"tflops": speed, "rounds": [speed, speed], "error": 2e-3} for name, speed in results.items()}
        peer = "FA2" if dtype == "bf16" else "SDPA efficient"
        return {**shape, "length": length, "dtype": dtype, "backward": backward, "peer": peer, "results": rounds}

    def taken(dtype: torch.dtype, phase: str = "forward") -> str:
        problem = replace(readme.BASE, dtype=dtype, phase=phase, mask=Causal())
        return f"sm80 {backend.config(problem, KNOWN['H100']).brief}"

    first, second, in_fp32 = taken(torch.bfloat16), "sm80 another", taken(torch.float32)
    points = [
        point(4096, False, **{"FA2": 300.0, first: 330.0, second: 360.0, "portable": 200.0, "portable as sm_80": 150.0}),
        point(512, False, **{"FA2": 200.0, first: 220.0}),
        point(4096, True, **{"FA2": 240.0, taken(torch.bfloat16, "backward"): 228.0}),
        point(4096, False, "fp32", **{"SDPA efficient": 40.0, in_fp32: 80.0}),
    ]
    write(tmp_path, "sm80-h100.json", points=points)
    write(tmp_path, "portable-as-sm80-h100.json", points=points[:1])
    text = pages.ampere(tmp_path)
    assert "| bf16 D=128 | causal | FA2 | 220 (1.10 ±0.00) | 330 (1.10 ±0.00) |" in text
    assert "| fp32 D=128 | causal | SDPA efficient |  | 80 (2.00 ±0.00) |" in text
    assert "| bf16 D=128 | causal | FA2 | 228 (0.95 ±0.00) |" in text.split("Backward:")[1]
    write(tmp_path, "sm80-h100-later.json", date="2026-11-25", points=[point(512, False, **{"FA2": 200.0, first: 260.0})])
    text = pages.ampere(tmp_path)  # a point's newest result, and where each length comes from
    assert "| FA2 | 260 (1.30 ±0.00) | 330 (1.10 ±0.00) |" in text and "512: NVIDIA" in text and "4k: NVIDIA" in text
    text = pages.ampere_portable(tmp_path)
    assert "| sm80 | FA2 | portable | portable as sm_80 |" in text
    assert "| bf16 D=128 causal S=4096, forward | 330 (2e-03) | 300 (2e-03) | 200 (2e-03) | 150 (2e-03) |" in text
    write(tmp_path, "fp32-sm80-h100.json", points=points[3:], stopped="out of time after 1 of 2 points")
    text = pages.ampere_float32(tmp_path)
    assert "| fp32 D=128 causal S=4096, forward | 80 (2e-03) | 40 (2e-03) |" in text and "after 1 of 2 points" in text


def test_single_calls_beside_flash_attention_2(tmp_path):
    def result(speed: float, us: float) -> dict:
        return {"tflops": speed, "rounds": [speed, speed], "calls_us": {"median": us, "p10": 0.9 * us, "p90": 1.1 * us}}

    shape = {"batch": 4, "heads": 16, "heads_kv": 16, "head_dim": 128, "head_dim_v": 128, "dtype": "bf16", "mask": "full"}
    clocks = {"sm_clock_mhz": 1800.0, "memory_clock_mhz": 3201.0}
    points = [
        {**shape, "length": length, "backward": False, "telemetry": clocks,
         "results": {"strobe": result(600.0, 500.0), "SDPA flash": result(300.0, 1000.0)}}
        for length in (4096, 512)
    ]  # fmt: skip
    protocol = {"warm-ups": 32, "calls": 128, "rounds": 2}
    write(tmp_path, "single-h200.json", points=points, protocol=protocol, stopped=None)
    text = pages.single(tmp_path)
    assert text.index("S=512") < text.index("S=4096") and "SMs 1800 to 1800 MHz, memory 3201 MHz" in text
    assert "| 300, 1000 us, 900 to 1100 | 600 (2.00 ±0.00), 500 us, 450 to 550 |" in text


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
        shape = dict(batch=4, heads=32, heads_kv=8, head_dim=64, head_dim_v=64, dtype="bf16", backward=True)
        point = shape | {"mask": "causal", "length": 4096}
        ways = {"default": default, "deterministic": scatter}
        return [{"point": point, "scatter": ways, "ms": {"default": 1.0, "deterministic": ms}}]

    write(tmp_path, "determinism-b.json", protocol={"runs": 50}, points=points(2.5))
    write(tmp_path, "determinism-a.json", protocol={"runs": 50}, points=points(9.0), date="2026-11-21T00:00:00")
    text = pages.deterministic(tmp_path)
    assert "| D=64 heads 32/8, causal | 50 / 1 / 1 | 1.5e-03 | 1 / 1 / 1 | 2.50 |" in text


def test_decode(tmp_path):
    def result(us: float) -> dict:
        return {"us": us, "rounds": [1000 / us, 1001 / us, 1000 / us]}

    def point(batch: int, length: int, ours: float) -> dict:
        results = {"strobe": result(ours), "strobe deterministic": result(1.5 * ours), "FA3": result(20.0)}
        shape = dict(heads=64, heads_kv=8, head_dim=128, queries=1, page=64, cache="bf16", ragged=False)
        return {"batch": batch, "length": length, **shape, "results": results}

    report = {
        "points": [point(1, 1024, 10.0), point(8, 1024, 40.0), point(1, 8192, 20.0)], "contenders": ["strobe", "FA3"],
        "launches": 20, "rounds": 9, "read_gb_s": 4400.0, "command": "strobe bench decode", "stopped": "out of time",
    }  # fmt: skip
    assert pages.decode(tmp_path) == "No result is published yet."
    write(tmp_path, "decode-h200.json", **report)
    text = pages.decode(tmp_path)
    assert "| bf16 heads 64/8 D=128 page 64 | 1 | 10.0 (**2.00 ±0.00**) | 20.0 (1.00 ±0.00) |" in text
    assert "| bf16 heads 64/8 D=128 page 64 | 8 | 40.0 (*0.50 ±0.00*) |  |" in text
    assert "takes 1.50 to 1.50 times as long" in text and "incomplete: out of time." in text and "reads 4400 GB/s" in text


def test_changed_scores(tmp_path):
    times = {"forward, portable": 1.0, "forward, sm90": 0.5}
    points = [{"head_dims": dims, "feature": "dropout", "milliseconds": times} for dims in ([64, 64], [192, 128])]
    write(tmp_path, "changed-scores-h200.json", points=points)
    text = pages.changed_scores(tmp_path)
    assert "| D 64: dropout | 1.00 | 0.50 |" in text and "| D 192, 128: dropout | 1.00 | 0.50 |" in text


def test_documents_are_beside_the_portable_kernels(tmp_path):
    features = ("plain", "dropout", "four documents", "four documents, all keys", "one document, all keys")
    points = [
        {"head_dims": [64, 64], "feature": name, "milliseconds": {"forward, portable": 2.0 + i, "forward, sm90": 0.5}}
        for i, name in enumerate(features)
    ]
    write(tmp_path, "changed-scores-h200.json", points=points)
    lines = pages.documents(tmp_path).splitlines()[4:]
    assert lines == [
        "| D 64, causal, no documents | 0.50 | 2.00 |",
        "| D 64, causal, four documents | 0.50 | 4.00 |",
        "| D 64, full, four documents | 0.50 | 5.00 |",
        "| D 64, full, one document | 0.50 | 6.00 |",
    ]


def test_redone_blocks_are_relative_to_the_safe_kernel(tmp_path):
    ms = {"0 %": 0.25, "100 %": 1.25, "safe": 0.5}
    write(tmp_path, "redo-cost-h200.json", rounds=15, points=[{"head_dim": 64, "length": 1024, "ms": ms}])
    text = pages.redo_cost(tmp_path)
    assert "| head dim, length | safe | none noted | 100 % |" in text and "Median of 15 rounds" in text
    assert "| 64, 1024 | 0.500 | 0.250 (0.50) | 1.250 (2.50) |" in text


def test_fp8_is_beside_our_bf16_and_the_best_peer(tmp_path):
    point = {"mask": "full", "length": 4096, "head_dim": 64, "head_dim_v": 64, "heads": 32, "heads_kv": 32, "batch": 4}
    rates = {"strobe": {"tflops": 600.0}, "cuDNN": {"tflops": 500.0}, "FA4": {"refused": "no"}}
    points = [
        {**point, "dtype": "fp8", "results": rates},
        {**point, "dtype": "bf16", "heads_kv": 4, "results": {"strobe": {"tflops": 100.0}}},
        {**point, "dtype": "bf16", "results": {"strobe": {"tflops": 400.0}}},
        {**point, "dtype": "fp8", "mask": "causal", "results": {"strobe": {"tflops": 300.0}}},
        {**point, "dtype": "fp8", "length": 1, "results": {"strobe": {"refused": "no"}}},
    ]
    write(tmp_path, "forward-h200-1.json", points=points, date="2026-11-21T00:00:00")
    write(tmp_path, "forward-h200-2.json", points=points[1:3])
    text = pages.fp8_speed(tmp_path)
    assert "forward-h200-1.json" in text, "the newest with fp8"
    assert "| 64, full, 4096 | 600 | 1.50 | 1.20 |" in text
    assert "| 64, causal, 4096 | 300 | - | - |" in text and "| 64, full, 1 | - | - | - |" in text


def test_fp8_accuracy_is_a_cpus(tmp_path):
    accuracy = [{"inputs": "normal", "bf16": 0.0036, "by head": 0.04567}]
    write(tmp_path, "fp8-cpu.json", accuracy=accuracy, device=DEVICE | {"kind": "cpu", "name": "CPU"})
    write(tmp_path, "fp8-h200.json", accuracy=[{"inputs": "normal", "bf16": 9.0}])
    text = pages.fp8_accuracy(tmp_path)
    assert "| inputs | bf16 | by head |" in text and "| normal | 0.0036 | 0.0457 |" in text and "CPU, 2026-11-22" in text


def test_a_cpus_tables(tmp_path):
    tiles = [{"length": n, "mask": "full", "ms": {"64 x 64": 20.12, "256 x 256": float(n)}} for n in (1, 2)]
    backends = [
        {"dtype": "float32", "length": 128, "mask": "full", "backward": True, "ms": dict(sdpa=1.0, torch_cpu=2.0, tiled=3.5)}
    ]
    write(tmp_path, "cpu.json", tiles=tiles, backends=backends, device=DEVICE | {"kind": "cpu", "threads": 1})
    assert "| float32, 128, full, forward + backward | 1.00 | 2.00 | 3.50 |" in pages.cpu_backends(tmp_path)
    assert "| 2, full | 20.12 | 2.00 |\n| sum | 40.24 | 3.00 |" in pages.cpu_tiles(tmp_path)


def test_a_timeline_is_the_newest_that_was_measured(tmp_path):
    steady = {name: {"median": 100.0, "p10": 90.0, "p90": 110.0} for name in ("period", *PHASES)}
    point = {"head_dim": 64, "mask": "full", "length": 4096, "tile_q": 128, "tile_kv": 128, "steady": steady}
    write(tmp_path, "timeline-h200.json", what="timeline", points=[point])
    write(tmp_path, "timeline-simulated.json", what="timeline, simulated", points=[], date="2027-01-01T00:00:00")
    text = pages.timelines(tmp_path)
    assert "(../benchmarks/results/timeline-h200.png)" in text and "S = 4096" in text and "100 (90-110)" in text


def test_the_zoo_says_what_binds_and_how_near_it_is(tmp_path):
    shape = {"batch": 2, "length": 8192, "heads": 32, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128, "dtype": "bf16"}
    ours = {"tflops": 400.0, "rounds": [400.0, 400.0], "sm_clock_mhz": 1500.0}
    dense = {**shape, "mask": "full", "backward": False, "model": "a model", "results": {"strobe": ours}}
    packed = {**dense, "model": "packed", "packed": [8192, 8192]}
    write(tmp_path, "zoo-h200.json", points=[dense, packed], stopped=None)
    found, of_packed = pages.zoo(tmp_path).splitlines()[-2:]
    # 989.4 TFLOP/s at 1830 MHz by the data sheet, 811 at 1500; the last tile of rows is not full, so 49.3 % becomes 50 %.
    assert found.endswith("| 400 | - | - | matmul | 50% | 1500 |"), found
    assert of_packed.endswith("| 400 | - | - | - | - | 1500 |"), of_packed
