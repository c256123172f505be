"""Facts that belong to a measurement: when and how it was made (date, command, commit, kernels), and on what (versions, clocks,
power)."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

import strobe
from strobe.lab.pages.sources import sources
from strobe_cli.options import command_given

PACKAGES = (
    *("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend"),
    *("tokenspeed-fa3", "xformers"),
)
_FIELDS = {
    "sm_clock_mhz": "clocks.sm",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "memory_clock_mhz": "clocks.mem",
}


def provenance(device: torch.device | str, command: str | None = None) -> dict:
    """The first entries of every result: when, by which command and on what it was made, and the hash of each kernel file
    (`strobe.lab.pages.sources`).

    device: where it was measured, or in words what it was computed for. command: None: that of the running script.
    `["device"]["commit"]` ends with "+" if the source was changed since that commit.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command or _script(),
        "device": {"name": device, **_software()} if isinstance(device, str) else describe(device),
        "kernels": sources(),
    }


def _software() -> dict:
    packages = {name: _version(name) for name in PACKAGES}
    facts: dict = {"python": platform.python_version(), "packages": packages, "strobe": strobe.__version__}
    return facts | {"commit": commit()}


def _script() -> str:
    """The running command, without the files that it writes, and with the script's path as seen from the repository."""
    path = Path(sys.argv[0]).resolve()
    root = Path(strobe.__file__).parents[2]
    return command_given(sys.argv[1:], f"python {path.relative_to(root) if path.is_relative_to(root) else path.name}")


def save(path: Path, result: dict, indent: int | None = 1) -> Path:
    """Writes a result as JSON and returns the path. A file that holds the same result, of a commit without changes, stays as it
    is, so that its date and commit are those of the first time."""
    text = json.dumps(result, indent=indent) + "\n"
    if not (path.exists() and _stays(json.loads(path.read_text()), json.loads(text))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def _stays(old: dict, new: dict) -> bool:
    made = old.get("device", {}).get("commit") or "+"
    said = [{key: value for key, value in result.items() if key not in ("date", "device", "kernels")} for result in (old, new)]
    return said[0] == said[1] and not made.endswith("+")


def describe(device: torch.device) -> dict:
    """The device, and the versions of all software that takes part, as a JSON object."""
    facts = {"kind": device.type, **_software()}
    if device.type == "cpu":
        return facts | {"name": "CPU", "processor": platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "driver": _nvidia_smi(["driver_version"], device)[0],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this source: $STROBE_COMMIT, for copies without their repository; else that of the checkout, with "+" if
    its source was changed since; else None."""
    source = Path(strobe.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    if given := os.environ.get("STROBE_COMMIT"):
        return given
    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _selector(device: torch.device) -> list[str]:
    """nvidia-smi's option for this device: its UUID, since CUDA_VISIBLE_DEVICES renumbers the GPUs for torch alone."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return ["-i", f"GPU-{uuid}"] if uuid is not None else []


def _nvidia_smi(fields: list[str], device: torch.device) -> list[str | None]:
    """nvidia-smi's answer for each field; None where nvidia-smi is absent or has no answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *_selector(device)]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return [None] * len(fields)
    return [part.strip() for part in line.split(",")]


def snapshot(device: torch.device) -> dict[str, float]:
    """Clocks, power and temperature of a GPU now, as far as it reports them; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return parse_sample(",".join(value or "" for value in _nvidia_smi(list(_FIELDS.values()), device)))


@dataclass(frozen=True)
class _Sample:
    when: float
    values: dict[str, float]


class Telemetry:
    """Samples clocks, power and temperature of a GPU while it works, by nvidia-smi in the background, every 200 ms.

    Without nvidia-smi there are no samples, and `since` returns {}.
    """

    def __init__(self, device: torch.device):
        self._device, self._samples = device, list[_Sample]()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Telemetry:
        if self._device.type == "cuda" and shutil.which("nvidia-smi"):
            query = [f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits", "-lms", "200"]
            command = ["nvidia-smi", *query, *_selector(self._device)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._process is not None:
            self._process.terminate()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sample = parse_sample(line)
            if sample:
                self._samples.append(_Sample(time.monotonic(), sample))

    def since(self, start: float) -> dict[str, float]:
        """Medians of the samples taken since `start` (time.monotonic()), and how many there were."""
        taken = [sample.values for sample in self._samples if sample.when >= start]
        if not taken:
            return {}
        by_name = {name: [values[name] for values in taken if name in values] for name in _FIELDS}
        return {name: median(values) for name, values in by_name.items() if values} | {"samples": len(taken)}


def parse_sample(line: str) -> dict[str, float]:
    """The values in a line of nvidia-smi's CSV, by name, without those that this GPU does not report ("[N/A]")."""
    parts = [part.strip() for part in line.split(",")]
    return {name: float(part) for name, part in zip(_FIELDS, parts, strict=False) if part.replace(".", "", 1).isdigit()}


class Watchdog:
    """Calls `on_hang(what)` from a thread of its own when `expect` was not called again in time, as when a GPU kernel hangs."""

    def __init__(self, on_hang: Callable[[str], None]):
        self._on_hang, self._what, self._deadline = on_hang, "", float("inf")
        self._stop = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()

    def expect(self, what: str, seconds: float) -> None:
        """Says that `what` begins now and should take less than `seconds`."""
        self._what, self._deadline = what, time.monotonic() + seconds

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")
                self._on_hang(self._what)
