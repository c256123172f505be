"""`strobe bench decode`, on a CPU: what it measures, and what it makes of that."""

import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from strobe.device import KNOWN
from strobe.lab.bench import decode as lab
from strobe.lab.bench.bench import CpuClock
from strobe.lab.bench.decode_peers import CPU, OURS, RANDOM, Contender, Inputs, Plan, Point, peers_for
from strobe_cli.app import app

DEVICE = torch.device("cpu")
POINT = Point(2, 64, 4, 2, 16, page=8, cache="fp32")


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", *map(str, arguments)])


def test_a_run(tmp_path):
    path, picture = tmp_path / "d.json", tmp_path / "d.svg"
    done = run("--batches", 2, "--lengths", 64, "--heads", "4/2,4", "--head-dims", 16, "--queries", "1,3", "--pages", "8,0",
               "--ragged", "--rounds", 2, "--json", path, "--out", picture)  # fmt: skip
    assert done.exit_code == 0, done.output
    report = lab.load(path)
    assert report["contenders"] == ["strobe", "strobe deterministic", "SDPA"] and report["stopped"] is None
    assert report["what"] == "decode" and picture.stat().st_size
    shapes = {(facts["heads_kv"], facts["queries"], facts["page"]) for facts in report["points"]}
    assert shapes == {(kv, queries, page) for kv in (2, 4) for queries in (1, 3) for page in (8, 0)}
    for facts in report["points"]:
        ours = facts["results"]["strobe"]
        assert len(ours["rounds"]) == 2 and ours["error"] < 1e-5 and ours["us"] > 0
        assert "equal lengths" in facts["results"]["SDPA"]["refused"]
        lengths = Inputs(Point.of(facts), DEVICE, 0).lengths
        assert facts["bytes"] == int(lengths.sum()) * facts["heads_kv"] * 16 * 2 * 4
        assert ours["gb_s"] * ours["us"] == pytest.approx(facts["bytes"] / 1e3)
    assert "kv=64 fp32 heads 4/2 D=16 x 3 page 8 ragged" in done.output


def test_windows(tmp_path):
    path = tmp_path / "d.json"
    done = run("--batches", 1, "--lengths", 64, "--heads", "4/2", "--head-dims", 16, "--queries", "1,3", "--pages", "8",
               "--windows", "0,10", "--rounds", 1, "--json", path, "--out", tmp_path / "d.svg")  # fmt: skip
    assert done.exit_code == 0, done.output
    read = {(facts["window"], facts["queries"]): facts["bytes"] for facts in lab.load(path)["points"]}
    assert read == {(0, 1): 64 * 256, (0, 3): 64 * 256, (10, 1): 10 * 256, (10, 3): 12 * 256}
    assert "D=16 x 3 page 8 window 10" in done.output
    old = {key: value for key, value in lab.load(path)["points"][0].items() if key != "window"}
    assert Point.of(old).window == 0


def test_steps_at_random(tmp_path):
    path, picture = tmp_path / "d.json", tmp_path / "d.svg"
    shape = ("--batches", "1,2", "--lengths", "16,64", "--heads", "4/2,2", "--head-dims", 16, "--pages", "8,0", "--rounds", 1)
    done = run(*shape, "--random", 5, "--seed", 3, "--json", path, "--out", picture)
    assert done.exit_code == 0, done.output
    points = [Point.of(facts) for facts in lab.load(path)["points"]]
    plan = replace(
        CPU, batches=(1, 2), lengths=(16, 64), heads=((4, 2), (2, 2)), head_dims=(16,), pages=(8, 0), random=5, seed=3
    )
    assert points == plan.points() != replace(plan, seed=4).points() and len(points) == 5
    assert all(16 <= point.length <= 64 for point in points) and {point.ragged for point in points} == {False, True}
    compared = [facts for facts in lab.load(path)["points"] if "us" in facts["results"]["SDPA"]]
    assert f"{len(compared)} steps at random" in picture.read_text() and "5 steps at random" not in picture.read_text()


def test_steps_at_random_of_a_gpu_fit():
    points = replace(RANDOM, random=300).points()
    assert len(points) == 300 and max(point.bytes for point in points) <= RANDOM.most_bytes
    assert {point.head_dim for point in points} == set(RANDOM.head_dims) and min(point.length for point in points) >= 300


def test_a_seed_is_of_steps_at_random():
    done = run("--seed", 1)
    assert done.exit_code == 2 and "seed belongs to --random, got 1 without it" in done.output
    assert run("--random", 0).exit_code == 2


def test_parts_are_merged_into_what_one_run_would_be(tmp_path):
    shape = ("--batches", "1,2", "--lengths", "64,32", "--heads", "4/2", "--head-dims", 16, "--pages", "8,0", "--rounds", 1)
    paths = [tmp_path / f"{n}.json" for n in (1, 2, 3)]
    for n, path in enumerate(paths, 1):
        assert run(*shape, "--part", f"{n}/3", "--json", path).exit_code == 0
    whole = tmp_path / "whole.json"
    merged = CliRunner().invoke(app, ["bench", "merge", *map(str, paths[::-1]), "--out", str(whole)])
    assert merged.exit_code == 0, merged.output
    report, points = lab.load(whole), Plan((1, 2), (64, 32), ((4, 2),), (16,), (1,), (0, 8), ("fp32",)).points()
    assert [Point.of(facts) for facts in report["points"]] == points and report["stopped"] is None
    assert "--part" not in report["command"] and len(report["parts"]) == 3
    twice = CliRunner().invoke(app, ["bench", "merge", str(paths[0]), str(paths[0]), "--out", str(tmp_path / "twice.json")])
    assert twice.exit_code == 2 and "measured once" in twice.output


class Pool:
    """In place of processes: what they are asked to compile, and how that ends."""

    def __init__(self, error: Exception | None = None):
        self.error, self.asked = error, []

    def __call__(self, *_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, _compile, point, _arch, deterministic):
        self.asked.append((point, deterministic))
        job = Future()
        job.set_exception(self.error) if self.error else job.set_result(None)
        return job


def test_parts_that_run_side_by_side_begin_to_compile_with_other_kernels(monkeypatch):
    points = [Point(8, 2048, 64, 8, queries=queries, page=page) for queries in (1, 4, 16) for page in (0, 16, 64)]
    orders = []
    for part in ((1, 1), (1, 3), (2, 3), (3, 3)):
        monkeypatch.setattr(lab, "ProcessPoolExecutor", pool := Pool())
        lab.compile_ahead(points, KNOWN["H200"], True, part)
        orders.append(pool.asked)
    assert orders[0] == orders[1] and len({order[0] for order in orders}) == 3
    assert all(sorted(map(str, order)) == sorted(map(str, orders[0])) for order in orders)


def test_processes_that_cannot_start_are_an_error_and_a_kernel_that_does_not_compile_is_not(monkeypatch):
    monkeypatch.setattr(lab, "ProcessPoolExecutor", Pool(RuntimeError("ptxas")))
    lab.compile_ahead([POINT], KNOWN["H200"], False)
    monkeypatch.setattr(lab, "ProcessPoolExecutor", Pool(BrokenProcessPool("terminated abruptly")))
    with pytest.raises(BrokenProcessPool, match="abruptly"):
        lab.compile_ahead([POINT], KNOWN["H200"], False)


def test_who_is_wrong_is_not_timed():
    def wrong(inputs):
        right = OURS[0].prepare(inputs)
        return lambda: right().mul_(1.01)

    def missing(inputs):
        raise ValueError("takes nothing")

    contenders = (*OURS[:1], Contender("wrong", wrong), Contender("missing", missing))
    results = lab.measure(POINT, contenders, CpuClock(), DEVICE, 1)["results"]
    assert results["wrong"]["refused"].startswith("ValueError: wrong: its largest error is 1.0e-02")
    assert "takes nothing" in results["missing"]["refused"] and results["strobe"]["us"] > 0


def test_a_table_names_ahead_and_behind(capsys):
    def result(us):
        return {"us": us, "gb_s": 1 / us, "rounds": [1 / us, 1.01 / us, 1 / us], "error": 0.0}

    facts = {
        **vars(POINT),
        "bytes": 1,
        "copies": 1,
        "results": {"strobe": result(2.0), "SDPA": result(1.0), "FA3": result(3.0)},
    }
    report = {
        "device": {"name": "NVIDIA H200"}, "contenders": ["strobe", "FA3", "SDPA"], "points": [facts], "read_gb_s": 4000.0,
        "host_us": {"strobe": 9.0}, "not installed": ["XQA"], "stopped": "out of time",
    }  # fmt: skip
    lab.show(report)
    said = capsys.readouterr().out
    for words in ("behind at 1", "0.50", "reads 4000 GB/s", "strobe 9", "not installed: XQA", "out of time"):
        assert words in said, words
    assert lab.ceilings(report) == {"a sum": 4000.0, "data sheet": 4800.0}


def test_points():
    plan = Plan(most_bytes=2**30)
    assert all(point.bytes <= 2**30 for point in plan.points()) and plan.points()[0].length == 8192
    assert {point.kind for point in plan.points()} == {Point(1, 1, 8, 1)}
    with pytest.raises(ValueError, match="at most 10 bytes"):
        replace(CPU, most_bytes=10).points()
    assert list(peers_for(torch.device("cuda"))) == ["FA3", "FA3 planned", "XQA", "cuDNN", "SDPA", "SDPA cuDNN", "SDPA flash"]


def test_a_large_cache_has_fewer_launches_in_a_graph():
    assert [lab.launches_of(Point(batch, 32768, 64, 8)) for batch in (1, 8, 32, 128)] == [20, 16, 4, 4]


def test_a_part_has_all_pages_and_queries_of_its_shapes():
    plan = Plan(heads=((64, 8), (32, 8)), queries=(1, 4), pages=(64, 0), caches=("bf16", "e4m3"))
    parts = [replace(plan, part=(n, 3)).points() for n in (1, 2, 3)]
    assert sorted(str(point) for part in parts for point in part) == sorted(map(str, plan.points()))
    shapes = [{(p.batch, p.length, p.heads) for p in part} for part in parts]
    assert not shapes[0] & shapes[1] and not shapes[1] & shapes[2] and not shapes[0] & shapes[2]
    assert all({p.length for p in part} == set(plan.lengths) and {p.batch for p in part} == set(plan.batches) for part in parts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--heads", "6/4"), "heads must be a multiple of heads-kv"),
        (("--heads", "6/4/2"), "heads must be query heads/key heads"),
        (("--pages", "-1"), "pages must be 0 or more"),
        (("--caches", "int8"), "caches must be one of"),
        (("--peers", "FA3"), "peers must be one of SDPA"),
        (("--out", "x.txt"), "must end in .png or .svg"),
    ],
)
def test_wrong_options(arguments, says):
    done = run(*arguments)
    assert done.exit_code == 2 and says in " ".join(done.output.replace("│", " ").split())


def test_only_its_own_files_are_read(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"what": "forward"}))
    with pytest.raises(ValueError, match="must say that it is one"):
        lab.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="must be a JSON file"):
        lab.load(path)
