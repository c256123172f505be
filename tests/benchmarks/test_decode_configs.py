"""benchmarks/decode_configs.py: each config is what its rule and its changes say, compiled without a GPU and timed with one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tritons import compiling

from strobe.device import KNOWN
from strobe.lab.bench.decode_peers import Point, described

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from decode_configs import rule_of  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks" / "decode_configs.py"), *arguments]
    return subprocess.run(command, env=compiling(), capture_output=True, text=True, timeout=300)


def test_what_is_compiled_is_what_was_asked_for():
    """A ring of one step less has 32 KB less, and two barriers; another rule is another kernel; what no kernel takes is refused
    in a line."""
    step = ("--batch", "8", "--length", "8192", "--heads", "64/8", "--queries", "4", "--compile", "H200")
    found = run(*step, "--try", "stages=5", "--try", "mma", "--try", "tokens=8")
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stdout.splitlines() if "registers" in line or "refused" in line]
    names, said = zip(*((line[:40].strip(), line[40:]) for line in lines), strict=True)
    assert names == ("today's", "stages=5", "mma", "tokens=8") and "refused: ValueError: decode: each warp takes 16" in said[3]
    today, shorter, mma = (int(text.split(", ")[-1].split()[0]) for text in said[:3])
    keys_and_values = 2 * 64 * 128 * 2
    assert keys_and_values < today - shorter < keys_and_values + 64 and mma < shorter - keys_and_values


def test_work_is_dealt_out_as_a_changed_config_takes_it():
    """CTAs that share a key head have no neighbours that walk along with them; what is asked for is not dealt out anew."""
    problem, _ = described(Point(8, 8192, 64, 8), deterministic=False)
    names = ("chosen", "shares=2", "shares=2,start=3", "heads_abreast=2")
    usual, shared, placed, asked = (rule_of(name)(problem, KNOWN["H200"]) for name in names)
    assert (usual.heads_abreast, shared.heads_abreast, asked.heads_abreast) == (4, 1, 2)
    assert (usual.shares, shared.shares, placed.shares, placed.start) == (0, 2, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--try", "tokns=3"), "must be FIELD=VALUE of Config's fields, got 'tokns=3'"),
        (("--try", "tokens=many"), "with a number, True or False, got 'tokens=many'"),
        (("--try", "fastest:tokens=3"), "a rule must be one of chosen, mma"),
    ],
)
def test_wrong_tries(arguments, says):
    found = run(*arguments)
    assert found.returncode == 2 and says in found.stderr


@pytest.mark.gpu
def test_configs_are_timed(tmp_path):
    path = tmp_path / "found.json"
    found = run(
        "--batch", "2", "--length", "300", "--rounds", "2", "--try", "mma", "--try", "chosen:start=3", "--json", str(path)
    )
    assert found.returncode == 0, found.stderr
    results = json.loads(path.read_text())["points"][0]["results"]
    assert all(results[name]["us"] > 0 for name in ("today's", "mma", "chosen:start=3"))
