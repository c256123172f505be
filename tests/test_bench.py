"""The benchmark: its order, its gate, its report, and a whole run on the CPU."""

import json
import time
import warnings
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import strobe
from strobe.lab import bench, gate, machine, plot
from strobe.lab.peers import Peer, peers_for
from strobe.lab.plan import CPU_PLAN, Plan, input_sets
from strobe.lab.report import best_peer, default_path, ratio, refusals, show

CPU = torch.device("cpu")
TINY = replace(CPU_PLAN, head_dims=(32,), lengths=(64,), tokens=128, heads=4, heads_kv=2, rounds=2, seconds=0.001)


def report() -> dict:
    """A report of two points: the peer has no number at the second, and another one was never installed."""
    point = {"batch": 16, "length": 1024, "heads": 16, "heads_kv": 16, "head_dim": 128, "dtype": "bf16", "backward": False}
    missing = {"FA4": {"refused": "ModuleNotFoundError: No module named 'flash_attn'"}}
    full = {"strobe": bench.summary(6e14, [1.0, 1.2, 0.8]), "cuDNN": bench.summary(5e14, [1.0])} | missing
    causal = {"strobe": bench.summary(3e14, [1.0]), "cuDNN": {"refused": "wrong"}} | missing
    packages = {"torch": "2.11.0", "triton": "3.6.0"}
    device = {"kind": "cuda", "name": "NVIDIA H200", "driver": "570", "cudnn": 91900, "commit": "abc", "packages": packages}
    return {
        "what": "forward",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "strobe bench",
        "stopped": None,
        "device": device,
        "protocol": {"rounds": 3},
        "contenders": ["strobe", "cuDNN", "FA4"],
        "host_us": {"strobe": {"us": 30.0}, "FA4": {"refused": "missing"}},
        "ceiling": {"before": 800.0, "after": 790.0, "matmul": "8192 x 8192 x 8192, bf16"},
        "points": [point | {"causal": False, "results": full}, point | {"causal": True, "results": causal}],
    }


# ---- order and statistics


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_every_contender_follows_every_other_equally_often(n):
    orders = bench.balanced_order(n, n if n % 2 == 0 else 2 * n)
    assert all(sorted(order) == list(range(n)) for order in orders)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == n * (n - 1) and len(set(follows.values())) == 1


def test_order_of_one_and_of_none():
    assert bench.balanced_order(1, 2) == [[0], [0]]
    assert bench.balanced_order(0, 1) == [[]]


def test_summary_keeps_median_extremes_and_order():
    result = bench.summary(2e12, [2.0, 1.0, 4.0])
    assert result == {"tflops": 1.0, "min": 0.5, "max": 2.0, "rounds": [1.0, 2.0, 0.5]}


def test_plan_makes_one_point_of_each_combination():
    points = Plan(head_dims=(64, 128), lengths=(1024, 32768), dtypes=("bf16", "fp16"), masks=("causal",)).points()
    assert len(points) == len(set(points)) == 8
    assert {(p.head_dim, p.heads, p.heads_kv) for p in points} == {(64, 32, 32), (128, 16, 16)}
    assert {(p.length, p.batch) for p in points} == {(1024, 16), (32768, 1)}
    assert all(p.causal for p in points)


# ---- the gate


@pytest.fixture(params=[False, True], ids=["full", "causal"])
def causal(request):
    return request.param


def gqa_inputs(causal):
    point = replace(TINY, lengths=(96,), masks=("causal" if causal else "full",)).points()[0]
    return input_sets(point, CPU)[0]


def test_gate_knows_the_exact_output(causal):
    inputs = gqa_inputs(causal)
    mask = strobe.Causal() if causal else strobe.Full()
    out = strobe.attention(inputs.q.double(), inputs.k.double(), inputs.v.double(), mask=mask)
    assert gate.out_error(out, inputs, causal) < 1e-12
    out[-1, 50, -1] *= 1.001
    assert 0.5e-3 < gate.out_error(out, inputs, causal) < 2e-3
    out[-1, 50, -1] = torch.nan
    assert gate.out_error(out, inputs, causal) == float("inf")


def test_gate_knows_the_exact_gradients(causal):
    inputs = gqa_inputs(causal)
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = strobe.attention(q, k, v, mask=strobe.Causal() if causal else strobe.Full())
    gradients = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    assert gate.gradient_error(gradients, inputs, causal) < 1e-12
    chunked = gate.exact_gradients(inputs, causal, 0, 1, chunk=40)
    whole = gate.exact_gradients(inputs, causal, 0, 1)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(chunked, whole, strict=True))
    for i in range(3):
        spoiled = tuple(g * 1.01 if i == j else g for j, g in enumerate(gradients))
        assert gate.gradient_error(spoiled, inputs, causal) == pytest.approx(0.01)


# ---- a whole run on the CPU


def test_run_measures_everyone_on_the_cpu():
    points = bench.Run(replace(TINY, backends=("tiled",)), CPU, "strobe bench").run()["points"]
    assert [p["causal"] for p in points] == [False, True]
    for point in points:
        assert set(point["results"]) == {"strobe", "strobe tiled", "SDPA flash", "SDPA math"}
        for result in point["results"].values():
            assert result["min"] <= result["tflops"] <= result["max"] and len(result["rounds"]) == 2
            assert result["error"] < 1e-5 and result["timed"] == "calls"
        assert point["results"]["strobe"]["backend"] in ("torch_cpu", "portable")  # portable: in Triton's interpreter
        assert point["flops"] == 4 * 2 * 4 * 64 * 64 * 32 // (2 if point["causal"] else 1)


def test_run_measures_the_backward():
    result = bench.Run(replace(TINY, backward=True, masks=("causal",)), CPU, "strobe bench").run()
    assert result["what"] == "backward" and result["stopped"] is None
    assert all(r["error"] < 1e-5 and r["tflops"] > 0 for r in result["points"][0]["results"].values())


def test_report_is_json_and_says_what_it_was_made_with():
    result = bench.Run(replace(TINY, peers=(), masks=("full",)), CPU, "strobe bench --peers x").run()
    again = json.loads(json.dumps(result))
    assert again["schema"] == 1 and again["command"] == "strobe bench --peers x" and again["contenders"] == ["strobe"]
    assert again["device"]["packages"]["torch"] == torch.__version__ and again["device"]["strobe"] == strobe.__version__
    assert set(again["ceiling"]) == {"before", "after", "matmul"}


def prepare_wrong(q, k, v, causal):
    return lambda: torch.zeros_like(q)


def prepare_missing(q, k, v, causal):
    import no_such_package  # noqa: F401


def prepare_flaky(q, k, v, causal):
    calls = []

    def call():
        calls.append(1)
        if len(calls) == 6:  # two to enter, two to warm up, one in the first round: this is the second round
            raise RuntimeError("out of patience\nand more lines")
        return strobe.attention(q, k, v)

    return call


def test_peers_that_fail_are_reported_and_stop_nobody(monkeypatch):
    peers = {f.__name__: Peer(f.__name__, f) for f in (prepare_wrong, prepare_missing, prepare_flaky)}
    monkeypatch.setattr(bench, "peers_for", lambda device: peers)
    result = bench.Run(replace(TINY, masks=("full",), seconds=1e-9, rounds=3), CPU, "strobe bench").run()
    results = result["points"][0]["results"]
    assert "wrong: relative error 1.0e+00 against float64, allowed 1e-04" in results["prepare_wrong"]["refused"]
    assert "No module named 'no_such_package'" in results["prepare_missing"]["refused"]
    assert results["prepare_flaky"]["refused"].startswith("RuntimeError: out of patience (test_bench.py:")
    assert results["strobe"]["tflops"] > 0 and result["stopped"] is None


class GraphClock(bench.CudaClock):
    """A CUDA clock without CUDA, whose graphs return what it is told to."""

    def __init__(self, result):
        self.result = result

    def synchronize(self):
        pass

    def captured(self, calls):
        if isinstance(self.result, Exception):
            raise self.result
        held = torch.full_like(self.result, torch.nan)  # a graph's results are nothing before its first replay
        return lambda: held.copy_(self.result), [held]


def test_what_a_graph_computes_passes_the_gate():
    point = TINY.points()[0]
    sets = input_sets(point, CPU)
    right = strobe.attention(sets[0].q, sets[0].k, sets[0].v)
    assert bench.enter(bench.strobe_peer(), point, sets, GraphClock(right)).timed == "CUDA graph"
    with pytest.raises(ValueError, match="wrong: relative error"):
        bench.enter(bench.strobe_peer(), point, sets, GraphClock(right * 1.01))


def test_without_a_graph_calls_are_timed_and_it_says_so():
    point = TINY.points()[0]
    contender = bench.enter(bench.strobe_peer(), point, input_sets(point, CPU), GraphClock(RuntimeError("not capturable")))
    assert contender.timed == "calls" and contender.note.startswith("no CUDA graph: RuntimeError: not capturable")


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_run_on_a_gpu(backward):
    plan = Plan(head_dims=(64,), lengths=(256,), tokens=512, rounds=2, seconds=0.005, backward=backward)
    result = bench.Run(plan, torch.device("cuda"), "strobe bench").run()
    assert result["stopped"] is None and result["host_us"]["strobe"]["us"] > 0
    for point in result["points"]:
        assert point["sets"] > 1, "inputs that fit into L2 must rotate"
        assert point["results"]["strobe"]["tflops"] > 0 and point["results"]["SDPA flash"]["tflops"] > 0
        assert point["results"]["strobe"]["timed"] == "CUDA graph"


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
    assert {"cuDNN", "FA4", "FA2", "SDPA flash", "SDPA efficient"} <= set(peers_for(torch.device("cuda")))


# ---- report, picture, machine


def test_ratio_is_to_the_best_peer_and_not_to_strobe_itself():
    results = {"strobe": {"tflops": 6.0}, "strobe tiled": {"tflops": 9.0}, "a": {"tflops": 3.0}, "b": {"tflops": 4.0}}
    assert best_peer(results) == 4.0 and ratio(results) == 1.5
    assert ratio({"strobe": {"tflops": 6.0}, "a": {"refused": "no"}}) is None


def test_terminal_shows_numbers_and_every_refusal(capsys):
    show(report())
    text = capsys.readouterr().out
    assert "600" in text and "1.20" in text and "800 before, 790 after" in text
    assert "FA4: ModuleNotFoundError: No module named 'flash_attn'" in text
    assert "cuDNN: wrong [bf16 D=128 causal S=1024]" in text
    assert "us: strobe 30" in text


def test_refusals_name_their_points_only_if_not_everywhere():
    assert refusals(report()) == [
        "FA4: ModuleNotFoundError: No module named 'flash_attn'",
        "cuDNN: wrong [bf16 D=128 causal S=1024]",
    ]


def test_default_path_names_what_device_and_date():
    assert str(default_path(report())) == "benchmarks/results/forward-h200-2026-01-02.json"


def test_picture_from_json(tmp_path):
    path = plot.draw(json.loads(json.dumps(report())), tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_bench_writes_json_and_picture(tmp_path, capsys):
    path = tmp_path / "deep" / "result.json"
    assert bench.bench(replace(TINY, masks=("full",)), CPU, "strobe bench", path) == 0
    assert json.loads(path.read_text())["stopped"] is None and path.with_suffix(".png").exists()
    assert "forward, CPU, TFLOP/s" in capsys.readouterr().out


def test_nvidia_smi_line():
    assert machine.parse_sample("1755, 690.12, 61\n") == {"sm_clock_mhz": 1755.0, "power_w": 690.12, "temperature_c": 61.0}
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


def test_commit_outside_a_checkout(monkeypatch):
    assert machine.commit() is None or len(machine.commit().rstrip("+")) == 10
    monkeypatch.setattr(strobe, "__file__", "/usr/__init__.py")
    monkeypatch.setenv("STROBE_COMMIT", "abc")
    assert machine.commit() == "abc"
