"""The benchmark: its order, its gate, its report, and a whole run on the CPU."""

import json
import math
import os
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import groupby, pairwise, product
from statistics import median

import pytest
import torch
from reports import report

import strobe
from strobe.lab.bench import accuracy, bench, check, intervals, machine, plot, precompile
from strobe.lab.bench.inputs import input_sets
from strobe.lab.bench.merge import merge
from strobe.lab.bench.peers import Peer, _band, peers_for
from strobe.lab.bench.plan import BACKWARD, FORWARD, MASKS, SINGLE, Grid, Plan, Point
from strobe.lab.bench.report import (
    best_peer,
    call_spreads,
    closest,
    default_path,
    extra_memory,
    load,
    missing,
    ratios,
    refusals,
    show,
    verdicts,
)
from strobe.lab.bench.single_call import statistics

pytestmark = pytest.mark.usefixtures("small_product")

CPU = torch.device("cpu")
SMALL = Grid(((32, 32),), (64,), tokens=128, heads=4, heads_kv=2, dtypes=("fp32",), masks=("full", "causal"))


@pytest.fixture(autouse=True)
def no_point_comes_again(monkeypatch):
    """Rounds are as many as the plan says, but where a test is about more."""
    monkeypatch.setattr(bench, "MOST_ROUNDS", 0)


TINY = Plan((SMALL,), rounds=2, seconds=0.001)
FULL = replace(TINY, grids=(replace(SMALL, masks=("full",)),))


# ---- order and statistics


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_every_contender_follows_every_other_equally_often(n):
    orders = bench.balanced_order(n, bench.block_of(n))
    assert all(sorted(order) == list(range(n)) for order in orders)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == n * (n - 1) and len(set(follows.values())) == 1


def test_order_of_one_and_of_none():
    assert bench.balanced_order(1, 2) == [[0], [0]]
    assert bench.balanced_order(0, 1) == [[]]


@pytest.mark.parametrize("degrees", [1, 2, 5, 10, 30])
def test_students_t_holds_95_percent(degrees):
    """The density of Student's t, summed between the table's bounds."""
    bound, steps = intervals.T95[degrees - 1], 20000
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    middles = ((i + 0.5) / steps * bound for i in range(steps))
    inside = 2 * bound / steps * sum(scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in middles)
    assert inside == pytest.approx(0.95, abs=1e-4)


def test_intervals_hold_the_truth_95_times_in_100():
    """What both rounds of a pair share, here 20 % of noise, is no part of the interval."""
    dice, inside, runs = random.Random(0), 0, 2000
    for _ in range(runs):
        shared = [math.exp(dice.gauss(0, 0.2)) for _ in range(6)]
        ours, theirs = ([rate * x * math.exp(dice.gauss(0, 0.02)) for x in shared] for rate in (1.05, 1.0))
        ratio = intervals.Ratio.of(ours, theirs)
        inside += ratio.low <= 1.05 <= ratio.high
        assert ratio.half < 0.15
    assert 0.935 < inside / runs < 0.965


@pytest.mark.parametrize(
    ("value", "half", "verdict", "is_open"),
    [
        (1.05, 0.02, "ahead", False),
        (1.05, 0.045, "ahead", True),
        (1.05, 0.06, "level", True),
        (1.005, 0.001, "level", False),
        (0.995, 0.001, "level", False),
        (0.95, 0.02, "behind", False),
        (0.95, 0.06, "level", True),
        (1.0, 0.009, "level", False),
        (1.5, None, "unknown", False),
    ],
)
def test_verdicts(value, half, verdict, is_open):
    ratio = intervals.Ratio(value, half)
    assert (ratio.verdict, ratio.open) == (verdict, is_open)


def test_a_ratio_is_written_with_its_interval_rounded_up():
    assert [str(intervals.Ratio(1.1700, half)) for half in (None, 0.001, 0.0101)] == ["1.17", "1.17 ±0.01", "1.17 ±0.02"]
    with pytest.raises(ValueError, match="a ratio needs a round of each side"):
        intervals.Ratio.of([1.0], [])


def test_summary_keeps_median_extremes_and_order():
    result = bench.summary(2e12, [2.0, 1.0, 4.0])
    assert result == {"tflops": 1.0, "min": 0.5, "max": 2.0, "rounds": [1.0, 2.0, 0.5]}


def test_grid_makes_one_point_of_each_combination():
    grid = Grid(((64, 64), (192, 128)), (1024, 32768), dtypes=("bf16", "fp16"), masks=("causal",))
    points = grid.points(backward=False)
    assert len(points) == len(set(points)) == 8
    assert {(p.head_dim, p.head_dim_v, p.heads, p.heads_kv) for p in points} == {(64, 64, 32, 32), (192, 128, 10, 10)}
    assert {(p.length, p.batch) for p in points} == {(1024, 16), (32768, 1)}


def test_forward_is_measured_at_every_point_of_the_evidence():
    points = Plan().points()
    assert len(points) == len(set(points)) == sum(len(grid.points(False)) for grid in FORWARD)
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        for dtype, wanted in (("bf16", lengths), ("fp16", (1024, 16384))):
            for mask in MASKS:
                shapes = [p for p in points if (p.head_dim, p.head_dim_v, p.dtype, p.mask) == (*dims, dtype, mask)]
                found = sorted(p.length for p in shapes if p.heads == p.heads_kv == 2048 // p.head_dim)
                assert found == [n for n in wanted if mask != "window" or n > 1024]
    grouped = [p for p in points if p.heads != p.heads_kv]
    assert {(p.heads, p.heads_kv, p.head_dim) for p in grouped} == {(64, 8, 128)} and len(grouped) == 8 + 8 + 6
    assert all(p.batch * p.length == max(16384, p.length) for p in points)
    assert {p.dtype for p in points} == {"bf16", "fp16", "fp8"} and not any(p.backward for p in points)


def test_backward_is_measured_at_every_point_of_the_evidence():
    points = Plan(BACKWARD, backward=True).points()
    assert len(points) == len(set(points)) == 108 and all(p.backward for p in points)
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        for mask in MASKS:
            shapes = [p for p in points if (p.head_dim, p.head_dim_v, p.dtype, p.mask) == (*dims, "bf16", mask)]
            found = sorted(p.length for p in shapes if p.heads == p.heads_kv == 2048 // p.head_dim)
            assert found == [n for n in lengths if mask != "window" or n > 1024]
    grouped = [p for p in points if p.heads != p.heads_kv]
    assert {(p.heads, p.heads_kv, p.head_dim) for p in grouped} == {(64, 8, 128)} and len(grouped) == 6 + 6 + 5
    assert {(p.head_dim, p.length, p.mask) for p in points if p.dtype == "fp16"} == set(product((64, 128), (4096,), MASKS))
    assert all(p.batch * p.length == max(16384, p.length) for p in points)


@pytest.mark.parametrize("mask", MASKS)
def test_a_backward_is_quoted_as_two_and_a_half_forwards(mask):
    """Five products instead of two; where D and Dv differ, three of them have D and two Dv."""
    forward, backward = (Point(1, 4096, 16, 16, 128, 128, "bf16", mask, backward) for backward in (False, True))
    assert backward.flops == 2.5 * forward.flops
    wide = replace(backward, head_dim=192)
    assert wide.flops / backward.flops == (3 * 192 + 2 * 128) / (5 * 128)


def test_a_window_is_1024_keys_and_its_flops_are_counted():
    point = replace(TINY.points()[0], mask="window", length=4096, batch=1)
    seen = MASKS["window"].dense(4096, 4096)
    assert seen[2000].sum() == 1024 and seen[2000, 2000] and not seen[2000, 2001] and seen[5].sum() == 6
    assert point.flops == 4 * 4 * 32 * seen.sum().item()
    assert _band(MASKS["window"], None) == (1023, 0) and _band(MASKS["full"], -1) == (-1, -1)
    with pytest.raises(ValueError, match="window_size cannot express"):
        _band(strobe.Prefix(3), -1)


def test_a_point_says_its_shape():
    point = Point(1, 1024, 64, 8, 192, 128, "bf16", "window", False)
    assert str(point) == "bf16 D=192/128 heads 64/8 window S=1024"
    assert Point.of({"results": {}} | vars(point)) == point and point.family == replace(point, length=1)


def test_rounds_make_the_order_balanced_and_are_fewer_of_long_launches():
    plan = replace(TINY, rounds=6, seconds=0.03)
    assert [bench.rounds_of(1e-4, contenders, plan) for contenders in (0, 1, 2, 3, 4, 5)] == [6, 6, 6, 6, 8, 10]
    assert [bench.rounds_of(seconds, 2, plan) for seconds in (0.15, 0.25, 0.9)] == [6, 4, 2]
    assert [bench.rounds_of(0.9, contenders, plan) for contenders in (3, 4, 5)] == [6, 4, 10], "a whole block at least"


def test_expected_time_grows_with_points_contenders_and_lengths():
    points = Plan().points()
    times = [bench.expected_seconds(points, contenders, Plan()) for contenders in (1, 2)]
    settling = bench.SETTLE_SECONDS * len(points)
    assert times[1] - settling == pytest.approx(2 * (times[0] - settling), rel=0.05), "two race, each as long as one alone"
    assert 60 < times[0] < 600
    longest = [p for p in points if p.length == 131072 and p.mask == "full"]
    assert bench.expected_seconds(longest, 1, Plan()) / len(longest) > 2 * times[0] / len(points)


# ---- the gate


WINDOW = strobe.Window(left=20, right=0)


@pytest.fixture(params=[strobe.Full(), strobe.Causal(), WINDOW], ids=str)
def mask(request):
    return request.param


def gqa_inputs(backward=False):
    return input_sets(replace(SMALL, head_dims=((32, 16),), lengths=(96,)).points(backward)[0], CPU)[0]


def test_gate_knows_the_exact_output(mask):
    inputs = gqa_inputs()
    out = strobe.attention(inputs.q.double(), inputs.k.double(), inputs.v.double(), mask=mask)
    assert out.shape == (1, 96, 4, 16) and accuracy.out_error(out, inputs, mask) < 1e-12
    out[-1, 50, -1] *= 1.001
    assert 0.5e-3 < accuracy.out_error(out, inputs, mask) < 2e-3
    out[-1, 50, -1] = torch.nan
    assert accuracy.out_error(out, inputs, mask) == float("inf")


def test_gate_sees_a_window_that_is_one_key_too_long():
    inputs = gqa_inputs()
    longer = strobe.attention(inputs.q.double(), inputs.k.double(), inputs.v.double(), mask=strobe.Window(21, 0))
    assert accuracy.out_error(longer, inputs, WINDOW) > accuracy.BOUNDS["fp8"]


def test_gate_sees_a_window_that_is_one_key_too_long_in_gradients():
    inputs = input_sets(Point(1, 2048, 1, 1, 16, 16, "bf16", "window", True), CPU)[0]
    q, k, v = (x.float().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    here, errors = accuracy.Gate(inputs, MASKS["window"]), []
    for left in (1023, 1024):
        out = strobe.attention(q, k, v, mask=strobe.Window(left, 0))
        errors.append(here.error(torch.autograd.grad(out, (q, k, v), inputs.dout.float())))
    assert errors[0] < 1e-5 and errors[1] > accuracy.BOUNDS["bf16"]


def test_gate_takes_fp8():
    inputs = input_sets(replace(SMALL.points(False)[0], dtype="fp8"), CPU)[0]
    assert inputs.q.dtype == torch.float8_e4m3fn
    out = strobe.attention(inputs.q.double(), inputs.k.double(), inputs.v.double())
    assert accuracy.out_error(out, inputs, strobe.Full()) < 1e-12


def test_gate_knows_the_exact_gradients(mask):
    inputs = gqa_inputs(backward=True)
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = strobe.attention(q, k, v, mask=mask)
    gradients = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    here = accuracy.Gate(inputs, mask)
    assert here.error(gradients) < 1e-12
    chunked = accuracy.exact_gradients(inputs, mask, 0, 1, chunk=40)
    whole = accuracy.exact_gradients(inputs, mask, 0, 1)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(chunked, whole, strict=True))
    for i in range(3):
        spoiled = tuple(g * 1.01 if i == j else g for j, g in enumerate(gradients))
        assert here.error(spoiled) == pytest.approx(0.01)


@pytest.mark.parametrize(("batch", "head"), [(0, 0), (1, 1)], ids=["first", "last"])
def test_gate_looks_at_the_first_and_at_the_last_key_head(batch, head):
    inputs = input_sets(SMALL.points(backward=True)[0], CPU)[0]
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    dq, dk, dv = torch.autograd.grad(strobe.attention(q, k, v), (q, k, v), inputs.dout.double())
    dq[batch, :, 2 * head : 2 * head + 2] *= 1.01
    assert accuracy.Gate(inputs, strobe.Full()).error((dq, dk, dv)) == pytest.approx(0.01)
    dk[batch, 3, head] = torch.nan
    assert accuracy.Gate(inputs, strobe.Full()).error((dq, dk, dv)) == float("inf")


def test_what_is_right_is_computed_once(monkeypatch):
    asked, exact = [], accuracy.exact_gradients
    monkeypatch.setattr(accuracy, "exact_gradients", lambda *rest: (asked.append(rest[2:]), exact(*rest))[1])
    bench.Run(replace(FULL, backward=True), CPU, "strobe bench").run()
    assert asked == [(0, 0), (1, 1)], "two heads, whoever takes part"


# ---- a whole run on the CPU


def test_who_takes_part_was_asked(monkeypatch):
    """Even if a peer is another object each time that peers are looked up."""

    def looked_up(device):
        return {name: replace(peer, context=lambda: nullcontext()) for name, peer in peers_for(device).items()}

    monkeypatch.setattr(bench, "peers_for", looked_up)
    report = bench.Run(replace(TINY, peers=("SDPA flash",)), CPU, "strobe bench").run()
    assert "SDPA flash" in report["contenders"] and "SDPA flash" not in report["not asked"]


def test_run_measures_everyone_on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench, "ALSO_RAN", float("inf"))
    points = bench.Run(replace(TINY, backends=("tiled",)), CPU, "strobe bench").run()["points"]
    assert [p["mask"] for p in points] == ["full", "causal"] and all(p["finished"] for p in points)
    for point in points:
        assert set(point["results"]) == {"strobe", "strobe tiled", "SDPA flash", "SDPA math"}
        for result in point["results"].values():
            assert result["min"] <= result["tflops"] <= result["max"] and len(result["rounds"]) == 4, "a balanced block of four"
            assert result["error"] < 1e-5 and result["timed"] == "calls"
        assert point["results"]["strobe"]["backend"] in ("torch_cpu", "portable")  # portable: in Triton's interpreter
        assert point["flops"] == 4 * 2 * 4 * 64 * 64 * 32 // (2 if point["mask"] == "causal" else 1)


def test_a_point_of_fp8_says_which_kernel_computed_it():
    point = replace(SMALL.points(False)[0], dtype="fp8", head_dim=128, head_dim_v=128)
    assert bench._backend(point, torch.device("cuda")) == "sm90"
    result = bench.Run(Plan((replace(SMALL, dtypes=("fp8",)),), rounds=1, seconds=0.001), CPU, "strobe bench").run()
    assert result["points"][0]["results"]["strobe"]["backend"] in ("torch_cpu", "portable")  # in float32


def test_single_calls_are_timed_one_by_one(monkeypatch):
    calls = []

    def prepare(q, k, v, mask):
        return lambda: (calls.append(1), strobe.attention(q, k, v))[1]

    monkeypatch.setattr(bench, "peers_for", lambda device: {"counted": Peer("counted", prepare)})
    monkeypatch.setattr(bench, "ALSO_RAN", float("inf"))
    result = bench.Run(replace(FULL, protocol="single", rounds=3, peers=("counted",)), CPU, "strobe bench").run()
    assert result["protocol"]["name"] == "single" and (result["protocol"]["warm-ups"], result["protocol"]["calls"]) == (32, 128)
    point = result["points"][0]
    for measured in point["results"].values():
        us = measured["calls_us"]
        assert us["count"] == 128 * len(measured["rounds"]) and len(measured["rounds"]) in (2, 4) and us["stdev"] > 0
        assert us["min"] <= us["p10"] <= us["median"] <= us["p90"] <= us["max"]
        assert measured["min"] <= point["flops"] / us["median"] / 1e6 <= measured["max"], "a round is the median of its calls"
    assert len(calls) > 2 * (32 + 128)
    assert "strobe" in call_spreads(result) and call_spreads(report()) == ""


def test_call_statistics():
    us = statistics([1e-6 * n for n in range(1, 12)])
    assert us == pytest.approx(
        {"count": 11, "mean": 6, "stdev": 11**0.5, "median": 6, "p10": 2, "p90": 10, "min": 1, "max": 11}
    )


def test_the_published_lengths_are_measured_call_by_call():
    points = Plan(SINGLE, protocol="single").points()
    assert sorted(p.length for p in points) == [512, 1024, 2048, 4096, 8192, 16384]
    assert {(p.head_dim, p.mask, p.dtype) for p in points} == {(128, "full", "bf16")}
    plan = replace(TINY, protocol="single", rounds=6, seconds=0.03)
    assert [bench.rounds_of(seconds, 2, plan) for seconds in (1e-4, 2e-3, 1e-2)] == [6, 4, 2], "a round is 160 calls"


def test_run_measures_the_backward():
    result = bench.Run(replace(TINY, backward=True), CPU, "strobe bench").run()
    assert result["what"] == "backward" and result["stopped"] is None
    assert all(r["error"] < 1e-5 and r["tflops"] > 0 for r in result["points"][0]["results"].values())


def test_report_is_json_and_says_what_it_was_made_with():
    result = bench.Run(replace(FULL, peers=()), CPU, "strobe bench --peers x").run()
    again = json.loads(json.dumps(result))
    assert again["schema"] == 2 and again["command"] == "strobe bench --peers x" and again["contenders"] == ["strobe"]
    assert again["device"]["packages"]["torch"] == version("torch") and again["device"]["strobe"] == strobe.__version__
    assert set(again["ceiling"]) == {"before", "after", "matmul"}


def prepare_wrong(q, k, v, mask):
    return lambda: torch.zeros_like(q)


def prepare_missing(q, k, v, mask):
    import no_such_package  # noqa: F401


def prepare_flaky(q, k, v, mask):
    calls = []

    def call():
        calls.append(1)
        if len(calls) == 4:  # one to enter, one to warm up, one in the first round (no lead): this is the second round
            raise RuntimeError("out of patience\nand more lines")
        return strobe.attention(q, k, v)

    return call


def test_peers_that_fail_are_reported_and_stop_nobody(monkeypatch):
    peers = {f.__name__: Peer(f.__name__, f) for f in (prepare_wrong, prepare_missing, prepare_flaky)}
    monkeypatch.setattr(bench, "peers_for", lambda device: peers)
    monkeypatch.setattr(bench, "ALSO_RAN", float("inf"))
    result = bench.Run(replace(FULL, seconds=1e-9, rounds=3), CPU, "strobe bench").run()
    results = result["points"][0]["results"]
    assert "wrong: relative error 1.0e+00 against float64, allowed 1e-04" in results["prepare_wrong"]["refused"]
    assert "No module named 'no_such_package'" in results["prepare_missing"]["refused"]
    assert results["prepare_flaky"]["refused"].startswith("RuntimeError: out of patience (test_bench.py:")
    assert results["strobe"]["tflops"] > 0 and result["stopped"] is None


def test_who_is_far_behind_is_timed_in_one_round_unless_it_is_strobe(monkeypatch):
    launches = {"strobe": 0.0009, "fast": 0.0004, "near": 0.0006, "slow": 0.00061}
    peers = {name: Peer(name, lambda q, k, v, mask: lambda: strobe.attention(q, k, v)) for name in launches if name != "strobe"}
    monkeypatch.setattr(bench, "peers_for", lambda device: peers)
    monkeypatch.setattr(bench, "warm_up", lambda contender, clock, seconds: launches[contender.peer.name])
    results = bench.Run(replace(FULL, rounds=3), CPU, "strobe bench").run()["points"][0]["results"]
    assert {name: len(results[name]["rounds"]) for name in results} == {"strobe": 6, "fast": 6, "near": 6, "slow": 1}


def attending(q, k, v, mask):
    return lambda: strobe.attention(q, k, v, mask=mask)


def play(monkeypatch, peers: dict, seconds=lambda contender, clock: 1e-4, launches: dict | None = None) -> None:
    """Peers by name, how long a timing takes, and how long a launch seems to take before the first round."""
    monkeypatch.setattr(bench, "peers_for", lambda device: {name: Peer(name, prepare) for name, prepare in peers.items()})
    monkeypatch.setattr(bench, "warm_up", lambda contender, clock, seconds: (launches or {}).get(contender.peer.name, 1e-4))
    monkeypatch.setattr(bench, "measure", seconds)


def rounds_by_name(facts: dict) -> dict[str, int]:
    return {name: len(result["rounds"]) for name, result in facts["results"].items() if "rounds" in result}


@pytest.mark.parametrize("drops_out", ["nobody", "slow", "flaky"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_order_is_balanced_whoever_drops_out(count, drops_out, monkeypatch):
    """One who is slow has one round; one who fails in the middle of a block takes the block along."""
    timed, last = [], f"peer {count}"

    def seconds(contender, clock):
        timed.append(contender.peer.name)
        if drops_out == "flaky" and contender.peer.name == last and timed.count(last) == 2:
            raise RuntimeError("out of patience")
        return 1e-4

    play(monkeypatch, {f"peer {n + 1}": attending for n in range(count)}, seconds, {last: 9e-4} if drops_out == "slow" else {})
    facts = bench.Run(replace(FULL, rounds=1), CPU, "strobe bench").run()["points"][0]
    racing = {name for name, rounds in rounds_by_name(facts).items() if rounds > 1}
    assert len(racing) == count + (drops_out == "nobody") and ("refused" in facts["results"][last]) == (drops_out == "flaky")
    order = timed[-rounds_of_strobe(facts) * len(racing) :]
    follows = Counter(
        pair for start in range(0, len(order), len(racing)) for pair in pairwise(order[start : start + len(racing)])
    )
    assert len(follows) == len(racing) * (len(racing) - 1) and len(set(follows.values())) == 1


def rounds_of_strobe(facts: dict) -> int:
    return rounds_by_name(facts)["strobe"]


def test_strobe_and_the_fastest_peer_have_all_rounds(monkeypatch):
    play(monkeypatch, {"near": attending, "far": attending}, launches={"strobe": 1e-4, "near": 3e-4, "far": 4e-4})
    facts = bench.Run(FULL, CPU, "strobe bench").run()["points"][0]
    assert rounds_by_name(facts) == {"strobe": 2, "near": 2, "far": 1}


@pytest.mark.parametrize(
    ("speed", "noise", "least", "most"), [(1.0, 0.01, 8, 46), (1.0, 0.2, 48, 48), (1.2, 0.02, 6, 6), (1.0, 0.001, 6, 6)]
)
def test_points_come_again_until_their_verdict_is_known(speed, noise, least, most, monkeypatch):
    dice, rate = random.Random(0), {"strobe": speed, "peer": 1.0}
    monkeypatch.setattr(bench, "MOST_ROUNDS", 48)
    play(monkeypatch, {"peer": attending}, lambda c, clock: 1e-4 / rate[c.peer.name] * math.exp(dice.gauss(0, noise)))
    facts = bench.Run(replace(FULL, rounds=6), CPU, "strobe bench").run()["points"][0]
    rounds, found = rounds_by_name(facts), ratios(facts["results"])["peer"]
    assert rounds["strobe"] == rounds["peer"] and least <= rounds["peer"] <= most
    assert facts["results"]["peer"]["tflops"] == median(facts["results"]["peer"]["rounds"])
    assert not found.open or rounds["peer"] == 48


def test_more_rounds_wait_until_all_points_are_measured_and_while_there_is_time(monkeypatch):
    dice, order, time_it = random.Random(0), [], bench.Run._time
    monkeypatch.setattr(bench, "MOST_ROUNDS", 10)
    play(monkeypatch, {"peer": attending}, lambda contender, clock: 1e-4 * math.exp(dice.gauss(0, 0.1)))
    monkeypatch.setattr(bench.Run, "_time", lambda run, *rest: (order.append(rest[1].mask), time_it(run, *rest))[1])
    points = bench.Run(replace(TINY, rounds=4), CPU, "strobe bench").run()["points"]
    assert [mask for mask, _ in groupby(order)] == ["full", "causal", "full", "causal"]
    assert [rounds_of_strobe(facts) for facts in points] == [10, 10]
    order.clear()
    monkeypatch.setattr(bench.Run, "_out_of_time", lambda run: len(order) >= 2 * 8 + 6)  # in a block that comes again
    result = bench.Run(replace(TINY, rounds=4), CPU, "strobe bench").run()
    assert [rounds_by_name(facts) for facts in result["points"]] == [{"strobe": 6, "peer": 6}, {"strobe": 4, "peer": 4}]
    assert result["stopped"] is None and all(facts["finished"] for facts in result["points"])


def test_peers_that_are_not_installed_are_left_out_and_named(monkeypatch):
    peers = {"here": Peer("here", prepare_wrong), "gone": Peer("gone", prepare_missing, module="no_such_package.inside")}
    monkeypatch.setattr(bench, "peers_for", lambda device: peers)
    run = bench.Run(FULL, CPU, "strobe bench")
    assert run.report["contenders"] == ["strobe", "here"] and run.report["not installed"] == ["gone"]
    named = bench.Run(replace(FULL, peers=("gone",)), CPU, "strobe bench").run()
    assert "No module named 'no_such_package'" in named["points"][0]["results"]["gone"]["refused"]


def test_a_contender_that_would_hang_is_not_called(monkeypatch):
    entered, enter = [], bench.enter
    unusable = {("SDPA math", FULL.points()[0]): "it hung"}
    monkeypatch.setattr(bench, "warm", lambda *_: unusable)
    monkeypatch.setattr(bench, "enter", lambda peer, *rest: (entered.append(peer.name), enter(peer, *rest))[1])
    results = bench.Run(FULL, CPU, "strobe bench").run()["points"][0]["results"]
    assert results["SDPA math"] == {"refused": "it hung"} and entered == ["strobe", "SDPA flash"]


# ---- compilers first


def test_what_a_process_began_and_did_not_finish_is_unusable_from_there_on():
    points = Plan().points()[:3]
    began = "begin\tstrobe\t2\nsome words\nbegin\tFA4\t0\nbegin\tFA4\t1\n"
    assert precompile.unfinished(began, points, "dead") == {("FA4", points[1]): "dead", ("FA4", points[2]): "dead"}
    assert precompile.unfinished(began + "done\n", points, "dead") == {} == precompile.unfinished("", points, "dead")


def test_what_raises_in_a_process_does_not_keep_the_others_from_running(tmp_path):
    precompile.in_processes(os.mkdir, [(tmp_path / "a",), (tmp_path / "a",), (tmp_path / "b",)])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_process_calls_every_contender_at_every_point(monkeypatch):
    points = TINY.points()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    job = {"device": "cpu", "names": ["strobe tiled", "SDPA math"], "points": [asdict(point) for point in points]}
    code = "import torch; torch.cuda.synchronize = lambda device: None; from strobe.lab.bench.precompile import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], input=json.dumps(job), capture_output=True, text=True, check=True)
    begun = [f"begin\t{name}\t{number}" for name in job["names"] for number in range(2)]
    assert ran.stdout.splitlines() == [*begun, "done"]


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(precompile, "SECONDS", 0.01)
    assert precompile._family(TINY.points(), ["strobe"], CPU) == {}, "it had begun nothing"


def test_nothing_is_compiled_ahead_on_a_cpu():
    assert precompile.warm(TINY.points(), [bench.strobe_peer()], CPU, pytest.fail) == {}


# ---- resuming, checking


def test_resume_keeps_finished_points_and_measures_the_others(tmp_path):
    path = tmp_path / "result.json"
    assert bench.bench(TINY, CPU, "strobe bench", path) == 0
    first = load(path)
    first["points"][1]["finished"] = False
    first["points"][0]["results"]["mark"] = {"refused": "kept"}
    path.write_text(json.dumps(first))
    assert bench.bench(TINY, CPU, "strobe bench", path, resume=True) == 0
    again = load(path)["points"]
    assert [p["mask"] for p in again] == ["full", "causal"] and all(p["finished"] for p in again)
    assert "mark" in again[0]["results"] and again[1]["results"] != first["points"][1]["results"]
    path.write_text(json.dumps(first | {"device": first["device"] | {"commit": "other"}}))
    with pytest.raises(ValueError, match="resume needs the same commit as in"):
        bench.bench(TINY, CPU, "strobe bench", path, resume=True)


def test_json_is_written_after_each_point(tmp_path, monkeypatch):
    path, seen, point = tmp_path / "result.json", [], bench.Run._point

    def look(run, which):
        seen.append(len(load(path)["points"]) if path.exists() else 0)
        return point(run, which)

    monkeypatch.setattr(bench.Run, "_point", look)
    bench.bench(TINY, CPU, "strobe bench", path)
    assert seen == [0, 1]


def against(rates: dict, **changes) -> dict:
    """A report of one point, D = 64, S = 4096, with these TFLOP/s."""
    facts = vars(Point(4, 4096, 32, 32, 64, 64, "bf16", "full", False)) | changes
    results = {name: {"tflops": rate} for name, rate in rates.items()}
    return report() | {"points": [facts | {"results": results, "finished": True}]}


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, 1.10),
        ({"length": 2048}, 1.05),
        ({"length": 512, "head_dim": 128, "head_dim_v": 128}, 1.05),
        ({"length": 131072, "head_dim": 128, "head_dim_v": 128, "heads_kv": 8}, 1.10),
        ({"head_dim": 96, "head_dim_v": 96}, 1.03),
        ({"head_dim": 192, "head_dim_v": 128}, 1.03),
        ({"head_dim": 256, "head_dim_v": 256}, 1.03),
        ({"dtype": "fp8"}, 1.0),
        ({"backward": True}, 1.05),
        ({"backward": True, "head_dim": 256, "head_dim_v": 256, "length": 32768}, 1.05),
        ({"backward": True, "length": 2048}, 1.0),
    ],
)
def test_each_point_has_its_floor(changes, least):
    assert check.shortfalls(against({"strobe": 501 * least, "a": 500.0, "b": 400.0}, **changes)) == []
    lines = check.shortfalls(against({"strobe": 499 * least, "a": 500.0, "b": 400.0}, **changes))
    assert len(lines) == 1 and f"of a, under {least:.2f}" in lines[0] and lines[0].startswith(changes.get("dtype", "bf16"))


def test_one_floor_for_all_points():
    rates = {"strobe": 540.0, "a": 500.0}
    assert check.shortfalls(against(rates), 1.07) == []
    assert check.shortfalls(against(rates), 1.09) == ["bf16 D=64 full S=4096: 1.080 of a, under 1.09 (540 and 500 TFLOP/s)"]


def test_a_shortfall_comes_apart_into_work_in_a_cycle_and_clock():
    """500 TFLOP/s of the 132 x 4096 FLOP that an H200's tensor cores do in a cycle."""
    short = against({"strobe": 500.0, "a": 500.0})
    short["device"] |= {"name": "NVIDIA H200", "sms": 132}
    for name, mhz in (("strobe", 1156), ("a", 1850)):
        short["points"][0]["results"][name]["sm_clock_mhz"] = mhz
    assert check.shortfalls(short)[0].endswith("; tensor cores busy 80% at 1156 MHz and 50% at 1850 MHz")


def test_a_point_without_our_number_falls_short_and_one_without_peers_does_not():
    assert check.shortfalls(against({"strobe": 1.0})) == []
    assert check.shortfalls(against({"a": 1.0})) == ["bf16 D=64 full S=4096: no number, not measured"]


def test_fp8_without_a_peer_is_measured_against_our_bf16():
    both = against({"strobe": 500.0, "a": 400.0})
    both["points"] += against({"strobe": 700.0}, dtype="fp8")["points"]
    assert [line.split(" (")[0] for line in check.shortfalls(both)] == [
        "fp8 D=64 full S=4096: 1.400 of strobe in bf16, under 1.50"
    ]


def test_check_says_how_many_and_exits(tmp_path, capsys):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(report()))
    assert check.check(path) == 0 and "2 points, none falls short" in capsys.readouterr().out
    path.write_text(json.dumps(report() | {"stopped": "interrupted"}))
    assert check.check(path) == 1 and "the report is incomplete: interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"schema": 1, "points": []}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="a result of strobe bench must"):
        load(path)
    with pytest.raises(ValueError, match=r"got .*absent"):
        load(tmp_path / "absent")


class GraphClock(bench.CudaClock):
    """A CUDA clock without CUDA, whose graphs return what it is told to; a launch takes `launches` seconds, by way."""

    def __init__(self, result, calls=1e-4, graph=1e-5):
        self.result, self.calls, self.graph = result, calls, graph

    def synchronize(self):
        pass

    def captured(self, calls, times):
        if isinstance(self.result, Exception):
            raise self.result
        self.times, held = times, torch.full_like(self.result, torch.nan)  # nothing is in it before the first replay
        self.replay = lambda: held.copy_(self.result)
        return self.replay, [held]

    def seconds(self, run, count):
        graph = run is getattr(self, "replay", None)
        return self.graph * self.times if graph else self.calls


def entered(clock, seconds=0.03):
    point = TINY.points()[0]
    sets = input_sets(point, CPU)
    right = strobe.attention(sets[0].q, sets[0].k, sets[0].v)
    if clock.result is not None and not isinstance(clock.result, Exception):
        clock.result = right * clock.result
    return bench.enter(bench.strobe_peer(), point, sets, accuracy.Gate(sets[-1], MASKS[point.mask]), clock, seconds)


def test_what_a_graph_computes_passes_the_gate():
    assert [way.name for way in entered(GraphClock(1.0)).ways] == ["calls", "CUDA graph"]
    with pytest.raises(ValueError, match="wrong: relative error"):
        entered(GraphClock(1.01))


@pytest.mark.parametrize(
    ("graph", "way", "count"), [(1e-5, "CUDA graph", 150), (1.02e-4, "CUDA graph", 15), (1.1e-4, "calls", 300)]
)
def test_calls_are_timed_if_they_are_clearly_faster(graph, way, count):
    clock = GraphClock(1.0, calls=1e-4, graph=graph)
    contender = entered(clock)
    assert contender.ways[1].launches == clock.times == 20, "2 ms of launches that take 0.1 ms"
    assert bench.warm_up(contender, clock, 0.03) == pytest.approx(1e-4 if way == "calls" else graph)
    assert contender.way.name == way and contender.count == count


def test_extra_memory_is_what_a_call_holds_beside_what_it_returns(monkeypatch):
    """PyTorch's allocator, played: 1000 bytes are there, and the call takes 300 for a while, and 64 that it returns."""
    counts = {"current": 1000, "peak": 9999}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {f"requested_bytes.all.{k}": n for k, n in counts.items()})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counts.update(peak=counts["current"]))
    clock = GraphClock(None)

    def call():
        counts.update(current=1064, peak=1364)
        return (torch.zeros(16),)

    assert clock.extra_bytes(call) == 300
    assert bench.CpuClock().extra_bytes(call) is None


def test_a_backward_says_its_extra_memory_for_each_query_of_each_head(monkeypatch):
    monkeypatch.setattr(bench.CpuClock, "extra_bytes", lambda clock, call: 2 * 64 * 4 * 12)
    for backward in (False, True):
        results = bench.Run(replace(FULL, backward=backward), CPU, "strobe bench").run()["points"][0]["results"]
        assert {result.get("extra_bytes_per_row") for result in results.values()} == {12.0 if backward else None}


def test_a_launch_that_fills_a_timing_needs_no_graph():
    contender = entered(GraphClock(RuntimeError("not asked for"), calls=0.04))
    assert [way.name for way in contender.ways] == ["calls"] and contender.note is None


def test_without_a_graph_calls_are_timed_and_it_says_so():
    contender = entered(GraphClock(RuntimeError("not capturable")))
    assert [way.name for way in contender.ways] == ["calls"]
    assert contender.note.startswith("no CUDA graph: RuntimeError: not capturable")


@pytest.mark.gpu
def test_single_calls_on_a_gpu():
    """What is timed is the kernel: launches that the host cannot queue in time would take as long as Python does."""
    grid = Grid(((64, 64),), (256,), tokens=512, masks=("full",))
    plan = Plan((grid,), protocol="single", rounds=2, peers=("SDPA flash",))
    result = bench.Run(plan, torch.device("cuda"), "strobe bench").run()
    measured = result["points"][0]["results"]["strobe"]
    assert measured["timed"] == "calls" and measured["calls_us"]["count"] == 128 * len(measured["rounds"])
    assert 200 < measured["sm_clock_mhz"] < 4000
    # (the fastest, and of PyTorch's calls, which take the host longer: other tests may use the GPU)
    of_peer = result["points"][0]["results"]["SDPA flash"]
    assert of_peer["calls_us"]["min"] < result["host_us"]["SDPA flash"]["us"]


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_run_on_a_gpu(backward):
    grid = Grid(((64, 64),), (256,), tokens=512, masks=("full", "causal"))
    plan = Plan((grid,), backward, rounds=2, seconds=0.005, peers=("SDPA flash",))
    result = bench.Run(plan, torch.device("cuda"), "strobe bench").run()
    assert result["stopped"] is None and result["host_us"]["strobe"]["us"] > 0
    for point in result["points"]:
        assert point["sets"] > 1, "inputs that fit into L2 must rotate"
        assert point["results"]["strobe"]["tflops"] > 0 and point["results"]["SDPA flash"]["tflops"] > 0
        assert 200 < point["results"]["strobe"]["sm_clock_mhz"] < 4000
        assert "note" not in point["results"]["strobe"], "it must be capturable"
        assert ("extra_bytes_per_row" in point["results"]["strobe"]) == backward


def test_warnings_are_part_of_the_reason():
    """PyTorch says in warnings why each of its kernels refused."""
    run, results = bench.Run(TINY, CPU, "strobe bench"), {}
    with run._guard("peer", results):
        warnings.warn("head dim is odd (Triggered internally at sdp.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel.")
    assert results["peer"]["refused"].startswith("RuntimeError: No available kernel. (test_bench.py:")
    assert results["peer"]["refused"].endswith("; head dim is odd")


def test_run_stops_in_time_and_says_so():
    result = bench.Run(replace(TINY, max_seconds=1e-6), CPU, "strobe bench").run()
    assert result["stopped"] == "out of time after 0 of 2 points" and result["points"] == []


def test_a_point_cut_short_keeps_its_rounds_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(bench.Run, "_out_of_time", lambda run: bool(run.report["points"]))
    result = bench.Run(TINY, CPU, "strobe bench").run()
    assert result["stopped"] == "out of time in point 1 of 2"
    assert len(result["points"][0]["results"]["strobe"]["rounds"]) == 1


def test_unknown_peer_is_refused():
    with pytest.raises(ValueError, match="SDPA flash, SDPA math, got 'cuDNN'"):
        bench.Run(replace(TINY, peers=("cuDNN",)), CPU, "")


def test_peers_have_unique_names():
    sdpa = {"cuDNN", "SDPA flash", "SDPA efficient", "FlexAttention"}
    assert sdpa | {"FA4", "FA3", "FA2", "xFormers"} == set(peers_for(torch.device("cuda")))


# ---- report, picture, machine


def test_ratio_is_to_the_best_peer_and_not_to_strobe_itself():
    results = {"strobe": {"tflops": 6.0}, "strobe tiled": {"tflops": 9.0}, "a": {"tflops": 3.0}, "b": {"tflops": 4.0}}
    assert best_peer(results) == ("b", 4.0)
    name, ratio = closest(results)
    assert (name, ratio.value, ratio.half) == ("b", pytest.approx(1.5), None)
    assert closest({"strobe": {"tflops": 6.0}, "a": {"refused": "no"}}) is None


def test_terminal_shows_numbers_and_every_refusal(capsys):
    show(report())
    text = capsys.readouterr().out
    assert "600" in text and "1.20" in text and "800 before, 790 after" in text
    assert "FA4: ModuleNotFoundError: No module named 'flash_attn'" in text
    assert "cuDNN: wrong [bf16 D=128 causal S=1024]" in text
    assert "us: strobe 30" in text and "not installed: FA3" in text


def shown(measured, capsys) -> str:
    show(measured)
    return capsys.readouterr().out


def test_extra_memory_is_one_line_of_a_backward(capsys):
    measured = report()
    assert "extra memory" not in shown(measured, capsys)
    for facts, rows in zip(measured["points"], (4.0, 516.25), strict=True):
        facts["results"]["strobe"]["extra_bytes_per_row"] = rows
    measured["points"][0]["results"]["cuDNN"]["extra_bytes_per_row"] = 0.0
    assert extra_memory(measured) == "strobe 4 to 516, cuDNN 0"
    assert "peak extra memory" in shown(measured, capsys)


def test_points_are_counted_by_their_verdicts(capsys):
    def facts(*rates):
        """Strobe's rounds beside a peer of 100 TFLOP/s in each."""
        theirs = {"tflops": 100.0, "rounds": [100.0] * len(rates)}
        return {"results": {"strobe": {"tflops": median(rates), "rounds": list(rates)}, "a": theirs}}

    points = [facts(110, 111, 112), facts(103, 104), facts(100, 100, 100.1), facts(90, 91, 92), facts(150)]
    assert verdicts(points) == "ahead at 1 points, level at 2, behind at 1, unknown at 1, of 5"
    assert verdicts(points[:1]) == "ahead at 1 points, level at 0, behind at 0, of 1" and verdicts([]) == ""
    measured = report()
    measured["points"][0]["results"] = facts(110, 111, 112)["results"]
    assert "1.11 ±0.03" in shown(measured, capsys) and "ahead at 1 points" in shown(measured, capsys)


def test_whoever_is_missing_is_named_with_the_reason():
    absent = report() | {"not asked": ["SDPA flash"]}
    assert missing(absent) == [
        "FA3 (not installed)",
        "FA4 (ModuleNotFoundError: No module named 'flash_attn')",
        "SDPA flash (not asked)",
    ]


# ---- parts


def test_parts_are_the_whole_and_the_first_matters_most():
    whole = Plan().points()
    parts = [replace(Plan(), part=(n, 3)).points() for n in (1, 2, 3)]
    assert [point for part in parts for point in part] == whole and max(map(len, parts)) - min(map(len, parts)) <= 1
    first = parts[0]
    assert {p.dtype for p in first} == {"bf16"} and {p.mask for p in first} == set(MASKS)
    assert {p.family for p in first} == {p.family for p in whole if p.dtype == "bf16"}, "every shape and mask"


def run_parts(tmp_path, parts=2):
    paths = [tmp_path / f"{n}.json" for n in range(1, parts + 1)]
    for n, path in enumerate(paths, 1):
        assert bench.bench(replace(TINY, part=(n, parts)), CPU, f"strobe bench --part {n}/{parts}", path) == 0
    return paths


def test_parts_are_merged_into_what_one_run_would_be(tmp_path):
    paths = run_parts(tmp_path)
    assert [load(path)["stopped"] for path in paths] == ["part 1 of 2 alone", "part 2 of 2 alone"]
    merged = merge(paths, tmp_path / "whole.json")
    assert load(tmp_path / "whole.json") == json.loads(json.dumps(merged)) and merged["stopped"] is None
    assert [facts["mask"] for facts in merged["points"]] == ["full", "causal"]
    assert merged["command"] == "strobe bench"
    assert [part["command"] for part in merged["parts"]] == ["strobe bench --part 1/2", "strobe bench --part 2/2"]
    alone = merge(paths[:1], tmp_path / "half.json")
    assert alone["stopped"] == "part 2 of 2 was not measured" and len(alone["points"]) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["device"].update(name="H100"), "the same GPU in all reports, got CPU in .* and H100 in"),
        (lambda r: r["device"].update(commit="other"), "the same commit"),
        (lambda r: r["kernels"].update({"kernels/combine.py": "0"}), "the same source of the kernels"),
        (lambda r: r["device"]["packages"].update(torch="0.1"), "the same versions"),
        (lambda r: r.update(what="backward"), "the same phase"),
        (lambda r: r["protocol"].update(seconds=1.0), "the same protocol"),
        (lambda r: r.update(contenders=["strobe"]), "the same contenders"),
        (lambda r: r.update(inputs="model"), "the same inputs"),
        (lambda r: r["points"][0].update(mask="full"), "points that were measured once"),
    ],
)
def test_what_was_not_measured_alike_is_not_merged(tmp_path, change, words):
    first = asdict(TINY.points()[0]) | {"finished": True, "results": {}}
    base = report() | {"device": machine.describe(CPU), "kernels": {"kernels/combine.py": "1"}, "telemetry": {}}
    for name, mask in (("1", "full"), ("2", "causal")):
        made = json.loads(json.dumps(base | {"points": [first | {"mask": mask}]}))
        if name == "2":
            change(made)
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=f"merge needs {words}"):
        merge([tmp_path / "1.json", tmp_path / "2.json"], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_refusals_name_their_points_only_if_not_everywhere():
    assert refusals(report()) == [
        "FA4: ModuleNotFoundError: No module named 'flash_attn'",
        "cuDNN: wrong [bf16 D=128 causal S=1024]",
    ]


def test_default_path_names_what_device_and_date():
    assert str(default_path(report())) == "benchmarks/results/forward-h200-2026-01-02.json"


def test_picture_from_json(tmp_path):
    measured = report()
    measured["points"] += [point | {"dtype": "fp16", "length": 4096} for point in measured["points"]]
    measured["points"].append(measured["points"][0] | {"head_dim": 64})  # a column with one mask only
    paths = plot.draw(json.loads(json.dumps(measured)), tmp_path / "a.png")
    assert [path.name for path in paths] == ["a.png", "a-fp16.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in paths)


def test_ceilings_follow_the_measured_clock_and_exp2_shows_where_it_binds():
    def found(head_dim, clock=1500.0, backward=False):
        facts = against({"strobe": 1.0}, head_dim=head_dim, head_dim_v=head_dim, backward=backward)["points"][0]
        return plot.ceilings([facts | {"telemetry": {"sm_clock_mhz": clock} if clock else {}}], report())

    tensor = 4096 * 132 * 1500e6 / 1e12
    assert found(64) == {"cuBLAS": ([4096], [795.0]), "MMA = exp2": ([4096], [pytest.approx(tensor)])}
    assert set(found(128)) == {"cuBLAS", "MMA"}
    assert found(48)["exp2"] == ([4096], [pytest.approx(tensor * 0.75)])
    assert "exp2" not in found(48, backward=True), "a backward has 2.5 times as many FLOPs for each exp2"
    assert set(found(64, clock=None)) == {"cuBLAS"}


def test_bench_writes_json_and_picture(tmp_path, capsys):
    path = tmp_path / "deep" / "result.json"
    assert bench.bench(FULL, CPU, "strobe bench", path) == 0
    assert json.loads(path.read_text())["stopped"] is None and path.with_suffix(".png").exists()
    assert "forward, CPU, TFLOP/s" in capsys.readouterr().out


def test_nvidia_smi_line():
    assert machine.parse_sample("1755, 690.12, 61\n") == {"sm_clock_mhz": 1755.0, "power_w": 690.12, "temperature_c": 61.0}
    whole = {"sm_clock_mhz": 1755.0, "power_w": 690.12, "temperature_c": 61.0, "memory_clock_mhz": 3201.0}
    assert machine.parse_sample("1755, 690.12, 61, 3201\n") == whole
    assert machine.parse_sample("1755, [N/A], 61") == {"sm_clock_mhz": 1755.0, "temperature_c": 61.0}


def test_watchdog_calls_once_and_only_when_late():
    hung = []
    with machine.Watchdog(hung.append) as watchdog:
        watchdog.expect("fast", 60)
        time.sleep(0.3)
        assert hung == []
        watchdog.expect("slow", 0.05)
        time.sleep(0.8)
    assert hung == ["slow"]


def test_a_lead_runs_before_a_timing_of_several_runs(monkeypatch):
    ran = []
    way = bench.Way("calls", lambda: ran.append(1), 1, [])
    contender = bench.Contender(Peer("peer", prepare_wrong), [way], way)
    for count, runs in ((1, 1), (5, 10)):
        contender.count = count
        ran.clear()
        bench.measure(contender, bench.CpuClock())
        assert len(ran) == runs


def test_commit_of_a_checkout_or_of_a_copy(monkeypatch):
    monkeypatch.delenv("STROBE_COMMIT", raising=False)
    assert machine.commit() is None or len(machine.commit().rstrip("+")) == 10
    monkeypatch.setattr(strobe, "__file__", "/usr/__init__.py")
    assert machine.commit() is None
    monkeypatch.setenv("STROBE_COMMIT", "abc")
    assert machine.commit() == "abc"
