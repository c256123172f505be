"""The zoo: its shapes are what they say, Strobe takes all of them, and a run in little time leaves none out."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from commands import run as command

import strobe
from strobe.call.dispatch import explain_problem
from strobe.device import KNOWN
from strobe.lab.bench import bench, plot, zoo
from strobe.lab.bench.accuracy import Gate
from strobe.lab.bench.inputs import input_sets
from strobe.lab.bench.merge import merge
from strobe.lab.bench.peers import Peer, bind, sdpa, strobe_peer
from strobe.lab.bench.plan import Inputs, Plan, Point, mask_of
from strobe.lab.bench.report import default_path, kernels_of, load, show
from strobe.masks import Causal, Window

pytestmark = pytest.mark.usefixtures("small_product")

CPU = torch.device("cpu")
POINTS = zoo.points()

SMALL = (
    Point(2, 16, 4, 2, 32, 32, "fp32", "full", False, "cross", length_kv=9),
    Point(1, 8, 2, 2, 32, 32, "fp32", "causal", False, "chunk", length_kv=24),
    Point(3, 21, 4, 2, 32, 32, "fp32", "causal", False, "packed", packed=(21, 1, 12)),
    Point(1, 20, 2, 2, 32, 32, "fp32", "window 5", False, "sinks", sinks=True),
    Point(1, 20, 2, 1, 32, 32, "fp32", "full", False, "softcap", softcap=1.0),
)
"""A point of each kind, small enough for a CPU."""


def test_names_and_points_are_unique_and_have_a_source():
    models = [shape.point.model for shape in zoo.FORWARD]
    assert len(set(models)) == len(models) and len(set(POINTS)) == len(POINTS) and all(zoo.source_of(m) for m in models)
    assert sum(point.backward for point in POINTS) == sum(shape.trained for shape in zoo.FORWARD) > 5


def test_shapes_are_whole():
    for point in POINTS:
        assert point.heads % point.heads_kv == 0 and point.head_dim % 8 == 0 and point.dtype == "bf16", point
        if point.packed is not None:
            assert (point.batch, point.length) == (len(point.packed), max(point.packed)) and min(point.packed) > 0
        assert str(point).startswith(point.model) and f"D={point.head_dim}" in point.shape


def test_the_fastest_kernel_takes_all_of_them_on_hopper():
    for point in POINTS:
        assert explain_problem(point.problem(), KNOWN["H200"]).chosen == "sm90", point


def test_flops_are_those_of_visible_pairs():
    by_model = {point.model: point for point in POINTS if not point.backward}
    cross = by_model["SDXL, cross attention 64 x 64"]
    assert cross.flops == 4 * 8 * 10 * 4096 * 77 * 64
    assert by_model["DeepSeek-V3"].flops == 2 * 128 * (192 + 128) * 4096**2 // 2
    chunk = by_model["Qwen3 14B, the last 2k of 8k"]
    assert chunk.flops == 4 * 40 * 128 * Causal().count(2048, 8192)
    window = by_model["gpt-oss, window"]
    assert window.flops == 4 * 64 * 64 * Window(127, 0).count(8192, 8192)
    packed = by_model["Llama 3 8B, packed"]
    assert packed.flops == sum(4 * 32 * 128 * n * n // 2 for n in packed.packed)
    assert all(point.flops == 2.5 * replace(point, backward=False).flops for point in POINTS if point.backward)


def test_packed_lengths_have_the_published_mean():
    lengths = zoo.lengths_like(499, 2000)
    assert abs(fmean(lengths) / 499 - 1) < 0.02 and lengths == zoo.lengths_like(499, 2000) and max(lengths) > 4 * 499


def test_a_report_holds_what_makes_a_point():
    for point in (*POINTS, *SMALL):
        assert Point.of(json.loads(json.dumps(point.facts))) == point
    plain = Point(1, 64, 2, 2, 64, 64, "bf16", "full", False)
    assert set(plain.facts) == {"batch", "length", "heads", "heads_kv", "head_dim", "head_dim_v", "dtype", "mask", "backward"}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("point", SMALL, ids=str)
def test_the_gate_knows_what_is_right(point, backward):
    """Of Strobe on a CPU; and that what another mask, softcap or sink gives is not."""
    point = replace(point, backward=backward)
    (inputs, *_) = input_sets(point, CPU)
    gate, peer = Gate(inputs, mask_of(point.mask)), strobe_peer()
    assert gate.error(bind(peer, point, inputs)()) < 1e-5
    other = replace(inputs, softcap=2.0, sinks=None if inputs.sinks is None else inputs.sinks + 3.0)
    assert Gate(other, mask_of(point.mask)).error(bind(peer, point, inputs)()) > 1e-3


def test_packed_sequences_are_looked_at_first_and_last():
    point = SMALL[2]
    (inputs, *_) = input_sets(point, CPU)
    gate, out = Gate(inputs, mask_of(point.mask)), bind(strobe_peer(), point, inputs)()
    for row in (0, 33):
        wrong = out.clone()
        wrong[:, row] = 0.0
        assert gate.error(wrong) > 0.5
    assert out.shape == (1, 34, 4, 32)


def test_who_does_not_take_a_point_says_so_by_name():
    for point in SMALL[2:]:
        inputs = Inputs.random(point, CPU, torch.Generator())
        with pytest.raises(ValueError, match="SDPA is measured without packed sequences, softcaps and sinks"):
            bind(sdpa("SDPA", "MATH"), point, inputs)
    with pytest.raises(ValueError, match="aligns a causal mask to the first key, got 8 queries and 24 keys"):
        bind(sdpa("SDPA", "MATH"), SMALL[1], Inputs.random(SMALL[1], CPU, torch.Generator()))


def plan(**changes) -> Plan:
    return replace(Plan(zoo=SMALL, rounds=2, seconds=0.001, peers=("SDPA math",)), **changes)


@pytest.fixture(autouse=True)
def no_point_comes_again(monkeypatch):
    monkeypatch.setattr(bench, "MOST_ROUNDS", 0)


def test_a_run_measures_all_and_shows_them(tmp_path, capsys):
    report = bench.Run(plan(), CPU, "strobe bench zoo").run()
    assert report["what"] == "zoo" and [facts["model"] for facts in report["points"]] == [point.model for point in SMALL]
    assert all("tflops" in facts["results"]["strobe"] for facts in report["points"])
    assert default_path(report).name.startswith("zoo-cpu-") and kernels_of(report) == ["sm90 forward"]
    show(report)
    assert "3 packed, 1 to 21" in " ".join(capsys.readouterr().out.split())
    assert plot.draw_zoo(report, tmp_path / "zoo.png")[0].stat().st_size > 10_000


def test_parts_are_merged(tmp_path):
    for number in (1, 2):
        bench.bench(plan(part=(number, 2)), CPU, "strobe bench zoo --part", tmp_path / f"{number}.json")
    merge([tmp_path / "1.json", tmp_path / "2.json"], tmp_path / "both.json")
    both = load(tmp_path / "both.json")
    assert [facts["model"] for facts in both["points"]] == [point.model for point in SMALL] and both["stopped"] is None


def attending(q, k, v, mask):
    return lambda: strobe.attention(q, k, v, mask=mask)


@pytest.mark.parametrize("max_seconds", [0.0, 1000.0])
def test_little_time_is_shared_out_evenly(max_seconds, monkeypatch):
    """With hardly any each point gets a balanced block of the shortest timings; with enough as many rounds as planned."""
    clock = {"now": 0.0}
    monkeypatch.setattr(bench, "peers_for", lambda device: {"peer": Peer("peer", attending)})
    monkeypatch.setattr(bench, "measure", lambda contender, clock: 1e-4)
    monkeypatch.setattr(bench.time, "monotonic", lambda: clock["now"])
    run = bench.Run(
        plan(zoo=SMALL[:2], rounds=6, seconds=0.01, peers=None, even=True, max_seconds=10.0), CPU, "strobe bench zoo"
    )
    run.plan = replace(run.plan, max_seconds=max_seconds + 1.0)
    racing = [bench.Contender(peer, [], None, count=100) for peer in run.peers]
    share = run._share(run.points[0])
    assert share == pytest.approx((max_seconds + 1.0) / 2)
    rounds = run._fit(racing, 6, share if max_seconds else 0.02)
    assert (rounds, racing[0].count) == ((6, 100) if max_seconds else (2, 25))
    clock["now"] = max_seconds + 0.9
    assert run._share(run.points[1]) == pytest.approx(0.1)


def test_shapes_at_random_are_whole_and_of_every_kind():
    found = zoo.drawn(300, seed=3)
    assert found == zoo.drawn(300, seed=3) and found[:9] == zoo.drawn(9, seed=3) and found != zoo.drawn(300, seed=4)
    assert len({str(point) for point in found}) == 300
    for point in found:
        tokens = point.batch * point.length if point.packed is None else sum(point.packed)
        assert point.heads % point.heads_kv == 0 and 0 < tokens < 2 * zoo.TOKENS and zoo.source_of(point.model)
        assert explain_problem(point.problem(), KNOWN["H200"]).chosen == "sm90"
    assert {point.heads_kv for point in found} == {heads_kv for _, heads_kv in zoo.HEADS}
    assert 100 < sum(point.packed is not None for point in found) < 200 and min(point.length for point in found) < 60
    assert all(point.backward for point in zoo.drawn(3, backward=True))


def test_a_run_of_shapes_at_random_is_no_zoo(tmp_path, capsys):
    report = bench.Run(plan(random=True), CPU, "strobe bench zoo --random 5").run()
    assert report["what"] == "random" and default_path(report).name.startswith("random-cpu-")
    assert plot.draw_random(report, tmp_path / "random.png")[0].stat().st_size > 5_000


def test_the_command_lists_shapes_and_refuses_what_is_none():
    listed = command("bench", "zoo", "--list", "--only", "gpt-oss,cross", "--phase", "forward")
    lines = listed.stdout.splitlines()
    assert (
        len(lines) == 7
        and "gpt-oss, window: 1 x 8192, heads 64/8, D=64, window 128, sinks (openai/gpt-oss-20b, config.json)" in lines
    )
    assert "only must name some" in " ".join(command("bench", "zoo", "--only", "nobody").output.split())
    drawn = command("bench", "zoo", "--list", "--random", "3", "--seed", "2").stdout.splitlines()
    assert len(drawn) == 3 and all("of seed 2: " in line and line.endswith("(drawn at random)") for line in drawn)
    for words, says in (
        (("--seed", "1"), "seed belongs to --random, got 1"), (("--random", "2", "--only", "x"), "only names models"),
        (("--random", "0"), "random must be"),
    ):  # fmt: skip
        assert says in " ".join(command("bench", "zoo", *words).output.split())
