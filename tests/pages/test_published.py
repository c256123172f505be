"""Published results are named when they are older than the kernels that they speak of."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from strobe.lab.bench import report
from strobe.lab.pages import sources

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

SM90 = ("sm90 forward", "sm90 backward")
SPEAKS_OF: dict[str, tuple[str, ...]] = {
    "blackwell": ("sm100 forward",),
    "changed-scores": SM90,
    "cycles": SM90,
    "decode": ("decode",),
    "decode-cpu": (),
    "steps": ("decode",),
    "determinism": ("sm90 backward",),
    "energy": ("sm90 forward",),
    "first-call": (),
    "redo-cost": ("sm90 forward",),
    "timeline": ("sm90 forward",),
    "train-gpt": SM90,
    "training-steps": SM90,
    "banks": (),
    "bank-counters": (),
    "cpu": (),
    "fp8-cpu": (),
    "fp8-forward": ("sm90 fp8",),
    "fp8-sums": ("sm90 fp8",),
    "fp32-sm80": ("sm80 forward", "sm80 backward"),
    "generate": (),
    "host": (),
    "ladder": ("sm90 forward",),
    "latent": ("decode",),
    "mutants": (),
    "one-request": (),
    "parallel": SM90,
    "prefill": ("sm90 forward",),
    "portable-as-sm80": ("portable", "sm80 forward", "sm80 backward"),
    "heads-decode": ("decode",),
    "e4m3-decode": ("decode",),
    "ragged-decode": ("decode",),
    "random-decode": ("decode",),
    "cut-lines-decode": ("decode",),
    "behind": ("decode",),
    "mixed": ("decode", "sm90 forward"),
    "new-shapes": (),
    "e4m3-wide-decode": ("decode",),
    "lengths-decode": ("decode",),
    "narrow-decode": ("decode",),
    "wide-decode": ("decode",),
    "windows-decode": ("decode",),
    "rungs-profile": (),
    "same-code": (),
    "short-decode": (),
    "sm80": ("sm80 forward", "sm80 backward"),
    "shared-gpu": (),
    "study": (),
    "unit-costs": (),
}
"""How a file's name begins -> the kernels whose speed it tells; none, if it tells of something else."""

HISTORY = "shows how fast, or how, an earlier version was: pages that quote it say which"
OLDER_KERNEL = "measured before launches were prepared and documents left out blocks; its numbers are due again"
REDO_CHANGED = "the portable kernel changed, which redoes blocks: none of normal inputs has to be"
BEFORE_PLACES = "measured before the portable kernels knew the places of shards, which ordinary calls do not have"
OTHER_HEAD_DIMS = "measured before head dim 160 had kernels of its own; of what it measures Triton 3.6 makes the same code"
SPILLING_REDO = "measured before the redo looked for notes without spilling; it shows how fast calls were then and is due again"
ELSEWHERE = "what changed since is elsewhere: a name from Gluon for decode, and an order of dQ in Hopper's backward"
OF_THE_BACKWARD = "what changed since is of the backward in 16 bits"
DEFAULT_SINCE = "since then what it measured runs by default, by the same kernels"
AN_ORDER_SINCE = "since then an order for dQ is the default where that is faster"
IN_CLUSTERS = "what changed since is that a launch may be one of clusters, as decode's for one request is"
FEW_KEYS = "one kernel for few keys came since, which no point asks for"
OTHER_LENGTHS = "what changed since is how nearly equal requests are cut: its own are cut as before"
OVER_PAGES = "what changed since is how keys of small pages are copied, which no point has"
WIDER_WRITES = "since then wgmma's results are written in wider pieces, which was timed on an H200 alone"
COUNTED = "; and Hopper's forward counts its tiles without a fence since: level, or a few percent faster"
ABREAST = "key heads of several requests are read together since, and wgmma's results written in wider pieces: level, or faster"
ACCEPTED: dict[str, str] = {
    "blackwell-simulated.json": BEFORE_PLACES,
    "changed-scores-h200-2026-11-22.json": OLDER_KERNEL,
    "cycles-backward-h200-2026-11-24.json": REDO_CHANGED,
    "cycles-forward-h200-2026-11-24.json": REDO_CHANGED,
    "cycles-packed-backward-h100-2026-11-24.json": OTHER_HEAD_DIMS,
    "cycles-packed-forward-h100-2026-11-24.json": SPILLING_REDO,
    "cycles-tile-h100-2026-11-24.json": OTHER_HEAD_DIMS,
    "determinism-h100-2026-11-26.json": AN_ORDER_SINCE,
    "latent-h200-2026-11-26.json": OTHER_LENGTHS,
    "energy-peers-h100-2026-11-26.json": AN_ORDER_SINCE,
    "energy-peers-h200-2026-11-23.json": OLDER_KERNEL,
    "forward-h200-2026-11-21.json": HISTORY,
    "forward-h200-2026-11-22.json": OLDER_KERNEL,
    "forward-h200-2026-11-23.json": REDO_CHANGED + COUNTED,
    "gqa-backward-h200-2026-11-23.json": OLDER_KERNEL,
    "h100-forward-2026-11-24.json": SPILLING_REDO,
    "inputs-model-h200-2026-11-23.json": REDO_CHANGED + COUNTED,
    "inputs-worst-h200-2026-11-23.json": "the portable kernel changed, which redoes nearly all of its blocks; due again",
    "ladder-h200-2026-11-24.json": BEFORE_PLACES + COUNTED,
    "model-error-h100.json": OTHER_HEAD_DIMS,
    "parallel-h100-2026-11-25.json": "the redo takes masks of keys alone since, which no point has" + COUNTED,
    "portable-as-sm80-h100-2026-11-25.json": DEFAULT_SINCE,
    "redo-cost-h200-2026-11-21.json": "has no commit; its numbers are due again",
    "sm80-h100-2026-11-25.json": "float32 came since, and a mistake of the backward's went: due again",
    "backward-h200-2026-11-26.json": FEW_KEYS,
    "split-backward-h200-2026-11-26.json": FEW_KEYS,
    "sm80-h200-2026-11-26.json": "what changed since are heads that come together in Hopper's ordered backward",
    "training-steps-h200-2026-11-26.json": FEW_KEYS + COUNTED,
    "energy-h100-2026-11-26.json": "its points' kernels are the same code: head dim 256 and orders of dQ changed since"
    + COUNTED,
    "fp32-sm80-h100-2026-11-25.json": DEFAULT_SINCE,
    "determinism-h200-2026-11-26.json": AN_ORDER_SINCE,
    "fp8-forward-h200-2026-11-26.json": IN_CLUSTERS,
    "zoo-peers-h100-2026-11-26.json": OVER_PAGES + COUNTED,
    "zoo-peers-h200-2026-11-26.json": AN_ORDER_SINCE + COUNTED,
    "fp8-sums-h100-2026-11-25.json": "what it measures are sums without a mask, whose order is the same",
    "single-h100-2026-11-25.json": ELSEWHERE,
    "decode-h100-2026-11-27.json": WIDER_WRITES,
    "e4m3-decode-h100-2026-11-27.json": WIDER_WRITES,
    "e4m3-decode-h200-2026-11-27.json": ABREAST,
    "heads-decode-h100-2026-11-27.json": WIDER_WRITES,
    "ragged-decode-h100-2026-11-27.json": WIDER_WRITES,
    "e4m3-wide-decode-h200-2026-11-28.json": ABREAST,
    "lengths-decode-h200-2026-11-28.json": ABREAST,
    "narrow-decode-h200-2026-11-28.json": ABREAST,
    "windows-decode-h200-2026-11-28.json": ABREAST,
    "wide-decode-h200-2026-11-28.json": ABREAST,
    "wide-decode-shared-h200-2026-11-28.json": ABREAST,
    "timeline-h200-2026-11-21.json": HISTORY,
    "timeline-h200-2026-11-22.json": OLDER_KERNEL,
    "train-gpt-4096-h200-2026-11-22.json": OLDER_KERNEL,
    "train-gpt-h200-2026-11-22.json": OLDER_KERNEL,
}
"""Published results that are older than a kernel of theirs, and why they may stay."""


def kernels_of(path: Path, result: dict) -> Sequence[str]:
    """By the points of a benchmark, else by the file's name."""
    if "schema" in result and result["what"] != "decode":
        return report.kernels_of(result)
    if path.stem.startswith("model-error"):
        return sorted({f"sm90 {point['kernel']}" for point in result["points"]})
    found = max((name for name in SPEAKS_OF if path.stem.startswith(name)), key=len, default=None)
    assert found is not None, f"SPEAKS_OF must say which kernels {path.name} tells the speed of, () if of none"
    return SPEAKS_OF[found]


@functools.cache
def at(commit: str) -> sources.Sources | None:
    return sources.sources_at(commit.rstrip("+"))


def stale(path: Path, proofs: Sequence[dict] | None = None) -> list[str] | None:
    """The files of its kernels that changed since; None if neither the result nor the repository's history can tell. proofs of
    `benchmarks/same_code.py`: None for those that are published."""
    result = json.loads(path.read_text())
    kernels, device = kernels_of(path, result), result.get("device")
    if not kernels:
        return []
    commit = device.get("commit") if isinstance(device, dict) else result.get("commit")
    measured = result.get("kernels") or (at(commit) if commit else None)
    return (
        None if measured is None else sorted({file for kernel in kernels for file in sources.changed(measured, kernel, proofs)})
    )


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_is_as_new_as_its_kernels_or_listed_with_a_reason(path):
    changed, listed = stale(path), path.name in ACCEPTED
    if changed is None:
        assert listed, f"{path.name} has neither hashes of its kernels nor a commit to look them up in"
    elif changed:
        assert listed, f"{path.name} is older than {', '.join(changed)}: measure it again, or say in ACCEPTED why it may stay"
    else:
        assert not listed, f"{path.name} is as new as its kernels: take it off ACCEPTED"


KERNEL, EDITED = "sm90 forward", "kernels/sm90/forward.py"


def version(digest: str) -> sources.Sources:
    """Today's sources of the kernel, one of which has another hash."""
    now = sources.sources()
    return {file: now[file] for file in sources.files_of(KERNEL)} | {EDITED: digest}


TODAY = version(sources.sources()[EDITED])


def proof(old: sources.Sources, new: sources.Sources, compared: int = 3, differ: Sequence[str] = ()) -> dict:
    return {"old": "a", "new": "b", "kernels": {KERNEL: {"compared": compared, "differ": differ, "old": old, "new": new}}}


@pytest.mark.parametrize(
    ("proofs", "fresh"),
    [
        ([], False),
        ([proof(version("old"), TODAY)], True),
        ([proof(version("between"), TODAY), proof(version("old"), version("between"))], True),
        ([proof(version("old"), version("between"))], False),
        ([proof(version("older"), TODAY)], False),
        ([proof(version("old"), TODAY, differ=["128, full"])], False),
        ([proof(version("old"), TODAY, compared=0)], False),
        ([proof({}, TODAY)], False),
        ([proof(TODAY, version("old"))], False),
        ([{"kernels": {"portable": proof(version("old"), TODAY)["kernels"][KERNEL]}}], False),
    ],
    ids=["none", "one", "two", "not to today", "of others", "differs", "empty", "of nothing", "backwards", "of another kernel"],
)
def test_a_result_is_as_new_as_what_is_proven_to_be_the_same_code(tmp_path, proofs, fresh):
    path = tmp_path / "redo-cost-made-up.json"
    path.write_text(json.dumps({"device": {"commit": "0000000"}, "kernels": version("old") | {"kernels/more.py": "0"}}))
    assert stale(path, proofs) == ([] if fresh else [EDITED])


def test_listed_results_are_there_and_have_a_reason():
    assert all((RESULTS / name).exists() and reason for name, reason in ACCEPTED.items())
