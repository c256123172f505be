"""The generated blocks of the pages in docs, each from the newest result of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median

from strobe.device import KNOWN
from strobe.kernels.sm80 import backend
from strobe.lab.bench import parallel as measured_parallel
from strobe.lab.bench.decode_peers import Point as DecodePoint
from strobe.lab.bench.intervals import Ratio
from strobe.lab.bench.plan import Point, short
from strobe.lab.bench.report import closest, verdicts
from strobe.lab.model import context_parallel as paper
from strobe.lab.model import roofline
from strobe.lab.timeline import timeline

RESULTS = Path("benchmarks/results")
NOTHING = "Not measured on a GPU yet."
BASELINE = "SDPA flash"
"""FlashAttention-2, as PyTorch has it."""


def trained(root: Path) -> str:
    """Each run of examples/train_gpt.py on a GPU: its picture and what it says, the longest context last."""
    reports = [(report, path) for report, path in results(root, "train-gpt-*.json") if report["device"]["kind"] == "cuda"]
    reports.sort(key=lambda found: found[0]["settings"]["context"])
    return "\n\n".join(_training(report, path) for report, path in reports) or NOTHING


def _training(report: dict, path: Path) -> str:
    settings, runs = report["settings"], report["runs"]
    tail = max(1, settings["steps"] // 10)
    ends = {name: fmean(run["loss"][-tail:]) for name, run in runs.items()}
    apart = [abs(a - b) for a, b in zip(runs["strobe"]["loss"], runs["SDPA"]["loss"], strict=True)]
    shape = f"{settings['layers']} layers of {settings['width']}, {settings['batch']} x {settings['context']} bytes a step"
    return (
        f"![Loss curves of Strobe and of PyTorch's attention](../{path.with_suffix('.png')})\n\n"
        f"{_where(report, path)} {shape}, {settings['steps']} steps. The mean loss of the last {tail} steps is "
        f"{ends['strobe']:.4f} with Strobe and {ends['SDPA']:.4f} with PyTorch's attention; the two differ by "
        f"{fmean(apart):.1e} on average and by {max(apart):.1e} at most. A whole training step takes "
        f"{runs['strobe']['step_ms']:.2f} ms and {runs['SDPA']['step_ms']:.2f} ms."
    )


def training_steps(root: Path) -> str:
    """What benchmarks/training_steps.py found."""
    found = results(root, "training-steps-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    rows = [["", "", "Strobe, ms", "SDPA, ms", "times as fast"]]
    for point in report["points"]:
        ours, theirs = (point["milliseconds"][name] for name in ("strobe", "SDPA"))
        ratio = Ratio.of([1 / x for x in ours], [1 / x for x in theirs])
        rows.append([point["shape"]["name"], point["way"], f"{median(ours):.2f}", f"{median(theirs):.2f}", str(ratio)])
    return f"{_where(report, path)} Medians of {report['protocol']['rounds']} rounds.\n\n{_table(rows)}"


def deterministic(root: Path) -> str:
    """What benchmarks/determinism.py found."""
    found = results(root, "determinism-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    runs = report["protocol"]["runs"]
    lengths = sorted({at["point"]["length"] for at in report["points"]})
    rows = [["", "distinct dQ / dK / dV", "spread of dQ", "deterministic: distinct", *(f"time at {n}" for n in lengths)]]
    for name, points in _of_all_lengths(report["points"]).items():
        most = {
            way: " / ".join(str(max(at["scatter"][way][x]["distinct"] for at in points)) for x in ("dq", "dk", "dv"))
            for way in ("default", "deterministic")
        }
        spread = max(at["scatter"]["default"]["dq"]["spread"] for at in points)
        times = {at["point"]["length"]: f"{at['ms']['deterministic'] / at['ms']['default']:.2f}" for at in points}
        rows.append([name, most["default"], f"{spread:.1e}", most["deterministic"], *(times.get(n, "") for n in lengths)])
    text = (
        f"{_where(report, path)} {runs} runs each on a busy GPU: how many different results there were, and by how much an "
        "element of dQ differed, relative to the largest; the most of all lengths. Then how many times as long a "
        f"deterministic backward takes, on an idle GPU.\n\n{_table(rows)}"
    )
    return text + _beside_deterministic_peers(report["points"], lengths)


def _beside_deterministic_peers(points: list[dict], lengths: list[int]) -> str:
    """Our deterministic backward beside those of peers, if any took part."""
    peers = list(dict.fromkeys(way for at in points for way in at["ms"] if way not in ("default", "deterministic")))
    if not peers:
        return ""
    rows = [["", *(f"{peer}: distinct" for peer in peers), *(f"at {n}" for n in lengths)]]
    for name, alike in _of_all_lengths(points).items():
        cells = {at["point"]["length"]: " / ".join(_times_as_fast(at, peer) for peer in peers) for at in alike}
        rows.append([name, *(_most_distinct(alike, peer) for peer in peers), *(cells.get(n, "") for n in lengths)])
    return (
        "\n\nBeside peers that were asked for the same: how many different results these had, and how many times as fast our "
        f"deterministic backward is as that of {' / '.join(peers)}; a dash where a peer refuses.\n\n{_table(rows)}"
    )


def _most_distinct(points: list[dict], peer: str) -> str:
    """Count the different results of dQ / dK / dV: the most at one length."""
    took = [at["scatter"][peer] for at in points if peer in at["scatter"]]
    return " / ".join(str(max(scatter[x]["distinct"] for scatter in took)) for x in ("dq", "dk", "dv")) if took else "-"


def _times_as_fast(at: dict, peer: str) -> str:
    return f"{at['ms'][peer] / at['ms']['deterministic']:.2f}" if peer in at["ms"] else "-"


def _of_all_lengths(points: list[dict]) -> dict[str, list[dict]]:
    """Measured points, those together that differ in their lengths alone."""
    found: dict[str, list[dict]] = {}
    for at in points:
        point = Point.of(at["point"])
        found.setdefault(f"{point.heading}, {point.mask}", []).append(at)
    return found


def changed_scores(root: Path) -> str:
    """What benchmarks/changed_scores.py found."""
    found = results(root, "changed-scores-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    names = list(report["points"][0]["milliseconds"])
    rows = [["milliseconds", *names]]
    for point in report["points"]:
        dims = ", ".join(str(dim) for dim in dict.fromkeys(point["head_dims"]))
        rows.append([f"D {dims}: {point['feature']}", *(f"{point['milliseconds'][name]:.2f}" for name in names)])
    return f"{_where(report, path)} Causal, bf16, 4 x 4096 tokens, heads 2048 / D.\n\n{_table(rows)}"


def documents(root: Path) -> str:
    """What benchmarks/changed_scores.py found of documents: forwards, ours beside the portable ones."""
    found = results(root, "changed-scores-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    rows = [["milliseconds", "sm90", "portable"]]
    for point in report["points"]:
        if "document" in point["feature"] or point["feature"] == "plain":
            dims = ", ".join(str(dim) for dim in dict.fromkeys(point["head_dims"]))
            mask = {"plain": "causal, no documents", "four documents": "causal, four documents"}
            name = mask.get(point["feature"], f"full, {point['feature'].removesuffix(', all keys')}")
            rows.append(
                [f"D {dims}, {name}", *(f"{point['milliseconds'][f'forward, {way}']:.2f}" for way in ("sm90", "portable"))]
            )
    return f"{_where(report, path)} Forward, bf16, 4 x 4096 tokens, heads 2048 / D.\n\n{_table(rows)}"


def context_parallel(root: Path) -> str:
    """What `strobe roofline --context-parallel` finds: the table, and how far its formulas are from the simulated schedules."""
    report = json.loads((root / "docs/lab/context-parallel.json").read_text())
    setting, assumed = report["setting"], report["assumed"]
    shape = (
        f"{report['arch']}, heads {setting['heads_q']}/{setting['heads_kv']}, head dim {setting['head_dim']}, "
        f"{setting['dtype']}, {setting['mask']}, {setting['layout']}"
    )
    links = "; ".join(f"{link['name']} {link['rate'] / 1e9:g} GB/s ({link['source']})" for link in report["links"])
    return (
        f"{shape}. Tokens a GPU from which on a rank waits for at most {assumed['hidden']:.0%} of the time that it computes: "
        f"forward / forward and backward; - : the method cannot share {setting['heads_kv']} key heads so, or hides nothing. "
        f"Kernels at {assumed['kernel share']:.0%} of the peak, links at {assumed['link share']:.0%} (assumed); {links}.\n\n"
        f"{_table(paper.cells(report))}\n\n{paper.sentence(report)}."
    )


def parallel(root: Path) -> str:
    """What `strobe bench parallel` measured."""
    found = results(root, "parallel-*.json")
    if not found:
        return "Not measured on several GPUs yet."
    report, path = found[-1]
    picture = f"![The share of linear scaling, and when each rank computes](../{path.with_suffix('.png')})"
    return f"{picture}\n\n{_where(report, path)}\n\n{_table(measured_parallel.cells(report))}"


def decode(root: Path) -> str:
    """What `strobe bench decode` measured on a GPU: microseconds, and how many times as fast as the best peer that is."""
    found = [(report, path) for report, path in results(root, "decode-*.json") if report["device"]["kind"] == "cuda"]
    if not found:
        return "No result is published yet."
    report, path = found[-1]
    points = [(DecodePoint.of(facts), facts["results"]) for facts in report["points"]]
    lengths = sorted({point.length for point, _ in points})
    cells: dict[tuple[str, int], dict[int, str]] = {}
    for point, of_point in points:
        cells.setdefault((point.heading, point.batch), {})[point.length] = _step(of_point)
    rows = [["microseconds", "batch", *(short(length) for length in lengths)]]
    rows += [[heading, str(batch), *(row.get(n, "") for n in lengths)] for (heading, batch), row in cells.items()]
    fixed = [
        r["strobe deterministic"]["us"] / r["strobe"]["us"] for _, r in points if "us" in r.get("strobe deterministic", {})
    ]
    timed = ", ".join(name for name in report["contenders"] if not name.startswith("strobe"))
    text = (
        f"{_where(report, path)} A step's time and, in brackets, how many times as fast as the best of {timed} that is, with "
        f"its 95 % interval: {verdicts(report['points'])}; bold is ahead, italics behind. Caches are cold, "
        f"up to {report['launches']} launches are one CUDA graph, median of {report['rounds']} interleaved rounds. "
        f"A sum over 2 GiB reads {report['read_gb_s']:.0f} GB/s in the same process. "
        f"With `deterministic=True` a step takes {min(fixed):.2f} to {max(fixed):.2f} times as long. "
        f"Reproduce with `{report['command']}`."
    )
    picture = f"![GB/s of keys and values against their number](../{path.with_suffix('.png')})"
    stopped = f" The run is incomplete: {report['stopped']}." if report["stopped"] else ""
    return f"{picture}\n\n{text}{stopped}\n\n{_table(rows)}"


def _step(results: dict[str, dict]) -> str:
    """Our microseconds, and over the best peer's."""
    ours, compared = results.get("strobe", {}).get("us"), closest(results)
    if ours is None or compared is None:
        return "-" if ours is None else f"{ours:.1f}"
    mark = {"ahead": "**", "behind": "*"}.get(compared[1].verdict, "")
    return f"{ours:.1f} ({mark}{compared[1]}{mark})"


def redo_cost(root: Path) -> str:
    """What benchmarks/redo_cost.py found."""
    found = results(root, "redo-cost-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    shares = [name for name in report["points"][0]["ms"] if name != "safe"]
    rows = [["head dim, length", "safe", *("none noted" if name == "0 %" else name for name in shares)]]
    for point in report["points"]:
        ms = point["ms"]
        cells = [f"{ms[name]:.3f} ({ms[name] / ms['safe']:.2f})" for name in shares]
        rows.append([f"{point['head_dim']}, {point['length']}", f"{ms['safe']:.3f}", *cells])
    return f"{_where(report, path)} Median of {report['rounds']} rounds.\n\n{_table(rows)}"


def fp8_accuracy(root: Path) -> str:
    """What benchmarks/fp8.py found on a CPU: the error of rounding the inputs."""
    found = [(report, path) for report, path in results(root, "fp8-*.json") if report["device"]["kind"] == "cpu"]
    if not found:
        return NOTHING
    report, path = found[-1]
    names = {
        "normal": "normal",
        "large channels": "4 channels of k 20 times larger",
        "large rows": "each 97th row of k and v 10 times larger",
        "a large head": "one head of k and v 100 times larger",
    }
    ways = [name for name in report["accuracy"][0] if name != "inputs"]
    rows = [["inputs", *ways]]
    rows += [[names[at["inputs"]], *(f"{at[way]:.4f}" for way in ways)] for at in report["accuracy"]]
    return f"{_where(report, path)}\n\n{_table(rows)}"


def fp8_sums(root: Path) -> str:
    """What benchmarks/fp8.py found on a GPU: errors by the number of keys that are summed up."""
    found = [(report, path) for report, path in results(root, "fp8-*.json") if report.get("sums")]
    if not found:
        return NOTHING
    report, path = found[-1]
    names = [name for name in report["sums"][0] if name not in ("head_dim", "keys")]
    rows = [["head dim, keys", *(f"{name}, {kind}" for kind in ("values all 3", "normal values") for name in names)]]
    for at in report["sums"]:
        cells = [f"{at[name][kind]:.1f} %" for kind in ("constant", "normal") for name in names]
        rows.append([f"{at['head_dim']}, {short(at['keys'])}", *cells])
    return f"{_where(report, path)} No mask.\n\n{_table(rows)}"


def fp8_speed(root: Path) -> str:
    """The newest benchmark's fp8: TFLOP/s, over our own bf16 at the same point, and over the best peer's fp8."""
    found = [
        (report, path, points)
        for report, path in (*results(root, "forward-*.json"), *results(root, "fp8-forward-*.json"))
        if (points := [point for point in report["points"] if point["dtype"] == "fp8"])
    ]
    if not found:
        return NOTHING
    report, path, points = found[-1]
    names = ("mask", "length", "head_dim", "head_dim_v", "heads", "heads_kv", "batch")
    rates = {tuple(p[name] for name in names): p["results"].get("strobe", {}) for p in report["points"] if p["dtype"] == "bf16"}
    rows = [["head dim, mask, length", "TFLOP/s", "over our bf16", "over the best peer's fp8"]]
    for point in points:
        ours, compared = point["results"].get("strobe", {}).get("tflops"), closest(point["results"])
        bf16 = rates.get(tuple(point[name] for name in names), {}).get("tflops")
        cells = [ours and f"{ours:.0f}", ours and bf16 and f"{ours / bf16:.2f}", compared and str(compared[1])]
        rows.append([f"{point['head_dim']}, {point['mask']}, {point['length']}", *(cell or "-" for cell in cells)])
    return f"{_where(report, path)}\n\n{_table(rows)}"


def zoo(root: Path) -> str:
    """The newest run of `strobe bench zoo` on a GPU: its picture, what it counts, and a row for each shape and phase."""
    found = [(report, path) for report, path in results(root, "zoo-*.json") if report["device"]["kind"] == "cuda"]
    if not found:
        return NOTHING
    report, path = found[-1]
    rows = [["", "shape", "TFLOP/s", "over the best peer", "peer", "binds", "of its roof", "MHz"]]
    for facts in report["points"]:
        point, compared, ours = Point.of(facts), closest(facts["results"]), facts["results"].get("strobe", {})
        rate, clock = (f"{ours[name]:.0f}" if name in ours else "-" for name in ("tflops", "sm_clock_mhz"))
        beside = ("-", "-") if compared is None else (marked(compared[1]), compared[0])
        rows.append([str(point), point.shape, rate, *beside, *_bound(point, ours, report), clock])
    heads = [f"![Strobe's speed over the best peer's](../{path.with_suffix('.png')})", _where(report, path)]
    heads.append(f"By its 95 % interval Strobe is {verdicts(report['points'])}; bold is ahead, italics behind.")
    heads += [f"The run is incomplete: {report['stopped']}."] if report["stopped"] else []
    return f"{heads[0]}\n\n{' '.join(heads[1:])}\n\n{_table(rows)}"


def _bound(point: Point, ours: dict, report: dict) -> tuple[str, str]:
    """Which unit binds a point, and the share of its least time in what was measured; of packed sequences nobody knows."""
    placed = None if point.packed else roofline.place_measured(point, ours, roofline.gpu_of(report))
    if placed is None or placed.share is None:
        return "-", "-"
    return roofline.words(placed.binds), f"{placed.share:.0%}"


def marked(ratio: Ratio) -> str:
    """A ratio, bold where Strobe is ahead, in italics where it is behind."""
    mark = {"ahead": "**", "behind": "*"}.get(ratio.verdict, "")
    return f"{mark}{ratio}{mark}"


def cpu_backends(root: Path) -> str:
    """What benchmarks/cpu.py found of the backends."""
    return _on_cpu(root, lambda report: [
        ["milliseconds", "SDPA", "torch_cpu", "tiled"],
        *(
            [f"{at['dtype']}, {at['length']}, {at['mask']}, {'forward + backward' if at['backward'] else 'forward'}",
             *(f"{at['ms'][name]:.2f}" for name in ("sdpa", "torch_cpu", "tiled"))]
            for at in report["backends"]
        ),
    ])  # fmt: skip


def cpu_tiles(root: Path) -> str:
    """What benchmarks/cpu.py found of the tiles of `tiled`, with their sum."""
    return _on_cpu(root, lambda report: [
        ["milliseconds", *report["tiles"][0]["ms"]],
        *([f"{at['length']}, {at['mask']}", *(f"{ms:.2f}" for ms in at["ms"].values())] for at in report["tiles"]),
        ["sum", *(f"{sum(at['ms'][tile] for at in report['tiles']):.2f}" for tile in report["tiles"][0]["ms"])],
    ])  # fmt: skip


def _on_cpu(root: Path, rows: Callable[[dict], list[list[str]]]) -> str:
    found = results(root, "cpu.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    return f"{_where(report, path)} {report['device']['threads']} thread.\n\n{_table(rows(report))}"


def timelines(root: Path) -> str:
    """The newest measured timeline: its picture, and cycles of a block of keys."""
    found = _timeline(root)
    if found is None:
        return NOTHING
    report, path = found
    picture = f"![What each role does in four blocks of keys](../{path.with_suffix('.png')})"
    of = f"S = {report['points'][0]['length']}: medians over CTAs, with the tenth and the ninetieth percentile."
    return f"{picture}\n\n{_where(report, path)} {of}\n\n```\n{timeline.table(report)}\n```"


def hidden(root: Path) -> str:
    """The newest measured timeline: how much of each kind of work is hidden."""
    found = _timeline(root)
    return NOTHING if found is None else f"```\n{timeline.hidden_table(found[0])}\n```"


def _timeline(root: Path) -> tuple[dict, Path] | None:
    found = [(report, path) for report, path in results(root, "timeline-*.json") if report["what"] == "timeline"]
    return found[-1] if found else None


def model_error(root: Path) -> str:
    """What benchmarks/model_error.py found: cycles of a tile by kernel, and what its phases are off by."""
    found = results(root, "model-error-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    rows = [["kernel", "head dim, mask", "measured", "simulated", "ratio", "phases: measured to simulated"]]
    for at in report["points"]:
        cycles = at["cycles"]
        phases = (f"{name} {c['measured']:.0f} to {c['simulated']:.0f}" for name, c in cycles.items() if name != "total")
        total = cycles["total"]
        rows.append([
            at["kernel"], f"{at['head_dim']}, {at['mask']}", f"{total['measured']:.0f}", f"{total['simulated']:.0f}",
            f"{total['ratio']:.2f}", ", ".join(phases) or "-",
        ])  # fmt: skip
    errors = [at["cycles"]["total"]["ratio"] - 1 for at in report["points"]]
    of = report["measured"]
    text = f"Measured {of['date'][:10]}, commit {of['commit'][:10]} ([JSON](../{RESULTS / of['file']})), "
    text += f"simulated {report['date'][:10]} ([JSON](../{path})). In all the simulator is off by {min(errors):+.0%} "
    text += f"to {max(errors):+.0%}."
    return f"{text}\n\n{_table(rows)}"


def ampere(root: Path) -> str:
    """What benchmarks/sm80.py found: each point's speed, and over the peer's, by the newest run that has the point with today's
    config."""
    taken: dict[Point, tuple[dict, Path, dict]] = {}
    for report, path in results(root, "sm80-*.json"):
        taken |= {point: (report, path, at) for point, at in _points_of(report) if _of_sm80(point, at) is not None}
    if not taken:
        return NOTHING
    parts = ["TFLOP/s (a causal mask counts half) and, in brackets, over the peer's."]
    for path, report in {path: report for report, path, _ in taken.values()}.items():
        lengths = sorted({point.length for point, found in taken.items() if found[1] == path})
        said = [f"{', '.join(short(length) for length in lengths)}: {_where(report, path)}"]
        said += [f"{words[0].upper()}{words[1:]}." for words in (report.get("stopped"), report.get("remark")) if words]
        parts.append(" ".join(said))
    for phase, backward in (("Forward", False), ("Backward", True)):
        of_phase = [(point, taken[point][2]) for point in sorted(taken, key=_by_shape) if point.backward == backward]
        if of_phase:
            parts.append(f"{phase}:\n\n{_table(_ampere_rows(of_phase))}")
    return "\n\n".join(parts)


def _by_shape(point: Point) -> tuple:
    """The order of rows: by type and head dim, without a mask first."""
    return point.dtype, point.head_dim, point.mask != "full"


def _points_of(report: dict) -> list[tuple[Point, dict]]:
    return [(Point.of(entry), entry) for entry in report["points"]]


def _ampere_rows(points: list[tuple[Point, dict]]) -> list[list[str]]:
    """A row for each shape and mask, a column for each length."""
    lengths = sorted({point.length for point, _ in points})
    cells: dict[tuple[str, str, str, str], dict[int, str]] = {}
    for point, entry in points:
        ours = _of_sm80(point, entry)
        if ours is not None:
            peer = entry["results"].get(entry["peer"])
            over = f" ({Ratio.of(ours['rounds'], peer['rounds'])})" if peer else ""
            row = cells.setdefault((point.dtype, point.heading, point.mask, entry["peer"]), {})
            row[point.length] = f"{ours['tflops']:.0f}{over}"
    rows = [["", "mask", "peer", *(short(length) for length in lengths)]]
    for (dtype, heading, mask, peer), row in cells.items():
        rows.append([f"{dtype} {heading}", mask, peer, *(row.get(length, "") for length in lengths)])
    return rows


def _of_sm80(point: Point, entry: dict) -> dict | None:
    """The result of the config that dispatch takes on an H100 today; None if it was not timed."""
    return entry["results"].get(f"sm80 {backend.config(point.problem(), KNOWN['H100']).brief}")


def ampere_portable(root: Path) -> str:
    """What benchmarks/sm80.py --portable found: the portable kernels, as they are and as sm_80 code, beside the others."""
    return _beside_portable(root, "portable-as-sm80-*.json")


def ampere_float32(root: Path) -> str:
    """The same of float32, beside PyTorch's efficient backend and its formula."""
    return _beside_portable(root, "fp32-sm80-*.json")


def _beside_portable(root: Path, pattern: str) -> str:
    found = results(root, pattern)
    if not found:
        return NOTHING
    report, path = found[-1]
    points = _points_of(report)
    others = [name for name in dict.fromkeys(n for _, at in points for n in at["results"]) if not name.startswith("sm80")]
    rows = [["TFLOP/s (largest relative error)", "sm80", *others]]
    for point, entry in points:
        named = [_of_sm80(point, entry), *(entry["results"].get(name) for name in others)]
        cells = ["" if one is None else f"{one['tflops']:.3g} ({one['error']:.0e})" for one in named]
        rows.append([f"{point}, {'backward' if point.backward else 'forward'}", *cells])
    stopped = f" The run is incomplete: {report['stopped']}." if report.get("stopped") else ""
    return f"{_where(report, path)}{stopped}\n\n{_table(rows)}"


def single(root: Path) -> str:
    """The newest run of `strobe bench --protocol single` on a GPU: each contender's TFLOP/s over FlashAttention-2's, and how
    much its calls differ."""
    found = [(report, path) for report, path in results(root, "single-*.json") if report["device"]["kind"] == "cuda"]
    if not found:
        return NOTHING
    report, path = found[-1]
    points = sorted(_points_of(report), key=lambda one: (one[0].backward, one[0].length))
    names = sorted({name for _, entry in points for name in entry["results"]} - {BASELINE})
    rows = [["", "FA2", *names]]
    for point, entry in points:
        base, cells = entry["results"].get(BASELINE), []
        for name in (BASELINE, *names):
            one = entry["results"].get(name, {})
            over = f" ({Ratio.of(one['rounds'], base['rounds'])})" if name != BASELINE and base and "rounds" in one else ""
            us = one.get("calls_us")
            cells.append(f"{one['tflops']:.0f}{over}, {us['median']:.0f} us, {us['p10']:.0f} to {us['p90']:.0f}" if us else "")
        rows.append([str(point), *cells])
    clocks = [at["telemetry"] for at in report["points"] if at.get("telemetry")]
    sms, memory = ([at[name] for at in clocks if name in at] for name in ("sm_clock_mhz", "memory_clock_mhz"))
    said = f" Clocks: SMs {min(sms):.0f} to {max(sms):.0f} MHz, memory {max(memory):.0f} MHz." if sms and memory else ""
    stopped = f" The run is incomplete: {report['stopped']}." if report["stopped"] else ""
    protocol = report["protocol"]
    return (
        f"{_where(report, path)} {protocol['warm-ups']} calls to warm up, {protocol['calls']} timed, {protocol['rounds']} "
        f"times at least; FA2 is PyTorch's flash backend.{said}{stopped} TFLOP/s, in brackets over FA2's; the median call, and "
        f"the tenth and ninetieth percentile of calls.\n\n{_table(rows)}"
    )


def shared(root: Path) -> str:
    """What benchmarks/shared_gpu.py found: launches after which numbers in shared memory had changed, by what became of a
    barrier there and what kept the GPU busy."""
    found = results(root, "shared-gpu-*.json")
    if not found:
        return NOTHING
    report, path = found[-1]
    rows = [["the barrier is", "other processes", "launches", "differ", "what changed: where, the bytes, how often"]]
    for at in report["settings"]:
        busy = "none" if at["neighbours"] == "nothing" else f"{report['processes']}, with {at['neighbours']}"
        words = "; ".join(f"byte {word['byte']}: `{word['bytes']}`, {word['times']}" for word in at["words"]) or "-"
        rows.append([at["barrier"], busy, str(at["runs"]), str(at["differ"]), words])
    return f"{_where(report, path)} Driver {report['device']['driver']}.\n\n{_table(rows)}"


def results(root: Path, pattern: str) -> list[tuple[dict, Path]]:
    """The reports of a pattern by their date, and their paths from the root."""
    paths = (root / RESULTS).glob(pattern)
    reports = ((json.loads(path.read_text()), path.relative_to(root)) for path in paths)
    return sorted(reports, key=lambda found: found[0]["date"])


def _where(report: dict, path: Path) -> str:
    device = report["device"]
    commit = f", commit {device['commit'][:10]}" if device.get("commit") else ""
    known = (("torch", "torch"), ("Triton", "triton")) if device["kind"] == "cuda" else (("torch", "torch"),)
    versions = [f"{name} {device['packages'][package]}" for name, package in known if device["packages"].get(package)]
    return f"{', '.join([device['name'], report['date'][:10] + commit, *versions])} ([JSON](../{path}))."


def _table(rows: Iterable[list[str]]) -> str:
    heading, *others = rows
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
