"""The cost model: what it chooses and says, and the simulation of the schedules that checks its formulas."""

import json

import pytest
import torch
from typer.testing import CliRunner

import strobe
from strobe import parallel
from strobe.device import KNOWN
from strobe.lab.model import context_parallel, schedule
from strobe.parallel.choice import INFINIBAND, NVLINK, Machine, choose, name_of, predict
from strobe.parallel.schedules import Method
from strobe_cli.app import app

SETTING = context_parallel.setting_of(32, 8, 128, strobe.Causal(), torch.bfloat16, 8192)


@pytest.mark.parametrize("link", [NVLINK, INFINIBAND], ids=lambda link: link.name)
def test_formulas_are_what_the_schedules_take(link):
    """The schedules themselves, message by message, take what the formulas say to 5%."""
    where = context_parallel.machine("H200", link)
    for method in (Method("usp", 1), Method("usp", 2), Method("usp", 8), Method("allgather", 4)):
        for back in (False, True):
            run = schedule.simulate(SETTING, method, where, back)
            formula = context_parallel._formula(SETTING, method, where, back)
            assert run.seconds == pytest.approx(formula, rel=0.05), (name_of(method, 8), back)
            assert max(span.end for span in run.spans if span.kind == "receive") <= run.seconds + link.latency


def test_a_long_sequence_hides_its_ring_and_a_short_one_does_not():
    where = context_parallel.machine("H200", INFINIBAND)
    long = schedule.simulate(SETTING._replace(tokens=65536), Method("usp", 1), where)
    short = schedule.simulate(SETTING._replace(tokens=1024), Method("usp", 1), where)
    assert long.exposed < 0.01 * long.seconds and short.exposed > 0.5 * short.seconds


@pytest.mark.exhaustive
def test_slower_links_need_longer_sequences():
    found = context_parallel.facts(SETTING, "H200")
    for row in found["rows"]:
        assert row["ranks"] in context_parallel.RANKS
    by_link = {
        link: [row["tokens"]["ring"] for row in found["rows"] if row["link"] == link and row["training"]]
        for link in ("NVLink", "InfiniBand")
    }
    assert all(fast < slow for fast, slow in zip(by_link["NVLink"], by_link["InfiniBand"], strict=True))
    assert "times what the formulas say" in context_parallel.sentence(found)


def test_the_choice_is_the_fastest_or_level_with_less_memory():
    work = context_parallel.workload(SETTING, True)
    for node in (8, 1):
        machine = Machine(KNOWN["H200"], node, NVLINK, INFINIBAND)
        choice = choose(work, machine, "auto")
        least = min(one.seconds for one in choice.found)
        assert choice.found[0].seconds <= 1.02 * least
        assert {name_of(one.method, 8) for one in choice.found} >= {"ring", "ulysses", "usp, teams of 2"}
        assert predict(work, choice.method, machine).seconds == choice.found[0].seconds
    with pytest.raises(ValueError, match="no team"):
        choose(work, machine, "tree")


def test_explain_says_which_and_why(capsys):
    q, k = torch.randn(1, 32, 8, 64, dtype=torch.bfloat16), torch.randn(1, 32, 2, 64, dtype=torch.bfloat16)
    found = parallel.explain(q, k, k, ranks=4, rank=1, mask=strobe.Causal(), layout="zigzag")
    assert found.choice.method in [one.method for one in found.choice.found] and len(found.choice.found) == 4
    found = parallel.explain(q, k, k, ranks=4, rank=1, mask=strobe.Causal(), layout="zigzag", method="ring", dropout_p=0.1)
    said = capsys.readouterr().out
    assert "chosen    ring" in said and "own keys, placed: tiled" in said
    assert all(one.problem.placed and one.problem.partial for _, one in found.kernels)


def test_on_the_command_line(tmp_path):
    path, picture = tmp_path / "found.json", tmp_path / "found.png"
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    done = runner.invoke(
        app, ["roofline", "--context-parallel", "--tokens", "2048", "--json", str(path), "--out", str(picture)]
    )
    assert done.exit_code == 0, done.output
    assert "InfiniBand" in done.output and picture.stat().st_size > 10000
    assert json.loads(path.read_text())["what"] == "context parallelism on paper"
    done = runner.invoke(app, ["roofline", "--context-parallel", "--phase", "backward"])
    assert done.exit_code == 2 and "context-parallel must be given without" in done.output


@pytest.mark.exhaustive
def test_the_benchmark_runs_on_a_cpu(tmp_path):
    path = tmp_path / "parallel.json"
    sizes = "--tokens 128 --heads 4 --heads-kv 2 --head-dim 32 --checked 64 --repeats 1 --gpus 2"
    done = CliRunner().invoke(app, ["bench", "parallel", "--device", "cpu", *sizes.split(), "--json", str(path)])
    assert done.exit_code == 0, done.output
    (run,) = json.loads(path.read_text())["runs"]
    assert all(one["right"] for one in run["right"]) and len(run["right"]) == 24  # masks, methods, layouts
    errors = [one["error"] for one in run["ring"]]
    assert max(errors) <= 1.1 * errors[0]


@pytest.mark.gpu
def test_the_benchmark_on_several_gpus(tmp_path):
    """With few kernels to compile: one mask, and no peers."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    sizes = "--gpus 2 --tokens 8192 --checked 1024 --masks causal --repeats 1 --no-peers"
    done = CliRunner().invoke(app, ["bench", "parallel", *sizes.split(), "--json", str(tmp_path / "x.json")])
    assert done.exit_code == 0, done.output
