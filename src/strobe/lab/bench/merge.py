"""`strobe bench merge`: makes one report of a long run that was made in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from strobe.lab.bench import decode, decode_peers
from strobe.lab.bench.plan import Point
from strobe.lab.bench.report import by_shape, load


def merge(paths: Sequence[Path], out: Path) -> dict:
    """Writes the reports of a plan's parts as one report with all their points, and returns it. The command in it is the one
    that measures all parts at once.

    ValueError unless all are of the same GPU, commit, kernels, versions, phase, protocol and contenders, and no point was
    measured twice. If parts of the plan are missing, "stopped" says so.
    """
    reports = [_read(path) for path in paths]
    first = reports[0]
    for path, report in zip(paths[1:], reports[1:], strict=True):
        for what, mine, other in zip(_MUST_AGREE, _facts(first), _facts(report), strict=True):
            if mine != other:
                raise ValueError(f"merge needs the same {what} in all reports, got {mine} in {paths[0]} and {other} in {path}")
    merged = first | {
        "date": min(report["date"] for report in reports),
        "command": re.sub(r" --part[ =]\S+", "", first["command"]),
        "stopped": _missing(reports),
        "part": [1, 1],
        "parts": [{name: report[name] for name in _OF_A_PART if name in report} for report in reports],
    }
    if first["what"] == "decode":
        merged["points"] = decode_peers.in_order(_once(reports, decode_peers.Point.of))
    else:
        merged["points"] = by_shape(_once(reports, Point.of))
        merged["ceiling"] = first["ceiling"] | {name: rate for name, rate in reports[-1]["ceiling"].items() if name == "after"}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(merged, indent=1) + "\n")
    return merged


def _read(path: Path) -> dict:
    """A report of any `strobe bench` that has parts. ValueError if the file is anything else."""
    try:
        return decode.load(path)
    except ValueError:
        return load(path)


def _once(reports: Sequence[dict], of: Callable[[dict], Hashable]) -> list[dict]:
    """The finished points of all reports. ValueError if one is there twice. of: gives the point of an entry."""
    points = [facts for report in reports for facts in report["points"] if facts.get("finished", True)]
    seen = set()
    for point in map(of, points):
        if point in seen:
            raise ValueError(f"merge needs points that were measured once, got {point} in two reports")
        seen.add(point)
    return points


_OF_A_PART = ("date", "command", "stopped", "ceiling", "telemetry", "read_gb_s", "before", "after")
"""What a merged report keeps of each part."""

_MUST_AGREE = ("GPU", "commit", "source of the kernels", "versions", "phase", "protocol", "contenders", "inputs")


def _facts(report: dict) -> tuple:
    device = report["device"]
    versions = {name: device.get(name) for name in ("packages", "driver", "cuda", "cudnn", "python")}
    commit, kernels = device.get("commit"), report.get("kernels")
    protocol = report.get("protocol") or (report["rounds"], report["launches"])
    ran = (report["what"], protocol, report["contenders"], report.get("inputs", "normal"))
    return (device["name"], commit, kernels, versions, *ran)


def _missing(reports: list[dict]) -> str | None:
    """Why points of the plan are missing, in words: parts that were not given, or that stopped early. None if all are there."""
    parts = [tuple(report.get("part", (1, 1))) for report in reports]
    wanted = {(n, parts[0][1]) for n in range(1, parts[0][1] + 1)}
    lines = [f"part {n} of {of} was not measured" for n, of in sorted(wanted - set(parts))]
    lines += [report["stopped"] for report in reports if report["stopped"] and not report["stopped"].endswith(" alone")]
    return "; ".join(lines) or None
