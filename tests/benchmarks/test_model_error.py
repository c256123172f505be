"""benchmarks/model_error.py: what it compares, and what it simulates of a backward."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import model_error  # noqa: E402

from strobe.lab.blackwell import experiments  # noqa: E402
from strobe.lab.pages import measured_pages  # noqa: E402


def forward(period: float, softmax: float, config: str = "a") -> dict:
    steady = {"period": {"median": period}, "softmax": {"median": softmax}}
    return {"head_dim": 64, "mask": "full", "config": config, "steady": steady}


BACKWARD = {"head_dim": 128, "mask": "full", "config": "b"}


def pair() -> tuple[dict, dict]:
    measured = {"forward": [forward(2000.0, 800.0)], "backward": [BACKWARD | {"cycles": 3200.0}]}
    return measured, {"forward": [forward(1500.0, 1000.0)], "backward": [BACKWARD | {"cycles": 2560.0}]}


def test_each_kernel_is_compared_in_all_and_by_phase():
    ahead, back = model_error.compared(*pair())
    assert ahead["cycles"] == {
        "total": {"measured": 2000.0, "simulated": 1500.0, "ratio": 0.75},
        "softmax": {"measured": 800.0, "simulated": 1000.0, "ratio": 1.25},
    }
    assert back["kernel"] == "backward" and back["cycles"]["total"]["ratio"] == 0.8 and len(back["cycles"]) == 1
    assert "| backward | 128 | full | total | 3200 | 2560 | 0.80 |" in model_error.table([ahead, back])


def test_another_config_is_not_compared():
    measured, simulated = pair()
    simulated["forward"] = [forward(1500.0, 1000.0, config="c")]
    with pytest.raises(ValueError, match="need the same config, got a and c"):
        model_error.compared(measured, simulated)


def test_a_simulated_backward_takes_its_products_and_not_much_more():
    config = model_error.one_pass(model_error.backward_problem(1, 8192, 8192, 33))
    few, more = (model_error.simulated_cycles(config, tiles) for tiles in (3, 5))
    products = 5 * 2 * config.tile_q * 128 * 128 / 4096
    assert products <= (more - few) / 2 < 1.3 * products


def test_what_was_compared_is_told_in_the_documents(tmp_path):
    rows = model_error.compared(*pair())
    path = tmp_path / experiments.MEASURED
    path.parent.mkdir(parents=True)
    of = {"file": "cycles-h200.json", "date": "2026-01-02T03:04:05+00:00", "commit": "abc"}
    path.write_text(json.dumps({"date": "2026-01-03T03:04:05+00:00", "measured": of, "points": rows}))
    text = measured_pages.model_error(tmp_path)
    assert "off by -25% to -20%" in text and "| forward | 64, full | 2000 | 1500 | 0.75 | softmax 800 to 1000 |" in text
    assert experiments.hopper(tmp_path) == {"64": {"simulated": 1500.0, "measured": 2000.0}}
